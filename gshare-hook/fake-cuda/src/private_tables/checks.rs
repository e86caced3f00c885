//! `CONTEXT_CHECKS`: properties of a context that no usual context has.
//!
//! Facts: ZLUDA's `dark_api` (4 words; slot 2 writes 0 to its second argument, slot 3 answers 0; other values were never
//! seen).

use std::ffi::c_void;

use super::{Table, sized};
use crate::driver::{CUresult, Pointer, base, guard, sys};

pub(super) const TABLE: Table = Table {
    id: [0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e],
    name: "CONTEXT_CHECKS",
    words: &WORDS,
};

static WORDS: [Pointer; 4] = sized::<4, 4>(&[(2, check as *const ()), (3, zero as *const ())]);

unsafe extern "C" fn check(
    _context: sys::CUcontext,
    found: *mut u32,
    _unwritten: *mut *const c_void,
) -> CUresult {
    guard(|| {
        // SAFETY: an out-pointer of the caller, checked for null.
        unsafe { base::put(found, 0) }
    })
}

extern "C" fn zero() -> u32 {
    0
}
