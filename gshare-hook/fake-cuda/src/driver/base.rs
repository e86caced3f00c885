//! The base of every function: the process's attachment, handles, contexts and streams, and the queueing of work.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};

pub(crate) use super::object::*;
use super::*;
pub(crate) use crate::sim::lock;
use gshare_fake_cuda_spec::{Calls, CudaRelease, Profile, Spec};

pub(crate) const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
pub(crate) const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;
pub(crate) const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
pub(crate) const NOT_SUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;
pub(crate) const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;
pub(crate) const NOT_FOUND: CUresult = CUresult::CUDA_ERROR_NOT_FOUND;
pub(crate) const INVALID_CONTEXT: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;
pub(crate) const INVALID_DEVICE: CUresult = CUresult::CUDA_ERROR_INVALID_DEVICE;
/// The answer of a GPU off the bus: the driver has no error of its own for this state.
pub(crate) const GPU_LOST: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

impl From<SimError> for CUresult {
    fn from(error: SimError) -> Self {
        match error {
            SimError::OutOfMemory { .. } | SimError::NoSlot(_) => OUT_OF_MEMORY,
            SimError::Gone => INVALID_HANDLE,
            SimError::RingFull => NOT_READY,
        }
    }
}

/// Leaves a call with `error` if the condition holds: `refuse_if(slot < 0, NOT_FOUND)?`.
#[inline]
pub(crate) fn refuse_if<E>(refused: bool, error: E) -> Result<(), E> {
    if refused { Err(error) } else { Ok(()) }
}

/// Leaves a call with `CUDA_ERROR_INVALID_VALUE` if an argument is wrong: `invalid_if(flags != 0)?`.
#[inline]
pub(crate) fn invalid_if(refused: bool) -> Answer {
    refuse_if(refused, INVALID_VALUE)
}

/// Writes through an out-pointer of a C caller.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Answer {
    invalid_if(to.is_null())?;
    to.write_unaligned(value);
    Ok(())
}

/// Reads a C caller's structure as integers: newer callers may use enumeration values unknown to the bindings.
pub(crate) unsafe fn read<T: Copy>(from: *const c_void) -> Res<T> {
    invalid_if(from.is_null())?;
    Ok(from.cast::<T>().read_unaligned())
}

/// Writes through an out-pointer that may be null.
pub(crate) unsafe fn put_opt<T>(to: *mut T, value: T) {
    if !to.is_null() {
        to.write_unaligned(value);
    }
}

// --- The process -----------------------------------------------------------------------------------

static DRIVER: OnceLock<Driver> = OnceLock::new();
static INIT: Mutex<()> = Mutex::new(());
/// Set in a child of an initialised process.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The process's attachment to the device file.
pub(crate) struct Driver {
    pub(crate) device: SimDevice,
    pub(crate) process: u32,
    /// Ordinal -> GPU of the file.
    pub(crate) visible: Vec<u32>,
    pub(crate) primaries: Vec<Mutex<PrimaryState>>,
    pub(crate) percent: f64,
    /// Time of each kind of call in its caller.
    pub(crate) calls: Calls,
    /// The copies between host and device that fail, and the number of copies so far.
    pub(crate) failed_copies: (Vec<u64>, AtomicU64),
    /// The queue of the host thread; the first host work creates both.
    hosts: Mutex<Option<Sender<HostTask>>>,
    /// Host entries of this process still to run: while there are any, bytes move when the device reaches a copy.
    pub(crate) hosts_pending: AtomicU64,
}

/// The state of a device's primary context.
#[derive(Default)]
pub(crate) struct PrimaryState {
    pub(crate) context: Option<Ref<Context>>,
    pub(crate) retained: u32,
    pub(crate) flags: u32,
}

/// Work on the host when its stream reaches it. `false`: not yet, ask again.
pub(crate) type HostAction = Box<dyn FnMut() -> bool + Send>;

