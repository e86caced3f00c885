//! A share kept by a process's own clock while no daemon serves it ([`OnDaemonLoss::Open`]).
//!
//! [`OnDaemonLoss::Open`]: gshare_core::wire::OnDaemonLoss::Open

use gshare_core::{Duration, Quota, Timestamp};

/// The total time allowed by the share. Each window adds the limit to the smaller of the used and the allowed total. Overuse is
/// thus paid back, including overuse of the last daemon's permission, and unused time is not saved up.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalShare {
    limit: Duration,
    window: Duration,
    window_end: Timestamp,
    allowed: Duration,
}

impl LocalShare {
    /// A share of `limit` in each `window`, from `now` on. `allowed`: the total allowed before.
    pub(super) fn new(now: Timestamp, limit: Quota, window: Duration, allowed: Duration) -> Self {
        assert!(!window.is_zero(), "a share without a window");
        Self { limit: limit.of(window), window, window_end: now, allowed }
    }

    /// The total allowed now after a use of `used`, and the time of its next change.
    pub(super) fn allowed(&mut self, now: Timestamp, used: Duration) -> (Duration, Timestamp) {
        if now >= self.window_end {
            let windows = now.saturating_since(self.window_end).as_nanos() / self.window.as_nanos() + 1;
            let paid_back = self.allowed.saturating_add(self.limit.saturating_mul(windows));
            self.allowed = paid_back.min(used.saturating_add(self.limit));
            self.window_end = self.window_end.saturating_add(self.window.saturating_mul(windows));
        }
        (self.allowed, self.window_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(ms)
    }

    #[test]
    fn each_window_allows_the_limit_less_what_was_overused_before() {
        let limit = Quota::from_percent(10).unwrap();
        let mut share = LocalShare::new(at(0), limit, ms(100), Duration::ZERO);
        assert_eq!(share.allowed(at(0), Duration::ZERO), (ms(10), at(100)));
        assert_eq!(share.allowed(at(99), ms(35)), (ms(10), at(100)));
        assert_eq!(share.allowed(at(100), ms(35)), (ms(20), at(200)));
        assert_eq!(share.allowed(at(450), ms(35)), (ms(45), at(500)), "idle windows are not saved up");
        // The last daemon allowed 30 ms, and 55 were used, so three windows pay for the overuse.
        let mut share = LocalShare::new(at(7), limit, ms(100), ms(30));
        let allowed = [7, 107, 207, 307].map(|now| share.allowed(at(now), ms(55)).0);
        assert_eq!(allowed, [ms(40), ms(50), ms(60), ms(65)]);
    }

    proptest! {
        /// Compares with windows counted one by one.
        #[test]
        fn windows_can_be_counted_one_by_one(
            looks in prop::collection::vec((0u64..350, 0u64..40), 1..60),
            percent in 1u16..=100,
            before in 0u64..50,
        ) {
            let mut share = LocalShare::new(at(0), Quota::from_percent(percent).unwrap(), ms(100), ms(before));
            let (mut now, mut used, mut end, mut allowed) = (0, 60, 0, before);
            for (pause, more) in looks {
                now += pause;
                while end <= now {
                    allowed = (allowed + u64::from(percent)).min(used + u64::from(percent));
                    end += 100;
                }
                prop_assert_eq!(share.allowed(at(now), ms(used)), (ms(allowed), at(end)));
                used += more;
            }
        }
    }
}
