//! Routing in the order of arrival: a plain queue for each function.
//!
//! # Problem
//! See [`crate::pipeline`]. A gateway without knowledge of deadlines keeps one queue for each function. This router does the same: it
//! is the baseline for [`SlackRouter`](super::SlackRouter), and suffices for functions without an SLO.
//!
//! # Algorithm
//! 1. Requests of a function wait in the order of their arrival, regardless of their deadlines.
//! 2. The first request goes to the exclusive instance with room and the fewest requests; among equals, to the fastest.
//! 3. An idle shared slice takes the earliest request of all functions with an instance on the slice.
//! 4. A function is short while its instances need longer for its waiting requests than its last request's deadline allows.
//!
//! # Example
//! A and B share a slice. B's request with 20 ms left arrived after A's request with 90 ms left. The slice becomes idle and loads A,
//! whereas `SlackRouter` would load B.
//!
//! # Invariants
//! - an exclusive instance gets no request beyond its capacity, and a shared slice none while it runs one;
//! - no request waits while an exclusive instance of its function has room, or an idle slice has an instance of it.
//!
//! # Cost
//! O(log n) per event for a function with exclusive instances; O(k log n) with k instances on its slices.

use super::service::{check_event, latency, rate, slice, time_for};
use crate::pipeline::{RouteAction, RouteError, RouteEvent, RouteReject, Router, Service};
use gshare_core::dag::MAX_TIME;
use gshare_core::{ConfigError, Duration, Engine, FunctionId, InstanceId, RequestId, SharedSlice, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

crate::settings_table::settings! {
    /// Settings of a [`FirstCome`].
    pub struct FirstComeConfig {
        /// Least time between two [`RouteAction::Short`] of a function. 100 ms: an instance takes longer to start.
        #[cfg_attr(feature = "serde", serde(rename = "short_every_ns"))]
        pub short_every: Duration = Duration::from_millis(100), with_short_every;
        /// Most waiting requests of a function. 100,000: some 10 MB.
        pub max_waiting: u32 = 100_000, with_max_waiting;
        /// Most dispatches of a request before the router gives up. 3: a request that kills its instance must end.
        pub max_attempts: u8 = 3, with_max_attempts;
    }
}

#[derive(Debug, Clone)]
struct Request {
    function: FunctionId,
    arrival: u64,
    deadline: Timestamp,
    attempts: u8,
    on: Option<InstanceId>,
}

#[derive(Debug, Clone)]
struct Instance {
    function: FunctionId,
    service: Service,
    has: BTreeSet<RequestId>,
    draining: bool,
}

impl Instance {
    /// The instance's place among its function's instances with room; None without room.
    fn place(&self, id: InstanceId) -> Option<(usize, Duration, InstanceId)> {
        match self.service {
            Service::Exclusive { latency, capacity, .. }
                if !self.draining && self.has.len() < capacity as usize =>
            {
                Some((self.has.len(), latency, id))
            }
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Function {
    /// Waiting requests, by arrival.
    queue: BTreeMap<u64, RequestId>,
    /// Exclusive instances with room, by (number of requests, latency, name).
    free: BTreeSet<(usize, Duration, InstanceId)>,
    /// Latencies of all instances that are not draining.
    latencies: BTreeSet<(Duration, InstanceId)>,
    /// Requests per 10^15 ns of the instances in `latencies`.
    rate: u64,
    told_short: Option<Timestamp>,
}

impl Function {
    /// Time the function's instances need for its waiting requests.
    fn behind(&self) -> Duration {
        time_for(self.queue.len(), self.rate)
    }
}

/// Routes in the order of arrival: the engine of this module.
#[derive(Debug, Clone, Default)]
pub struct FirstCome {
    config: FirstComeConfig,
    last: Timestamp,
    arrivals: u64,
    requests: BTreeMap<RequestId, Request>,
    instances: BTreeMap<InstanceId, Instance>,
    functions: BTreeMap<FunctionId, Function>,
    /// Instances on each shared slice, without draining ones.
    on: BTreeMap<SharedSlice, BTreeSet<InstanceId>>,
    /// Number of running requests on each shared slice.
    running: BTreeMap<SharedSlice, usize>,
    /// Times for another look at functions that were short.
    again: BTreeSet<(Timestamp, FunctionId)>,
}

impl FirstCome {
    /// A router without instances.
    ///
    /// # Errors
    /// A field that is out of its bounds.
    pub fn new(config: FirstComeConfig) -> Result<Self, ConfigError> {
        gshare_core::check_fields!(config {
            max_waiting in 1.., "need more than 0";
            max_attempts in 1.., "need more than 0";
        })?;
        ConfigError::unless(!config.short_every.is_zero(), "short_every", 0, "need more than 0")?;
        Ok(Self { config, ..Self::default() })
    }

    fn check(&self, now: Timestamp, event: &RouteEvent) -> Result<(), RouteError> {
        let instance = |id| self.instances.get(&id).map(|instance| (instance.service, instance.draining));
        let request = |id| self.requests.get(&id).map(|request| request.on);
        check_event((now, self.last), event, instance, request)
    }

    /// Offers an instance to its function's requests.
    fn offer(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get(&id) else { return };
        let of = self.functions.entry(instance.function).or_default();
        of.latencies.insert((latency(&instance.service), id));
        of.rate = of.rate.saturating_add(rate(&instance.service));
        of.free.extend(instance.place(id));
        if let Some(at) = slice(&instance.service) {
            self.on.entry(at).or_default().insert(id);
            *self.running.entry(at).or_default() += instance.has.len();
        }
    }

    /// Stops offering an instance. Its running requests stay, and count for its slice until `leave`.
    fn withdraw(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get(&id).filter(|instance| !instance.draining) else { return };
        if let Some(of) = self.functions.get_mut(&instance.function) {
            of.latencies.remove(&(latency(&instance.service), id));
            of.rate = of.rate.saturating_sub(rate(&instance.service));
            if let Some(place) = instance.place(id) {
                of.free.remove(&place);
            }
        }
        if let Some(on) = slice(&instance.service).and_then(|at| self.on.get_mut(&at)) {
            on.remove(&id);
        }
    }

    /// Takes an instance's running requests from the count of its slice; returns the slice.
    fn leave(&mut self, instance: &Instance) -> Option<SharedSlice> {
        let at = slice(&instance.service)?;
        let running = self.running.get_mut(&at)?;
        *running = running.saturating_sub(instance.has.len());
        if *running == 0 && self.on.get(&at).is_none_or(BTreeSet::is_empty) {
            self.running.remove(&at);
            self.on.remove(&at);
        }
        Some(at)
    }

    /// Changes an instance's running requests, and its place among the instances with room.
    fn change(&mut self, id: InstanceId, change: impl FnOnce(&mut BTreeSet<RequestId>)) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let (before, had) = (instance.place(id), instance.has.len());
        change(&mut instance.has);
        if let Some(of) = self.functions.get_mut(&instance.function) {
            if let Some(before) = before {
                of.free.remove(&before);
            }
            of.free.extend(instance.place(id));
        }
        if let Some(running) = slice(&instance.service).and_then(|at| self.running.get_mut(&at)) {
            *running = *running + instance.has.len() - had;
        }
    }

    fn dispatch(&mut self, function: FunctionId, instance: InstanceId, actions: &mut Vec<RouteAction>) {
        let first = self.functions.get_mut(&function).and_then(|of| of.queue.pop_first());
        let Some((_, request)) = first else { return };
        if let Some(found) = self.requests.get_mut(&request) {
            found.on = Some(instance);
            found.attempts += 1;
        }
        self.change(instance, |has| {
            has.insert(request);
        });
        actions.push(RouteAction::Dispatch { request, instance });
    }

    /// Gives waiting requests of the function to its free instances.
    fn serve(&mut self, function: FunctionId, actions: &mut Vec<RouteAction>) {
        while let Some(of) = self.functions.get(&function)
            && !of.queue.is_empty()
            && let Some(&(.., instance)) = of.free.first()
        {
            self.dispatch(function, instance, actions);
        }
        let Some(of) = self.functions.get(&function).filter(|of| !of.queue.is_empty()) else { return };
        let slices: Vec<SharedSlice> =
            of.latencies.iter().filter_map(|(_, id)| slice(&self.instances.get(id)?.service)).collect();
        for at in slices {
            self.serve_slice(at, actions);
        }
    }

    /// Gives an idle slice the earliest request of the functions with an instance on it.
    fn serve_slice(&mut self, at: SharedSlice, actions: &mut Vec<RouteAction>) {
        if self.running.get(&at).is_none_or(|&running| running > 0) {
            return;
        }
        let first = |id: &InstanceId| {
            let function = self.instances.get(id)?.function;
            let (&arrival, _) = self.functions.get(&function)?.queue.first_key_value()?;
            Some((arrival, *id, function))
        };
        if let Some((_, instance, function)) = self.on.get(&at).into_iter().flatten().filter_map(first).min()
        {
            self.dispatch(function, instance, actions);
        }
    }

    /// Tells the host when the last request in the queue will be late.
    fn shortage(&mut self, now: Timestamp, function: FunctionId, actions: &mut Vec<RouteAction>) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let Some((_, last)) = of.queue.last_key_value() else { return };
        let deadline = self.requests.get(last).map_or(Timestamp::MAX, |request| request.deadline);
        let late = of.latencies.first().is_none_or(|&(fastest, _)| {
            deadline != Timestamp::MAX && now.saturating_add(of.behind()).saturating_add(fastest) > deadline
        });
        let every = self.config.short_every;
        if late && of.told_short.is_none_or(|told| now.saturating_since(told) >= every) {
            of.told_short = Some(now);
            let waiting = u32::try_from(of.queue.len()).unwrap_or(u32::MAX);
            actions.push(RouteAction::Short { function, waiting, behind: of.behind().min(MAX_TIME) });
            self.again.insert((now.saturating_add(every), function));
        }
    }

    fn arrived(
        &mut self,
        request: RequestId,
        of: FunctionId,
        deadline: Timestamp,
        actions: &mut Vec<RouteAction>,
    ) {
        let (function, arrival) = (of, self.arrivals);
        let queue = &mut self.functions.entry(function).or_default().queue;
        if queue.len() >= self.config.max_waiting as usize {
            actions.push(RouteAction::Reject { request, reason: RouteReject::QueueFull });
            return;
        }
        self.arrivals += 1;
        queue.insert(arrival, request);
        self.requests.insert(request, Request { function, arrival, deadline, attempts: 0, on: None });
        self.serve(function, actions);
    }

    /// Returns the requests of a lost instance to their earlier places in the queue.
    fn down(&mut self, id: InstanceId, actions: &mut Vec<RouteAction>) -> Option<FunctionId> {
        self.withdraw(id);
        let instance = self.instances.remove(&id)?;
        let idle = self.leave(&instance);
        for request in instance.has {
            let Some(found) = self.requests.get_mut(&request) else { continue };
            if found.attempts >= self.config.max_attempts {
                self.requests.remove(&request);
                actions.push(RouteAction::Reject { request, reason: RouteReject::AttemptsExhausted });
            } else {
                found.on = None;
                self.functions.entry(instance.function).or_default().queue.insert(found.arrival, request);
            }
        }
        self.serve(instance.function, actions);
        if let Some(at) = idle {
            self.serve_slice(at, actions);
        }
        Some(instance.function)
    }

    /// Rejects the function's waiting requests.
    fn remove(&mut self, function: FunctionId, actions: &mut Vec<RouteAction>) {
        let queue = self.functions.get_mut(&function).map(|of| core::mem::take(&mut of.queue));
        for (_, request) in queue.into_iter().flatten() {
            self.requests.remove(&request);
            actions.push(RouteAction::Reject { request, reason: RouteReject::Removed });
        }
    }

    /// Forgets a function without instances and waiting requests.
    fn tidy(&mut self, function: FunctionId) {
        if self.functions.get(&function).is_some_and(|of| of.queue.is_empty() && of.latencies.is_empty()) {
            self.functions.remove(&function);
        }
    }

    /// Acts on a checked event; returns the function whose queue or instances it changed.
    fn act(&mut self, event: RouteEvent, actions: &mut Vec<RouteAction>) -> Option<FunctionId> {
        match event {
            RouteEvent::InstanceUp { instance, function, service } => {
                let has = BTreeSet::new();
                self.instances.insert(instance, Instance { function, service, has, draining: false });
                self.offer(instance);
                self.serve(function, actions);
                Some(function)
            }
            RouteEvent::ServiceChanged { instance: id, service } => {
                self.withdraw(id);
                let instance = self.instances.get(&id)?.clone();
                let idle = self.leave(&instance);
                self.instances.get_mut(&id)?.service = service;
                self.offer(id);
                self.serve(instance.function, actions);
                if let Some(at) = idle {
                    self.serve_slice(at, actions);
                }
                Some(instance.function)
            }
            RouteEvent::InstanceDraining { instance: id } => {
                self.withdraw(id);
                let instance = self.instances.get_mut(&id)?;
                instance.draining = true;
                if instance.has.is_empty() {
                    actions.push(RouteAction::Drained { instance: id });
                }
                Some(instance.function)
            }
            RouteEvent::InstanceDown { instance } => self.down(instance, actions),
            RouteEvent::Arrived { request, function, deadline } => {
                self.arrived(request, function, deadline.unwrap_or(Timestamp::MAX), actions);
                Some(function)
            }
            RouteEvent::FunctionRemoved { function } => {
                self.remove(function, actions);
                Some(function)
            }
            RouteEvent::Completed { request, instance: id } => {
                self.requests.remove(&request);
                self.change(id, |has| {
                    has.remove(&request);
                });
                let instance = self.instances.get(&id)?;
                let (function, at) = (instance.function, slice(&instance.service));
                if instance.draining && instance.has.is_empty() {
                    actions.push(RouteAction::Drained { instance: id });
                }
                match at {
                    Some(at) => self.serve_slice(at, actions),
                    None => self.serve(function, actions),
                }
                Some(function)
            }
            RouteEvent::Cancelled { request } => {
                let Request { function, arrival, .. } = self.requests.remove(&request)?;
                self.functions.get_mut(&function)?.queue.remove(&arrival);
                Some(function)
            }
            // A load changes no order of arrival.
            _ => None,
        }
    }
}

impl Engine for FirstCome {
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
        while let Some(&(at, function)) = self.again.first()
            && at <= now
        {
            self.again.pop_first();
            self.shortage(now, function, actions);
        }
        if let Some(function) = self.act(event, actions) {
            self.shortage(now, function, actions);
            self.tidy(function);
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.again.first().map(|&(at, _)| at)
    }
}

impl Router for FirstCome {
    fn waiting(&self, function: FunctionId) -> usize {
        self.functions.get(&function).map_or(0, |of| of.queue.len())
    }

    fn outstanding(&self, instance: InstanceId) -> usize {
        self.instances.get(&instance).map_or(0, |instance| instance.has.len())
    }

    fn invariants(&self) {
        for (id, of) in &self.functions {
            assert!(of.queue.is_empty() || of.free.is_empty(), "{id} has requests waiting and room");
            for (_, one) in &of.latencies {
                let at = slice(&self.instances[one].service);
                let idle = at.is_some_and(|at| self.running[&at] == 0);
                assert!(of.queue.is_empty() || !idle, "{one} waits beside an idle slice");
            }
        }
        for (id, instance) in &self.instances {
            let offered = self
                .functions
                .get(&instance.function)
                .is_some_and(|of| of.free.iter().any(|free| free.2 == *id));
            assert_eq!(offered, instance.place(*id).is_some(), "{id}: free");
        }
        for (at, running) in &self.running {
            let on = self.instances.values().filter(|one| slice(&one.service) == Some(*at));
            assert_eq!(*running, on.map(|one| one.has.len()).sum::<usize>(), "{at}");
        }
        let waiting = self.functions.values().map(|of| of.queue.len()).sum::<usize>();
        let running = self.instances.values().map(|instance| instance.has.len()).sum::<usize>();
        assert_eq!(self.requests.len(), waiting + running, "a request is nowhere");
    }
}
