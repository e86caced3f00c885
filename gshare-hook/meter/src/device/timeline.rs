//! The work of a process on one device: segments under way, and the part of the time line taken by completed segments.

use std::collections::VecDeque;

use gshare_core::Duration;

use super::learning::{Learning, Sample};
use super::turn::REMAINDER;
use super::{Device, Ground};
use crate::cost::CostTable;
use crate::coverage::{Behind, Coverage, Overlap, Turns};
use crate::segment::{Measured, Segment, SegmentId, Work};
use crate::{Action, Actions};

/// Longest gap, in ns, between the end of known work and the start of a segment for which the device does not count as idle.
const IDLE_GAP: u64 = 20_000;
/// The work assumed to be queued while a kernel in it has no known cost, in ns.
pub(crate) const UNKNOWN: u64 = 1_000_000_000;

/// Segments under way and the time line of one device.
#[derive(Debug)]
pub(crate) struct Timeline {
    coverage: Coverage,
    /// The time until which the device is known to have worked for this process, in ns.
    pub(crate) worked_until: u64,
    /// The time since which a token keeps the device for this process, in ns; `u64::MAX` without a token. Other processes may then
    /// use the device whenever this process does not.
    pub(crate) turn_began: u64,
    /// The wait of this process's turns for the end of other processes' turns.
    behind: Behind,
    pub(crate) turns: Turns,
    pub(crate) overlap: Overlap,
    learning: Learning,
    /// Segments in the order in which their ends were recorded.
    running: VecDeque<Running>,
    /// Time of the last completion, in ns.
    pub(crate) moved: u64,
}

