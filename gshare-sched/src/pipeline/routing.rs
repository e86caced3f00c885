//! Routing by slack: the instance that serves each request, and the time at which it begins.
//!
//! # Problem
//! The instances of a function differ: some own their slices, as a whole or as pipelines, others share a slice and may have
//! to be loaded first. From deadlines and latencies the router decides where each request runs (FluidFaaS, section 5.3,
//! "Request Routing").
//!
//! # Terms
//! - an **exclusive** instance owns its slices and holds up to `capacity` requests; a **shared** instance is one of several
//!   on a slice, which runs one request at a time;
//! - **load**: time until a shared instance could begin, 0 while it is resident;
//! - **slack** of a request on an instance: deadline - latency - load, the latest time to begin;
//! - **late**: the current time is past the slack on the function's fastest instance.
//!
//! # Algorithm
//! 1. A function's requests wait in one queue by (deadline, arrival). No request is bound to an instance before it starts,
//!    so none waits behind a slow instance while a fast one is free.
//! 2. The pool asks for an exclusive instance with room first, the least latency first (section 5.3).
//! 3. The remaining requests wait for shared instances. An idle shared slice takes the instance of the function with the
//!    least **slack** of its first request (see `Entry`). Instances to be loaded that would be late anyway wait a while
//!    ([`RouterConfig::stay_loads`]).
//! 4. An instance takes the first request of its function that *it* answers in time: a slow instance, or one to be loaded,
//!    passes over requests that only a faster one can still save. Without such a request it serves a late one, else the
//!    first.
//! 5. **Late** requests ([`Late`]): under overload an order by deadline serves exactly the lost requests, so by default a
//!    late request waits behind all requests that can be in time, until it is **overdue** ([`RouterConfig::late_wait`]) and
//!    goes before all others.
//! 6. **Shortage**: the function's instances need longer for the queue than a waiting request's slack.
//!
//! # Invariants
//! No entry of a slice's order is above its exact place, and each function with waiting requests has an entry for each of its
//! shared instances.
//!
//! # Cost
//! O(log n) per change and answer in instances and waiting requests, and per corrected entry (see `Entry`). Memory: waiting
//! requests and shared instances.
//!
//! # Differences from the paper
//! The paper binds each request on arrival to an instance's queue, and its slack has one load. Here the queue is the
//! function's, slack follows residency, and a load has to pay. [`Late`] requests and admission control are additions.

mod shared_slices;

use super::router_config::{Late, RouterConfig};
use crate::pipeline::{AssignedSlice, Change, Offer, Offers, Route, Service};
use gshare_core::{Duration, FunctionId, InstanceId, RequestId, Timestamp};
use shared_slices::{Entry, Slice, unknown};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

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
type Turn = (Timestamp, RequestId);

#[derive(Debug, Clone, Default)]
struct Function {
    on_time: BTreeSet<Turn>,
    /// Requests that can no longer be in time.
    late: BTreeSet<Turn>,
    /// The time from which the first late request is overdue, if no event changes the function before. None without a late
    /// request.
    overdue_at: Option<Timestamp>,
    /// Whether the first late request is overdue.
    overdue: bool,
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
        let late = self.late.first().map(|turn| turn.0);
        let overdue = late.filter(|_| self.overdue).map(Head::OnTime);
        let on_time = || self.on_time.first().map(|turn| Head::OnTime(turn.0));
        overdue.or_else(on_time).or(late.map(Head::Late)).unwrap_or_default()
    }
}

/// Routes by slack: the policy of this module.
#[derive(Debug, Clone, Default)]
pub struct SlackRouter {
    config: RouterConfig,
    last: Timestamp,
    functions: BTreeMap<FunctionId, Function>,
    /// The entry of each shared instance in its slice's order, at most at the place that the function's first request gives;
    /// None without a first request.
    entries: BTreeMap<InstanceId, Option<Entry>>,
    slices: BTreeMap<AssignedSlice, Slice>,
    /// Deadlines of waiting requests, kept with [`Late::Reject`] only.
    expiring: BTreeSet<(Timestamp, RequestId, FunctionId)>,
    /// Requests to be rejected.
    refused: VecDeque<RequestId>,
    /// Times at which the first late request of a function becomes overdue.
    to_be_overdue: BTreeSet<(Timestamp, FunctionId)>,
}

