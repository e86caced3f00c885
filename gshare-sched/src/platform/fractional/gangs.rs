//! Training jobs: workers that start together on different devices, and start again together.

use super::pool_config::RESTART_AFTER;
use super::{Cluster, Duration, FractionalPool, FunctionId, GpuId, RequestRate, Timer};
use crate::pack::{Demand, Placed, Workload};
use gshare_core::{GpuShare, Quota, SmShare};

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
    /// Its workers of an earlier host are not all told yet.
    found: bool,
}

impl Gang {
    pub(super) const fn new(workers: u32, share: GpuShare, found: bool) -> Self {
        Self { workers, share, pause: RESTART_AFTER, completed: false, found }
    }

    /// What a worker books.
    fn demand(&self, function: FunctionId, cluster: &Cluster) -> Demand {
        let memory = self.share.memory().unwrap_or(cluster.functions[&function].spec.memory);
        Demand::from(&self.share)
            .with_memory(memory)
            .with_function(function)
            .with_workload(Workload::Training)
    }
}

impl FractionalPool {
    /// Starts a job that should run and does not, if all of its workers find room.
    pub(super) fn start_gang(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let Some(of) = self.functions.get(&function).filter(|_| !cluster.is_removed(function)) else {
            return;
        };
        let Some(gang) = of.gang.filter(|gang| !gang.completed && !gang.found) else { return };
        if !of.instances.is_empty() || self.timers.has(Timer::Restart(function)) {
            return;
        }
        let demand = gang.demand(function, cluster);
        let demands: Vec<Demand> = (0..gang.workers).map(|_| demand).collect();
        let mut placed = Vec::new();
        let (devices, spec) = (&self.devices, &cluster.functions[&function].spec);
        let allowed = |gpu| devices.get(&gpu).is_some_and(|node| spec.allows(*node));
        let found = match spec.weights {
            Some(weights) => {
                self.weights.place(&mut *self.packer, &demand, weights, &allowed).map(|one| placed.push(one))
            }
            None => {
                let fresh = |taken: &[Placed], gpu: GpuId| {
                    allowed(gpu) && taken.iter().all(|one| one.placement.gpu != gpu)
                };
                self.packer.place_set(&demands, &fresh, &mut placed)
            }
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

    /// The running worker of a job with one worker, with its booking.
    ///
    /// # Errors
    /// Why it cannot be.
    pub(super) fn gang_found(
        &self,
        function: FunctionId,
        (quota, sm): (Quota, SmShare),
        cluster: &Cluster,
    ) -> Result<Option<Demand>, &'static str> {
        let Some(of) = self.functions.get(&function) else { return Ok(None) };
        let Some(gang) = of.gang else { return Ok(None) };
        let demand = gang.demand(function, cluster);
        match () {
            () if gang.workers > 1 => Err("need a job of one worker"),
            () if gang.completed || !of.instances.is_empty() => Err("need a job that does not run"),
            () if (demand.quota, demand.sm) != (quota, sm) => Err("need the share of the job"),
            () => Ok(Some(demand)),
        }
    }

    /// All workers of an earlier host are told: a job of which none runs starts.
    pub(super) fn release_gang(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let gang = self.functions.get_mut(&function).and_then(|of| of.gang.as_mut());
        if gang.is_some_and(|gang| core::mem::take(&mut gang.found)) {
            self.start_gang(function, cluster);
        }
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
