//! The events and orders of the platform.

use super::{DeviceSpec, FunctionSpec};
use crate::mig::SliceAt;
use crate::request::{TenantLimits, Tier};
use gshare_core::dag::ComponentSet;
use gshare_core::profile::ProfileTable;
use gshare_core::{
    Bytes, Duration, FunctionId, GpuId, GpuShare, InstanceId, NodeId, RequestId, TenantId, Timestamp,
};

/// A state in the life of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Life {
    /// Its processes start and load.
    Starting,
    /// The instance answers requests, or trains.
    Ready,
    /// The state that the instance had on the device is in host memory, or on the way there or back.
    Parked,
    /// The instance finishes the requests it has and gets no more.
    Draining,
    /// The instance was told to end.
    Stopped,
}

gshare_core::display_as!(Life {
    Starting => "starting",
    Ready => "ready",
    Parked => "parked",
    Draining => "draining",
    Stopped => "stopped",
});

/// The part of an instance that runs on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct Part {
    pub gpu: GpuId,
    /// The share that it may take of the device, or of the slice where there is one.
    pub share: GpuShare,
    /// The slice of a sliced device.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub slice: Option<SliceAt>,
    /// The stage of a pipeline, from 0; the rank of a training job's worker; the number of the device among those of a spread
    /// model; 0 for another instance.
    pub stage: u32,
    /// The components of the function's DAG that run here; empty for a function without.
    pub components: ComponentSet,
}

/// A change of an instance that its host reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum InstanceReport {
    /// A `Start` was carried out: every part of it has loaded.
    Ready,
    /// A `Start` could not be carried out; nothing of it runs.
    Refused,
    /// A `Park` was carried out: the device's memory is free.
    Parked,
    /// An `Unpark` was carried out.
    Unparked,
    /// A training job has done all of its work and ended.
    Completed,
    /// All of its processes have ended: on a `Stop`, or by themselves.
    Gone,
}

/// Something that happened and that a host tells the platform.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PlatformEvent {
    /// A device that was not there before, or is back; nothing runs on it.
    DeviceFound {
        gpu: GpuId,
        /// Kind, memory and node of the device.
        spec: DeviceSpec,
    },
    /// The device is gone, or its node is, with every instance that has a part on it or was parked from it. The host ends
    /// their other parts, before it starts anything in their place, and need not report them gone.
    DeviceLost { gpu: GpuId },
    /// The limits of a tenant from now on; a tenant that was never named has no limit.
    TenantLimited {
        tenant: TenantId,
        /// The new limits.
        limits: TenantLimits,
    },
    /// A function that was not there before.
    FunctionDeployed {
        /// Its name; free again once it was removed and its last instance is gone.
        function: FunctionId,
        /// The specification of the function.
        spec: Box<FunctionSpec>,
    },
    /// A `Profile` was carried out.
    ProfileLearned {
        function: FunctionId,
        /// Its measured points.
        profile: ProfileTable,
        /// The memory in bytes that was measured, where it is to take the place of the deployed figure; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bytes", default))]
        memory: Option<Bytes>,
    },
    /// Another least and most number of instances.
    BoundsChanged {
        function: FunctionId,
        /// Instances that are kept at any load.
        min_instances: u32,
        /// The most instances; at least the minimum, more than 0.
        max_instances: u32,
    },
    /// The function is not wanted any more: what waits is rejected, what runs is drained.
    FunctionRemoved { function: FunctionId },
    /// A new request.
    RequestArrived {
        /// Its name; free again when it has ended.
        request: RequestId,
        function: FunctionId,
        /// The time after which no client waits for its answer; a request that waits is rejected then.
        #[cfg_attr(feature = "serde", serde(rename = "deadline_ns", default))]
        deadline: Option<Timestamp>,
    },
    /// A dispatched request was answered, well or with an error of the function's own.
    RequestDone {
        request: RequestId,
        /// How long the instance worked for it.
        #[cfg_attr(feature = "serde", serde(rename = "took_ns"))]
        took: Duration,
    },
    /// The caller of a request gave up. One that waits is rejected; one that was dispatched goes on.
    RequestCancelled { request: RequestId },
    /// A change of an instance, as its host reports it.
    Instance {
        /// Its name, from its `Start`.
        instance: InstanceId,
        /// The change.
        report: InstanceReport,
    },
    /// [`Engine::next_deadline`](gshare_core::Engine::next_deadline) has come.
    DeadlineReached,
}

/// Why an instance is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum StopCause {
    /// The instance has answered the requests it had, and the load does not need it.
    Drained,
    /// The instance was not ready, or not parked, by its deadline.
    TimedOut,
    /// The instance did not finish its requests by its deadline.
    DrainTimedOut,
    /// The instance had not become ready, and the load does not need it.
    NotNeeded,
    /// Its model has to make room for another one.
    Evicted,
    /// Another instance of its function has taken its place on better slices.
    Replaced,
    /// Its function was removed.
    Removed,
}

