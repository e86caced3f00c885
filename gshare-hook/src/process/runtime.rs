//! The state of a metered process, and the page by which it is found.
#![allow(unsafe_code)] // memory advice on one static page

use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::OnceLock;
use std::time::Duration as StdDuration;

use gshare_core::RunId;
use gshare_core::reason::Obstacle;
use gshare_cuda_abi::types::CUdevice;
use gshare_meter::MemoryAccount;

use crate::device::Device;
use crate::device::book::Book;
use crate::device::devices::{OwnContexts, current_ordinal, exists, identity, slot_of};
use crate::launch::control::{CONTROL, Metering, State};
use crate::launch::failure::{Why, cannot_meter};
use crate::process::parking::Parking;
use crate::process::question::{Answer, Request};
use crate::sys::config::Config;
use crate::sys::leak::{is_there, leak};
use crate::sys::lock::Lock;

/// Longest wait for the daemon at the first use of a device, in all.
const ATTACH_WAIT: StdDuration = StdDuration::from_secs(2);
/// Upper bound on the memory for one device's state.
const DEVICE_BYTES: usize = 1 << 20;

/// Whether a process, device or call is metered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Metered<T> {
    /// Metering applies, by means of this value.
    Yes(T),
    /// Metering does not apply, so the driver is called.
    No,
    /// Metering is impossible, so the call fails.
    Refused,
}

/// A metered process: its settings, launch path, memory, and requests to the helper thread.
#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) config: Config,
    /// The run's number, from the environment or made by the process, which keeps it over reconnects.
    pub(crate) run: RunId,
    pub(crate) metering: Metering,
    pub(crate) book: Book,
    /// The process's blocks, or the obstacle to parking, if the user asked for a parkable process.
    pub(crate) parking: OnceLock<Result<Parking, Obstacle>>,
    pub(crate) attaching: Lock<()>,
    pub(crate) requests: Lock<Vec<Request>>,
    /// Whether the helper thread was started.
    pub(crate) helped: AtomicBool,
    /// Whether a daemon has accepted a device.
    pub(crate) served: AtomicBool,
}

impl Runtime {
    /// The device of the calling thread's current context, attached if need be.
    #[cold]
    pub(crate) fn current_device(&'static self) -> Metered<&'static Device> {
        // Without a context the driver fails the call by itself.
        current_ordinal().map_or(Metered::No, |ordinal| self.device(ordinal))
    }

    /// A device by ordinal, attached if need be.
    pub(crate) fn device(&'static self, ordinal: CUdevice) -> Metered<&'static Device> {
        if self.metering.devices.get(ordinal).is_none() && !exists(ordinal) {
            // For host memory, or a device unknown to this process, the driver fails the call by itself.
            return Metered::No;
        }
        match self.attach(ordinal) {
            Ok(device) => Metered::Yes(device),
            Err(why) if cannot_meter(self.config.on_failure, why) => Metered::No,
            Err(_) => Metered::Refused,
        }
    }

    /// Like [`device`](Self::device), but with the reason for a failure.
    pub(crate) fn attach(&self, ordinal: CUdevice) -> Result<&'static Device, Why> {
        if let Some(device) = self.metering.devices.get(ordinal) {
            return Ok(device);
        }
        let _one_at_a_time = self.attaching.lock();
        // Another thread may have attached the device meanwhile.
        if let Some(device) = self.metering.devices.get(ordinal) {
            return Ok(device);
        }
        slot_of(ordinal).ok_or(Why::Device(ordinal))?;
        let (uuid, total) = identity(ordinal).ok_or(Why::Device(ordinal))?;
        if !is_there(DEVICE_BYTES) {
            return Err(Why::Memory);
        }
        // A process without a run number has no siblings.
        let memory = match self.config.run {
            Some(_) => MemoryAccount::of_member(total),
            None => MemoryAccount::new(total),
        };
        let device = leak(Device::new(ordinal, memory)).ok_or(Why::Memory)?;
        // The limit holds until a daemon sets another, however long that takes.
        if let Some(limit) = self.config.spec.memory() {
            device.memory.limit_to(Some(limit));
        }
        self.metering.devices.name(ordinal, uuid);
        let answer = Answer::default();
        self.ask(Request::Attach(device, uuid, answer.clone()));
        if answer.wait(ATTACH_WAIT) == Some(true) {
            self.served.store(true, Ordering::Relaxed);
        }
        self.metering.devices.insert(device);
        CONTROL.context_on(ordinal);
        Ok(device)
    }

    pub(crate) fn take_requests(&self) -> Vec<Request> {
        core::mem::take(&mut *self.requests.lock())
    }

    pub(crate) fn ask(&self, request: Request) {
        self.requests.lock().push(request);
        self.metering.bell.ring();
    }
}

/// State of the process that a forked child must not inherit. Each launch reads only [`CONTROL`] beside it.
#[repr(C, align(4096))]
pub(crate) struct Process {
    /// The runtime is never freed, so a late reader is safe.
    runtime: AtomicPtr<Runtime>,
    /// Devices with contexts beside the primary context.
    pub(crate) own_contexts: OwnContexts,
    /// Whether a thread is deciding about metering.
    arming: AtomicU32,
}

pub(crate) static PROCESS: Process = Process {
    runtime: AtomicPtr::new(core::ptr::null_mut()),
    own_contexts: OwnContexts::new(),
    arming: AtomicU32::new(0),
};

impl Process {
    /// The runtime of this process, if there is any.
    #[inline(always)]
    pub(crate) fn runtime(&self) -> Option<&'static Runtime> {
        // SAFETY: the pointer is null or leads to a value that is never freed.
        unsafe { self.runtime.load(Ordering::Acquire).as_ref() }
    }

    /// The runtime, while launches are metered.
    pub(crate) fn metering(&self) -> Option<&'static Runtime> {
        self.runtime().filter(|_| CONTROL.state() == State::Active as u32)
    }

    pub(crate) fn install(&self, runtime: &'static Runtime) {
        self.runtime.store(core::ptr::from_ref(runtime).cast_mut(), Ordering::Release);
    }

    pub(crate) fn begin_arming(&self) -> bool {
        self.arming.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn end_arming(&self) {
        self.arming.store(0, Ordering::Release);
    }

    /// Makes the page empty in forked children, as called once by the library's constructor.
    pub(crate) fn wipe_on_fork(&self) {
        let page = core::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: the page is this static, page-aligned and page-sized, and the advice takes effect in children only. The handler
        // only stores to atomics.
        unsafe {
            libc::madvise(page, size_of::<Self>(), libc::MADV_WIPEONFORK);
            libc::pthread_atfork(None, None, Some(forget));
        }
    }
}

extern "C" fn forget() {
    PROCESS.runtime.store(core::ptr::null_mut(), Ordering::Relaxed);
    PROCESS.end_arming();
}
