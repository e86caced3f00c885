//! Device memory by pointer: plain, pitched, managed; host memory; what a pointer is.
//!
//! Each GPU has a reserved range of host address space, four times its memory, that costs nothing until it is touched.
//! Allocations are spans of it (whole pages, 2 MiB steps from 2 MiB on), so copies and sets move real bytes. A freed span
//! is reused for the same size, and given back to the host if anything was written to it. The account is charged
//! the bytes asked for, without rounding (a pitched allocation: pitch x height).

use super::capture::{legacy_not_implied, not_while_capturing};
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
    /// For [`What::InGraph`]: a launch has allocated it.
    in_use: bool,
    /// Set once its bytes lie in a file that other processes map.
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
    /// In a pool, which carries the charge: the pool's address.
    Pooled(u64),
    /// Another process's memory.
    Imported,
    /// A mapping of the virtual memory API, and whether access was given.
    Mapped(bool),
    /// Addresses of a graph's allocation node.
    InGraph,
    /// Page-locked host memory: flags.
    Host(u32),
    /// Host memory of the application, registered: flags.
    Registered(u32),
}

impl What {
    fn is_host(self) -> bool {
        matches!(self, Self::Host(_) | Self::Registered(_))
    }
}

#[derive(Default)]
struct Arena {
    next: u64,
    end: u64,
    /// Freed spans by size.
    free: BTreeMap<u64, Vec<u64>>,
    /// Freed spans of sizes that no call asked for, when the range is used up.
    pieces: BTreeMap<u64, u64>,
}

#[derive(Default)]
struct Inner {
    arenas: [Arena; MAX_GPUS],
    live: BTreeMap<u64, Alloc>,
}

/// All allocations of the process.
#[derive(Default)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
}

impl Arena {
    fn reserve(&mut self, bytes: u64) -> Res<()> {
        let size = bytes.saturating_mul(4).next_multiple_of(2 << 20);
        // SAFETY: a new mapping, not reserved and not touched.
        let at = unsafe { map_pages(0, size as usize + (2 << 20), READ_WRITE, libc::MAP_NORESERVE) }?;
        // SAFETY: our mapping. It must not make core files huge, nor huge pages of a touched byte.
        unsafe {
            libc::madvise(at, size as usize, libc::MADV_DONTDUMP);
            libc::madvise(at, size as usize, libc::MADV_NOHUGEPAGE);
        }
        self.next = (at as u64).next_multiple_of(2 << 20);
        self.end = self.next + size;
        Ok(())
    }

    fn take(&mut self, span: u64, total: u64) -> Res<u64> {
        if let Some(at) = self.free.get_mut(&span).and_then(Vec::pop) {
            return Ok(at);
        }
        if self.end == 0 {
            self.reserve(total)?;
        }
        let alignment = granule(span);
        let at = self.next.next_multiple_of(alignment);
        if at + span <= self.end {
            self.next = at + span;
            return Ok(at);
        }
        // The range is used up: join what was freed, and take the first piece that fits.
        for (size, list) in std::mem::take(&mut self.free) {
            self.pieces.extend(list.into_iter().map(|at| (at, size)));
        }
        let mut joined: BTreeMap<u64, u64> = BTreeMap::new();
        for (at, size) in std::mem::take(&mut self.pieces) {
            match joined.last_entry() {
                Some(mut last) if *last.key() + *last.get() == at => *last.get_mut() += size,
                _ => {
                    joined.insert(at, size);
                }
            }
        }
        self.pieces = joined;
        let fits = self.pieces.iter().find_map(|(at, size)| {
            let start = at.next_multiple_of(alignment);
            (start + span <= at + size).then_some((*at, *size, start))
        });
        let (at, size, start) = fits.ok_or(OUT_OF_MEMORY)?;
        self.pieces.remove(&at);
        if start > at {
            self.pieces.insert(at, start - at);
        }
        if start + span < at + size {
            self.pieces.insert(start + span, at + size - start - span);
        }
        Ok(start)
    }
}

impl Alloc {
    /// One whose addresses come from elsewhere.
    fn new(address: u64, bytes: u64, what: What, device: Device, context: u64) -> Self {
        let (id, touched, in_use, backing) = (next_id(), false, false, None);
        Self { address, bytes, span: 0, what, device, context, id, touched, in_use, backing }
    }
}

