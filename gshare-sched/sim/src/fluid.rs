//! Nodes with MIG slices in virtual time, around any router and any keeper of instances.
//!
//! # Problem
//! A router and a keeper talk to each other through the host: the router says where a request runs and that it is short,
//! the keeper starts, loads, evicts and drains. [`simulate`] is that host in virtual time, and keeps a book of its own: any
//! order that cannot be carried out, or that breaks what [`gshare_core::pipeline::instances`] promises, ends the run with
//! a sentence. So it is the conformance suite of both as well as the ground of the replays.
//!
//! # What is simulated
//! - stages run requests in the order they come; a part takes the sum of its components' profiled times (those behind a
//!   branch only for the requests that take it) and of its hand-offs;
//! - a start takes as long as the keeper's order says, a load too; draining instances finish what they have;
//! - instances die when [`Scenario::die_every`] says so. Requests they had are routed again.
//!
//! # What is checked
//! Slices have one owner, parts and residents fit their memory, latencies keep the SLO; a shared slice runs one request at
//! a time, of a resident instance; nobody is evicted while it runs; a request is dispatched only while it waits, to an
//! instance that is up and takes requests, and ends once.

use crate::event_queue::EventQueue;
use crate::rng::Rng;
use crate::world::stages::Staged;
use gshare_core::dag::{Component, ComponentSet, Dag, DagError};
use gshare_core::mig::{GpuModel, SliceAt};
use gshare_core::pipeline::instances::{Home, InstanceAction, InstanceEvent};
use gshare_core::pipeline::routing::{RouteAction, RouteEvent, Service};
use gshare_core::pipeline::{AssignedSlice, Goal};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, InstanceId, RequestId, SharedSlice, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A function and when it is called.
#[derive(Debug, Clone)]
pub struct Load {
    /// Its components.
    pub dag: Dag,
    /// Requirements on its pipelines; `slo` is also the deadline of its requests.
    pub goal: Goal,
    /// Times of its requests, in order.
    pub arrivals: Vec<Timestamp>,
}

/// A chain of components with these times in ms on 1g.10gb of an A100-80, less on larger slices, and so many GiB each.
///
/// # Errors
/// When that is no DAG: no components, or too many.
pub fn chain(times: &[u64], gib: u64) -> Result<Dag, DagError> {
    let mut dag = Dag::builder("chain");
    for (index, &ms) in times.iter().enumerate() {
        let mut component = Component::new(format!("c{index}"));
        for (slice, speed) in [("1g.10gb", 10), ("2g.20gb", 15), ("3g.40gb", 18), ("4g.40gb", 20)] {
            let time = Duration::from_micros(ms * 10_000 / speed);
            component = component.with_profile(slice, 1, time, Bytes::from_gib(gib));
        }
        dag = dag.component(component);
        if index > 0 {
            dag = dag.edge(format!("c{}", index - 1), format!("c{index}"), Bytes::from_mib(1));
        }
    }
    dag.build()
}

/// The node, the load and the deaths of a run.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Model of all GPUs.
    pub model: GpuModel,
    /// The functions; their number is their [`FunctionId`].
    pub loads: Vec<Load>,
    /// Instances die at random, on average one in this time. None: never.
    pub die_every: Option<Duration>,
    /// Seed of deaths and branches.
    pub seed: u64,
    /// No deaths and no new orders are waited for after the last request ended and this time has passed.
    pub linger: Duration,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The request was answered.
    Served {
        /// Which function.
        function: FunctionId,
        /// When it came.
        arrived: Timestamp,
        /// When it was answered.
        at: Timestamp,
        /// The parts of that time.
        spent: Spent,
    },
    /// The router refused it.
    Rejected {
        /// Which function.
        function: FunctionId,
        /// When it came.
        arrived: Timestamp,
    },
}

/// The time of a request in four parts, which add up to it (FluidFaaS, Figure 14).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spent {
    /// Waiting for an instance, or within a pipeline for a slice.
    pub queue: Duration,
    /// Waiting for the weights of a shared instance.
    pub load: Duration,
    /// Work on slices, along the longest way through the parts.
    pub execution: Duration,
    /// Hand-offs between slices, along the same way.
    pub transfer: Duration,
    /// Slices it ran on: several in a pipeline.
    pub slices: usize,
}

