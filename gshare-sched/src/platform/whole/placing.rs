//! The turn of an idle device, and the requests that are placed in this turn.

use super::devices::{CopyState, Room};
use super::queue::{By, NONE, Place, Walk};
use super::whole_policy::Choice;
use super::{Cluster, FunctionId, GpuId, WholePool};
use gshare_core::Duration;
use std::ops::Bound;

/// Age from which a request is not overtaken any more: skips alone do not bound a wait, since nothing is skipped while nothing is
/// dispatched. 60 s: no request comes near it unless something is wrong.
pub(super) const SKIP_AGE: Duration = Duration::from_secs(60);

/// The result for a request that was to be placed with a device at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Here,
    Elsewhere,
    Stays,
}

impl WholePool {
    /// A waiting request runs on an idle device that has its model.
    fn hit(&mut self, gpu: GpuId, slot: u32, cluster: &mut Cluster) {
        self.leave(slot, true);
        self.not_idle(gpu);
        self.own(gpu, slot);
        let function = self.devices.queue.get(slot).function;
        if let Some(copy) = self.devices.g_mut(gpu).cached_mut(function) {
            copy.users += 1;
        }
        self.run(gpu, slot, cluster);
    }

    /// A waiting request moves to the local queue of a busy device that has its model.
    fn move_to_local(&mut self, gpu: GpuId, slot: u32) {
        self.leave(slot, true);
        let function = self.devices.queue.get(slot).function;
        let kind = self.devices.g(gpu).kind;
        let local_ns = self.devices.f_mut(function).costs_on(kind).map_or(0, |costs| costs.infer.cautious());
        let ask = self.devices.queue.get_mut(slot);
        (ask.place, ask.local_ns) = (Place::Local(gpu), local_ns);
        let on = self.devices.g_mut(gpu);
        on.local.push_back(slot);
        on.local_ns = on.local_ns.saturating_add(local_ns);
        if let Some(copy) = on.cached_mut(function) {
            copy.users += 1;
        }
        self.devices.refile(gpu);
    }

    /// Gives work to idle devices, fewest dispatches first.
    pub(super) fn schedule(&mut self, cluster: &mut Cluster) {
        let mut after = Bound::Unbounded;
        while self.devices.queue.len() > 0 {
            let next = (0u8..)
                .zip(&self.devices.idle)
                .filter(|(kind, idle)| !idle.is_empty() && self.devices.queue.serves(*kind))
                .filter_map(|(_, idle)| idle.range((after, Bound::Unbounded)).next().copied())
                .min();
            let Some(key) = next else { break };
            self.serve(key.1, cluster);
            after = Bound::Excluded(key);
        }
    }

    /// One turn of an idle device.
    fn serve(&mut self, gpu: GpuId, cluster: &mut Cluster) {
        if self.policy.seeks_copies() {
            loop {
                let hit = self.earliest_hit(gpu);
                match self.place_due(gpu, hit, cluster) {
                    Outcome::Here => return,
                    Outcome::Elsewhere => {}
                    Outcome::Stays => {
                        let Some((_, slot)) = hit else { break };
                        let slot = self.in_time(gpu, slot, cluster).unwrap_or(slot);
                        return self.hit(gpu, slot, cluster);
                    }
                }
            }
        }
        // No request waits for a copy on this device (or the policy does not ask): in order of arrival until one lands here.
        let mut walk = Walk::new(&self.devices.queue, self.devices.g(gpu).kind);
        while let Some((cursor, slot)) = walk.first(&self.devices.queue) {
            // The request may be gone, along with others of its function, but its predecessor is still queued.
            let before = self.devices.queue.prev(By::Class, slot);
            match (self.place_one(gpu, slot, cluster), before) {
                (Outcome::Here, _) => return,
                (Outcome::Stays, _) => walk.go_on(&self.devices.queue, cursor, slot),
                (_, NONE) => walk.restart(&self.devices.queue, cursor),
                _ => walk.go_on(&self.devices.queue, cursor, before),
            }
        }
    }

    /// The earliest waiting request for a model with a copy on the device.
    fn earliest_hit(&self, gpu: GpuId) -> Option<(u64, u32)> {
        let queue = &self.devices.queue;
        let cached = self.devices.g(gpu).copies.iter().filter(|copy| copy.is_cached());
        let waiting = cached.map(|copy| queue.of_function(copy.function).head).filter(|slot| *slot != NONE);
        waiting.map(|slot| (queue.get(slot).number, slot)).min()
    }

