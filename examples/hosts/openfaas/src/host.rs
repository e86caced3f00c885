//! Functions by name, their processes and requests: what [`Platform`] decides, carried out.
//!
//! Nothing is decided here but what belongs to names: which version of a function serves while another one starts, and on which
//! share a function is measured. This part is told the time and starts no process itself: what is to be started goes out as
//! an [`Order`], and a shell ([`super::node`]) tells what came of it.
//!
//! # Versions
//! Each deployment of a name is a function of its own for the platform. The one before it serves until the new one has a
//! ready instance, or finds no room while the old one holds it; then the old one is removed, and requests that waited for it
//! wait for the new one.
//!
//! # Measuring
//! A function that is to be measured gets a companion: a training job of one worker with the share that is measured on, placed
//! and booked like every other job. The shell runs the trials in it. The largest of `TRIAL_SHARES` that finds room at
//! once is taken, else the smallest waits for it.

use super::api::{ApiError, FunctionDeployment};
use super::models::Errand;
use super::plan::{Plan, Wants};
use axum::http::StatusCode;
use gshare_core::platform::{
    FunctionSpec, InstanceReport, Life, Part, PlatformAction, PlatformEvent, Rejection, Work,
};
use gshare_core::profile::ProfileTable;
use gshare_core::request::{RequestId, TenantId};
use gshare_core::scale::InstanceId;
use gshare_core::{
    Bytes, Duration, Engine as _, FunctionId, GpuShare, Quota, QuotaRange, SmShare, Timestamp,
};
use gshare_runner::manager::HookedProcess;
use gshare_sched::platform::{FunctionState, FunctionStats, Platform};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::UnboundedSender;

/// Shares that functions are measured on, in per cent of time and SMs, in the order in which they are tried.
const TRIAL_SHARES: [(u16, u16); 3] = [(40, 100), (30, 50), (20, 25)];

/// What a shell has to start. It answers with [`Host::started`], or with [`Host::failed`].
#[derive(Debug, Clone)]
pub enum Order {
    /// A process of an instance.
    Run(Launch),
    /// The trials of a function; answered with [`Host::measured`].
    Measure(Launch, Arc<AtomicBool>),
    /// Something for the model store to do; needs no answer.
    Model(Errand),
}

/// A process to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The instance that it is of.
    pub instance: InstanceId,
    /// Its place among the parts of the instance.
    pub index: usize,
    /// All parts of the instance; this one's is at `index`.
    pub parts: Vec<Part>,
    /// The function's version: which deployment, and what that asks for.
    pub version: Arc<Version>,
}

impl Launch {
    /// Its device and share.
    pub fn part(&self) -> &Part {
        &self.parts[self.index]
    }
}

/// A deployment of a function.
#[derive(Debug, PartialEq)]
pub struct Version {
    /// What was deployed.
    pub deployment: FunctionDeployment,
    /// What that asks for.
    pub plan: Plan,
}

/// What becomes of a request that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// An instance is free for it.
    Go {
        /// The instance that is free.
        instance: InstanceId,
        /// Where its processes listen, stage by stage.
        ports: Vec<u16>,
    },
    /// It will not be served.
    No(Rejection),
    /// No share does for what its function wants: why.
    Hopeless(String),
}

#[derive(Debug)]
struct Function {
    serving: FunctionId,
    /// The version that takes over when it is ready.
    next: Option<FunctionId>,
    created_ms: u64,
    replicas: Option<u32>,
    invocations: u64,
    /// What versions before this one have done.
    before: Totals,
}

/// What a function has done, over all of its versions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// What the platform counts.
    pub stats: FunctionStats,
    /// Device time of its instances, in ns.
    pub gpu_ns: u64,
    /// Times that an instance was parked for another function.
    pub parked: u64,
}

impl Totals {
    fn add(&mut self, other: Self) {
        let (of, more) = (&mut self.stats, other.stats);
        of.arrived += more.arrived;
        of.answered += more.answered;
        of.within_slo += more.within_slo;
        of.rejected += more.rejected;
        of.starts += more.starts;
        of.unmet += more.unmet;
        self.gpu_ns += other.gpu_ns;
        self.parked += other.parked;
    }
}

#[derive(Debug)]
struct Known {
    version: Arc<Version>,
    /// The function that this one measures, and the share's place in [`TRIAL_SHARES`].
    measures: Option<(FunctionId, usize)>,
    gpu_ns: u64,
    parked: u64,
    /// Why an instance of it did not start, or its trials gave nothing, the last time.
    problem: Option<String>,
    /// Whether no share does for what it wants.
    hopeless: bool,
    /// Whether it was a training job, and has done its work.
    completed: bool,
    /// Progress of its trials.
    progress: Option<String>,
}

/// What an instance is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Starting,
    Ready,
    Draining,
    Parking,
    Parked,
    Unparking,
    Stopping,
}

