//! Names of physical memory that the program creates and maps by itself.
//!
//! The driver gives physical memory a new handle when it comes back from host memory. So the program gets a name for the memory, and the
//! hook alone holds the driver's handle. The program's references count for the name. A call with a name waits until its memory is on the
//! device.
#![allow(unsafe_code)] // calls to the driver

use core::mem::MaybeUninit;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;

use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUresult, sys};

use crate::device::blocks::{DEVICE, GRANULE};
use crate::device::context::relaxed;
use crate::sys::driver::real;
use crate::sys::lock::Lock;

/// Names begin here, where no driver's handle lies.
const NAMES: u64 = 0x6773_6861 << 32;

/// `CUmemAllocationProp`.
pub(crate) type Properties = MaybeUninit<sys::CUmemAllocationProp>;
/// The driver's handle of physical memory.
pub(crate) type Physical = sys::CUmemGenericAllocationHandle;

/// Named memory.
#[derive(Debug)]
struct Named {
    /// The driver's handle while the memory is on the device.
    physical: Physical,
    properties: Properties,
    bytes: u64,
    /// References that the program holds.
    references: u64,
    mappings: Vec<Range<CUdeviceptr>>,
    /// Whether it was mapped twice or others may hold it, so that it stays.
    stays: bool,
}

/// Named memory that can be a block.
#[derive(Debug)]
pub(crate) struct Movable {
    pub(crate) name: u64,
    pub(crate) physical: Physical,
    pub(crate) address: CUdeviceptr,
    pub(crate) bytes: u64,
}

/// All named memory, by name.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    all: Lock<BTreeMap<u64, Named>>,
    names: AtomicU64,
}

/// Drops a reference of this library.
pub(crate) fn release(physical: Physical) -> CUresult {
    let release = real!(cuMemRelease);
    // SAFETY: the handle is this library's, which does not use it any more.
    relaxed(|| release.map_or(CUresult::CUDA_ERROR_NOT_SUPPORTED, |release| unsafe { release(physical) }))
}

impl Handles {
    /// Takes over physical memory that the program has just created, and returns its name; `None` where it keeps the driver's handle.
    pub(crate) fn adopt(
        &self,
        physical: Physical,
        properties: *const sys::CUmemAllocationProp,
        bytes: u64,
        ordinal: CUdevice,
    ) -> Option<u64> {
        // SAFETY: the caller's own, which the driver has just read: kind, handle types, location, a pointer, and flags with the usage in the
        // upper half of their first word.
        let (properties, [kind, _, location, id, low, high, flags, _]) =
            unsafe { (properties.cast::<Properties>().read(), properties.cast::<[u32; 8]>().read()) };
        let plain = kind == 1 && location == DEVICE && id == ordinal.unsigned_abs();
        if !plain || low | high != 0 || flags >> 16 != 0 || !bytes.is_multiple_of(GRANULE) {
            return None;
        }
        let name = NAMES + self.names.fetch_add(1, Ordering::Relaxed);
        let named = Named { physical, properties, bytes, references: 1, mappings: Vec::new(), stays: false };
        self.all.lock().insert(name, named);
        Some(name)
    }

    fn with<R>(&self, name: u64, look: impl FnOnce(&mut Named) -> R) -> Option<R> {
        self.all.lock().get_mut(&name).map(look)
    }

    /// The driver's handle behind a name.
    pub(crate) fn physical(&self, name: u64) -> Option<Physical> {
        self.with(name, |named| named.physical)
    }

    pub(crate) fn properties(&self, name: u64) -> Option<Properties> {
        self.with(name, |named| named.properties)
    }

    /// Puts another handle behind a name, since the memory has come back.
    pub(crate) fn came_back(&self, name: u64, physical: Physical) {
        self.with(name, |named| named.physical = physical);
    }

    /// Notes that the memory stays from now on, and returns its mappings.
    pub(crate) fn stays(&self, name: u64) -> Vec<Range<CUdeviceptr>> {
        let mappings = self.with(name, |named| {
            named.stays = true;
            named.mappings.clone()
        });
        mappings.unwrap_or_default()
    }

    /// Notes a mapping. Returns whether the memory was mapped before.
    pub(crate) fn mapped(&self, name: u64, range: Range<CUdeviceptr>) -> bool {
        let mappings = self.with(name, |named| {
            named.mappings.push(range);
            named.mappings.len()
        });
        mappings.is_some_and(|mappings| mappings > 1)
    }

    /// Memory that is mapped once, as a whole and within a range.
    pub(crate) fn movable_in(&self, range: &Range<CUdeviceptr>) -> Vec<Movable> {
        let movable = |(name, named): (&u64, &Named)| match &named.mappings[..] {
            [mapping] if !named.stays && mapping.end - mapping.start == named.bytes => {
                let (address, bytes) = (mapping.start, named.bytes);
                let inside = mapping.start >= range.start && mapping.end <= range.end;
                inside.then_some(Movable { name: *name, physical: named.physical, address, bytes })
            }
            _ => None,
        };
        self.all.lock().iter().filter_map(movable).collect()
    }

    /// Forgets the mappings of a range.
    pub(crate) fn unmapped(&self, range: &Range<CUdeviceptr>) {
        for named in self.all.lock().values_mut() {
            named.mappings.retain(|mapping| !range.contains(&mapping.start));
        }
        self.end_unused();
    }

    /// Counts one more reference to the memory at an address, and returns its name.
    pub(crate) fn retain(&self, address: CUdeviceptr) -> Option<u64> {
        let mut all = self.all.lock();
        let is_at = |named: &Named| named.mappings.iter().any(|mapping| mapping.contains(&address));
        let (name, named) = all.iter_mut().find(|(_, named)| is_at(named))?;
        named.references += 1;
        Some(*name)
    }

    /// Takes over another reference of the driver to memory, which stays since its export, and returns its name.
    pub(crate) fn imported(&self, physical: Physical) -> Option<u64> {
        let mut all = self.all.lock();
        let (name, named) = all.iter_mut().find(|(_, named)| named.stays && named.physical == physical)?;
        named.references += 1;
        let _ = release(physical);
        Some(*name)
    }

    /// Counts one reference less; `None` where the handle is no name.
    pub(crate) fn let_go(&self, name: u64) -> Option<CUresult> {
        if name >> 32 != NAMES >> 32 {
            return None;
        }
        let left = self.with(name, |named| {
            named.references = named.references.checked_sub(1)?;
            Some(named.references)
        });
        self.end_unused();
        let gone = left.flatten().is_none();
        Some(if gone { CUresult::CUDA_ERROR_INVALID_VALUE } else { CUresult::CUDA_SUCCESS })
    }

    /// Ends memory that the program neither holds nor maps.
    fn end_unused(&self) {
        let unused = |named: &mut Named| named.references == 0 && named.mappings.is_empty();
        let gone: Vec<_> = self.all.lock().extract_if(.., |_, named| unused(named)).collect();
        for (_, named) in gone {
            let _ = release(named.physical);
        }
    }
}
