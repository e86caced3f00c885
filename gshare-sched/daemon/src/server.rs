//! The daemon's loop: sockets, pidfds, clock and commands around a [`Node`]. Nothing is decided here but which users may
//! connect and how many connections there may be.

use crate::access::Access;
use crate::clock::{Clock, MonotonicClock};
use crate::config::{Config, ConfigError};
use crate::cpu_latency::{self, CpuLatency};
use crate::crowd::admits;
use crate::facts;
use crate::front::{Front, Listeners};
use crate::handle::{Command, Handle, Inbox, Reply, Running, line};
use crate::health::{self, Lost};
use crate::http;
use crate::journal::Journal;
use crate::metrics::{Metrics, ReasonLabelSet};
use crate::nvml::{DeviceFact, DeviceFacts, DeviceHealth, NodeDriver, NvmlHealth};
use crate::observed::Observed;
use crate::peer::peer_of;
use crate::snapshot::{ClientSnapshot, Snapshot};
use gshare_core::reason::{Fault, Reason, RefusalCode};
use gshare_core::slots::Slots;
use gshare_core::token::TokenScheduler;
use gshare_core::wire::{MAX_FRAME, Sequence, ToClient, ToDaemon};
use gshare_core::{ConnId, DeviceUuid, Duration, Engine as _, Timestamp};
use gshare_sched::node::{Node, NodeAction, NodeError, NodeEvent, Note, Peer, vertical_scaler};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    recv, send, socket_with,
};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Why a daemon cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// The configuration cannot be put in force.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A setting of the token engine is out of its bounds.
    #[error("token engine: {0}")]
    Engine(#[from] gshare_core::ConfigError),
    /// Another daemon listens there.
    #[error("{path}: a daemon listens there already")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// A file that is not a socket is where a socket should be.
    #[error("{path}: the file there is not a socket: need a path that is free")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A path, socket or address cannot be used.
    #[error("{what}: {cause}")]
    Setup {
        /// The path, socket or address.
        what: String,
        /// Error of the system call.
        cause: io::Error,
    },
    /// The daemon has stopped.
    #[error("the daemon has stopped")]
    Stopped,
    /// A system call failed that does not fail.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for DaemonError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// Most frames that wait for one peer to read. 64: a peer that is this far behind has stopped reading, for the kernel
/// has buffered some 200 before.
const MAX_QUEUE: usize = 64;
/// How long a peer may take to say Hello.
const HELLO_PATIENCE: Duration = Duration::from_millis(5_000);
/// How long the listener rests when the system has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Events taken from the kernel at a time.
const BATCH: usize = 64;

/// The subject of a readiness event: in the upper byte of its data; below are 24 bits of generation and 32 of slot.
const LISTENER: u64 = 0;
const INBOX: u64 = 1;
const FRAME: u64 = 2;
const PROCESS: u64 = 3;
/// Frames of a process that has ended which are still taken: a child may hold its socket and go on.
const LAST_FRAMES: u32 = 256;
const TIMER: u64 = 4;

fn data_of(id: ConnId, tag: u64) -> u64 {
    tag << 56 | u64::from(id.generation() & 0xff_ffff) << 32 | u64::from(id.slot())
}

/// The connection that an event is about, if it is still there. Of its generation the lower bits do: a stale event is not
/// older than a batch.
fn conn_of<T>(conns: &Slots<ConnId, T>, data: u64) -> Option<ConnId> {
    #[expect(clippy::cast_possible_truncation, reason = "the fields of the integer")]
    let (slot, bits) = (data as u32, (data >> 32) as u32 & 0xff_ffff);
    conns.id(slot).filter(|id| id.generation() & 0xff_ffff == bits)
}

/// Builds a [`Daemon`] with a clock or a policy of one's own.
#[derive(Debug)]
pub struct DaemonBuilder {
    config: Config,
    clock: Arc<dyn Clock>,
    engine: Option<EngineBox>,
    facts: Box<dyn DeviceFacts>,
    health: Box<dyn DeviceHealth>,
}

struct EngineBox(Box<dyn TokenScheduler>);

impl std::fmt::Debug for EngineBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("dyn TokenScheduler")
    }
}

