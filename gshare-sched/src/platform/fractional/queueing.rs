//! The choice of the instance for a request, and the report of load to the scaler.

use super::pool_config::PARK_IDLE;
use super::{
    Cluster, Duration, FractionalPool, Function, FunctionId, Instance, InstanceId, OpenKey, PlatformAction,
    RequestRate, State, StopCause, TYPICAL_AREA, Timer,
};
use crate::pipeline::KeepAlive;
use crate::platform::batch::{self, Batch};

impl Instance {
    /// How long the instance needs for as many requests as it serves at once.
    fn takes(&self) -> Duration {
        let nanos = u64::from(self.capacity).saturating_mul(1_000_000_000_000);
        Duration::from_nanos(nanos.checked_div(self.throughput.as_milli()).unwrap_or(0))
    }

    /// Its place among the instances with room, if it is ready and takes another request, or another batch, beside this number.
    pub(super) fn open_key(&self, instance: InstanceId, runs: usize) -> Option<OpenKey> {
        let open = self.state == State::Ready && runs < self.room as usize;
        open.then(|| (runs, u64::MAX - self.throughput.as_milli(), instance))
    }
}

impl Function {
    /// The time the function's ready instances need for this number of waiting requests.
    fn behind(&self, waiting: usize) -> Duration {
        Duration::from_wide_nanos(waiting as u128 * 1_000_000_000_000 / self.serves.max(1))
    }
}

