//! A table whose entries are named by slot and generation, so that a stale name is recognised.
//!
//! # Cost
//! O(log n) to insert and to remove, O(1) to look up.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Entries by slot and generation. The lowest free slot is used first, so equal histories give equal names.
///
/// ```
/// let mut slots = gshare_core::slots::Slots::default();
/// let (slot, generation) = slots.insert("a");
/// assert_eq!(slots.remove(slot, generation), Some("a"));
/// slots.insert("b");
/// assert_eq!(slots.get(slot, generation), None, "the name of an entry that is gone");
/// ```
#[derive(Debug)]
pub struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: BinaryHeap<Reverse<u32>>,
    live: usize,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: BinaryHeap::new(), live: 0 }
    }
}

impl<T> Slots<T> {
    /// The (slot, generation) that the next insert will use, if it stays below `limit` entries.
    pub fn next(&self, limit: u32) -> Option<(u32, u32)> {
        match self.free.peek() {
            Some(Reverse(slot)) => Some((*slot, self.slots[*slot as usize].generation)),
            None => u32::try_from(self.slots.len()).ok().filter(|slot| *slot < limit).map(|slot| (slot, 0)),
        }
    }

    /// Puts `value` where [`Slots::next`] said.
    pub fn insert(&mut self, value: T) -> (u32, u32) {
        self.live += 1;
        if let Some(Reverse(slot)) = self.free.pop() {
            let entry = &mut self.slots[slot as usize];
            entry.value = Some(value);
            return (slot, entry.generation);
        }
        // 2^32 live entries do not fit in memory.
        let slot = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        self.slots.push(Slot { generation: 0, value: Some(value) });
        (slot, 0)
    }

    /// The entry of this name, unless it is gone.
    pub fn get(&self, slot: u32, generation: u32) -> Option<&T> {
        let entry = self.slots.get(slot as usize)?;
        if entry.generation == generation { entry.value.as_ref() } else { None }
    }

    /// The generation of the live entry in a slot.
    pub fn generation(&self, slot: u32) -> Option<u32> {
        let entry = self.slots.get(slot as usize)?;
        entry.value.is_some().then_some(entry.generation)
    }

    /// The entry of this name, to be changed.
    pub fn get_mut(&mut self, slot: u32, generation: u32) -> Option<&mut T> {
        let entry = self.slots.get_mut(slot as usize)?;
        if entry.generation == generation { entry.value.as_mut() } else { None }
    }

    /// Removes the entry of this name. A later entry in its slot has a larger generation.
    pub fn remove(&mut self, slot: u32, generation: u32) -> Option<T> {
        let entry = self.slots.get_mut(slot as usize)?;
        if entry.generation != generation {
            return None;
        }
        let value = entry.value.take()?;
        self.live -= 1;
        // A slot whose generations are used up is retired: a name must never come back.
        if let Some(next) = entry.generation.checked_add(1) {
            entry.generation = next;
            self.free.push(Reverse(slot));
        }
        Some(value)
    }

    /// The number of live entries.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether there is no live entry.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// A table with one free slot, whose next entry has this generation.
    pub fn from_generation(generation: u32) -> Self {
        let slot = Slot { generation, value: None };
        Self { slots: vec![slot], free: [Reverse(0)].into(), live: 0 }
    }

    /// Slot, generation and value of each live entry, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32, &T)> {
        self.slots
            .iter()
            .zip(0u32..)
            .filter_map(|(entry, slot)| entry.value.as_ref().map(|value| (slot, entry.generation, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_name_finds_nothing_and_the_lowest_slot_is_used_first() {
        let mut slots = Slots::default();
        let names: Vec<_> = (0..3).map(|n| slots.insert(n)).collect();
        assert_eq!(names, [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(slots.remove(1, 0), Some(1));
        assert_eq!(slots.remove(1, 0), None);
        slots.remove(0, 0);
        assert_eq!(slots.next(3), Some((0, 1)));
        assert_eq!(slots.insert(7), (0, 1));
        assert_eq!(slots.get(0, 0), None);
        assert_eq!(slots.get(0, 1), Some(&7));
        assert_eq!(slots.insert(8), (1, 1));
        assert_eq!(slots.next(3), None, "full");
        assert_eq!(slots.iter().map(|(slot, ..)| slot).collect::<Vec<_>>(), [0, 1, 2]);
    }
}
