//! Manners of an API server which revealed faults of ours: the mock has the manners of the real server.

use super::cluster::Cluster;
use super::decisions::{fastpod, node};
use serde_json::{Value, json};
use std::time::Duration;

const ROLE: &str = r#"
rules:
  - apiGroups: [""]
    resources: [pods]
    verbs: [get, list, watch, create, update, delete]
  - apiGroups: [gshare.io]
    resources: [fastpods/status]
    verbs: [update]
  - apiGroups: [apps]
    resources: [deployments/scale]
    verbs: [get]
"#;
const PODS: &str = "/api/v1/namespaces/team/pods";

fn pod(name: &str) -> Value {
    json!({ "metadata": { "name": name, "namespace": "team" }, "spec": { "containers": [{ "name": "c", "image": "x" }] } })
}

#[tokio::test]
async fn quantities_are_stored_in_their_shortest_form_and_empty_fields_not_at_all() {
    for api in Cluster::all(ROLE).await {
        let mut one = pod("p");
        one["metadata"]["labels"] = json!({});
        one["spec"]["volumes"] = json!([{ "name": "v", "emptyDir": {} }]);
        one["spec"]["containers"][0]["env"] = json!([]);
        one["spec"]["containers"][0]["resources"] =
            json!({ "limits": { "memory": "2048Mi", "gshare.io/hook": "1000" } });
        let (status, made) = api.ask(&format!("POST {PODS}"), one).await;
        assert_eq!(status, 201, "{made}");
        let container = &made["spec"]["containers"][0];
        assert_eq!(container["resources"]["limits"], json!({ "memory": "2Gi", "gshare.io/hook": "1k" }));
        assert!(container.get("env").is_none() && made["metadata"].get("labels").is_none(), "{made}");
        assert_eq!(
            made["spec"]["volumes"][0]["emptyDir"],
            json!({}),
            "a field whose presence says something"
        );
        let mut with_gpus = json!(node("a", 1, 16384));
        with_gpus["status"]["allocatable"] = json!({ "cpu": "4000" });
        api.put("/api/v1/nodes/a", with_gpus).await;
        assert_eq!(api.object("/api/v1/nodes/a").await.unwrap()["status"]["allocatable"]["cpu"], "4k");
    }
}

