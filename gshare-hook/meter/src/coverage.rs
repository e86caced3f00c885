//! GPU time from intervals: the part of the device's time line taken by a set of overlapping intervals.
//!
//! # Problem
//! Kernels are measured in **segments**, runs of launches on one stream between two CUDA events. Two streams with simultaneous work
//! use the device once. The device also need not work all the time between two events: a launch call takes microseconds, during
//! which a stream with short kernels is empty. Segments become known in any order.
//!
//! # Time of a segment
//! An interval is never shorter than the kernels in it, but it is longer if the stream ran dry in between, or waited for the host
//! or for another stream. [`Work`](crate::segment::Work) compares two clocks: the stream cannot have run dry if every launch was
//! queued before the device had finished the first, and if the interval outlasts the calls made in it. Such a segment takes its
//! whole interval. Any other segment takes the predicted cost of its launches, and its interval at most. A program with calls that keep
//! the device waiting is thus charged by the predicted cost of its kernels. The hook measures this cost without such gaps: it keeps
//! the stream waiting for one launch (`hold.rs` there).
//!
//! # Algorithm
//! [`Coverage`] keeps disjoint pieces of the time line, sorted, each with its taken part. A segment spreads its work evenly over
//! the room in its interval; another stream has used the rest at the same time. The time added by a segment is its **growth**. The
//! growths of segments without a pause sum to the length of the union. Those of other segments sum to their work if it fits:
//! kernels of several streams are taken to run one after the other, unless both streams were seen to be busy throughout. Pieces
//! more than [`MEMORY_NS`] before the newest end and before all running work are folded away, so a later segment finds that time
//! taken.
//!
//! Worked example, in us: [0, 10) without a pause grows 10; [5, 12) on another stream 2; [3, 7) nothing. Then [20, 30) with a work
//! of 4 grows 4; [20, 30) on another stream with a work of 4 grows 4, and on a third stream 2.

use std::collections::VecDeque;

/// How far back intervals are remembered, in ns.
pub const MEMORY_NS: u64 = 2_000_000_000;

/// A piece of the time line, and how much of it is taken, evenly; in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: u64,
    end: u64,
    taken: u64,
}

impl Piece {
    fn length(self) -> u64 {
        self.end - self.start
    }

    fn room(self) -> u64 {
        self.length() - self.taken
    }

    /// The parts before and behind `at`, which lies within.
    fn split(self, at: u64) -> (Self, Self) {
        let before = part(self.taken, at - self.start, self.length());
        (Self { end: at, taken: before, ..self }, Self { start: at, taken: self.taken - before, ..self })
    }
}

/// `of` times `some` by `all`.
fn part(of: u64, some: u64, all: u64) -> u64 {
    u64::try_from(u128::from(of) * u128::from(some) / u128::from(all.max(1))).unwrap_or(of)
}

/// The taken parts of a time line, in ns.
#[derive(Debug, Default)]
pub struct Coverage {
    /// Disjoint, ascending.
    pieces: VecDeque<Piece>,
    /// Everything before this counts as taken.
    horizon: u64,
}

impl Coverage {
    /// Nothing taken.
    pub fn new() -> Self {
        Self::default()
    }

    /// How much of `[start, end)` is not taken.
    pub fn room(&self, start: u64, end: u64) -> u64 {
        let start = start.max(self.horizon);
        let first = self.pieces.partition_point(|piece| piece.end <= start);
        let within = self.pieces.range(first..).take_while(|piece| piece.start < end);
        let taken: u64 = within
            .map(|piece| {
                let length = piece.end.min(end) - piece.start.max(start);
                part(piece.taken, length, piece.length())
            })
            .sum();
        end.saturating_sub(start) - taken
    }

    /// Takes `amount` of `[start, end)`, evenly and where there is room; returns the time taken. No running work has begun before
    /// `oldest`.
    pub fn add(&mut self, start: u64, end: u64, amount: u64, oldest: u64) -> u64 {
        let whole = end.saturating_sub(start);
        let start = start.max(self.horizon);
        if end <= start || amount == 0 {
            return 0;
        }
        let amount = part(amount.min(whole), end - start, whole);
        let (first, mut within) = self.cut_out(start, end);
        let (mut left, mut length, mut added) = (amount, end - start, 0);
        for piece in &mut within {
            let share = part(left, piece.length(), length);
            (left, length) = (left - share, length - piece.length());
            let fits = share.min(piece.room());
            piece.taken += fits;
            added += fits;
        }
        // The rest of the amount, which did not fit in its place, goes to pieces with room.
        for piece in &mut within {
            let fits = (amount - added).min(piece.room());
            piece.taken += fits;
            added += fits;
        }
        self.put_back(first, within);
        self.fold(oldest);
        added
    }

