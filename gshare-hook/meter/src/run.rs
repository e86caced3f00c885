//! The launches of one thread on one stream: how they are paid for ahead of time, and how they are grouped for measurement.
//!
//! # Problem
//! A launch takes 2 us. Its account must cost a hundredth of that, and two events for each launch would cost more than the launch.
//!
//! # Terms
//! - **run**: consecutive launches of one thread on one stream. Only the thread touches its [`Run`]; the meter's host also reads
//!   its [`Open`].
//! - **segment**: the part of a run between two events, measured as a whole. A **mark** is the first event: a CUDA event, or a
//!   place in a simulated queue.
//! - **prepaid**: credit taken from the gate for later launches of the run.
//!
//! # Algorithm
//! While credit is prepaid and the segment is not full, a launch is two comparisons and three additions ([`Run::admit`]).
//! Otherwise:
//! 1. [`Run::pay`] takes credit from the gate. For short launches it adds [`PREPAY_NS`], or more while much credit is left, so that
//!    threads with simultaneous launches seldom meet at the gate.
//! 2. A segment *begins* with the first launch after the previous segment, unless there is a reason to go without (`skip`): see
//!    [`Run::begin`]. A launch may be measured alone instead ([`Alone`](crate::alone::Alone)) if its cost is unknown, in doubt, or hidden by others.
//! 3. A segment *ends* when it is full, when its thread waits for credit or synchronises, when another context becomes current, or
//!    when another stream needs its place: see [`Run::close`].
//! 4. No segment holds a wait of its stream for the host, a word of memory or another stream ([`Run::waits`]). The first event of
//!    the segment behind a wait also shows when the wait is over.
//! 5. A short segment before a synchronising call is *skipped*, except now and then. One synchronising call in four is timed, and
//!    the skipping ends if the call takes longer than the open launches explain ([`unmeasured`]).
//!
//! Costs of launches without a segment are **carried**: the next segment on the stream ends after them. If none begins, they are
//! settled as predicted.
//!
//! # Invariants
//! Each launch that was paid for is accounted for once: in a segment, as settled, or as refused.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

use gshare_core::Duration;
use gshare_core::gate::LaunchGate;

use crate::OpenRun;
use crate::cost::{CostTable, Row};

mod closing;

use closing::UNMEASURED_IN_DOUBT;
pub use closing::{Closed, Ending, WORTHWHILE_NS, is_timed, unmeasured};

/// Predicted GPU time of a full segment, in ns.
///
/// Between successive kernels, two events take 6 to 7 us of the device's time. On an H100, products of 340 us lost 0.91 % in
/// segments of 400 us, and 0.36 % in segments of 2 ms. At this length, half of the work allowed in flight is seen to complete in
/// time.
pub const FULL_NS: u64 = 2_000_000;
/// Predicted GPU time of a full [early](is_early) segment of a run, in ns.
pub const FIRST_FULL_NS: u64 = 400_000;

/// Whether a run with `begun` segments so far has short segments. The run learns the cost of a new kernel from several segments,
/// and until then the charge is a guess.
pub const fn is_early(begun: u32) -> bool {
    begun <= 32
}

/// Credit taken at once by a run for later short launches, in ns.
pub const PREPAY_NS: u64 = 8_000;
/// Launches of a full segment.
pub const SEGMENT_LAUNCHES: u32 = 16_384;
/// Launches of a full [early](is_early) segment: few, so that a cost learned too low is doubted soon.
pub const FIRST_SEGMENT_LAUNCHES: u32 = 512;
/// The most credit that a run takes at once for later short launches, in ns.
pub const MOST_PREPAID_NS: u64 = 64_000;
/// A run prepays the remaining credit divided by this number, but at least [`PREPAY_NS`] and at most [`MOST_PREPAID_NS`].
const PREPAID_PART: u64 = 32;
/// Launches or synchronising calls for which a run goes without a segment after its first event could not be recorded.
const UNRECORDED: u8 = 4;
/// Marks a segment with launches that tell nothing about its row.
const MIXED: u32 = u32::MAX;
/// The bits of a word that hold a time, in ns: three days.
const TIME: u64 = (1 << 48) - 1;

