//! NVML: the driver's facts about the devices of this node.
//!
//! A process reports the memory of its device itself, and the first process to attach could report any figure. The daemon takes
//! NVML's figure instead where NVML answers. Elsewhere, as in a container without the driver's library, it takes
//! the client's figure, and `gshare status` shows the source.
#![allow(unsafe_code, reason = "foreign functions of the driver's library")]

use gshare_core::{Bytes, DeviceUuid};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

/// Errors of NVML.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// The library, or a function of the library, is missing.
    #[error("{name} cannot be loaded: {cause}")]
    Missing {
        /// Name of the library or the function.
        name: String,
        /// The loader's error.
        cause: libloading::Error,
    },
    /// A call failed.
    #[error("{name} answers error {code}")]
    Call {
        /// Name of the function.
        name: String,
        /// The function's `nvmlReturn_t`.
        code: c_int,
    },
}

/// The driver's facts about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFact {
    /// UUID of the device, with its kind.
    pub uuid: DeviceUuid,
    /// Memory available to programs.
    pub memory: Bytes,
}

impl DeviceFact {
    /// A device with this memory.
    pub const fn new(uuid: DeviceUuid, memory: Bytes) -> Self {
        Self { uuid, memory }
    }
}

/// A GPU or a MIG device in NVML's list.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Found {
    /// `GPU-…` or `MIG-…`, as `CUDA_VISIBLE_DEVICES` takes it.
    pub uuid: String,
    /// The driver's name of the device. The name of a MIG device ends with its profile, such as `MIG 3g.40gb`.
    pub name: String,
    /// Memory available to programs, in bytes.
    #[serde(rename = "memory_bytes")]
    pub memory: Bytes,
    /// The MIG devices of a GPU, by place.
    #[serde(default)]
    pub mig: Vec<Found>,
}

/// A device lost by its driver.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct LostDevice {
    /// `GPU-…` or `MIG-…`. With a GPU, all of its MIG devices are lost.
    pub uuid: String,
    /// The driver's reason, for the middle of a sentence.
    pub why: String,
}

/// Name and sensors of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Sensors {
    /// `GPU-…`, then the `MIG-…` of its MIG devices.
    pub uuids: Vec<String>,
    /// The driver's name of the GPU.
    pub name: String,
    /// Temperature in degrees Celsius, if the driver reports one.
    pub celsius: Option<u32>,
    /// Power in mW, if the driver reports it.
    pub milliwatts: Option<u32>,
}

/// The devices lost now, and the sensors of the GPUs.
pub type News = (Vec<LostDevice>, Vec<Sensors>);

/// [`News`] by NVML: a device is lost while NVML answers `NVML_ERROR_GPU_IS_LOST` or `NVML_ERROR_RESET_REQUIRED` for it.
///
/// The first question loads NVML and lists the GPUs present; later questions try again where NVML is missing. An error that leaves a
/// device usable for other programs, such as a fault of one program's kernel, is no loss of the device.
#[derive(Debug, Default)]
pub struct NvmlHealth {
    nvml: Made<Nvml>,
    gpus: Made<Vec<WatchedGpu>>,
}

/// The longest pause between two tries to make a part, in calls of [`Made::get`].
const LONGEST_PAUSE: u32 = 60;

/// A part made on first use. After failures the tries become rarer: each pause is twice the previous pause, up to
/// [`LONGEST_PAUSE`].
#[derive(Debug)]
struct Made<T> {
    made: Option<T>,
    pause: u32,
    left: u32,
}

impl<T> Default for Made<T> {
    fn default() -> Self {
        Self { made: None, pause: 0, left: 0 }
    }
}

impl<T> Made<T> {
    fn get<E>(&mut self, make: impl FnOnce() -> Result<T, E>) -> Option<&mut T> {
        if self.made.is_none() {
            if let Some(left) = self.left.checked_sub(1) {
                self.left = left;
                return None;
            }
            self.made = make().ok();
            self.pause = (2 * self.pause).clamp(1, LONGEST_PAUSE);
            self.left = self.pause;
        }
        self.made.as_mut()
    }
}

#[derive(Debug)]
struct WatchedGpu {
    index: c_uint,
    sensors: Sensors,
    why: Option<&'static str>,
}

