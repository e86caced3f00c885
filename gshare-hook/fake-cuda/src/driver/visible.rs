//! Names of devices, and the selection in `CUDA_VISIBLE_DEVICES`.

use crate::sim::SimDevice;
use crate::sim::device_file::device_uuid;

/// `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
pub(crate) fn uuid(id: &[u8; 16]) -> String {
    let hex: String = id.iter().map(|b| format!("{b:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, or `MIG-…`.
pub(crate) fn uuid_text(kind: &str, id: &[u8; 16]) -> String {
    format!("{kind}-{}", uuid(id))
}

/// UUID of the GPU at `index` of the file, or of the GPU of which this device is a slice.
pub(crate) fn gpu_uuid(device: &SimDevice, index: u32) -> [u8; 16] {
    // No device has this index: the GPU differs from all its slices.
    device_uuid(device.path(), if device.is_cut() { u32::MAX } else { index })
}

pub(crate) fn pci_text(gpu: u32) -> String {
    format!("0000:{:02X}:00.0", gpu + 1)
}

/// The GPUs in `CUDA_VISIBLE_DEVICES`, by index or UUID; the list ends at the first bad entry. A process sees only one slice of a GPU: the
/// first named, or the first.
pub(crate) fn visible(device: &SimDevice) -> Vec<u32> {
    let list = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let mut shown = listed(device, list.as_deref());
    // A driver finds no lost GPU when it loads.
    shown.retain(|gpu| !device.is_lost(*gpu));
    shown.truncate(if device.is_cut() { 1 } else { shown.len() });
    shown
}

fn listed(device: &SimDevice, list: Option<&str>) -> Vec<u32> {
    let count = device.devices().len() as u32;
    let Some(list) = list else { return (0..count).collect() };
    // A number, or the UUID of the cut GPU, selects its first slice.
    let numbered = if device.is_cut() { 1 } else { count };
    let mut out = Vec::new();
    for word in list.split(',').map(str::trim) {
        let named = |kind, count, uuid: &dyn Fn(u32) -> [u8; 16]| {
            let mut matches = (0..count).filter(|i| uuid_text(kind, &uuid(*i)).starts_with(word));
            matches.next().filter(|_| matches.next().is_none())
        };
        let found = if word.starts_with("MIG-") {
            let slices = if device.is_cut() { count } else { 0 };
            named("MIG", slices, &|i| device_uuid(device.path(), i))
        } else if word.starts_with("GPU-") {
            named("GPU", numbered, &|i| gpu_uuid(device, i))
        } else {
            word.parse().ok().filter(|i: &u32| *i < numbered)
        };
        match found {
            Some(gpu) if !out.contains(&gpu) => out.push(gpu),
            // A device named twice hides all devices, as on the driver.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    out
}
