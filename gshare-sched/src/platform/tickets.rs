//! Requests of a pool, by the names that the pool gives them.
//!
//! # Problem
//! A routing engine keeps a request until its instance has answered. The pool may have to give the request up before: its caller
//! went away, or it has waited too long, while an instance was loaded for it. The request's name may then return at once, although the
//! engine still keeps the old request. The engine therefore knows requests by **tickets**, which are never used twice. When the
//! engine dispatches a ticket without a request, the pool answers it.

use gshare_core::{FunctionId, InstanceId, RequestId};
use std::collections::BTreeMap;

/// A request before its end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub(super) function: FunctionId,
    pub(super) ticket: RequestId,
    /// The instance on which the host runs the request.
    pub(super) on: Option<InstanceId>,
}

/// The requests of a pool.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    next: u64,
    held: BTreeMap<RequestId, Held>,
    names: BTreeMap<RequestId, RequestId>,
    waiting: BTreeMap<FunctionId, usize>,
}

impl Tickets {
    /// Adds a waiting request and returns its ticket.
    pub(super) fn add(&mut self, request: RequestId, function: FunctionId) -> RequestId {
        let ticket = self.fresh();
        self.held.insert(request, Held { function, ticket, on: None });
        self.names.insert(ticket, request);
        *self.waiting.entry(function).or_default() += 1;
        ticket
    }

    /// A new ticket without a request.
    pub(super) const fn fresh(&mut self) -> RequestId {
        self.next += 1;
        RequestId::new(self.next - 1)
    }

    fn leave(&mut self, function: FunctionId) {
        if let Some(waiting) = self.waiting.get_mut(&function) {
            *waiting -= 1;
            if *waiting == 0 {
                self.waiting.remove(&function);
            }
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
        let function = held.function;
        self.leave(function);
    }

    /// Returns the request of a gone instance to the waiting requests.
    pub(super) fn wait(&mut self, request: RequestId) {
        if let Some(held) = self.held.get_mut(&request)
            && held.on.take().is_some()
        {
            *self.waiting.entry(held.function).or_default() += 1;
        }
    }

    /// Forgets an ended request.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Held> {
        let held = self.held.remove(&request)?;
        self.names.remove(&held.ticket);
        if held.on.is_none() {
            self.leave(held.function);
        }
        Some(held)
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
        for (request, held) in &self.held {
            assert_eq!(self.names.get(&held.ticket), Some(request), "ticket of {request}");
            if held.on.is_none() {
                *waiting.entry(held.function).or_default() += 1;
            }
        }
        assert_eq!(waiting, self.waiting, "requests that wait");
    }
}
