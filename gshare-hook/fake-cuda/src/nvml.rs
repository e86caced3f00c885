//! The part of NVML that monitors and frameworks ask for, over the same device file. It needs no `cuInit`, attaches no process
//! and, as the real one, does not look at `CUDA_VISIBLE_DEVICES`.
#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // C entry points: their contract is NVML's
#![allow(clippy::missing_safety_doc, missing_docs, unreachable_pub, non_snake_case)] // idem

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::driver::core::{driver, driver_version};
use crate::driver::device::{pci_text, uuid_text};
use crate::sim::device::{device_name, device_uuid};
use crate::sim::{SimDevice, Truth};

type Return = c_uint;
type Handle = *mut c_void;

const SUCCESS: Return = 0;
const UNINITIALIZED: Return = 1;
const INVALID_ARGUMENT: Return = 2;
const NOT_SUPPORTED: Return = 3;
const NOT_FOUND: Return = 6;
const INSUFFICIENT_SIZE: Return = 7;
const DRIVER_NOT_LOADED: Return = 9;
const UNKNOWN: Return = 999;

static USERS: AtomicU32 = AtomicU32::new(0);
static DEVICE: OnceLock<Option<SimDevice>> = OnceLock::new();

fn guard(f: impl FnOnce() -> Result<(), Return>) -> Return {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

fn device() -> Result<&'static SimDevice, Return> {
    if USERS.load(Acquire) == 0 {
        return Err(UNINITIALIZED);
    }
    open().ok_or(DRIVER_NOT_LOADED)
}

fn open() -> Option<&'static SimDevice> {
    if let Ok(driver) = driver() {
        return Some(&driver.device);
    }
    let opened = DEVICE.get_or_init(|| {
        let profile = std::env::var("GSHARE_SIM_PROFILE").ok().filter(|s| !s.is_empty());
        let gpus = std::env::var("GSHARE_SIM_GPUS").ok().and_then(|n| n.parse().ok());
        SimDevice::open(&crate::sim::default_path(), profile.as_deref(), gpus).ok()
    });
    opened.as_ref()
}

/// A device's handle is its number + 1.
fn gpu(handle: Handle) -> Result<(&'static SimDevice, u32), Return> {
    let device = device()?;
    let number = (handle as usize).wrapping_sub(1);
    if number < device.profile().gpus as usize { Ok((device, number as u32)) } else { Err(INVALID_ARGUMENT) }
}

unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Return> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    to.write_unaligned(value);
    Ok(())
}

unsafe fn put_text(to: *mut c_char, len: c_uint, text: &str) -> Result<(), Return> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= len as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
    to.add(text.len()).write(0);
    Ok(())
}

