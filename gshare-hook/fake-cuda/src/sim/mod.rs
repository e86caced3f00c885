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

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex; what it guards is whole after every statement, so a panic elsewhere does not spoil it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
