//! CDI specs: the part of the format that is used here, and the directory they are written to.

use crate::kubernetes::DOMAIN;
use gshare_openfaas::kubernetes::injection;
use gshare_openfaas::records::{names, remove, replace, sweep};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The oldest version of the format with all fields used here; every runtime with CDI reads it.
pub const VERSION: &str = "0.6.0";
/// Class of our devices.
pub const CLASS: &str = "share";

/// A file in `/var/run/cdi`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Version of the format.
    pub cdi_version: String,
    /// Vendor and class of its devices.
    pub kind: String,
    /// Notes of the driver.
    pub annotations: BTreeMap<String, String>,
    /// Devices of this kind.
    pub devices: Vec<Device>,
}

/// A device that a container may be given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Unique among its kind.
    pub name: String,
    /// The changes to a container with this device.
    pub container_edits: Edits,
}

/// The changes to a container.
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

impl From<&injection::File> for Mount {
    fn from(file: &injection::File) -> Self {
        Self {
            host_path: file.host.display().to_string(),
            container_path: file.container.into(),
            options: [if file.read_only { "ro" } else { "rw" }, "nosuid", "nodev", "rbind"]
                .map(str::to_owned)
                .into(),
        }
    }
}

/// The directory of the CDI specs, and the directory of the share files for containers. Each claim has one file in both,
/// which appears and disappears atomically.
#[derive(Debug, Clone)]
pub struct Directory {
    specs: PathBuf,
    hook: PathBuf,
}

/// Containers of any user read these files.
pub(crate) const MODE: u32 = 0o644;
/// Directory of the files of shares, beside the hook.
const SHARES: &str = "shares";

/// The file on the host that tells the containers of a claim their share: the hook reads it as `share.env` beside itself.
pub fn share_file(hook: &Path, uid: &str) -> PathBuf {
    hook.with_file_name(SHARES).join(format!("{uid}.env"))
}

impl Spec {
    /// The spec of a device.
    pub fn of(kind: String, name: &str, edits: Edits, annotations: BTreeMap<String, String>) -> Self {
        let devices = vec![Device { name: name.to_owned(), container_edits: edits }];
        Self { cdi_version: VERSION.into(), kind, annotations, devices }
    }

    /// The share file: the hook's variables, one per line.
    fn share(&self) -> String {
        let variables = self.devices.iter().flat_map(|device| &device.container_edits.env);
        variables.filter(|line| line.starts_with("GSHARE_")).map(|line| format!("{line}\n")).collect()
    }

    /// A note of the driver: `key` without its domain.
    pub fn note(&self, key: &str) -> Option<&str> {
        self.annotations.get(&format!("{DOMAIN}/{key}")).map(String::as_str)
    }
}

impl Directory {
    /// Makes the directories if necessary, and removes leftovers of a driver that was killed during a write. Share files
    /// lie beside `hook`.
    ///
    /// # Errors
    /// When one cannot be made or read.
    pub fn open(specs: impl Into<PathBuf>, hook: &Path) -> io::Result<Self> {
        let (directory, shares) =
            (Self { specs: specs.into(), hook: hook.into() }, hook.with_file_name(SHARES));
        fs::create_dir_all(&directory.specs)?;
        fs::create_dir_all(&shares)?;
        sweep(&directory.specs, &prefix())?;
        for name in names(&shares)? {
            // The claim's spec is gone, because the node restarted or an unprepare was killed.
            if name.strip_suffix(".env").is_none_or(|uid| !directory.file(uid).exists()) {
                fs::remove_file(shares.join(name))?;
            }
        }
        Ok(directory)
    }

    /// The file of a claim, by its checked UID.
    pub fn file(&self, uid: &str) -> PathBuf {
        self.specs.join(format!("{}{uid}.json", prefix()))
    }

    /// The UIDs of all claims that have a spec.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn uids(&self) -> io::Result<Vec<String>> {
        let uid = |name: String| Some(name.strip_prefix(&prefix())?.strip_suffix(".json")?.to_owned());
        Ok(names(&self.specs)?.into_iter().filter_map(uid).collect())
    }

    /// The spec of a claim, if there is one. An invalid file counts as missing and is written again.
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

    /// Writes the share file of a claim and then its spec. Each reader sees the old or the new file, also after a crash.
    ///
    /// # Errors
    /// If a file cannot be written; the old file stays.
    pub fn write(&self, uid: &str, spec: &Spec) -> io::Result<()> {
        replace(&share_file(&self.hook, uid), spec.share().as_bytes(), MODE)?;
        replace(&self.file(uid), &serde_json::to_vec_pretty(spec)?, MODE)
    }

    /// Removes the spec of a claim and the file of its share; they need not be there.
    ///
    /// # Errors
    /// When one is there and cannot be removed.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        remove(&self.file(uid))?;
        remove(&share_file(&self.hook, uid))
    }
}

fn prefix() -> String {
    format!("{}-{CLASS}_", super::DRIVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_is_there_whole_or_not_at_all_and_leftovers_go() {
        let dir = tempfile::tempdir().unwrap();
        let (specs, hook) = (dir.path().join("cdi"), dir.path().join("opt/hook.so"));
        fs::create_dir_all(&specs).unwrap();
        let left = specs.join(format!(".{}u.json.1.new", prefix()));
        let others = specs.join("nvidia.yaml");
        for file in [&left, &others] {
            fs::write(file, "{").unwrap();
        }
        let cdi = Directory::open(&specs, &hook).unwrap();
        assert!(!left.exists() && others.exists(), "what is another's stays");
        let env = ["GSHARE_SM=24%", "CUDA_MPS_PIPE_DIRECTORY=/p", "GSHARE_MEM=1"].map(str::to_owned).into();
        let spec = Spec::of("v/c".into(), "u", Edits { env, mounts: Vec::new() }, BTreeMap::new());
        assert_eq!(cdi.read("u").unwrap(), None);
        cdi.write("u", &spec).unwrap();
        assert_eq!(cdi.read("u").unwrap().as_ref(), Some(&spec));
        assert_eq!(cdi.uids().unwrap(), ["u"]);
        let share = share_file(&hook, "u");
        assert_eq!(fs::read_to_string(&share).unwrap(), "GSHARE_SM=24%\nGSHARE_MEM=1\n");
        // With its spec it stays, without it goes.
        Directory::open(&specs, &hook).unwrap();
        assert!(share.exists());
        fs::write(cdi.file("u"), "{").unwrap();
        assert_eq!(cdi.read("u").unwrap(), None, "not a spec: written again");
        cdi.write("u", &spec).unwrap();
        cdi.remove("u").unwrap();
        cdi.remove("u").unwrap();
        assert!(!share.exists());
        fs::write(&share, "").unwrap();
        Directory::open(&specs, &hook).unwrap();
        assert!(!share.exists());
        assert_eq!(fs::read_dir(&specs).unwrap().count(), 1);
    }
}
