//! An OpenFaaS provider for one node: functions are processes that share its GPUs.
//!
//! # Problem
//! `faas-cli` and whoever speaks the faas-provider contract deploy functions by name, call them over HTTP, and expect
//! replicas to follow the load. Here a replica is a process of this node under the hook, with the share of a GPU that
//! FaST-GShare's annotations say. No cluster, no containers and no gateway are needed: the provider serves `/function`
//! and `/async-function` itself.
//!
//! # Terms
//! - **function**: what was deployed under a name; **replica**: one process of it (an instance of the engines);
//! - **slot**: one request at a time on one replica; it has `gshare/concurrency` of them, 1 by default;
//! - **share**: quota, SM partition and memory, from annotations; a function without any is an ordinary process.
//!
//! # What a function is
//! Any program that serves plain HTTP on `127.0.0.1:$PORT`, like a function of of-watchdog's HTTP mode. It is ready when
//! it takes connections, so it loads its model before it listens. Its command line is `envProcess`, or else `image`.
//! What it prints is its log; its secrets are files in `$secret_mount_path`.
//!
//! | annotation or label | meaning |
//! |---|---|
//! | `fastgshare/gpu_quota_request`, `_limit` | guaranteed and most share of GPU time |
//! | `fastgshare/gpu_sm_partition` | SMs, in per cent |
//! | `fastgshare/gpu_mem` | memory, in bytes |
//! | `gshare/requests_per_second` | what a replica serves with that share, as profiled: load starts and stops replicas |
//! | `gshare/concurrency` | requests at a time on a replica |
//! | `com.openfaas.scale.min`, `.max` | fewest and most replicas: 1, and 20 |
//!
//! # Who decides
//! ```text
//! deployed ──▶ HeuristicHorizontal: how many ──▶ MaxRects: on which GPU ──▶ process ──▶ takes connections: ready
//!                     ▲ load                         │ no room: refused, tried again after 5 s
//! request ──▶ LocalityScheduler: which slot, or wait ──▶ proxy ──▶ answer over: the slot is free
//! ```
//! - **How many replicas**: [`HeuristicHorizontal`](gshare_sched::scale::HeuristicHorizontal) (FaST-GShare, Algorithm 1).
//!   Load is reported once a second, and at once when as many requests wait as are served: where a request and a limit leave no
//!   slack for a burst, a step of load would be late until the next second. `scale-function` changes its bounds. A function of
//!   unknown speed keeps what was asked for; at 0 its next request wakes it.
//! - **Where**: [`MaxRects`](gshare_sched::pack::MaxRects). The rectangle is given back when the process has ended.
//! - **Which replica**: one [`LocalityScheduler`](gshare_sched::request::LocalityScheduler) per function. Its GPUs are the
//!   slots, its one model is in each of them: what is left of it is a fair queue of bounded length with retries.
//! - **How much GPU time, when**: the node's daemon; it is [`gshared::Daemon`] in this process, or one that runs already.
//!
//! # States of a replica
//! ```text
//! starting ─ connects ─▶ ready ─ fewer are needed, or a new version is ready ─▶ draining ─ last answer over ─▶ killed
//!     └─ ends, or takes too long ─▶ gone ◀─ ends ─┘                                └─ takes too long ─▶ killed
//! ```
//! A draining replica gets no more requests and is killed when it has none, so that none is lost by scaling in. A new
//! version is started beside the old one where there is room; else the old one makes room, and requests wait.
//!
//! # When something dies
//! - *A replica*: what it was serving is answered 502 at once. What it had not accepted goes to another one.
//! - *The daemon*: replicas go on by their policy ([`gshare_core::wire::OnDaemonLoss::Open`]) and meet the next one.
//! - *The provider*: the kernel kills its replicas. The next provider of the same directory has the same functions,
//!   secrets and numbers of replicas; calls that waited in `/async-function` are lost.
//!
//! # Limits
//! One namespace. Functions run as the provider's user: whoever may deploy may run any program as that user. `image` is no
//! container image. Limits of CPU and memory are kept and shown, not enforced. A client that leaves frees its slot, though
//! the replica may still work on what was asked; the next request then waits there. A port is free when it is chosen;
//! nothing reserves it until the replica listens.

pub mod api;
pub mod core;
pub mod later;
pub mod logs;
pub mod metrics;
pub mod node;
pub mod proxy;
pub mod routes;
pub mod store;

