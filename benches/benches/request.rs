//! Whole devices in a steady state, per event of the platform: locality with and without prices beside load balancing.
//!
//! Orders are answered in turn as they were given. A completed request is replaced by a new request, so that as many wait as at the
//! start. The measured time includes the platform's ledger, and this driver, which costs a few tens of nanoseconds.

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Duration, Engine, FunctionId, GpuId, NodeId, Quota, RequestId, SmShare, Timestamp};
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Platform, PlatformAction, PlatformConfig, PlatformEvent,
    Regime, WholeConfig, WholePool, Work,
};
use gshare_sim::Rng;
use gshare_sim::scenario::LoadBalance;
use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

struct Driver {
    platform: Platform,
    now: Timestamp,
    open: VecDeque<PlatformAction>,
    actions: Vec<PlatformAction>,
    rng: Rng,
    models: u64,
    next: u64,
    step: Duration,
}

const SECOND: Duration = Duration::from_secs(1);

impl Driver {
    /// GPUs hold 4 models each; requests wait already when they come.
    fn new(pool: WholePool, gpus: u32, models: u32, waiting: u32) -> Self {
        let day = Duration::from_secs(86_400);
        let bounds = PlatformConfig::default().with_max_wait(day).with_max_waiting(u32::MAX);
        let bounds = bounds.with_start_timeout(day).with_drain_timeout(day);
        let mut driver = Self {
            platform: Platform::new(bounds, vec![pool.into()]).expect("the bounds are sound"),
            now: Timestamp::ZERO,
            open: VecDeque::new(),
            actions: Vec::new(),
            rng: Rng::new(1),
            models: u64::from(models),
            next: 0,
            step: Duration::from_nanos(1_000_000_000 / u64::from(gpus)),
        };
        let point = ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 1, 0.5, SECOND, SECOND);
        let profile = ProfileTable::sparse(vec![point.expect("the point is sound")]).ok();
        let spec = FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(2));
        let spec = spec.with_loads(SECOND.saturating_mul(3), SECOND).with_instances(0, u32::MAX);
        for function in 0..models {
            let (function, spec) = (FunctionId::new(function), Box::new(spec.clone()));
            driver.tell(PlatformEvent::FunctionDeployed { function, spec });
        }
        for _ in 0..waiting + gpus {
            driver.arrive();
        }
        for gpu in 0..gpus {
            let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(8)).with_regime(Regime::Whole);
            driver.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec });
        }
        driver
    }

    fn tell(&mut self, event: PlatformEvent) {
        self.platform
            .handle(self.now, event, &mut self.actions)
            .expect("the driver answers what it was told");
        let answered = |action: &PlatformAction| !matches!(action, PlatformAction::Drain { .. });
        self.open.extend(self.actions.drain(..).filter(answered));
    }

    /// The lower of two numbers: some models are asked for more often than others.
    fn arrive(&mut self) {
        let model = self.rng.below(self.models).min(self.rng.below(self.models));
        let function = FunctionId::new(u32::try_from(model).expect("below a u32"));
        let request = RequestId::new(self.next);
        self.next += 1;
        self.tell(PlatformEvent::RequestArrived { request, function, deadline: None });
    }

    /// One event, and one more when a request has to be replaced: how many.
    fn events(&mut self) -> u64 {
        self.now = self.now + self.step;
        let (instance, report) = match self.open.pop_front() {
            Some(PlatformAction::Stop { instance, .. }) => (instance, InstanceReport::Gone),
            Some(PlatformAction::Start { instance, .. }) => (instance, InstanceReport::Ready),
            Some(PlatformAction::Dispatch { request, .. }) => {
                self.tell(PlatformEvent::RequestDone { request, took: SECOND });
                self.arrive();
                return 2;
            }
            other => unreachable!("there is always work: {other:?}"),
        };
        self.tell(PlatformEvent::Instance { instance, report });
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

fn policies() -> [(&'static str, WholePool); 3] {
    let pool = |config| WholePool::new(config).expect("the configuration is sound");
    [
        ("lalbo3", pool(WholeConfig::paper(25))),
        ("evict_cost_aware", pool(WholeConfig::default())),
        ("load_balance", pool(WholeConfig::default()).with_policy(Box::new(LoadBalance))),
    ]
}

/// Prints the memory of a waiting request: a million of them, by the growth of the process.
fn memory() {
    let waiting = 1_000_000_u32;
    let pool = WholePool::new(WholeConfig::default()).expect("the configuration is sound");
    let before = gshare_bench::resident();
    let mut driver = Driver::new(pool, 1, 1_000, 0);
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
fn short_runs(name: &str, pool: WholePool, (gpus, models, waiting): (u32, u32, u32)) {
    let (runs, events) = if gshare_bench::runs_as_test() { (3, 10) } else { (301, 1_000) };
    let mut driver = Driver::new(pool, gpus, models, waiting);
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
        for (name, pool) in policies() {
            short_runs(name, pool, size);
        }
    }
}
