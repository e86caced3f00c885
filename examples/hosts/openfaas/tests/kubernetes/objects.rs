//! `GpuFunction`s that clients of the API server write.

use super::common::within;
use super::kubelet::On::{Any, Mock};
use super::kubelet::{Cluster, FUNCTIONS};
use super::life::{SHARE, deploy};
use super::support::api_server::documents;
use clap::Parser as _;
use gshare_openfaas::Options;
use gshare_openfaas::deployment::Plan;
use gshare_openfaas::kubernetes::function::{GpuFunction, crd};
use gshare_openfaas::kubernetes::pods::suits;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub(crate) fn object(name: &str, spec: &Value) -> Value {
    let mut all = json!({ "image": "localhost/f:1", "args": [env!("CARGO_BIN_EXE_gpu_function")] });
    all.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({ "apiVersion": "gshare.io/v1alpha1", "kind": "GpuFunction", "spec": all,
        "metadata": { "name": name, "namespace": "gshare-functions", "generation": 1 } })
}

pub(crate) fn at(name: &str) -> String {
    format!("{FUNCTIONS}/{name}")
}

/// Reason and message of a condition that is true.
pub(crate) fn condition(status: &Value, kind: &str) -> Option<(String, String)> {
    let all = status["conditions"].as_array()?;
    let found = all.iter().find(|one| one["type"] == kind && one["status"] == "True")?;
    Some((found["reason"].as_str()?.to_owned(), found["message"].as_str()?.to_owned()))
}

#[test]
fn the_definition_that_is_checked_in_is_that_of_the_program() {
    assert_eq!(crd().unwrap(), include_str!("../../../../kubernetes/host/crd.yaml"));
}