/// A kind of call that gives the device work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Queues a kernel or a graph, in the usual time of a launch call.
    Launch,
    /// May move bytes on the host first.
    Copy,
    /// May wait for the work itself.
    Blocking,
}

impl Call {
    /// The part of the call's duration, in ns, that can have delayed the start of the work.
    pub fn slack(self, calls: &CallTime) -> u64 {
        match self {
            Self::Launch => calls.most(),
            Self::Copy => u64::MAX,
            Self::Blocking => 0,
        }
    }
}

/// Duration of a launch call, which is the part of a measured interval in which the device waited for the call.
///
/// An interrupted call takes longer, and its kernel may have run meanwhile, so at most twice the usual duration is attributed to a
/// call. The usual duration falls half-way to a shorter call, and rises by a quarter at most. A first call may load the kernel, and
/// counts for no more than 50 us.
#[derive(Debug, Default)]
pub struct CallTime(AtomicU64);

impl CallTime {
    /// The most time counted for a first call, in ns.
    const FIRST: u64 = 50_000;

    /// Notes the duration of one call, in ns.
    pub fn seen(&self, ns: u64) {
        let next = match self.0.load(Ordering::Relaxed) {
            0 => ns.min(Self::FIRST),
            usual if ns < usual => u64::midpoint(ns, usual),
            usual => usual + (ns - usual).min(usual / 4 + 1),
        };
        self.0.store(next, Ordering::Relaxed);
    }

    /// The most time attributed to one call, in ns.
    pub fn most(&self) -> u64 {
        2 * self.0.load(Ordering::Relaxed)
    }
}

/// A decision about a launch before it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Not metered.
    Pass,
    /// Paid for.
    Paid,
    /// Paid for; a segment begins with it.
    First,
    /// Paid for; the segment ends with it.
    Last,
    /// Paid for and measured alone.
    Alone,
    /// Must fail.
    Fail,
}

/// The open launches of a run. Its thread writes, and the meter's host reads; the host writes how much it presumes complete.
#[derive(Debug, Default)]
pub struct Open {
    /// Credit already spent at the gate, for later launches, in ns.
    prepaid: AtomicU64,
    /// Predicted cost of the launches since the segment began, and of earlier launches without an event, in ns.
    predicted: AtomicU64,
    carried: AtomicU64,
    /// The low bits ([`TIME`]) hold the predicted cost of all open launches presumed complete, in ns. The bits above them count how
    /// often
    /// the open launches were taken out.
    presumed: AtomicU64,
}

