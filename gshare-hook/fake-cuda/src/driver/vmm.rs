//! Virtual memory management, and memory and events shared between processes.
//!
//! Physical memory lies in one sparse file per GPU and process; a mapping maps a piece of it, so two mappings of a handle show the same
//! memory. An export of a handle, or a shared plain allocation, moves its bytes to a file of their own for the other process to map:
//! through the received descriptor, or through `/proc/PID/fd` for handles made of plain bytes (this needs the same user). The bytes are
//! charged once: to their maker while it lives and holds them, then to a holder.

use std::collections::btree_map::Entry;
use std::fs::{File, OpenOptions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::capture::not_while_capturing;
use super::registry::{Alloc, Backing, READ_WRITE, What, check_range, map_pages};
use super::spans::Free;
use super::stream::Event;
use super::*;

const GRANULARITY: u64 = 2 << 20;

// --- Files -----------------------------------------------------------------------------------------

const FILE_MAGIC: u64 = 0x6773_6861_7265_4644;

/// The record behind the bytes of a file for another process, and in an IPC handle.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
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
    /// A ticket for `bytes` of this process; `kind` is a [`MemKind`], or all ones for an event: its slot and flags replace id and
    /// generation.
    fn new(kind: u32, gpu: u32, bytes: u64, span: u64, Backing { id, generation, file }: Backing) -> Self {
        let pid = std::process::id();
        Self { magic: FILE_MAGIC, pid, file, id, generation, gpu, kind, bytes, span, pad: [0; 2] }
    }
}

fn new_file(bytes: u64) -> Res<c_int> {
    let made = memfd_create("gshare-sim-memory", MemfdFlags::CLOEXEC);
    let sized = made.and_then(|file| ftruncate(&file, bytes).map(|()| file.into_raw_fd()));
    sized.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

/// The file of a descriptor, left open.
fn file_of(descriptor: c_int) -> Res<ManuallyDrop<File>> {
    invalid_if(descriptor < 0)?;
    // SAFETY: never dropped, so the descriptor is only borrowed from its owner.
    Ok(ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) }))
}

