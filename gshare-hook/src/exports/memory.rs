//! Device memory: allocations, pools, physical handles, graphs, and what the program is told about memory.
//!
//! # Pools
//! A pool is charged at what it has reserved, which the driver decides: it keeps what was freed, it cannot always use what
//! it keeps, and it grows in large steps. So before an allocation there must be room for what the pool has in use with
//! the new bytes; afterwards the charge follows what the pool did. If that cannot be charged, all pools give up what they
//! only keep, and if it still cannot, the allocation is undone, and the caller's pointer left as it was. What must stay
//! charged short (memory that is freed when its stream gets there, memory of graphs, which is there once they run) takes all
//! that is left: the next allocation fails.
//!
//! A device's pools change one at a time, and no thread waits for the daemon with them locked.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, sys};

use super::wrappers;
use crate::device::Device;
use crate::device::book::{Key, Kind, Record};
use crate::device::context::relaxed;
use crate::launch::streams::{self, stream_of};
use crate::process::control::{CONTROL, State};
use crate::process::lifecycle::{self, Runtime};
use crate::sys::driver::real;

const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN`.
const LOCATION_DEVICE: c_uint = 1;
const LOCATION_DOMAIN: c_uint = 6;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`, `CU_MEMPOOL_ATTR_USED_MEM_CURRENT` and `CU_MEMPOOL_ATTR_LOCATION_TYPE`.
const POOL_RESERVED: c_uint = 5;
const POOL_USED: c_uint = 7;
const POOL_LOCATION: c_uint = 12;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const GRAPH_RESERVED: c_uint = 2;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const NODE_ALLOCATES: c_uint = 10;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`, and what it is by default: part of what a context takes for itself.
const LIMIT_HEAP: c_uint = 2;
const HEAP: u64 = 8 << 20;
/// Devices with pools of their own, as many as can be attached.
const DEVICES: usize = 64;

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

/// The device that a location is on; `None` for host memory.
fn device_at(location: CUmemLocation) -> Option<CUdevice> {
    match location.kind {
        LOCATION_DEVICE => Some(location.id),
        // One byte is the device, the next one the domain.
        LOCATION_DOMAIN => Some(location.id & 0xff),
        _ => None,
    }
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
    write_down(runtime, key, Record { bytes: taken, device: device.ordinal, context, links: 1 });
    result
}

/// Writes an object down. The driver may give a name again that was never freed through us.
fn write_down(runtime: &'static Runtime, key: Key, record: Record) {
    if let Some(stale) = runtime.book.insert(key, record) {
        runtime.release(stale.device, stale.bytes);
    }
}

/// Takes bytes from the account; when they are not there, pools give up what they only keep.
fn reserve(runtime: &'static Runtime, device: &'static Device, bytes: u64) -> bool {
    if bytes == 0 || runtime.reserve(device, bytes) {
        return true;
    }
    trim_pools(runtime, device.ordinal);
    // Also if that freed nothing: another thread may have trimmed them meanwhile.
    runtime.reserve(device, bytes)
}

/// What is left of the limit by this process's own count.
fn left(device: &Device) -> u64 {
    device.memory.limit().map_or(u64::MAX, |limit| limit.saturating_sub(device.memory.used()))
}

/// Takes as much of `bytes` as there is; gives how much that was.
fn reserve_what_is_left(runtime: &'static Runtime, device: &'static Device, bytes: u64) -> u64 {
    let (mut part, mut taken) = (bytes.min(left(device)), 0);
    // Other processes may have taken some of it, and only the daemon knows.
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

/// Frees: the record is struck out first, since the driver may give the name to another thread at once.
pub(super) fn free(key: Key, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(runtime) = CONTROL.runtime().filter(|_| CONTROL.state() == State::Active as u32) else {
        return call();
    };
    let record = runtime.book.remove(key);
    let result = call();
    match record {
        Some(record) if result.is_ok() => {
            runtime.release(record.device, record.bytes);
            // A pool pays for what came out of it, and may have shrunk.
            let pool = Key(Kind::Pool, record.links);
            if record.device < 0
                && let Some(known) = runtime.book.get(pool)
            {
                settle_for_good(runtime, pool, known.device);
            }
        }
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

/// One pool operation at a time on a device. Guarded: how much was left by this process's own count when no more could be had for
/// what pools and graphs hold.
static POOLS: [Mutex<u64>; DEVICES] = [const { Mutex::new(0) }; DEVICES];

fn one_at_a_time(ordinal: i32) -> MutexGuard<'static, u64> {
    POOLS[ordinal.unsigned_abs() as usize % DEVICES].lock().unwrap_or_else(PoisonError::into_inner)
}

fn pool_attribute(pool: sys::CUmemoryPool, attribute: c_uint) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: a live pool, and an attribute whose value is at most 64 bits.
    let result = unsafe { real!(cuMemPoolGetAttribute)?(pool, attribute, (&raw mut value).cast::<c_void>()) };
    result.is_ok().then_some(value)
}

/// The pool that a key names. Graphs' memory has a key without a pool.
fn pool_of(key: Key) -> sys::CUmemoryPool {
    core::ptr::with_exposed_provenance_mut(usize::try_from(key.1).unwrap_or(0))
}

fn pool_key(pool: sys::CUmemoryPool) -> Key {
    Key(Kind::Pool, pool.expose_provenance() as u64)
}

/// What a pool, or a device's graphs, have reserved.
fn reserved_by(key: Key, ordinal: i32) -> u64 {
    if key.1 < GRAPHS {
        return pool_attribute(pool_of(key), POOL_RESERVED).unwrap_or(0);
    }
    let mut value = 0u64;
    match real!(cuDeviceGetGraphMemAttribute) {
        // SAFETY: an attribute whose value is 64 bits.
        Some(get) if unsafe { get(ordinal, GRAPH_RESERVED, (&raw mut value).cast::<c_void>()) }.is_ok() => {
            value
        }
        _ => 0,
    }
}

/// Writes a pool down with its device; -1 for one that is not charged here.
fn enter_pool(runtime: &'static Runtime, key: Key, device: i32) {
    write_down(runtime, key, Record { bytes: 0, device, context: 0, links: 1 });
}

/// Brings the charge of a pool in line with what it has reserved, out of the charge and of `held` bytes that were reserved for
/// it beforehand. Gives what is missing.
fn settle(
    runtime: &'static Runtime,
    _locked: &MutexGuard<'_, u64>,
    key: Key,
    ordinal: i32,
    held: u64,
) -> u64 {
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

/// The same, where nothing can be undone: what is missing takes all that is left.
fn settle_for_good(runtime: &'static Runtime, key: Key, ordinal: i32) {
    let locked = one_at_a_time(ordinal);
    let (missing, refused) = (settle(runtime, &locked, key, ordinal, 0), *locked);
    drop(locked);
    let Some(device) = runtime.known_device(ordinal).filter(|_| missing > 0) else { return };
    // Without this every launch of a graph would ask the daemon in vain.
    if left(device) <= refused {
        return;
    }
    let taken = reserve_what_is_left(runtime, device, missing);
    let mut locked = one_at_a_time(ordinal);
    *locked = if taken < missing { left(device) } else { 0 };
    settle(runtime, &locked, key, ordinal, taken);
}

/// Makes all pools of a device give up what they do not use.
fn trim_pools(runtime: &'static Runtime, ordinal: i32) {
    let Some(trim) = real!(cuMemPoolTrimTo) else { return };
    for (key, _) in runtime.book.select(|key, record| key.0 == Kind::Pool && record.device == ordinal) {
        let locked = one_at_a_time(ordinal);
        if key.1 >= GRAPHS || runtime.book.get(key).is_none() {
            continue;
        }
        // SAFETY: pools leave the book before they are destroyed, and with their device locked.
        if relaxed(|| unsafe { trim(pool_of(key), 0) }).is_ok() {
            settle(runtime, &locked, key, ordinal, 0);
        }
    }
}

/// The device of a stream. Only where several are in use the driver must be asked.
fn device_of_stream(runtime: &'static Runtime, stream: usize) -> Option<&'static Device> {
    match runtime.sole_device() {
        Some(device) => Some(device),
        None => runtime.device(ordinal_of_stream(stream).or_else(lifecycle::current_ordinal)?),
    }
}

fn ordinal_of_stream(stream: usize) -> Option<CUdevice> {
    let handle: sys::CUstream = core::ptr::with_exposed_provenance_mut(stream);
    let mut ordinal: CUdevice = 0;
    // SAFETY: the program's own stream, and a valid out-pointer.
    if real!(cuStreamGetDevice).is_some_and(|get| unsafe { get(handle, &raw mut ordinal) }.is_ok()) {
        return Some(ordinal);
    }
    // Drivers before 12.8.
    streams::in_context_of(stream, lifecycle::current_ordinal)
}

/// The device of a pool that this process did not make while it was counted; -1 for one of host memory.
fn ordinal_of_pool(pool: sys::CUmemoryPool) -> Option<i32> {
    // Half of the 64 bits is written; drivers before 13.1 do not know it.
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

/// A stream-ordered allocation. On a captured stream it becomes part of a graph.
fn allocate_async(
    pool: Option<sys::CUmemoryPool>,
    bytes: u64,
    (stream, per_thread): (sys::CUstream, bool),
    address: *mut CUdeviceptr,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(runtime) = metering() else { return call() };
    let handle = stream_of(stream, per_thread);
    let captured = CONTROL.capturing() && streams::is_captured(handle);
    let Some(device) = device_of_stream(runtime, handle) else { return call() };
    let Some(chosen) = pool.or_else(|| current_pool(device.ordinal)) else {
        if captured {
            return call();
        }
        // No pools: an allocation like any other.
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
    // Host memory is not charged; nor is an imported pool, which another process owns and pays for.
    let Some(device) = runtime.device(ordinal) else { return call() };
    let mut locked = one_at_a_time(ordinal);
    if runtime.book.get(key).is_none() {
        enter_pool(runtime, key, ordinal);
    }
    let mut held = 0;
    loop {
        let charged = runtime.book.get(key).map_or(0, |record| record.bytes);
        let wanted = pool_attribute(chosen, POOL_USED).unwrap_or(0).saturating_add(bytes);
        let more = wanted.saturating_sub(charged + held);
        if device.memory.reserve(more).is_ok() {
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
    let result = call();
    let mut missing = settle(runtime, &locked, key, ordinal, held);
    if !result.is_ok() {
        return result;
    }
    // The pool pays; the record says which pool to look at when it is freed.
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
    result
}

/// Undoes an allocation, in the order of its stream.
fn free_again(address: CUdeviceptr, stream: sys::CUstream, per_thread: bool) {
    if let Some(runtime) = CONTROL.runtime() {
        runtime.book.remove(pointer(address));
    }
    let free = if per_thread { real!(cuMemFreeAsync_ptsz) } else { real!(cuMemFreeAsync) };
    if let Some(free) = free {
        // SAFETY: the driver has just given it, on this stream.
        let _ = unsafe { free(address, stream) };
    }
}

/// A pool goes. What was allocated from it stays until it is freed, and pays for itself from now on.
fn destroy_pool(pool: sys::CUmemoryPool, call: impl FnOnce() -> CUresult) -> CUresult {
    let key = pool_key(pool);
    let Some(runtime) = CONTROL.runtime() else { return call() };
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

/// A pool of host memory that the driver has named.
fn host_pool_named(pool: *const sys::CUmemoryPool, location: *const CUmemLocation) {
    // SAFETY: the driver has accepted the caller's location; it is plain integers.
    let on_host = unsafe { location.as_ref() }.is_some_and(|location| device_at(*location).is_none());
    if on_host && let Some(runtime) = metering() {
        enter_pool(runtime, Key(Kind::Pool, handle(pool)), -1);
    }
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

/// From here on, names of pools stand for the memory of a device's graphs.
const GRAPHS: u64 = u64::MAX - 4096;

/// Devices that graphs of this process hold memory of, a bit for each.
static GRAPH_MEMORY: AtomicU64 = AtomicU64::new(0);

/// From now on graphs may hold memory of this device.
fn graphs_allocate_on(ordinal: i32) {
    if let Some(bit) = u32::try_from(ordinal).ok().and_then(|ordinal| 1u64.checked_shl(ordinal)) {
        GRAPH_MEMORY.fetch_or(bit, Ordering::Release);
    }
}

/// Charges what graphs have reserved: a graph launched on one device may allocate on another.
#[inline]
pub(super) fn graph_launched() {
    let devices = GRAPH_MEMORY.load(Ordering::Relaxed);
    if devices != 0 {
        settle_graphs(devices);
    }
}

#[cold]
fn settle_graphs(devices: u64) {
    let Some(runtime) = metering() else { return };
    for ordinal in (0..u64::BITS.cast_signed()).filter(|ordinal| devices >> ordinal & 1 == 1) {
        let Some(device) = runtime.device(ordinal) else { continue };
        let key = Key(Kind::Pool, GRAPHS + u64::from(ordinal.unsigned_abs()));
        let locked = one_at_a_time(ordinal);
        if runtime.book.get(key).is_none() {
            enter_pool(runtime, key, ordinal);
        }
        drop(locked);
        settle_for_good(runtime, key, device.ordinal);
    }
}

/// A node is added that allocates.
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

/// A node is added by its general description.
fn note_node(params: *const sys::CUgraphNodeParams) {
    // SAFETY: null, or the caller's own description, which begins with its kind.
    if unsafe { params.cast::<c_uint>().as_ref() } == Some(&NODE_ALLOCATES) {
        // SAFETY: not null; what follows the kind is that kind's description.
        note_allocation(unsafe { &raw const (*params).__bindgen_anon_1 }.cast());
    }
}

// ---- physical handles -----------------------------------------------------------------------------------------------

/// After the call that took a reference or mapping away: `last` is the record that went with it, if it was the last one.
fn unlinked(runtime: &'static Runtime, key: Key, last: Option<Record>, result: CUresult) {
    match last {
        Some(record) if result.is_ok() => runtime.release(record.device, record.bytes),
        Some(record) => {
            runtime.book.insert(key, Record { links: 1, ..record });
        }
        None if !result.is_ok() => {
            runtime.book.link(key);
        }
        None => {}
    }
}

// ---- heaps ----------------------------------------------------------------------------------------------------------

/// The program sets the size of its context's heap for `malloc` in kernels.
fn resize_heap(bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(runtime) = metering() else { return call() };
    let Some(device) = runtime.current_device() else { return call() };
    let context = current_context();
    let key = Key(Kind::Heap, context as u64);
    let (before, after) = (runtime.book.get(key).map_or(0, |heap| heap.bytes), bytes.saturating_sub(HEAP));
    let more = after.saturating_sub(before);
    if !reserve(runtime, device, more) {
        return OUT_OF_MEMORY;
    }
    let result = call();
    if result.is_ok() {
        runtime.book.insert(key, Record { bytes: after, device: device.ordinal, context, links: 1 });
        runtime.release(device.ordinal, before.saturating_sub(after));
    } else {
        runtime.release(device.ordinal, more);
    }
    result
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
        let before = (read(address), read(pitch));
        let undo = || if let Some(free) = crate::sys::driver::real!(cuMemFree) {
            // SAFETY: the driver has just given it.
            let _ = unsafe { free(read(address)) };
            write(address, before.0);
            write(pitch, before.1);
        };
        let bytes = u64::from(width).saturating_mul(height.into());
        // SAFETY: as above.
        allocate(bytes, || unsafe { real(address, pitch, width, height, element) }, made, undo)
    }
    cuMemAllocPitch_v2(address: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize,
        element: c_uint) |real| {
        let made = || (pointer(read(address)), (read(pitch) as u64).saturating_mul(height as u64));
        let before = (read(address), read(pitch));
        let undo = || if let Some(free) = crate::sys::driver::real!(cuMemFree_v2) {
            // SAFETY: the driver has just given it.
            let _ = unsafe { free(read(address)) };
            write(address, before.0);
            write(pitch, before.1);
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
        free(pointer(address), || unsafe { real(address) })
    }
    cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, stream) };
        allocate_async(None, bytes as u64, (stream, false), address, call)
    }
    cuMemAllocAsync_ptsz(address: *mut CUdeviceptr, bytes: usize, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, stream) };
        allocate_async(None, bytes as u64, (stream, true), address, call)
    }
    cuMemAllocFromPoolAsync(address: *mut CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool,
        stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, pool, stream) };
        allocate_async(Some(pool), bytes as u64, (stream, false), address, call)
    }
    cuMemAllocFromPoolAsync_ptsz(address: *mut CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool,
        stream: sys::CUstream) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(address, bytes, pool, stream) };
        allocate_async(Some(pool), bytes as u64, (stream, true), address, call)
    }
    cuMemFreeAsync(address: CUdeviceptr, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        free(pointer(address), || unsafe { real(address, stream) })
    }
    cuMemFreeAsync_ptsz(address: CUdeviceptr, stream: sys::CUstream) |real| {
        // SAFETY: as above.
        free(pointer(address), || unsafe { real(address, stream) })
    }
    cuMemPoolCreate(pool: *mut sys::CUmemoryPool, props: *const sys::CUmemPoolProps) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, props) };
        if result.is_ok() && !props.is_null() {
            // SAFETY: the caller's own; the location is read as plain integers. No context need be current here.
            let location = unsafe { (&raw const (*props).location).cast::<CUmemLocation>().read() };
            let device = device_at(location);
            if let Some(runtime) = metering_on(device) {
                enter_pool(runtime, Key(Kind::Pool, handle(pool)), device.unwrap_or(-1));
            }
        }
        result
    }
    cuMemGetDefaultMemPool(pool: *mut sys::CUmemoryPool, location: *mut CUmemLocation, kind: c_uint) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, location, kind) };
        if result.is_ok() {
            host_pool_named(pool, location);
        }
        result
    }
    cuMemGetMemPool(pool: *mut sys::CUmemoryPool, location: *mut CUmemLocation, kind: c_uint) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, location, kind) };
        if result.is_ok() {
            host_pool_named(pool, location);
        }
        result
    }
    cuMemPoolImportFromShareableHandle(pool: *mut sys::CUmemoryPool, shared: *mut c_void,
        kind: sys::CUmemAllocationHandleType, flags: c_ulonglong) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, shared, kind, flags) };
        if result.is_ok() && let Some(runtime) = metering() {
            enter_pool(runtime, Key(Kind::Pool, handle(pool)), -1);
        }
        result
    }
    cuMemPoolDestroy(pool: sys::CUmemoryPool) |real| {
        // SAFETY: as above.
        destroy_pool(pool, || unsafe { real(pool) })
    }
    cuMemPoolTrimTo(pool: sys::CUmemoryPool, keep: usize) |real| {
        // SAFETY: as above.
        let result = unsafe { real(pool, keep) };
        if let Some(runtime) = CONTROL.runtime()
            && let Some(record) = runtime.book.get(pool_key(pool)).filter(|record| record.device >= 0)
        {
            settle_for_good(runtime, pool_key(pool), record.device);
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
        let Some(ordinal) = device_at(location) else { return call() };
        let Some(runtime) = metering_on(Some(ordinal)) else { return call() };
        let Some(device) = runtime.device(ordinal) else { return call() };
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
        unlinked(runtime, key, last, result);
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
        // Struck out first, the handles too: the driver may give their names to another thread at once.
        let handles: Vec<_> = gone.iter().map(|(_, mapping)| Key(Kind::Handle, mapping.links)).collect();
        let last: Vec<_> = handles.iter().map(|handle| runtime.book.unlink(*handle)).collect();
        // SAFETY: as above.
        let result = unsafe { real(address, bytes) };
        // Backwards: of several mappings of one handle, the last had its record.
        for ((handle, last), (key, mapping)) in handles.into_iter().zip(last).zip(gone).rev() {
            unlinked(runtime, handle, last, result);
            if !result.is_ok() {
                runtime.book.insert(key, mapping);
            }
        }
        result
    }
    cuGraphAddMemAllocNode(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode,
        count: usize, params: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS) |real| {
        note_allocation(params);
        // SAFETY: as above.
        unsafe { real(node, graph, dependencies, count, params) }
    }
    cuGraphAddNode(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode,
        count: usize, params: *mut sys::CUgraphNodeParams) |real| {
        note_node(params);
        // SAFETY: as above.
        unsafe { real(node, graph, dependencies, count, params) }
    }
    cuGraphAddNode_v2(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode,
        edges: *const sys::CUgraphEdgeData, count: usize, params: *mut sys::CUgraphNodeParams) |real| {
        note_node(params);
        // SAFETY: as above.
        unsafe { real(node, graph, dependencies, edges, count, params) }
    }
    cuGraphAddNode_v3(node: *mut sys::CUgraphNode, graph: sys::CUgraph, dependencies: *const sys::CUgraphNode,
        edges: *const sys::CUgraphEdgeData, count: usize, params: *mut sys::CUgraphNodeParams) |real| {
        note_node(params);
        // SAFETY: as above.
        unsafe { real(node, graph, dependencies, edges, count, params) }
    }
    cuDeviceGraphMemTrim(device: CUdevice) |real| {
        // SAFETY: as above.
        let result = unsafe { real(device) };
        let bit = u32::try_from(device).ok().and_then(|device| 1u64.checked_shl(device)).unwrap_or(0);
        if let devices @ 1.. = GRAPH_MEMORY.load(Ordering::Relaxed) & bit {
            settle_graphs(devices);
        }
        result
    }
    cuCtxSetLimit(limit: c_uint, value: usize) |real| {
        // SAFETY: as above.
        let call = || unsafe { real(limit, value) };
        if limit == LIMIT_HEAP { resize_heap(value as u64, call) } else { call() }
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
        settle_for_good(runtime, key, device.ordinal);
    }
    Some(runtime.view(device, free, total))
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