#[tokio::test]
async fn an_update_needs_the_version_that_is_there_and_a_valid_object() {
    for api in Cluster::all(ROLE).await {
        api.define(include_str!("../../kubernetes/fastpod/crd.yaml")).await;
        let path = "/apis/gshare.io/v1alpha1/namespaces/team/fastpods/f";
        api.put(path, json!(fastpod("f", 1, [12, 30, 1024]))).await;
        let mut told = api.object(path).await.unwrap();
        told["status"] = json!({ "replicas": 1 });
        let line = format!("PUT {path}/status");
        assert_eq!(api.ask(&line, told.clone()).await.0, 200);
        let (status, said) = api.ask(&line, told.clone()).await;
        assert_eq!((status.as_u16(), &said["reason"]), (409, &json!("Conflict")), "the version before");
        told["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        let (status, said) = api.ask(&line, told.clone()).await;
        assert_eq!(status, 422);
        assert!(said["message"].as_str().unwrap().contains("must be specified for an update"), "{said}");
        told["metadata"]["resourceVersion"] =
            api.object(path).await.unwrap()["metadata"]["resourceVersion"].clone();
        let version = |told: &Value| told["metadata"]["resourceVersion"].clone();
        let (status, same) = api.ask(&line, told.clone()).await;
        assert_eq!((status.as_u16(), version(&same)), (200, version(&told)), "nothing has changed");
        told["status"]["replicas"] = json!("one");
        let (status, said) = api.ask(&line, told).await;
        assert_eq!(status, 422);
        assert!(said["message"].as_str().unwrap().contains("status.replicas"), "{said}");
    }
}

#[tokio::test]
async fn lists_come_in_pages_of_one_version_which_is_gone_after_a_compaction() {
    for api in Cluster::all(ROLE).await {
        for name in ["a", "b", "c"] {
            assert_eq!(api.ask(&format!("POST {PODS}"), pod(name)).await.0, 201);
        }
        let names = |list: &Value| -> Vec<String> {
            let items = list["items"].as_array().unwrap().iter();
            items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
        };
        let (_, first) = api.ask(&format!("GET {PODS}?limit=2"), Value::Null).await;
        assert_eq!(names(&first), ["a", "b"]);
        let token = first["metadata"]["continue"].as_str().unwrap().to_owned();
        let next = format!("GET {PODS}?limit=2&continue={token}");
        let (_, last) = api.ask(&next, Value::Null).await;
        assert_eq!((names(&last), &last["metadata"]["continue"]), (vec!["c".to_owned()], &Value::Null));
        assert_eq!(last["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
        api.ask(&format!("POST {PODS}"), pod("d")).await;
        match &api {
            Cluster::Mock(api, _) => api.lock().break_watches(PODS, true),
            Cluster::Real(real) => {
                let (_, all) = api.ask(&format!("GET {PODS}"), Value::Null).await;
                real.plane.compact(all["metadata"]["resourceVersion"].as_str().unwrap()).await;
            }
        }
        let (status, said) = api.ask(&next, Value::Null).await;
        // Since 1.34 a server may still hold versions forgotten by etcd.
        if matches!(api, Cluster::Real(_)) && status == 200 {
            assert_eq!(names(&said), ["c"]);
        } else {
            assert_eq!((status.as_u16(), &said["reason"]), (410, &json!("Expired")));
        }
    }
}

#[tokio::test]
async fn pods_whose_parts_do_not_belong_together_are_refused_with_the_field() {
    type Edit<'a> = &'a dyn Fn(&mut Value);
    let bad: [(&str, Edit<'_>); 9] = [
        ("metadata.name", &|pod| pod["metadata"]["name"] = json!("Not_A_Name")),
        ("metadata.labels", &|pod| pod["metadata"]["labels"] = json!({ "app": "x".repeat(64) })),
        ("spec.containers: Required", &|pod| pod["spec"]["containers"] = json!([])),
        ("spec.volumes[1].name: Duplicate", &|pod| {
            pod["spec"]["volumes"] =
                json!([{ "name": "v", "emptyDir": {} }, { "name": "v", "emptyDir": {} }]);
        }),
        ("spec.volumes[0].hostPath: Forbidden", &|pod| {
            pod["spec"]["volumes"] = json!([{ "name": "v", "emptyDir": {}, "hostPath": { "path": "/" } }]);
        }),
        ("spec.initContainers[0].name: Duplicate", &|pod| {
            pod["spec"]["initContainers"] = json!([{ "name": "c", "image": "x" }]);
        }),
        ("spec.containers[0].volumeMounts[0].name: Not found", &|pod| {
            pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
        }),
        ("spec.containers[0].volumeMounts[1].mountPath", &|pod| {
            pod["spec"]["volumes"] = json!([{ "name": "v", "emptyDir": {} }]);
            let mount = json!({ "name": "v", "mountPath": "/v" });
            pod["spec"]["containers"][0]["volumeMounts"] = json!([mount, mount]);
        }),
        ("must be equal to gshare.io/hook limit", &|pod| {
            pod["spec"]["containers"][0]["resources"] =
                json!({ "limits": { "gshare.io/hook": "2" }, "requests": { "gshare.io/hook": "1" } });
        }),
    ];
    for api in Cluster::all(ROLE).await {
        for (why, edit) in bad {
            let mut one = pod("p");
            edit(&mut one);
            let (status, said) = api.ask(&format!("POST {PODS}"), one).await;
            assert_eq!(status, 422, "{why}");
            assert!(said["message"].as_str().unwrap().contains(why), "{why}: {said}");
        }
        assert_eq!(api.ask(&format!("POST {PODS}"), pod("p")).await.0, 201);
    }
}

#[tokio::test]
async fn a_namespace_refuses_what_its_level_of_pod_security_forbids() {
    let enforce = async |api: &Cluster, level: &str| {
        let labels = json!({ "pod-security.kubernetes.io/enforce": level });
        api.put("/api/v1/namespaces/team", json!({ "metadata": { "labels": labels } })).await;
        // A server judges by its own copy of the namespace, which follows some time after.
        let mut privileged = pod("p");
        privileged["spec"]["containers"][0]["securityContext"] = json!({ "privileged": true });
        let judged = async || loop {
            let (_, said) = api.ask(&format!("POST {PODS}"), privileged.clone()).await;
            if said["message"].as_str().unwrap().contains(&format!("\"{level}:latest\"")) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        tokio::time::timeout(Duration::from_secs(30), judged()).await.unwrap();
    };
    type Edit<'a> = &'a dyn Fn(&mut Value);
    let bad: [(&str, Edit<'_>); 4] = [
        ("hostPath volumes (volume \"h\")", &|pod| {
            pod["spec"]["volumes"] = json!([{ "name": "h", "hostPath": { "path": "/" } }]);
        }),
        ("host namespaces (hostPID=true)", &|pod| pod["spec"]["hostPID"] = json!(true)),
        ("privileged (container \"c\" must not set securityContext.privileged=true)", &|pod| {
            pod["spec"]["containers"][0]["securityContext"] = json!({ "privileged": true });
        }),
        ("hostPort (container \"c\" uses hostPort 1)", &|pod| {
            pod["spec"]["containers"][0]["ports"] = json!([{ "containerPort": 1, "hostPort": 1 }]);
        }),
    ];
    for api in Cluster::all(ROLE).await {
        for level in ["baseline", "restricted"] {
            enforce(&api, level).await;
            for (why, edit) in bad {
                // The restricted level lists the types that are allowed.
                let why = match level {
                    "restricted" if why.starts_with("hostPath") => {
                        "restricted volume types (volume \"h\" uses restricted volume type \"hostPath\")"
                    }
                    _ => why,
                };
                let mut one = pod("p");
                edit(&mut one);
                let (status, said) = api.ask(&format!("POST {PODS}"), one).await;
                assert_eq!(status, 403, "{why}");
                let said = said["message"].as_str().unwrap();
                assert!(
                    said.contains(&format!("violates PodSecurity \"{level}:latest\"")) && said.contains(why),
                    "{said}"
                );
            }
        }
        let (status, said) = api.ask(&format!("POST {PODS}"), pod("p")).await;
        assert_eq!(status, 403, "restricted");
        assert!(said["message"].as_str().unwrap().contains("runAsNonRoot != true"), "{said}");
        enforce(&api, "baseline").await;
        assert_eq!(api.ask(&format!("POST {PODS}"), pod("p")).await.0, 201);
    }
}

#[tokio::test]
async fn a_scale_of_zero_names_no_replicas() {
    for api in Cluster::all(ROLE).await {
        let path = "/apis/apps/v1/namespaces/team/deployments/d";
        let labels = json!({ "app": "d" });
        let template = json!({ "metadata": { "labels": labels }, "spec": pod("d")["spec"] });
        for replicas in [0, 2] {
            let spec =
                json!({ "replicas": replicas, "selector": { "matchLabels": labels }, "template": template });
            api.put(path, json!({ "metadata": { "name": "d", "namespace": "team" }, "spec": spec })).await;
            let (status, scale) = api.ask(&format!("GET {path}/scale"), Value::Null).await;
            assert_eq!(status, 200, "{scale}");
            assert_eq!(scale["spec"], if replicas == 0 { json!({}) } else { json!({ "replicas": 2 }) });
        }
    }
}
