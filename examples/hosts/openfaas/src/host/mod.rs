//! Functions by name, with their processes and requests: carries out the decisions of [`Platform`].
//!
//! The host decides only questions of names: the version that serves while the next one starts, and the share for the trials.
//! It has no clock and starts no process. Orders to start one leave as an [`Order`], and a shell ([`super::node`]) reports the
//! results.
//!
//! # Versions
//! For the platform each deployment of a name is a function of its own. The old version serves until the new one has a ready
//! instance, or until the new one finds no room beside it. Then the old version is removed, and its waiting requests move to
//! the new one.
//!
//! # Measuring
//! For a function without a profile, `measuring.rs` deploys a companion function. The companion gets a share, a slice or a
//! whole device, and the shell runs the trials there.

mod dispatching;
mod lost_devices;
mod measuring;
mod processes;
mod suitability;
mod versions;
mod view;

pub use dispatching::refusal;
pub(crate) use measuring::DISTURBED;
pub use view::{Brief, Decision, InstanceView, View};

use super::api::{ApiError, FunctionDeployment};
use super::batches::Batch;
use super::deployment::{Plan, Wants};
use super::models::Errand;
use super::running::Running;
use super::traces::Load;
use super::trials::Measured;
use crossbeam_channel::Sender;
use gshare_core::{
    Bytes, Duration, Engine as _, FunctionId, GpuId, InstanceId, NodeId, RequestId, TenantId, Timestamp,
};
use gshare_sched::platform::{
    DeviceSpec, FunctionState, FunctionStats, InstanceReport, Life, Moving, Part, Platform, PlatformAction,
    PlatformError, PlatformEvent, Regime, Rejection, StopCause,
};
use measuring::Measuring;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::sync::mpsc::UnboundedSender;

/// An order for the shell. The shell reports [`Host::started`] or [`Host::failed`].
#[derive(Debug, Clone)]
pub enum Order {
    /// Start a process of an instance.
    Run(Launch),
    /// Run the trials of a function; [`Host::measured`] takes the result.
    Measure(Launch, Arc<AtomicBool>),
    /// Keep a measurement for the program's next deployment; needs no report.
    Keep(Arc<Version>, Measured),
    /// Load or drop a model in the store; needs no report.
    Model(Errand),
    /// Move the memory of living processes; [`Host::moved`] takes the result.
    Move(Move),
}

/// A move of the memory of an instance's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// Instance that the processes belong to.
    pub instance: InstanceId,
    /// Names of the processes at the daemon.
    pub clients: Vec<String>,
    /// Whether to host memory.
    pub on: bool,
}

/// A process to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Instance that the process belongs to.
    pub instance: InstanceId,
    /// Number of the process in the instance, from 0.
    pub index: usize,
    /// All parts of the instance. A model that is spread over devices has one process for all parts; otherwise each part has
    /// its own.
    pub parts: Vec<Part>,
    /// Deployment and plan of the function.
    pub version: Arc<Version>,
    /// The weights that the process shares on its device, once they are there.
    pub weights: Option<Arc<crate::weights::Use>>,
    /// Time for which the program may do nothing before it listens.
    pub patience: Duration,
    /// Whether the memory of the process can go to host memory.
    pub parks: bool,
}

impl Launch {
    /// Number of processes of the instance.
    pub fn processes(&self) -> usize {
        if self.version.plan.devices > 1 { 1 } else { self.parts.len() }
    }

    /// Parts that belong to this process.
    pub fn own_parts(&self) -> &[Part] {
        if self.version.plan.devices > 1 {
            return &self.parts;
        }
        self.parts.get(self.index..=self.index).unwrap_or_default()
    }
}

/// One deployment of a function.
#[derive(Debug, PartialEq)]
pub struct Version {
    /// The deployment as it was sent.
    pub deployment: FunctionDeployment,
    /// The checked plan of the deployment.
    pub plan: Plan,
}

