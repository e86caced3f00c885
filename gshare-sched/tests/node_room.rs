//! Who parks for whom: programs with more memory together than their device has take turns.

use crate::support::{Bench, spec};
use gshare_core::wire::{Residence, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConnId, Duration, MemoryRange, ResourceSpec, ServiceClass, Timestamp, UseState,
};
use gshare_sched::node::{MemoryBound, NodeConfig, Note};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
/// The device of [`Bench::attach`].
const DEVICE: u64 = 16 << 10;
/// MiB that a program's copies move in a ms.
const LINK: u64 = 16;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn ranged(range: &str) -> ResourceSpec {
    spec("0:1", 100).with_memory(range.parse().unwrap())
}

/// A process that allocates, computes, and obeys orders for its memory. All its memory can move.
#[derive(Debug)]
struct Program {
    conn: ConnId,
    client: ClientId,
    /// MiB that can move, or have moved.
    memory: u64,
    /// MiB that the node has granted.
    granted: u64,
    place: Residence,
    /// The end of its move.
    moves: Option<Timestamp>,
    ordered: bool,
    /// It obeys nothing while it is stopped.
    stopped: bool,
    /// Whether it launches, and so misses its memory.
    works: bool,
    /// MiB of its reservation under way, if one is, and its start.
    asks: Option<(u64, Timestamp)>,
    missed: Option<Timestamp>,
    /// Times of its returns and of the moves before them.
    returns: Vec<(Timestamp, Duration)>,
    called: Timestamp,
    denied: usize,
    longest: Duration,
}

/// A node with programs in virtual time.
struct World {
    bench: Bench,
    programs: Vec<Program>,
    read: usize,
}

impl World {
    fn new(config: NodeConfig) -> Self {
        Self { bench: Bench::new(config), programs: Vec::new(), read: 0 }
    }

    fn start(&mut self, spec: ResourceSpec) -> Result<usize, String> {
        self.start_as(spec, None)
    }

    fn start_as(&mut self, spec: ResourceSpec, class: Option<ServiceClass>) -> Result<usize, String> {
        let slot = u32::try_from(self.programs.len()).unwrap();
        let conn = self.bench.hello(slot, &format!("p{slot}"), spec);
        if let Some(class) = class {
            self.bench.say(conn, ToDaemon::Class { class });
        }
        let (client, _) = self.bench.attach(conn)?;
        self.programs.push(Program {
            conn,
            client,
            memory: 0,
            granted: 0,
            place: Residence::Resident,
            moves: None,
            ordered: false,
            stopped: false,
            works: false,
            asks: None,
            missed: None,
            returns: Vec::new(),
            called: Timestamp::ZERO,
            denied: 0,
            longest: Duration::ZERO,
        });
        let at = self.programs.len() - 1;
        self.says(at);
        Ok(at)
    }

    /// The program allocates `mib` more.
    fn asks(&mut self, at: usize, mib: u64) {
        let program = &mut self.programs[at];
        assert!(program.asks.is_none());
        program.asks = Some((mib, self.bench.now));
        let (conn, client, bytes) = (program.conn, program.client, Bytes(mib * MIB));
        self.bench.say(conn, ToDaemon::MemoryReserve { client, bytes, wish: bytes });
        self.hears();
    }

    fn says(&mut self, at: usize) {
        let program = &self.programs[at];
        let residence = match program.place {
            Residence::Parked if program.works => Residence::Missed,
            place => place,
        };
        let (conn, client, bytes) = (program.conn, program.client, Bytes(program.memory * MIB));
        self.bench.say(conn, ToDaemon::Parking { client, residence, bytes, obstacle: None });
    }

    /// The program has used the device, and is idle again.
    fn uses(&mut self, at: usize) {
        let &Program { conn, client, .. } = &self.programs[at];
        self.bench.say(conn, ToDaemon::use_of_time(client, 0, ms(1), UseState::Idle));
    }

