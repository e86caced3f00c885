//! The events, actions and errors of vertical scalers, and their trait.

use core::fmt;
use gshare_core::{
    ClientId, Duration, Engine, GpuId, ModelId, QuotaRange, ServiceClass, TimeWentBack, Timestamp,
};

/// Something that happened on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum VerticalEvent {
    /// The measured tokens of a GPU in a period, for tokens of another unit than microseconds, such as blocks of a kernel's grid
    /// (Dilu, section 4). They count from the next period on.
    Calibrated {
        gpu: GpuId,
        /// Tokens per period; more than 0.
        max_tokens: u64,
    },
    /// A new client. It is issued tokens from the next period on.
    ClientJoined {
        /// Its name; a slot may be reused only with a higher generation.
        client: ClientId,
        /// The GPU of its launches.
        gpu: GpuId,
        /// Guaranteed and greatest share of the GPU's tokens.
        quota: QuotaRange,
        /// Its kind of service.
        class: ServiceClass,
    },
    /// Another share from the next period on. The scaler forgets the client's KLCs.
    QuotaChanged {
        client: ClientId,
        /// The new share.
        quota: QuotaRange,
    },
    /// The client is gone. Its tokens are free at once.
    ClientLeft { client: ClientId },
    /// Tokens launched by the client since its last report. A client without launches need not report, unless it waits for tokens: then it
    /// reports 1, since it is not at rest.
    UsageReported {
        client: ClientId,
        /// Work launched, in tokens.
        tokens: u64,
        /// The largest single kernel among them, in tokens.
        largest_kernel: u64,
    },
    /// One iteration ended: a batch was answered, or a training step done (Dilu, section 3.4.1, footnote 3).
    IterationFinished {
        client: ClientId,
        model: ModelId,
        /// Requests in the batch; more than 0.
        batch: u32,
        /// The time of its first kernel launch.
        #[cfg_attr(feature = "serde", serde(rename = "first_launch_ns"))]
        first_launch: Timestamp,
        /// The time of its last kernel launch.
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
    /// The owner and others are busy, and its KLC is good.
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
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum VerticalAction {
    /// From now on the client may launch `tokens` per period. Carry the actions out in their order: smaller amounts come before larger
    /// ones, so no more than `MaxTokens` are out at any instant.
    Issue {
        client: ClientId,
        /// Tokens per period, until the next such order.
        tokens: u64,
    },
    /// The GPU's state changed; for display.
    StateChanged {
        gpu: GpuId,
        /// The new state.
        #[cfg_attr(feature = "serde", serde(flatten))]
        state: ScaleState,
    },
}

/// Why an event on a GPU was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum VerticalError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// No such client (any more).
    #[error("unknown client {client}")]
    UnknownClient { client: ClientId },
    /// The client is already here, or its slot is taken or was used by a later generation.
    #[error("{client} cannot join: slot {} is taken or its generation is not newer", client.slot())]
    ClientExists { client: ClientId },
    /// More clients than configured.
    #[error("{client} cannot join: slot must be below {limit} (max_clients)")]
    TooManyClients { client: ClientId, limit: u32 },
    /// More GPUs than configured.
    #[error("unknown {gpu}: number must be below {limit} (max_gpus)")]
    UnknownGpu { gpu: GpuId, limit: u32 },
    /// `max_tokens` is out of bounds.
    #[error("max_tokens of {gpu} is {max_tokens}: need {low} to {high}")]
    BadMaxTokens { gpu: GpuId, max_tokens: u64, low: u64, high: u64 },
    /// The guaranteed shares would add up to more than the whole GPU.
    #[error("{gpu}: {guaranteed} tokens would be guaranteed in each period, of {max_tokens} (max_tokens)")]
    Oversubscribed { gpu: GpuId, guaranteed: u64, max_tokens: u64 },
    /// A tolerance of 0: each KLC would be a violation.
    #[error("{client}: tolerance is 0, need more than 0 and at most 100%")]
    ZeroTolerance { client: ClientId },
    /// A batch of 0 requests.
    #[error("{client}: batch is 0, need more")]
    ZeroBatch { client: ClientId },
    /// An iteration with its last launch before its first, or in the future.
    #[error("{client}: iteration from {first_launch} to {last_launch}, reported at {now}")]
    BadIteration { client: ClientId, first_launch: Timestamp, last_launch: Timestamp, now: Timestamp },
}

/// A GPU as a vertical scaler sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct GpuScale {
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub state: ScaleState,
    /// Tokens of the GPU in a period.
    pub max_tokens: u64,
    /// Tokens issued per period now, over all its clients.
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
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct ClientScale {
    pub gpu: GpuId,
    /// Its kind of service.
    pub class: ServiceClass,
    /// Its own state; [`ScaleState::None`] unless it is SLO-sensitive.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub state: ScaleState,
    /// Tokens issued to it per period now.
    pub issued_tokens: u64,
    /// Tokens guaranteed to it per period.
    pub guaranteed_tokens: u64,
    /// The most tokens it can be issued.
    pub limit_tokens: u64,
    /// The fewest tokens it can be issued, at any load of the others.
    pub floor_tokens: u64,
}

impl ClientScale {
    /// A newly joined client without any tokens issued.
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

gshare_core::claims! {
    /// What the suite for [`VerticalScaler`] checks.
    vertical_claims {
        MOST = "the tokens issued on a GPU add up to at most its `MaxTokens`, after each action";
        FLOOR = "from the period after it joined on, a client is issued at least its floor, which is at least one token";
        APART = "events of one GPU change nothing on another";
        LEAVES = "a client that leaves frees its tokens in the same call";
        CLIENTS = "tokens are issued to clients that there are";
        DEADLINE = "a deadline that was told has passed";
        REFUSED = "an error changes nothing";
        SAME = "the same events give the same actions";
    }
}

/// A policy that moves tokens between the clients of a GPU.
///
/// # Contract
/// Checked by the conformance suite of `gshare-sim`:
#[doc = vertical_claims!()]
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

/// A client's side of its tokens: its right to launch now (Dilu, section 3.4.1, "Kernel Redirect").
///
/// A kernel of any size may run while the balance is above 0, and its cost beyond the balance becomes a debt. With the printed rule (block
/// while tokens < kernel) a kernel larger than the client's tokens of a period never runs. Unused tokens of a period are lost, but debts
/// are not: over any number of periods a client launches at most its issued tokens, plus one kernel.
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
    /// Above 0: tokens to launch. Below: debt.
    balance: i128,
}

impl TokenBalance {
    /// Begins a period with `tokens` issued.
    pub fn refill(&mut self, tokens: u64) {
        self.balance = (self.balance.min(0)).saturating_add(i128::from(tokens));
    }

    /// Launches a kernel of `cost` tokens if any token is left; answers whether it may.
    pub fn spend(&mut self, cost: u64) -> bool {
        let may = self.balance > 0;
        if may {
            self.balance = self.balance.saturating_sub(i128::from(cost));
        }
        may
    }

    /// Tokens left; 0 in debt.
    pub fn left(self) -> u64 {
        u64::try_from(self.balance.max(0)).unwrap_or(u64::MAX)
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