/// An instance that is free for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Go {
    /// The free instance.
    pub instance: InstanceId,
    /// Addresses of its processes, in the order of stages.
    pub addresses: Vec<SocketAddr>,
    /// The load that made the instance ready.
    pub load: Option<Load>,
    /// The request's batch, if its function takes batches.
    pub batch: Option<Batch>,
}

/// News for a request about its turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// An instance is free for the request.
    Go(Go),
    /// Another version serves its function: it waits under this number now.
    Again(RequestId),
    /// The request was rejected.
    No(Rejection),
    /// No share can meet the function's goal, for this reason.
    Hopeless(String),
    /// The instance lost its device while it served the request, for this reason.
    DeviceLost(String),
}

#[derive(Debug)]
struct Function {
    serving: FunctionId,
    /// The version that takes over once it is ready.
    next: Option<FunctionId>,
    created_ms: u64,
    replicas: Option<u32>,
    invocations: u64,
    /// Work of earlier versions.
    before: Totals,
}

/// Work of a function, summed over its versions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Counters of the platform.
    pub stats: FunctionStats,
    /// Device time of all instances, in ns.
    pub gpu_ns: u64,
    /// Number of times that an instance was parked for another function.
    pub parked: u64,
    /// Number of moves of an instance to better slices.
    pub migrated: u64,
    /// Number of requests that went through several stages.
    pub pipelined: u64,
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
        self.migrated += other.migrated;
        self.pipelined += other.pipelined;
    }
}

#[derive(Debug)]
struct Known {
    version: Arc<Version>,
    /// The function that this companion measures; none for an ordinary version.
    measures: Option<FunctionId>,
    /// Whether the companion has been removed from the platform, after its measurement.
    over: bool,
    measuring: Measuring,
    /// Work that the platform does not count, without the device time of live instances.
    before: Totals,
    /// Reason for the last failed start or failed trials.
    problem: Option<String>,
    /// Whether no share can meet the function's goal.
    hopeless: bool,
    /// Whether the function was a training job that has finished.
    completed: bool,
}

