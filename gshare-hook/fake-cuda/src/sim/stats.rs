//! Ground truth: the real course of events on the simulated device, for tests and demos to compare with.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use super::device_file::SimDevice;
use super::engine::Engine;
use super::layout::{MEM_KIND_NAMES, PROC_FREE, PROC_LIVE, Proc, Work};

/// State of a device file at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Truth {
    /// The instant, `CLOCK_MONOTONIC` in ns.
    pub time_ns: u64,
    /// Times a lock was found held by a dead process.
    pub repairs: u64,
    /// Each GPU.
    pub gpus: Vec<GpuTruth>,
    /// Each attached process, and those which left lately, in slot order.
    pub processes: Vec<ProcessTruth>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GpuTruth {
    /// Number of SMs.
    pub sms: u32,
    /// SMs occupied now.
    pub sms_busy: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Memory used in bytes.
    pub memory_used_bytes: u64,
    /// Time with at least one kernel running, in ns.
    pub busy_ns: u64,
    /// Busy time over about the last second, in percent.
    pub utilisation_percent: u32,
    /// Whether the GPU is lost ([`SimDevice::set_lost`]).
    pub lost: bool,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ProcessTruth {
    /// Process id: for a living process, its id in the reader's PID namespace, or 0 without one; for a past process, its own id.
    pub pid: u32,
    /// Slot of the device file.
    pub slot: u32,
    /// Start time as in /proc/PID/stat, field 22.
    pub start_time: u64,
    /// The process's name.
    pub name: String,
    /// Whether the process is attached.
    pub live: bool,
    /// Time of the attachment, in ns.
    pub attached_ns: u64,
    /// Kernel launches of no cost on an idle stream (no other figure includes them).
    pub free_launches: u64,
    /// Times a launch waited for a full stream.
    pub ring_full: u64,
    /// Synchronising calls with a wait.
    pub host_waits: u64,
    /// Time spent in these waits, in ns.
    pub host_wait_ns: u64,
    /// The process's work on each GPU.
    pub gpus: Vec<ProcessGpuTruth>,
}

/// The work of one process on one GPU. Kernels that run count up to the instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ProcessGpuTruth {
    /// Most SMs of the process at once.
    pub sm_cap: u32,
    /// Kernels that have ended.
    pub kernels: u64,
    /// Sum of the durations of its kernels, in ns.
    pub kernel_ns: u64,
    /// Time with at least one of its kernels running, in ns (union).
    pub busy_ns: u64,
    /// Sum of demand x duration, in SM x ns.
    pub sm_ns: u64,
    /// Sum over kernels of the time between ready and started, in ns.
    pub queue_wait_ns: u64,
    /// Copies and memsets that have ended.
    pub copies: u64,
    /// Bytes of these copies and memsets.
    pub copy_bytes: u64,
    /// Sum of the durations of these copies and memsets, in ns.
    pub copy_ns: u64,
    /// Memory by kind in bytes, as requested, without rounding.
    pub memory_bytes: BTreeMap<&'static str, u64>,
    /// Sum of the kinds, in bytes.
    pub memory_used_bytes: u64,
    /// Highest sum so far, in bytes.
    pub memory_peak_bytes: u64,
    /// Busy time over about the last second, in percent.
    pub utilisation_percent: u32,
}

/// A process with frequently read GPU time. See [`SimDevice::watch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
#[allow(clippy::exhaustive_structs, reason = "a C structure")]
pub struct Watched {
    /// Process id, in its own PID namespace.
    pub pid: u32,
    /// Slot at the last call. Any number will do the first time.
    pub slot: u32,
    /// Time with at least one of its kernels running on the GPU, in ns (union).
    pub busy_ns: u64,
}

