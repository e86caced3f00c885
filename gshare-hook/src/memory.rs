//! Device memory: what the program holds, and whether it may have more.
//!
//! # Problem
//! Two threads, or two processes of one tenant, must not both pass with the last bytes; a free must find the device that
//! the memory was taken from, whatever context is current by then; and the views that a program can ask for must agree.
//!
//! # Algorithm
//! *Reserve, allocate, commit.* The bytes are taken from the [`Account`] before the driver is called; they are given back
//! when it fails, corrected when the driver says what the object really takes (pitch, arrays), and written into the
//! [`Book`] under the pointer or handle. The account serves small requests from what the daemon granted it earlier, and
//! asks for more when that runs out. Other processes of the instance draw on the same limit, so what they use is asked for
//! when the program looks; without a daemon the process keeps to its part of the limit, as the daemon said last.
//!
//! A physical handle (`cuMemCreate`) is counted once, however many references and mappings it has, until the last of
//! them is gone. Memory that another process or API owns (IPC, external memory, imported handles) is charged to its
//! owner, never here. A context takes all its allocations with it. A pool pays for what comes out of it, until it is
//! destroyed before its allocations: then each of them is charged by itself.
//!
//! # Invariants
//! The account's `used` is the sum of the book's records of its device (and of reservations under way). Records that are
//! charged to nobody have device -1.
//!
//! # Cost
//! One locked shard of a hash map per call, whatever the number of live allocations.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::PoisonError;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};

use gshare_core::Bytes;
use gshare_core::gate::MemoryGate;

const SHARDS: usize = if cfg!(loom) { 2 } else { 32 };
/// Stands for "no limit": more than any device has, with room to count in.
const UNLIMITED: u64 = u64::MAX / 4;

/// What kind of name an object has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A device pointer.
    Pointer,
    /// A device pointer that came out of a pool.
    Pooled,
    /// A physical memory handle.
    Handle,
    /// A start address of a mapping of a physical handle.
    Mapping,
    /// A CUDA array or mipmapped array.
    Array,
    /// A memory pool, charged at what it has reserved.
    Pool,
    /// A context's heap for `malloc` in kernels, as far as it is larger than by default.
    Heap,
}

/// An object of the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(pub Kind, pub u64);

/// What is known about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Bytes charged for it; for a mapping, its length; for a pointer out of a pool, what was asked for.
    pub(crate) bytes: u64,
    /// Ordinal of the device it was charged to; -1 for none.
    pub(crate) device: i32,
    /// The context it dies with; 0 for none.
    pub(crate) context: usize,
    /// References and mappings; for a mapping, the handle; for a pointer out of a pool, the pool.
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
    shards: [Mutex<Shard>; SHARDS],
}

impl Book {
    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        let spread = (key.1 ^ key.0 as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 59;
        // Every change is one step: a shard whose holder panicked is sound.
        self.shards[spread as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes an object down; gives the record it replaces, if its name was in use.
    pub(crate) fn insert(&self, key: Key, record: Record) -> Option<Record> {
        self.shard(key).insert(key, record)
    }

    /// Strikes an object out.
    pub(crate) fn remove(&self, key: Key) -> Option<Record> {
        self.shard(key).remove(&key)
    }

    /// What is known about an object.
    pub(crate) fn get(&self, key: Key) -> Option<Record> {
        self.shard(key).get(&key).copied()
    }

    /// One more reference or mapping; `false` for an unknown object.
    pub(crate) fn link(&self, key: Key) -> bool {
        self.shard(key).get_mut(&key).map(|record| record.links += 1).is_some()
    }

    /// One reference or mapping less; gives the record when that was the last.
    pub(crate) fn unlink(&self, key: Key) -> Option<Record> {
        let mut shard = self.shard(key);
        let record = shard.get_mut(&key)?;
        record.links = record.links.saturating_sub(1);
        if record.links == 0 { shard.remove(&key) } else { None }
    }

    /// Sets what an object is charged; gives what it was charged before.
    pub(crate) fn recharge(&self, key: Key, bytes: u64) -> Option<u64> {
        self.shard(key).get_mut(&key).map(|record| core::mem::replace(&mut record.bytes, bytes))
    }

    /// Strikes out all objects that match, and gives them.
    pub(crate) fn drain(&self, matches: impl Fn(&Key, &Record) -> bool) -> Vec<(Key, Record)> {
        let mut gone = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// All objects that match, as they are now.
    pub(crate) fn select(&self, matches: impl Fn(&Key, &Record) -> bool) -> Vec<(Key, Record)> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            found.extend(shard.iter().filter(|(key, record)| matches(key, record)).map(|(k, r)| (*k, *r)));
        }
        found
    }
}

/// One device's memory, as far as this process may have it.
#[derive(Debug)]
pub(crate) struct Account {
    gate: MemoryGate,
    limit: AtomicU64,
    /// The most that this process may hold without a daemon; `u64::MAX`: no daemon has said.
    part: AtomicU64,
    /// The instance's other processes on this device, by their own numbers, and the bytes that they use.
    siblings: Mutex<Vec<(u32, u64)>>,
    total: u64,
}

impl Account {
    /// No limit yet, on a device with `total` bytes.
    pub(crate) fn new(total: u64) -> Self {
        Self {
            gate: MemoryGate::new(Bytes(UNLIMITED)),
            limit: AtomicU64::new(u64::MAX),
            part: AtomicU64::new(u64::MAX),
            siblings: Mutex::new(Vec::new()),
            total,
        }
    }

