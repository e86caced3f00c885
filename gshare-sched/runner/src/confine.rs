//! Processes as another user, each in a cgroup of its own.
//!
//! # Problem
//! A function under the hook is a tenant's program. The hook keeps the function to its share of a GPU. Only the kernel can keep it from
//! other functions' secrets, from filling the host's memory and from leaving children behind.
//!
//! # Algorithm
//! With a [`User`] a process starts with the user's and the group's number and no other group. With a folder of cgroups the process
//! gets a cgroup in the folder, with the requested limits, before its program begins. When the process ends, all its descendants are
//! found in the cgroup and killed, in any process group. Both versions of cgroups serve. In version 1 the folder belongs to one
//! controller, and only this controller's limits can be kept.
//!
//! A cgroup's name identifies its maker, so [`sweep`] finds the cgroups left by killed processes.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A user and a group, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// Number of the user.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
}

/// A text is not a user and a group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}`: need UID:GID, such as 65534:65534, or the name of a user in /etc/passwd; user 0 is root")]
pub struct ParseUserError {
    text: String,
}

impl std::str::FromStr for User {
    type Err = ParseUserError;

    /// `UID:GID`, or a name in `/etc/passwd`. Root is refused: it would be no confinement.
    fn from_str(text: &str) -> Result<Self, ParseUserError> {
        let refused = || ParseUserError { text: text.to_owned() };
        let user = match text.split_once(':') {
            Some((uid, gid)) => uid.parse().ok().zip(gid.parse().ok()),
            None => std::fs::read_to_string("/etc/passwd").ok().and_then(|users| named(&users, text)),
        };
        let (uid, gid) = user.ok_or_else(refused)?;
        // The highest number means "as it is" to the kernel.
        if uid == 0 || uid == u32::MAX || gid == u32::MAX {
            return Err(refused());
        }
        Ok(Self { uid, gid })
    }
}

impl User {
    /// Checks in a process of this user whether the user can read a file.
    ///
    /// # Errors
    /// When the user cannot, or this process may not become the user. The error names the file and the user.
    pub fn can_read(&self, file: &Path) -> io::Result<()> {
        let Self { uid, gid } = *self;
        let named = |why: &str| {
            let text = format!("user {uid}:{gid} and {}: {why}", file.display());
            io::Error::new(io::ErrorKind::PermissionDenied, text)
        };
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "test -r \"$0\""]).arg(file).uid(uid).gid(gid);
        let status = command.stdin(Stdio::null()).status().map_err(|error| named(&error.to_string()))?;
        if status.success() { Ok(()) } else { Err(named("the user cannot read the file")) }
    }
}

/// Numbers of a user's line: name, password, user, group, and more.
fn named(users: &str, name: &str) -> Option<(u32, u32)> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (found, uid, gid) = (fields.next()?, fields.nth(1)?, fields.next()?);
        if found == name { uid.parse().ok().zip(gid.parse().ok()) } else { None }
    })
}

/// Limits of a cgroup; `None` sets no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Host memory, in bytes.
    pub memory: Option<u64>,
    /// Time on CPUs, in thousandths of one CPU.
    pub cpu_milli: Option<u64>,
}

/// A cgroup for a new process. Dropping it kills the processes left in it and removes it.
#[derive(Debug)]
pub struct Cgroup {
    folder: PathBuf,
    members: File,
}

/// Period over which the time on CPUs is limited, in us: the kernel's default.
const PERIOD_US: u64 = 100_000;

impl Cgroup {
    /// Makes a cgroup below a folder of the cgroup file system, with limits. Its name is `name` and the calling process. Dropping
    /// it kills all processes in it, so an existing name is refused.
    ///
    /// # Errors
    /// When the cgroup cannot be made or exists already, or a limit has no file there because its controller is off in the folder. The
    /// error names the file.
    pub fn make(below: &Path, name: &str, limits: Limits) -> io::Result<Self> {
        let folder = below.join(format!("{name}{OWNED_BY}{}", owner(std::process::id())?));
        let named = |path: &Path, error: &io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        std::fs::create_dir(&folder).map_err(|error| named(&folder, &error))?;
        let limit = |files: [&str; 2], values: [String; 2]| {
            let file = files.iter().position(|file| folder.join(file).exists());
            let Some(at) = file else {
                let why = format!("{} has neither {} nor {}", folder.display(), files[0], files[1]);
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            };
            let path = folder.join(files[at]);
            std::fs::write(&path, &values[at]).map_err(|error| named(&path, &error))
        };
        let open = || {
            if let Some(bytes) = limits.memory {
                limit(["memory.max", "memory.limit_in_bytes"], [bytes.to_string(), bytes.to_string()])?;
            }
            if let Some(milli) = limits.cpu_milli {
                let quota = milli.saturating_mul(PERIOD_US) / 1000;
                let values = [format!("{quota} {PERIOD_US}"), quota.to_string()];
                limit(["cpu.max", "cpu.cfs_quota_us"], values)?;
            }
            let members = folder.join("cgroup.procs");
            File::options().write(true).open(&members).map_err(|error| named(&members, &error))
        };
        match open() {
            Ok(members) => Ok(Self { folder, members }),
            Err(error) => {
                let _ = std::fs::remove_dir(&folder);
                Err(error)
            }
        }
    }

    /// The cgroup's list of members, for [`enter`].
    pub(crate) fn entrance(&self) -> io::Result<File> {
        self.members.try_clone()
    }

