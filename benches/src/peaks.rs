//! Lazy scaling for peaks alone, vertical first: an instance counts with its throughput at its limit.
//!
//! # Problem
//! The lazy scaler ([`lazy`](gshare_sched::scale::lazy)) rates an instance by one number, well below its abilities, to leave room for bursts. One
//! instance needs this room, but several have too much: beside a co-scaler each surges to its limit, and together they have room for the
//! burst before the next instance starts. A late start on one instance, on the other hand, makes requests late, since a burst then finds
//! no other instance. So this scaler decides *when* to start as the lazy scaler does, and *whether* by the instances' limits.
//!
//! # Terms
//! The terms of [`gshare_sched::scale`] and of the lazy scaler, and per function:
//! - **entitled**: the number of instances a lazy scaler would have deployed on the same reports, with each rated at 41 % of its
//!   profile; never fewer than are deployed;
//! - **surge**: the deployed instances' throughput at their limits. A limit is twice the request (Dilu, section 3.2), so it is the highest
//!   throughput among the points within the bound on p95, with the instance's own batch and quota and at most twice its SMs. Where the
//!   profile has no such point, an instance surges to its normal throughput;
//! - **peak**: the highest of the last 120 reports; **sustained load**: the median of the last 20.
//!
//! # Algorithm
//! On each load report `x`:
//! 1. nothing is deployed and `x > 0`: start one now;
//! 2. one step of the lazy scaler: entitled rises by one, falls by one, or stays. If it is below the number of deployed instances, drain
//!    the youngest, or stop it if it is not ready yet;
//! 3. while fewer are deployed than entitled, and 93 % of the surge is below the peak, or below the sustained load and the
//!    throughput of one more instance: start one, of the most effective point within the bound on p95, else report the unmet load;
//! 4. only one is entitled, the minimum is 0, and no request came for the lazy scaler's `keep_alive`: drain it.
//!
//! ## Example
//! An instance does 117 requests/s at 30 % of the SMs and 151 at 60 %, and is rated 48. Load stays at 60: after 20 reports two are
//! entitled. One surges to 151, of which 140 count, and 60 and 117 more are above it: a second starts. Load stays at 120: three are
//! entitled, and two surge to 302, of which 280 count; 120 and 117 are below: no third. At 164, or with the first peak of 281, the
//! third starts at once. Load falls to 40: after 30 reports two are entitled, after 30 more one.
//!
//! # Invariants
//! Those of the contract of [`HorizontalScaler`], and never more deployed than entitled. So the scaler
//! never has more instances than a lazy scaler with the same rating, reports and minimum. It never started more of them either, since each
//! start falls into a time of its own in which the lazy scaler has as many.
//!
//! # Cost
//! O(n + reports) for a load report with n instances. A function takes about 1.5 KB.
use gshare_core::profile::{ProfilePoint, RequestRate};
use gshare_core::{BasisPoints, FunctionId, Timestamp};
use gshare_sched::scale::lazy::{History as Window, LazyHorizontalConfig};
use gshare_sched::scale::{Fleet, FunctionScale, HorizontalOrder, HorizontalScaler, LoadReport};
use std::collections::{BTreeMap, VecDeque};

/// Rating of an instance, as a part of its profile: the published threshold of the paper's `RoBERTa`, 48 requests/s where its profile
/// has 117.
const RATED_SHARE: BasisPoints = BasisPoints::percent(41);
/// Load reports for the median, the sustained load: bursts of some seconds do not show.
const SUSTAINED_REPORTS: usize = 20;
/// Load reports for the highest, the peak: two minutes, a few cold starts.
const KEEP_REPORTS: usize = 120;
/// Part of the surge that counts: above it queues do not empty between two requests.
pub const PEAK_SHARE: BasisPoints = BasisPoints::percent(93);

/// `share` of a rate, rounded up.
fn part(share: BasisPoints, of: RequestRate) -> RequestRate {
    let part = (u128::from(of.as_milli()) * u128::from(share.get())).div_ceil(10_000);
    // A share is at most the whole: it fits.
    RequestRate::from_milli(u64::try_from(part).unwrap_or(u64::MAX))
}

/// Requests per second that one more instance would answer.
fn another(fleet: &Fleet) -> RequestRate {
    fleet.best().map_or(RequestRate::ZERO, |point| point.throughput)
}

/// Requests per second of an instance at its limit.
fn surge(own: &ProfilePoint, spec: &FunctionScale) -> RequestRate {
    let reach = u32::from(own.sm.get()) * 2;
    let within = |point: &&ProfilePoint| {
        spec.max_p95.is_none_or(|max| point.p95 <= max)
            && (point.batch, point.quota) == (own.batch, own.quota)
            && u32::from(point.sm.get()) <= reach
    };
    let most = spec.profile.points().iter().filter(within).map(|point| point.throughput).max();
    most.map_or(own.throughput, |most| most.max(own.throughput))
}

