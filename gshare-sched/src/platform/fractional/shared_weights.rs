//! Weights that all instances of a model on a device share there, booked once per device.
//!
//! An instance goes where its model's weights are, if there is room; elsewhere it needs room for them too. The packer has its
//! placements without the weights, and sets those aside on the device until the last of them is gone.

use super::{Demand, GpuId, Packer, PlacementId};
use crate::pack::{PackError, Placed};
use crate::platform::Weights;
use gshare_core::{Bytes, ModelId};
use std::collections::BTreeMap;

/// The shared weights of all devices.
#[derive(Debug, Default)]
pub(super) struct SharedWeights {
    /// The memory of each model's weights, and the devices that have them with the number of placements that use them there.
    models: BTreeMap<ModelId, (Bytes, BTreeMap<GpuId, u32>)>,
    /// The model of each placement that shares weights.
    of: BTreeMap<PlacementId, ModelId>,
}

impl SharedWeights {
    /// Places an instance of a model, and books the weights where they are not.
    ///
    /// # Errors
    /// The packer's; then nothing is booked.
    pub(super) fn place(
        &mut self,
        packer: &mut dyn Packer,
        demand: &Demand,
        weights: Weights,
        allowed: &dyn Fn(GpuId) -> bool,
    ) -> Result<Placed, PackError> {
        let none = PackError::Memory { memory: demand.memory };
        let on = self.models.get(&weights.model).map(|(_, on)| on);
        let there = |gpu| on.is_some_and(|on| on.contains_key(&gpu));
        let beside = on.map_or(Err(none), |_| packer.place_where(demand, &|gpu| there(gpu) && allowed(gpu)));
        let placed = beside.or_else(|_| {
            let both = demand.with_memory(demand.memory.saturating_add(weights.bytes));
            let found = packer.place_where(&both, &|gpu| !there(gpu) && allowed(gpu))?.placement;
            packer.release(found.id)?;
            packer.place_where(demand, &|gpu| gpu == found.gpu)
        })?;
        let (id, gpu) = (placed.placement.id, placed.placement.gpu);
        let (_, on) = self.models.entry(weights.model).or_insert((weights.bytes, BTreeMap::new()));
        let users = on.entry(gpu).or_default();
        *users += 1;
        self.of.insert(id, weights.model);
        if *users == 1 {
            packer.set_aside(gpu, self.bytes(gpu)).inspect_err(|_| {
                let _ = packer.release(id);
                self.leave(packer, id, gpu);
            })?;
        }
        Ok(placed)
    }

    /// A placement has left the device. The last one of its model frees the weights.
    pub(super) fn leave(&mut self, packer: &mut dyn Packer, placement: PlacementId, gpu: GpuId) {
        let Some(model) = self.of.remove(&placement) else { return };
        let Some((_, on)) = self.models.get_mut(&model) else { return };
        let Some(users) = on.get_mut(&gpu) else { return };
        *users -= 1;
        if *users == 0 {
            on.remove(&gpu);
            if on.is_empty() {
                self.models.remove(&model);
            }
            // Less than before.
            let _ = packer.set_aside(gpu, self.bytes(gpu));
        }
    }

    fn bytes(&self, gpu: GpuId) -> Bytes {
        self.models.values().filter(|(_, on)| on.contains_key(&gpu)).map(|(bytes, _)| *bytes).sum()
    }

    /// The models with weights on a device, each with the number of placements that use them.
    pub(super) fn on(&self, gpu: GpuId) -> BTreeMap<ModelId, u32> {
        self.models.iter().filter_map(|(model, (_, on))| Some((*model, *on.get(&gpu)?))).collect()
    }

    pub(super) fn invariants(&self, packer: &dyn Packer) {
        let mut users: BTreeMap<(GpuId, ModelId), u32> = BTreeMap::new();
        packer.gpus(&mut |status| {
            let mut held = Bytes::ZERO;
            packer.placements_on(status.gpu, &mut |placement| {
                held = held + placement.demand.memory;
                if let Some(&model) = self.of.get(&placement.id) {
                    *users.entry((status.gpu, model)).or_default() += 1;
                }
            });
            assert_eq!(status.memory_used, held + self.bytes(status.gpu), "{} has other weights", status.gpu);
        });
        let each = |(model, (_, on)): (&ModelId, &(Bytes, BTreeMap<GpuId, u32>))| {
            let model = *model;
            on.clone().into_iter().map(move |(gpu, users)| ((gpu, model), users))
        };
        let booked: BTreeMap<(GpuId, ModelId), u32> = self.models.iter().flat_map(each).collect();
        assert_eq!(users, booked, "weights without placements");
    }
}
