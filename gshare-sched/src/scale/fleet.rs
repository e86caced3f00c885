//! The instances of a function, as a horizontal scaler sees them.
//!
//! The host of a scaler keeps a [`Fleet`] for each function: it notes each start and each end there, keeps the minimum, and asks the
//! scaler with each report of load. A scaler only decides, so that its own state is its memory of the load.
//!
//! An instance belongs to the fleet while it starts or serves: these instances make up the **capacity**. One that drains or is stopped is
//! forgotten at once. The time that a start may take is the host's business.

use crate::scale::{FunctionScale, HorizontalError};
use core::cmp::Ordering;
use gshare_core::profile::{ProfilePoint, RequestRate};
use gshare_core::{ConfigError, Duration, FunctionId, InstanceId, Timestamp};
use std::collections::BTreeMap;

/// The most instances of one function.
const MAX_INSTANCES: u32 = 4096;

crate::settings_table::settings! {
    /// Settings that every horizontal scaler has.
    pub struct FleetConfig {
        /// Length of a tick. 1 s (Dilu, section 4): shorter ticks see noise, longer ticks miss a burst.
        #[cfg_attr(feature = "serde", serde(rename = "tick_ns"))]
        pub tick: Duration = Duration::from_secs(1), with_tick;
        /// Time before another try of a point refused for lack of room. 30 s: placements change by then.
        #[cfg_attr(feature = "serde", serde(rename = "retry_after_ns"))]
        pub retry_after: Duration = Duration::from_secs(30), with_retry_after;
    }
}

impl FleetConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let (ms, hour) = (Duration::from_millis(1), Duration::from_secs(3600));
        gshare_core::check_fields!("fleet.", self {
            tick, retry_after in ms..=hour, "need 1ms to 3600s";
        })
    }
}

#[derive(Debug)]
struct Instance {
    /// Index into the profile.
    point: usize,
    ready: bool,
    /// The time of its start.
    since: Timestamp,
}

/// The starting and ready instances of a function, and the points at which more may start.
#[derive(Debug)]
pub struct Fleet {
    spec: FunctionScale,
    /// Indices of the points within the bound on p95, by efficacy, the best first; each with the end of its refusal.
    points: Vec<(usize, Timestamp)>,
    /// In the order of their starts.
    instances: BTreeMap<InstanceId, Instance>,
    capacity: RequestRate,
    /// The last start time of an instance, from its start until it was ready.
    start_time: Duration,
}

// Changes, made by the host of a scaler.
impl Fleet {
    /// The fleet of a new function, without instances.
    ///
    /// # Errors
    /// A function that its own profile or bounds exclude.
    pub fn new(function: FunctionId, spec: FunctionScale) -> Result<Self, HorizontalError> {
        check_bounds(function, spec.min_instances, spec.max_instances)?;
        let all = spec.profile.points();
        let fastest = all.iter().min_by_key(|point| point.p95);
        if let (Some(max_p95), Some(point)) = (spec.max_p95, fastest)
            && point.p95 > max_p95
        {
            let (best, setting) = (point.p95, point.setting());
            return Err(HorizontalError::SloUnreachable { function, max_p95, best, setting });
        }
        let fast = |&index: &usize| spec.max_p95.is_none_or(|max| all[index].p95 <= max);
        let mut points: Vec<usize> = (0..all.len()).filter(fast).collect();
        points.sort_by(|&a, &b| match all[b].cmp_efficacy(&all[a]) {
            Ordering::Equal => (all[a].area(), a).cmp(&(all[b].area(), b)),
            other => other,
        });
        Ok(Self {
            points: points.into_iter().map(|index| (index, Timestamp::ZERO)).collect(),
            spec,
            instances: BTreeMap::new(),
            capacity: RequestRate::ZERO,
            start_time: Duration::ZERO,
        })
    }

    /// Other bounds on the number of instances, in force at once.
    ///
    /// # Errors
    /// Bounds that exclude each other; nothing changed.
    pub fn set_bounds(&mut self, function: FunctionId, least: u32, most: u32) -> Result<(), HorizontalError> {
        check_bounds(function, least, most)?;
        (self.spec.min_instances, self.spec.max_instances) = (least, most);
        Ok(())
    }

    /// Another minimum, within the maximum: a function without one may keep an instance for a while.
    pub fn set_minimum(&mut self, least: u32) {
        self.spec.min_instances = least.min(self.spec.max_instances);
    }

    /// An instance starts at a point, by its index in the profile. Its name is larger than the names before.
    pub fn started(&mut self, now: Timestamp, instance: InstanceId, point: usize) {
        self.instances.insert(instance, Instance { point, ready: false, since: now });
        self.capacity = self.capacity.saturating_add(self.spec.profile.points()[point].throughput);
    }

    /// An instance serves requests from now on.
    pub fn ready(&mut self, now: Timestamp, instance: InstanceId) {
        if let Some(of) = self.instances.get_mut(&instance).filter(|of| !of.ready) {
            of.ready = true;
            self.start_time = now.saturating_since(of.since);
        }
    }

