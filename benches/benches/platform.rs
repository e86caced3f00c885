//! Cost of the platform: an event at 10,000 devices, 100,000 instances and 1,000 functions, an event and a deployment at 10 to 100,000
//! devices, and the memory of a waiting request.
//!
//! Beside each figure is the floor of the same run: the work of the inner engines for the same event, called alone.
#![allow(missing_docs)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, InstanceId, NodeId, Quota, RequestId, SmShare, Timestamp,
};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer};
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Platform, PlatformAction, PlatformEvent, Work,
};
use gshare_sched::scale::{
    Fleet, FunctionScale, HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler, LoadReport,
};
use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

const GPUS_PER_NODE: u32 = 8;

/// Sizes of the claim, or small sizes where the benches are only run as a test.
struct Sizes {
    devices: u32,
    functions: u32,
    instances: u32,
    waiting: u64,
}

fn sizes() -> Sizes {
    if gshare_bench::runs_as_test() {
        Sizes { devices: 100, functions: 10, instances: 1_000, waiting: 10_000 }
    } else {
        Sizes { devices: 10_000, functions: 1_000, instances: 100_000, waiting: 1_000_000 }
    }
}

/// One point: a tenth of the SMs, all of the time.
fn profile() -> ProfileTable {
    let ms = Duration::from_millis;
    let sm = SmShare::from_percent(10).expect("per cent");
    let point = ProfilePoint::measured(sm, Quota::WHOLE, 1, 50.0, ms(20), ms(22)).expect("a point");
    ProfileTable::grid(vec![point]).expect("a grid")
}

/// A platform with all of its instances ready.
fn full(sizes: &Sizes) -> (Platform, Vec<PlatformAction>) {
    let mut platform = Platform::fractional().expect("default");
    let mut orders = Vec::new();
    let now = Timestamp::ZERO;
    for gpu in 0..sizes.devices {
        let spec = DeviceSpec::new(NodeId::new(gpu / GPUS_PER_NODE), Bytes::from_gib(80));
        platform
            .handle(now, PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec }, &mut orders)
            .expect("new");
    }
    let each = sizes.instances / sizes.functions;
    for function in 0..sizes.functions {
        let work = Work::Inference { profile: Some(profile()) };
        let spec = FunctionSpec::new(work, Bytes::from_gib(4)).with_instances(each, each);
        let event =
            PlatformEvent::FunctionDeployed { function: FunctionId::new(function), spec: Box::new(spec) };
        platform.handle(now, event, &mut orders).expect("new");
    }
    let starts: Vec<InstanceId> = orders
        .drain(..)
        .filter_map(|order| match order {
            PlatformAction::Start { instance, .. } => Some(instance),
            _ => None,
        })
        .collect();
    assert_eq!(starts.len(), sizes.instances as usize, "each is placed");
    for instance in starts {
        let ready = PlatformEvent::Instance { instance, report: InstanceReport::Ready };
        platform.handle(now, ready, &mut orders).expect("known");
    }
    orders.clear();
    (platform, orders)
}

fn events(c: &mut Criterion) {
    let sizes = sizes();
    let (mut platform, mut orders) = full(&sizes);
    let mut group = c.benchmark_group("platform");
    let mut number = 0u64;
    let mut now = Timestamp::from_millis(1);
    group.throughput(Throughput::Elements(2));
    group.bench_function("request_arrives_and_is_done", |b| {
        b.iter(|| {
            number += 1;
            now = now + Duration::from_micros(20);
            orders.clear();
            let request = RequestId::new(number);
            let function =
                FunctionId::new(u32::try_from(number % u64::from(sizes.functions)).expect("small"));
            let arrived = PlatformEvent::RequestArrived { request, function, deadline: None };
            platform.handle(now, arrived, &mut orders).expect("known");
            let took = Duration::from_millis(20);
            platform.handle(now, PlatformEvent::RequestDone { request, took }, &mut orders).expect("runs");
            black_box(orders.len())
        });
    });
    // An instance dies. The next look at its function's load starts a replacement, which becomes ready. This look is at all
    // functions at once, and is a bench of its own.
    let mut alive: VecDeque<InstanceId> = (0..u64::from(sizes.instances)).map(InstanceId::new).collect();
    let mut turn = |alone: bool| {
        let (mut reports, mut look) = (std::time::Duration::ZERO, std::time::Duration::ZERO);
        orders.clear();
        let begun = Instant::now();
        if !alone {
            let instance = alive.pop_front().expect("instances");
            let gone = PlatformEvent::Instance { instance, report: InstanceReport::Gone };
            platform.handle(now, gone, &mut orders).expect("known");
            reports += begun.elapsed();
        }
        let begun = Instant::now();
        if let Some(due) = platform.next_deadline() {
            now = now.max(due);
            platform.handle(now, PlatformEvent::DeadlineReached, &mut orders).expect("in time");
        }
        look += begun.elapsed();
        let starts = orders.drain(..).filter_map(|order| match order {
            PlatformAction::Start { instance, .. } => Some(instance),
            _ => None,
        });
        let starts: Vec<InstanceId> = starts.collect();
        for instance in starts {
            let begun = Instant::now();
            let ready = PlatformEvent::Instance { instance, report: InstanceReport::Ready };
            platform.handle(now, ready, &mut orders).expect("known");
            reports += begun.elapsed();
            alive.push_back(instance);
        }
        (reports, look)
    };
    group.throughput(Throughput::Elements(2));
    group.bench_function("instance_dies_and_another_is_ready", |b| {
        b.iter_custom(|count| (0..count).map(|_| turn(false).0).sum());
    });
    group.throughput(Throughput::Elements(sizes.functions.into()));
    group.bench_function("look_at_the_load_of_all_functions", |b| {
        b.iter_custom(|count| (0..count).map(|_| turn(true).1).sum());
    });
    group.finish();
    drop(platform);
    devices(c);
    engines(c, &sizes);
    memory(&sizes);
}

