//! The start of the helper thread.
#![allow(unsafe_code)] // a thread's argument

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use crate::launch::failure::{Why, cannot_meter};
use crate::process::helper;
use crate::process::runtime::Runtime;
use crate::sys::thread;

/// Starts the helper thread, unless it was started before.
pub(crate) fn start(runtime: &'static Runtime) -> Result<(), Why> {
    if runtime.helped.load(Ordering::Acquire) {
        return Ok(());
    }
    let errno = thread::spawn(helper_thread, core::ptr::from_ref(runtime).cast_mut().cast());
    if errno != 0 {
        return Err(Why::Thread(errno));
    }
    runtime.helped.store(true, Ordering::Release);
    Ok(())
}

extern "C" fn helper_thread(runtime: *mut c_void) -> *mut c_void {
    // SAFETY: `start` passed the runtime, which is never freed.
    let Some(runtime) = (unsafe { runtime.cast::<Runtime>().as_ref() }) else { return core::ptr::null_mut() };
    if std::panic::catch_unwind(|| helper::run(runtime)).is_err() {
        cannot_meter(runtime.config.on_failure, Why::Helper);
    }
    core::ptr::null_mut()
}
