//! The node's clock, the same for all its processes.
//!
//! The C library makes the call, rather than a crate. Code that looks the kernel's time page up by itself crashes in programs under
//! valgrind, which hides this page.
#![allow(unsafe_code)] // one call to the C library

/// Now, in ns of `CLOCK_MONOTONIC`.
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the out-pointer is valid, and this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
