//! The promises of a node to its clients, in virtual time.

use crate::support::{Bench, DEVICE, attach_frame, attach_with, spec};
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConnId, Duration, Engine as _, Quota, ResourceSpec, RunId, SmShare, Timestamp, UseState,
};
use gshare_sched::node::{
    ClientConfig, DeviceConfig, DeviceUuid, FactSource, MAX_WAIT, NodeConfig, NodeError, NodeEvent, Note,
    Peer, Refusal,
};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn listing(entries: &[(&str, &str, Option<[u8; 16]>)]) -> NodeConfig {
    let mut config = NodeConfig::default();
    for (name, quota, device) in entries {
        let mut entry = ClientConfig::default();
        (entry.spec, entry.device) = (Some(spec(quota, 100)), device.map(DeviceUuid::gpu));
        config.clients.insert((*name).to_owned(), entry);
    }
    config
}

/// Regression: a listed 30 % got 10.6 % beside six unlisted clients with requests of 99 % each.
#[test]
fn unlisted_clients_do_not_dilute_a_listed_one() {
    let mut bench = Bench::new(listing(&[("alice", "0.3", None)]));
    for slot in 0..6 {
        let conn = bench.hello(slot, &format!("greedy{slot}"), spec("0.99:1", 100));
        let text = bench.attach(conn).unwrap_err();
        assert_eq!(
            text,
            "request 99% does not fit: 0% taken, 30% reserved for listed names, bound 100% (or ask for 0:LIMIT)"
        );
    }
    bench.start(10, "fits", spec("0.7:1", 100));
    let late = bench.hello(11, "late", spec("0.0001:1", 100));
    assert!(bench.attach(late).unwrap_err().contains("70% taken, 30% reserved"));
    bench.start(12, "best-effort", spec("0:1", 100));
    let (_, alice) = bench.start(13, "alice", spec("0.9", 100));
    let shown = bench.node.clients(bench.now).find(|view| view.client == alice).unwrap();
    assert_eq!(shown.share.quota.to_string(), "30%:30%");
    // A share given up can be granted again.
    bench.tell(NodeEvent::Closed { conn: ConnId::new(10, 0) });
    bench.attach(late).unwrap();
}

#[test]
fn requests_whose_sms_fit_side_by_side_may_add_up_to_more_than_the_device() {
    let mut bench = Bench::new(NodeConfig::default());
    for (slot, quota, sm) in [(0, "0.2", 24), (1, "0.2", 80), (2, "0.4", 6), (3, "0.6", 100)] {
        bench.start(slot, &format!("c{slot}"), spec(quota, sm));
    }
    let conn = bench.hello(4, "c4", spec("0.3", 50));
    assert!(bench.attach(conn).unwrap_err().contains("140% taken"));
    // Another device has room, and the connection is open.
    bench.attach_to(conn, [8; 16]).unwrap();
}

#[test]
fn a_listed_name_may_name_the_device_on_which_its_request_is_reserved() {
    let mut bench = Bench::new(listing(&[("alice", "0.6", Some(DEVICE)), ("bob", "0.3", None)]));
    let conn = bench.hello(0, "carol", spec("0.5", 100));
    assert!(bench.attach(conn).unwrap_err().contains("90% reserved"));
    bench.attach_to(conn, [8; 16]).unwrap();
    bench.start(1, "alice", spec("0:1", 100));
    bench.start(2, "bob", spec("0:1", 100));
}

#[test]
fn a_reload_that_promises_more_than_there_is_changes_nothing() {
    let mut bench = Bench::new(NodeConfig::default());
    bench.start(0, "carol", spec("0.5", 100));
    let event = NodeEvent::Reloaded { config: Box::new(listing(&[("alice", "0.6", None)])) };
    let error = bench.node.handle(bench.now, event, &mut Vec::new()).unwrap_err();
    let NodeError::Config(error) = error else { panic!("{error}") };
    assert_eq!((error.value.as_str(), error.field.ends_with("sum of requests")), ("110%", true));
    assert!(
        error.bound.starts_with("50% taken, 60% reserved for listed names: need at most 100%"),
        "{error}"
    );
    assert!(bench.node.config().clients.is_empty());
    let event = NodeEvent::Reloaded { config: Box::new(listing(&[("alice", "0.5", None)])) };
    bench.tell(event);
    // All clients have left, and no device could keep both promises.
    bench.tell(NodeEvent::Closed { conn: ConnId::new(0, 0) });
    let event = NodeEvent::Reloaded { config: Box::new(listing(&[("a", "0.9", None), ("b", "0.9", None)])) };
    let error = bench.node.handle(bench.now, event, &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, NodeError::Config(error) if error.value == "180%"), "{error}");
    assert!(bench.node.config().clients.contains_key("alice"));
}

