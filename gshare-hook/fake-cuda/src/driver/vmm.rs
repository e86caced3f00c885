//! Virtual memory management, and memory and events shared between processes.
//!
//! Physical memory lies in one sparse file per GPU and process; a mapping maps a piece of it, so one handle mapped twice
//! is one memory. When a handle is exported, or a plain allocation is shared, its bytes move to a file of their own, which
//! the other process maps: through the descriptor it received, or through `/proc/PID/fd` for handles that are plain
//! bytes (this needs the same user). The bytes are charged once, to their maker while it lives and holds them, then to a holder.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use super::base::*;
use super::capture::not_while_capturing;
use super::memory::{Alloc, Backing, READ_WRITE, What};
use super::stream::Event;
use super::*;
use crate::sim::{MAX_GPUS, MemKind};

const GRANULARITY: u64 = 2 << 20;

// --- Files -----------------------------------------------------------------------------------------

const FILE_MAGIC: u64 = 0x6773_6861_7265_4644;

/// The record that follows the bytes in a file that is handed to another process, and that an IPC handle holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    magic: u64,
    pid: u32,
    file: i32,
    id: u32,
    generation: u32,
    gpu: u32,
    kind: u32,
    bytes: u64,
    span: u64,
    pad: [u64; 2],
}

const _: () = assert!(size_of::<Ticket>() == 64);

impl Ticket {
    /// For `bytes` of this process; `kind` is a [`MemKind`], or all ones for an event: its slot and flags in place of id and generation.
    fn new(kind: u32, gpu: u32, bytes: u64, span: u64, Backing { id, generation, file }: Backing) -> Self {
        let pid = std::process::id();
        Self { magic: FILE_MAGIC, pid, file, id, generation, gpu, kind, bytes, span, pad: [0; 2] }
    }
}

fn new_file(bytes: u64) -> Res<c_int> {
    // SAFETY: a valid name; the result is checked.
    unsafe {
        let file = libc::memfd_create(c"gshare-sim-memory".as_ptr(), libc::MFD_CLOEXEC);
        refuse_if(
            file < 0 || libc::ftruncate(file, bytes.cast_signed()) != 0,
            CUresult::CUDA_ERROR_OPERATING_SYSTEM,
        )?;
        Ok(file)
    }
}

fn map_file(at: u64, bytes: u64, file: c_int, offset: u64, protection: c_int) -> Res<u64> {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
    // SAFETY: a fixed address lies in a range this module reserved.
    let got = unsafe {
        libc::mmap(
            at as *mut c_void,
            bytes as usize,
            protection,
            libc::MAP_SHARED | libc::MAP_NORESERVE | fixed,
            file,
            offset.cast_signed(),
        )
    };
    if got == libc::MAP_FAILED { Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM) } else { Ok(got as u64) }
}

/// Writes memory to a file, leaving pages of zeroes out.
fn copy_to_file(from: u64, bytes: u64, file: c_int) {
    for at in (0..bytes).step_by(4096) {
        let n = (bytes - at).min(4096) as usize;
        // SAFETY: the range is a live allocation of this process.
        unsafe {
            let page = std::slice::from_raw_parts((from + at) as *const u8, n);
            if page.iter().any(|b| *b != 0) {
                libc::pwrite(file, page.as_ptr().cast(), n, at.cast_signed());
            }
        }
    }
}

fn write_ticket(file: c_int, ticket: &Ticket, at: u64) {
    // SAFETY: a plain structure of 64 bytes.
    unsafe { libc::pwrite(file, std::ptr::from_ref(ticket).cast(), 64, at.cast_signed()) };
}

fn read_ticket(file: c_int, at: u64) -> Res<Ticket> {
    let mut ticket = std::mem::MaybeUninit::<Ticket>::zeroed();
    // SAFETY: 64 bytes of integers; any bits are valid.
    let ticket = unsafe {
        let n = libc::pread(file, ticket.as_mut_ptr().cast(), 64, at.cast_signed());
        invalid_if(n != 64)?;
        ticket.assume_init()
    };
    if ticket.magic == FILE_MAGIC { Ok(ticket) } else { Err(INVALID_VALUE) }
}

