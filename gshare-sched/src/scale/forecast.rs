//! The load to expect once an instance started now is ready.
//!
//! # Problem
//! A report is the number of requests of one tick, so it swings about the load: 110 requests/s of a Poisson process are reported
//! as 99 to 121 two times in three. The last report sees false bursts, a mean lags behind a climb, and the highest of ten is 1.5
//! standard deviations too high, and each deviation is a third of an instance too many.
//!
//! # Algorithm
//! From the last `k` reports:
//! 1. *dispersion* `D`: half of the mean square of the differences between neighbours, over their mean. Five differences of a
//!    Poisson process are added for events too rare for few reports. `D` is 1 for that process and 0 for even arrivals, and a
//!    trend hardly counts;
//! 2. *line*: the least-squares line through the reports, continued to the middle of the tick in which an instance started now is
//!    ready. The last instance's start time counts, at most half as long as the reports go back. A step or a past dip tilts the
//!    line for a while, so it stays within the reports and the median difference's addition to them until then;
//! 3. *proof*: no load below `x - 2 sqrt(D x)` shows a report of `x` more often than one time in forty. Here `D` excludes the
//!    largest difference, which may be a step. The highest report of the newer half counts, so a step is seen at once and a
//!    shorter dip takes nothing away.
//!
//! The forecast is the higher of line and proof, and with fewer than three reports the highest of them.
//!
//! ## Example
//! Reports of 30, 32, ... 68 rise by 2 a second, and a start takes 2 s: the line is then at 73. After nineteen reports of 30 and
//! one of 110 the line says 45, and 110 proves 100.
//!
//! # Cost
//! A forecast costs O(k), in integers: the same on every machine.
use gshare_core::Duration;
use gshare_core::profile::RequestRate;
use std::collections::VecDeque;

/// Differences of a Poisson process, added to the measured ones.
const EXPECTED: u128 = 5;

/// Higher rates, above a billion requests per second, count as this rate: their squares must fit.
const MOST_MILLI: u64 = 1 << 40;

/// The expected load, and the unevenness of arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Forecast {
    pub(super) load: RequestRate,
    /// The index of dispersion of the requests of a tick, in thousandths.
    pub(super) dispersion: u64,
}

impl Forecast {
    /// Forecasts the load in `ahead` from `reports`, the newest at the back, one each `tick`.
    pub(super) fn of(reports: &VecDeque<RequestRate>, tick: Duration, ahead: Duration) -> Self {
        let (dispersion, but_for_a_step) = dispersions(reports, tick);
        let highest = |from| reports.range(from..).copied().max().unwrap_or(RequestRate::ZERO);
        if reports.len() < 3 {
            return Self { load: highest(0), dispersion };
        }
        // A lower report proves less.
        let proof = proof(highest(reports.len() / 2), but_for_a_step, tick);
        Self { load: line(reports, tick, ahead).max(proof), dispersion }
    }
}

/// The index of dispersion in thousandths, with and without the largest difference.
fn dispersions(reports: &VecDeque<RequestRate>, tick: Duration) -> (u64, u64) {
    let rates = || reports.iter().map(|rate| u128::from(rate.as_milli().min(MOST_MILLI)));
    let squares = || rates().zip(rates().skip(1)).map(|(a, b)| a.abs_diff(b).pow(2) / 2);
    let mean = rates().sum::<u128>() / (reports.len() as u128).max(1);
    let of = |squares: u128, differences: usize| {
        let seen = squares / mean.max(1) * u128::from(tick.as_nanos() / 1_000) / 1_000_000;
        u64::try_from((seen + 1_000 * EXPECTED) / (differences as u128 + EXPECTED)).unwrap_or(u64::MAX)
    };
    let (sum, largest) = (squares().sum::<u128>(), squares().max().unwrap_or(0));
    (of(sum, reports.len().saturating_sub(1)), of(sum - largest, reports.len().saturating_sub(2)))
}

/// The least load to show `report` with more than one chance in forty.
fn proof(report: RequestRate, dispersion: u64, tick: Duration) -> RequestRate {
    // The variance of the requests of a tick is the dispersion times their number.
    let variance = u128::from(report.as_milli()) * u128::from(dispersion);
    let variance = variance.saturating_mul(1_000_000) / u128::from(tick.as_nanos() / 1_000).max(1);
    let deviation = u64::try_from(variance.isqrt()).unwrap_or(u64::MAX);
    RequestRate::from_milli(report.as_milli().saturating_sub(deviation.saturating_mul(2)))
}

