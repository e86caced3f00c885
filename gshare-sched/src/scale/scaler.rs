//! The events, actions and errors of vertical and of horizontal scalers, and the traits of both.

use core::fmt;
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate, Setting};
use gshare_core::{
    ClientId, Duration, Engine, FunctionId, GpuId, InstanceId, ModelId, QuotaRange, ServiceClass,
    TimeWentBack, Timestamp,
};

/// The unit that tokens count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum TokenUnit {
    /// One predicted microsecond of GPU time. `MaxTokens` is the length of the period, so nothing needs calibration, and
    /// a long kernel costs more than a short one.
    #[default]
    Micros,
    /// One block of a kernel's grid (Dilu, section 4). `MaxTokens` depends on the GPU and on what runs on it, and must be
    /// measured: see [`VerticalEvent::Calibrated`].
    Blocks,
}

/// Something that happened on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum VerticalEvent {
    /// The tokens that a GPU can do in a period, as measured. Counts from the next period on.
    Calibrated {
        /// The GPU.
        gpu: GpuId,
        /// Tokens per period; more than 0.
        max_tokens: u64,
    },
    /// A client that was not there before. It is issued tokens from the next period on.
    ClientJoined {
        /// Its name; a slot may be reused only with a higher generation.
        client: ClientId,
        /// Where it launches.
        gpu: GpuId,
        /// Guaranteed and greatest share of the GPU's tokens.
        quota: QuotaRange,
        /// How it is treated.
        class: ServiceClass,
    },
    /// Another share from the next period on. What is known of its KLCs is forgotten.
    QuotaChanged {
        /// The client whose share changes.
        client: ClientId,
        /// The new share.
        quota: QuotaRange,
    },
    /// The client is gone. Its tokens are free at once.
    ClientLeft {
        /// The client that left.
        client: ClientId,
    },
    /// Tokens that the client launched since its last report. A client that launched nothing need not report, unless it
    /// waits for tokens: such a one reports 1, since it is not at rest.
    UsageReported {
        /// The client that used it.
        client: ClientId,
        /// Work launched, in tokens.
        tokens: u64,
        /// The largest single kernel in it, in tokens.
        largest_kernel: u64,
    },
    /// One iteration ended: a batch was answered, or a training step done (Dilu, section 3.4.1, footnote 3).
    IterationFinished {
        /// The client that finished one.
        client: ClientId,
        /// Which model it ran.
        model: ModelId,
        /// Requests in the batch; more than 0.
        batch: u32,
        /// When its first kernel was launched.
        #[cfg_attr(feature = "serde", serde(rename = "first_launch_ns"))]
        first_launch: Timestamp,
        /// When its last kernel was launched.
        #[cfg_attr(feature = "serde", serde(rename = "last_launch_ns"))]
        last_launch: Timestamp,
    },
    /// [`Engine::next_deadline`] has come: a period ended.
    DeadlineReached,
}

/// State of a GPU, or of one owner on it (Dilu, Algorithm 2). Orders by severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "state", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum ScaleState {
    /// No SLO-sensitive client is here.
    #[default]
    None,
    /// No client is in the owner's way: the owner is idle, or alone. Others may grow.
    Recovery,
    /// The owner and others are busy, and its KLC is well.
    Contention,
    /// The owner's KLC is beyond its tolerance.
    Emergency {
        /// `T_current / T_min` in basis points: above 10 000, at most 40 000.
        severity_basis_points: u16,
    },
}

impl fmt::Display for ScaleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::None => f.write_str("none"),
            Self::Recovery => f.write_str("recovery"),
            Self::Contention => f.write_str("contention"),
            Self::Emergency { severity_basis_points: n } => {
                write!(f, "emergency x{}.{:02}", n / 10_000, n % 10_000 / 100)
            }
        }
    }
}

