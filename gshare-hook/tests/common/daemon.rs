//! A daemon with two policies: a client gets a token at its request, or in its turn. The daemon records its clients' messages.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use gshare_core::reason::Obstacle;
use gshare_core::wire::{MAX_FRAME, RefusalCode, Residence, Sequence, ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, DeviceUuid, Duration, GpuId, ResourceSpec, RunId, Timestamp, UseState};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// Record of the clients' messages, all clients together.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Names in Hello messages, and the numbers of their runs.
    pub names: Vec<String>,
    pub runs: Vec<RunId>,
    /// Attach messages, with their re-stated memory.
    pub attached: Vec<u64>,
    /// UUIDs of their devices.
    pub devices: Vec<DeviceUuid>,
    /// GPU time used, in ns.
    pub used: u64,
    /// Memory handed out and not given back, in bytes.
    pub memory: u64,
    /// Most memory so far, in bytes.
    pub memory_peak: u64,
    /// Requests for memory.
    pub memory_requests: u64,
    /// Connections that have ended.
    pub ended: u64,
    /// Turns ended by the clients.
    pub returned: u64,
    /// Requests for a token by a client without one.
    pub empty_handed: u64,
    /// Launches reported.
    pub launches: u64,
    /// Turns ended without a token.
    pub twice: u64,
    /// Each turn ended by its client: wall time and used GPU time, in ns.
    pub turns: Vec<(u64, u64)>,
    /// Reports of the place of movable memory: the place, the bytes, and the obstacle.
    pub parking: Vec<(Residence, u64, Option<Obstacle>)>,
    /// Memory in use by the last report.
    pub memory_used: u64,
}

/// Behaviour of a daemon.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// Share of a client; changes with [`Daemon::change`].
    pub spec: ResourceSpec,
    /// GPU time of a token.
    pub token: Duration,
    /// Wall time, beyond its GPU time, after which a token expires.
    pub slack: Duration,
    /// Gives tokens to one process at a time, in the order of the requests; an extension crosses the end of each turn.
    pub in_turns: bool,
    /// Ordinal of a refused device; the refusal closes the connection.
    pub lacks: Option<u32>,
    pub hangs_up: bool,
    /// Refusal of every device.
    pub refuses: Option<RefusalCode>,
    /// Number of tokens after which the daemon stops as if by a signal: its sockets stay, and no client is answered.
    pub stops_after: Option<u64>,
    /// Time without a token or a message at the start.
    pub keeps_waiting: std::time::Duration,
    /// Least time between two tokens.
    pub every: std::time::Duration,
    /// Time from the end of a token to its revocation, if the client keeps it.
    pub revokes_after: Option<Duration>,
    /// Pause before an answer about an attachment, and about memory.
    pub attach_pause: std::time::Duration,
    pub memory_pause: std::time::Duration,
    /// Bytes of the device that other instances keep from a process whose memory can move.
    pub kept: u64,
    /// Bytes of the device for all clients. A process that needs more waits while others park.
    pub room: u64,
}

impl Default for Manners {
    fn default() -> Self {
        Self {
            spec: ResourceSpec::UNLIMITED,
            token: Duration::from_millis(10),
            slack: Duration::from_millis(10),
            in_turns: false,
            lacks: None,
            hangs_up: false,
            refuses: None,
            stops_after: None,
            keeps_waiting: std::time::Duration::ZERO,
            every: std::time::Duration::ZERO,
            revokes_after: None,
            attach_pause: std::time::Duration::ZERO,
            memory_pause: std::time::Duration::ZERO,
            kept: 0,
            room: u64::MAX,
        }
    }
}

/// A running daemon; stops when dropped.
pub struct Daemon {
    pub socket: PathBuf,
    told: Arc<Mutex<Told>>,
    spec: Arc<Mutex<ResourceSpec>>,
    /// The orders to park so far, times two, and the last of them.
    park: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A process on a device.
#[derive(Debug)]
struct Attached {
    client: ClientId,
    /// Turns completed.
    turn: u32,
    /// Totals in ns: reported use, allowed time, and use before this turn.
    used: u64,
    allowed: u64,
    before: u64,
    /// Start and end of the token held, in ns.
    holds: Option<(u64, u64)>,
}

struct Peer {
    socket: OwnedFd,
    sent: Sequence,
    received: Sequence,
    client: ClientId,
    attached: Vec<Attached>,
    /// The client in wait for a turn, with its place in the queue.
    waits: Option<(u64, ClientId)>,
    /// Whether memory of the process can move, as it has told.
    parks: bool,
    /// The place of that memory; parking from the order on.
    place: Residence,
    /// A request for memory that waits for room: the need and the wish.
    needs: Option<(ClientId, u64, u64)>,
}

impl Peer {
    fn say(&mut self, message: &ToClient) {
        let mut frame = Vec::new();
        message.encode(self.sent.stamp(), &mut frame);
        let _ = rustix::net::send(&self.socket, &frame, SendFlags::NOSIGNAL);
    }

