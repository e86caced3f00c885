//! NVML: the driver's facts about the devices of this node.
//!
//! A process reports the memory of its device itself, and the first process to attach could report any figure. The daemon takes
//! NVML's figure instead where NVML answers. Elsewhere, as in a container without the driver's library, it takes
//! the client's figure, and `gshare status` shows the source.

use gshare_core::{Bytes, DeviceUuid};
use nvml_wrapper::Device;
pub use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
pub use nvml_wrapper::enums::device::UsedGpuMemory;
pub use nvml_wrapper::error::NvmlError;

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
    /// The MIG devices of the GPU, by place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<Found>,
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
    index: u32,
    sensors: Sensors,
    why: Option<&'static str>,
}

/// The reason for a device's loss, if the error is a loss.
fn loss(error: &NvmlError) -> Option<&'static str> {
    match error {
        NvmlError::GpuLost => Some("it has fallen off the bus or cannot be reached (NVML_ERROR_GPU_IS_LOST)"),
        NvmlError::ResetRequired => {
            Some("it has to be reset before it can be used again (NVML_ERROR_RESET_REQUIRED)")
        }
        _ => None,
    }
}

impl NvmlHealth {
    /// The news; `None` where NVML cannot tell.
    pub fn look(&mut self) -> Option<News> {
        let nvml = self.nvml.get(Nvml::init)?;
        let watched = |(index, gpu): (u32, Found)| {
            let slices = gpu.mig.iter().map(|slice| slice.uuid.clone());
            let uuids = std::iter::once(gpu.uuid).chain(slices).collect();
            let sensors = Sensors { uuids, name: gpu.name, mig: gpu.mig, celsius: None, milliwatts: None };
            WatchedGpu { index, sensors, why: None }
        };
        let gpus =
            self.gpus.get(|| listed(nvml).map(|gpus| gpus.into_iter().map(watched).collect::<Vec<_>>()))?;
        for gpu in &mut *gpus {
            // The handle is found by number: NVML looks for a UUID on all GPUs, so a lost GPU spoils the search for the others.
            let device = nvml.device_by_index(gpu.index);
            let answer = device.and_then(|device| device.memory_info().map(|_| device));
            let read = answer.as_ref().ok();
            gpu.sensors.celsius = read.and_then(|device| device.temperature(TemperatureSensor::Gpu).ok());
            gpu.sensors.milliwatts = read.and_then(|device| device.power_usage().ok());
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
            self.0 = Nvml::init().ok();
        }
        let nvml = self.0.as_ref()?;
        let fact = |uuid: DeviceUuid| {
            let memory = memory(&nvml.device_by_uuid(uuid.to_string()).ok()?).ok()?;
            Some(DeviceFact { uuid, memory })
        };
        let kinds = [uuid, DeviceUuid::gpu(uuid.bytes()), DeviceUuid::mig(uuid.bytes())];
        kinds.into_iter().find_map(fact)
    }
}

/// [`listed`] without the indices.
///
/// # Errors
/// [`NvmlError`].
pub fn inventory(nvml: &Nvml) -> Result<Vec<Found>, NvmlError> {
    Ok(listed(nvml)?.into_iter().map(|(_, gpu)| gpu).collect())
}

/// The present GPUs of this node with their indices and their MIG devices. Lost GPUs are left out, and are an error only if no other GPU
/// is there.
///
/// # Errors
/// [`NvmlError`].
pub fn listed(nvml: &Nvml) -> Result<Vec<(u32, Found)>, NvmlError> {
    let (mut gpus, mut lost) = (Vec::new(), None);
    for index in 0..nvml.device_count()? {
        match nvml.device_by_index(index).and_then(|gpu| with_slices(&gpu)) {
            Ok(gpu) => gpus.push((index, gpu)),
            Err(error) if loss(&error).is_some() => lost = Some(error),
            Err(error) => return Err(error),
        }
    }
    lost.filter(|_| gpus.is_empty()).map_or(Ok(gpus), Err)
}

fn with_slices(gpu: &Device<'_>) -> Result<Found, NvmlError> {
    let mut mig = Vec::new();
    // A device without MIG answers with an error.
    if is_cut(gpu).unwrap_or(false) {
        for place in 0..gpu.mig_device_count()? {
            let Ok(slice) = gpu.mig_device_by_index(place) else { continue };
            mig.push(found(&slice, Vec::new())?);
        }
    }
    found(gpu, mig)
}

fn found(device: &Device<'_>, mig: Vec<Found>) -> Result<Found, NvmlError> {
    Ok(Found { uuid: device.uuid()?, name: device.name()?, memory: memory(device)?, mig })
}

/// Memory available to programs: CUDA does not count the driver's reserved memory.
fn memory(device: &Device<'_>) -> Result<Bytes, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Bytes(memory.total.saturating_sub(memory.reserved)))
}

/// Whether MIG is on; an error for a device without MIG.
///
/// # Errors
/// [`NvmlError`].
pub fn is_cut(gpu: &Device<'_>) -> Result<bool, NvmlError> {
    Ok(gpu.mig_mode()?.current == 1)
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