use anyhow::{Context as _, ensure};
use gshare_core::{Bytes, Duration};
use gshare_runner::libraries::{HOOK, SimulatorDir, prepend};
use gshare_runner::manager::Hook;
use node::{Node, Runner};
use routes::{App, Credentials};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Serve the OpenFaaS provider contract: functions are processes that share the GPUs of this node.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "openfaas")]
pub struct Options {
    /// Where to listen; port 0 chooses one.
    #[arg(long, default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Directory of functions and secrets; made if need be.
    #[arg(long, default_value = "gshare-openfaas")]
    pub state: PathBuf,
    /// GPUs are simulated ones of this profile, such as v100 or tiny.
    #[arg(long, value_name = "PROFILE", num_args = 0..=1, require_equals = true, default_missing_value = "v100")]
    pub sim: Option<String>,
    /// GPUs of this node; 0 for none.
    #[arg(long, default_value_t = 1)]
    pub gpus: u32,
    /// Memory of each for functions.
    #[arg(long, default_value = "16GiB", value_parser = memory)]
    pub gpu_memory: Bytes,
    /// Socket of the node's daemon. Without one the provider runs its own.
    #[arg(long, value_name = "SOCKET")]
    pub daemon: Option<PathBuf>,
    /// Directory with the files `basic-auth-user` and `basic-auth-password`. Without one, only on a loopback address.
    #[arg(long, value_name = "DIR")]
    pub credentials: Option<PathBuf>,
    /// Most requests of a function that wait or run at once.
    #[arg(long, default_value_t = 1024)]
    pub queue: u32,
    /// Seconds that a request may wait for a replica, and then for the head of its answer.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub timeout: u32,
}

fn memory(text: &str) -> Result<Bytes, String> {
    text.parse().map_err(|error: gshare_core::ParseUnitError| error.to_string())
}

/// Serves until the process ends. Prints where it listens.
///
/// # Errors
/// When it cannot start.
pub fn serve(options: &Options) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(options))
}

async fn run(options: &Options) -> anyhow::Result<()> {
    let credentials = options.credentials.as_ref().map(|dir| {
        let read = |name: &str| {
            let path = dir.join(name);
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            Ok::<_, anyhow::Error>(text.trim_end().to_owned())
        };
        Ok::<_, anyhow::Error>(Credentials {
            pair: format!("{}:{}", read("basic-auth-user")?, read("basic-auth-password")?),
        })
    });
    let credentials = credentials.transpose()?;
    ensure!(
        credentials.is_some() || options.listen.ip().is_loopback(),
        "--credentials: needed to listen on {}, which is no loopback address",
        options.listen
    );
    let store = store::Store::open(&options.state).with_context(|| options.state.display().to_string())?;
    let state = options.state.canonicalize()?;
    let listener = tokio::net::TcpListener::bind(options.listen).await;
    let listener = listener.with_context(|| format!("--listen {}", options.listen))?;

    let mut environment = Vec::new();
    let mut simulator = None;
    if let Some(profile) = &options.sim {
        let dir = SimulatorDir::new()?;
        environment.push(("LD_LIBRARY_PATH".into(), prepend("LD_LIBRARY_PATH", dir.path())));
        environment.push(("GSHARE_SIM_PROFILE".into(), profile.into()));
        environment.push(("GSHARE_SIM_GPUS".into(), options.gpus.to_string().into()));
        environment.push(("GSHARE_SIM_DEVICE".into(), state.join("device").into_os_string()));
        simulator = Some(dir);
    }
    let (mut daemon, mut hook) = (None, None);
    if options.gpus > 0 {
        let socket = match &options.daemon {
            Some(socket) => socket.clone(),
            None => {
                let socket = state.join("gshare.sock");
                daemon = Some(gshared::Daemon::new(gshared::Config::at(socket.clone()))?.spawn()?);
                socket
            }
        };
        hook = Some(Hook { preload: HOOK.find()?, socket });
    }
    let mps = || gshared::mps::Mps::find().is_some_and(|mps| mps.is_running());
    let runner = Runner { hook, environment, partitioned: options.sim.is_some() || mps() };
    let patience = Duration::from_secs(options.timeout.into());
    let node = Node::start(store, runner, options.gpus, options.gpu_memory, options.queue, patience)?;
    let (kept, bad) = node.store.functions()?;
    for why in bad {
        eprintln!("openfaas: not a function: {why}");
    }
    let functions = kept.len();
    for record in kept {
        let name = record.deployment.service.clone();
        let deployed = record.deployment.plan().and_then(|plan| {
            node.core().deploy(node.now(), record.deployment, plan, record.created_ms, record.replicas)
        });
        if let Err(error) = deployed {
            eprintln!("openfaas: {name}: {}", error.message);
        }
    }
    let patience = std::time::Duration::from_secs(options.timeout.into());
    let later = later::Queue::start(&node, patience);
    let app = App { node, credentials, metrics: Arc::default(), later, patience };
    let simulated = if options.sim.is_some() { ", simulated" } else { "" };
    println!(
        "openfaas: http://{}  {} GPU{simulated}  {functions} functions from {}",
        listener.local_addr()?,
        options.gpus,
        options.state.display()
    );
    let service = routes::router(Arc::new(app)).into_make_service_with_connect_info::<SocketAddr>();
    let served = axum::serve(
        axum::serve::ListenerExt::tap_io(listener, |stream| drop(stream.set_nodelay(true))),
        service,
    );
    served.await?;
    drop((daemon, simulator));
    Ok(())
}
