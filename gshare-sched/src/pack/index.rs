//! The class index: the best free rectangle over all GPUs, at a cost that does not depend on their number.
//!
//! # Problem
//! Best area fit (FaST-GShare, Algorithm 2, line 1) looks at every free rectangle of every GPU: 0.1 ms and more per demand
//! at 10 000 GPUs. The answer is the smallest rectangle in a fixed order, so an index finds it directly.
//!
//! # Algorithm
//! A free rectangle w x h belongs to the class (w / 100, h / 100): column and row in whole per cents, 0 to 100 each. Per
//! class there is an ordered set of (area, short side, GPU); per column a bit mask of its rows that are not empty, and for
//! every eighth row one of the columns that reach it. For a demand w x h, walk the columns from its own rightwards that
//! reach its row, and in each the set bits from that row upwards; stop a column, and then the walk, as soon as the smallest
//! area that a class could hold exceeds the best found. In a class above the demand in both axes every entry fits, so its
//! first one is its best; in a class of the demand's own column or row an entry is tested, and a size that does not fit is
//! skipped whole.
//!
//! Worked example, in per cent: a demand of 24 x 60, free rectangles of 40 x 76 and 60 x 60. Columns 24 to 39 are empty. In
//! column 40 the first bit from row 60 upwards is row 76: area 3040. Columns 41 to 50 are empty. In column 51 even 51 x 60
//! = 3060 is more, so the walk ends and 60 x 60 is never looked at.
//!
//! GPUs without placements are kept apart, by size, and asked last: an open GPU with a hole is always preferred to another
//! GPU.
//!
//! A key is a number of 63 bits: area (27), short side (14), GPU (21), orientation (1, tells a x b from b x a), in the
//! order in which they decide.
//!
//! # Cost
//! A few classes are visited per demand; each costs one to three node visits of [`Sets`]. 80 KiB for the class roots, and 8
//! bytes a free rectangle. A filter (memory, predicate) walks on to the next entry, so a demand for scarce memory can visit
//! every open GPU.
#![expect(
    clippy::cast_possible_truncation,
    reason = "a class number is at most 100, and the fields of a key are as wide as they were packed"
)]

use super::geometry::{Rect, SIDE_BITS};
use super::ids::Ids;
use super::sets::{Cursor, Sets};

const CLASSES: usize = 101;
/// Rows of a band.
const BAND: usize = 8;
const ORIENTATION_BITS: u32 = 1;
const GPU_BITS: u32 = 21;
const SIZE_SHIFT: u32 = ORIENTATION_BITS + GPU_BITS;

/// GPU ids lie below this.
pub(crate) const MAX_GPUS: u32 = 1 << GPU_BITS;

/// A free rectangle that was found, by its rank: area, short side and GPU, in the order in which they decide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hole(u64);

impl Hole {
    #[inline]
    fn of_rank(rank: u64) -> Option<Self> {
        (rank != u64::MAX).then_some(Self(rank))
    }

    pub(crate) fn new(hole: Rect, gpu: u32) -> Self {
        Self(hole.extent() << GPU_BITS | u64::from(gpu))
    }

    #[inline]
    pub(crate) const fn gpu(self) -> u32 {
        self.0 as u32 % MAX_GPUS
    }

    /// The [`Rect::extent`] of it.
    #[inline]
    pub(crate) const fn extent(self) -> u64 {
        self.0 >> GPU_BITS
    }
}

/// The free rectangles of all GPUs, by size. A size counts once per GPU.
#[derive(Debug, Clone)]
pub(crate) struct ClassIndex {
    sets: Sets,
    /// The GPUs without placements by their size, of which a pool has few.
    empties: Vec<(Rect, Ids)>,
    /// Bit h of row w: the class (w, h) is not empty.
    rows: [u128; CLASSES],
    /// Bit w of band b: column w has a row at or above the first of the band that is not empty.
    reach: [u128; CLASSES.div_ceil(BAND)],
}

impl Default for ClassIndex {
    fn default() -> Self {
        Self {
            sets: Sets::new(CLASSES * CLASSES),
            empties: Vec::new(),
            rows: [0; CLASSES],
            reach: [0; CLASSES.div_ceil(BAND)],
        }
    }
}

impl ClassIndex {
    #[inline]
    pub(crate) fn insert(&mut self, size: Rect, gpu: u32) {
        let (column, row) = class_of(size);
        let set = column * CLASSES + row;
        if self.sets.is_empty(set) {
            self.mark(column, row, true);
        }
        self.sets.insert(set, key_of(size, gpu));
    }

    #[inline]
    pub(crate) fn remove(&mut self, size: Rect, gpu: u32) {
        let (column, row) = class_of(size);
        let set = column * CLASSES + row;
        self.sets.remove(set, key_of(size, gpu));
        if self.sets.is_empty(set) {
            self.mark(column, row, false);
        }
    }

    /// The class has its first entry, or lost its last.
    #[inline(never)]
    fn mark(&mut self, column: usize, row: usize, filled: bool) {
        let (rows, bit) = (&mut self.rows[column], 1 << row);
        *rows &= !bit;
        if *rows < bit {
            for band in &mut self.reach[bands(*rows)..=row / BAND] {
                *band = *band & !(1 << column) | u128::from(filled) << column;
            }
        }
        *rows |= u128::from(filled) << row;
    }

    pub(crate) fn insert_empty(&mut self, size: Rect, gpu: u32) {
        let known = self.empties.iter().position(|(known, _)| *known == size);
        let at = known.unwrap_or_else(|| {
            self.empties.push((size, Ids::default()));
            self.empties.len() - 1
        });
        self.empties[at].1.insert(gpu);
    }