    /// Takes the pieces of `[start, end)` out, whole, with new pieces in the gaps. Also returns the index at which they were.
    fn cut_out(&mut self, start: u64, end: u64) -> (usize, Vec<Piece>) {
        let mut first = self.pieces.partition_point(|piece| piece.end <= start);
        if let Some(piece) = self.pieces.get(first).copied().filter(|piece| piece.start < start) {
            let (before, within) = piece.split(start);
            self.pieces[first] = within;
            self.pieces.insert(first, before);
            first += 1;
        }
        let mut last = first;
        while self.pieces.get(last).is_some_and(|piece| piece.start < end) {
            last += 1;
        }
        if let Some(piece) = self.pieces.get(last.wrapping_sub(1)).copied()
            && last > first
            && piece.end > end
        {
            let (within, behind) = piece.split(end);
            self.pieces[last - 1] = within;
            self.pieces.insert(last, behind);
        }
        let (mut within, mut at) = (Vec::with_capacity(2 * (last - first) + 1), start);
        for piece in self.pieces.drain(first..last) {
            if piece.start > at {
                within.push(Piece { start: at, end: piece.start, taken: 0 });
            }
            within.push(piece);
            at = piece.end;
        }
        if at < end {
            within.push(Piece { start: at, end, taken: 0 });
        }
        (first, within)
    }

    /// Puts pieces back in their place, and merges full pieces with full neighbours.
    fn put_back(&mut self, first: usize, within: Vec<Piece>) {
        let mut at = first;
        for piece in within.into_iter().filter(|piece| piece.taken > 0) {
            match at.checked_sub(1).and_then(|before| self.pieces.get_mut(before)) {
                Some(before) if before.end == piece.start && before.room() == 0 && piece.room() == 0 => {
                    before.end = piece.end;
                    before.taken += piece.taken;
                }
                _ => {
                    self.pieces.insert(at, piece);
                    at += 1;
                }
            }
        }
        let pair = at.checked_sub(1).and_then(|last| Some((*self.pieces.get(last)?, *self.pieces.get(at)?)));
        if let Some((last, next)) = pair
            && last.end == next.start
            && last.room() == 0
            && next.room() == 0
        {
            self.pieces[at] = Piece { start: last.start, end: next.end, taken: last.taken + next.taken };
            self.pieces.remove(at - 1);
        }
    }

    /// Folds pieces away once they are too old to matter.
    fn fold(&mut self, oldest: u64) {
        let newest = self.pieces.back().map_or(0, |piece| piece.end);
        let line = newest.min(oldest).saturating_sub(MEMORY_NS);
        while let Some(piece) = self.pieces.front().copied().filter(|piece| piece.start < line) {
            self.horizon = self.horizon.max(piece.end.min(line));
            if piece.end <= line {
                self.pieces.pop_front();
            } else {
                self.pieces[0] = piece.split(line).1;
                break;
            }
        }
    }
}

/// The recent wait of this process's turns for the end of other processes' turns, in ns: a maximum, reduced by a quarter with each
/// turn.
///
/// Turns are handed over a little before their predicted end. Suppose each turn took its work to begin at the launch: it would end
/// later than predicted by the time of its wait. The following turn would end later still, and so on, until kernels of several
/// processes wait in the device and are measured with each other. The wait counts for at most the time by which turns are handed
/// over early. A turn with a longer wait therefore hands over a little less early, and the excess goes away.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behind(u64);

impl Behind {
    /// A turn waited for this time, in ns.
    pub fn seen(&mut self, waited: u64) {
        self.0 = waited.max(self.0 - self.0 / 4);
    }

    /// The longest wait to expect of the following turn, in ns.
    pub fn most(self) -> u64 {
        self.0
    }
}

/// The handovers of this process's turns to other processes: their number, and the time of the last, in ns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turns {
    handed_over: u64,
    last: u64,
}

impl Turns {
    /// Hands the turn over to another process.
    pub fn hand_over(&mut self, now: u64) {
        (self.handed_over, self.last) = (self.handed_over + 1, now);
    }

    /// Whether the turn's work must end before the handover, as for the first four turns and one in sixteen after them. The next
    /// process then measures its first kernel without the end of this turn, which it could not tell apart.
    pub fn ends_first(self) -> bool {
        self.handed_over < 4 || self.handed_over.is_multiple_of(16)
    }

    /// Whether work launched at `opened` and over at `end` ran beside the beginning of another process's turn.
    pub fn outlasted(self, opened: u64, end: u64) -> bool {
        opened < self.last && self.last < end
    }
}

/// The charge for unmeasured short work of several threads, each of which waits for its own.
///
/// Such work may run at the same time, and most of it is not measured. Now and then all of it is measured for a few milliseconds.
/// The time covered then, as a part of the predicted time, scales the charge for unmeasured work until the next such window.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overlap {
    /// The part, in 1024ths; `None` before the first window.
    part: Option<u64>,
    predicted: u64,
    covered: u64,
    /// The end of the present window, in which everything is measured, and the start of the next, in ns.
    until: u64,
    next: u64,
}

impl Overlap {
    /// Length of a window and interval between two windows, in ns: two events per launch add a few hundredths to short launches.
    const WINDOW: u64 = 4_000_000;
    const EVERY: u64 = 100_000_000;

    /// Whether everything is to be measured now. `threads` wait for work of their own.
    pub fn look(&mut self, now: u64, threads: usize) -> bool {
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

    /// Notes the launches from `opened`: their predicted time, and the time covered by them alone.
    pub fn seen(&mut self, opened: u64, predicted: u64, covered: u64) {
        if (self.until.saturating_sub(Self::WINDOW)..self.until).contains(&opened) {
            self.predicted += predicted;
            self.covered += covered;
        }
    }

    /// The charge, in ns, for unmeasured work with this predicted time.
    pub fn of(&self, predicted: u64) -> u64 {
        let part = self.part.unwrap_or(1024);
        u64::try_from(u128::from(predicted) * u128::from(part) / 1024).unwrap_or(predicted)
    }
}
