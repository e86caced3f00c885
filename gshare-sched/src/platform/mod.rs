//! The composite engine of a cluster: the place of each function, its number of instances, and the instance for each request.
//!
//! # Problem
//! A user deploys a function with a latency to keep and expects the rest to follow: profiling, scaling, placement, requests, and room for
//! other functions. Each of these is an engine of this crate. A host that wires them itself writes the same several hundred lines as
//! every other host, and makes other mistakes. [`Platform`] is that wiring, as an engine: it decides, and a host (processes on one node,
//! pods of a cluster, a simulation) carries out.
//!
//! # Terms
//! - **device**: a GPU, or one MIG instance; named by a [`GpuId`]. Its [`Regime`] says how it is shared;
//! - **instance**: one running copy of a function. It has one [`Part`] on a device, or several: the stages of a pipeline, the workers of
//!   a training job, or the devices of a spread model. A **parked** instance has its device state in host memory, and its process lives;
//! - **pool**: the devices of one regime with the engines that share them: a [`RegimePool`];
//! - **held**: a request of a tenant at its limit, or of a function without a profile so far. All others are in their functions' pools.
//!   A request **waits** until it is dispatched, held or not.
//!
//! # Life of an instance
//! ```text
//! Start ─▶ Starting ─ Ready ─▶ Ready ─ Drain ─▶ Draining ─ Stop ─▶ Stopped ─ Gone ─▶ forgotten
//!             │ Refused, Gone    │  ▲
//!             ▼           Park   ▼  │ Unpark, Unparked
//!         forgotten             Parked
//! ```
//! [`InstanceReport::Gone`] may come in every state, since a process can die at any time; its requests wait again, a bounded number of
//! times. A request goes `RequestArrived` ─▶ (waits) ─▶ `Dispatch` ─▶ `RequestDone`, and may end with `Reject` while it waits.
//!
//! # Algorithm
//! 1. *Devices* go to their regime's pool: [`FractionalPool`] (shared time and SMs), [`SlicedPool`] (MIG) or [`WholePool`] (whole GPUs).
//! 2. *Functions* go to their regime's pool; without one pipelines go to sliced devices, training to fractional ones, and inference to
//!    fractional, else whole, else sliced ones. An inference function without a profile is profiled first; its requests wait.
//! 3. *Requests* pass their tenant's limits (`tenant_limits.rs`), then the pool decides where and when they run. In every regime the
//!    platform bounds their number, their wait and their attempts ([`PlatformConfig`]), and withdraws a request from its pool at the
//!    end. Requests of a function that no device so far could hold are rejected; without a device, or without room now, they wait. A
//!    pool learns of held requests while others wait in it: load beyond a limit then counts as far as more instances would help.
//! 4. *Instances* are placed by the pools; the ledger (`cluster.rs`) has the life of each, books its memory for its tenant, and passes
//!    orders and reports on. An instance that does not answer in time is stopped (`instances.rs`), and a function must drain in time
//!    once it is removed.
//! 5. *Minimums*: the ledger counts the instances that stay. It asks the pool for missing instances after each change of a function's
//!    instances or bounds, and after each change of room while some are missing; but ten seconds after a failed start at the earliest.
//!
//! # Invariants
//! A request is answered once, or rejected once, or waits in one place; it is dispatched only to a ready instance of its function. No
//! device holds more than it has. A started instance is known until its host reports it gone or its device is lost.
//!
//! # Cost
//! O(log n) over requests, instances and devices, plus the pool's cost; O(its instances) for a removed function.

mod admission;
mod batch;
mod choice;
mod cluster;
mod device_spec;
mod error;
mod event;
mod fractional;
mod function_spec;
mod functions;
mod gpu_time;
mod hash_table;
mod host_cache;
mod instances;
mod late_last;
mod moves;
mod pool;
mod requests;
mod settings;
mod sliced;
mod tenant_limits;
#[cfg(test)]
mod testing;
mod timers;
mod whole;

pub use device_spec::*;
pub use error::PlatformError;
pub use event::*;
pub use fractional::{FractionalConfig, FractionalPolicies, FractionalPool};
pub use function_spec::*;
pub use functions::{FunctionState, FunctionStats, FunctionView};
pub use pool::{InstanceView, PoolError, RegimePool};
pub use settings::{FractionalSettings, OwnPolicies, PackerSettings, PlatformSettings, ScalerSettings};
pub use sliced::{SlicedConfig, SlicedError, SlicedPool};
pub use tenant_limits::TenantLimits;
pub use whole::{Choice, Locality, ModelCopy, Room, WholeConfig, WholeDevices, WholePolicy, WholePool};

