//! The pool of MIG slices: FluidFaaS's router and keepers of instances, behind the words of a pool.
//!
//! # Problem
//! A router picks the instance for each request, and a keeper decides which instances a node has on its slices (FluidFaaS, section 5.3).
//! Neither knows changing devices, a host's orders, or the other engine. The pool connects them and turns their decisions into orders.
//!
//! # Algorithm
//! 1. **Keepers**: each node with a device has one keeper, and one router serves all. The pool maps an instance's name to the keeper's
//!    own name on the instance's node. A keeper's knowledge of gaps ends with its node's last device.
//! 2. **A request** goes to the router with the earlier of its SLO and its deadline, and to one keeper: on the first node with instances
//!    of its function, else on a node that the function fits. A dispatch on another node is told to the keeper there, so that each keeper
//!    knows the use of its instances.
//! 3. **Shortage** of a function is told to the node with the fewest slices held, and to the others in turn while it lasts.
//! 4. **Taking turns**: an instance on a shared slice starts parked. When the router sends it a request, the keeper names the instances
//!    to leave the slice (`Park`) and the arrival (`Unpark`), which is held back until every `Park` on the slice is answered. The
//!    dispatch follows the arrival, so a host never has a request for a parked instance.
//! 5. **Capacity** of an exclusive instance: enough requests to keep its busiest slice busy, and no more than it has slices, since
//!    further requests would wait there out of reach of other instances.
//! 6. **A minimum** of instances is kept by the nodes together: each keeps its present part, and missing instances start one by one, on
//!    the node with the fewest slices held that can start them. A function is unmet where no node can.
//! 7. **An inference function** is a DAG of one component (`inference.rs`). Its time on a slice is measured at a point of its profile.
//!
//! # Example
//! Functions A and B share a slice with room for one of them, now A. A request for B comes while the slice is idle. Orders: `Park A`; on
//! `Parked A`: `Unpark B`; on `Unparked B`: `Dispatch` to B.
//!
//! # Invariants
//! Keepers, router and pool agree on instances, homes and requests; the residents of a slice, parking instances included, fit its memory;
//! an owned slice has one instance.
//!
//! # Cost
//! The router's and the keeper's cost for an event; O(instances) for a shortage; a plan per function and node for a joined or lost
//! device; at an instance's end O(its nodes and instances) per function below its minimum.
//!
//! # Limits
//! - Keepers without [`InstanceEvent::MinimumSet`] keep no minimum, and the function is unmet. The default keepers let a minimum wait
//!   while other functions work on its slices;
//! - `max_instances` bounds starts: a replacement and the old instance coexist for a while, and a lowered bound stops no instance;
//! - limits of tenants, and the time in which a host must answer, are the platform's task.

mod inference;
mod minimum;
mod obey;
mod report;
#[cfg(test)]
mod tests;

use super::cluster::Cluster;
use super::pool::Pool;
use crate::mig::GpuModel;
use crate::pipeline::{
    AssignedSlice, Goal, Home, InstanceAction, InstanceEvent, InstanceKeeper, Keeper, KeeperConfig,
    Node as Slices, NodeGpu, PartitionConfig, Partitioner, RouteEvent, Router, RouterConfig, SlackRouter,
};
use crate::platform::{DeviceSpec, InstanceReport, Life, Part, PoolError, Regime, StopCause};
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::resource::QuotaRange;
use gshare_core::share::GpuShare;
use gshare_core::{
    Bytes, ConfigError, Duration, Engine, FunctionId, GpuId, InstanceId, NodeId, RequestId, SharedSlice,
    SmShare, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// A shortage repeated within this time goes on to the next node; a later shortage begins again.
const SHORT_LASTS: Duration = Duration::from_secs(1);

crate::settings_table::settings! {
    /// Settings of a [`SlicedPool`].
    pub struct SlicedConfig {
        /// Settings of the router.
        pub router: RouterConfig = RouterConfig::default(), with_router;
        /// Settings of the keeper of each node.
        pub keeper: KeeperConfig = KeeperConfig::default(), with_keeper;
    }
}

/// Why a [`SlicedPool`] was not made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlicedError {
    /// A setting of the keepers.
    #[error("keeper: {0}")]
    Keeper(ConfigError),
    /// A setting of the partitioner.
    #[error("partitioner: {0}")]
    Partitioner(ConfigError),
}

