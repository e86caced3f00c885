//! Limits of the cluster's tenants, checked before any pool hears of their requests.
//!
//! A tenant's requests wait in the tenant's own line while it has its full number at work, or has used its GPU time in this window
//! (GPU-enabled FaaS, section VI, here for all regimes). A request at work counts with the earlier use of its function's requests; otherwise all of a burst would be let in
//! before its first request has ended. Requests that can still meet their SLO go first, in the order of arrival, then the others in
//! the same order: as in pools ([`FractionalPool`](super::FractionalPool)), all requests behind a burst would be late otherwise.
//! The platform's `max_wait` bounds the wait of a late request.

use gshare_core::{BasisPoints, Bytes, Duration, RequestId, TenantId, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

gshare_core::config! {
    /// Bounds on the requests, processes, GPU time and memory of a tenant (GPU-enabled FaaS, section VI). The default is no limit.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
    pub struct TenantLimits {
        /// Most of its requests that are at work at once; the others wait in the tenant's line. More than 0.
        pub max_requests: u32 = u32::MAX;
        /// Most processes of instances of its functions at once, parked ones included. More than 0. A start beyond them is refused,
        /// and tried again as one without room is.
        pub max_processes: u32 = u32::MAX;
        /// Share of the time of all GPUs, settled over a minute.
        #[cfg_attr(feature = "serde", serde(rename = "gpu_time_bp"))]
        pub gpu_time: BasisPoints = BasisPoints::WHOLE;
        /// Share of the memory of all GPUs that instances of its functions may occupy.
        #[cfg_attr(feature = "serde", serde(rename = "memory_bp"))]
        pub memory: BasisPoints = BasisPoints::WHOLE;
        /// Most requests of it that may wait; one more is rejected.
        pub max_waiting: u32 = u32::MAX;
    }
}

#[derive(Debug, Default)]
struct Tenant {
    limits: TenantLimits,
    /// Requests in the line that may still be in time, by arrival.
    line: BTreeSet<(Timestamp, RequestId)>,
    /// Requests in the line that can no longer be in time, by arrival.
    late: BTreeSet<(Timestamp, RequestId)>,
    /// Times at which requests in the line become late, with their arrival. Requests that have left the line stay until then.
    latest: BTreeSet<(Timestamp, Timestamp, RequestId)>,
    /// Number of admitted requests that have not ended.
    at_work: u32,
    /// Number of requests not dispatched yet, the line included.
    waiting: u32,
    /// GPU time used in this window, with the carry from earlier windows; then the end of the window.
    used: Duration,
    /// Expected GPU time of the requests at work.
    expected: Duration,
    window_ends: Timestamp,
    /// Memory and processes of the instances of the tenant's functions.
    memory: Bytes,
    processes: u32,
}

impl Tenant {
    /// Whether any request waits in the line.
    fn has_line(&self) -> bool {
        !(self.line.is_empty() && self.late.is_empty())
    }

    /// Whether the limits of requests and GPU time let one more request in.
    fn lets_in(&mut self, now: Timestamp, devices: u32) -> bool {
        if self.at_work >= self.limits.max_requests {
            return false;
        }
        let share = u128::from(self.limits.gpu_time.get());
        let may = || {
            Duration::from_wide_nanos(u128::from(WINDOW.as_nanos()) * u128::from(devices) * share / 10_000)
        };
        if now >= self.window_ends {
            // The use beyond the share is carried over.
            let over = now.saturating_since(self.window_ends).as_nanos() / WINDOW.as_nanos();
            self.used = self.used.saturating_sub(may().saturating_mul(over.saturating_add(1)));
            self.window_ends = now.saturating_add(WINDOW);
        }
        // Before the first device a request waits in its pool for devices, unless its tenant may have no share of any.
        let least = Duration::from_nanos(u64::from(share > 0));
        share == 10_000 || self.used.saturating_add(self.expected) < may().max(least)
    }

    /// Counts a request at work.
    const fn works(&mut self, expected: Duration) {
        self.at_work += 1;
        self.expected = self.expected.saturating_add(expected);
    }

    /// The next request of the line, if it has any.
    fn pop(&mut self, now: Timestamp) -> Option<RequestId> {
        while let Some(&(latest, arrived, request)) = self.latest.first()
            && latest < now
        {
            self.latest.pop_first();
            if self.line.remove(&(arrived, request)) {
                self.late.insert((arrived, request));
            }
        }
        self.line.pop_first().or_else(|| self.late.pop_first()).map(|(_, request)| request)
    }
}

/// The window over which GPU time is settled: tens of requests.
const WINDOW: Duration = Duration::from_secs(60);

/// All tenants.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    tenants: BTreeMap<TenantId, Tenant>,
    /// Tenants with a line that waits for the end of their window.
    throttled: BTreeSet<(Timestamp, TenantId)>,
}

