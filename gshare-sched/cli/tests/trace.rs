//! `gshare trace` on a process that is limited, and on what is no trace.

use crate::common::{Local, within};
use crate::hooked;
use gshare_core::wait_ring::{MAGIC, WORDS};
use std::process::{Command, Output};

fn trace(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gshare")).arg("trace").args(arguments).output().unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = trace(arguments);
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_running_process_tells_which_limit_its_launches_wait_for() {
    let daemon = Local::start();
    let spinners = hooked::Spinners::new(daemon.dir.path(), &daemon.socket());
    let spinner = spinners.start("alice", 1, &[("GSHARE_QUOTA", "0.1:0.3")], &[]);
    let pid = spinner.pid().to_string();
    let (report, wait) = within(|| {
        let output = trace(&[&pid, "--json", "--last", "3000"]);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let events = report["events"].as_array()?;
        let wait =
            events.iter().find(|event| event["event"] == "waited" && event["why"]["reason"] == "throttled");
        let wait = wait?.clone();
        Some((report, wait))
    });
    assert_eq!(report["process"], spinner.pid());
    assert_eq!(report["traced"], serde_json::json!(["gate", "link"]));
    let text = wait["text"].as_str().unwrap();
    assert!(text.contains(" for a token: limit 30 % used up, next token in "), "{text}");
    assert!(text.contains(&format!("thread {pid}  device 0  waited ")), "{text}");
    let attached =
        report["events"].as_array().unwrap().iter().find(|event| event["event"] == "attached").unwrap();
    assert!(
        attached["text"].as_str().unwrap().contains("10 % of its time guaranteed, at most 30 %"),
        "{attached}"
    );
    let lines = String::from_utf8(trace(&[&pid, "--last", "1"]).stdout).unwrap();
    assert!(
        lines.lines().count() == 2 && lines.starts_with(&format!("process {pid}, traced: gate, link; ")),
        "{lines}"
    );
    // Nothing is left of it but what it wrote.
    drop(spinner);
    assert!(refused(&[&pid]).contains(&format!("no process {pid}")));
}

#[test]
fn followed_events_end_with_the_process_and_with_their_reader() {
    let daemon = Local::start();
    let spinners = hooked::Spinners::new(daemon.dir.path(), &daemon.socket());
    let spinner = spinners.start("alice", 1, &[("GSHARE_QUOTA", "0.1:0.3")], &[]);
    let pid = spinner.pid().to_string();
    within(|| trace(&[&pid]).status.success().then_some(()));
    let mut follow = Command::new(env!("CARGO_BIN_EXE_gshare"));
    follow.args(["trace", &pid, "--follow", "--json", "--last", "0"]).stdout(std::process::Stdio::piped());
    let mut unread = follow.spawn().unwrap();
    let mut follow = follow.spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(follow.stdout.take().unwrap()));
    let first: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert!(first["event"].is_string() && first["text"].is_string(), "{first}");
    // As after `| head`: otherwise its pipeline would last as long as the process.
    drop(unread.stdout.take());
    assert!(within(|| unread.try_wait().unwrap()).success());
    drop(spinner);
    assert!(lines.all(|line| line.is_ok()));
    assert!(follow.wait().unwrap().success());
}

#[test]
fn processes_without_a_trace_are_told_apart() {
    let own = std::process::id().to_string();
    assert!(
        refused(&[&own]).contains(&format!("process {own} is not hooked: start it with `gshare run -- CMD`"))
    );
    assert!(refused(&["4294967295"]).contains("no process 4294967295"));
    if !rustix::process::getuid().is_root() {
        let text = refused(&["1"]);
        assert!(text.contains("process 1 belongs to another user (uid 0)"), "{text}");
    }
    let daemon = Local::start();
    let spinners = hooked::Spinners::new(daemon.dir.path(), &daemon.socket());
    let spinner = spinners.start("quiet", 1, &[("GSHARE_TRACE", "none")], &[]);
    let pid = spinner.pid().to_string();
    let text = within(|| Some(refused(&[&pid])).filter(|text| !text.contains("is not hooked")));
    assert!(text.contains("is hooked and writes no trace"), "{text}");
}

#[test]
fn files_that_are_no_ring_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("ring");
    let refused_with = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        refused(&["--file", file.to_str().unwrap()])
    };
    assert!(refused_with(&[7; WORDS * 8]).contains("not a trace ring"));
    let mut ring = MAGIC.to_ne_bytes().to_vec();
    ring.resize(WORDS * 8, 0);
    ring[8] = 2;
    assert!(refused_with(&ring).contains("trace ring of version 2, this gshare reads version 1"));
    ring[8] = 1;
    assert!(
        refused_with(&ring[..WORDS * 4]).contains(&format!("trace ring of {} bytes, one has", WORDS * 4))
    );
    assert!(refused(&["--file", "/nonexistent/ring"]).contains("/nonexistent/ring"));
    // What was never written is torn, not believed.
    ring[6 * 8] = 3;
    std::fs::write(&file, &ring).unwrap();
    let text = String::from_utf8(trace(&["--file", file.to_str().unwrap()]).stdout).unwrap();
    assert!(text.contains("0 events, 0 overwritten, 3 torn"), "{text}");
}
