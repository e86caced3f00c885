//! Requests on slices: the router chooses among the waiting requests, and the ledger has the place of each.

use super::node::{Instance, Memory};
use super::{AssignedSlice, Cluster, SlicedPool};
use crate::pipeline::{Change, Home, Offer, Service};
use crate::platform::requests::Request;
use crate::platform::{PlatformAction, Rejection};
use gshare_core::{Duration, FunctionId, InstanceId, RequestId, Timestamp};

/// Least time between two shortages of a function. 100 ms: an instance takes longer to start.
const SHORT_EVERY: Duration = Duration::from_millis(100);

impl SlicedPool {
    pub(super) fn note(&mut self, change: Change, cluster: &Cluster) {
        self.router.note(cluster.now, &self.offers, change);
    }

    /// The latest time for a request's answer.
    fn due(&self, of: &Request) -> Option<Timestamp> {
        let slo = self.functions.get(&of.function).and_then(|function| function.goal.slo);
        [slo.map(|slo| of.arrived.saturating_add(slo)), of.deadline].into_iter().flatten().min()
    }

    /// The router learns of a request in its function's queue.
    pub(super) fn waits(&mut self, request: RequestId, cluster: &Cluster) {
        let of = &cluster.requests[&request];
        let (function, due) = (of.function, self.due(of));
        self.note(Change::Waits { request, function, due }, cluster);
    }

    /// A request has come.
    pub(super) fn came(&mut self, request: RequestId, cluster: &mut Cluster) {
        let function = cluster.requests[&request].function;
        self.waits(request, cluster);
        self.reject_late(cluster);
        if !cluster.is_open(request) {
            return self.tell_short(function, cluster);
        }
        // Where other requests wait, there is no place for this one.
        if self.router.waiting(function) == 1 {
            self.serve(function, cluster);
        }
        self.look_short(function, cluster);
    }

    /// A request has ended before its dispatch. One that was promised to an instance frees it with the instance's arrival.
    pub(super) fn left(&mut self, request: RequestId, of: &Request, cluster: &Cluster) {
        let all = cluster.functions.get(&of.function).map(|function| &function.instances);
        let promised = |id: &&InstanceId| self.one(**id).is_some_and(|one| one.pending == Some(request));
        if let Some(one) = all.into_iter().flatten().find(promised).and_then(|id| self.one_mut(*id)) {
            one.pending = None;
            return;
        }
        let (function, due) = (of.function, self.due(of));
        self.note(Change::Left { request, function, due, to: None }, cluster);
    }

    /// Rejects the requests that the router has given up.
    pub(super) fn reject_late(&mut self, cluster: &mut Cluster) {
        while let Some(request) = self.router.late(cluster.now, &self.offers) {
            cluster.order(PlatformAction::Reject { request, reason: Rejection::WouldBeLate });
        }
    }

    /// The instance takes requests from now on, or in another way than before.
    pub(super) fn offer(&mut self, id: InstanceId, cluster: &mut Cluster) {
        self.withdraw(id, cluster);
        let Some((function, service)) = self.one(id).map(|one| (one.function, service(one))) else { return };
        self.offers.offer(id, Offer { function, service });
        self.offers.runs(id, cluster.runs(id));
        self.note(Change::Offered { instance: id }, cluster);
        self.serve(function, cluster);
    }

    /// The instance takes no requests any more; false if it did not.
    pub(super) fn withdraw(&mut self, id: InstanceId, cluster: &Cluster) -> bool {
        let Some(offer) = self.offers.withdraw(id) else { return false };
        self.note(Change::Withdrawn { instance: id, offer }, cluster);
        true
    }

    /// The instance was loaded or evicted.
    pub(super) fn loads_in(&mut self, id: InstanceId, load: Duration, cluster: &Cluster) {
        if self.offers.get(id).is_some() {
            self.offers.set_load(id, load);
            self.note(Change::LoadChanged { instance: id }, cluster);
        }
    }

    /// Gives waiting requests of the function to its instances: exclusive instances first.
    pub(super) fn serve(&mut self, function: FunctionId, cluster: &mut Cluster) {
        while let Some(instance) = self.offers.free(function)
            && let Some(request) = self.router.next(cluster.now, &self.offers, instance)
        {
            self.give(request, instance, cluster);
        }
        for slice in self.offers.slices_of(function) {
            if self.router.waiting(function) > 0 {
                self.serve_slice(slice, cluster);
            }
        }
    }

    /// Gives an idle slice its next request, if there is one for it.
    pub(super) fn serve_slice(&mut self, slice: AssignedSlice, cluster: &mut Cluster) {
        let Some(node) = self.node_of(slice) else { return };
        if !node.slices.on(slice).iter().any(|id| self.is_busy(*id, cluster))
            && let Some((instance, request)) = self.router.next_on(cluster.now, &self.offers, slice)
        {
            self.give(request, instance, cluster);
        }
    }

