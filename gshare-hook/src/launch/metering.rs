//! The state of the launch path in a metered process.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::device::context::Contexts;
use crate::device::devices::Devices;
use crate::launch::threads::Threads;
use crate::sys::bell::Bell;
use crate::sys::config::OnFailure;

/// A helper thread is gone if it has not looped for this time in ns, while another thread of the process was awake.
const GONE_NS: u64 = 5_000_000_000;
/// The most of the time between two looks that counts as awake, in ns, because the process may have been stopped for the rest.
pub(crate) const LOOK_NS: u64 = 20_000_000;

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

/// A waiting thread's watch on the helper thread. By the clock alone, a process that was stopped for a while (a signal, a frozen
/// container) would take its helper thread for gone when it goes on.
#[derive(Debug)]
pub(crate) struct Watch {
    beat: u64,
    looked: u64,
    awake: u64,
}

impl Watch {
    pub(crate) fn new(metering: &Metering, now: u64) -> Self {
        Self { beat: metering.beat.load(Ordering::Relaxed), looked: now, awake: 0 }
    }

    /// Looks again, some milliseconds after the last look, and returns whether the helper thread is gone.
    pub(crate) fn sees_it_gone(&mut self, metering: &Metering, now: u64) -> bool {
        let beat = metering.beat.load(Ordering::Relaxed);
        self.awake += now.saturating_sub(self.looked).min(LOOK_NS);
        self.looked = now;
        if beat != self.beat {
            (self.beat, self.awake) = (beat, 0);
        }
        self.awake > GONE_NS
    }
}
