//! Nodes with GPUs: their offer by their labels, and the reasons for which they take no pods. Pure.

use gshare_core::Bytes;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use std::fmt;

/// Most GPUs that a node is believed to have.
const MAX_GPUS: u32 = 64;

/// Why a node is not taken.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Excluded {
    /// The node's condition `Ready` is not True.
    NotReady,
    /// The node is cordoned or being deleted.
    Cordoned,
    /// The pods' `nodeSelector` asks for labels that it does not have.
    Selector,
    /// No term of the pods' required node affinity fits it.
    Affinity,
    /// A taint that the pods do not tolerate: `key=value:effect`.
    Tainted(String),
    /// The node offers nothing of an extended resource that the pods ask for: its name.
    Resource(String),
    /// The node's kubelet has refused or ended a pod: reason and message.
    Failed(String),
}

impl Excluded {
    /// For the `reason` of a condition.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NotReady => "NodesNotReady",
            Self::Cordoned => "NodesCordoned",
            Self::Selector => "NodeSelector",
            Self::Affinity => "NodeAffinity",
            Self::Tainted(_) => "Tainted",
            Self::Resource(_) => "NodeResource",
            Self::Failed(_) => "PodFailed",
        }
    }
}

impl fmt::Display for Excluded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReady => f.write_str("not ready"),
            Self::Cordoned => f.write_str("cordoned"),
            Self::Selector => f.write_str("not selected by the nodeSelector"),
            Self::Affinity => f.write_str("excluded by the required node affinity"),
            Self::Tainted(taint) => write!(f, "tainted {taint}"),
            Self::Resource(name) => write!(f, "without {name}"),
            Self::Failed(why) => write!(f, "refused a pod ({why})"),
        }
    }
}

/// A node without the parts that are not looked at: names of images are most of it.
pub fn slim(mut node: Node) -> Node {
    node.metadata.managed_fields = None;
    if let Some(status) = &mut node.status {
        (status.images, status.volumes_in_use, status.volumes_attached) = (None, None, None);
    }
    node
}

/// Why a node takes no pods at all.
pub fn closed(node: &Node) -> Option<Excluded> {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
    let cordoned = node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true));
    match () {
        () if cordoned || node.metadata.deletion_timestamp.is_some() => Some(Excluded::Cordoned),
        () if !ready => Some(Excluded::NotReady),
        () => None,
    }
}

/// The number of a node's GPUs and the memory of each, by the labels of NVIDIA's GPU feature discovery.
///
/// # Errors
/// Names the label.
pub fn gpus(node: &Node) -> Result<(u32, Bytes), String> {
    let label = |key: &str, most: u32| {
        let text = node.labels().get(key).ok_or(format!("label {key}: missing"))?;
        let number = text.parse().ok().filter(|number| (1..=most).contains(number));
        number.ok_or(format!("label {key}: `{text}`: need 1 to {most}"))
    };
    let count = label("nvidia.com/gpu.count", MAX_GPUS)?;
    Ok((count, Bytes::from_mib(label("nvidia.com/gpu.memory", 1 << 30)?.into())))
}
