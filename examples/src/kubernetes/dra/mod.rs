//! A driver of Dynamic Resource Allocation: shares of GPUs that Kubernetes' own scheduler gives to pods.
//!
//! # Problem
//! A pod claims "24 % of the SMs for 30 % of the time, with 1 GiB" as it claims CPUs, and its containers then run under the
//! hook with that share. Kubernetes 1.34 can count it: a device of a `ResourceSlice` (`resource.k8s.io/v1`) that allows
//! multiple allocations has consumable capacity (KEP-5075, feature gate `DRAConsumableCapacity`). No scheduler of ours is
//! needed.
//!
//! # Terms
//! - **slice**: what the driver publishes, once per node: its GPUs with their capacity ([`mod@slice`]);
//! - **claim**: a `ResourceClaim`; allocated, it says which device and how much of it: `status.allocation`;
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
//! 2. For each claim of a pod it calls `NodePrepareResources`. The driver reads the claim, makes a CDI spec of its allocation
//!    ([`claim::prepare`], which is pure), writes it, and answers the names of its CDI devices.
//! 3. `NodeUnprepareResources` removes the file.
//! 4. `NodeWatchResources` tells the health of the GPUs ([`mod@health`]).
//!
//! Worked example: `{sm: 24, quota: 30, memory: 1Gi}` with the option `quotaLimitPercent: 80` becomes `GSHARE_SM=24%`,
//! `GSHARE_QUOTA=30%:80%`, `GSHARE_MEM=1073741824`.
//!
//! # What a GPU holds
//! The scheduler adds up each capacity by itself, so it cannot see rectangles of time and SMs. What is summed is therefore
//! one of the two, and either alone is enough for every share to be kept: where MPS runs, the SM partitions (they run side
//! by side), else the quotas (they take turns). The other one is a bound on each claim. Eight shares of 24 % of the SMs for
//! 40 % of the time fill a GPU under the packer; by SMs alone it holds four of them, by time two.
//!
//! # Invariants
//! - A claim is prepared entirely or not at all, and preparing it again answers the same; the CDI spec is written to a
//!   temporary file, synced and renamed, and carries all that is needed to answer again.
//! - The driver holds no state: after a restart it answers from the CDI directory, without the API server. Files of claims
//!   that are over are swept at the start and every ten minutes.
//! - A slice is written when its values change, not when the API server spells them otherwise.
//! - A container is told its share by variables and by a file beside the hook, which goes before them.
//! - A claim that cannot be granted as it stands is refused with an error that names the field.
//!
//! # Limits
//! One share per claim: a process has one environment and one file of its share, which say one thing. What the hook limits is
//! cooperative; MPS and MIG are what isolates. A GPU given to this driver must not be given out by another.

pub mod authority;
pub mod cdi;
pub mod claim;
pub mod claim_service;
pub mod command;
pub mod health;
pub mod kubelet;
pub mod node_gpus;
pub mod publish;
pub mod slice;

use gshare_core::Bytes;
use std::path::PathBuf;

/// The name of the driver, and the vendor of its CDI devices.
pub const DRIVER: &str = "gpu.gshare.io";

/// One GPU of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its number on the node: `gpu-0` is the name of its device.
    pub index: u32,
    /// Its UUID, as NVIDIA's tools print it.
    pub uuid: String,
    /// Its product name.
    pub model: String,
    /// Its memory.
    pub memory: Bytes,
}

impl Gpu {
    /// Its name in the slice: a DNS label.
    pub fn name(&self) -> String {
        format!("gpu-{}", self.index)
    }
}

/// How a container's processes come to load the hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Injection {
    /// A read-only `/etc/ld.so.preload`: stays when a program clears its environment, leaves its `LD_PRELOAD` as it is, and
    /// is not read by the loader of musl, which could not load the hook.
    File,
    /// `LD_PRELOAD`: for images that have an `/etc/ld.so.preload` of their own, and are of glibc. A FaSTPod's own `LD_PRELOAD` is
    /// loaded after the hook; a CDI spec can only set the variable, so a claim replaces that of its container.
    Environment,
}

/// Where clients of a running MPS find it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsDirs {
    /// Its pipes (`CUDA_MPS_PIPE_DIRECTORY`).
    pub pipes: PathBuf,
    /// Its shared memory, mounted at `/dev/shm`.
    pub shm: PathBuf,
}

/// What the driver gives out and how, on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of the node, and of its pool.
    pub name: String,
    /// Its GPUs.
    pub gpus: Vec<Gpu>,
    /// The hook on the host.
    pub hook: PathBuf,
    /// How it is loaded; with [`Injection::File`], the file on the host that names it.
    pub injection: Injection,
    /// That file.
    pub preload_file: PathBuf,
    /// The daemon's socket on the host; its directory is what is mounted, so that a daemon that restarts is found again.
    pub socket: PathBuf,
    /// MPS, if it runs.
    pub mps: Option<MpsDirs>,
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
            hook: "/opt/gshare/libgshare_hook.so".into(),
            injection: Injection::File,
            preload_file: "/opt/gshare/ld.so.preload".into(),
            socket: "/run/gshare/pods/gshare.sock".into(),
            mps: None,
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
