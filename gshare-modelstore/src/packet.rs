//! One packet with its descriptors, over a `SOCK_SEQPACKET` Unix socket.
#![allow(unsafe_code, reason = "an ioctl without a safe wrapper")]

use crate::frame::{MAX_DESCRIPTORS, MAX_FRAME};
use rustix::cmsg_space;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// Sends a packet, without `SIGPIPE`. With `wait` it waits for a peer that does not read.
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

/// The descriptors of one packet, in order. Descriptors that are not taken are closed.
#[derive(Debug, Default)]
pub(crate) struct Descriptors(pub(crate) [Option<OwnedFd>; MAX_DESCRIPTORS]);

impl Descriptors {
    pub(crate) fn count(&self) -> usize {
        self.0.iter().flatten().count()
    }

    /// Takes the next descriptor.
    pub(crate) fn next(&mut self) -> Option<OwnedFd> {
        self.0.iter_mut().find_map(Option::take)
    }
}

/// Waits for a packet. Returns its length, 0 if the peer is gone, and its descriptors.
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

/// The least memory in bytes that the kernel books for an unread packet: its two administrative structures have 576 bytes on 64-bit
/// Linux.
const LEAST_PACKET: usize = 512;

/// Upper bound of the sent packets that the peer has neither read nor dropped with its socket, from their memory in the
/// kernel (`SIOCOUTQ`).
pub(crate) fn unread(socket: impl AsFd) -> io::Result<usize> {
    const SIOCOUTQ: Opcode = 0x5411;
    // SAFETY: the kernel writes one `int` for this request, on every kind of socket that has it.
    let bytes: i32 = unsafe { ioctl(socket, Getter::<SIOCOUTQ, i32>::new()) }?;
    Ok(usize::try_from(bytes).unwrap_or(0).div_ceil(LEAST_PACKET))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn unread_packets_are_never_fewer_than_there_are() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        assert_eq!(unread(&ours).unwrap(), 0);
        for sent in 1..=20 {
            send(&ours, &[7; 65], &[ours.as_fd()], false).unwrap();
            let counted = unread(&ours).unwrap();
            assert!((sent..=3 * sent).contains(&counted), "{counted} for {sent}");
        }
        let mut bytes = [0; MAX_FRAME + 1];
        for _ in 0..19 {
            receive(&theirs, &mut bytes).unwrap();
        }
        assert!((1..=3).contains(&unread(&ours).unwrap()));
        rustix::net::shutdown(&ours, rustix::net::Shutdown::Both).unwrap();
        assert!(unread(&ours).unwrap() > 0, "the peer can still read it");
        drop(theirs);
        assert_eq!(unread(&ours).unwrap(), 0);
    }
}
