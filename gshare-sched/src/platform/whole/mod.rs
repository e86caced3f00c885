//! The pool of whole GPUs: a request scheduler (GPU-enabled FaaS), behind the words of a pool.
//!
//! # Problem
//! A [`RequestScheduler`] gives requests to GPUs, and loads and evicts models there; it knows models, not instances. For a platform a
//! model in a GPU's memory is an instance of its function: it starts, answers requests and is stopped.
//!
//! # Algorithm
//! | the scheduler says | order, and the answer to it |
//! |---|---|
//! | `Load` | `Start` of a new instance; `Ready` is `Loaded`, `Refused` and `Gone` are `LoadFailed` |
//! | `Evict` | `Drain` and `Stop`; `Gone` is `Evicted`. Of an instance that is gone already: `Evicted` at once |
//! | `Dispatch` | `Dispatch`; of an instance that is gone already: `NotResident` at once |
//! | `DropHost`, and `Load` that keeps a copy in host memory | `Forget`, `Fetch` |
//!
//! An instance that dies by itself is `NotResident` for its running request, which another load there then serves; without one it is
//! `Dropped`. A function is one model, numbered by the pool, since a function's name may return with other memory.
//!
//! **A minimum** of 1: a request without a caller makes the scheduler load the model where it suits best. The pool pins the copy there
//! and answers the request at once. A lost copy is loaded and pinned again. The function is unmet when no device has room beside the
//! copies kept for others, but not while a device is busy.
//!
//! **A maximum** is left to the scheduler ([`RequestEvent::ModelLimited`]), which alone knows the alternatives of a request without a new
//! copy. A load declined by the pool would look like a failed load, which counts as an attempt of the request.
//!
//! # Example
//! GPU 0 has room for one model and holds A, idle; a request for B comes. Orders: `Drain A`, `Stop A` (evicted); on `Gone A`: `Start B`;
//! on `Ready B`: `Dispatch` to B.
//!
//! # Invariants
//! A function has at most `max_instances` instances that are not stopped, unless the bound was lowered while they ran requests, and each
//! (GPU, model) at most one. All instances on a device, starting and stopping too, fit its memory; only ready ones run requests.
//!
//! # Cost
//! The scheduler's cost for an event, and O(log n) in instances and requests; O(its instances) per event while a function is removed.
//!
//! # Limits
//! - `min_instances` above 1 is refused, since a second request would go to the first copy and the scheduler has no order for another
//!   load; a scheduler that evicts pinned models keeps no minimum, and under one without a limit of copies functions are refused;
//! - SLOs: the scheduler orders requests by arrival and locality. A request is rejected as soon as it cannot meet its deadline;
//! - requests before the first device wait outside the scheduler; the platform bounds the time of a host's answer.

mod carry;
mod minimum;
#[cfg(test)]
mod tests;

use super::admission::MOST_REQUESTS;
use super::cluster::Cluster;
use super::pool::Pool;
use crate::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Life, Part, PlatformAction, PoolError, Regime, Rejection,
    StopCause, TenantLimits, Work,
};
use crate::request::{
    LocalityScheduler, ModelProfile, RequestAction, RequestError, RequestEvent, RequestScheduler,
    SchedulerConfig,
};
use gshare_core::dag::ComponentSet;
use gshare_core::share::GpuShare;
use gshare_core::{
    Bytes, ConfigError, Duration, Engine, FunctionId, GpuId, GpuKind, InstanceId, ModelId, NodeId, RequestId,
    SmShare, TenantId, Timestamp, resource::QuotaRange,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug)]
struct Device {
    node: NodeId,
    memory: Bytes,
}

#[derive(Debug)]
struct Function {
    infer: Duration,
    memory: Bytes,
    model: ModelId,
    instances: BTreeSet<InstanceId>,
    /// The GPU with the pinned copy.
    pin: Option<GpuId>,
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    model: ModelId,
    gpu: GpuId,
    loaded: bool,
    /// Requests that the scheduler has dispatched here, and that it has not been told to be over.
    given: BTreeSet<RequestId>,
}

