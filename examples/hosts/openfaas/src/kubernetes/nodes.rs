//! Nodes with GPUs: their offer by their labels, and the reasons for which they take no pods. Pure.

use gshare_core::Bytes;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use std::collections::BTreeMap;
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

/// Label of a node with the name of its GPUs, by NVIDIA's GPU feature discovery.
const PRODUCT: &str = "nvidia.com/gpu.product";
/// Label of a node: how its GPUs serve. Without it their time is shared.
const REGIME: &str = "gshare.io/regime";

/// A node's GPUs, by its labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Number of GPUs.
    pub count: u32,
    /// Memory of each.
    pub memory: Bytes,
    /// Name of the GPUs, if known.
    pub product: String,
    /// Whether each GPU serves one request at a time.
    pub whole: bool,
    /// The labels that count MIG devices; empty where no GPU is cut.
    pub mig: BTreeMap<String, String>,
}

impl Offer {
    /// Reads the labels of a node.
    ///
    /// # Errors
    /// Names the label.
    pub fn of(node: &Node) -> Result<Self, String> {
        let (count, memory) = gpus(node)?;
        let whole = match node.labels().get(REGIME).map(String::as_str) {
            None => false,
            Some("whole") => true,
            Some(other) => return Err(format!("label {REGIME}: `{other}`: need whole, or no such label")),
        };
        let product = node.labels().get(PRODUCT).cloned().unwrap_or_default();
        let counts = |key: &str| key.starts_with("nvidia.com/mig-") && key.ends_with(".count");
        let mig = node.labels().iter().filter(|(key, value)| counts(key) && *value != "0");
        let mig = mig.map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(Self { count, memory, product, whole, mig })
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
    // By the strategy `single` the labels count MIG devices as GPUs, and a pod cannot name one of them by its number.
    if let Some(product) = node.labels().get(PRODUCT).filter(|product| product.contains("-MIG-")) {
        return Err(format!(
            "label {PRODUCT}: `{product}`: need the strategy `mixed` of GPU feature discovery"
        ));
    }
    let count = label("nvidia.com/gpu.count", MAX_GPUS)?;
    Ok((count, Bytes::from_mib(label("nvidia.com/gpu.memory", 1 << 30)?.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(labels: &[(&str, &str)]) -> Result<Offer, String> {
        let mut all = BTreeMap::from([("nvidia.com/gpu.count", "2"), ("nvidia.com/gpu.memory", "81920")]);
        all.extend(labels.iter().copied());
        let mut node = Node::default();
        let all = all.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
        node.metadata.labels = Some(all.collect());
        Offer::of(&node)
    }

    #[test]
    fn labels_say_how_the_gpus_of_a_node_serve() {
        let mixed = [("nvidia.com/mig-1g.10gb.count", "2"), ("nvidia.com/mig.strategy", "mixed")];
        let of = offer(&mixed).unwrap();
        assert_eq!((of.count, of.whole, of.mig.len()), (2, false, 1));
        assert!(offer(&[("nvidia.com/mig-1g.10gb.count", "0")]).unwrap().mig.is_empty());
        assert!(offer(&[(REGIME, "whole")]).unwrap().whole);
        let why = offer(&[(REGIME, "part")]).unwrap_err();
        assert_eq!(why, "label gshare.io/regime: `part`: need whole, or no such label");
        let single = offer(&[(PRODUCT, "A100-SXM4-80GB-MIG-1g.10gb")]).unwrap_err();
        assert!(single.contains("need the strategy `mixed`"), "{single}");
    }
}
