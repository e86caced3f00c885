//! The launch path.
//!
//! # Problem
//! A launch takes 2 us on a real device. Metering it must cost a hundredth of that, must not ask anybody, must not
//! take a lock, and must still hold the limit for a program that never synchronises.
//!
//! # Terms
//! - **row**: what is known about the cost of this function at this size ([`gshare_meter::cost`]).
//! - **run**: consecutive launches of one thread on one stream. A thread keeps [`RUNS`] of them.
//! - **segment**: the part of a run between two CUDA events. It is what is measured.
//!
//! # Algorithm
//! While credit lasts: read the switch, find the row, subtract its cost from what the run has prepaid, call the driver.
//! A run prepays [`PREPAY_NS`] at a time out of its thread's shard of the credit, with one atomic operation; launches
//! that cost more than that take it each. All else is colder still:
//!
//! 1. *Unknown cost*: the launch gets an event pair of its own and is charged a guess. While such a launch of the same
//!    row is being measured, the next one waits for the result (at most [`PROBE_WAIT`]): two kernels of 30 ms at a guess
//!    of 0.5 ms would be a debt of more than half a second for a client that may have a tenth of the time.
//! 2. *Segment full* ([`full_ns`] of predicted time or [`SEGMENT_LAUNCHES`]): its end event is recorded and the pair
//!    goes to the helper thread, which measures, corrects the account and lets credit in.
//! 3. *No credit*: the thread records the end of its own segments, so that their completion can be seen, and waits its
//!    turn, first come, first served, before the real call and with no lock held.
//! 4. *A synchronising call*: segments worth measuring are ended before it; short ones are settled as predicted, but for one
//!    now and then, and for the next ones after a call that waited longer than what was open explains. One in four is timed.
//! 5. *Another context becomes current*: segments end while their events can still be recorded.
//! 6. *Doubt*: segments that took longer than predicted prove nothing when their stream may have run dry. Now and then the next
//!    launch is measured alone; a short one with its stream kept waiting meanwhile, so that the time of the launch call is not
//!    measured with it ([`crate::hold`]).
//!
//! The time between two events holds the call of the first launch when the stream was empty before it: the device cannot begin earlier.
//! Where that was so it is left out (`lead`). The calls of later launches count only when they keep the device waiting, and a segment
//! in which they may have is charged what was predicted.
//!
//! Launches on a stream that is being captured pass free and untouched; they are charged when the graph is launched. While
//! any stream is being captured no event is recorded anywhere.
//!
//! # Cost
//! Hot case: a few loads, and additions to the thread's own record. No clock, lock, system call or allocation; two event
//! records per segment. What is prepaid and not launched is charged like work in flight, and given back when its thread
//! waits or ends: at most [`PREPAY_NS`] for each stream that a thread uses.
#![allow(unsafe_code)] // a thread's own record behind its thread-local word, and calls to the driver

use core::cell::UnsafeCell;
use core::ffi::c_uint;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration as StdDuration;

use gshare_core::Duration;
use gshare_core::gate::LaunchGate;
use gshare_cuda_abi::types::CUresult;
use gshare_meter::cost::{CostTable, Row, shape};
use gshare_meter::segment::{
    MEASURED_EVERY_NS, PREPAY_NS, UNMEASURED, UNMEASURED_IN_DOUBT, WORTHWHILE_NS, full_ns,
};
use gshare_meter::{Ground, Measured, MemoryAccount, OpenRun, SHORT_NS, Segment};

use crate::clock;
use crate::context::{self, Context, Event, Pair};
use crate::control::{CONTROL, State};
use crate::driver::real;
use crate::hold::Begun;
use crate::lifecycle::{self, Runtime};
use crate::tls;
use crate::trace::{Cause, Waiting};

/// Streams that a thread's launches are tracked on at once.
pub(crate) const RUNS: usize = 4;
/// The segment has launches in it that say nothing about its row.
const MIXED: u32 = u32::MAX;
/// Launches of a full segment.
const SEGMENT_LAUNCHES: u32 = 16_384;
/// The longest that the call of a kernel's launch takes, in ns: one that took longer was interrupted.
const CALL_NS: u64 = 10_000;
/// Launches of unknown cost that go ahead unmeasured.
const PROBES: u32 = 1;
/// How long a launch of unknown cost waits for a measurement.
const PROBE_WAIT: StdDuration = StdDuration::from_millis(200);
/// How long a thread waits in line without the line moving before it stops waiting for those ahead.
const LINE_STUCK: StdDuration = StdDuration::from_secs(2);
/// `CU_STREAM_LEGACY`; below it, the default stream.
const LEGACY_STREAM: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_STREAM: usize = 2;

