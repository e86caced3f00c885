//! The keeper's state, and the effect of each event on it.

mod check;

use super::slices::{Owner, Slices};
use super::{Gaps, KeeperConfig, Stay};
use crate::Tier;
use crate::pipeline::{
    Goal, Home, InstanceAction, InstanceError, InstanceEvent, InstanceKeeper, InstanceReason, Node,
    Partitioner,
};
use gshare_core::dag::Dag;
use gshare_core::{
    Bytes, ConfigError, Duration, Engine, FunctionId, GpuId, InstanceId, ProfileId, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Starting,
    /// Exclusive, or shared and either resident or evicted.
    Up,
    /// Shared, with its weights on the way.
    Loading,
    Draining,
    Stopping,
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Up => "up",
            Self::Loading => "loading",
            Self::Draining => "draining",
            Self::Stopping => "stopping",
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Instance {
    pub(super) function: FunctionId,
    pub(super) home: Home,
    pub(super) state: State,
    /// The numbers of its slices in the node's list.
    pub(super) places: Vec<usize>,
    /// Time of work in this window.
    pub(super) busy: u64,
    /// Windows in a row without enough work; `idle` counts the windows without any use.
    pub(super) cool: u32,
    pub(super) idle: u32,
    /// Drained once this one has started.
    pub(super) replaces: Option<InstanceId>,
    pub(super) replaced: bool,
    /// Time of work in the window before.
    pub(super) was_busy: u64,
    /// The function that is to get its slices after the drain.
    pub(super) taken_for: Option<FunctionId>,
}

impl Instance {
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.home, Home::Shared { .. })
    }

    pub(super) fn is_serving(&self) -> bool {
        matches!(self.state, State::Up | State::Loading)
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
    pub(super) dag: Dag,
    pub(super) goal: Goal,
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
    /// The time of the last shortage report.
    pub(super) told_short: Option<Timestamp>,
    /// The minimum number of instances.
    pub(super) least: u32,
    /// The version of the slices at which the minimum could not be met.
    least_unmet: Option<u64>,
    /// The function is removed, and forgotten with its last instance.
    removed: bool,
}

/// Keeps the instances of one node: the engine of this module.
pub struct Keeper {
    pub(super) config: KeeperConfig,
    pub(super) partitioner: Partitioner,
    pub(super) slices: Slices,
    pub(super) functions: BTreeMap<FunctionId, Function>,
    pub(super) instances: BTreeMap<InstanceId, Instance>,
    pub(super) next: u64,
    last: Timestamp,
    /// End of the window; none while there is no instance.
    pub(super) window_ends: Option<Timestamp>,
    expiries: BTreeSet<(Timestamp, FunctionId)>,
    expiry_of: BTreeMap<FunctionId, Timestamp>,
    all_gaps: Gaps,
    /// True if a function found no slices since the window began; `was_wanting` is the same for the window before.
    pub(super) wanting: bool,
    pub(super) was_wanting: bool,
}

gshare_core::debug_fields!(Keeper { last, instances, slices });

impl Keeper {
    /// A keeper of the free slices of `node`.
    ///
    /// # Errors
    /// A field that is out of its bounds.
    pub fn new(config: KeeperConfig, node: &Node, partitioner: Partitioner) -> Result<Self, ConfigError> {
        config.check()?;
        let slices = Slices::new(node, config.eviction);
        Ok(Self {
            config,
            partitioner,
            slices,
            functions: BTreeMap::new(),
            instances: BTreeMap::new(),
            next: 0,
            last: Timestamp::ZERO,
            window_ends: None,
            expiries: BTreeSet::new(),
            expiry_of: BTreeMap::new(),
            all_gaps: Gaps::default(),
            wanting: false,
            was_wanting: false,
        })
    }

    /// Number of functions with weights on the node, hot or warm.
    pub fn warm_functions(&self) -> usize {
        self.functions.values().filter(|function| function.warm).count()
    }