    fn works(&mut self, at: usize, on: bool) {
        self.programs[at].works = on;
        if on && self.programs[at].place == Residence::Parked {
            self.programs[at].missed.get_or_insert(self.bench.now);
            self.says(at);
        }
        self.hears();
    }

    /// The frames of the node reach the programs.
    fn hears(&mut self) {
        while let Some((conn, frame)) = self.bench.sent.get(self.read).cloned() {
            self.read += 1;
            let Some(at) = self.programs.iter().position(|program| program.conn == conn) else { continue };
            let now = self.bench.now;
            let program = &mut self.programs[at];
            match frame {
                ToClient::Park { on, .. } => {
                    program.ordered = on != 0;
                    program.called = now;
                }
                ToClient::MemoryGrant { bytes, .. } => {
                    let (mib, since) = program.asks.take().unwrap();
                    assert_eq!(bytes.0 / MIB, mib);
                    program.granted += mib;
                    if program.place == Residence::Returning {
                        program.moves = Some(now.saturating_add(ms(1 + mib / LINK)));
                    } else {
                        program.longest = program.longest.max(now.saturating_since(since));
                        // Memory allocated while the rest is in host memory stays on the device.
                        if program.place != Residence::Parked {
                            program.memory += mib;
                            self.says(at);
                        }
                    }
                }
                ToClient::MemoryDeny { .. } => {
                    program.asks = None;
                    program.denied += 1;
                    if program.place == Residence::Returning {
                        program.place = Residence::Parked;
                        self.says(at);
                    }
                }
                ToClient::MemoryAsk { client, round, .. } if !program.stopped => {
                    let used = Bytes(program.granted * MIB);
                    self.bench.say(conn, ToDaemon::MemoryUsed { client, round, used });
                }
                _ => {}
            }
        }
        let granted: u64 = self.programs.iter().map(|program| program.granted).sum();
        assert!(granted <= DEVICE, "{granted} MiB of {DEVICE} are granted");
    }

    /// Each program takes its next step towards its ordered place.
    fn step(&mut self, at: usize) {
        let now = self.bench.now;
        let program = &mut self.programs[at];
        if program.stopped {
            return;
        }
        let over = program.moves.is_some_and(|end| end <= now);
        match program.place {
            Residence::Resident if program.ordered => {
                program.place = Residence::Parking;
                program.moves = Some(now.saturating_add(ms(1 + program.memory / LINK)));
                self.says(at);
            }
            Residence::Parking if over => {
                let &mut Program { conn, client, memory, works, .. } = program;
                (program.place, program.moves) = (Residence::Parked, None);
                program.granted -= memory;
                if works {
                    program.missed = Some(now);
                }
                self.bench.say(conn, ToDaemon::MemoryRelease { client, bytes: Bytes(memory * MIB) });
                self.says(at);
            }
            Residence::Parked if !program.ordered && program.asks.is_none() => {
                program.place = Residence::Returning;
                let memory = program.memory;
                self.says(at);
                self.asks(at, memory);
            }
            Residence::Returning if over => {
                (program.place, program.moves, program.memory) = (Residence::Resident, None, program.granted);
                let waited =
                    program.missed.take().map_or(Duration::ZERO, |missed| now.saturating_since(missed));
                program.longest = program.longest.max(waited);
                program.returns.push((now, now.saturating_since(program.called)));
                self.says(at);
            }
            _ => {}
        }
        self.hears();
    }

    fn pass(&mut self, time: u64) {
        for _ in 0..time {
            for at in 0..self.programs.len() {
                self.step(at);
            }
            self.bench.pass(ms(1));
            self.hears();
        }
    }

    fn allocates(&mut self, at: usize, mib: u64) {
        self.asks(at, mib);
        self.pass(5_000);
        assert_eq!((self.programs[at].asks, self.programs[at].denied), (None, 0), "{:?}", self.programs[at]);
    }

    fn place(&self, at: usize) -> Residence {
        self.programs[at].place
    }

