//! The choice of instances to park, so that another instance finds room on a device with free time but no memory.
//!
//! A parked instance whose processes live comes back to its device, because there its memory is copied and nothing starts. Only after a
//! wait as long as a start does it take free room elsewhere. Others make room for it elsewhere only if, besides, no neighbour at home is
//! about to leave, not even a neighbour on its way there. Otherwise functions that take turns would end each other's processes for ever.
//!
//! Instances without room get it in the order in which they began to wait. An instance without calls is parked for an
//! instance with calls. The chosen device has the fewest victims; among equals, the victims longest unused.
//!
//! What damps this is the price of a move, its parking and its return or load, as last measured. An instance stays a multiple of its own
//! price, so that a device spends a bounded part of its time on moves, and half of that if it is idle then. Where its processes would
//! end, it has to be idle for that half. An instance may also leave once it has stayed as long as the price alone, if a request of the
//! waiting function would be late otherwise. A request that is late in any case does not count.

use super::pool_config::{LEAST_STAY, PARK_BUSY_AFTER, PARK_IDLE, STAY_PER_MOVE};
use super::spread::Within;
use super::{
    Cluster, Demand, Duration, FractionalPool, FunctionId, GpuId, Instance, InstanceId, NodeId,
    PlatformAction, State, Timer, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};

/// An instance without room.
#[derive(Debug, Clone)]
pub(super) struct Wanting {
    pub(super) instance: InstanceId,
    since: Timestamp,
    /// The devices on which room is made for the instance.
    on: Vec<GpuId>,
}

/// The victims that free enough of a device: their number, the last use among them, the device, and the victims themselves.
type Victims = (usize, Timestamp, GpuId, Vec<InstanceId>);

impl FractionalPool {
    /// Lets the instance wait for room.
    pub(super) fn want(&mut self, instance: InstanceId, cluster: &Cluster) {
        if self.wanting.iter().all(|one| one.instance != instance) {
            self.wanting.push_back(Wanting { instance, since: cluster.now, on: Vec::new() });
            self.room_changed = true;
        }
    }

    /// Ends the instance's wait for room.
    pub(super) fn unwant(&mut self, instance: InstanceId) {
        self.wanting.retain(|one| one.instance != instance);
    }

    /// Looks for room again after this time at the latest.
    pub(super) fn look_for_room_in(&mut self, time: Duration, cluster: &Cluster) {
        if !self.timers.has(Timer::Room) {
            self.timers.set(Timer::Room, cluster.now.saturating_add(time));
        }
    }

    /// Brings a parked instance back when requests wait and no instance is open, starting or on its way.
    pub(super) fn wake(&mut self, function: FunctionId, cluster: &Cluster) {
        if cluster.queue(function).is_empty() {
            return;
        }
        let Some(of) = self.functions.get(&function) else { return };
        let serves = of.instances.iter().any(|one| {
            !matches!(self.instances[one].state, State::Parked | State::Draining | State::Stopping)
                || self.wanting.iter().any(|wanting| wanting.instance == *one)
        });
        if !serves {
            self.wake_one(function, cluster);
        }
    }

    /// Brings one more parked instance back.
    pub(super) fn wake_one(&mut self, function: FunctionId, cluster: &Cluster) {
        let Some(of) = self.functions.get(&function) else { return };
        let waits = |one: &InstanceId| self.wanting.iter().any(|wanting| wanting.instance == *one);
        let parked =
            of.instances.iter().find(|one| self.instances[one].state == State::Parked && !waits(one));
        if let Some(&instance) = parked {
            self.want(instance, cluster);
        }
    }

