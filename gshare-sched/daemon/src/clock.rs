//! The daemon's only clock.

use gshare_core::Timestamp;
use rustix::time::{ClockId, clock_gettime};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The clock of a node. It never goes back. Hooked processes must read the same clock, since a grant names the time of its
/// expiry.
pub trait Clock: fmt::Debug + Send + Sync {
    /// The present time.
    fn now(&self) -> Timestamp;
}

/// `CLOCK_MONOTONIC`, which all processes of one node share.
#[derive(Debug, Clone, Copy, Default)]
pub struct MonotonicClock;

impl Clock for MonotonicClock {
    fn now(&self) -> Timestamp {
        let time = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Timestamp::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

/// A clock set by a test. After moving it, call [`Handle::wake`](crate::Handle::wake), since the daemon may be asleep
/// until a time that has just come.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that stands at `now`.
    pub const fn new(now: Timestamp) -> Self {
        Self(AtomicU64::new(now.as_nanos()))
    }

    /// Moves the clock to `now`; an earlier time is ignored.
    pub fn set(&self, now: Timestamp) {
        self.0.fetch_max(now.as_nanos(), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_nanos(self.0.load(Ordering::SeqCst))
    }
}
