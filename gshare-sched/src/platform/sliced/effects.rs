//! What follows from the nodes' decisions and the host's reports: parking, turns on a slice, and the ends of instances.

use super::node::{Effect, Memory};
use super::{AssignedSlice, Cluster, NodeId, SlicedPool};
use crate::pipeline::Home;
use crate::platform::{Life, PlatformAction, StopCause};
use gshare_core::{Duration, FunctionId, InstanceId};

/// A shortage repeated within this time goes on to the next node; a later shortage begins again.
const SHORT_LASTS: Duration = Duration::from_secs(1);

impl SlicedPool {
    /// Carries out the nodes' decisions, one by one.
    pub(super) fn run(&mut self, cluster: &mut Cluster) {
        while let Some((at, effect)) = self.effects.pop_front() {
            match effect {
                Effect::Load(id, takes) => {
                    let Some(one) = self.one_mut(id) else { continue };
                    one.memory = Memory::Coming { takes };
                    let slices: Vec<AssignedSlice> = one.home.slices().collect();
                    self.unpark(&slices, cluster);
                }
                Effect::Evict(id) => self.evict(id, cluster),
                Effect::Moved(id) => {
                    // A newly shared slice may suit other functions.
                    cluster.look = true;
                    if self.offers.get(id).is_some() {
                        self.offer(id, cluster);
                    }
                }
                Effect::Drain(id) => self.drains(id, cluster),
                Effect::Unmet(function) => self.unmet(function, Some(at), cluster),
            }
        }
    }

    fn evict(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.one_mut(id) else { return };
        let Home::Shared { load, .. } = one.home else { return };
        if !one.holds() {
            // It was given up before it came.
            return;
        }
        let keeps = cluster.keeps(one.function);
        (one.memory, one.leaving) = (Memory::Out, true);
        // The memory of a stopped instance is free once it is gone.
        if cluster.order(PlatformAction::Park { instance: id, keeps }) {
            self.loads_in(id, load, cluster);
        }
    }

    /// Orders the `Unpark` that slices wait for, unless an instance still has to leave them.
    fn unpark(&mut self, slices: &[AssignedSlice], cluster: &mut Cluster) {
        for slice in slices {
            // While the instances of a lost device are forgotten one by one, none of them may return.
            let Some(node) = self.node_of(*slice) else { continue };
            let on = node.slices.on(*slice);
            if on.iter().any(|id| node.instances[id].leaving) {
                continue;
            }
            for instance in on {
                let Some(at) = self.at.get(&instance) else { continue };
                let Some(node) = self.nodes.get_mut(at) else { continue };
                let Some(one) = node.instances.get_mut(&instance) else { continue };
                if let Memory::Coming { takes } = one.memory {
                    one.memory = Memory::Unparking;
                    let one = &node.instances[&instance];
                    let parts = node.parts(one.function, &one.home);
                    cluster.order(PlatformAction::Unpark { instance, parts, takes });
                }
            }
        }
    }

    pub(super) fn ready(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.one(id) else { return };
        let (old, at) = (one.replaces, self.at[&id]);
        self.offer(id, cluster);
        if let Some(old) = old {
            self.decide(at, cluster, |node, cluster| node.drain(old, StopCause::Replaced, cluster));
        }
    }

    pub(super) fn parked(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.one_mut(id) else { return };
        one.leaving = false;
        let slices: Vec<AssignedSlice> = one.home.slices().collect();
        self.unpark(&slices, cluster);
    }

    /// The instance is in its slice's memory: the request for which it came runs.
    pub(super) fn unparked(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.one_mut(id) else { return };
        one.memory = Memory::In;
        let pending = one.pending.take();
        self.loads_in(id, Duration::ZERO, cluster);
        if let Some(request) = pending {
            self.dispatch(request, id, cluster);
        }
        if pending.is_none() {
            self.freed(id, cluster);
        }
    }

