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
//! 2. *Minimum* (`least_instances`): missing instances start where there is room at any of the function's points, even while the
//!    scaler waits. The first request of a function without instances raises its minimum to one, for as long as the gaps between its
//!    requests say that an instance pays ([`keep_alive`](FractionalConfig::keep_alive)).
//! 3. *Dispatch*: an instance takes as many requests at once as its point's batch; where the function takes them as one
//!    ([`batches`](FunctionSpec::batches)), one batch at a time, which may gather (`batch.rs`). A request goes to the ready instance with the fewest
//!    requests and then the highest throughput, or waits in the order of arrival.
//! 4. *Late requests*: in that order every request behind a burst would be late. A request past its SLO therefore waits behind those that
//!    can be in time, until it is **overdue** ([`late_wait`](super::PlatformConfig::late_wait)) and goes before all others.
//! 5. *Room* (`parking`): a function's only instance waits for memory, the longest wait first. Idle instances on the device with the
//!    fewest victims are parked for it; after a wait of two seconds busy ones too, once they have answered their requests. An instance
//!    first stays four times as long as its parking and its load took, twice as long without calls, or at least once as long where a
//!    waiting request would be late otherwise. A parked instance comes back for a waiting request.
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
//! The contract of every pool, and: no request waits while a ready instance of its function has room, but for a batch that gathers.
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
mod shared_weights;
mod spread;

pub use pool_config::{FractionalConfig, FractionalPolicies};

use super::batch::Arrivals;
use super::cluster::Cluster;
use super::hash_table::Table;
use super::host_cache::HostCache;
use super::pool::Pool;
use super::timers::Timers;
use crate::pack::{Demand, GpuSpec, Packer};
use crate::pipeline::{Gaps, Stay};
use crate::platform::{DeviceSpec, InstanceReport, Part, PlatformAction, PoolError, Regime, StopCause, Work};
use crate::scale::{Fleet, FunctionScale, HorizontalOrder, HorizontalScaler, max_p95};
use gangs::Gang;
use gshare_core::profile::{ProfilePoint, RequestRate};
use gshare_core::{
    ConfigError, Duration, FunctionId, GpuId, InstanceId, NodeId, PlacementId, Quota, RequestId, SmShare,
    Timestamp,
};
use shared_weights::SharedWeights;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A state of an instance, finer than its [`Life`](super::Life).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Ordered by the scaler, without room on any device yet: the ledger does not know it.
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

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    state: State,
    demand: Demand,
    /// Most requests of a batch, and most requests at once before the instance has room for no other: one if it takes them as
    /// batches.
    capacity: u32,
    room: u32,
    throughput: RequestRate,
    /// Its placements, each with the device's name.
    placements: Vec<(PlacementId, GpuId)>,
    /// Its node; None before its start.
    node: Option<NodeId>,
    /// Its place among the instances of its function that have room for a request.
    open: Option<OpenKey>,
    /// Time of the last begin or end of a request, or of its becoming ready.
    used: Timestamp,
    /// Time of its becoming ready, the last time.
    came: Timestamp,
}

/// The number of an instance's requests, its slowness and its name: the least takes the next request.
type OpenKey = (usize, u64, InstanceId);

#[derive(Debug)]
struct Function {
    instances: BTreeSet<InstanceId>,
    /// Ready instances with room.
    open: BTreeSet<OpenKey>,
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
    gang: Option<Gang>,
    /// The instances that the scaler counts; None for a training job, and for a removed function.
    fleet: Option<Fleet>,
}

/// The purpose of a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Reports the function's load.
    Report(FunctionId),
    /// Tries again to make room.
    Room,
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
    devices: BTreeMap<GpuId, NodeId>,
    functions: Table<FunctionId, Function>,
    /// The gaps of all functions.
    gaps: Gaps,
    instances: Table<InstanceId, Instance>,
    weights: SharedWeights,
    /// Instances without room, the longest waiting first: new instances, and parked instances with waiting requests.
    wanting: VecDeque<parking::Wanting>,
    timers: Timers<Timer>,
    cache: HostCache,
    /// Functions with requests that may find an instance now, in the order of their names.
    to_serve: VecDeque<FunctionId>,
    /// Whether an instance left a device since the last search for room.
    room_changed: bool,
    /// Training jobs that should run and do not.
    idle_gangs: BTreeSet<FunctionId>,
}