/// An order of the vertical scaler for a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
pub enum VerticalAction {
    /// From now on the client may launch `tokens` per period. Carry the actions out in their order: what shrinks comes
    /// before what grows, so that no more than `MaxTokens` are out at any instant.
    Issue {
        /// The client that gets the tokens.
        client: ClientId,
        /// Tokens per period, until the next such order.
        tokens: u64,
    },
    /// The GPU's state changed; for display.
    StateChanged {
        /// Which GPU.
        gpu: GpuId,
        /// The new state.
        #[cfg_attr(feature = "serde", serde(flatten))]
        state: ScaleState,
    },
}

/// Why an event on a GPU was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerticalError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// No such client (any more).
    #[error("unknown client {client}")]
    UnknownClient {
        /// The id given.
        client: ClientId,
    },
    /// The client is already here, or its slot is taken or was used by a later generation.
    #[error("{client} cannot join: slot {} is taken or its generation is not newer", client.slot())]
    ClientExists {
        /// The id given.
        client: ClientId,
    },
    /// More clients than configured.
    #[error("{client} cannot join: slot must be below {limit} (max_clients)")]
    TooManyClients {
        /// The id given.
        client: ClientId,
        /// The number of slots.
        limit: u32,
    },
    /// More GPUs than configured.
    #[error("unknown {gpu}: number must be below {limit} (max_gpus)")]
    UnknownGpu {
        /// The id given.
        gpu: GpuId,
        /// The number of GPUs.
        limit: u32,
    },
    /// Tokens are kernel blocks, and the number of them that the GPU can do was not given.
    #[error("{gpu} is not calibrated: with tokens in kernel blocks, max_tokens must be measured first")]
    NotCalibrated {
        /// The GPU.
        gpu: GpuId,
    },
    /// `max_tokens` is out of bounds.
    #[error("max_tokens of {gpu} is {max_tokens}: need {low} to {high}")]
    BadMaxTokens {
        /// The GPU.
        gpu: GpuId,
        /// The number given.
        max_tokens: u64,
        /// The least.
        low: u64,
        /// The most.
        high: u64,
    },
    /// The shares that are guaranteed on the GPU would be more than all of it.
    #[error("{gpu}: {guaranteed} tokens would be guaranteed in each period, of {max_tokens} (max_tokens)")]
    Oversubscribed {
        /// The GPU.
        gpu: GpuId,
        /// Sum of the guarantees.
        guaranteed: u64,
        /// The tokens that there are in a window.
        max_tokens: u64,
    },
    /// A tolerance of 0: each KLC would be a violation.
    #[error("{client}: tolerance is 0, need more than 0 and at most 100%")]
    ZeroTolerance {
        /// The client whose tolerance is 0.
        client: ClientId,
    },
    /// A batch of 0 requests.
    #[error("{client}: batch is 0, need more")]
    ZeroBatch {
        /// The client whose batch is 0.
        client: ClientId,
    },
    /// An iteration whose last launch comes before its first, or lies in the future.
    #[error("{client}: iteration from {first_launch} to {last_launch}, reported at {now}")]
    BadIteration {
        /// The client that reported it.
        client: ClientId,
        /// First launch.
        first_launch: Timestamp,
        /// Last launch.
        last_launch: Timestamp,
        /// Time of the report.
        now: Timestamp,
    },
}

/// A GPU as a vertical scaler sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct GpuScale {
    /// Its state.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub state: ScaleState,
    /// Tokens it can do in a period.
    pub max_tokens: u64,
    /// Tokens that are issued per period now, over all its clients.
    pub issued_tokens: u64,
}

impl GpuScale {
    /// A GPU without clients.
    pub const fn empty(max_tokens: u64) -> Self {
        Self { state: ScaleState::None, max_tokens, issued_tokens: 0 }
    }
}

/// A client as a vertical scaler sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct ClientScale {
    /// The GPU it runs on.
    pub gpu: GpuId,
    /// How it is treated.
    pub class: ServiceClass,
    /// Its own state; [`ScaleState::None`] unless it is SLO-sensitive.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub state: ScaleState,
    /// Tokens it may launch per period now.
    pub issued_tokens: u64,
    /// Tokens per period that it can count on.
    pub guaranteed_tokens: u64,
    /// The most it can be issued.
    pub limit_tokens: u64,
    /// The least it can be issued, for anything that happens to others.
    pub floor_tokens: u64,
}

