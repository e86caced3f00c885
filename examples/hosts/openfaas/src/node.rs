//! The shell around [`Host`]: its clock, the thread that starts processes, and the tasks that watch them.

mod kept;
mod memory_moves;
mod ticket;

pub use ticket::{Losses, Ticket};

use super::between::Between;
use super::deployment::Wants;
use super::history::History;
use super::host::{Host, Launch, Order, View, client};
use super::inventory::Inventory;
use super::listening::{Looks, elsewhere};
use super::logs::Logs;
use super::models::Models;
use super::records::Store;
use super::running::{LocalProcess, Running};
use super::traces::Exporter;
use super::trials::{self, READY};
use super::weights::{StoreClient, Weights};
use crossbeam_channel::Receiver;
use gshare_core::{Bytes, InstanceId, Quota, QuotaRange, RunId, Timestamp};
use gshare_runner::confine::{Cgroup, Confined, User};
use gshare_runner::container::Podman;
use gshare_runner::{Hook, HookedProcess};
use gshare_sched::platform::{DeviceSpec, Part, Platform, Regime};
use gshared::admin;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::net::unix::pipe;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// First pause before a check whether a new process listens; each further pause is a quarter longer.
const PROBE: std::time::Duration = std::time::Duration::from_millis(10);
/// Longest pause, so that a program that never listens costs little.
const SLOWEST_PROBE: std::time::Duration = std::time::Duration::from_secs(2);
/// Pause between questions to the daemon, and between checks of a process that cannot be watched.
const LOOK: std::time::Duration = std::time::Duration::from_secs(1);
/// Longest wait for a connection to an instance: a node that is cut off answers nothing.
const CONNECT: std::time::Duration = std::time::Duration::from_secs(2);

/// Surroundings of the functions' processes: hook, daemon, devices and directories.
#[derive(Debug)]
pub struct Runner {
    /// Hook and daemon socket, for processes with a share.
    pub hook: Option<Hook>,
    /// Devices of the node.
    pub devices: Inventory,
    /// Whether SM partitions hold (by MPS or on a simulated device) and the platform uses them.
    pub partitioned: bool,
    /// Socket for questions to the node's daemon.
    pub daemon: Option<std::path::PathBuf>,
    /// The node's model store.
    pub models: Models,
    /// Weights that instances share on a device.
    pub weights: Arc<Weights>,
    /// The stores' client for functions that name a model, where there is one.
    pub store_client: Option<StoreClient>,
    /// Collector of traces.
    pub traces: Option<Arc<Exporter>>,
    /// User that runs the functions; none for the host's own user.
    pub user: Option<User>,
    /// Folder of the cgroups, one per process.
    pub cgroups: Option<std::path::PathBuf>,
    /// Podman, for functions in images; none if it is not installed.
    pub podman: Option<Podman>,
    /// Pipe directory of MPS, if real devices are partitioned.
    pub mps: Option<std::path::PathBuf>,
    /// Shared memory between stages, if available.
    pub between: Option<Between>,
    /// The pods that stand in the place of processes, on Kubernetes.
    #[cfg(feature = "kubernetes")]
    pub pods: Option<Arc<crate::kubernetes::pods::Pods>>,
}

/// Functions and instances of this node.
#[derive(Debug)]
pub struct Node {
    host: Mutex<Host>,
    began: Instant,
    /// The host's time while it stands, and how much it has stood so far, in ns.
    stands: AtomicU64,
    stood: AtomicU64,
    /// Surroundings of the functions' processes.
    pub runner: Runner,
    /// Output of the processes.
    pub logs: Logs,
    /// Requests and use of the last minutes.
    pub history: Mutex<History>,
    /// Records that survive a restart.
    pub store: Store,
    /// Lock for changes of functions and secrets, so that files and engines agree.
    pub changes: tokio::sync::Mutex<()>,
    /// Signals that the next deadline may have moved.
    deadline: Notify,
    /// Places for moves of memory.
    moves: Semaphore,
    /// Idle connections, by instance and stage.
    idle: Mutex<BTreeMap<(InstanceId, usize), Vec<Sender>>>,
}

/// The sending end of a connection to a process.
pub type Sender = hyper::client::conn::http1::SendRequest<axum::body::Body>;

