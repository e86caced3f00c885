//! The whole controller, with its watches and its clock, on virtual time.

use super::api_server::{Api, rights};
use super::transitions::{
    GATES, PA, PAS, PODS, Pods, RBAC, SERVICES, SKS, SLICES, TARGET, address, config, deployment, gate,
    revision, service_status, slice, start,
};
use gshare_core::Timestamp;
use gshare_examples::knative::decider::PodLoad;
use gshare_examples::knative::shell::{Moment, run};
use k8s_openapi::jiff;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Time from the request for a pod to its readiness, in seconds.
const POD_START: u64 = 2;

struct Life {
    api: Api,
    client: kube::Client,
    began: Instant,
    pods: Arc<Pods>,
    /// Requests per second.
    rate: Arc<AtomicU32>,
}

impl Life {
    /// A new revision with one pod. No controller scales it yet.
    fn start() -> Self {
        let (api, client) = start();
        api.lock().put(PA, revision(&[]));
        api.lock().put(TARGET, deployment(1));
        api.lock().put(GATES, gate());
        let (pods, rate) = (Arc::new(Pods::default()), Arc::new(AtomicU32::new(0)));
        tokio::spawn(others(api.clone(), Arc::clone(&pods), Arc::clone(&rate)));
        Self { api, client, began: Instant::now(), pods, rate }
    }

    /// Runs a controller while the scenario lasts.
    async fn controlled(&self, scenario: impl AsyncFnOnce(&Self)) {
        let began = self.began;
        let clock = move || {
            let uptime = began.elapsed();
            Moment {
                wall: jiff::Timestamp::UNIX_EPOCH + uptime,
                uptime: Timestamp::from_nanos(uptime.as_nanos().try_into().unwrap()),
            }
        };
        let (client, outside) = (self.client.clone(), Arc::clone(&self.pods));
        let controller = run(client, config(), outside, Box::new(clock), std::future::pending());
        tokio::select! {
            () = controller => panic!("the controller ended"),
            () = scenario(self) => {}
        }
    }

    /// Sends `rate` requests per second for `seconds` seconds.
    async fn load(&self, rate: u32, seconds: u64) {
        self.rate.store(rate, Ordering::Relaxed);
        sleep(Duration::from_secs(seconds)).await;
    }

    fn field(&self, path: &str, pointer: &str) -> Value {
        self.api.lock().object(path).unwrap().pointer(pointer).cloned().unwrap_or_default()
    }

    fn replicas(&self) -> u64 {
        self.field(TARGET, "/spec/replicas").as_u64().unwrap()
    }

    /// The states of the four conditions.
    fn conditions(&self) -> [String; 4] {
        let all = self.field(PA, "/status/conditions");
        let all: Vec<_> =
            all.as_array().unwrap().iter().map(|one| one["status"].as_str().unwrap().to_owned()).collect();
        all.try_into().unwrap()
    }

    /// Requests since the last call, except lists and watches.
    fn requests(&self) -> Vec<String> {
        let seen = self.api.lock().take();
        let of = seen.iter().filter(|seen| ![PAS, SERVICES, SLICES].contains(&seen.path.as_str()));
        let of = of.filter(|seen| !seen.is_watch() && !GATES.starts_with(&seen.path));
        of.map(|seen| seen.line()).collect()
    }

    fn edit(&self, path: &str, patch: &Value) {
        self.api.lock().edit(path, patch);
    }
}

/// Runs the controller while the scenario lasts.
async fn live(scenario: impl AsyncFnOnce(&Life)) {
    let life = Life::start();
    life.controlled(scenario).await;
}

/// Kubernetes' and Knative's own controllers, and clients.
async fn others(api: Api, pods: Arc<Pods>, rate: Arc<AtomicU32>) {
    let (mut proxied, mut started, mut shown) = (None, Vec::new(), None);
    for second in 0.. {
        {
            let mut server = api.lock();
            let replicas = server.object(TARGET).unwrap()["spec"]["replicas"].as_u64().unwrap();
            started.resize(usize::try_from(replicas).unwrap(), second);
            let ready = started.iter().filter(|at| **at + POD_START <= second).count();
            let ready = u32::try_from(ready).unwrap();
            if shown != Some(ready) {
                server.put(PODS, slice(ready));
                shown = Some(ready);
            }
            if let Some(sks) = server.object(SKS) {
                let generation = sks["metadata"]["generation"].as_i64().unwrap();
                let through = sks["spec"]["mode"] == "Proxy" || ready == 0;
                proxied = through.then(|| proxied.unwrap_or(second));
                pods.backed.store(through, Ordering::Relaxed);
                server.edit(SKS, &service_status(generation, proxied));
            }
            let rate = f64::from(rate.load(Ordering::Relaxed));
            let each = PodLoad { rate: rate / f64::from(ready.max(1)), ..PodLoad::default() };
            *pods.loads.lock().unwrap() = (1..=ready).map(|pod| (address(pod), each)).collect();
            *pods.waiting.lock().unwrap() = if ready == 0 { rate } else { 0.0 };
        }
        sleep(Duration::from_secs(1)).await;
    }
}

const READY: [&str; 4] = ["True"; 4];

