//! An autoscaler class for Knative Serving, in which the engines scale the revisions.
//!
//! # Problem
//! Knative makes a `PodAutoscaler` for each revision, with the revision's annotations, and leaves it to the controller of
//! its class (`autoscaling.knative.dev/class`). Pods that share GPUs need another class than Knative's own: nodes absorb
//! bursts by moving GPU time between pods, so new pods are only for lasting load (Dilu, section 3.4).
//!
//! # Terms
//! - **target**: the Deployment of a revision; **load**: requests at its pods and at activators;
//! - **pass**: one look at an object and its parts, with the resulting writes;
//! - Knative's words: **activator** (keeps requests for targets without pods), **queue-proxy** (sidecar of each pod, counts
//!   its requests), **`ServerlessService`** (directs requests to pods or to the activator).
//!
//! # Data flow
//! ```text
//! pods :9090, activators :9090 ── load, once a second ──▶ Decider ── pods desired ──▶ core ── scale, service, status ──▶ API server
//!                                                        the engine                    ▲ watches, wake-ups
//! ```
//! [`decider`] and [`target_writes`] are pure and told the time; [`shell`] watches and writes; [`outside`] asks pods and
//! activators; [`dry`] plays a load through the two pure parts on virtual time, without a cluster.
//!
//! # Annotations of a revision
//! `min-scale` (not where no route leads), `max-scale`, `initial-scale`, `activation-scale`, `scale-down-delay`, `window`,
//! `scale-to-zero-pod-retention-period`, `metric` (concurrency, rps), `target`, `target-utilization-percentage`, all below
//! `autoscaling.knative.dev/`. Knative does not check them for foreign classes; the condition `Active` names an invalid
//! annotation.
//!
//! # Limits
//! The load of a target without pods is known only from the activators' gauge in Prometheus text: since Knative 1.19
//! `metrics-protocol: prometheus` must be set in its `config-observability`. Cluster-wide defaults are options of this
//! program, not read from `config-autoscaler`. Pods are asked by their addresses, which a strict service mesh forbids. Of
//! several replicas of this program one leads, by a Lease; its successor begins with an empty window of load. Both
//! resources are internal to Knative and may change.

pub mod api;
pub mod decider;
pub mod dry;
pub mod outside;
pub mod settings;
pub mod shell;
pub mod target_writes;

use crate::kubernetes::{self, lease};
use anyhow::Context as _;
use decider::Policy;
use futures::FutureExt as _;
use gshare_core::Timestamp;
use k8s_openapi::jiff;
use settings::Defaults;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Scale Knative revisions of class coscale.gshare.io. Talks to the cluster of the present service account or kubeconfig.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "knative")]
pub struct Options {
    /// The autoscaler class to serve.
    #[arg(long, default_value = "coscale.gshare.io")]
    pub class: String,
    /// The deciding engine.
    #[arg(long, value_enum, default_value = "lazy")]
    pub policy: Policy,
    /// Namespace of Knative Serving.
    #[arg(long, default_value = "knative-serving")]
    pub system_namespace: String,
    /// Domain suffix of the services' names.
    #[arg(long, default_value = "cluster.local")]
    pub cluster_domain: String,
    /// Port at which queue-proxies and activators report their load.
    #[arg(long, default_value_t = 9090)]
    pub metrics_port: u16,
    /// Answer `/metrics`, `/healthz` and `/readyz` here: `0.0.0.0:9478`.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "dry_run")]
    pub metrics: Option<SocketAddr>,
    /// Lead by this Lease: one replica works, the others wait for it to end. Without it there must be one at most.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub lease: Option<lease::Place>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub defaults: Defaults,
    /// Talk to no cluster: play a load through the decisions, on virtual time, and print them. A file has lines of
    /// `SECOND REQUESTS_PER_SECOND`, from which second on how many come.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub dry_run: Option<Option<PathBuf>>,
}

/// Serves until the process is told to end, or plays a dry run.
///
/// # Errors
/// When there is no cluster to talk to, or the load of a dry run does not read.
pub fn serve(options: &Options) -> anyhow::Result<()> {
    anyhow::ensure!(
        !options.class.ends_with(".knative.dev"),
        "--class {}: need another domain than knative.dev, whose classes are Knative's own",
        options.class
    );
    if let Some(file) = &options.dry_run {
        let load = match file {
            Some(file) => {
                let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
                dry::parse(&text).with_context(|| file.display().to_string())?
            }
            None => dry::BUILT_IN.to_vec(),
        };
        return dry::play(&load, options, &mut std::io::stdout());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let config =
            kube::Config::infer().await.context("no cluster: neither kubeconfig nor service account")?;
        println!("knative: class {} of {}", options.class, config.cluster_url);
        let client = kube::Client::try_from(config)?;
        let (metrics, stop) = kubernetes::begin(options.metrics).await?;
        // A replica that waits for its turn to lead is ready, too.
        metrics.ready();
        let outside = outside::Http {
            metrics_port: options.metrics_port,
            domain: options.cluster_domain.clone(),
            service_ports: (80, 81),
            patience: outside::PATIENCE,
        };
        let config = shell::Config {
            class: options.class.clone(),
            policy: options.policy,
            defaults: options.defaults.clone(),
            system_namespace: options.system_namespace.clone(),
            metrics,
        };
        let started = std::time::Instant::now();
        let clock = move || shell::Moment {
            wall: jiff::Timestamp::now(),
            uptime: Timestamp::from_nanos(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)),
        };
        let stop = stop.shared();
        let work = shell::run(client.clone(), config, Arc::new(outside), Box::new(clock), stop.clone());
        lease::run(options.lease.as_ref(), client, shell::MANAGER, stop, work).await
    })
}
