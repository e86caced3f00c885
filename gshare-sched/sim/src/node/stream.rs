//! The launches of one thread on one stream: what is paid ahead, and which of them are measured together.
//!
//! This is the launch path of the hook (`gate.rs` there) in virtual time: the same sizes ([`gshare_meter::segment`]), with a launch that
//! takes no time, so that there are no gaps to leave out and nothing to keep waiting. Kernels are numbered by their launch; an event
//! is a place in that order.

use gshare_core::Timestamp;
use gshare_meter::cost::{CostTable, Row};
use gshare_meter::segment::{
    MEASURED_EVERY_NS, PREPAY_NS, UNMEASURED, UNMEASURED_IN_DOUBT, WORTHWHILE_NS, full_ns,
};
use gshare_meter::{Measured, OpenRun, Segment, SegmentId};

/// A measurement under way.
#[derive(Debug)]
pub(super) struct Measurement {
    pub(super) id: Option<SegmentId>,
    pub(super) segment: Segment,
    /// Its first and its last kernel.
    first: u64,
    last: u64,
    /// When its end was recorded.
    closed: Timestamp,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
}

impl Measurement {
    /// When it ran, once it is over.
    pub(super) fn interval(&self) -> Option<(Timestamp, Timestamp)> {
        self.start.zip(self.end)
    }
}

/// A segment that has begun.
#[derive(Debug, Clone, Copy)]
struct Open {
    opened: Timestamp,
    first: u64,
    start: Option<Timestamp>,
}

/// Why a segment ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// The segment has its size.
    Full,
    /// Its thread will wait for credit.
    Waiting,
    /// Its thread will synchronise with the device.
    Synchronising,
}

/// One stream. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// Kernels launched and completed.
    pub(super) launched: u64,
    pub(super) completed: u64,
    /// When the last kernel ended that completed.
    pub(super) ended: Timestamp,
    /// Measurements under way, in the order of their ends.
    pub(super) under_way: Vec<Measurement>,
    /// Predicted cost of launches that will not be measured, and of those that were not made, for the next look, in ns.
    pub(super) settled: u64,
    pub(super) refused: u64,
    /// Predicted cost of launches that were presumed complete since the last look, in ns.
    pub(super) presumed_since: u64,
    prepaid: u64,
    predicted: u64,
    carried: u64,
    presumed: u64,
    count: u32,
    row: Option<Row>,
    mixed: bool,
    skip: u8,
    unmeasured: u8,
    idle_skip: bool,
    begun: u32,
    open: Option<Open>,
    first_cost: u64,
    awaited: u64,
}

impl Stream {
    pub(super) fn new() -> Self {
        Self { unmeasured: UNMEASURED_IN_DOUBT, ..Self::default() }
    }

    /// The open segment, as the meter sees it.
    pub(super) fn open_run(&self) -> OpenRun {
        OpenRun { predicted: self.predicted + self.carried, presumed: self.presumed, prepaid: self.prepaid }
    }

    /// The meter takes what is open for complete.
    pub(super) fn presume_done(&mut self, predicted: u64) {
        self.presumed_since += predicted.saturating_sub(self.presumed);
        self.presumed = predicted;
    }

    /// Pays a launch of `cost` out of what is prepaid, or with what `spend` takes from the gate.
    pub(super) fn pay(&mut self, cost: u64, spend: impl FnOnce(u64) -> bool) -> bool {
        if cost <= self.prepaid {
            self.prepaid -= cost;
            return true;
        }
        let ahead = if cost < PREPAY_NS { PREPAY_NS } else { 0 };
        let paid = spend(cost - self.prepaid + ahead);
        if paid {
            self.prepaid = ahead;
        }
        paid
    }

    /// The launch that was paid for is made. `row`: of the cost table. `alone`: its cost is a guess.
    pub(super) fn launch(&mut self, now: Timestamp, costs: &CostTable, row: Row, cost: u64, alone: bool) {
        let number = self.launched;
        self.launched += 1;
        if alone {
            self.mixed = true;
            return self.measure_alone(now, costs, number, row, cost);
        }
        if self.open.is_none() && self.skip == 0 && self.begin(now, costs, number, row, cost) {
            return self.measure_alone(now, costs, number, row, cost);
        }
        self.predicted += cost;
        self.count += 1;
        self.mixed |= self.row != Some(row);
        if full_ns(self.begun).saturating_sub(self.predicted) >= cost.max(1) {
            return;
        }
        if self.open.is_some() {
            self.end(now, Ending::Full, false);
        } else {
            self.skip = if self.idle_skip { 0 } else { self.skip.saturating_sub(1) };
            self.carry();
        }
    }

    /// A launch that passes free of charge.
    pub(super) fn launch_unmetered(&mut self) {
        self.launched += 1;
    }

