//! Other daemons on the same GPUs. Two daemons that share out one GPU do not know each other's clients, so their shares may add up to
//! more than the GPU.
//!
//! The first daemon of a GPU listens at an abstract socket named after the GPU, and each further daemon connects to that socket. Both
//! then know the process and the user of the other, until the kernel closes the connection with one of them. Any process may take the
//! name, so a neighbour is told and refuses nothing. Daemons in different network namespaces do not find each other.

use crate::peer::peer_of;
use gshare_core::DeviceUuid;
use rustix::event::epoll;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

/// Most neighbours in the log over the life of a daemon, most known at a time per GPU, and most taken in at one look.
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
        let process = match pid {
            0 => "a process in another namespace".to_owned(),
            pid => format!("process {pid}"),
        };
        write!(
            f,
            "{uuid} is shared out by a second daemon, {process} of user {uid}: the shares of both may add up to more than the \
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
    /// Takes a seat at each new device, leaves the seats at devices that are gone, and hears which neighbours have come and left. The
    /// event loop watches the sockets with `data`.
    pub(crate) fn look(
        &mut self,
        devices: impl Iterator<Item = DeviceUuid>,
        epoll: &OwnedFd,
        data: epoll::EventData,
    ) {
        let devices: BTreeSet<DeviceUuid> = devices.collect();
        // A closed descriptor leaves the epoll set by itself, unless a forked child holds the socket too.
        let leave = |socket: BorrowedFd<'_>| _ = epoll::delete(epoll, socket);
        self.seats.retain(|uuid, seat| {
            let stays = devices.contains(uuid);
            if !stays {
                seat.others.iter().for_each(|(socket, _)| leave(socket.as_fd()));
                seat.listener.iter().for_each(|listener| leave(listener.as_fd()));
            }
            stays
        });
        for uuid in devices {
            self.seats.entry(uuid).or_default();
        }
        for (uuid, seat) in &mut self.seats {
            let before = seat.others.len();
            seat.others.retain(|(socket, _)| {
                let stays = is_open(socket);
                if !stays {
                    leave(socket.as_fd());
                }
                stays
            });
            // The first daemon may be full of connections, or no daemon: a new connection would end as fast, and wake the event loop again.
            let ended = seat.others.len() < before;
            let mut news = Vec::new();
            if seat.listener.is_none() && seat.others.is_empty() {
                match take_seat(*uuid) {
                    Ok(Ok(listener)) => {
                        let _ = epoll::add(epoll, &listener, data, epoll::EventFlags::IN);
                        seat.listener = Some(listener);
                    }
                    Ok(Err(other)) if !ended => news.push(other),
                    Ok(Err(_)) => {}
                    Err(error) => tracing::debug!(%uuid, %error, "other daemons are not looked for"),
                }
            }
            for _ in 0..MOST {
                match seat.listener.as_ref().map(UnixListener::accept) {
                    Some(Ok((other, _))) => news.push(other),
                    Some(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                        tracing::debug!(%uuid, %error, "other daemons are not heard");
                        // Without descriptors to accept with, the event loop would wake for ever.
                        seat.listener.take().iter().for_each(|listener| leave(listener.as_fd()));
                    }
                    _ => break,
                }
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
    let name = name_of(uuid);
    let listener = match UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?) {
        Ok(listener) => listener,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            // A hostile process may own the name and accept no connection, so the daemon must not wait here.
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let other = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            connect(&other, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
            return Ok(Err(other.into()));
        }
        Err(error) => return Err(error),
    };
    listener.set_nonblocking(true)?;
    Ok(Ok(listener))
}

fn name_of(uuid: DeviceUuid) -> String {
    format!("gshare-daemon-of-{uuid}")
}

/// Whether the other end is there. Neighbours say nothing.
fn is_open(socket: impl AsFd) -> bool {
    recv(socket, &mut [0_u8; 1], RecvFlags::DONTWAIT) == Err(Errno::AGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    fn device(number: u8) -> DeviceUuid {
        let mut bytes = [number; 16];
        bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        DeviceUuid::gpu(bytes)
    }

    #[test]
    fn a_process_that_has_the_name_and_accepts_nothing_delays_no_daemon() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let own = device(8);
        let name = SocketAddrUnix::new_abstract_name(name_of(own).as_bytes()).unwrap();
        let socket =
            || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let (deaf, waits) = (socket(), socket());
        rustix::net::bind(&deaf, &name).unwrap();
        rustix::net::listen(&deaf, 0).unwrap();
        connect(&waits, &name).unwrap();
        let mut daemon = Neighbours::default();
        daemon.look(std::iter::once(own), &epoll, epoll::EventData::new_u64(0));
        assert_eq!(daemon.all(), []);
    }

    #[test]
    fn a_seat_is_left_with_its_device_and_one_look_takes_in_a_bounded_number() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let own = device(9);
        let look = |daemon: &mut Neighbours, devices: &[DeviceUuid]| {
            daemon.look(devices.iter().copied(), &epoll, epoll::EventData::new_u64(0));
            daemon.all().len()
        };
        let (mut first, mut second) = (Neighbours::default(), Neighbours::default());
        assert_eq!(look(&mut first, &[own]), 0);
        let name = SocketAddr::from_abstract_name(name_of(own)).unwrap();
        let many: Vec<_> = (0..=MOST).map(|_| UnixStream::connect_addr(&name).unwrap()).collect();
        assert_eq!(look(&mut first, &[own]), MOST);
        assert!(is_open(&many[MOST]), "it waits for the next look");
        assert_eq!(look(&mut first, &[own]), MOST);
        // A process that another test forks has the sockets until it runs its program.
        let ends = |mut socket: &UnixStream| {
            socket.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
            socket.read(&mut [0]).unwrap() == 0
        };
        assert!(ends(&many[MOST]));
        assert_eq!(look(&mut first, &[]), 0);
        assert!(many.iter().all(ends));
        // A forked child may still hold a socket after the daemon has closed its own copy.
        assert_eq!(look(&mut first, &[own]), 0);
        let held = first.seats[&own].listener.as_ref().unwrap().try_clone().unwrap();
        assert_eq!(look(&mut first, &[]), 0);
        let _late = UnixStream::connect_addr(&name).unwrap();
        let mut events = Vec::with_capacity(1);
        let none = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&none)).unwrap();
        assert!(events.is_empty(), "it wakes nothing");
        drop(held);
        assert_eq!(look(&mut second, &[own]), 0, "the seat is free");
    }

    #[test]
    fn a_process_that_closes_each_connection_does_not_keep_a_daemon_busy() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let own = device(6);
        let squatter =
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(name_of(own)).unwrap()).unwrap();
        let mut daemon = Neighbours::default();
        let mut look = || daemon.look(std::iter::once(own), &epoll, epoll::EventData::new_u64(0));
        let wakes = |wait: i64| {
            let mut events = Vec::with_capacity(4);
            let wait = rustix::time::Timespec { tv_sec: wait, tv_nsec: 0 };
            epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&wait)).unwrap();
            !events.is_empty()
        };
        look();
        drop(squatter.accept().unwrap());
        assert!(wakes(10), "its connection has ended");
        look();
        drop(squatter.accept().unwrap());
        assert!(!wakes(0), "it holds no other");
    }

    #[test]
    fn a_neighbour_in_another_namespace_has_no_process_id() {
        let other = Neighbour { uuid: "GPU-1".to_owned(), pid: 0, uid: 7 };
        let text = other.to_string();
        assert!(text.contains("a second daemon, a process in another namespace of user 7:"), "{text}");
    }

    #[test]
    fn two_daemons_on_a_gpu_know_each_other_while_both_are_there() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let own = device(7);
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
