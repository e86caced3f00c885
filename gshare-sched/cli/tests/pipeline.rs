//! Functions as pipelines of real processes on the simulated driver, under `kill -9` of stages and of the host.

use crate::common;
use crate::hooked;
use gshare_runner::pipeline::{Assignment, FfsError, FfsFunction, StageSpec};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// One function at a time, so that what is left of it can be counted.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock()
}

/// Four stages of the test program on a simulated device of the test's own.
fn assignment(dir: &Path, device: bool) -> PathBuf {
    let mut command = vec![env!("CARGO_BIN_EXE_gshare-fixture").to_owned(), "stage".to_owned()];
    if device {
        let links = dir.join("driver");
        std::fs::create_dir(&links).unwrap();
        std::os::unix::fs::symlink(hooked::libraries().join("libfake_cuda.so"), links.join("libcuda.so.1"))
            .unwrap();
        let set = |name: &str, path: &Path| format!("{name}={}", path.display());
        let environment = [
            "env".to_owned(),
            set("LD_LIBRARY_PATH", &links),
            set("GSHARE_SIM_DEVICE", &dir.join("device")),
            "GSHARE_SIM_PROFILE=tiny".to_owned(),
        ];
        command = environment.into_iter().chain(command).collect();
    } else {
        command.push("--no-device".to_owned());
    }
    let stage = |number: u32| StageSpec {
        components: vec![format!("c{number}")],
        slice: "0".to_owned(),
        command: command.clone(),
    };
    let path = dir.join("assignment.json");
    let assignment = Assignment::new("test", (0..4).map(stage).collect(), 4_096);
    std::fs::write(&path, serde_json::to_vec(&assignment).unwrap()).unwrap();
    path
}

fn alive(pid: u32) -> bool {
    // A zombie is dead.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z')))
}

fn gone(pids: &[u32]) {
    let begun = Instant::now();
    while pids.iter().any(|&pid| alive(pid)) {
        assert!(begun.elapsed() < Duration::from_secs(60), "still there: {pids:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// The process of a stage, which may answer before its host has noted it.
fn pid_of(function: &FfsFunction, stage: usize) -> u32 {
    common::within(|| function.stages()[stage].pid)
}

/// Memory files of channels that this process has open.
fn channels() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    files
        .filter(|file| {
            std::fs::read_link(file.path())
                .is_ok_and(|link| link.to_string_lossy().contains("gshare-channel"))
        })
        .count()
}

/// 10,000 requests through four stages while a random stage is killed 50 times: each is answered once, in full; no process
/// and no memory is left.
#[test]
fn every_accepted_request_is_answered_while_stages_are_killed() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let before = channels();
    let function = FfsFunction::start(&assignment(dir.path(), true)).unwrap();
    let (requests, kills) = (10_000u64, 50);
    let mut state = 9u64;
    let mut draw = |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % bound
    };
    let (mut tickets, mut killed, mut answered, mut died) = (VecDeque::new(), 0, 0, 0);
    for number in 0..requests {
        let request = format!("request {number}");
        tickets.push_back((request.clone(), function.submit(request.as_bytes(), PATIENCE).unwrap()));
        if killed < kills && number >= (killed + 1) * requests / (kills + 1) {
            let pids: Vec<u32> = function.stages().iter().filter_map(|stage| stage.pid).collect();
            if !pids.is_empty() {
                kill(pids[usize::try_from(draw(pids.len() as u64)).unwrap()]);
                killed += 1;
            }
        }
        while tickets.len() > 40 || (number + 1 == requests && !tickets.is_empty()) {
            let (request, ticket) = tickets.pop_front().unwrap();
            match ticket.wait() {
                Ok(answer) => {
                    assert_eq!(String::from_utf8(answer).unwrap(), format!("{request}0123"));
                    answered += 1;
                }
                Err(FfsError::StageDied { .. }) => died += 1,
                Err(error) => panic!("{request}: {error}"),
            }
        }
    }
    assert_eq!((answered + died, killed, function.open()), (requests, kills, 0));
    assert_eq!(died, 0, "no stage was killed three times over one request");
    let restarts: u64 = function.stages().iter().map(|stage| stage.restarts).sum();
    assert_eq!(restarts, kills);
    let pids: Vec<u32> = function.stages().iter().filter_map(|stage| stage.pid).collect();
    function.stop();
    gone(&pids);
    assert_eq!(channels(), before, "no channel is left");
}

/// A stage that is killed again and again as soon as it has answered, with nothing in its input, is one that runs.
#[test]
fn a_stage_that_does_its_work_is_started_again_however_often_it_dies_young() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let function = FfsFunction::start(&assignment(dir.path(), false)).unwrap();
    for round in 0..20 {
        let ticket = function.submit(b"x", PATIENCE).unwrap();
        assert_eq!(ticket.wait().as_deref(), Ok(&b"x0123"[..]), "round {round}");
        kill(pid_of(&function, 2));
        common::within(|| (function.stages()[2].restarts > round).then_some(()));
    }
    function.stop();
}

#[test]
fn a_request_that_kills_its_stage_fails_and_others_do_not() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let function = FfsFunction::start(&assignment(dir.path(), false)).unwrap();
    let submit = |text: &str| function.submit(text.as_bytes(), PATIENCE).unwrap();
    let tickets = ["a", "die", "b", "fail", "c"].map(submit);
    let answers = tickets.map(|ticket| ticket.wait().map(|answer| String::from_utf8(answer).unwrap()));
    let failed = FfsError::Stage { stage: 2, reason: "asked to".to_owned() };
    assert_eq!(
        answers,
        [
            Ok("a0123".to_owned()),
            Err(FfsError::StageDied { stage: 1, attempts: 3 }),
            Ok("b0123".to_owned()),
            Err(failed),
            Ok("c0123".to_owned())
        ]
    );
    let error = function.submit(&[0; 5_000], PATIENCE).unwrap_err();
    assert_eq!(error.to_string(), "a message of 5000 bytes in slots of 4096");
}

