//! An OpenFaaS provider for one node: functions are deployed with what they want, and everything else follows.
//!
//! # Problem
//! `faas-cli` and every other client of the faas-provider contract deploy functions by name, call them over HTTP, and expect
//! replicas to follow the load. Here a replica is a process of this node under the hook. A deployment says a latency to keep, a
//! model, a kind of work; which share of which device each process gets, how many there are, which one serves a request and
//! which one makes room is decided by [`Platform`](gshare_sched::platform::Platform). This host carries that out and decides
//! nothing. No cluster, no containers and no gateway are needed: the provider serves `/function` and `/async-function` itself.
//!
//! # Terms
//! - **function**: what was deployed under a name; **instance** (the contract's replica): one running copy of it, with a
//!   process on each device that it uses;
//! - **share**: time and SMs of a device, and memory;
//! - **trial**: a function under load for some seconds at one share, to learn what it serves there.
//!
//! # What a function is
//! Any program that serves plain HTTP on `127.0.0.1:$PORT`, like a function of of-watchdog's HTTP mode. It is ready when
//! it takes connections, so it loads its model before it listens. Its command line is `envProcess`, or else `image`. Where `image` names a
//! container image ([`images`]), podman runs it, and `envProcess` is the command in it.
//! What it prints is its log; its secrets are files in `$secret_mount_path`. A training job serves nothing: it gets torchrun's
//! variables (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`) and is done when all of its workers have ended well. A stage
//! of a pipeline is the same program with `$GSHARE_COMPONENTS`; the answer of one stage is the request to the next.
//!
//! | annotation or label | meaning |
//! |---|---|
//! | `gshare/slo` | time in which a request is to be answered, such as `69ms` |
//! | `gshare/model` | safetensors file of its weights: `$GSHARE_MODEL`, in the store at `$GSHARE_STORE`; on a device whose time is shared, one copy for all its instances ([`weights`]) |
//! | `gshare/workload` | `inference`, `pipeline` (with `gshare/dag`) or `training` (with `gshare/workers`) |
//! | `gshare/profile` | `auto`: measured at the first deployment, which is the default; `none`; or a file of points |
//! | `gshare/tenant` | on whose account it runs (`--tenants`) |
//! | `gshare/class` | how it is treated beside others: `slo-sensitive` with an SLO and `best-effort` for training, unless it says otherwise |
//! | `gshare/regime` | the kind of devices |
//! | `fastgshare/gpu_quota_request`, `_limit` | guaranteed and most share of GPU time |
//! | `fastgshare/gpu_sm_partition` | SMs, in per cent |
//! | `fastgshare/gpu_mem` | memory of an instance beside the weights of `gshare/model`, in bytes |
//! | `gshare/requests_per_second` | what an instance serves with that share: load starts and stops instances |
//! | `gshare/devices` | devices over which a model is spread: the instance's one process sees all of them, with its share on each and an equal part of its memory |
//! | `gshare/concurrency` | requests at a time of an instance |
//! | `com.openfaas.scale.min`, `.max` | fewest and most replicas: 1, and 20 |
//!
//! # Who does what
//! ```text
//! deployed ─▶ deployment.rs ─▶ host/ ─▶ Platform ─┬─▶ Profile: host/measuring.rs and trials.rs
//!                               ▲  │              ├─▶ Start, Park, Unpark, Stop: processes (node.rs)
//! request ──▶ proxy.rs ─▶ node.rs ─┘ what came    └─▶ Dispatch, Reject: the ticket's turn
//! ```
//! GPU time is handed out by the node's daemon: [`gshared::Daemon`] in this process, or one that runs already.
//!
//! # States of an instance
//! Those of [`gshare_sched::platform`]. A parked instance has no process here: its weights are in the page cache or in the model
//! store, and it is started again when it is wanted. A draining one gets no more requests and is killed when it has none, so
//! that none is lost by scaling in. A new version is started beside the old one where there is room; else the old one makes
//! room, and requests wait.
//!
//! # When something dies
//! - *An instance*: what it was serving is answered 502 at once. What it had not accepted goes to another one.
//! - *A device*: the daemon says so, at most some 2 s later. Its instances end, and others take their places on other devices. A
//!   request that one of them had is answered 502 with the reason; what it had not accepted goes to another one. Nothing is started
//!   there until the daemon says that the device is back. A simulated device is lost by `sim-stat --lose`, and is seen by the
//!   provider's own daemon.
//! - *The daemon*: processes go on by their policy ([`gshare_core::wire::OnDaemonLoss::Open`]) and meet the next one.
//! - *The provider*: the kernel kills its processes, and the [`reaper`] what these have left. The next provider of the same directory has the same functions,
//!   secrets, measurements and numbers of replicas; calls that waited in `/async-function` are lost.
//!
//! # Limits
//! One namespace. Functions run as the provider's user: a client that may deploy may run any program as that user. Limits of CPU and
//! memory are enforced in containers, and where
//! there is a folder for cgroups (`--cgroups`), else kept and shown. A client that leaves frees its place, though
//! the instance may still work on what was asked; the next request then waits there. A port is free when it is chosen;
//! nothing reserves it until the process listens. A function that uses no GPU has the least share of one, and ends with it.

