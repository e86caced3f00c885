//! Counters, gauges and histograms, in Prometheus' text form.
//!
//! Counters of events have no labels. Each scrape takes the series of clients from a [`Snapshot`](crate::Snapshot), sums them
//! over the processes of an instance, and labels them by the instance's name, class and user, by its pod and container, and by
//! the GPU's UUID. A metric has at most as many series as there may be clients (`max_clients`). An instance without processes is
//! in one more scrape, with the last use of its processes, and leaves no series behind.
//!
//! `gshare_token_wait_seconds` is the time from the arrival of a request at the token engine to the grant.
//! `gshare_token_overuse_seconds` is the GPU time used under a returned token beyond its budget.

use crate::snapshot::Snapshot;
use crate::usage::ProcessUse;
use gshare_core::reason::Reason;
use gshare_core::{Bytes, ClientId, Duration, Timestamp, TokenAction, TokenEvent, UseState};
use gshare_sched::node::{NodeAction, Note, Usage};
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

/// The reasons for which a daemon ends a connection.
fn reasons_to_drop() -> impl Iterator<Item = Reason> {
    Reason::ALL.iter().copied().filter(|reason| matches!(reason, Reason::RefusalCode(_) | Reason::Fault(_)))
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    gpu: u32,
    uuid: String,
}

/// Label of a device in `gshare_device_lost`. The daemon need not manage the device.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UuidLabel {
    uuid: String,
}

/// Labels of an instance on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct InstanceLabels {
    name: String,
    class: &'static str,
    uuid: String,
    uid: u32,
    /// UID of the Kubernetes pod; empty without one.
    pod: String,
    /// The first 12 digits of the container's id; empty without one.
    container: String,
}

/// The use of a client at the last scrape, and whether it had ended.
type Seen = (Usage, bool);

/// State of a token engine's client for the histograms.
#[derive(Debug, Default)]
struct OpenClient {
    /// Time of a request before its grant.
    asked: Option<Timestamp>,
    /// The total use allowed by the client's token.
    allowed: Option<Duration>,
}

type Seconds = Counter<f64, AtomicU64>;
type Ratio = Gauge<f64, AtomicU64>;

#[derive(Debug, Default)]
struct PerClient {
    seen: BTreeMap<ClientId, Seen>,
    sums: BTreeMap<InstanceLabels, Usage>,
    gpu_seconds: Family<InstanceLabels, Seconds>,
    occupied_seconds: Family<InstanceLabels, Seconds>,
    byte_seconds: Family<InstanceLabels, Counter>,
    waited_seconds: Family<InstanceLabels, Seconds>,
    launches: Family<InstanceLabels, Counter>,
    request: Family<InstanceLabels, Ratio>,
    limit: Family<InstanceLabels, Ratio>,
    sm: Family<InstanceLabels, Ratio>,
    memory: Family<InstanceLabels, Gauge>,
    device_memory: Family<DeviceLabels, Gauge>,
    device_held: Family<DeviceLabels, Gauge>,
    device_lost: Family<UuidLabel, Gauge>,
    connections: Gauge,
    processes: Gauge,
    clients: Gauge,
}

/// The registry of one daemon.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    events: Counter,
    grants: Counter,
    recalls: Counter,
    revokes: Counter,
    throttles: Counter,
    memory_denied: Counter,
    pub(crate) connects: Counter,
    pub(crate) reloads: Family<ReasonLabelSet, Counter>,
    journal_lost: Gauge,
    journal_failed: Gauge,
    refused_events: Family<ReasonLabel, Counter>,
    drops: Family<ReasonLabel, Counter>,
    wait: Histogram,
    overuse: Histogram,
    open: Mutex<BTreeMap<ClientId, OpenClient>>,
    // The lock allows one scrape at a time, since a scrape clears and fills the families of clients.
    per_client: Mutex<PerClient>,
}

