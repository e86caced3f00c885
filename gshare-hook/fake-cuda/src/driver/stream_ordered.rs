//! Stream-ordered memory and its pools.
//!
//! A pool reserves device memory in chunks, whole steps of 32 MiB, and is charged for them. Freed bytes stay reserved until a
//! synchronising call trims the pool to its release threshold (0 by default), as the driver does. They serve an allocation
//! that fits into one free stretch of one chunk, and a chunk is given back when nothing is left in it: a pool may keep much
//! that is of no use. A free takes effect when it is called, not when its stream reaches it.
//!
//! A pool of host memory costs the device nothing.

use super::capture::legacy_not_implied;
use super::graph::Node;
use super::memory::{Alloc, What};
use super::*;

const STEP: u64 = 32 << 20;

/// A pool.
pub(crate) struct Pool {
    device: Device,
    sort: Sort,
    closed: AtomicBool,
    /// Reuse policies: kept for getters.
    policies: AtomicU64,
    state: Mutex<State>,
    /// Locked after `state`.
    chunks: Mutex<Chunks>,
}

/// Where a pool's allocations lie.
#[derive(Default)]
struct Chunks {
    /// Bytes, and the free stretches by where they begin.
    all: BTreeMap<u64, (u64, BTreeMap<u64, u64>)>,
    next: u64,
    /// Allocations by address: chunk and offset.
    placed: BTreeMap<u64, (u64, u64)>,
}

impl Chunks {
    fn add(&mut self, bytes: u64) {
        self.all.insert(self.next, (bytes, BTreeMap::from([(0, bytes)])));
        self.next += 1;
    }

    /// The first free stretch that is long enough: chunk and offset.
    fn find(&self, bytes: u64) -> Option<(u64, u64)> {
        self.all.iter().find_map(|(chunk, (_, free))| {
            free.iter().find(|(_, length)| **length >= bytes).map(|(at, _)| (*chunk, *at))
        })
    }

    fn take(&mut self, (chunk, at): (u64, u64), bytes: u64, address: u64) {
        self.placed.insert(address, (chunk, at));
        let Some((_, free)) = self.all.get_mut(&chunk) else { return };
        if let Some(rest) = free.remove(&at).filter(|length| *length > bytes) {
            free.insert(at + bytes, rest - bytes);
        }
    }

    fn give(&mut self, address: u64, bytes: u64) {
        let Some((chunk, mut at)) = self.placed.remove(&address) else { return };
        let Some((_, free)) = self.all.get_mut(&chunk) else { return };
        let mut length = bytes + free.remove(&(at + bytes)).unwrap_or(0);
        if let Some((before, its)) = free.range(..at).next_back().map(|(at, its)| (*at, *its))
            && before + its == at
        {
            (at, length) = (before, length + its);
        }
        free.insert(at, length);
    }

    /// Removes chunks with nothing in them while `spare` bytes or more may go; gives how many bytes went.
    fn shrink(&mut self, spare: u64) -> u64 {
        let mut gone = 0;
        self.all.retain(|_, (bytes, free)| {
            let goes = free.get(&0) == Some(bytes) && gone + *bytes <= spare;
            gone += if goes { *bytes } else { 0 };
            !goes
        });
        gone
    }
}

#[derive(Clone, Copy, Default)]
struct State {
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    threshold: u64,
}

impl State {
    fn reserve(&mut self, bytes: u64) {
        self.reserved += bytes;
        self.reserved_high = self.reserved_high.max(self.reserved);
    }

    fn take(&mut self, bytes: u64) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
    }

    fn give(&mut self, bytes: u64) {
        self.used -= bytes.min(self.used);
    }
}

object!(Pool, b"gsharePO", INVALID_VALUE);

/// The pools of a device, and the memory of its graphs.
#[derive(Default)]
pub(crate) struct DevicePools {
    default: OnceLock<Ref<Pool>>,
    current: Mutex<Option<Ref<Pool>>>,
    all: Mutex<Vec<Ref<Pool>>>,
    graph: Mutex<State>,
    /// The default pool of host memory is the first device's.
    host: OnceLock<Ref<Pool>>,
}

/// The kind of a pool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    /// The device's own, which cannot be destroyed.
    Default,
    Made,
    Imported,
    /// Its memory is the host's.
    Host,
}

impl Pool {
    fn create(device: Device, sort: Sort) -> Res<Ref<Self>> {
        let (closed, policies) = (AtomicBool::new(false), AtomicU64::new(7));
        let (state, chunks) = (Mutex::default(), Mutex::default());
        let pool = Object::create(Self { device, sort, closed, policies, state, chunks });
        lock(&device.pools()?.all).push(pool);
        Ok(pool)
    }

