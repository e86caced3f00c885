//! The daemon's loop: sockets, pidfds, clock and commands around a [`Node`]. The loop decides only which users may connect,
//! and how many connections may be open; the node decides the rest.

mod connections;

use crate::access::Access;
use crate::admin::Room;
use crate::clock::{Clock, MonotonicClock};
use crate::config::{Config, ConfigError};
use crate::facts::{self, Facts};
use crate::front::{Front, Listeners};
use crate::handle::{Command, Handle, Inbox, Park, Reply, Running, line};
use crate::health::{self, Health, Last};
use crate::http;
use crate::journal::Journal;
use crate::metrics::{Metrics, ReasonLabelSet};
use crate::moves::Moves;
use crate::neighbours::Neighbours;
use crate::nvml::{DeviceFact, News, NodeDriver, NvmlHealth};
use crate::observed::Observed;
use crate::snapshot::{ClientSnapshot, Snapshot};
use crate::sockets::{beside, bind_admin, bind_frames, claim};
use crate::ticket::Tickets;
use connections::{Conn, FRAME, PROCESS, conn_of};
use gshare_core::reason::Fault;
use gshare_core::slots::Slots;
use gshare_core::token::TokenScheduler;
use gshare_core::wire::MAX_FRAME;
use gshare_core::{ConnId, DeviceUuid, Engine as _, Timestamp};
use gshare_sched::node::{Node, NodeAction, NodeError, NodeEvent, Note, vertical_scaler};
use gshare_sched::scale::VerticalScaler;
use gshare_sched::token::MultiToken;
use rustix::event::epoll;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Errors that keep a daemon from starting or going on.
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
    /// A file of another type is in the socket's place.
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
    /// A system call failed unexpectedly.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for DaemonError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// Most events taken from the kernel at a time.
const BATCH: usize = 64;
/// Most frames still taken from an ended process. The bound is needed because a child may hold the socket and go on sending.
const LAST_FRAMES: u32 = 256;

/// Subjects of a readiness event, in the upper byte of its data. The lower bytes are 24 bits of a connection's generation and 32
/// bits of its slot. The other subjects are [`FRAME`] and [`PROCESS`].
const LISTENER: u64 = 0;
const INBOX: u64 = 1;
const TIMER: u64 = 4;
const NEIGHBOUR: u64 = 5;

/// Builds a [`Daemon`] with the host's own clock, policy or sources.
#[derive(Debug)]
pub struct DaemonBuilder {
    config: Config,
    clock: Arc<dyn Clock>,
    engine: Own<dyn TokenScheduler>,
    scaler: Own<dyn VerticalScaler>,
    facts: Own<Facts>,
    health: Own<Health>,
}

/// The host's own policy, if it brings one.
struct Own<T: ?Sized>(Option<Box<T>>);

impl<T: ?Sized> std::fmt::Debug for Own<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "its own" } else { "ours" })
    }
}

impl DaemonBuilder {
    /// Sets a clock other than `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// Sets a policy other than [`MultiToken`]. A journal written under another policy cannot be replayed.
    #[must_use]
    pub fn engine(self, engine: Box<dyn TokenScheduler>) -> Self {
        Self { engine: Own(Some(engine)), ..self }
    }

    /// Sets a vertical scaler other than [`DiluVertical`](gshare_sched::scale::DiluVertical). A journal written under another
    /// scaler cannot be replayed.
    #[must_use]
    pub fn scaler(self, scaler: Box<dyn VerticalScaler>) -> Self {
        Self { scaler: Own(Some(scaler)), ..self }
    }

    /// Sets a source of facts about the node's devices other than NVML. It finds a device by its UUID, whether written as a GPU or as
    /// a MIG instance. The daemon asks in a separate thread, once for each Attach to a device not found before.
    #[must_use]
    pub fn facts(self, find: impl FnMut(DeviceUuid) -> Option<DeviceFact> + Send + 'static) -> Self {
        Self { facts: Own(Some(Box::new(find))), ..self }
    }

