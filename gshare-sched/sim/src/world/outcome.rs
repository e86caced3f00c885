//! The outcome of a run.

use super::faults::Fault;
use gshare_core::{Duration, FunctionId, GpuId, InstanceId, RequestId, Timestamp};
use gshare_sched::mig::SliceAt;
use gshare_sched::platform::{Life, PlatformAction, Rejection};
use std::collections::BTreeMap;

/// GPU time in device-nanoseconds times 10^8: a share of time and one of SMs, both in basis points, multiplied exactly.
pub(super) type Area = u128;
pub(super) const WHOLE_AREA: u128 = 100_000_000;

/// Time of whole devices.
pub(super) fn device_time(area: Area) -> Duration {
    Duration::from_wide_nanos(area / WHOLE_AREA)
}

/// The outcome of one function.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FunctionOutcome {
    /// Its name.
    pub name: String,
    /// Requests that came.
    pub requests: u64,
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that were not, by the reason.
    pub rejected: BTreeMap<Rejection, u64>,
    /// The latency to keep.
    pub slo: Option<Duration>,
    /// Requests that were answered within it.
    pub within_slo: u64,
    /// Time from arrival to answer of each request that was answered, shortest first.
    pub latencies: Vec<Duration>,
    /// Instances that were started.
    pub starts: u64,
    /// Requests that were answered by an instance that was not ready when they came, nor parked.
    pub cold_starts: u64,
    /// Times that an instance took the place of another one on better slices.
    pub migrated: u64,
    /// Requests that were answered by an instance with several stages.
    pub pipelined: u64,
    /// Training jobs that were completed.
    pub completed: u64,
    /// Training that was done when load and faults had ended, in time on a whole device.
    pub trained: Duration,
    /// GPU time that its instances held, share x time, from their start to their end. On a whole device a model holds its
    /// part of the memory, a slice that several instances share counts for each of them.
    pub held: Duration,
    /// GPU time that its requests or its training used.
    pub used: Duration,
    /// The part of it that requests used beyond what the shares of their instances guarantee, at
    /// [`Depth::Requests`](super::Depth::Requests).
    pub beyond: Duration,
}

impl FunctionOutcome {
    /// Share of the requests that were answered within the SLO; those that their caller cancelled do not count. `None`
    /// without an SLO or without requests.
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    pub fn attainment(&self) -> Option<f64> {
        self.slo?;
        let cancelled = self.rejected.get(&Rejection::Cancelled).copied().unwrap_or(0);
        let counted = self.requests - cancelled;
        (counted > 0).then(|| self.within_slo as f64 / counted as f64)
    }

    /// The latency that `percent` per cent of the answered requests did not exceed (nearest rank); 0 without any.
    pub fn percentile(&self, percent: usize) -> Duration {
        let rank = (self.latencies.len() * percent).div_ceil(100).max(1);
        self.latencies.get(rank - 1).copied().unwrap_or(Duration::ZERO)
    }

    /// Mean latency of the answered requests; 0 without any.
    pub fn mean(&self) -> Duration {
        let sum: u128 = self.latencies.iter().map(|latency| u128::from(latency.as_nanos())).sum();
        Duration::from_wide_nanos(sum / self.latencies.len().max(1) as u128)
    }

    /// Adds what another run showed of the same function.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.answered += other.answered;
        for (&reason, count) in &other.rejected {
            *self.rejected.entry(reason).or_insert(0) += count;
        }
        self.within_slo += other.within_slo;
        self.latencies.extend(&other.latencies);
        // Both parts are sorted, and a stable sort merges what is: a sum over many seeds would sort all of them each time.
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

/// Kernels of an instance that ended within a [`Plan::sample`](super::Plan::sample).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sample {
    /// The end of the interval, from the start of the run on.
    pub at: Duration,
    /// The number of the function in the plan.
    pub function: usize,
    /// The instance.
    pub instance: InstanceId,
    /// How many kernels.
    pub kernels: u64,
}

/// The parts of the time of a request; they add up to it (FluidFaaS, Figure 14).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Spent {
    /// Waiting for an instance, or within a pipeline for a slice.
    pub queue: Duration,
    /// Waiting until the instance that it was given to was unparked.
    pub load: Duration,
    /// Work on devices, in a pipeline along the longest way through its parts.
    pub execution: Duration,
    /// Hand-offs between slices, along the same way.
    pub transfer: Duration,
    /// Devices or slices of the instance: several in a pipeline.
    pub slices: usize,
}

/// A request that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ended {
    /// The function that it called.
    pub function: FunctionId,
    /// When it came.
    pub arrived: Timestamp,
    /// When it was answered or rejected.
    pub at: Timestamp,
    /// The parts of its time; none: it was rejected.
    pub spent: Option<Spent>,
}

impl Ended {
    /// Whether it was rejected, or answered later than `slo` after it came.
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
    /// Requests in the order in which they ended.
    pub ends: Vec<Ended>,
    /// From when to when a part of a pipeline worked, in the order in which the work was given out.
    pub worked: Spans,
    /// From when to when each instance had its memory there, in the order of the ends.
    pub held: Spans,
    /// Parts of the time of requests that have not ended.
    pub(super) open: BTreeMap<RequestId, Spent>,
}

impl Record {
    /// How many instances had their memory on a device or slice at a time.
    pub fn holding(&self, at: Timestamp) -> usize {
        self.held.values().flatten().filter(|span| span.0 <= at && at < span.1).count()
    }

    /// When the last request ended.
    pub fn finished(&self) -> Timestamp {
        self.ends.last().map_or(Timestamp::ZERO, |end| end.at)
    }

    /// Notes the end of a request; `took` says how long an answered one was worked on.
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
    /// By function.
    pub functions: Vec<FunctionOutcome>,
    /// Orders that were carried out, by [`name_of`].
    pub actions: BTreeMap<&'static str, u64>,
    /// Faults that happened.
    pub faults: BTreeMap<Fault, u64>,
    /// Instances that died by themselves, by the state that they were in as their platform knew it.
    pub deaths: BTreeMap<Life, u64>,
    /// Events that the engine was told.
    pub events: u64,
    /// Kernels that ran, where these are simulated.
    pub kernels: u64,
    /// Kernels over time, if the plan has them counted; those of one run only. What an instance ran after the last count before its
    /// end is left out.
    pub series: Vec<Sample>,
    /// Requests and slices one by one, if the plan has them recorded; those of the first run only.
    pub record: Option<Record>,
    /// Simulated time.
    pub time: Duration,
    /// The same for two runs that were the same.
    pub hash: u64,
}

impl Outcome {
    /// Adds what another run of the same plan showed.
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

    /// Kinds of [`PlatformAction`] that were never carried out.
    pub fn never_carried_out(&self) -> Vec<&'static str> {
        ACTIONS.iter().copied().filter(|name| !self.actions.contains_key(name)).collect()
    }
}

/// Names of all kinds of actions.
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
