//! The host's side: starts stages, keeps requests, restarts what dies.

use super::{
    Assignment, ENV_ASSIGNMENT, ENV_HOST, ENV_INPUT, ENV_OUTPUT, ENV_STAGE, FAILED, Failure, FfsError,
};
use crate::channel::{Channel, ChannelError, ChannelOptions, Receiver, Sender};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a stage may die young, without a request to blame, before the function is over.
const MAX_YOUNG_DEATHS: u32 = 6;
/// A stage that lived longer did not die young.
const YOUNG: Duration = Duration::from_secs(1);
/// How long stages get to finish when the function is stopped.
const GRACE: Duration = Duration::from_secs(5);

type Answer = Result<Vec<u8>, FfsError>;

/// An accepted request.
#[derive(Debug)]
pub struct Ticket {
    /// Its number; grows by one with each.
    pub number: u64,
    answer: mpsc::Receiver<Answer>,
}

impl Ticket {
    /// Waits for the answer.
    ///
    /// # Errors
    /// [`FfsError::Stage`], [`FfsError::StageDied`], [`FfsError::StageDoesNotRun`], [`FfsError::Stopped`].
    pub fn wait(self) -> Answer {
        self.answer.recv().unwrap_or(Err(FfsError::Stopped))
    }
}

/// The state of a stage's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StageStatus {
    /// Its process; none between two.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u64,
}

#[derive(Debug)]
struct Input {
    sender: Sender,
    next: u64,
}

#[derive(Debug)]
struct Shared {
    input: Mutex<Input>,
    tickets: Mutex<BTreeMap<u64, mpsc::SyncSender<Answer>>>,
    status: Mutex<Vec<StageStatus>>,
    /// Why the function is over.
    over: Mutex<Option<FfsError>>,
    stop: AtomicBool,
}

impl Shared {
    /// Fails the requests that are open, and all that come later.
    fn end(&self, why: &FfsError) {
        self.over.lock().get_or_insert_with(|| why.clone());
        for (_, ticket) in std::mem::take(&mut *self.tickets.lock()) {
            drop(ticket.try_send(Err(why.clone())));
        }
    }
}

