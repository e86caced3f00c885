//! Host memory that the process may still take.

use std::path::Path;

/// Bytes available on the host and within the limits of the process's control groups.
pub(crate) fn room() -> u64 {
    let host = std::fs::read_to_string("/proc/meminfo").ok().and_then(|info| available(&info));
    host.unwrap_or(0).min(within_groups())
}

/// The figure of `/proc/meminfo`.
fn available(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// The least rest of a limit, over the process's control group and all groups around it. Pages beyond it would have the process killed.
fn within_groups() -> u64 {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(own) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else { return u64::MAX };
    let root = Path::new("/sys/fs/cgroup");
    let number = |group: &Path, file: &str| -> Option<u64> {
        std::fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()
    };
    let cached = |group: &Path| -> u64 {
        let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let of = |line: &str| {
            line.strip_prefix("active_file ").or(line.strip_prefix("inactive_file "))?.parse::<u64>().ok()
        };
        stat.lines().filter_map(of).sum()
    };
    let rest = |group: &Path| {
        let taken = number(group, "memory.current")?.saturating_sub(cached(group));
        Some(number(group, "memory.max")?.saturating_sub(taken))
    };
    let around = root.join(own);
    around.ancestors().take_while(|group| group.starts_with(root)).filter_map(rest).min().unwrap_or(u64::MAX)
}
