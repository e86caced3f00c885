//! Devices with shared time and SMs: the pool of FaST-GShare and Dilu.
//!
//! # Problem
//! A function has a profile and a load. The horizontal scaler decides the number and size of its instances, and the packer their places.
//! This pool makes the decisions between the two: the instance for each request, the fate of a request without an instance, the use of a
//! device with free time but no memory, and the news for each engine when a process or a device dies.
//!
//! # Algorithm
//! 1. *Load*: requests count when they come to the platform, held requests included while others wait here for an instance, and the
//!    scaler gets a report once a tick. The packer places the scaler's `Start`; a start without room is refused to the scaler, unless it
//!    is its function's only instance. A refused point is not tried again for a while.
//! 2. *Minimum* (`least_instances`): missing instances start at once where there is room at any of the function's points, even while
//!    the scaler waits, and ten seconds after the host refused a start. The first request of a function without instances raises its
//!    minimum to one, for as long as the gaps between its requests say that an instance pays
//!    ([`keep_alive`](FractionalConfig::keep_alive)).
//! 3. *Dispatch*: an instance takes as many requests at once as its point's batch; where the function takes them as one
//!    ([`batches`](FunctionSpec::batches)), one batch at a time, which may gather (`batch.rs`). A request goes to the ready instance with the fewest
//!    requests and then the highest throughput, or waits in the order of arrival.
//! 4. *Late requests*: in that order every request behind a burst would be late. A request past its SLO therefore waits behind those that
//!    can be in time, until it is **overdue** ([`late_wait`](FractionalConfig::late_wait)) and goes before all others. A [`QueueOrder`]
//!    replaces this order.
//! 5. *Room* (`parking`): a function's only instance waits for memory, the longest wait first. Idle instances on the device with the
//!    fewest victims are parked for it, two seconds after they came; after a wait of two seconds busy ones too, once they have
//!    answered their requests. A parked instance comes back for a waiting request.
//! 6. *Spread models* (`spread`): an instance of a function with several [`devices`](FunctionSpec::devices) is placed on as many
//!    different devices of one node, or on none; if they lack memory, room is made on all of them.
//! 7. *Weights* (`shared_weights`): instances of one model share its weights on a device, whose memory is booked once there, from the
//!    model's first instance on the device until its last.
//! 8. *Training*: a gang of workers starts together on different devices, or waits; a lost part restarts all, with a growing pause.
//!
//! # Example
//! Three functions of 9 GiB are called now and then on two devices of 16 GiB. The first two start. The third finds time but no memory:
//! the longer idle instance is parked, and the third's request is answered after the parking and a load. From then on each function is
//! served, with a load whenever it was parked since its last request.
//!
//! # Invariants
//! The contract of [`Pool`], and: no request waits while a ready instance of its function has room, but for a batch that gathers.
//!
//! # Cost
//! O(log n) for a request; O(n) over the instances of the pool when room is made.
//!
//! # Differences from the papers
//! The papers serve requests in the order of arrival. FaST-GShare and Dilu book memory for an instance's whole life, so functions with
//! little work shut others out; parking is FluidFaaS's time sharing (section 5.3) without slices.

mod gangs;
mod least_instances;
mod parking;
mod placing;
mod pool_config;
mod queueing;
mod request_order;
mod shared_weights;
mod spread;

use pool_config::RESTART_AFTER;
pub use pool_config::{FractionalConfig, FractionalPolicies};

