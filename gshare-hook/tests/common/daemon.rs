//! A daemon with two policies: a client that asks gets a token at once, or in its turn. It writes down what it is told.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use gshare_core::token::RevokeReason;
use gshare_core::wire::{MAX_FRAME, RefusalCode, Sequence, ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, DeviceUuid, Duration, GpuId, LeaseId, ResourceSpec, RunId, Timestamp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// What the daemon was told, by all clients together.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Names that said Hello, and the numbers of their runs.
    pub names: Vec<String>,
    pub runs: Vec<RunId>,
    /// Attach messages, with the memory they re-stated.
    pub attached: Vec<u64>,
    /// UUIDs of their devices.
    pub devices: Vec<DeviceUuid>,
    /// GPU time used, by lease, in ns.
    pub used: BTreeMap<u64, u64>,
    /// Memory handed out and not given back, in bytes.
    pub memory: u64,
    /// Most memory there was.
    pub memory_peak: u64,
    /// Requests for memory.
    pub memory_requests: u64,
    /// Connections that have ended.
    pub ended: u64,
    /// Tokens returned.
    pub returned: u64,
    /// Tokens that were asked for by a client that held none.
    pub empty_handed: u64,
    /// Launches reported.
    pub launches: u64,
    /// Tokens that were returned again.
    pub twice: u64,
    /// Of each token that was held when it was returned: how long by the clock, and what was used, in ns.
    pub turns: Vec<(u64, u64)>,
}

impl Told {
    pub fn used_ns(&self) -> u64 {
        self.used.values().sum()
    }
}

/// How a daemon goes about it.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// What it says a client may have; changes with [`Daemon::change`].
    pub spec: ResourceSpec,
    /// GPU time of a token.
    pub token: Duration,
    /// Time by the clock, beyond its GPU time, after which a token expires.
    pub slack: Duration,
    /// To one process at a time, in the order in which they ask; and each return is crossed by an extension.
    pub in_turns: bool,
    /// The ordinal of a device that it refuses; and closes the connection over it.
    pub lacks: Option<u32>,
    pub hangs_up: bool,
    /// How it refuses each device.
    pub refuses: Option<RefusalCode>,
    /// After how many tokens it stops as if by a signal: its sockets stay, and no client is answered.
    pub stops_after: Option<u64>,
    /// For how long it gives no token, and says nothing.
    pub keeps_waiting: std::time::Duration,
    /// How often it gives a token at most.
    pub every: std::time::Duration,
    /// How long after its expiry a token is revoked that was not returned.
    pub revokes_after: Option<Duration>,
    /// How long it thinks about an attachment, and about memory.
    pub attach_pause: std::time::Duration,
    pub memory_pause: std::time::Duration,
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
        }
    }
}

/// A running daemon; stops when dropped.
pub struct Daemon {
    pub socket: PathBuf,
    told: Arc<Mutex<Told>>,
    spec: Arc<Mutex<ResourceSpec>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Peer {
    socket: OwnedFd,
    sent: Sequence,
    received: Sequence,
    client: ClientId,
    attached: Vec<ClientId>,
    holds: Option<LeaseId>,
    /// Since when, and until when, in ns.
    holds_since: u64,
    expires: u64,
    /// Who waits for a turn, on which device, and as which in line.
    waits: Option<(u64, ClientId)>,
}

impl Peer {
    fn say(&mut self, message: &ToClient) {
        let mut frame = Vec::new();
        message.encode(self.sent.stamp(), &mut frame);
        let _ = rustix::net::send(&self.socket, &frame, SendFlags::NOSIGNAL);
    }

    /// The whole of the limit, as for the only process of an instance.
    fn say_part(&mut self, client: ClientId, spec: ResourceSpec) {
        if let Some(bytes) = spec.memory() {
            self.say(&ToClient::MemoryPart { client, bytes });
        }
    }

    fn grant(&mut self, client: ClientId, lease: LeaseId, token: Duration, slack: Duration) {
        (self.holds, self.holds_since, self.waits) = (Some(lease), now_ns(), None);
        self.expires = self.holds_since + token.as_nanos() + slack.as_nanos();
        let expires = Timestamp::from_nanos(self.expires);
        self.say(&ToClient::Grant { client, lease, budget: token, expires });
    }

    /// What a daemon says that has not yet heard that the lease was returned.
    fn extend(&mut self, client: ClientId, lease: LeaseId, token: Duration) {
        let (budget, expires) = (token.saturating_mul(3), Timestamp::from_nanos(now_ns() + 20_000_000));
        self.say(&ToClient::Grant { client, lease, budget, expires });
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

    /// Grants them to one process at a time, in the order in which they ask; each return is crossed by an extension.
    pub fn start_in_turns(socket: &Path, token: Duration, slack: Duration) -> Self {
        Self::start_as(socket, Manners { token, slack, in_turns: true, ..Manners::default() })
    }

    /// One with these manners.
    pub fn start_as(socket: &Path, manners: Manners) -> Self {
        let _ = std::fs::remove_file(socket);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 64).unwrap();
        let (told, stop) = (Arc::<Mutex<Told>>::default(), Arc::new(AtomicBool::new(false)));
        let spec = Arc::new(Mutex::new(manners.spec));
        let thread = {
            let (told, spec, stop) = (Arc::clone(&told), Arc::clone(&spec), Arc::clone(&stop));
            std::thread::spawn(move || serve(&listener, manners, &told, &spec, &stop))
        };
        Self { socket: socket.to_owned(), told, spec, stop, thread: Some(thread) }
    }