    fn measure_alone(&mut self, now: Timestamp, costs: &CostTable, number: u64, row: Row, cost: u64) {
        let of = if costs.known(row).is_none() { Measured::First } else { Measured::Alone };
        let segment = Segment {
            predicted: cost,
            carried: 0,
            presumed: 0,
            launches: 1,
            row: Some(row),
            dense: true,
            span: 0,
            gap: 0,
            record: 0,
            of,
            opened: now.as_nanos(),
        };
        let open = Open { opened: now, first: number, start: None };
        self.record(now, open, number, segment);
    }

    /// Begins a segment. `true`: the launch is to be measured alone.
    fn begin(&mut self, now: Timestamp, costs: &CostTable, number: u64, row: Row, cost: u64) -> bool {
        self.carry();
        self.begun = self.begun.wrapping_add(1);
        let mixed = core::mem::take(&mut self.mixed) && self.begun.is_multiple_of(4);
        if costs.take_doubt(row) || mixed {
            return true;
        }
        (self.row, self.first_cost) = (Some(row), cost);
        self.idle_skip = false;
        let start = (self.completed == number).then(|| now.max(self.ended));
        self.open = Some(Open { opened: now, first: number, start });
        false
    }

    /// The launches so far are covered by no event of the segment that begins.
    fn carry(&mut self) {
        self.count = 0;
        self.carried += core::mem::take(&mut self.predicted);
    }

    /// The thread is about to wait for credit: its segment ends, and what is prepaid is given back.
    pub(super) fn wait(&mut self, now: Timestamp, measures_all: bool) {
        self.end(now, Ending::Waiting, measures_all);
        self.refused += core::mem::take(&mut self.prepaid);
    }

    /// Ends the segment, if any; what is open without one is settled as predicted.
    pub(super) fn end(&mut self, now: Timestamp, why: Ending, measures_all: bool) {
        self.awaited = self.predicted + self.carried;
        if self.awaited == 0 && self.count == 0 && self.open.is_none() {
            return;
        }
        let count = core::mem::take(&mut self.count);
        let presumed = core::mem::take(&mut self.presumed);
        let (predicted, carried) = (core::mem::take(&mut self.predicted), core::mem::take(&mut self.carried));
        // Kernels end in the order in which they were launched.
        let carried_presumed = presumed.min(carried);
        let presumed = (presumed - carried_presumed).min(predicted);
        let (predicted, carried) = (predicted - presumed, carried - carried_presumed);
        let Some(open) = self.open.take() else {
            self.skip = if measures_all { 0 } else { self.skip.saturating_sub(1) };
            self.settled += predicted + carried;
            return;
        };
        let short = why == Ending::Synchronising && predicted + presumed < WORTHWHILE_NS && !measures_all;
        (self.skip, self.idle_skip) = if short { (self.unmeasured, true) } else { (0, false) };
        if count == 0 {
            self.settled += predicted + carried;
            return;
        }
        let since_opened = now.saturating_since(open.opened).as_nanos();
        let dense = presumed == 0 && (since_opened < self.first_cost || self.completed < open.first);
        let segment = Segment {
            predicted,
            carried,
            presumed,
            launches: count,
            row: self.row.filter(|_| !self.mixed),
            dense,
            span: 0,
            gap: 0,
            record: 0,
            of: Measured::Run,
            opened: open.opened.as_nanos(),
        };
        self.record(now, open, self.launched - 1, segment);
    }

    fn record(&mut self, now: Timestamp, open: Open, last: u64, segment: Segment) {
        let start =
            open.start.or_else(|| (self.completed == open.first).then(|| open.opened.max(self.ended)));
        let end = (self.completed > last).then(|| now.max(self.ended));
        let first = open.first;
        self.under_way.push(Measurement { id: None, segment, first, last, closed: now, start, end });
    }

    /// The thread was woken from a synchronising call that began at `began`. One in four is timed.
    pub(super) fn synchronised(&mut self, began: Timestamp) {
        let (waited, predicted) = (self.ended.saturating_since(began).as_nanos(), self.awaited);
        let most = match waited {
            _ if waited <= 2 * predicted + 20_000 => u8::try_from(MEASURED_EVERY_NS / predicted.max(1))
                .map_or(UNMEASURED, |calls| calls.min(UNMEASURED)),
            _ if waited <= 8 * predicted + 200_000 => UNMEASURED_IN_DOUBT,
            _ => 0,
        };
        (self.skip, self.unmeasured) = (self.skip.min(most), most);
    }

    /// The oldest kernel that had not ended has.
    pub(super) fn complete(&mut self, ended: Timestamp) {
        let (number, before) = (self.completed, self.ended);
        for measurement in &mut self.under_way {
            if measurement.first == number {
                let opened = Timestamp::from_nanos(measurement.segment.opened);
                measurement.start.get_or_insert(opened.max(before));
            }
            if measurement.last == number {
                measurement.end = Some(ended.max(measurement.closed));
            }
        }
        if let Some(open) = self.open.as_mut().filter(|open| open.first == number) {
            open.start.get_or_insert(open.opened.max(before));
        }
        (self.completed, self.ended) = (number + 1, ended);
    }
}
