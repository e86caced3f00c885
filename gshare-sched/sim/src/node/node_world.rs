//! The event loop, which takes each event to the part of the node concerned.

use super::daemon::{Daemon, garbage, hello, name_of, uuid};
use super::faults::Fault;
use super::hooked_process::{Identity, Life, Process};
use super::node_book::{GIVEN_UP, LONG, NodeBook};
use super::node_plan::{NodePlan, Program, Shape, smaller};
use super::outside::{Event, Outside};
use super::{NodeReport, Setup};
use crate::rng::Rng;
use crate::story::Story;
use crate::virtual_gpu::{Completion, VirtualGpu};
use gshare_core::wire::OnDaemonLoss;
use gshare_core::{ConnId, Duration, ResourceSpec, ServiceClass, Timestamp};

/// A process's GPU time, and its longest gap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Got {
    /// The GPU time of its kernels.
    pub busy: Duration,
    /// The number of ended kernels.
    pub kernels: u64,
    /// The longest time without a running kernel, from its first kernel on.
    pub gap: Duration,
    /// The end of its last kernel.
    pub until: Timestamp,
}

/// An instance, and the properties of its processes.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) gpu: usize,
    pub(super) shape: Shape,
    pub(super) name: String,
    pub(super) spec: ResourceSpec,
    pub(super) on_loss: OnDaemonLoss,
    /// `None` means the instance takes no part in vertical scaling.
    pub(super) class: Option<ServiceClass>,
}

/// A process with a planned start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planned {
    pub(super) instance: usize,
    pub(super) program: Program,
}

#[derive(Debug)]
struct Device {
    gpu: VirtualGpu,
    /// The time of the next look at the device.
    look: Option<Timestamp>,
}

/// A node and its surroundings. See the [module](super).
#[derive(Debug)]
pub struct NodeWorld<'a> {
    plan: &'a NodePlan,
    setup: &'a Setup,
    rng: Rng,
    pub(super) outside: Outside,
    pub(super) daemon: Daemon,
    pub(super) instances: Vec<Instance>,
    /// Every planned process has a place here, which is empty until the process starts.
    pub(super) processes: Vec<Option<Process>>,
    pub(super) planned: Vec<Planned>,
    devices: Vec<Device>,
    pub(super) got: Vec<Got>,
    started: u64,
    completed: Vec<Completion>,
}

/// The time from the daemon's return until all processes have connected again and have repaid their debts. Connecting takes 375 ms
/// at most; the debts come from kernels charged while no daemon kept them apart.
const CONNECTED_AGAIN: Duration = Duration::from_millis(2_500);
/// The time for the last reports of all processes.
const SETTLES: Duration = Duration::from_millis(500);
/// The length of a stopped process's lease: a token with its slack and grace, and the queued work.
const STOPPED_LEASE: Duration = Duration::from_millis(80);

