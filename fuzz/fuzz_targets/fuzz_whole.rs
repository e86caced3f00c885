//! Any bytes are a cluster and a run of it, in which the pool of whole devices gives the orders of the literal algorithms. On the
//! stable compiler: `cargo fuzz run -s none whole`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gshare-sched/tests/support/whole_pair.rs"]
mod pair;

fuzz_target!(|bytes: &[u8]| pair::run_bytes(bytes));