impl DaemonBuilder {
    /// Another clock than `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// Another policy than those of [`TokenPolicy`](crate::TokenPolicy). A journal written under it cannot be replayed.
    #[must_use]
    pub fn engine(self, engine: Box<dyn TokenScheduler>) -> Self {
        Self { engine: Some(EngineBox(engine)), ..self }
    }

    /// Sets a source other than NVML that knows the node's devices.
    #[must_use]
    pub fn facts(self, facts: Box<dyn DeviceFacts>) -> Self {
        Self { facts, ..self }
    }

    /// Sets a source other than NVML that knows which of the node's devices are lost.
    #[must_use]
    pub fn health(self, health: Box<dyn DeviceHealth>) -> Self {
        Self { health, ..self }
    }

    /// Binds the sockets and begins the journal. Processes may connect from here on; they are served by
    /// [`Daemon::run`].
    pub fn build(self) -> Result<Daemon, DaemonError> {
        let Self { config, clock, engine, facts, health } = self;
        let engine_config = config.tokens.engine(config.max_clients);
        // A scheduler of the host's own cannot be built again from what is written here, so nothing is.
        let (engine, described) = match engine {
            Some(EngineBox(engine)) => (engine, serde_json::Value::Null),
            None => {
                let described = serde_json::to_value(&engine_config).map_err(io::Error::from)?;
                (config.tokens.policy.build(engine_config)?, described)
            }
        };
        let scaler = vertical_scaler(config.max_clients)?;
        // The only use of the wall clock: a number by which people tell runs apart. Nothing depends on its order.
        let epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
        let epoch = u64::try_from(epoch).unwrap_or(u64::MAX);
        let setup = |what: &Path| {
            let what = what.display().to_string();
            move |cause: io::Error| DaemonError::Setup { what, cause }
        };
        raise_descriptor_limit();
        let lock = claim(&config.socket)?;
        // A daemon that was killed leaves its socket, and one that ended while processes were connected this file.
        let left = beside(&config.socket, ".left");
        let predecessor = config.socket.exists() || left.exists();
        let _ = std::fs::remove_file(left);
        let listener = bind_frames(&config.socket)?;
        let admin = bind_admin(&config.admin_socket)?;
        let mut node_config = config.node();
        node_config.predecessor = predecessor;
        let journal = match &config.journal {
            None => Journal::off(),
            // Without a journal the node is still served: a full disk must not take the GPUs away.
            Some(journal) => {
                let node = serde_json::to_value(&node_config).map_err(io::Error::from)?;
                Journal::create(journal, epoch, config.tokens.policy, described, node)
            }
        };
        let node = Node::new(node_config, epoch, engine, scaler).map_err(ConfigError::Node)?;
        let file = Path::new(cpu_latency::FILE);
        let cpu_latency = CpuLatency::new(file, config.cpu_latency).map_err(setup(file))?;
        let metrics = Arc::new(Metrics::default());
        let (handle, inbox) = line(Arc::clone(&metrics))?;
        let endpoint = config.metrics.as_ref().map(http::Listener::bind).transpose()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = |tag: u64| epoll::EventData::new_u64(tag << 56);
        epoll::add(&epoll, &listener, data(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, inbox.fd(), data(INBOX), epoll::EventFlags::IN)?;
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        // On its edge: it is set again each time and never read.
        epoll::add(&epoll, &timer, data(TIMER), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Daemon {
            files: vec![config.socket.clone(), config.admin_socket.clone(), beside(&config.socket, ".lock")],
            lock: Some(lock),
            access: Arc::new(Access::of(&config)),
            node: Observed::new(node, journal, Arc::clone(&metrics)),
            config,
            listeners: Some(Listeners { admin, metrics: endpoint }),
            clock,
            epoll,
            timer,
            rings_at: None,
            listener,
            resume_accept: None,
            idle_due: None,
            inbox,
            handle,
            metrics,
            epoch,
            conns: Slots::default(),
            users: BTreeMap::new(),
            cpu_latency,
            facts: Some(facts),
            questions: None,
            health: Some(health),
            lost: Lost::default(),
            known: BTreeSet::new(),
            hello_due: VecDeque::new(),
            actions: Vec::new(),
            asking: BTreeMap::new(),
            snapshots: 0,
            frame: Vec::with_capacity(MAX_FRAME),
            received: Box::new([0; MAX_FRAME + 1]),
        })
    }
}

#[derive(Debug)]
struct Conn {
    socket: OwnedFd,
    /// The process, once it has said Hello.
    process: Option<OwnedFd>,
    peer: Peer,
    received: Sequence,
    sent: Sequence,
    /// Frames that the kernel had no room for.
    queue: VecDeque<Box<[u8]>>,
    greeted: bool,
    /// An Attach that waits for what the driver knows of its device. What came after it waits in the socket.
    attaching: Option<ToDaemon>,
}

/// A node daemon. See the [crate](crate) for what it does and how to embed it.
#[derive(Debug)]
pub struct Daemon {
    node: Observed,
    config: Config,
    access: Arc<Access>,
    clock: Arc<dyn Clock>,
    epoll: OwnedFd,
    timer: OwnedFd,
    /// When the timer rings, if it is set.
    rings_at: Option<Timestamp>,
    listener: OwnedFd,
    /// When to listen again, after the system had no descriptors left.
    resume_accept: Option<Timestamp>,
    /// When to stop, if no process connects before.
    idle_due: Option<Timestamp>,
    /// Sockets for questions, until the daemon runs.
    listeners: Option<Listeners>,
    /// The sockets, then the lock.
    files: Vec<PathBuf>,
    /// Held until the files are gone.
    lock: Option<File>,
    inbox: Inbox,
    handle: Handle,
    metrics: Arc<Metrics>,
    epoch: u64,
    conns: Slots<ConnId, Conn>,
    /// Connections by user.
    users: BTreeMap<u32, u32>,
    cpu_latency: CpuLatency,
    /// The source of facts about devices, until the daemon runs; then the way to it, and the devices that the node has been told of.
    facts: Option<Box<dyn DeviceFacts>>,
    questions: Option<Sender<facts::Question>>,
    known: BTreeSet<DeviceUuid>,
    /// The source of news of lost devices, until the daemon runs; and what was heard.
    health: Option<Box<dyn DeviceHealth>>,
    lost: Lost,
    /// Connections that have not said Hello, oldest first.
    hello_due: VecDeque<(Timestamp, ConnId)>,
    /// The node's orders that are to be carried out, in order.
    actions: Vec<NodeAction>,
    /// Questions for a snapshot that wait for the node to know what clients use, by their numbers; and the last number.
    asking: BTreeMap<u32, Reply<Snapshot>>,
    snapshots: u32,
    frame: Vec<u8>,
    /// One byte more than a frame, so that a longer one is seen as such.
    received: Box<[u8; MAX_FRAME + 1]>,
}

impl Daemon {
    /// A daemon with the monotonic clock and the scheduler of the configuration.
    pub fn new(config: Config) -> Result<Self, DaemonError> {
        Self::builder(config).build()
    }

