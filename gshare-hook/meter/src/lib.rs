//! Decisions of a process that shares a GPU.
//!
//! # Problem
//! A launch takes 2 us, a question to the daemon 8 us and more. So a hooked process decides from a permission that it was given ahead
//! of time. When to ask for one, what to let in, what a kernel cost, when to give the permission back and what to do without a daemon
//! are decisions; reading clocks, sockets, counters and CUDA events is not. The decisions are here, so that they can be tested and
//! simulated in virtual time; the library that programs load is a loop around them.
//!
//! # Terms
//! Those of [`gshare_core::gate`]: spent, limit, in flight. A **segment** is a run of launches between two CUDA events.
//! A **turn** is the time in which the process holds the daemon's token, **attachment** says who lets launches in on a device.
//!
//! # Use
//! A host owns one [`Meter`] per process and gives it every event at its time:
//! ```text
//! 1. ThreadsSeen, then for each device Recorded and Completed for its segments, and Looked with its counters;
//! 2. frames and failures of the connection, questions of threads, as they come;
//! 3. DeadlineReached. Then it carries out the actions in order and sleeps until next_deadline, or until a thread waits.
//! ```
//! [`MeterAction::Connect`] is answered by `Connected` or `ConnectFailed`; [`MeterAction::Disconnect`] by what had come before
//! (`Heard`), then `Lost`; a connection that fails, by the same two. Launching threads spend from the
//! [`LaunchGate`](gshare_core::gate::LaunchGate) of the device's [`Ground`] and never wait for the meter while credit lasts.
//! The meter is no [`Engine`](gshare_core::Engine): its only caller is the process itself, so a wrong call is a panic, not an error.
//!
//! # Turns
//! ```text
//! Idle ── a thread waits: Use{Wants} ──▶ Wanting ── Allow ──▶ Holding ── launches, up to the bound in flight, as work completes
//! Holding ── nearly spent: Use{Extends} ──▶ Holding ── Allow ──▶ Holding, up to a larger total
//! Holding ── spent, expired, or nothing launched for 3 ms ──▶ Draining ── queue drained: Use{Idle or Wants} ──▶ Idle or Wanting
//! Holding, Draining ── Allow that is over: Use{Idle or Wants} ──▶ Idle or Wanting
//! ```
//! A kernel that runs is waited for before a token is given back: a client that is let in behind it would measure its end as its
//! own. Near the end of its time the bound in flight shrinks with the time that is left, so that the queue drains by then. Every `Use`
//! says the total that was used; one that is late or lost is made good by the next.
//!
//! Worked example: 10 ms are allowed, bound 2 ms, kernels of 1 ms. Two are let in; each completion lets in one more. With 2 ms
//! unspent more time is asked for. With the tenth launched and half a millisecond queued the token is given back. One kernel
//! of 400 ms is charged its guess of 0.5 ms; the daemon takes the token back after its grace, and charges 10 ms. When the kernel is
//! over, and before the process ends, the total grows to 400 ms.
//!
//! # Work that waits for work
//! A stream may wait for another one, into which the program has yet to launch. If it fills the bound in flight, that launch
//! would wait for ever. So when a thread waits while launches are allowed and nothing has completed for 100 ms beyond the time by which
//! it should have, one launch is let in beyond the bound.
//!
//! # Without a daemon
//! With policy *open* the process keeps its last part of the share by its own clock, and pays back what it overused before. With *closed* launches wait, and fail
//! after [`Settings::daemon_wait`], 5 s by default. A daemon that says nothing for three fifths of that while a thread waits is
//! probed by a second connection; if it does not greet, it is as good as gone (a stopped process keeps its sockets).
//!
//! With either policy it allocates within its last part of the memory: parts of the processes of an instance add up to the limit
//! of the instance. A process whose run may have others ([`MemoryAccount::of_member`]) has no part before a daemon has stated one:
//! allocations and looks at memory wait for that, until the daemon has been away for the same wait; then the allocations fail,
//! and one line says why. The only process of a run has the whole limit.
//!
//! A daemon that *refuses* the process or a device ([`ToClient::Refused`]) stops its launches: they wait for as long, if another
//! attempt may succeed, and fail then. Where the operator lets such processes run, the daemon says so ([`ToClient::Unserved`])
//! and names the limits, which are kept as without a daemon. A device that the daemon does not manage is used
//! within the process's own limits.
//!
//! # Invariants
//! - Launches are let in while the device's turn is Holding, or by the local clock, and at no other time (asserted).
//! - The total that the daemon is told never shrinks.
//! - Every [`Ticket`] is answered once.
//! - Without a daemon the process never holds more memory than its part.
//!
//! # Cost
//! A look at a device is some hundred nanoseconds and a few microseconds for each segment that completed.
#![forbid(unsafe_code)]

