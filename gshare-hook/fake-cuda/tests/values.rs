//! Kernels without values in a program that asks for values.
#![allow(unsafe_code, clippy::macro_metavars_in_unsafe)] // a C client, and a host function called by the driver

mod common;

use common::*;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

const ASKED: (&str, &str) = ("GSHARE_SIM_COMPUTE", "1");

/// Calls a function of `gshare_sim`'s.
fn ask<A>(name: &str, argument: A) -> c_int {
    // SAFETY: both functions take at most one pointer, and the C calling convention allows one too many.
    unsafe {
        let function: unsafe extern "C" fn(A) -> c_int = std::mem::transmute(symbol(name));
        function(argument)
    }
}

/// Says that the process makes values, and that this program stands for the runtime library where `here`.
fn compute(here: bool) {
    let runtime = if here { compute as *const c_void } else { null() };
    assert_eq!(ask("gshare_sim_compute", runtime), 0);
}

fn state(stream: sys::CUstream) -> c_int {
    ask("gshare_sim_compute_state", stream)
}

/// The kernel of an operator.
fn operator(name: &CStr) -> sys::CUfunction {
    let mut kernel = null_mut();
    // SAFETY: the function has this signature.
    let function: unsafe extern "C" fn(*mut sys::CUfunction, *const c_char) -> c_int =
        unsafe { std::mem::transmute(symbol("gshare_sim_kernel")) };
    // SAFETY: a place, and a string.
    assert_eq!(unsafe { function(&raw mut kernel, name.as_ptr()) }, 0);
    kernel
}

/// Runs a test of this program in a process of its own and gives its standard error.
fn said(test: &str, env: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let done = command(dir.path(), test, env).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{said}");
    said
}

/// Copies four bytes to the host.
fn read() -> CUresult {
    let memory: CUdeviceptr = get!(cuMemAlloc_v2(4));
    let mut bytes = [0_u8; 4];
    let copied = cu!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), memory, 4));
    ok!(cuMemFree_v2(memory));
    copied
}

#[test]
fn a_program_that_reads_after_a_kernel_without_values_is_told_its_name_once() {
    let test = "a_program_that_reads_after_a_kernel_without_values_is_told_its_name_once";
    if std::env::var("SIM_TEST").is_ok() {
        start();
        for name in ["spin_1us", "theirs", "another"] {
            assert_eq!(launch(kernel(name), null_mut()), OK);
            assert_eq!((read(), read()), (OK, OK));
        }
        return;
    }
    let told = said(test, &[ASKED]);
    assert_eq!(told.matches("warning: ").count(), 1, "{told}");
    assert!(told.contains("kernel `theirs`"), "{told}");
    assert!(!said(test, &[]).contains("warning: "), "nobody asked for values");
}

