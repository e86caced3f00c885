//! The device file: one mapping shared by every process, with a lock that survives `kill -9`.
//!
//! # Problem
//! Several processes act as one device without a server. Any of them may be killed at any instruction.
//!
//! # Algorithm
//! - The file holds a header with the profile's text, a robust process-shared mutex, and the state (module `layout`).
//! - A process which needs the device takes the mutex, reads the clock and advances the schedule to that time. If the last holder died
//!   inside, the mutex reports this, and derived state is rebuilt before anything else.
//! - A process is identified by its process id and a random number from the kernel for its program: processes of different PID namespaces
//!   (several containers with one device file) may have the same id.
//! - Each attached process holds a POSIX record lock on the byte of its slot, beyond the end of the file. The kernel drops the lock when
//!   the process dies (a zombie has none) or executes another program, so a request for the lock tells the living from the dead, in every
//!   namespace. (A process cannot ask for its own locks.) This sweep runs at most every 5 ms, and on every request for memory or figures.
//!   The kernel also reports the holder of a lock, by its process id in the asking process's namespace.
//!
//! # Cost
//! Uncontended lock, clock and advance on an idle device: about 0.1 us. The file is sparse: about 145 MB, some 100 KiB of it in use.
//!
//! # Differences
//! As with a real driver, closing all file descriptors under the library detaches the process: its lock is gone.
//!
//! # Limits
//! The kernel identifies the holder of a robust mutex by its thread id. A process may be killed just while it waits for the mutex, with the
//! mutex held by a thread of the same number in another PID namespace. The mutex then counts as abandoned, and is repaired under its
//! holder.
#![allow(unsafe_code)] // a shared mapping and a process-shared mutex

use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{addr_of_mut, null_mut};
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize, compiler_fence};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use rustix::process::getuid;
use rustix::thread::{clock_nanosleep_absolute, set_current_timer_slack};
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::engine::{Engine, SimError};
use super::layout::{Locked, Open};
use super::{lock, padded};
use gshare_fake_cuda_spec::{DEFAULT_PROFILE, Profile, ProfileError, Spec, SpecError, load_text};

const MAGIC: u64 = u64::from_le_bytes(*b"gsh-sim\x05");
const PROFILE_BYTES: usize = 16 << 10;
const SWEEP_NS: u64 = 5_000_000;
const LIFE_OFFSET: i64 = 1 << 40;

#[repr(C)]
struct Header {
    magic: AtomicU64,
    boot: [u8; 40],
    gpus: u32,
    profile_len: u32,
    profile: [u8; PROFILE_BYTES],
    mutex: libc::pthread_mutex_t,
}

#[repr(C, align(4096))]
struct Image {
    header: Header,
    open: Open,
    locked: Locked,
}

/// Why a device file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The requested device cannot be simulated.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The profile in the file cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The file cannot be opened, sized or mapped.
    #[error("device file {0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// The request names another profile or number of GPUs while processes use the device.
    #[error(
        "device file {0} is in use with another profile; give GSHARE_SIM_DEVICE another path or stop its users"
    )]
    InUse(PathBuf),
    /// The profile's text is longer than the header holds.
    #[error("profile of {0} bytes; at most 16384")]
    ProfileTooLong(usize),
}

/// `CLOCK_MONOTONIC` in ns.
#[inline]
pub(crate) fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec.cast_unsigned() * 1_000_000_000 + t.tv_nsec.cast_unsigned()
}

/// `GSHARE_SIM_DEVICE`, or `gshare-sim-device` in `XDG_RUNTIME_DIR`, or `/tmp/gshare-sim-device-<uid>`.
pub fn default_path() -> PathBuf {
    if let Some(path) = std::env::var_os("GSHARE_SIM_DEVICE").filter(|p| !p.is_empty()) {
        return path.into();
    }
    if let Some(dir) = std::env::var_os("XDG_RUNTIME_DIR").filter(|p| Path::new(p).is_dir()) {
        return Path::new(&dir).join("gshare-sim-device");
    }
    PathBuf::from(format!("/tmp/gshare-sim-device-{}", getuid()))
}