/// Label of `gshare_reloads_total`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ReasonLabelSet {
    pub(crate) result: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("gshare");
        let mut counter = |name: &str, help: &str| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let events = counter("events", "Events handled by the token engine");
        let grants = counter("grants", "Tokens granted or extended");
        let recalls = counter("recalls", "Tokens asked back early for a client within its share");
        let revokes = counter("revokes", "Tokens revoked");
        let throttles = counter("throttles", "Requests that must wait because a limit was reached");
        let memory_denied = counter("memory_denied", "Reservations of memory that did not fit");
        let connects = counter("connects", "Connections accepted");
        // The buckets' bounds are 0.1 ms to 26 s, and 10 us to 2.6 s.
        let wait = Histogram::new(exponential_buckets(1e-4, 4.0, 10));
        let overuse = Histogram::new(exponential_buckets(1e-5, 4.0, 10));
        registry.register_with_unit(
            "token_wait",
            "Time from a request for a token to its grant",
            Unit::Seconds,
            wait.clone(),
        );
        registry.register_with_unit(
            "token_overuse",
            "GPU time that a returned token used beyond its budget",
            Unit::Seconds,
            overuse.clone(),
        );
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the daemon", build);
        let per_client = PerClient::default();
        let (reloads, refused_events, drops) = (Family::default(), Family::default(), Family::default());
        let (journal_lost, journal_failed) = (Gauge::default(), Gauge::default());
        registry.register("reloads", "Reloads of the configuration", reloads.clone());
        registry.register("refused_events", "Events that the token engine refused", refused_events.clone());
        registry.register("dropped_connections", "Connections ended by the daemon", drops.clone());
        registry.register("journal_lost_events", "Events missing in the journal", journal_lost.clone());
        registry.register(
            "journal_failed",
            "1 while a journal is configured and cannot be written",
            journal_failed.clone(),
        );
        let c = &per_client;
        let second = || Unit::Seconds;
        // Prometheus names the unit in the singular, but the crate's own unit is a plural.
        let ratio = || Unit::Other("ratio".to_owned());
        registry.register_with_unit("client_gpu", "GPU time used", second(), c.gpu_seconds.clone());
        registry.register_with_unit(
            "client_occupied",
            "Own part of the GPU's time, by the share of the SMs",
            second(),
            c.occupied_seconds.clone(),
        );
        registry.register("client_memory_byte_seconds", "Memory held times its time", c.byte_seconds.clone());
        registry.register_with_unit(
            "client_waited",
            "Time waited for tokens",
            second(),
            c.waited_seconds.clone(),
        );
        registry.register("client_launches", "Kernels launched", c.launches.clone());
        registry.register_with_unit("client_request", "Guaranteed share of time", ratio(), c.request.clone());
        registry.register_with_unit("client_limit", "Most share of time", ratio(), c.limit.clone());
        registry.register_with_unit("client_sm", "Share of the SMs", ratio(), c.sm.clone());
        registry.register_with_unit("client_memory", "Memory held", Unit::Bytes, c.memory.clone());
        registry.register_with_unit("device_memory", "Memory", Unit::Bytes, c.device_memory.clone());
        registry.register_with_unit(
            "device_held",
            "Memory that clients hold",
            Unit::Bytes,
            c.device_held.clone(),
        );
        registry.register("device_lost", "1 while the driver has lost the device", c.device_lost.clone());
        registry.register("connections", "Connections", c.connections.clone());
        registry.register("processes", "Processes let in", c.processes.clone());
        registry.register("clients", "Clients: pairs of process and GPU", c.clients.clone());
        for reason in reasons_to_drop() {
            drop(drops.get_or_create(&ReasonLabel { reason: reason.label() }));
        }
        Self {
            registry,
            events,
            grants,
            recalls,
            revokes,
            throttles,
            memory_denied,
            connects,
            reloads,
            journal_lost,
            journal_failed,
            refused_events,
            drops,
            wait,
            overuse,
            open: Mutex::default(),
            per_client: Mutex::new(per_client),
        }
    }
}

impl Metrics {
    pub(crate) fn dropped(&self, reason: impl Into<Reason>) {
        self.drops.get_or_create(&ReasonLabel { reason: reason.into().label() }).inc();
    }

