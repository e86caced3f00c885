//! Randomness from one printed seed.

use gshare_core::Duration;
use rand_distr::Distribution;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};

/// A small seeded generator with fixed output: the same seed replays the same simulation on every machine.
///
/// Decisions of a simulation use the integer methods only. [`Rng::sample`] is for arrival processes; it rests on `libm`, so it does
/// not depend on the platform either.
#[derive(Debug, Clone)]
pub struct Rng(Xoshiro256PlusPlus);

impl Rng {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// Makes a separate generator for one part of a simulation, so that draws of one part do not shift another part's draws.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    /// Any integer.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// An integer below `bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product has a bias of at most `bound` / 2^64, too small for a simulation to notice.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// An integer from `low` to `high`, both possible.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        debug_assert!(low <= high, "an empty range");
        low + self.below((high - low).saturating_add(1))
    }

    /// A length of time from `low` to `high`, both possible.
    pub fn duration(&mut self, low: Duration, high: Duration) -> Duration {
        Duration::from_nanos(self.between(low.as_nanos(), high.as_nanos()))
    }

    /// Draws true `percent` times in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Draws one of `items`; `None` for an empty list.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let index = self.below(items.len() as u64);
        items.get(usize::try_from(index).unwrap_or(usize::MAX))
    }

    /// A draw from a distribution.
    pub fn sample<T>(&mut self, distribution: &impl Distribution<T>) -> T {
        distribution.sample(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A printed seed must mean the same for ever, so the test pins the stream itself.
    #[test]
    fn the_stream_of_a_seed_is_pinned() {
        let mut rng = Rng::new(1);
        assert_eq!(rng.next_u64(), 14_971_601_782_005_023_387);
        assert_eq!([rng.below(100), rng.below(100), rng.below(100)], [74, 10, 74]);
    }

    #[test]
    fn draws_keep_within_their_bounds_and_reach_them() {
        let mut rng = Rng::new(7);
        let draws: Vec<u64> = (0..1_000).map(|_| rng.between(3, 6)).collect();
        assert!(
            (3..=6).all(|value| draws.contains(&value)) && draws.iter().all(|draw| (3..=6).contains(draw))
        );
        assert_eq!(rng.below(0), 0);
        assert_eq!(rng.between(5, 5), 5);
        assert!(!rng.percent(0) && rng.percent(100));
        assert_eq!(rng.pick::<u8>(&[]), None);
    }

    #[test]
    fn forks_do_not_follow_their_parent() {
        let mut parent = Rng::new(3);
        let mut child = parent.fork();
        assert_ne!(parent.next_u64(), child.next_u64());
    }
}
