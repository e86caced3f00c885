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
//!
//! # Measuring
//! `measuring.rs` deploys a companion for a function that is to be measured. The companion has a share, a slice or a whole device,
//! and the shell runs the trials on that.

mod devices;
mod dispatching;
mod measuring;
mod processes;
mod suitability;
mod versions;
mod view;

pub use dispatching::refusal;
pub(crate) use measuring::DISTURBED;
pub use view::{Decision, InstanceView, View};

use super::api::{ApiError, FunctionDeployment};
use super::deployment::{Plan, Wants};
use super::models::Errand;
use super::traces::Load;
use super::trials::Measured;
use gshare_core::{Bytes, Engine as _, FunctionId, GpuId, InstanceId, RequestId, TenantId, Timestamp};
use gshare_runner::HookedProcess;
use gshare_sched::platform::{
    DeviceSpec, FunctionStats, InstanceReport, Life, Moving, Part, Platform, PlatformAction, PlatformEvent, Rejection,
    StopCause,
};
use measuring::Measuring;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::sync::mpsc::UnboundedSender;

/// An order to the shell to start a process. The shell answers with [`Host::started`], or with [`Host::failed`].
#[derive(Debug, Clone)]
pub enum Order {
    /// A process of an instance.
    Run(Launch),
    /// The trials of a function; answered with [`Host::measured`].
    Measure(Launch, Arc<AtomicBool>),
    /// A measurement to keep for the next deployment of the program; needs no answer.
    Keep(Arc<Version>, Measured),
    /// Something for the model store to do; needs no answer.
    Model(Errand),
}

/// A process to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The instance that it is of.
    pub instance: InstanceId,
    /// The number of the process within the instance, from 0.
    pub index: usize,
    /// All parts of the instance: those of one process for a model that is spread over devices, else one for each process.
    pub parts: Vec<Part>,
    /// The function's version: which deployment, and what that asks for.
    pub version: Arc<Version>,
}

impl Launch {
    /// Processes of the instance.
    pub fn processes(&self) -> usize {
        if self.version.plan.devices > 1 { 1 } else { self.parts.len() }
    }

    /// The parts of this process.
    pub fn own_parts(&self) -> &[Part] {
        if self.version.plan.devices > 1 {
            return &self.parts;
        }
        self.parts.get(self.index..=self.index).unwrap_or_default()
    }
}

/// A deployment of a function.
#[derive(Debug, PartialEq)]
pub struct Version {
    /// The deployment.
    pub deployment: FunctionDeployment,
    /// The plan that the deployment asks for.
    pub plan: Plan,
}

/// Outcome for a request that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// An instance is free for it.
    Go {
        /// The instance that is free.
        instance: InstanceId,
        /// Where its processes listen, stage by stage.
        ports: Vec<u16>,
        /// How it came to be ready.
        load: Option<Load>,
    },
    /// Another version serves its function: it waits under this number now.
    Again(RequestId),
    /// The request will not be served.
    No(Rejection),
    /// No share does for what its function wants: why.
    Hopeless(String),
    /// The instance that had the request has lost its device: why.
    DeviceLost(String),
}

#[derive(Debug)]
struct Function {
    serving: FunctionId,
    /// The version that takes over when it is ready.
    next: Option<FunctionId>,
    created_ms: u64,
    replicas: Option<u32>,
    invocations: u64,
    /// Work that versions before this one have done.
    before: Totals,
}