fn duplicate(descriptor: c_int) -> Res<c_int> {
    let copy = file_of(descriptor)?.try_clone();
    copy.map(File::into_raw_fd).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

fn map_file(at: u64, bytes: u64, file: c_int, offset: u64, access: ProtFlags) -> Res<u64> {
    let fixed = if at == 0 { MapFlags::empty() } else { MapFlags::FIXED };
    let (flags, file) = (MapFlags::SHARED | MapFlags::NORESERVE | fixed, file_of(file)?);
    // SAFETY: a fixed address lies in a range this module reserved.
    let got = unsafe { mmap(at as *mut c_void, bytes as usize, access, flags, &*file, offset) };
    got.map(|at| at as u64).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

/// Writes memory to a file, leaving pages of zeroes out.
fn copy_to_file(from: u64, bytes: u64, file: c_int) -> Answer {
    let file = file_of(file)?;
    for at in (0..bytes).step_by(4096) {
        let n = (bytes - at).min(4096) as usize;
        // SAFETY: the range is a live allocation of this process.
        let page = unsafe { std::slice::from_raw_parts((from + at) as *const u8, n) };
        if page.iter().any(|b| *b != 0) {
            let _ = file.write_all_at(page, at);
        }
    }
    Ok(())
}

fn write_ticket(file: c_int, ticket: Ticket, at: u64) -> Answer {
    // SAFETY: 64 bytes of integers, without padding.
    let bytes: [u8; 64] = unsafe { std::mem::transmute(ticket) };
    let _ = file_of(file)?.write_all_at(&bytes, at);
    Ok(())
}

fn read_ticket(file: c_int, at: u64) -> Res<Ticket> {
    let mut bytes = [0; 64];
    file_of(file)?.read_exact_at(&mut bytes, at).map_err(|_| INVALID_VALUE)?;
    // SAFETY: 64 bytes of integers; any bits are valid.
    let ticket: Ticket = unsafe { std::mem::transmute(bytes) };
    if ticket.magic == FILE_MAGIC { Ok(ticket) } else { Err(INVALID_VALUE) }
}

// --- Physical memory -------------------------------------------------------------------------------

/// A handle of physical memory.
pub(crate) struct Physical {
    device: Device,
    bytes: u64,
    /// Handle types allowed for an export.
    types: u32,
    /// Handles given out; mappings hold the memory too.
    handles: AtomicU32,
    place: Mutex<Place>,
}

struct Place {
    file: c_int,
    offset: u64,
    /// Set once the memory has a file of its own.
    own: Option<Backing>,
}

object!(Physical, b"gsharePH", INVALID_VALUE);

/// The file of a GPU, and its free stretches.
struct Heap {
    file: c_int,
    free: Free,
}

/// Size of such a file, in bytes: more than all memory with every possible gap between the pieces.
const HEAP: u64 = 1 << 44;

static HEAPS: Mutex<BTreeMap<u32, Heap>> = Mutex::new(BTreeMap::new());
/// Reserved address ranges: address -> bytes.
static RESERVED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
/// Mappings by address, with their bytes.
static MAPPED: Mutex<BTreeMap<u64, (Ref<Physical>, u64)>> = Mutex::new(BTreeMap::new());

fn heap_take(gpu: u32, bytes: u64) -> Res<(c_int, u64)> {
    let mut heaps = lock(&HEAPS);
    let heap = match heaps.entry(gpu) {
        Entry::Occupied(heap) => heap.into_mut(),
        Entry::Vacant(place) => place.insert(Heap { file: new_file(HEAP)?, free: Free::of(0, HEAP) }),
    };
    let at = heap.free.allocate(bytes, 1).ok_or(OUT_OF_MEMORY)?;
    Ok((heap.file, at))
}

fn heap_give(gpu: u32, at: u64, bytes: u64) {
    if let Some(heap) = lock(&HEAPS).get_mut(&gpu) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = file_of(heap.file).map(|file| fallocate(&*file, hole, at, bytes));
        heap.free.give(at, bytes);
    }
}

impl Physical {
    fn create(device: Device, bytes: u64, types: u32, file: c_int, offset: u64, own: Option<Backing>) -> u64 {
        let place = Mutex::new(Place { file, offset, own });
        let handles = AtomicU32::new(1);
        Object::create(Self { device, bytes, types, handles, place }).handle::<c_void>() as u64
    }

    /// Gives the memory a file of its own, with a ticket behind the bytes.
    fn own_file(this: Ref<Self>) -> Res<Backing> {
        let (mapped, mut place) = (lock(&MAPPED), lock(&this.place));
        if let Some(own) = place.own {
            return Ok(own);
        }
        let (device, bytes) = (this.device, this.bytes);
        let file = new_file(bytes + 4096)?;
        // Copies the written bytes, through a mapping of our own.
        let view = map_file(0, bytes, place.file, place.offset, ProtFlags::READ)?;
        copy_to_file(view, bytes, file)?;
        // SAFETY: the view made above.
        let _ = unsafe { munmap(view as *mut c_void, bytes as usize) };
        let own = device.share(MemKind::Vmm, bytes, file)?;
        let mut ticket = Ticket::new(MemKind::Vmm as u32, device.gpu, bytes, bytes, own);
        ticket.pad[0] = this.types.into();
        write_ticket(file, ticket, bytes)?;
        for (at, (_, bytes)) in mapped.iter().filter(|(_, (physical, _))| std::ptr::eq(*physical, this)) {
            map_file(*at, *bytes, file, 0, READ_WRITE)?;
        }
        heap_give(device.gpu, place.offset, bytes);
        (place.file, place.offset, place.own) = (file, 0, Some(own));
        Ok(own)
    }

    /// Ends the memory when its last handle and mapping are gone.
    fn end_if_unused(this: Ref<Self>) -> Answer {
        let (mapped, place) = (lock(&MAPPED), lock(&this.place));
        let is_mapped = mapped.values().any(|(physical, _)| std::ptr::eq(*physical, this));
        if this.handles.load(Acquire) > 0 || is_mapped || !this.retire() {
            return Ok(());
        }
        if let Some(own) = place.own {
            this.device.driver.leave(own.id, own.generation);
            // SAFETY: our descriptor, used nowhere else.
            unsafe { rustix::io::close(own.file) };
        } else {
            this.device.refund(MemKind::Vmm, this.bytes);
            heap_give(this.device.gpu, place.offset, this.bytes);
        }
        Ok(())
    }
}

impl Find<Physical> for u64 {
    type Found = Ref<Physical>;

    unsafe fn find(self) -> Res<Ref<Physical>> {
        Object::get(self as *mut c_void)
    }
}

/// `CUmemAllocationProp` as integers: type, handle types, location kind and id, then a pointer and flags.
unsafe fn read_prop(prop: *const sys::CUmemAllocationProp) -> Res<(u32, i32)> {
    let [kind, types, location, id] = read::<[u32; 4]>(prop.cast())?;
    invalid_if(kind != 1)?;
    // Host memory through this API.
    refuse_if(location != 1, NOT_SUPPORTED)?;
    Ok((types, id as i32))
}

entry!(cuMemGetAllocationGranularity, |granularity, prop, option| {
    // The granularity is the same for any kind and place of memory; only the creation of some kinds is refused.
    invalid_if(option > 1 || prop.is_null())?;
    driver()?;
    if let Ok((_, ordinal)) = read_prop(prop) {
        Device::at(ordinal)?;
    }
    put(granularity, GRANULARITY as usize)
});

entry!(cuMemCreate, driver, |handle, size, prop, flags| {
    let (types, ordinal) = read_prop(prop)?;
    let device = Device::at(ordinal)?;
    let bytes = size as u64;
    invalid_if(handle.is_null() || flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY))?;
    refuse_if(types & !1 != 0, NOT_SUPPORTED)?;
    not_while_capturing()?;
    device_memory::charge(device, MemKind::Vmm, bytes)?;
    let (file, offset) = heap_take(device.gpu, bytes)?;
    put(handle, Physical::create(device, bytes, types, file, offset, None))
});

