//! Whole nodes, each from one seed: the daemon's engine, a meter in each process, devices, and everything that goes wrong.
//! `cargo run --release -p gshare-bench --bin node-sim` runs a thousand of them.

use gshare_sim::node::{self, Setup};

#[test]
fn what_is_driven_is_what_ships() {
    let [node, meter] = node::driven();
    assert_eq!(node, "gshare_sched::node::Node");
    assert!(meter.starts_with("gshare_meter::meter::Meter<"), "{meter}");
}

#[test]
fn the_device_sees_the_shares_that_were_promised_to_one_point_over_ten_windows() {
    let (mut shares, setup) = (node::ShareReport::EMPTY, Setup::daemon());
    let mut figures = node::Figures::default();
    for seed in 0..16 {
        let report = node::run(seed, &setup).unwrap();
        shares.add(&report.shares);
        figures.add(&report.figures);
    }
    println!("{shares:#?}\n{figures:#?}");
    for errors in [shares.capped, shares.side_by_side, shares.elastic] {
        assert!(errors.spans > 25, "the promise was put to the test");
    }
    assert!(figures.worst_memory_percent > 90 && figures.allocations > 400 && figures.waits > 400);
    let accounts = figures.accounts;
    assert!(figures.doubled > 100 && accounts.again > 5, "{figures:?}");
    assert!(accounts.ended > 100 && accounts.exact > 50, "{accounts:?}");
}

#[test]
fn a_seed_replays_exactly() {
    let setup = Setup::daemon();
    for seed in [3, 1_000_003] {
        let (first, second) = (node::run(seed, &setup).unwrap(), node::run(seed, &setup).unwrap());
        assert_eq!(first, second);
        assert!(first.calls > 100);
    }
    assert_ne!(node::run(3, &setup).unwrap().log_hash, node::run(4, &setup).unwrap().log_hash);
}

/// Nodes where processes can be parked.
fn parking(seeds: core::ops::Range<u64>, setup: &Setup) -> Vec<u64> {
    seeds.filter(|seed| node::NodePlan::draw(*seed, setup.terms.window).parks()).collect()
}

#[test]
fn programs_with_more_memory_than_their_device_take_turns() {
    let (mut figures, setup) = (node::Figures::default(), Setup::daemon());
    for seed in parking(0..100, &setup) {
        figures.add(&node::run(seed, &setup).unwrap().figures);
    }
    println!("{figures:#?}");
    assert!(figures.returns > 200 && figures.worst_away_percent > 10, "{figures:?}");
}

/// A user who parks each program as soon as it is back makes them thrash.
#[test]
fn without_a_residence_the_claims_fail() {
    let mut setup = Setup::daemon();
    setup.impatient = true;
    let seeds = parking(0..40, &setup);
    let wrong: Vec<String> =
        seeds.iter().filter_map(|seed| node::run(*seed, &setup).err()).map(|story| story.wrong).collect();
    let thrashes = wrong.iter().filter(|wrong| wrong.starts_with("parking") && wrong.contains("is back"));
    assert!(thrashes.count() > 3, "{wrong:#?}");
}
