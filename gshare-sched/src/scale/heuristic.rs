//! Heuristic scaling by profile (FaST-GShare, section 3.4.1, Algorithm 1), with its gaps closed.
//!
//! # Problem
//! A function has a profile, its requests per second at each SM share and quota, and its load changes. Choose the number of instances and
//! their points, so that they serve the load within the SLO on as little of the GPUs as possible.
//!
//! # Terms
//! The terms of [`crate::scale`] and [`gshare_core::profile`], and per function:
//! - `R`, **predicted load**: the higher of two figures from the last 20 load reports. One is their line of least squares at the time when
//!   an instance started now is ready (after the last start's time, at most 10 reports), within the reports and the median difference's
//!   addition to them until then. The other is the least load to explain the highest report `x` of the last 10, `x - 2 sqrt(D x)`, with
//!   `D` as below but without the largest difference, so that a step is seen at once;
//! - **target**: `R` and `headroom` (10 %) more. For a function with a bound on p95 (half of its latency target) it is at least the
//!   capacity at which no more than `late_share` (1 %) of the requests wait longer than the rest of the latency target, by the arrivals'
//!   unevenness: their index of dispersion `D`, from the differences between the same reports;
//! - **capacity**: throughputs `T` of the starting and ready instances added up;
//! - **candidates**: the points with a p95 within the function's bound and without a recent refusal;
//! - **RPR**: throughput per area `T / (S x Q)`.
//!
//! # Algorithm
//! On each load report, once the function has its minimum:
//! 1. *target > capacity*: `gap = target - capacity = n * T_eff + r`, where `p_eff` is the candidate of the highest RPR. Start `n`
//!    instances at `p_eff`, and if `r > 0` one at `p_ideal`: the candidate of the smallest area with `T >= r`, of equal areas the
//!    smallest `T`. Report any rest left by the maximum of instances or the lack of candidates as unmet.
//! 2. *capacity > target and `dead_band` (10 %) more*: go once through the instances, RPR ascending, then `T` ascending, then the youngest
//!    first. Take away each with `T` at most the rest of the difference; never below the minimum, nor within `down_cooldown` of a start.
//! 3. Else nothing: within the dead band the load may swing without a start or a removal.
//!
//! ## Example
//! Points are (12 %, 100 %) 68 requests/s, (12 %, 40 %) 35, (6 %, 40 %) 24. Per per cent of area these are 5.7, 7.3 and 10: `p_eff` is the
//! last. Load is 55, the target 60.5: `60.5 = 2 x 24 + 12.5`. Two instances start at `p_eff`; 12.5 needs one more, and the smallest area
//! with `T >= 12.5` is `p_eff` again. Capacity is 72. Load falls to 20: after ten reports the target is 22, and 24.2 with the dead band.
//! 47.8 are too many, so one instance goes (23.8 are left, less than the next instance's 24).
//!
//! # Invariants
//! Those of the contract of [`HorizontalScaler`](crate::scale::HorizontalScaler). After a step up, the capacity is at least the target
//! unless the scaler reports an unmet load; after a step down, it is at least the target and the dead band.
//!
//! # Cost
//! O(p) for a step up over p points, O(n log n) for a step down over n instances, O(`predict_reports`) for a report without a step.
use super::fleet::{Fleet, FleetConfig, Function};
use super::forecast::Forecast;
use super::queue::{Late, Queue};
use crate::scale::HorizontalAction;
use gshare_core::profile::RequestRate;
use gshare_core::{BasisPoints, ConfigError, Duration, FunctionId, Timestamp};
use std::collections::VecDeque;

crate::settings_table::settings! {
    /// Settings of [`HeuristicHorizontal`].
    pub struct HeuristicHorizontalConfig {
        /// Settings that every horizontal scaler has.
        pub fleet: FleetConfig = FleetConfig::default(), with_fleet;
        /// Load reports for the prediction. 20: the end of a line through them is off by half as much as a report.
        pub predict_reports: u32 = 20, with_predict_reports;
        /// Capacity beyond the predicted load, at any evenness of arrivals. 10 %: the growth while an instance starts.
        #[cfg_attr(feature = "serde", serde(rename = "headroom_basis_points"))]
        pub headroom: BasisPoints = BasisPoints::percent(10), with_headroom;
        /// Part of the requests with leave to exceed twice the function's bound on p95 by their wait. 1 %. With 0, waits are ignored.
        #[cfg_attr(feature = "serde", serde(rename = "late_share_basis_points"))]
        pub late_share: BasisPoints = BasisPoints::percent(1), with_late_share;
        /// Tolerated capacity beyond the target. 10 %: twice the error of the prediction at 100 requests/s.
        #[cfg_attr(feature = "serde", serde(rename = "dead_band_basis_points"))]
        pub dead_band: BasisPoints = BasisPoints::percent(10), with_dead_band;
        /// Time after a start without a removal. 10 s.
        #[cfg_attr(feature = "serde", serde(rename = "down_cooldown_ns"))]
        pub down_cooldown: Duration = Duration::from_secs(10), with_down_cooldown;
        /// Whether load is also reported before a tick is over, while more requests wait than are served at once. By default so: a step is
        /// seen half a tick sooner.
        pub early_reports: bool = true, with_early_reports;
    }
}

