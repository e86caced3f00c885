//! Nodes with GPUs: their offer by their labels, and the reasons for which they take no pods. Pure.

use gshare_core::Bytes;
use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Toleration};
use kube::ResourceExt as _;
use std::collections::BTreeMap;

/// Most GPUs that a node is believed to have.
const MAX_GPUS: u32 = 64;
/// The taint of nodes with GPUs.
pub(super) const GPU_TAINT: &str = "nvidia.com/gpu";

/// Why a node is not taken.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Excluded {
    /// The node's condition `Ready` is not True.
    #[error("not ready")]
    NotReady,
    /// The node is cordoned or being deleted.
    #[error("cordoned")]
    Cordoned,
    /// The pods' `nodeSelector` asks for labels that it does not have.
    #[error("not selected by the nodeSelector")]
    Selector,
    /// No term of the pods' required node affinity fits it.
    #[error("excluded by the required node affinity")]
    Affinity,
    /// A taint that the pods do not tolerate: `key=value:effect`.
    #[error("tainted {0}")]
    Tainted(String),
    /// The node offers nothing of an extended resource that the pods ask for: its name.
    #[error("without {0}")]
    Resource(String),
    /// The node's kubelet has refused a pod a short while ago: reason and message.
    #[error("resting after a refused pod ({0})")]
    Refused(String),
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
    is_cordoned(node).then_some(Excluded::Cordoned).or_else(|| lost(node))
}

/// Why a node's pods are given up.
pub fn lost(node: &Node) -> Option<Excluded> {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
    let goes = node.metadata.deletion_timestamp.is_some();
    goes.then_some(Excluded::Cordoned).or((!ready).then_some(Excluded::NotReady))
}

/// Whether a node takes no new pods: those that run there stay.
pub fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true))
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
    /// Reads the labels of a node: of NVIDIA's GPU feature discovery, and gshare's label of the regime.
    ///
    /// # Errors
    /// Names the label.
    pub fn of(node: &Node) -> Result<Self, String> {
        let label = |key: &str, most: u32| {
            let text = node.labels().get(key).ok_or(format!("label {key}: missing"))?;
            let number = text.parse().ok().filter(|number| (1..=most).contains(number));
            number.ok_or(format!("label {key}: `{text}`: need 1 to {most}"))
        };
        let product = node.labels().get(PRODUCT).cloned().unwrap_or_default();
        // By the strategy `single` the labels count MIG devices as GPUs, and a pod cannot name one of them by its number.
        if product.contains("-MIG-") {
            let need = "need the strategy `mixed` of GPU feature discovery";
            return Err(format!("label {PRODUCT}: `{product}`: {need}"));
        }
        let count = label("nvidia.com/gpu.count", MAX_GPUS)?;
        let memory = Bytes::from_mib(label("nvidia.com/gpu.memory", 1 << 30)?.into());
        let whole = match node.labels().get(REGIME).map(String::as_str) {
            None => false,
            Some("whole") => true,
            Some(other) => return Err(format!("label {REGIME}: `{other}`: need whole, or no such label")),
        };
        let counts = |key: &str| key.starts_with("nvidia.com/mig-") && key.ends_with(".count");
        let mig = node.labels().iter().filter(|(key, value)| counts(key) && *value != "0");
        let mig = mig.map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(Self { count, memory, product, whole, mig })
    }

    /// Whether functions share the GPUs.
    pub fn is_shared(&self) -> bool {
        !self.whole && self.mig.is_empty()
    }
}

/// Why no pod of this spec goes to an open node now. Preferred affinity and pod affinity are not looked at. Pods of functions use GPUs, and
/// tolerate the taint of nodes with GPUs.
pub fn excluded(node: &Node, spec: &PodSpec) -> Option<Excluded> {
    if !spec.node_selector.iter().flatten().all(|(key, value)| node.labels().get(key) == Some(value)) {
        return Some(Excluded::Selector);
    }
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required =
        affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    if required.is_some_and(|required| !required.node_selector_terms.iter().any(|term| fits(node, term))) {
        return Some(Excluded::Affinity);
    }
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    for taint in taints.filter(|taint| taint.effect != "PreferNoSchedule" && taint.key != GPU_TAINT) {
        let value = taint.value.as_deref().unwrap_or_default();
        if !spec.tolerations.iter().flatten().any(|t| tolerates(t, &taint.key, value, &taint.effect)) {
            let value = if value.is_empty() { String::new() } else { format!("={value}") };
            return Some(Excluded::Tainted(format!("{}{value}:{}", taint.key, taint.effect)));
        }
    }
    // A kubelet starts a pod with an unknown extended resource.
    let offered = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let asked = containers.filter_map(|container| container.resources.as_ref()?.limits.as_ref()).flatten();
    let offers = |name: &String| offered.and_then(|all| all.get(name)).is_some_and(|count| count.0 != "0");
    // A device plugin's resource has a domain other than Kubernetes' own.
    let other =
        |name: &str| name.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"));
    let mut extended = asked.map(|(name, _)| name).filter(|name| other(name));
    extended.find(|name| !offers(name)).map(|name| Excluded::Resource(name.clone()))
}

