//! Routing by slack: the instance that serves each request, and the time at which it begins.
//!
//! # Problem
//! The instances of a function differ: some own their slices, as a whole or as pipelines, others share a slice and may have
//! to be loaded first. From deadlines and latencies the router decides where each request runs (FluidFaaS, section 5.3,
//! "Request Routing").
//!
//! # Terms
//! - an **exclusive** instance owns its slices and holds up to `capacity` requests; a **shared** instance is one of several
//!   on a [`SharedSlice`], which runs one request at a time;
//! - **load**: time until a shared instance could begin, 0 while it is resident;
//! - **slack** of a request on an instance: deadline - latency - load, the latest time to begin;
//! - **late**: the current time is past the slack on the function's fastest instance.
//!
//! # Algorithm
//! 1. A function's requests wait in one queue by (deadline, arrival). No request is bound to an instance before it starts,
//!    so none waits behind a slow instance while a fast one is free.
//! 2. A request starts at once on an exclusive instance with room, the least latency first (section 5.3).
//! 3. The remaining requests wait for shared instances. An idle shared slice takes the instance of the function with the
//!    least **slack** of its first request (see `Entry`). Instances to be loaded that would be late anyway wait a while
//!    ([`RouterConfig::stay_loads`]).
//! 4. An instance takes the first request of its function that *it* answers in time: a slow instance, or one to be loaded,
//!    passes over requests that only a faster one can still save. Without such a request it serves a late one, else the
//!    first.
//! 5. **Late** requests ([`Late`]): under overload an order by deadline serves exactly the lost requests, so by default a
//!    late request waits behind all requests that can be in time, until it is **overdue** ([`RouterConfig::late_wait`]) and
//!    goes before all others.
//! 6. **Shortage**: when the function's instances need longer for the queue than a waiting request's slack, the host learns
//!    it ([`RouteAction::Short`]), at most once in [`SHORT_EVERY`], for as long as the shortage lasts.
//!
//! # Invariants
//! - an exclusive instance gets no request beyond its capacity, and a shared slice none while it runs one;
//! - no request waits while an exclusive instance of its function has room, or an idle slice has an instance of it;
//! - the set of free instances follows from the rest of the state; no entry of a slice's order is above its exact place,
//!   and each function with waiting requests has entries; a shared instance outside its function's `open` is on a slice
//!   that runs a request.
//!
//! # Cost
//! O(log n) per event in instances and waiting requests, and per corrected entry (see `Entry`); `InstanceDown` adds the
//! instance's requests. Memory: waiting and running requests.
//!
//! # Differences from the paper
//! The paper binds each request on arrival to an instance's queue, and its slack has one load. Here the queue is the
//! function's, slack follows residency, and a load has to pay. [`Late`] requests and admission control are additions.

mod shared_slices;
mod shortage;

#[cfg(doc)]
use super::router_config::SHORT_EVERY;
use super::router_config::{Late, RouterConfig};
use super::service::{check_event, latency, rate, slice, time_for};
use crate::pipeline::{RouteAction, RouteError, RouteEvent, RouteReject, Router, Service};
use gshare_core::{Duration, Engine, FunctionId, InstanceId, RequestId, SharedSlice, Timestamp};
use shared_slices::{Entry, Slice, unknown};
use std::collections::{BTreeMap, BTreeSet};

/// A function's first request by its deadline, in the order of the shared instances' entries that depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Head {
    /// In time, or overdue.
    OnTime(Timestamp),
    Late(Timestamp),
    #[default]
    Nothing,
}

impl Head {
    /// The request's deadline, and whether the request is late and waits for all others.
    const fn request(self) -> Option<(bool, Timestamp)> {
        match self {
            Self::OnTime(deadline) => Some((false, deadline)),
            Self::Late(deadline) => Some((true, deadline)),
            Self::Nothing => None,
        }
    }
}

/// A waiting request's place: by deadline (requests without a deadline last), then arrival.
type Turn = (Timestamp, u64);

