//! The share of requests with too long a wait before a pool of instances.
//!
//! Requests come at `load` per second to `c` servers with one queue, and each server answers `capacity / c` per second. About
//! `rho ^ (sqrt(2 (c + 1)) - 1)` of them wait at all (Sakasegawa's approximation of Erlang's formula). Their wait falls off by
//! `exp(-2 (capacity - load) t / D)` (Kingman's limit), where `D` is the index of dispersion of arrivals: the variance of the
//! requests of a second over their mean, 1 for a Poisson process and 0 for even arrivals. Service times are a model's, so they
//! count as constant.
//!
//! With 20 requests/s at one server of 34.5 and a bound of 40 ms on the wait, `0.58 ^ 1 x exp(-2 x 14.5 x 0.04)` = 0.18 are late
//! (exactly 0.18, for this queue). With two servers 0.166 x 0.02 = 0.003 are late.
//!
//! The computation uses integers, with logarithms in 1/65,536: the same on every machine. A new queue or a question costs O(1),
//! 16 multiplications; [`Queue::least_capacity`] costs O(30) of them.
use gshare_core::profile::RequestRate;
use gshare_core::{BasisPoints, Duration};

/// The fixed-point 1 of logarithms.
const ONE: u64 = 1 << 16;

/// The logarithm of `e`.
const LOG_E: u128 = 94_548;

/// Requests, servers, and the allowed wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queue {
    load: u64,
    /// The logarithm of `load`.
    log: u64,
    /// Requests per second of one server, in thousandths; at least 1.
    server: u64,
    /// Fall of the waiting share's logarithm for each thousandth of a request per second between load and capacity, in parts of
    /// [`DECAY`].
    decay: u64,
    late: Late,
}

/// The tolerated part of late requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct Late {
    /// The logarithm of 1 over the part.
    need: u64,
}

impl Late {
    /// `share` is more than 0.
    pub(super) fn new(share: BasisPoints) -> Self {
        Self { need: log2(10_000).saturating_sub(log2(u64::from(share.get()))) }
    }
}

/// The logarithm of a number to base 2, rounded down; 0 for 0.
fn log2(number: u64) -> u64 {
    let Some(whole) = number.checked_ilog2() else { return 0 };
    let (mut log, mut rest) = (u64::from(whole) * ONE, (number << (63 - whole)) >> 32);
    // `rest` is 1 to 2 in units of 2^31: each squaring yields one bit of the logarithm.
    for bit in (0..16).rev() {
        rest = (rest * rest) >> 31;
        if rest >= 1 << 32 {
            rest >>= 1;
            log += 1 << bit;
        }
    }
    log
}

/// `a * b / c`; `c` is more than 0. Division in 128 bits costs ten times as much, and is seldom needed.
fn scaled(a: u64, b: u64, c: u64) -> u128 {
    match a.checked_mul(b) {
        Some(product) => u128::from(product / c),
        None => u128::from(a) * u128::from(b) / u128::from(c),
    }
}

fn root(number: u128) -> u64 {
    // The root of a number of 128 bits has at most 64.
    u64::try_from(number).map_or_else(|_| u64::try_from(number.isqrt()).unwrap_or(u64::MAX), u64::isqrt)
}

impl Queue {
    /// A queue of `load` requests per second at servers of `server` each, with arrivals of this index of dispersion in
    /// thousandths. No more than `late` of the requests may wait longer than `wait`.
    pub(super) fn new(
        load: RequestRate,
        server: RequestRate,
        wait: Duration,
        dispersion: u64,
        late: Late,
    ) -> Self {
        let (load, server) = (load.as_milli(), server.as_milli().max(1));
        let decay = u128::from(wait.as_nanos()) * 2 * LOG_E / u128::from(dispersion.max(1));
        // At a larger decay, a thousandth of a request more already meets any need.
        let decay = u64::try_from(decay).unwrap_or(u64::MAX);
        Self { load, log: log2(load), server, decay, late }
    }

