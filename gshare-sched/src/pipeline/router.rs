//! The events, orders and errors of routers, and their trait.

use gshare_core::{
    Duration, Engine, FunctionId, InstanceId, RequestId, SharedSlice, TimeWentBack, Timestamp,
};

/// An instance's times and capacity as the router sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum Service {
    /// On slices of its own.
    Exclusive {
        /// Time of one request on the empty instance; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// Time between two consecutive requests: the bottleneck. More than 0.
        #[cfg_attr(feature = "serde", serde(rename = "interval_ns"))]
        interval: Duration,
        /// Most requests it holds; more than 0.
        capacity: u32,
    },
    /// On a slice with other instances.
    Shared {
        slice: SharedSlice,
        /// Time of one request; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// Time until the instance could begin; 0 while it is resident.
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
        /// The instance's name; free again after `InstanceDown`.
        instance: InstanceId,
        function: FunctionId,
        /// How it serves.
        service: Service,
    },
    /// A shared instance was loaded or evicted: slacks on it change.
    LoadChanged {
        instance: InstanceId,
        /// Time until the instance could begin.
        #[cfg_attr(feature = "serde", serde(rename = "load_ns"))]
        load: Duration,
    },
    /// The instance serves in another way from now on. Its requests stay there.
    ServiceChanged {
        /// An instance that is not draining.
        instance: InstanceId,
        /// How it serves.
        service: Service,
    },
    /// The instance gets no more requests; [`RouteAction::Drained`] follows when it has none left.
    InstanceDraining { instance: InstanceId },
    /// The instance is gone. Its requests are routed again; the host cancels a request after too many lost instances.
    InstanceDown { instance: InstanceId },
    /// A new request.
    Arrived {
        /// The request's name; free again once the request is completed or rejected.
        request: RequestId,
        function: FunctionId,
        /// The latest time for the answer. Requests without a deadline come after all requests with one.
        #[cfg_attr(feature = "serde", serde(rename = "deadline_ns", default))]
        deadline: Option<Timestamp>,
    },
    /// The function is removed: its waiting requests are rejected. Dispatched requests go on; if their instance goes down they
    /// wait again, until the event is repeated.
    FunctionRemoved { function: FunctionId },
    /// A dispatched request was answered.
    Completed { request: RequestId, instance: InstanceId },
    /// The client of a waiting request gave up. The router forgets the request without an answer.
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
    /// Run the request on the instance, after loading a shared instance that is not resident; answer with `Completed`.
    Dispatch { request: RequestId, instance: InstanceId },
    /// The request will not be served.
    Reject {
        request: RequestId,
        /// Why it is rejected.
        reason: RouteReject,
    },
    /// The function's instances cannot serve the waiting requests in time. Told at most once in [`SHORT_EVERY`](super::SHORT_EVERY).
    Short {
        function: FunctionId,
        /// Number of waiting requests.
        waiting: u32,
        /// How long the function's instances need for them; an hour without instances.
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
    /// The waiting requests before it would make it late (admission control).
    WouldBeLate,
    /// The request can no longer be answered in time (admission control).
    DeadlineMissed,
    /// The function was removed.
    Removed,
}

/// A policy that gives requests to instances.
///
/// # Contract
/// - each request is dispatched until it is completed or rejected, and rejected at most once;
/// - an exclusive instance never has more requests than its capacity, and a shared slice runs one;
/// - no request goes to a draining instance; `Drained` follows once when the instance has no request left;
/// - the same events give the same actions.
pub trait Router: Engine<Event = RouteEvent, Action = RouteAction, Error = RouteError> + Send {
    /// Number of a function's waiting requests.
    fn waiting(&self, function: FunctionId) -> usize;

    /// Number of requests dispatched to an instance and not yet answered.
    fn outstanding(&self, instance: InstanceId) -> usize;

    /// Checks the invariants between events, for tests.
    ///
    /// # Panics
    /// On a broken invariant, a mistake of the router.
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
    /// An exclusive instance has no load to change.
    #[error("{instance} is exclusive and has no load")]
    NotShared { instance: InstanceId },
    /// A number outside its bounds.
    #[error("{field} of {instance} is {value}: {bound}")]
    BadInstance { instance: InstanceId, field: &'static str, value: u64, bound: &'static str },
}
