//! Accounts of memory and of GPU time, as clients see them.

use crate::common::{Client, Local, attach_to, attached, spec, within};
use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{Bytes, DeviceUuid, Duration, ResourceSpec, UseState};

const fn mib(n: u64) -> Bytes {
    Bytes::from_mib(n)
}

#[test]
fn the_limit_of_an_instance_holds_over_its_processes() {
    let daemon = Local::start();
    let (mut one, one_id) = attached(&daemon.socket(), 1, "alice", spec("0.5", 100, Some(256)));
    let (mut two, two_id) = attached(&daemon.socket(), 1, "alice", spec("0.5", 100, Some(256)));
    assert_eq!(one.reserve(one_id, mib(200), mib(200)), Ok(mib(200)));
    assert_eq!(two.reserve(two_id, mib(57), mib(57)), Err(mib(56)));
    assert_eq!(two.reserve(two_id, mib(1), mib(64)), Ok(mib(56)), "as much of the wish as there is");
    one.send(&ToDaemon::MemoryRelease { client: one_id, bytes: mib(100) });
    assert_eq!(one.reserve(one_id, mib(101), mib(101)), Err(mib(100)));
    assert_eq!(two.reserve(two_id, mib(100), mib(100)), Ok(mib(100)));
}

#[test]
fn the_device_has_no_more_than_it_has_less_its_headroom() {
    let daemon = Local::with(|config| config.memory_headroom = mib(24));
    let (mut one, one_id) = attached(&daemon.socket(), 1, "one", ResourceSpec::UNLIMITED);
    let (mut two, two_id) = attached(&daemon.socket(), 2, "two", ResourceSpec::UNLIMITED);
    assert_eq!(one.reserve(one_id, mib(900), mib(900)), Ok(mib(900)));
    assert_eq!(two.reserve(two_id, mib(101), mib(101)), Err(mib(100)));
    drop(one);
    within(|| (daemon.snapshot().clients.len() == 1).then_some(()));
    assert_eq!(two.reserve(two_id, mib(1000), mib(1000)), Ok(mib(1000)), "death frees all");
}

#[test]
fn what_was_allocated_is_re_stated_after_a_reconnect() {
    let daemon = Local::start();
    let (mut first, id) = attached(&daemon.socket(), 1, "alice", spec("0.5", 100, Some(256)));
    assert_eq!(first.reserve(id, mib(100), mib(100)), Ok(mib(100)));
    drop(first);
    within(|| daemon.snapshot().clients.is_empty().then_some(()));
    let mut again = Client::connect(&daemon.socket());
    again.enter(1, "alice", spec("0.5", 100, Some(256)));
    let (id, _) = again.attach(mib(100));
    assert_eq!(daemon.snapshot().devices[0].held_bytes, mib(100));
    assert_eq!(again.reserve(id, mib(157), mib(157)), Err(mib(156)));
}

#[test]
fn a_client_that_releases_more_than_it_holds_is_dropped_with_its_account() {
    let daemon = Local::start();
    let (mut client, id) = attached(&daemon.socket(), 1, "alice", ResourceSpec::UNLIMITED);
    assert_eq!(client.reserve(id, mib(10), mib(10)), Ok(mib(10)));
    client.send(&ToDaemon::MemoryRelease { client: id, bytes: mib(11) });
    assert_eq!(client.receive(), None);
    let snapshot = daemon.snapshot();
    assert_eq!(snapshot.drops["protocol"], 1);
    assert!(snapshot.devices.is_empty(), "a learned device is forgotten with its last client");
}

#[test]
fn each_device_has_its_own_account() {
    let daemon = Local::start();
    let (mut client, first) = attached(&daemon.socket(), 1, "alice", spec("0.5", 100, Some(256)));
    let device = DeviceUuid::gpu(*b"The other device");
    client.send(&attach_to(1, device, mib(512), Bytes::ZERO));
    let second = client.until(|message| match message {
        ToClient::Attached { ordinal: 1, client, .. } => Some(*client),
        _ => None,
    });
    assert_eq!(client.reserve(first, mib(256), mib(256)), Ok(mib(256)));
    assert_eq!(client.reserve(second, mib(256), mib(256)), Ok(mib(256)));
    let held: Vec<_> =
        daemon.snapshot().devices.iter().map(|device| (device.gpu.number(), device.held_bytes)).collect();
    assert_eq!(held, [(0, mib(256)), (1, mib(256))]);
}

/// For a peer that has closed with a frame unread, the kernel reports a reset before it gives the peer's last frames.
#[test]
fn the_last_total_of_a_process_that_ends_with_a_frame_unread_is_charged() {
    let daemon = Local::start();
    let limit = spec("0.5", 100, None);
    let (mut ends, id) = attached(&daemon.socket(), 1, "alice", limit);
    ends.ask(id);
    ends.granted();
    // The first process is told of its new part before the second is let in, and never reads it.
    let (_stays, _) = attached(&daemon.socket(), 1, "alice", limit);
    ends.gives_back(id, Duration::ZERO, UseState::Idle);
    // The daemon is still busy with these when the process has ended.
    (0..200).for_each(|_| ends.says(id, UseState::Idle));
    ends.used = Duration::from_millis(20_000);
    ends.says(id, UseState::Idle);
    drop(ends);
    let window_used = within(|| {
        let clients = daemon.snapshot().clients;
        (clients.len() == 1).then(|| clients[0].window_used_ns)
    });
    // At most 10 s of overuse are carried, and half a second is paid back in each.
    assert!(window_used > Duration::from_millis(2_000), "{window_used}");
}
