//! The launch path against a literal model: a plain list of launches, summed only on demand.

use gshare_core::Duration;
use gshare_core::gate::{Credit, LaunchGate};
use gshare_meter::alone::{Alone, AloneEnd, PROBE_WAIT, awaits_measurement, probe};
use gshare_meter::cost::{CostTable, Row};
use gshare_meter::run::{
    Call, CallTime, Concluded, Ending, FIRST_FULL_NS, FIRST_SEGMENT_LAUNCHES, FULL_NS, MOST_PREPAID_NS, Open,
    PREPAY_NS, Run, SEGMENT_LAUNCHES, Verdict, WORTHWHILE_NS, is_timed, unmeasured,
};
use gshare_meter::{Measured, Segment};
use proptest::prelude::*;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

fn ns(n: u64) -> Duration {
    Duration::from_nanos(n)
}

/// A gate that lets all launches in.
fn open_gate() -> (LaunchGate, Credit) {
    let (gate, mut credit) = (LaunchGate::new(), Credit::new(ns(u64::MAX / 4)));
    credit.allow(&gate, ns(u64::MAX / 4));
    (gate, credit)
}

fn row_of(costs: &CostTable, function: u64, cost: u64) -> Row {
    let (row, known) = costs.find(function, 0);
    if known.is_none() {
        costs.learn(row, cost);
    }
    row
}

/// The end of a launch measured alone, whose call came back now, on a stream that was idle by then.
fn end_at(now: u64) -> AloneEnd {
    AloneEnd { held: false, behind: false, called: now, recorded: now }
}

/// The run of one thread on one stream, with a host that records every event.
struct Host {
    run: Run<u64>,
    open: Open,
    costs: CostTable,
    calls: CallTime,
    now: u64,
    slack: u64,
    ended: Vec<Segment>,
    settled: u64,
    refused: u64,
    verdicts: Vec<Verdict>,
}

impl Host {
    fn new() -> Self {
        Self {
            run: Run::new(),
            open: Open::default(),
            costs: CostTable::new(),
            calls: CallTime::default(),
            now: 1_000 * MS,
            slack: 0,
            ended: Vec::new(),
            settled: 0,
            refused: 0,
            verdicts: Vec::new(),
        }
    }

    /// Launches as the hook does. Returns `None` if there is no credit.
    fn launch(&mut self, gate: &LaunchGate, row: Row, cost: u64, accepted: bool) -> Option<Verdict> {
        let verdict = match self.run.admit(&self.open, row, cost) {
            Some(verdict) => verdict,
            None => {
                if !self.run.pay(&self.open, gate, cost) {
                    return None;
                }
                self.paid(row, cost)
            }
        };
        self.verdicts.push(verdict);
        if verdict == Verdict::Alone {
            let alone = Alone::new(&self.costs, row, Call::Launch, self.now, self.run.is_behind_wait());
            if accepted {
                self.ended.push(alone.measured(&self.calls, cost, end_at(self.now)));
            } else {
                self.refused += cost;
                alone.not_measured(&self.costs);
            }
            return Some(verdict);
        }
        let now = self.now + 3 * US;
        match self.run.concluded(&self.open, &self.calls, (verdict, cost), accepted, || now) {
            Concluded::Open => {}
            Concluded::Full => self.end(Ending::Full, false, false),
            Concluded::Refused => self.refused += cost,
        }
        Some(verdict)
    }

    /// Launches with enough credit.
    fn launches(&mut self, gate: &LaunchGate, row: Row, cost: u64) {
        self.launch(gate, row, cost, true).expect("there is credit");
    }

    fn paid(&mut self, row: Row, cost: u64) -> Verdict {
        if self.run.is_due() {
            if self.run.begin(&self.open, &self.costs, row, cost, false) {
                return Verdict::Alone;
            }
            self.run.opened(self.now, (self.now, self.now), self.slack);
        }
        self.run.launch(&self.open, row, cost)
    }

