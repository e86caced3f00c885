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
//! On each load report:
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
//! Those of the contract of [`HorizontalScaler`]. After a step up, the capacity is at least the target
//! unless the scaler reports an unmet load; after a step down, it is at least the target and the dead band.
//!
//! # Cost
//! O(p) for a step up over p points, O(n log n) for a step down over n instances, O(`predict_reports`) for a report without a step.
use super::fleet::{Fleet, FleetConfig};
use super::forecast::Forecast;
use super::queue::{Late, Queue};
use crate::scale::{HorizontalOrder, HorizontalScaler, LoadReport};
use gshare_core::profile::RequestRate;
use gshare_core::{BasisPoints, ConfigError, Duration, FunctionId, Timestamp};
use std::collections::{BTreeMap, VecDeque};

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
#[derive(Debug, Clone, Default)]
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
    functions: BTreeMap<FunctionId, History>,
    /// `None` where the scaler ignores queues.
    late: Option<Late>,
}

impl HeuristicHorizontal {
    /// A scaler without functions.
    pub fn new(config: HeuristicHorizontalConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let late = Some(config.late_share).filter(|late| !late.is_zero()).map(Late::new);
        Ok(Self { config, functions: BTreeMap::new(), late })
    }

    fn forecast(&self, history: &History, fleet: &Fleet) -> Forecast {
        Forecast::of(&history.reports, self.config.fleet.tick, fleet.start_time())
    }

    /// The queue of a function before its most effective point; `None` where no setting bounds the wait.
    fn queue(&self, fleet: &Fleet, forecast: Forecast) -> Option<Queue> {
        let (late, max_p95, server) = (self.late?, fleet.spec().max_p95?, fleet.best()?);
        // p95 is at most half of a request's latency target.
        let wait = max_p95.saturating_mul(2).saturating_sub(server.p95);
        Some(Queue::new(forecast.load, server.throughput, wait, forecast.dispersion, late))
    }
}

impl HorizontalScaler for HeuristicHorizontal {
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>) {
        let LoadReport { now, function, fleet, load } = report;
        let history = self.functions.entry(function).or_default();
        if history.reports.len() >= self.config.predict_reports as usize {
            history.reports.pop_front();
        }
        history.reports.push_back(load);
        let Some(history) = self.functions.get(&function) else { return };
        let predicted = self.forecast(history, fleet);
        let target = with(predicted.load, self.config.headroom);
        let (capacity, queue) = (fleet.capacity(), self.queue(fleet, predicted));
        let waits = |capacity| queue.is_some_and(|queue| !queue.fits(capacity));
        let cooled = history.started.is_none_or(|at| now.saturating_since(at) >= self.config.down_cooldown);
        if target > capacity || waits(capacity) {
            let enough = queue.map_or(target, |queue| target.max(queue.least_capacity()));
            let before = orders.len();
            scale_up(now, fleet, enough.saturating_sub(capacity), orders);
            if orders[before..].iter().any(|order| matches!(order, HorizontalOrder::Start(_)))
                && let Some(history) = self.functions.get_mut(&function)
            {
                history.started = Some(now);
            }
        } else if cooled {
            // Testing a capacity costs a twentieth of computing the least one.
            let band = self.config.dead_band;
            let enough = |capacity| {
                let but_the_band = without(capacity, band);
                target <= but_the_band && !waits(but_the_band)
            };
            scale_down(fleet, enough, orders);
        }
    }

    fn forget(&mut self, function: FunctionId) {
        self.functions.remove(&function);
    }

    fn config(&self) -> FleetConfig {
        self.config.fleet.clone()
    }

    fn early_reports(&self) -> bool {
        self.config.early_reports
    }
}

fn scale_up(now: Timestamp, fleet: &Fleet, gap: RequestRate, orders: &mut Vec<HorizontalOrder>) {
    let room = u64::from(fleet.room());
    let Some((best, point)) = fleet.startable(now).next() else {
        orders.push(HorizontalOrder::Unmet(gap));
        return;
    };
    let throughput = point.throughput;
    let whole = (gap.as_milli() / throughput.as_milli()).min(room);
    let rest = gap.saturating_sub(throughput.saturating_mul(whole));
    orders.extend((0..whole).map(|_| HorizontalOrder::Start(best)));
    if rest.is_zero() {
        return;
    }
    if whole == room {
        orders.push(HorizontalOrder::Unmet(rest));
        return;
    }
    let sufficient = fleet.startable(now).filter(|(_, point)| point.throughput >= rest);
    let ideal = sufficient.min_by_key(|(_, point)| (point.area(), point.throughput, point.setting()));
    orders.push(HorizontalOrder::Start(ideal.map_or(best, |(ideal, _)| ideal)));
}

/// `enough` tells whether a capacity suffices.
fn scale_down(fleet: &Fleet, enough: impl Fn(RequestRate) -> bool, orders: &mut Vec<HorizontalOrder>) {
    let mut left = fleet.capacity();
    let mut spare = fleet.deployed().saturating_sub(fleet.spec().min_instances);
    // Mostly not even the smallest instance can go, so there is nothing to sort.
    let smallest = if spare > 0 { fleet.smallest() } else { None };
    if !smallest.is_some_and(|smallest| enough(left.saturating_sub(smallest))) {
        return;
    }
    for (instance, throughput) in fleet.by_efficacy() {
        let rest = left.saturating_sub(throughput);
        if spare > 0 && enough(rest) {
            (spare, left) = (spare - 1, rest);
            orders.push(HorizontalOrder::Remove(instance));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::FunctionScale;
    use gshare_core::profile::{ProfilePoint, ProfileTable};
    use gshare_core::{InstanceId, Quota, SmShare};
    use proptest::prelude::*;

    /// Step 2 of the essay as written: finds the least capacity, and shares out the difference.
    fn taken_away(scaler: &HeuristicHorizontal, history: &History, known: &Fleet) -> Vec<HorizontalOrder> {
        let predicted = scaler.forecast(history, known);
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
        order.iter().map(|&(instance, _)| HorizontalOrder::Remove(instance)).collect()
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
            let mut fleet = Fleet::new(function, spec).unwrap();
            let mut names = (0..).map(InstanceId::new);
            let mut start = |fleet: &mut Fleet, now, point| {
                let instance = names.next().unwrap();
                fleet.started(now, instance, point);
                fleet.ready(now, instance);
            };
            let best = fleet.startable(now).next().unwrap().0;
            start(&mut fleet, now, best);
            for load in loads {
                now = now.saturating_add(Duration::from_secs(3));
                let rate = RequestRate::per_second(load);
                // Decisions follow the reports, so the expectation comes from a history with all of them.
                let History { mut reports, started } = scaler.functions.get(&function).cloned().unwrap_or_default();
                let cooled = started.is_none_or(|at| now.saturating_since(at) >= scaler.config.down_cooldown);
                if reports.len() >= 20 {
                    reports.pop_front();
                }
                reports.push_back(rate);
                let expected =
                    if cooled { taken_away(&scaler, &History { reports, started }, &fleet) } else { Vec::new() };
                let (mut orders, mut gone) = (Vec::new(), Vec::new());
                scaler.decide(LoadReport { now, function, fleet: &fleet, load: rate }, &mut orders);
                for order in orders {
                    match order {
                        HorizontalOrder::Start(point) => start(&mut fleet, now, point),
                        HorizontalOrder::Remove(instance) => {
                            gone.push(order);
                            fleet.remove(instance);
                        }
                        HorizontalOrder::Unmet(_) => {}
                    }
                }
                prop_assert_eq!(gone, expected);
            }
        }
    }
}
