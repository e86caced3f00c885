//! The state that the page and `gshare ps` show: devices, functions, models and the last decisions.

use super::api::Status;
use super::host::{Decision, View};
use super::node::Node;
use gshare_core::{Bytes, GpuId, Timestamp};
use gshare_sched::platform::Regime;
use serde::Serialize;
use std::collections::BTreeMap;

/// The host at one instant.
#[derive(Debug, Serialize)]
pub struct State {
    /// Time since the host began, in ns.
    #[serde(rename = "now_ns")]
    pub now: Timestamp,
    /// Devices, by number.
    pub devices: Vec<Device>,
    /// Functions, by name.
    pub functions: Vec<Function>,
    /// Contents of the node's model store; null if the store does not answer.
    pub models: Option<gshare_modelstore::status::Status>,
    /// The last decisions, the newest first.
    pub decisions: Vec<Decision>,
}

/// A device of the host.
#[derive(Debug, Serialize)]
pub struct Device {
    /// Number of the device, as in the parts of instances.
    pub gpu: GpuId,
    /// The driver's name for the device.
    pub name: String,
    /// Whether its time is shared, it is cut into MIG devices, or it serves one request at a time.
    pub regime: Regime,
    /// Memory in bytes.
    #[serde(rename = "memory_bytes")]
    pub memory: Bytes,
    /// MIG devices, by place.
    pub slices: Vec<Slice>,
    /// Reason for the loss of the device; left out while the device works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

/// A MIG device.
#[derive(Debug, Serialize)]
pub struct Slice {
    /// The driver's name for the MIG profile, such as `3g.40gb`.
    pub profile: String,
    /// First memory slice, from 0.
    pub start: u8,
    /// Number of memory slices.
    pub width: u8,
}

/// A deployed function.
#[derive(Debug, Serialize)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// State, figures and instances.
    #[serde(flatten)]
    pub status: Status,
    /// Processes of the function that the node's daemon knows.
    pub clients: Vec<Client>,
}

/// A process as the node's daemon knows it. Shares of GPU time are fractions of 1.
#[derive(Debug, Serialize)]
pub struct Client {
    /// Name of the process at the daemon.
    pub name: String,
    /// Guaranteed share of GPU time.
    pub request: f64,
    /// Upper limit of its share of GPU time.
    pub limit: f64,
    /// Share of GPU time used in the last one to two seconds.
    pub measured: f64,
    /// GPU memory in use, in bytes.
    #[serde(rename = "memory_bytes")]
    pub memory: Bytes,
}

/// The current state. Asks the node's daemon and blocks meanwhile, so no thread that serves requests may call this.
pub fn now(node: &Node) -> State {
    let snapshot = node.runner.daemon.as_ref().and_then(|socket| gshared::admin::snapshot(socket).ok());
    let mut clients: Vec<Client> = Vec::new();
    for of in snapshot.into_iter().flat_map(|snapshot| snapshot.clients) {
        clients.push(Client {
            name: of.name,
            request: of.quota_request,
            limit: of.quota_limit,
            measured: of.measured,
            memory: of.memory_bytes,
        });
    }
    let (views, decisions, lost) = {
        let host = node.host();
        let lost = |gpu: &GpuId| host.why_lost(*gpu).map(|why| (*gpu, why.to_owned()));
        let lost: BTreeMap<GpuId, String> = node.runner.devices.all.keys().filter_map(lost).collect();
        (host.views(), host.decisions(), lost)
    };
    let function = |view: &View| {
        let mine: Vec<&String> = view.instances.iter().flat_map(|instance| &instance.clients).collect();
        let (mine, others) =
            std::mem::take(&mut clients).into_iter().partition(|one| mine.contains(&&one.name));
        clients = others;
        Function { name: view.version.deployment.service.clone(), status: Status::of(view), clients: mine }
    };
    let functions = views.iter().map(function).collect();
    let device = |(gpu, device): (&GpuId, &super::inventory::Device)| Device {
        gpu: *gpu,
        name: device.name.clone(),
        regime: device.spec.effective_regime(),
        memory: device.spec.memory,
        slices: slices(&device.spec),
        lost: lost.get(gpu).cloned(),
    };
    let devices = node.runner.devices.all.iter().map(device).collect();
    let models = node.runner.models.status();
    State { now: node.now(), devices, functions, models, decisions }
}

fn slices(spec: &gshare_sched::platform::DeviceSpec) -> Vec<Slice> {
    let Some(layout) = &spec.mig else { return Vec::new() };
    let slice = |at: &gshare_sched::mig::SliceAt| {
        let profile = layout.model().get(at.profile)?;
        Some(Slice { profile: profile.name.to_string(), start: at.start, width: profile.memory_slices })
    };
    layout.slices().iter().filter_map(slice).collect()
}