    /// Sets a source of news of the node's devices other than NVML. It lists the devices lost now and the sensors, or gives `None` where
    /// it cannot tell, and then its last answer stays. The daemon asks once a second in a separate thread, since a driver may take long to answer after
    /// the loss of a device.
    #[must_use]
    pub fn health(self, news: impl FnMut() -> Option<News> + Send + 'static) -> Self {
        Self { health: Own(Some(Box::new(news))), ..self }
    }

    /// Binds the sockets and begins the journal. Processes may connect from here on; [`Daemon::run`] serves them.
    pub fn build(self) -> Result<Daemon, DaemonError> {
        let Self { config, clock, engine, scaler, facts, health } = self;
        let engine_config = config.engine();
        // A replay cannot build a policy of the host's own, so the journal does not describe the engine then.
        let described = match (&engine.0, &scaler.0) {
            (None, None) => serde_json::to_value(&engine_config).map_err(io::Error::from)?,
            _ => serde_json::Value::Null,
        };
        let engine = match engine.0 {
            Some(engine) => engine,
            None => Box::new(MultiToken::new(engine_config)?),
        };
        let scaler = scaler.0.unwrap_or_else(vertical_scaler);
        // The wall clock is used only for this number, by which people tell runs apart. No code depends on its order.
        let epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
        let epoch = u64::try_from(epoch).unwrap_or(u64::MAX);
        raise_descriptor_limit();
        let lock = claim(&config.socket)?;
        // A killed daemon leaves its socket, and a daemon that ended while processes were connected leaves this file.
        let left = beside(&config.socket, ".left");
        let predecessor = config.socket.exists() || left.exists();
        let _ = std::fs::remove_file(left);
        let listener = bind_frames(&config.socket)?;
        let admin = bind_admin(&config.admin_socket())?;
        let mut node_config = config.node();
        node_config.predecessor = predecessor;
        let journal = match &config.journal {
            None => Journal::off(),
            // A failed journal does not stop the daemon: a full disk must not take the GPUs away.
            Some(journal) => {
                let node = serde_json::to_value(&node_config).map_err(io::Error::from)?;
                Journal::create(journal, epoch, described, node)
            }
        };
        let node = Node::new(node_config, epoch, engine, scaler).map_err(ConfigError::Node)?;
        let metrics = Arc::new(Metrics::default());
        let (handle, inbox) = line(Arc::clone(&metrics))?;
        let endpoint = config.metrics.as_ref().map(http::Listener::bind).transpose()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = |tag: u64| epoll::EventData::new_u64(tag << 56);
        epoll::add(&epoll, &listener, data(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, inbox.fd(), data(INBOX), epoll::EventFlags::IN)?;
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        // Edge-triggered, since the loop sets the timer again each time and never reads it.
        epoll::add(&epoll, &timer, data(TIMER), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Daemon {
            files: vec![config.socket.clone(), config.admin_socket(), beside(&config.socket, ".lock")],
            lock: Some(lock),
            access: Arc::new(Access::of(&config)),
            tickets: Tickets::at(&beside(&config.socket, ".key"))?,
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
            facts,
            questions: None,
            health,
            news: Last::default(),
            neighbours: Neighbours::default(),
            known: BTreeSet::new(),
            hello_due: VecDeque::new(),
            actions: Vec::new(),
            asking: BTreeMap::new(),
            moves: Moves::default(),
            snapshots: 0,
            frame: Vec::with_capacity(MAX_FRAME),
            received: Box::new([0; MAX_FRAME + 1]),
        })
    }
}

/// A node daemon. The [crate documentation](crate) describes its tasks and its embedding.
#[derive(Debug)]
pub struct Daemon {
    node: Observed,
    config: Config,
    access: Arc<Access>,
    tickets: Tickets,
    clock: Arc<dyn Clock>,
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Time of the timer's next ring, if the timer is set.
    rings_at: Option<Timestamp>,
    listener: OwnedFd,
    /// Time to listen again after the system ran out of descriptors.
    resume_accept: Option<Timestamp>,
    /// Time to stop if no process connects before.
    idle_due: Option<Timestamp>,
    /// Listeners of the admin socket and the metrics endpoint, until the daemon runs.
    listeners: Option<Listeners>,
    /// Paths of the sockets, then of the lock file.
    files: Vec<PathBuf>,
    /// The lock, held until the files are removed.
    lock: Option<File>,
    inbox: Inbox,
    handle: Handle,
    metrics: Arc<Metrics>,
    epoch: u64,
    conns: Slots<ConnId, Conn>,
    /// Number of connections by user.
    users: BTreeMap<u32, u32>,
    /// The source of facts about devices, until the daemon runs. Then `questions` leads to the source, and `known` are the devices
    /// reported to the node.
    facts: Own<Facts>,
    questions: Option<Sender<facts::Question>>,
    known: BTreeSet<DeviceUuid>,
    /// The source of news of lost devices, until the daemon runs, and the last news.
    health: Own<Health>,
    news: Last,
    neighbours: Neighbours,
    /// Connections before their Hello with their deadlines, oldest first.
    hello_due: VecDeque<(Timestamp, ConnId)>,
    /// The node's actions to carry out, in order.
    actions: Vec<NodeAction>,
    /// Questions for a snapshot by number, until the node knows the clients' use of memory; and the last number.
    asking: BTreeMap<u32, Reply<Snapshot>>,
    moves: Moves,
    snapshots: u32,
    frame: Vec<u8>,
    /// Room for one byte more than a frame, so that a longer frame is recognised.
    received: Box<[u8; MAX_FRAME + 1]>,
}

impl Daemon {
    /// A daemon with the monotonic clock, the built-in token scheduler and NVML.
    pub fn new(config: Config) -> Result<Self, DaemonError> {
        Self::builder(config).build()
    }

