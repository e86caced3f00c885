//! Beginning, fork and end of a hooked process.
//!
//! * The library's constructor finds the real `dlsym` and marks the control page. Nothing else: most processes that
//!   inherit `LD_PRELOAD` never use CUDA.
//! * The first launch, allocation or look at memory with a current context **arms** the hook: the environment is read,
//!   and if there is a limit or a daemon, the runtime is made and its one helper thread started. Otherwise the hook
//!   stands aside for good.
//! * A forked child finds an empty control page and starts over ([`crate::process::control`]); it never touches its parent's
//!   runtime, whose locks may be held by threads that it does not have. `exec` closes the socket.
//! * At exit the helper thread reports what was used, and lets go of the driver before the driver's own destructors run.
#![allow(unsafe_code)] // a constructor, signal masks, atexit and a thread key

use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration as StdDuration;

use gshare_core::wait_ring::Event;
use gshare_core::{Bytes, DeviceUuid, RunId};
use gshare_cuda_abi::types::{CUdevice, CUresult, sys};
use gshare_meter::MemoryAccount;

use crate::device::Device;
use crate::device::book::Book;
use crate::device::context::Contexts;
use crate::launch::runs;
use crate::launch::runs::ThreadRecord;
use crate::process::control::{CONTROL, State};
use crate::process::helper;
use crate::sys::config::Config;
use crate::sys::connection::Bell;
use crate::sys::driver::real;
use crate::sys::{clock, resolve, tls};
use crate::wait_ring::Trace;

const DEVICES: usize = 64;
/// How long the first use of a device waits for the daemon, in all.
const ATTACH_WAIT: StdDuration = StdDuration::from_secs(2);
/// How long a look at memory waits for what the instance's other processes use: longer than the daemon waits for them.
const VIEW_WAIT: StdDuration = StdDuration::from_millis(500);
/// How long the end of the process waits for its last reports: longer than the meter takes, where CPUs are so busy that the helper thread
/// is late.
const LEAVE_WAIT: StdDuration = StdDuration::from_secs(1);
/// Stack of the helper thread; what is not touched costs nothing.
const STACK: usize = 1 << 20;
/// A helper thread that has not looped while another thread of the process was awake for this long is gone, in ns.
const GONE_NS: u64 = 5_000_000_000;
/// The most of the time between two looks for which the process was surely not stopped, in ns.
const LOOK_NS: u64 = 20_000_000;