impl Engine<'_> {
    /// The state now.
    pub(crate) fn truth(&mut self, now: u64) -> Truth {
        self.advance(now);
        let t = self.l.time;
        let gpus_len = self.l.gpus_len as usize;
        let mut running = vec![(0_u64, 0_u64); self.l.procs.len() * gpus_len];
        for &s in &self.l.running[..self.l.running_len as usize] {
            let stream = &self.l.streams[s as usize];
            if let Work::Kernel { sms, .. } = self.head(s).work {
                let entry = &mut running[(stream.owner as usize - 1) * gpus_len + stream.gpu as usize];
                entry.0 += t - stream.run_start;
                entry.1 += (t - stream.run_start) * u64::from(sms);
            }
        }
        let gpus = self.l.gpus[..gpus_len].iter().zip(&self.o.lost).map(|(g, lost)| GpuTruth {
            sms: g.sms,
            sms_busy: g.sms - g.sm_free,
            memory_bytes: g.mem_total,
            memory_used_bytes: g.mem_used,
            busy_ns: g.busy.total(t),
            utilisation_percent: g.busy.percent(t),
            lost: lost.load(Relaxed) != 0,
        });
        let processes =
            self.l.procs.iter().enumerate().filter(|(_, p)| p.state != PROC_FREE).map(|(i, p)| {
                let open = &self.o.procs[i];
                let gpus = p.gpus[..gpus_len].iter().enumerate().map(|(g, a)| {
                    let (ran, sm_ran) = running[i * gpus_len + g];
                    ProcessGpuTruth {
                        sm_cap: a.sm_cap,
                        kernels: a.kernels,
                        kernel_ns: a.kernel_ns + ran,
                        busy_ns: a.busy.total(t),
                        sm_ns: a.sm_ns + sm_ran,
                        queue_wait_ns: a.queue_wait_ns,
                        copies: a.copies,
                        copy_bytes: a.copy_bytes,
                        copy_ns: a.copy_ns,
                        memory_bytes: MEM_KIND_NAMES.into_iter().zip(a.mem).collect(),
                        memory_used_bytes: a.mem.iter().sum(),
                        memory_peak_bytes: a.mem_peak,
                        utilisation_percent: a.busy.percent(t),
                    }
                });
                ProcessTruth {
                    pid: p.pid,
                    slot: u32::try_from(i).unwrap_or(u32::MAX),
                    start_time: p.start_time,
                    name: String::from_utf8_lossy(&p.name).trim_end_matches('\0').to_owned(),
                    live: p.state == PROC_LIVE,
                    attached_ns: p.attached_at,
                    free_launches: open.shards.iter().map(|s| s.launches.load(Relaxed)).sum(),
                    ring_full: open.ring_full.load(Relaxed),
                    host_waits: open.host_waits.load(Relaxed),
                    host_wait_ns: open.host_wait_ns.load(Relaxed),
                    gpus: gpus.collect(),
                }
            });
        Truth { time_ns: t, repairs: self.l.repairs, gpus: gpus.collect(), processes: processes.collect() }
    }
}

impl SimDevice {
    /// Updates the GPU time of each of these processes; 0 for an unknown process. Returns the instant, in ns.
    ///
    /// Meant for frequent readers: a call takes a microsecond in all, whereas [`truth`](Self::truth) describes every process with the
    /// device's lock held.
    pub fn watch(&self, gpu: usize, processes: &mut [Watched]) -> u64 {
        self.with(|engine, _| {
            let t = engine.l.time;
            let procs = &engine.l.procs;
            for watched in processes {
                let is_it = |p: &Proc| p.state != PROC_FREE && p.pid == watched.pid;
                if !procs.get(watched.slot as usize).is_some_and(is_it) {
                    // The latest of several.
                    watched.slot =
                        (0..).zip(procs).filter(|(_, p)| is_it(p)).map(|(i, _)| i).last().unwrap_or(u32::MAX);
                }
                let account = procs.get(watched.slot as usize).and_then(|p| p.gpus.get(gpu));
                watched.busy_ns = account.map_or(0, |a| a.busy.total(t));
            }
            t
        })
    }

    /// Ground truth now, after a sweep of dead processes.
    pub fn truth(&self) -> Truth {
        self.with_living(|engine, now| {
            let mut truth = engine.truth(now);
            for (slot, pid, image) in engine.live() {
                if let Some(process) = truth.processes.iter_mut().find(|process| process.slot == slot) {
                    process.pid = self.holder(slot, pid, image).unwrap_or(0);
                }
            }
            truth
        })
    }
}