use super::START_AGAIN;
use super::batch::Arrivals;
use super::host_cache::HostCache;
use super::timers::Timers;
use crate::pack::{Demand, GpuSpec, Packer};
use crate::pipeline::{Gaps, Stay};
use crate::platform::{
    DeviceSpec, FunctionSpec, InstanceNames, InstanceReport, InstanceView, Life, Part, PlatformAction, Pool,
    PoolAction, PoolError, PoolEvent, QueueOrder, Regime, StopCause, Work,
};
use crate::scale::{FunctionScale, HorizontalAction, HorizontalEvent, HorizontalScaler};
use gangs::Gang;
use gshare_core::profile::{ProfilePoint, RequestRate, Setting};
use gshare_core::{
    Bytes, ConfigError, Duration, Engine, FunctionId, GpuId, InstanceId, NodeId, PlacementId, RequestId,
    Timestamp,
};
use request_order::LateLast;
use shared_weights::SharedWeights;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A state of an instance, finer than [`Life`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Ordered by the scaler, without room on any device yet.
    WaitingForRoom,
    Starting,
    Ready,
    /// Gets no more requests, and is parked after its last one.
    Emptying,
    Parking,
    Parked,
    Unparking,
    Draining,
    Stopping,
}

impl State {
    const fn life(self) -> Life {
        match self {
            Self::WaitingForRoom | Self::Starting => Life::Starting,
            Self::Ready | Self::Emptying => Life::Ready,
            Self::Parking | Self::Parked | Self::Unparking => Life::Parked,
            Self::Draining => Life::Draining,
            Self::Stopping => Life::Stopped,
        }
    }
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    /// The scaler's name of the instance, while the scaler counts it.
    scaled: Option<InstanceId>,
    state: State,
    demand: Demand,
    /// Most requests at once.
    capacity: u32,
    throughput: RequestRate,
    /// Its placements, each with the device's name.
    placements: Vec<(PlacementId, GpuId)>,
    /// Its devices, or the devices before it was parked, and their node; empty before its start.
    home: BTreeSet<GpuId>,
    node: Option<NodeId>,
    requests: BTreeSet<RequestId>,
    /// Time of the last begin or end of a request, or of its becoming ready.
    used: Timestamp,
    /// Time of its becoming ready, the last time.
    came: Timestamp,
}

#[derive(Debug)]
struct Function {
    spec: FunctionSpec,
    /// Waiting requests, by arrival.
    queue: BTreeSet<(Timestamp, RequestId)>,
    instances: BTreeSet<InstanceId>,
    /// Ready instances with room, by (number of requests, slowness, name).
    open: BTreeSet<(u32, u64, InstanceId)>,
    /// Sum of its ready instances' throughputs, in thousandths of a request per second.
    serves: u128,
    /// Number of requests that its ready instances serve at once.
    at_once: u64,
    /// Number of requests since the last report; then the time of that report.
    arrived: u32,
    reported: Timestamp,
    /// Time of the last arrival or end of a request.
    used: Timestamp,
    /// The pauses between its requests of a second or more, and when they say that an instance pays.
    gaps: Gaps,
    stays: Vec<Stay>,
    /// Requests since the last such pause, and eight times the mean of these.
    visit: u64,
    visits: u64,
    /// The part of a device that its last instance booked, of 10^8.
    area: u64,
    arrivals: Arrivals,
    /// Whether the minimum was raised to one.
    activated: bool,
    removed: bool,
    gang: Option<Gang>,
    /// Points without room for the minimum since the last look.
    refused: Vec<Setting>,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    function: FunctionId,
    arrived: Timestamp,
    on: Option<InstanceId>,
}

/// The purpose of a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Reports the function's load.
    Report(FunctionId),
    /// Tries again to make room.
    Room,
    /// Starts missing instances of the minimum again, some time after the host refused a start.
    Minimum(FunctionId),
    /// Starts the training job again.
    Restart(FunctionId),
    /// Gives out a batch, full or not.
    Batch(FunctionId),
}

