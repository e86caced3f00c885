//! Any history: the model store answers with the actions of the literal model, and keeps its promises.
//!
//! `cargo fuzz fmt store FILE` prints an input as JSON for `fuzz/regressions/store/`.
#![no_main]

use core::fmt;
use libfuzzer_sys::fuzz_target;

#[path = "../../gshare-modelstore/tests/support/ops.rs"]
mod ops;
use ops::store_history::StoreOp;

#[derive(arbitrary::Arbitrary)]
struct History(u8, Vec<StoreOp>);

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(&(self.0, &self.1)).map_err(|_| fmt::Error)?)
    }
}

fuzz_target!(|history: History| {
    // The model is quadratic in the length of a history: long histories only slow the fuzzer down.
    ops::play(history.0, history.1.into_iter().take(400)).unwrap();
});