impl SlackRouter {
    /// A router without instances.
    pub fn new(config: RouterConfig) -> Self {
        Self { config, ..Self::default() }
    }

    fn offered(&mut self, offers: &Offers, id: InstanceId) {
        let Some(offer) = offers.get(id) else { return };
        self.functions.entry(offer.function).or_default();
        if let Some(slice) = offer.service.slice() {
            self.slices.entry(slice).or_default().instances += 1;
            self.entries.insert(id, None);
            self.unsettle(offers, id);
        }
        self.weigh(offers, offer.function);
        self.sift(offers, offer.function);
    }

    fn withdrawn(&mut self, offers: &Offers, id: InstanceId, offer: &Offer) {
        if let Some(at) = offer.service.slice()
            && let Some(slice) = self.slices.get_mut(&at)
        {
            slice.replace(self.entries.remove(&id).flatten(), None, Duration::ZERO);
            slice.instances -= 1;
            if slice.instances == 0 {
                self.slices.remove(&at);
            }
        }
        if let Some(of) = self.functions.get_mut(&offer.function) {
            of.placed.remove(&id);
        }
        self.weigh(offers, offer.function);
        self.reorder(offers, offer.function);
        self.tidy(offers, offer.function);
    }

    /// Puts a request into its function's queue.
    fn waits(&mut self, offers: &Offers, function: FunctionId, turn: Turn) {
        if self.config.late == Late::Reject {
            if offers.fastest(function).is_some() && self.too_slow(offers, function, turn.0) {
                return self.refused.push_back(turn.1);
            }
            if turn.0 != Timestamp::MAX {
                self.expiring.insert((turn.0, turn.1, function));
            }
        }
        self.functions.entry(function).or_default().on_time.insert(turn);
        self.weigh(offers, function);
        self.sift(offers, function);
    }

    /// Takes a request out of its function's queue.
    fn left(&mut self, offers: &Offers, function: FunctionId, turn: Turn, to: Option<InstanceId>) {
        self.dequeue(offers, function, turn);
        if let Some(Offer { service: Service::Shared { slice, latency, load }, .. }) =
            to.and_then(|to| offers.get(to))
            && let Some(slice) = self.slices.get_mut(&slice)
        {
            let since = if load.is_zero() { slice.worked } else { Duration::ZERO };
            slice.worked = since.saturating_add(latency);
        }
    }

    fn dequeue(&mut self, offers: &Offers, function: FunctionId, turn: Turn) {
        if let Some(of) = self.functions.get_mut(&function)
            && !of.on_time.remove(&turn)
        {
            of.late.remove(&turn);
        }
        self.expiring.remove(&(turn.0, turn.1, function));
        self.weigh(offers, function);
        self.reorder(offers, function);
        self.tidy(offers, function);
    }

    /// Time the function's instances need for its waiting requests.
    fn behind(&self, offers: &Offers, function: FunctionId) -> Duration {
        offers.time_for(function, self.waiting(function))
    }

    /// Computes the time from which the first late request is overdue; to be called when a function's queue or rate has
    /// changed.
    ///
    /// Waiting is unavoidable where slices lack time: if few requests are late they wait long, and without a bound until the
    /// end of the overload. The bound follows the function's backlog *at that time*. The backlog at the moment a request became
    /// late would not do: the first late request of a burst would be served in its midst, in place of a request that can be in
    /// time, and the last would wait as if the burst continued. Where the backlog stays at `b` and late requests wait for `m`
    /// times `b`, one request in `m` is late.
    fn weigh(&mut self, offers: &Offers, function: FunctionId) {
        let behind = self.behind(offers, function);
        let Some(of) = self.functions.get_mut(&function) else { return };
        let at = of.late.first().map(|turn| self.config.overdue_at(turn.0, behind));
        if let Some(before) = of.overdue_at.filter(|_| !of.overdue && of.overdue_at != at) {
            self.to_be_overdue.remove(&(before, function));
        }
        of.overdue_at = at;
        of.overdue = at.is_some_and(|at| at <= self.last);
        if let Some(at) = at.filter(|_| !of.overdue) {
            self.to_be_overdue.insert((at, function));
        }
    }

