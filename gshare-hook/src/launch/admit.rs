//! The launch path, from the look for prepaid credit to the recorded events.
//!
//! # Problem
//! A launch takes 2 us on a real device. Metering it must cost a hundredth of this time, take no lock and ask neither a thread
//! nor the daemon, and must still hold the limit for a program that never synchronises.
//!
//! # Terms
//! - **row**: the known cost of this function at this size ([`gshare_meter::cost`]).
//! - **run**: consecutive launches of one thread on one stream. A thread keeps [`RUNS`] of them.
//! - **segment**: the part of a run between two CUDA events, which is the unit of measurement.
//!
//! # Algorithm
//! [`gshare_meter::run`] decides; here the program's threads meet its decisions. While credit lasts, a launch reads the switch,
//! finds the row, subtracts its cost from the run's prepaid credit, and calls the driver. A run prepays out of the device's credit,
//! with one atomic operation for many short launches. All other cases are colder still:
//!
//! 1. *Unknown cost*: the launch gets an event pair of its own and is charged a guess. The next launch of the same row waits for the
//!    result ([`alone::awaits_measurement`]).
//! 2. *Segment full*: its end event is recorded and the pair goes to the helper thread, which measures, corrects the account and
//!    lets credit in.
//! 3. *No credit*: the thread records the end of its own segments, so their completion can be seen. Then it waits its turn, first
//!    come, first served, before the real call and with no lock held.
//! 4. *A synchronising call*: segments worth measuring are ended before it. Short segments are settled as predicted, except for one
//!    now and then, and for the next few after a call that waited longer than the open launches explain. One call in four is timed.
//! 5. *Another context becomes current*: segments end while their events can still be recorded.
//! 6. *Doubt*: segments that took longer than predicted prove nothing when their stream may have run dry. Now and then the next
//!    launch is measured alone. The stream of a short launch is kept waiting meanwhile, so the time of the launch call is not
//!    measured with it ([`crate::device::hold`]).
//!
//! When the stream was empty before, the time between two events holds the call of the first launch, because the device cannot
//! begin earlier. The time of this call is left out (`lead`). Calls of later launches count only when they keep the device waiting,
//! and a segment in which they may have done so is charged its prediction.
//!
//! Launches on a stream under capture pass free and untouched, and are charged when the graph is launched. During a capture of any
//! stream no event is recorded anywhere.
//!
//! # Cost
//! The hot case takes a few loads, and additions to the thread's own record, with no clock, lock, system call or allocation. Each
//! segment takes two event records. Prepaid credit without a launch is charged like work in flight, and given back when its thread
//! waits or ends. It is at most [`MOST_PREPAID_NS`](gshare_meter::run::MOST_PREPAID_NS) for each stream that a thread uses.
#![allow(unsafe_code)] // a thread's own record

use core::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration as StdDuration;

use gshare_core::Duration;
use gshare_cuda_abi::types::CUresult;
use gshare_meter::alone::{self, AloneEnd, PROBE_WAIT};
use gshare_meter::cost::{Row, shape};
use gshare_meter::run::{Call, Concluded, Ending, Verdict};

use crate::device::context::{Context, Pair, relaxed};
use crate::device::hold::Begun;
use crate::device::{Device, Pending};
use crate::launch::control::{CONTROL, Metering};
use crate::launch::failure::{Why, cannot_meter};
use crate::launch::line::{Passed, wait_for_credit};
use crate::launch::segments::{begin, end, end_to_wait, take_over};
use crate::launch::streams::{LEGACY_STREAM, PER_THREAD_STREAM, in_context_of};
use crate::launch::thread_record::{Alone, ThreadRecord, own_record};
use crate::sys::clock;

/// The decision about a launch, taken before the launch is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) verdict: Verdict,
    /// The charged cost, in ns.
    pub(crate) cost: u64,
}

impl Ticket {
    pub(crate) const PASS: Self = Self { verdict: Verdict::Pass, cost: 0 };
    pub(crate) const FAIL: Self = Self { verdict: Verdict::Fail, cost: 0 };
}

/// A launch by the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) metering: &'static Metering,
    pub(crate) device: &'static Device,
    pub(crate) thread: &'static ThreadRecord,
    pub(crate) row: Row,
    pub(crate) stream: usize,
    pub(crate) call: Call,
}

