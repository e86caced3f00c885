//! The registry: which processes are let in, under which name, with which share.

use crate::common::{self, Client, DEVICE, DEVICE_MEMORY, Forked, Local, attached, spec, within};
use gshare_core::token::RevokeReason;
use gshare_core::wire::{RefusalCode, ToClient, ToDaemon};
use gshare_core::{Bytes, DeviceUuid, Duration, ResourceSpec};

fn refusal(client: &mut Client) -> (RefusalCode, String) {
    match client.rest().pop() {
        Some(ToClient::Refused { code, text }) => (code, text),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_client_is_let_in_and_granted_a_token() {
    let daemon = Local::start();
    let (mut client, id) = attached(&daemon.socket(), 1, "alice", spec("0.3:0.8", 24, Some(64)));
    client.send(&ToDaemon::TokenRequest { client: id });
    let (lease, budget) = client.granted();
    assert!(budget > Duration::ZERO);
    let used = Duration::from_micros(100);
    client.send(&ToDaemon::TokenReturn { client: id, lease, used, again: 1 });
    let (next, _) = client.granted();
    assert_ne!(next, lease);
    let snapshot = daemon.snapshot();
    let alice = &snapshot.clients[0];
    assert_eq!((alice.name.as_str(), alice.total_used_ns, alice.holds_token), ("alice", used, true));
    assert_eq!((alice.quota_request, alice.quota_limit, alice.sm), (0.3, 0.8, 0.24));
    assert_eq!(alice.pid, i32::try_from(std::process::id()).unwrap());
}

#[test]
fn a_token_that_is_not_returned_is_revoked_and_another_client_gets_it() {
    let daemon = Local::start();
    let (mut sleeper, sleeper_id) = attached(&daemon.socket(), 1, "sleeper", ResourceSpec::UNLIMITED);
    let (mut waiter, waiter_id) = attached(&daemon.socket(), 2, "waiter", ResourceSpec::UNLIMITED);
    sleeper.send(&ToDaemon::TokenRequest { client: sleeper_id });
    let (lease, _) = sleeper.granted();
    waiter.send(&ToDaemon::TokenRequest { client: waiter_id });
    waiter.granted();
    let revoked = sleeper.until(|message| match message {
        ToClient::Revoke { lease, reason, .. } => Some((*lease, *reason)),
        _ => None,
    });
    assert_eq!(revoked, (lease, RevokeReason::Expired));
}

#[test]
fn a_name_belongs_to_one_run_while_it_lives() {
    let daemon = Local::start();
    let (alice, _) = attached(&daemon.socket(), 1, "alice", ResourceSpec::UNLIMITED);
    let mut same_run = Client::connect(&daemon.socket());
    same_run.enter(1, "alice", ResourceSpec::UNLIMITED);
    let mut other = Client::connect(&daemon.socket());
    other.hello(2, "alice", ResourceSpec::UNLIMITED);
    let (code, text) = refusal(&mut other);
    assert_eq!(code, RefusalCode::DuplicateName);
    assert!(text.contains("`alice`") && text.contains(&std::process::id().to_string()), "{text}");
    assert_eq!(daemon.drops("duplicate_name"), 1);
    drop((alice, same_run));
    within(|| (daemon.snapshot().processes == 0).then_some(()));
    attached(&daemon.socket(), 2, "alice", ResourceSpec::UNLIMITED);
}

#[test]
fn processes_of_one_run_share_its_limit_and_are_told_parts_for_the_time_without_a_daemon() {
    let daemon = Local::start();
    let limits = |daemon: &Local| -> Vec<u32> {
        let clients = daemon.snapshot().clients;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "basis points")]
        clients.iter().map(|client| (client.quota_limit * 10_000.0).round() as u32).collect()
    };
    let (mut first, _) = attached(&daemon.socket(), 1, "alice", spec("0.2:0.5", 100, None));
    let (second, _) = attached(&daemon.socket(), 1, "alice", spec("0.9:0.9", 100, None));
    assert_eq!(limits(&daemon), [5_000, 5_000], "what the second one asks for is not looked at");
    let (_third, _) = attached(&daemon.socket(), 1, "alice", spec("0.2:0.5", 100, None));
    assert_eq!(limits(&daemon), [5_000; 3]);
    drop(second);
    within(|| (daemon.snapshot().clients.len() == 2).then_some(()));
    let told: Vec<u16> = std::iter::repeat_with(|| {
        first.until(|message| match message {
            ToClient::ShareChanged { spec, .. } => Some(spec.quota().limit().get()),
            _ => None,
        })
    })
    .take(3)
    .collect();
    assert_eq!(told, [2_500, 1_667, 2_500]);
}

#[test]
fn the_configuration_goes_before_what_a_process_asks_for() {
    let daemon = Local::with(|config| {
        config.clients.entry("alice".into()).or_default().spec = Some(spec("0.1:0.2", 30, Some(10)));
        config.allow_unlisted = false;
    });
    let mut alice = Client::connect(&daemon.socket());
    alice.enter(1, "alice", ResourceSpec::UNLIMITED);
    assert_eq!(alice.attach(Bytes::ZERO).1, spec("0.1:0.2", 30, Some(10)));
    let mut bob = Client::connect(&daemon.socket());
    bob.hello(2, "bob", ResourceSpec::UNLIMITED);
    let (code, text) = refusal(&mut bob);
    assert_eq!(code, RefusalCode::NotAllowed);
    assert!(text.contains("`bob`") && text.contains("allow_unlisted"), "{text}");
}