/// The state of an instance in its slice's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Out,
    /// `Unpark` waits until no instance on the slice is being parked.
    Coming {
        takes: Duration,
    },
    /// `Unpark` was ordered.
    Unparking,
    In,
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    node: NodeId,
    /// The keeper's name of the instance.
    local: InstanceId,
    /// The instance to be replaced.
    replaces: Option<InstanceId>,
    home: Home,
    parts: Vec<Part>,
    memory: Memory,
    /// The instance leaves its slice's memory: `Park` was not answered, or it was evicted after its `Stop`.
    leaving: bool,
    /// The router knows the instance.
    up: bool,
    /// The router gives the instance no more requests.
    draining: bool,
    /// The request for which the instance is unparked.
    pending: Option<RequestId>,
    cause: StopCause,
}

impl Instance {
    fn is_shared(&self) -> bool {
        matches!(self.home, Home::Shared { .. })
    }

    /// Whether the instance takes any of its slice's memory.
    fn holds(&self) -> bool {
        self.leaving || matches!(self.memory, Memory::In | Memory::Unparking)
    }
}

struct Node {
    model: GpuModel,
    keeper: Box<dyn InstanceKeeper>,
    /// The keeper's next deadline, as filed.
    due: Option<Timestamp>,
    /// The pool's names of the keeper's instances.
    names: BTreeMap<InstanceId, InstanceId>,
    /// The instances on each slice in use.
    slices: BTreeMap<AssignedSlice, BTreeSet<InstanceId>>,
}

struct Function {
    dag: Box<Dag>,
    goal: Box<Goal>,
    slo: Option<Duration>,
    /// Each node's part of the minimum.
    kept: BTreeMap<NodeId, u32>,
    /// Nodes that the function fits.
    nodes: BTreeSet<NodeId>,
    instances: BTreeSet<InstanceId>,
    /// Time of the last shortage, and the number of shortages in a row.
    short: Option<(Timestamp, usize)>,
    /// Nodes with a keeper that has no slices for the function since its last start.
    unmet: BTreeSet<NodeId>,
}

/// An event that an engine has not heard of yet.
#[derive(Debug)]
enum Task {
    Keep(NodeId, InstanceEvent),
    Route(RouteEvent),
}

/// Makes the keeper of a node with free slices.
pub type MakeKeeper = Arc<dyn Fn(&Slices) -> Result<Box<dyn InstanceKeeper>, ConfigError> + Send + Sync>;

/// Devices with MIG slices, under a [`Router`] and an [`InstanceKeeper`] for each node.
pub struct SlicedPool {
    make_keeper: MakeKeeper,
    router: Box<dyn Router>,
    nodes: BTreeMap<NodeId, Node>,
    gpus: BTreeMap<GpuId, NodeId>,
    functions: BTreeMap<FunctionId, Function>,
    instances: BTreeMap<InstanceId, Instance>,
    /// Requests that the router has given to an instance and has no answer for; some have ended since.
    given: BTreeMap<RequestId, InstanceId>,
    /// The router's numbers of shared slices.
    numbers: BTreeMap<(NodeId, SharedSlice), SharedSlice>,
    tasks: VecDeque<Task>,
    /// Deadlines of keepers.
    due: BTreeSet<(Timestamp, NodeId)>,
}

gshare_core::debug_fields!(SlicedPool { gpus, instances });