impl<'a> NodeWorld<'a> {
    /// Builds the node of a plan; `logs` states whether the log keeps lines.
    pub fn new(plan: &'a NodePlan, setup: &'a Setup, logs: bool) -> Self {
        let mut rng = Rng::new(plan.seed);
        let mut book = NodeBook::new(setup.terms.window, plan.in_flight, setup.error_max);
        book.memory_is_known = !plan.kinds.daemon_kills
            && !plan.kinds.daemon_stops
            && !plan.kinds.broken_connections
            && !plan.kinds.late_frames;
        let (mut instances, mut planned, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (gpu, device) in plan.gpus.iter().enumerate() {
            book.add_gpu(device.memory);
            for entry in &device.instances {
                let (number, shape) = (instances.len(), device.shape);
                book.add_instance(gpu, shape, entry.spec);
                let (name, on_loss) = (name_of(gpu, number), entry.on_loss);
                instances.push(Instance { gpu, shape, name, spec: entry.spec, on_loss, class: None });
                for &(at, program) in &entry.processes {
                    starts.push((at, planned.len()));
                    planned.push(Planned { instance: number, program });
                }
            }
        }
        let names: Vec<_> = instances.iter().map(|instance| (instance.name.clone(), instance.spec)).collect();
        let daemon = Daemon::new(plan, &names, setup);
        let outside = Outside::new(book, plan.delays, rng.fork(), logs);
        let devices = plan.gpus.iter().map(|_| Device { gpu: VirtualGpu::new(), look: None }).collect();
        let processes = planned.iter().map(|_| None).collect();
        let got = vec![Got::default(); planned.len()];
        let mut world = Self {
            plan,
            setup,
            rng,
            outside,
            daemon,
            instances,
            processes,
            planned,
            devices,
            got,
            started: 0,
            completed: Vec::new(),
        };
        for entry in &world.planned {
            world.outside.book.add_process(entry.instance, &entry.program);
        }
        for (at, process) in starts {
            world.outside.queue.schedule(at, Event::Starts { process });
        }
        for (index, (at, _)) in plan.faults.iter().enumerate() {
            world.outside.queue.schedule(*at, Event::Fault { index });
        }
        world
    }

    /// Runs the plan to its end.
    pub fn run(&mut self, seed: u64) -> Result<NodeReport, Story> {
        let end = Timestamp::ZERO.saturating_add(self.setup.terms.window.saturating_mul(self.plan.windows));
        if let Err(what) = self.advance(end) {
            return Err(self.failure(seed, what));
        }
        let shares = self.outside.book.close(end);
        if let Err(what) = self.settle_accounts(end) {
            return Err(self.failure(seed, what));
        }
        if let Some(wrong) = self.outside.book.wrong() {
            let what = format!("{} at {}: {}", wrong.rule, wrong.at, wrong.what);
            return Err(self.failure(seed, what));
        }
        Ok(NodeReport {
            seed,
            processes: self.started,
            calls: self.daemon.calls(),
            refused: self.daemon.refused,
            log_hash: self.outside.log.hash(),
            shares,
            figures: self.outside.book.figures,
        })
    }

    /// Has all processes end in good order, and compares the last accounts.
    fn settle_accounts(&mut self, end: Timestamp) -> Result<(), String> {
        for entry in self.processes.iter_mut().flatten() {
            entry.leave(end, &mut self.outside);
        }
        let settled = end.saturating_add(SETTLES);
        self.advance(settled)?;
        self.daemon.compare_all(settled, &mut self.outside);
        self.outside.book.figures.accounts = self.outside.book.accounts.figures;
        Ok(())
    }

    fn failure(&self, seed: u64, wrong: String) -> Story {
        let mut events = vec![format!("{:#?}", self.plan)];
        events.extend(self.outside.log.lines());
        let at = self.outside.queue.now().to_string();
        Story { claim: "the node keeps its promises", seed: Some(seed), at, wrong, events }
    }

    /// The last lines of the log.
    pub fn log(&self) -> Vec<String> {
        self.outside.log.lines()
    }

    /// The figures of a process so far, by its place in the plan.
    pub fn got(&self, process: usize) -> Got {
        self.got.get(process).copied().unwrap_or_default()
    }

    /// Lets time pass until `until`, inclusively. The error describes the first violation.
    pub fn advance(&mut self, until: Timestamp) -> Result<(), String> {
        loop {
            let deadline = self.daemon.next_deadline();
            let next = self.outside.queue.next_at();
            let Some(now) = next.into_iter().chain(deadline).min().filter(|now| *now <= until) else {
                return Ok(());
            };
            let now = now.max(self.outside.queue.now());
            match next {
                Some(at) if at <= now => {
                    if let Some((now, event)) = self.outside.queue.pop() {
                        self.happens(now, event);
                    }
                }
                _ => self.daemon.deadline(now, &mut self.outside),
            }
            if let Some(violation) = self.daemon.violation() {
                return Err(format!("scheduler: {violation}"));
            }
            if let Some(wrong) = self.outside.book.wrong() {
                return Err(format!("{} at {}: {}", wrong.rule, wrong.at, wrong.what));
            }
        }
    }

    fn happens(&mut self, now: Timestamp, event: Event) {
        match event {
            Event::Starts { process } => self.starts(now, process),
            Event::Thread { process, turn } => self.thread(now, process, turn),
            Event::Helper { process, turn } => {
                if let Some(entry) = &mut self.processes[process] {
                    entry.helper(now, turn, &mut self.outside);
                    self.drop_if_gone(process);
                }
            }
            Event::Allocates { process } => {
                if let Some(entry) = &mut self.processes[process] {
                    entry.allocates(now, &mut self.outside);
                }
            }
            Event::Copied { process } => {
                if let Some(entry) = &mut self.processes[process] {
                    entry.copied(now, &mut self.outside);
                }
            }
            Event::Continues { process } => {
                if let Some(entry) = self.processes[process].as_mut().filter(|entry| entry.stopped) {
                    self.outside.log.line(now, || format!("process {process} continues"));
                    entry.continues(now, &mut self.outside);
                    self.outside.book.stopped(now, process, false);
                }
            }
            Event::ToDaemon { conn, .. } | Event::DaemonSeesEnd { conn } => {
                match self.outside.reads(now, conn, event) {
                    Some(Event::ToDaemon { frame, .. }) => {
                        self.daemon.receives(now, conn, *frame, &mut self.outside);
                    }
                    Some(_) => self.daemon.sees_end(now, conn, &mut self.outside),
                    None => {}
                }
            }
            Event::ToProcess { conn, frame } => self.arrives_at_process(now, conn, Some(*frame)),
            Event::ProcessSeesEnd { conn } => self.arrives_at_process(now, conn, None),
            Event::Device { gpu } => {
                self.devices[gpu].look = None;
                self.look(now, gpu);
            }
            Event::Fault { index } => {
                let fault = self.plan.faults[index].1;
                self.outside.log.line(now, || format!("fault: {fault:?}"));
                self.strikes(now, fault);
            }
            Event::DaemonStarts => {
                self.outside.log.line(now, || "daemon starts".to_owned());
                self.daemon.start(self.setup, &mut self.outside);
                self.outside.book.daemon(Some(now));
                self.outside.book.forgive_all(now);
            }
            Event::DaemonContinues => {
                if core::mem::take(&mut self.daemon.stopped) {
                    self.outside.log.line(now, || "daemon continues".to_owned());
                    self.outside.book.daemon(Some(now));
                    self.daemon.continues(now, &mut self.outside);
                }
            }
        }
    }

    // ---- processes ------------------------------------------------------------------------------------------------------

    pub(super) fn starts(&mut self, now: Timestamp, process: usize) {
        let Planned { instance, program } = self.planned[process];
        let entry = &self.instances[instance];
        // A process that starts without a daemon knows of no siblings: see the module.
        let alone = !self.daemon.lives();
        self.outside.book.starts(process, alone);
        let who = Identity {
            number: process,
            gpu: entry.gpu,
            uuid: uuid(entry.gpu),
            memory: self.plan.gpus[entry.gpu].memory,
            name: entry.name.clone(),
            run: instance as u64 + 1,
            spec: entry.spec,
            on_loss: entry.on_loss,
            class: entry.class,
        };
        self.outside
            .log
            .line(now, || format!("process {process} of instance {instance} starts: {program:?}"));
        self.started += 1;
        let mut new = Process::new(now, who, program, self.rng.fork());
        new.start(now, &mut self.outside);
        self.processes[process] = Some(new);
    }

    /// Plans one more process of an instance, with its start at `at`.
    fn plan_another(&mut self, at: Timestamp, like: usize) {
        let planned = self.planned[like];
        let process = self.planned.len();
        self.planned.push(planned);
        self.processes.push(None);
        self.got.push(Got::default());
        self.outside.book.add_process(planned.instance, &planned.program);
        self.outside.queue.schedule(at, Event::Starts { process });
    }

    fn thread(&mut self, now: Timestamp, process: usize, turn: u64) {
        let Some(gpu) = self.processes[process].as_ref().map(|entry| entry.who.gpu) else { return };
        self.look(now, gpu);
        if let Some(entry) = &mut self.processes[process] {
            entry.thread(now, turn, &mut self.devices[gpu].gpu, &mut self.outside);
        }
        self.look(now, gpu);
    }

    fn arrives_at_process(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        frame: Option<gshare_core::wire::ToClient>,
    ) {
        let Some(process) = self.outside.conn(conn).filter(|entry| entry.held).map(|entry| entry.process)
        else {
            return;
        };
        if let Some(entry) = self.processes.get_mut(process).and_then(Option::as_mut) {
            entry.receives(now, conn, frame, &mut self.outside);
        }
    }

    /// Drops the device queue of a process after its own exit.
    fn drop_if_gone(&mut self, process: usize) {
        if let Some(entry) = self.processes[process].as_ref().filter(|entry| entry.life == Life::Gone) {
            self.devices[entry.who.gpu].gpu.drop_queue(entry.queue());
        }
    }

    /// Brings a device up to date.
    fn look(&mut self, now: Timestamp, gpu: usize) {
        let mut completed = core::mem::take(&mut self.completed);
        let device = &mut self.devices[gpu];
        device.gpu.advance(now, &mut completed);
        for Completion { kernel, started, ended } in completed.drain(..) {
            let process = kernel.client.index();
            let spent = self.processes[process].as_ref().map_or(Duration::ZERO, Process::spent);
            self.outside.book.ran(process, spent, started, ended);
            let got = &mut self.got[process];
            got.busy = got.busy.saturating_add(ended.saturating_since(started));
            got.kernels += 1;
            if got.until > Timestamp::ZERO {
                got.gap = got.gap.max(started.saturating_since(got.until));
            }
            got.until = ended;
            if let Some(entry) = &mut self.processes[process] {
                entry.completed(ended, &mut self.outside);
            }
        }
        self.completed = completed;
        let device = &mut self.devices[gpu];
        if let Some(next) = device.gpu.next_completion()
            && device.look.is_none_or(|look| next < look)
        {
            device.look = Some(next);
            self.outside.queue.schedule(next, Event::Device { gpu });
        }
    }

    // ---- faults ---------------------------------------------------------------------------------------------------------

    /// The `number`-th running process.
    fn victim(&self, number: u16) -> Option<usize> {
        let there: Vec<usize> = self
            .processes
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.as_ref().is_some_and(|entry| entry.life == Life::Runs))
            .map(|(process, _)| process)
            .collect();
        there.get(usize::from(number) % there.len().max(1)).copied()
    }