/// The host is killed: its stages go with it, no matter what they were doing.
#[test]
fn no_stage_outlives_its_host() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let assignment =
            if round == 0 { assignment(dir.path(), false) } else { dir.path().join("assignment.json") };
        let mut host = Command::new(env!("CARGO_BIN_EXE_gshare-fixture"))
            .arg("pipeline-host")
            .arg(assignment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(host.stdout.take().unwrap()).lines();
        let pids: Vec<u32> = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(pids.len(), 4);
        let mut input = host.stdin.take().unwrap();
        writeln!(input, "hello").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "hello0123");
        if round == 1 {
            writeln!(input, "more").unwrap();
        }
        host.kill().unwrap();
        host.wait().unwrap();
        gone(&pids);
    }
}

#[test]
fn a_stage_that_does_not_run_ends_the_function_with_its_reason() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("assignment.json");
    let write = |command: &str| {
        let stage =
            StageSpec { components: vec![], slice: "0".to_owned(), command: vec![command.to_owned()] };
        let assignment = Assignment::new("test", vec![stage], 64);
        std::fs::write(&path, serde_json::to_vec(&assignment).unwrap()).unwrap();
    };
    for (command, text) in
        [("/does/not/exist", "stage 0 does not run: /does/not/exist"), ("/bin/false", "exit status: 1")]
    {
        write(command);
        let function = FfsFunction::start(&path).unwrap();
        let error = match function.submit(b"x", PATIENCE) {
            Ok(ticket) => ticket.wait().unwrap_err(),
            Err(error) => error,
        };
        let expected = if command == "/bin/false" { "died" } else { text };
        assert!(error.to_string().contains(text) || error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn assignments_that_cannot_be_are_refused_by_field() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("assignment.json");
    let refused = |text: &str| {
        std::fs::write(&path, text).unwrap();
        FfsFunction::start(&path).unwrap_err().to_string()
    };
    let stage = r#"{"components":[],"slice":"0","command":["x"]}"#;
    assert!(refused("{").contains("EOF"));
    assert!(
        refused(r#"{"function":"f","stages":[],"slot_bytes":1}"#)
            .contains("stages: 0 of them, need 1 to 128")
    );
    assert!(refused(&stage.replace("\"x\"", "")).contains("unknown field"));
    let with = |stage: &str, rest: &str| format!(r#"{{"function":"f","stages":[{stage}],{rest}}}"#);
    let empty = r#"{"components":[],"slice":"0","command":[]}"#;
    assert!(refused(&with(empty, r#""slot_bytes":1"#)).contains("stages[0].command is empty"));
    assert!(refused(&with(stage, r#""slot_bytes":0"#)).contains("slot_bytes is 0"));
    assert!(refused(&with(stage, r#""slot_bytes":9,"slots":3"#)).contains("slots is 3"));
    assert!(refused(&with(stage, r#""slot_bytes":9,"max_attempts":0"#)).contains("max_attempts is 0"));
    assert!(matches!(gshare_runner::pipeline::Stage::from_env(), Err(FfsError::NotAStage { .. })));
}

/// FluidFaaS, Figure 7: the function in Python, cut after the join, with its profile and its answers; and a killed stage.
#[test]
fn a_function_in_python_runs_as_a_pipeline() {
    let _alone = alone();
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/../../gshare-sched/runner/python");
    let example = format!("{package}/example.py");
    let built = Command::new("python3").args(["-B", &example, "build"]).output().unwrap();
    let text = String::from_utf8(built.stdout).unwrap();
    let dag: gshare_core::dag::Dag =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!((dag.len(), dag.edges().len()), (5, 4));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("assignment.json");
    let stage = |components: &[&str]| StageSpec {
        components: components.iter().map(|&name| name.to_owned()).collect(),
        slice: "0".to_owned(),
        command: vec!["python3".to_owned(), "-B".to_owned(), example.clone()],
    };
    let stages = vec![stage(&["Model1", "Model2", "Model3"]), stage(&["Model4", "Model5"])];
    std::fs::write(&path, serde_json::to_vec(&Assignment::new("figure 7", stages, 4_096)).unwrap()).unwrap();
    let function = FfsFunction::start(&path).unwrap();
    let pickled = |python: &str| {
        let code = format!("import pickle,sys; sys.stdout.buffer.write(pickle.dumps({python}, protocol=5))");
        Command::new("python3").args(["-c", &code]).output().unwrap().stdout
    };
    // (3 + 1 + 3 * 2)^2 - 4 = 96.
    let (request, answer) = (pickled("(3, 4)"), pickled("96"));
    for round in 0..40 {
        if round == 20 {
            kill(pid_of(&function, 1));
        }
        assert_eq!(function.submit(&request, PATIENCE).unwrap().wait(), Ok(answer.clone()), "round {round}");
    }
    let wrong = function.submit(&pickled("('a', 4)"), PATIENCE).unwrap().wait().unwrap_err();
    assert!(wrong.to_string().starts_with("stage 0: TypeError: "), "{wrong}");
    function.stop();
}
