//! Peers that break the protocol: each loses its own connection, with a counted reason, and nothing else happens.

use crate::common::{Client, Forked, Local, Process, attached, spec, within};
use gshare_core::wire::{HEADER, MAX_FRAME, RefusalCode, ToClient, ToDaemon, VERSION};
use gshare_core::{Bytes, ClientId, Duration, ResourceSpec, RunId, UseState};

/// A good Hello as bytes.
fn hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    ToDaemon::Hello {
        pid_start: 0,
        pid: 0,
        run: RunId::new(7),
        name: "mallory".into(),
        program: "test".into(),
        spec: ResourceSpec::UNLIMITED,
        on_loss: gshare_core::wire::OnDaemonLoss::Open,
    }
    .encode(0, &mut bytes);
    bytes
}

/// Sends `bytes` on a fresh connection and expects it to be dropped for `reason`, once, while a bystander goes on.
fn dropped_for(reason: &str, frames: &[Vec<u8>]) {
    let daemon = Local::start();
    let (mut bystander, id) = attached(&daemon.socket(), 1, "bystander", spec("0.5:1", 50, Some(64)));
    let mut mallory = Client::connect(&daemon.socket());
    for frame in frames {
        mallory.send_bytes(frame);
    }
    let rest = mallory.rest();
    assert!(rest.iter().all(|message| matches!(message, ToClient::Welcome { .. })), "{rest:?}");
    assert_eq!(daemon.drops(reason), 1, "{:?}", daemon.snapshot().drops);
    assert_eq!(daemon.snapshot().drops.values().sum::<u64>(), 1);
    bystander.ask(id);
    bystander.granted();
    assert_eq!(daemon.snapshot().connections, 1);
}

#[test]
fn a_truncated_frame() {
    dropped_for("truncated", &[hello()[..20].to_vec()]);
    dropped_for("truncated", &[vec![VERSION]]);
}

#[test]
fn an_oversized_frame() {
    let mut long = hello();
    long.push(0);
    dropped_for("oversized", &[long]);
    dropped_for("oversized", &[vec![VERSION; MAX_FRAME + 1]]);
    dropped_for("oversized", &[vec![VERSION; 60_000]]);
}

#[test]
fn another_version() {
    let daemon = Local::start();
    for (n, version) in [VERSION - 1, VERSION + 1, 0xff].into_iter().enumerate() {
        let mallory = Client::connect(&daemon.socket());
        let mut other = hello();
        other[0] = version;
        mallory.send_bytes(&other);
        let mut answer = mallory.receive_bytes().unwrap();
        assert_eq!(core::mem::replace(&mut answer[0], VERSION), version, "it is in the peer's own version");
        let expected = format!(
            "the hook speaks version {version} and the daemon version {VERSION}: upgrade the older one"
        );
        let refused = ToClient::Refused { code: RefusalCode::Protocol, text: expected };
        assert_eq!(ToClient::decode(&answer).unwrap(), (0, refused));
        assert_eq!(mallory.receive_bytes(), None, "the connection ends");
        assert_eq!(daemon.drops("version"), n as u64 + 1);
    }
    // In the middle of a conversation it is no other version, but garbage.
    dropped_for("version", &[hello(), vec![0xff; HEADER]]);
}

#[test]
fn an_unknown_kind() {
    let mut unknown = hello();
    unknown[1] = 200;
    dropped_for("kind", &[unknown]);
}

#[test]
fn a_replayed_frame_and_one_that_was_left_out() {
    dropped_for("sequence", &[hello(), hello()]);
    let mut skipped = hello();
    skipped[4] = 1;
    dropped_for("sequence", &[skipped]);
}

#[test]
fn an_impossible_field() {
    let mut bytes = hello();
    // The quota request: 0xffff basis points.
    let at = HEADER + 16 + 1 + "mallory".len() + 1 + "test".len();
    bytes[at..at + 2].fill(0xff);
    dropped_for("field", &[bytes]);
}

#[test]
fn messages_out_of_turn() {
    let mut attach = Vec::new();
    let (client, used) = (ClientId::new(0, 0), Duration::ZERO);
    let all = ToDaemon::use_of_time(client, 0, used, UseState::Wants);
    all.encode(0, &mut attach);
    dropped_for("protocol", &[attach]);
    // The bystander's client, asked for by another connection.
    let mut steal = Vec::new();
    all.encode(1, &mut steal);
    dropped_for("protocol", &[hello(), steal]);
    let mut release = Vec::new();
    ToDaemon::MemoryRelease { client: ClientId::new(9, 9), bytes: Bytes(1) }.encode(1, &mut release);
    dropped_for("protocol", &[hello(), release]);
}

#[test]
fn a_peer_that_does_not_read_is_dropped_and_only_that_one() {
    let daemon = Local::start();
    let (mut bystander, id) = attached(&daemon.socket(), 1, "bystander", ResourceSpec::UNLIMITED);
    let (mut deaf, deaf_id) = attached(&daemon.socket(), 2, "deaf", ResourceSpec::UNLIMITED);
    while daemon.drops("slow") == 0 {
        for _ in 0..100 {
            // Each is answered, and no answer is read.
            deaf.send(&ToDaemon::MemoryReserve { client: deaf_id, bytes: Bytes(1), wish: Bytes(1) });
        }
    }
    bystander.ask(id);
    bystander.granted();
    let snapshot = daemon.snapshot();
    assert_eq!((snapshot.connections, snapshot.devices[0].held_bytes), (1, Bytes::ZERO));
}