    /// Whether an instance has its weights where it runs.
    pub fn is_resident(&self, id: InstanceId) -> bool {
        self.instances.get(&id).is_some_and(|instance| match instance.state {
            State::Starting | State::Loading => false,
            _ => !instance.is_shared() || self.slices.all[instance.places[0]].order.is_resident(id),
        })
    }

    pub(super) const fn now(&self) -> Timestamp {
        self.last
    }

    /// Names an instance and gives it its slices.
    pub(super) fn start(
        &mut self,
        function: FunctionId,
        home: Home,
        reason: InstanceReason,
        actions: &mut Vec<InstanceAction>,
    ) -> InstanceId {
        let instance = InstanceId::new(self.next);
        self.next += 1;
        let places: Vec<usize> = home.slices().filter_map(|slice| self.slices.find(slice)).collect();
        for &place in &places {
            self.slices.all[place].owner = match home {
                Home::Exclusive { .. } => Owner::Exclusive(instance),
                _ => Owner::Shared,
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
        let replaces = match reason {
            InstanceReason::Migrated { from } => Some(from),
            _ => None,
        };
        if let Some(old) = replaces.and_then(|old| self.instances.get_mut(&old)) {
            old.replaced = true;
        }
        let state = State::Starting;
        self.instances.insert(
            instance,
            Instance {
                function,
                home: home.clone(),
                state,
                places,
                busy: 0,
                cool: 0,
                idle: 0,
                replaces,
                replaced: false,
                was_busy: 0,
                taken_for: None,
            },
        );
        self.window_ends.get_or_insert(self.last.saturating_add(self.config.window));
        actions.push(InstanceAction::Start { instance, function, home, from, takes, reason });
        instance
    }

    /// Bytes of the models of an instance.
    fn weights(&self, function: FunctionId, home: &Home) -> Bytes {
        let Some(of) = self.functions.get(&function) else { return Bytes::ZERO };
        match home {
            Home::Shared { memory, .. } => memory.saturating_sub(of.goal.runtime_memory),
            Home::Exclusive { parts, .. } => {
                let part = |part: &crate::pipeline::PlacedPart| {
                    let name = &self.slices.model.get(part.slice.slice.profile)?.name;
                    let memory = |one: usize| {
                        of.dag.components()[one].profile(name, of.goal.batch).map(|on| on.memory.get())
                    };
                    Some(part.components.iter().filter_map(memory).sum::<u64>())
                };
                Bytes(parts.iter().filter_map(part).sum())
            }
        }
    }

    pub(super) fn drain(
        &mut self,
        instance: InstanceId,
        reason: InstanceReason,
        actions: &mut Vec<InstanceAction>,
    ) {
        if let Some(found) = self.instances.get_mut(&instance)
            && found.is_serving()
        {
            // A loading instance is needed by a request: it drains after the load.
            found.state = State::Draining;
            actions.push(InstanceAction::Drain { instance, reason });
        }
    }

    /// Evicts until the instance fits its slice, then loads it.
    fn needed(&mut self, now: Timestamp, id: InstanceId, actions: &mut Vec<InstanceAction>) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let Home::Shared { memory, load, .. } = instance.home else { return };
        let place = instance.places[0];
        if instance.state == State::Up {
            instance.state = State::Loading;
        }
        let room = self.slices.memory(self.slices.all[place].at.profile);
        while self.slices.all[place].used.get().saturating_add(memory.get()) > room.get() {
            let Some(victim) = self.slices.all[place].order.victim() else { break };
            self.evict(victim);
            actions.push(InstanceAction::Evict {
                instance: victim,
                reason: InstanceReason::RoomFor { instance: id },
            });
        }
        let slice = &mut self.slices.all[place];
        slice.order.know(now, id, load, memory);
        slice.order.enter(id);
        slice.used = Bytes(slice.used.get() + memory.get());
        // A slice does no other work during a load.
        slice.busy = slice.busy.saturating_add(load.as_nanos());
        actions.push(InstanceAction::Load { instance: id, takes: load });
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

    fn gone(&mut self, id: InstanceId, actions: &mut Vec<InstanceAction>) {
        self.evict(id);
        let Some(instance) = self.instances.remove(&id) else { return };
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
        self.forget_removed(instance.function, actions);
        // The old instance stays, and another instance may replace it.
        if let Some(old) = instance.replaces.and_then(|old| self.instances.get_mut(&old)) {
            old.replaced = false;
        }
        // The function that waits for these slices comes first, while it still needs them.
        if let Some(taker) = instance.taken_for
            && self.is_short(taker)
        {
            self.short(taker, actions);
        }
        if self.instances.is_empty() {
            self.window_ends = None;
        }
    }

    /// Gives up all instances of a removed function.
    fn remove(&mut self, function: FunctionId, actions: &mut Vec<InstanceAction>) {
        if let Some(at) = self.expiry_of.remove(&function) {
            self.expiries.remove(&(at, function));
        }
        let Some(of) = self.functions.get_mut(&function) else { return };
        (of.removed, of.told_short) = (true, None);
        let reason = InstanceReason::Removed;
        for instance in of.instances.clone() {
            match self.instances.get_mut(&instance) {
                Some(found) if found.state == State::Starting => {
                    found.state = State::Stopping;
                    actions.push(InstanceAction::Stop { instance, reason });
                }
                _ => self.drain(instance, reason, actions),
            }
        }
        self.forget_removed(function, actions);
    }

    fn forget_removed(&mut self, function: FunctionId, actions: &mut Vec<InstanceAction>) {
        if self.functions.get(&function).is_some_and(|of| of.removed && of.instances.is_empty())
            && self.functions.remove(&function).is_some_and(|of| of.warm)
        {
            actions.push(InstanceAction::Forget { function });
        }
    }

    fn lost(&mut self, gpu: GpuId, actions: &mut Vec<InstanceAction>) {
        self.slices.lose(gpu);
        let on = |(id, one): (&InstanceId, &Instance)| {
            one.places.iter().any(|&place| self.slices.all[place].gpu == gpu).then_some(*id)
        };
        let gone: Vec<InstanceId> = self.instances.iter().filter_map(on).collect();
        for id in gone {
            self.gone(id, actions);
        }
    }

    fn requested(&mut self, now: Timestamp, function: FunctionId, actions: &mut Vec<InstanceAction>) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        if let Some(last) = of.last {
            let gap = now.saturating_since(last);
            of.gaps.add(gap);
            self.all_gaps.add(gap);
        }
        (of.last, of.stays) = (Some(now), None);
        // At least as long as it takes to be answered.
        let answered = now.saturating_add(self.config.window);
        if self.expiry_of.get(&function).is_none_or(|at| *at > answered) {
            self.expire_at(function, answered);
        }
        let none = self.functions[&function].instances.iter().all(|one| {
            let one = &self.instances[one];
            !one.is_serving() && one.state != State::Starting
        });
        if none {
            self.first(function, InstanceReason::FirstRequest, actions);
        }
    }

    fn minimum(
        &mut self,
        now: Timestamp,
        function: FunctionId,
        least: u32,
        actions: &mut Vec<InstanceAction>,
    ) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let (before, last) = (core::mem::replace(&mut of.least, least), of.last);
        if least < before {
            // Instances were kept beyond the end of their keep-alive.
            let answered = last.map_or(now, |last| last.saturating_add(self.config.window));
            self.expire_at(function, answered.max(now));
            self.expire(now, actions);
        }
        while self.lacks(function)
            && let Some(of) = self.functions.get_mut(&function)
            && of.least_unmet != Some(self.slices.version)
        {
            (of.unmet, of.least_unmet) = (None, Some(self.slices.version));
            self.first(function, InstanceReason::Minimum, actions);
        }
    }