    /// Moves or refuses requests at the head of the queue that have become late.
    fn sift(&mut self, offers: &Offers, function: FunctionId) {
        let Some(fastest) = offers.fastest(function).filter(|_| self.config.late != Late::InOrder) else {
            return self.reorder(offers, function);
        };
        while let Some(of) = self.functions.get_mut(&function)
            && let Some(&turn) = of.on_time.first()
            && self.last.saturating_add(fastest) > turn.0
        {
            of.on_time.remove(&turn);
            if self.config.late == Late::Reject {
                self.expiring.remove(&(turn.0, turn.1, function));
                self.refused.push_back(turn.1);
            } else {
                of.late.insert(turn);
            }
            self.weigh(offers, function);
        }
        self.reorder(offers, function);
    }

    /// Puts late requests first once they are overdue.
    fn promote(&mut self, offers: &Offers) {
        while let Some(&(at, function)) = self.to_be_overdue.first()
            && at <= self.last
        {
            self.to_be_overdue.pop_first();
            if let Some(of) = self.functions.get_mut(&function) {
                of.overdue = true;
            }
            self.reorder(offers, function);
        }
    }

    /// The request for an instance that answers after `latency`: an overdue request, else the first request it answers in time,
    /// else a late request, else the first.
    fn pick(&self, function: FunctionId, latency: Duration) -> Option<RequestId> {
        let of = self.functions.get(&function)?;
        let first = of.on_time.first();
        if self.config.late == Late::InOrder {
            return first.map(|turn| turn.1);
        }
        let from = (self.last.saturating_add(latency), RequestId::new(0));
        let in_time = first.filter(|turn| **turn >= from).or_else(|| of.on_time.range(from..).next());
        let late = of.late.first();
        late.filter(|_| of.overdue).or(in_time).or(late).or(first).map(|turn| turn.1)
    }

    /// Whether the function's instances need longer for its waiting requests than until `deadline`.
    fn too_slow(&self, offers: &Offers, function: FunctionId, deadline: Timestamp) -> bool {
        let Some(fastest) = offers.fastest(function) else { return true };
        let behind = self.behind(offers, function);
        deadline != Timestamp::MAX && self.last.saturating_add(behind).saturating_add(fastest) > deadline
    }

    /// Forgets a function without instances and waiting requests.
    fn tidy(&mut self, offers: &Offers, function: FunctionId) {
        if self.waiting(function) == 0 && offers.fastest(function).is_none() {
            self.functions.remove(&function);
        }
    }

    /// Refuses the requests whose deadline has come.
    fn expire(&mut self, offers: &Offers) {
        while let Some(&(deadline, request, function)) = self.expiring.first()
            && deadline <= self.last
        {
            self.dequeue(offers, function, (deadline, request));
            self.refused.push_back(request);
        }
    }

    fn turned(&mut self, now: Timestamp, offers: &Offers) {
        self.last = now;
        self.promote(offers);
        self.expire(offers);
    }
}

impl Route for SlackRouter {
    fn note(&mut self, now: Timestamp, offers: &Offers, change: Change) {
        self.turned(now, offers);
        match change {
            Change::Waits { request, function, due } => {
                self.waits(offers, function, (due.unwrap_or(Timestamp::MAX), request));
            }
            Change::Left { request, function, due, to } => {
                self.left(offers, function, (due.unwrap_or(Timestamp::MAX), request), to);
            }
            Change::Offered { instance } => self.offered(offers, instance),
            Change::Withdrawn { instance, offer } => self.withdrawn(offers, instance, &offer),
            Change::LoadChanged { instance } => {
                if self.entries.get(&instance).is_some_and(Option::is_some) {
                    self.unsettle(offers, instance);
                }
            }
        }
    }

