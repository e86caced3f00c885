//! The state of the launch path in a metered process.

use core::sync::atomic::AtomicU64;

use crate::device::context::Contexts;
use crate::device::devices::Devices;
use crate::launch::threads::Threads;
use crate::sys::bell::Bell;
use crate::sys::config::OnFailure;

/// Contexts, devices and threads, and the means to wake the helper thread.
#[derive(Debug)]
pub(crate) struct Metering {
    pub(crate) contexts: Contexts,
    pub(crate) devices: Devices,
    pub(crate) threads: Threads,
    pub(crate) bell: Bell,
    /// The time of the helper thread's last loop, in ns.
    pub(crate) beat: AtomicU64,
    pub(crate) on_failure: OnFailure,
}
