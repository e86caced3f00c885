//! The devices on which this process has launched or allocated, and the driver's answers about each.
#![allow(unsafe_code)] // calls to the driver, and devices that are never freed

use core::ffi::{c_char, c_int};
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use gshare_core::DeviceUuid;
use gshare_cuda_abi::types::{CUdevice, CUresult, sys};

use crate::device::Device;
use crate::sys::driver::real;
use crate::sys::lock::Lock;

/// Most devices of a process.
pub(crate) const DEVICES: usize = 64;

/// The devices by ordinal, where a device, once entered, stays for good.
#[derive(Debug)]
pub(crate) struct Devices {
    /// The only device with a context, if there is exactly one.
    sole: AtomicPtr<Device>,
    all: [AtomicPtr<Device>; DEVICES],
    uuids: Lock<Vec<(i32, DeviceUuid)>>,
}

impl Devices {
    pub(crate) const fn new() -> Self {
        Self {
            sole: AtomicPtr::new(core::ptr::null_mut()),
            all: [const { AtomicPtr::new(core::ptr::null_mut()) }; DEVICES],
            uuids: Lock::new(Vec::new()),
        }
    }

    /// The only device with a context, if there is exactly one.
    pub(crate) fn sole(&self) -> Option<&'static Device> {
        // SAFETY: null or a leaked device.
        unsafe { self.sole.load(Ordering::Acquire).as_ref() }
    }

    pub(crate) fn set_sole(&self, device: Option<&'static Device>) {
        let pointer = device.map_or(core::ptr::null_mut(), |device| core::ptr::from_ref(device).cast_mut());
        self.sole.store(pointer, Ordering::Release);
    }

    /// The device of an ordinal, if it was entered.
    pub(crate) fn get(&self, ordinal: CUdevice) -> Option<&'static Device> {
        // SAFETY: null or a leaked device.
        unsafe { self.all.get(slot_of(ordinal)?)?.load(Ordering::Acquire).as_ref() }
    }

    pub(crate) fn insert(&self, device: &'static Device) {
        if let Some(slot) = slot_of(device.ordinal).and_then(|slot| self.all.get(slot)) {
            slot.store(core::ptr::from_ref(device).cast_mut(), Ordering::Release);
        }
    }

    /// All entered devices.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'static Device> {
        // SAFETY: null or a leaked device.
        self.all.iter().filter_map(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
    }

    /// Notes the UUID of a device.
    pub(crate) fn name(&self, ordinal: CUdevice, uuid: DeviceUuid) {
        let mut uuids = self.uuids.lock();
        uuids.retain(|(known, _)| *known != ordinal);
        uuids.push((ordinal, uuid));
    }

    /// The device with this UUID, as NVML writes it.
    pub(crate) fn by_uuid(&self, text: &[u8]) -> Option<&'static Device> {
        let mut bytes = [0u8; 16];
        let mut digits =
            text.iter().skip_while(|&&byte| byte != b'-').filter_map(|byte| (*byte as char).to_digit(16));
        for byte in &mut bytes {
            *byte = u8::try_from(digits.next()? << 4 | digits.next()?).ok()?;
        }
        let uuids = self.uuids.lock();
        let (ordinal, _) = *uuids.iter().find(|(_, uuid)| uuid.bytes() == bytes)?;
        drop(uuids);
        self.get(ordinal)
    }
}

/// Devices with contexts beside the primary context, as bits. They are noted even before the process is metered.
#[derive(Debug)]
pub(crate) struct OwnContexts(AtomicU64);

impl OwnContexts {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn made_on(&self, ordinal: CUdevice) {
        self.0.fetch_or(bit(ordinal), Ordering::AcqRel);
    }

    /// Whether such a context was ever made on another device.
    fn are_beside(&self, ordinal: CUdevice) -> bool {
        self.0.load(Ordering::Acquire) & !bit(ordinal) != 0
    }
}

fn bit(ordinal: CUdevice) -> u64 {
    u32::try_from(ordinal).ok().and_then(|ordinal| 1u64.checked_shl(ordinal)).unwrap_or(0)
}

/// The place of a device, if the device can be metered.
pub(crate) fn slot_of(ordinal: CUdevice) -> Option<usize> {
    usize::try_from(ordinal).ok().filter(|&slot| slot < DEVICES)
}

/// The ordinal of the calling thread's current device.
pub(crate) fn current_ordinal() -> Option<CUdevice> {
    let mut ordinal: CUdevice = 0;
    // SAFETY: a valid out-pointer.
    let result = unsafe { real!(cuCtxGetDevice)?(&raw mut ordinal) };
    result.is_ok().then_some(ordinal)
}

/// UUID and memory of a device, or `None` where the driver has no such device. On a MIG instance the UUID is the instance's.
pub(crate) fn identity(ordinal: CUdevice) -> Option<(DeviceUuid, u64)> {
    type GetUuid = unsafe extern "C" fn(*mut sys::CUuuid, CUdevice) -> CUresult;
    let read = |get: GetUuid| {
        let mut uuid = core::mem::MaybeUninit::<sys::CUuuid>::zeroed();
        // SAFETY: a valid out-pointer.
        let result = unsafe { get(uuid.as_mut_ptr(), ordinal) };
        // SAFETY: zeroed before and 16 plain bytes in any case.
        let bytes = unsafe { uuid.assume_init() }.bytes;
        result.is_ok().then(|| bytes.map(|byte: c_char| byte.cast_unsigned()))
    };
    let mut total = 0usize;
    // SAFETY: a valid out-pointer.
    let sized = unsafe { real!(cuDeviceTotalMem_v2)?(&raw mut total, ordinal) };
    // The first version names the GPU, and the second version names the MIG instance, where there is one.
    let gpu = real!(cuDeviceGetUuid).and_then(read);
    let named = real!(cuDeviceGetUuid_v2).and_then(read);
    let uuid = match (named, gpu) {
        (Some(own), Some(gpu)) if own != gpu => DeviceUuid::mig(own),
        (own, gpu) => DeviceUuid::gpu(own.or(gpu)?),
    };
    sized.is_ok().then_some((uuid, total as u64))
}

/// The number of devices that the process sees.
pub(crate) fn visible_devices() -> c_int {
    let mut count = 0;
    match real!(cuDeviceGetCount) {
        // SAFETY: a valid out-pointer.
        Some(get) if unsafe { get(&raw mut count) }.is_ok() => count,
        _ => 0,
    }
}

/// Whether the process sees this device.
pub(crate) fn exists(ordinal: CUdevice) -> bool {
    (0..visible_devices()).contains(&ordinal)
}

/// Whether no other device has a context yet. Later contexts are noticed when they are made.
pub(crate) fn only_device_with_context(ordinal: CUdevice, own: &OwnContexts) -> bool {
    if own.are_beside(ordinal) {
        return false;
    }
    (0..visible_devices()).filter(|&other| other != ordinal).all(|other| {
        let (mut flags, mut active) = (0, 0);
        let Some(get) = real!(cuDevicePrimaryCtxGetState) else { return false };
        // SAFETY: valid out-pointers.
        let result = unsafe { get(other, &raw mut flags, &raw mut active) };
        result.is_ok() && active == 0
    })
}
