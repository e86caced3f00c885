//! The GPUs of the cluster, and the packer that knows them by number. Pure.

use super::nodes::{closed, excluded};
use super::pod_share;
use super::pods::{self, Given, Place, is_over, node_name};
use gshare_core::{GpuId, PlacementId, ResourceSpec};
use gshare_openfaas::kubernetes::nodes::gpus;
use gshare_sched::pack::{GpuSpec, MaxRects, MaxRectsConfig, PackError, Packer as _};
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};
use kube::ResourceExt as _;
use std::collections::{BTreeMap, BTreeSet};

/// All GPUs with their placements.
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
        let (count, memory) = gpus(node)?;
        for gpu in (first..first + count).map(GpuId::new) {
            let added = self.packer.add_gpu(gpu, GpuSpec::new(memory));
            added
                .and_then(|()| self.packer.set_cordoned(gpu, closed(node).is_some()))
                .map_err(|error| error.to_string())?;
        }
        Ok(count)
    }

    /// The GPU of a node, if it is there.
    fn id(&self, node: &str, gpu: u32) -> Option<GpuId> {
        let first = *self.firsts.get(node)?;
        let (_, count) = self.nodes.get(&first)?;
        (gpu < *count).then(|| GpuId::new(first + gpu))
    }

    /// Whether a pod that is bound there now would be started.
    pub(super) fn takes(&self, given: &Given) -> bool {
        let first = self.firsts.get(&given.node).filter(|_| self.id(&given.node, given.gpu).is_some());
        first.and_then(|first| self.nodes.get(first)).is_some_and(|(node, _)| closed(node).is_none())
    }

    /// The present place of a placement, which may have moved within its GPU.
    pub(super) fn place_of(&self, placement: PlacementId) -> Option<Place> {
        let placement = self.packer.placement(placement)?;
        let (node, gpu) = node_of(&self.nodes, placement.gpu)?;
        Some(Place { node: node.name_any(), gpu, rectangle: placement.rectangle })
    }

    /// Finds a place for a pod on a node that takes it; `failed` has the failures of other pods on nodes.
    ///
    /// # Errors
    /// Reason and message of a condition: why no node is left, or the lack on the GPUs of the remaining nodes.
    pub(super) fn place(
        &mut self,
        share: &ResourceSpec,
        spec: &PodSpec,
        failed: &BTreeMap<String, String>,
    ) -> Result<PlacementId, (&'static str, String)> {
        let nodes = &self.nodes;
        let allowed =
            |gpu: GpuId| node_of(nodes, gpu).is_some_and(|(node, _)| excluded(node, spec, failed).is_none());
        let error = match self.packer.place_where(&pod_share::demand(share), &allowed) {
            Ok(placed) => return Ok(placed.placement.id),
            Err(error) => error,
        };
        let (mut reasons, mut counts) = (BTreeSet::new(), BTreeMap::new());
        for why in nodes.values().filter_map(|(node, _)| excluded(node, spec, failed)) {
            reasons.insert(why.reason());
            *counts.entry(why).or_insert(0) += 1;
        }
        let (all, out) = (nodes.len(), counts.values().sum::<usize>());
        let told: Vec<_> = counts.iter().map(|(why, count)| format!("{count} {why}")).collect();
        let told = format!("{out} of {all} nodes are out: {}", told.join(", "));
        Err(match (&error, reasons.first()) {
            (_, None) if all == 0 => {
                ("NoNodes", format!("no node with label {}=true has GPUs", pods::NODE_LABEL))
            }
            (_, Some(reason)) if out == all => (if reasons.len() == 1 { reason } else { "NoNodeFits" }, told),
            (PackError::NeverFits { .. }, _) => ("NeverFits", error.to_string()),
            (_, None) => ("NoRoom", error.to_string()),
            (_, Some(_)) => ("NoRoom", format!("{error}; {told}")),
        })
    }

    /// Puts every existing pod back into its place. Node, GPU and share are in its spec, which never changes; only the
    /// offsets of its rectangle are in annotations. `known` tells whether a pod's FaSTPod still exists.
    pub(super) fn hold<'p>(
        &mut self,
        pods: &[&'p Pod],
        known: impl Fn(&Pod) -> bool,
        complaints: &mut Vec<String>,
    ) -> Vec<Held<'p>> {
        let mut held = Vec::new();
        let mut later = Vec::new();
        for pod in pods.iter().copied().filter(|pod| !is_over(pod)) {
            let Some(given) = Given::of(pod) else {
                // Made before the spec had it: it may run, and its GPU is not known.
                if let Some(node) = node_name(pod).filter(|_| known(pod)) {
                    complaints.push(format!(
                        "pod {}: its annotations were changed: node {node} gets no more",
                        pod.name_any()
                    ));
                    self.close(node);
                }
                continue;
            };
            let node = node_name(pod).unwrap_or(&given.node);
            let Some(gpu) = self.id(node, given.gpu) else { continue };
            let demand = pod_share::demand(&given.share);
            let rectangle = Place::of(pod).map(|place| place.rectangle);
            let own = rectangle.filter(|own| (own.quota, own.sm) == (demand.quota, demand.sm));
            match own.map(|own| self.packer.place_at(gpu, own, &demand)) {
                Some(Ok(placement)) => held.push((pod, Some(placement.id))),
                _ => later.push((pod, gpu, given.share)),
            }
        }
        // Some neighbours moved to make room for this pod, but not all moves were noted: make room once more.
        for (pod, gpu, share) in later {
            let cordoned = self.packer.gpu(gpu).is_some_and(|gpu| gpu.cordoned);
            self.cordon(gpu, false);
            let placed = self.packer.place_where(&pod_share::demand(&share), &|other| other == gpu);
            if let Err(error) = &placed {
                // The pod runs there all the same, so nothing more goes to this GPU.
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
            self.cordon(GpuId::new(gpu), true);
        }
    }

    fn cordon(&mut self, gpu: GpuId, cordoned: bool) {
        // An error only means that the GPU is gone.
        let _ = self.packer.set_cordoned(gpu, cordoned);
    }
}

fn node_of<'a>(nodes: &BTreeMap<u32, (&'a Node, u32)>, gpu: GpuId) -> Option<(&'a Node, u32)> {
    let (first, (node, count)) = nodes.range(..=gpu.number()).next_back()?;
    let number = gpu.number() - first;
    (number < *count).then_some((*node, number))
}
