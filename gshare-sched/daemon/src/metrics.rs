//! Counters, gauges and histograms, in Prometheus' text form.
//!
//! Counters of events have no labels. Each scrape takes the series of clients from a [`Snapshot`], sums them
//! over the processes of an instance, and labels them by the instance's name, class and user, by its pod and container, and by
//! the GPU's UUID. A metric has at most as many series as there may be clients (`max_clients`). An instance without processes is
//! in one more scrape, with the last use of its processes, and leaves no series behind.
//!
//! `gshare_token_wait_seconds` is the time from the arrival of a request at the token engine to the grant.
//! `gshare_token_overuse_seconds` is the GPU time used under a returned token beyond its budget.

use crate::snapshot::{ClientSnapshot, DeviceSnapshot, Snapshot};
use crate::usage::ProcessUse;
use gshare_core::reason::Reason;
use gshare_core::{Bytes, ClientId, Duration, Timestamp, TokenAction, TokenEvent, UseState};
use gshare_sched::node::{NodeAction, Note, Usage};
use parking_lot::Mutex;
use prometheus_client::encoding::text::{encode, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::atomic::AtomicU64;

/// The reasons for which a daemon ends a connection.
fn reasons_to_drop() -> impl Iterator<Item = Reason> {
    Reason::ALL.iter().copied().filter(|reason| matches!(reason, Reason::RefusalCode(_) | Reason::Fault(_)))
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
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

/// Name and description of a metric, and its value for a `T`.
pub type About<T, V> = (&'static str, &'static str, fn(&T) -> V);

/// Registers a metric for one scrape, with a series of each label set; `set` writes the series' value. A metric without series is left out.
pub fn family<L, M, T>(
    registry: &mut Registry,
    (name, help, unit): (&str, &str, Option<Unit>),
    series: impl IntoIterator<Item = (L, T)>,
    set: impl Fn(&M, T),
) where
    L: EncodeLabelSet + Clone + Eq + Hash + Debug + Send + Sync + 'static,
    M: EncodeMetric + TypedMetric + Default + Debug + Send + Sync + 'static,
{
    let family = Family::<L, M>::default();
    for (labels, value) in series {
        set(&family.get_or_create(&labels), value);
    }
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, family),
        None => registry.register(name, help, family),
    }
}

