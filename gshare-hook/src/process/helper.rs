//! The helper thread, which passes events to the [`Meter`] and carries out the meter's decisions.
//!
//! Each process has one helper thread. It blocks all signals and sleeps unless work is under way. In each turn it takes the
//! requests of the program's threads and the daemon's frames, and looks at counters and CUDA events. Then it sleeps until the
//! meter's next deadline, until the daemon's next frame, or until a thread wakes it. The meter makes every decision, and the launch
//! path sees the credit in the [`LaunchGate`](gshare_core::gate::LaunchGate) and the switches of the [`Device`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use gshare_core::wire::{ToClient, ToDaemon, VERSION, WireError};
use gshare_core::{Duration, Timestamp};
use gshare_meter::{Facts, Meter, MeterAction, MeterEvent, Ordinal, SegmentId, Settings, Ticket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::device::context::{Progress, RELAXED, exchange_capture_mode};
use crate::device::{Device, Pending};
use crate::launch::control::{CONTROL, State};
use crate::launch::thread_record::{RUNS, ThreadRecord};
use crate::launch::threads::main_has_ended;
use crate::process::end::{end_process, program_has_ended};
use crate::process::question::{Answer, Request};
use crate::process::runtime::Runtime;
use crate::sys::clock;
use crate::sys::connection::Connection;
use crate::sys::stderr::tell;

/// The longest sleep, in ns.
const LONGEST_SLEEP: u64 = 1_000_000_000;
/// The longest sleep, in ns, while no other thread can wake this thread because the program may have used up its descriptors.
const DEAF_SLEEP: u64 = 10_000_000;
/// The shortest sleep, in ns.
const SHORTEST_SLEEP: u64 = 20_000;
/// Longest wait at the end of the process for its last report, in ns.
const LEAVE_WAIT: u64 = 500_000_000;
/// Inode number of a machine's first PID namespace.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Runs until the process ends or the hook stands aside.
pub(crate) fn run(runtime: &'static Runtime) {
    relax();
    let mut helper = Helper::new(runtime);
    helper.feed(MeterEvent::DeadlineReached);
    loop {
        runtime.metering.beat.store(clock::now_ns(), Ordering::Relaxed);
        helper.serve(runtime.take_requests());
        helper.listen();
        helper.look();
        // The state is Armed while the first device is being attached.
        if CONTROL.state() == State::Off as u32 {
            return;
        }
        if main_has_ended() && program_has_ended() {
            helper.leave();
            end_process();
        }
        helper.sleep();
    }
}

/// Looks up the driver functions for this thread's later calls. By then the loader's lock may be held by a thread that waits for
/// this thread, such as a thread in a library's launching constructor.
pub(crate) fn look_up() {
    use crate::sys::driver::pointer;
    use gshare_cuda_abi::index as of;
    let called = [
        of::cuThreadExchangeStreamCaptureMode,
        of::cuCtxSetCurrent,
        of::cuEventQuery,
        of::cuEventElapsedTime,
    ];
    for index in called {
        let _ = pointer(index);
    }
}

/// Lets this thread use events while other threads capture, and wake on time.
fn relax() {
    #![allow(unsafe_code)] // calls to the kernel
    let _ = exchange_capture_mode(RELAXED);
    // SAFETY: sets the timer slack and the name of this thread.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_000);
        libc::prctl(libc::PR_SET_NAME, c"gshare".as_ptr());
    }
}

/// A device and its measurements under way.
#[derive(Debug)]
struct Watched {
    device: &'static Device,
    running: VecDeque<(SegmentId, Pending)>,
    /// Charged cost of launches presumed complete since the last look, in ns.
    presumed: u64,
}

/// A thread's question, with the bytes that a positive answer reserves for the thread.
#[derive(Debug)]
struct Question {
    answer: Answer,
    memory: Option<(&'static Device, u64)>,
}

#[derive(Debug)]
struct Helper {
    runtime: &'static Runtime,
    meter: Meter<&'static Device>,
    connection: Option<Connection>,
    probe: Option<Connection>,
    devices: Vec<Watched>,
    threads: Vec<&'static ThreadRecord>,
    questions: BTreeMap<Ticket, Question>,
    /// The number of the next ticket or segment.
    next: u64,
    /// Events caused by carrying out the meter's actions.
    events: VecDeque<MeterEvent<&'static Device>>,
    actions: Vec<MeterAction>,
    told_version: bool,
}

impl Helper {
    fn new(runtime: &'static Runtime) -> Self {
        let (now, config) = (clock::now_ns(), &runtime.config);
        let settings = Settings {
            hello: hello(runtime),
            spec: config.spec,
            on_loss: config.on_loss,
            daemon_wait: config.daemon_wait,
            class: config.class,
            seed: now,
        };
        Self {
            runtime,
            meter: Meter::new(Timestamp::from_nanos(now), settings),
            connection: None,
            probe: None,
            devices: Vec::new(),
            threads: Vec::new(),
            questions: BTreeMap::new(),
            next: 0,
            events: VecDeque::new(),
            actions: Vec::new(),
            told_version: false,
        }
    }

