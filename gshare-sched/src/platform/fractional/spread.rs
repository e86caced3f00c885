//! The placements of an instance: one, or several for a model that is spread over devices of a node.
//!
//! Devices with one model together exchange its activations with every layer, so they belong to one node: the node with the fewest
//! devices with room, so that others stay whole for larger instances. Tensor parallelism needs equal parts. Dilu (section 3.3)
//! spreads a model by the free memory instead.

use super::{Cluster, Demand, FractionalPool, FunctionId, GpuId, NodeId};
use crate::pack::{PackError, Placed};
use std::collections::{BTreeMap, BTreeSet};

impl FractionalPool {
    /// Places an instance of a function on unreserved devices, of this node if it has one.
    ///
    /// # Errors
    /// The packer's; then no part is placed.
    pub(super) fn place_beside(
        &mut self,
        function: FunctionId,
        demand: &Demand,
        node: Option<NodeId>,
        reserved: &BTreeSet<GpuId>,
        cluster: &Cluster,
    ) -> Result<Vec<Placed>, PackError> {
        let spec = cluster.functions.get(&function).map(|of| &of.spec);
        let (count, weights) = spec.map_or((1, None), |spec| (spec.devices, spec.weights));
        if count > 1 {
            return self.place_spread(count, demand, node, reserved);
        }
        if node.is_none() && reserved.is_empty() && weights.is_none() {
            return Ok(vec![self.packer.place(demand)?]);
        }
        let devices = &self.devices;
        let here = |gpu| node.is_none_or(|node| devices.get(&gpu) == Some(&node));
        let allowed = |gpu| !reserved.contains(&gpu) && here(gpu);
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
        node: Option<NodeId>,
        reserved: &BTreeSet<GpuId>,
    ) -> Result<Vec<Placed>, PackError> {
        let mut nodes: BTreeMap<NodeId, BTreeSet<GpuId>> = BTreeMap::new();
        for (&gpu, &at) in &self.devices {
            let fits = self
                .packer
                .gpu(gpu)
                .is_some_and(|status| status.spec.memory.saturating_sub(status.memory_used) >= demand.memory);
            if fits && node.is_none_or(|node| node == at) && !reserved.contains(&gpu) {
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
