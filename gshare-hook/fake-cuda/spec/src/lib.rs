//! The GPUs and the driver to simulate.
//!
//! # Terms
//! *Profile*: the GPU and the cost of kernels on it, a name or a file ([`Profile`]). *Release*: the driver's CUDA release
//! ([`CudaRelease`]). *Specification*: both, with the number of devices or the MIG devices ([`Spec`]).
//!
//! # Use
//! The command line reads a specification from the text after `--sim=`; the simulated driver reads the same from environment variables.
//! Nothing here opens a device: a specification can be refused before a program starts.
#![forbid(unsafe_code)]

mod compute;
mod cuda_release;
mod device_profile;
mod text;

pub use compute::write_compute;
pub use cuda_release::{CudaRelease, CudaReleaseError};
pub use device_profile::{
    Board, Calls, Cost, Duration, KernelCost, MigSlice, Named, Profile, ProfileError, built_in, load_text,
    states_time,
};
pub use text::{DEFAULT_PROFILE, MAX_DEVICES, Spec, SpecError};

/// PTX of a kernel that spins on the device's clock for `micros` us in every thread, on any GPU. The simulated driver reads the time
/// from the name, such as `spin_MICROSus` or `spin_MILLISms`, which may have a suffix: `_full` fills the device with any grid.
pub fn spin_ptx(name: &str, micros: u32) -> String {
    format!(
        "
.version 6.0
.target sm_50
.address_size 64
.visible .entry {name}()
{{
    .reg .u64 %begin, %now;
    .reg .pred %more;
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %more, %now, {micros}000;
    @%more bra again;
    ret;
}}
"
    )
}