    fn expire_at(&mut self, function: FunctionId, at: Timestamp) {
        if let Some(before) = self.expiry_of.insert(function, at) {
            self.expiries.remove(&(before, function));
        }
        self.expiries.insert((at, function));
    }

    /// The end of a function's stay from its last request on, unless it was already computed. A stay matters only after that
    /// request is answered, and most requests are followed by another one before.
    fn first_stay(&mut self, function: FunctionId) -> Option<Timestamp> {
        let of = self.functions.get_mut(&function).filter(|of| of.stays.is_none())?;
        let last = of.last?;
        let stays = of.gaps.stays(&self.all_gaps, &self.config.keep_alive);
        let first = stays.first().filter(|stay| stay.from.is_zero()).map(|stay| stay.to);
        of.stays = Some(stays);
        Some(last.saturating_add(first.unwrap_or_default().max(self.config.window)))
    }

    /// Ends the keep-alives that are over.
    fn expire(&mut self, now: Timestamp, actions: &mut Vec<InstanceAction>) {
        while let Some(&(at, function)) = self.expiries.first() {
            if at > now {
                break;
            }
            self.expiries.remove(&(at, function));
            self.expiry_of.remove(&function);
            if let Some(later) = self.first_stay(function).filter(|later| *later > now) {
                self.expire_at(function, later);
                continue;
            }
            let instances = self.functions[&function].instances.clone();
            let used = instances.iter().any(|one| {
                let one = &self.instances[one];
                matches!(one.state, State::Starting | State::Loading)
            });
            if used {
                // A request waits for the function: its keep-alive cannot end now.
                self.expire_at(function, now.saturating_add(self.config.window));
                continue;
            }
            let since = now.saturating_since(self.functions[&function].last.unwrap_or(now));
            let stays = self.functions[&function].stays.as_deref().unwrap_or_default();
            if !stays.iter().any(|stay| stay.from <= since && since < stay.to) {
                for instance in instances {
                    if self.can_spare(function) {
                        self.drain(instance, InstanceReason::KeepAlive, actions);
                    }
                }
            }
            let kept = !self.can_spare(function);
            let Some(of) = self.functions.get_mut(&function) else { continue };
            let since = now.saturating_since(of.last.unwrap_or(now));
            let stay = of.stays.iter().flatten().find(|stay| since < stay.to).copied();
            let warm = stay.is_some_and(|stay| stay.from <= since);
            if of.warm != warm && !kept {
                of.warm = warm;
                actions.push(match warm {
                    true => InstanceAction::Prewarm { function },
                    false => InstanceAction::Forget { function },
                });
            }
            if let Some(stay) = stay {
                let next = if warm { stay.to } else { stay.from };
                self.expire_at(function, now.saturating_add(next.saturating_sub(since)));
            }
        }
    }

