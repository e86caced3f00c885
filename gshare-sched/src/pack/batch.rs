//! Packing a known set onto as few GPUs as possible, and how few that could be.
//!
//! # Algorithm
//! [`pack_batch`] packs the whole set in four orders (area, long side, width, height; largest first) by three rules
//! (best area fit, contact corner, best short side fit) over all bins, and keeps the best. While that is above the
//! lower bound it tries a few more orders: the items that ended in the emptiest bin move to the front, since what was
//! placed last is what was hard to place.
//!
//! [`lower_bound`] is the dual-feasible-function bound: functions `f` on widths and `g` on heights that keep the sum of
//! any set that fits a bin at most one, so that the sum of `f(w) g(h)` over all items, rounded up, is a bound. Taken
//! over all pairs of: the identity; "drop below e, round up above 1 - e"; and `u_k` (Fekete and Schepers, Mathematical
//! Programming 91, 2001).
//!
//! Worked example, in per cent: five items of 60 x 60. Their area is 1.8 bins; but no two share a bin, and with e = 41
//! the second function makes each item a whole bin: the bound is 5.
//!
//! # Cost
//! `O(n x holes)` per order and rule, 12 to 24 of them; the bound is `O(n)` for each of some thousand pairs.

use core::cmp::Reverse;

use crate::pack::{PackError, Rectangle};
use gshare_core::{Bytes, Quota, SmShare};

use super::geometry::{FreeSet, Rect, best_corner};

/// A packed set.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchPacking {
    /// How many bins it takes.
    pub bins: usize,
    /// For each item, in the order given: its bin and its rectangle in it.
    pub places: Vec<(usize, Rectangle)>,
}

/// A bin: width and height.
type Size = (Quota, SmShare);

const ORDERS: [Order; 4] = [Order::Area, Order::LongSide, Order::Width, Order::Height];
const RULES: [Rule; 3] = [Rule::AreaFit, Rule::Contact, Rule::ShortSideFit];
/// Further orders tried while the result is above the bound.
const REPAIRS: usize = 12;

#[derive(Debug, Clone, Copy)]
enum Order {
    Area,
    LongSide,
    Width,
    Height,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    AreaFit,
    Contact,
    ShortSideFit,
}

/// Packs `items` (width, height) into as few bins of size `bin` as it finds.
///
/// # Errors
/// [`PackError::ZeroSize`] for an empty item, [`PackError::NeverFits`] for one larger than the bin.
pub fn pack_batch(bin: Size, items: &[Size]) -> Result<BatchPacking, PackError> {
    for (quota, sm) in items {
        if quota.is_zero() {
            return Err(PackError::ZeroSize { field: "quota" });
        }
        if sm.is_zero() {
            return Err(PackError::ZeroSize { field: "sm" });
        }
        if *quota > bin.0 || *sm > bin.1 {
            return Err(PackError::NeverFits { quota: *quota, sm: *sm, memory: Bytes::ZERO });
        }
    }
    let sizes: Vec<Rect> = items.iter().map(|(w, h)| Rect::new(0, 0, w.get(), h.get())).collect();
    let mut search = Search::new(Rect::new(0, 0, bin.0.get(), bin.1.get()), &sizes);
    search.run(quick_bound(bin, items));
    let places = search.best_places.iter().map(|(bin, rect)| (*bin, rect.public())).collect();
    Ok(BatchPacking { bins: search.best_bins, places })
}

struct Search<'a> {
    bin: Rect,
    items: &'a [Rect],
    /// Holes and placements of the bins open in this attempt; the lists of closed ones are kept for reuse.
    free: Vec<Vec<Rect>>,
    used: Vec<Vec<Rect>>,
    open: usize,
    places: Vec<(usize, Rect)>,
    best_bins: usize,
    best_places: Vec<(usize, Rect)>,
    set: FreeSet,
}

impl<'a> Search<'a> {
    fn new(bin: Rect, items: &'a [Rect]) -> Self {
        Self {
            bin,
            items,
            free: Vec::new(),
            used: Vec::new(),
            open: 0,
            places: vec![(0, Rect::default()); items.len()],
            best_bins: usize::MAX,
            best_places: Vec::new(),
            set: FreeSet::default(),
        }
    }

