//! Functions from their deployment to their removal.

use super::admission::check_function;
use super::{
    BTreeMap, Bytes, Duration, FunctionId, Platform, PlatformAction, PlatformError, PoolAction, PoolEvent,
    Rejection, RequestId, Timestamp, choice, gpu_time,
};
use crate::platform::{FunctionSpec, Regime, Work};
use gshare_core::profile::ProfileTable;
use std::collections::BTreeSet;

/// The state of a function on the platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
pub enum FunctionState {
    /// The host measures the function, and its requests wait for the profile.
    Profiling,
    /// A pool serves it.
    Deployed,
    /// The function was removed, and some of its instances are not gone yet.
    Removed,
}

/// Counts of a function's requests since it was deployed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct FunctionStats {
    /// Number of requests that arrived.
    pub arrived: u64,
    /// Number of answered requests.
    pub answered: u64,
    /// Answered requests within the SLO, waiting included; all answered requests without an SLO.
    pub within_slo: u64,
    /// Number of rejected requests.
    pub rejected: u64,
    /// Number of started instances.
    pub starts: u64,
    /// Number of times no device had the resources for the next instance.
    pub unmet: u64,
}

/// A function as the platform keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionView<'a> {
    /// The specification as deployed, with the profile once known.
    pub spec: &'a FunctionSpec,
    /// The function's state.
    pub state: FunctionState,
    /// Number of instances the host knows of, until they are gone.
    pub instances: u32,
    /// Counts of the function's requests.
    pub stats: FunctionStats,
    /// Whether no device so far could hold an instance of the function: its requests are rejected.
    pub never_fits: bool,
}

#[derive(Debug)]
pub(super) struct Function {
    pub(super) spec: FunctionSpec,
    pub(super) state: FunctionState,
    pub(super) pool: usize,
    /// Number of instances the host knows of.
    pub(super) instances: u32,
    /// Its waiting requests, by arrival.
    pub(super) waiting: BTreeSet<(Timestamp, RequestId)>,
    pub(super) stats: FunctionStats,
    /// Whether the devices could hold an instance at any time so far; None before the first device.
    pub(super) fits: Option<bool>,
    /// The GPU time of one request: the mean of answered requests, with more weight on recent ones.
    pub(super) uses: Option<Duration>,
    /// The time an instance works for one request, as a mean of the same kind.
    pub(super) takes: Option<Duration>,
}

/// The mean after the addition of `time`.
fn moved(mean: Option<Duration>, time: Duration) -> Option<Duration> {
    let moved = |mean: Duration| mean.saturating_sub(mean.scaled(1, 8)).saturating_add(time.scaled(1, 8));
    Some(mean.map_or(time, moved))
}

impl Function {
    /// Counts an answered request with this GPU time.
    pub(super) fn used(&mut self, time: Duration) {
        self.uses = moved(self.uses, time);
    }

    /// Counts an instance's work for one request.
    pub(super) fn took(&mut self, time: Duration) {
        self.takes = moved(self.takes, time);
    }

    /// The latest begin at which a request from now is answered within the SLO.
    pub(super) fn latest_start(&self, now: Timestamp) -> Timestamp {
        let spare = |slo: Duration| slo.saturating_sub(self.takes.unwrap_or_default());
        self.spec.slo.map_or(Timestamp::MAX, |slo| now.saturating_add(spare(slo)))
    }

    /// The expected GPU time of the next request: before the first answer, the time at the function's most effective setting.
    pub(super) fn expected_use(&self) -> Duration {
        let Work::Inference { profile: Some(profile) } = &self.spec.work else {
            return self.uses.unwrap_or_default();
        };
        let at_best = || {
            let point = profile.most_effective(|_| true)?;
            let second = Duration::from_secs(1).scaled(point.area(), gpu_time::WHOLE);
            Some(second.scaled(1_000, point.throughput.as_milli()))
        };
        self.uses.or_else(at_best).unwrap_or_default()
    }

    const fn view(&self) -> FunctionView<'_> {
        let Self { spec, state, instances, stats, .. } = self;
        let never_fits = matches!(self.fits, Some(false));
        FunctionView { spec, state: *state, instances: *instances, stats: *stats, never_fits }
    }

    pub(super) const fn trains(&self) -> bool {
        matches!(self.spec.work, Work::Training { .. })
    }
}