/// Something that a thread asks of the helper thread.
#[derive(Debug)]
pub(crate) enum Request {
    /// Attach this device.
    Attach(&'static Device, DeviceUuid, Answer),
    /// Memory that is to be reserved, all or nothing.
    Memory(&'static Device, u64, Answer),
    /// What the instance's other processes use.
    View(&'static Device, Answer),
    /// Memory to give back.
    Release(&'static Device, Bytes),
    /// The process is about to end: what it used is to be reported.
    Leave(Answer),
}

/// What has become of a question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Outcome {
    #[default]
    Pending,
    Given(bool),
    /// The thread that asked waits no longer.
    Abandoned,
}

/// Where an answer arrives: `true` for yes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer(Arc<(Mutex<Outcome>, Condvar)>);

impl Answer {
    /// `false`: too late, no thread waits.
    pub(crate) fn give(&self, answer: bool) -> bool {
        let mut outcome = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = *outcome == Outcome::Pending;
        if waits {
            *outcome = Outcome::Given(answer);
        }
        drop(outcome);
        self.0.1.notify_all();
        waits
    }

    /// Waits while the process is awake: in steps, of which a process that was stopped for a while loses one.
    fn wait(&self, at_most: StdDuration) -> Option<bool> {
        let answer = (0..at_most.as_nanos() / u128::from(LOOK_NS)).find_map(|_| self.step());
        answer.or_else(|| {
            let mut outcome = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
            match *outcome {
                Outcome::Given(answer) => Some(answer),
                _ => {
                    *outcome = Outcome::Abandoned;
                    None
                }
            }
        })
    }

    fn step(&self) -> Option<bool> {
        let at_most = StdDuration::from_nanos(LOOK_NS);
        let outcome = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (outcome, _) = self
            .0
            .1
            .wait_timeout_while(outcome, at_most, |outcome| *outcome == Outcome::Pending)
            .unwrap_or_else(PoisonError::into_inner);
        if let Outcome::Given(answer) = *outcome { Some(answer) } else { None }
    }
}

/// All that a metering process has.
#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) config: Config,
    /// The number of its run: the environment's, or one of its own, which it keeps over reconnects.
    pub(crate) run: RunId,
    pub(crate) contexts: Contexts,
    pub(crate) book: Book,
    /// The only device with a context, if there is only one.
    sole: AtomicPtr<Device>,
    devices: [AtomicPtr<Device>; DEVICES],
    uuids: Mutex<Vec<(i32, DeviceUuid)>>,
    attaching: Mutex<()>,
    threads: Mutex<Vec<&'static ThreadRecord>>,
    thread_key: libc::pthread_key_t,
    requests: Mutex<Vec<Request>>,
    pub(crate) bell: Bell,
    /// A daemon has taken a device.
    served: AtomicBool,
    pub(crate) beat: AtomicU64,
    pub(crate) trace: Option<Trace>,
}

impl Runtime {
    /// The device that the calling thread launches on.
    #[inline(always)]
    pub(crate) fn launch_device(&'static self) -> Option<&'static Device> {
        match self.sole_device() {
            Some(device) => Some(device),
            None => self.current_device(),
        }
    }

    /// The only device with a context, if there is only one.
    pub(crate) fn sole_device(&self) -> Option<&'static Device> {
        // SAFETY: null or a leaked device.
        unsafe { self.sole.load(Ordering::Acquire).as_ref() }
    }

    /// The device of the calling thread's current context, attached if need be.
    #[cold]
    pub(crate) fn current_device(&'static self) -> Option<&'static Device> {
        self.device(current_ordinal()?)
    }

    /// A device by ordinal, attached if need be.
    pub(crate) fn device(&'static self, ordinal: CUdevice) -> Option<&'static Device> {
        let slot = self.devices.get(slot_of(ordinal)?)?;
        // SAFETY: null or a leaked device.
        if let Some(device) = unsafe { slot.load(Ordering::Acquire).as_ref() } {
            return Some(device);
        }
        let _one_at_a_time = self.attaching.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as above; another thread may have been faster.
        if let Some(device) = unsafe { slot.load(Ordering::Acquire).as_ref() } {
            return Some(device);
        }
        let (uuid, total) = identity(ordinal)?;
        // A process without a number of a run has no siblings.
        let memory = match self.config.run {
            Some(_) => MemoryAccount::of_member(total),
            None => MemoryAccount::new(total),
        };
        let device: &'static Device = Box::leak(Box::new(Device::new(ordinal, memory)));
        // Until a daemon says otherwise, however long that takes.
        if let Some(limit) = self.config.spec.memory() {
            device.memory.limit_to(Some(limit));
        }
        self.uuids.lock().unwrap_or_else(PoisonError::into_inner).push((ordinal, uuid));
        let answer = Answer::default();
        self.ask(Request::Attach(device, uuid, answer.clone()));
        let asked = clock::now_ns();
        let answer = answer.wait(ATTACH_WAIT);
        self.asked_for_device(device, asked, answer);
        if answer == Some(true) {
            self.served.store(true, Ordering::Relaxed);
        }
        slot.store(core::ptr::from_ref(device).cast_mut(), Ordering::Release);
        self.context_on(ordinal);
        Some(device)
    }

    /// A device by ordinal, if it was attached.
    pub(crate) fn known_device(&self, ordinal: i32) -> Option<&'static Device> {
        let slot = self.devices.get(slot_of(ordinal)?)?;
        // SAFETY: null or a leaked device.
        unsafe { slot.load(Ordering::Acquire).as_ref() }
    }

    /// All devices that were attached.
    pub(crate) fn known_devices(&self) -> impl Iterator<Item = &'static Device> {
        // SAFETY: null or a leaked device.
        self.devices.iter().filter_map(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
    }

    /// A context was made on this device: if it is not the only one, every launch must ask where it goes.
    pub(crate) fn context_on(&self, ordinal: CUdevice) {
        if let Some(sole) = self.sole_device().filter(|device| device.ordinal != ordinal) {
            // From here on each device counts its own.
            let launches = self.threads().iter().map(|thread| thread.launches.load(Ordering::Relaxed)).sum();
            sole.launches.store(launches, Ordering::Relaxed);
            self.sole.store(core::ptr::null_mut(), Ordering::Release);
            CONTROL.update();
        }
    }

    /// The device with this UUID, as NVML writes it, where a limit applies.
    pub(crate) fn limited_by_uuid(&self, text: &[u8]) -> Option<&'static Device> {
        let mut bytes = [0u8; 16];
        let mut digits =
            text.iter().skip_while(|&&byte| byte != b'-').filter_map(|byte| (*byte as char).to_digit(16));
        for byte in &mut bytes {
            *byte = u8::try_from(digits.next()? << 4 | digits.next()?).ok()?;
        }
        let known = self.uuids.lock().unwrap_or_else(PoisonError::into_inner);
        let (ordinal, _) = *known.iter().find(|(_, uuid)| uuid.bytes() == bytes)?;
        drop(known);
        self.known_device(ordinal).filter(|device| device.memory.limit().is_some())
    }

    /// Gives the calling thread a record.
    #[cold]
    pub(crate) fn enlist(&self) -> Option<&'static ThreadRecord> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let free = threads
            .iter()
            .find(|t| t.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        let record: &'static ThreadRecord = match free {
            Some(record) => record,
            None => {
                let record = Box::leak(Box::new(ThreadRecord::new()));
                threads.push(record);
                record
            }
        };
        drop(threads);
        let pointer = core::ptr::from_ref(record);
        // SAFETY: the key was made with `thread_ends`; the word is this thread's own.
        unsafe {
            libc::pthread_setspecific(self.thread_key, pointer.cast());
            *tls::word() = pointer.expose_provenance();
        }
        Some(record)
    }

    pub(crate) fn threads(&self) -> Vec<&'static ThreadRecord> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn take_requests(&self) -> Vec<Request> {
        core::mem::take(&mut *self.requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn ask(&self, request: Request) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.wake_helper();
    }

    pub(crate) fn wake_helper(&self) {
        self.bell.ring();
    }

    /// How long an allocation waits for the daemon's answer.
    fn answer_wait(&self) -> StdDuration {
        self.config.daemon_wait.get().into()
    }

    /// Takes bytes from a device's account, asking the daemon if need be. `false`: out of memory.
    pub(crate) fn reserve(&self, device: &'static Device, bytes: u64) -> bool {
        if device.memory.reserve(bytes).is_ok() {
            return self.charged(device, bytes);
        }
        // The helper thread takes them for this one as soon as they are granted: another thread cannot be faster.
        let answer = Answer::default();
        self.ask(Request::Memory(device, bytes, answer.clone()));
        match answer.wait(self.answer_wait()) {
            Some(true) => self.charged(device, bytes),
            answer => self.denied(device, bytes, answer.is_some()),
        }
    }

    /// Free and total memory of a device as the program shall see them, from what the driver says. The daemon is asked
    /// what the instance's other processes use, so that the figures are exact: a program looks rarely.
    pub(crate) fn view(&self, device: &'static Device, free: u64, total: u64) -> (u64, u64) {
        let shared = self.look_at_siblings(device);
        let (free, total) = device.memory.view(free, total);
        (if shared { free } else { free.min(device.memory.free_alone()) }, total)
    }

    /// Brings what is known of the instance's other processes up to date. `false`: there is no daemon.
    pub(crate) fn look_at_siblings(&self, device: &'static Device) -> bool {
        if device.memory.limit().is_none() || CONTROL.state() != State::Active as u32 {
            return true;
        }
        let answer = Answer::default();
        self.ask(Request::View(device, answer.clone()));
        let at_most = if device.memory.awaits_part() { self.answer_wait() } else { VIEW_WAIT };
        answer.wait(at_most) != Some(false)
    }

    /// Has the helper report what the process used, and waits for that.
    fn leave(&self) {
        let answer = Answer::default();
        self.ask(Request::Leave(answer.clone()));
        let _ = answer.wait(LEAVE_WAIT);
    }

    /// Gives bytes back to a device's account.
    pub(crate) fn release(&self, ordinal: i32, bytes: u64) {
        if let Some(device) = self.known_device(ordinal)
            && bytes > 0
        {
            let surplus = device.memory.release(bytes);
            self.released(device, bytes);
            if let Some(surplus) = surplus {
                self.ask(Request::Release(device, surplus));
            }
        }
    }
}

/// A waiting thread's watch on the helper thread. By the clock alone, a process that was stopped for a while (a signal, a frozen
/// container) would take its helper for gone when it goes on.
#[derive(Debug)]
pub(crate) struct Watch {
    beat: u64,
    looked: u64,
    awake: u64,
}

impl Watch {
    pub(crate) fn new(runtime: &Runtime, now: u64) -> Self {
        Self { beat: runtime.beat.load(Ordering::Relaxed), looked: now, awake: 0 }
    }

