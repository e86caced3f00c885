//! Daemons that `gshare run` starts where none listens: one per user for real devices, one for simulated ones.
//!
//! Such a daemon is a detached `gshare daemon` at a socket of the user's; several `gshare run` meet there. It ends by
//! itself when nobody has been connected for a while.

use anyhow::Context as _;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a private daemon outlives its last client.
const IDLE_EXIT: &str = "30s";
const PATIENCE: Duration = Duration::from_secs(10);

/// Where files of this user are that must not outlive a boot.
fn runtime_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|text| !text.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("gshare"),
        None => std::env::temp_dir().join(format!("gshare-{}", rustix::process::geteuid().as_raw())),
    }
}

/// Socket of the private daemon.
pub(crate) fn socket(simulated: bool) -> PathBuf {
    runtime_dir().join(if simulated { "gshare-sim.sock" } else { "gshare.sock" })
}

/// Whether somebody listens at a socket.
pub(crate) fn listens(path: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    socket.is_ok_and(|socket| connect(&socket, &address).is_ok())
}

/// Makes sure that a daemon listens at `path`: starts a private one if none does. Says whether it did.
pub(crate) fn ensure(path: &Path) -> anyhow::Result<bool> {
    if listens(path) {
        return Ok(false);
    }
    let dir = path.parent().context("a socket needs a directory")?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let owner = std::os::unix::fs::MetadataExt::uid(&dir.metadata()?);
    let own = rustix::process::geteuid().as_raw();
    // In a common /tmp somebody else may have made it first, to be the daemon of this user's processes.
    anyhow::ensure!(owner == own || owner == 0, "{} belongs to user {owner}", dir.display());
    let log = path.with_extension("log");
    let errors = std::fs::OpenOptions::new().create(true).append(true).open(&log)?;
    Command::new(std::env::current_exe()?)
        .args(["daemon", "--no-config", "--idle-exit", IDLE_EXIT, "--socket"])
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        // Not ended by the terminal's Ctrl-C: other runs may use it.
        .process_group(0)
        .env_remove("LD_PRELOAD")
        .spawn()?;
    let start = Instant::now();
    while !listens(path) {
        anyhow::ensure!(start.elapsed() < PATIENCE, "a daemon does not start: see {}", log.display());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}
