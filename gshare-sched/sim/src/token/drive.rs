//! Calling a scheduler under audit.

use super::check::Check;
use super::{Audit, Book, Terms};
use crate::story::Story;
use gshare_core::token::ClientStatus;
use gshare_core::{Timestamp, TokenAction, TokenError, TokenEvent, TokenScheduler};

/// A scheduler, the time, and an audit of every call.
///
/// The driver checks two facts beyond the [checkers](super::check): a refused call leaves the orders, the deadline and the status
/// of every client unchanged, and an accepted call only appends to the orders.
pub struct Driver {
    scheduler: Box<dyn TokenScheduler>,
    audit: Audit,
    now: Timestamp,
    /// The list starts with an order that no call may touch.
    actions: Vec<TokenAction>,
}

impl Driver {
    /// Drives a scheduler without clients, from the epoch on.
    pub fn new(scheduler: Box<dyn TokenScheduler>, terms: Terms, checks: Vec<Check>) -> Self {
        Self { scheduler, audit: Audit::new(terms, checks), now: Timestamp::ZERO, actions: Vec::new() }
    }

    /// The time of the last call.
    pub const fn now(&self) -> Timestamp {
        self.now
    }

    /// The book of tokens.
    pub const fn book(&self) -> &Book {
        self.audit.book()
    }

    /// The audit of all calls.
    pub const fn audit(&self) -> &Audit {
        &self.audit
    }

    /// The driven scheduler.
    pub fn scheduler(&self) -> &dyn TokenScheduler {
        &*self.scheduler
    }

    /// The orders of the last accepted call.
    pub fn actions(&self) -> &[TokenAction] {
        &self.actions
    }

    /// Calls the scheduler at `now`, and returns its answer. Only the scheduler checks that `now` is not before the last call. The
    /// error is a checker's violation.
    pub fn call(&mut self, now: Timestamp, event: TokenEvent) -> Result<Result<(), TokenError>, Story> {
        let before = Glance::of(self);
        let kept = self.actions.len();
        let last_orders = self.actions.clone();
        let answer = self.scheduler.handle(now, event, &mut self.actions);
        if self.actions.get(..kept) != Some(&last_orders[..]) {
            return Err(self.wrong("orders of earlier calls were touched".to_owned()));
        }
        if let Err(error) = answer {
            if self.actions.len() != kept || before != Glance::of(self) {
                return Err(self.wrong(format!("{event:?} was refused ({error}), and yet something changed")));
            }
            return Ok(Err(error));
        }
        self.now = now;
        self.actions.drain(..kept);
        self.audit.observe(now, event, &self.actions, &*self.scheduler)?;
        Ok(Ok(()))
    }

    /// Calls the scheduler with an event it has no reason to refuse.
    pub fn must(&mut self, now: Timestamp, event: TokenEvent) -> Result<(), Story> {
        self.call(now, event)?.map_err(|error| self.wrong(format!("{event:?} was refused: {error}")))
    }

    /// Calls the scheduler with an event it must refuse.
    pub fn must_refuse(&mut self, now: Timestamp, event: TokenEvent) -> Result<TokenError, Story> {
        match self.call(now, event)? {
            Err(error) => Ok(error),
            Ok(()) => Err(self.wrong(format!("{event:?} was not refused"))),
        }
    }

    /// Lets the time pass to `until`, and calls the scheduler at each of its deadlines on the way.
    pub fn advance(&mut self, until: Timestamp) -> Result<(), Story> {
        while let Some(deadline) = self.scheduler.next_deadline().filter(|&deadline| deadline <= until) {
            self.must(deadline.max(self.now), TokenEvent::DeadlineReached)?;
        }
        Ok(())
    }

    /// A violation found outside of the checkers.
    pub fn wrong(&self, message: String) -> Story {
        self.audit.violation("contract", self.now, message)
    }
}

gshare_core::debug_fields!(Driver { now, audit });

/// A scheduler's whole state as visible from outside.
#[derive(PartialEq)]
struct Glance {
    deadline: Option<Timestamp>,
    clients: Vec<Option<ClientStatus>>,
}

impl Glance {
    fn of(driver: &Driver) -> Self {
        let clients = driver.book().clients().map(|(id, _)| driver.scheduler.client(id)).collect();
        Self { deadline: driver.scheduler.next_deadline(), clients }
    }
}
