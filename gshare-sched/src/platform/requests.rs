//! Requests from their arrival to their end.

use super::functions::{Function, FunctionState};
use super::gpu_time::GpuTime;
use super::naming::Named;
use super::{Duration, FunctionId, Platform, PlatformAction, PoolEvent, Rejection, RequestId, Timestamp};
use gshare_core::{InstanceId, TenantId};

/// The present place of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In its tenant's line.
    Line,
    /// With its function, which has no profile yet.
    Function,
    /// In its function's pool, not dispatched.
    Pool,
    /// Dispatched to this instance.
    Runs(InstanceId),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) function: FunctionId,
    tenant: TenantId,
    arrived: Timestamp,
    deadline: Option<Timestamp>,
    place: Place,
    /// Whether the pool knows of the held request.
    told: bool,
    /// Whether it was dispatched at least once.
    dispatched: bool,
    /// GPU time expected at admission; then the GPU time used so far on earlier instances.
    expected: Duration,
    used: Duration,
    /// The instance's mark at the request's dispatch.
    came: u128,
}

impl Request {
    /// Whether the platform itself holds the request.
    pub(super) const fn is_held(&self) -> bool {
        matches!(self.place, Place::Line | Place::Function)
    }

    pub(super) const fn runs_on(&self) -> Option<InstanceId> {
        match self.place {
            Place::Runs(instance) => Some(instance),
            _ => None,
        }
    }
}

impl Platform {
    pub(super) fn arrived(
        &mut self,
        request: RequestId,
        function: FunctionId,
        deadline: Option<Timestamp>,
        actions: &mut Vec<PlatformAction>,
    ) {
        let now = self.now;
        let Some(of) = self.functions.get_mut(&function) else { return };
        let tenant = of.spec.tenant;
        of.stats.arrived += 1;
        if !self.tenants.may_wait(tenant) {
            of.stats.rejected += 1;
            actions.push(PlatformAction::Reject { request, reason: Rejection::TenantQueueFull });
            return;
        }
        let of = Request {
            function,
            tenant,
            arrived: now,
            deadline,
            place: Place::Line,
            told: false,
            dispatched: false,
            expected: Duration::ZERO,
            used: Duration::ZERO,
            came: 0,
        };
        self.requests.insert(request, of);
        let until = now.saturating_add(self.config.max_held);
        self.held_until.set(request, deadline.map_or(until, |deadline| deadline.min(until)));
        let latest = self.functions.get(&function).map_or(Timestamp::MAX, |of| of.latest_start(now));
        self.tenants.arrived(tenant, now, request, latest);
        self.admit(tenant, actions);
        self.held(request, function, actions);
    }

    /// Tells a function's pool of a request held back by its tenant's limit, if admitted requests of the function wait there:
    /// more instances would then serve more of the tenant's requests.
    fn held(&mut self, request: RequestId, function: FunctionId, actions: &mut Vec<PlatformAction>) {
        let held = self.requests.get_mut(&request).filter(|of| of.place == Place::Line);
        let (Some(held), Some(of)) = (held, self.functions.get(&function)) else { return };
        if of.state == FunctionState::Deployed && self.pools[of.pool].waiting(function) > 0 {
            held.told = true;
            self.inform(of.pool, PoolEvent::Held { function }, actions);
        }
    }

    /// Admits as many of the tenant's requests as its limits allow.
    pub(super) fn admit(&mut self, tenant: TenantId, actions: &mut Vec<PlatformAction>) {
        let devices = u32::try_from(self.devices.len()).unwrap_or(u32::MAX);
        loop {
            let (requests, functions) = (&mut self.requests, &self.functions);
            let expects = |request| {
                let Some(of) = requests.get_mut(&request) else { return Duration::ZERO };
                of.expected = functions.get(&of.function).map_or(Duration::ZERO, Function::expected_use);
                of.expected
            };
            let Some(request) = self.tenants.admit(self.now, tenant, devices, expects) else { break };
            self.give(request, actions);
        }
    }

    /// Gives a request to its function's pool, or keeps it while the function has none.
    pub(super) fn give(&mut self, request: RequestId, actions: &mut Vec<PlatformAction>) {
        let Some(of) = self.requests.get_mut(&request) else { return };
        let Some(function) = self.functions.get_mut(&of.function) else { return };
        if function.state == FunctionState::Profiling {
            of.place = Place::Function;
            function.held.insert((of.arrived, request));
            return;
        }
        of.place = Place::Pool;
        self.held_until.clear(request);
        let Request { function: name, arrived, deadline, told: held, .. } = *of;
        let pool = function.pool;
        self.inform(pool, PoolEvent::Arrived { request, function: name, arrived, held, deadline }, actions);
    }