    fn served(&mut self, now: Timestamp, id: InstanceId, busy: Duration) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        instance.busy = instance.busy.saturating_add(busy.as_nanos());
        if instance.is_shared() {
            let slice = &mut self.slices.all[instance.places[0]];
            slice.busy = slice.busy.saturating_add(busy.as_nanos());
            slice.order.used(now, id);
        }
    }

    fn add(&mut self, function: FunctionId, dag: Dag, goal: Goal) -> Result<(), InstanceError> {
        let wholes = self.wholes(&dag, &goal);
        let new = Function {
            dag,
            goal,
            wholes,
            instances: BTreeSet::new(),
            gaps: Gaps::default(),
            last: None,
            stays: None,
            warm: false,
            unmet: None,
            told_short: None,
            least: 0,
            least_unmet: None,
            removed: false,
        };
        self.fits_empty(&new).map_err(|why| InstanceError::NeverFits { function, why })?;
        self.functions.insert(function, new);
        Ok(())
    }

    /// Ends the windows and keep-alives that are over at `now`.
    fn advance(&mut self, now: Timestamp, actions: &mut Vec<InstanceAction>) {
        while let Some(end) = self.window_ends
            && end <= now
        {
            // After a long silence one window suffices to see the lack of events, but each window counts for cooling.
            self.last = self.last.max(end);
            self.window_ends = Some(end.saturating_add(self.config.window));
            self.end_window(actions);
            if self.instances.is_empty() {
                self.window_ends = None;
            }
        }
        self.last = now;
        self.expire(now, actions);
    }
}

impl InstanceKeeper for Keeper {
    fn fits(&self, function: FunctionId) -> Option<bool> {
        self.functions.get(&function).map(|of| !of.removed && self.fits_empty(of).is_ok())
    }

