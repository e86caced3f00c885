//! The minimum of a function, kept by its nodes together.

use super::{Cluster, Function, Instance, SlicedPool};
use crate::pipeline::InstanceEvent;
use gshare_core::{FunctionId, InstanceId, NodeId};
use std::collections::BTreeMap;

impl SlicedPool {
    /// Each node keeps its present instances, as far as the minimum goes. Missing instances then start one by one, on the node
    /// with the fewest slices held that can start them, if they may.
    pub(super) fn keep_parts(&mut self, function: FunctionId, may_start: bool, cluster: &mut Cluster) {
        let Some(of) = self.functions.get(&function) else { return };
        let least = cluster.functions.get(&function).map_or(0, |of| of.spec.min_instances);
        let mut keeps: BTreeMap<NodeId, u32> = of.kept.keys().map(|node| (*node, 0)).collect();
        let mut missing = least;
        for one in self.staying(of, cluster).take(least as usize) {
            *keeps.entry(one.node).or_default() += 1;
            missing -= 1;
        }
        let mut nodes = of.nodes.clone();
        for (at, keeps) in keeps {
            self.set_minimum(at, function, keeps, cluster);
        }
        while missing > 0 && may_start {
            let held = |at: &NodeId| (self.nodes.get(at).map_or(0, |node| node.slices.len()), *at);
            let Some(at) = nodes.iter().copied().min_by_key(held) else {
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
    pub(super) fn staying(&self, of: &Function, cluster: &Cluster) -> impl Iterator<Item = &Instance> {
        let stays = |id: InstanceId| {
            let one = self.instances.get(&id).filter(|_| self.counts(id, cluster))?;
            let replaces = one.replaces.is_some_and(|id| self.counts(id, cluster));
            (!replaces).then_some(one)
        };
        of.instances.iter().filter_map(move |id| stays(*id))
    }

    fn count_on(&self, at: NodeId, function: FunctionId, cluster: &Cluster) -> u32 {
        let of = self.functions.get(&function).into_iter();
        let on = of.flat_map(|of| self.staying(of, cluster)).filter(|one| one.node == at).count();
        u32::try_from(on).unwrap_or(u32::MAX)
    }

    fn set_minimum(&mut self, at: NodeId, function: FunctionId, instances: u32, cluster: &mut Cluster) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let before = match instances {
            0 => of.kept.remove(&at),
            _ => of.kept.insert(at, instances),
        };
        if before.unwrap_or(0) != instances {
            self.keep(at, InstanceEvent::MinimumSet { function, instances });
            self.run(cluster);
        }
    }
}