/// A mapped device file. The mapping and the file stay open for the life of the process: closing the file would drop the
/// process's record lock, its sign of life.
#[derive(Debug)]
pub struct SimDevice {
    image: *mut Image,
    opened: &'static Opened,
    path: PathBuf,
    profile: Profile,
    devices: Vec<Profile>,
}

// SAFETY: the mapping is never unmapped; `Open` is atomics, `Locked` is reached under the mutex only.
unsafe impl Send for SimDevice {}
// SAFETY: as above.
unsafe impl Sync for SimDevice {}

fn boot_id() -> [u8; 40] {
    padded(&std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default())
}

/// Start time of this process (field 22 of /proc/self/stat).
fn own_start_time() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    after.split_whitespace().nth(19).and_then(|f| f.parse().ok()).unwrap_or(0)
}

/// A number unique to this program: it differs between processes with one process id, in different PID namespaces or before and after exec.
fn own_image() -> u64 {
    // SAFETY: AT_RANDOM is the address of 16 bytes that stay for the life of the process, or 0.
    unsafe {
        let at = libc::getauxval(libc::AT_RANDOM) as *const u64;
        if at.is_null() { 0 } else { at.read_unaligned() }
    }
}

/// How long a wait for the device spins at its end, in ns.
const SPIN: u64 = 60_000;

impl SimDevice {
    /// Opens the device file of the environment, with the requested profile, number and MIG devices.
    pub(crate) fn of_environment() -> Result<Self, DeviceError> {
        Self::open(&default_path(), &Spec::of_environment()?)
    }

    /// Opens the device file, creating it if need be. A missing part of `spec` comes from the file; a new file has the default profile. A
    /// file of another boot, layout or profile is replaced unless a process uses it.
    pub fn open(path: &Path, spec: &Spec) -> Result<Self, DeviceError> {
        let io = |e| DeviceError::Io(path.to_owned(), e);
        let resolved = spec.resolve()?;
        let wanted = spec.profile_text()?;
        for _ in 0..100 {
            let opened = open_once(path).map_err(io)?;
            let file = &opened.file;
            // Repeats until the file is the right one, or is gone: a process holds the file's lock to remove it, so none removes another.
            file.lock().map_err(io)?;
            let _lock = FileLock(file);
            let meta = file.metadata().map_err(io)?;
            let same = std::fs::metadata(path).is_ok_and(|m| (m.dev(), m.ino()) == opened.identity);
            if !same {
                continue;
            }
            if meta.len() == 0 {
                let text = wanted.map_or_else(|| load_text(DEFAULT_PROFILE), Ok)?;
                if text.len() > PROFILE_BYTES {
                    return Err(DeviceError::ProfileTooLong(text.len()));
                }
                file.set_len(size_of::<Image>() as u64).map_err(io)?;
                let image = map(opened).map_err(io)?;
                // SAFETY: the mapping is fresh, zeroed and ours while we hold the file lock.
                unsafe { initialise(image, &text, &resolved) };
                return Ok(Self::new(image, opened, path, resolved));
            }
            if meta.len() == size_of::<Image>() as u64 {
                let image = map(opened).map_err(io)?;
                // SAFETY: the mapping has the size of an Image, and its header is written once, under the file lock we hold.
                let header = unsafe { &(*image).header };
                if header.magic.load(Acquire) == MAGIC && header.boot == boot_id() {
                    let len = (header.profile_len as usize).min(PROFILE_BYTES);
                    let text = String::from_utf8_lossy(&header.profile[..len]).into_owned();
                    let mut profile = Profile::parse(&text, "of the device file")?;
                    profile.gpus = header.gpus;
                    let device = Self::new(image, opened, path, profile);
                    if wanted.as_ref().is_none_or(|wanted| *wanted == text)
                        && spec.devices.is_none_or(|devices| devices == header.gpus)
                    {
                        return Ok(device);
                    }
                    if device.with_living(|engine, _| engine.live().count() > 0) {
                        return Err(DeviceError::InUse(path.to_owned()));
                    }
                }
            }
            std::fs::remove_file(path).map_err(io)?;
        }
        Err(io(std::io::Error::other("the file keeps changing")))
    }

    fn new(image: *mut Image, opened: &'static Opened, path: &Path, profile: Profile) -> Self {
        let devices = profile.devices();
        Self { image, opened, path: path.to_owned(), profile, devices }
    }

