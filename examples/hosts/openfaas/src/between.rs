//! Files in shared memory that carry long values between the stages of a pipeline.
//!
//! A stage writes its values into a file in `$GSHARE_BETWEEN` and answers with the header `Gshare-File`, the name of the file.
//! The host forwards the name instead of the bytes. The next stage maps the file and removes it. If the file is still there
//! after that stage's answer, the host removes it. The folder is removed with the instance. Short values stay in the body.

use axum::http::{HeaderMap, HeaderName};
use gshare_core::InstanceId;
use gshare_runner::Scratch;
use gshare_runner::confine::User;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::{Path, PathBuf};

/// Header with the name of a file.
pub const FILE: HeaderName = HeaderName::from_static("gshare-file");

/// The folders of all instances of a host.
#[derive(Debug)]
pub struct Between {
    root: PathBuf,
}

impl Between {
    /// Prepares the folders of this host, which end with the second value.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn new() -> io::Result<(Self, Scratch)> {
        // Functions may run as another user, which enters its own folder by name but cannot list the others.
        let folder = Scratch::below(Path::new("/dev/shm"), "stages", 0o711)?;
        Ok((Self { root: folder.path().to_owned() }, folder))
    }

    fn of(&self, instance: InstanceId) -> PathBuf {
        self.root.join(instance.number().to_string())
    }

    /// Makes the folder of an instance, which only the instance's user can read.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn folder(&self, instance: InstanceId, user: Option<User>) -> io::Result<PathBuf> {
        let folder = self.of(instance);
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => {
                made?;
                if let Some(user) = user {
                    chown(&folder, Some(user.uid), Some(user.gid))?;
                }
            }
        }
        Ok(folder)
    }

    /// The file that a stage's answer names, if any.
    ///
    /// # Errors
    /// The reason, if the name contains a path.
    pub fn on_its_way(
        &self,
        instance: InstanceId,
        answer: &HeaderMap,
    ) -> Result<Option<OnItsWay>, &'static str> {
        let Some(name) = answer.get(FILE) else { return Ok(None) };
        let name = name.to_str().ok().filter(|name| !name.contains('/') && ![".", ".."].contains(name));
        let name = name.ok_or("Gshare-File: need the name of a file in $GSHARE_BETWEEN, without a path")?;
        Ok(Some(OnItsWay(self.of(instance).join(name))))
    }

    /// Removes the folder of an instance that has ended.
    pub fn forget(&self, instance: InstanceId) {
        // Most instances have no folder.
        let _ = std::fs::remove_dir_all(self.of(instance));
    }
}

/// A file between two stages. Dropping it removes the file.
#[derive(Debug)]
pub struct OnItsWay(PathBuf);

impl Drop for OnItsWay {
    fn drop(&mut self) {
        // The next stage has usually removed the file already.
        let _ = std::fs::remove_file(&self.0);
    }
}