/// Most idle connections per process: the largest concurrency of a function.
const IDLE: usize = 64;

/// A connection to a process.
#[derive(Debug)]
pub enum Line {
    /// A connection that has served before, and the address for a fresh one.
    Used(Sender, SocketAddr),
    /// A new connection.
    New(TcpStream),
}

/// A new connection to an instance's process.
///
/// # Errors
/// If the process takes none, or says nothing for [`CONNECT`].
pub(super) async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    tokio::time::timeout(CONNECT, TcpStream::connect(address)).await?
}

/// The locked host, for one event. Must not be held over an await.
#[derive(Debug)]
pub struct Events<'a> {
    host: MutexGuard<'a, Host>,
    deadline: &'a Notify,
}

impl std::ops::Deref for Events<'_> {
    type Target = Host;
    fn deref(&self) -> &Host {
        &self.host
    }
}

impl std::ops::DerefMut for Events<'_> {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.host
    }
}

impl Drop for Events<'_> {
    fn drop(&mut self) {
        if cfg!(debug_assertions) && !std::thread::panicking() {
            self.host.invariants();
        }
        self.deadline.notify_one();
    }
}

impl Node {
    /// Starts a node over a platform with known devices, along with its threads and tasks.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(store: Store, runner: Runner, platform: Platform, guess: Bytes) -> io::Result<Arc<Self>> {
        let (node, todo) = Self::new(store, runner, platform, guess);
        let (weak, runtime) = (Arc::downgrade(&node), tokio::runtime::Handle::current());
        // The kernel kills processes with the thread that started them, so one thread that lives as long as the host starts
        // all.
        std::thread::Builder::new().name("starter".into()).spawn(move || {
            for order in todo {
                let Some(node) = weak.upgrade() else { return };
                carry_out(&node, &runtime, order);
            }
        })?;
        Ok(node)
    }

    /// A node with its tasks, and the orders of its host.
    pub(crate) fn new(
        store: Store,
        runner: Runner,
        platform: Platform,
        guess: Bytes,
    ) -> (Arc<Self>, Receiver<Order>) {
        let (orders, todo) = crossbeam_channel::unbounded();
        let parks = runner.hook.is_some() && runner.daemon.is_some();
        let host = Mutex::new(Host::new(platform, guess, orders).with_parking(parks));
        let changes = tokio::sync::Mutex::new(());
        let (began, logs, deadline) = (Instant::now(), Logs::default(), Notify::new());
        let (idle, history) = (Mutex::default(), Mutex::default());
        let (stands, stood) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
        let moves = Semaphore::new(memory_moves::MOVES);
        let node = Arc::new(Self {
            host,
            began,
            stands,
            stood,
            runner,
            logs,
            history,
            store,
            changes,
            deadline,
            moves,
            idle,
        });
        tokio::spawn(deadlines(Arc::downgrade(&node)));
        tokio::spawn(look(Arc::downgrade(&node)));
        (node, todo)
    }

    /// Locks the host for one event. Must not be held over an await.
    pub fn host(&self) -> Events<'_> {
        Events { host: self.host.lock(), deadline: &self.deadline }
    }

    /// Time since the start of the host, as far as it did not stand.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_nanos(self.goes().min(self.stands.load(Ordering::Acquire)))
    }

    fn goes(&self) -> u64 {
        let since = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        since.saturating_sub(self.stood.load(Ordering::Acquire))
    }

    /// Has the host's time stand still.
    pub fn stand(&self) {
        self.stands.store(self.now().as_nanos(), Ordering::Release);
    }

    /// Has the host's time go on from where it stands.
    pub fn go_on(&self) {
        let stood = self.goes().saturating_sub(self.now().as_nanos());
        self.stood.fetch_add(stood, Ordering::AcqRel);
        self.stands.store(u64::MAX, Ordering::Release);
    }

    /// View of a function; none if there is no such function.
    pub fn view(&self, name: &str) -> Option<View> {
        self.host().view(name)
    }

    /// An idle connection to a process that is still open.
    fn idle(&self, instance: InstanceId, stage: usize) -> Option<Sender> {
        let mut idle = self.idle.lock();
        let free = idle.get_mut(&(instance, stage))?;
        while let Some(sender) = free.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    /// A free connection to a process, or a new one; none if the process refuses it.
    pub async fn line(&self, instance: InstanceId, stage: usize, address: SocketAddr) -> Option<Line> {
        if let Some(sender) = self.idle(instance, stage) {
            return Some(Line::Used(sender, address));
        }
        let stream = connect(address).await.ok()?;
        let _ = stream.set_nodelay(true);
        Some(Line::New(stream))
    }

    /// Keeps a connection for reuse.
    pub fn free(&self, instance: InstanceId, stage: usize, sender: Sender) {
        let mut idle = self.idle.lock();
        // After the end of its process nothing would remove the connection from the list.
        if sender.is_closed() || !self.host.lock().runs(instance) {
            return;
        }
        let free = idle.entry((instance, stage)).or_default();
        if free.len() < IDLE {
            free.push(sender);
        }
    }

    /// Whether a running copy has ended, of which the host is told then.
    pub(crate) fn has_ended(&self, instance: InstanceId, index: usize) -> bool {
        let mut host = self.host();
        let ended = host.has_ended(self.now(), instance, index);
        let gone = host.take_gone();
        drop(host);
        tokio::task::spawn_blocking(move || gone.iter().for_each(|process| bury(&**process)));
        if ended {
            // The other processes of the instance end too.
            self.idle.lock().retain(|(id, _), _| *id != instance);
            // The files of other stages are useless without this stage.
            self.runner.between.iter().for_each(|between| between.forget(instance));
        }
        ended
    }

    /// Starts a process of an instance, as a program or in a container, with these parts, this port and this name at the
    /// daemon.
    ///
    /// # Errors
    /// If the process, its folder of secrets or its cgroup cannot be made.
    pub fn process(
        &self,
        launch: &Launch,
        parts: &[Part],
        port: u16,
        name: &str,
    ) -> io::Result<HookedProcess> {
        let (plan, run) = (&launch.version.plan, gshare_runner::new_run()?);
        if let Some(image) = &plan.image {
            return super::images::start(self, image, launch, parts, port, (name, run));
        }
        let mut words = plan.command.iter();
        let mut command = Command::new(words.next().map_or("", String::as_str));
        command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let secrets = self.store.mount(&launch.version.deployment, self.runner.user)?;
        self.environment(&mut command, launch, parts, port, secrets.path())?;
        let confined = Confined { folder: Some(secrets), ..self.confined(launch, name, run)? };
        HookedProcess::start_confined(command, name, run, self.hook(launch), confined)
    }

    /// Sets the environment of an instance's process for these parts and this port.
    ///
    /// # Errors
    /// If no process can see all of the devices.
    pub(super) fn environment(
        &self,
        command: &mut Command,
        launch: &Launch,
        parts: &[Part],
        port: u16,
        secrets: &Path,
    ) -> io::Result<()> {
        let (plan, deployment) = (&launch.version.plan, &launch.version.deployment);
        let no_gpu = matches!(plan.wants, Wants::NoGpu { .. });
        if !no_gpu {
            command.envs(self.runner.devices.variables(parts)?);
        }
        command.envs(deployment.env_vars.iter().flatten());
        command.env("PORT", port.to_string());
        command.env(super::reaper::FOLDER, secrets);
        command.env("OPENFAAS_NAME", &deployment.service);
        // All parts of one process have the same share.
        let Some(part) = parts.first() else { return Ok(()) };
        if let Some(model) = &plan.model {
            command.env("GSHARE_MODEL", &model.path).env("GSHARE_STORE", self.store_of(launch));
            if let Some(client) = &self.runner.store_client {
                let own = deployment.env_vars.as_ref().and_then(|variables| variables.get("PYTHONPATH"));
                client.hand_to(command, own.map(String::as_str));
            }
        }
        match &plan.wants {
            Wants::Training { workers, .. } => {
                // Variables as torchrun sets them for its workers.
                let rank = launch.index.to_string();
                command.env("RANK", rank).env("WORLD_SIZE", workers.to_string()).env("LOCAL_RANK", "0");
                let rendezvous = 20_000 + launch.instance.number() % 20_000;
                command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", rendezvous.to_string());
            }
            Wants::Pipeline { dag } => {
                let names = part.components.iter().filter_map(|id| dag.components().get(id));
                let names: Vec<&str> = names.map(|one| one.name.as_str()).collect();
                command.env("GSHARE_COMPONENTS", names.join(","));
                command.env("GSHARE_STAGE", part.stage.to_string());
                command.env("GSHARE_STAGES", launch.processes().to_string());
                // A container has a `/dev/shm` of its own.
                let folders = self.runner.between.as_ref().filter(|_| launch.version.plan.image.is_none());
                if let Some(between) = folders.filter(|_| launch.processes() > 1) {
                    command.env("GSHARE_BETWEEN", between.folder(launch.instance, self.runner.user)?);
                }
            }
            _ => {}
        }
        if self.runner.hook.is_some() && !no_gpu {
            let sm = part.share.sm_limit().to_string();
            command.env("GSHARE_QUOTA", self.time(part).to_string()).env("GSHARE_SM", &sm);
            if self.runner.partitioned {
                command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", sm.trim_end_matches('%'));
            }
            // The daemon's MPS uses pipes outside of the default directory.
            command.envs(self.runner.mps.iter().map(|pipes| ("CUDA_MPS_PIPE_DIRECTORY", pipes)));
            // Without a GPU, and beside a share of time alone, no memory is booked. The platform knows the room on a device, and the
            // daemon keeps none for a process that has left.
            match part.share.memory().filter(|memory| memory.get() > 1) {
                Some(memory) if launch.parks => command.env("GSHARE_MEM", format!("0:{}", memory.get())),
                Some(memory) => command.env("GSHARE_MEM", memory.get().to_string()),
                None => command.env_remove("GSHARE_MEM"),
            };
            match launch.parks {
                true => command.env("GSHARE_PARK", "1"),
                false => command.env_remove("GSHARE_PARK"),
            };
            if let Some(class) = plan.class {
                command.env("GSHARE_CLASS", class.to_string());
            }
        }
        Ok(())
    }

    /// Socket of the store that has the model of a process: on its device, or of the node.
    pub fn store_of<'a>(&'a self, launch: &'a Launch) -> &'a Path {
        launch.weights.as_deref().map_or(&self.runner.models.socket, |weights| &weights.socket)
    }

    /// The time range of a process. On a MIG device or a whole GPU processes take turns by the platform's rule: each may use
    /// all of the time and is guaranteed almost none.
    pub(crate) fn time(&self, part: &Part) -> QuotaRange {
        let regime = self.host.lock().device(part.gpu).map(DeviceSpec::effective_regime);
        let turns = Quota::from_percent(1).and_then(|least| QuotaRange::new(least, Quota::WHOLE).ok());
        match regime {
            Some(Regime::Sliced | Regime::Whole) => turns.unwrap_or(part.share.time()),
            _ => part.share.time(),
        }
    }

    /// The user and the cgroup of a process. The run id keeps the cgroup's name unique among hosts and among runs of an
    /// instance.
    ///
    /// # Errors
    /// If the cgroup cannot be made.
    fn confined(&self, launch: &Launch, instance: &str, run: RunId) -> io::Result<Confined> {
        let limits = launch.version.plan.limits;
        let make = |below: &std::path::PathBuf| {
            // A cgroup is one folder, but names of instances may contain `/`.
            let name = format!("gshare-{}-{run}", instance.replace('/', "-"));
            Cgroup::make(below, &name, limits)
        };
        let cgroup = self.runner.cgroups.as_ref().map(make).transpose()?;
        Ok(Confined { user: self.runner.user, cgroup, folder: None })
    }

    /// The hook for a process; none if its function uses no GPU.
    pub fn hook(&self, launch: &Launch) -> Option<&Hook> {
        self.runner.hook.as_ref().filter(|_| !matches!(launch.version.plan.wants, Wants::NoGpu { .. }))
    }
}

