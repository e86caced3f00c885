//! The pool of MIG slices: FluidFaaS's answers to the ledger's questions.
//!
//! # Problem
//! A request needs an instance, and an instance needs slices (FluidFaaS, section 5.3). The ledger has requests and instances, each with one
//! life. The pool answers its questions: how many instances run, which share a slice and which leave (`node.rs`, `scale.rs`), where one
//! runs ([`Place`]), and which request is next ([`Route`]).
//!
//! # Algorithm
//! 1. **Nodes**: each node with a device decides about the instances on its own slices. Its knowledge of gaps ends with its last device.
//! 2. **A request** waits in the ledger, and the router is asked for the next one whenever an exclusive instance has room or a shared
//!    slice is idle (`routing.rs`). Its latest answer is the earlier of its SLO and its deadline. One node hears of it: the first with
//!    instances of its function, else a node that the function fits. A dispatch on another node is told there, so that each node knows the
//!    use of its instances.
//! 3. **Shortage** of a function is told to the node with the fewest slices held, and to the others in turn while it lasts.
//! 4. **Taking turns**: an instance on a shared slice starts parked. When the router gives it a request, others leave the slice (`Park`)
//!    until it fits, and its own arrival (`Unpark`) is held back until every `Park` on the slice is answered. The dispatch follows the
//!    arrival, so a host never has a request for a parked instance.
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
//! The router's waiting requests are the ledger's; the residents of a slice, parking instances included, fit its memory; an owned slice has
//! one instance.
//!
//! # Cost
//! The router's and the node's cost for an event; O(slices of the node) for an idle slice; O(instances) for a shortage; a plan per function
//! and node for a joined or lost device; at an instance's end O(its nodes and instances) per function below its minimum.
//!
//! # Limits
//! - a minimum waits while other functions work on its slices;
//! - `max_instances` bounds starts: a replacement and the old instance coexist for a while, and a lowered bound stops no instance;
//! - limits of tenants, and the time in which a host must answer, are the platform's task.

mod effects;
mod inference;
mod minimum;
mod node;
mod routing;
mod scale;
mod slices;
#[cfg(test)]
mod tests;

use super::cluster::Cluster;
use super::pool::Pool;
use super::requests::Request;
use super::timers::Timers;
use crate::pipeline::{
    AssignedSlice, Goal, KeeperConfig, Node as Free, NodeGpu, Offers, Partitioner, Place, Route,
    RouterConfig, SlackRouter,
};
use crate::platform::{DeviceSpec, InstanceReport, Life, PoolError, Regime};
use gshare_core::dag::Dag;
use gshare_core::{ConfigError, Duration, FunctionId, GpuId, InstanceId, NodeId, RequestId, Timestamp};
use node::{Effect, Instance, Node};
use slices::Slices;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

crate::settings_table::settings! {
    /// Settings of a [`SlicedPool`].
    pub struct SlicedConfig {
        /// Settings of the router.
        pub router: RouterConfig = RouterConfig::default(), with_router;
        /// Settings of the instances on each node.
        pub keeper: KeeperConfig = KeeperConfig::default(), with_keeper;
    }
}

/// Why a [`SlicedPool`] was not made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlicedError {
    /// A setting of the instances.
    #[error("keeper: {0}")]
    Keeper(ConfigError),
}

struct Function {
    dag: Arc<Dag>,
    goal: Arc<Goal>,
    /// Each node's part of the minimum.
    kept: BTreeMap<NodeId, u32>,
    /// Nodes that the function fits.
    nodes: BTreeSet<NodeId>,
    /// Time of the last shortage, and the number of shortages in a row.
    short: Option<(Timestamp, usize)>,
    /// Nodes without slices for the function since its last start.
    unmet: BTreeSet<NodeId>,
}

/// Devices with MIG slices, under a [`Route`] and a [`Place`].
pub struct SlicedPool {
    config: Arc<KeeperConfig>,
    place: Arc<dyn Place>,
    router: Box<dyn Route>,
    offers: Offers,
    nodes: BTreeMap<NodeId, Node>,
    gpus: BTreeMap<GpuId, NodeId>,
    functions: BTreeMap<FunctionId, Function>,
    /// The node of each instance.
    at: BTreeMap<InstanceId, NodeId>,
    effects: VecDeque<(NodeId, Effect)>,
    /// The times of another look at functions that were short.
    again: Timers<FunctionId>,
    /// Deadlines of nodes.
    due: BTreeSet<(Timestamp, NodeId)>,
}

gshare_core::debug_fields!(SlicedPool { gpus, at });

impl SlicedPool {
    /// A pool without devices.
    ///
    /// # Errors
    /// [`SlicedError`]: a setting outside its bounds.
    pub fn with_config(config: SlicedConfig) -> Result<Self, SlicedError> {
        config.keeper.check().map_err(SlicedError::Keeper)?;
        Ok(Self {
            config: Arc::new(config.keeper),
            place: Arc::new(Partitioner),
            router: Box::new(SlackRouter::new(config.router)),
            offers: Offers::default(),
            nodes: BTreeMap::new(),
            gpus: BTreeMap::new(),
            functions: BTreeMap::new(),
            at: BTreeMap::new(),
            effects: VecDeque::new(),
            again: Timers::default(),
            due: BTreeSet::new(),
        })
    }

