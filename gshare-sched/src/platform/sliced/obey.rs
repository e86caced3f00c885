//! Orders of the keepers and the router, turned into orders for the host and events for each other.

use super::{Cluster, Instance, Memory, Node, SlicedPool, Task};
use crate::Tier;
use crate::pipeline::{
    AssignedSlice, Home, InstanceAction, InstanceEvent, InstanceReason, RouteAction, RouteEvent, RouteReject,
    Service,
};
use crate::platform::{Life, PlatformAction, Rejection, StopCause};
use gshare_core::{Duration, Engine, FunctionId, InstanceId, NodeId, RequestId, SharedSlice};

impl SlicedPool {
    /// Passes the queued events to the engines one by one, and carries out the answers.
    pub(super) fn run(&mut self, cluster: &mut Cluster) {
        while let Some(task) = self.tasks.pop_front() {
            match task {
                Task::Keep(at, event) => {
                    let Some(node) = self.nodes.get_mut(&at) else { continue };
                    let mut orders = Vec::new();
                    // A keeper may know of no minimums.
                    let may_refuse = matches!(event, InstanceEvent::MinimumSet { .. });
                    let told = node.keeper.handle(cluster.now, event, &mut orders);
                    debug_assert!(may_refuse || told.is_ok(), "keeper of {at}: {told:?}");
                    self.file(at);
                    for order in orders {
                        self.obey(at, order, cluster);
                    }
                }
                Task::Route(event) => {
                    match event {
                        RouteEvent::InstanceDraining { instance } => self.drains(instance, cluster),
                        // Its dispatch is answered without a caller.
                        RouteEvent::Cancelled { request } if self.given.contains_key(&request) => continue,
                        RouteEvent::Completed { request, .. } => {
                            self.given.remove(&request);
                        }
                        RouteEvent::InstanceDown { instance } => self.given.retain(|_, on| *on != instance),
                        _ => {}
                    }
                    let mut orders = Vec::new();
                    let told = self.router.handle(cluster.now, event, &mut orders);
                    // The router may have rejected the request just before.
                    let given_up = matches!(event, RouteEvent::Cancelled { .. });
                    debug_assert!(given_up || told.is_ok(), "router: {told:?}");
                    for order in orders {
                        self.direct(order, cluster);
                    }
                }
            }
        }
    }

    /// Carries out a keeper's order. An unknown name belongs to a gone instance, which the keeper learns next.
    pub(super) fn obey(&mut self, at: NodeId, order: InstanceAction, cluster: &mut Cluster) {
        let named = |local: InstanceId| self.nodes.get(&at).and_then(|node| node.names.get(&local)).copied();
        match order {
            InstanceAction::Start { instance, function, home, from, takes, reason } => {
                self.start(at, (instance, function, home), (from, takes), reason, cluster);
            }
            InstanceAction::Load { instance, takes } => {
                let Some(id) = named(instance) else { return };
                if let Some(one) = self.instances.get_mut(&id) {
                    one.memory = Memory::Coming { takes };
                    let slices: Vec<AssignedSlice> = one.home.slices().collect();
                    self.unpark(at, &slices, cluster);
                }
            }
            InstanceAction::Evict { instance, .. } => {
                if let Some(id) = named(instance) {
                    self.evict(id, cluster);
                }
            }
            InstanceAction::Moved { instance, home, .. } => {
                let Some(id) = named(instance) else { return };
                let Some(one) = self.instances.get(&id) else { return };
                let Some(node) = self.nodes.get(&at) else { return };
                let parts = self.parts(one.function, &node.model, &home);
                if let Some(one) = self.instances.get_mut(&id) {
                    // A newly shared slice may suit other functions.
                    cluster.look = true;
                    (one.home, one.parts) = (home, parts);
                    if one.up && !one.draining {
                        let service = self.service(id);
                        self.route(RouteEvent::ServiceChanged { instance: id, service });
                    }
                }
            }
            InstanceAction::Drain { instance, reason } => {
                let Some(id) = named(instance) else { return };
                if let Some(one) = self.instances.get_mut(&id) {
                    one.cause = cause(reason);
                    self.route(RouteEvent::InstanceDraining { instance: id });
                }
            }
            InstanceAction::Stop { instance, reason } => {
                let Some(id) = named(instance) else { return };
                if let Some(one) = self.instances.get_mut(&id) {
                    if cluster.instances.get(id).is_some_and(|of| of.life == Life::Starting) {
                        one.cause = cause(reason);
                    }
                    cluster.order(PlatformAction::Stop { instance: id, cause: one.cause });
                }
            }
            InstanceAction::Prewarm { function } => {
                cluster.order(PlatformAction::Fetch { node: at, function });
            }
            InstanceAction::Forget { function } => {
                cluster.order(PlatformAction::Forget { node: at, function });
            }
            InstanceAction::Unmet { function } => {
                self.unmet(function, Some(at), cluster);
            }
        }
    }

