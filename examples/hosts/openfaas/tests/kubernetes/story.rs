//! The whole story on three nodes: a GPU with shared time, a GPU that is cut into MIG devices, and a GPU for one request at a time. Clients
//! write `GpuFunction`s and call the host, and everything else follows.

use super::common::{Provider, call, within};
use super::kubelet::{Cluster, On};
use super::leader::BY_LEASE;
use super::support::control_plane::ControlPlane;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

const FUNCTIONS: [&str; 4] = ["shared", "sliced", "x", "y"];

struct Story {
    host: Provider,
    cluster: Cluster,
}

impl Story {
    fn start(on: On) -> Self {
        let cut = json!({ "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "A100-SXM4-80GB",
            "nvidia.com/mig-1g.10gb.count": "2", "nvidia.com/mig-2g.20gb.count": "1" });
        let whole = json!({ "gshare.io/regime": "whole" });
        let boards = [("v100", json!({})), ("a100,mig=1g.10gb+1g.10gb+2g.20gb", cut), ("v100", whole)];
        let cluster = Cluster::of(&boards, on);
        Self { host: cluster.host(&BY_LEASE), cluster }
    }

    fn apply(&self, name: &str, mut spec: Value) {
        spec["env"] = json!({ "KERNELS": "2" });
        self.cluster.put(name, &spec);
        within(|| self.host.call("GET", &format!("/system/function/{name}"), "").0 == 200);
    }

    fn ask(&self, name: &str) {
        let (status, body) = self.host.call("POST", &format!("/function/{name}"), "");
        assert_eq!(status, 200, "{name}: {body}");
    }

    /// The pods of a function, those of its trials left out.
    fn pods(&self, name: &str) -> Vec<Pod> {
        let label = |pod: &Pod, key: &str| pod.metadata.labels.as_ref().unwrap()[key].clone();
        let mut pods = self.cluster.pods();
        pods.retain(|pod| {
            label(pod, "gshare.io/function") == name && label(pod, "gshare.io/version") != "trial"
        });
        pods
    }

    /// The node and the devices that the pods of a function see, of which the daemon there knows each.
    fn place(&self, name: &str) -> (String, String) {
        let pod = self.pods(name).remove(0);
        let (of, spec) = (format!("gshare-functions/{}", pod.metadata.name.unwrap()), pod.spec.unwrap());
        let node = spec.node_name.unwrap();
        let env = spec.containers[0].env.clone().unwrap();
        let seen = env.into_iter().find(|one| one.name == "NVIDIA_VISIBLE_DEVICES").unwrap().value.unwrap();
        let daemon = self.cluster.node(node[1..].parse().unwrap()).daemon();
        let client = daemon.clients.iter().find(|client| client.name == of).expect("a client of its daemon");
        let device = daemon.devices.iter().find(|device| device.gpu == client.gpu).unwrap();
        assert!(!seen.starts_with("MIG-") || device.uuid == seen, "{name}: {seen} and {}", device.uuid);
        (node, seen)
    }

