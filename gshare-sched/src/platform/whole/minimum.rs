//! The copy of a model that is kept: a request without a caller has it loaded, and it is pinned where that is.

use super::super::START_AGAIN;
use super::{Life, PoolAction, RequestEvent, WholePool};
use gshare_core::request::RejectReason;
use gshare_core::{FunctionId, GpuId, RequestId};

/// Refuses a minimum that the pool cannot keep.
pub(super) fn check(min_instances: u32) -> Result<(), String> {
    match min_instances {
        0 | 1 => Ok(()),
        more => Err(format!("min_instances is {more}: need at most 1 on whole devices")),
    }
}

impl WholePool {
    /// Has minimums looked at once the event is told: the function has another, or its copies are not where they were.
    pub(super) fn look_at(&mut self, function: FunctionId) {
        let of = self.functions.get(&function);
        if of.is_some_and(|of| of.spec.min_instances > 0 || of.pin.is_some()) {
            self.lacking.insert(function);
        }
        self.look = true;
    }

    /// Pins and asks for what is to be kept, and says what cannot be now.
    pub(super) fn keep_minimums(&mut self, actions: &mut Vec<PoolAction>) {
        // A load that is ordered for one is pinned then.
        while core::mem::take(&mut self.look) {
            for function in self.lacking.clone() {
                if self.keep_minimum(function) {
                    self.lacking.remove(&function);
                }
                self.run(actions);
            }
        }
        for function in &self.lacking {
            if let Some(of) = self.functions.get_mut(function)
                && !core::mem::replace(&mut of.told_unmet, true)
            {
                actions.push(PoolAction::Unmet { function: *function });
            }
        }
    }

    /// False: there is no copy yet.
    fn keep_minimum(&mut self, function: FunctionId) -> bool {
        let Some(of) = self.functions.get_mut(&function) else { return true };
        let (model, before) = (of.model, of.pin);
        let wanted = of.spec.min_instances > 0 && !of.removed;
        let here = of.instances.iter().map(|id| &self.instances[id]).filter(|one| one.life != Life::Stopped);
        let here: Vec<GpuId> = here.filter(|_| wanted).map(|one| one.gpu).collect();
        let pin = before.filter(|gpu| here.contains(gpu)).or(here.first().copied());
        of.pin = pin;
        if pin != before {
            let lost = before.filter(|gpu| self.devices.contains_key(gpu));
            for (gpu, pinned) in [(lost, false), (pin, true)] {
                self.tasks.extend(gpu.map(|gpu| RequestEvent::ModelPinned { model, gpu, pinned }));
            }
        }
        if pin.is_some() {
            of.told_unmet = false;
            return true;
        }
        let asked = self.warming.iter().find(|(_, of)| **of == function).map(|(ticket, _)| *ticket);
        if !wanted {
            if let Some(request) = asked {
                self.warming.remove(&request);
                self.tasks.push_back(RequestEvent::Cancelled { request });
            }
            return true;
        }
        if of.not_before > self.now {
            self.retry = Some(self.retry.map_or(of.not_before, |at| at.min(of.not_before)));
        } else if asked.is_none() && !self.kinds.is_empty() {
            let (request, tenant) = (self.tickets.fresh(), of.spec.tenant);
            self.warming.insert(request, function);
            self.tasks.push_back(RequestEvent::Arrived { request, model, tenant, deadline: None });
        }
        false
    }

    /// The request that was to have a copy loaded is rejected.
    pub(super) fn not_warmed(&mut self, ticket: RequestId, reason: RejectReason) {
        let function = self.warming.remove(&ticket);
        if let Some(of) = function.and_then(|function| self.functions.get_mut(&function))
            && reason == RejectReason::AttemptsExhausted
        {
            of.not_before = self.now.saturating_add(START_AGAIN);
        }
    }
}