    fn strikes(&mut self, now: Timestamp, fault: Fault) {
        let micros = |time: u32| Duration::from_micros(time.into());
        match fault {
            Fault::Kill { process, back } => {
                if let Some(process) = self.victim(process) {
                    self.kill(now, process);
                    self.comes_back(now, process, back);
                }
            }
            Fault::Leave { process, back } => {
                if let Some(process) = self.victim(process)
                    && let Some(entry) = &mut self.processes[process]
                    && !entry.stopped
                {
                    entry.leave(now, &mut self.outside);
                    self.comes_back(now, process, back);
                }
            }
            Fault::Stop { process, lasts } => {
                if let Some(process) = self.victim(process) {
                    self.stop(now, process, micros(lasts));
                }
            }
            Fault::Fork { process } => {
                if let Some(process) = self.victim(process).filter(|_| self.planned.len() < 128) {
                    self.plan_another(now.saturating_add(Duration::from_micros(100)), process);
                }
            }
            Fault::DaemonKilled { lasts } => self.kill_daemon(now, micros(lasts)),
            Fault::DaemonStopped { lasts } => self.stop_daemon(now, micros(lasts)),
            Fault::FramesLate { lasts } => {
                let until = now.saturating_add(micros(lasts));
                self.outside.late_until = self.outside.late_until.max(until);
                let lasts = micros(lasts).saturating_add(self.setup.terms.window);
                self.outside.book.excuse_all(now, lasts);
                self.outside.book.disturb_all(now, lasts);
            }
            Fault::FramesDoubled { lasts } => {
                let until = now.saturating_add(micros(lasts));
                self.outside.doubled_until = self.outside.doubled_until.max(until);
            }
            Fault::ConnectionBroken { process, late } => {
                if let Some(process) = self.victim(process) {
                    self.break_connection(now, process, micros(late));
                }
            }
            Fault::ClockBack { by } => self.set_clock_back(now, micros(by.max(1))),
            Fault::DeviceLost { gpu, back } => {
                let gpu = usize::from(gpu) % self.devices.len().max(1);
                self.lose_device(now, gpu, micros(back.max(50_000)));
            }
            Fault::Shares { instance, percent } => {
                let number = usize::from(instance) % self.instances.len().max(1);
                let instance = &mut self.instances[number];
                let spec = smaller(instance.shape, instance.spec, u64::from(percent % 101));
                if self.daemon.acts() && self.daemon.reload(now, &instance.name, spec, &mut self.outside) {
                    instance.spec = spec;
                    self.outside.book.share_changed(now, number, spec);
                }
            }
            Fault::LongKernel { process, lasts, strange } => {
                if let Some(process) = self.victim(process)
                    && let Some(entry) = &mut self.processes[process]
                {
                    entry.stretch(micros(lasts).max(LONG.saturating_add(Duration::from_millis(1))), strange);
                }
            }
            Fault::Garbage { process, kind, number } => self.send_garbage(now, process, kind, number),
        }
    }

