//! NVML over the same device file, with the functions used by monitors and frameworks. NVML needs no `cuInit`, attaches no process and, as
//! on a real machine, ignores `CUDA_VISIBLE_DEVICES`.
//!
//! This file: handles, identity, memory, processes, MIG. `board`: the profile's board and its sensors. `links`: PCI Express, peers,
//! affinity. `gpm`: utilisation over time. `unsupported`: every other name of NVML, with the answer of a card without the function. Names,
//! structures and codes come from NVIDIA's `nvml.h`.
#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // C entry points: their contract is NVML's
#![allow(non_snake_case)] // idem

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::driver::base::{driver, driver_version, refuse_if, release};
use crate::driver::caught;
use crate::driver::visible::{gpu_uuid, pci_text, uuid_text};
use crate::sim::device_file::{device_name, device_uuid};
use crate::sim::{SimDevice, padded};
use gshare_fake_cuda_spec::{Board, Profile};

type Return = c_uint;
type Done = Result<(), Return>;
type Handle = *mut c_void;

const SUCCESS: Return = 0;
const UNINITIALIZED: Return = 1;
const INVALID_ARGUMENT: Return = 2;
const NOT_SUPPORTED: Return = 3;
const NOT_FOUND: Return = 6;
const INSUFFICIENT_SIZE: Return = 7;
const DRIVER_NOT_LOADED: Return = 9;
const GPU_IS_LOST: Return = 15;
const VERSION_MISMATCH: Return = 25;
const FUNCTION_NOT_FOUND: Return = 13;
const UNKNOWN: Return = 999;

static USERS: AtomicU32 = AtomicU32::new(0);
static DEVICE: OnceLock<Option<SimDevice>> = OnceLock::new();

fn guard(f: impl FnOnce() -> Done) -> Return {
    caught(UNKNOWN, f).err().unwrap_or(SUCCESS)
}

fn device() -> Result<&'static SimDevice, Return> {
    refuse_if(USERS.load(Acquire) == 0, UNINITIALIZED)?;
    open().ok_or(DRIVER_NOT_LOADED)
}

fn open() -> Option<&'static SimDevice> {
    if let Ok(driver) = driver() {
        return Some(&driver.device);
    }
    let opened = DEVICE.get_or_init(|| SimDevice::of_environment().ok());
    opened.as_ref()
}

/// The device behind a handle.
struct Part {
    device: &'static SimDevice,
    /// Number of the GPU.
    number: u32,
    /// Number of the MIG device, for the handle of a MIG device.
    slice: Option<u32>,
}

/// Added to the handles of MIG devices.
const SLICES: usize = 0x1000;

/// The device behind a handle, lost or not. A GPU's handle is its number + 1; a MIG device's is its number + 1 + `SLICES`.
fn place(device: &'static SimDevice, handle: Handle) -> Option<Part> {
    let number = (handle as usize).wrapping_sub(1);
    if number < device.profile().gpus as usize {
        return Some(Part { device, number: number as u32, slice: None });
    }
    let slice = number.wrapping_sub(SLICES);
    let is_slice = device.is_cut() && slice < device.devices().len();
    is_slice.then_some(Part { device, number: 0, slice: Some(slice as u32) })
}

/// An argument of a function: its C types, and the way to read it.
trait Argument: Sized {
    type Passed;

    fn read(passed: Self::Passed) -> Result<Self, Return>;
}

macro_rules! read_as_they_are {
    ($([$($generic:ident)?] $type:ty;)*) => {$(
        impl $(<$generic>)? Argument for $type {
            type Passed = Self;

            fn read(passed: Self) -> Result<Self, Return> {
                Ok(passed)
            }
        }
    )*};
}
read_as_they_are! { [T] *mut T; [T] *const T; [] c_int; [] c_uint; [] c_ulonglong; }

impl Argument for Part {
    type Passed = Handle;

    fn read(handle: Handle) -> Result<Self, Return> {
        let part = place(device()?, handle).ok_or(INVALID_ARGUMENT)?;
        if part.is_lost() { Err(GPU_IS_LOST) } else { Ok(part) }
    }
}

/// A GPU; handles of MIG devices are refused.
#[derive(Clone, Copy)]
struct Gpu {
    device: &'static SimDevice,
    number: u32,
}

impl Argument for Gpu {
    type Passed = Handle;

    fn read(handle: Handle) -> Result<Self, Return> {
        let part = Part::read(handle)?;
        refuse_if(part.slice.is_some(), INVALID_ARGUMENT)?;
        Ok(Self { device: part.device, number: part.number })
    }
}

