//! The time that calls take in their caller, as on a real driver.
//!
//! A real driver checks the arguments, writes commands where the GPU reads them, and rings the GPU's doorbell as one of the last
//! steps. The work of a call can therefore not start before the call is nearly over, and until then the call has kept a CPU busy.
//! Each function here is called first: the caller spins on the clock, without a lock of the device's or the driver's, and only then
//! is its work queued. Several threads spend this time side by side, which a real driver's own locks allow only in part.
//!
//! A graph's nodes are all submitted at the end of its one call. Calls that are captured into a graph take the same time. Queries
//! and synchronising calls take none of their own.

use super::base;
use crate::sim::device_file::now_ns;
use gshare_fake_cuda_spec::Calls;

/// A call that launches a kernel.
#[inline(always)]
pub(crate) fn launch() {
    spend(|calls| calls.launch_ns.into());
}

/// A call that launches a graph.
pub(crate) fn graph(nodes: usize) {
    spend(|calls| u64::from(calls.graph_ns) + u64::from(calls.graph_node_ns) * nodes as u64);
}

/// A call that records an event, waits for one, or queues another small operation of a stream's.
pub(crate) fn event() {
    spend(|calls| calls.event_ns.into());
}

/// A call that copies or fills.
pub(crate) fn copy() {
    spend(|calls| calls.copy_ns.into());
}

#[inline(always)]
fn spend(time: impl FnOnce(&Calls) -> u64) {
    let ns = base::driver().map_or(0, |driver| time(&driver.calls));
    if ns > 0 {
        spin(ns);
    }
}

#[cold]
fn spin(ns: u64) {
    let until = now_ns() + ns;
    while now_ns() < until {
        std::hint::spin_loop();
    }
}
