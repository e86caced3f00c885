//! When the next call is made: closed loop, even, Poisson, or recorded.
//!
//! A **call** carries one batch. In a closed loop each answer makes the next call, so the function is always
//! busy and its throughput can be measured. In an open loop calls come whether the function keeps up or not, which
//! shows the latency under a load, and whether the load is met at all.

use gshare_core::{ConfigError, Duration, Timestamp};

/// How calls are made.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Load {
    /// A fixed number of calls is under way at any time; at least one.
    Closed {
        /// Calls under way.
        in_flight: u32,
    },
    /// Calls at even gaps.
    Even {
        /// Calls per second; finite, above 0.
        rate: f64,
    },
    /// Independent calls.
    Poisson {
        /// Calls per second; finite, above 0.
        rate: f64,
        /// The same seed gives the same calls.
        seed: u64,
    },
    /// Recorded calls: the time of each after the first, in order. They start over at the end, one mean gap later.
    Trace {
        /// The times; at least two, and not all the same.
        times: Vec<Duration>,
    },
}

impl Load {
    /// Refuses what cannot be.
    pub fn check(&self) -> Result<(), ConfigError> {
        let error = |field, value: String, bound| Err(ConfigError::new(field, value, bound));
        match self {
            Self::Closed { in_flight } if !(1..=1024).contains(in_flight) => {
                error("in_flight", in_flight.to_string(), "need 1 to 1024")
            }
            Self::Even { rate } | Self::Poisson { rate, .. }
                if !(rate.is_finite() && (1e-3..=1e6).contains(rate)) =>
            {
                error("rate", rate.to_string(), "need a number from 0.001 to 1000000 (calls per second)")
            }
            Self::Trace { times } => match times.windows(2).position(|pair| pair[1] < pair[0]) {
                Some(place) => {
                    error("times", format!("not in order at number {place}"), "need them in order")
                }
                None if times.first() >= times.last() => {
                    error("times", format!("{} of them", times.len()), "need at least two, not all the same")
                }
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Calls per second on average; `None` in a closed loop.
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    pub fn rate(&self) -> Option<f64> {
        match self {
            Self::Closed { .. } => None,
            Self::Even { rate } | Self::Poisson { rate, .. } => Some(*rate),
            Self::Trace { times } => {
                let span = times.last()?.saturating_sub(*times.first()?);
                Some((times.len() - 1) as f64 / span.as_secs_f64())
            }
        }
    }

    pub(crate) fn calls(&self, begin: Timestamp) -> Calls {
        let seed = if let Self::Poisson { seed, .. } = self { *seed } else { 0 };
        Calls { load: self.clone(), begin, number: 0, due: begin, random: Random(seed) }
    }
}

/// The times of the calls of an open loop.
#[derive(Debug)]
pub(crate) struct Calls {
    load: Load,
    begin: Timestamp,
    number: u64,
    due: Timestamp,
    random: Random,
}

impl Calls {
    /// The time of the next call; `None` in a closed loop.
    pub(crate) fn due(&self) -> Option<Timestamp> {
        (!matches!(self.load, Load::Closed { .. })).then_some(self.due)
    }

    /// Goes on to the next call.
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    pub(crate) fn advance(&mut self) {
        self.number += 1;
        match &self.load {
            Load::Closed { .. } => {}
            Load::Even { rate } => self.due = self.begin.saturating_add(seconds(self.number as f64 / rate)),
            Load::Poisson { rate, .. } => {
                // By inversion; the argument is never 0.
                let gap = -self.random.unit().ln() / rate;
                self.due = self.due.saturating_add(seconds(gap));
            }
            Load::Trace { times } => {
                let (first, last) = (times[0], times[times.len() - 1]);
                let span = last.saturating_sub(first).as_nanos();
                let round = span + span / (times.len() as u64 - 1);
                let (rounds, place) = (self.number / times.len() as u64, self.number % times.len() as u64);
                let place = usize::try_from(place).unwrap_or(0);
                let since = Duration::from_nanos(round.saturating_mul(rounds))
                    .saturating_add(times[place].saturating_sub(first));
                self.due = self.begin.saturating_add(since);
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates; never negative")]
fn seconds(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9) as u64)
}

/// A small seeded generator (splitmix64): trials must be repeatable, and no more is asked of it.
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Above 0, at most 1.
    #[expect(clippy::cast_precision_loss, reason = "53 bits")]
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dues(load: &Load, count: usize) -> Vec<f64> {
        let mut calls = load.calls(Timestamp::from_millis(1_000));
        let mut next = || {
            let due = calls.due().unwrap();
            calls.advance();
            due.saturating_since(Timestamp::from_millis(1_000)).as_secs_f64()
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn open_loops_have_the_rate_they_were_given() {
        assert_eq!(dues(&Load::Even { rate: 4.0 }, 4), [0.0, 0.25, 0.5, 0.75]);
        let last = dues(&Load::Poisson { rate: 50.0, seed: 3 }, 20_001)[20_000];
        assert!((390.0..410.0).contains(&last), "{last}");
        assert_ne!(
            dues(&Load::Poisson { rate: 50.0, seed: 3 }, 9),
            dues(&Load::Poisson { rate: 50.0, seed: 4 }, 9)
        );
        let trace = Load::Trace { times: [5, 6, 9].map(Duration::from_secs).to_vec() };
        assert_eq!(dues(&trace, 5), [0.0, 1.0, 4.0, 6.0, 7.0], "it starts over a mean gap after its end");
        assert_eq!(trace.rate(), Some(0.5));
        assert_eq!(Load::Closed { in_flight: 1 }.calls(Timestamp::ZERO).due(), None);
    }

    #[test]
    fn impossible_loads_are_refused_by_field() {
        let error = |load: Load| load.check().unwrap_err().to_string();
        assert_eq!(error(Load::Closed { in_flight: 0 }), "in_flight is 0: need 1 to 1024");
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            assert!(error(Load::Even { rate }).starts_with("rate is "));
            assert!(error(Load::Poisson { rate, seed: 1 }).starts_with("rate is "));
        }
        let trace =
            |secs: &[u64]| Load::Trace { times: secs.iter().map(|s| Duration::from_secs(*s)).collect() };
        for bad in [&[][..], &[1], &[2, 2], &[2, 1]] {
            assert!(error(trace(bad)).starts_with("times is "), "{bad:?}");
        }
        assert!(trace(&[1, 1, 2]).check().is_ok());
    }
}
