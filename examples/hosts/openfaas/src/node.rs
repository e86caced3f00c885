//! The shell around [`Host`]: its clock, the thread that starts processes, and the tasks that watch them.

use super::api::ApiError;
use super::between::{Between, OnItsWay};
use super::deployment::Wants;
use super::devices::Devices;
use super::host::{Host, Launch, Order, Turn, View, client};
use super::listening::{Looks, elsewhere};
use super::logs::Logs;
use super::models::Models;
use super::records::Store;
use super::traces::{self, Exporter, Times, Traced};
use super::trials;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use gshare_core::{Bytes, InstanceId, Quota, QuotaRange, RequestId, RunId, Timestamp};
use gshare_runner::confine::{Cgroup, Confined, User};
use gshare_runner::container::Podman;
use gshare_runner::{Hook, HookedProcess};
use gshare_sched::platform::{Part, Platform, Regime};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Instant;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::net::unix::pipe;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// How soon a process that starts is asked whether it listens; then each pause is a quarter longer.
const PROBE: std::time::Duration = std::time::Duration::from_millis(10);
/// The longest pause: a program that never listens costs little.
const SLOWEST_PROBE: std::time::Duration = std::time::Duration::from_secs(2);
/// How often the daemon is asked what processes use, and a process that cannot be watched whether it has ended.
const LOOK: std::time::Duration = std::time::Duration::from_secs(1);

/// Surroundings of the functions' processes: hook, daemon, devices and directories.
#[derive(Debug)]
pub struct Runner {
    /// The hook and the daemon, for processes with a share.
    pub hook: Option<Hook>,
    /// The node's devices.
    pub devices: Devices,
    /// Whether the driver keeps to SM partitions (MPS, or a simulated device), and the platform gives any.
    pub partitioned: bool,
    /// Socket at which the node's daemon tells what it knows.
    pub daemon: Option<std::path::PathBuf>,
    /// The node's model store.
    pub models: Models,
    /// The collector of traces of requests.
    pub traces: Option<Arc<Exporter>>,
    /// The user that functions run as, if not the host's own.
    pub user: Option<User>,
    /// Folder below which each process gets a cgroup.
    pub cgroups: Option<std::path::PathBuf>,
    /// Podman, for functions in images; none where there is no podman.
    pub podman: Option<Podman>,
    /// Pipes of MPS, where real devices are partitioned.
    pub mps: Option<std::path::PathBuf>,
    /// Shared memory between stages, where there is any.
    pub between: Option<Between>,
}

/// Functions and instances of this node.
#[derive(Debug)]
pub struct Node {
    host: Mutex<Host>,
    began: Instant,
    /// Surroundings of the functions' processes.
    pub runner: Runner,
    /// Lines that processes print.
    pub logs: Logs,
    /// Records that survive a restart.
    pub store: Store,
    /// One change of functions and secrets at a time, so that files and engines say the same.
    pub changes: tokio::sync::Mutex<()>,
    /// The next deadline may have come closer.
    deadline: Notify,
    /// Connections to processes that are free, by instance and stage.
    idle: Mutex<BTreeMap<(InstanceId, usize), Vec<Sender>>>,
}

/// The sending end of a connection to a process.
pub type Sender = hyper::client::conn::http1::SendRequest<axum::body::Body>;

/// Free connections that are kept of a process: as many as it takes requests at once.
const IDLE: usize = 64;

/// A way to a process.
#[derive(Debug)]
pub enum Line {
    /// A connection that has served before.
    Used(Sender, u16),
    /// A new one.
    New(TcpStream),
}

/// The host, for one event after the other. Never held over an await.
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

/// A request on its way. Dropping it ends it, no matter how far it has come.
#[derive(Debug)]
pub struct Ticket {
    node: Arc<Node>,
    request: RequestId,
    /// News of the request's turn, until [`Ticket::losses`] takes them over.
    turns: Option<UnboundedReceiver<Turn>>,
    /// The instance that serves the request, once its turn has come.
    instance: Option<InstanceId>,
    broken: bool,
    times: Times,
    traced: Option<Box<Traced>>,
}

