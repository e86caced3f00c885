//! GPU time that a client may still be granted, worked out from its totals alone.
//!
//! # Problem
//! Whether a scheduler keeps a limit cannot be asked of its own ledger. This account is kept beside it, from the events and actions that
//! crossed the boundary, and is slow and literal: everything is added up again whenever it is asked for.
//!
//! # Algorithm
//! The time that a token allows counts for its window, time beyond that for the window in which it is heard. At the end of a window, `carry' = max(0, carry + charged - limit)`: overuse is
//! debt for the next window, unused time is not saved up. In window `w`, `remain = limit - carry - charged`.
//!
//! One thing may be had later: the time of its request that a client missed in windows at whose end it held a token or asked for one,
//! since others may have overrun theirs. It is at most one request for each window that the longest token of its GPU lasted, and one
//! more. A scheduler may add it to request and limit of the next window, or leave it. So every balance has two readings, [`Bound::Least`]
//! and [`Bound::Most`]. A limit that changes within a window has two readings as well: overuse is at least the use beyond the largest
//! limit in force, at most the use beyond the smallest. A check uses the reading that can only err in the scheduler's favour.
//!
//! Example: window 100 ms, limit 30 %. 34 ms are charged in window 0. Window 1 starts with 4 ms carried, so 26 ms remain; if nothing
//! runs in it, window 2 starts with nothing carried.

use gshare_core::{Duration, Quota, QuotaRange, Timestamp};

/// Windows kept in detail; what is older is folded into one carry.
const WINDOWS_KEPT: usize = 16;

/// Which end of what is possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// The largest limit, and all that may be owed.
    Least,
    /// The smallest limit, and nothing owed.
    Most,
}

/// The windows over which quotas are settled: `[origin + k * length, origin + (k + 1) * length)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Start of window 0.
    pub origin: Timestamp,
    /// Length of each; more than 0.
    pub length: Duration,
    /// The most overuse that is carried from one window into the next.
    pub max_carry: Duration,
}

impl Windows {
    /// The window a time lies in.
    pub const fn index(&self, now: Timestamp) -> u64 {
        now.saturating_since(self.origin).as_nanos() / self.length.as_nanos()
    }

    /// First instant of a window.
    pub const fn start(&self, window: u64) -> Timestamp {
        self.origin.saturating_add(self.length.saturating_mul(window))
    }

    /// First instant after a window.
    pub const fn end(&self, window: u64) -> Timestamp {
        self.start(window + 1)
    }
}

/// The account of one client. See the [module](self).
#[derive(Debug, Clone)]
pub struct Account {
    windows: Windows,
    quota: QuotaRange,
    /// Whether it holds a token or asks for one.
    wants: bool,
    /// Requests that it may be owed at most.
    most_owed: u64,
    /// Windows in which something happened, oldest first.
    periods: Vec<Period>,
    /// The balance brought into the first of `periods`, at least and at most.
    opening: (Brought, Brought),
}

/// The balance that a window starts with.
#[derive(Debug, Clone, Copy, Default)]
struct Brought {
    carry: Duration,
    owed: Duration,
}

#[derive(Debug, Clone)]
struct Period {
    window: u64,
    /// The largest and the smallest limit in force in this window.
    largest: Quota,
    smallest: Quota,
    /// The quota at its end, which also holds for the windows after it in which nothing happened.
    after: QuotaRange,
    /// Whether the client was there with this quota from its start, and wanted more at its end.
    whole: bool,
    wanted: bool,
    charged: Duration,
}

impl Account {
    /// A client that joins at `now`.
    pub fn new(windows: Windows, now: Timestamp, quota: QuotaRange) -> Self {
        let period = Period { whole: false, ..Period::new(windows.index(now), quota) };
        Self {
            windows,
            quota,
            wants: false,
            most_owed: 1,
            periods: vec![period],
            opening: Default::default(),
        }
    }

    /// The windows it is settled over.
    pub const fn windows(&self) -> Windows {
        self.windows
    }

    /// The quota is another from `now` on.
    pub fn change_quota(&mut self, now: Timestamp, quota: QuotaRange) {
        let period = self.period(self.windows.index(now));
        period.largest = period.largest.max(quota.limit());
        period.smallest = period.smallest.min(quota.limit());
        (period.after, period.whole) = (quota, false);
        self.quota = quota;
    }

