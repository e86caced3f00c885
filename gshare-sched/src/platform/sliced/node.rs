//! The instances of one node: which start, share a slice, own slices, and leave (FluidFaaS, section 5.3 and Figure 8).
//!
//! # Problem
//! A function that holds a slice while no client calls it wastes the slice, and loading it for every call is slow. The node's rules decide
//! which functions have instances, which instances own slices and which take turns on a shared slice, which are evicted, and when a pipeline
//! moves to better slices. The ledger has the life of each instance; a node has its place, its use, and the intention to give it up.
//!
//! # States
//! ```text
//!              first request                    busy, or short
//!   cold ───────────────────────▶ shared ───────────────────────▶ exclusive (hot)
//!    ▲                            │    ▲ ◀───────────────────────  │  whole, or a pipeline
//!    │ keep-alive over     evicted│    │needed      no longer busy │ idle pipeline
//!    └──────────────── warm ◀─────┘────┘                           ▼
//!                       ▲ (weights in host memory) ◀───────────────┘
//! ```
//! **Exclusive** instances own their slices and are never evicted; **shared** ones take turns on a slice ("time sharing"), resident or
//! evicted.
//!
//! # Algorithm
//! 1. **First request**: a shared instance on a shared slice with time left, else on the smallest suitable free slice. A function that
//!    fits no slice as a whole gets an exclusive pipeline.
//! 2. **Busy** (30 % of a window, section 5.3), or **short** (requests cannot be served in time): an exclusive instance. A busy instance
//!    alone on its slice keeps it; otherwise the whole starts on a free slice, else a pipeline ([`Place`]).
//! 3. **Not busy** for some windows in a row, below a second, lower threshold: the slowest of several exclusive instances drains if the
//!    others can do its work. The last one shares its slice; a pipeline makes place for a shared instance, or is given up when unused.
//! 4. **Eviction**: a shared instance that must serve is loaded, and others leave its slice until it fits
//!    ([`EvictionOrder`](crate::pipeline::EvictionOrder)). Weights stay in host memory (warm) while that pays, and are fetched when it pays
//!    again ([`KeepAlive`](crate::pipeline::KeepAlive)).
//! 5. **Migration**: after a window without a lack of slices a pipeline moves to one slice for the whole, draining when that is up.
//! 6. **Reclaim**: a function without slices takes an idle exclusive instance's, or the least used of several shared slices. Neighbours of
//!    a busy shared instance leave if served elsewhere too.
//! 7. **Minimum**: as many instances start at once, shared ones first, and no rule above gives them up.
//!
//! # Invariants
//! Every slice has one owner; residents of a shared slice fit its memory; no exclusive instance is evicted; a function has at most
//! `max_shared` shared instances; instances and slices agree on each instance's place.
//!
//! # Cost
//! O(log n) for a request, a use or a victim; a plan (see [`crate::pipeline`]) per start, and at most one per function and change of the free
//! slices while none fits; O(n) per window. The deviations from the paper can be switched off: [`KeeperConfig::paper`].

use super::Cluster;
use super::slices::{Owner, Slices};
use crate::Tier;
use crate::pipeline::{Gaps, Goal, Home, KeeperConfig, Place, Stay};
use crate::platform::timers::Timers;
use crate::platform::{Life, Part, PlatformAction, StopCause};
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::resource::QuotaRange;
use gshare_core::share::GpuShare;
use gshare_core::{
    Bytes, Duration, FunctionId, InstanceId, NodeId, ProfileId, RequestId, SmShare, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The state of an instance in its slice's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    Out,
    /// `Unpark` waits until no instance on the slice is being parked.
    Coming {
        takes: Duration,
    },
    /// `Unpark` was ordered.
    Unparking,
    In,
}

