//! Parking: launches are let in only while the memory is on the device, for each order of the daemon and each end of a move.

use crate::common::*;
use gshare_core::reason::Obstacle;
use gshare_core::wire::{Residence, ToClient, ToDaemon};
use gshare_core::{Bytes, ResourceSpec, UseState};
use gshare_meter::{Movable, Move};
use proptest::prelude::*;

const KERNEL: Kernel = Kernel { function: 1, ns: MS };
const BYTES: u64 = 64 << 20;

fn bench(spec: ResourceSpec) -> Bench {
    let mut bench = Bench::served(spec);
    bench.learn(1, MS);
    bench.movable = Some(Movable { bytes: BYTES, obstacle: None, missed: 0 });
    bench.run(MS);
    bench
}

fn park(bench: &mut Bench, on: bool) {
    bench.hear(ToClient::Park { client: CLIENT, on: on.into() });
    bench.look();
}

/// The reports of the place of the memory.
fn places(bench: &Bench) -> Vec<(Residence, Option<Obstacle>)> {
    let place = |(_, said): &(u64, ToDaemon)| match *said {
        ToDaemon::Parking { residence, bytes, obstacle, .. } => {
            assert_eq!(bytes, Bytes(BYTES));
            Some((residence, obstacle))
        }
        _ => None,
    };
    bench.said.iter().filter_map(place).collect()
}

#[test]
fn a_turn_ends_before_the_memory_leaves_and_the_next_begins_when_it_is_back() {
    let mut bench = bench(limited(50));
    bench.launches(400, KERNEL);
    bench.run(MS);
    bench.allow(100 * MS, 200 * MS);
    bench.run(10 * MS);
    park(&mut bench, true);
    assert_eq!(bench.moves, [], "work is queued");
    bench.run(10 * MS);
    assert_eq!(bench.moves, [Move::ToHost]);
    assert_eq!(bench.ends().len(), 1, "the token went back");
    let (busy, requests) = (bench.busy, bench.requests());
    bench.run(50 * MS);
    bench.moved(Ok(()));
    bench.run(50 * MS);
    assert_eq!(bench.busy, busy, "nothing is launched meanwhile");
    assert_eq!(
        places(&bench)[1..],
        [(Residence::Parking, None), (Residence::Missed, None)],
        "a thread waits for credit all the time"
    );
    park(&mut bench, false);
    assert_eq!(bench.moves, [Move::ToHost, Move::ToDevice]);
    bench.run(20 * MS);
    bench.moved(Ok(()));
    assert_eq!(places(&bench)[3..], [(Residence::Returning, None), (Residence::Resident, None)]);
    assert!(bench.requests() >= requests);
    bench.allow(10 * MS, 100 * MS);
    bench.run(20 * MS);
    assert!(bench.busy > busy);
}

#[test]
fn an_unlimited_process_stops_too_and_an_allowance_that_crosses_the_order_goes_back() {
    let mut unlimited = bench(ResourceSpec::UNLIMITED.with_quota(gshare_core::QuotaRange::WHOLE));
    assert!(unlimited.ground.gate.is_unlimited());
    park(&mut unlimited, true);
    assert_eq!(unlimited.moves, [Move::ToHost]);
    unlimited.launches(10, KERNEL);
    unlimited.run(50 * MS);
    assert_eq!(unlimited.busy, 0);
    unlimited.moved(Ok(()));
    assert_eq!(places(&unlimited).last(), Some(&(Residence::Missed, None)));
    park(&mut unlimited, false);
    unlimited.moved(Ok(()));
    unlimited.run(50 * MS);
    assert_eq!(unlimited.busy, 10 * MS);

    let mut limited = bench(limited(50));
    park(&mut limited, true);
    limited.launches(10, KERNEL);
    limited.allow(10 * MS, 100 * MS);
    limited.run(50 * MS);
    assert_eq!((limited.busy, limited.ends().len()), (0, 1));
    assert_eq!(limited.uses().last().map(|said| said.2), Some(UseState::Idle));
}

#[test]
fn memory_that_does_not_move_stays_and_launches_go_on() {
    let mut bench = bench(limited(50));
    park(&mut bench, true);
    bench.moved(Err(Obstacle::Capture));
    assert_eq!(places(&bench).last(), Some(&(Residence::Resident, Some(Obstacle::Capture))));
    bench.launches(5, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 100 * MS);
    bench.run(20 * MS);
    assert_eq!((bench.busy, bench.moves.len()), (5 * MS, 1));
}

