//! Daemons started by `gshare run` where none listens: one per user for real devices, one for simulated devices.
//!
//! Such a daemon is a detached `gshare daemon` at a socket of the user's, shared by several `gshare run`. It ends by itself when
//! no process has been connected for a while. A program may take longer to make its first context, so the starting command
//! keeps a connection of its own until the program has ended.

use anyhow::Context as _;
use gshare_core::wire::{MAX_FRAME, OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{ResourceSpec, RunId};
use rustix::fd::OwnedFd;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};
use std::fs::Metadata;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A private daemon's life after its last client, unless `GSHARE_IDLE_EXIT` sets another.
const IDLE_EXIT: &str = "30s";
const PATIENCE: Duration = Duration::from_secs(10);

/// The directory of this user's files for one boot only.
fn runtime_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|text| !text.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("gshare"),
        None => std::env::temp_dir().join(format!("gshare-{}", own_uid())),
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Socket of the private daemon.
pub(crate) fn socket(simulated: bool) -> PathBuf {
    runtime_dir().join(if simulated { "gshare-sim.sock" } else { "gshare.sock" })
}

/// The socket of this user's private daemon, if it listens there.
pub(crate) fn found(simulated: bool) -> Option<PathBuf> {
    let dir = runtime_dir();
    let own = dir.symlink_metadata().is_ok_and(|dir| check_own(&dir, own_uid()).is_ok());
    Some(socket(simulated)).filter(|socket| own && listens(socket))
}

/// Whether a daemon listens at a socket.
pub(crate) fn listens(path: &Path) -> bool {
    connected(path).is_some()
}

fn connected(path: &Path) -> Option<OwnedFd> {
    let address = SocketAddrUnix::new(path).ok()?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
    connect(&socket, &address).ok().map(|()| socket)
}

/// A listening daemon, kept from ending for want of clients while this value lives, if it is a private one.
#[derive(Debug)]
pub(crate) struct Held {
    /// Whether this call started it.
    pub(crate) started: bool,
    _connection: Option<OwnedFd>,
}

/// Says Hello; gives the answer with the connection. `None`: no daemon answers.
fn greet(path: &Path, hello: &ToDaemon) -> Option<(ToClient, OwnedFd)> {
    let socket = connected(path)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).ok()?;
    let mut frame = Vec::new();
    hello.encode(0, &mut frame);
    // After a refusal the daemon has already answered and closed the connection.
    let _ = send(&socket, &frame, SendFlags::NOSIGNAL);
    let mut answer = [0; MAX_FRAME];
    let mut receive = || rustix::io::retry_on_intr(|| recv(&socket, &mut answer[..], RecvFlags::empty()));
    // The first error of such a connection is the unread Hello.
    let (length, _) = receive().or_else(|_| receive()).ok()?;
    let (_, answer) = ToClient::decode(&answer[..length]).ok()?;
    Some((answer, socket))
}

/// Asks a daemon whether it will serve a process with this Hello. Gives a notice if it will not, and the process may run.
///
/// # Errors
/// The daemon refuses: its reason.
pub(crate) fn ask(path: &Path, hello: &ToDaemon) -> anyhow::Result<Option<String>> {
    match greet(path, hello) {
        Some((ToClient::Refused { code, text }, _)) => {
            anyhow::bail!("the daemon at {} refuses the program: {text} ({code:?})", path.display())
        }
        Some((ToClient::Unserved { code, text, .. }, _)) => Ok(Some(format!(
            "the daemon does not serve the program, which runs within its limits: {text} ({code:?})"
        ))),
        // Without an answer the program starts, and follows its policy.
        _ => Ok(None),
    }
}

/// Registers as a process of a daemon; `None` if the daemon does not take it.
fn hold(path: &Path) -> Option<OwnedFd> {
    let hello = ToDaemon::Hello {
        pid_start: 0,
        pid: 0,
        // A name of its own, made of the program and its pid.
        run: RunId::NONE,
        name: String::new(),
        program: "gshare run".into(),
        spec: ResourceSpec::UNLIMITED,
        on_loss: OnDaemonLoss::Open,
    };
    let (answer, socket) = greet(path, &hello)?;
    matches!(answer, ToClient::Welcome { .. }).then_some(socket)
}