struct HostTask {
    /// The stream's slot, and the position in it.
    at: (u32, u64),
    action: HostAction,
}

extern "C" fn after_fork_in_child() {
    FORKED.store(DRIVER.get().is_some(), Relaxed);
}

/// The driver, once initialised.
#[inline]
pub(crate) fn driver() -> Res<&'static Driver> {
    let driver = DRIVER.get().filter(|_| !FORKED.load(Relaxed));
    driver.ok_or(CUresult::CUDA_ERROR_NOT_INITIALIZED)
}

/// The driver's release. A wrong name in the environment counts as the default until `cuInit` refuses it.
pub(crate) fn release() -> CudaRelease {
    static RELEASE: OnceLock<CudaRelease> = OnceLock::new();
    *RELEASE.get_or_init(|| Spec::of_environment().ok().and_then(|spec| spec.driver).unwrap_or_default())
}

/// The release in the form of `cuDriverGetVersion`.
pub(crate) fn driver_version() -> u32 {
    release().number()
}

/// The longest accepted time of a launch call, in ns.
const MOST_NS: u32 = 1_000_000_000;

/// Call times in this process: the profile's, or scaled so that a launch takes `GSHARE_SIM_CALL_NS`.
fn calls_asked_for(profile: Calls) -> Result<Calls, String> {
    let Some(text) = std::env::var("GSHARE_SIM_CALL_NS").ok().filter(|text| !text.is_empty()) else {
        return Ok(profile);
    };
    let ns = text.trim().parse().ok().filter(|&ns| ns <= MOST_NS);
    let refused = || format!("GSHARE_SIM_CALL_NS={text}: not a number of ns from 0 to {MOST_NS}");
    Ok(profile.scaled_to(ns.ok_or_else(refused)?))
}

/// The numbers of the copies that shall fail in this process.
fn failed_copies() -> Result<Vec<u64>, String> {
    let text = std::env::var("GSHARE_SIM_FAILED_COPIES").unwrap_or_default();
    let numbers = text.split(',').map(str::trim).filter(|number| !number.is_empty());
    let number = |number: &str| number.parse().ok().filter(|number| *number > 0);
    numbers.map(number).collect::<Option<_>>().ok_or_else(|| {
        format!("GSHARE_SIM_FAILED_COPIES={text}: needs numbers of copies from 1 on with commas, such as 2,5")
    })
}

fn open_device() -> Res<Driver> {
    let say = |text: &dyn std::fmt::Display| eprintln!("gshare simulated CUDA driver: {text}");
    let refuse = |error: &dyn std::fmt::Display| {
        say(error);
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY
    };
    let device = SimDevice::of_environment().map_err(|e| refuse(&e))?;
    let calls = calls_asked_for(device.profile().calls).map_err(|e| refuse(&e))?;
    let failed_copies = (failed_copies().map_err(|e| refuse(&e))?, AtomicU64::new(0));
    let visible = visible::visible(&device);
    if std::env::var_os("GSHARE_SIM_VERBOSE").is_some() {
        say(&format_args!(
            "{} of {} {} visible, {}, {}",
            visible.len(),
            device.devices().len(),
            if device.is_cut() { "MIG devices" } else { "GPUs" },
            device.profile().device_name,
            device.path().display()
        ));
    }
    refuse_if(visible.is_empty(), CUresult::CUDA_ERROR_NO_DEVICE)?;
    let percent = std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").ok().and_then(|p| p.trim().parse().ok());
    let percent = percent.filter(|p: &f64| *p > 0.0 && *p <= 100.0).unwrap_or(100.0);
    let process = device.attach(percent).map_err(CUresult::from)?;
    let primaries = visible.iter().map(|_| Mutex::default()).collect();
    Ok(Driver {
        device,
        process,
        visible,
        primaries,
        percent,
        calls,
        failed_copies,
        hosts: Mutex::default(),
        hosts_pending: AtomicU64::new(0),
    })
}