    /// The same pool with the host's own router. To be called before the first event: the old router's knowledge is lost.
    #[must_use]
    pub fn with_router(self, router: Box<dyn Route>) -> Self {
        Self { router, ..self }
    }

    /// The same pool with the host's own way to cut a function and to choose its slices. To be called before the first device.
    #[must_use]
    pub fn with_place(self, place: Arc<dyn Place>) -> Self {
        Self { place, ..self }
    }

    const REGIME: Regime = Regime::Sliced;

    fn one(&self, id: InstanceId) -> Option<&Instance> {
        self.nodes.get(self.at.get(&id)?)?.instances.get(&id)
    }

    fn one_mut(&mut self, id: InstanceId) -> Option<&mut Instance> {
        self.nodes.get_mut(self.at.get(&id)?)?.instances.get_mut(&id)
    }

    /// The node of a slice's GPU, while the GPU is there.
    fn node_of(&self, slice: AssignedSlice) -> Option<&Node> {
        self.gpus.get(&slice.gpu).and_then(|node| self.nodes.get(node))
    }

    /// Lets a node act; its effects follow at the end of the event.
    fn decide(&mut self, at: NodeId, cluster: &mut Cluster, act: impl FnOnce(&mut Node, &mut Cluster)) {
        let Some(node) = self.nodes.get_mut(&at) else { return };
        node.advance(cluster);
        act(node, cluster);
        self.effects.extend(node.effects.drain(..).map(|effect| (at, effect)));
        for id in core::mem::take(&mut node.started) {
            self.at.insert(id, at);
            if let Some(of) = self.functions.get_mut(&node.instances[&id].function) {
                of.unmet.clear();
            }
        }
        self.file(at);
    }

    /// Adds a device's slices to its node.
    fn join(&mut self, gpu: GpuId, spec: &DeviceSpec, cluster: &mut Cluster) -> Result<(), PoolError> {
        let Some(layout) = &spec.mig else { return Ok(()) };
        let slices = layout.slices().to_vec();
        if let Some(node) = self.nodes.get(&spec.node) {
            let model = &node.slices.model;
            if model != layout.model() {
                let (new, name, old) = (&layout.model().name, spec.node, &model.name);
                let why = format!(
                    "mig.model is {new}, that of the other devices of {name} is {old}: a node has one"
                );
                return Err(Self::REGIME.bad_device(gpu, why));
            }
            node.slices.check_join(gpu, &slices).map_err(|error| Self::REGIME.bad_device(gpu, error))?;
            self.decide(spec.node, cluster, |node, _| node.slices.join(gpu, &slices));
        } else {
            let gpus = vec![NodeGpu { gpu, free: slices, busy: Vec::new() }];
            let free = Free::new(layout.model().clone(), gpus);
            let free = free.map_err(|error| Self::REGIME.bad_device(gpu, error))?;
            let slices = Slices::new(&free, self.config.eviction);
            let (config, place) = (Arc::clone(&self.config), Arc::clone(&self.place));
            self.nodes.insert(spec.node, Node::new(spec.node, config, place, slices));
        }
        self.gpus.insert(gpu, spec.node);
        self.file(spec.node);
        Ok(())
    }

