//! The pool of whole GPUs: requests go where their models are, and models make room for each other (GPU-enabled FaaS).
//!
//! # Problem
//! An inference request needs its model in the memory of the device that serves it, and a load takes two to three times as long as
//! the request. Give requests to devices with few loads, no device idle while it has work, and no request that waits for ever. A model
//! in a device's memory is an instance of the ledger; this pool keeps indexes alone: of copies (`devices.rs`), and of the order of
//! waiting requests (`queue.rs`).
//!
//! # Terms
//! **Skips** of a request: how often a later request was dispatched before it. A **due** request may not be skipped again: its skips
//! have reached the limit, or it has waited a minute. **Local queue**: requests that wait for one device. The others: `devices.rs`.
//!
//! # Algorithm
//! After every event the idle devices are gone through, fewest dispatches first (Algorithms 1 and 2, mended). A device with a local queue
//! is never idle: it goes on with it. For an idle device `g`:
//! 1. Find `h`, the earliest waiting request for a model on `g`. Due requests before `h` are **placed** first, in order of arrival; the turn
//!    of `g` ends if one lands on `g`. If there is `h`, `g` runs it.
//! 2. Else waiting requests are placed in order of arrival until one lands on `g`.
//!
//! The [`WholePolicy`] **places** a request: on an idle device with its model; else in the local queue of the busy device with its model
//! that would answer it first, if that is sooner than a load and the run on `g`; else it is loaded on `g`, and the least recently used make
//! room. With [`price_evictions`](WholeConfig::price_evictions) a load costs the worth of its victims too, and goes where that is least: a
//! short wait does not evict a model whose next request would load it again.
//!
//! **A minimum** of 1 is an ask without a request: it loads the model where it suits best, and that instance is kept.
//!
//! # Example
//! Loads take 3 s, runs 1 s; GPU 0 runs its model A for 1 s more; GPU 1 holds B and becomes idle; `a1 c1 b1 a2` wait (limit 25). GPU 1 runs
//! `b1` at once: `a1` and `c1` are skipped once. At 1 s GPU 0 runs `a1`. At 2 s GPU 0 takes `a2`, and GPU 1 loads C in the place of B. Under
//! LALB (limit 0) GPU 1 would have placed `a1` and `c1` first, and `c1` would have evicted B, which `b1` then needs.
//!
//! # Invariants
//! Copies on a device and its free memory add up to its memory; each copy but those that wait for room is an instance of the ledger in
//! the same state. A copy that runs a request, or that one waits for, is not evicted. With devices of one kind and nothing kept, a request is
//! skipped at most `skip_limit` times. In a local queue no request is overtaken. A function has at most `max_instances` instances that are
//! not stopped, unless the bound was lowered while they ran requests.
//!
//! # Cost
//! O(c log n) for an event: c copies on its device, n devices that share one of their models. Requests that cannot run on the device at hand
//! are passed over by class, not one by one.
//!
//! # Differences from the paper
//! The limit is reached when skips equal it; skips are counted when a request overtakes, not when a scan passes by. A device that was given a
//! request is busy at once. Of the busy devices the best is taken, by whole finish times. A model counts as cached from the decision to load
//! it. Victims that turn out superfluous are put back. A function has a limit of copies; the paper's may be loaded on every GPU.

mod cache;
mod copies;
mod devices;
mod estimate;
mod loading;
mod parked_copies;
mod placing;
mod queue;
mod running;
#[cfg(test)]
mod tests;
mod whole_policy;

pub use devices::{ModelCopy, Room, WholeDevices};
pub use whole_policy::{Choice, Locality, WholeConfig, WholePolicy};

use super::cluster::Cluster;
use super::hash_table::Table;
use super::pool::Pool;
use crate::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Life, PoolError, Regime, Rejection, StopCause, TenantLimits,
    Work,
};
use devices::{CopyState, Gpu, Phase, Served};
use gshare_core::{ConfigError, Duration, FunctionId, GpuId, InstanceId, RequestId, TenantId, Timestamp};
use queue::{Ask, Place};
use std::collections::{BTreeMap, BTreeSet};

