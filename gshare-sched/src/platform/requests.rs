//! Requests from their arrival to their end.

use super::cluster::Cluster;
use super::functions::{Function, FunctionState};
use super::gpu_time::GpuTime;
use super::instances::Instance;
use super::{Duration, FunctionId, Life, Platform, PlatformAction, Rejection, RequestId, Timestamp};
use gshare_core::{InstanceId, TenantId};
use std::collections::BTreeSet;

/// The present place of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In its tenant's line.
    Line,
    /// With its function, which has no profile yet.
    Function,
    /// In its function's queue: the pool chooses its instance.
    Queue,
    /// Dispatched to this instance.
    Runs(InstanceId),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) function: FunctionId,
    tenant: TenantId,
    pub(super) arrived: Timestamp,
    pub(super) deadline: Option<Timestamp>,
    /// The end of its wait: its deadline, or earlier by the longest wait.
    until: Timestamp,
    place: Place,
    /// Whether the pool has counted the request as load.
    counted: bool,
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

    /// How long it may wait.
    pub(super) fn patience(&self) -> Duration {
        self.until.saturating_since(self.arrived)
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

impl Function {
    /// The book of requests with this place.
    const fn book(&mut self, place: Place) -> Option<&mut BTreeSet<(Timestamp, RequestId)>> {
        match place {
            Place::Line | Place::Function => Some(&mut self.held),
            Place::Queue => Some(&mut self.queue),
            Place::Runs(_) => None,
        }
    }
}

impl Cluster {
    /// Moves a request to another place in which it waits.
    fn enter(&mut self, request: RequestId, place: Place) {
        let Some(of) = self.requests.get_mut(&request) else { return };
        let (key, from) = ((of.arrived, request), core::mem::replace(&mut of.place, place));
        if let Some(function) = self.functions.get_mut(&of.function) {
            function.book(from).map(|book| book.remove(&key));
            function.book(place).map(|book| book.insert(key));
        }
        if matches!(from, Place::Runs(_)) {
            self.wait_until.insert((of.until, request));
        }
    }

    /// Notes a pool's dispatch. False: the instance is stopped or lost, and its pool does not know that yet.
    pub(super) fn dispatched(&mut self, request: RequestId, instance: InstanceId) -> bool {
        let on = self.instances.get_mut(instance).filter(|on| on.life != Life::Stopped);
        let (Some(on), Some(of)) = (on, self.requests.get_mut(&request)) else { return false };
        debug_assert!(of.place == Place::Queue, "{request} is dispatched, and does not wait in a queue");
        if let Some(function) = self.functions.get_mut(&of.function) {
            function.queue.remove(&(of.arrived, request));
        }
        self.wait_until.remove(&(of.until, request));
        of.place = Place::Runs(instance);
        of.attempts = of.attempts.saturating_add(1);
        of.came = on.time.count(self.now, on.requests.len());
        on.requests.insert(on.requests.partition_point(|other| *other < request), request);
        if of.attempts == 1 {
            self.tenants.dispatched(of.tenant);
        }
        true
    }

    /// Forgets a request that was answered after a time on its instance, or rejected.
    pub(super) fn ended(&mut self, request: RequestId, answered: Option<Duration>) -> Option<Request> {
        let mut of = self.requests.remove(&request)?;
        if let Some(instance) = of.runs_on() {
            if let Some(on) = self.instances.get_mut(instance) {
                let mark = on.time.count(self.now, on.requests.len());
                on.requests.retain(|other| *other != request);
                of.used = of.used.saturating_add(GpuTime::between(of.came, mark));
            }
        } else {
            self.wait_until.remove(&(of.until, request));
        }
        let others_wait = match of.place {
            Place::Line => self.tenants.left_line(of.tenant, of.arrived, request),
            _ => self.tenants.ended(of.tenant, of.expected, of.used, of.attempts > 0),
        };
        if others_wait {
            self.to_admit.insert(of.tenant);
        }
        let function = self.functions.get_mut(&of.function)?;
        function.book(of.place).map(|book| book.remove(&(of.arrived, request)));
        if let Some(took) = answered {
            function.took(took);
            function.used(of.used);
            let took = self.now.saturating_since(of.arrived);
            function.stats.answered += 1;
            function.stats.within_slo += u64::from(function.spec.slo.is_none_or(|slo| took <= slo));
        } else {
            function.stats.rejected += 1;
        }
        Some(of)
    }

    pub(super) fn check_requests(&self) {
        let mut waiting = 0;
        for (request, of) in self.requests.sorted() {
            let key = (of.arrived, request);
            let listed = self.functions.get(&of.function).map(|on| match of.place {
                Place::Line | Place::Function => on.held.contains(&key),
                Place::Queue => on.queue.contains(&key),
                Place::Runs(_) => true,
            });
            assert!(listed.unwrap_or(true), "{request} waits, and its function does not list it");
            waiting += usize::from(of.runs_on().is_none());
            assert_eq!(
                self.wait_until.contains(&(of.until, request)),
                of.runs_on().is_none(),
                "{request} waits without an end, or runs with one"
            );
            if let Place::Runs(instance) = of.place {
                let on = self.instances.get(instance).filter(|on| on.requests.contains(&request));
                let on = on.map(|on| on.function);
                assert_eq!(on, Some(of.function), "{request} runs on an instance of another function");
            }
        }
        let listed: usize = self.functions.sorted().iter().map(|(_, of)| of.waiting()).sum();
        assert_eq!((listed, self.wait_until.len()), (waiting, waiting), "requests that wait");
    }
}

impl Platform {
    pub(super) fn arrived(&mut self, request: RequestId, function: FunctionId, deadline: Option<Timestamp>) {
        let cluster = &mut self.cluster;
        let (now, devices) = (cluster.now, cluster.devices.count());
        cluster.next_request = request.number() + 1;
        let Some(of) = cluster.functions.get_mut(&function) else { return };
        let tenant = of.spec.tenant;
        of.stats.arrived += 1;
        let refused = if deadline.is_some_and(|deadline| deadline <= now) {
            Some(Rejection::DeadlineMissed)
        } else if of.never_fits() {
            Some(Rejection::NeverFits)
        } else if !cluster.tenants.may_wait(tenant) {
            Some(Rejection::TenantQueueFull)
        } else {
            (of.waiting() >= cluster.config.max_waiting as usize).then_some(Rejection::QueueFull)
        };
        if let Some(reason) = refused {
            of.stats.rejected += 1;
            cluster.orders.push(PlatformAction::Reject { request, reason });
            if reason == Rejection::QueueFull {
                self.called(function);
            }
            return;
        }
        let (latest, expected) = (of.latest_start(now), of.expected_use());
        let place = match cluster.tenants.arrived(now, (tenant, request), latest, (devices, expected)) {
            false => Place::Line,
            true if of.state == FunctionState::Profiling => Place::Function,
            true => Place::Queue,
        };
        of.book(place).map(|book| book.insert((now, request)));
        let longest = now.saturating_add(cluster.config.max_wait);
        let until = deadline.map_or(longest, |deadline| deadline.min(longest));
        let of = Request {
            function,
            tenant,
            arrived: now,
            deadline,
            until,
            place,
            counted: false,
            attempts: 0,
            expected: if place == Place::Line { Duration::ZERO } else { expected },
            used: Duration::ZERO,
            came: 0,
        };
        cluster.requests.insert(request, of);
        match place {
            Place::Queue => self.queued(request),
            Place::Line => {
                self.admit(tenant);
                self.held(request, function);
            }
            _ => {}
        }
        // Most requests are dispatched at once, and never get here.
        if self.cluster.requests.get(&request).is_some_and(|of| of.runs_on().is_none()) {
            self.cluster.wait_until.insert((until, request));
        }
    }

    /// Counts a request of the function as load, in every regime.
    fn called(&mut self, function: FunctionId) {
        let Some(of) = self.cluster.functions.get(&function) else { return };
        if of.state == FunctionState::Deployed {
            self.tell(of.pool, |pool, cluster| pool.called(cluster, function));
        }
    }

    /// Counts a request held back by its tenant's limit, if admitted requests of the function wait: more instances would then
    /// serve more of the tenant's requests.
    fn held(&mut self, request: RequestId, function: FunctionId) {
        let Some(of) = self.cluster.functions.get(&function).filter(|of| !of.queue.is_empty()) else {
            return;
        };
        let held = self.cluster.requests.get_mut(&request).filter(|of| of.place == Place::Line);
        if let Some(held) = held.filter(|_| of.state == FunctionState::Deployed) {
            held.counted = true;
            self.called(function);
        }
    }

    /// Admits as many of the tenant's requests as its limits allow.
    pub(super) fn admit(&mut self, tenant: TenantId) {
        loop {
            let cluster = &mut self.cluster;
            let devices = cluster.devices.count();
            let (requests, functions) = (&mut cluster.requests, &cluster.functions);
            let expects = |request| {
                let Some(of) = requests.get_mut(&request) else { return Duration::ZERO };
                of.expected = functions.get(&of.function).map_or(Duration::ZERO, Function::expected_use);
                of.expected
            };
            let Some(request) = cluster.tenants.admit(cluster.now, tenant, devices, expects) else { break };
            self.give(request);
        }
    }

    /// Gives a request to its function's pool, or keeps it while the function has none.
    pub(super) fn give(&mut self, request: RequestId) {
        let Some(function) = self.cluster.requests.get(&request).map(|of| of.function) else { return };
        let Some(of) = self.cluster.functions.get(&function) else { return };
        if of.state == FunctionState::Profiling {
            return self.cluster.enter(request, Place::Function);
        }
        self.cluster.enter(request, Place::Queue);
        self.queued(request);
    }

    /// Tells the pool of a request in its function's queue.
    fn queued(&mut self, request: RequestId) {
        let Some(of) = self.cluster.requests.get_mut(&request) else { return };
        let (function, counted) = (of.function, core::mem::replace(&mut of.counted, true));
        let Some(pool) = self.cluster.functions.get(&function).map(|of| of.pool) else { return };
        self.tell(pool, |pool, cluster| {
            if !counted {
                pool.called(cluster, function);
            }
            pool.arrived(cluster, request);
        });
    }

    pub(super) fn done(&mut self, request: RequestId, took: Duration) {
        let instance = self.cluster.ended(request, Some(took)).and_then(|of| of.runs_on());
        let on = instance.and_then(|instance| Some((instance, self.cluster.instances.get(instance)?.pool)));
        let Some((instance, pool)) = on else { return };
        self.tell(pool, |pool, cluster| pool.done(cluster, request, instance, took));
    }

    /// Ends a request, and takes a waiting request from its pool.
    pub(super) fn reject(&mut self, request: RequestId, reason: Rejection) {
        let Some(of) = self.cluster.ended(request, None) else { return };
        self.cluster.orders.push(PlatformAction::Reject { request, reason });
        if of.place == Place::Queue
            && let Some(pool) = self.cluster.functions.get(&of.function).map(|function| function.pool)
        {
            self.pools[pool].withdrawn(&self.cluster, request, &of);
            self.unsettled.insert(pool);
        }
    }

    /// Ends the requests that have waited as long as they may. The event at hand may still be refused: the rejections are then
    /// orders of the next event.
    pub(super) fn expire(&mut self) {
        while let Some(&(at, request)) = self.cluster.wait_until.first()
            && at <= self.cluster.now
        {
            let reason = self.cluster.requests[&request].too_late();
            self.reject(request, reason);
        }
    }

    pub(super) fn cancel(&mut self, request: RequestId) {
        // An instance that works for the request ends it with its answer.
        if self.cluster.requests.get(&request).is_some_and(|of| of.runs_on().is_none()) {
            self.reject(request, Rejection::Cancelled);
        }
    }

    /// The requests of a gone instance wait again in its pool, except those that may not.
    pub(super) fn lose_requests_of(&mut self, lost: &mut Instance) {
        let now = self.cluster.now;
        let mark = lost.time.count(now, lost.requests.len());
        for &request in &lost.requests {
            let Some(of) = self.cluster.requests.get_mut(&request) else { continue };
            of.used = of.used.saturating_add(GpuTime::between(of.came, mark));
            let function = self.cluster.functions.get(&of.function);
            let ended = if function.is_none_or(|function| function.state == FunctionState::Removed) {
                Some(Rejection::Removed)
            } else if of.attempts >= self.cluster.config.max_attempts {
                Some(Rejection::AttemptsExhausted)
            } else {
                (of.until <= now).then(|| of.too_late())
            };
            match ended {
                Some(reason) => self.reject(request, reason),
                None => {
                    self.cluster.enter(request, Place::Queue);
                    self.pools[lost.pool].returned(&self.cluster, request);
                }
            }
        }
    }
}
