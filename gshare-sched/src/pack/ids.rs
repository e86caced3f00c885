//! A set of GPU ids as bits, with two levels above that say which words of the level below are not zero.
//!
//! Ids count from zero upwards, so a set costs little more than a bit a GPU. A change touches one word, and the next level
//! only where that word was or becomes zero; the next id at or above another is found in as many words as there are levels.
//! Above the last level a set has at most eight words, which are looked through.
#![expect(clippy::cast_possible_truncation, reason = "an id is below MAX_GPUS")]

const LEVELS: usize = 3;

/// The set.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ids {
    levels: [Vec<u64>; LEVELS],
}

impl Ids {
    pub(crate) fn insert(&mut self, id: u32) {
        let mut at = id as usize;
        for level in &mut self.levels {
            if level.len() <= at / 64 {
                level.resize(at / 64 + 1, 0);
            }
            let word = &mut level[at / 64];
            let before = core::mem::replace(word, *word | 1 << (at % 64));
            if before != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// Takes an id out that is in.
    pub(crate) fn remove(&mut self, id: u32) {
        let mut at = id as usize;
        for level in &mut self.levels {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// The ids, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        core::iter::successors(self.from(0), |id| self.from(*id as usize + 1))
    }

    /// The least id that is not below `first`.
    fn from(&self, first: usize) -> Option<u32> {
        let mut at = first;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(at / 64)? & u64::MAX << (at % 64);
            if word != 0 {
                return Some(self.descend(height, at / 64 * 64 + word.trailing_zeros() as usize));
            }
            at = at / 64 + 1;
        }
        let top = &self.levels[LEVELS - 1];
        let word = (at..top.len()).find(|word| top[*word] != 0)?;
        Some(self.descend(LEVELS - 1, word * 64 + top[word].trailing_zeros() as usize))
    }

    /// The least id under bit `at` of a level.
    fn descend(&self, height: usize, at: usize) -> u32 {
        let down = |at: usize, level: &Vec<u64>| at * 64 + level[at].trailing_zeros() as usize;
        self.levels[..height].iter().rev().fold(at, down) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn bits_are_a_set(
            near in prop::collection::vec(1..2_000_000u32, 1..4),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 1..60),
        ) {
            // A few far apart, and their neighbours.
            let all: Vec<u32> = near.iter().flat_map(|id| id - 1..id + 2).collect();
            let (mut ids, mut literal) = (Ids::default(), BTreeSet::new());
            for (id, insert) in changes {
                let id = *id.get(&all);
                if insert {
                    ids.insert(id);
                    literal.insert(id);
                } else if literal.remove(&id) {
                    ids.remove(id);
                }
                prop_assert!(ids.iter().eq(literal.iter().copied()));
            }
        }
    }
}
