//! Enforcers of a client's limits: the driver where it can, the hook for the rest.
//!
//! # Problem
//! A limit that is written down is not a limit that is kept. The hook keeps time and memory of programs that go through it, and
//! cannot confine a kernel to some of the SMs; MPS does that, and knows nothing of time. Which of them is there differs from
//! node to node, and an operator must be able to see it, client by client.
//!
//! # Terms
//! - **limit**: one of time, SMs and memory ([`Limit`]).
//! - **enforcer**: something that keeps limits ([`Enforcer`]): it says which it can keep on a node, what a program must be
//!   started with so that it does, and whether it does for a process that runs.
//!
//! # Rules
//! [`Enforcement::of_node`] lists the enforcers of this node, the strongest first. A limit of a client is held by the first that
//! proves it ([`Enforcement::held_by`]); a limit that none proves is held by nothing, and is said so. An SM partition without MPS
//! still counts in the token scheduler, which lets clients run side by side only where their partitions fit, so that the hook holds
//! *when* a client runs and not *where*.

use crate::mps::Mps;
use gshare_core::{ResourceSpec, SmShare};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;

/// A limit of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the parts of a resource spec")]
pub enum Limit {
    /// Share of GPU time.
    Time,
    /// Partition of the SMs.
    Sm,
    /// Device memory.
    Memory,
}

/// A process whose limits are to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Target {
    /// The process, in this PID namespace; 0 if it cannot be seen from here.
    pub pid: i32,
    /// Whether its GPU is a simulated one.
    pub simulated: bool,
}

impl Target {
    /// A process on a GPU that is simulated or not.
    pub const fn new(pid: i32, simulated: bool) -> Self {
        Self { pid, simulated }
    }
}

/// Something that keeps limits.
pub trait Enforcer: fmt::Debug {
    /// A short name, as `gshare status` prints it.
    fn name(&self) -> &'static str;

    /// Whether it can keep a limit on this node at all.
    fn can_hold(&self, limit: Limit) -> bool;

    /// Variables that a program must be started with.
    fn environment(&self, spec: &ResourceSpec) -> Vec<(&'static str, String)>;

    /// Whether it keeps this limit of a process that runs, as far as can be told without asking the process. An error says why
    /// that cannot be told.
    fn proves(&self, limit: Limit, target: Target) -> io::Result<bool>;
}

/// The hook: time by tokens, memory by its account. A client of the daemon has it loaded.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct HookAlone;

impl Enforcer for HookAlone {
    fn name(&self) -> &'static str {
        "hook"
    }

    fn can_hold(&self, limit: Limit) -> bool {
        limit != Limit::Sm
    }

    fn environment(&self, _: &ResourceSpec) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    fn proves(&self, limit: Limit, _: Target) -> io::Result<bool> {
        Ok(self.can_hold(limit))
    }
}

/// MPS: confines the kernels of a client to a part of the SMs.
#[derive(Debug, Clone)]
pub struct MpsPartition(Mps);

impl Enforcer for MpsPartition {
    fn name(&self) -> &'static str {
        "mps"
    }

    fn can_hold(&self, limit: Limit) -> bool {
        limit == Limit::Sm
    }

    fn environment(&self, spec: &ResourceSpec) -> Vec<(&'static str, String)> {
        let pipes = ("CUDA_MPS_PIPE_DIRECTORY", self.0.pipe_dir().display().to_string());
        std::iter::once(pipes).chain(percentage(spec)).collect()
    }

    /// The control daemon lists the clients of its servers: a process that is not among them runs without MPS, no matter what it
    /// was started with.
    fn proves(&self, limit: Limit, target: Target) -> io::Result<bool> {
        if limit != Limit::Sm || target.simulated || target.pid == 0 {
            return Ok(false);
        }
        let pid = target.pid.to_string();
        let is_listed = |line: &str| line.split_whitespace().next() == Some(pid.as_str());
        Ok(self.0.ask("ps")?.lines().any(is_listed))
    }
}

/// The simulated driver: takes the variable that MPS takes, and confines simulated kernels by it.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct SimulatedPartition;

