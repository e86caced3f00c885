//! Limits on the harm that silent, greedy and malicious peers can do.

use crate::common::{self, Client, Forked, Local, attach_to, attached, spec, within};
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{Bytes, DeviceUuid, ResourceSpec, RunId};
use gshare_sched::node::FactSource;
use gshared::config::{JournalConfig, MetricsAddress};
use gshared::nvml::DeviceFact;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

/// Eight that connect to the admin socket and say nothing, as after a `gshare status` that was stopped.
#[test]
fn silent_questions_keep_nobody_from_asking() {
    let daemon = Local::start();
    let admin = daemon.dir.path().join("gshare-admin.sock");
    let _silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&admin).unwrap()).collect();
    assert!(gshared::admin::snapshot(&admin).unwrap().clients.is_empty());
    assert!(gshared::admin::metrics(&admin).unwrap().contains("gshare_build_info"));
}

/// The second daemon finds the first at an attach, and leaves its seat with the client that named the device.
#[test]
fn daemons_on_one_device_know_each_other_while_their_clients_are_there() {
    let mut bytes = *b"pid shared twice";
    bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
    let enter = |daemon: &Local| {
        let mut client = Client::connect(&daemon.socket());
        client.enter(1, "a", spec("0.2", 20, None));
        client.send(&attach_to(0, DeviceUuid::gpu(bytes), common::DEVICE_MEMORY, Bytes::ZERO));
        client.until(|message| matches!(message, ToClient::Attached { .. }).then_some(()));
        client
    };
    let (first, second) = (Local::start(), Local::start());
    let _stays = enter(&first);
    assert!(first.snapshot().neighbours.is_empty());
    let leaves = enter(&second);
    assert_eq!(second.snapshot().neighbours.len(), 1);
    within(|| (first.snapshot().neighbours.len() == 1).then_some(()));
    drop(leaves);
    within(|| second.snapshot().neighbours.is_empty().then_some(()));
    within(|| first.snapshot().neighbours.is_empty().then_some(()));
}

