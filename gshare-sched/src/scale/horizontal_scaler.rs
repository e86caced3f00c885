//! The events, actions and errors of horizontal scalers, and their trait.

use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate, Setting};
use gshare_core::{Duration, Engine, FunctionId, InstanceId, TimeWentBack, Timestamp};

/// A function as a horizontal scaler needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FunctionScale {
    /// Throughput and latencies as measured, per setting.
    pub profile: ProfileTable,
    /// The longest p95 of one batch at a point, in ns. Dilu takes half of the SLO, and leaves the rest for queueing and the network (Dilu,
    /// section 3.2, footnote 2). `None`: any.
    #[cfg_attr(feature = "serde", serde(default, rename = "max_p95_ns"))]
    pub max_p95: Option<Duration>,
    /// Instances to keep at any load.
    pub min_instances: u32,
    /// The most instances, starting ones included; at least the minimum, more than 0.
    pub max_instances: u32,
}

/// Something that happened to a function.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum HorizontalEvent {
    /// A new function. The scaler starts its minimum of instances.
    FunctionAdded {
        function: FunctionId,
        /// Profile, latency bound and numbers of instances of the function.
        spec: FunctionScale,
    },
    /// The function is gone, and the host stops its instances.
    FunctionRemoved { function: FunctionId },
    /// Other bounds on the number of instances, in force at once: the scaler starts missing instances and drains surplus ones, the
    /// youngest first.
    BoundsChanged {
        function: FunctionId,
        /// Instances to keep at any load.
        min_instances: u32,
        /// The most instances, starting ones included; at least the minimum, more than 0.
        max_instances: u32,
    },
    /// An instance was lost, or refused starts may find room now. The scaler starts the rest of the function's minimum at once, also at
    /// refused points.
    MinimumLacking { function: FunctionId },
    /// Requests per second in the tick that ended now. One report per tick, 0 included; more where the scaler takes [early
    /// reports](HorizontalScaler::early_reports).
    LoadReported {
        function: FunctionId,
        /// Requests per second, in thousandths.
        #[cfg_attr(feature = "serde", serde(rename = "rate_milli_rps"))]
        rate: RequestRate,
    },
    /// An instance serves requests from now on.
    InstanceReady { instance: InstanceId },
    /// An instance is gone: it was stopped, has drained, crashed, or did not start or drain in the time that the host allows.
    InstanceGone { instance: InstanceId },
    /// A [`HorizontalAction::Start`] failed: no GPU has room for the point.
    StartRefused { instance: InstanceId },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of the horizontal scaler for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum HorizontalAction {
    /// Start an instance.
    Start {
        function: FunctionId,
        /// Its name from now on.
        instance: InstanceId,
        /// The instance's point of the profile.
        point: ProfilePoint,
    },
    /// Send the instance no more requests, and stop it once it has none left.
    Drain { instance: InstanceId },
    /// Stop the instance now: it is not ready yet, and the load does not need it.
    Stop { instance: InstanceId },
    /// Load that no instance will serve: the function is at its most instances, or no GPU has room.
    Unmet {
        function: FunctionId,
        /// The rate, in thousandths of a request per second.
        #[cfg_attr(feature = "serde", serde(rename = "rate_milli_rps"))]
        rate: RequestRate,
    },
}

/// Why an event of a function was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum HorizontalError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// No such function (any more).
    #[error("unknown function {function}")]
    UnknownFunction { function: FunctionId },
    /// The function is already here.
    #[error("function {function} exists")]
    FunctionExists { function: FunctionId },
    /// More functions than configured.
    #[error("unknown {function}: number must be below {limit} (max_functions)")]
    TooManyFunctions { function: FunctionId, limit: u32 },
    /// `max_instances` is below `min_instances`, 0 or above the most instances of a function.
    #[error(
        "{function}: max_instances is {max_instances}, need at least min_instances ({min_instances}), 1 to {limit}"
    )]
    BadInstanceBounds { function: FunctionId, min_instances: u32, max_instances: u32, limit: u32 },
    /// No point of the profile is fast enough.
    #[error(
        "{function}: no point of its profile has a p95 of at most {max_p95} (max_p95); the best is {best} at ({setting})"
    )]
    SloUnreachable { function: FunctionId, max_p95: Duration, best: Duration, setting: Setting },
    /// Two load reports within half a tick.
    #[error("{function}: load reported at {now}, next report is due at {due}")]
    ReportTooEarly { function: FunctionId, now: Timestamp, due: Timestamp },
    /// No such instance (any more), or the event does not fit its state.
    #[error("unknown {instance}, or it is not {expected}")]
    UnknownInstance { instance: InstanceId, expected: &'static str },
}

/// The number of a function's instances, by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct InstanceCounts {
    /// Started, not ready.
    pub starting: u32,
    /// Instances that serve requests.
    pub ready: u32,
    /// Instances that end once their requests are done.
    pub draining: u32,
}

gshare_core::claims! {
    /// What the suite for [`HorizontalScaler`] checks.
    horizontal_claims {
        VALID = "a valid event is accepted";
        MOST = "starting and ready instances are never more than the maximum";
        LEAST = "a decision leaves no fewer than the minimum";
        RESTORED =
            "what is missing of the minimum is started when the host asks for it, also at points that were refused";
        STOPS = "only an instance that was never ready is stopped without a drain";
        DRAINS = "what is drained was ready";
        APART = "functions do not affect each other";
        UNMET = "load that no instance can serve is reported";
        KNOWN = "the instances that the scaler counts are those that there are";
        INSTANCES = "orders name instances that there are";
        FUNCTIONS = "orders name functions that there are";
        NAMES = "names of instances are never used twice";
        POINT = "an instance starts at a point of the profile that keeps the SLO";
        REFUSED = "an error changes nothing";
        SAME = "the same events give the same actions";
    }
}

/// A policy that starts and stops instances.
///
/// # Contract
/// Checked by the conformance suite of `gshare-sim`:
#[doc = horizontal_claims!()]
pub trait HorizontalScaler:
    Engine<Event = HorizontalEvent, Action = HorizontalAction, Error = HorizontalError> + Send
{
    /// The numbers of the function's instances.
    fn instances(&self, function: FunctionId) -> Option<InstanceCounts>;

    /// Length of a tick: one load report per function in each.
    fn tick(&self) -> Duration;

    /// Whether load is also reported before a tick is over, while more requests wait than are served at once. By default not: a scaler
    /// that counts reports takes each for a tick of time.
    fn early_reports(&self) -> bool {
        false
    }
}
