//! Demands that come and go at a constant load: the state in which packers are compared.

use std::time::{Duration, Instant};

use crate::mixes::{Mix, SplitMix64};
use crate::peers::Pool;

const GPU_AREA: f64 = 1e8;
/// Releases of a round.
const BATCH: usize = 64;

/// A pool under churn: each round releases 64 at random, then takes arrivals until the load is back at its target.
#[derive(Debug)]
pub struct Churn<P: Pool> {
    pool: P,
    mix: Mix,
    divide: u16,
    live: Vec<(P::Handle, u32)>,
    area: u64,
    target: u64,
    rng: SplitMix64,
    /// Demands that found no room.
    rejected: u64,
}

impl<P: Pool> Churn<P> {
    /// Fills `pool` of `gpus` GPUs to `load` (0 to 1) of its area. Sizes are divided by `divide` before they reach the
    /// pool (100 for a peer that counts in per cents).
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive load")]
    pub fn new(pool: P, mix: Mix, gpus: usize, load: f64, divide: u16, seed: u64) -> Self {
        let target = (gpus as f64 * GPU_AREA * load) as u64;
        let rng = SplitMix64::new(seed);
        let mut churn = Self { pool, mix, divide, live: Vec::new(), area: 0, target, rng, rejected: 0 };
        churn.fill(&mut Times::default());
        churn
    }

    /// Rounds until as many placements were released as live in the pool, `turnovers` times over: how much of the
    /// first filling is left decides how ragged the pool is, so pools of all sizes need the same.
    pub fn turn_over(&mut self, turnovers: usize) {
        let mut untold = Times::default();
        for _ in 0..(turnovers * self.live.len()).div_ceil(BATCH) {
            self.round(&mut untold);
        }
    }

    /// One round.
    pub fn round(&mut self, times: &mut Times) {
        for _ in 0..BATCH.min(self.live.len()) {
            let index = self.rng.below(self.live.len());
            let (handle, area) = self.live.swap_remove(index);
            self.area -= u64::from(area);
            times.release(|| self.pool.release(handle));
        }
        self.fill(times);
    }

    fn fill(&mut self, times: &mut Times) {
        // A pool with no hole of enough size must not hang the bench: give up a round after as many failures.
        let until = self.rejected + 64;
        while self.area < self.target && self.rejected < until {
            let (w, h) = self.mix.draw(&mut self.rng);
            match times.place(|| self.pool.place(w / self.divide, h / self.divide)) {
                Some(handle) => {
                    let area = u32::from(w) * u32::from(h);
                    self.area += u64::from(area);
                    self.live.push((handle, area));
                }
                None => self.rejected += 1,
            }
        }
    }

    /// Bins in use over bins' worth of area in use.
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    pub fn used_ratio(&self) -> f64 {
        self.pool.used() as f64 / (self.area as f64 / GPU_AREA)
    }

    /// Placements in a bin in use, on average.
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    pub fn per_bin(&self) -> f64 {
        self.live.len() as f64 / self.pool.used().max(1) as f64
    }
}

/// Keeps the time of every call, less the cost of reading the clock twice.
#[derive(Debug)]
pub struct Times {
    /// Nanoseconds of each place.
    pub place_ns: Vec<u32>,
    /// Nanoseconds of each release.
    pub release_ns: Vec<u32>,
    clock_ns: u32,
}

impl Default for Times {
    fn default() -> Self {
        let mut reads: Vec<u32> = (0..1_001).map(|_| nanos(Instant::now().elapsed())).collect();
        reads.sort_unstable();
        Self { place_ns: Vec::new(), release_ns: Vec::new(), clock_ns: reads[500] }
    }
}

impl Times {
    /// Runs a place.
    pub fn place<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        self.place_ns.push(nanos(start.elapsed()).saturating_sub(self.clock_ns));
        result
    }

    /// Runs a release.
    pub fn release<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        self.release_ns.push(nanos(start.elapsed()).saturating_sub(self.clock_ns));
        result
    }
}

fn nanos(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX)
}

/// The value that `part` (0 to 1) of `values` lie below. Sorts them.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index in range"
)]
pub fn percentile(values: &mut [u32], part: f64) -> u32 {
    if values.is_empty() {
        return 0;
    }
    values.sort_unstable();
    values[((values.len() - 1) as f64 * part) as usize]
}