/// A measurement under way, for the helper thread.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) context: Arc<Context>,
    pub(crate) pair: Pair,
    pub(crate) segment: Segment,
}

/// One thread's launches on one stream.
#[derive(Debug)]
#[repr(C, align(128))] // found by a shift; a launch reads and writes the first line only
struct Run {
    shared: Shared,
    own: UnsafeCell<Own>,
}

/// The part of a run that the helper thread reads, and in which it writes `presumed`.
#[derive(Debug, Default)]
#[repr(C)]
struct Shared {
    device: AtomicPtr<Device>,
    /// Credit that is charged already, in ns.
    prepaid: AtomicU64,
    /// Predicted cost of the launches since the segment began, of those before it that no event covers, and of those of both
    /// that the helper presumes complete, in ns.
    predicted: AtomicU64,
    carried: AtomicU64,
    presumed: AtomicU64,
}

/// The part of a run that only its thread touches.
#[derive(Debug)]
#[repr(C)]
struct Own {
    stream: usize,
    /// Launches since the segment began, and how many there may be before the slow way is due.
    count: u32,
    limit: u32,
    row: Row,
    /// Not 0 when there are launches of other rows.
    mixed: u32,
    /// Times the run is full, or its thread synchronises, before a segment begins again; and what that begins at.
    skip: u8,
    unmeasured: u8,
    /// A segment is skipped because the thread synchronises after a few short launches.
    idle_skip: bool,
    begun: u32,
    start: Option<(Event, Arc<Context>)>,
    /// Predicted cost of the first launch, and when the segment began, in ns.
    first: u64,
    opened: u64,
    /// How much of the first launch's call may be the reason that the device had nothing to do, and how much was, in ns.
    slack: u32,
    lead: u32,
    /// Charged cost of the launches that were open when the thread last synchronised, in ns.
    awaited: u64,
    /// [`crate::control::Control::destroyed`] when the segment began.
    destroyed: u64,
}

/// A run in the hands of its thread.
#[derive(Debug)]
struct Mine<'a> {
    shared: &'a Shared,
    own: &'a mut Own,
}

impl core::ops::Deref for Mine<'_> {
    type Target = Own;
    #[inline(always)]
    fn deref(&self) -> &Own {
        self.own
    }
}

impl core::ops::DerefMut for Mine<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Own {
        self.own
    }
}

impl Run {
    fn new() -> Self {
        let own = Own {
            stream: usize::MAX,
            count: 0,
            limit: 0,
            row: Row::default(),
            mixed: 0,
            skip: 0,
            unmeasured: UNMEASURED_IN_DOUBT,
            idle_skip: false,
            begun: 0,
            start: None,
            first: 0,
            opened: 0,
            slack: 0,
            lead: 0,
            awaited: 0,
            destroyed: 0,
        };
        Self { shared: Shared::default(), own: UnsafeCell::new(own) }
    }
}

impl Mine<'_> {
    /// Only the owner writes the device; it is null or leaked.
    #[inline(always)]
    fn is_on(&self, stream: usize, device: &Device) -> bool {
        self.stream == stream && core::ptr::eq(self.shared.device.load(Ordering::Relaxed), device)
    }

    fn device(&self) -> Option<&'static Device> {
        // SAFETY: null, or a leaked device.
        unsafe { self.shared.device.load(Ordering::Relaxed).as_ref() }
    }

    /// The launches so far are covered by no event of the segment that begins.
    fn carry(&mut self) {
        self.count = 0;
        let predicted = self.shared.predicted.load(Ordering::Relaxed);
        self.shared.carried.fetch_add(predicted, Ordering::AcqRel);
        self.shared.predicted.store(0, Ordering::Release);
    }

    /// Takes the open launches out.
    fn take_open(&mut self) -> Taken {
        self.count = 0;
        let presumed = self.shared.presumed.swap(0, Ordering::AcqRel);
        let (predicted, carried) =
            (self.shared.predicted.swap(0, Ordering::AcqRel), self.shared.carried.swap(0, Ordering::AcqRel));
        // What was launched first was over first.
        let carried_presumed = presumed.min(carried);
        let presumed = (presumed - carried_presumed).min(predicted);
        Taken { predicted: predicted - presumed, presumed, carried: carried - carried_presumed }
    }

    /// Gives back what is prepaid.
    fn refund(&mut self) {
        let prepaid = self.shared.prepaid.swap(0, Ordering::AcqRel);
        if let Some(device) = self.device().filter(|_| prepaid > 0) {
            device.refused.fetch_add(prepaid, Ordering::AcqRel);
        }
    }

    /// Makes the run this stream's.
    fn take_over(&mut self, stream: usize, device: &'static Device) {
        if self.is_on(stream, device) {
            return;
        }
        end(self, Ending::Taken);
        self.refund();
        (self.stream, self.mixed, self.skip) = (stream, 0, 0);
        self.shared.device.store(core::ptr::from_ref(device).cast_mut(), Ordering::Relaxed);
    }

    /// Counts a launch of this cost.
    #[inline(always)]
    fn add(&mut self, row: Row, cost: u64) {
        self.shared.predicted.store(self.shared.predicted.load(Ordering::Relaxed) + cost, Ordering::Release);
        self.count += 1;
        self.mixed |= self.row.difference(row);
    }
}