    /// An instance starts and serves no longer. Answers whether it was ready, if it was in the fleet.
    pub fn remove(&mut self, instance: InstanceId) -> Option<bool> {
        let of = self.instances.remove(&instance)?;
        self.capacity = self.capacity.saturating_sub(self.spec.profile.points()[of.point].throughput);
        Some(of.ready)
    }

    /// The point of a starting instance.
    pub fn starts_at(&self, instance: InstanceId) -> Option<usize> {
        self.instances.get(&instance).filter(|of| !of.ready).map(|of| of.point)
    }

    /// No device has room for the point: it is not tried again before this time.
    pub fn refuse(&mut self, point: usize, until: Timestamp) {
        if let Some(entry) = self.points.iter_mut().find(|(index, _)| *index == point) {
            entry.1 = until;
        }
    }

    /// Every point may be tried again.
    pub fn retry(&mut self) {
        self.points.iter_mut().for_each(|(_, until)| *until = Timestamp::ZERO);
    }
}

// Questions of a scaler.
impl Fleet {
    /// Requests per second of the starting and ready instances.
    pub const fn capacity(&self) -> RequestRate {
        self.capacity
    }

    /// Starting and ready instances.
    pub fn deployed(&self) -> u32 {
        u32::try_from(self.instances.len()).unwrap_or(u32::MAX)
    }

    /// Whether the function has fewer instances than its minimum.
    pub fn lacks(&self) -> bool {
        self.deployed() < self.spec.min_instances
    }

    /// How many more instances the function may have.
    pub fn room(&self) -> u32 {
        self.spec.max_instances.saturating_sub(self.deployed())
    }

    /// The function's specification, with the current bounds.
    pub const fn spec(&self) -> &FunctionScale {
        &self.spec
    }

    /// The last start time of an instance; 0 before the first was ready.
    pub const fn start_time(&self) -> Duration {
        self.start_time
    }

    /// Points that may be started now, the most effective first, by their index in the profile.
    pub fn startable(&self, now: Timestamp) -> impl Iterator<Item = (usize, &ProfilePoint)> {
        let points = self.points.iter().filter(move |(_, until)| *until <= now);
        points.map(|&(index, _)| (index, &self.spec.profile.points()[index]))
    }

    /// The instances in the order of removal: the least effective first, of equal ones the smallest, then the youngest (FaST-GShare,
    /// section 3.4.1: the queue `L_j`).
    pub fn by_efficacy(&self) -> Vec<(InstanceId, RequestRate)> {
        let mut order: Vec<(InstanceId, &ProfilePoint)> = self.instances().collect();
        order
            .sort_by(|(a, x), (b, y)| x.cmp_efficacy(y).then(x.throughput.cmp(&y.throughput)).then(b.cmp(a)));
        order.into_iter().map(|(id, point)| (id, point.throughput)).collect()
    }

    /// Requests per second of the smallest instance.
    pub fn smallest(&self) -> Option<RequestRate> {
        self.instances().map(|(_, point)| point.throughput).min()
    }

    /// The youngest instance, starting ones before ready ones.
    pub fn youngest(&self) -> Option<(InstanceId, RequestRate)> {
        let youngest = self.all().max_by_key(|(id, ready, _)| (!ready, *id))?;
        Some((youngest.0, youngest.2.throughput))
    }

    /// The most effective point, available now or not; `None` where no point is fast enough.
    pub fn best(&self) -> Option<&ProfilePoint> {
        self.points.first().map(|&(index, _)| &self.spec.profile.points()[index])
    }

    /// The instances with their points, in the order of their starts.
    pub fn instances(&self) -> impl Iterator<Item = (InstanceId, &ProfilePoint)> {
        self.all().map(|(id, _, point)| (id, point))
    }

    fn all(&self) -> impl Iterator<Item = (InstanceId, bool, &ProfilePoint)> {
        let points = self.spec.profile.points();
        self.instances.iter().map(|(id, of)| (*id, of.ready, &points[of.point]))
    }

    /// Checks the capacity, and the presence of each instance with its state.
    ///
    /// # Panics
    /// On a broken book.
    pub(crate) fn invariants(&self, is_ready: impl Fn(InstanceId) -> Option<bool>) {
        let sum = self.instances().map(|(_, point)| point.throughput);
        assert_eq!(sum.fold(RequestRate::ZERO, RequestRate::saturating_add), self.capacity, "the capacity");
        assert!(self.deployed() <= self.spec.max_instances, "never more than the most");
        for (id, ready, _) in self.all() {
            assert_eq!(is_ready(id), Some(ready), "{id} serves or not");
        }
    }
}

fn check_bounds(function: FunctionId, min_instances: u32, max_instances: u32) -> Result<(), HorizontalError> {
    if max_instances < min_instances.max(1) || max_instances > MAX_INSTANCES {
        let limit = MAX_INSTANCES;
        return Err(HorizontalError::BadInstanceBounds { function, min_instances, max_instances, limit });
    }
    Ok(())
}
