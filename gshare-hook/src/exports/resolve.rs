//! Look-ups of the driver's functions by a program, and their answers.
//!
//! # `dlsym`
//! The hook exports `dlsym` and `dlvsym`. A look-up with `RTLD_NEXT` or `RTLD_DEFAULT` is resolved relative to its *return
//! address*. A hook that forwards such a call changes the caller, and a library that asks for the next `malloc` gets its own back.
//! So `dlsym` is a naked function, which looks at the handle and jumps to the real function with arguments and return address
//! untouched. `RTLD_DEFAULT` finds the hook's own exports by the ordinary order of the program's libraries. With any other handle,
//! the answer to a name of the table becomes its wrapper if the answer lies in the driver.
//!
//! # `cuGetProcAddress`
//! The real function answers first, and only a success is looked at. The table tells the variant of the answer (base name, release,
//! flag), and if the hook wraps exactly this variant, its wrapper is given instead. Status and NULL answers, unknown names and the
//! empty probe pass through. Two traps:
//!
//! * An old driver answers with the newest variant *it* knows, so the table is asked with the smaller of both releases.
//! * A driver newer than the table may answer with a variant absent from the table. Then the real function is asked again at the
//!   table's newest release, and the wrapper is given only if both answers are the same function.
//!
//! The private functions by UUID of `cuGetExportTable` are never touched.
#![allow(unsafe_code)] // the loader's interface

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use gshare_cuda_abi::types::CUresult;
use gshare_cuda_abi::{NEWEST_RELEASE, Resolution, by_name};

use crate::exports::{nvml_view, table};
use crate::sys::dlsym::{
    REAL_DLSYM, REAL_DLVSYM, find_dlsym, find_dlvsym, real_dlsym, real_dlvsym, stands_before,
};
use crate::sys::driver::{self, real};

/// `dlsym`, as the program sees it.
///
/// # Safety
/// As for `dlsym(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!("jmp {own}", own = sym own_dlsym)
}

/// `dlsym` under a name of this library alone, because `dlsym` itself leads to the first `dlsym` of the program, from here too.
///
/// # Safety
/// As for `dlsym(3)`.
#[unsafe(naked)]
unsafe extern "C" fn own_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        // RTLD_DEFAULT is 0 and RTLD_NEXT is -1, so both are at most 1 after adding 1, as unsigned numbers.
        "lea rax, [rdi + 1]",
        "cmp rax, 1",
        "ja 4f",
        "test rdi, rdi",
        "jnz 2f",
        // RTLD_DEFAULT and a name that may be the driver's: is there a driver at all?
        "cmp word ptr [rsi], 0x7563", // "cu"
        "jne 2f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {absent}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jnz 4f",
        "2:",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "3:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 5f",
        "jmp rax",
        "4:",
        "jmp {ours}",
        "5:",
        "ret",
        absent = sym is_wrapped_without_driver,
        real = sym REAL_DLSYM,
        find = sym find_dlsym,
        ours = sym dlsym_by_handle,
    )
}

/// Whether `RTLD_DEFAULT` would find a wrapper for a driver absent from the program, since a probe for CUDA in a process without
/// CUDA must find nothing. The function takes `dlsym`'s own arguments.
extern "C" fn is_wrapped_without_driver(_: *mut c_void, name: *const c_char) -> bool {
    // SAFETY: dlsym was given a C string, or its contract is broken already.
    let name = unsafe { CStr::from_ptr(name) };
    name.to_str().ok().and_then(by_name).is_some_and(|symbol| table::wrapper(symbol.index).is_some())
        && driver::loaded_driver().is_none()
}

extern "C" fn dlsym_by_handle(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    if handle.is_null() {
        // Only a probe for CUDA without CUDA comes here as RTLD_DEFAULT, and a library behind this library may answer it.
        return real_dlsym(libc::RTLD_NEXT, name);
    }
    wrapped(name, real_dlsym(handle, name))
}

/// The answer to a look-up by handle: the wrapper of the found function, or the function itself.
fn wrapped(name: *const c_char, found: *mut c_void) -> *mut c_void {
    if name.is_null() {
        return found;
    }
    // SAFETY: the loader was given a C string, or its contract is broken already.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    if name == PROBE.to_bytes() {
        PROBED.store(true, Ordering::Relaxed);
    }
    if found.is_null() {
        return found;
    }
    match name {
        [b'c', b'u', ..] => {
            let Ok(name) = core::str::from_utf8(name) else { return found };
            let Some(index) = by_name(name).map(|symbol| symbol.index) else { return found };
            let Some(wrapper) = table::wrapper(index) else { return found };
            if found == wrapper || !driver::is_drivers(index, found) {
                return found;
            }
            driver::remember(index, found);
            wrapper
        }
        [b'n', b'v', b'm', b'l', ..] => nvml_view::wrapper(name, found).unwrap_or(found),
        _ => found,
    }
}

/// `dlvsym`, as the program sees it.
///
/// # Safety
/// As for `dlvsym(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rcx, qword ptr [rsp + 24]", // the caller
        "call {ours}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jnz 3f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "3:",
        "ret",
        ours = sym dlvsym_of_ours,
        real = sym REAL_DLVSYM,
    )
}