/// Shares out the time and SMs of devices: the pool of this module.
pub struct FractionalPool {
    config: FractionalConfig,
    scaler: Box<dyn HorizontalScaler>,
    packer: Box<dyn Packer>,
    order: Box<dyn QueueOrder>,
    now: Timestamp,
    devices: BTreeMap<GpuId, DeviceSpec>,
    functions: BTreeMap<FunctionId, Function>,
    /// The gaps of all functions.
    gaps: Gaps,
    instances: BTreeMap<InstanceId, Instance>,
    by_placement: BTreeMap<PlacementId, InstanceId>,
    by_scaler: BTreeMap<InstanceId, InstanceId>,
    weights: SharedWeights,
    requests: BTreeMap<RequestId, Request>,
    /// Instances without room, the longest waiting first: new instances, and parked instances with waiting requests.
    wanting: VecDeque<parking::Wanting>,
    timers: Timers<Timer>,
    cache: HostCache,
    names: InstanceNames,
    /// Functions with requests that may find an instance now.
    to_serve: BTreeSet<FunctionId>,
    /// Whether an instance left a device since the last search for room.
    room_changed: bool,
    /// Training jobs that should run and do not.
    idle_gangs: BTreeSet<FunctionId>,
    /// Functions below their minimum for want of room.
    lacking: BTreeSet<FunctionId>,
}

gshare_core::debug_fields!(FractionalPool { now, devices, functions, instances });

/// The part of a device, of 10^8, that a typical instance books.
const TYPICAL_AREA: u64 = 10_000_000;
const REGIME: Regime = Regime::Fractional;

impl FractionalPool {
    /// A pool without devices and functions.
    ///
    /// # Errors
    /// [`ConfigError`] names the field and its bound.
    pub fn new(config: FractionalConfig, policies: FractionalPolicies) -> Result<Self, ConfigError> {
        config.validate()?;
        let cache = HostCache::new(config.host_memory);
        Ok(Self {
            order: Box::new(LateLast::new(&config)),
            config,
            scaler: policies.scaler,
            packer: policies.packer,
            now: Timestamp::ZERO,
            devices: BTreeMap::new(),
            functions: BTreeMap::new(),
            gaps: Gaps::default(),
            instances: BTreeMap::new(),
            by_placement: BTreeMap::new(),
            by_scaler: BTreeMap::new(),
            weights: SharedWeights::default(),
            requests: BTreeMap::new(),
            wanting: VecDeque::new(),
            timers: Timers::default(),
            cache,
            names: InstanceNames::default(),
            to_serve: BTreeSet::new(),
            room_changed: false,
            idle_gangs: BTreeSet::new(),
            lacking: BTreeSet::new(),
        })
    }

    /// The same pool with the host's own order of waiting requests in place of [`FractionalConfig::late_wait`].
    #[must_use]
    pub fn with_order(self, order: Box<dyn QueueOrder>) -> Self {
        Self { order, ..self }
    }

    /// Handles the deadlines up to now.
    fn catch_up(&mut self, actions: &mut Vec<PoolAction>) {
        if self.scaler.next_deadline().is_some_and(|due| due <= self.now) {
            self.scale(HorizontalEvent::DeadlineReached, actions);
        }
        while let Some(timer) = self.timers.pop(self.now) {
            match timer {
                Timer::Report(function) => self.report(function, actions),
                Timer::Room => self.room_changed = true,
                Timer::Minimum(function) => self.keep_minimum(function, actions),
                Timer::Restart(function) => self.start_gang(function, actions),
                Timer::Batch(function) => {
                    self.to_serve.insert(function);
                }
            }
        }
    }

    /// Serves requests and gives room until both are done.
    fn settle(&mut self, actions: &mut Vec<PoolAction>) {
        loop {
            while let Some(function) = self.to_serve.pop_first() {
                self.serve(function, actions);
            }
            if !core::mem::take(&mut self.room_changed) {
                break;
            }
            self.give_room(actions);
            for function in core::mem::take(&mut self.lacking) {
                self.keep_minimum(function, actions);
            }
            for function in self.idle_gangs.clone() {
                self.start_gang(function, actions);
            }
        }
    }

