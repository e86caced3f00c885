//! The launch gate: the launch decisions of a hooked process without its daemon.
//!
//! # Problem
//! A kernel launch takes about 2 us, and a question to the daemon 8 us and more. The daemon therefore grants a permission ahead of
//! time, and a launch costs the process **one atomic operation** while the permission lasts.
//!
//! # Terms
//! - **spent**: the predicted cost of all launches so far, corrected by each measurement; a total in ns.
//! - **limit**: a total in ns. A launch passes while `spent` is below it, even if its own cost then goes beyond.
//! - **done**: the measured cost of all finished work; a total in ns.
//! - **in flight**: `spent - done`, the launched work without a known end.
//!
//! # Algorithm
//! Threads compare `spent` with `limit` in the [`LaunchGate`]. One helper thread owns the [`Credit`] with `allowed`, the total
//! from the daemon, and keeps the limit at `min(allowed, done + bound)`, so at most `bound` of work is queued.
//!
//! ```text
//! allowed 10 ms, bound 2 ms, kernels predicted at 1 ms that take 1.1 ms
//! at first         spent 0     done 0     limit 2.0
//! launch, launch   spent 2.0   done 0     limit 2.0        a third launch waits
//! one is over      spent 2.1   done 1.1   limit 3.1        the next passes
//! ```
//! The daemon takes a permission back by a lower total ([`Credit::recall`]). Running work is still measured and stays in the totals.
//!
//! # Invariants
//! - `done <= spent`, under any interleaving (checked by loom).
//! - At most one launch goes beyond a limit; when the limit is lowered, each thread may pass once more.
//! - `used`, the total in reports to the daemon, never shrinks.
//!
//! # Cost
//! [`LaunchGate::try_spend`]: two loads and one compare-and-swap.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

use crate::units::{Bytes, Duration};
use crossbeam_utils::CachePadded;

/// The hot side of the gate: all launching threads of a process share one per GPU.
#[derive(Debug)]
pub struct LaunchGate {
    spent: CachePadded<AtomicU64>,
    limit: CachePadded<AtomicU64>,
}

impl Default for LaunchGate {
    fn default() -> Self {
        Self::new()
    }
}

impl LaunchGate {
    /// A closed gate.
    pub fn new() -> Self {
        Self { spent: CachePadded::new(AtomicU64::new(0)), limit: CachePadded::new(AtomicU64::new(0)) }
    }

    /// Spends `cost`, the predicted cost of one launch, and returns whether the launch passes. After `false` nothing is spent, and
    /// the caller waits for its helper thread.
    #[inline]
    pub fn try_spend(&self, cost: Duration) -> bool {
        let mut spent = self.spent.load(Ordering::Relaxed);
        while spent < self.limit.load(Ordering::Acquire) {
            let more = spent.saturating_add(cost.as_nanos());
            match self.spent.compare_exchange_weak(spent, more, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => spent = now,
            }
        }
        false
    }

    /// The predicted cost of all launches so far, corrected by the measurements so far.
    pub fn spent(&self) -> Duration {
        Duration::from_nanos(self.spent.load(Ordering::Acquire))
    }

    /// The GPU time that launches may spend now.
    pub fn left(&self) -> Duration {
        Duration::from_nanos(self.limit.load(Ordering::Acquire)).saturating_sub(self.spent())
    }

    /// Whether launches pass without a limit, so that nothing is gained by a wait.
    pub fn is_unlimited(&self) -> bool {
        self.limit.load(Ordering::Relaxed) == u64::MAX
    }

    /// Replaces the prediction for finished work by its measurement.
    fn correct(&self, predicted: Duration, measured: Duration) {
        if measured >= predicted {
            self.spent.fetch_add((measured - predicted).as_nanos(), Ordering::AcqRel);
        } else {
            let less = (predicted - measured).as_nanos();
            let before = self.spent.fetch_sub(less, Ordering::AcqRel);
            assert!(before >= less, "{less} ns are corrected of {before} ns that were spent");
        }
    }