    fn run(&mut self, bound: usize) {
        let mut best_order = (Vec::new(), Rule::AreaFit);
        for order in ORDERS {
            let sorted = self.sorted(order);
            for rule in RULES {
                // The last one is finished: it says where the repairs begin.
                let last = matches!((order, rule), (Order::Height, Rule::ShortSideFit));
                if self.attempt(&sorted, rule, !last) {
                    best_order = (sorted.clone(), rule);
                }
                if self.best_bins <= bound {
                    return;
                }
            }
        }
        // The items that ended in the emptiest bin go first; the rules take turns.
        let (mut order, _) = best_order;
        for repair in 0..REPAIRS {
            let mut area = vec![0u64; self.best_bins + 1];
            for (bin, rect) in &self.places {
                if let Some(area) = area.get_mut(*bin) {
                    *area += u64::from(rect.area());
                }
            }
            let used = self.places.iter().map(|(bin, _)| *bin).max().unwrap_or(0) + 1;
            let emptiest = (0..used.min(area.len())).min_by_key(|bin| area[*bin]).unwrap_or(0);
            let places = &self.places;
            order.sort_by_key(|item| places[*item].0 != emptiest);
            if self.attempt(&order, RULES[repair % RULES.len()], false) && self.best_bins <= bound {
                return;
            }
        }
    }

    fn sorted(&self, order: Order) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..self.items.len()).collect();
        indices.sort_by_key(|index| {
            let item = self.items[*index];
            let (w, h) = (u32::from(item.w()), u32::from(item.h()));
            Reverse(match order {
                Order::Area => (item.area(), w.max(h)),
                Order::LongSide => (w.max(h), item.area()),
                Order::Width => (w, h),
                Order::Height => (h, w),
            })
        });
        indices
    }

    /// Packs in this order; true (and remembered) when it takes fewer bins than the best so far. One that will not is
    /// given up at once, or finished: then its last bin says what to try next.
    fn attempt(&mut self, order: &[usize], rule: Rule, give_up: bool) -> bool {
        self.open = 0;
        let mut complete = true;
        for index in order {
            let (w, h) = (self.items[*index].w(), self.items[*index].h());
            let (bin, hole) = match self.choose(w, h, rule) {
                Some(choice) => choice,
                None => (self.open_bin(), self.bin),
            };
            complete &= self.open < self.best_bins;
            if give_up && !complete {
                return false;
            }
            let at = match rule {
                Rule::Contact => best_corner(self.bin, self.used[bin].iter().copied(), hole, w, h).1,
                Rule::AreaFit | Rule::ShortSideFit => Rect::new(hole.x(), hole.y(), w, h),
            };
            self.set.occupy(&self.free[bin], at);
            self.free[bin].clear();
            self.free[bin].extend_from_slice(&self.set.after);
            self.used[bin].push(at);
            self.places[*index] = (bin, at);
        }
        if complete {
            self.best_bins = self.open;
            self.best_places.clone_from(&self.places);
        }
        complete
    }

    fn open_bin(&mut self) -> usize {
        if self.open == self.free.len() {
            self.free.push(Vec::new());
            self.used.push(Vec::new());
        }
        self.free[self.open].clear();
        self.free[self.open].push(self.bin);
        self.used[self.open].clear();
        self.open += 1;
        self.open - 1
    }

    fn choose(&self, w: u16, h: u16, rule: Rule) -> Option<(usize, Rect)> {
        let mut best: Option<((u32, u32), usize, Rect)> = None;
        for (bin, free) in self.free[..self.open].iter().enumerate() {
            for hole in free.iter().filter(|hole| hole.w() >= w && hole.h() >= h) {
                let key = match rule {
                    Rule::AreaFit | Rule::Contact => (hole.area(), u32::from(hole.short_side())),
                    Rule::ShortSideFit => (u32::from((hole.w() - w).min(hole.h() - h)), hole.area()),
                };
                let better = best.is_none_or(|(old, in_bin, at)| {
                    (key, bin, hole.y(), hole.x()) < (old, in_bin, at.y(), at.x())
                });
                if better {
                    best = Some((key, bin, *hole));
                }
            }
        }
        best.map(|(_, bin, hole)| (bin, hole))
    }
}

