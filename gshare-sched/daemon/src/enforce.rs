//! The enforcers of a client's limits on this node.
//!
//! A configured limit needs an enforcer. On every node, the hook enforces the time and memory of the programs that load it. The
//! hook cannot confine a kernel to some of the SMs: MPS does so where it runs, and a simulated device does so by itself
//! ([`Partition`]). Without either, an SM partition still counts in the token scheduler, which lets clients run side by side
//! only where their partitions fit. The times of a client's kernels are then enforced, their SMs are not, and `gshare status`
//! shows the difference.

use crate::mps::Mps;
use gshare_core::{ResourceSpec, SmShare};
use serde::{Deserialize, Serialize};

/// The mechanism that confines the kernels of programs to a part of the SMs.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_enums, reason = "a device is simulated or not, and MPS runs or not")]
pub enum Partition {
    /// Every program may use all SMs.
    None,
    /// NVIDIA's MPS.
    Mps(Mps),
    /// The simulated driver, which reads the same variable as MPS.
    Simulator,
}

/// The variable by which MPS and the simulated driver confine a program. Its value is in per cent.
const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

impl Partition {
    /// The mechanism on this node, for real or for simulated devices.
    pub fn of_node(simulated: bool) -> Self {
        match simulated {
            true => Self::Simulator,
            false => Mps::find().filter(Mps::is_running).map_or(Self::None, Self::Mps),
        }
    }

    /// A short name, as `gshare status` prints it; `None` without a mechanism.
    pub const fn name(&self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Mps(_) => Some("mps"),
            Self::Simulator => Some("simulator"),
        }
    }

    /// Environment variables required at the start of a program with this spec.
    pub fn environment(&self, spec: &ResourceSpec) -> Vec<(&'static str, String)> {
        let pipes = match self {
            Self::None => return Vec::new(),
            Self::Mps(mps) => Some(("CUDA_MPS_PIPE_DIRECTORY", mps.pipe_dir().display().to_string())),
            Self::Simulator => None,
        };
        let percent = (spec.sm() < SmShare::WHOLE).then(|| spec.sm().to_string());
        let percent = percent.map(|sm| (PERCENTAGE, sm.trim_end_matches('%').to_owned()));
        pipes.into_iter().chain(percent).collect()
    }

    /// Whether the process with this PID is confined. MPS lists its clients, and a process outside this list runs without MPS, no
    /// matter how it was started. The simulated driver goes by the variable in the environment at the start of the process.
    pub fn confines(&self, pid: i32) -> bool {
        match self {
            Self::None => false,
            Self::Mps(mps) => {
                let pid = pid.to_string();
                let is_listed = |line: &str| line.split_whitespace().next() == Some(pid.as_str());
                mps.ask("ps").is_ok_and(|list| list.lines().any(is_listed))
            }
            Self::Simulator => std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| {
                let is_set = |entry: &[u8]| {
                    entry.strip_prefix(PERCENTAGE.as_bytes()).is_some_and(|rest| rest.starts_with(b"="))
                };
                environment.split(|byte| *byte == 0).any(is_set)
            }),
        }
    }

    /// The enforcer of each limit of the process with this PID. `sm` and `memory` state whether the process has such a limit.
    pub fn held_by(&self, pid: i32, sm: bool, memory: bool) -> HeldBy {
        let hook = || Some("hook".to_owned());
        let confines = sm && self.confines(pid);
        HeldBy {
            time: hook(),
            sm: self.name().filter(|_| confines).map(str::to_owned),
            memory: if memory { hook() } else { None },
        }
    }
}

/// The enforcer of each limit of a client; `None` without an enforcer, or without such a limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldBy {
    /// The enforcer of the share of time.
    pub time: Option<String>,
    /// The enforcer of the SM partition.
    pub sm: Option<String>,
    /// The enforcer of the memory limit.
    pub memory: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::PermissionsExt as _;

    fn spec() -> ResourceSpec {
        ResourceSpec::new("0.5".parse().unwrap(), SmShare::from_percent(24).unwrap(), None).unwrap()
    }

    #[test]
    fn without_mps_nothing_holds_a_partition() {
        let held = Partition::None.held_by(17, true, true);
        assert_eq!(
            (held.time.as_deref(), held.sm, held.memory.as_deref()),
            (Some("hook"), None, Some("hook"))
        );
        assert!(Partition::None.environment(&spec()).is_empty());
    }

    /// A shell script stands for the control program, with one client under its server.
    #[test]
    fn mps_holds_the_partition_of_those_who_run_under_it() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("nvidia-cuda-mps-control");
        std::fs::write(&program, "#!/bin/sh\nread -r line\n[ \"$line\" = ps ] && echo 'PID ID\n17 1'\n")
            .unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mps = Partition::Mps(Mps::at(&program, dir.path()));
        assert!(mps.environment(&spec()).contains(&(PERCENTAGE, "24".to_owned())));
        let sm = |pid, partition| mps.held_by(pid, partition, false).sm;
        assert_eq!((sm(17, true).as_deref(), sm(17, false), sm(18, true)), (Some("mps"), None, None));
    }

    #[test]
    fn a_simulated_partition_is_one_that_the_process_was_started_with() {
        let node = Partition::of_node(true);
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(node.held_by(own, true, true).sm, None);
        let mut child = std::process::Command::new("cat")
            .envs(node.environment(&spec()))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Once the child echoes, it has its own environment.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let held = node.held_by(pid, true, true).sm;
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(held.as_deref(), Some("simulator"));
    }
}
