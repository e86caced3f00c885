//! Lazy scaling out and in (Dilu, section 3.4.2), with its gaps closed.
//!
//! # Problem
//! A cold start of a large model takes tens of seconds, and most bursts last a few. An eager scaler pays for a late start, and again when
//! it takes the instance away and needs it back. Where instances scale up in place ([`DiluVertical`](super::DiluVertical)), they survive a
//! burst without a start. So this scaler waits until the load has been too high for long, and gives back only long unneeded instances.
//!
//! # Terms
//! The terms of [`crate::scale`], and per function:
//! - **deployed**: instances that are starting or ready; **capacity**: their throughputs added up;
//! - **window**: the last 40 load reports, one per tick of 1 s, since instances were last started or taken away.
//!
//! # Algorithm
//! On each load report `x`:
//! 1. nothing is deployed and `x > 0`: start one now;
//! 2. at least `out_reports` (20) reports in the window are above the capacity: start one, of the most effective point within the bound on
//!    p95; if none may be started, report the unmet load;
//! 3. at least `in_reports` (30) are below the capacity without the youngest instance: drain this instance, or stop it if it is not ready
//!    yet; never below the minimum, and never the last;
//! 4. only one is deployed, the minimum is 0, and no request came for `keep_alive`: drain it.
//!
//! After step 2 or 3 the window starts empty. Two such steps of a function are at least `cooldown` apart.
//!
//! ## Example
//! One instance serves 50 requests/s. Load jumps to 80 for 15 s and back to 40: 15 reports are above 50, and nothing starts. Load jumps to
//! 80 and stays: with the 20th such report a second instance starts, and the capacity is 100. Load falls to 40: with the 30th report below
//! 50 the second instance is drained.
//!
//! # Invariants
//! Those of the contract of [`HorizontalScaler`], and each step moves one instance alone.
//!
//! # Cost
//! O(window) for a load report (40 comparisons) and O(n) over the function's instances. A function takes about 500 bytes.
//!
//! # Differences from the paper
//! - The published implementation counts instances for ever if they never become ready. Here the host bounds a start, and reports its end.
//! - The published implementation removes the newest instance with its requests. Here the instance drains.
//! - The published implementation never scales to zero. Here a function with a minimum of 0 does, and starts its first instance at once.
//! - The cooldown is explicit. At its default, 20 s, it changes nothing: the window is empty after each step.
//! - The paper prints "more than" 30 reports, and the implementation has "at least". Here it is at least, like for scaling out.
use super::fleet::{Fleet, FleetConfig};
use crate::scale::{HorizontalOrder, HorizontalScaler, LoadReport};
use gshare_core::profile::RequestRate;
use gshare_core::{ConfigError, Duration, FunctionId, Timestamp};
use std::collections::{BTreeMap, VecDeque};

crate::settings_table::settings! {
    /// Settings of [`LazyHorizontal`].
    pub struct LazyHorizontalConfig {
        /// Settings that every horizontal scaler has.
        pub fleet: FleetConfig = FleetConfig::default(), with_fleet;
        /// Load reports in the window. 40, as in the paper.
        pub window_reports: u32 = 40, with_window_reports;
        /// Reports above the capacity that start an instance (`phi_out`). 20: a burst of some seconds starts none.
        pub out_reports: u32 = 20, with_out_reports;
        /// Reports below the capacity without the youngest instance that take it away (`phi_in`). 30: more than for a start, so that a
        /// swinging load keeps its instances.
        pub in_reports: u32 = 30, with_in_reports;
        /// Time between two steps of one function. 20 s: the window alone causes as much, unless `out_reports` is lowered.
        #[cfg_attr(feature = "serde", serde(rename = "cooldown_ns"))]
        pub cooldown: Duration = Duration::from_secs(20), with_cooldown;
        /// Time without a request after which the last instance goes, where the minimum is 0. 60 s: a few cold starts long.
        #[cfg_attr(feature = "serde", serde(rename = "keep_alive_ns"))]
        pub keep_alive: Duration = Duration::from_secs(60), with_keep_alive;
    }
}

impl LazyHorizontalConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.fleet.validate()?;
        gshare_core::check_fields!(self {
            window_reports in 1..=3600, "need 1 to 3600";
            out_reports, in_reports in 1..=self.window_reports, "need 1 to window_reports";
            cooldown, keep_alive in ..=Duration::from_secs(86_400), "need at most one day";
        })
    }
}

