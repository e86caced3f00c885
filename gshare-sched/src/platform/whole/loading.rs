//! Loads and the evictions for them, up to an instance's end.

use super::devices::{CopyState, ModelCopy, Phase, Room};
use super::parked_copies::{end, is_parked};
use super::queue::Place;
use super::{Cluster, FunctionId, GpuId, InstanceId, WholePool};
use crate::Tier;
use crate::platform::{Part, PlatformAction, Rejection, StopCause};
use gshare_core::dag::ComponentSet;
use gshare_core::resource::QuotaRange;
use gshare_core::share::GpuShare;
use gshare_core::{Bytes, Duration, RequestId, SmShare};

impl WholePool {
    /// Parks or stops the instance of a copy.
    pub(super) fn evict(&mut self, gpu: GpuId, function: FunctionId, cluster: &mut Cluster) {
        let Some(copy) = self.devices.g(gpu).cached(function).copied() else { return };
        let Some(instance) = copy.instance else { return };
        self.devices.unfile_copy(gpu, &copy);
        let tenant = self.devices.f(function).tenant;
        self.devices.tenant(tenant).leaving += 1;
        let on = self.devices.g_mut(gpu);
        on.evicting += copy.bytes;
        if let Some(copy) = on.cached_mut(function) {
            (copy.state, copy.kept) = (CopyState::Evicting, false);
        }
        let of = cluster.functions.get(&function).filter(|_| !cluster.is_removed(function));
        match of {
            None => end(instance, StopCause::Removed, cluster),
            Some(of) if of.staying > of.spec.max_instances => end(instance, StopCause::Drained, cluster),
            Some(_) if self.may_park(function, cluster) => {
                self.devices.f_mut(function).parks = true;
                cluster.order(PlatformAction::Park { instance, keeps: true });
            }
            Some(_) => end(instance, StopCause::Evicted, cluster),
        }
        self.keep(function, cluster);
    }

    /// Gives a device an ask that waits there for its model to be loaded.
    pub(super) fn miss(&mut self, slot: u32, room: &Room, cluster: &mut Cluster) {
        let (gpu, function) = (room.gpu, room.function);
        let now = self.devices.now;
        self.devices.missed.count(now);
        for &(other, victim) in &room.surrendered {
            self.evict(other, victim, cluster);
        }
        for victim in &room.victims {
            self.evict(gpu, *victim, cluster);
        }
        self.make_room(gpu, function, slot);
        self.devices.uses += 1;
        let (bytes, used) = (self.devices.f(function).bytes, self.devices.uses);
        let state = CopyState::Loading;
        let copy = ModelCopy { function, bytes, state, instance: None, users: 1, used, kept: false };
        self.devices.file_copy(gpu, copy);
        self.load_if_room(gpu, cluster);
    }

    /// The device makes room for the ask's model.
    fn make_room(&mut self, gpu: GpuId, function: FunctionId, slot: u32) {
        let on = self.devices.g(gpu);
        let (load, infer) = (self.devices.load_ns(function, on), self.devices.infer_ns(function, on.kind));
        let until = self.devices.now.saturating_add(Duration::from_nanos(load.saturating_add(infer)));
        let on = self.devices.g_mut(gpu);
        (on.until, on.phase) = (until, Phase::MakingRoom { function, ask: Some(slot) });
        self.devices.refile(gpu);
    }

    /// Starts the instance for which room was made, if there is room now.
    pub(super) fn load_if_room(&mut self, gpu: GpuId, cluster: &mut Cluster) {
        let on = self.devices.g(gpu);
        let Phase::MakingRoom { function, ask } = on.phase else { return };
        let bytes = self.devices.f(function).bytes;
        // A copy of the same model that is still being evicted would take the new copy with it.
        let leaving =
            on.copies.iter().any(|copy| copy.function == function && copy.state == CopyState::Evicting);
        if on.free < bytes || leaving {
            return;
        }
        if self.waits_for_its_tenant(function, cluster) {
            self.held_up.insert(gpu);
            return;
        }
        let here = |copy: &ModelCopy| {
            copy.function == function && copy.instance.is_some_and(|one| is_parked(one, cluster))
        };
        let parked = self.devices.unpark(gpu, here).and_then(|copy| copy.instance);
        let from = parked.is_none().then(|| self.devices.tier(function, self.devices.g(gpu)));
        let instance = parked.unwrap_or_else(|| cluster.instances.name());
        let on = self.devices.g_mut(gpu);
        on.free -= bytes;
        on.phase = Phase::Loading { function, from, ask };
        if let Some(copy) = on.cached_mut(function) {
            copy.instance = Some(instance);
        }
        let parts = vec![whole(gpu, Bytes(bytes))];
        if let Some(from) = from {
            let of = &cluster.functions[&function];
            let takes = if from == Tier::Host { of.spec.load_host } else { of.spec.load_disk };
            // Copies parked from other devices count, too.
            let surplus = (of.staying + 1).saturating_sub(of.spec.max_instances);
            self.end_parked_of(function, surplus as usize, StopCause::Evicted, cluster);
            self.devices.f_mut(function).instances += 1;
            self.places.insert(instance, (gpu, function));
            cluster.order(PlatformAction::Start { instance, function, parts, from, takes, parked: false });
        } else {
            let takes = cluster.return_time(instance, function, &parts);
            cluster.order(PlatformAction::Unpark { instance, parts, takes });
        }
        self.keep(function, cluster);
    }

