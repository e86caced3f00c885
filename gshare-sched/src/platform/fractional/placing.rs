//! The life of each instance, by the scaler's orders and the host's reports.

use super::spread::Within;
use super::{
    Cluster, Fleet, FractionalPool, FunctionId, GpuId, HorizontalOrder, Instance, InstanceId, Part,
    PlacementId, PlatformAction, ProfilePoint, REGIME, RequestRate, State, StopCause,
};
use crate::Tier;
use crate::pack::{Demand, PackError, Placed};
use crate::platform::PoolError;
use crate::scale::LoadReport;
use core::fmt::Display;
use gshare_core::dag::ComponentSet;
use gshare_core::{GpuShare, Quota, QuotaRange, SmShare};
use std::collections::BTreeSet;

impl FractionalPool {
    /// Reports the load to the scaler, and carries out its orders.
    pub(super) fn scale(&mut self, function: FunctionId, load: RequestRate, cluster: &mut Cluster) {
        self.start_missing(function, cluster);
        let Some(fleet) = self.functions.get(&function).and_then(|of| of.fleet.as_ref()) else { return };
        let mut orders = Vec::new();
        self.scaler.decide(LoadReport { now: cluster.now, function, fleet, load }, &mut orders);
        let mut refused = false;
        for order in orders {
            match order {
                HorizontalOrder::Start(point) => {
                    let may = |fleet: &Fleet| fleet.room() > 0 && point < fleet.spec().profile.points().len();
                    if self.fleet(function).is_some_and(may) {
                        refused |= !self.start(function, point, false, cluster);
                    }
                }
                HorizontalOrder::Remove(instance) => self.take_away(instance, cluster),
                // Load beyond the function's maximum of instances is no lack of devices.
                HorizontalOrder::Unmet(_) => {
                    if self.fleet(function).is_some_and(|fleet| fleet.room() > 0) {
                        cluster.unmet(function);
                    }
                }
            }
        }
        if refused {
            self.no_room(function, cluster);
        }
    }

    /// Takes an instance from its function's fleet: drains it if it serves, else stops it.
    pub(super) fn take_away(&mut self, instance: InstanceId, cluster: &mut Cluster) {
        let Some(function) = self.instances.get(&instance).map(|of| of.function) else { return };
        match self.fleet_mut(function).and_then(|fleet| fleet.remove(instance)) {
            Some(true) => self.drain(instance, StopCause::Drained, cluster),
            Some(false) => self.stop(instance, StopCause::NotNeeded, cluster),
            None => {}
        }
    }

    fn demand(&self, function: FunctionId, point: &ProfilePoint, cluster: &Cluster) -> Demand {
        let limit = u32::from(point.sm.get()) * u32::from(self.config.sm_limit_factor);
        let limit = u16::try_from(limit).ok().and_then(SmShare::new).unwrap_or(SmShare::WHOLE);
        Demand::new(point.quota, point.sm)
            .with_sm_limit(limit)
            .with_memory(cluster.functions[&function].spec.memory_per_device())
            .with_function(function)
    }

    /// Starts an instance at a point, by its index in the profile. Without room it waits for it if it should, or if it is its function's
    /// only instance; else the point is refused, and the answer is false.
    pub(super) fn start(
        &mut self,
        function: FunctionId,
        point: usize,
        waits: bool,
        cluster: &mut Cluster,
    ) -> bool {
        let Some(of) = self.functions.get(&function) else { return false };
        let Some(fleet) = &of.fleet else { return false };
        let at = fleet.spec().profile.points()[point];
        let leaves =
            |one: &InstanceId| matches!(self.instances[one].state, State::Draining | State::Stopping);
        // The minimum tries all points before an instance waits for room.
        let waits =
            waits || cluster.functions[&function].spec.min_instances == 0 && of.instances.iter().all(leaves);
        let demand = self.demand(function, &at, cluster);
        let serves = (at.batch.max(1), at.throughput);
        let placed = self.place_beside(function, &demand, &Within::ANYWHERE, cluster);
        let lacks_room = matches!(placed, Err(PackError::NoRoom { .. } | PackError::Memory { .. }));
        if placed.is_err() && !(lacks_room && waits) {
            let until = cluster.now.saturating_add(self.scaler.config().retry_after);
            if let Some(fleet) = self.fleet_mut(function) {
                fleet.refuse(point, until);
            }
            return false;
        }
        let instance = self.insert(function, demand, serves, cluster);
        if let Some(fleet) = self.fleet_mut(function) {
            fleet.started(cluster.now, instance, point);
        }
        if let Ok(placed) = placed {
            self.start_at(instance, placed, cluster);
        } else {
            // A point within the size of some device may find room when other instances leave.
            self.want(instance, cluster);
            cluster.unmet(function);
        }
        true
    }

