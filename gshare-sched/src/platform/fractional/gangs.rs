//! Training jobs: workers that start together on different devices, and start again together.

use super::pool_config::RESTART_AFTER;
use super::{Cluster, Duration, FractionalPool, FunctionId, RequestRate, Timer};
use crate::pack::{Demand, Workload};
use gshare_core::GpuShare;

/// The longest pause before the restart of a job that ended by itself.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// A training job.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gang {
    workers: u32,
    /// The share of each worker.
    pub(super) share: GpuShare,
    /// The pause before the next start.
    pause: Duration,
    completed: bool,
}

impl Gang {
    pub(super) const fn new(workers: u32, share: GpuShare) -> Self {
        Self { workers, share, pause: RESTART_AFTER, completed: false }
    }
}

impl FractionalPool {
    /// Starts a job that should run and does not, if all of its workers find room.
    pub(super) fn start_gang(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let Some(of) = self.functions.get(&function).filter(|_| !cluster.is_removed(function)) else {
            return;
        };
        let Some(Gang { workers, share, completed, .. }) = of.gang else { return };
        if !of.instances.is_empty() || completed || self.timers.has(Timer::Restart(function)) {
            return;
        }
        let memory = share.memory().unwrap_or(cluster.functions[&function].spec.memory);
        let demand = Demand::from(&share)
            .with_memory(memory)
            .with_function(function)
            .with_workload(Workload::Training);
        let demands: Vec<Demand> = (0..workers).map(|_| demand).collect();
        let mut placed = Vec::new();
        let found = match cluster.functions[&function].spec.weights {
            Some(weights) => {
                self.weights.place(&mut *self.packer, &demand, weights, &|_| true).map(|one| placed.push(one))
            }
            None => self.packer.place_gang(&demands, &mut placed),
        };
        if found.is_err() {
            cluster.unmet(function);
            return;
        }
        let instance = self.insert(function, demand, (0, RequestRate::ZERO), cluster);
        self.idle_gangs.remove(&function);
        for one in placed {
            self.hold(instance, one.placement.id, one.placement.gpu);
        }
        self.order_start(instance, cluster);
    }

    /// A running job earns a short pause before its next start.
    pub(super) fn gang_ready(&mut self, function: FunctionId) {
        if let Some(gang) = self.functions.get_mut(&function).and_then(|of| of.gang.as_mut()) {
            gang.pause = RESTART_AFTER;
        }
    }

    /// Restarts an ended job after a pause, unless it was complete.
    pub(super) fn gang_gone(&mut self, function: FunctionId, cluster: &Cluster) {
        let Some(of) = self.functions.get_mut(&function).filter(|_| !cluster.is_removed(function)) else {
            return;
        };
        let Some(gang) = of.gang.as_mut().filter(|gang| !gang.completed) else { return };
        self.timers.set(Timer::Restart(function), cluster.now.saturating_add(gang.pause));
        gang.pause = gang.pause.saturating_mul(2).min(LONGEST_PAUSE);
        self.idle_gangs.insert(function);
    }

    /// The job is done, and does not start again.
    pub(super) fn completed(&mut self, function: FunctionId) {
        if let Some(gang) = self.functions.get_mut(&function).and_then(|of| of.gang.as_mut()) {
            gang.completed = true;
        }
    }
}
