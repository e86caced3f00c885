//! Everything that goes wrong in a run, in one place.
//!
//! A fault names its victims by a number that is taken modulo those that are there when it happens, so that any numbers make a
//! history: those that a seed draws and those that a fuzzer finds.

use crate::rng::Rng;
use gshare_core::{Duration, Timestamp};

/// Something that goes wrong, or changes under way. Times are in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[non_exhaustive]
pub enum Fault {
    /// A process is killed, with what it has queued; another one of its instance starts `back` later, unless that is 0.
    Kill {
        /// Number of the victim; taken modulo those that are there.
        process: u16,
        /// How much later.
        back: u32,
    },
    /// A process ends in good order; another one starts as after a kill.
    Leave {
        /// Number of the victim; taken modulo those that are there.
        process: u16,
        /// How much later.
        back: u32,
    },
    /// A process is stopped by a signal, and continued later.
    Stop {
        /// Number of the victim; taken modulo those that are there.
        process: u16,
        /// How much later.
        lasts: u32,
    },
    /// A process gets a sibling: one more process of its instance, as after a fork or a late start.
    Fork {
        /// The process that gets a sibling.
        process: u16,
    },
    /// The daemon is killed, and started again later with another epoch.
    DaemonKilled {
        /// How much later.
        lasts: u32,
    },
    /// The daemon is stopped by a signal, and continued later: it accepts connections and frames meanwhile.
    DaemonStopped {
        /// How much later.
        lasts: u32,
    },
    /// For a while, many frames come milliseconds late, in their order.
    FramesLate {
        /// For how long.
        lasts: u32,
    },
    /// A host reads a clock that was set back, and offers that time to the node, which must refuse it and go on as if nothing had
    /// been said.
    ClockBack {
        /// By how much.
        by: u32,
    },
    /// A device is lost with all that runs on it: its processes get errors, end, and start again later.
    DeviceLost {
        /// Number of the victim; taken modulo those that are there.
        gpu: u8,
        /// How much later.
        back: u32,
    },
    /// The configuration is loaded again with smaller shares for an instance.
    Shares {
        /// Which instance.
        instance: u16,
        /// How much of its request is left, in per cent.
        percent: u8,
    },
    /// The next kernel of a process is a long one.
    LongKernel {
        /// Number of the process concerned; taken modulo those that are there.
        process: u16,
        /// How long.
        lasts: u32,
        /// Whether its function was never launched before. Else its predicted cost is far too low.
        strange: bool,
    },
    /// A frame that no hook would send now comes on the connection of a process.
    Garbage {
        /// The process whose connection is used.
        process: u16,
        /// Which message.
        kind: u8,
        /// The number that the message names.
        number: u64,
    },
}

/// Kinds of faults that a seed switches on or off. A run in which everything happens at once hides what only shows when some of
/// it does not (swarm testing).
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
    /// Each kind by a coin of its own; what disturbs a whole node more rarely, since nothing can be compared meanwhile.
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
            clock: coin(30),
            device_loss: coin(15),
            shares: coin(40),
            long_kernels: coin(30),
            garbage: coin(20),
        }
    }
}

/// The faults of a run of these kinds.
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
        // Now and then long enough for it to be given up.
        let longest = if rng.percent(15) { 5_000_000 } else { 300_000 };
        Fault::DaemonStopped { lasts: micros(rng, 1_000, longest) }
    });
    some(kinds.late_frames, 3, rng, &|rng| Fault::FramesLate { lasts: micros(rng, 10_000, 200_000) });
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
