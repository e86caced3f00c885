//! Entries by the number of their name, found in constant time.

#![expect(clippy::disallowed_types, reason = "entries are listed in the order of their names alone")]

use core::hash::{BuildHasherDefault, Hash, Hasher};
use core::ops::Index;
use std::collections::HashMap;

/// Spreads numbers over a table. The host chooses the names of its own functions and requests, so that it harms nobody else with
/// a bad choice.
#[derive(Debug, Default)]
struct ByNumber(u64);

impl Hasher for ByNumber {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        // The golden ratio: neighbours end far apart, in the high bits too.
        let spread = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = spread ^ (spread >> 32);
    }
}

/// Entries by name. Boxed, so that a growing table moves pointers alone.
#[derive(Debug)]
pub(super) struct Table<K, V>(HashMap<K, Box<V>, BuildHasherDefault<ByNumber>>);

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<K: Copy + Ord + Hash, V> Table<K, V> {
    pub(super) fn get(&self, name: &K) -> Option<&V> {
        self.0.get(name).map(|of| &**of)
    }

    pub(super) fn get_mut(&mut self, name: &K) -> Option<&mut V> {
        self.0.get_mut(name).map(|of| &mut **of)
    }

    pub(super) fn contains_key(&self, name: &K) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn insert(&mut self, name: K, of: V) -> Option<V> {
        self.0.insert(name, Box::new(of)).map(|before| *before)
    }

    pub(super) fn remove(&mut self, name: &K) -> Option<V> {
        self.0.remove(name).map(|of| *of)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The entries in the order of their names. O(n log n).
    pub(super) fn sorted(&self) -> Vec<(K, &V)> {
        let mut all: Vec<(K, &V)> = self.0.iter().map(|(name, of)| (*name, &**of)).collect();
        all.sort_unstable_by_key(|(name, _)| *name);
        all
    }
}

impl<K: Copy + Ord + Hash, V> Index<&K> for Table<K, V> {
    type Output = V;

    fn index(&self, name: &K) -> &V {
        &self.0[name]
    }
}
