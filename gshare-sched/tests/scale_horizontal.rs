//! Starting and stopping instances: the lazy scaler beside a literal model, the heuristic scaler against the promises of Algorithm 1, one
//! test per resolution, and a vertical scaler beside a horizontal one.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use gshare_core::{
    ClientId, Duration, FunctionId, GpuId, InstanceId, Quota, QuotaRange, ServiceClass, Timestamp,
};
use gshare_sched::scale::{
    DiluVertical, Fleet, FunctionScale, HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalError,
    HorizontalScaler, Iteration, LazyHorizontal, LazyHorizontalConfig, ScaleState, VerticalScaler,
};
use proptest::prelude::*;

#[path = "support/scaler_bench.rs"]
mod scaler_bench;
use scaler_bench::{Bench, Change, F, drains, point, rates, rps, simple, spec, starts};

fn lazy(spec: FunctionScale) -> Bench<LazyHorizontal> {
    Bench::new(LazyHorizontal::new(LazyHorizontalConfig::default()).unwrap(), spec)
}

fn heuristic(spec: FunctionScale) -> Bench<HeuristicHorizontal> {
    Bench::new(HeuristicHorizontal::new(HeuristicHorizontalConfig::default()).unwrap(), spec)
}

/// The example of the essay; Dilu, section 3.4.2: window 40, out 20, in 30.
#[test]
fn lazy_waits_for_load_that_stays() {
    let mut bench = lazy(simple(1, 10));
    assert_eq!(bench.deployed(), 1);
    assert!(
        bench.loads(15, 80).is_empty() && bench.loads(40, 40).is_empty(),
        "a burst of 15 s starts nothing"
    );
    assert!(bench.loads(19, 80).is_empty());
    assert_eq!(starts(&bench.load(80)).len(), 1, "the 20th");
    assert!(bench.loads(29, 40).is_empty());
    assert_eq!(drains(&bench.load(40)), [InstanceId::new(1)], "the 30th; the youngest");
    assert!(bench.loads(200, 40).is_empty(), "not below the minimum");
}

#[test]
fn lazy_counts_reports_that_are_not_in_a_row() {
    let mut bench = lazy(simple(1, 10));
    let actions: Vec<_> = (0..40).flat_map(|i| bench.load(if i % 2 == 0 { 80 } else { 10 })).collect();
    assert_eq!(starts(&actions).len(), 1, "20 of 40");
    let mut bench = lazy(simple(1, 10));
    let actions: Vec<_> = (0..200).flat_map(|i| bench.load(if i % 3 == 0 { 80 } else { 10 })).collect();
    assert!(actions.is_empty(), "14 of 40");
}

#[test]
fn lazy_compares_strictly() {
    let mut bench = lazy(simple(2, 10));
    assert!(bench.loads(100, 100).is_empty(), "exactly the capacity is not above it");
    let mut bench = lazy(simple(1, 10));
    bench.loads(20, 80);
    assert!(bench.loads(100, 50).is_empty(), "exactly what is left without the youngest is not below it");
}

/// An instance given up by the host is not counted for ever.
#[test]
fn lazy_an_instance_that_does_not_start_is_replaced() {
    let mut bench = lazy(simple(1, 10));
    bench.ready_at_once = false;
    assert_eq!(starts(&bench.loads(20, 80)).len(), 1);
    assert!(bench.loads(100, 80).is_empty(), "it counts while it may still start");
    bench.remove(InstanceId::new(1));
    let changes = bench.loads(20, 80);
    assert_eq!(starts(&changes).len(), 1, "its load is seen to: {changes:?}");
}

#[test]
fn lazy_takes_the_youngest_away_and_a_starting_one_before_a_ready_one() {
    let mut bench = lazy(simple(1, 10));
    bench.ready_at_once = false;
    bench.loads(20, 80);
    assert_eq!(bench.loads(30, 10), [Change::Stop(InstanceId::new(1))], "it was starting");
    bench.ready_at_once = true;
    bench.loads(20, 80);
    assert_eq!(bench.loads(30, 10), [Change::Drain(InstanceId::new(2))]);
}

