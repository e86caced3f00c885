//! Instances as pods of a cluster: the orders of [`Host`](crate::host::Host), carried out over the API server.
//!
//! # Algorithm
//! 1. An order to run makes a pod on the node and GPU of the platform's choice ([`pod_spec`](super::pod_spec)). A creation without an
//!    answer is sent again; a refused creation is a failed start, and the platform waits before the next one.
//! 2. The watch of pods reports: a pod that is ready listens, and a pod that is over or deleted has ended. After a gap in the watch, a pod
//!    that is missing from the new list has ended; of a pod that was to end, a further deletion tells. No report comes from polling.
//! 3. An instance that is to end has its pod deleted, which is tried until the server knows no such pod. The share stays booked until the
//!    kubelet has ended the containers.
//! 4. A pod of the host that no instance has is deleted. No pod is made on its GPU before its containers have ended: the platform knows nothing
//!    of its share.
//!
//! An order to park ends the pod: the daemon of another node takes no orders from here.
//!
//! # Invariants
//! - A name is used for one pod only, so that a repeated creation makes no second pod, and a deletion reaches no other.
//! - After the end of its lease a leader sends no further write ([`Fence`]).

use super::daemons::Daemons;
use super::injection::Injected;
use super::lease::Fence;
use super::objects::Objects;
use super::places::Places;
use super::pod_spec::{FUNCTION, Given, PodOf, name, share_of, version_of};
use super::pod_state::{end_of, is_going, is_over, is_ready, refusal, still_runs};
use super::refusals::Refusals;
use super::said;
use super::scope::Scope;
use super::template::{CONTAINER, PORT, port_of, template};
use super::watching::watch;
use super::writes::{Tenant, Turns, answered, nobody, payer, post};
use crate::api::{ApiError, FunctionDeployment};
use crate::deployment::{Plan, Wants};
use crate::host::{Launch, Order};
use crate::node::Node;
use crate::running::Running;
use anyhow::Context as _;
use futures::TryStreamExt as _;
use gshare_core::{InstanceId, TenantId};
use gshared::Snapshot;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt as _};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::runtime::Handle;

/// Field manager of the host's writes.
pub const MANAGER: &str = "gshare-up";
/// Concurrent writes.
const AT_ONCE: usize = 32;
/// First and longest pause before a write is sent again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// Time in which a container may end by itself, in seconds. The platform has given its requests time before.
const GRACE: u32 = 1;
/// Folder of the measured points that functions may name.
const PROFILES: &str = "/etc/gshare/profiles";
/// Pods of one answer: ten thousand at once take more memory than the host has.
const PAGE: u32 = 500;
/// Pause between two looks at a GPU with pods that no instance has.
const LOOK: Duration = Duration::from_millis(50);

/// The pods of a host.
#[derive(Debug)]
pub struct Pods {
    scope: Scope,
    /// Part of the names of this leader's pods.
    leader: String,
    pub(super) injected: Arc<Injected>,
    /// The nodes of the cluster's GPUs.
    pub places: Mutex<Places>,
    /// By `NAMESPACE/NAME`.
    known: Mutex<BTreeMap<String, Known>>,
    /// Number of pods so far.
    made: AtomicU64,
    /// Daemons of the nodes, and the last pod of each trial with its node.
    pub(super) daemons: Daemons,
    trials: Mutex<BTreeMap<InstanceId, (String, String)>>,
    refusals: Mutex<Refusals>,
    /// Pods that no instance has, each with its node and its GPU there; without one, they are on any.
    strays: Mutex<BTreeMap<String, (String, Option<u32>)>>,
    turns: Arc<Turns>,
    runtime: Handle,
    /// Whether templates may ask for what gives a container its node.
    pub privileged: bool,
    /// The records from which a new leader goes on.
    pub objects: Objects,
}

/// A pod of an instance's process, or of a trial, which reports nothing.
#[derive(Debug, Clone)]
struct Known {
    of: Option<(InstanceId, usize)>,
    node: String,
    tenant: Tenant,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether the server has it.
    made: bool,
    killed: bool,
    address: Option<SocketAddr>,
    listens: bool,
    ended: Option<Result<(), String>>,
    /// Whether its deletion is on its way to the server.
    goes: bool,
    /// Whether the deletion is sent once more after its answer.
    again: bool,
}

