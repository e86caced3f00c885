//! The daemon's socket files: the lock on a path, and the removal of a dead daemon's socket.

use crate::server::DaemonError;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Path of a file beside a socket, with the socket's name and this ending.
pub(crate) fn beside(socket: &Path, ending: &str) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Makes the directory of a socket, and takes a lock beside the socket. The daemon holds the lock for its whole life: otherwise
/// one of two daemons that start at once could remove the socket on which the other is about to listen.
pub(crate) fn claim(socket: &Path) -> Result<File, DaemonError> {
    let path = beside(socket, ".lock");
    let setup = |cause| DaemonError::Setup { what: path.display().to_string(), cause };
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(setup)?;
    }
    // Only this user may read the file, since a process that may read it may lock it.
    let open = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    loop {
        let file = open().map_err(setup)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(DaemonError::InUse { path: socket.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(setup(error)),
        }
        // A stopping daemon removes its lock file, and this file may have been opened just before.
        let (locked, there) = (file.metadata().map_err(setup)?, std::fs::metadata(&path));
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (locked.dev(), locked.ino())) {
            return Ok(file);
        }
    }
}

/// Frees the path of a socket: removes a socket without a listening process, and no other file.
///
/// # Errors
/// [`DaemonError::NotASocket`] for another file, also for a link; [`DaemonError::InUse`] for a socket in use by a process.
pub(crate) fn clear_the_way(path: &Path) -> Result<(), DaemonError> {
    let setup = |cause| DaemonError::Setup { what: path.display().to_string(), cause };
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(setup(error)),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(DaemonError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    let address = SocketAddrUnix::new(path).map_err(|cause| setup(cause.into()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(setup),
        // The kernel reports a socket's other type only while a process has the socket.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(DaemonError::InUse { path: path.to_owned() }),
        Err(cause) => Err(setup(cause.into())),
    }
}

pub(crate) fn bind_frames(path: &Path) -> Result<OwnedFd, DaemonError> {
    let setup = |cause: Errno| DaemonError::Setup {
        what: format!("socket = {}", path.display()),
        cause: cause.into(),
    };
    clear_the_way(path)?;
    let address = SocketAddrUnix::new(path).map_err(setup)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(setup)?;
    bind(&socket, &address).map_err(setup)?;
    open_to_all(path)?;
    listen(socket.as_fd(), 1024).map_err(setup)?;
    Ok(socket)
}

pub(crate) fn bind_admin(path: &Path) -> Result<UnixListener, DaemonError> {
    let setup = |cause| DaemonError::Setup { what: format!("admin_socket = {}", path.display()), cause };
    clear_the_way(path)?;
    let listener = UnixListener::bind(path).map_err(setup)?;
    open_to_all(path).map_err(setup)?;
    Ok(listener)
}

/// Lets every user connect. The daemon decides access by the peer's uid, so a refused user gets an answer.
fn open_to_all(path: &Path) -> io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_at_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gshare.sock");
        clear_the_way(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        let error = clear_the_way(&path).unwrap_err();
        assert!(matches!(&error, DaemonError::NotASocket { path: at } if *at == path), "{error}");
        assert!(error.to_string().contains("gshare.sock"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();

        let in_use = || matches!(clear_the_way(&path), Err(DaemonError::InUse { .. }));
        let admin = bind_admin(&path).unwrap();
        assert!(in_use() && bind_admin(&path).is_err() && bind_frames(&path).is_err());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(clear_the_way(&link), Err(DaemonError::NotASocket { .. })));
        drop(admin);
        // Sockets of both types count as in use: the next daemon need not have the same keys.
        let frames = bind_frames(&path).unwrap();
        assert!(in_use() && bind_admin(&path).is_err());
        drop(frames);
        let metrics = crate::config::MetricsAddress::Unix(path.clone());
        let endpoint = crate::http::Listener::bind(&metrics).unwrap();
        assert!(in_use() && crate::http::Listener::bind(&metrics).is_err());
        drop(endpoint);
        clear_the_way(&path).unwrap();
        assert!(!path.exists());
    }
}