pub mod api;
pub mod between;
pub mod client_body;
pub mod demo;
pub mod deployment;
pub mod devices;
pub mod gpu_function;
pub mod guard;
pub mod host;
pub mod host_metrics;
pub mod images;
pub mod later;
pub mod listening;
pub mod logs;
pub mod models;
pub mod node;
pub mod proxy;
pub mod reaper;
pub mod records;
pub mod routes;
pub mod state;
pub mod traces;
pub mod trials;
pub mod weights;

use anyhow::{Context as _, ensure};
use deployment::Plan;
use devices::Devices;
use gshare_core::{Bytes, Duration, TenantId};
use gshare_fake_cuda_spec::Spec;
use gshare_runner::Hook;
use gshare_runner::confine::User;
use gshare_runner::container::Podman;
use gshare_runner::libraries::HOOK;
use gshare_sched::platform::TenantLimits;
use gshare_sched::platform::{PlatformEvent, PlatformSettings, ScalerSettings};
use gshare_sched::scale::HeuristicHorizontalConfig;
use gshared::mps::Mps;
use host::Version;
use models::Models;
use node::{Node, Runner};
use routes::{App, Credentials};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Serve the OpenFaaS provider contract: functions are processes that share the GPUs of this node.
#[derive(Debug, Clone, clap::Parser)]
#[command(
    name = "gshare-openfaas",
    version,
    after_help = "\
EXAMPLES
  gshare up --demo                           some functions and a trainer under load for 30 s, and what became of them
  gshare up --sim=a100,devices=2             on two simulated A100s
  gshare up --state /var/lib/gshare/host --mps --function-user nobody
  gshare up --listen 0.0.0.0:8080 --credentials /etc/gshare/credentials    for clients on other machines"
)]
pub struct Options {
    /// Where to listen; port 0 chooses one.
    #[arg(long, default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Directory of functions, secrets and measurements; made if need be. By default `gshare/host` below `$XDG_STATE_HOME` or
    /// `~/.local/state`, or `./gshare-openfaas` where an earlier release has made that.
    #[arg(long)]
    pub state: Option<PathBuf>,
    /// Use simulated GPUs: PROFILE,devices=N,mig=NAME+NAME, each part optional, as `gshare run --sim` has it; given again, more
    /// GPUs of another kind.
    #[arg(long, value_name = "SPEC", num_args = 0..=1, require_equals = true, default_missing_value = "v100")]
    pub sim: Vec<Spec>,
    /// Use no GPU: functions are ordinary processes.
    #[arg(long, conflicts_with = "sim")]
    pub no_gpu: bool,
    /// Start MPS where it does not run yet, and stop it at the end: SM partitions of real GPUs are kept under it.
    #[arg(long, conflicts_with_all = ["sim", "no_gpu"])]
    pub mps: bool,
    /// A GPU, by its number, that serves one request at a time and keeps models in its memory (GPU-enabled FaaS); may be given
    /// again. Others are shared in time and SMs, or by their MIG devices.
    #[arg(long, value_name = "N")]
    pub whole: Vec<u32>,
    /// Memory that is booked for a function of which nothing is known, until it was measured.
    #[arg(long, default_value = "4GiB", value_parser = memory)]
    pub guess: Bytes,
    /// Socket of the node's daemon. Without one the provider runs its own.
    #[arg(long, value_name = "SOCKET")]
    pub daemon: Option<PathBuf>,
    /// Socket of the node's model store. Without one the provider runs its own.
    #[arg(long, value_name = "SOCKET")]
    pub model_store: Option<PathBuf>,
    /// Run functions as this user: UID:GID, or a name in /etc/passwd. Takes root.
    #[arg(long, value_name = "USER")]
    pub function_user: Option<User>,
    /// A folder of the cgroup file system: each process of a function gets a cgroup below it, with the function's limits of memory
    /// and CPU.
    #[arg(long, value_name = "DIR")]
    pub cgroups: Option<PathBuf>,
    /// Host memory for models, where the provider runs the store.
    #[arg(long, default_value = "4GiB", value_parser = memory)]
    pub model_memory: Bytes,
    /// Directory with the files `basic-auth-user` and `basic-auth-password`. Without one, only on a loopback address.
    #[arg(long, value_name = "DIR")]
    pub credentials: Option<PathBuf>,
    /// JSON file of tenants and what they may take, such as `{"blue": {"max_processes": 2, "gpu_time_bp": 5000}}`.
    #[arg(long, value_name = "FILE")]
    pub tenants: Option<PathBuf>,
    /// A host, or host:port, that answers of asynchronous calls may be sent to; `*` for any. Without one, to none.
    #[arg(long, value_name = "HOST")]
    pub callback: Vec<String>,
    /// Most requests of a function that wait at once.
    #[arg(long, default_value_t = 1024)]
    pub queue: u32,
    /// Seconds that a request may wait for an instance, and then for the head of its answer.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub timeout: u32,
    /// Collector that traces of requests are sent to, in OTLP over HTTP: http://HOST:PORT, and another path than OTLP's if need be.
    #[arg(long, value_name = "URL")]
    pub otlp: Option<traces::Collector>,
    /// JSON file with settings of the platform, such as `{"sliced": {"keeper": {"load": {"start_ns": 400000000}}}}`: how long
    /// programs take to start, which policies scale and place; what it leaves out keeps its default. How long and how many requests
    /// wait, and host memory for models, are as --timeout, --queue and --model-memory say, and not as the file says.
    #[arg(long, value_name = "FILE")]
    pub settings: Option<PathBuf>,
    /// Deploy functions, a pipeline and a training job, load them for 30 s, print what became of them, and serve on until
    /// interrupted; with `--demo=end`, end. Without GPUs on simulated devices; a pipeline needs MIG devices.
    #[arg(long, value_name = "end", num_args = 0..=1, require_equals = true, default_missing_value = "stay", value_parser = ["stay", "end"])]
    pub demo: Option<String>,
    /// Print the devices that are found, and end.
    #[arg(long, hide = true)]
    pub inventory: bool,
    /// Keep the weights of a model on this process's device.
    #[arg(long, hide = true, value_name = "FILE")]
    pub weights: Option<PathBuf>,
    /// Fill the memory of weights.
    #[arg(long, hide = true)]
    pub load_weights: bool,
    /// Be a function of the demonstration.
    #[arg(long, hide = true)]
    pub gpu_function: bool,
    /// Wait for the end of the input, and end the processes whose secrets are below this folder.
    #[arg(long, hide = true, value_name = "DIR")]
    pub reap: Option<PathBuf>,
    /// Print the devices that are lost, once for each line of input.
    #[arg(long, hide = true)]
    pub print_lost: bool,
}

