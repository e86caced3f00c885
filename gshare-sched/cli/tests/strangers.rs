//! Processes that the daemon does not serve: they launch nothing, unless the operator lets them run.

use crate::common::{Process, within};
use crate::hooked;
use std::io::BufRead as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LISTED: &str = "allow_unlisted = false\n[[client]]\nname = 'bob'\nquota = '0.5'\n";

/// With a guaranteed half of the device bob had a fifth of it beside three of them.
#[test]
fn a_process_that_the_daemon_refuses_launches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), LISTED);
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let bob = spinners.start("bob", 1, &[], &[]);
    bob.works(&daemon);
    let wait = [("GSHARE_DAEMON_WAIT", "1s")];
    let mut refused: Vec<_> =
        (2..5).map(|run| spinners.start(&format!("stranger-{run}"), run, &wait, &[])).collect();
    // Another run of bob's name may get it later: its launches wait for that, and fail.
    refused.push(spinners.start("bob", 9, &wait, &[]));
    for stranger in &mut refused {
        assert!(!stranger.0.wait().unwrap().success(), "its launch failed");
        assert_eq!(spinners.truth().gpu_time(stranger), 0);
    }
    let said = spinners.said();
    let reasons = said.matches("the daemon refused this process: ").count();
    assert_eq!(reasons, refused.len(), "{said}");
    assert!(said.contains("(NotAllowed); its launches fail"), "{said}");
    assert!(said.contains("(DuplicateName); its launches fail"), "{said}");
}

#[test]
fn gshare_run_does_not_start_what_the_daemon_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), LISTED);
    let mark = dir.path().join("started");
    let run = |name: &str| -> std::process::Output {
        let mut command: Command = hooked::run(dir.path(), &daemon.socket(), &["--name", name]);
        command.arg("touch").arg(&mark).stderr(Stdio::piped()).output().unwrap()
    };
    let refused = run("mallory");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && !mark.exists(), "{text}");
    assert!(text.contains("client `mallory` is not in the configuration"), "{text}");
    assert!(run("bob").status.success() && mark.exists());
}

#[test]
fn gshare_run_starts_a_program_only_where_a_device_has_room_or_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let first = spinners.start("first", 1, &[("GSHARE_QUOTA", "0.7")], &[]);
    first.works(&daemon);
    let mark = dir.path().join("started");
    let run = |options: &[&str]| {
        let mut command: Command = hooked::run(dir.path(), &daemon.socket(), options);
        // The second device would have room.
        command.arg("touch").arg(&mark).env("CUDA_VISIBLE_DEVICES", "0").stderr(Stdio::piped());
        command
    };
    let refused = |options: &[&str]| {
        let output = run(options).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && !mark.exists(), "{text}");
        text
    };
    let text = refused(&["--quota", "0.7"]);
    assert!(text.contains("request 70% does not fit: 70% taken"), "{text}");
    // No wait makes a device larger.
    for options in [&["--mem", "400GiB"][..], &["--mem", "400GiB", "--wait"]] {
        let text = refused(options);
        assert!(text.contains("GPU memory 400 GiB is larger than the device's"), "{text}");
        assert!(!text.contains("--wait"), "{text}");
    }
    let mut waiting = run(&["--quota", "0.7", "--wait"]).spawn().unwrap();
    let mut said = std::io::BufReader::new(waiting.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("waits for room") {
        line.clear();
        assert_ne!(said.read_line(&mut line).unwrap(), 0, "it says that it waits");
    }
    assert!(!mark.exists());
    drop(first);
    assert!(waiting.wait().unwrap().success() && mark.exists());
    std::fs::remove_file(&mark).unwrap();
    assert!(run(&["--quota", "0.7"]).status().unwrap().success() && mark.exists(), "there is room");
}

#[test]
fn strangers_that_may_run_keep_the_limits_that_are_listed_for_their_name() {
    let dir = tempfile::tempdir().unwrap();
    let config = "strangers = 'run'\n[[client]]\nname = 'carol'\nquota = '0:0.1'\nmemory = '64MiB'\n";
    let daemon = Process::start(dir.path(), config);
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let served = spinners.start("carol", 1, &[], &[]);
    served.works(&daemon);
    let mut greedy = spinners.start("carol", 2, &[], &["--memory", "65MiB"]);
    assert!(!greedy.0.wait().unwrap().success(), "more memory than is listed");
    let begun = Instant::now();
    let stranger = spinners.start("carol", 3, &[], &["--memory", "40MiB"]);
    let used = within(|| {
        let truth = spinners.truth();
        Some(truth.try_gpu_time(&stranger)?).filter(|used| *used >= 200_000_000)
    });
    // A tenth of the time; a busy machine only makes it longer.
    assert!(begun.elapsed() >= Duration::from_millis(1_600), "{used} ns in {:?}", begun.elapsed());
    let said = spinners.said();
    assert!(said.contains("(DuplicateName); it runs within its own limits"), "{said}");
}
