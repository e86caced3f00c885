//! The handle by which the rest of a process talks to a running daemon.

use crate::admin::Room;
use crate::config::{Config, ConfigError};
use crate::metrics::Metrics;
use crate::moves::Progress;
use crate::nvml::DeviceFact;
use crate::server::DaemonError;
use crate::snapshot::Snapshot;
use gshare_core::{ClientId, ConnId};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// A function that takes an answer of the daemon's loop without waiting.
pub(crate) struct Reply<T>(Box<dyn FnOnce(T) + Send>);

impl<T> Reply<T> {
    fn new(take: impl FnOnce(T) + Send + 'static) -> Self {
        Self(Box::new(take))
    }

    pub(crate) fn send(self, answer: T) {
        self.0(answer);
    }
}

gshare_core::debug_fields!(Reply<T> {});

/// A request of a host to the daemon's loop.
#[derive(Debug)]
pub(crate) enum Command {
    Snapshot(Reply<Snapshot>),
    /// A client's refusal now, if any, for each device of the question.
    Room(Room, Reply<Vec<Option<String>>>),
    /// Begins to park an instance, or to bring it back.
    Park(Park, Reply<Parked>),
    /// The progress of a move at its end, or after a bounded time.
    Moved(Moved, Reply<Progress>),
    Reload(Box<Config>, SyncSender<Result<(), ConfigError>>),
    Found(ConnId, Option<DeviceFact>),
    Stop,
}

/// An order of a user to park an instance, or to bring it back.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Park {
    pub(crate) name: String,
    /// The asking user, whom the socket names.
    #[serde(skip)]
    pub(crate) uid: u32,
    pub(crate) on: bool,
    /// Whether the memory stays in host memory until it is asked back.
    #[serde(default)]
    pub(crate) holds: bool,
}

/// A question for the end of a move.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Moved {
    pub(crate) clients: Vec<ClientId>,
    /// Whether the move is to host memory.
    pub(crate) on: bool,
}

/// The clients whose memory moves from now on, or the refusal.
pub(crate) type Parked = Result<Vec<ClientId>, String>;

/// The loop's end of the line.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) commands: Receiver<Command>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Clears the pending wake-ups.
    pub(crate) fn clear(&self) {
        let mut count = [0u8; 8];
        // EAGAIN: another thread was faster.
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

/// A handle on a daemon, cheap to clone and usable from any thread. After the daemon has stopped, its calls return
/// [`DaemonError::Stopped`].
#[derive(Debug, Clone)]
pub struct Handle {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    metrics: Arc<Metrics>,
    /// The last snapshot for a question of a socket, and the time of its request.
    shared: Arc<tokio::sync::Mutex<Option<(Instant, Snapshot)>>>,
}

pub(crate) fn line(metrics: Arc<Metrics>) -> rustix::io::Result<(Handle, Inbox)> {
    let (sender, receiver) = channel();
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let inbox = Inbox { commands: receiver, wake: Arc::clone(&wake) };
    Ok((Handle { commands: sender, wake, metrics, shared: Arc::default() }, inbox))
}

impl Handle {
    fn send(&self, command: Command) -> Result<(), DaemonError> {
        self.commands.send(command).map_err(|_| DaemonError::Stopped)?;
        self.wake();
        Ok(())
    }

    /// Makes the daemon read its clock again. Only a host that moves its own clock needs this call.
    pub fn wake(&self) {
        // The write fails only when the counter is full, and then the daemon is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The present state of the daemon.
    pub fn snapshot(&self) -> Result<Snapshot, DaemonError> {
        let (sender, receiver) = sync_channel(1);
        self.send(Command::Snapshot(Reply::new(move |snapshot| drop(sender.send(snapshot)))))?;
        receiver.recv().map_err(|_| DaemonError::Stopped)
    }

    /// Asks the loop without blocking the thread.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, DaemonError> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.send(command(Reply::new(move |answer| drop(sender.send(answer)))))?;
        receiver.await.map_err(|_| DaemonError::Stopped)
    }

    /// As [`snapshot`](Self::snapshot), without blocking the thread. Only one question is with the loop at a time, and questions
    /// that come meanwhile share the next answer. Each question thus waits for two answers at most.
    pub(crate) async fn snapshot_later(&self) -> Result<Snapshot, DaemonError> {
        let came = Instant::now();
        let mut shared = self.shared.lock().await;
        if let Some((asked, snapshot)) = &*shared
            && *asked >= came
        {
            return Ok(snapshot.clone());
        }
        let asked = Instant::now();
        let snapshot = self.ask(Command::Snapshot).await?;
        *shared = Some((asked, snapshot.clone()));
        Ok(snapshot)
    }

    /// Puts another configuration in force, or changes nothing and returns the reason.
    pub fn reload(&self, config: Config) -> Result<(), DaemonError> {
        let (sender, receiver) = sync_channel(1);
        self.send(Command::Reload(Box::new(config), sender))?;
        receiver.recv().map_err(|_| DaemonError::Stopped)?.map_err(DaemonError::Config)
    }

    /// Counts a reload that failed before it reached the daemon.
    pub fn reload_failed(&self) {
        self.metrics.reloads.get_or_create(&crate::metrics::ReasonLabelSet { result: "refused" }).inc();
    }

    /// All metrics in Prometheus' text form.
    pub fn metrics(&self) -> Result<String, DaemonError> {
        Ok(self.metrics.encode(&self.snapshot()?))
    }

    /// As [`metrics`](Self::metrics), without blocking the thread.
    pub(crate) async fn metrics_later(&self) -> Result<String, DaemonError> {
        Ok(self.metrics.encode(&self.snapshot_later().await?))
    }

    /// Sends the daemon the driver's facts about the device for which a connection waits.
    pub(crate) fn found(&self, conn: ConnId, fact: Option<DeviceFact>) {
        // A stopped daemon does not need the facts.
        let _ = self.send(Command::Found(conn, fact));
    }

    /// Asks the daemon to stop, without waiting for its end.
    pub fn stop(&self) {
        let _ = self.send(Command::Stop);
    }
}

/// A daemon running in its own thread. Dropping it stops the daemon.
#[derive(Debug)]
pub struct Running {
    handle: Handle,
    thread: Option<JoinHandle<Result<(), DaemonError>>>,
}

impl Running {
    pub(crate) fn new(handle: Handle, thread: JoinHandle<Result<(), DaemonError>>) -> Self {
        Self { handle, thread: Some(thread) }
    }

    /// A handle on the daemon.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Stops the daemon, and waits until its sockets are gone and its journal is complete.
    pub fn stop(mut self) -> Result<(), DaemonError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), DaemonError> {
        self.handle.stop();
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(DaemonError::Stopped),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            tracing::error!(%error, "the daemon did not stop well");
        }
    }
}
