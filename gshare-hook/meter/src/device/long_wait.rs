//! Reports launches with a long wait to the daemon: the reason after a wait of [`LONG_WAIT`], and again when the reason changes.

use gshare_core::reason::{LONG_WAIT, Wait};
use gshare_core::wire::ToDaemon;
use gshare_core::{ClientId, Duration};

use super::{Attachment, Device, Ground, Turn};
use crate::{Action, Actions, Facts};

/// [`LONG_WAIT`] in ns.
const LONG: u64 = LONG_WAIT.as_nanos();

/// The present wait of launches on a device, and the daemon's last report of it.
#[derive(Debug, Default)]
pub(super) struct LongWait {
    /// The time, in ns, since which launches wait and none of them was let in; `None` without a waiting launch.
    since: Option<u64>,
    /// Total time of finished waits, which grows when a launch is let in.
    finished: Duration,
    told: Option<(ClientId, Wait)>,
}

impl LongWait {
    /// The next look at the device for the wait's sake, in ns.
    pub(super) fn next_look(&self, now: u64) -> u64 {
        match self.since {
            Some(since) if now < since + LONG => since + LONG,
            Some(_) => now + LONG,
            None if self.told.is_some() => now + LONG,
            None => u64::MAX,
        }
    }
}

impl<G: Ground> Device<G> {
    /// Tells the daemon about a launch with a long wait, and about the end of the wait.
    pub(super) fn tell_long_wait(&mut self, facts: &Facts, now: u64, actions: &mut Actions) {
        let Attachment::Served(client) = self.attachment else {
            self.long_wait = LongWait::default();
            return;
        };
        let let_in = core::mem::replace(&mut self.long_wait.finished, facts.waited) != facts.waited;
        self.long_wait.since = match self.long_wait.since {
            _ if facts.waiting + facts.measuring == 0 => None,
            Some(since) if !let_in => Some(since),
            _ => Some(now),
        };
        let long = self.long_wait.since.is_some_and(|since| now >= since + LONG);
        let reason = long.then(|| if facts.waiting > 0 { self.wait_reason(now) } else { Wait::Measuring });
        let told = reason.map(|reason| (client, reason));
        let before = core::mem::replace(&mut self.long_wait.told, told);
        if told != before {
            actions.push(Action::Say(ToDaemon::Waiting { client, reason }));
        }
    }

    /// The reason for the wait of a launch without credit, as far as the process knows it.
    fn wait_reason(&mut self, now: u64) -> Wait {
        let holds = !self.credit.balance(self.ground.gate()).unspent.is_zero();
        match self.turn {
            _ if !self.parking.is_resident() => Wait::Parked,
            Turn::Draining { .. } => Wait::Draining,
            _ if holds => Wait::InFlight,
            _ if self.throttled_until > now => Wait::Limit,
            _ => Wait::Token,
        }
    }
}