#[test]
fn what_cannot_be_met_is_refused_with_its_bound() {
    let daemon = Local::with(|config| config.max_clients = 1);
    let attach = ToDaemon::Attach {
        ordinal: 0,
        device: DEVICE,
        device_memory: DEVICE_MEMORY,
        allocated: Bytes::ZERO,
        part: None,
    };
    let mut greedy = Client::connect(&daemon.socket());
    greedy.enter(1, "greedy", spec("0.1:0.2", 30, Some(2048)));
    greedy.send(&attach);
    let refused = ToClient::Refused {
        code: RefusalCode::BadSpec,
        text: "GPU memory 2 GiB is larger than the device's 1 GiB".into(),
    };
    assert_eq!(greedy.receive(), Some(refused));
    let (_client, _) = attached(&daemon.socket(), 2, "alice", ResourceSpec::UNLIMITED);
    let mut late = Client::connect(&daemon.socket());
    late.enter(3, "late", ResourceSpec::UNLIMITED);
    late.send(&attach);
    let (code, text) = refusal(&mut late);
    assert_eq!(code, RefusalCode::Full);
    assert!(text.contains("max_clients"), "{text}");
}

/// A program with two GPUs must not lose the one for the other.
#[test]
fn a_device_that_cannot_be_had_is_refused_and_the_others_stay() {
    let daemon = Local::with(|config| {
        for uuid in [DEVICE, DeviceUuid::gpu(*b"a smaller device")] {
            config.devices.push(gshared::config::DeviceConfig { uuid, memory: None });
        }
    });
    let mut client = Client::connect(&daemon.socket());
    client.enter(1, "alice", spec("0.5", 100, Some(512)));
    let (id, _) = client.attach(Bytes::ZERO);
    client.send(&ToDaemon::TokenRequest { client: id });
    let (lease, _) = client.granted();
    let devices = [
        (*b"a smaller device", Bytes::from_mib(256), RefusalCode::BadSpec),
        (*b"another device!!", DEVICE_MEMORY, RefusalCode::UnknownDevice),
    ];
    for (device, device_memory, expected) in devices {
        client.send(&ToDaemon::Attach {
            ordinal: 1,
            device: DeviceUuid::gpu(device),
            device_memory,
            allocated: Bytes::ZERO,
            part: None,
        });
        match client.receive() {
            Some(ToClient::Refused { code, .. }) if code == expected => {}
            other => panic!("{other:?}"),
        }
    }
    let snapshot = daemon.snapshot();
    assert_eq!((snapshot.connections, snapshot.clients.len()), (1, 1));
    assert_eq!(snapshot.drops.values().sum::<u64>(), 0, "{:?}", snapshot.drops);
    assert!(snapshot.clients[0].holds_token);
    let used = Duration::from_micros(10);
    client.send(&ToDaemon::TokenReturn { client: id, lease, used, again: 1 });
    client.granted();
}

#[test]
fn a_forked_child_that_keeps_the_socket_does_not_keep_the_process_alive() {
    let daemon = Local::start();
    let path = daemon.socket();
    let (tell, told) = std::os::unix::net::UnixStream::pair().unwrap();
    let parent = Forked::run(None, move || {
        let (mut client, id) = attached(&path, 1, "alice", ResourceSpec::UNLIMITED);
        client.send(&ToDaemon::TokenRequest { client: id });
        client.granted();
        // Longer than anybody waits for anything.
        let child = Forked::run(None, || std::thread::sleep(10 * common::PATIENCE));
        use std::io::Write as _;
        (&tell).write_all(&child.pid().to_le_bytes()).unwrap();
        std::mem::forget(child);
        std::thread::sleep(10 * common::PATIENCE);
    });
    let mut child = [0; 4];
    std::io::Read::read_exact(&mut &told, &mut child).unwrap();
    let (mut heir, heir_id) = attached(&daemon.socket(), 2, "heir", ResourceSpec::UNLIMITED);
    parent.kill();
    heir.send(&ToDaemon::TokenRequest { client: heir_id });
    heir.granted();
    within(|| (daemon.snapshot().clients.len() == 1).then_some(()));
    let child = rustix::process::Pid::from_raw(i32::from_le_bytes(child)).unwrap();
    rustix::process::test_kill_process(child).expect("the child lives, with the socket");
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn detaching_frees_the_share_and_keeps_the_connection() {
    let daemon = Local::start();
    let (mut client, id) = attached(&daemon.socket(), 1, "alice", ResourceSpec::UNLIMITED);
    client.send(&ToDaemon::Detach { client: id });
    let (again, _) = client.attach(Bytes::ZERO);
    assert_ne!(again, id, "the slot is used again, under another generation");
    assert_eq!(daemon.snapshot().clients.len(), 1);
}
