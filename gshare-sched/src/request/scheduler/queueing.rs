//! Requests that wait: from arrival to the global queue, back into it after a failure, and out of it with a rejection.

use super::{LocalityScheduler, Model, memory_share};
use crate::request::queue::{By, NONE, Place, Request};
use crate::request::{RejectReason, RequestAction};
use gshare_core::{BasisPoints, Duration, ModelId, RequestId, TenantId, Timestamp};

impl LocalityScheduler {
    /// Takes a request out of the global queue because it was given to a GPU.
    pub(super) fn leave(&mut self, slot: u32) {
        let kinds = self.m(self.queue.get(slot).model).kinds;
        self.queue.leave(slot, kinds, true);
    }

    /// Puts a request that was given to a GPU back into the global queue.
    pub(super) fn requeue(&mut self, slot: u32) {
        let request = *self.queue.get(slot);
        if request.place == Place::Placed && request.drop_at < Timestamp::MAX {
            self.drops.insert((request.drop_at, slot));
        }
        let kinds = self.m(request.model).kinds;
        self.queue.enter(slot, kinds);
    }

    /// Ends a request that is not completed. One that is placed has been taken off its GPU by the caller.
    pub(super) fn reject(&mut self, slot: u32, reason: RejectReason, actions: &mut Vec<RequestAction>) {
        let request = *self.queue.get(slot);
        match request.place {
            Place::Queued => {
                let kinds = self.m(request.model).kinds;
                self.queue.leave(slot, kinds, false);
            }
            Place::Local => {
                let on = self.g_mut(request.gpu);
                on.local.retain(|&other| other != slot);
                on.local_ns -= request.local_ns;
                if let Some(copy) = on.cached_mut(request.model) {
                    copy.users -= 1;
                }
                self.refile(request.gpu);
            }
            Place::Placed => {}
        }
        if request.place != Place::Placed {
            self.drops.remove(&(request.drop_at, slot));
        }
        self.stats.rejected += 1;
        actions.push(RequestAction::Reject { request: request.id, reason });
        self.queue.forget(slot);
    }

    pub(super) fn arrived(
        &mut self,
        id: RequestId,
        model: ModelId,
        tenant: TenantId,
        deadline: Option<Timestamp>,
        actions: &mut Vec<RequestAction>,
    ) {
        let now = self.now;
        self.models[model.index()].asked = true;
        self.models[model.index()].recent.count(now);
        self.asked.count(now);
        let known = self.m(model.number());
        let fastest = known.costs.iter().map(|costs| costs.infer.mean()).min().unwrap_or(0);
        let mut request = Request::new(id, model.number(), tenant.number(), now);
        if let Some(deadline) = deadline {
            // The request can start as late as this, no later.
            request.drop_at = deadline.saturating_sub(Duration::from_nanos(fastest.saturating_sub(1)));
        }
        let (bytes, profiled, kinds) = (known.bytes, !known.costs.is_empty(), known.kinds);
        let share = self.tenants.get(&tenant.number()).map_or(BasisPoints::WHOLE, |tenant| tenant.share);
        let limited = share < BasisPoints::WHOLE && self.memory > 0;
        let reason = if !profiled {
            Some(RejectReason::NotProfiled)
        } else if kinds == 0 {
            Some(RejectReason::ModelTooLarge)
        } else if limited && bytes > memory_share(share, self.memory) {
            Some(RejectReason::TenantMemory)
        } else if self.queue.known() >= self.config.max_requests as usize {
            Some(RejectReason::QueueFull)
        } else {
            (request.drop_at <= now).then_some(RejectReason::DeadlineMissed)
        };
        if let Some(reason) = reason {
            self.stats.rejected += 1;
            actions.push(RequestAction::Reject { request: id, reason });
            return;
        }
        let slot = self.queue.add(request);
        self.queue.enter(slot, kinds);
        if request.drop_at < Timestamp::MAX {
            self.drops.insert((request.drop_at, slot));
        }
    }

    /// The kinds of GPU that can serve a model: profiled, and not known to be too small.
    pub(super) fn kinds_of(&self, model: &Model) -> u64 {
        let fits = |kind: u8| match self.kinds.get(usize::from(kind)) {
            Some(&Some(memory)) => model.bytes <= memory,
            _ => true,
        };
        model.costs.iter().filter(|costs| fits(costs.kind)).fold(0, |kinds, costs| kinds | 1 << costs.kind)
    }

    pub(super) fn reclass(&mut self, model: u32, actions: &mut Vec<RequestAction>) {
        let kinds = self.kinds_of(self.m(model));
        let before = core::mem::replace(&mut self.models[model as usize].kinds, kinds);
        if kinds == before {
            return;
        }
        self.queue.reclass(model, before, kinds);
        if kinds == 0 {
            let mut lost = Vec::new();
            let mut slot = self.queue.of_model(model).head;
            while slot != NONE {
                lost.push(slot);
                slot = self.queue.next(By::Model, slot);
            }
            for slot in lost {
                self.reject(slot, RejectReason::ModelTooLarge, actions);
            }
        }
    }
}
