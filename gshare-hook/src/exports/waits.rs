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

/// Wrappers that tell the launch path of a wait of `$stream`, each function beside its variant for the thread's own default stream.
macro_rules! waits {
    ($([$stream:ident] $legacy:ident, $per_thread:ident($($arg:ident: $type:ty),*);)*) => {
        wrappers! { WAITS:
            $($legacy($($arg: $type),*) |real| {
                waits(stream_of($stream, false));
                // SAFETY: the caller's own arguments.
                inside(|| unsafe { real($($arg),*) })
            }
            $per_thread($($arg: $type),*) |real| {
                waits(stream_of($stream, true));
                // SAFETY: the caller's own arguments.
                inside(|| unsafe { real($($arg),*) })
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
    [stream] cuStreamWaitValue32, cuStreamWaitValue32_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint);
    [stream] cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u32, flags: c_uint);
    [stream] cuStreamWaitValue64, cuStreamWaitValue64_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint);
    [stream] cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(
        stream: sys::CUstream, address: CUdeviceptr, value: u64, flags: c_uint);
    [stream] cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz(
        stream: sys::CUstream, count: c_uint, list: *mut sys::CUstreamBatchMemOpParams, flags: c_uint);
    [stream] cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz(
        stream: sys::CUstream, count: c_uint, list: *mut sys::CUstreamBatchMemOpParams, flags: c_uint);
    [stream] cuWaitExternalSemaphoresAsync, cuWaitExternalSemaphoresAsync_ptsz(
        list: *const sys::CUexternalSemaphore, params: *const sys::CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
        count: c_uint, stream: sys::CUstream);
}
