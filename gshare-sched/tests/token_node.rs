//! Whole nodes, each from one seed: the daemon's engine, a meter in each process, devices, and everything that goes wrong.
//! `cargo run --release -p gshare-bench --bin node-sim` runs a thousand of them.

use gshare_core::{Duration, TokenScheduler};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::node::{self, Setup};
use gshare_sim::token::Terms;

/// The engines as the daemon sets them up.
fn setup() -> Setup {
    let mut config = MultiTokenConfig::default();
    config.grace = Duration::from_millis(50);
    let overtime = config.slack.saturating_add(config.grace);
    let terms = Terms::multi_token(config.window, config.max_token, overtime, config.max_debt);
    let tokens = move || -> Box<dyn TokenScheduler> {
        Box::new(MultiToken::new(config.clone()).expect("the default is sound"))
    };
    Setup { tokens: Box::new(tokens), terms, error_max: node::ERROR_MAX }
}

#[test]
fn what_is_driven_is_what_ships() {
    let [node, meter] = node::driven();
    assert_eq!(node, "gshare_sched::node::Node");
    assert!(meter.starts_with("gshare_meter::meter::Meter<"), "{meter}");
}

#[test]
fn the_device_sees_the_shares_that_were_promised_to_one_point_over_ten_windows() {
    let (mut shares, setup) = (node::ShareReport::EMPTY, setup());
    let mut figures = node::Figures::default();
    for seed in 0..40 {
        let report = node::run(seed, &setup).unwrap();
        shares.add(&report.shares);
        figures.add(&report.figures);
    }
    println!("{shares:#?}\n{figures:#?}");
    for errors in [shares.capped, shares.side_by_side, shares.elastic] {
        assert!(errors.spans > 100, "the promise was put to the test");
    }
    assert!(figures.worst_memory_percent > 90 && figures.allocations > 1_000 && figures.waits > 1_000);
}

#[test]
fn a_seed_replays_exactly() {
    let setup = setup();
    for seed in [3, 1_000_003] {
        let (first, second) = (node::run(seed, &setup).unwrap(), node::run(seed, &setup).unwrap());
        assert_eq!(first, second);
        assert!(first.calls > 100);
    }
    assert_ne!(node::run(3, &setup).unwrap().log_hash, node::run(4, &setup).unwrap().log_hash);
}
