//! The events, orders and errors of a keeper of instances, and its trait.

use crate::mig::SliceAt;
use crate::pipeline::{AssignedSlice, Goal, NodeError};
use crate::request::Tier;
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
    /// A function that may be called.
    FunctionAdded {
        /// Its name; never used twice.
        function: FunctionId,
        /// Its components.
        dag: Box<Dag>,
        /// Requirements on its pipelines.
        goal: Box<Goal>,
    },
    /// The function is not wanted any more: its instances drain, and those that start are stopped. Its name is free again
    /// when the last of them is gone.
    FunctionRemoved { function: FunctionId },
    /// A GPU of the node's model that was not there before, or is back: nothing runs on it.
    GpuJoined { gpu: GpuId, slices: Vec<SliceAt> },
    /// The GPU is gone with its slices, until it joins again. Each instance with a part on it is gone, and needs no `Gone`;
    /// the host ends its other parts.
    GpuLost { gpu: GpuId },
    /// A request for it came.
    Requested { function: FunctionId },
    /// The router cannot serve its requests in time.
    Short {
        function: FunctionId,
        /// Requests that wait.
        waiting: u32,
        /// How long its instances need for those, on all nodes.
        #[cfg_attr(feature = "serde", serde(rename = "behind_ns"))]
        behind: Duration,
    },
    /// The least number of the function's instances that this node is to keep from now on, those that start included; 0
    /// until it is told. Those that are missing are started, as far as there are slices. Told again when some are gone or slices
    /// may have become free. A keeper without minimums does nothing, or refuses it; its host sees that none is started.
    MinimumSet {
        function: FunctionId,
        /// How many.
        instances: u32,
    },
    /// A shared instance that is not resident is to serve a request. Its slice is idle until that is answered.
    Needed { instance: InstanceId },
    /// An instance served a request.
    Served {
        instance: InstanceId,
        /// How long its busiest slice worked for it.
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
    /// Its stage, from 0.
    pub stage: u32,
    /// Its components, by index in the DAG.
    pub components: ComponentSet,
    /// The slice on which the part runs.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub slice: AssignedSlice,
}

/// Where an instance lives.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "kind", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum Home {
    /// On slices of its own.
    Exclusive {
        /// Its parts by stage; one for an instance that is no pipeline.
        parts: Vec<PlacedPart>,
        /// Time of one batch.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// The bottleneck: time between two batches.
        #[cfg_attr(feature = "serde", serde(rename = "interval_ns"))]
        interval: Duration,
    },
    /// On a slice that it shares.
    Shared {
        number: SharedSlice,
        /// Where that is.
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
    /// Slices it owns, or the one it shares.
    pub fn slices(&self) -> impl Iterator<Item = AssignedSlice> + '_ {
        let (parts, shared) = match self {
            Self::Exclusive { parts, .. } => (parts.as_slice(), None),
            Self::Shared { slice, .. } => (&[][..], Some(*slice)),
        };
        parts.iter().map(|part| part.slice).chain(shared)
    }

    /// Whether it owns more than one slice.
    pub fn is_pipeline(&self) -> bool {
        matches!(self, Self::Exclusive { parts, .. } if parts.len() > 1)
    }
}

/// Why the keeper orders something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "why", rename_all = "snake_case"))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum InstanceReason {
    /// A request came and there was no instance.
    FirstRequest,
    /// The node is to have a minimum of its instances ([`InstanceEvent::MinimumSet`]).
    Minimum,
    /// Its requests cannot be served in time.
    Short,
    /// The instance is busy enough for slices of its own.
    Busy,
    /// The instance has not been busy.
    NotBusy,
    /// Its keep-alive is over.
    KeepAlive,
    /// Another instance needs the memory.
    RoomFor { instance: InstanceId },
    /// A request for it is to be served.
    Needed,
    /// Better slices are free.
    Migrated { from: InstanceId },
    /// The instance that takes its place is up.
    Replaced { by: InstanceId },
    /// Its slices are wanted for another function, which needs them more.
    Reclaimed { function: FunctionId },
    /// Its function was removed.
    Removed,
}

/// An order of the keeper for the host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "action", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum InstanceAction {
    /// Start an instance; an exclusive one is loaded, a shared one is not. Answer with `Started`, or with `Gone`.
    Start {
        /// Its name from now on.
        instance: InstanceId,
        function: FunctionId,
        /// The slices on which the instance runs.
        home: Home,
        /// Where the weights are.
        from: Tier,
        /// How long that should take, as configured.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
        /// Why it is started.
        reason: InstanceReason,
    },
    /// Move a shared instance's weights from host memory to its slice; answer with `Loaded`.
    Load {
        instance: InstanceId,
        /// How long that should take.
        #[cfg_attr(feature = "serde", serde(rename = "takes_ns"))]
        takes: Duration,
    },
    /// Drop a shared instance's weights from its slice, before what follows. Needs no answer.
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
    /// No slices suit the function now. Told again only after something changed.
    Unmet { function: FunctionId },
}

/// A policy that keeps the instances of one node.
///
/// # Contract
/// - slices have one owner; an exclusive instance has its slices alone, and residents of a shared one fit its memory;
/// - no instance is evicted while it runs, or stopped before it has drained or is gone;
/// - an instance that is named in an action was named by a `Start` before, and no name is given twice;
/// - the same events give the same actions.
pub trait InstanceKeeper:
    Engine<Event = InstanceEvent, Action = InstanceAction, Error = InstanceError> + Send
{
    /// Whether the function could run if the GPUs that are there now were empty. None: no such function.
    fn fits(&self, function: FunctionId) -> Option<bool>;

    /// The home of an instance; None: no such instance.
    fn home(&self, instance: InstanceId) -> Option<&Home>;

    /// Checks what holds between events, for tests.
    ///
    /// # Panics
    /// When something does not hold: a mistake of the keeper.
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
    /// The node cannot have that GPU beside its others.
    #[error(transparent)]
    BadGpu { source: NodeError },
    /// No such instance (any more).
    #[error("unknown {instance}")]
    UnknownInstance { instance: InstanceId },
    /// The instance is not in a state in which this can happen.
    #[error("{instance} is {state}: {event} does not apply")]
    WrongState { instance: InstanceId, state: &'static str, event: &'static str },
}
