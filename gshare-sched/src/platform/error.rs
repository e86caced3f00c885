//! Why the platform refused an event.

use crate::platform::{PoolError, Regime};
use gshare_core::{ConfigError, FunctionId, GpuId, InstanceId, RequestId, TenantId, TimeWentBack};

/// Why an event was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlatformError {
    /// The event's time is before the last event's time.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// A setting is out of its bounds.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A policy refused its settings.
    #[error("{why}")]
    Policy {
        /// The field and its bound.
        why: String,
    },
    /// Two pools have devices of the same regime.
    #[error("two pools of {regime} devices: need at most one of each regime")]
    PoolTwice {
        /// Their regime.
        regime: Regime,
    },
    /// No pool shares out devices of the regime.
    #[error("no pool of {regime} devices is part of this platform")]
    NoPool {
        /// The missing regime.
        regime: Regime,
    },
    /// The event's pool refused it.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The device is here already.
    #[error("{gpu} is already here")]
    DeviceExists {
        /// The name given.
        gpu: GpuId,
    },
    /// There is no such device.
    #[error("unknown {gpu}")]
    UnknownDevice {
        /// The name given.
        gpu: GpuId,
    },
    /// A limit of 0, which would stop the tenant for good.
    #[error("{field} of {tenant} is 0: need more than 0")]
    ZeroLimit {
        /// The tenant.
        tenant: TenantId,
        /// The limit.
        field: &'static str,
    },
    /// The function is deployed, or instances of an earlier function with its name are not gone.
    #[error("{function} exists, or instances of its predecessor are not gone")]
    FunctionExists {
        /// The name given.
        function: FunctionId,
    },
    /// There is no such function.
    #[error("unknown {function}")]
    UnknownFunction {
        /// The name given.
        function: FunctionId,
    },
    /// The bounds of a function's instances contradict each other.
    #[error(
        "{function}: max_instances is {max_instances}, need at least min_instances ({min_instances}) and 1"
    )]
    BadBounds {
        /// The function.
        function: FunctionId,
        /// The least given.
        min_instances: u32,
        /// The most given.
        max_instances: u32,
    },
    /// An instance of a function that starts none: it is being profiled, or removed.
    #[error("{function} is being profiled, or was removed: need a function that starts instances")]
    NotDeployed {
        /// The function.
        function: FunctionId,
    },
    /// A profile for a function that was not being profiled.
    #[error("{function} is not being profiled")]
    NotProfiling {
        /// The function.
        function: FunctionId,
    },
    /// A request for a training function.
    #[error("{function} trains and answers no requests")]
    NoRequests {
        /// The function.
        function: FunctionId,
    },
    /// The number of a new request is not above all numbers before it.
    #[error("{request} is not new: numbers of requests grow, need {next} or more and less than 2^63")]
    RequestNumber {
        /// The number given.
        request: RequestId,
        /// The least that is new.
        next: u64,
    },
    /// There is no such request, or it has ended.
    #[error("unknown {request}")]
    UnknownRequest {
        /// The name given.
        request: RequestId,
    },
    /// The request was not dispatched, or its instance is gone.
    #[error("{request} does not run on any instance")]
    NotRunning {
        /// The name given.
        request: RequestId,
    },
    /// No instance ever had this name.
    #[error("unknown {instance}")]
    UnknownInstance {
        /// The name given.
        instance: InstanceId,
    },
}
