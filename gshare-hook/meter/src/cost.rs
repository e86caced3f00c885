//! The cost of a launch before it runs: GPU time predicted per function handle and size.
//!
//! # Problem
//! Credit is spent when a kernel is launched, but the kernel's duration is known only after it has run. Block counts do not help,
//! since a block may take a microsecond or a second. Durations are therefore measured sparsely and remembered per function.
//!
//! # Terms
//! - **key**: function handle (kernel, executable graph, copy function) and **shape**, the size of the launch in steps of a quarter
//!   octave: 1,050 and 1,250 threads are the same shape, 1,050 and 1,300 are not.
//! - **sample**: one measured duration of one launch, in ns.
//!
//! # Algorithm
//! The table has a fixed size and open addressing. A row is claimed by a compare-and-swap on its key, so readers take no lock. When
//! all rows near a key's place are taken, the key replaces the least recently claimed or measured of them: programs with
//! just-in-time compilation leave unused rows behind.
//!
//! A row's cost is an exponential average that moves half-way down and a quarter up, so an interval with other work in it is
//! forgotten fast. The first sample is taken as it is.
//!
//! The first sample of a turn may hold the end of another process's turn, as may each sample after a pause if no lease keeps the
//! device. Such a sample is only an upper bound. A known cost rises only when [`SUSPECTS`] of these samples in a row lie above it,
//! and then to the smallest of them ([`Suspicion`]). A part of it is subtracted ([`surely`]), because turns are handed over a
//! little before the device has finished them.
//!
//! Worked example: samples 1,000, 1,000, 9,000 (disturbed), 1,000 ns give 1,000, 1,000, 3,000, 2,000, then 1,500.
//!
//! # Cost
//! One multiplication and, nearly always, one cache line read per launch. 320 KiB of zeroed pages, touched as used.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A server of language models has hundreds of kernels and graphs in dozens of sizes each.
const ROWS: usize = 16_384;
/// How far a key may lie from its place.
const REACH: usize = 8;

/// Flags a doubted row in its count of launches: see [`CostTable::doubt`]. Launches measured because of the doubt are added.
const DOUBTED: u32 = 1 << 31;
/// The most launches measured for one doubt; the first may hold the end of another process's turn.
pub const MEASURED_FOR_A_DOUBT: u32 = 4;

/// Number of a row, as [`CostTable::find`] gives it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row(u32);

impl Row {
    pub(crate) const NONE: Self = Self(0);

    /// In how many bits two rows differ is of no interest, only whether: one operation for a launch to add up.
    #[inline(always)]
    pub fn difference(self, other: Self) -> u32 {
        self.0 ^ other.0
    }
}

#[derive(Debug)]
struct Slot {
    key: AtomicU64,
    /// ns + 1; 0 while nothing was measured.
    cost: AtomicU32,
    /// Launches under measurement, or made before a cost was known.
    probes: AtomicU32,
}

/// The learned costs of one device.
#[derive(Debug)]
pub struct CostTable {
    slots: Box<[Slot; ROWS]>,
    /// Per row, how many measurements there had been when it was last claimed or measured; 0 when it is of no use any more.
    used: Box<[AtomicU32]>,
    measurements: AtomicU32,
    /// Average of all first samples, in ns: the assumed cost of an unknown function.
    typical: AtomicU64,
}

/// The size of a launch in quarter octaves: the exponent and the upper two bits of the fraction of a floating-point number. These
/// bits lie above all bits of a handle.
#[inline(always)]
#[allow(clippy::cast_possible_wrap, clippy::cast_precision_loss)] // sizes from 2^53 on may round up to the next shape
pub fn shape(size: u64) -> u64 {
    (size as i64 as f64).to_bits() >> 50 << 50
}

impl Default for CostTable {
    fn default() -> Self {
        Self::new()
    }
}

impl CostTable {
    /// The cost assumed of an unknown function before anything was measured, in ns.
    pub const FIRST_GUESS: u64 = 500_000;

