//! An OpenFaaS provider for one node: clients deploy functions with a goal, and the provider shares the GPUs among them.
//!
//! # Problem
//! Clients of the faas-provider contract, such as `faas-cli`, deploy functions by name, call them over HTTP, and expect
//! replicas to follow the load. Here a replica is a hooked process on this node. A deployment states a latency, a model or a
//! kind of work. [`Platform`](gshare_sched::platform::Platform) decides the rest: the share and the device of each process, the
//! number of instances, the instance for each request, and the instance that makes room. This host carries the decisions out.
//! It needs no cluster and no gateway, because it serves `/function` and `/async-function` itself.
//!
//! # Terms
//! - **function**: a program deployed under a name; **instance** (the contract's replica): one running copy of it, with a
//!   process on each device that it uses;
//! - **share**: time and SMs of a device, and memory;
//! - **trial**: some seconds of load on a function at one share, to measure its speed there.
//!
//! # Functions
//! A function is any program that serves plain HTTP on `127.0.0.1:$PORT`, as in of-watchdog's HTTP mode. It counts as ready
//! when it accepts connections, so it should load its model before it listens. Its command line is `envProcess`, or else
//! `image`. If `image` names a container image ([`images`]), podman runs it, with `envProcess` as the command. Output goes to
//! the function's log, and secrets are files in `$secret_mount_path`. A training job does not listen: its workers get
//! torchrun's variables (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), and it is complete when all workers exit with
//! status 0. A stage of a pipeline is the same program with `$GSHARE_COMPONENTS`; each stage's answer is the next stage's
//! request.
//!
//! `docs/settings.md` lists the annotations and labels.
//!
//! # Flow
//! ```text
//! deployed ─▶ deployment.rs ─▶ host/ ─▶ Platform ─┬─▶ Profile: host/measuring.rs and trials.rs
//!                               ▲  │              ├─▶ Start, Park, Unpark, Stop: processes (node.rs)
//! request ──▶ proxy.rs ─▶ node.rs ─┘ reports      └─▶ Dispatch, Reject: the ticket's turn
//! ```
//! The node's daemon hands GPU time out: [`gshared::Daemon`] in this process, or a daemon that already runs.
//!
//! # States of an instance
//! See [`gshare_sched::platform`]. A parked instance has no process here: its weights stay in the page cache or the model
//! store, and a request starts it again. A draining instance gets no more requests and is killed after its last one, so scaling
//! in loses none. A new version starts beside the old version if there is room; otherwise the old one makes room, and requests
//! wait.
//!
//! # Failures
//! - *An instance*: its accepted requests are answered 502 at once, and the others go to another instance.
//! - *A device*: the daemon reports the loss within about 2 s. The instances on the device end as above, and new instances
//!   start on other devices. The device gets no instance until the daemon reports its return. `sim-stat --lose` loses a
//!   simulated device, which the provider's own daemon sees.
//! - *The store of [`weights`] on a device*: the instances that use the weights end with the reason, and others start.
//! - *The daemon*: processes follow their policy ([`gshare_core::wire::OnDaemonLoss::Open`]) and attach to the next daemon.
//! - *The provider*: the kernel kills its processes, and the [`reaper`] kills their children. The next provider in the same
//!   directory restores functions, secrets, measurements and numbers of replicas. Calls in `/async-function`'s queue are lost.
//!
//! # Limits
//! There is one namespace. Functions run as the provider's user, so a client with access to `/system` can run any program as
//! that user. Limits of CPU and memory hold in containers, and for processes with `host.cgroups`; otherwise they are only shown.
//! If a client leaves, its place is free at once, although the instance may still compute its answer. A port is free at its
//! choice, but nothing reserves it until the process listens. A function without a GPU still books the least share of a device
//! and ends with it.

pub mod api;
pub mod batches;
pub mod between;
mod builder;
pub mod client_body;
pub mod demo;
pub mod deployment;
pub mod gpu_function;
pub mod guard;
pub mod history;
pub mod host;
pub mod host_metrics;
pub mod host_settings;
pub mod images;
pub mod inventory;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod later;
pub mod listening;
pub mod logs;
pub mod models;
pub mod node;
pub mod proxy;
pub mod reaper;
pub mod records;
pub mod routes;
pub mod running;
pub mod state;
pub mod traces;
pub mod trials;
pub mod weights;

pub use builder::Builder;
pub use host_settings::HostSettings;

