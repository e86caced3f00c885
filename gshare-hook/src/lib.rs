//! `libgshare_hook.so`: the `LD_PRELOAD` library that meters what a program does with the CUDA driver.
//!
//! # Problem
//!
//! The driver lets every process launch all that it likes and allocate until the device is full. To share a device, a
//! process must wait for its turn before it launches, and must be refused memory beyond its part, without being changed,
//! recompiled or slowed down. This library stands between the program and `libcuda.so.1`: it exports the driver's
//! functions that start work or take memory, does its part, and calls the real one.
//!
//! # Terms
//!
//! Those of [`gshare_core`]: token, lease, credit, debt, in flight.
//!
//! # Floors
//!
//! - `exports`: the C functions that programs see, generated over the table of `gshare-cuda-abi`
//! - `process`: its beginning, its forks and its end; the helper thread, which tells [`gshare_meter`] what happened and does what it decides
//! - `launch`: predicts, spends, measures sparsely, waits in line
//! - `device`: CUDA contexts and their events, credit, the book of memory
//! - `sys`: the driver's functions, the loader, threads, time, the environment, the socket
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
//! - Results, order and thread of every call are the driver's own. No call is deferred, copied or merged; no launch
//!   synchronises; captured launches pass untouched. Now and then the work of one short launch starts some microseconds later, so
//!   that it can be measured.
//! - A launch costs one atomic subtraction while credit lasts, and never a round trip, lock, system call or allocation.
//! - GPU time is charged as measured (union over streams), without the time that the device waits for the program's calls, so the limit holds for programs that never synchronise, for
//!   graphs, copies and kernels of any length; what was overused is carried as debt.
//! - Memory beyond the limit is `CUDA_ERROR_OUT_OF_MEMORY`, never a kill. `cuMemGetInfo`, `cuDeviceTotalMem` and NVML agree.
//! - The hook never exits, aborts or blocks for ever. Without CUDA it does nothing; without limits and daemon it stands
//!   aside after one look.
//!
//! The file `CHECKLIST.md` beside this crate lists the points at which such hooks fail, with what keeps each here and which
//! test shows it.
//!
//! # Ways in
//!
//! - `gshare run -- CMD` sets `LD_PRELOAD` and the variables of one program and what it starts.
//! - A line with the library's path in `/etc/ld.so.preload` puts it into every program of a machine or container image, also
//!   where the environment is cleared; the loader's `--preload` does the same for one program without root. What a program
//!   without CUDA pays is one more library to map (`gshare-hook/package/package.py` prints how much), and nothing else: no
//!   file, thread or socket before the first context.
//! - The shipped file is linked against glibc 2.17; the same script builds it and checks what it needs and exports.
//!
//! # Ways out
//!
//! `GSHARE_DISABLE=1` sends every call of a process straight to the driver. A client with the whole device (a request of
//! 100 % of the time and of the SMs, no memory limit) is let go for good after one look. So is a process that finds neither a
//! limit in its environment nor a daemon when it first uses a context: it is not asked for again when a daemon comes up later,
//! since what it holds by then was not counted. Where the daemon may come later, name its socket (`GSHARE_SOCKET`) or the
//! instance (`GSHARE_NAME`): then the process waits for it under its policy. `gshare doctor` lists the processes that were let go.
//!
//! # What an `LD_PRELOAD` limit cannot do
//!
//! It is cooperative, not a security boundary: MPS and MIG are. It does not see statically linked programs, setuid
//! programs, `dlmopen` namespaces, programs that unset `LD_PRELOAD`, libraries loaded with `RTLD_DEEPBIND` that link the
//! driver directly, nor private functions reached through `cuGetExportTable`. A kernel that runs cannot be stopped: a
//! limit is overshot by what was in flight, and that is paid back. `gshare doctor` finds processes that use a device and are
//! not registered, and says why as far as it can be seen; under MPS, whose server stands for all its clients, and behind
//! private functions it sees nothing.
//!
//! # Not counted
//!
//! Memory that a context takes for itself (its size is the driver's, and NVML tells it by a process id that a container
//! does not know): `gshare doctor` says how much it is, and the daemon's `memory_headroom` leaves room for it. Code and globals of
//! modules, local memory; graphs' memory before their first launch; memory mapped into a sparse array once its handle is
//! released; physical memory that only an import still holds, of another process or of its own: no call tells whose it is. Work that device-side launches start is counted by its duration, like any kernel's. Costs are learned per function handle and size: a kernel whose duration depends on its
//! data is charged as measured, but predicted by its average. Kernels that are shorter than the calls that launch them are charged what
//! they take one after the other, also where those of several streams run side by side. A program that synchronises after every kernel of some
//! microseconds leaves the device idle while it holds a token: its share of GPU time is then bounded by its own pace.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("gshare-hook interposes dlsym and thread-local storage by hand: Linux on x86-64 only");

mod device;
mod exports;
mod launch;
mod process;
mod sys;
mod wait_ring;
