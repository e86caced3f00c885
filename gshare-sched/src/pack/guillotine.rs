//! Free rectangles that never overlap: the guillotine rule, for comparison.
//!
//! # Algorithm
//! A free rectangle that is used is cut from edge to edge, twice, so that what is left are at most two rectangles beside a
//! placement in its corner (four beside one in its middle): across the longer leftover first, which keeps the larger
//! piece whole. A released rectangle is merged with free ones with which it shares a whole edge, until none is left; a
//! GPU without placements is one rectangle again. (Jylanki, "A thousand ways to pack the bin", 2010.)
//!
//! A list of one to three entries where the maximal rectangles are five or ten, and for that more GPUs: a demand that
//! would fit across a cut finds no room. [`MaxRectsConfig::guillotine`](super::MaxRectsConfig::guillotine).

use super::geometry::{FreeSet, Rect};

impl FreeSet {
    /// `free`, which may overlap nowhere, loses `taken`.
    pub(super) fn cut_out(&mut self, free: &[Rect], taken: Rect) {
        self.part(free, |rect| rect.meets(taken));
        for rect in self.gone.iter() {
            let (left, right) = (taken.x().max(rect.x()), taken.right().min(rect.right()));
            let (bottom, top) = (taken.y().max(rect.y()), taken.top().min(rect.top()));
            // Beside the used part lie two strips that go from edge to edge, and two that end at them.
            let beside = rect.w() - (right - left) > rect.h() - (top - bottom);
            let (low, high) = if beside { (rect.y(), rect.top()) } else { (bottom, top) };
            let (near, far) = if beside { (left, right) } else { (rect.x(), rect.right()) };
            let pieces = [
                (rect.x(), low, left, high),
                (right, low, rect.right(), high),
                (near, rect.y(), far, bottom),
                (near, top, far, rect.top()),
            ];
            let pieces = pieces.into_iter().filter(|(x, y, right, top)| x < right && y < top);
            for (x, y, right, top) in pieces {
                self.after.push(Rect::new(x, y, right - x, top - y));
            }
        }
    }

    /// `free` of a GPU wins `freed`.
    pub(super) fn merge_in(&mut self, free: &[Rect], freed: Rect) {
        self.part(free, |_| false);
        let mut grown = freed;
        while let Some(index) = self.after.iter().position(|rect| one_with(*rect, grown)) {
            let rect = self.after.swap_remove(index);
            self.gone.push(rect);
            let (x, y) = (rect.x().min(grown.x()), rect.y().min(grown.y()));
            let (right, top) = (rect.right().max(grown.right()), rect.top().max(grown.top()));
            grown = Rect::new(x, y, right - x, top - y);
        }
        self.stay = self.after.len();
        self.after.push(grown);
    }

    /// All of `free` gives way to one rectangle.
    pub(super) fn become_one(&mut self, free: &[Rect], whole: Rect) {
        self.part(free, |_| true);
        self.after.push(whole);
    }
}

/// Whether the two, which do not overlap, are one rectangle together.
fn one_with(a: Rect, b: Rect) -> bool {
    let beside = a.right() == b.x() || b.right() == a.x();
    let above = a.top() == b.y() || b.top() == a.y();
    (beside && (a.y(), a.top()) == (b.y(), b.top())) || (above && (a.x(), a.right()) == (b.x(), b.right()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_larger_piece_stays_whole_and_release_merges() {
        let mut set = FreeSet::default();
        let bin = Rect::new(0, 0, 100, 60);
        set.cut_out(&[bin], Rect::new(0, 0, 20, 50));
        assert_eq!(*set.after, [Rect::new(20, 0, 80, 60), Rect::new(0, 50, 20, 10)]);
        let free = set.after.to_vec();
        set.merge_in(&free, Rect::new(0, 0, 20, 50));
        assert_eq!((set.stay, set.new_ones()), (0, &[bin][..]));
    }

    proptest! {
        /// Placed and released in any order, the free rectangles neither overlap each other nor a placement, and are
        /// together all that is free.
        #[test]
        fn pieces_are_free_and_apart(
            steps in prop::collection::vec((any::<bool>(), any::<u16>(), 1u16..9, 1u16..9), 1..40),
        ) {
            let bin = Rect::new(0, 0, 16, 12);
            let (mut used, mut free) = (Vec::<Rect>::new(), vec![bin]);
            let mut set = FreeSet::default();
            for (place, pick, w, h) in steps {
                if place {
                    let fits: Vec<Rect> = free.iter().copied().filter(|r| r.w() >= w && r.h() >= h).collect();
                    let Some(hole) = fits.get(usize::from(pick) % fits.len().max(1)) else { continue };
                    let at = Rect::new(hole.x(), hole.y(), w, h);
                    set.cut_out(&free, at);
                    used.push(at);
                } else {
                    if used.is_empty() { continue }
                    let freed = used.swap_remove(usize::from(pick) % used.len());
                    set.merge_in(&free, freed);
                }
                free = set.after.to_vec();
                let all: Vec<Rect> = free.iter().chain(&used).copied().collect();
                for (i, rect) in all.iter().enumerate() {
                    prop_assert!(bin.contains(*rect));
                    prop_assert!(!all[..i].iter().any(|other| other.meets(*rect)));
                }
                prop_assert_eq!(all.iter().map(|rect| rect.area()).sum::<u32>(), bin.area());
            }
        }
    }
}
