//! The driver API over the simulated device: one file per kind of object, functions named as in the driver.
//!
//! `build.rs` exports every name of the driver's table, and `entry!` gives a name its function. Argument types come from the table. Where a
//! per-thread variant exists one function serves both: a stream arrives as a `StreamArg`, and a call without a stream takes a [`Flavor`]
//! first. Names without a function answer `CUDA_ERROR_NOT_SUPPORTED`.
//!
//! Each file uses only earlier files of this list: `visible`, `values`, `object`, `base`, `calls`; `tasks` (graphs as data), `capture`;
//! `registry` (address ranges), `memory_pool`, `memory`; `stream`, `array`, `xfer`, `vmm`, `stream_ordered`, `module`; `graph`, `context`,
//! `device`, `symbols`.
//!
//! Handles are addresses of objects, each with a magic number at its start. A destroyed object loses its number and is kept for a while, so
//! a stale handle gives an error instead of a crash.
#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // C entry points: their contract is the driver API's
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)] // idem
#![allow(
    non_snake_case,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap
)]

// Every file here uses these.
pub(crate) use std::collections::BTreeMap;
pub(crate) use std::ptr::null_mut;
pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize};
pub(crate) use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

pub(crate) use crate::sim::device_file::{now_ns, sleep_until};
pub(crate) use crate::sim::{MAX_GPUS, MemKind, SimDevice, SimError, Work};
pub(crate) use base::*;
pub(crate) use gshare_cuda_abi::Flavor;
pub(crate) use gshare_cuda_abi::types::*;
pub(crate) use values::VALUES;

/// Gives one or several exported names of the driver their function: `entry!(cuA | cuA_v2, driver, |argument, _, pool: Pool| body)`.
///
/// The arguments follow the table's order (`gshare_cuda_abi`), and have its types. [`Find`] looks up an argument with a type: `pool` is the
/// object behind the handle. A word before the arguments states a requirement and binds its value: `driver` requires `cuInit`, `context` a
/// current context. The body returns an [`Answer`], or nothing on success. A name outside the table and a name with two functions do not
/// compile.
macro_rules! entry {
    ($name:ident | $($more:ident)|+, $($function:tt)*) => {
        entry!($name, $($function)*);
        entry!($($more)|+, $($function)*);
    };
    ($name:ident, $($need:ident,)? || $body:expr) => {
        entry!(@ $name, [$($need)?] () () $body);
    };
    ($name:ident, $($need:ident,)? |$($arg:tt $(: $kind:ident)?),*| $body:expr) => {
        entry!(@ $name, [$($need)?] ($($arg,)*) ($($($arg: $kind,)?)*) $body);
    };
    (@ $name:ident, [$($need:ident)?] $args:tt ($($arg:ident: $kind:ident,)*) $body:expr) => {
        impl symbol::$name {
            pub(in crate::driver) const SERVED: bool = true;

            // Called by its export only.
            #[inline(always)]
            #[allow(clippy::let_unit_value)]
            pub(in crate::driver) unsafe fn call($args: args::$name) -> Answer {
                $(#[allow(unused_variables)] let $need = entry!(@need $need)?;)?
                $(let $arg = Find::<$kind>::find($arg)?;)*
                let outcome = $body;
                Outcome::answer(outcome)
            }
        }
    };
    (@need driver) => { base::driver() };
    (@need context) => { base::current() };
}

/// Writes an exported name as another name with other arguments: `alias!(cuA_v2(argument, pool, _) = cuA(argument, pool))`.
macro_rules! alias {
    ($name:ident($($arg:tt),*) = $other:ident($($value:expr),*)) => {
        entry!($name, |$($arg),*| symbol::$other::call(($($value,)*)));
    };
}

/// Makes a type a kind of object, with the first eight bytes of its objects and the answer to a bad handle.
macro_rules! object {
    ($kind:ident, $magic:literal $(, $bad:ident)?) => {
        impl Kind for $kind {
            const MAGIC: u64 = u64::from_be_bytes(*$magic);
            $(const BAD: CUresult = $bad;)?
        }
    };
}

/// Makes a type a [`Task`](tasks::Task) of a `CUgraphNodeType`: `task!(Fill, 2, |fill, stream| code that queues it)`.
macro_rules! task {
    ($type:ty, $kind:literal, |$task:pat_param, $stream:pat_param| $run:expr) => {
        impl Task for $type {
            fn kind(&self) -> u32 {
                $kind
            }

            fn run(&self, $stream: Ref<Stream>) -> Answer {
                let $task = self;
                $run
            }
        }
    };
}

mod array;
pub(crate) mod base;
mod calls;
mod capture;
mod device;
mod device_memory;
mod graph;
mod memory_pool;
mod module;
mod object;
pub(crate) mod primary_context;
mod registry;
mod spans;
mod stream;
mod stream_ordered;
mod symbols;
mod tasks;
mod values;
pub(crate) mod visible;
mod vmm;
mod xfer;

/// Address of an exported function.
#[derive(Clone, Copy)]
pub(crate) struct Pointer(pub(crate) *const ());

// SAFETY: the address of a function.
unsafe impl Sync for Pointer {}

/// The result of a call, or the driver's error, which `?` returns.
pub(crate) type Res<T> = Result<T, CUresult>;
pub(crate) type Answer = Res<()>;

/// A stream as an argument: the default stream behind a null handle, and the handle.
#[derive(Clone, Copy)]
pub(crate) struct StreamArg(pub(crate) Flavor, pub(crate) sys::CUstream);

impl StreamArg {
    /// The default stream, for a call without a stream argument.
    pub(crate) fn default_of(flavor: Flavor) -> Self {
        Self(flavor, null_mut())
    }
}

/// Lets a body of [`entry!`] end without a value on success.
trait Outcome {
    fn answer(self) -> Answer;
}

impl Outcome for () {
    #[inline(always)]
    fn answer(self) -> Answer {
        Ok(())
    }
}

impl Outcome for Answer {
    #[inline(always)]
    fn answer(self) -> Answer {
        self
    }
}

/// The answer of a name without an `entry!`: a type's own constant and function would hide these of the trait.
trait Unserved {
    const SERVED: bool = false;

    unsafe fn call<A>(_: A) -> Answer {
        Err(NOT_SUPPORTED)
    }
}

impl<T> Unserved for T {}

/// Turns a panic into an error, since no panic may cross into C.
#[inline]
pub(crate) fn caught<E>(panicked: E, f: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(Err(panicked))
}

/// The result for a C caller.
#[inline]
fn code(answer: Answer) -> CUresult {
    answer.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Turns an answer into a result, and a panic into `CUDA_ERROR_UNKNOWN`.
#[inline]
pub(crate) fn guard(f: impl FnOnce() -> Answer) -> CUresult {
    code(caught(CUresult::CUDA_ERROR_UNKNOWN, f))
}

/// Whether an exported name has a function of its own, instead of the answer "not supported".
pub fn is_served(exported: &str) -> bool {
    gshare_cuda_abi::by_name(exported).is_some_and(|symbol| exports::SERVED[symbol.index])
}

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    unused_imports,
    unused_variables,
    unreachable_pub,
    clippy::unnecessary_cast
)]
pub(crate) mod exports {
    use super::*;
    use crate::call_trace::{Value, address, number};
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
pub(crate) use exports::POINTERS;
use exports::{args, symbol};