#[test]
fn lazy_keeps_a_cooldown_of_its_own() {
    let mut config = LazyHorizontalConfig::default();
    (config.out_reports, config.in_reports) = (2, 2);
    config.cooldown = Duration::from_secs(10);
    let mut bench = Bench::new(LazyHorizontal::new(config).unwrap(), simple(1, 10));
    assert_eq!(starts(&bench.loads(2, 500)).len(), 1);
    assert!(bench.loads(9, 500).is_empty());
    assert_eq!(starts(&bench.load(500)).len(), 1);
}

#[test]
fn lazy_scales_to_zero_only_where_it_may_and_back_at_once() {
    let mut bench = lazy(simple(0, 10));
    assert_eq!(bench.deployed(), 0);
    assert!(bench.loads(10, 0).is_empty());
    assert_eq!(starts(&bench.load(1)).len(), 1, "the first request does not wait for a window");
    assert!(bench.loads(59, 0).is_empty());
    assert_eq!(drains(&bench.load(0)).len(), 1, "no request for a minute");
    assert_eq!(bench.deployed(), 0);
    let mut bench = lazy(simple(1, 10));
    assert!(bench.loads(500, 0).is_empty());
}

#[test]
fn lazy_reports_load_that_it_cannot_serve() {
    let mut bench = lazy(simple(1, 1));
    let unmet = Change::Unmet(rps(30));
    assert_eq!(bench.loads(22, 80), vec![unmet; 3], "from the 20th on");
    let mut bench = lazy(simple(1, 10));
    bench.ready_at_once = false;
    bench.loads(20, 80);
    bench.refused(1);
    let actions = bench.loads(25, 80);
    assert!(starts(&actions).is_empty() && actions.contains(&unmet), "its only point was refused just now");
    assert_eq!(starts(&bench.loads(6, 80)).len(), 1, "30 s later it is tried again");
}

/// The example of the heuristic scaler's essay.
#[test]
fn fast_the_example_of_the_essay() {
    let points = vec![point(12, 100, 68.0, 20), point(12, 40, 35.0, 20), point(6, 40, 24.0, 20)];
    let mut bench = heuristic(spec(points, 0, 10));
    assert_eq!(rates(&bench.load(55)), [rps(24); 3]);
    assert!(bench.loads(9, 20).is_empty());
    assert_eq!(drains(&bench.load(20)).len(), 1);
    assert!(bench.loads(20, 20).is_empty());
}

/// Algorithm 1, line 3 (`>= 0`) starts a pod for nothing.
#[test]
fn fast_01_no_gap_starts_nothing_and_a_dead_band_holds() {
    let mut bench = heuristic(spec(vec![point(24, 100, 110.0, 20)], 0, 10));
    assert_eq!(starts(&bench.load(100)).len(), 1, "110 are needed, 110 are there");
    assert!(bench.loads(50, 100).is_empty());
    let mut swing = (0..100).flat_map(|i| bench.load(90 + i % 11));
    assert!(swing.next().is_none());
}

/// Line 6 says that the remainder is above 0.
#[test]
fn fast_02_no_residual_pod_without_a_residue() {
    let mut bench = heuristic(spec(vec![point(24, 100, 55.0, 20), point(6, 100, 5.0, 20)], 0, 10));
    assert_eq!(rates(&bench.load(100)), [rps(55); 2]);
}

/// Line 9 asks for `T > r`.
#[test]
fn fast_03_an_exact_fit_is_taken() {
    let points = vec![point(10, 100, 100.0, 20), point(6, 100, 10.0, 20), point(7, 100, 11.0, 20)];
    let mut bench = heuristic(spec(points, 0, 10));
    let actions = bench.load(100);
    assert_eq!(rates(&actions), [rps(100), rps(10)]);
}

/// Line 9 minimises `T - r`, the text asks for "the minimum but sufficient resources".
#[test]
fn fast_04_the_residue_goes_to_the_smallest_area() {
    // With 100 % of the SMs 21 requests/s are nearer to the residue of 20 than 40 with 12 %, and cost eight times as much.
    let points = vec![point(12, 100, 90.0, 20), point(100, 10, 21.0, 20), point(8, 100, 40.0, 20)];
    let mut bench = heuristic(spec(points, 0, 10));
    let actions = bench.load(100);
    assert_eq!(starts(&actions).iter().map(|point| point.sm.get()).collect::<Vec<_>>(), [1_200, 800]);
}

