//! `gshare why` on the journals of a daemon with a clock of the test's own, and of real processes.

use crate::common::{self, Client, Process, spec, within};
use crate::hooked;
use gshare_core::wire::{RefusalCode, ToClient, ToDaemon};
use gshare_core::{Bytes, Duration, Timestamp, UseState};
use gshared::config::JournalConfig;
use gshared::{Config, Daemon, ManualClock, Running};
use serde_json::{Value, json};
use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

fn why(journal: &Path, arguments: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_gshare")).arg("why").args(arguments).arg(journal).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn findings(journal: &Path, client: &str) -> Vec<Value> {
    let report: Value = serde_json::from_str(&why(journal, &["--client", client, "--json"])).unwrap();
    report["findings"].as_array().unwrap().clone()
}

/// A daemon whose time stands still until it is set.
struct Virtual {
    running: Running,
    clock: Arc<ManualClock>,
    socket: PathBuf,
    dir: tempfile::TempDir,
}

const BEGAN: u64 = 1_000;

impl Virtual {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("gshare.sock");
        let mut config = Config::at(&socket);
        config.journal = Some(JournalConfig::new(dir.path().join("journal")));
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(BEGAN)));
        let daemon = Daemon::builder(config).clock(Arc::clone(&clock) as _).build().unwrap();
        Self { running: daemon.spawn().unwrap(), clock, socket, dir }
    }

    /// Sets the clock to `ms` ms after the start. Frames that were sent before have been taken if one was answered.
    fn at(&self, ms: u64) {
        self.clock.set(Timestamp::from_millis(BEGAN + ms));
        self.running.handle().wake();
    }

    fn stop(self) -> tempfile::TempDir {
        self.running.stop().unwrap();
        self.dir
    }
}

fn throttled(client: &mut Client) -> Timestamp {
    client.until(|message| match message {
        ToClient::Throttle { until, .. } => Some(*until),
        ToClient::Allow { .. } => panic!("{message:?}"),
        _ => None,
    })
}

const MS: u64 = 1_000_000;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// One finding of a rule, its begin and end in ms since the start, and its figures.
fn of_rule<'a>(findings: &'a [Value], rule: &str) -> (u64, Option<u64>, &'a Value) {
    let all: Vec<_> = findings.iter().filter(|finding| finding["rule"] == rule).collect();
    let [finding] = all[..] else { panic!("one {rule}: {findings:#?}") };
    let ms = |key: &str| finding[key].as_u64().map(|ns| ns / MS - BEGAN);
    (ms("from_ns").unwrap(), ms("until_ns"), finding)
}

