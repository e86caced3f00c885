//! `libgshare_hook.so`: the `LD_PRELOAD` library that meters a program's use of the CUDA driver.
//!
//! The driver lets every process launch at will and allocate until the device is full. This library stands between the program and
//! `libcuda.so.1`. It exports the driver's functions that start work or take memory, does its part, and calls the real function. The
//! program is neither changed nor recompiled.
//!
//! # Floors
//!
//! A file knows only its own floor and those below it, as `.ci/check_arrows.py` checks.
//!
//! - `exports`: the C functions that programs see, generated over the table of `gshare-cuda-abi`
//! - `process`: beginning, forks and end; the helper thread, which carries [`gshare_meter`]'s decisions out
//! - `launch`: predicts a launch's cost, spends credit, measures sparsely, waits in line
//! - `device`: CUDA contexts and their events, credit, the book of memory
//! - `sys`: the driver's functions, the loader, threads, time, settings, the socket
//!
//! # A launch
//!
//! ```text
//! program: cuLaunchKernel ─▶ wrapper: row of this function and size ─▶ 1.0 ms ─▶ spent 6.0 of 8.0 ms: 7.0 ms ─▶ real call
//!                                                                            └─ limit reached: wait in line, then the same
//! helper:  event pair passed: 1.02 ms ─▶ spent + 0.02 ms, limit + 1.02 ms ─▶ wake the line
//!          nearly all is spent that is allowed ─▶ Use ─▶ daemon ─▶ Allow ─▶ a larger limit
//! ```
//!
//! # Guarantees
//!
//! - Result, order and thread of every call are the driver's. No call is deferred, copied or merged, and no launch synchronises.
//! - A launch costs one atomic subtraction while credit lasts: no round trip, lock, system call or allocation.
//! - GPU time is charged as measured, merged over streams. Overuse is carried as debt.
//! - Memory beyond the limit is `CUDA_ERROR_OUT_OF_MEMORY`. `cuMemGetInfo`, `cuDeviceTotalMem` and NVML agree.
//! - Where a limit was asked for and cannot be kept, no launch and no allocation goes through, and stderr says why.
//! - The hook never aborts the program. Without limits and without a daemon it stands aside after one look.
//!
//! `docs/operators.md` names the weaknesses of such limits, and `CHECKLIST.md` beside this crate the points at which such hooks fail.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("gshare-hook interposes dlsym and thread-local storage by hand: Linux on x86-64 only");

mod device;
mod exports;
mod launch;
mod process;
mod sys;
