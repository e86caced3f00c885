//! Functions, measurements and secrets as objects of the cluster, from which a new leader goes on.
//!
//! A deployment by REST writes the `GpuFunction` and deploys it. The watch of `GpuFunction`s deploys what differs from the host: an object
//! of another client, a new spec, other replicas. So both ways have one check, and the watch of our own write changes nothing. The status has
//! the measurement, and the conditions with the reasons.

use super::function::{GpuFunction, GpuFunctionSpec, GpuFunctionStatus, in_fields};
use super::pod_spec::{FUNCTION, own_name};
use super::pods::{MANAGER, Pods};
use super::scope::Scope;
use super::watching::watch;
use super::writes::{Fair, Tenant, Turns, answered, payer, post};
use super::{hash, said};
use crate::api::{ApiError, FunctionDeployment};
use crate::host::{Brief, Version};
use crate::records::{Profile, Record};
use crate::routes::App;
use crate::trials::Measured;
use axum::http::StatusCode;
use futures::stream::FuturesUnordered;
use futures::{StreamExt as _, TryStreamExt as _};
use gshare_core::TenantId;
use gshare_sched::platform::Rejection;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, ObjectMeta, Time};
use k8s_openapi::{ByteString, jiff};
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use kube::{Api, Resource as _, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Between two looks at the host for changed statuses. A look makes a request for a changed status only.
const LOOK: Duration = Duration::from_millis(500);
/// Attempts of a write beside other writers of the object.
const ATTEMPTS: usize = 5;
/// Label of the secrets that clients of the host made.
const SECRET: &str = "gshare.io/secret";
/// Reason of a training job that is done.
const COMPLETED: &str = "Completed";

/// The objects of the host's namespaces. Functions have the names by which the host knows them.
#[derive(Debug)]
pub struct Objects {
    /// Their namespaces.
    pub scope: Scope,
    secrets: Api<Secret>,
    /// The newest versions that were seen.
    known: Mutex<BTreeMap<String, GpuFunction>>,
    /// Measurements that the statuses do not have yet.
    measured: Mutex<BTreeMap<String, Option<Profile>>>,
    /// Why a function's newest object is not deployed.
    refused: Mutex<BTreeMap<String, String>>,
    /// The last specs without a fault.
    serving: Mutex<BTreeMap<String, Value>>,
    turns: Arc<Turns>,
}

/// A change of a function, from the watch.
#[derive(Debug)]
enum Change {
    Is(GpuFunction),
    Gone(GpuFunction),
}

/// The newest change of each function that has one, in turns of the tenants: a tenant with many holds up no other.
#[derive(Debug, Default)]
struct Changes {
    line: Mutex<(Fair<String>, BTreeMap<String, Change>)>,
    came: Notify,
}

impl Changes {
    fn add(&self, tenant: Tenant, name: String, change: Change) {
        let (names, newest) = &mut *self.line.lock();
        if newest.insert(name.clone(), change).is_none() {
            names.push(tenant, false, name);
        }
        self.came.notify_one();
    }

    fn take(&self) -> Option<Change> {
        let (names, newest) = &mut *self.line.lock();
        names.pop().and_then(|name| newest.remove(&name))
    }
}

fn error(error: &kube::Error) -> ApiError {
    match error {
        kube::Error::Api(status) if (400..500).contains(&status.code) => ApiError::bad(said(error)),
        _ => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, format!("the API server: {}", said(error))),
    }
}

impl Objects {
    /// The objects of these namespaces, and the secrets of the host's own.
    pub fn new(scope: Scope, turns: Arc<Turns>) -> Self {
        Self {
            secrets: Api::namespaced(scope.client.clone(), &scope.home),
            scope,
            known: Mutex::default(),
            measured: Mutex::default(),
            refused: Mutex::default(),
            serving: Mutex::default(),
            turns,
        }
    }

    /// The function of an object.
    pub fn service(&self, object: &GpuFunction) -> String {
        self.scope.service(&object.name_any(), object.metadata.namespace.as_deref())
    }

