//! Any bytes are a configuration and a sequence of operations on a packer, checked against the model of the property
//! tests. On the stable compiler: `cargo fuzz run -s none pack`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gshare-sched/tests/support/packer_model.rs"]
mod support;

fuzz_target!(|bytes: &[u8]| support::run_bytes(bytes));
