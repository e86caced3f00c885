//! [`Serving`]: a request scheduler and a GPU manager in one thread.

use super::{GpuManager, GpuSpec, ManagerConfig, ManagerError, Program, Report};
use gshare_core::{Duration, GpuId, ModelId, RequestId, TenantId, Timestamp};
use gshare_sched::request::{
    GpuRecord, RejectReason, RequestAction, RequestError, RequestEvent, RequestScheduler, RequestStats,
    StateStore, TenantLimits,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// A request of a client.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Submission {
    /// Its name.
    pub request: RequestId,
    /// The model it needs.
    pub model: ModelId,
    /// The tenant that sends it. Tenant 0.
    pub tenant: TenantId,
    /// How long it may take; it is rejected as soon as that cannot be. No deadline.
    pub within: Option<Duration>,
    /// The bytes that the model process gets.
    pub input: Vec<u8>,
}

impl Submission {
    /// A request of tenant 0 without a deadline.
    pub const fn new(request: RequestId, model: ModelId, input: Vec<u8>) -> Self {
        Self { request, model, tenant: TenantId::new(0), within: None, input }
    }
}

/// A request that was served, by the clock of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer {
    /// When it was submitted.
    pub arrived: Timestamp,
    /// When it was given to the process that served it.
    pub dispatched: Timestamp,
    /// When its answer came.
    pub completed: Timestamp,
    /// Where it ran.
    pub gpu: GpuId,
    /// Time of its run (of its whole batch) by the model process's own clock.
    pub ran: Duration,
    /// The bytes that the model process answered.
    pub output: Vec<u8>,
}

/// Why a request was not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// The scheduler rejected it.
    #[error("rejected: {0:?}")]
    Rejected(RejectReason),
    /// The request cannot be: its name is taken, or its model or tenant unknown.
    #[error(transparent)]
    Invalid(#[from] RequestError),
    /// Its input is too long for a frame.
    #[error("input has {0} bytes: need at most {max}", max = super::frame::MAX_PAYLOAD)]
    InputTooLong(usize),
    /// The serving thread has stopped.
    #[error("serving has stopped")]
    Stopped,
}

/// How a request ended.
pub type Ending = Result<Answer, Refused>;

/// A request that was submitted.
#[derive(Debug)]
pub struct Ticket(Receiver<(RequestId, Ending)>);

impl Ticket {
    /// Waits for its end.
    ///
    /// # Errors
    /// Why it was not served.
    pub fn wait(self) -> Ending {
        self.0.recv().map_or(Err(Refused::Stopped), |(_, ending)| ending)
    }
}

/// Serving as it is now.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServingSnapshot {
    /// Requests that no GPU was chosen for.
    pub waiting: usize,
    /// Counters of the scheduler.
    pub stats: RequestStats,
    /// GPUs as their manager sees them.
    pub gpus: Vec<(GpuId, GpuRecord)>,
    /// Process numbers by GPU and model.
    pub processes: Vec<(GpuId, ModelId, u32)>,
}

/// The clock of the node: `CLOCK_MONOTONIC`, as the daemon and hooked processes read it.
fn node_time() -> Timestamp {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    Timestamp::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

type Reply<T> = SyncSender<Result<T, ManagerError>>;

enum Command {
    AddGpu(GpuId, GpuSpec, Reply<()>),
    RemoveGpu(GpuId, Reply<()>),
    AddModel(ModelId, Box<Program>, Reply<()>),
    Limit(TenantId, TenantLimits, Reply<()>),
    Submit(Submission, Timestamp, Sender<(RequestId, Ending)>),
    Cancel(RequestId),
    Snapshot(Reply<ServingSnapshot>),
    Stop,
}

/// A handle on a [`Serving`]: cheap to clone, usable from any thread.
#[derive(Debug, Clone)]
pub struct ServingHandle {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Command")
    }
}

