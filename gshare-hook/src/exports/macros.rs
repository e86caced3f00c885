//! The macro for defining wrappers.

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
pub(crate) use wrappers;
