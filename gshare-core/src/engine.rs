//! The one shape of every engine, and what all of them refuse.

use crate::units::Timestamp;

/// A decision engine: told the time and what happened, it answers with orders.
///
/// An engine owns no clock, thread, file, socket, log or source of randomness; equal inputs give equal outputs on
/// every machine. A host drives it in a loop:
///
/// 1. wait for the next event, but not beyond [`next_deadline`](Engine::next_deadline);
/// 2. call [`handle`](Engine::handle) with the time and the event (at a deadline: the engine's `DeadlineReached`);
/// 3. carry out the actions, in order.
///
/// # Contract
/// - `now` never goes back; an engine that is told an earlier time answers with an error.
/// - `Err` means that nothing changed and that `actions` was left as it was.
/// - `actions` is appended to, never cleared: the caller owns (and reuses) the buffer.
/// - Events may come late. An engine first does what its deadlines before `now` asked for, then handles the event.
pub trait Engine {
    /// Something that happened outside and that the engine is told of.
    type Event;
    /// An order that the caller carries out.
    type Action;
    /// Why an event was refused.
    type Error: core::error::Error;

    /// Takes one event at time `now` and appends the orders that follow from it.
    fn handle(
        &mut self,
        now: Timestamp,
        event: Self::Event,
        actions: &mut Vec<Self::Action>,
    ) -> Result<(), Self::Error>;

    /// The same, with the orders in a list of their own.
    fn orders(&mut self, now: Timestamp, event: Self::Event) -> Result<Vec<Self::Action>, Self::Error> {
        let mut actions = Vec::new();
        self.handle(now, event, &mut actions)?;
        Ok(actions)
    }

    /// When the engine wants to be called again even if nothing happens; `None` when it has nothing to wait for.
    fn next_deadline(&self) -> Option<Timestamp>;
}

/// Every engine refuses an event whose time is before that of the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("time went back: now {now}, last event at {last}")]
pub struct TimeWentBack {
    /// The time given.
    pub now: Timestamp,
    /// The latest time seen.
    pub last: Timestamp,
}

impl TimeWentBack {
    /// Refuses a time before that of the last event.
    ///
    /// # Errors
    /// When `now` is before `last`.
    pub fn check(now: Timestamp, last: Timestamp) -> Result<(), Self> {
        if now < last { Err(Self { now, last }) } else { Ok(()) }
    }
}

impl<E: Engine + ?Sized> Engine for Box<E> {
    type Event = E::Event;
    type Action = E::Action;
    type Error = E::Error;

    fn handle(
        &mut self,
        now: Timestamp,
        event: Self::Event,
        actions: &mut Vec<Self::Action>,
    ) -> Result<(), Self::Error> {
        (**self).handle(now, event, actions)
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        (**self).next_deadline()
    }
}
