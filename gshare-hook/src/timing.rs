//! GPU time from intervals: how much of the device's time line a set of overlapping intervals covers.
//!
//! # Problem
//! Kernels are measured in **segments**, runs of launches on one stream between two CUDA events. Two streams that run at
//! the same time use the device once: their segments are merged (union), not summed. Segments become known in any order.
//!
//! # Algorithm
//! [`Coverage`] keeps disjoint intervals, sorted. Adding one gives its **growth**, the part that was not covered before;
//! the growths of all segments sum to the length of the union, in whatever order they come. Intervals more than
//! [`MEMORY_NS`] behind the newest end, and behind whatever still runs, are folded away; a straggler from further back finds that
//! time covered.
//!
//! Worked example, in us: [0, 10) grows 10; [5, 12) on another stream grows 2; [3, 7) grows 0; union 12.
//!
//! # What a segment is charged
//! An interval is never shorter than the kernels in it, but it is longer when the stream ran dry in between. A segment
//! is **dense** when it cannot have: every launch was queued before the device came to the first of them. Dense segments
//! are charged their growth; others the smaller of growth and prediction ([`charge`]).

use std::collections::VecDeque;

/// How far back intervals are remembered, in ns.
pub(crate) const MEMORY_NS: u64 = 2_000_000_000;

/// The covered part of a time line, in ns.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// Disjoint, ascending, with gaps between them.
    covered: VecDeque<(u64, u64)>,
    /// Everything before this counts as covered.
    horizon: u64,
}

impl Coverage {
    /// Nothing covered.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Covers `[start, end)`; gives the length that was not covered before. Nothing that runs has begun before `oldest`.
    pub(crate) fn add(&mut self, start: u64, end: u64, oldest: u64) -> u64 {
        let start = start.max(self.horizon);
        if end <= start {
            return 0;
        }
        let first = self.covered.partition_point(|&(_, e)| e < start);
        let (mut low, mut high, mut already) = (start, end, 0);
        let mut last = first;
        while let Some(&(s, e)) = self.covered.get(last).filter(|&&(s, _)| s <= end) {
            already += e.min(end).saturating_sub(s.max(start));
            (low, high) = (low.min(s), high.max(e));
            last += 1;
        }
        self.covered.drain(first..last);
        self.covered.insert(first, (low, high));
        self.fold(oldest);
        end - start - already
    }

    /// Folds away what is too far back to matter.
    fn fold(&mut self, oldest: u64) {
        let newest = self.covered.back().map_or(0, |&(_, e)| e);
        let line = newest.min(oldest).saturating_sub(MEMORY_NS);
        while let Some(&(s, e)) = self.covered.front().filter(|&&(s, _)| s < line) {
            self.horizon = self.horizon.max(e.min(line));
            if e <= line {
                self.covered.pop_front();
            } else {
                self.covered[0] = (line.max(s), e);
                break;
            }
        }
    }
}

/// How long turns of this process waited for the end of others' lately, in ns: the longest of that, a quarter less with each turn.
///
/// Turns are handed over a little before they are over, by when they are predicted to be. If each took its work to begin when it
/// was launched, it would be over later than predicted by what it waited, the next one later still, and so on, until kernels of
/// several processes wait in the device and are measured with each other. What counts as waited is at most how much earlier
/// turns are handed over: a turn that waited longer hands over a little less early, and so the excess goes away.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Behind(u64);

impl Behind {
    /// A turn waited so long.
    pub(crate) fn seen(&mut self, waited: u64) {
        self.0 = waited.max(self.0 - self.0 / 4);
    }

    /// How long the next one may wait, in ns.
    pub(crate) fn most(self) -> u64 {
        self.0
    }
}

/// The turns of this process, as far as they touch others': how many it handed over, and when it did so last (in ns).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turns {
    handed_over: u64,
    last: u64,
}

impl Turns {
    /// The turn is another's from now on.
    pub(crate) fn hand_over(&mut self, now: u64) {
        (self.handed_over, self.last) = (self.handed_over + 1, now);
    }

    /// Whether the work of this turn is to be over before it is handed over: of the first four turns, and of one in sixteen. Whoever
    /// comes next then measures its first kernel without the end of this turn, which it cannot tell from it.
    pub(crate) fn ends_first(self) -> bool {
        self.handed_over < 4 || self.handed_over.is_multiple_of(16)
    }

    /// Whether what was launched at `opened` and over at `end` ran beside the beginning of another's turn.
    pub(crate) fn outlasted(self, opened: u64, end: u64) -> bool {
        opened < self.last && self.last < end
    }
}

/// Short work that several threads wait for, each for its own, may run at the same time; and most of it is not measured. Now and
/// then all of it is for a few milliseconds: what that covered, as a part of what it was predicted to take, is what the rest is
/// charged until the next time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Overlap {
    /// The part, in 1024ths; `None` before it was first measured.
    part: Option<u64>,
    predicted: u64,
    covered: u64,
    /// Until when everything is measured, and when that begins again, in ns.
    until: u64,
    next: u64,
}

impl Overlap {
    /// For how long everything is measured, and how often, in ns: two events to a launch are a few hundredths of short ones.
    const WINDOW: u64 = 4_000_000;
    const EVERY: u64 = 100_000_000;

    /// Whether everything is to be measured now; `threads` wait for work of theirs.
    pub(crate) fn look(&mut self, now: u64, threads: usize) -> bool {
        if now < self.until {
            return true;
        }
        if self.predicted > 0 {
            let part = (u128::from(self.covered) * 1024 / u128::from(self.predicted)).min(1024);
            let part = u64::try_from(part).unwrap_or(1024);
            self.part = Some(self.part.map_or(part, |before| u64::midpoint(before, part)));
            (self.predicted, self.covered) = (0, 0);
        }
        if threads < 2 {
            self.part = None;
        } else if now >= self.next {
            (self.until, self.next) = (now + Self::WINDOW, now + Self::EVERY);
            return true;
        }
        false
    }

    /// Work that was launched at `opened`, predicted to take that long, covered so much that nothing else had.
    pub(crate) fn seen(&mut self, opened: u64, predicted: u64, covered: u64) {
        if (self.until.saturating_sub(Self::WINDOW)..self.until).contains(&opened) {
            self.predicted += predicted;
            self.covered += covered;
        }
    }

    /// What work that was not measured is charged of the time that it was predicted to take.
    pub(crate) fn of(&self, predicted: u64) -> u64 {
        let part = self.part.unwrap_or(1024);
        u64::try_from(u128::from(predicted) * u128::from(part) / 1024).unwrap_or(predicted)
    }
}

/// What a segment costs, in ns: `growth` of the coverage, `predicted` for its launches.
pub(crate) fn charge(growth: u64, predicted: u64, dense: bool) -> u64 {
    if dense { growth } else { growth.min(predicted) }
}
