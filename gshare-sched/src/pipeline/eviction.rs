//! The instance to evict from MIG slices when memory is wanted: the least recently used, or the instance with the cheapest loss.
//!
//! # Problem
//! The least-recently-used rule (FluidFaaS, section 5.3) looks at the last use alone. An eviction costs the time to load the instance
//! again, times the likelihood of an early reload, and gains the instance's memory.
//!
//! # Algorithm
//! The score of an instance is `expected rate * reload time / size`, and the least score is evicted. The rate is a count of uses that
//! fades by half in `half_life`. All counts fade alike, so the order changes only with a use. The score is therefore kept as a
//! logarithm, `log2(count) + t / half_life + log2(reload) - log2(size)` with `t` the time of the last use, and needs no update before
//! the next use. Integers throughout: logarithms in 1/65536 of an octave by Mitchell's approximation (log2(1 + x) = x for x below 1),
//! off by at most 0.09 of an octave, the same on every machine.
//!
//! # Example
//! Half-life 1 minute; A and B are alike. A was used 4 times just before 0, B once at 60 s. At 60 s A counts 4 / 2 = 2 and B 1: B goes
//! first, where the least-recently-used rule evicts A.
//!
//! # Cost
//! O(log n) for a use, an entry, a leave and the choice of a victim; memory per known instance.

use gshare_core::{Bytes, Duration, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

/// The rule for the choice of the instance to evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "policy", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// The least recently used (the paper).
    Lru,
    /// The least `expected rate * reload time / size`.
    CostAware {
        /// Time in which a use counts half. More than 0.
        #[cfg_attr(feature = "serde", serde(rename = "half_life_ns"))]
        half_life: Duration,
    },
}

impl Default for EvictionPolicy {
    /// Cost-aware with a half-life of an hour.
    fn default() -> Self {
        Self::CostAware { half_life: Duration::from_secs(3_600) }
    }
}

/// One octave.
const OCTAVE: i128 = 1 << 16;

/// log2 of `n` in 1/65536 octaves; 0 counts as 1.
fn log2(n: u128) -> i128 {
    let n = n.max(1);
    let whole = n.ilog2();
    // The mantissa's fraction, scaled to an octave.
    let fraction = if whole >= 16 { (n >> (whole - 16)) & 0xffff } else { (n << (16 - whole)) & 0xffff };
    i128::from(whole) * OCTAVE + i128::try_from(fraction).unwrap_or(0)
}

/// 2^`x`, the inverse of [`log2`], in 1/65536; 0 below that.
fn exp2(x: i128) -> u128 {
    let (whole, fraction) = (x.div_euclid(OCTAVE), x.rem_euclid(OCTAVE));
    let mantissa = u128::try_from(OCTAVE + fraction).unwrap_or(0);
    match u32::try_from(whole) {
        Ok(up) => mantissa << up.min(100),
        Err(_) => mantissa >> u32::try_from(-whole).unwrap_or(127).min(127),
    }
}

#[derive(Debug, Clone)]
struct Entry {
    /// Logarithm of the count of uses at the last of them.
    count: i128,
    last: Timestamp,
    /// Number of the last use, the order of LRU.
    turn: u64,
    /// Logarithm of reload time over size.
    worth: i128,
    resident: Option<(i128, u64)>,
}

/// The order in which instances would be evicted.
#[derive(Debug, Clone)]
pub struct EvictionOrder<K> {
    policy: EvictionPolicy,
    entries: BTreeMap<K, Entry>,
    residents: BTreeSet<(i128, u64, K)>,
    turns: u64,
}

impl<K: Ord + Copy> EvictionOrder<K> {
    /// An order without instances.
    pub const fn new(policy: EvictionPolicy) -> Self {
        Self { policy, entries: BTreeMap::new(), residents: BTreeSet::new(), turns: 0 }
    }

    /// Half-lives passed at `at`, in octaves.
    fn octaves(&self, at: Timestamp) -> i128 {
        match self.policy {
            EvictionPolicy::CostAware { half_life } => {
                (i128::from(at.as_nanos()) * OCTAVE) / i128::from(half_life.as_nanos().max(1))
            }
            EvictionPolicy::Lru => 0,
        }
    }

    fn score(&self, entry: &Entry) -> (i128, u64) {
        match self.policy {
            EvictionPolicy::Lru => (0, entry.turn),
            EvictionPolicy::CostAware { .. } => {
                (entry.count + self.octaves(entry.last) + entry.worth, entry.turn)
            }
        }
    }

    /// Makes an instance known, or changes its costs: the time to load it, and its size.
    pub fn know(&mut self, now: Timestamp, key: K, reload: Duration, size: Bytes) {
        let worth = log2(reload.as_nanos().into()) - log2(size.get().into());
        let turn = self.turns;
        let entry =
            self.entries.entry(key).or_insert(Entry { count: 0, last: now, turn, worth, resident: None });
        entry.worth = worth;
        self.refresh(key);
    }

    /// Counts a use.
    pub fn used(&mut self, now: Timestamp, key: K) {
        let passed = self.octaves(now);
        self.turns += 1;
        let turn = self.turns;
        let before = self.entries.get(&key).map(|entry| self.octaves(entry.last));
        let (Some(entry), Some(before)) = (self.entries.get_mut(&key), before) else { return };
        let faded = entry.count - (passed - before);
        // The sum of the faded count and 1, both in 1/65536.
        entry.count = log2(exp2(faded) + 65_536) - 16 * OCTAVE;
        entry.last = now;
        entry.turn = turn;
        self.refresh(key);
    }