/// A function's history: the window, and the times of the last step and the last request.
#[derive(Debug, Default)]
pub struct History {
    /// The window; the newest at the back.
    window: VecDeque<RequestRate>,
    /// The last time a step started or removed instances.
    last_step: Option<Timestamp>,
    /// The last time a request came.
    busy: Option<Timestamp>,
}

impl History {
    /// Adds a load report.
    pub fn note(&mut self, now: Timestamp, load: RequestRate, config: &LazyHorizontalConfig) {
        if self.window.len() >= config.window_reports as usize {
            self.window.pop_front();
        }
        self.window.push_back(load);
        if !load.is_zero() || self.busy.is_none() {
            self.busy = Some(now);
        }
    }

    /// Whether enough of the window is above the capacity.
    pub fn is_short(&self, capacity: RequestRate, config: &LazyHorizontalConfig) -> bool {
        self.window.iter().filter(|load| **load > capacity).count() >= config.out_reports as usize
    }

    /// Whether enough of the window is below the capacity without the youngest instance.
    pub fn is_spare(&self, without: RequestRate, config: &LazyHorizontalConfig) -> bool {
        self.window.iter().filter(|load| **load < without).count() >= config.in_reports as usize
    }

    /// Whether the last step is long enough ago for another.
    pub fn has_cooled(&self, now: Timestamp, config: &LazyHorizontalConfig) -> bool {
        self.last_step.is_none_or(|at| now.saturating_since(at) >= config.cooldown)
    }

    /// Whether no request came for `keep_alive`, so that the last instance may go.
    pub fn is_idle(&self, now: Timestamp, config: &LazyHorizontalConfig) -> bool {
        now.saturating_since(self.busy.unwrap_or(now)) >= config.keep_alive
    }

    /// Starts one instance, or reports the unmet load.
    fn step_out(
        &mut self,
        now: Timestamp,
        fleet: &Fleet,
        load: RequestRate,
        orders: &mut Vec<HorizontalOrder>,
    ) {
        let point = fleet.startable(now).next().filter(|_| fleet.room() > 0);
        let unmet = load.saturating_sub(fleet.capacity());
        match point {
            Some((point, _)) => {
                orders.push(HorizontalOrder::Start(point));
                self.stepped(now);
            }
            None if !unmet.is_zero() => orders.push(HorizontalOrder::Unmet(unmet)),
            None => {}
        }
    }

    /// Notes a step: the window starts empty.
    pub fn stepped(&mut self, now: Timestamp) {
        self.window.clear();
        self.last_step = Some(now);
    }
}

/// Lazy scaling out and in. See the [module](self).
#[derive(Debug)]
pub struct LazyHorizontal {
    config: LazyHorizontalConfig,
    functions: BTreeMap<FunctionId, History>,
}

impl LazyHorizontal {
    /// A scaler without functions.
    pub fn new(config: LazyHorizontalConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config, functions: BTreeMap::new() })
    }
}

impl HorizontalScaler for LazyHorizontal {
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>) {
        let LoadReport { now, function, fleet, load } = report;
        let config = &self.config;
        let history = self.functions.entry(function).or_default();
        history.note(now, load, config);
        let (capacity, cooled) = (fleet.capacity(), history.has_cooled(now, config));
        let Some((youngest, throughput)) = fleet.youngest() else {
            if !load.is_zero() {
                history.step_out(now, fleet, load, orders);
            }
            return;
        };
        if history.is_short(capacity, config) {
            if cooled {
                history.step_out(now, fleet, load, orders);
            }
            return;
        }
        let (least, deployed) = (fleet.spec().min_instances, fleet.deployed());
        let without = capacity.saturating_sub(throughput);
        let last = deployed == 1 && least == 0 && history.is_idle(now, config);
        let spare = deployed > least.max(1) && cooled && history.is_spare(without, config);
        if spare || last {
            orders.push(HorizontalOrder::Remove(youngest));
            history.stepped(now);
        }
    }

    fn forget(&mut self, function: FunctionId) {
        self.functions.remove(&function);
    }

    fn config(&self) -> FleetConfig {
        self.config.fleet.clone()
    }
}
