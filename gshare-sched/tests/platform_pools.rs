//! Each pool under a platform in a host where everything goes wrong, and a platform that is broken on purpose.
#![allow(clippy::cast_possible_truncation, reason = "small numbers of a test")]

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, GpuKind, GpuShare, InstanceId, ModelId, NodeId, Quota,
    QuotaRange, RequestId, SmShare, Timestamp,
};
use gshare_sched::Wrapped;
use gshare_sched::pipeline::{Goal, KeeperConfig, RouterConfig};
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, InstanceReport,
    MigLayout, Platform, PlatformAction, PlatformConfig, PlatformEvent, Regime, RegimePool, SlicedConfig,
    SlicedPool, Weights, WholeConfig, WholePool, Work,
};
use gshare_sched::scale::{LazyHorizontal, LazyHorizontalConfig};
use gshare_sim::Story;
use gshare_sim::conformance::{PoolTrial, chain, pool as pool_suite};
use gshare_sim::world::{FunctionOutcome, Outcome};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn pipeline(times: &[u64], gib: u64, slo_ms: u64, instances: (u32, u32)) -> FunctionSpec {
    let (dag, goal) = (Box::new(chain(times, gib).unwrap()), Box::new(Goal::default()));
    FunctionSpec::new(Work::Pipeline { dag, goal }, Bytes::from_gib(gib))
        .with_slo(Duration::from_millis(slo_ms))
        .with_instances(instances.0, instances.1)
}

fn sliced_trial(seed: u64, faults: bool) -> PoolTrial {
    let mig = |node, slices: &[&str]| {
        let layout = MigLayout::named("A100-80", slices).unwrap();
        DeviceSpec::new(NodeId::new(node), Bytes::from_gib(80)).with_mig(layout)
    };
    let mut trial = PoolTrial {
        devices: vec![
            mig(0, &["4g.40gb", "2g.20gb", "1g.10gb"]),
            mig(0, &["2g.20gb", "2g.20gb", "2g.20gb"]),
            mig(1, &["3g.40gb", "3g.40gb"]),
        ],
        functions: vec![
            pipeline(&[20, 20], 7, 400, (2, 6)),
            pipeline(&[30, 20, 10], 8, 600, (0, 4)),
            pipeline(&[10], 7, 300, (2, 2)),
            pipeline(&[20], 8, 500, (1, 1)),
            pipeline(&[15, 15], 6, 2_000, (0, 8)),
        ],
        requests: 600,
        every: Duration::from_millis(15 + 20 * (seed % 5)),
        faults,
        patience: Duration::from_secs(600),
    };
    if migrates(seed) {
        trial.functions.iter_mut().for_each(|spec| spec.max_instances = u32::MAX);
    }
    trial
}

/// Whether instances move to better slices. Both instances exist during a move, so no maximum holds then.
const fn migrates(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

fn sliced(seed: u64) -> SlicedPool {
    let mut keeper = if seed.is_multiple_of(3) { KeeperConfig::paper() } else { KeeperConfig::default() };
    keeper.migration &= migrates(seed);
    let router = if seed % 4 == 1 { RouterConfig::paper() } else { RouterConfig::default() };
    let config = SlicedConfig::default().with_keeper(keeper).with_router(router);
    SlicedPool::with_config(config).unwrap()
}

fn inference(gib: u64, ms: u64) -> FunctionSpec {
    // Batches of three, as in some schedulers, are measured too.
    let points = [(1, ms), (3, 2 * ms)].map(|(batch, ms)| {
        let (rate, time) = (f64::from(batch) * 1e3 / ms as f64, Duration::from_millis(ms));
        ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, batch, rate, time, time).unwrap()
    });
    let profile = Some(ProfileTable::sparse(points.to_vec()).unwrap());
    FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(gib))
        .with_loads(Duration::from_millis(400 * gib), Duration::from_millis(80 * gib))
}

fn whole_trial(seed: u64, faults: bool) -> PoolTrial {
    let gpu = |node, kind: u8, gib| {
        let spec = DeviceSpec::new(NodeId::new(node), Bytes::from_gib(gib)).with_kind(GpuKind::new(kind));
        spec.with_regime(Regime::Whole)
    };
    PoolTrial {
        devices: vec![gpu(0, 0, 16), gpu(0, 0, 16), gpu(1, 1, 24)],
        functions: (0..7)
            .map(|n| {
                let spec = inference(3 + u64::from(n) % 4, 30 + u64::from(n));
                spec.with_instances(u32::from(n % 3 == 0), 1 + n % 3)
            })
            .collect(),
        requests: 600,
        every: Duration::from_millis(30 + 30 * (seed % 5)),
        faults,
        patience: Duration::from_secs(900),
    }
}

