//! Scaling out and in by peaks, vertical first: an instance is taken for what it can do at its limit.
//!
//! # Problem
//! The lazy scaler takes an instance for one number, and looks at how long load stays above it. Taken for little, it keeps
//! instances that nobody needs; taken for much, the first burst finds too few. But beside a co-scaler an instance is two
//! numbers: what it does at its request it can do for hours, and what it does at its limit for a while, since others
//! give way. Load that stays should fit the first with room to spare, peaks the second.
//!
//! # Terms
//! The words of [`gshare_core::scale`], and per function:
//! - **deployed**: instances that are starting (within their deadline) or ready;
//! - **capacity**: their throughputs at their points added up; an instance's request is the SM share of its point;
//! - **surge**: the same at their limits. A limit is twice the request (Dilu, section 3.2): the highest throughput among the
//!   points that are fast enough, with the batch and quota of its own and at most twice its SMs. Where the profile has
//!   no such point, an instance surges to what it does anyway;
//! - **sustained load**: the median of the last `sustained_reports` (40); **peak**: the last report, and for scaling in the highest
//!   of the last `keep_reports` (60).
//!
//! # Algorithm
//! On each load report `x`, after the minimum has been seen to:
//! 1. *nothing is deployed and `x > 0`*: start one now;
//! 2. while the sustained load is above `sustained_share` of the capacity, or `x` is above `peak_share` of the surge: start one, of
//!    the most effective point that is fast enough; where none may be started, report the load that is unmet;
//! 3. *else*, if without the youngest neither is so, for the highest of the kept reports in place of `x`, and the last start was
//!    `cooldown` ago: drain that one, or stop it if it is not ready yet; never below the minimum, and never the last;
//! 4. *only one is deployed, the minimum is 0, and no request came for `keep_alive`*: drain it.
//!
//! ## Example
//! An instance does 117 requests/s at 30 % of the SMs and 151 at 60 %. `sustained_share` is 57 %, `peak_share` 93 %: one is
//! enough for a sustained load of 66 and peaks of 140. Load is 60 and jumps to 120 for ten seconds: the co-scaler takes what is
//! needed from its neighbours, nothing is started. It jumps to 150: a second is started at once, for one would be late with
//! each request. It falls back to 60; a minute later the highest report of the minute is 60, and the second is drained.
//!
//! # Invariants
//! Those of the contract of [`HorizontalScaler`]; and after a step up neither condition of step 2 holds unless something is
//! reported unmet; after a step down neither holds.
//!
//! # Cost
//! O(n + `sustained_reports` + `keep_reports`) for a load report with n instances; O(p) for a start over p points. About 1 KB per
//! function and its profile.
//!
//! # Differences from the paper
//! Dilu (section 3.4.2) starts when at least 20 of 40 reports are above what the instances are taken for, and takes away when 30
//! are below that of one less; see [`lazy`](super::lazy). There a peak is nothing that counts, and what an instance can do at
//! its limit neither.
use super::ConfigError;
use super::fleet::{Fleet, FleetConfig};
use gshare_core::profile::RequestRate;
use gshare_core::scale::{
    HorizontalAction, HorizontalError, HorizontalEvent, HorizontalScaler, InstanceCounts,
};
use gshare_core::{BasisPoints, Duration, Engine, FunctionId, Timestamp};
use std::collections::VecDeque;

/// Settings of [`PeakHorizontal`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct PeakHorizontalConfig {
    /// What every horizontal scaler has.
    pub fleet: FleetConfig,
    /// Load reports whose median is the sustained load. 40, the paper's window.
    pub sustained_reports: u32,
    /// Load reports whose highest must fit before an instance goes. 60: a minute, a few cold starts.
    pub keep_reports: u32,
    /// Part of the capacity that sustained load may take. 57 %: in a burst of twice the load an instance surges to 1.3 times
    /// its capacity at most, and 0.57 x 2 / 1.3 is below `peak_share`.
    #[cfg_attr(feature = "serde", serde(rename = "sustained_share_basis_points"))]
    pub sustained_share: BasisPoints,
    /// Part of the surge that a peak may take. 93 %: above it queues do not empty between two requests.
    #[cfg_attr(feature = "serde", serde(rename = "peak_share_basis_points"))]
    pub peak_share: BasisPoints,
    /// Time after a start in which nothing is taken away. 30 s: what was started for is seen by then.
    #[cfg_attr(feature = "serde", serde(rename = "cooldown_ns"))]
    pub cooldown: Duration,
    /// Time without a request after which the last instance goes, where the minimum is 0. 60 s: a few cold starts long.
    #[cfg_attr(feature = "serde", serde(rename = "keep_alive_ns"))]
    pub keep_alive: Duration,
}

impl Default for PeakHorizontalConfig {
    fn default() -> Self {
        let percent = |percent| BasisPoints::from_percent(percent).unwrap_or(BasisPoints::WHOLE);
        Self {
            fleet: FleetConfig::default(),
            sustained_reports: 40,
            keep_reports: 60,
            sustained_share: percent(57),
            peak_share: percent(93),
            cooldown: Duration::from_secs(30),
            keep_alive: Duration::from_secs(60),
        }
    }
}

impl PeakHorizontalConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        self.fleet.validate()?;
        let check = |ok: bool, field, value: String, bound| {
            if ok { Ok(()) } else { Err(ConfigError { field, value, bound }) }
        };
        for (field, reports) in
            [("sustained_reports", self.sustained_reports), ("keep_reports", self.keep_reports)]
        {
            check((1..=3600).contains(&reports), field, reports.to_string(), "need 1 to 3600")?;
        }
        for (field, share) in [("sustained_share", self.sustained_share), ("peak_share", self.peak_share)] {
            check(!share.is_zero(), field, share.to_string(), "need more than 0, at most 100%")?;
        }
        let day = Duration::from_secs(86_400);
        for (field, time) in [("cooldown", self.cooldown), ("keep_alive", self.keep_alive)] {
            check(time <= day, field, time.to_string(), "need at most one day")?;
        }
        Ok(())
    }
}

