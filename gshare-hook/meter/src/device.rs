//! One device of the process: where its credit comes from, and the lease that it holds.

use gshare_core::gate::{LaunchGate, LeaseLedger, LocalShare, Settlement};
use gshare_core::trace::Why;
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToDaemon};
use gshare_core::{Bytes, ClientId, DeviceUuid, Duration, LeaseId, Quota, ResourceSpec, SmShare, Timestamp};

use crate::allowance::MemoryAccount;
use crate::cost::CostTable;
use crate::cycle::Cycles;
use crate::link::Outage;
use crate::memory::Questions;
use crate::segment::{Segment, SegmentId};
use crate::timeline::{Timeline, UNKNOWN};
use crate::{Action, Actions, Facts, OpenRun, Ordinal, Ticket, explain};

/// Bound of the GPU time in flight before the daemon has named one.
const IN_FLIGHT: Duration = Duration::from_millis(4);
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
/// How long work in flight may be overdue before one more launch is let in, and then the next, in ns. As long as a window: a
/// program that uses this to queue more than it should gains one launch per window.
const OVERDUE: u64 = 100_000_000;
/// Interval between two looks at a lease that is used, in ns: each look takes a CPU from the program where all are busy. The
/// shorter one holds where threads wait, and where launching cycles are told apart.
const LOOK: u64 = 1_000_000;
const CYCLE_LOOK: u64 = 300_000;
/// The shortest interval between two looks at work that is about to be over, in ns.
const SHORTEST_LOOK: u64 = 50_000;
/// Interval between two reports of usage, in ns.
const REPORT: u64 = 10_000_000;
/// How long a run may stand still before its launches are presumed complete, in ns.
const STALE: u64 = 3_000_000;
/// How long launches, and allocations under a shared limit, wait without a daemon that serves them before they fail, in ns.
pub(crate) const CLOSED_WAIT: u64 = 5_000_000_000;
/// Window of the local clock before the daemon has named one.
const LOCAL_WINDOW: Duration = Duration::from_millis(100);

/// State that the meter shares with the launching threads: all of it is atomic, and read while the meter decides.
pub trait Ground {
    /// The credit of the device.
    fn gate(&self) -> &LaunchGate;
    /// The predicted costs of functions on the device.
    fn costs(&self) -> &CostTable;
    /// The memory that the process may have there.
    fn memory(&self) -> &MemoryAccount;
}

impl<T: Ground + ?Sized> Ground for &T {
    fn gate(&self) -> &LaunchGate {
        T::gate(self)
    }
    fn costs(&self) -> &CostTable {
        T::costs(self)
    }
    fn memory(&self) -> &MemoryAccount {
        T::memory(self)
    }
}

impl<T: Ground + ?Sized> Ground for std::sync::Arc<T> {
    fn gate(&self) -> &LaunchGate {
        T::gate(self)
    }
    fn costs(&self) -> &CostTable {
        T::costs(self)
    }
    fn memory(&self) -> &MemoryAccount {
        T::memory(self)
    }
}

/// The party that lets launches in.
#[derive(Debug)]
pub(crate) enum Attachment {
    /// Nobody yet: no daemon has answered, and none has been given up.
    Asking,
    /// The daemon, under this name.
    Served(ClientId),
    /// Nobody: the daemon refuses the process or the device. Launches that wait for another answer fail at `fails_at` (ns).
    Refused { fails_at: u64 },
    /// The process itself, by its own clock.
    Local(LocalClock),
}

/// A share that the process keeps by itself.
#[derive(Debug)]
pub(crate) struct LocalClock {
    share: LocalShare,
    next_lease: u64,
    /// When the next window begins, in ns.
    window_end: u64,
}

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

/// Switches that the launching threads obey now.
#[derive(Clone, Copy, Debug, Default)]
struct Switches {
    free_running: bool,
    shut: bool,
    measures_all: bool,
}

/// Launches so far, and when one was last asked for or waited for, in ns.
#[derive(Clone, Copy, Debug, Default)]
struct Changing {
    count: u64,
    changed: u64,
}