use cluster::{Cluster, Device};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, InstanceId, NodeId, RequestId, TenantId, TimeWentBack,
    Timestamp,
};
use pool::Pool;
use requests::Request;
use std::collections::{BTreeMap, BTreeSet};

crate::settings_table::settings! {
    /// Bounds that hold in every regime.
    pub struct PlatformConfig {
        /// The longest time until a request's dispatch, from its arrival. 60 s: a gateway's own time-out.
        #[cfg_attr(feature = "serde", serde(rename = "max_wait_ns"))]
        pub max_wait: Duration = Duration::from_secs(60), with_max_wait;
        /// Most waiting requests of a function. 10,000: beyond that, waiting requests are hardly worth an answer.
        pub max_waiting: u32 = 10_000, with_max_waiting;
        /// Most dispatches of a request before it is rejected, if its instances end each time. 3: a request that kills its instance
        /// must end.
        pub max_attempts: u8 = 3, with_max_attempts;
        /// Time in which an instance must become ready, or twice the expected time of its start where that is longer. 120 s:
        /// several times the cold start of a large model.
        #[cfg_attr(feature = "serde", serde(rename = "start_timeout_ns"))]
        pub start_timeout: Duration = Duration::from_secs(120), with_start_timeout;
        /// Time limit for an instance to be parked, or to come back. 60 s: several times the largest model's time.
        #[cfg_attr(feature = "serde", serde(rename = "park_timeout_ns"))]
        pub park_timeout: Duration = Duration::from_secs(60), with_park_timeout;
        /// Time in which a draining instance, or an instance of a removed function, must finish its requests. 60 s: far beyond any
        /// SLO.
        #[cfg_attr(feature = "serde", serde(rename = "drain_timeout_ns"))]
        pub drain_timeout: Duration = Duration::from_secs(60), with_drain_timeout;
        /// How long after its SLO a late request waits behind requests of its function that can be in time, while more requests
        /// wait than are served. 20 s: about a burst, and within a client's patience. None: the order of arrival, in which all
        /// requests behind a burst are late.
        #[cfg_attr(feature = "serde", serde(rename = "late_wait_ns"))]
        pub late_wait: Option<Duration> = Some(Duration::from_secs(20)), with_late_wait;
        /// The same time in percent of the time that its function then needs for all waiting requests; the longer time holds. 200:
        /// under a backlog of more than half of `late_wait` a late request waits twice as long as it would first come, first
        /// served, so that about half of the others can be in time. With a fixed bound alone, lasting overload makes all waiting
        /// requests overdue, and none is in time. 0: the fixed bound alone.
        pub late_stretch_percent: u32 = 200, with_late_stretch_percent;
    }
}

/// Decides for a whole cluster: the engine of this module.
///
/// # Example
/// ```
/// use gshare_sched::platform::{DeviceSpec, FunctionSpec, InstanceReport, PlatformAction, PlatformEvent, Work, Platform};
/// use gshare_core::profile::{ProfilePoint, ProfileTable};
/// use gshare_core::{Bytes, Duration, Engine, FunctionId, GpuId, NodeId, Quota, RequestId, SmShare, Timestamp};
///
/// let ms = Duration::from_millis;
/// let half = SmShare::from_percent(50).unwrap();
/// let point = ProfilePoint::measured(half, Quota::WHOLE, 1, 70.0, ms(14), ms(17))?;
/// let work = Work::Inference { profile: Some(ProfileTable::grid(vec![point])?) };
/// let function = FunctionSpec::new(work, Bytes::from_gib(2)).with_slo(ms(69));
///
/// let (mut platform, mut orders) = (Platform::fractional()?, Vec::new());
/// let gpu = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
/// for event in [
///     PlatformEvent::DeviceFound { gpu: GpuId::new(0), spec: gpu },
///     PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec: Box::new(function) },
///     PlatformEvent::RequestArrived { request: RequestId::new(1), function: FunctionId::new(0), deadline: None },
/// ] {
///     platform.handle(Timestamp::ZERO, event, &mut orders)?;
/// }
/// let Some(PlatformAction::Start { instance, .. }) = orders.pop() else { panic!("nothing was started") };
/// let ready = PlatformEvent::Instance { instance, report: InstanceReport::Ready };
/// platform.handle(Timestamp::from_millis(900), ready, &mut orders)?;
/// assert_eq!(orders, [PlatformAction::Dispatch { request: RequestId::new(1), instance }]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Platform {
    cluster: Cluster,
    pools: Vec<Box<dyn Pool>>,
    /// Pools with a withdrawn request and no settlement since then.
    unsettled: BTreeSet<usize>,
    /// Functions that no device so far could hold.
    unfit: BTreeSet<FunctionId>,
}