    /// An object as a record.
    pub fn record_of(&self, object: &GpuFunction) -> Record {
        let created = object.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_millisecond());
        let created_ms = u64::try_from(created).unwrap_or(0);
        let deployment = object.spec.deployment(&self.service(object));
        Record { deployment, created_ms, replicas: object.spec.replicas }
    }

    async fn read(&self, service: &str) -> Result<Option<GpuFunction>, kube::Error> {
        answered(self.scope.beside::<GpuFunction>(service).get_opt(own_name(service))).await
    }

    fn leads(&self) -> Result<(), ApiError> {
        let why = match () {
            () if self.turns.fence.is_open() => return Ok(()),
            () if self.turns.fence.is_over() => "another host leads",
            () => "the host could not keep its lease: try again once the API server answers",
        };
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why))
    }

    /// Reads all functions.
    ///
    /// # Errors
    /// The API server's.
    pub async fn list(&self) -> Result<Vec<GpuFunction>, kube::Error> {
        let all = self.scope.api::<GpuFunction>().list(&ListParams::default()).await?.items;
        let named = all.iter().map(|object| (self.service(object), object.clone()));
        *self.known.lock() = named.collect();
        Ok(all)
    }

    fn see(&self, object: GpuFunction) {
        self.known.lock().insert(self.service(&object), object);
    }

    /// A function as it was last seen.
    pub fn record(&self, name: &str) -> Option<Record> {
        self.known.lock().get(name).map(|object| self.record_of(object))
    }

    /// Writes a function.
    ///
    /// # Errors
    /// 400 with a refusal of the server, 503 without an answer.
    pub async fn put(&self, record: &Record) -> Result<(), ApiError> {
        let (name, post) = (&record.deployment.service, post(MANAGER));
        let functions = self.scope.beside::<GpuFunction>(name);
        let wanted = GpuFunction::of(&record.deployment, record.replicas);
        let mut known = self.known.lock().get(name).cloned();
        for _ in 0..ATTEMPTS {
            self.leads()?;
            let written = match &known {
                Some(known) if known.spec == wanted.spec => return Ok(()),
                Some(known) => {
                    let changed = GpuFunction { spec: wanted.spec.clone(), ..known.clone() };
                    answered(functions.replace(own_name(name), &post, &changed)).await
                }
                None => answered(functions.create(&post, &wanted)).await,
            };
            match written {
                Ok(object) => {
                    self.see(object);
                    return Ok(());
                }
                // Another client was faster.
                Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => {
                    known = self.read(name).await.map_err(|why| error(&why))?;
                }
                Err(why) => return Err(error(&why)),
            }
        }
        Err(ApiError::new(StatusCode::CONFLICT, format!("function `{name}` is changed by others: try again")))
    }

    /// Deletes a function.
    ///
    /// # Errors
    /// 400 with a refusal of the server, 503 without an answer.
    pub async fn delete(&self, name: &str) -> Result<(), ApiError> {
        self.leads()?;
        let functions = self.scope.beside::<GpuFunction>(name);
        match answered(functions.delete(own_name(name), &DeleteParams::default())).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(why) => return Err(error(&why)),
            Ok(_) => {}
        }
        self.forget(name);
        Ok(())
    }

    fn forget(&self, name: &str) {
        self.known.lock().remove(name);
        self.measured.lock().remove(name);
        self.refused.lock().remove(name);
        self.serving.lock().remove(name);
    }

    /// Has the next status keep a measurement.
    pub fn keep_profile(&self, deployment: &FunctionDeployment, measured: &Measured) {
        let profile = Profile::new(deployment, measured);
        self.measured.lock().insert(deployment.service.clone(), Some(profile));
    }

    /// Has the next status keep no measurement of a function.
    pub fn forget_profile(&self, name: &str) {
        self.measured.lock().insert(name.to_owned(), None);
    }

    /// The measurement of a function, if its program is still the same.
    pub fn profile(&self, deployment: &FunctionDeployment) -> Option<Measured> {
        let name = &deployment.service;
        if let Some(profile) = self.measured.lock().get(name) {
            return profile.clone().and_then(|profile| profile.of(deployment));
        }
        let profile = self.known.lock().get(name)?.status.as_ref()?.profile.clone()?;
        serde_json::from_value::<Profile>(profile).ok()?.of(deployment)
    }

    /// Names of the secrets that clients made.
    ///
    /// # Errors
    /// 503 without an answer.
    pub async fn secrets(&self) -> Result<Vec<String>, ApiError> {
        let all = answered(self.secrets.list(&ListParams::default().labels(SECRET))).await;
        Ok(all.map_err(|why| error(&why))?.items.iter().map(|secret| secret.name_any()).collect())
    }

    /// Whether there is a secret of this name. It may be of another client of the cluster.
    ///
    /// # Errors
    /// 503 without an answer.
    pub async fn has_secret(&self, name: &str) -> Result<bool, ApiError> {
        let found = answered(self.secrets.get_opt(name)).await;
        found.map(|found| found.is_some()).map_err(|why| error(&why))
    }

    /// A secret that clients of the host made; none if there is none.
    async fn own_secret(&self, name: &str) -> Result<Option<Secret>, ApiError> {
        let found = answered(self.secrets.get_opt(name)).await.map_err(|why| error(&why))?;
        match found {
            Some(found) if !found.labels().contains_key(SECRET) => {
                let why =
                    format!("name: secret `{name}` is of another client of the cluster: change it there");
                Err(ApiError::new(StatusCode::CONFLICT, why))
            }
            found => Ok(found),
        }
    }

    /// Writes a secret.
    ///
    /// # Errors
    /// 409 for a secret of another client, 400 with a refusal of the server, 503 without an answer.
    pub async fn put_secret(&self, name: &str, value: &[u8]) -> Result<(), ApiError> {
        self.leads()?;
        let data = Some([(name.to_owned(), ByteString(value.to_owned()))].into());
        let written = match self.own_secret(name).await? {
            Some(found) => {
                answered(self.secrets.replace(name, &post(MANAGER), &Secret { data, ..found })).await
            }
            None => {
                let labels = Some([(SECRET.to_owned(), "true".to_owned())].into());
                let metadata = ObjectMeta { name: Some(name.to_owned()), labels, ..ObjectMeta::default() };
                let secret = Secret { metadata, data, ..Secret::default() };
                answered(self.secrets.create(&post(MANAGER), &secret)).await
            }
        };
        written.map(drop).map_err(|why| error(&why))
    }

    /// Removes a secret.
    ///
    /// # Errors
    /// 400 with a refusal of the server, 503 without an answer.
    pub async fn remove_secret(&self, name: &str) -> Result<(), ApiError> {
        self.leads()?;
        self.own_secret(name).await?;
        let deleted = answered(self.secrets.delete(name, &DeleteParams::default())).await;
        deleted.map(drop).map_err(|why| error(&why))
    }

    /// The tenant of a function, by its object. A function with an unknown tenant belongs to the default tenant.
    fn tenant(&self, app: &App, object: &GpuFunction) -> Tenant {
        let known = object.spec.tenant.as_ref().and_then(|name| app.tenants.get(name));
        payer(&self.service(object), known.copied().unwrap_or(TenantId::new(0)))
    }

    /// Watches the functions, and deploys what differs from the host.
    pub async fn watch(&self, app: &App) {
        let changes = Changes::default();
        let carry_out = async {
            loop {
                match changes.take() {
                    Some(Change::Is(object)) => self.apply(app, object).await,
                    Some(Change::Gone(object)) => self.deleted(app, &object).await,
                    None => changes.came.notified().await,
                }
                // Others may have come meanwhile, and pods have news.
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = self.hear(app, &changes) => {}
            () = carry_out => {}
        }
    }

    async fn hear(&self, app: &App, changes: &Changes) {
        let mut events = watch(self.scope.api::<GpuFunction>(), "");
        let mut seen = BTreeSet::new();
        let add = |object: GpuFunction, change: fn(GpuFunction) -> Change| {
            changes.add(self.tenant(app, &object), self.service(&object), change(object));
        };
        loop {
            match events.try_next().await {
                Ok(Some(watcher::Event::Init)) => seen.clear(),
                Ok(Some(watcher::Event::InitApply(object))) => {
                    seen.insert(self.service(&object));
                    add(object, Change::Is);
                }
                Ok(Some(watcher::Event::InitDone)) => {
                    let all = app.node.host().names();
                    for name in all.iter().filter(|name| !seen.contains(*name)) {
                        while let Err(why) = self.check_gone(app, name).await {
                            eprintln!("openfaas: function {name}: {}", said(&why));
                            tokio::time::sleep(LOOK).await;
                        }
                    }
                }
                Ok(Some(watcher::Event::Apply(object))) => add(object, Change::Is),
                Ok(Some(watcher::Event::Delete(object))) => add(object, Change::Gone),
                Ok(None) => return,
                Err(error) => eprintln!("openfaas: watch of functions: {error}"),
            }
        }
    }

    async fn deleted(&self, app: &App, object: &GpuFunction) {
        let _alone = app.node.changes.lock().await;
        // Another object of its name stays.
        let other = |known: &GpuFunction| known.metadata.uid != object.metadata.uid;
        let name = self.service(object);
        if !self.known.lock().get(&name).is_some_and(other) {
            self.gone(app, &name);
        }
    }

    /// Removes a function that a list was without, unless a deployment by REST has made it meanwhile. Without an answer it stays.
    async fn check_gone(&self, app: &App, name: &str) -> Result<(), kube::Error> {
        let _alone = app.node.changes.lock().await;
        if self.read(name).await?.is_none() {
            self.gone(app, name);
        }
        Ok(())
    }

    fn gone(&self, app: &App, name: &str) {
        self.forget(name);
        if app.node.host().remove(app.node.now(), name) {
            app.node.logs.forget(name);
        }
    }

    /// Whether a later state of a function is known. Generations count from 1 in each object of its name.
    async fn is_older(&self, object: &GpuFunction) -> bool {
        let (name, meta) = (self.service(object), &object.metadata);
        let known = self.known.lock().get(&name).map(|known| known.metadata.clone());
        match known {
            None => false,
            Some(known) if known.uid == meta.uid => known.generation > meta.generation,
            Some(_) => {
                let newest = self.read(&name).await;
                let other =
                    newest.is_ok_and(|newest| newest.is_none_or(|newest| newest.metadata.uid != meta.uid));
                if !other {
                    self.forget(&name);
                }
                other
            }
        }
    }

    async fn apply(&self, app: &App, object: GpuFunction) {
        let _alone = app.node.changes.lock().await;
        let record = self.record_of(&object);
        let (name, replicas, deployment) =
            (self.service(&object), object.spec.replicas, record.deployment.clone());
        if object.metadata.deletion_timestamp.is_some() || self.is_older(&object).await {
            return;
        }
        let spec = GpuFunctionSpec { replicas: None, ..object.spec.clone() };
        self.see(object);
        let newest = app.node.host().newest(&name);
        let told = match newest {
            Some(version) if version.deployment == deployment => {
                let (mut host, now) = (app.node.host(), app.node.now());
                match replicas {
                    wanted if wanted == host.replicas(&name) => Ok(()),
                    Some(wanted) => host.set_replicas(now, &name, wanted),
                    None => {
                        host.free_replicas(now, &name);
                        Ok(())
                    }
                }
            }
            _ => deploy(app, record, false),
        };
        match told {
            Ok(()) => {
                self.refused.lock().remove(&name);
                self.serves(name, &spec);
            }
            Err(error) => {
                self.refused.lock().insert(name, in_fields(&error.message));
            }
        }
    }

    fn serves(&self, name: String, spec: &GpuFunctionSpec) {
        if let Ok(spec) = serde_json::to_value(spec) {
            self.serving.lock().insert(name, spec);
        }
    }

    /// A function of an earlier leader is not deployed as its object is: deploys the version that served before the object got its fault.
    /// Without one, or if this has a fault by now, none serves.
    pub fn deploy_earlier(&self, app: &App, object: &GpuFunction, fault: &ApiError) {
        self.refused.lock().insert(self.service(object), in_fields(&fault.message));
        let spec = object.status.as_ref().and_then(|status| status.serving.clone());
        let Some(Ok(spec)) = spec.map(serde_json::from_value::<GpuFunctionSpec>) else { return };
        let earlier = GpuFunction {
            spec: GpuFunctionSpec { replicas: object.spec.replicas, ..spec.clone() },
            ..object.clone()
        };
        match deploy(app, self.record_of(&earlier), true) {
            Ok(()) => self.serves(self.service(object), &spec),
            Err(error) => eprintln!("openfaas: function {}: {}", self.service(object), error.message),
        }
    }

    /// Writes the statuses that have changed. A status that waits for its turn holds up no other look.
    pub async fn tell(&self, app: &App, pods: &Pods) {
        let (mut writes, mut under_way) = (FuturesUnordered::new(), BTreeSet::new());
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(name) = writes.next() => {
                    under_way.remove(&name);
                }
                _ = looks.tick() => {
                    for (object, kept, news) in self.changed(app, pods, &under_way) {
                        under_way.insert(self.service(&object));
                        writes.push(self.tell_of(self.tenant(app, &object), object, kept, news));
                    }
                }
            }
        }
    }

    /// Functions with a changed status: the new status, the measurement there, and the news for an Event; without those
    /// of `but`.
    fn changed(
        &self,
        app: &App,
        pods: &Pods,
        but: &BTreeSet<String>,
    ) -> Vec<(GpuFunction, Option<Option<Profile>>, Option<News>)> {
        let mut briefs = app.node.host().briefs();
        for (name, Brief { problem, .. }) in &mut briefs {
            if let Some(why) = problem
                && *why == Rejection::NeverFits.to_string()
                && let Some(version) = app.node.host().newest(name)
                && let Some(out) = pods.why_out(&version)
            {
                *why = format!("{why}: {out}");
            }
        }
        let known = self.known.lock();
        let others = known.iter().filter(|(name, _)| !but.contains(*name));
        let changed = others.filter_map(|(name, object)| {
            let refused = self.refused.lock().get(name).cloned();
            let kept = self.measured.lock().get(name).cloned();
            let before = object.status.clone().unwrap_or_default();
            let mut status = status(object, briefs.get(name), refused.as_deref());
            status.profile = match &kept {
                Some(profile) => profile.as_ref().and_then(|profile| serde_json::to_value(profile).ok()),
                None => before.profile.clone(),
            };
            // Told before the watch of a new leader has brought it.
            status.serving = self.serving.lock().get(name).cloned().or_else(|| before.serving.clone());
            if object.status.as_ref() == Some(&status) {
                return None;
            }
            let news = news(&before, &status);
            Some((GpuFunction { status: Some(status), ..object.clone() }, kept, news))
        });
        changed.collect()
    }

    /// Writes a status, and the news as an Event. Answers with the name of the function.
    async fn tell_of(
        &self,
        tenant: Tenant,
        changed: GpuFunction,
        kept: Option<Option<Profile>>,
        news: Option<News>,
    ) -> String {
        let name = self.service(&changed);
        let Some(_turn) = self.turns.take(&tenant, true).await else { return name };
        let functions = self.scope.beside::<GpuFunction>(&name);
        let post = post(MANAGER);
        match answered(functions.replace_status(own_name(&name), &post, &changed)).await {
            Ok(object) => {
                if let Some(event) = news.map(|news| event(&object, news))
                    && let Err(error) =
                        answered(self.scope.beside::<Event>(&name).create(&post, &event)).await
                {
                    eprintln!("openfaas: event of {name}: {}", said(&error));
                }
                // Measured again meanwhile: the next look keeps that.
                let mut measured = self.measured.lock();
                if measured.get(&name) == kept.as_ref() {
                    measured.remove(&name);
                }
                drop(measured);
                if self.known.lock().contains_key(&name) {
                    self.see(object);
                }
            }
            // Deleted: the watch says so.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            // Changed. The watch may have said so before a late answer brought the earlier version back.
            Err(kube::Error::Api(status)) if status.code == 409 => {
                if let Ok(Some(object)) = self.read(&name).await {
                    self.see(object);
                }
            }
            Err(error) => eprintln!("openfaas: status of {name}: {}", said(&error)),
        }
        name
    }
}

