//! The process's end: the last reports, and an exit in place of the program's last thread.
#![allow(unsafe_code)] // atexit, and an exit in the place of the program's last thread

use core::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration as StdDuration;

use crate::launch::control::{CONTROL, State};
use crate::process::question::{Answer, Request};
use crate::process::runtime::PROCESS;

/// Longest wait at the end of the process for its last reports. It is longer than the meter takes, since busy CPUs delay the helper thread.
const LEAVE_WAIT: StdDuration = StdDuration::from_secs(1);
/// The thread that ends the process in place of the program's last thread, or 0.
static ENDS: AtomicI32 = AtomicI32::new(0);

/// Registers a handler to report the process's use at exit.
pub(crate) fn report_at_exit() {
    // SAFETY: the handler touches values that are never freed.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    let Some(runtime) = PROCESS.runtime() else { return };
    // SAFETY: the call only returns a number of the kernel.
    let in_helper = unsafe { libc::gettid() } == ENDS.load(Ordering::Relaxed);
    if CONTROL.state() == State::Active as u32 {
        if !in_helper {
            let answer = Answer::default();
            runtime.ask(Request::Leave(answer.clone()));
            let _ = answer.wait(LEAVE_WAIT);
        }
        CONTROL.set_state(State::Off);
    }
    runtime.end_moves();
    runtime.metering.contexts.exiting();
}

/// Whether all threads of the program have ended: `main` by `pthread_exit`, and the others in any way.
pub(crate) fn program_has_ended() -> bool {
    let own = std::process::id().to_string();
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return false };
    threads.flatten().all(|thread| {
        // The main thread stays in the list until the last thread is gone.
        thread.file_name().to_str() == Some(&own)
            || std::fs::read_to_string(thread.path().join("comm"))
                .is_ok_and(|name| is_not_the_programs(name.trim_end()))
    })
}

/// Whether a thread of this name belongs to the hook, the driver or the simulated driver.
fn is_not_the_programs(name: &str) -> bool {
    let numbered = name
        .strip_prefix("cuda")
        .is_some_and(|rest| rest.len() > 7 && rest.bytes().all(|b| b.is_ascii_digit()));
    numbered || ["gshare", "cuda-EvtHandlr", "sim-cuda-host"].contains(&name)
}

/// Ends the process as the end of its last thread would. The helper thread has reported the use before.
pub(crate) fn end_process() -> ! {
    // SAFETY: the mask and the number belong to this thread. `exit` runs the program's handlers, as the C library does when the
    // last thread ends.
    unsafe {
        ENDS.store(libc::gettid(), Ordering::Relaxed);
        let mut none = core::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, core::ptr::null_mut());
        libc::exit(0)
    }
}