impl Platform {
    /// A function, from its deployment until its last instance is gone.
    pub fn function(&self, function: FunctionId) -> Option<FunctionView<'_>> {
        self.functions.get(&function).map(Function::view)
    }

    /// Number of the function's waiting requests. O(log n).
    pub fn waiting(&self, function: FunctionId) -> usize {
        self.functions.get(&function).map_or(0, |of| of.waiting.len())
    }

    /// The function, unless it is unknown or removed.
    pub(super) fn known(&self, function: FunctionId) -> Result<&Function, PlatformError> {
        let of = self.functions.get(&function).filter(|of| of.state != FunctionState::Removed);
        of.ok_or(PlatformError::UnknownFunction { function })
    }

    /// The regime in which the platform would serve the function now.
    pub fn regime_for(&self, spec: &FunctionSpec) -> Regime {
        choice::regime_for(spec, |regime| {
            let pool = self.pool_of(regime)?;
            Some(self.devices.values().filter(|device| device.pool == pool).count())
        })
    }

    pub(super) fn pool_for(&self, spec: &FunctionSpec) -> Result<usize, PlatformError> {
        let regime = self.regime_for(spec);
        self.pool_of(regime).ok_or(PlatformError::NoPool { regime })
    }

    pub(super) fn deploy(
        &mut self,
        function: FunctionId,
        spec: &FunctionSpec,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), PlatformError> {
        let pool = self.pool_for(spec)?;
        let profiled = !matches!(spec.work, Work::Inference { profile: None });
        let state = if profiled { FunctionState::Deployed } else { FunctionState::Profiling };
        let mut orders = Vec::new();
        if profiled {
            orders = self.add_to_pool(pool, function, spec)?;
        } else {
            actions.push(PlatformAction::Profile { function });
        }
        let (spec, stats) = (spec.clone(), FunctionStats::default());
        let of = Function {
            spec,
            state,
            pool,
            instances: 0,
            waiting: BTreeSet::new(),
            stats,
            fits: None,
            uses: None,
            takes: None,
        };
        self.functions.insert(function, of);
        self.take(pool, orders, actions);
        self.look_whether_it_fits(function, actions);
        Ok(())
    }

    fn add_to_pool(
        &mut self,
        pool: usize,
        function: FunctionId,
        spec: &FunctionSpec,
    ) -> Result<Vec<PoolAction>, PlatformError> {
        let mut spec = spec.clone();
        if self.pools[pool].regime() != Regime::Fractional
            && let Some(weights) = spec.weights.take()
        {
            spec.memory = spec.memory.saturating_add(weights.bytes);
        }
        check_function(function, self.pools[pool].regime(), &spec)?;
        let event = PoolEvent::FunctionAdded { function, spec: Box::new(spec) };
        Ok(self.pools[pool].orders(self.now, event)?)
    }

    /// Rejects the requests of a function that fits no device so far. If there is only no room now, requests wait.
    pub(super) fn look_whether_it_fits(&mut self, function: FunctionId, actions: &mut Vec<PlatformAction>) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let devices = self.devices.values().any(|device| device.pool == of.pool);
        if of.state != FunctionState::Deployed || of.fits == Some(true) || !devices {
            return;
        }
        let fits = self.pools[of.pool].fits(function);
        if of.fits.replace(fits) == Some(fits) || fits {
            return;
        }
        of.stats.unmet += 1;
        for (_, request) in of.waiting.clone() {
            self.reject(request, Rejection::NeverFits, actions);
        }
    }

    /// The function has its profile: its pool serves it, and its held requests go on.
    pub(super) fn learn(
        &mut self,
        function: FunctionId,
        profile: &ProfileTable,
        memory: Option<Bytes>,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), PlatformError> {
        let mut spec = self.known(function)?.spec.clone();
        spec.work = Work::Inference { profile: Some(profile.clone()) };
        spec.memory = memory.unwrap_or(spec.memory);
        // Devices may have come and gone since the deployment.
        let pool = self.pool_for(&spec)?;
        let orders = self.add_to_pool(pool, function, &spec)?;
        let mut waiting = BTreeSet::new();
        if let Some(of) = self.functions.get_mut(&function) {
            (of.spec, of.state, of.pool) = (spec, FunctionState::Deployed, pool);
            waiting.clone_from(&of.waiting);
        }
        self.take(pool, orders, actions);
        self.look_whether_it_fits(function, actions);
        for (_, request) in waiting {
            if self.requests.get(&request).is_some_and(super::Request::waits_for_profile) {
                self.give(request, actions);
            }
        }
        Ok(())
    }

    pub(super) fn rebound(
        &mut self,
        function: FunctionId,
        min_instances: u32,
        max_instances: u32,
        actions: &mut Vec<PlatformAction>,
    ) -> Result<(), PlatformError> {
        let of = self.known(function)?;
        if of.state == FunctionState::Deployed {
            let event = PoolEvent::BoundsChanged { function, min_instances, max_instances };
            self.tell(of.pool, event, actions)?;
        }
        if let Some(of) = self.functions.get_mut(&function) {
            (of.spec.min_instances, of.spec.max_instances) = (min_instances, max_instances);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, function: FunctionId, actions: &mut Vec<PlatformAction>) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let (pool, was) = (of.pool, core::mem::replace(&mut of.state, FunctionState::Removed));
        for (_, request) in of.waiting.clone() {
            self.reject(request, Rejection::Removed, actions);
        }
        if was == FunctionState::Deployed {
            self.inform(pool, PoolEvent::FunctionRemoved { function }, actions);
        }
        self.drain_all_of(function);
        self.drop_if_done(function);
    }

    /// Forgets a removed function after its last instance on the host.
    pub(super) fn drop_if_done(&mut self, function: FunctionId) {
        let done = |of: &Function| of.state == FunctionState::Removed && of.instances == 0;
        if self.functions.get(&function).is_some_and(done) {
            self.functions.remove(&function);
        }
    }
}

/// Functions by name, to show.
impl Platform {
    /// Calls `visit` with each function, in the order of their names.
    pub fn functions(&self, visit: &mut dyn FnMut(FunctionId, &FunctionView<'_>)) {
        let functions: &BTreeMap<FunctionId, Function> = &self.functions;
        for (&id, of) in functions {
            visit(id, &of.view());
        }
    }
}