fn whole(seed: u64) -> WholePool {
    let mut config = if seed.is_multiple_of(3) { WholeConfig::paper(25) } else { WholeConfig::default() };
    if seed.is_multiple_of(2) {
        config.host_memory = Bytes::from_gib(9);
    }
    WholePool::new(config).unwrap()
}

fn fractional_trial(seed: u64, faults: bool) -> PoolTrial {
    let gpu = |node| DeviceSpec::new(NodeId::new(node), Bytes::from_gib(16));
    let spec = |n: u64| {
        let points = [(10, 40, 12.0), (25, 20, 30.0), (50, 14, 55.0)].map(|(sm, ms, rate)| {
            let (sm, ms) = (SmShare::from_percent(sm).unwrap(), Duration::from_millis(ms));
            ProfilePoint::measured(sm, Quota::WHOLE, 1, rate, ms, ms).unwrap()
        });
        let profile = Some(ProfileTable::sparse(points.to_vec()).unwrap());
        FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(3 + 2 * (n % 4)))
            .with_slo(Duration::from_millis(300))
            .with_instances(u32::from(n < 3), 1 + n as u32)
            .with_loads(Duration::from_millis(900), Duration::from_millis(200))
    };
    let mut spread = spec(1).with_devices(2);
    spread.memory = Bytes::from_gib(22);
    // Two functions of one model, and one of another.
    let with_weights = |n: u64| match n {
        1 | 4 => spec(n).with_weights(Some(Weights { model: ModelId::new(7), bytes: Bytes::from_gib(3) })),
        3 => spec(n).with_weights(Some(Weights { model: ModelId::new(8), bytes: Bytes::from_gib(5) })),
        _ => spec(n),
    };
    PoolTrial {
        devices: vec![gpu(0), gpu(0), gpu(1)],
        functions: (0..6).map(with_weights).chain([spread]).collect(),
        requests: 600,
        every: Duration::from_millis(10 + 20 * (seed % 5)),
        faults,
        patience: Duration::from_secs(600),
    }
}

fn fractional() -> FractionalPool {
    FractionalPool::new(FractionalConfig::default(), FractionalPolicies::fast().unwrap()).unwrap()
}

/// A platform of one pool, with bounds that no request and no instance of these trials meets.
fn alone(pool: impl Into<RegimePool>) -> Platform {
    let hour = Duration::from_secs(3_600);
    let bounds = PlatformConfig::default().with_max_wait(hour).with_start_timeout(hour);
    let bounds = bounds.with_park_timeout(hour).with_drain_timeout(hour);
    Platform::new(bounds, vec![pool.into()]).unwrap()
}

/// The trial of a pool.
fn run(pool: impl Into<RegimePool>, trial: &PoolTrial, seed: u64) -> Result<Outcome, Story> {
    let platform = Box::new(alone(pool));
    let unchanged = Wrapped::new(platform, |platform: &mut Platform, now, event, actions| {
        platform.handle(now, event, actions)
    });
    pool_suite(unchanged, trial, seed)
}

/// Seeds of a test.
const SEEDS: core::ops::Range<u64> = 0..16;

fn total(reports: &[Outcome], name: &str) -> u64 {
    reports.iter().filter_map(|report| report.actions.get(name)).sum()
}

/// Requests arrived, and requests answered.
fn answered(report: &Outcome) -> (u64, u64) {
    let sum = |of: fn(&FunctionOutcome) -> u64| report.functions.iter().map(of).sum();
    (sum(|of| of.requests), sum(|of| of.answered))
}

/// Some run gives every order of a pool, so no order is untested.
fn all_given(reports: &[Outcome], names: &[&str]) {
    for name in names {
        assert!(total(reports, name) > 0, "no run had {name}");
    }
    assert!(reports.iter().all(|report| answered(report).1 > 0), "a run without an answer");
}

#[test]
fn the_sliced_pool_keeps_its_contract_whatever_happens() {
    let reports: Vec<Outcome> =
        SEEDS.map(|seed| run(sliced(seed), &sliced_trial(seed, true), seed).unwrap()).collect();
    all_given(&reports, &["start", "park", "unpark", "drain", "stop", "dispatch", "reject"]);
}

#[test]
fn the_whole_pool_keeps_its_contract_whatever_happens() {
    let reports: Vec<Outcome> =
        SEEDS.map(|seed| run(whole(seed), &whole_trial(seed, true), seed).unwrap()).collect();
    // A load leaves the weights in host memory, as on shared devices.
    all_given(&reports, &["start", "drain", "stop", "dispatch", "reject", "forget"]);
}

