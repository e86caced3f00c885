//! Writes behind the fence of a lease, in virtual time.

use super::api_server::Api;
use gshare_core::{TenantId, Timestamp};
use gshare_openfaas::kubernetes::lease::{Elector, Fence, Leadership, Lost};
use gshare_openfaas::kubernetes::writes::{Turns, payer};
use k8s_openapi::jiff;
use kube::Client;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const RIGHTS: &str = include_str!("../../../../kubernetes/host/lease.yaml");
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/gshare-system/leases/gshare-up";

/// A replica that writes all the time, and counts.
struct Replica {
    fence: Fence,
    writes: Arc<AtomicU64>,
    leads: tokio::task::JoinHandle<Result<(), Lost>>,
}

impl Replica {
    /// `stopped`: the seconds for which its program did not run.
    fn start(client: &Client, name: &str, stopped: &Arc<AtomicU64>) -> Self {
        let (start, stopped) = (Instant::now(), Arc::clone(stopped));
        let clock = move || {
            let passed = start.elapsed() + Duration::from_secs(stopped.load(Ordering::SeqCst));
            (
                Timestamp::from_nanos(u64::try_from(passed.as_nanos()).unwrap()),
                jiff::Timestamp::UNIX_EPOCH + passed,
            )
        };
        let fence = Fence::by(true, Box::new(clock.clone()));
        let (turns, writes) = (Turns::new(fence.clone(), 1), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&writes);
        let work = async move {
            while let Some(_turn) = turns.take(&payer("f", TenantId::new(0)), false).await {
                counted.fetch_add(1, Ordering::SeqCst);
                sleep(Duration::from_millis(500)).await;
            }
        };
        let elector = Elector::new(name);
        let place = "gshare-system/gshare-up".parse().unwrap();
        let leadership = Leadership::new(client.clone(), place, "gshare-up", elector, Box::new(clock));
        let leads = leadership.with_fence(fence.clone()).lead(std::future::pending(), work);
        Self { fence, writes, leads: tokio::spawn(leads) }
    }

    fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_the_server_closes_the_fence_and_the_same_leader_goes_on_after_it() {
    for answers in [true, false] {
        let (api, client) = Api::start(RIGHTS, "gshare-up");
        let never = Arc::default();
        let leader = Replica::start(&client, "a", &never);
        seconds(1).await;
        let waits = Replica::start(&client, "b", &never);
        seconds(20).await;
        let before = leader.writes();
        assert!(before > 30 && waits.writes() == 0);
        // Errors, or no answers.
        for _ in 0..if answers { 300 } else { 0 } {
            api.lock().fail("GET /apis/coordination", 500, "InternalError");
        }
        api.lock().deaf = !answers;
        seconds(11).await;
        let last = leader.writes();
        assert!(last <= before + 21, "its lease ends 10 s after its last write: {last}");
        seconds(49).await;
        assert_eq!((leader.writes(), waits.writes()), (last, 0), "no write without a lease");
        assert!(!leader.leads.is_finished(), "it answers requests");
        {
            let mut api = api.lock();
            api.deaf = false;
            api.forget_faults();
        }
        seconds(20).await;
        assert!(leader.writes() > last + 20 && waits.writes() == 0, "{}", leader.writes());
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_was_stopped_writes_nothing_beside_the_next_one_and_ends() {
    let (api, client) = Api::start(RIGHTS, "gshare-up");
    let stopped = Arc::default();
    let leader = Replica::start(&client, "a", &stopped);
    seconds(5).await;
    // It wakes after 20 s, and another has the lease.
    let before = leader.writes();
    stopped.store(20, Ordering::SeqCst);
    api.lock().edit(LEASE, &json!({ "spec": { "holderIdentity": "b" } }));
    assert!(!leader.fence.is_open());
    seconds(20).await;
    assert_eq!(leader.writes(), before);
    assert!(leader.leads.await.unwrap().is_err());
    // The other has given the lease back by now: what it did is not known here.
    let leader = Replica::start(&client, "c", &stopped);
    api.lock().edit(LEASE, &json!({ "spec": { "holderIdentity": "" } }));
    seconds(5).await;
    let before = leader.writes();
    assert!(before > 0);
    stopped.store(40, Ordering::SeqCst);
    api.lock().edit(LEASE, &json!({ "spec": { "holderIdentity": "" } }));
    seconds(20).await;
    assert_eq!(leader.writes(), before);
    assert!(leader.leads.await.unwrap().is_err());
}
