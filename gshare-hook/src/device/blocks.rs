//! Blocks: allocations of the program that can go to host memory and come back to the same addresses.
//!
//! A block is a range of reserved addresses. While its bytes are on the device, physical memory is mapped there. On the way to host memory
//! its bytes are copied, and the physical memory is released; the addresses stay reserved. The host memory is page-locked, so that
//! the bytes come back at the speed of the link, and a forked child does not get it.
//!
//! The program may free a block at any time, and gets its physical memory only by ways that [`Blocks::share`] notes. A block belongs to
//! the context in which it was made, and dies with it, or to a [pool](crate::device::pools).
//!
//! Memory that the program maps by itself is a block too, as long as it is mapped once, as a whole, and for this device: see
//! [`handles`](crate::device::handles).
#![allow(unsafe_code)] // calls to the driver and the kernel

use core::ffi::c_void;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::Arc;

use gshare_core::reason::Obstacle;
use gshare_cuda_abi::types::{CUdevice, CUdeviceptr, CUresult, sys};

use crate::device::book::{Key, Kind};
use crate::device::context::{Pushed, relaxed};
use crate::device::handles::{Handles, Movable, Physical, Properties, release};
use crate::device::pools::{Pool, Pools};
use crate::sys::driver::{beneath, pointer, real};
use crate::sys::lock::Lock;