/// Answers if all of a term holds; a term that asks for nothing fits no node.
fn fits(node: &Node, term: &NodeSelectorTerm) -> bool {
    let (labels, fields) = (term.match_expressions.as_deref(), term.match_fields.as_deref());
    let (labels, fields) = (labels.unwrap_or_default(), fields.unwrap_or_default());
    let name = node.name_any();
    let field = |key: &str| (key == "metadata.name").then_some(name.as_str());
    (!labels.is_empty() || !fields.is_empty())
        && labels.iter().all(|asked| meets(node.labels().get(&asked.key).map(String::as_str), asked))
        && fields.iter().all(|asked| meets(field(&asked.key), asked))
}

fn meets(found: Option<&str>, asked: &NodeSelectorRequirement) -> bool {
    let values = asked.values.as_deref().unwrap_or_default();
    let listed = found.is_some_and(|found| values.iter().any(|value| value == found));
    let numbers = || {
        let [value] = values else { return None };
        Some((found?.parse::<i64>().ok()?, value.parse::<i64>().ok()?))
    };
    match asked.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => found.is_some(),
        "DoesNotExist" => found.is_none(),
        "Gt" => numbers().is_some_and(|(found, value)| found > value),
        "Lt" => numbers().is_some_and(|(found, value)| found < value),
        _ => false,
    }
}

fn tolerates(toleration: &Toleration, key: &str, value: &str, effect: &str) -> bool {
    let exists = toleration.operator.as_deref() == Some("Exists");
    let key_matches = match toleration.key.as_deref() {
        None | Some("") => exists,
        Some(own) => own == key,
    };
    key_matches
        && (exists || toleration.value.as_deref().unwrap_or_default() == value)
        && toleration.effect.as_deref().is_none_or(|own| own.is_empty() || own == effect)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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

    #[test]
    fn required_affinity_is_read_as_the_scheduler_does() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "a", "labels": {"zone": "x", "cores": "16"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }))
        .unwrap();
        let ask = |key: &str, operator: &str, values: &[&str]| json!({"key": key, "operator": operator, "values": values});
        let labels = |all: &[serde_json::Value]| json!({"matchExpressions": all});
        for (terms, expected) in [
            (json!([labels(&[ask("zone", "In", &["x", "y"])])]), true),
            (json!([labels(&[ask("zone", "In", &["y"])])]), false),
            (json!([labels(&[ask("zone", "NotIn", &["x"])])]), false),
            (json!([labels(&[ask("none", "NotIn", &["x"])])]), true),
            (json!([labels(&[ask("zone", "Exists", &[])])]), true),
            (json!([labels(&[ask("zone", "DoesNotExist", &[])])]), false),
            (json!([labels(&[ask("cores", "Gt", &["15"])])]), true),
            (json!([labels(&[ask("cores", "Gt", &["16"])])]), false),
            (json!([labels(&[ask("cores", "Lt", &["17"])])]), true),
            (json!([labels(&[ask("zone", "Gt", &["1"])])]), false),
            (json!([labels(&[ask("zone", "Resembles", &["x"])])]), false),
            // All of a term, and any of the terms.
            (json!([labels(&[ask("zone", "Exists", &[]), ask("cores", "In", &["8"])])]), false),
            (json!([labels(&[ask("zone", "In", &["y"])]), labels(&[ask("cores", "In", &["16"])])]), true),
            (json!([{"matchFields": [ask("metadata.name", "In", &["a"])]}]), true),
            (json!([{"matchFields": [ask("metadata.name", "In", &["b"])]}]), false),
            (json!([{}]), false),
            (json!([]), false),
        ] {
            let spec: PodSpec =
                serde_json::from_value(json!({"containers": [], "affinity": {"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}))
                .unwrap();
            let found = excluded(&node, &spec);
            assert_eq!(found.is_none(), expected, "{terms}");
            assert!(found.is_none_or(|why| why == Excluded::Affinity));
        }
    }
}
