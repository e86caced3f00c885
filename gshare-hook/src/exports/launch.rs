//! Launches of kernels and graphs: from the call to the driver's answer.
//!
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

macro_rules! kernel {
    ($real:ident, $per_thread:literal, $f:ident, [$gx:ident, $gy:ident, $gz:ident, $bx:ident, $by:ident, $bz:ident],
     $stream:ident, ($($arg:ident),*)) => {{
        let size = threads([$gx, $gy, $gz], [$bx, $by, $bz]);
        // SAFETY: the caller's own arguments.
        launch($f.addr() as u64, size, stream_of($stream, $per_thread), move || unsafe { $real($($arg),*) })
    }};
}

macro_rules! kernel_by_config {
    ($real:ident, $per_thread:literal, $config:ident, $f:ident, ($($arg:ident),*)) => {{
        // SAFETY: null, or the caller's own configuration, of which only integers and one pointer are read.
        let (size, stream) = match unsafe { $config.as_ref() } {
            Some(c) => (
                threads([c.gridDimX, c.gridDimY, c.gridDimZ], [c.blockDimX, c.blockDimY, c.blockDimZ]),
                stream_of(c.hStream, $per_thread),
            ),
            // SAFETY: the caller's own arguments; the driver refuses them.
            None => return unsafe { $real($($arg),*) },
        };
        // SAFETY: the caller's own arguments.
        launch($f.addr() as u64, size, stream, move || unsafe { $real($($arg),*) })
    }};
}

wrappers! { LAUNCHES:
    cuLaunchKernel(f: sys::CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: sys::CUstream, params: *mut *mut c_void, extra: *mut *mut c_void) |real| {
        kernel!(real, false, f, [gx, gy, gz, bx, by, bz], stream,
            (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra))
    }
    cuLaunchKernel_ptsz(f: sys::CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: sys::CUstream, params: *mut *mut c_void, extra: *mut *mut c_void) |real| {
        kernel!(real, true, f, [gx, gy, gz, bx, by, bz], stream,
            (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra))
    }
    cuLaunchKernelEx(config: *const sys::CUlaunchConfig, f: sys::CUfunction, params: *mut *mut c_void,
        extra: *mut *mut c_void) |real| {
        kernel_by_config!(real, false, config, f, (config, f, params, extra))
    }
    cuLaunchKernelEx_ptsz(config: *const sys::CUlaunchConfig, f: sys::CUfunction, params: *mut *mut c_void,
        extra: *mut *mut c_void) |real| {
        kernel_by_config!(real, true, config, f, (config, f, params, extra))
    }
    cuLaunchCooperativeKernel(f: sys::CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: sys::CUstream, params: *mut *mut c_void) |real| {
        kernel!(real, false, f, [gx, gy, gz, bx, by, bz], stream, (f, gx, gy, gz, bx, by, bz, shared, stream, params))
    }
    cuLaunchCooperativeKernel_ptsz(f: sys::CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: sys::CUstream, params: *mut *mut c_void) |real| {
        kernel!(real, true, f, [gx, gy, gz, bx, by, bz], stream, (f, gx, gy, gz, bx, by, bz, shared, stream, params))
    }
    // One launch on several devices is charged as one launch on the first device, where its cost is learned.
    cuLaunchCooperativeKernelMultiDevice(list: *mut sys::CUDA_LAUNCH_PARAMS, devices: c_uint, flags: c_uint) |real| {
        // SAFETY: null, or the caller's own list.
        let Some(first) = (unsafe { list.as_ref() }).filter(|_| devices > 0) else {
            // SAFETY: the caller's own arguments; the driver refuses them.
            return unsafe { real(list, devices, flags) };
        };
        let grid = [first.gridDimX, first.gridDimY, first.gridDimZ];
        let size = threads(grid, [first.blockDimX, first.blockDimY, first.blockDimZ]);
        // SAFETY: the caller's own arguments.
        launch(first.function.addr() as u64, size, stream_of(first.hStream, false), move || unsafe {
            real(list, devices, flags)
        })
    }
    cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream) |real| {
        // SAFETY: the caller's own arguments.
        let result = launch(exec.addr() as u64, 0, stream_of(stream, false), move || unsafe { real(exec, stream) });
        crate::exports::pools::graph_launched();
        result
    }
    cuGraphLaunch_ptsz(exec: sys::CUgraphExec, stream: sys::CUstream) |real| {
        // SAFETY: the caller's own arguments.
        let result = launch(exec.addr() as u64, 0, stream_of(stream, true), move || unsafe { real(exec, stream) });
        crate::exports::pools::graph_launched();
        result
    }
    cuGraphExecDestroy(exec: sys::CUgraphExec) |real| {
        // SAFETY: the caller's own arguments.
        let result = unsafe { real(exec) };
        if result.is_ok() {
            admit::forget(exec.addr() as u64, 0);
        }
        result
    }
    // CUDA 2 launches by these functions, on the default stream.
    cuLaunch(f: sys::CUfunction) |real| {
        // SAFETY: the caller's own arguments.
        launch(f.addr() as u64, 1, 0, move || unsafe { real(f) })
    }
    cuLaunchGrid(f: sys::CUfunction, width: c_int, height: c_int) |real| {
        let size = u64::from(width.unsigned_abs()) * u64::from(height.unsigned_abs());
        // SAFETY: the caller's own arguments.
        launch(f.addr() as u64, size, 0, move || unsafe { real(f, width, height) })
    }
    cuLaunchGridAsync(f: sys::CUfunction, width: c_int, height: c_int, stream: sys::CUstream) |real| {
        let size = u64::from(width.unsigned_abs()) * u64::from(height.unsigned_abs());
        // SAFETY: the caller's own arguments.
        launch(f.addr() as u64, size, stream_of(stream, false), move || unsafe { real(f, width, height, stream) })
    }
}