/// `cuInit`: attaches once; in a child of an initialised process it fails, as on the real driver.
pub(crate) fn initialise() -> Answer {
    refuse_if(FORKED.load(Relaxed), CUresult::CUDA_ERROR_NOT_INITIALIZED)?;
    let _one = lock(&INIT);
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let driver = open_device()?;
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    refuse_if(DRIVER.set(driver).is_err(), CUresult::CUDA_ERROR_UNKNOWN)
}

impl Driver {
    pub(crate) fn profile(&self) -> &Profile {
        self.device.profile()
    }

    /// Drops this process's reference to shared bytes.
    pub(crate) fn leave(&self, id: u32, generation: u32) {
        self.device.with_lock(|engine| engine.leave(self.process, id, generation));
    }

    /// The queue of the process's host thread; starts the thread at first use.
    fn hosts(&'static self) -> Res<Sender<HostTask>> {
        let mut hosts = lock(&self.hosts);
        if let Some(hosts) = &*hosts {
            return Ok(hosts.clone());
        }
        let (sender, tasks) = channel();
        let run = move || self.run_hosts(&tasks);
        // Signals belong to the application, so its handlers must not run on this thread. SAFETY: plain signal mask calls on this thread,
        // restored below.
        let spawned = unsafe {
            let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
            let spawned = std::thread::Builder::new().name("sim-cuda-host".into()).spawn(run);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, null_mut());
            spawned
        };
        spawned.map_err(|_| OUT_OF_MEMORY)?;
        Ok(hosts.insert(sender).clone())
    }

    fn run_hosts(&self, coming: &Receiver<HostTask>) {
        let (mut tasks, mut pause) = (Vec::new(), 10_000_u64);
        loop {
            if tasks.is_empty() {
                tasks.extend(coming.recv());
            }
            tasks.extend(coming.try_iter());
            // Finds the reached entries, and the earliest time of the next.
            let (reached, soonest) = self.device.with(|engine, now| {
                let is_reached = |task: &mut HostTask| engine.host_reached(task.at.0, task.at.1);
                let reached: Vec<HostTask> = tasks.extract_if(.., is_reached).collect();
                let behind = tasks.iter().filter(|task| task.at.1 > 0);
                let times = behind.map(|task| engine.not_before(task.at.0, task.at.1 - 1, 8));
                let soonest = times.map(|at| at.unwrap_or(now + 20_000)).fold(now + 2_000_000, u64::min);
                (reached, soonest.max(now))
            });
            let (mut progress, mut waits) = (false, false);
            for mut task in reached {
                if catch_unwind(AssertUnwindSafe(&mut task.action)).unwrap_or(true) {
                    self.device.with(|engine, now| engine.host_done(now, task.at.0));
                    self.hosts_pending.fetch_sub(1, AcqRel);
                    progress = true;
                } else {
                    waits = true;
                    tasks.push(task);
                }
            }
            if progress {
                pause = 10_000;
            } else {
                let now = now_ns();
                // A stream in wait for a word of memory is polled soon: a device would see the word at once.
                let soonest = if waits { now + pause } else { soonest };
                sleep_until(soonest.clamp(now + pause.min(50_000), now + 2_000_000));
                pause = (pause * 2).min(500_000);
            }
        }
    }
}

// --- Handles ---------------------------------------------------------------------------------------

/// A visible device: its ordinal, and its GPU or MIG device in the file.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    pub(crate) driver: &'static Driver,
    pub(crate) ordinal: i32,
    pub(crate) gpu: u32,
}

impl Find<Device> for CUdevice {
    type Found = Device;

    unsafe fn find(self) -> Res<Device> {
        Device::at(self)
    }
}

impl Device {
    pub(crate) fn at(ordinal: i32) -> Res<Self> {
        let driver = driver()?;
        let gpu = usize::try_from(ordinal).ok().and_then(|i| driver.visible.get(i));
        Ok(Self { driver, ordinal, gpu: *gpu.ok_or(INVALID_DEVICE)? })
    }