impl Node {
    /// A node over a platform that knows its devices, and the threads and tasks that do what it orders.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(store: Store, runner: Runner, platform: Platform, guess: Bytes) -> io::Result<Arc<Self>> {
        let (orders, todo) = std::sync::mpsc::channel();
        let host = Mutex::new(Host::new(platform, guess, orders));
        let changes = tokio::sync::Mutex::new(());
        let (began, logs, deadline) = (Instant::now(), Logs::default(), Notify::new());
        let idle = Mutex::default();
        let node = Arc::new(Self { host, began, runner, logs, store, changes, deadline, idle });
        let (weak, runtime) = (Arc::downgrade(&node), tokio::runtime::Handle::current());
        // Processes die with the thread that started them: one thread starts all, and lives as long as the host.
        std::thread::Builder::new().name("starter".into()).spawn(move || {
            for order in todo {
                let Some(node) = weak.upgrade() else { return };
                match order {
                    Order::Run(launch) => begin(&node, &runtime, &launch),
                    Order::Measure(launch, stop) => measure(&node, launch, stop),
                    Order::Keep(version, measured) => {
                        if let Err(error) = node.store.put_profile(&version.deployment, &measured) {
                            eprintln!("openfaas: keeping a profile: {error}");
                        }
                    }
                    Order::Model(errand) => node.runner.models.send(errand),
                }
            }
        })?;
        tokio::spawn(deadlines(Arc::downgrade(&node)));
        tokio::spawn(look(Arc::downgrade(&node)));
        Ok(node)
    }

    /// The host, for one event. Never held over an await.
    pub fn host(&self) -> Events<'_> {
        Events { host: self.host.lock(), deadline: &self.deadline }
    }

    /// Time since the start.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_nanos(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// A function.
    pub fn view(&self, name: &str) -> Option<View> {
        self.host().view(name)
    }

    /// Gets into line for an instance. The request's headers get its place in a trace.
    ///
    /// # Errors
    /// When there is no such function.
    pub fn arrive(self: &Arc<Self>, name: &str, headers: &mut HeaderMap) -> Result<Ticket, ApiError> {
        let (sender, turns) = unbounded_channel();
        let arrived = self.now();
        let request = self.host().arrive(arrived, name, sender)?;
        let traced = traces::begin(self.runner.traces.as_ref(), name, headers);
        let (node, times) = (Arc::clone(self), Times { arrived, load: None, reached: None });
        let turns = Some(turns);
        Ok(Ticket { node, request, turns, instance: None, broken: false, times, traced })
    }

    /// A free connection to a process, if there is one that is open still.
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

    /// A connection is free again.
    pub fn free(&self, instance: InstanceId, stage: usize, sender: Sender) {
        let mut idle = self.idle.lock();
        // A connection that comes back after its process has ended would stay: nothing takes it out again.
        if sender.is_closed() || self.host.lock().pids(instance).is_empty() {
            return;
        }
        let free = idle.entry((instance, stage)).or_default();
        if free.len() < IDLE {
            free.push(sender);
        }
    }

    /// Starts a process of an instance on these parts under this name, as a program or in a container; it is to listen at `port`.
    ///
    /// # Errors
    /// When it cannot be started, or its secrets or its cgroup cannot be made.
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

    /// Gives a command the environment of a process on these parts of an instance that is to listen at `port`.
    ///
    /// # Errors
    /// When no process can see the devices of all parts.
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
        // The parts of one process have one share.
        let Some(part) = parts.first() else { return Ok(()) };
        if let Some(model) = &plan.model {
            command.env("GSHARE_MODEL", model).env("GSHARE_STORE", &self.runner.models.socket);
        }
        match &plan.wants {
            Wants::Training { workers, .. } => {
                // The names that torchrun gives its workers.
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
                // A container has another `/dev/shm`.
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
            // Pipes of the node's daemon are not where programs look by themselves.
            command.envs(self.runner.mps.iter().map(|pipes| ("CUDA_MPS_PIPE_DIRECTORY", pipes)));
            // Memory of which nothing is known is not limited.
            match part.share.memory().filter(|memory| memory.get() > 1) {
                Some(memory) => command.env("GSHARE_MEM", memory.get().to_string()),
                None => command.env_remove("GSHARE_MEM"),
            };
            if let Some(class) = plan.class {
                command.env("GSHARE_CLASS", class.to_string());
            }
        }
        Ok(())
    }

    /// The time of its device that a process is to have. Processes on a MIG device or a GPU that serves one request at a time
    /// take turns as the platform says: each may take all of it, and is guaranteed next to nothing beside the others.
    fn time(&self, part: &Part) -> QuotaRange {
        let regime = self.runner.devices.all.get(&part.gpu).map(|device| device.spec.effective_regime());
        let turns = Quota::from_percent(1).and_then(|least| QuotaRange::new(least, Quota::WHOLE).ok());
        match regime {
            Some(Regime::Sliced | Regime::Whole) => turns.unwrap_or(part.share.time()),
            _ => part.share.time(),
        }
    }

    /// The user and the cgroup of a process of this name and run. The run makes the cgroup's name one of its own, also beside another
    /// host, or a process of the same instance that has not gone yet.
    ///
    /// # Errors
    /// When its cgroup cannot be made.
    fn confined(&self, launch: &Launch, instance: &str, run: RunId) -> io::Result<Confined> {
        let limits = launch.version.plan.limits;
        let make = |below: &std::path::PathBuf| {
            // One folder: names of instances have parts.
            let name = format!("gshare-{}-{run}", instance.replace('/', "-"));
            Cgroup::make(below, &name, limits)
        };
        let cgroup = self.runner.cgroups.as_ref().map(make).transpose()?;
        Ok(Confined { user: self.runner.user, cgroup, folder: None })
    }

    /// The hook of a process, unless its function uses no GPU.
    pub fn hook(&self, launch: &Launch) -> Option<&Hook> {
        self.runner.hook.as_ref().filter(|_| !matches!(launch.version.plan.wants, Wants::NoGpu { .. }))
    }
}

