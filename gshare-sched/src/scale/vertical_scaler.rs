//! The answers and errors of vertical scalers, and their trait.

use core::fmt;
use gshare_core::{ClientId, GpuId, QuotaRange, ServiceClass, Timestamp};

/// An iteration of a client: a batch was answered, or a training step done (Dilu, section 3.4.1, footnote 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the whole of an iteration")]
pub struct Iteration {
    /// The size of its work, such as requests or kernel launches; more than 0. Iterations of like sizes are compared.
    pub batch: u32,
    /// The time of its first kernel launch.
    pub first_launch: Timestamp,
    /// The time of its last kernel launch.
    pub last_launch: Timestamp,
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

/// Why a client was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum VerticalError {
    /// No such client (any more).
    #[error("unknown client {client}")]
    UnknownClient { client: ClientId },
    /// The client is already here.
    #[error("{client} cannot join: it is here")]
    ClientExists { client: ClientId },
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
#[expect(clippy::exhaustive_structs, reason = "for scalers to build")]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct GpuScale {
    pub state: ScaleState,
    /// Tokens of the GPU in a period.
    pub max_tokens: u64,
    /// Tokens issued per period now, over all its clients.
    pub issued_tokens: u64,
}

/// A client as a vertical scaler sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "for scalers to build")]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct ClientScale {
    pub gpu: GpuId,
    /// Its kind of service.
    pub class: ServiceClass,
    /// Its own state; [`ScaleState::None`] unless it is SLO-sensitive.
    pub state: ScaleState,
    /// Tokens issued to it per period now.
    pub issued_tokens: u64,
    /// The fewest tokens it can be issued, at any load of the others.
    pub floor_tokens: u64,
}

gshare_core::claims! {
    /// What the suite for [`VerticalScaler`] checks.
    vertical_claims {
        MOST = "the tokens issued on a GPU add up to at most its `MaxTokens`";
        FLOOR = "from the second period after it joined on, a client is issued at least its floor, which is at least one token";
        APART = "calls for one GPU change nothing on another";
        LEAVES = "a client that leaves frees its tokens in the same call";
        CLIENTS = "the scaler knows the clients that there are";
        DEADLINE = "a deadline that was told has passed";
        REFUSED = "an error changes nothing";
        SAME = "the same calls give the same tokens";
    }
}

/// A policy that moves tokens between the clients of a GPU. A client may launch its issued tokens in each period, until the scaler
/// issues another number at the end of one.
///
/// # Contract
/// Checked by the conformance suite of `gshare-sim`:
#[doc = vertical_claims!()]
pub trait VerticalScaler: Send {
    /// A new client, with its guaranteed and greatest share of the GPU's tokens. It is issued tokens from the next period on.
    ///
    /// # Errors
    /// A client that cannot be scaled.
    fn join(
        &mut self,
        now: Timestamp,
        client: ClientId,
        gpu: GpuId,
        quota: QuotaRange,
        class: ServiceClass,
    ) -> Result<(), VerticalError>;

    /// Another share from the next period on. The scaler forgets the client's KLCs.
    ///
    /// # Errors
    /// An unknown client, or a share beyond the GPU.
    fn set_quota(&mut self, now: Timestamp, client: ClientId, quota: QuotaRange)
    -> Result<(), VerticalError>;

    /// The client is gone. Its tokens are free at once.
    fn leave(&mut self, now: Timestamp, client: ClientId);

    /// Tokens launched by the client since its last report. A client without launches need not report, unless it waits for tokens: then it
    /// reports 1, since it is not at rest.
    fn used(&mut self, now: Timestamp, client: ClientId, tokens: u64);

    /// One iteration ended.
    ///
    /// # Errors
    /// An iteration that cannot be.
    fn iterated(
        &mut self,
        now: Timestamp,
        client: ClientId,
        iteration: Iteration,
    ) -> Result<(), VerticalError>;

    /// Ends the periods that are over, and issues tokens for the next. Periods that are not ended in time count as free of launches.
    fn catch_up(&mut self, now: Timestamp);

    /// The end of the period; `None` without clients.
    fn next_deadline(&self) -> Option<Timestamp>;

    /// The GPU as this scaler sees it; `None` before its first client.
    fn gpu(&self, gpu: GpuId) -> Option<GpuScale>;

    /// The client as this scaler sees it.
    fn client(&self, client: ClientId) -> Option<ClientScale>;
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
}
