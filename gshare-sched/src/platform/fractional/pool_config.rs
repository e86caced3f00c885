//! Settings of the fractional pool.

use crate::pack::{MaxRects, MaxRectsConfig};
use crate::scale::{HeuristicHorizontal, HeuristicHorizontalConfig};
use gshare_core::pack::Packer;
use gshare_core::scale::HorizontalScaler;
use gshare_core::{Bytes, ConfigError, Duration};

/// Settings of a [`FractionalPool`](super::FractionalPool).
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct FractionalConfig {
    /// The most requests of one function that wait. 10,000: more than any that wait is worth answering.
    pub max_waiting: u32,
    /// The longest time that a request waits. 60 s: a gateway's own time-out.
    #[cfg_attr(feature = "serde", serde(rename = "max_wait_ns"))]
    pub max_wait: Duration,
    /// How often a request is dispatched before it is rejected, because its instances ended. 3.
    pub max_attempts: u8,
    /// How long after its SLO a request that is late waits behind those of its function that can be in time, while more wait than are
    /// served. 20 s, as for pipelines ([`RouterConfig`](crate::pipeline::RouterConfig)): about a burst, and within a client's
    /// patience. None: the order of arrival, as in FaST-GShare and Dilu; all that come behind a burst are late then.
    #[cfg_attr(feature = "serde", serde(rename = "late_wait_ns"))]
    pub late_wait: Option<Duration>,
    /// The same in percent of the time that its function's ready instances need, by then, for all that waits; the longer holds. 200, as
    /// for pipelines: under a backlog of more than half of `late_wait` a late request waits twice as long as it would first come,
    /// first served, so that about half of the others can be in time. With a fixed bound alone lasting overload makes all that
    /// wait overdue, and none is in time. 0: the fixed bound alone.
    pub late_stretch_percent: u32,
    /// The time for which a function that may have no instance keeps one after its last request. 60 s: the gaps between
    /// requests of functions that are in use at all are shorter.
    #[cfg_attr(feature = "serde", serde(rename = "keep_alive_ns"))]
    pub keep_alive: Duration,
    /// Whether idle instances are parked when another function finds no memory for its first instance.
    pub park: bool,
    /// The time without a request after which an instance may be parked for another function. 200 ms: a few answers.
    #[cfg_attr(feature = "serde", serde(rename = "park_idle_ns"))]
    pub park_idle: Duration,
    /// The time for which an instance waits for room before a busy one is parked for it. 2 s: long enough that parking,
    /// which takes a second for a large model, is not most of what a device does.
    #[cfg_attr(feature = "serde", serde(rename = "park_busy_after_ns"))]
    pub park_busy_after: Duration,
    /// The time in which a host must answer `Park` and `Unpark`. 60 s.
    #[cfg_attr(feature = "serde", serde(rename = "park_timeout_ns"))]
    pub park_timeout: Duration,
    /// How many times its SM request an instance may take while others leave it. 1: none, as in FaST-GShare; Dilu gives 2
    /// (section 3.2).
    pub sm_limit_factor: u16,
    /// The time after which a training job that ended by itself is started again; doubled each time, up to 5 min. 1 s.
    #[cfg_attr(feature = "serde", serde(rename = "restart_after_ns"))]
    pub restart_after: Duration,
    /// Host memory of each node that is set aside for weights.
    #[cfg_attr(feature = "serde", serde(rename = "host_memory_bytes"))]
    pub host_memory: Bytes,
}

gshare_core::with_fields!(FractionalConfig {
    with_late_wait(late_wait: Option<Duration>),
    with_late_stretch_percent(late_stretch_percent: u32),
    with_park(park: bool),
    with_park_idle(park_idle: Duration),
    with_park_busy_after(park_busy_after: Duration),
    with_park_timeout(park_timeout: Duration),
    with_restart_after(restart_after: Duration),
    with_sm_limit_factor(sm_limit_factor: u16),
    with_max_wait(max_wait: Duration),
    with_keep_alive(keep_alive: Duration),
    with_host_memory(host_memory: Bytes),
    with_max_attempts(max_attempts: u8),
    with_max_waiting(max_waiting: u32),
});

impl Default for FractionalConfig {
    fn default() -> Self {
        Self {
            max_waiting: 10_000,
            max_wait: Duration::from_secs(60),
            max_attempts: 3,
            late_wait: Some(Duration::from_secs(20)),
            late_stretch_percent: 200,
            keep_alive: Duration::from_secs(60),
            park: true,
            park_idle: Duration::from_millis(200),
            park_busy_after: Duration::from_secs(2),
            park_timeout: Duration::from_secs(60),
            sm_limit_factor: 1,
            restart_after: Duration::from_secs(1),
            host_memory: Bytes::from_gib(64),
        }
    }
}

impl FractionalConfig {
    /// The same settings without parking: a function that finds no room waits until somebody leaves.
    #[must_use]
    pub fn without_parking(self) -> Self {
        Self { park: false, ..self }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let day = Duration::from_secs(86_400);
        for (field, value) in [
            ("max_wait", self.max_wait),
            ("keep_alive", self.keep_alive),
            ("park_idle", self.park_idle),
            ("park_busy_after", self.park_busy_after),
            ("park_timeout", self.park_timeout),
            ("restart_after", self.restart_after),
        ] {
            ConfigError::unless(
                !value.is_zero() && value <= day,
                field,
                value,
                "need more than 0, at most a day",
            )?;
        }
        ConfigError::unless(self.max_waiting > 0, "max_waiting", 0, "need more than 0")?;
        ConfigError::unless(self.max_attempts > 0, "max_attempts", 0, "need more than 0")?;
        let factor = self.sm_limit_factor;
        ConfigError::unless((1..=100).contains(&factor), "sm_limit_factor", factor, "need 1 to 100")
    }
}

/// The policies of a fractional pool.
pub struct FractionalPolicies {
    /// Starts and stops instances.
    pub scaler: Box<dyn HorizontalScaler>,
    /// Places them on devices.
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
    /// None for the settings that it uses.
    pub fn fast() -> Result<Self, ConfigError> {
        Ok(Self {
            scaler: Box::new(HeuristicHorizontal::new(HeuristicHorizontalConfig::default())?),
            packer: Box::new(MaxRects::new(MaxRectsConfig::default())),
        })
    }
}