impl ServingHandle {
    fn send(&self, command: Command) -> Result<(), ManagerError> {
        self.commands.send(command).map_err(|_| ManagerError::Stopped)?;
        // Fails only when the counter is full, and then the thread is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        Ok(())
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, ManagerError> {
        let (sender, receiver) = sync_channel(1);
        self.send(command(sender))?;
        receiver.recv().map_err(|_| ManagerError::Stopped)?
    }

    /// Puts a GPU in service.
    ///
    /// # Errors
    /// When it is here already, or the scheduler does not take it.
    pub fn add_gpu(&self, gpu: GpuId, spec: GpuSpec) -> Result<(), ManagerError> {
        self.ask(|reply| Command::AddGpu(gpu, spec, reply))
    }

    /// Takes a GPU out of service: its processes are killed, its requests go elsewhere.
    ///
    /// # Errors
    /// When it is not here.
    pub fn remove_gpu(&self, gpu: GpuId) -> Result<(), ManagerError> {
        self.ask(|reply| Command::RemoveGpu(gpu, reply))
    }

    /// A model that may be asked for.
    ///
    /// # Errors
    /// When it runs already, or the scheduler does not take it.
    pub fn add_model(&self, model: ModelId, program: Program) -> Result<(), ManagerError> {
        self.ask(|reply| Command::AddModel(model, Box::new(program), reply))
    }

    /// Sets the limits of a tenant from now on.
    ///
    /// # Errors
    /// When the scheduler does not take it.
    pub fn set_tenant(&self, tenant: TenantId, limits: TenantLimits) -> Result<(), ManagerError> {
        self.ask(|reply| Command::Limit(tenant, limits, reply))
    }

    /// Submits a request.
    ///
    /// # Errors
    /// When serving has stopped. An error in the request is told by its ticket.
    pub fn submit(&self, submission: Submission) -> Result<Ticket, ManagerError> {
        let (sender, receiver) = channel();
        self.submit_to(submission, sender)?;
        Ok(Ticket(receiver))
    }

    /// Submits a request whose end is sent to `endings`, with its name.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_to(
        &self,
        submission: Submission,
        endings: Sender<(RequestId, Ending)>,
    ) -> Result<(), ManagerError> {
        self.send(Command::Submit(submission, node_time(), endings))
    }

    /// The client gave up; a request that is being served is served all the same.
    ///
    /// # Errors
    /// When serving has stopped.
    pub fn cancel(&self, request: RequestId) -> Result<(), ManagerError> {
        self.send(Command::Cancel(request))
    }

    /// Serving as it is now.
    ///
    /// # Errors
    /// When serving has stopped.
    pub fn snapshot(&self) -> Result<ServingSnapshot, ManagerError> {
        self.ask(Command::Snapshot)
    }
}

/// A scheduler and a manager in a thread of their own. Dropping it kills the model processes; requests that wait end as
/// [`Refused::Stopped`].
#[derive(Debug)]
pub struct Serving {
    handle: ServingHandle,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    /// Starts serving.
    ///
    /// # Errors
    /// When the system gives no descriptor or thread.
    pub fn spawn(config: ManagerConfig, scheduler: Box<dyn RequestScheduler>) -> Result<Self, ManagerError> {
        Self::start(config, scheduler, None)
    }

    /// Starts serving, and tells others through `store` what is on the GPUs: several times per lease.
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn).
    pub fn spawn_with_store(
        config: ManagerConfig,
        scheduler: Box<dyn RequestScheduler>,
        store: Box<dyn StateStore>,
    ) -> Result<Self, ManagerError> {
        Self::start(config, scheduler, Some(store))
    }

    fn start(
        config: ManagerConfig,
        scheduler: Box<dyn RequestScheduler>,
        store: Option<Box<dyn StateStore>>,
    ) -> Result<Self, ManagerError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let (wake, (commands, inbox)) = (Arc::new(wake), channel());
        let renew = Duration::from_nanos((config.lease.as_nanos() / 4).max(1));
        let manager = GpuManager::new(config)?;
        let handle = ServingHandle { commands, wake: Arc::clone(&wake) };
        let desk = Desk {
            scheduler,
            manager,
            store: store.map(|store| (store, renew, node_time())),
            wake,
            inbox,
            open: BTreeMap::new(),
            actions: Vec::new(),
        };
        // Model processes die with this thread, also where it panics.
        let thread = std::thread::Builder::new().name("gshare-serving".into()).spawn(move || desk.serve())?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// A handle on it.
    pub fn handle(&self) -> ServingHandle {
        self.handle.clone()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.handle.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the serving thread panicked");
        }
    }
}

