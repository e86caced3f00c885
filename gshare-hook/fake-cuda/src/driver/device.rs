//! Calls of the driver about devices.

use std::ffi::CStr;

use super::visible::{gpu_uuid, pci_text};
use super::*;
use crate::sim::device_file::{device_name, device_uuid};

unsafe fn put_text(to: *mut c_char, len: c_int, text: &str) -> Answer {
    invalid_if(to.is_null() || len <= 0)?;
    let n = text.len().min(len as usize - 1);
    std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, n);
    to.add(n).write(0);
    Ok(())
}

entry!(cuDeviceGetCount, driver, |count| put(count, driver.visible.len() as c_int));

entry!(cuDeviceGet, |device, ordinal: Device| put(device, ordinal.ordinal));

entry!(cuDeviceGetName, |name, len, dev: Device| put_text(name, len, &device_name(dev.profile())));

entry!(cuDeviceGetUuid, |uuid, dev: Device| {
    put(uuid.cast::<[u8; 16]>(), gpu_uuid(&dev.driver.device, dev.gpu))
});

// Version 2 gives the MIG device's own identifier; version 1 gives the identifier of its GPU.
entry!(cuDeviceGetUuid_v2, |uuid, dev: Device| {
    put(uuid.cast::<[u8; 16]>(), device_uuid(dev.driver.device.path(), dev.gpu))
});

entry!(cuDeviceTotalMem_v2, |bytes, dev: Device| put(bytes, dev.profile().memory_bytes as usize));

entry!(cuDeviceTotalMem, |bytes, dev: Device| {
    put(bytes, u32::try_from(dev.profile().memory_bytes).unwrap_or(u32::MAX))
});

entry!(cuDeviceComputeCapability, |major, minor, dev: Device| {
    let (a, b) = dev.profile().compute_capability;
    put(major, a as c_int)?;
    put(minor, b as c_int)
});

entry!(cuDeviceGetPCIBusId, |pciBusId, len, dev: Device| {
    let text = pci_text(dev.gpu);
    // The driver cuts a name to a short buffer, but refuses to cut an address.
    invalid_if(usize::try_from(len).map_or(true, |len| len <= text.len()))?;
    put_text(pciBusId, len, &text)
});

entry!(cuDeviceGetByPCIBusId, driver, |dev, pciBusId: Given| {
    let asked = CStr::from_ptr(pciBusId).to_string_lossy().to_ascii_uppercase();
    invalid_if(!asked.contains(':'))?;
    let ending = asked.trim_start_matches("00000000:").trim_start_matches("0000:");
    let at = driver.visible.iter().position(|gpu| pci_text(*gpu).ends_with(ending));
    put(dev, at.ok_or(INVALID_DEVICE)? as c_int)
});

entry!(cuDeviceCanAccessPeer, |canAccessPeer, dev: Device, peer: Device| {
    put(canAccessPeer, c_int::from(dev.ordinal != peer.ordinal))
});

entry!(cuDeviceGetP2PAttribute, |value, attrib, from: Device, to: Device| {
    refuse_if(from.ordinal == to.ordinal, INVALID_DEVICE)?;
    invalid_if(!(1..=4).contains(&attrib))?;
    // Access, but neither atomics nor arrays.
    put(value, c_int::from(attrib == 2))
});

entry!(cuDeviceGetExecAffinitySupport, |pi, type_, _dev: Device| put(pi, c_int::from(type_ == 0)));

entry!(cuDeviceGetTexture1DLinearMaxWidth, |maxWidth, _, _, _dev: Device| put(maxWidth, 1 << 28));

entry!(cuDeviceGetAttribute, |pi, attrib, dev: Device| {
    let p = dev.profile();
    let shared = p.shared_memory_per_sm_bytes as c_int;
    let hopper = c_int::from(p.compute_capability.0 >= 9);
    let value = match attrib {
        1..=3 | 111 => 1024,
        4 => 64,
        5 | 11 => c_int::MAX,
        6 | 7 => 65_535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 | 51 => 32,
        12 | 23 | 57 | 82 => 65_536,
        13 => p.clock_khz as c_int,
        14 | 30 => 512,
        // Also priorities: accepted, and ignored.
        15 | 19 | 31 | 32 | 41 | 44 | 78..=80 | 83 | 89..=91 | 95 | 96 | 99 => 1,
        102 | 103 | 113 | 115 | 117 | 119 | 122 | 123 | 125 => 1,
        16 => p.sms as c_int,
        21 | 22 | 56 | 70 => 131_072,
        24..=26 | 58..=60 => 16_384,
        29 | 43 | 62 | 65 => 2048,
        33 => dev.gpu as c_int + 1,
        36 => p.memory_clock_khz as c_int,
        37 => p.memory_bus_bits as c_int,
        38 => p.l2_bytes as c_int,
        39 => p.threads_per_sm as c_int,
        40 => 3,
        47 | 48 => 8192,
        54 | 68 => 2046,
        69 => 1 << 28,
        71 => 65_000,
        72 => 2_097_120,
        27 | 28 | 42..=49 | 51..=74 | 77 => 32_768,
        75 => p.compute_capability.0 as c_int,
        76 => p.compute_capability.1 as c_int,
        81 => shared,
        85 => dev.gpu as c_int,
        87 => 2,
        97 => shared - 1024,
        106 => p.blocks_per_sm as c_int,
        108 => (p.l2_bytes / 8 * 5) as c_int,
        109 => 128 << 20,
        118 => 100,
        120 | 121 | 127 => hopper,
        126 => 1 + 3 * hopper,
        131 | 134 => -1,
        133 => c_int::from(dev.driver.percent < 100.0),
        139 => p.board.pci_id as c_int,
        0 | 160.. => return Err(INVALID_VALUE),
        // Attributes of later drivers.
        148.. if driver_version() < 13_010 => return Err(INVALID_VALUE),
        _ => 0,
    };
    put(pi, value)
});

entry!(cuDeviceGetProperties, |prop, dev: Device| {
    let (most, clock) = (c_int::MAX, dev.driver.profile().clock_khz as c_int);
    // maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], shared, constant, warp, pitch, registers, clock, alignment.
    let all = [1024, 1024, 1024, 64, most, 65_535, 65_535, 48 << 10, 64 << 10, 32, most, 65_536, clock, 512];
    put(prop.cast::<[c_int; 14]>(), all)
});
