//! Functions, devices, instances and requests, as a host and the platform name them; and pools, which share devices out.

use crate::mig::{GpuModel, MigError, SliceAt};
use crate::pipeline::Goal;
use crate::request::{TenantLimits, Tier};
use core::fmt;
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::profile::ProfileTable;
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, GpuKind, GpuShare, InstanceId, NodeId, Quota, RequestId,
    TenantId, Timestamp,
};

/// How a device is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Regime {
    /// Instances hold shares of time and SMs side by side (FaST-GShare, Dilu).
    Fractional,
    /// Instances own MIG slices, or take turns on one (FluidFaaS).
    Sliced,
    /// One request at a time has the device, and models are cached in its memory (GPU-enabled FaaS).
    Whole,
}

gshare_core::display_as!(Regime { Fractional => "fractional", Sliced => "sliced", Whole => "whole" });

/// The MIG slices of a GPU that functions may use.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(try_from = "RawMigLayout", into = "RawMigLayout"))]
pub struct MigLayout {
    model: GpuModel,
    slices: Vec<SliceAt>,
}

impl MigLayout {
    /// Slices at their places on a GPU of a model.
    ///
    /// # Errors
    /// [`MigError`]: slices that overlap or that the model does not have.
    pub fn new(model: GpuModel, slices: Vec<SliceAt>) -> Result<Self, MigError> {
        model.validate(&slices)?;
        Ok(Self { model, slices })
    }

    /// Slices by the names of their profiles, arranged as the driver can.
    ///
    /// # Errors
    /// [`MigError`]: a model or profile that is not known, or slices that fit no arrangement.
    pub fn named(model: &str, names: &[&str]) -> Result<Self, MigError> {
        let model = GpuModel::find(model)?;
        let profiles = names.iter().map(|name| model.profile(name)).collect::<Result<Vec<_>, _>>()?;
        let Some(mut slices) = model.arrange(&profiles) else {
            return Err(MigError::NoArrangement { model: model.name.to_string(), names: names.join(",") });
        };
        slices.sort_unstable();
        Ok(Self { model, slices })
    }

    /// The table of profiles of the GPU's model.
    pub const fn model(&self) -> &GpuModel {
        &self.model
    }

    /// The slices, by place.
    pub fn slices(&self) -> &[SliceAt] {
        &self.slices
    }
}

#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct RawMigLayout {
    model: String,
    slices: Vec<String>,
}

#[cfg(feature = "serde")]
impl TryFrom<RawMigLayout> for MigLayout {
    type Error = MigError;
    fn try_from(raw: RawMigLayout) -> Result<Self, MigError> {
        let names: Vec<&str> = raw.slices.iter().map(String::as_str).collect();
        Self::named(&raw.model, &names)
    }
}

#[cfg(feature = "serde")]
impl From<MigLayout> for RawMigLayout {
    fn from(layout: MigLayout) -> Self {
        let name = |slice: &SliceAt| layout.model.get(slice.profile).map(|profile| profile.name.to_string());
        let slices = layout.slices.iter().filter_map(name).collect();
        Self { model: layout.model.name.to_string(), slices }
    }
}

/// A device that functions may use.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct DeviceSpec {
    /// The machine that it is in; devices of one node share its host memory.
    pub node: NodeId,
    /// Devices of equal speed and memory have the same kind.
    pub kind: GpuKind,
    /// Its memory in bytes; more than 0.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
    pub memory: Bytes,
    /// How it is shared. A device with MIG slices is sliced, another is fractional unless this says `whole`.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub regime: Option<Regime>,
    /// Its MIG slices, where it has any.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub mig: Option<Box<MigLayout>>,
}

gshare_core::with_fields!(DeviceSpec { with_kind(kind: GpuKind), with_regime(regime: Regime => Some) });

impl DeviceSpec {
    /// A GPU of kind 0 without MIG slices, shared as the platform chooses.
    pub const fn new(node: NodeId, memory: Bytes) -> Self {
        Self { node, kind: GpuKind::new(0), memory, regime: None, mig: None }
    }

    /// The same device with these MIG slices.
    #[must_use]
    pub fn with_mig(self, layout: MigLayout) -> Self {
        Self { mig: Some(Box::new(layout)), ..self }
    }

    /// The regime that the device is in.
    pub fn effective_regime(&self) -> Regime {
        match (self.regime, &self.mig) {
            (_, Some(_)) => Regime::Sliced,
            (Some(Regime::Whole), None) => Regime::Whole,
            _ => Regime::Fractional,
        }
    }
}

