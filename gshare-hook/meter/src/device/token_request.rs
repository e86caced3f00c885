//! When a process asks for a token and gives it back.
//!
//! ```text
//! Idle --a thread waits--> Requested --granted--> Open --spent, expired, nothing more to launch--> Draining --drained--> Idle, Requested
//!                                                   '--revoked--> Owing --what ran under it is over--> Idle, Requested
//! ```
//!
//! - A token is asked for *ahead*: while a lease is open, when what is left of its budget or time is less than what may be in flight.
//! - A lease is closed *early*: when what is still queued is shorter than a hand-over, so that the device does not run dry between two
//!   holders.
//! - A closed lease is *kept* until what was queued has drained: a client that is let in earlier would wait behind that work, and
//!   measure it as its own.
//! - What a revoked lease's work takes is reported when it is over, also where the process asks again meanwhile.

use gshare_core::gate::Settlement;
use gshare_core::wire::ToDaemon;
use gshare_core::{ClientId, Duration, LeaseId, Timestamp};

use super::{Attachment, Device, Ground};
use crate::{Action, Actions};

/// GPU time, in ns, that may still be queued when a lease is returned: the time of a hand-over where the CPUs are busy too.
/// With less the device runs dry between two holders.
pub(crate) const REMAINDER: u64 = 500_000;
/// How long a lease is kept while nothing is launched, in ns.
const IDLE: u64 = 3_000_000;
/// How long a lease is kept whose last work is known to be over, however long ago that was launched, in ns.
const DONE: u64 = 1_000_000;
/// How much longer than predicted a closed lease waits for its queue to drain, in ns.
const DRAIN: u64 = 3_000_000;
/// How long after its expiry a closed lease is kept whose work is overdue, in ns. The daemon revokes it earlier; until then
/// what its work took can still be charged to it.
const OVERTIME: u64 = 100_000_000;
/// Interval between two reports of usage, in ns.
const REPORT: u64 = 10_000_000;

/// The daemon's lease, from the request to the return.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tenure {
    /// No lease is held and none was requested.
    Idle,
    /// A token was requested.
    Requested,
    /// Launches are let in until `expires` (ns); `requested`: a token was requested ahead.
    Open { expires: u64, requested: bool },
    /// The lease is closed, and kept until what is queued has drained, at most until `by` or, with work that is overdue,
    /// until `overtime` (both ns).
    Draining { settlement: Settlement, by: u64, overtime: u64 },
    /// The daemon has revoked the lease, and work launched under it still runs: what that takes is yet to be reported.
    Owing { settlement: Settlement, requested: bool },
}

impl<G: Ground> Device<G> {
    /// The daemon grants a lease, or extends the one that is held.
    pub(crate) fn granted(
        &mut self,
        client: ClientId,
        (lease, budget, expires): (LeaseId, Duration, u64),
        now: u64,
        actions: &mut Actions,
    ) {
        // An extension that has crossed the return of its lease is void: the daemon has taken that for returned.
        if self.last_closed.is_some_and(|closed| lease <= closed) {
            return;
        }
        let before = self.tenure;
        self.tenure = Tenure::Open { expires, requested: false };
        if !matches!(before, Tenure::Open { .. }) {
            self.line.turn_began = now;
        }
        let closed = match before {
            Tenure::Draining { settlement, .. } | Tenure::Owing { settlement, .. } => {
                Some(self.ledger.revise(settlement))
            }
            _ => None,
        };
        // The end of the last lease has left a bound that would let next to nothing in.
        self.bound_in_flight(expires, now);
        let replaced = self.ledger.grant(self.ground.gate(), lease, budget);
        self.last_closed = replaced.map(|settlement| settlement.lease).or(self.last_closed);
        actions.push(Action::Wake(self.ordinal));
        for settlement in closed.into_iter().chain(replaced) {
            say_return(client, settlement, false, actions);
        }
    }