    fn start_at(&mut self, instance: InstanceId, placed: Vec<Placed>, cluster: &mut Cluster) {
        for one in placed {
            self.hold(instance, one.placement.id, one.placement.gpu);
        }
        self.order_start(instance, cluster);
    }

    /// Starts an instance that runs already, on its device and at the point with its share.
    pub(super) fn found(
        &mut self,
        function: FunctionId,
        gpu: GpuId,
        share: (Quota, SmShare),
        cluster: &mut Cluster,
    ) -> Result<(), PoolError> {
        let refused =
            |why: &dyn Display| REGIME.refused(format!("an instance of {function} on {gpu}: {why}"));
        let only = BTreeSet::from([gpu]);
        let within = Within { node: self.devices.get(&gpu).copied(), homes: &only, ..Within::ANYWHERE };
        if let Some(demand) = self.gang_found(function, share, cluster).map_err(|why| refused(&why))? {
            let placed =
                self.place_beside(function, &demand, &within, cluster).map_err(|why| refused(&why))?;
            let instance = self.insert(function, demand, (0, RequestRate::ZERO), cluster);
            self.idle_gangs.remove(&function);
            self.start_at(instance, placed, cluster);
            return Ok(());
        }
        let fleet = self.fleet(function).filter(|_| cluster.functions[&function].spec.devices == 1);
        let fleet = fleet.ok_or_else(|| refused(&"need inference on one device"))?;
        if fleet.room() == 0 {
            return Err(refused(&format!("need at most {} instances", fleet.spec().max_instances)));
        }
        let points = fleet.spec().profile.points();
        let point = points.iter().position(|at| (at.quota, at.sm) == share);
        let point = point.ok_or_else(|| {
            refused(&format!(
                "{} of the time on {} of the SMs: need a point of its profile",
                share.0, share.1
            ))
        })?;
        let at = points[point];
        let demand = self.demand(function, &at, cluster);
        let placed = self.place_beside(function, &demand, &within, cluster).map_err(|why| refused(&why))?;
        let instance = self.insert(function, demand, (at.batch.max(1), at.throughput), cluster);
        if let Some(fleet) = self.fleet_mut(function) {
            fleet.started(cluster.now, instance, point);
        }
        self.start_at(instance, placed, cluster);
        Ok(())
    }

    /// Adds an instance without a place.
    pub(super) fn insert(
        &mut self,
        function: FunctionId,
        demand: Demand,
        (capacity, throughput): (u32, RequestRate),
        cluster: &mut Cluster,
    ) -> InstanceId {
        let batches = cluster.functions.get(&function).is_some_and(|of| of.spec.batches);
        let of = Instance {
            function,
            state: State::WaitingForRoom,
            demand,
            capacity,
            room: if batches { 1 } else { capacity },
            throughput,
            placements: Vec::new(),
            node: None,
            open: None,
            used: cluster.now,
            came: cluster.now,
        };
        let instance = cluster.instances.name();
        if let Some(function) = self.functions.get_mut(&function) {
            function.instances.insert(instance);
        }
        self.instances.insert(instance, of);
        instance
    }

    /// Books a placement for the instance.
    pub(super) fn hold(&mut self, instance: InstanceId, placement: PlacementId, gpu: GpuId) {
        let node = self.devices.get(&gpu).copied();
        if let Some(of) = self.instances.get_mut(&instance) {
            of.placements.push((placement, gpu));
            of.node = of.node.or(node);
        }
    }

    /// Gives placements back to the packer.
    pub(super) fn release(&mut self, placements: Vec<(PlacementId, GpuId)>) {
        for (placement, gpu) in placements {
            // The packer knows every held placement.
            let _ = self.packer.release(placement);
            self.weights.leave(&mut *self.packer, placement, gpu);
            self.room_changed = true;
        }
    }

    /// The parts of the instance with their devices and shares.
    pub(super) fn parts(&self, of: &Instance, cluster: &Cluster) -> Vec<Part> {
        let share = self.share(of, cluster);
        let part = |(stage, (_, gpu)): (usize, &(PlacementId, GpuId))| Part {
            gpu: *gpu,
            share,
            slice: None,
            stage: u32::try_from(stage).unwrap_or(u32::MAX),
            components: ComponentSet::EMPTY,
        };
        of.placements.iter().enumerate().map(part).collect()
    }

    /// The placed quota is guaranteed. An instance may also use time that other instances leave, up to its function's limit or twice
    /// the quota, unless a training job's share says otherwise.
    fn share(&self, of: &Instance, cluster: &Cluster) -> GpuShare {
        let demand = &of.demand;
        let gang = self.functions.get(&of.function).and_then(|function| function.gang);
        let twice = Quota::new(demand.quota.get().saturating_mul(2)).unwrap_or(Quota::WHOLE);
        let limit = cluster.functions.get(&of.function).and_then(|function| function.spec.time_limit);
        let most = limit.unwrap_or(twice).max(demand.quota);
        let elastic = QuotaRange::new(demand.quota, most).unwrap_or(QuotaRange::BEST_EFFORT);
        let time = gang.map_or(elastic, |gang| gang.share.time());
        let memory = Some(demand.memory).filter(|memory| memory.get() > 0);
        GpuShare::new(time, demand.sm, demand.limit(), memory).unwrap_or(GpuShare::WHOLE)
    }