fn get(endpoint: &std::path::Path, url: &str) -> String {
    let mut stream = UnixStream::connect(endpoint).unwrap();
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    write!(stream, "GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn half_open_requests_and_a_reader_that_stalls_keep_nobody_from_the_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = dir.path().join("metrics.sock");
    let daemon = Local::with(|config| config.metrics = Some(MetricsAddress::Unix(endpoint.clone())));
    // Many requests at once, with unread answers: more than a socket's buffers hold.
    let mut stalled = UnixStream::connect(&endpoint).unwrap();
    stalled.set_write_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
    for _ in 0..1000 {
        if stalled.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").is_err() {
            break;
        }
    }
    let _half: Vec<_> = (0..300)
        .map(|_| {
            let mut stream = UnixStream::connect(&endpoint).unwrap();
            // One that was closed for a newcomer meanwhile has done its part.
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost:");
            stream
        })
        .collect();
    for _ in 0..3 {
        let text = get(&endpoint, "/metrics");
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("gshare_build_info"), "{text}");
    }
    let post = {
        let mut stream = UnixStream::connect(&endpoint).unwrap();
        stream.write_all(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    assert!(post.starts_with("HTTP/1.1 405"), "{post}");
    drop(daemon);
}

#[test]
fn a_flood_of_half_requests_by_a_user_closes_no_scrape_of_another() {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let Some(_daemon) = shared_by_all(|config| config.metrics = Some(MetricsAddress::Tcp(address))) else {
        return;
    };
    let scrape = || {
        let stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        stream
    };
    // It sends its request only after hundreds of others have come.
    let mut slow: Vec<_> = (0..3).map(|_| scrape()).collect();
    let (mut told, mut tell) = std::io::pipe().unwrap();
    let flood = Forked::run(Some(65_534), move || {
        let half = || {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost:");
            stream
        };
        let _held: Vec<_> = (0..300).map(|_| half()).collect();
        tell.write_all(b"x").unwrap();
        std::thread::sleep(common::PATIENCE);
    });
    told.read_exact(&mut [0]).unwrap();
    for stream in &mut slow {
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    }
    drop(flood);
}

#[test]
fn one_user_cannot_take_all_connections() {
    let Some(daemon) = shared_by_all(|config| config.max_connections = 16) else { return };
    let path = daemon.socket();
    let mut held: Vec<_> = (0..12).map(|_| Client::connect(&path)).collect();
    within(|| (daemon.snapshot().connections == 12).then_some(()));
    match Client::connect(&path).receive() {
        Some(ToClient::Refused { code: RefusalCode::Full, text }) => {
            assert!(text.starts_with("user 0 has 12 connections, and 12 of 16 are open"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    for uid in [65_533, 65_534] {
        let path = path.clone();
        let enters = move || drop(attached(&path, 2, &format!("user-{uid}"), ResourceSpec::UNLIMITED));
        assert!(Forked::run(Some(uid), enters).wait(), "user {uid}");
    }
    // Places that are given back can be had again.
    held.truncate(11);
    within(|| (daemon.snapshot().connections == 11).then_some(()));
    Client::connect(&path).enter(1, "flood", ResourceSpec::UNLIMITED);
}

/// Believed, the figure would fill the device, and no client could reserve anything.
#[test]
fn more_memory_than_the_device_has_is_not_believed() {
    let daemon = Local::start();
    let (mut bystander, id) = attached(&daemon.socket(), 1, "bystander", ResourceSpec::UNLIMITED);
    let mut liar = Client::connect(&daemon.socket());
    liar.enter(2, "liar", ResourceSpec::UNLIMITED);
    let (device, device_memory) = (common::DEVICE, common::DEVICE_MEMORY);
    let allocated = Bytes::from_gib(1 << 20);
    liar.send(&attach_to(0, device, device_memory, allocated));
    match liar.receive() {
        Some(ToClient::Refused { code: RefusalCode::BadSpec, text }) => {
            assert!(text.ends_with("is more than the device has: 1 GiB"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(bystander.reserve(id, Bytes::from_mib(512), Bytes::ZERO), Ok(Bytes::from_mib(512)));
}

/// A driver that knows one device, with twice the memory that its client states, as a MIG instance.
fn one_slice(uuid: DeviceUuid) -> Option<DeviceFact> {
    let slice = DeviceUuid::mig(common::DEVICE.bytes());
    (uuid == slice).then_some(DeviceFact::new(slice, Bytes::from_gib(2)))
}

/// Otherwise the first client says how much there is for everybody, and a device that it makes up fills the table.
#[test]
fn the_drivers_word_goes_before_a_clients_and_status_says_whose_it_is() {
    let daemon = Local::with_facts(one_slice);
    let (mut client, id) = attached(&daemon.socket(), 1, "alice", ResourceSpec::UNLIMITED);
    let device = daemon.snapshot().devices.remove(0);
    assert_eq!((device.memory_bytes, device.memory_source), (Bytes::from_gib(2), FactSource::Driver));
    assert!(device.uuid.starts_with("MIG-"), "{}", device.uuid);
    assert_eq!(client.reserve(id, Bytes::from_mib(1_536), Bytes::ZERO), Ok(Bytes::from_mib(1_536)));
    let other = DeviceUuid::gpu(*b"known to nobody!");
    let device_memory = Bytes::from_gib(3);
    client.send(&attach_to(1, other, device_memory, Bytes::ZERO));
    client.until(|message| matches!(message, ToClient::Attached { ordinal: 1, .. }).then_some(()));
    let device = daemon.snapshot().devices.remove(1);
    assert_eq!((device.memory_bytes, device.memory_source), (device_memory, FactSource::Client));
}

/// The daemon asked its driver in the loop: a process that named devices that there are not held up all others.
#[test]
fn a_driver_that_takes_long_to_know_a_device_holds_up_no_other_process() {
    let (daemon, answer) = {
        let (answer, slow) = std::sync::mpsc::channel::<()>();
        // It knows the tests' device at once, and of others says nothing until it may.
        let find = move |uuid| {
            if uuid == common::DEVICE {
                return Some(DeviceFact::new(uuid, common::DEVICE_MEMORY));
            }
            slow.recv().ok()?;
            None
        };
        // The driver answers when this ends, also by a panic: then the daemon can.
        (Local::with_facts(find), answer)
    };
    let (mut bystander, id) = attached(&daemon.socket(), 1, "bystander", spec("0.5", 100, None));
    let mut asker = Client::connect(&daemon.socket());
    asker.enter(2, "asker", ResourceSpec::UNLIMITED);
    let other = DeviceUuid::gpu(*b"known to no one!");
    for (ordinal, device) in [(0, other), (1, common::DEVICE)] {
        let (device_memory, allocated) = (common::DEVICE_MEMORY, Bytes::ZERO);
        asker.send(&attach_to(ordinal, device, device_memory, allocated));
    }
    bystander.ask(id);
    bystander.granted();
    assert_eq!(daemon.snapshot().devices.len(), 1, "the daemon itself waits for nothing");
    answer.send(()).unwrap();
    let ordinal = |frame: &ToClient| match frame {
        ToClient::Attached { ordinal, .. } => Some(*ordinal),
        _ => None,
    };
    assert_eq!(
        [asker.until(ordinal), asker.until(ordinal)],
        [0, 1],
        "in the order in which they were asked for"
    );
}

/// A daemon for all users; `None` where this process cannot become another user.
fn shared_by_all(change: impl FnOnce(&mut gshared::Config)) -> Option<Local> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return None;
    }
    let daemon = Local::with(|config| {
        config.allow_any_user = true;
        change(config);
    });
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(daemon.dir.path(), mode).unwrap();
    Some(daemon)
}

fn refused(path: &std::path::Path, run: u64, name: &str) -> (RefusalCode, String) {
    let mut client = Client::connect(path);
    client.hello(run, name, ResourceSpec::UNLIMITED);
    match client.receive() {
        Some(ToClient::Refused { code, text }) => (code, text),
        other => panic!("{other:?}"),
    }
}

/// A server starts as root and drops its privileges. The kernel names the later user at its next connection.
#[test]
fn a_process_that_has_become_another_user_comes_back_to_the_next_daemon_by_its_ticket() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let (path, ready) = (dir.path().join("gshare.sock"), dir.path().join("ready"));
    let daemon = || {
        let mut config = gshared::Config::at(path.clone());
        config.clients.entry("server".into()).or_default().user = Some(0);
        gshared::Daemon::new(config).unwrap().spawn().unwrap()
    };
    // The child begins first: otherwise it would hold the first daemon's lock.
    let (socket, told) = (path.clone(), ready.clone());
    let server = Forked::run(None, move || {
        let mut client = Client::connect_soon(&socket);
        client.enter(7, "server", ResourceSpec::UNLIMITED);
        client.attach(Bytes::ZERO);
        let (uid, ticket) = client.ticket.expect("a ticket");
        assert_eq!(uid, 0);
        std::fs::write(told, "").unwrap();
        common::become_user(65_534);
        client.rest();
        for ticket in [None, Some((uid, ticket ^ 1)), Some((1_000, ticket))] {
            let mut client = Client::connect_soon(&socket);
            ticket.into_iter().for_each(|ticket| client.resume(ticket));
            client.hello(7, "server", ResourceSpec::UNLIMITED);
            match client.receive() {
                Some(ToClient::Refused { code: RefusalCode::NotAllowed, text }) if text.contains("65534") => {
                }
                other => panic!("{other:?}"),
            }
        }
        let mut client = Client::connect_soon(&socket);
        client.resume((uid, ticket));
        client.enter(7, "server", ResourceSpec::UNLIMITED);
        client.attach(Bytes::ZERO);
        assert_eq!(client.ticket, Some((uid, ticket)));
    });
    let first = daemon();
    within(|| ready.exists().then_some(()));
    first.stop().unwrap();
    let next = daemon();
    assert!(server.wait());
    next.stop().unwrap();
}

/// The number of a run is in its environment, and hosts compute it from a name: it is no secret.
#[test]
fn another_user_cannot_join_a_run_nor_take_a_name_that_is_reserved() {
    let Some(daemon) =
        shared_by_all(|config| config.clients.entry("bob".into()).or_default().user = Some(1000))
    else {
        return;
    };
    let path = daemon.socket();
    let (_alice, _) = attached(&path, 7, "alice", ResourceSpec::UNLIMITED);
    let other = path.clone();
    let joins = move || {
        assert_eq!(refused(&other, 7, "alice").0, RefusalCode::DuplicateName);
        let (code, text) = refused(&other, 7, "bob");
        assert_eq!(
            (code, text.as_str()),
            (RefusalCode::NotAllowed, "name `bob` belongs to user 1000, not 65534")
        );
    };
    assert!(Forked::run(Some(65_534), joins).wait());
    attached(&path, 7, "alice", ResourceSpec::UNLIMITED);
    let owner = move || drop(attached(&path, 7, "bob", ResourceSpec::UNLIMITED));
    assert!(Forked::run(Some(1000), owner).wait());
}

/// One frame of another user under its name cost the next process of the name's owner up to hours.
#[test]
fn the_overuse_of_another_user_is_not_paid_back_by_the_owner_of_the_name() {
    let Some(daemon) = shared_by_all(|_| {}) else { return };
    let path = daemon.socket();
    let capped = spec("0.1:0.1", 100, None);
    let other = path.clone();
    let overuses = move || {
        let (mut client, id) = attached(&other, 7, "alice", capped);
        client.ask(id);
        client.granted();
        client.gives_back(id, gshare_core::Duration::from_secs(9), gshare_core::UseState::Idle);
    };
    assert!(Forked::run(Some(65_534), overuses).wait());
    within(|| daemon.snapshot().clients.is_empty().then_some(()));
    let (mut alice, id) = attached(&path, 8, "alice", capped);
    alice.ask(id);
    let throttled = alice.until(|message| match message {
        ToClient::Allow { .. } => Some(false),
        ToClient::Throttle { .. } => Some(true),
        _ => None,
    });
    assert!(!throttled);
}

#[test]
fn names_that_a_terminal_would_obey_are_refused_and_programs_are_escaped() {
    let daemon = Local::start();
    let mut client = Client::connect(&daemon.socket());
    client.hello(1, "a\u{1b}[2Jb", ResourceSpec::UNLIMITED);
    match client.receive() {
        Some(ToClient::Refused { code: RefusalCode::BadSpec, text }) => {
            assert_eq!(text, "name `a\\u{1b}[2Jb` has characters that cannot be printed");
        }
        other => panic!("{other:?}"),
    }
    let mut client = Client::connect(&daemon.socket());
    client.send(&ToDaemon::Hello {
        pid_start: 0,
        pid: 0,
        run: RunId::NONE,
        name: String::new(),
        program: "p\u{1b}]0;x\u{7}".into(),
        spec: spec("0.2:0.5", 100, None),
        on_loss: OnDaemonLoss::Open,
    });
    client.attach(Bytes::ZERO);
    let snapshot = daemon.snapshot();
    assert_eq!(snapshot.clients[0].program, "p\\u{1b}]0;x\\u{7}");
    assert_eq!(snapshot.clients[0].name, format!("p\\u{{1b}}]0;x\\u{{7}}-{}", std::process::id()));
}

/// As on a full disk, or where the directory is not mounted.
#[test]
fn without_a_place_for_its_journal_the_daemon_serves_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let daemon = Local::with(|config| config.journal = Some(JournalConfig::new(file.join("journal"))));
    let (mut client, id) = attached(&daemon.socket(), 1, "alice", ResourceSpec::UNLIMITED);
    client.ask(id);
    client.granted();
    let snapshot = daemon.snapshot();
    let why = snapshot.journal_failure.unwrap();
    assert!(why.contains(file.to_str().unwrap()), "{why}");
    assert!(snapshot.journal_lost >= 2, "{}", snapshot.journal_lost);
    let text = daemon.running.as_ref().unwrap().handle().metrics().unwrap();
    assert!(text.contains("gshare_journal_failed 1"), "{text}");
}

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/dist/gshared.service");

/// The service comes back after any number of failures, may reach the GPUs, and is hardened by systemd's own measure.
#[test]
fn the_unit_comes_back_and_is_hardened() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    for line in
        ["Restart=always", "StartLimitIntervalSec=0", "DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"]
    {
        assert!(unit.lines().any(|other| other == line), "{line}");
    }
    let capabilities = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    assert!(!capabilities.contains("SYS_"), "{capabilities}");
    let analyze = std::process::Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold=30", UNIT])
        .output();
    match analyze {
        Ok(output) => {
            let report = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "beyond 3.0: {report}");
        }
        Err(_) => eprintln!("not measured: systemd-analyze is not installed"),
    }
}