#[test]
fn a_process_that_makes_its_values_can_start_no_kernel_without() {
    let test = "a_process_that_makes_its_values_can_start_no_kernel_without";
    if std::env::var("SIM_TEST").is_ok() {
        start();
        compute(false);
        for f in [
            operator(c"aten_mm"),
            operator(c"nccl_allreduce"),
            kernel("_ZN2at4cuda12spin_kernelEl"),
            kernel("spin_5us"),
        ] {
            assert_eq!(launch(f, null_mut()), OK);
        }
        // The names of a program's own kernels mean nothing.
        for name in ["theirs", "aten_mm", "nccl_allreduce", "zero", "zero_fill", "use_flags", "spin_lock"] {
            compute(false);
            assert_eq!(launch(kernel(name), null_mut()), CUresult::CUDA_ERROR_NOT_SUPPORTED, "{name}");
            // A library may not look at that error.
            assert_eq!((read(), state(null_mut())), (CUresult::CUDA_ERROR_NOT_SUPPORTED, 3), "{name}");
        }
        compute(false);
        assert_eq!((read(), state(null_mut())), (OK, 0));
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        ok!(cuStreamBeginCapture_v2(stream, 0));
        assert_eq!(launch(kernel("captured"), stream), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        return;
    }
    let told = said(test, &[ASKED]);
    assert!(told.contains("kernel `theirs` refused") && told.contains("kernel `captured` refused"), "{told}");
}

#[test]
fn a_kernel_is_refused_by_name_ahead_of_the_processs_first_operator() {
    isolated("a_kernel_is_refused_by_name_ahead_of_the_processs_first_operator", &[ASKED], || {
        compute(false);
        start();
        assert_eq!(launch(kernel("theirs"), null_mut()), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        let mut name = [0_u8; 64];
        // SAFETY: the function has this signature.
        let refused: unsafe extern "C" fn(*mut u8, usize) -> usize =
            unsafe { std::mem::transmute(symbol("gshare_sim_compute_refused")) };
        // SAFETY: as many bytes, and fewer.
        let lens = unsafe { (refused(name.as_mut_ptr(), 64), refused(name.as_mut_ptr(), 2)) };
        assert_eq!((&name[..6], lens), (b"theirs".as_slice(), (6, 2)));
    });
}

#[test]
fn a_kernel_from_before_the_process_made_its_values_is_told_at_the_next_copy() {
    let test = "a_kernel_from_before_the_process_made_its_values_is_told_at_the_next_copy";
    if std::env::var("SIM_TEST").is_ok() {
        start();
        assert_eq!(launch(kernel("theirs"), null_mut()), OK);
        compute(false);
        assert_eq!((read(), read()), (OK, OK));
        assert_eq!(launch(kernel("theirs"), null_mut()), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        return;
    }
    let told = said(test, &[ASKED]);
    assert_eq!(told.matches("warning: ").count(), 1, "{told}");
    assert!(told.contains("after kernel `theirs`"), "{told}");
}

/// Elsewhere the last error says nothing.
#[test]
fn a_threads_last_error_tells_of_the_refusals_that_the_runtime_library_had_on_it() {
    isolated(
        "a_threads_last_error_tells_of_the_refusals_that_the_runtime_library_had_on_it",
        &[ASKED],
        || {
            let context = start() as usize;
            let theirs = kernel("theirs") as usize;
            let refused = || {
                assert_eq!(launch(theirs as sys::CUfunction, null_mut()), CUresult::CUDA_ERROR_NOT_SUPPORTED);
            };
            let elsewhere = |act: &(dyn Fn() + Sync)| {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        ok!(cuCtxSetCurrent(context as sys::CUcontext));
                        act();
                    });
                });
            };
            compute(true);
            refused();
            assert_eq!(state(null_mut()), 4);
            elsewhere(&|| assert_eq!(state(null_mut()), 3));
            elsewhere(&refused);
            assert_eq!(state(null_mut()), 3, "of two threads");
            // A copy tells the thread that makes it.
            assert_eq!((read(), state(null_mut())), (CUresult::CUDA_ERROR_NOT_SUPPORTED, 4));
            compute(true);
            elsewhere(&refused);
            assert_eq!(state(null_mut()), 3);
        },
    );
}

#[test]
fn after_an_operator_of_a_graph_has_failed_no_copy_succeeds() {
    extern "C" fn fails(_: *mut c_void) {
        ask("gshare_sim_compute_failed", ());
    }
    isolated("after_an_operator_of_a_graph_has_failed_no_copy_succeeds", &[ASKED], || {
        start();
        compute(false);
        let memory: CUdeviceptr = get!(cuMemAlloc_v2(4));
        let mut bytes = [0_u8; 4];
        let to = bytes.as_mut_ptr().cast::<c_void>();
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        ok!(cuLaunchHostFunc(stream, Some(fails), null_mut()));
        // Queued before the failure, or after it.
        let queued = cu!(cuMemcpyDtoHAsync_v2(to, memory, 4, stream));
        assert!(matches!(queued, OK | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), "{queued:?}");
        assert_eq!(cu!(cuStreamSynchronize(stream)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(cu!(cuMemcpyDtoH_v2(to, memory, 4)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn an_operator_waits_where_a_host_function_may_still_change_its_bytes() {
    static GO: AtomicBool = AtomicBool::new(false);
    extern "C" fn waits(_: *mut c_void) {
        while !GO.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    }
    isolated("an_operator_waits_where_a_host_function_may_still_change_its_bytes", &[ASKED], || {
        assert_eq!(state(null_mut()), -1, "no driver");
        start();
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        assert_eq!(launch(kernel("spin_10ms"), stream), OK);
        assert_eq!(state(stream), 0, "a kernel changes no bytes");
        ok!(cuLaunchHostFunc(stream, Some(waits), null_mut()));
        assert_eq!(state(stream), 1);
        GO.store(true, Ordering::Release);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(state(stream), 0);
        ok!(cuStreamBeginCapture_v2(stream, 0));
        assert_eq!(state(stream), 2);
    });
}

/// The program writes to its memory without the driver, which gives it back to the host all the same.
#[test]
fn memory_written_by_the_program_leaves_the_host_when_it_is_freed() {
    isolated("memory_written_by_the_program_leaves_the_host_when_it_is_freed", &[ASKED], || {
        const BYTES: usize = 32 << 20;
        start();
        compute(false);
        let memory: CUdeviceptr = get!(cuMemAlloc_v2(BYTES));
        // SAFETY: device memory is this process's at the same address.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory as *mut u8, BYTES) };
        bytes.fill(7);
        ok!(cuMemFree_v2(memory));
        let again: CUdeviceptr = get!(cuMemAlloc_v2(BYTES));
        assert_eq!(again, memory, "the same addresses");
        // SAFETY: as above.
        assert_eq!(unsafe { (again as *const u8).read() }, 0, "new pages");
    });
}