/// Spans of time of each slice: node, GPU, slice.
pub type Spans = BTreeMap<(usize, GpuId, SliceAt), Vec<(Timestamp, Timestamp)>>;

/// The result of a run.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Outcome {
    /// How each request ended, in the order of the ends.
    pub ends: Vec<End>,
    /// Time slices worked, summed over slices.
    pub slice_time: Duration,
    /// Time GPUs worked on anything at all, summed over GPUs.
    pub gpu_time: Duration,
    /// Time slices were held by instances, times their compute slices.
    pub held_slice_time: Duration,
    /// From when to when each slice worked, in the order in which the work was given to it.
    pub worked: Spans,
    /// From when to when each instance held each of its slices, in the order of the ends.
    pub held: Spans,
    /// Orders of the keepers by name.
    pub orders: BTreeMap<&'static str, u64>,
    /// When instances of each function started, or changed between shared and exclusive.
    pub changes: BTreeMap<FunctionId, Vec<Timestamp>>,
    /// Loads of shared instances, and the time they took.
    pub loads: u64,
    /// The time of those.
    pub load_time: Duration,
    /// When the last request ended.
    pub finished: Timestamp,
}

/// A name of an instance over all nodes.
const fn global(node: usize, instance: InstanceId) -> InstanceId {
    InstanceId::new((node as u64) << 48 | instance.number())
}

const fn node_of(instance: InstanceId) -> usize {
    (instance.number() >> 48) as usize
}

const fn local(instance: InstanceId) -> InstanceId {
    InstanceId::new(instance.number() & ((1 << 48) - 1))
}

#[derive(Debug, Clone, Copy)]
enum Happening {
    Arrival { function: usize, index: usize },
    Started(InstanceId),
    Loaded(InstanceId, u64),
    Finished(RequestId, InstanceId, u64),
    Gone(InstanceId),
    Wake,
    Death,
}

/// A slice of the book.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place(usize, AssignedSlice);

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    home: Home,
    up: bool,
    /// The keeper ordered it to drain; the router was told.
    ordered: bool,
    draining: bool,
    drained: bool,
    /// The last word of the keeper to the router: whether the instance shares its slice.
    shares: bool,
    resident: bool,
    loading: bool,
    /// Request that waits for the load.
    pending: Option<RequestId>,
    has: BTreeSet<RequestId>,
    /// When each part is free.
    free: Vec<Timestamp>,
    epoch: u64,
    since: Timestamp,
}

#[derive(Debug)]
struct Request {
    function: FunctionId,
    arrived: Timestamp,
    number: u64,
    on: Option<InstanceId>,
    /// When it was dispatched, and what it has spent since.
    dispatched: Timestamp,
    spent: Spent,
}

struct Host<'a, R, K> {
    scenario: &'a Scenario,
    router: R,
    keepers: Vec<K>,
    queue: EventQueue<Happening>,
    rng: Rng,
    instances: BTreeMap<InstanceId, Instance>,
    /// Owners of slices that are held: the exclusive instance, or those that share.
    owners: BTreeMap<Place, BTreeSet<InstanceId>>,
    requests: BTreeMap<RequestId, Request>,
    arrived: u64,
    epochs: u64,
    /// Time up to which a wake-up is scheduled.
    wake: Timestamp,
    outcome: Outcome,
    left: usize,
    /// Events that engines are yet to be told, in order.
    tasks: VecDeque<Task>,
    /// When each function was short last, and how often in a row.
    short: BTreeMap<FunctionId, (Timestamp, usize)>,
}

#[derive(Debug)]
enum Task {
    Keep(usize, InstanceEvent),
    Route(RouteEvent),
}

type Fault = String;

