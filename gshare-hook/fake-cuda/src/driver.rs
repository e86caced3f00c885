//! The driver API over the simulated device: one file per kind of object, functions named as in the driver.
//!
//! `build.rs` exports every name of the driver's table. A function here named `cuX` is what the export `cuX` runs; where
//! a per-thread variant exists the function takes a [`Flavor`] first and serves both. Names without a function
//! answer `CUDA_ERROR_NOT_SUPPORTED`.
//!
//! Handles are addresses of objects that begin with a magic number. A destroyed object loses its number and is kept for a
//! while, so that a stale handle is an error and not a crash.
#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // C entry points: their contract is the driver API's
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)] // idem
#![allow(
    non_snake_case,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap
)]

pub(crate) use gshare_cuda_abi::Flavor;
pub(crate) use gshare_cuda_abi::types::*;

mod array;
pub(crate) mod base;
mod calls;
pub(crate) mod context;
pub(crate) mod device;
mod graph;
mod memory;
mod module;
mod stream;
mod stream_ordered;
mod symbols;
mod vmm;
mod xfer;

/// The functions by name.
mod imp {
    pub(super) use super::array::*;
    pub(super) use super::context::*;
    pub(super) use super::device::*;
    pub(super) use super::graph::*;
    pub(super) use super::memory::*;
    pub(super) use super::module::*;
    pub(super) use super::stream::*;
    pub(super) use super::stream_ordered::*;
    pub(super) use super::symbols::*;
    pub(super) use super::vmm::*;
    pub(super) use super::xfer::*;
}

/// Address of an exported function.
#[derive(Clone, Copy)]
pub(crate) struct Pointer(pub(crate) *const ());

// SAFETY: the address of a function.
unsafe impl Sync for Pointer {}

/// The answer of a function: `?` leaves with the driver's error.
pub(crate) type Answer = Result<(), CUresult>;

/// Turns an answer into a result, and a panic into `CUDA_ERROR_UNKNOWN`: none crosses into C.
#[inline]
pub(crate) fn guard(f: impl FnOnce() -> Answer) -> CUresult {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)) {
        Ok(Ok(())) => CUresult::CUDA_SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => CUresult::CUDA_ERROR_UNKNOWN,
    }
}

#[allow(
    missing_docs,
    non_snake_case,
    unused_imports,
    unused_variables,
    unreachable_pub,
    clippy::unnecessary_cast
)]
pub(crate) mod exports {
    use super::*;
    use crate::call_trace::Value;
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
pub use exports::IMPLEMENTED;
pub(crate) use exports::POINTERS;
pub(crate) use symbols::error_name;
