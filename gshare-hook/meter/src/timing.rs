//! GPU time from intervals: how much of the device's time line a set of overlapping intervals takes.
//!
//! # Problem
//! Kernels are measured in **segments**, runs of launches on one stream between two CUDA events. Two streams that run at
//! the same time use the device once. And the time between two events is not the time that the device worked: a launch call
//! takes microseconds, and while the program is inside of it a stream with short kernels is empty. Segments become known in
//! any order.
//!
//! # What a segment takes
//! An interval is never shorter than the kernels in it, but it is longer when the stream ran dry in between, or waited for the host or
//! for another stream. [`Work`](crate::segment::Work) tells by two clocks: the stream cannot have run dry when every launch was queued
//! before the device was done with the first, and the interval outlasts the calls that were made in it. Such a segment takes all of
//! its interval; any other what its launches are predicted to take, and its interval at most. For a program that keeps the device
//! waiting everything thus depends on the predicted cost of its kernels, and that is measured where the device does not wait: the hook
//! keeps the stream waiting for one launch (`hold.rs` there).
//!
//! # Algorithm
//! [`Coverage`] keeps disjoint pieces of the time line, sorted, each with how much of it is taken. A segment spreads its work
//! evenly over its interval, where there is room; the rest was another stream's at the same time. The time that it adds
//! is its **growth**. The growths of segments without a pause sum to the length of the union, those of others to the sum
//! of their work as long as that fits: kernels of several streams are held to run one after the other, unless both streams
//! were seen to be busy throughout. Pieces more than [`MEMORY_NS`] behind the newest end, and behind all that still runs, are
//! folded away; a straggler from further back finds that time taken.
//!
//! Worked example, in us: [0, 10) without a pause grows 10; [5, 12) on another stream 2; [3, 7) nothing. Then [20, 30),
//! which takes 4, grows 4; [20, 30) on another stream, which takes 4, grows 4; and a third one 2.

use core::sync::atomic::{AtomicU64, Ordering};
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

/// The parts of a time line that are taken, in ns.
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

    /// Takes `amount` of `[start, end)`, evenly and where there is room; gives how much that was. Nothing that runs has begun before
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
        // The part of the amount that did not fit in its place goes where there is room.
        for piece in &mut within {
            let fits = (amount - added).min(piece.room());
            piece.taken += fits;
            added += fits;
        }
        self.put_back(first, within);
        self.fold(oldest);
        added
    }

    /// Takes the pieces of `[start, end)` out, whole, with new ones where there are none; and where they were.
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

    /// Puts pieces in their place; those that are full become one with full ones beside them.
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

    /// Folds away what is too far back to matter.
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

/// How long turns of this process waited for the end of others' lately, in ns: the longest of that, a quarter less with each turn.
///
/// Turns are handed over a little before they are over, by when they are predicted to be. If each took its work to begin when it
/// was launched, it would be over later than predicted by what it waited, the next one later still, and so on, until kernels of
/// several processes wait in the device and are measured with each other. What counts as waited is at most how much earlier
/// turns are handed over: a turn that waited longer hands over a little less early, and so the excess goes away.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behind(u64);

impl Behind {
    /// A turn waited for this time, in ns.
    pub fn seen(&mut self, waited: u64) {
        self.0 = waited.max(self.0 - self.0 / 4);
    }

    /// How long the next one may wait, in ns.
    pub fn most(self) -> u64 {
        self.0
    }
}

/// The turns of this process, as far as they touch others': how many it handed over, and when it did so last (in ns).
#[derive(Clone, Copy, Debug, Default)]
pub struct Turns {
    handed_over: u64,
    last: u64,
}

impl Turns {
    /// The turn is another's from now on.
    pub fn hand_over(&mut self, now: u64) {
        (self.handed_over, self.last) = (self.handed_over + 1, now);
    }

    /// True if the work of this turn is to be over before it is handed over: of the first four turns, and of one in sixteen. The
    /// next process then measures its first kernel without the end of this turn, which it cannot tell from it.
    pub fn ends_first(self) -> bool {
        self.handed_over < 4 || self.handed_over.is_multiple_of(16)
    }

    /// Whether what was launched at `opened` and over at `end` ran beside the beginning of another's turn.
    pub fn outlasted(self, opened: u64, end: u64) -> bool {
        opened < self.last && self.last < end
    }
}

/// Short work that several threads wait for, each for its own, may run at the same time; and most of it is not measured. Now and
/// then all of it is for a few milliseconds: what that covered, as a part of what it was predicted to take, is what the rest is
/// charged until the next time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overlap {
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

    /// Work that was launched at `opened`, predicted to take that long, covered so much that nothing else had.
    pub fn seen(&mut self, opened: u64, predicted: u64, covered: u64) {
        if (self.until.saturating_sub(Self::WINDOW)..self.until).contains(&opened) {
            self.predicted += predicted;
            self.covered += covered;
        }
    }

    /// The charge for work that was predicted to take this long and was not measured, in ns.
    pub fn of(&self, predicted: u64) -> u64 {
        let part = self.part.unwrap_or(1024);
        u64::try_from(u128::from(predicted) * u128::from(part) / 1024).unwrap_or(predicted)
    }
}

/// How long a call that launches a kernel takes: the part of a measured interval in which the device waited for it.
///
/// A call that was interrupted takes longer, and its kernel may have run meanwhile. So at most twice the usual time is taken for the
/// call's own. What is usual falls half-way to a shorter call, and rises by a quarter at most; a first call may load the kernel, and
/// counts for no more than [`FIRST`](Self::FIRST).
#[derive(Debug, Default)]
pub struct CallTime(AtomicU64);

impl CallTime {
    /// The most that a first call counts for, in ns.
    const FIRST: u64 = 50_000;

    /// A call took this long, in ns.
    pub fn seen(&self, ns: u64) {
        let next = match self.0.load(Ordering::Relaxed) {
            0 => ns.min(Self::FIRST),
            usual if ns < usual => u64::midpoint(ns, usual),
            usual => usual + (ns - usual).min(usual / 4 + 1),
        };
        self.0.store(next, Ordering::Relaxed);
    }

    /// The most that is taken for a call's own time, in ns.
    pub fn most(&self) -> u64 {
        2 * self.0.load(Ordering::Relaxed)
    }
}
