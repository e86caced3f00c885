//! The C types of the driver's signatures.
//!
//! Handles and structures are those of `cudarc`'s bindings, [`sys`]. Enumerations are `c_uint`, and results are
//! [`CUresult`]: a Rust enum that holds a value it does not list is undefined behaviour, and a driver newer than the
//! bindings returns such values. For the same reason, read the enumeration fields of [`sys`] structures that came from
//! a program through a raw pointer to an integer.

pub use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
pub use cudarc::driver::sys;

/// A device ordinal.
pub type CUdevice = c_int;
/// An address in device memory.
pub type CUdeviceptr = c_ulonglong;

/// What every driver function returns.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct CUresult(pub c_uint);

impl CUresult {
    /// Whether the call succeeded.
    pub const fn is_ok(self) -> bool {
        self.0 == 0
    }
}

impl From<sys::CUresult> for CUresult {
    fn from(result: sys::CUresult) -> Self {
        Self(result as c_uint)
    }
}

macro_rules! results {
    ($($name:ident),* $(,)?) => {
        impl CUresult {
            $(
                #[doc = concat!("The driver's `", stringify!($name), "`.")]
                pub const $name: Self = Self(sys::CUresult::$name as c_uint);
            )*
        }
    };
}

results!(
    CUDA_SUCCESS,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_DEINITIALIZED,
    CUDA_ERROR_STUB_LIBRARY,
    CUDA_ERROR_NO_DEVICE,
    CUDA_ERROR_INVALID_DEVICE,
    CUDA_ERROR_INVALID_IMAGE,
    CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_MAP_FAILED,
    CUDA_ERROR_ALREADY_MAPPED,
    CUDA_ERROR_NOT_MAPPED,
    CUDA_ERROR_INVALID_SOURCE,
    CUDA_ERROR_FILE_NOT_FOUND,
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
    CUDA_ERROR_OPERATING_SYSTEM,
    CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_ILLEGAL_STATE,
    CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_NOT_READY,
    CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_LAUNCH_FAILED,
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
    CUDA_ERROR_NOT_PERMITTED,
    CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_SYSTEM_NOT_READY,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CUDA_ERROR_CAPTURED_EVENT,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    CUDA_ERROR_UNKNOWN,
);

/// A place in memory, where the driver takes one by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUmemLocation {
    /// The driver's `CUmemLocationType`: 1 is a device.
    pub kind: c_uint,
    /// A device ordinal or a NUMA node, by `kind`.
    pub id: c_int,
}