    /// No program came back twice within its residence: eight times its return.
    fn check_residences(&self) {
        for program in &self.programs {
            for pair in program.returns.windows(2) {
                let (apart, stay) = (pair[1].0.saturating_since(pair[0].0), pair[0].1.saturating_mul(8));
                assert!(apart >= stay, "a return {apart} after a return of {}: {program:?}", pair[0].1);
            }
        }
    }
}

#[test]
fn two_programs_of_60_percent_take_turns() {
    let mut world = World::new(NodeConfig::default());
    let [a, b] = [0, 1].map(|_| world.start(ranged("0:")).unwrap());
    world.allocates(a, 9_600);
    world.works(a, true);
    world.allocates(b, 9_600);
    world.works(b, true);
    world.pass(60_000);
    world.check_residences();
    for program in &world.programs {
        // A return of 600 ms, and a residence of 4.8 s for each.
        assert!((3..=7).contains(&program.returns.len()), "{:?}", program.returns);
        assert!(program.longest < ms(8_000), "{}", program.longest);
    }
}

/// It needs the figure at its first look at the device's memory.
#[test]
fn a_program_that_can_be_parked_is_told_what_others_keep_from_it() {
    let headroom = 512 * MIB;
    let mut world = World::new(NodeConfig::default().with_memory_headroom(Bytes(headroom)));
    let [movable, promised, own] = ["0:", "4GiB:", "0:"].map(|range| world.start(ranged(range)).unwrap());
    world.allocates(movable, 8 << 10);
    world.allocates(promised, 1 << 10);
    world.allocates(own, 1 << 10);
    // This program cannot be parked.
    let conn = world.bench.hello(9, "stays", spec("0:1", 100).with_memory("1GiB".parse().unwrap()));
    let (client, _) = world.bench.attach(conn).unwrap();
    let bytes = Bytes(MIB << 10);
    world.bench.say(conn, ToDaemon::MemoryReserve { client, bytes, wish: bytes });
    let kept = |world: &mut World, conn, client| {
        let before = world.bench.sent.len();
        world.bench.say(conn, ToDaemon::MemoryQuery { client });
        world.bench.sent[before..].iter().map(|(_, frame)| frame.clone()).collect::<Vec<_>>()
    };
    assert_eq!(kept(&mut world, conn, client), [ToClient::MemoryView { client }]);
    let &Program { conn, client, .. } = &world.programs[own];
    let used = Bytes((5 << 10) * MIB + headroom);
    let frames = [ToClient::MemoryMember { client, pid: 0, used }, ToClient::MemoryView { client }];
    assert_eq!(kept(&mut world, conn, client), frames);
}

#[test]
fn the_first_to_go_has_no_claim_and_has_been_idle_for_longest() {
    let victim = |starts: &[(&str, Option<ServiceClass>)], active: &[usize]| {
        let mut world = World::new(NodeConfig::default());
        for (range, class) in starts {
            let at = world.start_as(ranged(range), *class).unwrap();
            world.allocates(at, 3 << 10);
        }
        for at in active {
            world.pass(10);
            world.uses(*at);
        }
        let new = world.start(ranged("0:")).unwrap();
        world.asks(new, 6 << 10);
        world.pass(1_000);
        assert_eq!(world.programs[new].granted, 6 << 10);
        (0..starts.len()).filter(|at| world.place(*at) != Residence::Resident).collect::<Vec<_>>()
    };
    let none = ("0:", None);
    assert_eq!(victim(&[none; 4], &[1, 0, 3, 2]), [1], "2 GiB more are enough");
    let sensitive = Some("slo-sensitive".parse().unwrap());
    let best = ("0:", Some(ServiceClass::BestEffort));
    assert_eq!(victim(&[none, ("0:", sensitive), best, none], &[0, 1, 3, 2]), [2]);
    assert_eq!(victim(&[("3GiB:", None), ("3GiB:", None), ("2GiB:", None), none], &[0, 1, 3, 2]), [3]);
}

