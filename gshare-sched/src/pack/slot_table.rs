//! The placement of a GPU as a cyclic schedule.
//!
//! # Problem
//! A packing proves that *some* schedule gives every placement its quota: give it the slot `[x, x + q)` of every window,
//! where x is the time offset of its rectangle. Rectangles that are active at the same instant have disjoint SM intervals,
//! so the SMs suffice. A dispatcher by missing quota alone (FaST-GShare, section 3.3.3) ignores the offsets and does not
//! find this schedule: on full GPUs it mostly misses quotas. [`SlotTable`] is the schedule, and
//! [`MultiToken`](crate::token::MultiToken) follows it.
//!
//! # Algorithm
//! At each position of the window, the owners of the slots that cover it may run ([`SlotTable::running`]); the scheduler of tokens
//! gives what they leave to others.
//!
//! Without a packing, [`SlotTable::arrange`] looks for a table itself: one after another while the quotas add up to at most
//! the window; all at once while the SMs add up to at most the whole; else as rectangles; else as contiguous slots with
//! scattered SMs, largest first.
//!
//! Worked example, in per cent (quota x SMs): a = 20 x 24, b = 20 x 80, c = 40 x 6, d = 60 x 100. d fills the SMs, so a, b
//! and c share the other 40 % of the window: d in [0, 60), a in [60, 80), b in [80, 100), c in [60, 100). By missing quota
//! with a stop at the first misfit, c (40 missing) runs ahead of a and b, and d, the widest, waits behind them.
//!
//! # Invariants
//! At no position do the SM shares of the slots add up to more than the whole; an owner has one slot.
//!
//! # Cost
//! `O(n)` to find the running owners, `O(n^2)` to add a slot or to find its place.

use gshare_core::{BasisPoints, Quota, SmShare};

use super::geometry::Rect;
use super::rearrange::Arranger;

/// One owner's guaranteed part of every window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Slot<K> {
    /// The owner of the slot.
    pub owner: K,
    /// Begin of the slot in the window.
    #[cfg_attr(feature = "serde", serde(rename = "offset_bp"))]
    pub offset: Quota,
    /// Length of the slot, which may wrap round the end of the window.
    #[cfg_attr(feature = "serde", serde(rename = "length_bp"))]
    pub length: Quota,
    /// SMs that the owner takes meanwhile.
    #[cfg_attr(feature = "serde", serde(rename = "sm_bp"))]
    pub sm: SmShare,
}

impl<K> Slot<K> {
    /// Whether it covers position `at` of the window.
    pub fn covers(&self, at: BasisPoints) -> bool {
        let since = (at.get() + WINDOW - self.offset.get()) % WINDOW;
        since < self.length.get()
    }
}

const WINDOW: u16 = 10_000;
/// With more owners only the easy arrangements are tried: the search is cubic.
const MOST_ARRANGED: usize = 64;

/// The slots of one GPU. See the [module documentation](self).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotTable<K> {
    /// By offset, then owner.
    slots: Vec<Slot<K>>,
    /// Positions at which a slot begins or ends, ascending.
    changes: Vec<u16>,
}

impl<K> Default for SlotTable<K> {
    fn default() -> Self {
        Self { slots: Vec::new(), changes: Vec::new() }
    }
}

