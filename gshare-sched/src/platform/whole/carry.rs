//! Orders of the scheduler, turned into orders for the host; and reports of hosts, in the scheduler's words.

use super::{
    ComponentSet, FunctionId, GpuId, GpuShare, Instance, InstanceId, InstanceReport, Life, ModelId, Part,
    PlatformAction, PoolAction, QuotaRange, Rejection, RequestAction, RequestEvent, RequestId, SmShare,
    StopCause, WholePool,
};
use crate::request::{RejectReason, Tier};
use gshare_core::Duration;
use std::collections::BTreeSet;

impl WholePool {
    /// Passes the queued events to the scheduler one by one, and carries out its answers.
    pub(super) fn run(&mut self, actions: &mut Vec<PoolAction>) {
        while let Some(event) = self.tasks.pop_front() {
            let mut orders = Vec::new();
            let told = self.scheduler.handle(self.now, event, &mut orders);
            // A cancelled request with a GPU is answered at its dispatch, and a rejection may have come just before.
            let given_up = matches!(event, RequestEvent::Cancelled { .. });
            debug_assert!(given_up || told.is_ok(), "scheduler: {told:?}");
            for order in orders {
                self.obey(order, actions);
            }
        }
    }

    /// The whole device, with the function's memory.
    pub(super) fn part(&self, function: FunctionId, gpu: GpuId) -> Part {
        let memory = self.functions.get(&function).map(|of| of.spec.memory);
        let share = GpuShare::new(QuotaRange::WHOLE, SmShare::WHOLE, SmShare::WHOLE, memory);
        let share = share.unwrap_or(GpuShare::WHOLE);
        Part { gpu, share, slice: None, stage: 0, components: ComponentSet::EMPTY }
    }

    pub(super) fn obey(&mut self, order: RequestAction, actions: &mut Vec<PoolAction>) {
        match order {
            RequestAction::Load { gpu, model, from, keep_on_host } => {
                self.load((gpu, model), from, keep_on_host, actions);
            }
            RequestAction::Evict { gpu, model } => {
                let found = self.resident.remove(&(gpu, model));
                let Some((instance, one)) = found.and_then(|id| Some((id, self.instances.get_mut(&id)?)))
                else {
                    // The instance is gone already: this is the answer to its `Dropped`.
                    return self.tasks.push_back(RequestEvent::Evicted { gpu, model });
                };
                one.life = Life::Stopped;
                let function = one.function;
                let lives = |id: &&InstanceId| self.instances[*id].life != Life::Stopped;
                let cause = match self.functions.get(&function) {
                    Some(of) if of.removed => StopCause::Removed,
                    Some(of)
                        if of.instances.iter().filter(lives).count() >= of.spec.max_instances as usize =>
                    {
                        StopCause::Drained
                    }
                    _ => StopCause::Evicted,
                };
                actions.push(PoolAction::Order(PlatformAction::Drain { instance }));
                actions.push(PoolAction::Order(PlatformAction::Stop { instance, cause }));
                self.look_at(function);
            }
            RequestAction::DropHost { node, model } => {
                if let Some(&function) = self.models.get(&model) {
                    actions.push(PoolAction::Order(PlatformAction::Forget { node, function }));
                }
            }
            RequestAction::Dispatch { gpu, request, model, .. } => {
                self.dispatch(request, (gpu, model), actions);
            }
            RequestAction::Reject { request: ticket, reason } => {
                let Some(request) = self.tickets.holder(ticket) else {
                    return self.not_warmed(ticket, reason, actions);
                };
                let held = self.tickets.remove(request);
                let reason = rejection(reason);
                actions.push(PoolAction::Order(PlatformAction::Reject { request, reason }));
                if let Some(held) = held.filter(|_| reason == Rejection::NeverFits) {
                    self.unmet(held.function, actions);
                }
            }
        }
    }

    fn load(
        &mut self,
        (gpu, model): (GpuId, ModelId),
        from: Tier,
        keep_on_host: bool,
        actions: &mut Vec<PoolAction>,
    ) {
        let known = self.models.get(&model).and_then(|id| Some((*id, self.functions.get_mut(id)?)));
        let Some((function, of)) = known.filter(|(_, of)| !of.removed) else {
            // No request waits for the instance any more.
            return self.tasks.push_back(RequestEvent::LoadFailed { gpu, model });
        };
        let takes = if from == Tier::Host { of.spec.load_host } else { of.spec.load_disk };
        let instance = self.names.give();
        of.instances.insert(instance);
        let (life, since, requests) = (Life::Starting, self.now, BTreeSet::new());
        let new = Instance { function, model, gpu, life, since, requests, withdrawn: Vec::new() };
        self.instances.insert(instance, new);
        self.resident.insert((gpu, model), instance);
        self.look_at(function);
        let parts = vec![self.part(function, gpu)];
        let start = PlatformAction::Start { instance, function, parts, from, takes, parked: false };
        actions.push(PoolAction::Order(start));
        if let Some(device) = self.devices.get(&gpu).filter(|_| keep_on_host) {
            actions.push(PoolAction::Order(PlatformAction::Fetch { node: device.node, function }));
        }
    }