fn size_of_file(file: c_int) -> Res<u64> {
    // SAFETY: all zero is a valid stat; fstat fills it.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(file, &raw mut stat) != 0 {
            Err(INVALID_VALUE)
        } else {
            Ok(stat.st_size.cast_unsigned())
        }
    }
}

// --- Physical memory -------------------------------------------------------------------------------

/// A handle of physical memory.
#[derive(Debug)]
pub(crate) struct Physical {
    gpu: u32,
    ordinal: i32,
    bytes: u64,
    /// Handle types it may be exported as.
    types: u32,
    /// Handles given out; mappings hold it too.
    handles: AtomicU32,
    place: Mutex<Place>,
}

#[derive(Debug)]
struct Place {
    file: c_int,
    offset: u64,
    /// Set once it has a file of its own.
    own: Option<Backing>,
    /// Mappings: address -> (bytes, offset into it).
    mapped: BTreeMap<u64, (u64, u64)>,
}

impl Kind for Physical {
    const MAGIC: u64 = 0x6773_6861_7265_5048;
    const BAD: CUresult = INVALID_VALUE;
}

#[derive(Debug)]
struct Heap {
    file: c_int,
    next: u64,
    free: BTreeMap<u64, Vec<u64>>,
}

static HEAPS: Mutex<BTreeMap<u32, Heap>> = Mutex::new(BTreeMap::new());
/// Reserved address ranges: address -> bytes.
static RESERVED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
/// Mappings by address.
static MAPPED: Mutex<BTreeMap<u64, Ref<Physical>>> = Mutex::new(BTreeMap::new());

fn heap_take(gpu: u32, bytes: u64) -> Res<(c_int, u64)> {
    let mut heaps = lock(&HEAPS);
    let heap = match heaps.entry(gpu) {
        std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::btree_map::Entry::Vacant(entry) => {
            entry.insert(Heap { file: new_file(1 << 44)?, next: 0, free: BTreeMap::new() })
        }
    };
    if let Some(at) = heap.free.get_mut(&bytes).and_then(Vec::pop) {
        return Ok((heap.file, at));
    }
    let at = heap.next;
    heap.next += bytes;
    Ok((heap.file, at))
}

fn heap_give(gpu: u32, at: u64, bytes: u64) {
    if let Some(heap) = lock(&HEAPS).get_mut(&gpu) {
        // SAFETY: a hole in our own file.
        unsafe {
            libc::fallocate(
                heap.file,
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                at.cast_signed(),
                bytes.cast_signed(),
            );
        }
        heap.free.entry(bytes).or_default().push(at);
    }
}

impl Physical {
    /// A new handle.
    fn create(gpu: u32, ordinal: i32, bytes: u64, types: u32, place: Place) -> u64 {
        let (handles, place) = (AtomicU32::new(1), Mutex::new(place));
        Object::create(Self { gpu, ordinal, bytes, types, handles, place }).handle::<c_void>() as u64
    }

    /// Gives it a file of its own, with a ticket behind the bytes.
    fn own_file(&self) -> Res<Backing> {
        let driver = driver()?;
        let mut place = lock(&self.place);
        if let Some(own) = place.own {
            return Ok(own);
        }
        let file = new_file(self.bytes + 4096)?;
        // Copy what was written, through a mapping of our own.
        let view = map_file(0, self.bytes, place.file, place.offset, libc::PROT_READ)?;
        copy_to_file(view, self.bytes, file);
        // SAFETY: the view made above.
        unsafe { libc::munmap(view as *mut c_void, self.bytes as usize) };
        let (id, generation) = driver
            .device
            .with(|engine, _| engine.share(driver.process, self.gpu, MemKind::Vmm, self.bytes))?;
        let own = Backing { id, generation, file };
        let mut ticket = Ticket::new(MemKind::Vmm as u32, self.gpu, self.bytes, self.bytes, own);
        ticket.pad[0] = self.types.into();
        write_ticket(file, &ticket, self.bytes);
        for (at, (bytes, offset)) in &place.mapped {
            map_file(*at, *bytes, file, *offset, READ_WRITE)?;
        }
        heap_give(self.gpu, place.offset, self.bytes);
        place.file = file;
        place.offset = 0;
        place.own = Some(own);
        Ok(own)
    }

