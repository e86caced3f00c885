//! One packet with its descriptors, over a `SOCK_SEQPACKET` Unix socket.

use crate::frame::{MAX_DESCRIPTORS, MAX_FRAME};
use rustix::cmsg_space;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Sends a packet. Never kills the process by a signal; `wait` says whether to wait for a peer that does not read.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    wait: bool,
) -> io::Result<()> {
    let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
    if descriptors.is_empty() {
        // The shorter way through the kernel.
        rustix::io::retry_on_intr(|| rustix::net::send(&socket, bytes, flags))?;
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    rustix::io::retry_on_intr(|| sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags))?;
    Ok(())
}

/// The descriptors of one packet, in their order; what is not taken is closed.
#[derive(Debug, Default)]
pub(crate) struct Descriptors(pub(crate) [Option<OwnedFd>; MAX_DESCRIPTORS]);

impl Descriptors {
    pub(crate) fn count(&self) -> usize {
        self.0.iter().flatten().count()
    }

    /// The first that was not taken.
    pub(crate) fn next(&mut self) -> Option<OwnedFd> {
        self.0.iter_mut().find_map(Option::take)
    }
}

/// Waits for a packet: its length, 0 when the peer is gone, and what came with it.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8; MAX_FRAME + 1],
) -> io::Result<(usize, Descriptors)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(bytes)];
    let message =
        rustix::io::retry_on_intr(|| recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    let mut descriptors = Descriptors::default();
    let mut free = descriptors.0.iter_mut();
    let mut more = false;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            for descriptor in rights {
                match free.next() {
                    Some(place) => *place = Some(descriptor),
                    None => more = true,
                }
            }
        }
    }
    if more || message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a packet, or its descriptors, of more than is allowed",
        ));
    }
    Ok((message.bytes, descriptors))
}
