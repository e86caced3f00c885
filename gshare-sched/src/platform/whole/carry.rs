//! Orders of the scheduler, turned into orders for the host; and reports of hosts, in the scheduler's words.

use super::{
    Cluster, ComponentSet, FunctionId, GpuId, GpuShare, Instance, InstanceId, Life, ModelId, Part,
    PlatformAction, QuotaRange, Rejection, RequestAction, RequestEvent, RequestId, SmShare, StopCause,
    WholePool,
};
use crate::request::{RejectReason, Tier};
use gshare_core::Duration;
use std::collections::BTreeSet;

impl WholePool {
    /// Passes the queued events to the scheduler one by one, and carries out its answers.
    pub(super) fn run(&mut self, cluster: &mut Cluster) {
        while let Some(event) = self.tasks.pop_front() {
            let mut orders = Vec::new();
            let told = self.scheduler.handle(cluster.now, event, &mut orders);
            // A cancelled request with a GPU is answered at its dispatch, and a rejection may have come just before.
            let given_up = matches!(event, RequestEvent::Cancelled { .. });
            debug_assert!(given_up || told.is_ok(), "scheduler: {told:?}");
            for order in orders {
                self.obey(order, cluster);
            }
        }
    }

    /// The whole device, with the function's memory.
    pub(super) fn part(&self, function: FunctionId, gpu: GpuId) -> Part {
        let memory = self.functions.get(&function).map(|of| of.memory);
        let share = GpuShare::new(QuotaRange::WHOLE, SmShare::WHOLE, SmShare::WHOLE, memory);
        let share = share.unwrap_or(GpuShare::WHOLE);
        Part { gpu, share, slice: None, stage: 0, components: ComponentSet::EMPTY }
    }

    pub(super) fn obey(&mut self, order: RequestAction, cluster: &mut Cluster) {
        match order {
            RequestAction::Load { gpu, model, from, keep_on_host } => {
                self.load((gpu, model), from, keep_on_host, cluster);
            }
            RequestAction::Evict { gpu, model } => {
                let Some(instance) = self.resident.remove(&(gpu, model)) else {
                    // The instance is gone already: this is the answer to its `Dropped`.
                    return self.tasks.push_back(RequestEvent::Evicted { gpu, model });
                };
                let Some(function) = self.instances.get(&instance).map(|one| one.function) else { return };
                let of = cluster.functions.get(&function).filter(|_| !cluster.is_removed(function));
                let cause = match of {
                    None => StopCause::Removed,
                    Some(of) if of.staying > of.spec.max_instances => StopCause::Drained,
                    Some(_) => StopCause::Evicted,
                };
                cluster.order(PlatformAction::Drain { instance });
                cluster.order(PlatformAction::Stop { instance, cause });
                self.pin(function, cluster);
            }
            RequestAction::DropHost { node, model } => {
                if let Some(&function) = self.models.get(&model) {
                    cluster.order(PlatformAction::Forget { node, function });
                }
            }
            RequestAction::Dispatch { gpu, request, model, .. } => {
                self.dispatch(request, (gpu, model), cluster);
            }
            RequestAction::Reject { request, reason } => {
                let Some(found) = cluster.requests.get(&request) else {
                    return self.not_warmed(request, reason, cluster);
                };
                let (function, reason) = (found.function, rejection(reason));
                cluster.order(PlatformAction::Reject { request, reason });
                if reason == Rejection::NeverFits {
                    cluster.unmet(function);
                }
            }
        }
    }