impl SlicedPool {
    /// A pool without devices, with the default keepers.
    ///
    /// # Errors
    /// [`SlicedError`]: a setting outside its bounds.
    pub fn with_config(config: SlicedConfig) -> Result<Self, SlicedError> {
        let router = Box::new(SlackRouter::new(config.router));
        config.keeper.check().map_err(SlicedError::Keeper)?;
        let partitioner = Partitioner::new(PartitionConfig::default()).map_err(SlicedError::Partitioner)?;
        let make_keeper = move |node: &Slices| -> Result<Box<dyn InstanceKeeper>, ConfigError> {
            Ok(Box::new(Keeper::new(config.keeper.clone(), node, partitioner.clone())?))
        };
        Ok(Self {
            make_keeper: Arc::new(make_keeper),
            router,
            nodes: BTreeMap::new(),
            gpus: BTreeMap::new(),
            functions: BTreeMap::new(),
            instances: BTreeMap::new(),
            given: BTreeMap::new(),
            numbers: BTreeMap::new(),
            tasks: VecDeque::new(),
            due: BTreeSet::new(),
        })
    }

    /// The same pool with the host's own router. To be called before the first event: the old router's knowledge is lost.
    #[must_use]
    pub fn with_router(self, router: Box<dyn Router>) -> Self {
        Self { router, ..self }
    }

    /// The same pool with the host's own keepers, and so with their ways to cut a function and to choose its slices. To be
    /// called before the first device: existing nodes keep their keepers.
    #[must_use]
    pub fn with_keepers(self, make_keeper: MakeKeeper) -> Self {
        Self { make_keeper, ..self }
    }

    const REGIME: Regime = Regime::Sliced;

    /// Adds a device to its node's keeper, or makes the keeper.
    fn join(
        &mut self,
        gpu: GpuId,
        spec: &DeviceSpec,
        cluster: &Cluster,
    ) -> Result<Vec<InstanceAction>, PoolError> {
        let Some(layout) = &spec.mig else { return Ok(Vec::new()) };
        let (mut actions, slices) = (Vec::new(), layout.slices().to_vec());
        if let Some(node) = self.nodes.get_mut(&spec.node) {
            if node.model != *layout.model() {
                let (new, name, old) = (&layout.model().name, spec.node, &node.model.name);
                let why = format!(
                    "mig.model is {new}, that of the other devices of {name} is {old}: a node has one"
                );
                return Err(Self::REGIME.bad_device(gpu, why));
            }
            let event = InstanceEvent::GpuJoined { gpu, slices };
            node.keeper
                .handle(cluster.now, event, &mut actions)
                .map_err(|error| Self::REGIME.bad_device(gpu, error))?;
        } else {
            let model = layout.model().clone();
            let gpus = vec![NodeGpu { gpu, free: slices, busy: Vec::new() }];
            let slices =
                Slices::new(model.clone(), gpus).map_err(|error| Self::REGIME.bad_device(gpu, error))?;
            let keeper = (self.make_keeper)(&slices).map_err(|error| Self::REGIME.bad_device(gpu, error))?;
            let node = Node { model, keeper, due: None, names: BTreeMap::new(), slices: BTreeMap::new() };
            self.nodes.insert(spec.node, node);
        }
        self.gpus.insert(gpu, spec.node);
        self.file(spec.node);
        Ok(actions)
    }

    /// Tells a node's keeper of the functions that fit the node only now.
    fn refit(&mut self, at: NodeId, cluster: &mut Cluster) {
        for function in self.functions.keys().copied().collect::<Vec<_>>() {
            if !cluster.is_removed(function) {
                self.fit(function, at, cluster);
            }
        }
    }

