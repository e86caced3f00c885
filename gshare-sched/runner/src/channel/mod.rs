//! The channel between two stages of a pipeline: large messages from one process to another of the same host.
//!
//! # Problem
//! Stages run in processes of their own, each on its slice, and no slice can read another's memory: what one stage
//! makes goes through host memory (FluidFaaS, section 5.2.1). The paper measures 10 to 40 ms for that; most of it is
//! page faults of fresh buffers, and copies.
//!
//! # Terms
//! - **slot**: room for one message, in memory that both processes map. **Tag**: a number that travels with a message;
//! - **loan**: a slot that the sender writes into, before it publishes it. **Release**: the receiver is done with it.
//!
//! # Algorithm
//! 1. A memory file holds two counters, a descriptor per slot and the slots. Its size is sealed, so that no process can cut
//!    it under a reader, and every page is touched before the first message. Message `n` is in slot `n % slots`.
//! 2. **Send**: while `published - released` is the number of slots, wait (back-pressure). Write in place, store length
//!    and tag, move `published`. **Receive**: while `published` is `released`, wait; check the length; read in place;
//!    on release move `released`. One sender, one receiver: no lock.
//! 3. **Wait**: look for [`ChannelOptions::spin`], then sleep on the other side's counter with a futex. Who moves a
//!    counter wakes the other only if it said that it sleeps.
//! 4. **Copies**, where a side has the message elsewhere: [`Sender::send`] copies it in by chunks of 64 KiB and tells
//!    how far it is; [`Receiver::receive_into`] copies out what is there while the rest is coming. So both copies take
//!    about the time of one. A receiver that sleeps is woken before the first chunk, not after it. What is told is a
//!    hint: the message counts when it is published, and is copied out again if another sender began to write it
//!    meanwhile. A large message is copied past the caches, and a smaller one too while a trial every few messages says
//!    that this is far faster, as it is where the two cores share no cache.
//! 5. **Crash**: a message is there until it is released, so a receiver that starts again gets the one its predecessor
//!    died over. A sender that starts again asks for [`Sender::last_tag`] and does not send again what was published.
//!    With tags that grow, a stage that releases its input after it published its output loses nothing and doubles
//!    nothing. A side that was given the other's pidfd notices its death while it waits, and answers
//!    [`ChannelError::PeerGone`].
//!
//! ## Example
//! Two slots. The sender publishes 0 and 1, then waits: 2 - 0 = 2. The receiver reads 0 and dies before it releases it.
//! Its successor finds `released` = 0 and reads 0 again. It releases; the sender wakes and writes 2 into slot 0.
//!
//! # Invariants
//! `published - released` is from 0 to the number of slots; lengths are at most a slot. A file of which that is not
//! true is refused with [`ChannelError::Corrupt`] before anything is read by it.
//!
//! # Trust
//! The other process may write any byte of the file at any time, and no type of ours says otherwise. Words and slots are atomics;
//! each number that the other side writes is read once, and the copy is checked and used; messages are copied in and out, or
//! looked at byte by byte ([`Message::bytes`]). So a peer that breaks the protocol can garble messages and end the channel, and
//! no more. The sizes are checked in `layout.rs`, which is pure.
//!
//! # Cost
//! In place the same for every size: one cache line from core to core while the other side looks, some 50 to 250 ns,
//! and a futex wake-up when it sleeps. So each side counts for itself, and reads what the other moves when it has to
//! wait: a line that is read before it is written comes twice. With copies one of them on each side, at the same time,
//! and after the wake-up of a receiver that slept.
//!
//! # Differences from the paper
//! It makes a segment per tensor and a queue per stage, as Python's `multiprocessing` does. Nothing of crashes is in
//! it.

mod copy;
mod layout;
mod map;
mod ring;

use copy::{CACHED, Route, append, copy};
use layout::Coming;
use map::{CHUNK, Kernel, Map};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::time::{Duration, Instant};

/// How long a receiver that copies looks for the next chunk before it sleeps: several times what copying one takes.
const CHUNK_PATIENCE: Duration = Duration::from_micros(50);

/// How often a side that spins looks before it reads the clock, which takes as long as a message does: about 1 us.
const LOOKS: u32 = 32;

