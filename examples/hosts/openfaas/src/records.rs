//! Records that survive a restart: one file per function, measurement and secret, each replaced atomically.

use super::api::FunctionDeployment;
use super::trials::Measured;
use gshare_runner::confine::User;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// The record of a function.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The deployment as it was sent.
    pub deployment: FunctionDeployment,
    /// Time of the first deployment, in ms since 1970.
    pub created_ms: u64,
    /// Number of replicas that scale-function asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
}

/// The measurement of a function, and the measured program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    of: Program,
    measured: Measured,
}

impl Profile {
    /// The measurement of a deployment's program.
    pub fn new(deployment: &FunctionDeployment, measured: &Measured) -> Self {
        Self { of: Program::of(deployment), measured: measured.clone() }
    }

    /// The measurement, if the program is still the same.
    pub fn of(self, deployment: &FunctionDeployment) -> Option<Measured> {
        (self.of == Program::of(deployment)).then_some(self.measured)
    }
}

/// The key of a measurement. A new program, environment or way to call it needs a new measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Program {
    image: String,
    env_process: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
    annotations: BTreeMap<String, String>,
}

impl Program {
    fn of(deployment: &FunctionDeployment) -> Self {
        let matter = [
            "gshare/model",
            "gshare/batch",
            "gshare/concurrency",
            "gshare/devices",
            "gshare/probe_path",
            "gshare/probe_body",
            "gshare/pod_template",
        ];
        let annotations =
            deployment.annotations.iter().flatten().filter(|(key, _)| matter.contains(&key.as_str()));
        Self {
            image: deployment.image.clone(),
            env_process: deployment.env_process.clone(),
            env_vars: deployment.env_vars.clone(),
            annotations: annotations.map(|(key, value)| (key.clone(), value.clone())).collect(),
        }
    }
}

/// Why a host cannot use its directory.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another host uses the directory.
    #[error(
        "--state {}: in use by another host (process {holder}); stop that one, or give this one a folder of its own",
        dir.display()
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// Process id in the other host's lock file.
        holder: String,
    },
    /// The lock file cannot be opened or locked.
    #[error("{}: {cause}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
}