    /// A builder for a daemon with other parts.
    pub fn builder(config: Config) -> DaemonBuilder {
        let (mut driver, mut watched) = (NodeDriver::default(), NvmlHealth::default());
        let (clock, engine, scaler) = (Arc::new(MonotonicClock), Own(None), Own(None));
        let builder = DaemonBuilder { config, clock, engine, scaler, facts: Own(None), health: Own(None) };
        builder.facts(move |uuid| driver.find(uuid)).health(move || watched.look())
    }

    /// A handle on the daemon.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves in a new thread.
    pub fn spawn(self) -> Result<Running, DaemonError> {
        let handle = self.handle();
        let thread = std::thread::Builder::new().name("gshared".into()).spawn(move || self.run())?;
        Ok(Running::new(handle, thread))
    }

    /// Serves until a [handle](Handle::stop) stops the daemon.
    pub fn run(mut self) -> Result<(), DaemonError> {
        let listeners = self.listeners.take().ok_or(DaemonError::Stopped)?;
        let front = Front::start(listeners, self.handle(), Arc::clone(&self.access))?;
        tracing::info!(socket = %self.files[0].display(), epoch = self.epoch, "listening");
        let health = self.health.0.take().map(|health| health::watch(health, Arc::clone(&self.news)));
        let health = health.transpose()?;
        let questions = self.facts.0.take().map(|facts| facts::answer(facts, self.handle()));
        self.questions = questions.transpose()?;
        let served = self.serve();
        tracing::info!("stopping");
        drop(health);
        drop(front);
        self.node.finish();
        let (mut files, lock) = (std::mem::take(&mut self.files), self.lock.take());
        if self.conns.is_empty() {
            files.push(beside(&self.config.socket, ".key"));
        } else {
            // The next daemon waits for the processes connected now to come back. Without the file it does not wait.
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
                            // The command may have been sent after the answer to the previous command.
                            now = self.clock.now();
                            if !self.command(now, command) {
                                return Ok(());
                            }
                        }
                    }
                    (FRAME, Some(id)) => self.ready(now, id, flags),
                    (PROCESS, Some(id)) => {
                        // The last frame of a process reports its use beyond its token.
                        for _ in 0..LAST_FRAMES {
                            if !self.receive(now, id) {
                                break;
                            }
                            self.settle(now);
                        }
                        self.close(now, id);
                    }
                    (TIMER, _) => self.rings_at = None,
                    (NEIGHBOUR, _) => self.look_for_neighbours(),
                    // An earlier event of this batch has closed the connection.
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

