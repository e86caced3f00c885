//! Device memory: allocations, pools, physical handles, graphs, and what the program is told about memory.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, sys};

use super::wrappers;
use crate::control::{CONTROL, State};
use crate::driver::real;
use crate::gate::{self, Device, stream_of};
use crate::lifecycle::{self, Runtime};
use crate::memory::{Key, Kind, Record};

const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_DEVICE: c_uint = 1;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const POOL_RESERVED: c_uint = 5;
const POOL_USED: c_uint = 7;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const GRAPH_RESERVED: c_uint = 2;

/// The runtime, if this process meters.
pub(super) fn metering() -> Option<&'static Runtime> {
    metering_on(None)
}

/// The same, for a call that needs no context but names its device.
fn metering_on(device: Option<CUdevice>) -> Option<&'static Runtime> {
    let state = CONTROL.state();
    if state == State::Off as u32 || (state != State::Active as u32 && !lifecycle::arm_on(device)) {
        return None;
    }
    CONTROL.runtime()
}

/// The context that an allocation will belong to.
fn current_context() -> usize {
    let mut context: sys::CUcontext = core::ptr::null_mut();
    match real!(cuCtxGetCurrent) {
        // SAFETY: a valid out-pointer.
        Some(get) if unsafe { get(&raw mut context) }.is_ok() => context.addr(),
        _ => 0,
    }
}

/// Reserve, allocate, commit, on the current device. `made` gives the new object's key and what it really takes.
pub(super) fn allocate(
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> (Key, u64),
    undo: impl FnOnce(),
) -> CUresult {
    let Some(runtime) = metering() else { return call() };
    let Some(device) = runtime.current_device() else { return call() };
    allocate_on(runtime, device, current_context(), bytes, call, made, undo)
}

fn allocate_on(
    runtime: &'static Runtime,
    device: &'static Device,
    context: usize,
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> (Key, u64),
    undo: impl FnOnce(),
) -> CUresult {
    if !reserve(runtime, device, bytes) {
        return OUT_OF_MEMORY;
    }
    let result = call();
    if !result.is_ok() {
        runtime.release(device.ordinal, bytes);
        return result;
    }
    let (key, taken) = made();
    if taken > bytes {
        if !reserve(runtime, device, taken - bytes) {
            undo();
            runtime.release(device.ordinal, bytes);
            return OUT_OF_MEMORY;
        }
    } else if taken < bytes {
        runtime.release(device.ordinal, bytes - taken);
    }
    let record = Record { bytes: taken, device: device.ordinal, context, links: 1 };
    if let Some(stale) = runtime.book.insert(key, record) {
        // The driver gave a name again that was never freed through us.
        runtime.release(stale.device, stale.bytes);
    }
    result
}

/// Takes bytes from the account; when they are not there, pools give up what they only keep.
fn reserve(runtime: &'static Runtime, device: &'static Device, bytes: u64) -> bool {
    if bytes == 0 || runtime.reserve(device, bytes) {
        return true;
    }
    trim_pools(runtime, device.ordinal) && runtime.reserve(device, bytes)
}

/// Frees: the record is struck out first, since the driver may give the name to another thread at once.
pub(super) fn free(key: Key, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(runtime) = CONTROL.runtime().filter(|_| CONTROL.state() == State::Active as u32) else {
        return call();
    };
    let record = runtime.book.remove(key);
    let result = call();
    match record {
        Some(record) if result.is_ok() => runtime.release(record.device, record.bytes),
        Some(record) => {
            runtime.book.insert(key, record);
        }
        None => {}
    }
    result
}

/// What an out-pointer holds after a success.
fn read<T: Copy + Default>(pointer: *const T) -> T {
    // SAFETY: null, or written by the driver in the call that succeeded.
    unsafe { pointer.as_ref() }.copied().unwrap_or_default()
}