/// Maps private zero pages, at a place of the kernel's choice where `at` is 0.
///
/// # Safety
/// With `MAP_FIXED`, nothing that is still used lies there.
pub(crate) unsafe fn map_pages(at: u64, bytes: usize, protection: c_int, flags: c_int) -> Res<*mut c_void> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: by the contract; the result is checked.
    let at = unsafe { libc::mmap(at as *mut c_void, bytes, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(OUT_OF_MEMORY) } else { Ok(at) }
}

pub(crate) const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Spans are multiples of this, and begin at one.
fn granule(bytes: u64) -> u64 {
    if bytes >= 2 << 20 { 2 << 20 } else { 4096 }
}

impl Registry {
    /// Takes addresses for `bytes`; the caller has charged them.
    pub(crate) fn insert(&self, bytes: u64, what: What, device: Device, context: u64) -> Res<u64> {
        let total = device.profile().memory_bytes;
        let mut inner = lock(&self.inner);
        let span = bytes.next_multiple_of(granule(bytes));
        let address = inner.arenas[device.gpu as usize % MAX_GPUS].take(span, total)?;
        let alloc = Alloc { span, ..Alloc::new(address, bytes, what, device, context) };
        inner.live.insert(address, alloc);
        Ok(address)
    }

    /// Notes a range whose addresses come from elsewhere.
    pub(crate) fn note(&self, address: u64, bytes: u64, what: What, device: Device, context: u64) {
        lock(&self.inner).live.insert(address, Alloc::new(address, bytes, what, device, context));
    }

    /// Removes the allocation that begins at `address` if `which` agrees, and gives its span back.
    pub(crate) fn remove(&self, address: u64, which: impl FnOnce(&Alloc) -> bool) -> Option<Alloc> {
        let mut inner = lock(&self.inner);
        inner.live.get(&address).filter(|alloc| which(alloc))?;
        let alloc = inner.live.remove(&address)?;
        if alloc.span > 0 {
            if alloc.backing.is_some() {
                // Private zero pages again in the place of the shared file.
                let flags = libc::MAP_NORESERVE | libc::MAP_FIXED;
                // SAFETY: the span is ours and no longer in use.
                let _ = unsafe { map_pages(address, alloc.span as usize, READ_WRITE, flags) };
            } else if alloc.touched {
                // SAFETY: our span, which is whole pages.
                unsafe { libc::madvise(address as *mut c_void, alloc.span as usize, libc::MADV_DONTNEED) };
            }
            let arena = &mut inner.arenas[alloc.device.gpu as usize % MAX_GPUS];
            arena.free.entry(alloc.span).or_default().push(address);
        }
        Some(alloc)
    }

    /// The allocation that holds `address`.
    pub(crate) fn find(&self, address: u64) -> Option<Alloc> {
        let inner = lock(&self.inner);
        let (_, alloc) = inner.live.range(..=address).next_back()?;
        (address < alloc.address + alloc.bytes.max(1)).then(|| alloc.clone())
    }

    /// The allocation that begins at `address`.
    pub(crate) fn at(&self, address: u64) -> Res<Alloc> {
        self.find(address).filter(|alloc| alloc.address == address).ok_or(INVALID_VALUE)
    }