/// The open launches of one run when they last changed, and when that was, in ns.
#[derive(Clone, Copy, Debug, Default)]
struct Still {
    predicted: u64,
    since: u64,
}

/// One device of the process.
#[derive(Debug)]
pub(crate) struct Device<G> {
    pub(crate) ordinal: Ordinal,
    uuid: DeviceUuid,
    pub(crate) ground: G,
    pub(crate) attachment: Attachment,
    /// An Attach was sent on this connection and has not been answered.
    pub(crate) asked: bool,
    /// The daemon has refused this device: it is not attached again on this connection.
    pub(crate) unserved: Option<RefusalCode>,
    /// The thread that found the device waits for its attachment.
    pub(crate) attach_ticket: Option<Ticket>,
    pub(crate) spec: ResourceSpec,
    pub(crate) window: Duration,
    pub(crate) bound: Duration,
    pub(crate) ledger: LeaseLedger,
    pub(crate) tenure: Tenure,
    /// The last lease of this daemon's that was closed.
    last_closed: Option<LeaseId>,
    pub(crate) line: Timeline,
    cycles: Cycles,
    switches: Switches,
    launches: Changing,
    /// Threads that wait for credit, and how long threads have waited in all.
    pub(crate) waiting: u64,
    waited: Duration,
    /// Credit that threads hold for launches to come, in ns.
    prepaid: u64,
    still: Vec<Still>,
    /// GPU time that was last reported, and when, in ns.
    reported: (u64, Duration),
    /// When a launch was last let in because nothing completed, in ns.
    let_in: u64,
    /// When a token was last requested, and until when the daemon gives none, in ns.
    pub(crate) requested_at: u64,
    pub(crate) throttled_until: u64,
    pub(crate) questions: Questions,
    /// The process is about to end: nothing more is launched.
    pub(crate) leaving: bool,
    /// When the host is to look again, in ns.
    pub(crate) look_at: u64,
}

impl<G: Ground> Device<G> {
    pub(crate) fn new(ordinal: Ordinal, uuid: DeviceUuid, ground: G, spec: ResourceSpec) -> Self {
        Self {
            ordinal,
            uuid,
            ground,
            attachment: Attachment::Asking,
            asked: false,
            unserved: None,
            attach_ticket: None,
            spec,
            window: LOCAL_WINDOW,
            bound: IN_FLIGHT,
            ledger: LeaseLedger::new(IN_FLIGHT),
            tenure: Tenure::Idle,
            last_closed: None,
            line: Timeline::new(),
            cycles: Cycles::default(),
            switches: Switches::default(),
            launches: Changing::default(),
            waiting: 0,
            waited: Duration::ZERO,
            prepaid: 0,
            still: Vec::new(),
            reported: (0, Duration::ZERO),
            let_in: 0,
            requested_at: 0,
            throttled_until: 0,
            questions: Questions::default(),
            leaving: false,
            look_at: 0,
        }
    }

    pub(crate) fn client(&self) -> Option<ClientId> {
        if let Attachment::Served(client) = self.attachment { Some(client) } else { None }
    }

    // ---- attachment ---------------------------------------------------------------------------------------------------

    /// The frame that asks the daemon to serve the device.
    pub(crate) fn attach(&mut self) -> ToDaemon {
        let memory = self.ground.memory();
        let allocated = memory.restate();
        self.questions.stated = allocated;
        self.asked = true;
        ToDaemon::Attach {
            ordinal: self.ordinal.0,
            device: self.uuid,
            device_memory: Bytes(memory.total()),
            allocated: Bytes(allocated),
            part: memory.part(),
        }
    }

    /// The daemon serves the device: launches may go on.
    pub(crate) fn served(
        &mut self,
        client: ClientId,
        window: Duration,
        in_flight: Duration,
        actions: &mut Actions,
    ) {
        self.attachment = Attachment::Served(client);
        (self.asked, self.unserved) = (false, None);
        self.window = window;
        self.bound = if in_flight.is_zero() { IN_FLIGHT } else { in_flight };
        // A lease of the local clock ends here.
        self.ledger.close(self.ground.gate());
        self.tenure = Tenure::Idle;
        self.set_shut(false, actions);
        actions.push(Action::Wake(self.ordinal));
    }