/// A pod as a running copy of a program.
#[derive(Debug)]
pub struct PodProcess {
    pods: Arc<Pods>,
    node: Weak<Node>,
    name: String,
    state: Arc<Mutex<State>>,
}

impl Running for PodProcess {
    fn address(&self) -> Option<SocketAddr> {
        self.state.lock().address
    }

    fn kill(&self) {
        // The host and the end of a trial may both say so.
        if !core::mem::replace(&mut self.state.lock().killed, true) {
            self.pods.end(&self.node, self.name.clone());
        }
    }

    fn has_ended(&mut self) -> bool {
        self.state.lock().ended.is_some()
    }

    fn end(&self) -> Option<Result<(), String>> {
        self.state.lock().ended.clone()
    }
}

impl Pods {
    /// The pods of a host, which writes behind the fence. `leader` is a part of a DNS label that no leader before had.
    pub fn new(scope: Scope, leader: &str, injected: Injected, fence: Fence) -> Self {
        let turns = Turns::new(fence, AT_ONCE);
        Self {
            objects: Objects::new(scope.clone(), Arc::clone(&turns)),
            daemons: Daemons::new(scope.client.clone()),
            scope,
            leader: leader.to_owned(),
            injected: Arc::new(injected),
            places: Mutex::default(),
            known: Mutex::default(),
            made: AtomicU64::new(0),
            trials: Mutex::default(),
            refusals: Mutex::default(),
            strays: Mutex::default(),
            turns,
            runtime: Handle::current(),
            privileged: false,
        }
    }