#[test]
fn guaranteed_memory_is_there_at_once_and_cannot_be_promised_twice() {
    let mut world = World::new(NodeConfig::default());
    let a = world.start(ranged("6GiB:14GiB")).unwrap();
    let b = world.start(ranged("6GiB:14GiB")).unwrap();
    assert_eq!(
        world.start(ranged("6GiB:14GiB")).unwrap_err(),
        "guaranteed memory 6 GiB does not fit: 12 GiB of 16 GiB are guaranteed or cannot move (or ask for less:MOST)"
    );
    let plain = world.bench.start(7, "plain", spec("0:1", 100).with_memory("8GiB".parse().unwrap()));
    world.allocates(a, 14 << 10);
    // Memory that cannot move leaves the guaranteed memory of other instances free.
    let bytes = Bytes(5 << 30);
    world.bench.say(plain.0, ToDaemon::MemoryReserve { client: plain.1, bytes, wish: bytes });
    world.pass(300);
    let denied = world.bench.notes.iter().rev().find_map(|note| match note {
        Note::MemoryDenied { of, limit, held, .. } => Some((*of, *limit, *held)),
        _ => None,
    });
    assert_eq!(denied, Some((MemoryBound::Guaranteed, Bytes::from_gib(16), Bytes::from_gib(12))));
    world.works(a, true);
    world.asks(b, 6 << 10);
    world.pass(1_000);
    assert_eq!((world.programs[b].granted, world.place(a)), (6 << 10, Residence::Parked));
    world.works(b, true);
    world.pass(60_000);
    world.check_residences();
    assert!(world.programs[a].returns.len() > 1, "it has its turns");
    // Its owner gets its guaranteed memory although the other has just returned.
    while world.place(a) != Residence::Resident || world.place(b) != Residence::Parked {
        world.pass(1);
    }
    let missed = world.bench.now;
    while world.place(b) != Residence::Resident {
        world.pass(1);
    }
    assert!(world.bench.now.saturating_since(missed) < ms(4_000), "not the 8 s of the other's residence");
}

#[test]
fn a_want_that_cannot_be_met_is_refused_with_its_figures() {
    let mut world = World::new(NodeConfig::default().with_park_memory(Bytes::from_gib(4)));
    let a = world.start(ranged("0:")).unwrap();
    world.allocates(a, 10 << 10);
    let b = world.start(ranged("0:")).unwrap();
    world.asks(b, 8 << 10);
    let denial = |world: &World| {
        world.bench.notes.iter().rev().find_map(|note| match note {
            Note::MemoryDenied { asked, of, limit, held, .. } => Some((*asked, *of, *limit, *held)),
            _ => None,
        })
    };
    let gib = Bytes::from_gib;
    let budget = MemoryBound::ParkMemory { uid: 1000 };
    assert_eq!(
        (denial(&world), world.place(a)),
        (Some((gib(8), budget, gib(4), gib(0))), Residence::Resident)
    );
    world.asks(b, 17 << 10);
    assert_eq!(denial(&world), Some((gib(17), MemoryBound::Instance, gib(16), gib(0))));
}