/// An instance on slices; the ledger has its life and its requests.
#[derive(Debug, Clone)]
pub(super) struct Instance {
    pub(super) function: FunctionId,
    pub(super) home: Home,
    /// The numbers of its slices in the node's list.
    pub(super) places: Vec<usize>,
    pub(super) memory: Memory,
    /// The instance leaves its slice's memory: `Park` was not answered, or it was evicted after its `Stop`.
    pub(super) leaving: bool,
    /// The waiting request for which the instance is unparked.
    pub(super) pending: Option<RequestId>,
    /// Why it gets no more requests.
    pub(super) gives_up: Option<StopCause>,
    /// The instance that drains once this one has started.
    pub(super) replaces: Option<InstanceId>,
    pub(super) replaced: bool,
    /// The function that is to get its slices after the drain.
    pub(super) taken_for: Option<FunctionId>,
    /// Time of work in this window, and in the window before.
    pub(super) busy: u64,
    pub(super) was_busy: u64,
    /// Windows in a row without enough work; `idle` counts the windows without any use.
    pub(super) cool: u32,
    pub(super) idle: u32,
}

impl Instance {
    pub(super) const fn is_shared(&self) -> bool {
        matches!(self.home, Home::Shared { .. })
    }

    /// Whether the instance takes any of its slice's memory.
    pub(super) const fn holds(&self) -> bool {
        self.leaving || matches!(self.memory, Memory::In | Memory::Unparking)
    }

    /// Whether it comes to its slice's memory.
    pub(super) const fn comes(&self) -> bool {
        self.pending.is_some() || matches!(self.memory, Memory::Coming { .. } | Memory::Unparking)
    }
}

/// An instance's life in the ledger together with its node's intention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Starting,
    /// Exclusive, or shared and either resident or evicted.
    Up,
    /// Shared, with its weights on the way.
    Loading,
    Draining,
    Ended,
}

impl State {
    pub(super) const fn is_serving(self) -> bool {
        matches!(self, Self::Up | Self::Loading)
    }

    pub(super) const fn stays(self) -> bool {
        matches!(self, Self::Starting | Self::Up | Self::Loading)
    }
}

/// The whole function on one profile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Whole {
    pub(super) profile: ProfileId,
    pub(super) latency: Duration,
    /// Memory of the models and of the run-time.
    pub(super) memory: Bytes,
    pub(super) compute: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Function {
    pub(super) dag: Arc<Dag>,
    pub(super) goal: Arc<Goal>,
    /// By compute slices, then memory.
    pub(super) wholes: Vec<Whole>,
    pub(super) instances: BTreeSet<InstanceId>,
    pub(super) gaps: Gaps,
    pub(super) last: Option<Timestamp>,
    /// The warm periods after the last request; none: not computed since that request.
    stays: Option<Vec<Stay>>,
    pub(super) warm: bool,
    /// The version of the slices at which no slices suited the function.
    pub(super) unmet: Option<u64>,
    /// The time of the last shortage.
    pub(super) told_short: Option<Timestamp>,
    /// The minimum number of instances on this node.
    pub(super) least: u32,
    /// The version of the slices at which the minimum could not be met.
    least_unmet: Option<u64>,
}

/// A change that the pool carries out at the end of the event at hand.
#[derive(Debug, Clone, Copy)]
pub(super) enum Effect {
    /// Bring a shared instance to its slice's memory, in this time.
    Load(InstanceId, Duration),
    /// Take a shared instance out of its slice's memory.
    Evict(InstanceId),
    /// The instance owns its slice from now on, or shares it.
    Moved(InstanceId),
    /// Give the instance no more requests.
    Drain(InstanceId),
    /// No slices of the node suit the function.
    Unmet(FunctionId),
}