    /// The instance gets no more requests. The request for which it is unparked goes to another one.
    fn drains(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.one_mut(id) else { return };
        let (function, pending) = (one.function, one.pending.take());
        self.tell_draining(id, cluster);
        cluster.has_fewer(function);
        self.withdraw(id, cluster);
        if let Some(request) = pending {
            self.waits(request, cluster);
            self.serve(function, cluster);
        }
        self.look_short(function, cluster);
        self.look_drained(id, cluster);
    }

    /// Tells the host once that the instance drains.
    fn tell_draining(&self, instance: InstanceId, cluster: &mut Cluster) {
        if cluster.instances.get(instance).is_some_and(|of| of.life != Life::Draining) {
            cluster.order(PlatformAction::Drain { instance });
        }
    }

    /// Stops an instance that was given up and has no work left.
    pub(super) fn look_drained(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.one_mut(id) else { return };
        let cause = one.gives_up;
        // Nobody waits for its return any more.
        if cause.is_some() && one.pending.is_none() && matches!(one.memory, Memory::Coming { .. }) {
            one.memory = Memory::Out;
        }
        if let Some(cause) = cause.filter(|_| !self.is_busy(id, cluster)) {
            cluster.order(PlatformAction::Stop { instance: id, cause });
        }
    }

    /// Forgets instances that have ended, and serves their requests elsewhere.
    pub(super) fn forget(&mut self, ended: &[InstanceId], cluster: &mut Cluster) {
        // Requests of one must not go to another.
        let took: Vec<bool> = ended.iter().map(|id| self.withdraw(*id, cluster)).collect();
        let mut gone = Vec::new();
        for (id, took) in ended.iter().zip(took) {
            let Some(at) = self.at.remove(id) else { continue };
            self.decide(at, cluster, |node, cluster| {
                gone.extend(node.gone(*id, cluster).map(|one| (one, took)));
            });
        }
        for (one, took) in gone {
            let slices: Vec<AssignedSlice> = one.home.slices().collect();
            self.unpark(&slices, cluster);
            if let Some(request) = one.pending {
                self.waits(request, cluster);
            }
            if took || one.gives_up.is_some() {
                self.serve(one.function, cluster);
                slices.iter().for_each(|slice| self.serve_slice(*slice, cluster));
                self.look_short(one.function, cluster);
            }
            if cluster.is_removed(one.function) {
                self.forget_removed(one.function, cluster);
            }
        }
    }

    /// The function's instances cannot serve the waiting requests in time. Tells first the node with the fewest slices held, and
    /// while the shortage lasts the others in turn.
    pub(super) fn short(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let Some(of) = self.functions.get(&function).filter(|of| !of.nodes.is_empty()) else { return };
        let most = cluster.functions.get(&function).map_or(0, |of| of.spec.max_instances as usize);
        if cluster.is_removed(function) || self.counting(function, cluster).count() >= most {
            return;
        }
        let mut nodes: Vec<NodeId> = of.nodes.iter().copied().collect();
        nodes.sort_by_key(|node| (self.held(*node), *node));
        let lasts = |&(at, _): &(_, usize)| cluster.now.saturating_since(at) <= SHORT_LASTS;
        let turn = of.short.filter(lasts).map_or(0, |(_, turn)| turn + 1);
        let at = nodes[turn % nodes.len()];
        let known = cluster.functions[&function].instances.iter().any(|id| self.at.get(id) == Some(&at));
        if let Some(of) = self.functions.get_mut(&function) {
            of.short = Some((cluster.now, turn));
        }
        self.decide(at, cluster, |node, cluster| {
            node.told_short(function, cluster);
            if !known {
                // An instance started there ends without a request, as after a first request.
                node.requested(function, cluster);
            }
        });
    }

    /// Number of a node's slices with an instance.
    pub(super) fn held(&self, node: NodeId) -> usize {
        self.nodes.get(&node).map_or(0, |node| node.slices.held())
    }
}
