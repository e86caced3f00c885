//! The GPU manager with real processes, on the simulated driver, under the hook.

use crate::common::{self, Forked, Local, within};
use crate::hooked;
use gshare_core::{Bytes, Duration, GpuId, ModelId, RequestId};
use gshare_runner::manager::{
    Answer, GpuManager, GpuSpec, Hook, ManagerConfig, ManagerError, Program, Refused, Serving, Submission,
};
use gshare_sched::request::{
    LocalityScheduler, MemoryStore, ModelProfile, RejectReason, SchedulerConfig, StateStore as _,
};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

const MIB: fn(u64) -> Bytes = Bytes::from_mib;

/// Model processes find the simulated driver here.
fn simulated(dir: &Path) -> ManagerConfig {
    let links = dir.join("driver");
    std::fs::create_dir_all(&links).unwrap();
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let _ = std::os::unix::fs::symlink(hooked::libraries().join("libfake_cuda.so"), links.join(name));
    }
    let mut config = ManagerConfig::default();
    config.environment = vec![
        ("LD_LIBRARY_PATH".into(), links.into()),
        ("GSHARE_SIM_DEVICE".into(), dir.join("device").into()),
        ("GSHARE_SIM_PROFILE".into(), "tiny".into()),
    ];
    config
}

fn under(daemon: &Local) -> ManagerConfig {
    let mut config = simulated(daemon.dir.path());
    let library = hooked::libraries().join("libgshare_hook.so");
    config.hook = Some(Hook { preload: library, socket: daemon.socket() });
    config
}

/// A model process of 64 MiB that computes for 2 ms.
fn program(arguments: &[&str]) -> Program {
    let time = Duration::from_millis(2);
    let profile = ModelProfile { load_disk: Duration::from_millis(50), load_host: time, infer: time };
    let mut program = Program::new(env!("CARGO_BIN_EXE_gshare-fixture"), MIB(100), profile);
    // With a limit, the daemon keeps the books on it.
    program.memory_limit = Some(MIB(100));
    let fixed = ["model", "--memory", "64MiB", "--infer", "2ms", "--kernel", "1ms"];
    program.arguments = fixed.iter().chain(arguments).map(Into::into).collect();
    program
}

/// Serves `models` on `gpus` GPUs, each of which has room for two of them.
fn serve(config: ManagerConfig, gpus: u32, models: u32) -> Serving {
    let mut settings = SchedulerConfig::default();
    settings.max_attempts = 20;
    let scheduler = LocalityScheduler::new(settings).unwrap();
    let serving = Serving::spawn(config, Box::new(scheduler)).unwrap();
    let handle = serving.handle();
    for gpu in 0..gpus {
        handle.add_gpu(GpuId::new(gpu), GpuSpec::new(gpu.to_string(), MIB(250))).unwrap();
    }
    for model in 0..models {
        handle.add_model(ModelId::new(model), program(&[])).unwrap();
    }
    serving
}

fn ask(serving: &Serving, request: u64, model: u32) -> Result<Answer, Refused> {
    let submission =
        Submission::new(RequestId::new(request), ModelId::new(model), format!("input {request}").into());
    serving.handle().submit(submission).unwrap().wait()
}

fn pid_of(serving: &Serving, model: u32) -> Option<i32> {
    let processes = serving.handle().snapshot().unwrap().processes;
    let found = processes.iter().find(|(_, of, _)| *of == ModelId::new(model));
    found.map(|(.., pid)| i32::try_from(*pid).unwrap())
}

fn kill(pid: i32) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

fn is_gone(pid: i32) -> bool {
    // One that has not been waited for yet is as good as gone.
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    test_kill_process(Pid::from_raw(pid).unwrap()).is_err() || state.contains(") Z ")
}

