//! Stream-ordered memory and its pools.
//!
//! A pool reserves device memory in chunks, whole steps of 32 MiB, and is charged for them. Freed bytes stay reserved until a
//! synchronising call trims the pool to its release threshold (0 by default), as the driver does. They serve an allocation
//! that fits into one free stretch of one chunk, and a chunk is given back when nothing is left in it: a pool may keep much
//! that is of use to nobody. A free takes effect when it is called, not when its stream reaches it.
//!
//! A pool of host memory costs the device nothing.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Acquire;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, OnceLock};

use super::base::*;
use super::capture::legacy_not_implied;
use super::graph::Node;
use super::memory::{Alloc, What};
use super::*;
use crate::sim::MemKind;

const STEP: u64 = 32 << 20;

/// A pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) gpu: u32,
    pub(crate) ordinal: i32,
    /// The device's own pool cannot be destroyed.
    default: bool,
    imported: bool,
    /// Its memory is the host's.
    host: bool,
    closed: AtomicBool,
    /// Reuse policies: kept for getters.
    policies: AtomicU64,
    state: Mutex<State>,
    /// Locked after `state`.
    chunks: Mutex<Chunks>,
}

/// Where a pool's allocations lie.
#[derive(Debug, Default)]
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

#[derive(Clone, Copy, Debug, Default)]
struct State {
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    threshold: u64,
}

impl Kind for Pool {
    const MAGIC: u64 = 0x6773_6861_7265_504f;
    const BAD: CUresult = INVALID_VALUE;
}

/// The pools of a device, and the memory of its graphs.
#[derive(Debug, Default)]
pub(crate) struct DevicePools {
    default: OnceLock<Ref<Pool>>,
    current: Mutex<Option<Ref<Pool>>>,
    all: Mutex<Vec<Ref<Pool>>>,
    graph: Mutex<State>,
    /// The default pool of host memory is the first device's.
    host: OnceLock<Ref<Pool>>,
}

/// The kind of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Default,
    Made,
    Imported,
    Host,
}

impl Pool {
    fn create(gpu: u32, ordinal: i32, sort: Sort) -> Res<Ref<Self>> {
        let pool = Object::create(Self {
            gpu,
            ordinal,
            default: sort == Sort::Default,
            imported: sort == Sort::Imported,
            host: sort == Sort::Host,
            closed: AtomicBool::new(false),
            policies: AtomicU64::new(7),
            state: Mutex::default(),
            chunks: Mutex::default(),
        });
        lock(&pools(ordinal)?.all).push(pool);
        Ok(pool)
    }

    /// Gives reserved bytes that are not used back, down to `keep`. Returns how many.
    fn trim(&self, keep: u64) -> Res<u64> {
        let driver = driver()?;
        let mut state = lock(&self.state);
        let surplus = lock(&self.chunks).shrink(state.reserved.saturating_sub(keep));
        if surplus > 0 {
            state.reserved -= surplus;
            if !self.host {
                driver
                    .device
                    .with(|engine, _| engine.refund(driver.process, self.gpu, MemKind::Pool, surplus));
            }
        }
        Ok(surplus)
    }

    fn take(this: Ref<Self>, bytes: u64) -> Res<u64> {
        let driver = driver()?;
        invalid_if(this.imported || this.closed.load(Acquire))?;
        let mut state = lock(&this.state);
        let mut chunks = lock(&this.chunks);
        if chunks.find(bytes).is_none() {
            let missing = bytes.checked_next_multiple_of(STEP).ok_or(OUT_OF_MEMORY)?;
            // Not through `memory::charge`: that would trim this pool while it is locked.
            if !this.host {
                driver.device.with(|engine, now| {
                    engine.charge(driver.process, this.gpu, MemKind::Pool, missing).or_else(|_| {
                        driver.device.sweep(engine, now);
                        engine.charge(driver.process, this.gpu, MemKind::Pool, missing)
                    })
                })?;
            }
            chunks.add(missing);
            state.reserved += missing;
            state.reserved_high = state.reserved_high.max(state.reserved);
        }
        let place = chunks.find(bytes).ok_or(OUT_OF_MEMORY)?;
        let address = driver.memory.insert(
            bytes,
            What::Pooled(this.handle::<c_void>() as u64),
            this.gpu,
            this.ordinal,
            0,
        )?;
        chunks.take(place, bytes, address);
        state.used += bytes;
        state.used_high = state.used_high.max(state.used);
        Ok(address)
    }
}