#[derive(Debug, Clone)]
struct Request {
    function: FunctionId,
    turn: Turn,
    at: At,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    OnTime,
    Late,
    Instance(InstanceId),
}

#[derive(Debug, Clone)]
struct Instance {
    function: FunctionId,
    service: Service,
    /// Requests dispatched to it, by arrival.
    has: BTreeMap<u64, RequestId>,
    draining: bool,
    /// The entry in the slice's order, at most at the place that the function's first request gives; None without a first
    /// request.
    entry: Option<Entry>,
}

impl Instance {
    const fn latency(&self) -> Duration {
        latency(&self.service)
    }

    const fn slice(&self) -> Option<SharedSlice> {
        slice(&self.service)
    }

    fn has_room(&self) -> bool {
        match self.service {
            Service::Exclusive { capacity, .. } => !self.draining && self.has.len() < capacity as usize,
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Function {
    /// Exclusive instances with room, fastest first.
    free: BTreeSet<(Duration, InstanceId)>,
    /// Shared instances on slices that may be idle, fastest first. Their slices keep the others, in `parked`.
    open: BTreeSet<(Duration, InstanceId)>,
    /// Latencies of all instances that are not draining.
    latencies: BTreeSet<(Duration, InstanceId)>,
    /// Requests per 10^15 ns of the instances in `latencies`.
    rate: u64,
    on_time: BTreeMap<Turn, RequestId>,
    /// Requests that can no longer be in time.
    late: BTreeMap<Turn, RequestId>,
    /// The time from which the first late request is overdue, if no event changes the function before. None without a late
    /// request.
    overdue_at: Option<Timestamp>,
    /// Whether the first late request is overdue.
    overdue: bool,
    told_short: Option<Timestamp>,
    /// The first request when entries were last looked at.
    stands: Head,
    /// Shared instances with an entry above [`unknown`], or without an entry.
    placed: BTreeSet<InstanceId>,
}

impl Function {
    fn waiting(&self) -> usize {
        self.on_time.len() + self.late.len()
    }

    fn head(&self) -> Head {
        let late = self.late.first_key_value().map(|(turn, _)| turn.0);
        let overdue = late.filter(|_| self.overdue).map(Head::OnTime);
        let on_time = || self.on_time.first_key_value().map(|(turn, _)| Head::OnTime(turn.0));
        overdue.or_else(on_time).or(late.map(Head::Late)).unwrap_or_default()
    }

    /// Time the function's instances need for its waiting requests.
    fn behind(&self) -> Duration {
        time_for(self.waiting(), self.rate)
    }

    fn fastest(&self) -> Option<Duration> {
        self.latencies.first().map(|&(latency, _)| latency)
    }

    /// Whether a new entry would say the same about the function.
    fn is_blank(&self) -> bool {
        self.latencies.is_empty() && self.waiting() == 0
    }
}

/// Routes by slack: the engine of this module.
#[derive(Debug, Clone, Default)]
pub struct SlackRouter {
    config: RouterConfig,
    last: Timestamp,
    arrivals: u64,
    requests: BTreeMap<RequestId, Request>,
    instances: BTreeMap<InstanceId, Instance>,
    functions: BTreeMap<FunctionId, Function>,
    slices: BTreeMap<SharedSlice, Slice>,
    /// Deadlines of waiting requests, kept with [`Late::Reject`] only.
    expiring: BTreeSet<(Timestamp, u64, RequestId)>,
    /// Times for another look at functions that were short.
    again: BTreeSet<(Timestamp, FunctionId)>,
    /// Times at which the first late request of a function becomes overdue.
    to_be_overdue: BTreeSet<(Timestamp, FunctionId)>,
}

impl SlackRouter {
    /// A router without instances.
    pub fn new(config: RouterConfig) -> Self {
        Self { config, ..Self::default() }
    }

    fn check(&self, now: Timestamp, event: &RouteEvent) -> Result<(), RouteError> {
        let instance = |id| self.instances.get(&id).map(|instance| (instance.service, instance.draining));
        let request = |id| {
            self.requests.get(&id).map(|request| match request.at {
                At::Instance(instance) => Some(instance),
                At::OnTime | At::Late => None,
            })
        };
        check_event((now, self.last), event, instance, request)
    }

    fn up(&mut self, id: InstanceId, function: FunctionId, service: Service, has: BTreeMap<u64, RequestId>) {
        let of = self.functions.entry(function).or_default();
        let instance = Instance { function, service, has, draining: false, entry: None };
        let latency = instance.latency();
        of.latencies.insert((latency, id));
        of.rate = of.rate.saturating_add(rate(&service));
        match service {
            Service::Shared { slice, .. } => {
                of.open.insert((latency, id));
                let slice = self.slices.entry(slice).or_default();
                slice.instances += 1;
                slice.running += instance.has.len();
            }
            _ if instance.has_room() => {
                of.free.insert((latency, id));
            }
            _ => {}
        }
        self.instances.insert(id, instance);
        self.unsettle(id);
        self.weigh(function);
    }

    /// Takes a shared instance off its slice; returns the slice if it is now idle.
    fn leave_slice(&mut self, instance: &Instance) -> Option<SharedSlice> {
        let Service::Shared { slice: at, .. } = instance.service else { return None };
        let slice = self.slices.get_mut(&at)?;
        slice.running -= instance.has.len();
        slice.instances -= 1;
        if slice.instances == 0 {
            self.slices.remove(&at);
            return None;
        }
        if slice.running == 0 {
            self.unpark(at);
        }
        (!instance.has.is_empty()).then_some(at)
    }

    fn changed(&mut self, now: Timestamp, id: InstanceId, service: Service, actions: &mut Vec<RouteAction>) {
        self.withdraw(id);
        let Some(instance) = self.instances.remove(&id) else { return };
        let idle = self.leave_slice(&instance);
        self.up(id, instance.function, service, instance.has);
        self.serve(now, instance.function, actions);
        if let Some(slice) = idle {
            self.serve_slice(now, slice, actions);
        }
    }

    /// Stops offering the instance to requests; its own requests stay.
    fn withdraw(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if instance.draining {
            return;
        }
        instance.draining = true;
        let (latency, service, entry) = (instance.latency(), instance.service, instance.entry.take());
        if let Some(of) = self.functions.get_mut(&instance.function) {
            of.latencies.remove(&(latency, id));
            of.free.remove(&(latency, id));
            of.open.remove(&(latency, id));
            of.placed.remove(&id);
            of.rate = of.rate.saturating_sub(rate(&service));
        }
        if let Service::Shared { slice, load, .. } = service
            && let Some(slice) = self.slices.get_mut(&slice)
        {
            slice.replace(entry, None, load);
            slice.parked.remove(&id);
        }
        let function = self.instances[&id].function;
        self.weigh(function);
    }

    fn down(&mut self, now: Timestamp, id: InstanceId, actions: &mut Vec<RouteAction>) {
        self.withdraw(id);
        let Some(instance) = self.instances.remove(&id) else { return };
        let function = instance.function;
        let idle = self.leave_slice(&instance);
        for (_, request) in instance.has {
            let Some(found) = self.requests.get_mut(&request) else { continue };
            found.at = At::OnTime;
            let turn = found.turn;
            self.enqueue(request, function, turn);
        }
        self.serve(now, function, actions);
        if let Some(slice) = idle {
            self.serve_slice(now, slice, actions);
        }
        self.shortage(now, function, actions);
    }

    /// Puts a request into its function's queue.
    fn enqueue(&mut self, id: RequestId, function: FunctionId, turn: Turn) {
        self.functions.entry(function).or_default().on_time.insert(turn, id);
        if self.config.late == Late::Reject && turn.0 != Timestamp::MAX {
            self.expiring.insert((turn.0, turn.1, id));
        }
        self.weigh(function);
    }

    /// Computes the time from which the first late request is overdue; to be called when a function's queue or rate has
    /// changed.
    ///
    /// Waiting is unavoidable where slices lack time: if few requests are late they wait long, and without a bound until the
    /// end of the overload. The bound follows the function's backlog *at that time*. The backlog at the moment a request became
    /// late would not do: the first late request of a burst would be served in its midst, in place of a request that can be in
    /// time, and the last would wait as if the burst continued. Where the backlog stays at `b` and late requests wait for `m`
    /// times `b`, one request in `m` is late.
    fn weigh(&mut self, function: FunctionId) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let first = of.late.first_key_value().map(|(turn, _)| turn.0);
        let at = first.map(|deadline| self.config.overdue_at(deadline, of.behind()));
        if let Some(before) = of.overdue_at.filter(|_| !of.overdue && of.overdue_at != at) {
            self.to_be_overdue.remove(&(before, function));
        }
        of.overdue_at = at;
        of.overdue = at.is_some_and(|at| at <= self.last);
        if let Some(at) = at.filter(|_| !of.overdue) {
            self.to_be_overdue.insert((at, function));
        }
    }

    /// Takes a waiting request out of its queue and gives it to `to`; returns its function and turn.
    fn dequeue(&mut self, id: RequestId, to: Option<InstanceId>) -> Option<(FunctionId, Turn)> {
        let request = self.requests.get_mut(&id)?;
        let (function, turn, at) = (request.function, request.turn, request.at);
        if let Some(to) = to {
            request.at = At::Instance(to);
        }
        if let Some(of) = self.functions.get_mut(&function) {
            let queue = if at == At::Late { &mut of.late } else { &mut of.on_time };
            queue.remove(&turn);
        }
        self.expiring.remove(&(turn.0, turn.1, id));
        self.weigh(function);
        Some((function, turn))
    }

    fn reject(&mut self, id: RequestId, reason: RouteReject, actions: &mut Vec<RouteAction>) {
        self.requests.remove(&id);
        actions.push(RouteAction::Reject { request: id, reason });
    }

    /// Moves or rejects requests at the head of the queue that have become late.
    fn sift(&mut self, now: Timestamp, function: FunctionId, actions: &mut Vec<RouteAction>) {
        if self.config.late == Late::InOrder {
            return;
        }
        loop {
            let Some(of) = self.functions.get_mut(&function) else { return };
            let (Some((&turn, &id)), Some(fastest)) = (of.on_time.first_key_value(), of.fastest()) else {
                return;
            };
            if now.saturating_add(fastest) <= turn.0 {
                return;
            }
            of.on_time.remove(&turn);
            if self.config.late == Late::Reject {
                self.expiring.remove(&(turn.0, turn.1, id));
                self.reject(id, RouteReject::DeadlineMissed, actions);
            } else {
                of.late.insert(turn, id);
                if let Some(request) = self.requests.get_mut(&id) {
                    request.at = At::Late;
                }
            }
            self.weigh(function);
        }
    }

    /// Puts late requests first once they are overdue.
    fn promote(&mut self, now: Timestamp) {
        while let Some(&(at, function)) = self.to_be_overdue.first()
            && at <= now
        {
            self.to_be_overdue.pop_first();
            if let Some(of) = self.functions.get_mut(&function) {
                of.overdue = true;
            }
            self.reorder(function);
        }
    }

    /// The request for an instance that answers after `latency`: an overdue request, else the first request it answers in time,
    /// else a late request, else the first.
    fn pick(&self, now: Timestamp, function: FunctionId, latency: Duration) -> Option<RequestId> {
        let of = self.functions.get(&function)?;
        let first = of.on_time.first_key_value();
        if self.config.late == Late::InOrder {
            return first.map(|(_, &id)| id);
        }
        let from = (now.saturating_add(latency), 0);
        let in_time = first.filter(|(turn, _)| **turn >= from).or_else(|| of.on_time.range(from..).next());
        let late = of.late.first_key_value();
        late.filter(|_| of.overdue).or(in_time).or(late).or(first).map(|(_, &id)| id)
    }

    fn dispatch(&mut self, request: RequestId, instance: InstanceId, actions: &mut Vec<RouteAction>) {
        let Some((function, turn)) = self.dequeue(request, Some(instance)) else { return };
        self.start(request, function, turn, instance);
        actions.push(RouteAction::Dispatch { request, instance });
    }

    /// Adds a request to the instance that its state already names.
    fn start(&mut self, id: RequestId, function: FunctionId, turn: Turn, at: InstanceId) {
        let Some(instance) = self.instances.get_mut(&at) else { return };
        instance.has.insert(turn.1, id);
        let latency = instance.latency();
        if let Service::Shared { slice, load, .. } = instance.service {
            if let Some(slice) = self.slices.get_mut(&slice) {
                slice.running += 1;
                let since = if load.is_zero() { slice.worked } else { Duration::ZERO };
                slice.worked = since.saturating_add(latency);
            }
        } else if !instance.has_room()
            && let Some(of) = self.functions.get_mut(&function)
        {
            of.free.remove(&(latency, at));
        }
    }

    /// Gives waiting requests of the function to its free instances.
    fn serve(&mut self, now: Timestamp, function: FunctionId, actions: &mut Vec<RouteAction>) {
        self.sift(now, function, actions);
        loop {
            let free = self.functions.get(&function).and_then(|of| of.free.first().copied());
            let Some((latency, instance)) = free else { break };
            let Some(request) = self.pick(now, function, latency) else { break };
            self.dispatch(request, instance, actions);
        }
        self.reorder(function);
        while let Some(of) = self.functions.get_mut(&function)
            && of.waiting() > 0
            && let Some((latency, id)) = of.open.pop_first()
        {
            let at = self.instances.get(&id).and_then(Instance::slice);
            if let Some(at) = at {
                self.serve_slice(now, at, actions);
            }
            if let Some(slice) = at.and_then(|at| self.slices.get_mut(&at))
                && slice.running > 0
            {
                slice.parked.insert(id);
            } else if let Some(of) = self.functions.get_mut(&function) {
                // The instance did not need a slice after all.
                of.open.insert((latency, id));
                break;
            }
        }
        self.tidy(function);
    }

    /// Forgets a function without instances and waiting requests.
    fn tidy(&mut self, function: FunctionId) {
        if self.functions.get(&function).is_some_and(Function::is_blank) {
            self.functions.remove(&function);
        }
    }

    fn arrived(
        &mut self,
        now: Timestamp,
        id: RequestId,
        function: FunctionId,
        deadline: Option<Timestamp>,
        actions: &mut Vec<RouteAction>,
    ) {
        let of = self.functions.entry(function).or_default();
        let deadline = deadline.unwrap_or(Timestamp::MAX);
        let turn = (deadline, self.arrivals);
        self.arrivals += 1;
        let late = self.config.late;
        let in_time = |of: &Function| of.fastest().is_some_and(|fast| now.saturating_add(fast) <= deadline);
        // The usual case: an exclusive instance has room, so no request waits.
        if of.waiting() == 0
            && let Some(&(_, instance)) = of.free.first()
            && (late != Late::Reject || in_time(of))
        {
            let at = At::Instance(instance);
            self.requests.insert(id, Request { function, turn, at });
            self.start(id, function, turn, instance);
            actions.push(RouteAction::Dispatch { request: id, instance });
            return;
        }
        if late == Late::Reject && of.fastest().is_some() && Self::too_slow(of, now, deadline) {
            actions.push(RouteAction::Reject { request: id, reason: RouteReject::WouldBeLate });
            self.tell_short(now, function, actions);
            return;
        }
        let others_wait = of.waiting() > 0;
        self.requests.insert(id, Request { function, turn, at: At::OnTime });
        self.enqueue(id, function, turn);
        if others_wait {
            // Other requests already wait, so there is no place for this one: only the first request may change.
            self.sift(now, function, actions);
            self.reorder(function);
        } else {
            self.serve(now, function, actions);
        }
        self.shortage(now, function, actions);
    }

    fn completed(&mut self, now: Timestamp, id: RequestId, at: InstanceId, actions: &mut Vec<RouteAction>) {
        let Some(request) = self.requests.remove(&id) else { return };
        let Some(instance) = self.instances.get_mut(&at) else { return };
        instance.has.remove(&request.turn.1);
        if instance.draining && instance.has.is_empty() {
            actions.push(RouteAction::Drained { instance: at });
        }
        match instance.service {
            Service::Shared { slice: on, .. } => {
                if let Some(slice) = self.slices.get_mut(&on) {
                    slice.running -= 1;
                }
                self.serve_slice(now, on, actions);
            }
            _ if instance.has_room() => {
                let key = (instance.latency(), at);
                // If a request waits, this is the only place.
                if self.waiting(request.function) > 0 {
                    self.sift(now, request.function, actions);
                    if let Some(next) = self.pick(now, request.function, key.0) {
                        self.dispatch(next, at, actions);
                        self.reorder(request.function);
                        return;
                    }
                    self.reorder(request.function);
                }
                self.functions.entry(request.function).or_default().free.insert(key);
            }
            // A draining instance frees no place, but requests that are late by now become known.
            _ => {
                if self.waiting(request.function) > 0 {
                    self.serve(now, request.function, actions);
                }
            }
        }
    }

    fn expire(&mut self, now: Timestamp, actions: &mut Vec<RouteAction>) {
        while let Some(&(deadline, _, id)) = self.expiring.first() {
            if deadline > now {
                break;
            }
            let function = self.requests.get(&id).map(|request| request.function);
            self.dequeue(id, None);
            self.reject(id, RouteReject::DeadlineMissed, actions);
            if let Some(function) = function {
                self.reorder(function);
                self.tidy(function);
            }
        }
    }

    /// Rejects the function's waiting requests.
    fn remove(&mut self, function: FunctionId, actions: &mut Vec<RouteAction>) {
        let Some(of) = self.functions.get(&function) else { return };
        let waiting: Vec<RequestId> = of.on_time.values().chain(of.late.values()).copied().collect();
        for id in waiting {
            self.dequeue(id, None);
            self.reject(id, RouteReject::Removed, actions);
        }
        self.reorder(function);
        self.tidy(function);
    }
}

impl Engine for SlackRouter {
    type Event = RouteEvent;
    type Action = RouteAction;
    type Error = RouteError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: RouteEvent,
        actions: &mut Vec<RouteAction>,
    ) -> Result<(), RouteError> {
        self.check(now, &event)?;
        self.last = now;
        self.promote(now);
        self.expire(now, actions);
        self.look_again(now, actions);
        match event {
            RouteEvent::InstanceUp { instance, function, service } => {
                self.up(instance, function, service, BTreeMap::new());
                self.serve(now, function, actions);
            }
            RouteEvent::ServiceChanged { instance, service } => {
                self.changed(now, instance, service, actions);
            }
            RouteEvent::LoadChanged { instance: id, load: new } => {
                if let Some(instance) = self.instances.get_mut(&id) {
                    if let Service::Shared { load, .. } = &mut instance.service {
                        *load = new;
                    }
                    let function = instance.function;
                    if instance.entry.is_some() {
                        self.unsettle(id);
                    }
                    self.reorder(function);
                }
            }
            RouteEvent::InstanceDraining { instance } => {
                self.withdraw(instance);
                let function = self.instances[&instance].function;
                self.reorder(function);
                self.shortage(now, function, actions);
                self.tidy(function);
                if self.instances[&instance].has.is_empty() {
                    actions.push(RouteAction::Drained { instance });
                }
            }
            RouteEvent::InstanceDown { instance } => self.down(now, instance, actions),
            RouteEvent::Arrived { request, function, deadline } => {
                self.arrived(now, request, function, deadline, actions);
            }
            RouteEvent::FunctionRemoved { function } => self.remove(function, actions),
            // The expiry above may already have rejected the request.
            RouteEvent::Cancelled { request } if self.requests.contains_key(&request) => {
                let function = self.requests[&request].function;
                self.dequeue(request, None);
                self.requests.remove(&request);
                self.reorder(function);
                self.tidy(function);
            }
            RouteEvent::Completed { request, instance } => self.completed(now, request, instance, actions),
            _ => {}
        }
        #[cfg(debug_assertions)]
        if self.instances.len() + self.requests.len() < 64 {
            self.invariants();
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let expiring = self.expiring.first().map(|&(deadline, ..)| deadline);
        [expiring, self.again.first().map(|&(at, _)| at)].into_iter().flatten().min()
    }
}

impl Router for SlackRouter {
    fn waiting(&self, function: FunctionId) -> usize {
        self.functions.get(&function).map_or(0, Function::waiting)
    }

    fn outstanding(&self, instance: InstanceId) -> usize {
        self.instances.get(&instance).map_or(0, |instance| instance.has.len())
    }

    fn invariants(&self) {
        for (id, instance) in &self.instances {
            let of = self.functions.get(&instance.function);
            let key = (instance.latency(), *id);
            assert_eq!(of.is_some_and(|of| of.free.contains(&key)), instance.has_room(), "{id}: free");
            for (arrival, request) in &instance.has {
                let found = &self.requests[request];
                assert!(found.at == At::Instance(*id) && found.turn.1 == *arrival, "{request} on {id}");
            }
        }
        for (id, of) in &self.functions {
            if of.waiting() > 0 {
                assert!(of.free.is_empty(), "{id} has requests waiting and an instance with room");
            }
            assert_eq!(of.stands, of.head(), "{id}: entries were not looked at");
            let first = of.late.first_key_value().map(|(turn, _)| turn.0);
            let at = first.map(|deadline| self.config.overdue_at(deadline, of.behind()));
            assert_eq!(
                (at, at.is_some_and(|at| at <= self.last)),
                (of.overdue_at, of.overdue),
                "{id}: overdue"
            );
            for &(latency, one) in &of.latencies {
                let instance = &self.instances[&one];
                let Service::Shared { slice, load, .. } = instance.service else { continue };
                let slice = &self.slices[&slice];
                let nanos = |time: Duration| i128::from(time.as_nanos());
                let exact = of.head().request().map(|(late, deadline)| {
                    (late, i128::from(deadline.as_nanos()) - nanos(latency) - nanos(load))
                });
                let entry = instance.entry.map(|(late, slack, _)| (late, slack));
                assert!(exact.is_none_or(|exact| entry.is_some_and(|entry| entry <= exact)), "{one}: order");
                assert_eq!(of.placed.contains(&one), instance.entry != Some(unknown(one)), "{one}: placed");
                let on = if load.is_zero() { &slice.ready } else { &slice.cold };
                assert!(instance.entry.is_none_or(|entry| on.contains(&entry)), "{one}: entry");
                assert!(of.waiting() == 0 || slice.running > 0, "{one} waits beside an idle slice");
                let (open, parked) = (of.open.contains(&(latency, one)), slice.parked.contains(&one));
                assert!(open != parked && (open || slice.running > 0), "{one}: open");
            }
        }
        for (id, slice) in &self.slices {
            let on = self
                .instances
                .values()
                .filter(|one| matches!(one.service, Service::Shared { slice, .. } if slice == *id));
            let (mut count, mut running) = (0, 0);
            for instance in on {
                count += 1;
                running += instance.has.len();
            }
            assert!(slice.instances == count && running == slice.running, "{id}");
        }
        let to_be = |(id, of): (&FunctionId, &Function)| Some((of.overdue_at.filter(|_| !of.overdue)?, *id));
        let to_be: BTreeSet<_> = self.functions.iter().filter_map(to_be).collect();
        assert_eq!(to_be, self.to_be_overdue, "times of functions whose late requests are not overdue");
        let waiting = self.functions.values().map(Function::waiting).sum::<usize>();
        let running = self.instances.values().map(|instance| instance.has.len()).sum::<usize>();
        assert_eq!(self.requests.len(), waiting + running, "a request is nowhere");
    }
}