/// A segment under way.
#[derive(Clone, Copy, Debug)]
struct Running {
    id: SegmentId,
    segment: Segment,
    /// Whether its stream still waits before it.
    waits: bool,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        Self {
            coverage: Coverage::new(),
            worked_until: 0,
            turn_began: u64::MAX,
            behind: Behind::default(),
            turns: Turns::default(),
            overlap: Overlap::default(),
            learning: Learning::new(),
            running: VecDeque::new(),
            moved: 0,
        }
    }

    pub(crate) fn record(&mut self, id: SegmentId, segment: Segment) {
        self.running.push_back(Running { id, segment, waits: segment.behind_wait });
    }

    fn place(&self, id: SegmentId) -> usize {
        let at = self.running.iter().position(|running| running.id == id);
        at.unwrap_or_else(|| panic!("segment {} is not being measured", id.0))
    }

    /// Takes a completed segment out.
    pub(crate) fn take(&mut self, id: SegmentId) -> Segment {
        let at = self.place(id);
        self.running.remove(at).expect("a place within the queue").segment
    }

    /// The wait before a segment is over.
    pub(crate) fn wait_over(&mut self, id: SegmentId) {
        let at = self.place(id);
        self.running[at].waits = false;
    }

    /// Whether the device cannot begin any of the segments yet, because their streams wait for something else.
    pub(crate) fn all_wait(&self) -> bool {
        self.running.iter().all(|running| running.waits)
    }

    /// The measurement longest under way, and whether its stream waits.
    pub(crate) fn oldest(&self) -> Option<(SegmentId, bool)> {
        self.running.front().map(|running| (running.id, running.waits))
    }

    /// Whether nothing is being measured.
    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Learns from a segment with this interval, and returns the GPU time, in ns, that it adds to the time line.
    pub(crate) fn measure(
        &mut self,
        costs: &CostTable,
        segment: &Segment,
        (start, end): (u64, u64),
        crowded: bool,
    ) -> u64 {
        let oldest = self.running.iter().map(|other| other.segment.opened).min();
        let oldest = oldest.map_or(segment.opened, |oldest| oldest.min(segment.opened));
        let length = end.saturating_sub(start);
        // The first work of a turn may hold the end of another process's turn. Work that ends after the handover may hold the
        // beginning of one. A stream that was kept waiting made the device idle by itself.
        let held = segment.of == Measured::Held;
        let comes_first = self.is_first(if held { segment.opened } else { start });
        let outlasted = self.turns.outlasted(segment.opened, end);
        let shared = comes_first || outlasted || (held && crowded);
        let outside = segment.behind_wait && outlasted;
        self.worked_until = self.worked_until.max(end);
        let work = Work::of(segment, length);
        let start = end - work.length.min(end);
        let known = segment.row.and_then(|row| costs.known(row));
        if let Some(row) = segment.row {
            let room = self.coverage.room(start, end);
            self.learning.take(costs, segment, row, Sample { work, room, shared, outside, crowded });
        }
        if let Some(known) = known.filter(|_| work.whole && comes_first) {
            let launches = u64::from(segment.launches);
            self.behind.seen(work.length.saturating_sub(known * launches).min(REMAINDER));
        }
        let predicted = match segment.row.and_then(|row| costs.known(row)) {
            Some(cost) => cost * u64::from(segment.launches.max(1)),
            None => segment.predicted + segment.presumed,
        };
        let all = !shared || (known.is_none() && segment.row.is_some());
        let growth = self.coverage.add(start, end, work.taken(predicted, all), oldest);
        self.overlap.seen(segment.opened, segment.predicted + segment.presumed, growth);
        growth
    }

    /// The GPU time queued now, in ns: `in_flight` less the work surely done since.
    pub(crate) fn queued(&self, costs: &CostTable, in_flight: u64, now: u64) -> u64 {
        if self.has_unknown_cost(costs) {
            // The charge is a guess until the work has ended.
            in_flight.max(UNKNOWN)
        } else if self.running.is_empty() {
            in_flight
        } else {
            in_flight.saturating_sub(now.saturating_sub(self.began_at(now)))
        }
    }

    /// Whether the cost of anything under way is a guess.
    pub(crate) fn has_unknown_cost(&self, costs: &CostTable) -> bool {
        self.running.iter().filter_map(|running| running.segment.row).any(|row| costs.known(row).is_none())
    }

    /// The latest possible start of the oldest segment not known to be over, in ns.
    pub(crate) fn began_at(&self, now: u64) -> u64 {
        let Some(Running { segment, .. }) = self.running.front() else { return now };
        let behind = if self.is_first(segment.opened) { self.behind.most() } else { 0 };
        self.worked_until.max(segment.opened.saturating_add(behind)).min(now)
    }

    /// Whether another process's work may have been on the device just before `start` (ns): the device was idle for this process,
    /// and none of its work is known to have ended within this turn.
    fn is_first(&self, start: u64) -> bool {
        start > self.worked_until + IDLE_GAP && self.worked_until < self.turn_began
    }
}

impl<G: Ground> Device<G> {
    /// Charges a completed segment, which ran from `start` to `end` (ns).
    pub(crate) fn completed(
        &mut self,
        id: SegmentId,
        interval: (u64, u64),
        crowded: bool,
        now: u64,
        actions: &mut Actions,
    ) {
        let segment = self.timeline.take(id);
        let whole = self.timeline.measure(self.ground.costs(), &segment, interval, crowded);
        // Time presumed complete is charged already.
        let measured = whole.saturating_sub(segment.presumed) + segment.carried;
        self.charge(&segment, measured, now);
        if segment.row.is_some() {
            actions.push(Action::Wake(self.ordinal));
        }
    }

    /// Charges a segment as predicted, because it will not be measured.
    pub(crate) fn measurement_lost(&mut self, id: SegmentId, now: u64) {
        let segment = self.timeline.take(id);
        if let Some(row) = segment.row {
            self.ground.costs().not_measured(row);
        }
        self.charge(&segment, segment.predicted + segment.carried, now);
    }

