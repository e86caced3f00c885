//! Host memory: memory files that are sealed before they are read.
//!
//! No process can write, grow, shrink or map a sealed file for writing, not even the store (`F_SEAL_WRITE`, which the
//! kernel refuses while a writable map exists, and `F_SEAL_FUTURE_WRITE`). Readers get a descriptor that is open only for
//! reading, because older kernels allow shared maps only then.

use super::{ArenaMemory, ModelBackend};
use crate::frame::Handle;
use crate::map::FillMap;
use parking_lot::{Mutex, RwLock};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Arenas in memory files; needs no GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostBackend;

#[derive(Debug)]
struct HostArena {
    file: File,
    bytes: u64,
    /// The descriptor for the client that fills the arena.
    shared: OnceLock<Arc<OwnedFd>>,
    /// Whether the manifest follows the arena in the file.
    whole: AtomicBool,
    readers: OnceLock<Arc<OwnedFd>>,
    /// The turn to write to the file.
    turn: Mutex<()>,
    /// The map for threads without the turn.
    map: RwLock<Option<FillMap>>,
}

/// A smaller write is not worth a map.
const LARGE: usize = 64 << 10;

impl ModelBackend for HostBackend {
    fn create(&self, bytes: u64) -> io::Result<Arc<dyn ArenaMemory>> {
        let file = memory_file("gshare-arena", bytes)?;
        let file = File::from(file);
        Ok(Arc::new(HostArena {
            file,
            bytes,
            shared: OnceLock::new(),
            whole: AtomicBool::new(false),
            readers: OnceLock::new(),
            turn: Mutex::new(()),
            map: RwLock::new(None),
        }))
    }
}

impl ArenaMemory for HostArena {
    /// The kernel lets one thread at a time write to a file, while the others spin. So the thread with the turn writes, at
    /// the cost of one pass per page, and the others use a map at two passes: the kernel clears each page first.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let turn = self.turn.try_lock();
        if turn.is_some() || bytes.len() < LARGE || !offset.is_multiple_of(8) {
            return self.file.write_all_at(bytes, offset);
        }
        let map = |map: &Option<FillMap>| map.as_ref().map(|map| map.write(offset, bytes));
        let written = map(&self.map.read());
        if let Some(written) = written {
            return written;
        }
        let mut first = self.map.write();
        if self.readers.get().is_some() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if first.is_none() {
            *first = Some(FillMap::new(&self.file, self.bytes)?);
        }
        map(&first).unwrap_or_else(|| self.file.write_all_at(bytes, offset))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn writable(&self) -> io::Result<Arc<OwnedFd>> {
        if let Some(shared) = self.shared.get() {
            return Ok(shared.clone());
        }
        // A writer that shrinks the file would kill processes that read it.
        fcntl_add_seals(&self.file, SealFlags::SHRINK | SealFlags::GROW)?;
        let shared = Arc::new(self.file.as_fd().try_clone_to_owned()?);
        Ok(self.shared.get_or_init(|| shared).clone())
    }

    fn append(&self, manifest: &[u8]) -> io::Result<bool> {
        if self.shared.get().is_some() {
            return Ok(false);
        }
        self.file.write_all_at(manifest, self.bytes)?;
        self.whole.store(true, Ordering::Release);
        Ok(true)
    }

    fn seal(&self) -> io::Result<()> {
        if self.readers.get().is_some() {
            return Ok(());
        }
        // The kernel refuses the seal while a writable map exists.
        let mut map = self.map.write();
        *map = None;
        let readers = seal(&self.file)?;
        let _ = self.readers.set(Arc::new(readers));
        Ok(())
    }

    fn export(&self) -> Option<(Handle, Option<Arc<OwnedFd>>)> {
        let whole = self.whole.load(Ordering::Acquire);
        let handle = if whole { Handle::HostFile } else { Handle::HostFiles };
        self.readers.get().map(|readers| (handle, Some(readers.clone())))
    }
}

fn memory_file(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL)
        // Linux before 6.3 does not have this flag.
        .or_else(|_| memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING))?;
    ftruncate(&file, bytes)?;
    Ok(file)
}

/// Ends all writing, and returns a descriptor for readers.
fn seal(file: &File) -> io::Result<OwnedFd> {
    let all =
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    fcntl_add_seals(file, all)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A sealed memory file with these bytes, for readers.
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
        let writer = File::from(arena.writable().unwrap().try_clone().unwrap());
        assert!(writer.set_len(0).is_err() && writer.set_len(4 << 20).is_err(), "not even before");
        assert!(!arena.append(b"manifest").unwrap(), "its size is what the client was told");
        assert!(arena.export().is_none(), "not before it is sealed");
        arena.seal().unwrap();
        assert!(arena.write_at(5, b"x").is_err());
        assert!(
            writer.write_all_at(b"x", 5).is_err(),
            "the descriptor of the one who filled it is of no use"
        );
        assert!(writer.set_len(0).is_err());
        let mut out = [0; 7];
        arena.read_at(5, &mut out).unwrap();
        assert_eq!(&out, b"weights");
    }

    #[test]
    fn many_threads_write_at_once_and_the_manifest_lies_behind() {
        let (piece, pieces) = (1usize << 20, 24u64);
        let arena = HostBackend.create(pieces << 20).unwrap();
        let pattern = |n: u64| -> Vec<u8> { (0..piece as u64).map(|at| (at * 7 + n * 13) as u8).collect() };
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let arena = &arena;
                scope.spawn(move || {
                    for n in (thread..pieces).step_by(4) {
                        // Odd ends as well: parts of words, unaligned to pages.
                        let bytes = pattern(n);
                        let (first, rest) = bytes.split_at(piece - 128 * 1_024 - 5);
                        arena.write_at(n << 20, first).unwrap();
                        arena.write_at((n << 20) + first.len() as u64, rest).unwrap();
                    }
                });
            }
        });
        assert!(arena.write_at((pieces << 20) - 1, b"xx").is_err(), "beyond the end");
        assert!(arena.append(b"manifest").unwrap());
        arena.seal().unwrap();
        let mut out = vec![0; piece];
        for n in 0..pieces {
            arena.read_at(n << 20, &mut out).unwrap();
            assert!(out == pattern(n), "piece {n}");
        }
        let mut behind = [0; 8];
        arena.read_at(pieces << 20, &mut behind).unwrap();
        assert_eq!(&behind, b"manifest");
        assert_eq!(arena.export().map(|(handle, _)| handle), Some(Handle::HostFile));
    }
}
