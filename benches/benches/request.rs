//! The request scheduler in a steady state, per event: ours from indices beside the literal O(queue) algorithms.
//!
//! Orders are answered in turn as they were given. A completed request is replaced by a new request, so that as many wait as at the
//! start. The measured time includes this driver, which costs a few tens of nanoseconds.

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

/// Prints the memory of a waiting request: a million of them, by the growth of the process.
fn memory() {
    let waiting = 1_000_000;
    let mut config = SchedulerConfig::default();
    config.max_requests = waiting;
    let before = gshare_bench::resident();
    let mut driver = Driver::new(engine(config), 1, 1_000, 0);
    (0..waiting - 2).for_each(|_| driver.arrive());
    if let (Some(before), Some(after)) = (before, gshare_bench::resident()) {
        println!(
            "request/memory: {} bytes per waiting request ({waiting} of them)",
            (after - before) / u64::from(waiting)
        );
    }
    black_box(&driver.open);
}

/// Prints the least and the middle time per event of many short runs: on a busy machine a long run measures the others, too.
fn short_runs<S: Scheduler>(name: &str, scheduler: S, (gpus, models, waiting): (u32, u32, u32)) {
    let (runs, events) = if gshare_bench::runs_as_test() { (3, 10) } else { (301, 1_000) };
    let mut driver = Driver::new(scheduler, gpus, models, waiting);
    driver.run(4 * u64::from(gpus));
    let mut times: Vec<f64> =
        (0..runs).map(|_| driver.run(events).as_secs_f64() * 1e9 / events as f64).collect();
    times.sort_by(f64::total_cmp);
    println!(
        "request/{name}/{gpus}_gpus_{models}_models_{waiting}_waiting: {:.0} ns per event at least, {:.0} in the middle of {runs} runs of {events}",
        times[0],
        times[runs / 2]
    );
}

/// With debug assertions every event walks over all waiting requests: only the small sizes are run then.
fn is_too_large(gpus: u32) -> bool {
    cfg!(debug_assertions) && gpus > 200
}

fn main() {
    if !cfg!(debug_assertions) {
        memory();
    }
    let sizes = [(12, 35, 1_000), (200, 400, 2_000), (10_000, 20_000, 100_000)];
    for size in sizes.into_iter().filter(|&(gpus, ..)| !is_too_large(gpus)) {
        let o3 = SchedulerConfig::paper(Policy::LalbO3 { skip_limit: 25 });
        short_runs("lalbo3", engine(o3), size);
        short_runs("evict_cost_aware", engine(SchedulerConfig::evict_cost_aware()), size);
        // The literal algorithms take minutes to fill the largest cluster once.
        if size.2 <= 10_000 {
            short_runs("literal_lalbo3", literal::Literal::new(Some(25), Duration::from_secs(60), 3), size);
        }
    }
}
