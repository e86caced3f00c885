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
    /// The pool.
    pub pool: P,
    mix: Mix,
    divide: u16,
    live: Vec<(P::Handle, u32)>,
    /// Work space: the releases of a round, and the demands that it takes.
    leaving: Vec<P::Handle>,
    arriving: Vec<(u16, u16)>,
    area: u64,
    target: u64,
    rng: SplitMix64,
    /// Demands that found no room.
    pub rejected: u64,
    /// Demands placed.
    pub placed: u64,
}

impl<P: Pool> Churn<P> {
    /// Fills `pool` of `gpus` GPUs to `load` (0 to 1) of its area. Sizes are divided by `divide` before they reach the
    /// pool (100 for a peer that counts in per cents).
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive load")]
    pub fn new(pool: P, mix: Mix, gpus: usize, load: f64, divide: u16, seed: u64) -> Self {
        let target = (gpus as f64 * GPU_AREA * load) as u64;
        let rng = SplitMix64::new(seed);
        let mut churn = Self {
            pool,
            mix,
            divide,
            live: Vec::new(),
            leaving: Vec::new(),
            arriving: Vec::new(),
            area: 0,
            target,
            rng,
            rejected: 0,
            placed: 0,
        };
        churn.fill(&mut Nothing);
        churn
    }

    /// Rounds until as many placements were released as live in the pool, `turnovers` times over: how much of the
    /// first filling is left decides how ragged the pool is, so pools of all sizes need the same.
    pub fn turn_over(&mut self, turnovers: usize) {
        for _ in 0..(turnovers * self.live.len()).div_ceil(BATCH) {
            self.round(&mut Nothing);
        }
    }

    /// One round.
    pub fn round(&mut self, timing: &mut impl Record) {
        self.leaving.clear();
        for _ in 0..BATCH.min(self.live.len()) {
            let index = self.rng.below(self.live.len());
            let (handle, area) = self.live.swap_remove(index);
            self.area -= u64::from(area);
            self.leaving.push(handle);
        }
        let Self { pool, leaving, .. } = self;
        timing.releases(leaving.len(), |timing| {
            for handle in leaving {
                timing.release(|| pool.release(*handle));
            }
        });
        self.fill(timing);
    }

    fn fill(&mut self, timing: &mut impl Record) {
        // A pool with no hole of enough size must not hang the bench: give up a round after as many failures.
        let until = self.rejected + 64;
        while self.area < self.target && self.rejected < until {
            self.arriving.clear();
            let mut area = self.area;
            while area < self.target {
                let (w, h) = self.mix.draw(&mut self.rng);
                area += u64::from(w) * u64::from(h);
                self.arriving.push((w, h));
            }
            let Self { pool, arriving, live, divide, .. } = self;
            timing.places(arriving.len(), |timing| {
                for (w, h) in arriving {
                    match timing.place(|| pool.place(*w / *divide, *h / *divide)) {
                        Some(handle) => {
                            let area = u32::from(*w) * u32::from(*h);
                            self.area += u64::from(area);
                            live.push((handle, area));
                            self.placed += 1;
                        }
                        None => self.rejected += 1,
                    }
                }
            });
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

/// A recorder's code around calls: each of them, and all that come in a row.
pub trait Record {
    /// Runs a place.
    fn place<T>(&mut self, call: impl FnOnce() -> T) -> T {
        call()
    }
    /// Runs a release.
    fn release<T>(&mut self, call: impl FnOnce() -> T) -> T {
        call()
    }
    /// Runs that many places in a row.
    fn places(&mut self, _count: usize, calls: impl FnOnce(&mut Self)) {
        calls(self);
    }
    /// Runs that many releases in a row.
    fn releases(&mut self, _count: usize, calls: impl FnOnce(&mut Self)) {
        calls(self);
    }
}

/// Takes no times.
#[derive(Debug)]
pub struct Nothing;

impl Record for Nothing {}

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
    /// The cost of reading the clock, which is taken off each time.
    pub const fn clock_ns(&self) -> u32 {
        self.clock_ns
    }
}

impl Record for Times {
    fn place<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        self.place_ns.push(nanos(start.elapsed()).saturating_sub(self.clock_ns));
        result
    }
    fn release<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        self.release_ns.push(nanos(start.elapsed()).saturating_sub(self.clock_ns));
        result
    }
}

/// Sums of times. The clock is read around calls in a row, not around each call. A reading costs a sixth of a place, and with a
/// clock that ticks every 10 ns, its cost cannot be taken off to better than a tenth.
#[derive(Debug, Default)]
pub struct Sums {
    /// Time in places.
    pub place: Duration,
    /// Number of places.
    pub places: u64,
    /// Time in releases.
    pub release: Duration,
    /// Number of releases.
    pub releases: u64,
}

impl Record for Sums {
    fn places(&mut self, count: usize, calls: impl FnOnce(&mut Self)) {
        let start = Instant::now();
        calls(self);
        self.place += start.elapsed();
        self.places += count as u64;
    }
    fn releases(&mut self, count: usize, calls: impl FnOnce(&mut Self)) {
        let start = Instant::now();
        calls(self);
        self.release += start.elapsed();
        self.releases += count as u64;
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
