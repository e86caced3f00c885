//! CUDA contexts as the meter needs them, each with a pool of events and a time line.
//!
//! An event belongs to the context in which it was made, and dies with it. So each context has its own pool, its own time line, and
//! a lock against its destruction by another thread. On a time line all events of the context are timed against one **anchor**, an
//! event with a roughly known place on `CLOCK_MONOTONIC`. The place is such that no event lies later than the time at which it was
//! seen to have passed. Time lines of several contexts of one device are thereby comparable, and differences within one context are
//! exact. The driver gives differences as `f32` milliseconds, with a resolution of 60 ns at one second, so the anchor moves along.
#![allow(unsafe_code)] // calls to the driver

use core::ffi::c_uint;
use std::sync::Arc;

use gshare_cuda_abi::types::{CUresult, sys};

use crate::device::hold::Hold;
use crate::sys::clock;
use crate::sys::driver::real;
use crate::sys::lock::Lock;

/// Most events per context. A launch that finds no free event is charged without a measurement.
const EVENTS: usize = 1024;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const RELAXED: c_uint = 2;
/// Greatest age of an anchor, in ns.
const ANCHOR_AGE: u64 = 500_000_000;

/// An event from the pool of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event(usize);

impl Event {
    fn raw(self) -> sys::CUevent {
        core::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// Two events around some launches. If a third event came right before them, the time from it to the start is an event's own time,
/// which is then left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) lead: Option<Event>,
    pub(crate) start: Event,
    pub(crate) end: Event,
}

/// The progress of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The device has not passed the end.
    Running,
    /// The device ran the launches from the first time to the second, in ns.
    Ran(u64, u64),
    /// The context is gone, or the driver would not say.
    Lost,
}

#[derive(Debug, Default)]
struct Pool {
    free: Vec<Event>,
    made: usize,
}

#[derive(Debug, Default)]
struct Timeline {
    dead: bool,
    anchor: Option<(Event, u64)>,
}

#[derive(Debug)]
pub(crate) struct Context {
    handle: usize,
    /// The context that the helper thread makes current for questions about the events.
    host: usize,
    pool: Lock<Pool>,
    timeline: Lock<Timeline>,
    /// Keeps the context's streams waiting while a launch is measured.
    pub(crate) hold: Hold,
}

impl Context {
    /// The context's handle, as the driver gave it.
    pub(crate) fn handle(&self) -> usize {
        self.handle
    }

    /// Whether the context is the calling thread's current context.
    pub(crate) fn is_current(&self) -> bool {
        current_handle() == Some(self.handle)
    }

    /// Whether the context is destroyed, since another context may have the same handle by then.
    pub(crate) fn is_dead(&self) -> bool {
        self.timeline.lock().dead
    }

    /// Makes the context current in the calling thread while the result lives, or returns `None` if the context is destroyed.
    pub(crate) fn made_current(&self) -> Option<Pushed> {
        if self.is_dead() { None } else { Pushed::new(self.handle) }
    }

    /// An event, recorded on a stream of this context, which must be current.
    pub(crate) fn take_recorded(&self, stream: usize) -> Option<Event> {
        let event = self.take_event()?;
        if Self::record(event, stream) {
            return Some(event);
        }
        self.give_back(event);
        None
    }

    /// An event, new or used before, of this context, which must be current.
    fn take_event(&self) -> Option<Event> {
        let mut pool = self.pool.lock();
        if let Some(event) = pool.free.pop() {
            return Some(event);
        }
        if pool.made >= EVENTS {
            return None;
        }
        pool.made += 1;
        drop(pool);
        let mut event: sys::CUevent = core::ptr::null_mut();
        // SAFETY: a valid out-pointer; the context is current in this thread. Flags 0: with timing.
        let made = unsafe { real!(cuEventCreate)?(&raw mut event, 0) };
        made.is_ok().then(|| Event(event.expose_provenance()))
    }

    pub(crate) fn give_back(&self, event: Event) {
        self.pool.lock().free.push(event);
    }

    fn record(event: Event, stream: usize) -> bool {
        let Some(record) = real!(cuEventRecord) else { return false };
        // SAFETY: the event is alive, and the program is launching on this stream.
        unsafe { record(event.raw(), core::ptr::with_exposed_provenance_mut(stream)) }.is_ok()
    }

