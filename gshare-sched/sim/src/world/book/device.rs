//! The book's part for devices: the shares that instances hold of each.

use crate::world::outcome::WHOLE_AREA;
use gshare_core::{InstanceId, ModelId};
use gshare_sched::mig::SliceAt;
use gshare_sched::platform::{DeviceSpec, Part, Regime, Weights};
use std::collections::BTreeMap;

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) spec: DeviceSpec,
    pub(super) regime: Regime,
    /// The guaranteed area of all parts on the device, of 10^8.
    pub(super) area: u64,
    pub(super) memory: u64,
    /// The models with weights on the device, their memory, and the instances that share them.
    pub(super) weights: BTreeMap<ModelId, (u64, usize)>,
    /// The requests at work on the device as a whole.
    pub(super) running: usize,
    pub(super) slices: Vec<Slice>,
}

#[derive(Debug)]
pub(super) struct Slice {
    pub(super) at: SliceAt,
    pub(super) name: String,
    pub(super) memory: u64,
    /// Its compute slices as a part of the GPU's compute slices, in 10^8.
    pub(super) area: u64,
    /// The instances with a part on the slice, and the memory of each.
    pub(super) tenants: Vec<(InstanceId, u64)>,
    pub(super) running: usize,
}

impl Device {
    pub(super) fn is_fractional(&self) -> bool {
        self.regime == Regime::Fractional
    }

    pub(super) fn new(spec: DeviceSpec) -> Self {
        let regime = spec.effective_regime();
        let slice = |layout: &gshare_sched::platform::MigLayout, at: SliceAt| {
            let profile = layout.model().get(at.profile);
            let whole = u64::from(layout.model().family.compute_slices());
            Slice {
                at,
                name: profile.map_or_else(String::new, |profile| profile.name.to_string()),
                memory: profile.map_or(0, |profile| profile.memory.get()),
                area: profile.map_or(0, |profile| u64::from(profile.compute_slices) * 100_000_000 / whole),
                tenants: Vec::new(),
                running: 0,
            }
        };
        let slices = spec
            .mig
            .as_ref()
            .map_or_else(Vec::new, |layout| layout.slices().iter().map(|&at| slice(layout, at)).collect());
        Self { spec, regime, area: 0, memory: 0, weights: BTreeMap::new(), running: 0, slices }
    }

    pub(super) fn take(
        &mut self,
        id: InstanceId,
        part: &Part,
        (needs, weights): (u64, Option<Weights>),
    ) -> Result<(), String> {
        let gpu = part.gpu;
        if self.regime == Regime::Sliced {
            let Some(slice) = part.slice.and_then(|at| self.slices.iter_mut().find(|slice| slice.at == at))
            else {
                return Err(format!("{id} has a part on a slice that {gpu} does not have: {:?}", part.slice));
            };
            slice.tenants.push((id, part.share.memory().map_or(0, |memory| memory.get())));
            let sum: u64 = slice.tenants.iter().map(|(_, memory)| memory).sum();
            if sum > slice.memory {
                let (name, most) = (&slice.name, slice.memory);
                return Err(format!("with {id} the parts on a {name} of {gpu} have {sum} bytes of {most}"));
            }
            // An instance without a limit may take all of the slice.
            if slice.tenants.len() > 1 && slice.tenants.iter().any(|(_, memory)| *memory == 0) {
                return Err(format!("{id} shares a {} of {gpu} with one that owns it", slice.name));
            }
            return Ok(());
        }
        self.memory += memory_of(part, needs);
        if let Some(Weights { model, bytes }) = weights.filter(|_| self.regime == Regime::Fractional) {
            let (bytes, users) = self.weights.entry(model).or_insert((bytes.get(), 0));
            self.memory += if *users == 0 { *bytes } else { 0 };
            *users += 1;
        }
        if self.memory > self.spec.memory.get() {
            let most = self.spec.memory.get();
            return Err(format!("with {id} the instances on {gpu} have {} bytes of {most}", self.memory));
        }
        if self.regime == Regime::Fractional {
            self.area += area_of(part);
            if self.area > 100_000_000 {
                let percent = self.area / 1_000_000;
                return Err(format!("with {id} {percent} % of {gpu} are guaranteed"));
            }
        }
        Ok(())
    }

    pub(super) fn give_back(
        &mut self,
        id: InstanceId,
        part: &Part,
        (needs, weights): (u64, Option<Weights>),
    ) {
        if self.regime == Regime::Sliced {
            if let Some(slice) = part.slice.and_then(|at| self.slices.iter_mut().find(|slice| slice.at == at))
            {
                slice.tenants.retain(|(tenant, _)| *tenant != id);
            }
            return;
        }
        self.memory = self.memory.saturating_sub(memory_of(part, needs));
        if let Some(weights) = weights
            && let Some((bytes, users)) = self.weights.get_mut(&weights.model)
        {
            *users -= 1;
            if *users == 0 {
                self.memory = self.memory.saturating_sub(*bytes);
                self.weights.remove(&weights.model);
            }
        }
        if self.regime == Regime::Fractional {
            self.area = self.area.saturating_sub(area_of(part));
        }
    }

    /// The memory of all shared weights.
    #[cfg(test)]
    pub(crate) fn weights_memory(&self) -> u64 {
        self.weights.values().map(|(bytes, _)| bytes).sum()
    }

    /// The held part of the whole device, of 10^8.
    pub(super) fn held(&self, part: &Part, needs: u64) -> u64 {
        match self.regime {
            Regime::Fractional => area_of(part),
            Regime::Sliced => {
                self.slices.iter().find(|slice| Some(slice.at) == part.slice).map_or(0, |slice| slice.area)
            }
            Regime::Whole => {
                let all = u128::from(self.spec.memory.get().max(1));
                let held = u128::from(memory_of(part, needs)) * WHOLE_AREA / all;
                u64::try_from(held).unwrap_or(100_000_000)
            }
        }
    }
}

fn memory_of(part: &Part, needs: u64) -> u64 {
    part.share.memory().map_or(needs, |memory| memory.get())
}

/// The guaranteed time x SMs, of 10^8.
fn area_of(part: &Part) -> u64 {
    u64::from(part.share.time().request().get()) * u64::from(part.share.sm().get())
}