/// A function that runs as a pipeline of processes. Dropping it ends them.
#[derive(Debug)]
pub struct FfsFunction {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl FfsFunction {
    /// Starts the stages of the assignment in a file.
    ///
    /// # Errors
    /// [`FfsError::BadAssignment`], [`FfsError::Channel`]. A stage whose command does not run fails the requests.
    pub fn start(path: &Path) -> Result<Self, FfsError> {
        let assignment = Assignment::read(path)?;
        let links = (0..=assignment.stages.len())
            .map(|_| Channel::create(assignment.slots, assignment.slot_bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let options = ChannelOptions::default();
        let sender = reopen(&links[0])?.into_sender(options);
        let last = reopen(&links[links.len() - 1])?.into_receiver(options);
        let status = vec![StageStatus { pid: None, restarts: 0 }; assignment.stages.len()];
        let shared = Arc::new(Shared {
            input: Mutex::new(Input { sender, next: 1 }),
            tickets: Mutex::default(),
            status: Mutex::new(status),
            over: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let path = std::fs::canonicalize(path)
            .map_err(|error| FfsError::BadAssignment { what: format!("{}: {error}", path.display()) })?;
        let collector = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || collect(&shared, last))
        };
        let supervisor = {
            let shared = Arc::clone(&shared);
            // Stages die with the thread that started them, so one thread starts all of them, to the end.
            std::thread::spawn(move || Supervisor::new(shared, assignment, path, links).run())
        };
        Ok(Self { shared, threads: vec![supervisor, collector] })
    }

    /// Hands a request to the first stage; waits while it has no room.
    ///
    /// # Errors
    /// [`FfsError::Busy`] after `timeout`, [`FfsError::Channel`] for a request larger than a slot, or why the function is
    /// over. The request was not accepted then.
    pub fn submit(&self, request: &[u8], timeout: Option<Duration>) -> Result<Ticket, FfsError> {
        let mut input = self.shared.input.lock();
        if let Some(why) = &*self.shared.over.lock() {
            return Err(why.clone());
        }
        let number = input.next;
        let (answer, receiver) = mpsc::sync_channel(1);
        self.shared.tickets.lock().insert(number, answer);
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let sent = loop {
            // In short waits, to notice the end of the function.
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            let sent = input.sender.send(number, request, Some(left.min(Duration::from_millis(50))));
            let over = self.shared.over.lock().clone();
            match (sent, over) {
                (Err(ChannelError::TimedOut), Some(why)) => break Err(why),
                (Err(ChannelError::TimedOut), None) if !left.is_zero() => {}
                (Err(ChannelError::TimedOut), None) => break Err(FfsError::Busy),
                (Err(error), _) => break Err(error.into()),
                (Ok(()), _) => break Ok(()),
            }
        };
        match sent {
            Ok(()) => {
                input.next += 1;
                Ok(Ticket { number, answer: receiver })
            }
            Err(error) => {
                self.shared.tickets.lock().remove(&number);
                Err(error)
            }
        }
    }

    /// The stages' processes.
    pub fn stages(&self) -> Vec<StageStatus> {
        self.shared.status.lock().clone()
    }

    /// Requests that were accepted and not answered.
    pub fn open(&self) -> usize {
        self.shared.tickets.lock().len()
    }

    /// Lets the stages finish what was accepted, for a few seconds, and ends them.
    pub fn stop(mut self) {
        let begun = Instant::now();
        while self.open() > 0 && begun.elapsed() < GRACE && self.shared.over.lock().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.end();
    }

    /// Ends threads and stages. What is open by now is failed.
    fn end(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        if self.open() > 0 {
            self.shared.end(&FfsError::Stopped);
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.input.lock().sender.close();
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
        self.shared.end(&FfsError::Stopped);
    }
}

impl Drop for FfsFunction {
    fn drop(&mut self) {
        self.end();
    }
}

fn reopen(channel: &Channel) -> Result<Channel, FfsError> {
    let fd = channel.as_fd().try_clone_to_owned();
    let fd = fd.map_err(|error| ChannelError::Os { call: "dup", reason: error.to_string() })?;
    Ok(Channel::open(fd)?)
}

/// Gives answers to those who wait for them.
fn collect(shared: &Shared, mut last: Receiver) {
    while !shared.stop.load(Ordering::SeqCst) {
        match last.receive(Some(Duration::from_millis(50))) {
            Ok(message) => {
                let tag = message.tag();
                let failed = tag & FAILED != 0;
                let mut bytes = Vec::new();
                message.read(&mut bytes);
                let answer = if failed { Err(Failure::decode(&bytes)) } else { Ok(bytes) };
                if let Some(ticket) = shared.tickets.lock().remove(&(tag & !FAILED)) {
                    // The caller may have gone.
                    drop(ticket.try_send(answer));
                }
            }
            Err(ChannelError::TimedOut) => {}
            Err(ChannelError::Closed) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => {
                shared.end(&error.into());
                return;
            }
        }
    }
    // A stage that waits for room behind it need not wait any longer.
    last.close();
}

/// A stage's process.
#[derive(Debug)]
struct Process {
    child: Child,
    pidfd: OwnedFd,
    begun: Instant,
    /// The last message that its predecessor passed on.
    passed: Option<u64>,
}

struct Supervisor {
    shared: Arc<Shared>,
    assignment: Assignment,
    path: PathBuf,
    links: Vec<Channel>,
    processes: Vec<Option<Process>>,
    /// The request that each stage died over last, and how often; deaths without one.
    blamed: Vec<(u64, u32)>,
    young: Vec<u32>,
}

impl Supervisor {
    fn new(shared: Arc<Shared>, assignment: Assignment, path: PathBuf, links: Vec<Channel>) -> Self {
        let count = assignment.stages.len();
        let processes = std::iter::repeat_with(|| None).take(count).collect();
        let (blamed, young) = (vec![(0, 0); count], vec![0; count]);
        Self { shared, assignment, path, links, processes, blamed, young }
    }

    fn run(mut self) {
        for stage in 0..self.processes.len() {
            self.start(stage);
        }
        while !self.shared.stop.load(Ordering::SeqCst) && self.shared.over.lock().is_none() {
            for stage in self.dead(Duration::from_millis(50)) {
                self.died(stage);
            }
        }
        self.finish();
    }

    /// Stages whose process has ended, after waiting for one.
    fn dead(&self, patience: Duration) -> Vec<usize> {
        let alive: Vec<(usize, &Process)> = self
            .processes
            .iter()
            .enumerate()
            .filter_map(|(stage, process)| Some((stage, process.as_ref()?)))
            .collect();
        let mut fds: Vec<PollFd<'_>> =
            alive.iter().map(|(_, process)| PollFd::new(&process.pidfd, PollFlags::IN)).collect();
        let patience = Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() };
        if rustix::event::poll(&mut fds, Some(&patience)).is_err() {
            return Vec::new();
        }
        let ended = fds.iter().map(|fd| !fd.revents().is_empty());
        ended.zip(&alive).filter(|(ended, _)| *ended).map(|(_, (stage, _))| *stage).collect()
    }

    fn start(&mut self, stage: usize) {
        let spec = &self.assignment.stages[stage];
        let host = std::process::id();
        let link = |place: usize| format!("/proc/{host}/fd/{}", self.links[place].as_fd().as_raw_fd());
        let mut command = Command::new(&spec.command[0]);
        command
            .args(&spec.command[1..])
            .env("CUDA_VISIBLE_DEVICES", &spec.slice)
            .env(ENV_ASSIGNMENT, &self.path)
            .env(ENV_STAGE, stage.to_string())
            .env(ENV_HOST, host.to_string())
            .env(ENV_INPUT, link(stage))
            .env(ENV_OUTPUT, link(stage + 1))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let passed = self.passed_on(stage);
        let fails = |reason: String| FfsError::StageDoesNotRun { stage: number(stage), reason };
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return self.shared.end(&fails(format!("{}: {error}", spec.command[0]))),
        };
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => {
                self.shared.status.lock()[stage].pid = Some(child.id());
                self.processes[stage] = Some(Process { child, pidfd, begun: Instant::now(), passed });
            }
            Err(errno) => {
                drop(child.kill());
                drop(child.wait());
                self.shared.end(&fails(format!("pidfd_open: {errno}")));
            }
        }
    }