    /// Passes an event to the meter and carries out the meter's decisions.
    fn feed(&mut self, event: MeterEvent<&'static Device>) {
        self.events.push_back(event);
        while let Some(event) = self.events.pop_front() {
            let mut actions = core::mem::take(&mut self.actions);
            self.meter.handle(Timestamp::from_nanos(clock::now_ns()), event, &mut actions);
            for action in actions.drain(..) {
                self.carry_out(action);
            }
            self.actions = actions;
        }
        for Watched { device, .. } in &self.devices {
            let refused = self.meter.refuses(ordinal_of(device));
            if device.turned_away.swap(refused, Ordering::AcqRel) != refused {
                device.wake();
            }
        }
    }

    fn carry_out(&mut self, action: MeterAction) {
        match action {
            MeterAction::Connect => self.connect(),
            MeterAction::Disconnect => self.disconnect(),
            MeterAction::Probe(message) => self.begin_probe(&message),
            MeterAction::Say(message) => {
                if let Some(connection) = &mut self.connection
                    && connection.send(&message).is_err()
                {
                    // The daemon may have sent its reason before.
                    self.disconnect();
                }
            }
            MeterAction::Answer { ticket, granted } => self.answer(ticket, granted),
            MeterAction::Wake(device) => {
                if let Some(device) = self.device(device) {
                    device.wake();
                }
            }
            MeterAction::Shut { device, on } => {
                if let Some(device) = self.device(device) {
                    device.shut.store(on, Ordering::Release);
                }
            }
            MeterAction::MeasureAll { device, on } => {
                if let Some(device) = self.device(device) {
                    device.measures_all.store(on, Ordering::Relaxed);
                }
            }
            MeterAction::PresumeDone { device, run, predicted } => {
                let watched = self.devices.iter_mut().find(|watched| ordinal_of(watched.device) == device);
                if let (Some(thread), Some(watched)) = (self.threads.get(run / RUNS), watched) {
                    watched.presumed += thread.presume_done(watched.device, run % RUNS, predicted);
                }
            }
            MeterAction::MoveMemory { device: ordinal, order } => {
                let Some(device) = self.device(ordinal) else { return };
                if let Some(result) = self.runtime.move_memory(device, order) {
                    self.events.push_back(MeterEvent::Moved { device: ordinal, result });
                }
            }
            MeterAction::Tell(line) => tell(&line),
        }
    }

    fn device(&self, ordinal: Ordinal) -> Option<&'static Device> {
        let found = self.devices.iter().find(|watched| ordinal_of(watched.device) == ordinal);
        found.map(|watched| watched.device)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    // ---- threads ------------------------------------------------------------------------------------------------------

    /// Passes the requests of the program's threads to the meter.
    fn serve(&mut self, requests: Vec<Request>) {
        for request in requests {
            match request {
                Request::Attach(device, uuid, answer) => {
                    self.devices.push(Watched { device, running: VecDeque::new(), presumed: 0 });
                    let ticket = self.ask(answer, None);
                    let ordinal = ordinal_of(device);
                    self.feed(MeterEvent::DeviceFound { device: ordinal, uuid, ground: device, ticket });
                }
                Request::Memory(device, bytes, answer) => {
                    let ticket = self.ask(answer, Some((device, bytes)));
                    self.feed(MeterEvent::MemoryAsked { device: ordinal_of(device), bytes, ticket });
                }
                Request::View(device, answer) => {
                    // A daemon that knows that the memory can move tells more.
                    if self.runtime.blocks().is_some() {
                        self.look();
                    }
                    let ticket = self.ask(answer, None);
                    self.feed(MeterEvent::ViewAsked { device: ordinal_of(device), ticket });
                }
                Request::Release(device, bytes) => {
                    self.feed(MeterEvent::MemoryFreed { device: ordinal_of(device), bytes });
                }
                Request::Moved(device, result) => {
                    self.feed(MeterEvent::Moved { device: ordinal_of(device), result });
                }
                Request::Leave(answer) => {
                    let ticket = self.ask(answer, None);
                    self.feed(MeterEvent::Leaving { ticket });
                }
            }
        }
    }

