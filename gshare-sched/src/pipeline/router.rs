//! The events, orders and errors of routers, and their trait.

use gshare_core::{
    Duration, Engine, FunctionId, InstanceId, RequestId, SharedSlice, TimeWentBack, Timestamp,
};

/// How an instance serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum Service {
    /// On slices of its own.
    Exclusive {
        /// Time of one request that finds it empty; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// Time between two requests that follow each other: the bottleneck. More than 0.
        #[cfg_attr(feature = "serde", serde(rename = "interval_ns"))]
        interval: Duration,
        /// Most requests it holds; more than 0.
        capacity: u32,
    },
    /// On a slice that it shares.
    Shared {
        slice: SharedSlice,
        /// Time of one request; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// Time until it could begin; 0 when it is resident.
        #[cfg_attr(feature = "serde", serde(rename = "load_ns"))]
        load: Duration,
    },
}

/// The event itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum RouteEvent {
    /// An instance serves from now on.
    InstanceUp {
        /// Its name; free again when it is down.
        instance: InstanceId,
        function: FunctionId,
        /// How it serves.
        service: Service,
    },
    /// A shared instance was loaded or evicted: slacks on it change.
    LoadChanged {
        instance: InstanceId,
        /// Time until it could begin.
        #[cfg_attr(feature = "serde", serde(rename = "load_ns"))]
        load: Duration,
    },
    /// The instance serves in another way from now on. Requests it has stay there.
    ServiceChanged {
        /// Which; not one that is draining.
        instance: InstanceId,
        /// How it serves.
        service: Service,
    },
    /// The instance gets no more requests; [`RouteAction::Drained`] follows when it has none left.
    InstanceDraining { instance: InstanceId },
    /// The instance is gone. Requests it had are routed again.
    InstanceDown { instance: InstanceId },
    /// A new request.
    Arrived {
        /// Its name; free again when it was completed or rejected.
        request: RequestId,
        function: FunctionId,
        /// When it must be answered. Requests without come after all that have one.
        #[cfg_attr(feature = "serde", serde(rename = "deadline_ns", default))]
        deadline: Option<Timestamp>,
    },
    /// The function is not wanted any more: its requests that wait are rejected. Those that were dispatched go on; should
    /// their instance go down they wait again, until this is told once more.
    FunctionRemoved { function: FunctionId },
    /// A dispatched request was answered.
    Completed { request: RequestId, instance: InstanceId },
    /// The client of a request that was not dispatched gave up. It is forgotten without an answer.
    Cancelled { request: RequestId },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of the router for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum RouteAction {
    /// Run the request there (a shared instance that is not resident is loaded first); answer with `Completed`.
    Dispatch { request: RequestId, instance: InstanceId },
    /// The request will not be served.
    Reject {
        request: RequestId,
        /// Why it is rejected.
        reason: RouteReject,
    },
    /// The function's instances cannot serve what waits in time. Told at most once in
    /// `short_every`.
    Short {
        function: FunctionId,
        /// Requests that wait.
        waiting: u32,
        /// How long its instances need for those; an hour when it has none.
        #[cfg_attr(feature = "serde", serde(rename = "behind_ns"))]
        behind: Duration,
    },
    /// A draining instance has no request left.
    Drained { instance: InstanceId },
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum RouteReject {
    /// Too many wait.
    QueueFull,
    /// The requests that wait already would make it late (admission control).
    WouldBeLate,
    /// The request can no longer be answered in time (admission control).
    DeadlineMissed,
    /// The request was dispatched as often as is allowed, and its instances went down.
    AttemptsExhausted,
    /// Its function was removed.
    Removed,
}

/// A policy that gives requests to instances.
///
/// # Contract
/// - each request is dispatched until it is completed or rejected; it is rejected once;
/// - an exclusive instance never has more requests than its capacity, a shared slice runs one;
/// - none is dispatched to an instance that drains; `Drained` follows once when it has none left;
/// - the same events give the same actions.
pub trait Router: Engine<Event = RouteEvent, Action = RouteAction, Error = RouteError> + Send {
    /// Requests of a function that wait.
    fn waiting(&self, function: FunctionId) -> usize;

    /// Requests that were dispatched to an instance and are not answered.
    fn outstanding(&self, instance: InstanceId) -> usize;

    /// Checks what holds between events, for tests.
    ///
    /// # Panics
    /// When something does not hold: a mistake of the router.
    fn invariants(&self) {}
}

/// Why an event was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum RouteError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// The name is in use.
    #[error("{request} is already here")]
    DuplicateRequest { request: RequestId },
    /// No such request (any more).
    #[error("unknown {request}")]
    UnknownRequest { request: RequestId },
    /// The request was not dispatched there, or (on `Cancelled`) has been dispatched.
    #[error("{request} does not {}", instance.map_or_else(|| "wait any more".to_owned(), |one| format!("run on {one}")))]
    NotThere { request: RequestId, instance: Option<InstanceId> },
    /// The name is in use.
    #[error("{instance} is already up")]
    DuplicateInstance { instance: InstanceId },
    /// No such instance (any more).
    #[error("unknown {instance}")]
    UnknownInstance { instance: InstanceId },
    /// The instance gets no more requests.
    #[error("{instance} is draining")]
    Draining { instance: InstanceId },
    /// An exclusive instance has no load that could change.
    #[error("{instance} is exclusive and has no load")]
    NotShared { instance: InstanceId },
    /// A number that cannot be.
    #[error("{field} of {instance} is {value}: {bound}")]
    BadInstance { instance: InstanceId, field: &'static str, value: u64, bound: &'static str },
}