/// The way in which a function uses a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
pub enum Work {
    /// Answers requests from one device, or from [`FunctionSpec::devices`] that hold one model together.
    Inference {
        /// Its measured points. Without, the platform has the function profiled first.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        profile: Option<ProfileTable>,
    },
    /// Answers requests, and may be cut into stages on several MIG slices.
    Pipeline {
        /// Its components with their profiles by slice.
        dag: Box<Dag>,
        /// The batch, memory and costs that pipelines are made for. The function's SLO takes the place of the goal's.
        goal: Box<Goal>,
    },
    /// Trains a model: workers that start together, run until they complete, and answer no requests.
    Training {
        /// Workers, each with the share on a device of its own; 1 to 64.
        workers: u32,
        /// The share of each worker.
        share: GpuShare,
    },
}

/// A function as a user deploys it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct FunctionSpec {
    /// The way in which it uses devices.
    pub work: Work,
    /// On whose account it runs.
    #[cfg_attr(feature = "serde", serde(default = "nobody"))]
    pub tenant: TenantId,
    /// The time in which a request is to be answered, waiting included. None: no latency to keep.
    #[cfg_attr(feature = "serde", serde(rename = "slo_ns", default))]
    pub slo: Option<Duration>,
    /// The regime it must run in. None: the platform chooses.
    #[cfg_attr(feature = "serde", serde(default))]
    pub regime: Option<Regime>,
    /// Instances that are kept also without load; at most 1 on whole devices.
    #[cfg_attr(feature = "serde", serde(default))]
    pub min_instances: u32,
    /// The most instances, those that start included; at least the minimum, more than 0.
    #[cfg_attr(feature = "serde", serde(default = "one"))]
    pub max_instances: u32,
    /// GPU memory of one instance in bytes, weights and work space; more than 0.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
    pub memory: Bytes,
    /// Time to start a process and load its weights from disk.
    #[cfg_attr(feature = "serde", serde(rename = "load_disk_ns"))]
    pub load_disk: Duration,
    /// The same with the weights in host memory.
    #[cfg_attr(feature = "serde", serde(rename = "load_host_ns"))]
    pub load_host: Duration,
    /// The most of a fractional device's time that an instance may take while others leave it. The whole, unless the
    /// user says otherwise (FaST-GShare, `gpu_quota_limit`).
    #[cfg_attr(feature = "serde", serde(rename = "time_limit_bp", default = "all"))]
    pub time_limit: Quota,
    /// Devices of one node over which an instance of an inference function is spread: tensor parallelism. Each has an equal
    /// part of its memory, and the share of its point. 1 to 64; more than 1 on fractional devices only.
    #[cfg_attr(feature = "serde", serde(default = "one"))]
    pub devices: u32,
}

#[cfg(feature = "serde")]
const fn all() -> Quota {
    Quota::WHOLE
}

#[cfg(feature = "serde")]
const fn one() -> u32 {
    1
}

#[cfg(feature = "serde")]
const fn nobody() -> TenantId {
    TenantId::new(0)
}

gshare_core::with_fields!(FunctionSpec {
    with_time_limit(time_limit: Quota),
    with_devices(devices: u32),
    with_slo(slo: Duration => Some),
    with_regime(regime: Regime => Some),
    with_tenant(tenant: TenantId),
});

impl FunctionSpec {
    /// A function of tenant 0 that may have one instance, is stopped when no client calls it and has no latency to keep. Its
    /// loading times are those of 1 GB/s from disk and 12 GB/s from host memory with 4 s for the process.
    pub fn new(work: Work, memory: Bytes) -> Self {
        let process = Duration::from_secs(4);
        let at = |bytes_per_ns: u64| Duration::from_nanos(memory.get() / bytes_per_ns);
        Self {
            work,
            tenant: TenantId::new(0),
            slo: None,
            regime: None,
            min_instances: 0,
            max_instances: 1,
            memory,
            load_disk: process.saturating_add(at(1)),
            load_host: process.saturating_add(at(12)),
            time_limit: Quota::WHOLE,
            devices: 1,
        }
    }

    /// GPU memory in bytes of an instance on each of its [`devices`](Self::devices).
    pub fn memory_per_device(&self) -> Bytes {
        Bytes(self.memory.get().div_ceil(u64::from(self.devices.max(1))))
    }

