//! The controller: watches, asks, lets [`target_writes`] and [`Decider`] decide, and writes.
//!
//! Reads come from watches, except for the number of pods of a target. A pass is made when something it reads has changed,
//! when its own wake-up has come, and when a look at the load, once a second, makes another number of pods desired; load is
//! asked of pods and activators, not of the API server.
//!
//! - **Conflict (409)**: another client wrote in between. Status and service are patched with the version they were read
//!   at, so nothing is overwritten; the pass is made again after the watch has brought the new version.
//! - **Not found (404)**: the object or its target was deleted in between; the pass is made again, if the object is still
//!   there.
//! - **Gone (410)**, and a watch that ends: the watcher lists again, or goes on from where it was.
//! - **Start**: no pass is made before all of its inputs were listed once, so an unknown object never counts as missing.

use super::api::{CLASS, PodAutoscaler, SERVICE_NAME, SERVICE_TYPE, SKS_NAME, ServerlessService};
use super::decider::{Decider, Policy, TICK, load};
use super::outside::{Outside, Waiting};
use super::settings::{Defaults, Settings};
use super::target_writes::{self, Observed, Pass, Write};
use crate::kubernetes::controller_metrics::{KNATIVE_DESIRED, KNATIVE_PASSES, KNATIVE_TARGETS, Metrics};
use crate::kubernetes::said;
use futures::{FutureExt as _, Stream, StreamExt as _, TryStreamExt as _, stream};
use gshare_core::Timestamp;
use gshare_core::profile::RequestRate;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::jiff;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::controller::{self, Action, ReconcileRequest, applier, trigger_owners, trigger_self};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Most passes at once, and most questions to pods and activators at once.
const AT_ONCE: usize = 16;
/// Pause after a conflict: the watch is about to bring the new version.
const AFTER_CONFLICT: Duration = Duration::from_millis(200);
/// After anything else that went wrong.
const AFTER_ERROR: Duration = Duration::from_secs(5);
/// Name of the writer at the API server.
pub const MANAGER: &str = "gshare-knative";

/// The current time, on two clocks.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// For times that objects carry.
    pub wall: jiff::Timestamp,
    /// For the engines.
    pub uptime: Timestamp,
}

/// Settings of a controller.
#[derive(Debug, Clone)]
pub struct Config {
    /// The class of this controller's objects.
    pub class: String,
    /// The deciding engine.
    pub policy: Policy,
    /// Defaults for missing annotations.
    pub defaults: Defaults,
    /// Namespace of Knative.
    pub system_namespace: String,
    /// Figures of the controller.
    pub metrics: Metrics,
}

