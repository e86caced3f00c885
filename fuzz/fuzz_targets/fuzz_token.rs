//! Any history: the token engine keeps the contract.
//!
//! `cargo fuzz fmt token FILE` prints an input as JSON for `fuzz/regressions/token/`.
#![no_main]

use core::fmt;
use gshare_sched::token::{MultiToken, MultiTokenConfig};
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
    // A slot is given in one piece.
    let terms =
        Terms::multi_token(config.window, config.window, (config.slack, config.grace), config.max_debt);
    let engine = Box::new(MultiToken::new(config).expect("sound"));
    let mut driver = Driver::new(engine, terms, check::always());
    // The checkers add up the whole history: long histories only slow the fuzzer down.
    for op in history.0.into_iter().take(300) {
        op.apply(WORLD, &mut driver).unwrap();
    }
});
