//! Processes that work on given tasks, for a simulation around the node that decides about these tasks.
//!
//! A worker launches the kernels of a task one behind the other, waits for the last of them, and takes the next task. The meter
//! treats workers like every other process: the time of a task depends on the other processes of the device, and on the daemon.

use super::Got;
use super::daemon::name_of;
use super::node_plan::{Program, Shape};
use super::node_world::{Instance, NodeWorld, Planned};
use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Duration, ResourceSpec, ServiceClass, Timestamp};
use std::collections::VecDeque;

/// The length of a task's kernels; a task below this length is one kernel.
const KERNEL: Duration = Duration::from_millis(1);

/// A task completed by a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Done {
    /// The worker, by its number from [`NodeWorld::start_worker`].
    pub worker: usize,
    /// The number given with the task.
    pub task: u64,
    /// The end of the task's last kernel.
    pub at: Timestamp,
}

/// A task: an amount of GPU time.
#[derive(Debug, Clone, Copy)]
struct Task {
    number: u64,
    /// The length of each kernel of the task.
    kernel: Duration,
    /// Kernels still to launch, and kernels still to end.
    to_launch: u64,
    to_end: u64,
}

/// A worker's tasks, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    queue: VecDeque<Task>,
}

impl Tasks {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The length of the next kernel.
    pub(super) fn next_kernel(&self) -> Duration {
        self.queue.front().map_or(KERNEL, |task| task.kernel)
    }

    /// Counts the launch of a kernel of the first task, and returns whether it was the task's last kernel.
    pub(super) fn launched(&mut self) -> bool {
        let Some(task) = self.queue.front_mut() else { return true };
        task.to_launch = task.to_launch.saturating_sub(1);
        task.to_launch == 0
    }

    /// Counts the end of a kernel of the first task, and returns the task's number after its last kernel.
    pub(super) fn ended(&mut self) -> Option<u64> {
        let task = self.queue.front_mut()?;
        task.to_end = task.to_end.saturating_sub(1);
        if task.to_end > 0 {
            return None;
        }
        self.queue.pop_front().map(|task| task.number)
    }

    fn give(&mut self, number: u64, work: Duration) {
        let kernels = (work.as_nanos() / KERNEL.as_nanos()).max(1);
        let kernel = Duration::from_nanos((work.as_nanos() / kernels).max(1_000));
        self.queue.push_back(Task { number, kernel, to_launch: kernels, to_end: kernels });
    }

    fn left(&self, number: u64) -> Duration {
        let task = self.queue.iter().find(|task| task.number == number);
        task.map_or(Duration::ZERO, |task| task.kernel.saturating_mul(task.to_end))
    }
}

/// The program of each worker; its tasks decide about the kernels.
const PROGRAM: Program = Program {
    kernel: (KERNEL, KERNEL),
    functions: 1,
    spread_percent: 0,
    synchronises: false,
    pause: (Duration::ZERO, Duration::ZERO),
    silences: false,
    allocates: false,
    weights: gshare_core::Bytes::ZERO,
};

impl NodeWorld<'_> {
    /// The time of the next event.
    pub fn next_at(&self) -> Option<Timestamp> {
        self.outside.queue.next_at().into_iter().chain(self.daemon.next_deadline()).min()
    }

    /// Starts an instance with one worker on a device now, and returns the worker's number.
    pub fn start_worker(
        &mut self,
        now: Timestamp,
        gpu: usize,
        spec: ResourceSpec,
        class: Option<ServiceClass>,
    ) -> usize {
        let (instance, shape) = (self.instances.len(), Shape::Any);
        self.outside.book.add_instance(gpu, shape, spec);
        let (name, on_loss) = (name_of(gpu, instance), OnDaemonLoss::Open);
        self.instances.push(Instance { gpu, shape, name, spec, on_loss, class });
        let worker = self.processes.len();
        self.planned.push(Planned { instance, program: PROGRAM });
        self.processes.push(None);
        self.got.push(Got::default());
        self.outside.book.add_process(instance, &PROGRAM);
        self.outside.book.accounts.leave_out(worker);
        self.starts(now, worker);
        if let Some(process) = &mut self.processes[worker] {
            process.tasks = Some(Tasks::default());
        }
        worker
    }

    /// Gives a worker a task of that much GPU time, under a number unlike its other tasks.
    pub fn give(&mut self, now: Timestamp, worker: usize, task: u64, work: Duration) {
        let Some(process) = self.processes.get_mut(worker).and_then(Option::as_mut) else { return };
        let Some(tasks) = &mut process.tasks else { return };
        tasks.give(task, work);
        process.has_work(now, &mut self.outside);
    }

    /// The GPU time of a task still to do.
    pub fn left(&self, worker: usize, task: u64) -> Duration {
        let process = self.processes.get(worker).and_then(Option::as_ref);
        process.and_then(|process| process.tasks.as_ref()).map_or(Duration::ZERO, |tasks| tasks.left(task))
    }

    /// Ends a worker in good order if it has no task left; otherwise, or with `killed`, kills it.
    pub fn end_worker(&mut self, now: Timestamp, worker: usize, killed: bool) {
        match self.processes.get_mut(worker) {
            Some(Some(process)) if !killed && process.tasks.as_ref().is_none_or(Tasks::is_empty) => {
                process.leave(now, &mut self.outside);
            }
            Some(Some(_)) => self.kill(now, worker),
            _ => {}
        }
    }

    /// Takes the tasks completed since the last call, in the order of their ends.
    pub fn take_done(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.outside.done);
    }

    /// The number of kernels run so far.
    pub fn kernels(&self) -> u64 {
        self.outside.book.figures.kernels
    }
}
