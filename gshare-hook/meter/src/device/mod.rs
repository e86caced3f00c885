//! One device of the process: its token, and its permission for launches.

mod attachment;
mod local_share;
mod long_wait;
mod turn;

use gshare_core::gate::{Credit, LaunchGate};
use gshare_core::wire::RefusalCode;
use gshare_core::{ClientId, DeviceUuid, Duration, ResourceSpec};

use crate::allowance::MemoryAccount;
use crate::cost::CostTable;
use crate::cycle::Cycles;
use crate::memory_questions::Questions;
use crate::segment::{Segment, SegmentId};
use crate::timeline::{Timeline, UNKNOWN};
use crate::{Action, Actions, Facts, OpenRun, Ordinal, Ticket};

pub(crate) use attachment::Attachment;
use attachment::{IN_FLIGHT, LOCAL_WINDOW};
use long_wait::LongWait;
pub(crate) use turn::REMAINDER;
use turn::Turn;

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

/// State shared between the meter and the launching threads. All of it is atomic, and changes while the meter decides.
pub trait Ground {
    /// The credit of the device.
    fn gate(&self) -> &LaunchGate;
    /// The predicted costs of functions on the device.
    fn costs(&self) -> &CostTable;
    /// The process's memory there.
    fn memory(&self) -> &MemoryAccount;
}

/// Lets pointers such as `&T` and `Arc<T>` serve as ground.
impl<P: core::ops::Deref<Target: Ground>> Ground for P {
    fn gate(&self) -> &LaunchGate {
        self.deref().gate()
    }
    fn costs(&self) -> &CostTable {
        self.deref().costs()
    }
    fn memory(&self) -> &MemoryAccount {
        self.deref().memory()
    }
}

/// Switches in force for the launching threads.
#[derive(Clone, Copy, Debug, Default)]
struct Switches {
    free_running: bool,
    shut: bool,
    measures_all: bool,
}

/// Launches so far, and the time of the last request or wait for credit, in ns.
#[derive(Clone, Copy, Debug, Default)]
struct Changing {
    count: u64,
    changed: u64,
}

/// The open launches of one run at their last change, and its time, in ns.
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
    /// Whether an Attach was sent on this connection and has not been answered.
    pub(crate) asked: bool,
    /// The daemon's refusal of this device, which is then not attached again on this connection.
    pub(crate) unserved: Option<RefusalCode>,
    /// The question of the thread that found the device and waits for its attachment.
    pub(crate) attach_ticket: Option<Ticket>,
    pub(crate) spec: ResourceSpec,
    pub(crate) window: Duration,
    pub(crate) bound: Duration,
    credit: Credit,
    turn: Turn,
    /// Finished turns since the daemon took the device.
    turns_over: u32,
    /// Total use stated to the daemon in the last Attach.
    used_stated: Duration,
    pub(crate) line: Timeline,
    cycles: Cycles,
    switches: Switches,
    launches: Changing,
    /// Threads now waiting for credit, and the total time of all waits.
    pub(crate) waiting: u64,
    waited: Duration,
    /// Credit held by threads for later launches, in ns.
    prepaid: u64,
    still: Vec<Still>,
    /// The time of the last report to the daemon, in ns, and the total use stated in it.
    said: (u64, Duration),
    /// The last time a launch was let in because nothing completed, in ns.
    let_in: u64,
    /// The time until which the daemon gives no token, in ns.
    pub(crate) throttled_until: u64,
    long_wait: LongWait,
    pub(crate) questions: Questions,
    /// Whether the process is about to end, so that nothing more is launched.
    pub(crate) leaving: bool,
    /// The time of the host's next look, in ns.
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
            credit: Credit::new(IN_FLIGHT),
            turn: Turn::Idle,
            turns_over: 0,
            used_stated: Duration::ZERO,
            line: Timeline::new(),
            cycles: Cycles::default(),
            switches: Switches::default(),
            launches: Changing::default(),
            waiting: 0,
            waited: Duration::ZERO,
            prepaid: 0,
            still: Vec::new(),
            said: (0, Duration::ZERO),
            let_in: 0,
            throttled_until: 0,
            long_wait: LongWait::default(),
            questions: Questions::default(),
            leaving: false,
            look_at: 0,
        }
    }

    pub(crate) fn client(&self) -> Option<ClientId> {
        if let Attachment::Served(client) = self.attachment { Some(client) } else { None }
    }

    /// Charges a completed segment, which ran from `start` to `end` (ns).
    pub(crate) fn completed(
        &mut self,
        id: SegmentId,
        interval: (u64, u64),
        crowded: bool,
        now: u64,
        actions: &mut Actions,
    ) {
        let segment = self.line.take(id);
        let whole = self.line.measure(self.ground.costs(), &segment, interval, crowded);
        // Time presumed complete is charged already.
        let measured = whole.saturating_sub(segment.presumed) + segment.carried;
        self.charge(&segment, measured, now);
        if segment.row.is_some() {
            actions.push(Action::Wake(self.ordinal));
        }
    }

    /// Charges a segment as predicted, because it will not be measured.
    pub(crate) fn measurement_lost(&mut self, id: SegmentId, now: u64) {
        let segment = self.line.take(id);
        if let Some(row) = segment.row {
            self.ground.costs().not_measured(row);
        }
        self.charge(&segment, segment.predicted + segment.carried, now);
    }

    fn charge(&mut self, segment: &Segment, measured: u64, now: u64) {
        let charged = Duration::from_nanos(segment.predicted + segment.carried);
        self.credit.completed(self.ground.gate(), charged, Duration::from_nanos(measured));
        self.line.moved = now;
    }

    /// Takes the host's counters of the device, and decides.
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
        self.settle(facts);
        self.presume(&facts.open, now, actions);
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
        if self.waiting > 0 {
            actions.push(Action::Wake(self.ordinal));
        }
    }

    /// Settles launches completed without a measurement, launches presumed complete, and launches refused by the driver.
    fn settle(&mut self, facts: &Facts) {
        let (settled, refused) = (facts.settled, facts.refused);
        let gate = self.ground.gate();
        if settled > 0 {
            let charged = Duration::from_nanos(self.line.overlap.of(settled));
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
        if self.line.is_empty() || self.waiting == 0 {
            return;
        }
        let unknown = self.line.has_unknown_cost(self.ground.costs());
        let in_flight = if unknown { UNKNOWN } else { self.in_flight() };
        let expected = self.line.began_at(now).max(self.line.moved).saturating_add(in_flight);
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
        self.line.queued(self.ground.costs(), in_flight, now)
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
        if self.switches.free_running {
            return u64::MAX;
        }
        let in_flight = self.in_flight();
        let waits = self.waiting > 0;
        let holds = self.credit.is_open();
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
        if !self.line.is_empty() || matches!(self.turn, Turn::Draining { .. }) {
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
