//! The launches of one thread on one stream: what is paid ahead, which of them are measured together, and when.
//!
//! # Problem
//! A launch takes 2 us. Its account must cost a hundredth of that, and two events for each launch would cost more than the launch.
//!
//! # Terms
//! - **run**: consecutive launches of one thread on one stream. Its [`Run`] is the thread's own, its [`Open`] is read by the meter's host.
//! - **segment**: the part of a run between two events; it is what is measured. A **mark** is its first event, whatever the host takes
//!   for one: a CUDA event, or a place in a simulated queue.
//! - **prepaid**: credit that the run has taken from the gate for launches to come.
//!
//! # Algorithm
//! While credit is prepaid and the segment is not full, a launch is two comparisons and three additions ([`Run::admit`]). Otherwise:
//! 1. [`Run::pay`] takes credit from the gate, for short launches some more: [`PREPAY_NS`], and more while much is left, so that
//!    threads that launch at once seldom meet at the gate.
//! 2. A segment *begins* with the first launch after another has ended, unless there is a reason to go without (`skip`): see
//!    [`Run::begin`]. A launch may be measured alone instead ([`Alone`]): where its cost is unknown, in doubt, or hidden by others.
//! 3. A segment *ends* when it is full, when its thread waits for credit or synchronises, when another context becomes current, or
//!    when another stream needs its place: see [`Run::close`].
//! 4. A segment that the thread synchronises with is *skipped* if it is short, but for one now and then; one synchronising call in
//!    four is timed, and one that took longer than what was open explains ends that ([`unmeasured`]).
//!
//! Costs of launches that no segment covers are **carried**: the next segment on the stream is over after them. If none begins, they
//! are settled as predicted.
//!
//! # Invariants
//! Each launch that was paid is accounted for once: in a segment, as settled, or as refused.

use core::sync::atomic::{AtomicU64, Ordering};

use gshare_core::Duration;
use gshare_core::gate::LaunchGate;

use crate::cost::{CostTable, Row};
use crate::segment::{
    FIRST_FULL_NS, FULL_NS, MEASURED_EVERY_NS, PREPAY_NS, UNMEASURED, UNMEASURED_IN_DOUBT, WORTHWHILE_NS,
    is_early,
};
use crate::timing::CallTime;
use crate::{Measured, OpenRun, SHORT_NS, Segment};

/// Launches of a full segment.
pub const SEGMENT_LAUNCHES: u32 = 16_384;
/// The same for an [early](is_early) segment: a cost that was learned too low is doubted soon.
pub const FIRST_SEGMENT_LAUNCHES: u32 = 512;
/// The most credit that a run takes at once for short launches to come, in ns.
pub const MOST_PREPAID_NS: u64 = 64_000;
/// The part of the credit that is left which a run takes at once for short launches to come.
const PREPAID_PART: u64 = 32;
/// Launches of unknown cost that go ahead unmeasured.
const PROBES: u32 = 1;
/// How long a launch of unknown cost waits for a measurement.
pub const PROBE_WAIT: Duration = Duration::from_millis(200);
/// Times that a run goes without a segment where its first event could not be recorded.
const UNRECORDED: u8 = 4;
/// The segment has launches in it that say nothing about its row.
const MIXED: u32 = u32::MAX;
/// The part of a word that is a time, in ns: three days.
const TIME: u64 = (1 << 48) - 1;

/// A call that gives the device work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// It queues a kernel or a graph, and takes its usual time for that.
    Launch,
    /// It may move bytes on the host first.
    Copy,
    /// It may wait for the work itself.
    Blocking,
}

impl Call {
    /// The part of the call's duration, in ns, that may be the reason that the work starts late.
    pub fn slack(self, calls: &CallTime) -> u64 {
        match self {
            Self::Launch => calls.most(),
            Self::Copy => u64::MAX,
            Self::Blocking => 0,
        }
    }
}

/// A decision about a launch before it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It is not metered.
    Pass,
    /// It is paid for.
    Paid,
    /// It is paid for, and a segment begins with it.
    First,
    /// It is paid for, and the segment ends with it.
    Last,
    /// It is paid for and measured alone.
    Alone,
    /// It must fail.
    Fail,
}