    /// States the whole limit, as for the only process of an instance.
    fn say_part(&mut self, client: ClientId, spec: ResourceSpec) {
        if let Some(bytes) = spec.memory() {
            self.say(&ToClient::MemoryPart { client, bytes });
        }
    }

    fn of(&mut self, client: ClientId) -> &mut Attached {
        self.attached.iter_mut().find(|attached| attached.client == client).expect("a client of this process")
    }

    fn allow(&mut self, client: ClientId, token: Duration, slack: Duration) {
        self.waits = None;
        let (now, of) = (now_ns(), self.of(client));
        let until = now + token.as_nanos() + slack.as_nanos();
        if of.holds.is_none() {
            of.before = of.used;
        }
        of.holds = Some((of.holds.map_or(now, |(since, _)| since), until));
        of.allowed = of.used + token.as_nanos();
        let (turn, allowed) = (of.turn, of.allowed);
        self.say_allowed(client, turn, allowed, until);
    }

    fn say_allowed(&mut self, client: ClientId, turn: u32, allowed: u64, until: u64) {
        let (allowed, until) = (Duration::from_nanos(allowed), Timestamp::from_nanos(until));
        self.say(&ToClient::Allow { client, turn, allowed, until });
    }

    /// Extends a turn as a daemon would before it learns of the turn's end.
    fn extend(&mut self, client: ClientId, token: Duration) {
        let Attached { turn, used, .. } = *self.of(client);
        self.say_allowed(client, turn, used + 3 * token.as_nanos(), now_ns() + 20_000_000);
    }

    /// Takes the token back.
    fn stop(&mut self, client: ClientId) {
        let of = self.of(client);
        let (turn, allowed) = (of.turn, of.allowed);
        (of.turn, of.holds) = (turn + 1, None);
        self.say_allowed(client, turn, allowed, now_ns());
    }
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

impl Daemon {
    /// Grants tokens of `token` GPU time (10 ms of wall time more to use them) under `spec`.
    pub fn start(socket: &Path, spec: ResourceSpec, token: Duration) -> Self {
        Self::start_as(socket, Manners { spec, token, ..Manners::default() })
    }

    /// Grants tokens to one process at a time, in the order of the requests; an extension crosses the end of each turn.
    pub fn start_in_turns(socket: &Path, token: Duration, slack: Duration) -> Self {
        Self::start_as(socket, Manners { token, slack, in_turns: true, ..Manners::default() })
    }

    /// Starts a daemon with these manners.
    pub fn start_as(socket: &Path, manners: Manners) -> Self {
        let _ = std::fs::remove_file(socket);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 64).unwrap();
        let (told, stop) = (Arc::<Mutex<Told>>::default(), Arc::new(AtomicBool::new(false)));
        let (spec, park) = (Arc::new(Mutex::new(manners.spec)), Arc::<AtomicU64>::default());
        let thread = {
            let (told, spec, stop) = (Arc::clone(&told), Arc::clone(&spec), Arc::clone(&stop));
            let park = Arc::clone(&park);
            std::thread::spawn(move || serve(&listener, manners, &told, (&spec, &park), &stop))
        };
        Self { socket: socket.to_owned(), told, spec, park, stop, thread: Some(thread) }
    }

    /// Orders all clients to park, or to come back.
    pub fn park(&self, on: bool) {
        let next = |orders: u64| Some((orders & !1) + 2 + u64::from(on));
        let _ = self.park.fetch_update(Ordering::AcqRel, Ordering::Relaxed, next);
    }

