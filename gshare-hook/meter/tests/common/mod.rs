//! One process on one device in virtual time: a program with kernels, the meter, and a daemon played by the test.
#![allow(dead_code, unreachable_pub)] // each test file uses its part

use std::collections::VecDeque;
use std::sync::Arc;

use gshare_core::gate::LaunchGate;
use gshare_core::reason::Wait;
use gshare_core::wire::{DaemonWait, OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, DeviceUuid, Duration, GpuId, Quota, QuotaRange, ResourceSpec, Timestamp, UseState,
};
use gshare_meter::cost::{CostTable, Row};
use gshare_meter::{
    Facts, Ground, Measured, MemoryAccount, Meter, MeterAction, MeterEvent, Movable, Move, Ordinal, Segment,
    SegmentId, Settings, Ticket,
};

pub const DEVICE: Ordinal = Ordinal(0);
pub const CLIENT: ClientId = ClientId::new(3, 1);
pub const US: u64 = 1_000;
pub const MS: u64 = 1_000_000;
/// The daemon's bound of the GPU time in flight, in ns.
pub const BOUND: u64 = 2 * MS;

/// State shared by the launching threads and the meter.
#[derive(Debug)]
pub struct Shared {
    pub gate: LaunchGate,
    pub costs: CostTable,
    pub memory: MemoryAccount,
}

impl Ground for Shared {
    fn gate(&self) -> &LaunchGate {
        &self.gate
    }
    fn costs(&self) -> &CostTable {
        &self.costs
    }
    fn memory(&self) -> &MemoryAccount {
        &self.memory
    }
}

/// The peer behind the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// No peer is there.
    Nobody,
    /// A process that accepts connections.
    Daemon,
}

/// A kernel: its function, and its true duration, in ns.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub function: u64,
    pub ns: u64,
}

/// A kernel queued on the device.
#[derive(Clone, Copy, Debug)]
struct Queued {
    id: SegmentId,
    start: u64,
    end: u64,
    predicted: u64,
    /// Whether it was launched under a limit.
    limited: bool,
    /// Whether it is behind a wait of the stream that the meter takes to go on.
    waits: bool,
}

pub struct Bench {
    pub now: u64,
    pub meter: Meter<Arc<Shared>>,
    pub ground: Arc<Shared>,
    pub behind: Behind,
    /// Frames to the daemon with their time, in ns.
    pub said: Vec<(u64, ToDaemon)>,
    pub answers: Vec<(Ticket, bool)>,
    pub lines: Vec<String>,
    /// Times of connection attempts and probes, in ns.
    pub connects: Vec<u64>,
    pub probes: Vec<u64>,
    /// Times of orders to presume launches complete, in ns.
    pub presumed: Vec<u64>,
    pub connected: bool,
    pub shut: bool,
    /// Kernels yet to be launched, by a thread without synchronising calls.
    pub program: VecDeque<Kernel>,
    /// Memory of a process that can be parked, the orders to move it, and whether it is not on the device.
    pub movable: Option<Movable>,
    pub moves: Vec<Move>,
    pub away: bool,
    /// Whether the last turn ended by the daemon's order or with its loss.
    stopped: bool,
    answered: usize,
    /// Threads waiting for a measurement.
    pub measuring: u64,
    /// Times of failed launches, in ns.
    pub failed: Vec<u64>,
    /// Finished GPU time, in ns.
    pub busy: u64,
    /// The most GPU time launched under a limit and queued at once, in ns, and the end of the last kernel.
    pub most_queued: u64,
    pub idle_since: u64,
    /// The end of the stream's last wait for the host, in ns.
    blocked_until: u64,
    queue: VecDeque<Queued>,
    launches: u64,
    waits: bool,
    /// The start of the present wait, in ns, the number of launches before it, and the total time of finished waits.
    waits_since: u64,
    launches_before: u64,
    waited: u64,
    next: u64,
    /// Finished turns by the daemon's count, and the last total reported to it, in ns.
    pub turn: u32,
    pub used: u64,
}

pub fn limited(percent: u16) -> ResourceSpec {
    let limit = Quota::from_percent(percent).unwrap();
    ResourceSpec::UNLIMITED.with_quota(QuotaRange::new(Quota::ZERO, limit).unwrap())
}

pub fn with_memory(spec: ResourceSpec, bytes: u64) -> ResourceSpec {
    ResourceSpec::new(spec.quota(), spec.sm(), Some(Bytes(bytes))).unwrap()
}

impl Bench {
    /// A process of a run with several members; it uses its first device at second one.
    pub fn new(spec: ResourceSpec, on_loss: OnDaemonLoss, behind: Behind) -> Self {
        Self::with_memory(spec, on_loss, behind, MemoryAccount::of_member(16 << 30))
    }

