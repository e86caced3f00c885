//! Evicted models with living processes.
//!
//! The memory of an evicted model goes to host memory, and its next load on the device is a copy back; where a start takes less time than
//! the copies, its processes end instead. Parked copies of a device take at most as much host memory as the device has, and are so few
//! that their contexts leave room for models; the first to be parked end first. A function with a minimum parks nothing, because its
//! minimum is a model on a device. Nor does a tenant with a bound on its processes or memory, which counts parked instances too.

use super::devices::{ModelCopy, Phase};
use super::{Cluster, FunctionId, GpuId, InstanceId, WholePool};
use crate::platform::{Life, Moving, PlatformAction, StopCause};
use gshare_core::TenantId;

/// A device parks one copy for this much of its memory. A context takes some 0.5 GiB of the device, and no book has it.
const MEMORY_PER_PARKED: u64 = 4 << 30;

impl WholePool {
    /// Whether the processes of an evicted copy live on.
    pub(super) fn may_park(&self, function: FunctionId, cluster: &Cluster) -> bool {
        let spec = &cluster.functions[&function].spec;
        let counts = spec.min_instances > 0 || cluster.tenants.bounds_instances(spec.tenant);
        self.config.park && !counts && cluster.keeps(function)
    }

    /// The memory of an evicted copy has left the device.
    pub(super) fn parked(
        &mut self,
        instance: InstanceId,
        gpu: GpuId,
        function: FunctionId,
        cluster: &mut Cluster,
    ) {
        let on = self.devices.g_mut(gpu);
        let Some(found) = on.copies.iter().position(|copy| copy.instance == Some(instance)) else { return };
        let copy = on.copies.remove(found);
        on.evicting -= copy.bytes;
        on.free += copy.bytes;
        self.devices.park(gpu, copy);
        let on = self.devices.g(gpu);
        // The copy that comes back into this room is out of host memory soon.
        let returning = match on.phase {
            Phase::MakingRoom { function, .. } => Some(function),
            _ => None,
        };
        let stay: Vec<ModelCopy> =
            on.parked.iter().filter(|copy| Some(copy.function) != returning).copied().collect();
        let (memory, most) = (on.memory, (on.memory / MEMORY_PER_PARKED).max(1));
        let (mut bytes, mut count) = (stay.iter().map(|copy| copy.bytes).sum::<u64>(), stay.len() as u64);
        for first in stay {
            if bytes <= memory && count <= most {
                break;
            }
            (bytes, count) = (bytes - first.bytes, count - 1);
            self.end_parked(first.instance, StopCause::Evicted, cluster);
        }
        if cluster.instances.get(instance).is_none_or(|of| of.homes().is_empty()) {
            self.devices.f_mut(function).parks = false;
            self.end_parked(Some(instance), StopCause::Evicted, cluster);
        }
        self.load_if_room(gpu, cluster);
        self.left(function, cluster);
    }

    /// Ends parked copies of the function, this many at most.
    pub(super) fn end_parked_of(
        &mut self,
        function: FunctionId,
        most: usize,
        cause: StopCause,
        cluster: &mut Cluster,
    ) {
        let of = cluster.functions.get(&function);
        let parked = of.into_iter().flat_map(|of| &of.instances).filter(|one| is_parked(**one, cluster));
        let parked: Vec<InstanceId> = parked.take(most).copied().collect();
        for instance in parked {
            self.end_parked(Some(instance), cause, cluster);
        }
    }

    /// Ends the parked copies of a tenant.
    pub(super) fn end_parked_of_tenant(&mut self, tenant: TenantId, cluster: &mut Cluster) {
        let all = self.devices.functions.sorted().into_iter();
        let own: Vec<FunctionId> =
            all.filter(|(_, of)| of.tenant == tenant).map(|(function, _)| function).collect();
        for function in own {
            self.end_parked_of(function, usize::MAX, StopCause::Evicted, cluster);
        }
    }

    /// Ends a copy that is parked, or on its way.
    fn end_parked(&mut self, instance: Option<InstanceId>, cause: StopCause, cluster: &mut Cluster) {
        let Some(instance) = instance.filter(|one| is_parked(*one, cluster)) else { return };
        end(instance, cause, cluster);
        let Some(&(gpu, function)) = self.places.get(&instance) else { return };
        // The ledger counts it for its tenant until it is gone. A copy on its way counts as one that leaves already.
        if self.devices.unpark(gpu, |copy| copy.instance == Some(instance)).is_some() {
            self.ends.insert(instance);
            let tenant = self.devices.f(function).tenant;
            self.devices.tenant(tenant).leaving += 1;
        }
    }
}

/// Whether the instance's memory is in host memory, or on its way there.
pub(super) fn is_parked(instance: InstanceId, cluster: &Cluster) -> bool {
    let of = cluster.instances.get(instance);
    of.is_some_and(|of| of.life == Life::Parked && of.moving != Some(Moving::In))
}

pub(super) fn end(instance: InstanceId, cause: StopCause, cluster: &mut Cluster) {
    cluster.order(PlatformAction::Drain { instance });
    cluster.order(PlatformAction::Stop { instance, cause });
}