/// Why a channel could not be made or used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// A size that cannot be.
    #[error("{field} is {value}: {bound}")]
    BadSize {
        /// Name of the size.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The values that are allowed, in words.
        bound: &'static str,
    },
    /// A call to the system failed.
    #[error("{call}: {reason}")]
    Os {
        /// Name of the call.
        call: &'static str,
        /// Error of the system call.
        reason: String,
    },
    /// The file is no channel.
    #[error("not a channel: {what}")]
    Foreign {
        /// The fault that was found in it.
        what: &'static str,
    },
    /// The other side wrote what cannot be. Nothing was read by it.
    #[error("corrupt channel: {field} is {value}, the limit is {limit}")]
    Corrupt {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// The message is larger than a slot.
    #[error("a message of {length} bytes in slots of {slot_bytes}")]
    TooLong {
        /// Its bytes.
        length: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
    },
    /// Nothing happened for the time given.
    #[error("timed out")]
    TimedOut,
    /// The other side said that it will not go on.
    #[error("the other side closed the channel")]
    Closed,
    /// The other side's process is gone.
    #[error("the process on the other side is gone")]
    PeerGone,
}

impl ChannelError {
    fn os(call: &'static str, errno: Errno) -> Self {
        Self::Os { call, reason: errno.to_string() }
    }
}

/// How a side waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelOptions {
    /// How long it looks before it sleeps. 20 us: about what a wake-up costs.
    pub spin: Duration,
    /// How often a sleeper looks whether the other process lives, where it knows it. 20 ms.
    pub check_peer: Duration,
}

impl Default for ChannelOptions {
    fn default() -> Self {
        Self { spin: Duration::from_micros(20), check_peer: Duration::from_millis(20) }
    }
}

/// A channel that no process uses yet: a memory file, to be given to two processes.
#[derive(Debug)]
pub struct Channel {
    map: Map,
}

impl Channel {
    /// Makes one with `slots` (a power of two, at least 2) of `slot_bytes`, every page of it touched.
    ///
    /// # Errors
    /// [`ChannelError::BadSize`], [`ChannelError::Os`].
    pub fn create(slots: u32, slot_bytes: u64) -> Result<Self, ChannelError> {
        Ok(Self { map: Map::create(slots, slot_bytes)? })
    }

    /// The channel in a file that was made by [`Channel::create`], perhaps in another process.
    ///
    /// # Errors
    /// [`ChannelError::Foreign`] when it is no such file.
    pub fn open(fd: OwnedFd) -> Result<Self, ChannelError> {
        Ok(Self { map: Map::open(fd)? })
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.map.layout.slot_bytes
    }

    /// The side that sends. There must be one at a time.
    pub fn into_sender(self, options: ChannelOptions) -> Sender {
        let (next, released) = (self.map.published().seen(), self.map.released().seen());
        let side = Side { map: self.map, options, peer: None };
        Sender { side, next, released, route: Route::default() }
    }

    /// The side that receives. There must be one at a time.
    pub fn into_receiver(self, options: ChannelOptions) -> Receiver {
        let next = self.map.released().seen();
        Receiver { side: Side { map: self.map, options, peer: None }, next, length: 0, tag: 0 }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.fd()
    }
}

#[derive(Debug)]
struct Side {
    map: Map,
    options: ChannelOptions,
    peer: Option<OwnedFd>,
}

impl Side {
    /// Messages published and not released, for the side that does not count the one of the two itself.
    #[inline]
    fn filled(&self, published: u32, released: u32) -> Result<u32, ChannelError> {
        let filled = published.wrapping_sub(released);
        if filled > self.map.layout.slots {
            let (value, limit) = (filled.into(), self.map.layout.slots.into());
            return Err(ChannelError::Corrupt { field: "published - released", value, limit });
        }
        Ok(filled)
    }

