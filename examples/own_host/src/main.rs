//! `gshare up` with a packer and a scaler of its own. Everything else is ours: profiles, processes, daemon, proxy.
//!
//! `cargo run --manifest-path examples/own_host/Cargo.toml -- --demo=end`

use gshare_core::profile::RequestRate;
use gshare_core::{Bytes, ConfigError, GpuId, PlacementId};
use gshare_openfaas::Builder;
use gshare_sched::pack::{
    Demand, GpuSpec, GpuStatus, MaxRects, MaxRectsConfig, PackError, Packer, Placed, Placement,
};
use gshare_sched::platform::OwnPolicies;
use gshare_sched::scale::{HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler, Told};

/// First fit: the device with the lowest number that has room. `MaxRects` keeps the books of each device.
struct FirstFit(MaxRects);

impl Packer for FirstFit {
    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        let mut gpus = Vec::new();
        self.gpus(&mut |status| gpus.push(status.gpu));
        let place = |gpu| self.0.place_where(demand, &|other| other == gpu && allowed(gpu)).ok();
        let Some(placed) = gpus.into_iter().find_map(place) else {
            return self.0.place_where(demand, allowed);
        };
        println!("first fit: {} on {}", placed.placement.id, placed.placement.gpu);
        Ok(placed)
    }

    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError> {
        self.0.add_gpu(gpu, spec)
    }

    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        self.0.remove_gpu(gpu)
    }

    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        self.0.release(id)
    }

    fn set_aside(&mut self, gpu: GpuId, memory: Bytes) -> Result<(), PackError> {
        self.0.set_aside(gpu, memory)
    }

    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        self.0.placements(visit);
    }

    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        self.0.gpus(visit);
    }
}

fn first_fit() -> Box<dyn Packer> {
    Box::new(FirstFit(MaxRects::new(MaxRectsConfig::default().with_rearrange_gpus(0))))
}

/// A fifth of headroom: each load counts as a fifth more than it is.
fn with_headroom() -> Result<Box<dyn HorizontalScaler>, ConfigError> {
    let ours = HeuristicHorizontal::new(HeuristicHorizontalConfig::default())?;
    Ok(Box::new(Told::new(Box::new(ours), |function, load| {
        let load = RequestRate::from_milli(load.as_milli() * 6 / 5);
        println!("headroom: {function} is planned for {load}");
        load
    })))
}

fn main() -> anyhow::Result<()> {
    let (packer, scaler) = (Some(first_fit()), Some(with_headroom()?));
    Builder::from_args().policies(OwnPolicies { packer, scaler, ..OwnPolicies::default() }).serve()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_sim::conformance::{Shares, horizontal_scaler, packer};

    #[test]
    fn both_keep_their_contracts() {
        packer(&first_fit, Shares::Rectangles, 0..20).unwrap();
        horizontal_scaler(&|| with_headroom().unwrap(), 0..5).unwrap();
    }
}
