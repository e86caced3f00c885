//! The connection to the daemon: frames in, frames out, nothing blocks for long.
//!
//! A program may close descriptors that it did not open (`close_range`, a loop over all numbers), and its own files get their
//! numbers next. So the hook's have numbers that are not reused soon, and are looked at before they are used; those that are gone
//! are made again.
#![allow(unsafe_code)] // a descriptor that is closed by hand

use core::mem::ManuallyDrop;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use gshare_core::wire::{MAX_FRAME, Sequence, ToClient, ToDaemon};
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// The lowest number that a descriptor of the hook's has, where the process may have that many.
const LOWEST: i32 = 512;

/// A descriptor of the hook's, as long as the program leaves it alone.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    /// Which file it is: device and inode.
    file: Option<(u64, u64)>,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let fd = rustix::io::fcntl_dupfd_cloexec(&fd, LOWEST).unwrap_or(fd);
        let file = file_of(&fd);
        Self { fd: ManuallyDrop::new(fd), file }
    }

    /// Whether its number still means what it did.
    pub(crate) fn is_ours(&self) -> bool {
        file_of(&self.fd) == self.file
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: nothing uses it after its drop.
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

/// Wakes the helper thread: an eventfd, made again where the program has closed it.
#[derive(Debug)]
pub(crate) struct Bell(Mutex<Option<Arc<Descriptor>>>);

impl Bell {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Self::make()))
    }

    fn make() -> Option<Arc<Descriptor>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        rustix::event::eventfd(0, flags).ok().map(|bell| Arc::new(Descriptor::new(bell)))
    }

    /// The descriptor that becomes readable; `None` while the process has none to spare.
    pub(crate) fn descriptor(&self) -> Option<Arc<Descriptor>> {
        let mut bell = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !bell.as_ref().is_some_and(|bell| bell.is_ours()) {
            *bell = Self::make();
        }
        bell.clone()
    }

    /// Wakes the thread, or has it find its work when it looks next.
    pub(crate) fn ring(&self) {
        if let Some(bell) = self.descriptor() {
            // A full counter means that the thread has been woken already.
            let _ = rustix::io::write(&bell, &1u64.to_ne_bytes());
        }
    }

    /// Makes the descriptor unreadable until the next ring.
    pub(crate) fn hush(bell: &Descriptor) {
        if bell.is_ours() {
            let _ = rustix::io::read(bell, &mut [0u8; 8]);
        }
    }
}

/// One connection; dropped at the first error.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Descriptor,
    sent: Sequence,
    received: Sequence,
    buffer: Vec<u8>,
}

impl Connection {
    /// Connects to the socket at `path`.
    pub(crate) fn open(path: &std::ffi::OsStr) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self {
            socket: Descriptor::new(socket),
            sent: Sequence::default(),
            received: Sequence::default(),
            buffer: Vec::with_capacity(MAX_FRAME),
        })
    }

    /// Sends one message. Waits up to 100 ms for room, once: a daemon that reads nothing is as good as gone.
    pub(crate) fn send(&mut self, message: &ToDaemon) -> io::Result<()> {
        self.check()?;
        self.buffer.clear();
        message.encode(self.sent.stamp(), &mut self.buffer);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&self.socket, &self.buffer, flags) {
            Ok(_) => Ok(()),
            Err(Errno::AGAIN) => {
                let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
                poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], Some(&wait))?;
                rustix::net::send(&self.socket, &self.buffer, flags)?;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The next message that is there, if any.
    pub(crate) fn receive(&mut self) -> io::Result<Option<ToClient>> {
        self.check()?;
        let mut frame = [0u8; MAX_FRAME + 1];
        let mut received = rustix::net::recv(&self.socket, &mut frame, RecvFlags::DONTWAIT);
        if let Err(Errno::CONNRESET) = received {
            // Closed with something of ours unread: that is told first, and then what was said before.
            received = rustix::net::recv(&self.socket, &mut frame, RecvFlags::DONTWAIT);
        }
        let length = match received {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((length, _)) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (sequence, message) = ToClient::decode(&frame[..length]).map_err(io::Error::other)?;
        self.received.check(sequence).map_err(io::Error::other)?;
        Ok(Some(message))
    }

    /// Lets nothing more in, and gives what had come before.
    pub(crate) fn end(&mut self) -> Vec<ToClient> {
        if self.check().is_err() {
            return Vec::new();
        }
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Read);
        core::iter::from_fn(|| self.receive().ok().flatten()).collect()
    }

    fn check(&self) -> io::Result<()> {
        if self.socket.is_ours() { Ok(()) } else { Err(Errno::BADF.into()) }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