    /// Reports the use of the ending process, within [`LEAVE_WAIT`].
    fn leave(&mut self) {
        let (answer, by) = (Answer::default(), clock::now_ns() + LEAVE_WAIT);
        self.serve(vec![Request::Leave(answer.clone())]);
        while !answer.is_given() && clock::now_ns() < by {
            self.listen();
            self.look();
            self.sleep();
        }
    }

    fn ask(&mut self, answer: Answer, memory: Option<(&'static Device, u64)>) -> Ticket {
        let ticket = Ticket(self.number());
        self.questions.insert(ticket, Question { answer, memory });
        ticket
    }

    fn answer(&mut self, ticket: Ticket, granted: bool) {
        let Some(Question { answer, memory }) = self.questions.remove(&ticket) else { return };
        if !answer.give(granted)
            && granted
            && let Some((device, bytes)) = memory
        {
            // The thread no longer waits, so the bytes go back.
            self.runtime.release(device.ordinal, bytes);
        }
    }

    // ---- daemon -------------------------------------------------------------------------------------------------------

    fn connect(&mut self) {
        let event = match Connection::open(&self.runtime.config.socket) {
            Ok(connection) => {
                self.connection = Some(connection);
                MeterEvent::Connected
            }
            Err(_) => MeterEvent::ConnectFailed,
        };
        self.events.push_back(event);
    }

    /// Ends the connection after hearing the frames that came before.
    fn disconnect(&mut self) {
        self.probe = None;
        if let Some(mut connection) = self.connection.take() {
            self.events.extend(connection.end().into_iter().map(MeterEvent::Heard));
            self.events.push_back(MeterEvent::Lost);
        }
    }

    fn begin_probe(&mut self, message: &ToDaemon) {
        let opened = Connection::open(&self.runtime.config.socket)
            .and_then(|mut probe| probe.send(message).map(|()| probe));
        self.probe = opened.ok();
        if self.probe.is_none() {
            self.events.push_back(MeterEvent::ProbeFailed);
        }
    }

    /// Hears the daemon's frames and passes them to the meter.
    fn listen(&mut self) {
        while let Some(connection) = &mut self.connection {
            match connection.receive() {
                Ok(Some(message)) => {
                    if matches!(message, ToClient::Welcome { .. }) {
                        // Attach states the use, so memory returned before it must not be returned again afterwards.
                        self.serve(self.runtime.take_requests());
                    }
                    self.feed(MeterEvent::Heard(message));
                }
                Ok(None) => break,
                Err(error) => {
                    self.explain(&error);
                    self.disconnect();
                    self.feed(MeterEvent::DeadlineReached);
                }
            }
        }
        let answered = self.probe.as_mut().map(Connection::receive);
        let event = match answered {
            Some(Ok(Some(_))) => MeterEvent::ProbeAnswered,
            Some(Err(_)) => MeterEvent::ProbeFailed,
            Some(Ok(None)) | None => return,
        };
        self.probe = None;
        self.feed(event);
    }

    /// Says once that the daemon is of another release, because the process would otherwise wait for it in silence.
    fn explain(&mut self, error: &std::io::Error) {
        let fault = error.get_ref().and_then(|fault| fault.downcast_ref());
        if let Some(WireError::Version { version }) = fault
            && !core::mem::replace(&mut self.told_version, true)
        {
            let socket = self.runtime.config.socket.display();
            tell(&format!(
                "the daemon at {socket} speaks version {version}, and this library version {VERSION}: upgrade the older one"
            ));
        }
    }

    // ---- devices ------------------------------------------------------------------------------------------------------

    /// Looks at the counters of threads and devices, and at the events passed by the devices.
    fn look(&mut self) {
        self.runtime.metering.contexts.end_overdue_holds(clock::now_ns());
        self.threads = self.runtime.metering.threads.all();
        let of_all = |counter: fn(&ThreadRecord) -> u64| -> Vec<u64> {
            self.threads.iter().map(|thread| counter(thread)).collect()
        };
        let launched = of_all(|thread| thread.launches.load(Ordering::Relaxed));
        let synced = of_all(|thread| thread.syncs.load(Ordering::Relaxed));
        let launches = launched.iter().sum();
        self.feed(MeterEvent::ThreadsSeen { launched, synced });
        for index in 0..self.devices.len() {
            self.measure(index);
            let device = self.devices[index].device;
            let facts = self.facts(index, launches);
            self.feed(MeterEvent::Looked { device: ordinal_of(device), facts });
        }
        self.feed(MeterEvent::DeadlineReached);
    }

    /// Tells the meter which measurements have begun and which are over.
    fn measure(&mut self, index: usize) {
        let device = self.devices[index].device;
        let ordinal = ordinal_of(device);
        for pending in device.take_pending() {
            let (id, segment) = (SegmentId(self.number()), pending.segment);
            self.devices[index].running.push_back((id, pending));
            self.feed(MeterEvent::Recorded { device: ordinal, id, segment });
        }
        for (id, mut pending) in core::mem::take(&mut self.devices[index].running) {
            if pending.segment.behind_wait && pending.context.has_passed(pending.pair.start) {
                pending.segment.behind_wait = false;
                self.feed(MeterEvent::WaitOver { device: ordinal, id });
            }
            let event = match pending.context.progress(pending.pair) {
                Progress::Running => {
                    self.devices[index].running.push_back((id, pending));
                    continue;
                }
                Progress::Lost => MeterEvent::MeasurementLost { device: ordinal, id },
                Progress::Ran(start, end) => {
                    let (start, end) = (Timestamp::from_nanos(start), Timestamp::from_nanos(end));
                    MeterEvent::Completed { device: ordinal, id, start, end }
                }
            };
            self.feed(event);
        }
    }

    fn facts(&mut self, index: usize, launches: u64) -> Facts {
        let Watched { device, presumed, .. } = &mut self.devices[index];
        // Launches on one device say nothing about another device.
        let several = self.runtime.metering.devices.sole().is_none();
        Facts {
            launches: if several { device.launches.load(Ordering::Relaxed) } else { launches },
            waiting: device.waiting.load(Ordering::Acquire),
            measuring: device.measuring.load(Ordering::Acquire),
            waited: Duration::from_nanos(device.waited_ns.load(Ordering::Relaxed)),
            settled: device.settled.swap(0, Ordering::AcqRel),
            refused: device.refused.swap(0, Ordering::AcqRel),
            presumed: core::mem::take(presumed),
            open: self.threads.iter().flat_map(|thread| thread.open_runs(device)).collect(),
            movable: self.runtime.movable(device),
        }
    }

    /// Sleeps until there is something to do.
    fn sleep(&self) {
        let bell = self.runtime.metering.bell.rope();
        // The end of a thread rings no bell, so its detection needs short sleeps.
        let hears = bell.is_some() && !main_has_ended();
        let longest = if hears { LONGEST_SLEEP } else { DEAF_SLEEP };
        let next = self.meter.next_deadline().map_or(u64::MAX, Timestamp::as_nanos);
        let nanos = next.saturating_sub(clock::now_ns()).clamp(SHORTEST_SLEEP, longest);
        let wait = Timespec {
            tv_sec: (nanos / 1_000_000_000).cast_signed(),
            tv_nsec: (nanos % 1_000_000_000).cast_signed(),
        };
        let mut files = Vec::with_capacity(3);
        files.extend(bell.as_deref().map(|bell| PollFd::new(bell, PollFlags::IN)));
        for connection in self.connection.iter().chain(&self.probe) {
            files.push(PollFd::new(connection, PollFlags::IN));
        }
        let _ = poll(&mut files, Some(&wait));
        if let Some(bell) = bell {
            bell.hush();
        }
    }
}

fn ordinal_of(device: &Device) -> Ordinal {
    Ordinal(device.ordinal.unsigned_abs())
}

/// The identity of this process, with a process id from its own PID namespace, where the first process of every container is 1.
fn hello(runtime: &Runtime) -> ToDaemon {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Field 2 is the program's name in parentheses and may hold any character; field 22 is the start time.
    let (head, tail) = stat.rsplit_once(") ").unwrap_or(("", ""));
    let program = head.split_once(" (").map_or_else(String::new, |(_, name)| name.to_owned());
    let pid_start = tail.split(' ').nth(19).and_then(|field| field.parse().ok()).unwrap_or(0);
    let pid = std::process::id();
    // The link reads like "pid:[4026531836]".
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok();
    let namespace =
        namespace.and_then(|link| link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok());
    let namespace = namespace.unwrap_or(FIRST_NAMESPACE);
    let place = if namespace == FIRST_NAMESPACE { String::new() } else { format!("@{namespace}") };
    let config = &runtime.config;
    ToDaemon::Hello {
        pid_start,
        pid,
        run: runtime.run,
        name: config.name.clone().unwrap_or_else(|| format!("{program}-{pid}{place}")),
        program,
        spec: config.spec,
        on_loss: config.on_loss,
    }
}