    fn set_limit(&self, total: Duration) {
        self.limit.store(total.as_nanos(), Ordering::Release);
    }
}

/// The cold side of the gate: the permission and the finished work of one device, owned by one helper thread.
#[derive(Debug)]
pub struct Credit {
    /// The total up to which launches are or were last allowed.
    allowed: Duration,
    /// The total at which launches stop: `allowed`, or less after a recall.
    end: Duration,
    open: bool,
    done: Duration,
    bound: Duration,
    /// A launch that begins below this total passes with any work in flight.
    let_in: Duration,
    /// The largest total reported so far.
    reported: Duration,
}

/// The work in flight and the rest of the permission, both at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Balance {
    /// GPU time of launched work without a known end.
    pub in_flight: Duration,
    /// The rest of the permission; zero without a permission.
    pub unspent: Duration,
}

impl Credit {
    /// A credit without a permission. At most `bound` of GPU time may be in flight.
    pub fn new(bound: Duration) -> Self {
        let zero = Duration::ZERO;
        Self { allowed: zero, end: zero, open: false, done: zero, bound, let_in: zero, reported: zero }
    }

    /// Allows launches up to this total of [`used`](Self::used).
    pub fn allow(&mut self, gate: &LaunchGate, allowed: Duration) {
        (self.allowed, self.end, self.open) = (allowed, allowed, true);
        self.apply(gate);
    }

    /// Stops launches at a smaller total. The daemon may have charged the allowed total all the same.
    pub fn recall(&mut self, gate: &LaunchGate, end: Duration) {
        self.end = self.end.min(end);
        self.apply(gate);
    }

    /// Lets all launches pass, with any amount of work in flight, until they are stopped.
    pub fn allow_all(&mut self, gate: &LaunchGate) {
        self.bound = Duration::MAX;
        self.allow(gate, Duration::MAX);
    }

    /// Whether all launches pass.
    pub fn is_unlimited(&self) -> bool {
        self.open && self.allowed == Duration::MAX
    }

    /// Stops all launches until the next permission. Where all launches passed, the whole use so far was allowed.
    pub fn stop(&mut self, gate: &LaunchGate) {
        if self.is_unlimited() {
            self.allowed = gate.spent();
        }
        self.open = false;
        self.apply(gate);
    }

    /// Whether the process has a permission, used up or not.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// The total up to which launches are or were last allowed. The daemon, or the local clock without a daemon, has charged it.
    pub fn allowed(&self) -> Duration {
        self.allowed
    }

    /// Stops all launches and gives the rest of the permission back: the daemon charges the reported use and no more.
    pub fn give_back(&mut self, gate: &LaunchGate) {
        self.allowed = self.allowed.min(self.reported);
        self.stop(gate);
    }

    /// Notes a total charged by the daemon or by the local clock; a smaller total than before changes nothing.
    ///
    /// # Panics
    /// While launches are allowed.
    pub fn charged(&mut self, total: Duration) {
        assert!(!self.open, "a total is stated while launches are allowed");
        self.allowed = self.allowed.max(total);
    }

    /// Changes the bound of the GPU time in flight.
    pub fn set_bound(&mut self, gate: &LaunchGate, bound: Duration) {
        self.bound = bound;
        self.apply(gate);
    }

    /// Moves finished work from in flight to done: `predicted` is its earlier cost and `measured` its real cost, zero for a cost
    /// spent without a launch.
    ///
    /// # Panics
    /// When `predicted` is more than the work in flight.
    pub fn completed(&mut self, gate: &LaunchGate, predicted: Duration, measured: Duration) {
        let in_flight = self.balance(gate).in_flight;
        assert!(predicted <= in_flight, "{predicted} are over of {in_flight} in flight");
        gate.correct(predicted, measured);
        self.done = self.done.saturating_add(measured);
        self.let_in = Duration::ZERO;
        self.apply(gate);
    }

