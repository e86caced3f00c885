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

mod cuda_release;
mod device_profile;
mod text;

pub use cuda_release::{CudaRelease, CudaReleaseError};
pub use device_profile::{
    Board, Calls, Cost, Duration, KernelCost, MigSlice, Named, Profile, ProfileError, built_in, load_text,
};
pub use text::{DEFAULT_PROFILE, MAX_DEVICES, Spec, SpecError};