/// The operator's word: a refused process may run, and keeps to its would-be share.
#[test]
fn a_refused_process_is_told_its_limits_where_the_operator_lets_it_run() {
    let mut config = listing(&[("alice", "0.3", None)]);
    config.refused_run = true;
    let mut bench = Bench::new(config);
    bench.hello(0, "alice", spec("1:1", 100));
    let told = |bench: &Bench| match bench.sent.last() {
        Some((_, ToClient::Unserved { code, spec: Some(spec), .. })) => (*code, spec.quota().to_string()),
        other => panic!("{other:?}"),
    };
    bench.hello(1, "alice", spec("1:1", 100));
    assert_eq!(told(&bench), (RefusalCode::DuplicateName, "30%:30%".to_owned()));
    let conn = bench.hello(2, "bob", spec("0.8:0.9", 100));
    bench.say(conn, attach_frame());
    assert_eq!(told(&bench), (RefusalCode::BadSpec, "80%:90%".to_owned()));
    bench.say(conn, ToDaemon::Class { class: gshare_core::ServiceClass::BestEffort });
    // A broken protocol is no reason to run.
    bench.hello(2, "bob", spec("0.8:0.9", 100));
    assert!(matches!(bench.sent.last(), Some((_, ToClient::Refused { code: RefusalCode::Protocol, .. }))));
}

/// Another user with a seen or guessed number of a run gets nothing of its name and share; nor has a process without a number, or with
/// another one.
#[test]
fn an_instance_is_joined_by_the_number_of_its_run_and_as_its_user_only() {
    let mut bench = Bench::new(NodeConfig::default());
    let mut slots = 0..;
    let mut enters = |uid: u32, run: RunId| {
        let (conn, pid_start) = (ConnId::new(slots.next().unwrap(), 0), 7);
        let (name, program, on_loss) = ("alice".to_owned(), "test".to_owned(), OnDaemonLoss::Open);
        let frame =
            ToDaemon::Hello { pid_start, pid: 0, run, name, program, spec: spec("0.5", 100), on_loss };
        // All processes have one PID, as in other PID namespaces: the PID does not tell them apart.
        bench.tell(NodeEvent::Received { conn, peer: Peer { pid: 0, uid }, frame });
        let (to, frame) = bench.sent.pop().unwrap();
        assert_eq!(to, conn);
        match frame {
            ToClient::Welcome { .. } => true,
            ToClient::Refused { code: RefusalCode::DuplicateName, .. } => false,
            other => panic!("{other:?}"),
        }
    };
    let run = RunId::new(0x5c1d_9a52_7f0e_4c5b_9d55_1f6b_2d0e_8a11);
    assert!(enters(1000, run), "the first");
    assert!(!enters(1001, run), "another user with the same number");
    assert!(!enters(0, run), "root is another user too");
    // Both halves of the number count.
    assert!(!enters(1000, RunId::new(run.bits() ^ 1)) && !enters(1000, RunId::new(run.bits() ^ 1 << 127)));
    assert!(!enters(1000, RunId::NONE), "without a number");
    assert!(enters(1000, run), "a process of the run");
}

