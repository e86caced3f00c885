//! Programs that wait for each kernel before they launch the next: what they get, and what they would get alone.
//!
//! # Problem
//! A [keen](super::keen) client always has work. A program that waits for each of its kernels does not: between two of them
//! its host is busy, and while it holds a token that no other shares, no client uses the GPU in those pauses. So it cannot reach
//! a request near the part of time that its kernels take when it is alone, its token runs out by the clock, and what two of them
//! should get is said of the time that they would have alone: in proportion to their requests.
//!
//! # Model
//! A program launches a kernel, waits for its end, pauses and starts over while it holds a token that is neither used up nor
//! expired; else it gives the token back with what it used, and asks again. It asks ahead when little is left of its budget or
//! of the time to its expiry, and reports what it used now and then, and before it asks for more with its budget overrun. A grant
//! arrives after the hand-over time. One kernel runs at a time, in the order of the launches.
//!
//! # Cost
//! O(log n) per kernel and call of the scheduler, for n programs.

use super::Violation;
use super::drive::Driver;
use crate::event_queue::EventQueue;
use gshare_core::{
    ClientId, Duration, GpuId, LeaseId, Share, Timestamp, TokenAction, TokenError, TokenEvent,
};
use std::collections::BTreeMap;

/// More is asked for when this is left of a budget or of the time to an expiry.
const AHEAD: Duration = Duration::from_millis(5);
/// How often usage is reported.
const REPORT: Duration = Duration::from_millis(10);

/// The kernels of a program and its pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the whole of a program")]
pub struct Pace {
    /// Length of a kernel.
    pub kernel: Duration,
    /// Time of its host between the end of one and the launch of the next.
    pub pause: Duration,
}

/// The figures of a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Got {
    /// GPU time.
    pub busy: Duration,
    /// The longest time without a kernel of it running, from its first kernel on.
    pub gap: Duration,
}

/// Programs on one GPU. See the [module](self).
#[derive(Debug)]
pub struct Paced<'a> {
    driver: &'a mut Driver,
    queue: EventQueue<Event>,
    hand_over: Duration,
    programs: BTreeMap<ClientId, Program>,
    /// When the last kernel ends that was launched.
    free: Timestamp,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Told(ClientId, TokenAction),
    Launches(ClientId),
    /// Its lease may be about to expire.
    Looks(ClientId),
}

#[derive(Debug)]
struct Program {
    pace: Pace,
    lease: Option<Lease>,
    asked: bool,
    /// The program waits for a grant: nothing of it is scheduled.
    waits: bool,
    got: Got,
    last_end: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy)]
struct Lease {
    id: LeaseId,
    budget: Duration,
    expires: Timestamp,
    used: Duration,
    reported: Timestamp,
}

impl<'a> Paced<'a> {
    /// No programs yet; a grant takes `hand_over` to arrive.
    pub fn new(driver: &'a mut Driver, hand_over: Duration) -> Self {
        let (queue, programs) = (EventQueue::new(), BTreeMap::new());
        Self { driver, queue, hand_over, programs, free: Timestamp::ZERO }
    }