#[test]
fn the_fractional_pool_keeps_its_contract_whatever_happens() {
    let reports: Vec<Outcome> =
        SEEDS.map(|seed| run(fractional(), &fractional_trial(seed, true), seed).unwrap()).collect();
    all_given(&reports, &["start", "park", "unpark", "drain", "stop", "dispatch", "reject"]);
}

#[test]
fn without_faults_no_request_is_rejected_and_the_same_events_give_the_same_actions() {
    for seed in 0..6 {
        let first = run(sliced(seed), &sliced_trial(seed, false), seed).unwrap();
        let all = |report: &Outcome, kind: &str| {
            let (requests, answered) = answered(report);
            assert!(requests > 400 && requests == answered, "{kind}, seed {seed}: {answered} of {requests}");
        };
        all(&first, "sliced");
        assert_eq!(run(sliced(seed), &sliced_trial(seed, false), seed).unwrap(), first);
        all(&run(whole(seed), &whole_trial(seed, false), seed).unwrap(), "whole");
    }
}

/// A host of a fractional pool without requests, which answers as the test says.
struct Minimums {
    platform: Platform,
    now: Timestamp,
    /// Starting or ready instances, and the device of each.
    instances: BTreeMap<InstanceId, (FunctionId, GpuId)>,
}

impl Minimums {
    /// Devices of 16 GiB, and functions of this memory in GiB and minimum; each instance may have a twentieth of the SMs.
    fn new(devices: u32, functions: &[(u64, u32)]) -> Self {
        let bounds: Vec<_> = functions.iter().map(|&(gib, minimum)| (gib, (minimum, minimum))).collect();
        Self::of(fractional(), devices, &bounds)
    }

    /// The same around a pool, with a minimum and a maximum of instances.
    fn of(pool: FractionalPool, devices: u32, functions: &[(u64, (u32, u32))]) -> Self {
        let (platform, instances) = (alone(pool), BTreeMap::new());
        let mut host = Self { platform, now: Timestamp::ZERO, instances };
        (0..devices).for_each(|gpu| host.join(gpu));
        let (sm, time) = (SmShare::from_percent(5).unwrap(), Duration::from_millis(20));
        let point = ProfilePoint::measured(sm, Quota::WHOLE, 1, 50.0, time, time).unwrap();
        for (function, &(gib, (least, most))) in (0..).zip(functions) {
            let profile = Some(ProfileTable::sparse(vec![point]).unwrap());
            let spec = FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(gib));
            let spec = Box::new(spec.with_instances(least, most));
            host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(function), spec });
        }
        host
    }

    fn tell(&mut self, event: PlatformEvent) {
        let orders = self.platform.orders(self.now, event).unwrap();
        self.platform.invariants();
        for order in orders {
            if let PlatformAction::Start { instance, function, parts, .. } = order {
                self.instances.insert(instance, (function, parts[0].gpu));
            }
        }
    }

    /// How often a lack of devices for function 0 was counted.
    fn unmet(&self) -> u64 {
        self.platform.function(FunctionId::new(0)).unwrap().stats.unmet
    }

    fn report(&mut self, instance: InstanceId, report: InstanceReport) {
        if report != InstanceReport::Ready {
            self.instances.remove(&instance);
        }
        self.tell(PlatformEvent::Instance { instance, report });
    }

    /// All starting instances are ready.
    fn settle(&mut self) {
        for instance in self.instances.keys().copied().collect::<Vec<_>>() {
            self.report(instance, InstanceReport::Ready);
        }
    }

    fn join(&mut self, gpu: u32) {
        let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
        self.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec });
    }

    fn lose(&mut self, gpu: u32) {
        self.instances.retain(|_, (_, on)| *on != GpuId::new(gpu));
        self.tell(PlatformEvent::DeviceLost { gpu: GpuId::new(gpu) });
    }

    /// Carries out the actions of the pool's deadlines until then.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.platform.next_deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.tell(PlatformEvent::DeadlineReached);
        }
        self.now = end;
    }

    fn count(&self, function: u32) -> usize {
        self.instances.values().filter(|(of, _)| *of == FunctionId::new(function)).count()
    }
}

#[test]
fn what_a_lost_device_takes_of_a_minimum_is_started_when_there_is_room_again() {
    let mut host = Minimums::new(2, &[(9, 2)]);
    host.settle();
    assert_eq!((host.count(0), host.unmet()), (2, 0));
    host.lose(1);
    assert_eq!((host.count(0), host.unmet()), (1, 1), "the other device has 7 GiB");
    host.wait(Duration::from_secs(3));
    host.join(1);
    assert_eq!(host.count(0), 2, "in the same event");
}

