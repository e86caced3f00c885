//! Turns of a daemon's token, in virtual time: they are requested, used within their bounds, and ended with the total use.

use crate::common::{BOUND, Behind, Bench, DEVICE, Kernel, MS, US, limited};
use gshare_core::wire::{OnDaemonLoss, ToDaemon};
use gshare_core::{Duration, Timestamp, UseState};
use gshare_meter::cost::Row;
use gshare_meter::{Facts, Measured, MeterEvent, OpenRun, Segment, SegmentId, Ticket};

const KERNEL: Kernel = Kernel { function: 0x100, ns: MS };
/// A kernel of a function never launched before.
const UNKNOWN: u64 = 0x900;
/// The kernel's charge until it is measured.
const GUESS: u64 = 500 * US;

fn served() -> Bench {
    let bench = Bench::served(limited(50));
    bench.learn(KERNEL.function, KERNEL.ns);
    bench
}

/// One launch of `row` with a predicted time of 0.
fn alone(row: Row, of: Measured, opened: u64) -> Segment {
    let row = Some(row);
    Segment {
        predicted: 0,
        carried: 0,
        presumed: 0,
        launches: 1,
        row,
        dense: true,
        span: 0,
        gap: 0,
        record: 0,
        of,
        opened,
        behind_wait: false,
    }
}

/// One kernel of an unknown function, launched in a turn of 20 ms.
fn unknown(ns: u64) -> Bench {
    let mut bench = Bench::served(limited(20));
    bench.launches(1, Kernel { function: UNKNOWN, ns });
    bench.run(MS);
    bench.allow(10 * MS, 20 * MS);
    bench
}

