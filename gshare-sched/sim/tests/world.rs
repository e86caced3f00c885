//! The platform that ships, in the world of `benches/scenarios/platform/all.toml`.

use gshare_sim::scenario::{Scenario, WorkText};
use gshare_sim::world::{self, Fault, Outcome, Plan};
use std::path::Path;

/// The scenario of everything, for so long; with `shares`, what of it runs on fractional devices.
fn all(length: &str, shares: bool) -> (Scenario, Plan) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/scenarios/platform/all.toml");
    let mut scenario = Scenario::read(&path, &[("length".to_owned(), length.to_owned())]).unwrap();
    if shares {
        for node in &mut scenario.node {
            node.device.retain(|device| device.mig.is_none() && device.regime.is_none());
        }
        scenario.function.retain(|one| one.work != WorkText::Pipeline && one.regime.is_none());
    }
    let plan = scenario.plan().unwrap();
    (scenario, plan)
}

fn hundred(shares: bool) -> Outcome {
    let (scenario, plan) = all("30s", shares);
    let mut total = Outcome::default();
    for seed in 0..100 {
        total.add(&world::run(&plan, seed, || scenario.platform()).unwrap());
    }
    for fault in Fault::ALL {
        assert!(total.faults.get(&fault).is_some_and(|count| *count > 0), "{fault} never happened");
    }
    assert!(total.functions.iter().all(|function| function.starts > 0));
    total
}

#[test]
fn a_hundred_seeds_of_shared_devices_keep_every_promise() {
    hundred(true);
}

#[test]
fn a_hundred_seeds_of_everything_keep_every_promise_and_carry_out_every_order() {
    let never = hundred(false).never_carried_out();
    assert!(never.is_empty(), "never carried out: {never:?}");
}

#[test]
fn a_seed_replays_exactly() {
    let (scenario, plan) = all("20s", true);
    let run = |seed| world::run(&plan, seed, || scenario.platform()).unwrap();
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).hash, run(8).hash);
}