#[test]
fn each_wait_denial_and_refusal_has_its_rule_its_figures_and_its_end() {
    let daemon = Virtual::start();
    let share = spec("0.2", 100, Some(64));
    let mut alice = Client::connect(&daemon.socket);
    alice.enter(1, "alice", share);
    // The only process of a run does not wait for siblings, though the daemon has just begun and its clock stands.
    let (device, device_memory, part) = (common::DEVICE, common::DEVICE_MEMORY, Some(common::DEVICE_MEMORY));
    let (used, allowed) = (Duration::ZERO, Duration::ZERO);
    let allocated = Bytes::ZERO;
    alice.send(&ToDaemon::Attach { ordinal: 0, device, device_memory, allocated, part, used, allowed });
    let id = alice.until(|message| match message {
        ToClient::Attached { client, .. } => Some(*client),
        _ => None,
    });
    // The limit of this window is used up at 10 ms, by a kernel that ran over: 30 ms of 20.
    alice.ask(id);
    alice.granted();
    daemon.at(10);
    alice.gives_back(id, ms(30), UseState::Wants);
    assert_eq!(throttled(&mut alice), Timestamp::from_millis(BEGAN + 100));
    // 10 ms are carried into the next window: half of its limit, to be paid back in half of the window.
    daemon.at(100);
    within(|| {
        (daemon.running.handle().snapshot().unwrap().clients[0].window_used_ns.as_nanos() == 10 * MS)
            .then_some(())
    });
    daemon.at(150);
    alice.granted();
    // Another client holds the token when she wants hers; it is given back at 160 ms.
    alice.gives_back(id, ms(1), UseState::Idle);
    let (mut bob, other) = common::attached(&daemon.socket, 2, "bob", spec("0.3", 60, None));
    bob.ask(other);
    bob.granted();
    daemon.at(152);
    alice.ask(id);
    assert_eq!(alice.reserve(id, Bytes::from_mib(40), Bytes::ZERO), Ok(Bytes::from_mib(40)));
    assert_eq!(alice.reserve(id, Bytes::from_mib(60), Bytes::ZERO), Err(Bytes::from_mib(24)));
    // A client that holds memory is asked about it before a snapshot, and this one does not answer.
    alice.send(&ToDaemon::MemoryRelease { client: id, bytes: Bytes::from_mib(40) });
    daemon.at(160);
    bob.gives_back(other, ms(8), UseState::Idle);
    alice.granted();
    // Another run of her name; and then 321 ms too much, at the end of the process.
    let mut second = Client::connect(&daemon.socket);
    second.hello(9, "alice", share);
    assert!(matches!(second.receive(), Some(ToClient::Refused { code: RefusalCode::DuplicateName, .. })));
    alice.gives_back(id, ms(322), UseState::Idle);
    daemon.running.handle().snapshot().unwrap();
    drop(alice);
    within(|| (daemon.running.handle().snapshot().unwrap().clients.len() == 1).then_some(()));
    let (mut again, id) = common::attached(&daemon.socket, 3, "alice", share);
    again.ask(id);
    let resumes = throttled(&mut again).as_nanos() / MS - BEGAN;
    daemon.at(resumes);
    again.granted();
    let mut greedy = Client::connect(&daemon.socket);
    greedy.enter(4, "greedy", spec("0.6", 100, None));
    greedy.send(&ToDaemon::Attach {
        ordinal: 0,
        device: common::DEVICE,
        device_memory: common::DEVICE_MEMORY,
        allocated: Bytes::ZERO,
        part: None,
        used: Duration::ZERO,
        allowed: Duration::ZERO,
    });
    assert!(matches!(greedy.receive(), Some(ToClient::Refused { code: RefusalCode::BadSpec, .. })));
    let dir = daemon.stop();
    let journal = dir.path().join("journal");

    let all = findings(&journal, "alice");
    let (from, until, throttle) = of_rule(&all, "throttle");
    assert_eq!((from, until), (10, Some(100)));
    assert_eq!((&throttle["used_ns"], &throttle["limit"]), (&json!(30 * MS), &json!("20%")));
    assert!(throttle["until"].as_str().unwrap().contains("not before +0.100000s"), "{throttle}");
    let (from, until, paced) = of_rule(&all, "paced_wait");
    assert_eq!((from, until, &paced["used_ns"]), (100, Some(150), &json!(10 * MS)));
    let (from, until, holder) = of_rule(&all, "wait_for_holder");
    assert_eq!((from, until, &holder["holders"]), (152, Some(160), &json!(["bob (60%)"])));
    let (from, _, denial) = of_rule(&all, "memory_denial");
    assert_eq!((from, &denial["of"], &denial["asked_bytes"]), (152, &json!("instance"), &json!(60 << 20)));
    assert!(denial["until"].as_str().unwrap().contains("36 MiB more"), "{denial}");
    let (from, _, refusal) = of_rule(&all, "refusal");
    assert_eq!((from, &refusal["code"]), (160, &json!("DuplicateName")));
    let (from, until, debt) = of_rule(&all, "debt_wait");
    assert_eq!((from, until), (160, Some(resumes)));
    let owed = debt["owed_ns"].as_u64().unwrap();
    assert_eq!(owed * 5 / MS, resumes - 160, "at 20 % of the time");
    let begins: Vec<_> = all.iter().map(|finding| finding["from_ns"].as_u64().unwrap()).collect();
    assert!(begins.is_sorted_by(|a, b| a >= b), "the last first: {begins:?}");

    let at = |at: &str| why(&journal, &["--client", "alice", "--at", at]);
    assert!(at("50ms").starts_with("+0.010000s client0.0 throttle: 30ms used, overuse"), "{}", at("50ms"));
    assert!(at("120ms").contains("paced wait: 10ms"), "{}", at("120ms"));
    assert!(at("155ms").contains("tokens are held by bob (60%), and 100% of the SMs"), "{}", at("155ms"));
    assert!(at("5s").contains("debt wait"), "nothing holds her up: the last that did");
    let text = why(&journal, &["--client", "greedy"]);
    assert!(text.contains("refusal (BadSpec): request 60% does not fit: 50% taken"), "{text}");
    assert!(text.contains("until requests of others leave"), "{text}");
    assert_eq!(why(&journal, &["--client", "bob"]), "nothing held bob up in this journal\n");
}