#[derive(Debug, Default)]
struct Process {
    process: Option<HookedProcess>,
    port: u16,
    listens: bool,
    ended: bool,
    status: Option<ExitStatus>,
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    doing: Doing,
    parts: Vec<Part>,
    processes: Vec<Process>,
    requests: BTreeSet<RequestId>,
    /// Whether a process of it takes no connections any more, and will end.
    ends: bool,
    /// Set to end the trials that it runs.
    stop: Option<Arc<AtomicBool>>,
    /// Device time by process, as last heard.
    gpu_ns: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Request {
    name: String,
    turn: UnboundedSender<Turn>,
    on: Option<InstanceId>,
    since: Timestamp,
    /// Whether the instance has it: from then on it is not tried again.
    reached: bool,
}

/// An instance, to show.
#[derive(Debug, Clone, serde::Serialize)]
pub struct InstanceView {
    /// Its number.
    pub instance: InstanceId,
    /// The state in its life.
    pub life: Life,
    /// Where it runs.
    pub parts: Vec<Part>,
    /// Requests that it has.
    pub requests: usize,
    /// Its processes.
    pub pids: Vec<u32>,
    /// Names of its processes at the node's daemon.
    pub clients: Vec<String>,
}

/// What a function is doing.
#[derive(Debug, Clone)]
pub struct View {
    /// What was deployed.
    pub version: Arc<Version>,
    /// When, in ms since 1970.
    pub created_ms: u64,
    /// Requests so far.
    pub invocations: u64,
    /// Its instances.
    pub instances: Vec<InstanceView>,
    /// Requests that wait for an instance.
    pub waiting: u64,
    /// What it has done.
    pub totals: Totals,
    /// Whether it is being measured, and how far that is.
    pub measuring: Option<String>,
    /// Its measured points, once it was measured.
    pub profile: Option<ProfileTable>,
    /// GPU memory in bytes that is booked for an instance.
    pub memory: Bytes,
    /// Why an instance of it did not start, the last time.
    pub problem: Option<String>,
    /// Whether it was a training job, and has done its work.
    pub completed: bool,
}

impl View {
    /// Instances that serve, or will, and hold or wait for a device.
    pub fn replicas(&self) -> u64 {
        self.count(|life| matches!(life, Life::Starting | Life::Ready | Life::Parked))
    }

    /// Instances that serve.
    pub fn available(&self) -> u64 {
        self.count(|life| life == Life::Ready)
    }

    fn count(&self, of: impl Fn(Life) -> bool) -> u64 {
        self.instances.iter().filter(|instance| of(instance.life)).count() as u64
    }
}

/// All functions, instances and requests of this host.
#[derive(Debug)]
pub struct Host {
    platform: Platform,
    /// Memory that is booked for a function of which nothing is known.
    guess: Bytes,
    functions: BTreeMap<String, Function>,
    versions: BTreeMap<FunctionId, Known>,
    instances: BTreeMap<InstanceId, Instance>,
    requests: BTreeMap<RequestId, Request>,
    next_function: u32,
    next_request: u64,
    orders: std::sync::mpsc::Sender<Order>,
    last: Timestamp,
    /// What the platform is to be told because of its own orders.
    events: VecDeque<PlatformEvent>,
    /// The last decisions, the oldest first.
    decisions: VecDeque<Decision>,
}

/// Decisions that are kept.
const DECISIONS: usize = 200;

/// A decision of the platform, to show.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Decision {
    /// When, in ns since the host began.
    #[serde(rename = "at_ns")]
    pub at: Timestamp,
    /// What was decided and why, for people.
    pub what: String,
}

impl Host {
    /// A host without functions over a platform that knows its devices.
    pub fn new(platform: Platform, guess: Bytes, orders: std::sync::mpsc::Sender<Order>) -> Self {
        Self {
            platform,
            guess,
            functions: BTreeMap::new(),
            versions: BTreeMap::new(),
            instances: BTreeMap::new(),
            requests: BTreeMap::new(),
            next_function: 0,
            next_request: 0,
            orders,
            last: Timestamp::ZERO,
            events: VecDeque::new(),
            decisions: VecDeque::new(),
        }
    }

