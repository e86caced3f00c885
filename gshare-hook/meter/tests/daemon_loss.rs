//! Lost, stopped and refusing daemons, in virtual time.

use crate::common::{self, Behind, Bench, Kernel, MS, limited, with_memory};
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{Bytes, ResourceSpec};
use gshare_meter::MeterEvent;

const KERNEL: Kernel = Kernel { function: 0x100, ns: MS };
const SECOND: u64 = 1_000 * MS;
const MIB: u64 = 1 << 20;

fn busy(spec: ResourceSpec, on_loss: OnDaemonLoss) -> Bench {
    let mut bench = Bench::served_as(spec, on_loss);
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(20_000, KERNEL);
    bench
}

#[test]
fn without_its_daemon_a_process_keeps_its_limit_by_its_own_clock() {
    let mut bench = busy(limited(20), OnDaemonLoss::Open);
    bench.run(MS);
    bench.allow(10 * MS, 30 * MS);
    bench.run(3 * MS);
    bench.lose(Behind::Nobody);
    let before = bench.busy;
    bench.run(2 * SECOND);
    let used = bench.busy - before;
    assert!((380 * MS..=425 * MS).contains(&used), "20 % of 2 s, not {used} ns");
    assert!(bench.ends().is_empty(), "there is no daemon to give a token back to");
    // Attempts go on, a quarter of a second apart at most.
    let gaps: Vec<u64> = bench.connects.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|gap| *gap <= 380 * MS), "{gaps:?}");
    bench.behind = Behind::Daemon;
    bench.run(SECOND);
    bench.said.clear();
    bench.welcome(limited(20));
    bench.run(MS);
    assert!(matches!(bench.said[0].1, ToDaemon::Attach { .. }), "{:?}", bench.said);
    assert_eq!(bench.requests(), 1);
}

#[test]
fn with_the_closed_policy_launches_wait_five_seconds_and_fail() {
    let mut bench = busy(limited(20), OnDaemonLoss::Closed);
    bench.run(MS);
    bench.lose(Behind::Nobody);
    let lost = bench.now;
    bench.run(4_900 * MS);
    assert!(bench.failed.is_empty() && bench.busy == 0);
    bench.run(200 * MS);
    assert!(bench.failed.first().is_some_and(|at| (5 * SECOND..5_100 * MS).contains(&(at - lost))));
    // The same holds however often a silent daemon is reached.
    let mut bench = busy(limited(20), OnDaemonLoss::Closed);
    bench.run(MS);
    bench.lose(Behind::Daemon);
    bench.run(7 * SECOND);
    assert!(bench.connects.len() > 3 && !bench.failed.is_empty(), "{:?}", bench.connects);
}

#[test]
fn a_daemon_that_is_stopped_is_found_out_by_a_second_connection() {
    let mut bench = Bench::served(limited(20));
    bench.learn(KERNEL.function, KERNEL.ns);
    // Silence counts from the first wait on.
    bench.run(60 * SECOND);
    assert!(bench.probes.is_empty());
    let begun = bench.now;
    bench.launches(20_000, KERNEL);
    bench.run(3_900 * MS);
    assert!(bench.probes.len() == 1 && bench.probes[0] - begun >= 3 * SECOND, "{:?}", bench.probes);
    assert_eq!(bench.busy, 0);
    bench.run(2 * SECOND);
    assert!(bench.connects.len() > 1 && bench.busy > 0, "no answer in a second: it goes on by itself");
}

#[test]
fn a_daemon_that_has_others_to_serve_is_waited_for() {
    let mut bench = busy(limited(20), OnDaemonLoss::Open);
    bench.run(3_100 * MS);
    assert_eq!(bench.probes.len(), 1);
    bench.feed(MeterEvent::ProbeAnswered);
    bench.run(2_500 * MS);
    assert_eq!((bench.busy, bench.probes.len()), (0, 1));
    bench.allow(10 * MS, 30 * MS);
    bench.run(30 * MS);
    assert_eq!((bench.ends(), bench.connects.len()), (vec![10 * MS], 1));
}

