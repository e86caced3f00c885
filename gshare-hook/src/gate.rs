//! The launch path.
//!
//! # Problem
//! A launch takes 2 us on a real device. Metering it must cost a hundredth of that, must not ask anybody, must not
//! take a lock, and must still hold the limit for a program that never synchronises.
//!
//! # Terms
//! - **row**: what is known about the cost of this function at this size ([`crate::cost`]).
//! - **run**: consecutive launches of one thread on one stream. A thread keeps [`RUNS`] of them.
//! - **segment**: the part of a run between two CUDA events. It is what is measured.
//!
//! # Algorithm
//! While credit lasts: read the switch, find the row, subtract its cost from the thread's shard of the credit, add it to
//! the run, call the driver. All else is cold:
//!
//! 1. *Unknown cost*: the launch gets an event pair of its own and is charged a guess. While two such launches of the same
//!    row are being measured, the next one waits for the result (at most [`PROBE_WAIT`]).
//! 2. *Segment full* ([`SEGMENT_NS`] of predicted time or [`SEGMENT_LAUNCHES`]): its end event is recorded and the pair
//!    goes to the helper thread, which measures, corrects the account and lets credit in.
//! 3. *No credit*: the thread records the end of its own segments, so that their completion can be seen, and waits its
//!    turn, first come, first served, before the real call and with no lock held.
//! 4. *A synchronising call*: segments worth measuring are ended before it; short ones are settled as predicted.
//!
//! Launches on a stream that is being captured pass free and untouched; they are charged when the graph is launched. While
//! any stream is being captured no event is recorded anywhere.
//!
//! # Cost
//! No clock, lock, system call or allocation in the hot case; two event records per segment.
#![allow(unsafe_code)] // a thread's own record behind its thread-local word, and calls to the driver

use core::cell::UnsafeCell;
use core::ffi::c_uint;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration as StdDuration;

use gshare_core::Duration;
use gshare_core::gate::LaunchGate;
use gshare_cuda_abi::types::CUresult;

use crate::clock;
use crate::context::{Context, Event, Pair};
use crate::control::{CONTROL, State};
use crate::cost::{CostTable, Row, shape};
use crate::driver::real;
use crate::lifecycle::{self, Runtime};
use crate::tls;

/// Streams that a thread's launches are tracked on at once.
const RUNS: usize = 4;
/// Predicted GPU time of a full segment, in ns: a fraction of any useful in-flight bound.
const SEGMENT_NS: u64 = 400_000;
/// Launches of a full segment.
const SEGMENT_LAUNCHES: u32 = 512;
/// A segment shorter than this is not worth ending at a synchronising call, in ns.
const WORTHWHILE_NS: u64 = 100_000;
/// Launches of unknown cost that go ahead unmeasured.
const PROBES: u32 = 2;
/// How long a launch of unknown cost waits for a measurement.
const PROBE_WAIT: StdDuration = StdDuration::from_millis(50);
/// How long a thread waits in line without the line moving before it stops waiting for those ahead.
const LINE_STUCK: StdDuration = StdDuration::from_secs(2);
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_STREAM: usize = 2;

/// A measurement under way, for the helper thread.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) context: Arc<Context>,
    pub(crate) pair: Pair,
    /// What its launches were charged, and what launches before it on the stream were charged that no event covers.
    pub(crate) predicted: u64,
    pub(crate) carried: u64,
    pub(crate) launches: u32,
    /// The row, if all of its launches have the same.
    pub(crate) row: Option<Row>,
    /// Whether the stream cannot have run dry within it.
    pub(crate) dense: bool,
    /// Time before the first kernel could start that is no GPU time, in ns.
    pub(crate) gap: u64,
    /// When its first launch was queued.
    pub(crate) opened: u64,
}

/// One thread's launches on one stream. Written by its thread; the helper reads the atomics.
#[derive(Debug)]
struct Run {
    stream: usize,
    device: *const Device,
    row: Option<Row>,
    mixed: bool,
    start: Option<(Event, Arc<Context>)>,
    /// Predicted cost of the first launch, and when the segment began, in ns.
    first: u64,
    opened: u64,
    /// Charged to launches on this stream before the segment, and covered by no event.
    carried: u64,
    count: u32,
    /// [`crate::control::Control::destroyed`] when the run began.
    destroyed: u64,
    skip: u8,
    begun: u32,
    /// Predicted cost of the launches since the segment began, for the owner and, less what it took, for the helper.
    sum: u64,
    predicted: AtomicU64,
}

