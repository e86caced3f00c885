//! Routing in the order of arrival: the baseline that scenarios call `first_come`.
//!
//! A gateway without knowledge of deadlines keeps one queue for each function, and so does this router:
//! 1. requests of a function wait in the order of their arrival, regardless of their deadlines;
//! 2. the first one goes to the exclusive instance with room and the fewest requests; among equals, to the fastest;
//! 3. an idle shared slice takes the earliest request of all functions with an instance on it;
//! 4. a function is short while its instances need longer for its waiting requests than its last request's deadline allows.
//!
//! Each event looks at all instances, of which a scenario has few. Its caller is a platform, so it refuses no event.

use gshare_core::dag::MAX_TIME;
use gshare_core::{Duration, Engine, FunctionId, InstanceId, RequestId, SharedSlice, Timestamp};
use gshare_sched::pipeline::{RouteAction, RouteError, RouteEvent, RouteReject, Router, Service};
use std::collections::{BTreeMap, BTreeSet};

/// Least time between two shortages of a function, as our router has it.
const SHORT_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Request {
    function: FunctionId,
    arrival: u64,
    deadline: Timestamp,
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    service: Service,
    has: BTreeSet<RequestId>,
    draining: bool,
}

impl Instance {
    fn latency(&self) -> Duration {
        match self.service {
            Service::Exclusive { latency, .. } | Service::Shared { latency, .. } => latency,
            _ => Duration::MAX,
        }
    }

    fn slice(&self) -> Option<SharedSlice> {
        match self.service {
            Service::Shared { slice, .. } => Some(slice),
            _ => None,
        }
    }

    fn has_room(&self) -> bool {
        matches!(self.service, Service::Exclusive { capacity, .. } if self.has.len() < capacity as usize)
    }

    /// Requests per 10^15 ns.
    fn rate(&self) -> u64 {
        let interval = match self.service {
            Service::Exclusive { interval, .. } => interval,
            _ => self.latency(),
        };
        1_000_000_000_000_000 / interval.as_nanos().max(1)
    }
}

/// Routes in the order of arrival. See the [module](self).
#[derive(Debug, Default)]
pub struct FirstCome {
    arrivals: u64,
    requests: BTreeMap<RequestId, Request>,
    instances: BTreeMap<InstanceId, Instance>,
    /// Waiting requests of each function, by arrival.
    queues: BTreeMap<FunctionId, BTreeMap<u64, RequestId>>,
    told_short: BTreeMap<FunctionId, Timestamp>,
    /// Times for another look at functions that were short.
    again: BTreeSet<(Timestamp, FunctionId)>,
}

impl FirstCome {
    /// Instances that take requests.
    fn open(&self) -> impl Iterator<Item = (InstanceId, &Instance)> {
        self.instances.iter().filter(|(_, one)| !one.draining).map(|(id, one)| (*id, one))
    }

    fn first(&self, function: FunctionId) -> Option<u64> {
        self.queues.get(&function)?.first_key_value().map(|(arrival, _)| *arrival)
    }

    fn dispatch(&mut self, function: FunctionId, instance: InstanceId, actions: &mut Vec<RouteAction>) {
        let first = self.queues.get_mut(&function).and_then(BTreeMap::pop_first);
        let (_, request) = first.expect("a function with a request");
        self.instances.get_mut(&instance).expect("an instance that is up").has.insert(request);
        actions.push(RouteAction::Dispatch { request, instance });
    }

    /// Gives waiting requests of the function to its instances.
    fn serve(&mut self, function: FunctionId, actions: &mut Vec<RouteAction>) {
        while self.first(function).is_some() {
            let free = self.open().filter(|(_, one)| one.function == function && one.has_room());
            let Some((_, id)) = free.map(|(id, one)| ((one.has.len(), one.latency(), id), id)).min() else {
                break;
            };
            self.dispatch(function, id, actions);
        }
        if self.first(function).is_none() {
            return;
        }
        let mine = self.open().filter(|(_, one)| one.function == function);
        let mut slices: Vec<_> =
            mine.filter_map(|(id, one)| Some((one.latency(), id, one.slice()?))).collect();
        slices.sort_unstable();
        for (.., at) in slices {
            self.serve_slice(at, actions);
        }
    }

    /// Gives an idle slice the earliest request of the functions with an instance on it.
    fn serve_slice(&mut self, at: SharedSlice, actions: &mut Vec<RouteAction>) {
        if self.instances.values().any(|one| one.slice() == Some(at) && !one.has.is_empty()) {
            return;
        }
        let on = self.open().filter(|(_, one)| one.slice() == Some(at));
        let next = on.filter_map(|(id, one)| Some((self.first(one.function)?, id, one.function))).min();
        if let Some((_, instance, function)) = next {
            self.dispatch(function, instance, actions);
        }
    }