    fn join(&mut self, gpu: GpuId, spec: DeviceSpec) -> Result<(), PoolError> {
        self.packer.add_gpu(gpu, GpuSpec::new(spec.memory)).map_err(|error| REGIME.bad_device(gpu, error))?;
        self.devices.insert(gpu, spec);
        self.room_changed = true;
        Ok(())
    }

    fn lose(&mut self, gpu: GpuId, actions: &mut Vec<PoolAction>) {
        let there = |(id, of): (&InstanceId, &Instance)| of.home.contains(&gpu).then_some(*id);
        let lost: Vec<InstanceId> = self.instances.iter().filter_map(there).collect();
        // The packer must have all placements back, and be without the device, before the next placement.
        for instance in &lost {
            let placements = self.instances.get_mut(instance).map(|of| core::mem::take(&mut of.placements));
            self.release(placements.unwrap_or_default());
        }
        let removed = self.packer.remove_gpu(gpu);
        debug_assert!(removed.is_ok(), "the packer holds something on a device that is lost: {removed:?}");
        if let Some(node) = self.devices.remove(&gpu).map(|spec| spec.node)
            && self.devices.values().all(|device| device.node != node)
        {
            self.cache.lose(node);
        }
        let functions: BTreeSet<FunctionId> = lost.iter().map(|one| self.instances[one].function).collect();
        for instance in lost {
            self.gone(instance, actions);
        }
        for function in functions {
            self.keep_minimum(function, actions);
        }
    }

    fn add_function(&mut self, function: FunctionId, spec: FunctionSpec, actions: &mut Vec<PoolAction>) {
        let gang = matches!(spec.work, Work::Training { .. }).then(|| Gang::new(RESTART_AFTER));
        let trains = gang.is_some();
        let of = Function {
            spec,
            queue: BTreeSet::new(),
            instances: BTreeSet::new(),
            open: BTreeSet::new(),
            serves: 0,
            at_once: 0,
            arrived: 0,
            reported: self.now,
            used: self.now,
            gaps: Gaps::default(),
            stays: Vec::new(),
            visit: 0,
            visits: 8,
            area: TYPICAL_AREA,
            arrivals: Arrivals::default(),
            activated: false,
            removed: false,
            gang,
            refused: Vec::new(),
        };
        self.functions.insert(function, of);
        if trains {
            self.idle_gangs.insert(function);
            self.start_gang(function, actions);
        } else {
            self.timers.set(Timer::Report(function), self.now.saturating_add(self.scaler.tick()));
        }
    }

    fn remove_function(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.removed = true;
        let instances = of.instances.clone();
        let trains = of.gang.is_some();
        self.timers.clear(Timer::Report(function));
        self.timers.clear(Timer::Restart(function));
        self.timers.clear(Timer::Minimum(function));
        self.timers.clear(Timer::Batch(function));
        self.lacking.remove(&function);
        self.idle_gangs.remove(&function);
        if !trains {
            self.scale(HorizontalEvent::FunctionRemoved { function }, actions);
        }
        for instance in instances {
            self.forget_scaled(instance);
            self.drain(instance, StopCause::Removed, actions);
        }
        let mut orders = Vec::new();
        self.cache.remove(function, &mut orders);
        actions.extend(orders.into_iter().map(PoolAction::Order));
        self.drop_if_done(function);
    }

    /// Forgets a removed function after its last instance and request.
    fn drop_if_done(&mut self, function: FunctionId) {
        if self.functions.get(&function).is_some_and(|of| of.removed && of.instances.is_empty()) {
            self.functions.remove(&function);
        }
    }
}

/// The event with the whole of the SMs for an added function, wherever its points or its share name a part of them.
fn on_all_sms(mut event: PoolEvent) -> PoolEvent {
    if let PoolEvent::FunctionAdded { spec, .. } = &mut event {
        match &mut spec.work {
            Work::Inference { profile: Some(profile) } => *profile = profile.on_all_sms(),
            Work::Training { share, .. } => *share = share.on_all_sms(),
            _ => {}
        }
    }
    event
}

