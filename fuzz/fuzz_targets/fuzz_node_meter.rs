//! Any bytes are a node and a history of it, run through the daemon's engine and a meter in each process. On the stable compiler:
//! `cargo fuzz run -s none node_meter`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gshare-sched/tests/support/node_history.rs"]
mod support;

fuzz_target!(|bytes: &[u8]| support::run_bytes(bytes));
