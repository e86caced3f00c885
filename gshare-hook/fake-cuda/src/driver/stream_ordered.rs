//! Stream-ordered memory: from pools, and in graphs. A pool has freed bytes again at the call, before the stream
//! reaches the free.

use super::capture::{legacy_not_implied, submit};
use super::memory_pool::{Pool, Sort};
use super::registry::What;
use super::tasks::Task;
use super::*;

fn allocate_on(pool: Ref<Pool>, stream: Ref<Stream>, bytes: u64) -> Res<u64> {
    if bytes == 0 {
        return Ok(0);
    }
    legacy_not_implied(stream)?;
    if stream.capturing.load(Acquire) {
        let address = graph_address(pool.device, bytes)?;
        submit(stream, GraphAlloc { device: pool.device, bytes, address })?;
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
        return submit(stream, GraphFree(dptr));
    }
    let driver = driver()?;
    match driver.memory().at(dptr)?.what {
        What::Pooled(..) => memory_pool::free(dptr, Some(stream)),
        What::InGraph(_) => graph_free(dptr, stream),
        What::Charged(MemKind::Plain) => device_memory::free(dptr, Some(stream)),
        What::Imported => vmm::close_imported(dptr),
        _ => Err(INVALID_VALUE),
    }
});

// --- Pools -----------------------------------------------------------------------------------------

// `CUmemPoolProps`: type, handle types, location (kind, id), … as integers.
entry!(cuMemPoolCreate, driver, |pool, poolProps| {
    let [kind, _, location, id] = read::<[u32; 4]>(poolProps.cast())?;
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
    // Allocated memory stays with its chunks until it is freed.
    pool.trim(0)?;
    lock(&pool.device.pools()?.all).retain(|p| !std::ptr::eq(*p, pool));
});

entry!(cuMemPoolTrimTo, driver, |pool: Pool, keep| pool.trim(keep as u64).map(drop));

entry!(cuMemPoolGetAttribute, driver, |pool: Pool, attr, value| {
    let state = lock(&pool.held).state;
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
    let state = &mut lock(&pool.held).state;
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
    let alloc = driver.memory().at(ptr)?;
    invalid_if(!matches!(alloc.what, What::Pooled(..)))?;
    put(shareData_out.cast::<vmm::Ticket>(), vmm::share_alloc(&alloc)?)
});

entry!(cuMemPoolImportPointer, |ptr_out, pool: Pool, shareData| {
    invalid_if(pool.sort != Sort::Imported)?;
    put(ptr_out, vmm::open_ticket(read(shareData.cast())?)?)
});

// --- Memory of graphs ------------------------------------------------------------------------------
//
// Addresses exist from the node's creation on. The node's first run charges the bytes; they stay reserved for the device's graphs until a
// trim.

/// Addresses for an allocation node.
pub(crate) fn graph_address(device: Device, bytes: u64) -> Res<u64> {
    driver()?.memory().insert(bytes, What::InGraph(false), device, 0)
}

/// Allocation by a node of a graph.
pub(crate) struct GraphAlloc {
    pub(crate) device: Device,
    pub(crate) bytes: u64,
    pub(crate) address: u64,
}

task!(GraphAlloc, 10, |alloc, _| alloc.run_now());

impl GraphAlloc {
    fn run_now(&self) -> Answer {
        let &Self { device, bytes, address } = self;
        let known = driver()?.memory();
        let mut state = lock(&device.pools()?.graph);
        // Refused while the previous launch's allocation is live.
        invalid_if(!known.set_in_use(address, true))?;
        let missing = (state.used + bytes).saturating_sub(state.reserved);
        if missing > 0 {
            device.charge(MemKind::Graph, missing).inspect_err(|_| {
                known.set_in_use(address, false);
            })?;
            state.reserve(missing);
        }
        state.take(bytes);
        Ok(())
    }
}

/// A free of an address by a node of a graph.
pub(crate) struct GraphFree(pub(crate) u64);

task!(GraphFree, 11, |GraphFree(address), stream| graph_free(*address, stream));

/// Frees a graph's allocation, for a free node or for the program.
pub(crate) fn graph_free(address: u64, stream: Ref<Stream>) -> Answer {
    let known = driver()?.memory();
    let alloc = known.at(address)?;
    if !matches!(alloc.what, What::InGraph(_)) {
        return device_memory::free(address, Some(stream));
    }
    let mut state = lock(&alloc.device.pools()?.graph);
    invalid_if(!known.set_in_use(address, false))?;
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
