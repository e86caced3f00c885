//! Device memory: allocations, physical handles, and the memory figures seen by the program.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, sys};

use crate::device::Device;
use crate::device::book::{Key, Kind, Record};
use crate::device::devices::current_ordinal;
use crate::exports::blocks::{
    allocate_block, by_handle, free_block, imported, let_go, name_memory, note_mapping, unmap,
};
use crate::exports::macros::wrappers;
use crate::exports::pools::{GRAPHS, graph_launched, settle_for_good, trim_pools};
use crate::launch::control::{CONTROL, State};
use crate::launch::guarded::inside;
use crate::process::arm::arm;
use crate::process::runtime::{Metered, PROCESS, Runtime};
use crate::sys::driver::real;
use crate::sys::setting_sources;

pub(super) const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN`.
const LOCATION_DEVICE: c_uint = 1;
const LOCATION_DOMAIN: c_uint = 6;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`, and its default: part of a context's own memory.
const LIMIT_HEAP: c_uint = 2;
const HEAP: u64 = 8 << 20;
/// The unit of the rows of pitched memory, as drivers choose it.
const PITCH: usize = 512;

/// The metered value. Without a value it returns the driver's call or a refusal.
macro_rules! metered {
    ($metered:expr, $call:ident) => {
        match $metered {
            Metered::Yes(metered) => metered,
            Metered::No => return $call(),
            Metered::Refused => return CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
        }
    };
}
pub(super) use metered;

/// The runtime, if this process is metered, where calls that need no context name their `device`.
pub(super) fn metering(device: Option<CUdevice>) -> Metered<&'static Runtime> {
    if CONTROL.state() == State::Off as u32 { Metered::No } else { arm(device) }
}

/// Like [`metering`], for calls that take no memory.
pub(super) fn runtime_if_metered(device: Option<CUdevice>) -> Option<&'static Runtime> {
    match metering(device) {
        Metered::Yes(runtime) => Some(runtime),
        Metered::No | Metered::Refused => None,
    }
}

/// The device of a location, or `None` for host memory.
pub(super) fn device_at(location: CUmemLocation) -> Option<CUdevice> {
    match location.kind {
        LOCATION_DEVICE => Some(location.id),
        // The lowest byte is the device, and the byte above it is the domain.
        LOCATION_DOMAIN => Some(location.id & 0xff),
        _ => None,
    }
}

/// The context to which an allocation will belong.
pub(super) fn current_context() -> usize {
    let mut context: sys::CUcontext = core::ptr::null_mut();
    match real!(cuCtxGetCurrent) {
        // SAFETY: a valid out-pointer.
        Some(get) if unsafe { get(&raw mut context) }.is_ok() => context.addr(),
        _ => 0,
    }
}

/// Reserves, allocates and commits on the current device. `made` gives the new object's key and real size.
pub(super) fn allocate(
    bytes: u64,
    call: impl Fn() -> CUresult,
    made: impl FnOnce() -> (Key, u64),
    undo: impl FnOnce(),
) -> CUresult {
    let runtime = metered!(metering(None), call);
    let device = metered!(runtime.current_device(), call);
    allocate_on(runtime, device, current_context(), bytes, call, made, undo)
}