    fn fit(&mut self, function: FunctionId, at: NodeId, cluster: &mut Cluster) {
        let (Some(of), Some(node)) = (self.functions.get_mut(&function), self.nodes.get_mut(&at)) else {
            return;
        };
        let mut orders = Vec::new();
        let fits = node.keeper.fits(function).unwrap_or_else(|| {
            let (dag, goal) = (of.dag.clone(), of.goal.clone());
            let event = InstanceEvent::FunctionAdded { function, dag, goal };
            node.keeper.handle(cluster.now, event, &mut orders).is_ok()
        });
        let new = fits && of.nodes.insert(at);
        if !fits {
            of.nodes.remove(&at);
        }
        self.file(at);
        for order in orders {
            self.obey(at, order, cluster);
        }
        if new && !cluster.queue(function).is_empty() {
            let node = self.node_for(function, cluster).unwrap_or(at);
            self.keep(node, InstanceEvent::Requested { function });
        }
    }

    /// The keeper of `at` has no slices for the function, or no node fits the function.
    fn unmet(&mut self, function: FunctionId, at: Option<NodeId>, cluster: &mut Cluster) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.unmet.extend(at);
        if of.nodes.is_subset(&of.unmet) {
            of.unmet.clear();
            cluster.unmet(function);
        }
    }

    /// Whether the instance serves requests, or will: the router has not been told that it drains.
    fn counts(&self, id: InstanceId, cluster: &Cluster) -> bool {
        let stopped = || cluster.instances.get(id).is_none_or(|of| of.life == Life::Stopped);
        self.instances.get(&id).is_some_and(|one| !one.draining) && !stopped()
    }

    /// Files the next deadline of a node's keeper; to be called after each event for the keeper.
    fn file(&mut self, at: NodeId) {
        let next = self.nodes.get(&at).and_then(|node| node.keeper.next_deadline());
        let before = self.nodes.get_mut(&at).and_then(|node| core::mem::replace(&mut node.due, next));
        if before != next {
            before.map(|due| self.due.remove(&(due, at)));
            self.due.extend(next.map(|due| (due, at)));
        }
    }

    /// The node that hears of a request: the first with instances of the function, else a node that the function fits.
    fn node_for(&self, function: FunctionId, cluster: &Cluster) -> Option<NodeId> {
        let of = self.functions.get(&function)?;
        let with = of.instances.iter().find(|one| self.counts(**one, cluster));
        let own = || of.nodes.iter().nth(function.index() % of.nodes.len().max(1)).copied();
        with.map(|one| self.instances[one].node).or_else(own)
    }

    fn forget_removed(&mut self, function: FunctionId) {
        if self.functions.get(&function).is_some_and(|of| of.instances.is_empty()) {
            self.functions.remove(&function);
        }
    }

    fn keep(&mut self, node: NodeId, event: InstanceEvent) {
        self.tasks.push_back(Task::Keep(node, event));
    }

    fn route(&mut self, event: RouteEvent) {
        self.tasks.push_back(Task::Route(event));
    }

    /// The parts of an instance on their devices, with the memory each needs.
    fn parts(&self, function: FunctionId, model: &GpuModel, home: &Home) -> Vec<Part> {
        let Some(of) = self.functions.get(&function) else { return Vec::new() };
        let share = |memory: Bytes| {
            let all = (QuotaRange::WHOLE, SmShare::WHOLE);
            GpuShare::new(all.0, all.1, all.1, Some(memory)).unwrap_or(GpuShare::WHOLE)
        };
        let part = |stage: u32, components: ComponentSet, slice: AssignedSlice, memory: Bytes| Part {
            gpu: slice.gpu,
            share: share(memory),
            slice: Some(slice.slice),
            stage,
            components,
        };
        match home {
            Home::Exclusive { parts, .. } => parts
                .iter()
                .map(|one| {
                    let name = model.get(one.slice.slice.profile).map_or("", |profile| &profile.name);
                    let on = |component: usize| of.dag.components()[component].profile(name, of.goal.batch);
                    let weights = one.components.iter().filter_map(on).map(|on| on.memory.get()).sum::<u64>();
                    let memory = weights.saturating_add(of.goal.runtime_memory.get());
                    part(one.stage, one.components, one.slice, Bytes(memory))
                })
                .collect(),
            Home::Shared { slice, memory, .. } => vec![part(0, of.dag.all(), *slice, *memory)],
        }
    }
}