impl Engine for FractionalPool {
    type Event = PoolEvent;
    type Action = PoolAction;
    type Error = PoolError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: PoolEvent,
        actions: &mut Vec<PoolAction>,
    ) -> Result<(), PoolError> {
        let event = if self.config.sm_partitions { event } else { on_all_sms(event) };
        // Two events may still be refused, by their engine: it is asked before any change.
        let mut scaled = Vec::new();
        match &event {
            PoolEvent::FunctionAdded { function, spec } => {
                if let Work::Inference { profile: Some(profile) } = &spec.work {
                    let of = FunctionScale {
                        profile: profile.clone(),
                        // Half of the SLO is for waiting (Dilu, section 3.2, footnote 2).
                        max_p95: spec.slo.map(|slo| Duration::from_nanos(slo.as_nanos() / 2)),
                        min_instances: spec.min_instances,
                        max_instances: spec.max_instances,
                    };
                    let added = HorizontalEvent::FunctionAdded { function: *function, spec: of };
                    self.scaler
                        .handle(now, added, &mut scaled)
                        .map_err(|error| REGIME.unsuitable(*function, error))?;
                }
            }
            PoolEvent::BoundsChanged { function, min_instances, max_instances } => {
                let Some(of) = self.functions.get_mut(function) else { return Ok(()) };
                if of.gang.is_none() {
                    let activated = u32::from(of.activated);
                    let changed = HorizontalEvent::BoundsChanged {
                        function: *function,
                        min_instances: (*min_instances).max(activated),
                        max_instances: *max_instances,
                    };
                    self.scaler
                        .handle(now, changed, &mut scaled)
                        .map_err(|error| REGIME.unsuitable(*function, error))?;
                }
                // The events below tell the scaler of the same bounds.
                (of.spec.min_instances, of.spec.max_instances) = (*min_instances, *max_instances);
            }
            _ => {}
        }
        self.now = self.now.max(now);
        // Deadlines must see the present devices and functions.
        match &event {
            PoolEvent::DeviceJoined { gpu, spec } => self.join(*gpu, spec.clone())?,
            PoolEvent::DeviceLost { gpu } => self.lose(*gpu, actions),
            PoolEvent::FunctionRemoved { function } => self.remove_function(*function, actions),
            // A deadline may undo the effects of the new bounds.
            PoolEvent::BoundsChanged { .. } => self.scaled(core::mem::take(&mut scaled), actions),
            _ => {}
        }
        self.catch_up(actions);
        match event {
            PoolEvent::DeviceJoined { .. }
            | PoolEvent::DeviceLost { .. }
            | PoolEvent::FunctionRemoved { .. }
            | PoolEvent::BoundsChanged { .. }
            | PoolEvent::TenantLimited { .. }
            | PoolEvent::DeadlineReached => {}
            PoolEvent::FunctionAdded { function, spec } => self.add_function(function, *spec, actions),
            PoolEvent::Held { function } => self.called(function, actions),
            PoolEvent::Arrived { request, function, arrived, held, .. } => {
                if !held {
                    self.called(function, actions);
                }
                self.arrived(request, function, arrived, actions);
            }
            PoolEvent::Done { request, .. } => self.done(request, actions),
            PoolEvent::Instance { instance, report } => self.reported(instance, report, actions),
        }
        self.scaled(scaled, actions);
        self.settle(actions);
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        [self.scaler.next_deadline(), self.timers.next()].into_iter().flatten().min()
    }
}

impl Pool for FractionalPool {
    fn regime(&self) -> Regime {
        REGIME
    }

    fn instances(&self, visit: &mut dyn FnMut(&InstanceView)) {
        for (&instance, of) in &self.instances {
            visit(&InstanceView {
                instance,
                function: of.function,
                life: of.state.life(),
                parts: self.parts(of),
                requests: u32::try_from(of.requests.len()).unwrap_or(u32::MAX),
            });
        }
    }

