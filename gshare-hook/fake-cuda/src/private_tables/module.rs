//! `TOOLS_MODULE`: the functions of a module.
//!
//! Facts: projects which print the tables name it by its functions and slots up to 55; a public driver proxy serves slot 7, which calls a
//! function of the caller for each function of a module and answers 1. Observed: cuFFT 12 calls slot 7 with a context, a freshly loaded
//! module, a function and an argument for it. It keeps each function of the module passed to its callback, and takes the answer 0 for a
//! failure.

use std::ffi::{c_int, c_uint, c_void};

use super::*;

table!(7 "TOOLS_MODULE"
    [0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e],
    56 words, 7 for_each_function);

type Visit = unsafe extern "C" fn(*mut c_void, sys::CUfunction, sys::CUmodule);

/// Answers 1 if each function was visited, else 0.
unsafe extern "C" fn for_each_function(
    context: sys::CUcontext,
    module: sys::CUmodule,
    visit: Option<Visit>,
    argument: *mut c_void,
) -> c_int {
    let functions = std::panic::catch_unwind(|| {
        context_of(context)?;
        functions_of(module)
    });
    let (Ok(Ok(functions)), Some(visit)) = (functions, visit) else { return 0 };
    for function in functions {
        visit(argument, function, module);
    }
    1
}

unsafe fn functions_of(module: sys::CUmodule) -> Res<Vec<sys::CUfunction>> {
    let mut count: c_uint = 0;
    ok(exports::cuModuleGetFunctionCount(&raw mut count, module))?;
    let mut functions = vec![std::ptr::null_mut(); count as usize];
    ok(exports::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module))?;
    Ok(functions)
}
