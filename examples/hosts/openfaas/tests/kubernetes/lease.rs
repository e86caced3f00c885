//! One leader of several replicas, before a mock of the API server.

use super::api_server::{Api, documents, rights};
use gshare_core::Timestamp;
use gshare_openfaas::kubernetes::lease::{Elector, Leadership, Lost};
use k8s_openapi::jiff;
use kube::Client;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const RBAC: &str = include_str!("../../../../kubernetes/host/lease.yaml");
const PLACE: &str = "gshare-system/gshare-up";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/gshare-system/leases";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/gshare-system/leases/gshare-up";

fn server() -> (Api, Client) {
    Api::start(RBAC, "gshare-up")
}

/// A replica on a machine started `uptime` seconds ago, with its calendar in this year.
fn replica(client: &Client, name: &str, uptime: u64, year: i16) -> Leadership {
    let start = Instant::now();
    let wall = jiff::civil::date(year, 1, 1).to_zoned(jiff::tz::TimeZone::UTC).unwrap().timestamp();
    let clock = move || {
        let passed = start.elapsed();
        let uptime = Duration::from_secs(uptime) + passed;
        (Timestamp::from_nanos(u64::try_from(uptime.as_nanos()).unwrap()), wall + passed)
    };
    let elector = Elector::new(name);
    Leadership::new(client.clone(), PLACE.parse().unwrap(), "gshare-up", elector, Box::new(clock))
}

/// Counts simultaneous leaders.
#[derive(Clone, Default)]
struct Leaders(Arc<AtomicUsize>);

impl Leaders {
    fn now(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Endless work.
    async fn work(self) {
        struct Counted(Leaders);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.0.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        assert_eq!(self.0.fetch_add(1, Ordering::SeqCst), 0, "never two lead");
        let _counted = Counted(self);
        std::future::pending::<()>().await;
    }
}

async fn never() {
    std::future::pending::<()>().await;
}

fn spec(api: &Api, key: &str) -> Value {
    api.lock().object(LEASE).map(|lease| lease["spec"][key].clone()).unwrap_or_default()
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn it_is_made_renewed_and_given_back_with_the_rights_of_the_manifests() {
    let (api, client) = server();
    let stop = sleep(Duration::from_millis(4_500));
    replica(&client, "a", 7, 2026).lead(never(), stop).await.unwrap();
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

/// A leader gone without a word: the other replica takes over when the lease has run out, by its own clock.
#[tokio::test(start_paused = true)]
async fn another_one_takes_it_when_it_has_run_out_whatever_the_calendars_say() {
    for (first, second) in [(2026, 2026), (1975, 2200), (2200, 1975)] {
        let (api, client) = server();
        let leaders = Leaders::default();
        let a = tokio::spawn(replica(&client, "a", 1_000_000, first).lead(never(), leaders.clone().work()));
        seconds(1).await;
        let b = tokio::spawn(replica(&client, "b", 3, second).lead(never(), leaders.clone().work()));
        seconds(100).await;
        assert_eq!((leaders.now(), spec(&api, "holderIdentity")), (1, json!("a")));
        a.abort();
        let gone = Instant::now();
        while leaders.now() == 0 || spec(&api, "holderIdentity") == "a" {
            sleep(Duration::from_millis(100)).await;
        }
        let took = gone.elapsed().as_secs();
        assert!((13..=19).contains(&took), "{took} s");
        assert_eq!(spec(&api, "leaseTransitions"), 1);
        b.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn who_cannot_write_it_stops_before_another_one_may_begin() {
    // Refused, or not answered at all.
    for deaf in [false, true] {
        let (api, client) = server();
        let leaders = Leaders::default();
        let a = tokio::spawn(replica(&client, "a", 0, 2026).lead(never(), leaders.clone().work()));
        seconds(30).await;
        assert_eq!(leaders.now(), 1);
        api.lock().deaf = deaf;
        for _ in 0..10 {
            api.lock().fail(format!("PUT {LEASE}"), 500, "InternalError");
        }
        seconds(7).await;
        assert_eq!(leaders.now(), 1, "it may still come back");
        seconds(4).await;
        assert_eq!(leaders.now(), 0);
        assert_eq!(a.await.unwrap(), Err(Lost(PLACE.parse().unwrap())));
    }
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_looked_at_again_and_who_finds_another_one_there_stops_at_once() {
    let (api, client) = server();
    let leaders = Leaders::default();
    // Another replica makes the lease between the look and the write.
    api.lock().fail(format!("POST {LEASES}"), 409, "AlreadyExists");
    let a = tokio::spawn(replica(&client, "a", 0, 2026).lead(never(), leaders.clone().work()));
    seconds(1).await;
    assert_eq!(leaders.now(), 0);
    seconds(2).await;
    assert_eq!(leaders.now(), 1);
    api.lock().fail(format!("PUT {LEASE}"), 409, "Conflict");
    seconds(60).await;
    assert_eq!(leaders.now(), 1, "one that goes through is enough");
    api.lock().edit(LEASE, &json!({ "spec": { "holderIdentity": "b" } }));
    seconds(3).await;
    assert_eq!(leaders.now(), 0);
    assert!(a.await.unwrap().is_err());
    assert_eq!(spec(&api, "holderIdentity"), "b", "it is left alone");
}

#[tokio::test(start_paused = true)]
async fn who_waits_ends_when_asked() {
    let (api, client) = server();
    api.lock().put(LEASE, json!({ "metadata": { "name": "gshare-up" }, "spec": { "holderIdentity": "b" } }));
    let work = async { panic!("it does not lead") };
    replica(&client, "a", 0, 2026).lead(seconds(5), work).await.unwrap();
    assert!(api.lock().take().iter().all(|seen| seen.method == "GET"));
}
