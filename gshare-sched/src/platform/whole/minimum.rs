//! The kept copy of a model: a request without a caller has it loaded, and the pool pins it where it is.

use super::carry::rejection;
use super::{Cluster, Device, Rejection, RequestEvent, WholePool};
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
    /// Whether a device has memory for a copy beside the kept copies. All other copies there make room when idle.
    fn fits_beside_pins(&self, function: FunctionId) -> bool {
        let mut pinned: BTreeMap<GpuId, u64> = BTreeMap::new();
        for of in self.functions.values() {
            if let Some(gpu) = of.pin {
                *pinned.entry(gpu).or_default() += of.memory.get();
            }
        }
        let needs = self.functions.get(&function).map_or(0, |of| of.memory.get());
        let fits = |(gpu, device): (&GpuId, &Device)| {
            let kept = pinned.get(gpu).copied().unwrap_or(0);
            device.memory.get().saturating_sub(kept) >= needs
        };
        self.devices.iter().any(fits)
    }

    /// Pins the first copy of a function with a minimum, and no copy of another.
    pub(super) fn pin(&mut self, function: FunctionId, cluster: &Cluster) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let (model, before) = (of.model, of.pin);
        let least = cluster.functions.get(&function).map_or(0, |of| of.spec.min_instances);
        let wanted = least > 0 && !cluster.is_removed(function);
        let here = |gpu: &GpuId| wanted && self.resident.contains_key(&(*gpu, model));
        let first = of.instances.iter().map(|id| self.instances[id].gpu).find(here);
        of.pin = before.filter(here).or(first);
        let pin = of.pin;
        if pin != before {
            let lost = before.filter(|gpu| self.devices.contains_key(gpu));
            for (gpu, pinned) in [(lost, false), (pin, true)] {
                self.tasks.extend(gpu.map(|gpu| RequestEvent::ModelPinned { model, gpu, pinned }));
            }
        }
    }

    /// Has a missing copy loaded, or counts the function as unmet where no device can hold the copy.
    pub(super) fn warm(&mut self, function: FunctionId, may_start: bool, cluster: &mut Cluster) {
        let Some(of) = self.functions.get(&function) else { return };
        if cluster.missing(function) == 0 {
            if cluster.functions.get(&function).is_none_or(|of| of.spec.min_instances == 0) {
                self.cool(function);
            }
            return;
        }
        if !may_start {
            return;
        }
        if self.warming.values().all(|warmed| *warmed != function) && !self.kinds.is_empty() {
            let (model, request) = (of.model, RequestId::new(self.next_warming));
            self.next_warming += 1;
            self.warming.insert(request, function);
            let tenant = cluster.functions[&function].spec.tenant;
            self.tasks.push_back(RequestEvent::Arrived { request, model, tenant, deadline: None });
            self.run(cluster);
        }
        let loads = self.functions.get(&function).is_some_and(|of| of.pin.is_some());
        if !loads && !self.fits_beside_pins(function) {
            cluster.unmet(function);
        }
    }

    /// Ends the request for the load of a copy that is not missing any more.
    pub(super) fn cool(&mut self, function: FunctionId) {
        if let Some((&request, _)) = self.warming.iter().find(|(_, of)| **of == function) {
            self.warming.remove(&request);
            self.tasks.push_back(RequestEvent::Cancelled { request });
        }
    }

    /// The request for the load of a copy was rejected. Another one follows later, or only after a change if no device can hold
    /// the model.
    pub(super) fn not_warmed(&mut self, request: RequestId, reason: RejectReason, cluster: &mut Cluster) {
        let Some(function) = self.warming.remove(&request) else { return };
        match rejection(reason) {
            Rejection::NeverFits => cluster.unmet(function),
            Rejection::Cancelled => {}
            _ => cluster.start_failed(function),
        }
    }
}