/// Why a pass was broken off.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// The failed request, and the API server's error.
    #[error("{0}: {reason}", reason = said(.1))]
    Api(&'static str, Box<kube::Error>),
    /// A setting that the engine refuses.
    #[error(transparent)]
    Decider(#[from] super::decider::DeciderError),
}

impl PassError {
    fn retry_after(&self) -> Duration {
        match self {
            // An object that exists already is a conflict too.
            Self::Api(_, error) if matches!(&**error, kube::Error::Api(status) if status.code == 409) => {
                AFTER_CONFLICT
            }
            _ => AFTER_ERROR,
        }
    }
}

type Key = (String, String);

/// Namespace and name of an object.
fn key(pa: &PodAutoscaler) -> Key {
    (pa.namespace().unwrap_or_default(), pa.name_any())
}

/// The controller.
pub struct Shell {
    client: Client,
    config: Config,
    outside: Arc<dyn Outside>,
    clock: Box<dyn Fn() -> Moment + Send + Sync>,
    services: Store<ServerlessService>,
    slices: Store<EndpointSlice>,
    activators: Store<EndpointSlice>,
    deciders: Mutex<BTreeMap<Key, Decider>>,
}

gshare_core::debug_fields!(Shell { config });

impl Shell {
    /// A controller that reads services, and the endpoints of private services and activators, from these stores.
    pub fn new(
        client: Client,
        config: Config,
        outside: Arc<dyn Outside>,
        clock: Box<dyn Fn() -> Moment + Send + Sync>,
        services: Store<ServerlessService>,
        slices: [Store<EndpointSlice>; 2],
    ) -> Self {
        let [slices, activators] = slices;
        let deciders = Mutex::default();
        Self { client, config, outside, clock, services, slices, activators, deciders }
    }

    fn deciders(&self) -> MutexGuard<'_, BTreeMap<Key, Decider>> {
        self.deciders.lock()
    }

    /// Waits until all inputs of a pass were listed once.
    async fn listed(&self) {
        // An error means that the watch has ended, and the controller with it.
        let _ = futures::join!(self.services.wait_until_ready(), self.slices.wait_until_ready());
    }

    /// Whether the object is ours to look after.
    fn is_ours(&self, pa: &PodAutoscaler) -> bool {
        pa.metadata.deletion_timestamp.is_none() && pa.annotations().get(CLASS) == Some(&self.config.class)
    }

    /// One pass for one object. Answers when to look again if nothing happens.
    ///
    /// # Errors
    /// If the API server refuses a write; earlier writes stay.
    pub async fn pass(&self, pa: &PodAutoscaler) -> Result<Option<Duration>, PassError> {
        let key = key(pa);
        if !self.is_ours(pa) {
            self.deciders().remove(&key);
            return Ok(None);
        }
        let now = (self.clock)();
        let defaults = &self.config.defaults;
        let settings = match Settings::of(pa, defaults).and_then(|settings| {
            target_of(pa)?;
            Ok(settings)
        }) {
            Ok(settings) => settings,
            Err(why) => {
                self.deciders().remove(&key);
                return self.write(pa, None, target_writes::refuse_annotation(pa, &why, now.wall)).await;
            }
        };
        let sks = self.services.get(&ObjectRef::new(&key.1).within(&key.0));
        let private = private_service(sks.as_deref());
        let ready = pods(&self.slices, &key.0, private).len();
        let replicas = self.replicas(pa).await?;
        let desired = {
            let mut deciders = self.deciders();
            match deciders.get_mut(&key) {
                Some(decider) => {
                    decider.retune(&settings, now.uptime)?;
                    decider.desired()
                }
                None => {
                    let pods = replicas.unwrap_or(0);
                    let patience = defaults.progress_deadline;
                    let decider = Decider::new(&settings, self.config.policy, patience, now.uptime, pods);
                    deciders.insert(key.clone(), decider?);
                    None
                }
            }
        };
        let mut observed = Observed {
            pa,
            sks: sks.as_deref(),
            replicas,
            ready: u32::try_from(ready).unwrap_or(u32::MAX),
            desired,
            backed: false,
        };
        let mut pass = target_writes::reconcile(&observed, &settings, defaults, now.wall);
        if pass.probe {
            let service =
                observed.sks.and_then(|sks| sks.status.as_ref()).map(|status| &*status.service_name);
            let h2c = pa.spec.protocol_type == "h2c";
            observed.backed = self.outside.is_backed(&key.0, service.unwrap_or_default(), h2c).await;
            pass = target_writes::reconcile(&observed, &settings, defaults, now.wall);
        }
        self.write(pa, sks.as_deref(), pass).await
    }

    async fn replicas(&self, pa: &PodAutoscaler) -> Result<Option<u32>, PassError> {
        let (namespace, name) = (pa.namespace().unwrap_or_default(), target_name(pa));
        let targets: Api<Deployment> = Api::namespaced(self.client.clone(), &namespace);
        match targets.get_scale(name).await {
            // A Scale leaves out a zero. A Deployment without a number was given one when it was stored.
            Ok(scale) => {
                let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
                Ok(Some(u32::try_from(replicas).unwrap_or(0)))
            }
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
            Err(error) => Err(PassError::Api("read the scale", Box::new(error))),
        }
    }

    async fn write(
        &self,
        pa: &PodAutoscaler,
        sks: Option<&ServerlessService>,
        pass: Pass,
    ) -> Result<Option<Duration>, PassError> {
        let namespace = pa.namespace().unwrap_or_default();
        let name = pa.name_any();
        let patch = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let failed = |what| move |error| PassError::Api(what, Box::new(error));
        let services = || Api::<ServerlessService>::namespaced(self.client.clone(), &namespace);
        for write in pass.writes {
            match write {
                Write::Scale(replicas) => {
                    let targets: Api<Deployment> = Api::namespaced(self.client.clone(), &namespace);
                    let body = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
                    let written = targets.patch_scale(target_name(pa), &patch, &body).await;
                    written.map_err(failed("scale the target"))?;
                }
                Write::CreateSks(sks) => {
                    let post =
                        PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
                    let written = services().create(&post, &sks).await;
                    written.map_err(failed("create the service"))?;
                }
                Write::PatchSks(spec) => {
                    let version = sks.and_then(|sks| sks.metadata.resource_version.as_deref());
                    let body = versioned(version, "spec", json!(spec));
                    let written = services().patch(&name, &patch, &body).await;
                    written.map_err(failed("patch the service"))?;
                }
                Write::Status(status) => {
                    let pas: Api<PodAutoscaler> = Api::namespaced(self.client.clone(), &namespace);
                    let version = pa.metadata.resource_version.as_deref();
                    let body = versioned(version, "status", json!(status));
                    let written = pas.patch_status(&name, &patch, &body).await;
                    written.map_err(failed("write the status"))?;
                }
            }
        }
        Ok(pass.wake)
    }

    /// Looks at the load of this controller's objects in `all` that had a pass before. Returns the objects with a new
    /// desired number of pods.
    pub async fn look(&self, all: &[Arc<PodAutoscaler>]) -> Vec<ObjectRef<PodAutoscaler>> {
        let ours: BTreeMap<Key, _> =
            all.iter().filter(|pa| self.is_ours(pa)).map(|pa| (key(pa), pa)).collect();
        let known: Vec<(Key, Settings)> = {
            let mut deciders = self.deciders();
            deciders.retain(|key, _| ours.contains_key(key));
            deciders.iter().map(|(key, decider)| (key.clone(), decider.settings().clone())).collect()
        };
        if known.is_empty() {
            return Vec::new();
        }
        let waiting = self.waiting().await;
        let looks = stream::iter(known).map(|(key, settings)| {
            let waiting = waiting.as_ref().map(|all| all.get(&key).copied().unwrap_or(0.0));
            async move {
                let (ready, load) = self.load(&key, &settings, waiting).await;
                (key, ready, load)
            }
        });
        let looks: Vec<_> = looks.buffer_unordered(AT_ONCE).collect().await;
        let now = (self.clock)();
        let mut deciders = self.deciders();
        let mut changed = Vec::new();
        for (key, ready, load) in looks {
            let Some(decider) = deciders.get_mut(&key) else { continue };
            let before = decider.desired();
            if decider.observe(now.uptime, ready, load) != before {
                changed.extend(ours.get(&key).map(|pa| ObjectRef::from_obj(&***pa)));
            }
        }
        let metrics = &self.config.metrics;
        metrics.set(&KNATIVE_TARGETS, None, deciders.len());
        let desired = deciders.values().filter_map(Decider::desired).sum::<u32>();
        metrics.set(&KNATIVE_DESIRED, None, desired as usize);
        changed
    }

    /// Requests at activators by namespace and revision; `None`: there is none, or one did not answer.
    async fn waiting(&self) -> Option<Waiting> {
        let addresses = pods(&self.activators, &self.config.system_namespace, ACTIVATOR);
        let asked = stream::iter(&addresses).map(|address| self.outside.activator(*address));
        let said: Vec<_> = asked.buffer_unordered(AT_ONCE).try_collect().await.ok()?;
        let mut all = Waiting::new();
        for (key, requests) in said.into_iter().flatten() {
            *all.entry(key).or_insert(0.0) += requests;
        }
        (!addresses.is_empty()).then_some(all)
    }

    async fn load(&self, key: &Key, settings: &Settings, waiting: Option<f64>) -> (u32, Option<RequestRate>) {
        let sks = self.services.get(&ObjectRef::new(&key.1).within(&key.0));
        let addresses = pods(&self.slices, &key.0, private_service(sks.as_deref()));
        let asked = stream::iter(&addresses).map(|address| self.outside.pod(*address));
        let said = asked.buffer_unordered(AT_ONCE).filter_map(|said| std::future::ready(said.ok()));
        let said: Vec<_> = said.collect().await;
        let ready = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        (ready, load(settings.metric, ready, &said, waiting))
    }
}