/// What was open in a run: predicted cost of the segment's launches, less what was presumed done of it, and of those before.
struct Taken {
    predicted: u64,
    presumed: u64,
    carried: u64,
}

/// What the meter keeps about a thread. Never freed; reused when its thread is gone.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ThreadRecord {
    number: usize,
    pub(crate) launches: AtomicU64,
    /// Calls that wait for the device.
    pub(crate) syncs: AtomicU64,
    pub(crate) taken: AtomicBool,
    runs: [Run; RUNS],
    /// The launch that is being measured alone, between its two events.
    alone: UnsafeCell<Option<Alone>>,
}

// SAFETY: `alone` and the `own` part of each run are touched by the record's own thread only (`run`, `all_runs` and `alone` say
// so); the rest is atomic. `taken` passes the record from one thread to the next.
unsafe impl Sync for ThreadRecord {}

impl ThreadRecord {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            number,
            launches: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            taken: AtomicBool::new(true),
            runs: core::array::from_fn(|_| Run::new()),
            alone: UnsafeCell::new(None),
        }
    }

    /// What each run has open on a device, for the helper.
    pub(crate) fn open_runs(&self, device: &Device) -> [OpenRun; RUNS] {
        self.runs.each_ref().map(|Run { shared, .. }| {
            if !core::ptr::eq(shared.device.load(Ordering::Relaxed), device) {
                return OpenRun::default();
            }
            OpenRun {
                predicted: shared.predicted.load(Ordering::Acquire) + shared.carried.load(Ordering::Acquire),
                presumed: shared.presumed.load(Ordering::Acquire),
                prepaid: shared.prepaid.load(Ordering::Acquire),
            }
        })
    }

    /// Presumes a run's open launches complete: its thread has been elsewhere for long.
    pub(crate) fn presume_done(&self, index: usize, predicted: u64) {
        self.runs[index % RUNS].shared.presumed.store(predicted, Ordering::Release);
    }

    /// The run that a stream uses.
    ///
    /// # Safety
    /// Only the record's own thread may call this, and not while it holds a run.
    #[inline(always)]
    unsafe fn run(&self, stream: usize) -> Mine<'_> {
        let Run { shared, own } = &self.runs[place(stream)];
        // SAFETY: as the caller promises, nobody else has a reference to `own`.
        Mine { shared, own: unsafe { &mut *own.get() } }
    }

    /// All runs.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn all_runs(&self) -> [Mine<'_>; RUNS] {
        self.runs.each_ref().map(|Run { shared, own }| {
            // SAFETY: as the caller promises, nobody else has a reference to `own`; each is taken once.
            Mine { shared, own: unsafe { &mut *own.get() } }
        })
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
        // Whoever has just looked in vain is asleep before the line is free.
        drop(self.line.lock().unwrap_or_else(PoisonError::into_inner));
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
            gone = watch.sees_it_gone(runtime, now);
            if gone {
                break true;
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
        wait.end(cost, passed);
        passed
    }
}

/// A launch by the program: `call` is the real one.
///
/// `handle` and `size` name its cost, `stream` is where it goes (see [`stream_of`]).
#[inline(always)]
pub(crate) fn launch(handle: u64, size: u64, stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    launch_as(handle, size, stream, CALL_NS, call)
}

