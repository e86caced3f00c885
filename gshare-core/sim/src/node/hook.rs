//! A hooked process: the launch gate and ledger that real ones use, with a work queue behind and a helper in front.

use super::plan::Plan;
use crate::rng::Rng;
use gshare_core::gate::{LaunchGate, LeaseLedger, Settlement};
use gshare_core::{ClientId, Duration, GpuId, LeaseId, Timestamp};
use std::collections::VecDeque;

/// What a hook says to the daemon.
#[derive(Debug, Clone, Copy)]
pub(super) enum Say {
    Request,
    Return { lease: LeaseId, used: Duration, again: bool },
    Report { lease: LeaseId, used: Duration },
}

/// A kernel that was let through the gate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Launch {
    pub(super) lease: LeaseId,
    pub(super) duration: Duration,
}

/// How it stands with the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mood {
    /// Always has a kernel to launch.
    Busy,
    /// Has nothing to launch.
    Silent,
    /// Answers nothing any more.
    Hung,
}

#[derive(Debug)]
pub(super) struct Hook {
    pub(super) gpu: GpuId,
    pub(super) plan: Plan,
    pub(super) mood: Mood,
    pub(super) rng: Rng,
    gate: LaunchGate,
    ledger: LeaseLedger,
    expires: Timestamp,
    /// A request is on its way or waits.
    requested: bool,
    /// The last lease that was given back: a grant of it that crosses its return means nothing.
    closed: Option<LeaseId>,
    /// Predicted costs of what is in flight, oldest first.
    predicted: VecDeque<Duration>,
    /// The next kernel: drawn once, whether or not the gate lets it through.
    next: Option<Duration>,
    /// When the last messages each way arrive: messages do not overtake each other.
    pub(super) said_until: Timestamp,
    pub(super) heard_until: Timestamp,
    reported_at: Timestamp,
}

/// Ask for more when this much of the budget is not launched yet: a round trip and some.
const AHEAD: Duration = Duration::from_micros(500);
/// Give the token back when no more than this is still in flight: it ends while the message travels.
const REMAINDER: Duration = Duration::from_micros(100);
/// Report at most this often.
const REPORT_EVERY: Duration = Duration::from_millis(3);

impl Hook {
    pub(super) fn new(gpu: GpuId, plan: Plan, in_flight: Duration, rng: Rng) -> Self {
        Self {
            gpu,
            plan,
            mood: Mood::Busy,
            rng,
            gate: LaunchGate::new(),
            ledger: LeaseLedger::new(in_flight),
            expires: Timestamp::ZERO,
            requested: false,
            closed: None,
            predicted: VecDeque::new(),
            next: None,
            said_until: Timestamp::ZERO,
            heard_until: Timestamp::ZERO,
            reported_at: Timestamp::ZERO,
        }
    }

    pub(super) const fn lease(&self) -> Option<LeaseId> {
        self.ledger_lease()
    }

    const fn ledger_lease(&self) -> Option<LeaseId> {
        None
    }
}
