//! Contexts, streams, capture and synchronisation. Nothing is metered here, but the meter must know of these calls.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use gshare_cuda_abi::types::{CUdevice, CUresult, sys};

use crate::device::context;
use crate::exports::macros::wrappers;
use crate::launch::control::{ALL_STREAMS, CONTROL};
use crate::launch::guarded::inside;
use crate::launch::segments::{self, synchronise};
use crate::launch::streams::{self, PER_THREAD_STREAM, stream_of};
use crate::process::runtime::PROCESS;
use crate::sys::driver::real;
use crate::sys::lock::{Guard, Lock};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// Marks a context that is about to be destroyed, so its events are not touched from here on.
fn destroying(context: usize) {
    segments::synchronising();
    if let Some(runtime) = PROCESS.runtime() {
        runtime.metering.contexts.destroying(context);
        if let Some(blocks) = runtime.blocks() {
            blocks.pools.destroying(context);
        }
    }
    segments::destroying(ALL_STREAMS);
}

/// A stream with a capture of its own, and its context (green, if it has a green context). Streams that join a capture have no
/// capture of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Capture {
    origin: usize,
    context: usize,
}

/// Captures that have begun and not ended. One number may be there more than once, because each thread has a default stream of its own.
fn captures() -> Guard<'static, Vec<Capture>> {
    static CAPTURES: Lock<Vec<Capture>> = Lock::new(Vec::new());
    CAPTURES.lock()
}

/// Strikes out the capture of this stream, which has ended, if the stream had a capture of its own.
fn capture_ended(stream: usize) {
    let context = (stream <= PER_THREAD_STREAM).then(|| streams::context_of(stream));
    let own = |capture: &Capture| {
        capture.origin == stream && context.is_none_or(|context| context == capture.context)
    };
    let mut captures = captures();
    if let Some(at) = captures.iter().position(own) {
        captures.swap_remove(at);
        CONTROL.capture_ended();
    }
}

/// Strikes out the captures of a destroyed context's streams.
fn captures_gone(context: usize) {
    captures().retain(|capture| {
        let goes_on = capture.context != context;
        if !goes_on {
            CONTROL.capture_ended();
        }
        goes_on
    });
}

/// Strikes out the captures of a destroyed context, and releases all memory held by it.
fn destroyed(context: usize) {
    captures_gone(context);
    let Some(runtime) = PROCESS.runtime() else { return };
    for (_, record) in runtime.book.drain(|_, record| record.context == context) {
        runtime.release(record.device, record.bytes);
    }
    if let Some(blocks) = runtime.blocks() {
        blocks.forget(context);
    }
}

fn destroy(context: sys::CUcontext, call: impl FnOnce() -> CUresult) -> CUresult {
    destroying(context.addr());
    let result = call();
    if result.is_ok() && !context.is_null() {
        destroyed(context.addr());
    }
    result
}

/// Contexts attached and not yet detached, once for each attachment.
fn attachments() -> Guard<'static, Vec<usize>> {
    static ATTACHMENTS: Lock<Vec<usize>> = Lock::new(Vec::new());
    ATTACHMENTS.lock()
}

/// References to primary contexts taken through the hook, by device.
static RETAINED: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];

fn retained(device: CUdevice) -> Option<&'static AtomicU32> {
    RETAINED.get(usize::try_from(device).ok()?)
}

/// Counts a reference to a primary context, which may be in use only from now on.
fn retain(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    call().on_success(|| {
        if let Some(retained) = retained(device) {
            retained.fetch_add(1, Ordering::AcqRel);
        }
        CONTROL.context_on(device);
    })
}

/// Gives a reference to a primary context back. Only the last reference may be the end of the context.
fn release(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    let left = retained(device).map_or(0, |retained| {
        retained.try_update(Ordering::AcqRel, Ordering::Relaxed, |n| n.checked_sub(1)).map_or(0, |n| n - 1)
    });
    if left > 0 { call() } else { let_go(device, call) }
}

/// Notes a context made beside the primary context, which may be a green context.
fn made_on(device: CUdevice) {
    PROCESS.own_contexts.made_on(device);
    CONTROL.context_on(device);
}

fn created(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    call().on_success(|| {
        made_on(device);
        // A new context becomes current at once.
        segments::switching(context::current_handle().unwrap_or(0));
    })
}

