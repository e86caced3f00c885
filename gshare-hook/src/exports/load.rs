//! The library's constructor, which runs in every process although most processes never use CUDA.
#![allow(unsafe_code)] // a constructor, and the environment before the program has a thread

use crate::exports::resolve::dlsym_before_ours;
use crate::launch::control::CONTROL;
use crate::launch::failure::{Why, cannot_meter};
use crate::launch::threads::{NO_RECORD, make_key, watch_this_thread};
use crate::process::runtime::PROCESS;
use crate::sys::config::OnFailure;
use crate::sys::stderr::tell;
use crate::sys::{dlsym, setting_sources};

extern "C" fn constructor() {
    dlsym::find_dlsym();
    CONTROL.wipe_on_fork();
    PROCESS.wipe_on_fork();
    // The key must come before the program takes all keys, and the settings must be read before it has another root.
    if make_key() {
        watch_this_thread((&raw const NO_RECORD).cast());
    }
    setting_sources::look_at_load();
    if let Some(library) = dlsym_before_ours() {
        bypassed(&library);
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

/// Handles another library's `dlsym` that leads the program past this library, and with it most calls of the driver. Where a limit
/// is asked for, the driver is told to show no device, since there is no other door to close.
fn bypassed(library: &[u8]) {
    let config = setting_sources::read();
    if config.disabled || !setting_sources::ask_for_a_limit(&config) {
        return;
    }
    tell(&format!(
        "{} answers dlsym in place of the hook: name the hook first in LD_PRELOAD",
        String::from_utf8_lossy(library)
    ));
    cannot_meter(config.on_failure, Why::Bypassed);
    if config.on_failure == OnFailure::Closed {
        // SAFETY: valid C strings; the program has no other thread yet.
        unsafe { libc::setenv(c"CUDA_VISIBLE_DEVICES".as_ptr(), c"".as_ptr(), 1) };
    }
}