/// The reason for which a segment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It has its size.
    Full,
    /// Its thread will wait for credit.
    Waiting,
    /// Its thread will synchronise with the device.
    Synchronising,
    /// Another stream needs its place.
    Taken,
}

/// The open launches of a run. Its thread writes, and the meter's host reads; the host writes how much it presumes complete.
#[derive(Debug, Default)]
pub struct Open {
    /// Credit that is spent already, in ns.
    prepaid: AtomicU64,
    /// Predicted cost of the launches since the segment began, and of those before it that no event covers, in ns.
    predicted: AtomicU64,
    carried: AtomicU64,
    /// Predicted cost of those of both that are presumed complete, in the bits of [`TIME`]; above them, how often the open
    /// launches were taken out.
    presumed: AtomicU64,
}

/// Launches that were open: their predicted cost in ns, without those that were presumed complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Taken {
    predicted: u64,
    presumed: u64,
    carried: u64,
}

impl Open {
    /// The open launches, for the meter.
    pub fn as_run(&self) -> OpenRun {
        OpenRun {
            predicted: self.total(),
            presumed: self.presumed.load(Ordering::Acquire) & TIME,
            prepaid: self.prepaid.load(Ordering::Acquire),
        }
    }

    /// Presumes the open launches complete: their thread has been elsewhere for long. Gives how much more that is than before, in ns;
    /// nothing where the thread has taken them out, or launched more, since they were looked at.
    pub fn presume_done(&self, predicted: u64) -> u64 {
        let before = self.presumed.load(Ordering::Acquire);
        let after = before & !TIME | predicted & TIME;
        let done = self.total() == predicted
            && self.presumed.compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if done { predicted.saturating_sub(before & TIME) } else { 0 }
    }

    /// Takes out what is prepaid, in ns: it is to be given back.
    pub fn take_prepaid(&self) -> u64 {
        self.prepaid.swap(0, Ordering::AcqRel)
    }

    fn total(&self) -> u64 {
        self.predicted.load(Ordering::Acquire) + self.carried.load(Ordering::Acquire)
    }

    fn take(&self) -> Taken {
        let next = (self.presumed.load(Ordering::Relaxed) | TIME).wrapping_add(1);
        let presumed = self.presumed.swap(next, Ordering::AcqRel) & TIME;
        let (predicted, carried) =
            (self.predicted.swap(0, Ordering::AcqRel), self.carried.swap(0, Ordering::AcqRel));
        // The launches that came first were over first.
        let carried_presumed = presumed.min(carried);
        let presumed = (presumed - carried_presumed).min(predicted);
        Taken { predicted: predicted - presumed, presumed, carried: carried - carried_presumed }
    }
}

/// The part of a run that only its thread touches. See the [module](self).
#[derive(Debug)]
#[repr(C)]
pub struct Run<M> {
    /// Launches since the segment began, and how many there may be before the slow way is due.
    count: u32,
    limit: u32,
    row: Row,
    /// Not 0 when there are launches of other rows.
    mixed: u32,
    /// Times the run is full, or its thread synchronises, before a segment begins again; and what that begins at.
    skip: u8,
    unmeasured: u8,
    /// A segment is skipped because the thread synchronises after a few short launches.
    idle_skip: bool,
    begun: u32,
    mark: Option<M>,
    /// Predicted cost of the first launch, and when the segment began, in ns.
    first: u64,
    opened: u64,
    /// How much of the first launch's call may be the reason that the device had nothing to do, and how much was, in ns.
    slack: u32,
    lead: u32,
    /// The time that the call for the segment's first event took, in ns.
    record: u32,
    /// The stream waits for something within the segment.
    waits: bool,
    /// Charged cost of the launches that were open when the thread last synchronised, in ns.
    awaited: u64,
}

impl<M> Default for Run<M> {
    fn default() -> Self {
        Self::new()
    }
}

