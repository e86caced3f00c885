//! Deadlines by their purpose.

use gshare_core::Timestamp;
use std::collections::{BTreeMap, BTreeSet};

/// At most one deadline per key. O(log n) for each change.
#[derive(Debug)]
pub(super) struct Timers<K> {
    by_time: BTreeSet<(Timestamp, K)>,
    by_key: BTreeMap<K, Timestamp>,
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Self { by_time: BTreeSet::new(), by_key: BTreeMap::new() }
    }
}

impl<K: Copy + Ord> Timers<K> {
    /// Sets the deadline of `key`, in place of an earlier one.
    pub(super) fn set(&mut self, key: K, at: Timestamp) {
        if let Some(before) = self.by_key.insert(key, at) {
            self.by_time.remove(&(before, key));
        }
        self.by_time.insert((at, key));
    }

    /// Removes the deadline of `key`, if it has one.
    pub(super) fn clear(&mut self, key: K) {
        if let Some(before) = self.by_key.remove(&key) {
            self.by_time.remove(&(before, key));
        }
    }

    /// Whether `key` has a deadline.
    pub(super) fn has(&self, key: K) -> bool {
        self.by_key.contains_key(&key)
    }

    /// The deadline of `key`.
    pub(super) fn at(&self, key: K) -> Option<Timestamp> {
        self.by_key.get(&key).copied()
    }

    /// The earliest deadline.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.by_time.first().map(|&(at, _)| at)
    }

    /// Takes the earliest deadline if its time has come.
    pub(super) fn pop(&mut self, now: Timestamp) -> Option<K> {
        let &(at, key) = self.by_time.first().filter(|(at, _)| *at <= now)?;
        self.by_time.remove(&(at, key));
        self.by_key.remove(&key);
        Some(key)
    }
}
