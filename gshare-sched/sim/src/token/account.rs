//! The GPU time that a client may still be granted, derived from its totals alone.
//!
//! # Problem
//! A scheduler's own ledger cannot show whether the scheduler keeps a limit. This account stands beside the ledger and uses only
//! the events and actions that crossed the boundary. It is slow and literal, and adds everything up again at each question.
//!
//! # Algorithm
//! GPU time within a token's allowance counts for the window of the token, and GPU time beyond it for the window of the report. At
//! the end of a window, `carry' = max(0, carry + charged - limit)`: overuse is debt for the next window, and unused time is not
//! saved up. In window `w`, `remain = limit - carry - charged`.
//!
//! One kind of time may come later: a client's missed part of its request, if the client held a token or asked for one at the end
//! of the window, since other clients may have overrun. The owed time is at most one request for each window of the longest
//! token on its GPU, and one more. A request that changes within a window counts by the time for which it was in force. A scheduler may
//! add the owed time to request and limit of the next window, or drop it, so every balance has two readings, [`Bound::Least`] and
//! [`Bound::Most`]. A limit with a change within a window has two readings as well: overuse is at least the use beyond the largest limit
//! in force, and at most the use beyond the smallest. A check uses the reading
//! that can only err in the scheduler's favour.
//!
//! Example: window 100 ms, limit 30 %. 34 ms are charged in window 0. Window 1 starts with 4 ms carried, so 26 ms remain; if nothing
//! runs in it, window 2 starts with nothing carried.

use gshare_core::{Duration, Quota, QuotaRange, Timestamp};

/// The number of windows kept in detail; older windows are folded into one carry.
const WINDOWS_KEPT: usize = 16;

/// The end of the range of possible balances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// The largest limit, and all time possibly owed.
    Least,
    /// The smallest limit, and no owed time.
    Most,
}

/// The windows for the settlement of quotas: `[origin + k * length, origin + (k + 1) * length)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// The start of window 0.
    pub origin: Timestamp,
    /// The length of each window; more than 0.
    pub length: Duration,
    /// The most overuse carried from one window into the next.
    pub max_carry: Duration,
}

impl Windows {
    /// The window containing a time.
    pub const fn index(&self, now: Timestamp) -> u64 {
        now.saturating_since(self.origin).as_nanos() / self.length.as_nanos()
    }

    /// The first instant of a window.
    pub const fn start(&self, window: u64) -> Timestamp {
        self.origin.saturating_add(self.length.saturating_mul(window))
    }

    /// The first instant after a window.
    pub const fn end(&self, window: u64) -> Timestamp {
        self.start(window + 1)
    }
}

/// The account of one client. See the [module](self).
#[derive(Debug, Clone)]
pub struct Account {
    windows: Windows,
    quota: QuotaRange,
    /// Whether the client holds a token or asks for one.
    wants: bool,
    /// The most requests possibly owed to the client.
    most_owed: u64,
    /// The windows with any event, oldest first.
    periods: Vec<Period>,
    /// The balance brought into the first of `periods`, at least and at most.
    opening: (Brought, Brought),
}

/// The balance at the start of a window.
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
    /// The quota at the window's end, which also holds for the following windows without any event.
    after: QuotaRange,
    /// The requests of this window, each for its part of the window.
    request: Duration,
    /// Whether the client was present from the window's start, and with this quota, and whether it wanted more at the end.
    present: bool,
    whole: bool,
    wanted: bool,
    charged: Duration,
}

impl Account {
    /// The account of a client that joins at `now`.
    pub fn new(windows: Windows, now: Timestamp, quota: QuotaRange) -> Self {
        let request = quota.request().of(windows.length);
        let period =
            Period { whole: false, present: false, ..Period::new(windows.index(now), quota, request) };
        Self {
            windows,
            quota,
            wants: false,
            most_owed: 1,
            periods: vec![period],
            opening: Default::default(),
        }
    }

    /// The windows of the account's settlement.
    pub const fn windows(&self) -> Windows {
        self.windows
    }

    /// Changes the quota from `now` on.
    pub fn change_quota(&mut self, now: Timestamp, quota: QuotaRange) {
        let window = self.windows.index(now);
        let left = self.windows.end(window).saturating_since(now);
        let old = self.quota.request().of(left);
        let period = self.period(window);
        period.request = period.request + quota.request().of(left) - old;
        period.largest = period.largest.max(quota.limit());
        period.smallest = period.smallest.min(quota.limit());
        (period.after, period.whole) = (quota, false);
        self.quota = quota;
    }

