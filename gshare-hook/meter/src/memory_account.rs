//! A process's device memory: its limit, the daemon's grants, and its part of the limit without a daemon.
//!
//! # Algorithm
//! Bytes are reserved before the driver is called. Small requests are served from earlier grants, and the daemon is asked for more when
//! these run out. Other processes of the instance draw on the same limit, so the daemon is asked for their use when the program looks,
//! unless the daemon has stated that the whole limit is this process's part: then the process is alone.
//! Without a daemon, the process keeps to its part of the limit, as last stated by the daemon. A process of a run with several members has
//! no part before a daemon has stated one. The only process of a run has the whole limit.
//!
//! # Invariants
//! The sum of `used` and the reservable rest never exceeds the daemon's grants.
//!
//! # Cost
//! One compare-and-swap per reservation.

use std::sync::PoisonError;

#[cfg(loom)]
use loom::sync::Mutex;
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::Mutex;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gshare_core::Bytes;
use gshare_core::gate::MemoryGate;

/// Stands for "no limit": more than any device has, with room to count in.
const UNLIMITED: u64 = u64::MAX / 4;

/// One device's memory, as far as this process may have it.
#[derive(Debug)]
pub struct MemoryAccount {
    gate: MemoryGate,
    limit: AtomicU64,
    /// The most memory the process may hold without a daemon; `u64::MAX` until a daemon has stated it.
    part: AtomicU64,
    /// The part until a daemon states another.
    first_part: u64,
    /// Whether the connected daemon has stated that the process's part is the whole limit.
    alone: AtomicBool,
    /// The instance's other processes on this device, by their own numbers, and the bytes used by each.
    siblings: Mutex<Vec<(u32, u64)>>,
    /// Bytes of the device that other instances keep even after all of them have parked; `u64::MAX` before the daemon states them.
    kept: AtomicU64,
    total: u64,
}

impl MemoryAccount {
    /// The account of the only process of a run, without a limit yet, on a device with `total` bytes.
    pub fn new(total: u64) -> Self {
        Self::with_part(total, total)
    }

    /// The account of a process in a run with several members: under a limit, it has no part before a daemon has stated one.
    pub fn of_member(total: u64) -> Self {
        Self::with_part(total, u64::MAX)
    }

    fn with_part(total: u64, first_part: u64) -> Self {
        Self {
            gate: MemoryGate::new(Bytes(UNLIMITED)),
            limit: AtomicU64::new(u64::MAX),
            part: AtomicU64::new(first_part),
            first_part,
            alone: AtomicBool::new(false),
            siblings: Mutex::new(Vec::new()),
            kept: AtomicU64::new(u64::MAX),
            total,
        }
    }

    /// Sets the limit, and returns the unused rest of earlier grants. Under a limit, all further memory has to be granted.
    pub fn limit_to(&self, limit: Option<Bytes>) -> Bytes {
        let surplus = self.gate.surplus(Bytes::ZERO);
        match limit {
            Some(limit) => self.limit.store(limit.0, Ordering::Release),
            None => {
                self.gate.grant(Bytes(UNLIMITED));
                self.limit.store(u64::MAX, Ordering::Release);
                self.part.store(self.first_part, Ordering::Release);
                self.alone.store(false, Ordering::Release);
                self.set_siblings(Vec::new());
            }
        }
        surplus
    }

    /// Gives up and returns the unused rest of the grants; zero without a limit.
    pub fn recall(&self) -> Bytes {
        self.limit().map_or(Bytes::ZERO, |_| self.gate.surplus(Bytes::ZERO))
    }

    /// Sets the most memory the process may hold without a daemon, as the daemon stated it.
    pub fn set_part(&self, part: Bytes) {
        self.part.store(part.0, Ordering::Release);
        let alone = self.limit().is_some_and(|limit| part.0 >= limit);
        if alone {
            self.set_siblings(Vec::new());
        }
        self.alone.store(alone, Ordering::Release);
    }