    /// The only process of its run.
    pub fn alone(spec: ResourceSpec, behind: Behind) -> Self {
        Self::with_memory(spec, OnDaemonLoss::Open, behind, MemoryAccount::new(16 << 30))
    }

    fn with_memory(spec: ResourceSpec, on_loss: OnDaemonLoss, behind: Behind, memory: MemoryAccount) -> Self {
        let (now, hello) = (1_000 * MS, ToDaemon::Detach { client: CLIENT });
        let settings =
            Settings { hello, spec, on_loss, daemon_wait: DaemonWait::default(), class: None, seed: 7 };
        if spec.memory().is_some() {
            memory.limit_to(spec.memory());
        }
        let ground = Shared { gate: LaunchGate::new(), costs: CostTable::new(), memory };
        let mut bench = Self {
            now,
            meter: Meter::new(Timestamp::from_nanos(now), settings),
            ground: Arc::new(ground),
            behind,
            said: Vec::new(),
            answers: Vec::new(),
            lines: Vec::new(),
            connects: Vec::new(),
            probes: Vec::new(),
            presumed: Vec::new(),
            connected: false,
            shut: false,
            program: VecDeque::new(),
            movable: None,
            moves: Vec::new(),
            away: false,
            stopped: false,
            answered: 0,
            measuring: 0,
            failed: Vec::new(),
            busy: 0,
            most_queued: 0,
            idle_since: now,
            blocked_until: 0,
            queue: VecDeque::new(),
            launches: 0,
            waits: false,
            waits_since: 0,
            launches_before: 0,
            waited: 0,
            next: 1,
            turn: 0,
            used: 0,
        };
        bench.feed(MeterEvent::DeadlineReached);
        let ground = Arc::clone(&bench.ground);
        bench.feed(MeterEvent::DeviceFound {
            device: DEVICE,
            uuid: DeviceUuid::gpu([7; 16]),
            ground,
            ticket: Ticket(0),
        });
        bench
    }

    /// A process served by a daemon.
    pub fn served(spec: ResourceSpec) -> Self {
        Self::served_as(spec, OnDaemonLoss::Open)
    }

    pub fn served_as(spec: ResourceSpec, on_loss: OnDaemonLoss) -> Self {
        let mut bench = Self::new(spec, on_loss, Behind::Daemon);
        bench.welcome(spec);
        assert!(bench.answers.contains(&(Ticket(0), true)), "{:?}", bench.answers);
        bench.said.clear();
        bench
    }

    /// The daemon welcomes the process and takes its device.
    pub fn welcome(&mut self, spec: ResourceSpec) {
        self.hear(ToClient::Welcome { epoch: 1 });
        self.attached(spec);
    }

    pub fn attached(&mut self, spec: ResourceSpec) {
        let (window, in_flight) = (Duration::from_millis(100), Duration::from_nanos(BOUND));
        let (ordinal, client, gpu) = (0, CLIENT, GpuId::new(0));
        self.hear(ToClient::Attached { ordinal, client, gpu, spec, window, in_flight });
    }

    /// The daemon allows `budget` beyond the reported use, for `lasts` from now (both ns).
    pub fn allow(&mut self, budget: u64, lasts: u64) {
        self.allow_up_to(self.turn, self.used + budget, self.now + lasts);
    }

    pub fn allow_up_to(&mut self, turn: u32, allowed: u64, until: u64) {
        self.stopped = until <= self.now;
        let (allowed, until) = (Duration::from_nanos(allowed), Timestamp::from_nanos(until));
        self.hear(ToClient::Allow { client: CLIENT, turn, allowed, until });
    }

    /// The daemon takes the token back, after it has charged up to `allowed` (ns).
    pub fn stop(&mut self, allowed: u64) {
        let turn = self.turn;
        self.turn += 1;
        self.allow_up_to(turn, allowed, self.now);
    }

    pub fn hear(&mut self, message: ToClient) {
        self.feed(MeterEvent::Heard(message));
    }

    /// The daemon's connection breaks, and `behind` is the new peer.
    pub fn lose(&mut self, behind: Behind) {
        self.stopped = true;
        (self.behind, self.connected) = (behind, false);
        self.feed(MeterEvent::Lost);
    }

