//! Starting and ending processes under the hook.
#![allow(unsafe_code, reason = "a child must ask to die with its parent between fork and exec")]

use crate::confine::{Confined, enter};
use crate::container::Lifeline;
use gshare_core::RunId;
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getppid, kill_process_group, pidfd_open,
    set_parent_process_death_signal, waitid,
};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};

/// The hook, and the daemon with which hooked processes register.
#[derive(Debug, Clone)]
pub struct Hook {
    /// `libgshare_hook.so`.
    pub preload: PathBuf,
    /// The daemon's socket.
    pub socket: PathBuf,
}

/// A process under the hook, which ends with its starting thread, or a container, which ends with this process. Dropping it kills
/// the process and its descendants, and waits for its end. A loop that must not wait keeps it until [`has_ended`](Self::has_ended).
#[derive(Debug)]
pub struct HookedProcess {
    child: Child,
    pidfd: OwnedFd,
    reaped: bool,
    status: Option<ExitStatus>,
    confined: Confined,
    /// For a container, whose shell is `child`.
    container: Option<Lifeline>,
}

impl HookedProcess {
    /// Starts the command in a process group of its own, under the hook if there is one. `run` is one number for the
    /// processes of an instance, which share its name and its share ([`new_run`](crate::new_run)). If the daemon does not
    /// know the share, the share is in the command's environment (`GSHARE_QUOTA`, `GSHARE_SM`, `GSHARE_MEM`).
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(command: Command, name: &str, run: RunId, hook: Option<&Hook>) -> io::Result<Self> {
        Self::start_confined(command, name, run, hook, Confined::default())
    }

    /// Starts the command like [`start`](Self::start), as another user and in a cgroup.
    ///
    /// # Errors
    /// When the program cannot be started, or the user or the cgroup is not ours to give.
    pub fn start_confined(
        mut command: Command,
        name: &str,
        run: RunId,
        hook: Option<&Hook>,
        confined: Confined,
    ) -> io::Result<Self> {
        // A group of its own, so its descendants end with it.
        command.process_group(0);
        if let Some(hook) = hook {
            let preloaded = crate::preload(&hook.preload)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            command.env("LD_PRELOAD", preloaded).env("GSHARE_SOCKET", &hook.socket);
            command.env("GSHARE_NAME", name).env("GSHARE_RUN", run.to_string());
        }
        if let Some(user) = confined.user {
            // The standard library sets the groups to none first, where it may.
            command.uid(user.uid).gid(user.gid);
        }
        let entrance = confined.cgroup.as_ref().map(|cgroup| cgroup.entrance()).transpose()?;
        let parent = rustix::process::getpid();
        let die_with_parent = move || {
            if let Some(entrance) = &entrance {
                enter(entrance)?;
            }
            // A change of the user takes the request back, so the request comes after the change.
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have gone before the request.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::BrokenPipe)) }
        };
        // SAFETY: three system calls; nothing is allocated and no lock is taken between fork and exec.
        unsafe { command.pre_exec(die_with_parent) };
        Self::of(command.spawn()?, confined, None)
    }

    /// A container, by its shell.
    pub(crate) fn of_container(child: Child, container: Lifeline) -> io::Result<Self> {
        Self::of(child, Confined::default(), Some(container))
    }

    fn of(mut child: Child, confined: Confined, container: Option<Lifeline>) -> io::Result<Self> {
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { child, pidfd, reaped: false, status: None, confined, container }),
            Err(errno) => {
                match &container {
                    Some(container) => container.end(),
                    None => drop(child.kill()),
                }
                let _ = child.wait();
                Err(errno.into())
            }
        }
    }

    /// The process's number; for a container its first process's number, once there is a process.
    pub fn pid(&self) -> u32 {
        self.container.as_ref().and_then(Lifeline::pid).unwrap_or_else(|| self.child.id())
    }

    /// The folder to be removed with the process, if there is such a folder.
    pub fn folder(&self) -> Option<&Path> {
        self.confined.folder.as_ref().map(tempfile::TempDir::path)
    }

    /// Readable once the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The standard output and error, if the command had pipes for them and they were not taken before.
    pub fn take_output(&mut self) -> (Option<ChildStdout>, Option<ChildStderr>) {
        (self.child.stdout.take(), self.child.stderr.take())
    }

    /// Kills the process and its descendants: its process group, and its cgroup where it has one. A container is gone some time later.
    pub fn kill(&self) {
        if let Some(container) = &self.container {
            return container.end();
        }
        if let Some(cgroup) = &self.confined.cgroup {
            cgroup.kill();
        }
        if !self.reaped {
            // Not reaped, so the number is still its own.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }

    /// Whether the process has ended; its memory on the GPU is free then.
    pub fn has_ended(&mut self) -> bool {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let pid = WaitId::Pid(Pid::from_child(&self.child));
        if !self.reaped && !matches!(waitid(pid, look), Ok(None) | Err(Errno::INTR)) {
            // The process may have left children behind.
            self.kill();
            self.status = self.child.wait().ok();
            self.reaped = true;
        }
        self.reaped
    }

    /// How the process ended, once [`has_ended`](Self::has_ended) has returned `true`.
    pub const fn status(&self) -> Option<ExitStatus> {
        self.status
    }
}

impl Drop for HookedProcess {
    fn drop(&mut self) {
        self.kill();
        if !self.reaped {
            let _ = self.child.wait();
        }
    }
}
