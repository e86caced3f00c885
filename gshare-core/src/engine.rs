//! The shape of every engine, and the error common to all engines.

use crate::units::Timestamp;

/// A decision engine, which answers the time and an event with orders.
///
/// An engine owns no clock, thread, file, socket, log or source of randomness; equal inputs give equal outputs on
/// every machine. A host drives it in a loop:
///
/// 1. wait for the next event, but not beyond [`next_deadline`](Engine::next_deadline);
/// 2. call [`handle`](Engine::handle) with the time and the event (at a deadline: the engine's `DeadlineReached`);
/// 3. carry out the actions, in order.
///
/// # Contract
/// - `now` never goes back; an engine answers an earlier time with an error.
/// - After `Err` the engine and `actions` are as before the call.
/// - An engine appends to `actions` and never clears it, since the caller owns and reuses the buffer.
/// - Events may come late, so an engine first obeys its deadlines before `now` and then handles the event.
pub trait Engine {
    /// A fact from outside, reported by the host.
    type Event;
    /// An order for the caller to carry out.
    type Action;
    /// Why an event was refused.
    type Error: core::error::Error;

    /// Takes one event at time `now` and appends the resulting orders.
    fn handle(
        &mut self,
        now: Timestamp,
        event: Self::Event,
        actions: &mut Vec<Self::Action>,
    ) -> Result<(), Self::Error>;

    /// Takes one event like [`handle`](Engine::handle), and returns the orders in a new list.
    fn orders(&mut self, now: Timestamp, event: Self::Event) -> Result<Vec<Self::Action>, Self::Error> {
        let mut actions = Vec::new();
        self.handle(now, event, &mut actions)?;
        Ok(actions)
    }

    /// The time of the engine's next call without an event; `None` while the engine waits for events only.
    fn next_deadline(&self) -> Option<Timestamp>;
}

/// The refusal of an event with an earlier time than the last event, common to all engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("time went back: now {now}, last event at {last}")]
pub struct TimeWentBack {
    /// The time of the refused event.
    pub now: Timestamp,
    /// The latest time so far.
    pub last: Timestamp,
}

impl TimeWentBack {
    /// Checks `now` against the latest time so far.
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