/// Predicted cost of formerly open launches, in ns. `predicted` and `carried` exclude the launches presumed complete.
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
            waits: false,
        }
    }

    /// Presumes the open launches complete, because their thread has been elsewhere for long. Returns the cost newly presumed
    /// complete, in ns,
    /// or 0 if the thread has taken the launches out or launched more since `predicted` was read.
    pub fn presume_done(&self, predicted: u64) -> u64 {
        let before = self.presumed.load(Ordering::Acquire);
        let after = before & !TIME | predicted & TIME;
        let done = self.total() == predicted
            && self.presumed.compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if done { predicted.saturating_sub(before & TIME) } else { 0 }
    }

    /// Takes out the prepaid credit, in ns; the caller gives it back to the gate.
    pub fn take_prepaid(&self) -> u64 {
        self.prepaid.swap(0, Ordering::AcqRel)
    }

    fn total(&self) -> u64 {
        self.predicted.load(Ordering::Acquire) + self.carried.load(Ordering::Acquire)
    }

    /// Takes the open launches out. Only the run's thread calls this.
    ///
    /// The launches go first, and the count of presumptions after them: a presumption that found the launches still open is part of
    /// `presumed`, and a later one finds another count.
    fn take(&self) -> Taken {
        let [predicted, carried] = [&self.predicted, &self.carried].map(|own| {
            let open = own.load(Ordering::Relaxed);
            own.store(0, Ordering::Release);
            open
        });
        let next = (self.presumed.load(Ordering::Relaxed) | TIME).wrapping_add(1);
        let presumed = self.presumed.swap(next, Ordering::AcqRel) & TIME;
        // Launches complete in their order, so presumed cost belongs to the carried launches first.
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
    /// Full segments or synchronising calls before a segment begins again, and the value at which `skip` starts after a short
    /// segment.
    skip: u8,
    unmeasured: u8,
    /// A segment is skipped because the thread synchronises after a few short launches.
    idle_skip: bool,
    begun: u32,
    mark: Option<M>,
    /// Predicted cost of the first launch, and when the segment began, in ns.
    first: u64,
    opened: u64,
    /// The longest and the actual part of the first launch's call in which the device had nothing to do, in ns.
    slack: u32,
    lead: u32,
    /// Duration of the call that recorded the segment's first event, in ns.
    record: u32,
    /// The launches are queued behind a wait of the stream.
    behind_wait: bool,
    /// Charged cost of the open launches at the thread's last synchronising call, in ns.
    awaited: u64,
}

impl<M> Default for Run<M> {
    fn default() -> Self {
        Self::new()
    }
}

