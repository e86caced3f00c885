//! Keeping a stream waiting while a launch on it is measured.
//!
//! # Problem
//! A program whose kernels are shorter than the calls that launch them keeps the device waiting. For all its launches, the time
//! between two events in its stream is the time of its calls: an empty kernel and one of a microsecond look the same, and so does the
//! end event, whose own call comes after the kernel is over. The kernel's own time can be seen only when the device does not wait
//! for the host, and for such a program that never happens by itself.
//!
//! # Algorithm
//! The stream is told to wait for a word of page-locked memory. Behind that are queued an event, a second event, the program's launch
//! and a third event; then the word is written. The device runs them back to back, at its own pace: the time from the first event to
//! the second is an event's own time, and the time from the second to the third, less this, is the launch's.
//!
//! A driver whose streams cannot wait for a word runs a function on the host there, which waits for the same word.
//!
//! Calls are never deferred: the program's launch is made when the program makes it, and its work starts later by the time of four
//! short calls. One launch is measured so when its function's cost became known and was short, and then one for every few milliseconds
//! that segments took beyond their prediction.
//!
//! # Dangers
//! A launch call that itself waits for the device would wait for ever: under a debugger, or when the first launch of a function loads
//! it. So no first launch is held; nor is any where `CUDA_LAUNCH_BLOCKING` is set. And the helper thread ends a hold after
//! [`LONGEST`]; its measurement is not used, and after [`FAILURES`] such in a row there are no more in this context.
//! Nor is a measurement used whose first event had passed before the word was written. A driver that can wait for neither is not asked
//! again. A hold in the legacy default stream would keep other streams waiting,
//! so there is none where the program has made streams that wait for it.
//!
//! The word's page is the hook's own and stays when its context is gone: a late write harms nothing.
#![allow(unsafe_code)] // calls to the driver

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

use crate::device::context::relaxed;
use crate::sys::clock;
use crate::sys::driver::real;
use gshare_cuda_abi::types::sys;

/// The longest that a stream is kept waiting, in ns.
const LONGEST: u64 = 1_000_000;
/// Holds in a row that took longer, after which there are no more.
const FAILURES: u32 = 3;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
const DEVICEMAP: u32 = 2;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: u32 = 0;

/// A page for one word: the driver locks whole pages.
#[derive(Debug)]
#[repr(C, align(4096))]
struct Page {
    word: AtomicU32,
    rest: [u8; 4092],
}

/// A word as the host sees it, and as the device does where a stream can wait for it.
#[derive(Clone, Copy, Debug)]
struct Word {
    host: &'static AtomicU32,
    device: Option<u64>,
}

impl Word {
    /// It is for the calling thread's current context.
    fn make() -> Self {
        let page: &'static Page = Box::leak(Box::new(Page { word: AtomicU32::new(0), rest: [0; 4092] }));
        Self { host: &page.word, device: Self::mapped(page) }
    }

    /// The address by which the device reads a page.
    fn mapped(page: &'static Page) -> Option<u64> {
        let address = core::ptr::from_ref(page).cast_mut().cast::<c_void>();
        let register = real!(cuMemHostRegister_v2)?;
        // SAFETY: a page of this library's own that is never freed.
        let locked = relaxed(|| unsafe { register(address, size_of::<Page>(), DEVICEMAP) });
        let mut device = 0;
        // SAFETY: a valid out-pointer, and a page that was just registered.
        let found = locked.is_ok()
            && unsafe { real!(cuMemHostGetDevicePointer_v2)?(&raw mut device, address, 0) }.is_ok();
        found.then_some(device)
    }

    /// Has a stream wait until the word is at least `number`. `false`: it cannot.
    fn keeps_waiting(self, stream: usize, number: u32) -> bool {
        let stream = core::ptr::with_exposed_provenance_mut(stream);
        let by_device = self.device.zip(real!(cuStreamWaitValue32_v2)).is_some_and(|(address, wait)| {
            // SAFETY: a word that the device can read and that stays; the stream is the one that the program is launching on.
            unsafe { wait(stream, address, number, AT_LEAST) }.is_ok()
        });
        by_device || self.keeps_waiting_by_host(stream, number)
    }