    /// Whether the instance works for a request, or comes for one.
    pub(super) fn is_busy(&self, id: InstanceId, cluster: &Cluster) -> bool {
        self.one(id).is_some_and(Instance::comes) || cluster.runs(id) > 0
    }

    /// Gives a waiting request to an instance, which comes for it first if it is not there.
    fn give(&mut self, request: RequestId, id: InstanceId, cluster: &mut Cluster) {
        let (of, node) = (&cluster.requests[&request], self.at[&id]);
        let (function, due) = (of.function, self.due(of));
        let waits = of.runs_on().is_none();
        let Some(one) = self.one_mut(id) else { return };
        let fits = waits && one.function == function;
        assert!(fits, "the router gave {request} to {id}, but it does not wait there");
        if one.memory == Memory::In {
            self.dispatch(request, id, cluster);
        } else {
            one.pending = Some(request);
            self.decide(node, cluster, |node, _| node.needed(id));
        }
        self.note(Change::Left { request, function, due, to: Some(id) }, cluster);
        if self.node_for(function, cluster) != Some(node) && !cluster.is_removed(function) {
            self.requested(node, function, cluster);
        }
    }

    pub(super) fn dispatch(&mut self, request: RequestId, instance: InstanceId, cluster: &mut Cluster) {
        let stands = cluster.order(PlatformAction::Dispatch { request, instance });
        assert!(stands, "{request} is given to {instance}, which is stopped");
        self.offers.runs(instance, cluster.runs(instance));
    }

    /// The instance has one request less, or came for none.
    pub(super) fn freed(&mut self, id: InstanceId, cluster: &mut Cluster) {
        let Some(one) = self.one(id) else { return };
        let function = one.function;
        let slice = service(one).slice();
        self.look_drained(id, cluster);
        self.offers.runs(id, cluster.runs(id));
        match slice {
            Some(slice) => self.serve_slice(slice, cluster),
            None => self.serve(function, cluster),
        }
    }

    /// Looks whether the function's instances can serve its waiting requests in time.
    pub(super) fn look_short(&mut self, function: FunctionId, cluster: &mut Cluster) {
        if self.router.is_short(cluster.now, &self.offers, function) {
            self.tell_short(function, cluster);
        }
    }

    fn tell_short(&mut self, function: FunctionId, cluster: &mut Cluster) {
        if !self.again.has(function) {
            self.again.set(function, cluster.now.saturating_add(SHORT_EVERY));
            self.short(function, cluster);
        }
    }

    /// Looks again at the functions that were short a while ago.
    pub(super) fn look_again(&mut self, cluster: &mut Cluster) {
        while let Some(function) = self.again.pop(cluster.now) {
            self.look_short(function, cluster);
        }
    }

    /// Checks the router's queues and offers against the ledger.
    pub(super) fn check_router(&self, cluster: &Cluster) {
        self.router.invariants(&self.offers);
        for function in self.functions.keys() {
            let all = self.nodes.values().flat_map(|node| node.instances.values());
            let promised = all.filter(|one| one.function == *function && one.pending.is_some());
            let waiting = self.router.waiting(*function) + promised.count();
            assert_eq!(waiting, cluster.queue(*function).len(), "requests of {function}");
            let idle = self.offers.free(*function).is_some();
            assert!(self.router.waiting(*function) == 0 || !idle, "{function} waits beside room");
        }
        for (id, offer, free) in self.offers.all() {
            let takes =
                self.one(id).is_some_and(|one| one.gives_up.is_none() && one.function == offer.function);
            assert!(takes, "{id} takes requests");
            if let Service::Exclusive { capacity, .. } = offer.service {
                assert_eq!(free, cluster.runs(id) < capacity as usize, "room of {id}");
            }
        }
    }
}

/// An instance's times and capacity.
fn service(one: &Instance) -> Service {
    match one.home {
        Home::Exclusive { ref parts, latency, interval } => {
            let slices = u32::try_from(parts.len()).unwrap_or(u32::MAX).max(1);
            let capacity = latency.as_nanos().div_ceil(interval.as_nanos().max(1)).max(1);
            let capacity = u32::try_from(capacity).unwrap_or(u32::MAX).min(slices);
            Service::Exclusive { latency, interval, capacity }
        }
        Home::Shared { slice, latency, load, .. } => {
            let load = if one.memory == Memory::In { Duration::ZERO } else { load };
            Service::Shared { slice, latency, load }
        }
    }
}
