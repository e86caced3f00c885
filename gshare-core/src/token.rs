//! Token scheduling: the events, actions and errors of every policy.
//!
//! # Problem
//! Kernels cannot be taken back once launched, and the driver runs them without asking first. So permission is handed
//! out ahead of time: a client launches only while it holds a **token**. A [`TokenScheduler`] decides who holds one
//! (FaST-GShare, section 3.3.2).
//!
//! # Terms
//! - **token**: permission to launch kernels until the client's total use reaches `allowed`, or the time reaches `until`.
//! - **used**: GPU time of a client since it joined, as the client measured it; a total that never shrinks.
//! - **allowed**: the total up to which the client may use the GPU. The last one holds.
//! - **quota request, limit**: share of GPU time in a window that is guaranteed, and the most that is allowed.
//! - **holder**: a client whose token it has not given back and the scheduler has not taken back.
//!
//! # Totals
//! Nothing about time is a difference, so an event that comes late or twice is harmless:
//! ```text
//! Used{used, Wants}    ─▶ Allow{allowed: used + 10 ms, until}
//! Used{used, Extends}  ─▶ Allow{allowed: larger, until: later}       more time ahead of the end
//! Used{used, Holds}                                                  a report
//! Used{used, Idle}     ─▶ room for others; Wants instead of Idle gives the token back and asks for the next one
//! past `until` + grace ─▶ Stop                                       charged up to `allowed`
//! ```
//! A scheduler charges `used` as far as it is more than it has charged before: up to `allowed` to the window of the token, beyond that
//! to the window in which it hears it. After a `Stop` it has charged `allowed`: a later, smaller total changes nothing, and a larger one
//! is charged beyond that.
//!
//! A waiting client is told [`TokenAction::Throttle`] once, as soon as it has used its limit; until then a token that it
//! holds may still leave it time. Use under a limit that is cut later in the same window is no debt.

use crate::engine::{Engine, TimeWentBack};
use crate::ids::{ClientId, GpuId};
use crate::resource::{QuotaRange, SpecError};
use crate::units::{Duration, SmShare, Timestamp};

/// The time and the SMs that a client may take of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Share {
    /// Guaranteed and maximal share of time in a window.
    pub quota: QuotaRange,
    /// Share of the SMs it occupies while it holds a token; more than 0.
    pub sm: SmShare,
}

/// The event itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum TokenEvent {
    /// A client that was not there before.
    ClientJoined {
        /// Its name; a slot may be reused only with a higher generation.
        client: ClientId,
        /// The GPU it launches on.
        gpu: GpuId,
        /// The share that it may take.
        share: Share,
    },
    /// Another share from now on. A token that is held keeps its SMs until it is returned.
    ShareChanged {
        /// The client whose share changes.
        client: ClientId,
        /// The new share.
        share: Share,
    },
    /// The client is gone, with all that it held.
    ClientLeft {
        /// The client that left.
        client: ClientId,
    },
    /// What a client has used, and what it wants.
    Used {
        /// The client that used it.
        client: ClientId,
        /// GPU time since it joined, in ns; never less than before.
        #[cfg_attr(feature = "serde", serde(rename = "used_ns"))]
        used: Duration,
        /// Whether it holds a token or wants one.
        state: UseState,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// Whether a client holds a token or wants one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum UseState {
    /// It holds none and wants none: a token that it held is given back.
    Idle,
    /// It holds none and wants one: a token that it held is given back, and it waits from the same moment on.
    Wants,
    /// It goes on as before.
    Holds,
    /// It holds a token and asks for more time; without a token, the same as `Wants`.
    Extends,
}

/// An order of the token scheduler for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
pub enum TokenAction {
    /// Let the client launch.
    Allow {
        /// The client that may launch.
        client: ClientId,
        /// The total of its use up to which it may launch, in ns. It replaces any earlier one.
        #[cfg_attr(feature = "serde", serde(rename = "allowed_ns"))]
        allowed: Duration,
        /// When it must stop launching, used up or not.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
    },
    /// Take the client's token back: it was not given back in time, and is charged in full.
    Stop {
        /// The client that is stopped.
        client: ClientId,
    },
    /// Tell the client that it will not get a token before `until`.
    Throttle {
        /// The client that has to wait.
        client: ClientId,
        /// The earliest time of the next grant.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
        /// Why it has to wait.
        reason: ThrottleReason,
    },
}

/// Why a client must wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum ThrottleReason {
    /// The client has used its limit in this window (`Q_remain` <= 0), overuse of earlier windows included.
    LimitReached,
}

/// Why an event was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
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
    /// A share that cannot be.
    #[error("share of {client}: {cause}")]
    BadShare {
        /// The client whose share is out of bounds.
        client: ClientId,
        /// The rule that the specification breaks.
        cause: SpecError,
    },
    /// The client reported less usage than before.
    #[error("{client} reported {used} used, after {reported}: usage never shrinks")]
    UsageShrank {
        /// The client that reported it.
        client: ClientId,
        /// The usage now.
        used: Duration,
        /// The usage before.
        reported: Duration,
    },
}

/// A client as a scheduler sees it, for `status` and `top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct ClientStatus {
    /// The client itself.
    pub client: ClientId,
    /// The GPU it runs on.
    pub gpu: GpuId,
    /// The share that it may take.
    pub share: Share,
    /// GPU time used in the current window in ns, overuse of earlier windows included.
    #[cfg_attr(feature = "serde", serde(rename = "window_used_ns"))]
    pub window_used: Duration,
    /// GPU time charged since it joined, in ns: its use as far as it is known, and what a token was charged that it did not give back.
    #[cfg_attr(feature = "serde", serde(rename = "total_used_ns"))]
    pub total_used: Duration,
    /// Until when it may launch, if it holds a token.
    #[cfg_attr(feature = "serde", serde(rename = "holds_until_ns"))]
    pub holds: Option<Timestamp>,
    /// Since when it has been waiting for a token.
    #[cfg_attr(feature = "serde", serde(rename = "waiting_since_ns"))]
    pub waiting_since: Option<Timestamp>,
}

impl ClientStatus {
    /// A client that has just joined.
    pub const fn joined(client: ClientId, gpu: GpuId, share: Share) -> Self {
        Self {
            client,
            gpu,
            share,
            window_used: Duration::ZERO,
            total_used: Duration::ZERO,
            holds: None,
            waiting_since: None,
        }
    }
}

/// A policy that hands out tokens. See the [module](self) for the totals.
///
/// # Contract (checked by the conformance suite of `gshare-sim`)
/// - the SM shares of the holders on one GPU never add up to more than the whole, at no instant;
/// - in no window is a client granted more than its limit, less the overuse it carries;
/// - a client that asks is granted, throttled with a time, or granted later without asking again;
/// - a client that leaves frees its SMs in the same call;
/// - the same events give the same actions.
pub trait TokenScheduler:
    Engine<Event = TokenEvent, Action = TokenAction, Error = TokenError> + Send
{
    /// The client as this scheduler sees it.
    fn client(&self, client: ClientId) -> Option<ClientStatus>;

    /// Length of the window over which quotas are settled.
    fn window(&self) -> Duration;
}
