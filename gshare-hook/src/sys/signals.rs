//! The signals of the calling thread.
#![allow(unsafe_code)] // the C library's signal masks

/// Keeps all signals from the calling thread while `f` runs. A thread started by `f` gets no signals at all.
pub(crate) fn blocked<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: all-zero is a valid signal set to be filled, and the pointers are valid.
    let before = unsafe {
        let (mut all, mut before) = (core::mem::zeroed(), core::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let result = f();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    result
}
