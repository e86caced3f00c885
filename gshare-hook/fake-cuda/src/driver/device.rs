//! Calls of the driver about devices.

use std::ffi::CStr;

use super::base::*;
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

entry!(cuDeviceGetCount, |count| put(count, driver()?.visible.len() as c_int));

entry!(cuDeviceGet, |device, ordinal| {
    driver()?.gpu(ordinal)?;
    put(device, ordinal)
});

entry!(cuDeviceGetName, |name, len, dev| put_text(name, len, &device_name(driver()?.profile_at(dev)?)));

entry!(cuDeviceGetUuid, driver, |uuid, dev| {
    let gpu = driver.gpu(dev)?;
    put(uuid.cast::<[u8; 16]>(), gpu_uuid(&driver.device, gpu))
});

// The MIG device's own, where version 1 gives that of its GPU.
entry!(cuDeviceGetUuid_v2, driver, |uuid, dev| {
    let gpu = driver.gpu(dev)?;
    put(uuid.cast::<[u8; 16]>(), device_uuid(driver.device.path(), gpu))
});

entry!(cuDeviceTotalMem_v2, |bytes, dev| put(bytes, driver()?.profile_at(dev)?.memory_bytes as usize));

entry!(cuDeviceTotalMem, |bytes, dev| {
    put(bytes, u32::try_from(driver()?.profile_at(dev)?.memory_bytes).unwrap_or(u32::MAX))
});

entry!(cuDeviceComputeCapability, driver, |major, minor, dev| {
    driver.gpu(dev)?;
    let (a, b) = driver.profile().compute_capability;
    put(major, a as c_int)?;
    put(minor, b as c_int)
});

entry!(cuDeviceGetPCIBusId, |pciBusId, len, dev| {
    let text = pci_text(driver()?.gpu(dev)?);
    // A name is cut where there is little room, an address is refused.
    invalid_if(usize::try_from(len).map_or(true, |len| len <= text.len()))?;
    put_text(pciBusId, len, &text)
});

entry!(cuDeviceGetByPCIBusId, driver, |dev, pciBusId| {
    invalid_if(pciBusId.is_null())?;
    let asked = CStr::from_ptr(pciBusId).to_string_lossy().to_ascii_uppercase();
    invalid_if(!asked.contains(':'))?;
    let matches = |gpu: &u32| {
        pci_text(*gpu).ends_with(asked.trim_start_matches("00000000:").trim_start_matches("0000:"))
    };
    let at =
        driver.visible.iter().position(|gpu| !asked.is_empty() && (pci_text(*gpu) == asked || matches(gpu)));
    put(dev, at.ok_or(INVALID_DEVICE)? as c_int)
});

entry!(cuDeviceCanAccessPeer, driver, |canAccessPeer, dev, peerDev| {
    driver.gpu(dev)?;
    driver.gpu(peerDev)?;
    put(canAccessPeer, c_int::from(dev != peerDev))
});

entry!(cuDeviceGetP2PAttribute, driver, |value, attrib, srcDevice, dstDevice| {
    driver.gpu(srcDevice)?;
    driver.gpu(dstDevice)?;
    refuse_if(srcDevice == dstDevice, INVALID_DEVICE)?;
    put(
        value,
        match attrib {
            1 => 0,
            2 => 1,
            3 | 4 => 0,
            _ => return Err(INVALID_VALUE),
        },
    )
});

entry!(cuDeviceGetExecAffinitySupport, |pi, type_, dev| {
    driver()?.gpu(dev)?;
    put(pi, c_int::from(type_ == 0))
});

entry!(cuDeviceGetTexture1DLinearMaxWidth, |maxWidthInElements, _, _, dev| {
    driver()?.gpu(dev)?;
    put(maxWidthInElements, 1 << 28)
});

entry!(cuDeviceGetAttribute, driver, |pi, attrib, dev| {
    let gpu = driver.gpu(dev)?;
    let p = driver.profile_of(gpu);
    let shared = p.shared_memory_per_sm_bytes as c_int;
    let hopper = c_int::from(p.compute_capability.0 >= 9);
    put(
        pi,
        match attrib {
            1..=3 => 1024,
            4 => 64,
            5 | 11 => c_int::MAX,
            6 | 7 => 65_535,
            8 => 48 << 10,
            9 => 64 << 10,
            10 => 32,
            12 | 82 => 65_536,
            13 => p.clock_khz as c_int,
            14 | 30 => 512,
            15 | 19 | 31 | 32 | 41 => 1,
            16 => p.sms as c_int,
            21 | 22 => 131_072,
            23 => 65_536,
            24..=26 => 16_384,
            27 | 28 | 77 => 32_768,
            29 => 2048,
            33 => gpu as c_int + 1,
            36 => p.memory_clock_khz as c_int,
            37 => p.memory_bus_bits as c_int,
            38 => p.l2_bytes as c_int,
            39 => p.threads_per_sm as c_int,
            40 => 3,
            43 | 62 | 65 => 2048,
            44 => 1,
            47 | 48 => 8192,
            51 => 32,
            54 | 68 => 2046,
            56 | 70 => 131_072,
            57 => 65_536,
            58..=60 => 16_384,
            69 => 1 << 28,
            71 => 65_000,
            72 => 2_097_120,
            42..=74 if attrib != 50 => 32_768,
            75 => p.compute_capability.0 as c_int,
            76 => p.compute_capability.1 as c_int,
            // Priorities are accepted and ignored.
            78..=80 | 83 | 89..=91 | 95 | 96 | 99 => 1,
            81 => shared,
            85 => gpu as c_int,
            87 => 2,
            97 => shared - 1024,
            102 | 103 | 113 | 115 => 1,
            106 => p.blocks_per_sm as c_int,
            108 => (p.l2_bytes / 8 * 5) as c_int,
            109 => 128 << 20,
            111 => 1024,
            117 | 119 => 1,
            118 => 100,
            120 | 121 | 127 => hopper,
            122 | 123 | 125 => 1,
            126 => 1 + 3 * hopper,
            131 | 134 => -1,
            139 => p.board.pci_id as c_int,
            133 => c_int::from(driver.percent < 100.0),
            0 | 160.. => return Err(INVALID_VALUE),
            // Attributes of later drivers.
            148.. if driver_version() < 13_010 => return Err(INVALID_VALUE),
            _ => 0,
        },
    )
});

entry!(cuDeviceGetProperties, driver, |prop, dev| {
    driver.gpu(dev)?;
    // maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], shared, constant, warp, pitch, registers, clock, alignment.
    put(
        prop.cast::<[c_int; 14]>(),
        [
            1024,
            1024,
            1024,
            64,
            c_int::MAX,
            65_535,
            65_535,
            48 << 10,
            64 << 10,
            32,
            c_int::MAX,
            65_536,
            driver.profile().clock_khz as c_int,
            512,
        ],
    )
});
