//! The queue of one stream in virtual time, behind the hook's own launch path ([`gshare_meter::run`]).
//!
//! Kernels have numbers in the order of their launches, and an event is a place in this order. A launch takes no time here, so
//! there are no gaps to leave out and nothing to keep waiting.

use gshare_core::Timestamp;
use gshare_core::gate::LaunchGate;
use gshare_meter::alone::{Alone, AloneEnd};
use gshare_meter::cost::{CostTable, Row};
use gshare_meter::run::{Call, CallTime, Concluded, Ending, Open, Run, Verdict, is_timed, unmeasured};
use gshare_meter::{OpenRun, Segment, SegmentId};

/// A launch after its admission.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Admitted {
    pub(super) verdict: Verdict,
    pub(super) row: Row,
    cost: u64,
}

/// A place in the queue, before a kernel, with the time at which the device passed it.
#[derive(Debug, Clone, Copy)]
struct Place {
    kernel: u64,
    passed: Option<Timestamp>,
}

/// A measurement under way.
#[derive(Debug)]
pub(super) struct Measurement {
    pub(super) id: Option<SegmentId>,
    pub(super) segment: Segment,
    start: Place,
    /// The measurement's last kernel, the time its end was recorded, and the time the device passed this end.
    last: u64,
    closed: Timestamp,
    end: Option<Timestamp>,
}

impl Measurement {
    /// The measured interval, once it is over.
    pub(super) fn interval(&self) -> Option<(Timestamp, Timestamp)> {
        self.start.passed.zip(self.end)
    }
}

/// One stream. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// The numbers of launched and of completed kernels.
    pub(super) launched: u64,
    pub(super) completed: u64,
    /// The end of the last completed kernel.
    ended: Timestamp,
    /// Measurements under way, in the order of their ends.
    pub(super) under_way: Vec<Measurement>,
    /// The predicted cost of launches without a measurement, and of refused launches, for the next look, in ns.
    pub(super) settled: u64,
    pub(super) refused: u64,
    /// The predicted cost of launches presumed complete since the last look, in ns.
    pub(super) presumed_since: u64,
    open: Open,
    run: Run<Place>,
}

impl Stream {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// The open segment, in the form for the meter.
    pub(super) fn open_run(&self) -> OpenRun {
        self.open.as_run()
    }

    /// Takes the open segment for complete, as the meter ordered.
    pub(super) fn presume_done(&mut self, predicted: u64) {
        self.presumed_since += self.open.presume_done(predicted);
    }

    /// Admits a launch of known cost; `None` means there is no credit.
    pub(super) fn admit(
        &mut self,
        now: Timestamp,
        (gate, costs): (&LaunchGate, &CostTable),
        row: Row,
        cost: u64,
    ) -> Option<Admitted> {
        if let Some(verdict) = self.run.admit(&self.open, row, cost) {
            return Some(Admitted { verdict, row, cost });
        }
        self.run.pay(&self.open, gate, cost).then(|| self.paid(now, costs, row, cost))
    }

    /// Admits a paid launch of known cost.
    pub(super) fn paid(&mut self, now: Timestamp, costs: &CostTable, row: Row, cost: u64) -> Admitted {
        let begins = self.run.is_due();
        if begins && self.run.begin(&self.open, costs, row, cost, false) {
            return Admitted { verdict: Verdict::Alone, row, cost };
        }
        if begins {
            let place = self.place(self.launched, now);
            self.run.opened(place, (now.as_nanos(), now.as_nanos()), 0);
        }
        Admitted { verdict: self.run.launch(&self.open, row, cost), row, cost }
    }

    /// Admits a paid launch of unknown cost.
    pub(super) fn paid_alone(&mut self, row: Row, cost: u64) -> Admitted {
        self.run.interrupted();
        Admitted { verdict: Verdict::Alone, row, cost }
    }

    /// Makes the launch.
    pub(super) fn launch(
        &mut self,
        now: Timestamp,
        costs: &CostTable,
        admitted: Admitted,
        measures_all: bool,
    ) {
        let Admitted { verdict, row, cost } = admitted;
        let number = self.launched;
        self.launched += 1;
        match verdict {
            Verdict::Pass | Verdict::Fail => {}
            Verdict::Alone => {
                let (called, recorded) = (now.as_nanos(), now.as_nanos());
                let end = AloneEnd { held: false, behind: self.completed < number, called, recorded };
                let alone = Alone::new(costs, row, Call::Launch, called, false);
                let segment = alone.measured(&CallTime::default(), cost, end);
                let place = self.place(number, now);
                self.record(now, place, segment);
            }
            Verdict::Paid | Verdict::First | Verdict::Last => {
                let launch = (verdict, cost);
                let calls = CallTime::default();
                if self.run.concluded(&self.open, &calls, launch, true, || now.as_nanos()) == Concluded::Full
                {
                    self.end(now, Ending::Full, measures_all);
                }
            }
        }
    }

    /// The place before a kernel launched now. An idle device passes the place at once.
    fn place(&self, kernel: u64, now: Timestamp) -> Place {
        Place { kernel, passed: (self.completed == kernel).then(|| now.max(self.ended)) }
    }

    /// Prepares a wait for credit: ends the segment, and gives the prepaid credit back.
    pub(super) fn wait(&mut self, now: Timestamp, measures_all: bool) {
        self.end(now, Ending::Waiting, measures_all);
        self.refused += self.open.take_prepaid();
    }

    /// Ends the segment, if any; open launches without a segment are settled as predicted.
    pub(super) fn end(&mut self, now: Timestamp, why: Ending, measures_all: bool) {
        let Some(closed) = self.run.close(&self.open, why, measures_all) else { return };
        match closed.mark.filter(|_| closed.is_measurable()) {
            None => self.settled += closed.predicted(),
            Some(place) => {
                let behind = self.completed < place.kernel;
                let dense = self.run.is_dense(&closed, now.as_nanos(), behind);
                let segment = self.run.measured(&closed, (dense, behind), now.as_nanos());
                self.record(now, place, segment);
            }
        }
    }

    fn record(&mut self, now: Timestamp, start: Place, segment: Segment) {
        let last = self.launched - 1;
        let end = (self.completed > last).then(|| now.max(self.ended));
        self.under_way.push(Measurement { id: None, segment, start, last, closed: now, end });
    }

    /// Handles the thread's return from its synchronising call number `syncs`, which began at `began`.
    pub(super) fn synchronised(&mut self, syncs: u64, began: Timestamp) {
        if is_timed(syncs) {
            let waited = self.ended.saturating_since(began).as_nanos();
            self.run.skip_at_most(unmeasured(self.run.awaited(), waited));
        }
    }

    /// Completes the oldest open kernel; the device passes the places behind it.
    pub(super) fn complete(&mut self, ended: Timestamp) {
        (self.completed, self.ended) = (self.completed + 1, ended);
        let (next, run) = (self.completed, self.run.mark_mut());
        let measured = self.under_way.iter_mut().map(|measurement| &mut measurement.start);
        for place in measured.chain(run).filter(|place| place.kernel == next) {
            place.passed.get_or_insert(ended);
        }
        for measurement in self.under_way.iter_mut().filter(|measurement| measurement.last + 1 == next) {
            measurement.end = Some(ended.max(measurement.closed));
        }
    }
}
