//! An index of copies: each is filed under its GPU's present state, so the best copy of a model is found without a search.

use super::{CANDIDATES, LocalityScheduler, Phase, first_copy};
use crate::request::RequestAction;
use crate::request::cache::{CopyState, ModelCopy};

impl LocalityScheduler {
    /// The copy on an idle GPU that runs the model fastest.
    pub(super) fn idle_copy(&self, model: u32) -> Option<u32> {
        let known = self.m(model);
        known
            .costs
            .iter()
            .filter_map(|costs| {
                let &(_, _, count, gpu) = first_copy(known, false, costs.kind)?;
                Some((costs.infer.mean(), count, gpu))
            })
            .min()
            .map(|(_, _, gpu)| gpu)
    }

    /// The copy on a busy GPU that would finish the model first, and in how many ns.
    pub(super) fn busy_copy(&self, model: u32) -> Option<(u64, u32)> {
        let known = self.m(model);
        known
            .costs
            .iter()
            .filter_map(|costs| {
                let &(_, kind, free_at, gpu) = first_copy(known, true, costs.kind)?;
                let start = free_at.max(self.now.as_nanos());
                Some((start.saturating_add(costs.infer.mean()), kind, gpu))
            })
            .min()
            .map(|(finish, _, gpu)| (finish - self.now.as_nanos(), gpu))
    }

    /// Files the copies of the unfiled GPU, which must precede every look at the index.
    pub(super) fn file_all(&mut self) {
        if let Some(gpu) = self.unfiled.take() {
            self.refile(gpu);
        }
    }

    /// Files a GPU's copies under its present state.
    pub(super) fn refile(&mut self, gpu: u32) {
        let Some(on) = self.gpus[gpu as usize].as_mut() else { return };
        let state = on.state();
        let before = core::mem::replace(&mut on.filed, state);
        if state == before {
            return;
        }
        for copy in on.copies.iter().filter(|copy| copy.is_cached()) {
            let copies = &mut self.models[copy.model as usize].copies;
            copies.remove(&(before.0, on.kind, before.1, gpu));
            copies.insert((state.0, on.kind, state.1, gpu));
        }
    }

    pub(super) fn file_copy(&mut self, gpu: u32, copy: ModelCopy) {
        let on = self.g_mut(gpu);
        let key = (on.filed.0, on.kind, on.filed.1, gpu);
        on.copies.push(copy);
        self.models[copy.model as usize].copies.insert(key);
        self.tenant(copy.owner).memory += copy.bytes;
    }

    pub(super) fn unfile_copy(&mut self, gpu: u32, copy: &ModelCopy) {
        let on = self.g(gpu);
        let key = (on.filed.0, on.kind, on.filed.1, gpu);
        self.models[copy.model as usize].copies.remove(&key);
        self.tenant(copy.owner).memory -= copy.bytes;
    }

    /// Forgets a copy that turned out not to be there; those waiting for it here are queued again.
    pub(super) fn lose_copy(&mut self, gpu: u32, model: u32) {
        let Some(copy) = self.g_mut(gpu).remove(model, false) else { return };
        self.unfile_copy(gpu, &copy);
        self.g_mut(gpu).free += copy.bytes;
        self.requeue_local(gpu, model);
    }

    /// Requests that wait for a model on this GPU are queued again.
    fn requeue_local(&mut self, gpu: u32, model: u32) {
        let local = core::mem::take(&mut self.g_mut(gpu).local);
        for slot in local {
            let request = *self.queue.get(slot);
            if request.model == model {
                self.g_mut(gpu).local_ns -= request.local_ns;
                self.requeue(slot);
            } else {
                self.g_mut(gpu).local.push_back(slot);
            }
        }
    }

    /// Evicts surplus copies, where possible, of all models beyond their limit.
    pub(super) fn trim_over(&mut self, actions: &mut Vec<RequestAction>) {
        for model in core::mem::take(&mut self.over) {
            self.trim(model, actions);
            if self.m(model).is_over() {
                self.over.insert(model);
            }
        }
    }

    /// Evicts surplus copies without running requests: first copies that still wait for room, then the least recently used.
    /// Other surplus copies go after their requests.
    fn trim(&mut self, model: u32, actions: &mut Vec<RequestAction>) {
        let mut gpus: Vec<u32> = self.m(model).copies.iter().map(|&(_, _, _, gpu)| gpu).collect();
        gpus.sort_unstable();
        for &gpu in &gpus {
            if self.m(model).is_over() && self.g(gpu).phase == (Phase::MakingRoom { model }) {
                let running = core::mem::take(&mut self.g_mut(gpu).running);
                // Its memory was not taken yet, and is given back all the same.
                let bytes = self.m(model).bytes;
                self.lose_copy(gpu, model);
                self.g_mut(gpu).free -= bytes;
                running.into_iter().for_each(|slot| self.requeue(slot));
                self.go_on(gpu, actions);
            }
        }
        let unused = |gpu: &u32| {
            let copy = self.g(*gpu).cached(model)?;
            let goes =
                copy.state == CopyState::Resident && copy.users == 0 && !self.g(*gpu).pins.contains(&model);
            goes.then_some((copy.used, *gpu))
        };
        let mut unused: Vec<(u64, u32)> = gpus.iter().filter_map(unused).collect();
        unused.sort_unstable();
        for (_, gpu) in unused {
            if self.m(model).is_over() {
                self.evict(gpu, model, actions);
            }
        }
    }

    /// Evicts a copy after its last request if its model has too many copies.
    pub(super) fn trim_copy(&mut self, gpu: u32, model: u32, actions: &mut Vec<RequestAction>) {
        if self.m(model).is_over() && !self.g(gpu).pins.contains(&model) {
            self.requeue_local(gpu, model);
            self.evict(gpu, model, actions);
        }
    }

    /// Idle GPUs of each kind that can serve the model, fewest dispatches first.
    pub(super) fn idle_candidates(&self, model: u32) -> impl Iterator<Item = u32> {
        let kinds = self.m(model).kinds;
        let idle = (0..).zip(&self.idle).filter(move |(kind, _)| kinds >> kind & 1 == 1);
        idle.flat_map(|(_, idle)| idle.iter().take(CANDIDATES)).map(|&(_, gpu)| gpu)
    }
}
