//! The outcome of a run.

use super::faults::Fault;
use gshare_core::{Duration, FunctionId, GpuId, InstanceId, RequestId, Timestamp};
use gshare_sched::mig::SliceAt;
use gshare_sched::platform::{Life, PlatformAction, Rejection};
use std::collections::BTreeMap;

/// GPU time in device-nanoseconds times 10^8: the exact product of a share of time and a share of SMs, both in basis points.
pub(super) type Area = u128;
pub(super) const WHOLE_AREA: u128 = 100_000_000;

/// The time of whole devices.
pub(super) fn device_time(area: Area) -> Duration {
    Duration::from_wide_nanos(area / WHOLE_AREA)
}

/// The outcome of one function.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FunctionOutcome {
    /// The name of the function.
    pub name: String,
    /// The number of requests.
    pub requests: u64,
    /// The number of answered requests.
    pub answered: u64,
    /// The number of rejected requests, by the reason.
    pub rejected: BTreeMap<Rejection, u64>,
    /// The function's SLO of latency.
    pub slo: Option<Duration>,
    /// The number of requests answered within the SLO.
    pub within_slo: u64,
    /// The time from arrival to answer of each answered request, shortest first.
    pub latencies: Vec<Duration>,
    /// The number of started instances.
    pub starts: u64,
    /// The number of requests answered by an instance neither ready nor parked at the request's arrival.
    pub cold_starts: u64,
    /// The number of replacements of an instance by another instance on better slices.
    pub migrated: u64,
    /// The number of requests answered by an instance with several stages.
    pub pipelined: u64,
    /// The number of completed training jobs.
    pub completed: u64,
    /// The training completed by the end of load and faults, in time on a whole device.
    pub trained: Duration,
    /// The GPU time held by the function's instances, share x time, from their start to their end. On a whole device a model holds
    /// its part of the memory, and a slice with several instances counts for each of them.
    pub held: Duration,
    /// The GPU time used by the function's requests or its training.
    pub used: Duration,
    /// The part of `used` beyond the guaranteed shares of the instances, at [`Depth::Requests`](super::Depth::Requests).
    pub beyond: Duration,
}

impl FunctionOutcome {
    /// The share of requests answered within the SLO; requests cancelled by their caller do not count. `None` without an SLO or
    /// without requests.
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    pub fn attainment(&self) -> Option<f64> {
        self.slo?;
        let cancelled = self.rejected.get(&Rejection::Cancelled).copied().unwrap_or(0);
        let counted = self.requests - cancelled;
        (counted > 0).then(|| self.within_slo as f64 / counted as f64)
    }

    /// The latency not exceeded by `percent` per cent of the answered requests (nearest rank); 0 without any.
    pub fn percentile(&self, percent: usize) -> Duration {
        let rank = (self.latencies.len() * percent).div_ceil(100).max(1);
        self.latencies.get(rank - 1).copied().unwrap_or(Duration::ZERO)
    }

    /// The mean latency of the answered requests; 0 without any.
    pub fn mean(&self) -> Duration {
        let sum: u128 = self.latencies.iter().map(|latency| u128::from(latency.as_nanos())).sum();
        Duration::from_wide_nanos(sum / self.latencies.len().max(1) as u128)
    }

    /// Adds another run's outcome of the same function.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.answered += other.answered;
        for (&reason, count) in &other.rejected {
            *self.rejected.entry(reason).or_insert(0) += count;
        }
        self.within_slo += other.within_slo;
        self.latencies.extend(&other.latencies);
        // Both parts are sorted, and a stable sort merges sorted parts. A sum over many seeds would otherwise sort all of them each
        // time.
        self.latencies.sort();
        self.starts += other.starts;
        self.cold_starts += other.cold_starts;
        self.migrated += other.migrated;
        self.pipelined += other.pipelined;
        self.completed += other.completed;
        self.trained = self.trained.saturating_add(other.trained);
        self.held = self.held.saturating_add(other.held);
        self.used = self.used.saturating_add(other.used);
        self.beyond = self.beyond.saturating_add(other.beyond);
    }
}

/// The number of an instance's kernels ended within a [`Plan::sample`](super::Plan::sample).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sample {
    /// The end of the interval, from the start of the run on.
    pub at: Duration,
    /// The number of the function in the plan.
    pub function: usize,
    /// The instance's id.
    pub instance: InstanceId,
    /// The number of kernels.
    pub kernels: u64,
}

/// The parts of the time of a request; they add up to it (FluidFaaS, Figure 14).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Spent {
    /// The wait for an instance, or within a pipeline for a slice.
    pub queue: Duration,
    /// The wait until the request's instance was unparked.
    pub load: Duration,
    /// Work on devices, in a pipeline along the longest way through its parts.
    pub execution: Duration,
    /// The hand-offs between slices, along the same way.
    pub transfer: Duration,
    /// The number of the instance's devices or slices: several in a pipeline.
    pub slices: usize,
}

/// An ended request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ended {
    /// The function of the request.
    pub function: FunctionId,
    /// The time of its arrival.
    pub arrived: Timestamp,
    /// The time of its answer or rejection.
    pub at: Timestamp,
    /// The parts of its time; `None` for a rejected request.
    pub spent: Option<Spent>,
}