#[derive(Debug, Default)]
struct History {
    window: Window,
    /// The last reports, also from before the last step; the newest at the back.
    reports: VecDeque<RequestRate>,
    entitled: u32,
}

/// Lazy scaling by peaks. See the [module](self).
///
/// # Differences from the paper
/// Dilu (section 3.4.2) has steps 1, 2 and 4 only, and starts all entitled instances.
#[derive(Debug, Default)]
pub struct PeakHorizontal {
    lazy: LazyHorizontalConfig,
    functions: BTreeMap<FunctionId, History>,
}

impl HorizontalScaler for PeakHorizontal {
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>) {
        let LoadReport { now, function, fleet, load } = report;
        let (deployed, spec) = (fleet.deployed(), fleet.spec());
        let history = self.functions.entry(function).or_default();
        if history.reports.len() >= KEEP_REPORTS {
            history.reports.pop_front();
        }
        history.reports.push_back(load);
        history.window.note(now, load, &self.lazy);
        history.entitled = history.entitled.clamp(deployed, spec.max_instances);
        if deployed == 0 {
            history.entitled = u32::from(!load.is_zero());
            if history.entitled > 0 {
                history.window.stepped(now);
            }
        } else if history.entitled == 1 && spec.min_instances == 0 && history.window.is_idle(now, &self.lazy)
        {
            history.entitled = 0;
            history.window.stepped(now);
        } else {
            history.step(now, fleet, &self.lazy);
        }
        if history.entitled < deployed {
            orders.extend(fleet.youngest().map(|(youngest, _)| HorizontalOrder::Remove(youngest)));
        } else {
            history.grow(now, fleet, load, orders);
        }
    }

    fn forget(&mut self, function: FunctionId) {
        self.functions.remove(&function);
    }
}

impl History {
    /// Step 2: the lazy scaler's step with the entitled instances.
    fn step(&mut self, now: Timestamp, fleet: &Fleet, config: &LazyHorizontalConfig) {
        let Some((_, youngest)) = fleet.youngest() else { return };
        let missing = self.entitled - fleet.deployed();
        let another = another(fleet);
        let capacity = fleet.capacity().saturating_add(another.saturating_mul(u64::from(missing)));
        let without = capacity.saturating_sub(if missing > 0 { another } else { youngest });
        let (least, most) = (fleet.spec().min_instances, fleet.spec().max_instances);
        if !self.window.has_cooled(now, config) {
            return;
        }
        if self.window.is_short(part(RATED_SHARE, capacity), config) {
            if self.entitled < most {
                self.entitled += 1;
                self.window.stepped(now);
            }
        } else if self.entitled > least.max(1) && self.window.is_spare(part(RATED_SHARE, without), config) {
            self.entitled -= 1;
            self.window.stepped(now);
        }
    }

    /// Step 3.
    fn grow(&self, now: Timestamp, fleet: &Fleet, load: RequestRate, orders: &mut Vec<HorizontalOrder>) {
        let reports = |count: usize| self.reports.iter().rev().take(count).copied();
        let peak = reports(KEEP_REPORTS).max().unwrap_or(load);
        let mut last: Vec<RequestRate> = reports(SUSTAINED_REPORTS).collect();
        // With an even number of reports, the higher one in the middle.
        let middle = last.len() / 2;
        let sustained = *last.select_nth_unstable(middle).1;
        let wanted = peak.max(sustained.saturating_add(another(fleet)));
        let spec = fleet.spec();
        let surges = fleet.instances().map(|(_, point)| surge(point, spec));
        let mut surging = surges.fold(RequestRate::ZERO, RequestRate::saturating_add);
        let (mut deployed, mut capacity) = (fleet.deployed(), fleet.capacity());
        loop {
            let enough = deployed > 0 && wanted <= part(PEAK_SHARE, surging);
            // At the maximum of instances, a rest beyond the deployed instances stays unmet.
            let full = deployed >= spec.max_instances;
            if enough || (deployed >= self.entitled && !full) {
                return;
            }
            let Some((index, point)) = fleet.startable(now).next().filter(|_| !full) else {
                let unmet = load.saturating_sub(capacity);
                orders.extend((!unmet.is_zero()).then_some(HorizontalOrder::Unmet(unmet)));
                return;
            };
            orders.push(HorizontalOrder::Start(index));
            deployed += 1;
            surging = surging.saturating_add(surge(point, spec));
            capacity = capacity.saturating_add(point.throughput);
        }
    }
}
