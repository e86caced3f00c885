//! `TOOLS_CONTEXT`: facts about contexts.
//!
//! Facts: projects that print the tables name slot 3 "get device" and slot 4 "get context number" and count 95 words; a
//! public driver proxy answers slot 51 with the address of an object, or `CUDA_ERROR_INVALID_HANDLE`, and slot 39 with the
//! number 0. Observed: libcudart 13.4 asks for the table at its start; cuBLASLt calls slot 4 with a context and an
//! out-pointer; cuBLAS 13.4 calls slot 51 with a context, a stream and an out-pointer before a triangular solve, and then
//! slot 39 with the context, the object and an out-pointer. What the number means is not known; 0 serves.

use std::ffi::{c_int, c_ulonglong};

use super::{Table, context_of, sized};
use crate::driver::{CUresult, Flavor, Pointer, StreamArg, base, guard, sys};

pub(super) const TABLE: Table = Table {
    id: [0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2],
    name: "TOOLS_CONTEXT",
    words: &WORDS,
};

static WORDS: [Pointer; 95] = sized::<6, 95>(&[
    (3, device as *const ()),
    (4, number as *const ()),
    (39, stream_property as *const ()),
    (51, stream_object as *const ()),
]);

unsafe extern "C" fn device(context: sys::CUcontext, device: *mut c_int) -> CUresult {
    guard(|| {
        let context = context_of(context)?;
        // SAFETY: an out-pointer of the caller, checked for null.
        unsafe { base::put(device, context.device.ordinal) }
    })
}

unsafe extern "C" fn number(context: sys::CUcontext, number: *mut c_ulonglong) -> CUresult {
    guard(|| {
        let context = context_of(context)?;
        // SAFETY: an out-pointer of the caller, checked for null.
        unsafe { base::put(number, context.id) }
    })
}

/// The object behind a stream of a context.
unsafe extern "C" fn stream_object(
    context: sys::CUcontext,
    stream: sys::CUstream,
    object: *mut sys::CUstream,
) -> CUresult {
    guard(|| {
        context_of(context)?;
        // SAFETY: handles are checked by their magic number, the out-pointer for null.
        unsafe { base::put(object, base::stream(StreamArg(Flavor::Legacy, stream))?.handle()) }
    })
}

unsafe extern "C" fn stream_property(
    context: sys::CUcontext,
    object: sys::CUstream,
    property: *mut u64,
) -> CUresult {
    guard(|| {
        context_of(context)?;
        // SAFETY: as above.
        unsafe {
            base::Object::<base::Stream>::get(object)?;
            base::put(property, 0)
        }
    })
}
