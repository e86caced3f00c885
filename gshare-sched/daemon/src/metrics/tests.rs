use super::*;
use crate::nvml::LostDevice;
use gshare_core::GpuId;

fn process(slot: u32, name: &str, used: u64, ended: bool) -> serde_json::Value {
    serde_json::json!({
        "client": ClientId::new(slot, 0), "name": name, "pid": 77, "uid": 1000, "program": "p", "gpu": 0, "uuid": "MIG-1",
        "ended": ended, "cgroup": "/docker", "container": "0123456789abcdef".repeat(4), "busy_ns": used, "occupied_ns": used / 2,
        "byte_seconds": 5, "launches": 3,
    })
}

fn snapshot(clients: &[(u32, &str, u64)]) -> Snapshot {
    let client = |&(slot, name, used): &(u32, &str, u64)| {
        serde_json::json!({
            "client": ClientId::new(slot, 0), "name": name, "pid": 77, "uid": 1000, "program": "p", "gpu": 0,
            "quota_request": 0.2, "quota_limit": 0.5, "sm": 1.0, "measured": 0.0, "total_used_ns": used,
            "window_used_ns": 0, "holds_token": false, "waiting_ns": null, "waited_ns": 0, "launches": 3,
            "memory_bytes": 10, "memory_limit_bytes": null, "on_daemon_loss": "open",
        })
    };
    serde_json::from_value(serde_json::json!({
        "now_ns": 0, "epoch": 1, "pid": 1, "version": "", "socket": "", "connections": 0, "processes": 0, "drops": {},
        "journal_lost": 0,
        "devices": [{"gpu": GpuId::new(0), "uuid": "MIG-1", "memory_bytes": 0, "held_bytes": 0, "clients": 1}],
        "clients": clients.iter().map(client).collect::<Vec<_>>(),
        "usage": clients.iter().map(|&(slot, name, used)| process(slot, name, used, false)).collect::<Vec<_>>(),
    }))
    .unwrap()
}

/// The value of a series, if it is there.
fn value(text: &str, series: &str) -> Option<String> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ').map(str::to_owned))
}

const ALICE: &str =
    "{name=\"alice\",class=\"none\",uuid=\"MIG-1\",uid=\"1000\",pod=\"\",container=\"0123456789ab\"}";

#[test]
fn processes_of_an_instance_are_one_series_that_never_shrinks() {
    let metrics = Metrics::default();
    let used = |clients: &[(u32, &str, u64)]| {
        let text = metrics.encode(&snapshot(clients));
        assert!(!text.contains("pid="), "{text}");
        value(&text, &format!("gshare_client_gpu_seconds_total{ALICE}"))
    };
    let (second, half) = (1_000_000_000, 500_000_000);
    assert_eq!(used(&[(0, "alice", second), (1, "alice", half)]).as_deref(), Some("1.5"));
    assert_eq!(used(&[(1, "alice", second)]).as_deref(), Some("2.0"), "the sum of one that left is kept");
    assert_eq!(used(&[(2, "bob", half)]), None, "an instance that is gone leaves no series");
    let text = metrics.encode(&snapshot(&[(0, "alice", 0), (1, "alice", 0)]));
    assert_eq!(value(&text, &format!("gshare_client_memory_bytes{ALICE}")).as_deref(), Some("20"));
}

/// The next scrape has the use of a process that lived between two scrapes, and the last use of a known process. Later scrapes have
/// neither.
#[test]
fn the_use_of_an_ended_process_is_counted_once() {
    let metrics = Metrics::default();
    let second = 1_000_000_000;
    let seen = |present: &[(u32, &str, u64)], ended: &[(u32, &str, u64)]| {
        let mut snapshot = snapshot(present);
        let row = |&(slot, name, used): &(u32, &str, u64)| {
            serde_json::from_value::<ProcessUse>(process(slot, name, used, true)).unwrap()
        };
        snapshot.usage.extend(ended.iter().map(row));
        let text = metrics.encode(&snapshot);
        ["gpu_seconds", "occupied_seconds", "memory_byte_seconds"]
            .map(|kind| value(&text, &format!("gshare_client_{kind}_total{ALICE}")).unwrap_or_default())
    };
    assert_eq!(seen(&[(0, "alice", second)], &[]), ["1.0", "0.5", "5"]);
    assert_eq!(seen(&[], &[(0, "alice", 2 * second), (1, "alice", second)]), ["3.0", "1.5", "10"]);
    assert_eq!(seen(&[], &[(0, "alice", 2 * second), (1, "alice", second)]), ["", "", ""]);
}

