//! Any bytes are a configuration and a history of a co-scaler, checked against a book of its issued tokens. On the stable compiler: `cargo
//! fuzz run -s none coscale`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gshare-sched/tests/support/scale_vertical.rs"]
mod support;

fuzz_target!(|bytes: &[u8]| support::run_bytes(bytes));
