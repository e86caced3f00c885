//! The ledger of instances: the life of each, by orders and reports, and the time in which its host must answer.
//!
//! A pool decides, and the ledger bounds. An instance that is not ready, parked, back or drained in time is stopped here, in every
//! regime; its pool learns of it with the report of the instance's end, as if its processes had died. A report that fits no order of
//! the instance is old, and no pool hears of it.

use super::cluster::Cluster;
use super::gpu_time::GpuTime;
use super::hash_table::Table;
use super::moves::Move;
use super::timers::Timers;
use super::{
    BTreeMap, Bytes, Duration, FunctionId, GpuId, InstanceReport, Life, Moving, Platform, PlatformAction,
    RequestId, StopCause, Timestamp,
};
use crate::platform::Part;
use gshare_core::InstanceId;
use std::collections::BTreeSet;

/// An instance known to the host.
#[derive(Debug, Clone)]
pub(super) struct Instance {
    pub(super) pool: usize,
    pub(super) function: FunctionId,
    pub(super) life: Life,
    /// Whether it is parked once its `Start` is done, or its `Park`: nothing of it is on a device.
    out: bool,
    /// Whether its processes live while it is parked.
    lives: bool,
    /// A `Park`, or an `Unpark`, that its host has not answered.
    pub(super) moving: Option<Moving>,
    /// Its last order to start or to move, and the time of that order.
    pub(super) last_move: Move,
    pub(super) ordered: Timestamp,
    /// How long its last return to living processes took, if it came back last.
    pub(super) came_in: Duration,
    /// Its parts; of a parked instance its parts before it was parked.
    parts: Vec<Part>,
    /// Memory and processes booked for its tenant.
    memory: Bytes,
    processes: u32,
    /// The use of the instance's share by its requests.
    pub(super) time: GpuTime,
    /// Requests that run on the instance, in the order of their names.
    pub(super) requests: Vec<RequestId>,
}

impl Instance {
    /// Its parts on devices; none while it is parked.
    pub(super) fn parts(&self) -> &[Part] {
        if self.out { &[] } else { &self.parts }
    }

    /// The devices of its living processes while it is parked; empty without them.
    pub(super) fn homes(&self) -> BTreeSet<GpuId> {
        let parts = if self.out && self.lives { &self.parts[..] } else { &[] };
        parts.iter().map(|part| part.gpu).collect()
    }

    /// Whether its processes live on the devices of these parts.
    pub(super) fn returns_to(&self, parts: &[Part]) -> bool {
        let homes = self.homes();
        !homes.is_empty() && parts.iter().all(|part| homes.contains(&part.gpu))
    }

    /// Whether it counts towards its function's minimum.
    pub(super) const fn stays(&self) -> bool {
        !matches!(self.life, Life::Draining | Life::Stopped)
    }
}

/// A step that an instance must finish in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Start,
    /// To be parked, or to come back.
    Move,
    Drain,
}

/// All instances known to the host.
#[derive(Debug, Default)]
pub(super) struct Instances {
    /// The number of the next instance.
    next: u64,
    all: Table<InstanceId, Instance>,
    due: Timers<(InstanceId, Due)>,
    on: BTreeMap<GpuId, BTreeSet<InstanceId>>,
}

impl Instances {
    /// The name of a new instance.
    pub(super) const fn name(&mut self) -> InstanceId {
        self.next += 1;
        InstanceId::new(self.next - 1)
    }

    /// Whether an instance ever had this name.
    pub(super) const fn was_named(&self, instance: InstanceId) -> bool {
        instance.number() < self.next
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// All instances in the order of their names.
    pub(super) fn sorted(&self) -> Vec<(InstanceId, &Instance)> {
        self.all.sorted()
    }

    pub(super) fn get_mut(&mut self, instance: InstanceId) -> Option<&mut Instance> {
        self.all.get_mut(&instance)
    }

    pub(super) fn get(&self, instance: InstanceId) -> Option<&Instance> {
        self.all.get(&instance)
    }

    /// The instances with a part on the device, or parked from it.
    pub(super) fn on(&self, gpu: GpuId) -> impl Iterator<Item = InstanceId> {
        self.on.get(&gpu).into_iter().flatten().copied()
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.due.next()
    }

    /// Ends the time limit of the instance's step.
    fn answered(&mut self, instance: InstanceId) {
        for due in [Due::Start, Due::Move, Due::Drain] {
            self.due.clear((instance, due));
        }
    }

    fn insert(&mut self, instance: InstanceId, of: Instance) {
        for part in &of.parts {
            self.on.entry(part.gpu).or_default().insert(instance);
        }
        self.all.insert(instance, of);
    }

    /// Records an instance's new parts.
    fn moved(&mut self, instance: InstanceId, parts: &[Part]) {
        let Some(of) = self.all.get_mut(&instance) else { return };
        for part in core::mem::replace(&mut of.parts, parts.to_vec()) {
            if let Some(on) = self.on.get_mut(&part.gpu) {
                on.remove(&instance);
            }
        }
        for part in parts {
            self.on.entry(part.gpu).or_default().insert(instance);
        }
    }

    fn remove(&mut self, instance: InstanceId) -> Option<Instance> {
        self.answered(instance);
        let of = self.all.remove(&instance)?;
        for part in &of.parts {
            if let Some(on) = self.on.get_mut(&part.gpu) {
                on.remove(&instance);
            }
        }
        Some(of)
    }
}

/// The guaranteed memory and area of all parts.
fn sums(parts: &[Part]) -> (Bytes, u64) {
    let memory =
        parts.iter().filter_map(|part| part.share.memory()).map(Bytes::get).fold(0, u64::saturating_add);
    let area = |part: &Part| u64::from(part.share.time().request().get()) * u64::from(part.share.sm().get());
    (Bytes(memory), parts.iter().map(area).fold(0, u64::saturating_add))
}

impl Cluster {
    /// Notes a pool's order, and passes it on to the host. False: it does not stand, since its instance is stopped or lost, or its
    /// tenant may not have it.
    pub(super) fn order(&mut self, order: PlatformAction) -> bool {
        let stands = match &order {
            PlatformAction::Start { .. } => self.book(&order),
            PlatformAction::Reject { request, .. } => {
                self.ended(*request, None);
                true
            }
            PlatformAction::Dispatch { request, instance } => self.dispatched(*request, *instance),
            order => order.instance().is_none_or(|instance| self.ordered(instance, order)),
        };
        if stands {
            self.orders.push(order);
        }
        stands
    }

