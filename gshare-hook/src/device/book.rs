//! Device memory: the program's objects and their sizes.
//!
//! # Problem
//! Two threads, or two processes of one tenant, must not both pass with the last bytes. A free must find the device that supplied
//! the memory, with any context current by then. The views of memory offered to a program must agree.
//!
//! # Algorithm
//! *Reserve, allocate, commit.* The bytes are taken from the [`MemoryAccount`](gshare_meter::MemoryAccount) before the driver is
//! called. They are given back when the call fails, corrected when the driver tells the object's real size (pitch, arrays), and
//! written into the [`Book`] under the pointer or handle.
//!
//! A physical handle (`cuMemCreate`) is counted once, however many references and mappings it has, until the last of them is gone. Memory
//! of another process or API (IPC, external memory, imported handles) is charged to its owner, never here. This holds even where the
//! memory outlives its owner's reference, because the driver does not tell when the owner lets go. A context takes all its allocations
//! with it. A pool pays for its allocations, but if it is destroyed before them, each of them is then charged by itself.
//!
//! # Invariants
//! The account's `used` is the sum of the device's records in the book and of the reservations under way. Records charged to no
//! device have device -1.
//!
//! # Cost
//! Each call locks one shard of a hash map, for any number of live allocations.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::sys::lock::{Guard, Lock};

const SHARDS: usize = if cfg!(loom) { 2 } else { 32 };

/// The kind of an object's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A device pointer, from a pool or not. An address has one record, from the call that gave it last.
    Pointer,
    /// A physical memory handle.
    Handle,
    /// A start address of a mapping of a physical handle.
    Mapping,
    /// A CUDA array or mipmapped array.
    Array,
    /// A memory pool, charged at its reserved size.
    Pool,
    /// A context's heap for `malloc` in kernels, as far as it exceeds the default size.
    Heap,
}

/// The name of an object of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(pub Kind, pub u64);

/// The record of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Bytes charged for the object. For a mapping this is its length, and for a pointer from a pool the bytes asked for.
    pub(crate) bytes: u64,
    /// Ordinal of the charged device, or -1 for none.
    pub(crate) device: i32,
    /// The context with which the object dies, or 0 for none.
    pub(crate) context: usize,
    /// The number of references and mappings. For a mapping this is its handle, and for a pointer from a pool the pool.
    pub(crate) links: u64,
}

/// Handles and pointers are far from random, but multiplication spreads them well enough.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    fn write_isize(&mut self, value: isize) {
        self.write_u64(value.cast_unsigned() as u64);
    }
}

type Shard = HashMap<Key, Record, BuildHasherDefault<Spread>>;

/// All objects of the process.
#[derive(Debug, Default)]
pub(crate) struct Book {
    shards: [Lock<Shard>; SHARDS],
}

impl Book {
    fn shard(&self, key: Key) -> Guard<'_, Shard> {
        let spread = (key.1 ^ key.0 as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 59;
        self.shards[spread as usize % SHARDS].lock()
    }

    /// Writes an object down, and returns the record it replaces if its name was in use.
    pub(crate) fn insert(&self, key: Key, record: Record) -> Option<Record> {
        self.shard(key).insert(key, record)
    }

    /// Strikes an object out, and returns its record.
    pub(crate) fn remove(&self, key: Key) -> Option<Record> {
        self.shard(key).remove(&key)
    }

    /// The record of an object.
    pub(crate) fn get(&self, key: Key) -> Option<Record> {
        self.shard(key).get(&key).copied()
    }

    /// Counts one more reference or mapping, or returns `false` for an unknown object.
    pub(crate) fn link(&self, key: Key) -> bool {
        self.shard(key).get_mut(&key).map(|record| record.links += 1).is_some()
    }

    /// Counts one reference or mapping less, and returns the record if this was the last.
    pub(crate) fn unlink(&self, key: Key) -> Option<Record> {
        let mut shard = self.shard(key);
        let record = shard.get_mut(&key)?;
        record.links = record.links.saturating_sub(1);
        if record.links == 0 { shard.remove(&key) } else { None }
    }

    /// Sets the charge of an object, and returns the previous charge.
    pub(crate) fn recharge(&self, key: Key, bytes: u64) -> Option<u64> {
        self.shard(key).get_mut(&key).map(|record| core::mem::replace(&mut record.bytes, bytes))
    }

    /// Strikes out all matching objects, and returns them.
    pub(crate) fn drain(&self, matches: impl Fn(&Key, &Record) -> bool) -> Vec<(Key, Record)> {
        let mut gone = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.retain(|key, record| {
                let matched = matches(key, record);
                if matched {
                    gone.push((*key, *record));
                }
                !matched
            });
        }
        gone
    }

    /// All matching objects at present.
    pub(crate) fn select(&self, matches: impl Fn(&Key, &Record) -> bool) -> Vec<(Key, Record)> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            found.extend(shard.iter().filter(|(key, record)| matches(key, record)).map(|(k, r)| (*k, *r)));
        }
        found
    }
}
