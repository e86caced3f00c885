//! The command line of the driver.

use super::claim_service::{Driver, serve};
use super::{DRIVER, Injected, Injection, Node, cdi, claim, publish, slice};
use crate::kubernetes::node_hooks::{Hooks, NAME};
use crate::kubernetes::{self, plugin::Sockets};
use anyhow::{Context as _, ensure};
use gshare_core::Bytes;
use gshare_openfaas::kubernetes::injection;
use gshare_openfaas::records::{replace, sweep};
use gshared::metrics::integer;
use k8s_openapi::api::core::v1;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Resource as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Pause between two looks at the slice, and after a failed look.
const LOOK: Duration = Duration::from_secs(60);
/// Looks between two sweeps of the files of claims.
const SWEEP: u64 = 10;
/// Time between two looks for the hook.
const HOOK_LOOK: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_secs(5);

/// Publish this node's GPUs as devices with consumable capacity, and give claims their share.
#[derive(Debug, clap::Parser)]
#[command(name = "gshare-dra")]
pub struct Options {
    /// Name of this node [default: `$NODE_NAME`].
    #[arg(long)]
    pub node: Option<String>,
    /// Number of simulated GPUs, in place of those that the driver lists.
    #[arg(long, value_name = "GPUS", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    pub sim: Option<u32>,
    /// Memory of a simulated GPU.
    #[arg(long, value_name = "BYTES", default_value = "16GiB")]
    pub sim_memory: Bytes,
    /// The hook on this node.
    #[arg(long, value_name = "FILE", default_value = "/opt/gshare/libgshare_hook.so")]
    pub hook: PathBuf,
    /// The daemon's socket. Its directory is mounted into containers, so nothing else may be in it.
    #[arg(long, value_name = "FILE", default_value = "/run/gshare/pods/gshare.sock")]
    pub socket: PathBuf,
    /// How the hook is loaded.
    #[arg(long, value_enum, default_value_t = Injection::File)]
    pub inject: Injection,
    /// Pipe directory of a running MPS; the scheduler then sums SM partitions.
    #[arg(long, value_name = "DIR", requires = "mps_shm")]
    pub mps_pipes: Option<PathBuf>,
    /// Shared memory of MPS, mounted at /dev/shm.
    #[arg(long, value_name = "DIR", requires = "mps_pipes")]
    pub mps_shm: Option<PathBuf>,
    /// Kind of the CDI devices of `nvidia-ctk cdi generate --device-name-strategy=uuid`, which bring the GPU itself.
    #[arg(long, default_value = "nvidia.com/gpu")]
    pub gpu_kind: String,
    /// Directory of CDI specs, as container runtimes read it.
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi: PathBuf,
    /// The kubelet's directory.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet: PathBuf,
    /// Answer `/metrics`, `/healthz` and `/readyz` here: `0.0.0.0:9478`.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
    /// Be the device plugin in place of the driver: the kubelet then brings hook and socket into the containers of functions.
    #[arg(long, conflicts_with_all = ["sim", "dry_run"])]
    pub hooks: bool,
    /// The device plugin answers by CDI devices in place of mounts: for container runtimes with CDI enabled.
    #[arg(long, requires = "hooks")]
    pub by_cdi: bool,
    /// Without a cluster: print the slice, and the CDI spec of --claim.
    #[arg(long)]
    pub dry_run: bool,
    /// An allocated `ResourceClaim`, in YAML or JSON.
    #[arg(long, value_name = "FILE", requires = "dry_run")]
    pub claim: Option<PathBuf>,
    /// Without a cluster: whether the `ResourceClaim`s and `ResourceClaimTemplate`s of a file can be granted.
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub check: Option<PathBuf>,
}

impl Options {
    fn injected(&self) -> Injected {
        Injected {
            hook: self.hook.clone(),
            injection: self.inject,
            socket: self.socket.clone(),
            mps: self.mps_pipes.clone().zip(self.mps_shm.clone()),
            ..Injected::default()
        }
    }

    fn describe(&self) -> anyhow::Result<Node> {
        let node = self.node.clone().or_else(|| std::env::var("NODE_NAME").ok());
        let gpus = match self.sim {
            Some(count) => super::simulated(count, self.sim_memory),
            None => super::of_this_node()?,
        };
        Ok(Node {
            name: node.context("--node: missing, and there is no $NODE_NAME")?,
            gpus,
            injected: self.injected(),
            gpu_kind: self.sim.is_none().then(|| self.gpu_kind.clone()),
        })
    }
}

