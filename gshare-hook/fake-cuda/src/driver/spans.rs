//! Free stretches of a range.

use std::collections::BTreeMap;

/// Free stretches: the start and the length of each. No two touch.
#[derive(Default)]
pub(crate) struct Free(BTreeMap<u64, u64>);

impl Free {
    pub(crate) fn of(at: u64, bytes: u64) -> Self {
        Self(BTreeMap::from([(at, bytes)]))
    }

    /// Takes bytes from the first stretch with room.
    pub(crate) fn allocate(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let at = self.first(bytes, alignment)?;
        self.take(at, bytes);
        Some(at)
    }

    /// The first place at a multiple of `alignment` with `bytes` free.
    pub(crate) fn first(&self, bytes: u64, alignment: u64) -> Option<u64> {
        self.0.iter().find_map(|(at, length)| {
            let start = at.next_multiple_of(alignment);
            (start + bytes <= at + length).then_some(start)
        })
    }

    /// The length of the stretch at a place.
    pub(crate) fn at(&self, at: u64) -> Option<u64> {
        self.0.get(&at).copied()
    }

    /// Takes bytes at a place found by [`first`](Self::first).
    pub(crate) fn take(&mut self, start: u64, bytes: u64) {
        let Some((at, length)) = self.0.range(..=start).next_back().map(|(at, length)| (*at, *length)) else {
            return;
        };
        self.0.remove(&at);
        for (from, end) in [(at, start), (start + bytes, at + length)] {
            if from < end {
                self.0.insert(from, end - from);
            }
        }
    }

    /// Makes bytes free.
    pub(crate) fn give(&mut self, mut at: u64, mut bytes: u64) {
        bytes += self.0.remove(&(at + bytes)).unwrap_or(0);
        if let Some((before, length)) = self.0.range(..at).next_back().map(|(before, its)| (*before, *its))
            && before + length == at
        {
            (at, bytes) = (before, bytes + length);
        }
        self.0.insert(at, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_joins_its_neighbours() {
        let mut free = Free::default();
        free.give(4096, 1 << 20);
        let mut taken = Vec::new();
        for (bytes, alignment, place) in
            [(4096, 1, 4096), (4096, 1, 8192), (8192, 1 << 16, 1 << 16), (4096, 1, 12288)]
        {
            assert_eq!(free.first(bytes, alignment), Some(place));
            free.take(place, bytes);
            taken.push((place, bytes));
        }
        assert_eq!(free.first((1 << 20) - (1 << 16), 1), None, "two stretches are left");
        for i in [1, 3, 0, 2] {
            let (place, bytes) = taken[i];
            free.give(place, bytes);
        }
        assert_eq!(free.at(4096), Some(1 << 20));
    }
}
