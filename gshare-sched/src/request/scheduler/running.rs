//! The work of a GPU: batches, its local queue, and its next step.

use super::{LocalityScheduler, Phase};
use crate::request::RequestAction;
use crate::request::cache::CopyState;
use crate::request::queue::{NONE, Place, Request};
use gshare_core::{Duration, GpuId, ModelId};

impl LocalityScheduler {
    pub(super) fn infer_ns(&self, model: u32, kind: u8) -> u64 {
        self.m(model).on(kind).map_or(u64::MAX / 4, |costs| costs.infer.mean())
    }

    /// `n` requests of a model run together.
    pub(super) fn batch_ns(&self, one: u64, n: u32) -> u64 {
        let more = u64::from(self.config.batch_marginal.get()) * u64::from(n.saturating_sub(1));
        one.saturating_add(u64::try_from(u128::from(one) * u128::from(more) / 10_000).unwrap_or(u64::MAX))
    }

    pub(super) fn not_idle(&mut self, gpu: u32) {
        let on = self.g(gpu);
        let (kind, key) = (usize::from(on.kind), (on.dispatches, gpu));
        self.idle[kind].remove(&key);
    }

    /// The request is the GPU's from now on.
    pub(super) fn own(&mut self, gpu: u32, slot: u32) {
        let request = self.queue.get_mut(slot);
        (request.place, request.gpu) = (Place::Placed, gpu);
        let drop = (request.drop_at, slot);
        self.drops.remove(&drop);
    }

    /// Runs requests of one model, which is resident; they are the GPU's already.
    pub(super) fn run(&mut self, gpu: u32, first: u32, actions: &mut Vec<RequestAction>) {
        let model = self.queue.get(first).model;
        let mut batch = core::mem::take(&mut self.g_mut(gpu).running);
        batch.clear();
        batch.push(first);
        while batch.len() < usize::from(self.config.max_batch) {
            let front = self.g(gpu).local.front().copied();
            let next = match front.filter(|slot| self.queue.get(*slot).model == model) {
                Some(slot) => {
                    let local_ns = self.queue.get(slot).local_ns;
                    let on = self.g_mut(gpu);
                    on.local.pop_front();
                    on.local_ns -= local_ns;
                    slot
                }
                None => {
                    let slot = self.queue.of_model(model).head;
                    if slot == NONE {
                        break;
                    }
                    self.leave(slot);
                    self.stats.hits += 1;
                    if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
                        copy.users += 1;
                    }
                    slot
                }
            };
            self.own(gpu, next);
            batch.push(next);
        }
        let count = u32::try_from(batch.len()).unwrap_or(u32::MAX);
        let took = self.batch_ns(self.infer_ns(model, self.g(gpu).kind), count);
        let (now, more) = (self.now, self.config.max_batch);
        let load_us = self.load_ns(model, self.g(gpu)) / 1_000;
        self.uses += 1;
        let uses = self.uses;
        for (index, &slot) in batch.iter().enumerate() {
            actions.push(RequestAction::Dispatch {
                gpu: GpuId::new(gpu),
                request: self.queue.get(slot).id,
                model: ModelId::new(model),
                batch_more: u16::try_from(batch.len() - 1 - index).unwrap_or(more),
            });
        }
        let on = self.g_mut(gpu);
        let clock = on.clock;
        if let Some(copy) = on.cached_mut(model) {
            copy.used = uses;
            copy.uses += u64::from(count);
            let density = load_us.saturating_mul(copy.uses) / (copy.bytes >> 20).max(1);
            copy.priority = clock.saturating_add(density);
        }
        on.running = batch;
        on.batch = count;
        on.dispatches += u64::from(count);
        on.until = now.saturating_add(Duration::from_nanos(took));
        on.phase = Phase::Running;
        self.refile(gpu);
    }

    /// The GPU has nothing on it: it goes on with its local queue, or is idle.
    pub(super) fn go_on(&mut self, gpu: u32, actions: &mut Vec<RequestAction>) {
        let now = self.now;
        let on = self.g_mut(gpu);
        on.running.clear();
        on.until = now;
        while let Some(slot) = self.g_mut(gpu).local.pop_front() {
            let Request { model, local_ns, .. } = *self.queue.get(slot);
            let on = self.g_mut(gpu);
            on.local_ns -= local_ns;
            if on.cached(model).is_some_and(|copy| copy.state == CopyState::Resident) {
                self.own(gpu, slot);
                self.run(gpu, slot, actions);
                return;
            }
            // The model is gone: another GPU may suit the request better by now.
            self.requeue(slot);
        }
        let on = self.g_mut(gpu);
        on.phase = Phase::Idle;
        let (kind, key) = (usize::from(on.kind), (on.dispatches, gpu));
        self.idle[kind].insert(key);
        if self.unfiled != Some(gpu) {
            self.file_all();
            self.unfiled = Some(gpu);
        }
    }

    pub(super) fn completed(
        &mut self,
        gpu: u32,
        slot: u32,
        took: Duration,
        actions: &mut Vec<RequestAction>,
    ) {
        let model = self.queue.get(slot).model;
        let marginal = u64::from(self.config.batch_marginal.get());
        let learn = self.config.learn;
        let on = self.g_mut(gpu);
        let (kind, batch) = (on.kind, u64::from(on.batch.max(1)));
        on.running.retain(|&other| other != slot);
        if let Some(copy) = on.cached_mut(model) {
            copy.users -= 1;
        }
        let done = on.running.is_empty();
        if done
            && learn
            && let Some(costs) = self.models[model as usize].costs.iter_mut().find(|costs| costs.kind == kind)
        {
            // The time of one, from the time of the batch.
            costs.infer.observe(took.scaled(10_000, 10_000 + marginal * (batch - 1)));
        }
        self.stats.completed += 1;
        self.queue.forget(slot);
        if done {
            self.trim_copy(gpu, model, actions);
            self.go_on(gpu, actions);
        }
    }
}