/// A launch that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concluded {
    /// Nothing is to be done.
    Open,
    /// The segment is full: it is to be [closed](Run::close).
    Full,
    /// The driver refused it: its cost is to be given back.
    Refused,
}

/// A run whose launches were taken out: its segment is to be measured, or settled as predicted.
#[derive(Debug)]
pub struct Closed<M> {
    /// The first event of the segment, if one was recorded.
    pub mark: Option<M>,
    count: u32,
    taken: Taken,
    short: bool,
}

impl<M> Closed<M> {
    /// Its charge if it is settled as predicted, in ns.
    pub fn predicted(&self) -> u64 {
        self.taken.predicted + self.taken.carried
    }

    /// Whether an event after it would be the end of a segment.
    pub fn is_measurable(&self) -> bool {
        self.mark.is_some() && self.count > 0
    }
}

impl<M> Run<M> {
    /// A run without launches.
    pub const fn new() -> Self {
        Self {
            count: 0,
            limit: 0,
            row: Row::NONE,
            mixed: 0,
            skip: 0,
            unmeasured: UNMEASURED_IN_DOUBT,
            idle_skip: false,
            begun: 0,
            mark: None,
            first: 0,
            opened: 0,
            slack: 0,
            lead: 0,
            record: 0,
            waits: false,
            awaited: 0,
        }
    }

    /// The short way of a launch: its cost is prepaid, and nothing else is to be done. `None`: there is something to do.
    #[inline(always)]
    pub fn admit(&mut self, open: &Open, row: Row, cost: u64) -> Option<Verdict> {
        let prepaid = open.prepaid.load(Ordering::Relaxed);
        if self.count >= self.limit || cost > prepaid {
            return None;
        }
        open.prepaid.store(prepaid - cost, Ordering::Relaxed);
        self.add(open, row, cost);
        Some(if self.count == self.limit { Verdict::Last } else { Verdict::Paid })
    }

    #[inline(always)]
    fn add(&mut self, open: &Open, row: Row, cost: u64) {
        open.predicted.store(open.predicted.load(Ordering::Relaxed) + cost, Ordering::Release);
        self.count += 1;
        self.mixed |= self.row.difference(row);
    }

    /// Takes `cost` out of what is prepaid, or out of the gate, and prepays again. `false`: there is no credit.
    pub fn pay(&mut self, open: &Open, gate: &LaunchGate, cost: u64) -> bool {
        let prepaid = open.prepaid.load(Ordering::Relaxed);
        if cost <= prepaid {
            open.prepaid.store(prepaid - cost, Ordering::Relaxed);
            return true;
        }
        // Only short launches are paid for ahead. What is prepaid cannot be called back: it is little where little is left.
        let part = gate.left().as_nanos() / PREPAID_PART;
        let ahead = if cost < PREPAY_NS { part.clamp(PREPAY_NS, MOST_PREPAID_NS) } else { 0 };
        let paid = gate.try_spend(Duration::from_nanos(cost - prepaid + ahead));
        if paid {
            open.prepaid.store(ahead, Ordering::Relaxed);
        }
        paid
    }

    /// Whether a segment begins with the next launch.
    pub fn is_due(&self) -> bool {
        self.mark.is_none() && self.skip == 0
    }

    /// A segment begins with a launch of `row`; [`opened`](Self::opened) follows where its first event can be recorded. `true`: the
    /// launch is to be measured alone instead. While a stream is captured no event is recorded anywhere.
    pub fn begin(&mut self, open: &Open, costs: &CostTable, row: Row, cost: u64, captures: bool) -> bool {
        // What came before on this stream has no event of its own: the segment that begins here completes after it.
        self.carry(open);
        self.limit = 0;
        self.begun = self.begun.wrapping_add(1);
        // Where different functions take turns, a segment says little about each: now and then one is measured alone. So is what may
        // have become longer in a segment that cannot prove it.
        let mixed = core::mem::take(&mut self.mixed) != 0 && self.begun.is_multiple_of(4);
        if !captures && (costs.take_doubt(row) || mixed) {
            return true;
        }
        (self.row, self.first, self.slack, self.lead) = (row, cost, 0, 0);
        (self.skip, self.idle_skip, self.waits) = (UNRECORDED, false, false);
        false
    }

