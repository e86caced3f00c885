//! When a process asks for a token and gives it back.
//!
//! ```text
//! Idle --a thread waits--> Wanting --allowed--> Holding --spent, expired, nothing more to launch--> Draining --drained--> Idle, Wanting
//!                                                  '---stopped by the daemon------------------------------'-------------> Idle, Wanting
//! ```
//! A **turn** is the time in which a token is held. Process and daemon count the turns that are over ([`gshare_core::wire`]).
//!
//! - A token is asked for *ahead*: while one is held, when what is left of its time is less than what may be in flight.
//! - Launches stop *early*: when what is still queued is shorter than a hand-over, so that the device does not run dry between two
//!   holders.
//! - The token is *kept* until what was queued has drained: a client that is let in earlier would wait behind that work, and
//!   measure it as its own.
//! - Work that outlasts its turn is reported when it is measured. The total grows by it, whichever turn it is then.

use gshare_core::gate::Balance;
use gshare_core::wire::ToDaemon;
use gshare_core::{ClientId, Duration, Timestamp, UseState};

use super::{Attachment, Device, Ground};
use crate::{Action, Actions};

/// GPU time, in ns, that may still be queued when a token is given back: the time of a hand-over where the CPUs are busy too.
/// With less the device runs dry between two holders.
pub(crate) const REMAINDER: u64 = 500_000;
/// How long a token is kept while nothing is launched, in ns.
const IDLE: u64 = 3_000_000;
/// How long a token is kept whose last work is known to be over, however long ago that was launched, in ns.
const DONE: u64 = 1_000_000;
/// How much longer than predicted the queue may take to drain, in ns.
const DRAIN: u64 = 3_000_000;
/// How long after its end a token is kept whose work is overdue, in ns. The daemon takes it back earlier, unless the daemon is late.
const OVERTIME: u64 = 100_000_000;
/// The shortest time between two reports, in ns.
const REPORT: u64 = 10_000_000;

/// The token of the daemon, from the question for it to its end.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Turn {
    /// No token is held, and none was asked for.
    Idle,
    /// A token was asked for.
    Wanting,
    /// Launches are let in until then (ns). `extends`: more time was asked for.
    Holding { until: u64, extends: bool },
    /// Launches have stopped. The token is kept until the queue has drained: until `by` at most or, with work that is overdue,
    /// until `overtime` (both ns).
    Draining { by: u64, overtime: u64 },
}

impl<G: Ground> Device<G> {
    /// The daemon allows launches up to a total and until a time, or takes the token back.
    pub(crate) fn allowed(
        &mut self,
        client: ClientId,
        (turn, allowed, until): (u32, Duration, u64),
        now: u64,
        actions: &mut Actions,
    ) {
        // What the daemon said before it heard of the end of that turn is void.
        if turn != self.turns_over {
            return;
        }
        if until <= now {
            self.stop_launches();
            self.credit.charged(allowed);
            return self.end_turn(client, self.waiting > 0, now, actions);
        }
        if matches!(self.turn, Turn::Idle | Turn::Wanting) {
            self.line.turn_began = now;
        }
        self.turn = Turn::Holding { until, extends: false };
        // The end of the last turn has left a bound that would let next to nothing in.
        self.bound_in_flight(until, now);
        self.credit.allow(self.ground.gate(), allowed);
        actions.push(Action::Wake(self.ordinal));
    }

    /// Says what there is to be said to the daemon, and lets in what may go.
    pub(super) fn decide(&mut self, now: u64, actions: &mut Actions) {
        let may_launch = match self.attachment {
            Attachment::Served(_) => matches!(self.turn, Turn::Holding { .. }),
            Attachment::Local(_) => true,
            Attachment::Asking | Attachment::Refused { .. } => false,
        };
        assert!(
            may_launch || !self.credit.is_open(),
            "launches are let in that nobody allows: {:?}",
            self.turn
        );
        match self.attachment {
            Attachment::Served(client) if !self.switches.free_running => {
                self.decide_served(client, now, actions);
            }
            Attachment::Served(_) | Attachment::Asking | Attachment::Refused { .. } => {}
            Attachment::Local(_) => self.decide_locally(now),
        }
    }

    fn decide_served(&mut self, client: ClientId, now: u64, actions: &mut Actions) {
        match self.turn {
            Turn::Idle if self.waiting > 0 => self.ask(client, Turn::Wanting, now, actions),
            Turn::Idle | Turn::Wanting => {}
            Turn::Holding { until, extends } => self.decide_holding(client, (until, extends), now, actions),
            Turn::Draining { by, overtime } => self.decide_draining(client, (by, overtime), now, actions),
        }
        if now >= self.said.0 + REPORT && self.used() != self.said.1 {
            self.say_use(client, now, actions);
        }
    }

    fn decide_holding(
        &mut self,
        client: ClientId,
        (until, extends): (u64, bool),
        now: u64,
        actions: &mut Actions,
    ) {
        let wants = self.wants_more(now);
        let left = self.bound_in_flight(until, now);
        // Threads go on spending meanwhile: what a kernel spends is to be found queued, too.
        let Balance { in_flight, unspent } = self.credit.balance(self.ground.gate());
        let spent = unspent.is_zero() && self.queued_of(self.launched_of(in_flight), now) <= REMAINDER;
        if left == 0 || !wants || spent {
            self.credit.stop(self.ground.gate());
            // Until then the device works for this process: a client that is let in earlier waits behind it, and
            // measures that as its own.
            let by = now + self.queued(now) + DRAIN;
            let overtime = by.max(until.saturating_add(OVERTIME));
            self.turn = Turn::Draining { by, overtime };
            return self.decide_draining(client, (by, overtime), now, actions);
        }
        let bound = self.bound.as_nanos();
        if !extends && (unspent.as_nanos() <= bound || left <= bound) {
            self.ask(client, Turn::Holding { until, extends: true }, now, actions);
        }
    }

