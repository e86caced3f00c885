//! `gshare lab profile`: on a GPU that a table describes, and on a program under the hook.

use crate::common::Local;
use std::path::Path;
use std::process::{Command, Output};

const TABLE: &str = r#"{"points":[
{"sm_basis_points":5000,"quota_basis_points":5000,"batch":1,"throughput_milli_rps":40000,"p50_ns":25000000,"p95_ns":25000000},
{"sm_basis_points":5000,"quota_basis_points":10000,"batch":1,"throughput_milli_rps":70000,"p50_ns":14285714,"p95_ns":14285714},
{"sm_basis_points":10000,"quota_basis_points":5000,"batch":1,"throughput_milli_rps":45000,"p50_ns":22222222,"p95_ns":22222222},
{"sm_basis_points":10000,"quota_basis_points":10000,"batch":1,"throughput_milli_rps":80000,"p50_ns":12500000,"p95_ns":12500000}]}"#;

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
fn a_grid_is_measured_once_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("table.json"), TABLE).unwrap();
    let grid =
        ["--table", "table.json", "--strategy", "grid", "--sms", "50,100", "--quotas", "50,100", "--json"];
    let files = ["--output", "out.json"];
    let first = json(&gshare(folder.path(), &[&grid[..], &files].concat()));
    assert_eq!((&first["trials"], &first["measured_now"]), (&4.into(), &4.into()));
    let out: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("out.json")).unwrap()).unwrap();
    for (found, truth) in
        out["points"].as_array().unwrap().iter().zip([40_000.0, 70_000.0, 45_000.0, 80_000.0])
    {
        let error = found["throughput_milli_rps"].as_f64().unwrap() / truth - 1.0;
        assert!(error.abs() < 0.02, "{found} for {truth}");
    }
    let second = json(&gshare(folder.path(), &grid));
    assert_eq!((&second["trials"], &second["measured_now"]), (&4.into(), &0.into()));
    assert_eq!(second["answer"], first["answer"]);
    let noisier = gshare(folder.path(), &[&grid[..], &["--noise", "9"]].concat());
    assert!(String::from_utf8_lossy(&noisier.stderr).contains("is of something else"));
}

#[test]
fn an_slo_that_no_point_meets_and_a_table_that_is_none_are_said_by_name() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("table.json"), TABLE).unwrap();
    let search = ["--table", "table.json", "--strategy", "inference", "--max-exec", "12ms"];
    let output = gshare(folder.path(), &search);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("no setting has a p95 of at most 12ms"), "{error}");
    for (from, to, says) in [
        ("40000", "0", "throughput is 0"),
        ("\"batch\":1,", "\"batch\":1,\"batches\":2,", "unknown field"),
        (
            "\"sm_basis_points\":5000,\"quota_basis_points\":5000",
            "\"sm_basis_points\":6000,\"quota_basis_points\":5000",
            "no point at",
        ),
    ] {
        std::fs::write(folder.path().join("bad.json"), TABLE.replacen(from, to, 1)).unwrap();
        let output =
            gshare(folder.path(), &["--table", "bad.json", "--strategy", "grid", "--store", "bad.jsonl"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(says), "{error}");
    }
}

#[test]
fn a_program_under_the_hook_is_profiled_and_one_that_hangs_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let common = ["--time", "6s", "--steady", "100", "--sim", "--json"];
    let grid = ["--strategy", "grid", "--sms", "100", "--quotas", "100", "--batch", "1,4"];
    // Its first trial is one without which there is no answer.
    let search = ["--strategy", "training"];
    // A busy machine makes it slower, and never faster.
    let script = "echo ready; while read line; do sleep 0.0$GSHARE_BATCH; echo done; done";
    let args = [&common[..], &grid, &["--name", "good", "--", "sh", "-c", script]].concat();
    let found = json(&gshare(folder.path(), &args));
    assert_eq!((&found["trials"], &found["name"]), (&2.into(), &"good".into()), "{found}");
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
