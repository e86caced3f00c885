//! Calls that make a stream wait for the host, a word of memory, another stream or another owner's semaphore.
//!
//! These calls take no GPU time, and the time of the wait is not the program's use of the device. The launch path is told of each,
//! so a segment with a wait in it is charged the predicted time of its launches.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_uint, c_void};

use gshare_cuda_abi::types::{CUdeviceptr, sys};

use crate::exports::macros::wrappers;
use crate::launch::segments::waits;
use crate::launch::streams::stream_of;

macro_rules! wait {
    ($real:ident, $stream:ident, $per_thread:literal, ($($arg:ident),*)) => {{
        waits(stream_of($stream, $per_thread));
        // SAFETY: the caller's own arguments.
        unsafe { $real($($arg),*) }
    }};
}

wrappers! { WAITS:
    cuLaunchHostFunc(stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void) |real| {
        wait!(real, stream, false, (stream, function, data))
    }
    cuLaunchHostFunc_ptsz(stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void) |real| {
        wait!(real, stream, true, (stream, function, data))
    }
    cuLaunchHostFunc_v2(stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void, mode: c_uint) |real| {
        wait!(real, stream, false, (stream, function, data, mode))
    }
    cuLaunchHostFunc_v2_ptsz(stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void, mode: c_uint) |real| {
        wait!(real, stream, true, (stream, function, data, mode))
    }
    cuStreamAddCallback(stream: sys::CUstream, function: sys::CUstreamCallback, data: *mut c_void,
        flags: c_uint) |real| {
        wait!(real, stream, false, (stream, function, data, flags))
    }
    cuStreamAddCallback_ptsz(stream: sys::CUstream, function: sys::CUstreamCallback, data: *mut c_void,
        flags: c_uint) |real| {
        wait!(real, stream, true, (stream, function, data, flags))
    }
    cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint) |real| {
        wait!(real, stream, false, (stream, event, flags))
    }
    cuStreamWaitEvent_ptsz(stream: sys::CUstream, event: sys::CUevent, flags: c_uint) |real| {
        wait!(real, stream, true, (stream, event, flags))
    }
    cuStreamWaitValue32(stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint) |real| {
        wait!(real, stream, false, (stream, address, value, flags))
    }
    cuStreamWaitValue32_ptsz(stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint) |real| {
        wait!(real, stream, true, (stream, address, value, flags))
    }
    cuStreamWaitValue32_v2(stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint) |real| {
        wait!(real, stream, false, (stream, address, value, flags))
    }
    cuStreamWaitValue32_v2_ptsz(stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint) |real| {
        wait!(real, stream, true, (stream, address, value, flags))
    }
    cuStreamWaitValue64(stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint) |real| {
        wait!(real, stream, false, (stream, address, value, flags))
    }
    cuStreamWaitValue64_ptsz(stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint) |real| {
        wait!(real, stream, true, (stream, address, value, flags))
    }
    cuStreamWaitValue64_v2(stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint) |real| {
        wait!(real, stream, false, (stream, address, value, flags))
    }
    cuStreamWaitValue64_v2_ptsz(stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint) |real| {
        wait!(real, stream, true, (stream, address, value, flags))
    }
    cuStreamBatchMemOp(stream: sys::CUstream, count: c_uint, list: *mut sys::CUstreamBatchMemOpParams,
        flags: c_uint) |real| {
        wait!(real, stream, false, (stream, count, list, flags))
    }
    cuStreamBatchMemOp_ptsz(stream: sys::CUstream, count: c_uint, list: *mut sys::CUstreamBatchMemOpParams,
        flags: c_uint) |real| {
        wait!(real, stream, true, (stream, count, list, flags))
    }
    cuStreamBatchMemOp_v2(stream: sys::CUstream, count: c_uint, list: *mut sys::CUstreamBatchMemOpParams,
        flags: c_uint) |real| {
        wait!(real, stream, false, (stream, count, list, flags))
    }
    cuStreamBatchMemOp_v2_ptsz(stream: sys::CUstream, count: c_uint, list: *mut sys::CUstreamBatchMemOpParams,
        flags: c_uint) |real| {
        wait!(real, stream, true, (stream, count, list, flags))
    }
    cuWaitExternalSemaphoresAsync(list: *const sys::CUexternalSemaphore,
        params: *const sys::CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, count: c_uint, stream: sys::CUstream) |real| {
        wait!(real, stream, false, (list, params, count, stream))
    }
    cuWaitExternalSemaphoresAsync_ptsz(list: *const sys::CUexternalSemaphore,
        params: *const sys::CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, count: c_uint, stream: sys::CUstream) |real| {
        wait!(real, stream, true, (list, params, count, stream))
    }
}
