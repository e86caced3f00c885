//! The shell around [`Core`]: its clock, the thread that starts replicas, and the tasks that watch them.

use super::api::ApiError;
use super::core::{Core, Launch, Turn, View};
use super::logs::Logs;
use super::store::Store;
use axum::http::StatusCode;
use gshare_core::request::RequestId;
use gshare_core::scale::InstanceId;
use gshare_core::{Bytes, Duration, Timestamp};
use gshare_runner::manager::{Hook, HookedProcess};
use parking_lot::{Mutex, MutexGuard};
use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::Instant;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::net::unix::pipe;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// How often a replica that starts is asked whether it listens.
const PROBE: std::time::Duration = std::time::Duration::from_millis(10);

/// How replicas are started.
#[derive(Debug, Clone)]
pub struct Runner {
    /// The hook and the daemon, for replicas with a share.
    pub hook: Option<Hook>,
    /// More environment for each, such as the path to a simulated driver.
    pub environment: Vec<(OsString, OsString)>,
    /// Whether the driver keeps to SM partitions: MPS, or a simulated device.
    pub partitioned: bool,
}

/// Functions and replicas of this node.
#[derive(Debug)]
pub struct Node {
    core: Mutex<Core>,
    began: Instant,
    /// What they print.
    pub logs: Logs,
    /// What is kept of them.
    pub store: Store,
    /// One change of functions and secrets at a time, so that files and engines say the same.
    pub changes: tokio::sync::Mutex<()>,
}

/// A request on its way. Dropping it ends it, whatever it has come to.
#[derive(Debug)]
pub struct Ticket {
    node: Arc<Node>,
    name: String,
    request: RequestId,
    turns: UnboundedReceiver<Turn>,
    /// Whose turn it is.
    instance: Option<InstanceId>,
    broken: bool,
}

impl Node {
    /// A node with so many GPUs, and the thread that starts its replicas.
    ///
    /// # Errors
    /// When a setting is out of its bounds.
    pub fn start(
        store: Store,
        runner: Runner,
        gpus: u32,
        memory: Bytes,
        queue: u32,
        patience: Duration,
    ) -> anyhow::Result<Arc<Self>> {
        let (launches, todo) = std::sync::mpsc::channel();
        let core = Mutex::new(Core::new(gpus, memory, queue, patience, launches)?);
        let changes = tokio::sync::Mutex::new(());
        let node = Arc::new(Self { core, began: Instant::now(), logs: Logs::default(), store, changes });
        let (weak, runtime) = (Arc::downgrade(&node), tokio::runtime::Handle::current());
        // Replicas die with the thread that started them: one thread starts all, and lives as long as the process.
        std::thread::Builder::new().name("starter".into()).spawn(move || {
            for launch in todo {
                begin(&weak, &runtime, &runner, &launch);
            }
        })?;
        let weak = Arc::downgrade(&node);
        let length = std::time::Duration::from_nanos(node.core().tick_length().as_nanos());
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(length);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let Some(node) = weak.upgrade() else { return };
                node.core().tick(node.now());
            }
        });
        Ok(node)
    }

    /// The engines. Never held over an await.
    pub fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Time since the start.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_nanos(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// A function.
    pub fn view(&self, name: &str) -> Option<View> {
        self.core().view(name)
    }

    /// Gets into line for a replica.
    ///
    /// # Errors
    /// When there is no such function.
    pub fn arrive(self: &Arc<Self>, name: &str) -> Result<Ticket, ApiError> {
        let (sender, turns) = unbounded_channel();
        let request = self.core().arrive(self.now(), name, sender)?;
        Ok(Ticket {
            node: Arc::clone(self),
            name: name.to_owned(),
            request,
            turns,
            instance: None,
            broken: false,
        })
    }

    fn gone(&self, instance: InstanceId) {
        self.core().gone(self.now(), instance);
    }
}

impl Ticket {
    /// Waits for a replica and connects to it.
    ///
    /// # Errors
    /// When it will not be served.
    pub async fn connect(&mut self) -> Result<TcpStream, ApiError> {
        loop {
            let (instance, port) = match self.turns.recv().await {
                Some(Turn::Go { instance, port }) => (instance, port),
                Some(Turn::No(reason)) => return Err(super::core::refusal(reason)),
                None => {
                    let status = StatusCode::BAD_GATEWAY;
                    return Err(ApiError::new(status, "the replica is gone"));
                }
            };
            match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                Ok(stream) if self.node.core().reached(&self.name, self.request, instance) => {
                    let _ = stream.set_nodelay(true);
                    self.instance = Some(instance);
                    return Ok(stream);
                }
                // It has been given to another one meanwhile.
                Ok(_) => {}
                Err(_) => self.node.core().unreachable(self.node.now(), instance),
            }
        }
    }
}

