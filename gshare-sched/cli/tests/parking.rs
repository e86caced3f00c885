//! `gshare run --park` and the orders to park: a warm program without its device memory.

use crate::common::{Process, within};
use fake_cuda::sim::SimDevice;
use gshare_core::Bytes;
use gshare_core::reason::Obstacle;
use gshare_core::wire::Residence;
use gshared::ClientSnapshot;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Output, Stdio};

const MEMORY: Bytes = Bytes::from_mib(64);

/// A program that computes for each line of its input, and answers.
struct Server {
    process: Child,
    input: Option<ChildStdin>,
    answers: BufReader<std::process::ChildStdout>,
}

impl Server {
    fn start(dir: &Path, socket: &Path, name: &str, options: &[&str]) -> Self {
        Self::with((MEMORY, "--sim=tiny,devices=1"), dir, socket, name, options)
    }

    fn with((memory, sim): (Bytes, &str), dir: &Path, socket: &Path, name: &str, options: &[&str]) -> Self {
        let memory = memory.get().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
        command
            .args(["run", sim, "--name", name, "--socket", socket.to_str().unwrap()])
            .args(options)
            .args(["--", env!("CARGO_BIN_EXE_gshare-fixture"), "spin", "--memory", &memory, "--answer", "1"])
            .env("GSHARE_SIM_DEVICE", dir.join("device"))
            .env_remove("GSHARE_SOCKET")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        answers.read_line(&mut String::new()).unwrap();
        Self { input: process.stdin.take(), process, answers }
    }

    fn computes(&mut self) {
        self.launches(3);
    }

    fn launches(&mut self, kernels: u32) {
        writeln!(self.input.as_mut().unwrap(), "{kernels}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert_eq!(line, "done\n");
    }

    fn ends(mut self) {
        drop(self.input.take());
        assert!(self.process.wait().unwrap().success());
    }
}

fn gshare(socket: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    command.args(words).arg("--socket").arg(socket).output().unwrap()
}

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn client(daemon: &Process, name: &str) -> ClientSnapshot {
    within(|| daemon.snapshot().clients.into_iter().find(|client| client.name == name))
}

fn used(dir: &Path) -> u64 {
    let device = SimDevice::open(&dir.join("device"), &fake_cuda::Spec::default()).unwrap();
    device.truth().gpus[0].memory_used_bytes
}

#[test]
fn a_parked_program_comes_back_when_it_launches_and_another_has_its_memory_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let socket = daemon.socket();
    let mut alice = Server::start(dir.path(), &socket, "alice", &["--park", "--mem", "256MiB"]);
    within(|| (client(&daemon, "alice").parking?.bytes == MEMORY).then_some(()));
    let before = used(dir.path());
    let parked = gshare(&socket, &["daemon", "park", "alice"]);
    assert!(
        parked.status.success() && told(&parked).starts_with("alice: 64 MiB in host memory after "),
        "{parked:?}"
    );
    assert_eq!(before - used(dir.path()), MEMORY.0);
    let status = told(&gshare(&socket, &["status"]));
    assert!(status.contains("parked 64 MiB"), "{status}");
    let why = told(&gshare(&socket, &["why", "alice"]));
    assert!(why.starts_with("alice (pid ") && why.contains(" has been parked for "), "{why}");
    assert!(
        why.contains("64 MiB by order of root or the daemon's user; it comes back when it launches"),
        "{why}"
    );
    let snapshot = daemon.snapshot();
    let held = snapshot.devices[0].held_bytes;
    assert!(held < MEMORY, "the account is free for others: {held}");
    alice.computes();
    assert_eq!(used(dir.path()), before, "its memory is back");
    within(|| (client(&daemon, "alice").parking?.residence == Residence::Resident).then_some(()));
    let unparked = gshare(&socket, &["daemon", "unpark", "alice"]);
    assert_eq!(told(&unparked), "alice: its memory is on the device already\n");
    assert!(gshare(&socket, &["daemon", "park", "alice"]).status.success());
    let unparked = gshare(&socket, &["daemon", "unpark", "alice"]);
    assert!(told(&unparked).starts_with("alice: 64 MiB on the device after "), "{}", told(&unparked));
    assert_eq!(used(dir.path()), before);
    alice.ends();
}