#[test]
fn models_are_loaded_fed_and_evicted_under_the_hook() {
    let daemon = Local::start();
    let serving = serve(under(&daemon), 1, 3);
    let first = ask(&serving, 1, 0).unwrap();
    assert_eq!((first.output.as_slice(), first.gpu), (&b"input 1"[..], GpuId::new(0)));
    assert!(first.arrived <= first.dispatched && first.dispatched < first.completed);
    assert!(first.ran >= Duration::from_millis(2), "{}", first.ran);
    let clients = daemon.snapshot().clients;
    assert_eq!(clients.len(), 1, "the model process is a client of the daemon");
    assert!(clients[0].memory_bytes >= MIB(64), "{:?}", clients[0]);
    ask(&serving, 2, 1).unwrap();
    // There is room for two: the third evicts the one that was used least recently.
    ask(&serving, 3, 2).unwrap();
    let snapshot = serving.handle().snapshot().unwrap();
    assert_eq!((snapshot.stats.misses, snapshot.stats.evictions), (3, 1));
    assert_eq!(snapshot.gpus[0].1.models, [ModelId::new(1), ModelId::new(2)]);
    ask(&serving, 4, 1).unwrap();
    assert_eq!(serving.handle().snapshot().unwrap().stats.hits, 1);
    drop(serving);
    within(|| daemon.snapshot().clients.is_empty().then_some(()));
}

#[test]
fn a_killed_model_process_costs_a_load_and_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let serving = serve(simulated(dir.path()), 1, 2);
    ask(&serving, 1, 0).unwrap();
    // While it has nothing to do.
    let idle = pid_of(&serving, 0).unwrap();
    kill(idle);
    within(|| (pid_of(&serving, 0).is_none()).then_some(()));
    ask(&serving, 2, 0).unwrap();
    // While it runs: one that stands still has begun and does not answer, however long it takes to kill it.
    ask(&serving, 3, 1).unwrap();
    let busy = pid_of(&serving, 1).unwrap();
    kill_process(Pid::from_raw(busy).unwrap(), Signal::STOP).unwrap();
    let submission = Submission::new(RequestId::new(4), ModelId::new(1), b"again".to_vec());
    let ticket = serving.handle().submit(submission).unwrap();
    within(|| (serving.handle().snapshot().unwrap().waiting == 0).then_some(()));
    kill(busy);
    assert_eq!(ticket.wait().unwrap().output, b"again", "it ran again, from the start");
    assert_ne!(pid_of(&serving, 1), Some(busy));
}

#[test]
fn killing_the_manager_leaves_no_process_behind() {
    let dir = tempfile::tempdir().unwrap();
    let pids = dir.path().join("pids");
    // Not in the child: a test on another thread may be building the libraries, and the child would wait for it for ever.
    let config = simulated(dir.path());
    let manager = Forked::run(None, || {
        let serving = serve(config, 2, 3);
        for model in 0..3 {
            ask(&serving, model.into(), model).unwrap();
        }
        let all: Vec<String> = (0..3).map(|model| pid_of(&serving, model).unwrap().to_string()).collect();
        std::fs::write(dir.path().join("new"), all.join(" ")).unwrap();
        std::fs::rename(dir.path().join("new"), &pids).unwrap();
        std::thread::sleep(std::time::Duration::from_secs(600));
    });
    let text = within(|| std::fs::read_to_string(&pids).ok());
    let children: Vec<i32> = text.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert!(children.iter().all(|pid| !is_gone(*pid)));
    manager.kill();
    within(|| children.iter().all(|pid| is_gone(*pid)).then_some(()));
}

