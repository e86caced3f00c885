//! Room for an instance where there is time left on a device but no memory.
//!
//! Who waits for room is given it in the order in which they began to wait. An instance that nobody calls is parked for
//! one that is called; the choice of device and victims is that of the fewest victims, of those the longest unused.

use super::{
    Duration, FractionalPool, FunctionId, GpuId, InstanceId, PlatformAction, PoolAction, State, Timer,
    Timestamp,
};
use gshare_core::pack::Placed;

/// An instance that waits for room.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanting {
    pub(super) instance: InstanceId,
    since: Timestamp,
    /// The device on which room is made for it.
    on: Option<GpuId>,
}

impl FractionalPool {
    /// The instance waits for room from now on.
    pub(super) fn want(&mut self, instance: InstanceId) {
        if self.wanting.iter().all(|one| one.instance != instance) {
            self.wanting.push_back(Wanting { instance, since: self.now, on: None });
            self.room_changed = true;
        }
    }

    /// Notes that an instance does not wait for room any more.
    pub(super) fn unwant(&mut self, instance: InstanceId) {
        self.wanting.retain(|one| one.instance != instance);
    }

    /// Looks for room again after this time at the latest.
    pub(super) fn look_for_room_in(&mut self, time: Duration) {
        if !self.timers.has(Timer::Room) {
            self.timers.set(Timer::Room, self.now.saturating_add(time));
        }
    }

    /// Brings a parked instance back when requests wait and none is open, starting or on its way.
    pub(super) fn wake(&mut self, function: FunctionId, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.functions.get(&function) else { return };
        if of.queue.is_empty() || of.removed {
            return;
        }
        let serves = of.instances.iter().any(|one| {
            !matches!(self.instances[one].state, State::Parked | State::Draining | State::Stopping)
                || self.wanting.iter().any(|wanting| wanting.instance == *one)
        });
        let _ = actions;
        if !serves {
            self.wake_one(function);
        }
    }

    /// Brings one more parked instance back.
    pub(super) fn wake_one(&mut self, function: FunctionId) {
        let Some(of) = self.functions.get(&function) else { return };
        let waits = |one: &InstanceId| self.wanting.iter().any(|wanting| wanting.instance == *one);
        let parked =
            of.instances.iter().find(|one| self.instances[one].state == State::Parked && !waits(one));
        if let Some(&instance) = parked {
            self.want(instance);
        }
    }

    /// Places those who wait where there is room, and makes room for those for whom there is none.
    pub(super) fn give_room(&mut self, actions: &mut Vec<PoolAction>) {
        let mut index = 0;
        while let Some(&wanting) = self.wanting.get(index) {
            match self.place_wanting(wanting) {
                Some(placed) => {
                    self.wanting.remove(index);
                    self.hold(wanting.instance, placed.placement.id, placed.placement.gpu);
                    if self.instances[&wanting.instance].state == State::Parked {
                        self.order_unpark(wanting.instance, actions);
                    } else {
                        self.order_start(wanting.instance, actions);
                    }
                }
                None => {
                    index += 1;
                    if self.config.park && !self.makes_room_on(wanting.on) {
                        let on = self.make_room(wanting, actions);
                        if let Some(one) = self.wanting.get_mut(index - 1) {
                            one.on = on;
                        }
                    }
                }
            }
        }
        if !self.wanting.is_empty() && self.config.park {
            self.look_for_room_in(self.config.park_idle);
        }
    }

    /// Whether somebody on that device is about to be parked.
    fn makes_room_on(&self, on: Option<GpuId>) -> bool {
        let Some(gpu) = on else { return false };
        self.instances.values().any(|of| {
            matches!(of.state, State::Emptying | State::Parking)
                && of.placements.iter().any(|(_, at)| *at == gpu)
        })
    }

    fn place_wanting(&mut self, wanting: Wanting) -> Option<Placed> {
        let of = self.instances.get(&wanting.instance)?;
        let (demand, node, devices) = (of.demand, of.node, &self.devices);
        // Room that is being made for one that waits longer is not taken by another.
        let reserved: Vec<GpuId> = self
            .wanting
            .iter()
            .take_while(|one| one.instance != wanting.instance)
            .filter_map(|one| one.on)
            .collect();
        let allowed = |gpu: GpuId| {
            let here = |node| devices.get(&gpu).is_some_and(|device| device.node == node);
            !reserved.contains(&gpu) && node.is_none_or(here)
        };
        self.packer.place_where(&demand, &allowed).ok()
    }

