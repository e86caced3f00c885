//! The `gshare` command as a library, so that the command and the programs of its tests are built from one.
//!
//! Nothing here is for hosts: these embed `gshared`, `gshare-runner` and the engines of `gshare-sched`.

mod commands;

pub use commands::{Gshare, execute};

// For the programs of tests, in `fixtures/`.
#[doc(hidden)]
pub use commands::{cuda::Kernel, spin::Spin};
