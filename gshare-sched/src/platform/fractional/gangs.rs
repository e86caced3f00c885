//! Training jobs: workers that start together on different devices, and start again together.

use super::{
    Duration, FractionalPool, Function, FunctionId, InstanceId, PoolAction, RequestRate, Timer, Work,
};
use crate::pack::{Demand, Workload};
use gshare_core::GpuShare;

/// The longest pause before the restart of a job that ended by itself.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// A training job.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gang {
    /// The pause before the next start.
    pause: Duration,
    first_pause: Duration,
    completed: bool,
}

impl Gang {
    pub(super) const fn new(pause: Duration) -> Self {
        Self { pause, first_pause: pause, completed: false }
    }
}

impl Function {
    pub(super) const fn training_share(&self) -> Option<GpuShare> {
        match self.spec.work {
            Work::Training { share, .. } => Some(share),
            _ => None,
        }
    }
}

impl FractionalPool {
    /// Starts a job that should run and does not, if all of its workers find room.
    pub(super) fn start_gang(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.functions.get(&function) else { return };
        let Work::Training { workers, share } = of.spec.work else { return };
        let runs = !of.instances.is_empty() || of.gang.is_some_and(|gang| gang.completed);
        if of.removed || runs || self.timers.has(Timer::Restart(function)) {
            return;
        }
        let memory = share.memory().unwrap_or(of.spec.memory);
        let demand = Demand::from(&share)
            .with_memory(memory)
            .with_function(function)
            .with_workload(Workload::Training);
        let demands: Vec<Demand> = (0..workers).map(|_| demand).collect();
        let mut placed = Vec::new();
        let found = match of.spec.weights {
            Some(weights) => {
                self.weights.place(&mut *self.packer, &demand, weights, &|_| true).map(|one| placed.push(one))
            }
            None => self.packer.place_gang(&demands, &mut placed),
        };
        if found.is_err() {
            actions.push(PoolAction::Unmet { function });
            return;
        }
        let instance = self.insert(function, None, demand, 0, RequestRate::ZERO);
        self.idle_gangs.remove(&function);
        for one in placed {
            self.hold(instance, one.placement.id, one.placement.gpu);
        }
        self.order_start(instance, actions);
    }

    /// A running job earns a short pause before its next start.
    pub(super) fn gang_ready(&mut self, function: FunctionId) {
        if let Some(gang) = self.functions.get_mut(&function).and_then(|of| of.gang.as_mut()) {
            gang.pause = gang.first_pause;
        }
    }

    /// Restarts an ended job after a pause, unless it was complete.
    pub(super) fn gang_gone(&mut self, function: FunctionId) {
        let now = self.now;
        let Some(of) = self.functions.get_mut(&function).filter(|of| !of.removed) else { return };
        let Some(gang) = of.gang.as_mut().filter(|gang| !gang.completed) else { return };
        self.timers.set(Timer::Restart(function), now.saturating_add(gang.pause));
        gang.pause = gang.pause.saturating_mul(2).min(LONGEST_PAUSE);
        self.idle_gangs.insert(function);
    }

    /// Marks the job of a completed instance, so that it does not start again.
    pub(super) fn completed(&mut self, instance: InstanceId, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.instances.get(&instance) else { return };
        let function = of.function;
        if let Some(gang) = self.functions.get_mut(&function).and_then(|of| of.gang.as_mut()) {
            gang.completed = true;
        }
        self.gone(instance, actions);
    }
}