use anyhow::{Context as _, ensure};
use deployment::Plan;
use gshare_core::{Bytes, TenantId};
use gshare_fake_cuda_spec::Spec;
use gshare_runner::container::Podman;
use gshare_runner::libraries::{HOOK, SimulatorDir};
use gshare_runner::{Hook, Scratch};
use gshare_sched::platform::{PlatformEvent, PlatformSettings};
use gshared::mps::Mps;
use host::Version;
use inventory::Inventory;
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
  gshare up --state /var/lib/gshare/host --set host.mps=true --set host.function_user=nobody
  gshare up --credentials /etc/gshare/credentials    behind a proxy with TLS, for clients on other machines"
)]
pub struct Options {
    /// Address to listen at; port 0 chooses a free port. Other machines reach the host through a proxy with TLS on this machine,
    /// or with `host.plain_http` at any address.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS:PORT", value_parser = address)]
    pub listen: SocketAddr,
    /// Directory of functions, secrets and measurements, made if missing. The default is `gshare/host` below `$XDG_STATE_HOME`
    /// or `~/.local/state`, or `./gshare-openfaas` if an earlier release made that directory.
    #[arg(long)]
    pub state: Option<PathBuf>,
    /// Use simulated GPUs: PROFILE,devices=N,mig=NAME+NAME, each part optional, as in `gshare run --sim`. Repeat the option for
    /// GPUs of other kinds.
    #[arg(long, value_name = "SPEC", num_args = 0..=1, require_equals = true, default_missing_value = "v100")]
    pub sim: Vec<Spec>,
    /// Directory with the files `basic-auth-user` and `basic-auth-password`. Optional only on a loopback address.
    #[arg(long, value_name = "DIR")]
    pub credentials: Option<PathBuf>,
    /// File of settings, in TOML (`.toml`) or JSON: GPUs that serve one request at a time, the user of functions, cgroups,
    /// tenants, queues, time-outs, traces, and the policies that scale and place. docs/settings.md has all keys.
    #[arg(long, value_name = "FILE")]
    pub settings: Option<PathBuf>,
    /// One setting, above the file: `--set host.mps=true`, `--set host.queue=8`. May be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = host_settings::setting)]
    pub set: Vec<(String, serde_json::Value)>,
    /// Settings of the host.
    #[arg(skip)]
    pub host: HostSettings,
    /// Settings of the platform; by default those that docs/settings.md shows.
    #[arg(skip)]
    pub platform: PlatformSettings,
    /// Deploy functions, a pipeline and a training job, load them for 30 s, print the results, and serve until interrupted;
    /// with `--demo=end`, exit instead. Without GPUs, devices are simulated. A pipeline needs MIG devices.
    #[arg(long, value_name = "end", num_args = 0..=1, require_equals = true, default_missing_value = "stay", value_parser = ["stay", "end"])]
    pub demo: Option<String>,
    /// Run functions as pods of the cluster, on the GPUs of nodes with the label `gshare.io/host=true`.
    #[cfg(feature = "kubernetes")]
    #[arg(long, conflicts_with_all = ["sim", "demo", "state"])]
    pub kubernetes: bool,
    /// Print the `CustomResourceDefinition` of `GpuFunction`.
    #[cfg(feature = "kubernetes")]
    #[arg(long, exclusive = true)]
    pub crd: bool,
    /// Print the devices of this node, and exit.
    #[arg(long, hide = true)]
    pub inventory: bool,
    /// Keep the weights of a model on this process's device.
    #[arg(long, hide = true, value_name = "FILE")]
    pub weights: Option<PathBuf>,
    /// Fill the memory of weights.
    #[arg(long, hide = true)]
    pub load_weights: bool,
    /// Run as a function of the demonstration.
    #[arg(long, hide = true)]
    pub gpu_function: bool,
    /// Wait for the end of the input, and kill the processes with secrets below this folder.
    #[arg(long, hide = true, value_name = "DIR")]
    pub reap: Option<PathBuf>,
    /// Print the lost devices, once for each line of input.
    #[arg(long, hide = true)]
    pub print_lost: bool,
    /// A word of no option: most often the value of `--sim` without its `=`.
    #[arg(hide = true)]
    stray: Option<String>,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "need an IP address and a port, such as 127.0.0.1:8080".to_owned())
}

