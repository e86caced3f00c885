//! One GPU as a process launches on it: its credit and costs, the measurements under way, and the threads waiting for credit.

pub(crate) mod blocks;
pub(crate) mod book;
pub(crate) mod context;
pub(crate) mod devices;
pub(crate) mod handles;
pub(crate) mod hold;
pub(crate) mod pools;

use core::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::Arc;
use std::time::Duration as StdDuration;

use gshare_core::gate::LaunchGate;
use gshare_meter::cost::CostTable;
use gshare_meter::run::CallTime;
use gshare_meter::{Ground, MemoryAccount, Segment};

use crate::device::context::{Context, Pair};
use crate::sys::lock::{Lock, Signal};

/// A measurement under way, for the helper thread.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) context: Arc<Context>,
    pub(crate) pair: Pair,
    pub(crate) segment: Segment,
}

/// Threads waiting for credit, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Line {
    pub(crate) next: u64,
    pub(crate) serving: u64,
}

/// One GPU as a process launches on it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) gate: LaunchGate,
    pub(crate) costs: CostTable,
    /// The durations of launch calls.
    pub(crate) calls: CallTime,
    pub(crate) memory: MemoryAccount,
    pending: Lock<Vec<Pending>>,
    /// Launches on this device, counted only where there are several devices.
    pub(crate) launches: AtomicU64,
    /// Charged cost of launches that are over and were not measured, in ns.
    pub(crate) settled: AtomicU64,
    /// Charged cost of launches that the driver refused, in ns, to be given back.
    pub(crate) refused: AtomicU64,
    /// Whether every segment is to be measured: see [`gshare_meter::coverage::Overlap`].
    pub(crate) measures_all: AtomicBool,
    /// Whether the daemon refuses the process for now, so launches and allocations wait.
    pub(crate) turned_away: AtomicBool,
    /// Whether no launch and no allocation goes through, because the daemon refused the process, or is gone and the policy says so.
    pub(crate) shut: AtomicBool,
    /// The number of threads waiting for credit, and of threads waiting for the measurement of a kernel's cost.
    pub(crate) waiting: AtomicU64,
    pub(crate) measuring: AtomicU64,
    pub(crate) waited_ns: AtomicU64,
    pub(crate) line: Lock<Line>,
    pub(crate) moved: Signal,
}

impl Ground for Device {
    fn gate(&self) -> &LaunchGate {
        &self.gate
    }
    fn costs(&self) -> &CostTable {
        &self.costs
    }
    fn memory(&self) -> &MemoryAccount {
        &self.memory
    }
}

impl Device {
    pub(crate) fn new(ordinal: i32, memory: MemoryAccount) -> Self {
        Self {
            ordinal,
            gate: LaunchGate::new(),
            costs: CostTable::new(),
            calls: CallTime::default(),
            memory,
            pending: Lock::default(),
            launches: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            measures_all: AtomicBool::new(false),
            turned_away: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            measuring: AtomicU64::new(0),
            line: Lock::default(),
            moved: Signal::new(),
        }
    }

    /// Takes the measurements under way.
    pub(crate) fn take_pending(&self) -> Vec<Pending> {
        core::mem::take(&mut *self.pending.lock())
    }

    /// Wakes the waiting threads after a change that may concern them.
    pub(crate) fn wake(&self) {
        // A thread that has just looked in vain is asleep by the time the line is free.
        drop(self.line.lock());
        self.moved.notify();
    }

    pub(crate) fn push(&self, pending: Pending) {
        self.pending.lock().push(pending);
    }

    /// Waits while `pending` holds, for `most` at most, and looks again after each change.
    pub(crate) fn wait_while(&self, most: StdDuration, mut pending: impl FnMut() -> bool) {
        let line = self.line.lock();
        drop(self.moved.wait_while(line, most, |_| pending()));
    }
}
