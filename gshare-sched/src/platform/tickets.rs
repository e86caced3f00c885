//! Requests of a pool, by the names that the pool gives them.
//!
//! # Problem
//! A routing engine keeps a request until its instance has answered. The pool may have to give the request up before: its caller
//! went away, or its deadline passed, while an instance was loaded for it. The request's name may then return at once, although the
//! engine still keeps the old request. The engine therefore knows requests by **tickets**, which are never used twice. When the
//! engine dispatches a ticket without a request, the pool answers it.

use crate::platform::{PoolError, PoolEvent, Regime};
use gshare_core::{FunctionId, InstanceId, RequestId, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

/// A request before its end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub(super) function: FunctionId,
    pub(super) ticket: RequestId,
    pub(super) deadline: Option<Timestamp>,
    /// The instance on which the host runs the request.
    pub(super) on: Option<InstanceId>,
}

/// The requests of a pool.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    next: u64,
    held: BTreeMap<RequestId, Held>,
    names: BTreeMap<RequestId, RequestId>,
    /// Deadlines of waiting requests.
    deadlines: BTreeSet<(Timestamp, RequestId)>,
    waiting: BTreeMap<FunctionId, usize>,
}

impl Tickets {
    /// Adds a waiting request and returns its ticket.
    pub(super) fn add(
        &mut self,
        request: RequestId,
        function: FunctionId,
        deadline: Option<Timestamp>,
    ) -> RequestId {
        let ticket = self.fresh();
        self.held.insert(request, Held { function, ticket, deadline, on: None });
        self.names.insert(ticket, request);
        self.enter(request);
        ticket
    }

    /// A new ticket without a request.
    pub(super) const fn fresh(&mut self) -> RequestId {
        self.next += 1;
        RequestId::new(self.next - 1)
    }

    fn enter(&mut self, request: RequestId) {
        let Some(held) = self.held.get(&request) else { return };
        *self.waiting.entry(held.function).or_default() += 1;
        self.deadlines.extend(held.deadline.map(|at| (at, request)));
    }

    fn leave(&mut self, request: RequestId, held: Held) {
        if let Some(waiting) = self.waiting.get_mut(&held.function) {
            *waiting -= 1;
            if *waiting == 0 {
                self.waiting.remove(&held.function);
            }
        }
        if let Some(at) = held.deadline {
            self.deadlines.remove(&(at, request));
        }
    }

    /// Refuses an event for a request that already exists, does not run, or does not wait.
    pub(super) fn check(&self, regime: Regime, event: &PoolEvent) -> Result<(), PoolError> {
        let runs = |request| self.get(request).map(|held| held.on.is_some());
        match *event {
            PoolEvent::Arrived { request, .. } if runs(request).is_some() => {
                Err(regime.refused(format_args!("{request} is already here")))
            }
            PoolEvent::Done { request, .. } if runs(request) != Some(true) => {
                Err(regime.unknown(format_args!("{request} as one that runs")))
            }
            PoolEvent::Cancelled { request } if runs(request) != Some(false) => {
                Err(regime.unknown(format_args!("{request} as one that waits")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn get(&self, request: RequestId) -> Option<&Held> {
        self.held.get(&request)
    }

    /// The request with this ticket.
    pub(super) fn holder(&self, ticket: RequestId) -> Option<RequestId> {
        self.names.get(&ticket).copied()
    }

    /// Gives a waiting request to an instance.
    pub(super) fn dispatch(&mut self, request: RequestId, on: InstanceId) {
        let Some(held) = self.held.get_mut(&request) else { return };
        held.on = Some(on);
        let held = *held;
        self.leave(request, held);
    }

    /// Returns the request of a gone instance to the waiting requests.
    pub(super) fn wait(&mut self, request: RequestId) {
        if let Some(held) = self.held.get_mut(&request)
            && held.on.take().is_some()
        {
            self.enter(request);
        }
    }

    /// Forgets an ended request.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Held> {
        let held = self.held.remove(&request)?;
        self.names.remove(&held.ticket);
        if held.on.is_none() {
            self.leave(request, held);
        }
        Some(held)
    }

    /// A waiting request with a deadline at or before `now`.
    pub(super) fn expired(&self, now: Timestamp) -> Option<RequestId> {
        self.deadlines.first().filter(|(at, _)| *at <= now).map(|(_, request)| *request)
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// The function's waiting requests, by name.
    pub(super) fn waiting_of(&self, function: FunctionId) -> Vec<RequestId> {
        let waits = |held: &Held| held.function == function && held.on.is_none();
        self.held.iter().filter(|(_, held)| waits(held)).map(|(request, _)| *request).collect()
    }

    pub(super) fn waiting(&self, function: FunctionId) -> usize {
        self.waiting.get(&function).copied().unwrap_or(0)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (RequestId, &Held)> {
        self.held.iter().map(|(request, held)| (*request, held))
    }

    /// Checks the invariants between events.
    pub(super) fn invariants(&self) {
        assert_eq!(self.held.len(), self.names.len(), "requests and tickets");
        let mut waiting: BTreeMap<FunctionId, usize> = BTreeMap::new();
        let mut deadlines = BTreeSet::new();
        for (request, held) in &self.held {
            assert_eq!(self.names.get(&held.ticket), Some(request), "ticket of {request}");
            if held.on.is_none() {
                *waiting.entry(held.function).or_default() += 1;
                deadlines.extend(held.deadline.map(|at| (at, *request)));
            }
        }
        assert_eq!(waiting, self.waiting, "requests that wait");
        assert_eq!(deadlines, self.deadlines, "deadlines of requests that wait");
    }
}
