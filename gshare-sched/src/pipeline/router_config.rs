//! Settings of a [`SlackRouter`](super::SlackRouter).

#[cfg(doc)]
use crate::pipeline::RouteAction;
use gshare_core::{ConfigError, Duration, Timestamp};

/// The treatment of requests that cannot be answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Late {
    /// Late requests keep their place (the paper).
    InOrder,
    /// Late requests are served after those that can be in time, for as long as [`RouterConfig::late_wait`] says. The default: none
    /// is refused, and few are late because others were.
    #[default]
    Last,
    /// Late requests are refused, on arrival when what waits already would make them late.
    Reject,
}

crate::settings_table::settings! {
    /// Settings of a [`SlackRouter`](super::SlackRouter).
    pub struct RouterConfig {
        /// The treatment of requests that cannot be in time.
        pub late: Late = Late::Last, with_late;
        /// With [`Late::Last`]: how long after its deadline a late request goes before those that can be in time, at least.
        /// 20 s: about a burst, so that few are served that early, and within a client's patience. None: never.
        #[cfg_attr(feature = "serde", serde(rename = "late_wait_ns"))]
        pub late_wait: Option<Duration> = Some(Duration::from_secs(20)), with_late_wait;
        /// The same in percent of the time that its function needs, by then, for all that waits; the longer holds.
        /// 200: under a backlog of more than half of `late_wait` it waits twice as long as it would first come, first
        /// served, so that about half of the others can be in time.
        pub late_stretch_percent: u32 = 200, with_late_stretch_percent;
        /// Slice time by which a shared instance may run ahead of its neighbours. None: slack alone decides, as in the paper.
        /// With it an event of a function with `k` instances costs O(k log n): each of them is put in its place again.
        #[cfg_attr(feature = "serde", serde(rename = "fair_quantum_ns"))]
        pub fair_quantum: Option<Duration> = None;
        /// How many times the time of a load a shared slice works for those in its memory, while they have requests, before it
        /// loads another that will be late anyway. 8: at most a ninth of the slice's time goes into loads. 0: slack alone
        /// decides, as in the paper.
        pub stay_loads: u32 = 8, with_stay_loads;
        /// Least time between two [`RouteAction::Short`] of a function. 100 ms: an instance takes longer than that to start.
        #[cfg_attr(feature = "serde", serde(rename = "short_every_ns"))]
        pub short_every: Duration = Duration::from_millis(100), with_short_every;
        /// Most requests of a function that wait. 100,000: some 10 MB.
        pub max_waiting: u32 = 100_000, with_max_waiting;
        /// How often a request is dispatched before it is given up. 3: a request that kills its instance must end.
        pub max_attempts: u8 = 3, with_max_attempts;
    }
}

impl RouterConfig {
    /// As the paper describes it.
    #[must_use]
    pub fn paper() -> Self {
        Self { late: Late::InOrder, stay_loads: 0, ..Self::default() }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        gshare_core::check_fields!(self {
            max_waiting in 1.., "need more than 0";
            max_attempts in 1.., "need more than 0";
        })?;
        ConfigError::unless(!self.short_every.is_zero(), "short_every", 0, "need more than 0")?;
        let within = self.fair_quantum != Some(Duration::ZERO);
        ConfigError::unless(within, "fair_quantum", 0, "need more than 0, or none")
    }

    /// When a late request is overdue while its function is `behind`.
    pub(super) fn overdue_at(&self, deadline: Timestamp, behind: Duration) -> Timestamp {
        let Some(wait) = self.late_wait else { return Timestamp::MAX };
        deadline.saturating_add(overdue_after(wait, self.late_stretch_percent, behind))
    }

    /// The same with fairness between shared instances.
    #[must_use]
    pub fn with_fair_quantum(self, quantum: Duration) -> Self {
        Self { fair_quantum: Some(quantum), ..self }
    }
}

/// How long a late request is passed over while its function is `behind`: `wait`, or `stretch_percent` of `behind` if that is
/// longer.
pub(crate) fn overdue_after(wait: Duration, stretch_percent: u32, behind: Duration) -> Duration {
    wait.max(behind.scaled(stretch_percent.into(), 100))
}
