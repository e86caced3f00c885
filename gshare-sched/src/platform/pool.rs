//! Pools: the devices of one regime, shared out by engines of their own.

use super::TenantLimits;
use super::{DeviceSpec, FunctionSpec, InstanceReport, Life, Part, PlatformAction, Regime};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use gshare_core::{Duration, Engine, FunctionId, GpuId, InstanceId, RequestId, TenantId, Timestamp};
use std::sync::Arc;

/// An event for a pool, checked by the platform: its function, request, instance or device belongs to the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PoolEvent {
    /// The device is the pool's from now on; no process runs on it.
    DeviceJoined {
        gpu: GpuId,
        /// Kind, memory and node of the device.
        spec: DeviceSpec,
    },
    /// The device is gone, with every instance that has a part on it or was parked from it.
    DeviceLost { gpu: GpuId },
    /// The limits of a tenant from now on.
    TenantLimited {
        tenant: TenantId,
        /// The new limits.
        limits: TenantLimits,
    },
    /// A function for the pool to manage from now on. An inference function has its profile.
    FunctionAdded {
        function: FunctionId,
        /// The specification of the function.
        spec: Box<FunctionSpec>,
    },
    /// A new minimum and maximum of a function's instances.
    BoundsChanged {
        function: FunctionId,
        /// The number of instances at any load.
        min_instances: u32,
        /// The most instances.
        max_instances: u32,
    },
    /// The function is removed.
    FunctionRemoved { function: FunctionId },
    /// A request of the function came, and does not enter the pool now: too many wait and it was rejected, or it waits outside until
    /// its tenant may have another request at work, while other requests of the function wait in the pool. It counts as load now,
    /// and not when it [arrives](Self::Arrived).
    Held { function: FunctionId },
    /// A new request.
    Arrived {
        request: RequestId,
        function: FunctionId,
        /// Arrival at the platform; requests are served in this order unless another rule orders them.
        arrived: Timestamp,
        /// Whether the request was [`Held`](Self::Held) before, and has been counted.
        held: bool,
        /// The time until which an answer is of use. The platform withdraws the request then.
        deadline: Option<Timestamp>,
    },
    /// A dispatched request was answered.
    Done {
        request: RequestId,
        /// How long the instance worked for the request.
        took: Duration,
    },
    /// A change of an instance, reported by its host.
    Instance {
        instance: InstanceId,
        /// The change.
        report: InstanceReport,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of a pool for the host, or for the platform itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PoolAction {
    /// An order for the host. A pool orders no `Profile`.
    Order(PlatformAction),
    /// No device of the pool has the resources for the function's next instance, busy devices aside. Repeated only after a change.
    Unmet { function: FunctionId },
}

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
    pub fn unsuitable(self, function: FunctionId, why: impl fmt::Display) -> PoolError {
        PoolError::Unsuitable { function, regime: self, why: why.to_string() }
    }

    /// The error for a device that cannot be shared out: `why` names the field and its bound.
    pub fn bad_device(self, gpu: GpuId, why: impl fmt::Display) -> PoolError {
        PoolError::BadDevice { gpu, regime: self, why: why.to_string() }
    }

    /// The error for new bounds or limits: `why` names the field and its bound.
    pub fn refused(self, why: impl fmt::Display) -> PoolError {
        PoolError::Refused { regime: self, why: why.to_string() }
    }
}

/// An instance as a pool keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct InstanceView {
    pub instance: InstanceId,
    pub function: FunctionId,
    /// The instance's state.
    pub life: Life,
    /// The instance's parts; empty while it is parked.
    pub parts: Vec<Part>,
    pub requests: u32,
}

/// Names of instances, shared by the pools of a platform: each is given once.
#[derive(Debug, Clone, Default)]
pub struct InstanceNames(Arc<AtomicU64>);

impl InstanceNames {
    /// The next name.
    pub fn give(&self) -> InstanceId {
        InstanceId::new(self.0.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether an instance ever had this name.
    pub fn were_given(&self, instance: InstanceId) -> bool {
        instance.number() < self.0.load(Ordering::Relaxed)
    }
}

/// Devices of one regime, with the engines that share them.
///
/// # Contract
/// - a request is dispatched until it is done, or rejected once; the pool never mentions a withdrawn request again;
/// - a request goes only to a ready instance of its function; if the instance is gone, it waits again unless it was withdrawn;
/// - no request of a removed function waits: the platform has withdrawn them before;
/// - the shares and memory of the instances on a device, starting and draining instances included, never exceed it;
/// - an instance is stopped without `Drain` only when it runs no request;
/// - `DeviceLost` ends every instance with a part on the device, or parked from it, at once and without an order;
/// - the same events give the same actions; after an `Err` the state is unchanged.
pub trait Pool: Engine<Event = PoolEvent, Action = PoolAction, Error = PoolError> + Send {
    /// The regime of the pool's devices.
    fn regime(&self) -> Regime;

    /// Gives the pool the names for its instances, before the first event.
    fn name_instances_by(&mut self, names: InstanceNames);

    /// Calls `visit` with each instance in the pool, in the order of their names.
    fn instances(&self, visit: &mut dyn FnMut(&InstanceView));

    /// Total number of the function's waiting requests.
    fn waiting(&self, function: FunctionId) -> usize;

    /// Whether the present devices, without any other instance on them, hold an instance of the function. Asked while there are
    /// devices.
    fn fits(&self, function: FunctionId) -> bool;

    /// Forgets a request without an answer. It waits, or it runs on an instance that the next event reports as ended. An
    /// event follows at the same time, so nothing is ordered here.
    fn withdraw(&mut self, request: RequestId);

    /// Checks the invariants between events; for tests and fuzzing.
    ///
    /// # Panics
    /// On a broken invariant, with a sentence about it.
    fn invariants(&self);
}
