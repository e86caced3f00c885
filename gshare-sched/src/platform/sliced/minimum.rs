//! The minimum of a function, kept by its nodes together.

use super::{Cluster, Instance, InstanceId, SlicedPool};
use gshare_core::{FunctionId, NodeId};
use std::collections::BTreeMap;

impl SlicedPool {
    /// Each node keeps its present instances, as far as the minimum goes. Missing instances then start one by one, on the node
    /// with the fewest slices held that can start them, if they may.
    pub(super) fn keep_parts(&mut self, function: FunctionId, may_start: bool, cluster: &mut Cluster) {
        let Some(of) = self.functions.get(&function) else { return };
        let least = cluster.functions.get(&function).map_or(0, |of| of.spec.min_instances);
        let mut keeps: BTreeMap<NodeId, u32> = of.kept.keys().map(|node| (*node, 0)).collect();
        let mut nodes = of.nodes.clone();
        let mut missing = least;
        for (id, _) in self.staying(function, cluster).take(least as usize) {
            *keeps.entry(self.at[&id]).or_default() += 1;
            missing -= 1;
        }
        for (at, keeps) in keeps {
            self.set_minimum(at, function, keeps, cluster);
        }
        while missing > 0 && may_start {
            let Some(at) = nodes.iter().copied().min_by_key(|at| (self.held(*at), *at)) else {
                return self.unmet(function, None, cluster);
            };
            let before = self.count_on(at, function, cluster);
            self.set_minimum(at, function, before + 1, cluster);
            let started = self.count_on(at, function, cluster).saturating_sub(before);
            missing = missing.saturating_sub(started);
            if started == 0 {
                nodes.remove(&at);
                self.set_minimum(at, function, before, cluster);
                self.unmet(function, Some(at), cluster);
            }
        }
    }

    /// A function's remaining instances; an instance and its replacement count as one.
    fn staying(
        &self,
        function: FunctionId,
        cluster: &Cluster,
    ) -> impl Iterator<Item = (InstanceId, &Instance)> {
        let counts: BTreeMap<InstanceId, &Instance> = self.counting(function, cluster).collect();
        let all = counts.clone().into_iter();
        all.filter(move |(_, one)| one.replaces.is_none_or(|old| !counts.contains_key(&old)))
    }

    fn count_on(&self, at: NodeId, function: FunctionId, cluster: &Cluster) -> u32 {
        let on = self.staying(function, cluster).filter(|(id, _)| self.at.get(id) == Some(&at));
        u32::try_from(on.count()).unwrap_or(u32::MAX)
    }

    fn set_minimum(&mut self, at: NodeId, function: FunctionId, instances: u32, cluster: &mut Cluster) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let before = match instances {
            0 => of.kept.remove(&at),
            _ => of.kept.insert(at, instances),
        };
        if before.unwrap_or(0) != instances {
            self.decide(at, cluster, |node, cluster| node.minimum(function, instances, cluster));
            self.run(cluster);
        }
    }
}