    /// Whether the client holds a token or asks for one, from `now` on.
    pub fn set_wants(&mut self, now: Timestamp, wants: bool) {
        if wants != self.wants {
            self.wants = wants;
            self.period(self.windows.index(now)).wanted = wants;
        }
    }

    /// A token of the client's GPU lasted this long.
    pub fn lasted(&mut self, longest: Duration) {
        let windows = 1 + longest.as_nanos().div_ceil(self.windows.length.as_nanos());
        self.most_owed = self.most_owed.max(windows);
    }

    /// GPU time is charged at `now`.
    pub fn charge(&mut self, now: Timestamp, more: Duration) {
        let period = self.period(self.windows.index(now));
        period.charged = period.charged.saturating_add(more);
    }

    /// GPU time charged to a window without the overuse that is carried into it.
    pub fn charged(&self, window: u64) -> Duration {
        let period = self.periods.iter().find(|period| period.window == window);
        period.map_or(Duration::ZERO, |period| period.charged)
    }

    /// The overuse that is carried into a window, which must not be older than those kept.
    pub fn carried(&self, window: u64, bound: Bound) -> Duration {
        self.brought(window, bound).carry
    }

    /// The time that may be owed in a window, which must not be older than those kept: at [`Bound::Most`], nothing.
    pub fn owed(&self, window: u64, bound: Bound) -> Duration {
        self.brought(window, bound).owed
    }

    fn brought(&self, window: u64, bound: Bound) -> Brought {
        let length = self.windows.length;
        let mut brought = match bound {
            Bound::Least => self.opening.0,
            Bound::Most => self.opening.1,
        };
        for (period, next) in self.periods.iter().zip(self.periods.iter().skip(1).map(Some).chain([None])) {
            if period.window >= window {
                break;
            }
            let limit = match bound {
                Bound::Least => period.largest,
                Bound::Most => period.smallest,
            };
            let used = brought.carry + period.charged;
            let request = period.after.request().of(length);
            let may_be_owed = bound == Bound::Least && period.wanted;
            let most = request.saturating_mul(self.most_owed);
            let missed = (request + brought.owed).saturating_sub(used).min(most);
            let carry = used.saturating_sub(limit.of(length) + brought.owed).min(self.windows.max_carry);
            let owed = if may_be_owed && period.whole { missed } else { Duration::ZERO };
            brought = Brought { carry, owed };
            let idle = next.map_or(window, |next| next.window.min(window)) - period.window - 1;
            if idle > 0 {
                let owed = if may_be_owed { most } else { Duration::ZERO };
                let paid = period.after.limit().of(length).saturating_add(owed).saturating_mul(idle);
                brought = Brought { carry: brought.carry.saturating_sub(paid), owed };
            }
        }
        brought
    }

    /// GPU time that the client may still be granted in the window of `now`, nothing of which is granted.
    pub fn remain(&self, now: Timestamp, bound: Bound) -> Duration {
        let window = self.windows.index(now);
        let Brought { carry, owed } = self.brought(window, bound);
        let limit = self.quota.limit().of(self.windows.length);
        (limit + owed).saturating_sub(self.charged(window)).saturating_sub(carry)
    }

    /// When the limit has paid back what may be carried into the window of `now`, if it does so at its pace: at most the end of
    /// that window, and its start where nothing is carried.
    pub fn paid_back(&self, now: Timestamp) -> Timestamp {
        let window = self.windows.index(now);
        let changed = self.periods.iter().find(|period| period.window == window);
        let limit = changed.map_or(self.quota.limit(), |period| period.smallest);
        let carried = self.carried(window, Bound::Most);
        self.windows.start(window).saturating_add(self.pace(carried, limit))
    }

    /// The limit that has been in force since the window of `now` began; zero where it began without the client, or with another.
    pub fn standing_limit(&self, now: Timestamp) -> Quota {
        let window = self.windows.index(now);
        let changed = self.periods.iter().any(|period| period.window == window && !period.whole);
        if changed { Quota::ZERO } else { self.quota.limit() }
    }

    /// The part of a window in which a limit pays overuse back; at most the whole.
    fn pace(&self, overuse: Duration, limit: Quota) -> Duration {
        let limit = limit.of(self.windows.length);
        self.windows.length.scaled(overuse.min(limit).as_nanos(), limit.as_nanos())
    }