#[derive(Debug, Default)]
struct Process {
    process: Option<Box<dyn Running>>,
    listens: bool,
    ended: bool,
    /// Whether it has ended with its work done.
    done: bool,
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    parts: Vec<Part>,
    processes: Vec<Process>,
    requests: BTreeSet<RequestId>,
    /// Whether all processes are to end, because one has failed or refuses connections.
    ends: bool,
    /// Whether new processes start, on other devices, once these have ended.
    anew: bool,
    /// Whether its memory moves, and where it is to go after that: to host memory or not.
    moves: bool,
    next_move: Option<bool>,
    /// Flag that ends the instance's trials.
    stop: Option<Arc<AtomicBool>>,
    /// Time of the last order for its processes, and the load that followed.
    ordered: Timestamp,
    load: Option<Load>,
    /// Device time by process, as last reported, in ns.
    gpu_ns: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Request {
    name: String,
    turn: UnboundedSender<Turn>,
    on: Option<InstanceId>,
    since: Timestamp,
    /// Whether the instance has accepted the request, which is then never sent to another instance.
    reached: bool,
}

/// Nodes of a cluster; none: all.
type Nodes = Option<BTreeSet<NodeId>>;

/// The nodes to which new instances of a deployment go.
struct NodesOf(Box<dyn Fn(&Version) -> Nodes + Send>);

gshare_core::debug_fields!(NodesOf {});

/// All functions, instances and requests of this host.
#[derive(Debug)]
pub struct Host {
    platform: Platform,
    /// Memory booked for a function of unknown size.
    guess: Bytes,
    /// Whether a daemon moves the memory of living processes.
    parks: bool,
    functions: BTreeMap<String, Function>,
    /// Names of the functions with a version that takes over later.
    changing: BTreeSet<String>,
    versions: BTreeMap<FunctionId, Known>,
    instances: BTreeMap<InstanceId, Instance>,
    requests: BTreeMap<RequestId, Request>,
    /// Requests that companions make to get a slice or a device; they have no client.
    turns: BTreeMap<RequestId, FunctionId>,
    /// Functions to measure again, by time.
    repeats: BTreeSet<(Timestamp, FunctionId)>,
    /// The nodes of a cluster that take a function's pods.
    nodes_of: Option<NodesOf>,
    /// All devices seen so far, lost ones included.
    devices: BTreeMap<GpuId, DeviceSpec>,
    /// The number of devices of each regime, and the largest memory of one of them or of its MIG slices.
    kinds: BTreeMap<Regime, (usize, Bytes)>,
    /// Names of devices, for users.
    names: BTreeMap<GpuId, String>,
    next_function: u32,
    next_request: u64,
    orders: Sender<Order>,
    last: Timestamp,
    /// Reports to the platform that its own orders have caused.
    events: VecDeque<PlatformEvent>,
    /// The last decisions, oldest first.
    decisions: VecDeque<Decision>,
    /// Lost devices and the reasons.
    lost: BTreeMap<GpuId, String>,
    /// Killed processes of instances that are gone. On a lost device the driver may keep such a process for long.
    leaving: BTreeMap<(InstanceId, usize), Box<dyn Running>>,
    /// Ended processes, which the caller drops outside of the lock.
    gone: Vec<Box<dyn Running>>,
    #[cfg(test)]
    pub(crate) book: Option<gshare_sim::world::Book>,
}

impl Host {
    /// A host without functions, for a platform with known devices.
    pub fn new(platform: Platform, guess: Bytes, orders: Sender<Order>) -> Self {
        Self {
            platform,
            guess,
            parks: false,
            functions: BTreeMap::new(),
            changing: BTreeSet::new(),
            versions: BTreeMap::new(),
            instances: BTreeMap::new(),
            requests: BTreeMap::new(),
            turns: BTreeMap::new(),
            repeats: BTreeSet::new(),
            nodes_of: None,
            devices: BTreeMap::new(),
            kinds: BTreeMap::new(),
            names: BTreeMap::new(),
            next_function: 0,
            next_request: 0,
            orders,
            last: Timestamp::ZERO,
            events: VecDeque::new(),
            decisions: VecDeque::new(),
            lost: BTreeMap::new(),
            leaving: BTreeMap::new(),
            gone: Vec::new(),
            #[cfg(test)]
            book: None,
        }
    }

    /// Has new instances go to these nodes only. Without an answer for a version they go to any.
    pub fn choose_nodes(&mut self, nodes_of: impl Fn(&Version) -> Nodes + Send + 'static) {
        self.nodes_of = Some(NodesOf(Box::new(nodes_of)));
    }

    fn nodes_of(&self, version: &Version) -> Nodes {
        self.nodes_of.as_ref().and_then(|of| of.0(version))
    }

    /// The nodes of the cluster have changed: new instances go to those that take them now.
    pub fn nodes_changed(&mut self, now: Timestamp) {
        let changed = self.versions.iter().filter_map(|(id, known)| {
            let (view, nodes) = (self.platform.function(*id)?, self.nodes_of(&known.version));
            let differs = view.state != FunctionState::Removed && view.spec.nodes != nodes;
            differs.then_some(PlatformEvent::NodesChanged { function: *id, nodes })
        });
        for event in changed.collect::<Vec<_>>() {
            self.inform(now, event);
        }
    }

    /// The same with a daemon that moves the memory of living processes.
    #[must_use]
    pub fn with_parking(self, parks: bool) -> Self {
        Self { parks, ..self }
    }

    /// The time of the next call of [`Host::deadline`].
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.platform.next_deadline().into_iter().chain(self.repeats.first().map(|(at, _)| *at)).min()
    }

