//! A function: its work, its memory, its latency and its instances.

use super::Regime;
use crate::pipeline::Goal;
use gshare_core::dag::Dag;
use gshare_core::profile::ProfileTable;
use gshare_core::{Bytes, Duration, GpuShare, ModelId, NodeId, Quota, TenantId};
use std::collections::BTreeSet;

/// How a function uses devices.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
pub enum Work {
    /// Answers requests from one device, or from several [`FunctionSpec::devices`] with one model together.
    Inference {
        /// The function's measured points. Without them, the platform has the function profiled first.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        profile: Option<ProfileTable>,
    },
    /// Answers requests, and may be cut into stages on several MIG slices.
    Pipeline {
        /// The function's components with their profiles by slice.
        dag: Box<Dag>,
        /// Batch, memory and costs for pipelines. The function's SLO replaces the goal's.
        goal: Box<Goal>,
    },
    /// Trains a model with workers that start together, run until they complete, and answer no requests.
    Training {
        /// Workers, each with the share on a device of its own; 1 to 64.
        workers: u32,
        /// The share of each worker.
        share: GpuShare,
    },
}

/// A model's weights in the memory of a device, where all instances of the model on it share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Weights {
    /// The model; functions of one model share its weights.
    pub model: ModelId,
    /// Their memory in bytes; equal wherever the model is named.
    pub bytes: Bytes,
}

/// A function as a user deploys it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct FunctionSpec {
    /// The way in which it uses devices.
    pub work: Work,
    /// The tenant that is charged for the function.
    #[cfg_attr(feature = "serde", serde(default = "nobody"))]
    pub tenant: TenantId,
    /// The time within which a request should be answered, waiting included. None: no latency to keep.
    #[cfg_attr(feature = "serde", serde(rename = "slo_ns", default))]
    pub slo: Option<Duration>,
    /// The regime it must run in. None: the platform chooses.
    #[cfg_attr(feature = "serde", serde(default))]
    pub regime: Option<Regime>,
    /// Number of instances kept even without load; at most 1 on whole devices.
    #[cfg_attr(feature = "serde", serde(default))]
    pub min_instances: u32,
    /// Most instances, starting instances included; at least the minimum, more than 0.
    #[cfg_attr(feature = "serde", serde(default = "one"))]
    pub max_instances: u32,
    /// GPU memory of one instance in bytes, weights and work space but for shared [`weights`](Self::weights); more than 0.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
    pub memory: Bytes,
    /// Time to start a process and load its weights from disk.
    #[cfg_attr(feature = "serde", serde(rename = "load_disk_ns"))]
    pub load_disk: Duration,
    /// Time to start a process and load its weights from host memory.
    #[cfg_attr(feature = "serde", serde(rename = "load_host_ns"))]
    pub load_host: Duration,
    /// The most of a fractional device's time for an instance while other instances leave it unused (FaST-GShare,
    /// `gpu_quota_limit`). None: twice the time of the instance's point (Dilu, section 3.2).
    #[cfg_attr(feature = "serde", serde(rename = "time_limit_bp", default))]
    pub time_limit: Option<Quota>,
    /// Devices of one node over which an instance of an inference function is spread: tensor parallelism. Each device has an
    /// equal part of the instance's memory, and the share of its point. 1 to 64; more than 1 on fractional devices only.
    #[cfg_attr(feature = "serde", serde(default = "one"))]
    pub devices: u32,
    /// Weights that the instances on a device share there, booked once per device. None: each instance has its own, in its memory.
    /// On slices and whole devices each instance has its own in any case. With one device per instance only.
    #[cfg_attr(feature = "serde", serde(default))]
    pub weights: Option<Weights>,
    /// Whether an instance takes several requests at once as one batch, of at most its point's size, and one batch at a time. The
    /// dispatches to one instance in one answer of the platform are then one batch. On sliced and whole devices each batch is one
    /// request.
    #[cfg_attr(feature = "serde", serde(default))]
    pub batches: bool,
    /// The nodes to which new instances go: on fractional devices only. None: any node.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub nodes: Option<BTreeSet<NodeId>>,
    /// An earlier host deployed it, and workers of it may run: a training job starts none before the first
    /// [`BoundsChanged`](super::PlatformEvent::BoundsChanged).
    #[cfg_attr(feature = "serde", serde(default))]
    pub found: bool,
}

#[cfg(feature = "serde")]
const fn one() -> u32 {
    1
}

#[cfg(feature = "serde")]
const fn nobody() -> TenantId {
    TenantId::new(0)
}

gshare_core::with_fields!(FunctionSpec {
    with_time_limit(time_limit: Quota => Some),
    with_devices(devices: u32),
    with_batches(batches: bool),
    with_nodes(nodes: Option<BTreeSet<NodeId>>),
    with_found(found: bool),
    with_slo(slo: Duration => Some),
    with_regime(regime: Regime => Some),
    with_tenant(tenant: TenantId),
    with_weights(weights: Option<Weights>),
});

impl FunctionSpec {
    /// A function of tenant 0 with at most one instance, which is stopped without calls, and with no latency to keep. The
    /// loading times assume 1 GB/s from disk and 12 GB/s from host memory, with 4 s for the process.
    pub fn new(work: Work, memory: Bytes) -> Self {
        let process = Duration::from_secs(4);
        let at = |bytes_per_ns: u64| Duration::from_nanos(memory.get() / bytes_per_ns);
        Self {
            work,
            tenant: TenantId::new(0),
            slo: None,
            regime: None,
            min_instances: 0,
            max_instances: 1,
            memory,
            load_disk: process.saturating_add(at(1)),
            load_host: process.saturating_add(at(12)),
            time_limit: None,
            devices: 1,
            weights: None,
            batches: false,
            nodes: None,
            found: false,
        }
    }

    /// GPU memory in bytes of an instance on each of its [`devices`](Self::devices).
    pub fn memory_per_device(&self) -> Bytes {
        Bytes(self.memory.get().div_ceil(u64::from(self.devices.max(1))))
    }

    /// Whether new instances may go to a node.
    pub fn allows(&self, node: NodeId) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(&node))
    }

    /// The same function with other bounds of its instances.
    #[must_use]
    pub fn with_instances(self, min_instances: u32, max_instances: u32) -> Self {
        Self { min_instances, max_instances, ..self }
    }

    /// The same function with other times to load it from disk and from host memory.
    #[must_use]
    pub fn with_loads(self, load_disk: Duration, load_host: Duration) -> Self {
        Self { load_disk, load_host, ..self }
    }
}