/// FaST-GShare, Figure 8: without a filter the smallest point is always the most efficient, at a p95 of seconds.
#[test]
fn fast_05_points_too_slow_for_the_slo_are_no_candidates() {
    let points = vec![point(6, 20, 13.5, 8_300), point(12, 100, 68.64, 34)];
    let mut unfiltered = spec(points.clone(), 0, 20);
    assert_eq!(starts(&heuristic(unfiltered.clone()).load(50))[0].sm.get(), 600);
    unfiltered.max_p95 = Some(Duration::from_millis(35));
    assert_eq!(starts(&heuristic(unfiltered.clone()).load(50))[0].sm.get(), 1_200);
    unfiltered.max_p95 = Some(Duration::from_millis(33));
    let error = Fleet::new(F, unfiltered).unwrap_err();
    assert_eq!(
        error.to_string(),
        "fn0: no point of its profile has a p95 of at most 33ms (max_p95); the best is 34ms at (batch 1, 12% of the SMs, 100% of the time)"
    );
}

/// Line 7: the union of n equal tuples is one of them; line 8 counts pods that were never placed.
#[test]
fn fast_06_equal_pods_count_each_and_refused_ones_do_not() {
    let mut bench = heuristic(spec(vec![point(24, 100, 55.0, 20)], 0, 10));
    bench.ready_at_once = false;
    assert_eq!(starts(&bench.load(200)).len(), 4);
    assert_eq!(bench.deployed(), 4);
    bench.refused(2);
    assert_eq!(bench.deployed(), 3);
    let unmet = Change::Unmet(rps(55));
    assert_eq!(
        bench.load(200),
        [unmet],
        "the point is not tried again just now, and the load is not forgotten"
    );
    assert_eq!(starts(&bench.loads(30, 200)).len(), 1);
}

/// A refused point makes room for the next best.
#[test]
fn fast_06_the_next_best_point_is_tried() {
    let mut bench = heuristic(spec(vec![point(24, 100, 55.0, 20), point(50, 100, 60.0, 20)], 0, 10));
    bench.ready_at_once = false;
    assert_eq!(starts(&bench.load(50))[0].sm.get(), 2_400);
    bench.refused(0);
    assert_eq!(starts(&bench.load(50))[0].sm.get(), 5_000);
}

/// Lines 14-21: a front pod that is larger than the gap, and an empty queue, are loops without end.
#[test]
fn fast_07_scaling_down_is_one_pass_that_skips_what_is_too_large() {
    let points = vec![point(24, 100, 110.0, 20), point(12, 100, 33.0, 20)];
    let mut bench = heuristic(spec(points, 0, 10));
    bench.load(130);
    assert_eq!(bench.fleet.capacity(), rps(143), "110 and 33");
    assert!(bench.loads(60, 100).is_empty(), "143 - 132 = 11 are too many, no pod is that small");
    let actions = bench.loads(10, 10);
    assert_eq!(
        drains(&actions).len(),
        1,
        "129 are too many: the small one first, then the large one is too large"
    );
    assert_eq!(bench.fleet.capacity(), rps(110));
    assert_eq!(drains(&bench.loads(20, 0)).len(), 1, "no load at all: the last");
    assert!(bench.loads(20, 0).is_empty(), "an empty queue");
}

/// The order of `L_j` and its ties.
#[test]
fn fast_08_the_least_effective_goes_first_then_the_youngest() {
    let mut bench = heuristic(spec(vec![point(10, 100, 50.0, 20), point(10, 40, 15.0, 20)], 0, 10));
    bench.load(100);
    let throughputs: Vec<_> =
        bench.fleet.instances().map(|(_, point)| point.throughput.as_milli() / 1_000).collect();
    assert_eq!(throughputs, [50, 50, 15]);
    let actions = bench.loads(20, 35);
    // Target 38.5, and the dead band 42.4: 72.6 are too many. 15 goes (the least effective), then the younger 50.
    assert_eq!(drains(&actions), [InstanceId::new(2), InstanceId::new(1)]);
}

