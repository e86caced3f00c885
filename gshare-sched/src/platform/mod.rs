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
//! - **pool**: the devices of one regime with the engines that share them: a [`Pool`];
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
//! 4. *Instances* are the pools' business; the platform books their memory for tenants, and passes orders and reports on.
//!    An instance that does not answer in time is stopped (`instances.rs`), and a function must drain in time once it is removed.
//!
//! # Invariants
//! A request is answered once, or rejected once, or waits in one place; it is dispatched only to a ready instance of its function. No
//! device holds more than it has (see [`Pool`]). A started instance is known until its host reports it gone or its device is lost.
//!
//! # Cost
//! O(log n) over requests and instances, plus the pool's cost; O(instances) for a removed function.

mod admission;
mod batch;
mod choice;
mod device_spec;
mod error;
mod event;
mod fractional;
mod function_spec;
mod functions;
mod gpu_time;
mod host_cache;
mod instances;
mod pool;
mod queue_order;
mod requests;
mod settings;
mod sliced;
mod tenant_limits;
#[cfg(test)]
mod testing;
mod tickets;
mod timers;
mod whole;

pub use device_spec::*;
pub use error::PlatformError;
pub use event::*;
pub use fractional::{FractionalConfig, FractionalPolicies, FractionalPool};
pub use function_spec::*;
pub use functions::{FunctionState, FunctionStats, FunctionView};
pub use pool::*;
pub use queue_order::{QueueOrder, WaitQueue};
pub use settings::{FractionalSettings, OwnPolicies, PackerSettings, PlatformSettings, ScalerSettings};
pub use sliced::{MakeKeeper, SlicedConfig, SlicedError, SlicedPool};
pub use tenant_limits::TenantLimits;
pub use whole::WholePool;

use functions::Function;
use gshare_core::{Bytes, Duration, Engine, FunctionId, GpuId, RequestId, TenantId, TimeWentBack, Timestamp};
use instances::Instances;
use requests::Request;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use tenant_limits::Tenants;
use timers::Timers;

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
    }
}

/// Time until another attempt at a kept instance after a failed start. 10 s: a process with an immediate failure takes no more
/// than a per cent or so of its device.
const START_AGAIN: Duration = Duration::from_secs(10);

/// The platform's record of a device.
#[derive(Debug)]
struct Device {
    pool: usize,
    memory: Bytes,
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
    config: PlatformConfig,
    pools: Vec<Box<dyn Pool>>,
    now: Timestamp,
    devices: BTreeMap<GpuId, Device>,
    /// Bytes of memory of all devices.
    memory: u128,
    functions: BTreeMap<FunctionId, Function>,
    instances: Instances,
    requests: BTreeMap<RequestId, Request>,
    tenants: Tenants,
    /// The times until which requests wait.
    wait_until: Timers<RequestId>,
    /// Rejections of the last event, sent with the next accepted event.
    owed: Vec<PlatformAction>,
    /// Pools with a withdrawn request and no event since then.
    untold: BTreeSet<usize>,
    /// Events that the platform still has to pass to pools, as a result of the pools' own orders.
    answers: VecDeque<(usize, PoolEvent)>,
    /// Tenants with a request that has ended since the last admission.
    to_admit: BTreeSet<TenantId>,
}

impl core::fmt::Debug for Platform {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Platform")
            .field("now", &self.now)
            .field("devices", &self.devices.len())
            .field("functions", &self.functions.len())
            .field("instances", &self.instances.len())
            .field("requests", &self.requests.len())
            .finish_non_exhaustive()
    }
}

impl Platform {
    /// A platform without devices and functions, over pools of different regimes.
    ///
    /// # Errors
    /// [`PlatformError::PoolTwice`], and [`PlatformError::Config`] with the field and its bound.
    pub fn new(config: PlatformConfig, mut pools: Vec<Box<dyn Pool>>) -> Result<Self, PlatformError> {
        let (least, day) = (Duration::from_nanos(1), Duration::from_secs(86_400));
        gshare_core::check_fields!(config {
            max_wait, start_timeout, park_timeout, drain_timeout in least..=day, "need more than 0, at most a day";
            max_waiting in 1.., "need more than 0";
            max_attempts in 1.., "need more than 0";
        })?;
        for (index, pool) in pools.iter().enumerate() {
            if pools[..index].iter().any(|other| other.regime() == pool.regime()) {
                return Err(PlatformError::PoolTwice { regime: pool.regime() });
            }
        }
        let (instances, tenants) = (Instances::default(), Tenants::default());
        for pool in &mut pools {
            pool.name_instances_by(instances.names.clone());
        }
        Ok(Self {
            config,
            pools,
            now: Timestamp::ZERO,
            devices: BTreeMap::new(),
            memory: 0,
            functions: BTreeMap::new(),
            instances,
            requests: BTreeMap::new(),
            tenants,
            wait_until: Timers::default(),
            owed: Vec::new(),
            untold: BTreeSet::new(),
            answers: VecDeque::new(),
            to_admit: BTreeSet::new(),
        })
    }

