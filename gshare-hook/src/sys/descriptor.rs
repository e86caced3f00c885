//! The hook's file descriptors, in a program unaware of them.
//!
//! A program may close descriptors that it did not open (`close_range`, a loop over all numbers), and its own files then get these
//! numbers. So the hook gives its descriptors numbers that are not reused soon, and compares each with its file before use. A
//! descriptor that is gone is made again. The comparison needs files that can be told apart: a pipe or a socket has its own inode,
//! while all eventfds of a machine share one.
#![allow(unsafe_code)] // a descriptor that is closed by hand

use core::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The lowest number of the hook's descriptors, where the process may have this many.
const LOWEST: i32 = 512;

/// A descriptor of the hook, as long as the program leaves it alone.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    /// The identity of its file, as device and inode.
    file: Option<(u64, u64)>,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, LOWEST).unwrap_or(fd);
        let file = file_of(&fd);
        Self { fd: ManuallyDrop::new(fd), file }
    }

    /// Whether the number still means the same file.
    pub(crate) fn is_ours(&self) -> bool {
        file_of(&self.fd) == self.file
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: nothing uses the value after its drop.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn file_of(fd: &OwnedFd) -> Option<(u64, u64)> {
    rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}