    /// The request of the same function that the device runs in place of a late one; a due request keeps its turn.
    fn in_time(&self, gpu: GpuId, slot: u32, cluster: &Cluster) -> Option<u32> {
        let (queue, function) = (&self.devices.queue, self.devices.queue.get(slot).function);
        if queue.is_due(slot) {
            return None;
        }
        let infer = self.devices.run_time(function, gpu);
        let (waiting, copies) =
            (queue.of_function(function).len, self.devices.f(function).copies.len().max(1));
        let behind = infer.scaled(waiting.into(), copies as u64);
        let slot = |request| queue.find(request).filter(|slot| queue.get(*slot).place == Place::Queued);
        let done = self.devices.now.saturating_add(infer);
        cluster.next_request(function, done, behind, |request| slot(request).is_some()).and_then(slot)
    }

    /// Places the first request that is due, comes before the hit, and can be placed.
    fn place_due(&mut self, gpu: GpuId, hit: Option<(u64, u32)>, cluster: &mut Cluster) -> Outcome {
        let kind = self.devices.g(gpu).kind;
        let is_next = |this: &Self, slot: u32| {
            let ask = this.devices.queue.get(slot);
            let old = this.devices.now.saturating_since(ask.arrived) >= SKIP_AGE;
            hit.is_none_or(|(number, _)| ask.number < number) && (old || this.devices.queue.is_due(slot))
        };
        // Mostly there is none.
        if !self.devices.queue.first_of(kind).is_some_and(|slot| is_next(self, slot)) {
            return Outcome::Stays;
        }
        let mut walk = Walk::new(&self.devices.queue, kind);
        while let Some((cursor, slot)) =
            walk.first(&self.devices.queue).filter(|(_, slot)| is_next(self, *slot))
        {
            match self.place_one(gpu, slot, cluster) {
                Outcome::Stays => walk.go_on(&self.devices.queue, cursor, slot),
                done => return done,
            }
        }
        Outcome::Stays
    }

    /// Places a waiting request with an idle device at hand (Algorithm 2).
    fn place_one(&mut self, gpu: GpuId, slot: u32, cluster: &mut Cluster) -> Outcome {
        let function = self.devices.queue.get(slot).function;
        if self.devices.g(gpu).cached(function).is_some() {
            self.hit(gpu, slot, cluster);
            return Outcome::Here;
        }
        self.devices.file_all();
        match self.choose(function, gpu, cluster) {
            Choice::Run(other) => self.hit(other, slot, cluster),
            Choice::Queue(other) => self.move_to_local(other, slot),
            Choice::Load(room) => {
                self.leave(slot, true);
                self.not_idle(room.gpu);
                self.own(room.gpu, slot);
                self.miss(slot, &room, cluster);
                if room.gpu == gpu {
                    return Outcome::Here;
                }
            }
            Choice::Wait => return Outcome::Stays,
        }
        Outcome::Elsewhere
    }

    /// The policy's choice. A request of a function with as many copies as it may have waits for one of them, however late: a device
    /// with a copy may never be idle, since others fill its local queue.
    fn choose(&mut self, function: FunctionId, gpu: GpuId, cluster: &Cluster) -> Choice {
        if self.is_full(function, cluster) {
            let busy = || self.devices.busy_copy(function).map(|(_, copy)| Choice::Queue(copy));
            return self.devices.idle_copy(function).map(Choice::Run).or_else(busy).unwrap_or(Choice::Wait);
        }
        let choice = self.policy.choose(&self.devices, function, gpu);
        let has = |gpu: GpuId, idle: bool| {
            let on = self.devices.gpus.get(&gpu).filter(|on| on.phase.is_idle() == idle);
            on.and_then(|on| on.cached(function))
                .is_some_and(|copy| !idle || copy.state == CopyState::Resident)
        };
        let idle = |room: &Room| self.devices.gpus.get(&room.gpu).is_some_and(|on| on.phase.is_idle());
        let can = match &choice {
            Choice::Run(gpu) => has(*gpu, true),
            Choice::Queue(gpu) => has(*gpu, false),
            Choice::Load(room) => room.function == function && idle(room),
            Choice::Wait => true,
        };
        assert!(can, "the policy of whole devices chose {choice:?} for {function}, which cannot be");
        choice
    }
}