    /// The last handle and mapping are gone?
    fn end_if_unused(this: Ref<Self>) -> Answer {
        let driver = driver()?;
        let place = lock(&this.place);
        if this.handles.load(Acquire) > 0 || !place.mapped.is_empty() || !this.retire() {
            return Ok(());
        }
        if let Some(own) = place.own {
            driver.device.with(|engine, _| engine.leave(driver.process, own.id, own.generation));
            // SAFETY: our descriptor, used by nobody else.
            unsafe { libc::close(own.file) };
        } else {
            driver.device.with(|engine, _| engine.refund(driver.process, this.gpu, MemKind::Vmm, this.bytes));
            heap_give(this.gpu, place.offset, this.bytes);
        }
        Ok(())
    }
}

unsafe fn physical(handle: u64) -> Res<Ref<Physical>> {
    Object::<Physical>::get(handle as *mut c_void)
}

/// `CUmemAllocationProp` as integers: type, handle types, location kind and id, then a pointer and flags.
unsafe fn read_prop(prop: *const sys::CUmemAllocationProp) -> Res<(u32, i32)> {
    invalid_if(prop.is_null())?;
    let head = prop.cast::<[u32; 4]>().read_unaligned();
    invalid_if(head[0] != 1)?;
    if head[2] != 1 {
        // Host memory through this API.
        return Err(NOT_SUPPORTED);
    }
    Ok((head[1], head[3] as i32))
}

entry!(cuMemGetAllocationGranularity, |granularity, prop, option| {
    // The granularity is the same for any kind of memory at any place; only creating some of them is refused.
    invalid_if(option > 1 || prop.is_null())?;
    driver()?;
    if let Ok((_, ordinal)) = read_prop(prop) {
        driver()?.gpu(ordinal)?;
    }
    put(granularity, GRANULARITY as usize)
});

entry!(cuMemCreate, driver, |handle, size, prop, flags| {
    let (types, ordinal) = read_prop(prop)?;
    let gpu = driver.gpu(ordinal)?;
    let bytes = size as u64;
    invalid_if(handle.is_null() || flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY))?;
    refuse_if(types & !1 != 0, NOT_SUPPORTED)?;
    not_while_capturing()?;
    memory::charge(gpu, MemKind::Vmm, bytes)?;
    let (file, offset) = heap_take(gpu, bytes)?;
    let place = Place { file, offset, own: None, mapped: BTreeMap::new() };
    put(handle, Physical::create(gpu, ordinal, bytes, types, place))
});

entry!(cuMemRelease, driver, |handle| {
    let physical = physical(handle)?;
    invalid_if(physical.handles.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1)).is_err())?;
    Physical::end_if_unused(physical)
});

entry!(cuMemRetainAllocationHandle, |handle, addr| {
    let address = addr as u64;
    let mapped = lock(&MAPPED);
    let found = mapped.range(..=address).next_back();
    let (at, physical) = found.map(|(a, p)| (*a, *p)).ok_or(INVALID_VALUE)?;
    let bytes = lock(&physical.place).mapped.get(&at).map_or(0, |m| m.0);
    invalid_if(address >= at + bytes)?;
    physical.handles.fetch_add(1, AcqRel);
    put(handle, physical.handle::<c_void>() as u64)
});

entry!(cuMemGetAllocationPropertiesFromHandle, |prop, handle| {
    let physical = physical(handle)?;
    invalid_if(prop.is_null())?;
    std::ptr::write_bytes(prop, 0, 1);
    put(prop.cast::<[u32; 4]>(), [1, physical.types, 1, physical.ordinal as u32])
});

entry!(cuMemAddressReserve, driver, |ptr, size, alignment, addr, flags| {
    let align = (alignment as u64).max(GRANULARITY);
    invalid_if(
        ptr.is_null()
            || size == 0
            || !(size as u64).is_multiple_of(GRANULARITY)
            || !align.is_power_of_two()
            || flags != 0,
    )?;
    let reserve =
        |hint: u64, bytes: usize| memory::map_pages(hint, bytes, libc::PROT_NONE, libc::MAP_NORESERVE);
    // The wish is granted where the range is free, else any range will do.
    if addr != 0
        && addr.is_multiple_of(align)
        && let Ok(got) = reserve(addr, size)
    {
        if got as u64 == addr {
            lock(&RESERVED).insert(addr, size as u64);
            return put(ptr, addr);
        }
        libc::munmap(got, size);
    }
    let got = reserve(0, size + align as usize)?;
    let start = (got as u64).next_multiple_of(align);
    let (before, end) = (start - got as u64, got as u64 + size as u64 + align);
    if before > 0 {
        libc::munmap(got, before as usize);
    }
    libc::munmap((start + size as u64) as *mut c_void, (end - start - size as u64) as usize);
    lock(&RESERVED).insert(start, size as u64);
    put(ptr, start)
});

