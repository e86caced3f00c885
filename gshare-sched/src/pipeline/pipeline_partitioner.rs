//! Pipelines, their requirements, and the policy that cuts a DAG into them.

use gshare_core::dag::ComponentSet;
use gshare_core::{Bytes, ConfigError, Duration, ProfileId};

/// The time that a hand-off between two slices costs each of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct HandOff {
    /// Time per edge of any size. 100 us: two copies to get going and a wake-up.
    #[cfg_attr(feature = "serde", serde(rename = "fixed_ns"))]
    pub fixed: Duration,
    /// Bytes per second between a slice and host memory. 10 GB/s: pinned memory on a link shared by several slices.
    pub bytes_per_second: u64,
}

impl Default for HandOff {
    fn default() -> Self {
        Self { fixed: Duration::from_micros(100), bytes_per_second: 10_000_000_000 }
    }
}

impl HandOff {
    /// No cost at all, as the paper's ranking has it.
    pub const FREE: Self = Self { fixed: Duration::ZERO, bytes_per_second: u64::MAX };

    /// Time to write or to read `bytes`, rounded up to a nanosecond, at most an hour.
    pub fn time(&self, bytes: Bytes) -> Duration {
        if bytes == Bytes::ZERO {
            return self.fixed.min(gshare_core::dag::MAX_TIME);
        }
        let rate = u128::from(self.bytes_per_second.max(1));
        let moved = Duration::from_wide_nanos((u128::from(bytes.get()) * 1_000_000_000).div_ceil(rate));
        let moved = if self.bytes_per_second == u64::MAX { Duration::ZERO } else { moved };
        moved.saturating_add(self.fixed).min(gshare_core::dag::MAX_TIME)
    }
}

gshare_core::config! {
    /// Requirements on the pipelines of a function.
    #[derive(Debug, Clone, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
    pub struct Goal {
        /// Batch size, as in the profiles. 1: requests as they come.
        pub batch: u32 = 1, with_batch;
        /// The longest latency of a pipeline. By default any.
        #[cfg_attr(feature = "serde", serde(rename = "slo_ns"))]
        pub slo: Option<Duration> = None;
        /// Memory of the run-time on every slice, beside the models. 1 GiB: context, libraries and workspace of a framework.
        #[cfg_attr(feature = "serde", serde(rename = "runtime_memory_bytes"))]
        pub runtime_memory: Bytes = Bytes::from_gib(1), with_runtime_memory;
        /// Cost of hand-offs.
        pub hand_off: HandOff = HandOff::default(), with_hand_off;
    }
}

gshare_core::with_fields!(Goal { with_slo(slo: Duration => Some) });

/// The components that run together on one slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Part {
    /// The number of its stage, from 0.
    pub stage: u32,
    /// Its components, as indices of [`Dag::components`](gshare_core::dag::Dag::components).
    pub components: ComponentSet,
    /// The slice profile it was planned for, where its planner chose one.
    pub slice: Option<ProfileId>,
}

/// A cut of a DAG into stages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pipeline {
    /// The parts, by stage; stages in an order in which every edge goes forward.
    pub parts: Vec<Part>,
}

impl Pipeline {
    /// A new pipeline, for partitioners; hosts only receive pipelines.
    pub const fn new(parts: Vec<Part>) -> Self {
        Self { parts }
    }

    /// Number of stages.
    pub fn stages(&self) -> u32 {
        self.parts.last().map_or(0, |part| part.stage + 1)
    }
}

/// Why a DAG was not partitioned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PartitionError {
    /// The joint partition and assignment is too large.
    #[error("{transitions} transitions between states of cut and slices: at most {limit}")]
    TooManyTransitions { transitions: u64, limit: u64 },
    /// A setting outside its bounds.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_off_takes_its_fixed_time_and_its_bytes() {
        let hand_off = HandOff { fixed: Duration::from_nanos(5), bytes_per_second: 1_000_000_000 };
        assert_eq!(hand_off.time(Bytes(10)), Duration::from_nanos(15));
        assert_eq!(HandOff::FREE.time(Bytes(1 << 50)), Duration::ZERO);
        let slow = HandOff { fixed: Duration::MAX, bytes_per_second: 0 };
        assert_eq!(slow.time(Bytes(1 << 50)), gshare_core::dag::MAX_TIME, "never more than an hour");
    }
}