/// Joins the daemon at a named socket. None is started, since the named daemon may have a configuration of its own.
///
/// # Errors
/// No daemon listens there.
pub(crate) fn named(path: &Path) -> anyhow::Result<Held> {
    anyhow::ensure!(
        listens(path),
        "no daemon listens at {}: start one with `gshare daemon --socket {0}`, or leave out --socket and GSHARE_SOCKET for a \
         private one",
        path.display()
    );
    let private = path.parent() == Some(&runtime_dir());
    Ok(Held { started: false, _connection: private.then(|| hold(path)).flatten() })
}

/// Makes sure of a listening daemon at `path`: starts a private daemon if there is none.
pub(crate) fn ensure(path: &Path) -> anyhow::Result<Held> {
    let dir = path.parent().context("a socket needs a directory")?;
    let private = dir == runtime_dir();
    if private {
        // Comes before any trust in a daemon there: in a common /tmp another user may have made the directory first, to be the
        // daemon of this user's processes.
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        check_own(&dir.symlink_metadata()?, own_uid()).with_context(|| dir.display().to_string())?;
        if let Some(connection) = hold(path) {
            return Ok(Held { started: false, _connection: Some(connection) });
        }
    }
    if listens(path) {
        return Ok(Held { started: false, _connection: None });
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let owner = dir.metadata()?.uid();
    anyhow::ensure!(owner == own_uid() || owner == 0, "{} belongs to user {owner}", dir.display());
    let log = path.with_extension("log");
    let errors = std::fs::OpenOptions::new().create(true).read(true).append(true).open(&log)?;
    let idle_exit = std::env::var_os("GSHARE_IDLE_EXIT").filter(|text| !text.is_empty());
    Command::new(std::env::current_exe()?)
        .args(["daemon", "--config", "/dev/null", "--private"])
        .arg(idle_exit.unwrap_or_else(|| IDLE_EXIT.into()))
        .arg("--socket")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        // The terminal's Ctrl-C must not end it: other runs may use it.
        .process_group(0)
        .env_remove("LD_PRELOAD")
        .spawn()?;
    let start = Instant::now();
    loop {
        if let Some(connection) = hold(path) {
            return Ok(Held { started: true, _connection: Some(connection) });
        }
        anyhow::ensure!(start.elapsed() < PATIENCE, "a daemon does not start: see {}", log.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a directory is this user's (or root's), and no other user can put a socket there.
fn check_own(dir: &Metadata, own: u32) -> anyhow::Result<()> {
    anyhow::ensure!(dir.is_dir(), "not a directory");
    anyhow::ensure!(dir.uid() == own || dir.uid() == 0, "belongs to user {}", dir.uid());
    let mode = dir.mode() & 0o777;
    anyhow::ensure!(mode & 0o022 == 0, "others may write to it (mode {mode:o}; chmod go-w)");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_directory_that_others_may_have_a_daemon_in_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let (own, link) = (dir.path().join("own"), dir.path().join("link"));
        std::fs::create_dir(&own).unwrap();
        std::os::unix::fs::symlink(&own, &link).unwrap();
        let check = |path: &Path, uid| {
            let checked = check_own(&path.symlink_metadata().unwrap(), uid);
            checked.err().map(|error| error.to_string())
        };
        let mut uid = own_uid();
        std::fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(check(&own, uid), None);
        assert!(check(&link, uid).unwrap().contains("not a directory"));
        if uid == 0 {
            // Root's folders are trusted.
            uid = 65_534;
            std::os::unix::fs::chown(&own, Some(uid), None).unwrap();
        }
        assert!(check(&own, uid + 1).unwrap().contains(&format!("belongs to user {uid}")));
        for mode in [0o775, 0o757] {
            std::fs::set_permissions(&own, Permissions::from_mode(mode)).unwrap();
            assert!(check(&own, uid).unwrap().contains(&format!("{mode:o}")));
        }
    }
}
