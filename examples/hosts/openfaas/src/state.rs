//! The state that the page and `gshare ps` show: devices, functions, models and the last decisions.

use super::host::{Decision, View};
use super::node::Node;
use super::weights::Held;
use gshare_core::{Bytes, GpuId, Timestamp};
use gshare_sched::platform::{DeviceSpec, Regime};
use gshared::ClientSnapshot;
use serde::Serialize;

/// The host at one instant.
#[derive(Debug, Serialize)]
pub struct State {
    /// Time since the host began, in ns.
    #[serde(rename = "now_ns")]
    pub now: Timestamp,
    /// The host's version.
    pub version: &'static str,
    /// Devices, by number.
    pub devices: Vec<Device>,
    /// Functions, by name.
    pub functions: Vec<Function>,
    /// Processes on these devices that are no function's.
    pub clients: Vec<ClientSnapshot>,
    /// Contents of the node's model store; null if the store does not answer.
    pub models: Option<gshare_modelstore::status::Status>,
    /// The last decisions, the newest first.
    pub decisions: Vec<Decision>,
    /// Other daemons on these devices.
    pub neighbours: Vec<gshared::Neighbour>,
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
    /// GPU memory granted to processes, used or not, in bytes.
    pub held_bytes: Bytes,
    /// Temperature in degrees Celsius, if the driver reports one.
    pub celsius: Option<u32>,
    /// Power in mW, if the driver reports it.
    pub milliwatts: Option<u32>,
    /// MIG devices, by place.
    pub slices: Vec<Slice>,
    /// Weights that instances share on it, each once.
    pub weights: Vec<Held>,
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
    pub status: View,
    /// Processes of the function that the node's daemon knows, with the host's numbers of devices.
    pub clients: Vec<ClientSnapshot>,
}

/// The current state. Asks the node's daemon and blocks meanwhile, so no thread that serves requests may call this.
pub fn now(node: &Node) -> State {
    let snapshot = node.runner.daemon.as_ref().and_then(|socket| gshared::admin::snapshot(socket).ok());
    let devices = &node.runner.devices;
    let on = |(gpu, _, client): (GpuId, f64, &ClientSnapshot)| {
        let mut client = client.clone();
        client.gpu = gpu;
        client
    };
    let mut clients: Vec<ClientSnapshot> =
        snapshot.iter().flat_map(|snapshot| devices.clients(snapshot)).map(on).collect();
    let (views, decisions, found) = {
        let host = node.host();
        let device = |(gpu, name, spec): (GpuId, &str, &DeviceSpec)| {
            (gpu, name.to_owned(), spec.clone(), host.why_lost(gpu).map(str::to_owned))
        };
        (host.views(), host.decisions(), host.devices().map(device).collect::<Vec<_>>())
    };
    let function = |view: &View| {
        let mine: Vec<&String> = view.instances.iter().flat_map(|instance| &instance.clients).collect();
        let (mine, others) =
            std::mem::take(&mut clients).into_iter().partition(|one| mine.contains(&&one.name));
        clients = others;
        Function { name: view.version.deployment.service.clone(), status: view.clone(), clients: mine }
    };
    let functions = views.iter().map(function).collect();
    let account = |name: &str| {
        let found = clients.iter().find(|client| client.name == name);
        found.map_or(Bytes::ZERO, |client| client.memory_bytes)
    };
    let device = |(gpu, name, spec, lost): (GpuId, String, DeviceSpec, Option<String>)| {
        let of = devices.all.get(&gpu);
        let own = |uuid: &str| of.is_some_and(|device| device.uuids().any(|own| own == uuid));
        let known = snapshot.iter().flat_map(|snapshot| &snapshot.devices);
        let sensors = snapshot.iter().flat_map(|snapshot| &snapshot.sensors);
        let sensors = sensors.clone().find(|of| of.uuids.iter().any(|uuid| own(uuid)));
        Device {
            gpu,
            name,
            regime: spec.effective_regime(),
            memory: spec.memory,
            held_bytes: Bytes(known.filter(|of| own(&of.uuid)).map(|of| of.held_bytes.get()).sum()),
            celsius: sensors.and_then(|of| of.celsius),
            milliwatts: sensors.and_then(|of| of.milliwatts),
            slices: slices(&spec),
            weights: node.runner.weights.held(gpu, &account),
            lost,
        }
    };
    let devices = found.into_iter().map(device).collect();
    let models = node.runner.models.status();
    State {
        now: node.now(),
        version: env!("CARGO_PKG_VERSION"),
        devices,
        functions,
        clients,
        models,
        decisions,
        neighbours: snapshot.map_or_else(Vec::new, |snapshot| snapshot.neighbours),
    }
}

fn slices(spec: &DeviceSpec) -> Vec<Slice> {
    let Some(layout) = &spec.mig else { return Vec::new() };
    let slice = |at: &gshare_sched::mig::SliceAt| {
        let profile = layout.model().get(at.profile)?;
        Some(Slice { profile: profile.name.to_string(), start: at.start, width: profile.memory_slices })
    };
    layout.slices().iter().filter_map(slice).collect()
}
