//! The totals of a process and of its daemon, behind a connection with late, doubled and, when it breaks, lost frames.
//!
//! The daemon takes all frames literally and remembers them.

use std::collections::VecDeque;

use crate::common::{BOUND, Behind, Bench, CLIENT, Kernel, MS, US, limited};
use gshare_core::wire::{OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{Duration, Timestamp, UseState};
use gshare_meter::{MeterEvent, Ticket};
use proptest::prelude::*;

/// The longest kernel of an unknown function, in ns.
const STRANGE: u64 = MS;

#[derive(Clone, Copy, Debug)]
enum Step {
    Pass(u64),
    /// Launches of one function, either unknown or known with its true length.
    Launch {
        count: usize,
        ns: u64,
        known: bool,
    },
    /// The connection breaks: the daemon hears `heard` frames under way, and the others are lost.
    Lose {
        heard: usize,
    },
}

/// The daemon's behaviour: the budget and length of a turn, its delay before an answer, and its grace before it takes a token back,
/// in ns.
#[derive(Clone, Copy, Debug)]
struct Manners {
    budget: u64,
    lasts: u64,
    thinks: u64,
    grace: u64,
    /// Transport time of a frame, and the interval at which a frame comes twice.
    delay: u64,
    twice: u64,
    extends: bool,
}

fn step() -> impl Strategy<Value = Step> {
    // Up to two and a half windows.
    let length = prop_oneof![3 => US..100 * US, 3 => 100 * US..5 * MS, 1 => 5 * MS..250 * MS];
    prop_oneof![
        4 => (10 * US..30 * MS).prop_map(Step::Pass),
        1 => (30 * MS..600 * MS).prop_map(Step::Pass),
        4 => (1usize..30, length).prop_map(|(count, ns)| Step::Launch { count, ns, known: true }),
        1 => (1usize..4, US..STRANGE).prop_map(|(count, ns)| Step::Launch { count, ns, known: false }),
        1 => (0usize..4).prop_map(|heard| Step::Lose { heard }),
    ]
}

fn manners() -> impl Strategy<Value = Manners> {
    let grace = prop_oneof![Just(0), 0..20 * MS, Just(400 * MS)];
    (1..20 * MS, US..50 * MS, 0..5 * MS, grace, 0..3 * MS, 2u64..9, any::<bool>()).prop_map(
        |(budget, lasts, thinks, grace, delay, twice, extends)| Manners {
            budget,
            lasts,
            thinks,
            grace,
            delay,
            twice,
            extends,
        },
    )
}

/// A token as the daemon sees it.
#[derive(Clone, Copy, Debug)]
struct Held {
    allowed: u64,
    until: u64,
}

struct Case {
    bench: Bench,
    manners: Manners,
    /// Frames under way, with their time of arrival.
    to_daemon: VecDeque<(u64, ToDaemon)>,
    to_client: VecDeque<(u64, ToClient)>,
    frames: u64,
    // ---- the daemon
    turn: u32,
    held: Option<Held>,
    waits: Option<u64>,
    said: u64,
    /// The total charged, and the part of it that may exceed the use.
    charged: u64,
    surplus: u64,
    // ---- the client, as far as it has heard
    allowed: Option<Held>,
    most_allowed: u64,
    longest: u64,
    /// The highest guess for an unknown function, and the true time of such launches, in ns.
    guess: u64,
    strange: u64,
}

impl Case {
    fn new(manners: Manners) -> Self {
        let bench = Bench::new(limited(50), OnDaemonLoss::Closed, Behind::Daemon);
        let mut case = Self {
            bench,
            manners,
            to_daemon: VecDeque::new(),
            to_client: VecDeque::new(),
            frames: 0,
            turn: 0,
            held: None,
            waits: None,
            said: 0,
            charged: 0,
            surplus: 0,
            allowed: None,
            most_allowed: 0,
            longest: 0,
            guess: 0,
            strange: 0,
        };
        case.pass(MS);
        case
    }

    /// Sends a frame; now and then it comes twice.
    fn under_way<T: Clone>(
        &mut self,
        queue: fn(&mut Self) -> &mut VecDeque<(u64, T)>,
        frame: T,
        often: bool,
    ) {
        self.frames += 1;
        let times = if often && self.frames.is_multiple_of(self.manners.twice) { 2 } else { 1 };
        let at = self.bench.now + self.manners.delay * (self.frames % 5) / 4;
        // Frames keep their order.
        let at = queue(self).back().map_or(at, |(before, _)| at.max(*before));
        queue(self).extend(core::iter::repeat_n((at, frame), times));
    }

    fn say(&mut self, frame: ToClient) {
        let often = matches!(frame, ToClient::Allow { .. });
        self.under_way(|case| &mut case.to_client, frame, often);
    }

    fn charge(&mut self, total: u64) {
        self.charged += total.saturating_sub(self.said);
        self.said = self.said.max(total);
    }

    /// The daemon hears a frame.
    fn hear(&mut self, frame: &ToDaemon) {
        match *frame {
            ToDaemon::Detach { .. } => self.say(ToClient::Welcome { epoch: 1 }),
            ToDaemon::Attach { used, allowed, .. } => {
                (self.turn, self.held, self.waits) = (0, None, None);
                self.charged += used.saturating_sub(allowed).as_nanos();
                self.said = used.as_nanos();
                let (window, in_flight) = (Duration::from_millis(100), Duration::from_nanos(BOUND));
                let (gpu, spec) = (gshare_core::GpuId::new(0), limited(50));
                self.say(ToClient::Attached { ordinal: 0, client: CLIENT, gpu, spec, window, in_flight });
            }
            ToDaemon::Use { turn, used, state, .. } => {
                let used = used.as_nanos();
                let ends = turn == self.turn + 1;
                assert!(turn <= self.turn || ends && self.held.is_some(), "turn {turn} after {}", self.turn);
                self.charge(used);
                let asks = matches!(state, UseState::Wants | UseState::Extends);
                let holds = matches!(state, UseState::Holds | UseState::Extends);
                if ends {
                    assert!(!holds, "turn {turn} is over and goes on");
                    (self.turn, self.held, self.waits) = (turn, None, asks.then_some(self.bench.now));
                } else if turn == self.turn && holds == self.held.is_some() {
                    self.waits = if asks { self.waits.or(Some(self.bench.now)) } else { None };
                }
            }
            _ => {}
        }
    }

    fn decide(&mut self) {
        let Manners { budget, lasts, thinks, grace, extends, .. } = self.manners;
        let now = self.bench.now;
        if let Some(held) = self.held.take_if(|held| now > held.until + grace) {
            self.surplus += held.allowed.saturating_sub(self.said);
            self.charge(held.allowed);
            self.say_allowed(held.allowed, now);
            (self.turn, self.waits) = (self.turn + 1, None);
        }
        if self.waits.is_some_and(|since| now >= since + thinks) && (extends || self.held.is_none()) {
            let held = Held { allowed: self.said + budget, until: now + lasts };
            (self.held, self.waits) = (Some(held), None);
            self.say_allowed(held.allowed, held.until);
        }
    }

    fn say_allowed(&mut self, allowed: u64, until: u64) {
        let (allowed, until) = (Duration::from_nanos(allowed), Timestamp::from_nanos(until));
        self.say(ToClient::Allow { client: CLIENT, turn: self.turn, allowed, until });
    }

    /// The client hears a frame.
    fn tell(&mut self, frame: ToClient) {
        let before = self.bench.turn;
        if let ToClient::Allow { turn, allowed, until, .. } = &frame
            && *turn == before
        {
            let (allowed, until) = (allowed.as_nanos(), until.as_nanos());
            self.allowed = (until > self.bench.now).then_some(Held { allowed, until });
            self.most_allowed = self.most_allowed.max(allowed);
        }
        self.bench.hear(frame);
    }

    /// Lets time pass in pieces shorter than the transport time.
    fn pass(&mut self, ns: u64) {
        let until = self.bench.now + ns;
        while self.bench.now < until {
            let piece = (until - self.bench.now).min(200 * US);
            self.bench.run(piece);
            for (_, frame) in core::mem::take(&mut self.bench.said) {
                let often = matches!(frame, ToDaemon::Use { .. });
                self.under_way(|case| &mut case.to_daemon, frame, often);
            }
            while let Some(frame) = come(&mut self.to_daemon, self.bench.now) {
                self.hear(&frame);
            }
            self.decide();
            while let Some(frame) = come(&mut self.to_client, self.bench.now) {
                self.tell(frame);
            }
            self.check();
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Pass(ns) => self.pass(ns),
            Step::Launch { count, ns, known } => {
                let kernel = Kernel { function: ns << 4 | u64::from(known), ns };
                if known {
                    self.bench.learn(kernel.function, ns);
                } else {
                    self.strange += count as u64 * ns;
                }
                self.longest = self.longest.max(ns);
                self.bench.launches(count, kernel);
            }
            Step::Lose { heard } => self.lose(heard),
        }
    }

    fn lose(&mut self, heard: usize) {
        for _ in 0..heard {
            let Some((_, frame)) = self.to_daemon.pop_front() else { break };
            self.hear(&frame);
        }
        // The daemon knows neither the lost frames nor the used part of the token.
        let lost = self.bench.used.saturating_sub(self.said);
        self.surplus += lost;
        if let Some(held) = self.held.take() {
            self.surplus += held.allowed.saturating_sub(self.said);
            self.charge(held.allowed);
        }
        // Use beyond the last permission is stated again, whether or not it was heard.
        self.surplus += self.bench.used.saturating_sub(self.most_allowed.min(self.said));
        (self.waits, self.allowed) = (None, None);
        (self.to_daemon, self.to_client) = (VecDeque::new(), VecDeque::new());
        self.bench.said.clear();
        if self.bench.connected {
            self.bench.lose(Behind::Daemon);
        }
    }

    fn check(&mut self) {
        let bench = &self.bench;
        self.guess = self.guess.max(bench.ground.costs.guess());
        let spent = bench.ground.gate.spent().as_nanos();
        let most = self.most_allowed + self.longest.max(self.guess) + self.strange;
        assert!(spent <= most, "{spent} ns spent, {} allowed", self.most_allowed);
        if self.allowed.is_none() || !bench.connected {
            assert_eq!(bench.ground.gate.left(), Duration::ZERO, "launches pass that nobody allows");
        }
    }

    /// Ends the process, after all frames have arrived.
    fn end(&mut self) {
        // All launches are over, and a daemon serves the process.
        self.bench.program.clear();
        while !self.bench.connected || self.bench.idle_since + 600 * MS > self.bench.now {
            self.pass(100 * MS);
        }
        self.bench.feed(MeterEvent::Leaving { ticket: Ticket(1) });
        self.pass(150 * MS);
        assert_eq!(self.bench.answer(1), Some(true));
    }
}

/// Takes the next frame that has arrived.
fn come<T>(queue: &mut VecDeque<(u64, T)>, now: u64) -> Option<T> {
    queue.front().filter(|(at, _)| *at <= now)?;
    queue.pop_front().map(|(_, frame)| frame)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn a_daemon_charges_what_the_device_did(
        manners in manners(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let mut case = Case::new(manners);
        let losses = steps.iter().filter(|step| matches!(step, Step::Lose { .. })).count();
        for step in steps {
            case.take(step);
        }
        case.end();
        let (charged, busy) = (case.charged, case.bench.busy);
        prop_assert!(charged >= busy, "{charged} ns charged of {busy} ns");
        // An unknown function is charged a guess until its measurement, and later use makes up for the difference.
        let most = busy + case.surplus + 4 * case.guess;
        prop_assert!(charged <= most, "{charged} ns charged of {busy} ns, surplus {} ns", case.surplus);
        if losses == 0 && case.manners.grace > 300 * MS {
            prop_assert!(charged <= busy + 4 * case.guess, "{charged} ns charged of {busy} ns, and nothing was lost");
        }
    }
}
