//! What is open of a thread's launches: predicted and not yet measured, by stream.
//!
//! A **run** is a thread's consecutive launches on one stream. A thread keeps [`RUNS`] of them, found by a hash of the stream; a
//! stream whose place is taken ends what was there. A run has a half that only its thread touches, and a half of atomics that the
//! helper thread reads to know what is in flight.
#![allow(unsafe_code)] // a thread's own record behind its thread-local word

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

use gshare_meter::cost::Row;
use gshare_meter::segment::UNMEASURED_IN_DOUBT;
use gshare_meter::{Measured, OpenRun};

use crate::device::Device;
use crate::device::context::{Context, Event};
use crate::launch::ticket::Call;
use crate::sys::tls;

/// Streams that a thread's launches are tracked on at once.
pub(crate) const RUNS: usize = 4;

/// In place of a stream: none.
pub(crate) const NO_STREAM: usize = usize::MAX;

/// The segment has launches in it that say nothing about its row.
pub(crate) const MIXED: u32 = u32::MAX;

/// The part of a word that is a time, in ns: three days.
const TIME: u64 = (1 << 48) - 1;

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
pub(crate) struct Shared {
    pub(crate) device: AtomicPtr<Device>,
    /// Credit that is charged already, in ns.
    pub(crate) prepaid: AtomicU64,
    /// Predicted cost of the launches since the segment began, and of those before it that no event covers, in ns.
    pub(crate) predicted: AtomicU64,
    pub(crate) carried: AtomicU64,
    /// Predicted cost of those of both that the helper presumes complete, in the bits of [`TIME`]; above them, how often the open
    /// launches were taken out.
    presumed: AtomicU64,
}

/// The part of a run that only its thread touches.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Own {
    pub(crate) stream: usize,
    /// Launches since the segment began, and how many there may be before the slow way is due.
    pub(crate) count: u32,
    pub(crate) limit: u32,
    pub(crate) row: Row,
    /// Not 0 when there are launches of other rows.
    pub(crate) mixed: u32,
    /// Times the run is full, or its thread synchronises, before a segment begins again; and what that begins at.
    pub(crate) skip: u8,
    pub(crate) unmeasured: u8,
    /// A segment is skipped because the thread synchronises after a few short launches.
    pub(crate) idle_skip: bool,
    pub(crate) begun: u32,
    pub(crate) start: Option<(Event, Arc<Context>)>,
    /// Predicted cost of the first launch, and when the segment began, in ns.
    pub(crate) first: u64,
    pub(crate) opened: u64,
    /// How much of the first launch's call may be the reason that the device had nothing to do, and how much was, in ns.
    pub(crate) slack: u32,
    pub(crate) lead: u32,
    /// The time that the call for the segment's first event took, in ns.
    pub(crate) record: u32,
    /// The stream waits for something within the segment.
    pub(crate) waits: bool,
    /// Charged cost of the launches that were open when the thread last synchronised, in ns.
    pub(crate) awaited: u64,
    /// The count of destroyed handles when the segment began.
    pub(crate) destroyed: u64,
}

/// A run in the hands of its thread.
#[derive(Debug)]
pub(crate) struct Mine<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) own: &'a mut Own,
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
    pub(crate) fn new() -> Self {
        let own = Own {
            stream: NO_STREAM,
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
            record: 0,
            waits: false,
            awaited: 0,
            destroyed: 0,
        };
        Self { shared: Shared::default(), own: UnsafeCell::new(own) }
    }
}

impl Mine<'_> {
    /// Only the owner writes the device; it is null or leaked.
    #[inline(always)]
    pub(crate) fn is_on(&self, stream: usize, device: &Device) -> bool {
        self.stream == stream && core::ptr::eq(self.shared.device.load(Ordering::Relaxed), device)
    }

    pub(crate) fn device(&self) -> Option<&'static Device> {
        // SAFETY: null, or a leaked device.
        unsafe { self.shared.device.load(Ordering::Relaxed).as_ref() }
    }

    /// The launches so far are covered by no event of the segment that begins.
    pub(crate) fn carry(&mut self) {
        self.count = 0;
        let predicted = self.shared.predicted.load(Ordering::Relaxed);
        self.shared.carried.fetch_add(predicted, Ordering::AcqRel);
        self.shared.predicted.store(0, Ordering::Release);
    }

    /// Whether anything was launched that has not been taken out.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        let open = |part: &AtomicU64| part.load(Ordering::Relaxed) > 0;
        self.count > 0 || self.start.is_some() || open(&self.shared.predicted) || open(&self.shared.carried)
    }

    /// Takes the open launches out.
    pub(crate) fn take_open(&mut self) -> Taken {
        self.count = 0;
        let next = (self.shared.presumed.load(Ordering::Relaxed) | TIME).wrapping_add(1);
        let presumed = self.shared.presumed.swap(next, Ordering::AcqRel) & TIME;
        let (predicted, carried) =
            (self.shared.predicted.swap(0, Ordering::AcqRel), self.shared.carried.swap(0, Ordering::AcqRel));
        // What was launched first was over first.
        let carried_presumed = presumed.min(carried);
        let presumed = (presumed - carried_presumed).min(predicted);
        Taken { predicted: predicted - presumed, presumed, carried: carried - carried_presumed }
    }

    /// Gives back what is prepaid.
    pub(crate) fn refund(&mut self) {
        let prepaid = self.shared.prepaid.swap(0, Ordering::AcqRel);
        if let Some(device) = self.device().filter(|_| prepaid > 0) {
            device.refused.fetch_add(prepaid, Ordering::AcqRel);
        }
    }

    /// Counts a launch of this cost.
    #[inline(always)]
    pub(crate) fn add(&mut self, row: Row, cost: u64) {
        self.shared.predicted.store(self.shared.predicted.load(Ordering::Relaxed) + cost, Ordering::Release);
        self.count += 1;
        self.mixed |= self.row.difference(row);
    }
}