    /// Notes a pool's order for an instance. False: the instance is stopped or lost, and its pool does not know that yet.
    fn ordered(&mut self, instance: InstanceId, order: &PlatformAction) -> bool {
        let Some(of) = self.instances.get_mut(instance).filter(|of| of.life != Life::Stopped) else {
            return false;
        };
        match order {
            PlatformAction::Park { keeps, .. } => {
                of.moving = Some(Moving::Out);
                (of.last_move, of.ordered) = (Move::Park { keeps: *keeps }, self.now);
                // A draining instance stays one.
                if of.life == Life::Ready {
                    of.life = Life::Parked;
                }
                self.give_time(instance, Due::Move, Duration::ZERO);
            }
            PlatformAction::Unpark { parts, takes, .. } => {
                of.last_move = if of.returns_to(parts) { Move::Return } else { Move::Start(*takes) };
                (of.moving, of.out, of.ordered) = (Some(Moving::In), false, self.now);
                self.instances.moved(instance, parts);
                self.give_time(instance, Due::Move, *takes);
            }
            PlatformAction::Drain { .. } => {
                self.ends(instance, Life::Draining);
                self.give_time(instance, Due::Drain, Duration::ZERO);
            }
            PlatformAction::Stop { .. } => self.ends(instance, Life::Stopped),
            _ => {}
        }
        true
    }

    /// The instance drains or stops, and is no part of its function's minimum any more.
    fn ends(&mut self, instance: InstanceId, life: Life) {
        let Some(of) = self.instances.get_mut(instance) else { return };
        let (stayed, function) = (of.stays(), of.function);
        of.life = life;
        if life == Life::Stopped {
            self.instances.answered(instance);
        }
        if stayed {
            self.stays_no_more(function);
        }
    }

    fn stays_no_more(&mut self, function: FunctionId) {
        if let Some(of) = self.functions.get_mut(&function) {
            of.staying -= 1;
        }
        self.has_fewer(function);
    }

    /// The instances of a removed function must end in time, whether its pool drains them now or later.
    pub(super) fn drain_all_of(&mut self, function: FunctionId) {
        let all = self.functions.get(&function).map(|of| of.instances.clone()).unwrap_or_default();
        for instance in all {
            let lives = self.instances.get(instance).is_some_and(|of| of.life != Life::Stopped);
            if lives && !self.instances.due.has((instance, Due::Drain)) {
                self.give_time(instance, Due::Drain, Duration::ZERO);
            }
        }
    }

    /// Gives the host the time of the bound for this, or twice the expected time where that is longer.
    fn give_time(&mut self, instance: InstanceId, due: Due, expected: Duration) {
        let bound = match due {
            Due::Start => self.config.start_timeout,
            Due::Move => self.config.park_timeout,
            Due::Drain => self.config.drain_timeout,
        };
        let time = bound.max(expected.saturating_mul(2));
        self.instances.due.set((instance, due), self.now.saturating_add(time));
    }

    /// Stops the instances that have missed their time limit.
    pub(super) fn stop_overdue(&mut self) {
        while let Some((instance, due)) = self.instances.due.pop(self.now) {
            self.ends(instance, Life::Stopped);
            let cause = if due == Due::Drain { StopCause::DrainTimedOut } else { StopCause::TimedOut };
            self.orders.push(PlatformAction::Stop { instance, cause });
        }
    }

