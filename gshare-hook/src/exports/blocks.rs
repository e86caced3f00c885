//! Blocks: in a process that can be parked, an allocation from 2 MiB on is a [block](crate::device::blocks), and calls that look at memory
//! wait until it is on the device.
#![allow(unsafe_code)] // exported C functions

use core::cell::Cell;
use core::ffi::{c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUresult, sys};

use crate::device::Device;
use crate::device::blocks::{Blocks, GRANULE};
use crate::device::book::{Key, Kind};
use crate::device::pools::Pool;
use crate::exports::macros::wrappers;
use crate::exports::memory::{
    OUT_OF_MEMORY, allocate_on, current_context, free, metering, pointer, read, write,
};
use crate::launch::control::CONTROL;
use crate::launch::guarded::inside;
use crate::process::runtime::{Metered, PROCESS, Runtime};
use crate::sys::lock::Lock;

/// Blocks that the program freed during a capture. They are freed after it, since waiting for the device would spoil it.
static LATE: Lock<Vec<CUdeviceptr>> = Lock::new(Vec::new());

fn blocks() -> Option<&'static Blocks> {
    PROCESS.runtime()?.blocks()
}

/// Allocates a block in the current context, and has its address `told`. `None`: the driver allocates.
pub(super) fn allocate_block(bytes: u64, told: impl FnOnce(CUdeviceptr)) -> Option<CUresult> {
    if bytes < GRANULE {
        return None;
    }
    // The first allocation decides whether the process can be parked.
    let Metered::Yes(runtime) = metering(None) else { return None };
    let blocks = runtime.blocks()?;
    free_late(blocks);
    let Metered::Yes(device) = runtime.current_device() else { return None };
    Some(create_block(runtime, blocks, device, bytes, (current_context(), None), told))
}

/// Makes a block of a context or of a pool, and has its address `told`.
pub(super) fn create_block(
    runtime: &'static Runtime,
    blocks: &Blocks,
    device: &'static Device,
    bytes: u64,
    (context, pool): (usize, Option<&Arc<Pool>>),
    told: impl FnOnce(CUdeviceptr),
) -> CUresult {
    let Some(span) = bytes.checked_next_multiple_of(GRANULE) else { return OUT_OF_MEMORY };
    let block = Cell::new(0);
    let create = || match blocks.create(bytes, context, pool.map(Arc::clone)) {
        Ok(address) => {
            block.set(address);
            CUresult::CUDA_SUCCESS
        }
        Err(result) => result,
    };
    let result = allocate_on(runtime, device, context, span, create, || (pointer(block.get()), span), || {});
    if result.is_ok() {
        told(block.get());
    }
    result
}

/// Frees the block that begins at an address. `None`: there is none.
pub(super) fn free_block(address: CUdeviceptr) -> Option<CUresult> {
    let blocks = blocks()?;
    if CONTROL.capturing() {
        return blocks.begins_at(address).then(|| {
            LATE.lock().push(address);
            CUresult::CUDA_SUCCESS
        });
    }
    free_late(blocks);
    free_now(blocks, address)
}

fn free_now(blocks: &Blocks, address: CUdeviceptr) -> Option<CUresult> {
    let is_block = blocks.begins_at(address);
    let gone = || blocks.destroy(address).unwrap_or(CUresult::CUDA_ERROR_INVALID_VALUE);
    is_block.then(|| free(pointer(address), gone))
}

fn free_late(blocks: &Blocks) {
    if CONTROL.capturing() {
        return;
    }
    let late = core::mem::take(&mut *LATE.lock());
    for address in late {
        let _ = free_now(blocks, address);
    }
}

/// Makes a call that may give the memory of a range to others.
pub(super) fn shared(address: CUdeviceptr, bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    inside(|| {
        if let Some(blocks) = blocks() {
            blocks.share(address..address.saturating_add(bytes));
        }
        call()
    })
}

/// Names the physical memory that the program has just created, if it can move.
pub(super) fn name_memory(
    out: *mut sys::CUmemGenericAllocationHandle,
    properties: *const sys::CUmemAllocationProp,
    bytes: u64,
) {
    if let Some(name) = blocks().and_then(|blocks| blocks.adopt(read(out), properties, bytes)) {
        write(out, name);
    }
}

/// Gives memory its name again that the program has exported and just imported.
pub(super) fn imported(out: *mut sys::CUmemGenericAllocationHandle) {
    if let Some(name) = blocks().and_then(|blocks| blocks.handles.imported(read(out))) {
        write(out, name);
    }
}

/// Makes a call with the driver's handle of physical memory, which may give the memory to others if it `stays`.
pub(super) fn by_handle(
    name: sys::CUmemGenericAllocationHandle,
    stays: bool,
    call: impl FnOnce(sys::CUmemGenericAllocationHandle) -> CUresult,
) -> CUresult {
    inside(|| {
        let Some(blocks) = blocks() else { return call(name) };
        if stays {
            blocks.stays(name);
        }
        call(blocks.handles.physical(name).unwrap_or(name))
    })
}