/// What was open in a run: predicted cost of the segment's launches, less what was presumed done of it, and of those before.
pub(crate) struct Taken {
    pub(crate) predicted: u64,
    pub(crate) presumed: u64,
    pub(crate) carried: u64,
}

/// A launch that is being measured alone.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) device: &'static Device,
    pub(crate) row: Row,
    pub(crate) stream: usize,
    pub(crate) kind: Call,
    pub(crate) how: Measured,
    /// The event before it, unless none could be recorded, and one before that where the stream is kept waiting.
    pub(crate) start: Option<(Event, Arc<Context>)>,
    pub(crate) lead: Option<Event>,
    /// Whether the stream was idle, and since when the launch has been under way.
    pub(crate) idle: bool,
    pub(crate) began: u64,
    /// The time that it took to record the event before the launch, in ns.
    pub(crate) record: u64,
}

/// What the meter keeps about a thread. Never freed; reused when its thread is gone.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ThreadRecord {
    pub(crate) number: usize,
    pub(crate) launches: AtomicU64,
    /// Calls that wait for the device.
    pub(crate) syncs: AtomicU64,
    pub(crate) taken: AtomicBool,
    /// It waits for credit.
    pub(crate) waits: AtomicBool,
    /// The stream on which it ends a segment, or [`NO_STREAM`]: the stream is not destroyed meanwhile.
    pub(crate) ending: AtomicUsize,
    runs: [Run; RUNS],
    /// The launch that is being measured alone, between its two events.
    pub(crate) alone: UnsafeCell<Option<Alone>>,
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
            waits: AtomicBool::new(false),
            ending: AtomicUsize::new(NO_STREAM),
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
                presumed: shared.presumed.load(Ordering::Acquire) & TIME,
                prepaid: shared.prepaid.load(Ordering::Acquire),
            }
        })
    }

    /// Presumes a run's open launches complete: its thread has been elsewhere for long. Gives how much more that is than before, in ns;
    /// nothing where the thread has taken them out, or launched more, since they were looked at.
    pub(crate) fn presume_done(&self, device: &Device, index: usize, predicted: u64) -> u64 {
        let Run { shared, .. } = &self.runs[index % RUNS];
        let before = shared.presumed.load(Ordering::Acquire);
        let open = shared.predicted.load(Ordering::Acquire) + shared.carried.load(Ordering::Acquire);
        let after = before & !TIME | predicted & TIME;
        let done = open == predicted
            && core::ptr::eq(shared.device.load(Ordering::Relaxed), device)
            && shared.presumed.compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if done { predicted.saturating_sub(before & TIME) } else { 0 }
    }

    /// The run that a stream uses.
    ///
    /// # Safety
    /// Only the record's own thread may call this, and not while it holds a run.
    #[inline(always)]
    pub(crate) unsafe fn run(&self, stream: usize) -> Mine<'_> {
        let Run { shared, own } = &self.runs[place(stream)];
        // SAFETY: as the caller promises, there is no other reference to `own`.
        Mine { shared, own: unsafe { &mut *own.get() } }
    }

    /// All runs.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    pub(crate) unsafe fn all_runs(&self) -> [Mine<'_>; RUNS] {
        self.runs.each_ref().map(|Run { shared, own }| {
            // SAFETY: as the caller promises, there is no other reference to `own`; each is taken once.
            Mine { shared, own: unsafe { &mut *own.get() } }
        })
    }
}

/// Which of a thread's runs a stream uses: the upper bits of its low half times an odd number.
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
        run.stream = NO_STREAM;
        run.shared.device.store(core::ptr::null_mut(), Ordering::Relaxed);
    }
    thread.taken.store(false, Ordering::Release);
}