/// Locks a directory for this host, until the result is dropped. A second host would take the first host's processes, secrets
/// and containers for leftovers of an ended host.
///
/// # Errors
/// [`ClaimError`]; the directory is unchanged then.
pub fn claim(dir: &Path) -> Result<File, ClaimError> {
    let path = dir.join("host.lock");
    let failed = |cause| ClaimError::Lock { path: path.clone(), cause };
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut file = open.map_err(failed)?;
    // A child holds its parent's lock between fork and exec, so try for a while.
    let mut locked = file.try_lock();
    for _ in 0..50 {
        if !matches!(locked, Err(TryLockError::WouldBlock)) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        locked = file.try_lock();
    }
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            file.read_to_string(&mut holder).map_err(failed)?;
            return Err(ClaimError::InUse { dir: dir.to_owned(), holder });
        }
        Err(TryLockError::Error(cause)) => return Err(failed(cause)),
    }
    file.set_len(0).and_then(|()| write!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// The directory of records.
#[derive(Debug, Clone)]
pub struct Store {
    functions: PathBuf,
    secrets: PathBuf,
    mounts: PathBuf,
    profiles: PathBuf,
}

impl Store {
    /// Makes the directory, with access for the owner only.
    ///
    /// # Errors
    /// If the directory cannot be made.
    pub fn open(dir: &Path) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let place = |name: &str| {
            let path = dir.join(name);
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            path.canonicalize()
        };
        Ok(Self {
            functions: place("functions")?,
            secrets: place("secrets")?,
            mounts: place("mounts")?,
            profiles: place("profiles")?,
        })
    }

    /// Lets another user pass through the directory to its own folders. Other entries stay closed.
    ///
    /// # Errors
    /// If permissions cannot be changed.
    pub fn admit(&self) -> io::Result<()> {
        let through = |path: &Path| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o711));
        through(&self.mounts)?;
        self.mounts.parent().map_or(Ok(()), through)
    }

    /// All functions, and the messages about unreadable files.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn functions(&self) -> io::Result<(Vec<Record>, Vec<String>)> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for name in names(&self.functions)? {
            // Any other file is an interrupted write.
            let Some(function) = name.strip_suffix(".json") else { continue };
            let path = self.functions.join(&name);
            // A read from anything else, such as a pipe, might never end.
            let regular = path.is_file().then_some(()).ok_or_else(|| "is no regular file".to_owned());
            let bytes = regular.and_then(|()| std::fs::read(&path).map_err(|error| error.to_string()));
            let record = bytes.and_then(|bytes| {
                let record: Record = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
                let same = record.deployment.service == function;
                if same { Ok(record) } else { Err("service: is not the name of the file".into()) }
            });
            match record {
                Ok(record) => good.push(record),
                Err(why) => bad.push(format!("{}: {why}", path.display())),
            }
        }
        Ok((good, bad))
    }

    /// The record of a function; none if it is missing or unreadable.
    pub fn function(&self, name: &str) -> Option<Record> {
        let bytes = std::fs::read(self.functions.join(format!("{name}.json"))).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Writes the record of a function.
    ///
    /// # Errors
    /// If the record cannot be written; the old record remains then.
    pub fn put_function(&self, record: &Record) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(record)?;
        replace(&self.functions.join(format!("{}.json", record.deployment.service)), &bytes, 0o600)
    }

    /// Removes the record of a function.
    ///
    /// # Errors
    /// If the record cannot be removed.
    pub fn remove_function(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.functions.join(format!("{name}.json")))?;
        sync(&self.functions)
    }

    /// Writes the measurement of a function.
    ///
    /// # Errors
    /// If the measurement cannot be written.
    pub fn put_profile(&self, deployment: &FunctionDeployment, measured: &Measured) -> io::Result<()> {
        let profile = Profile::new(deployment, measured);
        let file = self.profiles.join(format!("{}.json", deployment.service));
        replace(&file, &serde_json::to_vec_pretty(&profile)?, 0o600)
    }

    /// Removes the measurement of a function, if there is one.
    ///
    /// # Errors
    /// If the measurement cannot be removed.
    pub fn forget_profile(&self, name: &str) -> io::Result<()> {
        remove(&self.profiles.join(format!("{name}.json")))
    }

    /// The measurement of a function, if its program is still the same; none if the file is unreadable.
    pub fn profile(&self, deployment: &FunctionDeployment) -> Option<Measured> {
        let bytes = std::fs::read(self.profiles.join(format!("{}.json", deployment.service))).ok()?;
        serde_json::from_slice::<Profile>(&bytes).ok()?.of(deployment)
    }

    /// Names of the secrets.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn secrets(&self) -> io::Result<Vec<String>> {
        Ok(names(&self.secrets)?.into_iter().filter(|name| !name.starts_with('.')).collect())
    }

    /// Whether there is a secret of this name, which must have passed `check_name`.
    pub fn has_secret(&self, name: &str) -> bool {
        self.secrets.join(name).is_file()
    }

    /// Writes a secret.
    ///
    /// # Errors
    /// If the secret cannot be written; the old secret remains then.
    pub fn put_secret(&self, name: &str, value: &[u8]) -> io::Result<()> {
        replace(&self.secrets.join(name), value, 0o600)
    }

    /// Removes a secret.
    ///
    /// # Errors
    /// If the secret cannot be removed.
    pub fn remove_secret(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.secrets.join(name))?;
        sync(&self.secrets)
    }

    /// Makes a folder with the secrets of one process's function, and no others. The folder is removed when the result is
    /// dropped.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn mount(&self, deployment: &FunctionDeployment, user: Option<User>) -> io::Result<TempDir> {
        let dir = tempfile::Builder::new()
            .prefix(&format!("{}.", deployment.service))
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir_in(&self.mounts)?;
        match user {
            // Another user cannot enter the folder of all secrets, so it gets read-only copies.
            Some(user) => self.copy_secrets(deployment, dir.path(), user)?,
            None => {
                for name in deployment.secrets.iter().flatten() {
                    std::os::unix::fs::symlink(self.secrets.join(name), dir.path().join(name))?;
                }
            }
        }
        Ok(dir)
    }

    /// The parent directory of all processes' folders of secrets.
    pub fn mounts(&self) -> &Path {
        &self.mounts
    }

    /// Removes what an earlier host has left: the folders of its processes, and files of interrupted writes.
    ///
    /// # Errors
    /// If a folder or a file cannot be removed.
    pub fn sweep(&self) -> io::Result<()> {
        [&self.functions, &self.secrets, &self.profiles].into_iter().try_for_each(|dir| sweep(dir, ""))?;
        std::fs::read_dir(&self.mounts)?.try_for_each(|entry| std::fs::remove_dir_all(entry?.path()))
    }

    /// Copies a function's secrets into a folder, and gives the folder and the copies to `user`, read-only. The host's own user
    /// keeps write access to the folder, since the host could not remove it otherwise.
    ///
    /// # Errors
    /// If a secret cannot be copied, or this process may not give files away.
    pub fn copy_secrets(&self, deployment: &FunctionDeployment, dir: &Path, user: User) -> io::Result<()> {
        for name in deployment.secrets.iter().flatten() {
            let place = dir.join(name);
            std::fs::copy(self.secrets.join(name), &place)?;
            give(&place, user, 0o400)?;
        }
        let own = rustix::process::geteuid().as_raw() == user.uid;
        give(dir, user, if own { 0o700 } else { 0o500 })
    }
}

