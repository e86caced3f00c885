//! Who uses a device and is not metered: what can be seen from outside of an `LD_PRELOAD` limit that is not in force.
//!
//! NVML lists the processes on each device, the daemon those that are registered; whoever is on the first list alone gets GPU
//! time and memory that nobody counts. Why, the process itself tells: what it has mapped, and how it was started. Not to be
//! seen this way: clients of MPS (NVML names its server), private functions of the driver, and libraries that were opened
//! with `RTLD_DEEPBIND` in a process that has the hook.

use super::cuda::Nvml;
use gshared::Snapshot;
use std::collections::BTreeMap;

/// A process on a device that the daemon does not know.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stranger {
    pub(crate) pid: u32,
    pub(crate) bytes: u64,
    pub(crate) program: String,
    pub(crate) why: &'static str,
}

/// What is known of a process from `/proc`; `None` where this user may not look.
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

    /// Why the process is not metered.
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

/// Processes that NVML sees on a device and the daemon does not know.
pub(crate) fn strangers(nvml: &Nvml, snapshot: &Snapshot) -> anyhow::Result<Vec<Stranger>> {
    let mut seen = BTreeMap::<u32, u64>::new();
    for device in 0..nvml.device_count()? {
        for (pid, bytes) in nvml.processes(device)? {
            *seen.entry(pid).or_default() += bytes;
        }
    }
    let known = |pid: u32| snapshot.clients.iter().any(|client| u32::try_from(client.pid) == Ok(pid));
    let unknown = seen.into_iter().filter(|&(pid, _)| pid != std::process::id() && !known(pid));
    Ok(unknown
        .map(|(pid, bytes)| {
            let program = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            Stranger { pid, bytes, program: program.trim().to_owned(), why: Evidence::of(pid).why() }
        })
        .collect())
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
    fn this_process_can_be_looked_into() {
        assert!(Evidence::of(std::process::id()).maps.is_some());
    }
}