    fn peer_is_gone(&self) -> bool {
        let Some(peer) = &self.peer else { return false };
        let mut fds = [PollFd::new(peer, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Waits until `ready`.
    fn wait(
        &self,
        timeout: Option<Duration>,
        sends: bool,
        ready: impl Fn() -> bool,
    ) -> Result<(), ChannelError> {
        let looks = if self.options.spin.is_zero() { 1 } else { LOOKS };
        let mut begun = None;
        loop {
            // A message that comes soon is there before the clock could be read.
            for _ in 0..looks {
                if ready() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            // Order matters: what was sent before a close or a death is still received.
            let closed = if sends { self.map.receiver_closed() } else { self.map.sender_closed() };
            let closed = closed.load(Ordering::SeqCst) != 0;
            if ready() {
                return Ok(());
            }
            if closed {
                return Err(ChannelError::Closed);
            }
            let waited = begun.get_or_insert_with(Instant::now).elapsed();
            if waited < self.options.spin {
                continue;
            }
            let left = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(waited));
            if left.is_zero() {
                return Err(ChannelError::TimedOut);
            }
            let turn = if sends { self.map.released() } else { self.map.published() };
            let seen = turn.seen();
            if ready() {
                return Ok(());
            }
            if self.peer_is_gone() {
                // The peer may have moved its counter before it died.
                return if ready() { Ok(()) } else { Err(ChannelError::PeerGone) };
            }
            // Without a peer to look after a second is as good as for ever.
            let check = if self.peer.is_some() { self.options.check_peer } else { Duration::from_secs(1) };
            turn.sleep(seen, &Kernel { at_most: left.min(check) });
        }
    }

    fn close(&self, sends: bool) {
        let kernel = Kernel { at_most: Duration::ZERO };
        let (flag, turn) = if sends {
            (self.map.sender_closed(), self.map.published())
        } else {
            (self.map.receiver_closed(), self.map.released())
        };
        flag.store(1, Ordering::SeqCst);
        ring::Futex::wake(&kernel, turn.count);
    }
}

/// The side that sends.
#[derive(Debug)]
pub struct Sender {
    side: Side,
    next: u32,
    /// Messages that were released when it last looked. It looks again when there is no room by that: the counter is on
    /// a cache line that the receiver writes.
    released: u32,
    route: Route,
}

impl Sender {
    /// Watches the receiver's process by its pidfd while it waits.
    #[must_use]
    pub fn with_peer(mut self, pidfd: OwnedFd) -> Self {
        self.side.peer = Some(pidfd);
        self
    }

    /// A slot to write into; waits while none is free.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`], [`ChannelError::Closed`], [`ChannelError::PeerGone`], [`ChannelError::Corrupt`].
    #[inline]
    pub fn loan(&mut self, timeout: Option<Duration>) -> Result<Loan<'_>, ChannelError> {
        if self.next.wrapping_sub(self.released) >= self.side.map.layout.slots {
            self.look_for_room(timeout)?;
        }
        Ok(Loan { sender: self })
    }

    fn look_for_room(&mut self, timeout: Option<Duration>) -> Result<(), ChannelError> {
        let (side, next) = (&self.side, self.next);
        let (published, released) = (side.map.published(), side.map.released());
        self.released = released.seen();
        if next.wrapping_sub(self.released) < side.map.layout.slots {
            return Ok(());
        }
        let full = self.released;
        side.filled(published.seen(), full)?;
        side.wait(timeout, true, || released.seen() != full)?;
        self.released = released.seen();
        side.filled(published.seen(), self.released)?;
        Ok(())
    }

    /// Copies a message into a slot and publishes it.
    ///
    /// # Errors
    /// As [`Sender::loan`], and [`ChannelError::TooLong`].
    #[inline]
    pub fn send(&mut self, tag: u64, message: &[u8], timeout: Option<Duration>) -> Result<(), ChannelError> {
        self.fits(message.len() as u64)?;
        self.loan(timeout)?.send(tag, message)
    }

    #[inline]
    fn fits(&self, length: u64) -> Result<(), ChannelError> {
        let slot_bytes = self.side.map.layout.slot_bytes;
        if length > slot_bytes { Err(ChannelError::TooLong { length, slot_bytes }) } else { Ok(()) }
    }

    /// The tag of the last message that was published, by any process; none before the first.
    pub fn last_tag(&self) -> Option<u64> {
        let tag = self.side.map.tag(self.next.wrapping_sub(1)).load(Ordering::Acquire);
        (tag != u64::MAX).then_some(tag)
    }

    /// Nothing more will come. What was published can still be received.
    pub fn close(&self) {
        self.side.close(true);
    }
}

impl AsFd for Sender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.side.map.fd()
    }
}

/// A slot that is being written.
#[derive(Debug)]
pub struct Loan<'a> {
    sender: &'a mut Sender,
}

