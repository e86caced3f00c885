//! Any bytes are a history of a platform with three devices and five functions: each request ends once, nothing is
//! oversold, and at the end no request waits. On the stable compiler: `cargo fuzz run -s none platform`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gshare-sched/tests/support/platform_host.rs"]
mod support;

fuzz_target!(|bytes: &[u8]| support::run_bytes(bytes));
