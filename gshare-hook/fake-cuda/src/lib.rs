//! A simulated CUDA driver: `libcuda.so.1` and `libnvidia-ml.so.1` that real clients accept, on a machine without a GPU.
//!
//! # Problem
//!
//! Everything that shares a GPU among processes must be tested with real processes, real client libraries and contention,
//! also where there is no GPU. So this library answers the driver API of CUDA 12 and 13 for any program, and all
//! programs that name the same device file share one simulated device: their kernels take time, queue and contend.
//!
//! # Terms
//!
//! *Device file*: what the processes share, [`sim::default_path`]. *Profile*: what GPUs it has and what kernels cost,
//! [`Spec`] and its crate. *Ground truth*: what happened on it, per process, [`sim::Truth`].
//!
//! # Layers
//!
//! 1. [`sim`]: the device, without a word of C. `sim::engine` is the schedule, told the time; `sim::device_file` the
//!    file, its lock and the sweep of dead processes.
//! 2. [`driver`]: the driver API over it, exported by one table of names.
//! 3. `nvml`: the monitoring library over the same device.
//! 4. `image`: names in device code. `private_tables`: what the runtime library asks for beyond the driver API.
//! 5. [`install`]: putting the library where programs look for it.
//!
//! # Use
//!
//! The build makes `libfake_cuda.so` with the soname `libcuda.so.1`. Link or copy it into a directory of its own as
//! `libcuda.so.1` ([`install_into`]) and put that on `LD_LIBRARY_PATH`:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `GSHARE_SIM_DEVICE` | path of the device file | in `XDG_RUNTIME_DIR`, or `/tmp` by uid |
//! | `GSHARE_SIM_PROFILE` | `v100`, `a100`, `h100`, `h200`, `t4`, `tiny` or a path | the file's own; `a100` for a new file |
//! | `GSHARE_SIM_GPUS` | number of GPUs, 1 to 16 | the profile's |
//! | `GSHARE_SIM_MIG` | MIG devices that the one GPU is cut into, such as `3g.40gb+2g.20gb` (`a100`, `h100`) | none |
//! | `GSHARE_SIM_DRIVER_VERSION` | CUDA release of the driver, 11.0 to 13.4, such as `12.8` or `12080` | `13.2` |
//! | `GSHARE_SIM_CALL_NS` | how long a call that launches a kernel takes in its caller, in ns; other calls in proportion | the profile's |
//! | `GSHARE_SIM_VERBOSE` | a line on stderr at `cuInit` | off |
//! | `GSHARE_TRACE` | of `calls`, `lookups`, `tables`, with commas: what the program asks, a line per event | off |
//! | `GSHARE_TRACE_FILE` | where to append these lines; `%p` is the process id | stderr |
//! | `CUDA_VISIBLE_DEVICES`, `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` | as with the real driver | |
//!
//! A kernel named `spin_1000us` lasts 1000 us, one named `zero` costs nothing; see `Profile` in `gshare-fake-cuda-spec` for the rest.
//!
//! # Trace
//!
//! A program that does not run here says rarely what it missed. With `GSHARE_TRACE` it leaves a record of what it asked:
//!
//! ```text
//! $ GSHARE_TRACE=calls,lookups,tables GSHARE_TRACE_FILE=/tmp/asked.%p python train.py
//! $ grep -hE 'UNKNOWN|NOT SIMULATED|NEWER' /tmp/asked.* | cut -d' ' -f3- | sort | uniq -c   # what was not found
//! $ grep -h ' call ' /tmp/asked.* | grep -v ' = 0' | cut -d' ' -f3- | tail                  # what failed last
//! ```
//!
//! `calls` are all driver and NVML calls with arguments and results (a value that the call has written stands behind an
//! arrow), `lookups` what `cuGetProcAddress` gave for which name and version, `tables` the private tables that were asked
//! for. A name that a program looks up by `dlsym` is found by the loader: `LD_DEBUG=symbols` shows those. An unknown word
//! is reported on stderr and left out. While it is off, a call pays one load.
//!
//! # Differences from a real driver
//!
//! Kernels take time but compute nothing. Every name of the driver's table is exported in every version;
//! `cuGetProcAddress` keeps to the version. Names without a function here answer `CUDA_ERROR_NOT_SUPPORTED`
//! ([`driver::is_served`] tells). Device names carry "(simulated)".
//!
//! - NVIDIA's runtime library and what stands on it (cuBLAS, cuDNN, cuFFT, cuSOLVER) start and run: the private tables
//!   that they ask for are served with the feature `runtime-tables`, on by default (`private_tables`). What a program
//!   computes from a kernel's result is wrong all the same: memory that a kernel would have written stays as it was.
//! - Kernels and global variables are looked up in the images that a program loads (`image`). An image that cannot be read
//!   accepts every name; `GSHARE_TRACE=tables` says why. Variables are not initialised from their image.
//! - Calls that queue work take the time in their caller that the profile says, before that work is queued; other calls take what they
//!   take here ([`gshare_fake_cuda_spec::Calls`]).
//! - Memory is charged to the byte asked for; a real driver rounds. Managed memory is charged to its device at once.
//! - Branches of a graph run one after the other. Stream priorities are ignored. Conditional nodes, textures, surfaces,
//!   external memory, multicast and memory on the host through pools and handles are not supported.
//! - Who waits for the device spins for the last 60 us, as with the real driver's default; scheduling flags are ignored.
//! - A child of an initialised process can never initialise, as with the real driver.
#![allow(clippy::cast_possible_truncation)] // indices into tables whose sizes are constants below 2^32

mod call_trace;
pub mod driver;
#[allow(unsafe_code)] // images at addresses that C programs pass
mod image;
pub mod install;
mod nvml;
#[cfg(feature = "runtime-tables")]
#[allow(unsafe_code)] // functions that C calls
mod private_tables;
pub mod sim;
mod truth;

pub use gshare_fake_cuda_spec::Spec;
pub use install::install_into;
