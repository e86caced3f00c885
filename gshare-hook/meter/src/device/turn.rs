//! The token of the daemon: when a process asks for it, keeps it, and gives it back.
//!
//! At each look of the host ([`Device::looked`]) the device takes the counters of its threads, decides, and says when to look next.
//!
//! ```text
//! Idle ── a thread waits: Use{Wants} ──▶ Wanting ── Allow ──▶ Holding ── launches, up to the bound in flight, as work completes
//! Holding ── nearly spent: Use{Extends} ──▶ Holding ── Allow ──▶ Holding, up to a larger total
//! Holding ── spent, expired, recalled (a lower Allow), or nothing launched for 3 ms ──▶ Draining ── queue drained: Use{Idle or Wants} ──▶ Idle or Wanting
//! Holding, Draining ── Allow already over: Use{Idle or Wants} ──▶ Idle or Wanting
//! ```
//! A **turn** is the time with a token. Process and daemon count finished turns ([`gshare_core::wire`]). Every `Use` states the
//! total use, so the next `Use` makes up for a late or lost frame.
//!
//! - A token is requested *ahead*: while one is held, once the rest of its time is less than the work allowed in flight.
//! - The bound in flight shrinks with the rest of the token's time, so the queue drains before the token ends.
//! - Launches stop *early*: once the queued work is shorter than a hand-over, so that the device does not run dry between two
//!   holders.
//! - The token is *kept* until the queued work has drained. A client let in earlier would wait behind this work and measure it as
//!   its own.
//! - Work *behind a wait* of its stream for the host, a word or another stream does not keep the token: the device has nothing to do
//!   for it. It runs when the wait is over, and is charged when it is measured. Nor is the token kept by a thread that wants to queue
//!   more behind the wait than may be in flight.
//! - Work that outlasts its turn is reported when it is measured. The total grows by it in any later turn.
//!
//! Worked example: 10 ms are allowed, bound 2 ms, kernels of 1 ms. Two kernels are let in, and each completion lets in one more.
//! With 2 ms unspent, more time is requested. With the tenth kernel launched and half a millisecond queued, the token is given
//! back. A kernel of 400 ms is charged its guess of 0.5 ms; the daemon takes the token back after its grace, and charges 10 ms.
//! When the kernel is over, and before the process ends, the total grows to 400 ms.

use gshare_core::gate::Balance;
use gshare_core::wire::ToDaemon;
use gshare_core::{Bytes, ClientId, Duration, Quota, SmShare, Timestamp, UseState};

use super::timeline::UNKNOWN;
use super::{Attachment, Device, Ground};
use crate::{Action, Actions, Facts, OpenRun};

/// GPU time, in ns, that may still be queued when a token is given back: the time of a hand-over with busy CPUs. With less, the
/// device runs dry between two holders.
pub(super) const REMAINDER: u64 = 500_000;
/// How long a token is kept while nothing is launched, in ns.
const IDLE: u64 = 3_000_000;
/// How long a token is kept after its last known work has ended, in ns, regardless of the time of its launch.
const DONE: u64 = 1_000_000;
/// How long a token is kept after the last launch while all work in flight is behind waits, in ns: a thread launches on one stream
/// after the other.
const BLOCKED: u64 = 100_000;
/// How much longer than predicted the queue may take to drain, in ns.
const DRAIN: u64 = 3_000_000;
/// How long a token with overdue work is kept after its end, in ns. A daemon that is not late takes it back earlier.
const OVERTIME: u64 = 100_000_000;
/// The shortest time between two reports, in ns.
const REPORT: u64 = 10_000_000;
/// The shortest time between two reports, and between two looks at a program that rests, while no limit holds, in ns.
const FREE_REPORT: u64 = 100_000_000;
/// How long after its last launch a program without a limit rests, in ns.
const RESTS: u64 = 1_000_000_000;