    /// The first event of the segment is recorded, by a call from `asked` to `now`. `slack`: how much of the first launch's call, in
    /// ns, may be the reason that the work starts late; 0 where the stream was not idle.
    pub fn opened(&mut self, mark: M, (asked, now): (u64, u64), slack: u64) {
        (self.mark, self.opened, self.skip) = (Some(mark), now, 0);
        (self.slack, self.record) = (saturated(slack), saturated(now.saturating_sub(asked)));
    }

    /// The thread makes the stream wait: for the host, for a word of memory, or for another stream. The time of the wait is not the
    /// device's: the segment says nothing about its launches, and the next ones are measured alone now and then.
    pub fn waits(&mut self) {
        (self.waits, self.mixed) = (true, MIXED);
    }

    /// Whether any launch is open, or a segment.
    pub fn is_open(&self, open: &Open) -> bool {
        self.count > 0 || self.mark.is_some() || open.total() > 0
    }

    /// A launch that was paid for, by the long way.
    pub fn launch(&mut self, open: &Open, row: Row, cost: u64) -> Verdict {
        let first = self.count == 0 && self.slack > 0;
        self.add(open, row, cost);
        let predicted = open.predicted.load(Ordering::Relaxed);
        // How many more launches like this one fit into the segment.
        let (full, most) = if is_early(self.begun) {
            (FIRST_FULL_NS, FIRST_SEGMENT_LAUNCHES)
        } else {
            (FULL_NS, SEGMENT_LAUNCHES)
        };
        let more = full.saturating_sub(predicted).checked_div(cost).unwrap_or(most.into());
        self.limit = saturated(u64::from(self.count) + more).min(most);
        match (first, predicted >= full || self.count >= self.limit) {
            (_, true) => Verdict::Last,
            (true, false) => Verdict::First,
            (false, false) => Verdict::Paid,
        }
    }

    /// The launch was made, or refused by the driver.
    pub fn concluded(
        &mut self,
        open: &Open,
        calls: &CallTime,
        (verdict, cost): (Verdict, u64),
        accepted: bool,
        now: impl FnOnce() -> u64,
    ) -> Concluded {
        if self.count == 1 && self.slack > 0 {
            let took = now().saturating_sub(self.opened);
            self.lead = saturated(took).min(self.slack);
            // All of a copy's call may count, since it may move bytes: it says nothing about the calls of launches.
            if self.slack != u32::MAX {
                calls.seen(took);
            }
        }
        if !accepted {
            // It did not run: nothing of it is in flight.
            let left = open.predicted.load(Ordering::Relaxed).saturating_sub(cost);
            open.predicted.store(left, Ordering::Release);
            self.count = self.count.saturating_sub(1);
            self.mixed = MIXED;
            return Concluded::Refused;
        }
        if verdict != Verdict::Last {
            return Concluded::Open;
        }
        if self.mark.is_some() {
            return Concluded::Full;
        }
        // A thread that fills it does not synchronise after a few short launches: the next ones are measured.
        self.skip = if self.idle_skip { 0 } else { self.skip.saturating_sub(1) };
        self.carry(open);
        self.limit = 0;
        Concluded::Open
    }

    /// The launches so far are covered by no event of the segment that begins.
    fn carry(&mut self, open: &Open) {
        self.count = 0;
        let predicted = open.predicted.load(Ordering::Relaxed);
        open.carried.fetch_add(predicted, Ordering::AcqRel);
        open.predicted.store(0, Ordering::Release);
    }

    /// A launch that is measured alone goes between the launches of the segment.
    pub fn interrupted(&mut self) {
        self.mixed = MIXED;
    }

    /// The run is another stream's from now on; it was closed before.
    pub fn taken_over(&mut self) {
        (self.mixed, self.skip) = (0, 0);
    }

