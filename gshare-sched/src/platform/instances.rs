//! The ledger of instances: the life of each, by orders and reports, and the time in which its host must answer.
//!
//! A pool decides, and the ledger bounds. An instance that is not ready, parked, back or drained in time is stopped here, in every
//! regime; its pool learns of it with the report of the instance's end, as if its processes had died.

use super::gpu_time::GpuTime;
use super::timers::Timers;
use super::{
    BTreeMap, Bytes, Duration, FunctionId, GpuId, InstanceNames, InstanceReport, Life, Platform,
    PlatformAction, PoolEvent, RequestId, StopCause, Timestamp,
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
    /// Whether its `Start` leaves it parked.
    starts_parked: bool,
    /// The devices of its parts, now or before it was parked.
    pub(super) devices: BTreeSet<GpuId>,
    /// Memory and processes booked for its tenant.
    pub(super) memory: Bytes,
    processes: u32,
    /// The use of the instance's share by its requests.
    pub(super) time: GpuTime,
    /// Requests that run on the instance.
    pub(super) requests: BTreeSet<RequestId>,
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
    pub(super) names: InstanceNames,
    all: BTreeMap<InstanceId, Instance>,
    due: Timers<(InstanceId, Due)>,
    on: BTreeMap<GpuId, BTreeSet<InstanceId>>,
}

impl Instances {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get_mut(&mut self, instance: InstanceId) -> Option<&mut Instance> {
        self.all.get_mut(&instance)
    }

    pub(super) fn get(&self, instance: InstanceId) -> Option<&Instance> {
        self.all.get(&instance)
    }

    pub(super) fn of_function(&self, function: FunctionId) -> impl Iterator<Item = InstanceId> {
        self.all.iter().filter(move |(_, of)| of.function == function).map(|(instance, _)| *instance)
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
        for &gpu in &of.devices {
            self.on.entry(gpu).or_default().insert(instance);
        }
        self.all.insert(instance, of);
    }

    /// Records an instance's new parts.
    fn moved(&mut self, instance: InstanceId, parts: &[Part]) {
        let Some(of) = self.all.get_mut(&instance) else { return };
        let devices: BTreeSet<GpuId> = parts.iter().map(|part| part.gpu).collect();
        for gpu in core::mem::replace(&mut of.devices, devices.clone()) {
            if let Some(on) = self.on.get_mut(&gpu) {
                on.remove(&instance);
            }
        }
        for gpu in devices {
            self.on.entry(gpu).or_default().insert(instance);
        }
    }

    fn remove(&mut self, instance: InstanceId) -> Option<Instance> {
        self.answered(instance);
        let of = self.all.remove(&instance)?;
        for gpu in &of.devices {
            if let Some(on) = self.on.get_mut(gpu) {
                on.remove(&instance);
            }
        }
        Some(of)
    }

    /// Removes the instances of a lost device and returns them.
    pub(super) fn lose(&mut self, gpu: GpuId) -> Vec<(InstanceId, Instance)> {
        let on = self.on.remove(&gpu).unwrap_or_default();
        on.into_iter().filter_map(|instance| Some((instance, self.remove(instance)?))).collect()
    }
}

/// The guaranteed memory and area of all parts.
fn sums(parts: &[Part]) -> (Bytes, u64) {
    let memory =
        parts.iter().filter_map(|part| part.share.memory()).map(Bytes::get).fold(0, u64::saturating_add);
    let area = |part: &Part| u64::from(part.share.time().request().get()) * u64::from(part.share.sm().get());
    (Bytes(memory), parts.iter().map(area).fold(0, u64::saturating_add))
}

impl Platform {
    /// Notes a pool's order, and passes it on to the host.
    pub(super) fn pass_on(&mut self, pool: usize, order: PlatformAction, actions: &mut Vec<PlatformAction>) {
        let stands = match &order {
            PlatformAction::Start { .. } => self.book(pool, &order),
            PlatformAction::Reject { request, .. } => {
                self.ended(*request, false);
                true
            }
            order => order.instance().is_none_or(|instance| self.ordered(instance, order)),
        };
        if stands {
            actions.push(order);
        }
    }

    /// Notes a pool's order for an instance. False: the instance is stopped or lost, and its pool does not know that yet.
    fn ordered(&mut self, instance: InstanceId, order: &PlatformAction) -> bool {
        let Some(of) = self.instances.get_mut(instance).filter(|of| of.life != Life::Stopped) else {
            return false;
        };
        match order {
            PlatformAction::Park { .. } => {
                // A draining instance stays one.
                if of.life == Life::Ready {
                    of.life = Life::Parked;
                }
                self.give_time(instance, Due::Move, Duration::ZERO);
            }
            PlatformAction::Unpark { parts, takes, .. } => {
                self.instances.moved(instance, parts);
                self.give_time(instance, Due::Move, *takes);
            }
            PlatformAction::Drain { .. } => {
                of.life = Life::Draining;
                self.give_time(instance, Due::Drain, Duration::ZERO);
            }
            PlatformAction::Stop { .. } => {
                of.life = Life::Stopped;
                self.instances.answered(instance);
            }
            PlatformAction::Dispatch { request, .. } => self.dispatched(*request, instance),
            _ => {}
        }
        true
    }