/// GPUs that serve one request at a time and keep models in their memory, under any request scheduler.
pub struct WholePool {
    scheduler: Box<dyn RequestScheduler>,
    devices: BTreeMap<GpuId, Device>,
    /// Kinds of device for which the scheduler has the models' costs.
    kinds: BTreeSet<GpuKind>,
    functions: BTreeMap<FunctionId, Function>,
    models: BTreeMap<ModelId, FunctionId>,
    /// Numbers of models without a function, by memory. The scheduler would take no other memory for them.
    retired: BTreeMap<Bytes, Vec<ModelId>>,
    next_model: u32,
    instances: BTreeMap<InstanceId, Instance>,
    /// The instance of each model on each GPU, without stopped instances.
    resident: BTreeMap<(GpuId, ModelId), InstanceId>,
    /// Removed functions.
    ending: BTreeSet<FunctionId>,
    /// Requests without a caller, for the load of a copy that is to be kept.
    warming: BTreeMap<RequestId, FunctionId>,
    /// Number of the next request of this kind.
    next_warming: u64,
    tasks: VecDeque<RequestEvent>,
}

gshare_core::debug_fields!(WholePool { devices, instances });

impl WholePool {
    const REGIME: Regime = Regime::Whole;

    /// A pool without devices under a scheduler without GPUs and models.
    pub fn new(scheduler: Box<dyn RequestScheduler>) -> Self {
        Self {
            scheduler,
            devices: BTreeMap::new(),
            kinds: BTreeSet::new(),
            functions: BTreeMap::new(),
            models: BTreeMap::new(),
            retired: BTreeMap::new(),
            next_model: 0,
            instances: BTreeMap::new(),
            resident: BTreeMap::new(),
            ending: BTreeSet::new(),
            warming: BTreeMap::new(),
            next_warming: MOST_REQUESTS,
            tasks: VecDeque::new(),
        }
    }

    /// A pool under this crate's scheduler: [`SchedulerConfig::evict_cost_aware`] prices its evictions.
    ///
    /// # Errors
    /// When a field of the configuration is out of its bounds.
    pub fn with_config(config: SchedulerConfig) -> Result<Self, ConfigError> {
        Ok(Self::new(Box::new(LocalityScheduler::new(config)?)))
    }

    fn check_function(function: FunctionId, spec: &FunctionSpec) -> Result<Duration, PoolError> {
        let unsuitable = |why: &str| Err(Self::REGIME.unsuitable(function, why));
        let Some(infer) = infer(spec) else {
            return unsuitable(
                "work: need an inference function whose profile has a point of batch 1 with a p50 above 0",
            );
        };
        let hour = Duration::from_secs(3_600);
        for (field, time) in
            [("load_disk", spec.load_disk), ("load_host", spec.load_host), ("p50 of the profile", infer)]
        {
            if time > hour {
                return unsuitable(&format!("{field} is {time}: need at most {hour}"));
            }
        }
        minimum::check(spec.min_instances).map_err(|why| Self::REGIME.unsuitable(function, why))?;
        Ok(infer)
    }

    /// Passes an event to the scheduler, which may refuse it; a refused event has changed nothing.
    fn try_tell(
        &mut self,
        event: RequestEvent,
        refused: impl FnOnce(RequestError) -> PoolError,
        cluster: &mut Cluster,
    ) -> Result<(), PoolError> {
        let orders = self.scheduler.orders(cluster.now, event).map_err(refused)?;
        for order in orders {
            self.obey(order, cluster);
        }
        Ok(())
    }

    /// The scheduler's event for a request of the queue.
    fn arrival(&self, request: RequestId, cluster: &Cluster) -> Option<RequestEvent> {
        let found = cluster.requests.get(&request)?;
        let model = self.functions.get(&found.function)?.model;
        let (tenant, deadline) = (cluster.functions[&found.function].spec.tenant, found.deadline);
        Some(RequestEvent::Arrived { request, model, tenant, deadline })
    }
}

/// Time of one request on a whole device: the p50 of the largest point without batches.
fn infer(spec: &FunctionSpec) -> Option<Duration> {
    let Work::Inference { profile: Some(profile) } = &spec.work else { return None };
    let single = profile.points().iter().filter(|point| point.batch == 1);
    single.max_by_key(|point| point.area()).map(|point| point.p50).filter(|p50| !p50.is_zero())
}

