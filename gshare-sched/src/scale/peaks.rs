//! Lazy scaling for peaks alone, vertical first: an instance counts with its throughput at its limit.
//!
//! # Problem
//! The lazy scaler ([`lazy`](super::lazy)) rates an instance by one number, well below its abilities, to leave room for bursts. One
//! instance needs this room, but several have too much: beside a co-scaler each surges to its limit, and together they have room for the
//! burst before the next instance starts. A late start on one instance, on the other hand, makes requests late, since a burst then finds
//! no other instance. So this scaler decides *when* to start as the lazy scaler does, and *whether* by the instances' limits.
//!
//! # Terms
//! The terms of [`crate::scale`] and of [`lazy`](super::lazy), and per function:
//! - **entitled**: the number of instances a lazy scaler would have deployed on the same reports, with each rated at `rated_share` of its
//!   profile; never fewer than are deployed;
//! - **surge**: the deployed instances' throughput at their limits. A limit is twice the request (Dilu, section 3.2), so it is the highest
//!   throughput among the points within the bound on p95, with the instance's own batch and quota and at most twice its SMs. Where the
//!   profile has no such point, an instance surges to its normal throughput;
//! - **peak**: the highest of the last `keep_reports` (120); **sustained load**: the median of the last `sustained_reports` (20).
//!
//! # Algorithm
//! On each load report `x`, once the function has its minimum:
//! 1. nothing is deployed and `x > 0`: start one now;
//! 2. one step of the lazy scaler: entitled rises by one, falls by one, or stays. If it is below the number of deployed instances, drain
//!    the youngest, or stop it if it is not ready yet;
//! 3. while fewer are deployed than entitled, and `peak_share` (93 %) of the surge is below the peak, or below the sustained load and the
//!    throughput of one more instance: start one, of the most effective point within the bound on p95, else report the unmet load;
//! 4. only one is entitled, the minimum is 0, and no request came for `keep_alive`: drain it.
//!
//! ## Example
//! An instance does 117 requests/s at 30 % of the SMs and 151 at 60 %, and is rated 48. Load stays at 60: after 20 reports two are
//! entitled. One surges to 151, of which 140 count, and 60 and 117 more are above it: a second starts. Load stays at 120: three are
//! entitled, and two surge to 302, of which 280 count; 120 and 117 are below: no third. At 164, or with the first peak of 281, the
//! third starts at once. Load falls to 40: after 30 reports two are entitled, after 30 more one.
//!
//! # Invariants
//! Those of the contract of [`HorizontalScaler`](crate::scale::HorizontalScaler), and never more deployed than entitled. So the scaler
//! never has more instances than a lazy scaler with the same rating, reports and minimum. It never started more of them either, since each
//! start falls into a time of its own in which the lazy scaler has as many.
//!
//! # Cost
//! O(n + `window_reports` + `sustained_reports` + `keep_reports`) for a load report with n instances. A function takes about 1.5 KB.
use super::fleet::{Fleet, Function};
use super::lazy::{History as Window, LazyHorizontalConfig};
use crate::scale::{HorizontalAction, HorizontalError, HorizontalEvent};
use gshare_core::profile::RequestRate;
use gshare_core::{BasisPoints, ConfigError, Duration, FunctionId, Timestamp};
use std::collections::VecDeque;

crate::settings_table::settings! {
    /// Settings of [`PeakHorizontal`].
    pub struct PeakHorizontalConfig {
        /// Settings of the lazy scaler, and with them every horizontal scaler's.
        pub lazy: LazyHorizontalConfig = LazyHorizontalConfig::default(), with_lazy;
        /// Rating of an instance, as a part of its profile. 41 %: the published threshold of the paper's `RoBERTa`, 48 requests/s where
        /// its profile has 117.
        #[cfg_attr(feature = "serde", serde(rename = "rated_share_basis_points"))]
        pub rated_share: BasisPoints = BasisPoints::percent(41), with_rated_share;
        /// Load reports for the median, the sustained load. 20: bursts of some seconds do not show.
        pub sustained_reports: u32 = 20, with_sustained_reports;
        /// Load reports for the highest, the peak. 120: two minutes, a few cold starts.
        pub keep_reports: u32 = 120, with_keep_reports;
        /// Part of the surge that counts. 93 %: above it queues do not empty between two requests.
        #[cfg_attr(feature = "serde", serde(rename = "peak_share_basis_points"))]
        pub peak_share: BasisPoints = BasisPoints::percent(93), with_peak_share;
    }
}

impl PeakHorizontalConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        self.lazy.validate()?;
        for (field, share) in [("rated_share", self.rated_share), ("peak_share", self.peak_share)] {
            ConfigError::unless(!share.is_zero(), field, share, "need more than 0, at most 100%")?;
        }
        gshare_core::check_fields!(self { sustained_reports, keep_reports in 1..=3600, "need 1 to 3600"; })
    }
}

/// `share` of a rate, rounded up.
fn part(share: BasisPoints, of: RequestRate) -> RequestRate {
    let part = (u128::from(of.as_milli()) * u128::from(share.get())).div_ceil(10_000);
    // A share is at most the whole: it fits.
    RequestRate::from_milli(u64::try_from(part).unwrap_or(u64::MAX))
}

