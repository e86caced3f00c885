//! Settings of a [`SlackRouter`](super::SlackRouter).

use gshare_core::{Duration, Timestamp};

/// The treatment of requests that cannot be answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Late {
    /// Late requests keep their place (the paper).
    InOrder,
    /// Late requests are served after those that can be in time, until [`RouterConfig::late_wait`] is over. The default: no
    /// request is refused, and few are late because of other late requests.
    #[default]
    Last,
    /// Late requests are refused, even on arrival if the waiting requests before them would make them late.
    Reject,
}

crate::settings_table::settings! {
    /// Settings of a [`SlackRouter`](super::SlackRouter).
    pub struct RouterConfig {
        /// The treatment of late requests.
        pub late: Late = Late::Last, with_late;
        /// With [`Late::Last`]: the least time after its deadline until a late request goes before requests that can be in
        /// time. 20 s: about a burst, so that few requests go first so early, and within a client's patience. None: never.
        #[cfg_attr(feature = "serde", serde(rename = "late_wait_ns"))]
        pub late_wait: Option<Duration> = Some(Duration::from_secs(20)), with_late_wait;
        /// The same time in percent of the time its function then needs for all waiting requests; the longer time holds. 200:
        /// under a backlog of more than half of `late_wait` a late request waits twice as long as it would first come, first
        /// served, so that about half of the others can be in time.
        pub late_stretch_percent: u32 = 200, with_late_stretch_percent;
        /// How many times the time of a load a shared slice works for its residents, while they have requests, before it loads
        /// an instance that will be late anyway. 8: at most a ninth of the slice's time goes into loads. 0: slack alone
        /// decides, as in the paper.
        pub stay_loads: u32 = 8, with_stay_loads;
    }
}

impl RouterConfig {
    /// The paper's settings.
    #[must_use]
    pub fn paper() -> Self {
        Self { late: Late::InOrder, stay_loads: 0, ..Self::default() }
    }

    /// The time from which a late request is overdue while its function is `behind`.
    pub(super) fn overdue_at(&self, deadline: Timestamp, behind: Duration) -> Timestamp {
        let Some(wait) = self.late_wait else { return Timestamp::MAX };
        deadline.saturating_add(overdue_after(wait, self.late_stretch_percent, behind))
    }
}

/// How long a late request is passed over while its function is `behind`: `wait`, or `stretch_percent` of `behind` if longer.
pub(crate) fn overdue_after(wait: Duration, stretch_percent: u32, behind: Duration) -> Duration {
    wait.max(behind.scaled(stretch_percent.into(), 100))
}
