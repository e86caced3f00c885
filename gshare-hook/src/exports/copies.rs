//! Copies and sets of memory, which take GPU time like launches.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, sys};
use gshare_meter::run::Call;

use crate::exports::launch::launch_as;
use crate::launch::streams::stream_of;

/// The size of a copy: bytes or elements, or operations where these are unknown.
#[derive(Clone, Copy, Debug)]
struct Size {
    all: u64,
    /// The sizes of a batch's operations.
    each: *const usize,
}

/// An argument of a copy, under its name in the driver's declaration.
trait Argument: Copy {
    /// The copy's stream, if this argument is a stream.
    fn stream(self) -> Option<sys::CUstream> {
        None
    }
    /// The size, as far as it is known with this argument.
    fn size(self, _name: &str, so_far: Size) -> Size {
        so_far
    }
}

impl Argument for sys::CUstream {
    fn stream(self) -> Option<sys::CUstream> {
        Some(self)
    }
}

impl Argument for usize {
    #[inline(always)]
    fn size(self, name: &str, so_far: Size) -> Size {
        let all = match name {
            // The descriptions of a batch's operations are fewer than the operations.
            "numAttrs" | "numPrefetchLocs" => so_far.all,
            // The height follows the width.
            "Height" => so_far.all.wrapping_mul(self as u64),
            "count" if !so_far.each.is_null() => {
                // SAFETY: the caller's own list of this length.
                let each = unsafe { core::slice::from_raw_parts(so_far.each, self) };
                each.iter().fold(0u64, |sum, &size| sum.wrapping_add(size as u64))
            }
            _ => self as u64,
        };
        Size { all, ..so_far }
    }
}

impl Argument for *mut usize {
    #[inline(always)]
    fn size(self, name: &str, so_far: Size) -> Size {
        if name == "sizes" { Size { each: self, ..so_far } } else { so_far }
    }
}

impl Argument for *const sys::CUDA_MEMCPY2D {
    fn size(self, _name: &str, so_far: Size) -> Size {
        // SAFETY: null or the caller's own; only integers are read.
        let Some(c) = (unsafe { self.as_ref() }) else { return so_far };
        Size { all: (c.WidthInBytes as u64).wrapping_mul(c.Height as u64), ..so_far }
    }
}

impl Argument for *const sys::CUDA_MEMCPY3D {
    fn size(self, _name: &str, so_far: Size) -> Size {
        // SAFETY: null or the caller's own; only integers are read.
        let Some(c) = (unsafe { self.as_ref() }) else { return so_far };
        let all = (c.WidthInBytes as u64).wrapping_mul(c.Height as u64).wrapping_mul(c.Depth as u64);
        Size { all, ..so_far }
    }
}

impl Argument for *const sys::CUDA_MEMCPY3D_PEER {
    fn size(self, _name: &str, so_far: Size) -> Size {
        // SAFETY: null or the caller's own; only integers are read.
        let Some(c) = (unsafe { self.as_ref() }) else { return so_far };
        let all = (c.WidthInBytes as u64).wrapping_mul(c.Height as u64).wrapping_mul(c.Depth as u64);
        Size { all, ..so_far }
    }
}

macro_rules! silent {
    ($($type:ty),* $(,)?) => { $(impl Argument for $type {})* };
}
silent!(
    c_uint,
    c_ulonglong,
    c_uchar,
    c_ushort,
    CUdevice,
    CUmemLocation,
    *const c_void,
    *mut c_void,
    *mut CUdeviceptr,
    *mut CUmemLocation,
    sys::CUarray,
    sys::CUcontext,
    *mut sys::CUDA_MEMCPY3D_BATCH_OP,
    *mut sys::CUmemcpyAttributes,
    *mut sys::CUmemDecompressParams,
);

/// Gives every function of class copy the same wrapper. The cost is learned per function and size.
macro_rules! copies {
    ($({ $index:literal $name:ident $base:literal $introduced:literal $flavor:ident $class:ident $args:tt })*) => {
        $(copy!($class $flavor $index $name $args);)*
        /// The wrappers of all copies, by index into the table, where the other rows repeat the first.
        pub(super) const COPIES: &[(usize, *const c_void)] = &copies_only([$(copy_address!($class $index $name)),*]);
    };
}

macro_rules! copy {
    (Copy $flavor:ident $index:literal $name:ident ($($arg:ident: $type:ty),*)) => {
        /// Wraps the driver's function of this name.
        ///
        /// # Safety
        /// As for the driver's function.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> CUresult {
            let Some(real) = crate::sys::driver::real!($name) else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
            let (mut size, mut stream) = (Size { all: 0, each: core::ptr::null() }, None);
            $(
                size = Argument::size($arg, stringify!($arg), size);
                stream = Argument::stream($arg).or(stream);
            )*
            // A call without a stream may itself wait for the work.
            let kind = match stream {
                None => Call::Blocking,
                Some(_) if is_within_devices(stringify!($name)) => Call::Launch,
                Some(_) => Call::Copy,
            };
            let stream = stream_of(stream.unwrap_or(core::ptr::null_mut()), per_thread!($flavor));
            // SAFETY: the caller's own arguments.
            launch_as($index, size.all, stream, kind, move || unsafe { real($($arg),*) })
        }
    };
    ($($other:tt)*) => {};
}

/// Whether a function of this name works on memory of devices alone. Other functions may touch memory of the host in the call.
#[inline(always)]
fn is_within_devices(name: &str) -> bool {
    ["cuMemset", "cuMemcpyDtoD", "cuMemcpyPeer", "cuMemcpy3DPeer"].iter().any(|start| name.starts_with(start))
}

macro_rules! per_thread {
    (PerThread) => {
        true
    };
    (Legacy) => {
        false
    };
}

macro_rules! copy_address {
    (Copy $index:literal $name:ident) => {
        Some(($index, $name as *const c_void))
    };
    ($class:ident $index:literal $name:ident) => {
        None
    };
}

const COPY_COUNT: usize = {
    let (mut row, mut count) = (0, 0);
    while row < gshare_cuda_abi::SYMBOLS.len() {
        if matches!(gshare_cuda_abi::SYMBOLS[row].class, gshare_cuda_abi::Class::Copy) {
            count += 1;
        }
        row += 1;
    }
    count
};

const fn copies_only<const N: usize>(
    rows: [Option<(usize, *const c_void)>; N],
) -> [(usize, *const c_void); COPY_COUNT] {
    let mut copies = [(0, core::ptr::null()); COPY_COUNT];
    let (mut row, mut count) = (0, 0);
    while row < N {
        if let Some(copy) = rows[row] {
            copies[count] = copy;
            count += 1;
        }
        row += 1;
    }
    copies
}

gshare_cuda_abi::cuda_symbols!(copies);
