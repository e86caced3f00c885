//! The GPU time of a request: the time in which its instance's share of a device was in use, split evenly over the instance's
//! requests.
//!
//! Eight requests of one batch that takes 40 ms on half of a device use 20 ms of it together, 2.5 ms each. The requests of a tenant
//! therefore never use more than its instances' guaranteed share.

use gshare_core::{Duration, Timestamp};

/// Area of a whole device: all of the time, in basis points, times all SMs.
pub(super) const WHOLE: u64 = 10_000 * 10_000;

/// The use of an instance's share by its requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct GpuTime {
    /// The guaranteed part of a device, summed over the instance's parts; a whole device has 10 000 x 10 000.
    area: u64,
    /// Area x nanoseconds of a hypothetical request present from the beginning.
    each: u128,
    counted_until: Timestamp,
}

impl GpuTime {
    pub(super) const fn new(area: u64, now: Timestamp) -> Self {
        Self { area, each: 0, counted_until: now }
    }

    /// Counts up to now, for the instance's number of requests since the last call. Returns the mark of a request that comes
    /// now.
    pub(super) fn count(&mut self, now: Timestamp, requests: usize) -> u128 {
        let passed = now.saturating_since(self.counted_until).as_nanos();
        self.counted_until = now;
        self.each += (u128::from(passed) * u128::from(self.area)).checked_div(requests as u128).unwrap_or(0);
        self.each
    }

    /// The GPU time of a request between two marks.
    pub(super) fn between(from: u128, to: u128) -> Duration {
        Duration::from_wide_nanos(to.saturating_sub(from) / u128::from(WHOLE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_an_instance_has_at_once_share_its_time() {
        let at = Timestamp::from_millis;
        // Half of the time of half of the SMs.
        let mut time = GpuTime::new(5_000 * 5_000, at(0));
        let first = time.count(at(100), 0);
        let second = time.count(at(140), 1);
        let end = time.count(at(220), 2);
        assert_eq!(GpuTime::between(first, end), Duration::from_millis(10 + 10));
        assert_eq!(GpuTime::between(second, end), Duration::from_millis(10));
        assert_eq!(first, 0, "an instance without requests uses nothing");
    }
}
