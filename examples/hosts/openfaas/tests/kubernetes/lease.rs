//! The lease of a leader and its writes behind the fence, before a mock of the API server in virtual time. The `World` of the host has
//! leaders that are killed or stopped, and clocks that differ.

use super::support::api_server::{Api, documents, rights};
use gshare_core::{TenantId, Timestamp};
use gshare_openfaas::kubernetes::lease::{Elector, Fence, Leadership, Lost};
use gshare_openfaas::kubernetes::writes::{Turns, payer};
use k8s_openapi::jiff;
use kube::Client;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const RBAC: &str = include_str!("../../../../kubernetes/host/lease.yaml");
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/gshare-system/leases";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/gshare-system/leases/gshare-up";

fn server() -> (Api, Client) {
    Api::start(RBAC, "gshare-up")
}

fn leadership(client: &Client, name: &str) -> (Leadership, Fence, Arc<AtomicU64>) {
    let (start, wall) = (Instant::now(), jiff::Timestamp::constant(1_767_225_600, 0));
    let stopped = Arc::new(AtomicU64::new(0));
    let seconds = Arc::clone(&stopped);
    let clock = move || {
        let passed = start.elapsed() + Duration::from_secs(seconds.load(Ordering::SeqCst));
        (Timestamp::from_nanos(u64::try_from(passed.as_nanos()).unwrap()), wall + passed)
    };
    let (fence, place) = (Fence::by(true, Box::new(clock)), "gshare-system/gshare-up".parse().unwrap());
    (Leadership::new(client.clone(), place, Elector::new(name), fence.clone()), fence, stopped)
}

/// A replica that writes all the time, and counts.
struct Replica {
    fence: Fence,
    writes: Arc<AtomicU64>,
    /// Seconds for which its programs did not run.
    stopped: Arc<AtomicU64>,
    leads: tokio::task::JoinHandle<Result<(), Lost>>,
}

impl Replica {
    fn start(client: &Client, name: &str) -> Self {
        let (leadership, fence, stopped) = leadership(client, name);
        let (turns, writes) = (Turns::new(fence.clone(), 1), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&writes);
        let work = async move {
            while let Some(_turn) = turns.take(&payer("f", TenantId::new(0)), false).await {
                counted.fetch_add(1, Ordering::SeqCst);
                sleep(Duration::from_millis(500)).await;
            }
        };
        Self { fence, writes, stopped, leads: tokio::spawn(leadership.lead(std::future::pending(), work)) }
    }

    fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }
}

fn spec(api: &Api, key: &str) -> Value {
    api.lock().object(LEASE).map(|lease| lease["spec"][key].clone()).unwrap_or_default()
}