    /// Parks the fewest instances that leave enough on one device; the device, if there is one.
    fn make_room(&mut self, wanting: Wanting, actions: &mut Vec<PoolAction>) -> Option<GpuId> {
        let of = self.instances.get(&wanting.instance)?;
        let (demand, node, function) = (of.demand, of.node, of.function);
        let busy_too = self.now.saturating_since(wanting.since) >= self.config.park_busy_after;
        let area =
            |demand: &gshare_core::pack::Demand| u64::from(demand.quota.get()) * u64::from(demand.sm.get());
        let mut best: Option<(usize, Timestamp, GpuId, Vec<InstanceId>)> = None;
        for (&gpu, device) in &self.devices {
            let taken =
                self.wanting.iter().any(|one| one.instance != wanting.instance && one.on == Some(gpu));
            if taken || node.is_some_and(|node| node != device.node) {
                continue;
            }
            let Some(status) = self.packer.gpu(gpu) else { continue };
            let mut free_memory = status.spec.memory.saturating_sub(status.memory_used).get();
            let whole = u64::from(status.spec.quota.get()) * u64::from(status.spec.sm.get());
            let mut free_area = whole.saturating_sub(status.area_used);
            let mut victims: Vec<(bool, Timestamp, InstanceId)> = Vec::new();
            self.packer.placements_on(gpu, &mut |placement| {
                let Some(&id) = self.by_placement.get(&placement.id) else { return };
                let Some((used, idle)) = self.may_be_parked(id, function) else { return };
                if idle || busy_too {
                    victims.push((!idle, used, id));
                }
            });
            victims.sort_unstable();
            let (mut chosen, mut latest) = (Vec::new(), Timestamp::ZERO);
            for (_, used, id) in victims {
                if free_memory >= demand.memory.get() && free_area >= area(&demand) && !chosen.is_empty() {
                    break;
                }
                let victim = &self.instances[&id].demand;
                free_memory = free_memory.saturating_add(victim.memory.get());
                free_area = free_area.saturating_add(area(victim));
                chosen.push(id);
                latest = latest.max(used);
            }
            let fits = free_memory >= demand.memory.get() && free_area >= area(&demand) && !chosen.is_empty();
            let better = |best: &(usize, Timestamp, GpuId, Vec<InstanceId>)| {
                (chosen.len(), latest, gpu) < (best.0, best.1, best.2)
            };
            if fits && best.as_ref().is_none_or(better) {
                best = Some((chosen.len(), latest, gpu, chosen));
            }
        }
        let (_, _, gpu, victims) = best?;
        for victim in victims {
            self.close(victim);
            self.enter(victim, State::Emptying);
            let Some(of) = self.instances.get(&victim) else { continue };
            if of.requests.is_empty() {
                self.park(victim, actions);
            }
        }
        Some(gpu)
    }

    /// When the instance was used last and whether it is idle, if it may be parked for another function.
    fn may_be_parked(&self, id: InstanceId, function: FunctionId) -> Option<(Timestamp, bool)> {
        let of = self.instances.get(&id)?;
        let own = self.functions.get(&of.function)?;
        if of.state != State::Ready || own.gang.is_some() || of.function == function {
            return None;
        }
        let rested = self.now.saturating_since(of.used) >= self.config.park_idle;
        Some((of.used, of.requests.is_empty() && own.queue.is_empty() && rested))
    }

    pub(super) fn park(&mut self, instance: InstanceId, actions: &mut Vec<PoolAction>) {
        if self.enter(instance, State::Parking).is_some() {
            self.timers.set(Timer::Answer(instance), self.now.saturating_add(self.config.park_timeout));
            actions.push(PoolAction::Order(PlatformAction::Park { instance }));
        }
    }

    fn order_unpark(&mut self, instance: InstanceId, actions: &mut Vec<PoolAction>) {
        self.enter(instance, State::Unparking);
        let Some(of) = self.instances.get(&instance) else { return };
        let (function, parts) = (of.function, self.parts(&self.instances[&instance]));
        let spec = &self.functions[&function].spec;
        // The process is there: what is left of a load from host memory is the copy, at its share of the whole load.
        let takes = spec.load_host;
        self.timers.set(Timer::Answer(instance), self.now.saturating_add(self.config.park_timeout));
        actions.push(PoolAction::Order(PlatformAction::Unpark { instance, parts, takes }));
    }
}
