//! Processes and memory on a device beyond the daemon's books: processes without metering, as far as the missing `LD_PRELOAD`
//! limit shows from outside, and memory of metered processes beyond their own allocations.
//!
//! NVML lists the processes on each device, and the daemon the registered processes; a process on the first list alone gets
//! uncounted GPU time and memory. The process itself shows the reason: its mappings, and the way of its start. Three cases stay
//! unseen: clients of MPS (NVML names its server), private functions of the driver, and libraries opened with `RTLD_DEEPBIND` in
//! a process with the hook.

use gshare_core::Bytes;
use gshared::Snapshot;
use gshared::nvml::{Nvml, UsedGpuMemory};
use std::collections::BTreeMap;

/// A process on a device, unknown to the daemon.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stranger {
    pub(crate) pid: u32,
    pub(crate) bytes: u64,
    pub(crate) program: String,
    pub(crate) why: &'static str,
}

/// Processes and memory in NVML's view beyond the daemon's books.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Beside {
    pub(crate) strangers: Vec<Stranger>,
    /// For each registered process in NVML's view its pid, its name, and its memory beyond the daemon's books: its contexts, its
    /// code, and the driver's own.
    pub(crate) overheads: Vec<(u32, String, Bytes)>,
}

/// The facts about a process from `/proc`; `None` where this user may not look.
#[derive(Debug, Default)]
struct Evidence {
    maps: Option<String>,
    environment: Option<Vec<u8>>,
}

impl Evidence {
    fn of(pid: u32) -> Self {
        Self {
            maps: std::fs::read_to_string(format!("/proc/{pid}/maps")).ok().filter(|text| !text.is_empty()),
            environment: std::fs::read(format!("/proc/{pid}/environ")).ok(),
        }
    }

    fn variable(&self, name: &str) -> Option<&[u8]> {
        let environment = self.environment.as_deref()?;
        let start = format!("{name}=");
        environment.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(start.as_bytes()))
    }

    /// The reason for the missing metering.
    fn why(&self) -> &'static str {
        const HOOK: &str = "libgshare_hook.so";
        let Some(maps) = &self.maps else { return "this user may not look into it" };
        let has = |name| maps.lines().any(|line| line.contains(name));
        if has(HOOK) {
            return match self.variable("GSHARE_DISABLE") {
                Some(value) if !value.is_empty() && value != b"0" => {
                    "the hook is switched off in it (GSHARE_DISABLE)"
                }
                _ => "it has the hook, and is registered with another daemon or with none",
            };
        }
        if !has("/ld-linux") && !has("/ld-2") {
            return "it is statically linked: no library can be preloaded into it";
        }
        let preload = self.variable("LD_PRELOAD").map(String::from_utf8_lossy);
        if preload.is_some_and(|preload| preload.contains(HOOK)) {
            return "it was started with the hook, which is not in it: set-user-id, or a file that it cannot read";
        }
        "it was started without the hook"
    }
}

/// A variable of a process's environment, where this user may look.
pub(crate) fn variable(pid: u32, name: &str) -> Option<String> {
    Evidence::of(pid).variable(name).map(|value| String::from_utf8_lossy(value).into_owned())
}

/// The reason why a process is no client of the daemon.
pub(crate) fn why(pid: u32) -> &'static str {
    Evidence::of(pid).why()
}

/// Compares NVML's view of the devices with the daemon's books.
pub(crate) fn beside(nvml: &Nvml, snapshot: &Snapshot) -> anyhow::Result<Beside> {
    let mut seen = BTreeMap::<u32, u64>::new();
    for device in 0..nvml.device_count()? {
        for process in nvml.device_by_index(device)?.running_compute_processes()? {
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => bytes,
                UsedGpuMemory::Unavailable => 0,
            };
            *seen.entry(process.pid).or_default() += bytes;
        }
    }
    Ok(compare(seen, snapshot))
}