entry!(cuMemRelease, driver, |physical: Physical| {
    invalid_if(physical.handles.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1)).is_err())?;
    Physical::end_if_unused(physical)
});

entry!(cuMemRetainAllocationHandle, |handle, addr| {
    let mapped = lock(&MAPPED);
    let (at, (physical, bytes)) = mapped.range(..=addr as u64).next_back().ok_or(INVALID_VALUE)?;
    invalid_if(addr as u64 >= at + bytes)?;
    physical.handles.fetch_add(1, AcqRel);
    put(handle, physical.handle::<c_void>() as u64)
});

entry!(cuMemGetAllocationPropertiesFromHandle, |prop: Given, physical: Physical| {
    std::ptr::write_bytes(prop, 0, 1);
    put(prop.cast::<[u32; 4]>(), [1, physical.types, 1, physical.device.ordinal as u32])
});

entry!(cuMemAddressReserve, driver, |ptr, size, alignment, addr, flags| {
    let (bytes, align) = (size as u64, (alignment as u64).max(GRANULARITY));
    invalid_if(ptr.is_null() || bytes == 0 || !bytes.is_multiple_of(GRANULARITY))?;
    invalid_if(!align.is_power_of_two() || flags != 0)?;
    let reserve = |at, bytes, flags| map_pages(at, bytes, ProtFlags::empty(), MapFlags::NORESERVE | flags);
    // The wished address is granted if the range is free; otherwise any range serves. An old kernel may give another range all the same.
    let granted = |at: *mut c_void| at as u64 == addr;
    let wish = addr != 0 && addr.is_multiple_of(align);
    let mut start = addr;
    if !(wish && reserve(addr, size, MapFlags::FIXED_NOREPLACE).is_ok_and(granted)) {
        let got = reserve(0, size + align as usize, MapFlags::empty())? as u64;
        start = got.next_multiple_of(align);
        let _ = munmap(got as *mut c_void, (start - got) as usize);
        let _ = munmap((start + bytes) as *mut c_void, (got + align - start) as usize);
    }
    lock(&RESERVED).insert(start, bytes);
    put(ptr, start)
});

entry!(cuMemAddressFree, driver, |ptr, size| {
    let mut reserved = lock(&RESERVED);
    let bytes = size as u64;
    invalid_if(reserved.get(&ptr) != Some(&bytes) || lock(&MAPPED).range(ptr..ptr + bytes).next().is_some())?;
    reserved.remove(&ptr);
    let _ = munmap(ptr as *mut c_void, size);
});

/// Whether a reserved range holds this range.
fn is_reserved(from: u64, end: u64) -> bool {
    lock(&RESERVED).range(..=from).next_back().is_some_and(|(at, bytes)| end <= at + bytes)
}

/// Addresses in use by kernels: the stream, the kernel's position in it, and the address.
static IN_USE: Mutex<Vec<(Ref<Stream>, u64, u64)>> = Mutex::new(Vec::new());

