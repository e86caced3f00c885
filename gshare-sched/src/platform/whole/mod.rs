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
//! and answers the request at once. A lost copy is loaded and pinned again, or ten seconds after a failed load. The host learns `Unmet`
//! when no device has room beside the copies kept for others, or the tenant may not have the memory, but not while a device is busy.
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

use super::tickets::Tickets;
use crate::platform::{
    DeviceSpec, FunctionSpec, InstanceNames, InstanceReport, InstanceView, Life, Part, PlatformAction, Pool,
    PoolAction, PoolError, PoolEvent, Regime, Rejection, StopCause, Work,
};
use crate::request::{
    LocalityScheduler, ModelProfile, RequestAction, RequestError, RequestEvent, RequestScheduler,
    SchedulerConfig,
};
use gshare_core::dag::ComponentSet;
use gshare_core::share::GpuShare;
use gshare_core::{
    Bytes, ConfigError, Duration, Engine, FunctionId, GpuId, GpuKind, InstanceId, ModelId, NodeId, RequestId,
    SmShare, Timestamp, resource::QuotaRange,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug)]
struct Device {
    node: NodeId,
    memory: Bytes,
}

#[derive(Debug)]
struct Function {
    spec: FunctionSpec,
    infer: Duration,
    model: ModelId,
    removed: bool,
    instances: BTreeSet<InstanceId>,
    told_unmet: bool,
    /// The GPU with the pinned copy.
    pin: Option<GpuId>,
    /// No load for the pinned copy before this time, since loads have failed.
    not_before: Timestamp,
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    model: ModelId,
    gpu: GpuId,
    life: Life,
    since: Timestamp,
    requests: BTreeSet<RequestId>,
    /// Tickets of withdrawn requests that ran here; the scheduler learns of them after the instance's end.
    withdrawn: Vec<RequestId>,
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
    names: InstanceNames,
    /// The instance of each model on each GPU, without stopped instances.
    resident: BTreeMap<(GpuId, ModelId), InstanceId>,
    tickets: Tickets,
    /// Removed functions.
    ending: BTreeSet<FunctionId>,
    /// Tickets from before the first device, with the deadlines of their requests.
    early: BTreeMap<RequestId, Option<Timestamp>>,
    /// Tickets without a request, for the load of a copy that is to be kept.
    warming: BTreeMap<RequestId, FunctionId>,
    /// Functions that may lack their kept copy, or have it pinned at a wrong place.
    lacking: BTreeSet<FunctionId>,
    /// Whether the event affected the functions in `lacking`; then the times for another look after failed loads.
    look: bool,
    retry: Option<Timestamp>,
    now: Timestamp,
    tasks: VecDeque<RequestEvent>,
}

