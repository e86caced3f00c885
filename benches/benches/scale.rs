//! Cost of the scalers: one period of a GPU with 64 clients, and one load report among 100,000 functions.
//!
//! The floor beside the first reads and writes the same number of counters; the floor beside the second counts the same
//! window.
#![allow(missing_docs)]

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use gshare_bench::peaks::PeakHorizontal;
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::{
    ClientId, Duration, Engine, FunctionId, GpuId, ModelId, Quota, QuotaRange, ServiceClass, SmShare,
    Timestamp,
};
use gshare_sched::scale::{
    DiluVertical, DiluVerticalConfig, FunctionScale, HeuristicHorizontal, HeuristicHorizontalConfig,
    HorizontalEvent, LazyHorizontal, LazyHorizontalConfig, VerticalEvent,
};
use std::hint::black_box;

const CLIENTS: u32 = 64;
const FUNCTIONS: u32 = 100_000;

fn vertical(c: &mut Criterion) {
    let mut group = c.benchmark_group("vertical");
    group.throughput(Throughput::Elements(u64::from(CLIENTS)));
    let mut scaler = DiluVertical::new(DiluVerticalConfig::default()).expect("default");
    let (mut now, mut actions) = (Timestamp::from_millis(1_000), Vec::new());
    let percent = |percent| Quota::from_percent(percent).expect("per cent");
    for slot in 0..CLIENTS {
        let quota = QuotaRange::new(percent(1), percent(50)).expect("range");
        let class = if slot % 4 == 0 { ServiceClass::SLO_SENSITIVE } else { ServiceClass::BestEffort };
        let (client, gpu) = (ClientId::new(slot, 0), GpuId::new(0));
        scaler
            .handle(now, VerticalEvent::ClientJoined { client, gpu, quota, class }, &mut actions)
            .expect("joins");
    }
    let mut number = 0u64;
    // Each client reports its launches, each owner ends an iteration, every third of them a bad iteration.
    group.bench_function("period_of_64_clients", |b| {
        b.iter(|| {
            actions.clear();
            number += 1;
            for slot in 0..CLIENTS {
                let client = ClientId::new(slot, 0);
                let used = VerticalEvent::UsageReported { client, tokens: 50, largest_kernel: 20 };
                scaler.handle(now, used, &mut actions).expect("known");
                if slot % 4 == 0 {
                    let bad = (number + u64::from(slot)).is_multiple_of(3);
                    let first_launch = now.saturating_sub(Duration::from_millis(if bad { 40 } else { 20 }));
                    let (model, batch, last_launch) = (ModelId::new(slot), 1, now);
                    let done =
                        VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch };
                    scaler.handle(now, done, &mut actions).expect("known");
                }
            }
            now = scaler.next_deadline().expect("clients");
            scaler.handle(now, VerticalEvent::DeadlineReached, &mut actions).expect("in time");
            black_box(actions.len())
        });
    });
    let mut counters = vec![1u64; CLIENTS as usize * 4];
    group.bench_function("floor_256_counters", |b| {
        b.iter(|| {
            for counter in &mut counters {
                *counter = black_box(counter.wrapping_mul(3) / 7 + 1);
            }
            black_box(counters.iter().sum::<u64>())
        });
    });
    group.finish();
}

fn spec() -> FunctionScale {
    let point = |percent: u16, throughput| {
        let (sm, quota) = (SmShare::from_percent(percent).expect("per cent"), Quota::WHOLE);
        let exec = Duration::from_millis(20);
        ProfilePoint::measured(sm, quota, 1, throughput, exec, exec).expect("sound")
    };
    let points = vec![point(6, 49.85), point(12, 68.64), point(24, 73.43)];
    let profile = ProfileTable::grid(points).expect("a grid");
    // With a bound, so that the heuristic scaler looks at queues.
    FunctionScale { profile, max_p95: Some(Duration::from_millis(25)), min_instances: 1, max_instances: 8 }
}

/// One tick: a load report of each function, with loads that swing around the deployed throughput.
fn tick<E>(c: &mut Criterion, name: &str, mut scaler: E)
where
    E: Engine<Event = HorizontalEvent, Error: std::fmt::Debug>,
{
    let (mut now, mut actions) = (Timestamp::from_millis(1_000), Vec::new());
    for function in 0..FUNCTIONS {
        let added = HorizontalEvent::FunctionAdded { function: FunctionId::new(function), spec: spec() };
        scaler.handle(now, added, &mut actions).expect("new");
    }
    let mut group = c.benchmark_group("horizontal");
    group.throughput(Throughput::Elements(u64::from(FUNCTIONS))).sample_size(10);
    let mut number = 0u64;
    group.bench_function(name, |b| {
        b.iter(|| {
            number += 1;
            now = now.saturating_add(Duration::from_secs(1));
            actions.clear();
            for function in 0..FUNCTIONS {
                let rate = RequestRate::per_second((u64::from(function) * 7 + number) % 60);
                let report = HorizontalEvent::LoadReported { function: FunctionId::new(function), rate };
                scaler.handle(now, report, &mut actions).expect("in time");
            }
            black_box(actions.len())
        });
    });
    group.finish();
}

fn horizontal(c: &mut Criterion) {
    tick(
        c,
        "lazy_tick_of_100000_functions",
        LazyHorizontal::new(LazyHorizontalConfig::default()).expect("default"),
    );
    tick(c, "peaks_tick_of_100000_functions", PeakHorizontal::default());
    let heuristic = HeuristicHorizontal::new(HeuristicHorizontalConfig::default()).expect("default");
    tick(c, "heuristic_tick_of_100000_functions", heuristic);
    let mut group = c.benchmark_group("horizontal");
    group.throughput(Throughput::Elements(u64::from(FUNCTIONS))).sample_size(10);
    let windows: Vec<[u64; 40]> = (0..u64::from(FUNCTIONS)).map(|n| [n % 60; 40]).collect();
    group.bench_function("floor_count_100000_windows", |b| {
        b.iter_batched(
            || (),
            |()| {
                let above = |window: &[u64; 40]| window.iter().filter(|load| **load > black_box(50)).count();
                windows.iter().map(above).sum::<usize>()
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, vertical, horizontal);
criterion_main!(benches);