#[test]
fn a_peer_that_reads_late_misses_nothing() {
    let daemon = Local::start();
    let (mut late, id) = attached(&daemon.socket(), 2, "late", ResourceSpec::UNLIMITED);
    // More answers than the kernel buffers for one socket, fewer than the daemon keeps beyond that.
    let held = || daemon.snapshot().devices[0].held_bytes.0;
    let mut asked = 0;
    while asked < 5_000 && daemon.drops("slow") == 0 {
        late.send(&ToDaemon::MemoryReserve { client: id, bytes: Bytes(1), wish: Bytes(1) });
        asked += 1;
        if asked % 10 == 0 && within(|| (held() == asked).then_some(asked)) >= 300 {
            break;
        }
    }
    for _ in 0..asked {
        assert_eq!(late.receive(), Some(ToClient::MemoryGrant { client: id, bytes: Bytes(1) }));
    }
}

/// `gshare status` of others must not wait for it.
#[test]
fn a_question_that_comes_byte_by_byte_does_not_keep_others_waiting() {
    use std::io::Write as _;
    let daemon = Local::start();
    let path = daemon.dir.path().join("gshare-admin.sock");
    let mut slow = std::os::unix::net::UnixStream::connect(&path).unwrap();
    slow.write_all(b" ").unwrap();
    let slow = std::thread::spawn(move || {
        while slow.write_all(b" ").is_ok() {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    });
    gshared::admin::snapshot(&path).unwrap();
    slow.join().unwrap();
}

#[test]
fn a_peer_that_says_nothing_is_dropped_in_time() {
    use gshare_core::Timestamp;
    use gshared::{Config, Daemon, ManualClock};
    use std::sync::Arc;
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1)));
    let path = dir.path().join("gshare.sock");
    let daemon =
        Daemon::builder(Config::at(&path)).clock(Arc::clone(&clock) as _).build().unwrap().spawn().unwrap();
    let mut silent = Client::connect(&path);
    let (_talker, _) = attached(&path, 1, "talker", ResourceSpec::UNLIMITED);
    assert_eq!(daemon.handle().snapshot().unwrap().connections, 2);
    clock.set(Timestamp::from_millis(6_000));
    daemon.handle().wake();
    assert_eq!(silent.receive(), None);
    let snapshot = daemon.handle().snapshot().unwrap();
    assert_eq!((snapshot.connections, snapshot.drops["slow"]), (1, 1));
}

#[test]
fn a_peer_of_another_user_is_refused_with_a_text() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let daemon = Local::start();
    // So that the other user may come as far as the socket.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(daemon.dir.path(), mode).unwrap();
    let path = daemon.socket();
    let nobody = Forked::run(Some(65_534), move || {
        let mut client = Client::connect(&path);
        client.hello(1, "n", ResourceSpec::UNLIMITED);
        match client.receive() {
            Some(ToClient::Refused { code: RefusalCode::NotAllowed, text }) if text.contains("65534") => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(client.receive(), None);
        // Nor does the other socket tell that user anything.
        assert!(gshared::admin::snapshot(&gshared::config::admin_socket_of(&path)).is_err());
    });
    assert!(nobody.wait());
    assert_eq!(daemon.drops("not_allowed"), 1);
    let mut admin = gshared::Config::at(daemon.socket());
    admin.allow_uids = vec![65_534];
    daemon.running.as_ref().unwrap().handle().reload(admin).unwrap();
    let path = daemon.socket();
    let enters = move || {
        let _client = attached(&path, 1, "n", ResourceSpec::UNLIMITED);
        gshared::admin::snapshot(&gshared::config::admin_socket_of(&path)).unwrap();
    };
    assert!(Forked::run(Some(65_534), enters).wait());
}

#[test]
fn more_connections_than_configured_are_refused_with_a_text() {
    let daemon = Local::with(|config| config.max_connections = 2);
    let _held: Vec<_> = (0..2).map(|_| Client::connect(&daemon.socket())).collect();
    within(|| (daemon.snapshot().connections == 2).then_some(()));
    let mut third = Client::connect(&daemon.socket());
    match third.receive() {
        Some(ToClient::Refused { code: RefusalCode::Full, text }) => {
            assert!(text.contains("max_connections"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ten_thousand_connects_leave_no_memory_behind() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let path = daemon.socket();
    let (mut bystander, id) = attached(&path, 1, "bystander", ResourceSpec::UNLIMITED);
    let storm = |count: u32, run: u64| {
        for n in 0..count {
            let mut client = Client::connect(&path);
            match n % 4 {
                0 => {}
                1 => client.send_bytes(&[VERSION; 3]),
                2 => client.hello(run, &format!("client-{n}"), ResourceSpec::UNLIMITED),
                _ => {
                    client.enter(run, &format!("client-{n}"), ResourceSpec::UNLIMITED);
                    client.attach(Bytes(4096));
                }
            }
        }
        within(|| (daemon.snapshot().connections == 1).then_some(()));
    };
    storm(1_000, 2);
    let before = daemon.rss();
    storm(10_000, 3);
    let after = daemon.rss();
    eprintln!("RSS before 10,000 connects {before} KiB, after {after} KiB");
    assert!(after <= before + 512, "RSS grew from {before} to {after} KiB");
    let snapshot = daemon.snapshot();
    assert_eq!(snapshot.drops["truncated"], 2_750);
    assert_eq!((snapshot.clients.len(), snapshot.devices[0].held_bytes), (1, Bytes::ZERO));
    bystander.ask(id);
    bystander.granted();
}