impl Gpu {
    fn profile(self) -> &'static Profile {
        self.device.profile()
    }

    fn board(self) -> &'static Board {
        &self.device.profile().board
    }

    /// Refuses a query which NVML does not answer for a GPU in MIG mode.
    fn whole(self) -> Done {
        refuse_if(self.device.is_cut(), NOT_SUPPORTED)
    }

    /// Busy time of the last second, in percent.
    fn utilisation(self) -> u32 {
        self.device.truth().gpus[self.number as usize].utilisation_percent
    }
}

impl Part {
    fn profile(&self) -> &'static Profile {
        self.slice.map_or(self.device.profile(), |slice| &self.device.devices()[slice as usize])
    }

    /// The places of this GPU or MIG device in the file's list of devices.
    fn devices(&self) -> std::ops::Range<usize> {
        match self.slice {
            Some(slice) => slice as usize..slice as usize + 1,
            None => self.device.parts(self.number),
        }
    }

    fn is_lost(&self) -> bool {
        self.devices().any(|device| self.device.is_lost(device as u32))
    }

    /// Total, reserved and used bytes; the driver's reserved memory is part of the total.
    fn memory(&self) -> (u64, u64, u64) {
        let truth = self.device.truth();
        let used = truth.gpus[self.devices()].iter().map(|g| g.memory_used_bytes).sum();
        let total = self.profile().memory_bytes;
        let reserved = if self.slice.is_none() { self.device.profile().reserved_bytes } else { 0 };
        (total + reserved, reserved, used)
    }

    fn uuid(&self) -> String {
        match self.slice {
            Some(slice) => uuid_text("MIG", &device_uuid(self.device.path(), slice)),
            None => uuid_text("GPU", &gpu_uuid(self.device, self.number)),
        }
    }

    /// Processes with memory on the device. A process without a pid in this namespace is left out, as the real NVML leaves out processes of
    /// other containers.
    fn users(&self) -> Vec<Process2> {
        let truth = self.device.truth();
        let mut users = Vec::new();
        for device in self.devices() {
            let cut = self.device.is_cut();
            let (gpu_instance, compute_instance) =
                if cut { (device as c_uint, 0) } else { (c_uint::MAX, c_uint::MAX) };
            for process in truth.processes.iter().filter(|p| p.live && p.pid != 0) {
                let used = process.gpus[device].memory_used_bytes;
                if used > 0 {
                    users.push(Process2 { pid: process.pid, used, gpu_instance, compute_instance });
                }
            }
        }
        users
    }
}

unsafe fn put<T>(to: *mut T, value: T) -> Done {
    refuse_if(to.is_null(), INVALID_ARGUMENT)?;
    to.write_unaligned(value);
    Ok(())
}

/// Checks the first word of a caller's structure, the size and the version of its layout, and refuses any other word.
unsafe fn check_version<T>(given: *const T, version: c_uint, refusal: Return) -> Done {
    refuse_if(given.is_null(), INVALID_ARGUMENT)?;
    let word = given.cast::<c_uint>().read_unaligned();
    refuse_if(word != size_of::<T>() as c_uint | version << 24, refusal)
}

/// Microseconds since 1970.
fn unix_us() -> Result<u64, Return> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_err(|_| UNKNOWN)?;
    Ok(now.as_micros() as u64)
}

unsafe fn put_text(to: *mut c_char, len: c_uint, text: &str) -> Done {
    refuse_if(to.is_null(), INVALID_ARGUMENT)?;
    refuse_if(text.len() >= len as usize, INSUFFICIENT_SIZE)?;
    std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
    to.add(text.len()).write(0);
    Ok(())
}

/// The functions of NVML: `fn nvmlA | nvmlA_v2 (argument: Type) { body }`. [`Argument`] reads the arguments in their order. A function with
/// `-> Type` returns its value through an extra last argument.
macro_rules! nvml {
    ($(fn $($name:ident)|+ ($($arg:ident: $type:ty),*) $(-> $value:ty)? $body:block)*) => {$(
        nvml!(@gives [$($name)+] ($($arg: $type),*) ($($value)?) $body);
    )*};
    (@gives $names:tt $args:tt () $body:block) => {
        nvml!(@each $names $args $body);
    };
    (@gives $names:tt ($($arg:ident: $type:ty),*) ($value:ty) $body:block) => {
        nvml!(@each $names ($($arg: $type,)* to: *mut $value) { put(to, $body) });
    };
    (@each [$($name:ident)+] $args:tt $body:block) => {
        $( nvml!(@one $name $args $body); )+
    };
    (@one $name:ident ($($arg:ident: $type:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: <$type as Argument>::Passed),*) -> Return {
            let result = guard(|| {
                $(let $arg = <$type as Argument>::read($arg)?;)*
                $body
            });
            if crate::call_trace::calls() {
                crate::call_trace::nvml_call(stringify!($name), result);
            }
            result
        }
    };
}