    fn keeps_waiting_by_host(self, stream: sys::CUstream, number: u32) -> bool {
        let Some(call) = real!(cuLaunchHostFunc) else { return false };
        let request = Box::into_raw(Box::new(Awaited { word: self.host, number }));
        // SAFETY: as above; the function takes what it is given back.
        let queued = unsafe { call(stream, Some(wait_on_host), request.cast()) }.is_ok();
        if !queued {
            // SAFETY: no function was queued that would do so.
            drop(unsafe { Box::from_raw(request) });
        }
        queued
    }
}

/// The number that a function on the host waits for.
#[derive(Debug)]
struct Awaited {
    word: &'static AtomicU32,
    number: u32,
}

/// Waits for a word, in a thread of the driver's.
///
/// # Safety
/// The argument is a boxed [`Awaited`], passed once.
unsafe extern "C" fn wait_on_host(argument: *mut c_void) {
    // SAFETY: as the caller promises.
    let Awaited { word, number } = *unsafe { Box::from_raw(argument.cast::<Awaited>()) };
    let until = clock::now_ns() + LONGEST;
    while word.load(Ordering::Acquire) < number && clock::now_ns() < until {
        std::thread::yield_now();
    }
}

/// Whether a stream is kept waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    Yes,
    /// Another one of this context is.
    Busy,
    /// None of this context can be.
    Never,
}

/// Keeps a context's streams waiting, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    word: OnceLock<Option<Word>>,
    taken: AtomicBool,
    /// The number that the stream waits for, which rises from hold to hold; since when, in ns, or 0.
    number: AtomicU32,
    since: AtomicU64,
    /// Holds in a row that took too long.
    failures: AtomicU32,
}

impl Hold {
    /// Keeps a stream of the current context waiting, until [`end`](Self::end).
    pub(crate) fn begin(&self, stream: usize) -> Begun {
        if self.failures.load(Ordering::Relaxed) >= FAILURES {
            return Begun::Never;
        }
        if self.taken.swap(true, Ordering::Acquire) {
            return Begun::Busy;
        }
        let word = self.word.get_or_init(|| if launches_block() { None } else { Some(Word::make()) });
        let waits = word.is_some_and(|word| {
            let number = self.number.fetch_add(1, Ordering::AcqRel) + 1;
            self.since.store(clock::now_ns(), Ordering::Release);
            word.keeps_waiting(stream, number)
        });
        if waits {
            return Begun::Yes;
        }
        self.failures.store(FAILURES, Ordering::Relaxed);
        self.since.store(0, Ordering::Release);
        self.taken.store(false, Ordering::Release);
        Begun::Never
    }

    /// The stream goes on; `held`: it has waited until now. `false`: it has gone on before, by itself.
    pub(crate) fn end(&self, held: bool) -> bool {
        let in_time = self.since.swap(0, Ordering::AcqRel) != 0;
        if in_time {
            let failures = if held { 0 } else { self.failures.load(Ordering::Relaxed) + 1 };
            self.failures.store(failures, Ordering::Relaxed);
            self.let_go(self.number.load(Ordering::Acquire));
        }
        self.taken.store(false, Ordering::Release);
        in_time && held
    }

    /// Ends a hold that has lasted too long.
    pub(crate) fn end_if_overdue(&self, now: u64) {
        let (since, number) = (self.since.load(Ordering::Acquire), self.number.load(Ordering::Acquire));
        let overdue = since != 0 && now.saturating_sub(since) > LONGEST;
        if overdue && self.since.compare_exchange(since, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.let_go(number);
        }
    }

    /// The word only rises: a late write of an earlier number holds nothing up.
    fn let_go(&self, number: u32) {
        if let Some(Some(word)) = self.word.get() {
            word.host.fetch_max(number, Ordering::AcqRel);
        }
    }
}

/// Whether the program asked for launch calls that wait for their kernels.
fn launches_block() -> bool {
    std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value != "0")
}
