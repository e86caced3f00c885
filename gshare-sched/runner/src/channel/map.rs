//! The shared memory of a channel. `unsafe` is here because memory that another process maps cannot be checked by the
//! compiler: references into it are made in this file only, from offsets that were checked against its sealed size.
#![allow(unsafe_code)]

use super::ChannelError;
use super::ring::{Futex, Turn};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

const MAGIC: u64 = 0x6773_6861_7265_6368;
const VERSION: u32 = 3;
pub(super) const PAGE: u64 = 4096;
/// Bytes of a descriptor: a cache line.
const DESCRIPTOR: u64 = 64;
/// The most slots of a channel.
pub(super) const MAX_SLOTS: u32 = 1024;
/// The most bytes of all slots: 1 TiB.
const MAX_BYTES: u64 = 1 << 40;

// Places in the first page. Words that different sides write are a cache line apart.
const AT_MAGIC: u64 = 0;
const AT_VERSION: u64 = 8;
const AT_SLOTS: u64 = 12;
const AT_SLOT_BYTES: u64 = 16;
const AT_HEAD: u64 = 128;
/// On the line of the counter: length and tag of the last even and the last odd message.
const AT_LATEST: u64 = AT_HEAD + 16;
const AT_HEAD_ASLEEP: u64 = 192;
const AT_TAIL: u64 = 256;
const AT_TAIL_ASLEEP: u64 = 320;
const AT_SENDER_CLOSED: u64 = 384;
const AT_RECEIVER_CLOSED: u64 = 448;

/// How far the copy of a message has come. In its word: the message's number in the upper half; in the lower one bit
/// for `far`, and below it the chunks, all ones for none that are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Coming {
    /// [`CHUNK`]s that are there; none if it is all there.
    pub(super) chunks: Option<u64>,
    /// What is there is in memory, not in the sender's cache.
    pub(super) far: bool,
}

const FAR: u64 = 1 << 31;

impl Coming {
    #[inline]
    fn of(message: u32, word: u64) -> Option<Self> {
        let chunks = word & (FAR - 1);
        let chunks = (chunks != FAR - 1).then_some(chunks);
        (word >> 32 == u64::from(message)).then_some(Self { chunks, far: word & FAR != 0 })
    }

    #[inline]
    fn word(self, message: u32) -> u64 {
        let chunks = self.chunks.unwrap_or(FAR - 1);
        u64::from(message) << 32 | if self.far { FAR } else { 0 } | chunks
    }
}

/// A mapped, sealed memory file. See the module above it for its meaning.
#[derive(Debug)]
pub(super) struct Map {
    fd: OwnedFd,
    raw: MmapRaw,
    pub(super) slots: u32,
    pub(super) slot_bytes: u64,
    data: u64,
}