#[tokio::test(start_paused = true)]
async fn from_its_first_pod_to_none_and_back_with_the_rights_of_the_manifest() {
    live(async |life| {
        life.load(5, 30).await;
        assert_eq!((life.replicas(), life.conditions()), (1, READY.map(str::to_owned)));
        life.requests();
        life.load(5, 60).await;
        assert_eq!(life.requests(), [] as [&str; 0], "nothing changes, nothing is asked");
        life.load(35, 10).await;
        assert_eq!(life.replicas(), 4);
        life.load(5, 60).await;
        assert_eq!(life.replicas(), 1);
        life.load(0, 120).await;
        let asleep = ["False", "False", "True", "True"].map(str::to_owned);
        assert_eq!((life.replicas(), life.conditions()), (0, asleep));
        assert_eq!(life.field(SKS, "/spec/mode"), "Proxy");
        assert!(life.pods.probes.load(Ordering::Relaxed) > 0);
        life.requests();
        life.load(0, 60).await;
        assert_eq!(life.requests(), [] as [&str; 0]);
        life.load(5, 10).await;
        assert_eq!((life.replicas(), life.conditions()), (1, READY.map(str::to_owned)));
        assert_eq!(life.field(SKS, "/spec/mode"), "Serve");
        assert_eq!(life.api.lock().used, rights(RBAC), "each right is used, and no other is needed");
        // Deleted: the controller does nothing more for it.
        life.api.lock().delete(PA);
        life.load(100, 5).await;
        life.requests();
        life.load(200, 30).await;
        assert_eq!(life.requests(), [] as [&str; 0]);
        assert_eq!(life.replicas(), 1);
    })
    .await;
}

fn least(pods: u32) -> Value {
    json!({ "metadata": { "annotations": { "autoscaling.knative.dev/min-scale": pods.to_string() } } })
}

/// Requests for a collection: lists, watches.
fn reads(life: &Life, collection: &str) -> (usize, usize) {
    let server = life.api.lock();
    let of = || server.seen.iter().filter(|seen| seen.path == collection);
    let watches = of().filter(|seen| seen.is_watch()).count();
    (of().count() - watches, watches)
}

#[tokio::test(start_paused = true)]
async fn what_is_missed_while_a_watch_was_broken_off_is_caught_up_with() {
    live(async |life| {
        life.load(5, 30).await;
        for collection in [PAS, SERVICES, SLICES] {
            assert!(life.api.lock().is_watched(collection), "{collection}");
        }
        life.requests();
        life.api.lock().break_watches(PAS, false);
        life.edit(PA, &least(2));
        life.load(5, 5).await;
        assert_eq!(reads(life, PAS), (0, 1), "it goes on from where it was");
        assert_eq!(life.replicas(), 2);
    })
    .await;
}

/// 410: the server no longer remembers the changes since.
#[tokio::test(start_paused = true)]
async fn after_gone_everything_is_listed_anew() {
    live(async |life| {
        life.load(5, 30).await;
        life.requests();
        {
            let mut server = life.api.lock();
            for collection in [PAS, SERVICES, SLICES] {
                server.break_watches(collection, false);
            }
            server.edit(PA, &least(3));
            // Another client meddles with the service, too.
            server.edit(SKS, &json!({ "spec": { "mode": "Proxy" } }));
            server.put(PODS, slice(1));
            // Forgets all of it.
            server.break_watches(PAS, true);
        }
        life.load(5, 20).await;
        for collection in [PAS, SERVICES, SLICES] {
            assert_eq!(reads(life, collection).0, 1, "{collection}");
            assert!(life.api.lock().is_watched(collection), "{collection}");
        }
        assert_eq!(life.replicas(), 3);
        assert_eq!(life.field(SKS, "/spec/mode"), "Serve");
        assert_eq!(life.conditions(), READY.map(str::to_owned));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_told_gone_lists_anew() {
    live(async |life| {
        life.load(5, 30).await;
        life.requests();
        {
            let mut server = life.api.lock();
            server.break_watches(PAS, true);
            server.edit(PA, &least(3));
        }
        life.load(5, 20).await;
        assert_eq!(reads(life, PAS), (1, 1));
        assert_eq!(life.replicas(), 3);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_refuses_now_and_then_is_asked_again() {
    live(async |life| {
        {
            let mut server = life.api.lock();
            for (line, code, reason) in [
                (format!("GET {PAS}"), 500, "InternalError"),
                (format!("POST {}", SKS.rsplit_once('/').unwrap().0), 409, "AlreadyExists"),
                (format!("PATCH {PA}/status"), 409, "Conflict"),
                (format!("GET {TARGET}/scale"), 503, "ServiceUnavailable"),
                (format!("PATCH {TARGET}/scale"), 404, "NotFound"),
            ] {
                server.faults.push_back((line, code, reason));
            }
        }
        life.load(35, 60).await;
        assert!(life.api.lock().faults.is_empty());
        assert_eq!((life.replicas(), life.conditions()), (4, READY.map(str::to_owned)));
    })
    .await;
}

/// An object still unknown does not count as missing: the controller writes nothing while its watches are late.
#[tokio::test(start_paused = true)]
async fn a_controller_that_starts_anew_changes_nothing() {
    let life = Life::start();
    life.controlled(async |life| life.load(35, 30).await).await;
    assert_eq!((life.replicas(), life.conditions()), (4, READY.map(str::to_owned)));
    life.requests();
    let before = life.api.lock().object(PA).cloned();
    for late in [SERVICES, SLICES] {
        life.api.lock().faults.push_back((format!("GET {late}"), 500, "InternalError"));
    }
    life.controlled(async |life| life.load(35, 30).await).await;
    assert!(life.api.lock().faults.is_empty());
    let written: Vec<_> = life.requests().into_iter().filter(|line| !line.starts_with("GET")).collect();
    // The desired number is unknown until the first look at the load; the target stays unchanged meanwhile.
    assert_eq!(written, [format!("PATCH {PA}/status"), format!("PATCH {PA}/status")]);
    let scales = |object: Option<&Value>| object.unwrap()["status"]["desiredScale"].clone();
    assert_eq!(scales(life.api.lock().object(PA)), scales(before.as_ref()));
    assert_eq!((life.replicas(), life.conditions()), (4, READY.map(str::to_owned)));
}
