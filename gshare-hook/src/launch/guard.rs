//! The guard of a process that can be parked: no call of the program touches device memory while this memory is elsewhere.
//!
//! # Problem
//! Memory may leave the device only when no thread is in a call that touches it, or will make one before the memory is back. A thread may
//! launch out of prepaid credit, so the gate alone does not tell. A process that cannot be parked must pay next to nothing for the guard.
//!
//! # Algorithm
//! In a process that can be parked, the wrappers of launches, and a function in front of each copy ([`guarded`](crate::launch::guarded)),
//! count the thread in, look at the guard, call the driver and count the thread out.
//! The thread that moves memory closes the guard, has the kernel put a barrier into all threads (`membarrier`), and waits until none is
//! inside. So a call pays two stores and a load, and no fence. A thread that finds the guard closed waits until it is open.
//!
//! ```text
//! none ── install ──▶ Open ── close ──▶ Closing ── seal: the work is over ──▶ Closed ── open ──▶ Open
//!                       ◀──── cancel ─────┘
//! ```
#![allow(unsafe_code)] // a system call

use core::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::launch::thread_record::ThreadRecord;
use crate::sys::clock;

/// Commands of `membarrier(2)`.
const REGISTER: libc::c_int = 1 << 4;
const BARRIER: libc::c_int = 1 << 3;
/// The time between two looks at a thread in a call.
const STEP: Duration = Duration::from_micros(50);

/// The state of the guard, on the page that a fork empties.
#[derive(Debug)]
pub(crate) struct Guard {
    state: AtomicU32,
    /// Threads that wait for the guard to open.
    missed: AtomicU32,
}

const NONE: u32 = 0;
const OPEN: u32 = 1;
const CLOSING: u32 = 2;
const CLOSED: u32 = 3;

impl Guard {
    pub(crate) const fn new() -> Self {
        Self { state: AtomicU32::new(NONE), missed: AtomicU32::new(0) }
    }

    /// Forgets the parent's guard, in a forked child.
    pub(crate) fn forget(&self) {
        self.state.store(NONE, Ordering::Relaxed);
        self.missed.store(0, Ordering::Relaxed);
    }

    /// Threads that wait for the guard to open.
    pub(crate) fn missed(&self) -> u32 {
        self.missed.load(Ordering::Relaxed)
    }

    /// Whether calls go through.
    #[inline(always)]
    pub(crate) fn is_open(&self) -> bool {
        self.state.load(Ordering::Relaxed) <= OPEN
    }

    /// Whether the process can be parked.
    #[inline(always)]
    pub(crate) fn is_there(&self) -> bool {
        self.state.load(Ordering::Relaxed) != NONE
    }

    /// Makes a process that can be parked; `false` where the kernel has no barrier for threads.
    pub(crate) fn begin(&self) -> bool {
        // SAFETY: the command takes no pointer.
        let registered = unsafe { libc::syscall(libc::SYS_membarrier, REGISTER, 0, 0) } == 0;
        registered && self.step(NONE, OPEN)
    }

    /// Counts a thread that waits for the guard to open, or no longer waits.
    pub(crate) fn misses(&self, on: bool) {
        if on {
            self.missed.fetch_add(1, Ordering::AcqRel)
        } else {
            self.missed.fetch_sub(1, Ordering::AcqRel)
        };
    }

    fn step(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Gives up a guard that is being closed; `false` if it is not being closed.
    pub(crate) fn cancel(&self) -> bool {
        self.step(CLOSING, OPEN)
    }

    /// Keeps a guard closed that is being closed; `false` if this was given up.
    pub(crate) fn seal(&self) -> bool {
        self.step(CLOSING, CLOSED)
    }

    /// Lets calls through again.
    pub(crate) fn open(&self) {
        self.step(CLOSED, OPEN);
    }

    /// Closes the guard, and waits until no thread is in a call. `false`: a call has not ended within `most`, or the guard was given up.
    pub(crate) fn close(&self, threads: impl FnOnce() -> Vec<&'static ThreadRecord>, most: Duration) -> bool {
        // SAFETY: the command takes no pointer.
        let barrier = || unsafe { libc::syscall(libc::SYS_membarrier, BARRIER, 0, 0) } == 0;
        if !self.step(OPEN, CLOSING) || !barrier() {
            return false;
        }
        let by = clock::now_ns().saturating_add(u64::try_from(most.as_nanos()).unwrap_or(u64::MAX));
        for thread in threads() {
            while thread.is_in_call() {
                if clock::now_ns() > by || self.is_open() {
                    return false;
                }
                std::thread::sleep(STEP);
            }
        }
        true
    }
}