impl Ticket {
    /// The replica broke it off.
    pub const fn broken(&mut self) {
        self.broken = true;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // One that is ending may still take a connection, and then break that one off, too.
        if let Some(instance) = self.instance.filter(|_| self.broken) {
            let pid = self.node.core().pid(instance);
            if pid.is_some_and(is_ending) {
                self.node.core().unreachable(self.node.now(), instance);
            }
        }
        self.node.core().end(self.node.now(), &self.name, self.request);
    }
}

/// A process that ends gives up its memory before the first of its sockets.
fn is_ending(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/statm")).map_or(true, |text| text.starts_with("0 "))
}

/// Starts a replica, in the starter's thread.
fn begin(node: &Weak<Node>, runtime: &tokio::runtime::Handle, runner: &Runner, launch: &Launch) {
    let Some(node) = node.upgrade() else { return };
    let name = launch.deployment.service.clone();
    let instance = format!("{name}-{}", launch.instance.0);
    let _inside = runtime.enter();
    let (process, port) = match spawn(&node, runner, launch, &instance) {
        Ok(started) => started,
        Err(error) => {
            node.logs.add(&name, &instance, format!("does not start: {}: {error}", launch.plan.command[0]));
            return node.gone(launch.instance);
        }
    };
    tokio::spawn(attend(node, launch.instance, name, instance, process, port));
}

fn spawn(node: &Node, runner: &Runner, launch: &Launch, instance: &str) -> io::Result<(HookedProcess, u16)> {
    // Free now, and most likely when the replica asks for it: ports are given in turn.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let mut command = Command::new(&launch.plan.command[0]);
    command.args(&launch.plan.command[1..]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if launch.plan.share.is_some() {
        command.envs(runner.environment.iter().map(|(key, value)| (key, value)));
    }
    command.envs(launch.deployment.env_vars.iter().flatten());
    command.env("PORT", port.to_string());
    command.env("secret_mount_path", node.store.mount(&launch.deployment)?);
    command.env("OPENFAAS_NAME", &launch.deployment.service);
    if let Some(share) = launch.plan.share {
        let sm = share.sm().to_string();
        command.env("GSHARE_QUOTA", share.quota().to_string());
        command.env("GSHARE_SM", &sm);
        if runner.partitioned {
            command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", sm.trim_end_matches('%'));
        }
        match share.memory() {
            Some(memory) => command.env("GSHARE_MEM", memory.get().to_string()),
            None => command.env_remove("GSHARE_MEM"),
        };
        command.env("CUDA_VISIBLE_DEVICES", launch.gpu.map_or_else(String::new, |gpu| gpu.0.to_string()));
    }
    let hook = runner.hook.as_ref().filter(|_| launch.plan.share.is_some());
    Ok((HookedProcess::start(command, instance, gshare_runner::new_run()?, hook)?, port))
}

/// Looks after a replica until it is gone.
async fn attend(
    node: Arc<Node>,
    id: InstanceId,
    name: String,
    instance: String,
    mut process: HookedProcess,
    port: u16,
) {
    let (stdout, stderr) = process.take_output();
    let pipes = [stdout.map(std::os::fd::OwnedFd::from), stderr.map(std::os::fd::OwnedFd::from)];
    for pipe in pipes.into_iter().flatten().filter_map(|fd| pipe::Receiver::from_owned_fd(fd).ok()) {
        let (node, name, instance) = (Arc::clone(&node), name.clone(), instance.clone());
        tokio::spawn(async move { node.logs.follow(&name, &instance, pipe).await });
    }
    #[expect(
        deprecated,
        reason = "its replacement is unsafe; the descriptor is owned, and stays open as long as this"
    )]
    let ended = process.pidfd().try_clone_to_owned().and_then(AsyncFd::new);
    node.core().started(id, process, port);
    let Ok(ended) = ended else {
        // Out of descriptors: nobody would notice its end.
        return node.core().unreachable(node.now(), id);
    };
    let listens = async {
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
            tokio::time::sleep(PROBE).await;
        }
        node.core().ready(node.now(), id);
        std::future::pending::<()>().await;
    };
    let mut listens = std::pin::pin!(listens);
    loop {
        let mut over = std::pin::pin!(ended.readable());
        let readable = std::future::poll_fn(|context| {
            use std::future::Future as _;
            let _ = listens.as_mut().poll(context);
            over.as_mut().poll(context).map(|ready| ready.map(|mut guard| guard.clear_ready()))
        });
        if readable.await.is_err() || node.core().has_ended(node.now(), id) {
            node.logs.add(&name, &instance, "ended".into());
            return;
        }
    }
}