/// The reason for a device's loss, if the error is a loss.
fn loss(error: &NvmlError) -> Option<&'static str> {
    match error {
        NvmlError::Call { code: 15, .. } => {
            Some("it has fallen off the bus or cannot be reached (NVML_ERROR_GPU_IS_LOST)")
        }
        NvmlError::Call { code: 16, .. } => {
            Some("it has to be reset before it can be used again (NVML_ERROR_RESET_REQUIRED)")
        }
        _ => None,
    }
}

impl NvmlHealth {
    /// The news; `None` where NVML cannot tell.
    pub fn look(&mut self) -> Option<News> {
        let nvml = self.nvml.get(Nvml::load)?;
        let watched = |(index, gpu): (c_uint, Found)| {
            let uuids =
                std::iter::once(gpu.uuid).chain(gpu.mig.into_iter().map(|slice| slice.uuid)).collect();
            let sensors = Sensors { uuids, name: gpu.name, celsius: None, milliwatts: None };
            WatchedGpu { index, sensors, why: None }
        };
        let gpus =
            self.gpus.get(|| nvml.listed().map(|gpus| gpus.into_iter().map(watched).collect::<Vec<_>>()))?;
        for gpu in &mut *gpus {
            // The handle is found by number: NVML looks for a UUID on all GPUs, so a lost GPU spoils the search for the others.
            let handle = nvml.by_index(gpu.index);
            let answer = handle.and_then(|handle| nvml.memory_of(handle).map(|_| handle));
            let read = answer.as_ref().ok();
            gpu.sensors.celsius = read.and_then(|handle| nvml.celsius(*handle).ok());
            gpu.sensors.milliwatts = read.and_then(|handle| nvml.milliwatts(*handle).ok());
            match answer {
                Ok(_) => gpu.why = None,
                // Other errors tell nothing about a loss, so the last state stays.
                Err(error) => gpu.why = loss(&error).or(gpu.why),
            }
        }
        let lost = gpus.iter().filter_map(|gpu| Some((gpu, gpu.why?)));
        let each = |(gpu, why): (&WatchedGpu, &str)| {
            let why = why.to_owned();
            gpu.sensors
                .uuids
                .iter()
                .map(move |uuid| LostDevice { uuid: uuid.clone(), why: why.clone() })
                .collect::<Vec<_>>()
        };
        Some((lost.flat_map(each).collect(), gpus.iter().map(|gpu| gpu.sensors.clone()).collect()))
    }
}

/// Facts about devices by NVML. Each question tries to load NVML until a try succeeds, so a driver may come up later.
#[derive(Debug, Default)]
pub(crate) struct NodeDriver(Option<Nvml>);

impl NodeDriver {
    pub(crate) fn find(&mut self, uuid: DeviceUuid) -> Option<DeviceFact> {
        if self.0.is_none() {
            self.0 = Nvml::load().ok();
        }
        let nvml = self.0.as_ref()?;
        let kinds = [uuid, DeviceUuid::gpu(uuid.bytes()), DeviceUuid::mig(uuid.bytes())];
        kinds
            .into_iter()
            .find_map(|uuid| Some(DeviceFact { uuid, memory: nvml.memory(&uuid.to_string()).ok()?.0 }))
    }
}

