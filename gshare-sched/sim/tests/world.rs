//! The platform that ships, in the world of `benches/scenarios/platform/all.toml`.

use gshare_sim::scenario::{Scenario, WorkText};
use gshare_sim::world::{self, Fault, Outcome, Plan};
use std::path::Path;

/// What of the scenario runs on fractional devices, for so long.
fn shares(length: &str) -> (Scenario, Plan) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/scenarios/platform/all.toml");
    let mut scenario = Scenario::read(&path, &[("length".to_owned(), length.to_owned())]).unwrap();
    for node in &mut scenario.node {
        node.device.retain(|device| device.mig.is_none() && device.regime.is_none());
    }
    scenario.function.retain(|one| one.work != WorkText::Pipeline && one.regime.is_none());
    let plan = scenario.plan().unwrap();
    (scenario, plan)
}

#[test]
fn a_hundred_seeds_of_shared_devices_keep_every_promise() {
    let (scenario, plan) = shares("30s");
    let mut total = Outcome::default();
    for seed in 0..100 {
        total.add(&world::run(&plan, seed, || scenario.platform()).unwrap());
    }
    for fault in Fault::ALL {
        assert!(total.faults.get(&fault).is_some_and(|count| *count > 0), "{fault} never happened");
    }
    assert!(total.functions.iter().all(|function| function.starts > 0));
}

#[test]
fn a_seed_replays_exactly() {
    let (scenario, plan) = shares("20s");
    let run = |seed| world::run(&plan, seed, || scenario.platform()).unwrap();
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).hash, run(8).hash);
}