#[test]
fn a_refused_process_launches_nothing_and_comes_back_less_and_less_often() {
    // Without a daemon, the process would run without a limit.
    let mut bench = Bench::new(ResourceSpec::UNLIMITED, OnDaemonLoss::Open, Behind::Daemon);
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(100, KERNEL);
    let refused = |code| ToClient::Refused { code, text: "full".into() };
    let first = bench.now;
    bench.hear(refused(RefusalCode::Full));
    for _ in 0..200 {
        bench.run(100 * MS);
        if bench.connected {
            bench.hear(refused(RefusalCode::Full));
        }
    }
    assert_eq!(bench.busy, 0);
    assert!(bench.failed.first().is_some_and(|at| (5 * SECOND..5_200 * MS).contains(&(at - first))));
    assert_eq!(bench.lines.len(), 1, "{:?}", bench.lines);
    assert!((5..=12).contains(&bench.connects.len()), "{:?}", bench.connects);
    assert_eq!(bench.answer(0), Some(false));
    // The daemon then has a place for the process after all.
    while !bench.connected {
        bench.run(100 * MS);
    }
    bench.welcome(limited(50));
    bench.launches(5, KERNEL);
    bench.run(MS);
    bench.allow(10 * MS, 60 * MS);
    bench.run(30 * MS);
    assert_eq!(bench.busy, 5 * MS);
}

#[test]
fn launches_of_a_process_that_may_not_use_the_daemon_fail_at_once() {
    for code in [RefusalCode::NotAllowed, RefusalCode::BadSpec] {
        let mut bench = Bench::new(ResourceSpec::UNLIMITED, OnDaemonLoss::Open, Behind::Daemon);
        bench.hear(ToClient::Refused { code, text: "no".into() });
        bench.launches(3, KERNEL);
        bench.run(MS);
        assert_eq!((bench.failed.len(), bench.busy), (3, 0), "{code:?}");
    }
}

/// A served process loses its daemon, and the next daemon refuses it.
#[test]
fn a_refusal_ends_the_local_share() {
    let mut bench = busy(limited(20), OnDaemonLoss::Open);
    bench.run(MS);
    bench.lose(Behind::Nobody);
    bench.run(SECOND);
    assert!(bench.busy > 0);
    bench.behind = Behind::Daemon;
    while !bench.connected {
        bench.run(MS);
    }
    bench.hear(ToClient::Refused { code: RefusalCode::NotAllowed, text: "no".into() });
    let before = bench.idle_since;
    bench.run(SECOND);
    assert_eq!(bench.idle_since, before, "nothing was launched any more");
    assert!(!bench.failed.is_empty());
}

#[test]
fn strangers_that_may_run_keep_the_limits_that_the_daemon_names() {
    let mib = 1 << 20;
    let spec = with_memory(limited(10), 64 * mib);
    let mut bench = Bench::new(ResourceSpec::UNLIMITED, OnDaemonLoss::Open, Behind::Daemon);
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(20_000, KERNEL);
    let unserved =
        || ToClient::Unserved { code: RefusalCode::DuplicateName, text: "taken".into(), spec: Some(spec) };
    bench.hear(unserved());
    // Each refusal repeats the limits, and a new clock for each would let in more.
    for _ in 0..200 {
        bench.run(10 * MS);
        if bench.connected {
            bench.hear(unserved());
        }
    }
    assert!((180 * MS..=215 * MS).contains(&bench.busy), "10 % of 2 s, not {} ns", bench.busy);
    let (fits, too_much) = (bench.reserve(60 * mib), bench.reserve(10 * mib));
    assert_eq!((bench.answer(fits), bench.answer(too_much)), (Some(true), Some(false)));
    assert_eq!(bench.lines.len(), 1, "{:?}", bench.lines);
}

