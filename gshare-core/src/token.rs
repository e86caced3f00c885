//! Token scheduling: the events, actions and errors of every policy.
//!
//! # Problem
//! A launched kernel cannot be taken back, and the driver runs it without a question to the scheduler. Permission is therefore
//! granted ahead of time: a client launches only while it holds a **token**. A [`TokenScheduler`] decides which clients hold a
//! token (FaST-GShare, section 3.3.2).
//!
//! # Terms
//! - **token**: permission to launch kernels until the client's total use reaches `allowed`, or the time reaches `until`.
//! - **used**: GPU time of a client since it joined, by the client's own measurement; the total never shrinks.
//! - **allowed**: the total up to which the client may use the GPU. A new value replaces the last.
//! - **quota request, limit**: the guaranteed and the maximal share of GPU time in a window.
//! - **holder**: a client with a token, from the grant until the client gives it back or the scheduler takes it back.
//!
//! # Totals
//! Every time is a total, not a difference, so a late or repeated event is harmless:
//! ```text
//! Used{used, Wants}    ─▶ Allow{allowed: used + 10 ms, until}
//! Used{used, Extends}  ─▶ Allow{allowed: larger, until: later}       more time ahead of the end
//! Used{used, Holds}                                                  a report
//! Used{used, Idle}     ─▶ room for others; Wants instead of Idle gives the token back and asks for the next one
//! another is due       ─▶ Recall{allowed: smaller}                  the client gives back early
//! past `until` + grace ─▶ Stop                                       charged up to `allowed`
//! ```
//! A scheduler charges the part of `used` beyond its earlier charges: use up to `allowed` counts for the window of the token, and
//! use beyond `allowed` for the window of the report. A `Stop` charges `allowed` in full: a later, smaller total changes nothing,
//! and a larger total adds its excess.
//!
//! A waiting client gets one [`TokenAction::Throttle`] as soon as it has used its limit; until then its current token may still
//! leave it time. A limit cut in the middle of a window makes no debt of the window's earlier use.
//!
//! # Classes
//! A client joins as best effort. A scheduler may serve an SLO-sensitive client before the others while the client is within its
//! request of a window. A class gives a client no more time, and takes none from another client's request.

use crate::engine::{Engine, TimeWentBack};
use crate::ids::{ClientId, GpuId};
use crate::resource::{QuotaRange, SpecError};
use crate::service_class::ServiceClass;
use crate::units::{Duration, SmShare, Timestamp};

/// The time and the SMs of one GPU for a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Share {
    /// Guaranteed and maximal share of time in a window.
    pub quota: QuotaRange,
    /// Share of the SMs occupied by the client while it holds a token; more than 0.
    pub sm: SmShare,
}

/// An event for the token scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum TokenEvent {
    /// A new client joins.
    ClientJoined {
        /// The name of the client; a slot may be reused only with a higher generation.
        client: ClientId,
        /// The GPU of its launches.
        gpu: GpuId,
        /// The share of the client.
        share: Share,
    },
    /// The client has another share from now on. Its current token keeps the earlier share of the SMs until its end.
    ShareChanged {
        /// The client with the new share.
        client: ClientId,
        /// The new share.
        share: Share,
    },
    /// The client has another class from now on.
    ClassChanged {
        /// The client with the new class.
        client: ClientId,
        /// The new class.
        class: ServiceClass,
    },
    /// The client is gone, and its token with it.
    ClientLeft {
        /// The client that left.
        client: ClientId,
    },
    /// A client's use and its state.
    Used {
        /// The reporting client.
        client: ClientId,
        /// GPU time since the client joined, in ns; never less than before.
        #[cfg_attr(feature = "serde", serde(rename = "used_ns"))]
        used: Duration,
        /// Whether the client holds or wants a token.
        state: UseState,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// Whether a client holds or wants a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum UseState {
    /// The client wants no token, and gives its token back if it has one.
    Idle,
    /// The client waits for a token; it gives its last token back, if any, at the same moment.
    Wants,
    /// The client goes on as before.
    Holds,
    /// The client keeps its token and asks for more time; without a token, the same as `Wants`.
    Extends,
}

/// An order of the token scheduler for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
pub enum TokenAction {
    /// Lets the client launch.
    Allow {
        /// The client with the permission.
        client: ClientId,
        /// The total use, in ns, at which the client must stop launching. The value replaces all earlier ones.
        #[cfg_attr(feature = "serde", serde(rename = "allowed_ns"))]
        allowed: Duration,
        /// The time at which the client must stop launching, with the total used up or not.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
    },
    /// Asks the client to give its token back early, since a client within its share waits: it must stop launching at this lower
    /// total. The token stays as it is: it ends at the same time, and a `Stop` charges the total of the last `Allow`.
    Recall {
        /// The client with the token.
        client: ClientId,
        /// The total use, in ns, at which the client must stop launching; less than the total of its last `Allow`.
        #[cfg_attr(feature = "serde", serde(rename = "allowed_ns"))]
        allowed: Duration,
    },
    /// Takes the client's token back and charges it in full, since the client did not give it back in time.
    Stop {
        /// The client to be stopped.
        client: ClientId,
    },
    /// Tells the client to wait: it gets no token before `until`.
    Throttle {
        /// The waiting client.
        client: ClientId,
        /// The earliest time of the next grant.
        #[cfg_attr(feature = "serde", serde(rename = "until_ns"))]
        until: Timestamp,
        /// The reason for the wait.
        reason: ThrottleReason,
    },
}

