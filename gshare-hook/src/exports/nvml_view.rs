//! NVML's view of memory, so `nvidia-smi` and frameworks see the same limit as `cuMemGetInfo`.
//!
//! The view is altered on all devices on which a memory limit applies or will apply, from the program's first look on. Before a
//! device is in use, the limit of the settings counts, and no memory is used there. The hook alters `nvmlDeviceGetMemoryInfo`
//! (version 1) and its `_v2`, and `nvmlDeviceGetComputeRunningProcesses` with its `_v2` and `_v3`. The process sees its instance's
//! processes, itself first, each with its memory. It also sees only its instance's processes in `nvmlDeviceGetProcessUtilization`
//! and `nvmlDeviceGetProcessesUtilizationInfo`, which tell how busy each process keeps the device. Every client reaches NVML by the
//! look-up of `dlsym`, so nothing is exported.
#![allow(unsafe_code)] // NVML's functions and structures

use core::ffi::{c_char, c_uint, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::device::Device;
use crate::launch::control::{CONTROL, State};
use crate::process::runtime::{PROCESS, Runtime};
use crate::sys::dlsym::real_dlsym;
use crate::sys::{driver, setting_sources};

/// `nvmlMemory_t`: three counts of bytes.
#[repr(C)]
struct MemoryV1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
struct ProcessV1 {
    pid: c_uint,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`, also of version 3.
#[repr(C)]
struct ProcessV2 {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sample {
    pid: c_uint,
    time: u64,
    rates: [c_uint; 4],
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rate {
    time: u64,
    pid: c_uint,
    rates: [c_uint; 6],
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
struct Rates {
    version: c_uint,
    count: c_uint,
    since: u64,
    list: *mut Rate,
}

type Samples = unsafe extern "C" fn(*mut c_void, *mut Sample, *mut c_uint, u64) -> c_uint;
type AllRates = unsafe extern "C" fn(*mut c_void, *mut Rates) -> c_uint;
type Processes<T> = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut T) -> c_uint;
type MemoryInfo<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> c_uint;
type Uuid = unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_uint;

static REAL_V1: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static REAL_V2: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static REAL_SAMPLES: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static REAL_RATES: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static REAL_PROCESSES: [AtomicPtr<c_void>; 3] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 3];

/// `NVML_ERROR_NOT_FOUND`.
const NOT_FOUND: c_uint = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: c_uint = 7;
/// No instance of a partitioned device.
const NO_INSTANCE: c_uint = c_uint::MAX;

/// The wrapper of this name, if there is any and `found` is NVML's own function.
pub(crate) fn wrapper(name: &[u8], found: *mut c_void) -> Option<*mut c_void> {
    let (slot, wrapper) = match name {
        b"nvmlDeviceGetMemoryInfo" => (&REAL_V1, memory_info_v1 as *mut c_void),
        b"nvmlDeviceGetMemoryInfo_v2" => (&REAL_V2, memory_info_v2 as *mut c_void),
        b"nvmlDeviceGetComputeRunningProcesses" => (&REAL_PROCESSES[0], processes_v1 as *mut c_void),
        b"nvmlDeviceGetComputeRunningProcesses_v2" => (&REAL_PROCESSES[1], processes_v2 as *mut c_void),
        b"nvmlDeviceGetComputeRunningProcesses_v3" => (&REAL_PROCESSES[2], processes_v3 as *mut c_void),
        b"nvmlDeviceGetProcessUtilization" => (&REAL_SAMPLES, samples as *mut c_void),
        b"nvmlDeviceGetProcessesUtilizationInfo" => (&REAL_RATES, rates as *mut c_void),
        _ => return None,
    };
    // The simulated driver is one library under both names.
    if !driver::lies_in(found, b"libnvidia-ml.so") && !driver::lies_in(found, b"libcuda.so") {
        return None;
    }
    slot.store(found, Ordering::Release);
    Some(wrapper)
}

/// The program's view of a device with a memory limit.
#[derive(Clone, Copy, Debug)]
enum View {
    /// A device in use by this process.
    Used(&'static Runtime, &'static Device),
    /// A device not in use yet, with its limit.
    Unused(u64),
}

impl View {
    /// The bytes that the instance uses, and free and total memory, from NVML's figures.
    fn memory(self, free: u64, total: u64) -> (u64, u64, u64) {
        match self {
            Self::Used(runtime, device) => {
                let (free, total) = runtime.view(device, free, total);
                let used = device.memory.used_by_all().saturating_add(runtime.away()).min(total);
                (used, free.min(total - used), total)
            }
            Self::Unused(limit) => (0, free.min(limit), total.min(limit)),
        }
    }

    /// The processes of the instance, this process first, with the bytes of each.
    fn processes(self) -> Vec<(c_uint, u64)> {
        match self {
            Self::Used(runtime, device) => {
                runtime.look_at_siblings(device);
                let own = device.memory.used().saturating_add(runtime.away());
                let mut all = vec![(std::process::id(), own)];
                all.extend(device.memory.siblings());
                all
            }
            Self::Unused(_) => Vec::new(),
        }
    }
}

/// The view of an NVML device where a limit applies.
fn view_of(nvml_device: *mut c_void) -> Option<View> {
    if CONTROL.state() == State::Off as u32 {
        return None;
    }
    if let Some(runtime) = PROCESS.runtime()
        && let Some(device) = uuid_of(nvml_device).and_then(|uuid| runtime.metering.devices.by_uuid(&uuid))
    {
        device.memory.limit()?;
        return Some(View::Used(runtime, device));
    }
    setting_sources::memory_limit().map(View::Unused)
}

/// The UUID of an NVML device, as text.
fn uuid_of(nvml_device: *mut c_void) -> Option<[u8; 96]> {
    // SAFETY: valid C strings; RTLD_NOLOAD loads nothing.
    let handle = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    let get = real_dlsym(handle, c"nvmlDeviceGetUUID".as_ptr());
    // SAFETY: balances the dlopen above; NVML stays loaded by the calling program.
    unsafe { libc::dlclose(handle) };
    if get.is_null() {
        return None;
    }
    // SAFETY: NVML's function of this name has this signature.
    let get = unsafe { core::mem::transmute::<*mut c_void, Uuid>(get) };
    let mut text = [0u8; 96];
    // SAFETY: a valid buffer with its length.
    (unsafe { get(nvml_device, text.as_mut_ptr().cast(), 96) } == 0).then_some(text)
}

extern "C" fn memory_info_v1(device: *mut c_void, memory: *mut MemoryV1) -> c_uint {
    // SAFETY: only `wrapper` gives this function out, and it stored NVML's own function first.
    let real =
        unsafe { core::mem::transmute::<*mut c_void, MemoryInfo<MemoryV1>>(REAL_V1.load(Ordering::Acquire)) };
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, memory) };
    if result == 0
        && let Some(view) = view_of(device)
        // SAFETY: NVML has just filled it.
        && let Some(memory) = unsafe { memory.as_mut() }
    {
        (memory.used, memory.free, memory.total) = view.memory(memory.free, memory.total);
    }
    result
}

extern "C" fn memory_info_v2(device: *mut c_void, memory: *mut MemoryV2) -> c_uint {
    // SAFETY: only `wrapper` gives this function out, and it stored NVML's own function first.
    let real =
        unsafe { core::mem::transmute::<*mut c_void, MemoryInfo<MemoryV2>>(REAL_V2.load(Ordering::Acquire)) };
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, memory) };
    if result == 0
        && let Some(view) = view_of(device)
        // SAFETY: NVML has just filled it.
        && let Some(memory) = unsafe { memory.as_mut() }
    {
        memory.reserved = 0;
        (memory.used, memory.free, memory.total) = view.memory(memory.free, memory.total);
    }
    result
}

/// Lists the processes of the instance as NVML lists processes. `entry` makes an entry from pid and bytes.
fn processes<T>(
    version: usize,
    device: *mut c_void,
    count: *mut c_uint,
    list: *mut T,
    entry: impl Fn(c_uint, u64) -> T,
) -> c_uint {
    let pointer = REAL_PROCESSES[version].load(Ordering::Acquire);
    // SAFETY: only `wrapper` gives the functions below out, and it stored NVML's own function of the same version first.
    let real = unsafe { core::mem::transmute::<*mut c_void, Processes<T>>(pointer) };
    let Some(view) = (if count.is_null() { None } else { view_of(device) }) else {
        // SAFETY: the caller's arguments.
        return unsafe { real(device, count, list) };
    };
    let all = view.processes();
    let needed = c_uint::try_from(all.len()).unwrap_or(c_uint::MAX);
    // SAFETY: the caller's own count.
    let room = unsafe { count.replace(needed) };
    if room < needed || (list.is_null() && needed > 0) {
        return INSUFFICIENT_SIZE;
    }
    for (index, (pid, used)) in all.into_iter().enumerate() {
        // SAFETY: the caller has room for `room` entries, which is at least the number of entries here.
        unsafe { list.add(index).write_unaligned(entry(pid, used)) };
    }
    0
}

extern "C" fn processes_v1(device: *mut c_void, count: *mut c_uint, list: *mut ProcessV1) -> c_uint {
    processes(0, device, count, list, |pid, used| ProcessV1 { pid, used })
}

fn with_instances(pid: c_uint, used: u64) -> ProcessV2 {
    ProcessV2 { pid, used, gpu_instance: NO_INSTANCE, compute_instance: NO_INSTANCE }
}

extern "C" fn processes_v2(device: *mut c_void, count: *mut c_uint, list: *mut ProcessV2) -> c_uint {
    processes(1, device, count, list, with_instances)
}

extern "C" fn processes_v3(device: *mut c_void, count: *mut c_uint, list: *mut ProcessV2) -> c_uint {
    processes(2, device, count, list, with_instances)
}

/// Keeps a list's entries about processes of the instance, in their order. Without any entry it answers as NVML does when no
/// process has used the device.
///
/// # Safety
/// `list` has `count` entries.
unsafe fn keep_own<T: Copy>(
    view: View,
    list: *mut T,
    count: &mut c_uint,
    pid: impl Fn(&T) -> c_uint,
) -> c_uint {
    let mut own: Vec<c_uint> = view.processes().into_iter().map(|(pid, _)| pid).collect();
    own.push(std::process::id());
    let mut kept = 0;
    for index in 0..*count {
        // SAFETY: as the caller promises.
        let entry = unsafe { list.add(index as usize).read_unaligned() };
        if own.contains(&pid(&entry)) {
            // SAFETY: the kept entries are no more than the entries read.
            unsafe { list.add(kept as usize).write_unaligned(entry) };
            kept += 1;
        }
    }
    *count = kept;
    if kept == 0 { NOT_FOUND } else { 0 }
}

extern "C" fn samples(device: *mut c_void, list: *mut Sample, count: *mut c_uint, since: u64) -> c_uint {
    // SAFETY: only `wrapper` gives this function out, and it stored NVML's own function first.
    let real = unsafe { core::mem::transmute::<*mut c_void, Samples>(REAL_SAMPLES.load(Ordering::Acquire)) };
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, list, count, since) };
    // SAFETY: the caller's own count, which NVML has just written.
    match unsafe { count.as_mut() } {
        Some(count) if result == 0 && !list.is_null() => match view_of(device) {
            // SAFETY: NVML has just written `count` entries.
            Some(view) => unsafe { keep_own(view, list, count, |sample| sample.pid) },
            None => result,
        },
        _ => result,
    }
}

extern "C" fn rates(device: *mut c_void, all: *mut Rates) -> c_uint {
    // SAFETY: only `wrapper` gives this function out, and it stored NVML's own function first.
    let real = unsafe { core::mem::transmute::<*mut c_void, AllRates>(REAL_RATES.load(Ordering::Acquire)) };
    // SAFETY: the caller's arguments.
    let result = unsafe { real(device, all) };
    // SAFETY: the caller's own structure, which NVML has just filled.
    match unsafe { all.as_mut() } {
        Some(Rates { count, list, .. }) if result == 0 && !list.is_null() => match view_of(device) {
            // SAFETY: NVML has just written `count` entries.
            Some(view) => unsafe { keep_own(view, *list, count, |rate| rate.pid) },
            None => result,
        },
        _ => result,
    }
}