/// The least-squares line, continued to half a tick after `ahead`.
fn line(reports: &VecDeque<RequestRate>, tick: Duration, ahead: Duration) -> RequestRate {
    let (count, tick) = (reports.len() as i128, i128::from(tick.as_nanos().max(1)));
    let ahead = i128::from(ahead.as_nanos()).min(count * tick / 2);
    let rates = || reports.iter().map(|rate| i128::from(rate.as_milli().min(MOST_MILLI)));
    // Twice the distance of each report from the middle one, so a whole number.
    let tilt: i128 = (0..).zip(rates()).map(|(place, rate)| (2 * place - (count - 1)) * rate).sum();
    let mean = rates().sum::<i128>() / count;
    // The middle of the reports lies half of them before the end of the last tick.
    let rise = 3 * tilt * (count * tick + 2 * ahead) / (count * (count * count - 1) * tick);
    let mut steps: Vec<i128> = rates().zip(rates().skip(1)).map(|(a, b)| b - a).collect();
    let middle = steps.len() / 2;
    let (_, &mut median, _) = steps.select_nth_unstable(middle);
    let led = |median: i128| median * (tick + 2 * ahead) / (2 * tick);
    let (lowest, highest) = (rates().min().unwrap_or(0), rates().max().unwrap_or(0));
    let within = (mean + rise).clamp(lowest + led(median.min(0)), highest + led(median.max(0)));
    RequestRate::from_milli(u64::try_from(within).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_secs(1);

    fn reports(rates: impl IntoIterator<Item = u64>) -> VecDeque<RequestRate> {
        rates.into_iter().map(RequestRate::per_second).collect()
    }

    #[test]
    fn the_examples_of_the_essay() {
        let climb = reports((0..20).map(|second| 30 + 2 * second));
        let at = |ahead| Forecast::of(&climb, TICK, Duration::from_secs(ahead)).load;
        assert_eq!(at(0), RequestRate::per_second(69), "half a tick after the last report's middle");
        assert_eq!(at(2), RequestRate::per_second(73));
        assert_eq!(at(10), at(3_600), "no further than half of the reports");
        let step = reports([30; 20].into_iter().skip(1).chain([110]));
        assert_eq!(line(&step, TICK, Duration::ZERO).as_milli() / 1_000, 45);
        assert_eq!(Forecast::of(&step, TICK, Duration::ZERO).load.as_milli() / 1_000, 100);
    }

    #[test]
    fn a_dip_that_is_over_adds_nothing() {
        let dip = reports([100; 8].into_iter().chain([0; 3]).chain([100; 9]));
        let load = Forecast::of(&dip, TICK, Duration::from_secs(2)).load;
        assert!((80..=100).contains(&(load.as_milli() / 1_000)), "{load:?}");
    }

    #[test]
    fn the_largest_reports_do_not_overflow() {
        let (none, most) = (RequestRate::ZERO, RequestRate::from_milli(u64::MAX));
        for ahead in [Duration::ZERO, Duration::from_secs(1 << 30)] {
            for lowest in [none, most] {
                let step = [vec![lowest; 1_800], vec![most; 1_800]].concat().into();
                let forecast = Forecast::of(&step, Duration::from_secs(3_600), ahead);
                assert!(forecast.load.as_milli() >= MOST_MILLI);
            }
        }
    }

    proptest! {
        /// The line by the normal equations, in floating point.
        #[test]
        fn the_line_is_the_one_of_least_squares(rates in prop::collection::vec(0u64..5_000, 3..60), ahead in 0u64..80) {
            let n = rates.len() as f64;
            let (mut x1, mut x2, mut y1, mut xy) = (0.0, 0.0, 0.0, 0.0);
            for (x, &y) in rates.iter().enumerate() {
                let (x, y) = (x as f64, y as f64);
                (x1, x2, y1, xy) = (x1 + x, x2 + x * x, y1 + y, xy + x * y);
            }
            let slope = (n * xy - x1 * y1) / (n * x2 - x1 * x1);
            let ahead_of_last = 0.5 + (ahead as f64).min(n / 2.0);
            let mut steps: Vec<f64> = rates.windows(2).map(|pair| pair[1] as f64 - pair[0] as f64).collect();
            steps.sort_by(f64::total_cmp);
            let led = |median: f64| median * ahead_of_last;
            let median = steps[steps.len() / 2];
            let (low, high) = (*rates.iter().min().unwrap() as f64, *rates.iter().max().unwrap() as f64);
            let plain = (y1 - slope * x1) / n + slope * (n - 1.0 + ahead_of_last);
            let expected = plain.clamp(low + led(median.min(0.0)), high + led(median.max(0.0)));
            let found = line(&reports(rates), TICK, Duration::from_secs(ahead)).as_milli();
            prop_assert!((found as f64 / 1e3 - expected.max(0.0)).abs() < 0.01, "{found} for {expected}");
        }

        #[test]
        fn reports_that_are_all_the_same_are_the_forecast(rate in 0u64..10_000, count in 1usize..60, ahead in 0u64..100) {
            let found = Forecast::of(&reports(vec![rate; count]), TICK, Duration::from_secs(ahead));
            prop_assert_eq!(found.load, RequestRate::per_second(rate));
        }
    }
}
