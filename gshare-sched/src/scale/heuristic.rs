//! Heuristic scaling by profile (FaST-GShare, section 3.4.1, Algorithm 1), with its gaps closed.
//!
//! # Problem
//! A function has a profile: so many requests per second at this SM share and that quota. Its load changes. Choose how
//! many instances to run and at which points, so that the load is served within the SLO on as little of the GPUs as
//! possible.
//!
//! # Terms
//! The words of [`gshare_core::scale`] and [`gshare_core::profile`], and per function:
//! - `R`, **predicted load**: the highest of the last 10 load reports;
//! - **target**: `R` and `headroom` (10 %) more; **capacity**: throughputs `T` of the starting and ready instances added up;
//! - **candidates**: the points whose p95 is within the function's bound and that were not refused just now;
//! - **RPR**: throughput per area `T / (S x Q)`.
//!
//! # Algorithm
//! On each load report, after the minimum has been seen to:
//! 1. *target > capacity*: `gap = target - capacity = n * T_eff + r`, where `p_eff` is the candidate of the highest RPR. Start
//!    `n` instances at `p_eff`, and if `r > 0` one at `p_ideal`: the candidate of the smallest area with `T >= r`, of equal ones
//!    that with the smallest `T`. What the maximum of instances or the lack of candidates leaves over is reported unmet.
//! 2. *capacity > target and `dead_band` (20 %) more*: go once through the instances, RPR ascending, then `T` ascending, then the
//!    youngest first, and take each away whose `T` is at most what is left of the difference; never below the minimum, and
//!    not within `down_cooldown` of a start.
//! 3. Else nothing: within the dead band load may swing without anybody being started or stopped.
//!
//! ## Example
//! Points are (12 %, 100 %) 68 requests/s, (12 %, 40 %) 35, (6 %, 40 %) 24. Per per cent of area these are 5.7, 7.3 and 10:
//! `p_eff` is the last. Load is 55, the target 60.5: `60.5 = 2 x 24 + 12.5`. Two are started at `p_eff`; 12.5 needs one more, and
//! the smallest area with `T >= 12.5` is `p_eff` again. Capacity is 72. Load falls to 20: after ten reports the target is 22,
//! and with the dead band 26.4. 45.6 are too many: one goes (21.6 are left, less than the next one's 24).
//!
//! # Invariants
//! Those of the contract of [`HorizontalScaler`]; and after a step up, the capacity is at least the target unless something
//! is reported unmet; after a step down, it is at least the target and the dead band.
//!
//! # Cost
//! O(p) for a step up over p points, O(n log n) for a step down over n instances, O(10) for a report that does
//! nothing.
//!
//! # Differences from the paper
//! 1. A gap of 0 starts a pod (line 3). Nothing is done within a dead band.
//! 2. The remainder is said to be above 0 and may be 0; then no residual pod.
//! 3. `T > r` refuses an exact fit; `T >= r`. Without `p_ideal`, `p_eff` is taken; without candidates the load is reported unmet.
//! 4. `p_ideal` minimises `T - r`, which once SMs are saturated is not "minimum but sufficient": it minimises the area.
//! 5. There is no test of the SLO: the highest RPR is then often the smallest point, whose p95 is seconds. Candidates are
//!    filtered by latency first.
//! 6. A set union of `n` equal tuples is one. Instances have names, and count once they are started; one that is refused does
//!    not.
//! 7. The scale-down loop never ends if the first pod is larger than the gap. One pass, and it looks at all of them.
//! 8. Ties are not given: see step 2.
//! 9. How load is predicted is not given: see the terms.
use super::ConfigError;
use super::fleet::{Fleet, FleetConfig};
use gshare_core::profile::RequestRate;
use gshare_core::scale::{
    HorizontalAction, HorizontalError, HorizontalEvent, HorizontalScaler, InstanceCounts,
};
use gshare_core::{BasisPoints, Duration, Engine, FunctionId, Timestamp};
use std::collections::VecDeque;

/// Settings of [`HeuristicHorizontal`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct HeuristicHorizontalConfig {
    /// What every horizontal scaler has.
    pub fleet: FleetConfig,
    /// Load reports over which the highest is the prediction. 10: about as long as a start takes.
    pub predict_reports: u32,
    /// Capacity beyond the predicted load. 10 %: what comes while an instance starts, and room for uneven arrivals.
    #[cfg_attr(feature = "serde", serde(rename = "headroom_basis_points"))]
    pub headroom: BasisPoints,
    /// Capacity beyond the target that is put up with. 20 %.
    #[cfg_attr(feature = "serde", serde(rename = "dead_band_basis_points"))]
    pub dead_band: BasisPoints,
    /// Time after a start in which nothing is taken away. 10 s.
    #[cfg_attr(feature = "serde", serde(rename = "down_cooldown_ns"))]
    pub down_cooldown: Duration,
}

