//! The switch that every wrapper reads first, on a page that a fork empties.
//!
//! ```text
//! Armed ── first context, limits or a daemon ──▶ Active ── whole device, or GSHARE_ON_FAILURE=run ──▶ Off
//!   │                                              └────── its helper thread is gone ─────────────▶ Shut
//!   └───── nothing to enforce, or GSHARE_DISABLE ─────────────────────────────────────────────────▶ Off
//! fork: the child's page is zero, and zero is Armed: it starts over, with none of the parent's locks or threads
//! ```
//! The kernel zeroes the page in a child (`MADV_WIPEONFORK`), for every system call that makes a child. `vfork` shares the page
//! with the parent, rightly, because such a child may only call `exec`. A `pthread_atfork` handler does the same for kernels before
//! 4.14, and empties the word of the child's one thread.
#![allow(unsafe_code)] // memory advice on one static page

use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::device::Device;
use crate::device::context::Contexts;
use crate::device::devices::Devices;
use crate::launch::guard::Guard;
use crate::launch::threads::Threads;
use crate::sys::bell::Bell;
use crate::sys::config::OnFailure;
use crate::sys::lock::Lock;
use crate::sys::tls;

/// The wrappers' behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum State {
    /// Nothing was decided yet in this process.
    Armed = 0,
    /// Launches are metered.
    Active = 1,
    /// Every call goes straight to the driver.
    Off = 2,
    /// No launch and no allocation goes through.
    Shut = 3,
}

/// The number of destroyed handles remembered by name.
const GRAVES: usize = 16;
/// Stands for all streams of a context, in place of one stream.
pub(crate) const ALL_STREAMS: usize = usize::MAX;

/// The state of the launch path in a metered process: contexts, devices and threads, and the means to wake the helper thread.
#[derive(Debug)]
pub(crate) struct Metering {
    pub(crate) contexts: Contexts,
    pub(crate) devices: Devices,
    pub(crate) threads: Threads,
    pub(crate) bell: Bell,
    /// The time of the helper thread's last loop, in ns.
    pub(crate) beat: AtomicU64,
    pub(crate) on_failure: OnFailure,
}

/// State of the process that a forked child must not inherit.
#[repr(C, align(4096))]
pub(crate) struct Control {
    state: AtomicU32,
    /// Captures under way, as far as the wrappers saw.
    captures: AtomicU32,
    /// The state of the launch path, set before `state` becomes `Active`. It is never freed, so a late reader is safe.
    metering: AtomicPtr<Metering>,
    /// The count of destroyed streams and contexts, and the last of their names. Code that kept such a handle must not use it any more.
    destroyed: AtomicU64,
    graves: [AtomicUsize; GRAVES],
    /// Whether the program ever made a stream that the legacy stream waits for.
    blocking_streams: AtomicBool,
    /// The causes told so far, as bits: see [`cannot_meter`](crate::launch::failure::cannot_meter).
    told: AtomicU32,
    /// The device of every launch, while a launch has to do nothing but spend credit: launches are metered, there is one device,
    /// and no capture is under way. Null otherwise.
    fast: AtomicPtr<Device>,
    /// Whether calls may touch device memory.
    pub(crate) guard: Guard,
    updating: Lock<()>,
}

pub(crate) static CONTROL: Control = Control {
    state: AtomicU32::new(0),
    captures: AtomicU32::new(0),
    metering: AtomicPtr::new(core::ptr::null_mut()),
    destroyed: AtomicU64::new(0),
    graves: [const { AtomicUsize::new(0) }; GRAVES],
    blocking_streams: AtomicBool::new(false),
    told: AtomicU32::new(0),
    fast: AtomicPtr::new(core::ptr::null_mut()),
    guard: Guard::new(),
    updating: Lock::new(()),
};

impl Control {
    #[inline(always)]
    pub(crate) fn state(&self) -> u32 {
        self.state.load(Ordering::Relaxed)
    }

    pub(crate) fn set_state(&self, state: State) {
        self.state.store(state as u32, Ordering::Release);
        self.update();
    }