// The words of a sentence about the instance that follow "stopped: ".
gshare_core::display_as!(StopCause {
    Drained => "the load does not need it, and it has answered what it had",
    TimedOut => "it was not ready, or not parked, by its deadline",
    DrainTimedOut => "it did not finish its requests by its deadline",
    NotNeeded => "it was not ready yet, and the load does not need it",
    Evicted => "its model makes room for another one",
    Replaced => "another instance of its function has taken its place on better slices",
    Removed => "its function was removed, or has another version",
});

/// An order for a host. Each order is answered as it says; an instance that ends answers all of its orders.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "action", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PlatformAction {
    /// Measure the function on a device of its own and answer with `ProfileLearned`.
    Profile { function: FunctionId },
    /// Start an instance; answer with `Ready` or `Refused`.
    Start {
        /// Its name from now on; never used twice.
        instance: InstanceId,
        function: FunctionId,
        /// The devices and shares of the instance: one part, the stages of a pipeline, the workers of a training job, or the
        /// devices of a spread model, all of which one process has.
        parts: Vec<Part>,
        /// Where its weights are.
        from: Tier,
        /// How long that should take.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
        /// Whether it is to start parked: its process runs, its weights are in host memory, none of the device's is taken.
        parked: bool,
    },
    /// Move what the instance has on the device to host memory; answer with `Parked`.
    Park {
        /// The instance, which runs no request.
        instance: InstanceId,
    },
    /// Bring the instance back to the device; answer with `Unparked`.
    Unpark {
        instance: InstanceId,
        /// Where it runs from now on.
        parts: Vec<Part>,
        /// How long that should take.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
    },
    /// The instance gets no more requests; `Stop` follows. Needs no answer.
    Drain { instance: InstanceId },
    /// End the instance's processes; answer with `Gone`.
    Stop {
        instance: InstanceId,
        /// Why it is stopped.
        cause: StopCause,
    },
    /// Run the request there; answer with `RequestDone`.
    Dispatch {
        request: RequestId,
        /// An instance of its function that is ready.
        instance: InstanceId,
    },
    /// The request will not be served.
    Reject {
        request: RequestId,
        /// Why not.
        reason: Rejection,
    },
    /// Bring a function's weights to a node's host memory: a request is expected. Needs no answer.
    Fetch { node: NodeId, function: FunctionId },
    /// Drop a function's weights from a node's host memory. Needs no answer.
    Forget { node: NodeId, function: FunctionId },
}

impl PlatformAction {
    /// The instance that the order is for; none for an order about a request or a function alone.
    pub const fn instance(&self) -> Option<InstanceId> {
        match *self {
            Self::Start { instance, .. }
            | Self::Park { instance }
            | Self::Unpark { instance, .. }
            | Self::Drain { instance }
            | Self::Stop { instance, .. }
            | Self::Dispatch { instance, .. } => Some(instance),
            Self::Profile { .. } | Self::Reject { .. } | Self::Fetch { .. } | Self::Forget { .. } => None,
        }
    }
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Rejection {
    /// Too many requests of its function wait.
    QueueFull,
    /// Too many requests of its tenant wait.
    TenantQueueFull,
    /// The deadline of the request has passed.
    DeadlineMissed,
    /// By what waits before it, it cannot be answered within its deadline.
    WouldBeLate,
    /// The request has waited for the longest time that is allowed.
    WaitedTooLong,
    /// The instances that it was dispatched to ended, as often as is allowed.
    AttemptsExhausted,
    /// Its function fits no device that there is.
    NeverFits,
    /// Its function was removed.
    Removed,
    /// Its caller gave up.
    Cancelled,
}

// The words of a sentence about the request that follow "rejected: ".
gshare_core::display_as!(Rejection {
    QueueFull => "too many requests of the function wait",
    TenantQueueFull => "too many requests of the tenant wait",
    DeadlineMissed => "its deadline has passed",
    WouldBeLate => "it cannot be answered within its deadline",
    WaitedTooLong => "it has waited for the longest time that is allowed",
    AttemptsExhausted => "the instances it was given to ended, as often as is allowed",
    NeverFits => "the function fits no device that there is",
    Removed => "the function was removed",
    Cancelled => "its caller gave up",
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::{MigLayout, Work};

    #[cfg(feature = "serde")]
    #[test]
    fn a_device_and_a_function_read_as_they_are_written() {
        let layout = MigLayout::named("A100-80", &["4g.40gb", "2g.20gb"]).unwrap();
        let gpu = DeviceSpec::new(NodeId::new(1), Bytes::from_gib(80)).with_mig(layout);
        let event = PlatformEvent::DeviceFound { gpu: GpuId::new(3), spec: gpu };
        let text = serde_json::to_string(&event).unwrap();
        assert!(text.contains(r#""mig":{"model":"A100-80","slices":["4g.40gb","2g.20gb"]}"#), "{text}");
        assert_eq!(serde_json::from_str::<PlatformEvent>(&text).unwrap(), event);
        let spec =
            FunctionSpec::new(Work::Training { workers: 2, share: GpuShare::WHOLE }, Bytes::from_gib(4));
        let event = PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec: Box::new(spec) };
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<PlatformEvent>(&text).unwrap(), event, "{text}");
    }
}
