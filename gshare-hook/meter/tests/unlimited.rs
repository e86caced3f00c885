//! Processes without a limit: observed, alone on their device with the whole of it, or without a daemon.

use crate::common::{Behind, Bench, CLIENT, Kernel, MS, limited};
use gshare_core::wire::{OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{QuotaRange, ResourceSpec, UseState};

const KERNEL: Kernel = Kernel { function: 7, ns: MS };
const GIB: u64 = 1 << 30;

fn whole() -> ResourceSpec {
    ResourceSpec::UNLIMITED.with_quota(QuotaRange::WHOLE)
}

/// Memory in use and its integral, as last reported.
fn memory(bench: &Bench) -> (u64, u64) {
    let of = |(_, message): &(u64, ToDaemon)| match *message {
        ToDaemon::Use { memory, byte_seconds, .. } => Some((memory.0, byte_seconds)),
        _ => None,
    };
    bench.said.iter().filter_map(of).next_back().unwrap()
}

#[test]
fn launches_of_an_observed_process_never_wait_and_are_reported() {
    for spec in [ResourceSpec::OBSERVED, whole()] {
        let mut bench = Bench::new(spec, OnDaemonLoss::Open, Behind::Daemon);
        bench.welcome(spec);
        bench.run(MS);
        // None of them is known, and all are launched at once.
        bench.launches(3_000, KERNEL);
        bench.run(1_000 * MS);
        // Queued work is not use: the process may be killed before it runs.
        assert!((850 * MS..=1_000 * MS).contains(&bench.used), "{} ns", bench.used);
        bench.run(3_000 * MS);
        assert_eq!((bench.busy, bench.used, bench.requests()), (3_000 * MS, 3_000 * MS, 0));
        let states = bench.said_of(&[UseState::Idle]);
        assert!((30..=60).contains(&states), "{states} reports in 4 s");
        let (waited, launches) = bench
            .said
            .iter()
            .filter_map(|(_, message)| match *message {
                ToDaemon::Use { waited, launches, .. } => Some((waited.as_nanos(), launches)),
                _ => None,
            })
            .next_back()
            .unwrap();
        assert_eq!((waited, launches), (0, 3_000));
    }
}

#[test]
fn memory_is_reported_with_its_time() {
    let mut bench = Bench::new(ResourceSpec::OBSERVED, OnDaemonLoss::Open, Behind::Daemon);
    bench.welcome(ResourceSpec::OBSERVED);
    bench.ground.memory.reserve(3 * GIB).unwrap();
    bench.run(10_000 * MS);
    bench.ground.memory.release(2 * GIB);
    bench.run(10_000 * MS);
    bench.launches(1, KERNEL);
    bench.run(1_000 * MS);
    let (now, integral) = memory(&bench);
    // 3 GiB for 10 s, and 1 GiB for 10 to 11 s; a change is seen within 100 ms.
    let seconds = |halves: u64| halves * GIB / 2;
    assert_eq!(now, GIB);
    assert!((seconds(80)..=seconds(83)).contains(&integral), "{} GiB s", integral / GIB);
}

#[test]
fn without_a_daemon_an_observed_process_begins_at_once_and_its_totals_are_complete_later() {
    let mut bench = Bench::new(ResourceSpec::OBSERVED, OnDaemonLoss::Closed, Behind::Nobody);
    assert_eq!(bench.answer(0), Some(false), "the first context does not wait");
    bench.launches(500, KERNEL);
    bench.run(1_000 * MS);
    assert_eq!(bench.busy, 500 * MS);
    bench.behind = Behind::Daemon;
    bench.run(1_000 * MS);
    bench.welcome(ResourceSpec::OBSERVED);
    assert_eq!(bench.used, 500 * MS, "stated with the Attach");
    bench.launches(500, KERNEL);
    bench.run(1_000 * MS);
    bench.lose(Behind::Nobody);
    bench.launches(500, KERNEL);
    bench.run(1_000 * MS);
    assert_eq!((bench.busy, bench.used), (1_500 * MS, 1_000 * MS));
}

#[test]
fn a_limit_that_begins_or_ends_holds_from_then_on() {
    let mut bench = Bench::served(limited(50));
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(1_000, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    bench.run(4 * MS);
    let turns = bench.ends().len();
    bench.hear(ToClient::ShareChanged { client: CLIENT, spec: ResourceSpec::OBSERVED });
    bench.run(50 * MS);
    assert_eq!(bench.ends().len(), turns + 1, "the token goes back");
    assert!(bench.busy >= 50 * MS, "{} ns", bench.busy);
    // A token on its way goes back too.
    bench.allow(10 * MS, 60 * MS);
    bench.run(MS);
    assert_eq!(bench.ends().len(), turns + 2);
    bench.launches(1_000, KERNEL);
    bench.hear(ToClient::ShareChanged { client: CLIENT, spec: limited(50) });
    bench.run(3_000 * MS);
    let busy = bench.busy;
    bench.launches(10, KERNEL);
    bench.run(100 * MS);
    assert_eq!(bench.busy, busy, "launches wait for a token again");
    bench.allow(10 * MS, 60 * MS);
    bench.run(50 * MS);
    assert_eq!(bench.busy, busy + 10 * MS);
}

/// Use without a limit counts as allowed, up to the end of that time.
#[test]
fn a_process_that_was_observed_states_what_it_was_allowed() {
    let mut bench = Bench::new(ResourceSpec::OBSERVED, OnDaemonLoss::Open, Behind::Daemon);
    bench.welcome(ResourceSpec::OBSERVED);
    bench.launches(20, KERNEL);
    bench.run(200 * MS);
    bench.hear(ToClient::ShareChanged { client: CLIENT, spec: limited(50) });
    bench.run(200 * MS);
    bench.lose(Behind::Daemon);
    bench.run(500 * MS);
    bench.hear(ToClient::Welcome { epoch: 2 });
    let attach = |(_, message): &(u64, ToDaemon)| match *message {
        ToDaemon::Attach { used, allowed, .. } => Some((used.as_nanos(), allowed.as_nanos())),
        _ => None,
    };
    let (used, allowed) = bench.said.iter().filter_map(attach).next_back().unwrap();
    assert_eq!(used, 20 * MS);
    assert!((used..=used + 100 * MS).contains(&allowed), "{allowed} ns");
}