    /// Looks again, some milliseconds after the last time.
    pub(crate) fn sees_it_gone(&mut self, runtime: &Runtime, now: u64) -> bool {
        let beat = runtime.beat.load(Ordering::Relaxed);
        self.awake += now.saturating_sub(self.looked).min(LOOK_NS);
        self.looked = now;
        if beat != self.beat {
            (self.beat, self.awake) = (beat, 0);
        }
        self.awake > GONE_NS
    }
}

/// A setting: from the file `share.env` beside the library, which no program clears, or else from the environment.
fn variable(key: &str) -> Option<OsString> {
    static FILE: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let file = FILE.get_or_init(|| {
        let own = crate::sys::driver::library_of(variable as *const c_void).unwrap_or_default();
        let file = Path::new(OsStr::from_bytes(&own)).with_file_name(crate::sys::config::FILE);
        std::fs::read_to_string(file).unwrap_or_default()
    });
    crate::sys::config::line(file, key).map(OsString::from).or_else(|| std::env::var_os(key))
}

/// `GSHARE_MEM`, for questions that come before any device is in use. Read once.
pub(crate) fn limit_from_environment() -> Option<u64> {
    static LIMIT: std::sync::OnceLock<Option<u64>> = std::sync::OnceLock::new();
    *LIMIT.get_or_init(|| {
        let config = Config::read(variable);
        config.spec.memory().filter(|_| !config.disabled).map(|bytes| bytes.0)
    })
}

/// The ordinal of the calling thread's current device.
pub(crate) fn current_ordinal() -> Option<CUdevice> {
    let mut ordinal: CUdevice = 0;
    // SAFETY: a valid out-pointer.
    let result = unsafe { real!(cuCtxGetDevice)?(&raw mut ordinal) };
    result.is_ok().then_some(ordinal)
}

/// The place of a device among those that can be attached.
fn slot_of(ordinal: CUdevice) -> Option<usize> {
    usize::try_from(ordinal).ok().filter(|&slot| slot < DEVICES)
}

/// UUID (of the MIG instance, where there is one) and memory of a device.
fn identity(ordinal: CUdevice) -> Option<(DeviceUuid, u64)> {
    type GetUuid = unsafe extern "C" fn(*mut sys::CUuuid, CUdevice) -> CUresult;
    let read = |get: GetUuid| {
        let mut uuid = core::mem::MaybeUninit::<sys::CUuuid>::zeroed();
        // SAFETY: a valid out-pointer.
        let result = unsafe { get(uuid.as_mut_ptr(), ordinal) };
        // SAFETY: zeroed before and 16 plain bytes in any case.
        let bytes = unsafe { uuid.assume_init() }.bytes;
        result.is_ok().then(|| bytes.map(|byte: c_char| byte.cast_unsigned()))
    };
    let mut total = 0usize;
    // SAFETY: a valid out-pointer.
    let sized = unsafe { real!(cuDeviceTotalMem_v2)?(&raw mut total, ordinal) };
    // The first version names the GPU, the second one the MIG instance, where there is one.
    let gpu = real!(cuDeviceGetUuid).and_then(read);
    let named = real!(cuDeviceGetUuid_v2).and_then(read);
    let uuid = match (named, gpu) {
        (Some(own), Some(gpu)) if own != gpu => DeviceUuid::mig(own),
        (own, gpu) => DeviceUuid::gpu(own.or(gpu)?),
    };
    sized.is_ok().then_some((uuid, total as u64))
}

/// A number that no other process can compute; none where the kernel gives no random numbers: the daemon goes by the process then.
fn own_run() -> RunId {
    let mut bits = [0; 16];
    // SAFETY: a buffer with its length.
    let filled = unsafe { libc::getrandom(bits.as_mut_ptr().cast(), bits.len(), 0) };
    if filled == 16 { RunId::new(u128::from_ne_bytes(bits)) } else { RunId::NONE }
}

/// Decides, once per process, whether to meter. `true` when metering is on.
#[cold]
pub(crate) fn arm() -> bool {
    arm_on(None)
}

/// The same, for a call that needs no context but names its device.
#[cold]
pub(crate) fn arm_on(device: Option<CUdevice>) -> bool {
    // One thread arms. The word that says so is on the control page, so that a fork in between starts over.
    if !CONTROL.begin_arming() {
        // Another thread is arming: wait for it, a little longer than it can take.
        for _ in 0..3_000 {
            if CONTROL.state() != State::Armed as u32 || !CONTROL.arming() {
                break;
            }
            std::thread::sleep(StdDuration::from_millis(1));
        }
        return CONTROL.state() == State::Active as u32;
    }
    // Another thread may have ended it since the caller looked at the state.
    if CONTROL.state() == State::Armed as u32
        && let Some(state) = std::panic::catch_unwind(|| decide(device)).unwrap_or(Some(State::Off))
    {
        CONTROL.set_state(state);
    }
    CONTROL.end_arming();
    CONTROL.state() == State::Active as u32
}

/// `None`: too early to say.
fn decide(device: Option<CUdevice>) -> Option<State> {
    let config = Config::read(variable);
    if config.disabled {
        return Some(State::Off);
    }
    // Looked at before anything is made: a runtime is there for good, with a thread and a session that has the process' name.
    let ordinal = current_ordinal().or(device).filter(|&ordinal| slot_of(ordinal).is_some())?;
    identity(ordinal)?;
    for complaint in &config.complaints {
        tell(&format!("{complaint} (left out)"));
    }
    let daemon_expected = config.name.is_some() || variable("GSHARE_SOCKET").is_some();
    if !config.limited && !daemon_expected && std::fs::metadata(&config.socket).is_err() {
        return Some(State::Off);
    }
    let mut thread_key = 0;
    // SAFETY: a valid out-pointer; the destructor runs in the thread that ends.
    if unsafe { libc::pthread_key_create(&raw mut thread_key, Some(thread_ends)) } != 0 {
        return Some(State::Off);
    }
    let trace = Trace::begin(&config.trace).unwrap_or_else(|error| {
        tell(&format!("{error} (no trace)"));
        None
    });
    let runtime: &'static Runtime = Box::leak(Box::new(Runtime {
        run: config.run.unwrap_or_else(own_run),
        config,
        contexts: Contexts::default(),
        book: Book::default(),
        sole: AtomicPtr::default(),
        devices: [const { AtomicPtr::new(core::ptr::null_mut()) }; DEVICES],
        uuids: Mutex::default(),
        attaching: Mutex::default(),
        threads: Mutex::default(),
        thread_key,
        requests: Mutex::default(),
        bell: Bell::new(),
        served: AtomicBool::new(false),
        beat: AtomicU64::new(clock::now_ns()),
        trace,
    }));
    helper::look_up();
    if !start_helper(runtime) {
        return Some(State::Off);
    }
    let device = runtime.device(ordinal)?;
    let only = only_device_with_context(ordinal);
    if only {
        runtime.sole.store(core::ptr::from_ref(device).cast_mut(), Ordering::Release);
    }
    CONTROL.install(runtime);
    // SAFETY: the handler only touches what is never freed.
    unsafe { libc::atexit(at_exit) };
    // One that was named may come later.
    let settled = !daemon_expected || runtime.served.load(Ordering::Relaxed);
    let idle = settled && device.free_running.load(Ordering::Acquire) && device.memory.limit().is_none();
    Some(if idle && only && visible_devices() == 1 { State::Off } else { State::Active })
}