    fn refresh(&mut self, key: K) {
        let Some(entry) = self.entries.get(&key) else { return };
        let Some((score, turn)) = entry.resident else { return };
        let new = self.score(entry);
        if new != (score, turn) {
            self.residents.remove(&(score, turn, key));
            self.residents.insert((new.0, new.1, key));
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.resident = Some(new);
            }
        }
    }

    /// A known instance takes memory from now on.
    pub fn enter(&mut self, key: K) {
        let Some(entry) = self.entries.get(&key) else { return };
        if entry.resident.is_none() {
            let score = self.score(entry);
            self.residents.insert((score.0, score.1, key));
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.resident = Some(score);
            }
        }
    }

    /// An instance takes no memory any more. Its uses are remembered.
    pub fn leave(&mut self, key: K) {
        if let Some(entry) = self.entries.get_mut(&key)
            && let Some((score, turn)) = entry.resident.take()
        {
            self.residents.remove(&(score, turn, key));
        }
    }

    /// An instance is not known any more.
    pub fn forget(&mut self, key: K) {
        self.leave(key);
        self.entries.remove(&key);
    }

    /// The next instance to evict.
    pub fn victim(&self) -> Option<K> {
        self.residents.first().map(|&(_, _, key)| key)
    }

    /// The instances in the order in which they would be evicted.
    pub fn victims(&self) -> impl Iterator<Item = K> + '_ {
        self.residents.iter().map(|&(_, _, key)| key)
    }

    /// Number of instances that take memory.
    pub fn residents(&self) -> usize {
        self.residents.len()
    }

    /// Whether an instance takes memory.
    pub fn is_resident(&self, key: K) -> bool {
        self.entries.get(&key).is_some_and(|entry| entry.resident.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn order(policy: EvictionPolicy, keys: u32) -> EvictionOrder<u32> {
        let mut order = EvictionOrder::new(policy);
        for key in 0..keys {
            order.know(Timestamp::ZERO, key, Duration::from_secs(1), Bytes::from_gib(1));
            order.enter(key);
        }
        order
    }

    #[test]
    fn logarithms_are_monotonic_and_near() {
        assert!((1u128..3_000).all(|n| log2(n) < log2(n + 1)));
        for n in (1u128..3_000).chain((0..100).map(|bit| 1 << bit)) {
            let exact = (n as f64).log2() * 65_536.0;
            assert!((log2(n) as f64 - exact).abs() < 0.09 * 65_536.0, "{n}");
        }
        assert_eq!([exp2(0), exp2(OCTAVE), exp2(-OCTAVE), exp2(-40 * OCTAVE)], [65_536, 131_072, 32_768, 0]);
    }

    /// The example of the module.
    #[test]
    fn a_busy_instance_outlives_one_that_was_used_once_and_later() {
        for (policy, victim) in
            [(EvictionPolicy::CostAware { half_life: MINUTE }, 1), (EvictionPolicy::Lru, 0)]
        {
            let mut order = order(policy, 2);
            for _ in 0..4 {
                order.used(Timestamp::ZERO, 0);
            }
            order.used(Timestamp::ZERO + MINUTE, 1);
            assert_eq!(order.victim(), Some(victim), "{policy:?}");
        }
    }

    #[test]
    fn of_two_used_alike_the_larger_and_the_cheaper_goes_first() {
        let mut order = order(EvictionPolicy::default(), 2);
        order.know(Timestamp::ZERO, 1, Duration::from_secs(1), Bytes::from_gib(4));
        order.used(Timestamp::ZERO, 0);
        order.used(Timestamp::ZERO, 1);
        assert_eq!(order.victim(), Some(1), "four times the memory for the same reload");
        order.know(Timestamp::ZERO, 1, Duration::from_secs(9), Bytes::from_gib(4));
        assert_eq!(order.victim(), Some(0), "nine times the reload");
    }

    /// The reference has faded counts as floating point, and computes scores again for every choice.
    #[test]
    fn the_order_is_that_of_scores_computed_at_the_time_of_the_choice() {
        let half_life = Duration::from_secs(30);
        let mut order = order(EvictionPolicy::CostAware { half_life }, 8);
        let mut literal = [(0.0f64, 0.0f64); 8];
        let mut state = 7u64;
        let mut draw = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let (mut now, mut compared) = (0.0f64, 0);
        for key in 0..8u32 {
            // Before the first use every instance counts one, at 0.
            literal[key as usize] = (1.0, 0.0);
        }
        for _ in 0..2_000 {
            let millis = draw(4_000);
            now += millis as f64 / 1e3;
            let key = draw(8) as usize;
            let at = Timestamp::from_nanos((now * 1e9) as u64);
            order.used(at, key as u32);
            let fade = |(count, last): (f64, f64)| count * (-(now - last) / 30.0).exp2();
            literal[key] = (fade(literal[key]) + 1.0, now);
            let least = (0..8).min_by(|&a, &b| fade(literal[a]).total_cmp(&fade(literal[b]))).unwrap();
            let chosen = order.victim().unwrap() as usize;
            // The approximation may prefer an instance with a score within a sixth.
            assert!(fade(literal[chosen]) < fade(literal[least]) * 1.6 + 1e-9);
            compared += usize::from(chosen == least);
        }
        assert!(compared > 1_500, "{compared} of 2,000 are the very least");
    }

    #[test]
    fn uses_are_remembered_while_not_resident() {
        let mut order = order(EvictionPolicy::CostAware { half_life: MINUTE }, 2);
        for _ in 0..9 {
            order.used(Timestamp::ZERO, 0);
        }
        order.leave(0);
        assert_eq!((order.victim(), order.residents(), order.is_resident(0)), (Some(1), 1, false));
        order.used(Timestamp::ZERO, 1);
        order.enter(0);
        assert_eq!(order.victim(), Some(1), "0 was used more");
        order.forget(1);
        assert_eq!(order.victim(), Some(0));
    }
}