    /// Whether no more than `late` wait too long at this capacity. Monotone.
    pub(super) fn fits(&self, capacity: RequestRate) -> bool {
        let (load, capacity) = (self.load, capacity.as_milli());
        if load == 0 {
            return true;
        }
        if capacity <= load {
            return false;
        }
        let decayed = scaled(capacity - load, self.decay, DECAY);
        if decayed >= u128::from(self.late.need) {
            return true;
        }
        // In units of a logarithm: sqrt(2 (c + 1)) - 1 times log(capacity / load).
        let servers = scaled(capacity, ONE * ONE * 2, self.server);
        let power = root(servers + u128::from(ONE * ONE * 2)) - ONE;
        scaled(power, log2(capacity) - self.log, ONE) + decayed >= u128::from(self.late.need)
    }

    /// The smallest capacity that [fits](Self::fits), to a thousandth of a request per second.
    pub(super) fn least_capacity(&self) -> RequestRate {
        // With this much more, the decay alone is enough.
        let more = (u128::from(self.late.need) * u128::from(DECAY)).div_ceil(u128::from(self.decay.max(1)));
        let (mut low, mut high) =
            (self.load, self.load.saturating_add(u64::try_from(more).unwrap_or(u64::MAX)));
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
}

/// Thousandths of a request, ns in a second, over thousandths of the dispersion.
const DECAY: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The parameters of a queue.
    #[derive(Debug, Clone, Copy)]
    struct Made {
        load: RequestRate,
        server: RequestRate,
        wait: Duration,
        dispersion: u64,
        late: BasisPoints,
    }

    impl Made {
        fn queue(&self) -> Queue {
            Queue::new(self.load, self.server, self.wait, self.dispersion, Late::new(self.late))
        }

        /// The formula of the essay, in floating point.
        fn late(&self, capacity: f64) -> f64 {
            let (load, servers) = (self.load.as_f64(), capacity / self.server.as_f64());
            let waits = (load / capacity).powf((2.0 * (servers + 1.0)).sqrt() - 1.0);
            let left = (capacity - load) * self.wait.as_secs_f64();
            waits * (-2.0 * left / (self.dispersion as f64 / 1e3)).exp()
        }

        /// [`Queue::fits`], computed in 128 bits throughout.
        fn fits(&self, capacity: u64) -> bool {
            let load = self.load.as_milli();
            if load == 0 || capacity <= load {
                return load == 0;
            }
            let one = u128::from(ONE);
            let need = log2(10_000).saturating_sub(log2(u64::from(self.late.get())));
            let decay = u128::from(self.wait.as_nanos()) * 2 * LOG_E / u128::from(self.dispersion.max(1));
            let servers = u128::from(capacity) * one * one * 2 / u128::from(self.server.as_milli().max(1));
            let power = (servers + one * one * 2).isqrt() - one;
            let idle = power * u128::from(log2(capacity) - log2(load)) / one;
            idle + u128::from(capacity - load).saturating_mul(decay) / 1_000_000_000 >= u128::from(need)
        }
    }

    fn made(load: u64, dispersion: u64) -> Made {
        let (load, server) = (RequestRate::per_second(load), RequestRate::from_milli(34_500));
        let late = BasisPoints::from_percent(1).unwrap();
        Made { load, server, wait: Duration::from_millis(40), dispersion, late }
    }

    #[test]
    fn the_least_capacity_is_what_the_formula_says() {
        for load in [1, 5, 20, 30, 110, 900, 40_000] {
            for dispersion in [1, 300, 1_000, 6_000] {
                let made = made(load, dispersion);
                let (queue, least) = (made.queue(), made.queue().least_capacity());
                assert!(queue.fits(least) && !queue.fits(RequestRate::from_milli(least.as_milli() - 1)));
                let (at, below) = (made.late(least.as_f64()), made.late(least.as_f64() - 0.1));
                assert!(
                    at < 0.010_05 && (below > 0.009_95 || least.as_f64() - 0.2 < made.load.as_f64()),
                    "{load} {dispersion}: {at} {below}"
                );
            }
        }
    }

