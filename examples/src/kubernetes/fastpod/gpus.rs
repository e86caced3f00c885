//! The GPUs of the cluster, and the packer that knows them by number. Pure.

use super::pods::{self, Place, is_over, node_name};
use super::shares;
use gshare_core::pack::{GpuSpec, PackError, Packer as _, PackerExt as _};
use gshare_core::{Bytes, GpuId, PlacementId, ResourceSpec};
use gshare_sched::pack::{MaxRects, MaxRectsConfig};
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, Toleration};
use kube::ResourceExt as _;
use std::collections::BTreeMap;

/// Most GPUs that a node is believed to have.
const MAX_GPUS: u32 = 64;

/// All GPUs with what is on them.
pub(super) struct Gpus<'a> {
    packer: MaxRects,
    /// By the id of its first GPU, with their number.
    nodes: BTreeMap<u32, (&'a Node, u32)>,
    firsts: BTreeMap<String, u32>,
}

/// A pod that is there, and where it is by now; nowhere if the packer finds no room for it.
pub(super) type Held<'a> = (&'a Pod, Option<PlacementId>);

impl<'a> Gpus<'a> {
    /// The empty GPUs of all nodes.
    pub(super) fn new(nodes: &'a [Node], complaints: &mut Vec<String>) -> Self {
        let packer = MaxRects::new(MaxRectsConfig::default());
        let mut gpus = Self { packer, nodes: BTreeMap::new(), firsts: BTreeMap::new() };
        let sorted: BTreeMap<_, _> = nodes.iter().map(|node| (node.name_any(), node)).collect();
        let mut first = 0;
        for (name, node) in sorted {
            match gpus.add(node, first) {
                Ok(count) => {
                    gpus.nodes.insert(first, (node, count));
                    gpus.firsts.insert(name, first);
                    first += count;
                }
                Err(why) => complaints.push(format!("node {name}: {why}")),
            }
        }
        gpus
    }

    fn add(&mut self, node: &Node, first: u32) -> Result<u32, String> {
        let label = |key: &str, most: u32| {
            let text = node.labels().get(key).ok_or(format!("label {key}: missing"))?;
            let number = text.parse().ok().filter(|number| (1..=most).contains(number));
            number.ok_or(format!("label {key}: `{text}`: need 1 to {most}"))
        };
        let count = label("nvidia.com/gpu.count", MAX_GPUS)?;
        let memory = label("nvidia.com/gpu.memory", 1 << 30)?;
        for gpu in (first..first + count).map(GpuId) {
            let added = self.packer.add_gpu(gpu, GpuSpec::new(Bytes::from_mib(memory.into())));
            added
                .and_then(|()| self.packer.set_cordoned(gpu, !takes_pods(node)))
                .map_err(|error| error.to_string())?;
        }
        Ok(count)
    }

    /// The GPU of a place, if it is there.
    pub(super) fn id(&self, place: &Place) -> Option<GpuId> {
        let first = *self.firsts.get(&place.node)?;
        let (_, count) = self.nodes.get(&first)?;
        (place.gpu < *count).then(|| GpuId(first + place.gpu))
    }

    /// Whether a pod that is bound there now would be started.
    pub(super) fn takes(&self, place: &Place) -> bool {
        let first = self.firsts.get(&place.node).filter(|_| self.id(place).is_some());
        first.and_then(|first| self.nodes.get(first)).is_some_and(|(node, _)| takes_pods(node))
    }

    /// Where a placement is by now: other placements may have moved it within its GPU.
    pub(super) fn place_of(&self, placement: PlacementId) -> Option<Place> {
        let placement = self.packer.placement(placement)?;
        let (node, gpu) = node_of(&self.nodes, placement.gpu)?;
        Some(Place { node: node.name_any(), gpu, rectangle: placement.rectangle })
    }

