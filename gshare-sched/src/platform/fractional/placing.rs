//! The life of each instance, by the scaler's orders and the host's reports.

use super::{
    FractionalPool, FunctionId, GpuId, HorizontalAction, HorizontalEvent, Instance, InstanceId,
    InstanceReport, Part, PlacementId, PlatformAction, PoolAction, ProfilePoint, RequestRate, START_AGAIN,
    State, StopCause, Timer,
};
use crate::pack::{Demand, PackError};
use crate::request::Tier;
use gshare_core::dag::ComponentSet;
use gshare_core::{GpuShare, Quota, QuotaRange, SmShare};
use std::collections::BTreeSet;

impl FractionalPool {
    /// Passes an event to the scaler and carries out its orders.
    pub(super) fn scale(&mut self, event: HorizontalEvent, actions: &mut Vec<PoolAction>) {
        let mut orders = Vec::new();
        // The scaler's own view decides: an event for an instance it gave up changes nothing.
        if self.scaler.handle(self.now, event, &mut orders).is_ok() {
            self.scaled(orders, actions);
        }
    }

    pub(super) fn scaled(&mut self, orders: Vec<HorizontalAction>, actions: &mut Vec<PoolAction>) {
        for order in orders {
            match order {
                HorizontalAction::Start { function, instance, point } => {
                    self.start(function, instance, &point, actions);
                }
                HorizontalAction::Drain { instance } => {
                    if let Some(&instance) = self.by_scaler.get(&instance) {
                        self.drain(instance, StopCause::Drained, actions);
                    }
                }
                HorizontalAction::Stop { instance } => {
                    let Some(&instance) = self.by_scaler.get(&instance) else { continue };
                    self.forget_scaled(instance);
                    self.stop(instance, StopCause::NotNeeded, actions);
                }
                // Load beyond the function's maximum of instances is no lack of devices.
                HorizontalAction::Unmet { function, .. } if self.is_full(function) => {}
                HorizontalAction::Unmet { function, .. } => actions.push(PoolAction::Unmet { function }),
            }
        }
    }

    /// Whether a function has as many instances as it may have.
    fn is_full(&self, function: FunctionId) -> bool {
        let has = self.scaler.instances(function).map_or(0, |has| has.starting + has.ready);
        self.functions.get(&function).is_some_and(|of| has >= of.spec.max_instances)
    }

    fn demand(&self, function: FunctionId, point: &ProfilePoint) -> Demand {
        let limit = u32::from(point.sm.get()) * u32::from(self.config.sm_limit_factor);
        let limit = u16::try_from(limit).ok().and_then(SmShare::new).unwrap_or(SmShare::WHOLE);
        Demand::new(point.quota, point.sm)
            .with_sm_limit(limit)
            .with_memory(self.functions[&function].spec.memory_per_device())
            .with_function(function)
    }

    fn start(
        &mut self,
        function: FunctionId,
        scaled: InstanceId,
        point: &ProfilePoint,
        actions: &mut Vec<PoolAction>,
    ) {
        let Some(of) = self.functions.get(&function).filter(|of| !of.removed) else { return };
        let only = of
            .instances
            .iter()
            .all(|one| matches!(self.instances[one].state, State::Draining | State::Stopping));
        let demand = self.demand(function, point);
        match self.place_beside(function, &demand, None, &BTreeSet::new()) {
            Ok(placed) => {
                let instance =
                    self.insert(function, Some(scaled), demand, point.batch.max(1), point.throughput);
                for one in placed {
                    self.hold(instance, one.placement.id, one.placement.gpu);
                }
                self.order_start(instance, actions);
            }
            // A point within the size of some device may find room when other instances leave.
            Err(PackError::NoRoom { .. } | PackError::Memory { .. }) if only => {
                let instance =
                    self.insert(function, Some(scaled), demand, point.batch.max(1), point.throughput);
                self.want(instance);
                actions.push(PoolAction::Unmet { function });
            }
            Err(_) => {
                self.scale(HorizontalEvent::StartRefused { instance: scaled }, actions);
                self.no_room(function, point.setting(), actions);
            }
        }
    }

