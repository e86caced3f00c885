//! Programs without a limit: `gshare run --observe`, a daemon that only observes, and what `gshare ps --usage` says of them.

use crate::common::{Process, within};
use crate::hooked::{self, Spinner, Spinners};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The rows of `gshare ps --usage=csv`, by the name of the instance.
fn usage(socket: &Path) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    let output = command.args(["ps", "--usage=csv", "--socket"]).arg(socket).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    let row = |line: &str| -> BTreeMap<String, String> {
        columns.iter().map(|column| (*column).to_owned()).zip(line.split(',').map(str::to_owned)).collect()
    };
    lines.map(row).map(|row| (row["name"].clone(), row)).collect()
}

fn number(row: &BTreeMap<String, String>, column: &str) -> u64 {
    row[column].parse().unwrap()
}

/// Has a program that reads lines launch so many kernels, and waits for them.
fn compute(spinner: &mut Spinner, answers: &mut impl BufRead, kernels: u32) {
    writeln!(spinner.0.stdin.as_mut().unwrap(), "{kernels}").unwrap();
    let mut line = String::new();
    answers.read_line(&mut line).unwrap();
    assert_eq!(line, "done\n");
}

#[test]
fn the_use_of_an_observed_program_is_what_the_device_did() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let spinners = Spinners::new(dir.path(), &daemon.socket());
    let mut alice = spinners.serve("alice", 1, &[("GSHARE_OBSERVE", "1")]);
    let mut answers = BufReader::new(alice.0.stdout.take().unwrap());
    answers.read_line(&mut String::new()).unwrap();
    for _ in 0..10 {
        compute(&mut alice, &mut answers, 100);
    }
    // The last report may come a tenth of a second after the work.
    let row = within(|| {
        let row = usage(&daemon.socket()).remove("alice")?;
        let (busy, truth) = (number(&row, "busy_ns"), spinners.truth().gpu_time(&alice));
        let is_whole = number(&row, "launches") >= 1_001 && busy.abs_diff(truth) * 100 <= truth * 5;
        is_whole.then_some(row)
    });
    assert_eq!((number(&row, "waited_ns"), row["ended"].as_str()), (0, "false"));
    assert!(row["cgroup"].starts_with('/'), "{row:?}");
    // Its whole use is there after its end.
    compute(&mut alice, &mut answers, 100);
    drop(alice.0.stdin.take());
    alice.0.wait().unwrap();
    let row = within(|| usage(&daemon.socket()).remove("alice").filter(|row| row["ended"] == "true"));
    assert_eq!(number(&row, "launches"), 1_101);
    let (busy, truth) = (number(&row, "busy_ns"), 1_101_000_000);
    assert!(busy.abs_diff(truth) * 100 <= truth * 5, "busy {busy} ns, the device {truth} ns");
}

/// A daemon that observes gives no one a limit, not even a listed name, and does so from a reload on.
#[test]
fn a_daemon_that_observes_lets_all_run_and_divides_the_device_among_those_on_it() {
    let dir = tempfile::tempdir().unwrap();
    let listed = "[[client]]\nname = 'bob'\nquota = '0.1'\n";
    let daemon = Process::start(dir.path(), &format!("observe = true\n{listed}"));
    let spinners = Spinners::new(dir.path(), &daemon.socket());
    let start = |name, run| spinners.start(name, run, &[], &["--memory", "16MiB"]);
    let (alice, bob) = (start("alice", 1), start("bob", 2));
    for spinner in [&alice, &bob] {
        spinner.works(&daemon);
    }
    let before = (usage(&daemon.socket()), spinners.truth());
    std::thread::sleep(Duration::from_millis(2_500));
    let after = (usage(&daemon.socket()), spinners.truth());
    let grown = |name: &str, column: &str| number(&after.0[name], column) - number(&before.0[name], column);
    let occupied = ["alice", "bob"].map(|name| grown(name, "occupied_ns"));
    let worked = [&alice, &bob].map(|spinner| after.1.gpu_time(spinner) - before.1.gpu_time(spinner));
    // The two occupied times add up to the device's busy time, less the time since the last comparison, and are about equal.
    let (all, sum) = (occupied.iter().sum::<u64>(), worked.iter().sum::<u64>());
    assert!(all.abs_diff(sum) * 100 <= sum * 10, "{occupied:?} {worked:?}");
    assert!(occupied[0].abs_diff(occupied[1]) * 100 <= all * 10, "{occupied:?}");
    assert!(worked[1] * 3 >= sum, "bob has more than his listed tenth: {worked:?}");
    for name in ["alice", "bob"] {
        assert_eq!(number(&after.0[name], "waited_ns"), 0);
        let mebibyte_seconds = grown(name, "byte_seconds") >> 20;
        assert!((30..=60).contains(&mebibyte_seconds), "{mebibyte_seconds} MiB s in 2.5 s of 16 MiB");
    }
    let status =
        Command::new(env!("CARGO_BIN_EXE_gshare")).args(["status", "--socket"]).arg(daemon.socket()).output();
    let status = String::from_utf8(status.unwrap().stdout).unwrap();
    assert_eq!(status.matches("observed only").count(), 2, "{status}");
    // Without the setting, the listed share holds.
    std::fs::write(dir.path().join("gshared.toml"), listed).unwrap();
    daemon.signal(rustix::process::Signal::HUP);
    std::thread::sleep(Duration::from_millis(500));
    let before = spinners.truth();
    std::thread::sleep(Duration::from_millis(1_000));
    let after = spinners.truth();
    let share = (after.gpu_time(&bob) - before.gpu_time(&bob)) / 10_000_000;
    assert!((7..=13).contains(&share), "{share} % with a share of 10 %");
}

#[test]
fn observe_is_an_option_of_run_and_excludes_limits() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let mut command = hooked::run(dir.path(), &daemon.socket(), &["--observe", "--name", "alice"]);
    let mut child = command.arg(env!("CARGO_BIN_EXE_gshare-fixture")).arg("spin").spawn().unwrap();
    let client = within(|| daemon.snapshot().clients.into_iter().find(|client| client.launches > 0));
    assert!(client.observed && client.name == "alice", "{client:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let both = hooked::run(dir.path(), &daemon.socket(), &["--observe", "--quota", "0.5"])
        .arg("true")
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let error = String::from_utf8(both.stderr).unwrap();
    assert!(!both.status.success() && error.contains("cannot be used with"), "{error}");
}
