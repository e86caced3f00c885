//! Measurements of the host: runs of launches between two CUDA events.

use crate::cost::Row;

/// Longer launches are measured well enough without keeping their stream waiting, in ns.
pub const SHORT_NS: u64 = 100_000;

/// The host's number of a measurement under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u64);

/// The part of an interval between two events in which the device may have worked for the launches between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Length without the calls that may have kept the device waiting, in ns.
    pub length: u64,
    /// Length with these calls, in ns: the work may have begun early in a call.
    pub most: u64,
    /// Whether the device worked all the while. Otherwise the stream may have been empty for a part of it.
    pub whole: bool,
}

impl Work {
    /// The part of a segment's interval of this length, in ns.
    pub fn of(segment: &Segment, interval: u64) -> Self {
        let whole = segment.dense && interval > segment.span;
        // If the stream ran dry, the second event is late by the duration of its own call.
        let late = if whole { 0 } else { segment.record };
        let length = interval.saturating_sub(segment.gap).saturating_sub(late);
        Self { length, most: if whole { length } else { interval }, whole }
    }

    /// The time charged for the launches with this predicted time, in ns. `all`: the whole interval counts.
    pub fn taken(self, predicted: u64, all: bool) -> u64 {
        if self.whole && all { self.length } else { self.length.min(predicted) }
    }
}

/// The kind of launches covered by a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// A part of a run of launches.
    Run,
    /// The first launch of a function, of which nothing was known.
    First,
    /// One launch alone.
    Alone,
    /// One launch alone, with its stream kept waiting until it was queued.
    Held,
}

/// A measurement under way: consecutive launches of one thread on one stream, between two events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Charged cost of the launches, in ns.
    pub predicted: u64,
    /// Charged cost of earlier launches on the stream without an event, in ns.
    pub carried: u64,
    /// Charged cost of the segment's launches that were presumed complete before, in ns; not part of `predicted`.
    pub presumed: u64,
    /// Number of launches.
    pub launches: u32,
    /// The row of the cost table, if all launches have the same.
    pub row: Option<Row>,
    /// Whether the stream cannot have run dry between its launches: every launch was queued before the device was done with the
    /// first.
    pub dense: bool,
    /// Time by the host's clock from before the first event was recorded until after the second was, in ns. An interval of at most
    /// this length may hold only these calls. 0 if the first event came behind other work of the stream.
    pub span: u64,
    /// The part of the first launch's call during which the stream was empty, in ns.
    pub gap: u64,
    /// Duration of the call that recorded the first event, in ns; the second takes as long.
    pub record: u64,
    /// The kind of launches covered.
    pub of: Measured,
    /// When the first launch was queued, in ns.
    pub opened: u64,
    /// Whether the launches are queued behind a wait of the stream that is not known to be over.
    pub behind_wait: bool,
}

#[cfg(test)]
impl Segment {
    /// One launch measured by itself, for tests.
    pub(crate) fn of_one(row: Row, predicted: u64, of: Measured, opened: u64) -> Self {
        let (carried, presumed, span, gap, record) = (0, 0, 0, 0, 0);
        let (launches, row, dense, behind_wait) = (1, Some(row), true, false);
        Self {
            predicted,
            carried,
            presumed,
            launches,
            row,
            dense,
            span,
            gap,
            record,
            of,
            opened,
            behind_wait,
        }
    }
}
