//! Memory pools and the memory of graphs.
//!
//! A pool is charged at its reserved size, which the driver decides: the driver keeps freed memory, cannot always use the memory it
//! keeps, and grows pools in large steps. Before an allocation there must be room for the pool's memory in use and the new bytes.
//! Afterwards the charge follows the pool's size. If there is no room for the charge, all pools give their spare memory up. If
//! there is still no room, the allocation is undone, and the caller's pointer is left as it was. Some memory cannot be undone:
//! memory that is freed when its stream gets there, and memory of graphs, which exists once they run. Its charge takes the rest of
//! the limit, so the next allocation fails.
//!
//! In a process that can be parked, large allocations are blocks in place of the driver's: see [`served`](crate::exports::served).
//!
//! A device's pools change one at a time, and no thread waits for the daemon with them locked.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_uint, c_ulonglong, c_void};
use core::sync::atomic::{AtomicU64, Ordering};

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, sys};

use crate::device::Device;
use crate::device::book::{Key, Kind, Record};
use crate::device::context::relaxed;
use crate::device::devices::{DEVICES, current_ordinal};
use crate::device::pools::{self, Mark};
use crate::exports::blocks::create_block;
use crate::exports::macros::wrappers;
use crate::exports::memory::{
    OUT_OF_MEMORY, allocate_on, current_context, device_at, free, handle, metered, metering, pointer, read,
    reserve, runtime_if_metered, with_room, write, write_down,
};
use crate::exports::served::{
    destroy_served, free_in_order, note, serve_made, serving, take_spare, trim_served,
};
use crate::launch::control::CONTROL;
use crate::launch::streams::{self, stream_of};
use crate::process::runtime::{Metered, PROCESS, Runtime};
use crate::sys::driver::real;
use crate::sys::lock::{Guard, Lock};

/// `CU_MEMPOOL_ATTR_LOCATION_TYPE`.
const POOL_LOCATION: c_uint = 12;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const GRAPH_RESERVED: c_uint = 2;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const NODE_ALLOCATES: c_uint = 10;

/// The rest of the limit by this process's own count.
fn left(device: &Device) -> u64 {
    device.memory.limit().map_or(u64::MAX, |limit| limit.saturating_sub(device.memory.used()))
}

/// Takes as much of `bytes` as there is, and returns this amount.
fn reserve_what_is_left(runtime: &'static Runtime, device: &'static Device, bytes: u64) -> u64 {
    let (mut part, mut taken) = (bytes.min(left(device)), 0);
    // Other processes may have taken some of the rest, and only the daemon knows.
    while part > 0 {
        if runtime.reserve(device, part) {
            taken += part;
        } else if part < 1 << 16 {
            break;
        } else {
            part /= 2;
        }
        part = part.min(bytes - taken);
    }
    taken
}

// ---- pools ----------------------------------------------------------------------------------------------------------

/// Admits one pool operation at a time on a device. The guarded number is the rest of the limit, by this process's own count, at
/// the last time when no more could be had for the memory of pools and graphs.
static LOCKS: [Lock<u64>; DEVICES] = [const { Lock::new(0) }; DEVICES];

fn one_at_a_time(ordinal: i32) -> Guard<'static, u64> {
    LOCKS[ordinal.unsigned_abs() as usize % DEVICES].lock()
}

fn pool_attribute(pool: sys::CUmemoryPool, attribute: c_uint) -> Option<u64> {
    pools::attribute(pool.expose_provenance(), attribute)
}

/// The pool of a key, except for the key of graphs' memory, which has no pool.
fn pool_of(key: Key) -> sys::CUmemoryPool {
    core::ptr::with_exposed_provenance_mut(usize::try_from(key.1).unwrap_or(0))
}

fn pool_key(pool: sys::CUmemoryPool) -> Key {
    Key(Kind::Pool, pool.expose_provenance() as u64)
}

/// Memory reserved by a pool, or by a device's graphs.
fn reserved_by(key: Key, ordinal: i32) -> u64 {
    if key.1 < GRAPHS {
        return pool_attribute(pool_of(key), pools::RESERVED).unwrap_or(0);
    }
    let mut value = 0u64;
    match real!(cuDeviceGetGraphMemAttribute) {
        // SAFETY: an attribute of 64 bits.
        Some(get) if unsafe { get(ordinal, GRAPH_RESERVED, (&raw mut value).cast::<c_void>()) }.is_ok() => {
            value
        }
        _ => 0,
    }
}

