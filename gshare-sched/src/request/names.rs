//! Which request has a name: a hash table without order.
//!
//! A name is looked up two or three times per event. The table holds slots only; the name of a slot is in the table of
//! requests. It is never gone through, so its order reaches no decision. Names come from the host: one that chooses them so
//! that they collide makes its own lookups slow.
//!
//! # Algorithm
//! Open addressing with linear probing; a removal moves later entries of the run back, so that there are no tombstones. At most
//! three quarters are full, so a lookup takes two or three probes.

use super::queue::NONE;
use gshare_core::RequestId;

#[derive(Debug, Default)]
pub(super) struct Names {
    /// A power of two of them, or none.
    slots: Vec<u32>,
    len: usize,
}

impl Names {
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Where a search for the name begins.
    #[expect(clippy::cast_possible_truncation, reason = "the low bits are as good as any")]
    fn home(&self, id: RequestId) -> usize {
        // The finaliser of SplitMix64: names are often consecutive, or have a pattern in some bits.
        let mut hash = id.number().wrapping_add(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (hash ^ (hash >> 31)) as usize & (self.slots.len() - 1)
    }

    /// Where the name is, and its slot.
    fn search(&self, id: RequestId, name: impl Fn(u32) -> RequestId) -> Option<(usize, u32)> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home(id);
        loop {
            match self.slots[at] {
                NONE => return None,
                slot if name(slot) == id => return Some((at, slot)),
                _ => at = (at + 1) & (self.slots.len() - 1),
            }
        }
    }

    pub(super) fn find(&self, id: RequestId, name: impl Fn(u32) -> RequestId) -> Option<u32> {
        self.search(id, name).map(|(_, slot)| slot)
    }

    /// Adds a name that is not there.
    pub(super) fn insert(&mut self, id: RequestId, slot: u32, name: impl Fn(u32) -> RequestId) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            let size = (self.slots.len() * 2).max(16);
            for old in core::mem::replace(&mut self.slots, vec![NONE; size]) {
                if old != NONE {
                    self.put(name(old), old);
                }
            }
        }
        self.put(id, slot);
        self.len += 1;
    }

    fn put(&mut self, id: RequestId, slot: u32) {
        let mut at = self.home(id);
        while self.slots[at] != NONE {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = slot;
    }

    pub(super) fn remove(&mut self, id: RequestId, name: impl Fn(u32) -> RequestId) {
        let Some((mut hole, _)) = self.search(id, &name) else { return };
        let mask = self.slots.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let slot = self.slots[at];
            if slot == NONE {
                break;
            }
            // The entry may move back as far as its home.
            let home = self.home(name(slot));
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = NONE;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Few names, so that runs of collisions form, wrap around and are broken.
        #[test]
        fn names_are_found_as_in_a_map(steps in prop::collection::vec((any::<bool>(), 0u64..40), 0..400)) {
            let (mut names, mut map, mut table) = (Names::default(), BTreeMap::new(), Vec::new());
            for (add, raw) in steps {
                let id = RequestId::new(raw * 0x1000_0001);
                let name = |slot: u32| table[slot as usize];
                match map.get(&id) {
                    None if add => {
                        let slot = table.len() as u32;
                        table.push(id);
                        names.insert(id, slot, |slot| table[slot as usize]);
                        map.insert(id, slot);
                    }
                    Some(_) if !add => {
                        names.remove(id, name);
                        map.remove(&id);
                    }
                    _ => {}
                }
                prop_assert_eq!(names.len(), map.len());
                for raw in 0..40 {
                    let id = RequestId::new(raw * 0x1000_0001);
                    prop_assert_eq!(names.find(id, |slot| table[slot as usize]), map.get(&id).copied());
                }
            }
        }
    }
}