/// The predicted load: a line through the last twenty reports, or the bound proved by the highest of them.
#[test]
fn fast_09_a_dip_shorter_than_the_prediction_takes_nothing_away_and_a_step_is_seen_at_once() {
    let mut bench = heuristic(spec(vec![point(24, 100, 60.0, 20)], 0, 10));
    bench.loads(20, 100);
    assert_eq!(bench.deployed(), 2);
    assert!(bench.loads(3, 0).is_empty());
    assert!(bench.loads(20, 100).is_empty());
    assert_eq!(starts(&bench.load(300)).len(), 4, "292 at least, of which 120 are there");
    bench.loads(20, 0);
    assert_eq!(bench.deployed(), 0);
}

#[test]
fn a_function_that_cannot_be_is_refused_by_name() {
    let new = |number, spec| Fleet::new(FunctionId::new(number), spec);
    for (number, spec, message) in [
        (1, simple(3, 2), "fn1: max_instances is 2, need at least min_instances (3), 1 to 4096"),
        (1, simple(0, 0), "fn1: max_instances is 0, need at least min_instances (0), 1 to 4096"),
    ] {
        assert_eq!(new(number, spec).unwrap_err().to_string(), message);
    }
    let mut fleet = new(0, simple(1, 2)).unwrap();
    let refused = fleet.set_bounds(F, 2, 1).unwrap_err();
    assert!(matches!(refused, HorizontalError::BadInstanceBounds { min_instances: 2, .. }), "{refused}");
    assert_eq!((fleet.spec().min_instances, fleet.spec().max_instances), (1, 2));
}

#[test]
fn a_configuration_out_of_bounds_is_refused_by_field() {
    let lazy = |change: fn(&mut LazyHorizontalConfig)| {
        let mut config = LazyHorizontalConfig::default();
        change(&mut config);
        LazyHorizontal::new(config).unwrap_err().field
    };
    assert_eq!(lazy(|config| config.out_reports = 41), "out_reports");
    assert_eq!(lazy(|config| config.in_reports = 0), "in_reports");
    assert_eq!(lazy(|config| config.window_reports = 0), "window_reports");
    assert_eq!(lazy(|config| config.fleet.tick = Duration::ZERO), "fleet.tick");
    assert_eq!(lazy(|config| config.cooldown = Duration::MAX), "cooldown");
    let mut config = HeuristicHorizontalConfig::default();
    config.predict_reports = 0;
    assert_eq!(HeuristicHorizontal::new(config).unwrap_err().field, "predict_reports");
}

#[test]
fn a_function_that_is_removed_leaves_nothing_behind() {
    let mut bench = lazy(simple(1, 10));
    bench.loads(19, 80);
    bench.scaler.forget(F);
    assert!(bench.loads(19, 80).is_empty());
    assert_eq!(starts(&bench.load(80)).len(), 1);
}

#[test]
fn a_refused_point_is_left_alone_until_its_time_and_the_youngest_instance_is_known() {
    let points = vec![point(24, 100, 55.0, 20), point(50, 100, 60.0, 20)];
    let mut fleet = Fleet::new(F, spec(points, 2, 4)).unwrap();
    let (now, later) = (Timestamp::from_millis(1_000), Timestamp::from_millis(31_000));
    let startable = |fleet: &Fleet, at| fleet.startable(at).map(|(point, _)| point).collect::<Vec<_>>();
    assert_eq!(startable(&fleet, now), [0, 1], "the most effective first");
    fleet.refuse(0, later);
    assert_eq!((startable(&fleet, now), startable(&fleet, later)), (vec![1], vec![0, 1]));
    fleet.retry();
    assert_eq!(startable(&fleet, now), [0, 1]);
    for number in 0..2 {
        assert!(fleet.lacks());
        fleet.started(now, InstanceId::new(number), 0);
    }
    assert!(!fleet.lacks() && fleet.room() == 2);
    fleet.ready(later, InstanceId::new(1));
    assert_eq!(fleet.start_time(), Duration::from_secs(30));
    assert_eq!(fleet.youngest(), Some((InstanceId::new(0), rps(55))), "a starting one before a ready one");
    assert_eq!(
        [0, 1, 2].map(|number| fleet.remove(InstanceId::new(number))),
        [Some(false), Some(true), None]
    );
    assert_eq!((fleet.capacity(), fleet.deployed()), (rps(0), 0));
}

