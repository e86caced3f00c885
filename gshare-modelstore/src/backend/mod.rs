//! Memory backends: the interface between the store and its tiers.
//!
//! | backend | memory | clients get | read-only |
//! |---|---|---|---|
//! | [`HostBackend`] | memory files | a descriptor to map | enforced by the kernel |
//! | `cuda::PinnedBackend` | as above, page-locked, beside a GPU | as above | as above |
//! | `cuda::VmmBackend` | of a GPU, without a context in the store | a descriptor to import | against mistakes, not malice |
//!
//! The last two need the feature `cuda`.
//!
//! An arena is made, filled by the store or by one client, sealed, and handed out. Its memory is free once the last process
//! has closed and unmapped it. A store cannot force that: a client that keeps a map after it gave its reference back keeps
//! the memory.

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

/// A source of memory for the arenas of one tier.
pub trait ModelBackend: Debug + Send + Sync {
    /// Allocates `bytes` of zeros, a multiple of 2 MiB.
    ///
    /// # Errors
    /// If the system has no such memory left.
    fn create(&self, bytes: u64) -> io::Result<Arc<dyn ArenaMemory>>;

    /// Fills memory of this backend, and returns the hashes of the tensors in the order of their names. Reports the number
    /// of written bytes to `progress`.
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

    /// Copies memory of this backend to host memory, and returns hashes as [`Self::fill`] does.
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
    /// Writes before the seal, from several threads at once.
    ///
    /// # Errors
    /// After the seal, or if the system has no more memory.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reads all of `out`.
    ///
    /// # Errors
    /// Beyond the end.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// The descriptor with which a client or a loader fills the arena.
    ///
    /// # Errors
    /// If the system has no more descriptors.
    fn writable(&self) -> io::Result<Arc<OwnedFd>>;

    /// Puts a manifest behind the arena in the same file, so that a reader needs only one descriptor and one map. Returns
    /// `false` without any effect if that is impossible: on a GPU, or if a client has the file.
    ///
    /// # Errors
    /// After the seal, or if the system has no more memory.
    fn append(&self, _manifest: &[u8]) -> io::Result<bool> {
        Ok(false)
    }

    /// Ends all writing by any process, for ever. Further calls have no effect.
    ///
    /// # Errors
    /// `ResourceBusy` while a process can still write to it.
    fn seal(&self) -> io::Result<()>;

    /// The handle for readers; `None` before the seal. The descriptor is absent if the handle suffices.
    fn export(&self) -> Option<(Handle, Option<Arc<OwnedFd>>)>;

    /// The bytes of an arena that is page-locked in host memory; `None` before the seal.
    fn pinned(&self) -> Option<&[u8]> {
        None
    }
}