/// Kinds of device: one bit each.
const MOST_KINDS: u8 = 63;

/// GPUs that serve one request at a time and keep models in their memory.
pub struct WholePool {
    config: WholeConfig,
    policy: Box<dyn WholePolicy>,
    devices: WholeDevices,
    /// The device and the function of each instance that is not gone.
    places: Table<InstanceId, (GpuId, FunctionId)>,
    /// Functions that may have more copies than their limit.
    over: BTreeSet<FunctionId>,
    /// Removed functions with instances.
    ending: BTreeSet<FunctionId>,
    /// Parked instances that were told to end, and are not gone.
    ends: BTreeSet<InstanceId>,
    /// Devices that wait to load until an evicted copy of the tenant is gone.
    held_up: BTreeSet<GpuId>,
    /// When it is too late for which ask.
    drops: BTreeSet<(Timestamp, u32)>,
}

gshare_core::debug_fields!(WholePool { config, devices });

impl WholePool {
    const REGIME: Regime = Regime::Whole;

    /// A pool without devices, under locality-aware load balancing with these settings.
    ///
    /// # Errors
    /// When a field of the configuration is out of its bounds.
    pub fn new(config: WholeConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self::under(config, Box::new(Locality::new(&config))))
    }

    /// The same pool under a policy of the caller's; the settings of ours do not apply to it.
    #[must_use]
    pub fn with_policy(self, policy: Box<dyn WholePolicy>) -> Self {
        Self::under(self.config, policy)
    }

    fn under(config: WholeConfig, policy: Box<dyn WholePolicy>) -> Self {
        let devices = WholeDevices::new(policy.skip_limit(), config.host_memory);
        Self {
            config,
            policy,
            devices,
            places: Table::default(),
            over: BTreeSet::new(),
            ending: BTreeSet::new(),
            ends: BTreeSet::new(),
            held_up: BTreeSet::new(),
            drops: BTreeSet::new(),
        }
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
        check_minimum(spec.min_instances).map_err(|why| Self::REGIME.unsuitable(function, why))?;
        Ok(infer)
    }
}

/// Refuses a minimum beyond the pool's ability: a request for a second copy would go to the first.
fn check_minimum(min_instances: u32) -> Result<(), String> {
    match min_instances {
        0 | 1 => Ok(()),
        more => Err(format!("min_instances is {more}: need at most 1 on whole devices")),
    }
}

