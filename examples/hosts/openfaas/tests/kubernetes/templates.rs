//! Pod templates of functions, the nodes that take them, and functions of other namespaces.

use super::common::within;
use super::kubelet::On::{Any, Mock};
use super::kubelet::{Cluster, EVENTS, NAMESPACE, node_of};
use super::objects::{at, condition, object};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

const ALL_RBAC: &str = include_str!("../../../../kubernetes/all-namespaces/rbac.yaml");
const ALL: [&str; 2] = ["--set", "host.kubernetes.all_namespaces=true"];

fn share(quota: &str) -> Value {
    json!({ "quota": quota, "sm": "50", "memory": "1GiB" })
}

#[test]
fn a_template_gives_the_pod_its_volumes_account_labels_and_further_containers() {
    let (cluster, host) = Cluster::with_host(1, Any);
    let template = json!({
        "metadata": { "labels": { "app": "rnnt" }, "annotations": { "example.com/note": "x" } },
        "spec": {
            "serviceAccountName": "rnnt", "imagePullSecrets": [{ "name": "registry" }], "priorityClassName": "high",
            "volumes": [{ "name": "models", "persistentVolumeClaim": { "claimName": "models" } }],
            "containers": [
                { "name": "sidecar", "image": "localhost/s:1", "env": [{ "name": "GSHARE_QUOTA", "value": "100%" }] },
                { "name": "function", "ports": [{ "containerPort": 5000 }], "workingDir": "/srv",
                  "env": [{ "name": "NODE", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }],
                  "volumeMounts": [{ "name": "models", "mountPath": "/models" }],
                  "securityContext": { "runAsUser": 1000 } },
            ],
        },
    });
    let spec = json!({ "share": share("0.4"), "template": template, "limits": { "memory": "1Gi" } });
    let class = json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": { "name": "high" }, "value": 1 });
    cluster.server.put("/apis/scheduling.k8s.io/v1/priorityclasses/high", &class);
    cluster.put("f", &spec);
    // The program listens at the port of its container, and the host calls it there.
    within(|| host.call("POST", "/function/f", "").0 == 200);
    let pod = cluster.pods().remove(0);
    let (labels, spec) = (pod.metadata.labels.clone().unwrap(), pod.spec.clone().unwrap());
    assert_eq!((labels["app"].as_str(), labels["gshare.io/function"].as_str()), ("rnnt", "f"));
    let notes = pod.metadata.annotations.unwrap();
    assert!(
        notes.contains_key("example.com/note") && notes.contains_key("gshare.io/environment"),
        "{notes:?}"
    );
    assert_eq!(spec.service_account_name.as_deref(), Some("rnnt"));
    assert_eq!(spec.automount_service_account_token, Some(true), "an account is named for its token");
    assert_eq!(spec.image_pull_secrets.unwrap()[0].name, "registry");
    assert!(spec.volumes.unwrap().iter().any(|volume| volume.name == "models"));
    let names: Vec<_> = spec.containers.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["function", "sidecar"]);
    let (program, sidecar) = (&spec.containers[0], &spec.containers[1]);
    let security = program.security_context.clone().unwrap();
    assert_eq!((security.run_as_user, security.allow_privilege_escalation), (Some(1000), Some(false)));
    assert_eq!(program.working_dir.as_deref(), Some("/srv"));
    let variable = |of: &k8s_openapi::api::core::v1::Container, name: &str| {
        let found: Vec<_> = of.env.iter().flatten().filter(|one| one.name == name).collect();
        assert_eq!(found.len(), 1, "{name}");
        found[0].value.clone()
    };
    assert_eq!(variable(program, "NODE"), None, "a value from a field");
    assert_eq!(variable(program, "PORT").as_deref(), Some("5000"));
    // All containers of a pod share its share, and none gives itself another.
    assert_eq!(variable(sidecar, "GSHARE_QUOTA"), variable(program, "GSHARE_QUOTA"));
    assert_eq!(variable(sidecar, "GSHARE_RUN"), variable(program, "GSHARE_RUN"));
    // A fault in a changed template leaves the pods, and is said by its field, in an Event too.
    cluster.edit("f", &json!({ "template": { "spec": { "nodeSelecter": { "a": "b" } } } }));
    cluster.degraded("f", |why| why.starts_with("spec.template.spec.nodeSelecter: is no field"));
    assert_eq!(host.call("POST", "/function/f", "").0, 200);
    // The Event follows the status.
    within(|| {
        cluster.server.list::<Value>(EVENTS).iter().any(|event| {
            event["type"] == "Warning"
                && event["regarding"]["name"] == "f"
                && event["regarding"]["kind"] == "GpuFunction"
                && event["note"].as_str().unwrap().starts_with("spec.template.spec.nodeSelecter")
        })
    });
}

