//! The placements of an instance: one, or several for a model that is spread over devices of a node.
//!
//! Devices with one model together exchange its activations with every layer, so they belong to one node: the node with the fewest
//! devices with room, so that others stay whole for larger instances. Tensor parallelism needs equal parts. Dilu (section 3.3)
//! spreads a model by the free memory instead.

use super::{Cluster, Demand, FractionalPool, FunctionId, GpuId, NodeId};
use crate::pack::{PackError, Placed};
use std::collections::{BTreeMap, BTreeSet};

/// The devices allowed for a placement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Within<'a> {
    /// One node only.
    pub(super) node: Option<NodeId>,
    /// The devices with the instance's living processes only, unless empty.
    pub(super) homes: &'a BTreeSet<GpuId>,
    pub(super) reserved: &'a BTreeSet<GpuId>,
    /// The function's nodes. An instance that is on a device already comes back to it from any node.
    pub(super) nodes: Option<&'a BTreeSet<NodeId>>,
}

impl Within<'static> {
    pub(super) const ANYWHERE: Self =
        Self { node: None, homes: &BTreeSet::new(), reserved: &BTreeSet::new(), nodes: None };
}

impl Within<'_> {
    pub(super) fn allows(&self, gpu: GpuId, node: NodeId) -> bool {
        self.node.is_none_or(|only| only == node)
            && match self.homes.is_empty() {
                true => self.nodes.is_none_or(|nodes| nodes.contains(&node)),
                false => self.homes.contains(&gpu),
            }
            && !self.reserved.contains(&gpu)
    }
}

impl FractionalPool {
    /// Places an instance of a function on allowed devices.
    ///
    /// # Errors
    /// The packer's; then no part is placed.
    pub(super) fn place_beside(
        &mut self,
        function: FunctionId,
        demand: &Demand,
        within: &Within<'_>,
        cluster: &Cluster,
    ) -> Result<Vec<Placed>, PackError> {
        let spec = cluster.functions.get(&function).map(|of| &of.spec);
        let (count, weights) = spec.map_or((1, None), |spec| (spec.devices, spec.weights));
        let within = &Within { nodes: spec.and_then(|spec| spec.nodes.as_ref()), ..*within };
        if count > 1 {
            return self.place_spread(count, demand, within);
        }
        if within.node.is_none() && within.reserved.is_empty() && within.nodes.is_none() && weights.is_none()
        {
            return Ok(vec![self.packer.place(demand)?]);
        }
        let devices = &self.devices;
        let allowed = |gpu| devices.get(&gpu).is_some_and(|node| within.allows(gpu, *node));
        let placed = match weights {
            Some(weights) => self.weights.place(&mut *self.packer, demand, weights, &allowed),
            None => self.packer.place_where(demand, &allowed),
        };
        Ok(vec![placed?])
    }

    fn place_spread(
        &mut self,
        count: u32,
        demand: &Demand,
        within: &Within<'_>,
    ) -> Result<Vec<Placed>, PackError> {
        let mut nodes: BTreeMap<NodeId, BTreeSet<GpuId>> = BTreeMap::new();
        for (&gpu, &at) in &self.devices {
            let fits = self
                .packer
                .gpu(gpu)
                .is_some_and(|status| status.spec.memory.saturating_sub(status.memory_used) >= demand.memory);
            if fits && within.allows(gpu, at) {
                nodes.entry(at).or_default().insert(gpu);
            }
        }
        let mut nodes: Vec<BTreeSet<GpuId>> = nodes.into_values().collect();
        nodes.retain(|gpus| gpus.len() >= count as usize);
        nodes.sort_by_key(BTreeSet::len);
        let demands = vec![*demand; count as usize];
        let mut placed = Vec::new();
        for gpus in nodes {
            let fresh = |taken: &[Placed], gpu: GpuId| {
                gpus.contains(&gpu) && taken.iter().all(|one| one.placement.gpu != gpu)
            };
            if self.packer.place_set(&demands, &fresh, &mut placed).is_ok() {
                return Ok(placed);
            }
        }
        Err(PackError::NoRoom { quota: demand.quota, sm: demand.sm })
    }
}
