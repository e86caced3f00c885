//! The time of a call in its caller, as on a real driver.
//!
//! A real driver checks the arguments, writes commands to the GPU's ring, and rings the doorbell as one of its last steps. The work of a
//! call therefore starts only when the call is nearly over, and the call keeps a CPU busy until then. Each entry point runs its function
//! here first: the caller spins on the clock, without a lock of the device or the driver, and then queues its work. Several threads spend
//! this time side by side; a real driver's own locks allow only part of this overlap.
//!
//! A graph's one call submits all its nodes at its end. Calls captured into a graph take the same time. Queries and synchronising calls
//! take no time of their own.

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

/// A call which records an event, waits for one, or queues another small stream operation.
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
