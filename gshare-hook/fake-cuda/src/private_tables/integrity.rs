//! `INTEGRITY_CHECK`: the answer by which libcudart recognises its driver.
//!
//! # Meaning and purpose
//!
//! At its start libcudart asks the driver for a hash over facts known to both (versions, process, thread, addresses of two tables, the
//! time, the devices) and computes the same hash itself. Any other answer makes it refuse the driver. This file computes the answer, so a
//! program on a machine without a GPU can start the runtime library to which it is linked. It serves the simulated driver alone: no kernel
//! computes anything here, the hash unlocks nothing, and no data is read by it. A build without the feature `runtime-tables` leaves it out,
//! with the other tables.
//!
//! # Sources of the facts
//!
//! ZLUDA (MIT or Apache-2.0) publishes the procedure step by step. Its steps form a standard construction: HMAC (RFC 2104) with MD2 (RFC
//! 1319) over a message of plain fields, under a fixed key. Libraries provide both; the facts of this file are the key, the order of the
//! fields and the two fixed answers for old versions.

use std::ffi::{c_int, c_uint, c_ulonglong};

use hmac::{KeyInit, Mac, SimpleHmac};
use md2::Md2;

use super::*;

table!(5 "INTEGRITY_CHECK"
    [0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2],
    3 words, 1 check);

const KEY: [u8; 16] =
    [0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52, 0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f];

/// Answers to versions of the check with 0 or 1 as their last digit, which hash nothing.
const FIXED: [[u64; 2]; 2] =
    [[0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8], [0x1841_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8]];

/// The hashed facts, in this order.
struct Facts<'a> {
    driver_version: u32,
    check_version: u32,
    process: u32,
    /// The lower half of the thread's identifier in the C library.
    thread: u32,
    cudart_table: u64,
    integrity_table: u64,
    check_address: u64,
    unix_seconds: u64,
    devices: &'a [Device],
}

/// A device in the message: its identifier, then PCI domain, bus and slot.
struct Device {
    uuid: [u8; 16],
    pci: [c_int; 3],
}

fn answer(facts: &Facts<'_>) -> [u64; 2] {
    if let Some(fixed) = FIXED.get(facts.check_version as usize % 10) {
        return *fixed;
    }
    let Ok(mut hash) = SimpleHmac::<Md2>::new_from_slice(&KEY) else { return FIXED[0] };
    for field in [facts.driver_version, facts.check_version, facts.process, facts.thread] {
        hash.update(&field.to_ne_bytes());
    }
    for field in [facts.cudart_table, facts.integrity_table, facts.check_address, facts.unix_seconds] {
        hash.update(&field.to_ne_bytes());
    }
    for device in facts.devices {
        hash.update(&device.uuid);
        for number in device.pci {
            hash.update(&number.to_ne_bytes());
        }
    }
    let bytes: [u8; 16] = hash.finalize().into_bytes().into();
    let (low, high) = bytes.split_at(8);
    let number = |half: &[u8]| half.try_into().map_or(0, u64::from_ne_bytes);
    [number(low), number(high)]
}

/// A device as libcudart sees it: a MIG device has the identifier of its GPU.
unsafe fn device(ordinal: c_int) -> Res<Device> {
    const PCI: [c_uint; 3] = [50, 33, 34];
    let mut found = Device { uuid: [0; 16], pci: [0; 3] };
    ok(exports::cuDeviceGetUuid(found.uuid.as_mut_ptr().cast(), ordinal))?;
    for (attribute, number) in PCI.into_iter().zip(&mut found.pci) {
        ok(exports::cuDeviceGetAttribute(number, attribute, ordinal))?;
    }
    Ok(found)
}

functions! {
    fn check(version: c_uint, unix_seconds: c_ulonglong, to: *mut [u64; 2]) {
        let count = base::driver()?.visible.len() as c_int;
        let devices = (0..count).map(|ordinal| device(ordinal)).collect::<Res<Vec<_>>>()?;
        let facts = Facts {
            driver_version: base::driver_version(),
            check_version: version,
            process: std::process::id(),
            thread: libc::pthread_self() as u32,
            cudart_table: cudart::TABLE.words.as_ptr() as u64,
            integrity_table: WORDS.as_ptr() as u64,
            check_address: WORDS[1].0 as u64,
            unix_seconds,
            devices: &devices,
        };
        put(to, answer(&facts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(check_version: u32, devices: &[Device]) -> Facts<'_> {
        Facts {
            driver_version: 13_020,
            check_version,
            process: 7,
            thread: 8,
            cudart_table: 0x1000,
            integrity_table: 0x2000,
            check_address: 0x3000,
            unix_seconds: 1_700_000_000,
            devices,
        }
    }

    #[test]
    fn old_versions_have_fixed_answers_and_others_depend_on_every_field() {
        assert_eq!(answer(&facts(12_080, &[])), FIXED[0]);
        assert_eq!(answer(&facts(12_081, &[])), FIXED[1]);
        let device = [Device { uuid: [3; 16], pci: [0, 1, 0] }];
        let one = answer(&facts(12_082, &device));
        let mut seen = vec![one, answer(&facts(12_082, &[])), answer(&facts(12_083, &device))];
        type Change = fn(&mut Facts<'_>);
        let changes: [Change; 7] = [
            |f| f.driver_version += 1,
            |f| f.process += 1,
            |f| f.thread += 1,
            |f| f.cudart_table += 1,
            |f| f.integrity_table += 1,
            |f| f.check_address += 1,
            |f| f.unix_seconds += 1,
        ];
        for change in changes {
            let mut changed = facts(12_082, &device);
            change(&mut changed);
            seen.push(answer(&changed));
        }
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all);
    }
}