    /// Handles all deadlines up to `now`.
    pub fn deadline(&mut self, now: Timestamp) {
        self.inform(now, PlatformEvent::DeadlineReached);
        self.repeat_measurements();
        self.settle();
    }

    /// Passes an event on to the platform and carries out the resulting orders.
    ///
    /// # Errors
    /// 400 with the platform's refusal.
    pub fn tell(&mut self, now: Timestamp, event: PlatformEvent) -> Result<(), ApiError> {
        self.last = self.last.max(now);
        let mut actions = Vec::new();
        let found = match &event {
            PlatformEvent::DeviceFound { gpu, spec } => Some((*gpu, spec.clone())),
            _ => None,
        };
        let told = self.ask(event, &mut actions);
        told.map_err(|error| ApiError::bad(self.in_words(&error.to_string())))?;
        if let Some((gpu, spec)) = found {
            self.know(gpu, spec);
        }
        self.carry_out(actions);
        while let Some(event) = self.next_event() {
            let mut actions = Vec::new();
            let learns = match &event {
                PlatformEvent::ProfileLearned { function, .. } => Some(*function),
                _ => None,
            };
            match (self.ask(event, &mut actions), learns) {
                (Ok(()), _) => {}
                (Err(error), Some(function)) => self.give_up(function, &self.in_words(&error.to_string())),
                // The platform may have given up the reported instance meanwhile.
                (Err(error), None) => eprintln!("openfaas: {error}"),
            }
            self.carry_out(actions);
        }
        self.change_over();
        Ok(())
    }

    /// The platform's orders upon an event.
    fn ask(&mut self, event: PlatformEvent, orders: &mut Vec<PlatformAction>) -> Result<(), PlatformError> {
        #[cfg(test)]
        let (told, before) = (event.clone(), orders.len());
        self.platform.handle(self.last, event, orders)?;
        #[cfg(test)]
        self.keep_book(&told, &orders[before..]);
        Ok(())
    }

    /// Checks the promises of the platform, and of the host to it.
    #[cfg(test)]
    fn keep_book(&mut self, event: &PlatformEvent, orders: &[PlatformAction]) {
        let (now, Some(book)) = (self.last, &mut self.book) else { return };
        let kept =
            book.told(now, event).and_then(|()| orders.iter().try_for_each(|order| book.ordered(now, order)));
        kept.and_then(|()| book.settled()).unwrap_or_else(|why| panic!("{event:?}: {why}"));
    }

    fn inform(&mut self, now: Timestamp, event: PlatformEvent) {
        if let Err(error) = self.tell(now, event) {
            eprintln!("openfaas: {}", error.message);
        }
    }

    /// Where the platform has an instance in its life, and the order to park it or bring it back that is not answered. None: the
    /// platform has forgotten the instance.
    fn life(&self, instance: InstanceId) -> Option<(Life, Option<Moving>)> {
        self.platform.instance(instance).map(|view| (view.life, view.moving))
    }

    /// Whether the processes of an instance are to end, to stop or to park it.
    fn leaves(&self, instance: InstanceId) -> bool {
        matches!(self.life(instance), None | Some((Life::Stopped, _) | (_, Some(Moving::Out))))
    }

    fn report(&mut self, instance: InstanceId, report: InstanceReport) {
        self.events.push_back(PlatformEvent::Instance { instance, report });
    }

    /// Passes reports on to the platform.
    fn settle(&mut self) {
        if let Some(event) = self.next_event() {
            self.inform(self.last, event);
        }
    }

    /// The next event that the platform is to be told. A request that comes again has a new number.
    fn next_event(&mut self) -> Option<PlatformEvent> {
        let mut event = self.events.pop_front()?;
        if let PlatformEvent::RequestArrived { request, .. } = &mut event {
            let before = core::mem::replace(request, RequestId::new(self.next_request));
            self.next_request += 1;
            if let Some(of) = self.requests.remove(&before) {
                let _ = of.turn.send(Turn::Again(*request));
                self.requests.insert(*request, of);
            }
        }
        Some(event)
    }