/// The service of the activators.
const ACTIVATOR: &str = "activator-service";

/// A merge patch that is refused if the object is no longer as it was read.
fn versioned(version: Option<&str>, part: &str, value: Value) -> Patch<Value> {
    let mut body = json!({ "metadata": { "resourceVersion": version } });
    body[part] = value;
    Patch::Merge(body)
}

fn private_service(sks: Option<&ServerlessService>) -> &str {
    sks.and_then(|sks| sks.status.as_ref()).map_or("", |status| &status.private_service_name)
}

/// Addresses of the pods behind a service that take requests.
fn pods(slices: &Store<EndpointSlice>, namespace: &str, service: &str) -> BTreeSet<IpAddr> {
    let mut found = BTreeSet::new();
    for slice in slices.state() {
        let labels = slice.labels();
        if service.is_empty()
            || slice.metadata.namespace.as_deref() != Some(namespace)
            || labels.get(SERVICE_NAME).is_none_or(|name| name != service)
        {
            continue;
        }
        for endpoint in &slice.endpoints {
            // Nothing said means ready.
            let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true);
            if ready {
                found.extend(endpoint.addresses.first().and_then(|address| address.parse::<IpAddr>().ok()));
            }
        }
    }
    found
}

fn target_name(pa: &PodAutoscaler) -> &str {
    pa.spec.scale_target_ref.name.as_deref().unwrap_or_default()
}