    /// An empty table.
    pub fn new() -> Self {
        let slot = || Slot { key: AtomicU64::new(0), cost: AtomicU32::new(0), probes: AtomicU32::new(0) };
        let slots: Box<[Slot]> = (0..ROWS).map(|_| slot()).collect();
        let Ok(slots) = slots.try_into() else { unreachable!("a slice of ROWS slots was just made") };
        Self {
            slots,
            used: (0..ROWS).map(|_| AtomicU32::new(0)).collect(),
            measurements: AtomicU32::new(1),
            typical: AtomicU64::new(Self::FIRST_GUESS),
        }
    }

    /// The row of a key, and its cost in ns if anything was measured.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // numbers of rows are below ROWS
    pub fn find(&self, handle: u64, shape: u64) -> (Row, Option<u64>) {
        let (key, mut place) = key(handle, shape);
        if self.slots[place].key.load(Ordering::Relaxed) != key {
            place = self.find_further(key, place) % ROWS;
        }
        (Row(place as u32), self.cost(place))
    }

    #[cold]
    fn find_further(&self, key: u64, place: usize) -> usize {
        for at in near(place) {
            if self.slots[at].key.load(Ordering::Relaxed) == key || self.claim(at, 0, key) {
                return at;
            }
        }
        // Counters wrap around, so the oldest row is the furthest behind.
        let now = self.measurements.load(Ordering::Relaxed);
        let age = |at: usize| match self.used[at].load(Ordering::Relaxed) {
            0 => u32::MAX,
            then => now.wrapping_sub(then),
        };
        let oldest = near(place).max_by_key(|&at| age(at)).unwrap_or(place);
        let held = self.slots[oldest].key.load(Ordering::Relaxed);
        self.claim(oldest, held, key);
        oldest
    }