/// Runs the driver until it is asked to end.
///
/// # Errors
/// When it cannot start, or the kubelet refuses it.
pub async fn run(options: Options) -> anyhow::Result<()> {
    if let Some(file) = &options.check {
        return check(file).with_context(|| file.display().to_string());
    }
    if options.hooks {
        return bring_hooks(&options).await;
    }
    let node = options.describe()?;
    if options.dry_run {
        return dry_run(&node, options.claim.as_deref());
    }
    let (metrics, end) = kubernetes::begin(options.metrics).await?;
    let mut end = std::pin::pin!(end);
    metrics.gpus.get_or_create(&Vec::new()).set(integer(node.gpus.len()));
    tokio::select! {
        () = &mut end => return Ok(()),
        () = hook_is_there(&node.injected.hook) => {}
    }
    let admin = gshared::config::admin_socket_of(&node.injected.socket);
    ensure!(
        !admin.exists(),
        "--socket: {}: the daemon's admin socket is beside it, and containers would get both. Set `admin_socket` in its configuration",
        options.socket.display()
    );
    if node.injected.injection == Injection::File {
        let file = node.injected.preload();
        name_hook(&file).with_context(|| file.display().to_string())?;
    }
    let directory = cdi::Directory::open(&options.cdi, &node.injected.hook)
        .with_context(|| options.cdi.display().to_string())?;
    let client = kube::Client::try_default().await.context("no API server. Without a cluster: --dry-run")?;
    let node = Arc::new(node);
    let driver = Driver::new(Arc::clone(&node), client.clone(), directory, metrics.clone());
    let simulated = if options.sim.is_some() { ", simulated" } else { "" };
    println!("gshare-dra: {DRIVER} on {}  {} GPU{simulated}", node.name, node.gpus.len());
    let sweeper = driver.clone();
    let publisher = tokio::spawn(async move {
        for look in 0_u64.. {
            if look.is_multiple_of(SWEEP) {
                match sweeper.sweep().await {
                    Ok(swept) => {
                        metrics.swept.get_or_create(&Vec::new()).inc_by(swept.len() as u64);
                        swept.iter().for_each(|uid| println!("gshare-dra: claim {uid} is over: swept"));
                    }
                    Err(error) => eprintln!("gshare-dra: sweep: {error:#}"),
                }
            }
            let pause = match publish::publish(&client, &node).await {
                Ok(0) => LOOK,
                Ok(_) => {
                    metrics.slice_writes.get_or_create(&Vec::new()).inc();
                    println!("gshare-dra: published {}", slice::name(&node));
                    LOOK
                }
                Err(error) => {
                    eprintln!("gshare-dra: {error:#}");
                    RETRY
                }
            };
            tokio::time::sleep(pause).await;
        }
    });
    let served = serve(driver, &Sockets::below(&options.kubelet, DRIVER), end).await;
    publisher.abort();
    served
}

/// Containers that may run on a node at a time: beyond the pods of any kubelet.
const SLOTS: u32 = 1024;

/// Runs the device plugin of the node.
async fn bring_hooks(options: &Options) -> anyhow::Result<()> {
    let (metrics, end) = kubernetes::begin(options.metrics).await?;
    let cdi = options.by_cdi.then_some(options.cdi.as_path());
    let hooks = Hooks::new(&options.injected(), SLOTS, cdi, metrics);
    let hooks = hooks.with_context(|| options.cdi.display().to_string())?;
    hooks.serve(&Sockets::below(&options.kubelet, NAME), end).await
}

/// Names the first claim that cannot be granted.
fn check(file: &Path) -> anyhow::Result<()> {
    let objects: Vec<serde_json::Value> = serde_saphyr::from_multiple(&std::fs::read_to_string(file)?)?;
    for object in objects {
        let spec = match object["kind"].as_str() {
            Some("ResourceClaim") => &object["spec"],
            Some("ResourceClaimTemplate") => &object["spec"]["spec"],
            _ => continue,
        };
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let spec = serde_path_to_error::deserialize(spec).with_context(|| name.to_owned())?;
        claim::check(&spec).with_context(|| name.to_owned())?;
        println!("{name}: can be granted");
    }
    Ok(())
}

/// Waits for the hook, which the daemon's pod puts on a fresh node.
pub async fn hook_is_there(hook: &Path) {
    if !hook.is_file() {
        println!("gshare-dra: waits for --hook {}: the daemon's pod puts it there", hook.display());
    }
    while !hook.is_file() {
        tokio::time::sleep(HOOK_LOOK).await;
    }
}

/// Puts the file in place by which containers load the hook. Containers that run have the old one mounted, and a loader reads it at
/// any time.
fn name_hook(preload_file: &Path) -> std::io::Result<()> {
    sweep(preload_file.parent().unwrap_or(Path::new("/")), "ld.so.preload.")?;
    replace(preload_file, format!("{}\n", injection::HOOK).as_bytes(), cdi::MODE)
}

/// Prints the slice and the CDI spec that the driver would write.
fn dry_run(node: &Node, file: Option<&Path>) -> anyhow::Result<()> {
    println!("# no cluster: what gshare-dra would publish");
    let mut object = v1::Node::default();
    (object.metadata.name, object.metadata.uid) = (Some(node.name.clone()), Some("<uid of the node>".into()));
    let owner = object.owner_ref(&()).unwrap_or_default();
    print!("{}", serde_saphyr::to_string(&slice::slice(node, owner, 1))?);
    if let Some(file) = file {
        let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let claim: ResourceClaim =
            serde_saphyr::from_str(&text).with_context(|| file.display().to_string())?;
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let spec = claim::prepare(node, &uid, &claim)?;
        println!("---\n# /var/run/cdi/{DRIVER}-{}_{uid}.json", cdi::CLASS);
        print!("{}", serde_saphyr::to_string(&spec)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written in place it is empty for a moment, and a program that starts then has no limits.
    #[test]
    fn who_reads_the_preload_file_sees_the_old_one_or_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let (file, open) = (dir.path().join("ld.so.preload"), dir.path().join("open"));
        std::fs::write(&file, "old").unwrap();
        std::fs::hard_link(&file, &open).unwrap();
        std::fs::write(dir.path().join(".ld.so.preload.x7k2p1.new"), "of a killed one").unwrap();
        name_hook(&file).unwrap();
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        assert_eq!((read(&open).as_str(), read(&file)), ("old", format!("{}\n", injection::HOOK)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left beside it");
    }
}
