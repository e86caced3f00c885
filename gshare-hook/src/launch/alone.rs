//! A launch measured alone, because its cost is unknown or in doubt.
//!
//! The launch gets an event pair of its own. While a launch of unknown cost is being measured, the next launch of the same row
//! waits for the result ([`alone::awaits_measurement`]). A short kernel's stream is kept waiting meanwhile
//! ([`crate::device::hold`]), so the time of the launch call is not measured with it.
#![allow(unsafe_code)] // a thread's own record

use core::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration as StdDuration;

use gshare_core::Duration;
use gshare_cuda_abi::types::CUresult;
use gshare_meter::alone::{self, AloneEnd, PROBE_WAIT};
use gshare_meter::run::Verdict;

use crate::device::Pending;
use crate::device::context::{Context, Pair, relaxed};
use crate::device::hold::Begun;
use crate::launch::admit::{Launch, Ticket};
use crate::launch::control::CONTROL;
use crate::launch::line::{Passed, wait_for_credit};
use crate::launch::segments::end_to_wait;
use crate::launch::streams::LEGACY_STREAM;
use crate::launch::thread_record::{Alone, ThreadRecord};
use crate::sys::clock;

/// Decides about a launch of unknown cost, which is measured alone.
#[cold]
pub(crate) fn probe(of: Launch) -> Ticket {
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
pub(crate) fn measure_alone(of: Launch, cost: u64) -> Ticket {
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
pub(crate) fn conclude_alone(thread: &ThreadRecord, cost: u64, result: CUresult) {
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
