//! Requests from their arrival to their end.

use super::functions::{Function, FunctionState};
use super::gpu_time::GpuTime;
use super::instances::Instance;
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
    /// The end of its wait: its deadline, or earlier by the longest wait.
    until: Timestamp,
    place: Place,
    /// Whether the pool knows of the held request.
    told: bool,
    /// Number of its dispatches.
    attempts: u8,
    /// GPU time expected at admission; then the GPU time used so far on earlier instances.
    expected: Duration,
    used: Duration,
    /// The instance's mark at the request's dispatch.
    came: u128,
}

impl Request {
    pub(super) fn waits_for_profile(&self) -> bool {
        self.place == Place::Function
    }

    /// The reason for its rejection at the end of its wait.
    fn too_late(&self) -> Rejection {
        let missed = self.deadline.is_some_and(|deadline| deadline <= self.until);
        if missed { Rejection::DeadlineMissed } else { Rejection::WaitedTooLong }
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
        let refused = if deadline.is_some_and(|deadline| deadline <= now) {
            Some(Rejection::DeadlineMissed)
        } else if of.fits == Some(false) {
            Some(Rejection::NeverFits)
        } else if !self.tenants.may_wait(tenant) {
            Some(Rejection::TenantQueueFull)
        } else {
            (of.waiting.len() >= self.config.max_waiting as usize).then_some(Rejection::QueueFull)
        };
        if let Some(reason) = refused {
            of.stats.rejected += 1;
            let (deployed, pool) = (of.state == FunctionState::Deployed, of.pool);
            actions.push(PlatformAction::Reject { request, reason });
            if deployed && reason == Rejection::QueueFull {
                self.inform(pool, PoolEvent::Held { function }, actions);
            }
            return;
        }
        let longest = now.saturating_add(self.config.max_wait);
        let of = Request {
            function,
            tenant,
            arrived: now,
            deadline,
            until: deadline.map_or(longest, |deadline| deadline.min(longest)),
            place: Place::Line,
            told: false,
            attempts: 0,
            expected: Duration::ZERO,
            used: Duration::ZERO,
            came: 0,
        };
        self.requests.insert(request, of);
        self.waits(request);
        let latest = self.functions.get(&function).map_or(Timestamp::MAX, |of| of.latest_start(now));
        self.tenants.arrived(tenant, now, request, latest);
        self.admit(tenant, actions);
        self.held(request, function, actions);
    }

    /// The request waits from now on.
    fn waits(&mut self, request: RequestId) {
        let Some(of) = self.requests.get(&request) else { return };
        self.wait_until.set(request, of.until);
        if let Some(function) = self.functions.get_mut(&of.function) {
            function.waiting.insert((of.arrived, request));
        }
    }

