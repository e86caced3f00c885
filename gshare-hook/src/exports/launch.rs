//! Launches of kernels and graphs: from the call to the driver's answer.
//!
//! Each wrapper of a launch of kernels makes its call by [`launch`], which meters the call, and holds it while device memory is elsewhere.
//! The fast path needs only the `launch` floor. The slow path first decides whether the process is metered at all, and on which device.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_int, c_uint, c_void};

use gshare_cuda_abi::types::{CUresult, sys};
use gshare_meter::run::{Call, Verdict};

use crate::exports::macros::wrappers;
use crate::launch::admit::{self, Ticket, admit, admit_prepaid, conclude};
use crate::launch::control::{CONTROL, State};
use crate::launch::guarded::inside;
use crate::launch::streams::{in_context_of, is_captured, stream_of};
use crate::process::arm::arm;
use crate::process::runtime::{Metered, PROCESS};

/// Meters a launch by the program and makes the driver's own `call`.
///
/// `handle` and `size` identify the launch's cost, and `stream` is its stream (see [`stream_of`]).
#[inline(always)]
fn launch(handle: u64, size: u64, stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    launch_as(handle, size, stream, Call::Launch, || inside(call))
}

/// Like [`launch`], for a call of the given kind.
#[inline(always)]
pub(super) fn launch_as(
    handle: u64,
    size: u64,
    stream: usize,
    kind: Call,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let ticket =
        admit_prepaid(handle, size, stream).unwrap_or_else(|| admit_slowly(handle, size, stream, kind));
    if ticket.verdict == Verdict::Fail {
        return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
    }
    let result = call();
    if ticket.verdict > Verdict::Paid || (ticket.verdict == Verdict::Paid && !result.is_ok()) {
        conclude(ticket, stream, result);
    }
    result
}

/// The switch is looked at here: in the caller, the compiler would copy all arguments of the call for the sake of a jump to the driver.
#[inline(never)]
fn admit_slowly(handle: u64, size: u64, stream: usize, kind: Call) -> Ticket {
    if CONTROL.state() == State::Off as u32 {
        return Ticket::PASS;
    }
    // A launch of a process that is metered already decides nothing about the process.
    let runtime = match PROCESS.metering().map_or_else(|| arm(None), Metered::Yes) {
        Metered::Yes(runtime) => runtime,
        Metered::No => return Ticket::PASS,
        Metered::Refused => return Ticket::FAIL,
    };
    if CONTROL.capturing() && is_captured(stream) {
        return Ticket::PASS;
    }
    let admit_on = |device| admit(&runtime.metering, device, (handle, size), stream, kind);
    if let Some(device) = runtime.metering.devices.sole() {
        return admit_on(device);
    }
    // With several devices the stream determines the device, and events must be made in the stream's context.
    in_context_of(stream, || match runtime.current_device() {
        Metered::Yes(device) => admit_on(device),
        Metered::No => Ticket::PASS,
        Metered::Refused => Ticket::FAIL,
    })
}

/// The number of a launch's threads, grid times block.
#[inline(always)]
fn threads(grid: [c_uint; 3], block: [c_uint; 3]) -> u64 {
    let product = |[x, y, z]: [c_uint; 3]| u64::from(x).wrapping_mul(y.into()).wrapping_mul(z.into());
    product(grid).wrapping_mul(product(block))
}

wrappers! { LAUNCHES:
    cuLaunchKernel, cuLaunchKernel_ptsz(f: sys::CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint,
        by: c_uint, bz: c_uint, shared: c_uint, stream: sys::CUstream, params: *mut *mut c_void,
        extra: *mut *mut c_void) |call, per_thread| {
        launch(f.addr() as u64, threads([gx, gy, gz], [bx, by, bz]), stream_of(stream, per_thread), call)
    }
    cuLaunchKernelEx, cuLaunchKernelEx_ptsz(config: *const sys::CUlaunchConfig, f: sys::CUfunction,
        params: *mut *mut c_void, extra: *mut *mut c_void) |call, per_thread| {
        // SAFETY: null, which the driver refuses, or the caller's own, of which only integers and one pointer are read.
        let Some(c) = (unsafe { config.as_ref() }) else { return call() };
        let size = threads([c.gridDimX, c.gridDimY, c.gridDimZ], [c.blockDimX, c.blockDimY, c.blockDimZ]);
        launch(f.addr() as u64, size, stream_of(c.hStream, per_thread), call)
    }
    cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(f: sys::CUfunction, gx: c_uint, gy: c_uint,
        gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: sys::CUstream,
        params: *mut *mut c_void) |call, per_thread| {
        launch(f.addr() as u64, threads([gx, gy, gz], [bx, by, bz]), stream_of(stream, per_thread), call)
    }
    // One launch on several devices is charged as one launch on the first device, where its cost is learned.
    cuLaunchCooperativeKernelMultiDevice(list: *mut sys::CUDA_LAUNCH_PARAMS, devices: c_uint,
        flags: c_uint) |call| {
        // SAFETY: null, or the caller's own list.
        let Some(first) = (unsafe { list.as_ref() }).filter(|_| devices > 0) else { return call() };
        let grid = [first.gridDimX, first.gridDimY, first.gridDimZ];
        let size = threads(grid, [first.blockDimX, first.blockDimY, first.blockDimZ]);
        launch(first.function.addr() as u64, size, stream_of(first.hStream, false), call)
    }
    cuGraphLaunch, cuGraphLaunch_ptsz(exec: sys::CUgraphExec, stream: sys::CUstream) |call, per_thread| {
        let result = launch(exec.addr() as u64, 0, stream_of(stream, per_thread), call);
        crate::exports::pools::graph_launched();
        result
    }
    cuGraphExecDestroy(exec: sys::CUgraphExec) |call| {
        call().on_success(|| admit::forget(exec.addr() as u64, 0))
    }
    // CUDA 2 launches by these functions, on the default stream.
    cuLaunch(f: sys::CUfunction) |call| { launch(f.addr() as u64, 1, 0, call) }
    cuLaunchGrid(f: sys::CUfunction, width: c_int, height: c_int) |call| {
        let size = u64::from(width.unsigned_abs()) * u64::from(height.unsigned_abs());
        launch(f.addr() as u64, size, 0, call)
    }
    cuLaunchGridAsync(f: sys::CUfunction, width: c_int, height: c_int, stream: sys::CUstream) |call| {
        let size = u64::from(width.unsigned_abs()) * u64::from(height.unsigned_abs());
        launch(f.addr() as u64, size, stream_of(stream, false), call)
    }
}
