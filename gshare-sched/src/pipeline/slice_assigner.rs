//! The slices of a pipeline, and the policy that assigns them.

use crate::mig::SliceAt;
use gshare_core::{Bytes, Duration, GpuId};

/// A pipeline's slices, and how it runs on them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Assignment {
    /// For each part of the pipeline, in its order: the GPU and the slice.
    pub slices: Vec<AssignedSlice>,
    /// The longest time a slice is busy with one batch, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "bottleneck_ns"))]
    pub bottleneck: Duration,
    /// Time of one batch through the pipeline, every branch taken, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
    pub latency: Duration,
    /// Number of held compute slices.
    pub compute_slices: u32,
    /// Unused memory of the slices.
    #[cfg_attr(feature = "serde", serde(rename = "waste_bytes"))]
    pub waste: Bytes,
    /// Number of GPUs with slices of the pipeline.
    pub gpus: u32,
    /// How much harder the node's idle memory has become to use, see the assigner.
    pub fragmentation: i64,
}

impl Assignment {
    /// An assignment without figures, for assigners; hosts only receive assignments.
    pub const fn new(slices: Vec<AssignedSlice>) -> Self {
        Self {
            slices,
            bottleneck: Duration::ZERO,
            latency: Duration::ZERO,
            compute_slices: 0,
            waste: Bytes::ZERO,
            gpus: 0,
            fragmentation: 0,
        }
    }
}

/// One slice of an [`Assignment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct AssignedSlice {
    pub gpu: GpuId,
    pub slice: SliceAt,
}

/// Why a pipeline cannot run on the free slices. Stages count from 1 in the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "reason", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum Unfit {
    /// More parts than slices.
    #[error("needs {parts} slices, {free} are free")]
    TooFewSlices { parts: u32, free: u32 },
    /// A part without a suitable free slice.
    #[error("stage {} fits no free slice: {why}", stage + 1)]
    NoSlice { stage: u32, why: Misfit },
    /// Each part fits a free slice, but not all at the same time.
    #[error("its stages each fit a free slice, but not all at once")]
    NotTogether,
    /// Too slow.
    #[error("latency {latency} is above the SLO of {slo}")]
    SloMissed {
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        #[cfg_attr(feature = "serde", serde(rename = "slo_ns"))]
        slo: Duration,
    },
}

/// Why a part runs on no free slice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum Misfit {
    /// The slices on which all its components have a profile are too small.
    #[error("needs {needed}, the largest has {largest}")]
    Memory {
        #[cfg_attr(feature = "serde", serde(rename = "needed_bytes"))]
        needed: Bytes,
        #[cfg_attr(feature = "serde", serde(rename = "largest_bytes"))]
        largest: Bytes,
    },
    /// On every free slice a component has no profile.
    #[error("component `{component}` has no profile for {slice}, batch {batch}")]
    NoProfile { component: String, slice: String, batch: u32 },
    /// There is no free slice at all.
    #[error("none is free")]
    NothingFree,
}