/// Work that a function has done, over all of its versions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Counters of the platform.
    pub stats: FunctionStats,
    /// Device time of its instances, in ns.
    pub gpu_ns: u64,
    /// Times that an instance was parked for another function.
    pub parked: u64,
    /// Times that an instance took the place of another one on better slices.
    pub migrated: u64,
    /// Requests that went through several stages.
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
    /// The function that this one measures.
    measures: Option<FunctionId>,
    /// Whether it has been removed from the platform, as a companion is after its measurement.
    over: bool,
    measuring: Measuring,
    gpu_ns: u64,
    parked: u64,
    migrated: u64,
    pipelined: u64,
    /// Why an instance of it did not start, or its trials gave nothing, the last time.
    problem: Option<String>,
    /// Whether no share does for what it wants.
    hopeless: bool,
    /// Whether it was a training job, and has done its work.
    completed: bool,
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
    parts: Vec<Part>,
    processes: Vec<Process>,
    requests: BTreeSet<RequestId>,
    /// Whether a process of it takes no connections any more or has failed: all of them are to end.
    ends: bool,
    /// Set to end the trials that it runs.
    stop: Option<Arc<AtomicBool>>,
    /// When its processes were ordered, the last time; and how that went.
    ordered: Timestamp,
    load: Option<Load>,
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
    /// Requests without a client: each takes a slice or a device for the trials of this companion.
    turns: BTreeMap<RequestId, FunctionId>,
    /// Functions that are measured again, and when.
    repeats: BTreeSet<(Timestamp, FunctionId)>,
    /// All devices that were ever here.
    devices: BTreeMap<GpuId, DeviceSpec>,
    next_function: u32,
    next_request: u64,
    orders: std::sync::mpsc::Sender<Order>,
    last: Timestamp,
    /// Events that the platform is to be told because of its own orders.
    events: VecDeque<PlatformEvent>,
    /// The last decisions, the oldest first.
    decisions: VecDeque<Decision>,
    /// Devices that are lost, and why.
    lost: BTreeMap<GpuId, String>,
    /// Processes that are killed and were of instances that are gone: a driver that lost its device may keep one for long.
    leaving: BTreeMap<(InstanceId, usize), HookedProcess>,
    /// Processes that have ended, to be dropped elsewhere.
    gone: Vec<HookedProcess>,
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
            turns: BTreeMap::new(),
            repeats: BTreeSet::new(),
            devices: BTreeMap::new(),
            next_function: 0,
            next_request: 0,
            orders,
            last: Timestamp::ZERO,
            events: VecDeque::new(),
            decisions: VecDeque::new(),
            lost: BTreeMap::new(),
            leaving: BTreeMap::new(),
            gone: Vec::new(),
        }
    }

    /// When [`Host::deadline`] is to be called.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.platform.next_deadline().into_iter().chain(self.repeats.first().map(|(at, _)| *at)).min()
    }

    /// Lets deadlines pass.
    pub fn deadline(&mut self, now: Timestamp) {
        self.inform(now, PlatformEvent::DeadlineReached);
        self.repeat_measurements();
        self.settle();
    }

    /// Tells the platform of a device or a tenant.
    ///
    /// # Errors
    /// The platform's refusal.
    pub fn tell(&mut self, now: Timestamp, event: PlatformEvent) -> Result<(), ApiError> {
        self.last = self.last.max(now);
        let mut actions = Vec::new();
        let found = match &event {
            PlatformEvent::DeviceFound { gpu, spec } => Some((*gpu, spec.clone())),
            _ => None,
        };
        let told = self.platform.handle(self.last, event, &mut actions);
        told.map_err(|error| ApiError::bad(self.in_words(&error.to_string())))?;
        self.devices.extend(found);
        self.carry_out(actions);
        while let Some(event) = self.next_event() {
            let mut actions = Vec::new();
            let learns = match &event {
                PlatformEvent::ProfileLearned { function, .. } => Some(*function),
                _ => None,
            };
            match (self.platform.handle(self.last, event, &mut actions), learns) {
                (Ok(()), _) => {}
                (Err(error), Some(function)) => self.give_up(function, &self.in_words(&error.to_string())),
                // An instance may be reported that the platform has given up meanwhile.
                (Err(error), None) => eprintln!("openfaas: {error}"),
            }
            self.carry_out(actions);
        }
        self.change_over();
        Ok(())
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

    /// Tells the platform what came of its orders.
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
        for action in actions {
            self.note(&action);
            match action {
                PlatformAction::Profile { function } => self.measure(function),
                PlatformAction::Start { instance, function, parts, parked, .. } => {
                    self.start(instance, function, parts, parked);
                }
                PlatformAction::Park { instance } => {
                    let Some(known) = self.instances.get_mut(&instance) else { continue };
                    if let Some(of) = self.versions.get_mut(&known.function) {
                        of.parked += 1;
                    }
                    self.kill(instance);
                    self.if_all_ended(instance);
                }
                PlatformAction::Unpark { instance, parts, .. } => {
                    if let Some(known) = self.instances.get_mut(&instance) {
                        known.parts = parts;
                        match self.takes_turns(instance) {
                            true => self.turn_may_come(instance),
                            false => self.launch(instance),
                        }
                    }
                }
                PlatformAction::Drain { .. } => {}
                PlatformAction::Stop { instance, cause } => {
                    let Some(known) = self.instances.get_mut(&instance) else { continue };
                    if cause == StopCause::Replaced
                        && let Some(of) = self.versions.get_mut(&known.function)
                    {
                        of.migrated += 1;
                    }
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
        // The receiver is gone only when the host ends.
        let _ = errand.map(|errand| self.orders.send(Order::Model(errand)));
    }
}

impl Known {
    fn trains(&self) -> bool {
        self.measures.is_none() && matches!(self.version.plan.wants, Wants::Training { .. })
    }
}

/// Name of the process with this place in an instance.
pub fn client(name: &str, instance: InstanceId, index: usize, count: usize) -> String {
    match count {
        1 => format!("{name}-{}", instance.number()),
        _ => format!("{name}-{}.{index}", instance.number()),
    }
}

/// A tenant's number, by its place in the list of tenants; the first is 1, since 0 is who names none.
pub fn tenant(place: usize) -> TenantId {
    TenantId::new(u32::try_from(place + 1).unwrap_or(u32::MAX))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use gshare_core::NodeId;
    use gshare_sched::platform::{DeviceSpec, PlatformSettings};
    use std::sync::mpsc::{Receiver, channel};

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
