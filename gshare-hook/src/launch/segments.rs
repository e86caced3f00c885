//! The CUDA events around segments. [`gshare_meter::run`] decides when a segment begins and ends, and judges its proof.
#![allow(unsafe_code)] // a thread's own record

use core::sync::atomic::{Ordering, fence};
use std::sync::Arc;
use std::time::Duration;

use gshare_meter::cost::Row;
use gshare_meter::run::{Call, Ending, is_timed, unmeasured};

use crate::device::context::{Context, Pair, relaxed};
use crate::device::{Device, Pending};
use crate::launch::control::{ALL_STREAMS, CONTROL, Metering, State};
use crate::launch::streams::{LEGACY_STREAM, PER_THREAD_STREAM};
use crate::launch::thread_record::{Mine, NO_STREAM, ThreadRecord, own_record};
use crate::sys::{clock, signals};
use gshare_cuda_abi::types::CUresult;

/// One step of a destroying thread's wait for a thread that ends a segment on the stream. The wait takes some microseconds, and
/// about a second at most.
const DESTROY_STEP: Duration = Duration::from_micros(100);
const DESTROY_STEPS: u32 = 5_000;

/// Begins a segment, and returns `true` if this launch is to be measured alone.
#[cold]
pub(crate) fn begin(metering: &Metering, run: &mut Mine<'_>, cost: u64, row: Row, call: Call) -> bool {
    let (open, Some(device)) = (run.open, run.device()) else { return false };
    let captures = CONTROL.capturing();
    if run.run.begin(open, &device.costs, row, cost, captures) {
        return true;
    }
    run.destroyed = CONTROL.destroyed();
    if captures {
        return false;
    }
    let Some(context) = metering.contexts.current() else { return false };
    let slack = call.slack(&device.calls);
    let idle = slack > 0 && Context::is_idle(run.stream);
    let asked = clock::now_ns();
    if let Some(event) = context.take_recorded(run.stream) {
        let now = clock::now_ns();
        // The helper thread looks soon, because a neighbour may use the device until the wait is over.
        if run.run.is_behind_wait()
            && run.show((event, Arc::clone(&context)), now)
            && !device.gate.is_unlimited()
        {
            metering.bell.ring();
        }
        run.run.opened((event, context), (asked, now), if idle { slack } else { 0 });
    }
    false
}

/// The calling thread's record, if launches are metered.
#[inline(always)]
pub(crate) fn metered() -> Option<&'static ThreadRecord> {
    if CONTROL.state() == State::Active as u32 { own_record() } else { None }
}

