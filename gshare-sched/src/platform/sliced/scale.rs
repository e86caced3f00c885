//! The rules by which a node starts, moves and gives up instances.
//!
//! # Example
//! On slices of 1g, 2g and 4g, a function that needs 2g as a whole shares the 2g slice from its first call. At 35 % use it keeps the 2g
//! for itself. Requests wait too long: a plan on the free 1g and 4g starts. When the use of both falls below 15 % for a minute the
//! larger instance drains, and a minute later the other one shares the 2g again.
//!
//! # Differences from the paper
//! - Two thresholds and windows in a row, against flapping, where the paper has one threshold.
//! - Unused pipelines are given up, while the paper keeps them hot. Idle slices can be reclaimed.
//! - Eviction by cost and keep-alive by gaps are options beside LRU and ten minutes. A function may have two shared instances.
//! - Several instances may be resident on a shared slice within its memory; still only one runs at a time.

use super::Cluster;
use super::node::{Effect, Function, Node, State, Whole};
use super::slices::Owner;
use crate::pipeline::{Goal, HOT_ABOVE, Home, LeastFragmentation, Node as Free, PlacedPart, whole};
use crate::platform::StopCause;
use core::cmp::Reverse;
use gshare_core::dag::Dag;
use gshare_core::{Bytes, Duration, FunctionId, InstanceId};
use std::collections::BTreeSet;

/// A shared slice with less work than this percentage of the time may be given up for other functions.
const SHARED_IDLE: u64 = 10;
/// A shared slice with more work than this percentage gets no further instance while another slice will do.
const SHARED_FULL: u64 = 70;
/// The most instances of a function that start at the same time: a burst may need several, a node has few slices.
const MAX_STARTING: usize = 4;
/// The utilisation in percent that a function's remaining instances may reach after a drain.
const DRAIN_BELOW: u64 = 60;

impl Node {
    /// The whole function on each profile on which it runs, by compute slices.
    pub(super) fn wholes(&self, dag: &Dag, goal: &Goal) -> Vec<Whole> {
        let mut wholes = Vec::new();
        for id in self.slices.model.ids() {
            let Some(profile) = self.slices.model.get(id).filter(|profile| !profile.media) else { continue };
            let Ok(node) = Free::with_free(self.slices.model.clone(), &[&profile.name]) else { continue };
            let pipeline = whole(dag, id);
            let Ok(assignment) = LeastFragmentation.assign(dag, goal, &pipeline, &node) else { continue };
            let weights = |one: &gshare_core::dag::Component| {
                one.profile(&profile.name, goal.batch).map_or(0, |on| on.memory.get())
            };
            let weights = dag.components().iter().map(weights).sum::<u64>();
            wholes.push(Whole {
                profile: id,
                latency: assignment.latency,
                memory: Bytes(weights.saturating_add(goal.runtime_memory.get())),
                compute: profile.compute_slices.into(),
            });
        }
        wholes.sort_by_key(|whole| (whole.compute, self.slices.memory(whole.profile), whole.profile));
        wholes
    }

    /// Whether the function could run on the empty node.
    pub(super) fn fits_empty(&self, id: FunctionId, function: &Function) -> bool {
        let mut empty = self.slices.clone();
        for slice in empty.all.iter_mut().filter(|slice| slice.owner != Owner::Lost) {
            slice.owner = Owner::Nobody;
        }
        empty.node().is_ok_and(|node| {
            let (dag, goal) = (&function.dag, &function.goal);
            self.place.find(id, dag, goal, &node, self.config.pipelines).is_some()
        })
    }

    /// The best exclusive home on free slices, of the whole or of a pipeline too.
    fn exclusive(&self, id: FunctionId, pipelines: bool) -> Option<Home> {
        let (function, node) = (&self.functions[&id], self.slices.node().ok()?);
        self.place.find(id, &function.dag, &function.goal, &node, pipelines)
    }