/// The pools of the process's devices, by ordinal.
fn all_pools() -> Res<&'static [DevicePools]> {
    static POOLS: OnceLock<Vec<DevicePools>> = OnceLock::new();
    let visible = &driver()?.visible;
    Ok(POOLS.get_or_init(|| visible.iter().map(|_| DevicePools::default()).collect()))
}

fn pools(ordinal: i32) -> Res<&'static DevicePools> {
    driver()?.gpu(ordinal)?;
    all_pools()?.get(ordinal as usize).ok_or(INVALID_DEVICE)
}

fn default_pool(ordinal: i32) -> Res<Ref<Pool>> {
    let of_device = pools(ordinal)?;
    if let Some(pool) = of_device.default.get() {
        return Ok(pool);
    }
    let pool = Pool::create(driver()?.gpu(ordinal)?, ordinal, Sort::Default)?;
    Ok(of_device.default.get_or_init(|| pool))
}

fn host_pool() -> Res<Ref<Pool>> {
    let first = pools(0)?;
    if let Some(pool) = first.host.get() {
        return Ok(pool);
    }
    let pool = Pool::create(driver()?.gpu(0)?, 0, Sort::Host)?;
    Ok(first.host.get_or_init(|| pool))
}

fn current_pool(ordinal: i32) -> Res<Ref<Pool>> {
    let chosen = *lock(&pools(ordinal)?.current);
    chosen.filter(|p| p.live()).map_or_else(|| default_pool(ordinal), Ok)
}

/// Trims every pool on a GPU to nothing unused, for an allocation that does not fit. Returns bytes given back.
pub(crate) fn trim_all(gpu: u32) -> Res<u64> {
    let mut given = 0;
    for of_device in all_pools()? {
        let all: Vec<_> = lock(&of_device.all).clone();
        for pool in all.into_iter().filter(|p| p.gpu == gpu) {
            given += pool.trim(0)?;
        }
    }
    Ok(given)
}

/// A synchronising call was made: pools shrink to their thresholds.
pub(crate) fn after_synchronising(ordinal: i32) -> Answer {
    let of_device = pools(ordinal)?;
    if of_device.default.get().is_none() && lock(&of_device.all).is_empty() {
        return Ok(());
    }
    let all: Vec<_> = lock(&of_device.all).clone();
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
        state.used -= alloc.bytes.min(state.used);
        lock(&pool.chunks).give(address, alloc.bytes);
        alloc
    };
    if let Some(backing) = &alloc.backing {
        driver.device.with(|engine, _| engine.leave(driver.process, backing.id, backing.generation));
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
        let address = graph_address(pool.gpu, pool.ordinal, bytes)?;
        submit(stream, Node::Alloc { ordinal: pool.ordinal, bytes, address })?;
        return Ok(address);
    }
    Pool::take(pool, bytes)
}

entry!(cuMemAllocAsync, |dptr, bytesize, stream: Stream| {
    put(dptr, allocate_on(current_pool(stream.context.ordinal)?, stream, bytesize as u64)?)
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
    let alloc = driver.memory.find(dptr).filter(|a| a.address == dptr).ok_or(INVALID_VALUE)?;
    match alloc.what {
        What::Pooled(_) => free_now(dptr),
        What::InGraph => graph_free(dptr),
        What::Charged(MemKind::Plain) => memory::free(dptr),
        What::Imported => vmm::close_imported(dptr),
        _ => Err(INVALID_VALUE),
    }
});

// --- Pools -----------------------------------------------------------------------------------------

/// `CUmemPoolProps`: type, handle types, location (kind, id), … as integers.
/// Gives the device's ordinal; `None` for the host.
unsafe fn location_of(props: *const c_void) -> Res<Option<i32>> {
    invalid_if(props.is_null())?;
    let head = props.cast::<[u32; 4]>().read_unaligned();
    match (head[0], head[2]) {
        (1, 1) => Ok(Some(head[3] as i32)),
        (1, 2..=4) => Ok(None),
        _ => Err(INVALID_VALUE),
    }
}

entry!(cuMemPoolCreate, driver, |pool, poolProps| {
    let ordinal = location_of(poolProps.cast())?;
    let sort = if ordinal.is_some() { Sort::Made } else { Sort::Host };
    let ordinal = ordinal.unwrap_or(0);
    put(pool, Pool::create(driver.gpu(ordinal)?, ordinal, sort)?.handle())
});