impl Tenants {
    pub(super) fn limit(&mut self, tenant: TenantId, limits: TenantLimits) {
        self.tenants.entry(tenant).or_default().limits = limits;
    }

    /// Whether one more of the tenant's requests may wait.
    pub(super) fn may_wait(&self, tenant: TenantId) -> bool {
        self.tenants.get(&tenant).is_none_or(|of| of.waiting < of.limits.max_waiting)
    }

    /// Lets a request in that comes now, with this GPU time expected, or adds it to its tenant's line. It cannot be in time after
    /// `latest`.
    pub(super) fn arrived(
        &mut self,
        now: Timestamp,
        (tenant, request): (TenantId, RequestId),
        latest: Timestamp,
        (devices, expected): (u32, Duration),
    ) -> bool {
        let of = self.tenants.entry(tenant).or_default();
        of.waiting = of.waiting.saturating_add(1);
        if !of.has_line() && of.lets_in(now, devices) {
            of.works(expected);
            return true;
        }
        of.line.insert((now, request));
        if latest < Timestamp::MAX {
            of.latest.insert((latest, now, request));
        }
        false
    }

    /// The next request of the tenant that may be let in. It is at work from now on, with the GPU time from `expects`.
    pub(super) fn admit(
        &mut self,
        now: Timestamp,
        tenant: TenantId,
        devices: u32,
        expects: impl FnOnce(RequestId) -> Duration,
    ) -> Option<RequestId> {
        let of = self.tenants.get_mut(&tenant)?;
        if !of.has_line() {
            return None;
        }
        if !of.lets_in(now, devices) {
            if of.at_work < of.limits.max_requests {
                self.throttled.insert((of.window_ends, tenant));
            }
            return None;
        }
        let request = of.pop(now)?;
        of.works(expects(request));
        Some(request)
    }

    /// The next tenant with an ended window.
    pub(super) fn pop_released(&mut self, now: Timestamp) -> Option<TenantId> {
        let &(at, tenant) = self.throttled.first().filter(|(at, _)| *at <= now)?;
        self.throttled.remove(&(at, tenant));
        Some(tenant)
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.throttled.first().map(|&(at, _)| at)
    }

    /// Counts a request's first dispatch.
    pub(super) fn dispatched(&mut self, tenant: TenantId) {
        if let Some(of) = self.tenants.get_mut(&tenant) {
            of.waiting = of.waiting.saturating_sub(1);
        }
    }

    /// Removes an ended request from the line. True: others are left there.
    pub(super) fn left_line(&mut self, tenant: TenantId, arrived: Timestamp, request: RequestId) -> bool {
        let Some(of) = self.tenants.get_mut(&tenant) else { return false };
        if of.line.remove(&(arrived, request)) || of.late.remove(&(arrived, request)) {
            of.waiting = of.waiting.saturating_sub(1);
        }
        of.has_line()
    }

    /// Ends an admitted request after this GPU time; `dispatched` unless it was still waiting. True: others wait in the line.
    pub(super) fn ended(
        &mut self,
        tenant: TenantId,
        expected: Duration,
        used: Duration,
        dispatched: bool,
    ) -> bool {
        let Some(of) = self.tenants.get_mut(&tenant) else { return false };
        of.at_work = of.at_work.saturating_sub(1);
        of.expected = of.expected.saturating_sub(expected);
        of.used = of.used.saturating_add(used);
        if !dispatched {
            of.waiting = of.waiting.saturating_sub(1);
        }
        of.has_line()
    }

    /// Whether an instance with this memory and these processes keeps within the tenant's part of `all` and its limit.
    pub(super) fn may_book(&self, tenant: TenantId, memory: Bytes, processes: u32, all: Bytes) -> bool {
        self.tenants.get(&tenant).is_none_or(|of| {
            let may = u128::from(all.get()) * u128::from(of.limits.memory.get()) / 10_000;
            let after = u128::from(of.memory.get()) + u128::from(memory.get());
            (of.limits.memory == BasisPoints::WHOLE || after <= may)
                && of.processes.saturating_add(processes) <= of.limits.max_processes
        })
    }

    /// Whether the tenant's instances are bounded by their memory or their processes.
    pub(super) fn bounds_instances(&self, tenant: TenantId) -> bool {
        let bounded = |of: &TenantLimits| of.memory < BasisPoints::WHOLE || of.max_processes < u32::MAX;
        self.tenants.get(&tenant).is_some_and(|of| bounded(&of.limits))
    }

    /// Books memory and processes for an instance of the tenant, unless it [may not](Self::may_book) have them.
    pub(super) fn book(&mut self, tenant: TenantId, memory: Bytes, processes: u32, all: Bytes) -> bool {
        if !self.may_book(tenant, memory, processes, all) {
            return false;
        }
        let of = self.tenants.entry(tenant).or_default();
        of.memory = of.memory.saturating_add(memory);
        of.processes = of.processes.saturating_add(processes);
        true
    }

