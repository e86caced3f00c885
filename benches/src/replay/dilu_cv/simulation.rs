//! Processes and their kernels on a device in virtual time.

use super::gates::Gate;
use super::workload::{KERNELS, Model, Size, trainer_kernel};
use anyhow::{Context, Result};
use gshare_core::{Duration, SmShare, Timestamp};
use gshare_sim::contended_gpu::{LaneKernel, SharedGpu};
use gshare_sim::world::FunctionOutcome;

/// The most work that a process may have queued on the device.
const IN_FLIGHT: Duration = Duration::from_millis(5);

/// A server of requests, or a trainer, which always has work.
pub(super) struct Process<'a> {
    /// The model that it serves; none: it trains.
    model: Option<&'static Model>,
    max_batch: usize,
    partition: SmShare,
    /// Requests that are in no batch yet, in order.
    arrivals: &'a [Timestamp],
    batch: Option<Batch<'a>>,
    outcome: FunctionOutcome,
}

/// A batch that is being computed.
struct Batch<'a> {
    arrived: &'a [Timestamp],
    size: &'static Size,
    launched: u64,
    done: u64,
    first_launch: Timestamp,
}

impl<'a> Process<'a> {
    pub(super) fn new(
        model: Option<&'static Model>,
        max_batch: usize,
        partition: SmShare,
        load: &'a [Timestamp],
    ) -> Self {
        let arrivals = if model.is_some() { load } else { &[] };
        Self { model, max_batch, partition, arrivals, batch: None, outcome: FunctionOutcome::default() }
    }

    fn is_done(&self) -> bool {
        self.arrivals.is_empty() && self.batch.is_none()
    }

    /// The next arrival that finds it at rest; others wait for its batch.
    fn next_arrival(&self) -> Option<Timestamp> {
        self.arrivals.first().copied().filter(|_| self.batch.is_none())
    }

    /// Takes as many of the waiting requests as make a batch, if none is being computed.
    fn begin_batch(&mut self, now: Timestamp) {
        let Some(model) = self.model.filter(|_| self.batch.is_none()) else { return };
        let waiting = self.arrivals.partition_point(|at| *at <= now);
        let fits = |size: &&Size| size.batch <= self.max_batch && size.batch <= waiting;
        let Some(size) = model.0.iter().rev().find(fits) else { return };
        let (arrived, rest) = self.arrivals.split_at(size.batch);
        self.arrivals = rest;
        self.batch = Some(Batch { arrived, size, launched: 0, done: 0, first_launch: now });
    }

    /// The next kernel, if it has one to launch.
    fn next_kernel(&self) -> Option<LaneKernel> {
        let kernel = match (self.model, &self.batch) {
            (None, _) => trainer_kernel()?,
            (_, Some(batch)) if batch.launched < KERNELS => batch.size.kernel(batch.launched)?,
            _ => return None,
        };
        Some(kernel.within(self.partition))
    }

    /// Notes that the next kernel was launched. Gives the batch if that was its last.
    fn launched(&mut self, now: Timestamp) -> Option<&Batch<'a>> {
        let batch = self.batch.as_mut()?;
        if batch.launched == 0 {
            batch.first_launch = now;
        }
        batch.launched += 1;
        self.batch.as_ref().filter(|batch| batch.launched == KERNELS)
    }

    /// Notes that the oldest kernel has ended; one of a trainer counts if that was in time.
    fn ended(&mut self, now: Timestamp, in_time: bool) {
        if let Some(batch) = &mut self.batch {
            batch.done += 1;
            if batch.done == KERNELS {
                let took = batch.arrived.iter().map(|at| now.saturating_since(*at));
                self.outcome.latencies.extend(took);
                self.batch = None;
            }
        } else if let Some(kernel) = trainer_kernel().filter(|_| in_time) {
            self.outcome.trained = self.outcome.trained.saturating_add(kernel.duration);
        }
    }
}

/// A device and the processes on it.
struct Node<'a, const N: usize> {
    now: Timestamp,
    /// When no more load comes, and a trainer's work counts no longer.
    end: Timestamp,
    gpu: SharedGpu,
    gate: Box<dyn Gate>,
    processes: [Process<'a>; N],
}

/// Runs processes under a gate on one device until `end`, and on until all requests are answered.
pub(super) fn run<const N: usize>(
    gate: Box<dyn Gate>,
    processes: [Process<'_>; N],
    end: Timestamp,
) -> Result<[FunctionOutcome; N]> {
    let mut node = Node { now: Timestamp::ZERO, end, gpu: SharedGpu::new(N), gate, processes };
    loop {
        node.launch()?;
        if node.now >= end && node.processes.iter().all(Process::is_done) {
            return Ok(node.processes.map(|mut process| {
                process.outcome.latencies.sort_unstable();
                process.outcome
            }));
        }
        node.step()?;
    }
}

impl<const N: usize> Node<'_, N> {
    /// Launches all that may be launched now.
    fn launch(&mut self) -> Result<()> {
        for (lane, process) in self.processes.iter_mut().enumerate() {
            process.begin_batch(self.now);
            let more = process.next_kernel().is_some();
            self.gate.settle(self.now, lane, self.gpu.queued(lane), more)?;
        }
        if self.gate.next_deadline().is_some_and(|due| due <= self.now) {
            self.gate.deadline(self.now)?;
        }
        for lane in 0..N {
            let alone = self.processes[..lane].iter().all(|first| first.batch.is_none());
            let process = &mut self.processes[lane];
            while self.gpu.queued(lane) < IN_FLIGHT
                && let Some(kernel) = process.next_kernel()
                && self.gate.admits(self.now, lane, &kernel, alone)?
            {
                self.gpu.launch(lane, kernel);
                if let Some(batch) = process.launched(self.now) {
                    self.gate.finished(self.now, lane, batch.first_launch, batch.size.batch)?;
                }
            }
        }
        Ok(())
    }

    /// Goes to the next time at which something happens.
    fn step(&mut self) -> Result<()> {
        let arrivals = self.processes.iter().filter_map(Process::next_arrival);
        let end = Some(self.end).filter(|end| *end > self.now);
        let times = [self.gpu.next_end(), self.gate.next_deadline(), end];
        let at = arrivals.chain(times.into_iter().flatten()).min().context("nothing would ever happen")?;
        self.now = self.now.max(at);
        for (lane, at) in self.gpu.advance(self.now) {
            self.processes[lane].ended(at, at <= self.end);
        }
        Ok(())
    }
}
