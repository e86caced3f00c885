//! Pools of device memory.
//!
//! A pool reserves device memory in chunks, whole steps of 32 MiB, and is charged for them. Freed bytes stay reserved until a synchronising
//! call trims the pool to its release threshold (0 by default), as on the driver. An allocation needs one free stretch of one chunk, and
//! only an empty chunk is given back: a pool may keep many bytes without use.
//!
//! A pool of host memory costs the device nothing.

use super::registry::{Alloc, What};
use super::spans::Free;
use super::*;

const STEP: u64 = 32 << 20;

pub(crate) struct Pool {
    pub(crate) device: Device,
    pub(crate) sort: Sort,
    pub(crate) closed: AtomicBool,
    /// Reuse policies: kept for getters.
    pub(crate) policies: AtomicU64,
    pub(crate) held: Mutex<Held>,
}

/// The pool's reserved memory. An allocation has a place: chunks are ranges of numbers, with a gap between neighbours.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) state: State,
    /// Bytes by the chunk's first place.
    chunks: BTreeMap<u64, u64>,
    free: Free,
    next: u64,
}

impl Held {
    fn add(&mut self, bytes: u64) {
        self.chunks.insert(self.next, bytes);
        self.free.give(self.next, bytes);
        self.next += bytes + STEP;
        self.state.reserve(bytes);
    }

    /// Removes empty chunks while at least `spare` bytes may go; returns the number of bytes gone.
    fn shrink(&mut self, spare: u64) -> u64 {
        let mut gone = 0;
        self.chunks.retain(|at, bytes| {
            let goes = self.free.at(*at) == Some(*bytes) && gone + *bytes <= spare;
            if goes {
                self.free.take(*at, *bytes);
                gone += *bytes;
            }
            !goes
        });
        self.state.reserved -= gone;
        gone
    }
}

#[derive(Clone, Copy, Default)]
pub(crate) struct State {
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    pub(crate) threshold: u64,
}

impl State {
    pub(crate) fn reserve(&mut self, bytes: u64) {
        self.reserved += bytes;
        self.reserved_high = self.reserved_high.max(self.reserved);
    }

    pub(crate) fn take(&mut self, bytes: u64) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
    }

    pub(crate) fn give(&mut self, bytes: u64) {
        self.used -= bytes.min(self.used);
    }
}

object!(Pool, b"gsharePO", INVALID_VALUE);

/// The pools of a device, and the memory of its graphs.
#[derive(Default)]
pub(crate) struct DevicePools {
    default: OnceLock<Ref<Pool>>,
    current: Mutex<Option<Ref<Pool>>>,
    pub(crate) all: Mutex<Vec<Ref<Pool>>>,
    pub(crate) graph: Mutex<State>,
    /// The default pool of host memory is the first device's.
    host: OnceLock<Ref<Pool>>,
}

/// The kind of a pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    /// The built-in pool of a device, which cannot be destroyed.
    Default,
    Made,
    Imported,
    /// A pool of the host's memory.
    Host,
}

impl Pool {
    pub(crate) fn create(device: Device, sort: Sort) -> Res<Ref<Self>> {
        let (closed, policies, held) = (AtomicBool::new(false), AtomicU64::new(7), Mutex::default());
        let pool = Object::create(Self { device, sort, closed, policies, held });
        lock(&device.pools()?.all).push(pool);
        Ok(pool)
    }

    /// Gives unused reserved bytes back, down to `keep`. Returns their number.
    pub(crate) fn trim(&self, keep: u64) -> Res<u64> {
        driver()?;
        let mut held = lock(&self.held);
        let spare = held.state.reserved.saturating_sub(keep);
        let surplus = held.shrink(spare);
        if surplus > 0 && self.sort != Sort::Host {
            self.device.refund(MemKind::Pool, surplus);
        }
        Ok(surplus)
    }

