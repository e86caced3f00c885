//! A hooked process: the launch gate and ledger that real ones use, with a work queue behind and a helper in front.

use super::plan::Plan;
use crate::rng::Rng;
use gshare_core::gate::{LaunchGate, LeaseLedger, Settlement};
use gshare_core::{Duration, GpuId, LeaseId, Timestamp};
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

    /// The process looks at what it may do now: launches what the gate lets through, then asks, reports or gives back.
    pub(super) fn pump(&mut self, now: Timestamp, says: &mut Vec<Say>, launches: &mut Vec<Launch>) {
        if self.mood == Mood::Hung {
            return;
        }
        let Some(lease) = self.ledger.lease() else {
            if self.mood == Mood::Busy && !self.requested {
                self.requested = true;
                says.push(Say::Request);
            }
            return;
        };
        while self.mood == Mood::Busy && now < self.expires {
            let (low, high) = self.plan.kernel;
            let duration = *self.next.get_or_insert_with(|| self.rng.duration(low, high));
            let predicted = Duration::from_nanos(duration.as_nanos() * self.plan.predicted_percent / 100);
            if !self.gate.try_spend(0, predicted) {
                break;
            }
            self.predicted.push_back(predicted);
            launches.push(Launch { lease, duration });
            self.next = None;
        }
        let (unspent, in_flight) = (self.ledger.unspent(&self.gate), self.ledger.in_flight(&self.gate));
        if now >= self.expires || (unspent.is_zero() && in_flight <= REMAINDER) {
            self.give_back(self.mood == Mood::Busy, says);
        } else if self.mood == Mood::Busy && !self.requested && unspent < AHEAD {
            self.requested = true;
            says.push(Say::Request);
        } else if now.saturating_since(self.reported_at) >= REPORT_EVERY {
            self.reported_at = now;
            says.push(Say::Report { lease, used: self.ledger.used(&self.gate) });
        }
    }

    /// A grant has arrived. Gives when it expires, if it means anything.
    pub(super) fn granted(
        &mut self,
        lease: LeaseId,
        budget: Duration,
        expires: Timestamp,
        says: &mut Vec<Say>,
    ) -> Option<Timestamp> {
        if self.mood == Mood::Hung || self.closed.is_some_and(|closed| lease <= closed) {
            return None;
        }
        let replaced = self.ledger.grant(&self.gate, lease, budget);
        self.expires = expires;
        self.requested = false;
        self.settled(replaced, false, says);
        Some(expires)
    }

    /// The lease is void.
    pub(super) fn revoked(&mut self, lease: LeaseId, says: &mut Vec<Say>) {
        if self.mood != Mood::Hung && self.ledger.lease() == Some(lease) {
            self.give_back(self.mood == Mood::Busy, says);
        }
    }

    /// The oldest kernel in flight is known to have ended, after it ran for `measured`.
    pub(super) fn completed(&mut self, measured: Duration) {
        if let Some(predicted) = self.predicted.pop_front() {
            self.ledger.completed(&self.gate, predicted, measured);
        }
    }

    /// Nothing is launched, nothing wanted: gives back a token that others could use.
    pub(super) fn is_idle(&self) -> bool {
        self.mood == Mood::Silent && self.ledger.lease().is_some() && self.predicted.is_empty()
    }

    /// Gives the token back.
    pub(super) fn give_back(&mut self, again: bool, says: &mut Vec<Say>) {
        let settled = self.ledger.close(&self.gate);
        self.requested |= again;
        self.settled(settled, again, says);
    }

    fn settled(&mut self, settlement: Option<Settlement>, again: bool, says: &mut Vec<Say>) {
        if let Some(Settlement { lease, used }) = settlement {
            self.closed = self.closed.max(Some(lease));
            says.push(Say::Return { lease, used, again });
        }
    }
}