#[test]
fn the_manifests_start_the_program_as_it_is_and_the_examples_are_functions() {
    let objects = documents(include_str!("../../../../kubernetes/host/host.yaml"));
    let deployment = objects.iter().find(|object| object["kind"] == "Deployment").unwrap();
    let words = deployment["spec"]["template"]["spec"]["containers"][0]["command"].as_array().unwrap();
    let options = Options::try_parse_from(words.iter().map(|word| word.as_str().unwrap())).unwrap();
    assert!(options.kubernetes);
    let set = |key: &str| options.set.iter().find(|(own, _)| own == key).map(|(_, value)| value.clone());
    assert_eq!(set("host.kubernetes.namespace"), Some(json!("gshare-functions")));
    assert_eq!(set("host.kubernetes.lease"), Some(json!("gshare-system/gshare-up")));
    assert_eq!(set("platform.start_timeout_ns"), Some(json!(600_000_000_000_u64)));
    // The replica that waits is never ready.
    assert_eq!(deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"], "100%");
    for example in documents(include_str!("../../../../kubernetes/host/example.yaml")) {
        let read: GpuFunction = serde_json::from_value(example.clone()).unwrap();
        assert_eq!(json!(read.spec), example["spec"], "no other field");
        let deployment = read.deployment();
        let plan = Plan::of(&deployment, &BTreeMap::new()).map_err(|error| error.message).unwrap();
        suits(&plan, &deployment).map_err(|error| error.message).unwrap();
    }
}

#[test]
fn a_deployment_that_pods_cannot_be_is_refused_by_name() {
    let (cluster, host) = Cluster::with_host(1, Any);
    let refused = |more: &str, why: &str| {
        let body = format!(r#"{{"service":"f","image":"localhost/f:1",{more}}}"#);
        let (status, said) = host.call("POST", "/system/functions", &body);
        assert!(status == 400 && said.contains(why), "{status}: {said}");
    };
    let profile = "need auto, none, or a file below /etc/gshare/profiles";
    // The host's own files are nobody's to name, whether they are there or not.
    for (annotation, value, need) in [
        ("devices", "2", "a pod has one GPU: need 1"),
        ("probe_body", "/etc/hostname", "a function in pods is measured without a body"),
        ("profile", "/etc/hostname", profile),
        ("profile", "/etc/gshare/profiles/../credentials", profile),
        ("dag", "/etc/hostname", "stages in pods"),
        ("model", "/etc/hostname", "a pod has its model"),
    ] {
        let why = format!("gshare/{annotation}: `{value}`: {need}");
        refused(&format!(r#""annotations":{{"gshare/{annotation}":"{value}"}}"#), &why);
    }
    let template = r#""annotations":{"gshare/pod_template":"{}"}"#;
    refused(template, "gshare/pod_template: write a GpuFunction with `spec.template`");
    let workers = r#""annotations":{"gshare/workload":"training","gshare/workers":"2"}"#;
    refused(workers, "annotations: gshare/workers");
    refused(r#""secrets":["none"]"#, "secrets: unknown secret `none`");
    let (status, said) = host.call("POST", "/system/functions", r#"{"service":"f","image":"/bin/sleep 9"}"#);
    assert!(status == 400 && said.contains("image: `/bin/sleep 9`: need a container image"), "{said}");
    assert!(cluster.server.list::<Value>(FUNCTIONS).is_empty());
}

#[test]
fn an_object_is_deployed_scaled_changed_and_deleted_like_a_deployment_by_rest() {
    let (cluster, host) = Cluster::with_host(2, Any);
    let spec = json!({ "share": { "quota": "0.4", "sm": "50", "memory": "1GiB" } });
    cluster.put("f", &spec);
    within(|| host.call("POST", "/function/f", "").0 == 200);
    within(|| condition(&cluster.status("f"), "Ready").is_some_and(|(reason, _)| reason == "Serving"));
    let status = cluster.status("f");
    assert_eq!((&status["readyReplicas"], &status["selector"]), (&json!(1), &json!("gshare.io/function=f")));
    // As `kubectl scale` and an autoscaler do.
    cluster.edit("f", &json!({ "replicas": 2 }));
    cluster.ready(2);
    host.replicas("f", 2);
    cluster.edit("f", &json!({ "replicas": null }));
    cluster.ready(1);
    cluster.edit("f", &json!({ "replicas": 2 }));
    cluster.ready(2);
    host.replicas("f", 2);
    let before = cluster.names();
    cluster.edit("f", &json!({ "env": { "KERNELS": "1" } }));
    within(|| cluster.names().iter().all(|name| !before.contains(name)));
    host.replicas("f", 2);
    cluster.delete("f");
    within(|| cluster.pods().is_empty());
    assert_eq!(host.call("GET", "/system/function/f", "").0, 404);
}

#[test]
fn an_object_that_is_made_again_in_a_gap_of_the_watch_is_deployed_and_a_deleted_one_goes_once_the_server_says_so()
 {
    let (cluster, host) = Cluster::with_host(1, Mock);
    let spec = json!({ "share": { "quota": "0.3", "sm": "50", "memory": "1GiB" } });
    let of = |name: &str, uid: &str| {
        let mut object = object(name, &spec);
        object["metadata"]["uid"] = json!(uid);
        object
    };
    for name in ["f", "g"] {
        cluster.mock().lock().put(&at(name), of(name, "first"));
        for kernels in ["1", "2"] {
            cluster.mock().lock().edit(&at(name), &json!({ "spec": { "env": { "KERNELS": kernels } } }));
        }
    }
    let serves =
        |name: &str| condition(&cluster.status(name), "Ready").is_some_and(|(why, _)| why == "Serving");
    within(|| serves("f") && serves("g"));
    let kernels = |wanted: &str| {
        let of = |pod: &Pod| {
            let all = pod.spec.as_ref().unwrap().containers[0].env.clone().unwrap();
            all.into_iter().find(|one| one.name == "KERNELS").and_then(|one| one.value)
        };
        let pods = cluster.pods();
        pods.len() == 1 && pods.iter().all(|pod| of(pod).as_deref() == Some(wanted))
    };
    let asks = || {
        let api = cluster.mock().lock();
        api.seen.iter().filter(|seen| seen.line() == format!("GET {}", at("g"))).count()
    };
    let before = asks();
    {
        let mut api = cluster.mock().lock();
        api.expire_watches(FUNCTIONS);
        for name in ["f", "g"] {
            api.delete(&at(name));
        }
        let mut again = of("f", "second");
        again["spec"]["env"] = json!({ "KERNELS": "3" });
        api.put(&at("f"), again);
        api.fail(format!("GET {}", at("g")), 500, "InternalError");
    }
    within(|| kernels("3"));
    within(|| host.call("GET", "/system/function/g", "").0 == 404);
    assert_eq!(asks(), before + 2, "one answer was an error");
}

#[test]
fn an_object_with_a_fault_says_the_field_and_goes_on_once_it_is_mended() {
    let (cluster, host) = Cluster::with_host(1, Any);
    let share = json!({ "quota": "0.4" });
    cluster.put("f", &json!({ "slo": "soon", "share": share }));
    cluster.degraded("f", |why| why.starts_with("spec.slo: `soon`"));
    assert_eq!(condition(&cluster.status("f"), "Ready"), None);
    cluster.edit("f", &json!({ "slo": null }));
    within(|| host.call("POST", "/function/f", "").0 == 200);
    cluster.well("f");
    // A later fault leaves the version that runs.
    cluster.edit("f", &json!({ "share": { "quota": "7" } }));
    cluster.degraded("f", |why| why.starts_with("spec.share.quota"));
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
    // Larger than every node.
    cluster.put("big", &json!({ "share": { "quota": "0.4", "memory": "900GiB" } }));
    cluster.degraded("big", |why| why.contains("900"));
}

#[test]
fn a_secret_reaches_the_pods_of_its_function_as_an_object() {
    let (cluster, host) = Cluster::with_host(1, Any);
    let (status, said) = host.call("POST", "/system/secrets", r#"{"name":"key","value":"v"}"#);
    assert_eq!(status, 202, "{said}");
    assert!(host.call("GET", "/system/secrets", "").1.contains("key"));
    deploy(&host, "f", &format!(r#"{SHARE},"secrets":["key"]"#));
    host.replicas("f", 1);
    let spec = cluster.pods()[0].spec.clone().unwrap();
    let volume = spec.volumes.unwrap().into_iter().find(|volume| volume.name == "secrets").unwrap();
    let sources = volume.projected.unwrap().sources.unwrap();
    assert_eq!(sources[0].secret.as_ref().unwrap().name, "key");
    let used = host.call("DELETE", "/system/secrets", r#"{"name":"key"}"#);
    assert_eq!(used.0, 409, "{}", used.1);
    assert_eq!(host.call("DELETE", "/system/functions", r#"{"functionName":"f"}"#).0, 202);
    assert_eq!(host.call("DELETE", "/system/secrets", r#"{"name":"key"}"#).0, 202);
    assert_eq!(host.call("GET", "/system/secrets", "").1, "[]");
    let foreign = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "theirs" } });
    cluster.server.put("/api/v1/namespaces/gshare-functions/secrets/theirs", &foreign);
    for (method, body) in [("PUT", r#"{"name":"theirs","value":"v"}"#), ("DELETE", r#"{"name":"theirs"}"#)] {
        let (status, said) = host.call(method, "/system/secrets", body);
        assert!(status == 409 && said.contains("of another client"), "{status}: {said}");
    }
}

#[test]
fn a_function_that_suits_no_device_is_deployed_once_one_comes() {
    let (cluster, host) = Cluster::with_host(1, Any);
    let spec = json!({ "regime": "whole", "share": { "memory": "1GiB" }, "slo": "2s" });
    cluster.put("f", &spec);
    cluster.degraded("f", |why| why.starts_with("spec.regime: `whole`"));
    cluster.node(0).edit(&json!({ "metadata": { "labels": { "gshare.io/regime": "whole" } } }));
    within(|| host.call("POST", "/function/f", "").0 == 200);
    cluster.well("f");
}
