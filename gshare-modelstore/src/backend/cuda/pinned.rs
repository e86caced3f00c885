//! Page-locked host memory beside a GPU, for direct copies.
//!
//! # Problem
//! A model that had to leave the GPU comes back from host memory. From memory that the driver knows to be page-locked it
//! copies at the speed of the bus, and from other memory in small pieces through its own buffer.
//!
//! # Algorithm
//! The kernel locks pages, and the driver of each process must know about that. So:
//! - the store locks each arena (`mlock`) from its seal to its end. It has no context, which would take hundreds of MB of
//!   the GPU;
//! - a copying process registers its own map of the arena during the copy, and the driver copies directly.
//!
//! Only read-only maps of sealed files are kept, so a sealed arena never changes. Memory that cannot be locked or
//! registered (`RLIMIT_MEMLOCK`, a driver without read-only registration) works too, only slower; the store's figures show
//! the locked bytes.
#![allow(unsafe_code, reason = "calls to the CUDA driver, and memory that it copies to")]

use super::{Context, size};
use crate::arena_fill;
use crate::backend::{ArenaMemory, HostBackend, ModelBackend};
use crate::frame::Handle;
use crate::manifest::Layout;
use crate::map::SealedMap;
use gshare_cuda_abi::types::sys;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fd::OwnedFd;
use rustix::mm::{Advice, madvise};
use std::io;
use std::sync::{Arc, OnceLock};

/// Flags of `cuMemHostRegister`: page-locked for all contexts; only read.
const PORTABLE: u32 = 1;
const READ_ONLY: u32 = 8;

/// Memory that is registered as page-locked with the driver.
#[derive(Debug)]
struct Registered {
    at: usize,
    context: Arc<Context>,
}

impl Registered {
    fn new(context: &Arc<Context>, at: *const u8, bytes: usize, read_only: bool) -> io::Result<Self> {
        context.enter()?;
        let flags = PORTABLE | if read_only { READ_ONLY } else { 0 };
        cuda!(cuMemHostRegister_v2(at.cast_mut().cast(), bytes, flags))?;
        Ok(Self { at: at as usize, context: context.clone() })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = self.context.enter();
        let _ = cuda!(cuMemHostUnregister(self.at as *mut core::ffi::c_void));
    }
}

/// Arenas in memory files like those of [`HostBackend`], page-locked after their seal within the limit of locked memory
/// (`RLIMIT_MEMLOCK`).
#[derive(Debug)]
pub struct PinnedBackend;

impl ModelBackend for PinnedBackend {
    fn create(&self, bytes: u64) -> io::Result<Arc<dyn ArenaMemory>> {
        Ok(Arc::new(PinnedArena { inner: HostBackend.create(bytes)?, bytes, pin: OnceLock::new() }))
    }
}

#[derive(Debug)]
struct PinnedArena {
    inner: Arc<dyn ArenaMemory>,
    bytes: u64,
    /// A locked map, after the seal; `None` if it cannot be locked.
    pin: OnceLock<Option<SealedMap>>,
}

impl PinnedArena {
    fn lock(&self) -> io::Result<SealedMap> {
        let file = self.inner.export().and_then(|(_, file)| file).ok_or(io::ErrorKind::NotFound)?;
        let map = SealedMap::new(&file, self.bytes)?;
        map.lock()?;
        Ok(map)
    }
}

impl ArenaMemory for PinnedArena {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_at(offset, bytes)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, out)
    }

    fn writable(&self) -> io::Result<Arc<OwnedFd>> {
        self.inner.writable()
    }

    fn append(&self, manifest: &[u8]) -> io::Result<bool> {
        self.inner.append(manifest)
    }

    fn seal(&self) -> io::Result<()> {
        self.inner.seal()?;
        self.pin.get_or_init(|| self.lock().ok());
        Ok(())
    }

    fn export(&self) -> Option<(Handle, Option<Arc<OwnedFd>>)> {
        self.inner.export()
    }

    fn pinned(&self) -> Option<&[u8]> {
        self.pin.get()?.as_deref()
    }
}