/// How long work in flight may be overdue before one more launch is let in, and then the next, in ns. The interval is as long as a
/// window, so a program that uses it to queue too much gains one launch per window.
const OVERDUE: u64 = 100_000_000;
/// Interval between two looks at a token in use, in ns: each look takes a CPU from the program if all are busy. The shorter
/// interval holds while threads wait, and while launching cycles are told apart.
const LOOK: u64 = 1_000_000;
const CYCLE_LOOK: u64 = 300_000;
/// The shortest interval between two looks at work about to end, in ns.
const SHORTEST_LOOK: u64 = 50_000;
/// How long a run may stand still before its launches are presumed complete, in ns.
const STALE: u64 = 3_000_000;

/// The token of the daemon, from its request to its end.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Turn {
    /// No token is held or requested.
    Idle,
    /// A token is requested.
    Wanting,
    /// Launches are let in until `until` (ns). `extends`: more time is requested.
    Holding { until: u64, extends: bool },
    /// Launches have stopped. The token is kept until the queue has drained, but no longer than `by`, or `overtime` if work is
    /// overdue (both ns).
    Draining { by: u64, overtime: u64 },
}

/// Launches so far, and the time of the last request or wait for credit, in ns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Changing {
    count: u64,
    changed: u64,
}

/// The open launches of one run at their last change, and its time, in ns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Still {
    predicted: u64,
    since: u64,
}

/// The totals of a report: use, launches, and memory in use.
pub(super) type Stated = (Duration, u64, u64);

/// Memory in use times its time, from one look at the device to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    bytes: u64,
    since: u64,
    /// In byte-nanoseconds.
    total: u128,
}

impl Held {
    fn look(&mut self, now: u64, bytes: u64) {
        self.total += u128::from(self.bytes) * u128::from(now.saturating_sub(self.since));
        (self.bytes, self.since) = (bytes, now);
    }

    fn byte_seconds(&self) -> u64 {
        u64::try_from(self.total / 1_000_000_000).unwrap_or(u64::MAX)
    }
}

/// The state of the process apart from this device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around {
    /// Threads waiting for any device.
    pub(crate) waiters: usize,
    /// Calls that have waited for a device so far.
    pub(crate) syncs: u64,
    pub(crate) slo_sensitive: bool,
}

impl<G: Ground> Device<G> {
    /// Takes the daemon's answer: launches are allowed up to a total and until a time, or the token is taken back.
    pub(crate) fn allowed(
        &mut self,
        client: ClientId,
        (turn, allowed, until): (u32, Duration, u64),
        now: u64,
        actions: &mut Actions,
    ) {
        // An answer is void if the daemon sent it before it heard of the turn's end.
        if turn != self.turns_over {
            return;
        }
        if self.is_unlimited() {
            // The token was on its way when the limit ended, and goes back.
            self.turn = Turn::Holding { until, extends: false };
            return self.decide_freely(now, actions);
        }
        if !self.parking.is_resident() && until > now {
            // It crossed the order to park; a turn that drains ends by itself.
            if matches!(self.turn, Turn::Idle | Turn::Wanting) {
                self.give_back(client, false, now, actions);
            }
            return;
        }
        if until <= now {
            self.stop_launches();
            self.credit.charged(allowed);
            return self.end_turn(client, self.waiting > 0, now, actions);
        }
        match self.turn {
            Turn::Idle | Turn::Wanting => self.timeline.turn_began = now,
            Turn::Holding { .. } if allowed < self.credit.allowed() => {
                // Another client waits for the token.
                self.credit.recall(self.ground.gate(), allowed);
                if self.credit.balance(self.ground.gate()).unspent.is_zero() {
                    let (by, overtime) = self.drain(until, now);
                    self.decide_draining(client, (by, overtime), now, actions);
                }
                return;
            }
            Turn::Draining { .. } if allowed < self.credit.allowed() => return,
            Turn::Holding { .. } | Turn::Draining { .. } => {}
        }
        self.turn = Turn::Holding { until, extends: false };
        // The last turn's end has left a bound close to zero.
        self.bound_in_flight(until, now);
        self.credit.allow(self.ground.gate(), allowed);
        actions.push(Action::Wake(self.ordinal));
    }