    fn end(&mut self, why: Ending, measures_all: bool, passed: bool) {
        let Some(closed) = self.run.close(&self.open, why, measures_all) else { return };
        if closed.is_measurable() {
            let dense = self.run.is_dense(&closed, self.now, !passed);
            self.ended.push(self.run.measured(&closed, (dense, !passed), self.now));
        } else {
            self.settled += closed.predicted();
        }
    }

    /// The stream waits, as the hook notes it. Returns whether the open segment ended.
    fn wait(&mut self) -> bool {
        let ends = self.run.ends_before_wait(&self.open);
        if ends {
            self.end(Ending::Full, false, false);
        }
        self.run.waits(&self.open);
        ends
    }

    fn accounted(&self) -> u64 {
        let segments = self.ended.iter().map(|segment| segment.predicted + segment.carried);
        segments.sum::<u64>() + self.settled + self.refused
    }
}

#[test]
fn short_launches_are_paid_ahead_and_others_as_they_come() {
    let mut host = Host::new();
    let (gate, mut credit) = (LaunchGate::new(), Credit::new(ns(MS)));
    let prepaid = |host: &Host| host.open.as_run().prepaid;
    let short = row_of(&host.costs, 1, US);
    assert_eq!(host.launch(&gate, short, US, true), None, "closed");
    credit.allow(&gate, ns(MS));
    host.launch(&gate, short, US, true);
    // A thirty-second of the remaining millisecond.
    assert_eq!((gate.spent(), prepaid(&host)), (ns(US + MS / 32), MS / 32));
    for _ in 0..MS / 32 / US {
        host.launch(&gate, short, US, true);
    }
    assert_eq!((gate.spent(), prepaid(&host)), (ns(US + MS / 32), MS / 32 % US));
    let long = row_of(&host.costs, 2, 600 * US);
    host.launch(&gate, long, 600 * US, true);
    assert_eq!(prepaid(&host), 0, "what is prepaid pays for a part of it");
    assert_eq!(gate.spent(), ns(632 * US));
    host.launch(&gate, long, 200 * US, true);
    host.launch(&gate, short, US, true);
    assert_eq!(prepaid(&host), PREPAY_NS, "little is left");
    credit.allow(&gate, ns(1_000 * MS));
    credit.set_bound(&gate, ns(1_000 * MS));
    (0..=PREPAY_NS / US).for_each(|_| host.launches(&gate, short, US));
    assert_eq!(prepaid(&host), MOST_PREPAID_NS);
    assert_eq!(host.open.take_prepaid(), MOST_PREPAID_NS);
    assert_eq!(prepaid(&host), 0);
}

#[test]
fn a_segment_ends_when_it_has_its_size_and_later_ones_are_longer() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let row = row_of(&host.costs, 1, 100 * US);
    (0..32 * 4).for_each(|_| host.launches(&gate, row, 100 * US));
    assert!(host.ended.len() == 32 && host.ended.iter().all(|segment| segment.launches == 4));
    (0..40).for_each(|_| host.launches(&gate, row, 100 * US));
    assert_eq!(host.ended[32..].iter().map(|segment| segment.launches).collect::<Vec<_>>(), [20, 20]);
    // Launches without a cost.
    let free = row_of(&host.costs, 2, 0);
    (0..SEGMENT_LAUNCHES).for_each(|_| host.launches(&gate, free, 0));
    assert_eq!(host.ended.last().map(|segment| segment.launches), Some(SEGMENT_LAUNCHES));
    let mut early = Host::new();
    let free = row_of(&early.costs, 2, 0);
    (0..FIRST_SEGMENT_LAUNCHES).for_each(|_| early.launches(&gate, free, 0));
    assert_eq!(early.ended.last().map(|segment| segment.launches), Some(FIRST_SEGMENT_LAUNCHES));
}

#[test]
fn segments_of_several_functions_prove_nothing_and_now_and_then_one_launch_is_measured_alone() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let rows = [1, 2].map(|function| row_of(&host.costs, function, 100 * US));
    (0..80).for_each(|n| host.launches(&gate, rows[n % 2], 100 * US));
    let runs: Vec<&Segment> = host.ended.iter().filter(|segment| segment.of == Measured::Run).collect();
    assert!(runs.iter().all(|segment| segment.row.is_none()));
    let alone = host.ended.len() - runs.len();
    assert_eq!((runs.len(), alone), (18, 6), "one of every four that begin");
}

