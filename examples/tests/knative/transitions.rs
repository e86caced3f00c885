//! One pass at a time: the objects, the time, and each request of the pass.

use super::api_server::{Api, Seen, listed};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use gshare_core::Timestamp;
use gshare_examples::knative::api::{PodAutoscaler, ServerlessService};
use gshare_examples::knative::decider::{PodLoad, Policy};
use gshare_examples::knative::outside::{Outside, OutsideError, Waiting};
use gshare_examples::knative::settings::Defaults;
use gshare_examples::knative::shell::{Config, Moment, PassError, Shell};
use gshare_examples::kubernetes::controller_metrics::Metrics;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::jiff;
use kube::runtime::reflector::store::Writer;
use kube::runtime::{reflector, watcher::Event};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) const PA: &str =
    "/apis/autoscaling.internal.knative.dev/v1alpha1/namespaces/default/podautoscalers/resnet-00001";
pub(crate) const SKS: &str =
    "/apis/networking.internal.knative.dev/v1alpha1/namespaces/default/serverlessservices/resnet-00001";
pub(crate) const TARGET: &str = "/apis/apps/v1/namespaces/default/deployments/resnet-00001-deployment";
pub(crate) const PODS: &str =
    "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/resnet-00001-private-1";
pub(crate) const GATES: &str =
    "/apis/discovery.k8s.io/v1/namespaces/knative-serving/endpointslices/activator-service-1";
pub(crate) const PAS: &str = "/apis/autoscaling.internal.knative.dev/v1alpha1/podautoscalers";
pub(crate) const SERVICES: &str = "/apis/networking.internal.knative.dev/v1alpha1/serverlessservices";
pub(crate) const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";

pub(crate) const RBAC: &str = include_str!("../../knative/rbac.yaml");

/// An API server with the rights of the manifest, and a client of it.
pub(crate) fn start() -> (Api, kube::Client) {
    Api::start(RBAC, "gshare-knative")
}

/// Pods and activators of this test.
#[derive(Default)]
pub(crate) struct Pods {
    /// The report of each pod; other pods do not answer.
    pub(crate) loads: Mutex<BTreeMap<IpAddr, PodLoad>>,
    /// Requests that wait at each activator.
    pub(crate) waiting: Mutex<f64>,
    /// Whether the activator answers for the service.
    pub(crate) backed: AtomicBool,
    /// How often it was asked.
    pub(crate) probes: AtomicU64,
}

impl Outside for Pods {
    fn pod(&self, address: IpAddr) -> BoxFuture<'_, Result<PodLoad, OutsideError>> {
        let load = self.loads.lock().unwrap().get(&address).copied();
        std::future::ready(load.ok_or(OutsideError::Late)).boxed()
    }

    fn activator(&self, _: IpAddr) -> BoxFuture<'_, Result<Waiting, OutsideError>> {
        let key = ("default".to_owned(), "resnet-00001".to_owned());
        let waiting = BTreeMap::from([(key, *self.waiting.lock().unwrap())]);
        std::future::ready(Ok(waiting)).boxed()
    }

    fn is_backed(&self, namespace: &str, service: &str, h2c: bool) -> BoxFuture<'_, bool> {
        assert_eq!((namespace, service, h2c), ("default", "resnet-00001", false));
        self.probes.fetch_add(1, Ordering::Relaxed);
        std::future::ready(self.backed.load(Ordering::Relaxed)).boxed()
    }
}

pub(crate) fn config() -> Config {
    Config {
        class: "coscale.gshare.io".into(),
        policy: Policy::Heuristic,
        defaults: Defaults::default(),
        system_namespace: "knative-serving".into(),
        metrics: Metrics::default(),
    }
}

/// The object as the Revision makes it. A pod serves 10 requests per second.
pub(crate) fn revision(annotations: &[(&str, &str)]) -> Value {
    let base = [
        ("class", "coscale.gshare.io"),
        ("metric", "rps"),
        ("target", "10"),
        ("target-utilization-percentage", "100"),
    ];
    let all = base.iter().chain(annotations);
    let all: BTreeMap<_, _> =
        all.map(|(key, value)| (format!("autoscaling.knative.dev/{key}"), *value)).collect();
    json!({
        "apiVersion": "autoscaling.internal.knative.dev/v1alpha1",
        "kind": "PodAutoscaler",
        "metadata": {
            "name": "resnet-00001", "namespace": "default", "uid": "pa-uid", "generation": 1,
            "labels": { "serving.knative.dev/revision": "resnet-00001" }, "annotations": all,
        },
        "spec": {
            "scaleTargetRef": { "apiVersion": "apps/v1", "kind": "Deployment", "name": "resnet-00001-deployment" },
            "reachability": "Reachable", "protocolType": "http1",
        },
    })
}

