//! FaSTPods from their creation to their end, by the controller's own account with the rights of its manifest: on the mock, and on a
//! real server where there is one.

use super::api_server::documents;
use super::cluster::{Cluster, Real};
use super::control_plane::User;
use super::decisions::{at, check, fastpod, node};
use super::kustomize::rendered;
use gshare_examples::kubernetes::fastpod::controller::Controller;
use gshare_examples::kubernetes::fastpod::fastpod_writes::Settings;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const RBAC: &str = include_str!("../../kubernetes/fastpod/rbac.yaml");
const CRD: &str = include_str!("../../kubernetes/fastpod/crd.yaml");
const POLICY: &str = include_str!("../../kubernetes/fastpod/policy.yaml");
const PODS: &str = "/api/v1/namespaces/team/pods";

fn of(name: &str) -> String {
    format!("/apis/gshare.io/v1alpha1/namespaces/team/fastpods/{name}")
}

/// A cluster with the definition, the policy and the rights of the manifests, two nodes and their kubelets.
struct World {
    cluster: Cluster,
    nodes: Vec<Node>,
    controller: Controller,
    second: i64,
}

impl World {
    async fn new(cluster: Cluster) -> Self {
        cluster.define(CRD).await;
        let client = match &cluster {
            Cluster::Mock(api, client) => {
                api.lock().has_kubelets = true;
                client.clone()
            }
            Cluster::Real(real) => {
                real.give(RBAC).await;
                real.apply(&documents(POLICY)).await;
                real.plane.client(User::Account("gshare-system:fastpod", None))
            }
        };
        let nodes: Vec<Node> = ["x", "y"].map(|name| node(name, 2, 16384)).into();
        for node in &nodes {
            let path = format!("/api/v1/nodes/{}", node.metadata.name.as_ref().unwrap());
            cluster.put(&path, json!(node)).await;
            // A new node is tainted as not ready until the controller of nodes, missing here, sees it ready.
            if let Cluster::Real(real) = &cluster {
                let ready = json!({ "spec": { "taints": null } });
                let (status, said) = real.ask_as(User::Admin, &format!("PATCH {path}"), ready).await;
                assert_eq!(status, 200, "{said}");
            }
        }
        Self { cluster, nodes, controller: Controller::new(client, Settings::default()), second: 0 }
    }

    /// Wants `replicas` replicas of a FaSTPod.
    async fn want(&self, name: &str, replicas: i32, share: [u32; 3]) {
        let mut object = json!(fastpod(name, replicas, share));
        if let Some(there) = self.cluster.object(&of(name)).await {
            object["metadata"] = there["metadata"].clone();
            object["metadata"]["generation"] = json!(there["metadata"]["generation"].as_i64().unwrap() + 1);
            object["status"] = there["status"].clone();
        }
        self.cluster.put(&of(name), object).await;
    }

    async fn pods(&self) -> Vec<Pod> {
        let (status, list) = self.cluster.ask(&format!("GET {PODS}"), Value::Null).await;
        assert_eq!(status, 200, "{list}");
        serde_json::from_value(list["items"].clone()).unwrap()
    }

    /// Kubelets of a server without kubelets: they run bound pods and end deleted ones.
    async fn kubelets(&self) {
        let Cluster::Real(real) = &self.cluster else { return };
        for pod in self.pods().await {
            let path = format!("{PODS}/{}", pod.metadata.name.as_ref().unwrap());
            let is_new = pod.status.as_ref().is_none_or(|status| status.phase.as_deref() != Some("Running"));
            let line = if pod.metadata.deletion_timestamp.is_some() {
                format!("DELETE {path}?gracePeriodSeconds=0")
            } else if is_new && pod.spec.as_ref().unwrap().node_name.is_some() {
                format!("PATCH {path}/status")
            } else {
                continue;
            };
            let ready =
                json!({ "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" });
            let running = json!({ "status": { "phase": "Running", "conditions": [ready] } });
            let body = if line.starts_with("PATCH") { running } else { Value::Null };
            let (status, said) = real.ask_as(User::Admin, &line, body).await;
            assert!(status.is_success() || status == 404, "{line}: {said}");
        }
    }