#[test]
fn pods_go_to_nodes_that_their_template_asks_for_and_tolerates_and_say_why_there_is_none() {
    let cluster = Cluster::start(3, Any);
    let taints = json!([{ "key": "team", "value": "b", "effect": "NoSchedule" },
        { "key": "nvidia.com/gpu", "effect": "NoSchedule" }]);
    cluster.node(1).edit(&json!({ "metadata": { "labels": { "zone": "x" } } }));
    cluster.node(2).edit(&json!({ "metadata": { "labels": { "zone": "x" } } }));
    cluster.node(2).edit(&json!({ "spec": { "taints": taints } }));
    let host = cluster.host(&[]);
    let put = |name: &str, spec: Value, replicas: u32| {
        let all = json!({ "share": share("0.4"), "replicas": replicas, "template": { "spec": spec } });
        cluster.put(name, &all);
    };
    let zone = |zone: &str| json!({ "nodeSelector": { "zone": zone } });
    put("f", zone("x"), 2);
    within(|| cluster.pods().len() == 2);
    assert!(cluster.pods().iter().all(|pod| node_of(pod) == "n1"), "the third is tainted");
    // With a toleration the tainted node is taken, since the first is full.
    let mut tolerant = zone("x");
    tolerant["tolerations"] = json!([{ "key": "team", "operator": "Exists" }]);
    put("g", tolerant, 2);
    within(|| cluster.pods().iter().filter(|pod| node_of(pod) == "n2").count() == 2);
    put("h", zone("y"), 1);
    cluster.degraded("h", |why| why.contains("3 of 3 nodes are out"));
    let (_, why) = condition(&cluster.status("h"), "Degraded").unwrap();
    assert!(why.ends_with("3 not selected by the nodeSelector"), "{why}");
    // A changed label of a node is enough.
    cluster.node(0).edit(&json!({ "metadata": { "labels": { "zone": "y" } } }));
    within(|| cluster.pods().iter().any(|pod| node_of(pod) == "n0"));
    cluster.well("h");
    assert_eq!(host.call("POST", "/function/h", "").0, 200);
}

#[test]
fn functions_of_all_namespaces_are_told_apart_and_pay_as_the_tenant_of_their_namespace() {
    const TEAM: &str = "/apis/gshare.io/v1alpha1/namespaces/team/gpufunctions";
    let cluster = Cluster::start(1, Mock);
    cluster.mock().allow(ALL_RBAC);
    let first = cluster.host(&ALL);
    let of_team = |name: &str, more: Value| {
        let mut spec = json!({ "share": share("0.3") });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut object = object(name, &spec);
        object["metadata"]["namespace"] = json!("team");
        object
    };
    cluster.put("f", &json!({ "share": share("0.3") }));
    cluster.server.put(&format!("{TEAM}/f"), &of_team("f", json!({})));
    within(|| first.call("POST", "/function/f", "").0 == 200);
    within(|| first.call("POST", "/function/f.team", "").0 == 200);
    let pods = || cluster.server.list::<Pod>("/api/v1/pods");
    let of = |namespace: &str| {
        let here = |pod: &Pod| pod.metadata.namespace.as_deref() == Some(namespace);
        pods().into_iter().filter(here).map(|pod| pod.metadata.name.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((of(NAMESPACE).len(), of("team").len()), (1, 1));
    let status =
        |path: &str| cluster.server.ask(&format!("GET {path}"), &Value::Null).unwrap()["status"].take();
    within(|| status(&format!("{TEAM}/f"))["readyReplicas"] == 1);
    // The next leader takes both over.
    let before = (of(NAMESPACE), of("team"));
    drop(first);
    let second = cluster.host(&ALL);
    within(|| second.call("POST", "/function/f.team", "").0 == 200);
    assert_eq!((of(NAMESPACE), of("team")), before);
    // A tenant other than the namespace, and a name that would be another's, are refused.
    cluster.server.put(&format!("{TEAM}/g"), &of_team("g", json!({ "tenant": "rich" })));
    cluster.put("f.team", &json!({ "share": share("0.3") }));
    let says = |path: &str, why: &str| {
        within(|| condition(&status(path), "Degraded").is_some_and(|(_, said)| said.contains(why)));
    };
    says(&format!("{TEAM}/g"), "spec.tenant: `rich`: need `team`");
    says(&at("f.team"), "metadata.name: has a dot");
    let rest = second.call("POST", "/system/functions", r#"{"service":"x.team","image":"localhost/f:1"}"#);
    assert_eq!(rest.0, 400, "{}", rest.1);
    let rest = second.call("POST", "/system/scale-function/f.team", r#"{"replicas":2}"#);
    assert!(rest.0 == 400 && rest.1.starts_with("function: `f.team` is not a DNS label"), "{rest:?}");
    let rest = second.call("DELETE", "/system/functions", r#"{"functionName":"f.team"}"#);
    assert!(rest.0 == 400 && rest.1.starts_with("functionName: `f.team` is not"), "{rest:?}");
    // One of them goes.
    cluster.server.delete(&format!("{TEAM}/f"));
    within(|| of("team").is_empty());
    assert_eq!((second.call("POST", "/function/f", "").0, of(NAMESPACE).len()), (200, 1));
}
