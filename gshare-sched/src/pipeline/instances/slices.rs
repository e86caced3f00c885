//! Who has which slice of a node.

use super::{EvictionOrder, EvictionPolicy};
use gshare_core::mig::{GpuModel, ProfileId, SliceAt};
use gshare_core::pipeline::routing::SharedSlice;
use gshare_core::pipeline::{AssignedSlice, Node, NodeError, NodeGpu};
use gshare_core::scale::InstanceId;
use gshare_core::{Bytes, GpuId};
use std::collections::BTreeSet;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Nobody,
    /// In use by others than the keeper's instances, for good.
    Others,
    Exclusive(InstanceId),
    Shared,
}

#[derive(Debug, Clone)]
pub(super) struct Slice {
    pub(super) gpu: GpuId,
    pub(super) at: SliceAt,
    pub(super) owner: Owner,
    /// When it is shared: who lives on it, who is in its memory, and how much of that they take.
    pub(super) instances: BTreeSet<InstanceId>,
    pub(super) order: EvictionOrder<InstanceId>,
    pub(super) used: Bytes,
    /// Time it worked in this window, and in the one before.
    pub(super) busy: u64,
    pub(super) was_busy: u64,
}

/// The slices of a node, in the order of GPU and place; a [`SharedSlice`] is a number in this list.
#[derive(Debug, Clone)]
pub(super) struct Slices {
    pub(super) model: GpuModel,
    gpus: Vec<GpuId>,
    pub(super) all: Vec<Slice>,
    /// Grows whenever a slice becomes free, or shared.
    pub(super) version: u64,
}

impl Slices {
    pub(super) fn new(node: &Node, policy: EvictionPolicy) -> Self {
        let slice = |gpu: GpuId, at: SliceAt, owner: Owner| Slice {
            gpu,
            at,
            owner,
            instances: BTreeSet::new(),
            order: EvictionOrder::new(policy),
            used: Bytes::ZERO,
            busy: 0,
            was_busy: 0,
        };
        let mut all = Vec::new();
        for gpu in node.gpus() {
            all.extend(gpu.free.iter().map(|&at| slice(gpu.gpu, at, Owner::Nobody)));
            all.extend(gpu.busy.iter().map(|&at| slice(gpu.gpu, at, Owner::Others)));
        }
        let gpus = node.gpus().iter().map(|gpu| gpu.gpu).collect();
        Self { model: node.model().clone(), gpus, all, version: 1 }
    }

    /// The node as partitioner and assigner see it.
    pub(super) fn node(&self) -> Result<Node, NodeError> {
        self.node_without(&[])
    }

    /// The node if the slices at `places` were free too.
    pub(super) fn node_without(&self, places: &[usize]) -> Result<Node, NodeError> {
        let gpu = |&gpu: &GpuId| {
            let on = |free: bool| {
                let slices = self.all.iter().enumerate().filter(move |(_, slice)| slice.gpu == gpu);
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
        AssignedSlice { gpu: self.all[place].gpu, slice: self.all[place].at, carved: false }
    }

    pub(super) fn number(place: usize) -> SharedSlice {
        SharedSlice(u32::try_from(place).unwrap_or(u32::MAX))
    }

    pub(super) fn free(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.all.len()).filter(|&place| self.all[place].owner == Owner::Nobody)
    }

    pub(super) fn shared(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.all.len()).filter(|&place| self.all[place].owner == Owner::Shared)
    }

    pub(super) fn release(&mut self, place: usize) {
        self.all[place].owner = Owner::Nobody;
        self.version += 1;
    }

    /// Memory of a profile.
    pub(super) fn memory(&self, profile: ProfileId) -> Bytes {
        self.model.get(profile).map_or(Bytes::ZERO, |profile| profile.memory)
    }

    pub(super) fn compute(&self, profile: ProfileId) -> u32 {
        self.model.get(profile).map_or(0, |profile| profile.compute_slices.into())
    }
}
