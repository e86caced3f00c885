//! The simulated device: what `--sim` accepts, and that a device that is simulated is called so however it was reached.

use gshare_runner::libraries::SimulatorDir;
use std::process::{Command, Output};

fn gshare(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    command.args(arguments).env_remove("LD_LIBRARY_PATH");
    command
}

fn text(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn a_wrong_specification_starts_neither_a_daemon_nor_a_program() {
    let place = tempfile::tempdir().unwrap();
    let mark = place.path().join("started");
    for (spec, reason) in [
        ("k80", "v100, a100, h100"),
        ("a100,driver=9.0", "11.0"),
        ("a100,devices=0", "devices"),
        ("v100,mig=1g.10gb", "MIG"),
        ("a100,colour=red", "colour"),
    ] {
        let sim = format!("--sim={spec}");
        let program = ["run", &sim, "--quota", "0.5", "--", "touch", mark.to_str().unwrap()];
        let output = gshare(&program).env("XDG_RUNTIME_DIR", place.path()).output().unwrap();
        let (_, error) = text(&output);
        assert_eq!(output.status.code(), Some(2), "{spec}: {error}");
        assert!(error.contains(reason), "{spec}: {error}");
        assert!(!mark.exists(), "{spec}: the program was started");
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "{spec}: a daemon was started");
    }
}

#[test]
fn a_simulated_driver_on_the_library_path_is_called_simulated() {
    let place = tempfile::tempdir().unwrap();
    let driver = SimulatorDir::new().unwrap();
    let output = gshare(&["lab", "shares", "--json", "--seconds", "1"])
        .env("LD_LIBRARY_PATH", driver.path())
        .env("XDG_RUNTIME_DIR", place.path())
        .env("GSHARE_SIM_DEVICE", place.path().join("device"))
        .output()
        .unwrap();
    let (answer, error) = text(&output);
    assert!(
        answer.contains("\"device\": \"simulated\"") || answer.contains("\"device\":\"simulated\""),
        "{answer}{error}"
    );
    assert!(!error.contains("real device"), "{error}");
}
