//! The `gshare` command as a user or a script meets it.

use crate::common::{self, Local, attached, spec};
use gshared::config::JournalConfig;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{self, OpenptFlags};
use rustix::termios::{self, LocalModes, Winsize};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn gshare() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    command.env_remove("GSHARE_SOCKET");
    command
}

fn json(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("exactly one JSON object")
}

fn errors(output: &Output) -> String {
    assert!(!output.status.success());
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A daemon that cannot write its journal says so where people look.
#[test]
fn status_warns_of_a_journal_that_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "in the way").unwrap();
    let mut config = gshared::Config::at(dir.path().join("gshare.sock"));
    config.journal = Some(JournalConfig::new(dir.path().join("file/journal")));
    let daemon = Local { running: Some(gshared::Daemon::new(config).unwrap().spawn().unwrap()), dir };
    let output = gshare().args(["status", "--socket"]).arg(daemon.socket()).output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("WARNING: no journal is written: ") && table.contains("file/journal"), "{table}");
}

#[test]
fn status_prints_one_json_object_with_fractions() {
    let daemon = Local::start();
    let (_client, _) = attached(&daemon.socket(), 1, "alice", spec("0.3:0.8", 24, Some(64)));
    let output = gshare().args(["status", "--json", "--socket"]).arg(daemon.socket()).output().unwrap();
    let status = json(&output);
    let alice = &status["clients"][0];
    assert_eq!(
        (&alice["name"], &alice["quota_request"], &alice["sm"]),
        (&"alice".into(), &0.3.into(), &0.24.into())
    );
    assert_eq!(alice["memory_limit_bytes"], 64 << 20);
    let table = gshare().args(["status", "--socket"]).arg(daemon.socket()).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("alice") && table.contains("80.0%") && table.contains("64 MiB"), "{table}");
    let top = gshare()
        .args(["top", "--count", "2", "--interval", "50ms", "--socket"])
        .arg(daemon.socket())
        .output();
    assert_eq!(String::from_utf8(top.unwrap().stdout).unwrap().matches("alice").count(), 2);
    let lines = gshare()
        .args(["top", "--json", "--count", "2", "--interval", "50ms", "--socket"])
        .arg(daemon.socket())
        .output();
    let lines = String::from_utf8(lines.unwrap().stdout).unwrap();
    let each: Vec<serde_json::Value> =
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(each.len() == 2 && each.iter().all(|line| line["clients"][0]["name"] == "alice"), "{lines}");
}

/// Adds the terminal's output since the last call.
fn written(terminal: &mut File, shown: &mut String) {
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = terminal.read(&mut bytes) {
        *shown += &String::from_utf8_lossy(&bytes[..n]);
    }
}

#[test]
fn top_takes_a_terminal_and_gives_it_back_at_a_key_and_at_signals() {
    let daemon = Local::start();
    let (_client, _) = attached(&daemon.socket(), 1, "alice", spec("0.3:0.8", 24, Some(64)));
    for (signal, colour) in [(None, true), (Some(Signal::TERM), false), (Some(Signal::INT), true)] {
        let terminal = pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        pty::grantpt(&terminal).unwrap();
        pty::unlockpt(&terminal).unwrap();
        let name = pty::ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
        let inside = File::options().read(true).write(true).open(name).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        termios::tcsetwinsize(&inside, size).unwrap();
        rustix::io::ioctl_fionbio(&terminal, true).unwrap();
        let mut terminal = File::from(terminal);
        let modes = || termios::tcgetattr(&inside).unwrap().local_modes;
        let before = modes();

        let mut command = gshare();
        command.args(["top", "--interval", "50ms", "--socket"]).arg(daemon.socket()).env("TERM", "xterm");
        if colour {
            command.env_remove("NO_COLOR")
        } else {
            command.env("NO_COLOR", "1")
        };
        command.stdin(inside.try_clone().unwrap()).stdout(inside.try_clone().unwrap());
        let mut top = command.spawn().unwrap();
        let mut shown = String::new();
        common::within(|| {
            written(&mut terminal, &mut shown);
            shown.contains("alice").then_some(())
        });
        assert!(shown.starts_with("\x1b[?1049h"), "{shown:?}");
        assert_eq!(shown.contains("\x1b[38;5;"), colour, "{shown:?}");
        assert!(before.contains(LocalModes::ICANON) && !modes().contains(LocalModes::ICANON));

        match signal {
            Some(signal) => kill_process(Pid::from_child(&top), signal).unwrap(),
            None => terminal.write_all(b"q").unwrap(),
        }
        let status = common::within(|| {
            written(&mut terminal, &mut shown);
            top.try_wait().unwrap()
        });
        written(&mut terminal, &mut shown);
        assert!(status.success() && shown.contains("\x1b[?1049l"), "{status}: {shown:?}");
        assert_eq!(modes(), before);
    }
}

