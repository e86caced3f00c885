//! Kernel launching cycles of a process, as seen by its helper thread (Dilu, section 3.4.1).
//!
//! The launch path reads no clock. The helper instead derives cycles from two counters, launches and calls that wait for the
//! device, which it reads several times per millisecond while something runs. A cycle begins when launches are seen. It ends with
//! the first waiting call after them, where a program waits for the result of an iteration, or, in a program that only polls, after
//! a `PAUSE` without launches. A thread waiting for credit is in the middle of a launch, so its wait is no pause.
//!
//! First and last launch are each known to one look: 0.3 ms, where the published implementation counts in steps of 5 ms.

use gshare_core::wire::ToDaemon;
use gshare_core::{ClientId, Timestamp};

/// Time without a launch after which a cycle is over, in ns.
const PAUSE: u64 = 5_000_000;

/// One cycle, as far as the helper thread has seen it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// When its first launch was seen, in ns.
    pub first: u64,
    /// When its last launch was seen, in ns.
    pub last: u64,
    /// How many launches it has.
    pub launches: u64,
}

impl Cycle {
    /// The frame that reports the cycle.
    pub fn report(self, client: ClientId) -> ToDaemon {
        let time = Timestamp::from_nanos;
        ToDaemon::Iteration {
            client,
            first_launch: time(self.first),
            last_launch: time(self.last),
            launches: u32::try_from(self.launches).unwrap_or(u32::MAX),
        }
    }
}

/// The open cycle, and the counters at the last look.
#[derive(Debug, Default)]
pub struct Cycles {
    open: Option<Cycle>,
    launches: u64,
    syncs: u64,
}

impl Cycles {
    /// Looks at the counters, and returns a cycle that has ended since the last look.
    pub fn look(&mut self, now: u64, launches: u64, syncs: u64, waiting: bool) -> Option<Cycle> {
        let new = launches.saturating_sub(self.launches);
        if new > 0 {
            let open = self.open.get_or_insert(Cycle { first: now, last: now, launches: 0 });
            (open.last, open.launches) = (now, open.launches + new);
        }
        let synced = syncs != self.syncs;
        (self.launches, self.syncs) = (launches, syncs);
        self.open.take_if(|open| synced || (!waiting && now.saturating_sub(open.last) > PAUSE))
    }
}