impl Pool for SlicedPool {
    fn regime(&self) -> Regime {
        Self::REGIME
    }

    fn device_joined(
        &mut self,
        cluster: &mut Cluster,
        gpu: GpuId,
        spec: &DeviceSpec,
    ) -> Result<(), PoolError> {
        for order in self.join(gpu, spec, cluster)? {
            self.obey(spec.node, order, cluster);
        }
        self.run(cluster);
        self.refit(spec.node, cluster);
        Ok(())
    }

    fn device_lost(&mut self, cluster: &mut Cluster, gpu: GpuId, lost: &[InstanceId]) {
        let Some(at) = self.gpus.remove(&gpu) else { return };
        self.keep(at, InstanceEvent::GpuLost { gpu });
        // The router must not give requests of one lost instance to another.
        for instance in lost.iter().copied() {
            if self.instances.get(&instance).is_some_and(|one| one.up && !one.draining) {
                self.route(RouteEvent::InstanceDraining { instance });
            }
        }
        for one in lost {
            self.forget(*one, cluster);
        }
        if !self.gpus.values().any(|node| *node == at) {
            if let Some(due) = self.nodes.remove(&at).and_then(|node| node.due) {
                self.due.remove(&(due, at));
            }
            for of in self.functions.values_mut() {
                of.nodes.remove(&at);
                of.kept.remove(&at);
            }
        }
        self.run(cluster);
        self.refit(at, cluster);
    }