    fn look_for_neighbours(&mut self) {
        let devices = self.node.node().devices().map(|device| device.uuid);
        self.neighbours.look(devices, &self.epoll, epoll::EventData::new_u64(NEIGHBOUR << 56));
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let hello = self.hello_due.front().map(|(due, _)| *due);
        let moves = self.moves.next_deadline();
        [self.node.node().next_deadline(), hello, self.resume_accept, self.idle_due, moves]
            .into_iter()
            .flatten()
            .min()
    }

    /// Has the timer ring at the next deadline or earlier. Deadlines mostly move to later times, while a timeout of each wait
    /// would be set in the hardware and taken back with every frame.
    fn set_timer(&mut self, now: Timestamp) -> Result<(), DaemonError> {
        let Some(due) = self.next_deadline().filter(|due| self.rings_at.is_none_or(|rings| *due < rings))
        else {
            return Ok(());
        };
        // Zero would stop the timer.
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

    /// Sets the time to stop while no connection is open, or clears it.
    fn idle(&mut self, now: Timestamp) {
        let after = self.config.idle_exit.filter(|_| self.conns.is_empty());
        self.idle_due = after.map(|after| now.saturating_add(after));
    }

    /// Tells the node an event. [`Daemon::settle`] carries out the resulting actions.
    fn tell(&mut self, now: Timestamp, event: NodeEvent) {
        // A refused event leaves the node unchanged.
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

    /// Carries out the node's actions until none is left. The end of a connection adds more actions.
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
                // The journal and the metrics have seen the note.
                NodeAction::Note(_) => {}
            }
        }
        self.actions.clear();
        self.node.write_journal();
        self.moves.answer(now, self.node.node());
    }

    /// Carries out a command of the host; `false` for the command to stop.
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
            Command::Room(Room { name, spec, devices }, reply) => {
                let node = self.node.node();
                let refusal = |(uuid, memory)| node.has_room(&name, spec, uuid, memory).err();
                let refusals = devices.into_iter().map(refusal);
                reply.send(refusals.map(|refusal| refusal.map(|refusal| refusal.to_string())).collect());
            }
            Command::Moved(moved, reply) => {
                self.moves.ask(now, moved, reply);
                self.settle(now);
            }
            Command::Park(Park { name, uid, on, holds }, reply) => {
                // The daemon's own user may order for everybody, as root may.
                let uid = if uid == rustix::process::geteuid().as_raw() { 0 } else { uid };
                let answer = self.node.node().can_park(&name, uid, on).map_err(|refusal| refusal.to_string());
                if answer.is_ok() {
                    self.tell(now, NodeEvent::ParkAsked { name, uid, on, holds });
                    self.settle(now);
                }
                reply.send(answer);
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
        let (lost, sensors) = self.news.lock().clone().unzip();
        Snapshot {
            now_ns: now,
            epoch: self.epoch,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            socket: self.config.socket.clone(),
            connections: self.conns.len(),
            processes: node.processes(),
            drops: self.metrics.drops(),
            window_ns: node.window(),
            journal_lost: self.node.journal.lost(),
            journal: self.config.journal.as_ref().map(|journal| journal.dir.clone()),
            journal_failure: self.node.journal.failure().map(str::to_owned),
            devices: node.devices().map(Into::into).collect(),
            clients: node.clients(now).map(client).collect(),
            usage: self.node.processes.all(now, node),
            decisions: reasons.decisions(),
            lost,
            sensors: sensors.unwrap_or_default(),
            neighbours: self.neighbours.all(),
        }
    }
}

/// Raises the soft limit: each process takes two descriptors, so 1024 descriptors would end at 500 clients.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