impl Ticket {
    /// Waits for an instance and connects to its processes, stage by stage.
    ///
    /// # Errors
    /// When it will not be served.
    pub async fn connect(&mut self) -> Result<Vec<Line>, ApiError> {
        loop {
            let turn = match &mut self.turns {
                Some(turns) => turns.recv().await,
                None => None,
            };
            let (instance, ports, load) = match turn {
                Some(Turn::Go { instance, ports, load }) => (instance, ports, load),
                Some(Turn::Again(request)) => {
                    self.request = request;
                    continue;
                }
                Some(Turn::No(reason)) => return Err(super::host::refusal(reason)),
                Some(Turn::Hopeless(why) | Turn::DeviceLost(why)) => {
                    return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why));
                }
                None => {
                    let status = StatusCode::BAD_GATEWAY;
                    return Err(ApiError::new(status, "the instance is gone"));
                }
            };
            let mut streams = Vec::with_capacity(ports.len());
            for (stage, port) in ports.iter().enumerate() {
                if let Some(sender) = self.node.idle(instance, stage) {
                    streams.push(Line::Used(sender, *port));
                    continue;
                }
                match TcpStream::connect((Ipv4Addr::LOCALHOST, *port)).await {
                    Ok(stream) => {
                        let _ = stream.set_nodelay(true);
                        streams.push(Line::New(stream));
                    }
                    Err(_) => break,
                }
            }
            if streams.len() < ports.len() {
                self.node.host().unreachable(instance);
            } else if self.node.host().reached(self.request, instance) {
                self.instance = Some(instance);
                (self.times.load, self.times.reached) = (load, Some(self.node.now()));
                if let Some(traced) = &mut self.traced {
                    traced.reached(instance, ports.len());
                }
                return Ok(streams);
            }
            // The request has been given to another instance meanwhile, or will be.
        }
    }

    /// The head of the answer has come: it is told where the time went.
    pub fn answered(&mut self, status: StatusCode, headers: &mut HeaderMap) {
        if let (Some(instance), Some(reached)) = (self.instance, self.times.reached) {
            let now = self.node.now();
            self.node.host().answered(now, instance, now.saturating_since(reached));
        }
        if let Ok(value) = HeaderValue::from_str(&self.times.server_timing(self.node.now())) {
            headers.append("server-timing", value);
        }
        if let Some(traced) = &mut self.traced {
            traced.status = Some(status.as_u16());
        }
    }

    /// News of the device under a request that an instance has taken.
    pub const fn losses(&mut self) -> Losses {
        Losses(self.turns.take())
    }

    /// A connection has served the request, and is free for another one.
    pub fn free(&self, stage: usize, sender: Sender) {
        if let Some(instance) = self.instance.filter(|_| !self.broken) {
            self.node.free(instance, stage, sender);
        }
    }

    /// The file that the answer of a stage names, if it names one.
    ///
    /// # Errors
    /// 502 if the answer names no file in the instance's folder.
    pub fn on_its_way(&self, name: &str, answer: &HeaderMap) -> Result<Option<OnItsWay>, ApiError> {
        let (Some(instance), Some(between)) = (self.instance, &self.node.runner.between) else {
            return Ok(None);
        };
        let why = |why| ApiError::new(StatusCode::BAD_GATEWAY, format!("{name}: between two stages: {why}"));
        between.on_its_way(instance, answer).map_err(why)
    }

    /// The instance broke it off.
    pub const fn broken(&mut self) {
        self.broken = true;
    }
}

