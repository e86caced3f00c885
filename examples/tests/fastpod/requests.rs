//! Requests to an API server, before a mock of it.

use super::api_server::{Api, Seen, rights};
use super::decisions::{at, fastpod, node};
use super::policy::{Request, admit, policy};
use futures::StreamExt as _;
use gshare_examples::kubernetes::fastpod::FaSTPod;
use gshare_examples::kubernetes::fastpod::controller::{Controller, Outcome};
use gshare_examples::kubernetes::fastpod::fastpod_writes::Settings;
use gshare_examples::kubernetes::fastpod::pods::{Injected, Mounts, name};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

const RBAC: &str = include_str!("../../kubernetes/fastpod/rbac.yaml");
const POLICY: &str = include_str!("../../kubernetes/fastpod/policy.yaml");
const CRD: &str = include_str!("../../kubernetes/fastpod/crd.yaml");
const FASTPODS: &str = "/apis/gshare.io/v1alpha1/fastpods";
const PODS: &str = "/api/v1/pods";
const NODES: &str = "/api/v1/nodes";
const LOOK: [&str; 3] = ["GET /apis/gshare.io/v1alpha1/fastpods", "GET /api/v1/pods", "GET /api/v1/nodes"];

fn of(name: &str) -> String {
    format!("/apis/gshare.io/v1alpha1/namespaces/team/fastpods/{name}")
}

fn pod(name: &str) -> String {
    format!("/api/v1/namespaces/team/pods/{name}")
}

struct World {
    api: Api,
    controller: Controller,
    second: i64,
}

impl World {
    /// One node, and these FaSTPods.
    fn new(fastpods: &[FaSTPod]) -> Self {
        Self::with(fastpods, Settings::default())
    }

    fn with(fastpods: &[FaSTPod], settings: Settings) -> Self {
        let (api, client) = Api::start(RBAC, "gshare-fastpod");
        api.define(CRD);
        // Requests of the controller pass the policy of the manifests.
        let policy = policy(POLICY, "gshare-fastpod-pods");
        api.lock().refuse = Some(Box::new(move |operation, object, old| {
            let user = "system:serviceaccount:gshare-system:fastpod".into();
            let request = Request { operation, user, node: None, object: object.clone(), old: old.clone() };
            admit(&policy, &request).err()
        }));
        api.lock().put(&format!("{NODES}/a"), json!(node("a", 1, 16384)));
        for fastpod in fastpods {
            api.lock().put(&of(fastpod.metadata.name.as_deref().unwrap()), json!(fastpod));
        }
        Self { api, controller: Controller::new(client, settings), second: 0 }
    }

    /// One look: its outcome, and the requests after the three lists.
    async fn look(&mut self) -> (Outcome, Vec<String>) {
        self.second += 1;
        // Past the pause after a refusal.
        tokio::time::advance(Duration::from_secs(1)).await;
        let outcome = self.controller.look(&at(self.second)).await.unwrap();
        let mut lines: Vec<_> = self.api.lock().take().iter().map(|seen| seen.line()).collect();
        assert_eq!(lines.drain(..3).collect::<Vec<_>>(), LOOK);
        (outcome, lines)
    }

    /// Looks until nothing is written.
    async fn settle(&mut self) {
        for _ in 0..20 {
            if self.look().await.1.is_empty() {
                return;
            }
        }
        panic!("it does not settle");
    }

    fn field(&self, path: &str, pointer: &str) -> Value {
        self.api.lock().object(path).and_then(|object| object.pointer(pointer)).cloned().unwrap_or_default()
    }

    fn fault(&self, line: &str, code: u16, reason: &'static str) {
        self.api.lock().fail(line, code, reason);
    }
}

