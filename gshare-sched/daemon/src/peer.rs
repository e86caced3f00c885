//! The process at the other end of a UNIX socket, by the kernel's word.
#![allow(unsafe_code, reason = "rustix has no place for the pid of a peer that is not to be seen")]

use gshare_sched::node::Peer;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// The connected process.
pub(crate) fn peer_of(socket: impl AsFd) -> io::Result<Peer> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and `credentials` has `length` bytes. Any bytes from the kernel are a valid value of its
    // type, which is three integers.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer { pid: credentials.pid, uid: credentials.uid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_known_by_its_socket() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = Peer {
            pid: i32::try_from(std::process::id()).unwrap(),
            uid: rustix::process::geteuid().as_raw(),
        };
        assert_eq!(peer_of(&socket).unwrap(), own);
        assert!(peer_of(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
