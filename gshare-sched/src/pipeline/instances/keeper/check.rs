//! Whether an event can be: what a keeper refuses.

use super::{Instance, Keeper, State};
use crate::pipeline::{InstanceError, InstanceEvent};
use gshare_core::{FunctionId, InstanceId, TimeWentBack, Timestamp};

impl Keeper {
    pub(super) fn check(&self, now: Timestamp, event: &InstanceEvent) -> Result<(), InstanceError> {
        TimeWentBack::check(now, self.last)?;
        let known = |function: FunctionId| match self.functions.get(&function) {
            Some(of) if !of.removed => Ok(()),
            _ => Err(InstanceError::UnknownFunction { function }),
        };
        let is = |instance: InstanceId, event, fits: &dyn Fn(&Instance) -> bool| {
            let found = self.instances.get(&instance).ok_or(InstanceError::UnknownInstance { instance })?;
            let state = found.state.name();
            if fits(found) { Ok(()) } else { Err(InstanceError::WrongState { instance, state, event }) }
        };
        match event {
            InstanceEvent::FunctionAdded { function, .. } if self.functions.contains_key(function) => {
                Err(InstanceError::DuplicateFunction { function: *function })
            }
            InstanceEvent::Requested { function }
            | InstanceEvent::Short { function, .. }
            | InstanceEvent::MinimumSet { function, .. }
            | InstanceEvent::FunctionRemoved { function } => known(*function),
            InstanceEvent::GpuJoined { gpu, slices } => {
                self.slices.check_join(*gpu, slices).map_err(|source| InstanceError::BadGpu { source })
            }
            InstanceEvent::GpuLost { gpu } if !self.slices.gpus.contains(gpu) => {
                Err(InstanceError::UnknownGpu { gpu: *gpu })
            }
            InstanceEvent::Needed { instance } => is(*instance, "needed", &|one| {
                let resident = self.is_resident(*instance);
                let draining = one.state == State::Draining;
                let loading = one.places.first().is_some_and(|&place| {
                    let on = &self.slices.all[place].instances;
                    on.iter().any(|other| self.instances[other].state == State::Loading)
                });
                one.is_shared() && (one.state == State::Up || draining) && !resident && !loading
            }),
            InstanceEvent::Served { instance, .. } => {
                is(*instance, "served", &|one| one.is_serving() || one.state == State::Draining)
            }
            InstanceEvent::Started { instance } => {
                is(*instance, "started", &|one| one.state == State::Starting)
            }
            InstanceEvent::Loaded { instance } => is(*instance, "loaded", &|one| {
                one.state == State::Loading || (one.is_shared() && one.state == State::Draining)
            }),
            InstanceEvent::Drained { instance } => {
                is(*instance, "drained", &|one| one.state == State::Draining)
            }
            InstanceEvent::Gone { instance } => is(*instance, "gone", &|_| true),
            _ => Ok(()),
        }
    }
}