#[tokio::test(start_paused = true)]
async fn every_request_from_a_new_fastpod_to_rest_is_as_it_should_be() {
    let one = fastpod("f", 1, [12, 30, 1024]);
    let mut world = World::new(std::slice::from_ref(&one));
    let made = name(&one, 0);
    let status = format!("PUT {}/status", of("f"));

    world.controller.look(&at(1)).await.unwrap();
    let asked = world.api.lock().take();
    let lines: Vec<_> = asked.iter().map(|seen| seen.line()).collect();
    assert_eq!(lines[..3], LOOK);
    assert_eq!(lines[3..], [format!("POST {}", pod("").trim_end_matches('/')), status.clone()]);
    assert!(asked[1].query.contains("labelSelector=gshare.io%2Ffastpod-uid"), "{}", asked[1].query);
    assert!(asked[2].query.contains("labelSelector=gshare.io%2Ffastpod%3Dtrue"), "{}", asked[2].query);
    assert_eq!(asked[3].body["metadata"]["name"], json!(made));
    assert_eq!(asked[3].body["metadata"]["annotations"]["gshare.io/rectangle"], "0,0,3000,1200");
    assert_eq!(asked[4].body["status"]["conditions"][0]["reason"], "Placed");

    let (_, lines) = world.look().await;
    assert_eq!(lines, [format!("POST {}/binding", pod(&made)), status.clone()]);
    let (_, lines) = world.look().await;
    assert_eq!(lines, [status], "where it is bound");
    assert_eq!(world.field(&of("f"), "/status/boundDeviceIDs"), json!({ made.as_str(): "a/0" }));
    let (outcome, lines) = world.look().await;
    assert_eq!((outcome.written, outcome.again, lines.len()), (0, None, 0));

    // Fewer: deleted by its UID.
    world.api.lock().edit(&of("f"), &json!({ "spec": { "replicas": 0 } }));
    let uid = world.field(&pod(&made), "/metadata/uid");
    world.second += 1;
    world.controller.look(&at(world.second)).await.unwrap();
    let asked = world.api.lock().take();
    assert_eq!(asked[3].line(), format!("DELETE {}", pod(&made)));
    assert_eq!(asked[3].body["preconditions"]["uid"], uid);
    world.settle().await;
    assert_eq!(world.field(&of("f"), "/status/replicas"), 0);
}

#[tokio::test(start_paused = true)]
async fn what_was_overtaken_is_looked_at_again_and_what_is_refused_keeps_nothing_else_back() {
    let (posts, status) = (pod("").trim_end_matches('/').to_owned(), format!("{}/status", of("f")));
    for (line, code, overtaken) in [
        (format!("POST {posts}"), 409, true),
        (format!("POST {posts}"), 404, true),
        (format!("PUT {status}"), 409, true),
        (format!("PUT {status}"), 404, true),
        (format!("PUT {status}"), 410, true),
        (format!("POST {posts}"), 403, false),
        (format!("POST {posts}"), 422, false),
        (format!("POST {posts}"), 500, false),
        (format!("PUT {status}"), 422, false),
    ] {
        let mut world = World::new(&[fastpod("f", 1, [12, 30, 1024]), fastpod("g", 1, [12, 30, 1024])]);
        world.fault(&line, code, "Because");
        let (outcome, lines) = world.look().await;
        let is_refused = line.starts_with("POST") && [403, 422].contains(&code);
        let told = if is_refused { 5 } else { 4 };
        assert_eq!(lines.len(), told, "all four writes are tried, and a refusal is told: {lines:?}");
        assert_eq!((outcome.written, outcome.overtaken), (3, usize::from(overtaken)), "{line} {code}");
        assert_eq!(outcome.complaints.len(), usize::from(!overtaken), "{:?}", outcome.complaints);
        assert!(outcome.again.is_some());
        let said = world.field(&of("f"), "/status/conditions/0/reason");
        assert_eq!(said == "Refused", is_refused, "{line} {code}: {said}");
        // After any of these answers the next looks make the remaining writes.
        world.settle().await;
        for name in ["f", "g"] {
            assert_eq!(world.field(&of(name), "/status/replicas"), 1, "{line} {code}");
            assert_eq!(world.field(&of(name), "/status/conditions/0/reason"), "Placed");
        }
    }
    // Without a list nothing is decided.
    for list in [FASTPODS, PODS, NODES] {
        let world = World::new(&[fastpod("f", 1, [12, 30, 1024])]);
        world.fault(&format!("GET {list}"), 500, "InternalError");
        assert!(world.controller.look(&at(1)).await.is_err());
        assert!(world.api.lock().take().iter().all(|seen| seen.method == "GET"));
    }
}