mod allowance;
pub mod cost;
pub mod cycle;
mod device;
pub mod launch;
mod learning;
mod link;
mod memory_questions;
mod meter;
mod moving;
pub mod segment;
mod timeline;
pub mod timing;

pub use allowance::MemoryAccount;
pub use device::Ground;
pub use meter::Meter;
pub use segment::{Measured, SHORT_NS, Segment, SegmentId};

use gshare_core::wire::{DaemonWait, OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{Bytes, DeviceUuid, Duration, ResourceSpec, ServiceClass, Timestamp};

pub(crate) use MeterAction as Action;
pub(crate) type Actions = Vec<MeterAction>;

/// The process's own number of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ordinal(pub u32);

/// The host's number of a question that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Facts about a process when it begins to be metered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The frame that opens every connection: [`ToDaemon::Hello`].
    pub hello: ToDaemon,
    /// Limits that hold until a daemon states others.
    pub spec: ResourceSpec,
    /// Treatment of launches when the daemon is gone.
    pub on_loss: OnDaemonLoss,
    /// How long launches and allocations wait for a daemon.
    pub daemon_wait: DaemonWait,
    /// How the process asks to be treated beside others.
    pub class: Option<ServiceClass>,
    /// Seed of the delays between attempts to connect.
    pub seed: u64,
}

/// Counters of a device, as the host has seen them since its last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Kernels launched on the device so far.
    pub launches: u64,
    /// Threads that wait for credit now.
    pub waiting: u64,
    /// Threads that wait now until the cost of a kernel has been measured.
    pub measuring: u64,
    /// Time that threads have waited for credit so far.
    pub waited: Duration,
    /// Charged cost of launches that are over and will not be measured, in ns; each is stated once.
    pub settled: u64,
    /// Charged cost of launches that the driver refused, in ns; each is stated once.
    pub refused: u64,
    /// Charged cost of open launches that were taken for complete ([`MeterAction::PresumeDone`]), in ns; each is stated once.
    pub presumed: u64,
    /// Open launches of each run of each thread; a run keeps its place.
    pub open: Vec<OpenRun>,
}

/// Launches of one thread on one stream that no recorded event covers yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenRun {
    /// Their charged cost, in ns.
    pub predicted: u64,
    /// How much of that is presumed complete, in ns.
    pub presumed: u64,
    /// Credit that the thread holds for launches to come, in ns.
    pub prepaid: u64,
}