/// Structures of `nvml.h`.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[allow(dead_code)] // C callers read the fields
        struct $name {
            $($field: $type),*
        }
    )*};
}

mod board;
mod gpm;
mod links;
mod unsupported;

structures! {
    Memory { total: u64, free: u64, used: u64 }
    Memory2 { version: c_uint, total: u64, reserved: u64, free: u64, used: u64 }
    Process1 { pid: c_uint, used: u64 }
    Process2 { pid: c_uint, used: u64, gpu_instance: c_uint, compute_instance: c_uint }
    /// `nvmlProcessDetail_v1_t`.
    ProcessDetail { process: Process2, protected: u64 }
    /// `nvmlProcessDetailList_v1_t`.
    ProcessDetails { version: c_uint, mode: c_uint, count: c_uint, entries: *mut ProcessDetail }
    /// `nvmlDeviceAttributes_t`: SMs; copy engines, decoders, encoders, JPEG and optical flow engines; slices of the GPU instance
    /// and of the compute instance; memory.
    Attributes { sms: c_uint, engines: [c_uint; 5], slices: [c_uint; 2], memory_mib: u64 }
    ProcessSample { pid: c_uint, time_us: c_ulonglong, sm: c_uint, memory: c_uint, encoder: c_uint, decoder: c_uint }
    /// `nvmlProcessUtilizationInfo_v1_t`; `others` holds memory, encoder, decoder, JPEG and optical flow.
    ProcessRate { time_us: c_ulonglong, pid: c_uint, sm: c_uint, others: [c_uint; 5] }
    /// `nvmlProcessesUtilizationInfo_v1_t`.
    ProcessRates { version: c_uint, count: c_uint, since_us: c_ulonglong, entries: *mut ProcessRate }
    Pci {
        legacy: [u8; 16],
        domain: c_uint,
        bus: c_uint,
        device: c_uint,
        id: c_uint,
        subsystem: c_uint,
        text: [u8; 32],
    }
}

/// The recent utilisation of a GPU by each process; `NOT_FOUND` if all were idle.
fn samples(gpu: Gpu, since_us: c_ulonglong) -> Result<Vec<ProcessSample>, Return> {
    gpu.whole()?;
    let truth = gpu.device.truth();
    let time_us = truth.time_ns / 1000;
    let live = truth.processes.iter().filter(|p| p.live && p.pid != 0 && time_us > since_us);
    let samples: Vec<ProcessSample> = live
        .map(|p| (p.pid, p.gpus[gpu.number as usize].utilisation_percent))
        .filter(|(_, sm)| *sm > 0)
        .map(|(pid, sm)| ProcessSample { pid, time_us, sm, memory: 0, encoder: 0, decoder: 0 })
        .collect();
    if samples.is_empty() { Err(NOT_FOUND) } else { Ok(samples) }
}

/// Fills a list as NVML does: the count is in and out, and a short list is an error with the needed count.
unsafe fn put_list<T>(list: Vec<T>, count: *mut c_uint, out: *mut T) -> Done {
    refuse_if(count.is_null(), INVALID_ARGUMENT)?;
    let room = *count as usize;
    *count = list.len() as c_uint;
    refuse_if(list.len() > room || (out.is_null() && !list.is_empty()), INSUFFICIENT_SIZE)?;
    for (i, entry) in list.into_iter().enumerate() {
        out.add(i).write_unaligned(entry);
    }
    Ok(())
}

