//! The times in which shares are not compared: after changes, and while an instance leaves its device idle.

use super::super::node_plan::Shape;
use super::NodeBook;
use gshare_core::{Duration, ResourceSpec, Share, Timestamp};

impl NodeBook {
    /// Notes another share of an instance.
    pub(in crate::node) fn share_changed(&mut self, now: Timestamp, number: usize, spec: ResourceSpec) {
        self.drain(now, number);
        let entry = &mut self.instances[number];
        entry.spec = spec;
        let gpu = entry.gpu;
        entry.excused.push((now, now.saturating_add(self.window.saturating_mul(2))));
        self.forgive(now, number, self.window);
        self.end_calm(now, number);
        self.disturb_elastic(now, gpu);
        self.recompute(now, number);
    }

    /// Suspends all comparisons on a device for `lasts`.
    pub(in crate::node) fn disturb_gpu(&mut self, now: Timestamp, gpu: usize, lasts: Duration) {
        let entry = &mut self.gpus[gpu];
        entry.calm_from = entry.calm_from.max(now.saturating_add(lasts));
        for number in 0..self.instances.len() {
            if self.instances[number].gpu == gpu {
                self.end_calm(now, number);
                self.recompute(now, number);
            }
        }
        self.disturb_elastic(now, gpu);
    }

    pub(in crate::node) fn disturb_all(&mut self, now: Timestamp, lasts: Duration) {
        (0..self.gpus.len()).for_each(|gpu| self.disturb_gpu(now, gpu, lasts));
    }

    /// Notes the start of the daemon's work, or its end.
    pub(in crate::node) fn daemon(&mut self, works: Option<Timestamp>) {
        self.daemon_since = works;
    }

    pub(super) fn disturb_elastic(&mut self, now: Timestamp, gpu: usize) {
        self.shares.disturb(now, gpu);
    }

    pub(super) fn end_calm(&mut self, now: Timestamp, number: usize) {
        if core::mem::take(&mut self.instances[number].measured) {
            self.shares.end(now, number);
        }
    }

    /// Begins or ends the measurement of an instance, which must keep its device busy.
    pub(super) fn recompute(&mut self, now: Timestamp, number: usize) {
        let mut there = self
            .processes
            .iter()
            .filter(|process| process.instance == number && process.attached && !process.stopped);
        // The processes of an instance take turns with one token, so a pause in any turn leaves the device idle.
        let busy = there.clone().any(|process| process.keen) && !there.any(|process| process.pauses);
        let entry = &mut self.instances[number];
        let gpu = &self.gpus[entry.gpu];
        if busy == entry.measured || entry.shape == Shape::Any {
            return;
        }
        if !busy {
            return self.end_calm(now, number);
        }
        let Some(windows) = gpu.windows else { return };
        entry.measured = true;
        let from = now.max(gpu.calm_from).max(entry.calm_from);
        let share = Share { quota: entry.spec.quota(), sm: entry.spec.sm() };
        self.shares.begin(from, number, entry.gpu, entry.shape, share, windows, gpu.era);
    }
}
