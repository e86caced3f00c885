//! `gshare why` on a daemon with a clock of the test's own, and on real processes.

use crate::common::{self, Client, Process, spec, within};
use crate::hooked;
use gshare_core::reason::{RefusalCode, Wait};
use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{Bytes, Duration, Timestamp};
use gshared::config::JournalConfig;
use gshared::{Config, Daemon, ManualClock, Running};
use serde_json::Value;
use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

fn why(socket: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    command.env_remove("GSHARE_SOCKET").args(["why", "--socket"]).arg(socket).args(arguments);
    command.output().unwrap()
}

fn said(socket: &Path, arguments: &[&str]) -> String {
    let output = why(socket, arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn refused(socket: &Path, arguments: &[&str]) -> String {
    let output = why(socket, arguments);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn findings(socket: &Path, arguments: &[&str]) -> Vec<Value> {
    let report: Value = serde_json::from_str(&said(socket, &[arguments, &["--json"]].concat())).unwrap();
    report["findings"].as_array().unwrap().clone()
}

/// A daemon on a clock which moves only when set.
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
}

const MS: u64 = 1_000_000;

/// The one finding with this reason; its begin and end in ms since the start.
fn of_reason<'a>(findings: &'a [Value], reason: &str) -> (u64, Option<u64>, &'a str) {
    let all: Vec<_> = findings.iter().filter(|finding| finding["reason"] == reason).collect();
    let [finding] = all[..] else { panic!("one {reason}: {findings:#?}") };
    let ms = |key: &str| finding[key].as_u64().map(|ns| ns / MS - BEGAN);
    (ms("from_ns").unwrap(), ms("ended_ns"), finding["text"].as_str().unwrap())
}

#[test]
fn waits_denials_and_refusals_are_told_now_and_from_the_journal() {
    let daemon = Virtual::start();
    let socket = daemon.socket.clone();
    let share = spec("0.2", 100, Some(64));
    let mut alice = Client::connect(&socket);
    alice.enter(1, "alice", share);
    let (device, device_memory, part) = (common::DEVICE, common::DEVICE_MEMORY, Some(common::DEVICE_MEMORY));
    let (used, allowed) = (Duration::ZERO, Duration::ZERO);
    let allocated = Bytes::ZERO;
    alice.send(&ToDaemon::Attach { ordinal: 0, device, device_memory, allocated, part, used, allowed });
    let id = alice.until(|message| match message {
        ToClient::Attached { client, .. } => Some(*client),
        _ => None,
    });
    assert_eq!(said(&socket, &["alice"]), "nothing holds alice up\n");
    let (mut bob, other) = common::attached(&socket, 2, "bob", spec("0.3", 60, None));
    bob.ask(other);
    bob.granted();
    alice.ask(id);
    daemon.at(10);
    alice.send(&ToDaemon::Waiting { client: id, reason: Some(Wait::Token) });
    assert_eq!(alice.reserve(id, Bytes::from_mib(60), Bytes::ZERO), Ok(Bytes::from_mib(60)));
    assert_eq!(alice.reserve(id, Bytes::from_mib(60), Bytes::ZERO), Err(Bytes::from_mib(4)));
    alice.send(&ToDaemon::MemoryRelease { client: id, bytes: Bytes::from_mib(60) });
    daemon.at(12);
    // She waits for bob, since she asked; the denial is told as well.
    let now = findings(&socket, &["alice"]);
    let (from, ended, text) = of_reason(&now, "holder");
    assert_eq!((from, ended), (0, None));
    assert!(text.contains("tokens are held by bob (60%), and it needs 100% of the SMs"), "{text}");
    let (from, _, text) = of_reason(&now, "instance_memory");
    assert!(from == 10 && text.contains("until 56 MiB more of the instance's memory are released"), "{text}");
    let mut second = Client::connect(&socket);
    second.hello(9, "alice", share);
    assert!(matches!(second.receive(), Some(ToClient::Refused { code: RefusalCode::DuplicateName, .. })));
    // What only the process knows; and then the wait is over.
    daemon.at(30);
    alice.send(&ToDaemon::Waiting { client: id, reason: None });
    // Its answer says that the frame before it was taken.
    alice.reserve(id, Bytes(1), Bytes::ZERO).unwrap();
    daemon.at(40);
    alice.send(&ToDaemon::Waiting { client: id, reason: Some(Wait::Measuring) });
    alice.reserve(id, Bytes(1), Bytes::ZERO).unwrap();
    daemon.at(50);
    drop(alice);
    within(|| (daemon.running.handle().snapshot().unwrap().clients.len() == 1).then_some(()));
    let past = findings(&socket, &["alice", "--since", "1s"]);
    let (from, ended, _) = of_reason(&past[1..], "holder");
    assert_eq!((from, ended), (0, Some(30)));
    let begins: Vec<_> = past.iter().map(|finding| finding["from_ns"].as_u64().unwrap()).collect();
    assert!(begins.is_sorted_by(|a, b| a >= b) && past.len() == 4, "the last first: {past:#?}");
    assert_eq!(of_reason(&past, "duplicate_name").0, 12);
    // Times count back from now: 50 ms.
    let at = |ago: &str| said(&socket, &["alice", "--at", ago]);
    assert!(at("25ms").contains("waited for 30ms [holder]"), "{}", at("25ms"));
    assert!(said(&socket, &["--since", "1s"]).lines().count() == past.len());
    let text = refused(&socket, &["alicia"]);
    assert!(text.contains("no client `alicia`: known are alice, bob"), "{text}");
    assert_eq!(said(&socket, &["bob", "--since", "1s"]), "nothing held bob up\n");
    // A daemon that has ended leaves its journal.
    let Virtual { running, dir, .. } = daemon;
    running.stop().unwrap();
    let journal = dir.path().join("journal");
    assert_eq!(findings(&socket, &["alice", "--journal", journal.to_str().unwrap()]), past);
}

/// A program that computes for `ms`, once at its start and once for each line.
fn program(dir: &Path, socket: &Path, options: &[&str], ms: &str) -> Child {
    let mut command = hooked::run(dir, socket, options);
    command.arg(env!("CARGO_BIN_EXE_gshare-fixture")).args(["spin", "--answer", "1", "--kernel-ms", ms]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn real_processes_are_found_by_their_names_and_by_the_pid_of_what_started_them() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal");
    let daemon = Process::start(dir.path(), &format!("[journal]\ndir = '{}'\n", journal.display()));
    let socket = daemon.socket();
    let text = refused(&socket, &[&std::process::id().to_string()]);
    assert!(
        text.contains("its children are no clients of the daemon (it was started without the hook)"),
        "{text}"
    );
    assert!(
        refused(&socket, &["4194305"]).contains("no process 4194305"),
        "beyond the largest of all kernels"
    );
    let options = ["--name", "alice", "--quota", "0.2", "--mem", "64MiB"];
    // A kernel of 400 ms at a limit of 20 %: the next one waits.
    let mut first = program(dir.path(), &socket, &options, "400");
    let mut ready = String::new();
    std::io::BufReader::new(first.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");
    writeln!(first.stdin.as_mut().unwrap(), "1").unwrap();
    let pid = first.id().to_string();
    let is_limit = |finding: &Value| finding["reason"] == "limit" && finding["until_ns"].is_number();
    let now = within(|| findings(&socket, &[&pid]).into_iter().find(is_limit));
    assert_eq!(now["name"], "alice");
    // Meanwhile one asks for more than is left: it is refused, and is no client.
    let mut greedy = program(dir.path(), &socket, &["--name", "greedy", "--quota", "0.9"], "1");
    let refusal = within(|| findings(&socket, &[]).into_iter().find(|finding| finding["name"] == "greedy"));
    greedy.kill().unwrap();
    greedy.wait().unwrap();
    let text = refusal["text"].as_str().unwrap();
    assert!(
        refusal["reason"] == "bad_spec" && text.contains("request 90% does not fit: 20% taken"),
        "{text}"
    );
    assert!(text.contains("until requests of others leave"), "{text}");
    let told = |finding: &Value| finding["reason"] == "limit" && finding["name"] == "alice";
    within(|| findings(&socket, &["alice", "--since", "600s"]).into_iter().find(told));
    first.kill().unwrap();
    first.wait().unwrap();
    within(|| daemon.snapshot().clients.is_empty().then_some(()));
    let mut large = hooked::run(dir.path(), &socket, &options);
    large.arg(env!("CARGO_BIN_EXE_gshare-fixture")).args(["spin", "--answer", "1", "--memory", "128MiB"]);
    assert!(!large.output().unwrap().status.success(), "more than its limit");
    let text = said(&socket, &["alice"]);
    assert!(
        text.contains("[instance_memory]") && text.contains("for good: the instance has no more than 64 MiB"),
        "{text}"
    );
}