    /// Gives booked memory and processes back.
    pub(super) fn unbook(&mut self, tenant: TenantId, memory: Bytes, processes: u32) {
        if let Some(of) = self.tenants.get_mut(&tenant) {
            of.memory = of.memory.saturating_sub(memory);
            of.processes = of.processes.saturating_sub(processes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::BasisPoints;

    /// A tenth of one device, in windows of a minute.
    fn tenants(share: u16) -> Tenants {
        let (mut tenants, tenant) = (Tenants::default(), TenantId::new(1));
        for request in 0..3 {
            waits(&mut tenants, tenant, request, Timestamp::ZERO, Timestamp::MAX);
        }
        let limits = TenantLimits { gpu_time: BasisPoints::new(share).unwrap(), ..TenantLimits::default() };
        tenants.limit(tenant, limits);
        tenants
    }

    /// Adds a request to the line of a tenant that may have none at work, and lifts this limit.
    fn waits(tenants: &mut Tenants, tenant: TenantId, request: u64, at: Timestamp, latest: Timestamp) {
        tenants.limit(tenant, TenantLimits { max_requests: 0, ..TenantLimits::default() });
        let let_in = tenants.arrived(at, (tenant, RequestId::new(request)), latest, (1, Duration::ZERO));
        assert!(!let_in);
        tenants.limit(tenant, TenantLimits::default());
    }

    #[test]
    fn a_request_is_let_in_at_once_while_nothing_waits_and_the_limits_allow() {
        let (tenant, mut tenants) = (TenantId::new(1), tenants(1_000));
        let four = Duration::from_secs(4);
        let arrives = |tenants: &mut Tenants, request| {
            tenants.arrived(Timestamp::ZERO, (tenant, RequestId::new(request)), Timestamp::MAX, (1, four))
        };
        assert!(!arrives(&mut tenants, 3), "others wait in the line");
        for _ in 0..2 {
            assert!(tenants.admit(Timestamp::ZERO, tenant, 1, |_| Duration::ZERO).is_some());
        }
        for left in [2, 3] {
            assert!(tenants.left_line(tenant, Timestamp::ZERO, RequestId::new(left)) == (left == 2));
        }
        assert!(arrives(&mut tenants, 4) && arrives(&mut tenants, 5));
        assert!(!arrives(&mut tenants, 6), "8 s of a share of 6 s");
    }

    #[test]
    fn time_beyond_the_share_is_carried_into_the_next_windows() {
        let (tenant, at) = (TenantId::new(1), |seconds: u64| Timestamp::from_millis(1_000 * seconds));
        let mut tenants = tenants(1_000);
        let unknown = |_| Duration::ZERO;
        assert!(tenants.admit(at(0), tenant, 1, unknown).is_some());
        tenants.ended(tenant, Duration::ZERO, Duration::from_secs(60), true);
        assert_eq!(tenants.admit(at(60), tenant, 1, unknown), None, "54 s of a share of 6 s");
        assert_eq!(tenants.admit(at(120), tenant, 1, unknown), None);
        // Ten windows after the request its use is fully paid off.
        assert!(tenants.admit(at(600), tenant, 1, unknown).is_some());
    }

    #[test]
    fn requests_at_work_count_with_what_they_are_expected_to_use() {
        let (tenant, now) = (TenantId::new(1), Timestamp::ZERO);
        let (mut tenants, four) = (tenants(1_000), Duration::from_secs(4));
        assert!(tenants.admit(now, tenant, 1, |_| four).is_some());
        assert!(tenants.admit(now, tenant, 1, |_| four).is_some());
        assert_eq!(tenants.admit(now, tenant, 1, |_| four), None, "8 s of a share of 6 s");
        tenants.ended(tenant, four, Duration::from_secs(1), true);
        assert!(tenants.admit(now, tenant, 1, |_| four).is_some(), "1 s used and 4 s expected");
    }

    #[test]
    fn a_request_that_is_late_waits_for_those_that_are_not() {
        let (tenant, at) = (TenantId::new(2), Timestamp::from_millis);
        let mut tenants = tenants(0);
        for (request, arrived, latest) in [(0, 0, 100), (1, 10, 110), (2, 50, 150), (3, 60, 160)] {
            waits(&mut tenants, tenant, request, at(arrived), at(latest));
        }
        tenants.left_line(tenant, at(10), RequestId::new(1));
        let mut admit = |now| tenants.admit(at(now), tenant, 1, |_| Duration::ZERO).map(RequestId::number);
        let order = [admit(120), admit(155), admit(155), admit(155)];
        assert_eq!(order, [Some(2), Some(3), Some(0), None]);
    }

    #[test]
    fn a_tenant_that_may_have_no_time_has_none() {
        assert_eq!(tenants(0).admit(Timestamp::ZERO, TenantId::new(1), 4, |_| Duration::ZERO), None);
    }
}
