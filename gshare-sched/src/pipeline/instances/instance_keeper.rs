//! The events, orders and errors of a keeper of instances, and its trait.

use crate::Tier;
use crate::mig::SliceAt;
use crate::pipeline::{AssignedSlice, Goal, NodeError};
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::{Bytes, Duration, Engine, FunctionId, GpuId, InstanceId, SharedSlice, TimeWentBack};

/// The event itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum InstanceEvent {
    /// A new function for future requests.
    FunctionAdded {
        /// The function's name; never used twice.
        function: FunctionId,
        /// Its components.
        dag: Box<Dag>,
        /// Requirements on its pipelines.
        goal: Box<Goal>,
    },
    /// The function is removed: its instances drain, and its starting instances are stopped. Its name is free again with the
    /// end of the last instance.
    FunctionRemoved { function: FunctionId },
    /// A GPU of the node's model joins for the first time or again; no work runs on it.
    GpuJoined { gpu: GpuId, slices: Vec<SliceAt> },
    /// The GPU is gone with its slices, until it joins again. Every instance with a part on the GPU is gone without a `Gone`;
    /// the host ends its other parts.
    GpuLost { gpu: GpuId },
    /// A request for the function came.
    Requested { function: FunctionId },
    /// The router cannot serve the function's requests in time.
    Short {
        function: FunctionId,
        /// Number of waiting requests.
        waiting: u32,
        /// How long the function's instances need for them, on all nodes.
        #[cfg_attr(feature = "serde", serde(rename = "behind_ns"))]
        behind: Duration,
    },
    /// The least number of the function's instances that this node is to keep from now on, starting instances included; 0 until
    /// the first such event. The keeper starts the missing instances as far as slices suffice. The host repeats the event when
    /// instances are gone or slices may have become free, since another of several nodes may have to start the replacement. A
    /// keeper without minimums ignores or refuses the event; its host sees no start.
    MinimumSet {
        function: FunctionId,
        /// The minimum number of instances.
        instances: u32,
    },
    /// A shared instance that is not resident must serve a request. Its slice is idle until the keeper answers.
    Needed { instance: InstanceId },
    /// An instance served a request.
    Served {
        instance: InstanceId,
        /// How long the instance's busiest slice worked for the request.
        #[cfg_attr(feature = "serde", serde(rename = "busy_ns"))]
        busy: Duration,
    },
    /// [`InstanceAction::Start`] was carried out. A shared instance is not resident yet.
    Started { instance: InstanceId },
    /// [`InstanceAction::Load`] was carried out.
    Loaded { instance: InstanceId },
    /// [`InstanceAction::Stop`] was carried out, or the instance died by itself: its slices are free.
    Gone { instance: InstanceId },
    /// [`InstanceAction::Drain`]: it has no request left.
    Drained { instance: InstanceId },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// One part of an exclusive instance, where it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlacedPart {
    /// The number of its stage, from 0.
    pub stage: u32,
    /// Its components, by index in the DAG.
    pub components: ComponentSet,
    /// The slice on which the part runs.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub slice: AssignedSlice,
}

/// The place of an instance on its node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "kind", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum Home {
    /// On slices of its own.
    Exclusive {
        /// The instance's parts by stage; a single part unless it is a pipeline.
        parts: Vec<PlacedPart>,
        /// Time of one batch.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// The bottleneck: time between two batches.
        #[cfg_attr(feature = "serde", serde(rename = "interval_ns"))]
        interval: Duration,
    },
    /// On a slice with other instances.
    Shared {
        number: SharedSlice,
        /// The shared slice itself.
        #[cfg_attr(feature = "serde", serde(flatten))]
        slice: AssignedSlice,
        /// Time of one batch.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// Time to load it from host memory.
        #[cfg_attr(feature = "serde", serde(rename = "load_ns"))]
        load: Duration,
        /// Memory on the slice while it is resident.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
        memory: Bytes,
    },
}

impl Home {
    /// The slices it owns, or the slice it shares.
    pub fn slices(&self) -> impl Iterator<Item = AssignedSlice> + '_ {
        let (parts, shared) = match self {
            Self::Exclusive { parts, .. } => (parts.as_slice(), None),
            Self::Shared { slice, .. } => (&[][..], Some(*slice)),
        };
        parts.iter().map(|part| part.slice).chain(shared)
    }

    /// Whether the home has more than one slice of its own.
    pub fn is_pipeline(&self) -> bool {
        matches!(self, Self::Exclusive { parts, .. } if parts.len() > 1)
    }
}