    /// A pool ordered a dispatch.
    pub(super) fn dispatched(&mut self, request: RequestId, instance: InstanceId) {
        self.leave(request);
        if let Some(of) = self.requests.get_mut(&request) {
            of.place = Place::Runs(instance);
            if let Some(on) = self.instances.get_mut(instance) {
                of.came = on.time.count(self.now, on.requests.len());
                on.requests.insert(request);
            }
            if !core::mem::replace(&mut of.dispatched, true) {
                self.tenants.dispatched(of.tenant);
            }
        }
    }

    pub(super) fn done(&mut self, request: RequestId, took: Duration, actions: &mut Vec<PlatformAction>) {
        let runs_on = self.requests.get(&request).and_then(Request::runs_on);
        let Some(pool) = runs_on.and_then(|instance| Some(self.instances.get(instance)?.pool)) else {
            return;
        };
        if let Some(of) = self.requests.get(&request).and_then(|of| self.functions.get_mut(&of.function)) {
            of.took(took);
        }
        self.ended(request, true);
        self.inform(pool, PoolEvent::Done { request, took }, actions);
    }

    /// Takes the request off its instance and adds its GPU time there.
    fn leave(&mut self, request: RequestId) {
        let runs_on = self.requests.get(&request).and_then(Request::runs_on);
        let Some(on) = runs_on.and_then(|instance| self.instances.get_mut(instance)) else { return };
        let mark = on.time.count(self.now, on.requests.len());
        on.requests.remove(&request);
        if let Some(of) = self.requests.get_mut(&request) {
            of.used = of.used.saturating_add(GpuTime::between(of.came, mark));
        }
    }

    /// The request was answered, or rejected.
    pub(super) fn ended(&mut self, request: RequestId, answered: bool) {
        self.leave(request);
        self.held_until.clear(request);
        let Some(of) = self.requests.remove(&request) else { return };
        self.to_admit.insert(of.tenant);
        if of.place == Place::Line {
            self.tenants.left_line(of.tenant, of.arrived, request);
        } else {
            self.tenants.ended(of.tenant, of.expected, of.used, of.dispatched);
        }
        let Some(function) = self.functions.get_mut(&of.function) else { return };
        function.held.remove(&(of.arrived, request));
        if answered {
            function.used(of.used);
            let took = self.now.saturating_since(of.arrived);
            function.stats.answered += 1;
            function.stats.within_slo += u64::from(function.spec.slo.is_none_or(|slo| took <= slo));
        } else {
            function.stats.rejected += 1;
        }
    }

    pub(super) fn reject_held(
        &mut self,
        request: RequestId,
        reason: Rejection,
        actions: &mut Vec<PlatformAction>,
    ) {
        self.ended(request, false);
        actions.push(PlatformAction::Reject { request, reason });
    }

    pub(super) fn held_too_long(&mut self, request: RequestId, actions: &mut Vec<PlatformAction>) {
        let Some(of) = self.requests.get(&request).copied() else { return };
        let passed = of.deadline.is_some_and(|deadline| deadline <= self.now);
        let reason = if passed { Rejection::DeadlineMissed } else { Rejection::WaitedTooLong };
        self.reject_held(request, reason, actions);
    }

    pub(super) fn cancel(&mut self, request: RequestId, actions: &mut Vec<PlatformAction>) {
        let Some(of) = self.requests.get(&request).copied() else { return };
        match of.place {
            // The instance works for the request, and its answer ends it.
            Place::Runs(_) => return,
            Place::Line | Place::Function => {}
            Place::Pool => {
                if let Some(pool) = self.functions.get(&of.function).map(|function| function.pool) {
                    self.inform(pool, PoolEvent::Cancelled { request }, actions);
                }
            }
        }
        self.reject_held(request, Rejection::Cancelled, actions);
    }

    /// Returns the requests of a gone instance to its pool.
    pub(super) fn lose_requests_of(&mut self, instance: InstanceId, lost: &mut Named) {
        let mark = lost.time.count(self.now, lost.requests.len());
        for request in &lost.requests {
            if let Some(of) = self.requests.get_mut(request)
                && of.place == Place::Runs(instance)
            {
                of.place = Place::Pool;
                of.used = of.used.saturating_add(GpuTime::between(of.came, mark));
            }
        }
    }

    pub(super) fn check_requests(&self) {
        for (request, of) in &self.requests {
            let function = &self.functions[&of.function];
            let held = function.held.contains(&(of.arrived, *request));
            assert_eq!(held, of.place == Place::Function, "{request} waits for a profile or not");
            assert_eq!(self.held_until.has(*request), of.is_held(), "{request} has a deadline here or not");
            if let Place::Runs(instance) = of.place {
                let on = self.instances.get(instance).map(|on| on.function);
                assert_eq!(on, Some(of.function), "{request} runs on an instance of another function");
            }
        }
    }
}
