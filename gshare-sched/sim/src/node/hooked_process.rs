//! A hooked process: a program, its launching thread, and the helper thread around a [`Meter`].
//!
//! The helper takes the same steps as in the hook (`helper.rs` there), in the same order. It passes on the questions of threads,
//! then the frames of the daemon, then its findings on the device. Then it sleeps until the meter's next deadline, a frame, or a
//! waiting thread.

mod launching_thread;
mod movable_memory;

use movable_memory::Place;
pub(super) use movable_memory::copy_of;

use super::node_plan::Program;
use super::outside::{Event, Outside};
use super::stream::Stream;
use super::worker::Tasks;
use crate::rng::Rng;
use gshare_core::gate::LaunchGate;
use gshare_core::wire::{DaemonWait, OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConnId, DeviceUuid, Duration, ResourceSpec, RunId, ServiceClass, Timestamp,
};
use gshare_meter::cost::{CostTable, Row};
use gshare_meter::{
    Facts, Ground, MemoryAccount, Meter, MeterAction, MeterEvent, Ordinal, SegmentId, Settings, Ticket,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

const DEVICE: Ordinal = Ordinal(0);
/// The shortest and the longest sleep of the helper.
const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// The interval at which a thread waiting for credit looks by itself.
const POLL: Duration = Duration::from_millis(10);
/// The capacity of the driver's queue, in kernels.
const QUEUE: u64 = 1_024;
/// Handles of functions never launched before.
const NEW_FUNCTION: u64 = 1_000_000;
/// The time until a program's next try after a failed launch.
const AFTER_FAILURE: Duration = Duration::from_millis(20);

/// The state that the launching threads share with the meter.
#[derive(Debug)]
pub(super) struct Shared {
    gate: LaunchGate,
    costs: CostTable,
    memory: MemoryAccount,
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

/// The driven meter.
pub(super) type Metered = Meter<Arc<Shared>>;

/// The identity of a process: its number, its device, and its own claims.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub(super) number: usize,
    pub(super) gpu: usize,
    pub(super) uuid: DeviceUuid,
    pub(super) memory: Bytes,
    /// The name of its instance, the number of the run, and the requested share.
    pub(super) name: String,
    pub(super) run: u64,
    pub(super) spec: ResourceSpec,
    pub(super) on_loss: OnDaemonLoss,
    pub(super) class: Option<ServiceClass>,
}

/// The state of the launching thread.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Thread {
    /// The process has used its device for the first time, and waits to learn its daemon.
    Attaching,
    Ready,
    /// The program does something else until its next turn.
    Resting,
    /// The thread waits for credit.
    Credit {
        since: Timestamp,
        row: Row,
        cost: u64,
        alone: bool,
    },
    /// The thread waits for the measurement of a kernel like its next kernel.
    Measurement {
        since: Timestamp,
    },
    /// The thread waits for a kernel.
    Kernel {
        number: u64,
        began: Timestamp,
    },
    /// The thread waits for room in the driver's queue.
    Full,
    /// A worker without a task.
    Unemployed,
    Over,
}

#[derive(Debug, Clone, Copy)]
enum Question {
    Attach,
    Memory(u64),
    Return(u64),
    Leave,
}

#[derive(Debug)]
enum Request {
    Attach,
    Reserve(u64),
    Return(u64),
    Release(Bytes),
}

#[derive(Debug)]
enum Inbound {
    Frame(ToClient),
    End,
}

/// The stages in the life of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    Runs,
    /// The process is about to end in good order.
    Leaves,
    Gone,
}

/// One process. See the [module](self).
#[derive(Debug)]
pub(super) struct Process {
    pub(super) who: Identity,
    pub(super) program: Program,
    pub(super) life: Life,
    pub(super) stopped: bool,
    pub(super) stream: Stream,
    /// The tasks of a worker; other programs go on for ever.
    pub(super) tasks: Option<Tasks>,
    meter: Metered,
    ground: Arc<Shared>,
    rng: Rng,
    // ---- launching thread
    thread: Thread,
    turn: u64,
    next: Option<(u64, Duration)>,
    /// The length of the next drawn kernel, and whether it is of a new function.
    stretched: Option<(Duration, bool)>,
    /// The start of the program's next silence.
    silent_at: Timestamp,
    launches: u64,
    counted: bool,
    syncs: u64,
    waited: Duration,
    shut: bool,
    measures_all: bool,
    /// The device is lost, so every call fails.
    device_lost: bool,
    // ---- helper thread
    helper_turn: u64,
    helper_at: Option<Timestamp>,
    main: Option<ConnId>,
    probe: Option<ConnId>,
    inbox: VecDeque<(ConnId, Inbound)>,
    requests: VecDeque<Request>,
    questions: BTreeMap<Ticket, Question>,
    number: u64,
    events: VecDeque<MeterEvent<Arc<Shared>>>,
    // ---- allocating thread
    blocks: Vec<u64>,
    allocating: bool,
    /// The place of the program's weights.
    place: Place,
    /// Bytes in host memory; memory that is granted meanwhile is on the device.
    away: u64,
    /// The launching thread waits for the weights.
    missed: bool,
}