#[test]
fn a_refusal_to_park_says_why_and_the_program_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "park_memory = '32MiB'");
    let socket = daemon.socket();
    let refused = |name: &str| {
        let output = gshare(&socket, &["daemon", "park", name]);
        assert!(!output.status.success() && output.stdout.is_empty());
        told(&output)
    };
    assert!(refused("nobody").contains("no client is named `nobody`"));
    let mut plain = Server::start(dir.path(), &socket, "plain", &[]);
    assert!(refused("plain").contains("`plain` cannot be parked: start it with `gshare run --park`"));
    let mut alice = Server::start(dir.path(), &socket, "alice", &["--park"]);
    within(|| (client(&daemon, "alice").parking?.bytes == MEMORY).then_some(()));
    let why = refused("alice");
    assert!(why.contains("needs 64 MiB of host memory, and 0 B of 32 MiB are taken"), "{why}");
    plain.computes();
    alice.computes();
    plain.ends();
    alice.ends();
    // A program that sees two devices is told so, and so is the operator.
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    command
        .args(["run", "--sim=tiny", "--park", "--name", "bob", "--socket", socket.to_str().unwrap(), "--"])
        .args([env!("CARGO_BIN_EXE_gshare-fixture"), "spin", "--answer", "1"])
        .env("GSHARE_SIM_DEVICE", dir.path().join("another"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut bob = command.spawn().unwrap();
    within(|| (client(&daemon, "bob").parking?.obstacle == Some(Obstacle::Devices)).then_some(()));
    assert!(told(&gshare(&socket, &["status"])).contains("unparkable: it sees several devices"));
    assert!(refused("bob").contains("`bob` has no memory that can move: it sees several devices"));
    drop(bob.stdin.take());
    bob.wait().unwrap();
}

/// The process keeps its memory in the host over the restart, and the new daemon brings it back.
#[test]
fn a_parked_program_outlives_its_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let mut alice = Server::start(dir.path(), &daemon.socket(), "alice", &["--park", "--mem", "256MiB"]);
    within(|| (client(&daemon, "alice").parking?.bytes == MEMORY).then_some(()));
    assert!(gshare(&daemon.socket(), &["daemon", "park", "alice"]).status.success());
    let parked = used(dir.path());
    drop(daemon);
    let daemon = Process::start(dir.path(), "");
    within(|| (client(&daemon, "alice").parking?.residence == Residence::Parked).then_some(()));
    assert_eq!(used(dir.path()), parked);
    alice.computes();
    assert_eq!(used(dir.path()) - parked, MEMORY.0);
    alice.ends();
}

/// Two programs of 60 % of the device, started by `gshare run --park` alone: both get their memory by turns.
#[test]
fn two_programs_with_more_memory_than_the_device_take_turns() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let socket = daemon.socket();
    let profile = dir.path().join("small.toml");
    std::fs::write(&profile, "base = \"tiny\"\nmemory_bytes = 134217728\n").unwrap();
    let sim = format!("--sim={},devices=1", profile.display());
    // 60 % of the device.
    let memory = Bytes::from_mib(76);
    let servers =
        ["alice", "bob"].map(|name| Server::with((memory, &sim), dir.path(), &socket, name, &["--park"]));
    let began = std::time::Instant::now();
    let threads = servers.map(|mut server| {
        std::thread::spawn(move || {
            (0..60).for_each(|_| server.launches(100));
            server.ends();
        })
    });
    let mut orders = std::collections::BTreeMap::<String, std::collections::BTreeSet<u64>>::new();
    let mut whys = String::new();
    while threads.iter().any(|thread| !thread.is_finished()) {
        for client in daemon.snapshot().clients {
            let Some(parking) = client.parking else { continue };
            assert_eq!(client.memory_limit_bytes, Some(Bytes::from_mib(128)));
            if let Some(at) = parking.ordered_at
                && orders.entry(client.name.clone()).or_default().insert(at.as_nanos())
            {
                whys += &told(&gshare(&socket, &["why", &client.name]));
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    for thread in threads {
        thread.join().unwrap();
    }
    let took = began.elapsed();
    println!("{took:?}, {orders:?}\n{whys}");
    assert!(whys.contains("for alice (pid ") && whys.contains("for bob (pid "), "{whys}");
    for name in ["alice", "bob"] {
        let at: Vec<u64> = orders[name].iter().copied().collect();
        // The shortest stay.
        let shortest = at.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(u64::MAX);
        assert!(shortest > 100_000_000, "{name} was parked again after {shortest} ns: {at:?}");
    }
}