    /// A platform of fractional devices, with the default policies.
    ///
    /// # Errors
    /// None for these settings.
    pub fn fractional() -> Result<Self, PlatformError> {
        let pool = FractionalPool::new(FractionalConfig::default(), FractionalPolicies::fast()?)?;
        Self::new(PlatformConfig::default(), vec![Box::new(pool)])
    }

    /// Calls `visit` with each instance that the host knows.
    pub fn instances(&self, visit: &mut dyn FnMut(&InstanceView)) {
        for pool in &self.pools {
            pool.instances(&mut |view| {
                // An instance without room has not been ordered.
                if self.instances.get(view.instance).is_some() {
                    visit(view);
                }
            });
        }
    }

    fn pool_of(&self, regime: Regime) -> Option<usize> {
        self.pools.iter().position(|pool| pool.regime() == regime)
    }

    /// Passes an event to a pool, and takes the pool's orders.
    fn tell(
        &mut self,
        pool: usize,
        event: PoolEvent,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), PlatformError> {
        let orders = self.pools[pool].orders(self.now, event)?;
        self.untold.remove(&pool);
        self.take(pool, orders, actions);
        Ok(())
    }

    /// Passes an event to a pool that cannot refuse it, since it concerns the pool's own functions, instances or devices.
    fn inform(&mut self, pool: usize, event: PoolEvent, actions: &mut Vec<PlatformAction>) {
        let told = self.tell(pool, event, actions);
        debug_assert!(told.is_ok(), "a pool refused its own: {told:?}");
    }

    fn take(&mut self, pool: usize, orders: Vec<PoolAction>, actions: &mut Vec<PlatformAction>) {
        for order in orders {
            match order {
                PoolAction::Order(order) => self.pass_on(pool, order, actions),
                PoolAction::Unmet { function } => {
                    if let Some(of) = self.functions.get_mut(&function) {
                        of.stats.unmet += 1;
                    }
                }
            }
        }
    }

    /// Handles the deadlines up to now, in pools and in the platform.
    fn catch_up(&mut self, actions: &mut Vec<PlatformAction>) {
        for pool in 0..self.pools.len() {
            if self.pools[pool].next_deadline().is_some_and(|due| due <= self.now) {
                self.inform(pool, PoolEvent::DeadlineReached, actions);
            }
        }
        self.stop_overdue(actions);
        while let Some(tenant) = self.tenants.pop_released(self.now) {
            self.admit(tenant, actions);
        }
    }

    fn find_device(
        &mut self,
        gpu: GpuId,
        spec: DeviceSpec,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), PlatformError> {
        let regime = spec.effective_regime();
        let pool = self.pool_of(regime).ok_or(PlatformError::NoPool { regime })?;
        let memory = spec.memory;
        let orders = self.pools[pool].orders(self.now, PoolEvent::DeviceJoined { gpu, spec })?;
        // The device must count before the pool's orders for it are checked.
        self.devices.insert(gpu, Device { pool, memory });
        self.memory += u128::from(memory.get());
        self.take(pool, orders, actions);
        let unfit = |(function, of): (&FunctionId, &Function)| {
            (of.pool == pool && of.fits != Some(true)).then_some(*function)
        };
        for function in self.functions.iter().filter_map(unfit).collect::<Vec<_>>() {
            self.look_whether_it_fits(function, actions);
        }
        Ok(())
    }

