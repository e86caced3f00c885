//! Kernel launching cycles of a process, as its helper thread sees them (Dilu, section 3.4.1).
//!
//! The launch path reads no clock, so a cycle is put together from counters that the helper looks at several times per
//! millisecond while something runs: launches, and calls that wait for the device. A cycle begins when launches are seen
//! and ends with the first such call after them, which is where a program waits for the result of an iteration; for a
//! program that only polls, when nothing has been launched for `PAUSE`. A thread that waits for credit is in the middle of a launch,
//! and no pause.
//!
//! First and last launch are each known to one look: 0.3 ms, where the published implementation counts in steps of 5 ms.

use gshare_core::wire::ToDaemon;
use gshare_core::{ClientId, Timestamp};

/// Time without a launch after which a cycle is over, in ns.
const PAUSE: u64 = 5_000_000;

/// One cycle: when its first and last launch were seen, in ns, and how many there were.
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
    /// The frame that reports it.
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

/// The cycle that is open, and the counters at the last look.
#[derive(Debug, Default)]
pub struct Cycles {
    open: Option<Cycle>,
    launches: u64,
    syncs: u64,
}

impl Cycles {
    /// Looks at the counters; gives the cycle that ended since the last look.
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
