//! The state of GPUs that nodes and schedulers share.

use gshare_core::{Duration, GpuId, ModelId, Timestamp};

/// The state of one GPU that nodes and schedulers share (GPU-enabled FaaS, section III-E): status, estimate, LRU list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GpuRecord {
    /// Whether it has something to do.
    pub busy: bool,
    /// When it will have done everything it was given.
    #[cfg_attr(feature = "serde", serde(rename = "free_at_ns"))]
    pub free_at: Timestamp,
    /// Models in its memory, least recently used first.
    pub models: Vec<ModelId>,
}

/// Number of a write to one key of a [`StateStore`]; grows by one with each. 0 stands for "never written".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Version(pub u64);

/// Why a store refused. Nothing was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum StateError {
    /// Another writer was first.
    #[error("record of {gpu} is at version {}, not {}", found.0, expected.0)]
    Conflict { gpu: GpuId, expected: Version, found: Version },
    /// The store cannot be reached. What it holds is not known: a reader takes it as a miss.
    #[error("the store cannot be reached: {reason}")]
    Unavailable { reason: String },
}

/// The models that the GPUs of a cluster hold, as their nodes last said. Told the time, as an engine is.
///
/// A record lives as long as its lease: a node that is gone stops renewing it, and a reader sees nothing instead of
/// something old. A write names the version it replaces, so that two managers of one GPU cannot both win. What a
/// reader gets may still be late by the time between two writes; a hit that turns out to be none is reported as
/// [`RequestEvent::NotResident`](super::RequestEvent::NotResident) and costs a load, not a failure.
pub trait StateStore: Send {
    /// Writes the record if its version is still `expected`; it lives until `now + lease`. Answers with its version.
    fn put(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        record: GpuRecord,
        expected: Version,
        lease: Duration,
    ) -> Result<Version, StateError>;

    /// The record and its version; `None` when there is none or its lease has run out.
    fn get(&self, now: Timestamp, gpu: GpuId) -> Result<Option<(Version, GpuRecord)>, StateError>;

    /// The version of the last write, leases aside: what the next writer must name.
    fn version(&self, gpu: GpuId) -> Result<Version, StateError>;

    /// All GPUs whose records live, in the order of their numbers.
    fn live(&self, now: Timestamp) -> Result<Vec<GpuId>, StateError>;
}