    /// The device of the fast path, if there is a fast path.
    #[inline(always)]
    pub(crate) fn fast(&self) -> Option<&'static Device> {
        // SAFETY: null or a leaked device.
        unsafe { self.fast.load(Ordering::Acquire).as_ref() }
    }

    /// Decides again whether there is a fast path, after a change.
    pub(crate) fn update(&self) {
        // Two updates must not cross, or the later answer would be lost.
        let _one_at_a_time = self.updating.lock();
        let open = self.state() == State::Active as u32 && !self.capturing();
        let device = self.metering().filter(|_| open).and_then(|metering| metering.devices.sole());
        let device = device.map_or(core::ptr::null_mut(), |device| core::ptr::from_ref(device).cast_mut());
        self.fast.store(device, Ordering::Release);
    }

    /// Notes a context made on this device. If another device has a context, every launch must ask where it goes.
    pub(crate) fn context_on(&self, ordinal: i32) {
        let Some(metering) = self.metering() else { return };
        if let Some(sole) = metering.devices.sole().filter(|device| device.ordinal != ordinal) {
            // From here on each device counts its own launches.
            let launches =
                metering.threads.all().iter().map(|thread| thread.launches.load(Ordering::Relaxed)).sum();
            sole.launches.store(launches, Ordering::Relaxed);
            metering.devices.set_sole(None);
            self.update();
        }
    }

    #[inline(always)]
    pub(crate) fn capturing(&self) -> bool {
        self.captures.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn capture_began(&self) {
        self.captures.fetch_add(1, Ordering::AcqRel);
        self.update();
    }

    pub(crate) fn capture_ended(&self) {
        // An end without a seen beginning must not wrap below zero.
        let _ = self.captures.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| n.checked_sub(1));
        self.update();
    }

    #[inline(always)]
    pub(crate) fn destroyed(&self) -> u64 {
        self.destroyed.load(Ordering::Acquire)
    }

    /// Notes that a stream, or [`ALL_STREAMS`] of a context, is about to be destroyed.
    pub(crate) fn handle_destroyed(&self, stream: usize) {
        let _one_at_a_time = self.updating.lock();
        let count = self.destroyed.load(Ordering::Relaxed);
        self.graves[place(count)].store(stream, Ordering::Relaxed);
        self.destroyed.store(count + 1, Ordering::Release);
    }

    /// Whether this stream was, or may have been, destroyed since the count was `since`.
    pub(crate) fn is_destroyed(&self, stream: usize, since: u64) -> bool {
        if self.destroyed() == since {
            return false;
        }
        let _one_at_a_time = self.updating.lock();
        let count = self.destroyed();
        count - since > GRAVES as u64
            || (since..count)
                .any(|n| [stream, ALL_STREAMS].contains(&self.graves[place(n)].load(Ordering::Relaxed)))
    }

    pub(crate) fn has_blocking_streams(&self) -> bool {
        self.blocking_streams.load(Ordering::Relaxed)
    }

    pub(crate) fn blocking_stream_made(&self) {
        self.blocking_streams.store(true, Ordering::Relaxed);
    }

    /// Whether this cause has yet to be told, which the caller then does.
    pub(crate) fn tells(&self, cause: u32) -> bool {
        self.told.fetch_or(cause, Ordering::AcqRel) & cause == 0
    }

    /// The state of the launch path, if there is any.
    #[inline(always)]
    pub(crate) fn metering(&self) -> Option<&'static Metering> {
        // SAFETY: the pointer is null or leads to a value that is never freed.
        unsafe { self.metering.load(Ordering::Acquire).as_ref() }
    }

    pub(crate) fn install(&self, metering: &'static Metering) {
        self.metering.store(core::ptr::from_ref(metering).cast_mut(), Ordering::Release);
    }

    /// Makes the page empty in forked children, as called once by the library's constructor.
    pub(crate) fn wipe_on_fork(&self) {
        let page = core::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: the page is this static, page-aligned and page-sized, and the advice takes effect in children only. The handler
        // stores to atomics and to its own thread's word.
        unsafe {
            libc::madvise(page, size_of::<Self>(), libc::MADV_WIPEONFORK);
            libc::pthread_atfork(None, None, Some(forget));
        }
    }
}

fn place(count: u64) -> usize {
    usize::try_from(count % GRAVES as u64).unwrap_or(0)
}

extern "C" fn forget() {
    // SAFETY: the calling thread's own word.
    unsafe { *tls::word() = 0 };
    CONTROL.metering.store(core::ptr::null_mut(), Ordering::Relaxed);
    CONTROL.fast.store(core::ptr::null_mut(), Ordering::Relaxed);
    CONTROL.captures.store(0, Ordering::Relaxed);
    CONTROL.guard.forget();
    CONTROL.told.store(0, Ordering::Relaxed);
    CONTROL.state.store(State::Armed as u32, Ordering::Relaxed);
}
