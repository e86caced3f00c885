//! Counters and gauges, in Prometheus' text form.
//!
//! What happens per event is a counter without labels: one atomic addition. What belongs to a client is taken from a
//! [`Snapshot`](crate::Snapshot) when it is asked for, so that a client that is gone leaves no label behind.

use crate::snapshot::Snapshot;
use gshare_core::wire::{RefusalCode, WireError};
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;

/// Why the daemon ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DropReason {
    /// Fewer bytes than the header says.
    Truncated,
    /// More bytes than the header says, or than any frame has.
    Oversized,
    /// Another version of the wire format.
    Version,
    /// A kind of message that does not exist.
    Kind,
    /// A frame replayed or left out.
    Sequence,
    /// A field with an impossible value.
    Field,
    /// A user, or a name, that is not let in.
    NotAllowed,
    /// A name that another run uses.
    DuplicateName,
    /// It does not read what it is sent, or did not say Hello in time.
    Slow,
    /// More clients or connections than configured.
    Full,
    /// A message that does not fit the state of the connection.
    Protocol,
    /// A spec that cannot be met.
    BadSpec,
    /// A device that is not managed here.
    UnknownDevice,
}

impl DropReason {
    const ALL: [Self; 13] = [
        Self::Truncated,
        Self::Oversized,
        Self::Version,
        Self::Kind,
        Self::Sequence,
        Self::Field,
        Self::NotAllowed,
        Self::DuplicateName,
        Self::Slow,
        Self::Full,
        Self::Protocol,
        Self::BadSpec,
        Self::UnknownDevice,
    ];

    /// The label in `gshare_dropped_connections_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::Oversized => "oversized",
            Self::Version => "version",
            Self::Kind => "kind",
            Self::Sequence => "sequence",
            Self::Field => "field",
            Self::NotAllowed => "not_allowed",
            Self::DuplicateName => "duplicate_name",
            Self::Slow => "slow",
            Self::Full => "full",
            Self::Protocol => "protocol",
            Self::BadSpec => "bad_spec",
            Self::UnknownDevice => "unknown_device",
        }
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl From<WireError> for DropReason {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Truncated { .. } => Self::Truncated,
            WireError::Oversized { .. } => Self::Oversized,
            WireError::Version { .. } => Self::Version,
            WireError::Kind { .. } => Self::Kind,
            WireError::Sequence { .. } => Self::Sequence,
            WireError::Field { .. } => Self::Field,
            _ => Self::Protocol,
        }
    }
}

impl From<RefusalCode> for DropReason {
    fn from(code: RefusalCode) -> Self {
        match code {
            RefusalCode::DuplicateName => Self::DuplicateName,
            RefusalCode::NotAllowed => Self::NotAllowed,
            RefusalCode::Full => Self::Full,
            RefusalCode::BadSpec => Self::BadSpec,
            RefusalCode::UnknownDevice => Self::UnknownDevice,
            _ => Self::Protocol,
        }
    }
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

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClientLabels {
    name: String,
    gpu: u32,
    pid: i32,
}

type Seconds = Counter<f64, AtomicU64>;
type Ratio = Gauge<f64, AtomicU64>;

#[derive(Debug, Default)]
struct PerClient {
    gpu_seconds: Family<ClientLabels, Seconds>,
    waited_seconds: Family<ClientLabels, Seconds>,
    launches: Family<ClientLabels, Counter>,
    request: Family<ClientLabels, Ratio>,
    limit: Family<ClientLabels, Ratio>,
    sm: Family<ClientLabels, Ratio>,
    memory: Family<ClientLabels, Gauge>,
    device_memory: Family<DeviceLabels, Gauge>,
    device_held: Family<DeviceLabels, Gauge>,
    connections: Gauge,
    processes: Gauge,
    clients: Gauge,
}

/// The registry of one daemon.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub(crate) events: Counter,
    pub(crate) grants: Counter,
    pub(crate) revokes: Counter,
    pub(crate) throttles: Counter,
    pub(crate) memory_denied: Counter,
    pub(crate) connects: Counter,
    pub(crate) reloads: Family<ReasonLabelSet, Counter>,
    journal_lost: Gauge,
    journal_failed: Gauge,
    refused_events: Family<ReasonLabel, Counter>,
    drops: Family<ReasonLabel, Counter>,
    // One scrape at a time: it clears and fills the families of clients.
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
        let revokes = counter("revokes", "Tokens revoked");
        let throttles = counter("throttles", "Requests that must wait because a limit was reached");
        let memory_denied = counter("memory_denied", "Reservations of memory that did not fit");
        let connects = counter("connects", "Connections accepted");
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
        // As Prometheus names them; the crate's own would be plural.
        let ratio = || Unit::Other("ratio".to_owned());
        registry.register_with_unit("client_gpu", "GPU time used", second(), c.gpu_seconds.clone());
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
        registry.register("connections", "Connections", c.connections.clone());
        registry.register("processes", "Processes let in", c.processes.clone());
        registry.register("clients", "Clients: pairs of process and GPU", c.clients.clone());
        for reason in DropReason::ALL {
            drop(drops.get_or_create(&ReasonLabel { reason: reason.label() }));
        }
        Self {
            registry,
            events,
            grants,
            revokes,
            throttles,
            memory_denied,
            connects,
            reloads,
            journal_lost,
            journal_failed,
            refused_events,
            drops,
            per_client: Mutex::new(per_client),
        }
    }
}

