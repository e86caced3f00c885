//! The snapshot that `gshare status`, `gshare top`, the page and the metrics show.

use crate::enforce::HeldBy;
use crate::nvml::LostDevice;
use crate::why::{Decision, Finding};
use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Bytes, ClientId, Duration, GpuId, ServiceClass, Timestamp};
use gshare_sched::node::{ClientView, DeviceView, FactSource};
use gshare_sched::scale::ScaleState;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The daemon at one instant. Shares are fractions of 1.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// `CLOCK_MONOTONIC`, in ns.
    pub now_ns: Timestamp,
    /// Number of the daemon's run.
    pub epoch: u64,
    /// The daemon's process.
    pub pid: u32,
    /// The daemon's version.
    pub version: String,
    /// Where hooks find it.
    pub socket: PathBuf,
    /// Connections, those included that have not said Hello.
    pub connections: usize,
    /// Processes let in.
    pub processes: usize,
    /// Connections dropped since the start, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Events that are not in the journal because it could not be written.
    pub journal_lost: u64,
    /// Folder of its journal, where one is configured.
    #[serde(default)]
    pub journal: Option<PathBuf>,
    /// Why no journal is written at present although one is configured.
    #[serde(default)]
    pub journal_failure: Option<String>,
    /// Its devices.
    pub devices: Vec<DeviceSnapshot>,
    /// Its clients, by slot.
    pub clients: Vec<ClientSnapshot>,
    /// Decisions that held clients up last, the newest first: limits, debts, denials and refusals.
    #[serde(default)]
    pub decisions: Vec<Decision>,
    /// Devices of the node that their driver has lost; `None` where the daemon has not heard of them, or cannot.
    #[serde(default)]
    pub lost: Option<Vec<LostDevice>>,
}

/// A device.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceSnapshot {
    /// The daemon's number of it.
    pub gpu: GpuId,
    /// Its UUID.
    pub uuid: String,
    /// Whether it is a simulated one.
    #[serde(default)]
    pub simulated: bool,
    /// Its memory; 0 while unknown.
    pub memory_bytes: Bytes,
    /// The source of the figure for the memory: the configuration, the driver, or the first client.
    #[serde(default)]
    pub memory_source: FactSource,
    /// Memory granted to clients, used or not.
    pub held_bytes: Bytes,
    /// How many clients it has.
    pub clients: u32,
}

/// A client: one process on one GPU.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClientSnapshot {
    /// Its id.
    pub client: ClientId,
    /// Name of its instance.
    pub name: String,
    /// Its process.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// Its program.
    pub program: String,
    /// Its GPU.
    pub gpu: GpuId,
    /// Guaranteed share of time of its instance, whose processes take turns.
    pub quota_request: f64,
    /// Most share of time of its instance.
    pub quota_limit: f64,
    /// Share of the SMs.
    pub sm: f64,
    /// Share of time used in the last one to two seconds.
    pub measured: f64,
    /// GPU time since it attached, in ns.
    pub total_used_ns: Duration,
    /// GPU time of its instance in this window, in ns.
    pub window_used_ns: Duration,
    /// Whether it holds a token.
    pub holds_token: bool,
    /// For how long it has been waiting for a token, in ns.
    pub waiting_ns: Option<Duration>,
    /// Why it waits now.
    #[serde(default)]
    pub why: Option<Finding>,
    /// How long its threads have waited in all, in ns.
    pub waited_ns: Duration,
    /// Kernels launched.
    pub launches: u64,
    /// Memory it uses; where it has not said so, what was granted to it.
    pub memory_bytes: Bytes,
    /// Most memory of its instance on this GPU.
    pub memory_limit_bytes: Option<Bytes>,
    /// The client's behaviour when the daemon is gone.
    pub on_daemon_loss: OnDaemonLoss,
    /// How it is treated beside others, if it said so and takes part in scaling.
    #[serde(default)]
    pub class: Option<ServiceClass>,
    /// State of the co-scaler: its own if it is SLO-sensitive, else its GPU's.
    #[serde(default)]
    pub scale_state: Option<ScaleState>,
    /// The most share of time that the co-scaler leaves its instance now.
    #[serde(default)]
    pub scaled_limit: Option<f64>,
    /// The enforcer of each of its limits, where a program on its node has looked: `gshare status` does.
    #[serde(default)]
    pub held_by: Option<HeldBy>,
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
            waited_ns: client.waited,
            launches: client.launches,
            memory_bytes: client.memory,
            memory_limit_bytes: client.memory_limit,
            on_daemon_loss: client.on_daemon_loss,
            class: client.class,
            scale_state: client.scale_state,
            scaled_limit: client.scaled_limit.map(gshare_core::Quota::as_fraction),
            held_by: None,
        }
    }
}
