//! A driver of Dynamic Resource Allocation, by which Kubernetes' own scheduler gives shares of GPUs to pods.
//!
//! # Problem
//! A pod claims "24 % of the SMs for 30 % of the time, with 1 GiB" as it claims CPUs, and its containers then run under the
//! hook with that share. Kubernetes 1.34 can count it: a device of a `ResourceSlice` (`resource.k8s.io/v1`) with multiple
//! allocations has consumable capacity (KEP-5075, feature gate `DRAConsumableCapacity`). No scheduler of ours is needed.
//!
//! # Terms
//! - **slice**: the list of a node's GPUs with their capacity, which the driver publishes ([`mod@slice`]);
//! - **claim**: a `ResourceClaim`; its `status.allocation` names the device and the amount;
//! - **share**: one allocation of one GPU, with an id when the GPU has several;
//! - **CDI spec**: the file from which a container runtime learns what to add to a container ([`cdi`]).
//!
//! # How it works
//! ```text
//! gshare-dra ── ResourceSlice ──▶ API server ◀── ResourceClaim ── pod
//!     ▲                              │ the scheduler allocates: consumedCapacity {sm, quota, memory}
//!     │ NodePrepareResources         ▼
//!  kubelet ◀──────────────────── pod bound ──▶ container runtime reads the CDI spec: hook, daemon's socket, MPS
//! ```
//! 1. The kubelet finds the registration socket, asks `GetInfo`, and answers `NotifyRegistrationStatus`.
//! 2. For each claim of a pod it calls `NodePrepareResources`. The driver reads the claim, makes a CDI spec of its
//!    allocation ([`claim::prepare`], which is pure), writes it, and answers the names of its CDI devices.
//! 3. `NodeUnprepareResources` removes the file.
//! 4. `NodeWatchResources` tells the health of the GPUs ([`mod@health`]).
//!
//! Worked example: `{sm: 24, quota: 30, memory: 1Gi}` with the option `quotaLimitPercent: 80` becomes `GSHARE_SM=24%`,
//! `GSHARE_QUOTA=30%:80%`, `GSHARE_MEM=1073741824`.
//!
//! # Capacity of a GPU
//! The scheduler adds up each capacity separately, so it cannot see rectangles of time and SMs. Therefore only one of the
//! two is summed, which alone guarantees every share: with MPS the SM partitions, which run side by side, otherwise the
//! quotas, which take turns. The other is only a bound on each claim. Eight shares of 24 % of the SMs for 40 % of the time
//! fill a GPU under the packer; by SMs alone the GPU holds four of them, by time two.
//!
//! # Invariants
//! - A claim is prepared entirely or not at all, and a second request gets the same answer. The CDI spec is written to a
//!   temporary file, synced and renamed, and contains everything for a later answer.
//! - The driver holds no state: after a restart it answers from the CDI directory, without the API server. Files of ended
//!   claims are swept at the start and every ten minutes.
//! - A slice is written when its values change, not when the API server spells them otherwise.
//! - A container gets its share by variables and by a file beside the hook, which takes precedence.
//! - An invalid claim is refused with an error that names the field.
//!
//! # Limits
//! A claim has one share, because a process has one environment and one share file. The hook's limits are cooperative; only
//! MPS and MIG isolate. A GPU given to this driver must not be given out by another.

pub mod authority;
pub mod cdi;
pub mod claim;
pub mod claim_service;
pub mod command;
pub mod health;
pub mod publish;
pub mod slice;

use anyhow::Context as _;
use gshare_core::Bytes;
pub use gshare_openfaas::kubernetes::injection::{Injected, Injection};
use gshared::nvml::{Found, Nvml, listed};

/// The name of the driver, and the vendor of its CDI devices.
pub const DRIVER: &str = "gpu.gshare.io";

/// One GPU of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Number of the GPU on the node: `gpu-0` is the name of its device.
    pub index: u32,
    /// UUID as NVIDIA's tools print it.
    pub uuid: String,
    /// Product name.
    pub model: String,
    /// Memory of the GPU.
    pub memory: Bytes,
}

impl Gpu {
    /// Name of the GPU in the slice: a DNS label.
    pub fn name(&self) -> String {
        format!("gpu-{}", self.index)
    }
}

/// The GPUs in the list of this node's driver.
///
/// # Errors
/// If NVML does not answer.
pub fn of_this_node() -> anyhow::Result<Vec<Gpu>> {
    let gpus =
        Nvml::init().and_then(|nvml| listed(&nvml)).context("NVML lists no GPUs. Without a GPU: --sim")?;
    let gpu = |(index, Found { uuid, name, memory, .. })| Gpu { index, uuid, model: name, memory };
    Ok(gpus.into_iter().map(gpu).collect())
}

/// Makes `count` simulated GPUs.
pub fn simulated(count: u32, memory: Bytes) -> Vec<Gpu> {
    let uuid = |index| format!("GPU-00000000-0000-0000-0000-{index:012}");
    (0..count).map(|index| Gpu { index, uuid: uuid(index), model: "simulated".into(), memory }).collect()
}

/// The driver's settings on one node: its GPUs, and the way into containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of the node, and of its pool.
    pub name: String,
    /// GPUs of the node.
    pub gpus: Vec<Gpu>,
    /// The hook, the daemon's socket and MPS on the host.
    pub injected: Injected,
    /// Kind of the CDI devices that bring the GPU itself, as `nvidia-ctk cdi generate` names them; none on a simulated one.
    pub gpu_kind: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::resource::v1::ResourceClaim;

    pub(super) const UID: &str = "5c1d9a52-7f0e-4c5b-9d55-1f6b2d0e8a11";

    pub(super) fn node() -> Node {
        let gpu = |index, uuid: &str| Gpu {
            index,
            uuid: uuid.into(),
            model: "NVIDIA H200".into(),
            memory: Bytes::from_gib(140),
        };
        Node {
            name: "n1".into(),
            gpus: vec![gpu(0, "GPU-a"), gpu(1, "GPU-b")],
            injected: Injected::default(),
            gpu_kind: Some("nvidia.com/gpu".into()),
        }
    }

    pub(super) fn claim() -> ResourceClaim {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "rnnt", "namespace": "team", "uid": UID},
            "spec": {},
            "status": {"allocation": {"devices": {
                "results": [{"request": "share", "driver": DRIVER, "pool": "n1", "device": "gpu-1", "shareID": "s-1",
                    "consumedCapacity": {"sm": "24", "quota": "30", "memory": "1Gi"}}],
                "config": [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": {
                    "apiVersion": "gshare.io/v1", "kind": "ShareOptions", "quotaLimitPercent": 80}}}],
            }}},
        }))
        .unwrap()
    }
}
