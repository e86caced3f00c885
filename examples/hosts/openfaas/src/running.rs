//! A running copy of a program, as the host sees it: a process of this machine, or another runner's, such as a pod.

use gshare_runner::HookedProcess;
use std::fmt::Debug;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

/// A running copy of a program. Its runner reports its readiness and its end.
pub trait Running: Debug + Send {
    /// Where it takes connections; none while that is not known.
    fn address(&self) -> Option<SocketAddr>;

    /// Has it end. Returns before its end.
    fn kill(&self);

    /// Whether it has ended; its memory on the GPU is free then.
    fn has_ended(&mut self) -> bool;

    /// How it ended, once [`has_ended`](Self::has_ended) has returned `true`: well, or with a fault in words.
    fn end(&self) -> Option<Result<(), String>>;

    /// Its process on this machine.
    fn pid(&self) -> Option<u32> {
        None
    }

    /// The folder by which the processes it leaves behind are known on this machine.
    fn folder(&self) -> Option<&Path> {
        None
    }
}

/// A process of this machine that listens on the loopback address.
#[derive(Debug)]
pub struct LocalProcess {
    /// The process.
    pub process: HookedProcess,
    /// The port that it was told.
    pub port: u16,
}

impl Running for LocalProcess {
    fn address(&self) -> Option<SocketAddr> {
        Some((Ipv4Addr::LOCALHOST, self.port).into())
    }

    fn kill(&self) {
        self.process.kill();
    }

    fn has_ended(&mut self) -> bool {
        self.process.has_ended()
    }

    fn end(&self) -> Option<Result<(), String>> {
        let status = self.process.status()?;
        Some(if status.success() { Ok(()) } else { Err(status.to_string()) })
    }

    fn pid(&self) -> Option<u32> {
        Some(self.process.pid())
    }

    fn folder(&self) -> Option<&Path> {
        self.process.folder()
    }
}