    /// Adds an instance without a place.
    pub(super) fn insert(
        &mut self,
        function: FunctionId,
        scaled: Option<InstanceId>,
        demand: Demand,
        capacity: u32,
        throughput: RequestRate,
    ) -> InstanceId {
        let of = Instance {
            function,
            scaled,
            state: State::WaitingForRoom,
            demand,
            capacity,
            throughput,
            placements: Vec::new(),
            home: BTreeSet::new(),
            node: None,
            requests: BTreeSet::new(),
            used: self.now,
            came: self.now,
        };
        let instance = self.names.give();
        if let Some(scaled) = scaled {
            self.by_scaler.insert(scaled, instance);
        }
        if let Some(function) = self.functions.get_mut(&function) {
            function.instances.insert(instance);
        }
        self.instances.insert(instance, of);
        instance
    }

    /// Books a placement for the instance.
    pub(super) fn hold(&mut self, instance: InstanceId, placement: PlacementId, gpu: GpuId) {
        self.by_placement.insert(placement, instance);
        let node = self.devices.get(&gpu).map(|device| device.node);
        if let Some(of) = self.instances.get_mut(&instance) {
            if of.placements.is_empty() {
                of.home.clear();
            }
            of.placements.push((placement, gpu));
            of.home.insert(gpu);
            of.node = of.node.or(node);
        }
    }

    /// Gives placements back to the packer.
    pub(super) fn release(&mut self, placements: Vec<(PlacementId, GpuId)>) {
        for (placement, gpu) in placements {
            self.by_placement.remove(&placement);
            // The packer knows every held placement.
            let _ = self.packer.release(placement);
            self.weights.leave(&mut *self.packer, placement, gpu);
            self.room_changed = true;
        }
    }