    /// The profile in force.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The devices open to a process, each with its own SMs and memory: GPUs, or MIG devices of a cut GPU.
    pub(crate) fn devices(&self) -> &[Profile] {
        &self.devices
    }

    /// Whether the devices are slices of one GPU.
    pub(crate) fn is_cut(&self) -> bool {
        !self.profile.cut.is_empty()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Loses the GPU with this number, or brings it back; a cut GPU goes with its MIG devices. `false`: no such GPU exists.
    ///
    /// While the GPU is lost, NVML answers `NVML_ERROR_GPU_IS_LOST`, processes with a context on it get `CUDA_ERROR_UNKNOWN`, and a new
    /// process does not see it. The memory of a process there stays its own until the process ends.
    pub fn set_lost(&self, gpu: u32, lost: bool) -> bool {
        if gpu >= self.profile.gpus {
            return false;
        }
        for flag in &self.open_part().lost[self.parts(gpu)] {
            flag.store(u64::from(lost), Release);
        }
        true
    }

    /// The places in [`devices`](Self::devices) of a GPU, or of its MIG devices.
    pub(crate) fn parts(&self, gpu: u32) -> Range<usize> {
        if self.is_cut() { 0..self.devices.len() } else { gpu as usize..gpu as usize + 1 }
    }

    /// Whether a device, by its place in [`devices`](Self::devices), is lost.
    #[inline]
    pub(crate) fn is_lost(&self, device: u32) -> bool {
        self.open_part().lost.get(device as usize).is_some_and(|flag| flag.load(Acquire) != 0)
    }

    #[inline]
    pub(crate) fn open_part(&self) -> &Open {
        // SAFETY: the mapping lives as long as the process; `Open` is atomics only.
        unsafe { &(*self.image).open }
    }

    /// Advances the schedule to the present under the lock, and runs `f` with the lock still held.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Engine<'_>, u64) -> R) -> R {
        self.with_sweep(SWEEP_NS, f)
    }