fn compare(seen: BTreeMap<u32, u64>, snapshot: &Snapshot) -> Beside {
    let mut beside = Beside { strangers: Vec::new(), overheads: Vec::new() };
    for (pid, bytes) in seen {
        let of_it = || snapshot.clients.iter().filter(|client| u32::try_from(client.pid) == Ok(pid));
        if let Some(client) = of_it().next() {
            let held = of_it().map(|client| client.memory_bytes.0).sum();
            // 0 where NVML does not know.
            if let Some(more) = bytes.checked_sub(held) {
                beside.overheads.push((pid, client.name.clone(), Bytes(more)));
            }
        } else if pid != std::process::id() {
            let program = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let why = Evidence::of(pid).why();
            beside.strangers.push(Stranger { pid, bytes, program: program.trim().to_owned(), why });
        }
    }
    beside
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "7f00-7f01 r-xp 0 0:0 1 /lib/x86_64-linux-gnu/ld-linux-x86-64.so.2\n7f02-7f03 r-xp 0 0:0 2 /lib/libcuda.so.1\n";

    fn why(maps: &str, environment: &str) -> &'static str {
        let environment = Some(environment.replace(' ', "\0").into_bytes());
        Evidence { maps: Some(maps.to_owned()), environment }.why()
    }

    #[test]
    fn each_way_around_the_hook_is_told_apart() {
        let hooked = format!("{PLAIN}7f04-7f05 r-xp 0 0:0 3 /opt/libgshare_hook.so\n");
        let cases = [
            why(PLAIN, "A=1"),
            why(PLAIN, "A=1 LD_PRELOAD=/opt/libgshare_hook.so"),
            why("00400000-00500000 r-xp 0 0:0 1 /bin/static\n", "LD_PRELOAD=/opt/libgshare_hook.so"),
            why(&hooked, "GSHARE_DISABLE=1"),
            why(&hooked, "GSHARE_DISABLE=0"),
            Evidence::default().why(),
        ];
        let parts = [
            "without the hook",
            "set-user-id",
            "statically",
            "switched off",
            "another daemon",
            "may not look",
        ];
        for (why, part) in cases.into_iter().zip(parts) {
            assert!(why.contains(part), "{why}: {part}");
        }
    }

    #[test]
    fn memory_beyond_the_books_is_a_registered_processs_and_unknown_ones_are_strangers() {
        let client = |pid: u32, gpu: u32, bytes: u64| {
            serde_json::json!({
                "client": gpu, "name": "alice", "pid": pid, "uid": 0, "program": "a", "gpu": gpu,
                "quota_request": 0.0, "quota_limit": 1.0, "sm": 1.0, "measured": 0.0, "total_used_ns": 0,
                "window_used_ns": 0, "holds_token": false, "waiting_ns": null, "waited_ns": 0, "launches": 0,
                "memory_bytes": bytes, "memory_limit_bytes": null, "on_daemon_loss": "open",
            })
        };
        let snapshot = serde_json::json!({
            "now_ns": 0, "epoch": 1, "pid": 1, "version": "", "socket": "", "connections": 0, "processes": 0, "drops": {},
            "journal_lost": 0, "devices": [], "clients": [client(1_000_000_001, 0, 100), client(1_000_000_001, 1, 50)],
        });
        let snapshot: Snapshot = serde_json::from_value(snapshot).unwrap();
        let seen = BTreeMap::from([(1_000_000_001, 450), (1_000_000_002, 7), (std::process::id(), 9)]);
        let beside = compare(seen, &snapshot);
        assert_eq!(beside.overheads, [(1_000_000_001, "alice".to_owned(), Bytes(300))]);
        assert_eq!(
            beside.strangers.iter().map(|one| (one.pid, one.bytes)).collect::<Vec<_>>(),
            [(1_000_000_002, 7)]
        );
        // NVML does not tell the amount here.
        assert_eq!(compare(BTreeMap::from([(1_000_000_001, 0)]), &snapshot).overheads, []);
    }

    #[test]
    fn this_process_can_be_looked_into() {
        assert!(Evidence::of(std::process::id()).maps.is_some());
    }
}