    fn state(&self) -> Value {
        let (status, body) = self.host.call("GET", "/system/state", "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Ready instances of a function on the page.
    fn ready(&self, name: &str) -> usize {
        let state = self.state();
        let of = state["functions"].as_array().unwrap().iter().find(|one| one["name"] == name);
        let instances = of.and_then(|one| one["instances"].as_array()).cloned().unwrap_or_default();
        instances.iter().filter(|one| one["life"] == "ready").count()
    }

    fn in_time(&self, name: &str) -> u64 {
        let (_, text) = self.host.call("GET", "/metrics", "");
        let line = format!("gshare_requests_within_slo{{function_name=\"{name}\"}} ");
        let value = text.lines().find_map(|one| one.strip_prefix(&line));
        value.unwrap_or_else(|| panic!("no {line}in\n{text}")).parse().unwrap()
    }

    fn cordon(&self, node: usize, is: bool) {
        self.cluster.node(node).edit(&json!({ "spec": { "unschedulable": is.then_some(true) } }));
    }
}

#[test]
fn functions_are_measured_placed_scaled_served_and_deleted_on_nodes_of_every_kind() {
    tell(&Story::start(On::Mock));
    if ControlPlane::here().is_some() {
        tell(&Story::start(On::Any));
    }
}

fn tell(story: &Story) {
    story.apply("shared", json!({ "slo": "2s", "maxReplicas": 3 }));
    story.apply("sliced", json!({ "slo": "2s", "regime": "sliced" }));
    for name in ["x", "y"] {
        // Two of 9 GiB are not on a GPU of 16 GiB at once.
        let share = json!({ "memory": "9GiB" });
        story.apply(name, json!({ "slo": "2s", "regime": "whole", "share": share, "minReplicas": 0 }));
    }
    for name in FUNCTIONS {
        story.ask(name);
    }

    // Each was measured on devices of its kind, and the measurement is kept in the object.
    for (name, points) in [("shared", 2..=4), ("sliced", 1..=2), ("x", 1..=1), ("y", 1..=1)] {
        let measured =
            || story.cluster.status(name)["profile"]["measured"]["table"]["points"].as_array().map(Vec::len);
        within(|| measured().is_some());
        assert!(measured().is_some_and(|count| points.contains(&count)), "{name}: {:?}", measured());
    }
    // The daemon of the node knows the pod on the device for which the platform chose it.
    let (node, seen) = story.place("sliced");
    assert!(node == "n1" && seen.starts_with("MIG-"), "{node} {seen}");
    assert_eq!(story.place("shared"), ("n0".to_owned(), "0".to_owned()));
    assert_eq!(story.place("y"), ("n2".to_owned(), "0".to_owned()));

    // Of two models that fit no GPU together one leaves for the other.
    assert!(story.pods("x").iter().all(|pod| pod.metadata.deletion_timestamp.is_some()));
    story.ask("x");
    within(|| (story.ready("x"), story.ready("y"), story.pods("y").len()) == (1, 0, 0));

    // Load beyond one instance starts others, and they leave after it.
    let (address, stop) = (story.host.address, AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(call(address, "POST", "/function/shared", "").unwrap().0, 200);
                }
            });
        }
        within(|| story.ready("shared") == 3);
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(story.pods("shared").len(), 3);

    // To zero, and back at the next request.
    story.cluster.scale("sliced", 0);
    within(|| story.pods("sliced").is_empty());
    story.ask("sliced");
    story.cluster.edit("sliced", &json!({ "replicas": null }));
    within(|| story.pods("shared").len() == 1 && story.ready("shared") == 1);

    for name in ["shared", "sliced", "x"] {
        let before = story.in_time(name);
        (0..20).for_each(|_| story.ask(name));
        assert_eq!(story.in_time(name), before + 20, "{name}");
    }

    // The page, the objects and the pods tell of one state.
    let state = story.state();
    let regimes: Vec<_> =
        state["devices"].as_array().unwrap().iter().map(|device| &device["regime"]).collect();
    assert_eq!(regimes.len(), 3, "{state}");
    assert!(
        ["fractional", "sliced", "whole"].iter().all(|regime| regimes.contains(&&json!(regime))),
        "{state}"
    );
    for name in FUNCTIONS {
        let agree = || {
            let ready = story.cluster.status(name)["readyReplicas"].as_u64();
            (story.ready(name), ready) == (story.pods(name).len(), Some(story.pods(name).len() as u64))
        };
        within(agree);
    }
    let (status, page) = story.host.call("GET", "/ui", "");
    assert!(status == 200 && page.contains("<html"), "{status}");

    // A lost node takes its function with it, the others serve on, and all is as before once it is back.
    let lost = story.cluster.node(0);
    lost.cut_off(true);
    lost.is_ready(false);
    story.cluster.degraded("shared", |why| why.contains("n0: the node is not ready"));
    assert_eq!(story.ready("shared"), 0);
    story.ask("sliced");
    story.ask("x");
    lost.is_ready(true);
    lost.cut_off(false);
    story.ask("shared");
    story.cluster.well("shared");
    assert_eq!(story.place("shared"), ("n0".to_owned(), "0".to_owned()));

    // A cordoned node keeps its pods, and functions on GPUs that are not shared can still be changed.
    let before = story.pods("shared");
    story.cordon(0, true);
    story.cluster.edit("x", &json!({ "slo": "3s" }));
    let is_told = || {
        let object = story.cluster.object("x");
        object["status"]["observedGeneration"] == object["metadata"]["generation"]
    };
    within(is_told);
    story.ask("x");
    story.cluster.well("x");
    let after = story.pods("shared");
    assert_eq!((after.len(), &after[0].metadata.uid), (1, &before[0].metadata.uid));
    story.cordon(0, false);
    // A GPU that is not shared is lost while its node is cordoned.
    story.cordon(2, true);
    within(|| story.pods("x").is_empty());
    story.ask("sliced");
    story.cordon(2, false);
    story.ask("x");

    FUNCTIONS.iter().for_each(|name| story.cluster.delete(name));
    within(|| story.cluster.pods().is_empty());
    within(|| (0..3).all(|node| story.cluster.node(node).daemon().clients.is_empty()));
    assert_eq!(story.state()["functions"], json!([]));
    assert_eq!(story.host.call("POST", "/function/shared", "").0, 503);
}
