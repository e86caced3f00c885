//! Nodes that take the pods of a template, and why others do not. Pure.
//!
//! Looked at are, in this order: whether the node is ready and not cordoned, its selector and required affinity (as the
//! scheduler of Kubernetes reads them), its taints, whether it offers the extended resources, and whether it has just refused a pod of the same FaSTPod. Preferred affinity
//! and pod affinity are not.

use crate::kubernetes::dra::claim::whole;
pub use gshare_openfaas::kubernetes::nodes::{Excluded, closed, slim};
use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Toleration};
use kube::ResourceExt as _;
use std::collections::BTreeMap;

/// Why no pod of this template goes to the node now; `failed` has what became of pods at nodes, by their names.
pub fn excluded(node: &Node, spec: &PodSpec, failed: &BTreeMap<String, String>) -> Option<Excluded> {
    if let Some(closed) = closed(node) {
        return Some(closed);
    }
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
    for taint in taints.filter(|taint| taint.effect != "PreferNoSchedule") {
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
    let mut extended = asked.filter(|(name, _)| is_extended(name)).map(|(name, _)| name);
    let offers =
        |name: &String| offered.and_then(|all| all.get(name)).and_then(|quantity| whole(&quantity.0));
    if let Some(name) = extended.find(|name| offers(name).is_none_or(|count| count == 0)) {
        return Some(Excluded::Resource(name.clone()));
    }
    failed.get(&node.name_any()).cloned().map(Excluded::Failed)
}

/// Answers if a resource is of a device plugin: its name has a domain that is not Kubernetes' own.
fn is_extended(name: &str) -> bool {
    name.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"))
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
            let found = excluded(&node, &spec, &BTreeMap::new());
            assert_eq!(found.is_none(), expected, "{terms}");
            assert!(found.is_none_or(|why| why == Excluded::Affinity));
        }
    }
}