impl Enforcer for SimulatedPartition {
    fn name(&self) -> &'static str {
        "simulator"
    }

    fn can_hold(&self, limit: Limit) -> bool {
        limit == Limit::Sm
    }

    fn environment(&self, spec: &ResourceSpec) -> Vec<(&'static str, String)> {
        percentage(spec).into_iter().collect()
    }

    /// The variable with which the process was started.
    fn proves(&self, limit: Limit, target: Target) -> io::Result<bool> {
        if limit != Limit::Sm || !target.simulated || target.pid == 0 {
            return Ok(false);
        }
        let environment = std::fs::read(format!("/proc/{}/environ", target.pid))?;
        Ok(environment
            .split(|byte| *byte == 0)
            .any(|entry| entry.starts_with(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=")))
    }
}

/// The variable that confines a program to a part of the SMs, if it is to have less than all.
fn percentage(spec: &ResourceSpec) -> Option<(&'static str, String)> {
    let partition = (spec.sm() < SmShare::WHOLE).then(|| spec.sm().to_string());
    partition.map(|sm| ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", sm.trim_end_matches('%').to_owned()))
}

/// The enforcer of each limit of a client; `None`: the limit is not enforced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldBy {
    /// Name of the enforcer of the share of time.
    pub time: Option<String>,
    /// Name of the enforcer of the SM partition; the whole GPU needs none.
    pub sm: Option<String>,
    /// Name of the enforcer of the memory limit.
    pub memory: Option<String>,
}

/// The enforcers of this node.
#[derive(Debug)]
pub struct Enforcement(Vec<Box<dyn Enforcer>>);

impl Enforcement {
    /// The enforcers that are there for programs on real or on simulated devices, the strongest first.
    pub fn of_node(simulated: bool) -> Self {
        let mut all: Vec<Box<dyn Enforcer>> = Vec::new();
        if simulated {
            all.push(Box::new(SimulatedPartition));
        } else if let Some(mps) = Mps::find().filter(Mps::is_running) {
            all.push(Box::new(MpsPartition(mps)));
        }
        all.push(Box::new(HookAlone));
        Self(all)
    }

    /// Enforcement by these enforcers, the strongest first.
    pub fn new(enforcers: Vec<Box<dyn Enforcer>>) -> Self {
        Self(enforcers)
    }

    /// Variables that a program with this spec must be started with.
    pub fn environment(&self, spec: &ResourceSpec) -> Vec<(&'static str, String)> {
        self.0.iter().flat_map(|enforcer| enforcer.environment(spec)).collect()
    }

    /// The first that can hold a limit on this node.
    pub fn strongest(&self, limit: Limit) -> Option<&dyn Enforcer> {
        self.0.iter().map(AsRef::as_ref).find(|enforcer| enforcer.can_hold(limit))
    }

    /// The name of the first that proves to hold a limit of a process.
    pub fn holder(&self, limit: Limit, target: Target) -> Option<&'static str> {
        let proves = |enforcer: &&dyn Enforcer| enforcer.proves(limit, target).unwrap_or(false);
        self.0.iter().map(AsRef::as_ref).find(proves).map(Enforcer::name)
    }

    /// The enforcer of each limit of a process; `partition` and `memory`: whether it has such a limit.
    pub fn held_by(&self, target: Target, partition: bool, memory: bool) -> HeldBy {
        let holder = |limit| self.holder(limit, target).map(str::to_owned);
        HeldBy {
            time: holder(Limit::Time),
            sm: partition.then(|| holder(Limit::Sm)).flatten(),
            memory: memory.then(|| holder(Limit::Memory)).flatten(),
        }
    }
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
        let node = Enforcement::new(vec![Box::new(HookAlone)]);
        let held = node.held_by(Target::new(17, false), true, true);
        assert_eq!(
            (held.time.as_deref(), held.sm, held.memory.as_deref()),
            (Some("hook"), None, Some("hook"))
        );
        assert!(node.environment(&spec()).is_empty() && node.strongest(Limit::Sm).is_none());
    }

    /// A shell script stands for the control program, with one client under its server.
    #[test]
    fn mps_holds_the_partition_of_those_who_run_under_it() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("nvidia-cuda-mps-control");
        std::fs::write(&program, "#!/bin/sh\nread -r line\n[ \"$line\" = ps ] && echo 'PID ID\n17 1'\n")
            .unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mps = MpsPartition(Mps::at(&program, dir.path()));
        assert!(mps.environment(&spec()).contains(&("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "24".to_owned())));
        let node = Enforcement::new(vec![Box::new(mps), Box::new(HookAlone)]);
        let sm = |pid, partition| node.held_by(Target::new(pid, false), partition, false).sm;
        assert_eq!((sm(17, true).as_deref(), sm(17, false), sm(18, true)), (Some("mps"), None, None));
    }

    #[test]
    fn a_simulated_partition_is_one_that_the_process_was_started_with() {
        let node = Enforcement::of_node(true);
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(node.held_by(Target::new(own, true), true, false).sm, None);
        let mut child = std::process::Command::new("cat")
            .envs(node.environment(&spec()))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Once it echoes, it has its own environment.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let held = node.held_by(Target::new(pid, true), true, false).sm;
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(held.as_deref(), Some("simulator"));
    }
}