    /// Takes the host's counters of the device, and decides.
    pub(crate) fn looked(&mut self, now: u64, facts: &Facts, around: Around, actions: &mut Actions) {
        // A launch is counted when it asks for credit, and may be let in a window later.
        if facts.launches != self.launches.count || facts.waiting.max(self.waiting) > 0 {
            self.launches = Changing { count: facts.launches, changed: now };
        }
        (self.waiting, self.waited) = (facts.waiting, facts.waited);
        let all = self.timeline.overlap.look(now, around.waiters);
        if core::mem::replace(&mut self.switches.measures_all, all) != all {
            actions.push(Action::MeasureAll { device: self.ordinal, on: all });
        }
        self.held.look(now, self.ground.memory().used());
        self.settle(facts);
        self.presume(&facts.open, now, actions);
        self.blocked = self.is_blocked(&facts.open);
        self.move_memory(facts, now, actions);
        self.unstick(now, actions);
        self.decide(now, actions);
        self.tell_long_wait(facts, now, actions);
        if around.slo_sensitive
            && let Attachment::Served(client) = self.attachment
        {
            let cycle = self.cycles.look(now, facts.launches, around.syncs, self.waiting > 0);
            if let Some(cycle) = cycle {
                actions.push(Action::Say(cycle.report(client)));
            }
        }
        let longest = if around.slo_sensitive { CYCLE_LOOK } else { LOOK };
        self.look_at = now.saturating_add(self.next_look(now, longest)).min(self.long_wait.next_look(now));
        self.look_at = self.look_at.min(self.parking.next_look(now));
        if self.waiting > 0 {
            actions.push(Action::Wake(self.ordinal));
        }
    }

    /// Settles launches completed without a measurement, launches presumed complete, and launches refused by the driver.
    fn settle(&mut self, facts: &Facts) {
        let (settled, refused) = (facts.settled, facts.refused);
        let gate = self.ground.gate();
        if settled > 0 {
            let charged = Duration::from_nanos(self.timeline.overlap.of(settled));
            self.credit.completed(gate, Duration::from_nanos(settled), charged);
        }
        if refused > 0 {
            self.credit.completed(gate, Duration::from_nanos(refused), Duration::ZERO);
        }
        if facts.presumed > 0 {
            let presumed = Duration::from_nanos(facts.presumed);
            self.credit.completed(gate, presumed, presumed);
        }
    }

    /// Whether the device can begin none of the work in flight.
    fn is_blocked(&self, open: &[OpenRun]) -> bool {
        let works = |run: &OpenRun| run.predicted > run.presumed && !run.waits;
        let waits = !self.timeline.is_empty() || open.iter().any(|run| run.waits);
        // Work of unknown cost may be long, and would run beside the next turns.
        let known = !self.timeline.has_unknown_cost(self.ground.costs());
        waits && known && self.timeline.all_wait() && !open.iter().any(works)
    }

    /// Presumes open launches complete after a while if their thread has gone elsewhere.
    fn presume(&mut self, open: &[OpenRun], now: u64, actions: &mut Actions) {
        self.still.resize(open.len(), Still { predicted: 0, since: now });
        self.prepaid = 0;
        for (run, (open, still)) in open.iter().zip(&mut self.still).enumerate() {
            self.prepaid += open.prepaid;
            let rest = open.predicted.saturating_sub(open.presumed);
            if open.predicted != still.predicted {
                *still = Still { predicted: open.predicted, since: now };
            } else if rest > 0 && now.saturating_sub(still.since) > STALE.max(2 * rest) {
                // The thread may launch meanwhile; the next look shows the outcome.
                actions.push(Action::PresumeDone { device: self.ordinal, run, predicted: open.predicted });
            }
        }
    }