impl Process {
    pub(super) fn new(now: Timestamp, who: Identity, program: Program, mut rng: Rng) -> Self {
        let hello = ToDaemon::Hello {
            pid_start: who.number as u64 + 1,
            pid: u32::try_from(who.number).unwrap_or(u32::MAX) + 1,
            run: RunId::new(who.run.into()),
            name: who.name.clone(),
            program: "simulated".into(),
            spec: who.spec,
            on_loss: who.on_loss,
        };
        let (spec, on_loss) = (who.spec, who.on_loss);
        let settings = Settings {
            hello,
            spec,
            on_loss,
            daemon_wait: DaemonWait::default(),
            class: who.class,
            seed: rng.next_u64(),
        };
        let memory = MemoryAccount::of_member(who.memory.0);
        if spec.memory().is_some() {
            memory.limit_to(spec.memory());
        }
        let ground = Shared { gate: LaunchGate::new(), costs: CostTable::new(), memory };
        let silent_at =
            now.saturating_add(rng.duration(Duration::from_millis(1), Duration::from_millis(200)));
        Self {
            who,
            program,
            life: Life::Runs,
            stopped: false,
            stream: Stream::new(),
            tasks: None,
            meter: Meter::new(now, settings),
            ground: Arc::new(ground),
            rng,
            thread: Thread::Attaching,
            turn: 0,
            next: None,
            stretched: None,
            silent_at,
            launches: 0,
            counted: false,
            syncs: 0,
            waited: Duration::ZERO,
            shut: false,
            measures_all: false,
            device_lost: false,
            helper_turn: 0,
            helper_at: None,
            main: None,
            probe: None,
            inbox: VecDeque::new(),
            requests: VecDeque::from([Request::Attach]),
            questions: BTreeMap::new(),
            number: 0,
            events: VecDeque::from([MeterEvent::DeadlineReached]),
            blocks: Vec::new(),
            allocating: false,
            place: Place::Here,
            away: 0,
            missed: false,
        }
    }

    /// GPU time used so far, by the process's own measurement.
    pub(super) fn spent(&self) -> Duration {
        let prepaid = Duration::from_nanos(self.stream.open_run().prepaid);
        self.ground.gate.spent().saturating_sub(prepaid)
    }

    /// The name of this process's queue on the device.
    pub(super) fn queue(&self) -> ClientId {
        ClientId::new(u32::try_from(self.who.number).unwrap_or(u32::MAX), 0)
    }

    /// Whether the process can do anything.
    pub(super) fn acts(&self) -> bool {
        !self.stopped && self.life != Life::Gone
    }

    // ---- launching thread -----------------------------------------------------------------------------------------------

    fn call_thread(&mut self, at: Timestamp, outside: &mut Outside) {
        self.turn += 1;
        outside.queue.schedule(at, Event::Thread { process: self.who.number, turn: self.turn });
    }

    fn wake_thread(&mut self, now: Timestamp, outside: &mut Outside) {
        let at = now.saturating_add(outside.wake_up());
        self.call_thread(at, outside);
    }

    // ---- helper thread --------------------------------------------------------------------------------------------------

    /// Wakes the helper for new work.
    fn ring(&mut self, now: Timestamp, outside: &mut Outside) {
        let at = now.saturating_add(outside.wake_up());
        if self.helper_at.is_none_or(|planned| at < planned) {
            self.call_helper(at, outside);
        }
    }

    fn call_helper(&mut self, at: Timestamp, outside: &mut Outside) {
        self.helper_turn += 1;
        self.helper_at = Some(at);
        outside.queue.schedule(at, Event::Helper { process: self.who.number, turn: self.helper_turn });
    }

    /// Starts the process.
    pub(super) fn start(&mut self, now: Timestamp, outside: &mut Outside) {
        self.ring(now, outside);
        if self.program.allocates {
            outside.queue.schedule(now, Event::Allocates { process: self.who.number });
        }
    }

    /// Continues the process after a stop.
    pub(super) fn continues(&mut self, now: Timestamp, outside: &mut Outside) {
        self.stopped = false;
        self.call_helper(now, outside);
        self.call_thread(now, outside);
    }

