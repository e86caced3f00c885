//! The end of processes that outlive the process that started them.
//!
//! The kernel kills a function's process when the host dies, and the host kills the function's process group. But forked
//! children survive a killed host, and a child in a session of its own survives its function. All of them carry the path of the
//! function's folder of secrets in their environment ([`FOLDER`]). No other process has this path, so it identifies them.
//!
//! A second process of the host, the **reaper**, waits for the end of the host and then kills them.

use anyhow::Context as _;
use std::ffi::OsStr;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Environment variable with the path of a function's secrets.
pub const FOLDER: &str = "secret_mount_path";

/// Searches until no process is left, at most this often: a process may fork during a search.
const ROUNDS: usize = 10;

/// Starts the reaper for all folders below `mounts`. It exits after the end of this process.
///
/// # Errors
/// If the process cannot be started.
pub fn start(mounts: &Path) -> anyhow::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    // In its own process group, Ctrl-C does not kill it before the host.
    command.arg("--reap").arg(mounts).process_group(0);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    child.context("the reaper of leftover processes")
}

/// Runs as the reaper: waits for the end of its input, which means the end of the host.
///
/// # Errors
/// If the input cannot be read.
pub fn run(mounts: &Path) -> anyhow::Result<()> {
    std::io::stdin().read_to_end(&mut Vec::new())?;
    sweep(mounts);
    Ok(())
}

/// Kills the processes with a folder of secrets at or below `folder`. Returns their number.
pub fn sweep(folder: &Path) -> usize {
    let mut killed = 0;
    for _ in 0..ROUNDS {
        let found: Vec<rustix::process::Pid> = processes().filter(|pid| is_of(*pid, folder)).collect();
        if found.is_empty() {
            break;
        }
        for pid in found {
            killed += usize::from(rustix::process::kill_process(pid, rustix::process::Signal::KILL).is_ok());
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    killed
}

fn processes() -> impl Iterator<Item = rustix::process::Pid> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| rustix::process::Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

/// Whether the folder of the process is `folder` or lies below it. A zombie has no environment and does not count.
fn is_of(pid: rustix::process::Pid, folder: &Path) -> bool {
    let Ok(environment) = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())) else {
        return false;
    };
    let value = |entry: &[u8]| {
        let value = entry.strip_prefix(FOLDER.as_bytes())?.strip_prefix(b"=")?;
        Some(Path::new(OsStr::from_bytes(value)).starts_with(folder))
    };
    environment.split(|byte| *byte == 0).any(|entry| value(entry) == Some(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_folder_and_so_are_the_processes_it_has_left() {
        let dir = tempfile::tempdir().unwrap();
        let start = |folder: &str| {
            let mut command = Command::new("/bin/sh");
            // The shell ends, but its child lives on in a session of its own.
            command.args(["-c", "setsid sleep 1000 & echo $!"]).env(FOLDER, dir.path().join(folder));
            let mut shell =
                command.stderr(Stdio::null()).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            let output = shell.stdout.take().unwrap();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).unwrap();
            shell.wait().unwrap();
            line.trim().parse::<i32>().unwrap()
        };
        let (one, ten) = (start("f.1"), start("f.10"));
        let lives = |pid: i32| is_of(rustix::process::Pid::from_raw(pid).unwrap(), dir.path());
        // A program that is just being started has no environment for a moment.
        while !(lives(one) && lives(ten)) {
            std::thread::yield_now();
        }
        assert!(sweep(&dir.path().join("f.1")) >= 1);
        assert!(!lives(one) && lives(ten), "the folder beside it is another function's");
        sweep(dir.path());
        assert!(!lives(ten));
    }
}