#[test]
fn a_start_of_a_minimum_that_the_host_refused_is_ordered_again_after_ten_seconds() {
    let mut host = Minimums::new(2, &[(9, 2)]);
    let first = *host.instances.keys().next().unwrap();
    host.report(first, InstanceReport::Refused);
    host.settle();
    host.wait(Duration::from_millis(9_999));
    // Neither a device nor a loss hastens it.
    host.join(2);
    assert_eq!(host.count(0), 1);
    host.wait(Duration::from_millis(1));
    assert_eq!(host.count(0), 2);
}

/// An instance with a capacity of 50 requests a second gets 60. A scaler which counts reports gets one a second, regardless of the number
/// in wait.
#[test]
fn a_scaler_that_counts_reports_is_told_one_in_each_tick() {
    let scaler = LazyHorizontal::new(LazyHorizontalConfig::default()).unwrap();
    let policies = FractionalPolicies { scaler: Box::new(scaler), ..FractionalPolicies::fast().unwrap() };
    let pool = FractionalPool::new(FractionalConfig::default(), policies).unwrap();
    let mut host = Minimums::of(pool, 2, &[(9, (1, 2))]);
    host.settle();
    let mut started = Vec::new();
    for request in 0..1_500 {
        let (function, request) = (FunctionId::new(0), RequestId::new(request));
        host.tell(PlatformEvent::RequestArrived { request, function, deadline: None });
        host.wait(Duration::from_nanos(1_000_000_000 / 60));
        if host.count(0) > started.len() + 1 {
            started.push(host.now.saturating_since(Timestamp::ZERO).as_nanos() / 1_000_000_000);
        }
    }
    assert_eq!(started, [20], "seconds: with the twentieth report");
}

/// Twice the capacity of its only instance, for ten seconds.
#[test]
fn load_beyond_the_most_instances_is_no_lack_of_devices() {
    let mut host = Minimums::new(2, &[(9, 1)]);
    host.settle();
    for request in 0..1_000 {
        let (function, request) = (FunctionId::new(0), RequestId::new(request));
        host.tell(PlatformEvent::RequestArrived { request, function, deadline: None });
        host.wait(Duration::from_millis(10));
    }
    assert_eq!((host.count(0), host.unmet()), (1, 0));
}

/// Shares of the instances which a pool with one device starts of a function at once.
fn shares(sm_partitions: bool, spec: FunctionSpec) -> Vec<GpuShare> {
    let config = FractionalConfig::default().with_sm_partitions(sm_partitions);
    let mut platform = alone(FractionalPool::new(config, FractionalPolicies::fast().unwrap()).unwrap());
    let device = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
    let joined = PlatformEvent::DeviceFound { gpu: GpuId::new(0), spec: device };
    platform.orders(Timestamp::ZERO, joined).unwrap();
    let added = PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec: Box::new(spec) };
    let orders = platform.orders(Timestamp::ZERO, added).unwrap();
    let started = orders.into_iter().filter_map(|order| match order {
        PlatformAction::Start { parts, .. } => Some(parts[0].share),
        _ => None,
    });
    started.collect()
}

#[test]
fn without_sm_partitions_a_device_is_shared_by_time_alone() {
    let (sm, quota) = (SmShare::from_percent(25).unwrap(), Quota::from_percent(60).unwrap());
    let time = Duration::from_millis(20);
    let point = ProfilePoint::measured(sm, quota, 1, 50.0, time, time).unwrap();
    let profile = Some(ProfileTable::sparse(vec![point]).unwrap());
    let serves = FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(1)).with_instances(4, 4);
    let share = GpuShare::new(QuotaRange::new(quota, quota).unwrap(), sm, sm, None).unwrap();
    let trains = FunctionSpec::new(Work::Training { workers: 1, share }, Bytes::from_gib(1));
    let sms = |partitions, spec: &FunctionSpec| -> Vec<SmShare> {
        shares(partitions, spec.clone()).iter().map(GpuShare::sm).collect()
    };
    // Four quarters of the SMs fit side by side; 60 % of the time fits once.
    assert_eq!((sms(true, &serves), sms(false, &serves)), (vec![sm; 4], vec![SmShare::WHOLE]));
    assert_eq!((sms(true, &trains), sms(false, &trains)), (vec![sm], vec![SmShare::WHOLE]));
}

