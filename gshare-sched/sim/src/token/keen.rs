//! Clients that always want more: they use what they are given at once and to the nanosecond, give it back the moment it
//! is used up, and ask again, or ask ahead of time.

use super::Violation;
use super::drive::Driver;
use crate::event_queue::EventQueue;
use gshare_core::{ClientId, Duration, LeaseId, Timestamp, TokenAction, TokenEvent};
use std::collections::BTreeMap;

/// See the [module](self).
#[derive(Debug)]
pub struct Keen<'a> {
    driver: &'a mut Driver,
    queue: EventQueue<Done>,
    /// Ask for more when this much of the budget is left.
    ahead: Duration,
    /// What each is working on.
    work: BTreeMap<ClientId, (LeaseId, Timestamp)>,
}

/// A client has used its budget up to a point; void when it was given more since.
#[derive(Debug, Clone, Copy)]
struct Done {
    client: ClientId,
    lease: LeaseId,
    budget: Duration,
    /// Only ask for more, ahead of the end.
    ask: bool,
}

impl<'a> Keen<'a> {
    /// `ahead`: how long before the end of what it has a client asks for more; zero for one that asks afterwards.
    pub fn new(driver: &'a mut Driver, ahead: Duration) -> Self {
        Self { driver, queue: EventQueue::new(), ahead, work: BTreeMap::new() }
    }

    /// The scheduler that they call.
    pub const fn driver(&self) -> &Driver {
        self.driver
    }

    /// Calls the scheduler, and lets the clients do what it orders.
    pub fn call(&mut self, now: Timestamp, event: TokenEvent) -> Result<(), Violation> {
        self.driver.must(now, event)?;
        let orders = self.driver.actions().to_vec();
        for order in orders {
            if let TokenAction::Grant { client, lease, budget, expires } = order {
                let replaced = self.work.get(&client).filter(|(held, _)| *held != lease).copied();
                let (_, since) = *self
                    .work
                    .entry(client)
                    .and_modify(|work| {
                        if work.0 != lease {
                            *work = (lease, now);
                        }
                    })
                    .or_insert((lease, now));
                let end = since.saturating_add(budget).min(expires);
                self.queue.schedule(end, Done { client, lease, budget, ask: false });
                if !self.ahead.is_zero() {
                    let early = end.saturating_sub(self.ahead).max(now);
                    self.queue.schedule(early, Done { client, lease, budget, ask: true });
                }
                if let Some((lease, since)) = replaced {
                    self.call(
                        now,
                        TokenEvent::TokenReturned {
                            client,
                            lease,
                            used: now.saturating_since(since),
                            again: false,
                        },
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Lets time pass until `until`, inclusively.
    pub fn run(&mut self, until: Timestamp) -> Result<(), Violation> {
        while let Some((now, done)) = self.queue.step(self.driver.scheduler().next_deadline(), until) {
            match done {
                Some(done) => self.done(now, done)?,
                None => self.call(now, TokenEvent::DeadlineReached)?,
            }
        }
        Ok(())
    }

    fn done(&mut self, now: Timestamp, done: Done) -> Result<(), Violation> {
        let Done { client, lease, budget, ask } = done;
        let held = self.driver.book().client(client).and_then(|entry| entry.held);
        // Void when it was extended or replaced since.
        if held.is_none_or(|held| held.lease != lease || held.budget != budget) {
            return Ok(());
        }
        if ask {
            return self.call(now, TokenEvent::TokenRequested { client });
        }
        if let Some((_, since)) = self.work.remove(&client) {
            let used = now.saturating_since(since).min(budget);
            return self.call(now, TokenEvent::TokenReturned { client, lease, used, again: true });
        }
        self.call(now, TokenEvent::TokenRequested { client })
    }
}