/// The costs of a function's model on a kind of device.
fn profiled(of: &Function, spec: &FunctionSpec, kind: GpuKind) -> RequestEvent {
    let FunctionSpec { load_disk, load_host, .. } = *spec;
    let profile = ModelProfile { load_disk, load_host, infer: of.infer };
    RequestEvent::ModelProfiled { model: of.model, kind, profile }
}

impl Pool for WholePool {
    fn regime(&self) -> Regime {
        Self::REGIME
    }

    fn device_joined(
        &mut self,
        cluster: &mut Cluster,
        gpu: GpuId,
        spec: &DeviceSpec,
    ) -> Result<(), PoolError> {
        let DeviceSpec { node, kind, memory, .. } = *spec;
        let joined = RequestEvent::GpuJoined { gpu, kind, node, memory };
        self.try_tell(joined, |why| Self::REGIME.bad_device(gpu, why), cluster)?;
        self.devices.insert(gpu, Device { node, memory });
        let first = self.kinds.is_empty();
        if self.kinds.insert(kind) {
            let profiled =
                |(id, of): (&FunctionId, &Function)| profiled(of, &cluster.functions[id].spec, kind);
            self.tasks.extend(self.functions.iter().map(profiled));
        }
        if first {
            // Requests from before the first device have waited in their functions' queues alone.
            let waiting = self.functions.keys().flat_map(|function| cluster.queue(*function));
            let waiting: BTreeSet<RequestId> = waiting.map(|(_, request)| *request).collect();
            let arrivals: Vec<_> = waiting.into_iter().filter_map(|one| self.arrival(one, cluster)).collect();
            self.tasks.extend(arrivals);
        }
        Ok(())
    }

    fn device_lost(&mut self, cluster: &mut Cluster, gpu: GpuId, lost: &[InstanceId]) {
        self.devices.remove(&gpu);
        let given: Vec<RequestId> = lost.iter().flat_map(|one| self.forget(*one)).collect();
        self.tasks.push_back(RequestEvent::GpuLost { gpu });
        // They wait at the scheduler by then.
        let ended = given.into_iter().filter(|request| !cluster.is_open(*request));
        self.tasks.extend(ended.map(|request| RequestEvent::Cancelled { request }));
        for function in self.functions.keys().copied().collect::<Vec<_>>() {
            self.pin(function, cluster);
        }
    }

    fn tenant_limited(&mut self, cluster: &mut Cluster, tenant: TenantId, limits: TenantLimits) {
        let limited = RequestEvent::TenantLimited { tenant, memory: limits.memory };
        self.tasks.push_back(limited);
        self.run(cluster);
    }

    fn function_added(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        let spec = cluster.functions[&function].spec.clone();
        let infer = Self::check_function(function, &spec)?;
        let known = self.retired.get(&spec.memory).and_then(|models| models.last()).copied();
        let model = known.unwrap_or(ModelId::new(self.next_model));
        let added = RequestEvent::ModelAdded { model, memory: spec.memory };
        let limited = RequestEvent::ModelLimited { model, copies: spec.max_instances };
        for event in [added, limited] {
            self.try_tell(event, |why| Self::REGIME.unsuitable(function, why), cluster)?;
        }
        match known {
            Some(_) => {
                self.retired.get_mut(&spec.memory).and_then(Vec::pop);
            }
            None => self.next_model += 1,
        }
        let new = Function { infer, memory: spec.memory, model, instances: BTreeSet::new(), pin: None };
        self.tasks.extend(self.kinds.iter().map(|kind| profiled(&new, &spec, *kind)));
        self.functions.insert(function, new);
        self.models.insert(model, function);
        Ok(())
    }

    fn bounds_changed(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        let (Some(of), Some(own)) = (cluster.functions.get(&function), self.functions.get(&function)) else {
            return Ok(());
        };
        let refused = |why: &dyn core::fmt::Display| Self::REGIME.refused(format_args!("{function}: {why}"));
        minimum::check(of.spec.min_instances).map_err(|why| refused(&why))?;
        let limited = RequestEvent::ModelLimited { model: own.model, copies: of.spec.max_instances };
        self.try_tell(limited, |why| refused(&why), cluster)?;
        self.pin(function, cluster);
        Ok(())
    }

