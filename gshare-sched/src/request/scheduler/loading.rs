//! Loads and the evictions for them: victims, their worth, host memory, and loads that fail.

use super::{Gpu, LocalityScheduler, Phase, Room, memory_share};
use crate::request::cache::{self, CopyState, ModelCopy};
use crate::request::queue::Request;
use crate::request::{CachePolicy, RejectReason, RequestAction, Tier};
use gshare_core::{BasisPoints, Duration, GpuId, ModelId, NodeId};

/// A price is full where one request in this many is a miss, and less in proportion where fewer are: where the working set fits, a
/// victim is hardly missed.
const PRICED_MISSES: u64 = 16;

impl LocalityScheduler {
    pub(super) fn tier(&self, model: u32, gpu: &Gpu) -> Tier {
        match self.hosts.get(&gpu.node).and_then(|host| host.models.get(&model)) {
            Some((_, true)) => Tier::Host,
            _ => Tier::Disk,
        }
    }

    pub(super) fn load_ns(&self, model: u32, gpu: &Gpu) -> u64 {
        self.m(model).on(gpu.kind).map_or(u64::MAX / 4, |costs| match self.tier(model, gpu) {
            Tier::Host => costs.host.mean(),
            _ => costs.disk.mean(),
        })
    }

    /// Loading time that the eviction of one of the model's copies is expected to cost requests for it meanwhile.
    pub(super) fn worth(&self, model: u32, gpu: &Gpu) -> u64 {
        let known = self.m(model);
        let away = self.load_ns(model, gpu).saturating_add(self.infer_ns(model, gpu.kind));
        let expected = known.recent.expected(self.now, Duration::from_nanos(away));
        let waiting = u64::from(self.queue.of_model(model).len) << 15;
        let copies = known.copies.len().max(1) as u128;
        let load = u128::from(self.load_ns(model, gpu));
        let worth = u64::try_from((load * u128::from(expected + waiting) / copies) >> 16).unwrap_or(u64::MAX);
        self.missed.part_of(self.asked, self.now, PRICED_MISSES, worth)
    }

    /// The models to evict before a request's model can be loaded on an idle GPU. `None` if that does not suffice, or the
    /// model is at its limit of copies.
    pub(super) fn room(&self, gpu: u32, slot: u32) -> Option<Room> {
        let request = self.queue.get(slot);
        if self.m(request.model).is_full() {
            return None;
        }
        let on = self.g(gpu);
        let bytes = self.m(request.model).bytes;
        let missing = bytes.saturating_sub(on.free + on.evicting);
        let victims = match self.config.cache {
            CachePolicy::Lru => cache::victims(&on.copies, &on.pins, missing, |copy| copy.used),
            CachePolicy::Gdsf => {
                cache::victims(&on.copies, &on.pins, missing, |copy| (copy.priority, copy.used))
            }
            CachePolicy::CostAware => cache::victims(&on.copies, &on.pins, missing, |copy| {
                let density = self.worth(copy.model, on).saturating_mul(1024) / (copy.bytes >> 20).max(1);
                (density, copy.used)
            }),
        }?;
        let worth = victims.iter().map(|model| self.worth(model.number(), on)).fold(0, u64::saturating_add);
        let surrendered = self.surrender(gpu, request.tenant, bytes, &victims)?;
        Some(Room { victims, surrendered, worth })
    }

    /// The time to load and run a model on a GPU, in ns. Evictions before it are part of the profiled loading time.
    pub(super) fn load_cost(&self, gpu: u32, model: u32) -> u64 {
        let on = self.g(gpu);
        self.load_ns(model, on).saturating_add(self.infer_ns(model, on.kind))
    }

