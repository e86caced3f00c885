//! One GPU as a process launches on it: its credit and costs, what awaits measurement, and the threads that wait for credit.

pub(crate) mod book;
pub(crate) mod context;
pub(crate) mod hold;

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration as StdDuration;

use gshare_core::Duration;
use gshare_core::gate::LaunchGate;
use gshare_meter::cost::CostTable;
use gshare_meter::launch::Ending;
use gshare_meter::{Ground, MemoryAccount, Segment};

use crate::device::context::{Context, Pair};
use crate::launch::runs::ThreadRecord;
use crate::launch::segments::end_segments;
use crate::process::control::{CONTROL, State};
use crate::process::lifecycle::{self, Runtime};
use crate::sys::clock;
use crate::wait_ring::{Cause, Waiting};

/// How long a thread waits in line without the line moving before it stops waiting for those ahead.
pub(crate) const LINE_STUCK: StdDuration = StdDuration::from_secs(2);

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
    next: u64,
    serving: u64,
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
    pub(crate) memory: MemoryAccount,
    pending: Mutex<Vec<Pending>>,
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
    /// The daemon is gone and the policy is to launch nothing.
    pub(crate) shut: AtomicBool,
    pub(crate) waiting: AtomicU64,
    pub(crate) waited_ns: AtomicU64,
    pub(crate) why: Cause,
    line: Mutex<Line>,
    moved: Condvar,
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
            memory,
            pending: Mutex::default(),
            launches: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            measures_all: AtomicBool::new(false),
            free_running: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            why: Cause::new(),
            line: Mutex::default(),
            moved: Condvar::new(),
        }
    }

    /// Takes what is to be measured.
    pub(crate) fn take_pending(&self) -> Vec<Pending> {
        core::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Something changed that a waiting thread may be waiting for.
    pub(crate) fn wake(&self) {
        // A thread that has just looked in vain is asleep before the line is free.
        drop(self.line.lock().unwrap_or_else(PoisonError::into_inner));
        self.moved.notify_all();
    }

    pub(crate) fn push(&self, pending: Pending) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).push(pending);
    }

    /// Waits while something is `pending`, and for `most` at most; looks again whenever something has changed.
    pub(crate) fn wait_while(&self, most: StdDuration, mut pending: impl FnMut() -> bool) {
        let line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.moved.wait_timeout_while(line, most, |_| pending()));
    }

    /// Waits in line for credit, then spends.
    #[cold]
    pub(crate) fn wait_for_credit(&self, runtime: &Runtime, thread: &ThreadRecord, cost: u64) -> Passed {
        let began = clock::now_ns();
        end_segments(thread, Ending::Waiting);
        let mut wait = Waiting::new(runtime, self, began);
        self.waiting.fetch_add(1, Ordering::AcqRel);
        runtime.wake_helper();
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = line.next;
        line.next += 1;
        let (mut seen, mut stuck_since) = (line.serving, began);
        let (mut watch, mut gone) = (lifecycle::Watch::new(runtime, began), false);
        let passed = loop {
            if self.shut.load(Ordering::Acquire) {
                break Passed::Failed;
            }
            // Switched off while waiting, or the helper is gone: nothing would ever let credit in.
            if CONTROL.state() != State::Active as u32 || self.free_running.load(Ordering::Acquire) {
                break Passed::Unmetered;
            }
            let now = clock::now_ns();
            if line.serving != seen {
                (seen, stuck_since) = (line.serving, now);
            }
            let front = line.serving >= ticket || u128::from(now - stuck_since) > LINE_STUCK.as_nanos();
            if front && self.gate.try_spend(Duration::from_nanos(cost)) {
                break Passed::Paid;
            }
            gone = watch.sees_it_gone(runtime, now);
            if gone {
                break Passed::Unmetered;
            }
            wait.look(now);
            line = self
                .moved
                .wait_timeout(line, StdDuration::from_millis(10))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        };
        line.serving = line.serving.max(ticket + 1);
        drop(line);
        if gone {
            lifecycle::stand_aside("its helper thread is gone");
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        self.waited_ns.fetch_add(clock::now_ns() - began, Ordering::Relaxed);
        self.moved.notify_all();
        wait.end(cost, passed != Passed::Failed);
        passed
    }
}