    /// The start of the first window after that of `now` in which something remains, if nothing more is used till then.
    pub fn next_remain(&self, now: Timestamp, bound: Bound) -> Timestamp {
        let next = self.windows.index(now) + 1;
        let carry = self.carried(next, bound);
        let owed = match bound {
            Bound::Least => self.quota.request(),
            Bound::Most => Quota::ZERO,
        };
        let paid = self.quota.limit().of(self.windows.length) + owed.of(self.windows.length);
        self.windows.start(next.saturating_add(carry.as_nanos() / paid.as_nanos().max(1)))
    }

    /// The entry of a window.
    fn period(&mut self, window: u64) -> &mut Period {
        let at = self.periods.partition_point(|period| period.window < window);
        if self.periods.get(at).is_none_or(|period| period.window != window) {
            let quota = at.checked_sub(1).map_or(self.quota, |before| self.periods[before].after);
            self.periods.insert(at, Period { wanted: self.wants, ..Period::new(window, quota) });
            if self.periods.len() > WINDOWS_KEPT && at > 0 {
                let second = self.periods[1].window;
                self.opening = (self.brought(second, Bound::Least), self.brought(second, Bound::Most));
                self.periods.remove(0);
                return &mut self.periods[at - 1];
            }
        }
        &mut self.periods[at]
    }
}

impl Period {
    const fn new(window: u64, quota: QuotaRange) -> Self {
        let limit = quota.limit();
        Self {
            window,
            largest: limit,
            smallest: limit,
            after: quota,
            whole: true,
            wanted: false,
            charged: Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: Windows = Windows {
        origin: Timestamp::ZERO,
        length: Duration::from_millis(100),
        max_carry: Duration::from_secs(10),
    };

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn quota(percent: u16) -> QuotaRange {
        let quota = Quota::from_percent(percent).unwrap();
        QuotaRange::new(quota, quota).unwrap()
    }

    fn account(percent: u16) -> Account {
        Account::new(WINDOWS, at(0), quota(percent))
    }

    /// A client that misses 20 ms of 30 may have them in the next window, and what it then misses of those in the one after, but
    /// never more than its request, unless a token lasted longer than a window.
    #[test]
    fn missed_time_may_be_had_later() {
        let mut account = account(30);
        account.set_wants(at(0), true);
        assert_eq!(account.owed(1, Bound::Least), Duration::ZERO, "it came in the window");
        account.charge(at(130), millis(10));
        assert_eq!([Bound::Least, Bound::Most].map(|bound| account.owed(2, bound)), [millis(20), millis(0)]);
        assert_eq!(account.remain(at(200), Bound::Least), millis(50));
        assert_eq!(account.remain(at(200), Bound::Most), millis(30));
        account.charge(at(250), millis(45));
        assert_eq!(account.owed(3, Bound::Least), millis(5));
        assert_eq!(account.carried(3, Bound::Least), Duration::ZERO);
        assert_eq!(account.owed(9, Bound::Least), millis(30));
        account.lasted(millis(150));
        assert_eq!(account.owed(9, Bound::Least), millis(90));
        account.set_wants(at(310), false);
        assert_eq!(account.owed(4, Bound::Least), Duration::ZERO);
    }

    #[test]
    fn overuse_is_carried_and_idle_windows_pay_it_off() {
        let mut account = account(30);
        account.charge(at(40), millis(34));
        assert_eq!(account.remain(at(41), Bound::Most), Duration::ZERO);
        assert_eq!(account.remain(at(100), Bound::Most), millis(26));
        assert_eq!(account.remain(at(200), Bound::Most), millis(30));
        account.charge(at(299), millis(100));
        assert_eq!(account.carried(3, Bound::Most), millis(70));
        assert_eq!(account.next_remain(at(299), Bound::Most), at(500), "30 + 30 paid in windows 3 and 4");
        assert_eq!(account.remain(at(500), Bound::Most), millis(20));
    }

    #[test]
    fn a_limit_that_is_cut_leaves_the_debt_open() {
        let mut account = account(50);
        account.charge(at(41), millis(40));
        account.change_quota(at(50), quota(10));
        assert_eq!(account.remain(at(60), Bound::Most), Duration::ZERO);
        assert_eq!(account.remain(at(100), Bound::Least), millis(10));
        assert_eq!(account.carried(1, Bound::Most), millis(30));
    }

    #[test]
    fn folding_old_windows_changes_no_carry() {
        let mut account = account(10);
        for window in 0..40 {
            account.charge(at(100 * window + 11), millis(11));
        }
        assert_eq!(account.carried(40, Bound::Most), millis(40));
    }
}
