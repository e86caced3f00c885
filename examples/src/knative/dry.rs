//! A load played through [`Decider`] and [`target_writes`](super::target_writes) on virtual time. No cluster: what Kubernetes and Knative's own
//! controllers would do is [`Cluster`], in which a pod is ready some seconds after it was asked for.

use super::Options;
use super::api::{
    ACTIVE, Condition, Mode, PodAutoscaler, PodAutoscalerSpec, READY, ServerlessService,
    ServerlessServiceStatus,
};
use super::decider::Decider;
use super::settings::{Defaults, Settings};
use super::target_writes::{Observed, Pass, Write, reconcile};
use anyhow::{Context as _, ensure};
use gshare_core::profile::RequestRate;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use std::time::Duration;

/// From which second on how many requests per second come.
pub const BUILT_IN: [(u64, u32); 5] = [(0, 30), (60, 110), (180, 20), (300, 0), (480, 40)];
/// Seconds from the last change of load to the end.
const TAIL: u64 = 60;
/// From being asked for to being ready.
const POD_START: Duration = Duration::from_secs(4);

/// Reads lines of `SECOND REQUESTS_PER_SECOND`.
///
/// # Errors
/// The line and the expected form.
pub fn parse(text: &str) -> anyhow::Result<Vec<(u64, u32)>> {
    let mut load: Vec<(u64, u32)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        let Some((second, rate)) = line.trim().split_once(char::is_whitespace) else {
            ensure!(line.trim().is_empty(), "line {number}: `{line}`: need SECOND REQUESTS_PER_SECOND");
            continue;
        };
        let second = second.parse().ok().filter(|second| *second <= 86_400);
        let second = second.with_context(|| format!("line {number}: second: need 0 to 86400"))?;
        let rate = rate.trim().parse().ok().filter(|rate| *rate <= 1_000_000);
        let rate = rate.with_context(|| format!("line {number}: requests per second: need 0 to 1000000"))?;
        let last = load.last().map(|(last, _)| *last);
        ensure!(
            last.is_none_or(|last| last < second),
            "line {number}: second: need more than the line before"
        );
        load.push((second, rate));
    }
    ensure!(!load.is_empty(), "need a line of SECOND REQUESTS_PER_SECOND");
    Ok(load)
}

/// A revision, with the reactions of Kubernetes and Knative to the writes for it.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// The object that asks for scaling.
    pub pa: PodAutoscaler,
    /// Service of the target, once made.
    pub sks: Option<ServerlessService>,
    /// Pods its Deployment is to have.
    pub replicas: u32,
    /// When each pod is ready.
    pods: Vec<Timestamp>,
}

impl Cluster {
    /// A new revision. Its Deployment has one pod.
    pub fn new(annotations: &[(&str, &str)], now: Timestamp) -> Self {
        let target = ObjectReference {
            api_version: Some("apps/v1".into()),
            kind: Some("Deployment".into()),
            name: Some("resnet-00001-deployment".into()),
            ..ObjectReference::default()
        };
        let spec = PodAutoscalerSpec {
            scale_target_ref: target,
            reachability: "Reachable".into(),
            protocol_type: "http1".into(),
            ..PodAutoscalerSpec::default()
        };
        let mut pa = PodAutoscaler::new("resnet-00001", spec);
        pa.metadata.namespace = Some("default".into());
        pa.metadata.uid = Some("1".into());
        pa.metadata.generation = Some(1);
        let key = |name: &str| format!("autoscaling.knative.dev/{name}");
        let annotations = annotations.iter().map(|(name, value)| (key(name), (*value).to_owned()));
        pa.metadata.annotations = Some(annotations.collect());
        let mut cluster = Self { pa, sks: None, replicas: 0, pods: Vec::new() };
        cluster.apply(Write::Scale(1), now);
        cluster
    }

    /// Carries a write out.
    pub fn apply(&mut self, write: Write, now: Timestamp) {
        match write {
            Write::Scale(replicas) => {
                self.replicas = replicas;
                self.pods.resize(replicas as usize, now + POD_START);
            }
            Write::CreateSks(mut sks) => {
                sks.metadata.generation = Some(1);
                self.sks = Some(*sks);
            }
            Write::PatchSks(spec) => {
                let Some(sks) = &mut self.sks else { return };
                sks.spec = spec;
                sks.metadata.generation = sks.metadata.generation.map(|generation| generation + 1);
            }
            Write::Status(status) => self.pa.status = Some(status),
        }
    }