    /// Another share for all, those that are attached included.
    pub fn change(&self, spec: ResourceSpec) {
        *self.spec.lock().unwrap() = spec;
    }

    pub fn told(&self) -> Told {
        self.told.lock().unwrap().clone()
    }

    /// The same once a connection has ended: by then all was heard that came on it.
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
    spec: &Mutex<ResourceSpec>,
    stop: &AtomicBool,
) {
    let Manners { token, slack, in_turns, .. } = manners;
    let mut peers: Vec<Peer> = Vec::new();
    let (mut leases, mut requests) = (0, 0);
    let (began, mut last_grant) = (std::time::Instant::now(), None);
    while !stop.load(Ordering::Acquire) {
        if manners.stops_after.is_some_and(|tokens| leases >= tokens) {
            std::thread::sleep(std::time::Duration::from_millis(20));
            continue;
        }
        let ready: Vec<bool> = {
            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            fds.extend(peers.iter().map(|peer| PollFd::from_borrowed_fd(peer.socket.as_fd(), PollFlags::IN)));
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
            fds.iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        let changed = core::mem::replace(&mut manners.spec, *spec.lock().unwrap()) != manners.spec;
        for peer in peers.iter_mut().filter(|_| changed) {
            for client in peer.attached.clone() {
                peer.say(&ToClient::ShareChanged { client, spec: manners.spec });
                peer.say_part(client, manners.spec);
            }
        }
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
                    if in_turns && let ToDaemon::TokenReturn { client, lease, .. } = message {
                        peer.extend(client, lease, token);
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
            let late = now_ns() > peer.expires + grace.as_nanos();
            if let (Some(&client), Some(lease)) = (peer.attached.first(), peer.holds.filter(|_| late)) {
                peer.holds = None;
                peer.say(&ToClient::Revoke { client, lease, reason: RevokeReason::Expired });
            }
        }
        while began.elapsed() >= manners.keeps_waiting
            && last_grant.is_none_or(|at: std::time::Instant| at.elapsed() >= manners.every)
            && (!in_turns || peers.iter().all(|peer| peer.holds.is_none()))
        {
            let next =
                peers.iter_mut().filter_map(|peer| Some((peer.waits?, peer))).min_by_key(|next| next.0);
            let Some(((_, client), peer)) = next else { break };
            leases += 1;
            last_grant = Some(std::time::Instant::now());
            peer.grant(client, LeaseId::new(leases), token, slack);
        }
        if ready[0]
            && let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)
        {
            let client = ClientId::new(u32::try_from(peers.len()).unwrap(), 1);
            let (sent, received) = (Sequence::default(), Sequence::default());
            let attached = Vec::new();
            peers.push(Peer {
                socket,
                sent,
                received,
                client,
                attached,
                holds: None,
                holds_since: 0,
                expires: 0,
                waits: None,
            });
        }
    }
}

/// Gives the client that wants a token now.
fn hear(peer: &mut Peer, message: ToDaemon, manners: &Manners, told: &mut Told) -> Option<ClientId> {
    let spec = manners.spec;
    match message {
        ToDaemon::Hello { name, run, .. } => {
            told.names.push(name);
            told.runs.push(run);
            peer.say(&ToClient::Welcome { epoch: 1 });
        }
        ToDaemon::Attach { ordinal, device, allocated, .. } => {
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
            peer.attached.push(client);
            let (window, in_flight) = (Duration::from_millis(100), Duration::from_millis(2));
            peer.say(&ToClient::Attached { ordinal, client, gpu: GpuId::new(0), spec, window, in_flight });
            peer.say_part(client, spec);
        }
        ToDaemon::TokenRequest { client } => {
            told.empty_handed += u64::from(peer.holds.is_none());
            return Some(client);
        }
        ToDaemon::TokenReturn { client, lease, used, again } => {
            told.twice += u64::from(
                told.used.insert(lease.number(), used.as_nanos()).is_some() && peer.holds != Some(lease),
            );
            told.returned += 1;
            if peer.holds.take_if(|held| *held == lease).is_some() {
                told.turns.push((now_ns() - peer.holds_since, used.as_nanos()));
            }
            return (again != 0).then_some(client);
        }
        ToDaemon::Usage { lease, used, launches, .. } => {
            told.used.insert(lease.number(), used.as_nanos());
            told.launches = launches;
        }
        ToDaemon::MemoryReserve { client, bytes, wish } => {
            told.memory_requests += 1;
            std::thread::sleep(manners.memory_pause);
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
        ToDaemon::MemoryQuery { client } => peer.say(&ToClient::MemoryView { client }),
        ToDaemon::MemoryRelease { bytes, .. } => told.memory -= bytes.0,
        _ => {}
    }
    None
}