    /// [`with`](Self::with), after a sweep of dead processes.
    pub(crate) fn with_living<R>(&self, f: impl FnOnce(&mut Engine<'_>, u64) -> R) -> R {
        self.with_sweep(0, f)
    }

    /// [`with`](Self::with), after a sweep if the last sweep is `after_ns` old.
    fn with_sweep<R>(&self, after_ns: u64, f: impl FnOnce(&mut Engine<'_>, u64) -> R) -> R {
        self.with_lock(|engine| {
            let now = now_ns();
            engine.advance(now);
            if now.saturating_sub(engine.l.last_sweep) >= after_ns {
                self.sweep(engine, now);
            }
            f(engine, now)
        })
    }

    /// Runs `f` with the lock held, without bringing the schedule up to date.
    pub(crate) fn with_lock<R>(&self, f: impl FnOnce(&mut Engine<'_>) -> R) -> R {
        // SAFETY: the mutex was initialised before the magic was written; the guard gives it back.
        unsafe {
            let mutex = addr_of_mut!((*self.image).header.mutex);
            let died = libc::pthread_mutex_lock(mutex) == libc::EOWNERDEAD;
            compiler_fence(Acquire);
            let _guard = Unlock(mutex);
            let mut engine = Engine { l: &mut (*self.image).locked, o: &(*self.image).open };
            if died {
                engine.rebuild();
                engine.l.repairs += 1;
                libc::pthread_mutex_consistent(mutex);
            }
            f(&mut engine)
        }
    }

    /// Removes the processes without their record lock.
    fn sweep(&self, engine: &mut Engine<'_>, now: u64) {
        engine.l.last_sweep = now;
        for (slot, pid, image) in engine.live().collect::<Vec<_>>() {
            if self.holder(slot, pid, image).is_none() {
                engine.detach(now, slot);
            }
        }
    }

    fn life_lock(slot: u32) -> libc::flock {
        let (l_type, l_whence) = (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
        libc::flock { l_type, l_whence, l_start: LIFE_OFFSET + i64::from(slot), l_len: 1, l_pid: 0 }
    }

    /// The living process of a slot attached by `pid` and `image`, by its process id in this process's PID namespace; 0 if it has none
    /// there.
    pub(crate) fn holder(&self, slot: u32, pid: u32, image: u64) -> Option<u32> {
        if pid == std::process::id() && image == own_image() {
            return Some(pid);
        }
        let mut lock = Self::life_lock(slot);
        // SAFETY: a valid descriptor and a valid flock.
        let rc = unsafe { libc::fcntl(self.opened.file.as_raw_fd(), libc::F_GETLK, &raw mut lock) };
        let held = rc != 0 || i32::from(lock.l_type) != libc::F_UNLCK;
        held.then(|| u32::try_from(lock.l_pid).unwrap_or(0))
    }

    /// Attaches this process with a share of SMs in percent (0 < percent <= 100). Returns its slot.
    pub(crate) fn attach(&self, percent: f64) -> Result<u32, SimError> {
        let name = std::fs::read("/proc/self/comm").unwrap_or_default();
        let name = name.trim_ascii_end().to_vec();
        #[allow(clippy::cast_sign_loss)] // a share is positive
        self.with_living(|engine, now| {
            let cap = |sms: u32| (f64::from(sms) * percent / 100.0).ceil() as u32;
            let slot = engine.attach(now, std::process::id(), own_start_time(), own_image(), &name, cap)?;
            let lock = Self::life_lock(slot);
            // SAFETY: a valid descriptor and a valid flock.
            if unsafe { libc::fcntl(self.opened.file.as_raw_fd(), libc::F_SETLK, &raw const lock) } != 0 {
                engine.detach(now, slot);
                return Err(SimError::NoSlot("process"));
            }
            Ok(slot)
        })
    }

    /// Entries of a stream that are done, without the lock and without advancing.
    #[inline]
    pub(crate) fn completed_now(&self, stream: u32) -> u64 {
        self.open_part().streams[stream as usize].completed.load(Acquire)
    }

    /// Whether the entry at `position` is done by now.
    pub(crate) fn is_done(&self, stream: u32, position: u64) -> bool {
        self.completed_now(stream) > position || self.with(|engine, _| engine.completed(stream) > position)
    }

    /// Blocks until the entry at `position` is done or its GPU is lost: asleep until 60 us before the known end, then awake. A thread
    /// asleep to the end wakes tens of microseconds late, longer than many kernels take.
    pub(crate) fn wait(&self, process: u32, stream: u32, position: u64) {
        if self.is_done(stream, position) {
            return;
        }
        let began = now_ns();
        let mut pause = 20_000;
        loop {
            let (done, until) = self.with(|e, _| {
                (e.completed(stream) > position || e.is_lost(stream), e.not_before(stream, position, 8))
            });
            if done {
                break;
            }
            let now = now_ns();
            let until = until.unwrap_or(now + pause).clamp(now, now + 10_000_000);
            if until <= now + 2_000 {
                pause = (pause * 2).min(500_000);
                std::thread::yield_now();
            }
            if until > now + 2 * SPIN {
                sleep_until(until - SPIN);
            }
            while now_ns() < until {
                std::hint::spin_loop();
            }
        }
        let open = &self.open_part().procs[process as usize];
        open.host_waits.fetch_add(1, Relaxed);
        open.host_wait_ns.fetch_add(now_ns() - began, Relaxed);
    }
}

/// Sleeps to an absolute time as exactly as the kernel can.
pub(crate) fn sleep_until(until: u64) {
    thread_local! {
        /// The least timer slack for the calling thread, so that waits end on time.
        static SLACK: rustix::io::Result<()> = set_current_timer_slack(Some(NonZeroU64::MIN));
    }
    // An ending thread has no thread-locals, and sleeps with its present slack.
    let _ = SLACK.try_with(|_| ());
    let (tv_sec, tv_nsec) = (until / 1_000_000_000, until % 1_000_000_000);
    let at = Timespec { tv_sec: tv_sec.cast_signed(), tv_nsec: tv_nsec.cast_signed() };
    // An early return by a signal is fine.
    let _ = clock_nanosleep_absolute(ClockId::Monotonic, &at);
}

struct Unlock(*mut libc::pthread_mutex_t);

impl Drop for Unlock {
    fn drop(&mut self) {
        compiler_fence(Release);
        // SAFETY: the guard exists only while the mutex is held.
        unsafe { libc::pthread_mutex_unlock(self.0) };
    }
}

/// A device file open in this process: its identity, its descriptor, and its mapping once made.
#[derive(Debug)]
struct Opened {
    identity: (u64, u64),
    file: File,
    image: AtomicUsize,
}

static OPENED: Mutex<Vec<&'static Opened>> = Mutex::new(Vec::new());

/// Opens a file, or finds it among the open files. None is ever closed: closing any descriptor of a device file drops this process's record
/// locks on it.
fn open_once(path: &Path) -> std::io::Result<&'static Opened> {
    let mut all = lock(&OPENED);
    let identity = std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    if let Some(known) = all.iter().find(|o| Some(o.identity) == identity) {
        return Ok(known);
    }
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let meta = file.metadata()?;
    let identity = (meta.dev(), meta.ino());
    let opened: &'static Opened = Box::leak(Box::new(Opened { identity, file, image: AtomicUsize::new(0) }));
    all.push(opened);
    Ok(opened)
}

/// The lock of a device file, held until this is dropped. The file is never closed.
struct FileLock(&'static File);

impl Drop for FileLock {
    fn drop(&mut self) {
        // Unlocking fails only for a file which is not open.
        let _ = self.0.unlock();
    }
}

/// Maps a file from [`open_once`], once.
fn map(known: &'static Opened) -> std::io::Result<*mut Image> {
    let _one = lock(&OPENED);
    if known.image.load(Relaxed) == 0 {
        let size = size_of::<Image>();
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new shared mapping of a file at least as long as the mapping.
        let at = unsafe { mmap(null_mut(), size, access, flags, &known.file, 0)? };
        // The file is nearly all holes: read-ahead at a first touch would fetch megabytes of zeros. SAFETY: the mapping just made; advice
        // changes no content.
        let _ = unsafe { madvise(at, size, Advice::Random) };
        known.image.store(at as usize, Relaxed);
    }
    Ok(known.image.load(Relaxed) as *mut Image)
}

/// # Safety
/// `image` is a zeroed mapping that no other process uses yet.
unsafe fn initialise(image: *mut Image, text: &str, profile: &Profile) {
    // SAFETY: by the contract.
    unsafe {
        let header = addr_of_mut!((*image).header);
        (*header).boot = boot_id();
        (*header).gpus = profile.gpus;
        (*header).profile_len = text.len() as u32;
        (&mut (*header).profile)[..text.len()].copy_from_slice(text.as_bytes());
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        libc::pthread_mutexattr_init(attributes.as_mut_ptr());
        libc::pthread_mutexattr_setpshared(attributes.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
        libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
        libc::pthread_mutex_init(addr_of_mut!((*header).mutex), attributes.as_ptr());
        libc::pthread_mutexattr_destroy(attributes.as_mut_ptr());
        let locked = addr_of_mut!((*image).locked);
        let devices = profile.devices();
        (*locked).gpus_len = devices.len() as u32;
        for (g, device) in devices.iter().enumerate() {
            (*locked).gpus[g].sms = device.sms;
            (*locked).gpus[g].sm_free = device.sms;
            (*locked).gpus[g].mem_total = device.memory_bytes;
        }
        (*header).magic.store(MAGIC, Release);
    }
}

/// The name of a simulated GPU, for C callers.
pub(crate) fn device_name(profile: &Profile) -> String {
    format!("{} (simulated)", profile.device_name)
}

/// The UUID of GPU `index` of the device file at `path`: the same for every process. Version 8 and the last three bytes mark it as
/// simulated, for a reader with nothing but the UUID.
pub(crate) fn device_uuid(path: &Path, index: u32) -> [u8; 16] {
    // FNV-1a, twice with different seeds: an identifier, not a secret.
    let mut out = [0; 16];
    for (half, seed) in [(0, 0xcbf2_9ce4_8422_2325_u64), (8, 0x9e37_79b9_7f4a_7c15)] {
        let mut hash = seed;
        for byte in path.as_os_str().as_encoded_bytes().iter().copied().chain(index.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        out[half..half + 8].copy_from_slice(&hash.to_le_bytes());
    }
    out[6] = (out[6] & 0x0f) | 0x80;
    out[8] = (out[8] & 0x3f) | 0x80;
    out[13..].copy_from_slice(b"sim");
    out
}