    /// The request waits no longer.
    fn waited(&mut self, request: RequestId) {
        self.wait_until.clear(request);
        let Some(of) = self.requests.get(&request) else { return };
        if let Some(function) = self.functions.get_mut(&of.function) {
            function.waiting.remove(&(of.arrived, request));
        }
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
            return;
        }
        of.place = Place::Pool;
        let Request { function: name, arrived, deadline, told: held, .. } = *of;
        let pool = function.pool;
        self.inform(pool, PoolEvent::Arrived { request, function: name, arrived, held, deadline }, actions);
    }

    /// A pool ordered a dispatch.
    pub(super) fn dispatched(&mut self, request: RequestId, instance: InstanceId) {
        self.waited(request);
        if let Some(of) = self.requests.get_mut(&request) {
            of.place = Place::Runs(instance);
            of.attempts = of.attempts.saturating_add(1);
            if let Some(on) = self.instances.get_mut(instance) {
                of.came = on.time.count(self.now, on.requests.len());
                on.requests.insert(request);
            }
            if of.attempts == 1 {
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
        self.waited(request);
        let Some(of) = self.requests.remove(&request) else { return };
        self.to_admit.insert(of.tenant);
        if of.place == Place::Line {
            self.tenants.left_line(of.tenant, of.arrived, request);
        } else {
            self.tenants.ended(of.tenant, of.expected, of.used, of.attempts > 0);
        }
        let Some(function) = self.functions.get_mut(&of.function) else { return };
        if answered {
            function.used(of.used);
            let took = self.now.saturating_since(of.arrived);
            function.stats.answered += 1;
            function.stats.within_slo += u64::from(function.spec.slo.is_none_or(|slo| took <= slo));
        } else {
            function.stats.rejected += 1;
        }
    }

    /// Ends a request that does not run, and takes it from its pool.
    pub(super) fn reject(
        &mut self,
        request: RequestId,
        reason: Rejection,
        actions: &mut Vec<PlatformAction>,
    ) {
        let Some(of) = self.requests.get(&request) else { return };
        if of.place == Place::Pool
            && let Some(pool) = self.functions.get(&of.function).map(|function| function.pool)
        {
            self.pools[pool].withdraw(request);
            self.untold.insert(pool);
        }
        self.ended(request, false);
        actions.push(PlatformAction::Reject { request, reason });
    }

    /// Ends the requests that have waited as long as they may. The event at hand may still be refused, so the rejections are owed.
    pub(super) fn expire(&mut self) {
        let mut owed = core::mem::take(&mut self.owed);
        while let Some(request) = self.wait_until.pop(self.now) {
            let reason = self.requests[&request].too_late();
            self.reject(request, reason, &mut owed);
        }
        self.owed = owed;
    }

    pub(super) fn cancel(&mut self, request: RequestId, actions: &mut Vec<PlatformAction>) {
        // An instance that works for the request ends it with its answer.
        if self.requests.get(&request).is_some_and(|of| of.runs_on().is_none()) {
            self.reject(request, Rejection::Cancelled, actions);
        }
    }

    /// The requests of a gone instance wait again in its pool, except those that may not.
    pub(super) fn lose_requests_of(
        &mut self,
        instance: InstanceId,
        lost: &mut Instance,
        actions: &mut Vec<PlatformAction>,
    ) {
        let mark = lost.time.count(self.now, lost.requests.len());
        for &request in &lost.requests {
            let runs = |of: &&mut Request| of.place == Place::Runs(instance);
            let Some(of) = self.requests.get_mut(&request).filter(runs) else { continue };
            of.place = Place::Pool;
            of.used = of.used.saturating_add(GpuTime::between(of.came, mark));
            let function = self.functions.get(&of.function);
            let ended = if function.is_none_or(|function| function.state == FunctionState::Removed) {
                Some(Rejection::Removed)
            } else if of.attempts >= self.config.max_attempts {
                Some(Rejection::AttemptsExhausted)
            } else {
                (of.until <= self.now).then(|| of.too_late())
            };
            match ended {
                Some(reason) => self.reject(request, reason, actions),
                None => self.waits(request),
            }
        }
    }

    pub(super) fn check_requests(&self) {
        let mut waiting = 0;
        for (request, of) in &self.requests {
            let waits = of.runs_on().is_none();
            waiting += usize::from(waits);
            let listed =
                self.functions.get(&of.function).map(|on| on.waiting.contains(&(of.arrived, *request)));
            assert!(listed.unwrap_or(waits) == waits, "{request} waits or runs, and its function differs");
            assert_eq!(
                self.wait_until.has(*request),
                waits,
                "{request} waits without an end, or runs with one"
            );
            if let Place::Runs(instance) = of.place {
                let on = self.instances.get(instance).map(|on| on.function);
                assert_eq!(on, Some(of.function), "{request} runs on an instance of another function");
            }
        }
        let listed: usize = self.functions.values().map(|of| of.waiting.len()).sum();
        assert_eq!(listed, waiting, "requests that wait");
    }
}
