//! The writes that make a cluster match its FaSTPods. Pure: equal inputs give equal writes.

use super::cluster_gpus::Gpus;
use super::pod_share::{self, Profiles};
use super::pods::{self, Given, Injected, LABEL, Place, is_going, is_over, is_ready, node_name};
use super::{FaSTPod, FaSTPodStatus};
use gshare_core::{PlacementId, ResourceSpec};
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::ResourceExt as _;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// Pods that are made after one look: this many are in memory whole, and are bound before others are made.
const MOST_NEW: usize = 1500;
/// How long a pod that failed keeps its node out for its FaSTPod.
const FAILED_S: i64 = 60;
/// Condition: every replica has a place.
pub(super) const PLACED: &str = "Placed";
/// Condition: every replica is ready.
const READY: &str = "Ready";
/// Condition: replicas are on their way, and nothing holds them up.
const PROGRESSING: &str = "Progressing";
/// Condition: something has to be mended before every replica can be there.
const DEGRADED: &str = "Degraded";

/// Objects of the API server, as they were read.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// All FaSTPods.
    pub fastpods: Vec<FaSTPod>,
    /// All pods with [`LABEL`].
    pub pods: Vec<Pod>,
    /// The nodes with [`pods::NODE_LABEL`].
    pub nodes: Vec<Node>,
    /// FaSTPods, by their UID, of which the API server would not have a pod.
    pub refused: BTreeMap<String, Refused>,
}

/// Refusal of the last pod of a FaSTPod by the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Message of the API server.
    pub why: String,
    /// One pod may be tried again. Until then none is tried, and none takes a place from others.
    pub retry: bool,
}

/// Settings that the controller was started with.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Files and sockets of their node that containers are given.
    pub injected: Injected,
    /// From which shares are taken that FaSTPods leave out.
    pub profiles: Profiles,
}

/// Identity of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod, which a later pod of the same name does not share.
    pub uid: String,
}

impl PodName {
    fn of(pod: &Pod) -> Self {
        Self {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            uid: pod.uid().unwrap_or_default(),
        }
    }
}

/// One request to the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Delete a pod.
    Delete(PodName),
    /// Bind a pod to a node.
    Bind(PodName, String),
    /// Note where a pod is in its GPU by now.
    Note(PodName, BTreeMap<String, String>),
    /// Make a pod.
    Create(Box<Pod>),
}

/// A FaSTPod with its wanted and its present status.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    fastpod: FaSTPod,
    before: Option<FaSTPodStatus>,
    rollout: Rollout,
}

/// How far the replicas are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rollout {
    wanted: usize,
    live: usize,
    ready: usize,
    /// Live pods that were made of an older template.
    old: usize,
}

impl Told {
    /// UID of the FaSTPod.
    pub fn uid(&self) -> String {
        self.fastpod.uid().unwrap_or_default()
    }

    /// Answers if replicas have no place, by the objects that were read.
    pub fn lacks_places(&self) -> bool {
        let conditions = self.fastpod.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|condition| condition.type_ == PLACED && condition.status != "True")
    }

    /// The FaSTPod to write, if it differs from the observed FaSTPod. `refused`: why the API server refused one of its
    /// pods.
    pub fn write(mut self, now: &Time, refused: Option<&str>) -> Option<FaSTPod> {
        if let (Some(why), Some(status)) = (refused, &mut self.fastpod.status) {
            let generation = self.fastpod.metadata.generation;
            status.conditions =
                self.rollout.conditions(self.before.as_ref(), now, generation, Err(refused_as(why)));
        }
        (self.fastpod.status != self.before).then_some(self.fastpod)
    }
}

/// Content of an Event about a FaSTPod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    /// Something has to be mended, or no longer has to be.
    pub is_warning: bool,
    /// In one word, as in the condition.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// The condition by which a FaSTPod is held up, if it is.
pub(super) fn degraded(status: &FaSTPodStatus) -> Option<&Condition> {
    let mut all = status.conditions.iter();
    all.find(|condition| condition.type_ == DEGRADED && condition.status == "True")
}

/// News for a person: why replicas are held up, each reason once, and that they no longer are.
pub fn news(before: Option<&FaSTPodStatus>, after: &FaSTPodStatus) -> Option<News> {
    match (before.and_then(degraded), degraded(after)) {
        (Some(before), Some(after)) if before.reason == after.reason => None,
        (_, Some(Condition { reason, message, .. })) => {
            Some(News { is_warning: true, reason: reason.clone(), message: message.clone() })
        }
        (Some(before), None) => {
            let message = format!("every replica has a place; before: {}", before.reason);
            Some(News { is_warning: false, reason: PLACED.into(), message })
        }
        (None, None) => None,
    }
}

