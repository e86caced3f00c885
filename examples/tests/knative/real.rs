//! A revision on a real API server, if there is one, in real time: from none to its first pod, with the rights of the manifest. The mock
//! runs the whole life of a revision in virtual time.

use super::cluster::Real;
use super::control_plane::User;
use super::transitions::{
    GATES, PA, PODS, Pods, RBAC, SKS, TARGET, address, config, gate, revision, service_status, slice,
};
use gshare_core::Timestamp;
use gshare_examples::knative::decider::PodLoad;
use gshare_examples::knative::shell::{Moment, run};
use k8s_openapi::jiff;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The definition of one of Knative's custom resources: any fields, and a status of its own.
fn definition(group: &str, kind: &str, plural: &str) -> Value {
    let schema =
        json!({ "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } });
    let version = json!({
        "name": "v1alpha1", "served": true, "storage": true, "schema": schema, "subresources": { "status": {} },
    });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group, "scope": "Namespaced", "versions": [version],
            "names": { "kind": kind, "plural": plural, "singular": kind.to_lowercase() },
        },
    })
}

#[tokio::test]
async fn a_target_at_zero_comes_back() {
    let Some(real) = Real::here().await else { return };
    let serving =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "knative-serving" } });
    real.apply(&[
        serving,
        definition("autoscaling.internal.knative.dev", "PodAutoscaler", "podautoscalers"),
        definition("networking.internal.knative.dev", "ServerlessService", "serverlessservices"),
    ])
    .await;
    real.give(RBAC).await;
    let labels = json!({ "app": "resnet" });
    let pod = json!({ "metadata": { "labels": labels }, "spec": { "containers": [{ "name": "c", "image": "x" }] } });
    let spec = json!({ "replicas": 0, "selector": { "matchLabels": labels }, "template": pod });
    let target = json!({ "metadata": { "namespace": "default" }, "spec": spec });
    real.serves(PA.rsplit_once('/').unwrap().0).await;
    for (path, object) in [(TARGET, target), (GATES, gate()), (PODS, slice(0)), (PA, revision(&[]))] {
        real.put(path, object).await;
    }
    // Five requests a second wait at the activator, and Knative's own controller makes services as they are wanted.
    let pods = Arc::new(Pods::default());
    *pods.waiting.lock().unwrap() = 5.0;
    pods.loads.lock().unwrap().insert(address(1), PodLoad { rate: 5.0, ..PodLoad::default() });
    let began = Instant::now();
    let clock = move || Moment {
        wall: jiff::Timestamp::now(),
        uptime: Timestamp::from_nanos(began.elapsed().as_nanos().try_into().unwrap()),
    };
    let client = real.plane.client(User::Account("gshare-system:knative", None));
    let controller =
        run(client, config(), Arc::clone(&pods) as Arc<_>, Box::new(clock), std::future::pending());
    let woken = async {
        loop {
            if let Some(service) = real.object(SKS).await {
                pods.backed.store(true, Ordering::Relaxed);
                let generation = service["metadata"]["generation"].as_i64().unwrap();
                let status = service_status(generation, Some(0));
                let line = format!("PATCH {SKS}/status");
                let (answer, said) = real.ask_as(User::Admin, &line, status).await;
                assert_eq!(answer, 200, "{said}");
            }
            let replicas = real.object(TARGET).await.unwrap()["spec"]["replicas"].clone();
            if replicas == 1 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::select! {
        () = controller => panic!("the controller ended"),
        woken = tokio::time::timeout(Duration::from_secs(60), woken) => woken.expect("it stays at zero"),
    }
    let told = real.object(PA).await.unwrap();
    assert_eq!(told["status"]["desiredScale"], 1, "{told}");
}