/// Makes the run this stream's, after ending the run of another stream there.
pub(crate) fn take_over(run: &mut Mine<'_>, stream: usize, device: &'static Device) {
    if run.is_on(stream, device) {
        return;
    }
    end(run, Ending::Taken);
    run.refund();
    run.becomes(stream, device);
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

/// Drops the calling thread's segments and the measurement of its present launch, which will be delayed.
pub(crate) fn drop_segments(thread: &ThreadRecord) {
    // SAFETY: the record is the calling thread's own.
    for mut run in unsafe { thread.all_runs() } {
        let open = run.open;
        run.hide();
        if let Some((event, context)) = run.run.waits(open) {
            context.give_back(event);
        }
    }
    // SAFETY: as above.
    if let Some(alone) = unsafe { (*thread.alone.get()).as_mut() }
        && let Some((start, context)) = alone.start.take()
    {
        alone.lead.take().into_iter().chain([start]).for_each(|event| context.give_back(event));
    }
}

/// Ends the calling thread's segments because it will wait for credit. A signal handler that launches meanwhile waits as well, and
/// must not keep from the helper thread the locks that its own thread holds here. So signals are blocked.
pub(crate) fn end_to_wait(thread: &ThreadRecord) {
    signals::blocked(|| end_segments(thread, Ending::Waiting));
}

/// Ends the segments of other contexts, because the context `to` becomes current in the calling thread or has just become current.
/// If possible the segments end while their events can still be recorded.
pub(crate) fn switching(to: usize) {
    let Some(thread) = metered().filter(|_| to != 0) else { return };
    // SAFETY: the record is the calling thread's own.
    for mut run in unsafe { thread.all_runs() } {
        if run.run.mark().is_some_and(|(_, context)| context.handle() != to) {
            end(&mut run, Ending::Taken);
        }
    }
}

/// Notes that the calling thread is about to make a stream wait: see [`Run::waits`](gshare_meter::run::Run::waits).
pub(crate) fn waits(stream: usize) {
    let Some(thread) = metered() else { return };
    // SAFETY: the record is the calling thread's own.
    let mut run = unsafe { thread.run(stream) };
    if run.stream != stream {
        return;
    }
    let open = run.open;
    if run.run.ends_before_wait(open) && !CONTROL.capturing() {
        end(&mut run, Ending::Full);
    }
    run.hide();
    if let Some((event, context)) = run.run.waits(open) {
        context.give_back(event);
    }
}

/// Prepares for the calling thread's synchronisation with the device.
#[inline]
pub(crate) fn synchronising() {
    if let Some(thread) = metered() {
        thread.syncs.store(thread.syncs.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        end_segments(thread, Ending::Synchronising);
    }
}

/// Synchronises the calling thread with the device, by `call`. One call in four with launches to wait for is timed.
#[inline]
pub(crate) fn synchronise(call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(thread) = metered() else { return call() };
    let syncs = thread.syncs.load(Ordering::Relaxed) + 1;
    thread.syncs.store(syncs, Ordering::Relaxed);
    let mut has_open = false;
    // SAFETY: the record is the calling thread's own.
    for mut run in unsafe { thread.all_runs() }.into_iter().filter(|run| run.run.is_open(run.open)) {
        end(&mut run, Ending::Synchronising);
        has_open = true;
    }
    if !has_open || !is_timed(syncs) {
        return call();
    }
    let began = clock::now_ns();
    let result = call();
    let waited = clock::now_ns() - began;
    // SAFETY: the record is the calling thread's own.
    let mut runs = unsafe { thread.all_runs() };
    let most = unmeasured(runs.iter().map(|run| run.run.awaited()).sum(), waited);
    runs.iter_mut().for_each(|run| run.run.skip_at_most(most));
    result
}

/// Marks a stream, or [`ALL_STREAMS`] of a dead context, that is about to be destroyed. From here on no segment of any thread ends on it.
///
/// A thread that found the stream alive is waited for, so its event is recorded before. The wait is bounded, because the driver's
/// call may itself wait for the program's next action.
pub(crate) fn destroying(stream: usize) {
    CONTROL.handle_destroyed(stream);
    fence(Ordering::SeqCst);
    let ends = |thread: &ThreadRecord| {
        let ending = thread.ending.load(Ordering::Acquire);
        ending != NO_STREAM && [ending, ALL_STREAMS].contains(&stream)
    };
    let Some(metering) = CONTROL.metering().filter(|metering| metering.threads.any(ends)) else { return };
    for thread in metering.threads.all() {
        // The wait goes in steps, and a process that was stopped for a while loses only one step.
        for _ in 0..DESTROY_STEPS {
            if !ends(thread) {
                break;
            }
            std::thread::sleep(DESTROY_STEP);
        }
    }
}

/// Ends the segment of a run, if any. Open launches without a segment are settled as predicted.
pub(crate) fn end(run: &mut Mine<'_>, why: Ending) {
    let (open, Some(device)) = (run.open, run.device()) else { return };
    let measures_all = device.measures_all.load(Ordering::Relaxed);
    run.hide();
    let Some(mut closed) = run.run.close(open, why, measures_all) else { return };
    let (predicted, is_measurable) = (closed.predicted(), closed.is_measurable());
    let settle = || {
        device.settled.fetch_add(predicted, Ordering::AcqRel);
    };
    let Some((start, context)) = closed.mark.take() else { return settle() };
    // The mark comes before the look at the stream: a thread that destroys it meanwhile waits for this thread, or this thread sees
    // the destruction.
    let thread = own_record();
    if let Some(thread) = thread {
        thread.ending.store(run.stream, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
    let gone = context.is_dead()
        || run.stream > PER_THREAD_STREAM && CONTROL.is_destroyed(run.stream, run.destroyed);
    // If recorded later than right behind its launch, an event in the legacy stream holds up streams that have nothing to do with
    // it. There, launches are measured alone.
    let barrier = why != Ending::Full && run.stream <= LEGACY_STREAM && CONTROL.has_blocking_streams();
    if barrier {
        run.run.barred(&closed);
    }
    // Under another context the default stream is another stream, and an event made there would belong to this other context. A
    // program that has popped the context, or set another, gets it back for the time of one event.
    let mut pushed = None;
    let mut can_record = || {
        context.is_current() || {
            pushed = context.made_current();
            pushed.is_some()
        }
    };
    let ended = if barrier || gone || CONTROL.capturing() || !is_measurable || !can_record() {
        None
    } else {
        let behind = relaxed(|| Context::passed(start)) == Some(false);
        let dense = run.run.is_dense(&closed, clock::now_ns(), behind);
        context.take_recorded(run.stream).map(|end| (end, (dense, behind), clock::now_ns()))
    };
    drop(pushed);
    if let Some(thread) = thread {
        thread.ending.store(NO_STREAM, Ordering::Release);
    }
    let Some((end, seen, recorded)) = ended else {
        context.give_back(start);
        return settle();
    };
    let segment = run.run.measured(&closed, seen, recorded);
    device.push(Pending { context, pair: Pair { lead: None, start, end }, segment });
}