    /// The process keeps a share by its own clock from now on.
    pub(crate) fn go_local(&mut self, spec: ResourceSpec, now: u64, actions: &mut Actions) {
        if matches!(self.attachment, Attachment::Local(_)) && self.spec == spec {
            // A new clock would begin with a whole window's budget.
            return self.answer_attach(false, actions);
        }
        self.end_lease();
        let limit = spec.quota().limit();
        let share = LocalShare::new(Timestamp::from_nanos(now), limit, self.window);
        self.adopt(spec, actions);
        self.attachment = Attachment::Local(LocalClock { share, next_lease: 1, window_end: 0 });
        // A process that never had a daemon has only the environment's word: no time limit means none.
        self.set_free_running(limit == Quota::WHOLE, actions);
        self.set_shut(false, actions);
        actions.push(Action::Wake(self.ordinal));
        self.answer_attach(false, actions);
    }

    /// No launch is let in, and those that wait fail from `fails_at` on, unless the daemon thinks better of it.
    pub(crate) fn refuse(&mut self, fails_at: u64, actions: &mut Actions) {
        self.end_lease();
        let before = if let Attachment::Refused { fails_at } = self.attachment { fails_at } else { u64::MAX };
        self.attachment = Attachment::Refused { fails_at: fails_at.min(before) };
        self.set_free_running(false, actions);
        self.answer_attach(false, actions);
    }

    /// The connection is gone: what was requested will not be granted.
    pub(crate) fn lost(&mut self) {
        (self.asked, self.last_closed) = (false, None);
        if matches!(self.attachment, Attachment::Served(_)) {
            self.end_lease();
            self.attachment = Attachment::Asking;
        }
    }

    /// The daemon refuses the process: nobody lets launches in until it is decided what becomes of it. `runs`: as under this
    /// spec before.
    pub(crate) fn turn_away(&mut self, runs: Option<ResourceSpec>) {
        self.asked = false;
        let goes_on = matches!(self.attachment, Attachment::Local(_)) && runs == Some(self.spec);
        if !goes_on {
            self.end_lease();
            self.attachment = Attachment::Asking;
        }
    }

    /// The process runs unserved, within limits that no other process shares: all of the memory limit is its part.
    pub(crate) fn own_memory(&self, spec: ResourceSpec) {
        if let Some(limit) = spec.memory() {
            self.ground.memory().set_part(limit);
        }
    }

    /// When questions are answered that wait for a daemon's word on the memory that the process may have; `None`: none wait.
    pub(crate) fn memory_fails_at(&self, outage: Option<Outage>) -> Option<u64> {
        let waits = !self.asked && !self.questions.deferred.is_empty() && self.ground.memory().awaits_part();
        waits.then(|| match self.attachment {
            Attachment::Refused { fails_at } => fails_at,
            _ => outage.map_or(0, |outage| outage.since + CLOSED_WAIT),
        })
    }

    fn end_lease(&mut self) {
        self.line.turn_began = u64::MAX;
        self.ledger.close(self.ground.gate());
        self.tenure = Tenure::Idle;
    }

    pub(crate) fn answer_attach(&mut self, granted: bool, actions: &mut Actions) {
        if let Some(ticket) = self.attach_ticket.take() {
            actions.push(Action::Answer { ticket, granted });
        }
    }

    /// Without a daemon launches wait, under the last spec known.
    pub(crate) fn wait_closed(&mut self, actions: &mut Actions) {
        self.adopt(self.spec, actions);
        self.set_free_running(false, actions);
        self.answer_attach(false, actions);
    }

    /// Launches fail.
    pub(crate) fn fail_launches(&mut self, actions: &mut Actions) {
        if !self.switches.shut {
            self.set_shut(true, actions);
            actions.push(Action::Wake(self.ordinal));
        }
        self.answer_attach(false, actions);
    }

