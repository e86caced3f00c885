//! A bound on how long a CPU of the node may take to wake up.
//!
//! The device passes from one process to the next by messages, and each wakes a thread. A CPU that sleeps deeply takes tens
//! to hundreds of microseconds to do so, a CPU of a virtual machine as long as its host takes, and all that time no process
//! has the device. Linux lets a process bound it for all CPUs (PM quality of service, `/dev/cpu_dma_latency`): the
//! bound holds while the file is open.

use gshare_core::Duration;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the kernel takes such bounds.
pub(crate) const FILE: &str = "/dev/cpu_dma_latency";

/// The bound, which holds while processes share.
#[derive(Debug)]
pub(crate) struct CpuLatency {
    file: PathBuf,
    bound: Option<Duration>,
    held: Option<File>,
}

impl CpuLatency {
    /// Not held yet. An error when it could not be.
    pub(crate) fn new(file: &Path, bound: Option<Duration>) -> io::Result<Self> {
        let this = Self { file: file.to_owned(), bound, held: None };
        bound.map(|bound| this.hold(bound)).transpose()?;
        Ok(this)
    }

    /// Whether there is a device to hand over.
    pub(crate) fn set_shared(&mut self, shared: bool) {
        let Some(bound) = self.bound else { return };
        if !shared {
            self.held = None;
        } else if self.held.is_none() {
            match self.hold(bound) {
                Ok(file) => self.held = Some(file),
                Err(error) => tracing::warn!(file = %self.file.display(), %error, "cpu_latency is not held"),
            }
        }
    }

    /// Holds it until the file is dropped. The kernel wants microseconds, as a number of the machine.
    fn hold(&self, bound: Duration) -> io::Result<File> {
        let mut file = OpenOptions::new().write(true).open(&self.file)?;
        let micros = i32::try_from(bound.as_nanos() / 1_000).unwrap_or(i32::MAX);
        file.write_all(&micros.to_ne_bytes())?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_held_while_a_device_is_shared() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = &dir.path().join("latency");
        let bound = Some(Duration::from_micros(20));
        assert!(CpuLatency::new(file, bound).is_err(), "there is no such file");
        std::fs::write(file, "").expect("a file");
        let mut latency = CpuLatency::new(file, bound).expect("it can be held");
        for shared in [false, true, true, false, true] {
            latency.set_shared(shared);
            assert_eq!(latency.held.is_some(), shared);
        }
        assert_eq!(std::fs::read(file).expect("a file"), 20i32.to_ne_bytes());
        let mut none = CpuLatency::new(file, None).expect("nothing to hold");
        none.set_shared(true);
        assert!(none.held.is_none());
    }
}
