//! The C types of the driver's signatures.
//!
//! Handles and structures come from `cudarc`'s bindings, [`sys`]. Enumerations are `c_uint`, and results are [`CUresult`]: a Rust enum with
//! an unlisted value is undefined behaviour, and a driver newer than the bindings returns such values. For the same reason, read the
//! enumeration fields of a program's [`sys`] structures through a raw pointer to an integer.

use core::ffi::CStr;
pub use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
pub use cudarc::driver::sys;

/// A device ordinal.
pub type CUdevice = c_int;
/// An address in device memory.
pub type CUdeviceptr = c_ulonglong;

/// The result of every driver function.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct CUresult(pub c_uint);

impl CUresult {
    /// Whether the call succeeded.
    pub const fn is_ok(self) -> bool {
        self.0 == 0
    }

    /// Follows a successful call up, and passes its result on.
    pub fn on_success(self, follow: impl FnOnce()) -> Self {
        if self.is_ok() {
            follow();
        }
        self
    }
}

impl From<sys::CUresult> for CUresult {
    fn from(result: sys::CUresult) -> Self {
        Self(result as c_uint)
    }
}

macro_rules! results {
    ($($name:ident $text:literal,)*) => {
        impl CUresult {
            $(
                #[doc = concat!("The driver's `", stringify!($name), "`.")]
                pub const $name: Self = Self(sys::CUresult::$name as c_uint);
            )*

            /// Name and description, as in `cuGetErrorName` and `cuGetErrorString`; `None` for a result outside this list.
            pub fn texts(self) -> Option<(&'static CStr, &'static CStr)> {
                let (name, text) = match self {
                    $(Self::$name => (concat!(stringify!($name), "\0"), $text),)*
                    _ => return None,
                };
                Some((CStr::from_bytes_with_nul(name.as_bytes()).ok()?, text))
            }
        }
    };
}

results! {
    CUDA_SUCCESS c"no error",
    CUDA_ERROR_INVALID_VALUE c"invalid argument",
    CUDA_ERROR_OUT_OF_MEMORY c"out of memory",
    CUDA_ERROR_NOT_INITIALIZED c"initialization error",
    CUDA_ERROR_DEINITIALIZED c"driver shutting down",
    CUDA_ERROR_PROFILER_DISABLED c"profiler disabled while using external profiling tool",
    CUDA_ERROR_STUB_LIBRARY c"CUDA driver is a stub library",
    CUDA_ERROR_DEVICE_UNAVAILABLE c"CUDA-capable device(s) is/are busy or unavailable",
    CUDA_ERROR_NO_DEVICE c"no CUDA-capable device is detected",
    CUDA_ERROR_INVALID_DEVICE c"invalid device ordinal",
    CUDA_ERROR_INVALID_IMAGE c"device kernel image is invalid",
    CUDA_ERROR_INVALID_CONTEXT c"invalid device context",
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT c"context already current",
    CUDA_ERROR_MAP_FAILED c"mapping of buffer object failed",
    CUDA_ERROR_UNMAP_FAILED c"unmapping of buffer object failed",
    CUDA_ERROR_ALREADY_MAPPED c"resource already mapped",
    CUDA_ERROR_NO_BINARY_FOR_GPU c"no kernel image is available for execution on the device",
    CUDA_ERROR_ALREADY_ACQUIRED c"resource already acquired",
    CUDA_ERROR_NOT_MAPPED c"resource not mapped",
    CUDA_ERROR_ECC_UNCORRECTABLE c"uncorrectable ECC error encountered",
    CUDA_ERROR_UNSUPPORTED_LIMIT c"limit is not supported on this architecture",
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE c"exclusive-thread device already in use by a different thread",
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED c"peer access is not supported between these two devices",
    CUDA_ERROR_INVALID_PTX c"a PTX JIT compilation failed",
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION c"the provided PTX was compiled with an unsupported toolchain.",
    CUDA_ERROR_INVALID_SOURCE c"device kernel image is invalid",
    CUDA_ERROR_FILE_NOT_FOUND c"file not found",
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND c"shared object symbol not found",
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED c"shared object initialization failed",
    CUDA_ERROR_OPERATING_SYSTEM c"OS call failed or operation not supported on this OS",
    CUDA_ERROR_INVALID_HANDLE c"invalid resource handle",
    CUDA_ERROR_ILLEGAL_STATE c"the operation cannot be performed in the present state",
    CUDA_ERROR_NOT_FOUND c"named symbol not found",
    CUDA_ERROR_NOT_READY c"device not ready",
    CUDA_ERROR_ILLEGAL_ADDRESS c"an illegal memory access was encountered",
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES c"too many resources requested for launch",
    CUDA_ERROR_LAUNCH_TIMEOUT c"the launch timed out and was terminated",
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED c"peer access is already enabled",
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED c"peer access has not been enabled",
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE c"cannot set while device is active in this process",
    CUDA_ERROR_CONTEXT_IS_DESTROYED c"context is destroyed",
    CUDA_ERROR_ASSERT c"device-side assert triggered",
    CUDA_ERROR_TOO_MANY_PEERS c"peer mapping resources exhausted",
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED c"part or all of the requested memory range is already mapped",
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED c"pointer does not correspond to a registered memory region",
    CUDA_ERROR_LAUNCH_FAILED c"unspecified launch failure",
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE c"too many blocks in cooperative launch",
    CUDA_ERROR_NOT_PERMITTED c"operation not permitted",
    CUDA_ERROR_NOT_SUPPORTED c"operation not supported",
    CUDA_ERROR_SYSTEM_NOT_READY c"system not yet initialized",
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH c"system has unsupported display driver / cuda driver combination",
    CUDA_ERROR_MPS_CONNECTION_FAILED c"MPS client failed to connect to the MPS control daemon or the MPS server",
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED c"operation not permitted when stream is capturing",
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED c"operation failed due to a previous error during capture",
    CUDA_ERROR_STREAM_CAPTURE_MERGE c"operation would result in a merge of separate capture sequences",
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED c"capture was not ended in the same stream as it began",
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED c"capturing stream has unjoined work",
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION c"dependency created on uncaptured work in another stream",
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT c"operation would make the legacy stream depend on a capturing blocking stream",
    CUDA_ERROR_CAPTURED_EVENT c"operation not permitted on an event last recorded in a capturing stream",
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD c"attempt to terminate a thread-local capture sequence from another thread",
    CUDA_ERROR_TIMEOUT c"wait operation timed out",
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update",
    CUDA_ERROR_UNKNOWN c"unknown error",
}

/// A place in memory, for driver functions which take one by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUmemLocation {
    /// The driver's `CUmemLocationType`: 1 is a device.
    pub kind: c_uint,
    /// A device ordinal or a NUMA node, by `kind`.
    pub id: c_int,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_names_and_texts_of_the_driver() {
        let full = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        assert_eq!((full.0, full.texts()), (2, Some((c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"))));
        assert_eq!(CUresult(12345).texts(), None);
    }
}