/// Dilu, section 3.4.2: "first triggering fast scaling-up, adaptively delaying the scaling-out execution".
#[test]
fn a_burst_is_met_by_scaling_up_and_load_that_stays_by_scaling_out() {
    let (mut vertical, mut horizontal) = (DiluVertical::default(), lazy(simple(1, 4)));
    let (owner, trainer, gpu) = (ClientId::new(0, 0), ClientId::new(1, 0), GpuId::new(0));
    let share = |request, limit| {
        QuotaRange::new(Quota::from_percent(request).unwrap(), Quota::from_percent(limit).unwrap()).unwrap()
    };
    let mut now = Timestamp::from_millis(1_000);
    vertical.join(now, owner, gpu, share(30, 60), ServiceClass::SLO_SENSITIVE).unwrap();
    vertical.join(now, trainer, gpu, share(20, 100), ServiceClass::BestEffort).unwrap();
    let (mut raised, mut started) = (None, None);
    // 60 iterations of 20 ms at ease; from then on more load than an instance serves, and cycles of 40 ms.
    for iteration in 0..700u64 {
        let burst = iteration >= 60;
        let first_launch = now;
        let end = now.saturating_add(Duration::from_millis(if burst { 40 } else { 20 }));
        while now < end {
            now = now.saturating_add(Duration::from_millis(5));
            vertical.used(now, owner, 100);
            vertical.used(now, trainer, 100);
            if matches!(vertical.gpu(gpu).unwrap().state, ScaleState::Emergency { .. }) {
                raised.get_or_insert(iteration);
            }
            if now.as_nanos().is_multiple_of(1_000_000_000) {
                horizontal.now = now;
                if !starts(&horizontal.report(rps(if burst { 80 } else { 20 }))).is_empty() {
                    started.get_or_insert(now);
                }
            }
        }
        let done = Iteration { batch: 1, first_launch, last_launch: now };
        vertical.iterated(now, owner, done).unwrap();
    }
    let burst_began = Timestamp::from_millis(1_000 + 60 * 20);
    assert_eq!(raised, Some(61), "the period after the first bad cycle");
    let waited = started.expect("load stayed").saturating_since(burst_began);
    assert!((Duration::from_secs(19)..=Duration::from_secs(21)).contains(&waited), "{waited}");
}

/// Lazy scaling written down from the text, for one function of equal instances: the window is kept whole.
struct LazyModel {
    spec: FunctionScale,
    throughput: u64,
    /// Instances that are deployed, the youngest last, and whether they are ready.
    deployed: Vec<(u64, bool)>,
    next: u64,
    window: Vec<u64>,
    stepped: Option<u64>,
    busy: Option<u64>,
    refused_until: u64,
}

impl LazyModel {
    fn start(&mut self, out: &mut Vec<String>) {
        out.push(format!("start {}", self.next));
        self.deployed.push((self.next, false));
        self.next += 1;
    }

    fn may_start(&self, second: u64) -> bool {
        second >= self.refused_until && (self.deployed.len() as u32) < self.spec.max_instances
    }

    fn minimum(&mut self, second: u64, out: &mut Vec<String>) {
        while (self.deployed.len() as u32) < self.spec.min_instances && second >= self.refused_until {
            self.start(out);
        }
    }

