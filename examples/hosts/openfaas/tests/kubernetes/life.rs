//! Functions in pods, from their deployment to their end.

use super::common::{Provider, within};
use super::kubelet::Cluster;
use super::kubelet::On::Any;
use gshare_openfaas::kubernetes::run_of;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

pub(crate) const SHARE: &str = r#","annotations":{"fastgshare/gpu_quota_request":"0.4","fastgshare/gpu_sm_partition":"50","fastgshare/gpu_mem":"1GiB"}"#;

pub(crate) fn deploy(host: &Provider, name: &str, more: &str) {
    let program = env!("CARGO_BIN_EXE_gpu_function");
    let body =
        format!(r#"{{"service":"{name}","image":"localhost/{name}:1","envProcess":"{program}"{more}}}"#);
    let (status, said) = host.call("POST", "/system/functions", &body);
    assert_eq!(status, 202, "{said}");
}

#[test]
fn a_function_without_a_share_is_measured_in_pods() {
    let (cluster, host) = Cluster::with_host(1, Any);
    deploy(&host, "f", r#","annotations":{"gshare/slo":"500ms"}"#);
    let (status, answer) = host.call("POST", "/function/f", "");
    assert_eq!(status, 200, "{answer}");
    let (_, seen) = host.call("GET", "/system/function/f", "");
    let seen: Value = serde_json::from_str(&seen).unwrap();
    // The daemon of its node knows the memory of its trials: 64 MiB of weights, and a quarter and 64 MiB more.
    let memory = seen["gshare"]["memory_bytes"].as_u64().unwrap() >> 20;
    assert!((144..200).contains(&memory), "{seen}");
    assert!(seen["gshare"]["profile"].is_object() || seen["gshare"]["profile"].is_array(), "{seen}");
    within(|| {
        cluster.pods().iter().all(|pod| pod.metadata.labels.as_ref().unwrap()["gshare.io/version"] != "trial")
    });
}

fn variable(pod: &Pod, name: &str) -> Option<String> {
    let all = pod.spec.as_ref()?.containers[0].env.as_ref()?;
    all.iter().find(|one| one.name == name)?.value.clone()
}

#[test]
fn a_pod_without_a_gpu_sees_none_a_container_gains_no_privileges_and_no_run_can_be_computed() {
    let (cluster, host) = Cluster::with_host(1, Any);
    let env = r#""envVars":{"NVIDIA_VISIBLE_DEVICES":"all","KERNELS":"0"}"#;
    deploy(
        &host,
        "plain",
        &format!(r#",{env},"readOnlyRootFilesystem":true,"annotations":{{"gshare/profile":"none"}}"#),
    );
    host.replicas("plain", 1);
    deploy(&host, "f", SHARE);
    host.replicas("f", 1);
    for pod in cluster.pods() {
        let plain = pod.metadata.labels.as_ref().unwrap()["gshare.io/function"] == "plain";
        let security = pod.spec.as_ref().unwrap().containers[0].security_context.clone().unwrap();
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.seccomp_profile.unwrap().type_, "RuntimeDefault");
        assert_eq!(security.read_only_root_filesystem, Some(plain));
        let seen = variable(&pod, "NVIDIA_VISIBLE_DEVICES");
        assert_eq!(seen.as_deref(), Some(if plain { "void" } else { "0" }));
        let name = format!("gshare-functions/{}", pod.metadata.name.as_ref().unwrap());
        let run = variable(&pod, "GSHARE_RUN");
        assert!(run.is_some() != plain && run != Some(run_of("", &name).to_string()), "{run:?}");
    }
}

#[test]
fn a_function_is_deployed_by_rest_answers_is_scaled_and_deleted_and_nothing_is_left() {
    let (cluster, host) = Cluster::with_host(2, Any);
    deploy(&host, "f", SHARE);
    let (status, answer) = host.call("POST", "/function/f", "");
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert!(answer["gpu_ms"].as_f64().unwrap() >= 10.0, "{answer}");
    // The daemon of its node knows it by its pod, with the share that the platform booked.
    let pods = cluster.pods();
    let (pod, spec) = (&pods[0], pods[0].spec.as_ref().unwrap());
    let node = cluster.node(usize::from(spec.node_name.as_deref() == Some("n1")));
    let client = &node.daemon().clients[0];
    assert_eq!(client.name, format!("gshare-functions/{}", pod.metadata.name.as_deref().unwrap()));
    let limit = client.memory_limit_bytes.unwrap().get();
    assert!((client.quota_request - 0.4).abs() < 1e-9 && limit == 1 << 30, "{client:?}");

    let spec = || cluster.object("f")["spec"].take();
    assert_eq!(spec()["share"], json!({ "quota": "0.4", "sm": "50", "memory": "1GiB" }));
    let before = cluster.names();
    host.scale("f", 3);
    host.replicas("f", 3);
    cluster.ready(3);
    let names = cluster.names();
    assert!(names.contains(&before[0]));
    // The watch of the host's own writes deploys nothing again.
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!((spec()["replicas"].as_u64(), cluster.names()), (Some(3), names));
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
    let (status, said) = host.call("DELETE", "/system/functions", r#"{"functionName":"f"}"#);
    assert_eq!(status, 202, "{said}");
    within(|| cluster.pods().is_empty());
    assert_eq!(host.call("POST", "/function/f", "").0, 503);
}
