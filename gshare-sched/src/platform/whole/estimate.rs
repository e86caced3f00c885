//! Estimates that are learned: how long things take, and how often a model is asked for. Integers only.

use gshare_core::{Duration, Timestamp};

/// A length of time, profiled at first, then learned: mean and mean deviation, both exponentially weighted, with the
/// weights of TCP's round-trip estimator (1/8 and 1/4).
#[derive(Debug, Clone, Copy)]
pub(super) struct Estimate {
    mean: u64,
    deviation: u64,
}

impl Estimate {
    pub(super) const fn new(profiled: Duration) -> Self {
        Self { mean: profiled.as_nanos(), deviation: 0 }
    }

    pub(super) fn observe(&mut self, took: Duration) {
        let took = took.as_nanos();
        let error = took.abs_diff(self.mean);
        self.mean = if took >= self.mean { self.mean + error / 8 } else { self.mean - error / 8 }.max(1);
        self.deviation = self.deviation - self.deviation / 4 + error / 4;
    }

    /// The mean in ns.
    pub(super) const fn mean(self) -> u64 {
        self.mean
    }

    /// Mean plus mean deviation in ns: an estimate of the end of a wait should rather be late than early.
    pub(super) const fn cautious(self) -> u64 {
        self.mean.saturating_add(self.deviation)
    }
}

/// One event counts as this much.
const ONE: u64 = 1 << 16;

/// How often something happened lately: a sum that is halved every [`Recent::HALF_LIFE`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Recent {
    sum: u64,
    at: Timestamp,
}

impl Recent {
    pub(super) const NONE: Self = Self { sum: 0, at: Timestamp::ZERO };
    /// 60 s x ln 2: the time constant is a minute.
    const HALF_LIFE: u64 = 41_588_830_834;
    /// Time over which the sum adds up, in ms.
    const TIME_CONSTANT_MS: u64 = 60_000;

    /// Events this close together are taken as one: below it, the decay between two of them would be rounded away.
    const QUANTUM: Duration = Duration::from_millis(100);

    /// The sum at `now` in 1/65536: halved for each whole half-life, times 2^-f for the part that is left. The cubic is
    /// exact at both ends and off by less than 0.1 % between.
    fn at(self, now: Timestamp) -> u64 {
        let age = now.saturating_since(self.at).as_nanos();
        let (whole, part) = (age / Self::HALF_LIFE, age % Self::HALF_LIFE);
        if whole >= 63 {
            return 0;
        }
        let f = (part >> 10) * ONE / (Self::HALF_LIFE >> 10);
        let square = f * f / ONE;
        let factor = ONE - 45_426 * f / ONE + 15_744 * square / ONE - 3_086 * (square * f / ONE) / ONE;
        (self.sum >> whole) * factor / ONE
    }

    pub(super) fn count(&mut self, now: Timestamp) {
        if now.saturating_since(self.at) >= Self::QUANTUM {
            self.sum = self.at(now);
            self.at = now;
        }
        // Bounded, so that the products in `at` and `expected` fit.
        self.sum = (self.sum + ONE).min(1 << 40);
    }

    /// `times` these events as a part of the events of `all`, at most all of them, of `value`.
    pub(super) fn part_of(self, all: Self, now: Timestamp, times: u64, value: u64) -> u64 {
        let (these, all) = (self.at(now).saturating_mul(times), all.at(now).max(1));
        let part = u128::from(value) * u128::from(these.min(all)) / u128::from(all);
        u64::try_from(part).unwrap_or(u64::MAX)
    }

    /// Expected number of events in `horizon`, in 1/65536.
    pub(super) fn expected(self, now: Timestamp, horizon: Duration) -> u64 {
        let millis = (horizon.as_nanos() / 1_000_000).min(3_600_000);
        self.at(now) * millis / Self::TIME_CONSTANT_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_moves_to_what_is_observed_and_knows_its_spread() {
        let mut estimate = Estimate::new(Duration::from_millis(100));
        for _ in 0..60 {
            estimate.observe(Duration::from_millis(200));
        }
        assert!((195_000_000..=200_000_000).contains(&estimate.mean()), "{estimate:?}");
        let calm = estimate.cautious() - estimate.mean();
        for n in 0..20 {
            estimate.observe(Duration::from_millis(if n % 2 == 0 { 100 } else { 300 }));
        }
        assert!(estimate.cautious() - estimate.mean() > 10 * calm.max(1));
    }

    #[test]
    fn a_rate_is_found_and_forgotten() {
        let mut recent = Recent::NONE;
        for second in 0..600 {
            recent.count(Timestamp::from_millis(second * 1000));
        }
        let now = Timestamp::from_millis(600_000);
        let expected = recent.expected(now, Duration::from_secs(10));
        assert!((9 * ONE..12 * ONE).contains(&expected), "one per second: {}", expected as f64 / ONE as f64);
        let later = now.saturating_add(Duration::from_secs(420));
        assert!(recent.expected(later, Duration::from_secs(10)) < ONE / 10);
        assert_eq!(recent.expected(Timestamp::MAX, Duration::from_secs(10)), 0);
    }
}
