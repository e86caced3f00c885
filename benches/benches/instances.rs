//! Routing and eviction at 10, 100, 1,000 and 10,000 instances.
//!
//! Targets: one routed request in at most 1 us at 1,000 instances; the choice of a victim in O(log n). "route" is a request's
//! arrival: with its dispatch where an instance has room, else with its place in the queue. "complete" is the end of a request when
//! all instances are full and others wait: with the dispatch of the next request. Each is one event, timed alone; reading the clock
//! is some 40 ns of it. "shared" instances are four to a slice, each of a function of its own as in the paper, or fifty of each of
//! twenty functions. A completion then gives the other forty-nine another slack, for their function has another first request.
//! "literal" looks at every instance, as a floor that an index must beat.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use gshare_core::{Bytes, Duration, Engine, FunctionId, InstanceId, RequestId, SharedSlice, Timestamp};
use gshare_sched::pipeline::{
    EvictionOrder, EvictionPolicy, RouteAction, RouteEvent, RouterConfig, Service, SlackRouter,
};
use std::cell::RefCell;
use std::hint::black_box;
use std::time::Instant;

const SIZES: [u64; 4] = [10, 100, 1_000, 10_000];
const DEADLINE: Duration = Duration::from_secs(3_600);

struct Driver {
    router: SlackRouter,
    actions: Vec<RouteAction>,
    now: u64,
    next: u64,
    running: std::collections::VecDeque<(RequestId, InstanceId)>,
}

impl Driver {
    /// `functions` with as many exclusive instances each, or with `shared` all on shared slices of four.
    fn new(instances: u64, functions: u64, shared: bool) -> Self {
        let mut router = SlackRouter::new(RouterConfig::default()).expect("defaults");
        let mut actions = Vec::new();
        for instance in 0..instances {
            let latency = Duration::from_millis(10 + instance % 17);
            let service = if shared {
                let slice = SharedSlice::new(u32::try_from(instance / 4).expect("few"));
                Service::Shared { slice, latency, load: Duration::from_millis(instance % 3 * 40) }
            } else {
                Service::Exclusive { latency, interval: latency, capacity: 2 }
            };
            let function = FunctionId::new(u32::try_from(instance % functions).expect("few"));
            let up = RouteEvent::InstanceUp { instance: InstanceId::new(instance), function, service };
            router.handle(Timestamp::ZERO, up, &mut actions).expect("up");
        }
        Self { router, actions, now: 0, next: 0, running: std::collections::VecDeque::new() }
    }

    fn tell(&mut self, event: RouteEvent) {
        self.now += 1_000;
        let now = Timestamp::from_nanos(self.now);
        self.router.handle(now, event, &mut self.actions).expect("in order");
        for action in self.actions.drain(..) {
            if let RouteAction::Dispatch { request, instance } = action {
                self.running.push_back((request, instance));
            }
        }
    }

    fn arrive(&mut self, functions: u64) {
        let function = FunctionId::new(u32::try_from(self.next % functions).expect("few"));
        let (request, deadline) = (RequestId::new(self.next), Timestamp::from_nanos(self.now) + DEADLINE);
        self.next += 1;
        self.tell(RouteEvent::Arrived { request, function, deadline: Some(deadline) });
    }

    fn complete(&mut self) {
        if let Some((request, instance)) = self.running.pop_front() {
            self.tell(RouteEvent::Completed { request, instance });
        }
    }
}

/// Times one of two steps that undo each other: the other is not timed.
fn timed(rounds: u64, mut before: impl FnMut(), mut step: impl FnMut()) -> std::time::Duration {
    let mut took = std::time::Duration::ZERO;
    for _ in 0..rounds {
        before();
        let start = Instant::now();
        step();
        took += start.elapsed();
    }
    took
}

fn route(c: &mut Criterion) {
    let mut group = c.benchmark_group("route");
    for size in SIZES {
        for functions in [1, 20] {
            let name = format!("route, {functions} functions");
            group.bench_function(BenchmarkId::new(name, size), |b| {
                let driver = RefCell::new(Driver::new(size, functions, false));
                for _ in 0..size {
                    driver.borrow_mut().arrive(functions);
                }
                let (complete, arrive) =
                    (|| driver.borrow_mut().complete(), || driver.borrow_mut().arrive(functions));
                b.iter_custom(|rounds| timed(rounds, complete, arrive));
            });
        }
        let fulls = [
            ("exclusive", 20, false),
            ("shared, a function each", size, true),
            ("shared, 20 functions", 20, true),
        ];
        for (name, functions, shared) in fulls {
            let driver = RefCell::new(Driver::new(size, functions, shared));
            for _ in 0..3 * size {
                driver.borrow_mut().arrive(functions);
            }
            let (complete, arrive) =
                (|| driver.borrow_mut().complete(), || driver.borrow_mut().arrive(functions));
            group.bench_function(BenchmarkId::new(format!("route, all full, {name}"), size), |b| {
                b.iter_custom(|rounds| timed(rounds, complete, arrive));
            });
            group.bench_function(BenchmarkId::new(format!("complete, all full, {name}"), size), |b| {
                b.iter_custom(|rounds| timed(rounds, arrive, complete));
            });
        }
        group.bench_function(BenchmarkId::new("literal scan for the fastest with room", size), |b| {
            let instances: Vec<(u64, u32, u32)> =
                (0..size).map(|one| (10 + one % 17, u32::from(one % 7 == 0), 2)).collect();
            b.iter(|| {
                black_box(&instances).iter().filter(|one| one.1 < one.2).min_by_key(|one| one.0).copied()
            });
        });
    }
    group.finish();
}

fn evict(c: &mut Criterion) {
    let mut group = c.benchmark_group("evict");
    for (name, policy) in [("LRU", EvictionPolicy::Lru), ("cost-aware", EvictionPolicy::default())] {
        for size in SIZES {
            group.bench_function(BenchmarkId::new(format!("{name}: use, victim, replace"), size), |b| {
                let mut order = EvictionOrder::new(policy);
                let mut now = Timestamp::ZERO;
                for key in 0..size {
                    order.know(
                        now,
                        key,
                        Duration::from_millis(100 + key % 900),
                        Bytes::from_mib(500 + key % 4_000),
                    );
                    order.enter(key);
                }
                let mut key = 0;
                b.iter(|| {
                    now = now + Duration::from_millis(7);
                    key = (key * 5 + 3) % size;
                    order.used(now, key);
                    let victim = order.victim().expect("an instance");
                    order.leave(victim);
                    order.enter(victim);
                    victim
                });
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1))
        .sample_size(20);
    targets = route, evict
}
criterion_main!(benches);
