//! Maps of memory files: of sealed files for readers, and of files that are being filled.
#![allow(
    unsafe_code,
    reason = "a map of a file is only sound if no process writes or cuts the file, which its seals show"
)]

use memmap2::{Mmap, MmapOptions, MmapRaw};
use rustix::fd::OwnedFd;
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::mm::{Advice, madvise};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The bytes of a sealed memory file.
#[derive(Debug)]
pub(crate) struct SealedMap(Mmap);

impl SealedMap {
    /// Maps the first `bytes` of the file, after a check of its seals and its length.
    pub(crate) fn new(file: &OwnedFd, bytes: u64) -> io::Result<Self> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        let seals = fcntl_get_seals(file)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::WRITE) {
            return Err(invalid("the memory file is not sealed"));
        }
        let length = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
        let Some(bytes) = usize::try_from(bytes).ok().filter(|_| bytes <= length) else {
            return Err(invalid("the memory file is shorter than it should be"));
        };
        // SAFETY: by its seals no process can ever write to the file or shorten it, so the mapped bytes never change.
        let map = unsafe { MmapOptions::new().len(bytes).map(file)? };
        Ok(Self(map))
    }

    /// Locks the map in memory until it is unmapped.
    #[cfg(feature = "cuda")]
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: a map of this process, which is unlocked when it is unmapped.
        unsafe { rustix::mm::mlock(self.0.as_ptr().cast_mut().cast(), self.0.len()) }?;
        Ok(())
    }
}

impl std::ops::Deref for SealedMap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

const PAGE: usize = 4_096;

/// A map through which several threads fill a memory file.
#[derive(Debug)]
pub(crate) struct FillMap(MmapRaw);

impl FillMap {
    /// Maps the first `bytes` of a file. Only this process can shorten the file, and it never does.
    pub(crate) fn new(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self(MmapOptions::new().len(bytes).map_raw(file)?))
    }

    /// Writes at an offset that is a multiple of 8.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let begin = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = begin.checked_add(bytes.len()).filter(|&end| end <= self.0.len() && begin % 8 == 0);
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let pages = begin / PAGE * PAGE;
        // SAFETY: within the map, which begins at a page. A lack of memory is an error here, and would kill the process
        // later.
        unsafe {
            madvise(self.0.as_mut_ptr().add(pages).cast(), end - pages, Advice::LinuxPopulateWrite)?;
        }
        let (words, rest) = bytes.as_chunks::<8>();
        // SAFETY: within the map, at a multiple of 8 of a page; zeroed memory is a value of both types. Atomic, since
        // nothing here guarantees that other threads write elsewhere.
        let (to, tail) = unsafe {
            let to = self.0.as_mut_ptr().add(begin);
            (
                std::slice::from_raw_parts(to.cast::<AtomicU64>(), words.len()),
                std::slice::from_raw_parts(to.add(words.len() * 8).cast::<AtomicU8>(), rest.len()),
            )
        };
        for (to, word) in to.iter().zip(words) {
            to.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        for (to, byte) in tail.iter().zip(rest) {
            to.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }
}
