//! The minimum of a function, kept by its nodes together.

use super::{Function, Instance, SlicedPool};
use crate::pipeline::InstanceEvent;
use crate::platform::PoolAction;
use gshare_core::{FunctionId, InstanceId, NodeId};
use std::collections::{BTreeMap, BTreeSet};

impl SlicedPool {
    /// Schedules a check of minimums after the event: the function has other bounds, or may have fewer instances.
    pub(super) fn look_at(&mut self, function: FunctionId) {
        let of = self.functions.get(&function);
        if of.is_some_and(|of| of.min_instances > 0 || !of.kept.is_empty()) {
            self.lacking.insert(function);
        }
        self.look = true;
    }

    /// Starts the missing instances of minimums, as far as there are slices.
    pub(super) fn keep_minimums(&mut self, actions: &mut Vec<PoolAction>) {
        // One function's slices may come from another function.
        while core::mem::take(&mut self.look) {
            for function in self.lacking.clone() {
                if self.keep_minimum(function, actions) {
                    self.lacking.remove(&function);
                }
            }
        }
    }

    /// Each node keeps its present instances, as far as the minimum goes. Missing instances then start one by one, on the node
    /// with the fewest slices held that can start them. False: some are still missing.
    fn keep_minimum(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) -> bool {
        let Some(of) = self.functions.get(&function).filter(|of| !of.removed) else { return true };
        let mut keeps: BTreeMap<NodeId, u32> = of.kept.keys().map(|node| (*node, 0)).collect();
        let mut missing = of.min_instances;
        for one in self.staying(of).take(of.min_instances as usize) {
            *keeps.entry(one.node).or_default() += 1;
            missing -= 1;
        }
        let (mut nodes, not_before): (BTreeSet<NodeId>, _) = (of.nodes.clone(), of.not_before);
        for (at, keeps) in keeps {
            self.set_minimum(at, function, keeps, actions);
        }
        if missing > 0 && not_before > self.now {
            self.retry = Some(self.retry.map_or(not_before, |at| at.min(not_before)));
            return false;
        }
        while missing > 0 {
            let held = |at: &NodeId| (self.nodes.get(at).map_or(0, |node| node.slices.len()), *at);
            let Some(at) = nodes.iter().copied().min_by_key(held) else {
                self.unmet(function, None, actions);
                return false;
            };
            let before = self.count_on(at, function);
            self.set_minimum(at, function, before + 1, actions);
            let started = self.count_on(at, function).saturating_sub(before);
            missing = missing.saturating_sub(started);
            if started == 0 {
                nodes.remove(&at);
                self.set_minimum(at, function, before, actions);
                self.unmet(function, Some(at), actions);
            }
        }
        true
    }

    /// A function's remaining instances; an instance and its replacement count as one.
    pub(super) fn staying(&self, of: &Function) -> impl Iterator<Item = &Instance> {
        let counts = |id: &InstanceId| self.instances.get(id).is_some_and(Instance::counts);
        let all = of.instances.iter().map(|id| &self.instances[id]);
        all.filter(move |one| one.counts() && !one.replaces.as_ref().is_some_and(counts))
    }

    fn count_on(&self, at: NodeId, function: FunctionId) -> u32 {
        let of = self.functions.get(&function).into_iter();
        let on = of.flat_map(|of| self.staying(of)).filter(|one| one.node == at).count();
        u32::try_from(on).unwrap_or(u32::MAX)
    }

    fn set_minimum(
        &mut self,
        at: NodeId,
        function: FunctionId,
        instances: u32,
        actions: &mut Vec<PoolAction>,
    ) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let before = match instances {
            0 => of.kept.remove(&at),
            _ => of.kept.insert(at, instances),
        };
        if before.unwrap_or(0) != instances {
            self.keep(at, InstanceEvent::MinimumSet { function, instances });
            self.run(actions);
        }
    }
}