/// Whether the object as it is was a training job, and is done.
pub fn is_completed(object: &GpuFunction) -> bool {
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    let now = |one: &Condition| one.observed_generation == object.metadata.generation;
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.reason == COMPLETED && now(one))
}

/// Deploys a function that an object says. `found`: an earlier leader did so before, and its minimum is told later.
///
/// # Errors
/// 400 with the name of the field.
pub fn deploy(app: &App, record: Record, found: bool) -> Result<(), ApiError> {
    let Record { deployment, created_ms, replicas } = record;
    if deployment.service.matches('.').count() > 1 {
        return Err(ApiError::bad("metadata.name: has a dot: need a DNS label of a-z, 0-9 and -"));
    }
    let mut plan = app.plan(&deployment)?;
    app.recall(&mut plan, &deployment, true);
    let name = deployment.service.clone();
    let version = Version { deployment, plan };
    app.node.logs.open(&name);
    let mut host = app.node.host();
    match found {
        true => host.deploy_found(app.node.now(), version, created_ms, replicas),
        false => host.deploy(app.node.now(), version, created_ms, replicas),
    }
}

/// The status of a function.
fn status(object: &GpuFunction, brief: Option<&Brief>, refused: Option<&str>) -> GpuFunctionStatus {
    let generation = object.metadata.generation;
    let before = object.status.clone().unwrap_or_default();
    let (replicas, ready) = brief.map_or((0, 0), |brief| (brief.replicas, brief.ready));
    let problem = refused.map(str::to_owned).or_else(|| Some(in_fields(brief?.problem.as_ref()?)));
    let measuring = brief.and_then(|brief| brief.measuring.as_deref());
    let is_ready = brief.is_some_and(|brief| ready >= brief.least.into()) && measuring.is_none();
    let state = match () {
        () if refused.is_some() => ("Refused", "the object is not deployed as it is"),
        () if brief.is_some_and(|brief| brief.completed) => (COMPLETED, "the job is done"),
        () if measuring.is_some() => ("Measuring", "it is measured first"),
        () if !is_ready => ("Starting", "instances start"),
        () if ready == 0 => ("Idle", "the next request starts an instance"),
        () => ("Serving", "instances are ready"),
    };
    let starts = measuring.is_some() || replicas > ready || !is_ready && problem.is_none();
    let degraded = if problem.is_some() { "Problem" } else { "AsExpected" };
    let wanted = [
        ("Ready", is_ready, state.0, format!("{}: {ready} of {replicas} ready", state.1)),
        ("Progressing", starts, state.0, measuring.unwrap_or(state.1).to_owned()),
        ("Degraded", problem.is_some(), degraded, problem.unwrap_or_default()),
    ];
    let condition = |(kind, is, reason, message): (&str, bool, &str, String)| {
        let status = if is { "True" } else { "False" };
        let old = before.conditions.iter().find(|old| old.type_ == kind && old.status == status);
        Condition {
            last_transition_time: old.map_or_else(now, |old| old.last_transition_time.clone()),
            message,
            observed_generation: generation,
            reason: reason.to_owned(),
            status: status.to_owned(),
            type_: kind.to_owned(),
        }
    };
    GpuFunctionStatus {
        observed_generation: generation.unwrap_or(0),
        replicas,
        ready_replicas: ready,
        selector: format!("{FUNCTION}={}", object.name_any()),
        profile: None,
        serving: None,
        conditions: wanted.into_iter().map(condition).collect(),
    }
}