    /// The mark of the open segment.
    pub fn mark(&self) -> Option<&M> {
        self.mark.as_ref()
    }

    /// The same, to be moved with the device's work.
    pub fn mark_mut(&mut self) -> Option<&mut M> {
        self.mark.as_mut()
    }

    /// Takes all open launches out. `None`: there are none. A segment that has a mark is to be [measured](Self::measured) or, where
    /// its end cannot be recorded, settled as predicted; so is all that has none.
    pub fn close(&mut self, open: &Open, why: Ending, measures_all: bool) -> Option<Closed<M>> {
        self.awaited = open.total();
        if self.awaited == 0 && self.count == 0 && self.mark.is_none() {
            return None;
        }
        let (count, taken) = (core::mem::take(&mut self.count), open.take());
        self.limit = 0;
        let mark = self.mark.take();
        if mark.is_none() {
            self.skip = if measures_all { 0 } else { self.skip.saturating_sub(1) };
        }
        // Programs that synchronise after a few short launches are measured now and then only.
        let worth = taken.predicted + taken.presumed >= WORTHWHILE_NS || measures_all;
        Some(Closed { mark, count, taken, short: why == Ending::Synchronising && !worth })
    }

    /// Whether the stream cannot have run dry in the segment: it waited for nothing, and everything was queued before the device could
    /// have finished the first launch, or even begun. `behind`: the device has not passed the mark.
    pub fn is_dense(&self, closed: &Closed<M>, now: u64, behind: bool) -> bool {
        let queued = now.saturating_sub(self.opened) < self.first.saturating_add(self.lead.into());
        closed.taken.presumed == 0 && !self.waits && (queued || behind)
    }

    /// The end of the segment was recorded until `now`: its measurement is under way. `behind`: as for [`is_dense`](Self::is_dense),
    /// before the end was recorded.
    pub fn measured(&mut self, closed: &Closed<M>, (dense, behind): (bool, bool), now: u64) -> Segment {
        let record = u64::from(self.record);
        self.skip_short(closed);
        let Taken { predicted, presumed, carried } = closed.taken;
        Segment {
            predicted,
            carried,
            presumed,
            launches: closed.count,
            row: (self.mixed == 0).then_some(self.row),
            dense,
            span: if behind { 0 } else { now.saturating_sub(self.opened) + record },
            gap: self.lead.into(),
            record,
            of: Measured::Run,
            opened: self.opened,
        }
    }

    /// An event after the segment would hold up other streams: its launches are to be measured alone.
    pub fn barred(&mut self, closed: &Closed<M>) {
        (self.mixed, self.begun) = (MIXED, self.begun | 3);
        self.skip_short(closed);
    }

    fn skip_short(&mut self, closed: &Closed<M>) {
        (self.skip, self.idle_skip) = if closed.short { (self.unmeasured, true) } else { (0, false) };
    }

    /// Charged cost of the launches that were open when the run was closed last, in ns.
    pub fn awaited(&self) -> u64 {
        self.awaited
    }

    /// So many synchronising calls in a row need not be measured.
    pub fn skip_at_most(&mut self, most: u8) {
        (self.skip, self.unmeasured) = (self.skip.min(most), most);
    }
}

/// Whether the synchronising call that makes a thread's number of them this one is timed.
pub fn is_timed(syncs: u64) -> bool {
    syncs.is_multiple_of(4)
}

/// How many such calls in a row need not be measured, by how long one has waited (both times in ns). A thread that sleeps in
/// the call takes some tens of microseconds to come back from it.
pub fn unmeasured(predicted: u64, waited: u64) -> u8 {
    match waited {
        _ if waited <= 2 * predicted + 20_000 => u8::try_from(MEASURED_EVERY_NS / predicted.max(1))
            .map_or(UNMEASURED, |calls| calls.min(UNMEASURED)),
        _ if waited <= 8 * predicted + 200_000 => UNMEASURED_IN_DOUBT,
        _ => 0,
    }
}