    fn next(&mut self, now: Timestamp, offers: &Offers, instance: InstanceId) -> Option<RequestId> {
        self.turned(now, offers);
        let Offer { function, service } = offers.get(instance)?;
        self.sift(offers, function);
        self.pick(function, service.latency())
    }

    fn next_on(
        &mut self,
        now: Timestamp,
        offers: &Offers,
        slice: AssignedSlice,
    ) -> Option<(InstanceId, RequestId)> {
        self.turned(now, offers);
        loop {
            let (late, _, id) = self.least_on(offers, slice)?;
            let Offer { function, service: Service::Shared { latency, load, .. } } = offers.get(id)? else {
                return None;
            };
            // The head may have become late meanwhile, which changes the order.
            self.sift(offers, function);
            let head = self.functions.get(&function)?.head().request();
            if head.is_some_and(|(now_late, _)| now_late == late) {
                return Some((id, self.pick(function, latency.saturating_add(load))?));
            }
        }
    }

    fn late(&mut self, now: Timestamp, offers: &Offers) -> Option<RequestId> {
        self.turned(now, offers);
        self.refused.pop_front()
    }

    fn is_short(&self, _: Timestamp, offers: &Offers, function: FunctionId) -> bool {
        self.functions.get(&function).is_some_and(|of| {
            let last = of.on_time.last().map(|turn| turn.0);
            !of.late.is_empty() || last.is_some_and(|last| self.too_slow(offers, function, last))
        })
    }

    fn waiting(&self, function: FunctionId) -> usize {
        self.functions.get(&function).map_or(0, Function::waiting)
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.expiring.first().map(|&(deadline, ..)| deadline)
    }

    fn invariants(&self, offers: &Offers) {
        for (id, of) in &self.functions {
            assert_eq!(of.stands, of.head(), "{id}: entries were not looked at");
            let behind = self.behind(offers, *id);
            let at = of.late.first().map(|turn| self.config.overdue_at(turn.0, behind));
            let overdue = at.is_some_and(|at| at <= self.last);
            assert_eq!((at, overdue), (of.overdue_at, of.overdue), "{id}: overdue");
        }
        let mut shared = 0;
        for (id, Offer { function, service }, _) in offers.all() {
            let Service::Shared { slice, latency, load } = service else { continue };
            shared += 1;
            let (of, slice) = (self.functions.get(&function), &self.slices[&slice]);
            let nanos = |time: Duration| i128::from(time.as_nanos());
            let exact = of.and_then(|of| of.head().request()).map(|(late, deadline)| {
                (late, i128::from(deadline.as_nanos()) - nanos(latency) - nanos(load))
            });
            let entry = self.entries[&id];
            let stands = entry.map(|(late, slack, _)| (late, slack));
            assert!(exact.is_none_or(|exact| stands.is_some_and(|stands| stands <= exact)), "{id}: order");
            let placed = of.is_some_and(|of| of.placed.contains(&id));
            assert!(of.is_none() || placed == (entry != Some(unknown(id))), "{id}: placed");
            let on = if load.is_zero() { &slice.ready } else { &slice.cold };
            assert!(entry.is_none_or(|entry| on.contains(&entry)), "{id}: entry");
        }
        let counted: u32 = self.slices.values().map(|slice| slice.instances).sum();
        assert_eq!((self.entries.len(), counted as usize), (shared, shared), "shared instances");
        let to_be = |(id, of): (&FunctionId, &Function)| Some((of.overdue_at.filter(|_| !of.overdue)?, *id));
        let to_be: BTreeSet<_> = self.functions.iter().filter_map(to_be).collect();
        assert_eq!(to_be, self.to_be_overdue, "times of functions whose late requests are not overdue");
    }
}