pub(super) fn handle<T>(pointer: *const *mut T) -> u64 {
    // SAFETY: null, or written by the driver in the call that succeeded.
    unsafe { pointer.as_ref() }.map_or(0, |handle| handle.addr() as u64)
}

fn pointer(address: u64) -> Key {
    Key(Kind::Pointer, address)
}

// ---- pools ----------------------------------------------------------------------------------------------------------

/// One pool operation at a time: what a pool has reserved is read after each.
static POOLS: Mutex<()> = Mutex::new(());

fn pool_attribute(pool: sys::CUmemoryPool, attribute: c_uint) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: a live pool, and an attribute whose value is 64 bits.
    let result = unsafe { real!(cuMemPoolGetAttribute)?(pool, attribute, (&raw mut value).cast::<c_void>()) };
    result.is_ok().then_some(value)
}

/// The pool that a key names. Graphs' memory has a key without a pool.
fn pool_of(key: Key) -> sys::CUmemoryPool {
    core::ptr::with_exposed_provenance_mut(usize::try_from(key.1).unwrap_or(0))
}

fn pool_key(pool: sys::CUmemoryPool) -> Key {
    Key(Kind::Pool, pool.addr() as u64)
}

/// Brings the charge of a pool in line with what it has reserved; `held` bytes have been reserved for it beforehand.
fn settle_pool(runtime: &'static Runtime, pool: sys::CUmemoryPool, ordinal: i32, held: u64) {
    let reserved = pool_attribute(pool, POOL_RESERVED).unwrap_or(0);
    let key = pool_key(pool);
    let charged = match runtime.book.recharge(key, reserved) {
        Some(charged) => charged,
        None => {
            runtime.book.insert(key, Record { bytes: reserved, device: ordinal, context: 0, links: 1 });
            0
        }
    };
    let had = charged + held;
    if reserved > had {
        // The pool grew by more than was asked for (it reserves in large steps): the excess is charged if there is
        // room, and otherwise trimmed away again.
        if let Some(device) = runtime.known_device(ordinal)
            && !runtime.reserve(device, reserved - had)
        {
            runtime.book.recharge(key, had);
        }
    } else {
        runtime.release(ordinal, had - reserved);
    }
}

/// Makes all pools of a device give up what they do not use. `true` if that freed anything.
fn trim_pools(runtime: &'static Runtime, ordinal: i32) -> bool {
    let Some(trim) = real!(cuMemPoolTrimTo) else { return false };
    let before = runtime.known_device(ordinal).map_or(0, |device| device.memory.used());
    let pools = runtime.book.select(|key, record| key.0 == Kind::Pool && record.device == ordinal);
    for (key, _) in pools.into_iter().filter(|(key, _)| key.1 < GRAPHS) {
        let pool = pool_of(key);
        // SAFETY: pools leave the book before they are destroyed.
        if unsafe { trim(pool, 0) }.is_ok() {
            settle_pool(runtime, pool, ordinal, 0);
        }
    }
    runtime.known_device(ordinal).is_some_and(|device| device.memory.used() < before)
}

/// A stream-ordered allocation. On a captured stream it becomes part of a graph.
fn allocate_async(
    pool: Option<sys::CUmemoryPool>,
    bytes: u64,
    stream: usize,
    address: *mut CUdeviceptr,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(runtime) = metering() else { return call() };
    if CONTROL.capturing() && gate::is_captured(stream) {
        GRAPH_MEMORY.store(true, Ordering::Release);
        return call();
    }
    let Some(device) = runtime.current_device() else { return call() };
    let Some(pool) = pool.or_else(|| current_pool(device.ordinal)) else {
        // No pools: an allocation like any other.
        return allocate(bytes, call, || (pointer(read(address)), bytes), || {});
    };
    let ordinal = match runtime.book.get(pool_key(pool)) {
        // Another process owns an imported pool, and pays for it.
        Some(record) if record.device < 0 => return call(),
        Some(record) => record.device,
        None => device.ordinal,
    };
    let Some(device) = runtime.device(ordinal) else { return call() };
    let _one_at_a_time = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = pool_attribute(pool, POOL_RESERVED)
        .unwrap_or(0)
        .saturating_sub(pool_attribute(pool, POOL_USED).unwrap_or(0));
    let needed = bytes.saturating_sub(kept);
    if !reserve(runtime, device, needed) {
        return OUT_OF_MEMORY;
    }
    let result = call();
    settle_pool(runtime, pool, ordinal, needed);
    if result.is_ok() {
        // The pool pays; the record says which pool to look at when it is freed.
        let record = Record { bytes: 0, device: ordinal, context: 0, links: pool.expose_provenance() as u64 };
        runtime.book.insert(pointer(read(address)), record);
    }
    result
}

