//! FaSTPod: replicas of a pod that share GPUs, as a resource of Kubernetes (FaST-GShare, section 3.2 and Figure 4).
//!
//! # Problem
//! A Deployment gives whole GPUs to its pods. A FaSTPod states in annotations the GPU share of each pod, in SMs, time and
//! memory, or names a profile for the share. The controller packs the pods onto the nodes' GPUs with the maximal-rectangles
//! packer, creates them, binds them to the nodes, and reports their places. It needs no feature gate of Kubernetes; the
//! claims of [`super::dra`] do.
//!
//! # Terms
//! - **GPU of a node**: a node labelled `gshare.io/fastpod=true` has as many as its label `nvidia.com/gpu.count` says, with
//!   `nvidia.com/gpu.memory` MiB each: the labels of NVIDIA's GPU feature discovery;
//! - **place**: node, number of the GPU and rectangle, given to a pod when it is made; node, GPU and share are in the
//!   environment of its containers, the rectangle is in its annotations, since it may move within the GPU;
//! - **profile**: what `gshare lab profile --output` writes, one file for each program.
//!
//! # Algorithm
//! [`self::fastpod_writes::reconcile`] is a pure function from the API server's objects to the writes; [`self::controller`]
//! reads and writes, whenever a FaSTPod, a pod of one, or a node changes. Each time:
//! 1. The packer is built again from the nodes' labels and the pods' annotations (`place_at`), so there is no state to
//!    lose, and a restart is like any other time.
//! 2. A pod with a place but without a node is bound (Binding subresource). If its place is gone before that, it is
//!    deleted.
//! 3. Surplus pods are deleted: first pods of an older template, then unbound and unready pods.
//! 4. Missing pods are placed, FaSTPod by FaSTPod in the order of their creation. A FaSTPod without room waits with the
//!    condition `Placed` false, and does not hold up others.
//! 5. A changed template replaces one ready pod at a time.
//! 6. When all are placed, the places are read from the packer: it may have moved rectangles within a GPU to make room.
//!    Existing pods get a note of their new places, and then the new pods are made.
//! 7. The status is written where it differs.
//!
//! Worked example (Figure 4): pods of 12 % of the SMs for 30 % of the time. Eight stack to 96 % of a GPU's SMs, and three
//! such stacks stand side by side in 90 % of its time: 24 pods, if their memory fits.
//!
//! # A rectangle that moves
//! A rectangle proves that quotas and SM shares fit together; its offsets are virtual. The daemon of a node gets only
//! shares, and finds a slot for each client by itself. So a new annotation moves a running pod, and nothing on its node
//! changes.
//!
//! # Invariants
//! - Rectangles on a GPU never overlap, and their memory never exceeds the GPU's; a pod under deletion keeps its place
//!   until it is gone.
//! - A second look at the result of the writes writes nothing.
//! - A bad FaSTPod, pod or node is reported and skipped; the others are served. If the API server refuses the pods of a
//!   FaSTPod, it takes no places and is tried again with one pod after a doubling pause ([`backoff`]).
//! - A pod's place and share are read from the environment in its spec, which no tenant can change. Tenants could change
//!   labels, owners and annotations of pods, but the admission policy of the manifests refuses that.
//! - Hook and socket come into a container by `hostPath` volumes, or by its node's kubelet ([`node_hooks`]), so namespaces with
//!   Pod Security `baseline` or `restricted` accept the pods. A node without them gets no pods.
//! - The conditions give the reason for missing replicas, and each new reason makes an Event.
//!
//! # Cost
//! Three lists of the API server, in pages, for each batch of changes, and one packing of all pods. A look creates at most
//! 1,500 pods, and keeps only the needed parts of existing pods: `cargo bench -p gshare-examples --bench fastpod` prints
//! pods per second, memory and idle requests for 500 nodes and 10,000 pods. One controller may work at a time: two would
//! place pods on the same GPUs. Of several replicas one leads ([`super::lease`]).
//!
//! # Differences from the paper
//! - Figure 4 prints `replicas` inside `podSpec`, and containers without a name; here `replicas` is in `spec`, as in
//!   FaST-GShare's own code, and containers have names, as pods require.
//! - The API group is our own. The annotations are read with the prefixes of the paper (`faasshare/`) and of its code
//!   (`fastgshare/`).
//! - The controller starts no trials of its own: `gshare lab profile` measures on a free machine, and [`pod_share`] takes the
//!   most effective share within the SLO (section 3.4.1, `p_eff`).
//! - Nothing holds back other schedulers' pods from these GPUs: the nodes must be given to FaSTPods alone. The paper's code
//!   starts pods to hold `nvidia.com/gpu`.
//! - The controller checks a pod's node selector, required node affinity and taints ([`nodes`]), but not pod affinity,
//!   preferences and spreading. The kubelet checks CPUs and memory: if a node refuses a pod, its FaSTPod avoids the node
//!   for a minute, and the condition quotes the kubelet.

