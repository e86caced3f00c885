//! The peak scaler against its essay, and against the lazy scaler.

#[path = "../../gshare-sched/tests/support/scaler_bench.rs"]
mod scaler_bench;

use gshare_bench::peaks::PeakHorizontal;
use gshare_core::InstanceId;
use gshare_sched::scale::{FunctionScale, LazyHorizontal, LazyHorizontalConfig};
use gshare_sim::conformance::horizontal_scaler;
use proptest::prelude::*;
use scaler_bench::{Bench, Change, drains, point, rps, spec, starts};

/// 117 requests/s at 30 % of the SMs, 151 at its limit, which is twice as much; more SMs than that do not count.
fn surging(min_instances: u32, max_instances: u32) -> FunctionScale {
    let points = vec![point(30, 100, 117.0, 34), point(60, 100, 151.0, 27), point(100, 100, 300.0, 26)];
    spec(points, min_instances, max_instances)
}

fn peaks(spec: FunctionScale) -> Bench<PeakHorizontal> {
    Bench::new(PeakHorizontal::default(), spec)
}

fn lazy(spec: FunctionScale) -> Bench<LazyHorizontal> {
    Bench::new(LazyHorizontal::new(LazyHorizontalConfig::default()).unwrap(), spec)
}

#[test]
fn the_second_instance_starts_as_the_lazy_scaler_says_and_the_third_when_their_limits_are_not_enough() {
    let mut bench = peaks(surging(1, 8));
    assert!(bench.loads(19, 60).is_empty());
    let started = starts(&bench.load(60));
    assert_eq!(started.len(), 1, "60 and all of another one are beyond 93 % of 151");
    assert_eq!(started[0].sm.get(), 3_000, "at the most effective point");
    assert!(bench.loads(90, 160).is_empty(), "four are entitled; 160 and 117 are within 93 % of 302");
    assert_eq!(starts(&bench.load(281)).len(), 1, "a peak that is not, at once");
    assert!(bench.loads(60, 160).is_empty(), "and it stays");
    assert_eq!(bench.deployed(), 3);
    let mut bench = peaks(surging(1, 8));
    bench.loads(40, 60);
    assert_eq!(
        starts(&bench.loads(30, 164)).len(),
        1,
        "164 and 117 are beyond it, with the third that is entitled"
    );
    let mut bench = peaks(surging(1, 8));
    assert!(bench.loads(19, 600).is_empty(), "short bursts start nothing");
}

#[test]
fn what_is_not_entitled_any_more_goes_one_by_one_and_the_last_where_that_is_allowed() {
    let mut bench = peaks(surging(1, 8));
    bench.loads(60, 200);
    assert_eq!(bench.deployed(), 3);
    assert_eq!(drains(&bench.loads(300, 0)).len(), 2);
    assert_eq!(bench.deployed(), 1, "never below the minimum");
    let mut idle = peaks(surging(0, 8));
    assert_eq!(starts(&idle.load(1)).len(), 1, "the first request waits for nothing else");
    assert!(idle.loads(59, 0).is_empty());
    assert_eq!(drains(&idle.load(0)).len(), 1, "to zero where that is allowed");
    let mut full = peaks(surging(1, 1));
    let unmet = full.load(200);
    assert_eq!(unmet, [Change::Unmet(rps(200 - 117))]);
}

#[test]
fn one_that_dies_is_replaced_without_waiting_for_the_window() {
    let mut bench = peaks(surging(1, 8));
    bench.loads(40, 60);
    assert_eq!(bench.deployed(), 2);
    bench.remove(InstanceId::new(1));
    assert_eq!(starts(&bench.load(60)).len(), 1, "two are still entitled");
}

#[test]
fn it_conforms() {
    horizontal_scaler(&|| Box::new(PeakHorizontal::default()), 0..20).unwrap();
}

/// The peak scaler as its essay says it: a whole lazy scaler beside it says how many are entitled.
struct Literal {
    lazy: Bench<LazyHorizontal>,
    reports: Vec<u64>,
    deployed: u64,
    starts: u64,
}

impl Literal {
    /// Takes an instance for 41 % of 117: 48 with the fraction rounded up.
    fn new(min_instances: u32, max_instances: u32) -> Self {
        let rated = spec(vec![point(30, 100, 47.97, 34)], min_instances, max_instances);
        Self { lazy: lazy(rated), reports: Vec::new(), deployed: u64::from(min_instances), starts: 0 }
    }

    fn report(&mut self, load: u64) -> u64 {
        self.lazy.load(load);
        self.reports.push(load);
        let last = |count: usize| self.reports[self.reports.len().saturating_sub(count)..].to_vec();
        let mut sorted = last(20);
        sorted.sort_unstable();
        let wanted = (sorted[sorted.len() / 2] + 117).max(last(120).into_iter().max().unwrap());
        let entitled = u64::from(self.lazy.deployed());
        self.deployed = self.deployed.min(entitled);
        while self.deployed < entitled && (self.deployed == 0 || wanted * 100 > self.deployed * 151 * 93) {
            self.deployed += 1;
            self.starts += 1;
        }
        self.deployed
    }
}

proptest! {
    /// Loads that stay for a while, so that instances come and go.
    #[test]
    fn the_peak_scaler_does_what_the_literal_one_does_and_never_more_than_the_lazy_one(
        runs in prop::collection::vec((0u64..700, 1usize..90), 1..12),
        least in 0u32..3,
        more in 0u32..6,
    ) {
        let most = (least + more).max(1);
        let mut bench = peaks(surging(least, most));
        let mut literal = Literal::new(least, most);
        let (mut started, mut lazily) = (0, 0);
        for (load, count) in runs {
            for _ in 0..count {
                started += starts(&bench.load(load)).len();
                let before = literal.lazy.deployed();
                let deployed = literal.report(load);
                lazily += literal.lazy.deployed().saturating_sub(before) as usize;
                prop_assert_eq!(u64::from(bench.deployed()), deployed, "after {} reports", literal.reports.len());
                prop_assert!(bench.deployed() <= literal.lazy.deployed(), "never more than the lazy scaler has");
                prop_assert!(started <= lazily, "and never more starts: {started} of {lazily}");
            }
        }
    }
}
