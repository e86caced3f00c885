//! Leases of a daemon, in virtual time: asked for, used within their bounds, and returned with what they cost.

use crate::common::{BOUND, Bench, DEVICE, Kernel, MS, US, limited};
use gshare_core::Duration;
use gshare_core::wire::ToDaemon;
use gshare_meter::{Facts, MeterEvent, OpenRun, Ticket};

const KERNEL: Kernel = Kernel { function: 0x100, ns: MS };

fn served() -> Bench {
    let bench = Bench::served(limited(50));
    bench.learn(KERNEL.function, KERNEL.ns);
    bench
}

#[test]
fn a_lease_is_requested_used_within_its_bound_and_returned_with_what_was_used() {
    let mut bench = served();
    bench.launches(40, KERNEL);
    bench.run(MS);
    assert_eq!((bench.requests(), bench.busy), (1, 0), "a thread waits, and nothing goes without a lease");
    bench.grant(1, 10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.returns(), [(1, 10 * MS)]);
    assert_eq!(bench.busy, 10 * MS);
    assert!(bench.most_queued <= BOUND + MS, "{} ns queued", bench.most_queued);
    let at = |wanted: fn(&ToDaemon) -> bool| bench.said.iter().rposition(|(_, message)| wanted(message));
    let asked = at(|message| matches!(message, ToDaemon::TokenRequest { .. }));
    let returned = at(|message| matches!(message, ToDaemon::TokenReturn { again: 1, .. }));
    assert!(asked < returned, "a token is requested ahead, and again with the return: {:?}", bench.said);
    bench.grant(2, 10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.returns(), [(1, 10 * MS), (2, 10 * MS)]);
}

#[test]
fn a_larger_budget_extends_the_lease_that_is_held() {
    let mut bench = served();
    bench.launches(15, KERNEL);
    bench.run(MS);
    bench.grant(1, 10 * MS, 60 * MS);
    bench.run(8 * MS + 500 * US);
    assert_eq!(bench.requests(), 2, "asked ahead");
    bench.grant(1, 20 * MS, 60 * MS);
    bench.run(40 * MS);
    assert_eq!(bench.returns(), [(1, 15 * MS)]);
}

#[test]
fn nothing_is_queued_that_would_not_be_over_when_the_lease_expires() {
    let mut bench = served();
    bench.launches(100, KERNEL);
    bench.run(MS);
    let expires = bench.now + 10 * MS;
    bench.grant(1, 100 * MS, 10 * MS);
    bench.run(40 * MS);
    assert!(bench.idle_since <= expires + MS, "the last kernel ends {} ns late", bench.idle_since - expires);
    assert_eq!(bench.returns(), [(1, bench.busy)]);
    assert!(bench.busy >= 9 * MS, "{} ns used", bench.busy);
}

#[test]
fn a_lease_is_returned_soon_after_the_last_launch() {
    let mut bench = served();
    bench.launches(3, KERNEL);
    bench.run(MS);
    bench.grant(1, 50 * MS, 200 * MS);
    let begun = bench.now;
    bench.run(30 * MS);
    assert_eq!(bench.returns(), [(1, 3 * MS)]);
    let (returned, _) = bench.said.last().unwrap();
    assert!(returned - begun <= 8 * MS, "after {} ns", returned - begun);
    assert!(matches!(bench.said.last(), Some((_, ToDaemon::TokenReturn { again: 0, .. }))));
}

/// A launch is counted when it asks, and short kernels are not measured: the wait must not count as idleness.
#[test]
fn a_turn_that_was_waited_for_outlasts_a_pause() {
    let mut bench = served();
    let look = |bench: &mut Bench, after: u64, waiting| {
        bench.now += after;
        bench.feed(MeterEvent::Looked {
            device: DEVICE,
            facts: Facts { launches: 1, waiting, ..Facts::default() },
        });
        bench.returns().len()
    };
    look(&mut bench, 0, 1);
    bench.now += 30 * MS;
    bench.grant(1, 10 * MS, 50 * MS);
    let returned = [0, 300 * US, 2 * MS, MS].map(|after| look(&mut bench, after, 0));
    assert_eq!(returned, [0, 0, 0, 1], "kept for 3 ms without a launch");
}

/// A thread that has been elsewhere ends its segment while its launches are taken for complete: they were over twice, and so much more
/// could be in flight from then on.
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
    bench.grant(1, 100 * MS, 500 * MS);
    assert!(bench.ground.gate.try_spend(0, Duration::from_nanos(MS)));
    look(&mut bench, open());
    look(&mut bench, open());
    look(&mut bench, Facts { settled: MS, ..Facts::default() });
    assert_eq!(bench.ground.gate.left_ns(), i64::try_from(BOUND).unwrap());
    assert!(bench.ground.gate.try_spend(0, Duration::from_nanos(MS)));
    look(&mut bench, open());
    look(&mut bench, open());
    look(&mut bench, Facts { presumed: MS, ..Facts::default() });
    assert_eq!(bench.ground.gate.left_ns(), i64::try_from(BOUND).unwrap());
}

#[test]
fn an_extension_and_a_revocation_that_cross_a_return_are_void() {
    let mut bench = served();
    bench.launches(10, KERNEL);
    bench.run(MS);
    bench.grant(1, 10 * MS, 60 * MS);
    bench.run(20 * MS);
    assert_eq!(bench.returns(), [(1, 10 * MS)]);
    bench.launches(10, KERNEL);
    bench.grant(1, 30 * MS, 60 * MS);
    bench.revoke(1);
    bench.run(20 * MS);
    assert_eq!((bench.busy, bench.returns().len()), (10 * MS, 1), "the lease was returned before");
    bench.grant(2, 10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.returns(), [(1, 10 * MS), (2, 10 * MS)]);
}

