//! Host memory beside a GPU: it stays where it is, so that the GPU copies from and to it by itself.
//!
//! # Problem
//! A model that had to leave the GPU comes back from host memory. The driver copies from memory that it knows to be page-locked at
//! the speed of the bus, and from any other in small pieces through a buffer of its own.
//!
//! # How
//! Page-locked is what the kernel promises, known to be is what one process's driver remembers. So:
//! - an arena is locked by the kernel (`mlock`) from when it is sealed until it goes: the store has no context, which would take
//!   hundreds of MB of the GPU;
//! - a process that copies registers its own map of the arena for the time of the copy, and the driver copies straight from it or to it.
//!
//! Only maps of sealed files are kept, and those for reading, so a sealed arena stays what it is. What cannot be locked
//! (`RLIMIT_MEMLOCK`, a driver that registers no memory that is only read) serves all the same; the store's figures say how many
//! bytes are.
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

/// Memory that the driver knows to be page-locked.
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

/// Arenas in memory files as of [`HostBackend`], page-locked once they are sealed, as far as the limit of locked memory
/// (`RLIMIT_MEMLOCK`) has room.
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
    /// A locked map, once it is sealed; `None` where it cannot be locked.
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

/// A file of host memory, mapped by the process that copies.
#[derive(Debug)]
enum HostMap {
    Sealed(SealedMap),
    /// A file that is to be filled, and that no other process writes.
    Fresh(MmapRaw),
}

/// A place to copy from or to: an arena in host memory whose tensors lie as on the GPU, registered if the driver does that.
#[derive(Debug)]
pub(super) struct Copied {
    /// Before the map, so that it is gone first.
    _registered: Option<Registered>,
    map: HostMap,
    context: Arc<Context>,
}

impl Copied {
    /// Maps an arena's file: for reading, if it is sealed, or for filling it.
    pub(super) fn map(context: &Arc<Context>, file: &OwnedFd, bytes: u64, fill: bool) -> io::Result<Self> {
        let map = if fill {
            let map = MmapOptions::new().len(size(bytes)?).map_raw(file)?;
            // SAFETY: a map of our own. Memory that the system has not is an error here, and would be the end of the process later.
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

    /// Copies all tensors between here and the arena at `address`, from there if `out`; their hashes.
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

    /// Has all tensors read, at their places in the arena; their hashes.
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
            // SAFETY: within the map, which lives longer than this and has its pages. It is a part of one tensor that no other
            // thread is given, and the tensors of a layout that the store made do not overlap.
            let part = unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().add(begin), bytes) };
            from(at, part)?;
            buffer[..bytes].copy_from_slice(part);
            Ok(0)
        };
        arena_fill::pieces(layout, threads, &|_| {}, &read)
    }
}