    /// Whether device (or page-locked) memory holds all of the range, also over several mappings that follow one
    /// another; remembers that it is written to.
    fn touch(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut inner = lock(&self.inner);
        let mut at = address;
        while at < end {
            let Some((_, alloc)) = inner.live.range_mut(..=at).next_back() else { return false };
            let its_end = alloc.address + alloc.bytes;
            let mapped = alloc.what == What::Mapped(true);
            if at >= its_end || alloc.what == What::Mapped(false) || at > address && !mapped {
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

    /// Opens or closes the mappings of a range; `false` if it is not mapped throughout.
    pub(crate) fn set_access(&self, address: u64, bytes: u64, open: bool) -> bool {
        let mut inner = lock(&self.inner);
        let mut at = address;
        for alloc in inner.live.range(address..address + bytes).map(|(_, a)| a) {
            if alloc.address != at || !matches!(alloc.what, What::Mapped(_)) {
                return false;
            }
            at += alloc.bytes;
        }
        if at != address + bytes {
            return false;
        }
        for (_, alloc) in inner.live.range_mut(address..address + bytes) {
            alloc.what = What::Mapped(open);
        }
        true
    }

    /// Changes whether a graph's allocation exists; `false` if it did already (or did not).
    pub(crate) fn set_in_use(&self, address: u64, in_use: bool) -> bool {
        let mut inner = lock(&self.inner);
        let alloc = inner.live.get_mut(&address);
        alloc.is_some_and(|alloc| std::mem::replace(&mut alloc.in_use, in_use) != in_use)
    }

    pub(crate) fn set_backing(&self, address: u64, backing: Backing) {
        if let Some(alloc) = lock(&self.inner).live.get_mut(&address) {
            alloc.backing = Some(backing);
        }
    }
}

/// Whether the address belongs to the device as far as copies are concerned.
pub(crate) fn on_device(address: u64) -> bool {
    driver().is_ok_and(|d| d.memory.find(address).is_some_and(|a| !a.what.is_host()))
}

/// Checks a range of device memory that a call reads or writes.
pub(crate) fn check_range(address: u64, bytes: u64) -> Answer {
    invalid_if(bytes != 0 && !driver()?.memory.touch(address, bytes))
}

/// Allocates and charges device memory.
pub(crate) fn allocate(context: &Context, bytes: u64, kind: MemKind) -> Res<u64> {
    let driver = driver()?;
    charge(context.device, kind, bytes)?;
    let inserted = driver.memory.insert(bytes, What::Charged(kind), context.device, context.id);
    inserted.inspect_err(|_| context.device.refund(kind, bytes))
}

/// Charges bytes; before it says that there are none, it looks for dead processes and trims this one's pools.
pub(crate) fn charge(device: Device, kind: MemKind, bytes: u64) -> Answer {
    let charged = device.charge(kind, bytes).or_else(|_| device.charge_swept(kind, bytes));
    if charged.is_err() && stream_ordered::trim_all(device.gpu)? > 0 {
        return Ok(device.charge(kind, bytes)?);
    }
    Ok(charged?)
}

/// Frees what [`allocate`] gave.
pub(crate) fn free(address: u64) -> Answer {
    let driver = driver()?;
    match driver.memory.at(address)?.what {
        What::Pooled(_) => stream_ordered::free_now(address),
        What::Charged(kind) => {
            let charged = |a: &Alloc| matches!(a.what, What::Charged(_));
            let alloc = driver.memory.remove(address, charged).ok_or(INVALID_VALUE)?;
            match alloc.backing {
                Some(backing) => driver.leave(backing.id, backing.generation),
                None => alloc.device.refund(kind, alloc.bytes),
            }
            Ok(())
        }
        _ => Err(INVALID_VALUE),
    }
}

/// Frees what a context has allocated.
pub(crate) fn free_all_of(context: &Context) -> Answer {
    let ours = |alloc: &&Alloc| alloc.context == context.id && matches!(alloc.what, What::Charged(_));
    let registry = &driver()?.memory;
    let all: Vec<u64> = lock(&registry.inner).live.values().filter(ours).map(|alloc| alloc.address).collect();
    all.into_iter().try_for_each(free)
}

// --- Plain, pitched, managed -----------------------------------------------------------------------

entry!(cuMemAlloc_v2, context, |dptr, bytesize| {
    invalid_if(dptr.is_null() || bytesize == 0)?;
    not_while_capturing()?;
    put(dptr, allocate(context, bytesize as u64, MemKind::Plain)?)
});

entry!(cuMemAllocPitch_v2, context, |dptr, pPitch, WidthInBytes, Height, ElementSizeBytes| {
    invalid_if(dptr.is_null() || pPitch.is_null() || WidthInBytes == 0 || Height == 0)?;
    invalid_if(!matches!(ElementSizeBytes, 4 | 8 | 16))?;
    not_while_capturing()?;
    let pitch = WidthInBytes.checked_next_multiple_of(512).ok_or(INVALID_VALUE)?;
    let bytes = pitch.checked_mul(Height).ok_or(OUT_OF_MEMORY)?;
    put(dptr, allocate(context, bytes as u64, MemKind::Plain)?)?;
    put(pPitch, pitch)
});

entry!(cuMemAllocManaged, context, |dptr, bytesize, flags| {
    invalid_if(dptr.is_null() || bytesize == 0 || !matches!(flags, 1 | 2))?;
    not_while_capturing()?;
    put(dptr, allocate(context, bytesize as u64, MemKind::Managed)?)
});

entry!(cuMemFree_v2, driver, |dptr| {
    if dptr == 0 {
        return Ok(());
    }
    not_while_capturing()?;
    free(dptr)
});

entry!(cuMemGetInfo_v2, context, |free, total| {
    let device = &context.device.driver.device;
    let (left, all) = device.with(|engine, now| {
        device.sweep(engine, now);
        engine.memory(context.device.gpu)
    });
    put_opt(free, left as usize);
    put_opt(total, all as usize);
});

entry!(cuMemGetAddressRange_v2, context, |pbase, psize, dptr| {
    let alloc = driver()?.memory.find(dptr).ok_or(NOT_FOUND)?;
    put_opt(pbase, alloc.address);
    put_opt(psize, alloc.bytes as usize);
});

entry!(cuMemAdvise | cuMemAdvise_v2, driver, |devPtr, count, _, _| check_range(devPtr, count as u64));

/// Prefetching moves nothing (managed memory is charged to its device at once) but takes a copy's time.
fn prefetch(stream: Ref<Stream>, address: u64, bytes: u64) -> Answer {
    check_range(address, bytes)?;
    legacy_not_implied(stream)?;
    refuse_if(stream.capturing.load(Acquire), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
    let ns = driver()?.profile().copy_ns(bytes, true);
    push(stream, Work::Copy { engine: 0, bytes, ns }).map(drop)
}

entry!(cuMemPrefetchAsync, |at, count, _, stream: Stream| prefetch(stream, at, count as u64));
entry!(cuMemPrefetchAsync_v2, |at, count, _, _, stream: Stream| prefetch(stream, at, count as u64));

unsafe fn prefetch_all(
    stream: Ref<Stream>,
    list: *mut u64,
    sizes: *mut usize,
    count: usize,
    flags: u64,
) -> Answer {
    invalid_if(list.is_null() || sizes.is_null() || count == 0 || flags != 0)?;
    (0..count).try_for_each(|i| prefetch(stream, *list.add(i), *sizes.add(i) as u64))
}

entry!(cuMemDiscardBatchAsync, |list, sizes, count, flags, stream: Stream| {
    prefetch_all(stream, list, sizes, count, flags)
});

entry!(
    cuMemPrefetchBatchAsync | cuMemDiscardAndPrefetchBatchAsync,
    |list, sizes, count, _, _, _, flags, stream: Stream| prefetch_all(stream, list, sizes, count, flags)
);

// --- Sets ------------------------------------------------------------------------------------------

/// Bytes of a fill with zeros that are given back to the host instead of being written.
const SPARSE: usize = 1 << 16;
const PAGE: usize = 4096;

/// Makes bytes zero. Whole pages are given back: a program that zeroes all of a simulated device does not take the host's memory.
///
/// # Safety
/// The range is mapped and writable, and its pages are anonymous or of a memory file.
unsafe fn zero(at: usize, length: usize) {
    let (first, end) = (at.next_multiple_of(PAGE), (at + length) / PAGE * PAGE);
    let pages = first as *mut c_void;
    // SAFETY: whole pages of the caller's range. Those of a file are cut out of it; where they are anonymous that is refused, and
    // dropping them makes them zero.
    let given = unsafe {
        libc::madvise(pages, end - first, libc::MADV_REMOVE) == 0
            || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
                && libc::madvise(pages, end - first, libc::MADV_DONTNEED) == 0
    };
    // SAFETY: the caller's range.
    unsafe {
        if given {
            std::ptr::write_bytes(at as *mut u8, 0, first - at);
            std::ptr::write_bytes(end as *mut u8, 0, at + length - end);
        } else {
            std::ptr::write_bytes(at as *mut u8, 0, length);
        }
    }
}

/// A memset: rows of equal elements. The layout is that of `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Fill {
    pub(crate) address: u64,
    pub(crate) pitch: u64,
    pub(crate) value: u32,
    /// Bytes per element: 1, 2 or 4.
    pub(crate) element: u32,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

const _: () = assert!(size_of::<Fill>() == size_of::<sys::CUDA_MEMSET_NODE_PARAMS_v1>());

impl Fill {
    fn bytes(&self) -> u64 {
        self.width * self.height * u64::from(self.element)
    }

    pub(crate) fn check(&self) -> Answer {
        let row = self.width * u64::from(self.element);
        invalid_if(
            !self.address.is_multiple_of(u64::from(self.element)) || self.height > 1 && self.pitch < row,
        )?;
        if self.bytes() > 0 {
            check_range(self.address, self.pitch * (self.height - 1) + row)?;
        }
        Ok(())
    }

    fn apply(&self) {
        let bytes = self.value.to_le_bytes();
        let element = &bytes[..self.element as usize];
        let same = element.iter().all(|byte| *byte == bytes[0]);
        let length = (self.width * u64::from(self.element)) as usize;
        for row in 0..self.height {
            let at = (self.address + row * self.pitch) as usize;
            // SAFETY: the range was checked to lie in live device memory, which this process has mapped.
            unsafe {
                if self.value == 0 && length >= SPARSE && self.is_ours() {
                    zero(at, length);
                } else if same {
                    std::ptr::write_bytes(at as *mut u8, bytes[0], length);
                } else {
                    let row = std::slice::from_raw_parts_mut(at as *mut u8, length);
                    row.chunks_exact_mut(element.len()).for_each(|to| to.copy_from_slice(element));
                }
            }
        }
    }

    /// Whether the pages are the simulator's, and not memory of the program that it registered.
    fn is_ours(&self) -> bool {
        let found = driver().ok().and_then(|driver| driver.memory.find(self.address));
        found.is_some_and(|alloc| !matches!(alloc.what, What::Registered(_)))
    }

    pub(crate) fn run(self, stream: Ref<Stream>) -> Answer {
        if self.bytes() == 0 {
            return Ok(());
        }
        move_bytes(stream, move || self.apply())?;
        let (bytes, profile) = (self.bytes(), driver()?.profile());
        push(stream, Work::Copy { engine: 0, bytes, ns: profile.copy_ns(bytes, false) }).map(drop)
    }
}

fn fill(element: u32, at: u64, pitch: usize, value: impl Into<u32>, width: usize, height: usize) -> Fill {
    let (value, pitch) = (value.into(), pitch as u64);
    Fill { address: at, pitch, value, element, width: width as u64, height: height as u64 }
}

fn set(stream: StreamArg, synchronous: bool, fill: Fill) -> Answer {
    current()?;
    // SAFETY: the handle is the C caller's.
    let stream = unsafe { stream.find()? };
    if synchronous {
        not_while_capturing()?;
    }
    legacy_not_implied(stream)?;
    fill.check()?;
    calls::copy();
    submit(stream, fill)
}

/// The four memsets of an element: of a row and of rows, on the default stream and on one that is given.
macro_rules! sets {
    ($($sync:ident $asynchronous:ident $sync2:ident $async2:ident $element:literal;)*) => {$(
        entry!($sync, |flavor, at, value, n| {
            set(StreamArg::default_of(flavor), true, fill($element, at, 0, value, n, 1))
        });
        entry!($asynchronous, |at, value, n, stream| set(stream, false, fill($element, at, 0, value, n, 1)));
        entry!($sync2, |flavor, at, pitch, value, width, height| {
            set(StreamArg::default_of(flavor), true, fill($element, at, pitch, value, width, height))
        });
        entry!($async2, |at, pitch, value, width, height, stream| {
            set(stream, false, fill($element, at, pitch, value, width, height))
        });
    )*};
}
sets! {
    cuMemsetD8_v2 cuMemsetD8Async cuMemsetD2D8_v2 cuMemsetD2D8Async 1;
    cuMemsetD16_v2 cuMemsetD16Async cuMemsetD2D16_v2 cuMemsetD2D16Async 2;
    cuMemsetD32_v2 cuMemsetD32Async cuMemsetD2D32_v2 cuMemsetD2D32Async 4;
}

// --- Host memory -----------------------------------------------------------------------------------

unsafe fn host_alloc(context: &Context, pp: *mut *mut c_void, bytesize: usize, flags: c_uint) -> Answer {
    invalid_if(pp.is_null() || bytesize == 0 || flags > 7)?;
    not_while_capturing()?;
    let at = map_pages(0, bytesize.next_multiple_of(4096), READ_WRITE, 0)?;
    context.device.driver.memory.note(
        at as u64,
        bytesize as u64,
        What::Host(flags),
        context.device,
        context.id,
    );
    put(pp, at)
}

entry!(cuMemHostAlloc, context, |pp, bytesize, Flags| host_alloc(context, pp, bytesize, Flags));
entry!(cuMemAllocHost_v2, context, |pp, bytesize| host_alloc(context, pp, bytesize, 0));

entry!(cuMemFreeHost, driver, |p| {
    if p.is_null() {
        return Ok(());
    }
    not_while_capturing()?;
    let alloc = driver.memory.remove(p as u64, |a| matches!(a.what, What::Host(_))).ok_or(INVALID_VALUE)?;
    libc::munmap(p, (alloc.bytes as usize).next_multiple_of(4096));
});

entry!(cuMemHostRegister_v2 | cuMemHostRegister, context, |p, bytesize, Flags| {
    invalid_if(p.is_null() || bytesize == 0)?;
    let registry = &context.device.driver.memory;
    refuse_if(registry.find(p as u64).is_some(), CUresult(712))?;
    registry.note(p as u64, bytesize as u64, What::Registered(Flags), context.device, context.id);
});

entry!(cuMemHostUnregister, |p| {
    let removed = driver()?.memory.remove(p as u64, |a| matches!(a.what, What::Registered(_)));
    removed.map(|_| ()).ok_or(CUresult(713))
});

entry!(cuMemHostGetDevicePointer_v2, driver, |pdptr, p, Flags| {
    let known = driver.memory.find(p as u64).is_some_and(|a| a.what.is_host());
    invalid_if(Flags != 0 || !known)?;
    put(pdptr, p as u64)
});

entry!(cuMemHostGetFlags, |pFlags, p| {
    match driver()?.memory.find(p as u64).map(|a| a.what) {
        Some(What::Host(flags)) => put(pFlags, flags | 2),
        _ => Err(INVALID_VALUE),
    }
});

// --- What a pointer is -----------------------------------------------------------------------------

/// One attribute; `Ok(None)`: the pointer is not known to the driver.
fn attribute(kind: u32, address: u64) -> Res<Option<u64>> {
    let driver = driver()?;
    let Some(alloc) = driver.memory.find(address) else { return Ok(None) };
    let host = alloc.what.is_host();
    let managed = alloc.what == What::Charged(MemKind::Managed);
    Ok(Some(match kind {
        1 => {
            let primary = lock(&driver.primaries[alloc.device.ordinal as usize]).context;
            let its = |context: &Ref<Context>| context.id == alloc.context;
            let context = current_opt().filter(its).or(primary.filter(its));
            context.map_or(null_mut::<c_void>(), Object::handle) as u64
        }
        2 if host => 1,
        2 => 2,
        3 => address,
        4 if host || managed => address,
        7 => alloc.id,
        8 => managed.into(),
        9 => alloc.device.ordinal as u64,
        10 => (alloc.what == What::Charged(MemKind::Plain)).into(),
        11 => alloc.address,
        12 => alloc.bytes,
        13 => 1,
        16 => 3,
        17 if let What::Pooled(pool) = alloc.what => pool,
        6 | 14 | 15 | 17..=21 => 0,
        _ => return Err(INVALID_VALUE),
    }))
}

/// Writes an attribute, in 8 bytes or in 4.
unsafe fn put_attribute(to: *mut c_void, kind: u32, value: u64) {
    match kind {
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 16..=19 => to.cast::<u64>().write_unaligned(value),
        _ => to.cast::<u32>().write_unaligned(value as u32),
    }
}

entry!(cuPointerGetAttribute, |data, kind, ptr| {
    invalid_if(data.is_null())?;
    put_attribute(data, kind, attribute(kind, ptr)?.ok_or(INVALID_VALUE)?);
});

// Unknown pointers are no error here: their attributes are 0, and their device is -2.
entry!(cuPointerGetAttributes, driver, |count, kinds, data, ptr| {
    invalid_if(kinds.is_null() || data.is_null() || count == 0)?;
    for i in 0..count as usize {
        let kind = *kinds.add(i);
        let unknown = if kind == 9 { -2_i32 as u64 } else { 0 };
        put_attribute(*data.add(i), kind, attribute(kind, ptr).ok().flatten().unwrap_or(unknown));
    }
});

entry!(cuPointerSetAttribute, |value, attribute, ptr| {
    // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    invalid_if(value.is_null() || attribute != 6 || driver()?.memory.find(ptr).is_none())
});