/// Writes that are wanted after a look.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wanted {
    /// Writes of pods, in this order.
    pub writes: Vec<Write>,
    /// Written last: the status of each FaSTPod.
    pub statuses: Vec<Told>,
    /// Look again after this time, even if nothing changes.
    pub again: Option<Duration>,
    /// Faults of nodes or pods, for people.
    pub complaints: Vec<String>,
}

impl Wanted {
    fn again_in(&mut self, left: Duration) {
        self.again = Some(self.again.map_or(left, |again| again.min(left)));
    }
}

/// A pod that is to be made, when all have their places.
struct Planned<'a> {
    fastpod: &'a FaSTPod,
    name: String,
    spec: Rc<PodSpec>,
    share: ResourceSpec,
    placement: PlacementId,
}

/// Arrival, then name: the order in which things are decided.
fn order<K: kube::Resource>(object: &K) -> (Option<k8s_openapi::jiff::Timestamp>, Option<String>, String) {
    let created = object.creation_timestamp().map(|time| time.0);
    (created, object.namespace(), object.name_any())
}

/// Computes the writes that make the cluster match its FaSTPods.
pub fn reconcile(now: &Time, observed: &Observed, settings: &Settings) -> Wanted {
    let mut wanted = Wanted::default();
    let mut gpus = Gpus::new(&observed.nodes, &mut wanted.complaints);
    // A pod that carries the label and has no owner is none of ours.
    let mut sorted: Vec<&Pod> = observed.pods.iter().filter(|pod| pods::owner(pod).is_some()).collect();
    sorted.sort_by_cached_key(|pod| order(*pod));
    let known: BTreeSet<_> =
        observed.fastpods.iter().map(|fastpod| (fastpod.namespace(), fastpod.uid())).collect();
    let is_known = |pod: &Pod| known.contains(&(pod.namespace(), pods::owner(pod).map(str::to_owned)));
    let held = gpus.hold(&sorted, is_known, &mut wanted.complaints);

    let mut fastpods: Vec<&FaSTPod> =
        observed.fastpods.iter().filter(|fastpod| fastpod.metadata.deletion_timestamp.is_none()).collect();
    fastpods.sort_by_cached_key(|fastpod| order(*fastpod));
    let mut planned = Vec::new();
    for fastpod in fastpods {
        let own = sorted.iter().copied().filter(|pod| pods::is_owned(pod, fastpod)).collect();
        let refused = observed.refused.get(&fastpod.uid().unwrap_or_default());
        let mut turn = Turn { now, fastpod, own, refused, gpus: &mut gpus, wanted: &mut wanted };
        let asked = turn.asked(settings);
        let share = asked.as_ref().ok().map(|(_, share)| *share);
        let placed = turn.settle(asked, &mut planned);
        let told = turn.tell(share, placed);
        wanted.statuses.push(told);
    }
    // The last placed pod may have moved others on its GPU, so their earlier places are out of date.
    for (pod, placement) in held {
        let place = placement.and_then(|id| gpus.place_of(id));
        let moved = place.filter(|place| Place::of(pod).as_ref() != Some(place));
        wanted.writes.extend(moved.map(|place| Write::Note(PodName::of(pod), place.annotations())));
    }
    if planned.len() > MOST_NEW {
        wanted.again_in(Duration::ZERO);
    }
    for Planned { fastpod, name, spec, share, placement } in planned.into_iter().take(MOST_NEW) {
        let Some(place) = gpus.place_of(placement) else { continue };
        let pod = pods::pod(fastpod, &name, PodSpec::clone(&spec), &share, &place, &settings.injected);
        wanted.writes.push(Write::Create(Box::new(pod)));
    }
    wanted
}

/// Spec of the pods of a FaSTPod, and the share of each.
type Asked = (PodSpec, ResourceSpec);

/// Why a FaSTPod has fewer pods than it asks for: reason and message of its condition.
type Unplaced = (&'static str, String);

/// One FaSTPod's turn.
struct Turn<'a, 'g, 'b> {
    now: &'a Time,
    fastpod: &'a FaSTPod,
    /// The FaSTPod's pods, by arrival.
    own: Vec<&'a Pod>,
    refused: Option<&'a Refused>,
    gpus: &'g mut Gpus<'b>,
    wanted: &'g mut Wanted,
}

impl<'a> Turn<'a, '_, '_> {
    fn replicas(&self) -> usize {
        usize::try_from(self.fastpod.spec.replicas).unwrap_or(0)
    }

