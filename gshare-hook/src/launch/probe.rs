//! A launch that is measured alone: one of unknown cost, or one whose cost is in doubt.
//!
//! It gets an event pair of its own and is charged a guess. While such a launch of the same row is being measured, the next one waits
//! for the result (at most [`PROBE_WAIT`]): two kernels of 30 ms at a guess of 0.5 ms would be a debt of more than half a second
//! for a client that may have a tenth of the time. A short kernel's stream is kept waiting meanwhile ([`crate::device::hold`]), so that the
//! time of the launch call is not measured with it.
#![allow(unsafe_code)] // a thread's own record

use core::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration as StdDuration;

use gshare_core::Duration;
use gshare_cuda_abi::types::CUresult;
use gshare_meter::cost::Row;
use gshare_meter::{Measured, SHORT_NS, Segment};

use crate::device::context::{Context, Pair, relaxed};
use crate::device::hold::Begun;
use crate::device::{Device, Pending};
use crate::launch::control::CONTROL;
use crate::launch::line::wait_for_credit;
use crate::launch::metering::Metering;
use crate::launch::runs::{Alone, MIXED, ThreadRecord};
use crate::launch::segments::{Ending, end_segments};
use crate::launch::streams::LEGACY_STREAM;
use crate::launch::ticket::{Call, Ticket, Verdict};
use crate::sys::clock;

/// Launches of unknown cost that go ahead unmeasured.
pub(crate) const PROBES: u32 = 1;

/// How long a launch of unknown cost waits for a measurement.
pub(crate) const PROBE_WAIT: StdDuration = StdDuration::from_millis(200);

/// A launch whose cost is not known: measured alone.
#[cold]
pub(crate) fn probe(launch: Launch) -> Ticket {
    let Launch { metering, device, thread, row, stream, .. } = launch;
    // Not in a signal handler whose thread waits: it may hold the line's lock.
    let in_handler = thread.waits.load(Ordering::Relaxed);
    if device.costs.probes(row) >= PROBES && !CONTROL.capturing() && !in_handler {
        end_segments(thread, Ending::Waiting);
        device.measuring.fetch_add(1, Ordering::AcqRel);
        metering.bell.ring();
        device.wait_while(PROBE_WAIT, || {
            device.costs.known(row).is_none() && device.costs.probes(row) >= PROBES
        });
        device.measuring.fetch_sub(1, Ordering::AcqRel);
    }
    let cost = device.costs.known(row).unwrap_or_else(|| device.costs.guess());
    device.costs.probe(row);
    if !device.gate.try_spend(thread.number, Duration::from_nanos(cost))
        && !wait_for_credit(metering, device, thread, cost)
    {
        return Ticket::FAIL;
    }
    // The run's own segment, if any, has a stranger in it from now on.
    // SAFETY: the record is this thread's own.
    unsafe { thread.run(stream) }.mixed = MIXED;
    measure_alone(launch, cost)
}

/// A launch by the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) metering: &'static Metering,
    pub(crate) device: &'static Device,
    pub(crate) thread: &'static ThreadRecord,
    pub(crate) row: Row,
    pub(crate) stream: usize,
    pub(crate) kind: Call,
}

impl Alone {
    /// Records the event before it, with its stream kept waiting if it is short.
    pub(crate) fn record_start(&mut self, context: Arc<Context>) {
        // On an idle stream the start passes at once, and the kernel starts when the launch has come through.
        self.idle = self.kind != Call::Blocking && Context::is_idle(self.stream);
        // A call that may do more than queue work is not kept from ending.
        let short =
            self.kind == Call::Launch && self.device.costs.known(self.row).is_some_and(|ns| ns <= SHORT_NS);
        let others_wait = self.stream <= LEGACY_STREAM && CONTROL.has_blocking_streams();
        let begun = if short && !others_wait { context.hold.begin(self.stream) } else { Begun::Never };
        match begun {
            Begun::Yes => self.lead = context.take_recorded(self.stream),
            // What would be measured is the time of the call.
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
            self.began = clock::now_ns();
            self.record = self.began - asked;
        }
        self.start = start.map(|start| (start, context));
    }
}

/// Records the event before a launch; its cost has been paid.
#[cold]
pub(crate) fn measure_alone(launch: Launch, cost: u64) -> Ticket {
    let Launch { metering, device, thread, row, stream, kind } = launch;
    let how = if device.costs.known(row).is_none() { Measured::First } else { Measured::Alone };
    let began = clock::now_ns();
    let mut alone =
        Alone { device, row, stream, kind, how, start: None, lead: None, idle: false, began, record: 0 };
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
    let device = alone.device;
    let (lead, how) = (alone.lead, if alone.lead.is_some() { Measured::Held } else { alone.how });
    let took = clock::now_ns() - alone.began;
    if how != Measured::Held {
        device.calls.seen(took);
    }
    let gap = if alone.idle && how != Measured::Held { took.min(alone.kind.slack(device)) } else { 0 };
    let measured = alone.start.and_then(|(start, context)| {
        // Where the stream still had other work, or waited, the launch came behind that.
        let pending = |event| relaxed(|| Context::passed(event)) == Some(false);
        let behind = how == Measured::Held || pending(start);
        let end = if result.is_ok() { context.take_recorded(alone.stream) } else { None };
        let span = if behind { 0 } else { clock::now_ns() - alone.began + alone.record };
        // A stream that went on by itself had nothing to do meanwhile.
        let in_time = lead.is_none_or(|lead| context.hold.end(pending(lead)));
        match end {
            Some(end) if in_time => Some((context, Pair { lead, start, end }, span)),
            end => {
                end.into_iter().chain(lead).chain([start]).for_each(|event| context.give_back(event));
                None
            }
        }
    });
    let Some((context, pair, span)) = measured else {
        let time = if result.is_ok() { &device.settled } else { &device.refused };
        time.fetch_add(cost, Ordering::AcqRel);
        // No thread waits for a measurement that will not come; what is doubted still is.
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
        span,
        gap,
        record: alone.record,
        of: how,
        opened: alone.began,
    };
    device.push(Pending { context, pair, segment });
}
