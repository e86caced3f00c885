//! Whether the token schedulers keep the contract of `TokenScheduler`: the public suite of `gshare-sim`, over each of them.

use gshare_core::{Duration, TokenScheduler};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::conformance::{Conformance, token_scheduler};
use gshare_sim::token::Terms;
use gshare_sim::token::ops::World;

const WORLD: World = World { slots: 12, gpus: 3 };

fn terms(config: &MultiTokenConfig) -> Terms {
    // A slot is given in one piece, so its tokens may be as long as the window.
    Terms::multi_token(config.window, config.window, (config.slack, config.grace), config.max_debt)
}

fn multi_token(config: &MultiTokenConfig) -> Box<dyn TokenScheduler> {
    let mut config = config.clone();
    (config.max_clients, config.max_gpus) = (WORLD.slots, WORLD.gpus);
    Box::new(MultiToken::new(config).expect("the configurations of this file are sound"))
}

fn short_windows() -> MultiTokenConfig {
    let mut config = MultiTokenConfig::default();
    config.window = Duration::from_millis(7);
    config.max_token = Duration::from_millis(3);
    config.grace = Duration::from_millis(20);
    config.backfill_depth = 1;
    config
}

fn odd_lengths() -> MultiTokenConfig {
    let mut config = MultiTokenConfig::default();
    config.window = Duration::from_nanos(33_333_331);
    config.max_token = Duration::from_nanos(7_777_777);
    config.min_token = Duration::from_nanos(101);
    config.slack = Duration::ZERO;
    config.grace = Duration::from_nanos(1);
    config
}

#[test]
fn multi_token_keeps_the_contract() {
    let config = MultiTokenConfig::default();
    let profile = Conformance::new(terms(&config), WORLD);
    let report = token_scheduler(&|| multi_token(&config), &profile).unwrap();
    println!("{report:#?}");
}

/// Short windows and long graces: leases of several windows overlap, and overuse is a large part of a window.
#[test]
fn multi_token_keeps_the_contract_when_windows_are_shorter_than_graces() {
    let config = short_windows();
    let profile = Conformance::new(terms(&config), WORLD);
    token_scheduler(&|| multi_token(&config), &profile).unwrap();
}

/// Odd lengths: no window is a whole number of tokens, no share a whole number of nanoseconds.
#[test]
fn multi_token_keeps_the_contract_with_odd_lengths() {
    let config = odd_lengths();
    let profile = Conformance::new(terms(&config), WORLD);
    token_scheduler(&|| multi_token(&config), &profile).unwrap();
}