    /// The same function with other bounds of its instances.
    #[must_use]
    pub fn with_instances(self, min_instances: u32, max_instances: u32) -> Self {
        Self { min_instances, max_instances, ..self }
    }

    /// The same function with other times to load it from disk and from host memory.
    #[must_use]
    pub fn with_loads(self, load_disk: Duration, load_host: Duration) -> Self {
        Self { load_disk, load_host, ..self }
    }
}

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
pub struct Part {
    /// The device.
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
pub enum PlatformEvent {
    /// A device that was not there before, or is back; nothing runs on it.
    DeviceFound {
        /// Its name.
        gpu: GpuId,
        /// Kind, memory and node of the device.
        spec: DeviceSpec,
    },
    /// The device is gone, or its node is, with every instance that has a part on it or was parked from it. The host ends
    /// their other parts, before it starts anything in their place, and need not report them gone.
    DeviceLost {
        /// Its name.
        gpu: GpuId,
    },
    /// The limits of a tenant from now on; a tenant that was never named has no limit.
    TenantLimited {
        /// The tenant.
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
        /// The function.
        function: FunctionId,
        /// Its measured points.
        profile: ProfileTable,
        /// The memory in bytes that was measured, where it is to take the place of the deployed figure; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bytes", default))]
        memory: Option<Bytes>,
    },
    /// Another least and most number of instances.
    BoundsChanged {
        /// The function.
        function: FunctionId,
        /// Instances that are kept at any load.
        min_instances: u32,
        /// The most instances; at least the minimum, more than 0.
        max_instances: u32,
    },
    /// The function is not wanted any more: what waits is rejected, what runs is drained.
    FunctionRemoved {
        /// The function.
        function: FunctionId,
    },
    /// A new request.
    RequestArrived {
        /// Its name; free again when it has ended.
        request: RequestId,
        /// Which function it calls.
        function: FunctionId,
        /// The time after which no client waits for its answer; a request that waits is rejected then.
        #[cfg_attr(feature = "serde", serde(rename = "deadline_ns", default))]
        deadline: Option<Timestamp>,
    },
    /// A dispatched request was answered, well or with an error of the function's own.
    RequestDone {
        /// The request.
        request: RequestId,
        /// How long the instance worked for it.
        #[cfg_attr(feature = "serde", serde(rename = "took_ns"))]
        took: Duration,
    },
    /// The caller of a request gave up. One that waits is rejected; one that was dispatched goes on.
    RequestCancelled {
        /// The request.
        request: RequestId,
    },
    /// A change of an instance, as its host reports it.
    Instance {
        /// Its name, from its `Start`.
        instance: InstanceId,
        /// The change.
        report: InstanceReport,
    },
    /// [`Engine::next_deadline`] has come.
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
pub enum PlatformAction {
    /// Measure the function on a device of its own and answer with `ProfileLearned`.
    Profile {
        /// The function.
        function: FunctionId,
    },
    /// Start an instance; answer with `Ready` or `Refused`.
    Start {
        /// Its name from now on; never used twice.
        instance: InstanceId,
        /// The function that it is a copy of.
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
        /// The instance.
        instance: InstanceId,
        /// Where it runs from now on.
        parts: Vec<Part>,
        /// How long that should take.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
    },
    /// The instance gets no more requests; `Stop` follows. Needs no answer.
    Drain {
        /// The instance.
        instance: InstanceId,
    },
    /// End the instance's processes; answer with `Gone`.
    Stop {
        /// The instance.
        instance: InstanceId,
        /// Why it is stopped.
        cause: StopCause,
    },
    /// Run the request there; answer with `RequestDone`.
    Dispatch {
        /// The request.
        request: RequestId,
        /// An instance of its function that is ready.
        instance: InstanceId,
    },
    /// The request will not be served.
    Reject {
        /// The request.
        request: RequestId,
        /// Why not.
        reason: Rejection,
    },
    /// Bring a function's weights to a node's host memory: a request is expected. Needs no answer.
    Fetch {
        /// The node.
        node: NodeId,
        /// The function.
        function: FunctionId,
    },
    /// Drop a function's weights from a node's host memory. Needs no answer.
    Forget {
        /// The node.
        node: NodeId,
        /// The function.
        function: FunctionId,
    },
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

/// Something that happened, as a pool hears of it. The platform has checked it: the function, request,
/// instance or device is one of the pool's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolEvent {
    /// The device is the pool's from now on; nothing runs on it.
    DeviceJoined {
        /// Its name.
        gpu: GpuId,
        /// Kind, memory and node of the device.
        spec: DeviceSpec,
    },
    /// The device is gone, with every instance that has a part on it or was parked from it.
    DeviceLost {
        /// Its name.
        gpu: GpuId,
    },
    /// The limits of a tenant from now on.
    TenantLimited {
        /// The tenant.
        tenant: TenantId,
        /// The new limits.
        limits: TenantLimits,
    },
    /// A function whose instances are the pool's business from now on. An inference function has its profile.
    FunctionAdded {
        /// Its name.
        function: FunctionId,
        /// The specification of the function.
        spec: Box<FunctionSpec>,
    },
    /// Another least and most number of instances.
    BoundsChanged {
        /// The function.
        function: FunctionId,
        /// Instances that are kept at any load.
        min_instances: u32,
        /// The most instances.
        max_instances: u32,
    },
    /// The function is not wanted any more.
    FunctionRemoved {
        /// The function.
        function: FunctionId,
    },
    /// A request of the function came, and waits outside of the pool until its tenant may have one more at work, while others of the
    /// function that may wait in the pool for an instance. It counts as load now, and not when it [arrives](Self::Arrived).
    Held {
        /// The function that the request calls.
        function: FunctionId,
    },
    /// A new request.
    Arrived {
        /// Its name.
        request: RequestId,
        /// Which function it calls.
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
        /// The request.
        request: RequestId,
        /// How long the instance worked for it.
        took: Duration,
    },
    /// The caller of a request that waits gave up: forget it without an answer.
    Cancelled {
        /// The request.
        request: RequestId,
    },
    /// A change of an instance, as its host reports it, by the pool's own name of the instance.
    Instance {
        /// The pool's name of the instance.
        instance: InstanceId,
        /// The change.
        report: InstanceReport,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of a pool: for the host, or for the platform itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolAction {
    /// An order for the host, with the pool's own names of instances. A pool orders no `Profile`.
    Order(PlatformAction),
    /// No device of the pool has what the next instance of the function needs; one that is only busy has. Told again only after
    /// something changed.
    Unmet {
        /// The function.
        function: FunctionId,
    },
}

/// Why a pool refused an event. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The function cannot be served in this regime, by its own fault.
    #[error("{function} cannot run on {regime} devices: {why}")]
    Unsuitable {
        /// The function.
        function: FunctionId,
        /// The pool's regime.
        regime: Regime,
        /// The field and its bound.
        why: String,
    },
    /// The device is not one that the pool can share out.
    #[error("{gpu} cannot be a {regime} device: {why}")]
    BadDevice {
        /// The device.
        gpu: GpuId,
        /// The pool's regime.
        regime: Regime,
        /// The field and its bound.
        why: String,
    },
    /// An event that the pool cannot take; the platform does not send such events.
    #[error("the {regime} pool refuses: {why}")]
    Refused {
        /// The pool's regime.
        regime: Regime,
        /// The field and its bound.
        why: String,
    },
    /// An event for something that the pool does not have; the platform does not send such events.
    #[error("{what} is not known to the {regime} pool")]
    Unknown {
        /// The pool's regime.
        regime: Regime,
        /// The name given.
        what: String,
    },
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
pub struct InstanceView {
    /// The pool's name of the instance.
    pub instance: InstanceId,
    /// The function that it is a copy of.
    pub function: FunctionId,
    /// Its state.
    pub life: Life,
    /// Where it runs; empty while it is parked.
    pub parts: Vec<Part>,
    /// Requests that it has.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_in_the_regime_that_its_slices_and_its_owner_say() {
        let gpu = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(80));
        assert_eq!(gpu.effective_regime(), Regime::Fractional);
        assert_eq!(gpu.clone().with_regime(Regime::Whole).effective_regime(), Regime::Whole);
        let layout = MigLayout::named("A100-80", &["4g.40gb", "3g.40gb"]).unwrap();
        assert_eq!(layout.slices().len(), 2);
        assert_eq!(gpu.with_mig(layout).effective_regime(), Regime::Sliced);
        let error = MigLayout::named("A100-80", &["7g.80gb", "1g.10gb"]).unwrap_err().to_string();
        assert!(error.contains("1g.10gb") || error.contains("7g.80gb"), "{error}");
    }

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
