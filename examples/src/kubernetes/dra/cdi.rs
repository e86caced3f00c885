//! CDI specs: the part of the format that is used here, and the directory they are written to.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The oldest version of the format that has all that is used here; every runtime with CDI reads it.
pub const VERSION: &str = "0.6.0";
/// Class of our devices.
pub const CLASS: &str = "share";

/// A file in `/var/run/cdi`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Of the format.
    pub cdi_version: String,
    /// Vendor and class of its devices.
    pub kind: String,
    /// What the driver remembers with it.
    pub annotations: BTreeMap<String, String>,
    /// Its devices.
    pub devices: Vec<Device>,
}

/// A device that a container may be given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Unique among its kind.
    pub name: String,
    /// What it brings.
    pub container_edits: Edits,
}

/// What is added to a container.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `KEY=value`.
    pub env: Vec<String>,
    /// Files and directories of the host.
    pub mounts: Vec<Mount>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// On the host.
    pub host_path: String,
    /// In the container.
    pub container_path: String,
    /// As of mount(8).
    pub options: Vec<String>,
}

/// The directory of the specs. One file per claim, which appears and disappears at once.
#[derive(Debug, Clone)]
pub struct Directory(PathBuf);

/// Of names of temporary files.
static NEXT: AtomicU64 = AtomicU64::new(0);

impl Directory {
    /// Makes it if need be, and removes what a driver that was killed while it wrote has left.
    ///
    /// # Errors
    /// When it cannot be made or read.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let directory = Self(path.into());
        fs::create_dir_all(&directory.0)?;
        for entry in fs::read_dir(&directory.0)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(&prefix()) && name.ends_with(".tmp") {
                fs::remove_file(path)?;
            }
        }
        Ok(directory)
    }

    /// The file of a claim, whose UID has been checked.
    pub fn file(&self, uid: &str) -> PathBuf {
        self.0.join(format!("{}{uid}.json", prefix()))
    }

    /// The spec of a claim, if there is one. A file that cannot be read as one counts as none: it is written anew.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn read(&self, uid: &str) -> io::Result<Option<Spec>> {
        match fs::read(self.file(uid)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the spec of a claim: whoever reads sees the old one or the new one, also after a crash.
    ///
    /// # Errors
    /// When it cannot be written; what was there stays.
    pub fn write(&self, uid: &str, spec: &Spec) -> io::Result<()> {
        let file = self.file(uid);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = file.with_extension(format!("{}-{serial}.tmp", std::process::id()));
        let written = write_synced(&temporary, spec).and_then(|()| fs::rename(&temporary, &file));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written?;
        File::open(&self.0)?.sync_all()
    }

    /// Removes the spec of a claim; there need not be one.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        match fs::remove_file(self.file(uid)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => File::open(&self.0)?.sync_all(),
        }
    }
}

fn prefix() -> String {
    format!("{}-{CLASS}_", super::DRIVER)
}

fn write_synced(path: &Path, spec: &Spec) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&serde_json::to_vec_pretty(spec)?)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_is_there_whole_or_not_at_all_and_leftovers_go() {
        let dir = tempfile::tempdir().unwrap();
        let left = dir.path().join(format!("{}u.1-0.tmp", prefix()));
        let others = dir.path().join("nvidia.yaml");
        for file in [&left, &others] {
            fs::write(file, "{").unwrap();
        }
        let cdi = Directory::open(dir.path()).unwrap();
        assert!(!left.exists() && others.exists(), "what is another's stays");
        let spec = Spec {
            cdi_version: VERSION.into(),
            kind: "v/c".into(),
            annotations: BTreeMap::new(),
            devices: Vec::new(),
        };
        assert_eq!(cdi.read("u").unwrap(), None);
        cdi.write("u", &spec).unwrap();
        assert_eq!(cdi.read("u").unwrap(), Some(spec));
        fs::write(cdi.file("u"), "{").unwrap();
        assert_eq!(cdi.read("u").unwrap(), None, "not a spec: written anew");
        cdi.remove("u").unwrap();
        cdi.remove("u").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
