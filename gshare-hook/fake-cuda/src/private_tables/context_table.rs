//! `TOOLS_CONTEXT`: facts about contexts.
//!
//! Facts: projects which print the tables name slot 3 "get device" and slot 4 "get context number" and count 95 words; a public driver
//! proxy answers slot 51 with the address of an object, or `CUDA_ERROR_INVALID_HANDLE`, and slot 39 with the number 0. Observed: libcudart
//! 13.4 asks for the table at its start; cuBLASLt calls slot 4 with a context and an out-pointer; cuBLAS 13.4 calls slot 51 with a context,
//! a stream and an out-pointer before a triangular solve, and then slot 39 with the context, the object and an out-pointer. The number's
//! meaning is unknown; 0 serves.

use std::ffi::{c_int, c_ulonglong};

use super::*;

table!(6 "TOOLS_CONTEXT"
    [0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2],
    95 words, 3 device, 4 number, 39 stream_property, 51 stream_object);

functions! {
    fn device(context: sys::CUcontext, device: *mut c_int) { put(device, context_of(context)?.device.ordinal) }
    fn number(context: sys::CUcontext, number: *mut c_ulonglong) { put(number, context_of(context)?.id) }
    /// The object behind a stream of a context.
    fn stream_object(context: sys::CUcontext, stream: sys::CUstream, object: *mut sys::CUstream) {
        context_of(context)?;
        put(object, StreamArg(Flavor::Legacy, stream).find()?.handle())
    }
    fn stream_property(context: sys::CUcontext, object: sys::CUstream, property: *mut u64) {
        context_of(context)?;
        base::Object::<base::Stream>::get(object)?;
        put(property, 0)
    }
}