impl Metrics {
    pub(crate) fn dropped(&self, reason: DropReason) {
        self.drops.get_or_create(&ReasonLabel { reason: reason.label() }).inc();
    }

    pub(crate) fn refused_event(&self, reason: &'static str) {
        self.refused_events.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Connections dropped since the start, by reason; those that never happened included.
    pub fn drops(&self) -> BTreeMap<String, u64> {
        let count =
            |reason: DropReason| self.drops.get_or_create(&ReasonLabel { reason: reason.label() }).get();
        DropReason::ALL.iter().map(|reason| (reason.label().to_owned(), count(*reason))).collect()
    }

    /// Everything in Prometheus' text form, with the clients and devices of the snapshot.
    pub fn encode(&self, snapshot: &Snapshot) -> String {
        let families = self.per_client.lock();
        families.fill(snapshot);
        self.journal_lost.set(i64::try_from(snapshot.journal_lost).unwrap_or(i64::MAX));
        self.journal_failed.set(i64::from(snapshot.journal_failure.is_some()));
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl PerClient {
    fn fill(&self, snapshot: &Snapshot) {
        let bytes = |bytes: gshare_core::Bytes| i64::try_from(bytes.0).unwrap_or(i64::MAX);
        #[expect(clippy::cast_precision_loss, reason = "a report")]
        let seconds = |time: gshare_core::Duration| time.as_nanos() as f64 / 1e9;
        self.gpu_seconds.clear();
        self.waited_seconds.clear();
        self.launches.clear();
        self.request.clear();
        self.limit.clear();
        self.sm.clear();
        self.memory.clear();
        self.device_memory.clear();
        self.device_held.clear();
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.connections.set(count(snapshot.connections));
        self.processes.set(count(snapshot.processes));
        self.clients.set(count(snapshot.clients.len()));
        for device in &snapshot.devices {
            let labels = DeviceLabels { gpu: device.gpu.0, uuid: device.uuid.clone() };
            self.device_memory.get_or_create(&labels).set(bytes(device.memory_bytes));
            self.device_held.get_or_create(&labels).set(bytes(device.held_bytes));
        }
        for client in &snapshot.clients {
            let labels = ClientLabels { name: client.name.clone(), gpu: client.gpu.0, pid: client.pid };
            self.gpu_seconds.get_or_create(&labels).inc_by(seconds(client.total_used_ns));
            self.waited_seconds.get_or_create(&labels).inc_by(seconds(client.waited_ns));
            self.launches.get_or_create(&labels).inc_by(client.launches);
            self.request.get_or_create(&labels).set(client.quota_request);
            self.limit.get_or_create(&labels).set(client.quota_limit);
            self.sm.get_or_create(&labels).set(client.sm);
            self.memory.get_or_create(&labels).set(bytes(client.memory_bytes));
        }
    }
}