    fn load(&mut self, second: u64, load: u64) -> Vec<String> {
        let mut out = Vec::new();
        self.minimum(second, &mut out);
        self.window.push(load);
        if self.window.len() > 40 {
            self.window.remove(0);
        }
        if load > 0 || self.busy.is_none() {
            self.busy = Some(second);
        }
        let n = self.deployed.len() as u64;
        let above = self.window.iter().filter(|&&x| x > n * self.throughput).count();
        let below = self.window.iter().filter(|&&x| x + self.throughput < n * self.throughput).count();
        let cooled = self.stepped.is_none_or(|at| second - at >= 20);
        let out_now = (n == 0 && load > 0) || (n > 0 && above >= 20 && cooled);
        let blocked = n > 0 && above >= 20 && !cooled;
        if out_now {
            if self.may_start(second) {
                self.start(&mut out);
                self.stepped = Some(second);
                self.window.clear();
            } else if load > n * self.throughput {
                out.push(format!("unmet {}", load - n * self.throughput));
            }
        } else if !blocked && n > 0 {
            let spare = n > u64::from(self.spec.min_instances).max(1) && cooled && below >= 30;
            let last = n == 1 && self.spec.min_instances == 0 && second - self.busy.unwrap() >= 60;
            if spare || last {
                let starting = self.deployed.iter().rposition(|(_, ready)| !ready);
                let (id, ready) = self.deployed.remove(starting.unwrap_or(self.deployed.len() - 1));
                out.push(format!("{} {id}", if ready { "drain" } else { "stop" }));
                self.stepped = Some(second);
                self.window.clear();
            }
        }
        out
    }
}

fn named(changes: &[Change]) -> Vec<String> {
    let name = |change: &Change| match *change {
        Change::Start(instance, _) => format!("start {}", instance.number()),
        Change::Drain(instance) => format!("drain {}", instance.number()),
        Change::Stop(instance) => format!("stop {}", instance.number()),
        Change::Unmet(rate) => format!("unmet {}", rate.as_milli() / 1_000),
    };
    changes.iter().map(name).collect()
}

/// The predicted load by its definition, where no instance has become ready yet.
fn forecast(loads: &[u64]) -> f64 {
    let last: Vec<f64> = loads.iter().skip(loads.len().saturating_sub(20)).map(|&load| load as f64).collect();
    let highest = last.iter().copied().fold(0.0, f64::max);
    if last.len() < 3 {
        return highest;
    }
    let (count, mean) = (last.len() as f64, last.iter().sum::<f64>() / last.len() as f64);
    let mut steps: Vec<f64> = last.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let squares = steps.iter().map(|step| step * step / 2.0);
    let all_but_one = squares.clone().sum::<f64>() - squares.fold(0.0, f64::max);
    let dispersion = if mean > 0.0 { (all_but_one / mean + 5.0) / (count + 3.0) } else { 0.0 };
    let middle = (count - 1.0) / 2.0;
    let (mut products, mut widths) = (0.0, 0.0);
    for (place, load) in last.iter().enumerate() {
        let from_middle = place as f64 - middle;
        products += from_middle * (load - mean);
        widths += from_middle * from_middle;
    }
    steps.sort_by(f64::total_cmp);
    let median = steps[steps.len() / 2];
    let lowest = last.iter().copied().fold(f64::MAX, f64::min);
    let line = mean + products / widths * count / 2.0;
    let line = line.clamp(lowest + median.min(0.0) / 2.0, highest + median.max(0.0) / 2.0);
    let newer = last[last.len() / 2..].iter().copied().fold(0.0, f64::max);
    line.max(newer - 2.0 * (dispersion * newer).sqrt()).max(0.0)
}