/// Requests per second that one more instance would answer.
fn another(known: &Function<History>) -> RequestRate {
    known.best().map_or(RequestRate::ZERO, |point| point.throughput)
}

/// A function's history.
#[derive(Debug, Default)]
struct History {
    window: Window,
    /// The last reports, also from before the last step; the newest at the back.
    reports: VecDeque<RequestRate>,
    entitled: u32,
}

/// Lazy scaling by peaks. See the [module](self).
///
/// # Differences from the paper
/// Dilu (section 3.4.2) has steps 1, 2 and 4 only, and starts all entitled instances.
#[derive(Debug)]
pub struct PeakHorizontal {
    config: PeakHorizontalConfig,
    fleet: Fleet<History>,
    /// The last reports of one function, in no order.
    last: Vec<RequestRate>,
}

impl PeakHorizontal {
    /// A scaler without functions.
    pub fn new(config: PeakHorizontalConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { fleet: Fleet::new(config.lazy.fleet.clone()), config, last: Vec::new() })
    }

    fn decide(&mut self, function: FunctionId, load: RequestRate, actions: &mut Vec<HorizontalAction>) {
        let now = self.fleet.now();
        let Some(known) = self.fleet.get_mut(function) else { return };
        let (deployed, least, most) =
            (known.deployed(), known.spec().min_instances, known.spec().max_instances);
        let history = &mut known.state;
        if history.reports.len() >= self.config.sustained_reports.max(self.config.keep_reports) as usize {
            history.reports.pop_front();
        }
        history.reports.push_back(load);
        history.window.note(now, load, &self.config.lazy);
        history.entitled = history.entitled.clamp(deployed, most);
        if deployed == 0 {
            history.entitled = u32::from(!load.is_zero());
            if history.entitled > 0 {
                history.window.stepped(now);
            }
        } else if history.entitled == 1 && least == 0 && history.window.is_idle(now, &self.config.lazy) {
            history.entitled = 0;
            history.window.stepped(now);
        } else {
            self.step(function);
        }
        let Some(known) = self.fleet.get(function) else { return };
        if known.state.entitled < deployed {
            if let Some((youngest, _)) = known.youngest() {
                self.fleet.take_away(youngest, actions);
            }
        } else {
            self.grow(function, load, actions);
        }
        let known = self.fleet.get(function);
        debug_assert!(
            known.is_none_or(|known| known.deployed() <= known.state.entitled),
            "never more than the lazy scaler has"
        );
    }

    /// Step 2: the lazy scaler's step with the entitled instances.
    fn step(&mut self, function: FunctionId) {
        let now = self.fleet.now();
        let Some(known) = self.fleet.get_mut(function) else { return };
        let Some((_, youngest)) = known.youngest() else { return };
        let missing = known.state.entitled - known.deployed();
        let another = another(known);
        let capacity = known.capacity().saturating_add(another.saturating_mul(u64::from(missing)));
        let without = capacity.saturating_sub(if missing > 0 { another } else { youngest });
        let (least, most) = (known.spec().min_instances, known.spec().max_instances);
        let (config, share) = (&self.config.lazy, self.config.rated_share);
        let history = &mut known.state;
        if !history.window.has_cooled(now, config) {
            return;
        }
        if history.window.is_short(part(share, capacity), config) {
            if history.entitled < most {
                history.entitled += 1;
                history.window.stepped(now);
            }
        } else if history.entitled > least.max(1) && history.window.is_spare(part(share, without), config) {
            history.entitled -= 1;
            history.window.stepped(now);
        }
    }

    /// Step 3.
    fn grow(&mut self, function: FunctionId, load: RequestRate, actions: &mut Vec<HorizontalAction>) {
        let now = self.fleet.now();
        let Some(known) = self.fleet.get(function) else { return };
        let reports = |count: u32| known.state.reports.iter().rev().take(count as usize).copied();
        let peak = reports(self.config.keep_reports).max().unwrap_or(load);
        self.last.clear();
        self.last.extend(reports(self.config.sustained_reports));
        // With an even number of reports, the higher one in the middle.
        let middle = self.last.len() / 2;
        let sustained = *self.last.select_nth_unstable(middle).1;
        let wanted = peak.max(sustained.saturating_add(another(known)));
        while let Some(known) = self.fleet.get(function) {
            let enough = known.deployed() > 0 && wanted <= part(self.config.peak_share, known.surge());
            // At the maximum of instances, a rest beyond the deployed ones stays unmet.
            let full = known.deployed() >= known.spec().max_instances;
            if enough || (known.deployed() >= known.state.entitled && !full) {
                return;
            }
            let point = known.startable(now).next().map(|(point, _)| point).filter(|_| !full);
            let Some(point) = point else {
                let rate = load.saturating_sub(known.capacity());
                if !rate.is_zero() {
                    actions.push(HorizontalAction::Unmet { function, rate });
                }
                return;
            };
            self.fleet.start(function, point, actions);
        }
    }
}

super::fleet::scaler!(PeakHorizontal);
