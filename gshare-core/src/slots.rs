//! Tables with entries named by slot and generation, so that a lookup by a stale name finds nothing.
//!
//! A [`Slots`] table chooses the names of its entries. A [`NamedSlots`] table keeps more entries under the same names.
//!
//! # Cost
//! Insertion into [`Slots`] and removal from it take O(log n); all other operations take O(1).

use core::cmp::Reverse;
use core::marker::PhantomData;
use std::collections::BinaryHeap;

/// The name of the `generation`-th use of `slot`: see [`ClientId`](crate::ClientId).
fn name<Id: From<u64>>(slot: u32, generation: u32) -> Id {
    Id::from(u64::from(generation) << 32 | u64::from(slot))
}

/// The slot and the generation of a name.
#[expect(clippy::cast_possible_truncation, reason = "the two halves of the integer")]
fn parts<Id: Into<u64>>(id: Id) -> (usize, u32) {
    let raw = id.into();
    (raw as u32 as usize, (raw >> 32) as u32)
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Entries under names from the table itself. The table fills the lowest free slot first, so equal histories give equal names.
///
/// ```
/// use gshare_core::{ClientId, slots::Slots};
///
/// let mut slots = Slots::<ClientId, _>::default();
/// let first = slots.insert("a");
/// assert_eq!(slots.remove(first), Some("a"));
/// let second = slots.insert("b");
/// assert_eq!((second.slot(), slots.get(first)), (first.slot(), None), "the name of an entry that is gone");
/// ```
#[derive(Debug)]
pub struct Slots<Id, T> {
    slots: Vec<Slot<T>>,
    free: BinaryHeap<Reverse<u32>>,
    live: usize,
    ids: PhantomData<fn() -> Id>,
}

impl<Id, T> Default for Slots<Id, T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: BinaryHeap::new(), live: 0, ids: PhantomData }
    }
}

impl<Id: Copy + From<u64> + Into<u64>, T> Slots<Id, T> {
    /// The name of the next entry; `None` if a new entry would exceed `limit` slots.
    pub fn next(&self, limit: u32) -> Option<Id> {
        match self.free.peek() {
            Some(Reverse(slot)) => Some(name(*slot, self.slots[*slot as usize].generation)),
            None => {
                u32::try_from(self.slots.len()).ok().filter(|slot| *slot < limit).map(|slot| name(slot, 0))
            }
        }
    }

    /// Adds `value` under the name that [`Slots::next`] announces.
    pub fn insert(&mut self, value: T) -> Id {
        self.live += 1;
        if let Some(Reverse(slot)) = self.free.pop() {
            let entry = &mut self.slots[slot as usize];
            entry.value = Some(value);
            return name(slot, entry.generation);
        }
        // 2^32 live entries do not fit in memory.
        let slot = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        self.slots.push(Slot { generation: 0, value: Some(value) });
        name(slot, 0)
    }

    /// The entry of this name; `None` after its removal.
    pub fn get(&self, id: Id) -> Option<&T> {
        let (slot, generation) = parts(id);
        let entry = self.slots.get(slot)?;
        if entry.generation == generation { entry.value.as_ref() } else { None }
    }

    /// The name of the live entry in a slot; `None` for a free slot.
    pub fn id(&self, slot: u32) -> Option<Id> {
        let entry = self.slots.get(slot as usize)?;
        entry.value.is_some().then_some(name(slot, entry.generation))
    }

    /// The mutable entry of this name; `None` after its removal.
    pub fn get_mut(&mut self, id: Id) -> Option<&mut T> {
        let (slot, generation) = parts(id);
        let entry = self.slots.get_mut(slot)?;
        if entry.generation == generation { entry.value.as_mut() } else { None }
    }

