//! The snapshot shown by `gshare status`, `gshare top`, the page and the metrics.

use crate::enforce::HeldBy;
use crate::neighbours::Neighbour;
use crate::nvml::{LostDevice, Sensors};
use crate::usage::ProcessUse;
use crate::why::{Decision, Finding};
use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Bytes, ClientId, Duration, GpuId, ServiceClass, Timestamp};
use gshare_sched::node::{ClientView, DeviceView, FactSource, Parking};
use gshare_sched::scale::ScaleState;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The state of the daemon at one instant. Shares are fractions of 1.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Time of the snapshot by `CLOCK_MONOTONIC`, in ns.
    pub now_ns: Timestamp,
    /// Number of the daemon's run.
    pub epoch: u64,
    /// The daemon's process id.
    pub pid: u32,
    /// The daemon's version.
    pub version: String,
    /// The socket of the hooks.
    pub socket: PathBuf,
    /// Length of the window over which shares of time are settled, in ns; zero where an older daemon does not say.
    #[serde(default)]
    pub window_ns: Duration,
    /// Open connections, including connections before their Hello.
    pub connections: usize,
    /// Admitted processes.
    pub processes: usize,
    /// Connections dropped since the start, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Events missing in the journal because of failed writes.
    pub journal_lost: u64,
    /// Folder of the journal, if a journal is configured.
    #[serde(default)]
    pub journal: Option<PathBuf>,
    /// The error that keeps the configured journal from being written at present.
    #[serde(default)]
    pub journal_failure: Option<String>,
    /// The devices of the node.
    pub devices: Vec<DeviceSnapshot>,
    /// The clients, by slot.
    pub clients: Vec<ClientSnapshot>,
    /// The use of the devices by each present process, then by the last processes that ended, the newest first.
    #[serde(default)]
    pub usage: Vec<ProcessUse>,
    /// The last decisions against clients, the newest first: limits, debts, denials and refusals.
    #[serde(default)]
    pub decisions: Vec<Decision>,
    /// Devices of the node lost by their driver; `None` where the daemon has no answer of the driver.
    #[serde(default)]
    pub lost: Option<Vec<LostDevice>>,
    /// Names and sensors of the GPUs that the driver lists; empty where the daemon has no answer of the driver.
    #[serde(default)]
    pub sensors: Vec<Sensors>,
    /// Other daemons on these GPUs.
    #[serde(default)]
    pub neighbours: Vec<Neighbour>,
}

/// A device of the node in a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceSnapshot {
    /// The daemon's number for the device.
    pub gpu: GpuId,
    /// UUID of the device.
    pub uuid: String,
    /// Whether the device is simulated.
    #[serde(default)]
    pub simulated: bool,
    /// Memory of the device; 0 while unknown.
    pub memory_bytes: Bytes,
    /// The source of `memory_bytes`: the configuration, the driver, or the first client.
    #[serde(default)]
    pub memory_source: FactSource,
    /// Memory granted to clients, used or not.
    pub held_bytes: Bytes,
    /// Number of clients on the device.
    pub clients: u32,
}

