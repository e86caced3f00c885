//! Arrival processes, which give the time of the next request.
//!
//! | process | next arrival | coefficient of variation of the gaps |
//! |---|---|---|
//! | [`ClosedLoop`](Arrivals::ClosedLoop) | a think time after the last request ended | - |
//! | [`Poisson`](Arrivals::Poisson) | exponential gap after the last arrival | 1 |
//! | [`Gamma`](Arrivals::Gamma) | gamma gap after the last arrival | as given |
//! | [`OnOff`](Arrivals::OnOff) | Poisson in bursts, silence between them | above 1 |
//! | [`Rates`](Arrivals::Rates) | Poisson at the rate of the current bin (an inhomogeneous process) | - |
//! | [`Times`](Arrivals::Times) | the next time of a list | - |
//!
//! Rates are requests per second. The parameters of the gamma process are the rate and the CV of its **gaps** (shape 1/CV², mean
//! 1/rate), as in papers on serving; a process with gamma **counts** per second would not have the given CV.

use crate::rng::Rng;
use gshare_core::{Duration, Timestamp};
use rand_distr::{Exp, Gamma};

/// A process of arrivals was refused. Each variant names the field and its bound.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ArrivalError {
    /// A number is not positive and finite.
    #[error("{field} is {value}: need a finite number above 0")]
    NotPositive {
        /// The name of the field.
        field: &'static str,
        /// The given number.
        value: f64,
    },
    /// A length of time is 0.
    #[error("{field} is 0: need more")]
    Zero {
        /// The name of the field.
        field: &'static str,
    },
    /// A rate is negative, infinite or not a number.
    #[error("rate {index} is {value}: need a finite number of at least 0")]
    BadRate {
        /// The index of the rate, from 0.
        index: usize,
        /// The given number.
        value: f64,
    },
    /// The times are not in order.
    #[error("time {index} is earlier than the one before it")]
    Unordered {
        /// The index of the time, from 0.
        index: usize,
    },
}

/// A process of arrivals, made by its constructors, which check the numbers. See the [module](self) for the list.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Arrivals {
    /// One request at a time: the next request comes `think` after the end of the last request.
    #[non_exhaustive]
    ClosedLoop {
        /// The pause between a request's end and the next request.
        think: Duration,
    },
    /// Independent arrivals.
    #[non_exhaustive]
    Poisson {
        /// The distribution of the gaps in seconds.
        gap: Exp<f64>,
    },
    /// Gaps of a given variability.
    #[non_exhaustive]
    Gamma {
        /// The distribution of the gaps in seconds.
        gap: Gamma<f64>,
    },
    /// Bursts: Poisson arrivals for `on`, none for `off`, from the epoch on.
    #[non_exhaustive]
    OnOff {
        /// The length of a burst.
        on: Duration,
        /// The length of the silence after a burst.
        off: Duration,
        /// The distribution of the gaps within a burst in seconds.
        gap: Exp<f64>,
    },
    /// Poisson arrivals with one rate per bin, from the epoch to the end of the last bin.
    #[non_exhaustive]
    Rates {
        /// The length of a bin.
        bin: Duration,
        /// The rate in each bin in requests per second.
        rates: Vec<f64>,
    },
    /// Recorded times.
    #[non_exhaustive]
    Times {
        /// The times, in order.
        times: Vec<Timestamp>,
        /// The number of past times.
        taken: usize,
    },
}

impl Arrivals {
    /// One request at a time.
    pub const fn closed_loop(think: Duration) -> Self {
        Self::ClosedLoop { think }
    }

    /// Independent arrivals at `rate` requests per second.
    pub fn poisson(rate: f64) -> Result<Self, ArrivalError> {
        Ok(Self::Poisson { gap: exponential("rate", rate)? })
    }

    /// Arrivals at `rate` requests per second, with the coefficient of variation `cv` of their gaps (1 is Poisson).
    pub fn gamma(rate: f64, cv: f64) -> Result<Self, ArrivalError> {
        let (rate, cv) = (positive("rate", rate)?, positive("cv", cv)?);
        let shape = 1.0 / (cv * cv);
        let scale = 1.0 / (rate * shape);
        let gap = Gamma::new(shape, scale)
            .map_err(|_| ArrivalError::NotPositive { field: "shape (1/cv^2)", value: shape })?;
        Ok(Self::Gamma { gap })
    }