    /// When [`Host::deadline`] is to be called.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.platform.next_deadline()
    }

    /// Lets deadlines pass.
    pub fn deadline(&mut self, now: Timestamp) {
        self.inform(now, PlatformEvent::DeadlineReached);
    }

    /// Tells the platform of a device or a tenant.
    ///
    /// # Errors
    /// What the platform says against it.
    pub fn tell(&mut self, now: Timestamp, event: PlatformEvent) -> Result<(), ApiError> {
        self.last = self.last.max(now);
        let mut actions = Vec::new();
        let told = self.platform.handle(self.last, event, &mut actions);
        told.map_err(|error| ApiError::bad(error.to_string()))?;
        self.carry_out(actions);
        while let Some(event) = self.events.pop_front() {
            let mut actions = Vec::new();
            let learns = match &event {
                PlatformEvent::ProfileLearned { function, .. } => Some(*function),
                _ => None,
            };
            match (self.platform.handle(self.last, event, &mut actions), learns) {
                (Ok(()), _) => {}
                (Err(error), Some(function)) => self.give_up(function, &error.to_string()),
                // An instance may be reported that the platform has given up meanwhile.
                (Err(error), None) => eprintln!("openfaas: {error}"),
            }
            self.carry_out(actions);
        }
        self.change_over();
        Ok(())
    }

    /// A function was measured, and no share does for what it wants.
    fn give_up(&mut self, function: FunctionId, why: &str) {
        let Some(known) = self.versions.get_mut(&function) else { return };
        (known.problem, known.hopeless) = (Some(why.to_owned()), true);
        let name = known.version.deployment.service.clone();
        if self.functions.get(&name).is_none_or(|of| of.serving != function) {
            return;
        }
        let waits = |(id, of): (&RequestId, &Request)| (of.name == name && of.on.is_none()).then_some(*id);
        let waiting: Vec<RequestId> = self.requests.iter().filter_map(waits).collect();
        for request in waiting {
            if let Some(of) = self.requests.remove(&request) {
                let _ = of.turn.send(Turn::Hopeless(why.to_owned()));
            }
            self.events.push_back(PlatformEvent::RequestCancelled { request });
        }
    }

    fn inform(&mut self, now: Timestamp, event: PlatformEvent) {
        if let Err(error) = self.tell(now, event) {
            eprintln!("openfaas: {}", error.message);
        }
    }

    fn report(&mut self, instance: InstanceId, report: InstanceReport) {
        self.events.push_back(PlatformEvent::Instance { instance, report });
    }

    /// Deploys a function, or another version of one.
    ///
    /// # Errors
    /// When the platform refuses; nothing changed then.
    pub fn deploy(
        &mut self,
        now: Timestamp,
        version: Version,
        created_ms: u64,
        replicas: Option<u32>,
    ) -> Result<(), ApiError> {
        let name = version.deployment.service.clone();
        let spec = version.plan.spec(bounds(&version.plan, replicas), self.guess)?;
        let id = self.add(version, None);
        let told = self.tell(now, PlatformEvent::FunctionDeployed { function: id, spec: Box::new(spec) });
        if let Err(error) = told {
            self.versions.remove(&id);
            return Err(error);
        }
        let mut ousted = None;
        match self.functions.get_mut(&name) {
            Some(function) => {
                ousted = function.next.replace(id);
                (function.created_ms, function.replicas) = (created_ms, replicas);
            }
            None => {
                let (invocations, before) = (0, Totals::default());
                let function =
                    Function { serving: id, next: None, created_ms, replicas, invocations, before };
                self.functions.insert(name, function);
            }
        }
        if let Some(ousted) = ousted {
            self.drop_version(ousted);
        }
        self.change_over();
        self.settle();
        Ok(())
    }

    fn add(&mut self, version: Version, measures: Option<(FunctionId, usize)>) -> FunctionId {
        let id = FunctionId(self.next_function);
        self.next_function += 1;
        let version = Arc::new(version);
        let known = Known {
            version,
            measures,
            gpu_ns: 0,
            parked: 0,
            problem: None,
            hopeless: false,
            completed: false,
            progress: None,
        };
        self.versions.insert(id, known);
        id
    }

    /// Tells the platform what came of its orders.
    fn settle(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.inform(self.last, event);
        }
    }

    /// Versions that are ready, or that the one before is in the way of, take over.
    fn change_over(&mut self) {
        loop {
            let ready = |function: &Function| {
                let next = function.next?;
                let known = &self.versions.get(&next)?.version.plan;
                let of = |id| self.instances.values().filter(move |instance| instance.function == id);
                let view = self.platform.function(next);
                let over = of(next).any(|instance| instance.doing == Doing::Ready)
                    || of(function.serving).next().is_none()
                    || view.as_ref().is_some_and(|view| view.stats.unmet > 0)
                    || matches!(known.wants, Wants::Training { .. })
                    || view.is_some_and(|view| {
                        view.spec.min_instances == 0 && view.state == FunctionState::Deployed
                    });
                over.then_some(next)
            };
            let found = self.functions.iter().find_map(|(name, of)| Some((name.clone(), ready(of)?)));
            let Some((name, next)) = found else { return };
            if let Some(function) = self.functions.get_mut(&name) {
                function.next = None;
                let old = core::mem::replace(&mut function.serving, next);
                self.drop_version(old);
                self.settle();
            }
        }
    }

    /// The platform is to drain and forget a version, and what measures it.
    fn drop_version(&mut self, id: FunctionId) {
        let measures = |(_, known): &(&FunctionId, &Known)| known.measures.is_some_and(|(of, _)| of == id);
        let trials: Vec<FunctionId> =
            self.versions.iter().filter(measures).map(|(trial, _)| *trial).collect();
        for function in trials.into_iter().chain([id]) {
            self.events.push_back(PlatformEvent::FunctionRemoved { function });
        }
        let totals = self.totals(id);
        let name = self.versions.get(&id).map(|known| known.version.deployment.service.clone());
        if let Some(function) = name.and_then(|name| self.functions.get_mut(&name)) {
            function.before.add(totals);
        }
    }

    /// What one version has done.
    fn totals(&self, id: FunctionId) -> Totals {
        let stats = self.platform.function(id).map_or_else(FunctionStats::default, |view| view.stats);
        let known = self.versions.get(&id);
        let live = self.instances.values().filter(|instance| instance.function == id);
        let live: u64 = live.flat_map(|instance| instance.gpu_ns.values()).sum();
        Totals {
            stats,
            gpu_ns: known.map_or(0, |known| known.gpu_ns) + live,
            parked: known.map_or(0, |known| known.parked),
        }
    }

    /// Ends a function: what waits for it is refused, its instances finish what they have.
    pub fn remove(&mut self, now: Timestamp, name: &str) -> bool {
        self.last = self.last.max(now);
        let Some(function) = self.functions.remove(name) else { return false };
        for version in [function.next, Some(function.serving)].into_iter().flatten() {
            self.drop_version(version);
        }
        self.settle();
        true
    }

    /// Asks for so many instances. A function whose load scales it keeps at least so many; 0 lets the next request wake it up.
    ///
    /// # Errors
    /// When there is no such function, or more are asked for than its most.
    pub fn set_replicas(&mut self, now: Timestamp, name: &str, replicas: u32) -> Result<(), ApiError> {
        let function = self.functions.get(name).ok_or_else(|| ApiError::unknown_function(name))?;
        let (newest, created_ms) = (function.next.unwrap_or(function.serving), function.created_ms);
        let Some(known) = self.versions.get(&newest) else { return Ok(()) };
        let plan = &known.version.plan;
        if matches!(plan.wants, Wants::Training { .. }) {
            return Err(ApiError::bad("replicas: a training job has the workers that it was deployed with"));
        }
        let most = if plan.scales() { plan.bounds.1 } else { 4096 };
        if replicas > most {
            return Err(ApiError::bad(format!("replicas: {replicas}: need at most {most}")));
        }
        if replicas == 0 {
            // The scaler lets instances go when no load has come for a while; here somebody asked for it.
            let mut plan = plan.clone();
            if let Some(view) = self.platform.function(newest)
                && let (Wants::Measured, Work::Inference { profile: Some(table) }) =
                    (&plan.wants, &view.spec.work)
            {
                plan.wants = Wants::Profile { table: table.clone(), memory: Some(view.spec.memory) };
            }
            let version = Version { deployment: known.version.deployment.clone(), plan };
            return self.deploy(now, version, created_ms, Some(0));
        }
        let (min_instances, max_instances) = bounds(plan, Some(replicas));
        let changed = PlatformEvent::BoundsChanged { function: newest, min_instances, max_instances };
        self.tell(now, changed)?;
        if let Some(function) = self.functions.get_mut(name) {
            function.replicas = Some(replicas);
        }
        Ok(())
    }

    /// A new request: its turn comes over `turn`.
    ///
    /// # Errors
    /// When there is no such function, or it answers no requests.
    pub fn arrive(
        &mut self,
        now: Timestamp,
        name: &str,
        turn: UnboundedSender<Turn>,
    ) -> Result<RequestId, ApiError> {
        let function = self.functions.get_mut(name).ok_or_else(|| ApiError::unknown_function(name))?;
        function.invocations += 1;
        let function = function.serving;
        if let Some(Known { problem: Some(why), hopeless: true, .. }) = self.versions.get(&function) {
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why.clone()));
        }
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let kept = Request { name: name.to_owned(), turn, on: None, since: now, reached: false };
        self.requests.insert(request, kept);
        let told = self.tell(now, PlatformEvent::RequestArrived { request, function, deadline: None });
        if told.is_err() {
            self.requests.remove(&request);
        }
        told.map(|()| request)
    }

    /// The instance has taken the request: it is not given to another one from here on. Not so if it was given to
    /// another one already.
    pub fn reached(&mut self, request: RequestId, instance: InstanceId) -> bool {
        let Some(of) = self.requests.get_mut(&request) else { return false };
        of.reached = of.on == Some(instance);
        of.reached
    }

    /// The request is over, or its client has gone.
    pub fn end(&mut self, now: Timestamp, request: RequestId) {
        let Some(of) = self.requests.get(&request) else { return };
        let on = of.on.and_then(|instance| self.instances.get_mut(&instance));
        if on.as_ref().is_some_and(|instance| instance.ends) {
            // Its place is not free: it is over when the instance is gone.
            return;
        }
        let event = match of.on {
            None => PlatformEvent::RequestCancelled { request },
            Some(_) => {
                if let Some(instance) = on {
                    instance.requests.remove(&request);
                }
                PlatformEvent::RequestDone { request, took: now.saturating_since(of.since) }
            }
        };
        self.requests.remove(&request);
        self.inform(now, event);
    }

    /// A process took no connection, or broke one off as it ends: it is ended, and its requests get another instance.
    pub fn unreachable(&mut self, instance: InstanceId) {
        if let Some(known) = self.instances.get_mut(&instance) {
            known.ends = true;
        }
        self.kill(instance);
    }

    /// A process of an instance runs, and will listen at `port`.
    pub fn started(
        &mut self,
        now: Timestamp,
        instance: InstanceId,
        index: usize,
        process: HookedProcess,
        port: u16,
    ) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let unwanted = matches!(known.doing, Doing::Stopping | Doing::Parking);
        let trains = self.versions.get(&known.function).is_some_and(|of| of.trains());
        let Some(place) = known.processes.get_mut(index) else { return };
        if unwanted {
            process.kill();
        }
        (place.process, place.port) = (Some(process), port);
        if trains {
            // A worker does not listen: it works from its start.
            self.listens(now, instance, index);
        }
    }

    /// A process of an instance takes connections.
    pub fn listens(&mut self, now: Timestamp, instance: InstanceId, index: usize) {
        self.last = self.last.max(now);
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if let Some(process) = known.processes.get_mut(index) {
            process.listens = true;
        }
        if known.processes.iter().all(|process| process.listens) {
            let report = match known.doing {
                Doing::Starting => InstanceReport::Ready,
                Doing::Unparking => InstanceReport::Unparked,
                _ => return,
            };
            known.doing = Doing::Ready;
            if let Some(of) = self.versions.get_mut(&known.function) {
                of.problem = None;
            }
            self.report(instance, report);
            self.settle();
        }
    }

    /// Whether a process has ended; what it served has failed then.
    pub fn has_ended(&mut self, now: Timestamp, instance: InstanceId, index: usize) -> bool {
        let Some(known) = self.instances.get_mut(&instance) else { return true };
        let Some(place) = known.processes.get_mut(index) else { return true };
        let ended = place.process.as_mut().is_some_and(HookedProcess::has_ended);
        if ended {
            place.status = place.process.as_ref().and_then(HookedProcess::status);
            self.ended(now, instance, index);
        }
        ended
    }

    /// A process could not be started, or its trials gave nothing.
    pub fn failed(&mut self, now: Timestamp, instance: InstanceId, index: usize, why: String) {
        let function = self.instances.get(&instance).map(|known| known.function);
        let measured = function.and_then(|id| self.versions.get(&id)?.measures).map(|(of, _)| of);
        if let Some(of) = measured.or(function).and_then(|id| self.versions.get_mut(&id)) {
            of.problem = Some(why);
        }
        self.ended(now, instance, index);
    }

    /// Why the function of this instance does not start.
    pub fn explain(&mut self, instance: InstanceId, why: String) {
        let function = self.instances.get(&instance).map(|known| known.function);
        if let Some(of) = function.and_then(|id| self.versions.get_mut(&id)) {
            of.problem = Some(why);
        }
    }

    fn ended(&mut self, now: Timestamp, instance: InstanceId, index: usize) {
        self.last = self.last.max(now);
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if let Some(process) = known.processes.get_mut(index) {
            process.ended = true;
            process.process = None;
        }
        let trains = self.versions.get(&known.function).is_some_and(|of| of.trains());
        let done = |process: &Process| process.ended && process.status.is_some_and(|status| status.success());
        let completes = trains && known.processes.get(index).is_some_and(done);
        if !completes {
            // Stages and workers are of no use without each other.
            self.kill(instance);
        }
        self.if_all_ended(instance);
        self.settle();
    }

    /// Reports an instance none of whose processes is left.
    fn if_all_ended(&mut self, instance: InstanceId) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if !known.processes.iter().all(|process| process.ended) {
            return;
        }
        let function = known.function;
        let completed = known.doing == Doing::Ready
            && known.processes.iter().all(|process| process.status.is_some_and(|status| status.success()));
        if known.doing == Doing::Parking {
            (known.doing, known.ends) = (Doing::Parked, false);
            known.processes.clear();
            Self::settle_time(&mut self.versions, known);
            return self.report(instance, InstanceReport::Parked);
        }
        let starting = known.doing == Doing::Starting;
        let requests = core::mem::take(&mut known.requests);
        Self::settle_time(&mut self.versions, known);
        self.instances.remove(&instance);
        for request in requests {
            let Some(of) = self.requests.get_mut(&request) else { continue };
            if of.reached {
                // Its client sees the connection end.
                let took = self.last.saturating_since(of.since);
                self.requests.remove(&request);
                self.events.push_back(PlatformEvent::RequestDone { request, took });
            } else {
                of.on = None;
            }
        }
        let trains = self.versions.get(&function).is_some_and(|of| of.trains());
        let report = match () {
            () if trains && completed => {
                if let Some(of) = self.versions.get_mut(&function) {
                    of.completed = true;
                }
                InstanceReport::Completed
            }
            // So that one that dies as it starts is not started again at once.
            () if starting => InstanceReport::Refused,
            () => InstanceReport::Gone,
        };
        self.report(instance, report);
        self.forget_if_gone(function);
    }

    fn settle_time(versions: &mut BTreeMap<FunctionId, Known>, instance: &mut Instance) {
        let used: u64 = core::mem::take(&mut instance.gpu_ns).into_values().sum();
        if let Some(of) = versions.get_mut(&instance.function) {
            of.gpu_ns += used;
        }
    }

    /// Forgets a version that no name has and nothing of which runs.
    fn forget_if_gone(&mut self, id: FunctionId) {
        let named = self.functions.values().any(|of| of.serving == id || of.next == Some(id));
        let runs = self.instances.values().any(|instance| instance.function == id);
        let measures = self.versions.get(&id).and_then(|known| known.measures);
        let wanted = measures.is_some_and(|(of, _)| self.versions.contains_key(&of));
        if !named && !runs && !wanted {
            self.versions.remove(&id);
        }
    }

    /// What came of the trials of an instance.
    pub fn measured(
        &mut self,
        now: Timestamp,
        instance: InstanceId,
        profile: ProfileTable,
        memory: Bytes,
    ) -> Option<Arc<Version>> {
        self.last = self.last.max(now);
        let trial = self.instances.get(&instance)?.function;
        let (function, _) = self.versions.get(&trial)?.measures?;
        let known = self.versions.get_mut(&function)?;
        (known.problem, known.progress) = (None, None);
        let version = Arc::clone(&known.version);
        self.instances.remove(&instance);
        self.report(instance, InstanceReport::Completed);
        let memory = version.plan.memory.unwrap_or(memory);
        self.events.push_back(PlatformEvent::ProfileLearned { function, profile, memory: Some(memory) });
        self.events.push_back(PlatformEvent::FunctionRemoved { function: trial });
        self.versions.remove(&trial);
        self.settle();
        Some(version)
    }

    /// How far the trials of an instance are.
    pub fn progress(&mut self, instance: InstanceId, text: String) {
        let of = self.instances.get(&instance).and_then(|known| self.versions.get(&known.function)?.measures);
        if let Some(of) = of.and_then(|(of, _)| self.versions.get_mut(&of)) {
            of.progress = Some(text);
        }
    }

    fn carry_out(&mut self, actions: Vec<PlatformAction>) {
        for action in actions {
            self.note(&action);
            match action {
                PlatformAction::Profile { function } => self.measure(function, 0),
                PlatformAction::Start { instance, function, parts, parked, .. } => {
                    self.start(instance, function, parts, parked);
                }
                PlatformAction::Park { instance } => {
                    let Some(known) = self.instances.get_mut(&instance) else { continue };
                    known.doing = Doing::Parking;
                    if let Some(of) = self.versions.get_mut(&known.function) {
                        of.parked += 1;
                    }
                    self.kill(instance);
                    self.if_all_ended(instance);
                }
                PlatformAction::Unpark { instance, parts, .. } => {
                    if let Some(known) = self.instances.get_mut(&instance) {
                        (known.doing, known.parts) = (Doing::Unparking, parts);
                        self.launch(instance);
                    }
                }
                PlatformAction::Drain { instance } => {
                    if let Some(known) = self.instances.get_mut(&instance) {
                        known.doing = Doing::Draining;
                    }
                }
                PlatformAction::Stop { instance, .. } => {
                    let Some(known) = self.instances.get_mut(&instance) else { continue };
                    known.doing = Doing::Stopping;
                    self.kill(instance);
                    self.if_all_ended(instance);
                }
                PlatformAction::Dispatch { request, instance } => self.dispatch(request, instance),
                PlatformAction::Reject { request, reason } => self.reject(request, reason),
                PlatformAction::Fetch { function, .. } => self.errand(function, true),
                PlatformAction::Forget { function, .. } => self.errand(function, false),
            }
        }
    }

    fn errand(&self, function: FunctionId, fetch: bool) {
        let errand = self.versions.get(&function).and_then(|of| Errand::of(&of.version, fetch));
        // Nobody listens only when the host ends.
        let _ = errand.map(|errand| self.orders.send(Order::Model(errand)));
    }

    /// Keeps a decision for people to read. Which instance serves a request is no news.
    fn note(&mut self, action: &PlatformAction) {
        let name = |id: &FunctionId| {
            self.versions.get(id).map_or_else(
                || id.to_string(),
                |of| match of.measures {
                    Some(_) => format!("measurement of {}", of.version.deployment.service),
                    None => of.version.deployment.service.clone(),
                },
            )
        };
        let of = |id: &InstanceId| {
            let function = self.instances.get(id).map(|known| name(&known.function));
            format!("{} {}", function.unwrap_or_default(), id.0)
        };
        let places = |parts: &[Part]| {
            let place = |part: &Part| match part.slice {
                Some(slice) => format!("GPU {} slice {}", part.gpu.0, slice.start),
                None => format!(
                    "GPU {} with {} of the time, {} of the SMs",
                    part.gpu.0,
                    part.share.time(),
                    part.share.sm()
                ),
            };
            parts.iter().map(place).collect::<Vec<_>>().join(", ")
        };
        let what = match action {
            PlatformAction::Dispatch { .. }
            | PlatformAction::Fetch { .. }
            | PlatformAction::Forget { .. } => return,
            PlatformAction::Profile { function } => format!("{} is to be measured", name(function)),
            PlatformAction::Start { instance, function, parts, parked, .. } => {
                let parked = if *parked { ", parked" } else { "" };
                format!("{} {} starts on {}{parked}", name(function), instance.0, places(parts))
            }
            PlatformAction::Park { instance } => format!("{} makes room for another function", of(instance)),
            PlatformAction::Unpark { instance, parts, .. } => {
                format!("{} comes back to {}", of(instance), places(parts))
            }
            PlatformAction::Drain { instance } => format!("{} gets no more requests", of(instance)),
            PlatformAction::Stop { instance, cause } => format!("{} is stopped: {cause}", of(instance)),
            PlatformAction::Reject { request, reason } => {
                let name = self.requests.get(request).map(|of| of.name.clone()).unwrap_or_default();
                format!("a request of {name} is refused: {reason}")
            }
        };
        if self.decisions.len() >= DECISIONS {
            self.decisions.pop_front();
        }
        self.decisions.push_back(Decision { at: self.last, what });
    }

    /// The last decisions, the newest first.
    pub fn decisions(&self) -> Vec<Decision> {
        self.decisions.iter().rev().cloned().collect()
    }

    /// Gives a function a companion that measures it, on the first share from this one on that finds room at once.
    fn measure(&mut self, function: FunctionId, from: usize) {
        let Some(known) = self.versions.get(&function) else { return };
        let (deployment, plan) = (known.version.deployment.clone(), known.version.plan.clone());
        let memory = plan.memory.unwrap_or(self.guess);
        let tenant = plan.tenant;
        for (rung, (time, sm)) in TRIAL_SHARES.into_iter().enumerate().skip(from) {
            let share = trial_share(time, sm, memory);
            let spec = FunctionSpec::new(Work::Training { workers: 1, share }, memory).with_tenant(tenant);
            let version = Version { deployment: deployment.clone(), plan: plan.clone() };
            let trial = self.add(version, Some((function, rung)));
            let mut actions = Vec::new();
            let event = PlatformEvent::FunctionDeployed { function: trial, spec: Box::new(spec) };
            let told = self.platform.handle(self.last, event, &mut actions);
            let found = actions.iter().any(|action| matches!(action, PlatformAction::Start { .. }));
            if told.is_ok() && (found || rung + 1 == TRIAL_SHARES.len()) {
                let waits = "waits for a share of a device to be measured on".to_owned();
                if let Some(known) = self.versions.get_mut(&function) {
                    known.progress = Some(waits);
                }
                return self.carry_out(actions);
            }
            self.versions.remove(&trial);
            if told.is_ok() {
                let removed = PlatformEvent::FunctionRemoved { function: trial };
                let removed = self.platform.handle(self.last, removed, &mut actions);
                debug_assert!(removed.is_ok(), "{removed:?}");
            } else if let (Err(error), Some(known)) = (told, self.versions.get_mut(&function)) {
                known.problem = Some(format!("cannot be measured: {error}"));
            }
        }
    }

    fn start(&mut self, instance: InstanceId, function: FunctionId, parts: Vec<Part>, parked: bool) {
        let doing = if parked { Doing::Parked } else { Doing::Starting };
        let known = Instance {
            function,
            doing,
            parts,
            processes: Vec::new(),
            requests: BTreeSet::new(),
            ends: false,
            stop: None,
            gpu_ns: BTreeMap::new(),
        };
        self.instances.insert(instance, known);
        match parked {
            true => self.report(instance, InstanceReport::Ready),
            false => self.launch(instance),
        }
    }

    /// Orders the processes of an instance.
    fn launch(&mut self, instance: InstanceId) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let Some(of) = self.versions.get(&known.function) else { return };
        known.processes = known.parts.iter().map(|_| Process::default()).collect();
        for index in 0..known.parts.len() {
            let (parts, version) = (known.parts.clone(), Arc::clone(&of.version));
            let launch = Launch { instance, index, parts, version };
            let order = if of.measures.is_some() {
                let stop = Arc::new(AtomicBool::new(false));
                known.stop = Some(Arc::clone(&stop));
                Order::Measure(launch, stop)
            } else {
                Order::Run(launch)
            };
            // Nobody listens only when the host ends.
            let _ = self.orders.send(order);
        }
    }

    fn kill(&mut self, instance: InstanceId) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if let Some(stop) = &known.stop {
            stop.store(true, Ordering::Release);
        }
        for process in known.processes.iter().filter_map(|place| place.process.as_ref()) {
            process.kill();
        }
    }

    fn dispatch(&mut self, request: RequestId, instance: InstanceId) {
        let Some(of) = self.requests.get_mut(&request) else {
            // Its client has gone between two events.
            return self.events.push_back(PlatformEvent::RequestDone { request, took: Duration::ZERO });
        };
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if of.turn.is_closed() {
            self.requests.remove(&request);
            return self.events.push_back(PlatformEvent::RequestDone { request, took: Duration::ZERO });
        }
        (of.on, of.since) = (Some(instance), self.last);
        known.requests.insert(request);
        if known.ends {
            // The platform gives it to another one when this one is gone.
            return;
        }
        let ports = known.processes.iter().map(|process| process.port).collect();
        // A client that has gone says so itself.
        let _ = of.turn.send(Turn::Go { instance, ports });
    }

    fn reject(&mut self, request: RequestId, reason: Rejection) {
        let Some(of) = self.requests.get(&request) else { return };
        // Another version serves its function now.
        if let (Rejection::Removed, Some(function)) = (reason, self.functions.get(&of.name)) {
            let function = function.serving;
            let again = PlatformEvent::RequestArrived { request, function, deadline: None };
            return self.events.push_back(again);
        }
        if let Some(of) = self.requests.remove(&request) {
            let _ = of.turn.send(Turn::No(reason));
        }
    }

    /// A process of an instance, to look at.
    pub fn pids(&self, instance: InstanceId) -> Vec<u32> {
        let processes = self.instances.get(&instance).map(|known| &known.processes);
        processes
            .into_iter()
            .flatten()
            .filter_map(|place| place.process.as_ref().map(HookedProcess::pid))
            .collect()
    }

    /// Device time since its start of the process with this name at the node's daemon, in ns.
    pub fn used(&mut self, client: &str, ns: u64) {
        let Some((_, number)) = client.rsplit_once('-') else { return };
        let number = number.split_once('.').map_or(number, |(number, _)| number);
        let Ok(number) = number.parse() else { return };
        if let Some(known) = self.instances.get_mut(&InstanceId(number)) {
            known.gpu_ns.insert(client.to_owned(), ns);
        }
    }

    /// Names of all functions.
    pub fn names(&self) -> Vec<String> {
        self.functions.keys().cloned().collect()
    }

    /// The functions, by name.
    pub fn views(&self) -> Vec<View> {
        self.functions.keys().filter_map(|name| self.view(name)).collect()
    }

    /// A function.
    pub fn view(&self, name: &str) -> Option<View> {
        let function = self.functions.get(name)?;
        let newest = function.next.unwrap_or(function.serving);
        let known = self.versions.get(&newest)?;
        let ids = [Some(function.serving), function.next];
        let mut lives = BTreeMap::new();
        self.platform.instances(&mut |view| {
            if ids.contains(&Some(view.function)) {
                lives.insert(view.instance, view.life);
            }
        });
        let instance = |(id, life): (&InstanceId, &Life)| {
            let known = self.instances.get(id)?;
            let clients =
                (0..known.processes.len()).map(|index| client(name, *id, index, known.processes.len()));
            Some(InstanceView {
                instance: *id,
                life: *life,
                parts: known.parts.clone(),
                requests: known.requests.len(),
                pids: self.pids(*id),
                clients: clients.collect(),
            })
        };
        let (platform, mut totals) = (self.platform.function(newest), self.totals(function.serving));
        if let Some(next) = function.next {
            totals.add(self.totals(next));
        }
        totals.add(function.before);
        let profile = platform.as_ref().and_then(|view| match &view.spec.work {
            Work::Inference { profile } => profile.clone(),
            _ => None,
        });
        Some(View {
            version: Arc::clone(&known.version),
            created_ms: function.created_ms,
            invocations: function.invocations,
            instances: lives.iter().filter_map(instance).collect(),
            waiting: ids.into_iter().flatten().map(|id| self.platform.waiting(id) as u64).sum(),
            totals,
            measuring: known.progress.clone().filter(|_| profile.is_none()),
            profile: profile
                .filter(|_| matches!(known.version.plan.wants, Wants::Measured | Wants::Profile { .. })),
            memory: platform.map_or(Bytes::ZERO, |view| view.spec.memory),
            problem: known.problem.clone(),
            completed: known.completed,
        })
    }

    /// Checks the books against the platform's.
    ///
    /// # Panics
    /// When they differ.
    pub fn invariants(&self) {
        let mut known = BTreeSet::new();
        self.platform.instances(&mut |view| {
            known.insert(view.instance);
        });
        for (id, instance) in &self.instances {
            // One that has ended is reported in the same breath.
            assert!(known.contains(id) || instance.doing == Doing::Stopping, "{id} is not the platform's");
            for request in &instance.requests {
                assert_eq!(self.requests[request].on, Some(*id), "{request} is elsewhere");
            }
        }
        for (id, request) in &self.requests {
            let on = request.on.and_then(|instance| self.instances.get(&instance));
            assert!(request.on.is_none() || on.is_some_and(|on| on.requests.contains(id)), "{id} is nowhere");
        }
    }
}