impl ClientScale {
    /// A client that has just joined and was issued nothing.
    pub const fn joined(gpu: GpuId, class: ServiceClass) -> Self {
        Self {
            gpu,
            class,
            state: ScaleState::None,
            issued_tokens: 0,
            guaranteed_tokens: 0,
            limit_tokens: 0,
            floor_tokens: 0,
        }
    }
}

/// A policy that moves tokens between the clients of a GPU.
///
/// # Contract
/// - after each action, in their order, the tokens issued on a GPU add up to at most its `MaxTokens`;
/// - from the period after it joined on, a client is issued at least its floor, which is at least one token;
/// - what happens on one GPU changes nothing on another;
/// - a client that leaves frees its tokens in the same call;
/// - the same events give the same actions.
pub trait VerticalScaler:
    Engine<Event = VerticalEvent, Action = VerticalAction, Error = VerticalError> + Send
{
    /// The GPU as this scaler sees it; `None` before its first client.
    fn gpu(&self, gpu: GpuId) -> Option<GpuScale>;

    /// The client as this scaler sees it.
    fn client(&self, client: ClientId) -> Option<ClientScale>;

    /// Length of a period.
    fn period(&self) -> Duration;
}

/// A client's side of its tokens: what it may launch now (Dilu, section 3.4.1, "Kernel Redirect").
///
/// A kernel is let through while the balance is above 0, however large it is, and what it costs beyond the balance is
/// carried as debt. With the printed rule (block while tokens < kernel) a kernel larger than the client's tokens of a
/// period never runs. Tokens of a period that are not used are lost, debts are not: over any number of periods a
/// client launches at most what it was issued, plus one kernel.
///
/// ```
/// use gshare_sched::scale::TokenBalance;
/// let mut balance = TokenBalance::default();
/// balance.refill(100);
/// assert!(balance.spend(250), "larger than all of its tokens, and let through");
/// assert!(!balance.spend(1), "150 in debt");
/// balance.refill(100);
/// assert!(!balance.spend(1), "50 in debt");
/// balance.refill(100);
/// assert!(balance.spend(1));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenBalance {
    /// Above 0: what may be launched. Below: debt.
    balance: i128,
}

impl TokenBalance {
    /// A period began in which `tokens` are issued.
    pub fn refill(&mut self, tokens: u64) {
        self.balance = (self.balance.min(0)).saturating_add(i128::from(tokens));
    }

    /// Launches a kernel of `cost` tokens, if anything is left; answers whether it may.
    pub fn spend(&mut self, cost: u64) -> bool {
        let may = self.balance > 0;
        if may {
            self.balance = self.balance.saturating_sub(i128::from(cost));
        }
        may
    }

    /// Tokens that are left; 0 in debt.
    pub fn left(self) -> u64 {
        u64::try_from(self.balance.max(0)).unwrap_or(u64::MAX)
    }
}

/// The facts about a function that a horizontal scaler needs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FunctionScale {
    /// Throughput and latencies as measured, per setting.
    pub profile: ProfileTable,
    /// The longest p95 of one batch that a point may have, in ns. Dilu takes half of the SLO, the rest is
    /// for queueing and the network (Dilu, section 3.2, footnote 2). `None`: any.
    #[cfg_attr(feature = "serde", serde(default, rename = "max_p95_ns"))]
    pub max_p95: Option<Duration>,
    /// Instances that are kept at any load.
    pub min_instances: u32,
    /// The most instances, those that start included; at least the minimum, more than 0.
    pub max_instances: u32,
}