impl Ended {
    /// Whether the request was rejected, or answered later than `slo` after its arrival.
    pub fn is_late(&self, slo: Duration) -> bool {
        self.spent.is_none() || self.at.saturating_since(self.arrived) > slo
    }
}

/// Spans of time of each slice of a GPU, or of a GPU without slices.
pub type Spans = BTreeMap<(GpuId, Option<SliceAt>), Vec<(Timestamp, Timestamp)>>;

/// Each request and slice of one run, if the plan has them [recorded](super::Plan::record).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Record {
    /// The requests in the order of their ends.
    pub ends: Vec<Ended>,
    /// The times of work on a part of a pipeline, in the order of its assignment.
    pub worked: Spans,
    /// The times of each instance's memory on the device or slice, in the order of the ends.
    pub held: Spans,
    /// The parts of the time of open requests.
    pub(super) open: BTreeMap<RequestId, Spent>,
}

impl Record {
    /// The number of instances with memory on a device or slice at a time.
    pub fn holding(&self, at: Timestamp) -> usize {
        self.held.values().flatten().filter(|span| span.0 <= at && at < span.1).count()
    }

    /// The end of the last request.
    pub fn finished(&self) -> Timestamp {
        self.ends.last().map_or(Timestamp::ZERO, |end| end.at)
    }

    /// Notes the end of a request; `took` is the time of work on an answered request.
    pub(super) fn end(
        &mut self,
        request: RequestId,
        (function, arrived): (FunctionId, Timestamp),
        at: Timestamp,
        took: Option<Duration>,
    ) {
        let staged = self.open.remove(&request);
        let spent = took.map(|took| {
            let mut spent = staged.unwrap_or(Spent { execution: took, slices: 1, ..Spent::default() });
            let known = spent.load + spent.execution + spent.transfer;
            spent.queue = at.saturating_since(arrived).saturating_sub(known);
            spent
        });
        self.ends.push(Ended { function, arrived, at, spent });
    }

    pub(super) fn with_held(self, held: Option<Spans>) -> Self {
        Self { held: held.unwrap_or_default(), ..self }
    }
}

/// The outcome of a run, or of several.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Outcome {
    /// The outcomes by function.
    pub functions: Vec<FunctionOutcome>,
    /// The number of orders carried out, by [`name_of`].
    pub actions: BTreeMap<&'static str, u64>,
    /// The number of faults by kind.
    pub faults: BTreeMap<Fault, u64>,
    /// The number of instances that died by themselves, by their state in the platform's view.
    pub deaths: BTreeMap<Life, u64>,
    /// The number of events given to the engine.
    pub events: u64,
    /// The number of ended kernels, at [`Depth::Kernels`](super::Depth::Kernels).
    pub kernels: u64,
    /// The kernels over time, for one run only, if the plan has them counted. Kernels of an instance between its last count and its
    /// end are left out.
    pub series: Vec<Sample>,
    /// The requests and slices of the first run one by one, if the plan has them recorded.
    pub record: Option<Record>,
    /// The simulated time.
    pub time: Duration,
    /// A hash of the run, equal for equal runs.
    pub hash: u64,
}

impl Outcome {
    /// Adds another run's outcome of the same plan.
    pub fn add(&mut self, other: &Self) {
        if self.functions.is_empty() {
            *self = other.clone();
            return;
        }
        for (mine, theirs) in self.functions.iter_mut().zip(&other.functions) {
            mine.add(theirs);
        }
        for (name, count) in &other.actions {
            *self.actions.entry(name).or_insert(0) += count;
        }
        for (&fault, count) in &other.faults {
            *self.faults.entry(fault).or_insert(0) += count;
        }
        for (&life, count) in &other.deaths {
            *self.deaths.entry(life).or_insert(0) += count;
        }
        self.events += other.events;
        self.kernels += other.kernels;
        self.time = self.time.saturating_add(other.time);
        self.hash = self.hash.rotate_left(5) ^ other.hash;
    }

    /// The kinds of [`PlatformAction`] that were never carried out.
    pub fn never_carried_out(&self) -> Vec<&'static str> {
        ACTIONS.iter().copied().filter(|name| !self.actions.contains_key(name)).collect()
    }
}

/// The names of all kinds of actions.
pub const ACTIONS: [&str; 10] =
    ["profile", "start", "park", "unpark", "drain", "stop", "dispatch", "reject", "fetch", "forget"];

/// The name of a kind of action.
pub const fn name_of(action: &PlatformAction) -> &'static str {
    match action {
        PlatformAction::Profile { .. } => "profile",
        PlatformAction::Start { .. } => "start",
        PlatformAction::Park { .. } => "park",
        PlatformAction::Unpark { .. } => "unpark",
        PlatformAction::Drain { .. } => "drain",
        PlatformAction::Stop { .. } => "stop",
        PlatformAction::Dispatch { .. } => "dispatch",
        PlatformAction::Reject { .. } => "reject",
        PlatformAction::Fetch { .. } => "fetch",
        PlatformAction::Forget { .. } => "forget",
    }
}
