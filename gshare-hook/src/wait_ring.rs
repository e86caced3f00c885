//! The ring in which this process says what it waits for; see [`gshare_core::wait_ring`].
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `GSHARE_TRACE` | of `gate`, `memory`, `link`, with commas, or `none`; the simulated driver has words of its own | `gate,link` |
//! | `GSHARE_TRACE_RING` | a new file for the ring, which stays when the process is gone; `%p` is the process id | none stays |
//!
//! By default the ring is memory without a name, and `gshare trace PID` finds it among the descriptors of the process. Only the
//! owner may read it. The memory is taken when it is made and cannot be taken away, so that no write to it fails; a file that
//! another process cuts is the exception, and a reason for not asking for one.
//!
//! Nothing is written where launches go through: what is traced are waits, allocations and frames, some hundred nanoseconds
//! beside microseconds. A forked child starts over with a ring of its own.
#![allow(unsafe_code)] // a mapping

use core::sync::atomic::{AtomicU64, Ordering};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use gshare_core::wait_ring::{Denial, End, Event, FromDaemon, Lane, Recorder, WORDS, Why};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::device::Device;
use crate::process::control::{CONTROL, State};
use crate::process::lifecycle::Runtime;
use crate::sys::clock;
use crate::sys::config::Wanted;
use crate::sys::connection::Descriptor;

/// What a reader looks for among descriptors.
const NAME: &str = "gshare-trace";
/// How long a launch waits before that is written down while it waits; and how long until it is written again, in ns.
const PATIENCE: u64 = 20_000_000;
const AGAIN: u64 = 1_000_000_000;
/// Number of seldom events that are written in a row, before it is one per [`PERIOD`] (ns): a program that asks for memory in
/// vain again and again must not overwrite everything else.
const BURST: u64 = 64;
const PERIOD: u64 = 1_000_000_000;

/// The ring of this process.
#[derive(Debug)]
pub(crate) struct Trace {
    recorder: Recorder<'static>,
    traced: u64,
    /// When the burst of seldom events is spent, in ns; see [`BURST`].
    spent: AtomicU64,
    /// By which a reader finds it.
    _file: Descriptor,
}

impl Trace {
    /// Makes the ring; without memory or descriptors for it there is none.
    pub(crate) fn begin(wanted: &Wanted) -> Result<Option<Self>, String> {
        if wanted.traced == 0 {
            return Ok(None);
        }
        let process = std::process::id();
        let file = match &wanted.file {
            None => nameless(),
            Some(name) => named(name, process),
        };
        let file = match (file, &wanted.file) {
            (Ok(file), _) => file,
            (Err(error), Some(name)) => {
                return Err(format!("GSHARE_TRACE_RING={}: {error}", name.display()));
            }
            (Err(_), None) => return Ok(None),
        };
        let Some(words) = map(&file) else { return Ok(None) };
        let recorder = Recorder::new(words, process, clock::now_ns(), wanted.traced);
        let (traced, spent, _file) = (wanted.traced, AtomicU64::new(0), Descriptor::new(file));
        Ok(Some(Self { recorder, traced, spent, _file }))
    }

    fn record(&self, device: Option<i32>, event: Event) {
        let denial = matches!(event, Event::Denied { .. });
        if self.traced & event.category().bit() == 0 && !denial {
            return;
        }
        let now = clock::now_ns();
        if event.lane() == Lane::Seldom && !self.has_room(now) {
            return;
        }
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        self.recorder.record(now, thread, device.and_then(|device| u16::try_from(device).ok()), event);
    }

    fn has_room(&self, now: u64) -> bool {
        let next = |spent: u64| Some(spent.max(now) + PERIOD).filter(|next| *next <= now + BURST * PERIOD);
        self.spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

/// Memory that no name leads to and that no process can shrink.
fn nameless() -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, (WORDS * 8) as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// A new file.
fn named(name: &OsStr, process: u32) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(with_pid(name, process), flags, Mode::RUSR | Mode::WUSR)?;
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, (WORDS * 8) as u64) {
        // Then it takes space as it is written.
        Err(Errno::OPNOTSUPP) => rustix::fs::ftruncate(&file, (WORDS * 8) as u64)?,
        other => other?,
    }
    Ok(file)
}

/// The name with each `%p` replaced.
fn with_pid(name: &OsStr, process: u32) -> OsString {
    let mut path = Vec::new();
    let mut rest = name.as_bytes();
    while let Some(at) = rest.windows(2).position(|pair| pair == b"%p") {
        path.extend_from_slice(&rest[..at]);
        path.extend_from_slice(process.to_string().as_bytes());
        rest = &rest[at + 2..];
    }
    path.extend_from_slice(rest);
    OsString::from_vec(path)
}