    /// A daemon with other parts.
    pub fn builder(config: Config) -> DaemonBuilder {
        let facts = Box::<NodeDriver>::default();
        let health = Box::<NvmlHealth>::default();
        DaemonBuilder { config, clock: Arc::new(MonotonicClock), engine: None, facts, health }
    }

    /// A handle on it.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves in a thread of its own.
    pub fn spawn(self) -> Result<Running, DaemonError> {
        let handle = self.handle();
        let thread = std::thread::Builder::new().name("gshared".into()).spawn(move || self.run())?;
        Ok(Running::new(handle, thread))
    }

    /// Serves until it is told to stop.
    pub fn run(mut self) -> Result<(), DaemonError> {
        let listeners = self.listeners.take().ok_or(DaemonError::Stopped)?;
        let front = Front::start(listeners, self.handle(), Arc::clone(&self.access))?;
        tracing::info!(socket = %self.files[0].display(), epoch = self.epoch, "listening");
        let health = self.health.take().map(|health| health::watch(health, Arc::clone(&self.lost)));
        let health = health.transpose()?;
        let questions = self.facts.take().map(|facts| facts::answer(facts, self.handle()));
        self.questions = questions.transpose()?;
        let served = self.serve();
        tracing::info!("stopping");
        drop(health);
        drop(front);
        self.node.finish();
        let (files, lock) = (std::mem::take(&mut self.files), self.lock.take());
        if !self.conns.is_empty() {
            // The next daemon expects those back that are connected now. Without the file it does not wait for them.
            let left = beside(&self.config.socket, ".left");
            let made = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&left);
            if let Err(error) = made {
                tracing::warn!(%error, path = %left.display(), "the next daemon is not told of the processes here");
            }
        }
        drop(self);
        for file in files {
            let _ = std::fs::remove_file(file);
        }
        drop(lock);
        served
    }

