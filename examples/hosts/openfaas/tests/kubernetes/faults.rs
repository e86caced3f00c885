//! Faults of nodes, pods and the API server.

use super::common::within;
use super::kubelet::On::{Any, Mock};
use super::kubelet::{Cluster, DAEMONS, PODS, node_of};
use super::life::{SHARE, deploy};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::time::Duration;

fn number_of(pod: &Pod) -> usize {
    node_of(pod).strip_prefix('n').unwrap().parse().unwrap()
}

fn going(pods: &[Pod]) -> usize {
    pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).count()
}

#[test]
fn the_functions_of_a_lost_node_start_elsewhere_and_it_is_used_again_once_its_pods_have_ended() {
    let (cluster, host) = Cluster::with_f(2, Any);
    let (lost, other) = (number_of(&cluster.pods()[0]), 1 - number_of(&cluster.pods()[0]));
    let node = cluster.node(lost);
    node.cut_off(true);
    node.is_ready(false);
    within(|| cluster.pods().iter().any(|pod| number_of(pod) == other));
    host.replicas("f", 1);
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
    // A pod without room on the other node waits until the old pod on the lost node has ended.
    node.is_ready(true);
    host.scale("f", 3);
    host.replicas("f", 2);
    std::thread::sleep(Duration::from_millis(300));
    let there: Vec<Pod> = cluster.pods().into_iter().filter(|pod| number_of(pod) == lost).collect();
    assert_eq!((there.len(), going(&there)), (1, 1), "its kubelet may still run it");
    node.cut_off(false);
    cluster.ready(3);
    host.replicas("f", 3);
}

#[test]
fn a_cordoned_node_keeps_its_pods_and_gets_no_others() {
    let (cluster, host) = Cluster::with_f(2, Any);
    let first = cluster.pods().remove(0);
    let node = cluster.node(number_of(&first));
    node.edit(&json!({ "spec": { "unschedulable": true } }));
    // A new leader has seen the cordon before its first decision, and takes the pod over.
    drop(host);
    let host = cluster.host(&[]);
    host.replicas("f", 1);
    let there = || cluster.pods().iter().filter(|pod| number_of(pod) == number_of(&first)).count();
    // The other node has room for two.
    host.scale("f", 4);
    host.replicas("f", 3);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((cluster.pods().len(), there(), going(&cluster.pods())), (3, 1, 0));
    assert!(cluster.pods().iter().any(|pod| pod.metadata.name == first.metadata.name), "it runs on");
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
    node.edit(&json!({ "spec": { "unschedulable": null } }));
    host.replicas("f", 4);
    assert_eq!(there(), 2);
}

#[test]
fn a_node_that_refuses_a_pod_gets_no_other_for_a_while() {
    let (cluster, host) = Cluster::with_host(2, Mock);
    cluster.node(0).refuses(true);
    cluster.node(1).refuses(true);
    deploy(&host, "f", SHARE);
    // The first node refuses; then the other one takes all.
    let made = |number: usize| {
        let node = json!(format!("n{number}"));
        cluster.posts().iter().filter(|pod| pod["spec"]["nodeName"] == node).count()
    };
    within(|| made(0) + made(1) > 0);
    let bad = usize::from(made(1) > 0);
    cluster.node(1 - bad).refuses(false);
    host.replicas("f", 1);
    deploy(&host, "g", SHARE);
    host.replicas("g", 1);
    assert_eq!((made(bad), made(1 - bad)), (1, 2));
}

#[test]
fn a_pod_that_ends_while_the_watch_has_a_gap_is_replaced() {
    let (cluster, host) = Cluster::with_f(1, Mock);
    let before = cluster.pods()[0].metadata.name.clone().unwrap();
    {
        let mut api = cluster.mock().lock();
        api.delete(&format!("{PODS}/{before}"));
        api.expire_watches(PODS);
    }
    within(|| cluster.pods().first().is_some_and(|pod| pod.metadata.name.as_ref() != Some(&before)));
    cluster.ready(1);
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
}

#[test]
fn while_the_server_is_away_requests_are_answered_and_pods_are_made_after_it() {
    let (cluster, host) = Cluster::with_host(1, Mock);
    deploy(&host, "f", &format!(r#"{SHARE},"labels":{{"com.openfaas.scale.min":"2"}}"#));
    host.replicas("f", 2);
    let ended = format!("{PODS}/{}", cluster.pods()[0].metadata.name.as_ref().unwrap());
    {
        let mut api = cluster.mock().lock();
        api.deaf = true;
        api.delete(&ended);
    }
    host.replicas("f", 1);
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
    // What cannot be kept is not done.
    let scaled = host.call("POST", "/system/scale-function/f", r#"{"serviceName":"f","replicas":3}"#);
    assert_eq!(scaled.0, 503, "{}", scaled.1);
    within(|| cluster.posts().len() > 2);
    cluster.mock().lock().deaf = false;
    host.replicas("f", 2);
    assert_eq!(cluster.pods().len(), 2);
}

#[test]
fn a_pod_that_nobody_has_is_deleted_and_a_refused_pod_is_told() {
    let (cluster, host) = Cluster::with_host(1, Mock);
    let labels = json!({ "gshare.io/function": "gone" });
    let container = json!({ "name": "function", "image": "x" });
    let stray = json!({ "metadata": { "name": "gone-1", "namespace": "gshare-functions", "labels": labels },
        "spec": { "containers": [container] } });
    cluster.mock().lock().put(&format!("{PODS}/gone-1"), stray);
    within(|| cluster.pods().is_empty());
    cluster.refuse_pods();
    deploy(&host, "f", SHARE);
    within(|| {
        host.call("GET", "/system/function/f", "").1.contains("exceeded quota: pods=0 (403 Forbidden)")
    });
    cluster.mock().lock().admit = None;
    host.replicas("f", 1);
}

#[test]
fn a_pod_that_is_refused_after_an_unanswered_creation_is_deleted_before_its_end() {
    let (cluster, host) = Cluster::with_host(1, Mock);
    cluster.mock().lock().fail(format!("POST {PODS}"), 500, "InternalError");
    cluster.refuse_pods();
    deploy(&host, "f", SHARE);
    within(|| host.call("GET", "/system/function/f", "").1.contains("exceeded quota"));
    let line = format!("DELETE {PODS}/{}", cluster.posts()[0]["metadata"]["name"].as_str().unwrap());
    let api = cluster.mock().lock();
    assert!(api.seen.iter().any(|seen| seen.line() == line), "{line}");
}

#[test]
fn a_function_is_not_measured_on_a_node_whose_daemon_does_not_answer() {
    let cluster = Cluster::start(1, Any);
    cluster.server.delete(&format!("{DAEMONS}/gshared-n0"));
    let host = cluster.host(&[]);
    deploy(&host, "f", r#","annotations":{"gshare/slo":"500ms"}"#);
    cluster.degraded("f", |why| why.starts_with("cannot be measured: the daemon of node n0: need a pod"));
}