    /// The FaSTPod's pods that are neither over nor going.
    fn live(&self) -> Vec<&'a Pod> {
        self.own.iter().copied().filter(|pod| !is_going(pod) && !is_over(pod)).collect()
    }

    /// Spec and share of the FaSTPod's pods.
    fn asked(&self, settings: &Settings) -> Result<Asked, Unplaced> {
        let bad = |why: String| ("BadPodSpec", format!("podSpec.{why}"));
        let mut spec = pods::decode(&self.fastpod.spec.pod_spec).map_err(|error| ("BadPodSpec", error))?;
        if let Some(node) = spec.node_name.as_deref().filter(|node| !node.is_empty()) {
            return Err(bad(format!("nodeName: `{node}`: nodes are chosen here")));
        }
        if let Some(policy) = spec.restart_policy.as_deref().filter(|policy| *policy != "Always") {
            return Err(bad(format!("restartPolicy: `{policy}`: need Always: replicas are there to stay")));
        }
        let share = pod_share::share(self.fastpod.annotations(), &settings.profiles)
            .map_err(|error| ("BadShare", format!("annotations: {error}")))?;
        settings.injected.ask(&mut spec);
        Ok((spec, share))
    }

    /// A FaSTPod without a valid template keeps its pods and gets no more.
    fn settle(
        &mut self,
        asked: Result<Asked, Unplaced>,
        planned: &mut Vec<Planned<'a>>,
    ) -> Result<(), Unplaced> {
        let kept_out = self.clear_failed();
        let template = asked.as_ref().ok().map(|(_, share)| pods::template(self.fastpod, share));
        let is_new = |pod: &Pod| template.as_ref().is_none_or(|template| pods::is_of(pod, template));
        let mut live = self.live();
        // The best first: of this template, bound, ready, older.
        live.sort_by_key(|pod| (!is_new(pod), node_name(pod).is_none(), !is_ready(pod)));
        let mut gone: BTreeSet<String> =
            live.iter().skip(self.replicas()).map(|pod| pod.name_any()).collect();
        for pod in &live {
            // Never bound, and its place is gone: it must be made again for another place.
            let lost = !Given::of(pod).is_some_and(|given| self.gpus.takes(&given));
            if node_name(pod).is_none() && lost {
                gone.insert(pod.name_any());
            }
        }
        let old = |pod: &&&Pod| !is_new(pod) && !gone.contains(&pod.name_any());
        let ready = live.iter().filter(|pod| is_ready(pod) && !gone.contains(&pod.name_any())).count();
        let unready: Vec<_> =
            live.iter().filter(old).filter(|pod| !is_ready(pod)).map(|p| p.name_any()).collect();
        let one_old = live.iter().rfind(old).map(|pod| pod.name_any());
        if !unready.is_empty() {
            gone.extend(unready);
        } else if ready >= self.replicas() {
            gone.extend(one_old);
        }
        for pod in &live {
            let name = PodName::of(pod);
            if gone.contains(&name.name) {
                self.wanted.writes.push(Write::Delete(name));
            } else if node_name(pod).is_none()
                && let Some(given) = Given::of(pod)
            {
                self.wanted.writes.push(Write::Bind(name, given.node));
            }
        }
        let missing = self.replicas().saturating_sub(live.len() - gone.len());
        let (spec, share) = asked?;
        let (most, why) = match self.refused {
            None => (missing, None),
            Some(refused) => (usize::from(refused.retry), Some(&refused.why)),
        };
        self.plan(missing.min(most), &Rc::new(spec), &share, &kept_out, planned)?;
        match why.filter(|_| missing > most) {
            Some(why) => Err(refused_as(why)),
            None => Ok(()),
        }
    }

    /// Deletes pods that failed long enough ago. Returns the nodes of the other failed pods, with the reasons.
    fn clear_failed(&mut self) -> BTreeMap<String, String> {
        let mut kept_out = BTreeMap::new();
        for pod in self.own.iter().filter(|pod| is_over(pod) && !is_going(pod)) {
            let made = pod.creation_timestamp().map_or(self.now.0, |time| time.0);
            let left = FAILED_S - (self.now.0.as_second() - made.as_second());
            match u64::try_from(left) {
                Ok(left @ 1..) => {
                    kept_out.extend(node_name(pod).map(|node| (node.to_owned(), pods::failure(pod))));
                    self.wanted.again_in(Duration::from_secs(left));
                }
                _ => self.wanted.writes.push(Write::Delete(PodName::of(pod))),
            }
        }
        kept_out
    }

    fn plan(
        &mut self,
        missing: usize,
        spec: &Rc<PodSpec>,
        share: &ResourceSpec,
        kept_out: &BTreeMap<String, String>,
        planned: &mut Vec<Planned<'a>>,
    ) -> Result<(), Unplaced> {
        let taken: BTreeSet<String> = self.own.iter().map(|pod| pod.name_any()).collect();
        let fastpod = self.fastpod;
        let names = (0..).map(|n| pods::name(fastpod, n)).filter(|name| !taken.contains(name));
        for (done, name) in names.take(missing).enumerate() {
            let placed = self.gpus.place(share, spec, kept_out);
            let placement = placed.map_err(|(reason, why)| {
                (reason, format!("{} of {missing} new pods: {why}", missing - done))
            })?;
            planned.push(Planned { fastpod, name, spec: Rc::clone(spec), share: *share, placement });
        }
        Ok(())
    }

    /// The status that it is to have.
    fn tell(&self, share: Option<ResourceSpec>, placed: Result<(), Unplaced>) -> Told {
        let live = self.live();
        let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
        let bound = live.iter().filter(|pod| node_name(pod).is_some()).filter_map(|pod| {
            let given = Given::of(pod)?;
            Some((pod.name_any(), format!("{}/{}", given.node, given.gpu)))
        });
        let before = self.fastpod.status.clone();
        let generation = self.fastpod.metadata.generation;
        let template = share.map(|share| pods::template(self.fastpod, &share));
        let is_old = |pod: &&&Pod| template.as_ref().is_some_and(|template| !pods::is_of(pod, template));
        let rollout = Rollout {
            wanted: self.replicas(),
            live: live.len(),
            ready: live.iter().filter(|pod| is_ready(pod)).count(),
            old: live.iter().filter(is_old).count(),
        };
        let status = FaSTPodStatus {
            observed_generation: generation.unwrap_or(0),
            replicas: count(live.len()),
            ready_replicas: count(rollout.ready),
            selector: format!("{LABEL}={}", self.fastpod.uid().unwrap_or_default()),
            share: share.map(|share| pod_share::describe(&share)).unwrap_or_default(),
            bound_device_ids: bound.collect(),
            conditions: rollout.conditions(before.as_ref(), self.now, generation, placed),
        };
        Told { fastpod: FaSTPod { status: Some(status), ..self.fastpod.clone() }, before, rollout }
    }
}

