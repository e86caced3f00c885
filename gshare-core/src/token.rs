//! Token scheduling: the events, actions and errors of every policy.
//!
//! # Problem
//! Kernels cannot be taken back once launched, and the driver runs them without asking first. So permission is handed
//! out ahead of time: a client may launch only while it holds a **token**, a lease on GPU time. A
//! [`TokenScheduler`] decides who holds one (FaST-GShare, section 3.3.2).
//!
//! # Terms
//! - **token, lease**: the right to spend `budget` nanoseconds of GPU time before `expires`.
//! - **quota request, limit**: share of GPU time in a window that is guaranteed, and the most that is allowed.
//! - **used**: GPU time the client's kernels took, as the client measured it; never wall time.
//! - **holder**: a client with a lease that has neither been returned nor run out.
//!
//! # Life of a lease
//! ```text
//! TokenRequested ─▶ Grant{lease, budget, expires}            one lease belongs to one window
//!        TokenRequested again ─▶ Grant{same lease, larger budget, later expiry}    (renewal ahead of time)
//! UsageReported{lease, used so far}                           any number of times
//! TokenReturned{lease, used, again}  ─▶ room for others       also when idle, with budget left; `again`: and asks again
//! past `expires` + grace      ─▶ Revoke{lease, Expired}       the whole budget counts as used
//! ```
//! `budget` in a [`TokenAction::Grant`] is the total since the lease began, so a repeated grant is harmless. A
//! return that comes after the lease expired still corrects the account; one of a lease that is not known any more is
//! refused as [`TokenError::StaleLease`] and changes nothing. A lease is returned once: a second return of it is stale.
//! One that was replaced by a newer lease and is never returned costs what was reported of it.
//!
//! A waiting client is told [`TokenAction::Throttle`] once, as soon as it has used its limit; until then a lease that it
//! holds may still leave it time. What was used under a limit that is cut later in the same window is no debt.

use crate::engine::{Engine, TimeWentBack};
use crate::ids::{ClientId, GpuId, LeaseId};
use crate::resource::{QuotaRange, SpecError};
use crate::units::{Duration, Quota, SmShare, Timestamp};

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
    /// Where the client's guaranteed time lies in every window from the next one on, as a packer placed it. For policies
    /// that keep a packing as a schedule; others pass it over.
    SlotAssigned {
        /// The client that has the slot.
        client: ClientId,
        /// Where it begins in the window. It is as long as the client's request, and may wrap round the window's end.
        #[cfg_attr(feature = "serde", serde(rename = "offset_bp"))]
        offset: Quota,
    },
    /// The client is gone, with all that it held.
    ClientLeft {
        /// The client that left.
        client: ClientId,
    },
    /// The client wants to launch: its first token, or more time ahead of the end of the one it holds.
    TokenRequested {
        /// The client that wants to launch.
        client: ClientId,
    },
    /// The client launches no more under this lease.
    TokenReturned {
        /// The client that held it.
        client: ClientId,
        /// Which lease.
        lease: LeaseId,
        /// GPU time used under it in all, in ns; may be more than its budget (overuse).
        #[cfg_attr(feature = "serde", serde(rename = "used_ns"))]
        used: Duration,
        /// The client wants the next token at once, as by [`Self::TokenRequested`], but gets its place in the
        /// wait queue before the returned token is granted to another client.
        #[cfg_attr(feature = "serde", serde(default))]
        again: bool,
    },
    /// How much of the lease has been used so far.
    UsageReported {
        /// The client that used it.
        client: ClientId,
        /// Which lease.
        lease: LeaseId,
        /// GPU time used under it so far, in ns; never less than reported before.
        #[cfg_attr(feature = "serde", serde(rename = "used_ns"))]
        used: Duration,
    },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of the token scheduler for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
pub enum TokenAction {
    /// Let the client launch.
    Grant {
        /// The client that may launch.
        client: ClientId,
        /// Under which lease: a new one, which replaces any earlier one, or the one it holds, extended.
        lease: LeaseId,
        /// GPU time in ns that it may use in all since the lease began.
        #[cfg_attr(feature = "serde", serde(rename = "budget_ns"))]
        budget: Duration,
        /// When it must stop launching, used up or not.
        #[cfg_attr(feature = "serde", serde(rename = "expires_ns"))]
        expires: Timestamp,
    },
    /// Stop the client: its lease is void.
    Revoke {
        /// The client that is stopped.
        client: ClientId,
        /// Which lease.
        lease: LeaseId,
        /// Why it is stopped.
        reason: RevokeReason,
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

/// Why a lease is void.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum RevokeReason {
    /// The lease ran out and was not returned in the time allowed for that.
    Expired,
    /// The client's share became smaller than what it holds.
    ShareReduced,
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
    /// The client does not hold that lease, and it is not the last one it held.
    #[error("{client} does not hold {lease}")]
    StaleLease {
        /// The client that does not hold it.
        client: ClientId,
        /// The lease named.
        lease: LeaseId,
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
    /// GPU time used since it joined, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "total_used_ns"))]
    pub total_used: Duration,
    /// The lease it holds.
    pub holds: Option<LeaseId>,
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

/// A policy that hands out tokens. See the [module](self) for the life of a lease.
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
