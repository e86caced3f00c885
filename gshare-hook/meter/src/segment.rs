//! Measurements of the host: runs of launches between two CUDA events.

use crate::cost::Row;

/// Predicted GPU time of a full segment, in ns.
///
/// Two events take 6 to 7 us of the device's time between kernels that follow each other: on an H100 products of 340 us lost 0.91 %
/// in segments of 400 us, and 0.36 % in segments of 2 ms. Half of the work that may be in flight is seen to complete in time then.
pub const FULL_NS: u64 = 2_000_000;
/// The same for an [early](is_early) segment of a run.
pub const FIRST_FULL_NS: u64 = 400_000;

/// Whether a run that has begun `begun` segments has short ones: it learns the cost of a new kernel from several of them, and until
/// then the charge is a guess.
pub const fn is_early(begun: u32) -> bool {
    begun <= 32
}

/// Credit that a run takes at once for short launches to come, in ns.
pub const PREPAY_NS: u64 = 8_000;
/// A segment shorter than this is not worth ending at every synchronising call, in ns.
pub const WORTHWHILE_NS: u64 = 100_000;
/// While such calls wait about as long as predicted, so much GPU time passes between two that end a segment, in ns, or
/// [`UNMEASURED`] calls: two events take microseconds. Fewer ([`UNMEASURED_IN_DOUBT`]) while the wait may be the host's doing, and
/// none while they wait longer still: a kernel has become longer than it was.
pub const MEASURED_EVERY_NS: u64 = 1_000_000;
/// The most synchronising calls between two that end a segment.
pub const UNMEASURED: u8 = 127;
/// The same while their wait may be the host's doing.
pub const UNMEASURED_IN_DOUBT: u8 = 7;

/// A launch that takes longer than this is measured well enough without keeping its stream waiting, in ns.
pub const SHORT_NS: u64 = 100_000;

/// The host's number of a measurement under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u64);

/// The part of an interval between two events in which the device may have worked for the launches between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Its length without the calls that may have kept the device waiting, in ns.
    pub length: u64,
    /// Its length with these calls, in ns: their work may have begun early in them.
    pub most: u64,
    /// Whether the device worked all the while. Otherwise the stream may have been empty for a part of it.
    pub whole: bool,
}

impl Work {
    /// The part of a segment's interval of this length, in ns.
    pub fn of(segment: &Segment, interval: u64) -> Self {
        let whole = segment.dense && interval > segment.span;
        // The second event of a stream that had run dry is as late as its own call.
        let late = if whole { 0 } else { segment.record };
        let length = interval.saturating_sub(segment.gap).saturating_sub(late);
        Self { length, most: if whole { length } else { interval }, whole }
    }

    /// The time that its launches are charged, in ns, where they are predicted to take `predicted`. `all`: the whole interval counts.
    pub fn taken(self, predicted: u64, all: bool) -> u64 {
        if self.whole && all { self.length } else { self.length.min(predicted) }
    }
}

/// Kind of launches that a measurement covers.
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
    /// Charged cost of launches before them on the stream that no event covers, in ns.
    pub carried: u64,
    /// Charged cost of those launches of the segment that were presumed complete before, in ns; not part of `predicted`.
    pub presumed: u64,
    /// Number of launches.
    pub launches: u32,
    /// The row of the cost table, if all launches have the same.
    pub row: Option<Row>,
    /// Whether the stream cannot have run dry between its launches: every launch was queued before the device was done with the
    /// first, and the stream waited for nothing else.
    pub dense: bool,
    /// Time by the host's clock from before the first event was recorded to after the second was, in ns. An interval that is no longer
    /// may hold nothing but these calls. 0 where the first event came behind other work of the stream.
    pub span: u64,
    /// The call of the first launch, as far as the stream was empty until it came through, in ns.
    pub gap: u64,
    /// The call that recorded the first event, in ns: the second one takes as long.
    pub record: u64,
    /// Kind of launches that the measurement covers.
    pub of: Measured,
    /// When the first launch was queued, in ns.
    pub opened: u64,
}