/// The first client of a device is no authority on it while there is one: the configuration, then the driver.
#[test]
fn a_devices_memory_is_what_the_configuration_or_the_driver_says_whatever_its_first_client_says() {
    let gib = Bytes::from_gib;
    let (listed, known, unknown) =
        (DeviceUuid::gpu([1; 16]), DeviceUuid::mig([2; 16]), DeviceUuid::gpu([3; 16]));
    let attach =
        |bench: &mut Bench, slot: u32, device: DeviceUuid, device_memory: Bytes, allocated: Bytes| {
            let conn = bench.hello(slot, &format!("n{slot}"), spec("0:1", 100));
            bench.sent.clear();
            // A process need not know or state that it runs on a MIG instance.
            let device = DeviceUuid::gpu(device.bytes());
            bench.say(conn, attach_with(device, (device_memory, allocated, None)));
            let answer = bench.sent.iter().find(|(to, _)| *to == conn).map(|(_, frame)| frame.clone());
            match answer.unwrap() {
                ToClient::Attached { .. } => Ok(()),
                ToClient::Refused { text, .. } => Err(text),
                other => panic!("{other:?}"),
            }
        };
    let shown = |bench: &Bench, uuid: DeviceUuid| {
        let view = bench.node.devices().find(|view| view.uuid == uuid).unwrap();
        (view.uuid.to_string()[..3].to_owned(), view.memory, view.source)
    };
    let mut config = NodeConfig::default();
    config.devices = vec![DeviceConfig { uuid: listed, memory: Some(gib(16)) }];
    let mut bench = Bench::new(config);
    bench.tell(NodeEvent::DeviceFound { uuid: listed, memory: gib(15) });
    attach(&mut bench, 0, listed, gib(1 << 20), Bytes::ZERO).unwrap();
    assert_eq!(shown(&bench, listed), ("GPU".into(), gib(16), FactSource::Configuration));

    let mut bench = Bench::new(NodeConfig::default());
    bench.tell(NodeEvent::DeviceFound { uuid: known, memory: gib(20) });
    let error = attach(&mut bench, 0, known, gib(1 << 20), gib(21)).unwrap_err();
    assert_eq!(error, "21 GiB allocated is more than the device has: 20 GiB");
    attach(&mut bench, 1, known, Bytes(1), gib(20)).unwrap();
    assert_eq!(shown(&bench, known), ("MIG".into(), gib(20), FactSource::Driver));
    // Without a source to ask, the first client's word counts: later clients cannot change it, and it bounds their claims.
    let error = attach(&mut bench, 2, unknown, Bytes::ZERO, Bytes(1)).unwrap_err();
    assert_eq!(error, "1 B allocated is more than the device has: 0 B");
    attach(&mut bench, 3, unknown, gib(8), Bytes::ZERO).unwrap();
    attach(&mut bench, 4, unknown, gib(80), Bytes::ZERO).unwrap();
    assert_eq!(shown(&bench, unknown), ("GPU".into(), gib(8), FactSource::Client));
    // The driver comes up, and has the last word.
    bench.tell(NodeEvent::DeviceFound { uuid: unknown, memory: gib(16) });
    assert_eq!(shown(&bench, unknown), ("GPU".into(), gib(16), FactSource::Driver));
}

fn stated(bench: &Bench, conn: ConnId) -> Vec<String> {
    let quota = |(to, frame): &(ConnId, ToClient)| match frame {
        ToClient::ShareChanged { spec, .. } | ToClient::Attached { spec, .. } if *to == conn => {
            Some(spec.quota().to_string())
        }
        _ => None,
    };
    bench.sent.iter().filter_map(quota).collect()
}

/// A process with a request of the whole launches without tokens.
#[test]
fn a_client_with_the_whole_device_is_scheduled_while_another_one_is_there() {
    let mut bench = Bench::new(NodeConfig::default());
    let (whole, client) = bench.start(0, "whole", spec("1:1", 100));
    assert_eq!(stated(&bench, whole), ["100%:100%"]);
    let (neighbour, other) = bench.start(1, "best-effort", spec("0:1", 100));
    assert_eq!(stated(&bench, whole), ["100%:100%", "99.99%:100%"]);
    let order: Vec<_> = bench.sent.iter().map(|(to, frame)| (to.slot(), frame.label())).collect();
    let changed = order.iter().position(|sent| *sent == (0, "ShareChanged")).unwrap();
    assert!(changed < order.iter().position(|sent| *sent == (1, "Attached")).unwrap(), "{order:?}");
    // Both ask; the client with the request goes first, and the other waits for its token.
    bench.ask(whole, client);
    bench.ask(neighbour, other);
    assert!(bench.allowed(client).is_some() && bench.allowed(other).is_none());
    // A second neighbour changes nothing; when the last one is gone, the process is alone again.
    let (third, of_third) = bench.start(2, "third", spec("0:1", 100));
    bench.tell(NodeEvent::Closed { conn: neighbour });
    assert_eq!(stated(&bench, whole).len(), 2);
    bench.say(third, ToDaemon::Detach { client: of_third });
    assert_eq!(stated(&bench, whole), ["100%:100%", "99.99%:100%", "100%:100%"]);
    let conn = bench.hello(4, "late", spec("1:1", 100));
    let refusal = bench.attach(conn).unwrap_err();
    assert!(refusal.starts_with("request 100% does not fit: 100% taken"), "{refusal}");
    assert!(bench.notes.iter().any(|note| matches!(note, Note::Refused { refusal, .. }
        if matches!(refusal, Refusal::Overcommitted { request, .. } if *request == Quota::WHOLE))));
}

