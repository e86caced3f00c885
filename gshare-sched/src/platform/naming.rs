//! Instances by the platform's names and by their pools'.

use super::gpu_time::GpuTime;
use super::{
    BTreeMap, Bytes, FunctionId, GpuId, InstanceReport, Platform, PlatformAction, PoolEvent, RequestId,
};
use crate::platform::Part;
use gshare_core::InstanceId;
use std::collections::BTreeSet;

/// An instance known to the host.
#[derive(Debug, Clone)]
pub(super) struct Named {
    pub(super) pool: usize,
    /// The pool's name of the instance.
    pub(super) inside: InstanceId,
    pub(super) function: FunctionId,
    /// The devices of its parts, now or before it was parked.
    pub(super) devices: BTreeSet<GpuId>,
    /// Memory booked for its tenant.
    pub(super) memory: Bytes,
    /// The use of the instance's share by its requests.
    pub(super) time: GpuTime,
    /// Requests dispatched to the instance; some may be elsewhere by now.
    pub(super) requests: BTreeSet<RequestId>,
}

/// The tables between the two kinds of names.
#[derive(Debug)]
pub(super) struct Instances {
    named: BTreeMap<InstanceId, Named>,
    outside: Vec<BTreeMap<InstanceId, InstanceId>>,
    on: BTreeMap<GpuId, BTreeSet<InstanceId>>,
    next: u64,
}

impl Instances {
    pub(super) fn new(pools: usize) -> Self {
        Self { named: BTreeMap::new(), outside: vec![BTreeMap::new(); pools], on: BTreeMap::new(), next: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.named.len()
    }

    pub(super) fn get_mut(&mut self, instance: InstanceId) -> Option<&mut Named> {
        self.named.get_mut(&instance)
    }

    pub(super) fn get(&self, instance: InstanceId) -> Option<&Named> {
        self.named.get(&instance)
    }

    /// The platform's name of a pool's instance, once the host knows the instance.
    pub(super) fn outside(&self, pool: usize, inside: InstanceId) -> Option<InstanceId> {
        self.outside.get(pool)?.get(&inside).copied()
    }

    /// Whether an instance ever had this name.
    pub(super) const fn was_named(&self, instance: InstanceId) -> bool {
        instance.number() < self.next
    }

    pub(super) fn of_function(&self, function: FunctionId) -> u32 {
        let count = self.named.values().filter(|of| of.function == function).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn insert(&mut self, of: Named) -> InstanceId {
        let instance = InstanceId::new(self.next);
        self.next += 1;
        self.outside[of.pool].insert(of.inside, instance);
        for &gpu in &of.devices {
            self.on.entry(gpu).or_default().insert(instance);
        }
        self.named.insert(instance, of);
        instance
    }

    /// Records an instance's new parts.
    fn moved(&mut self, instance: InstanceId, parts: &[Part]) {
        let Some(of) = self.named.get_mut(&instance) else { return };
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

    fn remove(&mut self, instance: InstanceId) -> Option<Named> {
        let of = self.named.remove(&instance)?;
        self.outside[of.pool].remove(&of.inside);
        for gpu in &of.devices {
            if let Some(on) = self.on.get_mut(gpu) {
                on.remove(&instance);
            }
        }
        Some(of)
    }

    /// Removes the instances of a lost device and returns them.
    pub(super) fn lose(&mut self, gpu: GpuId) -> Vec<(InstanceId, Named)> {
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
    /// Passes a pool's order on, with the platform's names.
    pub(super) fn pass_on(
        &mut self,
        pool: usize,
        mut order: PlatformAction,
        actions: &mut Vec<PlatformAction>,
    ) {
        match &mut order {
            PlatformAction::Start { instance, function, parts, .. } => {
                let Some(named) = self.name(pool, *instance, *function, parts) else { return };
                *instance = named;
            }
            PlatformAction::Unpark { instance, .. }
            | PlatformAction::Park { instance }
            | PlatformAction::Drain { instance }
            | PlatformAction::Stop { instance, .. }
            | PlatformAction::Dispatch { instance, .. } => {
                let Some(named) = self.instances.outside(pool, *instance) else { return };
                *instance = named;
            }
            _ => {}
        }
        match &order {
            PlatformAction::Unpark { instance, parts, .. } => self.instances.moved(*instance, parts),
            PlatformAction::Dispatch { request, instance } => self.dispatched(*request, *instance),
            PlatformAction::Reject { request, .. } => self.ended(*request, false),
            _ => {}
        }
        actions.push(order);
    }

    /// Names a new instance, unless its tenant may not have as much memory.
    fn name(
        &mut self,
        pool: usize,
        inside: InstanceId,
        function: FunctionId,
        parts: &[Part],
    ) -> Option<InstanceId> {
        let all = self.memory();
        let of = self.functions.get_mut(&function)?;
        let (memory, area) = sums(parts);
        let time = GpuTime::new(area, self.now);
        if !self.tenants.book(of.spec.tenant, memory, all) {
            of.stats.unmet += 1;
            let report = InstanceReport::Refused;
            self.answers.push_back((pool, PoolEvent::Instance { instance: inside, report }));
            return None;
        }
        of.instances += 1;
        of.stats.starts += 1;
        let devices = parts.iter().map(|part| part.gpu).collect();
        Some(self.instances.insert(Named {
            pool,
            inside,
            function,
            devices,
            memory,
            time,
            requests: BTreeSet::new(),
        }))
    }

    pub(super) fn reported(
        &mut self,
        instance: InstanceId,
        report: InstanceReport,
        actions: &mut Vec<PlatformAction>,
    ) {
        // A gone instance, or an instance lost with its device, has no more to report.
        let Some(of) = self.instances.get(instance) else { return };
        let (pool, inside) = (of.pool, of.inside);
        let over =
            matches!(report, InstanceReport::Gone | InstanceReport::Refused | InstanceReport::Completed);
        if over && let Some(of) = self.instances.remove(instance) {
            self.forget_instance(instance, of);
        }
        self.inform(pool, PoolEvent::Instance { instance: inside, report }, actions);
    }

    /// Forgets an instance of which the host has no process any more.
    pub(super) fn forget_instance(&mut self, instance: InstanceId, mut of: Named) {
        self.lose_requests_of(instance, &mut of);
        let function = of.function;
        if let Some(known) = self.functions.get_mut(&function) {
            known.instances = known.instances.saturating_sub(1);
            self.tenants.unbook(known.spec.tenant, of.memory);
        }
        self.drop_if_done(function);
    }
}
