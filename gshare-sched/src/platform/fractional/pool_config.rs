//! Settings of the fractional pool.

use crate::pack::{MaxRects, MaxRectsConfig, Packer};
use crate::pipeline::KeepAlive;
use crate::scale::{HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler};
use gshare_core::{Bytes, ConfigError, Duration};

/// The time without a request after which an instance may be parked for another function: a few answers.
pub(super) const PARK_IDLE: Duration = Duration::from_millis(200);
/// How many times as long as its parking and its load an instance stays where it has come: functions that take turns in too little
/// memory then spend at most a fifth of a device's time on loads. Half of that where it is idle: a third of the time.
pub(super) const STAY_PER_MOVE: u64 = 4;
/// The shortest such stay where processes end: each change also costs the host the end and the start of a process. Where they live on, it
/// is [`PARK_IDLE`].
pub(super) const LEAST_STAY: Duration = Duration::from_secs(2);
/// How long an instance waits for room before a busy instance is parked for it: parking takes a second for a large model, and must
/// not be most of a device's work.
pub(super) const PARK_BUSY_AFTER: Duration = Duration::from_secs(2);
/// The pause before the restart of a training job that ended by itself; doubled each time, up to 5 min.
pub(super) const RESTART_AFTER: Duration = Duration::from_secs(1);

/// The idle time of a tenth of a device that a cold start of one request is worth.
const BREAK_EVEN: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

crate::settings_table::settings! {
    /// Settings of a [`FractionalPool`](super::FractionalPool).
    pub struct FractionalConfig {
        /// How long a function without a minimum keeps an instance after its last request, and when it is started again ahead of a
        /// request. Adaptive: a cold start counts as much as 60 s of a tenth of a device, less for a larger share, and more where
        /// more requests come at once.
        pub keep_alive: KeepAlive = KeepAlive::Adaptive { break_even: BREAK_EVEN, longest: DAY }, with_keep_alive;
        /// How many times its SM request an instance may take while others leave it. 1: none, as in FaST-GShare; Dilu gives 2
        /// (section 3.2).
        pub sm_limit_factor: u16 = 1, with_sm_limit_factor;
        /// Whether processes are confined to their part of the SMs, as they are under MPS. Otherwise the driver gives them time
        /// slices: an instance then books all SMs while it runs, for the quota of its point
        /// ([`ProfileTable::on_all_sms`](gshare_core::profile::ProfileTable::on_all_sms)), since instances side by side would
        /// take each other's time.
        pub sm_partitions: bool = true, with_sm_partitions;
        /// Host memory set aside on each node for weights.
        #[cfg_attr(feature = "serde", serde(rename = "host_memory_bytes"))]
        pub host_memory: Bytes = Bytes::from_gib(64), with_host_memory;
    }
}

impl FractionalConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let KeepAlive::Adaptive { break_even: Duration::ZERO, .. } = self.keep_alive {
            return Err(ConfigError::new("keep_alive.break_even", "0", "need more than 0"));
        }
        gshare_core::check_fields!(self {
            sm_limit_factor in 1..=100, "need 1 to 100";
        })
    }
}

/// The policies of a fractional pool.
pub struct FractionalPolicies {
    /// Starts and stops instances.
    pub scaler: Box<dyn HorizontalScaler>,
    /// Places instances on devices.
    pub packer: Box<dyn Packer>,
}

impl core::fmt::Debug for FractionalPolicies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("FractionalPolicies").finish_non_exhaustive()
    }
}

impl FractionalPolicies {
    /// Scaling by profile (FaST-GShare, Algorithm 1) and rectangles of time and SMs (section 3.4.2).
    ///
    /// # Errors
    /// None for these settings.
    pub fn fast() -> Result<Self, ConfigError> {
        Ok(Self {
            scaler: Box::new(HeuristicHorizontal::new(HeuristicHorizontalConfig::default())?),
            packer: Box::new(MaxRects::new(MaxRectsConfig::default())),
        })
    }
}
