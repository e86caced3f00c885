//! Time for an engine.

use crossbeam_channel::{Receiver, RecvTimeoutError};
use gshare_core::{Engine, Timestamp};
use std::time::{Duration, Instant};

/// An engine with a clock, its deadlines and a buffer for its orders.
///
/// [`run`](Self::run) is the loop of a host with a channel of events, which the host can also select over. A host with a loop of its own calls [`tell`](Self::tell) for each
/// event, and [`poll`](Self::poll) after at most the time from [`wait`](Self::wait).
#[derive(Debug)]
pub struct Runner<E: Engine, C = fn() -> Timestamp> {
    engine: E,
    deadline_reached: fn() -> E::Event,
    clock: C,
    now: Timestamp,
    actions: Vec<E::Action>,
}

/// The time since the first call in this process. All runners of a process have the same clock.
fn monotonic() -> Timestamp {
    static BEGAN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let elapsed = BEGAN.get_or_init(Instant::now).elapsed();
    Timestamp::from_nanos(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
}

impl<E: Engine> Runner<E> {
    /// A runner on the monotonic clock; `deadline_reached` makes the engine's event for its deadlines.
    pub fn new(engine: E, deadline_reached: fn() -> E::Event) -> Self {
        Self::with_clock(engine, deadline_reached, monotonic)
    }
}

impl<E: Engine, C: FnMut() -> Timestamp> Runner<E, C> {
    /// A runner on a clock of your own. The engine sees a clock which goes back as standing still.
    pub fn with_clock(engine: E, deadline_reached: fn() -> E::Event, clock: C) -> Self {
        Self { engine, deadline_reached, clock, now: Timestamp::ZERO, actions: Vec::new() }
    }

    /// The engine, read-only.
    pub const fn engine(&self) -> &E {
        &self.engine
    }

    fn now(&mut self) -> Timestamp {
        self.now = self.now.max((self.clock)());
        self.now
    }

    /// Tells the engine an event, and passes each resulting order to `carry_out`, in order, with the time of the event.
    ///
    /// # Errors
    /// The engine's error; the engine is then unchanged.
    pub fn tell(
        &mut self,
        event: E::Event,
        mut carry_out: impl FnMut(Timestamp, E::Action),
    ) -> Result<(), E::Error> {
        let now = self.now();
        self.engine.handle(now, event, &mut self.actions)?;
        self.actions.drain(..).for_each(|action| carry_out(now, action));
        Ok(())
    }

    /// Tells the engine that its deadline has come, if it has.
    ///
    /// # Errors
    /// The engine's error.
    pub fn poll(&mut self, carry_out: impl FnMut(Timestamp, E::Action)) -> Result<(), E::Error> {
        let now = self.now();
        match self.engine.next_deadline() {
            Some(deadline) if deadline <= now => self.tell((self.deadline_reached)(), carry_out),
            _ => Ok(()),
        }
    }

    /// The time to the engine's next deadline; `None` if it waits for events alone.
    pub fn wait(&mut self) -> Option<Duration> {
        let now = self.now();
        let until = |deadline: Timestamp| Duration::from_nanos(deadline.saturating_since(now).as_nanos());
        self.engine.next_deadline().map(until)
    }

    /// Runs until no sender of events is left. The engine's errors go to `refused`.
    pub fn run(
        &mut self,
        events: &Receiver<E::Event>,
        mut carry_out: impl FnMut(Timestamp, E::Action),
        mut refused: impl FnMut(E::Error),
    ) {
        loop {
            let next = match self.wait() {
                Some(wait) => events.recv_timeout(wait),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let told = match next {
                Ok(event) => self.tell(event, &mut carry_out),
                Err(RecvTimeoutError::Timeout) => self.poll(&mut carry_out),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            told.unwrap_or_else(&mut refused);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::{MultiToken, MultiTokenConfig};
    use gshare_core::{
        ClientId, GpuId, Share, SmShare, TokenAction, TokenEvent, TokenScheduler as _, UseState,
    };
    use std::cell::Cell;

    fn joined(slot: u32) -> TokenEvent {
        let share = Share { quota: "0.2:0.5".parse().unwrap(), sm: SmShare::WHOLE };
        TokenEvent::ClientJoined { client: ClientId::new(slot, 0), gpu: GpuId::new(0), share }
    }

    #[test]
    fn a_deadline_is_told_when_it_has_come_and_the_clock_never_goes_back() {
        let time = Cell::new(Timestamp::from_millis(50));
        let engine = MultiToken::new(MultiTokenConfig::default()).unwrap();
        let mut runner = Runner::with_clock(engine, || TokenEvent::DeadlineReached, || time.get());
        let client = ClientId::new(0, 0);
        let mut granted = None;
        runner.tell(joined(0), |_, _| ()).unwrap();
        runner
            .tell(
                TokenEvent::Used { client, used: gshare_core::Duration::ZERO, state: UseState::Wants },
                |at, action| {
                    granted = Some((at, action));
                },
            )
            .unwrap();
        assert!(matches!(granted, Some((at, TokenAction::Allow { .. })) if at == time.get()), "{granted:?}");
        let (wait, deadline) = (runner.wait().unwrap(), runner.engine().next_deadline().unwrap());
        time.set(Timestamp::from_millis(40));
        assert_eq!(runner.wait(), Some(wait), "the clock stands still");
        runner.poll(|_, _| ()).unwrap();
        assert_eq!(runner.engine().next_deadline(), Some(deadline), "not before the deadline");
        time.set(deadline);
        assert_eq!(runner.wait(), Some(Duration::ZERO));
        runner.poll(|at, _| assert_eq!(at, deadline)).unwrap();
        assert_ne!(runner.engine().next_deadline(), Some(deadline));
    }

    #[test]
    fn what_is_refused_is_said_and_the_rest_goes_on() {
        let engine = MultiToken::new(MultiTokenConfig::default()).unwrap();
        let mut runner = Runner::new(engine, || TokenEvent::DeadlineReached);
        let (events, inbox) = crossbeam_channel::unbounded();
        for event in [joined(0), joined(0), joined(1)] {
            events.send(event).unwrap();
        }
        drop(events);
        let mut refused = 0;
        runner.run(&inbox, |_, _| (), |_| refused += 1);
        assert_eq!(refused, 1);
        assert!((0..2).all(|slot| runner.engine().client(ClientId::new(slot, 0)).is_some()));
    }
}