entry!(cuMemPoolDestroy, driver, |pool: Pool| {
    invalid_if(pool.default)?;
    pool.retire();
    pool.closed.store(true, std::sync::atomic::Ordering::Release);
    // Memory that is still allocated stays, with the chunks that it lies in, until it is freed.
    pool.trim(0)?;
    lock(&pools(pool.ordinal)?.all).retain(|p| !std::ptr::eq(*p, pool));
});

entry!(cuMemPoolTrimTo, driver, |pool: Pool, minBytesToKeep| {
    pool.trim(minBytesToKeep as u64)?;
});

entry!(cuMemPoolGetAttribute, driver, |pool: Pool, attr, value| {
    let state = *lock(&pool.state);
    let number = match attr {
        1..=3 => return put(value.cast::<c_int>(), (pool.policies.load(Acquire) >> (attr - 1) & 1) as c_int),
        11 | 12 if driver_version() < 13_010 => return Err(INVALID_VALUE),
        11 => return put(value.cast::<c_int>(), if pool.host { 0 } else { pool.ordinal }),
        12 => return put(value.cast::<c_uint>(), if pool.host { 2 } else { 1 }),
        4 => state.threshold,
        5 => state.reserved,
        6 => state.reserved_high,
        7 => state.used,
        8 => state.used_high,
        _ => return Err(INVALID_VALUE),
    };
    put(value.cast::<u64>(), number)
});

entry!(cuMemPoolSetAttribute, driver, |pool: Pool, attr, value| {
    invalid_if(value.is_null())?;
    let mut state = lock(&pool.state);
    match attr {
        1..=3 => {
            let bit = 1 << (attr - 1);
            let on = value.cast::<c_int>().read_unaligned() != 0;
            let old = pool.policies.load(Acquire);
            let new = if on { old | bit } else { old & !bit };
            pool.policies.store(new, std::sync::atomic::Ordering::Release);
        }
        4 => state.threshold = value.cast::<u64>().read_unaligned(),
        6 if value.cast::<u64>().read_unaligned() == 0 => state.reserved_high = state.reserved,
        8 if value.cast::<u64>().read_unaligned() == 0 => state.used_high = state.used,
        _ => return Err(INVALID_VALUE),
    }
});

entry!(cuMemPoolSetAccess, driver, |_pool: Pool, map, count| {
    if map.is_null() && count > 0 { Err(INVALID_VALUE) } else { Ok(()) }
});

entry!(cuMemPoolGetAccess, driver, |flags, pool: Pool, location| {
    invalid_if(location.is_null())?;
    put(flags, if (*location).kind == 1 && (*location).id == pool.ordinal { 3 } else { 0 })
});

entry!(cuDeviceGetDefaultMemPool, |pool_out, dev| put(pool_out, default_pool(dev)?.handle()));
entry!(cuDeviceGetMemPool, |pool, dev| put(pool, current_pool(dev)?.handle()));

unsafe fn set_pool(dev: CUdevice, pool: sys::CUmemoryPool) -> Answer {
    let of_device = pools(dev)?;
    let pool = Object::<Pool>::get(pool)?;
    invalid_if(pool.ordinal != dev)?;
    *lock(&of_device.current) = Some(pool);
    Ok(())
}

unsafe fn device_of(location: *const CUmemLocation) -> Res<i32> {
    if location.is_null() || (*location).kind != 1 { Err(INVALID_VALUE) } else { Ok((*location).id) }
}

entry!(cuMemGetDefaultMemPool, |pool_out, location, _| {
    if !location.is_null() && matches!((*location).kind, 2..=4) {
        return put(pool_out, host_pool()?.handle());
    }
    put(pool_out, default_pool(device_of(location)?)?.handle())
});

entry!(cuMemGetMemPool, |pool, location, _| put(pool, current_pool(device_of(location)?)?.handle()));
entry!(cuDeviceSetMemPool, |dev, pool| set_pool(dev, pool));
entry!(cuMemSetMemPool, |location, _, pool| set_pool(device_of(location)?, pool));

// --- Sharing ---------------------------------------------------------------------------------------

entry!(cuMemPoolExportToShareableHandle, driver, |handle_out, pool: Pool, handleType, flags| {
    invalid_if(handleType.0 != 1 || flags != 0 || pool.default)?;
    put(handle_out.cast::<c_int>(), vmm::pool_file(pool.gpu)?)
});