/// A turn ended with 0.5 ms, a guess; then the kernel turned out to have taken 400 ms. `said`: by which frames. Gives how long the next
/// process of the name waits.
fn late_overuse(said: impl Fn(&mut Bench, ConnId, ClientId)) -> Duration {
    let mut bench = Bench::new(NodeConfig::default());
    let capped = spec("0.2", 100);
    let (conn, client) = bench.start(0, "job", capped);
    bench.ask(conn, client);
    said(&mut bench, conn, client);
    bench.tell(NodeEvent::Closed { conn });
    let (conn, client) = bench.start(1, "job", capped);
    let from = bench.sent.len();
    bench.ask(conn, client);
    let now = bench.now;
    bench.sent[from..]
        .iter()
        .find_map(|(_, frame)| match frame {
            ToClient::Throttle { until, .. } => Some(until.saturating_since(now)),
            ToClient::Allow { .. } => Some(Duration::ZERO),
            _ => None,
        })
        .expect("an answer")
}

#[test]
fn overuse_that_is_named_after_a_turn_is_paid_back_by_the_next_of_the_name() {
    // 400 ms within 400 ms at 20 %: 320 ms are beyond the limit, which takes 1.6 s.
    let wanted = ms(1_600);
    let before_its_end = late_overuse(|bench, conn, client| {
        bench.pass(ms(5));
        bench.say(conn, ToDaemon::use_of_time(client, 0, ms(400), UseState::Holds));
        bench.pass(ms(395));
        bench.say(conn, ToDaemon::use_of_time(client, 1, ms(400), UseState::Idle));
    });
    assert_eq!(before_its_end, wanted);
    let after_its_end = late_overuse(|bench, conn, client| {
        bench.say(conn, ToDaemon::use_of_time(client, 1, Duration::from_micros(500), UseState::Idle));
        bench.pass(ms(400));
        for _ in 0..3 {
            bench.say(conn, ToDaemon::use_of_time(client, 1, ms(400), UseState::Idle));
        }
    });
    // Heard in one window: 399.5 ms beyond the limit of 20 ms; named again and again, charged once.
    assert_eq!(after_its_end, Duration::from_micros(1_897_500));
    let after_a_stop = late_overuse(|bench, conn, client| {
        bench.pass(ms(400));
        let (turn, until) = last_allow(bench, client);
        assert!(turn == 0 && until <= bench.now, "it was stopped");
        bench.say(conn, ToDaemon::use_of_time(client, 0, ms(400), UseState::Holds));
    });
    // The stop charged 10 ms in the first window.
    assert_eq!(after_a_stop, ms(1_850));
    assert!(wanted < MAX_WAIT);
}

fn last_allow(bench: &Bench, client: ClientId) -> (u32, Timestamp) {
    let last = bench.sent.iter().rev().find_map(|(_, frame)| match frame {
        ToClient::Allow { client: to, turn, until, .. } if *to == client => Some((*turn, *until)),
        _ => None,
    });
    last.expect("a permission")
}

/// The same while the process goes on.
#[test]
fn overuse_that_is_named_late_throttles_the_process_itself() {
    let mut bench = Bench::new(NodeConfig::default());
    let (conn, client) = bench.start(0, "job", spec("0.2", 100));
    bench.ask(conn, client);
    bench.say(conn, ToDaemon::use_of_time(client, 1, ms(1), UseState::Idle));
    bench.pass(ms(1));
    bench.say(conn, ToDaemon::use_of_time(client, 1, ms(400), UseState::Idle));
    bench.sent.clear();
    bench.say(conn, ToDaemon::use_of_time(client, 1, ms(400), UseState::Wants));
    let throttled = bench.notes.iter().find_map(|note| match note {
        Note::Throttled { used, .. } => Some(*used),
        _ => None,
    });
    assert_eq!(throttled, Some(ms(400)));
    bench.pass(ms(1_000));
    assert_eq!(bench.allowed(client), None, "some 2 s have to pass");
    bench.pass(ms(1_500));
    assert!(bench.allowed(client) > Some(ms(400)));
}