gshare_core::debug_fields!(WholePool { now, devices, instances });

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
            names: InstanceNames::default(),
            resident: BTreeMap::new(),
            tickets: Tickets::default(),
            ending: BTreeSet::new(),
            early: BTreeMap::new(),
            warming: BTreeMap::new(),
            lacking: BTreeSet::new(),
            look: false,
            retry: None,
            now: Timestamp::ZERO,
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

    fn check_function(function: FunctionId, spec: &FunctionSpec) -> Result<(), PoolError> {
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
        minimum::check(spec.min_instances).map_err(|why| Self::REGIME.unsuitable(function, why))
    }

    /// Passes an event to the scheduler, which may refuse it; a refused event has changed nothing.
    fn try_tell(
        &mut self,
        event: RequestEvent,
        refused: impl FnOnce(RequestError) -> PoolError,
        actions: &mut Vec<PoolAction>,
    ) -> Result<(), PoolError> {
        let orders = self.scheduler.orders(self.now, event).map_err(refused)?;
        for order in orders {
            self.obey(order, actions);
        }
        Ok(())
    }

    /// Passes the events that only the scheduler can judge, before any other change.
    fn admit(&mut self, event: &PoolEvent, actions: &mut Vec<PoolAction>) -> Result<(), PoolError> {
        match event {
            PoolEvent::DeviceJoined { gpu, spec } => {
                let DeviceSpec { node, kind, memory, .. } = *spec;
                let joined = RequestEvent::GpuJoined { gpu: *gpu, kind, node, memory };
                self.try_tell(joined, |why| Self::REGIME.bad_device(*gpu, why), actions)
            }
            PoolEvent::TenantLimited { tenant, limits } => {
                let limited = RequestEvent::TenantLimited { tenant: *tenant, memory: limits.memory };
                self.try_tell(limited, |why| Self::REGIME.refused(why), actions)
            }
            PoolEvent::BoundsChanged { function, min_instances, max_instances } => {
                minimum::check(*min_instances)
                    .map_err(|why| Self::REGIME.refused(format_args!("{function}: {why}")))?;
                let Some(of) = self.functions.get_mut(function) else { return Ok(()) };
                let limited = RequestEvent::ModelLimited { model: of.model, copies: *max_instances };
                let told = self.scheduler.orders(self.now, limited);
                let orders = told.map_err(|why| Self::REGIME.refused(format_args!("{function}: {why}")))?;
                of.spec.max_instances = *max_instances;
                for order in orders {
                    self.obey(order, actions);
                }
                Ok(())
            }
            PoolEvent::FunctionAdded { function, spec } => {
                Self::check_function(*function, spec)?;
                let known = self.retired.get(&spec.memory).and_then(|models| models.last()).copied();
                let model = known.unwrap_or(ModelId::new(self.next_model));
                let added = RequestEvent::ModelAdded { model, memory: spec.memory };
                let limited = RequestEvent::ModelLimited { model, copies: spec.max_instances };
                for event in [added, limited] {
                    self.try_tell(event, |why| Self::REGIME.unsuitable(*function, why), actions)?;
                }
                match known {
                    Some(_) => {
                        self.retired.get_mut(&spec.memory).and_then(Vec::pop);
                    }
                    None => self.next_model += 1,
                }
                let new = Function {
                    spec: (**spec).clone(),
                    infer: infer(spec).unwrap_or_default(),
                    model,
                    removed: false,
                    instances: BTreeSet::new(),
                    told_unmet: false,
                    pin: None,
                    not_before: Timestamp::ZERO,
                };
                self.functions.insert(*function, new);
                self.models.insert(model, *function);
                Ok(())
            }
            PoolEvent::Arrived { request, function, deadline, .. } => {
                self.arrived(*request, *function, *deadline, actions)
            }
            _ => Ok(()),
        }
    }

    fn arrived(
        &mut self,
        request: RequestId,
        function: FunctionId,
        deadline: Option<Timestamp>,
        actions: &mut Vec<PoolAction>,
    ) -> Result<(), PoolError> {
        let ticket = self.tickets.add(request, function);
        if self.kinds.is_empty() {
            self.early.insert(ticket, deadline);
            return Ok(());
        }
        let told = match self.arrival(ticket, deadline) {
            Some(event) => self.try_tell(event, |why| Self::REGIME.refused(why), actions),
            None => Ok(()),
        };
        if told.is_err() {
            self.tickets.remove(request);
        }
        told
    }

    /// The scheduler's event for a request.
    fn arrival(&self, ticket: RequestId, deadline: Option<Timestamp>) -> Option<RequestEvent> {
        let held = self.tickets.get(self.tickets.holder(ticket)?)?;
        let of = self.functions.get(&held.function)?;
        let (model, tenant) = (of.model, of.spec.tenant);
        Some(RequestEvent::Arrived { request: ticket, model, tenant, deadline })
    }

    /// A device joined: models get costs on its kind, and early requests go to the scheduler.
    fn joined(&mut self, gpu: GpuId, spec: &DeviceSpec) {
        self.devices.insert(gpu, Device { node: spec.node, memory: spec.memory });
        for of in self.functions.values_mut() {
            of.told_unmet = false;
        }
        self.look = true;
        if self.kinds.insert(spec.kind) {
            let all: Vec<RequestEvent> = self.functions.values().map(|of| profiled(of, spec.kind)).collect();
            self.tasks.extend(all);
        }
        for (ticket, deadline) in core::mem::take(&mut self.early) {
            self.tasks.extend(self.arrival(ticket, deadline));
        }
    }

    fn lost(&mut self, gpu: GpuId) {
        self.devices.remove(&gpu);
        let on = self.instances.iter().filter(|(_, one)| one.gpu == gpu).map(|(id, _)| *id);
        let mut withdrawn = Vec::new();
        for id in on.collect::<Vec<_>>() {
            withdrawn.extend(self.forget(id));
        }
        for of in self.functions.values_mut() {
            of.told_unmet = false;
        }
        self.look = true;
        self.tasks.push_back(RequestEvent::GpuLost { gpu });
        // They wait at the scheduler by then.
        self.tasks.extend(withdrawn.into_iter().map(|request| RequestEvent::Cancelled { request }));
    }

    fn remove(&mut self, function: FunctionId) {
        if let Some(of) = self.functions.get_mut(&function) {
            of.removed = true;
            self.ending.insert(function);
        }
        self.look_at(function);
    }

    /// Handles the deadlines before now.
    fn catch_up(&mut self, actions: &mut Vec<PoolAction>) {
        if self.scheduler.next_deadline().is_some_and(|at| at <= self.now) {
            self.tasks.push_back(RequestEvent::DeadlineReached);
            self.run(actions);
        }
        if self.retry.is_some_and(|at| at <= self.now) {
            (self.retry, self.look) = (None, true);
        }
        self.run(actions);
    }
}

/// Time of one request on a whole device: the p50 of the largest point without batches.
fn infer(spec: &FunctionSpec) -> Option<Duration> {
    let Work::Inference { profile: Some(profile) } = &spec.work else { return None };
    let single = profile.points().iter().filter(|point| point.batch == 1);
    single.max_by_key(|point| point.area()).map(|point| point.p50).filter(|p50| !p50.is_zero())
}