    pub fn feed(&mut self, event: MeterEvent<Arc<Shared>>) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut actions = Vec::new();
            self.meter.handle(Timestamp::from_nanos(self.now), event, &mut actions);
            for action in actions {
                events.extend(self.carry_out(action));
            }
        }
    }

    fn carry_out(&mut self, action: MeterAction) -> Option<MeterEvent<Arc<Shared>>> {
        match action {
            MeterAction::Connect => {
                self.connects.push(self.now);
                self.connected = self.behind == Behind::Daemon;
                return Some(if self.connected { MeterEvent::Connected } else { MeterEvent::ConnectFailed });
            }
            MeterAction::Disconnect => {
                self.connected = false;
                return Some(MeterEvent::Lost);
            }
            MeterAction::Probe(_) => self.probes.push(self.now),
            MeterAction::Say(message) => {
                self.note(&message);
                self.said.push((self.now, message));
            }
            MeterAction::Answer { ticket, granted } => self.answers.push((ticket, granted)),
            MeterAction::PresumeDone { .. } => self.presumed.push(self.now),
            MeterAction::Shut { on, .. } => self.shut = on,
            MeterAction::MoveMemory { order, .. } => {
                assert_eq!(self.away, order == Move::ToDevice || order == Move::Cancel, "{order:?}");
                // The thread that moves the memory waits for the end of a turn's work, and for work that outlasts a stopped turn.
                let over =
                    self.idle_since <= self.now + 500 * US || self.blocked_until > self.now || self.stopped;
                assert!(order != Move::ToHost || over);
                self.away = true;
                self.moves.push(order);
            }
            MeterAction::Tell(line) => self.lines.push(line),
            _ => {}
        }
        None
    }

    /// Lets the daemon hear a frame at once.
    fn note(&mut self, message: &ToDaemon) {
        match *message {
            ToDaemon::Use { client, turn, used, .. } => {
                assert_eq!(client, CLIENT);
                assert!(used.as_nanos() >= self.used, "{used} after {} ns", self.used);
                assert!([self.turn, self.turn + 1].contains(&turn), "turn {turn} after {}", self.turn);
                (self.turn, self.used) = (turn, used.as_nanos());
            }
            ToDaemon::Attach { used, .. } => (self.turn, self.used) = (0, used.as_nanos()),
            _ => {}
        }
    }

    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Whether an order to move awaits its end.
    pub fn pending(&self) -> bool {
        self.answered < self.moves.iter().filter(|order| **order != Move::Cancel).count()
    }

    /// The host has moved the memory, or failed to.
    pub fn moved(&mut self, result: Result<(), gshare_core::reason::Obstacle>) {
        let order = self.moves.iter().rfind(|order| **order != Move::Cancel);
        self.away = (order == Some(&Move::ToDevice)) != result.is_ok();
        self.answered += 1;
        self.feed(MeterEvent::Moved { device: DEVICE, result });
        self.look();
    }

    /// Teaches the meter the cost of a function, in ns.
    pub fn learn(&self, function: u64, ns: u64) -> Row {
        let (row, _) = self.ground.costs.find(function, 0);
        self.ground.costs.learn(row, ns);
        row
    }

    /// Launches kernels as far as credit allows.
    fn launch(&mut self) {
        let waited = core::mem::take(&mut self.waits);
        while let Some(&kernel) = self.program.front() {
            if self.shut {
                self.program.pop_front();
                self.failed.push(self.now);
                continue;
            }
            let (row, known) = self.ground.costs.find(kernel.function, 0);
            let predicted = known.unwrap_or(self.ground.costs.guess());
            if !self.ground.gate.try_spend(Duration::from_nanos(predicted)) {
                if !waited || self.launches > self.launches_before {
                    (self.waits_since, self.launches_before) = (self.now, self.launches);
                }
                self.waits = true;
                return;
            }
            assert!(!self.away, "a launch was let in while the memory is not on the device");
            if waited && self.launches == self.launches_before {
                self.waited += self.now - self.waits_since;
            }
            self.program.pop_front();
            self.launches += 1;
            let start = self.idle_since.max(self.now).max(self.blocked_until);
            let waits = self.blocked_until > self.now;
            self.idle_since = start + kernel.ns;
            let limited = !self.ground.gate.is_unlimited();
            let id = SegmentId(self.number());
            let of = if known.is_none() { Measured::First } else { Measured::Run };
            let segment = Segment {
                predicted,
                carried: 0,
                presumed: 0,
                launches: 1,
                row: Some(row),
                dense: true,
                span: 0,
                gap: 0,
                record: 0,
                of,
                opened: self.now,
                behind_wait: waits,
            };
            self.queue.push_back(Queued { id, start, end: start + kernel.ns, predicted, limited, waits });
            let limited = self.queue.iter().filter(|queued| queued.limited);
            let queued = limited.map(|queued| queued.predicted).sum();
            self.most_queued = self.most_queued.max(queued);
            self.feed(MeterEvent::Recorded { device: DEVICE, id, segment });
        }
    }

    /// Makes the stream wait for so long, in ns.
    pub fn wait_on_stream(&mut self, ns: u64) {
        self.blocked_until = self.now + ns;
    }

    /// Lets the host look.
    pub fn look(&mut self) {
        for at in 0..self.queue.len() {
            let Queued { id, start, waits, .. } = self.queue[at];
            if waits && start <= self.now {
                self.queue[at].waits = false;
                self.feed(MeterEvent::WaitOver { device: DEVICE, id });
            }
        }
        while self.queue.front().is_some_and(|queued| queued.end <= self.now) {
            let Some(queued) = self.queue.pop_front() else { break };
            self.busy += queued.end - queued.start;
            let (start, end) = (Timestamp::from_nanos(queued.start), Timestamp::from_nanos(queued.end));
            self.feed(MeterEvent::Completed { device: DEVICE, id: queued.id, start, end });
        }
        let waited = Duration::from_nanos(self.waited);
        let (launches, waiting, measuring) = (self.launches, self.waits.into(), self.measuring);
        let movable = self.movable;
        let facts = Facts { launches, waiting, measuring, waited, movable, ..Facts::default() };
        self.feed(MeterEvent::Looked { device: DEVICE, facts });
        self.feed(MeterEvent::DeadlineReached);
    }

    /// Lets time pass; the program launches whenever it can.
    pub fn run(&mut self, ns: u64) {
        let until = self.now + ns;
        self.launch();
        self.look();
        while self.now < until {
            let deadline = self.meter.next_deadline().map_or(u64::MAX, Timestamp::as_nanos);
            self.now = deadline.max(self.now + 20 * US).min(self.now + 1_000 * MS).min(until);
            let before = self.waits;
            self.look();
            self.launch();
            if self.waits && !before {
                self.look();
                self.launch();
            }
        }
    }

    /// Lets time pass until nothing is queued, without a look.
    pub fn skip_to_idle(&mut self) {
        self.now = self.now.max(self.idle_since);
    }

    /// Adds a number of kernels to be launched.
    pub fn launches(&mut self, count: usize, kernel: Kernel) {
        self.program.extend(core::iter::repeat_n(kernel, count));
    }

    /// The turn, total and state of each `Use` said so far.
    pub fn uses(&self) -> Vec<(u32, u64, UseState)> {
        let said = |(_, message): &(u64, ToDaemon)| match *message {
            ToDaemon::Use { turn, used, state, .. } => Some((turn, used.as_nanos(), state)),
            _ => None,
        };
        self.said.iter().filter_map(said).collect()
    }

    /// The number of requests for time.
    pub fn requests(&self) -> usize {
        self.said_of(&[UseState::Wants, UseState::Extends])
    }

    pub fn said_of(&self, states: &[UseState]) -> usize {
        self.uses().iter().filter(|(_, _, state)| states.contains(state)).count()
    }

    /// The total reported at the end of each turn, in ns.
    pub fn ends(&self) -> Vec<u64> {
        let uses = self.uses();
        let before = core::iter::once(0).chain(uses.iter().map(|(turn, ..)| *turn));
        let ends = before.zip(&uses).filter(|(before, (turn, ..))| turn > before);
        ends.map(|(_, (_, used, _))| *used).collect()
    }

    /// The reports of long waits: the time, in ms since the bench began, and the reason.
    pub fn long_waits(&self) -> Vec<(u64, Option<Wait>)> {
        let told = |(at, message): &(u64, ToDaemon)| match *message {
            ToDaemon::Waiting { reason, .. } => Some((at / MS - 1_000, reason)),
            _ => None,
        };
        self.said.iter().filter_map(told).collect()
    }

    pub fn answer(&self, ticket: u64) -> Option<bool> {
        let mut answers = self.answers.iter().filter(|(of, _)| *of == Ticket(ticket));
        let answer = answers.next().map(|(_, granted)| *granted);
        assert!(answers.next().is_none(), "question {ticket} was answered twice: {:?}", self.answers);
        answer
    }

    /// Asks for the memory use of the instance's other processes, and returns the number of the question.
    pub fn view(&mut self) -> u64 {
        let ticket = self.number();
        self.feed(MeterEvent::ViewAsked { device: DEVICE, ticket: Ticket(ticket) });
        ticket
    }

    /// Asks for memory, and returns the number of the question.
    pub fn reserve(&mut self, bytes: u64) -> u64 {
        let ticket = self.number();
        self.feed(MeterEvent::MemoryAsked { device: DEVICE, bytes, ticket: Ticket(ticket) });
        ticket
    }
}