impl Loan<'_> {
    /// The slot, to be written in place. It holds what an earlier message left there. Atomics, since nothing keeps the other
    /// process from writing there too.
    #[inline]
    pub fn bytes(&self) -> &[AtomicU8] {
        self.sender.side.map.slot(self.sender.next)
    }

    /// Copies a message in and publishes it. `tag` is anything but `u64::MAX`.
    ///
    /// # Errors
    /// [`ChannelError::TooLong`]; nothing is published then.
    #[inline]
    pub fn send(mut self, tag: u64, message: &[u8]) -> Result<(), ChannelError> {
        let length = message.len() as u64;
        self.sender.fits(length)?;
        if message.len() > CHUNK {
            let coming = self.fill(message);
            return self.publish_as(tag, length, Some(coming));
        }
        // Two calls for nothing take a third as long as the message does.
        if !message.is_empty() {
            copy(self.bytes(), message, false);
        }
        self.publish(tag, length)
    }

    /// Copies a message in while the receiver copies it out. Answers how it is there then.
    fn fill(&mut self, message: &[u8]) -> Coming {
        self.begin();
        let Sender { side, next, route, .. } = &mut *self.sender;
        let large = message.len() > CACHED;
        let from = if large { 0 } else { route.begin(side.map.slot(*next), message) };
        let far = large || route.is_past();
        self.copy_in(message, from, far);
        Coming { chunks: None, far }
    }

    /// Tells that a message will be copied in. A receiver that sleeps wakes up while its first chunks are copied.
    fn begin(&mut self) {
        let (map, number) = (&self.sender.side.map, self.sender.next);
        let attempt = map.attempt(number);
        // A reader that sees the remains of an earlier attempt sees, after that, that it was one.
        attempt.store(attempt.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        map.tell(number, Some(Coming { chunks: Some(0), far: false }));
        map.published().nudge(&Kernel { at_most: Duration::ZERO });
    }

    /// Copies a message in from that byte on, and tells after each chunk but the last how far it is.
    fn copy_in(&mut self, message: &[u8], mut from: usize, far: bool) {
        let (map, number) = (&self.sender.side.map, self.sender.next);
        let slot = map.slot(number);
        while from < message.len() {
            let end = message.len().min((from / CHUNK + 1) * CHUNK);
            copy(&slot[from..], &message[from..end], far);
            from = end;
            if from < message.len() {
                map.tell(number, Some(Coming { chunks: Some((from / CHUNK) as u64), far }));
                map.published().nudge(&Kernel { at_most: Duration::ZERO });
            }
        }
    }

    /// Publishes its first `length` bytes. `tag` is anything but `u64::MAX`.
    ///
    /// # Errors
    /// [`ChannelError::TooLong`]; nothing is published then.
    #[inline]
    pub fn publish(self, tag: u64, length: u64) -> Result<(), ChannelError> {
        self.publish_as(tag, length, None)
    }

    /// Publishes what was copied in as `coming` says, or, without it, written in place.
    #[inline]
    fn publish_as(self, tag: u64, length: u64, coming: Option<Coming>) -> Result<(), ChannelError> {
        self.sender.fits(length)?;
        let Sender { side, next, .. } = self.sender;
        let tag = tag.min(u64::MAX - 1);
        // Told with the message and not before: a predecessor that died at this point copied in something else.
        side.map.tell(*next, coming);
        let (latest_length, latest_tag) = side.map.latest(*next);
        // The counter's line last: the receiver, which looks at it, would take it away in between.
        for (length_at, tag_at) in
            [(side.map.length(*next), side.map.tag(*next)), (latest_length, latest_tag)]
        {
            length_at.store(length, Ordering::Relaxed);
            tag_at.store(tag, Ordering::Relaxed);
        }
        *next = next.wrapping_add(1);
        side.map.published().advance(*next, &Kernel { at_most: Duration::ZERO });
        Ok(())
    }
}

/// The side that receives.
#[derive(Debug)]
pub struct Receiver {
    side: Side,
    next: u32,
    /// Length and tag of the message that was received last. They are here for a [`Message`] to be one word:
    /// a larger one is handed over through memory, which took 13 ns of 65 without link-time optimisation.
    length: u64,
    tag: u64,
}

impl Receiver {
    /// Watches the sender's process by its pidfd while it waits.
    #[must_use]
    pub fn with_peer(mut self, pidfd: OwnedFd) -> Self {
        self.side.peer = Some(pidfd);
        self
    }

