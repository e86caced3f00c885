//! The part of the CUDA driver API for a client without a runtime, loaded as any program loads it.
#![allow(unsafe_code, reason = "foreign functions of the driver")]

use anyhow::Context as _;
use gshare_core::{Bytes, DeviceUuid};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// The driver, real or simulated.
#[derive(Debug)]
pub(crate) struct Driver(Library);

/// A symbol of the simulated driver alone.
const TRUTH: &[u8] = b"gshare_sim_truth\0";

/// A function of the driver by name; every such function gives a `CUresult`.
macro_rules! call {
    ($driver:expr, $name:literal, ($($ty:ty),*), $($arg:expr),*) => {{
        // SAFETY: the type is cuda.h's type for this name.
        let function = unsafe { $driver.0.get::<unsafe extern "C" fn($($ty),*) -> c_int>($name) };
        let name = String::from_utf8_lossy($name).trim_end_matches('\0').to_owned();
        let function = anyhow::Context::with_context(function, || name.clone())?;
        // SAFETY: the arguments follow cuda.h; pointers are to values that outlive the call.
        let result = unsafe { function($($arg),*) };
        anyhow::ensure!(result == 0, "{name} answers error {result}");
    }};
}

impl Driver {
    /// Loads `libcuda.so.1` from the loader's path.
    pub(crate) fn load() -> anyhow::Result<Self> {
        // SAFETY: every CUDA program runs the driver's initialisers.
        let library = unsafe { Library::new("libcuda.so.1") };
        Ok(Self(library.context("libcuda.so.1 cannot be loaded")?))
    }

    /// The version, such as 12080 for 12.8.
    pub(crate) fn version(&self) -> anyhow::Result<c_int> {
        let mut version = 0;
        call!(self, b"cuDriverGetVersion\0", (*mut c_int), &raw mut version);
        Ok(version)
    }

    /// Whether this is gshare's simulated driver: it exports its ground truth.
    pub(crate) fn is_simulated(&self) -> bool {
        // SAFETY: the symbol is looked up, not used.
        unsafe { self.0.get::<*const c_void>(TRUTH) }.is_ok()
    }

    pub(crate) fn init(&self) -> anyhow::Result<()> {
        call!(self, b"cuInit\0", (c_uint), 0);
        Ok(())
    }

    pub(crate) fn device_count(&self) -> anyhow::Result<c_int> {
        let mut count = 0;
        call!(self, b"cuDeviceGetCount\0", (*mut c_int), &raw mut count);
        Ok(count)
    }

    pub(crate) fn device_name(&self, device: c_int) -> anyhow::Result<String> {
        let mut name = [0u8; 256];
        let at = name.as_mut_ptr().cast::<c_char>();
        call!(self, b"cuDeviceGetName\0", (*mut c_char, c_int, c_int), at, 255, device);
        Ok(CStr::from_bytes_until_nul(&name)?.to_string_lossy().into_owned())
    }

    /// The UUID in the hook's messages to the daemon.
    fn uuid(&self, ordinal: c_int) -> anyhow::Result<DeviceUuid> {
        let mut gpu = [0u8; 16];
        let at = gpu.as_mut_ptr().cast::<c_void>();
        call!(self, b"cuDeviceGetUuid\0", (*mut c_void, c_int), at, ordinal);
        // A driver before CUDA 11.4 knows no other UUID.
        let slice = self.slice_uuid(ordinal).unwrap_or(gpu);
        Ok(if gpu == slice { DeviceUuid::gpu(gpu) } else { DeviceUuid::mig(slice) })
    }

    fn slice_uuid(&self, ordinal: c_int) -> anyhow::Result<[u8; 16]> {
        let mut slice = [0u8; 16];
        let at = slice.as_mut_ptr().cast::<c_void>();
        call!(self, b"cuDeviceGetUuid_v2\0", (*mut c_void, c_int), at, ordinal);
        Ok(slice)
    }

    pub(crate) fn device_memory(&self, device: c_int) -> anyhow::Result<usize> {
        let mut bytes = 0usize;
        call!(self, b"cuDeviceTotalMem_v2\0", (*mut usize, c_int), &raw mut bytes, device);
        Ok(bytes)
    }
}

/// The devices visible to a program in this environment, with their memory: `gshare run` asks room for them.
pub(crate) fn devices() -> anyhow::Result<Vec<(DeviceUuid, Bytes)>> {
    let driver = Driver::load()?;
    driver.init()?;
    let each = |ordinal| {
        let (uuid, memory) = (driver.uuid(ordinal)?, driver.device_memory(ordinal)?);
        Ok((uuid, Bytes(memory.try_into()?)))
    };
    (0..driver.device_count()?).map(each).collect()
}

/// The ground truth of a simulated device.
#[derive(Debug)]
pub(crate) struct Truth {
    driver: Library,
    device: std::ffi::CString,
}

/// The ground truth, as far as the demo needs it.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct TruthNow {
    /// `CLOCK_MONOTONIC` in ns.
    pub(crate) time_ns: u64,
    processes: Vec<TruthProcess>,
}

#[derive(Debug, serde::Deserialize)]
struct TruthProcess {
    pid: u32,
    live: bool,
    gpus: Vec<TruthGpu>,
}

#[derive(Debug, serde::Deserialize)]
struct TruthGpu {
    busy_ns: u64,
}

impl TruthNow {
    /// Time with at least one kernel of the process running, over all GPUs.
    pub(crate) fn busy_ns(&self, pid: u32) -> Option<u64> {
        let process = self.processes.iter().find(|process| process.pid == pid && process.live)?;
        Some(process.gpus.iter().map(|gpu| gpu.busy_ns).sum())
    }
}

impl Truth {
    /// Loads the truth of the device file at `device`, through the simulated driver's library.
    pub(crate) fn load(library: &std::path::Path, device: &std::path::Path) -> anyhow::Result<Self> {
        use std::os::unix::ffi::OsStrExt as _;
        let device = std::ffi::CString::new(device.as_os_str().as_bytes())?;
        // SAFETY: the library of this project; it has no initialisers.
        let library = unsafe { Library::new(library) }.with_context(|| library.display().to_string())?;
        Ok(Self { driver: library, device })
    }

    pub(crate) fn read(&self) -> anyhow::Result<TruthNow> {
        type Read = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> isize;
        // SAFETY: the type is the library's type for this name.
        let read = unsafe { self.driver.get::<Read>(TRUTH) }.context("gshare_sim_truth")?;
        let mut text = vec![0u8; 1 << 16];
        loop {
            // SAFETY: a C string, and a buffer with room for its length.
            let length = unsafe { read(self.device.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
            let length = usize::try_from(length).context("the simulated device cannot be read")?;
            match text.get(..length) {
                Some(text) => return Ok(serde_json::from_slice(text)?),
                None => text.resize(length, 0),
            }
        }
    }
}