    /// A home on a shared slice or on a free slice to be shared: without evictions if possible, then with the fewest instances.
    /// A free slice is taken only when the suitable shared slices have too much work.
    fn shared(&self, id: FunctionId) -> Option<Home> {
        let function = &self.functions[&id];
        let window = self.config.window.as_nanos();
        let of_it: BTreeSet<usize> =
            function.instances.iter().flat_map(|one| self.instances[one].places.clone()).collect();
        let whole = |place: &usize| {
            function.wholes.iter().find(|one| one.profile == self.slices.all[*place].at.profile)
        };
        let fits = |place: &usize| whole(place).is_some() && !of_it.contains(place);
        let evicts = |place: usize| {
            let memory = |one: &InstanceId| match self.instances[one].home {
                Home::Shared { memory, .. } => memory.get(),
                _ => 0,
            };
            let slice = &self.slices.all[place];
            let all = slice.instances.iter().map(memory).sum::<u64>();
            let needs = whole(&place).map_or(0, |one| one.memory.get());
            all.saturating_add(needs) > self.slices.memory(slice.at.profile).get()
        };
        let roomy = |place: &usize| self.slices.all[*place].was_busy * 100 < window * SHARED_FULL;
        let key = |&place: &usize| (evicts(place), self.slices.all[place].instances.len(), place);
        let least = self.slices.shared().filter(fits).filter(roomy).min_by_key(key);
        let free = || {
            let cost = |place: &usize| (whole(place).map_or(0, |one| one.compute), *place);
            self.slices.free().filter(fits).min_by_key(cost)
        };
        let place = least.or_else(free).or_else(|| self.slices.shared().filter(fits).min_by_key(key))?;
        let one = whole(&place)?;
        Some(self.shared_home(function, one, place))
    }

    fn shared_home(&self, function: &Function, whole: &Whole, place: usize) -> Home {
        let weights = whole.memory.saturating_sub(function.goal.runtime_memory);
        Home::Shared {
            slice: self.slices.assigned(place),
            latency: whole.latency,
            load: self.config.load.reload(weights),
            memory: whole.memory,
        }
    }

    /// A function's instances that will remain: running or starting, and without a replacement under way.
    fn staying(&self, id: FunctionId, cluster: &Cluster) -> impl Iterator<Item = InstanceId> {
        let stays =
            move |one: &InstanceId| self.state(*one, cluster).stays() && !self.instances[one].replaced;
        self.functions[&id].instances.iter().copied().filter(stays)
    }

    /// Whether the function has fewer instances than its minimum.
    pub(super) fn lacks(&self, id: FunctionId, cluster: &Cluster) -> bool {
        self.functions.get(&id).is_some_and(|of| self.staying(id, cluster).count() < of.least as usize)
    }

    /// Whether one of the function's instances may be given up: the function is above its minimum, here and on all nodes together. A node
    /// learns of losses on other nodes after the ledger.
    pub(super) fn can_spare(&self, id: FunctionId, cluster: &Cluster) -> bool {
        let least = self.functions[&id].least;
        cluster.above_minimum(id) && (least == 0 || self.staying(id, cluster).count() > least as usize)
    }

    /// Whether the function may have one more shared instance.
    fn may_share(&self, id: FunctionId, cluster: &Cluster) -> bool {
        let shared = self.staying(id, cluster).filter(|one| self.instances[one].is_shared()).count();
        self.config.time_sharing && shared < self.config.max_shared as usize
    }

    /// Starts the first instances of a function, shared where possible.
    pub(super) fn first(&mut self, id: FunctionId, cluster: &mut Cluster) {
        if self.functions[&id].unmet == Some(self.slices.version) {
            return;
        }
        let shared = if self.may_share(id, cluster) { self.shared(id) } else { None };
        match shared.or_else(|| self.exclusive(id, self.config.pipelines)) {
            Some(home) => self.start(id, home, None, cluster),
            None => self.unmet(id, cluster),
        }
    }

    fn unmet(&mut self, id: FunctionId, cluster: &Cluster) {
        self.wanting = true;
        let version = self.slices.version;
        if let Some(function) = self.functions.get_mut(&id) {
            function.unmet = Some(version);
        }
        self.effects.push(Effect::Unmet(id));
        if self.config.reclaim {
            self.reclaim(id, cluster);
        }
    }

