//! The start of the helper thread.
#![allow(unsafe_code)] // a thread by hand, and signal masks

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use crate::launch::failure::{Why, cannot_meter};
use crate::process::helper;
use crate::process::runtime::Runtime;
use crate::sys::{dlsym, signals};

/// Stack size of the helper thread, which may be large because untouched pages cost nothing.
const STACK: usize = 1 << 20;

/// Starts the helper thread, unless it was started before. All signals are blocked in it, because the program's handlers run in the
/// program's threads. The standard library does not start it, since its threads first register destructors under the loader's lock,
/// which the thread waiting for the helper thread may hold.
pub(crate) fn start(runtime: &'static Runtime) -> Result<(), Why> {
    if runtime.helped.load(Ordering::Acquire) {
        return Ok(());
    }
    let errno = spawn(helper_thread, core::ptr::from_ref(runtime).cast_mut().cast());
    if errno != 0 {
        return Err(Why::Thread(errno));
    }
    runtime.helped.store(true, Ordering::Release);
    Ok(())
}

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

extern "C" fn helper_thread(runtime: *mut c_void) -> *mut c_void {
    // SAFETY: `start` passed the runtime, which is never freed.
    let Some(runtime) = (unsafe { runtime.cast::<Runtime>().as_ref() }) else { return core::ptr::null_mut() };
    if std::panic::catch_unwind(|| helper::run(runtime)).is_err() {
        cannot_meter(runtime.config.on_failure, Why::Helper);
    }
    core::ptr::null_mut()
}