fn memory(text: &str) -> Result<Bytes, String> {
    text.parse().map_err(|error: gshare_core::ParseUnitError| error.to_string())
}

/// Serves until the process ends. Prints where it listens.
///
/// # Errors
/// When it cannot start.
pub fn serve(options: &Options) -> anyhow::Result<()> {
    if options.inventory {
        return devices::print_inventory();
    }
    if options.print_lost {
        return devices::print_lost();
    }
    if options.gpu_function {
        return gpu_function::main();
    }
    if let Some(model) = &options.weights {
        return weights::serve(model);
    }
    if options.load_weights {
        return Ok(gshare_modelstore::backend::cuda::run_loader()?);
    }
    if let Some(mounts) = &options.reap {
        return reaper::run(mounts);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if options.demo.is_none() {
        return serve_on(runtime, options);
    }
    // Nothing of a demonstration is kept.
    let dir = tempfile::tempdir()?;
    let mut options = Options { state: Some(dir.path().to_owned()), ..options.clone() };
    if options.sim.is_empty() && !options.no_gpu && !Devices::are_here() {
        println!("openfaas: no GPU is found, so the demonstration simulates some");
        options.sim = demo::BOARDS.into_iter().map(str::parse).collect::<Result<_, _>>()?;
    }
    serve_on(runtime, &options)
}

/// Until the host fails or is told to end. Then its processes, its daemon and the folders of simulated drivers go with it.
fn serve_on(runtime: tokio::runtime::Runtime, options: &Options) -> anyhow::Result<()> {
    let started = start_mps(options).context("--mps")?;
    let served = runtime.block_on(async {
        tokio::select! {
            served = run(options) => served,
            told = told_to_end() => told.context("signals"),
        }
    });
    // A demonstration may still wait for answers.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    // Some of its clients may end only with this host.
    if let Some(mps) = started
        && let Err(error) = mps.stop()
    {
        eprintln!("openfaas: MPS has not stopped: {error}");
    }
    served
}

/// Starts MPS where it was asked for. None where it runs already, and is not this host's to stop.
fn start_mps(options: &Options) -> anyhow::Result<Option<Mps>> {
    // A demonstration may have found no GPU.
    if !options.mps || !options.sim.is_empty() {
        return Ok(None);
    }
    let mps = Mps::find().context("nvidia-cuda-mps-control is not on PATH")?;
    Ok(mps.start()?.then_some(mps))
}

/// Waits for an interrupt or SIGTERM.
async fn told_to_end() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

/// The folder that was asked for, or a user's own.
fn state_folder(options: &Options) -> anyhow::Result<PathBuf> {
    let before = PathBuf::from("gshare-openfaas");
    if let Some(state) = &options.state {
        return Ok(state.clone());
    }
    if before.join("functions").is_dir() {
        return Ok(before);
    }
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Ok(state
        .context("--state: need a folder, since neither XDG_STATE_HOME nor HOME is set")?
        .join("gshare/host"))
}

fn credentials(dir: &Path) -> anyhow::Result<Credentials> {
    let read = |name: &str| {
        let path = dir.join(name);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok::<_, anyhow::Error>(text.trim_end().to_owned())
    };
    Ok(Credentials { pair: format!("{}:{}", read("basic-auth-user")?, read("basic-auth-password")?) })
}

/// Limits of a tenant in the file; a limit that is left out does not apply.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Tenant {
    max_processes: Option<u32>,
    gpu_time_bp: Option<gshare_core::BasisPoints>,
    memory_bp: Option<gshare_core::BasisPoints>,
    max_waiting: Option<u32>,
}

