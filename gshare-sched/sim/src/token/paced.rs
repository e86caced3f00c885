//! Programs that wait for each kernel before they launch the next: what they get, and what they would get alone.
//!
//! # Problem
//! A [keen](super::keen) client always has work. A program that waits for each of its kernels does not: between two of them
//! its host is busy, and while it holds a token that no other shares, no client uses the GPU in those pauses. So it cannot reach
//! a request near the part of time that its kernels take when it is alone, its token runs out by the clock, and what two of them
//! should get is said of the time that they would have alone: in proportion to their requests.
//!
//! # Model
//! A program launches a kernel, waits for its end, pauses and starts over while its token is neither used up nor over; else it gives the
//! token back and asks again. It asks ahead when little is left of its token, by use or by the clock, and reports its use now and then.
//! An order arrives after the hand-over time; an order that has crossed the end of the token is void. One kernel runs at a time, in the
//! order of the launches.
//!
//! # Cost
//! O(log n) per kernel and call of the scheduler, for n programs.

use super::Violation;
use super::drive::Driver;
use crate::event_queue::EventQueue;
use gshare_core::{ClientId, Duration, GpuId, Share, Timestamp, TokenAction, TokenEvent, UseState};
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
    /// An order, and how many turns of its client were over then.
    Told(ClientId, u32, TokenAction),
    Launches(ClientId),
    /// Its token may be about to end.
    Looks(ClientId),
}

#[derive(Debug)]
struct Program {
    pace: Pace,
    /// Turns that are over, as the program knows, and as its scheduler does.
    turn: u32,
    turn_there: u32,
    token: Option<Token>,
    used: Duration,
    asked: bool,
    /// The program waits for a grant: nothing of it is scheduled.
    waits: bool,
    got: Got,
    last_end: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    allowed: Duration,
    until: Timestamp,
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
        let program = Program {
            pace,
            turn: 0,
            turn_there: 0,
            token: None,
            used: Duration::ZERO,
            asked: true,
            waits: true,
            got: Got::default(),
            last_end: None,
        };
        self.programs.insert(client, program);
        self.call(now, TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share })?;
        self.says(now, client, UseState::Wants)
    }

    /// Lets time pass until `until`, inclusively.
    pub fn run(&mut self, until: Timestamp) -> Result<(), Violation> {
        while let Some((now, event)) = self.queue.step(self.driver.scheduler().next_deadline(), until) {
            match event {
                Some(Event::Told(client, turn, action)) => self.told(now, client, turn, action)?,
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
        self.driver.must(now, event)?;
        for action in self.driver.actions().to_vec() {
            let (TokenAction::Allow { client, .. } | TokenAction::Stop { client }) = action else { continue };
            let Some(program) = self.programs.get_mut(&client) else { continue };
            let turn = program.turn_there;
            program.turn_there += u32::from(matches!(action, TokenAction::Stop { .. }));
            self.queue.schedule(now.saturating_add(self.hand_over), Event::Told(client, turn, action));
        }
        Ok(())
    }

    /// The program says what it has used and wants. Of a turn that is over for the scheduler, only the total counts.
    fn says(&mut self, now: Timestamp, client: ClientId, state: UseState) -> Result<(), Violation> {
        let Some(program) = self.programs.get_mut(&client) else { return Ok(()) };
        let ends = program.turn == program.turn_there + 1;
        let state = match (program.turn < program.turn_there, state) {
            (true, _) => UseState::Holds,
            (false, UseState::Wants | UseState::Idle)
                if !ends && self.driver.book().client(client).is_some_and(|entry| entry.held.is_some()) =>
            {
                // It has not heard of its token yet.
                UseState::Holds
            }
            (false, state) => state,
        };
        program.turn_there = program.turn_there.max(program.turn);
        let used = program.used;
        self.call(now, TokenEvent::Used { client, used, state })
    }

    fn told(
        &mut self,
        now: Timestamp,
        client: ClientId,
        turn: u32,
        action: TokenAction,
    ) -> Result<(), Violation> {
        let Some(program) = self.programs.get_mut(&client).filter(|program| program.turn == turn) else {
            return Ok(());
        };
        match action {
            TokenAction::Allow { allowed, until, .. } => {
                program.asked = false;
                let ahead = Timestamp::from_nanos(until.as_nanos().saturating_sub(AHEAD.as_nanos()));
                if ahead > now {
                    self.queue.schedule(ahead, Event::Looks(client));
                }
                let reported = program.token.map_or(now, |token| token.reported);
                program.token = Some(Token { allowed, until, reported });
                if core::mem::take(&mut program.waits) {
                    self.queue.schedule(now, Event::Launches(client));
                }
                Ok(())
            }
            TokenAction::Stop { .. } => {
                program.token = None;
                program.turn += 1;
                program.asked = program.waits;
                let state = if program.waits { UseState::Wants } else { UseState::Idle };
                self.says(now, client, state)
            }
            TokenAction::Throttle { .. } => Ok(()),
        }
    }

    fn launches(&mut self, now: Timestamp, client: ClientId) -> Result<(), Violation> {
        let Some(program) = self.programs.get_mut(&client) else { return Ok(()) };
        let over = program.token.take_if(|token| program.used >= token.allowed || token.until <= now);
        let Some(token) = program.token else {
            let asked = core::mem::replace(&mut program.asked, true);
            program.waits = true;
            program.turn += u32::from(over.is_some());
            return if over.is_some() || !asked { self.says(now, client, UseState::Wants) } else { Ok(()) };
        };
        let Pace { kernel, pause } = program.pace;
        let begin = self.free.max(now);
        self.free = begin.saturating_add(kernel);
        program.used = program.used.saturating_add(kernel);
        program.got.busy = program.got.busy.saturating_add(kernel);
        let idle = program.last_end.map_or(Duration::ZERO, |end| begin.saturating_since(end));
        program.got.gap = program.got.gap.max(idle);
        program.last_end = Some(self.free);
        program.token = Some(token);
        self.queue.schedule(self.free.saturating_add(pause), Event::Launches(client));
        self.asks(now, client)
    }

    /// Says its use, and asks for more where little is left.
    fn asks(&mut self, now: Timestamp, client: ClientId) -> Result<(), Violation> {
        let Some(program) = self.programs.get_mut(&client) else { return Ok(()) };
        let Some(token) = &mut program.token else { return Ok(()) };
        let left = token.allowed.saturating_sub(program.used).min(token.until.saturating_since(now));
        let asks = left <= AHEAD && !program.asked;
        if !asks && now.saturating_since(token.reported) < REPORT {
            return Ok(());
        }
        token.reported = now;
        program.asked |= asks;
        let state = if program.asked { UseState::Extends } else { UseState::Holds };
        self.says(now, client, state)
    }
}
