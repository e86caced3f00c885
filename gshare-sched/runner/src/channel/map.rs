//! The shared memory of a channel. `unsafe` is here because memory that another process maps cannot be checked by the compiler.
//! The other process may write any byte at any time, so all that is handed out are references to atomics, at places that
//! `layout.rs` computes from sizes that were checked against the file's sealed size.
#![allow(unsafe_code)]

use super::ChannelError;
use super::layout::{
    AT_HEAD, AT_HEAD_ASLEEP, AT_MAGIC, AT_RECEIVER_CLOSED, AT_SENDER_CLOSED, AT_SLOT_BYTES, AT_SLOTS,
    AT_TAIL, AT_TAIL_ASLEEP, AT_VERSION, Coming, Header, Layout, MAGIC, PAGE, VERSION,
};
use super::ring::{Futex, Turn};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A mapped, sealed memory file. See the module above it for its meaning.
#[derive(Debug)]
pub(super) struct Map {
    pages: Pages,
    pub(super) layout: Layout,
}

/// Mapped pages of a file.
#[derive(Debug)]
struct Pages {
    fd: OwnedFd,
    raw: MmapRaw,
}

impl Pages {
    /// Maps the first `bytes` of a file that is at least as large and cannot shrink.
    fn over(fd: OwnedFd, bytes: u64) -> Result<Self, ChannelError> {
        let length = usize::try_from(bytes).map_err(|_| ChannelError::Foreign { what: "it is too large" })?;
        // Page faults are most of what a fresh buffer costs: all pages are there before the first message.
        let raw = MmapOptions::new()
            .len(length)
            .populate()
            .map_raw(&fd)
            .map_err(|error| ChannelError::Os { call: "mmap", reason: error.to_string() })?;
        Ok(Self { fd, raw })
    }

    #[inline]
    fn u32_at(&self, at: u64) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(4) && at + 4 <= self.raw.len() as u64);
        // SAFETY: the callers' places are below the size that was mapped (constants in the first page, descriptors of
        // `layout`), aligned, and the mapping lives as long as `self`. An atomic may be written by others.
        unsafe { &*self.raw.as_mut_ptr().add(usize::try_from(at).unwrap_or(0)).cast::<AtomicU32>() }
    }

    #[inline]
    fn u64_at(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at + 8 <= self.raw.len() as u64);
        // SAFETY: as for `u32_at`.
        unsafe { &*self.raw.as_mut_ptr().add(usize::try_from(at).unwrap_or(0)).cast::<AtomicU64>() }
    }

    /// Each field of the header, read once.
    fn header(&self) -> Header {
        Header {
            magic: self.u64_at(AT_MAGIC).load(Ordering::Acquire),
            version: self.u32_at(AT_VERSION).load(Ordering::Relaxed),
            slots: self.u32_at(AT_SLOTS).load(Ordering::Relaxed),
            slot_bytes: self.u64_at(AT_SLOT_BYTES).load(Ordering::Relaxed),
        }
    }
}

impl Map {
    pub(super) fn create(slots: u32, slot_bytes: u64) -> Result<Self, ChannelError> {
        let layout = Layout::new(slots, slot_bytes)?;
        let fd = rustix::fs::memfd_create("gshare-channel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| ChannelError::os("memfd_create", errno))?;
        rustix::fs::ftruncate(&fd, layout.bytes).map_err(|errno| ChannelError::os("ftruncate", errno))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)
            .map_err(|errno| ChannelError::os("seal", errno))?;
        let map = Self { pages: Pages::over(fd, layout.bytes)?, layout };
        for slot in 0..slots {
            map.tag(slot).store(u64::MAX, Ordering::Relaxed);
        }
        map.pages.u32_at(AT_SLOTS).store(slots, Ordering::Relaxed);
        map.pages.u64_at(AT_SLOT_BYTES).store(slot_bytes, Ordering::Relaxed);
        map.pages.u32_at(AT_VERSION).store(VERSION, Ordering::Relaxed);
        map.pages.u64_at(AT_MAGIC).store(MAGIC, Ordering::Release);
        Ok(map)
    }