/// What the meter keeps about a thread. Never freed; reused when its thread is gone.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ThreadRecord {
    number: usize,
    pub(crate) launches: AtomicU64,
    pub(crate) taken: AtomicBool,
    runs: UnsafeCell<[Run; RUNS]>,
}

// SAFETY: `runs` is touched by the record's own thread only, but for the atomics in it, which the helper reads through
// `open_runs`; `taken` passes the record from one thread to the next.
unsafe impl Sync for ThreadRecord {}
// SAFETY: as above; the raw device pointers point to leaked devices.
unsafe impl Send for ThreadRecord {}

impl ThreadRecord {
    pub(crate) fn new(number: usize) -> Self {
        let run = || Run {
            stream: usize::MAX,
            device: core::ptr::null(),
            row: None,
            mixed: false,
            start: None,
            first: 0,
            opened: 0,
            carried: 0,
            count: 0,
            destroyed: 0,
            skip: 0,
            begun: 0,
            sum: 0,
            predicted: AtomicU64::new(0),
        };
        Self {
            number,
            launches: AtomicU64::new(0),
            taken: AtomicBool::new(true),
            runs: UnsafeCell::new(core::array::from_fn(|_| run())),
        }
    }

    /// Predicted cost of each run's open launches, for the helper.
    pub(crate) fn open_runs(&self) -> [u64; RUNS] {
        core::array::from_fn(|index| self.predicted(index).load(Ordering::Acquire))
    }

    /// Takes what a run has open, if it is still this much: its thread has been elsewhere for long, so it is over.
    pub(crate) fn presume_done(&self, index: usize, predicted: u64) -> bool {
        self.predicted(index).compare_exchange(predicted, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn predicted(&self, index: usize) -> &AtomicU64 {
        let run = self.runs.get().cast::<Run>().wrapping_add(index % RUNS);
        // SAFETY: only the atomic is borrowed, through a pointer into a record that is never freed.
        unsafe { &(*run).predicted }
    }
}

/// Threads that wait for credit, in the order of their coming.
#[derive(Debug, Default)]
struct Line {
    next: u64,
    serving: u64,
}

/// One GPU as a process launches on it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) gate: LaunchGate,
    pub(crate) costs: CostTable,
    pub(crate) memory: crate::memory::Account,
    pub(crate) pending: Mutex<Vec<Pending>>,
    /// Launches that are over and were not measured: charged as predicted.
    pub(crate) settled: AtomicU64,
    /// Launches that the driver refused: charged, to be given back.
    pub(crate) refused: AtomicU64,
    /// No limit of time applies: nothing is spent.
    pub(crate) free_running: AtomicBool,
    /// The daemon is gone and the policy is to launch nothing.
    pub(crate) shut: AtomicBool,
    pub(crate) waiting: AtomicU64,
    pub(crate) waited_ns: AtomicU64,
    line: Mutex<Line>,
    moved: Condvar,
}

impl Device {
    pub(crate) fn new(ordinal: i32, memory: crate::memory::Account) -> Self {
        Self {
            ordinal,
            gate: LaunchGate::new(),
            costs: CostTable::new(),
            memory,
            pending: Mutex::default(),
            settled: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            free_running: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            line: Mutex::default(),
            moved: Condvar::new(),
        }
    }

    /// Something changed that a waiting thread may be waiting for.
    pub(crate) fn wake(&self) {
        self.moved.notify_all();
    }

    fn push(&self, pending: Pending) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).push(pending);
    }

    /// Waits in line for credit, then spends. `false`: the launch must fail.
    #[cold]
    fn wait_for_credit(&self, runtime: &Runtime, thread: &ThreadRecord, cost: u64) -> bool {
        let began = clock::now_ns();
        end_segments(thread, Ending::Waiting);
        self.waiting.fetch_add(1, Ordering::AcqRel);
        runtime.wake_helper();
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = line.next;
        line.next += 1;
        let (mut seen, mut stuck_since) = (line.serving, began);
        let passed = loop {
            if self.shut.load(Ordering::Acquire) {
                break false;
            }
            // Switched off while waiting, or the helper is gone: nothing would ever let credit in.
            if CONTROL.state() != State::Active as u32 || self.free_running.load(Ordering::Acquire) {
                break true;
            }
            let now = clock::now_ns();
            if line.serving != seen {
                (seen, stuck_since) = (line.serving, now);
            }
            let front = line.serving >= ticket || u128::from(now - stuck_since) > LINE_STUCK.as_nanos();
            if front && self.gate.try_spend(thread.number, Duration::from_nanos(cost)) {
                break true;
            }
            if runtime.helper_is_gone(now) {
                lifecycle::stand_aside("its helper thread is gone");
                break true;
            }
            line = self
                .moved
                .wait_timeout(line, StdDuration::from_millis(10))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        };
        line.serving = line.serving.max(ticket + 1);
        drop(line);
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        self.waited_ns.fetch_add(clock::now_ns() - began, Ordering::Relaxed);
        self.moved.notify_all();
        passed
    }
}