/// Reason and message of a refusal.
fn refused_as(why: &str) -> Unplaced {
    let reason = match () {
        () if why.contains("violates PodSecurity") => "PodSecurity",
        () if why.contains("exceeded quota") => "QuotaExceeded",
        () => "Refused",
    };
    (reason, why.to_owned())
}

impl Rollout {
    /// The conditions now, each with the time since which it holds.
    fn conditions(
        self,
        before: Option<&FaSTPodStatus>,
        now: &Time,
        generation: Option<i64>,
        placed: Result<(), Unplaced>,
    ) -> Vec<Condition> {
        // Times are written in whole seconds, so a fraction would make each comparison with the written time fail.
        let second = k8s_openapi::jiff::Timestamp::from_second(now.0.as_second()).unwrap_or(now.0);
        let condition = |type_: &str, holds: bool, reason: &str, message: &str| {
            let status = if holds { "True" } else { "False" };
            let before = before.and_then(|before| before.conditions.iter().find(|old| old.type_ == type_));
            let since = before.filter(|old| old.status == status).map(|old| old.last_transition_time.clone());
            Condition {
                type_: type_.into(),
                status: status.into(),
                reason: reason.into(),
                message: message.into(),
                observed_generation: generation,
                last_transition_time: since.unwrap_or(Time(second)),
            }
        };
        let Self { wanted, live, ready, old } = self;
        let is_complete = live == wanted && ready == wanted && old == 0;
        let counted = format!("{ready} of {wanted} pods are ready");
        let (placed, (reason, message)) = match placed {
            Ok(()) => (true, (PLACED, String::new())),
            Err(why) => (false, why),
        };
        let progressing = match (placed, is_complete) {
            (false, _) => condition(PROGRESSING, false, "Blocked", &message),
            (true, true) => condition(PROGRESSING, false, "Complete", ""),
            (true, false) => condition(PROGRESSING, true, "RollingOut", &counted),
        };
        let degraded = match placed {
            true => condition(DEGRADED, false, "AsExpected", ""),
            false => condition(DEGRADED, true, reason, &message),
        };
        let is_ready = ready >= wanted && placed;
        let reached = if is_ready { "AllReady" } else { "NotReady" };
        vec![
            condition(PLACED, placed, reason, &message),
            condition(READY, is_ready, reached, if is_ready { "" } else { &counted }),
            progressing,
            degraded,
        ]
    }
}
