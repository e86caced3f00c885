//! `CUDART_INTERFACE`: modules from fat binaries, and a device's primary context.
//!
//! Facts: ZLUDA's `dark_api` (13 words; slots 1, 2, 6, 7, 8 and 12 with their arguments). Slot 12 loads compilers into a
//! real driver; the simulated one reads PTX itself and has none to load.

use std::ffi::{c_int, c_uint, c_void};

use super::{Table, sized};
use crate::driver::{CUresult, Pointer, base, context, exports, guard, sys};

pub(super) const TABLE: Table = Table {
    id: [0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9],
    name: "CUDART_INTERFACE",
    words: &WORDS,
};

static WORDS: [Pointer; 13] = sized::<0, 13>(&[
    (1, load_wrapper as *const ()),
    (2, primary_context as *const ()),
    (6, load_wrapper_with_options as *const ()),
    (7, nothing as *const ()),
    (8, load_container_with_options as *const ()),
    (12, load_compilers as *const ()),
]);

unsafe extern "C" fn load_wrapper(module: *mut sys::CUmodule, image: *const c_void) -> CUresult {
    // SAFETY: the caller's contract is that of `cuModuleLoadData`.
    unsafe { exports::cuModuleLoadData(module, image) }
}

unsafe extern "C" fn load_wrapper_with_options(
    module: *mut sys::CUmodule,
    image: *const c_void,
    _options: *mut c_void,
    _values: *mut c_void,
    _count: c_uint,
) -> CUresult {
    // SAFETY: the caller's contract is that of `cuModuleLoadDataEx`.
    unsafe { load_wrapper(module, image) }
}

unsafe extern "C" fn load_container_with_options(
    image: *const c_void,
    module: *mut sys::CUmodule,
    _options: *mut c_void,
    _values: *mut c_void,
    _count: c_uint,
) -> CUresult {
    // SAFETY: the caller's contract is that of `cuModuleLoadDataEx`.
    unsafe { load_wrapper(module, image) }
}

/// The primary context, made if there is none. Callers do not release it, so the call counts as no retain.
unsafe extern "C" fn primary_context(context: *mut sys::CUcontext, device: c_int) -> CUresult {
    guard(|| {
        let primary = context::primary(device)?;
        // SAFETY: an out-pointer of the caller, checked for null.
        unsafe { base::put(context, primary.handle()) }
    })
}

extern "C" fn nothing(_unknown: usize) {}

extern "C" fn load_compilers() -> CUresult {
    CUresult::CUDA_SUCCESS
}