    fn carry_out(&mut self, actions: Vec<PlatformAction>) {
        let mut batches = BTreeMap::new();
        for action in actions {
            self.note(&action);
            match action {
                PlatformAction::Profile { function } => self.measure(function),
                PlatformAction::Start { instance, function, parts, parked, .. } => {
                    self.start(instance, function, parts, parked);
                }
                PlatformAction::Park { instance, keeps } => self.park(instance, keeps),
                PlatformAction::Unpark { instance, parts, .. } => self.unpark(instance, parts),
                PlatformAction::Drain { .. } => {}
                PlatformAction::Stop { instance, cause } => {
                    let Some(known) = self.instances.get_mut(&instance) else { continue };
                    if cause == StopCause::Replaced
                        && let Some(of) = self.versions.get_mut(&known.function)
                    {
                        of.before.migrated += 1;
                    }
                    self.kill(instance);
                    self.if_all_ended(instance);
                }
                PlatformAction::Dispatch { request, instance } => {
                    self.dispatch(request, instance, &mut batches);
                }
                PlatformAction::Reject { request, reason } => self.reject(request, reason),
                PlatformAction::Fetch { function, .. } => self.errand(function, true),
                PlatformAction::Forget { function, .. } => self.errand(function, false),
            }
        }
    }

    fn errand(&self, function: FunctionId, fetch: bool) {
        let of = self.versions.get(&function).filter(|of| !self.shares_weights(&of.version.plan));
        let errand = of.and_then(|of| Errand::of(&of.version, fetch));
        // The receiver closes only at the end of the host.
        let _ = errand.map(|errand| self.orders.send(Order::Model(errand)));
    }
}

impl Known {
    fn trains(&self) -> bool {
        self.measures.is_none() && matches!(self.version.plan.wants, Wants::Training { .. })
    }
}

/// Name of an instance's process at the daemon, by its place.
pub fn client(name: &str, instance: InstanceId, index: usize, count: usize) -> String {
    match count {
        1 => format!("{name}-{}", instance.number()),
        _ => format!("{name}-{}.{index}", instance.number()),
    }
}

/// Number of a tenant, by place in the list. The first is 1, because 0 stands for deployments without a tenant.
pub fn tenant(place: usize) -> TenantId {
    TenantId::new(u32::try_from(place + 1).unwrap_or(u32::MAX))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crossbeam_channel::{Receiver, unbounded as channel};
    use gshare_core::NodeId;
    use gshare_sched::platform::{DeviceSpec, PlatformSettings};

    /// A host of two devices with a training job `f`, and the orders for its two workers. More orders come over the channel.
    pub(crate) fn training() -> (Host, [Launch; 2], Receiver<Order>) {
        let (sender, orders) = channel();
        let platform = PlatformSettings::default().build().unwrap();
        let mut host = Host::new(platform, Bytes::from_mib(64), sender);
        for gpu in 0..2 {
            let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
            let found = PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec };
            host.tell(Timestamp::ZERO, found).map_err(|error| error.message).unwrap();
        }
        let text = r#"{"service":"f","image":"/bin/sleep 1000","secrets":["key"],
            "annotations":{"gshare/workload":"training","gshare/workers":"2"}}"#;
        let deployment: FunctionDeployment = serde_json::from_str(text).unwrap();
        let plan = Plan::of(&deployment, &BTreeMap::new()).map_err(|error| error.message).unwrap();
        let version = Version { deployment, plan };
        host.deploy(Timestamp::ZERO, version, 0, None).map_err(|error| error.message).unwrap();
        let launch = || match orders.try_recv() {
            Ok(Order::Run(launch)) => launch,
            other => panic!("{other:?}"),
        };
        let workers = [launch(), launch()];
        (host, workers, orders)
    }
}
