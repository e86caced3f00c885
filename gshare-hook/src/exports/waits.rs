//! Calls that make a stream wait for the host, a word of memory, another stream or another owner's semaphore.
//!
//! These calls take no GPU time, and the time of the wait is not the program's use of the device. The launch path is told before each,
//! so no measured segment holds a wait, and other processes use the device until the wait is over.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_uint, c_void};

use gshare_cuda_abi::types::{CUdeviceptr, sys};

use crate::exports::macros::wrappers;
use crate::launch::guarded::inside;
use crate::launch::segments::waits;
use crate::launch::streams::stream_of;

/// Wrappers that tell the launch path of a wait of `$stream`.
macro_rules! waits {
    ($([$stream:ident] $($name:ident),+ ($($args:tt)*);)*) => {
        wrappers! { WAITS:
            $($($name),+ ($($args)*) |call, per_thread| {
                waits(stream_of($stream, per_thread));
                inside(call)
            })*
        }
    };
}

waits! {
    [stream] cuLaunchHostFunc, cuLaunchHostFunc_ptsz(
        stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void);
    [stream] cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(
        stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void, mode: c_uint);
    [stream] cuStreamAddCallback, cuStreamAddCallback_ptsz(
        stream: sys::CUstream, function: sys::CUstreamCallback, data: *mut c_void, flags: c_uint);
    [stream] cuStreamWaitEvent, cuStreamWaitEvent_ptsz(
        stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    [stream] cuStreamWaitValue32, cuStreamWaitValue32_ptsz, cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint);
    [stream] cuStreamWaitValue64, cuStreamWaitValue64_ptsz, cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint);
    [stream] cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz, cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz(
        stream: sys::CUstream, count: c_uint, list: *mut sys::CUstreamBatchMemOpParams, flags: c_uint);
    [stream] cuWaitExternalSemaphoresAsync, cuWaitExternalSemaphoresAsync_ptsz(
        list: *const sys::CUexternalSemaphore, params: *const sys::CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
        count: c_uint, stream: sys::CUstream);
}