    fn decide_draining(
        &mut self,
        client: ClientId,
        (by, overtime): (u64, u64),
        now: u64,
        actions: &mut Actions,
    ) {
        let over = self.line.is_empty() || !self.line.turns.ends_first();
        let drained = self.queued(now) <= REMAINDER && over;
        let late = now >= if self.line.is_empty() { by } else { overtime };
        if drained || late {
            self.line.turns.hand_over(now);
            self.give_back(client, self.wants_more(now), now, actions);
        }
    }

    fn give_back(&mut self, client: ClientId, again: bool, now: u64, actions: &mut Actions) {
        self.end_turn(client, again, now, actions);
        self.credit.give_back(self.ground.gate());
    }

    /// The turn is over: says so, with what was used, and asks for another one.
    fn end_turn(&mut self, client: ClientId, again: bool, now: u64, actions: &mut Actions) {
        self.turns_over = self.turns_over.wrapping_add(1);
        self.turn = Turn::Idle;
        if again {
            self.ask(client, Turn::Wanting, now, actions);
        } else {
            self.say_use(client, now, actions);
        }
    }

    fn ask(&mut self, client: ClientId, turn: Turn, now: u64, actions: &mut Actions) {
        self.turn = turn;
        self.say_use(client, now, actions);
    }

    fn decide_locally(&mut self, now: u64) {
        let (wants, used) = (self.wants_more(now), self.used());
        let gate = self.ground.gate();
        self.credit.set_bound(gate, self.bound.saturating_add(Duration::from_nanos(self.prepaid)));
        let Balance { in_flight, unspent } = self.credit.balance(gate);
        let spent = unspent.is_zero() && self.launched_of(in_flight) <= REMAINDER;
        let Attachment::Local(clock) = &mut self.attachment else { return };
        if now >= clock.window_end || spent || !wants {
            self.credit.stop(gate);
        }
        if !self.credit.is_open() && wants {
            let (allowed, until) = clock.share.allowed(Timestamp::from_nanos(now), used);
            clock.window_end = until.as_nanos();
            self.credit.charged(allowed);
            if allowed > used {
                self.credit.allow(gate, allowed);
            }
        }
    }

    /// Bounds what is in flight: nothing may be queued that would not be over when the token ends. Gives how long that
    /// is, in ns.
    fn bound_in_flight(&mut self, until: u64, now: u64) -> u64 {
        let left = until.saturating_sub(now);
        let bound = self.bound.min(Duration::from_nanos(left));
        // Prepaid time is in flight for the gate, but not on the device.
        let bound = bound.saturating_add(Duration::from_nanos(self.prepaid));
        self.credit.set_bound(self.ground.gate(), bound);
        left
    }

    /// Whether the program is going to launch more, as far as can be told: threads wait for credit or for work in flight, or
    /// have just done either.
    fn wants_more(&self, now: u64) -> bool {
        let waits = self.waiting > 0 || self.in_flight() > 0;
        let lately = now.saturating_sub(self.launches.changed) < IDLE
            || now.saturating_sub(self.line.worked_until) < DONE;
        !self.leaving && (waits || lately)
    }

    /// Whether the daemon has yet to answer a question for time.
    pub(crate) fn awaits_time(&self) -> bool {
        matches!(self.turn, Turn::Wanting | Turn::Holding { extends: true, .. })
    }

    /// Whether a process that leaves has measured all that it launched.
    pub(crate) fn is_settled(&self) -> bool {
        let over = self.line.is_empty() && self.in_flight() == 0;
        !matches!(self.attachment, Attachment::Served(_))
            || self.switches.free_running
            || (matches!(self.turn, Turn::Idle | Turn::Wanting) && over)
    }

    /// The process ends now: what still runs is charged as far as it has run, and the daemon hears the last total.
    pub(crate) fn leave(&mut self, now: u64, actions: &mut Actions) {
        let Attachment::Served(client) = self.attachment else { return };
        while let Some(id) = self.line.oldest() {
            let began = self.line.began_at(now);
            self.completed(id, (began, now), false, now, actions);
        }
        if matches!(self.turn, Turn::Holding { .. } | Turn::Draining { .. }) {
            return self.give_back(client, false, now, actions);
        }
        self.turn = Turn::Idle;
        self.say_use(client, now, actions);
    }

    /// GPU time used since the device was found.
    pub(super) fn used(&mut self) -> Duration {
        self.credit.used(self.ground.gate(), Duration::from_nanos(self.prepaid))
    }

    fn say_use(&mut self, client: ClientId, now: u64, actions: &mut Actions) {
        let state = match self.turn {
            Turn::Idle => UseState::Idle,
            Turn::Wanting => UseState::Wants,
            Turn::Holding { extends: true, .. } => UseState::Extends,
            Turn::Holding { .. } | Turn::Draining { .. } => UseState::Holds,
        };
        let (turn, used) = (self.turns_over, self.used());
        self.said = (now, used);
        let (launches, waited) = (self.launches.count, self.waited);
        actions.push(Action::Say(ToDaemon::Use { client, turn, used, state, launches, waited }));
    }
}