#[test]
fn without_a_daemon_status_says_how_to_start_one() {
    let output =
        gshare().args(["status", "--json", "--socket", "/nonexistent/gshare.sock"]).output().unwrap();
    let text = errors(&output);
    assert!(text.contains("/nonexistent/gshare-admin.sock") && text.contains("gshare daemon"), "{text}");
}

#[test]
fn a_folder_without_a_journal_of_this_version_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let said = |text: &str| {
        std::fs::write(dir.path().join("00000000000000000001-000000.jsonl"), text).unwrap();
        errors(&gshare().args(["why", "--journal"]).arg(dir.path()).output().unwrap())
    };
    let old = "{\"journal\":1,\"epoch\":3,\"segment\":0,\"engine\":{}}\n{\"now_ns\":1,\"event\":{\"event\":\"deadline_reached\"}}\n";
    assert!(said(old).contains("a journal of version 1, and this program reads version 3"), "{}", said(old));
    assert!(said("").contains("no journal of a daemon is there, or an empty one"), "{}", said(""));
    let headless = said("{\"now_ns\":1}\n");
    assert!(headless.contains("does not begin with a journal's header"), "{headless}");
    // It is refused before there is memory for it: 100 MB in one line.
    let long = said(&format!("{{\"now_ns\":\"{}\"}}\n", "1".repeat(100_000_000)));
    assert!(long.contains(":1: a line of 16 MiB and more, which no daemon writes"), "{long}");
}