/// Why a client must wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum ThrottleReason {
    /// The client has used up its limit in this window (`Q_remain` <= 0), overuse of earlier windows included.
    LimitReached,
}

/// Why a scheduler refused an event. Its state did not change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// `now` is earlier than at the last event.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// The client has left or never joined.
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
    /// The slot is beyond the configured number of clients.
    #[error("{client} cannot join: slot must be below {limit} (max_clients)")]
    TooManyClients {
        /// The id given.
        client: ClientId,
        /// The number of slots.
        limit: u32,
    },
    /// The GPU is beyond the configured number of GPUs.
    #[error("unknown {gpu}: number must be below {limit} (max_gpus)")]
    UnknownGpu {
        /// The id given.
        gpu: GpuId,
        /// The number of GPUs.
        limit: u32,
    },
    /// The share breaks a rule.
    #[error("share of {client}: {cause}")]
    BadShare {
        /// The client with the share out of bounds.
        client: ClientId,
        /// The broken rule.
        cause: SpecError,
    },
    /// The client reported less usage than before.
    #[error("{client} reported {used} used, after {reported}: usage never shrinks")]
    UsageShrank {
        /// The reporting client.
        client: ClientId,
        /// The new report.
        used: Duration,
        /// The report before it.
        reported: Duration,
    },
}

/// A scheduler's view of a client, for `status` and `top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct ClientStatus {
    /// The client of this status.
    pub client: ClientId,
    /// The GPU of the client.
    pub gpu: GpuId,
    /// The share of the client.
    pub share: Share,
    /// GPU time used in the current window in ns, overuse of earlier windows included.
    #[cfg_attr(feature = "serde", serde(rename = "window_used_ns"))]
    pub window_used: Duration,
    /// GPU time charged since the client joined, in ns: its reported use, raised to the full charge of a token taken back from it.
    #[cfg_attr(feature = "serde", serde(rename = "total_used_ns"))]
    pub total_used: Duration,
    /// The end of the client's token; `None` without a token.
    #[cfg_attr(feature = "serde", serde(rename = "holds_until_ns"))]
    pub holds: Option<Timestamp>,
    /// The start of the client's wait for a token; `None` while it does not wait.
    #[cfg_attr(feature = "serde", serde(rename = "waiting_since_ns"))]
    pub waiting_since: Option<Timestamp>,
    /// How long others have kept the client waiting that could have run by its own share, since it joined, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "delayed_ns", default))]
    pub delayed: Duration,
}

impl ClientStatus {
    /// The status of a new client.
    pub const fn joined(client: ClientId, gpu: GpuId, share: Share) -> Self {
        Self {
            client,
            gpu,
            share,
            window_used: Duration::ZERO,
            total_used: Duration::ZERO,
            holds: None,
            waiting_since: None,
            delayed: Duration::ZERO,
        }
    }
}

crate::claims! {
    /// What the suite for [`TokenScheduler`] checks.
    token_claims {
        SM_SUM = "the SM shares of the holders on one GPU never add up to more than the whole, at any instant";
        QUOTA =
            "in no window do the grants of a client exceed its limit and the time owed to it, less the overuse carried from earlier windows";
        THROTTLE = "a throttled client has used its limit, and gets no token before the time that it was told";
        WORK =
            "while a client with some of its limit left asks, no GPU is idle; where clients hold together, free SMs are not kept from the only one that asks";
        LEDGER =
            "the account of a client agrees with its reports: each reported nanosecond is charged once, a revoked token in full";
        REQUEST = "a client that keeps asking gets its request in every window, where the policy promises it";
        WAIT =
            "a client with owed time waits no longer than the tokens of the others and one window, where the policy promises it";
        LEAVES = "a client that leaves frees its SMs in the same call";
        RETURNS = "a token that is given back makes room in the same call";
        REVOKED = "a token that is not given back is revoked at the end of its grace, and its SMs are given on at once";
        WIDE = "a wide client is not passed over by narrow ones";
        ELASTIC = "time that no client claims goes to a client with some of its limit left";
        REFUSED = "a refused event changes nothing";
        SAME = "the same events give the same actions";
    }
}

/// A policy for the grants of tokens. See the [module](self) for the totals.
///
/// # Contract
/// Checked by the conformance suite of `gshare-sim`:
#[doc = token_claims!()]
pub trait TokenScheduler:
    Engine<Event = TokenEvent, Action = TokenAction, Error = TokenError> + Send
{
    /// This scheduler's view of the client; `None` for an unknown client.
    fn client(&self, client: ClientId) -> Option<ClientStatus>;

    /// Length of the window over which quotas are settled.
    fn window(&self) -> Duration;
}