fn serve_with(mut host: Builder) -> anyhow::Result<()> {
    let options = &mut host.options;
    if options.inventory {
        return inventory::print_inventory();
    }
    #[cfg(feature = "kubernetes")]
    if options.crd {
        print!("{}", kubernetes::function::crd()?);
        return Ok(());
    }
    if options.print_lost {
        return inventory::print_lost();
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
    #[cfg(feature = "kubernetes")]
    if options.kubernetes {
        let served = runtime.block_on(kubernetes::up::run(host));
        // A write that is under way does not keep it.
        runtime.shutdown_background();
        return served;
    }
    if options.demo.is_none() {
        return serve_on(runtime, host);
    }
    // A demonstration keeps no records.
    let dir = Scratch::below(&std::env::temp_dir(), "host", 0o777)?;
    options.state = Some(dir.path().to_owned());
    if options.sim.is_empty() && !options.host.no_gpu && !Inventory::are_here() {
        println!("openfaas: no GPU is found, so the demonstration simulates some");
        options.sim = demo::BOARDS.into_iter().map(str::parse).collect::<Result<_, _>>()?;
    }
    serve_on(runtime, host)
}

/// Folders that go when the host ends, also when a thread still holds the host's node.
#[derive(Default)]
struct Folders {
    simulators: Vec<SimulatorDir>,
    stages: Option<Scratch>,
}

/// Serves until the host fails or gets a signal. Its processes, its daemon and the folders of simulated drivers end with it.
fn serve_on(runtime: tokio::runtime::Runtime, host: Builder) -> anyhow::Result<()> {
    let started = start_mps(&host.options).context("host.mps")?;
    let mut folders = Folders::default();
    let served = runtime.block_on(async {
        tokio::select! {
            served = run(host, &mut folders) => served,
            told = told_to_end() => told.context("signals"),
        }
    });
    // A demonstration may still wait for answers.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    // Some clients of MPS end only with this host.
    if let Some(mps) = started
        && let Err(error) = mps.stop()
    {
        eprintln!("openfaas: MPS has not stopped: {error}");
    }
    drop(folders);
    served
}

/// Starts MPS if asked to. Returns none if MPS runs already, since another process must stop it then.
fn start_mps(options: &Options) -> anyhow::Result<Option<Mps>> {
    // A demonstration without a GPU has switched to simulated devices.
    if !options.host.mps || !options.sim.is_empty() {
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

/// The chosen state directory, or the user's default.
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

/// The credentials for `/system`.
///
/// # Errors
/// If other machines could reach the host without a password, or read it.
fn access(options: &Options) -> anyhow::Result<Option<Credentials>> {
    let credentials = options.credentials.as_deref().map(credentials).transpose()?;
    ensure!(
        credentials.is_some() || options.listen.ip().is_loopback(),
        "--credentials: needed to listen on {}, which is no loopback address",
        options.listen
    );
    let settings = &options.host;
    ensure!(
        options.listen.ip().is_loopback() || settings.plain_http,
        "--listen {}: the host speaks plain HTTP, so passwords and requests would cross the network in clear. Listen on \
         127.0.0.1 behind a proxy with TLS, or set host.plain_http=true if the network is private",
        options.listen
    );
    Ok(credentials)
}

/// The state of the handlers of requests, with the tenants of the settings.
///
/// # Errors
/// If the platform refuses a tenant's limits.
fn app(node: Arc<Node>, options: &Options, credentials: Option<Credentials>) -> anyhow::Result<App> {
    let settings = &options.host;
    let mut tenants: BTreeMap<String, TenantId> = BTreeMap::new();
    for (place, (name, tenant)) in settings.tenants.iter().enumerate() {
        let id = host::tenant(place);
        let limited = PlatformEvent::TenantLimited { tenant: id, limits: tenant.limits() };
        node.host()
            .tell(node.now(), limited)
            .map_err(|error| anyhow::anyhow!("host.tenants.{name}: {}", error.message))?;
        tenants.insert(name.clone(), id);
    }
    let patience = std::time::Duration::from_secs(settings.timeout.into());
    let later = later::Queue::start(&node, patience, settings.callback.clone());
    let loopback = options.listen.ip().is_loopback();
    Ok(App { node, credentials, loopback, metrics: Arc::default(), later, patience, tenants })
}

async fn run(host: Builder, folders: &mut Folders) -> anyhow::Result<()> {
    let Builder { options, policies, tokens, vertical, models } = host;
    let options = &options;
    let credentials = access(options)?;
    let settings = &options.host;
    let mut platform = options.platform_settings();
    let folder = state_folder(options)?;
    let named = || format!("--state {}", folder.display());
    let store = records::Store::open(&folder).with_context(named)?;
    let state = folder.canonicalize().with_context(named)?;
    // Held until this host ends.
    let _claim = records::claim(&state)?;
    let listener = tokio::net::TcpListener::bind(options.listen).await;
    let listener = listener.with_context(|| format!("--listen {}", options.listen))?;

    let mut devices = match settings.no_gpu {
        true => Inventory::none(),
        false => Inventory::find(&options.sim, &settings.whole, &state)?,
    };
    let (mut daemon, mut hook) = (None, None);
    if !settings.no_gpu {
        let socket = match &settings.daemon {
            Some(socket) => socket.clone(),
            None => {
                let socket = state.join("gshare.sock");
                let mut config = gshared::Config::at(socket.clone());
                config.allow_uids = settings.function_user.iter().map(|user| user.uid).collect();
                let mut builder = gshared::Daemon::builder(config);
                if let Some(health) = devices.health() {
                    builder = builder.health(health);
                }
                if let Some(tokens) = tokens {
                    builder = builder.engine(tokens);
                }
                if let Some(vertical) = vertical {
                    builder = builder.scaler(vertical);
                }
                daemon = Some(builder.build()?.spawn()?);
                socket
            }
        };
        hook = Some(Hook { preload: HOOK.find()?, socket });
    }
    let mps = || Mps::find().filter(Mps::is_running);
    let mps = if devices.simulated { None } else { mps().map(|mps| mps.pipe_dir().to_owned()) };
    let partitions = &mut platform.fractional.pool.sm_partitions;
    *partitions &= devices.simulated || settings.no_gpu || mps.is_some();
    let partitioned = *partitions;
    if !partitioned {
        eprintln!(
            "openfaas: SM partitions are not kept without MPS (--set host.mps=true starts it), so functions share a GPU by time alone"
        );
    }
    let platform = platform.build_with(policies).context("--settings")?;
    let said = match (settings.no_gpu, devices.simulated) {
        (true, _) => "no GPU".to_owned(),
        (false, simulated) => {
            let kind = if simulated { ", simulated" } else { "" };
            let count = devices.all.len();
            format!("{count} GPU{}{kind}", if count == 1 { "" } else { "s" })
        }
    };
    let found: Vec<_> =
        devices.all.iter().map(|(gpu, device)| (*gpu, device.name.clone(), device.spec.clone())).collect();
    let asked = hook.as_ref().map(|hook| gshared::config::admin_socket_of(&hook.socket));
    let models = match &settings.model_store {
        Some(socket) => Models::at(socket.clone())?,
        None => Models::start(state.join("store.sock"), settings.model_memory, models)?,
    };
    let weights = weights::Weights::new(state.join("weights"))?;
    let store_client = weights::StoreClient::write(state.join("python"))
        .inspect_err(|error| {
            eprintln!("openfaas: Python programs take no weights from a store by themselves: {error:#}");
        })
        .ok();
    let collector = settings.otlp.clone();
    let traces = collector.map(|collector| traces::Exporter::start(collector, asked.clone()));
    if let Some(user) = settings.function_user {
        let given = store.admit().and_then(|()| devices.give(user));
        given.with_context(|| format!("host.function_user {}:{}", user.uid, user.gid))?;
        // The loader skips a library that it cannot read, and the process would run without limits.
        if let Some(hook) = &hook {
            user.can_read(&hook.preload).context("host.function_user")?;
        }
    }
    let (user, cgroups) = (settings.function_user, settings.cgroups.clone());
    if let Some(below) = &cgroups {
        // A killed host leaves its cgroups behind.
        gshare_runner::confine::sweep(below).with_context(|| format!("host.cgroups {}", below.display()))?;
    }
    // The reaper may have been killed too.
    reaper::sweep(store.mounts());
    if let Err(error) = store.sweep() {
        eprintln!("openfaas: secrets and writes of an earlier host: {error}");
    }
    let _reaper = reaper::start(store.mounts())?;
    let podman = Podman::find(state.join("containers"));
    if let Some(Err(error)) = podman.as_ref().map(Podman::sweep) {
        eprintln!("openfaas: containers of an earlier host: {error}");
    }
    let (between, stages) = between::Between::new()
        .inspect_err(|error| eprintln!("openfaas: stages hand all values on over HTTP: /dev/shm: {error}"))
        .ok()
        .unzip();
    folders.stages = stages;
    folders.simulators = std::mem::take(&mut devices.simulators);
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
        #[cfg(feature = "kubernetes")]
        pods: None,
    };
    // Without a GPU there is no GPU memory to guess.
    let guess = if settings.no_gpu { Bytes(1) } else { settings.guess };
    let node = Node::start(store, runner, platform, guess)?;
    for (gpu, name, spec) in found {
        node.host()
            .find_device(node.now(), gpu, name, spec)
            .map_err(|error| anyhow::anyhow!("{gpu}: {}", error.message))?;
    }
    let app = app(node, options, credentials)?;
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

/// Deploys the functions that an earlier host kept.
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
                app.node.runner.models.put(model)?;
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