    pub(crate) fn of_gpu(gpu: u32) -> Res<Self> {
        let driver = driver()?;
        let ordinal = driver.visible.iter().position(|g| *g == gpu).ok_or(INVALID_DEVICE)?;
        Ok(Self { driver, ordinal: ordinal as i32, gpu })
    }

    pub(crate) fn profile(self) -> &'static Profile {
        &self.driver.device.devices()[self.gpu as usize]
    }

    /// Memory of a new context, in bytes.
    pub(crate) fn context_bytes(self, kind: ContextKind) -> u64 {
        if kind == ContextKind::Green { 0 } else { self.driver.profile().context_bytes }
    }

    /// Charges bytes to this process; removes dead processes before it reports a lack of memory.
    pub(crate) fn charge(self, kind: MemKind, bytes: u64) -> Result<(), SimError> {
        let Self { driver: Driver { device, process, .. }, gpu, .. } = self;
        let charged = device.with_lock(|engine| engine.charge(*process, gpu, kind, bytes));
        charged.or_else(|_| device.with_living(|engine, _| engine.charge(*process, gpu, kind, bytes)))
    }

    pub(crate) fn refund(self, kind: MemKind, bytes: u64) {
        self.driver.device.with_lock(|engine| engine.refund(self.driver.process, self.gpu, kind, bytes));
    }
}

// --- Threads ---------------------------------------------------------------------------------------

/// The thread state for a launch, in one place without a destructor: one look-up, no check.
pub(crate) struct Thread {
    context: Cell<Option<Ref<Context>>>,
    /// The thread's own stream in its last context.
    own: Cell<Option<Ref<Stream>>>,
    /// The counter for this thread's free launches, and whether no other thread shares it.
    counter: Cell<Option<(&'static AtomicU64, bool)>>,
}

thread_local! {
    static THREAD: Thread =
        const { Thread { context: Cell::new(None), own: Cell::new(None), counter: Cell::new(None) } };
    /// Never dropped: the loader's lock guards the registration of a thread's destructor, and a driver takes no such lock to launch.
    static STACK: ManuallyDrop<RefCell<Vec<Ref<Context>>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static OWN_STREAMS: RefCell<BTreeMap<u64, Ref<Stream>>> = const { RefCell::new(BTreeMap::new()) };
}

/// The calling thread's current context.
#[inline]
pub(crate) fn current() -> Res<Ref<Context>> {
    match current_opt() {
        Some(context) if !FORKED.load(Relaxed) => context.usable().map(|()| context),
        _ => {
            driver()?;
            Err(INVALID_CONTEXT)
        }
    }
}

pub(crate) fn current_opt() -> Option<Ref<Context>> {
    THREAD.with(|thread| thread.context.get())
}

/// Changes the calling thread's stack of contexts.
fn with_stack<R>(f: impl FnOnce(&mut Vec<Ref<Context>>) -> R) -> R {
    STACK.with(|stack| {
        let mut stack = stack.borrow_mut();
        let done = f(&mut stack);
        THREAD.with(|thread| thread.context.set(stack.last().copied()));
        done
    })
}

/// Replaces the top of the calling thread's stack (`None` pops it).
pub(crate) fn set_current(context: Option<Ref<Context>>) {
    with_stack(|stack| {
        stack.pop();
        stack.extend(context);
    });
}

pub(crate) fn push_current(context: Ref<Context>) {
    with_stack(|stack| stack.push(context));
}

pub(crate) fn pop_current() -> Option<Ref<Context>> {
    with_stack(Vec::pop)
}

/// Counts a free launch if nothing is pending on its stream: a few ns, no lock. `false`: take the long way. The caller has checked for
/// captures in the process.
#[inline]
pub(crate) unsafe fn count_if_idle(StreamArg(flavor, handle): StreamArg) -> bool {
    THREAD.with(|thread| {
        let Some((counter, exclusive)) = thread.counter.get().or_else(|| first_count(thread)) else {
            return false;
        };
        let Some(context) = thread.context.get() else { return false };
        let number = handle as usize;
        let stream = if number > 2 {
            Object::<Stream>::get(handle).ok()
        } else if number == 2 || (number == 0 && flavor == Flavor::PerThread) {
            thread.own.get().filter(|own| std::ptr::eq(own.context, context))
        } else {
            context.legacy.get().copied()
        };
        let Some(stream) = stream.filter(|stream| stream.context.check().is_ok()) else { return false };
        let idle = stream.completed.load(Acquire) >= stream.tail.load(Relaxed);
        if !idle || !stream.context.live() || FORKED.load(Relaxed) {
            return false;
        }
        if exclusive {
            counter.store(counter.load(Relaxed) + 1, Relaxed);
        } else {
            counter.fetch_add(1, Relaxed);
        }
        true
    })
}

/// Assigns the thread its counter.
#[cold]
fn first_count(thread: &Thread) -> Option<(&'static AtomicU64, bool)> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let driver = driver().ok()?;
    let shards = &driver.device.open_part().procs[driver.process as usize].shards;
    let number = NEXT.fetch_add(1, Relaxed).min(shards.len() - 1);
    thread.counter.set(Some((&shards[number].launches, number < shards.len() - 1)));
    thread.counter.get()
}

// --- Contexts and streams --------------------------------------------------------------------------

/// The kind of a context.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContextKind {
    /// The one built-in context of each GPU.
    Primary,
    Created,
    /// Cut from the primary context, without a charge of its own.
    Green,
}