/// The follow-up of a launch call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concluded {
    /// Nothing is to be done.
    Open,
    /// The segment is full: it is to be [closed](Run::close).
    Full,
    /// The driver refused it: its cost is to be given back.
    Refused,
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
            behind_wait: false,
            awaited: 0,
        }
    }

    /// The fast path of a launch, which spends prepaid credit only. Returns `None` if the launch needs the slow path.
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

    /// Takes `cost` from the prepaid credit, or from the gate, and prepays again. Returns `false` if there is no credit.
    pub fn pay(&mut self, open: &Open, gate: &LaunchGate, cost: u64) -> bool {
        let prepaid = open.prepaid.load(Ordering::Relaxed);
        if cost <= prepaid {
            open.prepaid.store(prepaid - cost, Ordering::Relaxed);
            return true;
        }
        // Only short launches are paid for ahead of time. Prepaid credit cannot be recalled, so little is prepaid where little is
        // left.
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

    /// Begins a segment with a launch of `row`; [`opened`](Self::opened) follows if its first event can be recorded. Returns `true`
    /// if the launch is to be measured alone instead. While a stream is captured, no event is recorded anywhere.
    pub fn begin(&mut self, open: &Open, costs: &CostTable, row: Row, cost: u64, captures: bool) -> bool {
        // Earlier launches on this stream have no event of their own, and this segment completes after them.
        self.carry(open);
        self.limit = 0;
        self.begun = self.begun.wrapping_add(1);
        // A segment in which different functions take turns says little about each, so now and then a launch is measured alone. A
        // function that may have become longer is also measured alone, because its segments cannot prove it.
        let mixed = core::mem::take(&mut self.mixed) != 0 && self.begun.is_multiple_of(4);
        if !captures && (costs.take_doubt(row) || mixed) {
            return true;
        }
        (self.row, self.first, self.slack, self.lead) = (row, cost, 0, 0);
        (self.skip, self.idle_skip) = (UNRECORDED, false);
        false
    }

    /// The segment's first event is recorded, by a call from `asked` to `now`. `slack` is the longest part of the first launch's
    /// call, in ns, that can have delayed the start of the work; 0 if the stream was not idle.
    pub fn opened(&mut self, mark: M, (asked, now): (u64, u64), slack: u64) {
        (self.mark, self.opened, self.skip) = (Some(mark), now, 0);
        (self.slack, self.record) = (saturated(slack), saturated(now.saturating_sub(asked)));
    }

    /// Whether the open segment is to be [closed](Self::close) before a wait of the stream, since the wait is not the device's work.
    /// Short segments are dropped instead, except for one in four, because an event costs more than their measurement is worth.
    pub fn ends_before_wait(&self, open: &Open) -> bool {
        self.mark.is_some() && (open.total() >= WORTHWHILE_NS || self.begun & 6 == 0)
    }

    /// The thread makes the stream wait for the host, for a word of memory, or for another stream. The next launch begins a segment.
    /// Returns the mark of the open segment, which is dropped.
    pub fn waits(&mut self, open: &Open) -> Option<M> {
        // More launches than a few without an event may still be at work when nothing behind the wait is.
        self.behind_wait = open.total() < WORTHWHILE_NS;
        self.carry(open);
        (self.limit, self.skip) = (0, 0);
        self.mark.take()
    }

    /// Whether the next launches are queued behind a wait of the stream, and the device may have nothing to do before them.
    pub fn is_behind_wait(&self) -> bool {
        self.behind_wait
    }

    /// Whether any launch or segment is open.
    pub fn is_open(&self, open: &Open) -> bool {
        self.count > 0 || self.mark.is_some() || open.total() > 0
    }

    /// Adds a paid launch on the slow path.
    pub fn launch(&mut self, open: &Open, row: Row, cost: u64) -> Verdict {
        let first = self.count == 0 && self.slack > 0;
        self.add(open, row, cost);
        let predicted = open.predicted.load(Ordering::Relaxed);
        // The number of further launches like this one that fit into the segment.
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

    /// Takes the result of the launch call: the launch was made, or the driver refused it.
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
            // A copy's whole call may count as slack, since it may move bytes. It says nothing about the calls of launches.
            if self.slack != u32::MAX {
                calls.seen(took);
            }
        }
        if !accepted {
            // The launch did not run, so it is not in flight.
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
        // A thread that fills a segment does not synchronise after a few short launches, so its next launches are measured.
        self.skip = if self.idle_skip { 0 } else { self.skip.saturating_sub(1) };
        self.carry(open);
        self.limit = 0;
        Concluded::Open
    }

    /// Moves the cost of the launches so far to `carried`, since the segment about to begin does not cover them.
    fn carry(&mut self, open: &Open) {
        self.count = 0;
        let predicted = open.predicted.load(Ordering::Relaxed);
        open.carried.store(open.carried.load(Ordering::Relaxed) + predicted, Ordering::Release);
        open.predicted.store(0, Ordering::Release);
    }

    /// Notes a launch measured alone between the launches of the segment.
    pub fn interrupted(&mut self) {
        self.mixed = MIXED;
    }

    /// Hands the run to another stream, after it was closed.
    pub fn taken_over(&mut self) {
        (self.mixed, self.skip, self.behind_wait) = (0, 0, false);
    }

    /// The mark of the open segment.
    pub fn mark(&self) -> Option<&M> {
        self.mark.as_ref()
    }

    /// The mark of the open segment, to be moved with the device's work.
    pub fn mark_mut(&mut self) -> Option<&mut M> {
        self.mark.as_mut()
    }
}

/// Saturates to 32 bits: the runs of a thread lie close together in memory, so short times are stored short.
fn saturated(ns: u64) -> u32 {
    u32::try_from(ns).unwrap_or(u32::MAX)
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// A presumption that crossed the end of a segment was charged twice, and the helper thread's books did not add up.
    #[test]
    fn loom_a_presumption_that_crosses_the_end_of_a_segment_counts_once() {
        loom::model(|| {
            let open = Arc::new(Open::default());
            open.predicted.store(7, Ordering::Release);
            let host = Arc::clone(&open);
            let presumed = loom::thread::spawn(move || host.presume_done(7));
            let taken = open.take();
            let presumed = presumed.join().unwrap();
            assert_eq!((taken.presumed, taken.predicted), (presumed, 7 - presumed));
            assert_eq!(open.presumed.load(Ordering::Acquire) & TIME, 0);
        });
    }
}
