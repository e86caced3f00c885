//! `gshare up --kubernetes`: the same host, with pods in the place of processes.
//!
//! Of several replicas one leads by a Lease ([`lease`]), and only the leader listens. A new leader takes over the running pods of an earlier
//! one. After the end of its lease a leader sends no further write; it answers requests until it reads that another leads, and then it ends.

use super::injection::{Injected, Injection, Mounts};
use super::lease::{self, Fence};
use super::objects::{deploy, is_completed};
use super::places::{NODE_LABEL, Unlisted};
use super::pods::Pods;
use super::scope::Scope;
use super::{ended, hash};
use crate::builder::Builder;
use crate::inventory::Inventory;
use crate::models::Models;
use crate::node::{Node, Runner};
use crate::records::Store;
use crate::routes::App;
use crate::weights::Weights;
use crate::{access, app, guard, routes};
use anyhow::Context as _;
use axum::http::{StatusCode, header};
use futures::FutureExt as _;
use gshare_runner::Scratch;
use k8s_openapi::api::core::v1::Node as Kubelet;
use kube::api::ListParams;
use kube::{Api, Client};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::JoinHandle;

/// The table `host.kubernetes` of the settings.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesSettings {
    /// Namespace of the functions and their pods; without it, the namespace of the host's own account.
    pub namespace: Option<String>,
    /// Whether functions of all other namespaces are the host's too, known as `NAME.NAMESPACE`.
    pub all_namespaces: bool,
    /// The Lease `NAMESPACE/NAME` by which one replica leads. Without it there must be one replica at most.
    #[serde(deserialize_with = "gshare_core::text::some_text")]
    pub lease: Option<lease::Place>,
    /// Directory of the hook on every node.
    pub hook: PathBuf,
    /// How the hook is loaded: `file` or `environment`.
    pub inject: Injection,
    /// The daemon's socket on every node.
    pub socket: PathBuf,
    /// Whether containers get these files from volumes of their pod (`host-path`), or from their node's device plugin (`node`).
    pub mounts: Mounts,
    /// Whether templates may have host namespaces, `hostPath` volumes, privileged containers and added capabilities.
    pub privileged_pods: bool,
    /// The pipes of MPS on every node, and its shared memory. Without them functions share a GPU by time alone.
    pub mps: Option<(PathBuf, PathBuf)>,
}

impl Default for KubernetesSettings {
    fn default() -> Self {
        let Injected { hook, injection, socket, mps, mounts } = Injected::default();
        Self {
            namespace: None,
            all_namespaces: false,
            lease: None,
            hook: hook.parent().map(Path::to_owned).unwrap_or_default(),
            inject: injection,
            socket,
            mounts,
            privileged_pods: false,
            mps,
        }
    }
}

/// Serves until told to end.
///
/// # Errors
/// Without a cluster, for a wrong setting, or when the lead is lost.
pub async fn run(host: Builder) -> anyhow::Result<()> {
    let client = Client::try_default().await.context("--kubernetes: no API server")?;
    let (stop, mut led) = (ended().shared(), Ok(()));
    let address = host.options.listen;
    let listener = std::net::TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok((tokio::net::TcpListener::from_std(listener.try_clone()?)?, listener))
    });
    let (listens, listener) = listener.with_context(|| format!("--listen {address}"))?;
    let waits = tokio::spawn(axum::serve(listens, waiting()).into_future());
    let place = host.options.host.kubernetes.lease.clone();
    let fence = Fence::new(place.is_some());
    let work = async {
        tokio::select! {
            served = lead(host, client.clone(), fence.clone(), listener, waits) => led = served,
            () = stop.clone() => {}
        }
    };
    lease::run(place.as_ref(), client.clone(), fence.clone(), stop.clone(), work).await?;
    led
}

/// The answers of a replica while another leads: it is alive, and not ready.
fn waiting() -> axum::Router {
    let close = [(header::CONNECTION, "close")];
    let not_yet = (StatusCode::SERVICE_UNAVAILABLE, close.clone(), "another replica leads\n");
    axum::Router::new()
        .route("/healthz", axum::routing::get(move || std::future::ready((close, "OK"))))
        .fallback(move || std::future::ready(not_yet))
}

/// Stops the writes of a leader at the end of its lead.
pub(super) struct Leads(pub(super) Fence);

impl Drop for Leads {
    fn drop(&mut self) {
        self.0.close();
    }
}

