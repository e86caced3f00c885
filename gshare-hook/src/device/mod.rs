//! One GPU as a process launches on it: its credit and costs, what awaits measurement, and the threads that wait for credit.

pub(crate) mod book;
pub(crate) mod context;
pub(crate) mod devices;
pub(crate) mod hold;

use core::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::Arc;
use std::time::Duration as StdDuration;

use gshare_core::gate::LaunchGate;
use gshare_meter::cost::CostTable;
use gshare_meter::timing::CallTime;
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

/// Threads that wait for credit, in the order of their coming.
#[derive(Debug, Default)]
pub(crate) struct Line {
    pub(crate) next: u64,
    pub(crate) serving: u64,
}

/// The end of a launch's wait for credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// Its cost is spent.
    Paid,
    /// Launches are not metered any more: nothing is spent.
    Unmetered,
    /// It must fail.
    Failed,
}

/// One GPU as a process launches on it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) gate: LaunchGate,
    pub(crate) costs: CostTable,
    /// How long calls that launch take.
    pub(crate) calls: CallTime,
    pub(crate) memory: MemoryAccount,
    pending: Lock<Vec<Pending>>,
    /// Launches on this device, counted where there are several.
    pub(crate) launches: AtomicU64,
    /// Launches that are over and were not measured: charged as predicted.
    pub(crate) settled: AtomicU64,
    /// Launches that the driver refused: charged, to be given back.
    pub(crate) refused: AtomicU64,
    /// Every segment is to be measured: see [`gshare_meter::timing::Overlap`].
    pub(crate) measures_all: AtomicBool,
    /// No limit of time applies: nothing is spent.
    pub(crate) free_running: AtomicBool,
    /// The daemon refuses the process for now: launches and allocations wait.
    pub(crate) turned_away: AtomicBool,
    /// Nothing is launched and no memory is taken: the daemon has refused the process, or is gone and that is the policy.
    pub(crate) shut: AtomicBool,
    /// Threads that wait for credit, and those that wait until the cost of a kernel has been measured.
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
            free_running: AtomicBool::new(false),
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

    /// Something changed that a waiting thread may be waiting for.
    pub(crate) fn wake(&self) {
        // A thread that has just looked in vain is asleep before the line is free.
        drop(self.line.lock());
        self.moved.notify();
    }

    pub(crate) fn push(&self, pending: Pending) {
        self.pending.lock().push(pending);
    }

    /// Waits while something is `pending`, and for `most` at most; looks again whenever something has changed.
    pub(crate) fn wait_while(&self, most: StdDuration, mut pending: impl FnMut() -> bool) {
        let line = self.line.lock();
        drop(self.moved.wait_while(line, most, |_| pending()));
    }
}
