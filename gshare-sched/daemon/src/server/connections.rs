//! The connections of hooked processes. The daemon accepts them within bounds, reads one frame at a time and writes without waiting.

use crate::config::Strangers;
use crate::crowd::admits;
use crate::nvml::DeviceFact;
use crate::peer::peer_of;
use crate::server::{Daemon, LISTENER};
use gshare_core::reason::{Fault, Reason, RefusalCode};
use gshare_core::slots::Slots;
use gshare_core::wire::{MAX_FRAME, Sequence, ToClient, ToDaemon, VERSION, WireError};
use gshare_core::{ConnId, DeviceUuid, Duration, Timestamp};
use gshare_sched::node::{NodeError, NodeEvent, Peer};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;

/// Most frames queued for one peer. A peer 64 frames behind has stopped reading, for the kernel has buffered some 200 frames
/// before.
const MAX_QUEUE: usize = 64;
/// Longest time from a peer's connection to its Hello.
pub(super) const HELLO_PATIENCE: Duration = Duration::from_millis(5_000);
/// Rest of the listener when the system has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Subjects of a connection's readiness events: a frame, or the end of its process. See [`LISTENER`].
pub(super) const FRAME: u64 = 2;
pub(super) const PROCESS: u64 = 3;

fn data_of(id: ConnId, tag: u64) -> u64 {
    tag << 56 | u64::from(id.generation() & 0xff_ffff) << 32 | u64::from(id.slot())
}

/// The connection of a readiness event, if it is still open. The lower bits of its generation suffice, since a stale event is at
/// most one batch old.
pub(super) fn conn_of<T>(conns: &Slots<ConnId, T>, data: u64) -> Option<ConnId> {
    #[expect(clippy::cast_possible_truncation, reason = "the fields of the integer")]
    let (slot, bits) = (data as u32, (data >> 32) as u32 & 0xff_ffff);
    conns.id(slot).filter(|id| id.generation() & 0xff_ffff == bits)
}

#[derive(Debug)]
pub(super) struct Conn {
    socket: OwnedFd,
    /// The pidfd of the process, after its Hello.
    process: Option<OwnedFd>,
    peer: Peer,
    received: Sequence,
    sent: Sequence,
    /// Frames for which the kernel had no room.
    queue: VecDeque<Box<[u8]>>,
    pub(super) greeted: bool,
    /// Whether its user may not use this daemon. A ticket may prove another user.
    stranger: bool,
    /// An Attach until the driver's answer about its device. Later frames wait in the socket.
    attaching: Option<ToDaemon>,
}