    /// Places waiting instances where there is room, and makes room for the others.
    pub(super) fn give_room(&mut self, cluster: &mut Cluster) {
        let mut index = 0;
        while let Some(wanting) = self.wanting.get(index) {
            let instance = wanting.instance;
            // Room in preparation for an instance with a longer wait is not taken by another.
            let reserved: BTreeSet<GpuId> =
                self.wanting.iter().take(index).flat_map(|one| one.on.iter().copied()).collect();
            let Some(of) = self.instances.get(&instance) else { return };
            let (function, demand, node) = (of.function, of.demand, of.node);
            let [free, made] = self.homes_for_now(wanting, cluster);
            let within = Within { node, homes: &free, reserved: &reserved, nodes: None };
            if let Ok(placed) = self.place_beside(function, &demand, &within, cluster) {
                self.wanting.remove(index);
                for one in placed {
                    self.hold(instance, one.placement.id, one.placement.gpu);
                }
                if self.instances[&instance].state == State::Parked {
                    self.order_unpark(instance, cluster);
                } else {
                    self.order_start(instance, cluster);
                }
                continue;
            }
            if !self.makes_room_on(&self.wanting[index].on, cluster) {
                let on = self.make_room(index, &made, cluster);
                if let Some(one) = self.wanting.get_mut(index) {
                    one.on = on;
                }
            }
            index += 1;
        }
        if !self.wanting.is_empty() {
            self.look_for_room_in(PARK_IDLE, cluster);
        }
    }

    /// The devices to which the instance's living processes come back with a copy, while it waits for free room there alone, and while
    /// room is made for it there alone. Empty: any device will do. That is so for free room once it has waited for as long as a start
    /// takes, and for room that others make once, besides, no neighbour at home is about to leave, or this wait has been in vain.
    fn homes_for_now(&self, wanting: &Wanting, cluster: &Cluster) -> [BTreeSet<GpuId>; 2] {
        let homes = cluster.instances.get(wanting.instance).map_or_else(BTreeSet::new, |of| of.homes());
        let Some(of) = self.instances.get(&wanting.instance) else { return [homes.clone(), homes] };
        let start = cluster.functions[&of.function].moves.start();
        let waited = cluster.now.saturating_since(wanting.since);
        // Elsewhere the instance has to start, and so may the victim that makes room for it there.
        let starts = start.saturating_mul(2);
        // A neighbour that may leave does so at the next look, and then the instance comes.
        let comes = cluster.price(of.function).saturating_add(PARK_IDLE);
        let leaves = |one| {
            let Some((came, stay)) = self.stays(one, of.function, cluster) else { return false };
            let end = came.saturating_add(stay);
            end <= cluster.now.saturating_add(starts)
                && end.saturating_add(comes) > cluster.now
                && waited < starts.saturating_add(stay).saturating_add(comes)
        };
        let waits = waited < start;
        let home = waits || homes.iter().flat_map(|gpu| cluster.instances.on(*gpu)).any(leaves);
        [waits, home].map(|home| if home { homes.clone() } else { BTreeSet::new() })
    }

    /// The time of an instance's arrival on its device, past or expected, and its least stay there while it is called. None for an instance
    /// that makes no room for the function.
    fn stays(
        &self,
        id: InstanceId,
        function: FunctionId,
        cluster: &Cluster,
    ) -> Option<(Timestamp, Duration)> {
        let of = self.instances.get(&id).filter(|of| of.function != function)?;
        let came = match of.state {
            State::Ready => of.came,
            State::Starting | State::Unparking => cluster.arrives(id)?,
            _ => return None,
        };
        let stay = stay(of.function, STAY_PER_MOVE, cluster).max(came_in(id, cluster));
        self.functions.get(&of.function)?.gang.is_none().then_some((came, stay))
    }

    /// Whether an instance on one of these devices is about to be parked.
    fn makes_room_on(&self, on: &[GpuId], cluster: &Cluster) -> bool {
        let leaves = |id: InstanceId| {
            self.instances.get(&id).is_some_and(|of| matches!(of.state, State::Emptying | State::Parking))
        };
        on.iter().any(|gpu| cluster.instances.on(*gpu).any(leaves))
    }

    /// Parks the fewest instances that free enough of one device, or of as many devices of one node as the instance needs;
    /// returns the devices, if there are any.
    fn make_room(&mut self, index: usize, homes: &BTreeSet<GpuId>, cluster: &mut Cluster) -> Vec<GpuId> {
        let Some(chosen) = self.cheapest_room(index, homes, cluster) else { return Vec::new() };
        let on = chosen.iter().map(|(_, _, gpu, _)| *gpu).collect();
        // A spread instance may have to leave several of the devices.
        let victims: BTreeSet<InstanceId> = chosen.into_iter().flat_map(|(.., victims)| victims).collect();
        for victim in victims {
            self.close(victim);
            self.enter(victim, State::Emptying);
            if cluster.runs(victim) == 0 {
                self.park(victim, cluster);
            }
        }
        on
    }