impl core::fmt::Debug for Platform {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Platform")
            .field("now", &self.cluster.now)
            .field("devices", &self.cluster.devices.len())
            .field("functions", &self.cluster.functions.len())
            .field("instances", &self.cluster.instances.len())
            .field("requests", &self.cluster.requests.len())
            .finish_non_exhaustive()
    }
}

impl Platform {
    /// A platform without devices and functions, over pools of different regimes.
    ///
    /// # Errors
    /// [`PlatformError::PoolTwice`], and [`PlatformError::Config`] with the field and its bound.
    pub fn new(config: PlatformConfig, pools: Vec<RegimePool>) -> Result<Self, PlatformError> {
        let (least, day) = (Duration::from_nanos(1), Duration::from_secs(86_400));
        gshare_core::check_fields!(config {
            max_wait, start_timeout, park_timeout, drain_timeout in least..=day, "need more than 0, at most a day";
            max_waiting in 1.., "need more than 0";
            max_attempts in 1.., "need more than 0";
        })?;
        let pools: Vec<Box<dyn Pool>> = pools.into_iter().map(|pool| pool.0).collect();
        for (index, pool) in pools.iter().enumerate() {
            if pools[..index].iter().any(|other| other.regime() == pool.regime()) {
                return Err(PlatformError::PoolTwice { regime: pool.regime() });
            }
        }
        let cluster = Cluster::new(config);
        Ok(Self { cluster, pools, unsettled: BTreeSet::new(), unfit: BTreeSet::new() })
    }

    /// A platform of fractional devices, with the default policies.
    ///
    /// # Errors
    /// None for these settings.
    pub fn fractional() -> Result<Self, PlatformError> {
        let pool = FractionalPool::new(FractionalConfig::default(), FractionalPolicies::fast()?)?;
        Self::new(PlatformConfig::default(), vec![pool.into()])
    }

    /// Calls `visit` with each instance that the host knows, in the order of their names.
    pub fn instances(&self, visit: &mut dyn FnMut(&InstanceView)) {
        for (instance, _) in self.cluster.instances.sorted() {
            self.instance(instance).iter().for_each(&mut *visit);
        }
    }

    /// An instance that the host knows.
    pub fn instance(&self, instance: InstanceId) -> Option<InstanceView> {
        let of = self.cluster.instances.get(instance)?;
        let requests = u32::try_from(of.requests.len()).unwrap_or(u32::MAX);
        let (function, life, moving, parts) = (of.function, of.life, of.moving, of.parts().to_vec());
        Some(InstanceView { instance, function, life, moving, parts, requests })
    }

    fn pool_of(&self, regime: Regime) -> Option<usize> {
        self.pools.iter().position(|pool| pool.regime() == regime)
    }

    /// Tells a pool of something that concerns it.
    fn tell(&mut self, pool: usize, act: impl FnOnce(&mut dyn Pool, &mut Cluster)) {
        act(&mut *self.pools[pool], &mut self.cluster);
        self.pools[pool].settle(&mut self.cluster);
        self.unsettled.remove(&pool);
    }

    /// Tells a pool of something that it may refuse.
    fn try_tell(
        &mut self,
        pool: usize,
        act: impl FnOnce(&mut dyn Pool, &mut Cluster) -> Result<(), PoolError>,
    ) -> Result<(), PlatformError> {
        act(&mut *self.pools[pool], &mut self.cluster)?;
        self.tell(pool, |_, _| {});
        Ok(())
    }

    /// Handles the deadlines up to now, in pools and in the platform.
    fn catch_up(&mut self) {
        for pool in 0..self.pools.len() {
            if self.pools[pool].next_deadline().is_some_and(|due| due <= self.cluster.now) {
                self.tell(pool, |pool, cluster| pool.deadline(cluster));
            }
        }
        self.cluster.stop_overdue();
        while let Some(tenant) = self.cluster.tenants.pop_released(self.cluster.now) {
            self.admit(tenant);
        }
    }

