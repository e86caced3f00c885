//! Programs of the user's: well-behaved programs, and every kind of misbehaviour. Feature `process`.
#![cfg(feature = "process")]

use gshare_core::profile::Setting;
use gshare_core::{Duration, Quota, SmShare};
use gshare_profile::executor::{ExecError, Executor as _};
use gshare_profile::line_program::{Process, Protocol};
use gshare_profile::trial::{TrialConfig, TrialError, measure};
use std::process::Command;

fn setting(batch: u32) -> Setting {
    Setting { batch, sm: SmShare::WHOLE, quota: Quota::WHOLE }
}

fn shell(protocol: Protocol, script: &'static str) -> Process {
    Process::new(protocol, move |_| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Ok(command)
    })
}

fn quick() -> TrialConfig {
    let mut config = TrialConfig::default();
    let secs = Duration::from_secs;
    // The effects of a loaded machine on a shell are not tested here.
    (config.max_warmup, config.max_time) = (secs(60), secs(60));
    (config.start_timeout, config.answer_timeout) = (secs(60), secs(60));
    config.steady_tolerance = gshare_core::BasisPoints::WHOLE;
    config.precision = gshare_core::BasisPoints::WHOLE;
    config
}

#[test]
fn a_program_that_answers_lines_is_measured_at_its_batch_size() {
    let script = r#"echo ready; while read line; do echo "$GSHARE_BATCH"; done"#;
    let measured = measure(&mut shell(Protocol::Requests, script), setting(8), &quick()).unwrap();
    let point = measured.measurement.point;
    assert_eq!((point.batch, measured.calls % 60), (8, 0), "{measured:?}");
    assert!(measured.measurement.load.is_some());
}

#[test]
fn a_program_that_trains_is_measured_by_its_steps() {
    let script = "while echo step; do sleep 0.002; done";
    let measured = measure(&mut shell(Protocol::Steps, script), setting(1), &quick()).unwrap();
    assert!(measured.measurement.point.p50 >= Duration::from_millis(2), "{measured:?}");
}

#[test]
fn whatever_a_program_does_the_trial_ends_and_says_why() {
    // Only a program which never gets there has so short a wait.
    let short = Duration::from_millis(700);
    let error = |script, change: fn(&mut TrialConfig, Duration)| {
        let mut config = quick();
        change(&mut config, short);
        measure(&mut shell(Protocol::Requests, script), setting(1), &config).unwrap_err().to_string()
    };
    assert_eq!(error("exit 7", |_, _| {}), "the function ended: exit status: 7");
    assert_eq!(
        error("exec sleep 600", |config, short| config.start_timeout = short),
        "not ready within 700ms"
    );
    let hangs = error("echo ready; exec sleep 600", |config, short| config.answer_timeout = short);
    assert_eq!(hangs, "a call was not answered within 700ms");
    let message = error("echo ready; read line; kill -9 $$", |_, _| {});
    assert!(message.starts_with("the function ended: signal: 9"), "{message}");
    let message = error("echo ready; exec >&-; exec sleep 600", |_, _| {});
    assert_eq!(message, "the function ended: it closed its output and went on: killed");
}

/// A pipe takes some thousand lines that are not read, and then makes the writer wait.
#[test]
fn a_program_that_does_not_read_is_not_waited_for() {
    let mut process = shell(Protocol::Requests, "echo ready; exec sleep 600");
    process.start(setting(1), Duration::from_secs(60)).unwrap();
    let (sender, refused) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let error = (0..1 << 20).find_map(|_| process.submit().err());
        process.stop();
        sender.send(error)
    });
    let error = refused.recv_timeout(std::time::Duration::from_secs(50)).expect("it waits for room");
    assert_eq!(error, Some(ExecError::Deaf));
}

#[test]
fn a_program_that_is_not_there_ends_the_run() {
    let mut missing = Process::new(Protocol::Requests, |_| Ok(Command::new("/no/such/program")));
    let error = measure(&mut missing, setting(1), &quick()).unwrap_err();
    assert!(error.is_fatal() && matches!(error, TrialError::Exec(ExecError::Unavailable(_))), "{error}");
    assert!(missing.submit().is_err(), "it was not started");
}

#[test]
fn stopping_ends_a_program_that_does_not_listen() {
    let mut process = shell(Protocol::Requests, "echo ready; trap '' TERM PIPE; while :; do sleep 1; done");
    process.start(setting(1), Duration::from_secs(60)).unwrap();
    let begin = std::time::Instant::now();
    process.stop();
    assert!(begin.elapsed() < std::time::Duration::from_secs(60), "it is killed, not waited for");
}