/// A gauge's integer.
pub fn integer(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

/// The use of clients and of instances up to the last scrape.
#[derive(Debug, Default)]
struct PerClient {
    seen: BTreeMap<ClientId, Seen>,
    sums: BTreeMap<InstanceLabels, Usage>,
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
    parks: Counter,
    pub(crate) connects: Counter,
    pub(crate) reloads: Family<ReasonLabelSet, Counter>,
    refused_events: Family<ReasonLabel, Counter>,
    drops: Family<ReasonLabel, Counter>,
    wait: Histogram,
    overuse: Histogram,
    open: Mutex<BTreeMap<ClientId, OpenClient>>,
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
        let parks = counter("parks", "Orders to move a client's memory to host memory");
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
        let (reloads, refused_events, drops) = (Family::default(), Family::default(), Family::default());
        registry.register("reloads", "Reloads of the configuration", reloads.clone());
        registry.register("refused_events", "Events that the token engine refused", refused_events.clone());
        registry.register("dropped_connections", "Connections ended by the daemon", drops.clone());
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
            parks,
            connects,
            reloads,
            refused_events,
            drops,
            wait,
            overuse,
            open: Mutex::default(),
            per_client: Mutex::default(),
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
        let mut scrape = Registry::with_prefix("gshare");
        self.per_client.lock().register(snapshot, &mut scrape);
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode_registry(&mut text, &self.registry);
        let _ = encode(&mut text, &scrape);
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
                Note::ParkOrdered { on: true, .. } => drop(self.parks.inc()),
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
    /// Registers the metrics that a snapshot states.
    fn register(&mut self, snapshot: &Snapshot, to: &mut Registry) {
        self.count(snapshot);
        for (name, help, value) in [
            ("journal_lost_events", "Events missing in the journal", integer(snapshot.journal_lost)),
            (
                "journal_failed",
                "1 while a journal is configured and cannot be written",
                snapshot.journal_failure.is_some().into(),
            ),
            ("connections", "Connections", integer(snapshot.connections)),
            ("processes", "Processes let in", integer(snapshot.processes)),
            ("clients", "Clients: pairs of process and GPU", integer(snapshot.clients.len())),
        ] {
            let gauge: Gauge = Gauge::default();
            gauge.set(value);
            to.register(name, help, gauge);
        }
        let times: [About<Usage, Duration>; 3] = [
            ("client_gpu", "GPU time used", |sum| sum.busy),
            ("client_occupied", "Own part of the GPU's time, by the share of the SMs", |sum| sum.occupied),
            ("client_waited", "Time waited for tokens", |sum| sum.waited),
        ];
        let sums = || self.sums.iter().map(|(labels, sum)| (labels.clone(), sum));
        for (name, help, time) in times {
            family(
                to,
                (name, help, Some(Unit::Seconds)),
                sums(),
                |counter: &Counter<f64, AtomicU64>, sum| {
                    counter.inc_by(seconds(time(sum)));
                },
            );
        }
        let counts: [About<Usage, u64>; 2] = [
            ("client_memory_byte_seconds", "Memory held times its time", |sum| sum.byte_seconds),
            ("client_launches", "Kernels launched", |sum| sum.launches),
        ];
        for (name, help, count) in counts {
            family(to, (name, help, None), sums(), |counter: &Counter, sum| _ = counter.inc_by(count(sum)));
        }
        let labels: BTreeMap<ClientId, InstanceLabels> =
            snapshot.usage.iter().map(|process| (process.client, InstanceLabels::of(process))).collect();
        let clients = || {
            snapshot.clients.iter().filter_map(|client| Some((labels.get(&client.client)?.clone(), client)))
        };
        let ratios: [About<ClientSnapshot, f64>; 3] = [
            ("client_request", "Guaranteed share of time", |client| client.quota_request),
            ("client_limit", "Most share of time", |client| client.quota_limit),
            ("client_sm", "Share of the SMs", |client| client.sm),
        ];
        for (name, help, ratio) in ratios {
            // Prometheus names the unit in the singular, but the crate's own unit is a plural.
            let unit = Some(Unit::Other("ratio".to_owned()));
            family(to, (name, help, unit), clients(), |gauge: &Gauge<f64, AtomicU64>, client| {
                gauge.set(ratio(client));
            });
        }
        family(
            to,
            ("client_memory", "Memory held", Some(Unit::Bytes)),
            clients(),
            |gauge: &Gauge, client| {
                gauge.inc_by(integer(client.memory_bytes.0));
            },
        );
        let devices = || {
            let labels = |device: &DeviceSnapshot| {
                [("gpu", device.gpu.number().to_string()), ("uuid", device.uuid.clone())]
            };
            snapshot.devices.iter().map(move |device| (labels(device), device))
        };
        let memory: [About<DeviceSnapshot, Bytes>; 2] = [
            ("device_memory", "Memory", |device| device.memory_bytes),
            ("device_held", "Memory that clients hold", |device| device.held_bytes),
        ];
        for (name, help, bytes) in memory {
            family(to, (name, help, Some(Unit::Bytes)), devices(), |gauge: &Gauge, device| {
                gauge.set(integer(bytes(device).0));
            });
        }
        // The daemon need not manage a lost device.
        let all = snapshot.lost.iter().flat_map(|lost| {
            let known = snapshot.devices.iter().map(|device| (&device.uuid, 0));
            known.chain(lost.iter().map(|device| (&device.uuid, 1)))
        });
        let all = all.map(|(uuid, lost)| ([("uuid", uuid.clone())], lost));
        let about = ("device_lost", "1 while the driver has lost the device", None);
        family(to, about, all, |gauge: &Gauge, lost| _ = gauge.set(lost));
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
