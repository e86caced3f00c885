//! The state of a pod by its status. Pure.

use k8s_openapi::api::core::v1::Pod;

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

/// Answers if a pod will never run again.
pub fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), "Failed" | "Succeeded")
}

/// Why the pod is over, by its kubelet.
pub fn failure(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    let said =
        [status.and_then(|status| status.reason.clone()), status.and_then(|status| status.message.clone())];
    let said: Vec<_> = said.into_iter().flatten().filter(|text| !text.is_empty()).collect();
    if said.is_empty() { phase(pod).to_owned() } else { said.join(": ") }
}

/// Answers if a pod is being deleted.
pub fn is_going(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// The node that it is bound to.
pub fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

/// Answers if a pod takes requests.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !is_going(pod) && conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}