    fn load(
        &mut self,
        (gpu, model): (GpuId, ModelId),
        from: Tier,
        keep_on_host: bool,
        cluster: &mut Cluster,
    ) {
        let known = self.models.get(&model).filter(|function| !cluster.is_removed(**function));
        let Some((function, of)) = known.and_then(|id| Some((*id, self.functions.get_mut(id)?))) else {
            // No request waits for the instance any more.
            return self.tasks.push_back(RequestEvent::LoadFailed { gpu, model });
        };
        let spec = &cluster.functions[&function].spec;
        let takes = if from == Tier::Host { spec.load_host } else { spec.load_disk };
        let instance = cluster.instances.name();
        of.instances.insert(instance);
        self.instances
            .insert(instance, Instance { function, model, gpu, loaded: false, given: BTreeSet::new() });
        self.resident.insert((gpu, model), instance);
        let parts = vec![self.part(function, gpu)];
        cluster.order(PlatformAction::Start { instance, function, parts, from, takes, parked: false });
        if let Some(device) = self.devices.get(&gpu).filter(|_| keep_on_host) {
            cluster.order(PlatformAction::Fetch { node: device.node, function });
        }
        self.pin(function, cluster);
    }

    fn dispatch(&mut self, request: RequestId, (gpu, model): (GpuId, ModelId), cluster: &mut Cluster) {
        let missed =
            |task: &RequestEvent| matches!(task, RequestEvent::NotResident { gpu: on, .. } if *on == gpu);
        if self.tasks.iter().any(missed) {
            // The first of its batch found no copy: all of them wait again.
            return;
        }
        if !cluster.is_open(request) {
            self.warming.remove(&request);
            return self.tasks.push_back(self.without_caller((gpu, model), request));
        }
        let found = self.resident.get(&(gpu, model)).copied();
        let Some((instance, one)) = found.and_then(|id| Some((id, self.instances.get_mut(&id)?))) else {
            return self.tasks.push_back(RequestEvent::NotResident { gpu, request });
        };
        one.given.insert(request);
        cluster.order(PlatformAction::Dispatch { request, instance });
    }

    /// No caller waits for the request, so the GPU is free at once; the scheduler learns the time from the profile.
    pub(super) fn without_caller(&self, (gpu, model): (GpuId, ModelId), request: RequestId) -> RequestEvent {
        let of = self.models.get(&model).and_then(|function| self.functions.get(function));
        RequestEvent::Completed { gpu, request, took: of.map_or(Duration::ZERO, |of| of.infer) }
    }

    /// Forgets a gone instance, and returns the requests that the scheduler had dispatched to it. The caller tells the scheduler.
    pub(super) fn forget(&mut self, id: InstanceId) -> BTreeSet<RequestId> {
        let Some(one) = self.instances.remove(&id) else { return BTreeSet::new() };
        if self.resident.get(&(one.gpu, one.model)) == Some(&id) {
            self.resident.remove(&(one.gpu, one.model));
        }
        if let Some(of) = self.functions.get_mut(&one.function) {
            of.instances.remove(&id);
        }
        one.given
    }

    /// Gives up the instances without requests of removed functions.
    pub(super) fn end_removed(&mut self, cluster: &mut Cluster) {
        for function in self.ending.clone() {
            let Some(of) = self.functions.get(&function) else { continue };
            for id in &of.instances {
                let one = &self.instances[id];
                if cluster.instances.get(*id).is_some_and(|of| of.life == Life::Ready) && one.given.is_empty()
                {
                    self.tasks.push_back(RequestEvent::Dropped { gpu: one.gpu, model: one.model });
                }
            }
            self.run(cluster);
            // The scheduler has no more to say about the function's model.
            if self.functions.get(&function).is_some_and(|of| of.instances.is_empty())
                && let Some(of) = self.functions.remove(&function)
            {
                self.ending.remove(&function);
                self.models.remove(&of.model);
                self.retired.entry(of.memory).or_default().push(of.model);
            }
        }
    }
}

pub(super) const fn rejection(reason: RejectReason) -> Rejection {
    match reason {
        RejectReason::QueueFull => Rejection::QueueFull,
        // The scheduler gives a request up as soon as it cannot be complete in time; at its deadline it was withdrawn.
        RejectReason::DeadlineMissed => Rejection::WouldBeLate,
        RejectReason::LoadsFailed => Rejection::AttemptsExhausted,
        RejectReason::Cancelled => Rejection::Cancelled,
        _ => Rejection::NeverFits,
    }
}
