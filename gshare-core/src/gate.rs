//! The launch gate: what a hooked process decides by itself.
//!
//! # Problem
//! A kernel launch takes about 2 us, and a question to the daemon 8 us and more. So the process decides from a permission that
//! it was given ahead of time, and a launch costs **one atomic operation** while that lasts.
//!
//! # Terms
//! - **spent**: the predicted cost of all launches so far, corrected as they are measured; a total in ns.
//! - **limit**: the total up to which launches pass. A launch passes while `spent` is below it, whatever the launch costs.
//! - **done**: the measured cost of all work that is over; a total in ns.
//! - **in flight**: `spent - done`, launched and not yet known to be over.
//!
//! # Algorithm
//! Threads compare `spent` with `limit` in the [`LaunchGate`]. One helper thread owns the [`Credit`]: it knows up to which total the
//! daemon allows the process, and keeps the limit at `min(allowed, done + bound)`, so that only so much work is queued.
//!
//! ```text
//! allowed 10 ms, bound 2 ms, kernels predicted at 1 ms that take 1.1 ms
//! at first         spent 0     done 0     limit 2.0
//! launch, launch   spent 2.0   done 0     limit 2.0        a third launch waits
//! one is over      spent 2.1   done 1.1   limit 3.1        the next passes
//! ```
//! A permission that is taken back is a lower limit. Nothing else changes: what runs is measured and stays in the totals.
//!
//! # Invariants
//! `done <= spent`, under any interleaving. A thread passes at most one launch beyond the limit. `used`, which the daemon is told,
//! never shrinks.
//!
//! # Cost
//! [`LaunchGate::try_spend`]: two loads and one compare-and-swap.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

use crate::units::{Bytes, Duration};

/// A total on its own pair of cache lines: adjacent lines are fetched together.
#[derive(Debug)]
#[repr(align(128))]
struct Total(AtomicU64);

/// The hot side: shared by all launching threads of a process, one per GPU.
#[derive(Debug)]
pub struct LaunchGate {
    spent: Total,
    limit: Total,
}

impl Default for LaunchGate {
    fn default() -> Self {
        Self::new()
    }
}

impl LaunchGate {
    /// A closed gate.
    pub fn new() -> Self {
        Self { spent: Total(AtomicU64::new(0)), limit: Total(AtomicU64::new(0)) }
    }

    /// Lets a launch of predicted cost `cost` through, or not. `false`: nothing was spent, and the caller waits for its helper thread.
    #[inline]
    pub fn try_spend(&self, cost: Duration) -> bool {
        let mut spent = self.spent.0.load(Ordering::Relaxed);
        loop {
            if spent >= self.limit.0.load(Ordering::Acquire) {
                return false;
            }
            let more = spent.saturating_add(cost.as_nanos());
            match self.spent.0.compare_exchange_weak(spent, more, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => spent = now,
            }
        }
    }

    /// Predicted cost of all launches so far, corrected as far as they are measured.
    pub fn spent(&self) -> Duration {
        Duration::from_nanos(self.spent.0.load(Ordering::Acquire))
    }

    /// How much may be spent now.
    pub fn left(&self) -> Duration {
        Duration::from_nanos(self.limit.0.load(Ordering::Acquire)).saturating_sub(self.spent())
    }

    /// Work was over that was spent at `predicted` and took `measured`.
    fn correct(&self, predicted: Duration, measured: Duration) {
        if measured >= predicted {
            self.spent.0.fetch_add((measured - predicted).as_nanos(), Ordering::AcqRel);
        } else {
            self.spent.0.fetch_sub((predicted - measured).as_nanos(), Ordering::AcqRel);
        }
    }

    fn set_limit(&self, total: Duration) {
        self.limit.0.store(total.as_nanos(), Ordering::Release);
    }
}

/// The cold side: the permission of one helper thread's device, and the work that is over.
#[derive(Debug)]
pub struct Credit {
    /// Total up to which launches are allowed; zero while none are.
    allowed: Duration,
    done: Duration,
    bound: Duration,
    /// The largest total that was reported.
    reported: Duration,
}

impl Credit {
    /// No permission yet. At most `bound` of GPU time may be in flight.
    pub fn new(bound: Duration) -> Self {
        Self { allowed: Duration::ZERO, done: Duration::ZERO, bound, reported: Duration::ZERO }
    }

    /// Launches are allowed up to this total of [`used`](Self::used).
    pub fn allow(&mut self, gate: &LaunchGate, allowed: Duration) {
        self.allowed = allowed;
        self.apply(gate);
    }

    /// No launch is allowed from here on.
    pub fn stop(&mut self, gate: &LaunchGate) {
        self.allow(gate, Duration::ZERO);
    }

    /// Whether a permission stands, used up or not.
    pub fn is_open(&self) -> bool {
        !self.allowed.is_zero()
    }

    /// Bounds the GPU time in flight from here on.
    pub fn set_bound(&mut self, gate: &LaunchGate, bound: Duration) {
        self.bound = bound;
        self.apply(gate);
    }

    /// Work is over that was spent at `predicted` and took `measured`.
    pub fn completed(&mut self, gate: &LaunchGate, predicted: Duration, measured: Duration) {
        gate.correct(predicted, measured);
        self.done = self.done.saturating_add(measured);
        self.apply(gate);
    }