/// Bytes of the file, and where the slots begin.
fn layout(slots: u32, slot_bytes: u64) -> Result<(u64, u64), ChannelError> {
    if !(2..=MAX_SLOTS).contains(&slots) || !slots.is_power_of_two() {
        let bound = "need a power of two from 2 to 1024";
        return Err(ChannelError::BadSize { field: "slots", value: slots.into(), bound });
    }
    if slot_bytes == 0 || slot_bytes > MAX_BYTES / u64::from(slots) {
        let bound = "need more than 0, and at most 1 TiB for all slots";
        return Err(ChannelError::BadSize { field: "slot_bytes", value: slot_bytes, bound });
    }
    let data = PAGE + (u64::from(slots) * DESCRIPTOR).next_multiple_of(PAGE);
    Ok((data + u64::from(slots) * slot_bytes.next_multiple_of(PAGE), data))
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

impl Map {
    pub(super) fn create(slots: u32, slot_bytes: u64) -> Result<Self, ChannelError> {
        let (bytes, data) = layout(slots, slot_bytes)?;
        let fd = rustix::fs::memfd_create("gshare-channel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| ChannelError::os("memfd_create", errno))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(|errno| ChannelError::os("ftruncate", errno))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)
            .map_err(|errno| ChannelError::os("seal", errno))?;
        let map = Self::over(fd, bytes, slots, slot_bytes, data)?;
        for slot in 0..slots {
            map.u64_at(map.descriptor(slot) + 8).store(u64::MAX, Ordering::Relaxed);
        }
        map.u32_at(AT_SLOTS).store(slots, Ordering::Relaxed);
        map.u64_at(AT_SLOT_BYTES).store(slot_bytes, Ordering::Relaxed);
        map.u32_at(AT_VERSION).store(VERSION, Ordering::Relaxed);
        map.u64_at(AT_MAGIC).store(MAGIC, Ordering::Release);
        Ok(map)
    }

    /// Maps a file that somebody else made, after checking that it is what it says.
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
        let head =
            Self::over(fd.try_clone().map_err(|_| foreign("it cannot be duplicated"))?, PAGE, 0, 0, PAGE)?;
        if head.u64_at(AT_MAGIC).load(Ordering::Acquire) != MAGIC
            || head.u32_at(AT_VERSION).load(Ordering::Relaxed) != VERSION
        {
            return Err(foreign("it has another mark or version"));
        }
        let slots = head.u32_at(AT_SLOTS).load(Ordering::Relaxed);
        let slot_bytes = head.u64_at(AT_SLOT_BYTES).load(Ordering::Relaxed);
        let (bytes, data) = layout(slots, slot_bytes)?;
        if bytes != size {
            return Err(foreign("its size is not that of its slots"));
        }
        Self::over(fd, bytes, slots, slot_bytes, data)
    }

    fn over(fd: OwnedFd, bytes: u64, slots: u32, slot_bytes: u64, data: u64) -> Result<Self, ChannelError> {
        let length = usize::try_from(bytes).map_err(|_| ChannelError::Foreign { what: "it is too large" })?;
        // Page faults are most of what a fresh buffer costs: all pages are there before the first message.
        let raw = MmapOptions::new()
            .len(length)
            .populate()
            .map_raw(&fd)
            .map_err(|error| ChannelError::Os { call: "mmap", reason: error.to_string() })?;
        Ok(Self { fd, raw, slots, slot_bytes, data })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    #[inline]
    fn u32_at(&self, at: u64) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(4) && at + 4 <= self.raw.len() as u64);
        // SAFETY: the callers' places are below the size that was mapped (constants in the first page, descriptors of
        // slots below `slots`), aligned, and the mapping lives as long as `self`. An atomic may be shared with others.
        unsafe { &*self.raw.as_mut_ptr().add(usize::try_from(at).unwrap_or(0)).cast::<AtomicU32>() }
    }

    #[inline]
    fn u64_at(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at + 8 <= self.raw.len() as u64);
        // SAFETY: as for `u32_at`.
        unsafe { &*self.raw.as_mut_ptr().add(usize::try_from(at).unwrap_or(0)).cast::<AtomicU64>() }
    }

    /// The number of slots is a power of two.
    #[inline]
    fn slot_of(&self, message: u32) -> u32 {
        message & (self.slots - 1)
    }

    #[inline]
    fn descriptor(&self, slot: u32) -> u64 {
        PAGE + u64::from(slot) * DESCRIPTOR
    }

    /// Messages that were published; the receiver sleeps on it.
    #[inline]
    pub(super) fn published(&self) -> Turn<'_> {
        Turn { count: self.u32_at(AT_HEAD), asleep: self.u32_at(AT_HEAD_ASLEEP) }
    }

    /// Messages that were released; the sender sleeps on it.
    #[inline]
    pub(super) fn released(&self) -> Turn<'_> {
        Turn { count: self.u32_at(AT_TAIL), asleep: self.u32_at(AT_TAIL_ASLEEP) }
    }

    pub(super) fn sender_closed(&self) -> &AtomicU32 {
        self.u32_at(AT_SENDER_CLOSED)
    }

    pub(super) fn receiver_closed(&self) -> &AtomicU32 {
        self.u32_at(AT_RECEIVER_CLOSED)
    }

    /// Length and tag of the last message that was published with the same lowest bit as this one. They come on one
    /// cache line with the counter, which is all that a receiver that waits has to fetch then.
    #[inline]
    pub(super) fn latest(&self, message: u32) -> (&AtomicU64, &AtomicU64) {
        let at = AT_LATEST + u64::from(message % 2) * 16;
        (self.u64_at(at), self.u64_at(at + 8))
    }

    /// Length and tag of a published message, when so many were `published`: off the counter's line if it is the last
    /// one, else from its descriptor.
    #[inline]
    pub(super) fn described(&self, message: u32, published: u32) -> (u64, u64) {
        if published == message.wrapping_add(1) {
            let (length, tag) = self.latest(message);
            let both = (length.load(Ordering::Acquire), tag.load(Ordering::Acquire));
            // Nobody wrote there if it still is: the next but one is described after the next was counted, with the
            // fence of `Turn::advance` between.
            if self.published().seen() == published {
                return both;
            }
        }
        (self.length(message).load(Ordering::Relaxed), self.tag(message).load(Ordering::Relaxed))
    }

    /// Bytes of the message in a slot.
    #[inline]
    pub(super) fn length(&self, message: u32) -> &AtomicU64 {
        self.u64_at(self.descriptor(self.slot_of(message)))
    }

    /// Its tag.
    #[inline]
    pub(super) fn tag(&self, message: u32) -> &AtomicU64 {
        self.u64_at(self.descriptor(self.slot_of(message)) + 8)
    }

    /// How far the copy of a message into its slot has come: a [`Coming`].
    #[inline]
    fn coming_at(&self, message: u32) -> &AtomicU64 {
        self.u64_at(self.descriptor(self.slot_of(message)) + 16)
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

    /// How often somebody began to copy a message into that slot.
    #[inline]
    pub(super) fn attempt(&self, message: u32) -> &AtomicU64 {
        self.u64_at(self.descriptor(self.slot_of(message)) + 24)
    }

    #[inline]
    fn slot(&self, message: u32) -> *mut u8 {
        let slot = u64::from(self.slot_of(message)) * self.slot_bytes.next_multiple_of(PAGE);
        let at = usize::try_from(self.data + slot).unwrap_or(0);
        // SAFETY: slots below `slots` are within the mapping, see `layout`.
        unsafe { self.raw.as_mut_ptr().add(at) }
    }

    /// The slot of a message that is not published yet.
    #[expect(clippy::mut_from_ref, reason = "the memory is the mapping's, not this struct's")]
    #[inline]
    pub(super) fn slot_mut(&self, message: u32) -> &mut [u8] {
        let bytes = usize::try_from(self.slot_bytes).unwrap_or(0);
        // SAFETY: within the mapping; the one sender has one loan at a time (it borrows the sender mutably), and the
        // receiver looks at a slot only between its publication and its release. A peer that breaks that is one of
        // our own processes gone wrong: both ends belong to one function.
        unsafe { std::slice::from_raw_parts_mut(self.slot(message), bytes) }
    }

    /// The first `length` bytes of the slot of a message that is published and not released.
    #[inline]
    pub(super) fn slot_ref(&self, message: u32, length: u64) -> &[u8] {
        let bytes = usize::try_from(length.min(self.slot_bytes)).unwrap_or(0);
        // SAFETY: within the mapping; the sender does not touch a slot between its publication and its release.
        unsafe { std::slice::from_raw_parts(self.slot(message), bytes) }
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
