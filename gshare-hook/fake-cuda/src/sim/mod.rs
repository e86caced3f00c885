//! The simulated device: no C types, no exports. See [`engine`] for the schedule and [`device_file`] for the file.

pub mod device_file;
pub mod engine;
pub(crate) mod layout;
#[cfg(test)]
mod model;
pub mod stats;

pub use device_file::{DeviceError, SimDevice, default_path, now_ns};
pub use engine::{Engine, SimError, Work};
pub use layout::{MAX_GPUS, MEM_KIND_NAMES, MemKind, RING};
pub use stats::{GpuTruth, ProcessTruth, Truth, Watched};