/// Something that happened to a function.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum HorizontalEvent {
    /// A function that was not there before. Its minimum of instances is started.
    FunctionAdded {
        /// Its name.
        function: FunctionId,
        /// Profile, latency bound and numbers of instances of the function.
        spec: FunctionScale,
    },
    /// The function is gone, and the host stops its instances.
    FunctionRemoved {
        /// The function that was removed.
        function: FunctionId,
    },
    /// Another least and most number of instances, in force at once: what is missing is started, what is too much is
    /// drained, the youngest first.
    BoundsChanged {
        /// The function whose numbers of instances change.
        function: FunctionId,
        /// Instances that are kept at any load.
        min_instances: u32,
        /// The most instances, those that start included; at least the minimum, more than 0.
        max_instances: u32,
    },
    /// An instance was lost, or there may be room where starts were refused: what is missing of the function's minimum is
    /// started now, also at points that were refused.
    MinimumLacking {
        /// The function.
        function: FunctionId,
    },
    /// Requests that came in the tick that ended now, per second. One report per tick, 0 included; more where the scaler
    /// takes [early reports](HorizontalScaler::early_reports).
    LoadReported {
        /// The function whose arrival rate was measured.
        function: FunctionId,
        /// Requests per second, in thousandths.
        #[cfg_attr(feature = "serde", serde(rename = "rate_milli_rps"))]
        rate: RequestRate,
    },
    /// An instance serves requests from now on.
    InstanceReady {
        /// The instance that is ready.
        instance: InstanceId,
    },
    /// An instance is gone: it was stopped, has drained, or crashed.
    InstanceGone {
        /// The instance that is gone.
        instance: InstanceId,
    },
    /// A [`HorizontalAction::Start`] could not be carried out: no GPU has room for that point.
    StartRefused {
        /// Which instance.
        instance: InstanceId,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of the horizontal scaler for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
pub enum HorizontalAction {
    /// Start an instance.
    Start {
        /// The function that the instance serves.
        function: FunctionId,
        /// Its name from now on.
        instance: InstanceId,
        /// The point of the profile that it is to run at.
        point: ProfilePoint,
    },
    /// Send the instance no more requests, and stop it when it has none left.
    Drain {
        /// The instance to drain.
        instance: InstanceId,
    },
    /// Stop the instance now: it did not become ready, or did not drain, in time.
    Stop {
        /// The instance to stop.
        instance: InstanceId,
        /// Why it is stopped.
        reason: StopReason,
    },
    /// Load that no instance will serve: the function is at its most instances, or no GPU has room.
    Unmet {
        /// The function that cannot serve its load.
        function: FunctionId,
        /// How much, in thousandths of a request per second.
        #[cfg_attr(feature = "serde", serde(rename = "rate_milli_rps"))]
        rate: RequestRate,
    },
}

/// Why an instance is stopped without draining.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum StopReason {
    /// The instance was not ready by its deadline.
    StartTimedOut,
    /// The instance still had requests at its deadline.
    DrainTimedOut,
    /// The instance is not needed any more, and was not ready yet.
    NotNeeded,
}

/// Why an event of a function was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HorizontalError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// No such function (any more).
    #[error("unknown function {function}")]
    UnknownFunction {
        /// The id given.
        function: FunctionId,
    },
    /// The function is already here.
    #[error("function {function} exists")]
    FunctionExists {
        /// The id given.
        function: FunctionId,
    },
    /// More functions than configured.
    #[error("unknown {function}: number must be below {limit} (max_functions)")]
    TooManyFunctions {
        /// The id given.
        function: FunctionId,
        /// The number of functions.
        limit: u32,
    },
    /// `max_instances` below `min_instances`, 0 or above the most that is kept track of.
    #[error(
        "{function}: max_instances is {max_instances}, need at least min_instances ({min_instances}), 1 to {limit}"
    )]
    BadInstanceBounds {
        /// The function.
        function: FunctionId,
        /// The least.
        min_instances: u32,
        /// The most.
        max_instances: u32,
        /// The most that is kept track of.
        limit: u32,
    },
    /// No point of the profile is fast enough.
    #[error(
        "{function}: no point of its profile has a p95 of at most {max_p95} (max_p95); the best is {best} at ({setting})"
    )]
    SloUnreachable {
        /// The function.
        function: FunctionId,
        /// The bound given.
        max_p95: Duration,
        /// The shortest p95 in the profile.
        best: Duration,
        /// Where it was measured.
        setting: Setting,
    },
    /// Two load reports within half a tick.
    #[error("{function}: load reported at {now}, next report is due at {due}")]
    ReportTooEarly {
        /// The function.
        function: FunctionId,
        /// The time given.
        now: Timestamp,
        /// When the next report may come.
        due: Timestamp,
    },
    /// No such instance (any more), or it is not in a state in which this can happen.
    #[error("unknown {instance}, or it is not {expected}")]
    UnknownInstance {
        /// The id given.
        instance: InstanceId,
        /// The states in which the event would apply.
        expected: &'static str,
    },
}

