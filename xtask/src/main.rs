//! `cargo gshare ARGUMENTS` in a checkout: builds the command's program and its shared libraries, and becomes the program. `cargo run`
//! alone would build the command without the libraries.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The profile of these builds in the workspace's manifest.
const PROFILE: &str = "checkout";

/// The packages of all commands. Cargo enables the features that the chosen packages ask for together: with other packages for another
/// command, half of the crates would be built again.
const PACKAGES: [&str; 5] =
    ["gshare-cli", "gshare-openfaas", "gshare-hook", "gshare-fake-cuda", "gshare-store-c"];
/// The work of the first build: CPU seconds, and MB of disk.
const FIRST_BUILD: (u64, u64) = (600, 600);

/// The host of functions is a program of its own.
fn program_of(command: Option<&str>) -> &'static str {
    if command == Some("up") { "gshare-openfaas" } else { "gshare" }
}

fn what_to_build(program: &'static str) -> Vec<&'static str> {
    let packages = PACKAGES.into_iter().flat_map(|name| ["--package", name]);
    ["build", "--profile", PROFILE, "--lib", "--bin", program].into_iter().chain(packages).collect()
}

fn announce(target: &Path) {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let (cpu_seconds, megabytes) = FIRST_BUILD;
    let minutes = (cpu_seconds / cores).div_ceil(60);
    eprintln!(
        "cargo gshare: builds {}, once: about {minutes} min on {cores} quiet cores, and {megabytes} MB in {}",
        PACKAGES.join(", "),
        target.display()
    );
}

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
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let first = arguments.first().map(|word| word.to_string_lossy());
    let command = first.as_deref();
    let name = program_of(command);
    let own = std::env::current_exe()?;
    let target = own.ancestors().nth(2).unwrap_or(Path::new("target"));
    let folder = target.join(PROFILE);
    let program = folder.join(name);
    if ["gshare", "gshare-openfaas"].iter().all(|name| !folder.join(name).exists()) {
        announce(target);
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(what_to_build(name)).arg("--target-dir").arg(target);
    if program.exists() && !std::io::stderr().is_terminal() {
        build.arg("--quiet");
    }
    if !build.status()?.success() {
        return Ok(ExitCode::FAILURE);
    }
    let mut program = Command::new(program);
    match command {
        // The host's help names the command of the user.
        Some("up") => program.arg0("gshare up").args(&arguments[1..]),
        _ => program.args(&arguments),
    };
    Err(program.exec())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the first command after the demo built 128 crates again, with other features.
    #[test]
    fn commands_differ_in_the_program_alone_so_that_they_share_all_crates() {
        let [host, command] = [Some("up"), Some("ps")].map(|command| what_to_build(program_of(command)));
        let differ: Vec<_> = host.iter().zip(&command).filter(|(one, other)| one != other).collect();
        assert_eq!(differ, [(&"gshare-openfaas", &"gshare")]);
        assert!(host.len() == command.len() && command.contains(&"gshare-store-c"));
    }
}
