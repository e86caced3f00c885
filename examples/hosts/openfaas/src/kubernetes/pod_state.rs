//! The state of a pod by its status. Pure.

use super::template::CONTAINER;
use k8s_openapi::api::core::v1::Pod;

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

/// Answers if the program of a pod will never run again. Other containers may.
pub fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), "Failed" | "Succeeded") || exit_code(pod).is_some()
}

/// Answers if a container of a pod still runs, by its kubelet.
pub fn still_runs(pod: &Pod) -> bool {
    let status = pod.status.as_ref().filter(|_| !matches!(phase(pod), "Failed" | "Succeeded"));
    let lists = status.into_iter().flat_map(|of| [&of.container_statuses, &of.init_container_statuses]);
    lists
        .flat_map(|list| list.iter().flatten())
        .any(|of| of.state.as_ref().is_some_and(|s| s.running.is_some()))
}

/// How the program of a pod that is over has ended, by its kubelet.
pub fn end_of(pod: &Pod) -> Result<(), String> {
    match exit_code(pod) {
        code if code == Some(0) || phase(pod) == "Succeeded" => Ok(()),
        Some(code) => Err(format!("exit status: {code}")),
        None => Err(failure(pod)),
    }
}

fn exit_code(pod: &Pod) -> Option<i32> {
    let mut all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let program = all.find(|of| of.name == CONTAINER)?;
    Some(program.state.as_ref()?.terminated.as_ref()?.exit_code)
}

/// Why a kubelet has refused a pod before it started a container.
pub fn refusal(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let begun =
        status.container_statuses.iter().chain(&status.init_container_statuses).any(|all| !all.is_empty());
    (phase(pod) == "Failed" && !begun && status.reason.is_some()).then(|| failure(pod))
}

/// Why the pod is over, by its kubelet.
fn failure(pod: &Pod) -> String {
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

/// Answers if a pod takes requests.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !is_going(pod) && conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_sidecar_runs_on_after_the_program() {
        let one = |name: &str, state: &Value| json!({ "name": name, "ready": false, "image": "", "imageID": "", "restartCount": 0, "state": state });
        let (ended, runs) = (json!({ "terminated": { "exitCode": 3 } }), json!({ "running": {} }));
        let pod = |phase: &str, sidecar: &Value, init: &Value| -> Pod {
            let status = json!({ "phase": phase, "containerStatuses": [one("function", &ended), one("s", sidecar)],
                "initContainerStatuses": [one("i", init)] });
            serde_json::from_value(json!({ "metadata": {}, "status": status })).unwrap()
        };
        for (pod, expected) in [
            (pod("Running", &runs, &ended), true),
            (pod("Running", &ended, &runs), true),
            (pod("Running", &ended, &ended), false),
            (pod("Failed", &runs, &ended), false),
        ] {
            assert!(is_over(&pod));
            assert_eq!(still_runs(&pod), expected, "{:?}", pod.status);
        }
    }
}