    /// The daemon revokes a lease. The daemon has charged its whole budget: what was used may be more.
    pub(crate) fn revoked(&mut self, client: ClientId, lease: LeaseId, now: u64, actions: &mut Actions) {
        let settlement = match &mut self.tenure {
            Tenure::Open { .. } if self.ledger.lease() == Some(lease) => {
                self.ledger.close(self.ground.gate())
            }
            &mut Tenure::Draining { settlement, .. } if settlement.lease == lease => Some(settlement),
            Tenure::Open { requested, .. } | Tenure::Owing { requested, .. } => {
                *requested = false;
                None
            }
            Tenure::Requested => {
                self.tenure = Tenure::Idle;
                None
            }
            _ => None,
        };
        self.last_closed = self.last_closed.max(Some(lease));
        if let Some(settlement) = settlement {
            self.line.turn_began = u64::MAX;
            self.tenure = Tenure::Owing { settlement, requested: false };
            self.decide_owing(client, now, actions);
        }
    }

    /// Sends what is to be said to the daemon now.
    pub(super) fn decide(&mut self, now: u64, actions: &mut Actions) {
        match self.attachment {
            Attachment::Asking | Attachment::Refused { .. } => {}
            Attachment::Served(client) => self.decide_served(client, now, actions),
            Attachment::Local(_) => self.decide_locally(now),
        }
    }

    fn decide_served(&mut self, client: ClientId, now: u64, actions: &mut Actions) {
        if self.switches.free_running {
            return;
        }
        match self.tenure {
            Tenure::Idle => {
                if self.waiting > 0 {
                    self.tenure = Tenure::Requested;
                    actions.push(Action::Say(ToDaemon::TokenRequest { client }));
                }
            }
            Tenure::Requested => {}
            Tenure::Open { expires, requested } => self.decide_open(client, expires, requested, now, actions),
            Tenure::Draining { .. } => self.decide_draining(client, now, actions),
            Tenure::Owing { .. } => self.decide_owing(client, now, actions),
        }
    }

    fn decide_open(
        &mut self,
        client: ClientId,
        expires: u64,
        requested: bool,
        now: u64,
        actions: &mut Actions,
    ) {
        let wants = self.wants_more(now);
        let left = self.bound_in_flight(expires, now);
        let gate = self.ground.gate();
        let unspent = self.ledger.unspent(gate).as_nanos();
        // Threads go on spending meanwhile: what a kernel spends is to be found queued, too.
        let spent = self.ledger.in_flight_if_spent(gate);
        let spent = spent.map(|time| self.queued_of(self.launched_of(time), now));
        if left == 0 || !wants || spent.is_some_and(|queued| queued <= REMAINDER) {
            if let Some(settlement) = self.ledger.close(gate) {
                // Until then the device works for this process: a client that is let in earlier waits behind it, and
                // measures that as its own.
                let by = now + self.queued(now) + DRAIN;
                let overtime = by.max(expires.saturating_add(OVERTIME));
                self.tenure = Tenure::Draining { settlement, by, overtime };
                self.last_closed = Some(settlement.lease);
                self.decide_draining(client, now, actions);
            }
            return;
        }
        let bound = self.bound.as_nanos();
        let asks = !requested && (unspent <= bound || left <= bound);
        // A kernel that is longer than what was left of the budget counts when more is asked for.
        let overruns = asks && unspent == 0;
        if (overruns || now >= self.reported.0 + REPORT)
            && let Some(lease) = self.ledger.lease()
        {
            let used = self.ledger.used(self.ground.gate());
            self.report(client, lease, used, now, actions);
        }
        if asks {
            self.tenure = Tenure::Open { expires, requested: true };
            actions.push(Action::Say(ToDaemon::TokenRequest { client }));
        }
    }

    fn decide_draining(&mut self, client: ClientId, now: u64, actions: &mut Actions) {
        let Tenure::Draining { settlement, by, overtime } = self.tenure else { return };
        let over = self.line.is_empty() || !self.line.turns.ends_first();
        let drained = self.queued(now) <= REMAINDER && over;
        let late = now >= if self.line.is_empty() { by } else { overtime };
        if !drained && !late {
            return;
        }
        self.line.turns.hand_over(now);
        let wants = self.wants_more(now);
        self.tenure = if wants { Tenure::Requested } else { Tenure::Idle };
        let settlement = self.ledger.revise(settlement);
        say_return(client, settlement, wants, actions);
    }