    fn refused_event(&self, reason: &'static str) {
        self.refused_events.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Connections dropped since the start, by reason. Reasons without a drop are included.
    pub fn drops(&self) -> BTreeMap<String, u64> {
        let count = |reason: Reason| self.drops.get_or_create(&ReasonLabel { reason: reason.label() }).get();
        reasons_to_drop().map(|reason| (reason.label().to_owned(), count(reason))).collect()
    }

    /// All metrics in Prometheus' text form, with the clients and devices of the snapshot.
    pub fn encode(&self, snapshot: &Snapshot) -> String {
        self.per_client.lock().fill(snapshot);
        self.journal_lost.set(i64::try_from(snapshot.journal_lost).unwrap_or(i64::MAX));
        self.journal_failed.set(i64::from(snapshot.journal_failure.is_some()));
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl Metrics {
    /// Counts the node's actions on an event.
    pub(crate) fn observe(&self, now: Timestamp, actions: &[NodeAction]) {
        let mut open = self.open.lock();
        for action in actions {
            let NodeAction::Note(note) = action else { continue };
            match note {
                Note::TokenEvent { token } => {
                    self.events.inc();
                    self.taken(now, token, &mut open);
                }
                Note::TokenRefused { fault, .. } => {
                    self.events.inc();
                    self.refused_event(fault.label());
                }
                Note::TokenOrder { order } => self.ordered(now, order, &mut open),
                Note::DebtWait { .. } => drop(self.throttles.inc()),
                Note::MemoryDenied { .. } => drop(self.memory_denied.inc()),
                _ => {}
            }
        }
    }

    fn taken(&self, now: Timestamp, event: &TokenEvent, open: &mut BTreeMap<ClientId, OpenClient>) {
        match *event {
            TokenEvent::Used { client, used, state } => {
                let entry = open.entry(client).or_default();
                if matches!(state, UseState::Idle | UseState::Wants)
                    && let Some(allowed) = entry.allowed.take()
                {
                    self.overuse.observe(seconds(used.saturating_sub(allowed)));
                }
                if matches!(state, UseState::Wants | UseState::Extends) {
                    entry.asked.get_or_insert(now);
                }
            }
            TokenEvent::ClientLeft { client } => drop(open.remove(&client)),
            _ => {}
        }
    }

    fn ordered(&self, now: Timestamp, order: &TokenAction, open: &mut BTreeMap<ClientId, OpenClient>) {
        match *order {
            TokenAction::Allow { client, allowed, .. } => {
                self.grants.inc();
                if let Some(entry) = open.get_mut(&client) {
                    entry.allowed = Some(allowed);
                    if let Some(asked) = entry.asked.take() {
                        self.wait.observe(seconds(now.saturating_since(asked)));
                    }
                }
            }
            TokenAction::Recall { .. } => drop(self.recalls.inc()),
            TokenAction::Stop { client } => {
                self.revokes.inc();
                if let Some(entry) = open.get_mut(&client) {
                    entry.allowed = None;
                }
            }
            TokenAction::Throttle { .. } => drop(self.throttles.inc()),
        }
    }
}

impl PerClient {
    fn fill(&mut self, snapshot: &Snapshot) {
        self.count(snapshot);
        let bytes = |bytes: Bytes| i64::try_from(bytes.0).unwrap_or(i64::MAX);
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.connections.set(count(snapshot.connections));
        self.processes.set(count(snapshot.processes));
        self.clients.set(count(snapshot.clients.len()));
        self.device_memory.clear();
        self.device_held.clear();
        for device in &snapshot.devices {
            let labels = DeviceLabels { gpu: device.gpu.number(), uuid: device.uuid.clone() };
            self.device_memory.get_or_create(&labels).set(bytes(device.memory_bytes));
            self.device_held.get_or_create(&labels).set(bytes(device.held_bytes));
        }
        self.device_lost.clear();
        if let Some(lost) = &snapshot.lost {
            for device in &snapshot.devices {
                self.device_lost.get_or_create(&UuidLabel { uuid: device.uuid.clone() }).set(0);
            }
            for device in lost {
                self.device_lost.get_or_create(&UuidLabel { uuid: device.uuid.clone() }).set(1);
            }
        }
        self.gpu_seconds.clear();
        self.occupied_seconds.clear();
        self.byte_seconds.clear();
        self.waited_seconds.clear();
        self.launches.clear();
        for (labels, sums) in &self.sums {
            self.gpu_seconds.get_or_create(labels).inc_by(seconds(sums.busy));
            self.occupied_seconds.get_or_create(labels).inc_by(seconds(sums.occupied));
            self.byte_seconds.get_or_create(labels).inc_by(sums.byte_seconds);
            self.waited_seconds.get_or_create(labels).inc_by(seconds(sums.waited));
            self.launches.get_or_create(labels).inc_by(sums.launches);
        }
        self.request.clear();
        self.limit.clear();
        self.sm.clear();
        self.memory.clear();
        let labels: BTreeMap<ClientId, InstanceLabels> =
            snapshot.usage.iter().map(|process| (process.client, InstanceLabels::of(process))).collect();
        for client in &snapshot.clients {
            let Some(labels) = labels.get(&client.client) else { continue };
            self.request.get_or_create(labels).set(client.quota_request);
            self.limit.get_or_create(labels).set(client.quota_limit);
            self.sm.get_or_create(labels).set(client.sm);
            self.memory.get_or_create(labels).inc_by(bytes(client.memory_bytes));
        }
    }

    /// Adds the processes' use since the last scrape to their instances' sums. A process that ended is counted once more, and must not
    /// make a sum smaller, for Prometheus would take the drop for a restart. Labels without other processes are removed afterwards.
    fn count(&mut self, snapshot: &Snapshot) {
        let before = std::mem::take(&mut self.seen);
        let mut sums = std::mem::take(&mut self.sums);
        for process in &snapshot.usage {
            let (last, had_ended) = before.get(&process.client).copied().unwrap_or_default();
            self.seen.insert(process.client, (process.usage, process.ended));
            if had_ended {
                continue;
            }
            let labels = InstanceLabels::of(process);
            let mut sum = self.sums.get(&labels).or(sums.get(&labels)).copied().unwrap_or_default();
            sum.add(&process.usage.since(&last));
            sums.remove(&labels);
            self.sums.insert(labels, sum);
        }
    }
}

impl InstanceLabels {
    fn of(process: &ProcessUse) -> Self {
        let container = process.owner.container.as_deref().unwrap_or_default();
        Self {
            name: process.name.clone(),
            class: match process.class {
                None => "none",
                Some(class) if class.is_slo_sensitive() => "slo_sensitive",
                Some(_) => "best_effort",
            },
            uuid: process.uuid.clone(),
            uid: process.uid,
            pod: process.owner.pod.clone().unwrap_or_default(),
            container: container.get(..12).unwrap_or(container).to_owned(),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn seconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e9
}

#[cfg(test)]
mod tests;
