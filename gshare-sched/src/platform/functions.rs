//! Functions from their deployment to their removal.

use super::admission::check_function;
use super::cluster::Cluster;
use super::moves::Moves;
use super::{
    Bytes, Duration, FunctionId, GpuId, InstanceId, Platform, PlatformAction, PlatformError, Rejection,
    RequestId, Timestamp, choice, gpu_time,
};
use crate::platform::{FunctionSpec, Regime, Work};
use gshare_core::profile::ProfileTable;
use gshare_core::{NodeId, Quota, SmShare};
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
    /// Whether it has no instance, and no device so far could hold one: its requests are rejected.
    pub never_fits: bool,
}

#[derive(Debug)]
pub(super) struct Function {
    pub(super) spec: FunctionSpec,
    pub(super) state: FunctionState,
    pub(super) pool: usize,
    /// The instances the host knows of, and the number of those that neither drain nor stop.
    pub(super) instances: BTreeSet<InstanceId>,
    pub(super) staying: u32,
    /// Its requests that wait for their tenant or for a profile, by arrival; then those that wait for an instance.
    pub(super) held: BTreeSet<(Timestamp, RequestId)>,
    pub(super) queue: BTreeSet<(Timestamp, RequestId)>,
    /// No start for its minimum before this time, since a start has failed.
    pub(super) not_before: Timestamp,
    /// Whether the processes of its last start ended before they were ready. Shared devices then start none ahead of requests.
    pub(super) fails: bool,
    /// The version of the ledger at which a lack of room was last counted.
    pub(super) unmet_at: Option<u64>,
    pub(super) stats: FunctionStats,
    /// Whether the devices could hold an instance at any time so far; None before the first device.
    pub(super) fits: Option<bool>,
    /// The GPU time of one request: the mean of answered requests, with more weight on recent ones.
    pub(super) uses: Option<Duration>,
    /// The time an instance works for one request, as a mean of the same kind.
    pub(super) takes: Option<Duration>,
    /// The times of its instances' moves.
    pub(super) moves: Moves,
}

/// The mean after the addition of `time`.
fn moved(mean: Option<Duration>, time: Duration) -> Option<Duration> {
    let moved = |mean: Duration| mean.saturating_sub(mean.scaled(1, 8)).saturating_add(time.scaled(1, 8));
    Some(mean.map_or(time, moved))
}

impl Function {
    fn new(spec: FunctionSpec, state: FunctionState, pool: usize) -> Self {
        Self {
            spec,
            state,
            pool,
            instances: BTreeSet::new(),
            staying: 0,
            held: BTreeSet::new(),
            queue: BTreeSet::new(),
            not_before: Timestamp::ZERO,
            fails: false,
            unmet_at: None,
            stats: FunctionStats::default(),
            fits: None,
            uses: None,
            takes: None,
            moves: Moves::default(),
        }
    }

    /// Number of its waiting requests.
    pub(super) fn waiting(&self) -> usize {
        self.held.len() + self.queue.len()
    }

    fn all_waiting(&self) -> Vec<RequestId> {
        self.held.iter().chain(&self.queue).map(|(_, request)| *request).collect()
    }

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

    fn view(&self) -> FunctionView<'_> {
        let Self { spec, state, stats, .. } = self;
        let instances = u32::try_from(self.instances.len()).unwrap_or(u32::MAX);
        let never_fits = self.never_fits();
        FunctionView { spec, state: *state, instances, stats: *stats, never_fits }
    }

    /// Whether no request of it will find an instance. An instance serves on where no new one may start.
    pub(super) const fn never_fits(&self) -> bool {
        matches!(self.fits, Some(false)) && self.staying == 0
    }

    pub(super) const fn trains(&self) -> bool {
        matches!(self.spec.work, Work::Training { .. })
    }
}