impl<K: Copy + Ord> SlotTable<K> {
    /// A table that gives each owner a slot as long as its quota; `None` when none was found.
    pub fn arrange(wants: &[(K, Quota, SmShare)]) -> Option<Self> {
        let sum = |part: fn(&(K, Quota, SmShare)) -> u16| {
            wants.iter().map(|want| u32::from(part(want))).sum::<u32>()
        };
        let whole = u32::from(WINDOW);
        let slot = |&(owner, length, sm): &(K, Quota, SmShare), at: u16| {
            Some(Slot { owner, offset: Quota::new(at)?, length, sm })
        };
        if sum(|want| want.1.get()) <= whole {
            let mut at = 0;
            let serial = wants.iter().map(|want| {
                let slot = slot(want, at)?;
                at += slot.length.get();
                Some(slot)
            });
            return Self::of(serial);
        }
        if sum(|want| want.2.get()) <= whole {
            return Self::of(wants.iter().map(|want| slot(want, 0)));
        }
        if wants.len() > MOST_ARRANGED {
            return None;
        }
        let items = wants.iter().map(|(_, q, sm)| Rect::new(0, 0, q.get(), sm.get()));
        let mut arranger = Arranger::default();
        if arranger.arrange(Rect::new(0, 0, WINDOW, WINDOW), items) {
            let slots = wants.iter().zip(&arranger.placed).map(|(want, rect)| slot(want, rect.x()));
            return Self::of(slots);
        }
        // The largest first: by area, by SMs, by quota.
        (0..3).find_map(|rule| {
            let mut order = wants.to_vec();
            order.sort_by_key(|(_, quota, sm)| {
                let (quota, sm) = (u32::from(quota.get()), u32::from(sm.get()));
                core::cmp::Reverse([(quota * sm, 0), (sm, quota), (quota, sm)][rule])
            });
            let mut table = Self::default();
            order.iter().all(|(owner, length, sm)| table.add_anywhere(*owner, *length, *sm)).then_some(table)
        })
    }

    fn of(slots: impl Iterator<Item = Option<Slot<K>>>) -> Option<Self> {
        let mut table = Self { slots: slots.collect::<Option<_>>()?, changes: Vec::new() };
        table.slots.sort_unstable_by_key(|slot| (slot.offset, slot.owner));
        table.find_changes();
        Some(table)
    }

    /// Adds a slot; false, and nothing changes, when at some position more than all SMs would be taken, or its owner has
    /// a slot.
    pub fn add(&mut self, slot: Slot<K>) -> bool {
        if self.slots.iter().any(|other| other.owner == slot.owner) || !self.has_room(&slot) {
            return false;
        }
        let position =
            self.slots.partition_point(|other| (other.offset, other.owner) < (slot.offset, slot.owner));
        self.slots.insert(position, slot);
        self.find_changes();
        true
    }

    /// Adds a slot at the first position where it fits; false when there is none. A slot that fits anywhere fits where
    /// another begins or ends.
    pub fn add_anywhere(&mut self, owner: K, length: Quota, sm: SmShare) -> bool {
        let starts = core::iter::once(0).chain(self.changes.iter().copied()).filter_map(Quota::new);
        let found = starts.map(|offset| Slot { owner, offset, length, sm }).find(|slot| self.has_room(slot));
        found.is_some_and(|slot| self.add(slot))
    }

    /// Removes an owner's slot; false when it has none.
    pub fn remove(&mut self, owner: K) -> bool {
        let before = self.slots.len();
        self.slots.retain(|slot| slot.owner != owner);
        self.find_changes();
        self.slots.len() < before
    }

    /// Every slot, by offset.
    pub fn slots(&self) -> &[Slot<K>] {
        &self.slots
    }

    /// The slots that cover position `at`.
    pub fn running(&self, at: BasisPoints) -> impl Iterator<Item = &Slot<K>> {
        self.slots.iter().filter(move |slot| slot.covers(at))
    }

    /// Load only rises where a slot begins: look there, and at this slot's own begin.
    fn has_room(&self, slot: &Slot<K>) -> bool {
        let begins = self.slots.iter().map(|other| other.offset).chain([slot.offset]);
        begins.map(|at| at.basis_points()).filter(|at| slot.covers(*at)).all(|at| {
            let load: u32 = self.running(at).map(|other| u32::from(other.sm.get())).sum();
            load + u32::from(slot.sm.get()) <= u32::from(SmShare::WHOLE.get())
        })
    }

    fn find_changes(&mut self) {
        self.changes.clear();
        for slot in &self.slots {
            let end = (slot.offset.get() + slot.length.get()) % WINDOW;
            self.changes.extend([slot.offset.get(), end]);
        }
        self.changes.sort_unstable();
        self.changes.dedup();
    }
}