    /// The function's instances cannot serve its requests in time: starts one more.
    pub(super) fn short(&mut self, id: FunctionId, cluster: &mut Cluster) {
        let Some(function) = self.functions.get(&id) else { return };
        if function.unmet == Some(self.slices.version) {
            self.wanting = true;
            if self.config.reclaim {
                self.reclaim(id, cluster);
            }
            return;
        }
        let all = function.instances.iter().map(|one| (&self.instances[one], self.state(*one, cluster)));
        let mine: Vec<_> = all.filter(|(_, state)| state.stays()).collect();
        let starting = mine.iter().filter(|(_, state)| *state == State::Starting).count();
        if starting >= MAX_STARTING {
            return;
        }
        if mine.is_empty() {
            return self.first(id, cluster);
        }
        let hot = mine.iter().any(|(one, _)| !one.is_shared());
        let limit = u64::from(HOT_ABOVE.get());
        let busy = mine.iter().any(|(one, _)| one.busy * 10_000 >= self.config.window.as_nanos() * limit);
        if self.config.time_sharing && !self.config.hot_on_shortage && !hot && !busy {
            // Not busy enough to be hot: more slices for time sharing (section 5.3).
            return self.spread(id, cluster);
        }
        let serving_shared = mine.iter().filter(|(one, _)| one.is_shared()).count();
        let home = self.exclusive(id, self.config.pipelines);
        let home = home.or_else(|| {
            let more = self.config.time_sharing && serving_shared < self.config.max_shared as usize;
            if more { self.shared(id) } else { None }
        });
        match home {
            Some(home) => self.start(id, home, None, cluster),
            None => self.unmet(id, cluster),
        }
    }

    /// Moves a shared instance with neighbours to a free slice, to be shared from then on.
    fn spread(&mut self, id: FunctionId, cluster: &mut Cluster) {
        let function = &self.functions[&id];
        let crowded = function.instances.iter().find(|one| {
            let instance = &self.instances[one];
            let neighbours = || self.slices.all[instance.places[0]].instances.len();
            let serves = self.state(**one, cluster).is_serving();
            instance.is_shared() && serves && !instance.replaced && neighbours() > 1
        });
        let Some(&old) = crowded else { return };
        let whole = |place: usize| {
            function.wholes.iter().find(|one| one.profile == self.slices.all[place].at.profile)
        };
        let cost = |place: &usize| (whole(*place).map_or(0, |one| one.compute), *place);
        let free = self.slices.free().filter(|&place| whole(place).is_some()).min_by_key(cost);
        match free.and_then(|place| Some(self.shared_home(function, whole(place)?, place))) {
            Some(home) => self.start(id, home, Some(old), cluster),
            None => self.unmet(id, cluster),
        }
    }

    /// Whether a shortage of the function was reported within the last window.
    pub(super) fn is_short(&self, id: FunctionId) -> bool {
        let told = self.functions.get(&id).and_then(|of| of.told_short);
        told.is_some_and(|at| self.now().saturating_since(at) < self.config.window)
    }

    /// Takes an instance from its function for another.
    fn take(&mut self, instance: InstanceId, function: FunctionId, cluster: &Cluster) {
        if let Some(found) = self.instances.get_mut(&instance) {
            found.taken_for = Some(function);
        }
        self.drain(instance, StopCause::Evicted, cluster);
    }

    /// Gives up an unused instance, or a quiet shared slice, for a function that found no slices.
    fn reclaim(&mut self, id: FunctionId, cluster: &Cluster) {
        let idle = |name: InstanceId| {
            let instance = &self.instances[&name];
            let unused = instance.busy == 0 && instance.idle > 0 && self.state(name, cluster) == State::Up;
            unused && !instance.replaced && self.can_spare(instance.function, cluster)
        };
        // The instance with the longest idle time, then the largest.
        let exclusive = self
            .instances
            .iter()
            .filter(|(name, one)| one.function != id && !one.is_shared() && idle(**name))
            .max_by_key(|(name, one)| (one.idle, one.places.len(), Reverse(**name)))
            .map(|(name, _)| *name);
        if let Some(instance) = exclusive {
            return self.take(instance, id, cluster);
        }
        let window = self.config.window.as_nanos();
        let pools = self.slices.shared().count();
        let quiet = |place: &usize| {
            let slice = &self.slices.all[*place];
            let mut spare = slice.instances.iter().map(|one| {
                let function = self.instances[one].function;
                self.state(*one, cluster) == State::Up && self.can_spare(function, cluster)
            });
            (slice.was_busy + slice.busy) * 100 < window * SHARED_IDLE && spare.all(|spare| spare)
        };
        let quietest = self.slices.shared().filter(quiet).min_by_key(|&place| {
            let slice = &self.slices.all[place];
            (slice.was_busy + slice.busy, slice.instances.len(), place)
        });
        if let Some(place) = quietest.filter(|_| pools > 1) {
            for instance in self.slices.all[place].instances.clone() {
                self.drain(instance, StopCause::Evicted, cluster);
            }
        }
    }