/// Tells whether the device of the instance that serves a request is lost.
#[derive(Debug)]
pub struct Losses(Option<UnboundedReceiver<Turn>>);

impl Losses {
    /// Waits until it is lost, and says why; without end as long as it is not.
    pub async fn next(&mut self) -> String {
        while let Some(turns) = &mut self.0 {
            match turns.recv().await {
                Some(Turn::DeviceLost(why)) => return why,
                Some(_) => {}
                None => self.0 = None,
            }
        }
        std::future::pending().await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let now = self.node.now();
        // A process that is ending may still take a connection, and then break that one off, too.
        if let Some(instance) = self.instance.filter(|_| self.broken) {
            let pids = self.node.host().pids(instance);
            if pids.into_iter().any(is_ending) {
                self.node.host().unreachable(instance);
            }
        }
        self.node.host().end(now, self.request);
        if let Some(traced) = self.traced.take() {
            traced.end(self.times, now);
        }
    }
}

/// A process that ends gives up its memory before the first of its sockets.
fn is_ending(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/statm")).map_or(true, |text| text.starts_with("0 "))
}

/// Lets the platform's deadlines pass.
async fn deadlines(node: Weak<Node>) {
    loop {
        let Some(strong) = node.upgrade() else { return };
        // Not through `Node::host`, which would wake this task.
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

/// Takes down what processes use of their devices.
async fn look(node: Weak<Node>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(node) = node.upgrade() else { return };
        let Some(daemon) = node.runner.daemon.clone() else { return };
        let asked = tokio::task::spawn_blocking(move || gshared::admin::snapshot(&daemon)).await;
        let Ok(Ok(snapshot)) = asked else { continue };
        let mut host = node.host();
        for of in snapshot.clients {
            host.used(&of.name, of.total_used_ns.as_nanos());
        }
        // A daemon that cannot tell changes nothing.
        let Some(lost) = snapshot.lost else { continue };
        let devices = &node.runner.devices;
        for (gpu, device) in &devices.all {
            match devices.why_lost(*gpu, &lost) {
                Some(why) => host.lose_device(node.now(), *gpu, why),
                None => host.device_back(node.now(), *gpu, &device.spec),
            }
        }
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
    // Free now, and most likely when the process asks for it: ports are given in turn.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    Ok((node.process(launch, launch.own_parts(), port, instance)?, port))
}

/// Runs the trials of a function in a thread of their own.
fn measure(node: &Arc<Node>, launch: Launch, stop: Arc<AtomicBool>) {
    let (node, weak) = (Arc::clone(node), Arc::downgrade(node));
    let (instance, index) = (launch.instance, launch.index);
    let run = move || {
        let measured = trials::run(&weak, &launch, &stop);
        let Some(node) = weak.upgrade() else { return };
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

/// Looks after a process until it is gone; `end` is readable then, or is missing for want of descriptors.
async fn attend(
    node: Arc<Node>,
    launch: Launch,
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
    node.host().started(node.now(), id, index, process, port);
    let end = match end {
        Ok(end) => end,
        Err(error) => {
            // Out of descriptors: nothing would tell of its end, so it is killed now and asked.
            node.host().explain(id, format!("cannot be watched: {error}"));
            node.host().unreachable(id);
            while !exited(&node, &launch, &name, &instance, true, &mut readers).await {
                tokio::time::sleep(LOOK).await;
            }
            return;
        }
    };
    let mut listening = false;
    // A worker of a training job need not listen.
    let serves = !matches!(launch.version.plan.wants, Wants::Training { .. });
    let listens = async {
        let (mut pause, mut looks) = (PROBE, Looks::default());
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
            tokio::time::sleep(pause).await;
            pause = (pause * 5 / 4).min(SLOWEST_PROBE);
            if let Some(ports) = serves.then(|| looks.at(pid, port)).flatten() {
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
                if readable.is_err() || exited(&node, &launch, &name, &instance, listening, &mut readers).await {
                    return;
                }
            }
        }
    }
}

/// Ends what a process has left behind.
fn bury(process: &HookedProcess) {
    if let Some(folder) = process.folder() {
        super::reaper::sweep(folder);
    }
}

/// Whether a process has ended; then its last lines explain that, where it never listened.
async fn exited(
    node: &Node,
    launch: &Launch,
    name: &str,
    instance: &str,
    listening: bool,
    readers: &mut Vec<tokio::task::JoinHandle<()>>,
) -> bool {
    if !listening && !matches!(launch.version.plan.wants, Wants::Training { .. }) {
        // The last lines that the process printed are in its pipes.
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
    let mut host = node.host();
    let ended = host.has_ended(node.now(), launch.instance, launch.index);
    let gone = host.take_gone();
    drop(host);
    tokio::task::spawn_blocking(move || gone.iter().for_each(bury));
    if ended {
        // The other processes of the instance end, too.
        node.idle.lock().retain(|(id, _), _| *id != launch.instance);
        node.logs.add(name, instance, "ended".into());
        // Without one stage the files for the others are of no use.
        node.runner.between.iter().for_each(|between| between.forget(launch.instance));
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tests::training;

    /// A node of which no thread carries out the orders, and the orders for two workers of its training job.
    fn node(dir: &Path) -> (Arc<Node>, [Launch; 2]) {
        let (host, workers, _) = training();
        let runner = Runner {
            hook: None,
            devices: Devices::none(),
            partitioned: false,
            daemon: None,
            models: Models::at(dir.join("store.sock")).unwrap(),
            traces: None,
            user: None,
            cgroups: None,
            podman: None,
            mps: None,
            between: None,
        };
        let node = Node {
            host: Mutex::new(host),
            began: Instant::now(),
            runner,
            logs: Logs::default(),
            store: Store::open(dir).unwrap(),
            changes: tokio::sync::Mutex::new(()),
            deadline: Notify::new(),
            idle: Mutex::default(),
        };
        node.store.put_secret("key", b"value").unwrap();
        (Arc::new(node), workers)
    }

    #[tokio::test]
    async fn a_process_that_cannot_be_watched_is_asked_until_it_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (node, [first, second]) = node(dir.path());
        let id = first.instance;
        // The third time its instance is gone: the process is one that leaves.
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

    /// To remove a cgroup may take a tenth of a second, in which no request found its instance.
    #[test]
    fn what_a_process_leaves_is_not_removed_while_others_wait_for_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let (node, [launch, _]) = node(dir.path());
        let process = node.process(&launch, launch.own_parts(), 1, "f").unwrap();
        process.kill();
        node.host().started(node.now(), launch.instance, 0, process, 1);
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
        node.host().started(node.now(), launch.instance, 0, process, 1);
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
