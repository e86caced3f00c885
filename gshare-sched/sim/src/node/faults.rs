//! All faults of a run, in one place.
//!
//! A fault names its victim by a number, taken modulo the number of candidates at that time. Any numbers therefore make a valid
//! history, from a seed as well as from a fuzzer.

use crate::rng::Rng;
use gshare_core::{Duration, Timestamp};

/// A fault, or a change under way. Times are in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[non_exhaustive]
pub enum Fault {
    /// A process is killed with its queued work. Another process of its instance starts `back` later, unless `back` is 0.
    Kill {
        /// The number of the victim, taken modulo the number of running processes.
        process: u16,
        /// The delay of the next process.
        back: u32,
    },
    /// A process ends in good order, and another process starts as after a kill.
    Leave {
        /// The number of the victim, taken modulo the number of running processes.
        process: u16,
        /// The delay of the next process.
        back: u32,
    },
    /// A signal stops a process, which continues later.
    Stop {
        /// The number of the victim, taken modulo the number of running processes.
        process: u16,
        /// The length of the stop.
        lasts: u32,
    },
    /// A process gets a sibling: one more process of its instance, as after a fork or a late start.
    Fork {
        /// The number of the process, taken modulo the number of running processes.
        process: u16,
    },
    /// The daemon is killed, and starts again later with another epoch.
    DaemonKilled {
        /// The time without a daemon.
        lasts: u32,
    },
    /// A signal stops the daemon, which continues later. Meanwhile it accepts connections and frames.
    DaemonStopped {
        /// The length of the stop.
        lasts: u32,
    },
    /// For a while, many frames come milliseconds late, in their order.
    FramesLate {
        /// The length of this time.
        lasts: u32,
    },
    /// For a while, many totals of use and many permissions come twice, one right behind the other.
    FramesDoubled {
        /// The length of this time.
        lasts: u32,
    },
    /// A process loses its connection, as a program that closes descriptors not its own does, and connects again. The frames under
    /// way to the process are lost.
    ConnectionBroken {
        /// The number of the victim, taken modulo the number of running processes.
        process: u16,
        /// The daemon reads the frames under way and the end this much later, so frames of the next connection may overtake them.
        /// With 0 the daemon sees the end at once, and the frames are lost.
        late: u32,
    },
    /// A host reads a clock set back, and offers its time to the node. The node must refuse the time and go on as before.
    ClockBack {
        /// The distance of the earlier time.
        by: u32,
    },
    /// A device is lost with all its work: its processes get errors, end, and start again later.
    DeviceLost {
        /// The number of the victim, taken modulo the number of devices.
        gpu: u8,
        /// The time until the device is back.
        back: u32,
    },
    /// The configuration is loaded again with smaller shares for an instance.
    Shares {
        /// The number of the instance, taken modulo the number of instances.
        instance: u16,
        /// The remaining part of its request, in per cent.
        percent: u8,
    },
    /// The next kernel of a process is a long one.
    LongKernel {
        /// The number of the process, taken modulo the number of running processes.
        process: u16,
        /// The length of the kernel.
        lasts: u32,
        /// Whether the kernel is of a new function; otherwise its predicted cost is far too low.
        strange: bool,
    },
    /// A frame that no hook would send now comes on a connection, under the name of a process's instance or a stranger's.
    Garbage {
        /// The number of the process, taken modulo the number of running processes.
        process: u16,
        /// The kind of the message.
        kind: u8,
        /// The number in the message.
        number: u64,
    },
}

/// The kinds of faults, each switched on or off by a seed. A run with all kinds at once would hide the errors of runs with only
/// some of them (swarm testing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "one for each kind of fault")]
#[non_exhaustive]
pub struct Kinds {
    /// [`Fault::Kill`].
    pub kills: bool,
    /// [`Fault::Leave`].
    pub leaves: bool,
    /// [`Fault::Stop`].
    pub stops: bool,
    /// [`Fault::Fork`].
    pub forks: bool,
    /// [`Fault::DaemonKilled`].
    pub daemon_kills: bool,
    /// [`Fault::DaemonStopped`].
    pub daemon_stops: bool,
    /// [`Fault::FramesLate`].
    pub late_frames: bool,
    /// [`Fault::FramesDoubled`].
    pub doubled_frames: bool,
    /// [`Fault::ConnectionBroken`].
    pub broken_connections: bool,
    /// [`Fault::ClockBack`].
    pub clock: bool,
    /// [`Fault::DeviceLost`].
    pub device_loss: bool,
    /// [`Fault::Shares`].
    pub shares: bool,
    /// [`Fault::LongKernel`].
    pub long_kernels: bool,
    /// [`Fault::Garbage`].
    pub garbage: bool,
}

