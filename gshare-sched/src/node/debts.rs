//! Debts: overuse of departed instances, still to be paid.
//!
//! # Problem
//! The token engine carries the overuse of an instance while one of its processes lives. A user with a process per job
//! leaves with each of them, and would never keep to the limit.
//!
//! # Algorithm
//! When the last process of an instance leaves a device, its overuse is kept under its user, its name and the device. The
//! debt is paid at the rate of the limit. Later processes of this user under this name get no token before it is paid.
//! Example: limit 10 %, one kernel of 5 s, then the end: the next process of the name waits for the rest of 50 s. Another
//! user of the name leaves no debt for its owner.
//!
//! # Bound
//! No process waits longer than [`MAX_WAIT`], 100 s: overuse beyond this time is forgiven. The engine carries at most 10 s
//! of overuse, so limits of 10 % and more are held in full.
//!
//! While any process of the instance is there, its account in the engine goes on and covers all its processes.
//!
//! # Cost
//! One entry per user, name and device in debt, at most as many as the daemon has clients; the smallest goes first.

use super::DeviceUuid;
use gshare_core::{Duration, Quota, Timestamp};
use std::collections::BTreeMap;

/// The longest wait for a debt.
pub const MAX_WAIT: Duration = Duration::from_secs(100);

/// User, name of the instance, and device.
pub(super) type Debtor = (u32, String, DeviceUuid);

#[derive(Debug, Clone, Copy)]
struct Debt {
    owed: Duration,
    since: Timestamp,
    /// The rate of payment.
    limit: Quota,
}

impl Debt {
    fn left(&self, now: Timestamp) -> Duration {
        self.owed.saturating_sub(self.limit.of(now.saturating_since(self.since)))
    }
}

/// Debts by user, name and device. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Debts(BTreeMap<Debtor, Debt>);

impl Debts {
    /// An instance has left with overuse. `most`: the bounds of one debt and of the number of debts.
    pub(super) fn add(
        &mut self,
        now: Timestamp,
        key: Debtor,
        owed: Duration,
        limit: Quota,
        most: (Duration, usize),
    ) {
        let before = self.0.get(&key).map_or(Duration::ZERO, |debt| debt.left(now));
        let debt =
            Debt { owed: before.saturating_add(owed).min(most.0).min(limit.of(MAX_WAIT)), since: now, limit };
        self.0.insert(key, debt);
        if self.0.len() > most.1 {
            self.0.retain(|_, debt| !debt.left(now).is_zero());
        }
        if self.0.len() > most.1
            && let Some((_, least)) = self.0.iter().map(|(key, debt)| (debt.left(now), key)).min()
        {
            let least = least.clone();
            self.0.remove(&least);
        }
    }

    /// The wait of a process that joins with this limit.
    pub(super) fn wait(&mut self, now: Timestamp, key: &Debtor, limit: Quota) -> Duration {
        let left = self.0.get(key).map_or(Duration::ZERO, |debt| debt.left(now)).min(limit.of(MAX_WAIT));
        if left.is_zero() || limit.is_zero() {
            self.0.remove(key);
            return Duration::ZERO;
        }
        self.0.insert(key.clone(), Debt { owed: left, since: now, limit });
        scaled(left, Quota::WHOLE, limit)
    }
}

/// `time * by / of`, rounded up: the time at the rate `of` for work that takes `time` at the rate `by`.
pub(super) fn scaled(time: Duration, by: Quota, of: Quota) -> Duration {
    let product = u128::from(time.as_nanos()) * u128::from(by.get());
    Duration::from_wide_nanos(product.div_ceil(u128::from(of.get().max(1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: (Duration, usize) = (Duration::from_secs(10), 3);

    fn key(name: &str) -> Debtor {
        (1000, name.to_owned(), DeviceUuid::gpu([0; 16]))
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(ms)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn percent(limit: u16) -> Quota {
        Quota::from_percent(limit).unwrap()
    }

    #[test]
    fn a_debt_is_paid_back_at_the_rate_of_the_limit() {
        let mut debts = Debts::default();
        debts.add(at(0), key("a"), ms(500), percent(10), MOST);
        assert_eq!(debts.wait(at(0), &key("b"), percent(10)), Duration::ZERO, "another one's");
        assert_eq!(debts.wait(at(1_000), &key("a"), percent(10)), ms(4_000));
        assert_eq!(debts.wait(at(2_000), &key("a"), percent(50)), ms(600), "300 ms at half the time");
        debts.add(at(2_100), key("a"), ms(50), percent(50), MOST);
        assert_eq!(debts.wait(at(2_100), &key("a"), percent(50)), ms(600), "one on top of the other");
        assert_eq!(debts.wait(at(2_700), &key("a"), percent(50)), Duration::ZERO);
        debts.add(at(3_000), key("a"), ms(60_000), percent(10), MOST);
        assert_eq!(debts.wait(at(3_000), &key("a"), percent(10)), ms(100_000), "at most 10 s are kept");
    }

    #[test]
    fn no_debt_keeps_anybody_waiting_longer_than_the_bound() {
        for points in [1, 10, 100, 1_000, 9_999] {
            let limit = Quota::new(points).unwrap();
            let mut debts = Debts::default();
            debts.add(at(0), key("a"), ms(10_000), limit, MOST);
            let wait = debts.wait(at(0), &key("a"), limit);
            assert!(wait <= MAX_WAIT && wait >= ms(10_000), "{wait} at {limit}");
            debts.add(at(0), key("a"), ms(10_000), Quota::WHOLE, MOST);
            assert!(
                debts.wait(at(0), &key("a"), limit) <= MAX_WAIT,
                "nor when the limit shrinks, at {limit}"
            );
        }
    }

    #[test]
    fn a_name_used_by_another_user_leaves_no_debt() {
        let mut debts = Debts::default();
        let (_, name, device) = key("a");
        debts.add(at(0), (65_534, name, device), ms(500), percent(10), MOST);
        assert_eq!(debts.wait(at(0), &key("a"), percent(10)), Duration::ZERO);
    }

    #[test]
    fn no_more_debts_are_kept_than_there_may_be() {
        let mut debts = Debts::default();
        for (name, owed) in [("a", 10), ("b", 30), ("c", 20), ("d", 40), ("e", 50)] {
            debts.add(at(0), key(name), ms(owed), percent(10), MOST);
        }
        assert_eq!(debts.0.keys().map(|(_, name, _)| name.as_str()).collect::<Vec<_>>(), ["b", "d", "e"]);
        debts.add(at(450), key("f"), ms(1), percent(10), MOST);
        assert_eq!(debts.0.keys().map(|(_, name, _)| name.as_str()).collect::<Vec<_>>(), ["e", "f"]);
    }
}