/// Gives a file or folder to a user.
fn give(path: &Path, user: User, mode: u32) -> io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid))
}

/// Names of the files in a directory, sorted.
///
/// # Errors
/// If the directory cannot be read.
pub fn names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// Writes a file so that readers see either the old bytes or the new bytes, also after a crash. A killed program may leave
/// `.FILE.*.new`, for [`sweep`].
///
/// # Errors
/// If the file cannot be written; the old file remains then.
pub fn replace(file: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let (dir, name) = (file.parent().unwrap_or(Path::new("/")), file.file_name().unwrap_or_default());
    let prefix = format!(".{}.", name.to_string_lossy());
    let mut new = tempfile::Builder::new();
    new.prefix(&prefix).suffix(".new").permissions(std::fs::Permissions::from_mode(mode));
    let mut new = new.tempfile_in(dir)?;
    new.write_all(bytes)?;
    new.as_file().sync_all()?;
    new.persist(file)?;
    sync(dir)
}

/// Removes what killed programs have left of writes of files with this `prefix` of their names. No program may write such a file meanwhile.
///
/// # Errors
/// If the directory cannot be read, or a file cannot be removed.
pub fn sweep(dir: &Path, prefix: &str) -> io::Result<()> {
    let prefix = format!(".{prefix}");
    let is_left = |name: &String| name.starts_with(&prefix) && name.ends_with(".new");
    names(dir)?.iter().filter(|name| is_left(name)).try_for_each(|name| std::fs::remove_file(dir.join(name)))
}