/// Carries out an order of the host: a start in this thread, and the rest beside it.
pub(crate) fn carry_out(node: &Arc<Node>, runtime: &tokio::runtime::Handle, order: Order) {
    #[cfg(feature = "kubernetes")]
    let order = match &node.runner.pods {
        Some(pods) => match pods.take(node, order) {
            Some(order) => order,
            None => return,
        },
        None => order,
    };
    match order {
        Order::Run(launch) => {
            if let Some(launch) = with_weights(node, runtime, launch) {
                begin(node, runtime, &launch);
            }
        }
        Order::Measure(launch, stop) => {
            if let Some(launch) = with_weights(node, runtime, launch) {
                measure(node, launch, stop);
            }
        }
        Order::Keep(version, measured) => node.keep_profile(&version.deployment, &measured),
        Order::Model(errand) => node.runner.models.send(errand),
        Order::Move(order) => drop(runtime.spawn(memory_moves::move_memory(Arc::clone(node), order))),
    }
}

/// Handles the platform's deadlines.
async fn deadlines(node: Weak<Node>) {
    loop {
        let Some(strong) = node.upgrade() else { return };
        // `Node::host` would notify this task again.
        let next = strong.host.lock().next_deadline();
        let now = strong.now();
        if next.is_some_and(|at| at <= now) {
            strong.host().deadline(now);
            continue;
        }
        let wait = next.map_or(LOOK, |at| at.saturating_since(now).into()).min(LOOK);
        let _ = tokio::time::timeout(wait, strong.deadline.notified()).await;
    }
}

