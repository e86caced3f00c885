//! A launch measured alone, because its cost is unknown, in doubt, or hidden by others.

use gshare_core::Duration;
use gshare_core::gate::LaunchGate;

use crate::cost::{CostTable, Row};
use crate::run::{Call, CallTime};
use crate::{Measured, SHORT_NS, Segment};

/// Launches of unknown cost that go ahead unmeasured.
const PROBES: u32 = 1;
/// How long a launch of unknown cost waits for a measurement.
pub const PROBE_WAIT: Duration = Duration::from_millis(200);

/// Whether a launch of unknown cost waits for another launch to be measured, for [`PROBE_WAIT`] at most. Two kernels of 30 ms at a
/// guess of 0.5 ms would be a debt of more than half a second for a client with a tenth of the time. Without a limit nothing waits.
pub fn awaits_measurement(gate: &LaunchGate, costs: &CostTable, row: Row) -> bool {
    costs.known(row).is_none() && costs.probes(row) >= PROBES && !gate.is_unlimited()
}

/// The assumed cost of a launch without a known cost, in ns. The launch counts as under measurement.
pub fn probe(costs: &CostTable, row: Row) -> u64 {
    let cost = costs.known(row).unwrap_or_else(|| costs.guess());
    costs.probe(row);
    cost
}

/// A launch of unknown or doubted cost that is measured alone.
#[derive(Clone, Copy, Debug)]
pub struct Alone {
    row: Row,
    of: Measured,
    call: Call,
    /// Whether the stream was idle before it.
    idle: bool,
    /// When the launch's call began, and how long the call for the event before it took, in ns.
    began: u64,
    record: u64,
    behind_wait: bool,
}

/// The end of a launch measured alone.
#[derive(Clone, Copy, Debug)]
pub struct AloneEnd {
    /// Whether the stream was kept waiting until the event after the launch was recorded.
    pub held: bool,
    /// Whether the device had not passed the event before the launch when the launch call came back.
    pub behind: bool,
    /// When the launch call came back, in ns.
    pub called: u64,
    /// When the event after the launch was recorded, in ns.
    pub recorded: u64,
}

impl Alone {
    /// A launch of `row` with a call that begins now, perhaps [behind a wait](crate::run::Run::is_behind_wait) of its stream.
    pub fn new(costs: &CostTable, row: Row, call: Call, now: u64, behind_wait: bool) -> Self {
        let of = if costs.known(row).is_none() { Measured::First } else { Measured::Alone };
        Self { row, of, call, idle: false, began: now, record: 0, behind_wait }
    }

    /// Whether a late call may delay the work, so that the host has to find out whether the stream is idle.
    pub fn may_be_late(&self) -> bool {
        self.call != Call::Blocking
    }

    /// Whether the stream may be kept waiting. Calls that may do more than queue work must be able to end.
    pub fn may_be_held(&self) -> bool {
        self.call == Call::Launch
    }

    /// Whether to keep the stream waiting meanwhile, so that the measured time excludes the call's.
    pub fn is_short(&self, costs: &CostTable) -> bool {
        self.may_be_held() && costs.known(self.row).is_some_and(|cost| cost <= SHORT_NS)
    }

    /// The event before the launch was recorded, by a call from `asked` to `now`. `idle`: the stream was idle before that. `holds`: the
    /// stream can be kept waiting. A first launch there is charged its whole interval until another launch is held: a cost that is too
    /// low would let its program exceed the limit.
    pub fn opened(&mut self, (asked, now): (u64, u64), idle: bool, holds: bool) {
        let all = holds && self.of == Measured::First;
        (self.began, self.idle) = (now, idle && !all);
        self.record = if all { 0 } else { now.saturating_sub(asked) };
    }

    /// The event after the launch was recorded.
    pub fn measured(&self, calls: &CallTime, cost: u64, end: AloneEnd) -> Segment {
        let AloneEnd { held, behind, called, recorded } = end;
        let took = called.saturating_sub(self.began);
        if !held && self.call == Call::Launch {
            calls.seen(took);
        }
        let late = self.idle && !held;
        Segment {
            predicted: cost,
            carried: 0,
            presumed: 0,
            launches: 1,
            row: Some(self.row),
            dense: true,
            span: if held || behind { 0 } else { recorded.saturating_sub(self.began) + self.record },
            gap: if late { took.min(self.call.slack(calls)) } else { 0 },
            record: self.record,
            of: if held { Measured::Held } else { self.of },
            opened: self.began,
            behind_wait: self.behind_wait,
        }
    }

    /// The launch was not measured: no thread waits for its measurement any more, and a doubt stays.
    pub fn not_measured(&self, costs: &CostTable) {
        match self.of {
            Measured::First => costs.not_measured(self.row),
            _ => costs.doubt(self.row),
        }
    }
}
