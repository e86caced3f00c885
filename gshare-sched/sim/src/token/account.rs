//! GPU time that a client may still be granted, worked out from its leases alone.
//!
//! # Problem
//! Whether a scheduler keeps a limit cannot be asked of its own ledger. This one is kept beside it, from the events
//! and actions that crossed the boundary, and is slow and literal: nothing is updated in place, everything is added
//! up again whenever it is asked for.
//!
//! # Algorithm
//! A lease belongs to the window in which it was granted and is charged to it. At the end of a window,
//! `carry' = max(0, carry + charged - limit)`: overuse is debt for the next window, unused time is not saved up.
//! In window `w`, `remain = limit - carry - charged`.
//!
//! One thing may be had later: what a client that held a token or asked for one at a window's end missed of its request there,
//! at most one request, since others may have overrun theirs. A scheduler may add it to request and limit of the
//! next window, or leave it. Clients that came or got another share in a window are owed nothing of it.
//!
//! What a lease is charged is not always known: one that was replaced and has not been returned used at least what was
//! reported and at most (as far as anyone knows) its budget. So every sum is kept twice, at [`Bound::Least`] and
//! [`Bound::Most`]; they meet when the lease is returned and the client was owed nothing. A check uses the bound that can only
//! err in the scheduler's favour.
//!
//! Example: window 100 ms, limit 30 %. Window 0: a lease of 30 ms of which 34 ms were used. Window 1 starts with 4 ms
//! carried, so 26 ms remain; if nothing runs in it, window 2 starts with nothing carried.
//!
//! A limit that changes within a window leaves open what was overuse in it: at least what is above the largest limit
//! in force, at most what is above the smallest. A return that comes more than one window late may be forgotten, or be
//! charged to the window in which it comes as far as it is more than was known. Both widen the bounds, never narrow
//! them.

use gshare_core::{Duration, LeaseId, Quota, QuotaRange, Timestamp};

/// Windows kept in detail; what is older is folded into one carry, and a return that comes still later is not seen.
const WINDOWS_KEPT: usize = 16;

/// Which end of what is possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Charge no more than was surely used, and grant all that may be owed.
    Least,
    /// Charge all that may have been used, and take nothing for owed.
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
    charges: Vec<Charge>,
}

#[derive(Debug, Clone, Copy)]
struct Charge {
    lease: LeaseId,
    least: Duration,
    most: Duration,
    /// The charge came too late for the window of the lease, and may count in the one in which it came.
    late: bool,
}

impl Account {
    /// A client that joins at `now`.
    pub fn new(windows: Windows, now: Timestamp, quota: QuotaRange) -> Self {
        let period = Period { whole: false, ..Period::new(windows.index(now), quota) };
        Self { windows, quota, wants: false, periods: vec![period], opening: Default::default() }
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

    /// A lease was granted at `now`, or extended, with `budget` in all; `reported` of it is known to be used.
    pub fn granted(&mut self, now: Timestamp, lease: LeaseId, budget: Duration, reported: Duration) {
        let window = self.windows.index(now);
        let period = self.period(window);
        period.charges.retain(|charge| charge.lease != lease);
        period.charges.push(Charge { lease, least: reported, most: budget.max(reported), late: false });
    }

    /// Notes a report at `now` that `used` of a lease's `budget` is used, and that it may be used further.
    pub fn reported(&mut self, now: Timestamp, lease: LeaseId, budget: Duration, used: Duration) {
        self.set(now, lease, used, budget.max(used));
    }

    /// Notes the use of a lease in all, as told at `now`.
    pub fn settled(&mut self, now: Timestamp, lease: LeaseId, used: Duration) {
        self.set(now, lease, used, used);
    }

    /// GPU time charged to a window without the overuse that is carried into it.
    pub fn charged(&self, window: u64, bound: Bound) -> Duration {
        self.periods.iter().filter(|period| period.window == window).map(|period| period.charged(bound)).sum()
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
            let used = brought.carry + period.charged(bound);
            let request = period.after.request().of(length);
            let may_be_owed = bound == Bound::Least && period.wanted;
            let missed = (request + brought.owed).saturating_sub(used).min(request);
            let carry = used.saturating_sub(limit.of(length) + brought.owed).min(self.windows.max_carry);
            let owed = if may_be_owed && period.whole { missed } else { Duration::ZERO };
            brought = Brought { carry, owed };
            let idle = next.map_or(window, |next| next.window.min(window)) - period.window - 1;
            if idle > 0 {
                let owed = if may_be_owed { request } else { Duration::ZERO };
                let paid = period.after.limit().of(length).saturating_add(owed).saturating_mul(idle);
                brought = Brought { carry: brought.carry.saturating_sub(paid), owed };
            }
        }
        brought
    }

    /// GPU time that the client may still be granted in the window of `now` under its present limit, when
    /// `lease` (the one to be extended) is left out.
    pub fn remain_without(&self, now: Timestamp, lease: Option<LeaseId>, bound: Bound) -> Duration {
        let window = self.windows.index(now);
        let charges =
            self.periods.iter().filter(|period| period.window == window).flat_map(|period| &period.charges);
        let others: Duration =
            charges.filter(|charge| Some(charge.lease) != lease).map(|charge| charge.at(bound)).sum();
        let Brought { carry, owed } = self.brought(window, bound);
        (self.quota.limit().of(self.windows.length) + owed).saturating_sub(others).saturating_sub(carry)
    }

