//! Read-only maps of sealed memory files.
#![allow(
    unsafe_code,
    reason = "a map of a file is only sound if nobody writes or cuts the file, which its seals show"
)]

use memmap2::{Mmap, MmapOptions};
use rustix::fd::OwnedFd;
use rustix::fs::{SealFlags, fcntl_get_seals};
use std::io;

/// The bytes of a sealed memory file.
#[derive(Debug)]
pub(crate) struct SealedMap(Mmap);

impl SealedMap {
    /// Maps the first `bytes` of the file, after a look at its seals and its length.
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
        // SAFETY: the seals say that nobody can write to the file or make it shorter, now or later, so that the bytes
        // of the map stay what they are for as long as it lives.
        let map = unsafe { MmapOptions::new().len(bytes).map(file)? };
        Ok(Self(map))
    }
}

impl std::ops::Deref for SealedMap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}
