//! Measurements of the host: runs of launches between two CUDA events.

use crate::cost::Row;

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
/// A shorter segment is not worth ending at every synchronising call, in ns.
pub const WORTHWHILE_NS: u64 = 100_000;
/// GPU time, in ns, between two synchronising calls that end a segment, or [`UNMEASURED`] calls, while such calls wait about as
/// long as predicted: two events take microseconds. Only [`UNMEASURED_IN_DOUBT`] calls lie between them while the wait may be due
/// to the host. None do while calls wait longer still, since a kernel has become longer.
pub const MEASURED_EVERY_NS: u64 = 1_000_000;
/// The most synchronising calls between two calls that end a segment.
pub const UNMEASURED: u8 = 127;
/// The most such calls while their wait may be due to the host.
pub const UNMEASURED_IN_DOUBT: u8 = 7;

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
    /// first, and the stream waited for nothing else.
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
}
