//! Death, restart and reload, with real processes.

use crate::common::{self, Client, Forked, PATIENCE, Process, attached, spec, within};
use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{Bytes, Duration, ResourceSpec, TokenAction, TokenEvent, UseState};
use gshare_sched::node::NodeEvent;
use gshared::journal;
use gshared::journal::TokenStep;
use rustix::process::Signal;
use std::path::Path;
use std::time::Instant;

fn config(dir: &Path) -> String {
    format!("[journal]\ndir = '{}'\nactions = true\n", dir.join("journal").display())
}

#[test]
fn a_killed_holder_loses_its_token_at_once_and_no_token_is_lost_or_doubled() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), &config(dir.path()));
    let path = daemon.socket();
    let (mut survivor, id) = attached(&path, 1, "survivor", ResourceSpec::UNLIMITED);
    for round in 0..20u64 {
        let (tell, told) = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = path.clone();
        let victim = Forked::run(None, move || {
            let (mut client, id) = attached(&socket, 2 + round, "victim", ResourceSpec::UNLIMITED);
            client.ask(id);
            client.granted();
            std::io::Write::write_all(&mut &tell, b"x").unwrap();
            std::thread::sleep(10 * PATIENCE);
        });
        std::io::Read::read_exact(&mut &told, &mut [0]).unwrap();
        survivor.ask(id);
        victim.kill();
        survivor.granted();
        survivor.gives_back(id, Duration::from_micros(10), UseState::Idle);
        drop(victim);
        within(|| (daemon.snapshot().clients.len() == 1).then_some(()));
    }
    let lines = common::journal_lines(dir.path());
    common::replays_to_the_same_actions(&lines);
    // One holder at a time, as each takes all SMs.
    let (mut holder, mut tokens) = (None, 0);
    for step in lines.iter().flat_map(journal::Line::tokens) {
        match step {
            TokenStep::TokenEvent {
                token:
                    TokenEvent::Used { client, state: UseState::Idle | UseState::Wants, .. }
                    | TokenEvent::ClientLeft { client },
            } if holder == Some(client) => holder = None,
            TokenStep::TokenOrder { order: TokenAction::Allow { client, .. } } => {
                tokens += u32::from(holder.is_none());
                assert_eq!(*holder.get_or_insert(client), client, "two holders");
            }
            TokenStep::TokenOrder { order: TokenAction::Stop { client } } if holder == Some(client) => {
                holder = None;
            }
            _ => {}
        }
    }
    assert!(tokens >= 40);
}

#[test]
fn a_killed_daemon_leaves_its_journal_and_the_next_one_takes_its_clients() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Process::start(dir.path(), &config(dir.path()));
    let path = daemon.socket();
    let mut epochs = Vec::new();
    let mut client = Client::connect(&path);
    epochs.push(client.enter(1, "alice", spec("0.5:1", 100, Some(256))));
    let (mut id, _) = client.attach(Bytes::ZERO);
    assert_eq!(client.reserve(id, Bytes::from_mib(64), Bytes::ZERO), Ok(Bytes::from_mib(64)));
    for restart in 1..=5 {
        client.ask(id);
        client.granted();
        daemon.signal(Signal::KILL);
        while client.receive().is_some() {}
        drop(daemon);
        daemon = Process::start(dir.path(), &config(dir.path()));
        let start = Instant::now();
        client = Client::connect_soon(&path);
        epochs.push(client.enter(1, "alice", spec("0.5:1", 100, Some(256))));
        (id, _) = client.attach(Bytes::from_mib(64));
        eprintln!("restart {restart}: registered again after {:?}", start.elapsed());
        assert_eq!(daemon.snapshot().devices[0].held_bytes, Bytes::from_mib(64));
        assert_eq!(client.reserve(id, Bytes::from_mib(193), Bytes::ZERO), Err(Bytes::from_mib(192)));
    }
    assert!(epochs.windows(2).all(|pair| pair[0] < pair[1]), "{epochs:?}");
    let files = journal::segments(&dir.path().join("journal")).unwrap();
    assert_eq!(files.len(), 6);
    let expects =
        |file| journal::read(file).unwrap().next().unwrap().unwrap().node.unwrap()["predecessor"].clone();
    let expects: Vec<_> = files.iter().map(|file| expects(file)).collect();
    assert_eq!(expects, [false, true, true, true, true, true], "a killed daemon is known to its successor");
    for file in &files[..5] {
        let lines: Vec<_> = journal::read(file).unwrap().map(Result::unwrap).collect();
        common::replays_to_the_same_actions(&lines);
        let asks = |line: &&journal::Line| {
            let event = line.event().unwrap();
            matches!(event, Some(NodeEvent::Received { frame: ToDaemon::Use { .. }, .. }))
        };
        let asked = lines.iter().filter(asks);
        assert_eq!(asked.count(), 1, "what was handled is in the journal");
    }
}

