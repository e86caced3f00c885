//! The placement of a GPU as a cyclic schedule.
//!
//! # Problem
//! A packing proves that *some* schedule gives every placement its quota: give it the slot `[x, x + q)` of every
//! window, where x is the time offset of its rectangle. Rectangles that are alive at one instant have disjoint SM
//! intervals, so the SMs suffice. A dispatcher that ignores the offsets and hands out tokens by missing quota alone
//! (FaST-GShare, section 3.3.3) does not find that schedule: packed to the brim, it misses quotas on most GPUs.
//! [`SlotTable`] keeps it.
//!
//! # Algorithm
//! At a position of the window, whoever's slot covers it runs ([`SlotTable::running`]). What the slots leave free goes
//! to others that wait, those with the most missing quota first, skipping any that does not fit
//! ([`SlotTable::dispatch`]), until the next change ([`SlotTable::next_change`]).
//!
//! Worked example, in per cent (quota x SMs): a = 20 x 24, b = 20 x 80, c = 40 x 6, d = 60 x 100. d fills the SMs, so a,
//! b and c share the other 40 % of the window: d in [0, 60), a in [60, 80), b in [80, 100), c in [60, 100). By missing
//! quota with a stop at the first misfit, c (40 missing) runs ahead of a and b, and d, the widest, waits behind them.
//!
//! # Invariants
//! At no position do the SM shares of the slots add up to more than the whole; a placement has one slot.

use gshare_core::pack::{PackError, Placement};
use gshare_core::{BasisPoints, Duration, PlacementId, Quota, SmShare, Timestamp};

/// One placement's guaranteed part of every window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Slot {
    /// Whose.
    pub placement: PlacementId,
    /// Where it begins, in the window.
    #[cfg_attr(feature = "serde", serde(rename = "offset_bp"))]
    pub offset: Quota,
    /// How long it is; it may wrap round the end of the window.
    #[cfg_attr(feature = "serde", serde(rename = "length_bp"))]
    pub length: Quota,
    /// The SMs it takes.
    #[cfg_attr(feature = "serde", serde(rename = "sm_bp"))]
    pub sm: SmShare,
}

impl Slot {
    /// Whether it covers position `at` of the window.
    pub fn covers(&self, at: BasisPoints) -> bool {
        let since = (at.get() + WINDOW - self.offset.get()) % WINDOW;
        since < self.length.get()
    }
}

const WINDOW: u16 = 10_000;

/// A placement that wants to run, as [`SlotTable::dispatch`] sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Who.
    pub placement: PlacementId,
    /// What it takes while it runs.
    pub sm: SmShare,
    /// Quota still missing in this window; what is at or below zero runs only in its slot.
    pub missing_bp: i32,
}

/// The slots of one GPU. See the [module documentation](self).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SlotTable {
    /// By offset, then placement.
    slots: Vec<Slot>,
    /// Positions at which a slot begins or ends, ascending.
    changes: Vec<u16>,
}

impl SlotTable {
    /// The table of the placements of one GPU.
    ///
    /// # Errors
    /// [`PackError::Occupied`] when at some position more than all SMs would be taken.
    pub fn of_placements<'a>(placements: impl IntoIterator<Item = &'a Placement>) -> Result<Self, PackError> {
        let mut table = Self::default();
        for placement in placements {
            table.insert(placement)?;
        }
        Ok(table)
    }

    /// Adds a placement's slot.
    ///
    /// # Errors
    /// [`PackError::Occupied`] when at some position more than all SMs would be taken, or it has a slot.
    pub fn insert(&mut self, placement: &Placement) -> Result<(), PackError> {
        let slot = Slot {
            placement: placement.id,
            offset: placement.rectangle.time_offset,
            length: placement.rectangle.quota,
            sm: placement.rectangle.sm,
        };
        let taken = PackError::Occupied { gpu: placement.gpu };
        if self.slots.iter().any(|other| other.placement == slot.placement) {
            return Err(taken);
        }
        // Load only rises where a slot begins: look there, and at this slot's own begin.
        let begins = self.slots.iter().map(|other| other.offset).chain([slot.offset]);
        let overloaded = begins.filter(|at| slot.covers(at.basis_points())).any(|at| {
            self.load(at.basis_points()) + u32::from(slot.sm.get()) > u32::from(SmShare::WHOLE.get())
        });
        if overloaded {
            return Err(taken);
        }
        let position = self
            .slots
            .partition_point(|other| (other.offset, other.placement) < (slot.offset, slot.placement));
        self.slots.insert(position, slot);
        self.find_changes();
        Ok(())
    }

    /// Removes a placement's slot; false when it has none.
    pub fn remove(&mut self, placement: PlacementId) -> bool {
        let before = self.slots.len();
        self.slots.retain(|slot| slot.placement != placement);
        self.find_changes();
        self.slots.len() < before
    }

    /// Every slot, by offset.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The slots that cover position `at`.
    pub fn running(&self, at: BasisPoints) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(move |slot| slot.covers(at))
    }

    /// The first position after `at` at which a slot begins or ends; 10 000 is the end of the window.
    pub fn next_change(&self, at: BasisPoints) -> u16 {
        let next = self.changes.partition_point(|change| *change <= at.get());
        self.changes.get(next).copied().unwrap_or(WINDOW)
    }

    /// Where in its window a point in time lies. Windows follow each other from the epoch.
    pub fn position(now: Timestamp, window: Duration) -> BasisPoints {
        let window = window.as_nanos().max(1);
        let part = u128::from(now.as_nanos() % window) * u128::from(WINDOW) / u128::from(window);
        u16::try_from(part).ok().and_then(BasisPoints::new).unwrap_or(BasisPoints::ZERO)
    }

    /// Who runs from `at` until [`SlotTable::next_change`]: every waiting one whose slot covers `at`, then, in what is
    /// left of the SMs, the others by missing quota (ties: by id), skipping what does not fit. Sorts `waiting` and
    /// appends to `out`.
    pub fn dispatch(&self, at: BasisPoints, waiting: &mut [Waiting], out: &mut Vec<PlacementId>) {
        waiting.sort_unstable_by_key(|client| (core::cmp::Reverse(client.missing_bp), client.placement));
        let mut free = u32::from(SmShare::WHOLE.get());
        let start = out.len();
        for slot in self.running(at) {
            if waiting.iter().any(|client| client.placement == slot.placement) {
                out.push(slot.placement);
                free -= u32::from(slot.sm.get());
            }
        }
        for client in waiting.iter().filter(|client| client.missing_bp > 0) {
            let sm = u32::from(client.sm.get());
            if sm <= free && !out[start..].contains(&client.placement) {
                out.push(client.placement);
                free -= sm;
            }
        }
    }

    fn load(&self, at: BasisPoints) -> u32 {
        self.running(at).map(|slot| u32::from(slot.sm.get())).sum()
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
