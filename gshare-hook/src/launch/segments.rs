//! When a segment begins and ends: the part of a run between two CUDA events.
//!
//! - *It begins* with the first launch after another has ended, unless a reason to go without applies (`skip`).
//! - *It ends* when it is full ([`full_ns`](gshare_meter::segment::full_ns) of predicted time or [`SEGMENT_LAUNCHES`]), when its
//!   thread waits for credit or synchronises, when another context becomes current, or when another stream needs its place.
//! - *Its time* counts as measured where the device had work all the while (`dense`), and corrects the predicted cost of a row where
//!   all of its launches have that row. One whose end cannot be recorded is settled as predicted.
#![allow(unsafe_code)] // a thread's own record

use core::sync::atomic::{Ordering, fence};
use std::time::Duration;

use gshare_meter::cost::Row;
use gshare_meter::segment::{MEASURED_EVERY_NS, UNMEASURED, UNMEASURED_IN_DOUBT, WORTHWHILE_NS};
use gshare_meter::{Measured, Segment};

use crate::device::context::{Context, Pair, relaxed};
use crate::device::{Device, Pending};
use crate::launch::control::{ALL_STREAMS, CONTROL, State};
use crate::launch::metering::Metering;
use crate::launch::runs::{MIXED, Mine, NO_STREAM, Taken, ThreadRecord, own_record};
use crate::launch::streams::{LEGACY_STREAM, PER_THREAD_STREAM};
use crate::sys::clock;
use gshare_cuda_abi::types::CUresult;

/// Launches of a full segment.
pub(crate) const SEGMENT_LAUNCHES: u32 = 16_384;

/// How long a thread that destroys a stream waits for one that ends a segment there: some microseconds, and about a second at most.
const DESTROY_STEP: Duration = Duration::from_micros(100);
const DESTROY_STEPS: u32 = 5_000;

/// The runs of a thread lie close together: times that are short are kept short.
pub(crate) fn saturated(ns: u64) -> u32 {
    u32::try_from(ns).unwrap_or(u32::MAX)
}

/// Begins a segment. `true`: measure this launch alone.
#[cold]
pub(crate) fn begin(metering: &Metering, run: &mut Mine<'_>, cost: u64, row: Row, slack: u64) -> bool {
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
    let Some(context) = metering.contexts.current() else { return false };
    let idle = slack > 0 && Context::is_idle(run.stream);
    run.waits = false;
    let asked = clock::now_ns();
    if let Some(event) = context.take_recorded(run.stream) {
        run.opened = clock::now_ns();
        run.record = saturated(run.opened - asked);
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

/// The calling thread's record, if launches are metered.
#[inline(always)]
pub(crate) fn metered() -> Option<&'static ThreadRecord> {
    if CONTROL.state() == State::Active as u32 { own_record() } else { None }
}

/// Makes the run this stream's.
pub(crate) fn take_over(run: &mut Mine<'_>, stream: usize, device: &'static Device) {
    if run.is_on(stream, device) {
        return;
    }
    end(run, Ending::Taken);
    run.refund();
    (run.stream, run.mixed, run.skip) = (stream, 0, 0);
    run.shared.device.store(core::ptr::from_ref(device).cast_mut(), Ordering::Relaxed);
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

/// The calling thread makes a stream wait: for the host, for a word of memory, or for another stream. The time of the wait is not the
/// device's, so that the segment on that stream says nothing about its launches; the next ones are measured alone now and then.
pub(crate) fn waits(stream: usize) {
    let Some(thread) = metered() else { return };
    // SAFETY: the record is the calling thread's own.
    let mut run = unsafe { thread.run(stream) };
    if run.stream == stream {
        (run.waits, run.mixed) = (true, MIXED);
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

/// The calling thread synchronises with the device, by `call`. One in four that has launches to wait for is timed.
#[inline]
pub(crate) fn synchronise(call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(thread) = metered() else { return call() };
    // SAFETY: the record is the calling thread's own.
    if !unsafe { thread.all_runs() }.iter().any(Mine::is_open) {
        thread.syncs.store(thread.syncs.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        return call();
    }
    synchronising();
    if !thread.syncs.load(Ordering::Relaxed).is_multiple_of(4) {
        return call();
    }
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
pub(crate) fn unmeasured(predicted: u64, waited: u64) -> u8 {
    match waited {
        _ if waited <= 2 * predicted + 20_000 => u8::try_from(MEASURED_EVERY_NS / predicted.max(1))
            .map_or(UNMEASURED, |calls| calls.min(UNMEASURED)),
        _ if waited <= 8 * predicted + 200_000 => UNMEASURED_IN_DOUBT,
        _ => 0,
    }
}

/// A stream is about to be destroyed, or [`ALL_STREAMS`] of a context that is dead: no segment of any thread ends on it any more.
///
/// A thread that found it alive is waited for, so that the event is recorded before. Not for ever: the driver's call may itself wait
/// for what the program does next.
pub(crate) fn destroying(stream: usize) {
    CONTROL.handle_destroyed(stream);
    fence(Ordering::SeqCst);
    let ends = |thread: &ThreadRecord| {
        let ending = thread.ending.load(Ordering::Acquire);
        ending != NO_STREAM && [ending, ALL_STREAMS].contains(&stream)
    };
    let Some(metering) = CONTROL.metering() else { return };
    if !metering.threads.any(ends) {
        return;
    }
    for thread in metering.threads.all() {
        // By steps, of which a process that was stopped for a while loses one.
        for _ in 0..DESTROY_STEPS {
            if !ends(thread) {
                break;
            }
            std::thread::sleep(DESTROY_STEP);
        }
    }
}

pub(crate) fn end(run: &mut Mine<'_>, why: Ending) {
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
    // Said before the stream is looked at: a thread that destroys it meanwhile waits for this one, or is seen by it.
    let thread = own_record();
    if let Some(thread) = thread {
        thread.ending.store(run.stream, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
    let gone = context.is_dead()
        || run.stream > PER_THREAD_STREAM && CONTROL.is_destroyed(run.stream, run.destroyed);
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
        let behind = relaxed(|| Context::passed(start)) == Some(false);
        let queued = clock::now_ns() - run.opened < run.first.saturating_add(run.lead.into());
        let dense = presumed == 0 && !run.waits && (queued || behind);
        let end = context.take_recorded(run.stream);
        let span = if behind { 0 } else { clock::now_ns() - run.opened + u64::from(run.record) };
        end.map(|end| (end, dense, span))
    };
    drop(pushed);
    if let Some(thread) = thread {
        thread.ending.store(NO_STREAM, Ordering::Release);
    }
    let Some((end, dense, span)) = ended else {
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
        span,
        gap: run.lead.into(),
        record: run.record.into(),
        of: Measured::Run,
        opened: run.opened,
    };
    device.push(Pending { context, pair: Pair { lead: None, start, end }, segment });
}