/// The slices and instances of a node.
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) config: Arc<KeeperConfig>,
    pub(super) place: Arc<dyn Place>,
    pub(super) slices: Slices,
    pub(super) functions: BTreeMap<FunctionId, Function>,
    pub(super) instances: BTreeMap<InstanceId, Instance>,
    pub(super) effects: Vec<Effect>,
    /// Instances started since the pool last looked.
    pub(super) started: Vec<InstanceId>,
    /// The time of the last event, or the end of the window at hand.
    last: Timestamp,
    /// End of the window; none while there is no instance.
    window_ends: Option<Timestamp>,
    expiries: Timers<FunctionId>,
    all_gaps: Gaps,
    /// True if a function found no slices since the window began; `was_wanting` is the same for the window before.
    pub(super) wanting: bool,
    pub(super) was_wanting: bool,
    /// Its next deadline, as filed.
    pub(super) due: Option<Timestamp>,
}

impl Node {
    pub(super) fn new(id: NodeId, config: Arc<KeeperConfig>, place: Arc<dyn Place>, slices: Slices) -> Self {
        Self {
            id,
            config,
            place,
            slices,
            functions: BTreeMap::new(),
            instances: BTreeMap::new(),
            effects: Vec::new(),
            started: Vec::new(),
            last: Timestamp::ZERO,
            window_ends: None,
            expiries: Timers::default(),
            all_gaps: Gaps::default(),
            wanting: false,
            was_wanting: false,
            due: None,
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        [self.expiries.next(), self.window_ends].into_iter().flatten().min()
    }

    pub(super) const fn now(&self) -> Timestamp {
        self.last
    }

    pub(super) fn state(&self, id: InstanceId, cluster: &Cluster) -> State {
        let one = &self.instances[&id];
        match cluster.instances.get(id).map(|of| of.life) {
            None | Some(Life::Stopped) => State::Ended,
            Some(Life::Starting) => State::Starting,
            Some(Life::Draining) => State::Draining,
            _ if one.gives_up.is_some() => State::Draining,
            _ if one.comes() => State::Loading,
            _ => State::Up,
        }
    }

    /// Whether an instance has its weights where it runs.
    pub(super) fn is_resident(&self, id: InstanceId) -> bool {
        let one = &self.instances[&id];
        !one.is_shared() || self.slices.all[one.places[0]].order.is_resident(id)
    }

    /// Whether one more instance is within the function's bound; the replaced instance does not count.
    pub(super) fn may_start(
        &self,
        function: FunctionId,
        replaces: Option<InstanceId>,
        cluster: &Cluster,
    ) -> bool {
        let Some(of) = cluster.functions.get(&function) else { return false };
        let counts = |id: &&InstanceId| {
            let stays = cluster.instances.get(**id).is_some_and(|of| of.stays());
            let given_up = self.instances.get(id).is_some_and(|one| one.gives_up.is_some());
            stays && !given_up && Some(**id) != replaces
        };
        of.instances.iter().filter(counts).count() < of.spec.max_instances as usize
    }

    /// Starts an instance, unless the function has as many as it may.
    pub(super) fn start(
        &mut self,
        function: FunctionId,
        home: Home,
        replaces: Option<InstanceId>,
        cluster: &mut Cluster,
    ) {
        if !self.may_start(function, replaces, cluster) {
            return;
        }
        let instance = cluster.instances.name();
        let places: Vec<usize> = home.slices().filter_map(|slice| self.slices.find(slice)).collect();
        let free = |place: &usize| match self.slices.all[*place].owner {
            Owner::Nobody => true,
            Owner::Shared => matches!(home, Home::Shared { .. }),
            _ => false,
        };
        let found = !places.is_empty() && places.len() == home.slices().count();
        assert!(found && places.iter().all(free), "{function} has no place on slices that are not free");
        for &place in &places {
            self.slices.all[place].owner = match home {
                Home::Exclusive { .. } => Owner::Exclusive(instance),
                Home::Shared { .. } => Owner::Shared,
            };
        }
        let costs = self.config.load;
        let weights = self.weights(function, &home);
        let mut takes = costs.start;
        if let Home::Shared { load, memory, .. } = home {
            let slice = &mut self.slices.all[places[0]];
            slice.instances.insert(instance);
            slice.order.know(self.last, instance, load, memory);
        } else {
            takes = takes.saturating_add(costs.reload(weights));
        }
        let mut from = Tier::Host;
        if let Some(of) = self.functions.get_mut(&function) {
            of.instances.insert(instance);
            (of.unmet, of.least_unmet) = (None, None);
            if !of.warm {
                of.warm = true;
                from = Tier::Disk;
                takes = takes.saturating_add(costs.fetch(weights));
            }
        }
        if let Some(old) = replaces.and_then(|old| self.instances.get_mut(&old)) {
            old.replaced = true;
        }
        let (parts, parked) = (self.parts(function, &home), matches!(home, Home::Shared { .. }));
        let new = Instance {
            function,
            home,
            places,
            memory: if parked { Memory::Out } else { Memory::In },
            leaving: false,
            pending: None,
            gives_up: None,
            replaces,
            replaced: false,
            taken_for: None,
            busy: 0,
            was_busy: 0,
            cool: 0,
            idle: 0,
        };
        self.instances.insert(instance, new);
        self.started.push(instance);
        self.window_ends.get_or_insert(self.last.saturating_add(self.config.window));
        cluster.order(PlatformAction::Start { instance, function, parts, from, takes, parked });
    }

    /// The parts of an instance on their devices, with the memory each needs.
    pub(super) fn parts(&self, function: FunctionId, home: &Home) -> Vec<Part> {
        let Some(of) = self.functions.get(&function) else { return Vec::new() };
        let share = |memory: Bytes| {
            GpuShare::new(QuotaRange::WHOLE, SmShare::WHOLE, SmShare::WHOLE, Some(memory))
                .unwrap_or(GpuShare::WHOLE)
        };
        let part = |stage: u32, components: ComponentSet, slice: crate::pipeline::AssignedSlice, memory| {
            Part { gpu: slice.gpu, share: share(memory), slice: Some(slice.slice), stage, components }
        };
        match home {
            Home::Exclusive { parts, .. } => parts
                .iter()
                .map(|one| {
                    let weights = self.weights_of(of, one.slice.slice.profile, one.components);
                    let memory = weights.saturating_add(of.goal.runtime_memory);
                    part(one.stage, one.components, one.slice, memory)
                })
                .collect(),
            Home::Shared { slice, memory, .. } => vec![part(0, of.dag.all(), *slice, *memory)],
        }
    }

    /// Bytes of the models of components on a profile.
    fn weights_of(&self, of: &Function, profile: ProfileId, components: ComponentSet) -> Bytes {
        let name = self.slices.model.get(profile).map_or("", |profile| &profile.name);
        let on = |one: usize| of.dag.components()[one].profile(name, of.goal.batch);
        Bytes(components.iter().filter_map(on).map(|on| on.memory.get()).sum())
    }

    /// Bytes of the models of an instance.
    fn weights(&self, function: FunctionId, home: &Home) -> Bytes {
        let Some(of) = self.functions.get(&function) else { return Bytes::ZERO };
        match home {
            Home::Shared { memory, .. } => memory.saturating_sub(of.goal.runtime_memory),
            Home::Exclusive { parts, .. } => {
                let part = |part: &crate::pipeline::PlacedPart| {
                    self.weights_of(of, part.slice.slice.profile, part.components).get()
                };
                Bytes(parts.iter().map(part).sum())
            }
        }
    }

    pub(super) fn drain(&mut self, instance: InstanceId, cause: StopCause, cluster: &Cluster) {
        // A loading instance is needed by a request: it drains after the load.
        if self.instances.contains_key(&instance) && self.state(instance, cluster).is_serving() {
            self.instances.entry(instance).and_modify(|one| one.gives_up = Some(cause));
            self.effects.push(Effect::Drain(instance));
        }
    }

    /// The instance has a request to serve: evicts until it fits its slice, then loads it.
    pub(super) fn needed(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get(&id) else { return };
        let Home::Shared { memory, load, .. } = instance.home else { return };
        let place = instance.places[0];
        let room = self.slices.memory(self.slices.all[place].at.profile);
        while self.slices.all[place].used.get().saturating_add(memory.get()) > room.get() {
            let Some(victim) = self.slices.all[place].order.victim() else { break };
            self.evict(victim);
            self.effects.push(Effect::Evict(victim));
        }
        let now = self.last;
        let slice = &mut self.slices.all[place];
        slice.order.know(now, id, load, memory);
        slice.order.enter(id);
        slice.used = Bytes(slice.used.get() + memory.get());
        // A slice does no other work during a load.
        slice.busy = slice.busy.saturating_add(load.as_nanos());
        self.effects.push(Effect::Load(id, load));
    }

    fn evict(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get(&id) else { return };
        let Home::Shared { memory, .. } = instance.home else { return };
        let slice = &mut self.slices.all[instance.places[0]];
        if slice.order.is_resident(id) {
            slice.order.leave(id);
            slice.used = slice.used.saturating_sub(memory);
        }
    }

    /// Forgets an instance that has ended, and frees its slices.
    pub(super) fn gone(&mut self, id: InstanceId, cluster: &mut Cluster) -> Option<Instance> {
        self.evict(id);
        let instance = self.instances.remove(&id)?;
        for &place in &instance.places {
            let slice = &mut self.slices.all[place];
            if instance.is_shared() {
                slice.order.forget(id);
                slice.instances.remove(&id);
            }
            if !instance.is_shared() || slice.instances.is_empty() {
                self.slices.release(place);
            }
        }
        if let Some(of) = self.functions.get_mut(&instance.function) {
            of.instances.remove(&id);
            // The slice it shared may now have another instance of the function.
            of.least_unmet = None;
        }
        self.forget_removed(instance.function, cluster);
        // The old instance stays, and another instance may replace it.
        if let Some(old) = instance.replaces.and_then(|old| self.instances.get_mut(&old)) {
            old.replaced = false;
        }
        // The function that waits for these slices comes first, while it still needs them.
        if let Some(taker) = instance.taken_for
            && self.is_short(taker)
        {
            self.short(taker, cluster);
        }
        if self.instances.is_empty() {
            self.window_ends = None;
        }
        Some(instance)
    }

    /// Gives up all instances of a removed function.
    pub(super) fn remove(&mut self, function: FunctionId, cluster: &mut Cluster) {
        self.expiries.clear(function);
        let Some(of) = self.functions.get_mut(&function) else { return };
        of.told_short = None;
        for instance in of.instances.clone() {
            if self.state(instance, cluster) == State::Starting {
                cluster.order(PlatformAction::Stop { instance, cause: StopCause::Removed });
            } else {
                self.drain(instance, StopCause::Removed, cluster);
            }
        }
        self.forget_removed(function, cluster);
    }

    fn forget_removed(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let ended = self.functions.get(&function).is_some_and(|of| of.instances.is_empty());
        if ended && cluster.is_removed(function) && self.functions.remove(&function).is_some_and(|of| of.warm)
        {
            cluster.order(PlatformAction::Forget { node: self.id, function });
        }
    }

    pub(super) fn requested(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let now = self.last;
        let Some(of) = self.functions.get_mut(&function) else { return };
        if let Some(last) = of.last {
            let gap = now.saturating_since(last);
            of.gaps.add(gap);
            self.all_gaps.add(gap);
        }
        (of.last, of.stays) = (Some(now), None);
        // At least as long as it takes to be answered.
        let answered = now.saturating_add(self.config.window);
        if self.expiries.at(function).is_none_or(|at| at > answered) {
            self.expiries.set(function, answered);
        }
        if !self.functions[&function].instances.iter().any(|one| self.state(*one, cluster).stays()) {
            self.first(function, cluster);
        }
    }

    /// The function's requests cannot be served in time.
    pub(super) fn told_short(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let now = self.last;
        if let Some(of) = self.functions.get_mut(&function) {
            of.told_short = Some(now);
            self.short(function, cluster);
        }
    }

    /// Sets the node's part of a function's minimum, and starts the missing instances as far as slices suffice.
    pub(super) fn minimum(&mut self, function: FunctionId, least: u32, cluster: &mut Cluster) {
        let now = self.last;
        let Some(of) = self.functions.get_mut(&function) else { return };
        let (before, last) = (core::mem::replace(&mut of.least, least), of.last);
        if least < before {
            // Instances were kept beyond the end of their keep-alive.
            let answered = last.map_or(now, |last| last.saturating_add(self.config.window));
            self.expiries.set(function, answered.max(now));
            self.expire(now, cluster);
        }
        while self.lacks(function, cluster)
            && let Some(of) = self.functions.get_mut(&function)
            && of.least_unmet != Some(self.slices.version)
        {
            (of.unmet, of.least_unmet) = (None, Some(self.slices.version));
            self.first(function, cluster);
        }
    }

    /// The end of a function's stay from its last request on, unless it was already computed. A stay matters only after the last
    /// answer, and mostly the next request comes before it.
    fn first_stay(&mut self, function: FunctionId) -> Option<Timestamp> {
        let of = self.functions.get_mut(&function).filter(|of| of.stays.is_none())?;
        let last = of.last?;
        let stays = of.gaps.stays(&self.all_gaps, &self.config.keep_alive);
        let first = stays.first().filter(|stay| stay.from.is_zero()).map(|stay| stay.to);
        of.stays = Some(stays);
        Some(last.saturating_add(first.unwrap_or_default().max(self.config.window)))
    }

    /// Ends the keep-alives that are over.
    fn expire(&mut self, now: Timestamp, cluster: &mut Cluster) {
        while let Some(function) = self.expiries.pop(now) {
            if let Some(later) = self.first_stay(function).filter(|later| *later > now) {
                self.expiries.set(function, later);
                continue;
            }
            let Some(of) = self.functions.get(&function) else { continue };
            let instances = of.instances.clone();
            let mut states = instances.iter().map(|one| self.state(*one, cluster));
            if states.any(|state| matches!(state, State::Starting | State::Loading)) {
                // A request waits for the function: its keep-alive cannot end now.
                self.expiries.set(function, now.saturating_add(self.config.window));
                continue;
            }
            let since = now.saturating_since(self.functions[&function].last.unwrap_or(now));
            let stays = self.functions[&function].stays.as_deref().unwrap_or_default();
            if !stays.iter().any(|stay| stay.from <= since && since < stay.to) {
                for instance in instances {
                    if self.can_spare(function, cluster) {
                        self.drain(instance, StopCause::Drained, cluster);
                    }
                }
            }
            let kept = !self.can_spare(function, cluster);
            let Some(of) = self.functions.get_mut(&function) else { continue };
            let since = now.saturating_since(of.last.unwrap_or(now));
            let stay = of.stays.iter().flatten().find(|stay| since < stay.to).copied();
            let warm = stay.is_some_and(|stay| stay.from <= since);
            if of.warm != warm && !kept {
                of.warm = warm;
                let node = self.id;
                cluster.order(match warm {
                    true => PlatformAction::Fetch { node, function },
                    false => PlatformAction::Forget { node, function },
                });
            }
            if let Some(stay) = stay {
                let next = if warm { stay.to } else { stay.from };
                self.expiries.set(function, now.saturating_add(next.saturating_sub(since)));
            }
        }
    }

    /// The instance's busiest slice worked so long for a request.
    pub(super) fn served(&mut self, id: InstanceId, took: Duration) {
        let now = self.last;
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let busy = match instance.home {
            // The share of the time in which the busiest slice worked.
            Home::Exclusive { latency, interval, .. } => {
                took.scaled(interval.as_nanos(), latency.as_nanos()).min(took)
            }
            Home::Shared { .. } => took,
        };
        instance.busy = instance.busy.saturating_add(busy.as_nanos());
        if instance.is_shared() {
            let slice = &mut self.slices.all[instance.places[0]];
            slice.busy = slice.busy.saturating_add(busy.as_nanos());
            slice.order.used(now, id);
        }
    }

    /// Whether the function could run on the node if all of it were free; it is known from then on.
    pub(super) fn fits(
        &mut self,
        function: FunctionId,
        (dag, goal): (&Arc<Dag>, &Arc<Goal>),
        cluster: &Cluster,
    ) -> bool {
        if !cluster.is_removed(function) && !self.functions.contains_key(&function) {
            let new = Function {
                dag: Arc::clone(dag),
                goal: Arc::clone(goal),
                wholes: self.wholes(dag, goal),
                instances: BTreeSet::new(),
                gaps: Gaps::default(),
                last: None,
                stays: None,
                warm: false,
                unmet: None,
                told_short: None,
                least: 0,
                least_unmet: None,
            };
            if !self.fits_empty(function, &new) {
                return false;
            }
            self.functions.insert(function, new);
            return true;
        }
        self.functions.get(&function).is_some_and(|of| self.fits_empty(function, of))
    }

    /// Ends the windows and keep-alives that are over at `now`.
    pub(super) fn advance(&mut self, cluster: &mut Cluster) {
        let now = cluster.now;
        while let Some(end) = self.window_ends
            && end <= now
        {
            // After a long silence one window suffices to see the lack of events, but each window counts for cooling.
            self.last = self.last.max(end);
            self.window_ends = Some(end.saturating_add(self.config.window));
            self.end_window(cluster);
            if self.instances.is_empty() {
                self.window_ends = None;
            }
        }
        self.last = now;
        self.expire(now, cluster);
    }

    pub(super) fn invariants(&self, cluster: &Cluster) {
        for (place, slice) in self.slices.all.iter().enumerate() {
            match slice.owner {
                Owner::Exclusive(id) => {
                    let instance = &self.instances[&id];
                    assert!(!instance.is_shared() && instance.places.contains(&place), "{id} at {place}");
                    assert!(slice.instances.is_empty() && slice.order.residents() == 0, "{place}: alone");
                }
                Owner::Shared => assert!(!slice.instances.is_empty(), "{place} is shared by no instance"),
                _ => assert!(slice.instances.is_empty() && slice.used == Bytes::ZERO, "{place} is free"),
            }
            let (mut used, mut held) = (0, 0);
            let room = self.slices.memory(slice.at.profile).get();
            for id in &slice.instances {
                let instance = &self.instances[id];
                let Home::Shared { memory, .. } = instance.home else { panic!("{id} is exclusive") };
                assert_eq!(instance.places, [place], "{id}");
                used += if slice.order.is_resident(*id) { memory.get() } else { 0 };
                held += if instance.holds() { memory.get() } else { 0 };
            }
            assert_eq!(used, slice.used.get(), "memory of {place}");
            assert!(used.max(held) <= room, "{place} is too full");
        }
        for (id, instance) in &self.instances {
            assert!(self.functions[&instance.function].instances.contains(id), "{id} is not of its function");
            assert_eq!(instance.places.len(), instance.home.slices().count(), "{id}: slices");
            assert!(instance.pending.is_none() || instance.memory != Memory::In, "{id}: its request waits");
            let shares = |&place: &usize| self.slices.all[place].instances.contains(id);
            assert_eq!(instance.places.iter().all(shares), instance.is_shared(), "{id}: shares");
            if !instance.is_shared() {
                let owned = |&place: &usize| self.slices.all[place].owner == Owner::Exclusive(*id);
                assert!(instance.places.iter().all(owned), "{id}: owner");
            }
        }
        for (id, of) in &self.functions {
            let serving = |one: &&InstanceId| {
                self.instances[one].is_shared() && self.state(**one, cluster).is_serving()
            };
            let shared = of.instances.iter().filter(serving).count();
            assert!(shared <= self.config.max_shared as usize, "{id}: {shared} shared instances");
        }
    }
}