/// The daemon gives no token before it has the answer.
#[test]
fn each_order_is_answered_even_if_it_changes_nothing() {
    let mut bench = bench(limited(50));
    let before = places(&bench).len();
    bench.hear(ToClient::Park { client: CLIENT, on: 1 });
    bench.hear(ToClient::Park { client: CLIENT, on: 0 });
    bench.look();
    assert_eq!((bench.moves.len(), places(&bench).len()), (0, before + 1));
    assert_eq!(places(&bench).last(), Some(&(Residence::Resident, None)));
}

/// The work may wait for a launch of the waiting thread.
#[test]
fn a_move_for_which_the_device_works_on_is_given_up_while_threads_wait() {
    let mut bench = bench(limited(50));
    park(&mut bench, true);
    bench.run(60_000 * MS);
    assert_eq!(bench.moves, [Move::ToHost], "no thread waits");
    bench.launches(1, KERNEL);
    bench.run(100 * MS);
    assert_eq!(bench.moves[1], Move::Cancel);
}

#[test]
fn without_a_daemon_missed_memory_comes_back_and_launches_fail_after_the_wait_if_it_cannot() {
    let mut bench = bench(limited(50));
    park(&mut bench, true);
    bench.moved(Ok(()));
    bench.lose(Behind::Nobody);
    bench.run(10_000 * MS);
    assert_eq!(bench.moves, [Move::ToHost], "nobody misses it");
    bench.launches(1, KERNEL);
    let since = bench.now;
    while bench.failed.is_empty() {
        bench.run(10 * MS);
        if bench.pending() {
            let tried = bench.moves.len();
            bench.moved(Err(Obstacle::Device));
            bench.run(20 * MS);
            assert!(bench.moves.len() <= tried + 1, "attempts are apart");
        }
        assert!(bench.now < since + 10_000 * MS, "the launch hangs");
    }
    assert!(bench.failed[0] >= since + 5_000 * MS, "{}", bench.failed[0] - since);
    while !bench.pending() {
        bench.run(10 * MS);
    }
    bench.moved(Ok(()));
    bench.launches(3, KERNEL);
    bench.run(100 * MS);
    assert_eq!((bench.shut, bench.busy), (false, 3 * MS), "it goes on when there is room");
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Park(bool),
    /// The host answers the last order to move, if any.
    Moved(bool),
    Launch(usize),
    Allow(u64),
    Stop,
    Share(u16),
    Lose(bool),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<bool>().prop_map(Step::Park),
        4 => prop::bool::weighted(0.8).prop_map(Step::Moved),
        2 => (1usize..8).prop_map(Step::Launch),
        3 => (1u64..20).prop_map(Step::Allow),
        1 => Just(Step::Stop),
        1 => (1u16..=100).prop_map(Step::Share),
        1 => any::<bool>().prop_map(Step::Lose),
        6 => (1u64..300).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The bench asserts with each launch that the memory is there, and with each order that it makes sense.
    #[test]
    fn launches_find_the_memory_on_the_device(steps in prop::collection::vec(step(), 1..80), whole in any::<bool>()) {
        let spec = if whole { ResourceSpec::UNLIMITED } else { limited(50) };
        let mut bench = bench(spec);
        let mut lost = false;
        for step in steps {
            match step {
                Step::Park(on) if !lost => park(&mut bench, on),
                Step::Moved(ok) if bench.pending() => {
                    bench.moved(if ok { Ok(()) } else { Err(Obstacle::Device) });
                }
                Step::Launch(count) => bench.launches(count, KERNEL),
                Step::Allow(ms) if !lost => bench.allow(ms * MS, 2 * ms * MS),
                Step::Stop if !lost => { let used = bench.used; bench.stop(used) }
                Step::Share(percent) if !lost => {
                    bench.hear(ToClient::ShareChanged { client: CLIENT, spec: limited(percent) });
                }
                Step::Lose(true) if !lost => {
                    bench.lose(Behind::Nobody);
                    lost = true;
                }
                Step::Lose(false) if lost => {
                    bench.behind = Behind::Daemon;
                    bench.run(1_000 * MS);
                    bench.welcome(spec);
                    lost = false;
                }
                Step::Pass(ms) => bench.run(ms * MS),
                _ => {}
            }
        }
        // Launches go on in the end.
        for _ in 0..40 {
            if bench.pending() { bench.moved(Ok(())); }
            if !lost {
                park(&mut bench, false);
                bench.allow(50 * MS, 100 * MS);
            }
            bench.run(200 * MS);
        }
        let before = bench.busy;
        bench.program.clear();
        bench.launches(1, KERNEL);
        for _ in 0..5 {
            bench.run(MS);
            if bench.pending() { bench.moved(Ok(())); }
            if !lost { bench.allow(50 * MS, 100 * MS); }
            bench.run(200 * MS);
        }
        prop_assert!(bench.busy > before || !bench.failed.is_empty(), "{:?}", bench.moves);
    }
}
