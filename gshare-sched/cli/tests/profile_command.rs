//! `gshare lab profile` on a program under the hook.

use crate::common::Local;
use std::path::Path;
use std::process::{Command, Output};

fn gshare(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    // A private daemon of its own.
    command.env_remove("GSHARE_SOCKET").env("XDG_RUNTIME_DIR", folder);
    command.args(["lab", "profile"]).args(args).current_dir(folder).output().unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_program_under_the_hook_is_profiled_once_and_one_that_hangs_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let common = ["--time", "6s", "--steady", "100", "--sim", "--json"];
    let grid = ["--strategy", "grid", "--sms", "100", "--quotas", "100", "--batch", "1,4"];
    // Its first trial is one without which there is no answer.
    let search = ["--strategy", "training"];
    // A busy machine makes it slower, and never faster.
    let script = "echo ready; while read line; do sleep 0.0$GSHARE_BATCH; echo done; done";
    let good = ["--name", "good", "--", "sh", "-c", script];
    let args = [&common[..], &grid, &["--output", "out.json"], &good].concat();
    let found = json(&gshare(folder.path(), &args));
    assert_eq!((&found["trials"], &found["name"]), (&2.into(), &"good".into()), "{found}");
    let out: gshare_core::profile::ProfileTable =
        serde_json::from_slice(&std::fs::read(folder.path().join("out.json")).unwrap()).unwrap();
    assert_eq!(serde_json::to_value(&out).unwrap(), found["answer"]["table"]);
    let second = json(&gshare(folder.path(), &args));
    assert_eq!((&second["trials"], &second["measured_now"]), (&2.into(), &0.into()));
    assert_eq!(second["answer"], found["answer"]);
    let other = gshare(folder.path(), &[&common[..], &grid, &["--load", "closed:2"], &good].concat());
    assert!(String::from_utf8_lossy(&other.stderr).contains("is of something else"));
    let at = |point: usize| &found["answer"]["table"]["points"][point];
    let batch = |point: usize| (at(point)["batch"].as_u64(), at(point)["p50_ns"].as_u64().unwrap());
    let ((one, first), (four, second)) = (batch(0), batch(1));
    assert_eq!((one, four), (Some(1), Some(4)), "{found}");
    assert!(first > 10_000_000 && second > 40_000_000, "{found}");
    let hangs =
        ["--answer-timeout", "200ms", "--name", "hangs", "--", "sh", "-c", "echo ready; exec sleep 600"];
    let output = gshare(folder.path(), &[&common[..], &search, &hangs].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("a call was not answered within 200ms"), "{error}");
    let missing = gshare(folder.path(), &[&common[..], &search, &["--", "/no/such/program"]].concat());
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/no/such/program"));
}

#[test]
fn how_busy_the_gpu_was_is_asked_of_nvml_and_warps_are_not_made_up() {
    let folder = tempfile::tempdir().unwrap();
    let grid = ["--strategy", "grid", "--sms", "50,100", "--quotas", "100"];
    let output = Command::new(env!("CARGO_BIN_EXE_gshare"))
        .args(["lab", "profile", "--json", "--sim=tiny", "--time", "6s", "--steady", "100"])
        .args(grid)
        .args(["--", env!("CARGO_BIN_EXE_gshare-fixture"), "spin", "--memory", "64MiB", "--answer", "4"])
        .current_dir(folder.path())
        // A daemon and a device of its own.
        .env_remove("GSHARE_SOCKET")
        .env("XDG_RUNTIME_DIR", folder.path())
        .env("GSHARE_SIM_DEVICE", folder.path().join("device"))
        .output()
        .unwrap();
    let found = json(&output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches(" trials, ").count(), 2, "a line at the start of each trial: {said}");
    let seen = found["utilisation"].as_array().unwrap();
    assert_eq!(seen.len(), 2, "{found}");
    for one in seen {
        let share = one["sm_basis_points"].as_f64().unwrap() / 100.0;
        let (busy, sms) = (one["busy_percent"].as_f64().unwrap(), one["sm_percent"].as_f64().unwrap());
        // Its kernels take every SM that it may use.
        assert!(busy > 1.0 && busy <= 100.0, "{one}");
        assert!(sms > 0.5 && (sms - busy * share / 100.0).abs() < busy * 0.1, "{one}");
        assert!(one["occupancy_percent"].is_null(), "{one}");
        assert!(one["memory_bytes"].as_u64().unwrap() >= 64 << 20, "{one}");
    }
}

#[test]
fn a_daemon_that_refuses_a_trial_is_named_with_its_reason() {
    let daemon = Local::with(|config| config.allow_unlisted = false);
    let socket = daemon.socket();
    let folder = daemon.dir.path();
    let args = ["--strategy", "training", "--sim", "--socket", socket.to_str().unwrap()];
    let output = gshare(folder, &[&args[..], &["--", "sh", "-c", "echo ready; cat"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert!(error.contains("refuses the program") && error.contains("allow_unlisted"), "{error}");
}
