//! `TOOLS_MODULE`: the functions of a module.
//!
//! Facts: projects that print the tables name it by its functions and slots up to 55; a public driver proxy serves slot 7,
//! which calls a function of the caller for each function of a module and answers 1. Observed: cuFFT 12 calls slot 7 with a
//! context, a module that it has just loaded, a function and an argument for it; it keeps the function that it is called
//! with, and takes the answer 0 for a failure.

use std::ffi::{c_int, c_uint, c_void};

use super::{Table, context_of, sized};
use crate::driver::{CUresult, Pointer, exports, sys};

pub(super) const TABLE: Table = Table {
    id: [0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e],
    name: "TOOLS_MODULE",
    words: &WORDS,
};

static WORDS: [Pointer; 56] = sized::<7, 56>(&[(7, for_each_function as *const ())]);

/// A callback that gets the caller's argument, a function and its module.
type Visit = unsafe extern "C" fn(*mut c_void, sys::CUfunction, sys::CUmodule);

/// Answers 1 where each function was visited, else 0.
unsafe extern "C" fn for_each_function(
    context: sys::CUcontext,
    module: sys::CUmodule,
    visit: Option<Visit>,
    argument: *mut c_void,
) -> c_int {
    let functions = std::panic::catch_unwind(|| {
        context_of(context)?;
        // SAFETY: a handle of the caller, checked by its magic number.
        unsafe { functions_of(module) }
    });
    let (Ok(Ok(functions)), Some(visit)) = (functions, visit) else { return 0 };
    for function in functions {
        // SAFETY: the caller's function, called as it expects.
        unsafe { visit(argument, function, module) };
    }
    1
}

unsafe fn functions_of(module: sys::CUmodule) -> Result<Vec<sys::CUfunction>, CUresult> {
    let ok = |code: CUresult| if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) };
    let mut count: c_uint = 0;
    // SAFETY: the caller's handle; the list has room for as many functions as are asked for.
    unsafe {
        ok(exports::cuModuleGetFunctionCount(&raw mut count, module))?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        ok(exports::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module))?;
        Ok(functions)
    }
}