    /// Copies on any GPU that a tenant has to give up so that `bytes` more keep within its share of the memory.
    pub(super) fn surrender(
        &self,
        gpu: u32,
        tenant: u32,
        bytes: u64,
        victims: &[ModelId],
    ) -> Option<Vec<(u32, u32)>> {
        let Some(known) = self.tenants.get(&tenant).filter(|known| known.share < BasisPoints::WHOLE) else {
            return Some(Vec::new());
        };
        let leaving: u64 = self
            .g(gpu)
            .copies
            .iter()
            .filter(|copy| {
                copy.is_cached() && copy.owner == tenant && victims.contains(&ModelId::new(copy.model))
            })
            .map(|copy| copy.bytes)
            .sum();
        let share = memory_share(known.share, self.memory);
        let mut over = (known.memory - leaving + bytes).saturating_sub(share);
        let mut own: Vec<(u64, u32, u32, u64)> = Vec::new();
        for (index, on) in (0..).zip(&self.gpus) {
            let Some(on) = on else { continue };
            for copy in &on.copies {
                let free =
                    copy.state == CopyState::Resident && copy.users == 0 && !on.pins.contains(&copy.model);
                let goes_anyway = index == gpu && victims.contains(&ModelId::new(copy.model));
                if copy.owner == tenant && free && !goes_anyway {
                    own.push((copy.used, index, copy.model, copy.bytes));
                }
            }
        }
        own.sort_unstable();
        let mut given = Vec::new();
        for (_, index, model, bytes) in own {
            if over == 0 {
                break;
            }
            over = over.saturating_sub(bytes);
            given.push((index, model));
        }
        (over == 0).then_some(given)
    }

    pub(super) fn evict(&mut self, gpu: u32, model: u32, actions: &mut Vec<RequestAction>) {
        let Some(copy) = self.g(gpu).cached(model).copied() else { return };
        self.unfile_copy(gpu, &copy);
        let on = self.g_mut(gpu);
        on.clock = on.clock.max(copy.priority);
        on.evicting += copy.bytes;
        if let Some(copy) = on.cached_mut(model) {
            copy.state = CopyState::Evicting;
        }
        self.stats.evictions += 1;
        actions.push(RequestAction::Evict { gpu: GpuId::new(gpu), model: ModelId::new(model) });
    }

    /// Gives the GPU a request that waits there for its model to be loaded.
    pub(super) fn miss(&mut self, gpu: u32, slot: u32, room: &Room, actions: &mut Vec<RequestAction>) {
        let Request { model, tenant, .. } = *self.queue.get(slot);
        self.stats.misses += 1;
        self.missed.count(self.now);
        self.stats.false_misses += u64::from(!self.m(model).copies.is_empty());
        for &(other, model) in &room.surrendered {
            self.evict(other, model, actions);
        }
        for victim in &room.victims {
            self.evict(gpu, victim.number(), actions);
        }
        let bytes = self.m(model).bytes;
        let (load, infer) = (self.load_ns(model, self.g(gpu)), self.infer_ns(model, self.g(gpu).kind));
        let until = self.now.saturating_add(Duration::from_nanos(load.saturating_add(infer)));
        self.uses += 1;
        let used = self.uses;
        let on = self.g_mut(gpu);
        on.running.clear();
        on.running.push(slot);
        on.batch = 1;
        on.until = until;
        on.phase = Phase::MakingRoom { model };
        self.refile(gpu);
        let state = CopyState::Loading;
        self.file_copy(
            gpu,
            ModelCopy { model, bytes, state, users: 1, used, uses: 0, priority: 0, owner: tenant },
        );
        self.load_if_room(gpu, actions);
    }

    /// Orders the load for which room was made, if there is room now.
    pub(super) fn load_if_room(&mut self, gpu: u32, actions: &mut Vec<RequestAction>) {
        let on = self.g(gpu);
        let Phase::MakingRoom { model } = on.phase else { return };
        let bytes = self.m(model).bytes;
        // A copy of the same model that is still being evicted would take the new copy with it.
        let leaving = on.copies.iter().any(|copy| copy.model == model && copy.state == CopyState::Evicting);
        if on.free < bytes || leaving {
            return;
        }
        let (from, node) = (self.tier(model, on), on.node);
        let on = self.g_mut(gpu);
        on.free -= bytes;
        on.phase = Phase::Loading { model, from };
        let keep_on_host = self.host_copy(node, model, actions);
        actions.push(RequestAction::Load {
            gpu: GpuId::new(gpu),
            model: ModelId::new(model),
            from,
            keep_on_host,
        });
    }

