//! Decisions on a cluster as a value: no server is asked, and the time is an input.

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Duration, Quota, SmShare};
use gshare_examples::kubernetes::dra::Injection;
use gshare_examples::kubernetes::fastpod::FaSTPod;
use gshare_examples::kubernetes::fastpod::fastpod_writes::{
    Observed, PodName, Settings, Wanted, Write, reconcile,
};
use gshare_examples::kubernetes::fastpod::pod_share::demand;
use gshare_examples::kubernetes::fastpod::pods::{Given, LABEL, Place, is_owned};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) fn at(seconds: i64) -> Time {
    Time(Timestamp::from_second(seconds).unwrap())
}

pub(crate) fn node(name: &str, gpus: u32, mib: u32) -> Node {
    serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {"gshare.io/fastpod": "true", "disk": name,
            "nvidia.com/gpu.count": gpus.to_string(), "nvidia.com/gpu.memory": mib.to_string()}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }))
    .unwrap()
}

pub(crate) fn fastpod(name: &str, replicas: i32, [sm, request, mib]: [u32; 3]) -> FaSTPod {
    serde_json::from_value(json!({
        "apiVersion": "gshare.io/v1alpha1", "kind": "FaSTPod",
        "metadata": {"name": name, "namespace": "team", "uid": format!("uid-{name}"), "generation": 1,
            "resourceVersion": "5", "annotations": {
                "faasshare/sm_partition": sm.to_string(),
                "faasshare/quota_request": format!("0.{request:02}"),
                "faasshare/quota_limit": "1.0",
                "faasshare/gpu_mem": (u64::from(mib) << 20).to_string()}},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "podSpec": {
            "containers": [{"name": "main", "image": "x", "env": [{"name": "GSHARE_QUOTA", "value": "100%"}]}]}},
    }))
    .unwrap()
}

fn settings() -> Settings {
    let point = |sm, quota, rate: f64, p95| {
        let p95 = Duration::from_millis(p95);
        let (sm, quota) = (SmShare::from_percent(sm).unwrap(), Quota::from_percent(quota).unwrap());
        ProfilePoint::measured(sm, quota, 1, rate, p95, p95).unwrap()
    };
    let points = vec![point(12, 30, 4.0, 90), point(24, 40, 8.64, 60)];
    let profiles = [("resnet".to_owned(), ProfileTable::sparse(points).unwrap())].into();
    Settings { profiles, ..Settings::default() }
}

/// No GPU promises more than its capacity, once all moved pods are noted. Literal: every two rectangles of a GPU, and the sum of its
/// memory.
pub(crate) fn check(nodes: &[Node], pods: &[Pod]) {
    let mut memory: BTreeMap<(String, u32), u64> = BTreeMap::new();
    let mut places = Vec::new();
    for pod in pods {
        if pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Failed") {
            continue;
        }
        // Without either it is a foreign pod.
        let Some(given) = Given::of(pod) else { continue };
        let place = Place::of(pod).unwrap();
        let demand = demand(&given.share);
        *memory.entry((place.node.clone(), place.gpu)).or_default() += demand.memory.get();
        places.push(place);
    }
    for ((name, _), used) in memory {
        if let Some(node) = nodes.iter().find(|node| node.name_any() == name) {
            let mib: u64 = node.labels()["nvidia.com/gpu.memory"].parse().unwrap();
            assert!(used <= mib << 20, "{name}: {used} of {mib} MiB");
        }
    }
    for (index, a) in places.iter().enumerate() {
        for b in &places[..index] {
            let (x, y) = (a.rectangle, b.rectangle);
            let apart = |at: u16, size: u16, other: u16, its: u16| at + size <= other || other + its <= at;
            assert!(
                (&a.node, a.gpu) != (&b.node, b.gpu)
                    || apart(x.time_offset.get(), x.quota.get(), y.time_offset.get(), y.quota.get())
                    || apart(x.sm_offset.get(), x.sm.get(), y.sm_offset.get(), y.sm.get()),
                "{a:?} and {b:?} overlap"
            );
        }
    }
}

/// A cluster, with the effects of a kubelet and Kubernetes' own controllers.
#[derive(Debug, Clone, Default)]
struct Cluster {
    observed: Observed,
    made: u32,
    seconds: i64,
}

impl Cluster {
    fn new(nodes: Vec<Node>, fastpods: Vec<FaSTPod>) -> Self {
        Self { observed: Observed { nodes, fastpods, ..Observed::default() }, made: 0, seconds: 1000 }
    }

    fn pod(&mut self, name: &PodName) -> Option<&mut Pod> {
        self.observed
            .pods
            .iter_mut()
            .find(|pod| pod.name_any() == name.name && pod.uid().as_ref() == Some(&name.uid))
    }

    fn wanted(&self) -> Wanted {
        reconcile(&at(self.seconds), &self.observed, &settings())
    }

