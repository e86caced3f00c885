//! The work of a process on one device: segments under way, and the part of the time line that completed ones took.

use std::collections::VecDeque;

use crate::cost::CostTable;
use crate::device::REMAINDER;
use crate::learning::{LEAST, Learning, Sample};
use crate::segment::{Measured, Segment, SegmentId};
use crate::timing::{Behind, Coverage, Overlap, Turns, taken};

/// The device was idle for this process before a segment that began more than this behind the one before, in ns.
const IDLE_GAP: u64 = 20_000;
/// The work that may be queued while the cost of a kernel in it is not known yet, in ns.
pub(crate) const UNKNOWN: u64 = 1_000_000_000;

/// Segments under way and the time line of one device.
#[derive(Debug)]
pub(crate) struct Timeline {
    coverage: Coverage,
    /// Until when the device is known to have worked for this process, in ns.
    pub(crate) worked_until: u64,
    /// Since when a token keeps the device for this process, in ns; `u64::MAX` without one: others may be on it
    /// whenever this process is not.
    pub(crate) turn_began: u64,
    /// How long turns of this process waited for the end of others'.
    behind: Behind,
    pub(crate) turns: Turns,
    pub(crate) overlap: Overlap,
    learning: Learning,
    /// In the order in which their ends were recorded.
    running: VecDeque<(SegmentId, Segment)>,
    /// When something last completed, in ns.
    pub(crate) moved: u64,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        Self {
            coverage: Coverage::new(),
            worked_until: 0,
            turn_began: u64::MAX,
            behind: Behind::default(),
            turns: Turns::default(),
            overlap: Overlap::default(),
            learning: Learning::new(),
            running: VecDeque::new(),
            moved: 0,
        }
    }

    pub(crate) fn record(&mut self, id: SegmentId, segment: Segment) {
        self.running.push_back((id, segment));
    }

    /// Takes a segment out that is over.
    pub(crate) fn take(&mut self, id: SegmentId) -> Segment {
        let at = self.running.iter().position(|(other, _)| *other == id);
        let taken = at.and_then(|at| self.running.remove(at));
        taken.unwrap_or_else(|| panic!("segment {} is not being measured", id.0)).1
    }

    /// The measurement that has been under way for longest.
    pub(crate) fn oldest(&self) -> Option<SegmentId> {
        self.running.front().map(|(id, _)| *id)
    }

    /// Whether nothing is being measured.
    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Gives the GPU time, in ns, that a segment which ran from `start` to `end` adds to the time line; learns from it.
    pub(crate) fn measure(
        &mut self,
        costs: &CostTable,
        segment: &Segment,
        (start, end): (u64, u64),
        crowded: bool,
    ) -> u64 {
        let oldest = self.running.iter().map(|(_, other)| other.opened).min();
        let oldest = oldest.map_or(segment.opened, |oldest| oldest.min(segment.opened));
        let length = end.saturating_sub(start);
        // The first work of a turn may hold the end of another process's turn, and work that is over after its own turn was handed
        // over the beginning of one. Keeping a stream waiting made the device idle by itself.
        let held = segment.of == Measured::Held;
        let comes_first = self.is_first(if held { segment.opened } else { start });
        let shared = comes_first || self.turns.outlasted(segment.opened, end) || (held && crowded);
        self.worked_until = self.worked_until.max(end);
        let start = start + segment.gap.min(length.saturating_sub(LEAST));
        let length = end.saturating_sub(start);
        let known = segment.row.and_then(|row| costs.known(row));
        if let Some(row) = segment.row {
            let room = self.coverage.room(start, end);
            self.learning.take(costs, segment, row, Sample { length, room, shared, crowded });
        }
        if let Some(known) = known.filter(|_| segment.dense && comes_first) {
            let launches = u64::from(segment.launches);
            self.behind.seen(length.saturating_sub(known * launches).min(REMAINDER));
        }
        let predicted = match segment.row.and_then(|row| costs.known(row)) {
            Some(cost) => cost * u64::from(segment.launches.max(1)),
            None => segment.predicted + segment.presumed,
        };
        let dense = segment.dense && (!shared || (known.is_none() && segment.row.is_some()));
        let growth = self.coverage.add(start, end, taken(length, predicted, dense), oldest);
        self.overlap.seen(segment.opened, segment.predicted + segment.presumed, growth);
        growth
    }

    /// GPU time that is queued now, in ns, where `in_flight` is launched: less what the device must have done since.
    pub(crate) fn queued(&self, costs: &CostTable, in_flight: u64, now: u64) -> u64 {
        if self.has_unknown_cost(costs) {
            // The charge is a guess: only its end will tell.
            in_flight.max(UNKNOWN)
        } else if self.running.is_empty() {
            in_flight
        } else {
            in_flight.saturating_sub(now.saturating_sub(self.began_at(now)))
        }
    }

    /// Whether the cost of anything under way is a guess.
    pub(crate) fn has_unknown_cost(&self, costs: &CostTable) -> bool {
        let unknown =
            |(_, segment): &(SegmentId, Segment)| segment.row.is_some_and(|row| costs.known(row).is_none());
        self.running.iter().any(unknown)
    }

    /// When the oldest segment that is not known to be over began, at the latest, in ns.
    pub(crate) fn began_at(&self, now: u64) -> u64 {
        let Some((_, segment)) = self.running.front() else { return now };
        let behind = if self.is_first(segment.opened) { self.behind.most() } else { 0 };
        self.worked_until.max(segment.opened.saturating_add(behind)).min(now)
    }

    /// Answers if another process's work may have been on the device just before `start` (ns): the device was idle for this process, and
    /// none of its work is known to have ended within this turn.
    fn is_first(&self, start: u64) -> bool {
        start > self.worked_until + IDLE_GAP && self.worked_until < self.turn_began
    }
}