    /// The work in flight and the rest of the permission. Both come from one load of `spent`, so a concurrent launch counts in both
    /// or in neither.
    pub fn balance(&self, gate: &LaunchGate) -> Balance {
        let spent = gate.spent();
        let unspent = if self.open { self.end.saturating_sub(spent) } else { Duration::ZERO };
        Balance { in_flight: spent.saturating_sub(self.done), unspent }
    }

    /// The total of used GPU time, with work in flight and without `prepaid`, the cost spent for future launches. While all launches
    /// pass, work in flight has no bound, and only finished work counts. The total never shrinks.
    pub fn used(&mut self, gate: &LaunchGate, prepaid: Duration) -> Duration {
        let used = if self.is_unlimited() { self.done } else { gate.spent().saturating_sub(prepaid) };
        self.reported = self.reported.max(used);
        self.reported
    }

    /// Lets one more launch pass the bound while the permission has time left, and returns whether it has.
    ///
    /// The helper thread calls this for overdue work in flight, which may wait for a later launch of the program.
    pub fn let_one_in(&mut self, gate: &LaunchGate) -> bool {
        let has_time = !self.balance(gate).unspent.is_zero();
        if has_time && gate.left().is_zero() {
            self.let_in = gate.spent().saturating_add(Duration::from_nanos(1));
            self.apply(gate);
        }
        has_time
    }

    fn apply(&self, gate: &LaunchGate) {
        let queued = self.done.saturating_add(self.bound).max(self.let_in);
        gate.set_limit(if self.open { self.end.min(queued) } else { Duration::ZERO });
    }
}

/// The memory that a process may allocate on one GPU without another request to the daemon.
///
/// A caller reserves memory before the driver call and [releases](Self::release) it when the call fails. `free` never goes
/// below zero, so two threads cannot both pass with the last bytes.
#[derive(Debug)]
pub struct MemoryGate {
    free: AtomicU64,
    used: AtomicU64,
}

/// The gate has too little memory left: the caller asks the daemon for at least `bytes` more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} more needed")]
pub struct Shortage {
    /// The missing memory.
    pub bytes: Bytes,
}

impl MemoryGate {
    /// A gate with `free` bytes at first.
    pub fn new(free: Bytes) -> Self {
        Self { free: AtomicU64::new(free.0), used: AtomicU64::new(0) }
    }

