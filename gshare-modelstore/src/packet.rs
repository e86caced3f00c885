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
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
    rustix::io::retry_on_intr(|| sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags))?;
    Ok(())
}

/// Waits for a packet; its length, 0 when the peer is gone. Descriptors are appended.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8; MAX_FRAME + 1],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(bytes)];
    let message =
        rustix::io::retry_on_intr(|| recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a packet, or its descriptors, of more than is allowed",
        ));
    }
    Ok(message.bytes)
}