/// A daemon that has just started does not know its predecessor's processes, or their memory.
#[test]
fn a_process_that_comes_before_its_siblings_are_back_takes_nothing_of_their_memory() {
    let mib = |mib: u64| Bytes(mib << 20);
    let spec = ResourceSpec::new("0.5".parse().unwrap(), SmShare::WHOLE, Some(mib(256))).unwrap();
    let attach = |allocated: Bytes, part: Option<Bytes>| {
        attach_with(DeviceUuid::gpu(DEVICE), (Bytes::from_gib(16), allocated, part))
    };
    let answers = |bench: &Bench, of: ConnId| -> Vec<&str> {
        let labels = bench.sent.iter().filter(|(to, _)| *to == of).map(|(_, frame)| frame.label());
        labels.filter(|label| matches!(*label, "MemoryGrant" | "MemoryDeny")).collect()
    };
    // Bytes that its sibling holds, and the answer to the question.
    for (held, then) in [(0, "MemoryGrant"), (192, "MemoryGrant"), (240, "MemoryDeny")] {
        let mut bench = Bench::new(NodeConfig::default());
        let (new, client) = bench.start(0, "a", spec);
        bench.say(new, ToDaemon::MemoryReserve { client, bytes: mib(64), wish: mib(64) });
        bench.pass(ms(300));
        if held > 0 {
            let (conn, name, program) = (ConnId::new(1, 0), "a".to_owned(), "test".to_owned());
            let (run, on_loss) = (RunId::new(1), OnDaemonLoss::Open);
            bench.say(conn, ToDaemon::Hello { pid_start: 0, pid: 0, run, name, program, spec, on_loss });
            bench.say(conn, attach(mib(held), Some(mib(256))));
        }
        bench.pass(ms(650));
        assert_eq!(answers(&bench, new), [""; 0], "it waits");
        bench.pass(ms(300));
        assert_eq!(answers(&bench, new), [then], "{held} MiB held");
    }
    // The only process of a run claims all memory as its own, and waits for no other; neither does a later process.
    let mut bench = Bench::new(NodeConfig::default());
    for (slot, part) in [(0, Some(Bytes::from_gib(16))), (1, None)] {
        let conn = bench.hello(slot, &format!("n{slot}"), spec);
        bench.say(conn, attach(Bytes::ZERO, part));
        let client = bench.node.clients(bench.now).map(|view| view.client).last().unwrap();
        bench.say(conn, ToDaemon::MemoryReserve { client, bytes: mib(64), wish: mib(64) });
        assert_eq!(answers(&bench, conn).last(), Some(&"MemoryGrant"));
        bench.pass(ms(1_000));
    }
}

/// Regression: a process which attached 64 invented UUIDs locked every other device out.
#[test]
fn invented_devices_of_one_user_leave_room_for_devices_of_others() {
    let mut bench = Bench::new(NodeConfig::default());
    let invented = |number: u16| {
        let mut uuid = [1; 16];
        uuid[..2].copy_from_slice(&number.to_be_bytes());
        uuid
    };
    let greedy = bench.hello(0, "greedy", spec("0:1", 100));
    for number in 0..767 {
        bench.attach_to(greedy, invented(number)).unwrap();
    }
    // Devices of others count against the free ones, and a user without a device of its own gets the last.
    let (conn, run) = (ConnId::new(1, 0), RunId::new(9));
    let (name, program, on_loss) = ("other".to_owned(), "test".to_owned(), OnDaemonLoss::Open);
    let hello = ToDaemon::Hello { pid_start: 0, pid: 0, run, name, program, spec: spec("0.5", 100), on_loss };
    for frame in [hello, attach_frame()] {
        bench.tell(NodeEvent::Received { conn, peer: Peer { pid: 7, uid: 1001 }, frame });
    }
    let attached =
        |(to, frame): &(ConnId, ToClient)| *to == conn && matches!(frame, ToClient::Attached { .. });
    assert!(bench.sent.iter().any(attached), "{:?}", bench.sent.last());
    // A device already present, or known to the driver, does not count as brought.
    let second = bench.hello(2, "second", spec("0:1", 100));
    bench.attach(second).unwrap();
    bench.tell(NodeEvent::DeviceFound { uuid: DeviceUuid::gpu([3; 16]), memory: Bytes::from_gib(16) });
    bench.attach_to(second, [3; 16]).unwrap();
    assert_eq!(
        bench.attach_to(greedy, invented(767)).unwrap_err(),
        "user 1000 has brought 768 devices, and 769 of 1024 are in use: the rest is for others ([[device]])"
    );
    // The refused process is gone with its devices.
    assert_eq!(bench.node.devices().count(), 2);
    bench.attach_to(second, invented(0)).unwrap();
}