    /// Lets one launch in beyond the bound if a thread waits for credit while the work in flight is overdue.
    ///
    /// The stream of that work may wait for another stream, into which the program has yet to launch. If the work fills the bound,
    /// the launch would otherwise wait for ever.
    fn unstick(&mut self, now: u64, actions: &mut Actions) {
        if self.timeline.is_empty() || self.waiting == 0 || !self.parking.is_resident() {
            return;
        }
        let unknown = self.timeline.has_unknown_cost(self.ground.costs());
        let in_flight = if unknown { UNKNOWN } else { self.in_flight() };
        let expected = self.timeline.began_at(now).max(self.timeline.moved).saturating_add(in_flight);
        if now > expected.max(self.let_in).saturating_add(OVERDUE)
            && self.credit.let_one_in(self.ground.gate())
        {
            self.let_in = now;
            actions.push(Action::Wake(self.ordinal));
        }
    }

    /// GPU time queued now, in ns.
    fn queued(&self, now: u64) -> u64 {
        self.queued_of(self.in_flight(), now)
    }

    fn queued_of(&self, in_flight: u64, now: u64) -> u64 {
        if self.blocked {
            return 0;
        }
        self.timeline.queued(self.ground.costs(), in_flight, now)
    }

    /// GPU time launched and not known to have completed, in ns.
    fn in_flight(&self) -> u64 {
        self.launched_of(self.credit.balance(self.ground.gate()).in_flight)
    }

    /// The part of the time in flight for launches already made, without credit prepaid for later launches, in ns.
    fn launched_of(&self, in_flight: Duration) -> u64 {
        in_flight.as_nanos().saturating_sub(self.prepaid)
    }

    /// The time for which the device needs no look, in ns; at most `longest` while a token is in use.
    fn next_look(&self, now: u64, longest: u64) -> u64 {
        let in_flight = self.in_flight();
        if self.is_unlimited() {
            let works = in_flight > 0 || now < self.launches.changed.saturating_add(RESTS);
            return if works { longest.max(REPORT / 2) } else { FREE_REPORT };
        }
        let waits = self.waiting > 0;
        let holds = self.credit.is_open();
        if self.blocked && !waits {
            let kept = self.launches.changed.saturating_add(BLOCKED).saturating_sub(now);
            return if holds { kept.max(SHORTEST_LOOK) } else { LOOK };
        }
        let end = match (&self.attachment, self.turn) {
            (Attachment::Local(clock), _) => clock.window_end,
            (_, Turn::Holding { until, .. }) => until,
            _ => 0,
        };
        let until_end = end.saturating_sub(now).max(SHORTEST_LOOK);
        let queued = self.queued(now);
        let credit = self.ground.gate().left().as_nanos();
        if holds && !waits && queued < UNKNOWN && credit > REMAINDER {
            // Launches use the remaining credit without a look, and a thread without credit asks for one.
            return credit.clamp(CYCLE_LOOK, longest).min(until_end);
        }
        if !self.timeline.is_empty() || matches!(self.turn, Turn::Draining { .. }) {
            // The next look comes about when the oldest piece should be done, soon enough to keep the device busy.
            return queued.saturating_sub(REMAINDER).clamp(SHORTEST_LOOK, CYCLE_LOOK);
        }
        if holds {
            return if in_flight > 0 || waits { CYCLE_LOOK } else { LOOK }.min(until_end);
        }
        match self.attachment {
            // The next window of the local clock.
            Attachment::Local(_) if waits => end.saturating_sub(now).clamp(SHORTEST_LOOK, 10_000_000),
            _ if in_flight > 0 => 1_000_000,
            _ => u64::MAX,
        }
    }

    /// Reports to the daemon, and lets launches in.
    pub(super) fn decide(&mut self, now: u64, actions: &mut Actions) {
        let unlimited = self.is_unlimited();
        if self.credit.is_unlimited() && !unlimited {
            self.stop_launches();
        }
        let may_launch = match self.attachment {
            Attachment::Served(_) => unlimited || matches!(self.turn, Turn::Holding { .. }),
            Attachment::Local(_) => true,
            Attachment::Asking | Attachment::Refused { .. } => false,
        };
        assert!(
            may_launch || !self.credit.is_open(),
            "launches are let in that nobody allows: {:?}",
            self.turn
        );
        match self.attachment {
            Attachment::Asking | Attachment::Refused { .. } => {}
            _ if unlimited => self.decide_freely(now, actions),
            Attachment::Served(client) if !self.parking.is_resident() => {
                if let Turn::Draining { by, overtime } = self.turn {
                    self.decide_draining(client, (by, overtime), now, actions);
                }
                self.say_change(client, REPORT, now, actions);
            }
            Attachment::Local(_) if !self.parking.is_resident() => {}
            Attachment::Served(client) => self.decide_served(client, now, actions),
            Attachment::Local(_) => self.decide_locally(now),
        }
    }