/// A launch by the program: `call` is the real one.
///
/// `handle` and `size` name its cost, `stream` is where it goes (see [`stream_of`]).
#[inline(always)]
pub(crate) fn launch(handle: u64, size: u64, stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    launch_as(handle, size, stream, false, call)
}

/// A launch; `blocking` if the call may return only after the work is done.
#[inline(always)]
pub(crate) fn launch_as(
    handle: u64,
    size: u64,
    stream: usize,
    blocking: bool,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let state = CONTROL.state();
    if state == State::Off as u32 || (state != State::Active as u32 && !lifecycle::arm()) {
        return call();
    }
    if CONTROL.capturing() && is_captured(stream) {
        return call();
    }
    let Some(runtime) = CONTROL.runtime() else { return call() };
    let Some(device) = runtime.launch_device() else { return call() };
    let Some(thread) = thread(runtime) else { return call() };
    thread.launches.store(thread.launches.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    if device.free_running.load(Ordering::Relaxed) {
        return call();
    }
    let (row, cost) = device.costs.find(handle, shape(size));
    let Some(cost) = cost else { return probe(runtime, device, thread, row, stream, blocking, call) };
    if !device.gate.try_spend(thread.number, Duration::from_nanos(cost))
        && !device.wait_for_credit(runtime, thread, cost)
    {
        return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
    }
    // SAFETY: the record is this thread's own, and nothing below calls back into the wrappers.
    let run = unsafe { &mut (&mut *thread.runs.get())[place(stream)] };
    if (run.stream != stream || !core::ptr::eq(run.device, device) || (run.start.is_none() && run.skip == 0))
        && begin(runtime, device, thread, stream, cost, row)
    {
        return alone(runtime, device, row, stream, blocking, cost, call);
    }
    let result = call();
    // SAFETY: as above; the borrow before the call has ended.
    let run = unsafe { &mut (&mut *thread.runs.get())[place(stream)] };
    run.predicted.store(run.predicted.load(Ordering::Relaxed) + cost, Ordering::Release);
    run.sum += cost;
    run.count += 1;
    run.mixed |= run.row != Some(row);
    if run.sum >= SEGMENT_NS || run.count >= SEGMENT_LAUNCHES || !result.is_ok() {
        full(device, run, cost, result);
    }
    result
}

/// A function handle is gone: what was learned about it says nothing about the next one there.
pub(crate) fn forget(handle: u64, size: u64) {
    if let Some(device) = CONTROL.runtime().and_then(|runtime| runtime.launch_device()) {
        device.costs.forget(handle, shape(size));
    }
}

/// The stream as one number: the default stream is told apart by flavour.
#[inline(always)]
pub(crate) fn stream_of<T>(stream: *mut T, per_thread: bool) -> usize {
    let stream = stream.addr();
    if per_thread && stream == 0 { PER_THREAD_STREAM } else { stream }
}

/// Which of a thread's runs a stream uses.
#[inline(always)]
fn place(stream: usize) -> usize {
    (stream ^ stream >> 4 ^ stream >> 8) % RUNS
}

/// The calling thread's record.
#[inline(always)]
pub(crate) fn thread(runtime: &'static Runtime) -> Option<&'static ThreadRecord> {
    // SAFETY: the word is this thread's own; it holds 0 or a record that is never freed.
    match unsafe { core::ptr::with_exposed_provenance::<ThreadRecord>(*tls::word()).as_ref() } {
        Some(thread) => Some(thread),
        None => runtime.enlist(),
    }
}

/// Whether a launch on this stream becomes part of a graph.
#[cold]
pub(crate) fn is_captured(stream: usize) -> bool {
    let Some(query) = real!(cuStreamIsCapturing) else { return false };
    let mut status: c_uint = 0;
    // SAFETY: a valid out-pointer and the program's own stream.
    let result = unsafe { query(core::ptr::with_exposed_provenance_mut(stream), &raw mut status) };
    // An error is CAPTURE_IMPLICIT: the launch will fail by itself.
    !result.is_ok() || status != 0
}

/// Gives the run of this stream to the stream, and begins a segment if one is due. `true`: measure this launch alone.
#[cold]
fn begin(
    runtime: &Runtime,
    device: &'static Device,
    thread: &ThreadRecord,
    stream: usize,
    cost: u64,
    row: Row,
) -> bool {
    // SAFETY: the record is the calling thread's own.
    let run = unsafe { &mut (&mut *thread.runs.get())[place(stream)] };
    if run.stream != stream || !core::ptr::eq(run.device, device) {
        end(run, Ending::Taken);
        (run.stream, run.device, run.mixed) = (stream, device, false);
        run.destroyed = CONTROL.destroyed();
    }
    // What came before on this stream has no event of its own: the segment that begins here completes after it.
    run.carried += run.predicted.swap(0, Ordering::AcqRel);
    (run.count, run.sum, run.begun) = (0, 0, run.begun.wrapping_add(1));
    // Where different functions take turns, a segment says little about each: now and then one is measured alone.
    if core::mem::take(&mut run.mixed) && run.begun.is_multiple_of(4) && !CONTROL.capturing() {
        run.row = None;
        return true;
    }
    (run.row, run.first) = (Some(row), cost);
    // Until an event is recorded: launches are settled as predicted, and it is tried again later.
    run.skip = 4;
    if CONTROL.capturing() {
        return false;
    }
    let Some(context) = runtime.contexts.current() else { return false };
    let Some(event) = context.take_event() else { return false };
    if Context::record(event, stream) {
        run.opened = clock::now_ns();
        run.start = Some((event, context));
        run.skip = 0;
    } else {
        context.give_back(event);
    }
    false
}

/// A segment has reached its size, or the driver refused a launch.
#[cold]
fn full(device: &'static Device, run: &mut Run, cost: u64, result: CUresult) {
    if !result.is_ok() {
        // It did not run: nothing of it is in flight, and its cost is given back.
        let left = run.predicted.load(Ordering::Relaxed).saturating_sub(cost);
        run.predicted.store(left, Ordering::Release);
        run.sum -= cost;
        run.count -= 1;
        run.mixed = true;
        device.refused.fetch_add(cost, Ordering::AcqRel);
        return;
    }
    if run.start.is_some() {
        end(run, Ending::Full);
    } else if run.skip > 0 {
        run.skip -= 1;
        run.carried += run.predicted.swap(0, Ordering::AcqRel);
        (run.count, run.sum) = (0, 0);
    }
}

/// Why a segment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It has its size.
    Full,
    /// Its thread will wait for credit.
    Waiting,
    /// Its thread will synchronise with the device.
    Synchronising,
    /// Another stream needs its place.
    Taken,
}

/// Ends the segments of the calling thread.
pub(crate) fn end_segments(thread: &ThreadRecord, why: Ending) {
    // SAFETY: the record is the calling thread's own.
    for run in unsafe { &mut *thread.runs.get() } {
        end(run, why);
    }
}

/// The calling thread is about to synchronise with the device.
#[inline]
pub(crate) fn synchronising() {
    if CONTROL.state() != State::Active as u32 {
        return;
    }
    // SAFETY: the word is this thread's own; it holds 0 or a record that is never freed.
    if let Some(thread) = unsafe { core::ptr::with_exposed_provenance::<ThreadRecord>(*tls::word()).as_ref() }
    {
        end_segments(thread, Ending::Synchronising);
    }
}

fn end(run: &mut Run, why: Ending) {
    let (sum, count) = (core::mem::take(&mut run.sum), core::mem::take(&mut run.count));
    // Less than the sum when the helper presumed these launches done: then only what is left counts as predicted.
    let predicted = run.predicted.swap(0, Ordering::AcqRel);
    if count == 0 && run.start.is_none() && run.carried == 0 {
        return;
    }
    // SAFETY: null, or a leaked device.
    let Some(device) = (unsafe { run.device.as_ref() }) else { return };
    let carried = core::mem::take(&mut run.carried);
    let settle = |time: u64| {
        device.settled.fetch_add(time, Ordering::AcqRel);
    };
    let Some((start, context)) = run.start.take() else {
        run.skip = run.skip.saturating_sub(1);
        return settle(predicted + carried);
    };
    let gone = run.destroyed != CONTROL.destroyed() && run.stream > PER_THREAD_STREAM;
    let worthwhile = why != Ending::Synchronising || predicted >= WORTHWHILE_NS || run.skip == 0;
    if gone || CONTROL.capturing() || count == 0 || !worthwhile {
        context.give_back(start);
        return settle(predicted + carried);
    }
    // Everything was queued before the device could have finished the first launch, or even begun.
    let dense = predicted == sum
        && (clock::now_ns() - run.opened < run.first || Context::passed(start) == Some(false));
    let Some(end) = context.take_event() else {
        context.give_back(start);
        return settle(predicted + carried);
    };
    if !Context::record(end, run.stream) {
        context.give_back(start);
        context.give_back(end);
        return settle(predicted + carried);
    }
    // Programs that synchronise after a few short launches are measured now and then only.
    run.skip = if why == Ending::Synchronising && predicted < WORTHWHILE_NS { 7 } else { 0 };
    device.push(Pending {
        context,
        pair: Pair { start, end },
        predicted,
        carried,
        launches: count,
        row: run.row.filter(|_| !run.mixed),
        dense,
        gap: 0,
        opened: run.opened,
    });
}

/// A launch whose cost is not known: measured by itself.
#[cold]
fn probe(
    runtime: &'static Runtime,
    device: &'static Device,
    thread: &'static ThreadRecord,
    row: Row,
    stream: usize,
    blocking: bool,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    if device.costs.probes(row) >= PROBES && !CONTROL.capturing() {
        end_segments(thread, Ending::Waiting);
        runtime.wake_helper();
        let line = device.line.lock().unwrap_or_else(PoisonError::into_inner);
        drop(device.moved.wait_timeout_while(line, PROBE_WAIT, |_| {
            device.costs.known(row).is_none() && device.costs.probes(row) >= PROBES
        }));
    }
    let cost = device.costs.known(row).unwrap_or_else(|| device.costs.guess());
    device.costs.probe(row);
    if !device.gate.try_spend(thread.number, Duration::from_nanos(cost))
        && !device.wait_for_credit(runtime, thread, cost)
    {
        return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
    }
    // The run's own segment, if any, has a stranger in it from now on.
    // SAFETY: the record is this thread's own.
    unsafe { (&mut *thread.runs.get())[place(stream)].mixed = true };
    alone(runtime, device, row, stream, blocking, cost, call)
}

/// A launch with an event pair of its own; its cost has been spent.
#[cold]
fn alone(
    runtime: &'static Runtime,
    device: &'static Device,
    row: Row,
    stream: usize,
    blocking: bool,
    cost: u64,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let settle = |result: CUresult| {
        let time = if result.is_ok() { &device.settled } else { &device.refused };
        time.fetch_add(cost, Ordering::AcqRel);
        result
    };
    let context = if CONTROL.capturing() { None } else { runtime.contexts.current() };
    let Some(context) = context else { return settle(call()) };
    let Some(start) = context.take_event() else { return settle(call()) };
    if !Context::record(start, stream) {
        context.give_back(start);
        return settle(call());
    }
    // On an idle stream the start passes at once, and the kernel starts when the launch below has come through.
    let idle = !blocking && Context::passed(start) == Some(true);
    let began = clock::now_ns();
    let result = call();
    let gap = if idle { clock::now_ns() - began } else { 0 };
    let end = if result.is_ok() { context.take_event() } else { None };
    let Some(end) = end else {
        context.give_back(start);
        return settle(result);
    };
    if !Context::record(end, stream) {
        context.give_back(start);
        context.give_back(end);
        return settle(result);
    }
    device.push(Pending {
        context,
        pair: Pair { start, end },
        predicted: cost,
        carried: 0,
        launches: 1,
        row: Some(row),
        dense: true,
        gap,
        opened: began,
    });
    result
}

/// The thread is gone: what it left open is settled as predicted, without a call to the driver.
pub(crate) fn retire(thread: &ThreadRecord) {
    // SAFETY: called by the thread itself, at its end.
    for run in unsafe { &mut *thread.runs.get() } {
        let left = run.predicted.swap(0, Ordering::AcqRel) + core::mem::take(&mut run.carried);
        if let Some((start, context)) = run.start.take() {
            context.give_back(start);
        }
        // SAFETY: null, or a leaked device.
        if let Some(device) = unsafe { run.device.as_ref() } {
            device.settled.fetch_add(left, Ordering::AcqRel);
        }
        (run.count, run.sum, run.stream, run.device) = (0, 0, usize::MAX, core::ptr::null());
    }
    thread.taken.store(false, Ordering::Release);
}