/// A launch; `slack` is how much of its call's duration, in ns, may be the reason that the work started late.
#[inline(always)]
pub(crate) fn launch_as(
    handle: u64,
    size: u64,
    stream: usize,
    slack: u64,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let ticket = admit(handle, size, stream, slack);
    if ticket.verdict == Verdict::Fail {
        return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
    }
    let result = call();
    if ticket.verdict > Verdict::Paid || (ticket.verdict == Verdict::Paid && !result.is_ok()) {
        conclude(ticket, stream, result);
    }
    result
}

/// What is decided about a launch before it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    /// It is not metered.
    Pass,
    /// It is paid for.
    Paid,
    /// It is paid for, and a segment begins with it.
    First,
    /// It is paid for, and the segment ends with it.
    Last,
    /// It is paid for and measured alone.
    Alone,
    /// It must fail.
    Fail,
}

#[derive(Clone, Copy, Debug)]
struct Ticket {
    verdict: Verdict,
    /// What was charged, in ns.
    cost: u64,
}

impl Ticket {
    const PASS: Self = Self { verdict: Verdict::Pass, cost: 0 };
    const FAIL: Self = Self { verdict: Verdict::Fail, cost: 0 };
}

#[inline(always)]
fn admit(handle: u64, size: u64, stream: usize, slack: u64) -> Ticket {
    if let Some(device) = CONTROL.fast()
        && let Some(thread) = own_record()
        && let (row, Some(cost)) = device.costs.find(handle, shape(size))
    {
        // SAFETY: the record is this thread's own.
        let mut run = unsafe { thread.run(stream) };
        let prepaid = run.shared.prepaid.load(Ordering::Relaxed);
        if run.is_on(stream, device) && run.count < run.limit && cost <= prepaid {
            run.shared.prepaid.store(prepaid - cost, Ordering::Relaxed);
            run.add(row, cost);
            thread.launches.store(thread.launches.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            let verdict = if run.count == run.limit { Verdict::Last } else { Verdict::Paid };
            return Ticket { verdict, cost };
        }
    }
    if CONTROL.state() == State::Off as u32 {
        return Ticket::PASS;
    }
    admit_slowly(handle, size, stream, slack)
}

/// The way of a launch that finds nothing prepaid, or anything to be done.
#[inline(never)]
fn admit_slowly(handle: u64, size: u64, stream: usize, slack: u64) -> Ticket {
    if CONTROL.state() != State::Active as u32 && !lifecycle::arm() {
        return Ticket::PASS;
    }
    if CONTROL.capturing() && is_captured(stream) {
        return Ticket::PASS;
    }
    let Some(runtime) = CONTROL.runtime() else { return Ticket::PASS };
    if runtime.sole_device().is_some() {
        return admit_here(runtime, handle, size, stream, slack);
    }
    // With several devices the stream says which one it is, and events are made in its context.
    in_context_of(stream, || admit_here(runtime, handle, size, stream, slack))
}

fn admit_here(runtime: &'static Runtime, handle: u64, size: u64, stream: usize, slack: u64) -> Ticket {
    let Some(device) = runtime.launch_device() else { return Ticket::PASS };
    let Some(thread) = own_record().or_else(|| runtime.enlist()) else { return Ticket::PASS };
    thread.launches.store(thread.launches.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    if runtime.sole_device().is_none() {
        device.launches.fetch_add(1, Ordering::Relaxed);
    }
    if device.free_running.load(Ordering::Relaxed) {
        return Ticket::PASS;
    }
    let (row, cost) = device.costs.find(handle, shape(size));
    let Some(cost) = cost else { return probe(runtime, device, thread, row, stream, slack) };
    // SAFETY: the record is this thread's own.
    unsafe { thread.run(stream) }.take_over(stream, device);
    if !pay(runtime, device, thread, stream, cost) {
        return Ticket::FAIL;
    }
    // SAFETY: as above; the last borrow has ended.
    let mut run = unsafe { thread.run(stream) };
    // A segment is due unless it has begun or there is a reason to go without.
    if run.start.is_none() && run.skip == 0 && begin(runtime, &mut run, cost, row, slack) {
        return measure_alone(runtime, device, thread, row, stream, slack, cost);
    }
    let first = run.count == 0 && run.slack > 0;
    run.add(row, cost);
    let predicted = run.shared.predicted.load(Ordering::Relaxed);
    // How many more launches like this one fit into the segment.
    let full = full_ns(run.begun);
    let more = full.saturating_sub(predicted).checked_div(cost).unwrap_or(u64::from(SEGMENT_LAUNCHES));
    let limit = u64::from(run.count) + more;
    run.limit = u32::try_from(limit).map_or(SEGMENT_LAUNCHES, |limit| limit.min(SEGMENT_LAUNCHES));
    let last = predicted >= full || run.count >= run.limit;
    let verdict = match (first, last) {
        (_, true) => Verdict::Last,
        (true, false) => Verdict::First,
        (false, false) => Verdict::Paid,
    };
    Ticket { verdict, cost }
}

/// After the call: the segment ends, the launch was measured alone, or the driver refused it.
#[cold]
fn conclude(ticket: Ticket, stream: usize, result: CUresult) {
    match CONTROL.runtime() {
        Some(runtime) if runtime.sole_device().is_none() => {
            in_context_of(stream, || conclude_here(ticket, stream, result));
        }
        _ => conclude_here(ticket, stream, result),
    }
}

fn conclude_here(ticket: Ticket, stream: usize, result: CUresult) {
    let Some(thread) = own_record() else { return };
    if ticket.verdict == Verdict::Alone {
        return conclude_alone(thread, ticket.cost, result);
    }
    // SAFETY: the record is this thread's own.
    let mut run = unsafe { thread.run(stream) };
    if run.count == 1 && run.slack > 0 {
        run.lead = saturated(clock::now_ns() - run.opened).min(run.slack);
    }
    if !result.is_ok() {
        // It did not run: nothing of it is in flight, and its cost is given back.
        let left = run.shared.predicted.load(Ordering::Relaxed).saturating_sub(ticket.cost);
        run.shared.predicted.store(left, Ordering::Release);
        run.count = run.count.saturating_sub(1);
        run.mixed = MIXED;
        if let Some(device) = run.device() {
            device.refused.fetch_add(ticket.cost, Ordering::AcqRel);
        }
    } else if ticket.verdict == Verdict::First {
        // Its segment goes on.
    } else if run.start.is_some() {
        end(&mut run, Ending::Full);
    } else {
        // A thread that fills it does not synchronise after a few short launches: the next ones are measured.
        run.skip = if run.idle_skip { 0 } else { run.skip.saturating_sub(1) };
        run.carry();
        run.limit = 0;
    }
}

/// Does something with a stream's context current, whichever is: work may be given to a stream of another device.
pub(crate) fn in_context_of<T>(stream: usize, work: impl FnOnce() -> T) -> T {
    let foreign = if stream > PER_THREAD_STREAM { foreign_context(stream) } else { None };
    // Until the end of this function.
    let _pushed = foreign.and_then(context::Pushed::new);
    work()
}

/// The context of a stream, unless it is the current one. Of a green context's stream: the primary one, where the driver tells.
fn foreign_context(stream: usize) -> Option<usize> {
    let stream = core::ptr::with_exposed_provenance_mut(stream);
    let (mut context, mut green) = (core::ptr::null_mut(), core::ptr::null_mut());
    let found = match real!(cuStreamGetCtx_v2) {
        // SAFETY: the program's own stream and valid out-pointers.
        Some(get) => unsafe { get(stream, &raw mut context, &raw mut green) },
        // SAFETY: as above.
        None => unsafe { real!(cuStreamGetCtx)?(stream, &raw mut context) },
    };
    let known = found.is_ok() && !context.is_null();
    let handle = context.expose_provenance();
    (known && context::current_handle() != Some(handle)).then_some(handle)
}

/// Takes `cost` out of what is prepaid, and prepays again. `false`: the launch must fail.
fn pay(runtime: &Runtime, device: &Device, thread: &ThreadRecord, stream: usize, cost: u64) -> bool {
    // SAFETY: the record is this thread's own; this borrow ends before the thread waits.
    let run = unsafe { thread.run(stream) };
    let prepaid = run.shared.prepaid.load(Ordering::Relaxed);
    if cost <= prepaid {
        run.shared.prepaid.store(prepaid - cost, Ordering::Relaxed);
        return true;
    }
    // Only short launches are paid for ahead.
    let ahead = if cost < PREPAY_NS { PREPAY_NS } else { 0 };
    let wanted = cost - prepaid + ahead;
    if device.gate.try_spend(thread.number, Duration::from_nanos(wanted)) {
        run.shared.prepaid.store(ahead, Ordering::Relaxed);
        return true;
    }
    // Waiting ends all segments of this thread and gives back what they have prepaid.
    device.wait_for_credit(runtime, thread, cost)
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

/// Which of a thread's runs a stream uses: the upper bits of its low half times an odd number.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the low half
fn place(stream: usize) -> usize {
    ((stream as u32).wrapping_mul(0x9E37_79B1) >> (u32::BITS - RUNS.ilog2())) as usize
}

/// The calling thread's record, if it has one.
#[inline(always)]
fn own_record() -> Option<&'static ThreadRecord> {
    // SAFETY: the word is this thread's own; it holds 0 or a record that is never freed.
    unsafe { core::ptr::with_exposed_provenance::<ThreadRecord>(*tls::word()).as_ref() }
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

/// The runs of a thread lie close together: times that are short are kept short.
fn saturated(ns: u64) -> u32 {
    u32::try_from(ns).unwrap_or(u32::MAX)
}

/// Begins a segment. `true`: measure this launch alone.
#[cold]
fn begin(runtime: &Runtime, run: &mut Mine<'_>, cost: u64, row: Row, slack: u64) -> bool {
    // What came before on this stream has no event of its own: the segment that begins here completes after it.
    run.carry();
    run.limit = 0;
    run.begun = run.begun.wrapping_add(1);
    // Where different functions take turns, a segment says little about each: now and then one is measured alone. So is what may
    // have become longer in a segment that cannot prove it.
    let mixed = core::mem::take(&mut run.mixed) != 0 && run.begun.is_multiple_of(4);
    let doubted = || run.device().is_some_and(|device| device.costs.take_doubt(row));
    if !CONTROL.capturing() && (doubted() || mixed) {
        return true;
    }
    (run.row, run.first) = (row, cost);
    (run.slack, run.lead) = (0, 0);
    // Until an event is recorded: launches are settled as predicted, and it is tried again later.
    (run.skip, run.idle_skip) = (4, false);
    run.destroyed = CONTROL.destroyed();
    if CONTROL.capturing() {
        return false;
    }
    let Some(context) = runtime.contexts.current() else { return false };
    let idle = slack > 0 && Context::is_idle(run.stream);
    if let Some(event) = context.take_recorded(run.stream) {
        run.opened = clock::now_ns();
        run.slack = if idle { saturated(slack) } else { 0 };
        run.start = Some((event, context));
        run.skip = 0;
    }
    false
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
    for mut run in unsafe { thread.all_runs() } {
        end(&mut run, why);
        if why == Ending::Waiting {
            run.refund();
        }
    }
}

/// Another context becomes current in the calling thread, or has just become: segments of others end, if possible while their
/// events can still be recorded.
pub(crate) fn switching(to: usize) {
    let Some(thread) = metered().filter(|_| to != 0) else { return };
    // SAFETY: the record is the calling thread's own.
    for mut run in unsafe { thread.all_runs() } {
        if run.start.as_ref().is_some_and(|(_, context)| context.handle() != to) {
            end(&mut run, Ending::Taken);
        }
    }
}

/// The calling thread is about to synchronise with the device.
#[inline]
pub(crate) fn synchronising() {
    if let Some(thread) = metered() {
        thread.syncs.store(thread.syncs.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        end_segments(thread, Ending::Synchronising);
    }
}

/// The calling thread synchronises with the device, by `call`. One in four is timed.
#[inline]
pub(crate) fn synchronise(call: impl FnOnce() -> CUresult) -> CUresult {
    synchronising();
    let timed = metered().filter(|thread| thread.syncs.load(Ordering::Relaxed).is_multiple_of(4));
    let Some(thread) = timed else { return call() };
    let began = clock::now_ns();
    let result = call();
    let waited = clock::now_ns() - began;
    // SAFETY: the record is the calling thread's own.
    let mut runs = unsafe { thread.all_runs() };
    let most = unmeasured(runs.iter().map(|run| run.awaited).sum(), waited);
    runs.iter_mut().for_each(|run| (run.skip, run.unmeasured) = (run.skip.min(most), most));
    result
}

/// How many such calls in a row need not be measured, by how long one has waited (both times in ns). A thread that sleeps in
/// the call takes some tens of microseconds to come back from it.
fn unmeasured(predicted: u64, waited: u64) -> u8 {
    match waited {
        _ if waited <= 2 * predicted + 20_000 => u8::try_from(MEASURED_EVERY_NS / predicted.max(1))
            .map_or(UNMEASURED, |calls| calls.min(UNMEASURED)),
        _ if waited <= 8 * predicted + 200_000 => UNMEASURED_IN_DOUBT,
        _ => 0,
    }
}

/// The calling thread's record, if launches are metered.
#[inline(always)]
fn metered() -> Option<&'static ThreadRecord> {
    if CONTROL.state() == State::Active as u32 { own_record() } else { None }
}

fn end(run: &mut Mine<'_>, why: Ending) {
    let count = run.count;
    run.awaited = run.shared.predicted.load(Ordering::Relaxed) + run.shared.carried.load(Ordering::Relaxed);
    if run.awaited == 0 && count == 0 && run.start.is_none() {
        return;
    }
    // What the helper took for done is accounted for.
    let Taken { predicted, presumed, carried } = run.take_open();
    run.limit = 0;
    let Some(device) = run.device() else { return };
    let settle = || {
        device.settled.fetch_add(predicted + carried, Ordering::AcqRel);
    };
    let measures_all = device.measures_all.load(Ordering::Relaxed);
    let Some((start, context)) = run.start.take() else {
        run.skip = if measures_all { 0 } else { run.skip.saturating_sub(1) };
        return settle();
    };
    // Programs that synchronise after a few short launches are measured now and then only.
    let short = why == Ending::Synchronising && predicted + presumed < WORTHWHILE_NS && !measures_all;
    let skip = if short { (run.unmeasured, true) } else { (0, false) };
    let gone = run.stream > PER_THREAD_STREAM && CONTROL.is_destroyed(run.stream, run.destroyed);
    // Later than right behind its launch, an event in the legacy stream holds up streams that have nothing to do with it: there
    // launches are measured alone.
    let barrier = why != Ending::Full && run.stream <= LEGACY_STREAM && CONTROL.has_blocking_streams();
    if barrier {
        (run.mixed, run.begun) = (MIXED, run.begun | 3);
        (run.skip, run.idle_skip) = skip;
    }
    // Under another context the default stream is another one, and an event made would be that context's: a program that has
    // popped the context, or set another one, gets it back for the time of one event.
    let mut pushed = None;
    let mut can_record = || {
        context.is_current() || {
            pushed = context.made_current();
            pushed.is_some()
        }
    };
    let ended = if barrier || gone || CONTROL.capturing() || count == 0 || !can_record() {
        None
    } else {
        // Everything was queued before the device could have finished the first launch, or even begun.
        let dense = presumed == 0
            && (clock::now_ns() - run.opened < run.first.saturating_add(run.lead.into())
                || Context::passed(start) == Some(false));
        context.take_recorded(run.stream).map(|end| (end, dense))
    };
    drop(pushed);
    let Some((end, dense)) = ended else {
        context.give_back(start);
        return settle();
    };
    (run.skip, run.idle_skip) = skip;
    let segment = Segment {
        predicted,
        carried,
        presumed,
        launches: count,
        row: (run.mixed == 0).then_some(run.row),
        dense,
        gap: run.lead.into(),
        of: Measured::Run,
        opened: run.opened,
    };
    device.push(Pending { context, pair: Pair { lead: None, start, end }, segment });
}

/// A launch whose cost is not known: measured alone.
#[cold]
fn probe(
    runtime: &'static Runtime,
    device: &'static Device,
    thread: &'static ThreadRecord,
    row: Row,
    stream: usize,
    slack: u64,
) -> Ticket {
    if device.costs.probes(row) >= PROBES && !CONTROL.capturing() {
        let began = clock::now_ns();
        end_segments(thread, Ending::Waiting);
        runtime.wake_helper();
        let line = device.line.lock().unwrap_or_else(PoisonError::into_inner);
        drop(device.moved.wait_timeout_while(line, PROBE_WAIT, |_| {
            device.costs.known(row).is_none() && device.costs.probes(row) >= PROBES
        }));
        runtime.waited_for_measurement(device, began);
    }
    let cost = device.costs.known(row).unwrap_or_else(|| device.costs.guess());
    device.costs.probe(row);
    if !device.gate.try_spend(thread.number, Duration::from_nanos(cost))
        && !device.wait_for_credit(runtime, thread, cost)
    {
        return Ticket::FAIL;
    }
    // The run's own segment, if any, has a stranger in it from now on.
    // SAFETY: the record is this thread's own.
    unsafe { thread.run(stream) }.mixed = MIXED;
    measure_alone(runtime, device, thread, row, stream, slack, cost)
}

/// A launch that is being measured alone.
#[derive(Debug)]
struct Alone {
    device: &'static Device,
    row: Row,
    stream: usize,
    slack: u64,
    how: Measured,
    /// The event before it, unless none could be recorded, and one before that where the stream is kept waiting.
    start: Option<(Event, Arc<Context>)>,
    lead: Option<Event>,
    /// Whether the stream was idle, and since when the launch has been under way.
    idle: bool,
    began: u64,
}

impl Alone {
    /// Records the event before it, with its stream kept waiting if it is short.
    fn record_start(&mut self, context: Arc<Context>) {
        // On an idle stream the start passes at once, and the kernel starts when the launch has come through.
        self.idle = self.slack > 0 && Context::is_idle(self.stream);
        // A call that may do more than queue work is not kept from ending.
        let short =
            self.slack == CALL_NS && self.device.costs.known(self.row).is_some_and(|ns| ns <= SHORT_NS);
        let others_wait = self.stream <= LEGACY_STREAM && CONTROL.has_blocking_streams();
        let begun = if short && !others_wait { context.hold.begin(self.stream) } else { Begun::Never };
        match begun {
            Begun::Yes => self.lead = context.take_recorded(self.stream),
            // What would be measured is the time of the call.
            Begun::Busy => return,
            Begun::Never => {}
        }
        let start = context.take_recorded(self.stream);
        if begun == Begun::Yes && (start.is_none() || self.lead.is_none()) {
            context.hold.end();
            start.into_iter().chain(self.lead.take()).for_each(|event| context.give_back(event));
            return;
        }
        if begun == Begun::Never {
            self.began = clock::now_ns();
        }
        self.start = start.map(|start| (start, context));
    }
}

/// Records the event before a launch; its cost has been paid.
#[cold]
fn measure_alone(
    runtime: &'static Runtime,
    device: &'static Device,
    thread: &'static ThreadRecord,
    row: Row,
    stream: usize,
    slack: u64,
    cost: u64,
) -> Ticket {
    let how = if device.costs.known(row).is_none() { Measured::First } else { Measured::Alone };
    let began = clock::now_ns();
    let mut alone = Alone { device, row, stream, slack, how, start: None, lead: None, idle: false, began };
    let context = if CONTROL.capturing() { None } else { runtime.contexts.current() };
    if let Some(context) = context {
        alone.record_start(context);
    }
    // SAFETY: the record is this thread's own.
    unsafe { *thread.alone.get() = Some(alone) };
    Ticket { verdict: Verdict::Alone, cost }
}

/// Records the event after a launch.
fn conclude_alone(thread: &ThreadRecord, cost: u64, result: CUresult) {
    // SAFETY: the record is this thread's own.
    let Some(alone) = (unsafe { (*thread.alone.get()).take() }) else { return };
    let device = alone.device;
    let (lead, how) = (alone.lead, if alone.lead.is_some() { Measured::Held } else { alone.how });
    let gap = if alone.idle && how != Measured::Held {
        (clock::now_ns() - alone.began).min(alone.slack)
    } else {
        0
    };
    let measured = alone.start.and_then(|(start, context)| {
        let end = if result.is_ok() { context.take_recorded(alone.stream) } else { None };
        // A stream that went on by itself had nothing to do meanwhile.
        let in_time = how != Measured::Held || context.hold.end();
        match end {
            Some(end) if in_time => Some((context, Pair { lead, start, end })),
            end => {
                end.into_iter().chain(lead).chain([start]).for_each(|event| context.give_back(event));
                None
            }
        }
    });
    let Some((context, pair)) = measured else {
        let time = if result.is_ok() { &device.settled } else { &device.refused };
        time.fetch_add(cost, Ordering::AcqRel);
        // Nobody waits for a measurement that will not come; what is doubted still is.
        return match alone.how {
            Measured::First => device.costs.not_measured(alone.row),
            _ => device.costs.doubt(alone.row),
        };
    };
    let segment = Segment {
        predicted: cost,
        carried: 0,
        presumed: 0,
        launches: 1,
        row: Some(alone.row),
        dense: true,
        gap,
        of: how,
        opened: alone.began,
    };
    device.push(Pending { context, pair, segment });
}

/// The thread is gone: what it left open is settled as predicted, without a call to the driver.
pub(crate) fn retire(thread: &ThreadRecord) {
    // SAFETY: the record is the calling thread's own, which is at its end.
    for mut run in unsafe { thread.all_runs() } {
        run.refund();
        let Taken { predicted, carried, .. } = run.take_open();
        if let Some((start, context)) = run.start.take() {
            context.give_back(start);
        }
        if let Some(device) = run.device() {
            device.settled.fetch_add(predicted + carried, Ordering::AcqRel);
        }
        run.stream = usize::MAX;
        run.shared.device.store(core::ptr::null_mut(), Ordering::Relaxed);
    }
    thread.taken.store(false, Ordering::Release);
}