    /// Whether no limit of time holds on the device, and its memory is there: for an observed process, for the only one on a device with the whole of it as its
    /// request, and without a daemon for a process without a limit of its own.
    pub(super) fn is_unlimited(&self) -> bool {
        if !self.parking.is_resident() {
            return false;
        }
        let (quota, sm) = (self.spec.quota(), self.spec.sm());
        match self.attachment {
            Attachment::Served(_) => {
                self.spec.is_observed() || (quota.request() == Quota::WHOLE && sm == SmShare::WHOLE)
            }
            Attachment::Local(_) => quota.limit() == Quota::WHOLE,
            Attachment::Asking | Attachment::Refused { .. } => false,
        }
    }

    /// Lets all launches in. They are measured and reported all the same.
    pub(super) fn decide_freely(&mut self, now: u64, actions: &mut Actions) {
        let client = self.client();
        match (client, self.turn) {
            // The rest of a token or a request, from the time under a limit.
            (Some(client), Turn::Holding { .. } | Turn::Draining { .. }) => {
                self.give_back(client, false, now, actions);
            }
            (Some(client), Turn::Wanting) => self.ask(client, Turn::Idle, now, actions),
            _ => {}
        }
        if !self.credit.is_unlimited() {
            self.timeline.turn_began = now;
            self.credit.allow_all(self.ground.gate());
            actions.push(Action::Wake(self.ordinal));
        }
        if let Some(client) = client {
            self.say_change(client, FREE_REPORT, now, actions);
        }
    }

    /// Reports to the daemon if anything has changed, at most once in so many ns.
    fn say_change(&mut self, client: ClientId, every: u64, now: u64, actions: &mut Actions) {
        if now >= self.said.0 + every && self.stated() != self.said.1 {
            self.say_use(client, now, actions);
        }
    }

    fn stated(&mut self) -> Stated {
        (self.used(), self.launches.count, self.held.bytes)
    }

    fn decide_served(&mut self, client: ClientId, now: u64, actions: &mut Actions) {
        match self.turn {
            Turn::Idle if self.waiting > 0 => self.ask(client, Turn::Wanting, now, actions),
            Turn::Idle | Turn::Wanting => {}
            Turn::Holding { until, extends } => self.decide_holding(client, (until, extends), now, actions),
            Turn::Draining { by, overtime } => self.decide_draining(client, (by, overtime), now, actions),
        }
        self.say_change(client, REPORT, now, actions);
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
        // Threads go on spending meanwhile, so both come from one balance: spent cost must also appear as queued.
        let Balance { in_flight, unspent } = self.credit.balance(self.ground.gate());
        let spent = unspent.is_zero() && self.queued_of(self.launched_of(in_flight), now) <= REMAINDER;
        // Nothing more can be launched, and nothing that was launched can begin.
        let stuck = self.blocked && self.ground.gate().left().is_zero();
        if left == 0 || !wants || spent || stuck {
            let (by, overtime) = self.drain(until, now);
            return self.decide_draining(client, (by, overtime), now, actions);
        }
        let bound = self.bound.as_nanos();
        if !extends && (unspent.as_nanos() <= bound || left <= bound) {
            self.ask(client, Turn::Holding { until, extends: true }, now, actions);
        }
    }

