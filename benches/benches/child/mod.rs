//! The common part of benches of servers: a server in a process of its own, from the code of the bench.
#![allow(unsafe_code, reason = "fork, to have other processes")]
#![allow(dead_code, unreachable_pub, reason = "each benchmark uses its part")]

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Runs `work` in a child process, which is killed at the end.
#[derive(Debug)]
pub struct Child(Pid);

impl Child {
    /// Call this before the process has a second thread.
    pub fn run(work: impl FnOnce()) -> Self {
        // SAFETY: this process has one thread, so no other thread holds a lock for which the child would wait.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        let Some(pid) = Pid::from_raw(pid) else {
            work();
            // SAFETY: ends the child, without the parent's duties at its own end.
            unsafe { libc::_exit(0) };
        };
        Self(pid)
    }

    pub const fn pid(&self) -> Pid {
        self.0
    }

    /// Waits until the child ends by itself.
    pub fn join(self) {
        let _ = waitpid(Some(self.0), WaitOptions::empty());
        std::mem::forget(self);
    }
}

/// Allows these CPUs only to all present and future threads of a process.
pub fn pin(process: Pid, cpus: &[usize]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    let threads = std::fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).expect("a process");
    for thread in threads {
        let name = thread.expect("a thread").file_name();
        let thread = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        sched_setaffinity(thread, &set).expect("CPUs of our own");
    }
}

/// The time at a place of sorted times in ns, in us.
pub fn micros(sorted: &[u64], per_mille: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let micros = sorted[(sorted.len() - 1) * per_mille / 1000] as f64 / 1000.0;
    micros
}

/// The CPUs that this process may use.
pub fn cpus() -> Vec<usize> {
    let allowed = sched_getaffinity(None).expect("a set of CPUs");
    (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect()
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        let _ = waitpid(Some(self.0), WaitOptions::empty());
    }
}