    fn function_added(&mut self, cluster: &mut Cluster, function: FunctionId) -> Result<(), PoolError> {
        let spec = &cluster.functions[&function].spec;
        let (dag, mut goal) = inference::pipeline(function, spec)?;
        if spec.slo.is_some() {
            goal.slo = spec.slo;
        }
        // The slices are fixed by the devices.
        goal.carve = false;
        let new = Function {
            dag,
            slo: goal.slo,
            goal,
            kept: BTreeMap::new(),
            nodes: BTreeSet::new(),
            instances: BTreeSet::new(),
            short: None,
            unmet: BTreeSet::new(),
        };
        self.functions.insert(function, new);
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.fit(function, node, cluster);
        }
        Ok(())
    }

    fn bounds_changed(&mut self, _: &mut Cluster, _: FunctionId) -> Result<(), PoolError> {
        Ok(())
    }

    fn function_removed(&mut self, _: &mut Cluster, function: FunctionId) {
        for (&id, node) in &self.nodes {
            if node.keeper.fits(function).is_some() {
                self.tasks.push_back(Task::Keep(id, InstanceEvent::FunctionRemoved { function }));
            }
        }
        self.route(RouteEvent::FunctionRemoved { function });
        self.forget_removed(function);
    }

    fn called(&mut self, cluster: &mut Cluster, function: FunctionId) {
        if let Some(node) = self.node_for(function, cluster) {
            self.keep(node, InstanceEvent::Requested { function });
        }
    }

    fn arrived(&mut self, cluster: &mut Cluster, request: RequestId) {
        let found = &cluster.requests[&request];
        let Some(of) = self.functions.get(&found.function) else { return };
        let due = of.slo.map(|slo| found.arrived.saturating_add(slo));
        let deadline = [due, found.deadline].into_iter().flatten().min();
        self.route(RouteEvent::Arrived { request, function: found.function, deadline });
    }

    fn withdrawn(&mut self, request: RequestId) {
        // Forgotten now, or after the arrival of the instance that is unparked for it.
        self.route(RouteEvent::Cancelled { request });
    }

    fn done(&mut self, _: &mut Cluster, request: RequestId, instance: InstanceId, took: Duration) {
        let Some(one) = self.instances.get(&instance) else { return };
        let busy = match one.home {
            // The share of the time in which the busiest slice worked.
            Home::Exclusive { latency, interval, .. } => {
                took.scaled(interval.as_nanos(), latency.as_nanos()).min(took)
            }
            Home::Shared { .. } => took,
        };
        self.keep(one.node, InstanceEvent::Served { instance: one.local, busy });
        self.route(RouteEvent::Completed { request, instance });
    }

    fn reported(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport) {
        self.report(instance, report, cluster);
    }

    fn gone(&mut self, cluster: &mut Cluster, instance: InstanceId, _: InstanceReport) {
        let Some(one) = self.instances.get(&instance) else { return };
        let (node, local) = (one.node, one.local);
        self.forget(instance, cluster);
        self.keep(node, InstanceEvent::Gone { instance: local });
    }

    fn keep_minimum(&mut self, cluster: &mut Cluster, function: FunctionId, may_start: bool) {
        self.keep_parts(function, may_start, cluster);
    }

    fn deadline(&mut self, cluster: &mut Cluster) {
        let due = self.due.iter().take_while(|(at, _)| *at <= cluster.now);
        self.tasks.extend(due.map(|&(_, node)| Task::Keep(node, InstanceEvent::DeadlineReached)));
        if self.router.next_deadline().is_some_and(|at| at <= cluster.now) {
            self.route(RouteEvent::DeadlineReached);
        }
    }

    fn settle(&mut self, cluster: &mut Cluster) {
        self.run(cluster);
        #[cfg(debug_assertions)]
        self.invariants(cluster);
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let keepers = self.due.first().map(|(at, _)| *at);
        [keepers, self.router.next_deadline()].into_iter().flatten().min()
    }

    fn fits(&self, function: FunctionId) -> bool {
        self.functions.get(&function).is_some_and(|of| !of.nodes.is_empty())
    }

    fn invariants(&self, _: &Cluster) {
        self.router.invariants();
        assert!(self.tasks.is_empty(), "an engine was not told something");
        let here: BTreeSet<NodeId> = self.gpus.values().copied().collect();
        assert_eq!(here, self.nodes.keys().copied().collect(), "nodes with devices");
        for (id, one) in &self.instances {
            let node = &self.nodes[&one.node];
            assert_eq!(node.keeper.home(one.local), Some(&one.home), "home of {id}");
            assert_eq!(node.names.get(&one.local), Some(id), "name of {id}");
            assert!(self.functions[&one.function].instances.contains(id), "{id} is not of its function");
            assert!(one.home.slices().all(|slice| node.slices[&slice].contains(id)), "slices of {id}");
            assert!(one.pending.is_none() || one.memory != Memory::In, "{id} is there and its request waits");
        }
        let due = self.nodes.iter().filter_map(|(at, node)| Some((node.keeper.next_deadline()?, *at)));
        assert_eq!(due.collect::<BTreeSet<_>>(), self.due, "deadlines of keepers");
        for node in self.nodes.values() {
            node.keeper.invariants();
            for (slice, on) in &node.slices {
                let holds = || on.iter().map(|id| &self.instances[id]).filter(|one| one.holds());
                let memory = |one: &Instance| {
                    let here = one
                        .parts
                        .iter()
                        .find(|part| part.gpu == slice.gpu && part.slice == Some(slice.slice));
                    here.and_then(|part| part.share.memory()).map_or(0, Bytes::get)
                };
                let room = node.model.get(slice.slice.profile).map_or(0, |profile| profile.memory.get());
                assert!(holds().map(memory).sum::<u64>() <= room, "{slice:?} is too full");
                let alone = on.iter().all(|id| self.instances[id].is_shared()) || on.len() == 1;
                assert!(alone, "{slice:?} is owned and shared");
            }
        }
    }
}