    /// Ends the window: busy instances are promoted, others demoted, and pipelines move.
    pub(super) fn end_window(&mut self, cluster: &mut Cluster) {
        let window = self.config.window.as_nanos();
        for slice in &mut self.slices.all {
            slice.was_busy = core::mem::take(&mut slice.busy);
        }
        self.was_wanting = core::mem::take(&mut self.wanting);
        let all: Vec<InstanceId> = self.instances.keys().copied().collect();
        let (mut hot, mut cool) = (Vec::new(), Vec::new());
        for id in all {
            let below = u64::from(self.config.hot_below.get());
            let above = u64::from(HOT_ABOVE.get());
            if self.state(id, cluster) == State::Starting {
                continue;
            }
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            let used = instance.busy.saturating_mul(10_000);
            instance.cool = if used < window * below { instance.cool + 1 } else { 0 };
            instance.idle = if used == 0 { instance.idle + 1 } else { 0 };
            if instance.is_shared() && used >= window * above {
                hot.push(id);
            } else if !instance.is_shared() && instance.cool >= self.config.cool_windows {
                cool.push(id);
            }
        }
        for id in hot {
            self.promote(id, cluster);
        }
        for id in cool {
            self.demote(id, window, cluster);
        }
        if self.config.migration && !self.was_wanting {
            self.migrate(cluster);
        }
        for instance in self.instances.values_mut() {
            instance.was_busy = core::mem::take(&mut instance.busy);
        }
    }

    /// A shared instance is busy: it keeps its slice if it is alone there, else the function gets slices of its own.
    fn promote(&mut self, id: InstanceId, cluster: &mut Cluster) {
        if self.state(id, cluster) != State::Up {
            return;
        }
        let instance = &self.instances[&id];
        let (function, place) = (instance.function, instance.places[0]);
        if self.is_resident(id) && self.slices.all[place].instances.len() == 1 {
            let Home::Shared { latency, slice, memory, .. } = instance.home else { return };
            let components = self.functions[&function].dag.all();
            let parts = vec![PlacedPart { stage: 0, components, slice }];
            let home = Home::Exclusive { parts, latency, interval: latency };
            let on = &mut self.slices.all[place];
            on.order.forget(id);
            on.instances.clear();
            on.used = on.used.saturating_sub(memory);
            on.owner = Owner::Exclusive(id);
            self.rehome(id, home);
            return;
        }
        let of = &self.functions[&function];
        let starting = of.instances.iter().any(|one| self.state(*one, cluster) == State::Starting);
        if starting || of.unmet == Some(self.slices.version) {
            return;
        }
        match self.exclusive(function, self.config.pipelines) {
            Some(home) => self.start(function, home, None, cluster),
            None => {
                self.unmet(function, cluster);
                self.crowd_out(id, cluster);
            }
        }
    }

