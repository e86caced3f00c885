//! The simulated device: no C types, no exports. See `engine` for the schedule and `device_file` for the file.

pub(crate) mod device_file;
pub(crate) mod engine;
pub(crate) mod layout;
pub(crate) mod stats;
#[cfg(test)]
mod tests;

pub use device_file::{DeviceError, SimDevice, default_path};
pub(crate) use engine::SimError;
pub(crate) use layout::{MAX_GPUS, MemKind, RING, Work};
pub use stats::{GpuTruth, ProcessGpuTruth, ProcessTruth, Truth, Watched};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A text in `N` bytes, cut to end in a zero.
pub(crate) fn padded<const N: usize>(text: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    let n = text.len().min(N - 1);
    out[..n].copy_from_slice(&text[..n]);
    out
}

/// Locks a mutex; its content is whole after every statement, so a panic elsewhere does not spoil it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
