//! Any bytes are a DAG of components, as JSON or as numbers: refused, or cut into pipelines within the bounds.
//! On the stable compiler: `cargo fuzz run -s none dag`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gshare-sched/tests/support/dag_bytes.rs"]
mod support;

fuzz_target!(|bytes: &[u8]| support::run_bytes(bytes));