fn runs(driver: &Driver, (stream, position, _): &(Ref<Stream>, u64, u64)) -> bool {
    !driver.device.is_done(stream.slot, *position)
}

/// A kernel uses an address until it is done. Without memory behind the address it faults.
pub(crate) fn use_address(stream: Ref<Stream>, position: u64, address: u64) -> Answer {
    let driver = driver()?;
    if check_range(address, 1, true).is_err() {
        stream.context.fault();
        return Ok(());
    }
    let mut in_use = lock(&IN_USE);
    in_use.retain(|used| runs(driver, used));
    in_use.push((stream, position, address));
    Ok(())
}

/// Kernels that use addresses of a range fault, because the memory behind them goes.
fn taken_away(driver: &Driver, range: std::ops::Range<u64>) {
    let in_use = lock(&IN_USE);
    let used = in_use.iter().filter(|used| range.contains(&used.2) && runs(driver, used));
    used.for_each(|(stream, ..)| stream.context.fault());
}

entry!(cuMemMap, driver, |ptr, size, offset, physical: Physical, flags| {
    let bytes = size as u64;
    // The documentation up to CUDA 13 requires a zero offset, and an H100 refuses any other.
    refuse_if(offset != 0, NOT_SUPPORTED)?;
    invalid_if(flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || bytes > physical.bytes)?;
    invalid_if(!is_reserved(ptr, ptr + bytes))?;
    let mut mapped = lock(&MAPPED);
    let before = mapped.range(..ptr).next_back().map_or(0, |(at, (_, bytes))| at + bytes);
    invalid_if(before > ptr || mapped.range(ptr..ptr + bytes).next().is_some())?;
    let place = lock(&physical.place);
    map_file(ptr, bytes, place.file, place.offset, READ_WRITE)?;
    mapped.insert(ptr, (physical, bytes));
    driver.memory().note(ptr, bytes, What::Mapped(0), physical.device, 0);
});

entry!(cuMemUnmap, driver, |ptr, size| {
    not_while_capturing()?;
    let end = ptr + size as u64;
    let reserved = is_reserved(ptr, end);
    let mut mapped = lock(&MAPPED);
    let inside: u64 = mapped.range(ptr..end).map(|(_, (_, bytes))| bytes).sum();
    // The range was mapped before and no longer is: no error.
    invalid_if(if inside == 0 { !reserved } else { inside != size as u64 })?;
    let gone: Vec<_> = mapped.extract_if(ptr..end, |_, _| true).collect();
    drop(mapped);
    taken_away(driver, ptr..end);
    for (at, (physical, bytes)) in gone {
        driver.memory().remove(at, |a| matches!(a.what, What::Mapped(_)));
        let _ = map_pages(at, bytes as usize, ProtFlags::empty(), MapFlags::NORESERVE | MapFlags::FIXED);
        Physical::end_if_unused(physical)?;
    }
});

// `CUmemAccessDesc`: location kind, id, flags.
entry!(cuMemSetAccess, driver, |ptr, size, desc, count| {
    invalid_if(desc.is_null() || count == 0)?;
    for i in 0..count {
        let [kind, id, flags] = desc.cast::<[u32; 3]>().add(i).read_unaligned();
        if kind == 1 {
            Device::at(id as i32)?;
        }
        invalid_if(!matches!(flags, 0 | 1 | 3))?;
        invalid_if(!driver.memory().set_access(ptr, size as u64, flags))?;
    }
});

entry!(cuMemGetAccess, |flags, _location: Given, ptr| {
    match driver()?.memory().find(ptr).map(|a| a.what) {
        Some(What::Mapped(access)) => put(flags, access.into()),
        _ => Err(INVALID_VALUE),
    }
});

entry!(cuMemExportToShareableHandle, driver, |handle, physical: Physical, handleType, flags| {
    invalid_if(handleType.0 != 1 || physical.types & 1 == 0 || flags != 0 || handle.is_null())?;
    put(handle.cast::<c_int>(), duplicate(Physical::own_file(physical)?.file)?)
});