#[test]
fn a_reload_changes_shares_live_and_a_bad_one_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "[[client]]\nname = 'alice'\nquota = '0.2:0.5'\n");
    let file = dir.path().join("gshared.toml");
    let mut client = Client::connect(&daemon.socket());
    client.enter(1, "alice", ResourceSpec::UNLIMITED);
    let (_, first) = client.attach(Bytes::ZERO);
    assert_eq!(first.quota().to_string(), "20%:50%");
    let reload = |text: &str| {
        std::fs::write(&file, text).unwrap();
        daemon.signal(Signal::HUP);
    };
    let bad = [
        (
            "[[client]]\nname = 'alice'\nquota = '0.9:0.5'\n",
            "line 3: client `alice`: quota: quota request 90%",
        ),
        ("colour = 'red'\n", "unknown field `colour`"),
        ("[[client]]\nname = 'a'\n[[client]]\nname = 'a'\n", "two clients of one name"),
        (
            "[[client]]\nname = 'alice'\nmemory = '2GiB'\n",
            "client `alice`: memory is 2 GiB: need at most the device's 1 GiB",
        ),
        ("window = '50ms'\n", "cannot change while the daemon runs"),
    ];
    for (text, complaint) in bad {
        reload(text);
        within(|| daemon.log().contains(complaint).then_some(()));
    }
    assert_eq!(daemon.log().matches("the old configuration stays in force").count(), bad.len());
    assert_eq!(daemon.snapshot().clients[0].quota_limit, 0.5);
    reload("[[client]]\nname = 'alice'\nquota = '0.3:0.8'\nmemory = '10MiB'\n");
    let changed = client.until(|message| match message {
        ToClient::ShareChanged { spec, .. } => Some(*spec),
        _ => None,
    });
    assert_eq!(changed.quota().to_string(), "30%:80%");
    assert_eq!(changed.memory(), Some(Bytes::from_mib(10)));
    let text = gshared::admin::metrics(&dir.path().join("gshare-admin.sock")).unwrap();
    assert!(text.contains("gshare_reloads_total{result=\"refused\"} 5"), "{text}");
    assert!(text.contains("gshare_reloads_total{result=\"done\"} 1"), "{text}");
}

#[test]
fn a_terminated_daemon_leaves_nothing_but_its_journal() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Process::start(dir.path(), &config(dir.path()));
    let (mut client, id) = attached(&daemon.socket(), 1, "alice", ResourceSpec::UNLIMITED);
    client.ask(id);
    client.granted();
    daemon.signal(Signal::TERM);
    assert!(daemon.child.wait().unwrap().success());
    assert!(!daemon.socket().exists() && !dir.path().join("gshare-admin.sock").exists());
    // A process was connected, and may come to the next daemon; that one has none, and leaves no trace.
    let left = dir.path().join("gshare.sock.left");
    assert!(left.exists());
    let mut next = Process::start(dir.path(), "");
    next.signal(Signal::TERM);
    assert!(next.child.wait().unwrap().success() && !left.exists());
    let file = &journal::segments(&dir.path().join("journal")).unwrap()[0];
    assert_eq!(std::fs::read(file).unwrap().last(), Some(&b'\n'), "cut to its length");
    common::replays_to_the_same_actions(&common::journal_lines(dir.path()));
}

#[test]
fn a_bad_configuration_is_refused_before_anything_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gshared.toml");
    std::fs::write(&file, "[[client]]\nname = 'alice'\nsm = 0\n").unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_gshared"))
        .arg("--config")
        .arg(&file)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(text.contains("gshared.toml: line 3: client `alice`: sm: SM partition is 0"), "{text}");
}

#[test]
fn a_thousand_clients_fit_in_thirty_mebibytes() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), &config(dir.path()));
    let mut clients = Vec::new();
    for target in [64, 1_024] {
        while clients.len() < target {
            let n = clients.len() as u64;
            clients.push(attached(&daemon.socket(), n, &format!("client-{n}"), spec("0.0001:1", 1, Some(1))));
        }
        for (client, id) in &mut clients {
            client.ask(*id);
            // Its answer says that the request before it was handled.
            assert!(client.reserve(*id, Bytes(1), Bytes(1)).is_ok());
        }
        let rss = daemon.rss();
        eprintln!("RSS with {target} clients: {rss} KiB");
        assert!(rss <= 30 << 10, "{rss} KiB with {target} clients");
    }
}