    /// Looks which functions fit a node with other devices.
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
        let fits = node.fits(function, (&of.dag, &of.goal), cluster);
        let new = fits && of.nodes.insert(at);
        if !fits {
            of.nodes.remove(&at);
        }
        if new && !cluster.queue(function).is_empty() {
            let node = self.node_for(function, cluster).unwrap_or(at);
            self.requested(node, function, cluster);
        }
    }

    fn requested(&mut self, node: NodeId, function: FunctionId, cluster: &mut Cluster) {
        self.decide(node, cluster, |node, cluster| node.requested(function, cluster));
    }

    /// The node `at` has no slices for the function, or no node fits the function.
    fn unmet(&mut self, function: FunctionId, at: Option<NodeId>, cluster: &mut Cluster) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.unmet.extend(at);
        if of.nodes.is_subset(&of.unmet) {
            of.unmet.clear();
            cluster.unmet(function);
        }
    }

    /// The function's instances that serve requests, or will, by name.
    fn counting(
        &self,
        function: FunctionId,
        cluster: &Cluster,
    ) -> impl Iterator<Item = (InstanceId, &Instance)> {
        let all = cluster.functions.get(&function).into_iter().flat_map(|of| &of.instances);
        all.filter(move |id| cluster.instances.get(**id).is_some_and(|of| of.life != Life::Stopped))
            .filter_map(move |id| Some((*id, self.one(*id).filter(|one| one.gives_up.is_none())?)))
    }

    /// Files the next deadline of a node.
    fn file(&mut self, at: NodeId) {
        let Some(node) = self.nodes.get_mut(&at) else { return };
        let next = node.next_deadline();
        let before = core::mem::replace(&mut node.due, next);
        if before != next {
            before.map(|due| self.due.remove(&(due, at)));
            self.due.extend(next.map(|due| (due, at)));
        }
    }

    /// The node that hears of a request: the first with instances of the function, else a node that the function fits.
    fn node_for(&self, function: FunctionId, cluster: &Cluster) -> Option<NodeId> {
        let of = self.functions.get(&function)?;
        let with = self.counting(function, cluster).next();
        let own = || of.nodes.iter().nth(function.index() % of.nodes.len().max(1)).copied();
        with.and_then(|(id, _)| self.at.get(&id).copied()).or_else(own)
    }

    fn forget_removed(&mut self, function: FunctionId, cluster: &Cluster) {
        if cluster.functions.get(&function).is_none_or(|of| of.instances.is_empty()) {
            self.functions.remove(&function);
            self.again.clear(function);
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
        self.join(gpu, spec, cluster)?;
        self.run(cluster);
        self.refit(spec.node, cluster);
        Ok(())
    }

    fn device_lost(&mut self, cluster: &mut Cluster, gpu: GpuId, lost: &[InstanceId]) {
        let Some(at) = self.gpus.remove(&gpu) else { return };
        if let Some(node) = self.nodes.get_mut(&at) {
            node.slices.lose(gpu);
        }
        self.forget(lost, cluster);
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
        let new = Function {
            dag: dag.into(),
            goal: goal.into(),
            kept: BTreeMap::new(),
            nodes: BTreeSet::new(),
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

    fn function_removed(&mut self, cluster: &mut Cluster, function: FunctionId) {
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.decide(node, cluster, |node, cluster| node.remove(function, cluster));
        }
        self.run(cluster);
        self.forget_removed(function, cluster);
    }

    fn called(&mut self, cluster: &mut Cluster, function: FunctionId) {
        if let Some(node) = self.node_for(function, cluster) {
            self.requested(node, function, cluster);
        }
    }

    fn arrived(&mut self, cluster: &mut Cluster, request: RequestId) {
        self.came(request, cluster);
    }

    fn withdrawn(&mut self, cluster: &Cluster, request: RequestId, of: &Request) {
        self.left(request, of, cluster);
    }

    fn returned(&mut self, cluster: &Cluster, request: RequestId) {
        self.waits(request, cluster);
    }

    fn done(&mut self, cluster: &mut Cluster, _: RequestId, instance: InstanceId, took: Duration) {
        let Some(&at) = self.at.get(&instance) else { return };
        self.decide(at, cluster, |node, _| node.served(instance, took));
        self.freed(instance, cluster);
    }

    fn reported(&mut self, cluster: &mut Cluster, instance: InstanceId, report: InstanceReport) {
        match report {
            InstanceReport::Ready => self.ready(instance, cluster),
            InstanceReport::Parked => self.parked(instance, cluster),
            InstanceReport::Unparked => self.unparked(instance, cluster),
            _ => {}
        }
    }

    fn gone(&mut self, cluster: &mut Cluster, instance: InstanceId, _: InstanceReport) {
        self.forget(&[instance], cluster);
    }

    fn keep_minimum(&mut self, cluster: &mut Cluster, function: FunctionId, may_start: bool) {
        self.keep_parts(function, may_start, cluster);
    }

    fn deadline(&mut self, cluster: &mut Cluster) {
        while let Some(&(at, node)) = self.due.first()
            && at <= cluster.now
        {
            self.decide(node, cluster, |_, _| {});
        }
        self.look_again(cluster);
    }

    fn settle(&mut self, cluster: &mut Cluster) {
        self.run(cluster);
        self.reject_late(cluster);
        #[cfg(debug_assertions)]
        self.invariants(cluster);
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let nodes = self.due.first().map(|(at, _)| *at);
        [nodes, self.router.next_deadline(), self.again.next()].into_iter().flatten().min()
    }

    fn fits(&self, function: FunctionId) -> bool {
        self.functions.get(&function).is_some_and(|of| !of.nodes.is_empty())
    }

    fn invariants(&self, cluster: &Cluster) {
        self.check_router(cluster);
        assert!(self.effects.is_empty(), "a node's decision was not carried out");
        let here: BTreeSet<NodeId> = self.gpus.values().copied().collect();
        assert_eq!(here, self.nodes.keys().copied().collect(), "nodes with devices");
        for (id, at) in &self.at {
            assert!(self.nodes[at].instances.contains_key(id), "{id} is not on {at}");
        }
        let count: usize = self.nodes.values().map(|node| node.instances.len()).sum();
        assert_eq!(count, self.at.len(), "nodes of instances");
        let due = self.nodes.iter().filter_map(|(at, node)| Some((node.next_deadline()?, *at)));
        assert_eq!(due.collect::<BTreeSet<_>>(), self.due, "deadlines of nodes");
        for node in self.nodes.values() {
            node.invariants(cluster);
        }
    }
}