fn profiled(of: &Function, kind: GpuKind) -> RequestEvent {
    let FunctionSpec { load_disk, load_host, .. } = of.spec;
    let profile = ModelProfile { load_disk, load_host, infer: of.infer };
    RequestEvent::ModelProfiled { model: of.model, kind, profile }
}

impl Engine for WholePool {
    type Event = PoolEvent;
    type Action = PoolAction;
    type Error = PoolError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: PoolEvent,
        actions: &mut Vec<PoolAction>,
    ) -> Result<(), PoolError> {
        let before = core::mem::replace(&mut self.now, now);
        self.admit(&event, actions).inspect_err(|_| self.now = before)?;
        if let PoolEvent::FunctionRemoved { function } = event {
            // Before any start for the function.
            self.remove(function);
        }
        self.catch_up(actions);
        match event {
            PoolEvent::DeviceJoined { gpu, spec } => self.joined(gpu, &spec),
            PoolEvent::DeviceLost { gpu } => self.lost(gpu),
            PoolEvent::TenantLimited { .. } => self.look = true,
            PoolEvent::FunctionAdded { function, .. } => {
                if let Some(of) = self.functions.get(&function) {
                    self.tasks.extend(self.kinds.iter().map(|kind| profiled(of, *kind)));
                }
                self.look_at(function);
            }
            PoolEvent::BoundsChanged { function, min_instances, .. } => {
                if let Some(of) = self.functions.get_mut(&function) {
                    let before = core::mem::replace(&mut of.spec.min_instances, min_instances);
                    if before != min_instances {
                        self.look_at(function);
                    }
                }
            }
            PoolEvent::Done { request, took } => self.done(request, took),
            PoolEvent::Instance { instance, report } => self.report(instance, report),
            _ => {}
        }
        self.run(actions);
        self.keep_minimums(actions);
        self.end_removed(actions);
        #[cfg(debug_assertions)]
        self.invariants();
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        [self.scheduler.next_deadline(), self.retry].into_iter().flatten().min()
    }
}

impl Pool for WholePool {
    fn regime(&self) -> Regime {
        Self::REGIME
    }

    fn instances(&self, visit: &mut dyn FnMut(&InstanceView)) {
        for (&instance, one) in &self.instances {
            visit(&InstanceView {
                instance,
                function: one.function,
                life: one.life,
                parts: vec![self.part(one.function, one.gpu)],
                requests: u32::try_from(one.requests.len()).unwrap_or(u32::MAX),
            });
        }
    }

    fn waiting(&self, function: FunctionId) -> usize {
        self.tickets.waiting(function)
    }

    fn name_instances_by(&mut self, names: InstanceNames) {
        self.names = names;
    }

    fn fits(&self, function: FunctionId) -> bool {
        let memory = self.functions.get(&function).map(|of| of.spec.memory);
        self.devices.values().any(|device| memory.is_some_and(|memory| device.memory >= memory))
    }

    fn withdraw(&mut self, request: RequestId) {
        let Some(held) = self.tickets.remove(request) else { return };
        if let Some(one) = held.on.and_then(|id| self.instances.get_mut(&id)) {
            one.requests.remove(&request);
            one.withdrawn.push(held.ticket);
        } else if self.early.remove(&held.ticket).is_none() {
            // A request with a GPU cannot be cancelled; its dispatch is answered at once.
            self.tasks.push_back(RequestEvent::Cancelled { request: held.ticket });
        }
    }

    fn invariants(&self) {
        self.tickets.invariants();
        assert!(self.tasks.is_empty(), "the scheduler was not told something");
        let mut running = 0;
        let mut used: BTreeMap<GpuId, u64> = BTreeMap::new();
        for (id, one) in &self.instances {
            let resident = self.resident.get(&(one.gpu, one.model)) == Some(id);
            assert_eq!(resident, one.life != Life::Stopped, "{id} is the one on its GPU");
            assert!(one.requests.is_empty() || one.life == Life::Ready, "{id} runs a request");
            let on = |request: &RequestId| self.tickets.get(*request).and_then(|held| held.on);
            assert!(one.requests.iter().all(|request| on(request) == Some(*id)), "requests of {id}");
            let of = &self.functions[&one.function];
            assert!(of.instances.contains(id) && of.model == one.model, "{id} is not of its function");
            *used.entry(one.gpu).or_default() += of.spec.memory.get();
            running += one.requests.len();
        }
        assert_eq!(
            self.resident.len(),
            self.instances.values().filter(|one| one.life != Life::Stopped).count()
        );
        for (gpu, used) in used {
            assert!(used <= self.devices[&gpu].memory.get(), "{gpu} is too full");
        }
        assert_eq!(
            running,
            self.tickets.iter().filter(|(_, held)| held.on.is_some()).count(),
            "requests that run"
        );
        assert_eq!(self.models.len(), self.functions.len(), "models of functions");
        for (id, of) in self.functions.iter().filter(|(_, of)| of.spec.min_instances > 0 && !of.removed) {
            let kept = of.pin.is_some_and(|gpu| self.resident.contains_key(&(gpu, of.model)));
            assert!(kept || self.lacking.contains(id), "the copy of {id} is not kept");
        }
    }
}