impl FractionalPool {
    /// Decides when an instance pays, by what it books and by the requests that a cold start makes late.
    pub(super) fn plan_stays(&mut self, function: FunctionId) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        if let Some(instance) = of.instances.first() {
            let demand = &self.instances[instance].demand;
            of.area = u64::from(demand.quota.get()) * u64::from(demand.sm.get());
        }
        let keep_alive = match self.config.keep_alive {
            KeepAlive::Adaptive { break_even, longest } => {
                // The root of the requests of a visit: those that come after the start are in time.
                let weighed = u128::from(break_even.as_nanos()) * u128::from((of.visits * 8).isqrt()) / 8;
                let break_even = Duration::from_wide_nanos(
                    weighed * u128::from(TYPICAL_AREA) / u128::from(of.area.max(1)),
                );
                KeepAlive::Adaptive { break_even, longest }
            }
            fixed => fixed,
        };
        of.stays = of.gaps.stays(&self.gaps, &keep_alive);
    }

    /// Gives a called function without instances its first.
    pub(super) fn activate(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let Some(of) = self.functions.get_mut(&function).filter(|of| !of.activated) else { return };
        if of.fleet.as_ref().is_some_and(|fleet| fleet.deployed() == 0) {
            of.activated = true;
            self.plan_stays(function);
            self.set_minimum(function, cluster);
        }
    }

    pub(super) fn serve(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let Some(known) = cluster.functions.get(&function) else { return };
        let Some(of) = self.functions.get(&function) else { return };
        // The backlog hardly changes while open instances take some of it.
        let (backlog, mut waiting) = (of.behind(known.queue.len()), known.queue.len());
        if known.spec.batches && !of.open.is_empty() {
            self.timers.clear(Timer::Batch(function));
        }
        while waiting > 0
            && let Some(of) = self.functions.get(&function)
            && let Some(&(_, _, instance)) = of.open.first()
        {
            let Some(on) = self.instances.get_mut(&instance) else { break };
            let Some(known) = cluster.functions.get(&function) else { break };
            let (size, takes) = (on.capacity as usize, on.takes());
            let mut count = 1;
            if known.spec.batches {
                match batch::next(cluster.now, &known.queue, (size, takes), known.spec.slo, &of.arrivals) {
                    Batch::Now(all) => count = all,
                    Batch::Gathers(until) => {
                        self.timers.set(Timer::Batch(function), until);
                        break;
                    }
                }
            }
            on.used = cluster.now;
            let done = cluster.now.saturating_add(takes);
            let mut stands = true;
            for _ in 0..count {
                let Some(request) = cluster.next_request(function, done, backlog, |_| true) else { break };
                stands &= cluster.order(PlatformAction::Dispatch { request, instance });
            }
            if stands {
                waiting -= count;
                self.reopen(instance, cluster);
            } else {
                self.close(instance);
            }
        }
        self.wake(function, cluster);
    }

    /// Lists the instance as open, if it has room for a request.
    pub(super) fn reopen(&mut self, instance: InstanceId, cluster: &Cluster) {
        let Some(of) = self.instances.get_mut(&instance) else { return };
        let Some(function) = self.functions.get_mut(&of.function).filter(|of| of.gang.is_none()) else {
            return;
        };
        let key = of.open_key(instance, cluster.runs(instance));
        let before = core::mem::replace(&mut of.open, key);
        if before != key {
            before.map(|key| function.open.remove(&key));
            function.open.extend(key);
        }
    }

    /// Gives requests of the function to its instances before the end of the event.
    pub(super) fn serve_soon(&mut self, function: FunctionId) {
        if let Err(at) = self.to_serve.binary_search(&function) {
            self.to_serve.insert(at, function);
        }
    }

    /// The instance has answered a request.
    pub(super) fn answered(&mut self, instance: InstanceId, cluster: &mut Cluster) {
        let Some(of) = self.instances.get_mut(&instance) else { return };
        of.used = cluster.now;
        let (function, state, empty) = (of.function, of.state, cluster.runs(instance) == 0);
        if let Some(of) = self.functions.get_mut(&function) {
            of.used = cluster.now;
        }
        match state {
            State::Ready => {
                self.reopen(instance, cluster);
                self.serve_soon(function);
                if !self.wanting.is_empty() && empty {
                    self.look_for_room_in(PARK_IDLE, cluster);
                }
            }
            State::Emptying if empty => self.park(instance, cluster),
            State::Draining if empty => {
                let removed = cluster.is_removed(function);
                let cause = if removed { StopCause::Removed } else { StopCause::Drained };
                self.stop(instance, cause, cluster);
            }
            _ => {}
        }
    }

    /// Reports the load as soon as the scaler takes a report, when more requests wait than can be served at once: a queue that
    /// grows for a whole tick costs most of an SLO.
    pub(super) fn report_early(&mut self, function: FunctionId, cluster: &mut Cluster) {
        if !self.scaler.early_reports() {
            return;
        }
        let Some(of) = self.functions.get(&function) else { return };
        let waiting = cluster.queue(function).len();
        if waiting > 0
            && waiting as u64 >= of.at_once
            && cluster.now.saturating_since(of.reported).as_nanos()
                >= self.scaler.config().tick.as_nanos() / 2
        {
            self.report(function, cluster);
        }
    }

    /// Reports the load since the last report.
    pub(super) fn report(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let (now, tick) = (cluster.now, self.scaler.config().tick);
        let waiting = cluster.queue(function).len();
        let Some(of) = self.functions.get_mut(&function) else { return };
        let arrived = u64::from(core::mem::take(&mut of.arrived));
        let over = now.saturating_since(of.reported).as_nanos();
        let early = over < tick.as_nanos();
        of.reported = now;
        let mut rate = RequestRate::from_milli(arrived.saturating_mul(1_000_000_000_000) / over.max(1));
        if early {
            // The scaler should plan for the waiting requests to be served within a second.
            let waiting = RequestRate::from_milli((waiting as u64).saturating_mul(1_000));
            rate = rate.saturating_add(waiting);
        }
        let waits = waiting > 0;
        let idle = now.saturating_since(of.used);
        let served =
            |one: &InstanceId| !matches!(self.instances[one].state, State::Starting | State::WaitingForRoom);
        let fails =
            cluster.functions.get(&function).is_some_and(|of| of.fails) && !of.instances.iter().any(served);
        let warm = !fails && of.stays.iter().any(|stay| stay.from <= idle && idle < stay.to);
        let rest = of.activated && !waits && !warm && of.instances.iter().all(|one| cluster.runs(*one) == 0);
        if rest {
            of.activated = false;
        }
        self.timers.set(Timer::Report(function), now.saturating_add(tick));
        if rest {
            self.set_minimum(function, cluster);
        }
        self.scale(function, rate, cluster);
        if waits || warm {
            self.activate(function, cluster);
        }
        if waits {
            self.wake_one(function, cluster);
        }
        self.serve_soon(function);
    }
}