impl Conn {
    /// Tells a peer of another version to upgrade the older side. A refusal has the same frame in all versions, except for the
    /// first byte.
    fn refuse_version(&mut self, version: u8) {
        let text = format!(
            "the hook speaks version {version} and the daemon version {VERSION}: upgrade the older one"
        );
        let mut frame = Vec::new();
        ToClient::Refused { code: RefusalCode::Protocol, text }.encode(self.sent.stamp(), &mut frame);
        frame[0] = version;
        let _ = send(&self.socket, &frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

impl Daemon {
    fn data(id: ConnId, tag: u64) -> epoll::EventData {
        epoll::EventData::new_u64(data_of(id, tag))
    }

    pub(super) fn accept(&mut self, now: Timestamp) {
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // The listener would be ready again at once. It rests, so the daemon can serve the connected clients.
                self.resume_accept = Some(now.saturating_add(ACCEPT_PAUSE));
                let data = epoll::EventData::new_u64(LISTENER << 56);
                let _ = epoll::modify(&self.epoll, &self.listener, data, epoll::EventFlags::empty());
                self.metrics.dropped(RefusalCode::Full);
                return;
            }
            // The peer is gone already, or another thread of the host has taken the connection.
            Err(_) => return,
        };
        self.metrics.connects.inc();
        let Ok(peer) = peer_of(&socket) else { return };
        if let Err((code, text)) = self.admit(peer.uid) {
            self.refuse(&socket, peer, code, text);
            return;
        }
        let stranger = !self.access.allows(peer.uid);
        let conn = Conn {
            socket,
            process: None,
            peer,
            received: Sequence::default(),
            sent: Sequence::default(),
            queue: VecDeque::new(),
            greeted: false,
            stranger,
            attaching: None,
        };
        let id = self.conns.insert(conn);
        *self.users.entry(peer.uid).or_default() += 1;
        self.idle_due = None;
        let socket = &self.conns.get(id).expect("it was inserted just now").socket;
        if epoll::add(&self.epoll, socket, Self::data(id, FRAME), epoll::EventFlags::IN).is_err() {
            self.forget(id);
            self.metrics.dropped(RefusalCode::Full);
            return;
        }
        self.hello_due.push_back((now.saturating_add(HELLO_PATIENCE), id));
        while self
            .hello_due
            .front()
            .is_some_and(|(_, id)| self.conns.get(*id).is_none_or(|conn| conn.greeted))
        {
            self.hello_due.pop_front();
        }
    }

    /// Refuses a peer before its Hello. The daemon knows no limits of it then, so it keeps its own limits where it may run.
    fn refuse(&mut self, socket: impl AsFd, peer: Peer, code: RefusalCode, text: String) {
        tracing::info!(uid = peer.uid, pid = peer.pid, text, "refused");
        self.frame.clear();
        let refused = match self.config.strangers {
            Strangers::Run => ToClient::Unserved { code, text, spec: None },
            Strangers::Refuse => ToClient::Refused { code, text },
        };
        refused.encode(0, &mut self.frame);
        let _ = send(socket, &self.frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        self.metrics.dropped(code);
    }

    /// Takes a peer for the user that its ticket proves. A ticket of an unknown key proves nothing, and is no offence.
    fn resume(&mut self, id: ConnId, uid: u32, ticket: u128) {
        let conn = self.conns.get_mut(id).expect("a frame has a connection");
        let peer = Peer { uid, ..conn.peer };
        if self.tickets.of(peer) == Some(ticket) && self.access.allows(uid) {
            let before = std::mem::replace(&mut conn.peer, peer).uid;
            conn.stranger = false;
            *self.users.entry(uid).or_default() += 1;
            self.count_less(before);
        }
    }

    /// Refuses a peer of a user that may not use this daemon.
    fn turn_away(&mut self, now: Timestamp, id: ConnId) {
        let conn = self.conns.get(id).expect("a frame has a connection");
        let peer = conn.peer;
        let Ok(socket) = conn.socket.try_clone() else { return self.close(now, id) };
        let text = format!("user {} may not use this daemon (allow_uids)", peer.uid);
        self.refuse(socket, peer, RefusalCode::NotAllowed, text);
        self.close(now, id);
    }

    /// Allows a user another connection, or gives the refusal.
    fn admit(&self, uid: u32) -> Result<(), (RefusalCode, String)> {
        let most = self.config.max_connections;
        let (own, taken) = (self.users.get(&uid).copied().unwrap_or(0), self.conns.len());
        if self.conns.next(most).is_none() {
            return Err((
                RefusalCode::Full,
                format!("{most} connections are open already (max_connections)"),
            ));
        }
        if !admits(own, u32::try_from(taken).unwrap_or(u32::MAX), most) {
            let text = format!(
                "user {uid} has {own} connections, and {taken} of {most} are open: the rest is for others \
                 (max_connections)"
            );
            return Err((RefusalCode::Full, text));
        }
        Ok(())
    }

    /// Removes a connection and its count for the user.
    fn forget(&mut self, id: ConnId) {
        let uid = self.conns.remove(id).expect("a connection ends once").peer.uid;
        self.count_less(uid);
    }

    /// Counts one connection less for a user.
    fn count_less(&mut self, uid: u32) {
        let count = self.users.get_mut(&uid).expect("its user has one");
        *count -= 1;
        if *count == 0 {
            self.users.remove(&uid);
        }
    }

    pub(super) fn ready(&mut self, now: Timestamp, id: ConnId, flags: epoll::EventFlags) {
        if flags.contains(epoll::EventFlags::OUT) && !self.flush(id) {
            return;
        }
        if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            self.receive(now, id);
        }
    }

    /// Takes one frame of a connection, or closes the connection at its end. `false`: no frame was there, or an Attach holds it back.
    pub(super) fn receive(&mut self, now: Timestamp, id: ConnId) -> bool {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.attaching.is_none()) else { return false };
        let mut received = recv(&conn.socket, &mut self.received[..], RecvFlags::TRUNC);
        if let Err(Errno::CONNRESET) = received {
            // The peer closed the socket with a frame of ours unread. The kernel reports this first, and then gives the earlier frames.
            received = recv(&conn.socket, &mut self.received[..], RecvFlags::TRUNC);
        }
        let length = match received {
            Ok((length, _)) if length > 0 => length,
            Err(Errno::AGAIN | Errno::INTR) => return false,
            // The peer closed the connection, or is gone.
            Ok(_) | Err(_) => {
                self.close(now, id);
                return false;
            }
        };
        let frame = &self.received[..length.min(MAX_FRAME + 1)];
        let decoded = ToDaemon::decode(frame)
            .and_then(|(sequence, message)| conn.received.check(sequence).map(|()| message));
        match decoded {
            Err(error) => {
                tracing::warn!(pid = conn.peer.pid, %error, "a bad frame");
                if let WireError::Version { version } = error
                    && !conn.greeted
                {
                    conn.refuse_version(version);
                }
                self.drop_connection(now, id, error.reason());
            }
            Ok(ToDaemon::Resume { uid, ticket }) if !conn.greeted => self.resume(id, uid, ticket),
            Ok(_) if conn.stranger => self.turn_away(now, id),
            Ok(frame) => {
                if !conn.greeted {
                    conn.greeted = matches!(frame, ToDaemon::Hello { .. });
                    self.watch(id);
                }
                match frame {
                    ToDaemon::Attach { device, .. } if !self.known.contains(&device) => {
                        self.look_up(now, id, device, frame);
                    }
                    frame => self.hear(now, id, frame),
                }
            }
        }
        true
    }