/// Notes a stream made with these flags.
fn stream_made(flags: c_uint, call: impl FnOnce() -> CUresult) -> CUresult {
    if flags & NON_BLOCKING == 0 {
        CONTROL.blocking_stream_made();
    }
    call()
}

/// The handle written to an out-pointer by a successful call.
fn written<T>(out: *const *mut T) -> usize {
    // SAFETY: null, or written by the successful call.
    unsafe { out.as_ref() }.map_or(0, |handle| handle.addr())
}

/// The primary context of a device, if it is active.
fn primary(device: CUdevice) -> Option<usize> {
    let (mut flags, mut active): (c_uint, c_int) = (0, 0);
    // SAFETY: valid out-pointers.
    let known = unsafe { real!(cuDevicePrimaryCtxGetState)?(device, &raw mut flags, &raw mut active) };
    if !known.is_ok() || active == 0 {
        return None;
    }
    // A reference of our own tells the context's handle, and is given back at once.
    let mut context: sys::CUcontext = core::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    let kept = unsafe { real!(cuDevicePrimaryCtxRetain)?(&raw mut context, device) };
    if !kept.is_ok() {
        return None;
    }
    // SAFETY: balances the reference above.
    let _ = unsafe { real!(cuDevicePrimaryCtxRelease_v2)?(device) };
    Some(context.addr())
}

/// Makes a call that may destroy a primary context.
fn let_go(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    let matters = PROCESS.runtime().is_some() || CONTROL.capturing();
    let context = if matters { primary(device) } else { None };
    if let Some(context) = context {
        destroying(context);
    }
    let result = call();
    if let Some(context) = context
        && result.is_ok()
        && primary(device).is_none()
    {
        destroyed(context);
    }
    result
}

/// Makes a call after which another context is current.
fn switch(to: sys::CUcontext, call: impl FnOnce() -> CUresult) -> CUresult {
    segments::switching(to.addr());
    call()
}

/// Makes a call after which the previous context is current again. Only then is this context known.
fn switch_back(call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    segments::switching(context::current_handle().unwrap_or(0));
    result
}

/// Makes a call that destroys a stream, before which the stream's last events must be recorded.
fn destroy_stream(stream: sys::CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    segments::synchronising();
    segments::destroying(stream.addr());
    let result = call();
    if result.is_ok() && CONTROL.capturing() {
        capture_ended(stream.addr());
    }
    result
}

/// Makes a call that begins a capture. Recording of events stops before the call, and goes on at once if no capture began.
fn begin_capture(stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    segments::synchronising();
    CONTROL.capture_began();
    // Memory that leaves the device while a stream captures would spoil the capture.
    let result = inside(call);
    if result.is_ok() {
        captures().push(Capture { origin: stream, context: streams::context_of(stream) });
    } else {
        CONTROL.capture_ended();
    }
    result
}

/// Makes a call that may end a capture. Some errors end a capture too and others do not, so the stream is asked.
fn end_capture(stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    let before = CONTROL.capturing() && streams::is_captured(stream);
    let result = call();
    if before && !streams::is_captured(stream) {
        capture_ended(stream);
    }
    result
}

