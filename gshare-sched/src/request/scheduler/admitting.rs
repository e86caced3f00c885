//! Which tenants' requests enter the queue: limits, and fairness between tenants.

use super::LocalityScheduler;
use crate::request::RequestAction;

impl LocalityScheduler {
    /// Lets held requests in, as far as their tenants' gates are open.
    pub(super) fn admit(&mut self, tenant: u32, waive_fairness: bool) {
        loop {
            let (queue, models) = (&self.queue, &self.models);
            let cost = |slot: u32| {
                let costs = &models[queue.get(slot).model as usize].costs;
                costs.iter().map(|costs| costs.infer.mean()).min().unwrap_or(0)
            };
            let admitted = self.tenants.admit(tenant, self.now, self.live, cost, waive_fairness);
            let Some((slot, cost)) = admitted else { break };
            self.queue.get_mut(slot).charged_ns = cost;
            let kinds = self.m(self.queue.get(slot).model).kinds;
            self.queue.enter(slot, kinds);
            if waive_fairness {
                break;
            }
        }
        self.tenants.stir(tenant);
    }

    /// Opens gates and gives out work until neither changes anything.
    pub(super) fn settle_down(&mut self, actions: &mut Vec<RequestAction>) {
        let mut stirred = core::mem::take(&mut self.stirred);
        stirred.sort_unstable();
        stirred.dedup();
        for &tenant in &stirred {
            self.admit(tenant, false);
        }
        stirred.clear();
        self.stirred = stirred;
        self.schedule(actions);
        self.file_all();
        while let Some(tenant) = self.tenants.next_ahead(self.any_idle()) {
            let waive = self.any_idle();
            let before = self.queue.len();
            self.admit(tenant, waive);
            self.schedule(actions);
            self.file_all();
            if waive && self.queue.len() > before {
                // The request cannot be served now, so neither can any that would follow it.
                break;
            }
        }
    }
}