gshare_core::debug_fields!(FractionalPool { devices, functions, instances });

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
            config,
            scaler: policies.scaler,
            packer: policies.packer,
            devices: BTreeMap::new(),
            functions: Table::default(),
            gaps: Gaps::default(),
            instances: Table::default(),
            weights: SharedWeights::default(),
            wanting: VecDeque::new(),
            timers: Timers::default(),
            cache,
            to_serve: VecDeque::new(),
            room_changed: false,
            idle_gangs: BTreeSet::new(),
        })
    }

    /// Adds a function, with the whole of the SMs wherever its points or its share name a part of them but the device has no
    /// partitions.
    fn added(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        let (spec, now) = (&cluster.functions[&function].spec, cluster.now);
        let (mut gang, mut fleet) = (None, None);
        match &spec.work {
            Work::Training { workers, share } => {
                let share = if self.config.sm_partitions { *share } else { share.on_all_sms() };
                gang = Some(Gang::new(*workers, share, spec.found));
            }
            Work::Inference { profile: Some(profile) } => {
                let of = FunctionScale {
                    profile: if self.config.sm_partitions { profile.clone() } else { profile.on_all_sms() },
                    max_p95: spec.slo.map(max_p95),
                    min_instances: spec.min_instances,
                    max_instances: spec.max_instances,
                };
                let new = Fleet::new(function, of);
                fleet = Some(new.map_err(|error| REGIME.unsuitable(function, error))?);
            }
            _ => {}
        }
        let trains = gang.is_some();
        let of = Function {
            instances: BTreeSet::new(),
            open: BTreeSet::new(),
            serves: 0,
            at_once: 0,
            arrived: 0,
            reported: now,
            used: now,
            gaps: Gaps::default(),
            stays: Vec::new(),
            visit: 0,
            visits: 8,
            area: TYPICAL_AREA,
            arrivals: Arrivals::default(),
            activated: false,
            gang,
            fleet,
        };
        self.functions.insert(function, of);
        if trains {
            self.idle_gangs.insert(function);
            self.start_gang(function, cluster);
        } else {
            self.timers.set(Timer::Report(function), now.saturating_add(self.scaler.config().tick));
            self.start_missing(function, cluster);
        }
        Ok(())
    }

    /// Forgets a removed function after its last instance and request.
    fn drop_if_done(&mut self, function: FunctionId, cluster: &Cluster) {
        let empty = self.functions.get(&function).is_some_and(|of| of.instances.is_empty());
        if empty && cluster.is_removed(function) {
            self.functions.remove(&function);
        }
    }
}

impl Pool for FractionalPool {
    fn regime(&self) -> Regime {
        REGIME
    }

    fn device_joined(&mut self, _: &mut Cluster, gpu: GpuId, spec: &DeviceSpec) -> Result<(), PoolError> {
        self.packer.add_gpu(gpu, GpuSpec::new(spec.memory)).map_err(|error| REGIME.bad_device(gpu, error))?;
        self.devices.insert(gpu, spec.node);
        self.room_changed = true;
        Ok(())
    }

    fn device_lost(&mut self, cluster: &mut Cluster, gpu: GpuId, lost: &[InstanceId]) {
        // The packer must have all placements back, and be without the device, before the next placement.
        for one in lost {
            let of = self.instances.get_mut(one);
            let placements = of.map(|of| core::mem::take(&mut of.placements));
            self.release(placements.unwrap_or_default());
        }
        let removed = self.packer.remove_gpu(gpu);
        debug_assert!(removed.is_ok(), "the packer holds something on a device that is lost: {removed:?}");
        if let Some(node) = self.devices.remove(&gpu)
            && self.devices.values().all(|other| *other != node)
        {
            self.cache.lose(node);
        }
        for one in lost {
            self.forget(*one, cluster);
        }
    }

    fn function_added(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        self.added(cluster, function)
    }

    fn bounds_changed(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        let spec = &cluster.functions[&function].spec;
        let bounds = (spec.min_instances, spec.max_instances);
        self.release_gang(function, cluster);
        self.set_bounds(function, bounds, cluster).map_err(|error| REGIME.unsuitable(function, error))
    }

    fn nodes_changed(&mut self) {
        self.room_changed = true;
    }

    fn instance_found(
        &mut self,
        cluster: &mut Cluster,
        function: FunctionId,
        gpu: GpuId,
        share: (Quota, SmShare),
    ) -> Result<(), PoolError> {
        self.found(function, gpu, share, cluster)
    }