/// A request that has not ended.
struct Open {
    arrived: Timestamp,
    dispatched: Timestamp,
    gpu: GpuId,
    output: (Duration, Vec<u8>),
    endings: Sender<(RequestId, Ending)>,
}

struct Desk {
    scheduler: Box<dyn RequestScheduler>,
    manager: GpuManager,
    /// With the time between renewals, and the next one.
    store: Option<(Box<dyn StateStore>, Duration, Timestamp)>,
    wake: Arc<OwnedFd>,
    inbox: Receiver<Command>,
    open: BTreeMap<RequestId, Open>,
    actions: Vec<RequestAction>,
}

impl Desk {
    fn serve(mut self) {
        // Wake-ups at deadlines are otherwise up to 50 us late.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        loop {
            let publish = self.store.as_ref().map(|(.., next)| *next);
            let due = [self.manager.next_deadline(), self.scheduler.next_deadline(), publish]
                .into_iter()
                .flatten()
                .min();
            let now = node_time();
            let timeout = due.map(|due| {
                let wait = due.saturating_since(now).as_nanos();
                Timespec {
                    tv_sec: i64::try_from(wait / 1_000_000_000).unwrap_or(i64::MAX),
                    tv_nsec: i64::try_from(wait % 1_000_000_000).unwrap_or(0),
                }
            });
            let manager = self.manager.fd();
            let mut fds = [PollFd::new(&manager, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "serving stops");
                    return;
                }
            }
            let mut count = [0u8; 8];
            let _ = rustix::io::read(&self.wake, &mut count);
            while let Ok(command) = self.inbox.try_recv() {
                if matches!(command, Command::Stop) {
                    return;
                }
                self.command(command);
            }
            let now = node_time();
            if self.scheduler.next_deadline().is_some_and(|due| due <= now) {
                let _ = self.tell(now, RequestEvent::DeadlineReached);
            }
            self.reports();
            self.publish();
        }
    }

    fn publish(&mut self) {
        let now = node_time();
        let Some((store, renew, next)) = &mut self.store else { return };
        if *next <= now {
            *next = now.saturating_add(*renew);
            if let Err(error) = self.manager.publish(now, &mut **store) {
                tracing::warn!(%error, "the shared state was not written");
            }
        }
    }

    /// Tells the scheduler what the manager has to say, until that is nothing more.
    fn reports(&mut self) {
        let mut reports = Vec::new();
        loop {
            let now = node_time();
            if let Err(error) = self.manager.handle(now, &mut reports) {
                tracing::error!(%error, "model processes cannot be watched");
            }
            if reports.is_empty() {
                return;
            }
            for report in reports.drain(..) {
                match report {
                    Report::Event(event) => {
                        if let Err(error) = self.tell(now, event) {
                            tracing::warn!(?event, %error, "the scheduler does not take it");
                        }
                    }
                    Report::Output { request, ran, output } => {
                        if let Some(open) = self.open.get_mut(&request) {
                            open.output = (ran, output);
                        }
                    }
                    Report::DropHost { .. } => {}
                }
            }
        }
    }

    fn tell(&mut self, now: Timestamp, event: RequestEvent) -> Result<(), RequestError> {
        let mut actions = std::mem::take(&mut self.actions);
        let told = self.scheduler.handle(now, event, &mut actions);
        if let (Ok(()), RequestEvent::Completed { request, .. }) = (&told, event)
            && let Some(Open { arrived, dispatched, gpu, output: (ran, output), endings }) =
                self.open.remove(&request)
        {
            let answer = Answer { arrived, dispatched, completed: now, gpu, ran, output };
            // A client that does not wait any more.
            let _ = endings.send((request, Ok(answer)));
        }
        for action in actions.drain(..) {
            self.order(now, action);
        }
        self.actions = actions;
        told
    }

    fn order(&mut self, now: Timestamp, action: RequestAction) {
        match action {
            RequestAction::Dispatch { gpu, request, .. } => {
                if let Some(open) = self.open.get_mut(&request) {
                    (open.dispatched, open.gpu) = (now, gpu);
                }
            }
            RequestAction::Reject { request, reason } => self.end(request, Refused::Rejected(reason)),
            // The manager below does all of these.
            RequestAction::Evict { .. } | RequestAction::Load { .. } | RequestAction::DropHost { .. } => {}
        }
        if let Err(error) = self.manager.order(now, action) {
            // Only of a GPU that was taken away in this very moment, which the scheduler is about to hear.
            tracing::warn!(?action, %error, "an order that was not carried out");
        }
    }

    fn end(&mut self, request: RequestId, why: Refused) {
        self.manager.drop_input(request);
        if let Some(open) = self.open.remove(&request) {
            let _ = open.endings.send((request, Err(why)));
        }
    }

    fn command(&mut self, command: Command) {
        let now = node_time();
        match command {
            Command::AddGpu(gpu, spec, reply) => {
                let added = self.add_gpu(now, gpu, spec);
                let _ = reply.send(added);
            }
            Command::RemoveGpu(gpu, reply) => {
                let removed = self.manager.remove_gpu(gpu);
                self.reports();
                let _ = reply.send(removed);
            }
            Command::AddModel(model, program, reply) => {
                let added = self.add_model(now, model, *program);
                let _ = reply.send(added);
            }
            Command::Limit(tenant, limits, reply) => {
                let told = self.tell(now, RequestEvent::TenantLimited { tenant, limits });
                let _ = reply.send(told.map_err(ManagerError::from));
            }
            Command::Submit(submission, at, endings) => self.submit(now, submission, at, endings),
            Command::Cancel(request) => {
                // Unknown: it has ended in the meantime. On a GPU: too late.
                let _ = self.tell(now, RequestEvent::Cancelled { request });
            }
            Command::Snapshot(reply) => {
                let records = self.manager.gpus().map(|gpu| (gpu, self.manager.record(now, gpu)));
                let gpus = records.filter_map(|(gpu, record)| Some((gpu, record?))).collect();
                let (waiting, stats) = (self.scheduler.waiting(), self.scheduler.stats());
                let processes = self.manager.processes();
                let _ = reply.send(Ok(ServingSnapshot { waiting, stats, gpus, processes }));
            }
            Command::Stop => {}
        }
    }

    fn add_gpu(&mut self, now: Timestamp, gpu: GpuId, spec: GpuSpec) -> Result<(), ManagerError> {
        self.reports();
        self.manager.add_gpu(gpu, spec)?;
        for event in self.manager.take_events() {
            if let Err(error) = self.tell(now, event) {
                self.manager.remove_gpu(gpu)?;
                self.manager.take_events();
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn add_model(&mut self, now: Timestamp, model: ModelId, program: Program) -> Result<(), ManagerError> {
        self.reports();
        let before = self.manager.program(model).cloned();
        self.manager.add_model(model, program)?;
        for event in self.manager.take_events() {
            if let Err(error) = self.tell(now, event) {
                self.manager.put_back(model, before);
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn submit(
        &mut self,
        now: Timestamp,
        submission: Submission,
        arrived: Timestamp,
        endings: Sender<(RequestId, Ending)>,
    ) {
        let Submission { request, model, tenant, within, input } = submission;
        let length = input.len();
        if self.open.contains_key(&request) {
            let error = RequestError::DuplicateRequest { request };
            let _ = endings.send((request, Err(error.into())));
            return;
        }
        if self.manager.set_input(request, input).is_err() {
            let _ = endings.send((request, Err(Refused::InputTooLong(length))));
            return;
        }
        let nothing = (Duration::ZERO, Vec::new());
        let gpu = GpuId::new(u32::MAX);
        self.open.insert(request, Open { arrived, dispatched: arrived, gpu, output: nothing, endings });
        let deadline = within.map(|within| arrived.saturating_add(within));
        if let Err(error) = self.tell(now, RequestEvent::Arrived { request, model, tenant, deadline }) {
            self.end(request, error.into());
        }
    }
}