#[test]
fn a_device_that_the_daemon_does_not_manage_is_used_within_the_processs_own_limits() {
    let mut bench = Bench::new(limited(10), OnDaemonLoss::Closed, Behind::Daemon);
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(2_000, KERNEL);
    bench.hear(ToClient::Welcome { epoch: 1 });
    bench.hear(ToClient::Refused { code: RefusalCode::UnknownDevice, text: "no such device".into() });
    assert!(bench.connected, "the connection serves other devices");
    bench.run(SECOND);
    assert!((90 * MS..=115 * MS).contains(&bench.busy), "{} ns", bench.busy);
    bench.said.clear();
    bench.lose(Behind::Daemon);
    bench.run(SECOND);
    bench.hear(ToClient::Welcome { epoch: 2 });
    let attached = bench.said.iter().any(|(_, message)| matches!(message, ToDaemon::Attach { .. }));
    assert!(!attached, "it is not asked again");
}

#[test]
fn memory_is_asked_for_granted_denied_and_called_back() {
    let mib = 1 << 20;
    let spec = with_memory(limited(50), 256 * mib);
    let mut bench = Bench::served(spec);
    let first = bench.reserve(10 * mib);
    let asked = bench.said.pop().map(|(_, message)| message);
    let expected =
        ToDaemon::MemoryReserve { client: common::CLIENT, bytes: Bytes(10 * mib), wish: Bytes(26 * mib) };
    assert_eq!((asked, bench.answer(first)), (Some(expected), None));
    bench.hear(ToClient::MemoryGrant { client: common::CLIENT, bytes: Bytes(26 * mib) });
    assert_eq!(bench.answer(first), Some(true));
    let from_slack = bench.reserve(16 * mib);
    assert_eq!((bench.answer(from_slack), bench.said.len()), (Some(true), 0), "the daemon is not asked");
    let denied = bench.reserve(300 * mib);
    bench.hear(ToClient::MemoryDeny { client: common::CLIENT, free: Bytes(230 * mib) });
    assert_eq!(bench.answer(denied), Some(false));
    bench.ground.memory.release(6 * mib);
    bench.said.clear();
    bench.hear(ToClient::MemoryAsk { client: common::CLIENT, round: 9, recall: 1 });
    let said: Vec<ToDaemon> = bench.said.iter().map(|(_, message)| message.clone()).collect();
    let released = ToDaemon::MemoryRelease { client: common::CLIENT, bytes: Bytes(6 * mib) };
    let used = ToDaemon::MemoryUsed { client: common::CLIENT, round: 9, used: Bytes(20 * mib) };
    assert_eq!(said, [released, used]);
}

/// The denial was about a larger amount than is missing now.
#[test]
fn memory_that_another_thread_frees_meanwhile_counts_for_a_denied_one() {
    let mut bench = Bench::served(with_memory(limited(50), 256 * MIB));
    let first = bench.reserve(26 * MIB);
    bench.hear(ToClient::MemoryGrant { client: common::CLIENT, bytes: Bytes(26 * MIB) });
    let denied = bench.reserve(40 * MIB);
    bench.ground.memory.release(16 * MIB);
    bench.said.clear();
    bench.hear(ToClient::MemoryDeny { client: common::CLIENT, free: Bytes(30 * MIB) });
    let asked = bench.said.iter().any(|(_, frame)| matches!(frame, ToDaemon::MemoryReserve { .. }));
    assert!(asked, "the daemon is asked for the rest: {:?}", bench.said);
    assert_eq!((bench.answer(first), bench.answer(denied)), (Some(true), None));
    bench.hear(ToClient::MemoryDeny { client: common::CLIENT, free: Bytes::ZERO });
    assert_eq!(bench.answer(denied), Some(false));
}

/// A daemon's grant ends with its connection, since the next daemon does not know of it.
#[test]
fn memory_that_was_granted_and_not_used_is_given_up_with_the_connection() {
    let spec = with_memory(limited(50), 256 * MIB);
    let mut bench = Bench::served(spec);
    let first = bench.reserve(10 * MIB);
    bench.hear(ToClient::MemoryGrant { client: common::CLIENT, bytes: Bytes(26 * MIB) });
    assert_eq!(bench.answer(first), Some(true));
    bench.lose(Behind::Daemon);
    bench.run(SECOND);
    bench.said.clear();
    bench.welcome(spec);
    let stated = bench.said.iter().find_map(|(_, frame)| match frame {
        ToDaemon::Attach { allocated, .. } => Some(*allocated),
        _ => None,
    });
    assert_eq!(stated, Some(Bytes(10 * MIB)));
    let next = bench.reserve(4 * MIB);
    let asked = bench.said.iter().any(|(_, frame)| matches!(frame, ToDaemon::MemoryReserve { .. }));
    assert!(asked && bench.answer(next).is_none(), "{:?}", bench.said);
}

