//! First fit, a packer which has its own rule and leaves everything else to ours.

use gshare_core::{Bytes, GpuId, PlacementId};
use gshare_sched::pack::{
    Demand, GpuSpec, GpuStatus, MaxRects, MaxRectsConfig, PackError, Packer, Placed, Placement,
};

/// The device with the lowest number that has room. `MaxRects` keeps the books of each device, and moves nothing by itself.
pub(crate) struct FirstFit {
    ours: MaxRects,
    told: fn(&Placement),
}

impl FirstFit {
    /// First fit, by which each placement is `told`.
    pub(crate) fn new(told: fn(&Placement)) -> Self {
        Self { ours: MaxRects::new(MaxRectsConfig::default().with_rearrange_gpus(0)), told }
    }
}

impl Packer for FirstFit {
    /// The rule: every device is asked by itself, in the order of their numbers.
    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        let mut gpus = Vec::new();
        self.gpus(&mut |status| gpus.push(status.gpu));
        let place = |gpu| self.ours.place_where(demand, &|other| other == gpu && allowed(gpu)).ok();
        let Some(placed) = gpus.into_iter().find_map(place) else {
            return self.ours.place_where(demand, allowed);
        };
        (self.told)(&placed.placement);
        Ok(placed)
    }

    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError> {
        self.ours.add_gpu(gpu, spec)
    }

    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        self.ours.remove_gpu(gpu)
    }

    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        self.ours.release(id)
    }

    fn set_aside(&mut self, gpu: GpuId, memory: Bytes) -> Result<(), PackError> {
        self.ours.set_aside(gpu, memory)
    }

    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        self.ours.placements(visit);
    }

    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        self.ours.gpus(visit);
    }
}