    /// Does the first `most` wanted writes, or all, and then reports the statuses.
    fn apply(&mut self, most: Option<usize>) {
        let Wanted { writes, statuses, .. } = self.wanted();
        let done = writes.into_iter().take(most.unwrap_or(usize::MAX));
        done.for_each(|write| self.write(write));
        if most.is_none() {
            let now = at(self.seconds);
            for new in statuses.into_iter().filter_map(|told| told.write(&now, None)) {
                let all = &mut self.observed.fastpods;
                let old = all.iter_mut().find(|old| old.name_any() == new.name_any()).unwrap();
                *old = new;
            }
            self.check();
        }
    }

    /// Answers if nothing is left to be written.
    fn rests(&self) -> bool {
        let Wanted { writes, statuses, .. } = self.wanted();
        let now = at(self.seconds);
        writes.is_empty() && statuses.into_iter().all(|told| told.write(&now, None).is_none())
    }

    fn write(&mut self, write: Write) {
        match write {
            Write::Create(mut pod) => {
                assert!(
                    self.observed.pods.iter().all(|other| other.name_any() != pod.name_any()),
                    "the name is taken"
                );
                self.made += 1;
                pod.metadata.uid = Some(format!("pod-{}", self.made));
                pod.metadata.creation_timestamp = Some(at(self.seconds));
                self.observed.pods.push(*pod);
                self.check();
            }
            Write::Bind(name, node) => {
                let pod = self.pod(&name).expect("a pod that is there");
                let spec = pod.spec.as_mut().unwrap();
                assert!(spec.node_name.replace(node).is_none(), "bound once");
            }
            Write::Delete(name) => {
                let pod = self.pod(&name).expect("a pod that is there");
                pod.metadata.deletion_timestamp = Some(at(0));
            }
            Write::Note(name, annotations) => {
                let pod = self.pod(&name).expect("a pod that is there");
                pod.annotations_mut().extend(annotations);
            }
        }
    }

    /// See [`check`].
    fn check(&self) {
        check(&self.observed.nodes, &self.observed.pods);
    }

    /// Kubelets start bound pods, and end deleted ones.
    fn kubelets(&mut self) {
        self.observed.pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
        for pod in &mut self.observed.pods {
            let bound = pod.spec.as_ref().unwrap().node_name.is_some();
            let pending = pod.status.is_none();
            if bound && pending {
                pod.status = serde_json::from_value(json!({"phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True"}]}))
                .unwrap();
            }
        }
    }

    /// Until nothing is wanted.
    fn settle(&mut self) {
        for _ in 0..100 {
            if self.rests() && self.wanted().again.is_none() {
                return;
            }
            self.apply(None);
            self.kubelets();
            self.seconds += 61;
        }
        panic!("it does not settle: {:?}", self.wanted());
    }

    fn status(&self, name: &str) -> (i32, i32, String, String) {
        let fastpod = self.observed.fastpods.iter().find(|fastpod| fastpod.name_any() == name).unwrap();
        let status = fastpod.status.clone().unwrap();
        let condition = &status.conditions[0];
        (status.replicas, status.ready_replicas, condition.reason.clone(), condition.message.clone())
    }
}

#[test]
fn pods_are_made_bound_and_told() {
    let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![fastpod("rnnt", 2, [12, 30, 1024])]);
    let wanted = cluster.wanted();
    let [Write::Create(pod), Write::Create(_)] = &wanted.writes[..] else { panic!("{wanted:?}") };
    let spec = pod.spec.as_ref().unwrap();
    assert_eq!((spec.scheduler_name.as_deref(), spec.node_name.as_deref()), (Some("gshare"), None));
    let env = &spec.containers[0].env.as_ref().unwrap();
    let value = |name: &str| {
        let found: Vec<_> = env.iter().filter(|env| env.name == name).collect();
        assert_eq!(found.len(), 1, "{name}");
        found[0].value.clone().unwrap()
    };
    assert_eq!((value("GSHARE_QUOTA"), value("GSHARE_SM")), ("30%:100%".into(), "12%".into()));
    assert_eq!((value("GSHARE_MEM"), value("NVIDIA_VISIBLE_DEVICES")), ("1073741824".into(), "0".into()));
    let owner = &pod.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.uid.as_str(), owner.controller), ("uid-rnnt", Some(true)));
    assert_eq!((pod.labels()["app"].as_str(), pod.labels()[LABEL].as_str()), ("rnnt", "uid-rnnt"));

    cluster.settle();
    assert_eq!(cluster.status("rnnt"), (2, 2, "Placed".into(), String::new()));
    let status = cluster.observed.fastpods[0].status.clone().unwrap();
    assert_eq!(status.bound_device_ids.len(), 2);
    assert!(status.bound_device_ids.values().all(|device| device == "a/0"));
    assert_eq!(status.share, "30%:100% of the time, 12% of the SMs, 1 GiB");
    assert!(cluster.rests(), "a second look writes nothing");
}

