//! The kept copy of a model: a request without a caller has it loaded, and the pool pins it where it is.

use super::super::START_AGAIN;
use super::carry::rejection;
use super::{Device, Life, PoolAction, Rejection, RequestEvent, WholePool};
use crate::request::RejectReason;
use gshare_core::{FunctionId, GpuId, RequestId};
use std::collections::BTreeMap;

/// Refuses a minimum beyond the pool's ability.
pub(super) fn check(min_instances: u32) -> Result<(), String> {
    match min_instances {
        0 | 1 => Ok(()),
        more => Err(format!("min_instances is {more}: need at most 1 on whole devices")),
    }
}

impl WholePool {
    /// Schedules a check of minimums after the event: the function has another minimum, or its copies have moved.
    pub(super) fn look_at(&mut self, function: FunctionId) {
        let of = self.functions.get(&function);
        if of.is_some_and(|of| of.spec.min_instances > 0 || of.pin.is_some()) {
            self.lacking.insert(function);
        }
        self.look = true;
    }

    /// Pins and requests the kept copies, and reports copies that no device can hold now.
    pub(super) fn keep_minimums(&mut self, actions: &mut Vec<PoolAction>) {
        if !self.look {
            return;
        }
        // A load ordered for a minimum is pinned in the next round.
        while core::mem::take(&mut self.look) {
            for function in self.lacking.clone() {
                if self.keep_minimum(function) {
                    self.lacking.remove(&function);
                }
                self.run(actions);
            }
        }
        for function in self.lacking.clone() {
            if !self.fits_beside_pins(function) {
                self.unmet(function, actions);
            }
        }
    }

    /// Whether a device has memory for a copy beside the kept copies. All other copies there make room when idle.
    fn fits_beside_pins(&self, function: FunctionId) -> bool {
        let mut pinned: BTreeMap<GpuId, u64> = BTreeMap::new();
        for of in self.functions.values() {
            if let Some(gpu) = of.pin {
                *pinned.entry(gpu).or_default() += of.spec.memory.get();
            }
        }
        let needs = self.functions.get(&function).map_or(0, |of| of.spec.memory.get());
        let fits = |(gpu, device): (&GpuId, &Device)| {
            let kept = pinned.get(gpu).copied().unwrap_or(0);
            device.memory.get().saturating_sub(kept) >= needs
        };
        self.devices.iter().any(fits)
    }

    /// Reports once that no device can hold the copy.
    pub(super) fn unmet(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        if let Some(of) = self.functions.get_mut(&function)
            && !core::mem::replace(&mut of.told_unmet, true)
        {
            actions.push(PoolAction::Unmet { function });
        }
    }

    /// Returns false while there is no copy.
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

    /// The request for the load of a copy was rejected. Another one follows later, or only after a change if no device can hold
    /// the model.
    pub(super) fn not_warmed(
        &mut self,
        ticket: RequestId,
        reason: RejectReason,
        actions: &mut Vec<PoolAction>,
    ) {
        let Some(function) = self.warming.remove(&ticket) else { return };
        match rejection(reason) {
            Rejection::NeverFits => self.unmet(function, actions),
            Rejection::Cancelled => {}
            _ => {
                if let Some(of) = self.functions.get_mut(&function) {
                    of.not_before = self.now.saturating_add(START_AGAIN);
                }
                self.look_at(function);
            }
        }
    }
}