impl Default for HeuristicHorizontalConfig {
    fn default() -> Self {
        let percent = |percent| BasisPoints::from_percent(percent).unwrap_or(BasisPoints::WHOLE);
        Self {
            fleet: FleetConfig::default(),
            predict_reports: 10,
            headroom: percent(10),
            dead_band: percent(20),
            down_cooldown: Duration::from_secs(10),
        }
    }
}

impl HeuristicHorizontalConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        self.fleet.validate()?;
        let reports = self.predict_reports;
        if !(1..=3600).contains(&reports) {
            let value = reports.to_string();
            return Err(ConfigError { field: "predict_reports", value, bound: "need 1 to 3600" });
        }
        if self.down_cooldown > Duration::from_secs(86_400) {
            let value = self.down_cooldown.to_string();
            return Err(ConfigError { field: "down_cooldown", value, bound: "need at most one day" });
        }
        Ok(())
    }
}

/// `rate` and `more` of it, rounded up.
fn with(rate: RequestRate, more: BasisPoints) -> RequestRate {
    let raised = u128::from(rate.as_milli()) * (10_000 + u128::from(more.get()));
    RequestRate::from_milli(u64::try_from(raised.div_ceil(10_000)).unwrap_or(u64::MAX))
}

/// What is kept of a function.
#[derive(Debug, Default)]
struct History {
    reports: VecDeque<RequestRate>,
    started: Option<Timestamp>,
}

/// Heuristic scaling by profile. See the [module](self).
#[derive(Debug)]
pub struct HeuristicHorizontal {
    config: HeuristicHorizontalConfig,
    fleet: Fleet<History>,
}

impl HeuristicHorizontal {
    /// A scaler without functions.
    pub fn new(config: HeuristicHorizontalConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { fleet: Fleet::new(config.fleet.clone()), config })
    }

    fn decide(&mut self, function: FunctionId, load: RequestRate, actions: &mut Vec<HorizontalAction>) {
        let now = self.fleet.now();
        let Some(known) = self.fleet.get_mut(function) else { return };
        let reports = &mut known.state.reports;
        if reports.len() >= self.config.predict_reports as usize {
            reports.pop_front();
        }
        reports.push_back(load);
        let predicted = reports.iter().copied().max().unwrap_or(load);
        let target = with(predicted, self.config.headroom);
        let enough = with(target, self.config.dead_band);
        let capacity = known.capacity();
        if target > capacity {
            self.scale_up(function, target.saturating_sub(capacity), actions);
        } else if capacity > enough
            && known.state.started.is_none_or(|at| now.saturating_since(at) >= self.config.down_cooldown)
        {
            self.scale_down(function, capacity.saturating_sub(enough), actions);
        }
    }

    fn scale_up(&mut self, function: FunctionId, gap: RequestRate, actions: &mut Vec<HorizontalAction>) {
        let now = self.fleet.now();
        let Some(known) = self.fleet.get_mut(function) else { return };
        let room = u64::from(known.spec().max_instances - known.deployed());
        let Some((best, point)) = known.startable(now).next() else {
            actions.push(HorizontalAction::Unmet { function, rate: gap });
            return;
        };
        let throughput = point.throughput;
        let whole = (gap.as_milli() / throughput.as_milli()).min(room);
        let rest = gap.saturating_sub(throughput.saturating_mul(whole));
        let sufficient = known.startable(now).filter(|(_, point)| point.throughput >= rest);
        let ideal = sufficient.min_by_key(|(_, point)| (point.area(), point.throughput, point.setting()));
        let ideal = ideal.map_or(best, |(ideal, _)| ideal);
        if room > 0 {
            known.state.started = Some(now);
        }
        for _ in 0..whole {
            self.fleet.start(function, best, actions);
        }
        if rest.is_zero() {
            return;
        }
        if whole < room {
            self.fleet.start(function, ideal, actions);
        } else {
            actions.push(HorizontalAction::Unmet { function, rate: rest });
        }
    }

    fn scale_down(&mut self, function: FunctionId, excess: RequestRate, actions: &mut Vec<HorizontalAction>) {
        let Some(known) = self.fleet.get(function) else { return };
        let mut spare = known.deployed().saturating_sub(known.spec().min_instances);
        let mut excess = excess;
        for (instance, throughput) in known.by_efficacy() {
            if spare > 0 && throughput <= excess {
                spare -= 1;
                excess = excess.saturating_sub(throughput);
                self.fleet.take_away(instance, actions);
            }
        }
    }
}

impl Engine for HeuristicHorizontal {
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

impl HorizontalScaler for HeuristicHorizontal {
    fn instances(&self, function: FunctionId) -> Option<InstanceCounts> {
        self.fleet.counts(function)
    }

    fn tick(&self) -> Duration {
        self.fleet.config().tick
    }
}
