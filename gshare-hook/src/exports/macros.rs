//! The macro for defining wrappers.

/// Defines wrappers, of which `call` calls the driver's function of the same name with the caller's arguments. Arguments named as in
/// `call(argument)` are given by the wrapper instead. Functions with the same arguments and the same body stand in one list.
/// `per_thread` is true in a function's variant for the thread's own default stream, `_ptsz`:
///
/// ```text
/// cuX, cuX_ptsz(stream: sys::CUstream, bytes: usize) |call, per_thread| { ... call() ... }
/// ```
macro_rules! wrappers {
    ($table:ident: $(
        $($name:ident),+ ($($args:tt)*) |$call:ident $(($($given:ident),+))? $(, $per_thread:ident)?| $body:block
    )*) => {
        $($crate::exports::macros::wrapper! {
            [$($name)+] ($($args)*) $call [$($($given),+)?] [$($per_thread)?] $body
        })*
        /// The wrappers of this file, by index into the table.
        pub(super) const $table: &[(usize, *const core::ffi::c_void)] =
            &[$($((gshare_cuda_abi::index::$name, $name as *const core::ffi::c_void)),+),*];
    };
}
pub(crate) use wrappers;

/// Defines the wrappers of one list of names.
macro_rules! wrapper {
    ([] $($rest:tt)*) => {};
    ([$name:ident $($more:ident)*] ($($arg:ident: $type:ty),* $(,)?) $call:ident [$($given:ident),*]
        [$($per_thread:ident)?] $body:block) => {
        /// Wraps the driver's function of this name.
        ///
        /// # Safety
        /// As for the driver's function.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> gshare_cuda_abi::types::CUresult {
            let Some(real) = $crate::sys::driver::real!($name) else {
                return gshare_cuda_abi::types::CUresult::CUDA_ERROR_NOT_INITIALIZED;
            };
            $(let $per_thread = matches!(stringify!($name).as_bytes(), [.., b'_', b'p', b't', b's', b'z']);)?
            // SAFETY: the caller's own arguments, or valid ones in their place.
            let $call = move |$($given),*| unsafe { real($($arg),*) };
            $body
        }
        const _: gshare_cuda_abi::signature::$name = $name;
        $crate::exports::macros::wrapper! {
            [$($more)*] ($($arg: $type),*) $call [$($given),*] [$($per_thread)?] $body
        }
    };
}
pub(crate) use wrapper;