    /// Removes the entry of this name. The next entry in its slot gets a larger generation.
    pub fn remove(&mut self, id: Id) -> Option<T> {
        let (slot, generation) = parts(id);
        let entry = self.slots.get_mut(slot)?;
        if entry.generation != generation {
            return None;
        }
        let value = entry.value.take()?;
        self.live -= 1;
        // A slot retires after its last generation, since a name must never come back.
        if let Some(next) = entry.generation.checked_add(1) {
            entry.generation = next;
            self.free.push(Reverse(u32::try_from(slot).unwrap_or(u32::MAX)));
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

    /// A table with one free slot. The slot's next entry gets this generation.
    pub fn from_generation(generation: u32) -> Self {
        let slot = Slot { generation, value: None };
        Self { slots: vec![slot], free: [Reverse(0)].into(), ..Self::default() }
    }

    /// The name and the value of each live entry, in the order of slots.
    pub fn iter(&self) -> impl Iterator<Item = (Id, &T)> {
        let live = |(entry, slot)| match entry {
            &Slot { generation, value: Some(ref value) } => Some((name(slot, generation), value)),
            Slot { value: None, .. } => None,
        };
        self.slots.iter().zip(0u32..).filter_map(live)
    }

    /// The live entries in the order of slots.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|entry| entry.value.as_ref())
    }
}

/// Entries under names from a [`Slots`] table. A slot holds one entry at a time, and takes a new entry only under a larger
/// generation.
///
/// ```
/// use gshare_core::{ClientId, slots::NamedSlots};
///
/// let mut clients = NamedSlots::default();
/// let id = ClientId::new(3, 1);
/// clients.insert(id, "a");
/// assert_eq!((clients.get(id), clients.at(3)), (Some(&"a"), Some(&"a")));
/// assert!(!clients.takes(ClientId::new(3, 2)), "the slot is taken");
/// clients.remove(3);
/// assert!(!clients.takes(id) && clients.takes(ClientId::new(3, 2)), "no name comes back");
/// ```
#[derive(Debug)]
pub struct NamedSlots<Id, T> {
    /// The entry, and the latest generation of its slot.
    slots: Vec<(Option<T>, Option<u32>)>,
    ids: PhantomData<fn() -> Id>,
}

impl<Id, T> Default for NamedSlots<Id, T> {
    fn default() -> Self {
        Self { slots: Vec::new(), ids: PhantomData }
    }
}

impl<Id: Copy + From<u64> + Into<u64>, T> NamedSlots<Id, T> {
    /// Whether the table takes an entry under this name: the slot is free, and all its earlier generations were smaller.
    pub fn takes(&self, id: Id) -> bool {
        let (slot, generation) = parts(id);
        match self.slots.get(slot) {
            Some((Some(_), _)) => false,
            Some((None, Some(latest))) => generation > *latest,
            _ => true,
        }
    }

    /// Puts `value` under a name accepted by [`takes`](Self::takes). The table grows up to the slot, so the caller must bound the
    /// slot.
    pub fn insert(&mut self, id: Id, value: T) {
        let (slot, generation) = parts(id);
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || (None, None));
        }
        self.slots[slot] = (Some(value), Some(generation));
    }

    /// The entry of this name; `None` after its removal.
    #[inline]
    pub fn get(&self, id: Id) -> Option<&T> {
        let (slot, generation) = parts(id);
        match self.slots.get(slot) {
            Some((Some(value), Some(latest))) if *latest == generation => Some(value),
            _ => None,
        }
    }

    /// The entry in a slot; `None` for a free slot.
    #[inline]
    pub fn at(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.0.as_ref()
    }

    /// The mutable entry in a slot; `None` for a free slot.
    #[inline]
    pub fn at_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.slots.get_mut(slot as usize)?.0.as_mut()
    }

    /// Removes the entry in a slot and returns it; `None` for a free slot.
    pub fn remove(&mut self, slot: u32) -> Option<T> {
        self.slots.get_mut(slot as usize)?.0.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ClientId;

    #[test]
    fn a_stale_name_finds_nothing_and_the_lowest_slot_is_used_first() {
        let name = ClientId::new;
        let mut slots = Slots::<ClientId, _>::default();
        let names: Vec<_> = (0..3).map(|n| slots.insert(n)).collect();
        assert_eq!(names, [name(0, 0), name(1, 0), name(2, 0)]);
        assert_eq!(slots.remove(name(1, 0)), Some(1));
        assert_eq!(slots.remove(name(1, 0)), None);
        slots.remove(name(0, 0));
        assert_eq!(slots.next(3), Some(name(0, 1)));
        assert_eq!(slots.insert(7), name(0, 1));
        assert_eq!(slots.get(name(0, 0)), None);
        assert_eq!(slots.get(name(0, 1)), Some(&7));
        assert_eq!(slots.insert(8), name(1, 1));
        assert_eq!(slots.next(3), None, "full");
        assert_eq!(slots.iter().map(|(id, _)| id.slot()).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(slots.values().copied().collect::<Vec<_>>(), [7, 8, 2]);
    }

    #[test]
    fn a_given_name_is_taken_once_and_only_after_smaller_ones() {
        let name = ClientId::new;
        let mut slots = NamedSlots::default();
        slots.insert(name(1, 4), "a");
        assert_eq!((slots.at(0), slots.at(1), slots.get(name(1, 3))), (None, Some(&"a"), None));
        assert!(slots.takes(name(0, 0)) && slots.takes(name(9, 0)) && !slots.takes(name(1, 5)));
        assert_eq!((slots.remove(1), slots.remove(1), slots.remove(9)), (Some("a"), None, None));
        assert_eq!(slots.get(name(1, 4)), None);
        assert!(!slots.takes(name(1, 3)) && !slots.takes(name(1, 4)) && slots.takes(name(1, 5)));
    }
}
