//! `cargo gshare ARGUMENTS` in a checkout: builds the command and its shared libraries, and becomes the command. `cargo run` alone would
//! build the command without the libraries.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

const PACKAGES: [&str; 4] = ["gshare-cli", "gshare-openfaas", "gshare-hook", "gshare-fake-cuda"];

fn main() -> ExitCode {
    match become_the_command() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cargo gshare: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns only with the exit code of a failed build, or with an error.
fn become_the_command() -> std::io::Result<ExitCode> {
    let own = std::env::current_exe()?;
    let target = own.ancestors().nth(2).unwrap_or(Path::new("target"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--target-dir"])
        .arg(target)
        .args(PACKAGES.iter().flat_map(|name| ["--package", name]))
        .status()?;
    if !built.success() {
        return Ok(ExitCode::FAILURE);
    }
    Err(Command::new(target.join("release/gshare")).args(std::env::args_os().skip(1)).exec())
}