/// A program that computes for `ms`, once at its start and once for each line.
fn program(dir: &Path, socket: &Path, options: &[&str], ms: &str) -> Child {
    let mut command = hooked::run(dir, socket, options);
    command.arg(env!("CARGO_BIN_EXE_gshare-fixture")).args(["spin", "--answer", "1", "--kernel-ms", ms]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_journal_of_real_processes_says_what_held_them_up() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal");
    let mut daemon = Process::start(dir.path(), &format!("[journal]\ndir = '{}'\n", journal.display()));
    // Kernels of 30 ms, and 20 ms of a window may be used: the rest is carried into the next one, and paid back in a part of it.
    let mut paced = program(dir.path(), &daemon.socket(), &["--name", "carol", "--quota", "0.2"], "30");
    paced.stdin.as_mut().unwrap().write_all(&[b'\n'; 100]).unwrap();
    let is_over = |finding: &Value| finding["rule"] == "paced_wait" && !finding["until_ns"].is_null();
    let pause = within(|| findings(&journal, "carol").into_iter().find(is_over));
    paced.kill().unwrap();
    paced.wait().unwrap();
    let ns = |key: &str| pause[key].as_u64().unwrap();
    assert!((1..=100 * MS).contains(&ns("used_ns")) && pause["limit"] == "20%", "{pause}");
    let lasts = ns("until_ns") - ns("from_ns");
    assert!(
        lasts < ns("window_ns") && pause["until"].as_str().unwrap().contains(" (granted, after "),
        "{pause}"
    );
    within(|| daemon.snapshot().clients.is_empty().then_some(()));
    let options = ["--name", "alice", "--quota", "0.2", "--mem", "64MiB"];
    // A kernel of 400 ms at a limit of 20 %: the next one waits, and so does the next process of the name.
    let mut first = program(dir.path(), &daemon.socket(), &options, "400");
    let mut ready = String::new();
    std::io::BufReader::new(first.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");
    writeln!(first.stdin.as_mut().unwrap(), "1").unwrap();
    let client = || daemon.snapshot().clients.into_iter().find(|client| client.name == "alice");
    within(|| client().filter(|own| own.waiting_ns.is_some() && own.total_used_ns.as_nanos() >= 400 * MS));
    // Meanwhile one asks for more than is left; the journal is read while it is written.
    let greedy = ["--name", "greedy", "--quota", "0.9"];
    let mut greedy = program(dir.path(), &daemon.socket(), &greedy, "1");
    let refusals = || findings(&journal, "greedy");
    let refusal = within(|| refusals().into_iter().next());
    greedy.kill().unwrap();
    greedy.wait().unwrap();
    assert_eq!((&refusal["rule"], &refusal["code"]), (&json!("refusal"), &json!("BadSpec")));
    let text = refusal["text"].as_str().unwrap();
    assert!(text.starts_with("request 90% does not fit: 20% taken, 0% reserved"), "{text}");
    assert!(refusal["until"].as_str().unwrap().starts_with("until requests of others leave"), "{refusal}");
    first.kill().unwrap();
    first.wait().unwrap();
    within(|| client().is_none().then_some(()));
    let mut next = program(dir.path(), &daemon.socket(), &options, "1");
    within(|| client().filter(|own| own.waiting_ns.is_some()));
    next.kill().unwrap();
    next.wait().unwrap();
    within(|| client().is_none().then_some(()));
    let mut large = hooked::run(dir.path(), &daemon.socket(), &options);
    large.arg(env!("CARGO_BIN_EXE_gshare-fixture")).args(["spin", "--answer", "1", "--memory", "128MiB"]);
    assert!(!large.output().unwrap().status.success(), "more than its limit");
    daemon.signal(rustix::process::Signal::TERM);
    daemon.child.wait().unwrap();

    let all = findings(&journal, "alice");
    let find = |rule: &str| {
        let found = all.iter().find(|finding| finding["rule"] == rule);
        found.unwrap_or_else(|| panic!("no {rule}: {all:#?}"))
    };
    let throttle = find("throttle");
    assert!(throttle["used_ns"].as_u64().unwrap() >= 20 * MS && throttle["limit"] == "20%", "{throttle}");
    assert!(throttle["until"].as_str().unwrap().contains("not before +"), "{throttle}");
    let debt = find("debt_wait");
    assert!(debt["owed_ns"].as_u64().unwrap() > 0 && debt["limit"] == "20%", "{debt}");
    assert!(debt["until"].as_str().unwrap().contains("not before +"), "{debt}");
    let denial = find("memory_denial");
    assert_eq!((&denial["of"], &denial["limit_bytes"]), (&json!("instance"), &json!(64 << 20)));
    assert_eq!(denial["until"], "for good: the instance has no more than 64 MiB");
    let text = why(&journal, &["--client", "alice"]);
    assert_eq!(text.lines().count(), all.len(), "{text}");
}
