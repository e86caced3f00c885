//! Whether the token schedulers keep the contract of `TokenScheduler`: the public suite of `gshare-sim`, over each of them.

use gshare_core::{Duration, TokenScheduler};
use gshare_sched::token::{Leases, MultiToken, MultiTokenConfig, Turn};
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

/// nvshare's rule: the longest waiter is next once the GPU has no holder, and goes on while nobody else waits.
fn one_holder(gpu: &mut Turn<'_>) {
    let (waiting, holders) = (gpu.waiting(), gpu.holders());
    if let Some(next) = waiting.first()
        && (holders.is_empty() || (holders == [*next] && waiting.len() == 1))
    {
        gpu.grant(*next, Duration::from_millis(100));
    }
}

fn leases(rule: fn(&mut Turn<'_>)) -> impl Fn() -> Box<dyn TokenScheduler> {
    move || {
        let config = MultiTokenConfig::default().with_max_clients(WORLD.slots).with_max_gpus(WORLD.gpus);
        Box::new(Leases::new(config, rule).expect("the settings are sound"))
    }
}

fn one_at_a_time() -> Conformance {
    let mut suite = Conformance::new(terms(&MultiTokenConfig::default()), WORLD);
    (suite.meets_requests, suite.bounds_waits, suite.holds_together) = (false, false, false);
    suite
}

#[test]
fn one_holder_at_a_time_keeps_the_contract_over_the_public_ledger() {
    token_scheduler(&leases(one_holder), &one_at_a_time()).unwrap();
}

#[test]
fn rules_that_break_the_contract_are_told_by_their_claim() {
    use gshare_core::token::token_claims as claims;
    let newest = |gpu: &mut Turn<'_>| {
        if let Some(next) = gpu.waiting().last()
            && gpu.holders().is_empty()
        {
            gpu.grant(*next, Duration::from_millis(100));
        }
    };
    let never = |gpu: &mut Turn<'_>| assert!(gpu.free() <= gshare_core::SmShare::WHOLE);
    for (rule, claim) in [(newest as fn(&mut Turn<'_>), claims::WIDE), (never, claims::WORK)] {
        let failure = token_scheduler(&leases(rule), &one_at_a_time()).unwrap_err().to_string();
        assert!(failure.contains(claim), "{claim}: {failure}");
    }
    // Free SMs are kept from the second client.
    let mut suite = one_at_a_time();
    suite.holds_together = true;
    assert!(token_scheduler(&leases(one_holder), &suite).unwrap_err().to_string().contains(claims::WORK));
}