#[test]
fn a_doubted_launch_is_measured_alone_and_so_is_an_unknown_one() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let row = row_of(&host.costs, 1, 10 * US);
    host.costs.doubt(row);
    assert_eq!(host.launch(&gate, row, 10 * US, true), Some(Verdict::Alone));
    assert_eq!((host.ended[0].of, host.ended[0].launches), (Measured::Alone, 1));
    let (unknown, _) = host.costs.find(7, 0);
    assert!(!awaits_measurement(&gate, &host.costs, unknown));
    assert_eq!(probe(&host.costs, unknown), host.costs.guess());
    assert!(awaits_measurement(&gate, &host.costs, unknown), "the next one waits");
    assert_eq!(PROBE_WAIT, Duration::from_millis(200), "and no longer");
    let alone = Alone::new(&host.costs, unknown, Call::Launch, 5, false);
    assert_eq!(alone.measured(&host.calls, 10, end_at(9)).of, Measured::First);
    alone.not_measured(&host.costs);
    assert!(
        !awaits_measurement(&gate, &host.costs, unknown),
        "no thread waits for a measurement that will not come"
    );
    host.costs.learn(unknown, 20 * US);
    let copy = Alone::new(&host.costs, unknown, Call::Copy, 5, false);
    let mut alone = Alone::new(&host.costs, unknown, Call::Launch, 5, false);
    assert!(alone.is_short(&host.costs) && !copy.is_short(&host.costs));
    let calls = CallTime::default();
    (0..9).for_each(|_| calls.seen(2 * US));
    alone.opened((5, 105), true, false);
    let late = alone.measured(&calls, 10, end_at(105 + 90 * US));
    assert_eq!(late.gap, calls.most(), "as much of the call as may be the reason");
    assert!((4 * US..6 * US).contains(&late.gap), "{late:?}");
    assert_eq!((late.span, late.record), (90 * US + 100, 100));
    let held = alone.measured(&calls, 10, AloneEnd { held: true, ..end_at(9) });
    assert_eq!((held.gap, held.span, held.of), (0, 0, Measured::Held));
    let behind = alone.measured(&calls, 10, AloneEnd { behind: true, ..end_at(105 + US) });
    assert_eq!(behind.span, 0, "its calls were made while the device worked");
    alone.not_measured(&host.costs);
    assert!(host.costs.is_doubted(unknown), "a doubt stays");
}

#[test]
fn a_segment_is_dense_where_the_stream_cannot_have_run_dry() {
    let (gate, _credit) = open_gate();
    for (after, passed, dense) in [(9, true, true), (11, false, true), (11, true, false)] {
        let mut host = Host::new();
        let row = row_of(&host.costs, 1, 10 * US);
        host.launch(&gate, row, 10 * US, true);
        host.now += after * US;
        host.end(Ending::Waiting, false, passed);
        assert_eq!(host.ended[0].dense, dense, "after {after} us, passed: {passed}");
    }
    // The call of the first launch, on an idle stream, is left out.
    let mut host = Host::new();
    host.slack = 2 * US;
    let row = row_of(&host.costs, 1, 10 * US);
    assert_eq!(host.launch(&gate, row, 10 * US, true), Some(Verdict::First));
    host.now += 11 * US;
    host.end(Ending::Waiting, false, true);
    assert_eq!((host.ended[0].gap, host.ended[0].dense), (2 * US, true));
}