/// Removes a file if it is there, also after a crash.
///
/// # Errors
/// If the file is there and cannot be removed.
pub fn remove(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => sync(file.parent().unwrap_or(Path::new("/"))),
    }
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_there_again_and_half_a_write_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let deployment = FunctionDeployment { service: "f".into(), image: "x".into(), ..Default::default() };
        store
            .put_function(&Record { deployment: deployment.clone(), created_ms: 7, replicas: Some(2) })
            .unwrap();
        std::fs::write(dir.path().join("functions/.g.json.new"), "{").unwrap();
        std::fs::write(dir.path().join("functions/h.json"), "{").unwrap();
        std::fs::copy(dir.path().join("functions/f.json"), dir.path().join("functions/i.json")).unwrap();
        let pipe = dir.path().join("functions/p.json");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
        let (good, bad) = Store::open(dir.path()).unwrap().functions().unwrap();
        assert_eq!((good.len(), good[0].replicas, &good[0].deployment), (1, Some(2), &deployment));
        assert!(
            bad.len() == 3
                && bad.iter().any(|text| text.contains("p.json: is no regular file"))
                && bad.iter().any(|text| text.contains("h.json"))
                && bad.iter().any(|text| text.contains("i.json: service"))
        );
        store.remove_function("f").unwrap();
        assert!(store.remove_function("f").is_err());
    }

    #[test]
    fn a_folder_is_one_hosts_as_long_as_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let held = claim(dir.path()).unwrap();
        let refused = claim(dir.path()).unwrap_err().to_string();
        assert!(refused.contains(dir.path().to_str().unwrap()), "{refused}");
        assert!(refused.contains(&format!("(process {})", std::process::id())), "{refused}");
        drop(held);
        claim(dir.path()).unwrap();
    }

    #[test]
    fn a_function_sees_its_own_secrets_only() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.put_secret("mine", b"1").unwrap();
        store.put_secret("other", b"2").unwrap();
        let secrets = Some(vec!["mine".to_owned()]);
        let deployment = FunctionDeployment { service: "f".into(), secrets, ..Default::default() };
        let mount = store.mount(&deployment, None).unwrap();
        assert_eq!(
            (names(mount.path()).unwrap(), std::fs::read(mount.path().join("mine")).unwrap()),
            (vec!["mine".into()], b"1".into())
        );
        let mode = dir.path().join("secrets/mine").metadata().unwrap().permissions().mode();
        assert_eq!((mode & 0o777, store.secrets().unwrap()), (0o600, vec!["mine".into(), "other".into()]));
    }

    #[test]
    fn each_process_has_secrets_of_its_own_until_it_has_ended() {
        use rustix::process::{getegid, geteuid};
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let deployment = |secret: &str| {
            store.put_secret(secret, secret.as_bytes()).unwrap();
            let secrets = Some(vec![secret.to_owned()]);
            FunctionDeployment { service: "f".into(), secrets, ..Default::default() }
        };
        let (old, new) = (deployment("old"), deployment("new"));
        store.put_function(&Record { deployment: new.clone(), created_ms: 7, replicas: None }).unwrap();
        let own = User { uid: geteuid().as_raw(), gid: getegid().as_raw() };
        for user in [None, Some(own)] {
            let reads = |mount: &TempDir, secret| std::fs::read_to_string(mount.path().join(secret));
            let first = store.mount(&old, user).unwrap();
            let second = store.mount(&new, user).unwrap();
            assert_eq!(reads(&first, "old").unwrap(), "old", "an older version beside a new one");
            assert!(reads(&second, "old").is_err() && reads(&second, "new").unwrap() == "new");
            let mode = second.path().metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "else its owner could not remove it");
            drop(second);
            assert_eq!(reads(&first, "old").unwrap(), "old", "after the end of another process");
            let _ = store.remove_function("f");
            assert_eq!(reads(&first, "old").unwrap(), "old", "while it finishes what it has");
            drop(first);
            assert_eq!(names(&store.mounts).unwrap(), [""; 0]);
        }
        // A killed host removes nothing.
        std::mem::forget(store.mount(&new, Some(own)).unwrap());
        for folder in [&store.functions, &store.secrets, &store.profiles] {
            std::fs::write(folder.join(".old.x7k2p1.new"), "1").unwrap();
        }
        store.sweep().unwrap();
        assert_eq!(names(&store.mounts).unwrap(), [""; 0]);
        assert_eq!(names(&store.secrets).unwrap(), ["new", "old"], "a secret's value is where its name is");
        assert_eq!(names(&store.functions).unwrap().len() + names(&store.profiles).unwrap().len(), 0);
    }
}
