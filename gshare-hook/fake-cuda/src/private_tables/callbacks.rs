//! `TOOLS_RUNTIME_CALLBACK_HOOKS`: buffers for a profiler's requests for the runtime's callbacks.
//!
//! Facts: ZLUDA's `dark_api` (7 words; slots 2 and 6 give out a buffer and its size; zeroed buffers of 1024 words and of 14 bytes satisfy
//! libcudart). The simulated driver has no profiler: the buffers stay zero.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use super::*;

table!(1 "TOOLS_RUNTIME_CALLBACK_HOOKS"
    [0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66],
    7 words, 2 large_buffer, 6 small_buffer);

/// Atomics, because callers write to these buffers.
static LARGE: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
static SMALL: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
const SMALL_BYTES: usize = 14;

unsafe extern "C" fn large_buffer(at: *mut *mut c_void, bytes: *mut usize) {
    put_opt(at, LARGE.as_ptr().cast_mut().cast());
    put_opt(bytes, size_of_val(&LARGE));
}

unsafe extern "C" fn small_buffer(at: *mut *mut c_void, bytes: *mut usize) {
    put_opt(at, SMALL.as_ptr().cast_mut().cast());
    put_opt(bytes, SMALL_BYTES);
}
