//! Device memory that a process may have: its limit, what the daemon granted, and its part of the limit without a daemon.
//!
//! # Algorithm
//! Bytes are reserved before the driver is called. Small requests are served from what the daemon granted earlier; the daemon is
//! asked for more when that runs out. Other processes of the instance draw on the same limit, so their use is asked for when the
//! program looks; without a daemon the process keeps to its part of the limit, as the daemon stated it last. A process of a run
//! that may have others has no part before a daemon has stated one; the only process of a run has all of the limit.
//!
//! # Invariants
//! `used` plus what is free to reserve never exceeds what was granted.
//!
//! # Cost
//! One compare-and-swap per reservation.

use std::sync::PoisonError;

#[cfg(loom)]
use loom::sync::Mutex;
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::Mutex;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use gshare_core::Bytes;
use gshare_core::gate::MemoryGate;

/// Stands for "no limit": more than any device has, with room to count in.
const UNLIMITED: u64 = u64::MAX / 4;

/// One device's memory, as far as this process may have it.
#[derive(Debug)]
pub struct MemoryAccount {
    gate: MemoryGate,
    limit: AtomicU64,
    /// The most that this process may hold without a daemon; `u64::MAX`: no daemon has said.
    part: AtomicU64,
    /// The part while no daemon has said another one.
    first_part: u64,
    /// The instance's other processes on this device, by their own numbers, and the bytes that they use.
    siblings: Mutex<Vec<(u32, u64)>>,
    total: u64,
}

impl MemoryAccount {
    /// The account of the only process of a run, without a limit yet, on a device with `total` bytes.
    pub fn new(total: u64) -> Self {
        Self::with_part(total, total)
    }

    /// The account of a process whose run may have others: under a limit it has nothing before a daemon has said which part is
    /// its own.
    pub fn of_member(total: u64) -> Self {
        Self::with_part(total, u64::MAX)
    }

    fn with_part(total: u64, first_part: u64) -> Self {
        Self {
            gate: MemoryGate::new(Bytes(UNLIMITED)),
            limit: AtomicU64::new(u64::MAX),
            part: AtomicU64::new(first_part),
            first_part,
            siblings: Mutex::new(Vec::new()),
            total,
        }
    }

    /// Sets the limit; gives what was granted before and not used. From here on nothing is had without asking.
    pub fn limit_to(&self, limit: Option<Bytes>) -> Bytes {
        let surplus = self.gate.surplus(Bytes::ZERO);
        match limit {
            Some(limit) => self.limit.store(limit.0, Ordering::Release),
            None => {
                self.gate.grant(Bytes(UNLIMITED));
                self.limit.store(u64::MAX, Ordering::Release);
                self.part.store(self.first_part, Ordering::Release);
                self.set_siblings(Vec::new());
            }
        }
        surplus
    }

    /// Gives up what was granted and is not in use, where there is a limit.
    pub fn recall(&self) -> Bytes {
        self.limit().map_or(Bytes::ZERO, |_| self.gate.surplus(Bytes::ZERO))
    }

    /// The daemon has said what the process may hold without it.
    pub fn set_part(&self, part: Bytes) {
        self.part.store(part.0, Ordering::Release);
    }

    /// The most that the process may hold without a daemon; `None`: a daemon has to say.
    pub fn part(&self) -> Option<Bytes> {
        Some(self.part.load(Ordering::Acquire)).filter(|&part| part != u64::MAX).map(Bytes)
    }

    /// Whether there is a limit, and no daemon has said which part of it is the process's.
    pub fn awaits_part(&self) -> bool {
        self.limit().is_some() && self.part().is_none()
    }

    /// Memory that the instance's other processes use, each by its own number of itself.
    pub fn set_siblings(&self, siblings: Vec<(u32, u64)>) {
        *self.siblings.lock().unwrap_or_else(PoisonError::into_inner) = siblings;
    }

    /// Memory that the instance's other processes used when they were last asked.
    pub fn siblings(&self) -> Vec<(u32, u64)> {
        self.siblings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes in use by all processes of the instance, as far as known.
    pub fn used_by_all(&self) -> u64 {
        let siblings = self.siblings.lock().unwrap_or_else(PoisonError::into_inner);
        siblings.iter().fold(self.used(), |sum, (_, used)| sum.saturating_add(*used))
    }

    /// Gives up what was granted under a limit and is not in use; gives what is in use.
    pub fn restate(&self) -> u64 {
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

    /// Takes bytes; `Err` says how many are missing.
    pub fn reserve(&self, bytes: u64) -> Result<(), u64> {
        self.gate.reserve(Bytes(bytes)).map_err(|shortage| shortage.bytes.0)
    }

    /// Gives bytes back; gives what should go back to the daemon, if much is idle now.
    pub fn release(&self, bytes: u64) -> Option<Bytes> {
        self.gate.release(Bytes(bytes));
        let keep = self.chunk().saturating_mul(2);
        self.limit()?;
        if self.gate.free().0 <= keep {
            return None;
        }
        Some(self.gate.surplus(Bytes(keep / 2))).filter(|surplus| surplus.0 > 0)
    }

    /// The daemon granted more.
    pub fn grant(&self, bytes: Bytes) {
        self.gate.grant(bytes);
    }

    /// Amount that is worth asking for at once: a sixteenth of the limit, at most 64 MiB.
    pub fn chunk(&self) -> u64 {
        self.limit().map_or(0, |limit| (limit / 16).min(64 << 20))
    }

    /// Memory that may still be granted to this process without a daemon: the rest of its part.
    pub fn within_part(&self) -> u64 {
        let held = self.used().saturating_add(self.gate.free().0);
        let part = self.part().map_or(0, |part| part.0);
        self.limit().map_or(UNLIMITED, |limit| limit.min(part).saturating_sub(held))
    }

    /// Memory that the process can still allocate without a daemon.
    pub fn free_alone(&self) -> u64 {
        self.within_part().saturating_add(self.gate.free().0)
    }

    /// Free and total memory as the program shall see them, from what the driver says.
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
