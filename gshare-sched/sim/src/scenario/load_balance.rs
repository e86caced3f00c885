//! Load balancing on whole devices, as a baseline.

use gshare_core::{FunctionId, GpuId};
use gshare_sched::platform::{Choice, WholeDevices, WholePolicy};

/// The head of the queue goes to any idle device, wherever its model is; the least recently used model makes room for it
/// (GPU-enabled FaaS, section V-A).
#[derive(Debug, Clone, Copy)]
pub struct LoadBalance;

impl WholePolicy for LoadBalance {
    fn seeks_copies(&self) -> bool {
        false
    }

    fn choose(&mut self, devices: &WholeDevices, function: FunctionId, gpu: GpuId) -> Choice {
        let room = devices.room(function, gpu, &|copy| (copy.last_use(), 0));
        room.map_or(Choice::Wait, Choice::Load)
    }
}
