//! Decisions of a process that shares a GPU.
//!
//! # Problem
//! A launch takes 2 us, and a question to the daemon 8 us and more. A hooked process therefore decides from a permission given ahead of
//! time: when to ask for it, which launches to let in, the cost of each kernel, when to give the permission back, and how to go on
//! without a daemon. These decisions are separate from clocks, sockets, counters and CUDA events, so they can be tested and simulated in
//! virtual time. The library loaded by programs is a loop around them.
//!
//! # Terms
//! [`gshare_core::gate`] defines spent, limit and in flight. A **segment** is a run of launches between two CUDA events. A **turn** is
//! the time with a token of the daemon. The **attachment** of a device names the party that lets launches in there.
//!
//! # Algorithm
//! A host owns one [`Meter`] per process. It first gives it `ThreadsSeen`, then for each device `Recorded`, `Completed` and `Looked`.
//! Frames, failures of the connection and questions of threads follow as they come, and last `DeadlineReached`. The host then carries out
//! the actions in order, and sleeps until [`Meter::next_deadline`] or until a thread waits. It answers [`MeterAction::Connect`] by
//! `Connected` or `ConnectFailed`. After [`MeterAction::Disconnect`] or a failed connection, it gives the frames received before
//! (`Heard`), then `Lost`. Threads spend from the [`LaunchGate`](gshare_core::gate::LaunchGate) of the device's [`Ground`], and never
//! wait for the meter while credit lasts. The meter is no [`Engine`](gshare_core::Engine): its only caller is the process itself, so a
//! wrong call is a panic, not an error.
//!
//! A turn begins when a thread waits and the daemon allows launches. Launches stop when its time is spent, when it expires, or after 3 ms
//! without a launch. The token is given back once the queue has drained, because another client would otherwise measure the end of this
//! work as its own (`device/turn.rs`). If a thread still waits 100 ms after the work in flight should have completed, one launch is let
//! in beyond the bound, since a stream may wait for it.
//!
//! Without a daemon, policy *open* keeps the last part of the share by the process's own clock, and pays back earlier overuse. Under policy
//! *closed*, launches wait, and fail after [`Settings::daemon_wait`], 5 s by default. Memory stays within the process's last part of the
//! instance's limit; the parts of all its processes add up to the limit. The only process of a run has the whole limit. A process of a run
//! with several members ([`MemoryAccount::of_member`]) has no part before a daemon states one. Its allocations and looks at memory wait for
//! a part; once the daemon has been away for the same wait, the allocations fail, and one line says why.
//!
//! # Invariants
//! - Launches are let in while the device's turn is Holding, or by the local clock, and at no other time (asserted). Nor are they let in
//!   while the device's memory is in host memory.
//! - The total use reported to the daemon never shrinks. Every [`Ticket`] is answered once.
//! - Without a daemon, the process never holds more memory than its part.
//!
//! # Cost
//! Some hundred nanoseconds for a look at a device, and a few microseconds for each completed segment.
#![forbid(unsafe_code)]

pub mod alone;
pub mod cost;
pub mod coverage;
pub mod cycle;
mod device;
mod link;
mod memory_account;
mod memory_questions;
mod meter;
pub mod run;
pub mod segment;

pub use device::Ground;
pub use memory_account::MemoryAccount;
pub use meter::Meter;
pub use segment::{Measured, SHORT_NS, Segment, SegmentId};

use gshare_core::reason::Obstacle;
use gshare_core::wire::{DaemonWait, OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{Bytes, DeviceUuid, Duration, ResourceSpec, ServiceClass, Timestamp};

pub(crate) use MeterAction as Action;
pub(crate) type Actions = Vec<MeterAction>;

/// The process's own number of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ordinal(pub u32);

/// The host's number of a question to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A process's settings at the start of its metering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The frame that opens every connection: [`ToDaemon::Hello`].
    pub hello: ToDaemon,
    /// Limits in force until a daemon states others.
    pub spec: ResourceSpec,
    /// Treatment of launches when the daemon is gone.
    pub on_loss: OnDaemonLoss,
    /// How long launches and allocations wait for a daemon.
    pub daemon_wait: DaemonWait,
    /// The class requested by the process, which orders its treatment beside others.
    pub class: Option<ServiceClass>,
    /// Seed of the delays between attempts to connect.
    pub seed: u64,
}

/// Counters of a device, as the host has seen them since its last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Kernels launched on the device so far.
    pub launches: u64,
    /// Threads now waiting for credit.
    pub waiting: u64,
    /// Threads now waiting for the measurement of a kernel's cost.
    pub measuring: u64,
    /// Total time of the threads' waits for credit so far.
    pub waited: Duration,
    /// Charged cost of completed launches that will not be measured, in ns; each is stated once.
    pub settled: u64,
    /// Charged cost of launches refused by the driver, in ns; each is stated once.
    pub refused: u64,
    /// Charged cost of open launches presumed complete ([`MeterAction::PresumeDone`]), in ns; each is stated once.
    pub presumed: u64,
    /// Open launches of each run of each thread; a run keeps its place.
    pub open: Vec<OpenRun>,
    /// The memory that can go to host memory; `None` for a process that cannot be parked.
    pub movable: Option<Movable>,
}