/// This library's answer to a look-up with a version, or null where the real function answers. A library before this library,
/// looking for the next `dlsym`, gets this library's, so the two make a chain. A library behind this library must not, because
/// their calls would go round in a circle.
extern "C" fn dlvsym_of_ours(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: *const c_void,
) -> *mut c_void {
    if REAL_DLVSYM.load(Ordering::Relaxed).is_null() {
        find_dlvsym();
    }
    let own = own_dlsym as *mut c_void;
    // SAFETY: dlvsym was given a C string, or its contract is broken already.
    if !name.is_null() && unsafe { CStr::from_ptr(name) } == c"dlsym" && stands_before(caller, own) {
        return own;
    }
    if handle.is_null() || handle == libc::RTLD_NEXT {
        return core::ptr::null_mut();
    }
    wrapped(name, real_dlvsym(handle, name, version))
}

/// A name of no library's function, by which this library's `dlsym` recognises a look-up sent to test its path.
const PROBE: &CStr = c"cuGshareProbe";
static PROBED: AtomicBool = AtomicBool::new(false);

/// The library with the `dlsym` that answers the program's look-ups in place of this library's, if there is any. A library that
/// passes its look-ups on to this library does not count.
pub(crate) fn dlsym_before_ours() -> Option<Vec<u8>> {
    let first = real_dlsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr());
    if first.is_null() || driver::are_in_one_library(first, own_dlsym as *const c_void) {
        return None;
    }
    // SAFETY: valid C strings; RTLD_NOLOAD loads nothing, and the reference may stay.
    let handle = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: functions of this name have this signature.
    let first_dlsym = unsafe {
        core::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void>(
            first,
        )
    };
    // SAFETY: a valid handle and a C string.
    unsafe { first_dlsym(handle, PROBE.as_ptr()) };
    if PROBED.load(Ordering::Relaxed) { None } else { driver::library_of(first) }
}

/// The driver's release, asked once.
fn driver_release() -> u32 {
    static RELEASE: AtomicI32 = AtomicI32::new(0);
    let known = RELEASE.load(Ordering::Relaxed);
    if let Ok(release @ 1..) = u32::try_from(known) {
        return release;
    }
    let mut version: c_int = 0;
    let Some(get) = real!(cuDriverGetVersion) else { return NEWEST_RELEASE };
    // SAFETY: a valid out-pointer; the call works before cuInit.
    if !unsafe { get(&raw mut version) }.is_ok() {
        return NEWEST_RELEASE;
    }
    RELEASE.store(version, Ordering::Relaxed);
    u32::try_from(version).unwrap_or(NEWEST_RELEASE)
}

/// The answer to a successful look-up: the wrapper of exactly this variant, or the driver's answer. `ask_again` repeats the look-up
/// at another release.
fn substitute(
    name: *const c_char,
    found: *mut c_void,
    release: c_int,
    flags: u64,
    ask_again: impl FnOnce(c_int) -> *mut c_void,
) -> *mut c_void {
    if name.is_null() || found.is_null() {
        return found;
    }
    // SAFETY: the driver has just accepted it as a C string.
    let Ok(base) = unsafe { CStr::from_ptr(name) }.to_str() else { return found };
    let asked = u32::try_from(release).unwrap_or(0).min(driver_release());
    let Resolution::Found(symbol) = gshare_cuda_abi::resolve(base, asked.min(NEWEST_RELEASE), flags) else {
        return found;
    };
    let Some(wrapper) = table::wrapper(symbol.index) else { return found };
    if asked > NEWEST_RELEASE && ask_again(NEWEST_RELEASE.cast_signed()) != found {
        return found;
    }
    // A driver bound to this library's exports may answer with the wrapper itself.
    if found != wrapper {
        driver::remember(symbol.index, found);
    }
    wrapper
}

/// `cuGetProcAddress` of CUDA 11.3 to 11.8.
///
/// # Safety
/// As for the driver's function.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cudaVersion: c_int,
    flags: u64,
) -> CUresult {
    let Some(get) = real!(cuGetProcAddress) else { return CUresult::CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { get(symbol, pfn, cudaVersion, flags) };
    if result.is_ok() && !pfn.is_null() {
        // SAFETY: the driver has just written to it.
        let found = unsafe { *pfn };
        let given = substitute(symbol, found, cudaVersion, flags, |release| {
            let mut again = core::ptr::null_mut();
            // SAFETY: the caller's name, our out-pointer.
            let asked = unsafe { get(symbol, &raw mut again, release, flags) };
            if asked.is_ok() { again } else { core::ptr::null_mut() }
        });
        // SAFETY: as above.
        unsafe { *pfn = given };
    }
    result
}

/// `cuGetProcAddress` since CUDA 12.0.
///
/// # Safety
/// As for the driver's function.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cudaVersion: c_int,
    flags: u64,
    symbolStatus: *mut c_uint,
) -> CUresult {
    let Some(get) = real!(cuGetProcAddress_v2) else { return CUresult::CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let result = unsafe { get(symbol, pfn, cudaVersion, flags, symbolStatus) };
    if result.is_ok() && !pfn.is_null() {
        // SAFETY: the driver has just written to it.
        let found = unsafe { *pfn };
        let given = substitute(symbol, found, cudaVersion, flags, |release| {
            let mut again = core::ptr::null_mut();
            // SAFETY: the caller's name, our out-pointer; the status may be left out.
            let asked = unsafe { get(symbol, &raw mut again, release, flags, core::ptr::null_mut()) };
            if asked.is_ok() { again } else { core::ptr::null_mut() }
        });
        // SAFETY: as above.
        unsafe { *pfn = given };
    }
    result
}