    fn charge(&mut self, segment: &Segment, measured: u64, now: u64) {
        let charged = Duration::from_nanos(segment.predicted + segment.carried);
        self.credit.completed(self.ground.gate(), charged, Duration::from_nanos(measured));
        self.timeline.moved = now;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::SHORT_NS;
    use crate::run::CallTime;

    /// A device with one stream, and a thread with calls to its driver.
    #[derive(Clone, Copy, Debug)]
    struct Machine {
        now: u64,
        /// The time at which the stream has finished all queued work.
        until: u64,
        worked: u64,
        kernel: u64,
        call: u64,
        record: u64,
        /// A call queues at its beginning, and not at its end.
        early: bool,
        /// Streams can be kept waiting for one launch.
        holds: bool,
    }

    impl Machine {
        fn queued_at(&self, call: u64) -> u64 {
            if self.early { self.now } else { self.now + call }
        }

        fn record(&mut self) -> u64 {
            self.until = self.until.max(self.queued_at(self.record));
            self.now += self.record;
            self.until
        }

        fn launch(&mut self) {
            self.until = self.until.max(self.queued_at(self.call)) + self.kernel;
            self.worked += self.kernel;
            self.now += self.call;
        }
    }

    /// The thread's launches, measured as the hook measures them.
    struct Program {
        machine: Machine,
        costs: CostTable,
        calls: CallTime,
        timeline: Timeline,
        charged: u64,
    }

    impl Program {
        fn new(machine: Machine) -> Self {
            let mut timeline = Timeline::new();
            timeline.turn_began = 0;
            Self { machine, costs: CostTable::new(), calls: CallTime::default(), timeline, charged: 0 }
        }

        /// `count` launches between two events.
        fn measure(&mut self, count: u32, of: Measured) {
            let (row, known) = self.costs.find(1, 1);
            let machine = &mut self.machine;
            let (idle, asked) = (machine.until <= machine.now, machine.now);
            let start = machine.record();
            let opened = machine.now;
            machine.launch();
            let took = machine.now - opened;
            self.calls.seen(took);
            (1..count).for_each(|_| machine.launch());
            let all = of == Measured::First && machine.holds;
            let gap = if idle && !all { took.min(self.calls.most()) } else { 0 };
            let first = known.unwrap_or(CostTable::FIRST_GUESS);
            let behind = start > machine.now;
            let dense = of != Measured::Run || machine.now - opened < first + gap || behind;
            let end = machine.record();
            let span = if behind { 0 } else { machine.now - asked };
            let segment = Segment {
                predicted: first * u64::from(count),
                carried: 0,
                presumed: 0,
                launches: count,
                row: Some(row),
                dense,
                span,
                gap,
                record: if all { 0 } else { opened - asked },
                of,
                opened,
                behind_wait: false,
            };
            self.charged += self.timeline.measure(&self.costs, &segment, (start, end), false);
        }

        /// One launch, with the stream kept waiting until its events are queued.
        fn hold(&mut self) {
            let row = self.costs.find(1, 1).0;
            let machine = &mut self.machine;
            let opened = machine.now;
            machine.now += 3 * machine.record + machine.call;
            let start = machine.until.max(machine.now);
            (machine.until, machine.worked) = (start + machine.kernel, machine.worked + machine.kernel);
            let known = self.costs.known(row).expect("a first launch is not held");
            let segment = Segment::of_one(row, known, Measured::Held, opened);
            self.charged +=
                self.timeline.measure(&self.costs, &segment, (start, start + machine.kernel), false);
        }

        /// Launches for `ns`; the stream waits for `wait` ns before each measured run. Returns the charged time and the worked time.
        fn run(&mut self, ns: u64, wait: u64) -> (u64, u64) {
            let (end, charged, worked) = (self.machine.now + ns, self.charged, self.machine.worked);
            while self.machine.now < end {
                let (row, known) = self.costs.find(1, 1);
                if wait > 0 {
                    self.machine.until = self.machine.until.max(self.machine.now) + wait;
                }
                match known {
                    None => self.measure(1, Measured::First),
                    Some(cost) if self.costs.take_doubt(row) => {
                        if self.machine.holds && cost <= SHORT_NS {
                            self.hold();
                        } else {
                            self.measure(1, Measured::Alone);
                        }
                    }
                    Some(cost) => self.measure(launches_of_a_run(cost), Measured::Run),
                }
                // Only 2 ms of work may be in flight.
                self.machine.now = self.machine.now.max(self.machine.until.saturating_sub(2_000_000));
            }
            (self.charged - charged, self.machine.worked - worked)
        }
    }

    fn launches_of_a_run(cost: u64) -> u32 {
        u32::try_from((400_000 / cost.max(1)).clamp(1, 64)).expect("a small number")
    }

    fn machine() -> impl Strategy<Value = Machine> {
        (0u64..60_000, 500u64..25_000, 0u64..1_500, any::<bool>(), any::<bool>()).prop_map(
            |(kernel, call, record, early, holds)| Machine {
                now: 1_000_000,
                until: 0,
                worked: 0,
                kernel,
                call,
                record,
                // Only a hold tells a kernel that ran within its call from no kernel at all, and only short kernels are held.
                early: early && holds && call < SHORT_NS,
                holds,
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_charged_is_what_the_device_worked(machine in machine()) {
            let mut program = Program::new(machine);
            program.run(20_000_000, 0);
            let before = program.machine.now;
            let (charged, worked) = program.run(40_000_000, 0);
            let length = program.machine.now - before;
            // Without a hold, an event's own call looks like a kernel as short.
            let unknown = if machine.holds { 0 } else { length * machine.record / machine.call };
            // The first call of each run counts as a wait of the device, although the call may have queued early.
            let run = u64::from(launches_of_a_run(machine.kernel)) * machine.call.max(machine.kernel);
            let first = if machine.early { length * machine.call / run } else { 0 };
            let most = length / 50 + first;
            prop_assert!(charged.abs_diff(worked) <= most + unknown, "{charged} for {worked} of {length}");
        }

        #[test]
        fn a_stream_that_waits_is_charged_its_kernels(machine in machine(), wait in 1_000_000u64..30_000_000) {
            let mut program = Program::new(machine);
            program.run(20_000_000, 0);
            let before = program.machine.now;
            let (charged, worked) = program.run(200_000_000, wait);
            let length = program.machine.now - before;
            prop_assert!(charged.abs_diff(worked) <= length / 50, "{charged} for {worked} of {length}");
        }
    }

    /// After a gap of 20 us, and before this process had the device, another process may have had it.
    #[test]
    fn work_after_a_gap_may_be_behind_that_of_another_process() {
        let mut timeline = Timeline::new();
        (timeline.worked_until, timeline.turn_began) = (1_000_000, 2_000_000);
        assert!(timeline.is_first(1_021_000) && !timeline.is_first(1_019_000));
        timeline.turn_began = 500_000;
        assert!(!timeline.is_first(1_021_000));
    }

    #[test]
    fn a_kernel_that_takes_nothing_costs_nothing_however_long_its_call() {
        for call in [2_000, 10_000, 14_000] {
            let machine = Machine {
                now: 0,
                until: 0,
                worked: 0,
                kernel: 0,
                call,
                record: 100,
                early: false,
                holds: false,
            };
            let mut program = Program::new(machine);
            program.run(20_000_000, 0);
            let (charged, _) = program.run(20_000_000, 0);
            assert!(charged <= 200_000, "{charged} ns of 20 ms, behind calls of {call} ns");
        }
    }

    #[test]
    fn a_kernel_that_becomes_longer_is_charged_its_new_length() {
        let machine = Machine {
            now: 0,
            until: 0,
            worked: 0,
            kernel: 1_000,
            call: 2_000,
            record: 500,
            early: false,
            holds: true,
        };
        let mut program = Program::new(machine);
        program.run(20_000_000, 0);
        program.machine.kernel = 1_800;
        program.run(60_000_000, 0);
        let (charged, worked) = program.run(20_000_000, 0);
        assert!(charged.abs_diff(worked) <= worked / 20, "{charged} for {worked}");
    }

    #[test]
    fn an_interrupted_call_hides_no_more_than_two_usual_ones() {
        let calls = CallTime::default();
        (0..20).for_each(|_| calls.seen(14_000));
        assert_eq!(calls.most(), 28_000);
        calls.seen(4_000_000);
        assert!(calls.most() < 36_000);
        (0..10).for_each(|_| calls.seen(2_000));
        assert!(calls.most() < 4_100);
    }
}