    /// Receives a frame, or the end of a connection.
    pub(super) fn receives(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        frame: Option<ToClient>,
        outside: &mut Outside,
    ) {
        self.inbox.push_back((conn, frame.map_or(Inbound::End, Inbound::Frame)));
        if self.acts() {
            self.ring(now, outside);
        }
    }

    /// Takes a turn of the helper.
    pub(super) fn helper(&mut self, now: Timestamp, turn: u64, outside: &mut Outside) {
        if turn != self.helper_turn || !self.acts() {
            return;
        }
        self.helper_at = None;
        self.handle(now, outside);
        self.serve(now, outside);
        self.listen(now, outside);
        self.look(now, outside);
        if self.life == Life::Gone {
            return;
        }
        let sleep = self.meter.next_deadline().map_or(LONGEST_SLEEP, |next| next.saturating_since(now));
        let at = now.saturating_add(sleep.max(SHORTEST_SLEEP).min(LONGEST_SLEEP));
        let at = at.saturating_add(outside.wake_up());
        if self.helper_at.is_none_or(|planned| at < planned) {
            self.call_helper(at, outside);
        }
    }

    fn feed(&mut self, now: Timestamp, event: MeterEvent<Arc<Shared>>, outside: &mut Outside) {
        self.events.push_back(event);
        self.handle(now, outside);
    }

    fn handle(&mut self, now: Timestamp, outside: &mut Outside) {
        let mut actions = Vec::new();
        while let Some(event) = self.events.pop_front() {
            let attached = matches!(event, MeterEvent::Heard(ToClient::Attached { .. }));
            self.meter.handle(now, event, &mut actions);
            if attached {
                outside.book.attached(now, self.who.number);
            }
            for action in actions.drain(..) {
                self.carry_out(now, action, outside);
            }
        }
    }

    fn carry_out(&mut self, now: Timestamp, action: MeterAction, outside: &mut Outside) {
        match action {
            MeterAction::Connect => {
                self.main = outside.connect(now, self.who.number);
                self.events.push_back(match self.main {
                    Some(_) => MeterEvent::Connected,
                    None => MeterEvent::ConnectFailed,
                });
            }
            MeterAction::Disconnect => self.disconnect(now, outside),
            MeterAction::Probe(hello) => {
                self.end_probe(now, outside);
                self.probe = outside.connect(now, self.who.number);
                let asked = self.probe.is_some_and(|probe| outside.say(now, probe, hello));
                if !asked {
                    self.events.push_back(MeterEvent::ProbeFailed);
                }
            }
            MeterAction::Say(frame) => {
                if let Some(main) = self.main
                    && !outside.say(now, main, frame)
                {
                    // The daemon may have sent the reason.
                    self.disconnect(now, outside);
                }
            }
            MeterAction::Answer { ticket, granted } => self.answered(now, ticket, granted, outside),
            MeterAction::Wake(_) => {
                if matches!(self.thread, Thread::Credit { .. } | Thread::Measurement { .. }) {
                    self.wake_thread(now, outside);
                }
            }
            MeterAction::Shut { on, .. } => self.shut = on,
            MeterAction::MeasureAll { on, .. } => self.measures_all = on,
            MeterAction::MoveMemory { order, .. } => self.move_memory(now, order, outside),
            MeterAction::PresumeDone { predicted, .. } => self.stream.presume_done(predicted),
            MeterAction::Tell(line) => {
                outside.log.line(now, || format!("process {} prints: {line}", self.who.number));
            }
        }
    }

    /// Ends the connection, and first hears the frames received before.
    fn disconnect(&mut self, now: Timestamp, outside: &mut Outside) {
        self.end_probe(now, outside);
        let Some(main) = self.main.take() else { return };
        outside.hang_up(now, main);
        outside.book.detached(now, self.who.number);
        let (come, rest): (Vec<_>, Vec<_>) = self.inbox.drain(..).partition(|(conn, _)| *conn == main);
        self.inbox = rest.into();
        self.events.extend(come.into_iter().filter_map(|(_, inbound)| match inbound {
            Inbound::Frame(frame) => Some(MeterEvent::Heard(frame)),
            Inbound::End => None,
        }));
        self.events.push_back(MeterEvent::Lost);
    }

    fn end_probe(&mut self, now: Timestamp, outside: &mut Outside) {
        if let Some(probe) = self.probe.take() {
            outside.hang_up(now, probe);
        }
    }

    fn ticket(&mut self, now: Timestamp, question: Question, outside: &mut Outside) -> Ticket {
        self.number += 1;
        let ticket = Ticket(self.number);
        self.questions.insert(ticket, question);
        outside.book.asked(now, self.who.number, ticket);
        ticket
    }