pub(crate) struct Context {
    pub(crate) id: u64,
    pub(crate) device: Device,
    pub(crate) kind: ContextKind,
    pub(crate) flags: AtomicU32,
    /// SMs of a green context or of an execution affinity.
    pub(crate) part: Option<u32>,
    pub(crate) legacy: OnceLock<Ref<Stream>>,
    pub(crate) streams: Mutex<Vec<Ref<Stream>>>,
    pub(crate) limits: Mutex<BTreeMap<u32, usize>>,
    pub(crate) peers: Mutex<BTreeSet<i32>>,
    /// Not 0 while the GPU is lost.
    lost: &'static AtomicU64,
    /// Whether a kernel has used an address with nothing behind it, which ends the context's work for good.
    faulted: AtomicBool,
}

object!(Context, b"gshareCT", INVALID_CONTEXT);

/// The contexts that have not ended, by number.
pub(crate) static CONTEXTS: Mutex<BTreeMap<u64, Ref<Context>>> = Mutex::new(BTreeMap::new());

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

pub(crate) fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Relaxed)
}

impl Object<Context> {
    /// An error if the context has ended, or while its GPU is lost.
    #[inline]
    fn usable(&self) -> Answer {
        refuse_if(!self.live(), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        self.check()
    }
}

impl Context {
    /// A new context with its legacy stream; charges the context's memory.
    pub(crate) fn create(device: Device, kind: ContextKind, flags: u32, part: Option<u32>) -> Res<Ref<Self>> {
        let lost = &device.driver.device.open_part().lost[device.gpu as usize];
        refuse_if(lost.load(Relaxed) != 0, GPU_LOST)?;
        device.charge(MemKind::Context, device.context_bytes(kind))?;
        let context = Object::create(Self {
            id: next_id(),
            device,
            kind,
            flags: AtomicU32::new(flags),
            part,
            legacy: OnceLock::new(),
            streams: Mutex::default(),
            limits: Mutex::default(),
            peers: Mutex::default(),
            lost,
            faulted: AtomicBool::new(false),
        });
        let legacy = Stream::create(context, 0, 0, true)?;
        let _ = context.legacy.set(legacy);
        lock(&CONTEXTS).insert(context.id, context);
        Ok(context)
    }

