//! Demands that come and go on a pool of GPUs, placed by any packer.
//!
//! # Problem
//! A packer's worth is its saving: the GPUs in use for the same load. [`churn`] gives every packer the same demands in the same
//! order, from one seed, so that packers can be compared.
//!
//! # How it works
//! The pool is filled until the requested SM shares reach `load` of it. Then each round releases one placement in sixteen, drawn at
//! random, and takes demands until the load is back. A demand requests 10 to 50 % of the SMs, a limit of up to twice its request,
//! and 1 to 8 GiB. Its time is whole, so that packers of rectangles and of sums see the same demand.

use crate::rng::Rng;
use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, PackError, Packer};

/// The load and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Churn {
    /// The number of GPUs in the pool, of 40 GiB each.
    pub gpus: u32,
    /// The requested SM shares, in per cent of the pool; at most 100.
    pub load_percent: u32,
    /// The number of measured rounds.
    pub rounds: u32,
    /// The seed of the demands and of their ends.
    pub seed: u64,
}

impl Default for Churn {
    /// 50 GPUs, half full, 200 rounds.
    fn default() -> Self {
        Self { gpus: 50, load_percent: 50, rounds: 200, seed: 1 }
    }
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Packed {
    /// The GPUs in use, summed over the rounds.
    pub gpus_used: u64,
    /// The basis points of SMs requested by the placements, summed over the rounds.
    pub sm_used: u64,
    /// The number of placed demands.
    pub placed: u64,
    /// The number of demands without room.
    pub refused: u64,
}

impl Packed {
    /// The GPUs in use for each GPU's worth of requested SMs; 1 is perfect.
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    pub fn gpus_per_gpu_asked(&self) -> f64 {
        self.gpus_used as f64 * 1e4 / self.sm_used.max(1) as f64
    }
}

/// Runs the load on an empty packer.
///
/// # Errors
/// Any error of the packer apart from a lack of room.
pub fn churn(mut packer: Box<dyn Packer>, load: &Churn) -> Result<Packed, PackError> {
    let (mut rng, mut packed) = (Rng::new(load.seed), Packed::default());
    for gpu in 0..load.gpus {
        packer.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(40)))?;
    }
    let target = u64::from(load.gpus) * 100 * u64::from(load.load_percent.min(100));
    let mut live: Vec<(PlacementId, u64)> = Vec::new();
    for _ in 0..load.rounds {
        for _ in 0..live.len().div_ceil(16) {
            let index = usize::try_from(rng.below(live.len() as u64)).unwrap_or(0);
            packer.release(live.swap_remove(index).0)?;
        }
        // A demand without room counts as requested, so that a full packer does not get demands for ever.
        let mut sum: u64 = live.iter().map(|(_, sm)| sm).sum();
        while sum < target {
            let demand = random_demand(&mut rng);
            sum += u64::from(demand.sm.get());
            match packer.place(&demand) {
                Ok(placed) => {
                    live.push((placed.placement.id, demand.sm.get().into()));
                    packed.placed += 1;
                }
                Err(PackError::NoRoom { .. } | PackError::Memory { .. }) => {
                    packed.refused += 1;
                }
                Err(error) => return Err(error),
            }
        }
        packer.gpus(&mut |status| packed.gpus_used += u64::from(status.placements > 0));
        packed.sm_used += live.iter().map(|(_, sm)| sm).sum::<u64>();
    }
    Ok(packed)
}

fn random_demand(rng: &mut Rng) -> Demand {
    let percent = rng.between(10, 50);
    let limit = percent + rng.below(percent + 1);
    let share =
        |percent: u64| u16::try_from(percent).ok().and_then(SmShare::from_percent).unwrap_or(SmShare::WHOLE);
    Demand::new(Quota::WHOLE, share(percent))
        .with_sm_limit(share(limit))
        .with_memory(Bytes::from_gib(rng.between(1, 8)))
}