    /// The next message, to be read in place; waits while there is none. It is released when it is dropped.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`], [`ChannelError::Closed`], [`ChannelError::PeerGone`] (these three when nothing is
    /// left to be received), [`ChannelError::Corrupt`].
    #[inline]
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Message<'_>, ChannelError> {
        let (side, next) = (&self.side, self.next);
        let published = side.map.published();
        let mut count = published.seen();
        if count == next {
            self.wait_for_one(timeout)?;
            count = published.seen();
        }
        side.filled(count, next)?;
        let (value, tag) = side.map.described(next, count);
        let limit = side.map.layout.slot_bytes;
        if value > limit {
            return Err(ChannelError::Corrupt { field: "length", value, limit });
        }
        (self.length, self.tag) = (value, tag);
        Ok(Message { receiver: self })
    }

    fn wait_for_one(&self, timeout: Option<Duration>) -> Result<(), ChannelError> {
        let (published, next) = (self.side.map.published(), self.next);
        self.side.wait(timeout, false, || published.seen() != next)
    }

    /// The next message, copied into `buffer` in the place of what was in it, and released; answers with its tag. A
    /// message that is still being copied in by [`Sender::send`] is copied out meanwhile.
    ///
    /// # Errors
    /// As [`Receiver::receive`]; the message is not released then, and the buffer is empty.
    pub fn receive_into(
        &mut self,
        buffer: &mut Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<u64, ChannelError> {
        buffer.clear();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let begun = self.copy_ahead(buffer, deadline);
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let message = match self.receive(left) {
            Ok(message) => message,
            Err(error) => {
                buffer.clear();
                return Err(error);
            }
        };
        let (map, number) = (&message.receiver.side.map, message.receiver.next);
        // The part that was copied before the message was published must be of this message, and of its last attempt.
        fence(Ordering::Acquire);
        let came = map.coming(number);
        let whole = came.is_some_and(|coming| coming.chunks.is_none());
        let same = begun == Some(map.attempt(number).load(Ordering::Relaxed));
        if !whole || !same || buffer.len() > message.bytes().len() {
            buffer.clear();
        }
        append(buffer, &message.bytes()[buffer.len()..], came.is_some_and(|coming| coming.far));
        Ok(message.tag())
    }

    /// Copies out what there is of a message that is not published yet, until it is. Answers with the attempt that was
    /// copied from.
    fn copy_ahead(&self, buffer: &mut Vec<u8>, deadline: Option<Instant>) -> Option<u64> {
        let (side, number) = (&self.side, self.next);
        let map = &side.map;
        let slot = map.slot(number);
        // Chunks of this message that are there, and whether they are far; none if it is not being copied in. If all
        // are there, it is about to be published, and only then it is known where it ends.
        let there = |copied: usize| {
            let Some(Coming { chunks, far }) = map.coming(number) else { return (0, false) };
            let chunks = chunks.map_or(copied, |chunks| usize::try_from(chunks).unwrap_or(usize::MAX));
            (chunks.min(slot.len().div_ceil(CHUNK)), far)
        };
        let published = || map.published().seen() != number;
        let left = || deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let begun = || map.coming(number).is_some() && map.attempt(number).load(Ordering::Relaxed) != 0;
        // An error here shows when the message is received.
        side.wait(left(), false, || published() || begun()).ok()?;
        let attempt = map.attempt(number).load(Ordering::Acquire);
        let mut copied = 0;
        while !published() {
            let (chunks, far) = there(copied);
            if chunks < copied || map.attempt(number).load(Ordering::Relaxed) != attempt {
                // Another sender writes it again: it will be copied when that is done.
                return None;
            }
            if chunks > copied {
                append(buffer, slot.get(copied * CHUNK..slot.len().min(chunks * CHUNK))?, far);
                copied = chunks;
                continue;
            }
            let begun = Instant::now();
            while there(copied).0 == copied && !published() && begun.elapsed() < CHUNK_PATIENCE {
                std::hint::spin_loop();
            }
            if there(copied).0 == copied && !published() {
                side.wait(left(), false, || published() || there(copied).0 != copied).ok()?;
            }
        }
        Some(attempt)
    }

    /// Nothing more will be received.
    pub fn close(&self) {
        self.side.close(false);
    }
}

impl AsFd for Receiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.side.map.fd()
    }
}

/// A message, in its slot until it is dropped.
#[derive(Debug)]
pub struct Message<'a> {
    receiver: &'a mut Receiver,
}

impl Message<'_> {
    /// Its bytes, in place. Atomics, since nothing keeps the other process from writing there: one that breaks the protocol may
    /// change a byte after it was looked at. A reader that decides by the bytes copies them first ([`Message::read`]).
    #[inline]
    pub fn bytes(&self) -> &[AtomicU8] {
        let slot = self.receiver.side.map.slot(self.receiver.next);
        // Checked when it was received.
        &slot[..usize::try_from(self.receiver.length).unwrap_or(0).min(slot.len())]
    }

    /// Copies it into `buffer`, in the place of what was in it.
    pub fn read(&self, buffer: &mut Vec<u8>) {
        buffer.clear();
        append(buffer, self.bytes(), false);
    }

    /// Its tag.
    #[inline]
    pub const fn tag(&self) -> u64 {
        self.receiver.tag
    }

    /// Leaves it in the channel: the next [`Receiver::receive`] gets it again.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Message<'_> {
    #[inline]
    fn drop(&mut self) {
        let Receiver { side, next, .. } = &mut *self.receiver;
        *next = next.wrapping_add(1);
        side.map.released().advance(*next, &Kernel { at_most: Duration::ZERO });
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