    /// Stops the launches of a turn, and keeps its token for the queued work.
    pub(super) fn drain(&mut self, until: u64, now: u64) -> (u64, u64) {
        self.credit.stop(self.ground.gate());
        // Until `by`, the device works for this process. A client let in earlier would wait behind this work and measure it as its own.
        let by = now + self.queued(now) + DRAIN;
        let overtime = by.max(until.saturating_add(OVERTIME));
        self.turn = Turn::Draining { by, overtime };
        (by, overtime)
    }

    fn decide_draining(
        &mut self,
        client: ClientId,
        (by, overtime): (u64, u64),
        now: u64,
        actions: &mut Actions,
    ) {
        let over = self.timeline.is_empty() || self.blocked || !self.timeline.turns.ends_first();
        let drained = self.queued(now) <= REMAINDER && over;
        let late = now >= if self.timeline.is_empty() { by } else { overtime };
        if drained || late {
            self.timeline.turns.hand_over(now);
            self.give_back(client, self.wants_more(now), now, actions);
        }
    }

    fn give_back(&mut self, client: ClientId, again: bool, now: u64, actions: &mut Actions) {
        self.end_turn(client, again, now, actions);
        self.credit.give_back(self.ground.gate());
    }

    /// Ends the turn: reports the use, and asks for another turn if `again`.
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

    /// Bounds the work in flight: all queued work must end before the token does. Returns the time until then, in ns.
    fn bound_in_flight(&mut self, until: u64, now: u64) -> u64 {
        let left = until.saturating_sub(now);
        let bound = self.bound.min(Duration::from_nanos(left));
        // Prepaid time is in flight for the gate, but not on the device.
        let bound = bound.saturating_add(Duration::from_nanos(self.prepaid));
        self.credit.set_bound(self.ground.gate(), bound);
        left
    }

    /// Whether the program will probably launch more: threads wait for credit or for work in flight, or did so a moment ago.
    fn wants_more(&self, now: u64) -> bool {
        let since_launch = now.saturating_sub(self.launches.changed);
        let goes_on = if self.blocked {
            since_launch < BLOCKED
        } else {
            let since_work = now.saturating_sub(self.timeline.worked_until);
            self.in_flight() > 0 || since_launch < IDLE || since_work < DONE
        };
        !self.leaving && (self.waiting > 0 || goes_on)
    }

    /// Whether a request for time awaits the daemon's answer.
    pub(crate) fn awaits_time(&self) -> bool {
        matches!(self.turn, Turn::Wanting | Turn::Holding { extends: true, .. })
    }

    /// Whether all launches of a process about to end have been measured.
    pub(crate) fn is_settled(&self) -> bool {
        let over = self.timeline.is_empty() && self.in_flight() == 0;
        !matches!(self.attachment, Attachment::Served(_))
            || (matches!(self.turn, Turn::Idle | Turn::Wanting) && over)
    }

    /// Ends the device's account: running work is charged up to now, work behind a wait as predicted, and the daemon hears the last
    /// total.
    pub(crate) fn leave(&mut self, now: u64, actions: &mut Actions) {
        let Attachment::Served(client) = self.attachment else { return };
        while let Some((id, waits)) = self.timeline.oldest() {
            self.charged = self.charged.max(Some(id));
            if waits {
                self.measurement_lost(id, now);
            } else {
                let began = self.timeline.began_at(now);
                self.completed(id, (began, now), false, now, actions);
            }
        }
        if matches!(self.turn, Turn::Holding { .. } | Turn::Draining { .. }) {
            return self.give_back(client, false, now, actions);
        }
        self.turn = Turn::Idle;
        self.say_use(client, now, actions);
    }

    /// Whether the process's last report has charged this measurement.
    pub(crate) fn has_charged(&self, id: crate::SegmentId) -> bool {
        Some(id) <= self.charged
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
        self.held.look(now, self.held.bytes);
        let stated = self.stated();
        self.said = (now, stated);
        let (used, launches, memory) = (stated.0, stated.1, Bytes(stated.2));
        let (turn, waited, byte_seconds) = (self.turns_over, self.waited, self.held.byte_seconds());
        let report = ToDaemon::Use { client, turn, used, state, launches, waited, memory, byte_seconds };
        actions.push(Action::Say(report));
    }
}