#[test]
fn every_request_is_served_once_while_processes_are_killed() {
    let dir = tempfile::tempdir().unwrap();
    let serving = serve(simulated(dir.path()), 2, 4);
    let (sender, endings) = channel();
    let mut rng = gshare_sim::Rng::new(7);
    for request in 0..120 {
        let model = ModelId::new(u32::try_from(rng.below(4)).unwrap());
        let submission = Submission::new(RequestId::new(request), model, request.to_le_bytes().to_vec());
        serving.handle().submit_to(submission, sender.clone()).unwrap();
        if request % 10 == 9 {
            let processes = serving.handle().snapshot().unwrap().processes;
            if let Some((.., pid)) = rng.pick(&processes) {
                kill(i32::try_from(*pid).unwrap());
            }
            std::thread::sleep(std::time::Duration::from_millis(rng.below(30)));
        }
    }
    drop(sender);
    let mut served: Vec<u64> = endings
        .iter()
        .take(120)
        .map(|(request, ending)| {
            assert_eq!(ending.unwrap().output, request.number().to_le_bytes());
            request.number()
        })
        .collect();
    served.sort_unstable();
    assert_eq!(served, (0..120).collect::<Vec<_>>());
    assert_eq!(serving.handle().snapshot().unwrap().stats.completed, 120);
}

#[test]
fn what_cannot_be_loaded_is_rejected_and_does_not_hold_up_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = simulated(dir.path());
    config.load_patience = Duration::from_secs(5);
    let serving = serve(config, 1, 1);
    let mut absent = program(&[]);
    absent.program = "/nonexistent/program".into();
    let mut silent = program(&[]);
    // Writes what is no frame.
    (silent.program, silent.arguments) =
        ("sh".into(), vec!["-c".into(), "echo nonsense >&0; sleep 60".into()]);
    for (model, program) in [(1, program(&["--fail"])), (2, absent), (3, silent)] {
        serving.handle().add_model(ModelId::new(model), program).unwrap();
        let refused = ask(&serving, u64::from(model), model).unwrap_err();
        assert_eq!(refused, Refused::Rejected(RejectReason::AttemptsExhausted), "model {model}");
    }
    ask(&serving, 10, 0).unwrap();
}

#[test]
fn a_load_that_hangs_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = simulated(dir.path());
    config.load_patience = Duration::from_millis(100);
    let serving = serve(config, 1, 0);
    serving.handle().add_model(ModelId::new(0), program(&["--hang"])).unwrap();
    let refused = ask(&serving, 1, 0).unwrap_err();
    assert_eq!(refused, Refused::Rejected(RejectReason::AttemptsExhausted));
    assert_eq!(serving.handle().snapshot().unwrap().processes, []);
}

#[test]
fn a_gpu_that_is_taken_away_gives_its_requests_to_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let serving = serve(simulated(dir.path()), 2, 2);
    let (sender, endings) = channel();
    for request in 0..20 {
        let submission = Submission::new(RequestId::new(request), ModelId::new(0), Vec::new());
        serving.handle().submit_to(submission, sender.clone()).unwrap();
    }
    serving.handle().remove_gpu(GpuId::new(0)).unwrap();
    let gpus: Vec<GpuId> = endings.iter().take(20).map(|(_, ending)| ending.unwrap().gpu).collect();
    assert!(gpus.contains(&GpuId::new(1)));
    assert!(matches!(
        serving.handle().remove_gpu(GpuId::new(0)),
        Err(ManagerError::UnknownGpu(gpu)) if gpu == GpuId::new(0)
    ));
    serving.handle().add_gpu(GpuId::new(0), GpuSpec::new("0", MIB(250))).unwrap();
    ask(&serving, 30, 1).unwrap();
}

