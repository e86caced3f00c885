//! The command line of the controller.

use super::FaSTPod;
use super::controller::{Controller, MANAGER};
use super::fastpod_writes::{Observed, PLACED, Settings, Write, reconcile};
use super::node_hooks::{Hooks, NAME};
use super::pod_share::Profiles;
use super::pods::{Injected, Mounts, Place};
use crate::kubernetes::dra::Injection;
use crate::kubernetes::plugin::Sockets;
use crate::kubernetes::{self, lease};
use anyhow::{Context as _, bail};
use futures::FutureExt as _;
use gshare_core::Bytes;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResourceExt as _, ResourceExt as _};
use serde_json::json;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Pack the pods of FaSTPods over the GPUs of a cluster's nodes.
#[derive(Debug, clap::Parser)]
#[command(name = "fastpod")]
pub struct Options {
    /// Directory of the hook on every node.
    #[arg(long, value_name = "DIR", default_value = "/opt/gshare")]
    pub hook_dir: PathBuf,
    /// How the hook is loaded: by `/etc/ld.so.preload`, or by `LD_PRELOAD`, which containers of musl do not survive.
    #[arg(long, value_enum, default_value_t = Injection::File)]
    pub inject: Injection,
    /// The daemon's socket on every node. Its directory is mounted into containers, so nothing else may be in it.
    #[arg(long, value_name = "FILE", default_value = "/run/gshare/pods/gshare.sock")]
    pub socket: PathBuf,
    /// MPS runs on every node, with its pipes here.
    #[arg(long, value_name = "DIR", requires = "mps_shm")]
    pub mps_pipes: Option<PathBuf>,
    /// Shared memory of MPS, mounted at /dev/shm.
    #[arg(long, value_name = "DIR", requires = "mps_pipes")]
    pub mps_shm: Option<PathBuf>,
    /// Containers get these files from their pod, or from their node, where `fastpod --node` runs.
    #[arg(long, value_enum, default_value_t = Mounts::HostPath)]
    pub mounts: Mounts,
    /// Run on a node instead: the device plugin from which the kubelet mounts these files into containers.
    #[arg(long, conflicts_with_all = ["mounts", "profiles", "lease", "dry_run"])]
    pub node: bool,
    /// Containers of FaSTPods that may run on the node at a time.
    #[arg(long, requires = "node", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub slots: u32,
    /// Answer by names of CDI devices, from a spec in this directory: for container runtimes with CDI enabled.
    #[arg(long, value_name = "DIR", requires = "node")]
    pub cdi: Option<PathBuf>,
    /// The kubelet's directory.
    #[arg(long, value_name = "DIR", requires = "node", default_value = "/var/lib/kubelet")]
    pub kubelet: PathBuf,
    /// Answer `/metrics`, `/healthz` and `/readyz` here: `0.0.0.0:9478`.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "dry_run")]
    pub metrics: Option<SocketAddr>,
    /// Profiles for FaSTPods that name one: NAME.json is what `gshare lab profile --output` wrote.
    #[arg(long, value_name = "DIR")]
    pub profiles: Option<PathBuf>,
    /// Lead by this Lease: one replica works, the others wait for it to end. Without it there must be one at most.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub lease: Option<lease::Place>,
    /// Print the `CustomResourceDefinition`.
    #[arg(long, exclusive = true)]
    pub crd: bool,
    /// Without a cluster: print where the pods of these FaSTPods would go.
    #[arg(long, value_name = "FILE")]
    pub dry_run: Option<PathBuf>,
    /// Nodes of the dry run.
    #[arg(long, requires = "dry_run", default_value_t = 1)]
    pub nodes: u32,
    /// GPUs of each.
    #[arg(long, requires = "dry_run", default_value_t = 1)]
    pub gpus: u32,
    /// Memory of each GPU.
    #[arg(long, requires = "dry_run", default_value = "16GiB")]
    pub gpu_memory: Bytes,
    /// Print the pods as well.
    #[arg(long, requires = "dry_run")]
    pub pods: bool,
}