/// No daemon has ever named a window.
#[test]
fn the_windows_of_the_local_clock_are_a_tenth_of_a_second() {
    let mut bench = Bench::new(limited(20), OnDaemonLoss::Open, Behind::Nobody);
    bench.learn(KERNEL.function, KERNEL.ns);
    bench.launches(20_000, KERNEL);
    for window in 1..=5 {
        bench.run(100 * MS);
        let most = window * 20 * MS;
        assert!((most - 2 * MS..=most).contains(&bench.busy), "{} ns in {window} windows", bench.busy);
    }
}

#[test]
fn without_a_daemon_memory_stays_within_the_part_of_the_process() {
    let mib = 1 << 20;
    let mut bench = Bench::served(with_memory(limited(50), 256 * mib));
    bench.hear(ToClient::MemoryPart { client: common::CLIENT, bytes: Bytes(64 * mib) });
    let waits = bench.reserve(50 * mib);
    let views = bench.view();
    assert_eq!((bench.answer(waits), bench.answer(views)), (None, None));
    bench.lose(Behind::Nobody);
    assert_eq!((bench.answer(waits), bench.answer(views)), (Some(true), Some(false)));
    let beyond = bench.reserve(20 * mib);
    let within = bench.reserve(14 * mib);
    assert_eq!((bench.answer(beyond), bench.answer(within)), (Some(false), Some(true)));
    assert_eq!(bench.ground.memory.used(), 64 * mib);
}

#[test]
fn what_is_asked_between_attach_and_its_answer_is_decided_after_it() {
    let mib = 1 << 20;
    let spec = with_memory(limited(50), 64 * mib);
    let mut bench = Bench::new(spec, OnDaemonLoss::Open, Behind::Daemon);
    bench.hear(ToClient::Welcome { epoch: 1 });
    let asked = bench.reserve(8 * mib);
    assert_eq!(bench.answer(asked), None);
    bench.said.clear();
    bench.attached(spec);
    assert!(matches!(bench.said[..], [(_, ToDaemon::MemoryReserve { .. })]), "{:?}", bench.said);
    bench.hear(ToClient::MemoryGrant { client: common::CLIENT, bytes: Bytes(8 * mib) });
    assert_eq!(bench.answer(asked), Some(true));
}

/// The siblings of the process may hold all of the limit.
#[test]
fn a_process_that_no_daemon_has_served_holds_nothing_of_a_limit_that_it_shares() {
    for (on_loss, launched) in [(OnDaemonLoss::Open, 1_000), (OnDaemonLoss::Closed, 0)] {
        let mut bench = Bench::new(with_memory(limited(50), 64 * MIB), on_loss, Behind::Nobody);
        bench.learn(KERNEL.function, KERNEL.ns);
        bench.launches(20_000, KERNEL);
        let (asked, view) = (bench.reserve(1), bench.view());
        bench.run(4_900 * MS);
        assert_eq!((bench.answer(asked), bench.answer(view), bench.lines.len()), (None, None, 0));
        bench.run(101 * MS);
        assert_eq!((bench.answer(asked), bench.answer(view)), (Some(false), Some(false)));
        assert_eq!(bench.ground.memory.free_alone(), 0);
        let (again, seen) = (bench.reserve(1), bench.view());
        assert_eq!((bench.answer(again), bench.answer(seen)), (Some(false), Some(false)), "at once");
        let said = "out of memory: the processes of this run share a limit of 64 MiB, and no daemon has said within 5s";
        assert!(bench.lines.len() == 1 && bench.lines[0].starts_with(said), "{:?}", bench.lines);
        assert!(bench.busy >= launched * MS, "launches are another matter");
        // A daemon comes after all.
        bench.behind = Behind::Daemon;
        bench.run(SECOND);
        bench.welcome(with_memory(limited(50), 64 * MIB));
        let granted = bench.reserve(MIB);
        bench.hear(ToClient::MemoryGrant { client: common::CLIENT, bytes: Bytes(MIB) });
        assert_eq!((bench.answer(granted), bench.lines.len()), (Some(true), 1));
    }
}