/// A request and its end, and a deployment and its end, by the number of devices.
fn devices(c: &mut Criterion) {
    let numbers: &[u32] =
        if gshare_bench::runs_as_test() { &[10, 100] } else { &[10, 100, 1_000, 10_000, 100_000] };
    let mut group = c.benchmark_group("platform_by_devices");
    for &devices in numbers {
        let functions = (devices / 10).min(1_000);
        let sizes = Sizes { devices, functions, instances: (devices * 10).min(100_000), waiting: 0 };
        let (mut platform, mut orders) = full(&sizes);
        let (mut number, now) = (0, Timestamp::from_millis(1));
        group.bench_function(format!("request/{devices}"), |b| {
            b.iter(|| {
                number += 1;
                orders.clear();
                let request = RequestId::new(number);
                let function = FunctionId::new(u32::try_from(number % u64::from(functions)).expect("small"));
                let arrived = PlatformEvent::RequestArrived { request, function, deadline: None };
                platform.handle(now, arrived, &mut orders).expect("known");
                let took = Duration::from_millis(20);
                platform
                    .handle(now, PlatformEvent::RequestDone { request, took }, &mut orders)
                    .expect("runs");
                black_box(orders.len())
            });
        });
        group.bench_function(format!("deployment/{devices}"), |b| {
            b.iter(|| {
                orders.clear();
                let function = FunctionId::new(functions);
                let work = Work::Inference { profile: Some(profile()) };
                let spec = Box::new(FunctionSpec::new(work, Bytes::from_gib(4)));
                let deployed = PlatformEvent::FunctionDeployed { function, spec };
                platform.handle(now, deployed, &mut orders).expect("new");
                platform
                    .handle(now, PlatformEvent::FunctionRemoved { function }, &mut orders)
                    .expect("known");
                black_box(orders.len())
            });
        });
    }
    group.finish();
}

/// The work of the scaler and the packer when an instance dies and is replaced, without anything around them.
fn engines(c: &mut Criterion, sizes: &Sizes) {
    let mut packer = MaxRects::new(MaxRectsConfig::default());
    for gpu in 0..sizes.devices {
        packer.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(80))).expect("new");
    }
    let tenth = SmShare::from_percent(10).expect("per cent");
    let demand = Demand::new(Quota::WHOLE, tenth).with_memory(Bytes::from_gib(4));
    let mut placed: VecDeque<_> =
        (0..sizes.instances).map(|_| packer.place(&demand).expect("room").placement.id).collect();
    let mut scaler = HeuristicHorizontal::new(HeuristicHorizontalConfig::default()).expect("default");
    let each = sizes.instances / sizes.functions;
    let mut names = (0..).map(InstanceId::new);
    let mut start = |fleet: &mut Fleet, now| {
        let (instance, point) = (names.next().expect("names"), fleet.startable(now).next().expect("room").0);
        fleet.started(now, instance, point);
        fleet.ready(now, instance);
        instance
    };
    let mut fleets = Vec::new();
    let mut alive = VecDeque::new();
    for function in (0..sizes.functions).map(FunctionId::new) {
        let spec =
            FunctionScale { profile: profile(), max_p95: None, min_instances: each, max_instances: each };
        let mut fleet = Fleet::new(function, spec).expect("new");
        alive.extend((0..each).map(|_| (function, start(&mut fleet, Timestamp::ZERO))));
        fleets.push(fleet);
    }
    let (mut now, mut orders) = (Timestamp::ZERO, Vec::new());
    let mut group = c.benchmark_group("engines_alone");
    group.bench_function("instance_dies_and_is_replaced", |b| {
        b.iter(|| {
            now = now + Duration::from_secs(1);
            let (function, instance) = alive.pop_front().expect("instances");
            let fleet = &mut fleets[function.index()];
            fleet.remove(instance);
            packer.release(placed.pop_front().expect("placements")).expect("known");
            while fleet.lacks() {
                placed.push_back(packer.place(&demand).expect("room").placement.id);
                alive.push_back((function, start(fleet, now)));
            }
            orders.clear();
            let load = gshare_core::profile::RequestRate::ZERO;
            scaler.decide(LoadReport { now, function, fleet, load }, &mut orders);
        });
    });
    group.finish();
}

/// Prints the memory of each waiting request.
fn memory(sizes: &Sizes) {
    let small = Sizes { devices: 10, functions: 100, instances: 100, waiting: sizes.waiting };
    let (mut platform, mut orders) = full(&small);
    let before = gshare_bench::resident().unwrap_or(0);
    for number in 0..small.waiting {
        let function = FunctionId::new(u32::try_from(number % 100).expect("small"));
        let event =
            PlatformEvent::RequestArrived { request: RequestId::new(number), function, deadline: None };
        platform.handle(Timestamp::ZERO, event, &mut orders).expect("known");
    }
    orders = Vec::new();
    let waiting: usize = (0..100).map(|function| platform.waiting(FunctionId::new(function))).sum();
    let each = gshare_bench::resident().unwrap_or(0).saturating_sub(before)
        / u64::try_from(waiting.max(1)).expect("fits");
    println!("platform: {waiting} requests wait, {each} bytes of resident memory each");
    black_box(&orders);
}

criterion_group!(benches, events);
criterion_main!(benches);
