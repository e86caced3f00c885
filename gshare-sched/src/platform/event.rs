//! The events and orders of the platform.

use super::TenantLimits;
use super::{DeviceSpec, FunctionSpec};
use crate::Tier;
use crate::mig::SliceAt;
use gshare_core::dag::ComponentSet;
use gshare_core::profile::ProfileTable;
use gshare_core::{
    Bytes, Duration, FunctionId, GpuId, GpuShare, InstanceId, NodeId, Quota, RequestId, SmShare, TenantId,
    Timestamp,
};
use std::collections::BTreeSet;

/// A state in the life of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Life {
    /// The instance's processes start and load.
    Starting,
    /// The instance answers requests, or trains.
    Ready,
    /// The instance's device state is in host memory, or on the way there or back.
    Parked,
    /// The instance finishes its requests and gets no more.
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

/// A way between a device and host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moving {
    /// To host memory: the instance is being parked.
    Out,
    /// To the device: the instance comes back.
    In,
}

/// The part of an instance on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct Part {
    pub gpu: GpuId,
    /// The part's largest share of the device, or of the slice where there is one.
    pub share: GpuShare,
    /// The slice of a sliced device.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub slice: Option<SliceAt>,
    /// The stage of a pipeline, from 0; the rank of a training job's worker; the number of the device of a spread model; 0 for
    /// all other instances.
    pub stage: u32,
    /// The components of the function's DAG on this part; empty for a function without a DAG.
    pub components: ComponentSet,
}

/// A change of an instance, reported by its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum InstanceReport {
    /// A `Start` was carried out: every part has loaded.
    Ready,
    /// A `Start` could not be carried out; no part of the instance runs.
    Refused,
    /// A `Park` was carried out: the device's memory is free, and the processes live on. An `Unpark` to the same devices copies their
    /// memory back; to other devices it starts them anew.
    Parked,
    /// A `Park` was carried out by the end of the processes. An `Unpark` starts them anew, on any device.
    Unloaded,
    /// An `Unpark` was carried out.
    Unparked,
    /// A training job has done all of its work and ended.
    Completed,
    /// All processes of the instance have ended: on a `Stop`, or by themselves.
    Gone,
}

/// An event that a host reports to the platform.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PlatformEvent {
    /// A new device, or a device that is back; no process runs on it.
    DeviceFound {
        gpu: GpuId,
        /// Kind, memory and node of the device.
        spec: DeviceSpec,
    },
    /// The device or its node is gone, with every instance that has a part on the device or was parked from it. The host ends
    /// their other parts before it starts replacements, and need not report them gone.
    DeviceLost { gpu: GpuId },
    /// The limits of a tenant from now on; a tenant without this event has no limit.
    TenantLimited {
        tenant: TenantId,
        /// The new limits.
        limits: TenantLimits,
    },
    /// A new function.
    FunctionDeployed {
        /// The function's name; free again after its removal, once its last instance is gone.
        function: FunctionId,
        /// The specification of the function.
        spec: Box<FunctionSpec>,
    },
    /// A `Profile` was carried out.
    ProfileLearned {
        function: FunctionId,
        /// The measured points of the function.
        profile: ProfileTable,
        /// The measured memory in bytes, if it replaces the deployed figure; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bytes", default))]
        memory: Option<Bytes>,
    },
    /// A new minimum and maximum of a function's instances.
    BoundsChanged {
        function: FunctionId,
        /// The number of instances at any load.
        min_instances: u32,
        /// The most instances; at least the minimum, more than 0.
        max_instances: u32,
    },
    /// The nodes to which new instances of a function go from now on; its other instances stay where they are.
    NodesChanged {
        function: FunctionId,
        /// None: any node.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        nodes: Option<BTreeSet<NodeId>>,
    },
    /// The function is removed: its waiting requests are rejected and its running instances drained.
    FunctionRemoved { function: FunctionId },
    /// A new request.
    RequestArrived {
        /// The request's name; free again at its end.
        request: RequestId,
        function: FunctionId,
        /// The time until which a client waits for the answer; a request still waiting then is rejected.
        #[cfg_attr(feature = "serde", serde(rename = "deadline_ns", default))]
        deadline: Option<Timestamp>,
    },
    /// A dispatched request was answered, well or with an error of the function's own.
    RequestDone {
        request: RequestId,
        /// How long the instance worked for the request.
        #[cfg_attr(feature = "serde", serde(rename = "took_ns"))]
        took: Duration,
    },
    /// The caller of a request gave up. A waiting request is rejected, and a dispatched request goes on.
    RequestCancelled { request: RequestId },
    /// A change of an instance, reported by its host.
    Instance {
        /// The instance's name from its `Start`.
        instance: InstanceId,
        /// The change.
        report: InstanceReport,
    },
    /// An instance that an earlier host started still runs on one device, with this share of it. The platform books the share there and
    /// answers with a `Start`, which the host carries out by keeping the instance; `Ready` follows as ever. Without a `Start`, or if the
    /// event is refused, the host ends the instance. A host that tells a function's minimum only afterwards has none started in between.
    InstanceFound {
        function: FunctionId,
        gpu: GpuId,
        /// The booked time.
        quota: Quota,
        /// The booked SMs.
        sm: SmShare,
    },
    /// [`Engine::next_deadline`](gshare_core::Engine::next_deadline) has come.
    DeadlineReached,
}

