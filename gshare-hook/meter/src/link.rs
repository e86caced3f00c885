//! The connection to the daemon: its attempts, its checks and its end.
//!
//! A daemon that says nothing for three fifths of [`Settings::daemon_wait`](crate::Settings::daemon_wait) while a thread waits is
//! probed by a second connection. If it does not greet there, the process treats the daemon as gone, because a stopped process
//! keeps its sockets.

use gshare_core::wire::DaemonWait;

/// First and longest delay, in ns, between two attempts to connect to a lost daemon.
pub(crate) const RECONNECT: (u64, u64) = (10_000_000, 250_000_000);
/// The longest delay while a daemon refuses the process, in ns.
pub(crate) const REFUSED: u64 = 5_000_000_000;

/// A time without a serving daemon.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    /// When the outage began, in ns.
    pub(crate) since: u64,
    /// Delay after the next failed attempt, in ns.
    pub(crate) delay: u64,
}

impl Outage {
    pub(crate) fn new(since: u64) -> Self {
        Self { since, delay: RECONNECT.0 }
    }

    /// The time, in ns, at which a process with this `daemon_wait` gives the daemon up.
    pub(crate) fn closed_at(&self, daemon_wait: DaemonWait) -> u64 {
        self.since + daemon_wait.get().as_nanos()
    }
}

/// The state of the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Link {
    /// No connection; the next attempt is made at `retry_at` (ns).
    Down { retry_at: u64, outage: Outage },
    /// The host makes the connection.
    Connecting { outage: Outage },
    /// Hello was said, and Welcome must come before `by` (ns).
    Greeting { by: u64, outage: Outage },
    /// The daemon has welcomed the process, and its last frame came at `heard` (ns). `probe`: the deadline, in ns, for its answer
    /// on a second connection.
    Up { heard: u64, probe: Option<u64> },
    /// The host ends the connection. `at_once`: the next connection is made without a delay.
    Closing { outage: Outage, at_once: bool },
}

impl Link {
    pub(crate) fn is_up(&self) -> bool {
        matches!(self, Self::Up { .. })
    }

    /// The present outage, if any.
    pub(crate) fn outage(&self) -> Option<Outage> {
        match *self {
            Self::Up { .. } => None,
            Self::Down { outage, .. }
            | Self::Connecting { outage }
            | Self::Greeting { outage, .. }
            | Self::Closing { outage, .. } => Some(outage),
        }
    }
}

/// Delays of a random length, so that the clients of a daemon do not come back all at once.
#[derive(Debug)]
pub(crate) struct Jitter(u64);

impl Jitter {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A random delay between a half and three halves of `delay`.
    pub(crate) fn around(&mut self, delay: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        delay / 2 + (self.0 >> 33) % delay.max(1)
    }
}