/// Records the device time of processes, and lost devices, from the daemon; and a sample of the history.
async fn look(node: Weak<Node>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(node) = node.upgrade() else { return };
        let snapshot = match node.runner.daemon.clone() {
            Some(daemon) => tokio::task::spawn_blocking(move || admin::snapshot(&daemon)).await,
            None => Ok(Err(io::ErrorKind::NotFound.into())),
        };
        let snapshot = snapshot.ok().and_then(Result::ok);
        let devices = &node.runner.devices;
        let mut used = BTreeMap::new();
        for (gpu, part, of) in snapshot.iter().flat_map(|snapshot| devices.clients(snapshot)) {
            *used.entry(gpu).or_default() += of.measured * of.sm * part;
        }
        let counts = node.host().counts();
        node.history.lock().sample(node.now(), counts, used);
        let Some(snapshot) = snapshot else { continue };
        let mut host = node.host();
        for of in snapshot.clients {
            host.used(&of.name, of.total_used_ns.as_nanos());
            // Memory that cannot move is not held either.
            if of.parking.is_some_and(|parking| !parking.held && parking.bytes > Bytes::ZERO) {
                host.not_held(&of.name);
            }
        }
        // Without an answer from the daemon nothing changes.
        let Some(lost) = snapshot.lost else { continue };
        for (gpu, device) in &devices.all {
            match devices.why_lost(*gpu, &lost) {
                Some(why) => host.lose_device(node.now(), *gpu, why),
                None => host.device_back(node.now(), *gpu, &device.spec),
            }
        }
    }
}

