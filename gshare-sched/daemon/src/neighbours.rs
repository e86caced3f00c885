//! Other daemons on the same GPUs. Two daemons that share out one GPU do not know each other's clients, so their shares may add up to
//! more than the GPU.
//!
//! The first daemon of a GPU listens at an abstract socket named after the GPU, and each further daemon connects to that socket. Both
//! then know the process and the user of the other, until the kernel closes the connection with one of them. Any process may take the
//! name, so a neighbour is told and refuses nothing. Daemons in different network namespaces do not find each other.

use crate::peer::peer_of;
use gshare_core::DeviceUuid;
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

/// Most neighbours in the log over the life of a daemon, and most known at a time per GPU.
const MOST: usize = 64;

/// Another daemon on a GPU of this daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Neighbour {
    /// UUID of the GPU.
    pub uuid: String,
    /// Process id of the other daemon; 0 if it is in another pid namespace.
    pub pid: i32,
    /// User id of the other daemon.
    pub uid: u32,
}

impl std::fmt::Display for Neighbour {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { uuid, pid, uid } = self;
        write!(
            f,
            "{uuid} is shared out by a second daemon, process {pid} of user {uid}: the shares of both may add up to more than the \
             GPU; use one daemon for both (GSHARE_SOCKET), or the node's daemon"
        )
    }
}

#[derive(Debug, Default)]
struct Seat {
    /// The socket of the GPU's first daemon.
    listener: Option<UnixListener>,
    others: Vec<(UnixStream, Neighbour)>,
}

/// The neighbours by GPU.
#[derive(Debug, Default)]
pub(crate) struct Neighbours {
    seats: BTreeMap<DeviceUuid, Seat>,
    told: usize,
}

impl Neighbours {
    /// Takes a seat at each new device, and hears which neighbours have come and left. The event loop watches the sockets with `data`.
    pub(crate) fn look(
        &mut self,
        devices: impl Iterator<Item = DeviceUuid>,
        epoll: &OwnedFd,
        data: epoll::EventData,
    ) {
        for uuid in devices {
            self.seats.entry(uuid).or_default();
        }
        for (uuid, seat) in &mut self.seats {
            seat.others.retain(|(socket, _)| is_open(socket));
            let mut news = Vec::new();
            if seat.listener.is_none() && seat.others.is_empty() {
                match take_seat(*uuid) {
                    Ok(Ok(listener)) => {
                        let _ = epoll::add(epoll, &listener, data, epoll::EventFlags::IN);
                        seat.listener = Some(listener);
                    }
                    Ok(Err(other)) => news.push(other),
                    Err(error) => tracing::debug!(%uuid, %error, "other daemons are not looked for"),
                }
            }
            while let Some(Ok((other, _))) = seat.listener.as_ref().map(UnixListener::accept) {
                news.push(other);
            }
            for socket in news {
                let Ok(peer) = peer_of(&socket) else { continue };
                let watched = seat.others.len() < MOST
                    && epoll::add(epoll, &socket, data, epoll::EventFlags::IN).is_ok();
                if !watched {
                    continue;
                }
                let other = Neighbour { uuid: uuid.to_string(), pid: peer.pid, uid: peer.uid };
                if self.told < MOST {
                    self.told += 1;
                    tracing::warn!("{other}");
                }
                seat.others.push((socket, other));
            }
        }
    }

    /// The present neighbours.
    pub(crate) fn all(&self) -> Vec<Neighbour> {
        let others = self.seats.values().flat_map(|seat| &seat.others);
        others.map(|(_, other)| other.clone()).collect()
    }
}

/// The listener of the first daemon on a device, or else a connection to that daemon.
fn take_seat(uuid: DeviceUuid) -> io::Result<Result<UnixListener, UnixStream>> {
    let name = SocketAddr::from_abstract_name(format!("gshare-daemon-of-{uuid}"))?;
    let listener = match UnixListener::bind_addr(&name) {
        Ok(listener) => listener,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let other = UnixStream::connect_addr(&name)?;
            other.set_nonblocking(true)?;
            return Ok(Err(other));
        }
        Err(error) => return Err(error),
    };
    listener.set_nonblocking(true)?;
    Ok(Ok(listener))
}

/// Whether the other end is there. Neighbours say nothing.
fn is_open(socket: impl AsFd) -> bool {
    recv(socket, &mut [0_u8; 1], RecvFlags::DONTWAIT) == Err(Errno::AGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_daemons_on_a_gpu_know_each_other_while_both_are_there() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let mut bytes = [7; 16];
        bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        let own = DeviceUuid::gpu(bytes);
        let look = |daemon: &mut Neighbours| {
            daemon.look(std::iter::once(own), &epoll, epoll::EventData::new_u64(0));
            daemon.all()
        };
        let (mut first, mut second) = (Neighbours::default(), Neighbours::default());
        assert_eq!(look(&mut first), []);
        let found = look(&mut second);
        let [other] = &found[..] else { panic!("{found:?}") };
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!((other.pid, other.uid), (pid, rustix::process::geteuid().as_raw()));
        assert!(other.to_string().contains("a second daemon, process"), "{other}");
        assert_eq!(look(&mut first).len(), 1);
        drop(first);
        assert_eq!(look(&mut second), [], "and it has the seat now");
        let mut third = Neighbours::default();
        assert_eq!((look(&mut third).len(), look(&mut second).len()), (1, 1));
        drop(third);
        assert_eq!(look(&mut second), []);
    }
}