    /// The parts of the instance with their devices and shares.
    pub(super) fn parts(&self, of: &Instance) -> Vec<Part> {
        let share = self.share(of);
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
    fn share(&self, of: &Instance) -> GpuShare {
        let demand = &of.demand;
        let function = self.functions.get(&of.function);
        let training = function.and_then(|function| function.training_share());
        let twice = Quota::new(demand.quota.get().saturating_mul(2)).unwrap_or(Quota::WHOLE);
        let limit = function.and_then(|function| function.spec.time_limit);
        let most = limit.unwrap_or(twice).max(demand.quota);
        let elastic = QuotaRange::new(demand.quota, most).unwrap_or(QuotaRange::BEST_EFFORT);
        let time = training.map_or(elastic, |share| share.time());
        let memory = Some(demand.memory).filter(|memory| memory.get() > 0);
        GpuShare::new(time, demand.sm, demand.limit(), memory).unwrap_or(GpuShare::WHOLE)
    }

    /// Starts the processes of an instance that has its placements.
    pub(super) fn order_start(&mut self, instance: InstanceId, actions: &mut Vec<PoolAction>) {
        self.enter(instance, State::Starting);
        let Some(of) = self.instances.get(&instance) else { return };
        let (function, node) = (of.function, of.node);
        let from = node.map_or(Tier::Disk, |node| self.cache.tier(node, function));
        let spec = &self.functions[&function].spec;
        let takes = if from == Tier::Host { spec.load_host } else { spec.load_disk };
        let parts = self.parts(&self.instances[&instance]);
        actions.push(PoolAction::Order(PlatformAction::Start {
            instance,
            function,
            parts,
            from,
            takes,
            parked: false,
        }));
    }

    pub(super) fn reported(
        &mut self,
        instance: InstanceId,
        report: InstanceReport,
        actions: &mut Vec<PoolAction>,
    ) {
        // A report may cross an order, or come from a lost device: then it is out of date.
        let Some(of) = self.instances.get(&instance) else { return };
        let (state, function) = (of.state, of.function);
        match (report, state) {
            (InstanceReport::Ready, State::Starting) => self.ready(instance, actions),
            (InstanceReport::Refused, State::Starting) => self.refused(instance, actions),
            (InstanceReport::Parked, State::Parking) => {
                self.enter(instance, State::Parked);
                if let Some(of) = self.instances.get_mut(&instance) {
                    let placements = core::mem::take(&mut of.placements);
                    self.release(placements);
                }
                self.to_serve.insert(function);
            }
            (InstanceReport::Unparked, State::Unparking) => self.open(instance),
            (InstanceReport::Completed, _) => self.completed(instance, actions),
            // An instance stopped before its start reports the failed start.
            (InstanceReport::Gone | InstanceReport::Refused, _) => {
                self.gone(instance, actions);
                // A death during the start may recur, so the restart waits for the scaler's next report.
                if state != State::Starting {
                    self.keep_minimum(function, actions);
                }
            }
            _ => {}
        }
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
    fn open(&mut self, instance: InstanceId) {
        self.enter(instance, State::Ready);
        let Some(of) = self.instances.get_mut(&instance) else { return };
        (of.used, of.came) = (self.now, self.now);
        let (function, key) = (of.function, Self::open_key(instance, of));
        if let Some(of) = self.functions.get_mut(&function)
            && of.gang.is_none()
        {
            of.open.insert(key);
            self.to_serve.insert(function);
        }
    }

    fn ready(&mut self, instance: InstanceId, actions: &mut Vec<PoolAction>) {
        self.open(instance);
        let Some(of) = self.instances.get(&instance) else { return };
        let (function, node, scaled) = (of.function, of.node, of.scaled);
        if let Some(node) = node {
            let (bytes, mut orders) = (self.functions[&function].spec.memory, Vec::new());
            self.cache.loaded(node, function, bytes, &mut orders);
            actions.extend(orders.into_iter().map(PoolAction::Order));
        }
        self.gang_ready(function);
        if let Some(scaled) = scaled {
            self.scale(HorizontalEvent::InstanceReady { instance: scaled }, actions);
        }
    }

    fn refused(&mut self, instance: InstanceId, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.instances.get(&instance) else { return };
        let (function, scaled) = (of.function, of.scaled);
        self.forget_scaled(instance);
        self.gone(instance, actions);
        if let Some(scaled) = scaled {
            self.timers.set(Timer::Minimum(function), self.now.saturating_add(START_AGAIN));
            self.scale(HorizontalEvent::StartRefused { instance: scaled }, actions);
        }
    }

    /// Tells the host to end the instance.
    pub(super) fn stop(&mut self, instance: InstanceId, cause: StopCause, actions: &mut Vec<PoolAction>) {
        if self.instances.get(&instance).is_none_or(|of| of.state == State::Stopping) {
            return;
        }
        self.close(instance);
        if self.enter(instance, State::Stopping) == Some(State::WaitingForRoom) {
            // The host does not know the instance.
            self.gone(instance, actions);
        } else {
            self.unwant(instance);
            actions.push(PoolAction::Order(PlatformAction::Stop { instance, cause }));
        }
    }

    /// Gives the instance no more requests, and stops it after its last one.
    pub(super) fn drain(&mut self, instance: InstanceId, cause: StopCause, actions: &mut Vec<PoolAction>) {
        let Some(of) = self.instances.get(&instance) else { return };
        if matches!(of.state, State::Draining | State::Stopping) {
            return;
        }
        if of.requests.is_empty() {
            let ready = matches!(of.state, State::Ready | State::Emptying);
            if ready {
                actions.push(PoolAction::Order(PlatformAction::Drain { instance }));
            }
            self.stop(instance, cause, actions);
            return;
        }
        self.close(instance);
        self.enter(instance, State::Draining);
        actions.push(PoolAction::Order(PlatformAction::Drain { instance }));
    }

    /// Closes an instance to requests.
    pub(super) fn close(&mut self, instance: InstanceId) {
        let Some(of) = self.instances.get(&instance) else { return };
        let key = Self::open_key(instance, of);
        if let Some(of) = self.functions.get_mut(&of.function) {
            of.open.remove(&key);
        }
    }

    /// Removes the instance from the scaler's count.
    pub(super) fn forget_scaled(&mut self, instance: InstanceId) {
        if let Some(scaled) = self.instances.get_mut(&instance).and_then(|of| of.scaled.take()) {
            self.by_scaler.remove(&scaled);
        }
    }

    /// Forgets an instance that has ended entirely.
    pub(super) fn gone(&mut self, instance: InstanceId, actions: &mut Vec<PoolAction>) {
        self.close(instance);
        self.unwant(instance);
        let scaled = self.instances.get(&instance).and_then(|of| of.scaled);
        self.forget_scaled(instance);
        self.enter(instance, State::Stopping);
        let Some(of) = self.instances.remove(&instance) else { return };
        self.release(of.placements);
        if let Some(function) = self.functions.get_mut(&of.function) {
            function.instances.remove(&instance);
        }
        for request in of.requests {
            let Some(waits) = self.requests.get_mut(&request) else { continue };
            waits.on = None;
            if let Some(function) = self.functions.get_mut(&of.function) {
                function.queue.insert((waits.arrived, request));
            }
        }
        if let Some(scaled) = scaled {
            self.scale(HorizontalEvent::InstanceGone { instance: scaled }, actions);
        }
        self.gang_gone(of.function);
        self.to_serve.insert(of.function);
        self.drop_if_done(of.function);
    }
}