/// Memory of a device that can go to host memory and come back to the same addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Movable {
    /// Bytes that can move, or that have moved.
    pub bytes: u64,
    /// Why the rest of the process's memory stays on the device.
    pub obstacle: Option<Obstacle>,
    /// Threads now waiting for the memory to be on the device.
    pub missed: u64,
}

/// An order for the movable memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// To host memory, once the device has finished the process's work.
    ToHost,
    /// To the device.
    ToDevice,
    /// Give up a move to host memory for which the device is still at work.
    Cancel,
}

/// Launches of one thread on one stream, not yet covered by a recorded event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenRun {
    /// Charged cost of the launches, in ns.
    pub predicted: u64,
    /// The part of the cost presumed complete, in ns.
    pub presumed: u64,
    /// Credit held by the thread for later launches, in ns.
    pub prepaid: u64,
    /// Whether the device has begun none of the launches, because their stream waits for something else.
    pub waits: bool,
}

/// An event of the process. `G` is the host's way to share a device's atomics.
#[derive(Debug)]
pub enum MeterEvent<G> {
    /// The requested connection was made.
    Connected,
    /// The connection could not be made.
    ConnectFailed,
    /// The connection is gone, after all its frames were given as [`Heard`](Self::Heard).
    Lost,
    /// The daemon said something.
    Heard(ToClient),
    /// The daemon answered on the second connection, with any frame.
    ProbeAnswered,
    /// The second connection could not be made, or ended.
    ProbeFailed,
    /// The program uses a device for the first time. A thread waits until it is known whether a daemon serves the device.
    DeviceFound {
        /// The process's number of the device.
        device: Ordinal,
        /// UUID of the GPU or MIG instance.
        uuid: DeviceUuid,
        /// State shared by the launching threads and the meter.
        ground: G,
        /// To be answered: `true` if a daemon serves the device.
        ticket: Ticket,
    },
    /// A thread waits for memory missing from its account.
    MemoryAsked {
        /// The process's number of the device.
        device: Ordinal,
        /// The requested amount, all or nothing.
        bytes: u64,
        /// To be answered: `true` when the memory has been reserved for the thread.
        ticket: Ticket,
    },
    /// Memory has left the account of the process, to be returned to the daemon.
    MemoryFreed {
        /// The process's number of the device.
        device: Ordinal,
        /// The returned amount.
        bytes: Bytes,
    },
    /// A thread asks for the memory use of the instance's other processes.
    ViewAsked {
        /// The process's number of the device.
        device: Ordinal,
        /// To be answered: `false` if no daemon can say.
        ticket: Ticket,
    },
    /// The counters of all threads, always in the same order: launches, and calls that wait for the device.
    ThreadsSeen {
        /// Launches of each thread so far.
        launched: Vec<u64>,
        /// Synchronising calls of each thread so far.
        synced: Vec<u64>,
    },
    /// The end of a segment was recorded, so its measurement is under way.
    Recorded {
        /// The process's number of the device.
        device: Ordinal,
        /// The host's number of the segment.
        id: SegmentId,
        /// The segment, with its launches.
        segment: Segment,
    },
    /// The device has passed the beginning of a segment [behind a wait](Segment::behind_wait).
    WaitOver {
        /// The process's number of the device.
        device: Ordinal,
        /// The host's number of the segment.
        id: SegmentId,
    },
    /// The device has passed the end of a segment.
    Completed {
        /// The process's number of the device.
        device: Ordinal,
        /// The host's number of the segment.
        id: SegmentId,
        /// When the segment began, on the node's clock.
        start: Timestamp,
        /// When the segment ended.
        end: Timestamp,
    },
    /// A segment cannot be measured any more.
    MeasurementLost {
        /// The process's number of the device.
        device: Ordinal,
        /// The host's number of the segment.
        id: SegmentId,
    },
    /// The host has looked at a device, after it gave the completed segments.
    Looked {
        /// The process's number of the device.
        device: Ordinal,
        /// Counters, each as the host saw it.
        facts: Facts,
    },
    /// A move of the memory has ended, or has failed without effect.
    Moved {
        /// The process's number of the device.
        device: Ordinal,
        /// The reason for a failure.
        result: Result<(), Obstacle>,
    },
    /// Time has passed.
    DeadlineReached,
    /// The process is about to end. Looks go on until the answer.
    Leaving {
        /// To be answered when all use has been reported, as far as possible, after 100 ms at most.
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
    /// Wake all threads waiting for credit or for a measurement on a device.
    Wake(Ordinal),
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
    /// Presume the open launches of a run complete if they are unchanged, because their thread is elsewhere.
    PresumeDone {
        /// The process's number of the device.
        device: Ordinal,
        /// Place of the run in [`Facts::open`].
        run: usize,
        /// Charged cost of the launches, in ns.
        predicted: u64,
    },
    /// Move the memory of a device. Launches have stopped, and [`MeterEvent::Moved`] answers. After an order to cancel, only a move that
    /// was given up is answered at once.
    MoveMemory {
        /// The process's number of the device.
        device: Ordinal,
        /// The order.
        order: Move,
    },
    /// Print a line for the program's user.
    Tell(String),
}