    /// GPU time that the client may still be granted in the window of `now`.
    pub fn remain(&self, now: Timestamp, bound: Bound) -> Duration {
        self.remain_without(now, None, bound)
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

    fn set(&mut self, now: Timestamp, lease: LeaseId, least: Duration, most: Duration) {
        let window = self.windows.index(now);
        let mut late = None;
        for period in &mut self.periods {
            let charges = period.charges.iter_mut().filter(|charge| charge.lease == lease && !charge.late);
            for charge in charges {
                if period.window + 1 < window {
                    late = Some(most.saturating_sub(charge.least));
                    charge.least = charge.least.min(least);
                } else {
                    (charge.least, charge.most) = (least, most);
                }
            }
        }
        if let Some(most) = late {
            self.period(window).charges.push(Charge { lease, least: Duration::ZERO, most, late: true });
        }
    }

    /// The entry of a window that is not older than the newest there is.
    fn period(&mut self, window: u64) -> &mut Period {
        if self.periods.last().is_none_or(|last| last.window < window) {
            self.periods.push(Period { wanted: self.wants, ..Period::new(window, self.quota) });
            if self.periods.len() > WINDOWS_KEPT {
                let second = self.periods[1].window;
                self.opening = (self.brought(second, Bound::Least), self.brought(second, Bound::Most));
                self.periods.remove(0);
            }
        }
        let last = self.periods.len() - 1;
        &mut self.periods[last]
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
            charges: Vec::new(),
        }
    }

    fn charged(&self, bound: Bound) -> Duration {
        self.charges.iter().map(|charge| charge.at(bound)).sum()
    }
}

impl Charge {
    const fn at(&self, bound: Bound) -> Duration {
        match bound {
            Bound::Least => self.least,
            Bound::Most => self.most,
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
    /// never more than its request.
    #[test]
    fn what_is_missed_while_more_is_wanted_may_be_had_later() {
        let mut account = account(30);
        account.set_wants(at(0), true);
        assert_eq!(account.owed(1, Bound::Least), Duration::ZERO, "it came in the window");
        account.granted(at(110), LeaseId::new(1), millis(10), Duration::ZERO);
        account.settled(at(130), LeaseId::new(1), millis(10));
        assert_eq!([Bound::Least, Bound::Most].map(|bound| account.owed(2, bound)), [millis(20), millis(0)]);
        assert_eq!(account.remain(at(200), Bound::Least), millis(50));
        assert_eq!(account.remain(at(200), Bound::Most), millis(30));
        account.granted(at(200), LeaseId::new(2), millis(45), Duration::ZERO);
        account.settled(at(250), LeaseId::new(2), millis(45));
        assert_eq!(account.owed(3, Bound::Least), millis(5));
        assert_eq!(account.carried(3, Bound::Least), Duration::ZERO);
        assert_eq!(account.owed(9, Bound::Least), millis(30));
        account.set_wants(at(310), false);
        assert_eq!(account.owed(4, Bound::Least), Duration::ZERO);
    }

    #[test]
    fn overuse_is_carried_and_idle_windows_pay_it_off() {
        let mut account = account(30);
        account.granted(at(5), LeaseId::new(1), millis(30), Duration::ZERO);
        assert_eq!(account.remain(at(6), Bound::Most), Duration::ZERO);
        assert_eq!(account.remain(at(6), Bound::Least), millis(30));
        account.settled(at(40), LeaseId::new(1), millis(34));
        assert_eq!(account.remain(at(100), Bound::Most), millis(26));
        assert_eq!(account.remain(at(200), Bound::Most), millis(30));
        account.granted(at(205), LeaseId::new(2), millis(30), Duration::ZERO);
        account.settled(at(299), LeaseId::new(2), millis(100));
        assert_eq!(account.carried(3, Bound::Most), millis(70));
        assert_eq!(account.next_remain(at(210), Bound::Most), at(500), "30 + 30 paid in windows 3 and 4");
        assert_eq!(account.remain(at(500), Bound::Most), millis(20));
    }

    #[test]
    fn a_limit_that_is_cut_leaves_the_debt_open() {
        let mut account = account(50);
        account.granted(at(0), LeaseId::new(1), millis(40), Duration::ZERO);
        account.settled(at(41), LeaseId::new(1), millis(40));
        account.change_quota(at(50), quota(10));
        assert_eq!(account.remain(at(60), Bound::Most), Duration::ZERO);
        assert_eq!(account.remain(at(100), Bound::Least), millis(10));
        assert_eq!(account.carried(1, Bound::Most), millis(30));
    }

    #[test]
    fn a_return_that_is_a_window_late_changes_what_is_carried() {
        let mut account = account(10);
        account.granted(at(90), LeaseId::new(1), millis(10), Duration::ZERO);
        account.settled(at(105), LeaseId::new(1), millis(14));
        assert_eq!(account.remain(at(105), Bound::Least), millis(6));
        account.settled(at(205), LeaseId::new(1), millis(10));
        assert_eq!(
            [Bound::Least, Bound::Most].map(|bound| account.carried(1, bound)),
            [millis(0), millis(4)]
        );
    }

    #[test]
    fn folding_old_windows_changes_no_carry() {
        let mut account = account(10);
        for window in 0..40 {
            account.granted(at(100 * window), LeaseId::new(window), millis(10), Duration::ZERO);
            account.settled(at(100 * window + 11), LeaseId::new(window), millis(11));
        }
        assert_eq!(account.carried(40, Bound::Most), millis(40));
    }
}