pub(super) fn allocate_on(
    runtime: &'static Runtime,
    device: &'static Device,
    context: usize,
    bytes: u64,
    call: impl Fn() -> CUresult,
    made: impl FnOnce() -> (Key, u64),
    undo: impl FnOnce(),
) -> CUresult {
    if !reserve(runtime, device, bytes) {
        return OUT_OF_MEMORY;
    }
    let result = with_room(runtime, device, call);
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

/// Makes a call for reserved memory. If the driver is out of memory in a process that can be parked, the call is made again: once its pools have
/// given their spare memory up, and then as others park.
pub(super) fn with_room(
    runtime: &'static Runtime,
    device: &'static Device,
    call: impl Fn() -> CUresult,
) -> CUresult {
    let mut result = call();
    if result == OUT_OF_MEMORY && runtime.blocks().is_some() {
        trim_pools(runtime, device.ordinal);
        let mut found = || {
            result = call();
            result != OUT_OF_MEMORY
        };
        if !found() {
            runtime.find_room(device, found);
        }
    }
    result
}

/// Writes an object down. The driver may reuse a name that was never freed through the hook.
pub(super) fn write_down(runtime: &'static Runtime, key: Key, record: Record) {
    if let Some(stale) = runtime.book.insert(key, record) {
        runtime.release(stale.device, stale.bytes);
    }
}

/// Takes bytes from the account, for which pools give their spare memory up if the bytes are not there.
pub(super) fn reserve(runtime: &'static Runtime, device: &'static Device, bytes: u64) -> bool {
    if runtime.reserve(device, bytes) {
        return true;
    }
    trim_pools(runtime, device.ordinal);
    // The second attempt is made even if this freed nothing, since another thread may have trimmed the pools meanwhile.
    runtime.reserve(device, bytes)
}

/// Frees an object. The record is struck out first, because the driver may give the name to another thread at once.
pub(super) fn free(key: Key, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(runtime) = PROCESS.metering() else {
        return call();
    };
    let record = runtime.book.remove(key);
    let result = call();
    match record {
        Some(record) if result.is_ok() => {
            runtime.release(record.device, record.bytes);
            // A pool pays for its allocations, and may have shrunk.
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

/// The value of an out-pointer after a success.
pub(super) fn read<T: Copy + Default>(pointer: *const T) -> T {
    // SAFETY: null, or written by the driver in the successful call.
    unsafe { pointer.as_ref() }.copied().unwrap_or_default()
}

pub(super) fn handle<T>(pointer: *const *mut T) -> u64 {
    // SAFETY: null, or written by the driver in the successful call.
    unsafe { pointer.as_ref() }.map_or(0, |handle| handle.addr() as u64)
}

pub(super) fn pointer(address: u64) -> Key {
    Key(Kind::Pointer, address)
}

// ---- physical handles -----------------------------------------------------------------------------------------------

/// Follows a call that took a reference or mapping away. `last` is the object's record, if no other reference was left.
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

/// Makes a call that sets the size of the context's heap for `malloc` in kernels.
fn resize_heap(bytes: u64, call: impl Fn() -> CUresult) -> CUresult {
    let runtime = metered!(metering(None), call);
    let device = metered!(runtime.current_device(), call);
    let context = current_context();
    let key = Key(Kind::Heap, context as u64);
    let (before, after) = (runtime.book.get(key).map_or(0, |heap| heap.bytes), bytes.saturating_sub(HEAP));
    let more = after.saturating_sub(before);
    if !reserve(runtime, device, more) {
        return OUT_OF_MEMORY;
    }
    let result = with_room(runtime, device, call);
    if result.is_ok() {
        runtime.book.insert(key, Record { bytes: after, device: device.ordinal, context, links: 1 });
        runtime.release(device.ordinal, before.saturating_sub(after));
    } else {
        runtime.release(device.ordinal, more);
    }
    result
}

/// Writes to the caller's out-pointer, unless the caller left it out.
pub(super) fn write<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: the caller's own out-pointer.
        unsafe { pointer.write(value) };
    }
}

wrappers! { MEMORY:
    cuMemAlloc(address: *mut c_uint, bytes: c_uint) |call| {
        allocate(bytes.into(), call, || (pointer(read(address).into()), bytes.into()), || {})
    }
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) |call| {
        if let Some(result) = allocate_block(bytes as u64, |block| write(address, block)) {
            return result;
        }
        allocate(bytes as u64, call, || (pointer(read(address)), bytes as u64), || {})
    }
    cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: c_uint) |call| {
        let made = || (pointer(read(address)), bytes as u64);
        allocate(bytes as u64, call, made, || {})
    }
    cuMemAllocPitch(address: *mut c_uint, pitch: *mut c_uint, width: c_uint, height: c_uint,
        element: c_uint) |call| {
        let made = || (pointer(read(address).into()), u64::from(read(pitch)).saturating_mul(height.into()));
        let before = (read(address), read(pitch));
        let undo = || if let Some(free) = real!(cuMemFree) {
            // SAFETY: the driver has just given it.
            let _ = unsafe { free(read(address)) };
            write(address, before.0);
            write(pitch, before.1);
        };
        let bytes = u64::from(width).saturating_mul(height.into());
        allocate(bytes, call, made, undo)
    }
    cuMemAllocPitch_v2(address: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize,
        element: c_uint) |call| {
        let made = || (pointer(read(address)), (read(pitch) as u64).saturating_mul(height as u64));
        let before = (read(address), read(pitch));
        let rows = width.checked_next_multiple_of(PITCH).and_then(|row| Some((row, row.checked_mul(height)?)));
        if let Some((row, bytes)) = rows.filter(|_| !pitch.is_null() && matches!(element, 4 | 8 | 16))
            && let Some(result) = allocate_block(bytes as u64, |block| { write(address, block); write(pitch, row); })
        {
            return result;
        }
        let undo = || if let Some(free) = real!(cuMemFree_v2) {
            // SAFETY: the driver has just given it.
            let _ = unsafe { free(read(address)) };
            write(address, before.0);
            write(pitch, before.1);
        };
        let bytes = (width as u64).saturating_mul(height as u64);
        allocate(bytes, call, made, undo)
    }
    cuMemFree(address: c_uint) |call| { free(pointer(address.into()), call) }
    cuMemFree_v2(address: CUdeviceptr) |call| {
        free_block(address).unwrap_or_else(|| free(pointer(address), call))
    }
    cuMemCreate(out: *mut sys::CUmemGenericAllocationHandle, bytes: usize,
        prop: *const sys::CUmemAllocationProp, flags: c_ulonglong) |call| {
        if prop.is_null() {
            return call();
        }
        // SAFETY: the caller's own; the location is read as plain integers. No context need be current here.
        let location = unsafe { (&raw const (*prop).location).cast::<CUmemLocation>().read() };
        let Some(ordinal) = device_at(location) else { return call() };
        let runtime = metered!(metering(Some(ordinal)), call);
        let device = metered!(runtime.device(ordinal), call);
        let call = || call().on_success(|| name_memory(out, prop, bytes as u64));
        allocate_on(runtime, device, 0, bytes as u64, call, || (Key(Kind::Handle, read(out)), bytes as u64), || {})
    }
    cuMemRelease(physical: sys::CUmemGenericAllocationHandle) |call| {
        let key = Key(Kind::Handle, physical);
        let Some(runtime) = PROCESS.runtime() else { return call() };
        inside(|| {
            // Struck out first, because the driver may give the name to another thread at once.
            let last = runtime.book.unlink(key);
            let result = let_go(physical, call);
            unlinked(runtime, key, last, result);
            result
        })
    }
    cuMemImportFromShareableHandle(out: *mut sys::CUmemGenericAllocationHandle, shared: *mut c_void,
        kind: sys::CUmemAllocationHandleType) |call| {
        call().on_success(|| {
            imported(out);
            // Another process's memory is not in the book, but this process's own memory may come back under its old name.
            if let Some(runtime) = PROCESS.runtime() {
                runtime.book.link(Key(Kind::Handle, read(out)));
            }
        })
    }
    cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, physical: sys::CUmemGenericAllocationHandle,
        flags: c_ulonglong) |call(physical)| {
        let result = by_handle(physical, false, |handle| {
            call(handle).on_success(|| note_mapping(physical, address, bytes as u64))
        });
        if result.is_ok()
            && let Some(runtime) = PROCESS.runtime()
            && runtime.book.link(Key(Kind::Handle, physical))
        {
            let record = Record { bytes: bytes as u64, device: -1, context: 0, links: physical };
            runtime.book.insert(Key(Kind::Mapping, address), record);
        }
        result
    }
    cuMemUnmap(address: CUdeviceptr, bytes: usize) |call| {
        let Some(runtime) = PROCESS.runtime() else { return call() };
        inside(|| {
            let end = address.saturating_add(bytes as u64);
            let key = Key(Kind::Mapping, address);
            // Nearly always one mapping is unmapped as it was mapped.
            let gone = match runtime.book.get(key).filter(|record| record.bytes == bytes as u64) {
                Some(record) => { runtime.book.remove(key); vec![(key, record)] }
                None => runtime.book.drain(|key, _| key.0 == Kind::Mapping && (address..end).contains(&key.1)),
            };
            // The mappings and their handles are struck out first, because the driver may give their names to another thread at once.
            let handles: Vec<_> = gone.iter().map(|(_, mapping)| Key(Kind::Handle, mapping.links)).collect();
            let last: Vec<_> = handles.iter().map(|handle| runtime.book.unlink(*handle)).collect();
            let result = unmap(address, bytes as u64, call);
            // The order is backwards, because of several mappings of one handle the last took its record.
            for ((handle, last), (key, mapping)) in handles.into_iter().zip(last).zip(gone).rev() {
                unlinked(runtime, handle, last, result);
                if !result.is_ok() {
                    runtime.book.insert(key, mapping);
                }
            }
            result
        })
    }
    cuCtxSetLimit(limit: c_uint, value: usize) |call| {
        if limit == LIMIT_HEAP { resize_heap(value as u64, call) } else { call() }
    }
    cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) |call| {
        let result = call();
        if result.is_ok() && let Some((real_free, real_total)) = seen(read(free).into(), read(total).into()) {
            write(free, c_uint::try_from(real_free).unwrap_or(c_uint::MAX));
            write(total, c_uint::try_from(real_total).unwrap_or(c_uint::MAX));
        }
        result
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |call(free, total)| {
        // The driver fills both figures in one call, although a caller may leave one out.
        let (mut real_free, mut real_total) = (0usize, 0usize);
        let result = call(&raw mut real_free, &raw mut real_total);
        if !result.is_ok() {
            return result;
        }
        let (free_bytes, total_bytes) = seen(real_free as u64, real_total as u64)
            .map_or((real_free, real_total), |(f, t)| (usize::try_from(f).unwrap_or(0), usize::try_from(t).unwrap_or(0)));
        write(free, free_bytes);
        write(total, total_bytes);
        result
    }
    cuDeviceTotalMem(total: *mut c_uint, device: CUdevice) |call| {
        let result = call();
        if result.is_ok() && let Some(limit) = limit_of(device) {
            write(total, read(total).min(c_uint::try_from(limit).unwrap_or(c_uint::MAX)));
        }
        result
    }
    cuDeviceTotalMem_v2(total: *mut usize, device: CUdevice) |call| {
        let result = call();
        if result.is_ok() && let Some(limit) = limit_of(device) {
            write(total, read(total).min(usize::try_from(limit).unwrap_or(usize::MAX)));
        }
        result
    }
}

/// Free and total memory of the current device as the program shall see them.
fn seen(free: u64, total: u64) -> Option<(u64, u64)> {
    let runtime = runtime_if_metered(None)?;
    let Metered::Yes(device) = runtime.current_device() else { return None };
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

/// The memory limit of a device, which only the environment tells before the device has a context.
fn limit_of(device: c_int) -> Option<u64> {
    if CONTROL.state() == State::Off as u32 {
        return None;
    }
    let current = current_ordinal() == Some(device);
    let known = match if current { runtime_if_metered(None) } else { PROCESS.runtime() } {
        Some(runtime) if current => match runtime.device(device) {
            Metered::Yes(device) => Some(device),
            Metered::No | Metered::Refused => None,
        },
        Some(runtime) => runtime.metering.devices.get(device),
        None => None,
    };
    known.map_or_else(setting_sources::memory_limit, |device| device.memory.limit())
}