pub(crate) fn deployment(replicas: u32) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "spec": { "replicas": replicas },
        "metadata": { "name": "resnet-00001-deployment", "namespace": "default", "generation": 1 },
    })
}

pub(crate) fn address(pod: u32) -> IpAddr {
    IpAddr::from([10, 0, 0, u8::try_from(pod).unwrap()])
}

/// The part of the private service with `ready` pods that are ready, and one that is not.
pub(crate) fn slice(ready: u32) -> Value {
    let endpoint = |pod: u32, ready| json!({ "addresses": [address(pod).to_string()], "conditions": { "ready": ready } });
    let mut endpoints: Vec<_> = (1..=ready).map(|pod| endpoint(pod, true)).collect();
    endpoints.push(endpoint(200, false));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "resnet-00001-private-1", "namespace": "default",
            "labels": {
                "kubernetes.io/service-name": "resnet-00001-private",
                "networking.internal.knative.dev/serverlessservice": "resnet-00001",
                "networking.internal.knative.dev/serviceType": "Private",
            },
        },
        "endpoints": endpoints,
    })
}

pub(crate) fn gate() -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "activator-service-1", "namespace": "knative-serving",
            "labels": { "kubernetes.io/service-name": "activator-service" },
        },
        "endpoints": [{ "addresses": ["10.1.0.1"] }],
    })
}

