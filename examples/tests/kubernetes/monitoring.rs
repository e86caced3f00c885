//! The dashboard, the monitors and the page on metrics: each named figure is written by a program of ours.

use super::api_server::documents;
use super::kustomize::check;
use clap::Parser as _;
use gshare_examples::kubernetes::controller_metrics::ALL;
use gshare_examples::kubernetes::dra;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

const DASHBOARD: &str = include_str!("../../kubernetes/monitoring/dashboard.json");
const MONITORS: &str = include_str!("../../kubernetes/monitoring/pod-monitor.yaml");
const PAGE: &str = include_str!("../../../docs/metrics.md");

/// Names of figures in a text.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("gshare_")).map(str::to_owned).collect()
}

/// Metrics of the daemon while it has a device and a client.
fn of_the_daemon() -> String {
    let client = json!({
        "client": 1, "name": "n", "pid": 1, "uid": 1, "program": "p", "gpu": 0, "quota_request": 0.3, "quota_limit": 0.8,
        "sm": 0.1, "measured": 0.5, "total_used_ns": 1, "window_used_ns": 1, "holds_token": false, "waiting_ns": null,
        "waited_ns": 1, "launches": 1, "memory_bytes": 1, "memory_limit_bytes": null, "on_daemon_loss": "open",
    });
    let process = json!({
        "client": 1, "name": "n", "pid": 1, "uid": 1, "program": "p", "gpu": 0, "uuid": "GPU-1", "ended": false, "cgroup": "/",
    });
    let device = json!({ "gpu": 0, "uuid": "GPU-1", "memory_bytes": 2, "held_bytes": 1, "clients": 1 });
    let snapshot = json!({
        "now_ns": 1, "epoch": 1, "pid": 1, "version": "0", "socket": "/s", "connections": 1, "processes": 1, "drops": {},
        "journal_lost": 0, "devices": [device], "clients": [client], "usage": [process],
    });
    let read: gshared::Snapshot =
        serde_path_to_error::deserialize(&snapshot).unwrap_or_else(|e| panic!("{e}"));
    gshared::Metrics::default().encode(&read)
}

#[test]
fn the_dashboard_shows_what_programs_write_and_all_of_what_the_kubernetes_programs_do() {
    let daemon = of_the_daemon();
    // Names as sampled, not as declared.
    let samples: String =
        daemon.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    let mut written = names(&samples);
    assert!(
        written.contains("gshare_client_memory_bytes") && written.contains("gshare_revokes_total"),
        "{written:?}"
    );
    written.extend(ALL.iter().map(|metric| metric.name.to_owned()));
    let board: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut shown = BTreeSet::new();
    for panel in board["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let asked = names(target["expr"].as_str().unwrap());
            assert!(!asked.is_empty(), "{}: {target}", panel["title"]);
            shown.extend(asked);
        }
        let is_row = panel["type"] == "row";
        assert!(
            is_row || panel["description"].as_str().is_some_and(|text| text.ends_with('.')),
            "{}",
            panel["title"]
        );
    }
    let unknown: Vec<_> = shown.difference(&written).collect();
    assert!(unknown.is_empty(), "no program writes {unknown:?}");
    for metric in ALL {
        assert!(shown.contains(metric.name), "{} is in no panel", metric.name);
        // The page leaves `_total` out, and says so.
        let name = metric.name.trim_end_matches("_total");
        assert!(PAGE.contains(&format!("`{name}`")), "docs/metrics.md: no {name}");
    }
}

/// Panels sum by labels of the series.
#[test]
fn panels_sum_by_labels_that_the_series_have() {
    let daemon = of_the_daemon();
    for label in ["name", "uuid"] {
        assert!(daemon.contains(&format!("{label}=\"")), "{label}: {daemon}");
    }
}

#[test]
fn monitors_ask_the_port_of_each_namespace_and_the_policies_let_the_label_in() {
    let kubernetes = Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes");
    let objects = super::kustomize::rendered(&kubernetes);
    let monitors = documents(MONITORS);
    let spaces: Vec<_> = monitors.iter().map(|monitor| &monitor["metadata"]["namespace"]).collect();
    assert_eq!(spaces, ["gshare-system"]);
    let lets_all = |o: &&Value| o["metadata"]["name"] == "metrics";
    for monitor in &monitors {
        let port = &monitor["spec"]["podMetricsEndpoints"][0]["port"];
        let space = &monitor["metadata"]["namespace"];
        let policy = objects
            .iter()
            .filter(lets_all)
            .find(|o| o["kind"] == "NetworkPolicy" && o["metadata"]["namespace"] == *space);
        let ingress = &policy.unwrap()["spec"]["ingress"][0];
        assert_eq!(ingress["ports"][0]["port"], *port);
        let labels = &ingress["from"][0]["namespaceSelector"]["matchLabels"];
        assert_eq!(*labels, json!({ "gshare.io/scrapes": "true" }));
    }
}

/// The quick start: simulated GPUs for claims, and the labels of the nodes that the manifests select.
#[test]
fn on_kind_nodes_have_simulated_gpus_and_the_labels_that_manifests_select() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes/kind");
    let objects = check(&folder);
    let cluster = documents(&std::fs::read_to_string(folder.join("cluster.yaml")).unwrap()).remove(0);
    assert_eq!(cluster["featureGates"]["DRAConsumableCapacity"], true);
    for object in objects.iter().filter(|object| object["kind"] == "DaemonSet") {
        let pod = &object["spec"]["template"]["spec"];
        let wanted = pod["nodeSelector"].as_object().unwrap();
        let has = |node: &Value| wanted.iter().all(|(key, value)| node["labels"][key] == *value);
        assert!(cluster["nodes"].as_array().unwrap().iter().any(has), "{}", object["metadata"]["name"]);
        if object["metadata"]["name"] == "gshare-dra" {
            let words = pod["containers"][0]["command"].as_array().unwrap().iter();
            let words = words.map(|word| word.as_str().unwrap());
            assert_eq!(dra::command::Options::try_parse_from(words).unwrap().sim, Some(2));
        }
    }
}
