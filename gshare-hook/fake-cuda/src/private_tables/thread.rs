//! `TOOLS_TLS`: the calling thread's context.
//!
//! Facts: ZLUDA's `dark_api` (4 words); projects which print the tables name slot 2 "get thread context". Observed: without slot 2 cuBLASLt
//! finds no algorithm for any matrix product.

use super::*;

table!(2 "TOOLS_TLS"
    [0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc],
    4 words, 2 thread_context);

functions! {
    fn thread_context(context: *mut sys::CUcontext) {
        base::driver()?;
        put(context, base::current_opt().map_or(std::ptr::null_mut(), base::Object::handle))
    }
}
