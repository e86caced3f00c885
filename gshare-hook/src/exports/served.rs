//! Pools that serve [blocks](crate::device::pools) in a process that can be parked: their allocations, frees and figures.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_uint, c_void};
use std::sync::Arc;

use gshare_cuda_abi::types::{CUdeviceptr, CUresult, sys};

use crate::device::blocks::{Blocks, GRANULE};
use crate::device::context::current_handle;
use crate::device::pools::{Mark, Pool};
use crate::exports::macros::wrappers;
use crate::launch::control::CONTROL;
use crate::launch::streams::{self, PER_THREAD_STREAM, stream_of};
use crate::process::runtime::{PROCESS, Runtime};

/// The pool, if it serves blocks.
fn served(pool: sys::CUmemoryPool) -> Option<Arc<Pool>> {
    PROCESS.runtime()?.blocks()?.pools.get(pool.addr())
}

/// Has a pool of this device serve blocks, unless other processes may use its memory or it has a bound or a use of its own.
pub(super) fn serve_made(runtime: &Runtime, pool: u64, props: *const sys::CUmemPoolProps) {
    // SAFETY: the caller's own, which the driver has just read: kind and handle types, location, a pointer, the most bytes, and the use
    // before fields that are zero.
    let [kind, _, _, most, usage] = unsafe { props.cast::<[u64; 5]>().read() };
    if let Some(blocks) = runtime.blocks()
        && let Ok(pool) = usize::try_from(pool)
        && (kind, most, usage) == (1, 0, 0)
    {
        blocks.pools.serve(pool);
    }
}

/// Notes the size of a pool to which the driver has just added.
pub(super) fn note(pool: sys::CUmemoryPool) {
    if let Some(pool) = served(pool) {
        pool.note();
    }
}

/// Whether a stream's work comes after a marked free in any case, being the same stream.
fn follows(mark: &Mark, stream: usize) -> bool {
    // Each context has default streams of its own, and each thread one of them.
    let same = stream > PER_THREAD_STREAM
        || current_handle() == Some(mark.context) && mark.thread == thread_of(stream);
    mark.stream == stream && same && !CONTROL.is_destroyed(stream, mark.since)
}

/// The calling thread where the stream is its own; 0 for other streams.
fn thread_of(stream: usize) -> i32 {
    // SAFETY: no arguments.
    if stream == PER_THREAD_STREAM { unsafe { libc::gettid() } } else { 0 }
}

/// The pool for a large allocation, if it serves blocks. The driver's default pool of the device does.
pub(super) fn serving(
    runtime: &'static Runtime,
    pool: sys::CUmemoryPool,
    is_default: impl FnOnce() -> bool,
    bytes: u64,
) -> Option<(&'static Blocks, Arc<Pool>)> {
    let blocks = runtime.blocks().filter(|_| bytes >= GRANULE)?;
    let known = blocks.pools.get(pool.addr());
    let serves = || is_default().then(|| blocks.pools.serve(pool.expose_provenance()));
    known.or_else(serves).map(|pool| (blocks, pool))
}

/// Takes a spare block of a pool into use on a stream.
pub(super) fn take_spare(
    blocks: &Blocks,
    pool: &Arc<Pool>,
    bytes: u64,
    stream: usize,
) -> Option<CUdeviceptr> {
    blocks.take_spare(pool, bytes, |mark| follows(mark, stream))
}

/// Frees the block that begins at an address in the order of a stream. `None`: there is none, or the stream is captured and the driver refuses.
pub(super) fn free_in_order(
    address: CUdeviceptr,
    (stream, per_thread): (sys::CUstream, bool),
) -> Option<CUresult> {
    let runtime = PROCESS.runtime()?;
    let blocks = runtime.blocks().filter(|blocks| blocks.begins_at(address))?;
    let stream = stream_of(stream, per_thread);
    if CONTROL.capturing() && streams::is_captured(stream) {
        return None;
    }
    let since = CONTROL.destroyed();
    let mark = streams::in_context_of(stream, || blocks.pools.mark(stream, thread_of(stream), since));
    let mark = match mark {
        Ok(mark) => mark,
        Err(result) => return Some(result),
    };
    if !blocks.lay_aside(address, mark) {
        return Some(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if !CONTROL.guard.is_open() {
        // A spare block in host memory is of no use to a later allocation.
        runtime.end_spare(blocks, |_| u64::MAX, |_| false);
    }
    Some(CUresult::CUDA_SUCCESS)
}

/// Makes a call that trims a pool to the bytes to `keep`. The driver's part goes first.
pub(super) fn trim_served(pool: sys::CUmemoryPool, keep: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if result.is_ok()
        && let Some(runtime) = PROCESS.runtime()
        && let Some(blocks) = runtime.blocks()
    {
        let handle = pool.addr();
        runtime.end_spare(blocks, |of| of.keeps_of(handle, keep), Mark::is_passed);
    }
    result
}

/// Makes a call that destroys a pool. Blocks in use stay until they are freed.
pub(super) fn destroy_served(pool: sys::CUmemoryPool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(runtime) = PROCESS.runtime() else { return call() };
    let Some(blocks) = runtime.blocks() else { return call() };
    // The driver may give the handle to another pool at once.
    let Some(served) = blocks.pools.leave(pool.addr()) else { return call() };
    let result = call();
    if result.is_ok() {
        runtime.end_spare(blocks, |_| u64::MAX, Mark::is_passed);
    } else {
        blocks.pools.stays(served);
    }
    result
}

wrappers! { SERVED:
    cuMemPoolGetAttribute(pool: sys::CUmemoryPool, attribute: c_uint, value: *mut c_void) |call| {
        call().on_success(|| {
            if let Some(pool) = served(pool) {
                pool.tells(attribute, value);
            }
        })
    }
    cuMemPoolSetAttribute(pool: sys::CUmemoryPool, attribute: c_uint, value: *mut c_void) |call| {
        call().on_success(|| {
            if let Some(pool) = served(pool) {
                pool.forget_most(attribute);
            }
        })
    }
}