    /// The controller looks until nothing is left to write; no GPU is ever oversold meanwhile.
    async fn settle(&mut self) {
        for _ in 0..40 {
            self.second += 1;
            let outcome = self.controller.look(&at(self.second)).await.unwrap();
            assert_eq!(outcome.complaints, Vec::<String>::new());
            let pods = self.pods().await;
            check(&self.nodes, &pods);
            let rests = pods.iter().all(|pod| pod.metadata.deletion_timestamp.is_none());
            if outcome.written == 0 && outcome.overtaken == 0 && rests {
                return;
            }
            self.kubelets().await;
            if let Cluster::Mock(..) = self.cluster {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        panic!("it does not settle");
    }

    async fn field(&self, name: &str, pointer: &str) -> Value {
        let object = self.cluster.object(&of(name)).await;
        object.and_then(|object| object.pointer(pointer).cloned()).unwrap_or_default()
    }
}

#[tokio::test]
async fn fastpods_are_placed_run_scaled_and_removed_with_the_rights_of_the_manifest() {
    for cluster in Cluster::all(RBAC).await {
        let mut world = World::new(cluster).await;
        let (small, large) = ([12, 30, 1024], [50, 60, 4096]);
        for (name, replicas, share) in [("a", 5, small), ("b", 2, large), ("c", 1, small)] {
            world.want(name, replicas, share).await;
        }
        world.settle().await;
        let bound =
            |pods: &[Pod]| pods.iter().filter(|pod| pod.spec.as_ref().unwrap().node_name.is_some()).count();
        let told = world.field("a", "/status/conditions").await;
        assert_eq!(bound(&world.pods().await), 8, "{told}");
        for (name, replicas) in [("a", 5), ("b", 2), ("c", 1)] {
            assert_eq!(world.field(name, "/status/replicas").await, replicas);
            assert_eq!(
                world.field(name, "/status/boundDeviceIDs").await.as_object().unwrap().len(),
                replicas
            );
            let conditions = world.field(name, "/status/conditions").await;
            let placed = conditions.as_array().unwrap().iter().find(|one| one["type"] == "Placed").unwrap();
            assert_eq!(placed["status"], "True", "{placed}");
        }
        // At rest nothing is written.
        let outcome = world.controller.look(&at(world.second + 1)).await.unwrap();
        assert_eq!((outcome.written, outcome.overtaken), (0, 0));

        world.want("a", 1, small).await;
        world.want("b", 0, large).await;
        world.want("c", 3, small).await;
        world.settle().await;
        assert_eq!(bound(&world.pods().await), 4);
        // More than there is room for: fitting pods are placed, and the FaSTPod states the shortage.
        world.want("b", 9, [100, 100, 4096]).await;
        world.settle().await;
        let conditions = world.field("b", "/status/conditions").await;
        let placed =
            conditions.as_array().unwrap().iter().find(|one| one["type"] == "Placed").unwrap().clone();
        assert_eq!((&placed["status"], &placed["reason"]), (&json!("False"), &json!("NoRoom")), "{placed}");
        for (name, share) in [("a", small), ("b", large), ("c", small)] {
            world.want(name, 0, share).await;
        }
        world.settle().await;
        assert_eq!(world.pods().await, []);
        for name in ["a", "b", "c"] {
            let (status, said) = world.cluster.ask(&format!("DELETE {}", of(name)), Value::Null).await;
            assert!(status == 200 || matches!(world.cluster, Cluster::Mock(..)), "{said}");
        }
    }
}

#[tokio::test]
async fn a_server_takes_all_manifests_by_strict_validation() {
    let Some(real) = Real::here().await else { return };
    let examples = Path::new(env!("CARGO_MANIFEST_DIR"));
    real.apply(&rendered(&examples.join("kubernetes"))).await;
    real.apply(&rendered(&examples.join("kubernetes/by-node"))).await;
    let namespace =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "knative-serving" } });
    real.apply(&[namespace]).await;
    let knative = rendered(&examples.join("knative"));
    real.apply(&knative).await;
}
