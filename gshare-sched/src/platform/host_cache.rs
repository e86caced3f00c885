//! The functions with weights in each node's host memory.
//!
//! An instance that finds its function's weights in host memory loads in a fraction of the time (GPU-enabled FaaS, section III-D;
//! FluidFaaS, section 5.3: "warm"). Weights are there from the first ready instance on the node until other weights need the memory
//! set aside: the least recently used go first.

use crate::Tier;
use crate::platform::PlatformAction;
use gshare_core::{Bytes, FunctionId, NodeId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
struct OfNode {
    /// Each function's last use and bytes.
    functions: BTreeMap<FunctionId, (u64, Bytes)>,
    order: BTreeSet<(u64, FunctionId)>,
    used: Bytes,
}

/// The weights in host memory, of all nodes.
#[derive(Debug)]
pub(super) struct HostCache {
    capacity: Bytes,
    nodes: BTreeMap<NodeId, OfNode>,
    /// The nodes with each function's weights.
    holders: BTreeMap<FunctionId, BTreeSet<NodeId>>,
    clock: u64,
}

impl HostCache {
    /// A cache of `capacity` bytes on each node.
    pub(super) const fn new(capacity: Bytes) -> Self {
        Self { capacity, nodes: BTreeMap::new(), holders: BTreeMap::new(), clock: 0 }
    }

    /// The place of the weights for a start on `node`.
    pub(super) fn tier(&self, node: NodeId, function: FunctionId) -> Tier {
        match self.nodes.get(&node).is_some_and(|of| of.functions.contains_key(&function)) {
            true => Tier::Host,
            false => Tier::Disk,
        }
    }

    /// Records the load of the function's weights on `node`, and orders the removal of others for them.
    pub(super) fn loaded(
        &mut self,
        node: NodeId,
        function: FunctionId,
        bytes: Bytes,
        orders: &mut Vec<PlatformAction>,
    ) {
        if bytes > self.capacity {
            return;
        }
        self.clock += 1;
        let of = self.nodes.entry(node).or_default();
        if let Some((before, held)) = of.functions.insert(function, (self.clock, bytes)) {
            of.order.remove(&(before, function));
            of.used = of.used.saturating_sub(held);
        }
        of.order.insert((self.clock, function));
        self.holders.entry(function).or_default().insert(node);
        of.used = Bytes(of.used.get().saturating_add(bytes.get()));
        while of.used > self.capacity {
            let Some((_, victim)) = of.order.pop_first() else { break };
            if let Some((_, held)) = of.functions.remove(&victim) {
                of.used = of.used.saturating_sub(held);
                if let Some(on) = self.holders.get_mut(&victim) {
                    on.remove(&node);
                }
                orders.push(PlatformAction::Forget { node, function: victim });
            }
        }
    }

    /// Removes the function on all nodes.
    pub(super) fn remove(&mut self, function: FunctionId, orders: &mut Vec<PlatformAction>) {
        for node in self.holders.remove(&function).unwrap_or_default() {
            if let Some(of) = self.nodes.get_mut(&node)
                && let Some((at, held)) = of.functions.remove(&function)
            {
                of.order.remove(&(at, function));
                of.used = of.used.saturating_sub(held);
                orders.push(PlatformAction::Forget { node, function });
            }
        }
    }

    /// Removes a node with its memory.
    pub(super) fn lose(&mut self, node: NodeId) {
        for function in self.nodes.remove(&node).unwrap_or_default().functions.into_keys() {
            if let Some(on) = self.holders.get_mut(&function) {
                on.remove(&node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_make_room() {
        let mut cache = HostCache::new(Bytes(10));
        let (node, mut orders) = (NodeId::new(0), Vec::new());
        for function in [0, 1, 0] {
            cache.loaded(node, FunctionId::new(function), Bytes(4), &mut orders);
        }
        assert!(orders.is_empty());
        cache.loaded(node, FunctionId::new(2), Bytes(4), &mut orders);
        assert_eq!(orders, [PlatformAction::Forget { node, function: FunctionId::new(1) }]);
        assert_eq!(cache.tier(node, FunctionId::new(0)), Tier::Host);
        assert_eq!(cache.tier(node, FunctionId::new(1)), Tier::Disk);
        cache.loaded(node, FunctionId::new(3), Bytes(11), &mut orders);
        assert_eq!(cache.tier(node, FunctionId::new(3)), Tier::Disk, "larger than the memory set aside");
        cache.lose(node);
        assert_eq!(cache.tier(node, FunctionId::new(0)), Tier::Disk);
    }
}