#[test]
fn what_a_process_asks_before_a_daemon_has_said_what_is_its_own_waits_for_the_next_daemon() {
    let spec = with_memory(limited(50), 64 * MIB);
    let mut bench = Bench::new(spec, OnDaemonLoss::Open, Behind::Nobody);
    let (asked, view) = (bench.reserve(MIB), bench.view());
    bench.behind = Behind::Daemon;
    bench.run(SECOND);
    // One daemon after the other is gone: with the answer to Attach under way, and with the answer to the question.
    bench.hear(ToClient::Welcome { epoch: 1 });
    bench.lose(Behind::Daemon);
    bench.run(SECOND);
    bench.welcome(spec);
    bench.lose(Behind::Daemon);
    bench.run(SECOND);
    assert_eq!((bench.answer(asked), bench.answer(view)), (None, None));
    bench.said.clear();
    bench.welcome(spec);
    let said = |wanted: fn(&ToDaemon) -> bool| bench.said.iter().filter(|(_, frame)| wanted(frame)).count();
    assert_eq!(said(|frame| matches!(frame, ToDaemon::Attach { part: None, .. })), 1);
    assert_eq!(said(|frame| matches!(frame, ToDaemon::MemoryReserve { .. })), 1);
    assert_eq!(said(|frame| matches!(frame, ToDaemon::MemoryQuery { .. })), 1);
    bench.hear(ToClient::MemoryGrant { client: common::CLIENT, bytes: Bytes(MIB) });
    for (pid, used) in [(7, MIB), (0, 2 * MIB)] {
        bench.hear(ToClient::MemoryMember { client: common::CLIENT, pid, used: Bytes(used) });
    }
    bench.hear(ToClient::MemoryView { client: common::CLIENT });
    assert_eq!((bench.answer(asked), bench.answer(view)), (Some(true), Some(true)));
    let memory = &bench.ground.memory;
    assert_eq!((memory.siblings(), memory.free_in_turns(MIB, 64 * MIB)), (vec![(7, MIB)], 60 * MIB));
}

#[test]
fn a_refused_process_holds_nothing_of_a_limit_that_it_shares() {
    let mut bench = Bench::new(with_memory(limited(50), 64 * MIB), OnDaemonLoss::Open, Behind::Daemon);
    let asked = bench.reserve(1);
    bench.hear(ToClient::Refused { code: RefusalCode::NotAllowed, text: "no".into() });
    bench.run(MS);
    let again = bench.reserve(1);
    assert_eq!((bench.answer(asked), bench.answer(again)), (Some(false), Some(false)));
    assert_eq!(bench.lines.len(), 1, "the daemon's reason: {:?}", bench.lines);
}

#[test]
fn the_only_process_of_a_run_has_all_of_its_limit_without_a_daemon() {
    let spec = with_memory(limited(50), 64 * MIB);
    let mut bench = Bench::alone(spec, Behind::Nobody);
    let view = bench.view();
    assert_eq!((bench.answer(view), bench.ground.memory.free_alone()), (Some(false), 64 * MIB));
    let (all, more) = (bench.reserve(64 * MIB), bench.reserve(1));
    assert_eq!((bench.answer(all), bench.answer(more)), (Some(true), Some(false)));
    bench.behind = Behind::Daemon;
    bench.run(SECOND);
    bench.welcome(spec);
    let stated = bench.said.iter().find_map(|(_, frame)| match frame {
        ToDaemon::Attach { allocated, part, .. } => Some((*allocated, *part)),
        _ => None,
    });
    let all_of_it = Some(Bytes::from_gib(16));
    assert_eq!(stated, Some((Bytes(64 * MIB), all_of_it)), "for any limit that the daemon may state");
}
