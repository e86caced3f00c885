//! The connection to the daemon, which carries frames both ways and never blocks for long.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use gshare_core::wire::{MAX_FRAME, Sequence, ToClient, ToDaemon};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::sys::descriptor::Descriptor;

/// One connection, dropped at the first error.
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

    /// Sends one message. The call waits up to 100 ms for room, once, because a daemon that reads nothing is as good as gone.
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

    /// The next arrived message, if any.
    pub(crate) fn receive(&mut self) -> io::Result<Option<ToClient>> {
        self.check()?;
        let mut frame = [0u8; MAX_FRAME + 1];
        let mut received = rustix::net::recv(&self.socket, &mut frame, RecvFlags::DONTWAIT);
        if let Err(Errno::CONNRESET) = received {
            // The daemon closed the socket with a frame of ours unread. The kernel reports this first, and then gives the earlier frames.
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

    /// Stops the arrival of frames, and returns the earlier frames.
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