    /// Bursts of `on` at `rate` requests per second, with `off` between them.
    pub fn on_off(on: Duration, off: Duration, rate: f64) -> Result<Self, ArrivalError> {
        if on.is_zero() {
            return Err(ArrivalError::Zero { field: "on" });
        }
        Ok(Self::OnOff { on, off, gap: exponential("rate", rate)? })
    }

    /// A rate (requests per second) per bin.
    pub fn rates(bin: Duration, rates: Vec<f64>) -> Result<Self, ArrivalError> {
        if bin.is_zero() {
            return Err(ArrivalError::Zero { field: "bin" });
        }
        match rates.iter().position(|rate| !rate.is_finite() || *rate < 0.0) {
            Some(index) => Err(ArrivalError::BadRate { index, value: rates[index] }),
            None => Ok(Self::Rates { bin, rates }),
        }
    }

    /// Recorded times.
    pub fn times(times: Vec<Timestamp>) -> Result<Self, ArrivalError> {
        match times.windows(2).position(|pair| pair[1] < pair[0]) {
            Some(index) => Err(ArrivalError::Unordered { index: index + 1 }),
            None => Ok(Self::Times { times, taken: 0 }),
        }
    }

    /// `counts[i]` arrivals at even chances anywhere in bin `i`, since a trace of counts per minute leaves their times open.
    pub fn counts(bin: Duration, counts: &[u32], rng: &mut Rng) -> Self {
        let mut times = Vec::new();
        let mut start = Timestamp::ZERO;
        for &count in counts {
            let first = times.len();
            times.extend(
                (0..count).map(|_| start.saturating_add(Duration::from_nanos(rng.below(bin.as_nanos())))),
            );
            times[first..].sort_unstable();
            start = start.saturating_add(bin);
        }
        Self::Times { times, taken: 0 }
    }

    /// Whether the next arrival waits for the last request to end.
    pub const fn is_closed_loop(&self) -> bool {
        matches!(self, Self::ClosedLoop { .. })
    }

    /// The arrival after `last`: the time of the last arrival, or, in a closed loop, of the last request's end. `None` means no
    /// more requests come.
    pub fn next_after(&mut self, last: Timestamp, rng: &mut Rng) -> Option<Timestamp> {
        match self {
            Self::ClosedLoop { think } => Some(last.saturating_add(*think)),
            Self::Poisson { gap } => Some(last.saturating_add(seconds(rng.sample(gap)))),
            Self::Gamma { gap } => Some(last.saturating_add(seconds(rng.sample(gap)))),
            Self::OnOff { on, off, gap } => {
                // The process has no memory, so the calculation counts time in bursts only and then puts the silences back.
                let period = on.as_nanos().saturating_add(off.as_nanos());
                let (bursts, phase) = (last.as_nanos() / period, last.as_nanos() % period);
                let busy = bursts.saturating_mul(on.as_nanos()).saturating_add(phase.min(on.as_nanos()));
                let busy = busy.saturating_add(seconds(rng.sample(gap)).as_nanos());
                let (bursts, phase) = (busy / on.as_nanos(), busy % on.as_nanos());
                Some(Timestamp::from_nanos(bursts.saturating_mul(period).saturating_add(phase)))
            }
            Self::Rates { bin, rates } => {
                let mut at = last;
                loop {
                    let index = usize::try_from(at.as_nanos() / bin.as_nanos()).ok()?;
                    let end = Timestamp::from_nanos((index as u64 + 1).saturating_mul(bin.as_nanos()));
                    if let Ok(gap) = exponential("rate", *rates.get(index)?) {
                        let next = at.saturating_add(seconds(rng.sample(&gap)));
                        if next < end {
                            return Some(next);
                        }
                    }
                    // No request comes in the rest of this bin; without memory, the next bin starts afresh.
                    at = end;
                }
            }
            Self::Times { times, taken } => {
                let next = times.get(*taken).copied();
                *taken += 1;
                next
            }
        }
    }

    /// All arrivals before `end`, of a process without any request so far.
    pub fn until(mut self, end: Timestamp, rng: &mut Rng) -> Vec<Timestamp> {
        let mut last = Timestamp::ZERO;
        let next = || {
            last = self.next_after(last, rng)?;
            (last < end).then_some(last)
        };
        core::iter::from_fn(next).collect()
    }
}