impl HeuristicHorizontalConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        self.fleet.validate()?;
        gshare_core::check_fields!(self {
            predict_reports in 1..=3600, "need 1 to 3600";
            down_cooldown in ..=Duration::from_secs(86_400), "need at most one day";
        })
    }
}

/// `rate` and `more` of it, rounded up.
fn with(rate: RequestRate, more: BasisPoints) -> RequestRate {
    let raised = u128::from(rate.as_milli()) * (10_000 + u128::from(more.get()));
    RequestRate::from_milli(u64::try_from(raised.div_ceil(10_000)).unwrap_or(u64::MAX))
}

/// The highest rate for which [`with`] `more` stays within `rate`.
fn without(rate: RequestRate, more: BasisPoints) -> RequestRate {
    let whole = 10_000 + u64::from(more.get());
    let (times, rest) = (rate.as_milli() / whole, rate.as_milli() % whole);
    RequestRate::from_milli(times * 10_000 + rest * 10_000 / whole)
}

/// A function's history.
#[derive(Debug, Default)]
struct History {
    reports: VecDeque<RequestRate>,
    started: Option<Timestamp>,
}

/// Heuristic scaling by profile. See the [module](self).
///
/// # Differences from the paper
/// 1. A gap of 0 starts a pod (line 3). The scaler does nothing within a dead band.
/// 2. The paper calls the remainder positive, but it may be 0. No residual pod starts then.
/// 3. `T > r` refuses an exact fit; the scaler tests `T >= r`. Without `p_ideal` it takes `p_eff`, and without candidates it reports the
///    load unmet.
/// 4. `p_ideal` minimises `T - r`, which once SMs are saturated is not "minimum but sufficient". The scaler minimises the area.
/// 5. The paper has no test of the SLO, so the highest RPR is often the smallest point, with a p95 of seconds. The scaler filters
///    candidates by latency first.
/// 6. A set union of `n` equal tuples is one tuple. Instances have names, and count from their start unless it is refused.
/// 7. The scale-down loop never ends if the first pod is larger than the gap. The scaler makes one pass over all pods.
/// 8. The paper leaves ties open: see step 2.
/// 9. The paper leaves the prediction of load open: see the terms.
/// 10. A closed loop measures throughput, so no more requests wait than are served. With free arrivals, 110 a second in a Poisson process
///     to four instances of 34.5, 6 of 100 wait for more than 40 ms: see the target.
#[derive(Debug)]
pub struct HeuristicHorizontal {
    config: HeuristicHorizontalConfig,
    fleet: Fleet<History>,
    /// `None` where the scaler ignores queues.
    late: Option<Late>,
}

impl HeuristicHorizontal {
    /// A scaler without functions.
    pub fn new(config: HeuristicHorizontalConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let late = Some(config.late_share).filter(|late| !late.is_zero()).map(Late::new);
        Ok(Self { fleet: Fleet::new(config.fleet.clone()), config, late })
    }

    fn forecast(&self, known: &Function<History>) -> Forecast {
        Forecast::of(&known.state.reports, self.config.fleet.tick, known.start_time())
    }

    /// The queue of a function before its most effective point; `None` where no setting bounds the wait.
    fn queue(&self, known: &Function<History>, forecast: Forecast) -> Option<Queue> {
        let (late, max_p95, server) = (self.late?, known.spec().max_p95?, known.best()?);
        // p95 is at most half of a request's latency target.
        let wait = max_p95.saturating_mul(2).saturating_sub(server.p95);
        Some(Queue::new(forecast.load, server.throughput, wait, forecast.dispersion, late))
    }