    /// Whether one more instance is within the function's bound; a replacement does not count as one more.
    fn may_start(&self, function: FunctionId, replaces: Option<InstanceId>, cluster: &Cluster) -> bool {
        let (Some(of), Some(own)) = (cluster.functions.get(&function), self.functions.get(&function)) else {
            return false;
        };
        let counts = |id: &&InstanceId| Some(**id) != replaces && self.counts(**id, cluster);
        own.instances.iter().filter(counts).count() < of.spec.max_instances as usize
    }

    fn start(
        &mut self,
        at: NodeId,
        (local, function, home): (InstanceId, FunctionId, Home),
        (from, takes): (Tier, Duration),
        reason: InstanceReason,
        cluster: &mut Cluster,
    ) {
        let Some(node) = self.nodes.get(&at) else { return };
        let replaces = match reason {
            InstanceReason::Migrated { from } => node.names.get(&from).copied(),
            _ => None,
        };
        if !self.may_start(function, replaces, cluster) {
            return self.keep(at, InstanceEvent::Gone { instance: local });
        }
        let parts = self.parts(function, &node.model, &home);
        let id = cluster.instances.name();
        let parked = matches!(home, Home::Shared { .. });
        if let (Some(of), Some(node)) = (self.functions.get_mut(&function), self.nodes.get_mut(&at)) {
            of.instances.insert(id);
            of.unmet.clear();
            node.names.insert(local, id);
            for slice in home.slices() {
                node.slices.entry(slice).or_default().insert(id);
            }
        }
        let new = Instance {
            function,
            node: at,
            local,
            replaces,
            home,
            parts: parts.clone(),
            memory: if parked { Memory::Out } else { Memory::In },
            leaving: false,
            up: false,
            draining: false,
            pending: None,
            cause: StopCause::Drained,
        };
        self.instances.insert(id, new);
        let start = PlatformAction::Start { instance: id, function, parts, from, takes, parked };
        cluster.order(start);
    }

    fn evict(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.instances.get_mut(&id) else { return };
        let Home::Shared { load, .. } = one.home else { return };
        (one.memory, one.leaving) = (Memory::Out, true);
        let draining = one.draining;
        // The memory of a stopped instance is free once it is gone.
        if cluster.order(PlatformAction::Park { instance: id }) && !draining {
            self.route(RouteEvent::LoadChanged { instance: id, load });
        }
    }

    /// Orders the `Unpark` that slices wait for, unless an instance still has to leave them.
    pub(super) fn unpark(&mut self, at: NodeId, slices: &[AssignedSlice], cluster: &mut Cluster) {
        // While the instances of a lost device are forgotten one by one, none of them may return.
        let there = slices.iter().filter(|slice| self.gpus.contains_key(&slice.gpu));
        for on in there.filter_map(|slice| self.nodes.get(&at)?.slices.get(slice)) {
            if on.iter().any(|id| self.instances[id].leaving) {
                continue;
            }
            for &instance in on {
                if let Some(one) = self.instances.get_mut(&instance)
                    && let Memory::Coming { takes } = one.memory
                {
                    one.memory = Memory::Unparking;
                    let parts = one.parts.clone();
                    cluster.order(PlatformAction::Unpark { instance, parts, takes });
                }
            }
        }
    }

    /// The router gives the instance no more requests. The host learns this after the dispatch of the request for which the
    /// instance is unparked.
    fn drains(&mut self, id: InstanceId, cluster: &mut Cluster) {
        if let Some(one) = self.instances.get_mut(&id) {
            one.draining = true;
            if one.pending.is_none() {
                cluster.order(PlatformAction::Drain { instance: id });
            }
            cluster.has_fewer(one.function);
        }
    }

