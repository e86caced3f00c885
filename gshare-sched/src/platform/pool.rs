//! Pools: the devices of one regime, shared out by engines of their own.

use super::cluster::Cluster;
use super::requests::Request;
use super::{
    DeviceSpec, FractionalPool, InstanceReport, Life, Moving, Part, Regime, SlicedPool, TenantLimits,
    WholePool,
};
use core::fmt;
use gshare_core::{Duration, FunctionId, GpuId, InstanceId, Quota, RequestId, SmShare, TenantId, Timestamp};

/// Why a pool refused an event. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PoolError {
    /// The regime cannot serve the function, by the function's own fault.
    #[error("{function} cannot run on {regime} devices: {why}")]
    Unsuitable { function: FunctionId, regime: Regime, why: String },
    /// The pool cannot share out a device of this kind.
    #[error("{gpu} cannot be a {regime} device: {why}")]
    BadDevice { gpu: GpuId, regime: Regime, why: String },
    /// New bounds or limits that the pool cannot keep.
    #[error("the {regime} pool refuses: {why}")]
    Refused { regime: Regime, why: String },
}

/// The refusals of a pool of this regime.
impl Regime {
    /// The error for a function that cannot be served: `why` names the field and its bound.
    pub(super) fn unsuitable(self, function: FunctionId, why: impl fmt::Display) -> PoolError {
        PoolError::Unsuitable { function, regime: self, why: why.to_string() }
    }

    /// The error for a device that cannot be shared out: `why` names the field and its bound.
    pub(super) fn bad_device(self, gpu: GpuId, why: impl fmt::Display) -> PoolError {
        PoolError::BadDevice { gpu, regime: self, why: why.to_string() }
    }

    /// The error for new bounds or limits: `why` names the field and its bound.
    pub(super) fn refused(self, why: impl fmt::Display) -> PoolError {
        PoolError::Refused { regime: self, why: why.to_string() }
    }
}

/// An instance to show.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct InstanceView {
    pub instance: InstanceId,
    pub function: FunctionId,
    /// The instance's state.
    pub life: Life,
    /// An order to park it, or to bring it back, that its host has not answered.
    pub moving: Option<Moving>,
    /// The instance's parts; empty while it is parked.
    pub parts: Vec<Part>,
    pub requests: u32,
}

/// Devices of one regime, with the engines that share them.
///
/// # Contract
/// - a request is dispatched only to a ready instance of its function, or rejected; the ledger has its place;
/// - the shares and memory of the instances on a device, starting and draining instances included, never exceed it;
/// - an instance is stopped without `Drain` only when it runs no request;
/// - the instances of a lost device are forgotten without an order;
/// - the same calls give the same orders; after an `Err` nothing has changed.
pub(super) trait Pool: Send + core::any::Any {
    /// The regime of the pool's devices.
    fn regime(&self) -> Regime;

    /// The device is the pool's from now on; no process runs on it.
    fn device_joined(
        &mut self,
        cluster: &mut Cluster,
        gpu: GpuId,
        spec: &DeviceSpec,
    ) -> Result<(), PoolError>;

    /// The device is gone, with every instance that had a part on it or was parked from it.
    fn device_lost(&mut self, cluster: &mut Cluster, gpu: GpuId, lost: &[InstanceId]);

    /// The limits of a tenant from now on.
    fn tenant_limited(&mut self, _: &mut Cluster, _: TenantId, _: TenantLimits) {}

    /// A function of the ledger to manage from now on. An inference function has its profile.
    fn function_added(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError>;

    /// The ledger has a new minimum and maximum of a function's instances.
    fn bounds_changed(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError>;

    /// A function may start on other nodes from now on.
    fn nodes_changed(&mut self) {}

    /// An instance of the function that an earlier host started runs on the device with this time and these SMs: the pool starts it there.
    fn instance_found(
        &mut self,
        _: &mut Cluster,
        function: FunctionId,
        _: GpuId,
        _: (Quota, SmShare),
    ) -> Result<(), PoolError> {
        Err(self.regime().refused(format!("an instance of {function} that is there already: need a new one")))
    }

    /// The function is removed, and no request of it waits.
    fn function_removed(&mut self, cluster: &mut Cluster, function: FunctionId);

    /// A request of the function counts as load: it is about to arrive, or waits for its tenant while other requests of the
    /// function wait here, or was rejected since too many wait.
    fn called(&mut self, _: &mut Cluster, _: FunctionId) {}

    /// A request is in its function's queue.
    fn arrived(&mut self, cluster: &mut Cluster, request: RequestId);

    /// A request of the queue has ended. Orders nothing: the pool is settled before the end of the event.
    fn withdrawn(&mut self, _: &Cluster, _: RequestId, _: &Request) {}

    /// A request of an instance that has ended is in its function's queue again. Orders nothing: `gone` or `device_lost` follows.
    fn returned(&mut self, _: &Cluster, _: RequestId) {}

    /// A dispatched request was answered, after this time on the instance.
    fn done(&mut self, cluster: &mut Cluster, request: RequestId, instance: InstanceId, took: Duration);

    /// An instance is ready, parked or back; the ledger has its life.
    fn reported(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport);

    /// An instance has ended.
    fn gone(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport);

    /// Starts the missing instances of a function's minimum where there is room now, or counts the function as unmet; starts none
    /// unless it may. Called after each change of its instances or bounds, also where none is missing, and while some are, after
    /// each change of room.
    fn keep_minimum(&mut self, cluster: &mut Cluster, function: FunctionId, may_start: bool);

    /// [`next_deadline`](Self::next_deadline) has come.
    fn deadline(&mut self, cluster: &mut Cluster);

    /// Finishes what the calls before it began; called after each of them.
    fn settle(&mut self, cluster: &mut Cluster);

    fn next_deadline(&self) -> Option<Timestamp>;

    /// Whether the present devices, without any other instance on them, hold an instance of the function whose memory they have.
    fn fits(&self, _: FunctionId) -> bool {
        true
    }

    /// Checks the invariants between events; for tests and fuzzing.
    ///
    /// # Panics
    /// On a broken invariant, with a sentence about it.
    fn invariants(&self, cluster: &Cluster);
}

/// The pool of one regime, for [`Platform::new`](super::Platform::new).
pub struct RegimePool(pub(super) Box<dyn Pool>);

impl fmt::Debug for RegimePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RegimePool").field(&self.0.regime()).finish()
    }
}

impl From<FractionalPool> for RegimePool {
    fn from(pool: FractionalPool) -> Self {
        Self(Box::new(pool))
    }
}

impl From<SlicedPool> for RegimePool {
    fn from(pool: SlicedPool) -> Self {
        Self(Box::new(pool))
    }
}

impl From<WholePool> for RegimePool {
    fn from(pool: WholePool) -> Self {
        Self(Box::new(pool))
    }
}
