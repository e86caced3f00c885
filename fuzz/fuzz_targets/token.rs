//! Any history: both token engines keep the contract.
//!
//! `cargo fuzz fmt token FILE` prints what was found as the JSON that belongs into `fuzz/regressions/token/`.
#![no_main]

use core::fmt;
use gshare_sched::token::{MultiToken, MultiTokenConfig, SlotScheduler};
use gshare_sim::token::drive::Driver;
use gshare_sim::token::ops::{TokenOp, World};
use gshare_sim::token::{Terms, check};
use libfuzzer_sys::fuzz_target;

#[derive(arbitrary::Arbitrary)]
struct History(Vec<TokenOp>);

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(&self.0).map_err(|_| fmt::Error)?)
    }
}

const WORLD: World = World { slots: 8, gpus: 2 };

fuzz_target!(|history: History| {
    let mut config = MultiTokenConfig::default();
    (config.max_clients, config.max_gpus) = (WORLD.slots, WORLD.gpus);
    let overtime = config.slack.saturating_add(config.grace);
    let terms = Terms::multi_token(config.window, config.max_token, overtime, config.max_debt);
    // A slot is given in one piece.
    let slot_terms = Terms::multi_token(config.window, config.window, overtime, config.max_debt);
    let slots = Box::new(SlotScheduler::new(config.clone()).expect("sound"));
    let mut slot_driver = Driver::new(slots, slot_terms, check::always());
    let engine = Box::new(MultiToken::new(config).expect("sound"));
    let mut driver = Driver::new(engine, terms, check::always());
    // The checkers add up everything that happened: long histories only slow the fuzzer down.
    for op in history.0.into_iter().take(300) {
        op.apply(WORLD, &mut driver).unwrap();
        op.apply(WORLD, &mut slot_driver).unwrap();
    }
});