impl Kinds {
    /// Draws each kind by its own coin. Faults of a whole node are rarer, since they leave nothing to compare meanwhile.
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let mut coin = |percent| rng.percent(percent);
        Self {
            kills: coin(50),
            leaves: coin(50),
            stops: coin(40),
            forks: coin(40),
            daemon_kills: coin(30),
            daemon_stops: coin(20),
            late_frames: coin(30),
            doubled_frames: coin(30),
            broken_connections: coin(30),
            clock: coin(30),
            device_loss: coin(15),
            shares: coin(40),
            long_kernels: coin(30),
            garbage: coin(20),
        }
    }
}

/// Draws the faults of a run of these kinds.
pub(super) fn draw(kinds: Kinds, length: Duration, rng: &mut Rng) -> Vec<(Timestamp, Fault)> {
    let mut faults = Vec::new();
    let mut some = |on: bool, most: u64, rng: &mut Rng, fault: &dyn Fn(&mut Rng) -> Fault| {
        let count = if on { rng.between(1, most) } else { 0 };
        for _ in 0..count {
            let at = Timestamp::from_nanos(rng.between(20_000_000, length.as_nanos().max(20_000_001)));
            faults.push((at, fault(rng)));
        }
    };
    let process = |rng: &mut Rng| u16::try_from(rng.below(1 << 16)).unwrap_or(0);
    let micros = |rng: &mut Rng, low: u64, high: u64| u32::try_from(rng.between(low, high)).unwrap_or(0);
    let back = |rng: &mut Rng| if rng.percent(50) { micros(rng, 1, 500_000) } else { 0 };
    some(kinds.kills, 4, rng, &|rng| Fault::Kill { process: process(rng), back: back(rng) });
    some(kinds.leaves, 4, rng, &|rng| Fault::Leave { process: process(rng), back: back(rng) });
    some(kinds.stops, 3, rng, &|rng| Fault::Stop {
        process: process(rng),
        lasts: micros(rng, 1_000, 800_000),
    });
    some(kinds.forks, 3, rng, &|rng| Fault::Fork { process: process(rng) });
    some(kinds.daemon_kills, 2, rng, &|rng| Fault::DaemonKilled { lasts: micros(rng, 1_000, 1_000_000) });
    some(kinds.daemon_stops, 1, rng, &|rng| {
        // The stop is now and then long enough for processes to give the daemon up.
        let longest = if rng.percent(15) { 5_000_000 } else { 300_000 };
        Fault::DaemonStopped { lasts: micros(rng, 1_000, longest) }
    });
    some(kinds.late_frames, 3, rng, &|rng| Fault::FramesLate { lasts: micros(rng, 10_000, 200_000) });
    some(kinds.doubled_frames, 3, rng, &|rng| Fault::FramesDoubled { lasts: micros(rng, 50_000, 800_000) });
    some(kinds.broken_connections, 4, rng, &|rng| Fault::ConnectionBroken {
        process: process(rng),
        late: if rng.percent(70) { micros(rng, 1, 100_000) } else { 0 },
    });
    some(kinds.clock, 3, rng, &|rng| Fault::ClockBack { by: micros(rng, 1, 4_000_000) });
    some(kinds.device_loss, 1, rng, &|rng| Fault::DeviceLost {
        gpu: u8::try_from(rng.below(256)).unwrap_or(0),
        back: micros(rng, 50_000, 500_000),
    });
    some(kinds.shares, 4, rng, &|rng| Fault::Shares {
        instance: process(rng),
        percent: u8::try_from(rng.between(50, 100)).unwrap_or(100),
    });
    some(kinds.long_kernels, 2, rng, &|rng| Fault::LongKernel {
        process: process(rng),
        lasts: micros(rng, 30_000, 400_000),
        strange: rng.percent(50),
    });
    some(kinds.garbage, 4, rng, &|rng| Fault::Garbage {
        process: process(rng),
        kind: u8::try_from(rng.below(256)).unwrap_or(0),
        number: rng.next_u64(),
    });
    faults
}