    #[test]
    fn the_examples_of_the_essay() {
        assert!((made(20, 1_000).late(34.5) - 0.18).abs() < 0.005);
        assert!((made(20, 1_000).late(69.0) - 0.003).abs() < 0.000_5);
        assert!(!made(20, 1_000).queue().fits(RequestRate::from_milli(34_500)));
        assert!(made(20, 1_000).queue().fits(RequestRate::per_second(69)));
        assert!(made(0, 1_000).queue().fits(RequestRate::ZERO));
    }

    #[test]
    fn extremes_neither_overflow_nor_hang() {
        let most = RequestRate::from_milli(u64::MAX);
        let mut made = made(1, u64::MAX);
        (made.load, made.wait) = (most, Duration::from_nanos(u64::MAX));
        assert!(!made.queue().fits(most));
        assert_eq!(made.queue().least_capacity(), most);
        (made.load, made.server) = (RequestRate::from_milli(1), RequestRate::from_milli(1));
        assert!(made.queue().fits(most));
        made.wait = Duration::ZERO;
        assert!(made.queue().least_capacity() > made.load);
    }

    proptest! {
        /// The shortcuts, early answers and 64 bits where they suffice, agree with 128 bits throughout.
        #[test]
        fn short_numbers_change_no_answer(
            load in (0u32..64, any::<u64>()).prop_map(|(shift, number)| number >> shift),
            server in (0u32..64, any::<u64>()).prop_map(|(shift, number)| number >> shift),
            wait in (0u32..64, any::<u64>()).prop_map(|(shift, number)| number >> shift),
            dispersion in (0u32..64, any::<u64>()).prop_map(|(shift, number)| number >> shift),
            late in 1u16..=10_000,
            more in prop::collection::vec((0u32..64, any::<u64>()), 1..20),
        ) {
            let made = Made {
                load: RequestRate::from_milli(load),
                server: RequestRate::from_milli(server),
                wait: Duration::from_nanos(wait),
                dispersion,
                late: BasisPoints::new(late).unwrap(),
            };
            let (queue, least) = (made.queue(), made.queue().least_capacity().as_milli());
            for (shift, number) in more {
                let capacity = load.saturating_add(number >> shift);
                prop_assert_eq!(queue.fits(RequestRate::from_milli(capacity)), made.fits(capacity));
            }
            prop_assert!(least == 0 || least == load || !made.fits(least - 1));
        }

        /// A capacity fits exactly where the least capacity is not above it.
        #[test]
        fn fits_is_at_least_the_least_capacity(
            load in 0u64..1 << 40,
            server in 1u64..1 << 40,
            wait in 1_000u64..1 << 40,
            dispersion in 0u64..100_000,
            late in 1u16..10_000,
            capacities in prop::collection::vec(0u64..1 << 41, 1..20),
        ) {
            let (rate, wait) = (RequestRate::from_milli, Duration::from_nanos(wait));
            let late = Late::new(BasisPoints::new(late).unwrap());
            let queue = Queue::new(rate(load), rate(server), wait, dispersion, late);
            let least = queue.least_capacity().as_milli();
            for capacity in capacities.into_iter().flat_map(|one| [one, least + one % 500, least.saturating_sub(one % 500)]) {
                prop_assert_eq!(queue.fits(rate(capacity)), capacity >= least);
            }
        }
    }

    #[test]
    fn logarithms_are_those_of_the_library() {
        for number in [1, 2, 3, 7, 999, 1_000_003, u64::MAX] {
            let off = log2(number) as f64 / ONE as f64 - (number as f64).log2();
            assert!(off.abs() < 1e-4, "{number}: {off}");
        }
    }
}