entry!(cuMemAddressFree, driver, |ptr, size| {
    let mut reserved = lock(&RESERVED);
    invalid_if(
        reserved.get(&ptr) != Some(&(size as u64))
            || lock(&MAPPED).range(ptr..ptr + size as u64).next().is_some(),
    )?;
    reserved.remove(&ptr);
    libc::munmap(ptr as *mut c_void, size);
});

entry!(cuMemMap, driver, |ptr, size, offset, handle, flags| {
    let physical = physical(handle)?;
    let (bytes, offset) = (size as u64, offset as u64);
    // The documentation up to CUDA 13 says that offsets must be zero, and an H100 answers so.
    refuse_if(offset != 0, NOT_SUPPORTED)?;
    invalid_if(
        flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || offset + bytes > physical.bytes,
    )?;
    {
        let reserved = lock(&RESERVED);
        let (start, length) = reserved.range(..=ptr).next_back().ok_or(INVALID_VALUE)?;
        invalid_if(ptr + bytes > start + length)?;
    }
    let mut mapped = lock(&MAPPED);
    let before =
        mapped.range(..ptr).next_back().map(|(at, p)| *at + lock(&p.place).mapped.get(at).map_or(0, |m| m.0));
    invalid_if(before.is_some_and(|end| end > ptr) || mapped.range(ptr..ptr + bytes).next().is_some())?;
    let mut place = lock(&physical.place);
    map_file(ptr, bytes, place.file, place.offset + offset, READ_WRITE)?;
    place.mapped.insert(ptr, (bytes, offset));
    mapped.insert(ptr, physical);
    driver.memory.note(ptr, bytes, What::Mapped(false), physical.gpu, physical.ordinal, 0);
});

entry!(cuMemUnmap, driver, |ptr, size| {
    not_while_capturing()?;
    let end = ptr + size as u64;
    let parts: Vec<_> = {
        let mut mapped = lock(&MAPPED);
        let inside: Vec<_> = mapped.range(ptr..end).map(|(at, p)| (*at, *p)).collect();
        let total: u64 = inside.iter().map(|(at, p)| lock(&p.place).mapped.get(at).map_or(0, |m| m.0)).sum();
        invalid_if(total != size as u64 && !inside.is_empty())?;
        // Nothing is mapped where a mapping was before: no error.
        invalid_if(
            inside.is_empty()
                && lock(&RESERVED).range(..=ptr).next_back().is_none_or(|(at, length)| end > at + length),
        )?;
        for (at, _) in &inside {
            mapped.remove(at);
        }
        inside
    };
    for (at, physical) in parts {
        let bytes = lock(&physical.place).mapped.remove(&at).map_or(0, |m| m.0);
        driver.memory.remove(at, |a| matches!(a.what, What::Mapped(_)));
        let _ = memory::map_pages(at, bytes as usize, libc::PROT_NONE, libc::MAP_NORESERVE | libc::MAP_FIXED);
        Physical::end_if_unused(physical)?;
    }
});

// `CUmemAccessDesc`: location kind, id, flags.
entry!(cuMemSetAccess, driver, |ptr, size, desc, count| {
    invalid_if(desc.is_null() || count == 0)?;
    for i in 0..count {
        let [kind, id, flags] = desc.cast::<[u32; 3]>().add(i).read_unaligned();
        if kind == 1 {
            driver.gpu(id as i32)?;
        }
        invalid_if(!matches!(flags, 0 | 1 | 3))?;
        invalid_if(!driver.memory.set_access(ptr, size as u64, flags != 0))?;
    }
});