/// Writes a pool down with its device, which is -1 for a pool not charged here.
fn enter_pool(runtime: &'static Runtime, key: Key, device: i32) {
    write_down(runtime, key, Record { bytes: 0, device, context: 0, links: 1 });
}

/// Brings the charge of a pool in line with its reserved size, out of the charge and of the `held` bytes reserved for it
/// beforehand. Returns the missing bytes.
fn settle(runtime: &'static Runtime, _locked: &Guard<'_, u64>, key: Key, ordinal: i32, held: u64) -> u64 {
    // Pools leave the book before they are destroyed.
    let Some(record) = runtime.book.get(key) else {
        runtime.release(ordinal, held);
        return 0;
    };
    let (reserved, had) = (reserved_by(key, ordinal), record.bytes + held);
    let charge = reserved.min(had);
    runtime.book.recharge(key, charge);
    runtime.release(ordinal, had - charge);
    reserved - charge
}

/// Like [`settle`], where nothing can be undone, so the missing bytes take the rest of the limit.
pub(super) fn settle_for_good(runtime: &'static Runtime, key: Key, ordinal: i32) {
    let locked = one_at_a_time(ordinal);
    let (missing, refused) = (settle(runtime, &locked, key, ordinal, 0), *locked);
    drop(locked);
    let Some(device) = runtime.metering.devices.get(ordinal).filter(|_| missing > 0) else { return };
    // Without this check every launch of a graph would ask the daemon in vain.
    if left(device) <= refused {
        return;
    }
    let taken = reserve_what_is_left(runtime, device, missing);
    let mut locked = one_at_a_time(ordinal);
    *locked = if taken < missing { left(device) } else { 0 };
    settle(runtime, &locked, key, ordinal, taken);
}

/// Makes all pools of a device give their spare memory up.
pub(super) fn trim_pools(runtime: &'static Runtime, ordinal: i32) {
    if let Some(blocks) = runtime.blocks() {
        runtime.end_spare(blocks, |_| 0, Mark::is_awaited);
    }
    let Some(trim) = real!(cuMemPoolTrimTo) else { return };
    for (key, _) in runtime.book.select(|key, record| key.0 == Kind::Pool && record.device == ordinal) {
        let locked = one_at_a_time(ordinal);
        if key.1 >= GRAPHS || runtime.book.get(key).is_none() {
            continue;
        }
        // SAFETY: pools leave the book before they are destroyed, and this happens with their device locked.
        if relaxed(|| unsafe { trim(pool_of(key), 0) }).is_ok() {
            settle(runtime, &locked, key, ordinal, 0);
        }
    }
}

