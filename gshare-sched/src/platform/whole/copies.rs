//! Copies that are lost, kept, or more than their function may have.

use super::devices::{CopyState, ModelCopy, Phase};
use super::{Cluster, FunctionId, GpuId, InstanceId, WholePool};
use crate::platform::StopCause;

impl WholePool {
    /// Forgets a copy without an instance; those waiting for it here are queued again.
    pub(super) fn lose_copy(&mut self, gpu: GpuId, function: FunctionId) {
        let copies = &mut self.devices.g_mut(gpu).copies;
        let cached = |copy: &ModelCopy| copy.function == function && copy.is_cached();
        let Some(copy) = copies.iter().position(cached).map(|found| copies.swap_remove(found)) else {
            return;
        };
        self.devices.unfile_copy(gpu, &copy);
        self.devices.g_mut(gpu).free += copy.bytes;
        self.requeue_local(gpu, function);
    }

    /// Requests that wait for a model on this device are queued again.
    fn requeue_local(&mut self, gpu: GpuId, function: FunctionId) {
        let local = core::mem::take(&mut self.devices.g_mut(gpu).local);
        for slot in local {
            let ask = *self.devices.queue.get(slot);
            let on = self.devices.g_mut(gpu);
            if ask.function == function {
                on.local_ns -= ask.local_ns;
                if let Some(copy) = on.cached_mut(function) {
                    copy.users -= 1;
                }
                self.requeue(slot);
            } else {
                on.local.push_back(slot);
            }
        }
        self.devices.refile(gpu);
    }

    /// Whether there are more copies than may be, since the limit was lowered.
    pub(super) fn is_over(&self, function: FunctionId, cluster: &Cluster) -> bool {
        let most = cluster.functions.get(&function).map_or(0, |of| of.spec.max_instances);
        self.devices.functions.get(&function).is_some_and(|of| of.copies.len() > most as usize)
    }

    /// Whether there are as many copies as may be.
    pub(super) fn is_full(&self, function: FunctionId, cluster: &Cluster) -> bool {
        let most = cluster.functions.get(&function).map_or(0, |of| of.spec.max_instances);
        self.devices.f(function).copies.len() >= most as usize
    }

    /// Evicts surplus copies, where possible, of all functions beyond their limit.
    pub(super) fn trim_over(&mut self, cluster: &mut Cluster) {
        for function in core::mem::take(&mut self.over) {
            self.trim(function, cluster);
            if self.is_over(function, cluster) {
                self.over.insert(function);
            }
        }
    }

    /// Evicts surplus copies without running requests: first copies that still wait for room, then the least recently used.
    /// Other surplus copies go after their requests.
    fn trim(&mut self, function: FunctionId, cluster: &mut Cluster) {
        let Some(of) = self.devices.functions.get(&function) else { return };
        let gpus = of.devices();
        let surplus =
            cluster.functions.get(&function).map_or(0, |of| of.staying.saturating_sub(of.spec.max_instances));
        self.end_parked_of(function, surplus as usize, StopCause::Drained, cluster);
        for &gpu in &gpus {
            if self.is_over(function, cluster) {
                self.give_up_room(gpu, function, cluster);
            }
        }
        let unused = |gpu: &GpuId| {
            let copy = self.devices.g(*gpu).cached(function).filter(|copy| copy.may_leave())?;
            Some((copy.used, *gpu))
        };
        let mut unused: Vec<(u64, GpuId)> = gpus.iter().filter_map(unused).collect();
        unused.sort_unstable();
        for (_, gpu) in unused {
            if self.is_over(function, cluster) {
                self.evict(gpu, function, cluster);
            }
        }
    }

    /// Gives up a copy for which room is still being made.
    pub(super) fn give_up_room(&mut self, gpu: GpuId, function: FunctionId, cluster: &mut Cluster) {
        let on = self.devices.g_mut(gpu);
        let Phase::MakingRoom { function: of, ask } = on.phase else { return };
        if of != function {
            return;
        }
        self.lose_copy(gpu, function);
        // Its memory was not taken yet, and was given back all the same.
        let bytes = self.devices.f(function).bytes;
        self.devices.g_mut(gpu).free -= bytes;
        if let Some(slot) = ask {
            self.requeue(slot);
        }
        self.go_on(gpu, cluster);
    }

    /// Evicts a copy after its last request if its function has too many copies.
    pub(super) fn trim_copy(&mut self, gpu: GpuId, function: FunctionId, cluster: &mut Cluster) {
        let kept = self.devices.g(gpu).cached(function).is_none_or(|copy| copy.kept);
        if !kept && self.is_over(function, cluster) {
            self.requeue_local(gpu, function);
            self.evict(gpu, function, cluster);
        }
    }

    /// Evicts the unused copies of removed functions, and forgets those functions without an instance.
    pub(super) fn end_removed(&mut self, cluster: &mut Cluster) {
        for function in self.ending.clone() {
            let Some(of) = self.devices.functions.get(&function) else { continue };
            for gpu in of.devices() {
                if self.devices.g(gpu).cached(function).is_some_and(ModelCopy::may_leave) {
                    self.evict(gpu, function, cluster);
                }
            }
            self.end_parked_of(function, usize::MAX, StopCause::Removed, cluster);
            if self.devices.f(function).instances == 0 {
                self.ending.remove(&function);
                self.over.remove(&function);
                self.devices.functions.remove(&function);
                self.devices.queue.forget_function(function);
            }
        }
    }

    /// Keeps the first instance of a function with a minimum, and no other.
    pub(super) fn keep(&mut self, function: FunctionId, cluster: &Cluster) {
        let Some(of) = self.devices.functions.get(&function) else { return };
        let least = cluster.functions.get(&function).map_or(0, |of| of.spec.min_instances);
        let wanted = least > 0 && !cluster.is_removed(function);
        let here = |gpu: GpuId| self.devices.g(gpu).cached(function)?.instance.filter(|_| wanted);
        let before = of.kept_on;
        let first = || {
            let all = of.copies.iter().filter_map(|&(_, _, _, gpu)| Some((here(gpu)?, gpu)));
            all.min_by_key(|(instance, _): &(InstanceId, GpuId)| *instance).map(|(_, gpu)| gpu)
        };
        let after =
            before.filter(|gpu| self.devices.gpus.contains_key(gpu) && here(*gpu).is_some()).or_else(first);
        self.devices.f_mut(function).kept_on = after;
        for (gpu, kept) in [(before.filter(|gpu| after != Some(*gpu)), false), (after, true)] {
            let on = gpu.and_then(|gpu| self.devices.gpus.get_mut(&gpu));
            for copy in on.into_iter().flat_map(|on| &mut on.copies).filter(|copy| copy.function == function)
            {
                copy.kept = kept && copy.is_cached();
            }
        }
    }

    /// The instance of a copy without requests has died.
    pub(super) fn died_idle(&mut self, gpu: GpuId, function: FunctionId, cluster: &mut Cluster) {
        debug_assert!(
            self.devices.g(gpu).cached(function).is_some_and(|copy| copy.state == CopyState::Resident)
        );
        self.lose_copy(gpu, function);
        self.load_if_room(gpu, cluster);
    }
}