fn map(file: &OwnedFd) -> Option<&'static [AtomicU64; WORDS]> {
    let (access, length) = (ProtFlags::READ | ProtFlags::WRITE, WORDS * 8);
    // SAFETY: a new mapping at a place that the kernel chooses.
    let at = unsafe { rustix::mm::mmap(core::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) };
    // SAFETY: the mapping has this length, is aligned to a page and is never unmapped; other processes may write to it, which
    // atomics allow.
    at.ok().map(|at| unsafe { &*at.cast::<[AtomicU64; WORDS]>() })
}

/// What launches on a device wait for, as the helper thread sees it.
#[derive(Debug)]
pub(crate) struct Cause(AtomicU64);

impl Cause {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn set(&self, why: Why) {
        self.0.store(why.pack(), Ordering::Relaxed);
    }

    fn get(&self) -> Why {
        Why::unpack(self.0.load(Ordering::Relaxed)).unwrap_or(Why::Credit {})
    }
}

/// A launch that waits for credit.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    runtime: &'a Runtime,
    device: &'a Device,
    began: u64,
    /// When it is written down next that it waits, and what for it was last.
    due: u64,
    said: Option<core::mem::Discriminant<Why>>,
}

impl<'a> Waiting<'a> {
    pub(crate) fn new(runtime: &'a Runtime, device: &'a Device, began: u64) -> Self {
        if device.waiting.load(Ordering::Relaxed) == 0 {
            device.why.set(Why::Credit {});
        }
        Self { runtime, device, began, due: began + PATIENCE, said: None }
    }

    /// The thread is about to sleep.
    pub(crate) fn look(&mut self, now: u64) {
        let why = self.device.why.get();
        let kind = core::mem::discriminant(&why);
        if now >= self.due || self.said.is_some_and(|said| said != kind) {
            (self.due, self.said) = (now + AGAIN, Some(kind));
            let event = Event::Waiting { why, waited_ns: now.saturating_sub(self.began) };
            self.runtime.trace(Some(self.device.ordinal), event);
        }
    }

    /// The wait is over; `passed`: the launch is made.
    pub(crate) fn end(self, cost_ns: u64, passed: bool) {
        let metered =
            CONTROL.state() == State::Active as u32 && !self.device.free_running.load(Ordering::Acquire);
        let end = match (passed, metered) {
            (false, _) => End::Failed,
            (true, true) => End::Launched,
            (true, false) => End::NotMetered,
        };
        self.runtime.waited(self.device, self.device.why.get(), self.began, cost_ns, end);
    }
}

impl Runtime {
    /// Writes an event down, where it is asked for.
    pub(crate) fn trace(&self, device: Option<i32>, event: Event) {
        if let Some(trace) = &self.trace {
            trace.record(device, event);
        }
    }

    /// The first use of a device has asked the daemon about it.
    pub(crate) fn asked_for_device(&self, device: &Device, asked: u64, answer: Option<bool>) {
        let answer = match answer {
            Some(true) => FromDaemon::Taken,
            Some(false) => FromDaemon::Alone,
            None => FromDaemon::NoAnswer,
        };
        let waited_ns = clock::now_ns().saturating_sub(asked);
        self.trace(Some(device.ordinal), Event::DeviceAsked { waited_ns, answer });
    }

    fn waited(&self, device: &Device, why: Why, began: u64, cost_ns: u64, end: End) {
        let waited_ns = clock::now_ns().saturating_sub(began);
        self.trace(Some(device.ordinal), Event::Waited { why, waited_ns, cost_ns, end });
    }

    /// A launch has waited for the measurement of the one before.
    pub(crate) fn waited_for_measurement(&self, device: &Device, began: u64) {
        self.waited(device, Why::Measuring {}, began, 0, End::Launched);
    }

    /// Memory was charged. Gives `true`.
    pub(crate) fn charged(&self, device: &Device, bytes: u64) -> bool {
        let (used, limit) = account(device);
        self.trace(Some(device.ordinal), Event::Charged { bytes, used, limit });
        true
    }

    /// Memory was given back.
    pub(crate) fn released(&self, device: &Device, bytes: u64) {
        let (used, limit) = account(device);
        self.trace(Some(device.ordinal), Event::Released { bytes, used, limit });
    }

    /// Memory was refused; `answered`: by an answer, and not for want of one. Gives `false`.
    pub(crate) fn denied(&self, device: &Device, bytes: u64, answered: bool) -> bool {
        let (used, limit) = account(device);
        let denial = if answered { Denial::OverLimit } else { Denial::NoAnswer };
        self.trace(Some(device.ordinal), Event::Denied { bytes, used, limit, denial });
        false
    }
}

fn account(device: &Device) -> (u64, u64) {
    (device.memory.used(), device.memory.limit().unwrap_or(u64::MAX))
}