    /// Maps a file that another process made, after checking that it is what it says.
    pub(super) fn open(fd: OwnedFd) -> Result<Self, ChannelError> {
        let foreign = |what| ChannelError::Foreign { what };
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| foreign("it is no memory file"))?;
        if !seals.contains(SEALS) {
            return Err(foreign("its size is not sealed"));
        }
        let stat = rustix::fs::fstat(&fd).map_err(|errno| ChannelError::os("fstat", errno))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size < PAGE {
            return Err(foreign("it is smaller than a page"));
        }
        let head = fd.try_clone().map_err(|_| foreign("it cannot be duplicated"))?;
        let layout = Layout::of(Pages::over(head, PAGE)?.header(), size)?;
        Ok(Self { pages: Pages::over(fd, layout.bytes)?, layout })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.pages.fd.as_fd()
    }

    /// Messages that were published; the receiver sleeps on it.
    #[inline]
    pub(super) fn published(&self) -> Turn<'_> {
        Turn { count: self.pages.u32_at(AT_HEAD), asleep: self.pages.u32_at(AT_HEAD_ASLEEP) }
    }

    /// Messages that were released; the sender sleeps on it.
    #[inline]
    pub(super) fn released(&self) -> Turn<'_> {
        Turn { count: self.pages.u32_at(AT_TAIL), asleep: self.pages.u32_at(AT_TAIL_ASLEEP) }
    }

    pub(super) fn sender_closed(&self) -> &AtomicU32 {
        self.pages.u32_at(AT_SENDER_CLOSED)
    }

    pub(super) fn receiver_closed(&self) -> &AtomicU32 {
        self.pages.u32_at(AT_RECEIVER_CLOSED)
    }

    /// Length and tag of the last message that was published with the same lowest bit as this one. They come on one
    /// cache line with the counter, which is all that a receiver that waits has to fetch then.
    #[inline]
    pub(super) fn latest(&self, message: u32) -> (&AtomicU64, &AtomicU64) {
        let at = Layout::latest(message);
        (self.pages.u64_at(at), self.pages.u64_at(at + 8))
    }

    /// Length and tag of a published message, where `published` is the number of all: off the counter's line if it is the
    /// last one, else from its descriptor.
    #[inline]
    pub(super) fn described(&self, message: u32, published: u32) -> (u64, u64) {
        if published == message.wrapping_add(1) {
            let (length, tag) = self.latest(message);
            let both = (length.load(Ordering::Acquire), tag.load(Ordering::Acquire));
            // No sender has written there if the count is unchanged: the next but one is described after the
            // next was counted, with the fence of `Turn::advance` between.
            if self.published().seen() == published {
                return both;
            }
        }
        (self.length(message).load(Ordering::Relaxed), self.tag(message).load(Ordering::Relaxed))
    }

    /// Bytes of the message in a slot.
    #[inline]
    pub(super) fn length(&self, message: u32) -> &AtomicU64 {
        self.pages.u64_at(self.layout.descriptor(message))
    }

    /// Its tag.
    #[inline]
    pub(super) fn tag(&self, message: u32) -> &AtomicU64 {
        self.pages.u64_at(self.layout.descriptor(message) + 8)
    }

    /// How far the copy of a message into its slot has come: a [`Coming`].
    #[inline]
    fn coming_at(&self, message: u32) -> &AtomicU64 {
        self.pages.u64_at(self.layout.descriptor(message) + 16)
    }

    /// How far the copy of this message into its slot has come, if the slot has that of this message. What was copied
    /// in by then is seen.
    #[inline]
    pub(super) fn coming(&self, message: u32) -> Option<Coming> {
        Coming::of(message, self.coming_at(message).load(Ordering::Acquire))
    }

    /// Tells how far it is; without it, that this message is not copied in.
    #[inline]
    pub(super) fn tell(&self, message: u32, coming: Option<Coming>) {
        let word = coming.map_or(!(u64::from(message) << 32), |coming| coming.word(message));
        self.coming_at(message).store(word, Ordering::Release);
    }

    /// How often a sender began to copy a message into that slot.
    #[inline]
    pub(super) fn attempt(&self, message: u32) -> &AtomicU64 {
        self.pages.u64_at(self.layout.descriptor(message) + 24)
    }

    /// The slot of a message. Nothing keeps the other process from writing there, and while a message is copied ahead or
    /// again it does.
    #[inline]
    pub(super) fn slot(&self, message: u32) -> &[AtomicU8] {
        let slot = self.layout.slot(message);
        debug_assert!(slot.end <= self.pages.raw.len() as u64);
        let (at, bytes) = (usize::try_from(slot.start), usize::try_from(slot.end - slot.start));
        let (at, bytes) = (at.unwrap_or(0), bytes.unwrap_or(0));
        // SAFETY: `layout` lies within the mapping, which lives as long as `self`; an atomic byte has no alignment, and may
        // be written by others.
        unsafe { std::slice::from_raw_parts(self.pages.raw.as_mut_ptr().add(at).cast::<AtomicU8>(), bytes) }
    }
}

/// Bytes that are copied in before the other side hears of them: small beside a second-level cache, large beside the
/// cost of telling it.
pub(super) const CHUNK: usize = 64 << 10;

/// The kernel's futex on a word that processes share.
pub(super) struct Kernel {
    pub(super) at_most: Duration,
}

impl Futex for Kernel {
    fn wait(&self, word: &AtomicU32, value: u32) {
        let timeout = rustix::thread::futex::Timespec {
            tv_sec: i64::try_from(self.at_most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: self.at_most.subsec_nanos().into(),
        };
        // EAGAIN, EINTR and a timeout all mean: look again.
        let _ =
            rustix::thread::futex::wait(word, rustix::thread::futex::Flags::empty(), value, Some(&timeout));
    }

    #[cold]
    #[inline(never)]
    fn wake(&self, word: &AtomicU32) {
        let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), u32::MAX >> 1);
    }
}
