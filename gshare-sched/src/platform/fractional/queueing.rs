//! The choice of the instance for a request, and the report of load to the scaler.

use super::pool_config::PARK_IDLE;
use super::{
    Duration, FractionalPool, Function, FunctionId, HorizontalEvent, Instance, InstanceId, PlatformAction,
    PoolAction, Request, RequestId, RequestRate, State, StopCause, Timer, Timestamp,
};
use crate::platform::WaitQueue;
use crate::platform::batch::{self, Batch};

impl Instance {
    /// How long the instance needs for as many requests as it serves at once.
    fn takes(&self) -> Duration {
        let nanos = u64::from(self.capacity).saturating_mul(1_000_000_000_000);
        Duration::from_nanos(nanos.checked_div(self.throughput.as_milli()).unwrap_or(0))
    }

    /// Whether a ready instance takes another request, or another batch.
    pub(super) fn has_room(&self, batches: bool) -> bool {
        if batches { self.requests.is_empty() } else { self.requests.len() < self.capacity as usize }
    }
}

impl Function {
    /// The time the function's ready instances need for its waiting requests.
    fn behind(&self) -> Duration {
        Duration::from_wide_nanos(self.queue.len() as u128 * 1_000_000_000_000 / self.serves.max(1))
    }
}

impl FractionalPool {
    /// The key by which ready instances are given requests.
    pub(super) fn open_key(instance: InstanceId, of: &Instance) -> (u32, u64, InstanceId) {
        let has = u32::try_from(of.requests.len()).unwrap_or(u32::MAX);
        (has, u64::MAX - of.throughput.as_milli(), instance)
    }

    pub(super) fn arrived(
        &mut self,
        request: RequestId,
        function: FunctionId,
        arrived: Timestamp,
        actions: &mut Vec<PoolAction>,
    ) {
        let now = self.now;
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.used = now;
        of.queue.insert((arrived, request));
        self.requests.insert(request, Request { function, arrived, on: None });
        self.activate(function, actions);
        self.report_early(function, actions);
        self.to_serve.insert(function);
    }

    /// Counts a request of a function when it comes to the platform.
    pub(super) fn called(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.arrived = of.arrived.saturating_add(1);
        of.arrivals.came(self.now);
        of.used = self.now;
        self.activate(function, actions);
    }

    /// Gives a called function without instances its first.
    fn activate(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        let Some(counts) = self.scaler.instances(function) else { return };
        let Some(of) = self.functions.get_mut(&function) else { return };
        if of.activated || counts.starting + counts.ready > 0 {
            return;
        }
        of.activated = true;
        self.tell_bounds(function, actions);
    }

    pub(super) fn serve(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        // The backlog hardly changes while open instances take some of it.
        let backlog = self.functions.get(&function).map_or(Duration::ZERO, Function::behind);
        while let Some(of) = self.functions.get_mut(&function) {
            let Some(&key) = of.open.first() else { break };
            let instance = key.2;
            let Some(on) = self.instances.get_mut(&instance) else { break };
            let (size, takes) = (on.capacity as usize, on.takes());
            self.timers.clear(Timer::Batch(function));
            let mut count = of.queue.len().min(1);
            if of.spec.batches {
                match batch::next(self.now, &of.queue, (size, takes), of.spec.slo, &of.arrivals) {
                    Batch::Now(all) => count = all,
                    Batch::Gathers(until) => {
                        self.timers.set(Timer::Batch(function), until);
                        break;
                    }
                }
            }
            if count == 0 {
                break;
            }
            of.open.remove(&key);
            on.used = self.now;
            let done = self.now.saturating_add(takes);
            for _ in 0..count {
                let Some(&first) = of.queue.first() else { break };
                let queue = WaitQueue { waiting: &of.queue, done, slo: of.spec.slo, backlog };
                let chosen = self.order.next(&queue);
                let waiting = chosen.filter(|chosen| of.queue.contains(chosen)).unwrap_or(first);
                of.queue.remove(&waiting);
                let request = waiting.1;
                if let Some(of) = self.requests.get_mut(&request) {
                    of.on = Some(instance);
                }
                on.requests.insert(request);
                actions.push(PoolAction::Order(PlatformAction::Dispatch { request, instance }));
            }
            self.reopen(instance);
        }
        self.wake(function);
    }

    /// Lists the instance as open, if it has room for a request.
    fn reopen(&mut self, instance: InstanceId) {
        let Some(of) = self.instances.get(&instance) else { return };
        let Some(function) = self.functions.get_mut(&of.function) else { return };
        if of.state == State::Ready && of.has_room(function.spec.batches) {
            function.open.insert(Self::open_key(instance, of));
        }
    }

    pub(super) fn done(&mut self, request: RequestId, actions: &mut Vec<PoolAction>) {
        let Some(Request { function, on: Some(instance), .. }) = self.requests.remove(&request) else {
            return;
        };
        self.close(instance);
        let now = self.now;
        if let Some(of) = self.functions.get_mut(&function) {
            of.used = now;
        }
        let Some(of) = self.instances.get_mut(&instance) else { return };
        of.requests.remove(&request);
        of.used = now;
        let (state, empty) = (of.state, of.requests.is_empty());
        match state {
            State::Ready => {
                self.reopen(instance);
                self.to_serve.insert(function);
                if !self.wanting.is_empty() && empty {
                    self.look_for_room_in(PARK_IDLE);
                }
            }
            State::Emptying if empty => self.park(instance, actions),
            State::Draining if empty => {
                let removed = self.functions.get(&function).is_some_and(|of| of.removed);
                let cause = if removed { StopCause::Removed } else { StopCause::Drained };
                self.stop(instance, cause, actions);
            }
            _ => {}
        }
    }

    /// Reports the load as soon as the scaler takes a report, when more requests wait than can be served at once: a queue that
    /// grows for a whole tick costs most of an SLO.
    pub(super) fn report_early(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        if !self.scaler.early_reports() {
            return;
        }
        let half = self.scaler.tick().as_nanos() / 2;
        let Some(of) = self.functions.get(&function) else { return };
        let due = self.now.saturating_since(of.reported).as_nanos() >= half;
        if due && !of.queue.is_empty() && of.queue.len() as u64 >= of.at_once {
            self.report(function, actions);
        }
    }

    /// Reports the load since the last report.
    pub(super) fn report(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        let (now, tick) = (self.now, self.scaler.tick());
        let Some(of) = self.functions.get_mut(&function) else { return };
        let arrived = u64::from(core::mem::take(&mut of.arrived));
        let over = now.saturating_since(of.reported).as_nanos();
        let early = over < tick.as_nanos();
        of.reported = now;
        let mut rate = RequestRate::from_milli(arrived.saturating_mul(1_000_000_000_000) / over.max(1));
        if early {
            // The scaler should plan for the waiting requests to be served within a second.
            let waiting = RequestRate::from_milli((of.queue.len() as u64).saturating_mul(1_000));
            rate = rate.saturating_add(waiting);
        }
        let waits = !of.queue.is_empty();
        let rest = of.activated
            && !waits
            && now.saturating_since(of.used) >= self.config.keep_alive
            && of.instances.iter().all(|one| self.instances[one].requests.is_empty());
        if rest {
            of.activated = false;
        }
        self.timers.set(Timer::Report(function), now.saturating_add(tick));
        if rest {
            self.tell_bounds(function, actions);
        }
        self.scale(HorizontalEvent::LoadReported { function, rate }, actions);
        if waits {
            self.activate(function, actions);
            self.wake_one(function);
        }
        self.to_serve.insert(function);
    }
}
