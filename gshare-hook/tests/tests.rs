//! All tests of the library in real processes as one program, so that their waits overlap.
#![allow(unsafe_code)] // the environment is set before `main`

mod common;

mod closed;
mod devices;
mod link;
mod memory;
mod odd;
mod park;
mod park_ends;
mod programs;
mod resolution;

/// Runs before `main`. These tests mostly wait, so four run at once unless the caller says otherwise; the test runner takes the number from
/// the environment, and would itself use one thread per CPU.
#[used]
#[unsafe(link_section = ".init_array")]
static SIDE_BY_SIDE: extern "C" fn() = {
    extern "C" fn set() {
        const THREADS: &str = "RUST_TEST_THREADS";
        if std::env::var_os(THREADS).is_none() {
            // SAFETY: initialisers run before `main`, and the process has no other thread yet.
            unsafe { std::env::set_var(THREADS, "4") }
        }
    }
    set
};