/// Runs `scenario` on one keeper per node until every request has ended.
///
/// # Errors
/// A sentence: what an engine ordered that it must not, or refused that it must not.
pub fn simulate<R, K>(scenario: &Scenario, router: R, keepers: Vec<K>) -> Result<Outcome, Fault>
where
    R: Engine<Event = RouteEvent, Action = RouteAction>,
    K: Engine<Event = InstanceEvent, Action = InstanceAction>,
{
    let mut host = Host {
        scenario,
        router,
        keepers,
        queue: EventQueue::new(),
        rng: Rng::new(scenario.seed),
        instances: BTreeMap::new(),
        owners: BTreeMap::new(),
        requests: BTreeMap::new(),
        arrived: 0,
        epochs: 0,
        wake: Timestamp::ZERO,
        outcome: Outcome::default(),
        left: scenario.loads.iter().map(|load| load.arrivals.len()).sum(),
        tasks: VecDeque::new(),
        short: BTreeMap::new(),
    };
    host.run()?;
    Ok(host.outcome)
}

impl<R, K> Host<'_, R, K>
where
    R: Engine<Event = RouteEvent, Action = RouteAction>,
    K: Engine<Event = InstanceEvent, Action = InstanceAction>,
{
    fn run(&mut self) -> Result<(), Fault> {
        for (index, load) in self.scenario.loads.iter().enumerate() {
            let function = FunctionId::new(u32::try_from(index).map_err(|error| error.to_string())?);
            for node in 0..self.keepers.len() {
                let event = InstanceEvent::FunctionAdded {
                    function,
                    dag: Box::new(load.dag.clone()),
                    goal: Box::new(load.goal.clone()),
                };
                self.keep(node, event);
            }
            if let Some(&first) = load.arrivals.first() {
                self.queue.schedule(first, Happening::Arrival { function: index, index: 0 });
            }
        }
        self.tell()?;
        if let Some(mean) = self.scenario.die_every {
            let after = self.rng.duration(Duration::ZERO, mean.saturating_mul(2));
            self.queue.schedule(Timestamp::ZERO + after, Happening::Death);
        }
        while let Some((now, happening)) = self.queue.pop() {
            if self.left == 0 && now > self.outcome.finished + self.scenario.linger {
                break;
            }
            self.happen(now, happening)?;
            self.tell()?;
            self.wake_up();
        }
        if self.left > 0 {
            return Err(format!("{} requests never ended", self.left));
        }
        self.add_up();
        Ok(())
    }

    /// Schedules the next deadline of any engine.
    fn wake_up(&mut self) {
        let keepers = self.keepers.iter().filter_map(Engine::next_deadline);
        let Some(next) = keepers.chain(self.router.next_deadline()).min() else { return };
        let now = self.queue.now();
        if self.wake <= now || next < self.wake {
            self.wake = next.max(now + Duration::from_nanos(1));
            self.queue.schedule(self.wake, Happening::Wake);
        }
    }

    fn happen(&mut self, now: Timestamp, happening: Happening) -> Result<(), Fault> {
        match happening {
            Happening::Arrival { function, index } => {
                let load = &self.scenario.loads[function];
                if let Some(&next) = load.arrivals.get(index + 1) {
                    self.queue.schedule(next, Happening::Arrival { function, index: index + 1 });
                }
                let id = FunctionId::new(u32::try_from(function).unwrap_or(u32::MAX));
                let request = RequestId::new(self.arrived);
                self.arrived += 1;
                let new = Request {
                    function: id,
                    arrived: now,
                    number: request.number(),
                    on: None,
                    dispatched: now,
                    spent: Spent::default(),
                };
                self.requests.insert(request, new);
                let node = self.node_for(id);
                self.keep(node, InstanceEvent::Requested { function: id });
                let deadline = load.goal.slo.map(|slo| now + slo);
                self.route(RouteEvent::Arrived { request, function: id, deadline });
            }
            Happening::Started(instance) => self.started(instance),
            Happening::Loaded(id, epoch) => {
                let Some(instance) = self.instances.get_mut(&id).filter(|one| one.epoch == epoch) else {
                    return Ok(());
                };
                (instance.loading, instance.resident) = (false, true);
                let pending = instance.pending.take();
                self.keep(node_of(id), InstanceEvent::Loaded { instance: local(id) });
                if !self.instances[&id].draining {
                    self.route(RouteEvent::LoadChanged { instance: id, load: Duration::ZERO });
                }
                if let Some(request) = pending {
                    self.execute(request, id)?;
                }
            }
            Happening::Finished(request, id, epoch) => {
                if self.instances.get(&id).is_some_and(|instance| instance.epoch == epoch) {
                    self.finished(request, id)?;
                }
            }
            Happening::Gone(instance) => self.gone(instance),
            Happening::Wake => {
                for node in 0..self.keepers.len() {
                    if self.keepers[node].next_deadline().is_some_and(|due| due <= now) {
                        self.keep(node, InstanceEvent::DeadlineReached);
                    }
                }
                if self.router.next_deadline().is_some_and(|due| due <= now) {
                    self.route(RouteEvent::DeadlineReached);
                }
            }
            Happening::Death => {
                let all: Vec<InstanceId> = self.instances.keys().copied().collect();
                if let Some(&instance) = self.rng.pick(&all) {
                    self.gone(instance);
                }
                if let Some(mean) = self.scenario.die_every.filter(|_| self.left > 0) {
                    let after = self.rng.duration(Duration::ZERO, mean.saturating_mul(2));
                    self.queue.schedule(now + after, Happening::Death);
                }
            }
        }
        Ok(())
    }

    /// The node that hears of a request: one with instances of the function, else one of its own.
    fn node_for(&self, function: FunctionId) -> usize {
        let with = self.instances.iter().find(|(_, one)| one.function == function && !one.draining);
        with.map_or(function.index() % self.keepers.len(), |(id, _)| node_of(*id))
    }

    fn held(&self, node: usize) -> usize {
        self.owners.keys().filter(|place| place.0 == node).count()
    }

    fn keep(&mut self, node: usize, event: InstanceEvent) {
        self.tasks.push_back(Task::Keep(node, event));
    }

    fn route(&mut self, event: RouteEvent) {
        self.tasks.push_back(Task::Route(event));
    }

    /// Tells engines what there is to tell, one event after the other, and does what each says.
    fn tell(&mut self) -> Result<(), Fault> {
        let now = self.queue.now();
        while let Some(task) = self.tasks.pop_front() {
            match task {
                Task::Keep(node, event) => {
                    let (told, mut actions) = (event.clone(), Vec::new());
                    self.keepers[node]
                        .handle(now, event, &mut actions)
                        .map_err(|error| format!("at {now} keeper {node} refused {told:?}: {error}"))?;
                    for action in actions {
                        let what = action.clone();
                        self.obey(node, action).map_err(|fault| format!("at {now}, {what:?}: {fault}"))?;
                    }
                }
                Task::Route(event) => {
                    self.note(&event);
                    let mut actions = Vec::new();
                    let refused = self.router.handle(now, event, &mut actions);
                    refused.map_err(|error| format!("at {now} the router refused {event:?}: {error}"))?;
                    for action in actions {
                        self.direct(action).map_err(|fault| format!("at {now}, {action:?}: {fault}"))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Notes the state that the router knows from now on.
    fn note(&mut self, event: &RouteEvent) {
        match *event {
            RouteEvent::InstanceDraining { instance } => {
                if let Some(found) = self.instances.get_mut(&instance) {
                    found.draining = true;
                }
            }
            RouteEvent::InstanceUp { instance, service, .. }
            | RouteEvent::ServiceChanged { instance, service } => {
                if let Some(found) = self.instances.get_mut(&instance) {
                    found.shares = matches!(service, Service::Shared { .. });
                }
            }
            _ => {}
        }
    }

    fn direct(&mut self, action: RouteAction) -> Result<(), Fault> {
        match action {
            RouteAction::Dispatch { request, instance } => self.dispatch(request, instance)?,
            RouteAction::Reject { request, .. } => {
                let found = self.requests.remove(&request).ok_or("no such request")?;
                if found.on.is_some_and(|on| self.instances.contains_key(&on)) {
                    return Err("it was dispatched".to_owned());
                }
                self.end(End::Rejected { function: found.function, arrived: found.arrived });
            }
            RouteAction::Short { function, waiting, behind } => {
                // The node with the fewest slices held; while that does not help, the others in turn.
                let mut nodes: Vec<usize> = (0..self.keepers.len()).collect();
                nodes.sort_by_key(|&node| (self.held(node), node));
                let now = self.queue.now();
                let told = self.short.entry(function).or_insert((now, 0));
                told.1 = if now.saturating_since(told.0) > Duration::from_secs(1) { 0 } else { told.1 + 1 };
                told.0 = now;
                let node = nodes[told.1 % nodes.len()];
                self.keep(node, InstanceEvent::Short { function, waiting, behind });
            }
            RouteAction::Drained { instance } => {
                let found = self.instances.get_mut(&instance).ok_or("no such instance")?;
                if !found.draining || !found.has.is_empty() || found.drained {
                    return Err("it is not draining, or not empty".to_owned());
                }
                found.drained = true;
                self.keep(node_of(instance), InstanceEvent::Drained { instance: local(instance) });
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, request: RequestId, id: InstanceId) -> Result<(), Fault> {
        let found = self.requests.get_mut(&request).ok_or("no such request")?;
        if found.on.is_some() {
            return Err(format!("it runs on {:?}", found.on));
        }
        let instance = self.instances.get_mut(&id).ok_or("no such instance")?;
        if !instance.up || instance.draining || instance.function != found.function {
            return Err("it is not up, drains, or is of another function".to_owned());
        }
        (found.on, found.dispatched) = (Some(id), self.queue.now());
        instance.has.insert(request);
        let (shares, ready) = (instance.shares, instance.resident);
        if shares {
            self.alone(id)?;
            if !ready {
                if let Some(instance) = self.instances.get_mut(&id) {
                    instance.pending = Some(request);
                }
                self.keep(node_of(id), InstanceEvent::Needed { instance: local(id) });
                return Ok(());
            }
        }
        self.execute(request, id)
    }

    /// Checks that nothing else runs on the slice the instance shares.
    fn alone(&self, id: InstanceId) -> Result<(), Fault> {
        let Some(slice) = self.instances[&id].home.slices().next() else { return Ok(()) };
        let others = self.owners.get(&Place(node_of(id), slice)).into_iter().flatten();
        let running = others.map(|other| self.instances[other].has.len()).sum::<usize>();
        if running == 1 { Ok(()) } else { Err(format!("{running} requests on one shared slice")) }
    }

    /// Time that a part works for a request.
    fn time(&self, number: u64, load: &Load, components: ComponentSet, slice: AssignedSlice) -> u64 {
        let Some(profile) = self.scenario.model.get(slice.slice.profile) else { return 0 };
        let staged = Staged { dag: &load.dag, goal: &load.goal, seed: self.scenario.seed, number };
        staged.time(components, Some(&profile.name)).as_nanos()
    }

    fn execute(&mut self, request: RequestId, id: InstanceId) -> Result<(), Fault> {
        let now = self.queue.now();
        let (scenario, owner) = (self.scenario, &self.instances[&id]);
        let load = &scenario.loads[owner.function.index()];
        let home = owner.home.clone();
        let found = self.requests.get_mut(&request).ok_or("no such request")?;
        let instance = self.instances.get_mut(&id).ok_or("no such instance")?;
        let staged = Staged { dag: &load.dag, goal: &load.goal, seed: scenario.seed, number: found.number };
        let whole = [(0, load.dag.all())];
        let parts: Vec<(u32, ComponentSet)> = match &home {
            Home::Exclusive { parts, .. } => parts.iter().map(|part| (part.stage, part.components)).collect(),
            _ => whole.to_vec(),
        };
        let mut spent =
            Spent { load: now.saturating_since(found.dispatched), slices: parts.len(), ..Spent::default() };
        let mut at = now;
        let mut slices = home.slices().enumerate();
        for stage in parts.chunk_by(|one, next| one.0 == next.0) {
            let (mut last, mut longest) = (at, (Duration::ZERO, Duration::ZERO));
            for (&(_, components), (place, slice)) in stage.iter().zip(slices.by_ref()) {
                let profile = scenario.model.get(slice.slice.profile).ok_or("no such profile")?;
                let work = staged.work(components, Some(&profile.name));
                let hand_offs = staged.hand_offs(components);
                let begin = at.max(instance.free[place]);
                let end = begin + work + hand_offs;
                instance.free[place] = end;
                self.outcome.slice_time = self.outcome.slice_time.saturating_add(work + hand_offs);
                let of = (node_of(id), slice.gpu, slice.slice);
                self.outcome.worked.entry(of).or_default().push((begin, end));
                if end >= last {
                    (last, longest) = (end, (work, hand_offs));
                }
            }
            spent.execution += longest.0;
            spent.transfer += longest.1;
            at = last;
        }
        found.spent = spent;
        self.queue.schedule(at, Happening::Finished(request, id, instance.epoch));
        Ok(())
    }

    fn finished(&mut self, request: RequestId, id: InstanceId) -> Result<(), Fault> {
        let now = self.queue.now();
        let found = self.requests.remove(&request).ok_or_else(|| format!("{request} ended twice"))?;
        let instance = self.instances.get_mut(&id).ok_or("no such instance")?;
        instance.has.remove(&request);
        let load = &self.scenario.loads[instance.function.index()];
        let (home, number) = (instance.home.clone(), found.number);
        let busy = match &home {
            Home::Exclusive { parts, .. } => parts
                .iter()
                .map(|part| self.time(number, load, part.components, part.slice))
                .max()
                .unwrap_or(0),
            _ => home.slices().next().map_or(0, |slice| self.time(number, load, load.dag.all(), slice)),
        };
        let Request { function, arrived, mut spent, .. } = found;
        spent.queue = now.saturating_since(arrived + spent.load + spent.execution + spent.transfer);
        self.end(End::Served { function, arrived, at: now, spent });
        let busy = Duration::from_nanos(busy);
        self.keep(node_of(id), InstanceEvent::Served { instance: local(id), busy });
        self.route(RouteEvent::Completed { request, instance: id });
        Ok(())
    }

    fn end(&mut self, end: End) {
        self.left -= 1;
        self.outcome.finished = self.queue.now();
        self.outcome.ends.push(end);
    }

    fn service(&self, id: InstanceId) -> Service {
        let instance = &self.instances[&id];
        match instance.home {
            Home::Exclusive { ref parts, latency, interval, .. } => {
                // As many as keep its busiest slice busy, and no more than it has slices: they would wait in it, where no
                // other instance can take them. The interval is an expected one, and where a branch is rare far below the
                // time of a request that takes it.
                let capacity = latency.as_nanos().div_ceil(interval.as_nanos().max(1));
                let slices = u32::try_from(parts.len()).unwrap_or(u32::MAX);
                let capacity = u32::try_from(capacity).unwrap_or(u32::MAX).min(slices);
                Service::Exclusive { latency, interval, capacity }
            }
            Home::Shared { number, latency, load, .. } => {
                let load = if instance.resident { Duration::ZERO } else { load };
                // Slices of different nodes are different.
                let slice =
                    SharedSlice::new(number.number() + 10_000 * u32::try_from(node_of(id)).unwrap_or(0));
                Service::Shared { slice, latency, load }
            }
            _ => {
                Service::Shared { slice: SharedSlice::new(0), latency: Duration::ZERO, load: Duration::ZERO }
            }
        }
    }

    fn started(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        instance.up = true;
        instance.resident = matches!(instance.home, Home::Exclusive { .. });
        let function = instance.function;
        let service = self.service(id);
        self.keep(node_of(id), InstanceEvent::Started { instance: local(id) });
        self.route(RouteEvent::InstanceUp { instance: id, function, service });
    }

    fn gone(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.remove(&id) else { return };
        self.settle(id, &instance);
        for slice in instance.home.slices() {
            let place = Place(node_of(id), slice);
            if let Some(owners) = self.owners.get_mut(&place) {
                owners.remove(&id);
                if owners.is_empty() {
                    self.owners.remove(&place);
                }
            }
        }
        for request in &instance.has {
            if let Some(request) = self.requests.get_mut(request) {
                request.on = None;
            }
        }
        self.keep(node_of(id), InstanceEvent::Gone { instance: local(id) });
        if instance.up {
            self.route(RouteEvent::InstanceDown { instance: id });
        }
    }

    /// Adds the time its slices were held.
    fn settle(&mut self, id: InstanceId, instance: &Instance) {
        let now = self.queue.now();
        let held = now.saturating_since(instance.since);
        for slice in instance.home.slices() {
            let of = (node_of(id), slice.gpu, slice.slice);
            self.outcome.held.entry(of).or_default().push((instance.since, now));
            let share = self.owners.get(&Place(node_of(id), slice)).map_or(1, |owners| owners.len().max(1));
            let compute = self.scenario.model.get(slice.slice.profile).map_or(0, |one| one.compute_slices);
            let time = held.saturating_mul(compute.into()).as_nanos() / share as u64;
            self.outcome.held_slice_time =
                self.outcome.held_slice_time.saturating_add(Duration::from_nanos(time));
        }
    }

    fn obey(&mut self, node: usize, action: InstanceAction) -> Result<(), Fault> {
        let now = self.queue.now();
        let mut count = |name| *self.outcome.orders.entry(name).or_insert(0) += 1;
        match action {
            InstanceAction::Start { instance, function, home, takes, .. } => {
                count("start");
                self.outcome.changes.entry(function).or_default().push(now);
                let id = global(node, instance);
                self.fits(function, &home)?;
                let exclusive = matches!(home, Home::Exclusive { .. });
                for slice in home.slices() {
                    let place = Place(node, slice);
                    let owners = self.owners.entry(place).or_default();
                    let shared = |other: &InstanceId| {
                        self.instances.get(other).is_some_and(|one| matches!(one.home, Home::Shared { .. }))
                    };
                    if !owners.is_empty() && (exclusive || !owners.iter().all(shared)) {
                        return Err(format!("a slice of it is held by {owners:?}"));
                    }
                    owners.insert(id);
                }
                let free = vec![now; home.slices().count()];
                self.epochs += 1;
                let new = Instance {
                    function,
                    home,
                    up: false,
                    ordered: false,
                    draining: false,
                    drained: false,
                    shares: false,
                    resident: false,
                    loading: false,
                    pending: None,
                    has: BTreeSet::new(),
                    free,
                    epoch: self.epochs,
                    since: now,
                };
                if self.instances.insert(id, new).is_some() {
                    return Err("its name is in use".to_owned());
                }
                self.queue.schedule(now + takes, Happening::Started(id));
            }
            InstanceAction::Load { instance, takes } => {
                count("load");
                self.outcome.loads += 1;
                self.outcome.load_time = self.outcome.load_time.saturating_add(takes);
                let id = global(node, instance);
                let found = self.instances.get_mut(&id).ok_or("no such instance")?;
                if found.resident || found.loading {
                    return Err("it is resident".to_owned());
                }
                found.loading = true;
                let epoch = found.epoch;
                let slice = found.home.slices().next().ok_or("no slice")?;
                let (mut used, mut others) = (0, 0);
                for other in &self.owners[&Place(node, slice)] {
                    let one = &self.instances[other];
                    if let Home::Shared { memory, .. } = one.home
                        && (one.resident || one.loading)
                    {
                        used += memory.get();
                        others += usize::from(one.loading && *other != id);
                    }
                }
                let room = self.scenario.model.get(slice.slice.profile).map_or(0, |one| one.memory.get());
                if used > room || others > 0 {
                    return Err(format!("{used} bytes in {room}, {others} others loading"));
                }
                self.queue.schedule(now + takes, Happening::Loaded(id, epoch));
            }
            InstanceAction::Evict { instance, .. } => {
                count("evict");
                let id = global(node, instance);
                let found = self.instances.get_mut(&id).ok_or("no such instance")?;
                if !found.resident || !found.has.is_empty() || !matches!(found.home, Home::Shared { .. }) {
                    return Err("it is exclusive, runs, or is not there".to_owned());
                }
                found.resident = false;
                let Home::Shared { load, .. } = found.home else { return Ok(()) };
                if !found.draining {
                    self.route(RouteEvent::LoadChanged { instance: id, load });
                }
            }
            InstanceAction::Moved { instance, home, .. } => {
                count("move");
                let id = global(node, instance);
                let found = self.instances.remove(&id).ok_or("no such instance")?;
                self.settle(id, &found);
                self.outcome.changes.entry(found.function).or_default().push(now);
                let owners = home.slices().map(|slice| &self.owners[&Place(node, slice)]);
                if !found.resident || owners.into_iter().any(|owners| owners.len() != 1) {
                    return Err("it is not resident, or not alone".to_owned());
                }
                self.fits(found.function, &home)?;
                self.instances.insert(id, Instance { home, since: now, ..found });
                let service = self.service(id);
                self.route(RouteEvent::ServiceChanged { instance: id, service });
            }
            InstanceAction::Drain { instance, .. } => {
                count("drain");
                let id = global(node, instance);
                let found = self.instances.get_mut(&id).ok_or("no such instance")?;
                if !found.up || found.ordered {
                    return Err("it is not up, or draining".to_owned());
                }
                found.ordered = true;
                self.route(RouteEvent::InstanceDraining { instance: id });
            }
            InstanceAction::Stop { instance, .. } => {
                count("stop");
                let id = global(node, instance);
                let found = self.instances.get(&id).ok_or("no such instance")?;
                if !found.drained {
                    return Err("it has not drained".to_owned());
                }
                self.queue.schedule(now + Duration::from_millis(100), Happening::Gone(id));
            }
            InstanceAction::Forget { function } => {
                count("forget");
                let up = |(id, one): (&InstanceId, &Instance)| {
                    node_of(*id) == node && one.function == function && !one.ordered
                };
                if self.instances.iter().any(up) {
                    return Err("it has instances".to_owned());
                }
            }
            InstanceAction::Prewarm { .. } => count("prewarm"),
            InstanceAction::Unmet { .. } => count("unmet"),
        }
        Ok(())
    }

    /// Checks that memory suffices and the SLO is kept.
    fn fits(&self, function: FunctionId, home: &Home) -> Result<(), Fault> {
        let load = &self.scenario.loads[function.index()];
        let (dag, goal) = (&load.dag, &load.goal);
        let parts: Vec<ComponentSet> = match home {
            Home::Exclusive { parts, .. } => parts.iter().map(|part| part.components).collect(),
            _ => vec![dag.all()],
        };
        let mut covered = ComponentSet::EMPTY;
        for (&components, slice) in parts.iter().zip(home.slices()) {
            let profile = self.scenario.model.get(slice.slice.profile).ok_or("no such profile")?;
            let memory = |one: usize| {
                dag.components()[one].profile(&profile.name, goal.batch).map(|on| on.memory.get())
            };
            let weights: Option<u64> = components.iter().map(memory).sum();
            let needed = weights.ok_or("a component without a profile")? + goal.runtime_memory.get();
            if needed > profile.memory.get() || !covered.intersection(components).is_empty() {
                return Err(format!("{needed} bytes on {}, or a component twice", profile.name));
            }
            covered = covered.union(components);
        }
        let (Home::Exclusive { latency, .. } | Home::Shared { latency, .. }) = home else { return Ok(()) };
        if covered != dag.all() || goal.slo.is_some_and(|slo| *latency > slo) {
            return Err("a component is missing, or the SLO is".to_owned());
        }
        Ok(())
    }

    fn add_up(&mut self) {
        let all: Vec<InstanceId> = self.instances.keys().copied().collect();
        for id in all {
            if let Some(instance) = self.instances.remove(&id) {
                self.settle(id, &instance);
            }
        }
        let mut of_gpu: BTreeMap<(usize, GpuId), Vec<(Timestamp, Timestamp)>> = BTreeMap::new();
        for (&(node, gpu, _), spans) in &self.outcome.worked {
            of_gpu.entry((node, gpu)).or_default().extend(spans);
        }
        for spans in of_gpu.values_mut() {
            spans.sort_unstable();
            let mut end = Timestamp::ZERO;
            for &(from, to) in spans.iter() {
                self.outcome.gpu_time += to.saturating_since(from.max(end));
                end = end.max(to);
            }
        }
    }
}