/// A client: one process on one GPU.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClientSnapshot {
    /// Id of the client.
    pub client: ClientId,
    /// Name of the client's instance.
    pub name: String,
    /// Process id of the client.
    pub pid: i32,
    /// User id of the process.
    pub uid: u32,
    /// Program of the process.
    pub program: String,
    /// Number of the client's GPU.
    pub gpu: GpuId,
    /// Guaranteed share of time of the instance. The processes of an instance take turns.
    pub quota_request: f64,
    /// Largest share of time of the instance.
    pub quota_limit: f64,
    /// The instance's share of the SMs.
    pub sm: f64,
    /// The client's used share of time in the last one to two seconds.
    pub measured: f64,
    /// GPU time of the client since its attachment, in ns.
    pub total_used_ns: Duration,
    /// GPU time of the instance in this window, in ns.
    pub window_used_ns: Duration,
    /// Whether the client holds a token.
    pub holds_token: bool,
    /// Time since the client began to wait for a token, in ns.
    pub waiting_ns: Option<Duration>,
    /// The reason for the client's present wait.
    #[serde(default)]
    pub why: Option<Finding>,
    /// Total time of the waits of the client's threads, in ns.
    pub waited_ns: Duration,
    /// Total time for which other clients kept the instance waiting that could have run by its own share, in ns.
    #[serde(default)]
    pub delayed_ns: Duration,
    /// Number of launched kernels.
    pub launches: u64,
    /// Whether the client is only observed: no limit holds, and no launch waits.
    #[serde(default)]
    pub observed: bool,
    /// The memory that can go to host memory, for a process started so.
    #[serde(default)]
    pub parking: Option<Parking>,
    /// Memory in use by the client; without a report by the client, the granted memory.
    pub memory_bytes: Bytes,
    /// Memory limit of the instance on this GPU.
    pub memory_limit_bytes: Option<Bytes>,
    /// The client's behaviour after the end of the daemon.
    pub on_daemon_loss: OnDaemonLoss,
    /// The client's service class, if the client has one and takes part in scaling.
    #[serde(default)]
    pub class: Option<ServiceClass>,
    /// State of the co-scaler for an SLO-sensitive client, else for the client's GPU.
    #[serde(default)]
    pub scale_state: Option<ScaleState>,
    /// Share of time which the co-scaler guarantees to the instance now.
    #[serde(default)]
    pub scaled_request: Option<f64>,
    /// Largest share of time the co-scaler leaves the instance now.
    #[serde(default)]
    pub scaled_limit: Option<f64>,
    /// The enforcer of each limit of the client, if a program on the node has looked, as `gshare status` does.
    #[serde(default)]
    pub held_by: Option<HeldBy>,
}

impl Snapshot {
    /// The driver's name of the GPU of a device, if the driver lists it.
    pub fn model_of(&self, device: &DeviceSnapshot) -> Option<&str> {
        let of = self.sensors.iter().find(|of| of.uuids.contains(&device.uuid))?;
        Some(&of.name)
    }
}

impl From<DeviceView> for DeviceSnapshot {
    fn from(device: DeviceView) -> Self {
        Self {
            gpu: device.gpu,
            uuid: device.uuid.to_string(),
            simulated: device.uuid.is_simulated(),
            memory_bytes: device.memory,
            memory_source: device.source,
            held_bytes: device.held,
            clients: device.clients,
        }
    }
}

impl ClientSnapshot {
    pub(crate) fn of(now: Timestamp, client: ClientView) -> Self {
        let (used, elapsed) = client.measured;
        #[expect(clippy::cast_precision_loss, reason = "a report")]
        let share = used.as_nanos() as f64 / elapsed.as_nanos() as f64;
        Self {
            client: client.client,
            name: client.name,
            pid: client.pid,
            uid: client.uid,
            program: client.program,
            gpu: client.gpu,
            quota_request: client.share.quota.request().as_fraction(),
            quota_limit: client.share.quota.limit().as_fraction(),
            sm: client.share.sm.as_fraction(),
            measured: if elapsed.is_zero() { 0.0 } else { share },
            total_used_ns: client.total_used,
            window_used_ns: client.window_used,
            holds_token: client.holds_token,
            waiting_ns: client.waiting_since.map(|since| now.saturating_since(since)),
            why: None,
            waited_ns: client.usage.waited,
            delayed_ns: client.delayed,
            launches: client.usage.launches,
            observed: client.observed,
            parking: client.parking,
            memory_bytes: client.memory,
            memory_limit_bytes: client.memory_limit,
            on_daemon_loss: client.on_daemon_loss,
            class: client.class,
            scale_state: client.scale_state,
            scaled_request: client.scaled_request.map(gshare_core::Quota::as_fraction),
            scaled_limit: client.scaled_limit.map(gshare_core::Quota::as_fraction),
            held_by: None,
        }
    }
}