fn current_pool(ordinal: CUdevice) -> Option<sys::CUmemoryPool> {
    let mut pool: sys::CUmemoryPool = core::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    let result = unsafe { real!(cuDeviceGetMemPool)?(&raw mut pool, ordinal) };
    (result.is_ok() && !pool.is_null()).then_some(pool)
}

fn free_async(address: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(runtime) = CONTROL.runtime().filter(|_| CONTROL.state() == State::Active as u32) else {
        return call();
    };
    let record = runtime.book.get(pointer(address));
    let result = free(pointer(address), call);
    if let Some(record) = record.filter(|record| record.bytes == 0 && result.is_ok())
        && let Ok(pool) = usize::try_from(record.links)
    {
        let _one_at_a_time = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        let pool: sys::CUmemoryPool = core::ptr::with_exposed_provenance_mut(pool);
        if runtime.book.get(pool_key(pool)).is_some() {
            settle_pool(runtime, pool, record.device, 0);
        }
    }
    result
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

/// From here on, names of pools stand for the memory of a device's graphs.
const GRAPHS: u64 = u64::MAX - 4096;

/// Whether any graph of this process holds memory.
static GRAPH_MEMORY: AtomicBool = AtomicBool::new(false);

/// Charges what graphs have reserved on the current device.
#[inline]
pub(super) fn graph_launched() {
    if GRAPH_MEMORY.load(Ordering::Relaxed) {
        settle_graphs();
    }
}

#[cold]
fn settle_graphs() {
    let Some(runtime) = metering() else { return };
    let Some(device) = runtime.current_device() else { return };
    let mut reserved = 0u64;
    let Some(get) = real!(cuDeviceGetGraphMemAttribute) else { return };
    // SAFETY: an attribute whose value is 64 bits.
    if !unsafe { get(device.ordinal, GRAPH_RESERVED, (&raw mut reserved).cast::<c_void>()) }.is_ok() {
        return;
    }
    let _one_at_a_time = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let key = Key(Kind::Pool, GRAPHS + u64::from(device.ordinal.unsigned_abs()));
    let charged = runtime.book.get(key).map_or(0, |record| record.bytes);
    if reserved > charged && !runtime.reserve(device, reserved - charged) {
        // The memory is there already; the next allocation fails.
        return;
    }
    if reserved < charged {
        runtime.release(device.ordinal, charged - reserved);
    }
    runtime.book.insert(key, Record { bytes: reserved, device: device.ordinal, context: 0, links: 1 });
}

// ---- physical handles -----------------------------------------------------------------------------------------------

fn unlink(runtime: &'static Runtime, key: Key) {
    if let Some(record) = runtime.book.unlink(key) {
        runtime.release(record.device, record.bytes);
    }
}

wrappers! { MEMORY:
    // SAFETY (of the blocks below): the caller's own arguments, passed on.
    cuMemAlloc(address: *mut c_uint, bytes: c_uint) |real| {
        // SAFETY: as above.
        allocate(bytes.into(), || unsafe { real(address, bytes) }, || (pointer(read(address).into()), bytes.into()), || {})
    }
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) |real| {
        // SAFETY: as above.
        allocate(bytes as u64, || unsafe { real(address, bytes) }, || (pointer(read(address)), bytes as u64), || {})
    }
    cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: c_uint) |real| {
        let made = || (pointer(read(address)), bytes as u64);
        // SAFETY: as above.
        allocate(bytes as u64, || unsafe { real(address, bytes, flags) }, made, || {})
    }
    cuMemAllocPitch(address: *mut c_uint, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint) |real| {
        let made = || (pointer(read(address).into()), u64::from(read(pitch)).saturating_mul(height.into()));
        let undo = || if let Some(free) = crate::driver::real!(cuMemFree) {
            // SAFETY: the driver has just given it.
            let _ = unsafe { free(read(address)) };
        };
        let bytes = u64::from(width).saturating_mul(height.into());
        // SAFETY: as above.
        allocate(bytes, || unsafe { real(address, pitch, width, height, element) }, made, undo)
    }
    cuMemAllocPitch_v2(address: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize,
        element: c_uint) |real| {
        let made = || (pointer(read(address)), (read(pitch) as u64).saturating_mul(height as u64));
        let undo = || if let Some(free) = crate::driver::real!(cuMemFree_v2) {
            // SAFETY: the driver has just given it.
            let _ = unsafe { free(read(address)) };
        };
        let bytes = (width as u64).saturating_mul(height as u64);
        // SAFETY: as above.
        allocate(bytes, || unsafe { real(address, pitch, width, height, element) }, made, undo)
    }
    cuMemFree(address: c_uint) |real| {
        // SAFETY: as above.
        free(pointer(address.into()), || unsafe { real(address) })
    }
    cuMemFree_v2(address: CUdeviceptr) |real| {
        // SAFETY: as above.
        free_async(address, || unsafe { real(address) })
    }
    cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, stream) };
        allocate_async(None, bytes as u64, stream_of(stream, false), address, call)
    }
    cuMemAllocAsync_ptsz(address: *mut CUdeviceptr, bytes: usize, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, stream) };
        allocate_async(None, bytes as u64, stream_of(stream, true), address, call)
    }
    cuMemAllocFromPoolAsync(address: *mut CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool,
        stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, pool, stream) };
        allocate_async(Some(pool), bytes as u64, stream_of(stream, false), address, call)
    }
    cuMemAllocFromPoolAsync_ptsz(address: *mut CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool,
        stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, pool, stream) };
        allocate_async(Some(pool), bytes as u64, stream_of(stream, true), address, call)
    }
    cuMemFreeAsync(address: CUdeviceptr, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        free_async(address, || unsafe { real(address, stream) })
    }
    cuMemFreeAsync_ptsz(address: CUdeviceptr, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        free_async(address, || unsafe { real(address, stream) })
    }
    cuMemPoolCreate(pool: *mut sys::CUmemoryPool, props: *const sys::CUmemPoolProps) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, props) };
        if result.is_ok() && !props.is_null() && let Some(runtime) = metering() {
            // SAFETY: the caller's own; the location is read as plain integers.
            let location = unsafe { (&raw const (*props).location).cast::<CUmemLocation>().read() };
            let device = if location.kind == LOCATION_DEVICE { location.id } else { -1 };
            runtime.book.insert(Key(Kind::Pool, handle(pool)), Record { bytes: 0, device, context: 0, links: 1 });
        }
        result
    }
    cuMemPoolImportFromShareableHandle(pool: *mut sys::CUmemoryPool, shared: *mut c_void,
        kind: sys::CUmemAllocationHandleType, flags: c_ulonglong) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, shared, kind, flags) };
        if result.is_ok() && let Some(runtime) = metering() {
            runtime.book.insert(Key(Kind::Pool, handle(pool)), Record { bytes: 0, device: -1, context: 0, links: 1 });
        }
        result
    }
    cuMemPoolDestroy(pool: sys::CUmemoryPool) |real| {
        let _one_at_a_time = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as above.
        free(pool_key(pool), || unsafe { real(pool) })
    }
    cuMemPoolTrimTo(pool: sys::CUmemoryPool, keep: usize) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, keep) };
        if let Some(runtime) = CONTROL.runtime()
            && let Some(record) = runtime.book.get(pool_key(pool)).filter(|record| record.device >= 0)
        {
            let _one_at_a_time = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
            settle_pool(runtime, pool, record.device, 0);
        }
        result
    }
    cuMemCreate(out: *mut sys::CUmemGenericAllocationHandle, bytes: usize, prop: *const sys::CUmemAllocationProp,
        flags: c_ulonglong) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(out, bytes, prop, flags) };
        if prop.is_null() {
            return call();
        }
        // SAFETY: the caller's own; the location is read as plain integers. No context need be current here.
        let location = unsafe { (&raw const (*prop).location).cast::<CUmemLocation>().read() };
        if location.kind != LOCATION_DEVICE {
            return call();
        }
        let Some(runtime) = metering_on(Some(location.id)) else { return call() };
        let Some(device) = runtime.device(location.id) else { return call() };
        allocate_on(runtime, device, 0, bytes as u64, call, || (Key(Kind::Handle, read(out)), bytes as u64), || {})
    }
    cuMemRelease(physical: sys::CUmemGenericAllocationHandle) |real| {
        let key = Key(Kind::Handle, physical);
        let Some(runtime) = CONTROL.runtime() else {
            // SAFETY: as above.
            return unsafe { real(physical) };
        };
        // Struck out first: the driver may give the name to another thread at once.
        let last = runtime.book.unlink(key);
        // SAFETY: as above.
        let result = unsafe { real(physical) };
        match last {
            Some(record) if result.is_ok() => runtime.release(record.device, record.bytes),
            Some(record) => { runtime.book.insert(key, Record { links: 1, ..record }); }
            None if !result.is_ok() => { runtime.book.link(key); }
            None => {}
        }
        result
    }
    cuMemRetainAllocationHandle(out: *mut sys::CUmemGenericAllocationHandle, address: *mut c_void) |real| {
        // SAFETY: as above.
        let result = unsafe { real(out, address) };
        if result.is_ok() && let Some(runtime) = CONTROL.runtime() {
            runtime.book.link(Key(Kind::Handle, read(out)));
        }
        result
    }
    cuMemImportFromShareableHandle(out: *mut sys::CUmemGenericAllocationHandle, shared: *mut c_void,
        kind: sys::CUmemAllocationHandleType) |real| {
        // SAFETY: as above.
        let result = unsafe { real(out, shared, kind) };
        // Another process's memory is not in the book. This process's own may come back under its old name.
        if result.is_ok() && let Some(runtime) = CONTROL.runtime() {
            runtime.book.link(Key(Kind::Handle, read(out)));
        }
        result
    }
    cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, physical: sys::CUmemGenericAllocationHandle,
        flags: c_ulonglong) |real| {
        // SAFETY: as above.
        let result = unsafe { real(address, bytes, offset, physical, flags) };
        if result.is_ok()
            && let Some(runtime) = CONTROL.runtime()
            && runtime.book.link(Key(Kind::Handle, physical))
        {
            let record = Record { bytes: bytes as u64, device: -1, context: 0, links: physical };
            runtime.book.insert(Key(Kind::Mapping, address), record);
        }
        result
    }
    cuMemUnmap(address: CUdeviceptr, bytes: usize) |real| {
        let Some(runtime) = CONTROL.runtime() else {
            // SAFETY: as above.
            return unsafe { real(address, bytes) };
        };
        let end = address.saturating_add(bytes as u64);
        let key = Key(Kind::Mapping, address);
        // Nearly always one mapping is unmapped as it was mapped.
        let gone = match runtime.book.get(key).filter(|record| record.bytes == bytes as u64) {
            Some(record) => { runtime.book.remove(key); vec![(key, record)] }
            None => runtime.book.drain(|key, _| key.0 == Kind::Mapping && (address..end).contains(&key.1)),
        };
        // SAFETY: as above.
        let result = unsafe { real(address, bytes) };
        for (key, record) in gone {
            if result.is_ok() {
                unlink(runtime, Key(Kind::Handle, record.links));
            } else {
                runtime.book.insert(key, record);
            }
        }
        result
    }
    cuGraphAddMemAllocNode(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode,
        count: usize, params: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS) |real| {
        GRAPH_MEMORY.store(true, Ordering::Release);
        // SAFETY: as above.
        unsafe { real(node, graph, dependencies, count, params) }
    }
    cuDeviceGraphMemTrim(device: CUdevice) |real| {
        // SAFETY: as above.
        let result = unsafe { real(device) };
        graph_launched();
        result
    }
    cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) |real| {
        // SAFETY: as above.
        let result = unsafe { real(free, total) };
        if result.is_ok() && let Some((real_free, real_total)) = seen(read(free).into(), read(total).into()) {
            write(free, c_uint::try_from(real_free).unwrap_or(c_uint::MAX));
            write(total, c_uint::try_from(real_total).unwrap_or(c_uint::MAX));
        }
        result
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |real| {
        // The driver fills both in one call; a caller may leave one out.
        let (mut real_free, mut real_total) = (0usize, 0usize);
        // SAFETY: valid out-pointers.
        let result = unsafe { real(&raw mut real_free, &raw mut real_total) };
        if !result.is_ok() {
            return result;
        }
        let (free_bytes, total_bytes) = seen(real_free as u64, real_total as u64)
            .map_or((real_free, real_total), |(f, t)| (usize::try_from(f).unwrap_or(0), usize::try_from(t).unwrap_or(0)));
        write(free, free_bytes);
        write(total, total_bytes);
        result
    }
    cuDeviceTotalMem(total: *mut c_uint, device: CUdevice) |real| {
        // SAFETY: as above.
        let result = unsafe { real(total, device) };
        if result.is_ok() && let Some(limit) = limit_of(device) {
            write(total, read(total).min(c_uint::try_from(limit).unwrap_or(c_uint::MAX)));
        }
        result
    }
    cuDeviceTotalMem_v2(total: *mut usize, device: CUdevice) |real| {
        // SAFETY: as above.
        let result = unsafe { real(total, device) };
        if result.is_ok() && let Some(limit) = limit_of(device) {
            write(total, read(total).min(usize::try_from(limit).unwrap_or(usize::MAX)));
        }
        result
    }
}