/// Has the weights that a process shares on its device, in the starter's thread; none where that fails, of which the host is told.
fn with_weights(node: &Arc<Node>, runtime: &tokio::runtime::Handle, mut launch: Launch) -> Option<Launch> {
    let plan = &launch.version.plan;
    let part = launch.own_parts().first().filter(|_| plan.weights().is_some()).copied();
    let shared = part.filter(|part| {
        let regime = node.host.lock().device(part.gpu).map(DeviceSpec::effective_regime);
        regime == Some(Regime::Fractional)
    });
    let (Some(part), Some(model), Some(hook)) = (shared, &plan.model, node.hook(&launch)) else {
        return Some(launch);
    };
    match node.runner.weights.take(model, &launch, &part, &node.runner.devices, hook) {
        Ok((weights, ended)) => {
            ended.map(|ended| runtime.spawn(watch(Arc::clone(node), weights.store, ended)));
            launch.weights = Some(Arc::new(weights));
            Some(launch)
        }
        Err(error) => {
            let why = format!("the weights of {}: {error}", model.path.display());
            node.logs.add(&launch.version.deployment.service, "weights", why.clone());
            node.host().failed(node.now(), launch.instance, launch.index, why);
            None
        }
    }
}

/// Ends the instances whose weights have lost their store.
async fn watch(node: Arc<Node>, store: u64, ended: OwnedFd) {
    #[expect(
        deprecated,
        reason = "its replacement is unsafe; the descriptor is owned, and stays open as long as this"
    )]
    let ended = AsyncFd::new(ended);
    // A store that cannot be watched ends now.
    if let Ok(ended) = ended {
        let _ = ended.readable().await;
    }
    let Some((users, why)) = node.runner.weights.lost(store) else { return };
    eprintln!("openfaas: {why}: the instances that use them end");
    let mut host = node.host();
    for (instance, version) in users {
        let name = &version.deployment.service;
        node.logs.add(name, &client(name, instance, 0, 1), why.clone());
        host.explain(instance, why.clone());
        host.unreachable(instance);
    }
}