    /// The snapshot of the daemon of a trial's node, and its name for the trial's pod. Blocks.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn snapshot(&self, instance: InstanceId) -> anyhow::Result<(Snapshot, String)> {
        let known = self.trials.lock().get(&instance).cloned();
        let (name, node) = known.context("the trial has no pod")?;
        let snapshot = self.runtime.block_on(self.daemons.snapshot(&node));
        Ok((snapshot.with_context(|| format!("the daemon of node {node}"))?, name))
    }

    /// Forgets the pods of a trial that is over.
    pub fn tried(&self, instance: InstanceId) {
        self.trials.lock().remove(&instance);
    }

    /// Carries an order out, if it is about pods.
    pub fn take(self: &Arc<Self>, node: &Arc<Node>, order: Order) -> Option<Order> {
        match order {
            Order::Run(launch) => self.run(node, &launch),
            // No pod's memory may move, and none has a model of a store: see `Host::may_park` and `suits`.
            Order::Move(_) | Order::Model(_) => eprintln!("openfaas: no pod can carry out {order:?}"),
            other => return Some(other),
        }
        None
    }

    fn run(self: &Arc<Self>, node: &Arc<Node>, launch: &Launch) {
        let (instance, index, version) = (launch.instance, launch.index, &launch.version);
        let tenant = payer(&version.deployment.service, version.plan.tenant);
        let refused = self.refusals.lock().holds(&tenant, version);
        match refused.map_or_else(|| self.make(node, launch, Some((instance, index))), Err) {
            Ok((pod, send)) => {
                // Its reports are about a known process.
                node.host().started(node.now(), instance, index, pod);
                send();
            }
            Err(why) => node.host().failed(node.now(), instance, index, why),
        }
    }

    /// The pod of a launch, and a function that has it created.
    ///
    /// # Errors
    /// If its device is gone.
    pub fn make(
        self: &Arc<Self>,
        node: &Arc<Node>,
        launch: &Launch,
        of: Option<(InstanceId, usize)>,
    ) -> Result<(PodProcess, impl FnOnce() + use<>), String> {
        let part = launch.own_parts().first().ok_or("an instance without parts")?;
        let (on, gpu, slice) = self.places.lock().of(part).ok_or("its device is gone")?;
        let share = share_of(part, node.time(part))?;
        let service = &launch.version.deployment.service;
        let name = name(service, &self.leader, self.made.fetch_add(1, Ordering::Relaxed));
        let namespace = self.scope.namespace_of(service).to_owned();
        let path = format!("{namespace}/{name}");
        let pod = PodOf {
            name: (namespace, name),
            run: gshare_runner::new_run().map_err(|error| format!("its run: {error}"))?,
            launch: launch.clone(),
            part: *part,
            share,
            place: (on.clone(), gpu),
            slice,
            injected: Arc::clone(&self.injected),
            trial: of.is_none(),
        };
        if of.is_none() {
            self.trials.lock().insert(launch.instance, (path.clone(), on.clone()));
        }
        let state = Arc::new(Mutex::new(State::default()));
        let tenant = payer(service, launch.version.plan.tenant);
        let known = Known { of, node: on, tenant, state: Arc::clone(&state) };
        self.known.lock().insert(path.clone(), known.clone());
        let (pods, weak) = (Arc::clone(self), Arc::downgrade(node));
        let process = PodProcess { pods: Arc::clone(self), node: Weak::clone(&weak), name: path, state };
        let send = move || {
            let runtime = pods.runtime.clone();
            runtime.spawn(async move { pods.create(&weak, &pod, &known).await });
        };
        Ok((process, send))
    }

    /// Sends a pod. It is made when its turn has come: of a tenant with many refused pods most are never made.
    async fn create(&self, node: &Weak<Node>, pod: &PodOf, known: &Known) {
        let Known { tenant, state, .. } = known;
        let (namespace, (on, gpu), version) = (&pod.name.0, &pod.place, &pod.launch.version);
        let name = format!("{namespace}/{}", pod.name.1);
        let api = Api::<Pod>::namespaced(self.scope.client.clone(), namespace);
        let (mut pause, mut sent) = (PAUSES.0, None);
        loop {
            let Some(turn) = self.turns.take(tenant, false).await else { return };
            // A creation without an answer may have made it, and only its repetition tells.
            if sent.is_none() && state.lock().killed {
                return self.has_ended(node, &name, Err("it was not needed any more".to_owned()));
            }
            if sent.is_none() && self.has_stray(on, *gpu) {
                drop(turn);
                tokio::time::sleep(LOOK).await;
                continue;
            }
            let again = sent.is_some();
            let refused = || self.refusals.lock().keeps(tenant, version);
            let made = sent.take().map_or_else(|| refused().map_or_else(|| pod.make(), Err), Ok);
            let made = match made {
                Ok(made) => answered(Box::pin(api.create(&post(MANAGER), sent.insert(made)))).await,
                Err(why) => return self.has_ended(node, &name, Err(why)),
            };
            drop(turn);
            match made {
                Ok(_) => break,
                // An earlier attempt has made it, and its answer was lost.
                Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => break,
                Err(error) if is_refused(&error) => {
                    let why = format!("its pod is refused: {}", said(&error));
                    self.refusals.lock().refuse(tenant, version, &why);
                    // An earlier attempt may have made it. Then the watch reports its end.
                    if again && self.delete(&name, false).await {
                        state.lock().made = true;
                        return;
                    }
                    return self.has_ended(node, &name, Err(why));
                }
                Err(error) => eprintln!("openfaas: pod {name} is not made yet: {}", said(&error)),
            }
            tokio::time::sleep(pause).await;
            // The watch may have seen it meanwhile.
            let (made, ended) = {
                let state = state.lock();
                (state.made, state.ended.is_some())
            };
            match () {
                () if ended => return,
                () if made => break,
                () => {}
            }
            pause = (pause * 2).min(PAUSES.1);
        }
        // A deletion that came earlier waits for this.
        state.lock().made = true;
        self.refusals.lock().made(tenant, version);
    }

    /// Deletes a pod, until the server has none of this name or has marked it. False: the server has none. `comes`: its creation may be on
    /// its way.
    async fn delete(&self, name: &str, comes: bool) -> bool {
        let (namespace, own) = name.split_once('/').unwrap_or_default();
        let api = Api::<Pod>::namespaced(self.scope.client.clone(), namespace);
        let mut pause = PAUSES.0;
        let parameters = DeleteParams { grace_period_seconds: Some(GRACE), ..DeleteParams::default() };
        let tenant = self.known.lock().get(name).map_or_else(nobody, |known| known.tenant.clone());
        while let Some(turn) = self.turns.take(&tenant, false).await {
            let made = || self.known.lock().get(name).is_none_or(|known| known.state.lock().made);
            // Read before: the server may make it after this deletion, and say so first.
            let is_there = !comes || made();
            let deleted = answered(api.delete(own, &parameters)).await;
            drop(turn);
            match deleted {
                Ok(_) => return true,
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    if is_there || !self.known.lock().contains_key(name) {
                        return false;
                    }
                    // Not there yet: its creation is on its way, or was never sent.
                }
                Err(error) => eprintln!("openfaas: pod {name}: {}", said(&error)),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
        true
    }

    /// Watches the pods of the host, and reports.
    pub async fn watch(self: Arc<Self>, node: Weak<Node>) {
        let mut events = watch(self.scope.api::<Pod>(), FUNCTION);
        // Of a new list: the pods that the server had before it, and those that were seen in it.
        let (mut before, mut seen) = (BTreeSet::new(), BTreeSet::new());
        loop {
            match events.try_next().await {
                Ok(Some(watcher::Event::Init)) => {
                    let made =
                        |(name, known): (&String, &Known)| known.state.lock().made.then(|| name.clone());
                    before = self.known.lock().iter().filter_map(made).collect();
                    seen.clear();
                }
                Ok(Some(watcher::Event::InitApply(pod))) => {
                    seen.insert(path_of(&pod));
                    self.see(&node, &pod);
                }
                Ok(Some(watcher::Event::InitDone)) => {
                    for name in before.difference(&seen) {
                        self.has_ended(&node, name, Err("its pod was deleted".to_owned()));
                    }
                    // Of others no event may come: made, deleted and ended in the gap.
                    let killed = |(name, known): &(&String, &Known)| {
                        !seen.contains(*name) && known.state.lock().killed
                    };
                    let left: Vec<String> =
                        self.known.lock().iter().filter(killed).map(|(name, _)| name.clone()).collect();
                    left.into_iter().for_each(|name| self.end(&node, name));
                }
                Ok(Some(watcher::Event::Apply(pod))) => self.see(&node, &pod),
                Ok(Some(watcher::Event::Delete(pod))) => {
                    let end =
                        if is_over(&pod) { end_of(&pod) } else { Err("its pod was deleted".to_owned()) };
                    self.has_ended(&node, &path_of(&pod), end);
                }
                Ok(None) => return,
                Err(error) => eprintln!("openfaas: watch of pods: {error}"),
            }
        }
    }

    /// The state of a pod, by its newest version.
    fn see(self: &Arc<Self>, node: &Weak<Node>, pod: &Pod) {
        let name = path_of(pod);
        if is_over(pod) && still_runs(pod) {
            // They hold the share until the deletion has ended them.
            if !is_going(pod) {
                self.end(node, name);
            }
            return;
        }
        let known = self.known.lock().get(&name).cloned();
        if is_over(pod) {
            if let (Some(why), Some(known), Some(node)) = (refusal(pod), &known, node.upgrade()) {
                // The node rests before another pod is made.
                self.node_refused(&node, &known.node, why);
            }
            self.has_ended(node, &name, end_of(pod));
            return self.end(node, name);
        }
        let Some(Known { of, node: on, state, .. }) = known else { return self.stray(node, pod) };
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref());
        let address: Option<IpAddr> = address.and_then(|text| text.parse().ok());
        let (news, stands) = {
            let mut state = state.lock();
            state.made = true;
            let program = pod.spec.iter().flat_map(|spec| &spec.containers).find(|one| one.name == CONTAINER);
            state.address = address.map(|ip| (ip, program.map_or(PORT, port_of)).into());
            let ready = is_ready(pod) && state.address.is_some();
            (ready && !core::mem::replace(&mut state.listens, ready), state.killed && !is_going(pod))
        };
        // A creation that was under way for long may come after the deletion.
        if stands {
            self.end(node, name);
        }
        if news {
            self.works(&on);
        }
        if let (true, Some((instance, index)), Some(node)) = (news, of, node.upgrade()) {
            node.host().listens(node.now(), instance, index);
        }
    }

    /// Ends a pod that no instance has. Its node gets no devices back before its end.
    fn stray(self: &Arc<Self>, node: &Weak<Node>, pod: &Pod) {
        let on = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        let state = State { made: true, killed: true, ..State::default() };
        let place = (on.clone(), Given::of(pod).map(|given| given.place.1));
        let known = Known { of: None, node: on, tenant: nobody(), state: Arc::new(Mutex::new(state)) };
        self.strays.lock().insert(path_of(pod), place);
        self.known.lock().insert(path_of(pod), known);
        if !is_going(pod) {
            self.end(node, path_of(pod));
        }
    }

    fn end(self: &Arc<Self>, node: &Weak<Node>, name: String) {
        let state = self.known.lock().get(&name).map(|known| Arc::clone(&known.state)).unwrap_or_default();
        {
            let mut state = state.lock();
            if core::mem::replace(&mut state.goes, true) {
                state.again = true;
                return;
            }
        }
        let (pods, node) = (Arc::clone(self), Weak::clone(node));
        self.runtime.spawn(async move {
            loop {
                if !pods.delete(&name, true).await {
                    return pods.has_ended(&node, &name, Err("its pod was deleted".to_owned()));
                }
                let mut state = state.lock();
                state.made = true;
                state.goes = core::mem::take(&mut state.again);
                if !state.goes {
                    return;
                }
            }
        });
    }

    /// A pod has ended: its host is told.
    fn has_ended(&self, node: &Weak<Node>, name: &str, end: Result<(), String>) {
        let Some(Known { of, node: on, state, .. }) = self.known.lock().remove(name) else { return };
        self.strays.lock().remove(name);
        let (listened, made, why) = {
            let mut state = state.lock();
            let why = end.as_ref().err().cloned().filter(|_| !state.killed);
            state.ended.get_or_insert(end);
            (state.listens, state.made, why)
        };
        let Some(node) = node.upgrade() else { return };
        if let Some((instance, index)) = of {
            if let Some(why) = why {
                let said =
                    if listened || !made { why } else { format!("ended before it took connections: {why}") };
                node.host().explain(instance, said);
            }
            node.has_ended(instance, index);
        }
        // Its node may have waited for this.
        self.open(&node, &on);
    }

    /// Whether a pod that was to end is left on a node.
    pub(super) fn is_left(&self, node: &str) -> bool {
        self.known.lock().values().any(|known| known.node == node && known.state.lock().killed)
    }

    /// Whether a pod that no instance has is left on a GPU.
    fn has_stray(&self, node: &str, gpu: u32) -> bool {
        self.strays.lock().values().any(|(on, of)| on == node && of.is_none_or(|of| of == gpu))
    }

    /// Takes over the pods of an earlier leader. Pods of an older version, of a trial or without a place end.
    ///
    /// # Errors
    /// The API server's.
    pub async fn adopt_all(self: &Arc<Self>, node: &Arc<Node>) -> Result<usize, kube::Error> {
        let api = self.scope.api::<Pod>();
        let (mut adopted, mut page) = (0, ListParams::default().labels(FUNCTION).limit(PAGE));
        loop {
            let pods = api.list(&page).await?;
            page.continue_token = pods.metadata.continue_.filter(|token| !token.is_empty());
            adopted += pods.items.iter().filter(|pod| self.adopt_or_end(node, pod)).count();
            if page.continue_token.is_none() {
                return Ok(adopted);
            }
        }
    }

    /// Whether a pod of an earlier leader is an instance's from now on.
    fn adopt_or_end(self: &Arc<Self>, node: &Arc<Node>, pod: &Pod) -> bool {
        if is_over(pod) {
            self.was_done(node, pod);
            if still_runs(pod) {
                self.stray(&Arc::downgrade(node), pod);
            }
            return false;
        }
        let ends = |why: &String| {
            eprintln!("openfaas: pod {} of an earlier leader ends: {why}", pod.name_any());
            self.stray(&Arc::downgrade(node), pod);
        };
        self.adopt(node, pod).inspect_err(ends).is_ok()
    }

    /// A training job that ended while no host led does not start again.
    fn was_done(&self, node: &Node, pod: &Pod) {
        let Some(given) = Given::of(pod).filter(|_| end_of(pod).is_ok()) else { return };
        let function = self.function_of(pod, &given);
        let record = self.objects.record(&function);
        if record.is_some_and(|record| version_of(&record.deployment) == given.version) {
            node.host().completed_before(&function);
        }
    }

    /// Takes over a pod of an earlier leader as the process of an instance. It is reported like a pod of this leader from now on.
    fn adopt(self: &Arc<Self>, node: &Arc<Node>, pod: &Pod) -> Result<(), String> {
        if is_going(pod) {
            return Err("it was told to".to_owned());
        }
        let given = Given::of(pod).ok_or("it states no share of a GPU")?;
        let function = self.function_of(pod, &given);
        let (on, number) = given.place;
        let gpu = self.places.lock().gpu(&on, number).ok_or("its node is not ready")?;
        // The version that serves: a newer object may have a fault.
        let version = node.host().newest(&function).ok_or("its function is gone")?;
        if version_of(&version.deployment) != given.version {
            return Err("it is of another version".to_owned());
        }
        let share = (given.time.request(), given.sm);
        let told = node.host().adopt(node.now(), &function, gpu, share);
        let instance = told.map_err(|error| error.message)?;
        let state = Arc::new(Mutex::new(State { made: true, ..State::default() }));
        let tenant = payer(&function, version.plan.tenant);
        let known = Known { of: Some((instance, 0)), node: on, tenant, state: Arc::clone(&state) };
        self.known.lock().insert(path_of(pod), known);
        let process =
            PodProcess { pods: Arc::clone(self), node: Arc::downgrade(node), name: path_of(pod), state };
        node.host().started(node.now(), instance, 0, process);
        Ok(())
    }

    /// The function of a pod, as the host knows it.
    fn function_of(&self, pod: &Pod, given: &Given) -> String {
        self.scope.service(&given.function, pod.metadata.namespace.as_deref())
    }
}