    /// Kills every process in it.
    pub fn kill(&self) {
        kill_all(&self.folder);
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

/// Kills the processes in cgroups of gone makers below a folder, and removes these cgroups. Gives their number.
///
/// # Errors
/// When the folder cannot be read.
pub fn sweep(below: &Path) -> io::Result<usize> {
    let (namespace, mut swept) = (namespace()?, 0);
    for entry in std::fs::read_dir(below)?.flatten() {
        let name = entry.file_name();
        let Some((_, by)) = name.to_str().and_then(|name| name.rsplit_once(OWNED_BY)) else { continue };
        let mut parts = by.split('.');
        let (space, pid) = (parts.next(), parts.next().and_then(|pid| pid.parse().ok()));
        // A process of another container may be alive and cannot be seen from here.
        let seen = space == Some(namespace.as_str());
        // Another process may have the number by now; it has another start.
        if seen && pid.is_some_and(|pid| owner(pid).map_or(true, |now| now != by)) {
            remove(&entry.path());
            swept += 1;
        }
    }
    Ok(swept)
}

/// Between a cgroup's name and the process that made it.
const OWNED_BY: char = '@';

/// The number of this process's namespace of process numbers, such as 4026531836.
fn namespace() -> io::Result<String> {
    let link = std::fs::read_link("/proc/self/ns/pid")?;
    Ok(link.to_string_lossy().chars().filter(char::is_ascii_digit).collect())
}

/// A process by its namespace, its number there, and its start in ticks since the machine began.
fn owner(pid: u32) -> io::Result<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The program's name may hold anything, so fields are counted from its end: the start is the 22nd of all.
    let start = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19));
    let start =
        start.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat")))?;
    Ok(format!("{}.{pid}.{start}", namespace()?))
}

fn remove(folder: &Path) {
    // A killed process is a member until it is gone, and may have forked meanwhile.
    for _ in 0..REMOVALS {
        kill_all(folder);
        match std::fs::remove_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                std::thread::sleep(BETWEEN_REMOVALS);
            }
            _ => return,
        }
    }
}

/// Tries to remove a cgroup, and the time between two tries: a killed process is gone within some milliseconds.
const REMOVALS: u32 = 50;
const BETWEEN_REMOVALS: std::time::Duration = std::time::Duration::from_millis(2);

fn kill_all(folder: &Path) {
    // The file is never made, since it would stay in a folder outside the cgroup file system.
    let all_at_once = File::options().write(true).open(folder.join("cgroup.kill"));
    if all_at_once.and_then(|mut file| file.write_all(b"1")).is_ok() {
        return;
    }
    // Kernels before 5.14, and version 1.
    let members = std::fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    let pids = members.lines().filter_map(|line| line.parse().ok().and_then(rustix::process::Pid::from_raw));
    for pid in pids {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Writes the calling process (0 in a cgroup's list of members) into the cgroup. Safe between fork and exec.
pub(crate) fn enter(mut entrance: &File) -> io::Result<()> {
    entrance.write_all(b"0")
}

/// User, cgroup and folder of a new process; none by default.
#[derive(Debug, Default)]
pub struct Confined {
    /// The process's user.
    pub user: Option<User>,
    /// The process's cgroup.
    pub cgroup: Option<Cgroup>,
    /// A folder with files for this process alone, removed when it has ended.
    pub folder: Option<tempfile::TempDir>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_numbers_or_names_and_never_root() {
        let users = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65533:nobody:/:/bin/false\nbroken\n";
        assert_eq!(named(users, "nobody"), Some((65_534, 65_533)));
        assert_eq!((named(users, "broken"), named(users, "absent")), (None, None));
        assert_eq!("7:8".parse(), Ok(User { uid: 7, gid: 8 }));
        for text in ["", "0:0", "0:5", "4294967295:1", "1:4294967295", "a:b", "-1:5", "no such user"] {
            let error = text.parse::<User>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }

    #[test]
    fn what_another_process_left_is_swept_and_what_a_living_one_has_is_not() {
        let below = tempfile::tempdir().unwrap();
        let make = |name: &str| std::fs::create_dir(below.path().join(name)).unwrap();
        let mine = format!("mine@{}", owner(std::process::id()).unwrap());
        let here = namespace().unwrap();
        let before = format!("before@{here}.{}.1", std::process::id());
        let gone = format!("gone@{here}.4294967295.7");
        for name in [&mine, &before, &gone, "elsewhere@1.4294967295.7", "of somebody else", "not@a.number"] {
            make(name);
        }
        assert_eq!(sweep(below.path()).unwrap(), 2);
        let mut left: Vec<_> =
            std::fs::read_dir(below.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, ["elsewhere@1.4294967295.7", &mine, "not@a.number", "of somebody else"]);
        assert!(sweep(&below.path().join("absent")).is_err());
    }

    #[test]
    fn a_limit_without_its_file_names_both_and_leaves_nothing() {
        let below = tempfile::tempdir().unwrap();
        let limits = Limits { memory: Some(1 << 20), cpu_milli: None };
        let error = Cgroup::make(below.path(), "one", limits).unwrap_err().to_string();
        assert!(error.contains("memory.max") && error.contains("memory.limit_in_bytes"), "{error}");
        assert_eq!(std::fs::read_dir(below.path()).unwrap().count(), 0);
        let error = Cgroup::make(&below.path().join("absent"), "one", limits).unwrap_err().to_string();
        assert!(error.contains("absent"), "{error}");
    }

    #[test]
    fn a_folder_that_is_no_cgroup_is_refused() {
        let below = tempfile::tempdir().unwrap();
        let error = Cgroup::make(below.path(), "one", Limits::default()).unwrap_err().to_string();
        assert!(error.contains("cgroup.procs"), "{error}");
    }
}