    /// Carries out the router's order.
    fn direct(&mut self, order: RouteAction, cluster: &mut Cluster) {
        match order {
            RouteAction::Dispatch { request, instance } => {
                self.given.insert(request, instance);
                self.dispatch(request, instance, cluster);
            }
            RouteAction::Reject { request, reason } => {
                if cluster.is_open(request) {
                    let reason = match reason {
                        RouteReject::Removed => Rejection::Removed,
                        // The SLO: at its deadline the request was withdrawn.
                        _ => Rejection::WouldBeLate,
                    };
                    cluster.order(PlatformAction::Reject { request, reason });
                }
            }
            RouteAction::Short { function, waiting, behind } => {
                self.short(function, waiting, behind, cluster);
            }
            RouteAction::Drained { instance } => {
                if let Some(one) = self.instances.get(&instance) {
                    let event = InstanceEvent::Drained { instance: one.local };
                    self.keep(one.node, event);
                }
            }
        }
    }

    fn dispatch(&mut self, request: RequestId, id: InstanceId, cluster: &mut Cluster) {
        // Unknown if the instance is gone: the router learns this next, and the request waits again.
        let Some(one) = self.instances.get_mut(&id) else { return };
        let (node, local, function) = (one.node, one.local, one.function);
        if one.memory != Memory::In && cluster.is_open(request) {
            one.pending = Some(request);
            self.keep(node, InstanceEvent::Needed { instance: local });
        } else {
            self.send(request, id, cluster);
        }
        if self.node_for(function, cluster) != Some(node) && !cluster.is_removed(function) {
            self.keep(node, InstanceEvent::Requested { function });
        }
    }

    /// Lets the host run a request, or answers in its place when no caller waits any more.
    pub(super) fn send(&mut self, request: RequestId, instance: InstanceId, cluster: &mut Cluster) {
        if cluster.is_open(request) {
            cluster.order(PlatformAction::Dispatch { request, instance });
        } else {
            self.route(RouteEvent::Completed { request, instance });
        }
    }

    /// Tells a keeper that the function's instances cannot serve the waiting requests in time: first the node with the fewest
    /// slices held, and while the shortage lasts the others in turn.
    fn short(&mut self, function: FunctionId, waiting: u32, behind: Duration, cluster: &Cluster) {
        let Some(of) = self.functions.get(&function).filter(|of| !of.nodes.is_empty()) else { return };
        if cluster.is_removed(function) || !self.may_start(function, None, cluster) {
            return;
        }
        let held = |node: &NodeId| self.nodes.get(node).map_or(0, |node: &Node| node.slices.len());
        let mut nodes: Vec<NodeId> = of.nodes.iter().copied().collect();
        nodes.sort_by_key(|node| (held(node), *node));
        let lasts = |&(at, _): &(_, usize)| cluster.now.saturating_since(at) <= super::SHORT_LASTS;
        let turn = of.short.filter(lasts).map_or(0, |(_, turn)| turn + 1);
        let node = nodes[turn % nodes.len()];
        let new = !of.instances.iter().any(|id| self.instances[id].node == node);
        if let Some(of) = self.functions.get_mut(&function) {
            of.short = Some((cluster.now, turn));
        }
        self.keep(node, InstanceEvent::Short { function, waiting, behind });
        if new {
            // An instance started there ends without a request, as after a first request.
            self.keep(node, InstanceEvent::Requested { function });
        }
    }

    /// The instance's times and capacity for the router.
    pub(super) fn service(&mut self, id: InstanceId) -> Service {
        let one = &self.instances[&id];
        match one.home {
            Home::Exclusive { ref parts, latency, interval, .. } => {
                let slices = u32::try_from(parts.len()).unwrap_or(u32::MAX).max(1);
                let capacity = latency.as_nanos().div_ceil(interval.as_nanos().max(1)).max(1);
                let capacity = u32::try_from(capacity).unwrap_or(u32::MAX).min(slices);
                Service::Exclusive { latency, interval, capacity }
            }
            Home::Shared { number, latency, load, .. } => {
                let load = if one.memory == Memory::In { Duration::ZERO } else { load };
                Service::Shared { slice: self.number(one.node, number), latency, load }
            }
        }
    }

    /// The router's number of a node's shared slice.
    fn number(&mut self, node: NodeId, slice: SharedSlice) -> SharedSlice {
        let next = SharedSlice::new(u32::try_from(self.numbers.len()).unwrap_or(u32::MAX));
        *self.numbers.entry((node, slice)).or_insert(next)
    }
}

/// The cause for the host when the keeper gives an instance up for this reason.
const fn cause(reason: InstanceReason) -> StopCause {
    match reason {
        InstanceReason::Reclaimed { .. } => StopCause::Evicted,
        InstanceReason::Removed => StopCause::Removed,
        InstanceReason::Replaced { .. } => StopCause::Replaced,
        _ => StopCause::Drained,
    }
}