    pub(super) fn kill(&mut self, now: Timestamp, process: usize) {
        let Some(entry) = &mut self.processes[process] else { return };
        let (gpu, instance) = (entry.who.gpu, self.planned[process].instance);
        entry.end(now, &mut self.outside);
        self.look(now, gpu);
        self.drop_if_gone(process);
        // The dead process never reports the use of its last token, so no process is charged, and a sibling may use that time
        // again.
        self.outside.book.forgive(now, instance, Duration::from_millis(500));
    }

    fn comes_back(&mut self, now: Timestamp, process: usize, back: u32) {
        if back > 0 && self.planned.len() < 128 {
            self.plan_another(now.saturating_add(Duration::from_micros(back.into())), process);
        }
    }

    fn stop(&mut self, now: Timestamp, process: usize, lasts: Duration) {
        let Some(entry) = self.processes[process].as_mut().filter(|entry| !entry.stopped) else { return };
        entry.stopped = true;
        self.outside.book.accounts.disturbed = true;
        let gpu = entry.who.gpu;
        self.outside.book.stopped(now, process, true);
        self.outside.book.excuse_instance(process, now, lasts.saturating_add(self.setup.terms.window));
        // The lease of the stopped process keeps others from the device until the daemon revokes it.
        self.outside.book.excuse(gpu, now, STOPPED_LEASE);
        // Nor can it make room for others.
        self.outside.book.keeps_memory(gpu, now, lasts);
        self.outside.book.disturb_gpu(
            now,
            gpu,
            STOPPED_LEASE.saturating_add(self.setup.terms.window.saturating_mul(3)),
        );
        self.outside.queue.schedule(now.saturating_add(lasts), Event::Continues { process });
    }