fn visible_devices() -> c_int {
    let mut count = 0;
    match real!(cuDeviceGetCount) {
        // SAFETY: a valid out-pointer.
        Some(get) if unsafe { get(&raw mut count) }.is_ok() => count,
        _ => 0,
    }
}

/// Whether no other device has a context yet. Later ones are noticed when they are made.
fn only_device_with_context(ordinal: CUdevice) -> bool {
    if CONTROL.has_contexts_beside(ordinal) {
        return false;
    }
    (0..visible_devices()).filter(|&other| other != ordinal).all(|other| {
        let (mut flags, mut active) = (0, 0);
        let Some(get) = real!(cuDevicePrimaryCtxGetState) else { return false };
        // SAFETY: valid out-pointers.
        let result = unsafe { get(other, &raw mut flags, &raw mut active) };
        result.is_ok() && active == 0
    })
}

/// Starts the helper thread with all signals blocked: the program's handlers run in the program's threads. Not by the standard
/// library, whose threads begin by registering destructors: that takes the loader's lock, which the thread may hold that waits
/// for this one.
fn start_helper(runtime: &'static Runtime) -> bool {
    // SAFETY: all-zero is a valid signal set to be filled.
    let (mut all, mut before) = unsafe { (core::mem::zeroed(), core::mem::zeroed()) };
    // SAFETY: valid pointers; the new thread inherits the mask, then this one gets its own back.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let mut thread = 0;
    // SAFETY: all-zero is there to be initialised, and the pointers are valid; the runtime is never freed.
    let started = unsafe {
        let mut attributes: libc::pthread_attr_t = core::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setstacksize(&raw mut attributes, STACK + taken_of_stack(&attributes));
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let argument = core::ptr::from_ref(runtime).cast_mut().cast();
        let started =
            libc::pthread_create(&raw mut thread, &raw const attributes, helper_thread, argument) == 0;
        libc::pthread_attr_destroy(&raw mut attributes);
        started
    };
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started
}