async fn lead(
    host: Builder,
    client: Client,
    fence: Fence,
    listener: std::net::TcpListener,
    waits: JoinHandle<std::io::Result<()>>,
) -> anyhow::Result<()> {
    let Builder { options, policies, .. } = host;
    let credentials = access(&options)?;
    let settings = options.host.kubernetes.clone();
    let namespace = settings.namespace.unwrap_or_else(|| client.default_namespace().to_owned());
    let mut platform = options.platform_settings();
    platform.fractional.pool.sm_partitions &= settings.mps.is_some();
    let partitioned = platform.fractional.pool.sm_partitions;
    let platform = platform.build_with(policies).context("--settings")?;
    let injected = Injected {
        hook: settings.hook.join("libgshare_hook.so"),
        injection: settings.inject,
        socket: settings.socket,
        mps: settings.mps,
        mounts: settings.mounts,
    };
    let leader = format!("{:08x}", hash(&gshare_runner::new_run()?.to_string()) & 0xffff_ffff);
    let scope =
        Scope { client: client.clone(), home: namespace.clone(), everywhere: settings.all_namespaces };
    let _leads = Leads(fence.clone());
    let mut pods = Pods::new(scope, &leader, injected, fence);
    pods.privileged = settings.privileged_pods;
    let pods = Arc::new(pods);
    let folder = Scratch::below(&std::env::temp_dir(), "host", 0o700)?;
    let mut runner = runner(folder.path(), Arc::clone(&pods))?;
    runner.partitioned = partitioned;
    runner.traces =
        options.host.otlp.clone().map(|collector| crate::traces::Exporter::start(collector, None));
    let node = Node::start(Store::open(folder.path())?, runner, platform, options.host.guess)?;
    let app = Arc::new(app(Arc::clone(&node), &options, credentials)?);
    let serve = async |functions: usize, adopted: usize| {
        waits.abort();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let gpus = node.host().devices().count();
        println!(
            "openfaas: http://{}  {gpus} GPUs of nodes with {NODE_LABEL}=true, {functions} functions in namespace {namespace}, {adopted} of their pods run",
            listener.local_addr()?,
        );
        Ok(guard::serve(listener, routes::router(Arc::clone(&app))).await?)
    };
    follow(&app, &pods, client, serve).await
}

/// A runner of pods alone: without the parts of a host that are of its own machine.
pub(super) fn runner(folder: &Path, pods: Arc<Pods>) -> anyhow::Result<Runner> {
    Ok(Runner {
        hook: None,
        devices: Inventory::default(),
        partitioned: false,
        daemon: None,
        models: Models::at(folder.join("store.sock"))?,
        weights: Weights::new(folder.join("weights"))?,
        store_client: None,
        traces: None,
        user: None,
        cgroups: None,
        podman: None,
        mps: None,
        between: None,
        pods: Some(pods),
    })
}

/// Takes over what an earlier leader left, and follows the cluster while `serve` answers clients. `serve` is told the number of functions and
/// of pods that were taken over.
pub(super) async fn follow(
    app: &App,
    pods: &Arc<Pods>,
    client: Client,
    serve: impl AsyncFnOnce(usize, usize) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let node = &app.node;
    // Ten thousand pods take a while, in which those without a least number yet would count as idle.
    node.stand();
    let chooser = Arc::clone(pods);
    node.host().choose_nodes(move |version| chooser.nodes_for(version));
    let kubelets = Api::<Kubelet>::all(client.clone());
    let kubelets = kubelets.list(&ListParams::default().labels(&format!("{NODE_LABEL}=true"))).await;
    let mut unlisted = Unlisted::new();
    for kubelet in kubelets.context("nodes")? {
        pods.see_node(node, kubelet, &mut unlisted);
    }
    // A daemon that does not answer is asked again by the watch.
    pods.list(node, &mut unlisted).await;
    let objects = &pods.objects;
    let functions = objects.list().await.context("GpuFunctions")?;
    for object in &functions {
        if let Err(error) = deploy(app, objects.record_of(object), true) {
            objects.deploy_earlier(app, object, &error);
        }
    }
    let adopted = pods.adopt_all(node).await.context("pods")?;
    for object in &functions {
        let name = objects.service(object);
        if is_completed(object) {
            node.host().completed_before(&name);
        }
        node.host().keep_minimum(node.now(), &name);
    }
    node.go_on();
    tokio::select! {
        served = serve(functions.len(), adopted) => served?,
        () = Arc::clone(pods).watch(Arc::downgrade(node)) => {}
        () = Arc::clone(pods).watch_nodes(Arc::downgrade(node), client) => {}
        () = objects.watch(app) => {}
        () = objects.tell(app, pods) => {}
    }
    anyhow::bail!("a watch has ended")
}