macro_rules! nvml {
    ($($(#[$doc:meta])* fn $($name:ident)|+ ($($arg:ident: $type:ty),*) $body:block)*) => {$(
        nvml!(@each [$($name)+] ($($arg: $type),*) $body);
    )*};
    (@each [$($name:ident)+] $args:tt $body:block) => {
        $( nvml!(@one $name $args $body); )+
    };
    (@one $name:ident ($($arg:ident: $type:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> Return {
            guard(|| $body)
        }
    };
}

fn initialise() -> Result<(), Return> {
    open().ok_or(DRIVER_NOT_LOADED)?;
    USERS.fetch_add(1, AcqRel);
    Ok(())
}

#[repr(C)]
#[derive(Debug)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct Memory2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct Process1 {
    pid: c_uint,
    used: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct Process2 {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

#[repr(C)]
#[derive(Debug)]
pub struct ProcessSample {
    pid: c_uint,
    time_us: c_ulonglong,
    sm: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

#[repr(C)]
#[derive(Debug)]
pub struct Pci {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    id: c_uint,
    subsystem: c_uint,
    text: [u8; 32],
}

fn text_array<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [0; N];
    let n = text.len().min(N - 1);
    out[..n].copy_from_slice(&text.as_bytes()[..n]);
    out
}

/// Processes with memory on a GPU: pid, bytes.
fn users_of(truth: &Truth, gpu: u32) -> Vec<(u32, u64)> {
    truth
        .processes
        .iter()
        .filter(|p| p.live)
        .map(|p| (p.pid, p.gpus[gpu as usize].memory_used_bytes))
        .filter(|(_, bytes)| *bytes > 0)
        .collect()
}

/// Fills a list as NVML does: the number is in and out, too small a list is an error that tells the number.
unsafe fn put_list<T>(list: Vec<T>, count: *mut c_uint, out: *mut T) -> Result<(), Return> {
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let room = *count as usize;
    *count = list.len() as c_uint;
    if list.len() > room || (out.is_null() && !list.is_empty()) {
        return Err(INSUFFICIENT_SIZE);
    }
    for (i, entry) in list.into_iter().enumerate() {
        out.add(i).write_unaligned(entry);
    }
    Ok(())
}

nvml! {
    fn nvmlInit | nvmlInit_v2 () { initialise() }
    fn nvmlInitWithFlags (_flags: c_uint) { initialise() }
    fn nvmlShutdown () {
        USERS.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1)).map(|_| ()).map_err(|_| UNINITIALIZED)
    }
    fn nvmlSystemGetDriverVersion (version: *mut c_char, length: c_uint) {
        device()?;
        put_text(version, length, &format!("{}.00 (simulated)", 535 + (driver_version() / 10).saturating_sub(1220) / 2))
    }
    fn nvmlSystemGetNVMLVersion (version: *mut c_char, length: c_uint) {
        device()?;
        put_text(version, length, &format!("{}.535.00", driver_version() / 1000))
    }
    fn nvmlSystemGetCudaDriverVersion | nvmlSystemGetCudaDriverVersion_v2 (version: *mut c_int) {
        put(version, driver_version() as c_int)
    }
    fn nvmlDeviceGetCount | nvmlDeviceGetCount_v2 (count: *mut c_uint) { put(count, device()?.profile().gpus) }
    fn nvmlDeviceGetHandleByIndex | nvmlDeviceGetHandleByIndex_v2 (index: c_uint, handle: *mut Handle) {
        if index >= device()?.profile().gpus {
            return Err(INVALID_ARGUMENT);
        }
        put(handle, (index as usize + 1) as Handle)
    }
    fn nvmlDeviceGetHandleByUUID (uuid: *const c_char, handle: *mut Handle) {
        let device = device()?;
        if uuid.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let asked = CStr::from_ptr(uuid).to_string_lossy();
        let found = (0..device.profile().gpus).find(|i| uuid_text(&device_uuid(device.path(), *i)) == asked);
        put(handle, (found.ok_or(NOT_FOUND)? as usize + 1) as Handle)
    }
    fn nvmlDeviceGetHandleByPciBusId | nvmlDeviceGetHandleByPciBusId_v2 (bus: *const c_char, handle: *mut Handle) {
        let device = device()?;
        if bus.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let asked = CStr::from_ptr(bus).to_string_lossy().to_ascii_uppercase();
        let found = (0..device.profile().gpus).find(|i| asked.trim_start_matches("0000") == &pci_text(*i)[4..]);
        put(handle, (found.ok_or(NOT_FOUND)? as usize + 1) as Handle)
    }
    fn nvmlDeviceGetIndex (handle: Handle, index: *mut c_uint) { put(index, gpu(handle)?.1) }
    fn nvmlDeviceGetMinorNumber (handle: Handle, minor: *mut c_uint) { put(minor, gpu(handle)?.1) }
    fn nvmlDeviceGetName (handle: Handle, name: *mut c_char, length: c_uint) {
        put_text(name, length, &device_name(gpu(handle)?.0.profile()))
    }
    fn nvmlDeviceGetUUID (handle: Handle, uuid: *mut c_char, length: c_uint) {
        let (device, number) = gpu(handle)?;
        put_text(uuid, length, &uuid_text(&device_uuid(device.path(), number)))
    }
    fn nvmlDeviceGetPciInfo | nvmlDeviceGetPciInfo_v2 | nvmlDeviceGetPciInfo_v3 (handle: Handle, pci: *mut Pci) {
        let (_, number) = gpu(handle)?;
        let text = pci_text(number);
        put(pci, Pci {
            legacy: text_array(&text),
            domain: 0,
            bus: number + 1,
            device: 0,
            id: 0,
            subsystem: 0,
            text: text_array(&format!("0000{text}")),
        })
    }
    fn nvmlDeviceGetCudaComputeCapability (handle: Handle, major: *mut c_int, minor: *mut c_int) {
        let (a, b) = gpu(handle)?.0.profile().compute_capability;
        put(major, a as c_int)?;
        put(minor, b as c_int)
    }
    fn nvmlDeviceGetMemoryInfo (handle: Handle, memory: *mut Memory) {
        let (device, number) = gpu(handle)?;
        let truth = device.truth();
        let g = &truth.gpus[number as usize];
        let (total, used) = (g.memory_bytes, g.memory_used_bytes);
        put(memory, Memory { total, free: total - used, used })
    }
    fn nvmlDeviceGetMemoryInfo_v2 (handle: Handle, memory: *mut Memory2) {
        let (device, number) = gpu(handle)?;
        if memory.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let version = (*memory).version;
        let truth = device.truth();
        let g = &truth.gpus[number as usize];
        let (total, used) = (g.memory_bytes, g.memory_used_bytes);
        put(memory, Memory2 { version, total, reserved: 0, free: total - used, used })
    }
    fn nvmlDeviceGetUtilizationRates (handle: Handle, rates: *mut [c_uint; 2]) {
        let (device, number) = gpu(handle)?;
        put(rates, [device.truth().gpus[number as usize].utilisation_percent, 0])
    }
    fn nvmlDeviceGetComputeRunningProcesses (handle: Handle, count: *mut c_uint, list: *mut Process1) {
        let (device, number) = gpu(handle)?;
        let all = users_of(&device.truth(), number);
        put_list(all.into_iter().map(|(pid, used)| Process1 { pid, used }).collect(), count, list)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2 | nvmlDeviceGetComputeRunningProcesses_v3 (handle: Handle, count: *mut c_uint, list: *mut Process2) {
        let (device, number) = gpu(handle)?;
        let all = users_of(&device.truth(), number).into_iter();
        let none = c_uint::MAX;
        put_list(all.map(|(pid, used)| Process2 { pid, used, gpu_instance: none, compute_instance: none }).collect(), count, list)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses | nvmlDeviceGetGraphicsRunningProcesses_v2
        | nvmlDeviceGetGraphicsRunningProcesses_v3 | nvmlDeviceGetMPSComputeRunningProcesses
        | nvmlDeviceGetMPSComputeRunningProcesses_v2 | nvmlDeviceGetMPSComputeRunningProcesses_v3
        (handle: Handle, count: *mut c_uint, _list: *mut c_void) {
        gpu(handle)?;
        put(count, 0)
    }
    fn nvmlDeviceGetProcessUtilization (handle: Handle, list: *mut ProcessSample, count: *mut c_uint, since_us: c_ulonglong) {
        let (device, number) = gpu(handle)?;
        let truth = device.truth();
        let time_us = truth.time_ns / 1000;
        let samples: Vec<ProcessSample> = truth
            .processes
            .iter()
            .filter(|p| p.live && time_us > since_us)
            .map(|p| (p.pid, p.gpus[number as usize].utilisation_percent))
            .filter(|(_, sm)| *sm > 0)
            .map(|(pid, sm)| ProcessSample { pid, time_us, sm, memory: 0, encoder: 0, decoder: 0 })
            .collect();
        if samples.is_empty() {
            put(count, 0)?;
            return Err(NOT_FOUND);
        }
        put_list(samples, count, list)
    }
    fn nvmlDeviceGetComputeMode (handle: Handle, mode: *mut c_uint) { gpu(handle)?; put(mode, 0) }
    fn nvmlDeviceGetPersistenceMode (handle: Handle, mode: *mut c_uint) { gpu(handle)?; put(mode, 1) }
    fn nvmlDeviceGetMigMode (handle: Handle, _current: *mut c_uint, _pending: *mut c_uint) {
        gpu(handle)?;
        Err(NOT_SUPPORTED)
    }
    fn nvmlDeviceGetMaxMigDeviceCount (handle: Handle, count: *mut c_uint) { gpu(handle)?; put(count, 0) }
    fn nvmlDeviceIsMigDeviceHandle (handle: Handle, is_mig: *mut c_uint) { gpu(handle)?; put(is_mig, 0) }
}

/// The text of a return code.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let text = match result {
        SUCCESS => c"The operation was successful",
        UNINITIALIZED => c"NVML was not first initialized with nvmlInit()",
        INVALID_ARGUMENT => c"A supplied argument is invalid",
        NOT_SUPPORTED => c"The requested operation is not available on target device",
        4 => c"Insufficient Permissions",
        NOT_FOUND => c"A query to find an object was unsuccessful",
        INSUFFICIENT_SIZE => c"An input argument is not large enough",
        DRIVER_NOT_LOADED => c"NVIDIA driver is not loaded",
        10 => c"Timeout",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

/// Ground truth as JSON, for programs that have loaded the library: writes at most `len` bytes and a final 0, returns the
/// length it would need without the 0 (0: no device).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_stats(buffer: *mut c_char, len: usize) -> usize {
    let json = std::panic::catch_unwind(|| {
        open().and_then(|device| serde_json::to_string(&device.truth()).ok()).unwrap_or_default()
    });
    let Ok(json) = json else { return 0 };
    if !buffer.is_null() && len > 0 {
        let n = json.len().min(len - 1);
        std::ptr::copy_nonoverlapping(json.as_ptr().cast(), buffer, n);
        buffer.add(n).write(0);
    }
    json.len()
}