    fn function_removed(&mut self, cluster: &mut Cluster, function: FunctionId) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.fleet = None;
        let instances = of.instances.clone();
        self.timers.clear(Timer::Report(function));
        self.timers.clear(Timer::Restart(function));
        self.timers.clear(Timer::Batch(function));
        self.idle_gangs.remove(&function);
        self.scaler.forget(function);
        for instance in instances {
            self.drain(instance, StopCause::Removed, cluster);
        }
        self.cache.remove(function, &mut cluster.orders);
        self.drop_if_done(function, cluster);
    }

    fn called(&mut self, cluster: &mut Cluster, function: FunctionId) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.arrived = of.arrived.saturating_add(1);
        of.visit += 1;
        of.arrivals.came(cluster.now);
        let gap = cluster.now.saturating_since(core::mem::replace(&mut of.used, cluster.now));
        if gap >= Duration::from_secs(1) && (of.activated || of.gaps.total() > 0) {
            of.gaps.add(gap);
            of.visits += core::mem::replace(&mut of.visit, 1).saturating_sub(1).max(1);
            of.visits -= of.visits / 8;
            self.gaps.add(gap);
            self.plan_stays(function);
        }
        self.activate(function, cluster);
    }

    fn arrived(&mut self, cluster: &mut Cluster, request: RequestId) {
        let function = cluster.requests[&request].function;
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.used = cluster.now;
        self.activate(function, cluster);
        self.report_early(function, cluster);
        self.serve_soon(function);
    }

    fn done(&mut self, cluster: &mut Cluster, _: RequestId, instance: InstanceId, _: Duration) {
        self.answered(instance, cluster);
    }

    fn reported(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport) {
        let Some(of) = self.instances.get(&instance) else { return };
        match (report, of.state) {
            (InstanceReport::Ready, State::Starting) => self.ready(instance, cluster),
            (InstanceReport::Parked, State::Parking) => {
                let function = of.function;
                self.enter(instance, State::Parked);
                if let Some(of) = self.instances.get_mut(&instance) {
                    let placements = core::mem::take(&mut of.placements);
                    self.release(placements);
                }
                self.serve_soon(function);
            }
            (InstanceReport::Unparked, State::Unparking) => self.open(instance, cluster),
            _ => {}
        }
    }

    fn gone(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport) {
        let Some(of) = self.instances.get(&instance) else { return };
        let function = of.function;
        match (report, of.state) {
            (InstanceReport::Refused, State::Starting) => {
                let until = cluster.now.saturating_add(self.scaler.config().retry_after);
                if let Some(fleet) = self.fleet_mut(function)
                    && let Some(point) = fleet.starts_at(instance)
                {
                    fleet.refuse(point, until);
                }
                self.forget(instance, cluster);
            }
            (InstanceReport::Completed, _) => {
                self.completed(function);
                self.forget(instance, cluster);
            }
            _ => self.forget(instance, cluster),
        }
    }

    fn keep_minimum(&mut self, cluster: &mut Cluster, function: FunctionId, may_start: bool) {
        if may_start && self.lacks(function) {
            self.retry_missing(function, cluster);
        }
    }

    fn deadline(&mut self, cluster: &mut Cluster) {
        while let Some(timer) = self.timers.pop(cluster.now) {
            match timer {
                Timer::Report(function) => self.report(function, cluster),
                Timer::Room => self.room_changed = true,
                Timer::Restart(function) => self.start_gang(function, cluster),
                Timer::Batch(function) => self.serve_soon(function),
            }
        }
    }

    /// Serves requests and gives room until both are done.
    fn settle(&mut self, cluster: &mut Cluster) {
        loop {
            while let Some(function) = self.to_serve.pop_front() {
                self.serve(function, cluster);
            }
            if !core::mem::take(&mut self.room_changed) {
                break;
            }
            self.give_room(cluster);
            for function in self.idle_gangs.clone() {
                self.start_gang(function, cluster);
            }
        }
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.timers.next()
    }

    fn invariants(&self, cluster: &Cluster) {
        for (id, of) in self.instances.sorted() {
            let function = &self.functions[&of.function];
            assert!(function.instances.contains(&id), "{id} is not in the list of {}", of.function);
            let holds = !of.placements.is_empty();
            match of.state {
                State::WaitingForRoom | State::Parked => assert!(!holds, "{id} holds a device"),
                State::Stopping => {}
                _ => assert!(holds, "{id} is {:?} and holds nothing", of.state),
            }
            let known = cluster.instances.get(id).is_some();
            assert_eq!(known, of.state != State::WaitingForRoom, "{id} is known to the host or not");
            let key = of.open_key(id, cluster.runs(id)).filter(|_| function.gang.is_none());
            assert_eq!(of.open, key, "{id} takes requests or not");
            assert!(key.is_none_or(|key| function.open.contains(&key)), "{id} is not open");
        }
        for (id, of) in self.functions.sorted() {
            let queue = cluster.queue(id);
            let gathers = self.timers.has(Timer::Batch(id));
            assert!(
                queue.is_empty() || of.open.is_empty() || gathers,
                "{id} has room, and requests that wait"
            );
            assert!(of.open.len() <= of.instances.len(), "{id} has more open instances than instances");
            let serves = |one: InstanceId| match self.instances.get(&one)?.state {
                State::WaitingForRoom | State::Starting => Some(false),
                State::Draining | State::Stopping => None,
                _ => Some(true),
            };
            of.fleet.iter().for_each(|fleet| fleet.invariants(serves));
            let ready = of.instances.iter().map(|one| &self.instances[one]);
            let ready = ready.filter(|of| of.state == State::Ready);
            let (mut serves, mut at_once) = (0, 0);
            for one in ready {
                serves += u128::from(one.throughput.as_milli());
                at_once += u64::from(one.capacity);
            }
            assert_eq!(of.serves, serves, "{id} counts another throughput than its instances have");
            assert_eq!(of.at_once, at_once, "{id} counts another capacity than its instances have");
        }
        self.weights.invariants(&*self.packer);
        let held: usize = self.instances.sorted().iter().map(|(_, of)| of.placements.len()).sum();
        let mut placed = 0;
        self.packer.placements(&mut |_| placed += 1);
        assert_eq!(held, placed, "placements without an instance");
    }
}