/// A bound that costs little: area, and items of more than half a bin both ways.
fn quick_bound(bin: Size, items: &[Size]) -> usize {
    let whole = u64::from(bin.0.get()) * u64::from(bin.1.get());
    let area: u64 = items.iter().map(|(w, h)| u64::from(w.get()) * u64::from(h.get())).sum();
    let large = items.iter().filter(|(w, h)| w.get() > bin.0.get() / 2 && h.get() > bin.1.get() / 2).count();
    usize::try_from(area.div_ceil(whole.max(1))).unwrap_or(usize::MAX).max(large)
}

/// No packing of `items` into bins of size `bin` takes fewer bins than this.
pub fn lower_bound(bin: Size, items: &[Size]) -> usize {
    let widths: Vec<u64> = items.iter().map(|(w, _)| u64::from(w.get())).collect();
    let heights: Vec<u64> = items.iter().map(|(_, h)| u64::from(h.get())).collect();
    let on_widths = dual_feasible(u64::from(bin.0.get()), &widths);
    let on_heights = dual_feasible(u64::from(bin.1.get()), &heights);
    let mut best = quick_bound(bin, items);
    for (f, f_whole) in &on_widths {
        for (g, g_whole) in &on_heights {
            let sum: u64 = f.iter().zip(g).map(|(f, g)| f * g).sum();
            best = best.max(usize::try_from(sum.div_ceil(f_whole * g_whole)).unwrap_or(usize::MAX));
        }
    }
    best
}

/// The values of each dual feasible function for each size, with the value of a whole bin.
fn dual_feasible(whole: u64, sizes: &[u64]) -> Vec<(Vec<u64>, u64)> {
    let mut functions = vec![(sizes.to_vec(), whole)];
    // "Drop below e" changes only where e passes a size, "round up above whole - e" where whole - e does.
    let mut limits: Vec<u64> =
        sizes.iter().flat_map(|size| [size + 1, whole - size + 1]).filter(|e| *e <= whole / 2).collect();
    limits.sort_unstable();
    limits.dedup();
    let step = limits.len().div_ceil(50).max(1);
    for e in limits.into_iter().step_by(step) {
        let values = sizes.iter().map(|size| match *size {
            size if size > whole - e => whole,
            size if size < e => 0,
            size => size,
        });
        functions.push((values.collect(), whole));
    }
    for k in 1..=12 {
        let values = sizes
            .iter()
            .map(|size| if (k + 1) * size % whole == 0 { k * size } else { (k + 1) * size / whole * whole });
        functions.push((values.collect(), k * whole));
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn percent(w: u16, h: u16) -> Size {
        (Quota::from_percent(w).unwrap(), SmShare::from_percent(h).unwrap())
    }

    const WHOLE: Size = (Quota::WHOLE, SmShare::WHOLE);

    #[test]
    fn the_worked_example_of_the_module() {
        let items = [percent(60, 60); 5];
        assert_eq!(lower_bound(WHOLE, &items), 5);
        assert_eq!(pack_batch(WHOLE, &items).unwrap().bins, 5);
    }

    #[test]
    fn bad_items_are_typed_errors() {
        let bin = percent(50, 50);
        assert!(matches!(pack_batch(bin, &[percent(60, 10)]), Err(PackError::NeverFits { .. })));
        assert_eq!(pack_batch(bin, &[percent(0, 10)]), Err(PackError::ZeroSize { field: "quota" }));
        assert_eq!(pack_batch(bin, &[]).unwrap().places, []);
    }

    proptest! {
        /// Every item lies in its bin and overlaps no other, and the bound never passes what was found.
        #[test]
        fn batches_are_packings_and_the_bound_is_a_bound(
            sides in prop::collection::vec((1u16..=100, 1u16..=100), 1..40),
        ) {
            let items: Vec<Size> = sides.iter().map(|(w, h)| percent(*w, *h)).collect();
            let packing = pack_batch(WHOLE, &items).unwrap();
            prop_assert!(lower_bound(WHOLE, &items) <= packing.bins);
            let placed: Vec<(usize, Rect)> =
                packing.places.iter().map(|(bin, at)| (*bin, Rect::from_public(*at).unwrap())).collect();
            for (i, (bin, at)) in placed.iter().enumerate() {
                prop_assert!(*bin < packing.bins);
                prop_assert_eq!((at.w(), at.h()), (items[i].0.get(), items[i].1.get()));
                prop_assert!(!placed[..i].iter().any(|(other, rect)| other == bin && rect.meets(*at)));
            }
        }
    }
}