wrappers! { CONTEXTS:
    cuCtxCreate, cuCtxCreate_v2(context: *mut sys::CUcontext, flags: c_uint, device: CUdevice) |call| {
        created(device, call)
    }
    cuCtxCreate_v3(context: *mut sys::CUcontext, params: *mut sys::CUexecAffinityParam, count: c_int,
        flags: c_uint, device: CUdevice) |call| { created(device, call) }
    cuCtxCreate_v4(context: *mut sys::CUcontext, params: *mut sys::CUctxCreateParams, flags: c_uint,
        device: CUdevice) |call| { created(device, call) }
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: CUdevice) |call| { retain(device, call) }
    cuCtxDestroy, cuCtxDestroy_v2(context: sys::CUcontext) |call| { destroy(context, call) }
    cuCtxAttach(context: *mut sys::CUcontext, flags: c_uint) |call| {
        call().on_success(|| attachments().push(written(context)))
    }
    cuCtxDetach(context: sys::CUcontext) |call| {
        let attached = {
            let mut attachments = attachments();
            let at = attachments.iter().position(|&attached| attached == context.addr());
            at.map(|at| attachments.swap_remove(at)).is_some()
        };
        if attached { call() } else { destroy(context, call) }
    }
    cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2(device: CUdevice) |call| { release(device, call) }
    cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2(device: CUdevice) |call| { let_go(device, call) }
    cuCtxSetCurrent, cuCtxPushCurrent, cuCtxPushCurrent_v2(context: sys::CUcontext) |call| { switch(context, call) }
    cuCtxPopCurrent, cuCtxPopCurrent_v2(context: *mut sys::CUcontext) |call| { switch_back(call) }
    // The context's streams go with it.
    cuGreenCtxDestroy(context: sys::CUgreenCtx) |call| {
        synchronise(|| {
            let handle = context::forget_green(context.addr());
            let runtime = handle.and_then(|handle| Some((handle, PROCESS.runtime()?)));
            let pools = runtime.and_then(|(handle, runtime)| Some((handle, &runtime.blocks()?.pools)));
            if let Some((handle, runtime)) = runtime {
                runtime.metering.contexts.destroying(handle);
            }
            if let Some((handle, pools)) = pools {
                pools.destroying(handle);
            }
            segments::destroying(ALL_STREAMS);
            let result = call();
            if result.is_ok() {
                [Some(context.addr()), handle].into_iter().flatten().for_each(captures_gone);
                if let Some((handle, pools)) = pools {
                    pools.destroyed(handle);
                }
            }
            result
        })
    }
    cuCtxFromGreenCtx(out: *mut sys::CUcontext, context: sys::CUgreenCtx) |call| {
        call().on_success(|| context::name_green(context.addr(), written(out)))
    }
    cuGreenCtxCreate(out: *mut sys::CUgreenCtx, description: sys::CUdevResourceDesc, device: CUdevice,
        flags: c_uint) |call| {
        call().on_success(|| {
            made_on(device);
            if let Some(host) = primary(device) {
                context::note_green(written(out), host);
            }
        })
    }
    cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint) |call| { stream_made(flags, call) }
    cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int) |call| {
        stream_made(flags, call)
    }
    cuStreamDestroy, cuStreamDestroy_v2(stream: sys::CUstream) |call| { destroy_stream(stream, call) }
    cuStreamBeginCapture, cuStreamBeginCapture_ptsz(stream: sys::CUstream) |call, per_thread| {
        begin_capture(stream_of(stream, per_thread), call)
    }
    cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(stream: sys::CUstream,
        mode: c_uint) |call, per_thread| { begin_capture(stream_of(stream, per_thread), call) }
    cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(stream: sys::CUstream, graph: sys::CUgraph,
        dependencies: *const sys::CUgraphNode, data: *const sys::CUgraphEdgeData, count: usize,
        mode: c_uint) |call, per_thread| { begin_capture(stream_of(stream, per_thread), call) }
    cuStreamBeginRecaptureToGraph, cuStreamBeginRecaptureToGraph_ptsz(stream: sys::CUstream, mode: c_uint,
        graph: sys::CUgraph, callback: sys::CUgraphRecaptureCallback, data: *mut c_void) |call, per_thread| {
        begin_capture(stream_of(stream, per_thread), call)
    }
    cuStreamBeginCaptureToCig, cuStreamBeginCaptureToCig_ptsz(stream: sys::CUstream,
        params: *mut sys::CUstreamCigCaptureParams) |call, per_thread| {
        begin_capture(stream_of(stream, per_thread), call)
    }
    cuStreamEndCapture, cuStreamEndCapture_ptsz(stream: sys::CUstream,
        graph: *mut sys::CUgraph) |call, per_thread| { end_capture(stream_of(stream, per_thread), call) }
    cuStreamEndCaptureToCig, cuStreamEndCaptureToCig_ptsz(stream: sys::CUstream) |call, per_thread| {
        end_capture(stream_of(stream, per_thread), call)
    }
    cuCtxSynchronize() |call| { synchronise(call) }
    cuCtxSynchronize_v2(context: sys::CUcontext) |call| { synchronise(call) }
    cuStreamSynchronize, cuStreamSynchronize_ptsz, cuStreamQuery, cuStreamQuery_ptsz(
        stream: sys::CUstream) |call| { synchronise(call) }
    cuEventSynchronize(event: sys::CUevent) |call| { synchronise(call) }
}