    /// Starts the processes of an instance that has its placements.
    pub(super) fn order_start(&mut self, instance: InstanceId, cluster: &mut Cluster) {
        self.enter(instance, State::Starting);
        let Some(of) = self.instances.get(&instance) else { return };
        let (function, node) = (of.function, of.node);
        let from = node.map_or(Tier::Disk, |node| self.cache.tier(node, function));
        let spec = &cluster.functions[&function].spec;
        let takes = if from == Tier::Host { spec.load_host } else { spec.load_disk };
        let parts = self.parts(of, cluster);
        cluster.order(PlatformAction::Start { instance, function, parts, from, takes, parked: false });
    }

    /// Changes the instance's state and returns the state before.
    pub(super) fn enter(&mut self, instance: InstanceId, state: State) -> Option<State> {
        let of = self.instances.get_mut(&instance)?;
        let before = core::mem::replace(&mut of.state, state);
        let (throughput, capacity) = (u128::from(of.throughput.as_milli()), u64::from(of.capacity));
        if let Some(function) = self.functions.get_mut(&of.function) {
            match (before, state) {
                (State::Ready, State::Ready) => {}
                (State::Ready, _) => {
                    function.serves -= throughput;
                    function.at_once -= capacity;
                }
                (_, State::Ready) => {
                    function.serves += throughput;
                    function.at_once += capacity;
                }
                _ => {}
            }
        }
        Some(before)
    }

    /// Opens an instance to requests.
    pub(super) fn open(&mut self, instance: InstanceId, cluster: &Cluster) {
        self.enter(instance, State::Ready);
        let Some(of) = self.instances.get_mut(&instance) else { return };
        (of.used, of.came) = (cluster.now, cluster.now);
        let function = of.function;
        self.serve_soon(function);
        self.reopen(instance, cluster);
    }

    pub(super) fn ready(&mut self, instance: InstanceId, cluster: &mut Cluster) {
        self.open(instance, cluster);
        let Some(of) = self.instances.get(&instance) else { return };
        let (function, node) = (of.function, of.node);
        if let Some(node) = node {
            let bytes = cluster.functions[&function].spec.memory;
            self.cache.loaded(node, function, bytes, &mut cluster.orders);
        }
        self.gang_ready(function);
        if let Some(fleet) = self.fleet_mut(function) {
            fleet.ready(cluster.now, instance);
        }
    }

    /// Tells the host to end the instance.
    pub(super) fn stop(&mut self, instance: InstanceId, cause: StopCause, cluster: &mut Cluster) {
        if self.instances.get(&instance).is_none_or(|of| of.state == State::Stopping) {
            return;
        }
        self.close(instance);
        if self.enter(instance, State::Stopping) == Some(State::WaitingForRoom) {
            // The host does not know the instance.
            self.forget(instance, cluster);
        } else {
            self.unwant(instance);
            cluster.order(PlatformAction::Stop { instance, cause });
        }
    }

    /// Gives the instance no more requests, and stops it after its last one.
    pub(super) fn drain(&mut self, instance: InstanceId, cause: StopCause, cluster: &mut Cluster) {
        let Some(of) = self.instances.get(&instance) else { return };
        if matches!(of.state, State::Draining | State::Stopping) {
            return;
        }
        if cluster.runs(instance) == 0 {
            let ready = matches!(of.state, State::Ready | State::Emptying);
            if ready {
                cluster.order(PlatformAction::Drain { instance });
            }
            self.stop(instance, cause, cluster);
            return;
        }
        self.close(instance);
        self.enter(instance, State::Draining);
        cluster.order(PlatformAction::Drain { instance });
    }

    /// Closes an instance to requests.
    pub(super) fn close(&mut self, instance: InstanceId) {
        let Some(of) = self.instances.get_mut(&instance) else { return };
        if let Some((key, of)) = of.open.take().zip(self.functions.get_mut(&of.function)) {
            of.open.remove(&key);
        }
    }

    /// Forgets an instance that has ended entirely.
    pub(super) fn forget(&mut self, instance: InstanceId, cluster: &mut Cluster) {
        self.close(instance);
        self.unwant(instance);
        self.enter(instance, State::Stopping);
        let Some(of) = self.instances.remove(&instance) else { return };
        self.release(of.placements);
        if let Some(function) = self.functions.get_mut(&of.function) {
            function.instances.remove(&instance);
            function.fleet.as_mut().and_then(|fleet| fleet.remove(instance));
        }
        self.gang_gone(of.function, cluster);
        self.serve_soon(of.function);
        self.drop_if_done(of.function, cluster);
    }
}