/// Runs the controller until it is asked to end.
///
/// # Errors
/// If there is no cluster, or a file is invalid.
pub async fn run(options: Options) -> anyhow::Result<()> {
    if options.crd {
        print!("{}", crd()?);
        return Ok(());
    }
    let settings = Settings {
        injected: Injected {
            hook: options.hook_dir.clone(),
            injection: options.inject,
            socket: options.socket.clone(),
            mps: options.mps_pipes.clone().zip(options.mps_shm.clone()),
            mounts: options.mounts,
        },
        profiles: match &options.profiles {
            Some(directory) => {
                profiles(directory).with_context(|| format!("--profiles {}", directory.display()))?
            }
            None => Profiles::new(),
        },
    };
    if let Some(file) = &options.dry_run {
        return dry_run(&options, file, &settings);
    }
    let (metrics, end) = kubernetes::begin(options.metrics).await?;
    if options.node {
        let hooks =
            Hooks::new(&settings.injected, options.slots, options.cdi.as_deref()).with_context(|| {
                format!("--cdi {}", options.cdi.as_deref().unwrap_or(Path::new("")).display())
            })?;
        return Ok(hooks.counting(metrics).serve(&Sockets::below(&options.kubelet, NAME), end).await?);
    }
    let client = kube::Client::try_default().await.context("no API server. Without a cluster: --dry-run")?;
    let known: Vec<_> = settings.profiles.keys().map(String::as_str).collect();
    println!("fastpod: scheduler {}, profiles [{}]", super::pods::SCHEDULER, known.join(", "));
    // A replica that waits for its turn to lead is ready, too.
    metrics.ready();
    let (controller, end) = (Controller::new(client.clone(), settings).counting(metrics), end.shared());
    let work = controller.run(end.clone());
    lease::run(options.lease.as_ref(), client, MANAGER, end, work).await
}

/// The definition as it is checked in.
///
/// # Errors
/// Never, unless it cannot be written as YAML.
pub fn crd() -> anyhow::Result<String> {
    let text = serde_saphyr::to_string(&FaSTPod::crd())?;
    Ok(format!("# Made by `cargo run -p gshare-examples --bin fastpod -- --crd`.\n{text}"))
}

/// Reads the profiles of a directory. Other files and hidden files are skipped.
fn profiles(directory: &Path) -> anyhow::Result<Profiles> {
    let mut profiles = Profiles::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.'));
        if let Some(name) = name.filter(|_| path.extension().is_some_and(|extension| extension == "json")) {
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let table = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            profiles.insert(name.to_owned(), table);
        }
    }
    Ok(profiles)
}

fn dry_run(options: &Options, file: &Path, settings: &Settings) -> anyhow::Result<()> {
    let name = || file.display().to_string();
    let text = std::fs::read_to_string(file).with_context(name)?;
    let mut fastpods: Vec<FaSTPod> = serde_saphyr::from_multiple(&text).with_context(name)?;
    for (index, fastpod) in fastpods.iter_mut().enumerate() {
        fastpod.metadata.uid.get_or_insert_with(|| format!("dry-run-{index}"));
        fastpod.metadata.namespace.get_or_insert_with(|| "default".into());
    }
    let mib = options.gpu_memory.get() >> 20;
    let nodes = (0..options.nodes).map(|node| {
        serde_json::from_value::<Node>(json!({
            "metadata": {"name": format!("node-{node}"), "labels": {
                "nvidia.com/gpu.count": options.gpus.to_string(), "nvidia.com/gpu.memory": mib.to_string()}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }))
    });
    let observed = Observed { fastpods, nodes: nodes.collect::<Result<_, _>>()?, ..Observed::default() };
    let now = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    let wanted = reconcile(&now, &observed, settings);
    if let Some(complaint) = wanted.complaints.first() {
        bail!("--gpus, --gpu-memory: {complaint}");
    }
    println!("# no cluster: nodes x GPUs: {} x {} of {}", options.nodes, options.gpus, options.gpu_memory);
    println!("{:<32} {:<10} {:>4}  {:>6} {:>6}  at time, SM", "pod", "node", "GPU", "time", "SMs");
    let pods = || {
        wanted.writes.iter().filter_map(|write| match write {
            Write::Create(pod) => Some(pod),
            _ => None,
        })
    };
    for pod in pods() {
        let Some(Place { node, gpu, rectangle }) = Place::of(pod) else { continue };
        println!(
            "{:<32} {node:<10} {gpu:>4}  {:>6} {:>6}  {}, {}",
            pod.name_any(),
            rectangle.quota.to_string(),
            rectangle.sm.to_string(),
            rectangle.time_offset,
            rectangle.sm_offset
        );
    }
    for told in wanted.statuses.iter().cloned() {
        let Some(fastpod) = told.write(&now, None) else { continue };
        for condition in fastpod.status.iter().flat_map(|status| &status.conditions) {
            if condition.type_ == PLACED && condition.status != "True" {
                println!("{}: {}: {}", fastpod.name_any(), condition.reason, condition.message);
            }
        }
    }
    if options.pods {
        for pod in pods() {
            print!("---\n{}", serde_saphyr::to_string(pod)?);
        }
    }
    Ok(())
}