entry!(cuMemGetAccess, |flags, location, ptr| {
    invalid_if(location.is_null())?;
    match driver()?.memory.find(ptr).map(|a| a.what) {
        Some(What::Mapped(open)) => put(flags, if open { 3 } else { 0 }),
        _ => Err(INVALID_VALUE),
    }
});

entry!(cuMemExportToShareableHandle, driver, |shareableHandle, handle, handleType, flags| {
    let physical = physical(handle)?;
    invalid_if(handleType.0 != 1 || physical.types & 1 == 0 || flags != 0 || shareableHandle.is_null())?;
    let own = physical.own_file()?;
    let copy = libc::fcntl(own.file, libc::F_DUPFD_CLOEXEC, 0);
    refuse_if(copy < 0, CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
    put(shareableHandle.cast::<c_int>(), copy)
});

entry!(cuMemImportFromShareableHandle, driver, |handle, osHandle, shHandleType| {
    invalid_if(handle.is_null() || shHandleType.0 != 1)?;
    let given = osHandle as usize as c_int;
    let bytes = size_of_file(given)?.checked_sub(4096).filter(|b| *b > 0).ok_or(INVALID_VALUE)?;
    let mut ticket = read_ticket(given, bytes)?;
    let ordinal = driver.visible.iter().position(|g| *g == ticket.gpu).ok_or(INVALID_DEVICE)? as i32;
    // If every holder has gone, the descriptor alone kept the memory: it is charged anew, to us.
    let joined = driver.device.with(|engine, now| {
        driver.device.sweep(engine, now);
        engine.join(driver.process, ticket.id, ticket.generation)
    });
    if joined.is_err() {
        memory::charge(ticket.gpu, MemKind::Vmm, bytes)?;
        let again =
            driver.device.with(|engine, _| engine.share(driver.process, ticket.gpu, MemKind::Vmm, bytes))?;
        (ticket.id, ticket.generation) = again;
        write_ticket(given, &ticket, bytes);
    }
    let file = libc::fcntl(given, libc::F_DUPFD_CLOEXEC, 0);
    let own = Some(Backing { id: ticket.id, generation: ticket.generation, file });
    let place = Place { file, offset: 0, own, mapped: BTreeMap::new() };
    put(handle, Physical::create(ticket.gpu, ordinal, bytes, ticket.pad[0] as u32, place))
});

/// A file that stands for an exported pool: its ticket only.
pub(crate) fn pool_file(gpu: u32) -> Res<c_int> {
    let file = new_file(4096)?;
    let ticket = Ticket::new(MemKind::Pool as u32, gpu, 0, 0, Backing { id: u32::MAX, generation: 0, file });
    write_ticket(file, &ticket, 0);
    Ok(file)
}

/// The GPU of an exported pool.
pub(crate) fn read_pool_file(file: c_int) -> Res<u32> {
    let ticket = read_ticket(file, 0)?;
    if ticket.id == u32::MAX && (ticket.gpu as usize) < MAX_GPUS {
        Ok(ticket.gpu)
    } else {
        Err(INVALID_VALUE)
    }
}

// --- IPC -------------------------------------------------------------------------------------------

/// Moves an allocation to a file of its own, and describes it for another process.
pub(crate) fn share_alloc(alloc: &Alloc) -> Res<Ticket> {
    let driver = driver()?;
    let kind = match alloc.what {
        What::Charged(kind) => kind,
        What::Pooled(_) => MemKind::Pool,
        _ => return Err(INVALID_VALUE),
    };
    let span = alloc.span();
    let backing = match alloc.backing {
        Some(backing) => backing,
        None => {
            let file = new_file(span.next_multiple_of(4096))?;
            copy_to_file(alloc.address, alloc.bytes, file);
            let (id, generation) = if kind == MemKind::Pool {
                // The pool pays: others only map.
                (u32::MAX, 0)
            } else {
                driver.device.with(|engine, _| engine.share(driver.process, alloc.gpu, kind, alloc.bytes))?
            };
            let backing = Backing { id, generation, file };
            // Spans are whole pages.
            map_file(alloc.address, span, file, 0, READ_WRITE)?;
            driver.memory.set_backing(alloc.address, backing);
            backing
        }
    };
    Ok(Ticket::new(kind as u32, alloc.gpu, alloc.bytes, span, backing))
}

/// Opened tickets: address -> (ticket, times opened).
static OPENED: Mutex<BTreeMap<u64, (Ticket, u32)>> = Mutex::new(BTreeMap::new());

/// Maps another process's allocation.
pub(crate) fn open_ticket(ticket: Ticket) -> Res<u64> {
    let driver = driver()?;
    invalid_if(ticket.magic != FILE_MAGIC)?;
    refuse_if(ticket.pid == std::process::id(), INVALID_CONTEXT)?;
    let mut opened = lock(&OPENED);
    if let Some((address, entry)) = opened.iter_mut().find(|(_, entry)| entry.0 == ticket) {
        entry.1 += 1;
        return Ok(*address);
    }
    let ordinal = driver.visible.iter().position(|g| *g == ticket.gpu).ok_or(INVALID_DEVICE)? as i32;
    let path = std::ffi::CString::new(format!("/proc/{}/fd/{}", ticket.pid, ticket.file))
        .map_err(|_| INVALID_VALUE)?;
    // SAFETY: a valid path; the result is checked.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    refuse_if(file < 0, INVALID_HANDLE)?;
    if ticket.id != u32::MAX {
        driver.device.with(|engine, _| engine.join(driver.process, ticket.id, ticket.generation))?;
    }
    let address = map_file(0, ticket.span.next_multiple_of(4096), file, 0, READ_WRITE)?;
    // SAFETY: the mapping keeps the file.
    unsafe { libc::close(file) };
    driver.memory.note(address, ticket.bytes, What::Imported, ticket.gpu, ordinal, 0);
    opened.insert(address, (ticket, 1));
    Ok(address)
}

/// Unmaps what [`open_ticket`] gave, when it was closed as often as it was opened.
pub(crate) fn close_imported(address: u64) -> Answer {
    let driver = driver()?;
    let mut opened = lock(&OPENED);
    let (ticket, times) = opened.get_mut(&address).ok_or(INVALID_VALUE)?;
    *times -= 1;
    if *times > 0 {
        return Ok(());
    }
    let ticket = *ticket;
    opened.remove(&address);
    driver.memory.remove(address, |a| a.what == What::Imported);
    if ticket.id != u32::MAX {
        driver.device.with(|engine, _| engine.leave(driver.process, ticket.id, ticket.generation));
    }
    // SAFETY: the mapping made when it was opened.
    unsafe { libc::munmap(address as *mut c_void, ticket.span.next_multiple_of(4096) as usize) };
    Ok(())
}

entry!(cuIpcGetMemHandle, driver, |pHandle, dptr| {
    let alloc = driver.memory.find(dptr).ok_or(INVALID_VALUE)?;
    invalid_if(alloc.what != What::Charged(MemKind::Plain))?;
    put(pHandle.cast::<Ticket>(), share_alloc(&alloc)?)
});

entry!(cuIpcOpenMemHandle_v2 | cuIpcOpenMemHandle, context, |pdptr, handle, Flags| {
    // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    invalid_if(Flags > 1 || pdptr.is_null())?;
    put(pdptr, open_ticket(std::ptr::from_ref(&handle).cast::<Ticket>().read_unaligned())?)
});

entry!(cuIpcCloseMemHandle, driver, |dptr| close_imported(dptr));

entry!(cuIpcGetEventHandle, driver, |pHandle, event: Event| {
    refuse_if(event.flags & 4 == 0, INVALID_HANDLE)?;
    let slot = Backing { id: event.slot, generation: event.flags, file: -1 };
    put(pHandle.cast::<Ticket>(), Ticket::new(u32::MAX, event.gpu(), 0, 0, slot))
});

entry!(cuIpcOpenEventHandle, |phEvent, handle| {
    let family = current()?.family;
    let ticket = std::ptr::from_ref(&handle).cast::<Ticket>().read_unaligned();
    invalid_if(ticket.magic != FILE_MAGIC || ticket.kind != u32::MAX || ticket.id as usize >= 65_536)?;
    refuse_if(ticket.pid == std::process::id(), INVALID_CONTEXT)?;
    put(phEvent, Event::with_slot(ticket.id, 0, ticket.gpu, family, ticket.generation, true).handle())
});