    /// Finds a place for a pod on a node that it accepts.
    pub(super) fn place(
        &mut self,
        share: &ResourceSpec,
        allowed: impl Fn(&Node) -> bool,
    ) -> Result<PlacementId, PackError> {
        let nodes = &self.nodes;
        let allowed = |gpu: GpuId| node_of(nodes, gpu).is_some_and(|(node, _)| allowed(node));
        Ok(self.packer.place_where(&shares::demand(share), &allowed)?.placement.id)
    }

    /// Puts every pod that is there where it says it is.
    pub(super) fn hold<'p>(&mut self, pods: &[&'p Pod], complaints: &mut Vec<String>) -> Vec<Held<'p>> {
        let mut held = Vec::new();
        let mut later = Vec::new();
        for pod in pods.iter().copied().filter(|pod| !is_over(pod)) {
            let place = Place::of(pod).filter(|place| node_name(pod).is_none_or(|node| node == place.node));
            let share = pods::share(pod);
            let (Some(place), Ok(share)) = (place, share) else {
                // It may run, and nobody knows on which GPU.
                if let Some(node) = node_name(pod) {
                    complaints.push(format!(
                        "pod {}: its annotations were changed: node {node} gets no more",
                        pod.name_any()
                    ));
                    self.close(node);
                }
                continue;
            };
            let Some(gpu) = self.id(&place) else { continue };
            match self.packer.place_at(gpu, place.rectangle, &shares::demand(&share)) {
                Ok(placement) => held.push((pod, Some(placement.id))),
                Err(_) => later.push((pod, gpu, share)),
            }
        }
        // Its neighbours were moved to make room for it, and not all of that was noted: room is made once more.
        for (pod, gpu, share) in later {
            let cordoned = self.packer.gpu(gpu).is_some_and(|gpu| gpu.cordoned);
            self.cordon(gpu, false);
            let placed = self.packer.place_where(&shares::demand(&share), &|other| other == gpu);
            if let Err(error) = &placed {
                // It runs there all the same, so nothing more goes there.
                complaints.push(format!("pod {}: {error}", pod.name_any()));
            }
            self.cordon(gpu, cordoned || placed.is_err());
            held.push((pod, placed.ok().map(|placed| placed.placement.id)));
        }
        held
    }

    fn close(&mut self, node: &str) {
        let Some(first) = self.firsts.get(node).copied() else { return };
        let count = self.nodes.get(&first).map_or(0, |(_, count)| *count);
        for gpu in first..first + count {
            self.cordon(GpuId(gpu), true);
        }
    }

    fn cordon(&mut self, gpu: GpuId, cordoned: bool) {
        // It fails for GPUs that are not there only.
        let _ = self.packer.set_cordoned(gpu, cordoned);
    }
}

fn node_of<'a>(nodes: &BTreeMap<u32, (&'a Node, u32)>, gpu: GpuId) -> Option<(&'a Node, u32)> {
    let (first, (node, count)) = nodes.range(..=gpu.0).next_back()?;
    let number = gpu.0 - first;
    (number < *count).then_some((*node, number))
}

fn takes_pods(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
    let cordoned = node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true));
    ready && !cordoned && node.metadata.deletion_timestamp.is_none()
}

/// Whether pods of this template may run there: their node selector and tolerations.
pub(super) fn accepts(node: &Node, spec: &PodSpec) -> bool {
    let selected =
        spec.node_selector.iter().flatten().all(|(key, value)| node.labels().get(key) == Some(value));
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let mut hard = taints.filter(|taint| taint.effect != "PreferNoSchedule");
    selected
        && hard.all(|taint| {
            let value = taint.value.as_deref().unwrap_or_default();
            spec.tolerations.iter().flatten().any(|t| tolerates(t, &taint.key, value, &taint.effect))
        })
}

fn tolerates(toleration: &Toleration, key: &str, value: &str, effect: &str) -> bool {
    let exists = toleration.operator.as_deref() == Some("Exists");
    let key_matches = match toleration.key.as_deref() {
        None | Some("") => exists,
        Some(own) => own == key,
    };
    key_matches
        && (exists || toleration.value.as_deref().unwrap_or_default() == value)
        && toleration.effect.as_deref().is_none_or(|own| own.is_empty() || own == effect)
}