    fn lose_device(&mut self, gpu: GpuId, actions: &mut Vec<PlatformAction>) {
        let Some(device) = self.devices.remove(&gpu) else { return };
        self.memory -= u128::from(device.memory.get());
        for (instance, of) in self.instances.lose(gpu) {
            self.forget_instance(instance, of, actions);
        }
        let from = actions.len();
        self.inform(device.pool, PoolEvent::DeviceLost { gpu }, actions);
        // At a passed deadline the pool may have ordered work on the device before it heard of the loss.
        let mut gone = BTreeSet::new();
        for (instance, of) in self.instances.lose(gpu) {
            self.forget_instance(instance, of, actions);
            gone.insert(instance);
        }
        let orders = actions.split_off(from);
        let there = |order: &PlatformAction| order.instance().is_none_or(|one| !gone.contains(&one));
        actions.extend(orders.into_iter().filter(there));
    }

    /// Memory of all devices.
    fn memory(&self) -> Bytes {
        Bytes(u64::try_from(self.memory).unwrap_or(u64::MAX))
    }

    /// Checks the invariants between events; for tests and fuzzing.
    ///
    /// # Panics
    /// On a broken invariant, with a sentence about it.
    pub fn invariants(&self) {
        for pool in &self.pools {
            pool.invariants();
            pool.instances(&mut |view| {
                assert!(self.functions.contains_key(&view.function), "{} of no function", view.instance);
                if let Some(of) = self.instances.get(view.instance) {
                    assert_eq!(of.function, view.function, "{} is of another function", view.instance);
                }
            });
        }
        for (function, of) in &self.functions {
            let named = self.instances.of_function(*function).count();
            assert_eq!(of.instances as usize, named, "{function} counts other instances than there are");
        }
        let memory: u128 = self.devices.values().map(|device| u128::from(device.memory.get())).sum();
        assert_eq!(self.memory, memory, "the memory of all devices is another");
        assert!(self.answers.is_empty(), "a pool was not told something");
        self.check_requests();
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
        let before = core::mem::replace(&mut self.now, now);
        // Before any pool may dispatch at this time.
        self.expire();
        // A pool may refuse a device, a function or its bounds: the platform asks before it changes anything.
        let asked = match &event {
            PlatformEvent::DeviceFound { gpu, spec } => self.find_device(*gpu, spec.clone(), actions),
            PlatformEvent::FunctionDeployed { function, spec } => self.deploy(*function, spec, actions),
            PlatformEvent::ProfileLearned { function, profile, memory } => {
                self.learn(*function, profile, *memory, actions)
            }
            PlatformEvent::BoundsChanged { function, min_instances, max_instances } => {
                self.rebound(*function, *min_instances, *max_instances, actions)
            }
            _ => Ok(()),
        };
        if let Err(error) = asked {
            self.now = before;
            return Err(error);
        }
        actions.append(&mut self.owed);
        match event {
            // Before any start on the device or for the function.
            PlatformEvent::DeviceLost { gpu } => self.lose_device(gpu, actions),
            PlatformEvent::FunctionRemoved { function } => self.remove(function, actions),
            _ => {}
        }
        self.catch_up(actions);
        match event {
            PlatformEvent::TenantLimited { tenant, limits } => {
                self.tenants.limit(tenant, limits);
                for pool in 0..self.pools.len() {
                    self.inform(pool, PoolEvent::TenantLimited { tenant, limits }, actions);
                }
                self.admit(tenant, actions);
            }
            PlatformEvent::RequestArrived { request, function, deadline } => {
                self.arrived(request, function, deadline, actions);
            }
            PlatformEvent::RequestDone { request, took } => self.done(request, took, actions),
            PlatformEvent::RequestCancelled { request } => self.cancel(request, actions),
            PlatformEvent::Instance { instance, report } => self.reported(instance, report, actions),
            _ => {}
        }
        loop {
            if let Some((pool, event)) = self.answers.pop_front() {
                self.inform(pool, event, actions);
            } else if let Some(tenant) = self.to_admit.pop_first() {
                self.admit(tenant, actions);
            } else if let Some(pool) = self.untold.pop_first() {
                self.inform(pool, PoolEvent::DeadlineReached, actions);
            } else {
                return Ok(());
            }
        }
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let pools = self.pools.iter().filter_map(|pool| pool.next_deadline());
        let owed = (!self.owed.is_empty()).then_some(self.now);
        let own =
            [self.wait_until.next(), self.instances.next_deadline(), self.tenants.next_deadline(), owed];
        pools.chain(own.into_iter().flatten()).min()
    }
}
