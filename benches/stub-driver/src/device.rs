//! The device: the end of its work, shared by all processes with one file, and the GPU time of each.

use std::ffi::{CString, c_int};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The state shared by processes. A new file is zero.
#[repr(C)]
struct Shared {
    busy_until: AtomicU64,
}

/// The device as seen by one process.
pub(crate) struct Device {
    shared: &'static Shared,
    /// GPU time of this process's kernels, in ns.
    used: AtomicU64,
    pub(crate) call_ns: u64,
    pub(crate) early: bool,
    pub(crate) waits_for_words: bool,
}

static OWN: Shared = Shared { busy_until: AtomicU64::new(0) };

/// The device of this process.
pub(crate) fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse().ok());
        Device {
            shared: std::env::var("STUB_DEVICE").map_or(&OWN, |path| map(&path)),
            used: AtomicU64::new(0),
            call_ns: number("STUB_CALL_NS").unwrap_or(0),
            early: std::env::var_os("STUB_EARLY").is_some(),
            waits_for_words: std::env::var_os("STUB_WITHOUT_WORDS").is_none(),
        }
    })
}

/// Maps the file of a device, made if need be.
fn map(path: &str) -> &'static Shared {
    let path = CString::new(path).expect("a path without a zero byte");
    // SAFETY: a C string; the file is made as long as the mapping, which lasts as long as the process.
    unsafe {
        let file: c_int = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC, 0o600);
        assert!(file >= 0, "STUB_DEVICE can be opened");
        let length = size_of::<Shared>();
        assert_eq!(libc::ftruncate(file, length.try_into().expect("a small file")), 0);
        let (kind, access) = (libc::MAP_SHARED, libc::PROT_READ | libc::PROT_WRITE);
        let memory = libc::mmap(std::ptr::null_mut(), length, access, kind, file, 0);
        assert_ne!(memory, libc::MAP_FAILED, "STUB_DEVICE can be mapped");
        libc::close(file);
        &*memory.cast::<Shared>()
    }
}

impl Device {
    /// Runs a kernel of `length` ns, ready at `ready`, on the device; returns its end.
    pub(crate) fn run(&self, ready: u64, length: u64) -> u64 {
        if length == 0 {
            return ready;
        }
        let end = |busy_until: u64| busy_until.max(ready) + length;
        let before = self
            .shared
            .busy_until
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |until| Some(end(until)));
        self.used.fetch_add(length, Ordering::Relaxed);
        end(before.unwrap_or_else(|until| until))
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// Now, in ns of the clock common to all processes.
pub(crate) fn now() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid out-pointer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