    /// Whether all work of a stream of the current context is over, as far as the host can see. The host sees the device's end some
    /// microseconds later.
    pub(crate) fn is_idle(stream: usize) -> bool {
        let Some(query) = real!(cuStreamQuery) else { return false };
        // SAFETY: the program is launching on this stream.
        relaxed(|| unsafe { query(core::ptr::with_exposed_provenance_mut(stream)) }.is_ok())
    }

    /// Whether the device has passed the event.
    pub(crate) fn passed(event: Event) -> Option<bool> {
        // SAFETY: the event is alive.
        match unsafe { real!(cuEventQuery)?(event.raw()) } {
            CUresult::CUDA_SUCCESS => Some(true),
            CUresult::CUDA_ERROR_NOT_READY => Some(false),
            _ => None,
        }
    }

    /// Whether the device has passed an event, as asked by the helper thread; `true` if the driver would not say.
    pub(crate) fn has_passed(&self, event: Event) -> bool {
        let line = self.timeline.lock();
        line.dead || !self.make_current() || Self::passed(event) != Some(false)
    }

    /// The place of a pair on the time line, as asked by the helper thread, once the device has passed the pair.
    pub(crate) fn progress(&self, pair: Pair) -> Progress {
        let mut line = self.timeline.lock();
        if line.dead || !self.make_current() {
            return Progress::Lost;
        }
        match Self::passed(pair.end) {
            Some(true) => {}
            Some(false) => return Progress::Running,
            None => return Progress::Lost,
        }
        let Some(length) = elapsed(pair.start, pair.end) else { return Progress::Lost };
        let start = match line.anchor {
            Some((anchor, at)) => match elapsed(anchor, pair.start) {
                // The start lies before the anchor if streams are measured out of order.
                Some(since) => at.saturating_add_signed(since),
                None => return Progress::Lost,
            },
            None => clock::now_ns().saturating_sub(length.unsigned_abs()),
        };
        let end = start.saturating_add_signed(length.max(0));
        let start = match pair.lead {
            Some(lead) => {
                let alone = elapsed(lead, pair.start).unwrap_or(0).max(0).unsigned_abs();
                self.give_back(lead);
                start.saturating_add(alone).min(end)
            }
            None => start,
        };
        // The end was seen before its time on the line, so the line is late by at least this much.
        let late = end.saturating_sub(clock::now_ns());
        let (start, end) = (start.saturating_sub(late), end - late);
        if let Some((_, at)) = &mut line.anchor {
            *at = at.saturating_sub(late);
        }
        match line.anchor {
            Some((_, at)) if end < at + ANCHOR_AGE => self.give_back(pair.end),
            Some((old, _)) => {
                line.anchor = Some((pair.end, end));
                self.give_back(old);
            }
            None => line.anchor = Some((pair.end, end)),
        }
        self.give_back(pair.start);
        Progress::Ran(start, end)
    }

    fn make_current(&self) -> bool {
        let Some(set) = real!(cuCtxSetCurrent) else { return false };
        // SAFETY: the context is alive, because `dead` is false and a thread that destroys it takes the same lock first.
        unsafe { set(core::ptr::with_exposed_provenance_mut(self.host)) }.is_ok()
    }
}

/// The time in ns between two events that the device has passed.
fn elapsed(start: Event, end: Event) -> Option<i64> {
    let mut milliseconds = 0f32;
    // SAFETY: a valid out-pointer and two live events of one context.
    let result = unsafe { real!(cuEventElapsedTime)?(&raw mut milliseconds, start.raw(), end.raw()) };
    #[allow(clippy::cast_possible_truncation)] // a float saturates
    result.is_ok().then_some((f64::from(milliseconds) * 1e6).round() as i64)
}

/// Makes calls that another thread's capture may forbid and that would spoil the capture. In a thread of the program they look at events,
/// page-lock memory and free device memory. A capture may begin between our look at whether anything is captured and the call.
pub(crate) fn relaxed<T>(work: impl FnOnce() -> T) -> T {
    let before = exchange_capture_mode(RELAXED);
    let done = work();
    let _ = before.map(exchange_capture_mode);
    done
}