#[test]
fn twenty_four_pods_of_figure_4_fill_a_gpu_and_the_next_one_waits() {
    let mut cluster = Cluster::new(vec![node("a", 1, 65536)], vec![fastpod("rnnt", 25, [12, 30, 1024])]);
    cluster.settle();
    let (replicas, ready, reason, message) = cluster.status("rnnt");
    assert_eq!((replicas, ready, reason.as_str()), (24, 24, "NoRoom"));
    assert!(message.starts_with("1 of 1 new pods: no GPU has 30% of the time on 12%"), "{message}");
    // Room elsewhere, and it goes there.
    cluster.observed.nodes.push(node("b", 1, 65536));
    cluster.settle();
    assert_eq!(cluster.status("rnnt"), (25, 25, "Placed".into(), String::new()));
    let mut fewer = cluster.observed.fastpods.remove(0);
    fewer.spec.replicas = 3;
    cluster.observed.fastpods.push(fewer);
    cluster.settle();
    assert_eq!(cluster.status("rnnt").0, 3);
}

#[test]
fn a_crash_between_any_two_writes_is_like_no_crash() {
    let start = Cluster::new(
        vec![node("a", 2, 16384)],
        vec![fastpod("one", 3, [50, 50, 1024]), fastpod("two", 2, [24, 40, 2048])],
    );
    let total = start.wanted().writes.len();
    for done in 0..=total {
        let mut cluster = start.clone();
        cluster.apply(Some(done));
        // The next controller knows only the objects of the cluster.
        cluster.settle();
        assert_eq!(cluster.status("one"), (3, 3, "Placed".into(), String::new()), "after {done} writes");
        assert_eq!(cluster.status("two").1, 2);
    }
}

#[test]
fn a_new_template_replaces_one_ready_pod_at_a_time() {
    let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![fastpod("f", 3, [30, 90, 1024])]);
    cluster.settle();
    cluster.observed.fastpods[0].spec.pod_spec["containers"][0]["image"] = json!("y");
    let mut fewest = 3;
    for _ in 0..30 {
        cluster.apply(None);
        let going =
            cluster.observed.pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).count();
        assert!(going <= 1, "one at a time");
        cluster.kubelets();
        fewest = fewest.min(cluster.observed.pods.iter().filter(|pod| pod.status.is_some()).count());
    }
    cluster.settle();
    assert!(
        cluster
            .observed
            .pods
            .iter()
            .all(|p| p.spec.as_ref().unwrap().containers[0].image.as_deref() == Some("y"))
    );
    assert_eq!((cluster.status("f").1, fewest), (3, 2));
}