/// Whether a launch of unknown cost waits for the measurement of another one, for [`PROBE_WAIT`] at most: two kernels of 30 ms at a
/// guess of 0.5 ms would be a debt of more than half a second for a client that may have a tenth of the time.
pub fn awaits_measurement(costs: &CostTable, row: Row) -> bool {
    costs.known(row).is_none() && costs.probes(row) >= PROBES
}

/// The cost of a launch of which nothing is known, in ns; it counts as one that is being measured.
pub fn probe(costs: &CostTable, row: Row) -> u64 {
    let cost = costs.known(row).unwrap_or_else(|| costs.guess());
    costs.probe(row);
    cost
}

/// A launch that is measured alone: one of unknown cost, or one whose cost is in doubt.
#[derive(Clone, Copy, Debug)]
pub struct Alone {
    row: Row,
    of: Measured,
    call: Call,
    /// Whether the stream was idle before it.
    idle: bool,
    /// Since when the launch has been under way, and how long the call for the event before it took, in ns.
    began: u64,
    record: u64,
}

/// The end of a launch that was measured alone.
#[derive(Clone, Copy, Debug)]
pub struct AloneEnd {
    /// Its stream was kept waiting until the event after it was recorded.
    pub held: bool,
    /// The device had not passed the event before the launch when the call came back.
    pub behind: bool,
    /// When the call came back, in ns.
    pub called: u64,
    /// When the event after it was recorded, in ns.
    pub recorded: u64,
}

impl Alone {
    /// A launch of this row by a call that begins now.
    pub fn new(costs: &CostTable, row: Row, call: Call, now: u64) -> Self {
        let of = if costs.known(row).is_none() { Measured::First } else { Measured::Alone };
        Self { row, of, call, idle: false, began: now, record: 0 }
    }

    /// Whether the work may start late because the call is late: the host is to find out whether the stream is idle.
    pub fn may_be_late(&self) -> bool {
        self.call != Call::Blocking
    }

    /// Whether its stream may be kept waiting. A call that may do more than queue work is not kept from ending.
    pub fn may_be_held(&self) -> bool {
        self.call == Call::Launch
    }

    /// Whether its stream is to be kept waiting meanwhile, so that the time of the call is not measured with it.
    pub fn is_short(&self, costs: &CostTable) -> bool {
        self.may_be_held() && costs.known(self.row).is_some_and(|cost| cost <= SHORT_NS)
    }

    /// The event before it was recorded, by a call from `asked` to `now`. `idle`: the stream was idle before that. `holds`: the stream
    /// can be kept waiting. A first launch there is charged all of its interval until one is held: a cost that is too low would let
    /// its program go beyond its limit.
    pub fn opened(&mut self, (asked, now): (u64, u64), idle: bool, holds: bool) {
        let all = holds && self.of == Measured::First;
        (self.began, self.idle) = (now, idle && !all);
        self.record = if all { 0 } else { now.saturating_sub(asked) };
    }

    /// The event after it was recorded.
    pub fn measured(&self, calls: &CallTime, cost: u64, end: AloneEnd) -> Segment {
        let AloneEnd { held, behind, called, recorded } = end;
        let took = called.saturating_sub(self.began);
        if !held && self.call == Call::Launch {
            calls.seen(took);
        }
        let late = self.idle && !held;
        Segment {
            predicted: cost,
            carried: 0,
            presumed: 0,
            launches: 1,
            row: Some(self.row),
            dense: true,
            span: if held || behind { 0 } else { recorded.saturating_sub(self.began) + self.record },
            gap: if late { took.min(self.call.slack(calls)) } else { 0 },
            record: self.record,
            of: if held { Measured::Held } else { self.of },
            opened: self.began,
        }
    }

    /// It was not measured: no thread waits for that, and a doubt stays.
    pub fn not_measured(&self, costs: &CostTable) {
        match self.of {
            Measured::First => costs.not_measured(self.row),
            _ => costs.doubt(self.row),
        }
    }
}

/// The runs of a thread lie close together: times that are short are kept short.
fn saturated(ns: u64) -> u32 {
    u32::try_from(ns).unwrap_or(u32::MAX)
}