#[derive(Debug, Clone)]
enum Loss {
    Device(u32),
    Back(u32),
    Process(prop::sample::Index),
    Ready,
    Wait(u64),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// All instances of all functions fit on one device: while there is any, every minimum is there after each event.
    #[test]
    fn a_minimum_that_fits_is_there_after_each_loss(
        functions in prop::collection::vec((1u64..3, 1u32..4), 1..3),
        steps in prop::collection::vec(prop_oneof![
            3 => (0u32..3).prop_map(Loss::Device),
            3 => (0u32..3).prop_map(Loss::Back),
            4 => any::<prop::sample::Index>().prop_map(Loss::Process),
            2 => Just(Loss::Ready),
            2 => (0u64..20_000).prop_map(Loss::Wait),
        ], 1..60),
    ) {
        let mut host = Minimums::new(3, &functions);
        host.settle();
        let mut here = BTreeSet::from([0, 1, 2]);
        for step in steps {
            match step {
                Loss::Device(gpu) if here.remove(&gpu) => host.lose(gpu),
                Loss::Back(gpu) if here.insert(gpu) => host.join(gpu),
                Loss::Process(which) if !host.instances.is_empty() => {
                    let instances: Vec<InstanceId> = host.instances.keys().copied().collect();
                    let instance = *which.get(&instances);
                    // An instance which dies before it is ready is a failed start.
                    host.report(instance, InstanceReport::Ready);
                    host.report(instance, InstanceReport::Gone);
                }
                Loss::Ready => host.settle(),
                Loss::Wait(ms) => host.wait(Duration::from_millis(ms)),
                _ => {}
            }
            for (function, (_, least)) in (0..).zip(&functions).filter(|_| !here.is_empty()) {
                prop_assert_eq!(host.count(function), *least as usize, "fn{}, {:?}", function, here);
            }
        }
    }
}

/// How a platform of slices breaks its contract.
#[derive(Debug, Clone, Copy)]
enum Break {
    /// The 50th dispatch is not ordered.
    LosesRequest,
    /// Each dispatch after the 50th is ordered twice.
    DispatchesTwice,
    /// `Unpark` comes before the `Park` that makes room for it.
    UnparksFirst,
    /// The platform never learns of a maximum.
    IgnoresMaximum,
    /// The platform never learns of a minimum.
    ForgetsMinimum,
}

/// A platform of slices that breaks its contract.
fn broken(how: Break) -> Wrapped<Platform> {
    let mut dispatches = 0;
    Wrapped::new(Box::new(alone(sliced(1))), move |inner: &mut Platform, now, mut event, actions| {
        if let PlatformEvent::FunctionDeployed { spec, .. } = &mut event {
            match how {
                Break::ForgetsMinimum => spec.min_instances = 0,
                Break::IgnoresMaximum => spec.max_instances = 100,
                _ => {}
            }
        }
        let mut own = Vec::new();
        let told = inner.handle(now, event, &mut own);
        for action in own {
            match (how, &action) {
                (how, PlatformAction::Dispatch { .. }) => {
                    dispatches += 1;
                    match how {
                        Break::LosesRequest if dispatches == 50 => continue,
                        Break::DispatchesTwice if dispatches > 50 => actions.push(action.clone()),
                        _ => {}
                    }
                    actions.push(action);
                }
                (Break::UnparksFirst, PlatformAction::Park { instance }) => {
                    // The memory is said to be free at once, so that the next one comes too early.
                    let (instance, report) = (*instance, InstanceReport::Parked);
                    actions.push(action);
                    inner.handle(now, PlatformEvent::Instance { instance, report }, actions)?;
                }
                _ => actions.push(action),
            }
        }
        told
    })
}

#[test]
fn a_platform_that_breaks_its_contract_is_told_with_seed_and_story() {
    let fails = |how, says: &[&str]| {
        let run = |seed| pool_suite(broken(how), &sliced_trial(seed, false), seed).err();
        let story = (0..10).find_map(run).unwrap_or_else(|| panic!("{how:?} was not found"));
        assert!(says.iter().any(|says| story.wrong.contains(says)), "{how:?}: {story}");
        assert!(!story.events.is_empty(), "{story}");
    };
    fails(Break::LosesRequest, &["instances are", "requests of fn"]);
    fails(Break::DispatchesTwice, &["but it runs on"]);
    fails(Break::UnparksFirst, &["bytes of"]);
    fails(Break::IgnoresMaximum, &["which may have"]);
    fails(Break::ForgetsMinimum, &["of 2 instances since", "fewer than are kept"]);
}