    /// Takes a spec: from the daemon, or the last one known. Gives the granted memory that is to be returned; `None` if what
    /// is in use must be stated again, since the daemon was not told of it while there was no limit.
    pub(crate) fn adopt(&mut self, spec: ResourceSpec, actions: &mut Actions) -> Option<Bytes> {
        let whole = spec.quota().request() == Quota::WHOLE && spec.sm() == SmShare::WHOLE;
        self.set_free_running(whole, actions);
        self.spec = spec;
        self.questions.adopt(self.ground.memory(), spec.memory(), self.attach_ticket.is_some())
    }

    fn set_free_running(&mut self, on: bool, actions: &mut Actions) {
        if core::mem::replace(&mut self.switches.free_running, on) != on {
            actions.push(Action::FreeRunning { device: self.ordinal, on });
        }
    }

    fn set_shut(&mut self, on: bool, actions: &mut Actions) {
        if core::mem::replace(&mut self.switches.shut, on) != on {
            actions.push(Action::Shut { device: self.ordinal, on });
        }
    }

    // ---- leases -------------------------------------------------------------------------------------------------------

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
            self.say_return(client, settlement, false, now, actions);
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
    fn decide(&mut self, now: u64, actions: &mut Actions) {
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
                    self.say(ToDaemon::TokenRequest { client }, now, actions);
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
            self.say(ToDaemon::TokenRequest { client }, now, actions);
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
        self.say_return(client, settlement, wants, now, actions);
    }

