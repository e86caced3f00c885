//! A new leader goes on where an earlier one ended.

use super::common::{Provider, within};
use super::kubelet::On::{Any, Mock};
use super::kubelet::{Cluster, PODS};
use super::life::{SHARE, deploy};
use super::support::api_server::Seen;
use serde_json::{Value, json};
use std::time::Duration;

const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/gshare-system/leases/gshare-up";
pub(crate) const BY_LEASE: [&str; 2] = ["--set", r#"host.kubernetes.lease="gshare-system/gshare-up""#];

/// Writes about pods since the beginning.
fn writes(cluster: &Cluster) -> usize {
    let api = cluster.mock().lock();
    api.seen.iter().filter(|seen| seen.method != "GET" && seen.path.starts_with(PODS)).count()
}

#[test]
fn the_pods_of_a_killed_leader_serve_on_and_strays_end() {
    let cluster = Cluster::start(2, Mock);
    let mut host = cluster.host(&[]);
    deploy(&host, "f", SHARE);
    deploy(&host, "plain", r#","envVars":{"KERNELS":"0"},"annotations":{"gshare/profile":"none"}"#);
    deploy(&host, "measured", r#","annotations":{"gshare/slo":"500ms"}"#);
    host.scale("f", 2);
    host.replicas("f", 2);
    assert_eq!(host.call("POST", "/function/measured", "").0, 200);
    assert_eq!(host.call("POST", "/function/plain/echo", "x").0, 200);
    within(|| cluster.status("measured")["profile"].is_object());
    host.kill();
    // The function is deleted while no host leads.
    let mut before = cluster.names();
    let gone = before.iter().position(|name| name.starts_with("f-")).unwrap();
    cluster.mock().lock().delete(&format!("{PODS}/{}", before.remove(gone)));
    let host = cluster.host(&[]);
    assert!(host.line.contains("3 functions"), "{}", host.line);
    let is_list = |seen: &&Seen| seen.line() == format!("GET {PODS}") && !seen.is_watch();
    let by_pages = |seen: &Seen| seen.query.contains("limit=");
    assert!(cluster.mock().lock().seen.iter().filter(is_list).all(by_pages), "a list takes memory");
    assert_eq!(host.call("POST", "/function/plain/echo", "x"), (200, "x".to_owned()));
    host.replicas("f", 2);
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
    assert_eq!(host.call("POST", "/function/measured", "").0, 200);
    let after = cluster.names();
    assert!(before.iter().all(|name| after.contains(name)), "{before:?}: {after:?}");
    assert_eq!(after.len(), before.len() + 1, "one was missing: {after:?}");
    let (_, seen) = host.call("GET", "/system/function/measured", "");
    let seen: Value = serde_json::from_str(&seen).unwrap();
    assert!(seen["gshare"]["measuring"].is_null(), "it is not measured again: {seen}");
    // Of an older version: it ends, and a new one comes.
    drop(host);
    cluster.edit("f", &json!({ "env": { "KERNELS": "1" } }));
    let host = cluster.host(&[]);
    host.replicas("f", 2);
    within(|| cluster.names().iter().all(|name| !name.starts_with("f-") || !after.contains(name)));
    cluster.ready(4);
}

#[test]
fn a_new_leader_makes_no_pod_on_a_gpu_before_the_end_of_those_that_it_gives_up() {
    // Their node is not ready, or they are of another version.
    for is_lost in [true, false] {
        let (cluster, mut host) = Cluster::with_f(1, Any);
        host.kill();
        let (node, before) = (cluster.node(0), cluster.names());
        node.cut_off(true);
        match is_lost {
            true => node.is_ready(false),
            false => cluster.edit("f", &json!({ "env": { "KERNELS": "1" } })),
        }
        let host = cluster.host(&[]);
        let gpus = if is_lost { "0 GPUs" } else { "1 GPUs" };
        assert!(host.line.contains(gpus) && host.line.contains(" 0 of their pods"), "{}", host.line);
        within(|| cluster.pods().iter().all(|pod| pod.metadata.deletion_timestamp.is_some()));
        node.is_ready(true);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(cluster.names(), before, "its kubelet may still run it");
        node.cut_off(false);
        host.replicas("f", 1);
        assert!(!cluster.names().iter().any(|name| before.contains(name)));
    }
}

#[test]
fn a_job_goes_on_under_a_new_leader_and_one_that_is_done_does_not_start_again() {
    let cluster = Cluster::start(1, Mock);
    let mut host = cluster.host(&[]);
    let annotations =
        r#""gshare/workload":"training","fastgshare/gpu_quota_request":"0.3","fastgshare/gpu_mem":"1GiB""#;
    for (name, program) in [("long", "/bin/sleep 300"), ("short", "/bin/true"), ("late", "/bin/sleep 300")] {
        let body = format!(
            r#"{{"service":"{name}","image":"localhost/{name}:1","envProcess":"{program}","annotations":{{{annotations}}}}}"#
        );
        let (status, said) = host.call("POST", "/system/functions", &body);
        assert_eq!(status, 202, "{said}");
    }
    let state = |name: &str| {
        let all = cluster.status(name)["conditions"].clone();
        let ready = all.as_array().into_iter().flatten().find(|one| one["type"] == "Ready");
        ready.map(|one| one["reason"].as_str().unwrap().to_owned()).unwrap_or_default()
    };
    let runs = || {
        let mut all = cluster.names();
        all.retain(|name| name.starts_with("long-"));
        all
    };
    let all_begun = || ["long", "late"].iter().all(|name| state(name) == "Serving");
    within(|| state("short") == "Completed" && all_begun());
    let (before, made) = (runs(), cluster.posts().len());
    assert_eq!((before.len(), made), (1, 3));
    host.kill();
    // The job ends while no host leads.
    let late = cluster.names().into_iter().find(|name| name.starts_with("late-")).unwrap();
    cluster.mock().lock().edit(&format!("{PODS}/{late}"), &json!({ "status": { "phase": "Succeeded" } }));
    let host = cluster.host(&[]);
    assert!(host.line.contains(" 1 of their pods"), "{}", host.line);
    within(|| state("late") == "Completed");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((runs(), cluster.posts().len(), state("short").as_str()), (before, made, "Completed"));
}

#[test]
fn a_new_leader_goes_on_with_the_version_that_serves_while_the_newest_has_a_fault() {
    let (cluster, mut host) = Cluster::with_f(1, Any);
    within(|| cluster.status("f")["serving"]["share"]["quota"] == "0.4");
    host.kill();
    let before = cluster.names();
    // The fault comes while no host leads.
    cluster.edit("f", &json!({ "slo": "soon" }));
    let host = cluster.host(&[]);
    host.replicas("f", 1);
    assert_eq!((host.call("POST", "/function/f", "").0, cluster.names()), (200, before.clone()));
    cluster.degraded("f", |_| true);
    assert_eq!(cluster.status("f")["serving"]["slo"], Value::Null);
    cluster.edit("f", &json!({ "slo": null }));
    cluster.well("f");
    assert_eq!(cluster.names(), before, "it is the version that serves");
}

fn ends(host: &mut Provider) {
    within(|| host.child.try_wait().unwrap().is_some());
}

#[test]
fn a_leader_that_gives_its_lease_back_is_followed_and_one_that_has_lost_it_writes_nothing() {
    let cluster = Cluster::start(1, Mock);
    let mut first = cluster.host(&BY_LEASE);
    deploy(&first, "f", SHARE);
    first.replicas("f", 1);
    let pods = cluster.names();
    let follows = std::thread::scope(|scope| {
        // It says its address once it leads.
        let second = scope.spawn(|| cluster.host(&BY_LEASE));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!second.is_finished());
        let pid = rustix::process::Pid::from_child(&first.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        ends(&mut first);
        second.join().unwrap()
    });
    assert_eq!(follows.call("POST", "/function/f", "").0, 200);
    assert_eq!(cluster.names(), pods);
    // Another takes the lease: this one ends, and the pods stay.
    let mut follows = follows;
    cluster.mock().lock().edit(LEASE, &json!({ "spec": { "holderIdentity": "other" } }));
    ends(&mut follows);
    let before = writes(&cluster);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!((writes(&cluster), cluster.names()), (before, pods));
}
