//! Settings of the instances on sliced devices.

use crate::pipeline::{EvictionPolicy, KeepAlive};
use gshare_core::{BasisPoints, Bytes, ConfigError, Duration};

/// Use of a window from which an instance counts as busy. 30 % (section 5.3).
pub const HOT_ABOVE: BasisPoints = BasisPoints::percent(30);

/// The time to bring weights to a slice, by its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct LoadCosts {
    /// Time to start a process with its context and libraries. 4 s: as measured for torch (`StreamBox`).
    #[cfg_attr(feature = "serde", serde(rename = "start_ns"))]
    pub start: Duration,
    /// Bytes per second from host memory. 12 GB/s: pinned memory.
    pub host_bytes_per_second: u64,
    /// Bytes per second from storage. 1 GB/s.
    pub storage_bytes_per_second: u64,
}

impl Default for LoadCosts {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(4),
            host_bytes_per_second: 12_000_000_000,
            storage_bytes_per_second: 1_000_000_000,
        }
    }
}

impl LoadCosts {
    fn moved(bytes: Bytes, rate: u64) -> Duration {
        Duration::to_move(bytes, rate).min(gshare_core::dag::MAX_TIME)
    }

    /// Time from host memory to a slice.
    pub fn reload(&self, bytes: Bytes) -> Duration {
        Self::moved(bytes, self.host_bytes_per_second)
    }

    /// Time from storage to host memory.
    pub fn fetch(&self, bytes: Bytes) -> Duration {
        Self::moved(bytes, self.storage_bytes_per_second)
    }
}

crate::settings_table::settings! {
    /// Settings of the instances on a node's slices. The defaults are this crate's; [`KeeperConfig::paper`] has the paper's values,
    /// and [`KeeperConfig::monolithic`] the values for platforms without pipelines and time sharing.
    pub struct KeeperConfig {
        /// Whether functions may be cut.
        pub pipelines: bool = true, with_pipelines;
        /// Whether instances with little work take turns on shared slices.
        pub time_sharing: bool = true, with_time_sharing;
        /// Whether pipelines move to one slice when one is free.
        pub migration: bool = true, with_migration;
        /// Whether unused pipelines are given up; in the paper they stay.
        pub demote_pipelines: bool = true, with_demote_pipelines;
        /// Whether a function may take slices of idle instances when no slice is free.
        pub reclaim: bool = true, with_reclaim;
        /// Whether a shared instance that cannot serve in time gets company at once, before its use reaches [`HOT_ABOVE`].
        pub hot_on_shortage: bool = true, with_hot_on_shortage;
        /// The policy that chooses the victims of evictions.
        pub eviction: EvictionPolicy = EvictionPolicy::default(), with_eviction;
        /// How long functions stay warm.
        pub keep_alive: KeepAlive = KeepAlive::default(), with_keep_alive;
        /// Length of the windows in which use is measured. 10 s: far above a request, far below a keep-alive.
        #[cfg_attr(feature = "serde", serde(rename = "window_ns"))]
        pub window: Duration = Duration::from_secs(10), with_window;
        /// Use of a window below which an instance counts as not busy. 15 %: the work that makes an instance hot does not cool
        /// it again.
        #[cfg_attr(feature = "serde", serde(rename = "hot_below_basis_points"))]
        pub hot_below: BasisPoints = BasisPoints::percent(15), with_hot_below;
        /// Windows in a row below `hot_below` before an instance counts as not busy. 6: a minute.
        pub cool_windows: u32 = 6, with_cool_windows;
        /// Most shared instances of a function. 2; the paper's 1 is a cap under a burst that stays below [`HOT_ABOVE`].
        pub max_shared: u32 = 2, with_max_shared;
        /// The costs of loading.
        pub load: LoadCosts = LoadCosts::default(), with_load;
    }
}

impl KeeperConfig {
    /// The paper's settings: one threshold, one window, LRU, ten minutes, and pipelines that stay.
    #[must_use]
    pub fn paper() -> Self {
        Self {
            demote_pipelines: false,
            reclaim: false,
            hot_on_shortage: false,
            eviction: EvictionPolicy::Lru,
            keep_alive: KeepAlive::PAPER,
            hot_below: HOT_ABOVE,
            cool_windows: 1,
            max_shared: 1,
            ..Self::default()
        }
    }

    /// One unit per function, on one slice that it keeps for its keep-alive, as in ESG (FluidFaaS, section 4).
    #[must_use]
    pub fn monolithic() -> Self {
        Self { pipelines: false, time_sharing: false, migration: false, ..Self::paper() }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let bad = |field| Err(ConfigError::new(field, 0, "need more than 0"));
        let load = &self.load;
        gshare_core::check_fields!(self {
            window in Duration::from_nanos(1).., "need more than 0";
            hot_below in ..=HOT_ABOVE, "need at most 30 %";
            cool_windows, max_shared in 1.., "need more than 0";
        })?;
        gshare_core::check_fields!(load {
            host_bytes_per_second, storage_bytes_per_second in 1.., "need more than 0";
        })?;
        match (self.eviction, self.keep_alive) {
            (EvictionPolicy::CostAware { half_life }, _) if half_life.is_zero() => bad("half_life"),
            (_, KeepAlive::Adaptive { break_even, .. }) if break_even.is_zero() => bad("break_even"),
            _ => Ok(()),
        }
    }
}