/// The wait of a stream for the host, a word or another stream is no work of the device.
#[test]
fn no_segment_holds_a_wait_of_its_stream() {
    let (gate, _credit) = open_gate();
    let mut host = Host::new();
    let short = row_of(&host.costs, 1, 10 * US);
    for round in 0..40 {
        let before = host.ended.len();
        (0..3).for_each(|_| host.launches(&gate, short, 10 * US));
        host.wait();
        // One in four of the short segments before a wait is measured, and the others are carried.
        let early = host.ended.len() - before;
        assert!(host.ended[before..].iter().all(|segment| !segment.behind_wait));
        host.now += 20 * MS;
        (0..3).for_each(|_| host.launches(&gate, short, 10 * US));
        host.end(Ending::Synchronising, true, false);
        let last = host.ended.last().expect("it is measured after every wait");
        let behind = host.ended[before + early..].iter();
        assert!(behind.clone().all(|segment| segment.behind_wait && segment.dense), "round {round}");
        let launches: u32 = behind.map(|segment| segment.launches).sum();
        assert_eq!(launches, 3, "round {round}: those behind the wait");
        assert_eq!(last.carried + 30 * US * u64::try_from(early).unwrap(), 30 * US, "round {round}");
    }
    let early = host.ended.iter().filter(|segment| !segment.behind_wait && segment.launches == 3).count();
    assert!((8..=12).contains(&early), "{early} of 40");
    // The thread has synchronised, so the next launches are behind no wait.
    host.launches(&gate, short, 10 * US);
    host.end(Ending::Waiting, false, false);
    assert!(!host.ended.last().expect("it is measured").behind_wait);
    // A long segment is measured before a wait, and a long run without a segment hides whether the device works.
    let long = row_of(&host.costs, 2, WORTHWHILE_NS);
    let before = host.ended.len();
    host.launches(&gate, long, WORTHWHILE_NS);
    host.wait();
    assert_eq!((host.ended.len(), host.run.is_behind_wait()), (before + 1, true));
    host.end(Ending::Synchronising, true, false);
    host.launches(&gate, short, 10 * US);
    host.end(Ending::Synchronising, false, true);
    (0..20).for_each(|_| host.launches(&gate, short, 10 * US));
    assert!(
        host.open.as_run().predicted >= WORTHWHILE_NS && host.run.mark().is_none(),
        "segments are skipped"
    );
    host.wait();
    assert!(!host.run.is_behind_wait());
}

#[test]
fn short_segments_that_a_thread_synchronises_with_are_measured_now_and_then() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let row = row_of(&host.costs, 1, 10 * US);
    let synchronise = |host: &mut Host, waited: u64| {
        let before = host.ended.len();
        host.launch(&gate, row, 10 * US, true);
        host.end(Ending::Synchronising, false, true);
        host.run.skip_at_most(unmeasured(host.run.awaited(), waited));
        host.ended.len() - before
    };
    let measured: usize = (0..1_000).map(|_| synchronise(&mut host, 12 * US)).sum();
    // One measurement per millisecond of GPU time.
    assert!((9..=11).contains(&measured), "{measured} of 1,000");
    let measured: usize = (0..80).map(|_| synchronise(&mut host, 200 * US)).sum();
    assert!((9..=11).contains(&measured), "{measured} of 80 in doubt");
    let measured: usize = (0..10).map(|_| synchronise(&mut host, 900 * US)).sum();
    assert!(measured >= 9, "{measured} of 10 after long waits");
    assert_eq!([0, 1, 4, 6].map(is_timed), [true, false, true, false]);
    // A worthwhile segment is measured each time.
    let long = row_of(&host.costs, 2, WORTHWHILE_NS);
    let before = host.ended.len();
    for _ in 0..20 {
        host.launch(&gate, long, WORTHWHILE_NS, true);
        host.end(Ending::Synchronising, false, true);
    }
    assert!(host.ended.len() - before >= 19);
}

#[test]
fn launches_that_are_presumed_complete_are_over_once() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let row = row_of(&host.costs, 1, 40 * US);
    (0..3).for_each(|_| host.launches(&gate, row, 40 * US));
    assert_eq!(host.open.presume_done(80 * US), 0, "a launch came in between");
    assert_eq!(host.open.presume_done(120 * US), 120 * US);
    assert_eq!(host.open.presume_done(120 * US), 0, "once");
    host.launch(&gate, row, 40 * US, true);
    assert_eq!(host.open.presume_done(160 * US), 40 * US, "and the next");
    host.launch(&gate, row, 40 * US, true);
    host.end(Ending::Waiting, false, false);
    let segment = host.ended[0];
    assert_eq!(
        (segment.predicted, segment.presumed, segment.launches, segment.dense),
        (40 * US, 160 * US, 5, false)
    );
    assert_eq!(host.open.presume_done(40 * US), 0, "they are taken out");
}