    /// Gives reserved bytes that are not used back, down to `keep`. Returns how many.
    fn trim(&self, keep: u64) -> Res<u64> {
        driver()?;
        let mut state = lock(&self.state);
        let surplus = lock(&self.chunks).shrink(state.reserved.saturating_sub(keep));
        state.reserved -= surplus;
        if surplus > 0 && self.sort != Sort::Host {
            self.device.refund(MemKind::Pool, surplus);
        }
        Ok(surplus)
    }

    fn take(this: Ref<Self>, bytes: u64) -> Res<u64> {
        let driver = driver()?;
        invalid_if(this.sort == Sort::Imported || this.closed.load(Acquire))?;
        let mut state = lock(&this.state);
        let mut chunks = lock(&this.chunks);
        if chunks.find(bytes).is_none() {
            let missing = bytes.checked_next_multiple_of(STEP).ok_or(OUT_OF_MEMORY)?;
            // Not through `memory::charge`: that would trim this pool while it is locked.
            if this.sort != Sort::Host {
                let charged = this.device.charge(MemKind::Pool, missing);
                charged.or_else(|_| this.device.charge_swept(MemKind::Pool, missing))?;
            }
            chunks.add(missing);
            state.reserve(missing);
        }
        let place = chunks.find(bytes).ok_or(OUT_OF_MEMORY)?;
        let what = What::Pooled(this.handle::<c_void>() as u64);
        let address = driver.memory.insert(bytes, what, this.device, 0)?;
        chunks.take(place, bytes, address);
        state.take(bytes);
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
    fn pools(self) -> Res<&'static DevicePools> {
        all_pools()?.get(self.ordinal as usize).ok_or(INVALID_DEVICE)
    }

    /// The device's default pool of its own memory, or of the host's.
    fn default_pool(self, sort: Sort) -> Res<Ref<Pool>> {
        let pools = self.pools()?;
        let pool = if sort == Sort::Host { &pools.host } else { &pools.default };
        match pool.get() {
            Some(pool) => Ok(pool),
            None => Pool::create(self, sort).map(|made| *pool.get_or_init(|| made)),
        }
    }

    fn current_pool(self) -> Res<Ref<Pool>> {
        let chosen = *lock(&self.pools()?.current);
        chosen.filter(|p| p.live()).map_or_else(|| self.default_pool(Sort::Default), Ok)
    }

    fn set_pool(self, pool: sys::CUmemoryPool) -> Answer {
        // SAFETY: the handle is the C caller's.
        let pool = unsafe { Object::<Pool>::get(pool)? };
        invalid_if(pool.device.ordinal != self.ordinal)?;
        *lock(&self.pools()?.current) = Some(pool);
        Ok(())
    }
}

/// Trims every pool on a GPU to nothing unused, for an allocation that does not fit. Returns bytes given back.
pub(crate) fn trim_all(gpu: u32) -> Res<u64> {
    let mut given = 0;
    for of_device in all_pools()? {
        let all: Vec<_> = lock(&of_device.all).clone();
        for pool in all.into_iter().filter(|p| p.device.gpu == gpu) {
            given += pool.trim(0)?;
        }
    }
    Ok(given)
}

/// A synchronising call was made: pools shrink to their thresholds.
pub(crate) fn after_synchronising(device: Device) -> Answer {
    let all: Vec<_> = lock(&device.pools()?.all).clone();
    for pool in all {
        let threshold = lock(&pool.state).threshold;
        pool.trim(threshold)?;
    }
    Ok(())
}

/// Frees an allocation of a pool.
pub(crate) fn free_now(address: u64) -> Answer {
    let driver = driver()?;
    let found = driver.memory.find(address).ok_or(INVALID_VALUE)?;
    let What::Pooled(pool) = found.what else { return Err(INVALID_VALUE) };
    // SAFETY: objects are never unmapped; a destroyed pool is kept for its last allocations.
    let pool = unsafe { &*(pool as *const Object<Pool>) };
    let alloc = {
        // Locked first: the address may be given again at once.
        let mut state = lock(&pool.state);
        let alloc = driver.memory.remove(address, |a: &Alloc| a.what == found.what).ok_or(INVALID_VALUE)?;
        state.give(alloc.bytes);
        lock(&pool.chunks).give(address, alloc.bytes);
        alloc
    };
    if let Some(backing) = &alloc.backing {
        driver.leave(backing.id, backing.generation);
    }
    if pool.closed.load(Acquire) {
        pool.trim(0)?;
    }
    Ok(())
}

