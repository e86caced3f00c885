//! The dashboard, the monitors and the page on metrics: each named figure is written by a program of ours.

use super::manifests::{objects, one};
use gshare_examples::kubernetes::controller_metrics::Metrics;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const DASHBOARD: &str = include_str!("../../kubernetes/monitoring/dashboard.json");
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

/// Figures of the programs for Kubernetes, as sampled and not as declared.
fn of_the_programs() -> BTreeSet<String> {
    let (of, none) = (Metrics::default(), Vec::new());
    [&of.hooks_offered, &of.gpus].into_iter().for_each(|gauge| _ = gauge.get_or_create(&none).set(1));
    let counters = [&of.hooks_given, &of.prepared, &of.swept, &of.slice_writes];
    counters.into_iter().for_each(|counter| _ = counter.get_or_create(&none).inc());
    names(&samples(&of.text()))
}

fn samples(text: &str) -> String {
    text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_dashboard_shows_what_programs_write_and_all_of_what_the_kubernetes_programs_do() {
    let daemon = of_the_daemon();
    let (mut written, of_programs) = (names(&samples(&daemon)), of_the_programs());
    let known = ["gshare_client_memory_bytes", "gshare_revokes_total"];
    assert!(known.iter().all(|name| written.contains(*name)), "{written:?}");
    assert!(
        ["name=\"", "uuid=\""].iter().all(|label| daemon.contains(label)),
        "panels sum by these: {daemon}"
    );
    assert_eq!(of_programs.len(), 6);
    written.extend(of_programs.clone());
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
    for metric in of_programs {
        assert!(shown.contains(&metric), "{metric} is in no panel");
        // The page leaves `_total` out, and says so.
        let name = metric.trim_end_matches("_total");
        assert!(PAGE.contains(&format!("`{name}`")), "docs/metrics.md: no {name}");
    }
}

#[test]
fn the_monitor_asks_the_port_of_its_namespace_and_the_policy_lets_the_label_in() {
    let all = objects(&["daemon/network-policy.yaml", "monitoring/pod-monitor.yaml"]);
    let (monitor, policy) = (one(&all, "PodMonitor"), one(&all, "NetworkPolicy"));
    assert_eq!(monitor["metadata"]["namespace"], policy["metadata"]["namespace"]);
    let ingress = &policy["spec"]["ingress"][0];
    assert_eq!(ingress["ports"][0]["port"], monitor["spec"]["podMetricsEndpoints"][0]["port"]);
    let labels = &ingress["from"][0]["namespaceSelector"]["matchLabels"];
    assert_eq!(*labels, json!({ "gshare.io/scrapes": "true" }));
}