entry!(cuMemImportFromShareableHandle, driver, |handle, osHandle, shHandleType| {
    invalid_if(handle.is_null() || shHandleType.0 != 1)?;
    let given = osHandle as usize as c_int;
    let size = file_of(given)?.metadata().map_err(|_| INVALID_VALUE)?.len();
    let bytes = size.checked_sub(4096).filter(|b| *b > 0).ok_or(INVALID_VALUE)?;
    let mut ticket = read_ticket(given, bytes)?;
    let device = Device::of_gpu(ticket.gpu)?;
    // With every holder gone, only the descriptor kept the memory: this process is charged for it.
    let join =
        driver.device.with_living(|engine, _| engine.join(driver.process, ticket.id, ticket.generation));
    if join.is_err() {
        device_memory::charge(device, MemKind::Vmm, bytes)?;
        let again = device.share(MemKind::Vmm, bytes, given)?;
        (ticket.id, ticket.generation) = (again.id, again.generation);
        write_ticket(given, ticket, bytes)?;
    }
    let own = Backing { id: ticket.id, generation: ticket.generation, file: duplicate(given)? };
    put(handle, Physical::create(device, bytes, ticket.pad[0] as u32, own.file, 0, Some(own)))
});

/// A file for an exported pool: its ticket only.
pub(crate) fn pool_file(gpu: u32) -> Res<c_int> {
    let file = new_file(4096)?;
    let ticket = Ticket::new(MemKind::Pool as u32, gpu, 0, 0, Backing { id: u32::MAX, generation: 0, file });
    write_ticket(file, ticket, 0)?;
    Ok(file)
}

/// The GPU of an exported pool.
pub(crate) fn read_pool_file(file: c_int) -> Res<u32> {
    let ticket = read_ticket(file, 0)?;
    invalid_if(ticket.id != u32::MAX || ticket.gpu as usize >= MAX_GPUS)?;
    Ok(ticket.gpu)
}

// --- IPC -------------------------------------------------------------------------------------------

/// Moves an allocation to a file of its own, and describes it for another process.
pub(crate) fn share_alloc(alloc: &Alloc) -> Res<Ticket> {
    let kind = match alloc.what {
        What::Charged(kind) => kind,
        What::Pooled(..) => MemKind::Pool,
        _ => return Err(INVALID_VALUE),
    };
    let (device, span) = (alloc.device, alloc.span);
    let backing = match alloc.backing {
        Some(backing) => backing,
        None => {
            let file = new_file(span.next_multiple_of(4096))?;
            copy_to_file(alloc.address, alloc.bytes, file)?;
            let backing = match kind {
                // The pool pays; other processes only map.
                MemKind::Pool => Backing { id: u32::MAX, generation: 0, file },
                _ => device.share(kind, alloc.bytes, file)?,
            };
            // Spans are whole pages.
            map_file(alloc.address, span, file, 0, READ_WRITE)?;
            device.driver.memory().set_backing(alloc.address, backing);
            backing
        }
    };
    Ok(Ticket::new(kind as u32, device.gpu, alloc.bytes, span, backing))
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
    let device = Device::of_gpu(ticket.gpu)?;
    let path = format!("/proc/{}/fd/{}", ticket.pid, ticket.file);
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| INVALID_HANDLE)?;
    if ticket.id != u32::MAX {
        driver.device.with(|engine, _| engine.join(driver.process, ticket.id, ticket.generation))?;
    }
    // The mapping keeps the file.
    let address = map_file(0, ticket.span.next_multiple_of(4096), file.as_raw_fd(), 0, READ_WRITE)?;
    driver.memory().note(address, ticket.bytes, What::Imported, device, 0);
    opened.insert(address, (ticket, 1));
    Ok(address)
}

/// Unmaps memory from [`open_ticket`] when it was closed as often as opened.
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
    driver.memory().remove(address, |a| a.what == What::Imported);
    if ticket.id != u32::MAX {
        driver.leave(ticket.id, ticket.generation);
    }
    // SAFETY: the mapping made when it was opened.
    let _ = unsafe { munmap(address as *mut c_void, ticket.span.next_multiple_of(4096) as usize) };
    Ok(())
}

entry!(cuIpcGetMemHandle, driver, |pHandle, dptr| {
    let alloc = driver.memory().find(dptr).ok_or(INVALID_VALUE)?;
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
    let (_, family) = current()?.home();
    let ticket = std::ptr::from_ref(&handle).cast::<Ticket>().read_unaligned();
    invalid_if(ticket.magic != FILE_MAGIC || ticket.kind != u32::MAX || ticket.id as usize >= 65_536)?;
    refuse_if(ticket.pid == std::process::id(), INVALID_CONTEXT)?;
    put(phEvent, Event::with_slot(ticket.id, (ticket.gpu, family), ticket.generation, true).handle())
});
