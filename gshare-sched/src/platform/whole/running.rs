//! The work of a device: a request, its local queue, and its next step; and asks that come, come back and go.

use super::devices::{CopyState, Phase};
use super::queue::{Ask, Place};
use super::{Cluster, FunctionId, GpuId, WholePool};
use crate::platform::{PlatformAction, Rejection};
use gshare_core::{Duration, RequestId, Timestamp};

impl WholePool {
    pub(super) fn not_idle(&mut self, gpu: GpuId) {
        let on = self.devices.g(gpu);
        let (kind, key) = (usize::from(on.kind), (on.dispatches, gpu));
        self.devices.idle[kind].remove(&key);
    }

    /// The ask is the device's from now on.
    pub(super) fn own(&mut self, gpu: GpuId, slot: u32) {
        let ask = self.devices.queue.get_mut(slot);
        ask.place = Place::Placed(gpu);
        let drop = (ask.drop_at, slot);
        self.drops.remove(&drop);
    }

    /// Runs a request whose model is there; it is the device's already.
    pub(super) fn run(&mut self, gpu: GpuId, slot: u32, cluster: &mut Cluster) {
        let Ask { request, function, .. } = *self.devices.queue.get(slot);
        self.devices.queue.forget(slot);
        let infer = Duration::from_nanos(self.devices.infer_ns(function, self.devices.g(gpu).kind));
        let until = self.devices.now.saturating_add(infer);
        self.devices.uses += 1;
        let used = self.devices.uses;
        let on = self.devices.g_mut(gpu);
        on.dispatches += 1;
        let Some(copy) = on.cached_mut(function) else { return };
        copy.used = used;
        let (Some(request), Some(instance)) = (request, copy.instance) else {
            // The kept instance is there.
            copy.users -= 1;
            self.devices.f_mut(function).warming = None;
            return self.go_on(gpu, cluster);
        };
        (on.until, on.phase) = (until, Phase::Running { function, request });
        self.devices.refile(gpu);
        // It does not stand if the instance was stopped: the request then waits for the report of the instance's end.
        cluster.order(PlatformAction::Dispatch { request, instance });
    }

    /// The device has nothing on it: it goes on with its local queue, or is idle.
    pub(super) fn go_on(&mut self, gpu: GpuId, cluster: &mut Cluster) {
        self.devices.g_mut(gpu).until = self.devices.now;
        while let Some(slot) = self.devices.g_mut(gpu).local.pop_front() {
            let Ask { function, local_ns, .. } = *self.devices.queue.get(slot);
            let on = self.devices.g_mut(gpu);
            on.local_ns -= local_ns;
            if on.cached(function).is_some_and(|copy| copy.state == CopyState::Resident) {
                self.own(gpu, slot);
                return self.run(gpu, slot, cluster);
            }
            // The model is gone: another device may suit the request better by now.
            self.requeue(slot);
        }
        let on = self.devices.g_mut(gpu);
        on.phase = Phase::Idle;
        let (kind, key) = (usize::from(on.kind), (on.dispatches, gpu));
        self.devices.idle[kind].insert(key);
        if self.devices.unfiled != Some(gpu) {
            self.devices.file_all();
            self.devices.unfiled = Some(gpu);
        }
    }

    /// The device has answered its request, after this time.
    pub(super) fn completed(
        &mut self,
        gpu: GpuId,
        function: FunctionId,
        took: Duration,
        cluster: &mut Cluster,
    ) {
        let on = self.devices.g_mut(gpu);
        let kind = on.kind;
        if let Some(copy) = on.cached_mut(function) {
            copy.users -= 1;
        }
        if let Some(costs) = self.devices.f_mut(function).costs_on(kind) {
            costs.infer.observe(took);
        }
        self.trim_copy(gpu, function, cluster);
        self.go_on(gpu, cluster);
    }

    /// Adds the ask of a request of the ledger to the table; none if the request has ended.
    pub(super) fn ask_again(&mut self, request: RequestId, cluster: &Cluster) -> Option<u32> {
        let of = cluster.requests.get(&request)?;
        let costs = &self.devices.f(of.function).costs;
        let fastest = costs.iter().map(|costs| costs.infer.mean()).min().unwrap_or(0);
        // Requests have rising numbers; an ask without one comes between them.
        let mut ask = Ask::new(Some(request), of.function, request.number() * 2 + 1, of.arrived);
        if let Some(deadline) = of.deadline {
            // The request can start as late as this, no later.
            ask.drop_at = deadline.saturating_sub(Duration::from_nanos(fastest.saturating_sub(1)));
        }
        Some(self.devices.queue.add(ask))
    }

    /// Puts an ask into the queue, at the place of its arrival.
    pub(super) fn requeue(&mut self, slot: u32) {
        let Ask { function, place, drop_at, .. } = *self.devices.queue.get(slot);
        if drop_at < Timestamp::MAX && !matches!(place, Place::Local(_)) {
            self.drops.insert((drop_at, slot));
        }
        let kinds = self.devices.f(function).kinds;
        self.devices.queue.enter(slot, kinds);
    }

    /// Takes an ask out of the global queue; `dispatched`: it was given to a device.
    pub(super) fn leave(&mut self, slot: u32, dispatched: bool) {
        let kinds = self.devices.f(self.devices.queue.get(slot).function).kinds;
        self.devices.queue.leave(slot, kinds, dispatched);
    }

    /// Forgets an ask, wherever it waits.
    pub(super) fn take_back(&mut self, slot: u32) {
        let Ask { function, place, drop_at, local_ns, .. } = *self.devices.queue.get(slot);
        match place {
            Place::Queued => self.leave(slot, false),
            Place::Local(gpu) => {
                let on = self.devices.g_mut(gpu);
                on.local.retain(|&other| other != slot);
                on.local_ns -= local_ns;
                if let Some(copy) = on.cached_mut(function) {
                    copy.users -= 1;
                }
                self.devices.refile(gpu);
            }
            // The load goes on: the next request of the function needs it, or none does.
            Place::Placed(gpu) => {
                let on = self.devices.g_mut(gpu);
                if on.phase.take_ask().is_some()
                    && let Some(copy) = on.cached_mut(function)
                {
                    copy.users -= 1;
                }
            }
        }
        self.drops.remove(&(drop_at, slot));
        self.devices.queue.forget(slot);
    }

    /// Ends an ask that cannot be served.
    pub(super) fn reject(&mut self, slot: u32, reason: Rejection, cluster: &mut Cluster) {
        let Ask { request, function, .. } = *self.devices.queue.get(slot);
        self.take_back(slot);
        if let Some(request) = request {
            cluster.order(PlatformAction::Reject { request, reason });
        } else {
            self.devices.f_mut(function).warming = None;
            cluster.start_failed(function);
        }
    }

    /// Rejects the requests that can no longer be answered by their deadlines.
    pub(super) fn drop_late(&mut self, cluster: &mut Cluster) {
        while let Some(&(at, slot)) = self.drops.first()
            && at <= self.devices.now
        {
            self.reject(slot, Rejection::WouldBeLate, cluster);
        }
    }
}