/// `nvmlProcessInfo_v2_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ProcessInfo {
    pid: c_uint,
    bytes: u64,
    _instances: [c_uint; 2],
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct MemoryInfo {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// NVML's library. See the [module](self).
#[derive(Debug)]
pub struct Nvml(Library);

/// Calls a function of NVML by name; every function returns an `nvmlReturn_t`.
macro_rules! call {
    ($nvml:expr, $name:literal, ($($ty:ty),*), $($arg:expr),*) => {{
        let name = || String::from_utf8_lossy($name).trim_end_matches('\0').to_owned();
        // SAFETY: nvml.h declares the function with this type.
        let function = unsafe { $nvml.0.get::<unsafe extern "C" fn($($ty),*) -> c_int>($name) };
        let function = function.map_err(|cause| NvmlError::Missing { name: name(), cause })?;
        // SAFETY: the arguments are as nvml.h requires, and all pointers are to values that outlive the call.
        match unsafe { function($($arg),*) } {
            0 => {}
            code => return Err(NvmlError::Call { name: name(), code }),
        }
    }};
}

impl Nvml {
    /// Loads the library from the loader's search path.
    ///
    /// # Errors
    /// [`NvmlError`], as for all calls.
    pub fn load() -> Result<Self, NvmlError> {
        let name = "libnvidia-ml.so.1";
        // SAFETY: NVML has no initialisers to speak of; nvmlInit is called below.
        let library = unsafe { Library::new(name) };
        let nvml = Self(library.map_err(|cause| NvmlError::Missing { name: name.to_owned(), cause })?);
        call!(nvml, b"nvmlInit_v2\0", (),);
        Ok(nvml)
    }

    /// Version of the driver.
    ///
    /// # Errors
    /// [`NvmlError`].
    pub fn driver_version(&self) -> Result<String, NvmlError> {
        let mut text = [0u8; 96];
        let at = text.as_mut_ptr().cast::<c_char>();
        call!(self, b"nvmlSystemGetDriverVersion\0", (*mut c_char, c_uint), at, 95);
        Ok(CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// Number of GPUs.
    ///
    /// # Errors
    /// [`NvmlError`].
    pub fn device_count(&self) -> Result<c_uint, NvmlError> {
        let mut count = 0;
        call!(self, b"nvmlDeviceGetCount_v2\0", (*mut c_uint), &raw mut count);
        Ok(count)
    }

    fn by_index(&self, device: c_uint) -> Result<*mut c_void, NvmlError> {
        let mut handle: *mut c_void = std::ptr::null_mut();
        call!(self, b"nvmlDeviceGetHandleByIndex_v2\0", (c_uint, *mut *mut c_void), device, &raw mut handle);
        Ok(handle)
    }

    fn by_uuid(&self, uuid: &str) -> Result<*mut c_void, NvmlError> {
        // A name with a 0 byte becomes empty: no device has such a name.
        let name = CString::new(uuid).unwrap_or_default();
        let (name, mut handle): (_, *mut c_void) = (name.as_ptr(), std::ptr::null_mut());
        call!(self, b"nvmlDeviceGetHandleByUUID\0", (*const c_char, *mut *mut c_void), name, &raw mut handle);
        Ok(handle)
    }

    /// Processes with a context on a device: their pids and bytes of memory (0 where NVML does not tell).
    ///
    /// # Errors
    /// [`NvmlError`].
    pub fn processes(&self, device: c_uint) -> Result<Vec<(u32, u64)>, NvmlError> {
        const ROOM: u32 = 1024;
        let none = ProcessInfo { pid: 0, bytes: 0, _instances: [0; 2] };
        let (mut count, mut list) = (ROOM, vec![none; ROOM as usize]);
        let handle = self.by_index(device)?;
        call!(
            self,
            b"nvmlDeviceGetComputeRunningProcesses_v3\0",
            (*mut c_void, *mut c_uint, *mut ProcessInfo),
            handle,
            &raw mut count,
            list.as_mut_ptr()
        );
        list.truncate(count as usize);
        // All ones mean an unknown size.
        Ok(list.iter().map(|info| (info.pid, if info.bytes == u64::MAX { 0 } else { info.bytes })).collect())
    }

    /// The GPUs of this node with their MIG devices, by index. Lost GPUs are left out, and are an error only if no other GPU is there.
    ///
    /// # Errors
    /// [`NvmlError`].
    pub fn inventory(&self) -> Result<Vec<Found>, NvmlError> {
        Ok(self.listed()?.into_iter().map(|(_, gpu)| gpu).collect())
    }

    /// The present GPUs with their indices.
    fn listed(&self) -> Result<Vec<(c_uint, Found)>, NvmlError> {
        let (mut gpus, mut lost) = (Vec::new(), None);
        for index in 0..self.device_count()? {
            match self.found(index) {
                Ok(gpu) => gpus.push((index, gpu)),
                Err(error) if loss(&error).is_some() => lost = Some(error),
                Err(error) => return Err(error),
            }
        }
        lost.filter(|_| gpus.is_empty()).map_or(Ok(gpus), Err)
    }

    fn found(&self, index: c_uint) -> Result<Found, NvmlError> {
        let handle = self.by_index(index)?;
        let (uuid, name) = (self.uuid(handle)?, self.name(handle)?);
        let mut mig = Vec::new();
        // A device without MIG answers with an error.
        if self.mig_enabled(index).unwrap_or(false) {
            let mut most = 0;
            call!(
                self,
                b"nvmlDeviceGetMaxMigDeviceCount\0",
                (*mut c_void, *mut c_uint),
                handle,
                &raw mut most
            );
            for place in 0..most {
                let Ok(slice) = self.mig_device(handle, place) else { continue };
                let (uuid, name) = (self.uuid(slice)?, self.name(slice)?);
                let memory = self.memory_of(slice)?.0;
                mig.push(Found { uuid, name, memory, mig: Vec::new() });
            }
        }
        let memory = self.memory_of(handle)?.0;
        Ok(Found { uuid, name, memory, mig })
    }

    fn mig_device(&self, gpu: *mut c_void, place: c_uint) -> Result<*mut c_void, NvmlError> {
        let mut slice: *mut c_void = std::ptr::null_mut();
        call!(
            self,
            b"nvmlDeviceGetMigDeviceHandleByIndex\0",
            (*mut c_void, c_uint, *mut *mut c_void),
            gpu,
            place,
            &raw mut slice
        );
        Ok(slice)
    }

    fn uuid(&self, device: *mut c_void) -> Result<String, NvmlError> {
        let mut text = [0u8; 96];
        let at = text.as_mut_ptr().cast::<c_char>();
        call!(self, b"nvmlDeviceGetUUID\0", (*mut c_void, *mut c_char, c_uint), device, at, 96);
        Ok(CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned())
    }

    fn name(&self, device: *mut c_void) -> Result<String, NvmlError> {
        let mut text = [0u8; 96];
        let at = text.as_mut_ptr().cast::<c_char>();
        call!(self, b"nvmlDeviceGetName\0", (*mut c_void, *mut c_char, c_uint), device, at, 96);
        Ok(CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// Bytes available to programs and bytes in use, of the GPU or MIG device with this UUID.
    ///
    /// # Errors
    /// [`NvmlError`].
    pub fn memory(&self, uuid: &str) -> Result<(Bytes, Bytes), NvmlError> {
        self.memory_of(self.by_uuid(uuid)?)
    }

    fn memory_of(&self, handle: *mut c_void) -> Result<(Bytes, Bytes), NvmlError> {
        // Only the second version of the structure has the driver's reserved memory, which CUDA does not count.
        let version = u32::try_from(size_of::<MemoryInfo>()).unwrap_or(0) | 2 << 24;
        let mut memory = MemoryInfo { version, total: 0, reserved: 0, free: 0, used: 0 };
        call!(self, b"nvmlDeviceGetMemoryInfo_v2\0", (*mut c_void, *mut MemoryInfo), handle, &raw mut memory);
        Ok((Bytes(memory.total.saturating_sub(memory.reserved)), Bytes(memory.used)))
    }

    fn celsius(&self, gpu: *mut c_void) -> Result<u32, NvmlError> {
        // Sensor 0 is the sensor of the GPU's die.
        let (die, mut celsius) = (0, 0);
        call!(
            self,
            b"nvmlDeviceGetTemperature\0",
            (*mut c_void, c_uint, *mut c_uint),
            gpu,
            die,
            &raw mut celsius
        );
        Ok(celsius)
    }

    fn milliwatts(&self, gpu: *mut c_void) -> Result<u32, NvmlError> {
        let mut milliwatts = 0;
        call!(self, b"nvmlDeviceGetPowerUsage\0", (*mut c_void, *mut c_uint), gpu, &raw mut milliwatts);
        Ok(milliwatts)
    }

    /// Whether MIG is on; an error for a device without MIG.
    ///
    /// # Errors
    /// [`NvmlError`].
    pub fn mig_enabled(&self, device: c_uint) -> Result<bool, NvmlError> {
        let handle = self.by_index(device)?;
        let (mut current, mut pending) = (0, 0);
        call!(
            self,
            b"nvmlDeviceGetMigMode\0",
            (*mut c_void, *mut c_uint, *mut c_uint),
            handle,
            &raw mut current,
            &raw mut pending
        );
        Ok(current == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_tried_ever_more_rarely_and_made_once() {
        let mut part = Made::default();
        let mut tried = Vec::new();
        for second in 0..250 {
            let make = || {
                tried.push(second);
                if second < 180 { Err(()) } else { Ok(second) }
            };
            assert_eq!(part.get(make).copied(), (second >= 191).then_some(191));
        }
        assert_eq!(tried, [0, 2, 5, 10, 19, 36, 69, 130, 191]);
    }
}