/// The fast path of a launch with a known and prepaid cost, while nothing else is to be done.
#[inline(always)]
pub(crate) fn admit_prepaid(handle: u64, size: u64, stream: usize) -> Option<Ticket> {
    let device = CONTROL.fast()?;
    let thread = own_record()?;
    let (row, cost) = device.costs.find(handle, shape(size));
    let cost = cost?;
    // SAFETY: the record is this thread's own.
    let mut run = unsafe { thread.run(stream) };
    if !run.is_on(stream, device) {
        return None;
    }
    let open = run.open;
    let verdict = run.run.admit(open, row, cost)?;
    thread.launches.store(thread.launches.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    Some(Ticket { verdict, cost })
}

/// The path of a launch on this device that finds nothing prepaid, or other work to be done.
pub(crate) fn admit(
    metering: &'static Metering,
    device: &'static Device,
    (handle, size): (u64, u64),
    stream: usize,
    call: Call,
) -> Ticket {
    // The default streams of threads are made without a call.
    if stream == PER_THREAD_STREAM && !CONTROL.has_blocking_streams() {
        CONTROL.blocking_stream_made();
    }
    let Some(thread) = own_record().or_else(|| metering.threads.enlist()) else {
        return if cannot_meter(metering.on_failure, Why::Memory) { Ticket::PASS } else { Ticket::FAIL };
    };
    thread.launches.store(thread.launches.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    if metering.devices.sole().is_none() {
        device.launches.fetch_add(1, Ordering::Relaxed);
    }
    let (row, cost) = device.costs.find(handle, shape(size));
    let launch = Launch { metering, device, thread, row, stream, call };
    let Some(cost) = cost else { return probe(launch) };
    // SAFETY: the record is this thread's own.
    take_over(&mut unsafe { thread.run(stream) }, stream, device);
    match pay(metering, device, thread, stream, cost) {
        Passed::Paid => {}
        Passed::Unmetered => return Ticket::PASS,
        Passed::Failed => return Ticket::FAIL,
    }
    // SAFETY: as above, and the last borrow has ended.
    let mut run = unsafe { thread.run(stream) };
    if run.run.is_due() && begin(metering, &mut run, cost, row, call) {
        return measure_alone(launch, cost);
    }
    let open = run.open;
    Ticket { verdict: run.run.launch(open, row, cost), cost }
}

/// Follows the call when the segment ends, the launch was measured alone, or the driver refused it.
#[cold]
pub(crate) fn conclude(ticket: Ticket, stream: usize, result: CUresult) {
    match CONTROL.metering() {
        Some(metering) if metering.devices.sole().is_none() => {
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
    let (open, Some(device)) = (run.open, run.device()) else { return };
    let launch = (ticket.verdict, ticket.cost);
    match run.run.concluded(open, &device.calls, launch, result.is_ok(), clock::now_ns) {
        Concluded::Open => {}
        Concluded::Full => end(&mut run, Ending::Full),
        Concluded::Refused => {
            device.refused.fetch_add(ticket.cost, Ordering::AcqRel);
        }
    }
}

/// Takes `cost` out of the run's prepaid credit, and prepays again.
fn pay(metering: &Metering, device: &Device, thread: &ThreadRecord, stream: usize, cost: u64) -> Passed {
    // SAFETY: the record is this thread's own; this borrow ends before the thread waits.
    let mut run = unsafe { thread.run(stream) };
    let open = run.open;
    if run.run.pay(open, &device.gate, cost) {
        return Passed::Paid;
    }
    // Waiting ends all segments of this thread and gives their prepaid credit back.
    wait_for_credit(metering, device, thread, cost)
}

/// Forgets a function handle that is gone, since its learned cost says nothing about the next function there. Its launches may have
/// gone to any device.
pub(crate) fn forget(handle: u64, size: u64) {
    for device in CONTROL.metering().into_iter().flat_map(|metering| metering.devices.iter()) {
        device.costs.forget(handle, shape(size));
    }
}

// ---- a launch measured alone -----------------------------------------------------------------------------------------------

/// Decides about a launch of unknown cost, which is measured alone.
#[cold]
fn probe(of: Launch) -> Ticket {
    let Launch { metering, device, thread, row, stream, .. } = of;
    // A signal handler does not wait here while its thread waits, since the thread may hold the line's lock.
    let in_handler = thread.waits.load(Ordering::Relaxed);
    if alone::awaits_measurement(&device.gate, &device.costs, row) && !CONTROL.capturing() && !in_handler {
        end_to_wait(thread);
        device.measuring.fetch_add(1, Ordering::AcqRel);
        metering.bell.ring();
        let most = StdDuration::from_nanos(PROBE_WAIT.as_nanos());
        device.wait_while(most, || alone::awaits_measurement(&device.gate, &device.costs, row));
        device.measuring.fetch_sub(1, Ordering::AcqRel);
    }
    let cost = alone::probe(&device.costs, row);
    if !device.gate.try_spend(Duration::from_nanos(cost)) {
        match wait_for_credit(metering, device, thread, cost) {
            Passed::Paid => {}
            Passed::Unmetered => return Ticket::PASS,
            Passed::Failed => return Ticket::FAIL,
        }
    }
    // From now on the run's own segment, if any, has a foreign launch in it.
    // SAFETY: the record is this thread's own.
    unsafe { thread.run(stream) }.run.interrupted();
    measure_alone(of, cost)
}

impl Alone {
    /// Records the event before the launch, and keeps the stream waiting for a short launch.
    fn record_start(&mut self, context: Arc<Context>) {
        // On an idle stream the start event passes at once, and the kernel starts when the launch has come through.
        let idle = self.timing.may_be_late() && Context::is_idle(self.stream);
        let short = self.timing.is_short(&self.device.costs);
        let others_wait = self.stream <= LEGACY_STREAM && CONTROL.has_blocking_streams();
        let begun = if short && !others_wait { context.hold.begin(self.stream) } else { Begun::Never };
        match begun {
            Begun::Yes => self.lead = context.take_recorded(self.stream),
            // Without a hold of its own, the measurement would show the time of the call.
            Begun::Busy => return,
            Begun::Never => {}
        }
        let asked = clock::now_ns();
        let start = context.take_recorded(self.stream);
        if begun == Begun::Yes && (start.is_none() || self.lead.is_none()) {
            context.hold.end(true);
            start.into_iter().chain(self.lead.take()).for_each(|event| context.give_back(event));
            return;
        }
        if begun == Begun::Never {
            self.timing.opened((asked, clock::now_ns()), idle, !others_wait && self.timing.may_be_held());
        }
        self.start = start.map(|start| (start, context));
    }
}

/// Records the event before a launch with a paid cost.
#[cold]
fn measure_alone(of: Launch, cost: u64) -> Ticket {
    let Launch { metering, device, thread, row, stream, call } = of;
    // SAFETY: the record is this thread's own.
    let run = unsafe { thread.run(stream) };
    let behind_wait = run.stream == stream && run.run.is_behind_wait();
    let timing = alone::Alone::new(&device.costs, row, call, clock::now_ns(), behind_wait);
    let mut alone = Alone { device, stream, timing, start: None, lead: None };
    let context = if CONTROL.capturing() { None } else { metering.contexts.current() };
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
    let Alone { device, stream, timing, start, lead } = alone;
    let (held, called) = (lead.is_some(), clock::now_ns());
    let measured = start.and_then(|(start, context)| {
        let pending = |event| relaxed(|| Context::passed(event)) == Some(false);
        let behind = !held && pending(start);
        let end = if result.is_ok() { context.take_recorded(stream) } else { None };
        let ended = AloneEnd { held, behind, called, recorded: clock::now_ns() };
        // A stream that went on by itself had nothing to do meanwhile.
        let in_time = lead.is_none_or(|lead| context.hold.end(pending(lead)));
        match end {
            Some(end) if in_time => Some((context, Pair { lead, start, end }, ended)),
            end => {
                end.into_iter().chain(lead).chain([start]).for_each(|event| context.give_back(event));
                None
            }
        }
    });
    let Some((context, pair, ended)) = measured else {
        let time = if result.is_ok() { &device.settled } else { &device.refused };
        time.fetch_add(cost, Ordering::AcqRel);
        return timing.not_measured(&device.costs);
    };
    device.push(Pending { context, pair, segment: timing.measured(&device.calls, cost, ended) });
}
