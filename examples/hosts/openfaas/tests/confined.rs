//! Functions as another user, in cgroups of their own. These tests need root; without it they report that they were skipped.

use crate::common::{Provider, within};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const NOBODY: u32 = 65_534;
const SHARE: &str =
    r#""annotations":{"fastgshare/gpu_quota_request":"0.2","fastgshare/gpu_sm_partition":"24"}"#;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: another user's processes take root");
    }
    root
}

/// A cgroup removed at the end of the test, with the leftovers of killed hosts in it.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let gone = || {
            for child in self.children() {
                let members = std::fs::read_to_string(child.join("cgroup.procs")).unwrap_or_default();
                for pid in members.lines().filter_map(|pid| pid.parse().ok()) {
                    let pid = rustix::process::Pid::from_raw(pid).unwrap();
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
                let _ = std::fs::remove_dir(child);
            }
            std::fs::remove_dir(&self.0).is_ok()
        };
        // A killed process is a member until it is gone.
        for _ in 0..500 {
            if gone() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// A cgroup with limits for its children through a controller's file, if this machine allows one.
fn cgroups(test: &str, controller: &str, files: [&str; 2]) -> Option<Folder> {
    let name = format!("gshare-test-{test}-{}", std::process::id());
    for root in [&format!("/sys/fs/cgroup/{controller}"), "/sys/fs/cgroup"] {
        let folder = Path::new(root).join(&name);
        if !Path::new(root).join("cgroup.procs").exists() || std::fs::create_dir(&folder).is_err() {
            continue;
        }
        let folder = Folder(folder);
        let _ = std::fs::write(folder.0.join("cgroup.subtree_control"), format!("+{controller}"));
        let probe = Folder(folder.0.join("probe"));
        if std::fs::create_dir(&probe.0).is_ok() && files.iter().any(|file| probe.0.join(file).exists()) {
            return Some(folder);
        }
    }
    eprintln!("skipped in part: this machine lets no cgroup with a limit of {controller} be made");
    None
}

const MEMORY: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];
const CPU: [&str; 2] = ["cpu.max", "cpu.cfs_quota_us"];

impl Folder {
    /// The cgroups in it.
    fn children(&self) -> Vec<PathBuf> {
        let all = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        all.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    }
}

/// A folder readable by every user, with a program and the libraries in it.
fn place() -> (tempfile::TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let copy = |from: &Path| {
        let to = place.path().join(from.file_name().unwrap());
        std::fs::copy(from, &to).unwrap();
        std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)).unwrap();
        to
    };
    let function = copy(Path::new(env!("CARGO_BIN_EXE_gpu_function")));
    let built = Path::new(env!("CARGO_BIN_EXE_gshare-openfaas")).parent().unwrap().join("deps");
    copy(&built.join("libgshare_hook.so"));
    copy(&built.join("libfake_cuda.so"));
    // Leaves a child behind in a session of its own, unknown to its process group and its environment.
    let script = place.path().join("function.sh");
    let text =
        format!("#!/bin/sh\nenv -u secret_mount_path setsid sleep 1000 &\nexec {}\n", function.display());
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    (place, script)
}

fn start(place: &Path, more: &[&str]) -> Provider {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
    command.args([
        "--listen",
        "127.0.0.1:0",
        "--sim=v100",
        "--set",
        "host.function_user=65534:65534",
        "--state",
    ]);
    command.arg(place.join("state")).args(more);
    command.env("GSHARE_HOOK_LIBRARY", place.join("libgshare_hook.so"));
    command.env("GSHARE_SIM_LIBRARY", place.join("libfake_cuda.so"));
    Provider::of(&mut command)
}

/// Whether another user can read a file.
fn readable_by_nobody(path: &Path) -> bool {
    Command::new("/bin/cat").arg(path).uid(NOBODY).gid(NOBODY).output().unwrap().status.success()
}

