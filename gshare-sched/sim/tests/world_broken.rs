//! The checks of the world over platforms that are broken on purpose: each fails, and tells its story.

use gshare_core::{BasisPoints, Bytes, Duration, Engine, GpuId, PlacementId, TenantId};
use gshare_sched::Wrapped;
use gshare_sched::pack::{
    Demand, GpuSpec, GpuStatus, MaxRects, MaxRectsConfig, PackError, Packer, Placed, Placement,
};
use gshare_sched::platform::TenantLimits;
use gshare_sched::platform::{
    FractionalConfig, FractionalPolicies, FractionalPool, Part, Platform, PlatformAction, PlatformConfig,
    PlatformEvent,
};
use gshare_sim::Story;
use gshare_sim::scenario::{Scenario, WorkText};
use gshare_sim::world::{self, Plan};
use std::path::Path;

/// The part of the scenario of everything that runs on fractional devices, for this time.
fn shared(length: &str) -> (Scenario, Plan) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/scenarios/platform/all.toml");
    let mut scenario = Scenario::read(&path, &[("length".to_owned(), length.to_owned())]).unwrap();
    for node in &mut scenario.node {
        node.device.retain(|device| device.mig.is_none() && device.regime.is_none());
    }
    scenario.function.retain(|one| one.work != WorkText::Pipeline && one.regime.is_none());
    let plan = scenario.plan().unwrap();
    (scenario, plan)
}

fn fails<F: FnMut(&mut Vec<PlatformAction>) + Send + 'static>(change: impl Fn() -> F) -> Story {
    let (scenario, plan) = shared("30s");
    broken(&scenario, &plan, change, |_| false)
}

/// The failure of the platform that ships when its orders are changed on the way, and some events left out.
fn broken<F: FnMut(&mut Vec<PlatformAction>) + Send + 'static>(
    scenario: &Scenario,
    plan: &Plan,
    change: impl Fn() -> F,
    unheard: fn(&PlatformEvent) -> bool,
) -> Story {
    let wrap = |platform| {
        let mut change = change();
        Wrapped::new(Box::new(platform), move |platform: &mut Platform, now, event, actions| {
            let event = if unheard(&event) { PlatformEvent::DeadlineReached } else { event };
            let mut orders = platform.orders(now, event)?;
            change(&mut orders);
            actions.append(&mut orders);
            Ok(())
        })
    };
    let broken = || scenario.platform().map(wrap);
    (0..20)
        .find_map(|seed| world::run(plan, seed, broken).err())
        .expect("a platform that is broken breaks a promise in one of twenty seeds")
}

fn tells(failure: &Story, what: &str) {
    assert!(failure.wrong.contains(what), "{failure}");
    assert!(failure.events.len() > 10, "the story is told");
}

/// Orders of a kind are lost on their way.
fn without(lost: fn(&PlatformAction) -> bool) -> Story {
    fails(|| move |orders: &mut Vec<PlatformAction>| orders.retain(|order| !lost(order)))
}

#[test]
fn a_rejection_that_is_lost_leaves_a_request_without_an_answer() {
    tells(&without(|order| matches!(order, PlatformAction::Reject { .. })), "request");
}

#[test]
fn a_stop_that_is_lost_leaves_an_instance_behind() {
    tells(&without(|order| matches!(order, PlatformAction::Stop { .. })), "instance");
}

#[test]
fn a_request_that_is_dispatched_twice_is_seen() {
    let twice = || {
        |orders: &mut Vec<PlatformAction>| {
            let again = orders.iter().find(|order| matches!(order, PlatformAction::Dispatch { .. })).cloned();
            orders.extend(again);
        }
    };
    tells(&fails(twice), "request");
}

#[test]
fn instances_that_all_start_on_one_device_oversell_it() {
    let one_device = || {
        |orders: &mut Vec<PlatformAction>| {
            for order in orders {
                if let PlatformAction::Start { parts, .. } = order {
                    parts.iter_mut().for_each(|part: &mut Part| part.gpu = GpuId::new(0));
                }
            }
        }
    };
    tells(&fails(one_device), "the instances on gpu0 have");
}

/// A platform that hears nothing of tenants: the limits that are checked are of requests, memory and processes.
#[test]
fn a_tenant_that_has_more_than_it_may_is_seen() {
    let (scenario, mut plan) = shared("60s");
    let none = TenantLimits::default();
    let (mut few, mut small, mut one) = (none, none, none);
    (few.max_requests, small.memory, one.max_processes) = (1, BasisPoints::new(200).unwrap(), 1);
    for (limits, tells_of) in [
        (few, "requests dispatched, and may have 1"),
        (small, "bytes, and may have"),
        (one, "processes, and may have 1"),
    ] {
        plan.tenants = vec![(TenantId::new(1), limits)];
        (0..5).for_each(|seed| drop(world::run(&plan, seed, || scenario.platform()).unwrap()));
        let unheard = |event: &PlatformEvent| matches!(event, PlatformEvent::TenantLimited { .. });
        tells(&broken(&scenario, &plan, || |_: &mut Vec<PlatformAction>| {}, unheard), tells_of);
    }
}

/// Takes devices for twice as large as they are.
struct Oversells(MaxRects);

impl Packer for Oversells {
    fn add_gpu(&mut self, gpu: GpuId, mut spec: GpuSpec) -> Result<(), PackError> {
        spec.memory = Bytes(2 * spec.memory.0);
        self.0.add_gpu(gpu, spec)
    }
    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        self.0.remove_gpu(gpu)
    }
    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        self.0.place_where(demand, allowed)
    }
    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        self.0.release(id)
    }
    fn set_aside(&mut self, gpu: GpuId, memory: Bytes) -> Result<(), PackError> {
        self.0.set_aside(gpu, memory)
    }
    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        self.0.placements(visit);
    }
    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        self.0.gpus(visit);
    }
}

/// The platform is right, and one of its policies is not.
#[test]
fn a_packer_that_oversells_memory_is_found() {
    let (_, plan) = shared("60s");
    let broken = || {
        let policies = FractionalPolicies::fast().map_err(|error| error.to_string())?;
        let packer = Box::new(Oversells(MaxRects::new(MaxRectsConfig::default())));
        let pool =
            FractionalPool::new(FractionalConfig::default(), FractionalPolicies { packer, ..policies });
        let pool = pool.map_err(|error| error.to_string())?;
        let config = PlatformConfig::default().with_max_wait(Duration::from_secs(30));
        Platform::new(config, vec![pool.into()]).map_err(|error| error.to_string())
    };
    let failure = (0..20).find_map(|seed| world::run(&plan, seed, broken).err()).expect("it oversells");
    tells(&failure, "the instances on gpu");
}