proptest! {
    /// Runs of load levels with instances that start, crash and are refused on the way.
    #[test]
    fn lazy_follows_the_model(
        runs in prop::collection::vec((0u64..400, 1usize..50, 0u32..8), 1..20),
        min_instances in 0u32..3,
        more in 1u32..5,
    ) {
        let spec = simple(min_instances, min_instances + more);
        let mut model = LazyModel {
            spec: spec.clone(), throughput: 50, deployed: Vec::new(), next: 0, window: Vec::new(),
            stepped: None, busy: None, refused_until: 0,
        };
        let mut expected = Vec::new();
        model.minimum(0, &mut expected);
        let mut bench = lazy(spec);
        bench.ready_at_once = false;
        for number in 0..min_instances {
            model.deployed[number as usize].1 = true;
        }
        prop_assert_eq!(expected.len(), bench.deployed() as usize);
        let mut second = 0;
        for (level, length, chance) in runs {
            // Changes of the instances between two runs of load.
            let starting = model.deployed.iter().position(|(_, ready)| !ready);
            match (chance, starting, model.deployed.first().copied()) {
                (0 | 1, Some(place), _) => {
                    model.refused_until = second + 30;
                    bench.refused(model.deployed.remove(place).0);
                }
                (2, _, Some((id, _))) => {
                    model.deployed.remove(0);
                    bench.remove(InstanceId::new(id));
                }
                (3..=6, Some(place), _) => {
                    model.deployed[place].1 = true;
                    bench.fleet.ready(bench.now, InstanceId::new(model.deployed[place].0));
                }
                _ => {}
            }
            for _ in 0..length {
                second += 1;
                prop_assert_eq!(named(&bench.load(level)), model.load(second, level), "at {} s", second);
            }
        }
    }

    /// The promises of Algorithm 1: enough after a step up, never below the need after a step down, and an end.
    #[test]
    fn heuristic_serves_the_load_and_never_cuts_into_it(
        points in prop::collection::btree_map((1u16..=20, 1u16..=10), 1u32..200_000, 1..8),
        loads in prop::collection::vec(0u64..600, 1..80),
        max_instances in 1u32..40,
        refuse in prop::collection::vec(0usize..10, 0..80),
    ) {
        let points = points
            .into_iter()
            .map(|((sm, quota), milli)| point(sm * 5, quota * 10, f64::from(milli) / 1e3, 10))
            .collect();
        let mut bench = heuristic(spec(points, 0, max_instances));
        bench.ready_at_once = false;
        for (tick, &load) in loads.iter().enumerate() {
            let before = bench.fleet.capacity().as_milli();
            let changes = bench.load(load);
            let unmet: u64 = changes.iter().map(|change| match change {
                Change::Unmet(rate) => rate.as_milli(),
                _ => 0,
            }).sum();
            let capacity = bench.fleet.capacity().as_milli();
            let target = forecast(&loads[..=tick]) * 1_100.0;
            prop_assert!(bench.deployed() <= max_instances);
            // The engine reckons in whole thousandths.
            let (low, high) = (target * 0.99 - 1_000.0, target * 1.01 + 1_000.0);
            prop_assert!((capacity + unmet) as f64 >= low, "{capacity} and {unmet} unmet of {target}");
            if before as f64 > high {
                prop_assert!(starts(&changes).is_empty() && unmet == 0, "{before} are there, {target} needed");
            }
            // Some starts find no room.
            if refuse.get(tick) == Some(&0)
                && let Some((instance, _)) = bench.fleet.youngest()
            {
                bench.refused(instance.number());
            }
        }
    }
}

/// Points of 34.5 requests/s, and the load that comes every second, one number after the other.
fn queueing(loads: &[u64], change: impl Fn(&mut HeuristicHorizontalConfig)) -> u32 {
    let mut config = HeuristicHorizontalConfig::default();
    change(&mut config);
    let mut spec = spec(vec![point(6, 60, 34.5, 29)], 1, 64);
    spec.max_p95 = Some(Duration::from_micros(34_500));
    let mut bench = Bench::new(HeuristicHorizontal::new(config).unwrap(), spec);
    for load in loads.iter().cycle().take(40) {
        bench.load(*load);
    }
    bench.deployed()
}

#[test]
fn fast_10_capacity_beyond_the_load_is_what_uneven_arrivals_need() {
    let even: Vec<u64> = (71..=110).collect();
    assert_eq!(
        queueing(&even, |_| ()),
        4,
        "even arrivals: 10 % of headroom are enough, and a trend is none of theirs"
    );
    // Standard deviation about 10, as a Poisson process of 100 has.
    let poisson = [100, 88, 110, 95, 107, 92, 104, 90, 110, 99];
    assert_eq!(queueing(&poisson, |_| ()), 5, "the same maximum");
    let bursts = [60, 110, 40, 105, 20, 110, 30, 80, 110, 35];
    assert!(queueing(&bursts, |_| ()) > 6, "{}", queueing(&bursts, |_| ()));
    let not_asked =
        |config: &mut HeuristicHorizontalConfig| config.late_share = gshare_core::BasisPoints::ZERO;
    assert_eq!(queueing(&bursts, not_asked), 3, "what a line through them needs");
    assert_eq!(queueing(&[0], |_| ()), 1);
}