#[test]
fn a_node_that_is_gone_full_tainted_or_cordoned_gets_no_pods() {
    let with = |change: &dyn Fn(&mut Node, &mut FaSTPod)| {
        let (mut one, mut pods) = (node("a", 1, 16384), fastpod("f", 1, [12, 30, 1024]));
        change(&mut one, &mut pods);
        let mut cluster = Cluster::new(vec![one], vec![pods]);
        cluster.settle();
        let (replicas, _, reason, _) = cluster.status("f");
        (replicas, reason)
    };
    let refused = |reason: &str| (0, reason.to_owned());
    let taint = |effect: &str| {
        let taint = json!({"key": "nvidia.com/gpu", "value": "yes", "effect": effect});
        move |node: &mut Node| node.spec = serde_json::from_value(json!({"taints": [taint.clone()]})).unwrap()
    };
    assert_eq!(with(&|_, _| {}).0, 1);
    assert_eq!(
        with(&|node, _| node.spec = serde_json::from_value(json!({"unschedulable": true})).unwrap()).0,
        0
    );
    assert_eq!(with(&|node, _| node.status = None).0, 0);
    assert_eq!(with(&|node, _| taint("NoSchedule")(node)).0, 0);
    assert_eq!(with(&|node, _| taint("PreferNoSchedule")(node)).0, 1);
    let tolerate = |toleration: Value| {
        with(&|node, pods| {
            taint("NoSchedule")(node);
            pods.spec.pod_spec["tolerations"] = json!([toleration]);
        })
        .0
    };
    assert_eq!(tolerate(json!({"key": "nvidia.com/gpu", "operator": "Exists"})), 1);
    assert_eq!(tolerate(json!({"operator": "Exists"})), 1);
    assert_eq!(tolerate(json!({"key": "nvidia.com/gpu", "value": "yes", "effect": "NoSchedule"})), 1);
    assert_eq!(tolerate(json!({"key": "nvidia.com/gpu", "value": "no"})), 0);
    assert_eq!(tolerate(json!({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"})), 0);
    let select = |disk: &str| with(&|_, pods| pods.spec.pod_spec["nodeSelector"] = json!({ "disk": disk })).0;
    assert_eq!((select("a"), select("b")), (1, 0));
    let annotate = |key: &str, value: &str| {
        with(&|_, pods| drop(pods.annotations_mut().insert(format!("faasshare/{key}"), value.into())))
    };
    assert_eq!(annotate("gpu_mem", "32GiB"), refused("NeverFits"));
    assert_eq!(annotate("quota_request", "0"), refused("BadShare"));
    assert_eq!(annotate("sm_partition", "101"), refused("BadShare"));
    assert_eq!(annotate("colour", "red"), refused("BadShare"));
    let run = |key: &str, value: Value| with(&|_, pods| pods.spec.pod_spec[key] = value.clone());
    assert_eq!(run("nodeName", json!("a")), refused("BadPodSpec"));
    assert_eq!(run("restartPolicy", json!("Never")), refused("BadPodSpec"));
    assert_eq!(run("containers", json!("x")), refused("BadPodSpec"));

    // A node with nonsensical labels is reported, and left out.
    let mut bad = node("z", 1, 1);
    bad.labels_mut().insert("nvidia.com/gpu.count".into(), "many".into());
    let complaints = Cluster::new(vec![bad], Vec::new()).wanted().complaints;
    assert_eq!(complaints, ["node z: label nvidia.com/gpu.count: `many`: need 1 to 64"]);

    // A pod not yet bound when its node went is made for another node.
    let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![fastpod("f", 1, [12, 30, 1024])]);
    cluster.apply(None);
    cluster.observed.nodes = vec![node("b", 1, 16384)];
    cluster.settle();
    assert_eq!(
        cluster.observed.fastpods[0]
            .status
            .clone()
            .unwrap()
            .bound_device_ids
            .into_values()
            .collect::<Vec<_>>(),
        ["b/0"]
    );
}

#[test]
fn a_pod_that_its_node_refuses_is_tried_elsewhere_and_cleared_after_a_minute() {
    let nodes = vec![node("a", 1, 16384), node("b", 1, 16384)];
    let mut cluster = Cluster::new(nodes, vec![fastpod("f", 1, [12, 30, 1024])]);
    cluster.settle();
    cluster.observed.pods[0].status = serde_json::from_value(json!({"phase": "Failed"})).unwrap();
    cluster.observed.pods[0].metadata.creation_timestamp = Some(at(cluster.seconds - 10));
    let wanted = cluster.wanted();
    assert_eq!(wanted.again, Some(std::time::Duration::from_secs(50)));
    let place = |write: &Write| match write {
        Write::Create(pod) => Place::of(pod),
        _ => None,
    };
    let made: Vec<_> = wanted.writes.iter().filter_map(place).collect();
    assert_eq!(made.iter().map(|place| place.node.as_str()).collect::<Vec<_>>(), ["b"]);
    cluster.settle();
    assert_eq!((cluster.observed.pods.len(), cluster.status("f").1), (1, 1));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// No matter what happens to a cluster, no GPU is promised twice (checked after every write) and it comes to rest.
    #[test]
    fn whatever_happens_nothing_is_promised_twice_and_it_comes_to_rest(
        operations in proptest::collection::vec((0_u8..9, 0_usize..8, 1_u32..6), 1..40)
    ) {
        let mut cluster = Cluster::new(vec![node("a", 2, 8192), node("b", 1, 4096)], Vec::new());
        for (index, (operation, which, size)) in operations.into_iter().enumerate() {
            let fastpods = cluster.observed.fastpods.len().max(1);
            let pods = cluster.observed.pods.len().max(1);
            match operation {
                0 | 1 => {
                    let name = format!("f{index}");
                    cluster.observed.fastpods.push(fastpod(&name, i32::try_from(which).unwrap(), [size * 17, 10 + size * 13, size * 700]));
                }
                2 => if let Some(one) = cluster.observed.fastpods.get_mut(which % fastpods) {
                    one.spec.replicas = i32::try_from(size).unwrap();
                },
                3 => if let Some(one) = cluster.observed.fastpods.get_mut(which % fastpods) {
                    one.annotations_mut().insert("faasshare/sm_partition".into(), (size * 9).to_string());
                },
                4 => if which < cluster.observed.fastpods.len() {
                    // Kubernetes collects pods without an owner.
                    let gone = cluster.observed.fastpods.remove(which).uid().unwrap();
                    for pod in &mut cluster.observed.pods {
                        if pod.labels()[LABEL] == gone {
                            pod.metadata.deletion_timestamp = Some(at(0));
                        }
                    }
                },
                5 => if let Some(pod) = cluster.observed.pods.get_mut(which % pods) {
                    pod.status = serde_json::from_value(json!({"phase": "Failed"})).unwrap();
                },
                6 => {
                    let cordoned = size % 2 == 0;
                    cluster.observed.nodes[which % 2].spec =
                        serde_json::from_value(json!({"unschedulable": cordoned})).unwrap();
                }
                7 => cluster.kubelets(),
                _ => {
                    // Only some of the writes are done before the next look.
                    cluster.apply(Some(which));
                }
            }
        }
        cluster.settle();
        let complaints = cluster.wanted().complaints;
        prop_assert!(cluster.rests() && complaints.is_empty(), "{complaints:?}");
    }
}

/// Moving a pod's rectangle joins the free time on its two sides: its process stays.
#[test]
fn a_pod_that_runs_makes_room_within_its_gpu() {
    let of = |name: &str, request| fastpod(name, 1, [100, request, 1024]);
    let mut cluster =
        Cluster::new(vec![node("a", 1, 16384)], vec![of("a", 30), of("b", 20), of("c", 30), of("d", 40)]);
    cluster.settle();
    assert_eq!(cluster.status("d").2, "NoRoom", "20 % are left");
    let places = |cluster: &Cluster| -> BTreeMap<String, u16> {
        let of = |pod: &Pod| Some((pod.labels()["app"].clone(), Place::of(pod)?.rectangle.time_offset.get()));
        cluster.observed.pods.iter().filter_map(of).collect()
    };
    let before = places(&cluster);
    cluster.observed.fastpods[1].spec.replicas = 0;
    // A pod's time is free only when the pod is gone.
    cluster.apply(None);
    cluster.apply(None);
    assert!(cluster.rests(), "it is on its way");
    cluster.kubelets();
    let wanted = cluster.wanted();
    let Some((Write::Create(made), notes)) = wanted.writes.split_last() else { panic!("{wanted:?}") };
    assert_eq!(made.labels()["app"], "d");
    let of_app = |write: &Write| match write {
        Write::Note(pod, _) => pod.name.split('-').next().unwrap().to_owned(),
        other => panic!("{other:?}"),
    };
    let (noted, made): (BTreeSet<String>, _) = (notes.iter().map(of_app).collect(), made.clone());
    cluster.settle();
    assert_eq!(cluster.status("d").2, "Placed");
    let after = places(&cluster);
    let moved = ["a", "c"].into_iter().filter(|name| before[*name] != after[*name]);
    let moved: BTreeSet<_> = moved.map(str::to_owned).collect();
    assert!(!moved.is_empty() && moved == noted, "{before:?} {after:?}");
    assert_eq!(Place::of(&made).unwrap().rectangle.time_offset.get(), after["d"], "made where it stays");
}

#[test]
fn a_share_that_is_left_out_is_that_of_the_profile() {
    let mut one = fastpod("f", 1, [1, 1, 1024]);
    let annotations =
        [("gshare.io/profile", "resnet"), ("gshare.io/slo", "69ms"), ("faasshare/gpu_mem", "1GiB")];
    one.metadata.annotations = Some(annotations.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![one]);
    cluster.settle();
    let made = Given::of(&cluster.observed.pods[0]).unwrap().share;
    assert_eq!((made.quota().to_string(), made.sm().to_string()), ("40%:40%".into(), "24%".into()));
    let status = cluster.observed.fastpods[0].status.clone().unwrap();
    assert_eq!(status.share, "40%:40% of the time, 24% of the SMs, 1 GiB");
    // A slower answer is enough: a pod with less replaces this one.
    cluster.observed.fastpods[0].annotations_mut().insert("gshare.io/slo".into(), "1s".into());
    cluster.settle();
    let made: Vec<_> =
        cluster.observed.pods.iter().map(|pod| Given::of(pod).unwrap().share.sm().to_string()).collect();
    assert_eq!(made, ["12%"]);
    // A missing profile: running pods stay.
    cluster.observed.fastpods[0].annotations_mut().insert("gshare.io/profile".into(), "vgg".into());
    cluster.settle();
    assert_eq!((cluster.status("f").1, cluster.status("f").2), (1, "BadShare".into()));
    cluster.observed.fastpods[0].spec.replicas = 0;
    cluster.settle();
    assert_eq!(cluster.observed.pods.len(), 0, "fewer are possible all the same");
}

#[test]
fn what_others_did_to_pods_is_told_and_harms_nobody_else() {
    let mut cluster =
        Cluster::new(vec![node("a", 1, 16384), node("b", 1, 16384)], vec![fastpod("f", 1, [60, 60, 1024])]);
    cluster.settle();
    // Labelled like a pod of `f`, in another namespace, of no FaSTPod: neither counted nor deleted.
    let mut forged = cluster.observed.pods[0].clone();
    (forged.metadata.namespace, forged.metadata.name) = (Some("other".into()), Some("forged".into()));
    cluster.observed.pods.push(forged.clone());
    assert!(cluster.rests());
    forged.metadata.owner_references = None;
    *cluster.observed.pods.last_mut().unwrap() = forged;
    assert!(cluster.rests());
    cluster.observed.pods.pop();
}

/// A tenant may edit the annotations of its pods, and make pods with the labels of a FaSTPod. A pod's place and share are in its spec.
#[test]
fn no_tenant_closes_a_node_or_has_a_gpu_given_out_twice() {
    let nodes = || vec![node("a", 1, 16384)];
    let settled = || {
        let mut cluster = Cluster::new(nodes(), vec![fastpod("f", 1, [60, 60, 1024])]);
        cluster.settle();
        cluster
    };
    // Nonsense, nothing, or less than its share: its place stays, and its annotations are put right.
    for change in [Some("nonsense"), None, Some("0,0,100,100")] {
        let mut cluster = settled();
        let annotations = cluster.observed.pods[0].annotations_mut();
        let kept = annotations["gshare.io/rectangle"].clone();
        match change {
            Some(text) => drop(annotations.insert("gshare.io/rectangle".into(), text.into())),
            None => drop(annotations.remove("gshare.io/rectangle")),
        }
        for share in ["sm_partition", "quota_request"] {
            annotations.insert(format!("faasshare/{share}"), "0.01".into());
            annotations.insert(format!("fastgshare/{share}"), "0.01".into());
        }
        cluster.observed.fastpods.push(fastpod("g", 2, [60, 60, 1024]));
        assert_eq!(cluster.wanted().complaints, [""; 0]);
        cluster.settle();
        assert_eq!(cluster.observed.pods[0].annotations()["gshare.io/rectangle"], kept);
        assert_eq!((cluster.status("f").1, cluster.status("g").0), (1, 0), "{change:?}: given out once");
        cluster.observed.fastpods.push(fastpod("h", 1, [30, 30, 1024]));
        cluster.settle();
        assert_eq!(cluster.status("h").1, 1, "{change:?}: the node is open");
    }
    // Pods without a place, of a missing FaSTPod or of another group, close no node.
    let mut forged = settled().observed.pods.remove(0);
    (forged.metadata.name, forged.metadata.annotations) = (Some("forged".into()), None);
    forged.spec.as_mut().unwrap().containers[0].env = None;
    let owner = |pod: &mut Pod, change: &dyn Fn(&mut OwnerReference)| {
        change(&mut pod.metadata.owner_references.as_mut().unwrap()[0]);
    };
    let mut of_nobody = forged.clone();
    owner(&mut of_nobody, &|owner| owner.uid = "nobody".into());
    let mut of_another_group = forged;
    owner(&mut of_another_group, &|owner| owner.api_version = "example.com/v1".into());
    for forged in [of_nobody, of_another_group] {
        let mut cluster = settled();
        cluster.observed.pods.push(forged);
        cluster.observed.fastpods.push(fastpod("h", 1, [30, 30, 1024]));
        assert_eq!(cluster.wanted().complaints, [""; 0]);
        cluster.settle();
        assert_eq!((cluster.status("f").1, cluster.status("h").1), (1, 1));
    }
}

/// The status reports each obstacle to a pod's placement.
#[test]
fn reasons_are_true() {
    let told = |nodes: Vec<Node>, change: &dyn Fn(&mut FaSTPod)| {
        let mut pods = fastpod("f", 1, [12, 30, 1024]);
        change(&mut pods);
        let mut cluster = Cluster::new(nodes, vec![pods]);
        cluster.settle();
        let (_, _, reason, message) = cluster.status("f");
        let conditions = cluster.observed.fastpods[0].status.clone().unwrap().conditions;
        let degraded = conditions.iter().find(|condition| condition.type_ == "Degraded").unwrap();
        assert_eq!(
            (&degraded.status, &degraded.reason, &degraded.message),
            (&"True".to_owned(), &reason, &message)
        );
        (reason, message)
    };
    let spec = |node: &mut Node, spec: Value| node.spec = serde_json::from_value(spec).unwrap();
    let (reason, message) = told(Vec::new(), &|_| {});
    assert_eq!((reason.as_str(), message.contains("gshare.io/fastpod=true")), ("NoNodes", true), "{message}");
    let (mut dead, mut cordoned, mut tainted) =
        (node("a", 1, 16384), node("b", 1, 16384), node("c", 1, 16384));
    dead.status = None;
    spec(&mut cordoned, json!({"unschedulable": true}));
    spec(&mut tainted, json!({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}));
    let (reason, message) = told(vec![dead.clone()], &|_| {});
    assert_eq!(
        (reason.as_str(), message.as_str()),
        ("NodesNotReady", "1 of 1 new pods: 1 of 1 nodes are out: 1 not ready")
    );
    assert_eq!(told(vec![cordoned.clone()], &|_| {}).0, "NodesCordoned");
    let (reason, message) = told(vec![tainted.clone()], &|_| {});
    assert!(reason == "Tainted" && message.ends_with("1 tainted nvidia.com/gpu:NoSchedule"), "{message}");
    let select = |pods: &mut FaSTPod| pods.spec.pod_spec["nodeSelector"] = json!({"disk": "none"});
    assert_eq!(told(vec![node("a", 1, 16384)], &select).0, "NodeSelector");
    let affinity = |pods: &mut FaSTPod| {
        pods.spec.pod_spec["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "NotIn", "values": ["a"]}]}]}}});
    };
    assert_eq!(told(vec![node("a", 1, 16384)], &affinity).0, "NodeAffinity");
    let (reason, message) = told(vec![dead, cordoned, tainted.clone()], &|_| {});
    assert_eq!(reason, "NoNodeFits");
    assert!(
        message
            .ends_with("3 of 3 nodes are out: 1 not ready, 1 cordoned, 1 tainted nvidia.com/gpu:NoSchedule"),
        "{message}"
    );
    // Some are left, and are full.
    let (reason, message) =
        told(vec![node("a", 1, 512), node("b", 1, 16384), tainted], &|pods| pods.spec.replicas = 25);
    assert!(
        reason == "NoRoom"
            && message.contains("no GPU with room has 1 GiB")
            && message.contains("; 1 of 3 nodes are out"),
        "{message}"
    );

    // The message of its kubelet.
    let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![fastpod("f", 1, [12, 30, 1024])]);
    cluster.settle();
    cluster.observed.pods[0].status = serde_json::from_value(json!({"phase": "Failed", "reason": "OutOfcpu",
        "message": "Node didn't have enough resource: cpu"}))
    .unwrap();
    cluster.observed.pods[0].metadata.creation_timestamp = Some(at(cluster.seconds));
    cluster.apply(None);
    let (_, _, reason, message) = cluster.status("f");
    assert!(
        reason == "PodFailed" && message.contains("refused a pod (OutOfcpu: Node didn't have enough"),
        "{message}"
    );
}

#[test]
fn a_field_that_pods_do_not_have_is_named() {
    let told = |change: &dyn Fn(&mut Value)| {
        let mut pods = fastpod("f", 1, [12, 30, 1024]);
        change(&mut pods.spec.pod_spec);
        let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![pods]);
        cluster.settle();
        let (_, _, reason, message) = cluster.status("f");
        (reason, message)
    };
    let bad = |message: &str| ("BadPodSpec".to_owned(), message.to_owned());
    assert_eq!(told(&|spec| spec["colour"] = json!("red")), bad("podSpec.colour: no field of a pod"));
    assert_eq!(
        told(&|spec| spec["containers"][0]["resource"] = json!({"limits": {"cpu": "1"}})),
        bad("podSpec.containers[0].resource: no field of a pod")
    );
    let (reason, message) = told(&|spec| spec["containers"][0]["env"] = json!("x"));
    assert!(reason == "BadPodSpec" && message.starts_with("podSpec.containers[0].env: "), "{message}");
    let fine = |spec: &mut Value| {
        spec["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        spec["nodeName"] = Value::Null;
        spec["securityContext"] = json!({});
        spec["containers"][0]["resources"] = json!({"limits": {"cpu": "1"}, "requests": {}});
        spec["containers"][0]["ports"] = json!([{"containerPort": 80}]);
        spec["containers"][0]["livenessProbe"] = json!({"httpGet": {"port": "web", "path": "/"}});
    };
    assert_eq!(told(&fine), ("Placed".into(), String::new()));
}

/// A container of musl cannot load the hook, and does not by `/etc/ld.so.preload`; a template's own `LD_PRELOAD` stays.
#[test]
fn the_hook_is_brought_by_a_file_and_joins_a_preload_of_the_template() {
    let mut pods = fastpod("f", 1, [12, 30, 1024]);
    pods.spec.pod_spec["containers"][0]["env"] = json!([{"name": "LD_PRELOAD", "value": "libtcmalloc.so"}]);
    pods.spec.pod_spec["initContainers"] = json!([{"name": "init", "image": "alpine"}]);
    let made = |injection| {
        let mut settings = settings();
        settings.injected.injection = injection;
        let nodes = vec![node("a", 1, 16384)];
        let observed = Observed { nodes, fastpods: vec![pods.clone()], ..Observed::default() };
        let Some(Write::Create(pod)) = reconcile(&at(1), &observed, &settings).writes.pop() else { panic!() };
        json!(pod)
    };
    let preloads = |pod: &Value| -> Vec<Value> {
        let of = |kind: &str| pod["spec"][kind][0]["env"].as_array().unwrap().clone();
        let all = of("containers").into_iter().chain(of("initContainers"));
        all.filter(|env| env["name"] == "LD_PRELOAD").map(|env| env["value"].clone()).collect()
    };
    let mounts = |pod: &Value| -> BTreeSet<String> {
        let all = pod["spec"]["initContainers"][0]["volumeMounts"].as_array().unwrap().iter();
        all.map(|mount| mount["mountPath"].as_str().unwrap().to_owned()).collect()
    };
    let pod = made(Injection::File);
    assert_eq!(preloads(&pod), [json!("libtcmalloc.so")]);
    assert!(mounts(&pod).contains("/etc/ld.so.preload"));
    // The share is in a file, too, which stays when a program clears its environment.
    assert!(mounts(&pod).contains("/usr/lib/gshare/share.env"));
    let told = pod["metadata"]["annotations"]["gshare.io/environment"].as_str().unwrap();
    assert!(told.contains("GSHARE_QUOTA=30%:100%\n") && told.contains("GSHARE_MEM=1073741824\n"), "{told}");
    let source = pod["spec"]["volumes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|volume| volume["name"] == "gshare-share")
        .unwrap();
    let item = &source["downwardAPI"]["items"][0];
    assert_eq!(item["fieldRef"]["fieldPath"], "metadata.annotations['gshare.io/environment']");
    let pod = made(Injection::Environment);
    let hook = "/usr/lib/gshare/libgshare_hook.so";
    assert_eq!(preloads(&pod), [json!(format!("{hook}:libtcmalloc.so")), json!(hook)]);
    assert!(!mounts(&pod).contains("/etc/ld.so.preload"));
}

#[test]
fn conditions_say_whether_it_is_ready_on_its_way_or_needs_mending() {
    let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![fastpod("f", 2, [12, 30, 1024])]);
    let told = |cluster: &Cluster| -> Vec<(String, String, String)> {
        let conditions = cluster.observed.fastpods[0].status.clone().unwrap().conditions;
        conditions.into_iter().map(|c| (c.type_, c.status, c.reason)).collect()
    };
    let expected = |all: [(&str, &str); 4]| -> Vec<(String, String, String)> {
        let types = ["Placed", "Ready", "Progressing", "Degraded"].into_iter().zip(all);
        types.map(|(kind, (status, reason))| (kind.into(), status.into(), reason.into())).collect()
    };
    cluster.apply(None);
    let fine = ("False", "AsExpected");
    assert_eq!(
        told(&cluster),
        expected([("True", "Placed"), ("False", "NotReady"), ("True", "RollingOut"), fine])
    );
    cluster.settle();
    assert_eq!(
        told(&cluster),
        expected([("True", "Placed"), ("True", "AllReady"), ("False", "Complete"), fine])
    );
    cluster.observed.fastpods[0].spec.replicas = 40;
    cluster.settle();
    let full = |status| (status, "NoRoom");
    assert_eq!(
        told(&cluster),
        expected([full("False"), ("False", "NotReady"), ("False", "Blocked"), full("True")])
    );
}

/// The status reports a refusal of the API server as long as it holds.
#[test]
fn a_refusal_is_said_once_and_taken_back() {
    let observed = Observed { fastpods: vec![fastpod("f", 1, [12, 30, 1024])], ..Observed::default() };
    let tell = |observed: &Observed, now, why| {
        let mut told = reconcile(&at(now), observed, &settings()).statuses;
        told.remove(0).write(&at(now), why)
    };
    let refused = tell(&observed, 5, Some("quota")).unwrap();
    let condition = refused.status.clone().unwrap().conditions.remove(0);
    assert_eq!((condition.reason.as_str(), condition.message.as_str()), ("Refused", "quota"));
    for (why, reason) in [
        (
            "create pod t/p: pods \"p\" is forbidden: violates PodSecurity \"baseline:latest\": hostPath (403 Forbidden)",
            "PodSecurity",
        ),
        ("create pod t/p: pods \"p\" is forbidden: exceeded quota: q (403 Forbidden)", "QuotaExceeded"),
    ] {
        let told = tell(&observed, 5, Some(why)).unwrap().status.unwrap();
        assert_eq!((told.conditions[0].reason.as_str(), told.conditions[0].message.as_str()), (reason, why));
    }
    let mut observed = Observed { fastpods: vec![refused], ..observed };
    assert_eq!(tell(&observed, 6, Some("quota")), None, "as before");
    observed.nodes.push(node("a", 1, 16384));
    let placed = tell(&observed, 7, None).unwrap().status.unwrap();
    assert_eq!(
        (placed.conditions[0].reason.as_str(), &placed.conditions[0].last_transition_time),
        ("Placed", &at(7))
    );
}

/// The status of a FaSTPod with all its pods placed. One look makes no more pods than fit in memory whole; the others follow at once, at
/// the same places as without the bound.
#[test]
fn a_look_makes_a_bounded_number_of_pods_and_the_next_one_the_others() {
    let nodes = vec![node("a", 64, 81920), node("b", 64, 81920)];
    let fastpods = vec![fastpod("f", 1000, [12, 30, 1024]), fastpod("g", 1000, [12, 30, 1024])];
    let mut observed = Observed { nodes, fastpods, ..Observed::default() };
    let made = |observed: &Observed| {
        let wanted = reconcile(&at(1), observed, &Settings::default());
        let pods = wanted.writes.into_iter().map(|write| match write {
            Write::Create(pod) => *pod,
            other => panic!("{other:?}"),
        });
        (pods.collect::<Vec<_>>(), wanted.again)
    };
    let (first, again) = made(&observed);
    assert_eq!((first.len(), again), (1500, Some(std::time::Duration::ZERO)));
    assert!(first[..1000].iter().all(|pod| is_owned(pod, &observed.fastpods[0])));
    observed.pods = first;
    let wanted = reconcile(&at(1), &observed, &Settings::default());
    let rest: Vec<_> = wanted.writes.iter().filter(|write| matches!(write, Write::Create(_))).collect();
    assert_eq!((rest.len(), wanted.again), (500, None));
}

pub(crate) fn settled() -> Value {
    let mut cluster = Cluster::new(vec![node("a", 1, 16384)], vec![fastpod("f", 1, [12, 30, 1024])]);
    cluster.settle();
    json!(cluster.observed.fastpods[0].status)
}