/// How many instances of a function there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct InstanceCounts {
    /// Started, not ready.
    pub starting: u32,
    /// Instances that serve requests.
    pub ready: u32,
    /// Instances that end once they have no request.
    pub draining: u32,
}

/// A policy that starts and stops instances.
///
/// # Contract
/// - starting and ready instances of a function are never fewer than its minimum (once it has been able to start
///   them) by a decision of the scaler, and never more than its maximum;
/// - an instance that was ready is drained, not stopped, unless it does not drain in time;
/// - an instance that does not become ready in time is stopped and not counted any more;
/// - load that it cannot serve is reported, never silently dropped;
/// - functions do not affect each other;
/// - the same events give the same actions.
pub trait HorizontalScaler:
    Engine<Event = HorizontalEvent, Action = HorizontalAction, Error = HorizontalError> + Send
{
    /// How many instances the function has.
    fn instances(&self, function: FunctionId) -> Option<InstanceCounts>;

    /// Length of a tick: one load report per function in each.
    fn tick(&self) -> Duration;

    /// Whether load is reported before a tick is over too, while more requests wait than are served at once. By default not: a
    /// scaler that counts reports takes each for a tick of time.
    fn early_reports(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dilu, Algorithm 2: a state is overruled by a more severe one only.
    #[test]
    fn states_order_by_severity() {
        let emergency = |severity_basis_points| ScaleState::Emergency { severity_basis_points };
        let order = [
            ScaleState::None,
            ScaleState::Recovery,
            ScaleState::Contention,
            emergency(10_001),
            emergency(40_000),
        ];
        assert!(order.is_sorted());
        assert_eq!(emergency(16_000).to_string(), "emergency x1.60");
    }

    #[test]
    fn a_class_reads_as_it_is_written() {
        for text in ["slo-sensitive:60", "slo-sensitive:5", "best-effort"] {
            assert_eq!(text.parse::<ServiceClass>().unwrap().to_string(), text);
        }
        assert_eq!("slo-sensitive".parse(), Ok(ServiceClass::SLO_SENSITIVE));
        for bad in ["", "slo", "slo-sensitive:", "slo-sensitive:0", "slo-sensitive:101", "slo-sensitive:x"] {
            assert!(bad.parse::<ServiceClass>().unwrap_err().contains("1 to 100"), "{bad}");
        }
    }

    #[test]
    fn unused_tokens_are_lost_and_debts_are_not() {
        let mut balance = TokenBalance::default();
        assert!(!balance.spend(1), "nothing was issued");
        balance.refill(10);
        balance.refill(10);
        assert_eq!(balance.left(), 10);
        assert!(balance.spend(u64::MAX) && !balance.spend(0));
        balance.refill(u64::MAX);
        assert_eq!(balance.left(), 10);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn events_and_actions_read_as_one_flat_object() {
        let text = r#"{"event":"iteration_finished","client":0,"model":3,"batch":4,"first_launch_ns":1,"last_launch_ns":9}"#;
        let event: VerticalEvent = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&event).unwrap(), text);
        assert!(serde_json::from_str::<VerticalEvent>(&text.replace("batch", "batches")).is_err());
        let state = ScaleState::Emergency { severity_basis_points: 16_000 };
        let action = VerticalAction::StateChanged { gpu: GpuId::new(1), state };
        let text = serde_json::to_string(&action).unwrap();
        assert_eq!(
            text,
            r#"{"action":"state_changed","gpu":1,"state":"emergency","severity_basis_points":16000}"#
        );
        assert_eq!(serde_json::from_str::<VerticalAction>(&text).unwrap(), action);
    }
}