    /// The instances of a removed function must end in time, whether its pool drains them now or later.
    pub(super) fn drain_all_of(&mut self, function: FunctionId) {
        let drains = |instance: &InstanceId| {
            let lives = self.instances.get(*instance).is_some_and(|of| of.life != Life::Stopped);
            lives && !self.instances.due.has((*instance, Due::Drain))
        };
        let all: Vec<InstanceId> = self.instances.of_function(function).filter(drains).collect();
        for instance in all {
            self.give_time(instance, Due::Drain, Duration::ZERO);
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
    pub(super) fn stop_overdue(&mut self, actions: &mut Vec<PlatformAction>) {
        while let Some((instance, due)) = self.instances.due.pop(self.now) {
            let Some(of) = self.instances.get_mut(instance) else { continue };
            of.life = Life::Stopped;
            self.instances.answered(instance);
            let cause = if due == Due::Drain { StopCause::DrainTimedOut } else { StopCause::TimedOut };
            actions.push(PlatformAction::Stop { instance, cause });
        }
    }

    /// Takes a new instance in. False: its tenant may not have as much memory or as many processes, so that its start is refused.
    fn book(&mut self, pool: usize, start: &PlatformAction) -> bool {
        let PlatformAction::Start { instance, function, parts, takes, parked, .. } = start else {
            return false;
        };
        let all = self.memory();
        let Some(of) = self.functions.get_mut(function) else { return false };
        let (memory, area) = sums(parts);
        // A spread model has one process.
        let processes = if of.spec.devices > 1 { 1 } else { u32::try_from(parts.len()).unwrap_or(u32::MAX) };
        if !self.tenants.book(of.spec.tenant, memory, processes, all) {
            of.stats.unmet += 1;
            let (instance, report) = (*instance, InstanceReport::Refused);
            self.answers.push_back((pool, PoolEvent::Instance { instance, report }));
            return false;
        }
        of.instances += 1;
        of.stats.starts += 1;
        let new = Instance {
            pool,
            function: *function,
            life: Life::Starting,
            starts_parked: *parked,
            devices: parts.iter().map(|part| part.gpu).collect(),
            memory,
            processes,
            time: GpuTime::new(area, self.now),
            requests: BTreeSet::new(),
        };
        self.instances.insert(*instance, new);
        self.give_time(*instance, Due::Start, *takes);
        true
    }

    pub(super) fn reported(
        &mut self,
        instance: InstanceId,
        report: InstanceReport,
        actions: &mut Vec<PlatformAction>,
    ) {
        // A gone instance, or an instance lost with its device, has no more to report.
        let Some(of) = self.instances.get_mut(instance) else { return };
        let pool = of.pool;
        match (report, of.life) {
            // The order to stop was faster.
            (InstanceReport::Ready | InstanceReport::Parked | InstanceReport::Unparked, Life::Stopped) => {
                return;
            }
            (InstanceReport::Ready, Life::Starting) => {
                of.life = if of.starts_parked { Life::Parked } else { Life::Ready };
                self.instances.due.clear((instance, Due::Start));
            }
            (InstanceReport::Parked | InstanceReport::Unparked, life) => {
                if (report, life) == (InstanceReport::Unparked, Life::Parked) {
                    of.life = Life::Ready;
                }
                self.instances.due.clear((instance, Due::Move));
            }
            _ => {}
        }
        let over =
            matches!(report, InstanceReport::Gone | InstanceReport::Refused | InstanceReport::Completed);
        if over && let Some(of) = self.instances.remove(instance) {
            self.forget_instance(instance, of, actions);
        }
        self.inform(pool, PoolEvent::Instance { instance, report }, actions);
    }

    /// Forgets an instance of which the host has no process any more.
    pub(super) fn forget_instance(
        &mut self,
        instance: InstanceId,
        mut of: Instance,
        actions: &mut Vec<PlatformAction>,
    ) {
        self.lose_requests_of(instance, &mut of, actions);
        let function = of.function;
        if let Some(known) = self.functions.get_mut(&function) {
            known.instances = known.instances.saturating_sub(1);
            self.tenants.unbook(known.spec.tenant, of.memory, of.processes);
        }
        self.drop_if_done(function);
    }
}