    /// The instance of a load is ready after this time.
    pub(super) fn loaded(&mut self, gpu: GpuId, function: FunctionId, took: Duration, cluster: &mut Cluster) {
        let on = self.devices.g_mut(gpu);
        let Phase::Loading { from, ask, .. } = on.phase else { return };
        let (kind, node) = (on.kind, on.node);
        if let Some(copy) = on.cached_mut(function) {
            copy.state = CopyState::Resident;
        }
        let of = self.devices.f_mut(function);
        let bytes = Bytes(of.bytes);
        if let Some(costs) = of.costs_on(kind) {
            match from {
                None => costs.back.observe(took),
                Some(Tier::Host) => costs.host.observe(took),
                Some(Tier::Disk) => costs.disk.observe(took),
            }
        }
        if from.is_some() {
            self.devices.hosts.loaded(node, function, bytes, &mut cluster.orders);
        }
        match ask {
            Some(slot) => self.run(gpu, slot, cluster),
            None => {
                self.devices.g_mut(gpu).dispatches += 1;
                self.go_on(gpu, cluster);
            }
        }
    }

    /// An instance has ended: by order, before it was ready, or under its requests.
    pub(super) fn ended(
        &mut self,
        instance: InstanceId,
        gpu: GpuId,
        function: FunctionId,
        cluster: &mut Cluster,
    ) {
        self.devices.f_mut(function).instances -= 1;
        if self.ends.remove(&instance) {
            self.left(function, cluster);
        }
        self.devices.unpark(gpu, |copy| copy.instance == Some(instance));
        let on = self.devices.g_mut(gpu);
        let Some(copy) = on.of_instance(instance).copied() else { return };
        match (copy.state, on.phase) {
            (CopyState::Evicting, _) => {
                on.copies.retain(|other| other.instance != Some(instance));
                on.evicting -= copy.bytes;
                on.free += copy.bytes;
                self.load_if_room(gpu, cluster);
                self.left(function, cluster);
            }
            (CopyState::Loading, _) => self.load_failed(gpu, function, cluster),
            (CopyState::Resident, Phase::Running { function: runs, request }) if runs == function => {
                self.not_resident(gpu, function, request, cluster);
            }
            (CopyState::Resident, _) => self.died_idle(gpu, function, cluster),
        }
        self.keep(function, cluster);
    }

    /// Whether the ledger refuses the function's next instance until a copy of its tenant is gone that leaves now.
    fn waits_for_its_tenant(&self, function: FunctionId, cluster: &Cluster) -> bool {
        let of = self.devices.f(function);
        let all = cluster.devices.memory();
        self.devices.tenants.get(&of.tenant).is_some_and(|tenant| tenant.leaving > 0)
            && !cluster.tenants.may_book(of.tenant, Bytes(of.bytes), 1, all)
    }

    /// An evicted copy of the function is gone: loads for its tenant may go on.
    pub(super) fn left(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let tenant = self.devices.f(function).tenant;
        self.devices.tenant(tenant).leaving -= 1;
        for gpu in core::mem::take(&mut self.held_up) {
            if self.devices.gpus.contains_key(&gpu) {
                self.load_if_room(gpu, cluster);
            }
        }
    }

    fn load_failed(&mut self, gpu: GpuId, function: FunctionId, cluster: &mut Cluster) {
        let ask = self.devices.g_mut(gpu).phase.take_ask();
        self.lose_copy(gpu, function);
        if let Some(slot) = ask {
            let ask = self.devices.queue.get_mut(slot);
            ask.failed_loads += 1;
            if ask.failed_loads >= self.config.max_loads {
                self.reject(slot, Rejection::AttemptsExhausted, cluster);
            } else {
                self.requeue(slot);
            }
        }
        self.go_on(gpu, cluster);
    }

    /// The instance has died under a request: another instance here serves it, if it waits again.
    fn not_resident(&mut self, gpu: GpuId, function: FunctionId, request: RequestId, cluster: &mut Cluster) {
        let copy = self.devices.g_mut(gpu).cached_mut(function);
        let Some(copy) = copy else { return };
        (copy.state, copy.instance, copy.kept) = (CopyState::Loading, None, false);
        let bytes = copy.bytes;
        let Some(slot) = self.ask_again(request, cluster) else {
            self.lose_copy(gpu, function);
            return self.go_on(gpu, cluster);
        };
        if self.is_over(function, cluster) {
            self.lose_copy(gpu, function);
            self.requeue(slot);
            return self.go_on(gpu, cluster);
        }
        self.devices.queue.get_mut(slot).place = Place::Placed(gpu);
        self.devices.g_mut(gpu).free += bytes;
        self.make_room(gpu, function, slot);
        self.load_if_room(gpu, cluster);
    }
}

/// The whole device, with this memory.
fn whole(gpu: GpuId, memory: Bytes) -> Part {
    let share = GpuShare::new(QuotaRange::WHOLE, SmShare::WHOLE, SmShare::WHOLE, Some(memory));
    let share = share.unwrap_or(GpuShare::WHOLE);
    Part { gpu, share, slice: None, stage: 0, components: ComponentSet::EMPTY }
}