    /// Replaces the key `held` of a row with `key`. Returns `false` if another thread has replaced it with a third key.
    fn claim(&self, at: usize, held: u64, key: u64) -> bool {
        match self.slots[at].key.compare_exchange(held, key, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.reset(at);
                self.used[at].store(self.measurements.load(Ordering::Relaxed), Ordering::Relaxed);
                true
            }
            Err(other) => other == key,
        }
    }

    fn reset(&self, at: usize) {
        self.slots[at].cost.store(0, Ordering::Relaxed);
        self.slots[at].probes.store(0, Ordering::Release);
    }

    #[inline(always)]
    fn cost(&self, place: usize) -> Option<u64> {
        match self.slots[place].cost.load(Ordering::Relaxed) {
            0 => None,
            stored => Some(u64::from(stored - 1)),
        }
    }

    /// The cost of a row in ns, if anything was measured.
    pub fn known(&self, row: Row) -> Option<u64> {
        self.cost(row.0 as usize)
    }

    /// The cost assumed of an unknown function, in ns.
    pub fn guess(&self) -> u64 {
        self.typical.load(Ordering::Relaxed)
    }

    /// Counts one launch of a row without a cost, and returns the number so far.
    pub fn probe(&self, row: Row) -> u32 {
        self.slots[row.0 as usize].probes.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Launches of a row that went ahead before its cost was known.
    pub fn probes(&self, row: Row) -> u32 {
        self.slots[row.0 as usize].probes.load(Ordering::Acquire)
    }

    /// Notes a launch of a row as not measured after all, so that no launch waits for it.
    pub fn not_measured(&self, row: Row) {
        self.slots[row.0 as usize].probes.store(0, Ordering::Release);
    }

    /// Doubts a known row: it may have become longer, but its samples cannot prove it. The next launch is to be measured alone.
    pub fn doubt(&self, row: Row) {
        self.slots[row.0 as usize].probes.store(DOUBTED, Ordering::Release);
    }

    /// Whether a known row is doubted.
    pub fn is_doubted(&self, row: Row) -> bool {
        self.probes(row) >= DOUBTED && self.known(row).is_some()
    }

    /// Whether a launch is to be measured alone because of a doubt.
    pub fn take_doubt(&self, row: Row) -> bool {
        let more = |probes| (probes < DOUBTED + MEASURED_FOR_A_DOUBT).then_some(probes + 1);
        let probes = &self.slots[row.0 as usize].probes;
        self.is_doubted(row) && probes.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Learns from one more sample of a row, in ns.
    pub fn learn(&self, row: Row, sample: u64) {
        let slot = &self.slots[row.0 as usize];
        let measurements = self.measurements.fetch_add(1, Ordering::Relaxed);
        self.used[row.0 as usize].store(measurements.max(1), Ordering::Relaxed);
        let sample = sample.min(u64::from(u32::MAX - 1));
        let next = match self.cost(row.0 as usize) {
            None => {
                // The typical cost follows first samples, quickly downwards: most kernels are short.
                let typical = self.typical.load(Ordering::Relaxed);
                self.typical.store(average(typical, sample.max(1_000)), Ordering::Relaxed);
                sample
            }
            Some(cost) => average(cost, sample),
        };
        #[allow(clippy::cast_possible_truncation)] // an average of values below 2^32
        slot.cost.store(next as u32 + 1, Ordering::Relaxed);
        slot.probes.store(0, Ordering::Release);
    }

    /// Sets the cost of a known row, in ns.
    pub fn set(&self, row: Row, cost: u64) {
        let cost = cost.min(u64::from(u32::MAX - 1));
        #[allow(clippy::cast_possible_truncation)] // just bounded
        self.slots[row.0 as usize].cost.store(cost as u32 + 1, Ordering::Relaxed);
    }

    /// Forgets the cost of a deleted handle, since the next function with this handle is a different function.
    pub fn forget(&self, handle: u64, shape: u64) {
        let (key, place) = key(handle, shape);
        // A function never launched here has no row.
        if let Some(at) = near(place).find(|&at| self.slots[at].key.load(Ordering::Relaxed) == key) {
            self.reset(at);
            self.used[at].store(0, Ordering::Relaxed);
        }
    }
}

/// The key of a handle's launches of one shape, and its place.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the upper bits, as many as a place has
fn key(handle: u64, shape: u64) -> (u64, usize) {
    let key = (handle ^ shape).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (key, (key >> (u64::BITS - ROWS.ilog2())) as usize % ROWS)
}

/// The places at which a key may lie.
fn near(place: usize) -> impl Iterator<Item = usize> {
    (0..REACH).map(move |step| (place + step) % ROWS)
}

/// The number of possibly too long samples that must agree before they are believed.
pub const SUSPECTS: u32 = 8;
/// The number of samples from other processes' turns that count as one.
const OUTSIDE: u32 = 4;

/// Samples in a row that lie above the cost of a row and may be too long.
#[derive(Clone, Copy, Debug, Default)]
pub struct Suspicion {
    count: u32,
    smallest: u64,
    /// The cost itself is possibly too long, and the next sample below it replaces it.
    pub cost_itself: bool,
}

impl Suspicion {
    /// The suspicion of a row, given whether its first sample may have been too long.
    pub fn of_first(cost_itself: bool) -> Self {
        Self { cost_itself, ..Self::default() }
    }

    /// Adds one sample, perhaps from `outside` of the process's turns. When there are enough, returns the cost proven by all of them.
    pub fn add(&mut self, sample: u64, outside: bool) -> Option<u64> {
        self.smallest = if self.count == 0 { sample } else { self.smallest.min(sample) };
        self.count += if outside { 1 } else { OUTSIDE };
        if self.count < SUSPECTS * OUTSIDE {
            return None;
        }
        self.count = 0;
        Some(self.smallest)
    }
}

/// The part of a possibly too long sample surely taken by the kernel, if turns are handed over up to `early` ns before they are
/// over. The cut is at most a 64th, since shares are kept to less than 2 %.
pub fn surely(sample: u64, early: u64) -> u64 {
    sample - early.min(sample / 64)
}

/// Half-way down, a quarter up.
fn average(old: u64, sample: u64) -> u64 {
    if sample < old { old - (old - sample) / 2 } else { old + (sample - old) / 4 }
}