#[test]
fn a_launch_that_the_driver_refused_is_given_back_and_its_segment_proves_nothing() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let row = row_of(&host.costs, 1, 50 * US);
    host.launches(&gate, row, 50 * US);
    host.launch(&gate, row, 50 * US, false);
    assert_eq!((host.refused, host.open.as_run().predicted), (50 * US, 50 * US));
    host.end(Ending::Waiting, false, false);
    assert_eq!((host.ended[0].launches, host.ended[0].row), (1, None));
    // The next segment holds launches of this function alone.
    host.launches(&gate, row, 50 * US);
    host.end(Ending::Waiting, false, false);
    assert_eq!(host.ended[1].row, Some(row));
}

/// An event after the segment would hold up other streams.
#[test]
fn after_a_segment_that_could_not_be_ended_a_launch_is_measured_alone() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let row = row_of(&host.costs, 1, 200 * US);
    host.launches(&gate, row, 200 * US);
    let closed = host.run.close(&host.open, Ending::Waiting, false).expect("an open launch");
    host.run.barred(&closed);
    assert_eq!(host.launch(&gate, row, 200 * US, true), Some(Verdict::Alone));
    assert_eq!(host.launch(&gate, row, 200 * US, true), Some(Verdict::Paid));
}

/// When a run without a segment is full, its launches are carried into the next segment, and complete before its own launches.
#[test]
fn carried_launches_are_presumed_complete_before_later_ones() {
    let mut host = Host::new();
    let (gate, _credit) = open_gate();
    let row = row_of(&host.costs, 1, 50 * US);
    host.launches(&gate, row, 50 * US);
    host.end(Ending::Synchronising, false, true);
    assert_eq!(host.ended.len(), 1, "from here on segments are skipped");
    (0..8).for_each(|_| host.launches(&gate, row, 50 * US));
    assert_eq!((host.ended.len(), host.open.as_run().predicted), (1, 400 * US));
    host.launches(&gate, row, 50 * US);
    assert_eq!(host.open.presume_done(450 * US), 450 * US);
    host.launches(&gate, row, 50 * US);
    host.end(Ending::Waiting, false, false);
    let Segment { predicted, presumed, carried, launches, .. } = host.ended[1];
    assert_eq!((predicted, presumed, carried, launches), (50 * US, 50 * US, 0, 2));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Launch {
        function: usize,
        accepted: bool,
    },
    End {
        why: Ending,
        measures_all: bool,
        passed: bool,
    },
    /// The thread waits for credit, so its run is closed and the prepaid credit is given back.
    Wait,
    /// The stream waits.
    StreamWaits,
    Presume,
    Synchronised(u64),
    Bar,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let why = prop_oneof![Just(Ending::Synchronising), Just(Ending::Waiting), Just(Ending::Taken)];
    prop_oneof![
        12 => (0usize..5, prop::bool::weighted(0.95)).prop_map(|(function, accepted)| Step::Launch { function, accepted }),
        3 => (why, prop::bool::weighted(0.1), any::<bool>())
            .prop_map(|(why, measures_all, passed)| Step::End { why, measures_all, passed }),
        1 => Just(Step::Wait),
        1 => Just(Step::StreamWaits),
        1 => Just(Step::Presume),
        1 => (0u64..MS).prop_map(Step::Synchronised),
        1 => Just(Step::Bar),
        3 => (0u64..MS).prop_map(Step::Pass),
    ]
}

