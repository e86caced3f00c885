//! Pools: the devices of one regime, shared out by engines of their own.

use super::{DeviceSpec, FunctionSpec, InstanceReport, Life, Part, PlatformAction, Regime};
use crate::request::TenantLimits;
use core::fmt;
use gshare_core::{Duration, Engine, FunctionId, GpuId, InstanceId, RequestId, TenantId, Timestamp};

/// Something that happened, as a pool hears of it. The platform has checked it: the function, request,
/// instance or device is one of the pool's.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PoolEvent {
    /// The device is the pool's from now on; nothing runs on it.
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
    /// A function whose instances are the pool's business from now on. An inference function has its profile.
    FunctionAdded {
        function: FunctionId,
        /// The specification of the function.
        spec: Box<FunctionSpec>,
    },
    /// Another least and most number of instances.
    BoundsChanged {
        function: FunctionId,
        /// Instances that are kept at any load.
        min_instances: u32,
        /// The most instances.
        max_instances: u32,
    },
    /// The function is not wanted any more.
    FunctionRemoved { function: FunctionId },
    /// A request of the function came, and waits outside of the pool until its tenant may have one more at work, while others of the
    /// function that may wait in the pool for an instance. It counts as load now, and not when it [arrives](Self::Arrived).
    Held { function: FunctionId },
    /// A new request.
    Arrived {
        request: RequestId,
        function: FunctionId,
        /// When it came to the platform; requests are served in this order where nothing else orders them.
        arrived: Timestamp,
        /// Whether it was [`Held`](Self::Held) before, and has been counted.
        held: bool,
        /// The time after which it is to be rejected.
        deadline: Option<Timestamp>,
    },
    /// A dispatched request was answered.
    Done {
        request: RequestId,
        /// How long the instance worked for it.
        took: Duration,
    },
    /// The caller of a request that waits gave up: forget it without an answer.
    Cancelled { request: RequestId },
    /// A change of an instance, as its host reports it, by the pool's own name of the instance.
    Instance {
        instance: InstanceId,
        /// The change.
        report: InstanceReport,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of a pool: for the host, or for the platform itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PoolAction {
    /// An order for the host, with the pool's own names of instances. A pool orders no `Profile`.
    Order(PlatformAction),
    /// No device of the pool has what the next instance of the function needs; one that is only busy has. Told again only after
    /// something changed.
    Unmet { function: FunctionId },
}

/// Why a pool refused an event. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PoolError {
    /// The function cannot be served in this regime, by its own fault.
    #[error("{function} cannot run on {regime} devices: {why}")]
    Unsuitable { function: FunctionId, regime: Regime, why: String },
    /// The device is not one that the pool can share out.
    #[error("{gpu} cannot be a {regime} device: {why}")]
    BadDevice { gpu: GpuId, regime: Regime, why: String },
    /// An event that the pool cannot take; the platform does not send such events.
    #[error("the {regime} pool refuses: {why}")]
    Refused { regime: Regime, why: String },
    /// An event for something that the pool does not have; the platform does not send such events.
    #[error("{what} is not known to the {regime} pool")]
    Unknown { regime: Regime, what: String },
}

/// The refusals of a pool of this regime.
impl Regime {
    /// A function cannot be served: `why` names the field and its bound.
    pub fn unsuitable(self, function: FunctionId, why: impl fmt::Display) -> PoolError {
        PoolError::Unsuitable { function, regime: self, why: why.to_string() }
    }

    /// A device cannot be shared out: `why` names the field and its bound.
    pub fn bad_device(self, gpu: GpuId, why: impl fmt::Display) -> PoolError {
        PoolError::BadDevice { gpu, regime: self, why: why.to_string() }
    }

    /// The pool cannot take an event.
    pub fn refused(self, why: impl fmt::Display) -> PoolError {
        PoolError::Refused { regime: self, why: why.to_string() }
    }

    /// An event is for something that the pool does not have.
    pub fn unknown(self, what: impl fmt::Display) -> PoolError {
        PoolError::Unknown { regime: self, what: what.to_string() }
    }
}

/// An instance as a pool keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct InstanceView {
    pub instance: InstanceId,
    pub function: FunctionId,
    /// Its state.
    pub life: Life,
    /// Where it runs; empty while it is parked.
    pub parts: Vec<Part>,
    pub requests: u32,
}

/// Devices of one regime, with the engines that share them.
///
/// # Contract
/// - a request that arrived is dispatched until it is done, or rejected once; after `Cancelled` it is not heard of again;
/// - a request is dispatched only to an instance of its function that is ready, and when that is gone again, or rejected;
/// - the shares and memory of the instances on a device, those that start or drain included, never exceed it;
/// - an instance is stopped without `Drain` only when it runs no request;
/// - `DeviceLost` ends every instance with a part on the device, or parked from it, at once and without an order;
/// - the same events give the same actions; `Err` means that nothing changed.
pub trait Pool: Engine<Event = PoolEvent, Action = PoolAction, Error = PoolError> + Send {
    /// The regime of its devices.
    fn regime(&self) -> Regime;

    /// Calls `visit` with each instance that is not gone, in the order of their names.
    fn instances(&self, visit: &mut dyn FnMut(&InstanceView));

    /// Requests of the function that wait, in all.
    fn waiting(&self, function: FunctionId) -> usize;

    /// Checks what must hold between events; for tests and fuzzing.
    ///
    /// # Panics
    /// When something does not hold, with a sentence.
    fn invariants(&self);
}