    pub(crate) fn take(this: Ref<Self>, bytes: u64) -> Res<u64> {
        let driver = driver()?;
        invalid_if(this.sort == Sort::Imported || this.closed.load(Acquire))?;
        let mut held = lock(&this.held);
        if held.free.first(bytes, 1).is_none() {
            let missing = bytes.checked_next_multiple_of(STEP).ok_or(OUT_OF_MEMORY)?;
            // `device_memory::charge` does not serve here: it would trim this locked pool.
            if this.sort != Sort::Host {
                this.device.charge(MemKind::Pool, missing)?;
            }
            held.add(missing);
        }
        let place = held.free.first(bytes, 1).ok_or(OUT_OF_MEMORY)?;
        let what = What::Pooled(this.handle::<c_void>() as u64, place);
        let address = driver.memory().insert(bytes, what, this.device, 0)?;
        held.free.take(place, bytes);
        held.state.take(bytes);
        Ok(address)
    }
}

/// The pools of the process's devices, by ordinal.
fn all_pools() -> Res<&'static [DevicePools]> {
    static POOLS: OnceLock<Vec<DevicePools>> = OnceLock::new();
    let visible = &driver()?.visible;
    Ok(POOLS.get_or_init(|| visible.iter().map(|_| DevicePools::default()).collect()))
}

impl Device {
    pub(crate) fn pools(self) -> Res<&'static DevicePools> {
        all_pools()?.get(self.ordinal as usize).ok_or(INVALID_DEVICE)
    }

    /// The device's default pool of its own memory, or of host memory.
    pub(crate) fn default_pool(self, sort: Sort) -> Res<Ref<Pool>> {
        let pools = self.pools()?;
        let pool = if sort == Sort::Host { &pools.host } else { &pools.default };
        match pool.get() {
            Some(pool) => Ok(pool),
            None => Pool::create(self, sort).map(|made| *pool.get_or_init(|| made)),
        }
    }

    pub(crate) fn current_pool(self) -> Res<Ref<Pool>> {
        let chosen = *lock(&self.pools()?.current);
        chosen.filter(|p| p.live()).map_or_else(|| self.default_pool(Sort::Default), Ok)
    }

    pub(crate) fn set_pool(self, pool: sys::CUmemoryPool) -> Answer {
        // SAFETY: the handle is the C caller's.
        let pool = unsafe { Object::<Pool>::get(pool)? };
        invalid_if(pool.device.ordinal != self.ordinal)?;
        *lock(&self.pools()?.current) = Some(pool);
        Ok(())
    }
}

/// Trims every pool on a GPU of all unused bytes, for an allocation without room. Returns the bytes given back.
pub(crate) fn trim_all(gpu: u32) -> Res<u64> {
    let mut given = 0;
    for of_device in all_pools()? {
        for pool in lock(&of_device.all).iter().filter(|p| p.device.gpu == gpu) {
            given += pool.trim(0)?;
        }
    }
    Ok(given)
}

/// Shrinks the pools to their thresholds after a synchronising call.
pub(crate) fn after_synchronising(device: Device) -> Answer {
    for pool in lock(&device.pools()?.all).iter() {
        let threshold = lock(&pool.held).state.threshold;
        pool.trim(threshold)?;
    }
    Ok(())
}

/// Frees an allocation of a pool, as [`device_memory::free`] does.
pub(crate) fn free(address: u64, stream: Option<Ref<Stream>>) -> Answer {
    let driver = driver()?;
    let found = driver.memory().find(address).ok_or(INVALID_VALUE)?;
    let What::Pooled(pool, place) = found.what else { return Err(INVALID_VALUE) };
    // SAFETY: objects are never unmapped; a destroyed pool is kept for its last allocations.
    let pool = unsafe { &*(pool as *const Object<Pool>) };
    let alloc = {
        // Locks the pool first: its bytes may be taken at once.
        let mut held = lock(&pool.held);
        let alloc = driver.memory().remove(address, |a: &Alloc| a.what == found.what).ok_or(INVALID_VALUE)?;
        held.state.give(alloc.bytes);
        held.free.give(place, alloc.bytes);
        alloc
    };
    if let Some(backing) = &alloc.backing {
        driver.leave(backing.id, backing.generation);
    }
    driver.memory().give_span(&alloc, stream)?;
    if pool.closed.load(Acquire) {
        pool.trim(0)?;
    }
    Ok(())
}