/// A target of another kind would need rights to its scale.
fn target_of(pa: &PodAutoscaler) -> Result<(), super::settings::Invalid> {
    let target = &pa.spec.scale_target_ref;
    let (version, kind) =
        (target.api_version.as_deref().unwrap_or_default(), target.kind.as_deref().unwrap_or_default());
    if (version, kind) == ("apps/v1", "Deployment") && !target_name(pa).is_empty() {
        return Ok(());
    }
    Err(super::settings::Invalid {
        field: "spec.scaleTargetRef".to_owned(),
        value: format!("{version} {kind} {}", target_name(pa)),
        bound: "an apps/v1 Deployment".to_owned(),
    })
}

/// Runs the controller until `stop`.
pub async fn run(
    client: Client,
    config: Config,
    outside: Arc<dyn Outside>,
    clock: Box<dyn Fn() -> Moment + Send + Sync>,
    stop: impl Future<Output = ()>,
) {
    let (objects, objects_writer) = reflector::store();
    let (services, services_writer) = reflector::store();
    let (slices, slices_writer) = reflector::store();
    let (activators, activators_writer) = reflector::store();

    let watched = watcher(Api::<PodAutoscaler>::all(client.clone()), watcher::Config::default());
    let own = trigger_self(watched.default_backoff().reflect(objects_writer).applied_objects(), ());
    let watched = watcher(Api::<ServerlessService>::all(client.clone()), watcher::Config::default());
    let owned = trigger_owners(watched.default_backoff().reflect(services_writer).touched_objects(), (), ());
    let private = watcher::Config::default().labels(&format!("{SERVICE_TYPE}=Private"));
    let watched = watcher(Api::<EndpointSlice>::all(client.clone()), private);
    let parts = watched.default_backoff().reflect(slices_writer).touched_objects();
    let parts = parts.try_filter_map(|slice| std::future::ready(Ok(owner_of(&slice))));
    let (changed, changes) = futures::channel::mpsc::unbounded();
    let changes = changes.map(Ok::<_, watcher::Error>);
    let queue = stream::select_all([own.boxed(), owned.boxed(), parts.boxed(), changes.boxed()]);

    let part = watcher::Config::default().labels(&format!("{SERVICE_NAME}={ACTIVATOR}"));
    let watched = watcher(Api::namespaced(client.clone(), &config.system_namespace), part);
    let gates = watched.default_backoff().reflect(activators_writer).for_each(|said| {
        if let Err(error) = said {
            eprintln!("knative: activators: {error}");
        }
        std::future::ready(())
    });

    let shell = Shell::new(client, config, outside, clock, services, [slices, activators]);
    let shell = Arc::new(shell);
    let at_once = u16::try_from(AT_ONCE).unwrap_or(u16::MAX);
    let passes = passes(&shell, &objects, queue, controller::Config::default().concurrency(at_once));
    let looks = async {
        let mut ticks = tokio::time::interval(Duration::from_nanos(TICK.as_nanos()));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            for object in shell.look(&objects.state()).await {
                // The message is not heard once passes have ended.
                let _ = changed.unbounded_send(ReconcileRequest::from(object));
            }
        }
    };
    futures::pin_mut!(passes, looks, gates, stop);
    tokio::select! {
        () = passes => {}
        () = looks => {}
        () = gates => {}
        () = stop => {}
    }
}

/// Makes passes as `queue` asks for them.
async fn passes(
    shell: &Arc<Shell>,
    objects: &Store<PodAutoscaler>,
    queue: impl Stream<Item = Result<ReconcileRequest<PodAutoscaler>, watcher::Error>> + Send + 'static,
    config: controller::Config,
) {
    let pass = |pa: Arc<PodAutoscaler>, shell: Arc<Shell>| {
        async move {
            shell.listed().await;
            let passed = shell.pass(&pa).await;
            let result = if passed.is_ok() { "done" } else { "failed" };
            shell.config.metrics.add(&KNATIVE_PASSES, Some(("result", result)), 1.0);
            let wake = passed?;
            Ok(wake.map_or_else(Action::await_change, Action::requeue))
        }
        .boxed()
    };
    let failed =
        |_: Arc<PodAutoscaler>, error: &PassError, _: Arc<Shell>| Action::requeue(error.retry_after());
    let done = applier(pass, failed, Arc::clone(shell), objects.clone(), queue, config);
    let done = done.for_each(|done| {
        match done {
            // Deleted before its turn came.
            Ok(_) | Err(controller::Error::ObjectNotFound(_)) => {}
            Err(error) => eprintln!("knative: {error}"),
        }
        std::future::ready(())
    });
    done.await;
}

/// The object that owns the pods in an endpoint slice of a private service.
fn owner_of(slice: &EndpointSlice) -> Option<ReconcileRequest<PodAutoscaler>> {
    let name = slice.labels().get(SKS_NAME)?;
    Some(ObjectRef::new(name).within(slice.metadata.namespace.as_deref()?).into())
}