/// Namespace and name of a pod.
fn path_of(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// Whether the server will say the same again: a quota, an admission policy, an invalid pod.
fn is_refused(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if (400..500).contains(&status.code) && ![408, 409, 410, 429].contains(&status.code))
}

/// Whether a function can run in pods.
///
/// # Errors
/// 400 with the name of the field.
pub fn suits(plan: &Plan, deployment: &FunctionDeployment) -> Result<(), ApiError> {
    let image = &deployment.image;
    let why = match &plan.wants {
        _ if plan.image.is_none() => {
            format!(
                "image: `{image}`: need a container image with its registry, such as docker.io/library/{image}"
            )
        }
        _ if plan.devices > 1 => {
            format!("annotations: gshare/devices: `{}`: a pod has one GPU: need 1", plan.devices)
        }
        Wants::Training { workers: 2.., .. } => {
            "annotations: gshare/workers: the workers of a job in pods would not find each other: need 1"
                .to_owned()
        }
        _ => return template(deployment).map(drop).map_err(ApiError::bad),
    };
    Err(ApiError::bad(why))
}

/// Refuses annotations that name files of the host. The author of an object chooses them, and the host's container has the token of its
/// account and its password. Called before any of them is read.
///
/// # Errors
/// 400 with the name of the field.
pub fn check_files(deployment: &FunctionDeployment) -> Result<(), ApiError> {
    for (key, value) in deployment.annotations.iter().flatten() {
        let need = match key.as_str() {
            "gshare/model" => "a pod has its model in its image or its volumes: leave it out",
            "gshare/dag" => {
                "stages in pods would not find each other's files: need a host on the node itself"
            }
            "gshare/workload" if value == "pipeline" => {
                "stages in pods would not find each other: need inference or training"
            }
            "gshare/probe_body" => "a function in pods is measured without a body: leave it out",
            "gshare/profile" if !["auto", "none"].contains(&value.as_str()) && !is_in(PROFILES, value) => {
                "need auto, none, or a file below /etc/gshare/profiles"
            }
            _ => continue,
        };
        return Err(ApiError::bad(format!("annotations: {key}: `{value}`: {need}")));
    }
    Ok(())
}