    /// No slices are free for a busy shared instance: its less busy neighbours leave the slice to it if their functions are
    /// served elsewhere too. Otherwise they would evict each other for every few requests.
    fn crowd_out(&mut self, id: InstanceId, cluster: &Cluster) {
        if !self.config.reclaim {
            return;
        }
        let (function, place) = (self.instances[&id].function, self.instances[&id].places[0]);
        let key = |one: InstanceId| (self.instances[&one].busy, one);
        let is_up = |one: &InstanceId| self.state(*one, cluster) == State::Up;
        let leaves = |one: &InstanceId| {
            let function = self.instances[one].function;
            let elsewhere =
                self.functions[&function].instances.iter().any(|other| other != one && is_up(other));
            is_up(one) && elsewhere && self.can_spare(function, cluster) && key(*one) < key(id)
        };
        let neighbours: Vec<InstanceId> =
            self.slices.all[place].instances.iter().copied().filter(|one| *one != id).collect();
        if neighbours.iter().all(leaves) {
            for neighbour in neighbours {
                self.take(neighbour, function, cluster);
            }
        }
    }

    fn rehome(&mut self, id: InstanceId, home: Home) {
        if let Some(instance) = self.instances.get_mut(&id) {
            (instance.home, instance.cool, instance.idle) = (home, 0, 0);
            self.effects.push(Effect::Moved(id));
        }
    }

    /// Shrinks a function with an exclusive instance that is no longer busy.
    fn demote(&mut self, id: InstanceId, window: u64, cluster: &mut Cluster) {
        let instance = &self.instances[&id];
        if self.state(id, cluster) != State::Up || instance.replaced || !self.config.time_sharing {
            return;
        }
        let of = instance.function;
        let function = &self.functions[&of];
        let mine =
            || function.instances.iter().map(|one| (one, &self.instances[one], self.state(*one, cluster)));
        if mine().any(|(.., state)| state == State::Draining) {
            return;
        }
        let exclusive = || mine().filter(|(_, one, state)| !one.is_shared() && *state == State::Up);
        let (count, busy) = exclusive().fold((0u64, 0u64), |sum, (_, one, _)| (sum.0 + 1, sum.1 + one.busy));
        let spare = self.can_spare(of, cluster);
        if count > 1 && spare {
            // Others stay: the slowest goes, if they can do its work.
            let slow = exclusive().max_by_key(|(name, one, _)| (one.places.len(), **name));
            let enough = busy * 100 < window * (count - 1) * DRAIN_BELOW;
            if slow.is_some_and(|(name, ..)| *name == id) && enough {
                self.drain(id, StopCause::Drained, cluster);
            }
            return;
        }
        if spare && mine().any(|(_, one, _)| one.is_shared()) {
            if !instance.home.is_pipeline() || self.config.demote_pipelines {
                self.drain(id, StopCause::Drained, cluster);
            }
            return;
        }
        if !self.may_share(of, cluster) {
            return;
        }
        if !instance.home.is_pipeline() {
            let place = instance.places[0];
            let profile = self.slices.all[place].at.profile;
            let Some(whole) = function.wholes.iter().find(|one| one.profile == profile) else { return };
            let home = self.shared_home(function, whole, place);
            let Home::Shared { load, memory, .. } = home else { return };
            let (now, on) = (self.now(), &mut self.slices.all[place]);
            on.owner = Owner::Shared;
            on.instances.insert(id);
            on.order.know(now, id, load, memory);
            on.order.enter(id);
            on.used = memory;
            self.slices.version += 1;
            return self.rehome(id, home);
        }
        if !self.config.demote_pipelines {
            return;
        }
        if spare && instance.idle >= self.config.cool_windows {
            self.drain(id, StopCause::Drained, cluster);
        } else if let Some(home) = self.shared(of) {
            self.start(of, home, Some(id), cluster);
        }
    }

    /// Moves pipelines to one slice where one is free (section 5.3), the slowest first.
    fn migrate(&mut self, cluster: &mut Cluster) {
        let mut pipelines: Vec<(Duration, InstanceId)> = Vec::new();
        for (&id, instance) in &self.instances {
            if let Home::Exclusive { latency, .. } = instance.home
                && instance.home.is_pipeline()
                && !instance.replaced
                && self.state(id, cluster) == State::Up
            {
                pipelines.push((latency, id));
            }
        }
        pipelines.sort_by_key(|&(latency, id)| (Reverse(latency), id));
        for (_, id) in pipelines {
            let function = self.instances[&id].function;
            if let Some(home) = self.exclusive(function, false) {
                self.start(function, home, Some(id), cluster);
            }
        }
    }
}