impl Known {
    fn trains(&self) -> bool {
        self.measures.is_none() && matches!(self.version.plan.wants, Wants::Training { .. })
    }
}

/// What the process with this place in an instance is called.
pub fn client(name: &str, instance: InstanceId, index: usize, count: usize) -> String {
    match count {
        1 => format!("{name}-{}", instance.0),
        _ => format!("{name}-{}.{index}", instance.0),
    }
}

/// Fewest and most instances, when so many were asked for.
fn bounds(plan: &Plan, replicas: Option<u32>) -> (u32, u32) {
    match replicas {
        None => plan.bounds,
        Some(replicas) if plan.scales() => (replicas, plan.bounds.1),
        Some(replicas) => (replicas, replicas.max(1)),
    }
}

fn trial_share(time: u16, sm: u16, memory: Bytes) -> GpuShare {
    let quota = Quota::from_percent(time).unwrap_or(Quota::WHOLE);
    let time = QuotaRange::new(quota, quota).unwrap_or(QuotaRange::BEST_EFFORT);
    let sm = SmShare::from_percent(sm).unwrap_or(SmShare::WHOLE);
    GpuShare::new(time, sm, sm, Some(memory)).unwrap_or(GpuShare::WHOLE)
}

/// The answer to a request that will not be served.
pub fn refusal(reason: Rejection) -> ApiError {
    let status = match reason {
        Rejection::QueueFull | Rejection::TenantQueueFull => StatusCode::TOO_MANY_REQUESTS,
        Rejection::WaitedTooLong | Rejection::DeadlineMissed | Rejection::WouldBeLate => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        Rejection::AttemptsExhausted => StatusCode::BAD_GATEWAY,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    ApiError::new(status, reason.to_string())
}

/// A tenant's number, by its place in the list of tenants; the first is 1, since 0 is who names none.
pub fn tenant(place: usize) -> TenantId {
    TenantId(u32::try_from(place + 1).unwrap_or(u32::MAX))
}