    fn break_connection(&mut self, now: Timestamp, process: usize, late: Duration) {
        let Some(entry) = &mut self.processes[process] else { return };
        let gpu = entry.who.gpu;
        entry.breaks(now, late, &mut self.outside);
        // Until the daemon sees the end, the old session may keep the token, and the process has none.
        let book = &mut self.outside.book;
        book.broken(process);
        book.excuse_instance(process, now, late.saturating_add(CONNECTED_AGAIN));
        book.excuse(gpu, now, late.saturating_add(STOPPED_LEASE));
        book.disturb_gpu(now, gpu, late.saturating_add(self.setup.terms.window.saturating_mul(3)));
    }

    fn kill_daemon(&mut self, now: Timestamp, lasts: Duration) {
        if !self.daemon.lives() {
            return;
        }
        let lasts = lasts.max(Duration::from_millis(1));
        self.daemon.die(now, &mut self.outside);
        let book = &mut self.outside.book;
        for number in 0..self.processes.len() {
            if self.processes[number].is_some() && !book.ever_served(number) {
                book.starts(number, true);
            }
        }
        book.daemon(None);
        book.disturb_all(now, lasts);
        book.excuse_all(now, lasts.saturating_add(CONNECTED_AGAIN));
        book.forgive_all(now);
        self.outside.queue.schedule(now.saturating_add(lasts), Event::DaemonStarts);
    }