#![allow(clippy::duplicated_attributes, reason = "two columns of the same type")]

pub mod backoff;
mod cluster_gpus;
pub mod command;
pub mod controller;
pub mod fastpod_writes;
pub mod kubelet;
pub mod node_hooks;
pub mod nodes;
pub mod pod_share;
pub mod pods;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Replicas of a pod that share GPUs.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gshare.io",
    version = "v1alpha1",
    kind = "FaSTPod",
    plural = "fastpods",
    singular = "fastpod",
    shortname = "fp",
    namespaced,
    status = "FaSTPodStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "Replicas of a pod that share GPUs. Its annotations sm_partition, quota_request, quota_limit and gpu_mem, prefixed faasshare/ or fastgshare/, say what share each of them has; gshare.io/profile names a profile for what they leave out.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(
        name = "Placed",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Placed\")].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct FaSTPodSpec {
    /// How many pods.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1000))]
    pub replicas: i32,
    /// Labels that the pods get, by which Services find them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<Selector>,
    /// Template of a pod. Scheduler, node and GPU are filled in. It is checked only when pods are made, so faults beyond
    /// the schema affect no other FaSTPod.
    #[schemars(schema_with = "pod_spec")]
    pub pod_spec: Value,
}

/// Labels to match.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Selector {
    /// All of them.
    #[serde(default)]
    pub match_labels: BTreeMap<String, String>,
}

/// The observed state.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaSTPodStatus {
    /// The generation that this is about.
    #[serde(default)]
    pub observed_generation: i64,
    /// Pods that are there.
    #[serde(default)]
    pub replicas: i32,
    /// Pods that are ready.
    #[serde(default)]
    pub ready_replicas: i32,
    /// By which its pods are found.
    #[serde(default)]
    pub selector: String,
    /// The share that each of its pods is to have: quota, SMs, memory.
    #[serde(default)]
    pub share: String,
    /// Node and number of the GPU of each pod.
    #[serde(default, rename = "boundDeviceIDs")]
    pub bound_device_ids: BTreeMap<String, String>,
    /// `Placed`, `Ready`, `Progressing`, `Degraded`.
    #[serde(default)]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
}

fn one() -> i32 {
    1
}

/// As much of a `PodSpec` as makes mistakes plain at once; the whole of it is checked when a pod is made.
fn pod_spec(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "description": "What a pod runs. Scheduler, node and GPU are filled in.",
        "required": ["containers"],
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": {
            "containers": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["image", "name"],
                    "x-kubernetes-preserve-unknown-fields": true,
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
                        "image": {"type": "string", "minLength": 1},
                    },
                },
            },
            "nodeName": {"type": "string", "maxLength": 0},
            "restartPolicy": {"type": "string", "enum": ["Always"]},
        },
    })
}

fn conditions(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "description": "Placed: every replica has a place. Ready: every replica is ready. Progressing: replicas are on their way. Degraded: something has to be mended first, as the message says.",
        "items": {
            "type": "object",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "message": {"type": "string"},
                "observedGeneration": {"type": "integer", "format": "int64"},
                "reason": {"type": "string"},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "type": {"type": "string"},
            },
        },
    })
}