    /// The devices where room costs the instance the fewest victims; among equals, the victims longest unused.
    fn cheapest_room(
        &self,
        index: usize,
        homes: &BTreeSet<GpuId>,
        cluster: &Cluster,
    ) -> Option<Vec<Victims>> {
        let wanting = self.wanting.get(index)?;
        let of = self.instances.get(&wanting.instance)?;
        let spec = &cluster.functions[&of.function].spec;
        let count = spec.devices as usize;
        // A further instance of a minimum pushes no busy one out.
        let further = of.state == State::WaitingForRoom && self.serves_without(wanting.instance);
        let presses = !further && self.presses(of.function, cluster);
        // Copies are cheap, and a device may change its instances more often.
        let copies = cluster.copies(of.function);
        let stay = cluster.price(of.function).saturating_mul(STAY_PER_MOVE).max(PARK_IDLE);
        let patience = if copies { stay.min(PARK_BUSY_AFTER) } else { PARK_BUSY_AFTER };
        let waited = cluster.now.saturating_since(wanting.since) >= patience;
        let busy_too = presses || waited && !further;
        let others = self.wanting.iter().filter(|one| one.instance != wanting.instance);
        let taken: BTreeSet<GpuId> = others.flat_map(|one| one.on.iter().copied()).collect();
        let within = Within { node: of.node, homes, reserved: &taken, nodes: spec.nodes.as_ref() };
        let with = |least: usize| {
            let mut nodes: BTreeMap<NodeId, Vec<Victims>> = BTreeMap::new();
            for (&gpu, &at) in &self.devices {
                if within.allows(gpu, at)
                    && let Some(victims) = self.victims_on(gpu, of, (least, busy_too, presses), cluster)
                {
                    nodes.entry(at).or_default().push(victims);
                }
            }
            let cheapest = nodes.into_values().filter(|found| found.len() >= count).map(|mut found| {
                found.sort_unstable_by_key(|(victims, used, gpu, _)| (*victims, *used, *gpu));
                found.truncate(count);
                found
            });
            let cost = |found: &Vec<Victims>| {
                let victims = found.iter().map(|(victims, ..)| victims).sum::<usize>();
                (victims, found.iter().map(|(_, used, ..)| *used).max(), found.first().map(|one| one.2))
            };
            cheapest.filter(|found| cost(found).0 > 0).min_by_key(cost)
        };
        // A device with enough free time and memory may lack a rectangle of the right shape: then an instance has to leave all
        // the same.
        (count > 1).then(|| with(0)).flatten().or_else(|| with(1))
    }

    /// Whether the function of an instance has another one that serves requests, or will.
    fn serves_without(&self, instance: InstanceId) -> bool {
        let of = self.instances.get(&instance).and_then(|of| self.functions.get(&of.function));
        of.is_some_and(|of| {
            of.instances.iter().any(|one| {
                let state = self.instances[one].state;
                *one != instance
                    && !matches!(state, State::WaitingForRoom | State::Draining | State::Stopping)
            })
        })
    }

