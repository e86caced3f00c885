//! `CONTEXT_CHECKS`: rare properties of a context.
//!
//! Facts: ZLUDA's `dark_api` (4 words; slot 2 writes 0 to its second argument, slot 3 answers 0; other values were never seen).

use std::ffi::c_void;

use super::*;

table!(4 "CONTEXT_CHECKS"
    [0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e],
    4 words, 2 check, 3 zero);

functions! {
    fn check(_context: sys::CUcontext, found: *mut u32, _unwritten: *mut *const c_void) { put(found, 0) }
}

extern "C" fn zero() -> u32 {
    0
}