/// The device of a stream, for which the driver is asked only where several devices are in use.
fn device_of_stream(runtime: &'static Runtime, stream: usize) -> Metered<&'static Device> {
    if let Some(device) = runtime.metering.devices.sole() {
        return Metered::Yes(device);
    }
    ordinal_of_stream(stream).or_else(current_ordinal).map_or(Metered::No, |ordinal| runtime.device(ordinal))
}

fn ordinal_of_stream(stream: usize) -> Option<CUdevice> {
    let handle: sys::CUstream = core::ptr::with_exposed_provenance_mut(stream);
    let mut ordinal: CUdevice = 0;
    // SAFETY: the program's own stream, and a valid out-pointer.
    if real!(cuStreamGetDevice).is_some_and(|get| unsafe { get(handle, &raw mut ordinal) }.is_ok()) {
        return Some(ordinal);
    }
    // Drivers before 12.8 do not tell a stream's device.
    streams::in_context_of(stream, current_ordinal)
}

/// The device of a pool that this process did not make while it was counted, or -1 for a pool of host memory.
fn ordinal_of_pool(pool: sys::CUmemoryPool) -> Option<i32> {
    // The driver writes half of the 64 bits, and drivers before 13.1 do not know the attribute.
    let kind = pool_attribute(pool, POOL_LOCATION).and_then(|kind| c_uint::try_from(kind).ok());
    if kind.is_some_and(|kind| device_at(CUmemLocation { kind, id: 0 }).is_none()) {
        return Some(-1);
    }
    let mut devices = 0;
    // SAFETY: a valid out-pointer.
    let _ = unsafe { real!(cuDeviceGetCount)?(&raw mut devices) };
    (0..devices).find(|&ordinal| default_pool(ordinal) == Some(pool) || current_pool(ordinal) == Some(pool))
}

fn current_pool(ordinal: CUdevice) -> Option<sys::CUmemoryPool> {
    let mut pool: sys::CUmemoryPool = core::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    let result = unsafe { real!(cuDeviceGetMemPool)?(&raw mut pool, ordinal) };
    (result.is_ok() && !pool.is_null()).then_some(pool)
}

fn default_pool(ordinal: CUdevice) -> Option<sys::CUmemoryPool> {
    let mut pool: sys::CUmemoryPool = core::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    let result = unsafe { real!(cuDeviceGetDefaultMemPool)?(&raw mut pool, ordinal) };
    (result.is_ok() && !pool.is_null()).then_some(pool)
}

/// Makes a stream-ordered allocation, which becomes part of a graph on a captured stream.
fn allocate_async(
    pool: Option<sys::CUmemoryPool>,
    bytes: u64,
    (stream, per_thread): (sys::CUstream, bool),
    address: *mut CUdeviceptr,
    call: impl Fn() -> CUresult,
) -> CUresult {
    let runtime = metered!(metering(None), call);
    let handle = stream_of(stream, per_thread);
    let captured = CONTROL.capturing() && streams::is_captured(handle);
    let device = metered!(device_of_stream(runtime, handle), call);
    let Some(chosen) = pool.or_else(|| current_pool(device.ordinal)) else {
        if captured {
            return call();
        }
        // Without pools the allocation is like any other.
        let made = || (pointer(read(address)), bytes);
        return allocate_on(runtime, device, current_context(), bytes, call, made, || {});
    };
    let key = pool_key(chosen);
    let ordinal = match (runtime.book.get(key), pool) {
        (Some(record), _) => record.device,
        (None, Some(named)) => ordinal_of_pool(named).unwrap_or(device.ordinal),
        (None, None) => device.ordinal,
    };
    if captured {
        graphs_allocate_on(ordinal);
        return call();
    }
    // Host memory is not charged, and neither is an imported pool, which another process owns and pays for.
    let device = metered!(runtime.device(ordinal), call);
    let is_default = || default_pool(ordinal) == Some(chosen);
    if let Some((blocks, pool)) = serving(runtime, chosen, is_default, bytes)
        && !address.is_null()
    {
        let result = match take_spare(blocks, &pool, bytes, handle) {
            Some(block) => {
                write(address, block);
                CUresult::CUDA_SUCCESS
            }
            None => {
                streams::in_context_of(handle, || blocks.pools.made_in(current_context()));
                create_block(runtime, blocks, device, bytes, (0, Some(&pool)), |block| write(address, block))
            }
        };
        note(chosen);
        return result;
    }
    let mut locked = one_at_a_time(ordinal);
    if runtime.book.get(key).is_none() {
        enter_pool(runtime, key, ordinal);
    }
    let mut held = 0;
    loop {
        let charged = runtime.book.get(key).map_or(0, |record| record.bytes);
        let wanted = pool_attribute(chosen, pools::USED).unwrap_or(0).saturating_add(bytes);
        let more = wanted.saturating_sub(charged + held);
        if runtime.reserve_at_once(device, more) {
            held += more;
            break;
        }
        drop(locked);
        if !reserve(runtime, device, more) {
            runtime.release(ordinal, held);
            return OUT_OF_MEMORY;
        }
        held += more;
        locked = one_at_a_time(ordinal);
    }
    let before = read(address);
    let mut result = call();
    if result == OUT_OF_MEMORY && runtime.blocks().is_some() {
        drop(locked);
        result = with_room(runtime, device, || {
            let _locked = one_at_a_time(ordinal);
            call()
        });
        locked = one_at_a_time(ordinal);
    }
    let mut missing = settle(runtime, &locked, key, ordinal, held);
    if !result.is_ok() {
        return result;
    }
    // The pool pays, and the record names the pool to look at when the pointer is freed.
    let record = Record { bytes, device: -1, context: 0, links: key.1 };
    write_down(runtime, pointer(read(address)), record);
    while missing > 0 {
        drop(locked);
        let got = reserve(runtime, device, missing);
        locked = one_at_a_time(ordinal);
        missing = settle(runtime, &locked, key, ordinal, if got { missing } else { 0 });
        if !got && missing > 0 {
            drop(locked);
            free_again(read(address), stream, per_thread);
            write(address, before);
            trim_pools(runtime, ordinal);
            settle_for_good(runtime, key, ordinal);
            return OUT_OF_MEMORY;
        }
    }
    note(chosen);
    result
}

/// Undoes an allocation, in the order of its stream.
fn free_again(address: CUdeviceptr, stream: sys::CUstream, per_thread: bool) {
    if let Some(runtime) = PROCESS.runtime() {
        runtime.book.remove(pointer(address));
    }
    let free = if per_thread { real!(cuMemFreeAsync_ptsz) } else { real!(cuMemFreeAsync) };
    if let Some(free) = free {
        // SAFETY: the driver has just given it, on this stream.
        let _ = unsafe { free(address, stream) };
    }
}

/// Makes a call that destroys a pool. The pool's allocations stay until they are freed, and pay for themselves from now on.
fn destroy_pool(pool: sys::CUmemoryPool, call: impl FnOnce() -> CUresult) -> CUresult {
    let key = pool_key(pool);
    let Some(runtime) = PROCESS.runtime() else { return call() };
    let Some(known) = runtime.book.get(key) else { return call() };
    let _locked = one_at_a_time(known.device);
    let Some(record) = runtime.book.remove(key) else { return call() };
    let result = call();
    if !result.is_ok() {
        runtime.book.insert(key, record);
        return result;
    }
    let mut left = record.bytes;
    for (Key(_, address), held) in
        runtime.book.drain(|name, held| name.0 == Kind::Pointer && held.links == key.1)
    {
        let bytes = held.bytes.min(left);
        left -= bytes;
        runtime.book.insert(pointer(address), Record { bytes, device: record.device, context: 0, links: 1 });
    }
    runtime.release(record.device, left);
    result
}

/// Writes down a pool of host memory named by the driver.
fn host_pool_named(pool: *const sys::CUmemoryPool, location: *const CUmemLocation) {
    // SAFETY: the driver has accepted the caller's location; it is plain integers.
    let on_host = unsafe { location.as_ref() }.is_some_and(|location| device_at(*location).is_none());
    if on_host && let Some(runtime) = runtime_if_metered(None) {
        enter_pool(runtime, Key(Kind::Pool, handle(pool)), -1);
    }
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

/// From here on, names of pools stand for the memory of a device's graphs.
pub(super) const GRAPHS: u64 = u64::MAX - 4096;

/// Devices on which graphs of this process hold memory, a bit for each.
static GRAPH_MEMORY: AtomicU64 = AtomicU64::new(0);

/// Notes that graphs may hold memory of this device from now on.
fn graphs_allocate_on(ordinal: i32) {
    if let Some(bit) = u32::try_from(ordinal).ok().and_then(|ordinal| 1u64.checked_shl(ordinal)) {
        GRAPH_MEMORY.fetch_or(bit, Ordering::Release);
    }
}

/// Charges the memory reserved by graphs. A graph launched on one device may allocate on another.
#[inline]
pub(super) fn graph_launched() {
    let devices = GRAPH_MEMORY.load(Ordering::Relaxed);
    if devices != 0 {
        settle_graphs(devices);
    }
}

#[cold]
fn settle_graphs(devices: u64) {
    let Some(runtime) = runtime_if_metered(None) else { return };
    for ordinal in (0..u64::BITS.cast_signed()).filter(|ordinal| devices >> ordinal & 1 == 1) {
        let Metered::Yes(device) = runtime.device(ordinal) else { continue };
        let key = Key(Kind::Pool, GRAPHS + u64::from(ordinal.unsigned_abs()));
        let locked = one_at_a_time(ordinal);
        if runtime.book.get(key).is_none() {
            enter_pool(runtime, key, ordinal);
        }
        drop(locked);
        settle_for_good(runtime, key, device.ordinal);
    }
}

/// Notes a new allocation node.
fn note_allocation(params: *const sys::CUDA_MEM_ALLOC_NODE_PARAMS) {
    if params.is_null() {
        return;
    }
    // SAFETY: the caller's own description; the location is read as plain integers.
    let location = unsafe { (&raw const (*params).poolProps.location).cast::<CUmemLocation>().read() };
    if let Some(device) = device_at(location) {
        graphs_allocate_on(device);
    }
}

/// Notes a new node by its general description.
fn note_node(params: *const sys::CUgraphNodeParams) {
    // SAFETY: null, or the caller's own description, which begins with its kind.
    if unsafe { params.cast::<c_uint>().as_ref() } == Some(&NODE_ALLOCATES) {
        // SAFETY: not null; the description of its kind follows the kind.
        note_allocation(unsafe { &raw const (*params).__bindgen_anon_1 }.cast());
    }
}

wrappers! { POOLS:
    cuMemAllocAsync, cuMemAllocAsync_ptsz(address: *mut CUdeviceptr, bytes: usize,
        stream: sys::CUstream) |call, per_thread| {
        allocate_async(None, bytes as u64, (stream, per_thread), address, call)
    }
    cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(address: *mut CUdeviceptr, bytes: usize,
        pool: sys::CUmemoryPool, stream: sys::CUstream) |call, per_thread| {
        allocate_async(Some(pool), bytes as u64, (stream, per_thread), address, call)
    }
    cuMemFreeAsync, cuMemFreeAsync_ptsz(address: CUdeviceptr, stream: sys::CUstream) |call, per_thread| {
        free_in_order(address, (stream, per_thread)).unwrap_or_else(|| free(pointer(address), call))
    }
    cuMemPoolCreate(pool: *mut sys::CUmemoryPool, props: *const sys::CUmemPoolProps) |call| {
        let result = call();
        if result.is_ok() && !props.is_null() {
            // SAFETY: the caller's own; the location is read as plain integers. No context need be current here.
            let location = unsafe { (&raw const (*props).location).cast::<CUmemLocation>().read() };
            let device = device_at(location);
            if let Some(runtime) = runtime_if_metered(device) {
                enter_pool(runtime, Key(Kind::Pool, handle(pool)), device.unwrap_or(-1));
                if device.is_some() {
                    serve_made(runtime, handle(pool), props);
                }
            }
        }
        result
    }
    cuMemGetDefaultMemPool, cuMemGetMemPool(pool: *mut sys::CUmemoryPool, location: *mut CUmemLocation,
        kind: c_uint) |call| { call().on_success(|| host_pool_named(pool, location)) }
    cuMemPoolImportFromShareableHandle(pool: *mut sys::CUmemoryPool, shared: *mut c_void,
        kind: sys::CUmemAllocationHandleType, flags: c_ulonglong) |call| {
        let result = call();
        if result.is_ok() && let Some(runtime) = runtime_if_metered(None) {
            enter_pool(runtime, Key(Kind::Pool, handle(pool)), -1);
        }
        result
    }
    cuMemPoolDestroy(pool: sys::CUmemoryPool) |call| { destroy_served(pool, || destroy_pool(pool, call)) }
    cuMemPoolTrimTo(pool: sys::CUmemoryPool, keep: usize) |call| {
        let result = trim_served(pool, keep as u64, call);
        if let Some(runtime) = PROCESS.runtime()
            && let Some(record) = runtime.book.get(pool_key(pool)).filter(|record| record.device >= 0)
        {
            settle_for_good(runtime, pool_key(pool), record.device);
        }
        result
    }
    cuGraphAddMemAllocNode(node: *mut sys::CUgraphNode, graph: sys::CUgraph,
        dependencies: *const sys::CUgraphNode, count: usize,
        params: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS) |call| {
        note_allocation(params);
        call()
    }
    cuGraphAddNode(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode,
        count: usize, params: *mut sys::CUgraphNodeParams) |call| {
        note_node(params);
        call()
    }
    cuGraphAddNode_v2, cuGraphAddNode_v3(node: *mut sys::CUgraphNode, graph: sys::CUgraph,
        dependencies: *const sys::CUgraphNode, edges: *const sys::CUgraphEdgeData, count: usize,
        params: *mut sys::CUgraphNodeParams) |call| {
        note_node(params);
        call()
    }
    cuDeviceGraphMemTrim(device: CUdevice) |call| {
        let result = call();
        let bit = u32::try_from(device).ok().and_then(|device| 1u64.checked_shl(device)).unwrap_or(0);
        if let devices @ 1.. = GRAPH_MEMORY.load(Ordering::Relaxed) & bit {
            settle_graphs(devices);
        }
        result
    }
}
