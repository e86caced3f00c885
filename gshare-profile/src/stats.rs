//! Figures from times of answers: whether the function is steady, its throughput, and the throughput's interval.
//!
//! # Algorithm
//! **Steady**: two consecutive windows of calls are compared. The function is steady when the means of their latencies
//! differ by no more than a tolerance of the mean, or by no more than what chance explains (two standard errors).
//!
//! **Throughput and its interval**, by batch means: answers are correlated, so their gaps are put into [`GROUPS`] groups of
//! equal count, which are nearly independent; the mean length of a group has a Student t interval, and a rate is the inverse of a length.
//!
//! Example: 400 calls of one request in 20 groups of 20; the groups take 200 ms on average with a standard deviation of 4 ms.
//! At 95 %, t is 2.093 for 19 degrees of freedom, so the length is 200 ± 2.093 x 4 / sqrt(20) = 200 ± 1.87 ms, and the rate
//! 100 per second, from 99.1 to 100.9.
//!
//! These are predictors and reports: the figures are floating point.

use gshare_core::{Duration, Timestamp};

/// Groups of an interval. With 20, t is near its limit and each group is still long.
pub const GROUPS: usize = 20;

/// Quantile of Student's t for [`GROUPS`] - 1 = 19 degrees of freedom, both sides: an interval holds the true rate 99 times in a hundred,
/// since a profile has dozens of points.
const T: f64 = 2.861;

/// One answered call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// When the call was due; the same as `sent` in a closed loop.
    pub due: Timestamp,
    /// When the function received the call.
    pub sent: Timestamp,
    /// When the function answered the call.
    pub done: Timestamp,
}

impl Call {
    /// Time in the function.
    pub const fn exec(&self) -> Duration {
        self.done.saturating_since(self.sent)
    }

    /// Time since the call was due, with the wait for the function.
    pub const fn latency(&self) -> Duration {
        self.done.saturating_since(self.due)
    }
}

/// A rate and its interval.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Interval {
    /// The least.
    pub low: f64,
    /// As measured.
    pub mean: f64,
    /// The most; infinite when the groups vary beyond their own length.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "or_infinite"))]
    pub high: f64,
}

/// JSON has no infinity: it is written as null.
#[cfg(feature = "serde")]
fn or_infinite<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let value: Option<f64> = serde::Deserialize::deserialize(from)?;
    Ok(value.unwrap_or(f64::INFINITY))
}

impl Interval {
    /// The larger distance of an end from the mean, as a part of the mean.
    pub fn half_width(&self) -> f64 {
        ((self.high - self.mean).max(self.mean - self.low) / self.mean).abs()
    }

    /// Whether a value lies in the interval.
    pub fn holds(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }
}

/// Calls per second, from the times of the answers after `begin`; `None` for fewer than two per group.
#[expect(clippy::cast_precision_loss, reason = "a report")]
pub fn rate(begin: Timestamp, done: &[Timestamp]) -> Option<Interval> {
    let per_group = done.len() / GROUPS;
    if per_group < 2 {
        return None;
    }
    // The first answers are left out if they do not fill a group.
    let surplus = done.len() - per_group * GROUPS;
    let mut from = if surplus == 0 { begin } else { done[surplus - 1] };
    let mut lengths = Vec::with_capacity(GROUPS);
    for group in done[surplus..].chunks(per_group) {
        let end = group[group.len() - 1];
        lengths.push(end.saturating_since(from).as_secs_f64());
        from = end;
    }
    let (mean, deviation) = moments(lengths.iter().copied());
    let half = T * deviation / (GROUPS as f64).sqrt();
    let of = |length: f64| if length > 0.0 { per_group as f64 / length } else { f64::INFINITY };
    Some(Interval { low: of(mean + half), mean: of(mean), high: of(mean - half) })
}

/// Whether the two halves of the latest `2 * window` latencies look alike.
#[expect(clippy::cast_precision_loss, reason = "a predictor")]
pub fn is_steady(latencies: &[Duration], window: usize, tolerance: f64) -> bool {
    let Some(start) = latencies.len().checked_sub(2 * window).filter(|_| window >= 2) else { return false };
    let (before, after) = latencies[start..].split_at(window);
    let of = |part: &[Duration]| moments(part.iter().map(|latency| latency.as_secs_f64()));
    let ((a, da), (b, db)) = (of(before), of(after));
    let error = ((da * da + db * db) / window as f64).sqrt();
    let difference = (a - b).abs();
    difference <= tolerance * b || difference <= 2.0 * error
}

/// The `percent`-th percentile (nearest rank) of latencies in order; 0 of none.
pub fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(rank).copied().unwrap_or(Duration::ZERO)
}

/// Mean and standard deviation (of a sample).
#[expect(clippy::cast_precision_loss, reason = "a count")]
fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n.max(1.0);
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (n - 1.0).max(1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Random;

    fn times(gaps: impl Iterator<Item = f64>) -> Vec<Timestamp> {
        let mut at = 0.0;
        let next = |gap: f64| {
            at += gap;
            Timestamp::from_nanos((at * 1e9) as u64)
        };
        gaps.map(next).collect()
    }

    #[test]
    fn even_answers_have_an_interval_of_no_width() {
        let done = times((0..400).map(|_| 0.01));
        let rate = rate(Timestamp::ZERO, &done).unwrap();
        assert!((rate.mean - 100.0).abs() < 1e-6 && rate.half_width() < 1e-6, "{rate:?}");
        assert!(super::rate(Timestamp::ZERO, &done[..39]).is_none());
    }

    /// The claim of an interval is how often it holds the truth.
    #[test]
    fn intervals_hold_the_true_rate_as_often_as_they_say() {
        let holds = (0..1_000).filter(|&seed| {
            let mut random = Random(seed);
            // Gaps of 5 to 15 ms: 100 per second.
            let done = times((0..200).map(|_| 0.005 + 0.01 * random.unit()));
            rate(Timestamp::ZERO, &done).unwrap().holds(100.0)
        });
        let holds = holds.count();
        assert!((975..=999).contains(&holds), "{holds} of 1000");
    }

    #[test]
    fn what_still_warms_up_is_not_steady() {
        let ms = |values: &[u64]| values.iter().map(|v| Duration::from_millis(*v)).collect::<Vec<_>>();
        assert!(is_steady(&ms(&[20, 20, 20, 20]), 2, 0.05));
        assert!(!is_steady(&ms(&[40, 40, 20, 20]), 2, 0.05));
        assert!(!is_steady(&ms(&[20, 20, 20]), 2, 0.05), "not enough to tell");
        assert!(is_steady(&ms(&[500, 10, 30, 20, 10, 30, 20]), 3, 0.05), "noise is no trend");
        assert!(!is_steady(&ms(&[10, 20, 30, 40, 50, 60]), 3, 0.05), "a queue that grows");
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let sorted: Vec<_> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(
            [50, 95, 99, 100].map(|p| percentile(&sorted, p).as_nanos() / 1_000_000),
            [50, 95, 99, 100]
        );
        assert_eq!(percentile(&[], 95), Duration::ZERO);
    }
}