#[test]
fn the_engine_answers_each_line_before_the_next_is_written() {
    use std::io::BufRead as _;
    let mut child = gshare()
        .args(["lab", "engine", "token"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    for (line, expected) in
        [("{\"now_ns\":1,\"event\":{\"event\":\"deadline_reached\"}}", "actions"), ("x", "error")]
    {
        writeln!(input, "{line}").unwrap();
        let mut answer = String::new();
        output.read_line(&mut answer).unwrap();
        assert!(answer.contains(expected), "{answer}");
    }
    drop(input);
    assert!(child.wait().unwrap().success());
    let schema = json(&gshare().args(["lab", "engine", "token", "--schema"]).output().unwrap());
    assert!(schema["input"]["required"].as_array().unwrap().contains(&"event".into()));
}

#[test]
fn a_command_whose_output_nobody_reads_ends_quietly() {
    let event = b"{\"now_ns\":1,\"event\":{\"event\":\"deadline_reached\"}}\n";
    for arguments in
        [&["lab", "engine", "platform", "--schema"][..], &["lab", "engine", "token"], &["status", "--help"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = gshare();
        command.args(arguments).stdin(Stdio::piped()).stdout(writer).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It may have ended before it reads that.
        let _ = child.stdin.take().unwrap().write_all(event);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
    }
}

#[test]
fn a_host_in_another_language_drives_an_engine_over_pipes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let shown = std::fs::read_to_string(root.join("examples/README.md")).unwrap();
    for (script, line) in [("filter_host.py", "carol"), ("platform_host.py", "330       330")] {
        let output = Command::new("python3")
            .arg(root.join("examples").join(script))
            .arg(env!("CARGO_BIN_EXE_gshare"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(printed.contains(line) && shown.contains(&printed), "{printed}");
    }
}

/// The findings of `gshare doctor`; its exit code says whether any is bad.
fn doctor(command: &mut Command) -> serde_json::Value {
    let output = command.arg("--json").output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let is_bad = report["checks"].as_array().unwrap().iter().any(|check| check["status"] == "bad");
    assert_eq!(output.status.code(), Some(i32::from(is_bad)), "{output:?}");
    report
}

#[test]
fn doctor_fails_without_a_hook() {
    let report = doctor(gshare().arg("doctor").env("GSHARE_HOOK_LIBRARY", "/nowhere/libgshare_hook.so"));
    let checks = report["checks"].as_array().unwrap();
    let hook = checks.iter().find(|check| check["check"] == "hook").unwrap();
    assert_eq!(hook["status"], "bad", "{report}");
}

#[test]
fn doctor_says_what_is_there_and_what_to_do() {
    let daemon = Local::start();
    let report = doctor(gshare().arg("doctor").arg("--socket").arg(daemon.socket()));
    let checks = report["checks"].as_array().unwrap();
    let find = |name: &str| checks.iter().find(|check| check["check"] == name).unwrap();
    assert_eq!(find("daemon")["status"], "good");
    assert_eq!(find("kernel")["status"], "good");
    if report["device"] == "none" {
        assert!(find("driver")["advice"].as_str().unwrap().contains("--sim"));
    }
}

/// The names of all commands that `--help` lists.
fn commands() -> Vec<String> {
    let help = gshare().arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let list = help.split("Commands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).unwrap();
    let names = list.lines().filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    names.map(|line| line.split(' ').next().unwrap().to_owned()).filter(|name| name != "help").collect()
}

#[test]
fn completions_offer_every_command_in_a_script_that_the_shell_accepts() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = gshare().args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        for name in commands() {
            assert!(script.contains(&name), "{shell} lacks {name}");
        }
        if shell == "bash" {
            let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
            bash.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
            assert!(bash.wait().unwrap().success());
        }
    }
    assert!(errors(&gshare().args(["completions", "csh"]).output().unwrap()).contains("bash"));
}

#[test]
fn every_command_has_a_manual_page_and_hidden_ones_have_none() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("share/man1");
    let output = gshare().args(["man", "--output"]).arg(&pages).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    for name in commands() {
        let page = std::fs::read_to_string(pages.join(format!("gshare-{name}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{name}: {page}");
    }
    assert!(!pages.join("gshare-spin.1").exists());
    let printed = String::from_utf8(gshare().arg("man").output().unwrap().stdout).unwrap();
    assert_eq!(printed, std::fs::read_to_string(pages.join("gshare.1")).unwrap());
}

#[test]
fn options_that_cannot_be_are_refused_with_their_bounds() {
    let refused = |arguments: &[&str]| {
        let output = gshare().arg("run").args(arguments).args(["--", "true"]).output().unwrap();
        errors(&output)
    };
    assert!(refused(&["--quota", "0.8:0.3"]).contains("need request <= limit"));
    assert!(refused(&["--sm", "0"]).contains("SM partition is 0"));
    assert!(refused(&["--sm", "101"]).contains("at most 100"));
    assert!(refused(&["--mem", "0"]).contains("GPU memory is 0"));
    assert!(refused(&["--mem", "4"]).contains("4GiB"));
    assert!(refused(&["--class", "slo-sensitive:0"]).contains("a tolerance of 1 to 100"));
}

#[test]
fn a_missing_driver_is_an_error_that_proposes_the_simulation() {
    let doctor = doctor(gshare().arg("doctor"));
    if doctor["device"] != "none" {
        eprintln!("skipped: there is a driver");
        return;
    }
    // Any library may stand for the hook: the driver is looked for first.
    let output = gshare()
        .args(["run", "--", "true"])
        .env("GSHARE_HOOK_LIBRARY", Path::new(env!("CARGO_BIN_EXE_gshare")))
        .output()
        .unwrap();
    let text = errors(&output);
    assert!(text.contains("no CUDA driver") && text.contains("gshare run --sim"), "{text}");
}

#[test]
fn a_private_daemon_ends_when_nobody_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("gshare.sock");
    let mut daemon = gshare()
        .args(["daemon", "--config", "/dev/null", "--private", "200ms", "--socket"])
        .arg(&socket)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert!(common::within(|| daemon.try_wait().unwrap()).success());
    assert!(!socket.exists());
}