fn line(pid: u64, file: &str, beginning: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let found = text.lines().find(|line| line.starts_with(beginning));
    found.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_function_is_another_user_with_limits_and_leaves_nothing_behind() {
    if !is_root() {
        return;
    }
    let (place, script) = place();
    let folder = cgroups("limits", "memory", MEMORY);
    let below = folder.as_ref().map(|folder| format!("host.cgroups={}", folder.0.display()));
    let more: Vec<&str> = below.iter().flat_map(|below| ["--set", below]).collect();
    let provider = start(place.path(), &more);
    for name in ["mine", "other"] {
        let secret = format!(r#"{{"name":"{name}","value":"secret of {name}"}}"#);
        assert_eq!(provider.call("POST", "/system/secrets", &secret).0, 202);
    }
    let body = format!(
        r#"{{"service":"f","image":"{}","secrets":["mine"],"limits":{{"memory":"512Mi"}},{SHARE}}}"#,
        script.display()
    );
    let (status, said) = provider.call("POST", "/system/functions", &body);
    assert_eq!(status, 202, "{said}");
    provider.replicas("f", 1);

    // The hook and the simulated driver work for another user: the request's kernels ran under a share.
    let (status, said) = provider.call("POST", "/function/f/", "");
    assert_eq!(status, 200, "{said}");
    let seen: serde_json::Value = serde_json::from_str(&said).unwrap();
    let pid = seen["pid"].as_u64().unwrap();
    assert_eq!(line(pid, "status", "Uid:"), "Uid: 65534 65534 65534 65534");
    assert_eq!(line(pid, "status", "Gid:"), "Gid: 65534 65534 65534 65534");
    assert_eq!(line(pid, "status", "Groups:"), "Groups:", "none of root's groups");

    // The function reads its named secret; the folder of all secrets is closed to its user.
    assert_eq!(provider.call("GET", "/function/f/secret/mine", "").1, "secret of mine");
    let secrets = place.path().join("state/secrets");
    assert!(!readable_by_nobody(&secrets.join("mine")) && !readable_by_nobody(&secrets.join("other")));
    assert!(!readable_by_nobody(&place.path().join("state/functions/f.json")));

    let Some(folder) = folder else { return };
    let members = |pid: u64| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert!(members(pid).contains("/gshare-f"), "{}", members(pid));
    let [cgroup] = &folder.children()[..] else { panic!("{:?}", folder.children()) };
    let limit = MEMORY.map(|file| std::fs::read_to_string(cgroup.join(file)));
    let limit = limit.into_iter().flatten().next().unwrap();
    assert_eq!(limit.trim(), (512_u64 << 20).to_string());
    let inside = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
    assert!(inside.lines().count() >= 2, "the function and the child that it left behind: {inside}");

    // The child in a session of its own ends with the function.
    let pids: Vec<u64> = inside.lines().map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(provider.call("DELETE", "/system/functions", r#"{"functionName":"f"}"#).0, 202);
    within(|| {
        folder.children().is_empty() && pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
}

#[test]
fn what_a_killed_host_left_in_cgroups_goes_when_the_next_one_starts() {
    let Some(folder) = is_root().then(|| cgroups("sweep", "memory", MEMORY)).flatten() else { return };
    let (place, script) = place();
    let below = folder.0.display().to_string();
    let mut provider = start(place.path(), &["--set", &format!("host.cgroups={below}")]);
    let body = format!(r#"{{"service":"f","image":"{}",{SHARE}}}"#, script.display());
    assert_eq!(provider.call("POST", "/system/functions", &body).0, 202);
    provider.replicas("f", 1);
    let [cgroup] = &folder.children()[..] else { panic!("{:?}", folder.children()) };
    provider.child.kill().unwrap();
    provider.child.wait().unwrap();
    // The function ends with its host. A process which it started in a session of its own does not.
    let members = || std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
    within(|| members().lines().count() == 1);
    let left: u32 = members().trim().parse().unwrap();
    let next = start(place.path(), &["--set", &format!("host.cgroups={below}")]);
    within(|| !cgroup.exists() && !Path::new(&format!("/proc/{left}")).exists());
    // The folder goes last, and kills the remaining processes of this host.
    drop(next);
}

#[test]
fn a_process_has_no_more_time_on_cpus_than_its_limit() {
    let Some(folder) = is_root().then(|| cgroups("cpu", "cpu", CPU)).flatten() else { return };
    let (place, _) = place();
    let script = place.path().join("busy.sh");
    let function = place.path().join("gpu_function");
    std::fs::write(&script, format!("#!/bin/sh\n(while :; do :; done) &\nexec {}\n", function.display()))
        .unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let below = folder.0.display().to_string();
    let provider = start(place.path(), &["--set", &format!("host.cgroups={below}")]);
    let body =
        format!(r#"{{"service":"f","image":"{}","limits":{{"cpu":"500m"}},{SHARE}}}"#, script.display());
    assert_eq!(provider.call("POST", "/system/functions", &body).0, 202);
    provider.replicas("f", 1);
    let [cgroup] = &folder.children()[..] else { panic!("{:?}", folder.children()) };
    // The kernel pauses an endless loop in each of its periods.
    let held_up = || {
        let stat = std::fs::read_to_string(cgroup.join("cpu.stat")).unwrap();
        let count = stat.lines().find_map(|line| line.strip_prefix("nr_throttled ")).unwrap();
        count.parse::<u64>().unwrap()
    };
    within(|| held_up() >= 5);
    assert_eq!(provider.call("POST", "/function/f/", "").0, 200);
}

#[test]
fn a_library_that_the_user_cannot_read_is_refused_at_the_start() {
    if !is_root() {
        return;
    }
    let (place, _) = place();
    let hook = place.path().join("libgshare_hook.so");
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o700)).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"))
        .args(["--listen", "127.0.0.1:0", "--sim=v100", "--set", "host.function_user=65534:65534", "--state"])
        .arg(place.path().join("state"))
        .env("GSHARE_HOOK_LIBRARY", &hook)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // A process without the hook would run without a limit.
    assert!(
        !output.status.success() && said.contains("libgshare_hook.so") && said.contains("65534"),
        "{said}"
    );
}