    fn answered(&mut self, now: Timestamp, ticket: Ticket, granted: bool, outside: &mut Outside) {
        outside.book.answered(now, self.who.number, ticket);
        match self.questions.remove(&ticket) {
            Some(Question::Attach) if self.thread == Thread::Attaching => {
                self.thread = Thread::Ready;
                self.wake_thread(now, outside);
            }
            Some(Question::Attach) | None => {}
            Some(Question::Return(bytes)) => self.room_to_return(now, bytes, granted, outside),
            Some(Question::Memory(bytes)) => {
                self.allocating = false;
                if granted {
                    self.allocate(now, bytes, outside);
                } else {
                    self.is_denied(now, bytes, outside);
                }
                self.next_allocation(now, outside);
            }
            Some(Question::Leave) => self.end(now, outside),
        }
    }

    /// Passes the requests of threads on to the meter.
    fn serve(&mut self, now: Timestamp, outside: &mut Outside) {
        while let Some(request) = self.requests.pop_front() {
            let event = match request {
                Request::Attach => {
                    let ticket = self.ticket(now, Question::Attach, outside);
                    let (uuid, ground) = (self.who.uuid, Arc::clone(&self.ground));
                    MeterEvent::DeviceFound { device: DEVICE, uuid, ground, ticket }
                }
                Request::Reserve(bytes) => {
                    let ticket = self.ticket(now, Question::Memory(bytes), outside);
                    MeterEvent::MemoryAsked { device: DEVICE, bytes, ticket }
                }
                Request::Return(bytes) => {
                    let ticket = self.ticket(now, Question::Return(bytes), outside);
                    MeterEvent::MemoryAsked { device: DEVICE, bytes, ticket }
                }
                Request::Release(bytes) => MeterEvent::MemoryFreed { device: DEVICE, bytes },
            };
            self.feed(now, event, outside);
        }
    }

    /// Hears the received frames.
    fn listen(&mut self, now: Timestamp, outside: &mut Outside) {
        while let Some((conn, inbound)) = self.inbox.pop_front() {
            if self.probe == Some(conn) {
                self.end_probe(now, outside);
                let event = match inbound {
                    Inbound::Frame(_) => MeterEvent::ProbeAnswered,
                    Inbound::End => MeterEvent::ProbeFailed,
                };
                self.feed(now, event, outside);
            } else if self.main == Some(conn) {
                match inbound {
                    Inbound::Frame(frame) => {
                        if matches!(frame, ToClient::Welcome { .. }) {
                            self.serve(now, outside);
                        }
                        match frame {
                            ToClient::Park { on: 0, .. } if self.place == Place::Here => {
                                outside.book.is_here(now, self.who.number, None);
                            }
                            ToClient::Park { on: 1, .. } => outside.book.must_go(now, self.who.number),
                            _ => {}
                        }
                        self.feed(now, MeterEvent::Heard(frame), outside);
                    }
                    Inbound::End => {
                        self.disconnect(now, outside);
                        self.feed(now, MeterEvent::DeadlineReached, outside);
                    }
                }
            }
        }
    }

    /// Looks at counters and at the events passed by the device.
    fn look(&mut self, now: Timestamp, outside: &mut Outside) {
        let (launched, synced) = (vec![self.launches], vec![self.syncs]);
        self.feed(now, MeterEvent::ThreadsSeen { launched, synced }, outside);
        self.measure(now, outside);
        let waiting = u64::from(matches!(self.thread, Thread::Credit { .. }));
        let facts = Facts {
            launches: self.launches,
            waiting,
            measuring: u64::from(matches!(self.thread, Thread::Measurement { .. })),
            waited: self.waited,
            settled: core::mem::take(&mut self.stream.settled),
            refused: core::mem::take(&mut self.stream.refused),
            presumed: core::mem::take(&mut self.stream.presumed_since),
            open: vec![self.stream.open_run()],
            movable: self.movable(),
        };
        self.feed(now, MeterEvent::Looked { device: DEVICE, facts }, outside);
        self.feed(now, MeterEvent::DeadlineReached, outside);
    }

