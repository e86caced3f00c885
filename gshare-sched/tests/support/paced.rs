//! Programs that wait for each kernel before they launch the next: their GPU time beside others and alone.
//!
//! # Problem
//! A [keen](gshare_sim::token::keen) client always has work. A program that waits for each of its kernels does not: its host is busy between two
//! kernels, and while it holds a token alone, no client uses the GPU in these pauses. It cannot reach a request near the part of time
//! that its kernels take alone, and its token runs out by the clock. The fair division between two such programs therefore refers to
//! their times alone, in proportion to their requests.
//!
//! # Model
//! A program launches a kernel, waits for its end, pauses and starts over while its token is neither used up nor over; otherwise it
//! gives the token back and asks again. It asks ahead when little of its token is left, by use or by the clock, and reports its use
//! at intervals. An order arrives after the hand-over time, and an order crossing the end of the token is void. One kernel runs at
//! a time, in the order of the launches.
//!
//! # Cost
//! O(log n) per kernel and call of the scheduler, for n programs.

use gshare_core::{ClientId, Duration, GpuId, Share, Timestamp, TokenAction, TokenEvent, UseState};
use gshare_sim::token::drive::Driver;
use gshare_sim::{EventQueue, Story};
use std::collections::BTreeMap;

/// The remaining budget, or time to an expiry, at which a program asks for more.
const AHEAD: Duration = Duration::from_millis(5);
/// The interval of usage reports.
const REPORT: Duration = Duration::from_millis(10);

/// The kernels and pauses of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// The length of a kernel.
    pub(crate) kernel: Duration,
    /// The time of its host between the end of a kernel and the next launch.
    pub(crate) pause: Duration,
}

/// The figures of a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Got {
    /// The GPU time of its kernels.
    pub(crate) busy: Duration,
    /// The longest time without a running kernel, from its first kernel on.
    pub(crate) gap: Duration,
}

/// Programs on one GPU. See the [module](self).
#[derive(Debug)]
pub(crate) struct Paced<'a> {
    driver: &'a mut Driver,
    queue: EventQueue<Event>,
    hand_over: Duration,
    programs: BTreeMap<ClientId, Program>,
    /// The end of the last launched kernel.
    free: Timestamp,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// An order, and the number of its client's ended turns at that time.
    Told(ClientId, u32, TokenAction),
    Launches(ClientId),
    /// The client's token may be about to end.
    Looks(ClientId),
}

#[derive(Debug)]
struct Program {
    pace: Pace,
    /// The number of ended turns, in the view of the program and of its scheduler.
    turn: u32,
    turn_there: u32,
    token: Option<Token>,
    used: Duration,
    asked: bool,
    /// The program waits for a grant, so none of its events is scheduled.
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
    pub(crate) fn new(driver: &'a mut Driver, hand_over: Duration) -> Self {
        let (queue, programs) = (EventQueue::new(), BTreeMap::new());
        Self { driver, queue, hand_over, programs, free: Timestamp::ZERO }
    }

    /// Starts a program.
    pub(crate) fn start(
        &mut self,
        now: Timestamp,
        client: ClientId,
        share: Share,
        pace: Pace,
    ) -> Result<(), Story> {
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
    pub(crate) fn run(&mut self, until: Timestamp) -> Result<(), Story> {
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
    pub(crate) fn got(&self, client: ClientId) -> Got {
        self.programs.get(&client).map_or_else(Got::default, |program| program.got)
    }

    fn call(&mut self, now: Timestamp, event: TokenEvent) -> Result<(), Story> {
        self.driver.must(now, event)?;
        for action in self.driver.actions().to_vec() {
            let (TokenAction::Allow { client, .. }
            | TokenAction::Recall { client, .. }
            | TokenAction::Stop { client }) = action
            else {
                continue;
            };
            let Some(program) = self.programs.get_mut(&client) else { continue };
            let turn = program.turn_there;
            program.turn_there += u32::from(matches!(action, TokenAction::Stop { .. }));
            self.queue.schedule(now.saturating_add(self.hand_over), Event::Told(client, turn, action));
        }
        Ok(())
    }

    /// Reports the program's use and its state. For a turn already over in the scheduler, only the total counts.
    fn says(&mut self, now: Timestamp, client: ClientId, state: UseState) -> Result<(), Story> {
        let Some(program) = self.programs.get_mut(&client) else { return Ok(()) };
        let ends = program.turn == program.turn_there + 1;
        let state = match (program.turn < program.turn_there, state) {
            (true, _) => UseState::Holds,
            (false, UseState::Wants | UseState::Idle)
                if !ends && self.driver.book().client(client).is_some_and(|entry| entry.held.is_some()) =>
            {
                // The program has not heard of its token yet.
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
    ) -> Result<(), Story> {
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
            TokenAction::Recall { allowed, .. } => {
                if let Some(token) = &mut program.token {
                    token.allowed = token.allowed.min(allowed);
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

    fn launches(&mut self, now: Timestamp, client: ClientId) -> Result<(), Story> {
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

    /// Reports the program's use, and asks for more if little is left.
    fn asks(&mut self, now: Timestamp, client: ClientId) -> Result<(), Story> {
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