entry!(cuMemPoolImportFromShareableHandle, driver, |pool_out, handle, handleType, flags| {
    invalid_if(handleType.0 != 1 || flags != 0)?;
    let gpu = vmm::read_pool_file(handle as usize as c_int)?;
    let ordinal = driver.visible.iter().position(|g| *g == gpu).ok_or(INVALID_DEVICE)?;
    put(pool_out, Pool::create(gpu, ordinal as i32, Sort::Imported)?.handle())
});

entry!(cuMemPoolExportPointer, |shareData_out, ptr| {
    let alloc = driver()?.memory.find(ptr).filter(|a| a.address == ptr).ok_or(INVALID_VALUE)?;
    invalid_if(!matches!(alloc.what, What::Pooled(_)))?;
    put(shareData_out.cast::<vmm::Ticket>(), vmm::share_alloc(&alloc)?)
});

entry!(cuMemPoolImportPointer, |ptr_out, pool: Pool, shareData| {
    invalid_if(shareData.is_null() || !pool.imported)?;
    put(ptr_out, vmm::open_ticket(shareData.cast::<vmm::Ticket>().read_unaligned())?)
});

// --- Memory of graphs ------------------------------------------------------------------------------
//
// Addresses exist from the node's creation on; bytes are charged when the node first runs and stay reserved for the
// device's graphs until they are trimmed.

/// Addresses for an allocation node.
pub(crate) fn graph_address(gpu: u32, ordinal: i32, bytes: u64) -> Res<u64> {
    driver()?.memory.insert(bytes, What::InGraph, gpu, ordinal, 0)
}

/// An allocation node runs.
pub(crate) fn graph_alloc(ordinal: i32, bytes: u64, address: u64) -> Answer {
    let driver = driver()?;
    let gpu = driver.gpu(ordinal)?;
    let mut state = lock(&pools(ordinal)?.graph);
    if !driver.memory.set_in_use(address, true) {
        // Still allocated by the launch before.
        return Err(INVALID_VALUE);
    }
    let missing = (state.used + bytes).saturating_sub(state.reserved);
    if missing > 0 {
        let charged = driver.device.with(|engine, now| {
            driver.device.sweep(engine, now);
            engine.charge(driver.process, gpu, MemKind::Graph, missing)
        });
        if let Err(error) = charged {
            driver.memory.set_in_use(address, false);
            return Err(error.into());
        }
        state.reserved += missing;
        state.reserved_high = state.reserved_high.max(state.reserved);
    }
    state.used += bytes;
    state.used_high = state.used_high.max(state.used);
    Ok(())
}

/// A free node runs, or the program frees what a graph allocated.
pub(crate) fn graph_free(address: u64) -> Answer {
    let driver = driver()?;
    let alloc = driver.memory.find(address).filter(|a| a.address == address).ok_or(INVALID_VALUE)?;
    if alloc.what != What::InGraph {
        return memory::free(address);
    }
    let mut state = lock(&pools(alloc.ordinal)?.graph);
    invalid_if(!driver.memory.set_in_use(address, false))?;
    state.used -= alloc.bytes.min(state.used);
    Ok(())
}

entry!(cuDeviceGraphMemTrim, driver, |device| {
    let gpu = driver.gpu(device)?;
    let mut state = lock(&pools(device)?.graph);
    let surplus = state.reserved - state.used;
    state.reserved = state.used;
    driver.device.with(|engine, _| engine.refund(driver.process, gpu, MemKind::Graph, surplus));
});

entry!(cuDeviceGetGraphMemAttribute, |device, attr, value| {
    let state = *lock(&pools(device)?.graph);
    put(
        value.cast::<u64>(),
        match attr {
            0 => state.used,
            1 => state.used_high,
            2 => state.reserved,
            3 => state.reserved_high,
            _ => return Err(INVALID_VALUE),
        },
    )
});

entry!(cuDeviceSetGraphMemAttribute, |device, attr, value| {
    let mut state = lock(&pools(device)?.graph);
    invalid_if(value.is_null() || value.cast::<u64>().read_unaligned() != 0)?;
    match attr {
        1 => state.used_high = state.used,
        3 => state.reserved_high = state.reserved,
        _ => return Err(INVALID_VALUE),
    }
});
