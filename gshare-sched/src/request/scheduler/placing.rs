//! The turn of an idle GPU, and the requests that are placed in this turn.

use super::choosing::Choice;
use super::{LocalityScheduler, Outcome};
use crate::request::RequestAction;
use crate::request::queue::{By, NONE, Place, Walk};
use std::ops::Bound;

impl LocalityScheduler {
    /// A waiting request runs on an idle GPU that has its model.
    pub(super) fn hit(&mut self, gpu: u32, slot: u32, actions: &mut Vec<RequestAction>) {
        self.leave(slot);
        self.not_idle(gpu);
        self.stats.hits += 1;
        self.own(gpu, slot);
        let model = self.queue.get(slot).model;
        if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
            copy.users += 1;
        }
        self.run(gpu, slot, actions);
    }

    /// A waiting request moves to the local queue of a busy GPU that has its model.
    pub(super) fn move_to_local(&mut self, gpu: u32, slot: u32) {
        self.leave(slot);
        self.stats.hits += 1;
        self.stats.moved_to_local += 1;
        let model = self.queue.get(slot).model;
        let kind = self.g(gpu).kind;
        let local_ns = self.m(model).on(kind).map_or(0, |costs| costs.infer.cautious());
        let request = self.queue.get_mut(slot);
        request.place = Place::Local;
        request.gpu = gpu;
        request.local_ns = local_ns;
        let on = self.g_mut(gpu);
        on.local.push_back(slot);
        on.local_ns = on.local_ns.saturating_add(local_ns);
        if let Some(copy) = on.cached_mut(model) {
            copy.users += 1;
        }
        self.refile(gpu);
    }

    /// Gives work to idle GPUs, fewest dispatches first.
    pub(super) fn schedule(&mut self, actions: &mut Vec<RequestAction>) {
        let mut after = Bound::Unbounded;
        while self.queue.len() > 0 {
            let next = (0u8..)
                .zip(&self.idle)
                .filter(|(kind, idle)| !idle.is_empty() && self.work_for(*kind))
                .filter_map(|(_, idle)| idle.range((after, Bound::Unbounded)).next().copied())
                .min();
            let Some(key) = next else { break };
            self.serve(key.1, actions);
            after = Bound::Excluded(key);
        }
    }

    pub(super) fn work_for(&self, kind: u8) -> bool {
        self.queue.classes.iter().any(|class| class.serves(kind))
    }

    /// One turn of an idle GPU.
    pub(super) fn serve(&mut self, gpu: u32, actions: &mut Vec<RequestAction>) {
        if self.seeks_copies() {
            loop {
                let hit = self.earliest_hit(gpu);
                match self.place_due(gpu, hit, actions) {
                    Outcome::Here => return,
                    Outcome::Elsewhere => {}
                    Outcome::Stays => {
                        let Some((_, slot)) = hit else { break };
                        return self.hit(gpu, slot, actions);
                    }
                }
            }
        }
        // No request waits for a copy on this GPU (or the policy does not ask): in order of arrival until one lands here.
        let mut walk = Walk::new(&self.queue, self.g(gpu).kind);
        while let Some((cursor, slot)) = walk.first(&self.queue) {
            // The request may be gone, along with others of its model, but its predecessor is still queued.
            let before = self.queue.prev(By::Class, slot);
            match (self.place_one(gpu, slot, actions), before) {
                (Outcome::Here, _) => return,
                (Outcome::Stays, _) => walk.go_on(&self.queue, cursor, slot),
                (_, NONE) => walk.restart(&self.queue, cursor),
                _ => walk.go_on(&self.queue, cursor, before),
            }
        }
    }

    /// The earliest waiting request for a model with a copy on the GPU.
    pub(super) fn earliest_hit(&self, gpu: u32) -> Option<(u64, u32)> {
        let cached = self.g(gpu).copies.iter().filter(|copy| copy.is_cached());
        let waiting = cached.map(|copy| self.queue.of_model(copy.model).head).filter(|slot| *slot != NONE);
        waiting.map(|slot| (self.queue.get(slot).number, slot)).min()
    }

    /// Places the first request that is due, comes before the hit, and can be placed.
    pub(super) fn place_due(
        &mut self,
        gpu: u32,
        hit: Option<(u64, u32)>,
        actions: &mut Vec<RequestAction>,
    ) -> Outcome {
        let kind = self.g(gpu).kind;
        let is_next = |this: &Self, slot: u32| {
            let request = this.queue.get(slot);
            let old = this.now.saturating_since(request.arrived) >= this.config.skip_age;
            hit.is_none_or(|(number, _)| request.number < number) && (old || this.queue.is_due(slot))
        };
        // Mostly there is none.
        if !self.queue.first_of(kind).is_some_and(|slot| is_next(self, slot)) {
            return Outcome::Stays;
        }
        let mut walk = Walk::new(&self.queue, kind);
        while let Some((cursor, slot)) = walk.first(&self.queue).filter(|(_, slot)| is_next(self, *slot)) {
            match self.place_one(gpu, slot, actions) {
                Outcome::Stays => walk.go_on(&self.queue, cursor, slot),
                done => return done,
            }
        }
        Outcome::Stays
    }

    /// Places a waiting request with an idle GPU at hand (Algorithm 2).
    pub(super) fn place_one(&mut self, gpu: u32, slot: u32, actions: &mut Vec<RequestAction>) -> Outcome {
        let model = self.queue.get(slot).model;
        if self.g(gpu).cached(model).is_some() {
            self.hit(gpu, slot, actions);
            return Outcome::Here;
        }
        self.file_all();
        match self.choose(gpu, slot) {
            Choice::Run(other) => self.hit(other, slot, actions),
            Choice::Queue(other) => self.move_to_local(other, slot),
            Choice::Load(target, room) => {
                self.leave(slot);
                self.not_idle(target);
                self.own(target, slot);
                self.miss(target, slot, &room, actions);
                if target == gpu {
                    return Outcome::Here;
                }
            }
            Choice::Wait => return Outcome::Stays,
        }
        Outcome::Elsewhere
    }
}