    /// The instances, at least `least`, that must leave a device for this instance, the longest unused first; None if all of
    /// them are not enough.
    fn victims_on(
        &self,
        gpu: GpuId,
        wanting: &Instance,
        (least, busy_too, presses): (usize, bool, bool),
        cluster: &Cluster,
    ) -> Option<Victims> {
        let area = |demand: &Demand| u64::from(demand.quota.get()) * u64::from(demand.sm.get());
        let (mut memory, area_wanted) = (wanting.demand.memory.get(), area(&wanting.demand));
        let mut sharing = self.weights.on(gpu);
        let own = cluster.functions[&wanting.function].spec.weights;
        // The instance's own weights stay when their other users leave.
        if let Some(own) = own.filter(|own| sharing.remove(&own.model).is_none()) {
            memory = memory.saturating_add(own.bytes.get());
        }
        let status = self.packer.gpu(gpu)?;
        let mut free_memory = status.spec.memory.saturating_sub(status.memory_used).get();
        let whole = u64::from(status.spec.quota.get()) * u64::from(status.spec.sm.get());
        let mut free_area = whole.saturating_sub(status.area_used);
        let may = |id| {
            let (used, idle) = self.may_be_parked(id, wanting.function, presses, cluster)?;
            (idle || busy_too).then_some((!idle, used, id))
        };
        let mut victims: Vec<(bool, Timestamp, InstanceId)> =
            cluster.instances.on(gpu).filter_map(may).collect();
        victims.sort_unstable();
        let (mut chosen, mut latest) = (Vec::new(), Timestamp::ZERO);
        let mut victims = victims.into_iter();
        while free_memory < memory || free_area < area_wanted || chosen.len() < least {
            let (_, used, id) = victims.next()?;
            let victim = &self.instances[&id].demand;
            free_memory = free_memory.saturating_add(victim.memory.get());
            let shared = cluster.functions[&self.instances[&id].function].spec.weights;
            if let Some(weights) = shared
                && let Some(users) = sharing.get_mut(&weights.model)
            {
                *users -= 1;
                free_memory += if *users == 0 { weights.bytes.get() } else { 0 };
            }
            free_area = free_area.saturating_add(area(victim));
            chosen.push(id);
            latest = latest.max(used);
        }
        Some((chosen.len(), latest, gpu, chosen))
    }

    /// The instance's last use and whether it is idle, if it may be parked for another function.
    fn may_be_parked(
        &self,
        id: InstanceId,
        function: FunctionId,
        presses: bool,
        cluster: &Cluster,
    ) -> Option<(Timestamp, bool)> {
        let of = self.instances.get(&id).filter(|of| of.state == State::Ready)?;
        let (came, called) = self.stays(id, function, cluster)?;
        let idles = cluster.runs(id) == 0 && cluster.queue(of.function).is_empty();
        let rests = if idles { cluster.now.saturating_since(of.used) } else { Duration::ZERO };
        let idle = stay(of.function, STAY_PER_MOVE / 2, cluster);
        let rested = rests >= if cluster.copies(of.function) { PARK_IDLE } else { idle };
        let stay = if presses {
            cluster.price(of.function)
        } else if rested {
            idle
        } else {
            called
        };
        let stay = stay.max(came_in(id, cluster));
        (cluster.now.saturating_since(came) >= stay).then_some((of.used, rests >= PARK_IDLE))
    }

    /// Whether the function's first request is in time only if room for it is made now; by the end of its wait, where no move is as
    /// short as its SLO.
    fn presses(&self, function: FunctionId, cluster: &Cluster) -> bool {
        let Some((arrived, request)) = cluster.queue(function).first() else { return false };
        let spec = &cluster.functions[&function].spec;
        // The victim's parking is taken to be as long as the function's own.
        let price = cluster.price(function).saturating_add(PARK_IDLE.saturating_mul(2));
        let wait = cluster.requests[request].patience();
        let end = spec.slo.filter(|slo| *slo > price).unwrap_or(wait);
        end > price && cluster.now.saturating_since(*arrived) >= end - price
    }

    pub(super) fn park(&mut self, instance: InstanceId, cluster: &mut Cluster) {
        let Some(function) = self.instances.get(&instance).map(|of| of.function) else { return };
        self.enter(instance, State::Parking);
        let keeps = cluster.keeps(function);
        cluster.order(PlatformAction::Park { instance, keeps });
    }

    fn order_unpark(&mut self, instance: InstanceId, cluster: &mut Cluster) {
        self.enter(instance, State::Unparking);
        let Some(of) = self.instances.get(&instance) else { return };
        let parts = self.parts(of, cluster);
        let takes = cluster.return_time(instance, of.function, &parts);
        cluster.order(PlatformAction::Unpark { instance, parts, takes });
    }
}

/// The least stay of an instance of this function: the time of so many moves, and no less than a fixed time.
fn stay(function: FunctionId, moves: u64, cluster: &Cluster) -> Duration {
    let least = if cluster.copies(function) { PARK_IDLE } else { LEAST_STAY };
    cluster.price(function).saturating_mul(moves).max(least)
}

/// How long the instance's last return took, if it came back last: it stays as long at least.
fn came_in(id: InstanceId, cluster: &Cluster) -> Duration {
    cluster.instances.get(id).map_or(Duration::ZERO, |of| of.came_in)
}
