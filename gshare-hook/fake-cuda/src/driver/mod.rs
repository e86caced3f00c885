//! The driver API over the simulated device: one file per kind of object, functions named as in the driver.
//!
//! `build.rs` exports every name of the driver's table, and `entry!` gives a name its function: names and arguments, without
//! their types, which are the table's. Where a per-thread variant exists one function serves both: a stream comes as a `StreamArg`, and
//! a call without a stream takes a [`Flavor`] first.
//! Names without a function answer `CUDA_ERROR_NOT_SUPPORTED`.
//!
//! Each file uses only those before it of: `visible`, `base`, `calls`; `tasks` (graphs as data), `capture`; `registry` (address
//! ranges), `memory_pool`, `memory`; `stream`, `array`, `xfer`, `vmm`, `stream_ordered`, `module`; `graph`, `context`, `device`,
//! `symbols`.
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

// Every file here uses these.
pub(crate) use std::collections::BTreeMap;
pub(crate) use std::ptr::null_mut;
pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

pub(crate) use crate::sim::device_file::{now_ns, sleep_until};
pub(crate) use crate::sim::{MAX_GPUS, MemKind, SimDevice, SimError, Work};
pub(crate) use base::*;
pub(crate) use gshare_cuda_abi::Flavor;
pub(crate) use gshare_cuda_abi::types::*;

/// Writes what one or several exported names of the driver do: `entry!(cuA | cuA_v2, driver, |argument, _, pool: Pool| body)`.
///
/// The arguments stand in the table's order (`gshare_cuda_abi`), and have its types. One with a type is looked up first, as [`Find`]
/// says: `pool` is the object behind the handle. A word before them says what the call needs before that, and binds it: `driver` that
/// `cuInit` was called, `context` a current context. The body is that of a function that gives an [`Answer`], or nothing where it
/// succeeds.
/// A name outside the table and a name with two functions do not compile.
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

            // The export is all that calls it.
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

/// Writes an exported name that is another one with other arguments: `alias!(cuA_v2(argument, pool, _) = cuA(argument, pool))`.
macro_rules! alias {
    ($name:ident($($arg:tt),*) = $other:ident($($value:expr),*)) => {
        entry!($name, |$($arg),*| symbol::$other::call(($($value,)*)));
    };
}

/// Makes a type a kind of object, with the eight bytes that its objects begin with and the answer of a call with a bad handle.
macro_rules! object {
    ($kind:ident, $magic:literal $(, $bad:ident)?) => {
        impl Kind for $kind {
            const MAGIC: u64 = u64::from_be_bytes(*$magic);
            $(const BAD: CUresult = $bad;)?
        }
    };
}

/// Makes a type a [`Task`](tasks::Task) of a `CUgraphNodeType`: `task!(Fill, 2, |fill, stream| what queues it)`.
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
pub(crate) mod primary_context;
mod registry;
mod spans;
mod stream;
mod stream_ordered;
mod symbols;
mod tasks;
pub(crate) mod visible;
mod vmm;
mod xfer;

/// Address of an exported function.
#[derive(Clone, Copy)]
pub(crate) struct Pointer(pub(crate) *const ());

// SAFETY: the address of a function.
unsafe impl Sync for Pointer {}

/// The result of a call, or the driver's error, with which `?` leaves.
pub(crate) type Res<T> = Result<T, CUresult>;
pub(crate) type Answer = Res<()>;

/// A stream as an argument names it: the default stream that a null handle stands for, and the handle.
#[derive(Clone, Copy)]
pub(crate) struct StreamArg(pub(crate) Flavor, pub(crate) sys::CUstream);

impl StreamArg {
    /// The default stream of a call that names none.
    pub(crate) fn default_of(flavor: Flavor) -> Self {
        Self(flavor, null_mut())
    }
}

/// How a body of [`entry!`] ends: without a value it has succeeded.
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

/// The answer of a name without an `entry!`, which would come first: a type's own constant and function hide a trait's.
trait Unserved {
    const SERVED: bool = false;

    unsafe fn call<A>(_: A) -> Answer {
        Err(NOT_SUPPORTED)
    }
}

impl<T> Unserved for T {}

/// Turns a panic into an error: none crosses into C.
#[inline]
pub(crate) fn caught<E>(panicked: E, f: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(Err(panicked))
}

/// The result that C callers get.
#[inline]
fn code(answer: Answer) -> CUresult {
    answer.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Turns an answer into a result, and a panic into `CUDA_ERROR_UNKNOWN`.
#[inline]
pub(crate) fn guard(f: impl FnOnce() -> Answer) -> CUresult {
    code(caught(CUresult::CUDA_ERROR_UNKNOWN, f))
}

/// Tells if an exported name does more than answer "not supported".
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