impl Tenant {
    fn limits(&self) -> TenantLimits {
        let mut limits = TenantLimits::default();
        limits.max_processes = self.max_processes.unwrap_or(limits.max_processes);
        limits.gpu_time = self.gpu_time_bp.unwrap_or(limits.gpu_time);
        limits.memory = self.memory_bp.unwrap_or(limits.memory);
        limits.max_waiting = self.max_waiting.unwrap_or(limits.max_waiting);
        limits
    }
}

fn tenants(path: Option<&Path>) -> anyhow::Result<BTreeMap<String, Tenant>> {
    let Some(path) = path else { return Ok(BTreeMap::new()) };
    let text = std::fs::read(path).with_context(|| format!("--tenants {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("--tenants {}", path.display()))
}

fn settings(options: &Options) -> anyhow::Result<PlatformSettings> {
    let patience = Duration::from_secs(options.timeout.into());
    let mut settings = match &options.settings {
        Some(path) => {
            let text = std::fs::read(path).with_context(|| format!("--settings {}", path.display()))?;
            serde_json::from_slice(&text).with_context(|| format!("--settings {}", path.display()))?
        }
        None => PlatformSettings::default(),
    };
    let platform = settings.platform.with_max_wait(patience).with_max_waiting(options.queue.max(1));
    // An attempt is an instance that was lost before the request reached it.
    settings.platform = platform.with_max_attempts(u8::MAX);
    settings.fractional.pool = settings.fractional.pool.with_host_memory(options.model_memory);
    // A process that does not start is tried again soon: its file may just have been put there.
    if options.settings.is_none() {
        let mut scaler = HeuristicHorizontalConfig::default();
        scaler.fleet.retry_after = Duration::from_secs(5);
        settings.fractional.scaler = ScalerSettings::Heuristic(scaler);
    }
    settings.whole.max_loads = u8::MAX;
    Ok(settings)
}

async fn run(options: &Options) -> anyhow::Result<()> {
    let credentials = options.credentials.as_deref().map(credentials).transpose()?;
    ensure!(
        credentials.is_some() || options.listen.ip().is_loopback(),
        "--credentials: needed to listen on {}, which is no loopback address",
        options.listen
    );
    if !options.listen.ip().is_loopback() {
        eprintln!(
            "openfaas: passwords and requests cross the network in plain HTTP: put a proxy with TLS before {}",
            options.listen
        );
    }
    let tenants = tenants(options.tenants.as_deref())?;
    let mut settings = settings(options)?;
    let folder = state_folder(options)?;
    let named = || format!("--state {}", folder.display());
    let store = records::Store::open(&folder).with_context(named)?;
    let state = folder.canonicalize().with_context(named)?;
    // Until this host ends.
    let _claim = records::claim(&state)?;
    let listener = tokio::net::TcpListener::bind(options.listen).await;
    let listener = listener.with_context(|| format!("--listen {}", options.listen))?;

    let devices = match options.no_gpu {
        true => Devices::none(),
        false => Devices::find(&options.sim, &options.whole, &state)?,
    };
    let (mut daemon, mut hook) = (None, None);
    if !options.no_gpu {
        let socket = match &options.daemon {
            Some(socket) => socket.clone(),
            None => {
                let socket = state.join("gshare.sock");
                let mut config = gshared::Config::at(socket.clone());
                config.allow_uids = options.function_user.iter().map(|user| user.uid).collect();
                let mut builder = gshared::Daemon::builder(config);
                if let Some(health) = devices.health() {
                    builder = builder.health(health);
                }
                daemon = Some(builder.build()?.spawn()?);
                socket
            }
        };
        hook = Some(Hook { preload: HOOK.find()?, socket });
    }
    let mps = || Mps::find().filter(Mps::is_running);
    let mps = if devices.simulated { None } else { mps().map(|mps| mps.pipe_dir().to_owned()) };
    let partitions = &mut settings.fractional.pool.sm_partitions;
    *partitions &= devices.simulated || options.no_gpu || mps.is_some();
    let partitioned = *partitions;
    if !partitioned {
        eprintln!(
            "openfaas: SM partitions are not kept without MPS (--mps starts it), so functions share a GPU by time alone"
        );
    }
    let platform = settings.build().context("--settings")?;
    let said = match (options.no_gpu, devices.simulated) {
        (true, _) => "no GPU".to_owned(),
        (false, simulated) => {
            let kind = if simulated { ", simulated" } else { "" };
            let count = devices.all.len();
            format!("{count} GPU{}{kind}", if count == 1 { "" } else { "s" })
        }
    };
    let specs: Vec<_> = devices.all.iter().map(|(gpu, device)| (*gpu, device.spec.clone())).collect();
    let asked = hook.as_ref().map(|hook| gshared::config::admin_socket_of(&hook.socket));
    let models = match &options.model_store {
        Some(socket) => Models::at(socket.clone())?,
        None => Models::start(state.join("store.sock"), options.model_memory)?,
    };
    let weights = weights::Weights::new(state.join("weights"))?;
    let store_client = weights::StoreClient::write(state.join("python"))
        .inspect_err(|error| {
            eprintln!("openfaas: Python programs take no weights from a store by themselves: {error:#}");
        })
        .ok();
    let collector = options.otlp.clone();
    let traces = collector.map(|collector| traces::Exporter::start(collector, asked.clone()));
    if let Some(user) = options.function_user {
        let given = store.admit().and_then(|()| devices.give(user));
        given.with_context(|| format!("--function-user {}:{}", user.uid, user.gid))?;
        // The loader passes over a library that it cannot read: such a process would have no limits.
        if let Some(hook) = &hook {
            user.can_read(&hook.preload).context("--function-user")?;
        }
    }
    let (user, cgroups) = (options.function_user, options.cgroups.clone());
    if let Some(below) = &cgroups {
        // A host that was killed could not remove its own.
        gshare_runner::confine::sweep(below).with_context(|| format!("--cgroups {}", below.display()))?;
    }
    // Its reaper may have been killed too.
    reaper::sweep(store.mounts());
    if let Err(error) = store.sweep() {
        eprintln!("openfaas: secrets of an earlier host's processes: {error}");
    }
    let _reaper = reaper::start(store.mounts())?;
    let podman = Podman::find(state.join("containers"));
    if let Some(Err(error)) = podman.as_ref().map(Podman::sweep) {
        eprintln!("openfaas: containers of an earlier host: {error}");
    }
    let between = between::Between::new(&state)
        .inspect_err(|error| eprintln!("openfaas: stages hand all values on over HTTP: /dev/shm: {error}"))
        .ok();
    let runner = Runner {
        hook,
        devices,
        partitioned,
        daemon: asked,
        models,
        weights,
        store_client,
        traces,
        user,
        cgroups,
        podman,
        mps,
        between,
    };
    let node = Node::start(store, runner, platform, options.guess)?;
    for (gpu, spec) in specs {
        let found = node.host().tell(node.now(), PlatformEvent::DeviceFound { gpu, spec });
        found.map_err(|error| anyhow::anyhow!("{gpu}: {}", error.message))?;
    }
    let mut names: BTreeMap<String, TenantId> = BTreeMap::new();
    for (place, (name, tenant)) in tenants.iter().enumerate() {
        let id = host::tenant(place);
        let limited = PlatformEvent::TenantLimited { tenant: id, limits: tenant.limits() };
        node.host()
            .tell(node.now(), limited)
            .map_err(|error| anyhow::anyhow!("--tenants: {name}: {}", error.message))?;
        names.insert(name.clone(), id);
    }
    let patience = std::time::Duration::from_secs(options.timeout.into());
    let later = later::Queue::start(&node, patience, options.callback.clone());
    let loopback = options.listen.ip().is_loopback();
    let app = App { node, credentials, loopback, metrics: Arc::default(), later, patience, tenants: names };
    let functions = restore(&app)?;
    println!(
        "openfaas: http://{}  {said}  {functions} functions from {}",
        listener.local_addr()?,
        folder.display()
    );
    let address = listener.local_addr()?;
    let server = tokio::spawn(guard::serve(listener, routes::router(Arc::new(app))));
    if let Some(then) = &options.demo {
        let (url, dir) = (format!("http://{address}"), state.clone());
        tokio::task::spawn_blocking(move || demo::run(&url, &dir)).await??;
        if then == "end" {
            return Ok(());
        }
        println!("  the page: http://{address}/ui, until interrupted");
    }
    server.await??;
    drop(daemon);
    Ok(())
}

/// Deploys what an earlier host kept.
fn restore(app: &App) -> anyhow::Result<usize> {
    let (kept, bad) = app.node.store.functions()?;
    for why in bad {
        eprintln!("openfaas: not a function: {why}");
    }
    let functions = kept.len();
    for record in kept {
        let name = record.deployment.service.clone();
        let deployed = app.plan(&record.deployment).and_then(|mut plan: Plan| {
            app.recall(&mut plan, &record.deployment, true);
            if let Some(model) = plan.model.as_ref().filter(|_| !app.node.host().shares_weights(&plan)) {
                app.node.runner.models.put(&model.path)?;
            }
            let version = Version { deployment: record.deployment, plan };
            app.node.logs.open(&name);
            app.node.host().deploy(app.node.now(), version, record.created_ms, record.replicas)
        });
        if let Err(error) = deployed {
            eprintln!("openfaas: {name}: {}", error.message);
        }
    }
    Ok(functions)
}