/// Time of one request on a whole device: the p50 of the largest point without batches.
fn infer(spec: &FunctionSpec) -> Option<Duration> {
    let Work::Inference { profile: Some(profile) } = &spec.work else { return None };
    let single = profile.points().iter().filter(|point| point.batch == 1);
    single.max_by_key(|point| point.area()).map(|point| point.p50).filter(|p50| !p50.is_zero())
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
        let refused = |why: String| Err(Self::REGIME.bad_device(gpu, why));
        if kind.number() >= MOST_KINDS {
            return refused(format!("kind is {}: must be below {MOST_KINDS}", kind.number()));
        }
        let expected = *self.devices.kinds.get(&kind).unwrap_or(&memory.get());
        if expected != memory.get() {
            let expected = gshare_core::Bytes(expected);
            return refused(format!("memory of {gpu} is {memory}, that of {kind} is {expected}"));
        }
        self.devices.now = cluster.now;
        let new = Gpu::new(kind.number(), node, memory.get(), cluster.now);
        self.devices.gpus.insert(gpu, new);
        self.devices.memory = self.devices.memory.saturating_add(memory.get());
        let index = usize::from(kind.number());
        if self.devices.idle.len() <= index {
            self.devices.idle.resize_with(index + 1, BTreeSet::new);
        }
        self.devices.idle[index].insert((0, gpu));
        if self.devices.kinds.insert(kind, memory.get()).is_none() {
            let functions: Vec<FunctionId> =
                self.devices.functions.sorted().into_iter().map(|(function, _)| function).collect();
            functions.into_iter().for_each(|function| self.devices.profile(function));
        }
        Ok(())
    }

    fn device_lost(&mut self, cluster: &mut Cluster, gpu: GpuId, lost: &[InstanceId]) {
        self.devices.now = cluster.now;
        let Some(on) = self.devices.gpus.get(&gpu) else { return };
        if on.phase.is_idle() {
            self.not_idle(gpu);
        }
        for copy in self.devices.g(gpu).copies.clone() {
            if copy.is_cached() {
                self.devices.unfile_copy(gpu, &copy);
            }
        }
        while self.devices.unpark(gpu, |_| true).is_some() {}
        let mut ended = Vec::new();
        for instance in lost {
            if let Some((_, function)) = self.places.remove(instance) {
                self.devices.f_mut(function).instances -= 1;
                ended.extend(self.ends.remove(instance).then_some(function));
            }
        }
        let Some(mut on) = self.devices.gpus.remove(&gpu) else { return };
        self.devices.memory -= on.memory;
        self.devices.unfiled = self.devices.unfiled.filter(|unfiled| *unfiled != gpu);
        if self.devices.gpus.sorted().iter().all(|(_, other)| other.node != on.node) {
            self.devices.hosts.lose(on.node);
        }
        let runs = match on.phase {
            Phase::Running { request, .. } => self.ask_again(request, cluster),
            _ => on.phase.take_ask(),
        };
        for slot in on.local.into_iter().chain(runs) {
            self.requeue(slot);
        }
        for function in ended {
            self.left(function, cluster);
        }
        for copy in on.copies {
            self.keep(copy.function, cluster);
            if !copy.is_cached() {
                self.left(copy.function, cluster);
            }
        }
    }

    fn tenant_limited(&mut self, cluster: &mut Cluster, tenant: TenantId, limits: TenantLimits) {
        self.devices.tenant(tenant).share = limits.memory;
        if cluster.tenants.bounds_instances(tenant) {
            self.end_parked_of_tenant(tenant, cluster);
        }
    }

    fn function_added(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        let spec = &cluster.functions[&function].spec;
        let infer = Self::check_function(function, spec)?;
        let times = [infer, spec.load_disk, spec.load_host];
        self.devices.functions.insert(function, Served::new(spec.memory.get(), spec.tenant, times));
        self.devices.profile(function);
        Ok(())
    }

    fn bounds_changed(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        let Some(of) = cluster.functions.get(&function) else { return Ok(()) };
        let refused = |why| Self::REGIME.refused(format_args!("{function}: {why}"));
        check_minimum(of.spec.min_instances).map_err(refused)?;
        if of.spec.min_instances > 0 {
            self.end_parked_of(function, usize::MAX, StopCause::Evicted, cluster);
        }
        self.over.insert(function);
        self.keep(function, cluster);
        Ok(())
    }

    fn function_removed(&mut self, cluster: &mut Cluster, function: FunctionId) {
        self.devices.now = cluster.now;
        self.ending.insert(function);
        self.keep(function, cluster);
        self.cool(function);
        for gpu in self.devices.f(function).devices() {
            self.give_up_room(gpu, function, cluster);
        }
        self.devices.hosts.remove(function, &mut cluster.orders);
    }

    fn arrived(&mut self, cluster: &mut Cluster, request: RequestId) {
        self.devices.now = cluster.now;
        let function = cluster.requests[&request].function;
        self.devices.count_request(function);
        let Some(slot) = self.ask_again(request, cluster) else { return };
        self.requeue(slot);
        if self.devices.exceeds_its_tenant(function) {
            self.reject(slot, Rejection::NeverFits, cluster);
            cluster.unmet(function);
        } else if self.devices.queue.get(slot).drop_at <= cluster.now {
            self.reject(slot, Rejection::WouldBeLate, cluster);
        }
    }

    fn withdrawn(&mut self, _: &Cluster, request: RequestId, _: &super::requests::Request) {
        if let Some(slot) = self.devices.queue.find(request) {
            self.take_back(slot);
        }
    }

    fn done(&mut self, cluster: &mut Cluster, request: RequestId, instance: InstanceId, took: Duration) {
        self.devices.now = cluster.now;
        let Some(&(gpu, function)) = self.places.get(&instance) else { return };
        let runs = Phase::Running { function, request };
        assert_eq!(self.devices.g(gpu).phase, runs, "{request} was answered on {gpu}, which does not run it");
        self.completed(gpu, function, took, cluster);
    }

    fn reported(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport) {
        self.devices.now = cluster.now;
        let Some(&(gpu, function)) = self.places.get(&instance) else { return };
        let ordered = cluster.instances.get(instance).map_or(cluster.now, |of| of.ordered);
        match report {
            InstanceReport::Ready | InstanceReport::Unparked => {
                self.loaded(gpu, function, cluster.now.saturating_since(ordered), cluster);
            }
            InstanceReport::Parked => self.parked(instance, gpu, function, cluster),
            _ => {}
        }
    }

    fn gone(&mut self, cluster: &mut Cluster, instance: InstanceId, _: InstanceReport) {
        self.devices.now = cluster.now;
        if let Some((gpu, function)) = self.places.remove(&instance) {
            self.ended(instance, gpu, function, cluster);
        }
    }

    fn keep_minimum(&mut self, cluster: &mut Cluster, function: FunctionId, may_start: bool) {
        self.devices.now = cluster.now;
        if cluster.missing(function) == 0 {
            if cluster.functions.get(&function).is_none_or(|of| of.spec.min_instances == 0) {
                self.cool(function);
            }
            return;
        }
        if !may_start {
            return;
        }
        if self.devices.exceeds_its_tenant(function) {
            return cluster.unmet(function);
        }
        if self.devices.f(function).warming.is_none() && !self.devices.kinds.is_empty() {
            let ask = Ask::new(None, function, cluster.next_request.saturating_mul(2), cluster.now);
            let slot = self.devices.queue.add(ask);
            self.devices.f_mut(function).warming = Some(slot);
            self.requeue(slot);
            self.schedule(cluster);
        }
        let loads = self.devices.f(function).kept_on.is_some();
        if !loads && !self.devices.fits_beside_kept(function) {
            cluster.unmet(function);
        }
    }

    fn deadline(&mut self, _: &mut Cluster) {}

    fn settle(&mut self, cluster: &mut Cluster) {
        self.devices.now = cluster.now;
        self.drop_late(cluster);
        self.trim_over(cluster);
        self.end_removed(cluster);
        self.schedule(cluster);
        self.devices.file_all();
        #[cfg(debug_assertions)]
        self.invariants(cluster);
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.drops.first().map(|&(at, _)| at)
    }

    fn invariants(&self, cluster: &Cluster) {
        self.devices.queue.invariants();
        let (mut placed, mut instances, mut parked) = (0, 0, 0);
        let mut memory: BTreeMap<TenantId, u64> = BTreeMap::new();
        for (id, on) in self.devices.gpus.sorted() {
            let waits = |copy: &&ModelCopy| copy.is_cached() && copy.instance.is_none();
            let taken: u64 = on.copies.iter().filter(|copy| !waits(copy)).map(|copy| copy.bytes).sum();
            assert_eq!(taken + on.free, on.memory, "memory of {id}");
            assert_eq!(on.filed, on.state(), "{id} is filed under its state");
            let idle = self.devices.idle[usize::from(on.kind)].contains(&(on.dispatches, id));
            assert_eq!(idle, on.phase.is_idle());
            assert!(!idle || on.local.is_empty(), "{id} is idle and has something to do");
            let local_ns: u64 = on.local.iter().map(|&slot| self.devices.queue.get(slot).local_ns).sum();
            assert_eq!(local_ns, on.local_ns);
            let (at_work, ask) = match on.phase {
                Phase::Idle => (None, None),
                Phase::MakingRoom { function, ask } | Phase::Loading { function, ask, .. } => {
                    (ask.map(|_| function), ask)
                }
                Phase::Running { function, .. } => (Some(function), None),
            };
            for &slot in ask.iter().chain(&on.local) {
                let place = self.devices.queue.get(slot).place;
                assert!(place == Place::Placed(id) || place == Place::Local(id), "{place:?} on {id}");
                placed += 1;
            }
            let local = on.local.iter().map(|slot| self.devices.queue.get(*slot).function);
            let users: Vec<FunctionId> = local.chain(at_work).collect();
            assert!(users.iter().all(|function| on.cached(*function).is_some()), "a model is not on {id}");
            instances += on.parked.len();
            for copy in &on.parked {
                assert!(
                    self.devices.f(copy.function).parked.contains(&id),
                    "{} parks on {id}",
                    copy.function
                );
            }
            parked += on.parked.len();
            for copy in &on.copies {
                let function = copy.function;
                let life =
                    copy.instance.and_then(|instance| cluster.instances.get(instance)).map(|of| of.life);
                let lives = match (copy.state, life) {
                    (_, Some(Life::Stopped)) => true,
                    (CopyState::Loading, life) => {
                        life.is_none_or(|life| matches!(life, Life::Starting | Life::Parked))
                    }
                    (CopyState::Resident, life) => life == Some(Life::Ready),
                    (CopyState::Evicting, life) => life == Some(Life::Parked),
                };
                assert!(lives, "the copy of {function} on {id} is {:?}, its instance {life:?}", copy.state);
                instances += usize::from(copy.instance.is_some());
                if !copy.is_cached() {
                    continue;
                }
                let count = users.iter().filter(|user| **user == function).count();
                assert_eq!(count, copy.users as usize, "users of {function} on {id}");
                let of = self.devices.f(function);
                assert!(of.copies.contains(&(on.filed.0, on.kind, on.filed.1, id)), "{function} on {id}");
                assert_eq!(copy.kept, of.kept_on == Some(id), "the kept copy of {function} on {id}");
                *memory.entry(of.tenant).or_default() += copy.bytes;
            }
        }
        assert_eq!(placed + self.devices.queue.len() as usize, self.devices.queue.known(), "asks");
        instances += self.ends.len();
        assert_eq!(instances, self.places.len(), "instances on devices");
        for (tenant, of) in &self.devices.tenants {
            assert_eq!(of.memory, memory.get(tenant).copied().unwrap_or(0), "memory of {tenant}");
        }
        let mut all = 0;
        for (function, of) in self.devices.functions.sorted() {
            all += of.instances as usize;
            parked -= of.parked.len();
            let kept = cluster.functions.get(&function).is_some_and(|of| of.spec.min_instances > 0);
            let here = |(_, _, _, gpu): &(bool, u8, u64, GpuId)| {
                self.devices.g(*gpu).cached(function).is_some_and(|copy| copy.instance.is_some())
            };
            let keeps = kept && of.copies.iter().any(here) && !cluster.is_removed(function);
            assert_eq!(of.kept_on.is_some(), keeps, "the kept copy of {function}");
        }
        assert_eq!((all, parked), (instances, 0), "instances of functions, and copies parked beyond them");
    }
}

impl WholePool {
    /// Ends the ask for a kept copy that is not missing any more.
    fn cool(&mut self, function: FunctionId) {
        if let Some(slot) = self.devices.f_mut(function).warming.take() {
            self.take_back(slot);
        }
    }
}