    fn find_device(&mut self, gpu: GpuId, spec: &DeviceSpec) -> Result<(), PlatformError> {
        let regime = spec.effective_regime();
        let pool = self.pool_of(regime).ok_or(PlatformError::NoPool { regime })?;
        // The device must count when the pool's orders for it are checked.
        self.cluster.devices.insert(gpu, Device::new(pool, spec.node, spec.memory));
        if let Err(error) = self.try_tell(pool, |pool, cluster| pool.device_joined(cluster, gpu, spec)) {
            self.cluster.devices.remove(gpu);
            return Err(error);
        }
        self.room_changed();
        for function in self.unfit.clone() {
            self.look_whether_it_fits(function);
        }
        Ok(())
    }

    fn lose_device(&mut self, gpu: GpuId) {
        let Some(device) = self.cluster.devices.remove(gpu) else { return };
        self.lose_instances_on(device.pool, gpu);
        self.room_changed();
    }

    pub(super) fn room_changed(&mut self) {
        self.cluster.version += 1;
        self.cluster.look = true;
    }

    /// Checks the invariants between events; for tests and fuzzing.
    ///
    /// # Panics
    /// On a broken invariant, with a sentence about it.
    pub fn invariants(&self) {
        for pool in &self.pools {
            pool.invariants(&self.cluster);
        }
        self.cluster.invariants();
    }
}

impl Engine for Platform {
    type Event = PlatformEvent;
    type Action = PlatformAction;
    type Error = PlatformError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: PlatformEvent,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), PlatformError> {
        self.check(now, &event)?;
        let before = core::mem::replace(&mut self.cluster.now, now);
        // Before any pool may dispatch at this time.
        self.expire();
        // A pool may refuse a device, a function or its bounds: the platform asks before it changes anything.
        let asked = match &event {
            PlatformEvent::DeviceFound { gpu, spec } => self.find_device(*gpu, spec),
            PlatformEvent::FunctionDeployed { function, spec } => self.deploy(*function, spec),
            PlatformEvent::ProfileLearned { function, profile, memory } => {
                self.learn(*function, profile, *memory)
            }
            PlatformEvent::BoundsChanged { function, min_instances, max_instances } => {
                self.rebound(*function, *min_instances, *max_instances)
            }
            PlatformEvent::NodesChanged { function, nodes } => self.allow_nodes(*function, nodes.as_ref()),
            PlatformEvent::InstanceFound { function, gpu, quota, sm } => {
                self.find_instance(*function, *gpu, (*quota, *sm))
            }
            _ => Ok(()),
        };
        if let Err(error) = asked {
            self.cluster.now = before;
            return Err(error);
        }
        match event {
            // Before any start on the device or for the function.
            PlatformEvent::DeviceLost { gpu } => self.lose_device(gpu),
            PlatformEvent::FunctionRemoved { function } => self.remove(function),
            _ => {}
        }
        self.catch_up();
        match event {
            PlatformEvent::TenantLimited { tenant, limits } => {
                self.cluster.tenants.limit(tenant, limits);
                for pool in 0..self.pools.len() {
                    self.tell(pool, |pool, cluster| pool.tenant_limited(cluster, tenant, limits));
                }
                self.room_changed();
                self.admit(tenant);
            }
            PlatformEvent::RequestArrived { request, function, deadline } => {
                self.arrived(request, function, deadline);
            }
            PlatformEvent::RequestDone { request, took } => self.done(request, took),
            PlatformEvent::RequestCancelled { request } => self.cancel(request),
            PlatformEvent::Instance { instance, report } => self.reported(instance, report),
            _ => {}
        }
        loop {
            if let Some((pool, instance)) = self.cluster.refused.pop_front() {
                self.tell(pool, |pool, cluster| pool.gone(cluster, instance, InstanceReport::Refused));
            } else if let Some(tenant) = self.cluster.to_admit.pop_first() {
                self.admit(tenant);
            } else if let Some(&pool) = self.unsettled.first() {
                self.tell(pool, |_, _| {});
            } else if !self.keep_minimums() {
                break;
            }
        }
        actions.append(&mut self.cluster.orders);
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let pools = self.pools.iter().filter_map(|pool| pool.next_deadline());
        pools.chain(self.cluster.next_deadline()).min()
    }
}