    /// The context of this number, unless it has ended.
    pub(crate) fn numbered(id: u64) -> Option<Ref<Self>> {
        lock(&CONTEXTS).get(&id).copied()
    }

    pub(crate) fn sms(&self) -> u32 {
        self.part.unwrap_or(self.device.profile().sms)
    }

    /// An error while the GPU is lost, and after a fault.
    #[inline]
    pub(crate) fn check(&self) -> Answer {
        refuse_if(self.faulted.load(Relaxed), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)?;
        refuse_if(self.lost.load(Relaxed) != 0, GPU_LOST)
    }

    /// A kernel has used an address with nothing behind it.
    pub(crate) fn fault(&self) {
        self.faulted.store(true, Relaxed);
    }

    pub(crate) fn legacy(&self) -> Res<Ref<Stream>> {
        self.legacy.get().copied().ok_or(INVALID_CONTEXT)
    }

    /// The home of the context's events: its GPU, and its number, or 0 for a primary context and the green contexts cut from it.
    pub(crate) fn home(&self) -> (u32, u64) {
        (self.device.gpu, if self.kind == ContextKind::Created { self.id } else { 0 })
    }

    /// The streams that take part in the legacy stream's barriers.
    pub(crate) fn blocking(&self) -> Vec<Ref<Stream>> {
        lock(&self.streams).iter().copied().filter(|stream| stream.blocking()).collect()
    }

    /// All streams, the legacy one first.
    pub(crate) fn all_streams(&self) -> Vec<Ref<Stream>> {
        self.legacy.get().into_iter().chain(lock(&self.streams).iter()).copied().collect()
    }
}

pub(crate) struct Stream {
    pub(crate) id: u64,
    pub(crate) slot: u32,
    pub(crate) context: Ref<Context>,
    /// The legacy default stream has it set.
    pub(crate) legacy: bool,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// Entries that are done.
    pub(crate) completed: &'static AtomicU64,
    /// Position of the next entry, as this process knows it.
    pub(crate) tail: AtomicU64,
    /// Position in the legacy stream for which this stream already waits.
    seen_legacy: AtomicU64,
    /// Position in this stream for which the legacy stream already waits.
    seen_by_legacy: AtomicU64,
    pub(crate) capturing: AtomicBool,
}

object!(Stream, b"gshareST");

impl Stream {
    pub(crate) fn create(context: Ref<Context>, flags: u32, priority: i32, legacy: bool) -> Res<Ref<Self>> {
        let Device { driver, gpu, .. } = context.device;
        let slot = driver.device.with(|engine, _| engine.open_stream(driver.process, gpu))?;
        let done = driver.device.completed_now(slot);
        let stream = Object::create(Self {
            id: next_id(),
            slot,
            context,
            legacy,
            flags,
            priority,
            completed: &driver.device.open_part().streams[slot as usize].completed,
            tail: AtomicU64::new(done),
            seen_legacy: AtomicU64::new(0),
            seen_by_legacy: AtomicU64::new(done),
            capturing: AtomicBool::new(false),
        });
        if !legacy {
            lock(&context.streams).push(stream);
        }
        Ok(stream)
    }

    /// Whether the stream takes part in the legacy stream's barriers.
    pub(crate) fn blocking(&self) -> bool {
        self.flags & 1 == 0
    }
}

impl Find<Stream> for StreamArg {
    type Found = Ref<Stream>;

