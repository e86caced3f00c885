//! The `gshare` command as a library, for the command itself and the programs of its tests.
//!
//! Hosts need nothing here: they embed `gshared`, `gshare-runner` and the engines of `gshare-sched`.

mod commands;

pub use commands::{Gshare, execute};

// For the programs of tests, in `fixtures/`.
#[doc(hidden)]
pub use commands::spin::Spin;
