//! GPUs that join and that are lost.

use super::{Gpu, LocalityScheduler, Phase};
use crate::request::{RequestAction, Tier};
use gshare_core::{Bytes, GpuId, GpuKind, NodeId};
use std::collections::BTreeSet;

impl LocalityScheduler {
    pub(super) fn gpu_joined(
        &mut self,
        gpu: GpuId,
        kind: GpuKind,
        node: NodeId,
        memory: Bytes,
        actions: &mut Vec<RequestAction>,
    ) {
        if self.gpus.len() <= gpu.index() {
            self.gpus.resize_with(gpu.index() + 1, || None);
        }
        let index = usize::from(kind.number());
        if self.kinds.len() <= index {
            self.kinds.resize(index + 1, None);
            self.idle.resize_with(index + 1, BTreeSet::new);
        }
        self.gpus[gpu.index()] = Some(Gpu {
            kind: kind.number(),
            node: node.number(),
            memory: memory.0,
            free: memory.0,
            until: self.now,
            ..Gpu::default()
        });
        self.idle[index].insert((0, gpu.number()));
        self.live += 1;
        self.memory = self.memory.saturating_add(memory.0);
        self.hosts.entry(node.number()).or_default().gpus += 1;
        if self.kinds[index].is_none() {
            self.kinds[index] = Some(memory.0);
            for model in 0..u32::try_from(self.models.len()).unwrap_or(u32::MAX) {
                self.reclass(model, actions);
            }
        }
    }

    pub(super) fn gpu_lost(&mut self, gpu: GpuId, actions: &mut Vec<RequestAction>) {
        if self.g(gpu.number()).phase == Phase::Idle {
            self.not_idle(gpu.number());
        }
        for copy in self.g(gpu.number()).copies.clone() {
            if copy.is_cached() {
                self.unfile_copy(gpu.number(), &copy);
            }
        }
        let Some(lost) = self.gpus[gpu.index()].take() else { return };
        self.live -= 1;
        self.memory -= lost.memory;
        if let Some(host) = self.hosts.get_mut(&lost.node) {
            host.gpus -= 1;
            if host.gpus == 0 {
                self.hosts.remove(&lost.node);
            } else if let Phase::Loading { model, from: Tier::Disk } = lost.phase {
                self.host_copy_done(lost.node, model, false, actions);
            }
        }
        for slot in lost.local.into_iter().chain(lost.running) {
            self.requeue(slot);
        }
    }
}
