//! The events, actions and errors of request schedulers, and their trait.

use gshare_core::{
    BasisPoints, Bytes, Duration, Engine, GpuId, GpuKind, ModelId, NodeId, RequestId, TenantId, TimeWentBack,
    Timestamp,
};

/// Where a model is loaded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Tier {
    /// Pinned memory of the GPU's node.
    Host,
    /// Disk, or anything as slow.
    Disk,
}

/// Time and memory that a model costs on GPUs of one kind, as profiled (GPU-enabled FaaS, section IV-A and Table I).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModelProfile {
    /// Time to start its process and load it from disk.
    #[cfg_attr(feature = "serde", serde(rename = "load_disk_ns"))]
    pub load_disk: Duration,
    /// The same from pinned host memory.
    #[cfg_attr(feature = "serde", serde(rename = "load_host_ns"))]
    pub load_host: Duration,
    /// Time of one request; more than 0.
    #[cfg_attr(feature = "serde", serde(rename = "infer_ns"))]
    pub infer: Duration,
}

/// The event itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum RequestEvent {
    /// A GPU, empty and idle.
    GpuJoined {
        gpu: GpuId,
        kind: GpuKind,
        /// Where it is.
        node: NodeId,
        /// Memory for models; the same for all GPUs of a kind.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
        memory: Bytes,
    },
    /// The GPU or its manager is gone, with its models.
    GpuLost { gpu: GpuId },
    /// A model that may be asked for, or its new size if it was never loaded.
    ModelAdded {
        model: ModelId,
        /// Memory it needs on a GPU while it runs; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
        memory: Bytes,
    },
    /// The cost of a model on a kind of GPU. The model never goes to a kind without this event.
    ModelProfiled {
        model: ModelId,
        kind: GpuKind,
        /// The cost on that kind.
        profile: ModelProfile,
    },
    /// Keep the model on this GPU, from now on if it is there, else from its next load on; or no longer.
    ModelPinned {
        model: ModelId,
        gpu: GpuId,
        /// Whether to keep it.
        pinned: bool,
    },
    /// The most copies of a model from now on, on all GPUs; a model that was never named has no limit. Surplus copies are
    /// evicted: unused copies at once, others after their requests. A copy under eviction does not count.
    ModelLimited {
        model: ModelId,
        /// The most copies; more than 0.
        copies: u32,
    },
    /// The most memory that copies loaded for a tenant may occupy from now on. A tenant that was never named has no limit.
    TenantLimited {
        tenant: TenantId,
        /// Share of the memory of all GPUs.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bp"))]
        memory: BasisPoints,
    },
    /// A new request.
    Arrived {
        request: RequestId,
        model: ModelId,
        tenant: TenantId,
        /// Deadline of its completion; the request is rejected as soon as it cannot be met.
        #[cfg_attr(feature = "serde", serde(rename = "deadline_ns", default))]
        deadline: Option<Timestamp>,
    },
    /// The client of a request that was not dispatched gave up.
    Cancelled { request: RequestId },
    /// An `Evict` was carried out.
    Evicted { gpu: GpuId, model: ModelId },
    /// A `Load` was carried out.
    Loaded {
        gpu: GpuId,
        model: ModelId,
        /// How long it took.
        #[cfg_attr(feature = "serde", serde(rename = "took_ns"))]
        took: Duration,
    },
    /// A `Load` failed; the model is not on the GPU.
    LoadFailed { gpu: GpuId, model: ModelId },
    /// A dispatched request found that its model is not on the GPU.
    NotResident { gpu: GpuId, request: RequestId },
    /// The node reports that it lacks a model. An unused copy is then evicted for certain, since the report may be older
    /// than a load. The next dispatch to a copy in use finds out by itself.
    Dropped { gpu: GpuId, model: ModelId },
    /// A dispatched request is done.
    Completed {
        gpu: GpuId,
        request: RequestId,
        /// How long the GPU ran it (the whole batch, for each of a batch).
        #[cfg_attr(feature = "serde", serde(rename = "took_ns"))]
        took: Duration,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of the scheduler for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum RequestAction {
    /// End the model's process on the GPU; answer with `Evicted`.
    Evict { gpu: GpuId, model: ModelId },
    /// Start a process for the model and load it; answer with `Loaded` or `LoadFailed`.
    Load {
        gpu: GpuId,
        model: ModelId,
        /// From where.
        from: Tier,
        /// Whether to keep a copy in the node's pinned memory on the way.
        keep_on_host: bool,
    },
    /// Free the copy in the node's pinned memory. Needs no answer.
    DropHost { node: NodeId, model: ModelId },
    /// Run the request; answer with `Completed` or `NotResident`.
    Dispatch {
        gpu: GpuId,
        request: RequestId,
        /// The model it needs, which is there.
        model: ModelId,
        /// How many of the next dispatches run together with this one.
        batch_more: u16,
    },
    /// The request will not be served.
    Reject {
        request: RequestId,
        /// Why it is rejected.
        reason: RejectReason,
    },
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum RejectReason {
    /// The model fits no kind of GPU it was profiled on.
    ModelTooLarge,
    /// The model was not profiled on any kind of GPU.
    NotProfiled,
    /// The model is larger than its tenant's share of the GPUs' memory.
    TenantMemory,
    /// Too many requests are waiting.
    QueueFull,
    /// The request can no longer be complete by its deadline.
    DeadlineMissed,
    /// As many loads for the request failed as may fail.
    LoadsFailed,
    /// Its client gave up.
    Cancelled,
}

/// Why an event was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum RequestError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// The name is in use.
    #[error("{request} is already here")]
    DuplicateRequest { request: RequestId },
    /// No such request (any more).
    #[error("unknown {request}")]
    UnknownRequest { request: RequestId },
    /// This GPU was not told to run the request.
    #[error("{request} does not run on {gpu}")]
    NotRunning { request: RequestId, gpu: GpuId },
    /// The request has been given to a GPU, or is waiting for its model there.
    #[error("{request} has a GPU already")]
    AlreadyPlaced { request: RequestId },
    /// The model was never added, so its size is unknown.
    #[error("unknown {model}: its memory was never told")]
    UnknownModel { model: ModelId },
    /// The model needs no memory, or was loaded with another size.
    #[error("memory of {model} is {memory}: need more than 0, and the same as before once it was asked for")]
    BadModelMemory { model: ModelId, memory: Bytes },
    /// No copy at all is no limit: nothing could be served.
    #[error("copies of {model} is 0: need more than 0")]
    NoCopies { model: ModelId },
    /// A profile that cannot be.
    #[error("infer of {model} on {kind} is 0: need more than 0, and loads of at most an hour")]
    BadProfile { model: ModelId, kind: GpuKind },
    /// No such GPU (any more).
    #[error("unknown {gpu}")]
    UnknownGpu { gpu: GpuId },
    /// The GPU is here already.
    #[error("{gpu} is already here")]
    GpuExists { gpu: GpuId },
    /// A name beyond the configured number of them.
    #[error("{field} is {value}: must be below {limit}")]
    OutOfRange { field: &'static str, value: u64, limit: u64 },
    /// GPUs of one kind are alike.
    #[error("memory of {gpu} is {memory}, that of {kind} is {expected}")]
    KindDiffers { gpu: GpuId, kind: GpuKind, memory: Bytes, expected: Bytes },
    /// The GPU reports an action without an order.
    #[error("{gpu} was not told to {what} {model}")]
    NotOrdered { gpu: GpuId, what: &'static str, model: ModelId },
}

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "place", rename_all = "snake_case"))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum RequestPlace {
    /// In the global queue.
    Queued,
    /// In a GPU's local queue.
    Local { gpu: GpuId },
    /// On a GPU that makes room, loads, or runs it.
    Placed { gpu: GpuId },
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct RequestStats {
    /// Requests completed.
    pub completed: u64,
    /// Requests rejected.
    pub rejected: u64,
    /// Requests given to a copy that was there.
    pub hits: u64,
    /// Requests for which a copy was loaded.
    pub misses: u64,
    /// Misses although another GPU had a copy.
    pub false_misses: u64,
    /// Copies evicted.
    pub evictions: u64,
    /// Requests moved to a local queue.
    pub moved_to_local: u64,
}

/// One GPU as a scheduler sees it: status, estimate, and models by use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuRecord {
    /// Whether it has something to do.
    pub busy: bool,
    /// Time at which all of its work will be done.
    pub free_at: Timestamp,
    /// Models in its memory, least recently used first.
    pub models: Vec<ModelId>,
}

/// A policy that gives requests to GPUs. See the [module](super) for the life of a request.
///
/// # Contract
/// - every request is dispatched and completed once, or rejected once;
/// - the copies on a GPU, in every state, never need more memory than it has;
/// - a copy under a running request is not evicted, nor a copy that a request waits for, unless the model has too many
///   copies;
/// - no load is ordered for a model at its limit of copies; a scheduler without such a limit refuses
///   [`RequestEvent::ModelLimited`];
/// - the same events give the same actions.
pub trait RequestScheduler:
    Engine<Event = RequestEvent, Action = RequestAction, Error = RequestError> + Send
{
    /// Where the request is; `None` when it is not here.
    fn place(&self, request: RequestId) -> Option<RequestPlace>;

    /// Number of requests that wait for a GPU to be chosen.
    fn waiting(&self) -> usize;

    /// Counters since the beginning.
    fn stats(&self) -> RequestStats;

    /// The GPU as this scheduler sees it; `None` when it is not here.
    fn gpu(&self, gpu: GpuId) -> Option<GpuRecord>;
}