/// What the C library takes of a thread's stack: the thread-local storage of all libraries, above all.
fn taken_of_stack(attributes: &libc::pthread_attr_t) -> usize {
    let found = resolve::real_dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr());
    if found.is_null() {
        return 0;
    }
    type Get = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    // SAFETY: what glibc has under this name since 2.15 has this signature.
    let get = unsafe { core::mem::transmute::<*mut c_void, Get>(found) };
    // SAFETY: initialised attributes.
    unsafe { get(attributes) }
}

extern "C" fn helper_thread(runtime: *mut c_void) -> *mut c_void {
    // SAFETY: the runtime that `start_helper` passed, never freed.
    let runtime = unsafe { runtime.cast::<Runtime>().as_ref() };
    if std::panic::catch_unwind(|| runtime.map(helper::run)).is_err() {
        stand_aside("its helper thread failed");
    }
    core::ptr::null_mut()
}

/// One line on stderr, if there is one: a closed stderr must not become a panic.
pub(crate) fn tell(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "gshare: {line}");
}

/// Stops metering for good and lets every waiting thread go.
pub(crate) fn stand_aside(why: &str) {
    if CONTROL.state() != State::Off as u32 {
        CONTROL.set_state(State::Off);
        tell(&format!("not metering any more: {why}"));
        if let Some(runtime) = CONTROL.runtime() {
            runtime.trace(None, Event::StoodAside {});
        }
    }
    if let Some(runtime) = CONTROL.runtime() {
        runtime.known_devices().for_each(Device::wake);
    }
}

extern "C" fn thread_ends(record: *mut c_void) {
    // SAFETY: the word is this thread's own, and the key holds a record that is never freed.
    unsafe { *tls::word() = 0 };
    // SAFETY: as above.
    if let Some(record) = unsafe { record.cast::<ThreadRecord>().as_ref() } {
        runs::retire(record);
    }
}

extern "C" fn at_exit() {
    if CONTROL.state() == State::Active as u32 {
        if let Some(runtime) = CONTROL.runtime() {
            runtime.leave();
        }
        CONTROL.set_state(State::Off);
    }
    if let Some(runtime) = CONTROL.runtime() {
        runtime.contexts.exiting();
    }
}

extern "C" fn constructor() {
    resolve::find_dlsym();
    CONTROL.wipe_on_fork();
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

/// Where arming stands; on the control page.
#[derive(Debug)]
pub(crate) struct Arming(AtomicU32);

impl Arming {
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
    pub(crate) fn begin(&self) -> bool {
        self.0.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
    pub(crate) fn under_way(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
    pub(crate) fn end(&self) {
        self.0.store(0, Ordering::Release);
    }
}