#[test]
fn a_stopped_victim_is_passed_over_and_an_allocation_waits_a_bounded_time() {
    let mut world = World::new(NodeConfig::default());
    let [a, b] = [0, 1].map(|_| world.start(ranged("0:")).unwrap());
    world.allocates(a, 5 << 10);
    world.allocates(b, 9 << 10);
    world.pass(10);
    world.uses(b);
    world.programs[a].stopped = true;
    let c = world.start(ranged("0:")).unwrap();
    world.asks(c, 6 << 10);
    // The order is overdue after 3 s and 5 s for the copy. A stopped process does not answer a recall of slack, which takes 200 ms.
    world.pass(8_100);
    assert_eq!((world.programs[c].granted, world.place(b)), (0, Residence::Resident));
    world.pass(1_000);
    assert_eq!((world.programs[c].granted, world.place(b)), (6 << 10, Residence::Parked));
    world.programs[a].stopped = false;
    world.works(b, true);
    world.pass(10_000);
    assert_eq!((world.place(a), world.place(b)), (Residence::Parked, Residence::Resident));
    (world.programs[b].stopped, world.programs[c].stopped) = (true, true);
    let d = world.start(ranged("0:")).unwrap();
    world.asks(d, 8 << 10);
    world.pass(50_000);
    assert_eq!((world.programs[d].granted, world.programs[d].denied), (0, 1));
    // A process that cannot be parked waits for 5 s, and so the node for 4.
    let plain = world.bench.start(9, "plain", spec("0:1", 100).with_memory("8GiB".parse().unwrap()));
    let denials = |world: &World| {
        world
            .bench
            .sent
            .iter()
            .filter(|(conn, frame)| *conn == plain.0 && matches!(frame, ToClient::MemoryDeny { .. }))
            .count()
    };
    let bytes = Bytes(8 << 30);
    world.bench.say(plain.0, ToDaemon::MemoryReserve { client: plain.1, bytes, wish: bytes });
    world.pass(4_500);
    assert_eq!(denials(&world), 1);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate(usize, u64),
    Work(usize, bool),
    Stop(usize, u64),
    Hand(usize, bool),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let program = 0usize..4;
    prop_oneof![
        3 => (program.clone(), 1u64..8).prop_map(|(at, gib)| Step::Allocate(at, gib << 10)),
        4 => (program.clone(), any::<bool>()).prop_map(|(at, on)| Step::Work(at, on)),
        1 => (program.clone(), 1u64..5_000).prop_map(|(at, time)| Step::Stop(at, time)),
        1 => (program, any::<bool>()).prop_map(|(at, on)| Step::Hand(at, on)),
        4 => (1u64..4_000).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Programs of any size that fit one by one: the device is never overbooked, no return follows another within its residence, and
    /// every program that works has its memory in bounded time.
    #[test]
    fn every_program_that_works_has_its_turn(steps in prop::collection::vec(step(), 1..40)) {
        let mut world = World::new(NodeConfig::default());
        for range in ["4GiB:12GiB", "4GiB:", "0:", "0:"] {
            let range: MemoryRange = range.parse().unwrap();
            world.start(spec("0:1", 100).with_memory(range)).unwrap();
        }
        let mut by_hand = false;
        for step in steps {
            match step {
                Step::Allocate(at, mib) => {
                    let program = &world.programs[at];
                    if program.asks.is_none() && program.memory + mib <= 11 << 10 && program.place == Residence::Resident {
                        world.asks(at, mib);
                    }
                }
                Step::Work(at, on) => world.works(at, on),
                Step::Stop(at, time) => {
                    world.programs[at].stopped = true;
                    world.pass(time);
                    world.programs[at].stopped = false;
                }
                Step::Hand(at, on) => {
                    by_hand = true;
                    let name = format!("p{at}");
                    world.bench.tell(gshare_sched::node::NodeEvent::ParkAsked { name, uid: 1000, on, holds: false });
                    world.hears();
                }
                Step::Pass(time) => world.pass(time),
            }
        }
        if !by_hand {
            world.check_residences();
        }
        // From now on all work. A return waits for the others: their moves, and residences of 8 times a return of 0.7 s, or of up to 30 s
        // after a return of a stopped program.
        for at in 0..world.programs.len() {
            world.works(at, true);
            world.programs[at].longest = Duration::ZERO;
        }
        let since = world.bench.now;
        world.pass(60_000);
        for program in &world.programs {
            let missing = program.missed.map_or(Duration::ZERO, |missed| world.bench.now.saturating_since(missed.max(since)));
            prop_assert!(program.longest.max(missing) < ms(40_000), "{program:?}");
        }
    }
}