// --- Copies ----------------------------------------------------------------------------------------

/// A file of host memory, mapped by the copying process.
#[derive(Debug)]
enum HostMap {
    Sealed(SealedMap),
    /// A file to be filled, without any other writer.
    Fresh(MmapRaw),
}

/// The host side of a copy: an arena with the same places as on the GPU, registered if possible.
#[derive(Debug)]
pub(super) struct Copied {
    /// Declared before the map, so that it is dropped first.
    _registered: Option<Registered>,
    map: HostMap,
    context: Arc<Context>,
}

impl Copied {
    /// Maps an arena's file: for reading if it is sealed, or for filling it.
    pub(super) fn map(context: &Arc<Context>, file: &OwnedFd, bytes: u64, fill: bool) -> io::Result<Self> {
        let map = if fill {
            let map = MmapOptions::new().len(size(bytes)?).map_raw(file)?;
            // SAFETY: a map of this process alone. A lack of memory is an error here, and would kill the process later.
            unsafe { madvise(map.as_mut_ptr().cast(), map.len(), Advice::LinuxPopulateWrite)? };
            HostMap::Fresh(map)
        } else {
            HostMap::Sealed(SealedMap::new(file, bytes)?)
        };
        let (at, bytes) = match &map {
            HostMap::Sealed(map) => (map.as_ptr(), map.len()),
            HostMap::Fresh(map) => (map.as_ptr(), map.len()),
        };
        let registered = Registered::new(context, at, bytes, !fill).ok();
        Ok(Self { _registered: registered, map, context: context.clone() })
    }

    /// Copies all tensors between the host and the arena at `address`, from the arena if `out`. Returns their hashes.
    pub(super) fn copy(
        &self,
        address: sys::CUdeviceptr,
        layout: &Layout,
        threads: usize,
        out: bool,
    ) -> io::Result<Vec<[u8; 32]>> {
        let hashes = if out {
            self.fill(layout, threads, &|offset, part| {
                self.context.enter()?;
                cuda!(cuMemcpyDtoH_v2(part.as_mut_ptr().cast(), address + offset, part.len()))
            })
        } else {
            let HostMap::Sealed(map) = &self.map else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            let read = |place: usize, offset: u64, bytes: usize, buffer: &mut [u8]| {
                let from = layout.places[place].offset + offset;
                let begin = size(from)?;
                let part = begin.checked_add(bytes).and_then(|end| map.get(begin..end));
                let part = part.ok_or(io::ErrorKind::InvalidInput)?;
                self.context.enter()?;
                cuda!(cuMemcpyHtoD_v2(address + from, part.as_ptr().cast(), bytes))?;
                buffer[..bytes].copy_from_slice(part);
                Ok(0)
            };
            arena_fill::pieces(layout, threads, &|_| {}, &read)
        }?;
        self.context.enter()?;
        cuda!(cuCtxSynchronize())?;
        Ok(hashes)
    }

    /// Has all tensors read to their places in the arena. Returns their hashes.
    pub(super) fn fill(
        &self,
        layout: &Layout,
        threads: usize,
        from: &(dyn Fn(u64, &mut [u8]) -> io::Result<()> + Sync),
    ) -> io::Result<Vec<[u8; 32]>> {
        let HostMap::Fresh(map) = &self.map else { return Err(io::ErrorKind::InvalidInput.into()) };
        let read = |place: usize, offset: u64, bytes: usize, buffer: &mut [u8]| {
            let at = layout.places[place].offset + offset;
            let begin = size(at)?;
            if begin.checked_add(bytes).is_none_or(|end| end > map.len()) {
                return Err(io::Error::from(io::ErrorKind::InvalidInput));
            }
            // SAFETY: within the map, which outlives the slice and has its pages. The slice is a part of one tensor that no
            // other thread gets, and tensors in a layout of the store do not overlap.
            let part = unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().add(begin), bytes) };
            from(at, part)?;
            buffer[..bytes].copy_from_slice(part);
            Ok(0)
        };
        arena_fill::pieces(layout, threads, &|_| {}, &read)
    }
}