/// A pod deleted and made again by another client under the same name does not pass for the earlier pod.
#[tokio::test(start_paused = true)]
async fn what_was_read_before_it_changed_is_neither_bound_nor_overwritten() {
    let one = fastpod("f", 1, [12, 30, 1024]);
    let mut world = World::new(std::slice::from_ref(&one));
    world.look().await;
    let path = pod(&name(&one, 0));
    let stale = world.controller.observe().await.unwrap();
    world.api.lock().edit(&path, &json!({ "metadata": { "uid": "another" } }));
    world.api.lock().edit(&of("f"), &json!({ "status": { "replicas": 7 } }));
    world.api.lock().take();
    let outcome = world.controller.write_all(&at(9), &stale).await;
    assert_eq!((outcome.written, outcome.overtaken), (0, 2), "the binding and the status");
    assert_eq!(world.field(&path, "/spec/nodeName"), Value::Null);
    assert_eq!(world.field(&of("f"), "/status/replicas"), 7);
}

/// Runs the controller for this time; time passes only while the controller is idle.
async fn runs(world: &World, seconds: u64) {
    let end = tokio::time::sleep(Duration::from_secs(seconds));
    world.controller.run(end).await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_too_old_begins_anew() {
    let world = World::new(&[fastpod("f", 1, [12, 30, 1024])]);
    let scenario = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(world.field(&of("f"), "/status/replicas"), 1);
        for collection in [FASTPODS, PODS, NODES] {
            assert!(world.api.lock().is_watched(collection), "{collection}");
        }
        {
            let mut server = world.api.lock();
            // Events missed during a break of the watch are forgotten, too.
            server.break_watches(FASTPODS, false);
            server.edit(&of("f"), &json!({ "spec": { "replicas": 3 } }));
            server.break_watches(FASTPODS, true);
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(world.field(&of("f"), "/status/replicas"), 3);
        assert!(world.api.lock().is_watched(FASTPODS));
        // The watch itself reports it.
        world.api.lock().break_watches(FASTPODS, true);
        world.api.lock().edit(&of("f"), &json!({ "spec": { "replicas": 2 } }));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(world.field(&of("f"), "/status/replicas"), 2);
        world.api.lock().take();
        tokio::time::sleep(Duration::from_secs(600)).await;
        let asked = world.api.lock().take();
        assert!(asked.iter().all(|seen| seen.method == "GET"), "at rest nothing is written: {asked:?}");
    };
    tokio::select! {
        () = runs(&world, 86_400) => panic!("it ended"),
        () = scenario => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_controller_that_is_refused_goes_on_when_it_no_longer_is_and_ends_when_asked() {
    let world = World::new(&[fastpod("f", 1, [12, 30, 1024])]);
    for _ in 0..3 {
        for list in [FASTPODS, PODS, NODES] {
            world.fault(&format!("GET {list}"), 503, "ServiceUnavailable");
        }
    }
    runs(&world, 120).await;
    assert_eq!(world.api.lock().faults.len(), 0);
    assert_eq!(world.field(&of("f"), "/status/replicas"), 1);
}

/// All requests of the controller to an API server, against the role in its manifest: a request beyond the role is answered with 403, and
/// the role holds no unused right.
#[tokio::test(start_paused = true)]
async fn the_role_allows_what_is_used_and_no_more() {
    let one = fastpod("f", 2, [12, 30, 1024]);
    let mut world = World::new(std::slice::from_ref(&one));
    world.settle().await;
    // Two pods in one place: a neighbour was moved, and the controller ended before it noted the move.
    let rectangle = world.field(&pod(&name(&one, 0)), "/metadata/annotations/gshare.io~1rectangle");
    let patch = json!({ "metadata": { "annotations": { "gshare.io/rectangle": rectangle } } });
    world.api.lock().edit(&pod(&name(&one, 1)), &patch);
    let (_, lines) = world.look().await;
    assert_eq!(lines, [format!("PATCH {}", pod(&name(&one, 1)))]);
    assert_ne!(world.field(&pod(&name(&one, 1)), "/metadata/annotations/gshare.io~1rectangle"), rectangle);
    world.settle().await;
    world.api.lock().edit(&of("f"), &json!({ "spec": { "replicas": 1 } }));
    world.settle().await;
    // An Event tells the fault.
    world.api.lock().edit(&of("f"), &json!({ "metadata": { "annotations": { "faasshare/colour": "red" } } }));
    world.settle().await;
    let mut changes = std::pin::pin!(world.controller.changes());
    while [FASTPODS, PODS, NODES].iter().any(|collection| !world.api.lock().is_watched(collection)) {
        tokio::select! {
            _ = changes.next() => {}
            () = tokio::task::yield_now() => {}
        }
    }
    assert_eq!(world.api.lock().used, rights(RBAC));
}

/// Settings of a controller for pods with files from the node.
fn by_nodes() -> Settings {
    let injected = Injected { mounts: Mounts::Node, ..Injected::default() };
    Settings { injected, ..Settings::default() }
}

/// A FaSTPod with a template within Pod Security `restricted`.
fn restricted() -> FaSTPod {
    let mut one = fastpod("f", 1, [12, 30, 1024]);
    one.spec.pod_spec["securityContext"] =
        json!({ "runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": { "type": "RuntimeDefault" } });
    one.spec.pod_spec["containers"][0]["securityContext"] =
        json!({ "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } });
    one
}

/// Both levels of Pod Security refuse pods which mount files of their node themselves; neither refuses pods with mounts made by the node.
#[tokio::test(start_paused = true)]
async fn namespaces_with_pod_security_take_pods_whose_files_the_node_mounts() {
    for level in ["baseline", "restricted"] {
        for (settings, reason) in [(Settings::default(), "PodSecurity"), (by_nodes(), "Placed")] {
            let mut world = World::with(&[restricted()], settings);
            let labels = json!({ "pod-security.kubernetes.io/enforce": level });
            let namespace = json!({ "metadata": { "name": "team", "labels": labels } });
            world.api.lock().put("/api/v1/namespaces/team", namespace);
            let offered = json!({ "status": { "allocatable": { "gshare.io/hook": "1024" } } });
            world.api.lock().edit(&format!("{NODES}/a"), &offered);
            for _ in 0..4 {
                world.look().await;
            }
            let condition = world.field(&of("f"), "/status/conditions/0");
            assert_eq!(condition["reason"], reason, "{level}: {condition}");
            if reason == "PodSecurity" {
                let said = condition["message"].as_str().unwrap();
                let volumes = r#"(volumes "gshare-hook", "gshare-socket""#;
                let kind = if level == "baseline" { "hostPath volumes" } else { "restricted volume types" };
                assert!(said.contains(&format!("{kind} {volumes}")), "{said}");
            } else {
                assert_eq!(world.field(&of("f"), "/status/boundDeviceIDs").as_object().unwrap().len(), 1);
            }
        }
    }
}

/// A kubelet would start a pod with an unknown extended resource, without the hook: no pod goes to a node without this resource.
#[tokio::test(start_paused = true)]
async fn a_node_that_does_not_offer_the_hook_gets_no_pod() {
    let mut world = World::with(&[fastpod("f", 1, [12, 30, 1024])], by_nodes());
    for offered in [Value::Null, json!("0")] {
        let offered = json!({ "status": { "allocatable": { "gshare.io/hook": offered } } });
        world.api.lock().edit(&format!("{NODES}/a"), &offered);
        world.look().await;
        let condition = world.field(&of("f"), "/status/conditions/0");
        assert_eq!(condition["reason"], "NodeResource");
        let said = condition["message"].as_str().unwrap();
        assert!(said.contains("1 of 1 nodes are out: 1 without gshare.io/hook"), "{said}");
    }
    let offered = json!({ "status": { "allocatable": { "gshare.io/hook": "1k" } } });
    world.api.lock().edit(&format!("{NODES}/a"), &offered);
    world.settle().await;
    let made = pod(&name(&fastpod("f", 1, [12, 30, 1024]), 0));
    for list in ["limits", "requests"] {
        let asked = world.field(&made, &format!("/spec/containers/0/resources/{list}"));
        assert_eq!(asked, json!({ "gshare.io/hook": "1" }));
    }
    // The share comes with the pod.
    assert_eq!(world.field(&made, "/spec/volumes/0/name"), "gshare-share");
    assert_eq!(world.field(&made, "/spec/volumes/1"), Value::Null);
}

const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/team/events";

/// The reason for held-up replicas is reported once, also when the counts in its message change; then its end.
#[tokio::test(start_paused = true)]
async fn an_event_says_what_holds_replicas_up_and_when_it_no_longer_does() {
    let mut world = World::new(&[fastpod("f", 20, [12, 30, 1024])]);
    let told = async |world: &mut World| {
        let mut events = Vec::new();
        for _ in 0..5 {
            world.second += 1;
            world.controller.look(&at(world.second)).await.unwrap();
            let seen = world.api.lock().take();
            events.extend(seen.into_iter().filter(|seen| seen.path == EVENTS).map(|seen| seen.body));
        }
        events
    };
    // Sixteen fit.
    let events = told(&mut world).await;
    let [event] = &events[..] else { panic!("{events:?}") };
    assert_eq!((&event["type"], &event["reason"]), (&json!("Warning"), &json!("NoRoom")));
    let note = event["note"].as_str().unwrap();
    assert!(note.contains("1 GiB of memory free"), "{note}");
    let regarding =
        ["kind", "apiVersion", "name", "namespace", "uid"].map(|key| event["regarding"][key].clone());
    assert_eq!(json!(regarding), json!(["FaSTPod", "gshare.io/v1alpha1", "f", "team", "uid-f"]));
    for needed in ["action", "eventTime", "reportingController", "reportingInstance"] {
        assert!(event[needed].as_str().is_some_and(|text| !text.is_empty()), "{event}");
    }
    world.api.lock().edit(&of("f"), &json!({ "spec": { "replicas": 30 } }));
    assert_eq!(told(&mut world).await, [Value::Null; 0], "the same reason");
    world.api.lock().edit(&of("f"), &json!({ "spec": { "replicas": 2 } }));
    let events = told(&mut world).await;
    let [event] = &events[..] else { panic!("{events:?}") };
    assert_eq!((&event["type"], &event["reason"]), (&json!("Normal"), &json!("Placed")));
    assert_eq!(event["note"], "every replica has a place; before: NoRoom");
    // A note longer than an Event allows is cut.
    let key = format!("faasshare/{}", "\u{e9}".repeat(2000));
    world.api.lock().edit(&of("f"), &json!({ "metadata": { "annotations": { key: "red" } } }));
    let events = told(&mut world).await;
    let length = events[0]["note"].as_str().unwrap().len();
    assert!((1000..=1024).contains(&length), "{length}");
}

/// A due FaSTPod without room makes the controller look again at no time.
#[tokio::test(start_paused = true)]
async fn a_refused_fastpod_without_room_leaves_the_api_server_alone() {
    let world = World::new(&[fastpod("f", 1, [12, 30, 1024])]);
    world.fault(&format!("POST {}", pod("").trim_end_matches('/')), 403, "Forbidden");
    let scenario = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(world.field(&of("f"), "/status/conditions/0/reason"), "Refused");
        world.api.lock().put(&format!("{NODES}/a"), json!(node("a", 1, 512)));
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(world.field(&of("f"), "/status/conditions/0/reason"), "NeverFits");
        world.api.lock().take();
        for _ in 0..600 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let asked = world.api.lock().take();
            assert!(asked.iter().all(Seen::is_watch), "{asked:?}");
        }
    };
    tokio::select! {
        () = runs(&world, 86_400) => panic!("it ended"),
        () = scenario => {}
    }
}

/// Time that the API server takes for each request, one after the other.
const LATENCY: Duration = Duration::from_millis(4);
const GOOD: usize = 100;

/// Times at which each of 100 FaSTPods of three replicas in ten namespaces is ready, and at which each pod of another tenant was refused:
/// this tenant has an older FaSTPod of 1,000 replicas, in a namespace with `PodSecurity`.
async fn run_beside(refused: bool) -> (Vec<Duration>, Vec<Duration>) {
    let world = World::new(&[]);
    let path = |fastpod: &Value| {
        let at = ["namespace", "name"].map(|key| fastpod["metadata"][key].as_str().unwrap().to_owned());
        format!("/apis/gshare.io/v1alpha1/namespaces/{}/fastpods/{}", at[0], at[1])
    };
    let mut good = Vec::new();
    {
        let mut server = world.api.lock();
        (server.latency, server.has_kubelets) = (LATENCY, true);
        let labels = json!({ "pod-security.kubernetes.io/enforce": "baseline" });
        let namespace = json!({ "metadata": { "name": "baseline", "labels": labels } });
        server.put("/api/v1/namespaces/baseline", namespace);
        for name in ["a", "b", "c", "d"] {
            server.put(&format!("{NODES}/{name}"), json!(node(name, 4, 65536)));
        }
        let mut put = |name: &str, namespace: &str, replicas, created| {
            let mut fastpod = json!(fastpod(name, replicas, [12, 30, 1024]));
            fastpod["metadata"]["namespace"] = json!(namespace);
            fastpod["metadata"]["creationTimestamp"] = json!(at(created));
            server.put(&path(&fastpod), fastpod.clone());
            path(&fastpod)
        };
        for index in 0..GOOD {
            good.push(put(&format!("good{index}"), &format!("team{}", index % 10), 3, 2));
        }
        if refused {
            put("bad", "baseline", 1000, 1);
        }
    }
    let (start, mut ready, mut refusals) = (Instant::now(), BTreeMap::new(), Vec::new());
    let scenario = async {
        while start.elapsed() < Duration::from_secs(35) {
            tokio::time::sleep(5 * LATENCY).await;
            for good in &good {
                assert_ne!(
                    world.field(good, "/status/conditions/0/reason"),
                    "NoRoom",
                    "there is room for all"
                );
                if world.field(good, "/status/readyReplicas") == 3 {
                    ready.entry(good).or_insert(start.elapsed());
                }
            }
            let seen = world.api.lock().take();
            let made = seen.iter().filter(|seen| seen.line() == "POST /api/v1/namespaces/baseline/pods");
            refusals.extend(made.map(|_| start.elapsed()));
            // Other FaSTPods keep the controller looking.
            let label =
                json!({ "metadata": { "labels": { "seen": start.elapsed().as_secs().to_string() } } });
            world.api.lock().edit(&format!("{NODES}/a"), &label);
        }
    };
    tokio::select! {
        () = runs(&world, 86_400) => panic!("it ended"),
        () = scenario => {}
    }
    let bad = "/apis/gshare.io/v1alpha1/namespaces/baseline/fastpods/bad";
    let said = world.field(bad, "/status/conditions/0/reason");
    assert_eq!(said == "PodSecurity", refused, "{said}");
    assert_eq!(ready.len(), GOOD, "all are ready");
    (ready.into_values().collect(), refusals)
}

#[test]
fn a_thousand_refused_replicas_slow_no_other_tenant() {
    // Each has a clock of its own, so they may run at the same time.
    let run = |refused| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(run_beside(refused))
    };
    let ((alone, none), (beside, refusals)) = std::thread::scope(|scope| {
        let alone = scope.spawn(|| run(false));
        let beside = run(true);
        (alone.join().unwrap(), beside)
    });
    assert!(none.is_empty());
    for (index, first) in refusals.iter().enumerate() {
        let within =
            refusals[index..].iter().take_while(|time| **time - *first < Duration::from_secs(1)).count();
        assert!(within <= 10, "{within} creations within a second, from {first:?}");
    }
    assert!((8..=20).contains(&refusals.len()), "tried ever less often: {refusals:?}");
    let mean = |all: &[Duration]| all.iter().sum::<Duration>() / u32::try_from(GOOD).unwrap();
    let last = |all: &[Duration]| all.iter().max().copied().unwrap();
    for (name, alone, beside) in
        [("mean", mean(&alone), mean(&beside)), ("last", last(&alone), last(&beside))]
    {
        println!(
            "{name} time to ready: {alone:?} alone, {beside:?} beside them; {} refusals",
            refusals.len()
        );
        assert!(beside * 10 <= alone * 11, "{name}: {alone:?}, {beside:?}");
    }
}