/// The reason for an order of the keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "why", rename_all = "snake_case"))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum InstanceReason {
    /// A request came and there was no instance.
    FirstRequest,
    /// The node must have a minimum of the function's instances ([`InstanceEvent::MinimumSet`]).
    Minimum,
    /// The function's requests cannot be served in time.
    Short,
    /// The instance is busy enough for slices of its own.
    Busy,
    /// The instance has not been busy.
    NotBusy,
    /// The function's keep-alive is over.
    KeepAlive,
    /// Another instance needs the memory.
    RoomFor { instance: InstanceId },
    /// A request for it is to be served.
    Needed,
    /// Better slices are free.
    Migrated { from: InstanceId },
    /// The new instance in its place is up.
    Replaced { by: InstanceId },
    /// Another function needs its slices more.
    Reclaimed { function: FunctionId },
    /// The function was removed.
    Removed,
}

/// An order of the keeper for the host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "action", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum InstanceAction {
    /// Start an instance, and load it if it is exclusive; a shared instance is loaded later. Answer with `Started`, or with
    /// `Gone`.
    Start {
        /// Its name from now on.
        instance: InstanceId,
        function: FunctionId,
        /// The slices on which the instance runs.
        home: Home,
        /// The present place of the weights.
        from: Tier,
        /// The configured time for the start.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
        /// Why it is started.
        reason: InstanceReason,
    },
    /// Move a shared instance's weights from host memory to its slice; answer with `Loaded`.
    Load {
        instance: InstanceId,
        /// The configured time for the load.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
    },
    /// Drop a shared instance's weights from its slice, before the actions after this one. Needs no answer.
    Evict {
        instance: InstanceId,
        /// Why it is evicted.
        reason: InstanceReason,
    },
    /// The instance stays where it is and changes its state.
    Moved {
        instance: InstanceId,
        /// Its home from now on.
        home: Home,
        /// Why it changes.
        reason: InstanceReason,
    },
    /// Give the instance no more requests; answer with `Drained`.
    Drain {
        instance: InstanceId,
        /// Why it is drained.
        reason: InstanceReason,
    },
    /// End the instance's processes; answer with `Gone`.
    Stop {
        instance: InstanceId,
        /// Why it is stopped.
        reason: InstanceReason,
    },
    /// Bring a function's weights to host memory: a request is expected. Needs no answer.
    Prewarm { function: FunctionId },
    /// Drop a function's weights from host memory: it is cold.
    Forget { function: FunctionId },
    /// No slices suit the function now. Repeated only after a change.
    Unmet { function: FunctionId },
}

/// A policy that keeps the instances of one node.
///
/// # Contract
/// - slices have one owner; an exclusive instance has its slices alone, and residents of a shared slice fit its memory;
/// - no instance is evicted while it runs, or stopped before it has drained or is gone;
/// - each instance is named by a `Start` before any other action, and no name is given twice;
/// - the same events give the same actions.
pub trait InstanceKeeper:
    Engine<Event = InstanceEvent, Action = InstanceAction, Error = InstanceError> + Send
{
    /// Whether the function could run if all present GPUs were empty. None: no such function.
    fn fits(&self, function: FunctionId) -> Option<bool>;

    /// The home of an instance; None: no such instance.
    fn home(&self, instance: InstanceId) -> Option<&Home>;

    /// Checks the invariants between events, for tests.
    ///
    /// # Panics
    /// On a broken invariant, a mistake of the keeper.
    fn invariants(&self) {}
}

/// Why an event was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum InstanceError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// The function is here already.
    #[error("{function} is already here")]
    DuplicateFunction { function: FunctionId },
    /// No such function.
    #[error("unknown {function}")]
    UnknownFunction { function: FunctionId },
    /// No pipeline of the function fits the node even when all of it is free.
    #[error("{function} does not fit this node: {why}")]
    NeverFits { function: FunctionId, why: String },
    /// No such GPU (any more).
    #[error("unknown {gpu}")]
    UnknownGpu { gpu: GpuId },
    /// The GPU does not go with the node's other GPUs.
    #[error(transparent)]
    BadGpu { source: NodeError },
    /// No such instance (any more).
    #[error("unknown {instance}")]
    UnknownInstance { instance: InstanceId },
    /// The instance is not in a state in which this can happen.
    #[error("{instance} is {state}: {event} does not apply")]
    WrongState { instance: InstanceId, state: &'static str, event: &'static str },
}
