//! A simulated CUDA driver: `libcuda.so.1` and `libnvidia-ml.so.1` for unmodified clients, on a machine without a GPU.
//!
//! # Problem
//!
//! Everything that shares a GPU among processes must be tested with real processes, real client libraries and contention,
//! also where there is no GPU. So this library answers the driver API of CUDA 12 and 13 for any program, and all
//! programs that name the same device file share one simulated device: their kernels take time, queue and contend.
//!
//! # Terms
//!
//! *Device file*: the state shared by the processes, [`sim::default_path`]. *Profile*: its GPUs and the cost of kernels,
//! [`Spec`] and its crate. *Ground truth*: the events on it, per process, [`sim::Truth`].
//!
//! # Layers
//!
//! 1. [`sim`]: the device, without a word of C. `sim::engine` is the schedule; its caller supplies the time. `sim::device_file` is
//!    the file, its lock and the sweep of dead processes.
//! 2. [`driver`]: the driver API over it, exported by one table of names.
//! 3. `nvml`: the monitoring library over the same device.
//! 4. `image`: names in device code. `private_tables`: the runtime library's tables beyond the driver API.
//! 5. [`install`]: installs the library where programs look for it.
//!
//! # Use
//!
//! The build makes `libfake_cuda.so` with the soname `libcuda.so.1`. Link or copy it into a directory of its own as
//! `libcuda.so.1` ([`install_into`]) and put this directory on `LD_LIBRARY_PATH`:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `GSHARE_SIM_DEVICE` | path of the device file | in `XDG_RUNTIME_DIR`, or `/tmp` by uid |
//! | `GSHARE_SIM_PROFILE` | `v100`, `a100`, `h100`, `h200`, `b200`, `gb200`, `t4`, `tiny` or a path | the file's own; `a100` for a new file |
//! | `GSHARE_SIM_GPUS` | number of GPUs, 1 to 16 | the profile's |
//! | `GSHARE_SIM_MIG` | MIG devices into which the one GPU is cut, such as `3g.40gb+2g.20gb` (`a100`, `h100`) | none |
//! | `GSHARE_SIM_DRIVER_VERSION` | CUDA release of the driver, 11.0 to 13.4, such as `12.8` or `12080` | `13.2` |
//! | `GSHARE_SIM_CALL_NS` | time of a kernel launch in its caller, in ns; other calls in proportion | the profile's |
//! | `GSHARE_SIM_FAILED_COPIES` | the process's copies between host and device that fail, by number from 1, such as `2,5` | none |
//! | `GSHARE_SIM_COMPUTE` | `1`: the program asks for values, and hears of kernels without any (`driver::values`) | off |
//! | `GSHARE_SIM_VERBOSE` | a line on stderr at `cuInit` | off |
//! | `GSHARE_TRACE` | of `calls`, `lookups`, `tables`, with commas: the program's calls, a line per event | off |
//! | `GSHARE_TRACE_FILE` | file to which these lines are appended; `%p` is the process id | stderr |
//! | `CUDA_VISIBLE_DEVICES`, `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` | as with the real driver | |
//!
//! A kernel named `spin_1000us` lasts 1000 us, one named `zero` costs nothing; see `Profile` in `gshare-fake-cuda-spec` for the rest.
//!
//! # Trace
//!
//! A program which fails here rarely names the missing function. `GSHARE_TRACE` leaves a record of its calls:
//!
//! ```text
//! $ GSHARE_TRACE=calls,lookups,tables GSHARE_TRACE_FILE=/tmp/asked.%p python train.py
//! $ grep -hE 'UNKNOWN|NOT SIMULATED|NEWER' /tmp/asked.* | cut -d' ' -f3- | sort | uniq -c   # names not found
//! $ grep -h ' call ' /tmp/asked.* | grep -v ' = 0' | cut -d' ' -f3- | tail                  # the last failures
//! ```
//!
//! `calls` are all driver and NVML calls with arguments and results (a value written by the call stands behind an arrow),
//! `lookups` the answers of `cuGetProcAddress` by name and version, `tables` the requests for private tables. The loader
//! answers `dlsym`: `LD_DEBUG=symbols` shows such look-ups. An unknown word is reported on stderr and left out. While the
//! trace is off, a call pays one load.
//!
//! # Differences from a real driver
//!
//! Kernels take time but compute nothing. Every name of the driver's table is exported in every version;
//! `cuGetProcAddress` keeps to the version. Names without a function here answer `CUDA_ERROR_NOT_SUPPORTED`
//! ([`driver::is_served`] tells). Device names carry "(simulated)".
//!
//! - NVIDIA's runtime library and the libraries above it (cuBLAS, cuDNN, cuFFT, cuSOLVER) start and run: the feature
//!   `runtime-tables`, on by default, serves their private tables (`private_tables`). Results computed from a kernel's
//!   output are wrong all the same: no kernel writes its memory. The Python package in `spec/python` makes the values of PyTorch's operators
//!   on the host.
//! - Kernels and global variables are looked up in the program's images (`image`). An unreadable image accepts every name;
//!   `GSHARE_TRACE=tables` gives the reason. Variables are not initialised from their image.
//! - Calls which queue work first spend the profile's time in their caller; other calls take no longer than their own code
//!   ([`gshare_fake_cuda_spec::Calls`]).
//! - Memory is charged to the requested byte; a real driver rounds. Managed memory is charged to its device at once.
//! - Branches of a graph run one after the other. Stream priorities are ignored. Conditional nodes, textures, surfaces,
//!   external memory, multicast and memory on the host through pools and handles are not supported.
//! - A wait for the device spins for its last 60 us, as with the real driver's default; scheduling flags are ignored.
//! - A child of an initialised process can never initialise, as with the real driver.
#![allow(clippy::cast_possible_truncation)] // indices into tables of constant size below 2^32

mod call_trace;
pub mod driver;
#[allow(unsafe_code)] // images at addresses from C programs
mod image;
pub mod install;
mod nvml;
#[cfg(feature = "runtime-tables")]
#[allow(unsafe_code)] // functions called from C
mod private_tables;
pub mod sim;
mod truth;

pub use gshare_fake_cuda_spec::Spec;
pub use install::install_into;