    /// Whether no other process draws on the limit, so the daemon need not be asked for the use of others.
    pub fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Acquire)
    }

    /// The most memory the process may hold without a daemon; `None` until a daemon has stated it.
    pub fn part(&self) -> Option<Bytes> {
        Some(self.part.load(Ordering::Acquire)).filter(|&part| part != u64::MAX).map(Bytes)
    }

    /// Whether there is a limit, but no daemon has stated the process's part of it.
    pub fn awaits_part(&self) -> bool {
        self.limit().is_some() && self.part().is_none()
    }

    /// Sets the bytes of the device that other instances keep, as the daemon stated them to a process whose memory can move.
    pub fn set_kept(&self, kept: Option<u64>) {
        self.kept.store(kept.unwrap_or(u64::MAX), Ordering::Release);
    }

    /// Memory of a device with `total` bytes that is free for this process once others park for it; `free` now.
    pub fn free_in_turns(&self, free: u64, total: u64) -> u64 {
        match self.kept.load(Ordering::Acquire) {
            u64::MAX => free,
            kept => total.saturating_sub(kept).saturating_sub(self.used_by_all()),
        }
    }

    /// Sets the memory used by each of the instance's other processes, by its own process number.
    pub fn set_siblings(&self, siblings: Vec<(u32, u64)>) {
        *self.siblings.lock().unwrap_or_else(PoisonError::into_inner) = siblings;
    }

    /// Memory used by the instance's other processes when the daemon was last asked.
    pub fn siblings(&self) -> Vec<(u32, u64)> {
        self.siblings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes in use by all processes of the instance, as far as known.
    pub fn used_by_all(&self) -> u64 {
        let siblings = self.siblings.lock().unwrap_or_else(PoisonError::into_inner);
        siblings.iter().fold(self.used(), |sum, (_, used)| sum.saturating_add(*used))
    }

    /// Gives up the unused rest of grants under a limit, and returns the bytes in use.
    pub fn restate(&self) -> u64 {
        self.alone.store(false, Ordering::Release);
        if self.limit().is_some() {
            self.gate.surplus(Bytes::ZERO);
        }
        self.used()
    }

    /// The limit, if there is one.
    pub fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Acquire)).filter(|&limit| limit != u64::MAX)
    }

    /// Memory of the whole device.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.gate.used().0
    }

    /// Reserves bytes; `Err` holds the number of missing bytes.
    pub fn reserve(&self, bytes: u64) -> Result<(), u64> {
        self.gate.reserve(Bytes(bytes)).map_err(|shortage| shortage.bytes.0)
    }

    /// Releases bytes. Returns the amount to give back to the daemon, if much is idle now.
    pub fn release(&self, bytes: u64) -> Option<Bytes> {
        self.gate.release(Bytes(bytes));
        let keep = self.chunk().saturating_mul(2);
        self.limit()?;
        if self.gate.free().0 <= keep {
            return None;
        }
        Some(self.gate.surplus(Bytes(keep / 2))).filter(|surplus| surplus.0 > 0)
    }

    /// Adds a grant of the daemon.
    pub fn grant(&self, bytes: Bytes) {
        self.gate.grant(bytes);
    }

    /// The amount worth one question: a sixteenth of the limit, at most 64 MiB.
    pub fn chunk(&self) -> u64 {
        self.limit().map_or(0, |limit| (limit / 16).min(64 << 20))
    }

    /// Memory still grantable to this process without a daemon: the rest of its part.
    pub fn within_part(&self) -> u64 {
        let held = self.used().saturating_add(self.gate.free().0);
        let part = self.part().map_or(0, |part| part.0);
        self.limit().map_or(UNLIMITED, |limit| limit.min(part).saturating_sub(held))
    }

    /// Memory still allocatable by the process without a daemon.
    pub fn free_alone(&self) -> u64 {
        self.within_part().saturating_add(self.gate.free().0)
    }

    /// Free and total memory as shown to the program, given the driver's answer.
    pub fn view(&self, free: u64, total: u64) -> (u64, u64) {
        match self.limit() {
            Some(limit) => {
                let total = total.min(limit);
                (free.min(total.saturating_sub(self.used_by_all())), total)
            }
            None => (free, total),
        }
    }
}
