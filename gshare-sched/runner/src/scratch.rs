//! Folders for the life of a process, which go also after `kill -9`: the next process to make one removes them.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Names of such folders begin so; a purpose, the pid of the process and random letters follow.
const PREFIX: &str = "gshare-";

/// A folder that goes when this value is dropped, or with the next [`Scratch`] in the same place after this process was killed.
#[derive(Debug)]
pub struct Scratch {
    dir: tempfile::TempDir,
    /// Locked while this process lives.
    _lock: File,
}

impl Scratch {
    /// Makes a folder in the system's place for temporary files, open to no other user.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn new(purpose: &str) -> io::Result<Self> {
        Self::below(&std::env::temp_dir(), purpose, 0o700)
    }

    /// Makes a folder in `parent` with this mode, which the umask narrows.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn below(parent: &Path, purpose: &str, mode: u32) -> io::Result<Self> {
        sweep(parent);
        let dir = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{purpose}-{}-", std::process::id()))
            .permissions(Permissions::from_mode(mode))
            .tempdir_in(parent)?;
        let lock = File::open(dir.path())?;
        lock.lock_shared()?;
        Ok(Self { dir, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes the folders of killed processes of this user.
fn sweep(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| {
            let (_, pid) = name.strip_prefix(PREFIX)?.rsplit_once('-')?.0.rsplit_once('-')?;
            pid.parse::<u32>().ok()
        });
        // A process of another PID namespace is not to be seen here, but its lock is.
        let ended = pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        if ended && File::open(entry.path()).is_ok_and(|dir| dir.try_lock().is_ok()) {
            // Another user's cannot be removed.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let named = |purpose: &str, pid: u32| format!("{PREFIX}{purpose}-{pid}-ab12");
        let (lives, locked, other) =
            (named("sim", std::process::id()), named("shim", ended.id()), "gshare-sim-device-0".to_owned());
        let (left, also) = (named("sim", ended.id()), named("build-dag", ended.id()));
        for name in [&left, &also, &lives, &locked, &other] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let lock = File::open(dir.path().join(&locked)).unwrap();
        lock.lock_shared().unwrap();
        let own = Scratch::below(dir.path(), "demo", 0o700).unwrap();
        let there = |name: &str| dir.path().join(name).exists();
        assert_eq!(
            [&left, &also, &lives, &locked, &other].map(|name| there(name)),
            [false, false, true, true, true]
        );
        assert_eq!(own.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let path = own.path().to_owned();
        drop(own);
        assert!(!path.exists());
    }
}