#[test]
fn a_token_is_asked_for_used_within_its_bound_and_given_back_with_the_total() {
    let mut bench = served();
    bench.launches(40, KERNEL);
    bench.run(MS);
    assert_eq!((bench.uses(), bench.busy), (vec![(0, 0, UseState::Wants)], 0), "a thread waits for a token");
    bench.allow(10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!((bench.ends(), bench.busy), (vec![10 * MS], 10 * MS));
    assert!(bench.most_queued <= BOUND + MS, "{} ns queued", bench.most_queued);
    let states: Vec<UseState> = bench.uses().iter().map(|(_, _, state)| *state).collect();
    assert_eq!(states, [UseState::Wants, UseState::Extends, UseState::Wants], "ahead, and with the end");
    bench.allow(10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.ends(), [10 * MS, 20 * MS]);
}

#[test]
fn a_larger_total_extends_the_turn() {
    let mut bench = served();
    bench.launches(15, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    bench.run(8 * MS + 500 * US);
    assert_eq!(bench.requests(), 2, "asked ahead");
    bench.allow_up_to(0, 20 * MS, bench.now + 60 * MS);
    bench.run(40 * MS);
    assert_eq!(bench.ends(), [15 * MS]);
}

/// The daemon wants the token back for another client. Launched work ends first: 5 ms of 10 ms.
#[test]
fn a_smaller_total_ends_the_turn_once_the_launched_work_is_over() {
    let mut bench = served();
    bench.launches(40, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    bench.run(3 * MS);
    let (turn, queued) = (bench.turn, bench.most_queued);
    assert!(bench.ends().is_empty() && queued <= BOUND + MS, "{queued} ns queued");
    bench.allow_up_to(turn, 2 * MS, bench.now + 57 * MS);
    bench.run(queued);
    assert_eq!(bench.turn, turn + 1, "given back");
    let (_, used, state) = *bench.uses().last().unwrap();
    assert!(used <= 3 * MS + queued && state == UseState::Wants, "{used} ns, {state:?}");
    assert_eq!(bench.said_of(&[UseState::Extends]), 0, "it does not ask for more of a token that goes back");
    bench.allow(10 * MS, 60 * MS);
    bench.run(3 * MS);
    assert!(bench.busy > used, "the next turn is like every other");
}

/// The queue is about to run dry when the daemon's answer comes.
#[test]
fn an_extension_that_comes_while_the_queue_drains_goes_on_with_the_turn() {
    let mut bench = served();
    bench.launches(30, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    while bench.program.len() > 20 || bench.idle_since > bench.now + 300 * US {
        bench.run(50 * US);
    }
    assert_eq!((bench.ends(), bench.ground.gate.left()), (vec![], Duration::ZERO));
    bench.allow_up_to(0, 20 * MS, bench.now + 60 * MS);
    bench.run(30 * MS);
    assert_eq!((bench.ends(), bench.busy), (vec![20 * MS], 20 * MS));
}

#[test]
fn a_smaller_total_stops_launches() {
    let mut bench = served();
    bench.launches(30, KERNEL);
    bench.run(MS);
    bench.allow(20 * MS, 60 * MS);
    bench.run(5 * MS);
    bench.allow_up_to(0, 6 * MS, bench.now + 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.ends(), [7 * MS], "two were queued");
}

#[test]
fn nothing_is_queued_that_would_not_be_over_when_the_turn_ends() {
    let mut bench = served();
    bench.launches(100, KERNEL);
    bench.run(MS);
    let until = bench.now + 10 * MS;
    bench.allow(100 * MS, 10 * MS);
    bench.run(40 * MS);
    assert!(bench.idle_since <= until + MS, "the last kernel ends {} ns late", bench.idle_since - until);
    assert_eq!(bench.ends(), [bench.busy]);
    assert!(bench.busy >= 9 * MS, "{} ns used", bench.busy);
}

#[test]
fn a_token_is_given_back_soon_after_the_last_launch() {
    let mut bench = served();
    bench.launches(3, KERNEL);
    bench.run(MS);
    bench.allow(50 * MS, 200 * MS);
    let begun = bench.now;
    bench.run(30 * MS);
    assert_eq!(bench.uses().last(), Some(&(1, 3 * MS, UseState::Idle)));
    let (returned, _) = bench.said.last().unwrap();
    assert!(returned - begun <= 8 * MS, "after {} ns", returned - begun);
}

/// The end of a kernel of 20 ms is seen only when it is over, but the device gets its next holder without a pause.
#[test]
fn a_token_is_given_back_when_what_is_queued_is_nearly_over() {
    let mut bench = Bench::served(limited(50));
    let long = Kernel { ns: 20 * MS, ..KERNEL };
    bench.learn(long.function, long.ns);
    for turn in 0..6 {
        bench.launches(1, long);
        bench.run(MS);
        bench.allow(20 * MS, 200 * MS);
        while bench.ends().len() == turn {
            bench.run(20 * US);
        }
        let early = bench.idle_since.saturating_sub(bench.now);
        // In the first four turns, all work must be over first.
        let expected = if turn < 4 { 0..=0 } else { 400 * US..=500 * US };
        assert!(expected.contains(&early), "turn {turn} ends {early} ns before its work");
        bench.run(10 * MS);
    }
}

/// A launch is counted at its request, and short kernels are not measured, so the wait must not count as idleness.
#[test]
fn a_turn_that_was_waited_for_outlasts_a_pause() {
    let mut bench = served();
    let look = |bench: &mut Bench, after: u64, waiting| {
        bench.now += after;
        let facts = Facts { launches: 1, waiting, ..Facts::default() };
        bench.feed(MeterEvent::Looked { device: DEVICE, facts });
        bench.ends().len()
    };
    look(&mut bench, 0, 1);
    bench.now += 30 * MS;
    bench.allow(10 * MS, 50 * MS);
    let returned = [0, 300 * US, 2 * MS, MS].map(|after| look(&mut bench, after, 0));
    assert_eq!(returned, [0, 0, 0, 1], "kept for 3 ms without a launch");
}

/// A thread returns from elsewhere and ends its segment, whose launches were presumed complete. They once counted as complete
/// twice, so more work could be in flight from then on.
#[test]
fn what_a_thread_takes_out_while_it_is_taken_for_complete_is_over_once() {
    let mut bench = served();
    let mut launches = 0;
    let mut look = |bench: &mut Bench, facts: Facts| {
        bench.now += 5 * MS;
        launches += 1;
        bench.feed(MeterEvent::Looked { device: DEVICE, facts: Facts { launches, ..facts } });
    };
    let open = || Facts { open: vec![OpenRun { predicted: MS, ..OpenRun::default() }], ..Facts::default() };
    bench.allow(100 * MS, 500 * MS);
    assert!(bench.ground.gate.try_spend(Duration::from_nanos(MS)));
    look(&mut bench, open());
    look(&mut bench, open());
    look(&mut bench, Facts { settled: MS, ..Facts::default() });
    assert_eq!(bench.ground.gate.left().as_nanos(), BOUND);
    assert!(bench.ground.gate.try_spend(Duration::from_nanos(MS)));
    look(&mut bench, open());
    look(&mut bench, open());
    look(&mut bench, Facts { presumed: MS, ..Facts::default() });
    assert_eq!(bench.ground.gate.left().as_nanos(), BOUND);
}

#[test]
fn credit_that_threads_hold_is_not_used_and_takes_no_room_on_the_device() {
    let mut bench = served();
    bench.allow(100 * MS, 500 * MS);
    let (launched, prepaid) = (MS / 2, 3 * MS / 2);
    assert!(bench.ground.gate.try_spend(Duration::from_nanos(launched + prepaid)));
    let open = vec![OpenRun { predicted: launched, prepaid, ..OpenRun::default() }];
    for _ in 0..3 {
        bench.now += 10 * MS;
        let facts = Facts { launches: 1, waiting: 1, open: open.clone(), ..Facts::default() };
        bench.feed(MeterEvent::Looked { device: DEVICE, facts });
    }
    assert_eq!(bench.used, launched);
    assert_eq!(bench.ground.gate.left().as_nanos(), BOUND - launched);
}

#[test]
fn what_the_daemon_says_about_a_turn_that_is_over_is_void() {
    let mut bench = served();
    bench.launches(10, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    bench.run(20 * MS);
    assert_eq!(bench.ends(), [10 * MS]);
    bench.launches(10, KERNEL);
    bench.allow_up_to(0, 30 * MS, bench.now + 60 * MS);
    bench.allow_up_to(0, 30 * MS, bench.now);
    bench.run(20 * MS);
    assert_eq!((bench.busy, bench.ends().len()), (10 * MS, 1), "the turn was over before");
    bench.allow(10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.ends(), [10 * MS, 20 * MS]);
}

#[test]
fn a_token_that_comes_when_its_time_is_over_is_given_back_at_once() {
    let mut bench = served();
    bench.launches(10, KERNEL);
    bench.run(MS);
    bench.allow_up_to(0, 10 * MS, bench.now);
    assert_eq!(bench.uses(), [(0, 0, UseState::Wants), (1, 0, UseState::Wants)]);
    bench.run(MS);
    assert_eq!(bench.busy, 0);
    bench.allow(10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.busy, 10 * MS);
}

#[test]
fn use_is_reported_every_ten_milliseconds_while_it_grows() {
    let mut bench = served();
    bench.launches(1_000, KERNEL);
    bench.run(MS);
    bench.allow(500 * MS, 1_000 * MS);
    bench.run(400 * MS);
    let reports = bench.said_of(&[UseState::Holds]);
    assert!((34..=40).contains(&reports), "{reports} in 400 ms");
    let mut before = (0, 0);
    for (at, used) in bench.said.iter().filter_map(|(at, message)| match message {
        ToDaemon::Use { used, .. } => Some((*at, used.as_nanos())),
        _ => None,
    }) {
        let (time, more) = (at - before.0, used - before.1);
        assert!(before.0 == 0 || more <= time + BOUND, "{more} ns more after {time} ns");
        before = (at, used);
    }
}

#[test]
fn prediction_errors_are_part_of_the_total() {
    let mut bench = Bench::served(limited(50));
    bench.learn(KERNEL.function, MS / 2);
    bench.launches(100, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 200 * MS);
    bench.run(60 * MS);
    let used = bench.ends()[0];
    assert!(used <= bench.busy && bench.busy - used <= MS / 2, "{used} ns of {}", bench.busy);
    bench.allow(10 * MS, 200 * MS);
    bench.run(60 * MS);
    // The first kernel of a turn proves nothing.
    assert!(bench.used <= bench.busy && bench.busy - bench.used <= MS, "{} ns of {}", bench.used, bench.busy);
}

/// A program that waits for each of its kernels leaves the device idle in between. While it holds its token, no other process's
/// work can be there, so a longer kernel is charged at once. Only the first kernel of a turn may hold the end of another process's
/// turn.
#[test]
fn within_a_turn_a_kernel_that_became_longer_is_charged_in_full() {
    let short = Kernel { ns: 20 * US, ..KERNEL };
    let mut bench = Bench::served(limited(50));
    bench.learn(short.function, short.ns);
    bench.launches(1, short);
    bench.run(MS / 2);
    bench.allow(40 * MS, 200 * MS);
    for kernel in [short, KERNEL, KERNEL, short, KERNEL] {
        bench.run(MS);
        bench.launches(1, kernel);
        bench.run(MS + 100 * US);
    }
    bench.run(10 * MS);
    assert_eq!(bench.busy, 3 * MS + 60 * US);
    assert_eq!(bench.ends(), [bench.busy]);

    bench.learn(short.function, short.ns);
    let known = |bench: &Bench| bench.ground.costs.find(short.function, 0).1;
    let before = known(&bench);
    bench.launches(1, Kernel { ns: 5 * MS, ..KERNEL });
    bench.run(MS / 2);
    bench.allow(40 * MS, 200 * MS);
    bench.run(20 * MS);
    assert_eq!(known(&bench), before, "the first kernel of a turn proves nothing");
}

#[test]
fn a_kernel_that_outlasts_its_turn_is_reported_in_full() {
    // The kernel is unknown: it is charged a guess, and the daemon takes the token back while it runs.
    let mut bench = unknown(400 * MS);
    bench.run(70 * MS);
    assert_eq!(bench.used, GUESS);
    bench.stop(10 * MS);
    assert_eq!(bench.uses().last(), Some(&(1, GUESS, UseState::Idle)));
    bench.launches(1, KERNEL);
    bench.run(300 * MS);
    assert_eq!(bench.uses().last(), Some(&(1, GUESS, UseState::Wants)), "a thread waits meanwhile");
    bench.run(35 * MS);
    assert_eq!(bench.uses().last(), Some(&(1, 400 * MS, UseState::Wants)));
    // The next turn pays for the rest.
    bench.allow_up_to(1, 400 * MS, bench.now + 50 * MS);
    bench.run(20 * MS);
    assert_eq!(bench.busy, 400 * MS);
}

/// A late daemon, and a kernel known to take a millisecond.
#[test]
fn a_token_is_kept_for_a_while_beyond_its_time_while_its_work_is_overdue() {
    for (kernel, kept) in [(110 * MS, 110 * MS), (400 * MS, 120 * MS)] {
        let mut bench = served();
        bench.launches(1, Kernel { ns: kernel, ..KERNEL });
        bench.run(MS);
        let begun = bench.now;
        bench.allow(10 * MS, 20 * MS);
        while bench.ends().is_empty() {
            bench.run(MS);
        }
        let end = bench.said.last().map_or(0, |(at, _)| at - begun);
        assert!((kept..=kept + MS).contains(&end), "kept for {end} ns");
    }
}

/// In thirty processes the daemon takes the token back at any time while the kernel runs, and the process ends as soon as the kernel has.
#[test]
fn all_that_was_used_is_reported_before_the_process_ends() {
    for pair in 0..30 {
        let mut bench = unknown(400 * MS);
        bench.run((22 + 12 * pair) * MS);
        bench.stop(10 * MS);
        // The host has not looked since the kernel ended.
        bench.skip_to_idle();
        bench.feed(MeterEvent::Leaving { ticket: Ticket(1) });
        bench.run(5 * MS);
        assert_eq!(bench.answer(1), Some(true), "process {pair}");
        let turns = bench.turn;
        assert_eq!(bench.uses().last(), Some(&(turns, 400 * MS, UseState::Idle)), "process {pair}");
    }
}

#[test]
fn a_process_that_ends_waits_for_its_reports_and_not_for_ever() {
    let mut bench = unknown(100_000 * MS);
    bench.run(200 * MS);
    bench.feed(MeterEvent::Leaving { ticket: Ticket(1) });
    bench.run(90 * MS);
    assert_eq!(bench.answer(1), None);
    bench.run(20 * MS);
    assert_eq!(bench.answer(1), Some(true));
    assert!((299 * MS..=301 * MS).contains(&bench.used), "it ran for 300 ms, not {} ns", bench.used);
}

/// The helper thread ended in a panic, since the kernel's measurement was over already.
#[test]
fn a_kernel_that_ends_after_the_last_report_changes_nothing() {
    let mut bench = unknown(350 * MS);
    bench.run(200 * MS);
    bench.feed(MeterEvent::Leaving { ticket: Ticket(1) });
    bench.run(110 * MS);
    assert_eq!(bench.answer(1), Some(true));
    let used = bench.used;
    bench.run(100 * MS);
    assert_eq!(bench.used, used);
}

#[test]
fn a_process_that_ends_within_its_turn_gives_the_token_back() {
    let mut bench = served();
    bench.launches(2, KERNEL);
    bench.run(MS);
    bench.allow(50 * MS, 200 * MS);
    bench.run(MS);
    bench.feed(MeterEvent::Leaving { ticket: Ticket(1) });
    bench.run(5 * MS);
    assert_eq!((bench.answer(1), bench.uses().last()), (Some(true), Some(&(1, 2 * MS, UseState::Idle))));
}

#[test]
fn a_launch_goes_in_beyond_the_bound_when_what_is_queued_does_not_end() {
    let mut bench = served();
    // A kernel known to take a millisecond takes ten seconds, perhaps because it waits for a launch without credit.
    bench.launches(1, Kernel { ns: 10_000 * MS, ..KERNEL });
    bench.launches(6, KERNEL);
    bench.run(MS);
    bench.allow(50 * MS, 5_000 * MS);
    bench.run(90 * MS);
    let before = bench.program.len();
    bench.run(60 * MS);
    assert_eq!(before - bench.program.len(), 1);
    bench.run(110 * MS);
    assert_eq!(before - bench.program.len(), 2, "one for each 100 ms");
}

// ---- reconnects -----------------------------------------------------------------------------------------------------

/// The used and the allowed GPU time stated in the last `Attach`.
fn stated(bench: &Bench) -> (u64, u64) {
    let attach = bench.said.iter().rev().find_map(|(_, message)| match message {
        ToDaemon::Attach { used, allowed, .. } => Some((used.as_nanos(), allowed.as_nanos())),
        _ => None,
    });
    attach.expect("the device was attached")
}

fn reconnect(bench: &mut Bench) {
    bench.lose(Behind::Daemon);
    bench.run(400 * MS);
    bench.welcome(limited(50));
}

#[test]
fn after_a_reconnect_the_totals_are_stated_again() {
    let mut bench = Bench::served_as(limited(50), OnDaemonLoss::Closed);
    assert_eq!(stated_first(), (0, 0));
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(100, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    bench.run(3 * MS);
    reconnect(&mut bench);
    // The daemon has charged the whole token.
    assert_eq!(stated(&bench), (5 * MS, 10 * MS));
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!((bench.ends(), bench.busy), (vec![15 * MS], 15 * MS));
    reconnect(&mut bench);
    assert_eq!(stated(&bench), (15 * MS, 15 * MS), "a token that was given back is charged as used");
}

fn stated_first() -> (u64, u64) {
    let mut bench = Bench::new(limited(50), OnDaemonLoss::Closed, Behind::Daemon);
    bench.welcome(limited(50));
    stated(&bench)
}

#[test]
fn what_was_overused_is_stated_to_the_next_daemon_once() {
    let mut bench = Bench::served_as(limited(50), OnDaemonLoss::Closed);
    bench.launches(1, Kernel { function: UNKNOWN, ns: 400 * MS });
    bench.run(MS);
    bench.allow(10 * MS, 20 * MS);
    bench.run(70 * MS);
    bench.stop(10 * MS);
    reconnect(&mut bench);
    assert_eq!(stated(&bench), (400 * MS, 10 * MS));
    reconnect(&mut bench);
    assert_eq!(stated(&bench), (400 * MS, 400 * MS), "the daemon has taken it");
}

/// The local clock allows totals, as a daemon does.
#[test]
fn what_the_last_daemon_is_owed_is_paid_back_by_the_local_clock() {
    let mut bench = Bench::served_as(limited(20), OnDaemonLoss::Open);
    bench.launches(1, Kernel { function: UNKNOWN, ns: 200 * MS });
    bench.run(MS);
    bench.allow(10 * MS, 20 * MS);
    bench.run(210 * MS);
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(20_000, KERNEL);
    bench.lose(Behind::Nobody);
    // 190 ms of overuse are nine and a half windows of 20 ms.
    bench.run(880 * MS);
    assert_eq!(bench.busy, 200 * MS);
    bench.run(220 * MS);
    assert!((210 * MS..=252 * MS).contains(&bench.busy), "{} ns", bench.busy);
    bench.behind = Behind::Daemon;
    bench.run(400 * MS);
    bench.welcome(limited(20));
    let (used, allowed) = stated(&bench);
    assert!(used <= allowed && allowed - used <= 20 * MS, "{used} ns used of {allowed} ns");
}

// ---- segments -------------------------------------------------------------------------------------------------------

/// The launch call was as long as the whole measurement.
#[test]
fn a_kernel_that_is_over_with_its_call_is_charged_nothing() {
    let mut bench = served();
    bench.allow(100 * MS, 500 * MS);
    assert!(bench.ground.gate.try_spend(Duration::from_nanos(50 * US)));
    let id = SegmentId(900);
    let row = bench.ground.costs.find(UNKNOWN, 0).0;
    let calls = Segment {
        predicted: 50 * US,
        span: 8 * US,
        gap: 7 * US,
        record: US,
        ..alone(row, Measured::First, bench.now)
    };
    bench.feed(MeterEvent::Recorded { device: DEVICE, id, segment: calls });
    let at = |ns: u64| Timestamp::from_nanos(ns);
    let (start, end) = (at(bench.now), at(bench.now + 6 * US));
    bench.now += MS;
    bench.feed(MeterEvent::Completed { device: DEVICE, id, start, end });
    assert_eq!(bench.ground.gate.spent().as_nanos(), 0);
}

/// Beside a second thread, each measurement alone may hold some of that thread's work, so a sample above the cost proves nothing by
/// itself. The next measurement once came 16,384 launches later.
#[test]
fn a_cost_that_was_learned_too_low_is_put_right_by_measurements_that_follow_each_other() {
    let mut bench = served();
    bench.allow(100 * MS, 500 * MS);
    let row = bench.learn(UNKNOWN, 0);
    for launched in 1..4 {
        bench.now += MS;
        bench.feed(MeterEvent::ThreadsSeen { launched: vec![launched, launched], synced: vec![0, 0] });
    }
    bench.ground.costs.doubt(row);
    let mut measured = 0;
    while bench.ground.costs.take_doubt(row) {
        measured += 1;
        let id = SegmentId(900 + measured);
        let segment = alone(row, Measured::Held, bench.now);
        bench.feed(MeterEvent::Recorded { device: DEVICE, id, segment });
        let (start, end) = (Timestamp::from_nanos(bench.now), Timestamp::from_nanos(bench.now + 5 * US));
        bench.now += 20 * US;
        bench.feed(MeterEvent::Completed { device: DEVICE, id, start, end });
    }
    assert_eq!(measured, 8);
    let cost = bench.ground.costs.known(row).unwrap();
    assert!((4_900..=5_000).contains(&cost), "{cost} ns");
}

/// A thread launches for 1 ms under a token of 5 ms, and does nothing more: no event will tell the end of its work. Gives the time since
/// the start at which the host was told to presume it, and at which the token went back.
fn left_behind() -> (u64, u64) {
    let mut bench = served();
    bench.launches(1, KERNEL);
    bench.run(MS);
    bench.program.clear();
    let start = bench.now;
    bench.allow(10 * MS, 5 * MS);
    assert!(bench.ground.gate.try_spend(Duration::from_nanos(MS)));
    while bench.ends().is_empty() {
        let open = vec![OpenRun { predicted: MS, ..OpenRun::default() }];
        let facts = Facts { launches: 1, open, ..Facts::default() };
        bench.feed(MeterEvent::Looked { device: DEVICE, facts });
        bench.now += 100 * US;
    }
    (bench.presumed[0] - start, bench.now - start)
}

#[test]
fn work_without_a_known_end_is_presumed_done_after_3_ms_and_keeps_a_token_for_3_ms_beyond_its_cost() {
    let (presumed, back) = left_behind();
    assert!((3 * MS..4 * MS).contains(&presumed), "presumed after {presumed} ns");
    assert!((8 * MS..10 * MS).contains(&back), "back after {back} ns");
}

/// A program's stream waits for the host for 20 ms, between two kernels of 100 us, and the neighbour gains nothing by it.
#[test]
fn work_behind_a_wait_of_its_stream_keeps_no_token_and_is_charged_when_it_has_run() {
    let mut bench = Bench::served(limited(50));
    let kernel = Kernel { function: 7, ns: 100 * US };
    bench.learn(7, 100 * US);
    bench.launches(1, kernel);
    bench.run(MS);
    bench.allow(10 * MS, 10 * MS);
    let start = bench.now;
    bench.run(20 * US);
    bench.wait_on_stream(20 * MS);
    bench.launches(1, kernel);
    while bench.ends().is_empty() {
        bench.run(50 * US);
    }
    let kept = bench.now - start;
    assert!(
        (100 * US..=400 * US).contains(&kept),
        "the first kernel is over, and the token went back after {kept} ns"
    );
    bench.run(15 * MS);
    assert_eq!(
        (bench.ends().len(), bench.requests(), bench.busy),
        (1, 1, 100 * US),
        "and no other is asked for"
    );
    bench.run(20 * MS);
    assert_eq!((bench.busy, bench.used), (200 * US, 200 * US));
    // The wait is over, and the next launches keep their token again.
    bench.launches(40, kernel);
    bench.run(MS);
    bench.allow(20 * MS, 50 * MS);
    bench.run(3 * MS);
    assert_eq!(bench.ends().len(), 1, "{:?}", bench.uses());
}

/// A program that queues 40 ms behind a wait of 50 ms, where 5 ms may be in flight. Nothing of it can begin, so the neighbour has
/// the device, and the thread goes on when the wait is over.
#[test]
fn a_thread_that_wants_to_queue_more_behind_a_wait_than_may_be_in_flight_keeps_no_token() {
    let mut bench = Bench::served(limited(50));
    bench.learn(7, 2 * MS);
    bench.wait_on_stream(50 * MS);
    bench.launches(20, Kernel { function: 7, ns: 2 * MS });
    bench.run(MS);
    for turns in 1..=4 {
        bench.allow(10 * MS * turns, 10 * MS);
        bench.run(MS);
        assert_eq!(bench.ends().len(), usize::try_from(turns).unwrap(), "{:?}", bench.uses());
        bench.run(8 * MS);
    }
    assert!(bench.busy == 0 && bench.most_queued <= 8 * MS, "{} ns are queued", bench.most_queued);
    bench.run(20 * MS);
    bench.allow(60 * MS, 30 * MS);
    bench.run(25 * MS);
    assert!(bench.busy >= 24 * MS && bench.ends().len() == 4, "{} ns, {:?}", bench.busy, bench.uses());
}

/// A thread that still waits for credit, work on another stream, and work of unknown cost keep the token.
#[test]
fn a_token_is_kept_behind_a_wait_while_anything_else_goes_on() {
    let held_after_5_ms = |cost: Option<u64>, open: OpenRun| {
        let mut bench = Bench::served(limited(50));
        cost.map(|cost| bench.learn(7, cost));
        bench.launches(1, Kernel { function: 7, ns: 100 * US });
        bench.run(MS);
        bench.wait_on_stream(50 * MS);
        bench.allow(20 * MS, 40 * MS);
        bench.run(10 * US);
        for _ in 0..50 {
            bench.now += 100 * US;
            let facts = Facts { launches: 1, open: vec![open], ..Facts::default() };
            bench.feed(MeterEvent::Looked { device: DEVICE, facts });
        }
        bench.ends().is_empty()
    };
    let works = OpenRun { predicted: 100 * US, ..OpenRun::default() };
    assert!(!held_after_5_ms(Some(100 * US), OpenRun::default()));
    assert!(!held_after_5_ms(Some(100 * US), OpenRun { waits: true, ..works }), "both streams wait");
    assert!(held_after_5_ms(Some(100 * US), works), "the other stream works");
    assert!(held_after_5_ms(None, OpenRun::default()), "the kernel may be long");
}