    /// A program starts.
    pub fn start(
        &mut self,
        now: Timestamp,
        client: ClientId,
        share: Share,
        pace: Pace,
    ) -> Result<(), Violation> {
        let program =
            Program { pace, lease: None, asked: true, waits: true, got: Got::default(), last_end: None };
        self.programs.insert(client, program);
        self.call(now, TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share })?;
        self.call(now, TokenEvent::TokenRequested { client })
    }

    /// Lets time pass until `until`, inclusively.
    pub fn run(&mut self, until: Timestamp) -> Result<(), Violation> {
        while let Some((now, event)) = self.queue.step(self.driver.scheduler().next_deadline(), until) {
            match event {
                Some(Event::Told(client, action)) => self.told(now, client, action)?,
                Some(Event::Launches(client)) => self.launches(now, client)?,
                Some(Event::Looks(client)) => self.asks(now, client)?,
                None => self.call(now, TokenEvent::DeadlineReached)?,
            }
        }
        Ok(())
    }

    /// The figures of a program so far.
    pub fn got(&self, client: ClientId) -> Got {
        self.programs.get(&client).map_or_else(Got::default, |program| program.got)
    }

    fn call(&mut self, now: Timestamp, event: TokenEvent) -> Result<(), Violation> {
        match self.driver.call(now, event)? {
            // The return crossed an order.
            Ok(()) | Err(TokenError::StaleLease { .. }) => {}
            Err(error) => return Err(self.driver.wrong(format!("{event:?} was refused: {error}"))),
        }
        for action in self.driver.actions().to_vec() {
            let (TokenAction::Grant { client, .. } | TokenAction::Revoke { client, .. }) = action else {
                continue;
            };
            self.queue.schedule(now.saturating_add(self.hand_over), Event::Told(client, action));
        }
        Ok(())
    }

    fn told(&mut self, now: Timestamp, client: ClientId, action: TokenAction) -> Result<(), Violation> {
        let Some(program) = self.programs.get_mut(&client) else { return Ok(()) };
        let mut returned = None;
        match action {
            TokenAction::Grant { lease: id, budget, expires, .. } => {
                program.asked = false;
                let ahead = Timestamp::from_nanos(expires.as_nanos().saturating_sub(AHEAD.as_nanos()));
                if ahead > now {
                    self.queue.schedule(ahead, Event::Looks(client));
                }
                match &mut program.lease {
                    Some(lease) if lease.id == id => (lease.budget, lease.expires) = (budget, expires),
                    held => {
                        let fresh = Lease { id, budget, expires, used: Duration::ZERO, reported: now };
                        returned = held.replace(fresh);
                    }
                }
                if core::mem::take(&mut program.waits) {
                    self.queue.schedule(now, Event::Launches(client));
                }
            }
            TokenAction::Revoke { lease: id, .. } => {
                returned = program.lease.take_if(|lease| lease.id == id);
            }
            _ => {}
        }
        match returned {
            Some(Lease { id, used, .. }) => {
                self.call(now, TokenEvent::TokenReturned { client, lease: id, used, again: false })
            }
            None => Ok(()),
        }
    }

    fn launches(&mut self, now: Timestamp, client: ClientId) -> Result<(), Violation> {
        let Some(program) = self.programs.get_mut(&client) else { return Ok(()) };
        let over = program.lease.take_if(|lease| lease.used >= lease.budget || lease.expires <= now);
        let Some(lease) = &mut program.lease else {
            let asked = core::mem::replace(&mut program.asked, true);
            program.waits = true;
            return match over {
                Some(Lease { id, used, .. }) => {
                    self.call(now, TokenEvent::TokenReturned { client, lease: id, used, again: true })
                }
                None if !asked => self.call(now, TokenEvent::TokenRequested { client }),
                None => Ok(()),
            };
        };
        let Pace { kernel, pause } = program.pace;
        let begin = self.free.max(now);
        self.free = begin.saturating_add(kernel);
        lease.used = lease.used.saturating_add(kernel);
        program.got.busy = program.got.busy.saturating_add(kernel);
        let idle = program.last_end.map_or(Duration::ZERO, |end| begin.saturating_since(end));
        program.got.gap = program.got.gap.max(idle);
        program.last_end = Some(self.free);
        self.queue.schedule(self.free.saturating_add(pause), Event::Launches(client));
        self.asks(now, client)
    }

    /// Says what was used, and asks for more where little is left.
    fn asks(&mut self, now: Timestamp, client: ClientId) -> Result<(), Violation> {
        let Some(program) = self.programs.get_mut(&client) else { return Ok(()) };
        let Some(lease) = &mut program.lease else { return Ok(()) };
        let left = lease.budget.saturating_sub(lease.used).min(lease.expires.saturating_since(now));
        let asks = left <= AHEAD && !program.asked;
        let overruns = asks && lease.used > lease.budget;
        let reports = overruns || now.saturating_since(lease.reported) >= REPORT;
        let (id, used) = (lease.id, lease.used);
        if reports {
            lease.reported = now;
        }
        program.asked |= asks;
        if reports {
            self.call(now, TokenEvent::UsageReported { client, lease: id, used })?;
        }
        if asks { self.call(now, TokenEvent::TokenRequested { client }) } else { Ok(()) }
    }
}
