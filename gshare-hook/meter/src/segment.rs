//! Measurements of the host: runs of launches between two CUDA events.

use crate::cost::Row;

/// A launch that takes longer than this is measured well enough without keeping its stream waiting, in ns.
pub const SHORT_NS: u64 = 20_000;

/// The host's number of a measurement under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u64);

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
    /// Whether the stream cannot have run dry within it: every launch was queued before the device was done with the first.
    pub dense: bool,
    /// Time before the first kernel could start that is no GPU time, in ns.
    pub gap: u64,
    /// Kind of launches that the measurement covers.
    pub of: Measured,
    /// When the first launch was queued, in ns.
    pub opened: u64,
}