/// Sets the calling thread's capture mode, and returns the previous mode.
pub(crate) fn exchange_capture_mode(mut mode: c_uint) -> Option<c_uint> {
    // SAFETY: a valid in-out pointer; the mode is this thread's own.
    let exchanged = unsafe { real!(cuThreadExchangeStreamCaptureMode)?(&raw mut mode) };
    exchanged.is_ok().then_some(mode)
}

/// A context that is current in this thread while this value lives, above the program's own.
#[derive(Debug)]
pub(crate) struct Pushed(());

impl Pushed {
    pub(crate) fn new(handle: usize) -> Option<Self> {
        let push = real!(cuCtxPushCurrent_v2)?;
        // SAFETY: the program is using the context.
        unsafe { push(core::ptr::with_exposed_provenance_mut(handle)) }.is_ok().then_some(Self(()))
    }
}

impl Drop for Pushed {
    fn drop(&mut self) {
        let mut popped: sys::CUcontext = core::ptr::null_mut();
        if let Some(pop) = real!(cuCtxPopCurrent_v2) {
            // SAFETY: a valid out-pointer; the call takes the pushed context back.
            let _ = unsafe { pop(&raw mut popped) };
        }
    }
}

/// A green context, the primary context from which it was cut, and the handle under which it can be made current (0 before it has any).
#[derive(Clone, Copy, Debug)]
struct Green {
    context: usize,
    host: usize,
    handle: usize,
}

/// A green context can be current in one thread at a time, namely a thread of the program, so this library's own thread uses the host.
static GREEN: Lock<Vec<Green>> = Lock::new(Vec::new());

pub(crate) fn note_green(context: usize, host: usize) {
    let mut known = GREEN.lock();
    known.retain(|green| green.context != context);
    known.push(Green { context, host, handle: 0 });
}

/// Notes the handle of a green context.
pub(crate) fn name_green(context: usize, handle: usize) {
    for green in GREEN.lock().iter_mut().filter(|green| green.context == context) {
        green.handle = handle;
    }
}

/// Forgets a green context before its destruction, and returns its handle.
pub(crate) fn forget_green(context: usize) -> Option<usize> {
    let mut known = GREEN.lock();
    let at = known.iter().position(|green| green.context == context)?;
    Some(known.swap_remove(at).handle).filter(|&handle| handle != 0)
}

fn host_of(handle: usize) -> usize {
    GREEN.lock().iter().find(|green| green.handle == handle).map_or(handle, |green| green.host)
}

/// The handle of the calling thread's current context, if any.
pub(crate) fn current_handle() -> Option<usize> {
    let mut handle: sys::CUcontext = core::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    let found = unsafe { real!(cuCtxGetCurrent)?(&raw mut handle) };
    (found.is_ok() && !handle.is_null()).then(|| handle.expose_provenance())
}

/// All contexts of the process.
#[derive(Debug, Default)]
pub(crate) struct Contexts {
    known: Lock<Vec<Arc<Context>>>,
}

impl Contexts {
    /// The calling thread's current context.
    pub(crate) fn current(&self) -> Option<Arc<Context>> {
        let handle = current_handle()?;
        let mut known = self.known.lock();
        if let Some(context) = known.iter().find(|context| context.handle == handle) {
            return Some(Arc::clone(context));
        }
        let context = Arc::new(Context {
            handle,
            host: host_of(handle),
            pool: Lock::default(),
            timeline: Lock::default(),
            hold: Hold::default(),
        });
        known.push(Arc::clone(&context));
        Some(context)
    }

    /// The handles of the contexts, without green contexts, which are part of another.
    pub(crate) fn handles(&self) -> Vec<usize> {
        self.known.lock().iter().map(|context| context.host).collect()
    }

    /// Marks a context before the program destroys it, so its events are not used from here on.
    pub(crate) fn destroying(&self, handle: usize) {
        let mut known = self.known.lock();
        known.retain(|context| {
            if context.handle != handle {
                return true;
            }
            context.timeline.lock().dead = true;
            false
        });
    }

    /// Lets go of streams that have waited for long, since the launch call itself may wait for the device.
    pub(crate) fn end_overdue_holds(&self, now: u64) {
        for context in self.known.lock().iter() {
            context.hold.end_if_overdue(now);
        }
    }

    /// Marks all contexts at the program's exit, so no event is used from here on.
    pub(crate) fn exiting(&self) {
        for context in self.known.lock().iter() {
            context.timeline.lock().dead = true;
        }
    }
}
