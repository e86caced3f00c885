//! The request scheduler in a steady state, per event: ours from indices beside the literal O(queue) algorithms.
//!
//! Orders are answered in turn as they were given. A completed request is replaced by a new request, so that as many wait as at the
//! start. The measured time includes this driver, which costs a few tens of nanoseconds.

use criterion::{BenchmarkId, Criterion};
use gshare_core::{Bytes, Duration, Engine, GpuId, GpuKind, ModelId, NodeId, RequestId, TenantId, Timestamp};
use gshare_sched::request::{
    LocalityScheduler, ModelProfile, Policy, RequestAction, RequestEvent, SchedulerConfig,
};
use gshare_sim::Rng;
use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

#[path = "../../gshare-sched/tests/support/request_literal.rs"]
mod literal;

trait Scheduler {
    fn tell(&mut self, now: Timestamp, event: RequestEvent, out: &mut Vec<RequestAction>);
}

impl Scheduler for LocalityScheduler {
    fn tell(&mut self, now: Timestamp, event: RequestEvent, out: &mut Vec<RequestAction>) {
        self.handle(now, event, out).expect("the driver answers what it was told");
    }
}

impl Scheduler for literal::Literal {
    fn tell(&mut self, now: Timestamp, event: RequestEvent, out: &mut Vec<RequestAction>) {
        self.handle(now, event, out);
    }
}

struct Driver<S> {
    scheduler: S,
    now: Timestamp,
    open: VecDeque<RequestAction>,
    actions: Vec<RequestAction>,
    rng: Rng,
    models: u64,
    next: u64,
    step: Duration,
}

const SECOND: Duration = Duration::from_secs(1);

impl<S: Scheduler> Driver<S> {
    /// GPUs hold 4 models each; requests wait already when they come.
    fn new(scheduler: S, gpus: u32, models: u32, waiting: u32) -> Self {
        let mut driver = Self {
            scheduler,
            now: Timestamp::ZERO,
            open: VecDeque::new(),
            actions: Vec::new(),
            rng: Rng::new(1),
            models: u64::from(models),
            next: 0,
            step: Duration::from_nanos(1_000_000_000 / u64::from(gpus)),
        };
        for model in 0..models {
            let model = ModelId::new(model);
            driver.tell(RequestEvent::ModelAdded { model, memory: Bytes::from_gib(2) });
            let profile =
                ModelProfile { load_disk: SECOND.saturating_mul(3), load_host: SECOND, infer: SECOND };
            driver.tell(RequestEvent::ModelProfiled { model, kind: GpuKind::new(0), profile });
        }
        for _ in 0..waiting + gpus {
            driver.arrive();
        }
        for gpu in 0..gpus {
            let (gpu, memory) = (GpuId::new(gpu), Bytes::from_gib(8));
            driver.tell(RequestEvent::GpuJoined { gpu, kind: GpuKind::new(0), node: NodeId::new(0), memory });
        }
        driver
    }

    fn tell(&mut self, event: RequestEvent) {
        self.scheduler.tell(self.now, event, &mut self.actions);
        self.open.extend(self.actions.drain(..));
    }

    /// The lower of two numbers: some models are asked for more often than others.
    fn arrive(&mut self) {
        let model = self.rng.below(self.models).min(self.rng.below(self.models));
        let model = ModelId::new(u32::try_from(model).expect("below a u32"));
        let request = RequestId::new(self.next);
        self.next += 1;
        self.tell(RequestEvent::Arrived { request, model, tenant: TenantId::new(0), deadline: None });
    }

    /// One event, and one more when a request has to be replaced: how many.
    fn events(&mut self) -> u64 {
        self.now = self.now + self.step;
        match self.open.pop_front() {
            Some(RequestAction::Evict { gpu, model }) => self.tell(RequestEvent::Evicted { gpu, model }),
            Some(RequestAction::Load { gpu, model, .. }) => {
                self.tell(RequestEvent::Loaded { gpu, model, took: SECOND.saturating_mul(3) });
            }
            Some(RequestAction::Dispatch { gpu, request, .. }) => {
                self.tell(RequestEvent::Completed { gpu, request, took: SECOND });
                self.arrive();
                return 2;
            }
            _ => unreachable!("there is always work"),
        }
        1
    }