impl Platform {
    /// A function, from its deployment until its last instance is gone.
    pub fn function(&self, function: FunctionId) -> Option<FunctionView<'_>> {
        self.cluster.functions.get(&function).map(Function::view)
    }

    /// Calls `visit` with each function, in the order of their names.
    pub fn functions(&self, visit: &mut dyn FnMut(FunctionId, &FunctionView<'_>)) {
        for (id, of) in self.cluster.functions.sorted() {
            visit(id, &of.view());
        }
    }

    /// Number of the function's waiting requests. O(log n).
    pub fn waiting(&self, function: FunctionId) -> usize {
        self.cluster.functions.get(&function).map_or(0, Function::waiting)
    }

    /// The function, unless it is unknown or removed.
    pub(super) fn known(&self, function: FunctionId) -> Result<&Function, PlatformError> {
        let of = self.cluster.functions.get(&function).filter(|of| of.state != FunctionState::Removed);
        of.ok_or(PlatformError::UnknownFunction { function })
    }

    /// The regime in which the platform would serve the function now.
    pub fn regime_for(&self, spec: &FunctionSpec) -> Regime {
        choice::regime_for(spec, |regime| Some(self.cluster.devices.of_pool(self.pool_of(regime)?)))
    }

    pub(super) fn pool_for(&self, spec: &FunctionSpec) -> Result<usize, PlatformError> {
        let regime = self.regime_for(spec);
        self.pool_of(regime).ok_or(PlatformError::NoPool { regime })
    }

    pub(super) fn deploy(&mut self, function: FunctionId, spec: &FunctionSpec) -> Result<(), PlatformError> {
        let pool = self.pool_for(spec)?;
        if matches!(spec.work, Work::Inference { profile: None }) {
            let of = Function::new(spec.clone(), FunctionState::Profiling, pool);
            self.cluster.functions.insert(function, of);
            self.cluster.orders.push(PlatformAction::Profile { function });
            return Ok(());
        }
        self.serve(function, Function::new(spec.clone(), FunctionState::Deployed, pool))
    }

    /// Gives a function to its pool; if that refuses, the function stays as it was.
    fn serve(&mut self, function: FunctionId, mut of: Function) -> Result<(), PlatformError> {
        let pool = of.pool;
        // Elsewhere each instance has its own.
        if self.pools[pool].regime() != Regime::Fractional
            && let Some(weights) = of.spec.weights.take()
        {
            of.spec.memory = of.spec.memory.saturating_add(weights.bytes);
        }
        check_function(function, self.pools[pool].regime(), &of.spec)?;
        let before = self.cluster.functions.insert(function, of);
        if let Err(error) = self.try_tell(pool, |pool, cluster| pool.function_added(cluster, function)) {
            match before {
                Some(before) => self.cluster.functions.insert(function, before),
                None => self.cluster.functions.remove(&function),
            };
            return Err(error);
        }
        self.cluster.has_fewer(function);
        self.unfit.insert(function);
        self.look_whether_it_fits(function);
        Ok(())
    }

    /// Rejects the requests of a function that fits no device so far. If there is only no room now, requests wait.
    pub(super) fn look_whether_it_fits(&mut self, function: FunctionId) {
        let Some(of) = self.cluster.functions.get_mut(&function) else { return };
        if of.state != FunctionState::Deployed || self.cluster.devices.of_pool(of.pool) == 0 {
            return;
        }
        let fits = self.cluster.devices.hold(of.pool, &of.spec) && self.pools[of.pool].fits(function);
        let before = of.fits.replace(fits);
        if fits {
            self.unfit.remove(&function);
        } else {
            if before != Some(false) {
                self.cluster.unmet(function);
            }
            self.reject_unfit(function);
        }
    }

    fn reject_unfit(&mut self, function: FunctionId) {
        let unfit = self.cluster.functions.get(&function).filter(|of| of.never_fits());
        for request in unfit.map(Function::all_waiting).unwrap_or_default() {
            self.reject(request, Rejection::NeverFits);
        }
    }

    /// An instance of the function has ended, and its pool knows.
    pub(super) fn instance_gone(&mut self, function: FunctionId) {
        self.reject_unfit(function);
        self.drop_if_done(function);
    }

    /// New instances of the function go to these nodes.
    pub(super) fn allow_nodes(
        &mut self,
        function: FunctionId,
        nodes: Option<&BTreeSet<NodeId>>,
    ) -> Result<(), PlatformError> {
        let of = self.known(function)?;
        let (pool, spec) = (of.pool, of.spec.clone().with_nodes(nodes.cloned()));
        let deployed = of.state == FunctionState::Deployed;
        if deployed {
            check_function(function, self.pools[pool].regime(), &spec)?;
        }
        if let Some(of) = self.cluster.functions.get_mut(&function) {
            of.spec = spec;
        }
        self.unfit.insert(function);
        self.look_whether_it_fits(function);
        if deployed {
            self.tell(pool, |pool, _| pool.nodes_changed());
        }
        self.room_changed();
        Ok(())
    }

    /// The function has its profile: its pool serves it, and its held requests go on.
    pub(super) fn learn(
        &mut self,
        function: FunctionId,
        profile: &ProfileTable,
        memory: Option<Bytes>,
    ) -> Result<(), PlatformError> {
        let of = self.known(function)?;
        let mut spec = of.spec.clone();
        spec.work = Work::Inference { profile: Some(profile.clone()) };
        spec.memory = memory.unwrap_or(spec.memory);
        // Devices may have come and gone since the deployment.
        let mut new = Function::new(spec, FunctionState::Deployed, 0);
        (new.held, new.stats, new.pool) = (of.held.clone(), of.stats, self.pool_for(&new.spec)?);
        let waiting = new.all_waiting();
        self.serve(function, new)?;
        for request in waiting {
            if self.cluster.requests.get(&request).is_some_and(super::Request::waits_for_profile) {
                self.give(request);
            }
        }
        Ok(())
    }

    pub(super) fn rebound(
        &mut self,
        function: FunctionId,
        min_instances: u32,
        max_instances: u32,
    ) -> Result<(), PlatformError> {
        let of = self.known(function)?;
        let (pool, deployed) = (of.pool, of.state == FunctionState::Deployed);
        let before = self.cluster.set_bounds(function, (min_instances, max_instances));
        if deployed {
            let told = self.try_tell(pool, |pool, cluster| pool.bounds_changed(cluster, function));
            told.inspect_err(|_| {
                self.cluster.set_bounds(function, before);
            })?;
            self.cluster.has_fewer(function);
        }
        Ok(())
    }

    pub(super) fn find_instance(
        &mut self,
        function: FunctionId,
        gpu: GpuId,
        share: (Quota, SmShare),
    ) -> Result<(), PlatformError> {
        let of = self.known(function)?;
        let pool = of.pool;
        if of.state != FunctionState::Deployed {
            return Err(PlatformError::NotDeployed { function });
        }
        self.cluster.devices.get(gpu).ok_or(PlatformError::UnknownDevice { gpu })?;
        let before = self.cluster.orders.len();
        self.try_tell(pool, |pool, cluster| pool.instance_found(cluster, function, gpu, share))?;
        let new: Vec<InstanceId> =
            self.cluster.orders[before..].iter().filter_map(PlatformAction::instance).collect();
        for of in new {
            self.cluster.runs_already(of);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, function: FunctionId) {
        let Some(of) = self.cluster.functions.get_mut(&function) else { return };
        let (pool, was) = (of.pool, core::mem::replace(&mut of.state, FunctionState::Removed));
        for request in of.all_waiting() {
            self.reject(request, Rejection::Removed);
        }
        if was == FunctionState::Deployed {
            self.tell(pool, |pool, cluster| pool.function_removed(cluster, function));
        }
        self.cluster.drain_all_of(function);
        self.drop_if_done(function);
    }

    /// Forgets a removed function after its last instance on the host.
    fn drop_if_done(&mut self, function: FunctionId) {
        let done = |of: &Function| of.state == FunctionState::Removed && of.instances.is_empty();
        if self.cluster.functions.get(&function).is_some_and(done) {
            self.cluster.forget_function(function);
            self.unfit.remove(&function);
        }
    }
}

impl Cluster {
    /// Sets a function's minimum and maximum of instances, and returns those before.
    fn set_bounds(&mut self, function: FunctionId, (least, most): (u32, u32)) -> (u32, u32) {
        let Some(of) = self.functions.get_mut(&function) else { return (least, most) };
        of.unmet_at = None;
        let spec = &mut of.spec;
        let before = (spec.min_instances, spec.max_instances);
        (spec.min_instances, spec.max_instances) = (least, most);
        before
    }
}
