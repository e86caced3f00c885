//! Re-arranging the placements of one GPU.
//!
//! A rectangle's offsets are virtual, so moving rectangles inside their GPU moves no process. When no open GPU has a hole
//! for a demand, its placements may still fit together with it in another arrangement: pack all of them again, in four
//! orders by three rules, and keep the first arrangement that holds them all. (FaST-GShare, section 5.4: its eight pods fit
//! one GPU in only 138 of their 420 arrival orders one by one, and in all 420 with this.)
//!
//! A sum rules some sets out: rectangles wider than half of the GPU can only be stacked, and rectangles higher than half of
//! it can only stand side by side.
//!
//! Cost: twelve attempts at `n` placements with `O(free rectangles)` each, fewer where two orders are the same; nothing is
//! allocated in steady state.

use super::geometry::{FreeSet, Rect, best_corner};

/// Work space, and the arrangement found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arranger {
    items: Vec<Rect>,
    order: Vec<u32>,
    /// The orders that were tried, one behind the other.
    tried: Vec<u32>,
    /// Rectangles by item, in the order given.
    pub(crate) placed: Vec<Rect>,
    done: Vec<Rect>,
    /// Maximal free rectangles that remain.
    pub(crate) free: Vec<Rect>,
    set: FreeSet,
}

#[derive(Debug, Clone, Copy)]
enum Order {
    Area,
    Width,
    Height,
    LongSide,
}

#[derive(Debug, Clone, Copy)]
enum Rule {
    AreaFit,
    ShortSideFit,
    Contact,
}

impl Arranger {
    /// Packs all `items` (their sizes; offsets are ignored) into `bin`. On success `placed` and `free` are set.
    pub(crate) fn arrange(&mut self, bin: Rect, items: impl IntoIterator<Item = Rect>) -> bool {
        let mut all = core::mem::take(&mut self.items);
        all.clear();
        all.extend(items);
        let arranged = !too_long(bin, &all) && self.arrange_all(bin, &all);
        self.items = all;
        arranged
    }

    fn arrange_all(&mut self, bin: Rect, items: &[Rect]) -> bool {
        self.tried.clear();
        for order in [Order::Area, Order::Width, Order::Height, Order::LongSide] {
            self.order.clear();
            self.order.extend(0..u32::try_from(items.len()).unwrap_or(u32::MAX));
            self.order.sort_unstable_by_key(|index| {
                let (w, h) = (items[*index as usize].w(), items[*index as usize].h());
                let area = u32::from(w) * u32::from(h);
                let (first, second) = match order {
                    Order::Area => (area, u32::from(w.max(h))),
                    Order::Width => (u32::from(w), u32::from(h)),
                    Order::Height => (u32::from(h), u32::from(w)),
                    Order::LongSide => (u32::from(w.max(h)), area),
                };
                (core::cmp::Reverse((first, second)), *index)
            });
            if self.tried.chunks(items.len().max(1)).any(|tried| tried == self.order) {
                continue;
            }
            self.tried.extend_from_slice(&self.order);
            for rule in [Rule::AreaFit, Rule::Contact, Rule::ShortSideFit] {
                if self.attempt(bin, items, rule) {
                    return true;
                }
            }
        }
        false
    }

    fn attempt(&mut self, bin: Rect, items: &[Rect], rule: Rule) -> bool {
        self.placed.clear();
        self.placed.resize(items.len(), Rect::default());
        self.done.clear();
        self.free.clear();
        self.free.push(bin);
        for i in 0..self.order.len() {
            let index = self.order[i] as usize;
            let (w, h) = (items[index].w(), items[index].h());
            let Some(at) = self.choose(bin, w, h, rule) else { return false };
            self.placed[index] = at;
            self.done.push(at);
            self.set.occupy(&self.free, at);
            self.free.clear();
            self.free.extend_from_slice(&self.set.after);
        }
        true
    }

    fn choose(&self, bin: Rect, w: u16, h: u16, rule: Rule) -> Option<Rect> {
        let fitting = self.free.iter().filter(|hole| hole.w() >= w && hole.h() >= h);
        match rule {
            Rule::AreaFit => fitting
                .min_by_key(|hole| (hole.area(), hole.short_side(), hole.y(), hole.x()))
                .map(|hole| Rect::new(hole.x(), hole.y(), w, h)),
            Rule::ShortSideFit => fitting
                .min_by_key(|hole| ((hole.w() - w).min(hole.h() - h), hole.area(), hole.y(), hole.x()))
                .map(|hole| Rect::new(hole.x(), hole.y(), w, h)),
            Rule::Contact => fitting
                .map(|hole| best_corner(bin, self.done.iter().copied(), *hole, w, h))
                .min_by_key(|(touched, at)| (core::cmp::Reverse(*touched), at.y(), at.x()))
                .map(|(_, at)| at),
        }
    }
}

/// Whether those that are wider than half of `bin` are higher together than it, or those that are higher, wider.
fn too_long(bin: Rect, items: &[Rect]) -> bool {
    let (mut high, mut wide) = (0, 0);
    for item in items {
        high += u32::from(2 * item.w() > bin.w()) * u32::from(item.h());
        wide += u32::from(2 * item.h() > bin.h()) * u32::from(item.w());
    }
    high > u32::from(bin.h()) || wide > u32::from(bin.w())
}