    /// The stream behind a handle: 0 by flavour, 1 legacy, 2 the thread's own.
    #[inline]
    unsafe fn find(self) -> Res<Ref<Stream>> {
        let Self(flavor, handle) = self;
        let number = handle as usize;
        if number > 2 {
            let stream = Object::<Stream>::get(handle)?;
            return stream.context.usable().map(|()| stream);
        }
        let context = current()?;
        if number == 2 || (number == 0 && flavor == Flavor::PerThread) {
            own_stream(context)
        } else {
            context.legacy()
        }
    }
}

fn own_stream(context: Ref<Context>) -> Res<Ref<Stream>> {
    OWN_STREAMS
        .try_with(|own| {
            if let Some(stream) = own.borrow().get(&context.id) {
                THREAD.with(|thread| thread.own.set(Some(*stream)));
                return Ok(*stream);
            }
            let stream = Stream::create(context, 0, 0, false)?;
            own.borrow_mut().insert(context.id, stream);
            Ok(stream)
        })
        .unwrap_or(Err(INVALID_HANDLE))
}

pub(crate) fn push_host(stream: Ref<Stream>, action: HostAction) -> Answer {
    let driver = driver()?;
    let hosts = driver.hosts()?;
    driver.hosts_pending.fetch_add(1, AcqRel);
    let pushed = push(stream, Work::Host).inspect_err(|_| {
        driver.hosts_pending.fetch_sub(1, AcqRel);
    });
    // The host thread never ends, so it receives every entry.
    let _ = hosts.send(HostTask { at: (stream.slot, pushed?), action });
    Ok(())
}

/// Appends a call of `f`.
pub(crate) fn push_call(stream: Ref<Stream>, f: impl Fn() + Send + 'static) -> Answer {
    let action = move || {
        f();
        true
    };
    push_host(stream, Box::new(action))
}

/// Moves bytes now, or when the stream reaches the copy if pending host functions might still change them.
pub(crate) fn move_bytes(stream: Ref<Stream>, f: impl Fn() + Send + 'static) -> Answer {
    if driver()?.hosts_pending.load(Acquire) > 0 {
        return push_call(stream, f);
    }
    f();
    Ok(())
}

/// Appends work to a stream behind its barriers; waits while the stream is full. Returns the work's position.
pub(crate) fn push(stream: Ref<Stream>, work: Work) -> Res<u64> {
    let driver = driver()?;
    // Barriers of the legacy default stream: the blocking streams and the legacy stream wait for each other.
    let wait_for = |other: Ref<Stream>, seen: &AtomicU64| -> Answer {
        let tail = other.tail.load(Acquire);
        if tail > seen.load(Relaxed) {
            seen.store(tail, Relaxed);
            if driver.device.completed_now(other.slot) < tail {
                push_one(driver, stream, Work::Wait { stream: other.slot, position: tail - 1 })?;
            }
        }
        Ok(())
    };
    if stream.legacy {
        stream.context.blocking().into_iter().try_for_each(|other| wait_for(other, &other.seen_by_legacy))?;
    } else if stream.blocking() {
        wait_for(stream.context.legacy()?, &stream.seen_legacy)?;
    }
    push_one(driver, stream, work)
}

fn push_one(driver: &'static Driver, stream: Ref<Stream>, work: Work) -> Res<u64> {
    loop {
        let pushed = driver.device.with(|engine, now| {
            let pushed = engine.push(now, stream.slot, work);
            if let Ok(position) = pushed {
                stream.tail.fetch_max(position + 1, AcqRel);
            }
            pushed
        });
        match pushed {
            Ok(position) => return Ok(position),
            Err(SimError::RingFull) => {
                let open = &driver.device.open_part().procs[driver.process as usize];
                open.ring_full.fetch_add(1, Relaxed);
                let oldest = stream.tail.load(Acquire).saturating_sub(crate::sim::RING as u64);
                driver.device.wait(driver.process, stream.slot, oldest);
                stream.context.check()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits until all work in the stream is done.
pub(crate) fn drain(stream: Ref<Stream>) -> Answer {
    let driver = driver()?;
    if let Some(last) = stream.tail.load(Acquire).checked_sub(1) {
        driver.device.wait(driver.process, stream.slot, last);
    }
    stream.context.check()
}

/// Whether all work in the stream is done.
pub(crate) fn drained(stream: Ref<Stream>) -> Res<bool> {
    let driver = driver()?;
    let tail = stream.tail.load(Acquire);
    Ok(tail == 0 || driver.device.is_done(stream.slot, tail - 1))
}
