//! The address ranges of the process: the use and the device of each.
//!
//! Each GPU has a reserved range of host address space, four times its memory, which costs nothing until it is touched. Allocations are
//! spans of it (whole pages, 2 MiB steps from 2 MiB on), so copies and sets move real bytes. The host gets a freed span back if anything
//! was written to it.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use super::spans::Free;
use super::*;

/// A live allocation.
#[derive(Clone)]
pub(crate) struct Alloc {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) span: u64,
    pub(crate) what: What,
    pub(crate) device: Device,
    pub(crate) context: u64,
    pub(crate) id: u64,
    touched: bool,
    /// Set once the bytes lie in a file for other processes.
    pub(crate) backing: Option<Backing>,
}

/// Bytes in a file that several processes map.
#[derive(Clone, Copy)]
pub(crate) struct Backing {
    pub(crate) id: u32,
    pub(crate) generation: u32,
    pub(crate) file: c_int,
}

/// The kind of an address range.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// Charged as this kind.
    Charged(MemKind),
    /// In a pool, which carries the charge: the pool's address, and the place in its chunks.
    Pooled(u64, u64),
    /// Another process's memory.
    Imported,
    /// A mapping of the virtual memory API with its `CUmemAccess_flags`: 0 none, 1 to read, 3 to read and write.
    Mapped(u32),
    /// Addresses of a graph's allocation node, and whether a launch has allocated them.
    InGraph(bool),
    /// Page-locked host memory: flags.
    Host(u32),
    /// Host memory of the application, registered: flags.
    Registered(u32),
}

impl What {
    pub(crate) fn is_host(self) -> bool {
        matches!(self, Self::Host(_) | Self::Registered(_))
    }
}

#[derive(Default)]
struct Inner {
    /// The free addresses of each GPU; the first request reserves the range.
    free: [Option<Free>; MAX_GPUS],
    live: BTreeMap<u64, Alloc>,
}

/// All allocations of the process.
#[derive(Default)]
pub(crate) struct Registry(Mutex<Inner>);

impl Driver {
    /// The allocations of the process.
    pub(crate) fn memory(&self) -> &'static Registry {
        static ALL: LazyLock<Registry> = LazyLock::new(Registry::default);
        &ALL
    }
}

impl Device {
    /// Makes bytes charged to this process known to others, in a file.
    pub(crate) fn share(self, kind: MemKind, bytes: u64, file: c_int) -> Res<Backing> {
        let Self { driver, gpu, .. } = self;
        let (id, generation) =
            driver.device.with(|engine, _| engine.share(driver.process, gpu, kind, bytes))?;
        Ok(Backing { id, generation, file })
    }
}

/// Reserves the range of a GPU with so much memory.
fn reserve(bytes: u64) -> Res<Free> {
    let size = bytes.saturating_mul(4).next_multiple_of(2 << 20);
    // SAFETY: a new mapping, not reserved and not touched.
    let at = unsafe { map_pages(0, size as usize + (2 << 20), READ_WRITE, MapFlags::NORESERVE) }?;
    // SAFETY: our mapping. It must not make core files huge, nor huge pages of a touched byte.
    unsafe {
        let _ = madvise(at, size as usize, Advice::LinuxDontDump);
        let _ = madvise(at, size as usize, Advice::LinuxNoHugepage);
    }
    Ok(Free::of((at as u64).next_multiple_of(2 << 20), size))
}

impl Alloc {
    /// An allocation with an address from another source.
    fn new(address: u64, bytes: u64, what: What, device: Device, context: u64) -> Self {
        Self { address, bytes, span: 0, what, device, context, id: next_id(), touched: false, backing: None }
    }
}

/// Maps private zero pages, at a place of the kernel's choice if `at` is 0.
///
/// # Safety
/// With `MAP_FIXED`, the range is not in use.
pub(crate) unsafe fn map_pages(
    at: u64,
    bytes: usize,
    access: ProtFlags,
    flags: MapFlags,
) -> Res<*mut c_void> {
    // SAFETY: by the contract.
    unsafe { mmap_anonymous(at as *mut c_void, bytes, access, flags | MapFlags::PRIVATE) }
        .map_err(|_| OUT_OF_MEMORY)
}

pub(crate) const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Alignment and step of spans.
fn granule(bytes: u64) -> u64 {
    if bytes >= 2 << 20 { 2 << 20 } else { 4096 }
}

impl Registry {
    /// Takes addresses for `bytes`; the caller has charged them.
    pub(crate) fn insert(&self, bytes: u64, what: What, device: Device, context: u64) -> Res<u64> {
        let mut inner = lock(&self.0);
        let place = &mut inner.free[device.gpu as usize % MAX_GPUS];
        let free = place.take().map_or_else(|| reserve(device.profile().memory_bytes), Ok)?;
        let span = bytes.next_multiple_of(granule(bytes));
        let address = place.insert(free).allocate(span, granule(span)).ok_or(OUT_OF_MEMORY)?;
        let alloc = Alloc { span, ..Alloc::new(address, bytes, what, device, context) };
        inner.live.insert(address, alloc);
        Ok(address)
    }