nvml! {
    fn nvmlInit | nvmlInit_v2 | nvmlInitWithFlags () {
        // Flags are not read.
        open().ok_or(DRIVER_NOT_LOADED)?;
        USERS.fetch_add(1, AcqRel);
        Ok(())
    }
    fn nvmlShutdown () {
        USERS.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1)).map(|_| ()).map_err(|_| UNINITIALIZED)
    }
    fn nvmlSystemGetDriverVersion (version: *mut c_char, length: c_uint) {
        device()?;
        put_text(version, length, release().driver())
    }
    fn nvmlSystemGetNVMLVersion (version: *mut c_char, length: c_uint) {
        device()?;
        put_text(version, length, &format!("{}.{}", driver_version() / 1000, release().driver()))
    }
    fn nvmlSystemGetCudaDriverVersion | nvmlSystemGetCudaDriverVersion_v2 () -> c_int {
        driver_version() as c_int
    }
    fn nvmlDeviceGetCount | nvmlDeviceGetCount_v2 () -> c_uint { device()?.profile().gpus }
    fn nvmlDeviceGetHandleByIndex | nvmlDeviceGetHandleByIndex_v2 (index: c_uint, handle: *mut Handle) {
        refuse_if(index >= device()?.profile().gpus, INVALID_ARGUMENT)?;
        let named = (index as usize + 1) as Handle;
        Part::read(named)?;
        put(handle, named)
    }
    fn nvmlDeviceGetHandleByUUID (uuid: *const c_char, handle: *mut Handle) {
        let device = device()?;
        refuse_if(uuid.is_null(), INVALID_ARGUMENT)?;
        let asked = CStr::from_ptr(uuid).to_string_lossy();
        let slices = if device.is_cut() { device.devices().len() } else { 0 };
        let all = (0..device.profile().gpus as usize).chain(SLICES..SLICES + slices).map(|n| (n + 1) as Handle);
        let mut found = all.filter_map(|handle| Some((handle, place(device, handle)?)));
        let (named, part) = found.find(|(_, part)| part.uuid() == asked).ok_or(NOT_FOUND)?;
        refuse_if(part.is_lost(), GPU_IS_LOST)?;
        put(handle, named)
    }
    fn nvmlDeviceGetHandleByPciBusId | nvmlDeviceGetHandleByPciBusId_v2 (bus: *const c_char, handle: *mut Handle) {
        let device = device()?;
        refuse_if(bus.is_null(), INVALID_ARGUMENT)?;
        let asked = CStr::from_ptr(bus).to_string_lossy().to_ascii_uppercase();
        let found = (0..device.profile().gpus).find(|i| asked.trim_start_matches("0000") == &pci_text(*i)[4..]);
        put(handle, (found.ok_or(NOT_FOUND)? as usize + 1) as Handle)
    }
    fn nvmlDeviceGetIndex | nvmlDeviceGetMinorNumber (gpu: Gpu) -> c_uint { gpu.number }
    fn nvmlDeviceGetName (part: Part, name: *mut c_char, length: c_uint) {
        put_text(name, length, &device_name(part.profile()))
    }
    fn nvmlDeviceGetUUID (part: Part, uuid: *mut c_char, length: c_uint) { put_text(uuid, length, &part.uuid()) }
    fn nvmlDeviceGetPciInfo | nvmlDeviceGetPciInfo_v2 | nvmlDeviceGetPciInfo_v3 (gpu: Gpu, pci: *mut Pci) {
        let (text, id) = (pci_text(gpu.number), gpu.board().pci_id);
        let (legacy, text) = (padded(text.as_bytes()), padded(format!("0000{text}").as_bytes()));
        put(pci, Pci { legacy, domain: 0, bus: gpu.number + 1, device: 0, id, subsystem: id, text })
    }
    fn nvmlDeviceGetCudaComputeCapability (gpu: Gpu, major: *mut c_int, minor: *mut c_int) {
        let (a, b) = gpu.profile().compute_capability;
        put(major, a as c_int)?;
        put(minor, b as c_int)
    }
    fn nvmlDeviceGetMemoryInfo (part: Part, memory: *mut Memory) {
        let (total, reserved, used) = part.memory();
        put(memory, Memory { total, free: total - reserved - used, used: reserved + used })
    }
    fn nvmlDeviceGetMemoryInfo_v2 (part: Part, memory: *mut Memory2) {
        check_version(memory, 2, FUNCTION_NOT_FOUND)?;
        let (total, reserved, used) = part.memory();
        put(memory, Memory2 { version: (*memory).version, total, reserved, free: total - reserved - used, used })
    }
    fn nvmlDeviceGetUtilizationRates (gpu: Gpu) -> [c_uint; 2] { gpu.whole().map(|()| [gpu.utilisation(), 0])? }
    fn nvmlDeviceGetComputeRunningProcesses (part: Part, count: *mut c_uint, list: *mut Process1) {
        let users = part.users().into_iter().map(|Process2 { pid, used, .. }| Process1 { pid, used });
        put_list(users.collect(), count, list)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2 | nvmlDeviceGetComputeRunningProcesses_v3
        (part: Part, count: *mut c_uint, list: *mut Process2) {
        put_list(part.users(), count, list)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses | nvmlDeviceGetGraphicsRunningProcesses_v2
        | nvmlDeviceGetGraphicsRunningProcesses_v3 | nvmlDeviceGetMPSComputeRunningProcesses
        | nvmlDeviceGetMPSComputeRunningProcesses_v2 | nvmlDeviceGetMPSComputeRunningProcesses_v3
        (_part: Part, count: *mut c_uint, _list: *mut c_void) {
        put(count, 0)
    }
    fn nvmlDeviceGetProcessUtilization
        (gpu: Gpu, list: *mut ProcessSample, count: *mut c_uint, since_us: c_ulonglong) {
        let samples = samples(gpu, since_us);
        if matches!(samples, Err(NOT_FOUND)) {
            put(count, 0)?;
        }
        put_list(samples?, count, list)
    }
    fn nvmlDeviceGetProcessesUtilizationInfo (handle: Handle, list: *mut ProcessRates) {
        check_version(list, 1, VERSION_MISMATCH)?;
        let samples = samples(Gpu::read(handle)?, (*list).since_us)?;
        let entry = |ProcessSample { pid, time_us, sm, .. }| ProcessRate { time_us, pid, sm, others: [0; 5] };
        put_list(samples.into_iter().map(entry).collect(), &raw mut (*list).count, (*list).entries)
    }
    fn nvmlSystemGetProcessName (pid: c_uint, name: *mut c_char, length: c_uint) {
        device()?;
        let text = std::fs::read(format!("/proc/{pid}/comm")).map_err(|_| NOT_FOUND)?;
        put_text(name, length, String::from_utf8_lossy(text.trim_ascii_end()).as_ref())
    }
    fn nvmlDeviceGetRunningProcessDetailList (part: Part, list: *mut ProcessDetails) {
        const COMPUTE: c_uint = 0;
        check_version(list, 1, VERSION_MISMATCH)?;
        let users = if (*list).mode == COMPUTE { part.users() } else { Vec::new() };
        let entries = users.into_iter().map(|process| ProcessDetail { process, protected: 0 });
        put_list(entries.collect(), &raw mut (*list).count, (*list).entries)
    }
    fn nvmlDeviceGetAttributes_v2 (part: Part, attributes: *mut Attributes) {
        let slice = &part.device.devices()[part.slice.ok_or(NOT_SUPPORTED)? as usize];
        let memory_mib = slice.memory_bytes >> 20;
        // The name gives the number of the instance's GPU slices: 3g.40gb.
        let slices = slice.device_name.rsplit(' ').next().and_then(|name| name.split('g').next()?.parse().ok());
        let slices: c_uint = slices.unwrap_or(1);
        put(attributes, Attributes { sms: slice.sms, engines: [slices, 0, 0, 0, 0], slices: [slices; 2], memory_mib })
    }
    fn nvmlDeviceGetMigMode (gpu: Gpu, current: *mut c_uint, pending: *mut c_uint) {
        refuse_if(gpu.profile().mig.is_empty(), NOT_SUPPORTED)?;
        put(current, c_uint::from(gpu.device.is_cut()))?;
        put(pending, c_uint::from(gpu.device.is_cut()))
    }
    fn nvmlDeviceGetMaxMigDeviceCount (gpu: Gpu) -> c_uint { if gpu.device.is_cut() { 7 } else { 0 } }
    fn nvmlDeviceGetMigDeviceHandleByIndex (gpu: Gpu, index: c_uint, slice: *mut Handle) {
        refuse_if(!gpu.device.is_cut() || index as usize >= gpu.device.devices().len(), NOT_FOUND)?;
        put(slice, (SLICES + index as usize + 1) as Handle)
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle (part: Part) -> Handle {
        part.slice.map(|_| 1 as Handle).ok_or(INVALID_ARGUMENT)?
    }
    fn nvmlDeviceIsMigDeviceHandle (part: Part) -> c_uint { part.slice.is_some().into() }
    fn nvmlDeviceGetGpuInstanceId (part: Part) -> c_uint { part.slice.ok_or(INVALID_ARGUMENT)? }
    fn nvmlDeviceGetComputeInstanceId (part: Part) -> c_uint { part.slice.map(|_| 0).ok_or(INVALID_ARGUMENT)? }
}

/// The text of a return code.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let text = match result {
        SUCCESS => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        4 => c"Insufficient Permissions",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        DRIVER_NOT_LOADED => c"NVIDIA driver is not loaded",
        10 => c"Timeout",
        GPU_IS_LOST => c"GPU is lost",
        VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}