fn allocate_on(pool: Ref<Pool>, stream: Ref<Stream>, bytes: u64) -> Res<u64> {
    if bytes == 0 {
        return Ok(0);
    }
    legacy_not_implied(stream)?;
    if stream.capturing.load(Acquire) {
        let address = graph_address(pool.device, bytes)?;
        submit(stream, Node::Alloc { device: pool.device, bytes, address })?;
        return Ok(address);
    }
    Pool::take(pool, bytes)
}

entry!(cuMemAllocAsync, |dptr, bytesize, stream: Stream| {
    put(dptr, allocate_on(stream.context.device.current_pool()?, stream, bytesize as u64)?)
});

entry!(cuMemAllocFromPoolAsync, |dptr, bytesize, pool, stream: Stream| {
    put(dptr, allocate_on(Object::<Pool>::get(pool)?, stream, bytesize as u64)?)
});

entry!(cuMemFreeAsync, |dptr, stream: Stream| {
    legacy_not_implied(stream)?;
    if dptr == 0 {
        return Ok(());
    }
    if stream.capturing.load(Acquire) {
        return submit(stream, Node::Free { address: dptr });
    }
    let driver = driver()?;
    match driver.memory.at(dptr)?.what {
        What::Pooled(_) => free_now(dptr),
        What::InGraph => graph_free(dptr),
        What::Charged(MemKind::Plain) => memory::free(dptr),
        What::Imported => vmm::close_imported(dptr),
        _ => Err(INVALID_VALUE),
    }
});

// --- Pools -----------------------------------------------------------------------------------------

// `CUmemPoolProps`: type, handle types, location (kind, id), … as integers.
entry!(cuMemPoolCreate, driver, |pool, poolProps: Given| {
    let [kind, _, location, id] = poolProps.cast::<[u32; 4]>().read_unaligned();
    let (ordinal, sort) = match (kind, location) {
        (1, 1) => (id as i32, Sort::Made),
        (1, 2..=4) => (0, Sort::Host),
        _ => return Err(INVALID_VALUE),
    };
    put(pool, Pool::create(Device::at(ordinal)?, sort)?.handle())
});

entry!(cuMemPoolDestroy, driver, |pool: Pool| {
    invalid_if(pool.sort == Sort::Default)?;
    pool.retire();
    pool.closed.store(true, Release);
    // Memory that is still allocated stays, with the chunks that it lies in, until it is freed.
    pool.trim(0)?;
    lock(&pool.device.pools()?.all).retain(|p| !std::ptr::eq(*p, pool));
});

entry!(cuMemPoolTrimTo, driver, |pool: Pool, keep| pool.trim(keep as u64).map(drop));

entry!(cuMemPoolGetAttribute, driver, |pool: Pool, attr, value| {
    let state = *lock(&pool.state);
    let number = match attr {
        1..=3 => return put(value.cast::<c_int>(), (pool.policies.load(Acquire) >> (attr - 1) & 1) as c_int),
        11 | 12 if driver_version() < 13_010 => return Err(INVALID_VALUE),
        11 => {
            return put(value.cast::<c_int>(), if pool.sort == Sort::Host { 0 } else { pool.device.ordinal });
        }
        12 => return put(value.cast::<c_uint>(), if pool.sort == Sort::Host { 2 } else { 1 }),
        4 => state.threshold,
        5..=8 => [state.reserved, state.reserved_high, state.used, state.used_high][attr as usize - 5],
        _ => return Err(INVALID_VALUE),
    };
    put(value.cast::<u64>(), number)
});

entry!(cuMemPoolSetAttribute, driver, |pool: Pool, attr, value: Given| {
    let mut state = lock(&pool.state);
    if let 1..=3 = attr {
        let (bit, on) = (1 << (attr - 1), value.cast::<c_int>().read_unaligned() != 0);
        let old = pool.policies.load(Acquire);
        pool.policies.store(if on { old | bit } else { old & !bit }, Release);
        return Ok(());
    }
    invalid_if(!matches!(attr, 4 | 6 | 8))?;
    match (attr, value.cast::<u64>().read_unaligned()) {
        (4, threshold) => state.threshold = threshold,
        (6, 0) => state.reserved_high = state.reserved,
        (8, 0) => state.used_high = state.used,
        _ => return Err(INVALID_VALUE),
    }
});

entry!(cuMemPoolSetAccess, driver, |_pool: Pool, map, count| { invalid_if(map.is_null() && count > 0) });

entry!(cuMemPoolGetAccess, driver, |flags, pool: Pool, location: Given| {
    put(flags, if (*location).kind == 1 && (*location).id == pool.device.ordinal { 3 } else { 0 })
});

unsafe fn device_of(location: *const CUmemLocation) -> Res<Device> {
    invalid_if(location.is_null() || (*location).kind != 1)?;
    Device::at((*location).id)
}