    /// Reserves all of `bytes` or none of them.
    pub fn reserve(&self, bytes: Bytes) -> Result<(), Shortage> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let Some(rest) = free.checked_sub(bytes.0) else {
                return Err(Shortage { bytes: Bytes(bytes.0 - free) });
            };
            match self.free.compare_exchange(free, rest, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => free = now,
            }
        }
        self.used.fetch_add(bytes.0, Ordering::AcqRel);
        Ok(())
    }

    /// Returns `bytes` of reserved memory to the free memory of the gate.
    pub fn release(&self, bytes: Bytes) {
        let before = self.used.fetch_sub(bytes.0, Ordering::AcqRel);
        debug_assert!(before >= bytes.0, "released more than was reserved");
        self.free.fetch_add(bytes.0, Ordering::AcqRel);
    }

    /// Adds the memory of a grant by the daemon.
    pub fn grant(&self, bytes: Bytes) {
        self.free.fetch_add(bytes.0, Ordering::AcqRel);
    }

    /// Takes out the free memory beyond `keep`; the caller gives it back to the daemon.
    pub fn surplus(&self, keep: Bytes) -> Bytes {
        let mut free = self.free.load(Ordering::Relaxed);
        while free > keep.0 {
            match self.free.compare_exchange(free, keep.0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Bytes(free - keep.0),
                Err(now) => free = now,
            }
        }
        Bytes::ZERO
    }

    /// The reserved bytes.
    pub fn used(&self) -> Bytes {
        Bytes(self.used.load(Ordering::Acquire))
    }

    /// The bytes left to reserve without another request to the daemon.
    pub fn free(&self) -> Bytes {
        Bytes(self.free.load(Ordering::Acquire))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn ns(n: u64) -> Duration {
        Duration::from_nanos(n)
    }

    fn closed(bound: Duration) -> (LaunchGate, Credit) {
        (LaunchGate::new(), Credit::new(bound))
    }

    /// A gate that allows launches up to this total.
    fn allowing(bound: Duration, allowed: Duration) -> (LaunchGate, Credit) {
        let (gate, mut credit) = closed(bound);
        credit.allow(&gate, allowed);
        (gate, credit)
    }

    #[test]
    fn a_launch_passes_while_anything_is_left_and_what_it_takes_beyond_counts() {
        let (gate, mut credit) = closed(ms(100));
        assert!(!gate.try_spend(MS), "closed at first");
        credit.allow(&gate, MS);
        assert!(gate.try_spend(ms(30)), "a kernel that is longer than the permission is not starved");
        assert!(!gate.try_spend(MS));
        credit.allow(&gate, ms(30));
        assert!(!gate.try_spend(MS), "the next permission pays for it first");
        credit.allow(&gate, ms(31));
        assert!(gate.try_spend(MS) && !gate.try_spend(MS));
        assert_eq!(credit.used(&gate, Duration::ZERO), ms(31));
    }

    #[test]
    fn work_in_flight_is_bounded_and_its_end_lets_more_in() {
        let (gate, mut credit) = allowing(ms(2), ms(10));
        assert_eq!((0..9).take_while(|_| gate.try_spend(MS)).count(), 2);
        assert_eq!(credit.balance(&gate), Balance { in_flight: ms(2), unspent: ms(8) });
        credit.completed(&gate, MS, MS);
        assert!(gate.try_spend(MS) && !gate.try_spend(MS));
        credit.set_bound(&gate, MS);
        credit.completed(&gate, MS, MS);
        assert!(!gate.try_spend(MS), "the bound is a smaller one");
        credit.set_bound(&gate, ms(3));
        assert_eq!((0..9).take_while(|_| gate.try_spend(MS)).count(), 2);
    }

    #[test]
    fn measurements_correct_what_is_spent_in_both_directions() {
        let (gate, mut credit) = allowing(ms(100), ms(10));
        assert!((0..4).all(|_| gate.try_spend(MS)));
        // Each launch took two milliseconds, not one, so two of ten milliseconds are left.
        credit.completed(&gate, ms(4), ms(8));
        assert_eq!(credit.balance(&gate), Balance { in_flight: Duration::ZERO, unspent: ms(2) });
        assert_eq!((0..9).take_while(|_| gate.try_spend(MS)).count(), 2);
        credit.completed(&gate, ms(2), MS);
        assert_eq!(credit.balance(&gate), Balance { in_flight: Duration::ZERO, unspent: MS });
        assert!(gate.try_spend(MS) && !gate.try_spend(MS));
        assert_eq!(credit.used(&gate, Duration::ZERO), ms(10));
    }

    #[test]
    fn credit_for_launches_that_are_not_made_is_no_use() {
        let (gate, mut credit) = allowing(ms(100), ms(10));
        assert!(gate.try_spend(ms(5)));
        assert_eq!(credit.used(&gate, ms(3)), ms(2), "three are prepaid");
        credit.completed(&gate, ms(3), Duration::ZERO);
        assert_eq!(credit.balance(&gate), Balance { in_flight: ms(2), unspent: ms(8) });
        assert_eq!(credit.used(&gate, Duration::ZERO), ms(2));
    }

    #[test]
    fn a_permission_that_is_taken_back_leaves_the_totals_as_they_are() {
        let (gate, mut credit) = allowing(ms(100), ms(10));
        assert!(gate.try_spend(ms(4)));
        credit.stop(&gate);
        assert!(!gate.try_spend(MS) && !credit.is_open());
        assert_eq!(credit.balance(&gate), Balance { in_flight: ms(4), unspent: Duration::ZERO });
        credit.completed(&gate, ms(4), ms(30));
        assert_eq!((credit.used(&gate, Duration::ZERO), credit.allowed()), (ms(30), ms(10)));
        credit.allow(&gate, ms(31));
        assert!(gate.try_spend(ms(5)) && !gate.try_spend(MS));
    }

    #[test]
    fn a_permission_that_is_given_back_is_charged_as_far_as_it_was_used() {
        let (gate, mut credit) = allowing(ms(100), ms(10));
        assert!(gate.try_spend(ms(4)));
        assert_eq!(credit.used(&gate, Duration::ZERO), ms(4));
        credit.give_back(&gate);
        assert_eq!((credit.allowed(), gate.try_spend(MS)), (ms(4), false));
        credit.charged(ms(3));
        assert_eq!(credit.allowed(), ms(4), "a smaller total says nothing new");
        credit.charged(ms(7));
        assert_eq!(credit.allowed(), ms(7));
    }

    #[test]
    fn one_launch_is_let_in_beyond_the_bound_while_the_permission_has_time() {
        let (gate, mut credit) = closed(ms(2));
        assert!(!credit.let_one_in(&gate), "no permission");
        credit.allow(&gate, ms(40));
        assert!(gate.try_spend(ms(30)) && !gate.try_spend(MS), "the bound");
        assert!(credit.let_one_in(&gate) && credit.let_one_in(&gate), "but no more than one");
        credit.set_bound(&gate, ms(2));
        assert!(gate.try_spend(MS), "a look in between takes nothing back");
        assert!(!gate.try_spend(MS));
        credit.set_bound(&gate, ms(2));
        assert!(!gate.try_spend(MS));
        assert_eq!(credit.balance(&gate).unspent, ms(9));
        assert!(credit.let_one_in(&gate) && gate.try_spend(ms(9)));
        assert!(!credit.let_one_in(&gate), "the permission is spent");
        // Work in progress needs no extra launch, even if a launch took less than predicted.
        credit.allow(&gate, ms(50));
        assert!(credit.let_one_in(&gate));
        credit.completed(&gate, ms(10), MS);
        assert!(!gate.try_spend(MS));
    }

    #[test]
    #[should_panic(expected = "2ms are over of 1ms in flight")]
    fn more_than_was_launched_cannot_be_over() {
        let (gate, mut credit) = allowing(ms(10), ms(10));
        assert!(gate.try_spend(MS));
        credit.completed(&gate, ms(2), ms(2));
    }

    #[test]
    fn nothing_is_lost_or_made_while_threads_launch_and_permissions_come_and_go() {
        const COST: u64 = 700;
        let gate = LaunchGate::new();
        let mut credit = Credit::new(ms(100));
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (launched, launches) = std::sync::mpsc::channel();
            for _ in 0..4 {
                let (gate, stop, launched) = (&gate, &stop, launched.clone());
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        if gate.try_spend(ns(COST)) {
                            launched.send(COST).unwrap();
                        }
                    }
                });
            }
            drop(launched);
            let (mut over, mut used) = (0, Duration::ZERO);
            let mut end = |credit: &mut Credit, n: u64, cost: u64| {
                let measured = cost / 2 + n * 131 % COST;
                credit.completed(&gate, ns(cost), ns(measured));
                over += measured;
                assert!(credit.done <= gate.spent(), "{} done of {}", credit.done, gate.spent());
            };
            for turn in 0..2_000u64 {
                credit.allow(&gate, gate.spent().saturating_add(ns(20_000)));
                launches.try_iter().take(40).for_each(|cost| end(&mut credit, turn, cost));
                let now = credit.used(&gate, Duration::ZERO);
                assert!(now >= used);
                used = now;
                credit.stop(&gate);
            }
            stop.store(true, Ordering::Relaxed);
            launches.iter().for_each(|cost| end(&mut credit, 3, cost));
            assert_eq!((gate.spent(), credit.done), (ns(over), ns(over)));
        });
    }

    #[test]
    fn memory_is_all_or_nothing_and_comes_back() {
        let gate = MemoryGate::new(Bytes(100));
        assert_eq!(gate.reserve(Bytes(60)), Ok(()));
        assert_eq!(gate.reserve(Bytes(60)), Err(Shortage { bytes: Bytes(20) }));
        gate.grant(Bytes(20));
        assert_eq!(gate.reserve(Bytes(60)), Ok(()));
        gate.release(Bytes(60));
        assert_eq!((gate.used(), gate.free()), (Bytes(60), Bytes(60)));
        assert_eq!(gate.surplus(Bytes(10)), Bytes(50));
        assert_eq!(gate.surplus(Bytes(10)), Bytes(0));
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Launch(u64),
        Prepay(u64),
        /// The oldest launch ends after this time.
        End(u64),
        Refund,
        Allow(u64),
        Stop,
        Bound(u64),
        LetOneIn,
    }

    fn step() -> impl Strategy<Value = Step> {
        let cost = || prop_oneof![4 => 1u64..3_000, 1 => 1u64..1_000_000];
        prop_oneof![
            6 => cost().prop_map(Step::Launch),
            1 => cost().prop_map(Step::Prepay),
            4 => (0u64..4_000).prop_map(Step::End),
            1 => Just(Step::Refund),
            3 => (0u64..20_000).prop_map(Step::Allow),
            1 => Just(Step::Stop),
            1 => (0u64..10_000).prop_map(Step::Bound),
            1 => Just(Step::LetOneIn),
        ]
    }

    /// The gate as a list of launches, which keeps no totals and adds the list up for each question.
    #[derive(Debug)]
    struct Literal {
        queue: Vec<u64>,
        over: Vec<u64>,
        prepaid: u64,
        /// The allowed total; `None` while the gate is closed.
        allowed: Option<u64>,
        bound: u64,
        one_more: bool,
        most_used: u64,
    }

    impl Literal {
        fn queued(&self) -> u64 {
            self.queue.iter().sum::<u64>() + self.prepaid
        }

        fn total(&self) -> u64 {
            self.over.iter().sum::<u64>() + self.queued()
        }

        fn lets_in(&self) -> bool {
            let has_room = self.queued() < self.bound || self.one_more;
            self.allowed.is_some_and(|allowed| self.total() < allowed) && has_room
        }
    }

    proptest! {
        #[test]
        fn the_gate_is_a_list_of_launches(steps in prop::collection::vec(step(), 1..200)) {
            let (gate, mut credit) = closed(ns(2_000));
            let mut model = Literal {
                queue: vec![], over: vec![], prepaid: 0, allowed: None, bound: 2_000, one_more: false, most_used: 0,
            };
            for step in steps {
                match step {
                    Step::Launch(cost) | Step::Prepay(cost) => {
                        let passes = model.lets_in();
                        prop_assert_eq!(gate.try_spend(ns(cost)), passes);
                        match step {
                            _ if !passes => {}
                            Step::Prepay(_) => model.prepaid += cost,
                            _ => model.queue.push(cost),
                        }
                        model.one_more &= !passes;
                    }
                    Step::End(measured) if !model.queue.is_empty() => {
                        let predicted = model.queue.remove(0);
                        model.over.push(measured);
                        model.one_more = false;
                        credit.completed(&gate, ns(predicted), ns(measured));
                    }
                    Step::End(_) => {}
                    Step::Refund => {
                        let prepaid = core::mem::take(&mut model.prepaid);
                        model.one_more = false;
                        credit.completed(&gate, ns(prepaid), Duration::ZERO);
                    }
                    Step::Allow(more) => {
                        let allowed = model.total() + more;
                        model.allowed = Some(allowed);
                        credit.allow(&gate, ns(allowed));
                    }
                    Step::Stop => {
                        model.allowed = None;
                        credit.stop(&gate);
                    }
                    Step::Bound(bound) => {
                        model.bound = bound;
                        credit.set_bound(&gate, ns(bound));
                    }
                    Step::LetOneIn => {
                        let has_time = model.allowed.is_some_and(|allowed| model.total() < allowed);
                        model.one_more |= has_time && !model.lets_in();
                        prop_assert_eq!(credit.let_one_in(&gate), has_time);
                    }
                }
                let unspent = model.allowed.map_or(0, |allowed| allowed.saturating_sub(model.total()));
                let balance = Balance { in_flight: ns(model.queued()), unspent: ns(unspent) };
                prop_assert_eq!(credit.balance(&gate), balance);
                prop_assert_eq!(gate.left() > Duration::ZERO, model.lets_in());
                model.most_used = model.most_used.max(model.total() - model.prepaid);
                prop_assert_eq!(credit.used(&gate, ns(model.prepaid)), ns(model.most_used));
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    fn ns(n: u64) -> Duration {
        Duration::from_nanos(n)
    }

    fn allowing(bound: u64, allowed: u64) -> (Arc<LaunchGate>, Credit) {
        let (gate, mut credit) = (LaunchGate::new(), Credit::new(ns(bound)));
        credit.allow(&gate, ns(allowed));
        (Arc::new(gate), credit)
    }

    fn check(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    /// Two threads launch as often as they can during a `stop`. Each thread passes at most once after it.
    #[test]
    fn a_thread_passes_once_at_most_when_launches_are_stopped() {
        check(|| {
            let (gate, mut credit) = allowing(100, 45);
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let gate = Arc::clone(&gate);
                    loom::thread::spawn(move || (0..2).filter(|_| gate.try_spend(ns(30))).count())
                })
                .collect();
            credit.stop(&gate);
            let then = gate.spent();
            let passed: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!(gate.spent(), ns(30 * passed as u64), "nothing is lost or made");
            assert!(gate.spent() - then <= ns(60));
            assert!(gate.spent() <= ns(45 + 30), "one launch in all goes beyond the limit");
        });
    }

    /// A launch ends, earlier than predicted, while other threads launch.
    #[test]
    fn what_is_done_was_spent_at_any_moment() {
        check(|| {
            let (gate, mut credit) = allowing(50, 200);
            assert!(gate.try_spend(ns(40)));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let gate = Arc::clone(&gate);
                    loom::thread::spawn(move || u64::from(gate.try_spend(ns(30))) * 30)
                })
                .collect();
            credit.completed(&gate, ns(40), ns(10));
            assert!(gate.spent() >= credit.done);
            let before = credit.used(&gate, Duration::ZERO);
            let spent: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!((gate.spent(), credit.balance(&gate).in_flight), (ns(10 + spent), ns(spent)));
            assert!(credit.used(&gate, Duration::ZERO) >= before);
        });
    }

    /// Two threads launch while one launch is let in beyond the bound.
    #[test]
    fn one_thread_passes_when_one_launch_is_let_in() {
        check(|| {
            let (gate, mut credit) = allowing(10, 200);
            assert!(gate.try_spend(ns(40)));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let gate = Arc::clone(&gate);
                    loom::thread::spawn(move || gate.try_spend(ns(30)))
                })
                .collect();
            assert!(credit.let_one_in(&gate));
            credit.set_bound(&gate, ns(10));
            let passed = threads.into_iter().map(|thread| thread.join().unwrap());
            assert!(passed.filter(|passed| *passed).count() <= 1);
        });
    }

    /// The helper thread asks for the balance while another thread spends the rest of the permission.
    #[test]
    fn what_is_found_spent_is_found_in_flight() {
        check(|| {
            let (gate, credit) = allowing(100, 10);
            let launches = {
                let gate = Arc::clone(&gate);
                loom::thread::spawn(move || assert!(gate.try_spend(ns(30))))
            };
            // Without this yield loom always runs the launch last.
            loom::thread::yield_now();
            let Balance { in_flight, unspent } = credit.balance(&gate);
            assert!(!unspent.is_zero() || in_flight >= ns(10), "{in_flight}");
            launches.join().unwrap();
            assert_eq!(credit.balance(&gate), Balance { in_flight: ns(30), unspent: Duration::ZERO });
        });
    }
}