    fn decide(&mut self, function: FunctionId, load: RequestRate, actions: &mut Vec<HorizontalAction>) {
        let now = self.fleet.now();
        let Some(known) = self.fleet.get_mut(function) else { return };
        let reports = &mut known.state.reports;
        if reports.len() >= self.config.predict_reports as usize {
            reports.pop_front();
        }
        reports.push_back(load);
        let Some(known) = self.fleet.get(function) else { return };
        let predicted = self.forecast(known);
        let target = with(predicted.load, self.config.headroom);
        let (capacity, queue) = (known.capacity(), self.queue(known, predicted));
        let waits = |capacity| queue.is_some_and(|queue| !queue.fits(capacity));
        let cooled =
            known.state.started.is_none_or(|at| now.saturating_since(at) >= self.config.down_cooldown);
        if target > capacity || waits(capacity) {
            let enough = queue.map_or(target, |queue| target.max(queue.least_capacity()));
            self.scale_up(function, enough.saturating_sub(capacity), actions);
        } else if cooled {
            // Testing a capacity costs a twentieth of computing the least one.
            let band = self.config.dead_band;
            let enough = |capacity| {
                let but_the_band = without(capacity, band);
                target <= but_the_band && !waits(but_the_band)
            };
            self.scale_down(function, enough, actions);
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

    /// `enough` tells whether a capacity suffices.
    fn scale_down(
        &mut self,
        function: FunctionId,
        enough: impl Fn(RequestRate) -> bool,
        actions: &mut Vec<HorizontalAction>,
    ) {
        let Some(known) = self.fleet.get(function) else { return };
        let mut left = known.capacity();
        let mut spare = known.deployed().saturating_sub(known.spec().min_instances);
        // Mostly not even the smallest instance can go, so there is nothing to sort.
        let smallest = if spare > 0 { known.smallest() } else { None };
        if !smallest.is_some_and(|smallest| enough(left.saturating_sub(smallest))) {
            return;
        }
        for (instance, throughput) in known.by_efficacy() {
            let rest = left.saturating_sub(throughput);
            if spare > 0 && enough(rest) {
                (spare, left) = (spare - 1, rest);
                self.fleet.take_away(instance, actions);
            }
        }
    }
}

crate::horizontal_scaler!(HeuristicHorizontal, |this| this.config.early_reports);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::{FunctionScale, HorizontalEvent};
    use gshare_core::profile::{ProfilePoint, ProfileTable};
    use gshare_core::{Engine, Quota, SmShare};
    use proptest::prelude::*;

    /// Step 2 of the essay as written: finds the least capacity, and shares out the difference.
    fn taken_away(scaler: &HeuristicHorizontal, function: FunctionId) -> Vec<HorizontalAction> {
        let known = scaler.fleet.get(function).unwrap();
        let predicted = scaler.forecast(known);
        let target = with(predicted.load, scaler.config.headroom);
        let at_least = target.max(scaler.queue(known, predicted).unwrap().least_capacity());
        let capacity = known.capacity();
        let mut excess = capacity.saturating_sub(with(at_least, scaler.config.dead_band));
        let mut spare = known.deployed() - known.spec().min_instances;
        let mut order = known.by_efficacy();
        order.retain(|&(_, throughput)| {
            let goes = spare > 0 && throughput <= excess;
            if goes {
                (spare, excess) = (spare - 1, excess.saturating_sub(throughput));
            }
            goes
        });
        order.iter().map(|&(instance, _)| HorizontalAction::Drain { instance }).collect()
    }

    proptest! {
        #[test]
        fn without_is_the_most_that_with_stays_below(rate in any::<u64>(), share in 0u16..=10_000) {
            let (rate, more) = (RequestRate::from_milli(rate), BasisPoints::new(share).unwrap());
            let most = without(rate, more);
            prop_assert!(with(most, more) <= rate);
            let above = with(most.saturating_add(RequestRate::from_milli(1)), more);
            prop_assert!(above > rate || above.as_milli() == u64::MAX);
        }

        /// Testing each capacity takes the same instances away as computing the least one.
        #[test]
        fn what_goes_is_what_the_plain_search_says(
            points in prop::collection::btree_map((1u16..=20, 1u16..=10), 1_000u32..200_000, 1..8),
            loads in prop::collection::vec(0u64..600, 1..80),
            max_p95 in 10u64..200,
        ) {
            let point = |((sm, quota), milli): ((u16, u16), u32)| {
                let (sm, quota) = (SmShare::from_percent(sm * 5).unwrap(), Quota::from_percent(quota * 10).unwrap());
                let exec = Duration::from_millis(10);
                ProfilePoint::measured(sm, quota, 1, f64::from(milli) / 1e3, exec, exec).unwrap()
            };
            let profile = ProfileTable::sparse(points.into_iter().map(point).collect()).unwrap();
            let max_p95 = Some(Duration::from_millis(max_p95));
            let spec = FunctionScale { profile, max_p95, min_instances: 1, max_instances: 400 };
            let mut scaler = HeuristicHorizontal::new(HeuristicHorizontalConfig::default()).unwrap();
            let (function, mut now) = (FunctionId::new(0), Timestamp::from_millis(1_000));
            let mut actions = scaler.orders(now, HorizontalEvent::FunctionAdded { function, spec }).unwrap();
            for load in loads {
                for action in std::mem::take(&mut actions) {
                    if let HorizontalAction::Start { instance, .. } = action {
                        scaler.handle(now, HorizontalEvent::InstanceReady { instance }, &mut actions).unwrap();
                    }
                }
                now = now.saturating_add(Duration::from_secs(3));
                let rate = RequestRate::per_second(load);
                // Decisions follow the reports, so the expectation comes from a scaler with all of them.
                let known = scaler.fleet.get_mut(function).unwrap();
                let cooled = known.state.started.is_none_or(|at| now.saturating_since(at) >= scaler.config.down_cooldown);
                let before = known.state.reports.clone();
                if known.state.reports.len() >= 20 {
                    known.state.reports.pop_front();
                }
                known.state.reports.push_back(rate);
                let expected = if cooled { taken_away(&scaler, function) } else { Vec::new() };
                scaler.fleet.get_mut(function).unwrap().state.reports = before;
                scaler.handle(now, HorizontalEvent::LoadReported { function, rate }, &mut actions).unwrap();
                let gone: Vec<_> =
                    actions.iter().filter(|action| matches!(action, HorizontalAction::Drain { .. })).copied().collect();
                prop_assert_eq!(gone, expected);
            }
        }
    }
}