    fn decide_owing(&mut self, client: ClientId, now: u64, actions: &mut Actions) {
        let Tenure::Owing { settlement, mut requested } = self.tenure else { return };
        let settlement = self.ledger.revise(settlement);
        if self.line.is_empty() && self.in_flight() == 0 {
            self.tenure = if requested { Tenure::Requested } else { Tenure::Idle };
            return say_return(client, settlement, false, actions);
        }
        if now >= self.reported.0 + REPORT {
            self.report(client, settlement.lease, settlement.used, now, actions);
        }
        if !requested && self.waiting > 0 {
            requested = true;
            actions.push(Action::Say(ToDaemon::TokenRequest { client }));
        }
        self.tenure = Tenure::Owing { settlement, requested };
    }

    fn decide_locally(&mut self, now: u64) {
        let wants = self.wants_more(now);
        let gate = self.ground.gate();
        self.ledger.set_in_flight_bound(self.bound.saturating_add(Duration::from_nanos(self.prepaid)));
        let in_flight = self.ledger.in_flight_if_spent(gate).map(|time| self.launched_of(time));
        let Attachment::Local(clock) = &mut self.attachment else { return };
        if self.ledger.lease().is_some() {
            let spent = in_flight.is_some_and(|in_flight| in_flight <= REMAINDER);
            if (now >= clock.window_end || spent || !wants)
                && let Some(settlement) = self.ledger.close(gate)
            {
                clock.share.charge(settlement.used);
            }
        }
        if self.ledger.lease().is_none() && wants {
            let (budget, until) = clock.share.budget(Timestamp::from_nanos(now));
            clock.window_end = until.as_nanos();
            if !budget.is_zero() {
                self.ledger.grant(gate, LeaseId::new(clock.next_lease), budget);
                clock.next_lease += 1;
            }
        }
    }

    /// Bounds what is in flight: nothing may be queued that would not be over when the lease expires. Gives how long that
    /// is, in ns.
    pub(super) fn bound_in_flight(&mut self, expires: u64, now: u64) -> u64 {
        let left = expires.saturating_sub(now);
        let bound = self.bound.min(Duration::from_nanos(left));
        // Prepaid time is in flight for the ledger, but not on the device.
        self.ledger.set_in_flight_bound(bound.saturating_add(Duration::from_nanos(self.prepaid)));
        left
    }

    /// Whether the program is going to launch more, as far as can be told: threads wait for credit or for work in flight, or
    /// have just done either.
    pub(super) fn wants_more(&self, now: u64) -> bool {
        let waits = self.waiting > 0 || self.in_flight() > 0;
        let lately = now.saturating_sub(self.launches.changed) < IDLE
            || now.saturating_sub(self.line.worked_until) < DONE;
        !self.leaving && (waits || lately)
    }

    /// Whether a process that leaves has reported all that it used, as far as that is measured.
    pub(crate) fn is_settled(&self) -> bool {
        let over = self.line.is_empty() && self.in_flight() == 0;
        !matches!(self.attachment, Attachment::Served(_))
            || self.switches.free_running
            || (matches!(self.tenure, Tenure::Idle | Tenure::Requested) && over)
    }

    /// The process ends now: what still runs is charged as far as it has run, and every lease is returned.
    pub(crate) fn leave(&mut self, now: u64, actions: &mut Actions) {
        let Attachment::Served(client) = self.attachment else { return };
        while let Some(id) = self.line.oldest() {
            let began = self.line.began_at(now);
            self.completed(id, (began, now), false, now, actions);
        }
        let gate = self.ground.gate();
        let settlement = match core::mem::replace(&mut self.tenure, Tenure::Idle) {
            Tenure::Idle | Tenure::Requested => None,
            Tenure::Open { .. } => self.ledger.close(gate),
            Tenure::Draining { settlement, .. } | Tenure::Owing { settlement, .. } => {
                Some(self.ledger.revise(settlement))
            }
        };
        if let Some(settlement) = settlement {
            self.last_closed = Some(settlement.lease);
            say_return(client, settlement, false, actions);
        }
    }

    fn report(&mut self, client: ClientId, lease: LeaseId, used: Duration, now: u64, actions: &mut Actions) {
        if used != self.reported.1 {
            let (launches, waited) = (self.launches.count, self.waited);
            actions.push(Action::Say(ToDaemon::Usage { client, lease, used, launches, waited }));
        }
        self.reported = (now, used);
    }
}

fn say_return(client: ClientId, Settlement { lease, used }: Settlement, again: bool, actions: &mut Actions) {
    actions.push(Action::Say(ToDaemon::TokenReturn { client, lease, used, again: again.into() }));
}