/// Whether a path leads to a file in a folder once its links are followed.
fn is_in(folder: &str, path: &str) -> bool {
    let real = |path: &str| std::fs::canonicalize(path).ok();
    real(folder).zip(real(path)).is_some_and(|(folder, path)| path.starts_with(folder))
}

/// The tenant that pays for a function of another namespace than the host's: the tenant with the name of this namespace.
///
/// # Errors
/// 400 if it names another tenant.
pub fn tenant_of(
    deployment: &FunctionDeployment,
    tenants: &BTreeMap<String, TenantId>,
) -> Result<Option<TenantId>, ApiError> {
    let Some((_, namespace)) = deployment.service.split_once('.') else { return Ok(None) };
    match deployment.annotations.as_ref().and_then(|all| all.get("gshare/tenant")) {
        Some(other) if other != namespace => Err(ApiError::bad(format!(
            "annotations: gshare/tenant: `{other}`: need `{namespace}`, the namespace of the function, or none"
        ))),
        _ => Ok(Some(tenants.get(namespace).copied().unwrap_or(TenantId::new(0)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::{Method, Request, Response};
    use serde_json::{Value, json};

    type Asked = Request<kube::client::Body>;

    /// A pod without an instance, which is to end, and the server's side of the host's requests.
    struct Ending {
        pods: Arc<Pods>,
        state: Arc<Mutex<State>>,
        asked: tower_test::mock::Handle<Asked, Response<Body>>,
    }

    const NAME: &str = "team/f-a-0";

    fn of_the_server(kind: &str) -> Value {
        match kind {
            "Pod" => {
                json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": "f-a-0", "namespace": "team" } })
            }
            "PodList" => {
                json!({ "apiVersion": "v1", "kind": kind, "metadata": { "resourceVersion": "1" }, "items": [] })
            }
            _ => json!({ "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404 }),
        }
    }

    impl Ending {
        fn start() -> Self {
            let (mock, asked) = tower_test::mock::pair::<Asked, Response<Body>>();
            let scope =
                Scope { client: kube::Client::new(mock, "team"), home: "team".to_owned(), everywhere: false };
            let pods = Arc::new(Pods::new(scope, "a", Injected::default(), Fence::new(false)));
            let state = Arc::<Mutex<State>>::default();
            let known = Known { of: None, node: "n".to_owned(), tenant: nobody(), state: Arc::clone(&state) };
            pods.known.lock().insert(NAME.to_owned(), known);
            let process = PodProcess {
                pods: Arc::clone(&pods),
                node: Weak::new(),
                name: NAME.to_owned(),
                state: Arc::clone(&state),
            };
            process.kill();
            Self { pods, state, asked }
        }

        /// Answers the next request, of this method, after `meanwhile`.
        async fn answers(&mut self, method: &Method, kind: &str, meanwhile: impl AsyncFnOnce(&mut Self)) {
            let next = tokio::time::timeout(Duration::from_mins(1), self.asked.next_request());
            let (request, answer) = next.await.unwrap_or_else(|_| panic!("no {method}")).unwrap();
            assert_eq!(request.method(), method, "{}", request.uri());
            meanwhile(self).await;
            let code = if kind == "Status" { 404 } else { 200 };
            let body = Body::from(of_the_server(kind).to_string());
            answer.send_response(Response::builder().status(code).body(body).unwrap());
        }

        async fn until(&self, is: impl Fn(&State) -> bool) {
            let looks = async {
                while !is(&self.state.lock()) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(1), looks).await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_whose_creation_comes_after_its_deletion_ends() {
        let mut ending = Ending::start();
        // The server makes the pod after this deletion, and the answer to the creation comes first.
        ending.answers(&Method::DELETE, "Status", async |own| own.state.lock().made = true).await;
        ending.answers(&Method::DELETE, "Pod", async |_| ()).await;
        ending.until(|state| !state.goes).await;
        // A repeated creation comes later still, and a gap in the watch hides the end of the first pod.
        ending.pods.see(&Weak::new(), &serde_json::from_value(of_the_server("Pod")).unwrap());
        ending.answers(&Method::DELETE, "Pod", async |_| ()).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_was_made_and_ended_in_a_gap_of_the_watch_has_ended() {
        let mut ending = Ending::start();
        let gap = async |own: &mut Ending| {
            // A new list lacks the pod before the answers to its creation and its deletion come.
            tokio::spawn(Arc::clone(&own.pods).watch(Weak::new()));
            own.answers(&Method::GET, "PodList", async |_| ()).await;
            own.until(|state| state.again).await;
        };
        ending.answers(&Method::DELETE, "Pod", gap).await;
        let (watched, _events) = ending.asked.next_request().await.unwrap();
        assert!(watched.uri().query().is_some_and(|query| query.contains("watch=true")));
        ending.answers(&Method::DELETE, "Status", async |_| ()).await;
        ending.until(|state| state.ended.is_some()).await;
        assert!(ending.pods.known.lock().is_empty());
    }

    #[test]
    fn a_profile_is_a_file_of_its_folder_by_whatever_links() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name).to_str().unwrap().to_owned();
        let folder = at("profiles");
        std::fs::create_dir_all(at("profiles/..data")).unwrap();
        for name in ["profiles/..data/a.json", "secret"] {
            std::fs::write(at(name), "[]").unwrap();
        }
        // A ConfigMap's files are links within its folder.
        std::os::unix::fs::symlink("..data/a.json", at("profiles/a.json")).unwrap();
        std::os::unix::fs::symlink("../secret", at("profiles/b.json")).unwrap();
        assert!(is_in(&folder, &at("profiles/a.json")));
        for other in ["profiles/b.json", "profiles/../secret", "secret", "profiles/none"] {
            assert!(!is_in(&folder, &at(other)), "{other}");
        }
        assert!(!is_in(&at("none"), &at("secret")));
    }
}