#[test]
fn prediction_errors_are_charged_to_the_lease_that_is_open() {
    let mut bench = Bench::served(limited(50));
    bench.learn(KERNEL.function, MS / 2);
    bench.launches(100, KERNEL);
    bench.run(MS);
    bench.grant(1, 10 * MS, 200 * MS);
    bench.run(60 * MS);
    let (_, used) = bench.returns()[0];
    assert!(used <= bench.busy && bench.busy - used <= MS / 2, "{used} ns of {}", bench.busy);
    // The last half millisecond was measured after the return.
    let before = bench.busy;
    bench.grant(2, 10 * MS, 200 * MS);
    bench.run(60 * MS);
    let (_, next) = bench.returns()[1];
    assert!(used + next <= bench.busy && bench.busy - used - next <= MS, "{next} ns after {before}");
}

/// A program that waits for each of its kernels leaves the device idle in between. While it holds its lease no other process's work
/// can be there, so a function that takes longer than it did is charged at once; the first kernel of a turn may hold the end of
/// another process's.
#[test]
fn within_a_turn_a_kernel_that_became_longer_is_charged_in_full() {
    let short = Kernel { ns: 20 * US, ..KERNEL };
    let mut bench = Bench::served(limited(50));
    bench.learn(short.function, short.ns);
    bench.launches(1, short);
    bench.run(MS / 2);
    bench.grant(1, 40 * MS, 200 * MS);
    for kernel in [short, KERNEL, KERNEL, short, KERNEL] {
        bench.run(MS);
        bench.launches(1, kernel);
        bench.run(MS + 100 * US);
    }
    bench.run(10 * MS);
    assert_eq!(bench.busy, 3 * MS + 60 * US);
    assert_eq!(bench.returns(), [(1, bench.busy)]);

    bench.learn(short.function, short.ns);
    let known = |bench: &Bench| bench.ground.costs.find(short.function, 0).1;
    let before = known(&bench);
    bench.launches(1, Kernel { ns: 5 * MS, ..KERNEL });
    bench.run(MS / 2);
    bench.grant(2, 40 * MS, 200 * MS);
    bench.run(20 * MS);
    assert_eq!(known(&bench), before, "the first kernel of a turn proves nothing");
}

#[test]
fn a_kernel_that_outlasts_its_lease_is_reported_in_full() {
    // Nothing is known of the kernel: it is charged a guess of 0.5 ms, and the daemon revokes the lease while it runs.
    let mut bench = Bench::served(limited(20));
    bench.launches(1, Kernel { function: 0x900, ns: 400 * MS });
    bench.run(MS);
    bench.grant(1, 10 * MS, 20 * MS);
    bench.run(70 * MS);
    bench.revoke(1);
    bench.run(400 * MS);
    assert_eq!(bench.returns(), [(1, 400 * MS)]);
}

/// In thirty processes the daemon revokes the lease at any time while the kernel runs, and the process ends as soon as the kernel has.
#[test]
fn all_that_was_used_is_reported_before_the_process_ends() {
    for pair in 0..30 {
        let mut bench = Bench::served(limited(20));
        bench.launches(1, Kernel { function: 0x900, ns: 400 * MS });
        bench.run(MS);
        bench.grant(1, 10 * MS, 20 * MS);
        bench.run((22 + 12 * pair) * MS);
        bench.revoke(1);
        // The host has not looked since the kernel ended.
        bench.skip_to_idle();
        bench.feed(MeterEvent::Leaving { ticket: Ticket(1) });
        bench.run(5 * MS);
        assert_eq!(bench.answer(1), Some(true), "process {pair}");
        assert_eq!(bench.returns(), [(1, 400 * MS)], "process {pair}");
    }
}

#[test]
fn a_process_that_ends_waits_for_its_reports_and_not_for_ever() {
    let mut bench = Bench::served(limited(20));
    bench.launches(1, Kernel { function: 0x900, ns: 100_000 * MS });
    bench.run(MS);
    bench.grant(1, 10 * MS, 20 * MS);
    bench.run(200 * MS);
    bench.feed(MeterEvent::Leaving { ticket: Ticket(1) });
    bench.run(90 * MS);
    assert_eq!(bench.answer(1), None);
    bench.run(20 * MS);
    assert_eq!(bench.answer(1), Some(true));
    let (lease, used) = bench.returns()[0];
    assert!(lease == 1 && (299 * MS..=301 * MS).contains(&used), "it ran for 300 ms, not {used} ns");
}

#[test]
fn a_launch_goes_in_beyond_the_bound_when_what_is_queued_does_not_end() {
    let mut bench = served();
    // Ten seconds for one of a millisecond: it may wait for a launch that waits for credit.
    bench.launches(1, Kernel { ns: 10_000 * MS, ..KERNEL });
    bench.launches(6, KERNEL);
    bench.run(MS);
    bench.grant(1, 50 * MS, 5_000 * MS);
    bench.run(90 * MS);
    let before = bench.program.len();
    bench.run(60 * MS);
    assert_eq!(before - bench.program.len(), 1);
    bench.run(110 * MS);
    assert_eq!(before - bench.program.len(), 2, "one for each 100 ms");
}
