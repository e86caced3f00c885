//! The runs of each thread: its launches by stream, behind the decisions of [`gshare_meter::run`].
//!
//! A thread keeps [`RUNS`] of them, found by a hash of the stream. If its place is taken, the run there ends. One half of a
//! run is touched by its thread only, and the other half is atomics, from which the helper thread learns of the work in flight.
#![allow(unsafe_code)] // a thread's own record behind its thread-local word

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

use gshare_meter::OpenRun;
use gshare_meter::run::{Ending, Open, Run};

use crate::device::Device;
use crate::device::context::{Context, Event};
use crate::sys::lock::Lock;
use crate::sys::tls;

/// The number of streams on which a thread's launches are tracked at once.
pub(crate) const RUNS: usize = 4;

/// Stands for no stream, in place of a stream.
pub(crate) const NO_STREAM: usize = usize::MAX;

/// Shortest time between two wake-ups of the helper thread for launches behind a wait, in ns.
const TELL_EVERY: u64 = 1_000_000;

/// The first event of a segment, in its context.
pub(crate) type Mark = (Event, Arc<Context>);

/// The place of one run.
#[derive(Debug)]
#[repr(C, align(128))] // found by a shift; a launch reads and writes the first line only
struct Place {
    /// Null or leaked, and written by the owner only.
    device: AtomicPtr<Device>,
    open: Open,
    own: UnsafeCell<Own>,
    /// The first event of an open segment behind a wait of the stream, by which the helper thread sees whether the wait is over.
    behind_wait: Lock<Option<Mark>>,
}

/// The part of a run touched by its thread only.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Own {
    pub(crate) stream: usize,
    pub(crate) run: Run<Mark>,
    /// The count of destroyed handles at the beginning of the segment.
    pub(crate) destroyed: u64,
    /// Whether the helper thread can see the first event of the segment.
    shown: bool,
    /// The last time, in ns, when the thread told the helper thread of a launch behind a wait.
    told: u64,
}

/// A run in the hands of its thread.
#[derive(Debug)]
pub(crate) struct Mine<'a> {
    device: &'a AtomicPtr<Device>,
    pub(crate) open: &'a Open,
    own: &'a mut Own,
    behind_wait: &'a Lock<Option<Mark>>,
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

impl Place {
    fn new() -> Self {
        let own = Own { stream: NO_STREAM, run: Run::new(), destroyed: 0, shown: false, told: 0 };
        Self {
            device: AtomicPtr::default(),
            open: Open::default(),
            own: UnsafeCell::new(own),
            behind_wait: Lock::default(),
        }
    }

    /// The open launches, for the helper thread.
    fn open_run(&self) -> OpenRun {
        let mark = self.behind_wait.lock().clone();
        let waits = mark.is_some_and(|(event, context)| !context.has_passed(event));
        OpenRun { waits, ..self.open.as_run() }
    }

    fn is_on(&self, device: &Device) -> bool {
        core::ptr::eq(self.device.load(Ordering::Relaxed), device)
    }
}

impl Mine<'_> {
    #[inline(always)]
    pub(crate) fn is_on(&self, stream: usize, device: &Device) -> bool {
        self.stream == stream && core::ptr::eq(self.device.load(Ordering::Relaxed), device)
    }

    pub(crate) fn device(&self) -> Option<&'static Device> {
        // SAFETY: null, or a leaked device.
        unsafe { self.device.load(Ordering::Relaxed).as_ref() }
    }

    /// Gives the prepaid credit back.
    pub(crate) fn refund(&mut self) {
        let prepaid = self.open.take_prepaid();
        if let Some(device) = self.device().filter(|_| prepaid > 0) {
            device.refused.fetch_add(prepaid, Ordering::AcqRel);
        }
    }

    /// Shows the helper thread the first event of a segment behind a wait. Returns whether the helper thread is to be woken: a thread
    /// with many waits wakes it only once a millisecond.
    pub(crate) fn show(&mut self, mark: Mark, now: u64) -> bool {
        *self.behind_wait.lock() = Some(mark);
        self.shown = true;
        let tells = now.saturating_sub(self.told) >= TELL_EVERY;
        if tells {
            self.told = now;
        }
        tells
    }

    /// Hides the event before it is used again.
    pub(crate) fn hide(&mut self) {
        if core::mem::take(&mut self.shown) {
            *self.behind_wait.lock() = None;
        }
    }

    /// Makes the run this stream's from now on.
    pub(crate) fn becomes(&mut self, stream: usize, device: &'static Device) {
        self.run.taken_over();
        self.stream = stream;
        self.device.store(core::ptr::from_ref(device).cast_mut(), Ordering::Relaxed);
    }
}

/// A launch that is being measured alone.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) device: &'static Device,
    pub(crate) stream: usize,
    pub(crate) timing: gshare_meter::alone::Alone,
    /// The event before the launch, unless none could be recorded, and the event before that where the stream is kept waiting.
    pub(crate) start: Option<Mark>,
    pub(crate) lead: Option<Event>,
}