    /// Notes a range with an address from another source.
    pub(crate) fn note(&self, address: u64, bytes: u64, what: What, device: Device, context: u64) {
        lock(&self.0).live.insert(address, Alloc::new(address, bytes, what, device, context));
    }

    /// Removes the allocation at `address` if `which` agrees. Its span, if it has one, stays until [`give_span`](Self::give_span).
    pub(crate) fn remove(&self, address: u64, which: impl FnOnce(&Alloc) -> bool) -> Option<Alloc> {
        let mut inner = lock(&self.0);
        inner.live.get(&address).filter(|alloc| which(alloc))?;
        inner.live.remove(&address)
    }

    /// Gives the span of a removed allocation back: its bytes to the host, and its addresses to later allocations. With a stream, this
    /// happens when the stream comes to it, so copies ahead of it find the bytes.
    pub(crate) fn give_span(&'static self, alloc: &Alloc, stream: Option<Ref<Stream>>) -> Answer {
        let (address, span, gpu) = (alloc.address, alloc.span, alloc.device.gpu as usize % MAX_GPUS);
        let (shared, touched) = (alloc.backing.is_some(), alloc.touched || VALUES.by_program());
        let give = move || {
            let mut inner = lock(&self.0);
            if shared {
                // Private zero pages replace the shared file again.
                let flags = MapFlags::NORESERVE | MapFlags::FIXED;
                // SAFETY: the span is ours and no longer in use.
                let _ = unsafe { map_pages(address, span as usize, READ_WRITE, flags) };
            } else if touched {
                // SAFETY: our span, which is whole pages.
                let _ = unsafe { madvise(address as *mut c_void, span as usize, Advice::LinuxDontNeed) };
            }
            inner.free[gpu].get_or_insert_default().give(address, span);
        };
        match stream {
            Some(stream) => move_bytes(stream, give)?,
            None => give(),
        }
        Ok(())
    }

    /// The allocation that holds `address`.
    pub(crate) fn find(&self, address: u64) -> Option<Alloc> {
        let inner = lock(&self.0);
        let (_, alloc) = inner.live.range(..=address).next_back()?;
        (address < alloc.address + alloc.bytes.max(1)).then(|| alloc.clone())
    }

    /// The allocation that begins at `address`.
    pub(crate) fn at(&self, address: u64) -> Res<Alloc> {
        self.find(address).filter(|alloc| alloc.address == address).ok_or(INVALID_VALUE)
    }

    /// Whether device or page-locked memory holds the whole range, also over several adjacent mappings, and is open to read, or to
    /// write; marks it as used.
    fn touch(&self, address: u64, bytes: u64, write: bool) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut inner = lock(&self.0);
        let mut at = address;
        while at < end {
            let Some((_, alloc)) = inner.live.range_mut(..=at).next_back() else { return false };
            let its_end = alloc.address + alloc.bytes;
            let (mapped, open) = match alloc.what {
                What::Mapped(flags) => (true, flags >= if write { 3 } else { 1 }),
                _ => (false, true),
            };
            if at >= its_end || !open || at > address && !mapped {
                return false;
            }
            alloc.touched = true;
            if !mapped && its_end < end {
                return false;
            }
            at = its_end;
        }
        true
    }

    /// Sets the access flags of the mappings of a range; `false` if a part is not mapped.
    pub(crate) fn set_access(&self, address: u64, bytes: u64, flags: u32) -> bool {
        let mut inner = lock(&self.0);
        let range = address..address + bytes;
        let mapped_to = inner.live.range(range.clone()).try_fold(address, |at, (_, alloc)| {
            (alloc.address == at && matches!(alloc.what, What::Mapped(_))).then_some(at + alloc.bytes)
        });
        let throughout = mapped_to == Some(range.end);
        for (_, alloc) in inner.live.range_mut(range).filter(|_| throughout) {
            alloc.what = What::Mapped(flags);
        }
        throughout
    }

    /// Changes whether a graph's allocation exists; `false` if it is already in this state.
    pub(crate) fn set_in_use(&self, address: u64, in_use: bool) -> bool {
        let mut inner = lock(&self.0);
        let what = inner.live.get_mut(&address).map(|alloc| &mut alloc.what);
        what.is_some_and(|what| std::mem::replace(what, What::InGraph(in_use)) == What::InGraph(!in_use))
    }

    /// The addresses of the allocations picked by `which`.
    pub(crate) fn places(&self, which: impl Fn(&Alloc) -> bool) -> Vec<u64> {
        lock(&self.0).live.values().filter(|alloc| which(alloc)).map(|alloc| alloc.address).collect()
    }

    pub(crate) fn set_backing(&self, address: u64, backing: Backing) {
        if let Some(alloc) = lock(&self.0).live.get_mut(&address) {
            alloc.backing = Some(backing);
        }
    }
}

/// Whether a copy treats the address as device memory.
pub(crate) fn on_device(address: u64) -> bool {
    driver().is_ok_and(|d| d.memory().find(address).is_some_and(|a| !a.what.is_host()))
}

/// Checks the range of device memory which a call reads, or writes.
pub(crate) fn check_range(address: u64, bytes: u64, write: bool) -> Answer {
    invalid_if(bytes != 0 && !driver()?.memory().touch(address, bytes, write))
}
