//! Memory that models live in: the seam between the store and its tiers.
//!
//! | backend | memory | clients get | read-only is |
//! |---|---|---|---|
//! | [`HostBackend`] | memory files | a descriptor to map | kept by the kernel, against everybody |
//! | `cuda::PinnedBackend` | the same, page-locked, beside a GPU | the same | the same |
//! | `cuda::VmmBackend` | of a GPU, no context in the store | a descriptor to import | kept against mistakes, not malice |
//!
//! The last two need the feature `cuda`.
//!
//! An arena has one life: made, filled (by the store, or by one client), sealed, handed out. Its memory is free when the last
//! process has closed and unmapped it, which a store cannot force: what a client keeps mapped after it gave its reference
//! back is that client's memory.

#[cfg(feature = "cuda")]
pub mod cuda;
mod host;

pub use host::HostBackend;
pub(crate) use host::sealed;

use crate::arena_fill::{self, Origin};
use crate::frame::Handle;
use crate::manifest::Layout;
use rustix::fd::OwnedFd;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;

/// Makes memory for arenas of one tier.
pub trait ModelBackend: Debug + Send + Sync {
    /// New memory of `bytes`, all zero, a multiple of 2 MiB.
    ///
    /// # Errors
    /// When the system has no more, or no such memory.
    fn create(&self, bytes: u64) -> io::Result<Arc<dyn ArenaMemory>>;

    /// Fills memory that it made; the hashes of the tensors in the order of their names. `progress` is told how many bytes
    /// are there.
    ///
    /// # Errors
    /// The first error of reading or writing.
    fn fill(
        &self,
        memory: &dyn ArenaMemory,
        origin: &Origin,
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> io::Result<Vec<[u8; 32]>> {
        arena_fill::fill(origin, memory, threads, progress)
    }

    /// Copies memory that it made to memory of the host, and hashes on the way as [`Self::fill`] does.
    ///
    /// # Errors
    /// The first error of reading or writing.
    fn copy_out(
        &self,
        from: &Arc<dyn ArenaMemory>,
        layout: &Arc<Layout>,
        to: &dyn ArenaMemory,
        threads: usize,
    ) -> io::Result<Vec<[u8; 32]>> {
        let origin = Origin::Arena { layout: layout.clone(), memory: from.clone() };
        arena_fill::fill(&origin, to, threads, &|_| {})
    }
}

/// Memory of one arena.
pub trait ArenaMemory: Debug + Send + Sync {
    /// Writes before it is sealed, from several threads at once.
    ///
    /// # Errors
    /// When it is sealed, or the system has no more memory.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reads all of `out`.
    ///
    /// # Errors
    /// Beyond the end.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// The descriptor that a client or a loader is given to fill it.
    ///
    /// # Errors
    /// When the system has no more descriptors.
    fn writable(&self) -> io::Result<Arc<OwnedFd>>;

    /// Puts a manifest behind the arena, in the same file, so that a reader needs one descriptor and one map. `false`, and
    /// nothing is done, where that cannot be: on a GPU, or when a client was given the file.
    ///
    /// # Errors
    /// When it is sealed, or the system has no more memory.
    fn append(&self, _manifest: &[u8]) -> io::Result<bool> {
        Ok(false)
    }

    /// Ends all writing, by any process, for ever. Once is enough.
    ///
    /// # Errors
    /// `ResourceBusy` when a process can still write to it.
    fn seal(&self) -> io::Result<()>;

    /// The handle that readers are given; `None` before it is sealed. The descriptor is absent where the handle says all.
    fn export(&self) -> Option<(Handle, Option<Arc<OwnedFd>>)>;

    /// The arena, where it is page-locked in host memory; `None` before it is sealed.
    fn pinned(&self) -> Option<&[u8]> {
        None
    }
}