fn positive(field: &'static str, value: f64) -> Result<f64, ArrivalError> {
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err(ArrivalError::NotPositive { field, value }) }
}

fn exponential(field: &'static str, rate: f64) -> Result<Exp<f64>, ArrivalError> {
    Exp::new(positive(field, rate)?).map_err(|_| ArrivalError::NotPositive { field, value: rate })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates; never negative")]
fn seconds(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(mut arrivals: Arrivals, count: usize) -> Vec<f64> {
        let (mut rng, mut last, mut gaps) = (Rng::new(5), Timestamp::ZERO, Vec::new());
        for _ in 0..count {
            let next = arrivals.next_after(last, &mut rng).unwrap();
            gaps.push(next.saturating_since(last).as_secs_f64());
            last = next;
        }
        gaps
    }

    #[expect(clippy::cast_precision_loss, reason = "a count")]
    fn mean_and_cv(gaps: &[f64]) -> (f64, f64) {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn open_processes_have_the_rate_and_the_cv_they_were_given() {
        for cv in [0.5, 1.0, 2.0, 4.0] {
            let (mean, measured) = mean_and_cv(&gaps(Arrivals::gamma(50.0, cv).unwrap(), 40_000));
            assert!((mean - 0.02).abs() < 0.002, "cv {cv}: mean gap {mean}");
            assert!((measured - cv).abs() < 0.1 * cv, "cv {cv}: measured {measured}");
        }
        let (mean, cv) = mean_and_cv(&gaps(Arrivals::poisson(200.0).unwrap(), 40_000));
        assert!((mean - 0.005).abs() < 0.0002 && (cv - 1.0).abs() < 0.05, "{mean} {cv}");
    }

    #[test]
    fn bursts_keep_to_their_time() {
        let (on, off) = (Duration::from_millis(10), Duration::from_millis(30));
        let mut arrivals = Arrivals::on_off(on, off, 1_000.0).unwrap();
        let (mut rng, mut last) = (Rng::new(9), Timestamp::ZERO);
        for _ in 0..2_000 {
            last = arrivals.next_after(last, &mut rng).unwrap();
            assert!(last.as_nanos() % 40_000_000 < 10_000_000);
        }
        // 1,000 per second in a quarter of the time.
        assert!((7.0..9.0).contains(&last.saturating_since(Timestamp::ZERO).as_secs_f64()), "{last}");
    }

    #[test]
    fn rates_and_counts_fill_their_bins_and_end() {
        let mut rng = Rng::new(2);
        let second = Duration::from_secs(1);
        let arrivals = Arrivals::rates(second, vec![0.0, 400.0, 0.0]).unwrap();
        let times = arrivals.clone().until(Timestamp::MAX, &mut rng.clone());
        assert!(times.is_sorted() && times.iter().all(|at| at.as_nanos() / 1_000_000_000 == 1));
        assert!((340..460).contains(&times.len()), "{}", times.len());
        assert_eq!(arrivals.until(times[100], &mut rng), times[..100], "those before that time");
        let Arrivals::Times { times, .. } = Arrivals::counts(second, &[2, 0, 3], &mut rng) else {
            unreachable!()
        };
        let bins: Vec<_> = times.iter().map(|time| time.as_nanos() / 1_000_000_000).collect();
        assert_eq!(bins, [0, 0, 2, 2, 2]);
        assert!(times.is_sorted());
    }

    #[test]
    fn impossible_processes_are_refused_by_field() {
        assert_eq!(
            Arrivals::poisson(0.0).unwrap_err().to_string(),
            "rate is 0: need a finite number above 0"
        );
        assert!(Arrivals::gamma(1.0, f64::NAN).unwrap_err().to_string().starts_with("cv is NaN"));
        assert!(Arrivals::on_off(Duration::ZERO, Duration::ZERO, 1.0).is_err());
        let error = Arrivals::rates(Duration::from_secs(1), vec![1.0, -1.0]).unwrap_err();
        assert_eq!(error, ArrivalError::BadRate { index: 1, value: -1.0 });
        let times = [3, 2].map(Timestamp::from_nanos).to_vec();
        assert_eq!(Arrivals::times(times).unwrap_err(), ArrivalError::Unordered { index: 1 });
    }
}
