//! The time that calls take in their caller, as on a real driver.
//!
//! A real driver checks the arguments, writes commands where the GPU reads them, and rings the GPU's doorbell as one of the last
//! steps. The work of a call can therefore not start before the call is nearly over, and until then the call has kept a CPU busy.
//! Each function here is called first: the caller spins on the clock, without a lock of the device's or the driver's, and only then
//! is its work queued. Several threads spend this time side by side, which a real driver's own locks allow only in part.
//!
//! A graph's nodes are all submitted at the end of its one call. Calls that are captured into a graph take the same time. Queries
//! and synchronising calls take none of their own.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crate::sim::device_file::now_ns;
use gshare_fake_cuda_spec::Calls;

/// The longest time of a launch call that can be asked for, in ns.
const MOST_NS: u32 = 1_000_000_000;

static LAUNCH: AtomicU32 = AtomicU32::new(0);
static GRAPH: AtomicU32 = AtomicU32::new(0);
static GRAPH_NODE: AtomicU32 = AtomicU32::new(0);
static EVENT: AtomicU32 = AtomicU32::new(0);
static COPY: AtomicU32 = AtomicU32::new(0);

/// Sets the times of this process: the profile's, or those scaled to what `GSHARE_SIM_CALL_NS` says of a launch.
pub(crate) fn set(profile: Calls) -> Result<(), String> {
    let calls = match std::env::var("GSHARE_SIM_CALL_NS") {
        Ok(text) if !text.is_empty() => {
            let ns = text.trim().parse().ok().filter(|&ns| ns <= MOST_NS);
            let refused = || format!("GSHARE_SIM_CALL_NS={text}: not a number of ns from 0 to {MOST_NS}");
            profile.scaled_to(ns.ok_or_else(refused)?)
        }
        _ => profile,
    };
    LAUNCH.store(calls.launch_ns, Relaxed);
    GRAPH.store(calls.graph_ns, Relaxed);
    GRAPH_NODE.store(calls.graph_node_ns, Relaxed);
    EVENT.store(calls.event_ns, Relaxed);
    COPY.store(calls.copy_ns, Relaxed);
    Ok(())
}

/// A call that launches a kernel.
#[inline(always)]
pub(crate) fn launch() {
    spend(LAUNCH.load(Relaxed).into());
}

/// A call that launches a graph.
pub(crate) fn graph(nodes: usize) {
    spend(u64::from(GRAPH.load(Relaxed)) + u64::from(GRAPH_NODE.load(Relaxed)) * nodes as u64);
}

/// A call that records an event, waits for one, or queues another small operation of a stream's.
pub(crate) fn event() {
    spend(EVENT.load(Relaxed).into());
}

/// A call that copies or fills.
pub(crate) fn copy() {
    spend(COPY.load(Relaxed).into());
}

#[inline(always)]
fn spend(ns: u64) {
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