#[test]
fn waits_for_tokens_and_overuse_have_histograms_and_the_build_is_named() {
    let metrics = Metrics::default();
    let (client, at) = (ClientId::new(0, 0), Timestamp::from_millis);
    let allow = |ms: u64| TokenAction::Allow { client, allowed: Duration::from_millis(ms), until: at(99) };
    let used = |ms: u64, state: UseState| TokenEvent::Used { client, used: Duration::from_millis(ms), state };
    let observe = |now, event: &TokenEvent, orders: &[TokenAction]| {
        let mut notes = vec![NodeAction::Note(Note::TokenEvent { token: *event })];
        notes.extend(orders.iter().map(|order| NodeAction::Note(Note::TokenOrder { order: *order })));
        metrics.observe(now, &notes);
    };
    observe(at(0), &used(0, UseState::Wants), &[]);
    observe(at(30), &TokenEvent::DeadlineReached, &[allow(10)]);
    // The client has used 15 ms of 10 ms and asks for more. The grant comes 2 ms later.
    observe(at(50), &used(15, UseState::Wants), &[]);
    observe(at(52), &TokenEvent::DeadlineReached, &[allow(25)]);
    let recall = TokenAction::Recall { client, allowed: Duration::from_millis(16) };
    observe(at(55), &TokenEvent::DeadlineReached, &[recall]);
    observe(at(60), &used(19, UseState::Idle), &[]);
    observe(at(61), &used(24, UseState::Idle), &[]);
    observe(at(70), &TokenEvent::ClientLeft { client }, &[]);
    assert!(metrics.open.lock().is_empty());
    let text = metrics.encode(&snapshot(&[]));
    for (series, wanted) in [
        ("gshare_token_wait_seconds_sum", "0.032"),
        ("gshare_token_wait_seconds_count", "2"),
        ("gshare_recalls_total", "1"),
        ("gshare_token_wait_seconds_bucket{le=\"0.0064\"}", "1"),
        ("gshare_token_overuse_seconds_sum", "0.005"),
        ("gshare_token_overuse_seconds_count", "2"),
        (concat!("gshare_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"}"), "1"),
    ] {
        assert_eq!(value(&text, series).as_deref(), Some(wanted), "{series} in {text}");
    }
}

#[test]
fn a_lost_device_is_told_by_its_uuid_and_unknown_health_is_not_told() {
    let metrics = Metrics::default();
    let mut snapshot = snapshot(&[]);
    let lost = |text: &str, uuid: &str| value(text, &format!("gshare_device_lost{{uuid=\"{uuid}\"}}"));
    assert_eq!(lost(&metrics.encode(&snapshot), "MIG-1"), None);
    snapshot.lost = Some(Vec::new());
    assert_eq!(lost(&metrics.encode(&snapshot), "MIG-1").as_deref(), Some("0"));
    // An unused GPU of the node counts as well.
    let gone = ["MIG-1", "GPU-2"]
        .map(|uuid| LostDevice { uuid: uuid.to_owned(), why: "fell off the bus".to_owned() });
    snapshot.lost = Some(gone.to_vec());
    let text = metrics.encode(&snapshot);
    assert_eq!((lost(&text, "MIG-1").as_deref(), lost(&text, "GPU-2").as_deref()), (Some("1"), Some("1")));
    snapshot.lost = Some(Vec::new());
    let text = metrics.encode(&snapshot);
    assert_eq!((lost(&text, "MIG-1").as_deref(), lost(&text, "GPU-2")), (Some("0"), None));
}