/// Longest note of an Event, in bytes.
const NOTE: usize = 1024;

/// Type, reason and note of an Event.
type News = (&'static str, String, String);

/// What an Event says of a change: a new problem as a warning, or the state without one. None: no problem came or went.
fn news(before: &GpuFunctionStatus, after: &GpuFunctionStatus) -> Option<News> {
    let of = |status: &GpuFunctionStatus, kind: &str| {
        status.conditions.iter().find(|one| one.type_ == kind).cloned()
    };
    let (old, new) = (of(before, "Degraded"), of(after, "Degraded")?);
    let is = |one: &Condition| one.status == "True";
    match (old.filter(is), is(&new)) {
        (Some(old), true) if old.message == new.message => None,
        (_, true) => Some(("Warning", new.reason, new.message)),
        (Some(_), false) => of(after, "Ready").map(|ready| ("Normal", ready.reason, ready.message)),
        (None, false) => None,
    }
}

/// An Event about a function, in its namespace.
fn event(object: &GpuFunction, (kind, reason, note): News) -> Event {
    let now = jiff::Timestamp::now();
    let uid = object.uid().unwrap_or_default();
    let id = hash(&format!("{uid} {reason} {}", now.as_nanosecond()));
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{id:016x}", object.name_any())),
            namespace: object.namespace(),
            ..ObjectMeta::default()
        },
        action: Some("Deploy".into()),
        event_time: Some(MicroTime(now)),
        note: Some(note[..note.floor_char_boundary(NOTE)].to_owned()),
        reason: Some(reason),
        regarding: Some(object.object_ref(&())),
        reporting_controller: Some(MANAGER.into()),
        reporting_instance: Some(MANAGER.into()),
        type_: Some(kind.to_owned()),
        ..Event::default()
    }
}

/// The time of day in whole seconds, as the server keeps it.
fn now() -> Time {
    let now = jiff::Timestamp::now();
    Time(jiff::Timestamp::from_second(now.as_second()).unwrap_or(now))
}