    /// GPU time launched and not yet known to be over.
    pub fn in_flight(&self, gate: &LaunchGate) -> Duration {
        gate.spent().saturating_sub(self.done)
    }

    /// How much of the permission is not spent.
    pub fn unspent(&self, gate: &LaunchGate) -> Duration {
        self.allowed.saturating_sub(gate.spent())
    }

    /// GPU time used in all, work in flight included. `prepaid` of what is spent is for launches to come. Never shrinks.
    pub fn used(&mut self, gate: &LaunchGate, prepaid: Duration) -> Duration {
        self.reported = self.reported.max(gate.spent().saturating_sub(prepaid));
        self.reported
    }

    /// Lets one more launch pass with any work in flight, if the permission is not spent; gives whether it is not.
    ///
    /// For work in flight that is overdue: it may wait for a launch of the program that is yet to come.
    pub fn let_one_in(&self, gate: &LaunchGate) -> bool {
        let spent = gate.spent();
        let open = spent < self.allowed;
        if open && gate.left().is_zero() {
            gate.set_limit(spent.saturating_add(Duration::from_nanos(1)));
        }
        open
    }

    fn apply(&self, gate: &LaunchGate) {
        gate.set_limit(self.allowed.min(self.done.saturating_add(self.bound)));
    }
}

/// Memory that a process may allocate on one GPU without asking again.
///
/// Reserve before the driver call; when the call fails, [`release`](Self::release) takes it back. `free` never goes
/// below zero, so two threads cannot both pass with the last bytes.
#[derive(Debug)]
pub struct MemoryGate {
    free: AtomicU64,
    used: AtomicU64,
}

/// There is not enough reserved memory: ask the daemon for at least `bytes` more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} more needed")]
pub struct Shortage {
    /// How much is missing.
    pub bytes: Bytes,
}

impl MemoryGate {
    /// A gate with `free` bytes to begin with.
    pub fn new(free: Bytes) -> Self {
        Self { free: AtomicU64::new(free.0), used: AtomicU64::new(0) }
    }

    /// Takes `bytes`, all or nothing.
    pub fn reserve(&self, bytes: Bytes) -> Result<(), Shortage> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let Some(rest) = free.checked_sub(bytes.0) else {
                return Err(Shortage { bytes: Bytes(bytes.0 - free) });
            };
            match self.free.compare_exchange(free, rest, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => free = now,
            }
        }
        self.used.fetch_add(bytes.0, Ordering::AcqRel);
        Ok(())
    }

    /// Gives `bytes` back that were reserved.
    pub fn release(&self, bytes: Bytes) {
        let before = self.used.fetch_sub(bytes.0, Ordering::AcqRel);
        debug_assert!(before >= bytes.0, "released more than was reserved");
        self.free.fetch_add(bytes.0, Ordering::AcqRel);
    }

    /// Adds what the daemon granted.
    pub fn grant(&self, bytes: Bytes) {
        self.free.fetch_add(bytes.0, Ordering::AcqRel);
    }

    /// Takes out what is free beyond `keep`, to be given back to the daemon.
    pub fn surplus(&self, keep: Bytes) -> Bytes {
        let mut free = self.free.load(Ordering::Relaxed);
        while free > keep.0 {
            match self.free.compare_exchange(free, keep.0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Bytes(free - keep.0),
                Err(now) => free = now,
            }
        }
        Bytes::ZERO
    }

    /// Bytes reserved.
    pub fn used(&self) -> Bytes {
        Bytes(self.used.load(Ordering::Acquire))
    }

    /// Bytes that may still be reserved without asking.
    pub fn free(&self) -> Bytes {
        Bytes(self.free.load(Ordering::Acquire))
    }
}

/// A client's share kept by its own clock while the daemon is away ([`crate::wire::OnDaemonLoss::Open`]).
///
/// At the start of each window the client may use its quota limit, less what it overused before. Pure, like all of
/// this crate: the helper thread tells it the time.
#[derive(Debug, Clone, Copy)]
pub struct LocalShare {
    limit: Duration,
    window: Duration,
    window_end: crate::units::Timestamp,
    used: Duration,
}

impl LocalShare {
    /// A share of `limit` in each `window`, from `now` on.
    pub fn new(now: crate::units::Timestamp, limit: crate::units::Quota, window: Duration) -> Self {
        let window = if window.is_zero() { Duration::from_millis(100) } else { window };
        Self { limit: limit.of(window), window, window_end: now.saturating_add(window), used: Duration::ZERO }
    }

    /// Counts GPU time used.
    pub fn charge(&mut self, used: Duration) {
        self.used = self.used.saturating_add(used);
    }

    /// The GPU time that may be used now (0 is an answer), and the time at which that changes.
    pub fn budget(&mut self, now: crate::units::Timestamp) -> (Duration, crate::units::Timestamp) {
        if now >= self.window_end {
            let windows = now.saturating_since(self.window_end).as_nanos() / self.window.as_nanos() + 1;
            self.used = self.used.saturating_sub(self.limit.saturating_mul(windows));
            self.window_end = self.window_end.saturating_add(self.window.saturating_mul(windows));
        }
        (self.limit.saturating_sub(self.used), self.window_end)
    }
}