/// Starts a process of an instance, in the starter's thread.
fn begin(node: &Arc<Node>, runtime: &tokio::runtime::Handle, launch: &Launch) {
    let name = launch.version.deployment.service.clone();
    let instance = client(&name, launch.instance, launch.index, launch.processes());
    let _inside = runtime.enter();
    match spawn(node, launch, &instance) {
        Ok((process, port)) => {
            #[expect(
                deprecated,
                reason = "its replacement is unsafe; the descriptor is owned, and stays open as long as this"
            )]
            let end = process.pidfd().try_clone_to_owned().and_then(AsyncFd::new);
            tokio::spawn(attend(Arc::clone(node), launch.clone(), name, instance, process, port, end));
        }
        Err(error) => {
            let why = format!("does not start: {}: {error}", launch.version.plan.program());
            node.logs.add(&name, &instance, why.clone());
            node.host().failed(node.now(), launch.instance, launch.index, why);
        }
    }
}

fn spawn(node: &Node, launch: &Launch, instance: &str) -> io::Result<(HookedProcess, u16)> {
    // The port is free now. The kernel hands out ports in turn, so it most likely stays free until the process binds it.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    Ok((node.process(launch, launch.own_parts(), port, instance)?, port))
}

/// Runs the trials of a function in their own thread.
fn measure(node: &Arc<Node>, launch: Launch, stop: Arc<AtomicBool>) {
    let (node, weak) = (Arc::clone(node), Arc::downgrade(node));
    let (instance, index) = (launch.instance, launch.index);
    let run = move || {
        let measured = trials::run(&weak, &launch, &stop);
        let Some(node) = weak.upgrade() else { return };
        #[cfg(feature = "kubernetes")]
        node.runner.pods.iter().for_each(|pods| pods.tried(instance));
        match measured {
            Ok(measured) => node.host().measured(node.now(), instance, measured),
            Err(mut why) => {
                let name = &launch.version.deployment.service;
                let last = node.logs.last(name, &client(name, instance, index, 1), 3).join(" | ");
                if !last.is_empty() {
                    why = format!("{why}: {last}");
                }
                node.logs.add(name, "trials", why.clone());
                node.host().failed(node.now(), instance, index, why);
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("trials".into()).spawn(run) {
        node.host().failed(node.now(), instance, index, format!("a thread for trials: {error}"));
    }
}

/// Watches a process until its end. `end` becomes readable at its end; without descriptors `end` is missing.
async fn attend(
    node: Arc<Node>,
    mut launch: Launch,
    name: String,
    instance: String,
    mut process: HookedProcess,
    port: u16,
    end: io::Result<AsyncFd<OwnedFd>>,
) {
    let (id, index) = (launch.instance, launch.index);
    let (stdout, stderr) = process.take_output();
    let pipes = [stdout.map(OwnedFd::from), stderr.map(OwnedFd::from)];
    let mut readers = Vec::new();
    for pipe in pipes.into_iter().flatten().filter_map(|fd| pipe::Receiver::from_owned_fd(fd).ok()) {
        let (node, name, instance) = (Arc::clone(&node), name.clone(), instance.clone());
        readers.push(tokio::spawn(async move { node.logs.follow(&name, &instance, pipe).await }));
    }
    let pid = process.pid();
    node.host().started(node.now(), id, index, LocalProcess { process, port });
    let end = match end {
        Ok(end) => end,
        Err(error) => {
            // Out of descriptors. Nothing would signal the end of the process, so kill it now and poll.
            node.host().explain(id, format!("cannot be watched: {error}"));
            node.host().unreachable(id);
            while !exited(&node, &launch, &name, &instance, true, &mut readers).await {
                tokio::time::sleep(LOOK).await;
            }
            return;
        }
    };
    let mut listening = false;
    // Training workers need not listen.
    let serves = !matches!(launch.version.plan.wants, Wants::Training { .. });
    let listens = async {
        // An instance is not ended for this: its patience is only for the message.
        let (mut pause, mut looks) = (PROBE, Looks::new(launch.version.plan.works_in_sight(), READY));
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
            tokio::time::sleep(pause).await;
            pause = (pause * 5 / 4).min(SLOWEST_PROBE);
            let gpu_ns = || node.host().gpu_ns(id);
            if let Some(ports) = serves.then(|| looks.at(pid, port, gpu_ns)).flatten() {
                let text = elsewhere(&ports, port);
                node.logs.add(&name, &instance, text.clone());
                node.host().explain(id, text);
            }
        }
        node.host().listens(node.now(), id, index);
    };
    let mut listens = std::pin::pin!(listens);
    loop {
        tokio::select! {
            () = &mut listens, if !listening => listening = true,
            readable = end.readable() => {
                let readable = readable.map(|mut guard| guard.clear_ready());
                // The platform may give their memory to others as soon as it hears of the end.
                let weights = launch.weights.take();
                let _ = tokio::task::spawn_blocking(move || drop(weights)).await;
                if readable.is_err() || exited(&node, &launch, &name, &instance, listening, &mut readers).await {
                    return;
                }
            }
        }
    }
}

/// Kills the processes that an ended process has left behind.
fn bury(process: &dyn Running) {
    if let Some(folder) = process.folder() {
        super::reaper::sweep(folder);
    }
}

/// Whether a process has ended. If it never listened, its last lines explain why.
async fn exited(
    node: &Node,
    launch: &Launch,
    name: &str,
    instance: &str,
    listening: bool,
    readers: &mut Vec<tokio::task::JoinHandle<()>>,
) -> bool {
    if !listening && !matches!(launch.version.plan.wants, Wants::Training { .. }) {
        // The pipes may still hold the last lines of output.
        for reader in readers.drain(..) {
            let _ = tokio::time::timeout(PROBE * 10, reader).await;
        }
        let last = node.logs.last(name, instance, 3).join(" | ");
        let why = if last.is_empty() {
            "ended before it took connections".into()
        } else {
            format!("ended before it took connections: {last}")
        };
        node.host().explain(launch.instance, why);
    }
    let ended = node.has_ended(launch.instance, launch.index);
    if ended {
        node.logs.add(name, instance, "ended".into());
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tests::training;

    /// A node without a thread for orders, and the orders for two workers of its training job.
    fn node(dir: &Path) -> (Arc<Node>, [Launch; 2]) {
        let (host, workers, _) = training();
        let runner = Runner {
            hook: None,
            devices: Inventory::none(),
            partitioned: false,
            daemon: None,
            models: Models::at(dir.join("store.sock")).unwrap(),
            weights: Weights::new(dir.join("weights")).unwrap(),
            store_client: None,
            traces: None,
            user: None,
            cgroups: None,
            podman: None,
            mps: None,
            between: None,
            #[cfg(feature = "kubernetes")]
            pods: None,
        };
        let node = Node {
            host: Mutex::new(host),
            began: Instant::now(),
            stands: AtomicU64::new(u64::MAX),
            stood: AtomicU64::new(0),
            runner,
            history: Mutex::default(),
            logs: Logs::default(),
            store: Store::open(dir).unwrap(),
            changes: tokio::sync::Mutex::new(()),
            deadline: Notify::new(),
            moves: Semaphore::new(memory_moves::MOVES),
            idle: Mutex::default(),
        };
        node.store.put_secret("key", b"value").unwrap();
        (Arc::new(node), workers)
    }

    /// Found at ten thousand pods: what a leader took over first was idle before it had its least number, and ended.
    #[tokio::test(start_paused = true)]
    async fn a_hosts_time_stands_while_it_takes_pods_over() {
        let dir = tempfile::tempdir().unwrap();
        let (node, _) = node(dir.path());
        node.stand();
        let begun = node.now();
        tokio::time::advance(std::time::Duration::from_mins(1)).await;
        assert_eq!(node.now(), begun);
        node.go_on();
        assert_eq!(node.now(), begun, "no time has gone by for the instances");
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        assert_eq!(node.now(), begun.saturating_add(gshare_core::Duration::from_secs(1)));
    }

    #[tokio::test]
    async fn a_process_that_cannot_be_watched_is_asked_until_it_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (node, [first, second]) = node(dir.path());
        let id = first.instance;
        // At the third start the instance is gone, so the process counts as leaving.
        for launch in [&first, &second, &second] {
            let process = node.process(launch, launch.own_parts(), 1, "f").unwrap();
            let entry = Path::new("/proc").join(process.pid().to_string());
            let end = Err(rustix::io::Errno::MFILE.into());
            let (name, instance) = ("f".to_owned(), client("f", id, launch.index, 2));
            attend(Arc::clone(&node), launch.clone(), name, instance, process, 1, end).await;
            assert!(!entry.exists(), "worker {} is still there, or was not waited for", launch.index);
        }
        let view = node.view("f").unwrap();
        assert!(view.instances.iter().all(|of| of.instance != id), "{:?}", view.instances);
        assert!(view.problem.unwrap().contains("cannot be watched"));
    }

    /// Regression: removal of a cgroup under the lock blocked requests for a tenth of a second.
    #[test]
    fn what_a_process_leaves_is_not_removed_while_others_wait_for_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let (node, [launch, _]) = node(dir.path());
        let process = node.process(&launch, launch.own_parts(), 1, "f").unwrap();
        process.kill();
        node.host().started(node.now(), launch.instance, 0, LocalProcess { process, port: 1 });
        while !node.host().has_ended(node.now(), launch.instance, 0) {
            std::thread::yield_now();
        }
        let mounts = || std::fs::read_dir(dir.path().join("mounts")).unwrap().count();
        assert_eq!(mounts(), 1);
        drop(node.host().take_gone());
        assert_eq!(mounts(), 0);
    }

    #[tokio::test]
    async fn a_connection_that_comes_back_after_its_process_has_ended_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (node, [launch, _]) = node(dir.path());
        let free = async || {
            let (ours, theirs) = tokio::io::duplex(64);
            let io = hyper_util::rt::TokioIo::new(ours);
            let (sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
            node.free(launch.instance, 0, sender);
            (connection, theirs)
        };
        let _open = free().await;
        assert!(node.idle.lock().is_empty());
        let process = node.process(&launch, launch.own_parts(), 1, "f").unwrap();
        node.host().started(node.now(), launch.instance, 0, LocalProcess { process, port: 1 });
        let _open = free().await;
        assert_eq!(node.idle.lock().len(), 1);
    }

    #[test]
    fn a_process_finds_the_pipes_of_mps_where_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (mut node, [launch, _]) = node(dir.path());
        let runner = &mut Arc::get_mut(&mut node).unwrap().runner;
        runner.hook = Some(Hook { preload: "/opt/hook.so".into(), socket: "/run/g.sock".into() });
        runner.mps = Some("/run/gshare/mps".into());
        let mut command = Command::new("f");
        node.environment(&mut command, &launch, launch.own_parts(), 1, dir.path()).unwrap();
        let pipes = command.get_envs().find(|(key, _)| *key == "CUDA_MPS_PIPE_DIRECTORY");
        assert_eq!(pipes.and_then(|(_, value)| value), Some("/run/gshare/mps".as_ref()));
    }

    #[test]
    fn a_process_keeps_its_secrets_until_it_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (node, [first, second]) = node(dir.path());
        let start = |launch: &Launch| node.process(launch, launch.own_parts(), 1, "f").unwrap();
        let mounts = || {
            let mounts = std::fs::read_dir(dir.path().join("mounts")).unwrap();
            mounts.filter(|mount| mount.as_ref().unwrap().path().join("key").exists()).count()
        };
        let (first, second) = (start(&first), start(&second));
        assert_eq!(mounts(), 2);
        drop(first);
        assert_eq!(mounts(), 1);
        drop(second);
        assert_eq!(std::fs::read_dir(dir.path().join("mounts")).unwrap().count(), 0);
    }
}