/// An event of the process. `G` is how the host shares a device's atomics.
#[derive(Debug)]
pub enum MeterEvent<G> {
    /// The connection that was asked for is there.
    Connected,
    /// The connection could not be made.
    ConnectFailed,
    /// The connection is gone; all that came before has been given as [`Heard`](Self::Heard).
    Lost,
    /// The daemon said something.
    Heard(ToClient),
    /// The second connection was answered, with any answer.
    ProbeAnswered,
    /// The second connection could not be made, or ended.
    ProbeFailed,
    /// The program uses a device for the first time, and a thread waits until it is known who serves it.
    DeviceFound {
        /// The process's own number of it.
        device: Ordinal,
        /// UUID of the GPU or MIG instance.
        uuid: DeviceUuid,
        /// State that the launching threads share with the meter.
        ground: G,
        /// To be answered: `true` if a daemon serves the device.
        ticket: Ticket,
    },
    /// A thread waits for memory that its account did not have.
    MemoryAsked {
        /// On which device.
        device: Ordinal,
        /// How much, all or nothing.
        bytes: u64,
        /// To be answered: `true` when the memory has been reserved for the thread.
        ticket: Ticket,
    },
    /// Memory has left the account of the process, to be returned to the daemon.
    MemoryFreed {
        /// On which device.
        device: Ordinal,
        /// How much.
        bytes: Bytes,
    },
    /// A thread waits to know what the instance's other processes use.
    ViewAsked {
        /// On which device.
        device: Ordinal,
        /// To be answered: `false` if no daemon can say.
        ticket: Ticket,
    },
    /// The counters of all threads, in an order that stays: launches, and calls that wait for the device.
    ThreadsSeen {
        /// Launches of each thread so far.
        launched: Vec<u64>,
        /// Synchronising calls of each thread so far.
        synced: Vec<u64>,
    },
    /// The end of a segment was recorded: its measurement is under way.
    Recorded {
        /// On which device.
        device: Ordinal,
        /// The host's number of it.
        id: SegmentId,
        /// The launches that the segment covers.
        segment: Segment,
    },
    /// The device has passed the end of a segment.
    Completed {
        /// On which device.
        device: Ordinal,
        /// Number of the segment.
        id: SegmentId,
        /// When the segment began, on the node's clock.
        start: Timestamp,
        /// When the segment ended.
        end: Timestamp,
    },
    /// A segment cannot be measured any more.
    MeasurementLost {
        /// On which device.
        device: Ordinal,
        /// Number of the segment.
        id: SegmentId,
    },
    /// The host has looked at a device. Segments that completed have been given before.
    Looked {
        /// The process's number of the device.
        device: Ordinal,
        /// Counters, each as the host saw it.
        facts: Facts,
    },
    /// Time has passed.
    DeadlineReached,
    /// The process is about to end. Looks go on until the answer.
    Leaving {
        /// To be answered when all that can be reported has been said, after 100 ms at most.
        ticket: Ticket,
    },
}

/// An order to the host.
#[derive(Clone, Debug, PartialEq)]
pub enum MeterAction {
    /// Make a connection to the daemon.
    Connect,
    /// End the connection.
    Disconnect,
    /// Make a second connection, say this on it, and see whether the daemon answers. A later probe replaces it.
    Probe(ToDaemon),
    /// Send this on the connection.
    Say(ToDaemon),
    /// Answer a question.
    Answer {
        /// Number of the question.
        ticket: Ticket,
        /// The answer.
        granted: bool,
    },
    /// Wake the threads that wait for credit or for a measurement on a device.
    Wake(Ordinal),
    /// No limit of time applies on a device, or one does: launches are metered only with `on == false`.
    FreeRunning {
        /// The process's number of the device.
        device: Ordinal,
        /// Whether launches pass without credit.
        on: bool,
    },
    /// Launches on a device fail while `on`.
    Shut {
        /// The process's number of the device.
        device: Ordinal,
        /// Whether launches fail.
        on: bool,
    },
    /// Every segment on a device is to be measured while `on`.
    MeasureAll {
        /// The process's number of the device.
        device: Ordinal,
        /// Whether all are measured.
        on: bool,
    },
    /// Take the open launches of a run for complete, if they are what they were: their thread is elsewhere.
    PresumeDone {
        /// On which device.
        device: Ordinal,
        /// Place of the run in [`Facts::open`].
        run: usize,
        /// Their charged cost, in ns.
        predicted: u64,
    },
    /// A line for the person who runs the program.
    Tell(String),
}