    fn stop_daemon(&mut self, now: Timestamp, lasts: Duration) {
        if !self.daemon.acts() {
            return;
        }
        self.daemon.stopped = true;
        self.outside.book.accounts.disturbed = true;
        let book = &mut self.outside.book;
        book.daemon(None);
        book.disturb_all(now, lasts.saturating_add(self.setup.terms.window));
        book.daemon_is_silent(now, lasts);
        if lasts > GIVEN_UP {
            book.excuse_all(now.saturating_add(lasts), CONNECTED_AGAIN);
        }
        self.outside.queue.schedule(now.saturating_add(lasts), Event::DaemonContinues);
    }

    fn set_clock_back(&mut self, now: Timestamp, by: Duration) {
        let by = by.min(Duration::from_nanos(now.as_nanos()));
        if by.is_zero() {
            return;
        }
        if !self.daemon.refuses_earlier(now, by, &mut self.outside) {
            self.outside.book.fail(now, "clock", || format!("the node takes a time {by} earlier"));
        }
    }

    fn lose_device(&mut self, now: Timestamp, gpu: usize, back: Duration) {
        self.look(now, gpu);
        self.devices[gpu].gpu.lose();
        self.outside.book.accounts.disturbed = true;
        self.outside.book.disturb_gpu(now, gpu, back);
        self.outside.book.excuse(gpu, now, back);
        let on: Vec<usize> = (0..self.processes.len())
            .filter(|process| {
                self.processes[*process]
                    .as_ref()
                    .is_some_and(|entry| entry.who.gpu == gpu && entry.life != Life::Gone)
            })
            .collect();
        for process in on {
            let Some(entry) = &mut self.processes[process] else { continue };
            entry.lose_device(now, &mut self.outside);
            if entry.stopped {
                self.kill(now, process);
            } else {
                entry.leave(now, &mut self.outside);
            }
            if self.planned.len() < 128 {
                let later = self.rng.duration(Duration::ZERO, Duration::from_millis(20));
                self.plan_another(now.saturating_add(back).saturating_add(later), process);
            }
        }
    }

    /// Connects a process of another user, under an instance's name or its own, and sends garbage.
    fn send_garbage(&mut self, now: Timestamp, process: u16, kind: u8, number: u64) {
        let Some(conn) = self.outside.connect(now, usize::MAX) else { return };
        let name = match self.victim(process) {
            Some(process) if kind.is_multiple_of(3) => {
                self.instances[self.planned[process].instance].name.clone()
            }
            _ => "stranger".to_owned(),
        };
        let frames = [hello(&name, number % 8), garbage(kind, number), garbage(kind / 12, number / 3)];
        let first = usize::from(number.is_multiple_of(5));
        for (frame, after) in frames.into_iter().skip(first).zip(1..) {
            let at = now.saturating_add(Duration::from_micros(40 * after));
            self.outside.queue.schedule(at, Event::ToDaemon { conn, frame: Box::new(frame) });
        }
        let at = now.saturating_add(Duration::from_millis(5));
        self.outside.queue.schedule(at, Event::DaemonSeesEnd { conn });
    }
}