    /// Tells the host when the last request in the queue will be late.
    fn shortage(&mut self, now: Timestamp, function: FunctionId, actions: &mut Vec<RouteAction>) {
        let mine = || self.open().filter(|(_, one)| one.function == function).map(|(_, one)| one);
        let queue = self.queues.get(&function).filter(|queue| !queue.is_empty());
        let Some(queue) = queue else {
            if mine().next().is_none() {
                self.told_short.remove(&function);
            }
            return;
        };
        let deadline =
            queue.last_key_value().map_or(Timestamp::MAX, |(_, last)| self.requests[last].deadline);
        let rate = mine().map(Instance::rate).fold(0, u64::saturating_add).max(1);
        let behind = queue.len() as u128 * 1_000_000_000_000_000 / u128::from(rate);
        let behind = Duration::from_wide_nanos(behind);
        let late = mine().map(Instance::latency).min().is_none_or(|fastest| {
            deadline != Timestamp::MAX && now.saturating_add(behind).saturating_add(fastest) > deadline
        });
        let told = self.told_short.get(&function);
        if late && told.is_none_or(|told| now.saturating_since(*told) >= SHORT_EVERY) {
            let waiting = u32::try_from(queue.len()).unwrap_or(u32::MAX);
            actions.push(RouteAction::Short { function, waiting, behind: behind.min(MAX_TIME) });
            self.told_short.insert(function, now);
            self.again.insert((now.saturating_add(SHORT_EVERY), function));
        }
    }

    /// Returns the requests of a lost instance to their earlier places in the queue.
    fn down(&mut self, instance: &Instance, actions: &mut Vec<RouteAction>) {
        for &request in &instance.has {
            let arrival = self.requests[&request].arrival;
            self.queues.entry(instance.function).or_default().insert(arrival, request);
        }
        self.serve(instance.function, actions);
        if let Some(at) = instance.slice() {
            self.serve_slice(at, actions);
        }
    }

    fn drained(&self, instance: InstanceId, actions: &mut Vec<RouteAction>) {
        let one = &self.instances[&instance];
        if one.draining && one.has.is_empty() {
            actions.push(RouteAction::Drained { instance });
        }
    }

    /// Acts on an event; returns the function with a changed queue or changed instances.
    fn act(&mut self, event: RouteEvent, actions: &mut Vec<RouteAction>) -> Option<FunctionId> {
        match event {
            RouteEvent::InstanceUp { instance, function, service } => {
                let has = BTreeSet::new();
                self.instances.insert(instance, Instance { function, service, has, draining: false });
                self.serve(function, actions);
                Some(function)
            }
            RouteEvent::ServiceChanged { instance, service } => {
                let one = self.instances.get_mut(&instance)?;
                let (before, function) = (one.slice(), one.function);
                one.service = service;
                self.serve(function, actions);
                if let Some(at) = before {
                    self.serve_slice(at, actions);
                }
                Some(function)
            }
            RouteEvent::InstanceDraining { instance } => {
                let one = self.instances.get_mut(&instance)?;
                one.draining = true;
                let function = one.function;
                self.drained(instance, actions);
                Some(function)
            }
            RouteEvent::InstanceDown { instance } => {
                let one = self.instances.remove(&instance)?;
                self.down(&one, actions);
                Some(one.function)
            }
            RouteEvent::Arrived { request, function, deadline } => {
                let (arrival, deadline) = (self.arrivals, deadline.unwrap_or(Timestamp::MAX));
                self.arrivals += 1;
                self.requests.insert(request, Request { function, arrival, deadline });
                self.queues.entry(function).or_default().insert(arrival, request);
                self.serve(function, actions);
                Some(function)
            }
            RouteEvent::FunctionRemoved { function } => {
                for (_, request) in self.queues.remove(&function).into_iter().flatten() {
                    self.requests.remove(&request);
                    actions.push(RouteAction::Reject { request, reason: RouteReject::Removed });
                }
                Some(function)
            }
            RouteEvent::Completed { request, instance } => {
                self.requests.remove(&request);
                let one = self.instances.get_mut(&instance)?;
                one.has.remove(&request);
                let (function, at) = (one.function, one.slice());
                self.drained(instance, actions);
                match at {
                    Some(at) => self.serve_slice(at, actions),
                    None => self.serve(function, actions),
                }
                Some(function)
            }
            RouteEvent::Cancelled { request } => {
                let Request { function, arrival, .. } = self.requests.remove(&request)?;
                self.queues.get_mut(&function)?.remove(&arrival);
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
        while let Some(&(at, function)) = self.again.first()
            && at <= now
        {
            self.again.pop_first();
            self.shortage(now, function, actions);
        }
        if let Some(function) = self.act(event, actions) {
            self.shortage(now, function, actions);
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.again.first().map(|&(at, _)| at)
    }
}

impl Router for FirstCome {
    fn waiting(&self, function: FunctionId) -> usize {
        self.queues.get(&function).map_or(0, BTreeMap::len)
    }

    fn outstanding(&self, instance: InstanceId) -> usize {
        self.instances.get(&instance).map_or(0, |instance| instance.has.len())
    }
}
