//! Clients that always want more: they use their grants at once and to the nanosecond, give a token back the moment it is used up, and
//! ask again, or ask ahead of time.

use super::drive::Driver;
use crate::event_queue::EventQueue;
use crate::story::Story;
use gshare_core::{ClientId, Duration, Timestamp, TokenAction, TokenEvent, UseState};
use std::collections::BTreeMap;

/// Clients that always want more. See the [module](self).
#[derive(Debug)]
pub struct Keen<'a> {
    driver: &'a mut Driver,
    queue: EventQueue<Done>,
    /// The remaining budget at which clients ask for more.
    ahead: Duration,
    /// The allowed total of each client, with its total and the time at the beginning of its work.
    work: BTreeMap<ClientId, Work>,
}

#[derive(Debug, Clone, Copy)]
struct Work {
    allowed: Duration,
    until: Timestamp,
    base: Duration,
    since: Timestamp,
}

impl Work {
    fn end(self) -> Timestamp {
        self.since.saturating_add(self.allowed - self.base).min(self.until)
    }

    fn used(self, now: Timestamp) -> Duration {
        self.base.saturating_add(now.min(self.end()).saturating_since(self.since))
    }
}

/// A client has used its token up to a point; void after a later grant.
#[derive(Debug, Clone, Copy)]
struct Done {
    client: ClientId,
    end: Timestamp,
    /// The client only asks for more, ahead of the end.
    ask: bool,
}

impl<'a> Keen<'a> {
    /// Makes clients that ask for more `ahead` of the end of their tokens, or afterwards if `ahead` is zero.
    pub fn new(driver: &'a mut Driver, ahead: Duration) -> Self {
        Self { driver, queue: EventQueue::new(), ahead, work: BTreeMap::new() }
    }

    /// The driver of the scheduler.
    pub const fn driver(&self) -> &Driver {
        self.driver
    }

    /// GPU time used by a client until `now`.
    pub fn used(&self, now: Timestamp, client: ClientId) -> Duration {
        let said = self.driver.book().client(client).map_or(Duration::ZERO, |entry| entry.said);
        self.work.get(&client).map_or(said, |work| work.used(now))
    }

    /// Sends a client's first request.
    pub fn ask(&mut self, now: Timestamp, client: ClientId) -> Result<(), Story> {
        self.call(now, TokenEvent::Used { client, used: Duration::ZERO, state: UseState::Wants })
    }

    /// Calls the scheduler, and lets the clients obey its orders.
    pub fn call(&mut self, now: Timestamp, event: TokenEvent) -> Result<(), Story> {
        self.driver.must(now, event)?;
        for order in self.driver.actions().to_vec() {
            let (client, allowed, until) = match order {
                TokenAction::Allow { client, allowed, until } => (client, allowed, Some(until)),
                TokenAction::Recall { client, allowed } => (client, allowed, None),
                _ => continue,
            };
            let base = self.driver.book().client(client).map_or(Duration::ZERO, |entry| entry.said);
            // The client goes on from its present total.
            let known = self.work.get(&client);
            let base = known.map_or(base, |work| work.used(now).max(base));
            let Some(until) = until.or(known.map(|work| work.until)) else { continue };
            let work = Work { allowed: allowed.max(base), until, base, since: now };
            self.work.insert(client, work);
            let end = work.end();
            self.queue.schedule(end, Done { client, end, ask: false });
            if !self.ahead.is_zero() {
                let early = end.saturating_sub(self.ahead).max(now);
                self.queue.schedule(early, Done { client, end, ask: true });
            }
        }
        Ok(())
    }

    /// Lets time pass until `until`, inclusively.
    pub fn run(&mut self, until: Timestamp) -> Result<(), Story> {
        while let Some((now, done)) = self.queue.step(self.driver.scheduler().next_deadline(), until) {
            match done {
                Some(done) => self.done(now, done)?,
                None => self.call(now, TokenEvent::DeadlineReached)?,
            }
        }
        Ok(())
    }

    fn done(&mut self, now: Timestamp, Done { client, end, ask }: Done) -> Result<(), Story> {
        let Some(work) = self.work.get(&client).copied().filter(|work| work.end() == end) else {
            return Ok(());
        };
        let state = if ask { UseState::Extends } else { UseState::Wants };
        if !ask {
            self.work.remove(&client);
        }
        self.call(now, TokenEvent::Used { client, used: work.used(now), state })
    }
}