    fn serve(&mut self) -> Result<(), DaemonError> {
        let mut events = Vec::with_capacity(BATCH);
        let mut now = self.clock.now();
        self.idle(now);
        loop {
            self.set_timer(now)?;
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            for event in &events {
                now = self.clock.now();
                let (flags, data) = (event.flags, event.data.u64());
                let id = conn_of(&self.conns, data);
                match (data >> 56, id) {
                    (LISTENER, _) => self.accept(now),
                    (INBOX, _) => {
                        self.inbox.clear();
                        while let Ok(command) = self.inbox.commands.try_recv() {
                            // The command may have been sent after the answer to the one before.
                            now = self.clock.now();
                            if !self.command(now, command) {
                                return Ok(());
                            }
                        }
                    }
                    (FRAME, Some(id)) => self.ready(now, id, flags),
                    (PROCESS, Some(id)) => {
                        // The last that a process says is what it used beyond its token.
                        for _ in 0..LAST_FRAMES {
                            if !self.receive(now, id) {
                                break;
                            }
                            self.settle(now);
                        }
                        self.close(now, id);
                    }
                    (TIMER, _) => self.rings_at = None,
                    // Closed by an event of this batch.
                    _ => continue,
                }
                self.settle(now);
            }
            if self.next_deadline().is_some_and(|due| due <= now) {
                self.deadlines(now);
                self.settle(now);
                if self.idle_due.is_some_and(|due| due <= now) {
                    return Ok(());
                }
            }
        }
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let hello = self.hello_due.front().map(|(due, _)| *due);
        [self.node.node().next_deadline(), hello, self.resume_accept, self.idle_due]
            .into_iter()
            .flatten()
            .min()
    }

