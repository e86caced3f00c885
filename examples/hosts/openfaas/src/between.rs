//! Files in shared memory, by which the stages of a pipeline hand long values on.
//!
//! A stage that answers with the header `Gshare-File` has put its values into a file of that name, in the folder that `$GSHARE_BETWEEN`
//! names. The host passes on the name instead of the bytes. The next stage maps the file and removes it. If the file is still there when
//! that stage has answered, the host removes it, and it removes the folder with its instance. A short value stays in the body.

use axum::http::{HeaderMap, HeaderName};
use gshare_core::InstanceId;
use gshare_runner::confine::User;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::{Path, PathBuf};

/// The header that names a file.
pub const FILE: HeaderName = HeaderName::from_static("gshare-file");

/// The folders of all instances of a host.
#[derive(Debug)]
pub struct Between {
    root: PathBuf,
}

impl Between {
    /// The folders of the host with this folder of records. Files of an earlier host are removed.
    ///
    /// # Errors
    /// When the folder cannot be made, also because it is another user's.
    pub fn new(records: &Path) -> io::Result<Self> {
        let mut hash = DefaultHasher::new();
        records.canonicalize()?.hash(&mut hash);
        let root = Path::new("/dev/shm").join(format!("gshare-stages-{:016x}", hash.finish()));
        match std::fs::remove_dir_all(&root) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Functions may run as another user, who passes through to a folder whose name it knows.
        std::fs::DirBuilder::new().mode(0o711).create(&root)?;
        Ok(Self { root })
    }

    fn of(&self, instance: InstanceId) -> PathBuf {
        self.root.join(instance.number().to_string())
    }

    /// The folder of an instance, for its processes alone.
    ///
    /// # Errors
    /// When it cannot be made.
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

    /// The file that the answer of a stage names, if it names one.
    ///
    /// # Errors
    /// The reason, if the answer names no file in the folder.
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
        // Most instances have none.
        let _ = std::fs::remove_dir_all(self.of(instance));
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

/// A file on its way between two stages, which is removed when this is dropped.
#[derive(Debug)]
pub struct OnItsWay(PathBuf);

impl Drop for OnItsWay {
    fn drop(&mut self) {
        // The next stage has removed it, unless it failed.
        let _ = std::fs::remove_file(&self.0);
    }
}