#[test]
fn a_bad_submission_is_told_why_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let serving = serve(simulated(dir.path()), 1, 1);
    let text = |ending: Result<Answer, Refused>| ending.unwrap_err().to_string();
    assert_eq!(text(ask(&serving, 1, 9)), "unknown model9: its memory was never told");
    let long = Submission::new(RequestId::new(2), ModelId::new(0), vec![0; 1 << 17]);
    let ticket = serving.handle().submit(long).unwrap();
    assert_eq!(text(ticket.wait()), "input has 131072 bytes: need at most 65536");
    let first =
        serving.handle().submit(Submission::new(RequestId::new(3), ModelId::new(0), Vec::new())).unwrap();
    assert_eq!(text(ask(&serving, 3, 0)), "request3 is already here");
    first.wait().unwrap();
    let error = serving.handle().add_gpu(GpuId::new(1), GpuSpec::new("1", MIB(300))).unwrap_err();
    assert!(error.to_string().contains("memory of gpu1 is 300 MiB"), "{error}");
    assert_eq!(serving.handle().snapshot().unwrap().gpus.len(), 1);
    let stats = serving.handle().snapshot().unwrap().stats;
    assert_eq!((stats.completed, stats.rejected), (1, 0));
}

/// What others see of a GPU lives as long as its manager renews it, and only one manager can.
#[test]
fn the_shared_record_of_a_gpu_is_its_managers_alone() {
    let mut store = MemoryStore::new();
    let manager = |name: u32| {
        let mut manager = GpuManager::new(ManagerConfig::default()).unwrap();
        manager.add_gpu(GpuId::new(7), GpuSpec::new(name.to_string(), MIB(250))).unwrap();
        manager
    };
    let (mut first, mut second) = (manager(1), manager(2));
    let start = common::now();
    first.publish(start, &mut store).unwrap();
    assert_eq!(store.live(start).unwrap(), [GpuId::new(7)]);
    second.publish(start, &mut store).unwrap();
    let superseded = first.publish(start, &mut store).unwrap_err();
    assert!(matches!(superseded, ManagerError::State(_)), "{superseded}");
    let later = start.saturating_add(ManagerConfig::default().lease);
    assert_eq!(store.get(later, GpuId::new(7)), Ok(None), "not renewed: a miss");
}

/// The command line over the same: requests as lines in, answers as lines out, in the order in which they end.
#[test]
fn gshare_serve_answers_lines_with_lines() {
    let daemon = Local::start();
    let file = daemon.dir.path().join("serve.toml");
    let (gshare, fixture) = (env!("CARGO_BIN_EXE_gshare"), env!("CARGO_BIN_EXE_gshare-fixture"));
    let model = |name: &str, arguments: &str| {
        format!(
            "[[model]]\nname = '{name}'\nmemory = '80MiB'\nload = '50ms'\ninfer = '2ms'\n\
             command = ['{fixture}', 'model', '--memory', '64MiB', '--infer', '2ms'{arguments}]\n"
        )
    };
    let gpus = "[[gpu]]\nvisible = '0'\nmemory = '200MiB'\n[[gpu]]\nvisible = '1'\nmemory = '200MiB'\n";
    let text = format!("{gpus}{}{}", model("good", ""), model("bad", ", '--fail'"));
    std::fs::write(&file, text).unwrap();
    let mut child = Command::new(gshare)
        .args(["serve", "--sim=tiny", "--config"])
        .arg(&file)
        .arg("--socket")
        .arg(daemon.socket())
        .env("GSHARE_SIM_DEVICE", daemon.dir.path().join("device"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = "{\"id\":1,\"model\":\"good\",\"input\":\"hello\"}\n{\"id\":2,\"model\":\"bad\"}\nnonsense\n\
                 {\"id\":3,\"model\":\"none\"}\n{\"id\":4,\"model\":\"good\",\"within_ns\":1}\n";
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let lines = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.sort_by_key(|line| line["id"].as_u64());
    assert_eq!(lines.len(), 5, "{lines:?}");
    assert!(lines[0]["error"].as_str().unwrap().contains("expected"), "{lines:?}");
    assert_eq!(lines[1]["output"], "hello");
    assert!(lines[1]["took_ns"].as_u64().unwrap() >= 2_000_000);
    assert_eq!(lines[2]["error"], "rejected: AttemptsExhausted");
    assert_eq!(lines[3]["error"], "model `none` is not in the file");
    assert_eq!(lines[4]["error"], "rejected: DeadlineMissed");
}
