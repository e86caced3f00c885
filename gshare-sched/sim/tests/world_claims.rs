//! The rules of the platform in a world with every regime and every fault: requests, starts, drains and moves end in time, queues and
//! tenants are bounded, and minimums are kept. A platform that breaks one of them on purpose is found.

use gshare_core::{Duration, Engine, TenantId};
use gshare_sched::Wrapped;
use gshare_sched::platform::{Platform, PlatformConfig, PlatformEvent, TenantLimits};
use gshare_sim::scenario::Scenario;
use gshare_sim::world::{self, Fault, Outcome, Plan};
use std::path::Path;

const SECS: fn(u64) -> Duration = Duration::from_secs;

fn bounds() -> PlatformConfig {
    PlatformConfig::default()
        .with_max_wait(SECS(20))
        .with_max_waiting(8)
        .with_max_attempts(2)
        .with_start_timeout(SECS(40))
        .with_park_timeout(SECS(15))
        .with_drain_timeout(SECS(10))
}

/// The scenario of everything with tight bounds, many faults, and a minimum in each regime.
fn tight() -> (Scenario, Plan) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/scenarios/platform/all.toml");
    let scenario = Scenario::read(&path, &[("length".to_owned(), "60s".to_owned())]).unwrap();
    let mut plan = scenario.plan().unwrap();
    plan.bounds = Some(bounds());
    for name in ["resnet50", "enhance", "diffusion"] {
        let function = plan.functions.iter_mut().find(|function| function.name == name).unwrap();
        function.spec.min_instances = 1;
        function.patience = None;
    }
    let (mut few, mut short) = (TenantLimits::default(), TenantLimits::default());
    (few.max_requests, short.max_waiting) = (4, 5);
    plan.tenants = vec![(TenantId::new(1), few), (TenantId::new(2), short)];
    let often = [(Fault::OrderHangs, 8), (Fault::DrainHangs, 5), (Fault::InstanceDies, 4)];
    plan.faults.every.extend(often.map(|(fault, seconds)| (fault, SECS(seconds))));
    (scenario, plan)
}

fn platform(scenario: &Scenario, config: PlatformConfig) -> Result<Platform, String> {
    let mut settings = scenario.settings();
    settings.platform = config;
    settings.build().map_err(|error| error.to_string())
}

#[test]
fn every_rule_holds_in_every_regime_whatever_happens() {
    let (scenario, plan) = tight();
    let mut total = Outcome::default();
    for seed in 0..100 {
        total.add(&world::run(&plan, seed, || platform(&scenario, bounds())).unwrap());
    }
    assert!(total.functions.iter().all(|function| function.starts > 0));
    for fault in Fault::ALL {
        assert!(total.faults.get(&fault).is_some_and(|count| *count > 0), "{fault} never happened");
    }
}

/// Fails unless some seed finds that a platform with these bounds, which hears these events, breaks the rule.
fn breaks(config: &PlatformConfig, hears: fn(PlatformEvent) -> PlatformEvent, says: &str) {
    let (scenario, mut plan) = tight();
    // A request meets a second death only where instances die often, and few orders are for a move.
    let often = [(Fault::InstanceDies, 700), (Fault::OrderHangs, 500)];
    plan.faults.every.extend(often.map(|(fault, ms)| (fault, Duration::from_millis(ms))));
    let make = || {
        platform(&scenario, config.clone()).map(|platform| {
            Wrapped::new(Box::new(platform), move |platform: &mut Platform, now, event, actions| {
                platform.handle(now, hears(event), actions)
            })
        })
    };
    let failed = (0..400).find_map(|seed| world::run(&plan, seed, make).err());
    let claim = failed.map(|failure| failure.wrong);
    assert!(claim.as_ref().is_some_and(|claim| claim.contains(says)), "{says}: {claim:?}");
}

#[test]
fn a_platform_that_breaks_a_rule_is_found() {
    let unchanged = |event| event;
    for (config, says) in [
        (bounds().with_max_wait(SECS(40)), "waits for longer than it may"),
        (bounds().with_max_waiting(9), "waits beside"),
        (bounds().with_max_attempts(9), "is dispatched for the"),
        (bounds().with_start_timeout(SECS(80)), "has not done its Start in time"),
        (bounds().with_park_timeout(SECS(80)), "has not done its Move in time"),
        (bounds().with_drain_timeout(SECS(80)), "has not done its Drain in time"),
    ] {
        breaks(&config, unchanged, says);
    }
    let no_minimum = |event| match event {
        PlatformEvent::FunctionDeployed { function, mut spec } => {
            spec.min_instances = 0;
            PlatformEvent::FunctionDeployed { function, spec }
        }
        event => event,
    };
    breaks(&bounds(), no_minimum, "of 1 instances");
    let no_limits = |event| match event {
        PlatformEvent::TenantLimited { .. } => PlatformEvent::DeadlineReached,
        event => event,
    };
    breaks(&bounds(), no_limits, "may have");
}