    /// Reaps the stage, settles what it died over, and starts it again.
    fn died(&mut self, stage: usize) {
        let Some(mut process) = self.processes[stage].take() else { return };
        let how = process.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        {
            let mut status = self.shared.status.lock();
            status[stage].pid = None;
            status[stage].restarts += 1;
        }
        if self.shared.stop.load(Ordering::SeqCst) {
            return;
        }
        match self.blame(stage) {
            // The bound of the request's attempts ends that.
            Ok(true) => self.young[stage] = 0,
            Ok(false) if process.begun.elapsed() >= YOUNG => self.young[stage] = 0,
            // One that has done something does run, however often it is killed.
            Ok(false) if self.passed_on(stage) != process.passed => self.young[stage] = 0,
            Ok(false) => self.young[stage] += 1,
            Err(error) => return self.shared.end(&error),
        }
        if self.young[stage] >= MAX_YOUNG_DEATHS {
            return self.shared.end(&FfsError::StageDoesNotRun { stage: number(stage), reason: how });
        }
        self.start(stage);
    }

    /// The last message behind a stage whose process is not there.
    fn passed_on(&self, stage: usize) -> Option<u64> {
        reopen(&self.links[stage + 1]).ok()?.into_sender(ChannelOptions::default()).last_tag()
    }

    /// Counts the death against the request that is first in the stage's input; fails that when it was one too many.
    /// Says whether there was one.
    fn blame(&mut self, stage: usize) -> Result<bool, FfsError> {
        let options = ChannelOptions::default();
        let mut input = reopen(&self.links[stage])?.into_receiver(options);
        let message = match input.receive(Some(Duration::ZERO)) {
            Ok(message) => message,
            Err(ChannelError::TimedOut | ChannelError::Closed) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let tag = message.tag() & !FAILED;
        let (before, deaths) = &mut self.blamed[stage];
        (*before, *deaths) = (tag, if *before == tag { *deaths + 1 } else { 1 });
        if *deaths < self.assignment.max_attempts {
            message.keep();
            return Ok(true);
        }
        let mut output = reopen(&self.links[stage + 1])?.into_sender(options);
        if output.last_tag().is_none_or(|last| last & !FAILED < tag) {
            let failure = Failure { stage: number(stage), reason: None, attempts: *deaths };
            let room = usize::try_from(self.assignment.slot_bytes).unwrap_or(usize::MAX);
            match output.send(tag | FAILED, &failure.encode(room), Some(Duration::ZERO)) {
                Ok(()) => {}
                // No room behind it now: the stage may try again, and is blamed again if it dies of it.
                Err(ChannelError::TimedOut) => {
                    message.keep();
                    return Ok(true);
                }
                Err(error) => return Err(error.into()),
            }
        }
        drop(message);
        Ok(true)
    }

    /// Waits for stages that end by themselves, and ends the others.
    fn finish(mut self) {
        let begun = Instant::now();
        let over = self.shared.over.lock().is_some();
        while !over && begun.elapsed() < GRACE && self.processes.iter().any(Option::is_some) {
            for stage in self.dead(Duration::from_millis(20)) {
                self.died(stage);
            }
        }
        for process in self.processes.iter_mut().flatten() {
            drop(process.child.kill());
            drop(process.child.wait());
        }
        for status in self.shared.status.lock().iter_mut() {
            status.pid = None;
        }
    }
}

fn number(stage: usize) -> u32 {
    u32::try_from(stage).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::StageSpec;

    /// More attempts than deaths for which a stage is given up: the request fails, not the function.
    #[test]
    fn deaths_over_one_request_do_not_end_the_function() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("assignment.json");
        let attempts = MAX_YOUNG_DEATHS + 4;
        // Before the request is there, and after it, nothing would be to blame.
        let script = format!(
            "cd {}; until [ -e go ]; do sleep 0.01; done; echo >> deaths; \
             [ $(wc -l < deaths) -gt {attempts} ] && exec sleep 1000; exit 1",
            dir.path().display()
        );
        let command = ["sh", "-c", &script].map(str::to_owned).to_vec();
        let stage = StageSpec { components: vec![], slice: "0".to_owned(), command };
        let mut assignment = Assignment::new("test", vec![stage], 256);
        assignment.max_attempts = attempts;
        std::fs::write(&path, serde_json::to_vec(&assignment).unwrap()).unwrap();
        let function = FfsFunction::start(&path).unwrap();
        let ticket = function.submit(b"x", None).unwrap();
        std::fs::write(dir.path().join("go"), "").unwrap();
        assert_eq!(ticket.wait(), Err(FfsError::StageDied { stage: 0, attempts }));
    }
}