    fn run(&mut self, events: u64) -> std::time::Duration {
        let start = Instant::now();
        let mut done = 0;
        while done < events {
            done += self.events();
        }
        let took = start.elapsed();
        black_box(&self.open);
        // One event too many would be counted as none.
        took.mul_f64(
            f64::from(u32::try_from(events).unwrap_or(u32::MAX))
                / f64::from(u32::try_from(done).unwrap_or(u32::MAX)),
        )
    }
}

fn engine(config: SchedulerConfig) -> LocalityScheduler {
    LocalityScheduler::new(config).expect("the configuration is sound")
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("request");
    group.sample_size(10).warm_up_time(std::time::Duration::from_millis(500));
    group.measurement_time(std::time::Duration::from_secs(2));
    for (gpus, models, waiting) in [(12, 35, 1_000), (200, 400, 2_000), (10_000, 20_000, 100_000)] {
        if is_too_large(gpus) {
            continue;
        }
        let id =
            |name: &str| BenchmarkId::new(name, format!("{gpus}_gpus_{models}_models_{waiting}_waiting"));
        let o3 = SchedulerConfig::paper(Policy::LalbO3 { skip_limit: 25 });
        for (name, config) in [("lalbo3", o3), ("evict_cost_aware", SchedulerConfig::evict_cost_aware())] {
            let mut driver = Driver::new(engine(config), gpus, models, waiting);
            driver.run(4 * u64::from(gpus));
            group.bench_function(id(name), |b| b.iter_custom(|events| driver.run(events)));
        }
        if waiting > 10_000 {
            // The literal algorithms take minutes to fill the largest cluster once.
            continue;
        }
        let literal = literal::Literal::new(Some(25), Duration::from_secs(60), 3);
        let mut driver = Driver::new(literal, gpus, models, waiting);
        driver.run(4 * 12);
        group.bench_function(id("literal_lalbo3"), |b| b.iter_custom(|events| driver.run(events)));
    }
    group.finish();
}

/// Resident memory of this process in bytes, from the kernel.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4096)
}

/// Prints the memory of a waiting request: a million of them, by the growth of the process.
fn memory() {
    let waiting = 1_000_000;
    let mut config = SchedulerConfig::default();
    config.max_requests = waiting;
    let before = resident();
    let mut driver = Driver::new(engine(config), 1, 1_000, 0);
    (0..waiting - 2).for_each(|_| driver.arrive());
    if let (Some(before), Some(after)) = (before, resident()) {
        println!(
            "request/memory: {} bytes per waiting request ({waiting} of them)",
            (after - before) / u64::from(waiting)
        );
    }
    black_box(&driver.open);
}

/// Prints the least and the middle time per event of many short runs: on a busy machine a long run measures the others, too.
fn short_runs() {
    const RUNS: usize = 301;
    for (gpus, models, waiting, events) in [(12, 35, 1_000, 1_000), (10_000, 20_000, 100_000, 2_000u32)] {
        if is_too_large(gpus) {
            continue;
        }
        let o3 = SchedulerConfig::paper(Policy::LalbO3 { skip_limit: 25 });
        for (name, config) in [("lalbo3", o3), ("evict_cost_aware", SchedulerConfig::evict_cost_aware())] {
            let mut driver = Driver::new(engine(config), gpus, models, waiting);
            driver.run(4 * u64::from(gpus));
            let mut times: Vec<f64> = (0..RUNS)
                .map(|_| driver.run(events.into()).as_secs_f64() * 1e9 / f64::from(events))
                .collect();
            times.sort_by(f64::total_cmp);
            println!(
                "request/{name}/{gpus}_gpus: {:.0} ns per event at least, {:.0} in the middle of {RUNS} runs of {events}",
                times[0],
                times[RUNS / 2]
            );
        }
    }
}

/// With debug assertions every event walks over all waiting requests: only the small sizes are run then.
fn is_too_large(gpus: u32) -> bool {
    cfg!(debug_assertions) && gpus > 200
}

fn main() {
    if !cfg!(debug_assertions) {
        memory();
    }
    if !gshare_bench::runs_as_test() {
        short_runs();
    }
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion);
    criterion.final_summary();
}
