//! Host memory: memory files that are sealed before anybody reads them.
//!
//! A sealed file cannot be written, grown, shrunk or mapped for writing by any process, the store included
//! (`F_SEAL_WRITE`, which the kernel refuses while a writable map exists anywhere, and `F_SEAL_FUTURE_WRITE`). Readers are
//! given a descriptor that was opened for reading only, so that older kernels let them map it shared, too.

use super::{ArenaMemory, ModelBackend};
use crate::frame::Handle;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, OnceLock};

/// Arenas in memory files; needs no GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostBackend;

#[derive(Debug)]
struct HostArena {
    file: File,
    shared: Arc<OwnedFd>,
    readers: OnceLock<Arc<OwnedFd>>,
}

impl ModelBackend for HostBackend {
    fn create(&self, bytes: u64) -> io::Result<Arc<dyn ArenaMemory>> {
        let file = memory_file("gshare-arena", bytes)?;
        // A writer that could shrink the file would kill whoever reads it then.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let shared = Arc::new(file.as_fd().try_clone_to_owned()?);
        Ok(Arc::new(HostArena { file: file.into(), shared, readers: OnceLock::new() }))
    }
}

impl ArenaMemory for HostArena {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn writable(&self) -> Arc<OwnedFd> {
        self.shared.clone()
    }

    fn seal(&self) -> io::Result<()> {
        if self.readers.get().is_some() {
            return Ok(());
        }
        let readers = seal(&self.file)?;
        let _ = self.readers.set(Arc::new(readers));
        Ok(())
    }

    fn export(&self) -> Option<(Handle, Option<Arc<OwnedFd>>)> {
        self.readers.get().map(|readers| (Handle::HostFile, Some(readers.clone())))
    }
}

fn memory_file(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL)
        // Before Linux 6.3 there is no such flag.
        .or_else(|_| memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING))?;
    ftruncate(&file, bytes)?;
    Ok(file)
}

/// Ends all writing; a descriptor of the file for readers.
fn seal(file: &File) -> io::Result<OwnedFd> {
    let all =
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    fcntl_add_seals(file, all)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A sealed memory file of these bytes, for readers.
pub(crate) fn sealed(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = File::from(memory_file(name, bytes.len() as u64)?);
    file.write_all_at(bytes, 0)?;
    seal(&file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_arena_is_written_by_nobody() {
        let arena = HostBackend.create(2 << 20).unwrap();
        arena.write_at(5, b"weights").unwrap();
        assert!(arena.export().is_none(), "not before it is sealed");
        arena.seal().unwrap();
        assert!(arena.write_at(5, b"x").is_err());
        let writer = File::from(arena.writable().try_clone().unwrap());
        assert!(
            writer.write_all_at(b"x", 5).is_err(),
            "the descriptor of the one who filled it is of no use"
        );
        assert!(writer.set_len(0).is_err());
        let mut out = [0; 7];
        arena.read_at(5, &mut out).unwrap();
        assert_eq!(&out, b"weights");
    }
}