    fn home(&self, instance: InstanceId) -> Option<&Home> {
        self.instances.get(&instance).map(|instance| &instance.home)
    }

    fn invariants(&self) {
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
            let mut used = 0;
            for id in &slice.instances {
                let instance = &self.instances[id];
                let Home::Shared { memory, .. } = instance.home else { panic!("{id} is exclusive") };
                assert_eq!(instance.places, [place], "{id}");
                used += if slice.order.is_resident(*id) { memory.get() } else { 0 };
            }
            assert_eq!(used, slice.used.get(), "memory of {place}");
            assert!(used <= self.slices.memory(slice.at.profile).get(), "{place} is too full");
        }
        for (id, instance) in &self.instances {
            assert!(self.functions[&instance.function].instances.contains(id), "{id} is not of its function");
            assert_eq!(instance.places.len(), instance.home.slices().count(), "{id}: slices");
            if !instance.is_shared() {
                let owned = |&place: &usize| self.slices.all[place].owner == Owner::Exclusive(*id);
                assert!(instance.places.iter().all(owned), "{id}: owner");
            }
        }
        for (id, of) in &self.functions {
            let shared = of.instances.iter().map(|one| &self.instances[one]);
            let shared = shared.filter(|one| one.is_shared() && one.is_serving()).count();
            assert!(shared <= self.config.max_shared as usize, "{id}: {shared} shared instances");
        }
        let expiries = self.expiries.iter().map(|&(at, function)| (function, at)).collect::<BTreeMap<_, _>>();
        assert_eq!(expiries, self.expiry_of, "expiries");
    }
}

impl Engine for Keeper {
    type Event = InstanceEvent;
    type Action = InstanceAction;
    type Error = InstanceError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: InstanceEvent,
        actions: &mut Vec<InstanceAction>,
    ) -> Result<(), InstanceError> {
        self.check(now, &event)?;
        if let InstanceEvent::FunctionAdded { function, dag, goal } = event {
            self.add(function, *dag, *goal)?;
            self.advance(now, actions);
            return Ok(());
        }
        self.advance(now, actions);
        match event {
            InstanceEvent::Requested { function } => self.requested(now, function, actions),
            InstanceEvent::Short { function, .. } => {
                if let Some(of) = self.functions.get_mut(&function) {
                    of.told_short = Some(now);
                }
                self.short(function, actions);
            }
            InstanceEvent::MinimumSet { function, instances } => {
                self.minimum(now, function, instances, actions);
            }
            // The windows that ended may have changed the checked state; then no work is left.
            InstanceEvent::Needed { instance } if !self.is_resident(instance) => {
                self.needed(now, instance, actions);
            }
            InstanceEvent::Served { instance, busy } => self.served(now, instance, busy),
            InstanceEvent::Started { instance } => {
                let Some(found) = self.instances.get_mut(&instance) else { return Ok(()) };
                found.state = State::Up;
                if let Some(old) = found.replaces.take() {
                    self.drain(old, InstanceReason::Replaced { by: instance }, actions);
                }
            }
            InstanceEvent::Loaded { instance } => {
                if let Some(found) = self.instances.get_mut(&instance)
                    && found.state == State::Loading
                {
                    found.state = State::Up;
                }
            }
            InstanceEvent::Drained { instance } => {
                if let Some(found) = self.instances.get_mut(&instance) {
                    found.state = State::Stopping;
                    let reason = InstanceReason::NotBusy;
                    actions.push(InstanceAction::Stop { instance, reason });
                }
            }
            InstanceEvent::Gone { instance } => self.gone(instance, actions),
            InstanceEvent::FunctionRemoved { function } => self.remove(function, actions),
            InstanceEvent::GpuJoined { gpu, slices } => self.slices.join(gpu, &slices),
            InstanceEvent::GpuLost { gpu } => self.lost(gpu, actions),
            _ => {}
        }
        #[cfg(debug_assertions)]
        self.invariants();
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let expiry = self.expiries.first().map(|&(at, _)| at);
        [expiry, self.window_ends].into_iter().flatten().min()
    }
}