/// Writes to the caller's out-pointer, which may have been left out.
fn write<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: the caller's own out-pointer.
        unsafe { pointer.write(value) };
    }
}

/// Free and total memory of the current device as the program shall see them.
fn seen(free: u64, total: u64) -> Option<(u64, u64)> {
    let runtime = metering()?;
    let device = runtime.current_device()?;
    graph_launched();
    // Pools shrink by themselves when the device has caught up.
    let pools = runtime
        .book
        .select(|key, record| key.0 == Kind::Pool && record.device == device.ordinal && record.bytes > 0);
    for (key, _) in pools.into_iter().filter(|(key, _)| key.1 < GRAPHS) {
        let _one_at_a_time = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        if runtime.book.get(key).is_some() {
            settle_pool(runtime, pool_of(key), device.ordinal, 0);
        }
    }
    Some(device.memory.view(free, total))
}

/// The memory limit of a device. Before it has a context, the environment's word is all there is.
fn limit_of(device: c_int) -> Option<u64> {
    if CONTROL.state() == State::Off as u32 {
        return None;
    }
    let current = lifecycle::current_ordinal() == Some(device);
    let runtime = if current { metering() } else { CONTROL.runtime() };
    match runtime
        .and_then(|runtime| if current { runtime.device(device) } else { runtime.known_device(device) })
    {
        Some(device) => device.memory.limit(),
        None => lifecycle::limit_from_environment(),
    }
}
