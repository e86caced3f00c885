//! The C functions that programs see in place of the driver's.
//!
//! A wrapper does its part and calls the real function of *the same variant*, with the caller's arguments, in the
//! caller's thread; result and order are the driver's own. [`wrapper`] tells which variants have one; the table of the
//! driver's symbols is walked at compile time, so a wrapper with a wrong signature does not compile.
//!
//! # Waived
//!
//! These functions of class launch and alloc are not wrapped, for these reasons:
//!
//! | function | why |
//! |---|---|
//! | `cuLaunchHostFunc`, `cuStreamAddCallback` | they run on the host and take no GPU time |
//! | `cuMemAllocHost`, `cuMemHostAlloc`, `cuMemHostRegister` | host memory is not the device's |

use core::ffi::c_void;

use gshare_cuda_abi::{SYMBOLS, index};

mod array;
mod context;
mod launch;
mod memory;
pub(crate) mod nvml;

/// Defines wrappers: `real` is the driver's function of the same name.
macro_rules! wrappers {
    ($table:ident: $($name:ident($($arg:ident: $type:ty),* $(,)?) |$real:ident| $body:block)*) => {
        $(
            /// Wraps the driver's function of this name.
            ///
            /// # Safety
            /// As for the driver's function.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> gshare_cuda_abi::types::CUresult {
                let Some($real) = $crate::sys::driver::real!($name) else {
                    return gshare_cuda_abi::types::CUresult::CUDA_ERROR_NOT_INITIALIZED;
                };
                $body
            }
            const _: gshare_cuda_abi::signature::$name = $name;
        )*
        /// The wrappers of this file, by index into the table.
        pub(super) const $table: &[(usize, *const core::ffi::c_void)] =
            &[$((gshare_cuda_abi::index::$name, $name as *const core::ffi::c_void)),*];
    };
}
use wrappers;

/// Wrappers by index into the table; null for none.
struct Wrappers([*const c_void; SYMBOLS.len()]);

// SAFETY: addresses of functions.
#[allow(unsafe_code)]
unsafe impl Sync for Wrappers {}

static WRAPPERS: Wrappers = Wrappers({
    let mut all = [core::ptr::null(); SYMBOLS.len()];
    let lists = [launch::LAUNCHES, launch::COPIES, memory::MEMORY, array::ARRAYS, context::CONTEXTS];
    let mut list = 0;
    while list < lists.len() {
        let mut row = 0;
        while row < lists[list].len() {
            all[lists[list][row].0] = lists[list][row].1;
            row += 1;
        }
        list += 1;
    }
    all[index::cuGetProcAddress] = crate::sys::resolve::cuGetProcAddress as *const c_void;
    all[index::cuGetProcAddress_v2] = crate::sys::resolve::cuGetProcAddress_v2 as *const c_void;
    all
});

/// The wrapper of this variant, if it has one.
pub(crate) fn wrapper(index: usize) -> Option<*mut c_void> {
    Some(WRAPPERS.0[index].cast_mut()).filter(|pointer| !pointer.is_null())
}