/// The time after `second` seconds, as objects carry it.
fn stamp(second: u64) -> String {
    format!("1970-01-01T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

/// Knative's status of a service.
pub(crate) fn service_status(generation: i64, proxied_since: Option<u64>) -> Value {
    let condition = |kind: &str, status: &str, at| json!({ "type": kind, "status": status, "lastTransitionTime": stamp(at) });
    let activator = match proxied_since {
        Some(at) => condition("ActivatorEndpointsPopulated", "True", at),
        None => condition("ActivatorEndpointsPopulated", "False", 0),
    };
    json!({ "status": {
        "observedGeneration": generation, "conditions": [activator, condition("Ready", "True", 0)],
        "serviceName": "resnet-00001", "privateServiceName": "resnet-00001-private",
    } })
}

struct World {
    api: Api,
    pods: Arc<Pods>,
    shell: Shell,
    second: Arc<AtomicU64>,
    services: Writer<ServerlessService>,
    slices: Writer<EndpointSlice>,
    gates: Writer<EndpointSlice>,
}

fn bring<K>(writer: &mut Writer<K>, all: Vec<K>)
where
    K: reflector::Lookup<DynamicType = ()> + Clone + 'static,
{
    writer.apply_watcher_event(&Event::Init);
    for object in all {
        writer.apply_watcher_event(&Event::InitApply(object));
    }
    writer.apply_watcher_event(&Event::InitDone);
}

impl World {
    /// A revision with these annotations, with one pod of its Deployment not ready.
    fn new(annotations: &[(&str, &str)]) -> Self {
        let (api, client) = start();
        api.lock().put(PA, revision(annotations));
        api.lock().put(TARGET, deployment(1));
        let (services_store, services) = reflector::store();
        let (slices_store, slices) = reflector::store();
        let (gates_store, gates) = reflector::store();
        let pods = Arc::new(Pods::default());
        let second = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&second);
        let clock = move || {
            let second = clock.load(Ordering::Relaxed);
            Moment {
                wall: jiff::Timestamp::UNIX_EPOCH + Duration::from_secs(second),
                uptime: Timestamp::from_millis(second * 1_000),
            }
        };
        let stores = [slices_store, gates_store];
        let outside = Arc::clone(&pods);
        let shell = Shell::new(client, config(), outside, Box::new(clock), services_store, stores);
        Self { api, pods, shell, second, services, slices, gates }
    }

    fn at(&self, second: u64) {
        self.second.store(second, Ordering::Relaxed);
    }

    /// Lets the watches catch up.
    fn pa(&mut self) -> PodAutoscaler {
        bring(&mut self.services, listed(&self.api, SERVICES));
        let slices: Vec<EndpointSlice> = listed(&self.api, SLICES);
        let (gates, pods) = slices
            .into_iter()
            .partition(|slice| slice.metadata.namespace.as_deref() == Some("knative-serving"));
        bring(&mut self.slices, pods);
        bring(&mut self.gates, gates);
        let object = self.api.lock().object(PA).unwrap().clone();
        serde_json::from_value(object).unwrap()
    }

    async fn try_pass(&mut self) -> (Result<Option<Duration>, PassError>, Vec<Seen>) {
        let pa = self.pa();
        let passed = self.shell.pass(&pa).await;
        (passed, self.api.lock().take())
    }

    /// A pass with exactly these requests; another pass then makes only the read.
    async fn pass(&mut self, expected: &[(&str, String, Value)]) -> Option<Duration> {
        let (passed, seen) = self.try_pass().await;
        let wake = passed.unwrap();
        let seen: Vec<_> =
            seen.iter().map(|seen| (seen.method.as_str(), seen.path.clone(), &seen.body)).collect();
        let null = Value::Null;
        let mut all = vec![("GET", scale(), &null)];
        all.extend(expected.iter().map(|(method, path, body)| (*method, path.clone(), body)));
        assert_eq!(seen, all);
        let (passed, seen) = self.try_pass().await;
        passed.unwrap();
        assert!(seen.len() == 1 && seen[0].method == "GET", "a second pass: {seen:#?}");
        wake
    }

    /// The load becomes `rate` requests per second, to pods that are ready.
    async fn load(&mut self, rate: f64, ready: u32) {
        let each = PodLoad { rate: rate / f64::from(ready.max(1)), ..PodLoad::default() };
        *self.pods.loads.lock().unwrap() = (1..=ready).map(|pod| (address(pod), each)).collect();
        let pa = Arc::new(self.pa());
        self.shell.look(&[pa]).await;
        assert_eq!(self.api.lock().take(), vec![], "load is not asked of the API server");
    }

    fn version(&self, path: &str) -> Value {
        self.api.lock().object(path).unwrap()["metadata"]["resourceVersion"].clone()
    }

    fn status_of(&self) -> Value {
        self.api.lock().object(PA).unwrap()["status"].clone()
    }

    /// Everything in order: one pod, active since second 10.
    async fn active(annotations: &[(&str, &str)]) -> Self {
        let mut world = Self::new(annotations);
        world.try_pass().await.0.unwrap();
        world.api.lock().edit(SKS, &service_status(1, None));
        world.api.lock().put(PODS, slice(1));
        world.at(10);
        world.try_pass().await.0.unwrap();
        assert_eq!(world.status_of()["conditions"][0]["status"], "True");
        world
    }

    /// Inactive since second 80, and the service knows it.
    async fn inactive() -> Self {
        let mut world = Self::active(&[]).await;
        for second in 60..80 {
            world.at(second);
            world.load(0.0, 1).await;
        }
        world.at(80);
        world.try_pass().await.0.unwrap();
        world.api.lock().edit(SKS, &service_status(2, Some(80)));
        world.try_pass().await.0.unwrap();
        assert_eq!(world.status_of()["conditions"][0]["reason"], "NoTraffic");
        world
    }
}

fn scale() -> String {
    format!("{TARGET}/scale")
}

fn replicas(pods: u32) -> (&'static str, String, Value) {
    ("PATCH", scale(), json!({ "spec": { "replicas": pods } }))
}

/// A condition: type, status, since which second, reason, message.
fn condition(kind: &str, status: &str, at: u64, reason: &str, message: &str) -> Value {
    let mut condition = json!({ "type": kind, "status": status, "lastTransitionTime": stamp(at) });
    for (key, value) in [("reason", reason), ("message", message)] {
        if !value.is_empty() {
            condition[key] = json!(value);
        }
    }
    condition
}

fn is_true(kind: &str, at: u64) -> Value {
    condition(kind, "True", at, "", "")
}

/// All is well: since when it is active (and so ready), its service is ready, and it was initialized.
fn well(active: u64, service: u64, initialized: u64) -> [Value; 4] {
    [
        is_true("Active", active),
        is_true("Ready", active),
        is_true("SKSReady", service),
        is_true("ScaleTargetInitialized", initialized),
    ]
}

/// Requests are buffered since then; its conditions for the service and the initialization.
fn queued(at: u64, service: Value, initialized: Value) -> [Value; 4] {
    let queued = |kind| condition(kind, "Unknown", at, "Queued", QUEUED);
    [queued("Active"), queued("Ready"), service, initialized]
}

const QUEUED: &str = "Requests to the target are being buffered as resources are provisioned.";
const NO_TRAFFIC: &str = "The target is not receiving traffic.";

/// The write of a status: conditions in their order, service known or not, desired, ready.
fn status(
    version: &Value,
    conditions: &[Value; 4],
    service: bool,
    desired: i32,
    ready: u32,
) -> (&'static str, String, Value) {
    let name = |name: &'static str| if service { name } else { "" };
    let status = json!({
        "observedGeneration": 1, "conditions": conditions,
        "serviceName": name("resnet-00001"), "metricsServiceName": name("resnet-00001-private"),
        "desiredScale": desired, "actualScale": ready,
    });
    let body = json!({ "metadata": { "resourceVersion": version }, "status": status });
    ("PATCH", format!("{PA}/status"), body)
}

fn spec(mode: &str) -> Value {
    json!({
        "mode": mode, "protocolType": "http1", "numActivators": 0,
        "objectRef": { "apiVersion": "apps/v1", "kind": "Deployment", "name": "resnet-00001-deployment" },
    })
}

fn service(version: &Value, mode: &str) -> (&'static str, String, Value) {
    ("PATCH", SKS.to_owned(), json!({ "metadata": { "resourceVersion": version }, "spec": spec(mode) }))
}

fn new_service(mode: &str) -> (&'static str, String, Value) {
    let owner = json!({
        "apiVersion": "autoscaling.internal.knative.dev/v1alpha1", "kind": "PodAutoscaler",
        "name": "resnet-00001", "uid": "pa-uid", "controller": true,
    });
    let body = json!({
        "apiVersion": "networking.internal.knative.dev/v1alpha1", "kind": "ServerlessService",
        "metadata": {
            "name": "resnet-00001", "namespace": "default", "ownerReferences": [owner],
            "labels": { "serving.knative.dev/revision": "resnet-00001" },
        },
        "spec": spec(mode),
    });
    ("POST", SKS.rsplit_once('/').unwrap().0.to_owned(), body)
}

#[tokio::test]
async fn a_new_object_gets_a_service_and_is_activating() {
    let mut world = World::new(&[]);
    let version = world.version(PA);
    let conditions = queued(
        0,
        condition("SKSReady", "Unknown", 0, "NotReady", "No Private Service Name"),
        condition("ScaleTargetInitialized", "Unknown", 0, "", ""),
    );
    world.pass(&[new_service("Serve"), status(&version, &conditions, false, -1, 0)]).await;
}

#[tokio::test]
async fn with_its_first_pod_it_is_initialized_active_and_ready() {
    let mut world = World::new(&[]);
    world.try_pass().await.0.unwrap();
    world.api.lock().edit(SKS, &service_status(1, None));
    world.at(5);
    // A service, and no pod yet.
    let conditions =
        queued(0, is_true("SKSReady", 5), condition("ScaleTargetInitialized", "Unknown", 0, "", ""));
    let version = world.version(PA);
    let wake = world.pass(&[status(&version, &conditions, true, -1, 0)]).await;
    assert_eq!(wake, Some(Duration::from_secs(605)), "when it is given up");
    world.api.lock().put(PODS, slice(1));
    world.at(9);
    let conditions = well(9, 5, 9);
    let version = world.version(PA);
    world.pass(&[status(&version, &conditions, true, -1, 1)]).await;
}

#[tokio::test]
async fn initial_scale_holds_until_it_was_reached_once() {
    let mut world = World::new(&[("initial-scale", "3")]);
    world.try_pass().await.0.unwrap();
    world.api.lock().edit(SKS, &service_status(1, None));
    world.api.lock().put(PODS, slice(1));
    let waits = queued(0, is_true("SKSReady", 0), condition("ScaleTargetInitialized", "Unknown", 0, "", ""));
    let version = world.version(PA);
    world.pass(&[replicas(3), status(&version, &waits, true, 3, 1)]).await;
    world.api.lock().put(PODS, slice(3));
    world.at(4);
    let version = world.version(PA);
    let there = well(4, 0, 4);
    world.pass(&[status(&version, &there, true, -1, 3)]).await;
    // From now on it is the load's business.
    for second in 5..40 {
        world.at(second);
        world.load(5.0, 3).await;
    }
    let version = world.version(PA);
    world.pass(&[replicas(1), status(&version, &there, true, 1, 3)]).await;
}

#[tokio::test]
async fn load_scales_within_its_bounds() {
    let mut world = World::active(&[("max-scale", "4")]).await;
    let conditions = || well(10, 10, 10);
    world.at(11);
    world.load(25.0, 1).await;
    let version = world.version(PA);
    world.pass(&[replicas(3), status(&version, &conditions(), true, 3, 1)]).await;
    world.at(12);
    world.load(250.0, 1).await;
    let version = world.version(PA);
    world.pass(&[replicas(4), status(&version, &conditions(), true, 4, 1)]).await;
    // The bound falls at once, also below the number asked for by the load.
    world
        .api
        .lock()
        .edit(PA, &json!({ "metadata": { "annotations": { "autoscaling.knative.dev/max-scale": "2" } } }));
    let version = world.version(PA);
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    assert_eq!(seen[1].body, replicas(2).2);
    assert_eq!(seen[2].body, status(&version, &conditions(), true, 2, 1).2);
}

#[tokio::test]
async fn the_least_is_kept_while_a_route_leads_there() {
    let mut world = World::new(&[("min-scale", "2")]);
    world.try_pass().await.0.unwrap();
    world.api.lock().edit(SKS, &service_status(1, None));
    world.try_pass().await.0.unwrap();
    assert_eq!(world.api.lock().object(TARGET).unwrap()["spec"]["replicas"], 2, "with any load");
    world.api.lock().put(PODS, slice(1));
    world.try_pass().await.0.unwrap();
    assert_eq!(world.status_of()["conditions"][0]["status"], "Unknown", "one is not enough");
    world.api.lock().put(PODS, slice(2));
    for second in 1..60 {
        world.at(second);
        world.load(0.0, 2).await;
        world.try_pass().await.0.unwrap();
    }
    assert_eq!(world.status_of()["conditions"][0]["status"], "True");
    assert_eq!(world.api.lock().object(TARGET).unwrap()["spec"]["replicas"], 2);
    // No route leads there any more.
    world.api.lock().edit(PA, &json!({ "spec": { "reachability": "Unreachable" } }));
    world.try_pass().await.0.unwrap();
    world.at(62);
    world.load(0.0, 2).await;
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    assert_eq!((seen[1].path.as_str(), seen[2].body["status"]["desiredScale"].as_i64()), (SKS, Some(0)));
}

#[tokio::test]
async fn fewer_pods_wait_for_the_delay() {
    let mut world = World::active(&[("scale-down-delay", "30s"), ("window", "6s")]).await;
    world.at(11);
    world.load(25.0, 1).await;
    world.try_pass().await.0.unwrap();
    world.api.lock().put(PODS, slice(3));
    world.try_pass().await.0.unwrap();
    let mut fell = None;
    for second in 12..80 {
        world.at(second);
        world.load(5.0, 3).await;
        let (passed, seen) = world.try_pass().await;
        passed.unwrap();
        if seen.len() > 1 {
            assert_eq!(seen[1].body, replicas(1).2);
            fell = fell.or(Some(second));
        }
    }
    // Three pods were wanted until 10 s after the start; 30 s more, and the next look.
    assert_eq!(fell, Some(51));
}

#[tokio::test]
async fn a_window_of_its_own_is_what_it_must_be_active_for() {
    let mut world = World::active(&[("window", "20s")]).await;
    for second in 11..30 {
        world.at(second);
        world.load(0.0, 1).await;
    }
    world.try_pass().await.0.unwrap();
    assert_eq!(world.pass(&[]).await, Some(Duration::from_secs(1)), "active since second 10");
    world.at(30);
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    assert_eq!(seen[1].body["spec"]["mode"], "Proxy");
}

#[tokio::test]
async fn it_is_not_ready_while_its_service_is_not() {
    let mut world = World::active(&[]).await;
    let why = json!({ "type": "Ready", "status": "Unknown", "reason": "X", "message": "no endpoints" });
    world.api.lock().edit(SKS, &json!({ "status": { "conditions": [why] } }));
    world.at(20);
    let conditions = [
        is_true("Active", 10),
        condition("Ready", "Unknown", 20, "NotReady", "no endpoints"),
        condition("SKSReady", "Unknown", 20, "NotReady", "no endpoints"),
        is_true("ScaleTargetInitialized", 10),
    ];
    let version = world.version(PA);
    world.pass(&[status(&version, &conditions, true, -1, 1)]).await;
}

#[tokio::test]
async fn without_enough_pods_it_is_activating_again() {
    let mut world = World::active(&[]).await;
    world.at(11);
    world.load(5.0, 1).await;
    world.try_pass().await.0.unwrap();
    world.api.lock().put(PODS, slice(0));
    world.at(12);
    let conditions = queued(12, is_true("SKSReady", 10), is_true("ScaleTargetInitialized", 10));
    let version = world.version(PA);
    world.pass(&[status(&version, &conditions, true, 1, 0)]).await;
}

#[tokio::test]
async fn without_load_it_keeps_one_pod_for_the_window_and_then_is_inactive() {
    let mut world = World::active(&[]).await;
    world.at(11);
    world.load(25.0, 1).await;
    world.try_pass().await.0.unwrap();
    world.api.lock().put(PODS, slice(3));
    for second in 12..40 {
        world.at(second);
        world.load(0.0, 3).await;
    }
    let conditions = well(10, 10, 10);
    let version = world.version(PA);
    let wake = world.pass(&[replicas(1), status(&version, &conditions, true, 1, 3)]).await;
    assert_eq!(wake, Some(Duration::from_secs(31)), "the rest of the window");
    world.api.lock().put(PODS, slice(1));
    world.at(70);
    let conditions = [
        condition("Active", "False", 70, "NoTraffic", NO_TRAFFIC),
        condition("Ready", "False", 70, "NoTraffic", NO_TRAFFIC),
        condition("SKSReady", "Unknown", 70, "NotReady", ""),
        is_true("ScaleTargetInitialized", 10),
    ];
    let (pa, sks) = (world.version(PA), world.version(SKS));
    world.pass(&[service(&sks, "Proxy"), status(&pa, &conditions, true, 0, 1)]).await;
}

#[tokio::test]
async fn the_last_pod_goes_when_the_activator_has_had_the_requests_for_the_grace_period() {
    let mut world = World::inactive().await;
    world.at(100);
    assert_eq!(world.pass(&[]).await, Some(Duration::from_secs(10)), "the rest of 30 s");
    assert_eq!(world.pods.probes.load(Ordering::Relaxed), 0, "too early to ask");
    world.at(110);
    assert_eq!(world.pass(&[]).await, Some(Duration::from_secs(1)), "it does not answer for the service");
    assert_eq!(world.pods.probes.load(Ordering::Relaxed), 2);
    world.pods.backed.store(true, Ordering::Relaxed);
    world.pass(&[replicas(0)]).await;
}

#[tokio::test]
async fn pods_are_retained_for_as_long_as_was_asked_for() {
    let mut world = World::inactive().await;
    let key = "autoscaling.knative.dev/scale-to-zero-pod-retention-period";
    world.api.lock().edit(PA, &json!({ "metadata": { "annotations": { key: "5m" } } }));
    world.pods.backed.store(true, Ordering::Relaxed);
    world.at(150);
    assert_eq!(world.pass(&[]).await, Some(Duration::from_secs(230)));
    world.at(380);
    world.pass(&[replicas(0)]).await;
}

#[tokio::test]
async fn a_request_at_the_activator_wakes_it_up() {
    let mut world = World::inactive().await;
    world.pods.backed.store(true, Ordering::Relaxed);
    world.at(110);
    world.pass(&[replicas(0)]).await;
    world.api.lock().put(PODS, slice(0));
    world.try_pass().await.0.unwrap();
    world.api.lock().put(GATES, gate());
    for second in 111..130 {
        world.at(second);
        world.load(0.0, 0).await;
        world.pass(&[]).await;
    }
    *world.pods.waiting.lock().unwrap() = 2.0;
    world.at(130);
    world.load(0.0, 0).await;
    let conditions = queued(
        130,
        condition("SKSReady", "Unknown", 130, "NotReady", ""),
        is_true("ScaleTargetInitialized", 10),
    );
    let (pa, sks) = (world.version(PA), world.version(SKS));
    world.pass(&[replicas(1), service(&sks, "Serve"), status(&pa, &conditions, true, 1, 0)]).await;
    world.api.lock().edit(SKS, &service_status(3, Some(80)));
    world.api.lock().put(PODS, slice(1));
    world.at(134);
    let conditions = well(134, 134, 10);
    let version = world.version(PA);
    world.pass(&[status(&version, &conditions, true, 1, 1)]).await;
}

#[tokio::test]
async fn it_wakes_up_with_the_activation_scale() {
    let mut world = World::inactive().await;
    world.pods.backed.store(true, Ordering::Relaxed);
    world.at(110);
    world.try_pass().await.0.unwrap();
    let key = "autoscaling.knative.dev/activation-scale";
    world.api.lock().edit(PA, &json!({ "metadata": { "annotations": { key: "3" } } }));
    world.api.lock().put(PODS, slice(0));
    world.api.lock().put(GATES, gate());
    *world.pods.waiting.lock().unwrap() = 2.0;
    world.try_pass().await.0.unwrap();
    world.at(130);
    world.load(0.0, 0).await;
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    assert_eq!(seen[1].body, replicas(3).2);
}

#[tokio::test]
async fn a_target_that_never_gets_ready_is_given_up() {
    let mut world = World::new(&[]);
    world.try_pass().await.0.unwrap();
    world.api.lock().edit(SKS, &service_status(1, None));
    world.try_pass().await.0.unwrap();
    world.at(609);
    assert_eq!(world.pass(&[]).await, Some(Duration::from_secs(1)));
    world.at(610);
    let why = "The target could not be activated.";
    let conditions = [
        condition("Active", "False", 610, "TimedOut", why),
        condition("Ready", "False", 610, "TimedOut", why),
        condition("SKSReady", "Unknown", 610, "NotReady", ""),
        condition("ScaleTargetInitialized", "Unknown", 0, "", ""),
    ];
    let (pa, sks) = (world.version(PA), world.version(SKS));
    world.pass(&[replicas(0), service(&sks, "Proxy"), status(&pa, &conditions, true, 0, 0)]).await;
}

#[tokio::test]
async fn a_new_generation_is_observed() {
    let mut world = World::active(&[]).await;
    world.api.lock().edit(PA, &json!({ "spec": { "reachability": "Unreachable" } }));
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    assert_eq!((seen.len(), &seen[1].body["status"]["observedGeneration"]), (2, &json!(2)));
}

#[tokio::test]
async fn an_annotation_that_says_nothing_sensible_is_named_and_nothing_else_is_touched() {
    let mut world = World::active(&[]).await;
    let key = "autoscaling.knative.dev/min-scale";
    world.api.lock().edit(PA, &json!({ "metadata": { "annotations": { key: "many" } } }));
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    let [Seen { path, body, .. }] = seen.as_slice() else { panic!("{seen:#?}") };
    assert_eq!(*path, format!("{PA}/status"));
    let active = &body["status"]["conditions"][0];
    assert_eq!((&active["status"], &active["reason"]), (&json!("False"), &json!("InvalidAnnotation")));
    assert_eq!(active["message"], "autoscaling.knative.dev/min-scale: `many`: need 0 to 4096");
    assert_eq!(world.try_pass().await.1, vec![]);
    // A target outside the rights of this class.
    let mut world = World::active(&[]).await;
    world.api.lock().edit(PA, &json!({ "spec": { "scaleTargetRef": { "kind": "StatefulSet" } } }));
    let (_, seen) = world.try_pass().await;
    let message = seen[0].body["status"]["conditions"][0]["message"].as_str().unwrap();
    assert!(
        message.contains("spec.scaleTargetRef") && message.contains("need an apps/v1 Deployment"),
        "{message}"
    );
}

#[tokio::test]
async fn a_service_that_is_not_ours_is_left_alone() {
    let mut world = World::active(&[]).await;
    let owners =
        json!([{ "apiVersion": "v1", "kind": "X", "name": "x", "uid": "other", "controller": true }]);
    world.api.lock().edit(SKS, &json!({ "metadata": { "ownerReferences": owners } }));
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    assert_eq!(seen.len(), 2, "{seen:#?}");
    assert_eq!(seen[1].body["status"]["conditions"][0]["reason"], "NotOwned");
    world.pass(&[]).await;
}

#[tokio::test]
async fn objects_of_other_classes_and_those_that_are_being_deleted_are_none_of_ours() {
    let mut world = World::new(&[("class", "kpa.autoscaling.knative.dev")]);
    assert_eq!(world.try_pass().await.1, vec![]);
    let mut world = World::active(&[]).await;
    world.api.lock().edit(PA, &json!({ "metadata": { "deletionTimestamp": stamp(20) } }));
    assert_eq!(world.try_pass().await.1, vec![]);
}

/// 409 to any write: the pass ends there, and the next pass, from the present objects, makes the remaining writes.
#[tokio::test]
async fn after_a_conflict_the_next_pass_does_what_is_left() {
    for (path, left) in [(scale(), 2), (format!("{PA}/status"), 1)] {
        let mut world = World::active(&[]).await;
        world.at(11);
        world.load(25.0, 1).await;
        world.api.lock().faults.push_back((format!("PATCH {path}"), 409, "Conflict"));
        let (passed, _) = world.try_pass().await;
        let error = passed.unwrap_err();
        assert!(error.to_string().contains("Conflict"), "{error}");
        let (passed, seen) = world.try_pass().await;
        passed.unwrap();
        assert_eq!(seen.iter().filter(|seen| seen.method != "GET").count(), left);
        assert_eq!(world.api.lock().object(TARGET).unwrap()["spec"]["replicas"], 3);
        world.pass(&[]).await;
    }
}

/// A real 409: the version in a status refuses a write from an outdated object.
#[tokio::test]
async fn what_was_read_before_it_changed_overwrites_nothing() {
    let mut world = World::active(&[]).await;
    let stale = world.pa();
    world.at(11);
    world.load(25.0, 1).await;
    world.api.lock().edit(PA, &json!({ "status": { "annotations": { "by": "another" } } }));
    let before = world.status_of();
    world.shell.pass(&stale).await.unwrap_err();
    assert_eq!(world.status_of(), before);
    world.try_pass().await.0.unwrap();
    assert_eq!(world.status_of()["annotations"]["by"], "another", "what we do not know stays");
    assert_eq!(world.status_of()["desiredScale"], 3);
}

/// The watch of services is late: the service was made already.
#[tokio::test]
async fn a_service_that_is_there_already_is_not_made_again() {
    let mut world = World::new(&[]);
    let pa = world.pa();
    world.shell.pass(&pa).await.unwrap();
    let made = world.api.lock().object(SKS).cloned();
    let error = world.shell.pass(&pa).await.unwrap_err();
    assert!(error.to_string().contains("create the service"), "{error}");
    assert_eq!(world.api.lock().object(SKS).cloned(), made);
    world.api.lock().take();
    world.pass(&[]).await;
}

#[tokio::test]
async fn a_conflict_over_the_service_is_met_by_the_next_pass() {
    let mut world = World::active(&[]).await;
    for second in 60..80 {
        world.at(second);
        world.load(0.0, 1).await;
    }
    world.api.lock().faults.push_back((format!("PATCH {SKS}"), 409, "Conflict"));
    world.at(80);
    world.try_pass().await.0.unwrap_err();
    assert_eq!(world.status_of()["conditions"][0]["status"], "True", "not said before it is so");
    world.try_pass().await.0.unwrap();
    assert_eq!(world.status_of()["conditions"][0]["status"], "False");
}

/// 404: the target does not exist yet, or the object exists no more.
#[tokio::test]
async fn what_is_not_found_is_no_more_than_that() {
    let mut world = World::active(&[]).await;
    world.api.lock().delete(TARGET);
    world.at(11);
    world.load(25.0, 1).await;
    let conditions = well(10, 10, 10);
    let version = world.version(PA);
    let wake = world.pass(&[status(&version, &conditions, true, 3, 1)]).await;
    assert_eq!(wake, Some(Duration::from_secs(5)), "looked for again");
    // The target exists again, and goes while it is scaled.
    world.api.lock().put(TARGET, deployment(1));
    world.api.lock().faults.push_back((format!("PATCH {TARGET}"), 404, "NotFound"));
    assert!(world.try_pass().await.0.unwrap_err().to_string().contains("scale the target"));
    world.pass(&[replicas(3)]).await;
    // The object goes while its status is written.
    let last = world.pa();
    world.at(12);
    world.load(35.0, 1).await;
    world.api.lock().delete(PA);
    assert!(world.shell.pass(&last).await.unwrap_err().to_string().contains("write the status"));
}

#[tokio::test]
async fn a_refusal_by_the_api_server_is_told() {
    let mut world = World::new(&[]);
    world.api.lock().faults.push_back((format!("GET {TARGET}"), 500, "InternalError"));
    let (passed, seen) = world.try_pass().await;
    assert!(passed.unwrap_err().to_string().contains("read the scale"));
    assert_eq!(seen.len(), 1, "nothing is written by guess");
}

#[tokio::test]
async fn pods_that_do_not_answer_count_like_the_others() {
    let mut world = World::active(&[]).await;
    world.api.lock().put(PODS, slice(2));
    world.at(11);
    world.load(20.0, 1).await;
    let asked: BTreeSet<_> = (1..=2).map(address).collect();
    assert_eq!(asked.len(), 2);
    let (passed, seen) = world.try_pass().await;
    passed.unwrap();
    assert_eq!(seen[1].body, replicas(4).2, "20 of one that answered, and as many of the other");
}