    fn decide_owing(&mut self, client: ClientId, now: u64, actions: &mut Actions) {
        let Tenure::Owing { settlement, mut requested } = self.tenure else { return };
        let settlement = self.ledger.revise(settlement);
        if self.line.is_empty() && self.in_flight() == 0 {
            self.tenure = if requested { Tenure::Requested } else { Tenure::Idle };
            return self.say_return(client, settlement, false, now, actions);
        }
        if now >= self.reported.0 + REPORT {
            self.report(client, settlement.lease, settlement.used, now, actions);
        }
        if !requested && self.waiting > 0 {
            requested = true;
            self.say(ToDaemon::TokenRequest { client }, now, actions);
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
    fn bound_in_flight(&mut self, expires: u64, now: u64) -> u64 {
        let left = expires.saturating_sub(now);
        let bound = self.bound.min(Duration::from_nanos(left));
        // Prepaid time is in flight for the ledger, but not on the device.
        self.ledger.set_in_flight_bound(bound.saturating_add(Duration::from_nanos(self.prepaid)));
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
            self.say_return(client, settlement, false, now, actions);
        }
    }

    fn say(&mut self, message: ToDaemon, now: u64, actions: &mut Actions) {
        if matches!(message, ToDaemon::TokenRequest { .. } | ToDaemon::TokenReturn { .. }) {
            self.requested_at = now;
        }
        if let Some(event) = explain::said(&message) {
            actions.push(Action::Note { device: Some(self.ordinal), event });
        }
        actions.push(Action::Say(message));
    }

    fn say_return(
        &mut self,
        client: ClientId,
        settlement: Settlement,
        again: bool,
        now: u64,
        actions: &mut Actions,
    ) {
        let Settlement { lease, used } = settlement;
        self.say(ToDaemon::TokenReturn { client, lease, used, again: again.into() }, now, actions);
    }

    fn report(&mut self, client: ClientId, lease: LeaseId, used: Duration, now: u64, actions: &mut Actions) {
        if used != self.reported.1 {
            let (launches, waited) = (self.launches.count, self.waited);
            self.say(ToDaemon::Usage { client, lease, used, launches, waited }, now, actions);
        }
        self.reported = (now, used);
    }

    // ---- measurements -------------------------------------------------------------------------------------------------

    /// A segment ran, from `start` to `end` (ns).
    pub(crate) fn completed(
        &mut self,
        id: SegmentId,
        interval: (u64, u64),
        crowded: bool,
        now: u64,
        actions: &mut Actions,
    ) -> Option<()> {
        let segment = self.line.take(id)?;
        let whole = self.line.measure(self.ground.costs(), &segment, interval, crowded);
        // Time that was presumed complete is charged already.
        let measured = whole.saturating_sub(segment.presumed) + segment.carried;
        self.charge(&segment, measured, now);
        if segment.row.is_some() {
            actions.push(Action::Wake(self.ordinal));
        }
        Some(())
    }

    /// A segment will not be measured: it is charged as predicted.
    pub(crate) fn measurement_lost(&mut self, id: SegmentId, now: u64) -> Option<()> {
        let segment = self.line.take(id)?;
        if let Some(row) = segment.row {
            self.ground.costs().not_measured(row);
        }
        self.charge(&segment, segment.predicted + segment.carried, now);
        Some(())
    }

    fn charge(&mut self, segment: &Segment, measured: u64, now: u64) {
        let charged = Duration::from_nanos(segment.predicted + segment.carried);
        self.ledger.completed(self.ground.gate(), charged, Duration::from_nanos(measured));
        self.line.moved = now;
    }

    /// Takes what the host has seen of the device, and decides. `waiters`: threads that wait for the device.
    pub(crate) fn looked(&mut self, now: u64, facts: &Facts, around: Around, actions: &mut Actions) {
        // A launch is counted when it asks for credit, and may be let in a window later.
        if facts.launches != self.launches.count || facts.waiting.max(self.waiting) > 0 {
            self.launches = Changing { count: facts.launches, changed: now };
        }
        (self.waiting, self.waited) = (facts.waiting, facts.waited);
        let all = self.line.overlap.look(now, around.waiters);
        if core::mem::replace(&mut self.switches.measures_all, all) != all {
            actions.push(Action::MeasureAll { device: self.ordinal, on: all });
        }
        if self.waiting > 0 {
            let why = self.why(&around, now);
            actions.push(Action::Explain { device: self.ordinal, why });
        }
        self.settle(facts);
        self.presume(&facts.open, now, actions);
        self.unstick(now, actions);
        self.decide(now, actions);
        if around.slo_sensitive
            && let Attachment::Served(client) = self.attachment
        {
            let cycle = self.cycles.look(now, facts.launches, around.syncs, self.waiting > 0);
            if let Some(cycle) = cycle {
                self.say(cycle.report(client), now, actions);
            }
        }
        let longest = if around.slo_sensitive { CYCLE_LOOK } else { LOOK };
        self.look_at = now.saturating_add(self.next_look(now, longest));
        if self.waiting > 0 {
            actions.push(Action::Wake(self.ordinal));
        }
    }

    /// Launches that are over without having been measured, and launches that the driver refused.
    fn settle(&mut self, facts: &Facts) {
        let (settled, refused) = (facts.settled, facts.refused);
        let gate = self.ground.gate();
        if settled > 0 {
            let charged = Duration::from_nanos(self.line.overlap.of(settled));
            self.ledger.completed(gate, Duration::from_nanos(settled), charged);
        }
        if refused > 0 {
            self.ledger.completed(gate, Duration::from_nanos(refused), Duration::ZERO);
        }
    }

    /// Launches whose thread has gone elsewhere with its segment open are presumed complete after a while.
    fn presume(&mut self, open: &[OpenRun], now: u64, actions: &mut Actions) {
        self.still.resize(open.len(), Still { predicted: 0, since: now });
        self.prepaid = 0;
        for (run, (open, still)) in open.iter().zip(&mut self.still).enumerate() {
            self.prepaid += open.prepaid;
            let rest = open.predicted.saturating_sub(open.presumed);
            if open.predicted != still.predicted {
                *still = Still { predicted: open.predicted, since: now };
            } else if rest > 0 && now.saturating_sub(still.since) > STALE.max(2 * rest) {
                actions.push(Action::PresumeDone { device: self.ordinal, run, predicted: open.predicted });
                let rest = Duration::from_nanos(rest);
                self.ledger.completed(self.ground.gate(), rest, rest);
            }
        }
    }

    /// Lets one launch in when a thread waits for credit and what is in flight is overdue: it may wait for that launch.
    fn unstick(&mut self, now: u64, actions: &mut Actions) {
        if self.line.is_empty() || self.waiting == 0 {
            return;
        }
        let unknown = self.line.has_unknown_cost(self.ground.costs());
        let in_flight = if unknown { UNKNOWN } else { self.in_flight() };
        let expected = self.line.began_at(now).max(self.line.moved).saturating_add(in_flight);
        if now > expected.max(self.let_in).saturating_add(OVERDUE)
            && self.ledger.let_one_in(self.ground.gate())
        {
            self.let_in = now;
            actions.push(Action::Wake(self.ordinal));
        }
    }

    /// GPU time that is queued now, in ns.
    fn queued(&self, now: u64) -> u64 {
        self.queued_of(self.in_flight(), now)
    }

    fn queued_of(&self, in_flight: u64, now: u64) -> u64 {
        self.line.queued(self.ground.costs(), in_flight, now)
    }

    /// GPU time launched and not known to have completed, in ns.
    fn in_flight(&self) -> u64 {
        self.launched_of(self.ledger.in_flight(self.ground.gate()))
    }

    /// The part of the ledger's time in flight that was launched, and not prepaid for launches to come, in ns.
    fn launched_of(&self, in_flight: Duration) -> u64 {
        in_flight.as_nanos().saturating_sub(self.prepaid)
    }

    /// How long the device needs no look, in ns; at most `longest` while a lease is used.
    fn next_look(&self, now: u64, longest: u64) -> u64 {
        if self.switches.free_running {
            return u64::MAX;
        }
        let in_flight = self.in_flight();
        let waits = self.waiting > 0;
        let holds = self.ledger.lease().is_some();
        let end = match (&self.attachment, self.tenure) {
            (Attachment::Local(clock), _) => clock.window_end,
            (_, Tenure::Open { expires, .. }) => expires,
            _ => 0,
        };
        let until_end = end.saturating_sub(now).max(SHORTEST_LOOK);
        let queued = self.queued(now);
        let credit = u64::try_from(self.ground.gate().left_ns()).unwrap_or(0);
        if holds && !waits && queued < UNKNOWN && credit > REMAINDER {
            // Launches go on for so long without a look, and a thread that finds nothing left asks for one.
            return credit.clamp(CYCLE_LOOK, longest).min(until_end);
        }
        let closed = matches!(self.tenure, Tenure::Draining { .. } | Tenure::Owing { .. });
        if !self.line.is_empty() || closed {
            // Look again about when the oldest piece should be done, soon enough to keep the device busy.
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

    // ---- explanation --------------------------------------------------------------------------------------------------

    /// The reason for which a launch that finds no credit now waits.
    fn why(&self, around: &Around, now: u64) -> Why {
        let limit = self.spec.quota().limit();
        let unspent = self.ledger.unspent(self.ground.gate());
        let in_flight = Why::InFlight { bound_ns: self.bound.as_nanos() };
        let holds = self.ledger.lease().is_some() && !unspent.is_zero();
        match &self.attachment {
            Attachment::Asking if self.asked => Why::Attaching {},
            Attachment::Asking if around.on_loss == OnDaemonLoss::Closed => {
                Why::Closed { left_ns: (around.outage_since + CLOSED_WAIT).saturating_sub(now) }
            }
            Attachment::Asking => Why::NoDaemon { retry_ns: around.retry_at.saturating_sub(now) },
            Attachment::Refused { fails_at } => Why::Refused { left_ns: fails_at.saturating_sub(now) },
            Attachment::Local(_) if holds => in_flight,
            Attachment::Local(clock) => {
                Why::LocalWindow { limit, left_ns: clock.window_end.saturating_sub(now) }
            }
            Attachment::Served(_) => match self.tenure {
                Tenure::Draining { .. } => Why::Draining { queued_ns: self.queued(now) },
                _ if holds => in_flight,
                _ if self.throttled_until > now => {
                    Why::Throttled { limit, left_ns: self.throttled_until - now }
                }
                _ => Why::Token { asked_ns: now.saturating_sub(self.requested_at) },
            },
        }
    }
}

/// The state of the process beside the device that is looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around {
    /// Threads that wait for a device.
    pub(crate) waiters: usize,
    /// Calls that wait for a device, so far.
    pub(crate) syncs: u64,
    pub(crate) slo_sensitive: bool,
    pub(crate) on_loss: OnDaemonLoss,
    /// Since when there has been no daemon, and when the next attempt to connect is made, in ns.
    pub(crate) outage_since: u64,
    pub(crate) retry_at: u64,
}