    fn dispatch(&mut self, ticket: RequestId, (gpu, model): (GpuId, ModelId), actions: &mut Vec<PoolAction>) {
        let missed =
            |task: &RequestEvent| matches!(task, RequestEvent::NotResident { gpu: on, .. } if *on == gpu);
        if self.tasks.iter().any(missed) {
            // The first of its batch found no copy: all of them wait again.
            return;
        }
        let Some(request) = self.tickets.holder(ticket) else {
            self.warming.remove(&ticket);
            return self.tasks.push_back(self.without_caller((gpu, model), ticket));
        };
        let found = self.resident.get(&(gpu, model)).copied();
        let Some((instance, one)) = found.and_then(|id| Some((id, self.instances.get_mut(&id)?))) else {
            return self.tasks.push_back(RequestEvent::NotResident { gpu, request: ticket });
        };
        one.requests.insert(request);
        self.tickets.dispatch(request, instance);
        actions.push(PoolAction::Order(PlatformAction::Dispatch { request, instance }));
    }

    /// No caller waits for the request, so the GPU is free at once; the scheduler learns the time from the profile.
    fn without_caller(&self, (gpu, model): (GpuId, ModelId), request: RequestId) -> RequestEvent {
        let of = self.models.get(&model).and_then(|function| self.functions.get(function));
        RequestEvent::Completed { gpu, request, took: of.map_or(Duration::ZERO, |of| of.infer) }
    }

    pub(super) fn done(&mut self, request: RequestId, took: Duration) {
        let Some(held) = self.tickets.remove(request) else { return };
        if let Some(one) = held.on.and_then(|id| self.instances.get_mut(&id)) {
            one.requests.remove(&request);
            self.tasks.push_back(RequestEvent::Completed { gpu: one.gpu, request: held.ticket, took });
        }
    }

    /// Takes a report. A report that fits no order of the instance, or a gone instance, is old and changes nothing.
    pub(super) fn report(&mut self, id: InstanceId, report: InstanceReport) {
        let Some(one) = self.instances.get_mut(&id) else { return };
        let (gpu, model, life) = (one.gpu, one.model, one.life);
        match (report, life) {
            (InstanceReport::Ready, Life::Starting) => {
                one.life = Life::Ready;
                let took = self.now.saturating_since(one.since);
                self.tasks.push_back(RequestEvent::Loaded { gpu, model, took });
            }
            (InstanceReport::Refused | InstanceReport::Gone | InstanceReport::Completed, _) => {
                let first = one.requests.first().copied();
                let ticket = first.and_then(|request| Some(self.tickets.get(request)?.ticket));
                for request in self.forget(id) {
                    self.tasks.push_back(self.without_caller((gpu, model), request));
                }
                self.tasks.push_back(match (life, ticket) {
                    (Life::Starting, _) => RequestEvent::LoadFailed { gpu, model },
                    (Life::Stopped, _) => RequestEvent::Evicted { gpu, model },
                    (_, Some(request)) => RequestEvent::NotResident { gpu, request },
                    (_, None) => RequestEvent::Dropped { gpu, model },
                });
            }
            _ => {}
        }
    }

    /// Forgets a gone instance, and returns the tickets of its withdrawn requests. The caller tells the scheduler.
    pub(super) fn forget(&mut self, id: InstanceId) -> Vec<RequestId> {
        let Some(one) = self.instances.remove(&id) else { return Vec::new() };
        if self.resident.get(&(one.gpu, one.model)) == Some(&id) {
            self.resident.remove(&(one.gpu, one.model));
        }
        if let Some(of) = self.functions.get_mut(&one.function) {
            of.instances.remove(&id);
        }
        self.look_at(one.function);
        for request in one.requests {
            self.tickets.wait(request);
        }
        one.withdrawn
    }

    /// Gives up the instances without requests of removed functions.
    pub(super) fn end_removed(&mut self, actions: &mut Vec<PoolAction>) {
        for function in self.ending.clone() {
            let Some(of) = self.functions.get(&function) else { continue };
            for one in of.instances.iter().map(|id| &self.instances[id]) {
                if one.life == Life::Ready && one.requests.is_empty() {
                    self.tasks.push_back(RequestEvent::Dropped { gpu: one.gpu, model: one.model });
                }
            }
            self.run(actions);
            // The scheduler has no more to say about the function's model.
            if self.functions.get(&function).is_some_and(|of| of.instances.is_empty())
                && let Some(of) = self.functions.remove(&function)
            {
                self.ending.remove(&function);
                self.models.remove(&of.model);
                self.retired.entry(of.spec.memory).or_default().push(of.model);
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
