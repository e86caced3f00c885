//! Each pool under a platform in a host where everything goes wrong, and a platform that is broken on purpose.

use super::chain;
use super::pool_trial::{PoolTrial, pool};
use crate::story::Story;
use crate::world::{FunctionOutcome, Outcome};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Duration, Engine, GpuKind, ModelId, NodeId, Quota, SmShare};
use gshare_sched::Wrapped;
use gshare_sched::pipeline::{Goal, KeeperConfig, RouterConfig};
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, InstanceReport,
    MigLayout, Platform, PlatformAction, PlatformConfig, PlatformEvent, Regime, RegimePool, SlicedConfig,
    SlicedPool, Weights, WholeConfig, WholePool, Work,
};

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
            .with_instances(u32::from(n < 3), 1 + u32::try_from(n).unwrap())
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
fn run(of: impl Into<RegimePool>, trial: &PoolTrial, seed: u64) -> Result<Outcome, Story> {
    let platform = Box::new(alone(of));
    let unchanged = Wrapped::new(platform, |platform: &mut Platform, now, event, actions| {
        platform.handle(now, event, actions)
    });
    pool(unchanged, trial, seed)
}

/// Seeds of a test.
const SEEDS: core::ops::Range<u64> = 0..100;

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
                (Break::UnparksFirst, PlatformAction::Park { instance, .. }) => {
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
        let run = |seed| pool(broken(how), &sliced_trial(seed, false), seed).err();
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

#[test]
fn a_platform_that_parks_an_instance_as_soon_as_it_is_back_is_told() {
    let parks_at_once =
        |inner: &mut Platform, now, event: PlatformEvent, actions: &mut Vec<PlatformAction>| {
            if let PlatformEvent::Instance { instance, report: InstanceReport::Unparked } = event {
                actions.push(PlatformAction::Park { instance, keeps: true });
            }
            inner.handle(now, event, actions)
        };
    let run = |seed| {
        let platform = Wrapped::new(Box::new(alone(fractional())), parks_at_once);
        pool(platform, &fractional_trial(seed, false), seed).err()
    };
    let told = (0..10).filter_map(run).any(|story| story.wrong.contains("is parked again"));
    assert!(told, "it comes back and is parked");
}
