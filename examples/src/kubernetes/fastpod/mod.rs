//! FaSTPod: replicas of a pod that share GPUs, as a resource of Kubernetes (FaST-GShare, section 3.2 and Figure 4).
//!
//! # Problem
//! A Deployment gives whole GPUs to its pods. A FaSTPod says in annotations what share of a GPU each of its pods needs, in
//! SMs, time and memory, or names a profile from which the share is taken; the controller packs the pods over the GPUs of the
//! nodes with the maximal-rectangles packer, makes them, binds them to the nodes, and says where each went. It needs no
//! feature gate of Kubernetes; the claims of [`super::dra`] do.
//!
//! # Terms
//! - **GPU of a node**: a node labelled `gshare.io/fastpod=true` has as many as its label `nvidia.com/gpu.count` says, with
//!   `nvidia.com/gpu.memory` MiB each: the labels of NVIDIA's GPU feature discovery;
//! - **place**: node, number of the GPU and rectangle, given to a pod when it is made; node, GPU and share are in the environment
//!   of its containers, the rectangle is in its annotations, since it may move within the GPU;
//! - **profile**: what `gshare profile --output` writes, one file for each program.
//!
//! # Algorithm
//! [`self::fastpod_writes::reconcile`] is a pure function from what the API server has to what is to be written;
//! [`self::controller`] asks and writes, whenever a FaSTPod, a pod of one, or a node changes. Each time:
//! 1. The packer is built again from the nodes' labels and the pods' annotations (`place_at`), so there is no state to lose,
//!    and a restart is like any other time.
//! 2. A pod that has a place and no node is bound to it (Binding subresource). One whose place is gone before that is deleted.
//! 3. Surplus pods are deleted: of an older template, unbound and unready ones first.
//! 4. What is missing is placed, FaSTPod by FaSTPod in the order of their creation. One that finds no room waits, and says so
//!    in its condition `Placed`; others are not held up by it.
//! 5. A changed template replaces one ready pod at a time.
//! 6. When all are placed, the places are read from the packer: it may have moved rectangles within a GPU to make room.
//!    That is noted at the pods that are there, and then the new ones are made.
//! 7. The status is written where it differs.
//!
//! Worked example (Figure 4): pods of 12 % of the SMs for 30 % of the time. Eight stack to 96 % of a GPU's SMs, and three
//! such stacks stand side by side in 90 % of its time: 24 pods, if their memory fits.
//!
//! # A rectangle that moves
//! A rectangle says that quotas and SM shares fit together; its offsets are virtual. The daemon of a node is told shares, not
//! offsets, and finds a slot for each of its clients by itself. So a pod that runs is moved by a new annotation, and nothing
//! on its node changes.
//!
//! # Invariants
//! - Rectangles on a GPU never overlap, and their memory never adds up to more than it has; a pod that is being deleted
//!   keeps its place until it is gone.
//! - What is written is remembered: a second look at what the writes have made writes nothing.
//! - One bad FaSTPod, pod or node is told and left out; the others are looked after. A FaSTPod whose pods the API server refuses
//!   takes no places, and is tried again with one pod after a pause that doubles ([`backoff`]).
//! - Where a pod is and what share it has is read from the environment in its spec, which no tenant can change.
//!   Labels, owners and annotations of pods can be changed by tenants; the admission policy of the manifests refuses that.
//! - Hook and socket come into a container by `hostPath` volumes, or by its node's kubelet ([`node_hooks`]), so that namespaces with Pod
//!   Security `baseline` or `restricted` take the pods. A node that does not offer them gets none.
//! - What holds replicas up is the reason of the conditions, and an Event each time that the reason is another.
//!
//! # Cost
//! Three lists of the API server, in pages, for each batch of changes, and one packing of all pods. After one look 1,500 pods are made
//! at most, and of those that are there the parts are kept that are looked at: `cargo bench -p gshare-examples --bench fastpod` prints
//! pods per second, memory and idle requests for 500 nodes and 10,000 pods. One controller may work at a time:
//! two would place pods on the same GPUs. Of several replicas one leads ([`super::lease`]).
//!
//! # Differences from the paper
//! - Figure 4 prints `replicas` inside `podSpec`, and containers without a name; here `replicas` is in `spec`, as in
//!   FaST-GShare's own code, and a container has a name, which pods need.
//! - The API group is our own. The annotations are read with the prefixes of the paper (`faasshare/`) and of its code
//!   (`fastgshare/`).
//! - The controller starts no trials of its own: `gshare profile` measures on a machine that is free for it, and
//!   [`pod_share`] takes the most effective share that keeps the time asked for (section 3.4.1, `p_eff`).
//! - Nothing holds back other schedulers' pods from these GPUs: the nodes must be given to FaSTPods alone. The paper's code
//!   starts pods that hold `nvidia.com/gpu`.
//! - Of what a pod asks of its node, selector, required node affinity and taints are looked at ([`nodes`]); pod affinity,
//!   preferences and spreading are not. Nodes' CPUs and memory are the kubelet's to check: a node that refuses a pod is left out
//!   for its FaSTPod for a minute, and the condition says what the kubelet said.

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
    /// What a pod runs. Scheduler, node and GPU are filled in. Read when pods are made, so that what the schema cannot know of
    /// hinders no other FaSTPod.
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

/// What has become of it.
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
