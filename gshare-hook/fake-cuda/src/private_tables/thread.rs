//! `TOOLS_TLS`: the calling thread's context.
//!
//! Facts: ZLUDA's `dark_api` (4 words); projects that print the tables name slot 2 "get thread context". Observed: without
//! slot 2 cuBLASLt finds no algorithm for any matrix product.

use super::{Table, sized};
use crate::driver::{CUresult, Pointer, base, guard, sys};

pub(super) const TABLE: Table = Table {
    id: [0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc],
    name: "TOOLS_TLS",
    words: &WORDS,
};

static WORDS: [Pointer; 4] = sized::<2, 4>(&[(2, thread_context as *const ())]);

/// The current context, or null, as `cuCtxGetCurrent` gives it.
unsafe extern "C" fn thread_context(context: *mut sys::CUcontext) -> CUresult {
    guard(|| {
        base::driver()?;
        let current = base::current_opt().map_or(std::ptr::null_mut(), base::Object::handle);
        // SAFETY: an out-pointer of the caller, checked for null.
        unsafe { base::put(context, current) }
    })
}