/// The meter's record of a thread, which is never freed, and reused when its thread is gone.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ThreadRecord {
    pub(crate) launches: AtomicU64,
    /// The number of synchronising calls.
    pub(crate) syncs: AtomicU64,
    pub(crate) taken: AtomicBool,
    /// Whether the thread waits for credit.
    pub(crate) waits: AtomicBool,
    /// The stream on which the thread ends a segment, or [`NO_STREAM`], so the stream is not destroyed meanwhile.
    pub(crate) ending: AtomicUsize,
    runs: [Place; RUNS],
    /// The launch being measured alone, between its two events.
    pub(crate) alone: UnsafeCell<Option<Alone>>,
    /// Calls of the thread under the guard, more than one in a signal handler. Only the thread writes it.
    in_calls: AtomicU32,
}

// SAFETY: only the record's own thread touches `alone` and the `own` part of each run (`run`, `all_runs` and `alone` say so), and
// the rest is atomic. `taken` passes the record from one thread to the next.
unsafe impl Sync for ThreadRecord {}

impl ThreadRecord {
    pub(crate) fn new() -> Self {
        Self {
            launches: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            taken: AtomicBool::new(true),
            waits: AtomicBool::new(false),
            ending: AtomicUsize::new(NO_STREAM),
            runs: core::array::from_fn(|_| Place::new()),
            alone: UnsafeCell::new(None),
            in_calls: AtomicU32::new(0),
        }
    }

    #[inline(always)]
    pub(crate) fn begin_call(&self) {
        self.in_calls.store(self.in_calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn end_call(&self) {
        self.in_calls.store(self.in_calls.load(Ordering::Relaxed) - 1, Ordering::Release);
    }

    pub(crate) fn is_in_call(&self) -> bool {
        self.in_calls.load(Ordering::Acquire) > 0
    }

    /// The open launches of each run on a device, for the helper thread.
    pub(crate) fn open_runs(&self, device: &Device) -> [OpenRun; RUNS] {
        self.runs.each_ref().map(|run| if run.is_on(device) { run.open_run() } else { OpenRun::default() })
    }

    /// Presumes a run's open launches complete: see [`Open::presume_done`].
    pub(crate) fn presume_done(&self, device: &Device, index: usize, predicted: u64) -> u64 {
        let run = &self.runs[index % RUNS];
        if run.is_on(device) { run.open.presume_done(predicted) } else { 0 }
    }

    /// The run of a stream.
    ///
    /// # Safety
    /// Only the record's own thread may call this, and not while it holds a run.
    #[inline(always)]
    pub(crate) unsafe fn run(&self, stream: usize) -> Mine<'_> {
        let Place { device, open, own, behind_wait } = &self.runs[place(stream)];
        // SAFETY: as the caller promises, there is no other reference to `own`.
        Mine { device, open, own: unsafe { &mut *own.get() }, behind_wait }
    }

    /// All runs.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    pub(crate) unsafe fn all_runs(&self) -> [Mine<'_>; RUNS] {
        self.runs.each_ref().map(|Place { device, open, own, behind_wait }| {
            // SAFETY: as the caller promises, there is no other reference to `own`; each is taken once.
            Mine { device, open, own: unsafe { &mut *own.get() }, behind_wait }
        })
    }
}

/// The index of a stream's run in its thread: the upper bits of the stream's low half times an odd number.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the low half
pub(crate) fn place(stream: usize) -> usize {
    ((stream as u32).wrapping_mul(0x9E37_79B1) >> (u32::BITS - RUNS.ilog2())) as usize
}

/// The calling thread's record, if it has one.
#[inline(always)]
pub(crate) fn own_record() -> Option<&'static ThreadRecord> {
    // SAFETY: the word is this thread's own; it holds 0 or a record that is never freed.
    unsafe { core::ptr::with_exposed_provenance::<ThreadRecord>(*tls::word()).as_ref() }
}

/// Retires the record of a thread that is gone. Its open launches are settled as predicted, without a call to the driver.
pub(crate) fn retire(thread: &ThreadRecord) {
    // SAFETY: the record is the calling thread's own, which is at its end.
    for mut run in unsafe { thread.all_runs() } {
        run.refund();
        run.hide();
        let (open, device) = (run.open, run.device());
        if let Some(closed) = run.run.close(open, Ending::Taken, false) {
            if let Some(device) = device {
                device.settled.fetch_add(closed.predicted(), Ordering::AcqRel);
            }
            if let Some((start, context)) = closed.mark {
                context.give_back(start);
            }
        }
        run.stream = NO_STREAM;
        run.device.store(core::ptr::null_mut(), Ordering::Relaxed);
    }
    thread.taken.store(false, Ordering::Release);
}