    /// Tells the node a frame of a peer.
    fn hear(&mut self, now: Timestamp, id: ConnId, frame: ToDaemon) {
        let peer = self.conns.get(id).expect("a frame has a connection").peer;
        let attaches = matches!(frame, ToDaemon::Attach { .. });
        let event = NodeEvent::Received { conn: id, peer, frame };
        let handled = self.node.handle(now, event, &mut self.actions);
        if attaches {
            self.look_for_neighbours();
        }
        if let Err(error @ NodeError::UnknownConnection { .. }) = handled {
            tracing::warn!(pid = peer.pid, %error, "dropped");
            self.drop_connection(now, id, RefusalCode::Protocol);
        }
    }

    /// Asks the driver about a device before the node hears of the device from a process. Only this connection waits for the answer.
    fn look_up(&mut self, now: Timestamp, id: ConnId, device: DeviceUuid, attach: ToDaemon) {
        let asked = self.questions.as_ref().is_some_and(|questions| questions.send((id, device)).is_ok());
        match self.conns.get_mut(id).filter(|_| asked) {
            Some(conn) => {
                let _ = epoll::delete(&self.epoll, &conn.socket);
                conn.attaching = Some(attach);
            }
            None => self.hear(now, id, attach),
        }
    }

    /// Resumes a connection after the driver's answer about its device.
    pub(super) fn found(&mut self, now: Timestamp, id: ConnId, fact: Option<DeviceFact>) {
        if let Some(DeviceFact { uuid, memory }) = fact.filter(|fact| self.known.insert(fact.uuid)) {
            self.tell(now, NodeEvent::DeviceFound { uuid, memory });
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(attach) = conn.attaching.take() else { return };
        let mut interest = epoll::EventFlags::IN;
        interest.set(epoll::EventFlags::OUT, !conn.queue.is_empty());
        if epoll::add(&self.epoll, &conn.socket, Self::data(id, FRAME), interest).is_err() {
            return self.drop_connection(now, id, RefusalCode::Full);
        }
        self.hear(now, id, attach);
    }

    /// Watches the process behind a connection, since a forked child can keep the socket open after the process's death.
    fn watch(&mut self, id: ConnId) {
        let conn = self.conns.get_mut(id).expect("a connection that says Hello is there");
        // A process in another pid namespace may be invisible. Its connection's end must suffice then.
        let Some(pid) = Pid::from_raw(conn.peer.pid) else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        if epoll::add(&self.epoll, &process, Self::data(id, PROCESS), epoll::EventFlags::IN).is_ok() {
            conn.process = Some(process);
        }
    }

    pub(super) fn send_or_drop(&mut self, now: Timestamp, id: ConnId, frame: &ToClient) {
        let mut sent = self.send(id, frame);
        if matches!(frame, ToClient::Welcome { .. }) {
            let peer = self.conns.get(id).map(|conn| conn.peer);
            if let Some((uid, ticket)) = peer.and_then(|peer| Some((peer.uid, self.tickets.of(peer)?))) {
                sent &= self.send(id, &ToClient::Ticket { uid, ticket });
            }
        }
        if !sent {
            self.drop_connection(now, id, Fault::Slow);
        }
    }

    /// Ends a connection, if it is open, and counts the reason.
    pub(super) fn drop_connection(&mut self, now: Timestamp, id: ConnId, reason: impl Into<Reason>) {
        if self.conns.get(id).is_some() {
            self.metrics.dropped(reason);
            self.close(now, id);
        }
    }

    /// Sends a frame without waiting; `false` if the peer is too far behind.
    fn send(&mut self, id: ConnId, message: &ToClient) -> bool {
        self.node.write_journal();
        let Some(conn) = self.conns.get_mut(id) else { return true };
        self.frame.clear();
        message.encode(conn.sent.stamp(), &mut self.frame);
        if conn.queue.is_empty() {
            match send(&conn.socket, &self.frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => {}
                // The frame is sent, or the peer is gone and the kernel will report its end.
                _ => return true,
            }
            let both = epoll::EventFlags::IN | epoll::EventFlags::OUT;
            let _ = epoll::modify(&self.epoll, &conn.socket, Self::data(id, FRAME), both);
        }
        if conn.queue.len() == MAX_QUEUE {
            return false;
        }
        conn.queue.push_back(self.frame.as_slice().into());
        true
    }

    /// Sends the queued frames; `false` if the connection is closed.
    fn flush(&mut self, id: ConnId) -> bool {
        let Some(conn) = self.conns.get_mut(id) else { return false };
        while let Some(frame) = conn.queue.front() {
            match send(&conn.socket, frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => return true,
                _ => conn.queue.pop_front(),
            };
        }
        conn.queue.shrink_to_fit();
        let _ = epoll::modify(&self.epoll, &conn.socket, Self::data(id, FRAME), epoll::EventFlags::IN);
        true
    }

    /// Closes a connection, and tells the node if the peer has said Hello.
    pub(super) fn close(&mut self, now: Timestamp, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        // A closed descriptor leaves the epoll set by itself, unless a forked child holds the socket too.
        let _ = epoll::delete(&self.epoll, &conn.socket);
        let greeted = conn.greeted;
        self.forget(id);
        if greeted {
            self.tell(now, NodeEvent::Closed { conn: id });
            // A device that only this client had named is gone with it.
            self.look_for_neighbours();
        }
        self.idle(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slot's generation has more bits than a readiness event can hold.
    #[test]
    fn a_slot_is_heard_however_often_it_was_used() {
        for generation in [0, 7, 0xff_ffff, 1 << 24, (1 << 24) + 7, u32::MAX] {
            let mut conns = Slots::from_generation(generation);
            let id = conns.insert(());
            assert_eq!(conn_of(&conns, data_of(id, FRAME)), Some(id));
            let earlier = ConnId::new(id.slot(), generation.wrapping_sub(1));
            assert_eq!(conn_of(&conns, data_of(earlier, FRAME)), None, "stale");
            conns.remove(id);
            assert_eq!(conn_of(&conns, data_of(id, FRAME)), None, "gone");
        }
    }
}
