//! Keeps a stream waiting while a launch on it is measured.
//!
//! # Problem
//! A program with kernels shorter than their launch calls keeps the device waiting. For all its launches, the time between two
//! events in the stream is the time of the calls. An empty kernel and a kernel of a microsecond look the same, since even the end
//! event's own call comes after the kernel is over. The kernel's own time can be seen only when the device does not wait for the
//! host, which never happens by itself in such a program.
//!
//! # Algorithm
//! The stream is told to wait for a word of page-locked memory. Behind the wait the hook queues an event, a second event, the program's
//! launch and a third event, and then writes the word. The device runs them back to back, at its own pace. The time from the first event
//! to the second is an event's own time. The time from the second to the third, less an event's own time, is the launch's.
//!
//! Where a driver's streams cannot wait for a word, they run a function on the host, which waits for the same word.
//!
//! Calls are never deferred. The program's launch is made when the program makes it, and its work starts later by the time of four
//! short calls. A launch is measured in this way when its function's cost became known and was short, and later once for every few
//! milliseconds that segments took beyond their prediction.
//!
//! # Dangers
//! A launch call that itself waits for the device would wait for ever, for example under a debugger, or when the first launch of a
//! function loads it. So no first launch is held, and no launch at all where `CUDA_LAUNCH_BLOCKING` is set. The helper thread ends
//! a hold after [`LONGEST`] and its measurement is not used. After [`FAILURES`] such holds in a row, there are no more in this
//! context. A measurement is not used either if its first event had passed before the word was written. A driver that offers
//! neither wait is not asked again. A hold in the legacy default stream would keep other streams waiting, so there is none where
//! the program has made streams that wait for the legacy stream.
//!
//! The word's page is the hook's own and stays when its context is gone, so a late write does no harm.
#![allow(unsafe_code)] // calls to the driver

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

use crate::device::context::relaxed;
use crate::sys::clock;
use crate::sys::driver::real;
use gshare_cuda_abi::types::sys;

/// Longest wait of a held stream, in ns.
const LONGEST: u64 = 1_000_000;
/// The number of overlong holds in a row after which there are no more.
const FAILURES: u32 = 3;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
const DEVICEMAP: u32 = 2;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: u32 = 0;

/// A page for one word, because the driver locks whole pages.
#[derive(Debug)]
#[repr(C, align(4096))]
struct Page {
    word: AtomicU32,
    rest: [u8; 4092],
}

/// A word as the host sees it, and as the device sees it where a stream can wait for it.
#[derive(Clone, Copy, Debug)]
struct Word {
    host: &'static AtomicU32,
    device: Option<u64>,
}

impl Word {
    /// Makes a word for the calling thread's current context.
    fn make() -> Self {
        let page: &'static Page = Box::leak(Box::new(Page { word: AtomicU32::new(0), rest: [0; 4092] }));
        Self { host: &page.word, device: Self::mapped(page) }
    }

    /// The device's address of a page.
    fn mapped(page: &'static Page) -> Option<u64> {
        let address = core::ptr::from_ref(page).cast_mut().cast::<c_void>();
        let register = real!(cuMemHostRegister_v2)?;
        // SAFETY: the page is this library's own and is never freed.
        let locked = relaxed(|| unsafe { register(address, size_of::<Page>(), DEVICEMAP) });
        let mut device = 0;
        // SAFETY: a valid out-pointer, and a page registered just before.
        let found = locked.is_ok()
            && unsafe { real!(cuMemHostGetDevicePointer_v2)?(&raw mut device, address, 0) }.is_ok();
        found.then_some(device)
    }

    /// Has a stream wait until the word is at least `number`, or returns `false` if the stream cannot.
    fn keeps_waiting(self, stream: usize, number: u32) -> bool {
        let stream = core::ptr::with_exposed_provenance_mut(stream);
        let by_device = self.device.zip(real!(cuStreamWaitValue32_v2)).is_some_and(|(address, wait)| {
            // SAFETY: the device can read the word, which stays, and the program is launching on the stream.
            unsafe { wait(stream, address, number, AT_LEAST) }.is_ok()
        });
        by_device || self.keeps_waiting_by_host(stream, number)
    }

    fn keeps_waiting_by_host(self, stream: sys::CUstream, number: u32) -> bool {
        let Some(call) = real!(cuLaunchHostFunc) else { return false };
        let request = Box::into_raw(Box::new(Awaited { word: self.host, number }));
        // SAFETY: as above, and the function takes back the pointer it is given.
        let queued = unsafe { call(stream, Some(wait_on_host), request.cast()) }.is_ok();
        if !queued {
            // SAFETY: no function was queued to free the pointer.
            drop(unsafe { Box::from_raw(request) });
        }
        queued
    }
}

/// The number for which a function on the host waits.
#[derive(Debug)]
struct Awaited {
    word: &'static AtomicU32,
    number: u32,
}

/// Waits for a word, in a thread of the driver.
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

/// The outcome of an attempt to keep a stream waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    Yes,
    /// Another stream of this context is kept waiting.
    Busy,
    /// No stream of this context can be kept waiting.
    Never,
}

/// Keeps a context's streams waiting, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    word: OnceLock<Option<Word>>,
    taken: AtomicBool,
    /// The number for which the stream waits, which rises from hold to hold, and the start of the hold in ns, or 0.
    number: AtomicU32,
    since: AtomicU64,
    /// The number of overlong holds in a row.
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

    /// Lets the stream go on, where `held` says whether the stream has waited until now. Returns `false` if it went on before, by itself.
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

    /// Ends an overlong hold.
    pub(crate) fn end_if_overdue(&self, now: u64) {
        let (since, number) = (self.since.load(Ordering::Acquire), self.number.load(Ordering::Acquire));
        let overdue = since != 0 && now.saturating_sub(since) > LONGEST;
        if overdue && self.since.compare_exchange(since, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.let_go(number);
        }
    }

    /// The word only rises, so a late write of an earlier number holds nothing up.
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
