//! The program's calls under the guard, in a process that can be parked: see [`guard`](crate::launch::guard).
//!
//! The wrappers of launches look at the guard by themselves, since a launch has too many arguments to pass on once more. In front of
//! each of the driver's copies stands a function that does so, also for calls by other wrappers.
#![allow(unsafe_code)] // calls to the driver

use core::ffi::c_void;
use core::sync::atomic::{Ordering, compiler_fence};

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, sys};

use crate::launch::control::CONTROL;
use crate::launch::line::wait_for_return;
use crate::launch::segments::drop_segments;
use crate::launch::thread_record::{ThreadRecord, own_record};
use crate::sys::driver;

/// A call under the guard, until it is dropped.
#[derive(Debug)]
pub(crate) struct Inside(Option<&'static ThreadRecord>);

impl Drop for Inside {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(thread) = self.0 {
            thread.end_call();
        }
    }
}

/// Waits until calls go through, or returns `None` if they fail for now.
#[inline(always)]
fn enter() -> Option<Inside> {
    let Some(thread) = own_record() else { return enter_first() };
    thread.begin_call();
    compiler_fence(Ordering::SeqCst);
    if CONTROL.guard.is_open() { Some(Inside(Some(thread))) } else { wait(thread) }
}

/// Enters with a thread that has no record yet.
#[cold]
fn enter_first() -> Option<Inside> {
    // In a forked child nothing is guarded, and the driver fails the call by itself.
    let Some(metering) = CONTROL.metering() else { return Some(Inside(None)) };
    metering.threads.enlist()?;
    enter()
}

#[cold]
fn wait(thread: &'static ThreadRecord) -> Option<Inside> {
    thread.end_call();
    let metering = CONTROL.metering()?;
    // The wait is not the device's work.
    drop_segments(thread);
    CONTROL.guard.misses(true);
    metering.bell.ring();
    let is_closed = || {
        thread.begin_call();
        compiler_fence(Ordering::SeqCst);
        let closed = !CONTROL.guard.is_open();
        if closed {
            thread.end_call();
        }
        closed
    };
    let passes = wait_for_return(metering, is_closed);
    CONTROL.guard.misses(false);
    passes.then_some(Inside(Some(thread)))
}

/// Makes a call that touches device memory.
#[inline(always)]
pub(crate) fn inside(call: impl FnOnce() -> CUresult) -> CUresult {
    let entered = if CONTROL.guard.is_there() { enter() } else { Some(Inside(None)) };
    match entered {
        Some(_inside) => call(),
        None => CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
    }
}

/// Puts the guard in front of the driver's copies; `false` where the kernel has no barrier for threads.
pub(crate) fn install() -> bool {
    let begun = CONTROL.guard.begin();
    if begun {
        guarded(|index, function| driver::put_in_front(index, function.cast_mut()));
    }
    begun
}

/// A function in front of each copy, and a list of them.
macro_rules! guards {
    ($({ $index:literal $name:ident $base:literal $introduced:literal $flavor:ident $class:ident $args:tt })*) => {
        mod in_front {
            use super::*;
            use core::ffi::{c_uchar, c_uint, c_ulonglong, c_ushort};
            $(guard!($class $index $name $args);)*
        }

        fn guarded(mut each: impl FnMut(usize, *const c_void)) {
            $(guard_address!($class $index $name each);)*
        }
    };
}

macro_rules! guard {
    (Copy $index:literal $name:ident ($($arg:ident: $type:ty),*)) => {
        #[allow(non_snake_case)]
        pub(super) unsafe extern "C" fn $name($($arg: $type),*) -> CUresult {
            let Some(real) = driver::beneath!($name) else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
            let Some(_inside) = enter() else { return CUresult::CUDA_ERROR_SYSTEM_NOT_READY };
            // SAFETY: the caller's own arguments.
            unsafe { real($($arg),*) }
        }
    };
    ($($other:tt)*) => {};
}

macro_rules! guard_address {
    (Copy $index:literal $name:ident $each:ident) => {
        $each($index, in_front::$name as *const c_void)
    };
    ($($other:tt)*) => {};
}

gshare_cuda_abi::cuda_symbols!(guards);