    pub(crate) fn remove_empty(&mut self, size: Rect, gpu: u32) {
        if let Some((_, ids)) = self.empties.iter_mut().find(|(known, _)| *known == size) {
            ids.remove(gpu);
        }
    }

    /// The smallest free rectangle (area, short side, GPU) of an open GPU that holds w x h and that `accept` takes.
    pub(crate) fn best_area_fit(&self, w: u16, h: u16, accept: &impl Fn(u32) -> bool) -> Option<Hole> {
        let (first_column, first_row) = (usize::from(w / 100), usize::from(h / 100));
        let mut best = u64::MAX;
        for column in bits(self.reach[first_row / BAND], first_column) {
            let low_w = u32::from(w).max(column as u32 * 100);
            if low_w * u32::from(h) > area_of_rank(best) {
                break;
            }
            for row in bits(self.rows[column], first_row) {
                let low_area = low_w * u32::from(h).max(row as u32 * 100);
                if low_area > area_of_rank(best) {
                    break;
                }
                best = self.walk_class(column, row, w, h, best, accept);
            }
        }
        Hole::of_rank(best)
    }

    /// The smallest GPU without placements (area, short side, id) that holds w x h and that `accept` takes.
    pub(crate) fn best_empty(&self, w: u16, h: u16, accept: &impl Fn(u32) -> bool) -> Option<u32> {
        let want = Rect::new(0, 0, w, h).size();
        let fitting = self.empties.iter().filter(|(size, _)| size.holds(want));
        let firsts =
            fitting.filter_map(|(size, gpus)| Some(Hole::new(*size, gpus.iter().find(|gpu| accept(*gpu))?)));
        firsts.min_by_key(|hole| hole.0).map(Hole::gpu)
    }

    /// The least rank among `best` and the entries of the class that fit and pass `accept`.
    #[inline]
    fn walk_class(
        &self,
        column: usize,
        row: usize,
        w: u16,
        h: u16,
        best: u64,
        accept: &impl Fn(u32) -> bool,
    ) -> u64 {
        let set = column * CLASSES + row;
        let Some(first) = self.sets.first(set) else { return best };
        let key = self.sets.key(first);
        let candidate = rank_of_key(key);
        if candidate >= best {
            return best;
        }
        let every_entry_fits = column * 100 >= usize::from(w) && row * 100 >= usize::from(h);
        if every_entry_fits && accept(gpu_of_key(key)) {
            return candidate;
        }
        self.walk_on(set, first, (w, h), best, accept)
    }

    /// The same from the first entry on. Apart, for most often that is it.
    #[inline(never)]
    fn walk_on(
        &self,
        set: usize,
        first: Cursor,
        (w, h): (u16, u16),
        best: u64,
        accept: &impl Fn(u32) -> bool,
    ) -> u64 {
        let on_the_diagonal = set / CLASSES == set % CLASSES;
        let mut cursor = Some(first);
        while let Some(at) = cursor {
            let key = self.sets.key(at);
            let candidate = rank_of_key(key);
            if candidate >= best {
                return best;
            }
            let (rw, rh) = size_of_key(key);
            cursor = if rw >= w && rh >= h {
                if accept(gpu_of_key(key)) {
                    return candidate;
                }
                self.sets.next(at)
            } else if on_the_diagonal && rw >= h && rh >= w {
                // Turned it would fit: the next entry of this size may be the turned one.
                self.sets.next(at)
            } else {
                self.sets.seek(set, next_size(key))
            };
        }
        best
    }
}

/// The bits that are set, from `first` upwards.
#[inline]
fn bits(mask: u128, first: usize) -> impl Iterator<Item = usize> {
    let mut rest = mask & (u128::MAX << first);
    core::iter::from_fn(move || {
        let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
        rest &= rest - 1;
        Some(bit)
    })
}

/// How many bands a column with these rows reaches.
#[inline]
fn bands(rows: u128) -> usize {
    (u128::BITS - rows.leading_zeros()).div_ceil(BAND as u32) as usize
}

fn class_of(size: Rect) -> (usize, usize) {
    (usize::from(size.w() / 100), usize::from(size.h() / 100))
}

#[inline]
fn key_of(size: Rect, gpu: u32) -> u64 {
    size.extent() << SIZE_SHIFT | u64::from(gpu) << ORIENTATION_BITS | u64::from(size.w() > size.h())
}

/// Area, short side and GPU.
const fn rank_of_key(key: u64) -> u64 {
    key >> ORIENTATION_BITS
}

const fn area_of_rank(rank: u64) -> u32 {
    (rank >> (GPU_BITS + SIDE_BITS)) as u32
}

/// The smallest key of a larger size.
fn next_size(key: u64) -> u64 {
    ((key >> SIZE_SHIFT) + 1) << SIZE_SHIFT
}

fn gpu_of_key(key: u64) -> u32 {
    (key >> ORIENTATION_BITS) as u32 % MAX_GPUS
}

const fn size_of_key(key: u64) -> (u16, u16) {
    let short = (key >> SIZE_SHIFT) as u32 % (1 << SIDE_BITS);
    let (short, long) = (short as u16, (area_of_rank(rank_of_key(key)) / short) as u16);
    if key % 2 == 1 { (long, short) } else { (short, long) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_gives_its_size_and_gpu_back(w in 1u16..=10_000, h in 1u16..=10_000, gpu in 0..MAX_GPUS) {
            let key = key_of(Rect::new(0, 0, w, h), gpu);
            prop_assert_eq!((size_of_key(key), gpu_of_key(key)), ((w, h), gpu));
        }
    }
}