/// The size from which on an allocation is a block, and the unit of its memory.
pub(crate) const GRANULE: u64 = 2 << 20;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE` and `CU_MEM_LOCATION_TYPE_DEVICE`.
const READ_WRITE: u32 = 3;
pub(crate) const DEVICE: u32 = 1;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// The place of a block's bytes.
#[derive(Debug)]
pub(super) enum Place {
    /// On the device, in this physical memory.
    Device(Physical),
    Host(HostMemory),
}

#[derive(Debug)]
pub(crate) struct Block {
    /// Bytes asked for, and bytes of physical memory and of addresses.
    pub(super) bytes: u64,
    pub(super) span: u64,
    /// The context with which the block dies; 0 for none.
    context: usize,
    pub(super) place: Place,
    /// Whether others may hold the physical memory, so that it stays.
    pub(super) shared: bool,
    /// The name of physical memory that the program maps by itself.
    name: Option<u64>,
    /// The pool that the block serves.
    pub(super) pool: Option<Arc<Pool>>,
}

impl Block {
    /// The object that is charged for the memory.
    fn key(&self, address: CUdeviceptr) -> Key {
        self.name.map_or(Key(Kind::Pointer, address), |name| Key(Kind::Handle, name))
    }
}

/// All blocks of a device.
#[derive(Debug)]
pub(crate) struct Blocks {
    ordinal: CUdevice,
    pub(super) all: Lock<BTreeMap<CUdeviceptr, Block>>,
    /// The program's own handles, locked after `all`.
    pub(crate) handles: Handles,
    pub(crate) pools: Pools,
    /// Bytes that can move, on the device and in host memory.
    here: AtomicU64,
    away: AtomicU64,
}

/// A stream for moves, in a context that is current while this value lives.
#[derive(Debug)]
pub(crate) struct Lane {
    stream: sys::CUstream,
    _current: Pushed,
}

impl Lane {
    pub(crate) fn new(context: usize) -> Option<Self> {
        let current = Pushed::new(context)?;
        let mut stream: sys::CUstream = core::ptr::null_mut();
        // SAFETY: a valid out-pointer.
        let made = relaxed(|| unsafe {
            real!(cuStreamCreate)?(&raw mut stream, NON_BLOCKING).is_ok().then_some(())
        });
        made.map(|()| Self { stream, _current: current })
    }

    /// Waits for a copy queued by `copy`.
    fn run(&self, copy: impl FnOnce(sys::CUstream) -> Option<CUresult>) -> Result<(), Obstacle> {
        let done = relaxed(|| {
            // SAFETY: the stream lives as long as this value.
            if !copy(self.stream)?.is_ok() {
                return None;
            }
            // SAFETY: as above.
            Some(unsafe { beneath!(cuStreamSynchronize)?(self.stream) })
        });
        done.filter(|result| result.is_ok()).map(|_| ()).ok_or(Obstacle::Copy)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(destroy) = real!(cuStreamDestroy_v2) {
            // SAFETY: made by `new`, in the context that is current still.
            let _ = unsafe { destroy(self.stream) };
        }
    }
}

/// Host memory of a block.
#[derive(Debug)]
pub(super) struct HostMemory {
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: the only reference to its pages.
unsafe impl Send for HostMemory {}

impl HostMemory {
    fn new(bytes: u64) -> Option<Self> {
        let bytes = usize::try_from(bytes).ok()?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new pages.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP, libc::MADV_HUGEPAGE] {
            // SAFETY: the pages above.
            unsafe { libc::madvise(at, bytes, advice) };
        }
        // Pages that are not locked take longer to copy, and that is all.
        // SAFETY: the pages above.
        relaxed(|| real!(cuMemHostRegister_v2).map(|register| unsafe { register(at, bytes, 0) }));
        Some(Self { at, bytes })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // Their context may be gone, and has unlocked them then.
        // SAFETY: the pages locked by `new`.
        relaxed(|| real!(cuMemHostUnregister).map(|unregister| unsafe { unregister(self.at) }));
        // SAFETY: the pages of `new`, which no other code uses.
        unsafe { libc::munmap(self.at, self.bytes) };
    }
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Whether the driver has all functions for blocks, and maps memory in granules at most as large as ours.
pub(crate) fn are_possible(ordinal: CUdevice) -> bool {
    use gshare_cuda_abi::index as of;
    let needed = [
        of::cuMemAddressReserve,
        of::cuMemAddressFree,
        of::cuMemCreate,
        of::cuMemRelease,
        of::cuMemMap,
        of::cuMemUnmap,
        of::cuMemSetAccess,
        of::cuMemcpyDtoHAsync_v2,
        of::cuMemcpyHtoDAsync_v2,
        of::cuStreamCreate,
        of::cuStreamDestroy_v2,
        of::cuStreamSynchronize,
        of::cuCtxSynchronize,
        of::cuCtxPushCurrent_v2,
        of::cuCtxPopCurrent_v2,
        of::cuThreadExchangeStreamCaptureMode,
    ];
    let mut granule = 0usize;
    let properties = properties(ordinal);
    let told = real!(cuMemGetAllocationGranularity)
        // SAFETY: valid pointers.
        .map(|get| unsafe { get(&raw mut granule, properties.as_ptr(), 0) });
    needed.iter().all(|&index| pointer(index).is_some())
        && told.is_some_and(|result| result.is_ok())
        && granule > 0
        && GRANULE.is_multiple_of(granule as u64)
}

/// Page-locked memory of a device, without a handle for other processes.
fn properties(ordinal: CUdevice) -> Properties {
    let mut properties = Properties::zeroed();
    // SAFETY: the structure begins with its type, its handle types, and the kind and number of the location, each 32 bits.
    unsafe { properties.as_mut_ptr().cast::<[u32; 4]>().write([1, 0, DEVICE, ordinal.unsigned_abs()]) };
    properties
}

fn reserve(span: u64) -> Result<CUdeviceptr, CUresult> {
    let mut address: CUdeviceptr = 0;
    let reserve = real!(cuMemAddressReserve).ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
    // SAFETY: a valid out-pointer.
    let result = unsafe { reserve(&raw mut address, size(span), size(GRANULE), 0, 0) };
    if result.is_ok() { Ok(address) } else { Err(result) }
}

/// Backs reserved addresses with new physical memory.
fn back(
    address: CUdeviceptr,
    span: u64,
    ordinal: CUdevice,
    properties: &Properties,
) -> Result<Physical, CUresult> {
    let missing = CUresult::CUDA_ERROR_NOT_SUPPORTED;
    let (create, map) = (real!(cuMemCreate).ok_or(missing)?, real!(cuMemMap).ok_or(missing)?);
    let allow = real!(cuMemSetAccess).ok_or(missing)?;
    let mut physical: Physical = 0;
    // SAFETY: valid pointers.
    let created = unsafe { create(&raw mut physical, size(span), properties.as_ptr(), 0) };
    if !created.is_ok() {
        return Err(created);
    }
    // SAFETY: addresses of this module, with nothing mapped.
    let mapped = unsafe { map(address, size(span), 0, physical, 0) };
    // `CUmemAccessDesc`: the kind and number of the location, and the flags.
    let access = [DEVICE, ordinal.unsigned_abs(), READ_WRITE];
    let allowed = if mapped.is_ok() {
        // SAFETY: mapped above; the description has this layout.
        unsafe { allow(address, size(span), access.as_ptr().cast(), 1) }
    } else {
        mapped
    };
    if allowed.is_ok() {
        return Ok(physical);
    }
    if mapped.is_ok() {
        unback(address, span, physical);
    } else {
        let _ = release(physical);
    }
    Err(allowed)
}

fn unback(address: CUdeviceptr, span: u64, physical: Physical) {
    if let Some(unmap) = real!(cuMemUnmap) {
        // SAFETY: mapped whole, and the device's work with it is over.
        let _ = relaxed(|| unsafe { unmap(address, size(span)) });
        let _ = release(physical);
    }
}

fn give_up(address: CUdeviceptr, span: u64) {
    if let Some(free) = real!(cuMemAddressFree) {
        // SAFETY: reserved by `reserve`, with nothing mapped.
        let _ = unsafe { free(address, size(span)) };
    }
}

/// Waits for the work of a context on the device; 0 is the current context.
pub(crate) fn synchronise(context: usize) -> CUresult {
    let current = (context != 0).then(|| Pushed::new(context));
    if matches!(current, Some(None)) {
        return CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    let wait = beneath!(cuCtxSynchronize);
    // SAFETY: no arguments.
    relaxed(|| wait.map_or(CUresult::CUDA_ERROR_NOT_SUPPORTED, |wait| unsafe { wait() }))
}

impl Blocks {
    pub(crate) fn new(ordinal: CUdevice) -> Self {
        let zero = || AtomicU64::new(0);
        let (all, handles, pools) = (Lock::default(), Handles::default(), Pools::default());
        Self { ordinal, all, handles, pools, here: zero(), away: zero() }
    }

    /// Bytes on the device that can move, and bytes in host memory.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.here.load(Ordering::Relaxed), self.away.load(Ordering::Relaxed))
    }

    /// Bytes that stay on the device because others may hold them.
    pub(crate) fn shared(&self) -> u64 {
        self.all.lock().values().filter(|block| block.shared).map(|block| block.span).sum()
    }

    /// Makes a block in the current context, which `context` names, or of a pool.
    pub(crate) fn create(
        &self,
        bytes: u64,
        context: usize,
        pool: Option<Arc<Pool>>,
    ) -> Result<CUdeviceptr, CUresult> {
        let span = bytes.next_multiple_of(GRANULE);
        let address = reserve(span)?;
        let physical = back(address, span, self.ordinal, &properties(self.ordinal))
            .inspect_err(|_| give_up(address, span))?;
        let place = Place::Device(physical);
        let block = Block { bytes, span, context, place, shared: false, name: None, pool };
        block.joins();
        self.all.lock().insert(address, block);
        self.here.fetch_add(span, Ordering::Relaxed);
        Ok(address)
    }

    /// The block that holds an address: its first address and its bytes.
    pub(crate) fn around(&self, address: CUdeviceptr) -> Option<(CUdeviceptr, u64)> {
        let all = self.all.lock();
        let (first, block) = all.range(..=address).next_back()?;
        (address - first < block.bytes).then_some((*first, block.bytes))
    }

    /// Whether a block that the program can free begins at this address.
    pub(crate) fn begins_at(&self, address: CUdeviceptr) -> bool {
        self.all.lock().get(&address).is_some_and(|block| block.name.is_none())
    }

    /// Notes that others may hold the physical memory of the blocks in a range from now on.
    pub(crate) fn share(&self, range: Range<CUdeviceptr>) {
        let mut all = self.all.lock();
        for (first, block) in all.range_mut(..range.end) {
            if first + block.span > range.start && !core::mem::replace(&mut block.shared, true) {
                self.here.fetch_sub(block.span, Ordering::Relaxed);
                if let Some(name) = block.name {
                    self.handles.stays(name);
                }
            }
        }
    }

    /// Whether an access is for this device, to read and write.
    pub(crate) fn is_alone(&self, access: [u32; 3]) -> bool {
        access == [DEVICE, self.ordinal.unsigned_abs(), READ_WRITE]
    }

    /// Names memory that the program has just created: see [`Handles::adopt`].
    pub(crate) fn adopt(
        &self,
        physical: Physical,
        properties: *const sys::CUmemAllocationProp,
        bytes: u64,
    ) -> Option<u64> {
        self.handles.adopt(physical, properties, bytes, self.ordinal)
    }

    /// Notes that named memory stays from now on.
    pub(crate) fn stays(&self, name: u64) {
        self.handles.stays(name).into_iter().for_each(|range| self.share(range));
    }

    /// Notes that the program mapped named memory.
    pub(crate) fn mapped(&self, name: u64, range: Range<CUdeviceptr>) {
        if self.handles.mapped(name, range) {
            self.stays(name);
        }
    }

    /// Notes that the program opened a range to this device `alone`, or to others or in another way.
    pub(crate) fn opened(&self, range: &Range<CUdeviceptr>, alone: bool, context: usize) {
        if !alone {
            return self.share(range.clone());
        }
        let mut all = self.all.lock();
        for Movable { name, physical, address, bytes } in self.handles.movable_in(range) {
            let place = Place::Device(physical);
            all.entry(address).or_insert_with(|| {
                self.here.fetch_add(bytes, Ordering::Relaxed);
                Block { bytes, span: bytes, context, place, shared: false, name: Some(name), pool: None }
            });
        }
    }

    /// Notes that the program unmapped a range.
    pub(crate) fn unmapped(&self, range: &Range<CUdeviceptr>) {
        let mut all = self.all.lock();
        for (_, block) in all.extract_if(range.clone(), |_, block| block.name.is_some()) {
            if !block.shared {
                self.here.fetch_sub(block.span, Ordering::Relaxed);
            }
        }
        self.handles.unmapped(range);
    }

    /// Frees the block that begins at an address, after the work of its context, as the driver does. `None`: there is no such block.
    pub(crate) fn destroy(&self, address: CUdeviceptr) -> Option<CUresult> {
        let (context, here) = {
            let all = self.all.lock();
            let block = all.get(&address)?;
            (block.context, matches!(block.place, Place::Device(_)))
        };
        if here {
            let result = synchronise(context);
            if !result.is_ok() {
                return Some(result);
            }
        }
        let block = self.all.lock().remove(&address)?;
        block.leaves();
        self.end(address, block);
        Some(CUresult::CUDA_SUCCESS)
    }

    /// Ends a block without work on the device.
    pub(crate) fn end(&self, address: CUdeviceptr, block: Block) {
        match block.place {
            Place::Device(physical) => {
                unback(address, block.span, physical);
                if !block.shared {
                    self.here.fetch_sub(block.span, Ordering::Relaxed);
                }
            }
            Place::Host(memory) => {
                drop(memory);
                self.away.fetch_sub(block.span, Ordering::Relaxed);
            }
        }
        give_up(address, block.span);
    }

    /// Frees the blocks of a destroyed context.
    pub(crate) fn forget(&self, context: usize) {
        self.pools.destroyed(context);
        // Memory that the program maps by itself outlives the context.
        let ends = |block: &mut Block| {
            let its = block.context == context;
            if its && block.name.is_some() {
                block.context = 0;
            }
            its && block.name.is_none()
        };
        let gone: Vec<_> = self.all.lock().extract_if(.., |_, block| ends(block)).collect();
        gone.into_iter().for_each(|(address, block)| self.end(address, block));
    }

    /// The contexts of the blocks.
    pub(crate) fn contexts(&self) -> Vec<usize> {
        let mut contexts = self.pools.contexts();
        contexts.extend(self.all.lock().values().map(|block| block.context).filter(|context| *context != 0));
        contexts.sort_unstable();
        contexts.dedup();
        contexts
    }

    /// The addresses of the blocks on the device that can move, or of those in host memory.
    pub(crate) fn addresses(&self, here: bool) -> Vec<CUdeviceptr> {
        let is = |block: &Block| matches!(block.place, Place::Device(_)) == here && !block.shared;
        self.all.lock().iter().filter(|(_, block)| is(block)).map(|(address, _)| *address).collect()
    }

    /// Moves a block to host memory. `moved` hears of the charged object and its bytes while no other thread can free the block.
    pub(crate) fn to_host(
        &self,
        address: CUdeviceptr,
        lane: &Lane,
        moved: impl FnOnce(Key, u64),
    ) -> Result<(), Obstacle> {
        let mut all = self.all.lock();
        let Some(block) = all.get_mut(&address) else { return Ok(()) };
        let Place::Device(physical) = block.place else { return Ok(()) };
        let memory = HostMemory::new(block.span).ok_or(Obstacle::HostMemory)?;
        let copy = beneath!(cuMemcpyDtoHAsync_v2).ok_or(Obstacle::Driver)?;
        // SAFETY: the block's memory and host memory of the same size, kept until the copy is over.
        lane.run(|stream| Some(unsafe { copy(memory.at, address, memory.bytes, stream) }))?;
        unback(address, block.span, physical);
        block.place = Place::Host(memory);
        self.here.fetch_sub(block.span, Ordering::Relaxed);
        self.away.fetch_add(block.span, Ordering::Relaxed);
        moved(block.key(address), block.span);
        Ok(())
    }

    /// Moves a block back to the device: see [`to_host`](Self::to_host).
    pub(crate) fn to_device(
        &self,
        address: CUdeviceptr,
        lane: &Lane,
        moved: impl FnOnce(Key, u64),
    ) -> Result<(), Obstacle> {
        let mut all = self.all.lock();
        let Some(block) = all.get_mut(&address) else { return Ok(()) };
        let Place::Host(memory) = &block.place else { return Ok(()) };
        let copy = beneath!(cuMemcpyHtoDAsync_v2).ok_or(Obstacle::Driver)?;
        let named = block.name.and_then(|name| self.handles.properties(name));
        let properties = named.unwrap_or_else(|| properties(self.ordinal));
        let physical =
            relaxed(|| back(address, block.span, self.ordinal, &properties)).map_err(|result| {
                if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY { Obstacle::Device } else { Obstacle::Copy }
            })?;
        // SAFETY: as in `to_host`.
        let copied = lane.run(|stream| Some(unsafe { copy(address, memory.at, memory.bytes, stream) }));
        if let Err(obstacle) = copied {
            unback(address, block.span, physical);
            return Err(obstacle);
        }
        block.place = Place::Device(physical);
        if let Some(name) = block.name {
            self.handles.came_back(name, physical);
        }
        self.away.fetch_sub(block.span, Ordering::Relaxed);
        self.here.fetch_add(block.span, Ordering::Relaxed);
        moved(block.key(address), block.span);
        Ok(())
    }
}