    /// Sets the limit; gives what was granted before and not used. From here on nothing is had without asking.
    pub(crate) fn limit_to(&self, limit: Option<Bytes>) -> Bytes {
        let surplus = self.gate.surplus(Bytes::ZERO);
        match limit {
            Some(limit) => self.limit.store(limit.0, Ordering::Release),
            None => {
                self.gate.grant(Bytes(UNLIMITED));
                self.limit.store(u64::MAX, Ordering::Release);
                self.part.store(u64::MAX, Ordering::Release);
                self.set_siblings(Vec::new());
            }
        }
        surplus
    }

    /// Gives up what was granted and is not in use, where there is a limit.
    pub(crate) fn recall(&self) -> Bytes {
        self.limit().map_or(Bytes::ZERO, |_| self.gate.surplus(Bytes::ZERO))
    }

    /// The daemon has said what the process may hold without it.
    pub(crate) fn set_part(&self, part: Bytes) {
        self.part.store(part.0, Ordering::Release);
    }

    /// What the process may hold without a daemon, as far as a daemon has said.
    pub(crate) fn part(&self) -> Option<Bytes> {
        Some(self.part.load(Ordering::Acquire)).filter(|&part| part != u64::MAX).map(Bytes)
    }

    /// A daemon serves the process. Before it has said which part is the process's, that is what the process holds.
    pub(crate) fn served(&self) {
        if self.limit().is_some() && self.part().is_none() {
            self.set_part(Bytes(self.used() + self.gate.free().0));
        }
    }

    /// What the instance's other processes use, each by its own number of itself.
    pub(crate) fn set_siblings(&self, siblings: Vec<(u32, u64)>) {
        *self.siblings.lock().unwrap_or_else(PoisonError::into_inner) = siblings;
    }

    /// What the instance's other processes used when they were last asked.
    pub(crate) fn siblings(&self) -> Vec<(u32, u64)> {
        self.siblings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes in use by all processes of the instance, as far as known.
    pub(crate) fn used_by_all(&self) -> u64 {
        let siblings = self.siblings.lock().unwrap_or_else(PoisonError::into_inner);
        siblings.iter().fold(self.used(), |sum, (_, used)| sum.saturating_add(*used))
    }

    /// Gives up what was granted under a limit and is not in use; gives what is in use.
    pub(crate) fn restate(&self) -> u64 {
        if self.limit().is_some() {
            self.gate.surplus(Bytes::ZERO);
        }
        self.used()
    }

    /// The limit, if there is one.
    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Acquire)).filter(|&limit| limit != u64::MAX)
    }

    /// Memory of the whole device.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.gate.used().0
    }

    /// Takes bytes; `Err` says how many are missing.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), u64> {
        self.gate.reserve(Bytes(bytes)).map_err(|shortage| shortage.bytes.0)
    }

    /// Gives bytes back; gives what should go back to the daemon, if much is idle now.
    pub(crate) fn release(&self, bytes: u64) -> Option<Bytes> {
        self.gate.release(Bytes(bytes));
        let keep = self.chunk().saturating_mul(2);
        self.limit()?;
        if self.gate.free().0 <= keep {
            return None;
        }
        Some(self.gate.surplus(Bytes(keep / 2))).filter(|surplus| surplus.0 > 0)
    }

    /// The daemon granted more.
    pub(crate) fn grant(&self, bytes: Bytes) {
        self.gate.grant(bytes);
    }

    /// What is worth asking for at once: a sixteenth of the limit, at most 64 MiB.
    pub(crate) fn chunk(&self) -> u64 {
        self.limit().map_or(0, |limit| (limit / 16).min(64 << 20))
    }

    /// What may still be granted to this process without a daemon: what is left of its part, or of the limit where no
    /// daemon has said which part that is.
    pub(crate) fn within_part(&self) -> u64 {
        let held = self.used().saturating_add(self.gate.free().0);
        let part = self.part().map_or(u64::MAX, |part| part.0);
        self.limit().map_or(UNLIMITED, |limit| limit.min(part).saturating_sub(held))
    }

    /// What the process can still allocate without a daemon.
    pub(crate) fn free_alone(&self) -> u64 {
        self.within_part().saturating_add(self.gate.free().0)
    }

    /// Free and total memory as the program shall see them, from what the driver says.
    pub(crate) fn view(&self, free: u64, total: u64) -> (u64, u64) {
        match self.limit() {
            Some(limit) => {
                let total = total.min(limit);
                (free.min(total.saturating_sub(self.used_by_all())), total)
            }
            None => (free, total),
        }
    }
}