/// Another client makes this replica the holder.
fn hold(api: &Api, name: &str) {
    api.lock().edit(LEASE, &json!({ "spec": { "holderIdentity": name } }));
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn it_is_made_renewed_and_given_back_with_the_rights_of_the_manifests() {
    let (api, client) = server();
    let work = sleep(Duration::from_millis(4_500));
    leadership(&client, "a").0.lead(std::future::pending(), work).await.unwrap();
    let seen = api.lock().take();
    let lines: Vec<_> = seen.iter().map(|seen| seen.line()).collect();
    let (get, put) = (format!("GET {LEASE}"), format!("PUT {LEASE}"));
    let renewed = [get.clone(), put];
    assert_eq!(lines, [[get, format!("POST {LEASES}")], renewed.clone(), renewed.clone(), renewed].concat());
    assert_eq!(
        seen[1].body["spec"],
        json!({
            "holderIdentity": "a", "leaseDurationSeconds": 15, "leaseTransitions": 0,
            "acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2026-01-01T00:00:00.000000Z",
        })
    );
    let renewed = &seen[5].body;
    assert_eq!(renewed["spec"]["renewTime"], "2026-01-01T00:00:04.000000Z");
    assert_eq!(renewed["spec"]["acquireTime"], "2026-01-01T00:00:00.000000Z");
    assert!(renewed["metadata"]["resourceVersion"].is_string(), "refused if it was changed in between");
    assert_eq!(spec(&api, "holderIdentity"), "");

    let mine = rights(RBAC);
    assert_eq!(api.lock().used, mine, "each right is used, and no other is needed");
    let role = documents(RBAC).remove(0);
    let named = json!(["gshare-up"]);
    assert_eq!(role["rules"][1]["resourceNames"], named, "a name cannot be asked for to make one");
    assert!(role["rules"][0]["resourceNames"].is_null());
}

#[tokio::test(start_paused = true)]
async fn the_next_one_leads_once_the_lease_of_a_leader_that_is_gone_has_run_out() {
    let (api, client) = server();
    let a = Replica::start(&client, "a");
    seconds(1).await;
    let b = Replica::start(&client, "b");
    seconds(100).await;
    assert_eq!((b.writes(), spec(&api, "holderIdentity")), (0, json!("a")));
    a.leads.abort();
    let gone = Instant::now();
    while b.writes() == 0 {
        sleep(Duration::from_millis(100)).await;
        assert!(!(a.fence.is_open() && b.fence.is_open()), "never two lead");
    }
    let took = gone.elapsed().as_secs();
    assert!((13..=19).contains(&took), "{took} s");
    assert_eq!((spec(&api, "leaseTransitions"), spec(&api, "holderIdentity")), (json!(1), json!("b")));
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_was_stopped_for_longer_writes_nothing_more_and_ends() {
    // Another one has the lease, or has given it back.
    for next in ["b", ""] {
        let (api, client) = server();
        let leader = Replica::start(&client, "a");
        seconds(5).await;
        let before = leader.writes();
        assert!(before > 0);
        leader.stopped.store(20, Ordering::SeqCst);
        hold(&api, next);
        assert!(!leader.fence.is_open());
        seconds(20).await;
        assert_eq!(leader.writes(), before);
        assert_eq!(leader.leads.await.unwrap(), Err(Lost("gshare-system/gshare-up".parse().unwrap())));
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_the_server_closes_the_fence_and_the_same_leader_goes_on_after_it() {
    // Reads or writes are errors, or nothing is answered.
    for fault in [Some("GET /apis/coordination"), Some("PUT /apis/coordination"), None] {
        let (api, client) = server();
        let leader = Replica::start(&client, "a");
        seconds(1).await;
        let waits = Replica::start(&client, "b");
        seconds(20).await;
        let before = leader.writes();
        assert!(before > 30 && waits.writes() == 0);
        for _ in 0..300 {
            fault.into_iter().for_each(|line| api.lock().fail(line, 500, "InternalError"));
        }
        api.lock().deaf = fault.is_none();
        seconds(7).await;
        assert!(leader.fence.is_open(), "it may still come back");
        seconds(4).await;
        let last = leader.writes();
        assert!(last <= before + 21, "its lease ends 10 s after its last write: {last}");
        // Where reads are answered the other one would take the lease after 15 s.
        if fault != Some("PUT /apis/coordination") {
            seconds(49).await;
            assert_eq!((leader.writes(), waits.writes()), (last, 0), "no write without a lease");
        }
        assert!(!leader.fence.is_open() && !leader.leads.is_finished(), "it answers requests");
        {
            let mut api = api.lock();
            api.deaf = false;
            api.faults.clear();
        }
        seconds(20).await;
        assert!(leader.writes() > last + 20 && waits.writes() == 0, "{}", leader.writes());
    }
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_looked_at_again_and_who_finds_another_one_there_stops_at_once() {
    let (api, client) = server();
    // Another replica makes the lease between the look and the write.
    api.lock().fail(format!("POST {LEASES}"), 409, "AlreadyExists");
    let a = Replica::start(&client, "a");
    seconds(1).await;
    assert_eq!(a.writes(), 0);
    seconds(2).await;
    assert!(a.writes() > 0);
    api.lock().fail(format!("PUT {LEASE}"), 409, "Conflict");
    seconds(60).await;
    assert!(a.fence.is_open(), "one that goes through is enough");
    hold(&api, "b");
    seconds(3).await;
    assert!(a.leads.await.unwrap().is_err());
    assert_eq!(spec(&api, "holderIdentity"), "b", "it is left alone");
}

#[tokio::test(start_paused = true)]
async fn who_waits_ends_when_asked() {
    let (api, client) = server();
    api.lock().put(LEASE, json!({ "metadata": { "name": "gshare-up" }, "spec": { "holderIdentity": "b" } }));
    let work = async { panic!("it does not lead") };
    leadership(&client, "a").0.lead(seconds(5), work).await.unwrap();
    assert!(api.lock().take().iter().all(|seen| seen.method == "GET"));
}
