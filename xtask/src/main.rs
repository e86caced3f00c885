//! `cargo gshare ARGUMENTS` in a checkout: builds the command's program and its shared libraries, and becomes the program. `cargo run`
//! alone would build the command without the libraries.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The profile of these builds in the workspace's manifest.
const PROFILE: &str = "checkout";

/// The program and the packages of a command, and the work of their first build: CPU seconds, and MB of disk.
struct Needed {
    program: &'static str,
    packages: Vec<&'static str>,
    cpu_seconds: u64,
    megabytes: u64,
}

impl Needed {
    /// The host of functions is a program of its own, and needs no other.
    fn by(command: Option<&str>, is_demo: bool) -> Self {
        let (program, of_it, cpu_seconds, megabytes) = match command {
            Some("up") => ("gshare-openfaas", "gshare-openfaas", 420, 400),
            _ => ("gshare", "gshare-cli", 450, 450),
        };
        let mut packages = vec![of_it, "gshare-hook", "gshare-fake-cuda"];
        if !is_demo {
            packages.push("gshare-store-c");
        }
        Self { program, packages, cpu_seconds, megabytes }
    }

    fn announce(&self, target: &Path) {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
        let minutes = (self.cpu_seconds / cores).div_ceil(60);
        eprintln!(
            "cargo gshare: builds {}, once: about {minutes} min on {cores} quiet cores, and {} MB in {}",
            self.packages.join(", "),
            self.megabytes,
            target.display()
        );
    }
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
    let words: Vec<_> = arguments.iter().map(|word| word.to_string_lossy()).collect();
    let command = words.first().map(AsRef::as_ref);
    let is_demo = match command {
        Some("up") => words.iter().any(|word| word.starts_with("--demo")),
        other => other == Some("demo"),
    };
    let needed = Needed::by(command, is_demo);
    let own = std::env::current_exe()?;
    let target = own.ancestors().nth(2).unwrap_or(Path::new("target"));
    let program = target.join(PROFILE).join(needed.program);
    if !program.exists() {
        needed.announce(target);
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--lib", "--bin", needed.program, "--profile", PROFILE, "--target-dir"]).arg(target);
    build.args(needed.packages.iter().flat_map(|name| ["--package", name]));
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
    use super::Needed;

    #[test]
    fn a_command_builds_what_it_needs_alone() {
        let demo = Needed::by(Some("up"), true);
        assert_eq!(
            (demo.program, &demo.packages[..]),
            ("gshare-openfaas", &["gshare-openfaas", "gshare-hook", "gshare-fake-cuda"][..])
        );
        assert!(!Needed::by(None, false).packages.contains(&"gshare-openfaas"));
    }
}
