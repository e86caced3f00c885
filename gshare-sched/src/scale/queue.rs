//! How many requests wait too long for a pool of instances.
//!
//! Requests come at `load` per second to `c` servers with one queue, each of which answers `capacity / c` per second. Of those
//! that wait at all (about `rho ^ (sqrt(2 (c + 1)) - 1)`, Sakasegawa's approximation of Erlang's formula) the wait falls off by
//! `exp(-2 (capacity - load) t / D)` (Kingman's limit), where `D` is the index of dispersion of arrivals: the variance of
//! the requests of a second over their mean; 1 for a Poisson process, 0 for even arrivals. Service times are taken not
//! to vary: they are a model's.
//!
//! 20 requests/s at one server of 34.5, none of which may wait for more than 40 ms: `0.58 ^ 1 x exp(-2 x 14.5 x 0.04)` = 0.18 are late
//! (exactly 0.18, for this queue). At two 0.166 x 0.02 = 0.003.
//!
//! All of it in integers, logarithms in 1/65,536: the same on every machine. O(1), 20 multiplications; O(30) of that for
//! [`Queue::least_capacity`].
use gshare_core::profile::RequestRate;
use gshare_core::{BasisPoints, Duration};

/// One, as a logarithm.
const ONE: u64 = 1 << 16;

/// The logarithm of `e`.
const LOG_E: u128 = 94_548;

/// Requests, servers, and what may be waited.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queue {
    pub(super) load: RequestRate,
    /// What one server answers; more than 0.
    pub(super) server: RequestRate,
    pub(super) wait: Duration,
    /// The index of dispersion of arrivals, in thousandths.
    pub(super) dispersion: u64,
    /// Part of the requests that may wait longer; more than 0.
    pub(super) late: BasisPoints,
}

/// The logarithm of a number to base 2, rounded down; 0 for 0.
fn log2(number: u64) -> u64 {
    let Some(whole) = number.checked_ilog2() else { return 0 };
    let (mut log, mut rest) = (u64::from(whole) * ONE, (number << (63 - whole)) >> 32);
    // `rest` is 1 to 2 in units of 2^31: squared, each bit of the logarithm shows.
    for bit in (0..16).rev() {
        rest = (rest * rest) >> 31;
        if rest >= 1 << 32 {
            rest >>= 1;
            log += 1 << bit;
        }
    }
    log
}

impl Queue {
    /// Whether no more than `late` wait too long, at so much capacity.
    pub(super) fn fits(&self, capacity: RequestRate) -> bool {
        let (load, capacity) = (self.load.as_milli(), capacity.as_milli());
        if load == 0 {
            return true;
        }
        if capacity <= load {
            return false;
        }
        // In units of a logarithm: sqrt(2 (c + 1)) - 1 times log(capacity / load).
        let servers =
            u128::from(capacity) * u128::from(ONE * ONE * 2) / u128::from(self.server.as_milli().max(1));
        let power = (servers + u128::from(ONE * ONE * 2)).isqrt() - u128::from(ONE);
        let idle = power * u128::from(log2(capacity) - log2(load)) / u128::from(ONE);
        idle + u128::from(capacity - load).saturating_mul(self.decay()) / DECAY >= u128::from(self.need())
    }

    /// The smallest capacity that [fits](Self::fits), to a thousandth of a request per second.
    pub(super) fn least_capacity(&self) -> RequestRate {
        let load = self.load.as_milli();
        // With that much more, the decay alone is enough.
        let more = (u128::from(self.need()) * DECAY).div_ceil(self.decay().max(1));
        let (mut low, mut high) = (load, load.saturating_add(u64::try_from(more).unwrap_or(u64::MAX)));
        while low < high {
            let middle = low + (high - low) / 2;
            if self.fits(RequestRate::from_milli(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        RequestRate::from_milli(high)
    }

    /// The logarithm of 1 over `late`.
    fn need(&self) -> u64 {
        log2(10_000).saturating_sub(log2(u64::from(self.late.get())))
    }

    /// By how much the logarithm falls for each thousandth of a request per second between load and capacity, in parts of
    /// [`DECAY`].
    fn decay(&self) -> u128 {
        u128::from(self.wait.as_nanos()) * 2 * LOG_E / u128::from(self.dispersion.max(1))
    }
}

/// Thousandths of a request, ns in a second, over thousandths of the dispersion.
const DECAY: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(load: u64, dispersion: u64) -> Queue {
        let (load, server) = (RequestRate::per_second(load), RequestRate::from_milli(34_500));
        let late = BasisPoints::from_percent(1).unwrap();
        Queue { load, server, wait: Duration::from_millis(40), dispersion, late }
    }

    /// What the essay says, in floating point.
    fn late(queue: &Queue, capacity: f64) -> f64 {
        let (load, servers) = (queue.load.as_f64(), capacity / queue.server.as_f64());
        let waits = (load / capacity).powf((2.0 * (servers + 1.0)).sqrt() - 1.0);
        let left = (capacity - load) * queue.wait.as_secs_f64();
        waits * (-2.0 * left / (queue.dispersion as f64 / 1e3)).exp()
    }

    #[test]
    fn the_least_capacity_is_what_the_formula_says() {
        for load in [1, 5, 20, 30, 110, 900, 40_000] {
            for dispersion in [1, 300, 1_000, 6_000] {
                let queue = queue(load, dispersion);
                let least = queue.least_capacity();
                assert!(queue.fits(least) && !queue.fits(RequestRate::from_milli(least.as_milli() - 1)));
                let (at, below) = (late(&queue, least.as_f64()), late(&queue, least.as_f64() - 0.1));
                assert!(
                    at < 0.010_05 && (below > 0.009_95 || least.as_f64() - 0.2 < queue.load.as_f64()),
                    "{load} {dispersion}: {at} {below}"
                );
            }
        }
    }

    #[test]
    fn the_examples_of_the_essay() {
        assert!((late(&queue(20, 1_000), 34.5) - 0.18).abs() < 0.005);
        assert!((late(&queue(20, 1_000), 69.0) - 0.003).abs() < 0.000_5);
        assert!(!queue(20, 1_000).fits(RequestRate::from_milli(34_500)));
        assert!(queue(20, 1_000).fits(RequestRate::per_second(69)));
        assert!(queue(0, 1_000).fits(RequestRate::ZERO));
    }

    #[test]
    fn extremes_neither_overflow_nor_hang() {
        let most = RequestRate::from_milli(u64::MAX);
        let mut queue = queue(1, u64::MAX);
        (queue.load, queue.wait) = (most, Duration::from_nanos(u64::MAX));
        assert!(!queue.fits(most));
        assert_eq!(queue.least_capacity(), most);
        (queue.load, queue.server) = (RequestRate::from_milli(1), RequestRate::from_milli(1));
        assert!(queue.fits(most));
        queue.wait = Duration::ZERO;
        assert!(queue.least_capacity() > queue.load);
    }

    #[test]
    fn logarithms_are_those_of_the_library() {
        for number in [1, 2, 3, 7, 999, 1_000_003, u64::MAX] {
            let off = log2(number) as f64 / ONE as f64 - (number as f64).log2();
            assert!(off.abs() < 1e-4, "{number}: {off}");
        }
    }
}