    fn measure(&mut self, now: Timestamp, outside: &mut Outside) {
        for at in 0..self.stream.under_way.len() {
            if self.stream.under_way[at].id.is_none() {
                self.number += 1;
                let id = SegmentId(self.number);
                self.stream.under_way[at].id = Some(id);
                let segment = self.stream.under_way[at].segment;
                self.feed(now, MeterEvent::Recorded { device: DEVICE, id, segment }, outside);
            }
        }
        let mut at = 0;
        while let Some(measurement) = self.stream.under_way.get(at) {
            let (over, lost) = (measurement.interval(), self.device_lost);
            match (measurement.id, over) {
                (Some(id), Some((start, end))) if end <= now => {
                    self.stream.under_way.remove(at);
                    self.feed(now, MeterEvent::Completed { device: DEVICE, id, start, end }, outside);
                }
                (Some(id), _) if lost => {
                    self.stream.under_way.remove(at);
                    self.feed(now, MeterEvent::MeasurementLost { device: DEVICE, id }, outside);
                }
                _ => at += 1,
            }
        }
    }

    // ---- allocating thread ----------------------------------------------------------------------------------------------

    fn next_allocation(&mut self, now: Timestamp, outside: &mut Outside) {
        let pause = self.rng.duration(Duration::from_millis(4), Duration::from_millis(120));
        outside.queue.schedule(now.saturating_add(pause), Event::Allocates { process: self.who.number });
    }

    /// Takes a turn of the allocating thread.
    pub(super) fn allocates(&mut self, now: Timestamp, outside: &mut Outside) {
        if self.life != Life::Runs || self.allocating {
            return;
        }
        if self.stopped || self.thread == Thread::Attaching || self.device_lost {
            return self.next_allocation(now, outside);
        }
        if self.program.weights > Bytes::ZERO {
            return self.load_weights(now, outside);
        }
        let limit = self.who.spec.memory().unwrap_or(self.who.memory).0;
        if self.blocks.is_empty() || self.rng.percent(60) {
            let bytes = (self.rng.between(1, limit / 6 + 1)) & !0xFFF | 0x1000;
            if self.ground.memory.reserve(bytes).is_ok() {
                self.allocate(now, bytes, outside);
            } else {
                self.allocating = true;
                self.requests.push_back(Request::Reserve(bytes));
                return self.ring(now, outside);
            }
        } else {
            let at = usize::try_from(self.rng.below(self.blocks.len() as u64)).unwrap_or(0);
            let bytes = self.blocks.swap_remove(at);
            self.free(now, bytes, outside);
        }
        self.next_allocation(now, outside);
    }

    /// Allocates reserved memory at the driver.
    fn allocate(&mut self, now: Timestamp, bytes: u64, outside: &mut Outside) {
        if outside.book.allocate(now, self.who.number, bytes) {
            self.blocks.push(bytes);
        } else {
            self.released(now, bytes, outside);
        }
    }

    fn free(&mut self, now: Timestamp, bytes: u64, outside: &mut Outside) {
        outside.book.free(self.who.number, bytes);
        self.released(now, bytes, outside);
    }

    fn released(&mut self, now: Timestamp, bytes: u64, outside: &mut Outside) {
        if let Some(surplus) = self.ground.memory.release(bytes) {
            self.requests.push_back(Request::Release(surplus));
            self.ring(now, outside);
        }
    }

    // ---- end ------------------------------------------------------------------------------------------------------------

    /// Ends the program in good order.
    pub(super) fn leave(&mut self, now: Timestamp, outside: &mut Outside) {
        if self.life != Life::Runs || self.stopped {
            return;
        }
        outside.book.stops_waiting(now, self.who.number);
        (self.life, self.thread) = (Life::Leaves, Thread::Over);
        let ticket = self.ticket(now, Question::Leave, outside);
        self.events.push_back(MeterEvent::Leaving { ticket });
        self.ring(now, outside);
    }

    /// Ends the process: its connections close, and the device drops its queued work.
    pub(super) fn end(&mut self, now: Timestamp, outside: &mut Outside) {
        if self.life == Life::Gone {
            return;
        }
        let asks = self.questions.values().any(|question| matches!(question, Question::Leave));
        let in_order = self.life == Life::Leaves && !asks;
        (self.life, self.thread, self.place) = (Life::Gone, Thread::Over, Place::Here);
        for conn in self.main.take().into_iter().chain(self.probe.take()) {
            outside.hang_up(now, conn);
        }
        outside.book.gone(now, self.who.number, in_order);
    }

    /// Loses the connection to the daemon, which notices `late`.
    pub(super) fn breaks(&mut self, now: Timestamp, late: Duration, outside: &mut Outside) {
        if let Some(main) = self.main {
            outside.breaks(now, main, late);
            self.receives(now, main, None, outside);
        }
    }

    /// Loses the device, so its queued work never ends.
    pub(super) fn lose_device(&mut self, now: Timestamp, outside: &mut Outside) {
        self.device_lost = true;
        self.ring(now, outside);
    }
}
