//! PCI Express, peers, affinity, and confidential computing, which is off.
//!
//! Each GPU hangs on a bridge of its own below one root; GPUs reach each other over PCI Express. The machine has no NVLink and no fabric.

use super::*;

structures! {
    /// `nvmlPciInfoExt_v1_t`.
    PciExt {
        version: c_uint,
        domain: c_uint,
        bus: c_uint,
        device: c_uint,
        id: c_uint,
        subsystem: c_uint,
        base_class: c_uint,
        sub_class: c_uint,
        text: [u8; 32],
    }
    /// `nvmlSystemConfComputeSettings_v1_t`, and with one field less `nvmlConfComputeSystemState_t`.
    ConfidentialComputing { version: c_uint, state: [c_uint; 4] }
}

const HOST_BRIDGE: c_uint = 30;

/// The CPUs of this machine as a set of bits, `words` of them.
fn cpus(words: c_uint) -> Vec<u64> {
    // SAFETY: sysconf has no preconditions.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    first_bits(usize::try_from(count).unwrap_or(1), words)
}

fn first_bits(count: usize, words: c_uint) -> Vec<u64> {
    (0..words as usize)
        .map(|word| match count.saturating_sub(word * 64) {
            0 => 0,
            n @ 1..64 => (1 << n) - 1,
            _ => u64::MAX,
        })
        .collect()
}

unsafe fn put_set(set: Vec<u64>, to: *mut u64) -> Result<(), Return> {
    refuse_if(to.is_null() || set.is_empty(), INVALID_ARGUMENT)?;
    for (word, bits) in set.into_iter().enumerate() {
        to.add(word).write_unaligned(bits);
    }
    Ok(())
}

nvml! {
    fn nvmlDeviceGetCurrPcieLinkGeneration | nvmlDeviceGetMaxPcieLinkGeneration | nvmlDeviceGetGpuMaxPcieLinkGeneration
        | nvmlDeviceGetPcieLinkMaxSpeed (gpu: Gpu) -> c_uint {
        // nvmlDeviceGetPcieLinkMaxSpeed numbers the speeds by generation.
        gpu.board().pcie_generation
    }
    fn nvmlDeviceGetCurrPcieLinkWidth | nvmlDeviceGetMaxPcieLinkWidth (gpu: Gpu) -> c_uint {
        gpu.board().pcie_width
    }
    fn nvmlDeviceGetPcieSpeed (gpu: Gpu) -> c_uint {
        match gpu.board().pcie_generation {
            1 => 2_500,
            2 => 5_000,
            generation => 1_000 << generation,
        }
    }
    fn nvmlDeviceGetPcieReplayCounter (_gpu: Gpu) -> c_uint { 0 }
    fn nvmlDeviceGetBusType (_gpu: Gpu) -> c_uint { 2 }
    fn nvmlDeviceGetPciInfoExt (gpu: Gpu, pci: *mut PciExt) {
        check_version(pci, 1, VERSION_MISMATCH)?;
        let (version, id) = ((*pci).version, gpu.board().pci_id);
        let text = padded(format!("0000{}", pci_text(gpu.number)).as_bytes());
        // A 3D controller.
        let (base_class, sub_class) = (3, 2);
        let (domain, bus, device, subsystem) = (0, gpu.number + 1, 0, id);
        put(pci, PciExt { version, domain, bus, device, id, subsystem, base_class, sub_class, text })
    }

    fn nvmlDeviceGetP2PStatus (_from: Gpu, _to: Gpu, capability: c_uint) -> c_uint {
        const OK: c_uint = 0;
        const UNSUPPORTED: c_uint = 5;
        // The answer of cuDeviceGetP2PAttribute: reads and writes over PCI Express; no NVLink, no atomics.
        match capability {
            0 | 1 | 4 => OK,
            2 | 3 => UNSUPPORTED,
            _ => return Err(INVALID_ARGUMENT),
        }
    }
    fn nvmlDeviceGetTopologyCommonAncestor (one: Gpu, other: Gpu) -> c_uint {
        if one.number == other.number { 0 } else { HOST_BRIDGE }
    }
    fn nvmlDeviceGetTopologyNearestGpus (gpu: Gpu, level: c_uint, count: *mut c_uint, list: *mut Handle) {
        let others = (0..gpu.profile().gpus).filter(|other| *other != gpu.number && level == HOST_BRIDGE);
        let others: Vec<Handle> = others.map(|other| (other as usize + 1) as Handle).collect();
        if list.is_null() {
            return put(count, others.len() as c_uint);
        }
        put_list(others, count, list)
    }
    fn nvmlDeviceOnSameBoard (one: Gpu, other: Gpu) -> c_int { c_int::from(one.number == other.number) }

    // The call ignores the scope behind these arguments.
    fn nvmlDeviceGetCpuAffinity | nvmlDeviceGetCpuAffinityWithinScope (_gpu: Gpu, words: c_uint, set: *mut u64) {
        put_set(cpus(words), set)
    }
    fn nvmlDeviceGetMemoryAffinity (_gpu: Gpu, words: c_uint, set: *mut u64) { put_set(first_bits(1, words), set) }

    fn nvmlSystemGetConfComputeState () -> [c_uint; 3] { device().map(|_| [0; 3])? }
    fn nvmlSystemGetConfComputeSettings (settings: *mut ConfidentialComputing) {
        device()?;
        check_version(settings, 1, VERSION_MISMATCH)?;
        put(settings, ConfidentialComputing { version: (*settings).version, state: [0; 4] })
    }
}

#[cfg(test)]
mod tests {
    use super::first_bits;

    #[test]
    fn sets_of_bits_fill_word_by_word() {
        assert_eq!(first_bits(2, 2), [3, 0]);
        assert_eq!(first_bits(64, 2), [u64::MAX, 0]);
        assert_eq!(first_bits(70, 2), [u64::MAX, 63]);
        assert_eq!(first_bits(200, 1), [u64::MAX]);
    }
}