/// What is kept of a function.
#[derive(Debug, Default)]
struct History {
    /// The newest at the back.
    reports: VecDeque<RequestRate>,
    started: Option<Timestamp>,
    /// When a request last came.
    busy: Option<Timestamp>,
}

/// What load asks for: as much of the capacity, as much of the surge.
#[derive(Debug, Clone, Copy)]
struct Load {
    sustained: RequestRate,
    peak: RequestRate,
}

impl PeakHorizontalConfig {
    /// Whether this much is too much for so much.
    fn exceeds(&self, load: Load, capacity: RequestRate, surge: RequestRate) -> bool {
        let above = |load: RequestRate, of: RequestRate, share: BasisPoints| {
            u128::from(load.as_milli()) * 10_000 > u128::from(of.as_milli()) * u128::from(share.get())
        };
        above(load.sustained, capacity, self.sustained_share) || above(load.peak, surge, self.peak_share)
    }
}

/// Scaling by peaks. See the [module](self).
#[derive(Debug)]
pub struct PeakHorizontal {
    config: PeakHorizontalConfig,
    fleet: Fleet<History>,
    /// The reports of one function, sorted.
    sorted: Vec<RequestRate>,
}

impl PeakHorizontal {
    /// A scaler without functions.
    pub fn new(config: PeakHorizontalConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { fleet: Fleet::new(config.fleet.clone()), config, sorted: Vec::new() })
    }

    /// The median of the last reports; of an even number the higher one in the middle.
    fn median(&mut self, function: FunctionId) -> RequestRate {
        let Some(known) = self.fleet.get(function) else { return RequestRate::ZERO };
        let last = known.state.reports.iter().rev().take(self.config.sustained_reports as usize);
        self.sorted.clear();
        self.sorted.extend(last);
        let middle = self.sorted.len() / 2;
        if self.sorted.is_empty() {
            return RequestRate::ZERO;
        }
        *self.sorted.select_nth_unstable(middle).1
    }

    fn decide(&mut self, function: FunctionId, load: RequestRate, actions: &mut Vec<HorizontalAction>) {
        let now = self.fleet.now();
        let Some(known) = self.fleet.get_mut(function) else { return };
        let state = &mut known.state;
        if state.reports.len() >= self.config.sustained_reports.max(self.config.keep_reports) as usize {
            state.reports.pop_front();
        }
        state.reports.push_back(load);
        if !load.is_zero() || state.busy.is_none() {
            state.busy = Some(now);
        }
        let wanted = Load { sustained: self.median(function), peak: load };
        if self.grow(function, wanted, actions) {
            return;
        }
        let Some(known) = self.fleet.get(function) else { return };
        let (state, least, deployed) = (&known.state, known.spec().min_instances, known.deployed());
        let Some((youngest, throughput, surge)) = known.youngest_with_surge() else { return };
        let kept = state.reports.iter().rev().take(self.config.keep_reports as usize);
        let peak = kept.copied().max().unwrap_or(load);
        let without = known.capacity().saturating_sub(throughput);
        let cooled = state.started.is_none_or(|at| now.saturating_since(at) >= self.config.cooldown);
        let fits =
            !self.config.exceeds(Load { peak, ..wanted }, without, known.surge().saturating_sub(surge));
        let idle = now.saturating_since(state.busy.unwrap_or(now));
        let last = deployed == 1 && least == 0 && idle >= self.config.keep_alive;
        if last || (deployed > least.max(1) && cooled && fits) {
            self.fleet.take_away(youngest, actions);
        }
    }

    /// Steps 1 and 2. Whether anything was missing.
    fn grow(&mut self, function: FunctionId, wanted: Load, actions: &mut Vec<HorizontalAction>) -> bool {
        let now = self.fleet.now();
        let mut short = false;
        while let Some(known) = self.fleet.get_mut(function) {
            let (capacity, surge) = (known.capacity(), known.surge());
            let missing = match known.deployed() {
                0 => !wanted.peak.is_zero(),
                _ => self.config.exceeds(wanted, capacity, surge),
            };
            if !missing {
                break;
            }
            short = true;
            let room = known.deployed() < known.spec().max_instances;
            let point = known.startable(now).next().map(|(point, _)| point).filter(|_| room);
            let Some(point) = point else {
                let rate = wanted.peak.max(wanted.sustained).saturating_sub(capacity);
                if !rate.is_zero() {
                    actions.push(HorizontalAction::Unmet { function, rate });
                }
                break;
            };
            known.state.started = Some(now);
            self.fleet.start(function, point, actions);
        }
        short
    }
}

impl Engine for PeakHorizontal {
    type Event = HorizontalEvent;
    type Action = HorizontalAction;
    type Error = HorizontalError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: HorizontalEvent,
        actions: &mut Vec<HorizontalAction>,
    ) -> Result<(), HorizontalError> {
        if let Some((function, load)) = self.fleet.take(now, event, actions)? {
            if let Some(load) = load {
                self.decide(function, load, actions);
            }
            self.fleet.invariants(function);
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.fleet.next_deadline()
    }
}

impl HorizontalScaler for PeakHorizontal {
    fn instances(&self, function: FunctionId) -> Option<InstanceCounts> {
        self.fleet.counts(function)
    }

    fn tick(&self) -> Duration {
        self.fleet.config().tick
    }
}