proptest! {
    #[test]
    fn every_launch_is_accounted_for_once(
        costs in prop::array::uniform5(prop_oneof![0u64..20 * US, 0u64..3 * MS]),
        repeats in 1usize..4,
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut host = Host::new();
        let (gate, mut credit) = open_gate();
        let rows: Vec<Row> = (0..).zip(costs).map(|(function, cost)| row_of(&host.costs, function, cost)).collect();
        // The literal account of all accepted launches, by whether they are still open.
        let (mut paid, mut refunded, mut presumed) = (0, 0, 0);
        let mut open: Vec<u64> = Vec::new();
        for step in steps {
            let ended = host.ended.len();
            match step {
                Step::Launch { function, accepted } => {
                    for _ in 0..repeats {
                        let cost = costs[function];
                        let segments = host.ended.len();
                        let verdict = host.launch(&gate, rows[function], cost, accepted).expect("credit");
                        paid += cost;
                        if verdict != Verdict::Alone && accepted {
                            open.push(cost);
                        }
                        let closed = host.ended.len() > segments && verdict != Verdict::Alone;
                        prop_assert!(!closed || verdict == Verdict::Last);
                        if closed {
                            let segment = host.ended.last().copied().unwrap();
                            let total = segment.predicted + segment.presumed;
                            let by_launches = [FIRST_SEGMENT_LAUNCHES, SEGMENT_LAUNCHES].contains(&segment.launches);
                            // The segment is full now, and was not full before. With launches of different lengths it may end
                            // early, at the number of launches that would have filled it.
                            let mixed = segment.row.is_none();
                            prop_assert!(by_launches || mixed || total + cost.max(1) > FIRST_FULL_NS, "{segment:?}");
                            prop_assert!(total < FULL_NS + 3 * MS, "{segment:?}");
                            open.clear();
                        }
                    }
                }
                Step::End { why, measures_all, passed } => {
                    host.end(why, measures_all, passed);
                    open.clear();
                }
                Step::Wait => {
                    host.end(Ending::Waiting, false, true);
                    refunded += host.open.take_prepaid();
                    open.clear();
                }
                Step::StreamWaits => {
                    if host.wait() {
                        open.clear();
                    }
                    prop_assert!(host.run.mark().is_none(), "the next segment begins behind the wait");
                }
                Step::Presume => {
                    let all = host.open.as_run();
                    presumed += host.open.presume_done(all.predicted);
                    prop_assert_eq!(host.open.as_run().presumed, all.predicted);
                    prop_assert_eq!(host.open.presume_done(all.predicted + 1), 0);
                }
                Step::Synchronised(waited) => host.run.skip_at_most(unmeasured(host.run.awaited(), waited)),
                Step::Bar => {
                    if let Some(closed) = host.run.close(&host.open, Ending::Waiting, false) {
                        host.run.barred(&closed);
                        host.settled += closed.predicted();
                    }
                    open.clear();
                }
                Step::Pass(time) => host.now += time,
            }
            // No cost is lost or made: every paid cost is open, over, or prepaid.
            let run = host.open.as_run();
            prop_assert_eq!(run.predicted, open.iter().sum::<u64>(), "open: {:?}", open);
            let not_presumed = run.predicted - run.presumed.min(run.predicted);
            prop_assert_eq!(paid, host.accounted() + presumed + not_presumed);
            prop_assert_eq!(gate.spent(), ns(paid + run.prepaid + refunded));
            prop_assert!(run.prepaid <= MOST_PREPAID_NS);
            for segment in &host.ended[ended..] {
                prop_assert!(segment.launches > 0 && segment.launches <= SEGMENT_LAUNCHES);
                prop_assert!(!segment.dense || segment.presumed == 0);
            }
        }
        // A run of one function, closed in good order, states the function's cost.
        host.end(Ending::Waiting, true, true);
        let before = host.ended.len();
        for _ in 0..400 {
            host.launch(&gate, rows[0], costs[0], true);
            host.end(Ending::Waiting, true, false);
        }
        let proofs = host.ended[before..].iter().filter(|segment| segment.row.is_some()).count();
        prop_assert!(proofs >= 395, "{proofs} of 400");
        credit.stop(&gate);
        let row = row_of(&host.costs, 9, 10 * MS);
        prop_assert_eq!(host.launch(&gate, row, 10 * MS, true), None);
    }
}
