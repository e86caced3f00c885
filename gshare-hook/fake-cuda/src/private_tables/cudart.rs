//! `CUDART_INTERFACE`: modules from fat binaries, and a device's primary context.
//!
//! Facts: ZLUDA's `dark_api` (13 words; slots 1, 2, 6, 7, 8 and 12 with their arguments). Slot 12 loads compilers into a
//! real driver; the simulated one reads PTX itself and has none to load.

use std::ffi::{c_int, c_void};

use super::*;
use crate::driver::primary_context;

table!(0 "CUDART_INTERFACE"
    [0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9],
    13 words, 1 load_wrapper, 2 primary_context, 6 load_wrapper, 7 nothing, 8 load_container,
    12 load_compilers);

functions! {
    /// Serves slots 1 and 6. Callers of 6 and 8 also pass options, which stay unread.
    fn load_wrapper(module: *mut sys::CUmodule, image: *const c_void) {
        ok(exports::cuModuleLoadData(module, image))
    }
    fn load_container(image: *const c_void, module: *mut sys::CUmodule) {
        ok(exports::cuModuleLoadData(module, image))
    }
    /// The primary context, created if need be. Callers do not release it, so the call retains nothing.
    fn primary_context(context: *mut sys::CUcontext, device: c_int) {
        put(context, primary_context::primary(device)?.handle())
    }
    fn load_compilers() { Ok(()) }
}

extern "C" fn nothing(_unknown: usize) {}