    /// Notes whether the client holds a token or asks for one, from `now` on.
    pub fn set_wants(&mut self, now: Timestamp, wants: bool) {
        if wants != self.wants {
            self.wants = wants;
            self.period(self.windows.index(now)).wanted = wants;
        }
    }

    /// Notes the length of a token on the client's GPU.
    pub fn lasted(&mut self, longest: Duration) {
        let windows = 1 + longest.as_nanos().div_ceil(self.windows.length.as_nanos());
        self.most_owed = self.most_owed.max(windows);
    }

    /// Charges GPU time at `now`.
    pub fn charge(&mut self, now: Timestamp, more: Duration) {
        let period = self.period(self.windows.index(now));
        period.charged = period.charged.saturating_add(more);
    }

    /// GPU time charged to a window, without the overuse carried into the window.
    pub fn charged(&self, window: u64) -> Duration {
        let period = self.periods.iter().find(|period| period.window == window);
        period.map_or(Duration::ZERO, |period| period.charged)
    }

    /// The overuse carried into a window, which must not be older than the kept windows.
    pub fn carried(&self, window: u64, bound: Bound) -> Duration {
        self.brought(window, bound).carry
    }

    /// The time possibly owed in a window, which must not be older than the kept windows: nothing at [`Bound::Most`].
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
            let may_be_owed = bound == Bound::Least && period.wanted;
            let most = period.request.saturating_mul(self.most_owed);
            let missed = (period.request + brought.owed).saturating_sub(used).min(most);
            let carry = used.saturating_sub(limit.of(length) + brought.owed).min(self.windows.max_carry);
            let owed = if may_be_owed && period.present { missed } else { Duration::ZERO };
            brought = Brought { carry, owed };
            let idle = next.map_or(window, |next| next.window.min(window)) - period.window - 1;
            if idle > 0 {
                let most = period.after.request().of(length).saturating_mul(self.most_owed);
                let owed = if may_be_owed { most } else { Duration::ZERO };
                let paid = period.after.limit().of(length).saturating_add(owed).saturating_mul(idle);
                brought = Brought { carry: brought.carry.saturating_sub(paid), owed };
            }
        }
        brought
    }

    /// GPU time that the client may still be granted in the window of `now`, if nothing of it is granted yet.
    pub fn remain(&self, now: Timestamp, bound: Bound) -> Duration {
        let window = self.windows.index(now);
        let Brought { carry, owed } = self.brought(window, bound);
        let limit = self.quota.limit().of(self.windows.length);
        (limit + owed).saturating_sub(self.charged(window)).saturating_sub(carry)
    }

    /// The time by which the limit has paid back the possible overuse carried into the window of `now`, at the limit's pace: at
    /// most the end of this window, and its start without any overuse.
    pub fn paid_back(&self, now: Timestamp) -> Timestamp {
        let window = self.windows.index(now);
        let changed = self.periods.iter().find(|period| period.window == window);
        let limit = changed.map_or(self.quota.limit(), |period| period.smallest);
        let carried = self.carried(window, Bound::Most);
        self.windows.start(window).saturating_add(self.pace(carried, limit))
    }

    /// The limit in force since the start of the window of `now`; zero if the window began without the client, or with another
    /// limit.
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

    /// The start of the first later window with remaining time, if nothing more is used until then.
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
            let request = quota.request().of(self.windows.length);
            self.periods.insert(at, Period { wanted: self.wants, ..Period::new(window, quota, request) });
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
    const fn new(window: u64, quota: QuotaRange, request: Duration) -> Self {
        let limit = quota.limit();
        Self {
            window,
            largest: limit,
            smallest: limit,
            after: quota,
            request,
            whole: true,
            present: true,
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

    /// A client that misses 20 ms of 30 may have them in the next window, and the part missed again in the window after. The owed
    /// time never exceeds the request, unless a token lasted longer than a window.
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
    fn a_request_that_changes_counts_by_its_part_of_the_window() {
        let mut account = account(30);
        account.set_wants(at(0), true);
        account.charge(at(110), millis(10));
        account.change_quota(at(175), quota(70));
        assert_eq!(account.owed(2, Bound::Least), millis(30), "30 % for 75 ms and 70 % for 25, less 10 ms");
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