    /// Applies the changes that Knative's controller of services has made by now.
    pub fn settle(&mut self, now: Timestamp) {
        let name = self.pa.metadata.name.clone().unwrap_or_default();
        let ready = self.ready(now);
        let Some(sks) = &mut self.sks else { return };
        let condition = |kind: &str, holds: bool, old: Option<&Condition>| {
            let status = if holds { "True" } else { "Unknown" };
            let same = old.filter(|old| old.status == status).cloned();
            same.unwrap_or_else(|| Condition {
                kind: kind.into(),
                status: status.into(),
                last_transition_time: Some(Time(now)),
                ..Condition::default()
            })
        };
        let old = sks.status.take().unwrap_or_default();
        let proxied = sks.spec.mode == Mode::Proxy || ready == 0;
        let activator = "ActivatorEndpointsPopulated";
        sks.status = Some(ServerlessServiceStatus {
            observed_generation: sks.metadata.generation,
            // The activator stands in while there are no pods.
            conditions: vec![
                condition(activator, proxied, old.condition(activator)),
                condition(READY, true, old.condition(READY)),
            ],
            private_service_name: format!("{name}-private"),
            service_name: name,
        });
    }

    /// Pods that take requests.
    pub fn ready(&self, now: Timestamp) -> u32 {
        u32::try_from(self.pods.iter().filter(|at| **at <= now).count()).unwrap_or(u32::MAX)
    }

    /// One pass, including its writes.
    pub fn pass(
        &mut self,
        settings: &Settings,
        defaults: &Defaults,
        desired: Option<u32>,
        now: Timestamp,
    ) -> Pass {
        // The activator answers as soon as it gets the requests.
        let backed = self.sks.as_ref().is_some_and(|sks| sks.spec.mode == Mode::Proxy);
        let observed = Observed {
            pa: &self.pa,
            sks: self.sks.as_ref(),
            replicas: Some(self.replicas),
            ready: self.ready(now),
            desired,
            backed,
        };
        let pass = reconcile(&observed, settings, defaults, now);
        for write in pass.writes.clone() {
            self.apply(write, now);
        }
        pass
    }

    /// Status of the condition `Active`.
    pub fn active(&self) -> &str {
        let active = self.pa.status.as_ref().and_then(|status| status.condition(ACTIVE));
        active.map_or("-", |active| &active.status)
    }
}

/// Plays the load and writes a line for each change.
///
/// # Errors
/// When a setting is out of its bounds, or no process reads the lines.
pub fn play(load: &[(u64, u32)], options: &Options, out: &mut impl std::io::Write) -> anyhow::Result<()> {
    let start = Timestamp::UNIX_EPOCH;
    let annotations = [("metric", "rps"), ("target", "27"), ("target-utilization-percentage", "100")];
    let mut cluster = Cluster::new(&annotations, start);
    let settings = Settings::of(&cluster.pa, &options.defaults)?;
    let mut decider = Decider::new(
        &settings,
        options.policy,
        options.defaults.progress_deadline,
        gshare_core::Timestamp::ZERO,
        1,
    )?;
    writeln!(out, "no cluster, virtual time: a pod serves 27 requests/s and is ready after 4 s")?;
    writeln!(
        out,
        "{:>6}  {:>6}  {:>7}  {:>5}  {:>7}  requests go to",
        "second", "load/s", "desired", "ready", "Active"
    )?;
    let mut shown = None;
    let mut rate = 0;
    for second in 0..=load.last().map_or(0, |(last, _)| *last) + TAIL {
        let now = start + Duration::from_secs(second);
        rate = load.iter().find(|(at, _)| *at == second).map_or(rate, |(_, rate)| *rate);
        let uptime = gshare_core::Timestamp::from_millis(second * 1_000);
        cluster.settle(now);
        decider.observe(uptime, cluster.ready(now), Some(RequestRate::per_second(rate.into())));
        cluster.pass(&settings, &options.defaults, decider.desired(), now);
        cluster.settle(now);
        let pods = cluster.ready(now) > 0;
        let to = match cluster.sks.as_ref().map(|sks| sks.spec.mode) {
            Some(Mode::Serve) if pods => "pods",
            _ => "activator",
        };
        let line = (rate, cluster.replicas, cluster.ready(now), cluster.active().to_owned(), to);
        if shown.as_ref() != Some(&line) {
            let (rate, replicas, ready, active, to) = &line;
            writeln!(out, "{second:>6}  {rate:>6}  {replicas:>7}  {ready:>5}  {active:>7}  {to}")?;
            shown = Some(line);
        }
    }
    Ok(())
}