/// Notes a mapping of physical memory.
pub(super) fn note_mapping(name: sys::CUmemGenericAllocationHandle, address: CUdeviceptr, bytes: u64) {
    if let Some(blocks) = blocks() {
        blocks.mapped(name, address..address.saturating_add(bytes));
    }
}

/// Unmaps a range.
pub(super) fn unmap(address: CUdeviceptr, bytes: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if result.is_ok()
        && let Some(blocks) = blocks()
    {
        blocks.unmapped(&(address..address.saturating_add(bytes)));
    }
    result
}

/// Releases a reference to physical memory.
pub(super) fn let_go(name: sys::CUmemGenericAllocationHandle, call: impl FnOnce() -> CUresult) -> CUresult {
    blocks().and_then(|blocks| blocks.handles.let_go(name)).unwrap_or_else(call)
}

wrappers! { BLOCKS:
    // Calls that touch or look at memory.
    cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: CUdeviceptr) |call| { inside(call) }
    cuPointerGetAttributes(count: c_uint, attributes: *mut c_uint, data: *mut *mut c_void,
        address: CUdeviceptr) |call| { inside(call) }
    cuIpcGetMemHandle(handle: *mut sys::CUipcMemHandle, address: CUdeviceptr) |call| { inside(call) }
    cuMemAddressFree(address: CUdeviceptr, bytes: usize) |call| { inside(call) }
    cuStreamWriteValue32, cuStreamWriteValue32_ptsz, cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint) |call| { inside(call) }
    cuStreamWriteValue64, cuStreamWriteValue64_ptsz, cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint) |call| { inside(call) }
    // Calls that may give memory to others.
    cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize) |call| {
        inside(|| {
            let result = call();
            if result.is_ok() && let Some(blocks) = blocks() {
                // SAFETY: the caller's own list, which the driver has just read: the kind and number of the location, and the flags.
                let alone = count == 1 && blocks.is_alone(unsafe { access.cast::<[u32; 3]>().read() });
                blocks.opened(&(address..address.saturating_add(bytes as u64)), alone, current_context());
            }
            result
        })
    }
    cuMemRetainAllocationHandle(out: *mut sys::CUmemGenericAllocationHandle, address: *mut c_void) |call| {
        let at = address.addr() as u64;
        let result = match blocks().and_then(|blocks| blocks.handles.retain(at)) {
            Some(name) => {
                write(out, name);
                CUresult::CUDA_SUCCESS
            }
            None => shared(at, 1, call),
        };
        if result.is_ok() && let Some(runtime) = PROCESS.runtime() {
            runtime.book.link(Key(Kind::Handle, read(out)));
        }
        result
    }
    cuMemGetAllocationPropertiesFromHandle(properties: *mut sys::CUmemAllocationProp,
        physical: sys::CUmemGenericAllocationHandle) |call(physical)| { by_handle(physical, false, call) }
    cuMemExportToShareableHandle(out: *mut c_void, physical: sys::CUmemGenericAllocationHandle,
        kind: sys::CUmemAllocationHandleType, flags: c_ulonglong) |call(physical)| {
        by_handle(physical, true, call)
    }
    cuMulticastBindMem(multicast: sys::CUmemGenericAllocationHandle, offset: usize,
        physical: sys::CUmemGenericAllocationHandle, at: usize, bytes: usize, flags: c_ulonglong) |call(physical)| {
        by_handle(physical, true, call)
    }
    cuMulticastBindMem_v2(multicast: sys::CUmemGenericAllocationHandle, device: CUdevice, offset: usize,
        physical: sys::CUmemGenericAllocationHandle, at: usize, bytes: usize, flags: c_ulonglong) |call(physical)| {
        by_handle(physical, true, call)
    }
    cuLogicalEndpointBindMem(endpoint: sys::CUlogicalEndpointId, device: CUdevice, offset: u64,
        physical: sys::CUmemGenericAllocationHandle, at: u64, bytes: u64, flags: c_ulonglong) |call(physical)| {
        by_handle(physical, true, call)
    }
    // A block answers as the allocation that the program asked for.
    cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr) |call| {
        match blocks().and_then(|blocks| blocks.around(address)) {
            Some((first, length)) => {
                write(base, first);
                write(bytes, usize::try_from(length).unwrap_or(usize::MAX));
                CUresult::CUDA_SUCCESS
            }
            None => call(),
        }
    }
    cuPointerSetAttribute(value: *const c_void, attribute: c_uint, address: CUdeviceptr) |call| {
        shared(address, 1, call)
    }
    cuMemGetHandleForAddressRange(handle: *mut c_void, address: CUdeviceptr, bytes: usize, kind: c_uint,
        flags: c_ulonglong) |call| { shared(address, bytes as u64, call) }
    cuMulticastBindAddr(multicast: sys::CUmemGenericAllocationHandle, offset: usize, address: CUdeviceptr,
        bytes: usize, flags: c_ulonglong) |call| { shared(address, bytes as u64, call) }
    cuMulticastBindAddr_v2(multicast: sys::CUmemGenericAllocationHandle, device: CUdevice, offset: usize,
        address: CUdeviceptr, bytes: usize, flags: c_ulonglong) |call| { shared(address, bytes as u64, call) }
}