    fn function_removed(&mut self, cluster: &mut Cluster, function: FunctionId) {
        self.ending.insert(function);
        self.pin(function, cluster);
        self.cool(function);
    }

    fn arrived(&mut self, cluster: &mut Cluster, request: RequestId) {
        if !self.kinds.is_empty() {
            self.tasks.extend(self.arrival(request, cluster));
        }
    }

    fn withdrawn(&mut self, _: &Cluster, request: RequestId, _: &super::requests::Request) {
        // A request with a GPU cannot be cancelled; its dispatch is answered at once.
        if !self.kinds.is_empty() {
            self.tasks.push_back(RequestEvent::Cancelled { request });
        }
    }

    fn done(&mut self, _: &mut Cluster, request: RequestId, instance: InstanceId, took: Duration) {
        if let Some(one) = self.instances.get_mut(&instance) {
            one.given.remove(&request);
            self.tasks.push_back(RequestEvent::Completed { gpu: one.gpu, request, took });
        }
    }

    fn reported(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport) {
        let Some(one) = self.instances.get_mut(&instance) else { return };
        let since = cluster.instances.get(instance).map_or(cluster.now, |of| of.since);
        if report == InstanceReport::Ready {
            one.loaded = true;
            let took = cluster.now.saturating_since(since);
            self.tasks.push_back(RequestEvent::Loaded { gpu: one.gpu, model: one.model, took });
        }
    }

    fn gone(&mut self, cluster: &mut Cluster, instance: InstanceId, _: InstanceReport) {
        let Some(one) = self.instances.get(&instance) else { return };
        let Instance { function, gpu, model, loaded, .. } = *one;
        let resident = self.resident.get(&(gpu, model)) == Some(&instance);
        let (open, over): (Vec<_>, Vec<_>) =
            self.forget(instance).into_iter().partition(|request| cluster.is_open(*request));
        for request in over {
            self.tasks.push_back(self.without_caller((gpu, model), request));
        }
        self.tasks.push_back(match (resident, open.first()) {
            (false, _) => RequestEvent::Evicted { gpu, model },
            (true, _) if !loaded => RequestEvent::LoadFailed { gpu, model },
            (true, Some(&request)) => RequestEvent::NotResident { gpu, request },
            (true, None) => RequestEvent::Dropped { gpu, model },
        });
        self.pin(function, cluster);
    }

    fn keep_minimum(&mut self, cluster: &mut Cluster, function: FunctionId, may_start: bool) {
        self.warm(function, may_start, cluster);
    }

    fn deadline(&mut self, _: &mut Cluster) {
        self.tasks.push_back(RequestEvent::DeadlineReached);
    }

    fn settle(&mut self, cluster: &mut Cluster) {
        self.run(cluster);
        self.end_removed(cluster);
        #[cfg(debug_assertions)]
        self.invariants(cluster);
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.scheduler.next_deadline()
    }

    fn invariants(&self, cluster: &Cluster) {
        assert!(self.tasks.is_empty(), "the scheduler was not told something");
        let mut used: BTreeMap<GpuId, u64> = BTreeMap::new();
        for (id, one) in &self.instances {
            let of = &self.functions[&one.function];
            assert!(of.instances.contains(id) && of.model == one.model, "{id} is not of its function");
            assert!(
                one.given.is_empty() || self.resident.get(&(one.gpu, one.model)) == Some(id),
                "{id} runs"
            );
            *used.entry(one.gpu).or_default() += of.memory.get();
        }
        for (gpu, used) in used {
            assert!(used <= self.devices[&gpu].memory.get(), "{gpu} is too full");
        }
        assert_eq!(self.models.len(), self.functions.len(), "models of functions");
        for (function, of) in &self.functions {
            let here = |gpu| self.resident.contains_key(&(gpu, of.model));
            assert!(of.pin.is_none_or(here), "the pinned copy of {function} is not there");
            let kept = cluster.functions.get(function).is_some_and(|of| of.spec.min_instances > 0);
            let any = of
                .instances
                .iter()
                .any(|id| self.resident.get(&(self.instances[id].gpu, of.model)) == Some(id));
            assert_eq!(of.pin.is_some(), kept && any && !cluster.is_removed(*function), "pin of {function}");
        }
    }
}