    fn waiting(&self, function: FunctionId) -> usize {
        self.functions.get(&function).map_or(0, |of| of.queue.len())
    }

    fn name_instances_by(&mut self, names: InstanceNames) {
        self.names = names;
    }

    fn fits(&self, function: FunctionId) -> bool {
        let Some(of) = self.functions.get(&function) else { return false };
        let weights = of.spec.weights.map_or(Bytes::ZERO, |weights| weights.bytes);
        let holds = |memory: Bytes| {
            let all = memory.saturating_add(weights);
            self.devices.values().filter(move |device| device.memory >= all)
        };
        match of.spec.work {
            Work::Training { workers, share } => {
                holds(share.memory().unwrap_or(of.spec.memory)).count() >= workers as usize
            }
            _ => {
                let mut nodes: BTreeMap<NodeId, u32> = BTreeMap::new();
                for device in holds(of.spec.memory_per_device()) {
                    *nodes.entry(device.node).or_default() += 1;
                }
                nodes.values().any(|count| *count >= of.spec.devices)
            }
        }
    }

    fn withdraw(&mut self, request: RequestId) {
        let Some(of) = self.requests.remove(&request) else { return };
        if let Some(instance) = of.on {
            // Before the instance has another place among the open ones.
            self.close(instance);
            self.instances.entry(instance).and_modify(|on| {
                on.requests.remove(&request);
            });
        } else if let Some(function) = self.functions.get_mut(&of.function) {
            function.queue.remove(&(of.arrived, request));
        }
    }

    fn invariants(&self) {
        for (id, of) in &self.instances {
            let function = &self.functions[&of.function];
            assert!(function.instances.contains(id), "{id} is not in the list of {}", of.function);
            let holds = !of.placements.is_empty();
            match of.state {
                State::WaitingForRoom | State::Parked => assert!(!holds, "{id} holds a device"),
                State::Stopping => {}
                _ => assert!(holds, "{id} is {:?} and holds nothing", of.state),
            }
            for (placement, _) in &of.placements {
                assert_eq!(self.by_placement.get(placement), Some(id), "{placement} is not that of {id}");
            }
            let open =
                of.state == State::Ready && function.gang.is_none() && of.has_room(function.spec.batches);
            assert_eq!(function.open.contains(&Self::open_key(*id, of)), open, "{id} takes requests or not");
            for request in &of.requests {
                assert_eq!(self.requests[request].on, Some(*id), "{request} runs elsewhere");
            }
        }
        for (id, of) in &self.functions {
            let gathers = self.timers.has(Timer::Batch(*id));
            assert!(
                of.queue.is_empty() || of.open.is_empty() || gathers,
                "{id} has room, and requests that wait"
            );
            assert!(of.queue.is_empty() || !of.removed, "{id} is removed, and requests wait");
            assert!(of.open.len() <= of.instances.len(), "{id} has more open instances than instances");
            let ready = of.instances.iter().map(|one| &self.instances[one]);
            let ready = ready.filter(|of| of.state == State::Ready);
            let (mut serves, mut at_once) = (0, 0);
            for one in ready {
                serves += u128::from(one.throughput.as_milli());
                at_once += u64::from(one.capacity);
            }
            assert_eq!(of.serves, serves, "{id} counts another throughput than its instances have");
            assert_eq!(of.at_once, at_once, "{id} counts another capacity than its instances have");
            for (_, request) in &of.queue {
                assert_eq!(self.requests[request].on, None, "{request} waits and runs");
            }
        }
        self.weights.invariants(&*self.packer);
        let held: usize = self.instances.values().map(|of| of.placements.len()).sum();
        let mut placed = 0;
        self.packer.placements(&mut |_| placed += 1);
        assert_eq!((held, held), (placed, self.by_placement.len()), "placements without an instance");
    }
}