/// Why an instance is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum StopCause {
    /// The instance has answered its requests, and the load does not need it.
    Drained,
    /// The instance was not ready, or not parked, by its deadline.
    TimedOut,
    /// The instance did not finish its requests by its deadline.
    DrainTimedOut,
    /// The instance had not become ready, and the load does not need it.
    NotNeeded,
    /// The instance's model has to make room for another model.
    Evicted,
    /// Another instance of its function has taken its place on better slices.
    Replaced,
    /// The function was removed.
    Removed,
}

// Each text completes a sentence about the instance after "stopped: ".
gshare_core::display_as!(StopCause {
    Drained => "the load does not need it, and its requests are answered",
    TimedOut => "it was not ready, or not parked, by its deadline",
    DrainTimedOut => "it did not finish its requests by its deadline",
    NotNeeded => "it was not ready yet, and the load does not need it",
    Evicted => "its model makes room for another",
    Replaced => "another instance of its function has taken its place on better slices",
    Removed => "its function was removed, or has another version",
});

/// An order for a host. The host answers each order as described; the end of an instance answers all of its orders.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "action", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum PlatformAction {
    /// Measure the function on a device of its own and answer with `ProfileLearned`.
    Profile { function: FunctionId },
    /// Start an instance; answer with `Ready` or `Refused`.
    Start {
        /// The instance's name from now on; never used twice.
        instance: InstanceId,
        function: FunctionId,
        /// The devices and shares of the instance: one part, the stages of a pipeline, the workers of a training job, or the
        /// devices of a spread model, which share one process.
        parts: Vec<Part>,
        /// The present place of the weights.
        from: Tier,
        /// The expected time of the start.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
        /// Whether the instance starts parked: its process runs with the weights in host memory, and takes no device memory.
        parked: bool,
    },
    /// Take the instance off its devices; answer with `Parked`, or with `Unloaded` if its processes have ended.
    Park {
        /// The instance, which runs no request.
        instance: InstanceId,
        /// Whether its device state goes to host memory, and its processes live on. Where it cannot go there, the processes end.
        keeps: bool,
    },
    /// Bring the instance back to the device; answer with `Unparked`.
    Unpark {
        instance: InstanceId,
        /// The instance's parts from now on.
        parts: Vec<Part>,
        /// The expected time of the move.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
    },
    /// The instance gets no more requests; `Stop` follows. Needs no answer.
    Drain { instance: InstanceId },
    /// End the instance's processes; answer with `Gone`.
    Stop {
        instance: InstanceId,
        /// The reason for the stop.
        cause: StopCause,
    },
    /// Run the request on the instance; answer with `RequestDone`. Of a function with
    /// [`batches`](FunctionSpec::batches), the dispatches to one instance in one answer are one batch.
    Dispatch {
        request: RequestId,
        /// A ready instance of the request's function.
        instance: InstanceId,
    },
    /// The request will not be served.
    Reject {
        request: RequestId,
        /// The reason for the rejection.
        reason: Rejection,
    },
    /// Bring a function's weights to a node's host memory: a request is expected. Needs no answer.
    Fetch { node: NodeId, function: FunctionId },
    /// Drop a function's weights from a node's host memory. Needs no answer.
    Forget { node: NodeId, function: FunctionId },
}

impl PlatformAction {
    /// The instance of the order; None for an order about a request or a function alone.
    pub const fn instance(&self) -> Option<InstanceId> {
        match *self {
            Self::Start { instance, .. }
            | Self::Park { instance, .. }
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
    /// Too many requests of the function wait.
    QueueFull,
    /// Too many requests of the tenant wait.
    TenantQueueFull,
    /// The deadline of the request has passed.
    DeadlineMissed,
    /// The requests before it leave no time to answer it within its deadline.
    WouldBeLate,
    /// The request has waited for the longest allowed time.
    WaitedTooLong,
    /// The request's instances ended as often as allowed.
    AttemptsExhausted,
    /// The function fits no present device.
    NeverFits,
    /// The function was removed.
    Removed,
    /// The request's caller gave up.
    Cancelled,
}

// Each text completes a sentence about the request after "rejected: ".
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