entry!(cuDeviceGetDefaultMemPool, |pool, dev: Device| put(pool, dev.default_pool(Sort::Default)?.handle()));
entry!(cuDeviceGetMemPool, |pool, dev: Device| put(pool, dev.current_pool()?.handle()));
entry!(cuDeviceSetMemPool, |dev: Device, pool| dev.set_pool(pool));

entry!(cuMemGetDefaultMemPool, |pool, location, _| {
    let host = !location.is_null() && matches!((*location).kind, 2..=4);
    let (device, sort) =
        if host { (Device::at(0)?, Sort::Host) } else { (device_of(location)?, Sort::Default) };
    put(pool, device.default_pool(sort)?.handle())
});

entry!(cuMemGetMemPool, |pool, location, _| put(pool, device_of(location)?.current_pool()?.handle()));
entry!(cuMemSetMemPool, |location, _, pool| device_of(location)?.set_pool(pool));

// --- Sharing ---------------------------------------------------------------------------------------

entry!(cuMemPoolExportToShareableHandle, driver, |handle_out, pool: Pool, handleType, flags| {
    invalid_if(handleType.0 != 1 || flags != 0 || pool.sort == Sort::Default)?;
    put(handle_out.cast::<c_int>(), vmm::pool_file(pool.device.gpu)?)
});

entry!(cuMemPoolImportFromShareableHandle, driver, |pool_out, handle, handleType, flags| {
    invalid_if(handleType.0 != 1 || flags != 0)?;
    let device = Device::of_gpu(vmm::read_pool_file(handle as usize as c_int)?)?;
    put(pool_out, Pool::create(device, Sort::Imported)?.handle())
});

entry!(cuMemPoolExportPointer, driver, |shareData_out, ptr| {
    let alloc = driver.memory.at(ptr)?;
    invalid_if(!matches!(alloc.what, What::Pooled(_)))?;
    put(shareData_out.cast::<vmm::Ticket>(), vmm::share_alloc(&alloc)?)
});

entry!(cuMemPoolImportPointer, |ptr_out, pool: Pool, shareData| {
    invalid_if(shareData.is_null() || pool.sort != Sort::Imported)?;
    put(ptr_out, vmm::open_ticket(shareData.cast::<vmm::Ticket>().read_unaligned())?)
});

// --- Memory of graphs ------------------------------------------------------------------------------
//
// Addresses exist from the node's creation on; bytes are charged when the node first runs and stay reserved for the
// device's graphs until they are trimmed.

/// Addresses for an allocation node.
pub(crate) fn graph_address(device: Device, bytes: u64) -> Res<u64> {
    driver()?.memory.insert(bytes, What::InGraph, device, 0)
}

/// An allocation node runs.
pub(crate) fn graph_alloc(device: Device, bytes: u64, address: u64) -> Answer {
    let driver = driver()?;
    let mut state = lock(&device.pools()?.graph);
    // Refused while it is still allocated by the launch before.
    invalid_if(!driver.memory.set_in_use(address, true))?;
    let missing = (state.used + bytes).saturating_sub(state.reserved);
    if missing > 0 {
        device.charge_swept(MemKind::Graph, missing).inspect_err(|_| {
            driver.memory.set_in_use(address, false);
        })?;
        state.reserve(missing);
    }
    state.take(bytes);
    Ok(())
}

/// A free node runs, or the program frees what a graph allocated.
pub(crate) fn graph_free(address: u64) -> Answer {
    let driver = driver()?;
    let alloc = driver.memory.at(address)?;
    if alloc.what != What::InGraph {
        return memory::free(address);
    }
    let mut state = lock(&alloc.device.pools()?.graph);
    invalid_if(!driver.memory.set_in_use(address, false))?;
    state.give(alloc.bytes);
    Ok(())
}

entry!(cuDeviceGraphMemTrim, |device: Device| {
    let mut state = lock(&device.pools()?.graph);
    let surplus = state.reserved - state.used;
    state.reserved = state.used;
    device.refund(MemKind::Graph, surplus);
});

entry!(cuDeviceGetGraphMemAttribute, |device: Device, attr, value| {
    let state = *lock(&device.pools()?.graph);
    let figures = [state.used, state.used_high, state.reserved, state.reserved_high];
    put(value.cast::<u64>(), *figures.get(attr as usize).ok_or(INVALID_VALUE)?)
});

entry!(cuDeviceSetGraphMemAttribute, |device: Device, attr, value| {
    let mut state = lock(&device.pools()?.graph);
    invalid_if(value.is_null() || value.cast::<u64>().read_unaligned() != 0)?;
    match attr {
        1 => state.used_high = state.used,
        3 => state.reserved_high = state.reserved,
        _ => return Err(INVALID_VALUE),
    }
});
