//! The owner of each slice of a node.

use crate::mig::{GpuModel, SliceAt};
use crate::pipeline::{AssignedSlice, EvictionOrder, EvictionPolicy, Node, NodeError, NodeGpu};
use gshare_core::{Bytes, GpuId, InstanceId, ProfileId};
use std::collections::BTreeSet;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Nobody,
    Exclusive(InstanceId),
    Shared,
    /// The GPU is lost: the slice is not there.
    Lost,
}

#[derive(Debug, Clone)]
pub(super) struct Slice {
    pub(super) gpu: GpuId,
    pub(super) at: SliceAt,
    pub(super) owner: Owner,
    /// The instances on a shared slice; `order` has the residents, and `used` their memory.
    pub(super) instances: BTreeSet<InstanceId>,
    pub(super) order: EvictionOrder<InstanceId>,
    pub(super) used: Bytes,
    /// Time of work in this window; `was_busy` is the time in the window before.
    pub(super) busy: u64,
    pub(super) was_busy: u64,
}

impl Slice {
    const fn new(gpu: GpuId, at: SliceAt, owner: Owner, policy: EvictionPolicy) -> Self {
        Self {
            gpu,
            at,
            owner,
            instances: BTreeSet::new(),
            order: EvictionOrder::new(policy),
            used: Bytes::ZERO,
            busy: 0,
            was_busy: 0,
        }
    }
}

/// The slices of a node, in the order of GPU and place.
#[derive(Debug, Clone)]
pub(super) struct Slices {
    pub(super) model: GpuModel,
    policy: EvictionPolicy,
    /// The present GPUs, without lost GPUs.
    pub(super) gpus: Vec<GpuId>,
    pub(super) all: Vec<Slice>,
    /// Grows whenever a slice becomes free, or shared.
    pub(super) version: u64,
}

impl Slices {
    pub(super) fn new(node: &Node, policy: EvictionPolicy) -> Self {
        let mut all = Vec::new();
        for gpu in node.gpus() {
            all.extend(gpu.free.iter().map(|&at| Slice::new(gpu.gpu, at, Owner::Nobody, policy)));
        }
        let gpus = node.gpus().iter().map(|gpu| gpu.gpu).collect();
        Self { model: node.model().clone(), policy, gpus, all, version: 1 }
    }

    /// Whether a GPU with these slices can be one of the node's.
    pub(super) fn check_join(&self, gpu: GpuId, slices: &[SliceAt]) -> Result<(), NodeError> {
        let mut gpus = self.node()?.gpus().to_vec();
        gpus.push(NodeGpu { gpu, free: slices.to_vec(), busy: Vec::new() });
        Node::new(self.model.clone(), gpus).map(|_| ())
    }

    /// Adds a GPU's slices. A returning GPU's slices keep their numbers.
    pub(super) fn join(&mut self, gpu: GpuId, slices: &[SliceAt]) {
        self.gpus.push(gpu);
        for &at in slices {
            let new = Slice::new(gpu, at, Owner::Nobody, self.policy);
            match self.all.iter_mut().find(|one| one.gpu == gpu && one.at == at) {
                Some(lost) => *lost = new,
                None => self.all.push(new),
            }
        }
        self.version += 1;
    }

    /// From now on the GPU's slices are lost as soon as no instance has them.
    pub(super) fn lose(&mut self, gpu: GpuId) {
        self.gpus.retain(|one| *one != gpu);
        for slice in self.all.iter_mut().filter(|slice| slice.gpu == gpu) {
            if slice.owner == Owner::Nobody {
                slice.owner = Owner::Lost;
            }
        }
    }

    /// The node as partitioner and assigner see it.
    pub(super) fn node(&self) -> Result<Node, NodeError> {
        self.node_without(&[])
    }

    /// The node if the slices at `places` were free too.
    pub(super) fn node_without(&self, places: &[usize]) -> Result<Node, NodeError> {
        let gpu = |&gpu: &GpuId| {
            let on = |free: bool| {
                let here = move |slice: &Slice| slice.gpu == gpu && slice.owner != Owner::Lost;
                let slices = self.all.iter().enumerate().filter(move |(_, slice)| here(slice));
                let is_free =
                    |place: usize, slice: &Slice| slice.owner == Owner::Nobody || places.contains(&place);
                let slices = slices.filter(move |(place, slice)| is_free(*place, slice) == free);
                slices.map(|(_, slice)| slice.at).collect()
            };
            NodeGpu { gpu, free: on(true), busy: on(false) }
        };
        Node::new(self.model.clone(), self.gpus.iter().map(gpu).collect())
    }

    pub(super) fn find(&self, slice: AssignedSlice) -> Option<usize> {
        self.all.iter().position(|one| one.gpu == slice.gpu && one.at == slice.slice)
    }

    pub(super) fn assigned(&self, place: usize) -> AssignedSlice {
        AssignedSlice { gpu: self.all[place].gpu, slice: self.all[place].at }
    }

    /// The instances on a slice.
    pub(super) fn on(&self, slice: AssignedSlice) -> Vec<InstanceId> {
        let Some(slice) = self.find(slice).map(|place| &self.all[place]) else { return Vec::new() };
        match slice.owner {
            Owner::Exclusive(instance) => vec![instance],
            _ => slice.instances.iter().copied().collect(),
        }
    }

    /// Number of slices with an instance.
    pub(super) fn held(&self) -> usize {
        self.all.iter().filter(|slice| matches!(slice.owner, Owner::Exclusive(_) | Owner::Shared)).count()
    }

    pub(super) fn free(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.all.len()).filter(|&place| self.all[place].owner == Owner::Nobody)
    }

    /// The shared slices of present GPUs.
    pub(super) fn shared(&self) -> impl Iterator<Item = usize> + '_ {
        let here = |slice: &Slice| slice.owner == Owner::Shared && self.gpus.contains(&slice.gpu);
        (0..self.all.len()).filter(move |&place| here(&self.all[place]))
    }

    pub(super) fn release(&mut self, place: usize) {
        let here = self.gpus.contains(&self.all[place].gpu);
        self.all[place].owner = if here { Owner::Nobody } else { Owner::Lost };
        self.version += 1;
    }

    /// Memory of a profile.
    pub(super) fn memory(&self, profile: ProfileId) -> Bytes {
        self.model.get(profile).map_or(Bytes::ZERO, |profile| profile.memory)
    }
}