    /// Notes a use of the node's host copy of the model; true if the load should leave a new host copy.
    pub(super) fn host_copy(&mut self, node: u32, model: u32, actions: &mut Vec<RequestAction>) -> bool {
        let bytes = self.m(model).bytes;
        let Some(host) = self.hosts.get_mut(&node) else { return false };
        if let Some((used, _)) = host.models.get_mut(&model) {
            *used = self.uses;
            return false;
        }
        let capacity = self.config.host_memory.0;
        if bytes > capacity {
            return false;
        }
        while host.used + bytes > capacity {
            let oldest =
                host.models.iter().filter(|(_, (_, ready))| *ready).min_by_key(|(_, (used, _))| *used);
            let Some((&oldest, _)) = oldest else { return false };
            host.models.remove(&oldest);
            host.used -= self.models[oldest as usize].bytes;
            actions.push(RequestAction::DropHost { node: NodeId::new(node), model: ModelId::new(oldest) });
        }
        host.used += bytes;
        host.models.insert(model, (self.uses, false));
        true
    }

    /// The load that was to fill the node's copy has ended.
    pub(super) fn host_copy_done(
        &mut self,
        node: u32,
        model: u32,
        whole: bool,
        actions: &mut Vec<RequestAction>,
    ) {
        let bytes = self.m(model).bytes;
        let Some(host) = self.hosts.get_mut(&node) else { return };
        match host.models.get_mut(&model) {
            Some((_, ready)) if whole => *ready = true,
            Some((_, false)) => {
                host.models.remove(&model);
                host.used -= bytes;
                actions.push(RequestAction::DropHost { node: NodeId::new(node), model: ModelId::new(model) });
            }
            _ => {}
        }
    }

    pub(super) fn loaded(&mut self, gpu: u32, model: u32, took: Duration, actions: &mut Vec<RequestAction>) {
        let on = self.g(gpu);
        let Phase::Loading { from, .. } = on.phase else { return };
        let (kind, node) = (on.kind, on.node);
        if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
            copy.state = CopyState::Resident;
        }
        self.host_copy_done(node, model, true, actions);
        if self.config.learn
            && let Some(costs) = self.models[model as usize].costs.iter_mut().find(|costs| costs.kind == kind)
        {
            match from {
                Tier::Host => costs.host.observe(took),
                _ => costs.disk.observe(took),
            }
        }
        let Some(&slot) = self.g(gpu).running.first() else { return };
        self.run(gpu, slot, actions);
    }

    pub(super) fn load_failed(&mut self, gpu: u32, model: u32, actions: &mut Vec<RequestAction>) {
        let on = self.g_mut(gpu);
        let (node, from) = (on.node, on.phase);
        let running = core::mem::take(&mut on.running);
        if let Phase::Loading { from: Tier::Disk, .. } = from {
            self.host_copy_done(node, model, false, actions);
        }
        self.lose_copy(gpu, model);
        for slot in running {
            let request = self.queue.get_mut(slot);
            request.failed_loads += 1;
            if request.failed_loads >= self.config.max_loads {
                self.reject(slot, RejectReason::LoadsFailed, actions);
            } else {
                self.requeue(slot);
            }
        }
        self.go_on(gpu, actions);
    }

    /// Loads the model for a request that was dispatched as a hit but did not find it.
    pub(super) fn not_resident(&mut self, gpu: u32, slot: u32, actions: &mut Vec<RequestAction>) {
        let model = self.queue.get(slot).model;
        let mut running = core::mem::take(&mut self.g_mut(gpu).running);
        running.retain(|&other| other != slot);
        // The rest of a batch is not there either; it may be served elsewhere.
        for other in running {
            if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
                copy.users -= 1;
            }
            self.requeue(other);
        }
        if self.m(model).is_over() {
            self.lose_copy(gpu, model);
            self.requeue(slot);
            self.go_on(gpu, actions);
            return;
        }
        let bytes = self.m(model).bytes;
        let (load, infer) = (self.load_ns(model, self.g(gpu)), self.infer_ns(model, self.g(gpu).kind));
        let now = self.now;
        self.stats.misses += 1;
        let on = self.g_mut(gpu);
        on.running = vec![slot];
        on.batch = 1;
        on.free += bytes;
        on.until = now.saturating_add(Duration::from_nanos(load.saturating_add(infer)));
        on.phase = Phase::MakingRoom { model };
        if let Some(copy) = on.cached_mut(model) {
            copy.state = CopyState::Loading;
        }
        self.refile(gpu);
        self.load_if_room(gpu, actions);
    }
}