    /// Takes a new instance in. False: its tenant may not have as much memory or as many processes, so that its start is refused.
    fn book(&mut self, start: &PlatformAction) -> bool {
        let PlatformAction::Start { instance, function, parts, takes, parked, .. } = start else {
            return false;
        };
        let all = self.devices.memory();
        let Some(of) = self.functions.get_mut(function) else { return false };
        let (memory, area) = sums(parts);
        // A spread model has one process.
        let processes = if of.spec.devices > 1 { 1 } else { u32::try_from(parts.len()).unwrap_or(u32::MAX) };
        if !self.tenants.book(of.spec.tenant, memory, processes, all) {
            of.stats.unmet += 1;
            self.refused.push_back((of.pool, *instance));
            self.start_failed(*function);
            return false;
        }
        of.instances.insert(*instance);
        of.staying += 1;
        of.stats.starts += 1;
        of.unmet_at = None;
        let new = Instance {
            pool: of.pool,
            function: *function,
            life: Life::Starting,
            out: *parked,
            lives: false,
            moving: None,
            last_move: if *parked { Move::Nothing } else { Move::Start(*takes) },
            ordered: self.now,
            came_in: Duration::ZERO,
            parts: parts.clone(),
            memory,
            processes,
            time: GpuTime::new(area, self.now),
            requests: Vec::new(),
        };
        self.instances.insert(*instance, new);
        self.give_time(*instance, Due::Start, *takes);
        // It counts towards a minimum that is not met.
        if self.lacking.contains(function) || self.pauses(*function) {
            self.has_fewer(*function);
        }
        true
    }

    /// Notes a report about a living instance. False: it fits no order of the instance.
    fn heard(&mut self, instance: InstanceId, report: InstanceReport) -> bool {
        let Some(of) = self.instances.get_mut(instance) else { return false };
        match (report, of.life, of.moving) {
            // The order to stop was faster.
            (_, Life::Stopped, _) => return false,
            (InstanceReport::Ready, Life::Starting, _) => {
                of.life = if of.out { Life::Parked } else { Life::Ready };
                self.instances.due.clear((instance, Due::Start));
            }
            (InstanceReport::Parked | InstanceReport::Unloaded, _, Some(Moving::Out)) => {
                (of.moving, of.out, of.lives) = (None, true, report == InstanceReport::Parked);
                self.instances.due.clear((instance, Due::Move));
                // Its memory is free.
                self.look = true;
            }
            (InstanceReport::Unparked, life, Some(Moving::In)) => {
                of.moving = None;
                if life == Life::Parked {
                    of.life = Life::Ready;
                }
                self.instances.due.clear((instance, Due::Move));
            }
            _ => return false,
        }
        self.learn_move(instance, report);
        true
    }

    /// Forgets an instance without a process on the host; its requests are still on it.
    fn forget(&mut self, instance: InstanceId) -> Option<Instance> {
        let of = self.instances.remove(instance)?;
        self.version += 1;
        if of.stays() {
            self.stays_no_more(of.function);
        }
        self.look = true;
        if let Some(known) = self.functions.get_mut(&of.function) {
            known.instances.remove(&instance);
            self.tenants.unbook(known.spec.tenant, of.memory, of.processes);
        }
        Some(of)
    }
}

impl Platform {
    pub(super) fn reported(&mut self, instance: InstanceId, report: InstanceReport) {
        match report {
            InstanceReport::Gone | InstanceReport::Refused | InstanceReport::Completed => {
                let Some(of) = self.forget(instance) else { return };
                // Timers that were due before this report may have given it orders, which no host can carry out now.
                self.cluster.orders.retain(|order| order.instance() != Some(instance));
                if of.life == Life::Starting {
                    self.cluster.start_failed(of.function);
                    if let Some(function) = self.cluster.functions.get_mut(&of.function) {
                        function.fails = true;
                    }
                }
                self.tell(of.pool, |pool, cluster| pool.gone(cluster, instance, report));
                self.instance_gone(of.function);
            }
            _ if self.cluster.heard(instance, report) => {
                let Some(pool) = self.cluster.instances.get(instance).map(|of| of.pool) else { return };
                let report = if report == InstanceReport::Unloaded { InstanceReport::Parked } else { report };
                self.tell(pool, |pool, cluster| pool.reported(cluster, instance, report));
            }
            _ => {}
        }
    }

    /// Forgets an instance that has ended, with its requests. A gone instance has no more to report.
    fn forget(&mut self, instance: InstanceId) -> Option<Instance> {
        let mut of = self.cluster.forget(instance)?;
        self.lose_requests_of(&mut of);
        Some(of)
    }

    /// Forgets the instances of a lost device and tells its pool.
    pub(super) fn lose_instances_on(&mut self, pool: usize, gpu: GpuId) {
        let on: Vec<InstanceId> = self.cluster.instances.on(gpu).collect();
        let (mut lost, mut functions) = (Vec::new(), BTreeSet::new());
        for instance in on {
            let Some(of) = self.forget(instance) else { continue };
            functions.insert(of.function);
            lost.push(instance);
        }
        self.cluster.instances.on.remove(&gpu);
        self.tell(pool, |pool, cluster| pool.device_lost(cluster, gpu, &lost));
        for function in functions {
            self.instance_gone(function);
        }
    }
}
