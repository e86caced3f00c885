//! Threads of the hook.
//!
//! The standard library does not start them, since its threads first register destructors under the loader's lock, which a thread that
//! waits for a thread of the hook may hold. All signals are blocked, because the program's handlers run in the program's threads.
#![allow(unsafe_code)] // a thread by hand

use core::ffi::c_void;

use crate::sys::{dlsym, signals};

/// Stack size of a thread, which may be large because untouched pages cost nothing.
const STACK: usize = 1 << 20;

/// Starts a thread with all signals blocked, and returns 0 or the error.
pub(crate) fn spawn(entry: extern "C" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) -> i32 {
    let mut thread = 0;
    // SAFETY: all-zero attributes are there to be initialised, the pointers are valid, and the argument is never freed.
    signals::blocked(|| unsafe {
        let mut attributes: libc::pthread_attr_t = core::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setstacksize(&raw mut attributes, STACK + taken_of_stack(&attributes));
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let errno = libc::pthread_create(&raw mut thread, &raw const attributes, entry, argument);
        libc::pthread_attr_destroy(&raw mut attributes);
        errno
    })
}

/// The C library's part of a thread's stack, mostly the thread-local storage of all libraries.
fn taken_of_stack(attributes: &libc::pthread_attr_t) -> usize {
    let found = dlsym::real_dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr());
    if found.is_null() {
        return 0;
    }
    type Get = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    // SAFETY: glibc's function of this name has had this signature since 2.15.
    let get = unsafe { core::mem::transmute::<*mut c_void, Get>(found) };
    // SAFETY: the attributes are initialised.
    unsafe { get(attributes) }
}