    /// Has the timer ring at the next deadline, or before: a timeout of each wait would be set in the hardware and
    /// taken back with every frame, while deadlines mostly move on.
    fn set_timer(&mut self, now: Timestamp) -> Result<(), DaemonError> {
        let Some(due) = self.next_deadline().filter(|due| self.rings_at.is_none_or(|rings| *due < rings))
        else {
            return Ok(());
        };
        // Zero would stop it.
        let wait = due.saturating_since(now).as_nanos().max(1);
        let value = Timespec {
            tv_sec: i64::try_from(wait / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(wait % 1_000_000_000).unwrap_or(0),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        self.rings_at = Some(due);
        Ok(())
    }

    /// Starts or stops the wait for the first connection.
    fn idle(&mut self, now: Timestamp) {
        let after = self.config.idle_exit.filter(|_| self.conns.is_empty());
        self.idle_due = after.map(|after| now.saturating_add(after));
    }

    /// Tells the node what happened. Its actions are carried out by [`Daemon::settle`].
    fn tell(&mut self, now: Timestamp, event: NodeEvent) {
        // A refused event has changed nothing.
        let _ = self.node.handle(now, event, &mut self.actions);
    }

    fn deadlines(&mut self, now: Timestamp) {
        if self.node.node().next_deadline().is_some_and(|due| due <= now) {
            self.tell(now, NodeEvent::DeadlineReached);
        }
        while let Some((due, id)) = self.hello_due.front().copied() {
            let greeted = self.conns.get(id).is_none_or(|conn| conn.greeted);
            if due > now && !greeted {
                break;
            }
            self.hello_due.pop_front();
            if !greeted {
                self.drop_connection(now, id, Fault::Slow);
            }
        }
        if self.resume_accept.is_some_and(|due| due <= now) {
            self.resume_accept = None;
            let data = epoll::EventData::new_u64(LISTENER << 56);
            let _ = epoll::modify(&self.epoll, &self.listener, data, epoll::EventFlags::IN);
        }
    }

    fn data(id: ConnId, tag: u64) -> epoll::EventData {
        epoll::EventData::new_u64(data_of(id, tag))
    }

    fn accept(&mut self, now: Timestamp) {
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // Would be ready again at once: rest, so that clients which are in are served.
                self.resume_accept = Some(now.saturating_add(ACCEPT_PAUSE));
                let data = epoll::EventData::new_u64(LISTENER << 56);
                let _ = epoll::modify(&self.epoll, &self.listener, data, epoll::EventFlags::empty());
                self.metrics.dropped(RefusalCode::Full);
                return;
            }
            // The peer is gone already, or another thread of a host took it.
            Err(_) => return,
        };
        self.metrics.connects.inc();
        let Ok(peer) = peer_of(&socket) else { return };
        if let Err((code, text)) = self.admit(peer.uid) {
            tracing::info!(uid = peer.uid, pid = peer.pid, text, "refused");
            self.frame.clear();
            let refused = match self.config.refused_run {
                // Before Hello nothing is known of limits: those of the process hold.
                true => ToClient::Unserved { code, text, spec: None },
                false => ToClient::Refused { code, text },
            };
            refused.encode(0, &mut self.frame);
            let _ = send(&socket, &self.frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            self.metrics.dropped(code);
            return;
        }
        let conn = Conn {
            socket,
            process: None,
            peer,
            received: Sequence::default(),
            sent: Sequence::default(),
            queue: VecDeque::new(),
            greeted: false,
            attaching: None,
        };
        let id = self.conns.insert(conn);
        *self.users.entry(peer.uid).or_default() += 1;
        self.idle_due = None;
        let Some(conn) = self.conns.get(id) else { return };
        if epoll::add(&self.epoll, &conn.socket, Self::data(id, FRAME), epoll::EventFlags::IN).is_err() {
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

    /// Whether this user may have another connection, or the refusal.
    fn admit(&self, uid: u32) -> Result<(), (RefusalCode, String)> {
        if !self.access.allows(uid) {
            return Err((
                RefusalCode::NotAllowed,
                format!("user {uid} may not use this daemon (allow_uids)"),
            ));
        }
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

    /// Takes a connection out of the books.
    fn forget(&mut self, id: ConnId) {
        let Some(conn) = self.conns.remove(id) else { return };
        if let Some(count) = self.users.get_mut(&conn.peer.uid) {
            *count -= 1;
            if *count == 0 {
                self.users.remove(&conn.peer.uid);
            }
        }
    }

    fn ready(&mut self, now: Timestamp, id: ConnId, flags: epoll::EventFlags) {
        if flags.contains(epoll::EventFlags::OUT) && !self.flush(id) {
            return;
        }
        if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            self.receive(now, id);
        }
    }

    /// Takes one frame of a connection, or closes it at its end. `false`: there was none, or it waits behind an Attach.
    fn receive(&mut self, now: Timestamp, id: ConnId) -> bool {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.attaching.is_none()) else { return false };
        let length = match recv(&conn.socket, &mut self.received[..], RecvFlags::TRUNC) {
            Ok((length, _)) if length > 0 => length,
            Err(Errno::AGAIN | Errno::INTR) => return false,
            // The peer closed, or is gone.
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
                self.drop_connection(now, id, error.reason());
            }
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

    /// Tells the node what a peer says.
    fn hear(&mut self, now: Timestamp, id: ConnId, frame: ToDaemon) {
        let Some(peer) = self.conns.get(id).map(|conn| conn.peer) else { return };
        let clients_change = matches!(frame, ToDaemon::Attach { .. } | ToDaemon::Detach { .. });
        let event = NodeEvent::Received { conn: id, peer, frame };
        let handled = self.node.handle(now, event, &mut self.actions);
        if let Err(error @ NodeError::UnknownConnection { .. }) = handled {
            tracing::warn!(pid = peer.pid, %error, "dropped");
            self.drop_connection(now, id, RefusalCode::Protocol);
        }
        if clients_change {
            self.cpu_latency.set_shared(self.node.node().is_shared());
        }
    }

    /// Has the driver asked about a device before the node hears of it from a process. Only this connection waits for the answer.
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

    /// The driver has answered: the connection that waited goes on.
    fn found(&mut self, now: Timestamp, id: ConnId, fact: Option<DeviceFact>) {
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

    /// Watches the process behind a connection: a forked child would keep the socket open after its death.
    fn watch(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // Not ours to see in another pid namespace; the end of the connection must do then.
        let Some(pid) = Pid::from_raw(conn.peer.pid) else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        if epoll::add(&self.epoll, &process, Self::data(id, PROCESS), epoll::EventFlags::IN).is_ok() {
            conn.process = Some(process);
        }
    }

    /// Carries out actions until there are none; the end of a connection leads to more.
    fn settle(&mut self, now: Timestamp) {
        let mut next = 0;
        while let Some(action) = self.actions.get_mut(next) {
            let action = std::mem::replace(action, NodeAction::Note(Note::NoEffect));
            next += 1;
            match action {
                NodeAction::Send { conn, frame } => self.send_or_drop(now, conn, &frame),
                NodeAction::Drop { conn, reason } => self.drop_connection(now, conn, reason),
                NodeAction::UseKnown { question } => {
                    if let Some(reply) = self.asking.remove(&question) {
                        reply.send(self.snapshot(now));
                    }
                }
                // Journal and metrics have seen it.
                NodeAction::Note(_) => {}
            }
        }
        self.actions.clear();
        self.node.write_journal();
    }

    fn send_or_drop(&mut self, now: Timestamp, id: ConnId, frame: &ToClient) {
        if !self.send(id, frame) {
            self.drop_connection(now, id, Fault::Slow);
        }
    }

    /// Ends a connection, if it is there, and counts why.
    fn drop_connection(&mut self, now: Timestamp, id: ConnId, reason: impl Into<Reason>) {
        if self.conns.get(id).is_some() {
            self.metrics.dropped(reason);
            self.close(now, id);
        }
    }

    /// Sends without waiting; `false` when the peer is too far behind.
    fn send(&mut self, id: ConnId, message: &ToClient) -> bool {
        self.node.write_journal();
        let Some(conn) = self.conns.get_mut(id) else { return true };
        self.frame.clear();
        message.encode(conn.sent.stamp(), &mut self.frame);
        if conn.queue.is_empty() {
            match send(&conn.socket, &self.frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => {}
                // Sent; or the peer is gone, and the kernel will say so.
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

    /// Sends what waits; `false` when the connection is closed.
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

    /// Forgets a connection, and tells the node.
    fn close(&mut self, now: Timestamp, id: ConnId) {
        // A descriptor that is closed leaves the epoll set by itself, unless a forked child holds it too.
        if let Some(conn) = self.conns.get(id) {
            let _ = epoll::delete(&self.epoll, &conn.socket);
        }
        let greeted = self.conns.get(id).is_some_and(|conn| conn.greeted);
        self.forget(id);
        if greeted {
            self.tell(now, NodeEvent::Closed { conn: id });
        }
        self.cpu_latency.set_shared(self.node.node().is_shared());
        self.idle(now);
    }

    /// Does what the host asked for; `false` when that is to stop.
    fn command(&mut self, now: Timestamp, command: Command) -> bool {
        match command {
            Command::Stop => return false,
            Command::Found(conn, fact) => {
                self.found(now, conn, fact);
                self.settle(now);
            }
            Command::Snapshot(reply) => {
                self.snapshots = self.snapshots.wrapping_add(1);
                self.asking.insert(self.snapshots, reply);
                self.tell(now, NodeEvent::UseAsked { question: self.snapshots });
                self.settle(now);
            }
            Command::Reload(config, reply) => {
                let result = self.reload(now, *config);
                let label = if result.is_ok() { "done" } else { "refused" };
                self.access.set(&self.config);
                self.metrics.reloads.get_or_create(&ReasonLabelSet { result: label }).inc();
                self.settle(now);
                let _ = reply.send(result);
            }
        }
        true
    }

    /// Puts another configuration in force, or changes nothing.
    fn reload(&mut self, now: Timestamp, config: Config) -> Result<(), ConfigError> {
        self.config.check_live(&config)?;
        let event = NodeEvent::Reloaded { config: Box::new(config.node()) };
        match self.node.handle(now, event, &mut self.actions) {
            Err(NodeError::Config(error)) => return Err(error.into()),
            Err(error) => tracing::warn!(%error, "the configuration is not put in force"),
            Ok(()) => self.config = config,
        }
        Ok(())
    }

    fn snapshot(&self, now: Timestamp) -> Snapshot {
        let (node, reasons) = (self.node.node(), &self.node.reasons);
        let client = |client| {
            let why = reasons.waits(now, node, &client);
            ClientSnapshot { why, ..ClientSnapshot::of(now, client) }
        };
        Snapshot {
            now_ns: now,
            epoch: self.epoch,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            socket: self.config.socket.clone(),
            connections: self.conns.len(),
            processes: node.processes(),
            drops: self.metrics.drops(),
            journal_lost: self.node.journal.lost(),
            journal: self.config.journal.as_ref().map(|journal| journal.dir.clone()),
            journal_failure: self.node.journal.failure().map(str::to_owned),
            devices: node.devices().map(Into::into).collect(),
            clients: node.clients(now).map(client).collect(),
            decisions: reasons.decisions(),
            lost: self.lost.lock().clone(),
        }
    }
}

/// Two descriptors per process: the soft limit of 1024 would end at 500 clients.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// A file beside a socket, with the socket's name and this ending.
fn beside(socket: &Path, ending: &str) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Makes the directory of a socket, and takes a lock beside it that its daemon holds as long as it lives: of two that start
/// at once, one could otherwise take away the socket at which the other is about to listen.
fn claim(socket: &Path) -> Result<File, DaemonError> {
    let path = beside(socket, ".lock");
    let setup = |cause| DaemonError::Setup { what: path.display().to_string(), cause };
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(setup)?;
    }
    // For this user alone: a process that may read it may lock it.
    let open = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    loop {
        let file = open().map_err(setup)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(DaemonError::InUse { path: socket.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(setup(error)),
        }
        // A daemon that stops removes its lock file: this may be one that was opened just before.
        let (locked, there) = (file.metadata().map_err(setup)?, std::fs::metadata(&path));
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (locked.dev(), locked.ino())) {
            return Ok(file);
        }
    }
}

/// Makes the path of a socket free: takes away a socket at which no process listens, and nothing else.
///
/// # Errors
/// [`DaemonError::NotASocket`] for another file, also for a link; [`DaemonError::InUse`] for a socket that a process has.
pub(crate) fn clear_the_way(path: &Path) -> Result<(), DaemonError> {
    let setup = |cause| DaemonError::Setup { what: path.display().to_string(), cause };
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(setup(error)),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(DaemonError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    let address = SocketAddrUnix::new(path).map_err(|cause| setup(cause.into()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(setup),
        // A socket of another type is told apart only while a process has it.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(DaemonError::InUse { path: path.to_owned() }),
        Err(cause) => Err(setup(cause.into())),
    }
}

fn bind_frames(path: &Path) -> Result<OwnedFd, DaemonError> {
    let setup = |cause: Errno| DaemonError::Setup {
        what: format!("socket = {}", path.display()),
        cause: cause.into(),
    };
    clear_the_way(path)?;
    let address = SocketAddrUnix::new(path).map_err(setup)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(setup)?;
    bind(&socket, &address).map_err(setup)?;
    open_to_all(path)?;
    listen(socket.as_fd(), 1024).map_err(setup)?;
    Ok(socket)
}

fn bind_admin(path: &Path) -> Result<UnixListener, DaemonError> {
    let setup = |cause| DaemonError::Setup { what: format!("admin_socket = {}", path.display()), cause };
    clear_the_way(path)?;
    let listener = UnixListener::bind(path).map_err(setup)?;
    open_to_all(path).map_err(setup)?;
    Ok(listener)
}

/// Lets every user connect: access is decided by the peer's uid, so that a user who may not gets an answer.
fn open_to_all(path: &Path) -> io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_at_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gshare.sock");
        clear_the_way(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        let error = clear_the_way(&path).unwrap_err();
        assert!(matches!(&error, DaemonError::NotASocket { path: at } if *at == path), "{error}");
        assert!(error.to_string().contains("gshare.sock"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();

        let in_use = || matches!(clear_the_way(&path), Err(DaemonError::InUse { .. }));
        let admin = bind_admin(&path).unwrap();
        assert!(in_use() && bind_admin(&path).is_err() && bind_frames(&path).is_err());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(clear_the_way(&link), Err(DaemonError::NotASocket { .. })));
        drop(admin);
        // Sockets of both types are told apart: the next daemon need not have the same keys.
        let frames = bind_frames(&path).unwrap();
        assert!(in_use() && bind_admin(&path).is_err());
        drop(frames);
        let metrics = crate::config::MetricsAddress::Unix(path.clone());
        let endpoint = http::Listener::bind(&metrics).unwrap();
        assert!(in_use() && http::Listener::bind(&metrics).is_err());
        drop(endpoint);
        clear_the_way(&path).unwrap();
        assert!(!path.exists());
    }

    /// The generation of a slot has more bits than an event has room for.
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