    /// The record once the last report of the place of memory is as wished.
    pub fn told_when(&self, what: &str, is: impl Fn(&(Residence, u64, Option<Obstacle>)) -> bool) -> Told {
        for _ in 0..super::patience() * 25 {
            let told = self.told();
            if told.parking.last().is_some_and(&is) {
                return told;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("{what}: {:?}", self.told().parking);
    }

    /// Changes the share of all clients, attached clients included.
    pub fn change(&self, spec: ResourceSpec) {
        *self.spec.lock().unwrap() = spec;
    }

    pub fn told(&self) -> Told {
        self.told.lock().unwrap().clone()
    }

    /// The record once a connection has ended: the daemon has then heard all its messages.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn told_in_all(&self) -> Told {
        for _ in 0..1_000 {
            let told = self.told();
            if told.ended > 0 {
                return told;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("the process is still connected: {:?}", self.told());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn serve(
    listener: &OwnedFd,
    mut manners: Manners,
    told: &Mutex<Told>,
    (spec, park): (&Mutex<ResourceSpec>, &AtomicU64),
    stop: &AtomicBool,
) {
    let mut ordered = 0;
    let Manners { token, slack, in_turns, .. } = manners;
    let mut peers: Vec<Peer> = Vec::new();
    let (mut tokens, mut requests) = (0, 0);
    let (began, mut last_grant) = (std::time::Instant::now(), None);
    while !stop.load(Ordering::Acquire) {
        if manners.stops_after.is_some_and(|most| tokens >= most) {
            std::thread::sleep(std::time::Duration::from_millis(20));
            continue;
        }
        let ready: Vec<bool> = {
            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            fds.extend(peers.iter().map(|peer| PollFd::from_borrowed_fd(peer.socket.as_fd(), PollFlags::IN)));
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
            fds.iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        let changed = core::mem::replace(&mut manners.spec, *spec.lock().unwrap()) != manners.spec;
        for peer in peers.iter_mut().filter(|_| changed) {
            for client in peer.attached.iter().map(|attached| attached.client).collect::<Vec<_>>() {
                peer.say(&ToClient::ShareChanged { client, spec: manners.spec });
                peer.say_part(client, manners.spec);
            }
        }
        let order = park.load(Ordering::Acquire);
        if core::mem::replace(&mut ordered, order) != order {
            for peer in &mut peers {
                for client in peer.attached.iter().map(|attached| attached.client).collect::<Vec<_>>() {
                    peer.say(&ToClient::Park { client, on: u8::from(order & 1 == 1) });
                }
            }
        }
        make_room(&mut peers, &manners, &mut told.lock().unwrap());
        let mut gone = Vec::new();
        for (index, peer) in peers.iter_mut().enumerate() {
            if !ready[index + 1] {
                continue;
            }
            let mut frame = [0u8; MAX_FRAME + 1];
            match rustix::net::recv(&peer.socket, &mut frame, RecvFlags::DONTWAIT) {
                Ok((length @ 1.., _)) => {
                    let (sequence, message) =
                        ToDaemon::decode(&frame[..length]).expect("the hook speaks the format");
                    peer.received.check(sequence).expect("the hook numbers its frames");
                    if in_turns
                        && let ToDaemon::Use { client, turn, .. } = message
                        && turn > peer.of(client).turn
                    {
                        peer.extend(client, token);
                    }
                    let refused =
                        matches!(message, ToDaemon::Attach { ordinal, .. } if manners.lacks == Some(ordinal));
                    if refused && manners.hangs_up {
                        gone.push(index);
                    }
                    if let Some(client) = hear(peer, message, &manners, &mut told.lock().unwrap()) {
                        requests += 1;
                        peer.waits = Some((requests, client));
                    }
                }
                _ => gone.push(index),
            }
        }
        for index in gone.into_iter().rev() {
            told.lock().unwrap().ended += 1;
            peers.remove(index);
        }
        for peer in &mut peers {
            let Some(grace) = manners.revokes_after else { continue };
            let late = |(_, until)| now_ns() > until + grace.as_nanos();
            let late = peer.attached.iter().find(|attached| attached.holds.is_some_and(late));
            if let Some(client) = late.map(|attached| attached.client) {
                peer.stop(client);
            }
        }
        while began.elapsed() >= manners.keeps_waiting
            && last_grant.is_none_or(|at: std::time::Instant| at.elapsed() >= manners.every)
            && (!in_turns
                || peers.iter().flat_map(|peer| &peer.attached).all(|attached| attached.holds.is_none()))
        {
            let next =
                peers.iter_mut().filter_map(|peer| Some((peer.waits?, peer))).min_by_key(|next| next.0);
            let Some(((_, client), peer)) = next else { break };
            tokens += 1;
            last_grant = Some(std::time::Instant::now());
            peer.allow(client, token, slack);
        }
        if ready[0]
            && let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)
        {
            let client = ClientId::new(u32::try_from(peers.len()).unwrap(), 1);
            let (sent, received) = (Sequence::default(), Sequence::default());
            let attached = Vec::new();
            let (place, needs) = (Residence::Resident, None);
            peers.push(Peer {
                socket,
                sent,
                received,
                client,
                attached,
                waits: None,
                parks: false,
                place,
                needs,
            });
        }
    }
}

/// Meets the first need for memory, or has all other processes park for it. A need is refused once nothing else can park.
fn make_room(peers: &mut [Peer], manners: &Manners, told: &mut Told) {
    let Some(at) = peers.iter().position(|peer| peer.needs.is_some()) else { return };
    let (client, bytes, wish) = peers[at].needs.expect("just found");
    let free = manners.room.saturating_sub(told.memory);
    let mut waits = false;
    for (_, other) in peers.iter_mut().enumerate().filter(|(index, _)| bytes > free && *index != at) {
        let client = other.attached.first().filter(|_| other.parks).map(|attached| attached.client);
        if let Some(client) = client.filter(|_| other.place == Residence::Resident) {
            other.place = Residence::Parking;
            other.say(&ToClient::Park { client, on: 1 });
        }
        waits |= matches!(other.place, Residence::Parking | Residence::Returning);
    }
    if waits {
        return;
    }
    peers[at].needs = None;
    if bytes > free {
        peers[at].say(&ToClient::MemoryDeny { client, free: Bytes(free) });
    } else {
        let granted = wish.max(bytes).min(free);
        told.memory += granted;
        peers[at].say(&ToClient::MemoryGrant { client, bytes: Bytes(granted) });
    }
}

/// Gives a token to the client now.
fn hear(peer: &mut Peer, message: ToDaemon, manners: &Manners, told: &mut Told) -> Option<ClientId> {
    let spec = manners.spec;
    match message {
        ToDaemon::Hello { name, run, .. } => {
            told.names.push(name);
            told.runs.push(run);
            peer.say(&ToClient::Welcome { epoch: 1 });
        }
        ToDaemon::Attach { ordinal, device, allocated, used, allowed, .. } => {
            // A client is a process on a device.
            let client = ClientId::new(peer.client.slot() * 64 + ordinal, 1);
            told.attached.push(allocated.0);
            told.memory += allocated.0;
            told.devices.push(device);
            if let Some(code) = manners.refuses {
                peer.say(&ToClient::Refused { code, text: "not you".to_owned() });
                return None;
            }
            if manners.lacks == Some(ordinal) {
                let text = "no such device".to_owned();
                peer.say(&ToClient::Refused { code: RefusalCode::UnknownDevice, text });
                return None;
            }
            std::thread::sleep(manners.attach_pause);
            told.used += used.saturating_sub(allowed).as_nanos();
            let used = used.as_nanos();
            peer.attached.push(Attached { client, turn: 0, used, allowed: 0, before: used, holds: None });
            let (window, in_flight) = (Duration::from_millis(100), Duration::from_millis(2));
            peer.say(&ToClient::Attached { ordinal, client, gpu: GpuId::new(0), spec, window, in_flight });
            peer.say_part(client, spec);
        }
        ToDaemon::Parking { client, residence, bytes, obstacle } => {
            peer.parks = true;
            peer.place = residence;
            if residence == Residence::Parked && manners.room < u64::MAX {
                peer.say(&ToClient::MemoryAsk { client, round: 0, recall: 1 });
            }
            told.parking.push((residence, bytes.0, obstacle));
            if residence == Residence::Missed {
                peer.say(&ToClient::Park { client, on: 0 });
            }
        }
        ToDaemon::Use { client, turn, used, state, launches, memory, .. } => {
            told.memory_used = memory.0;
            let of = peer.of(client);
            let (used, ends) = (used.as_nanos(), turn > of.turn);
            assert!(used >= of.used && turn <= of.turn + 1, "turn {turn} and {used} ns after {of:?}");
            told.used += used - of.used;
            told.launches = launches;
            (of.turn, of.used) = (turn, used);
            let used = used - of.before;
            let asks = matches!(state, UseState::Wants | UseState::Extends);
            if ends {
                told.returned += 1;
                match of.holds.take() {
                    Some((since, _)) => told.turns.push((now_ns() - since, used)),
                    None => told.twice += 1,
                }
            } else if asks && of.holds.is_none() && peer.waits.is_none() {
                told.empty_handed += 1;
            }
            return (asks && peer.waits.is_none_or(|(_, waits)| waits != client)).then_some(client);
        }
        ToDaemon::MemoryReserve { client, bytes, wish } => {
            told.memory_requests += 1;
            std::thread::sleep(manners.memory_pause);
            if manners.room < u64::MAX {
                peer.needs = Some((client, bytes.0, wish.0));
                return None;
            }
            let free = spec.memory().map_or(u64::MAX, |limit| limit.0.saturating_sub(told.memory));
            if bytes.0 > free {
                peer.say(&ToClient::MemoryDeny { client, free: Bytes(free) });
            } else {
                let granted = wish.0.max(bytes.0).min(free);
                told.memory += granted;
                told.memory_peak = told.memory_peak.max(told.memory);
                peer.say(&ToClient::MemoryGrant { client, bytes: Bytes(granted) });
            }
        }
        ToDaemon::MemoryQuery { client } => {
            if peer.parks {
                peer.say(&ToClient::MemoryMember { client, pid: 0, used: Bytes(manners.kept) });
            }
            peer.say(&ToClient::MemoryView { client });
        }
        ToDaemon::MemoryRelease { bytes, .. } => told.memory -= bytes.0,
        _ => {}
    }
    None
}
