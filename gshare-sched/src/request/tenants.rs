//! Tenants of one request scheduler: how many of their requests are let into its queue (GPU-enabled FaaS, section VI), and in
//! which turn. A platform over several pools has limits of its own before that (`platform/tenant_limits.rs`).
//!
//! # Algorithm
//! A request enters the global queue only through its tenant's gate; otherwise it is held, in the tenant's own order.
//! The gate is shut while
//! - as many requests of the tenant are inside (queued, local or on a GPU) as it may have **processes**;
//! - the GPU **time** it was charged in this window is at least its share of the window on all GPUs. A request is charged
//!   what it is expected to take when it enters, and corrected to what it took. What goes beyond the share is carried;
//! - under **fairness**, it is further ahead than the horizon: the virtual time it asked for (expected GPU time divided by
//!   its weight) against the least virtual time that any tenant with work has been served. While a GPU has nothing to do
//!   this last rule is waived.
//!
//! ## Example
//! Horizon 2 s, requests of 1 s. A sends 100 requests: no other tenant has work, A itself is the least served; 3 enter (0, 1 and
//! 2 s asked), the others as these are served. B's first request finds at most 3 of A before it, not 100.

use crate::request::TenantLimits;
use gshare_core::{BasisPoints, Duration, Timestamp};
use std::collections::{BTreeSet, VecDeque};

/// Why a tenant's gate is shut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shut {
    Processes,
    Time,
    Fairness,
}

#[derive(Debug, Default)]
pub(super) struct Tenant {
    pub(super) limits: TenantLimits,
    /// Requests inside: queued, local, or on a GPU.
    pub(super) inside: u32,
    /// Requests held or queued or local.
    pub(super) waiting: u32,
    /// Bytes of the copies that were loaded for it.
    pub(super) memory: u64,
    pub(super) held: VecDeque<u32>,
    shut: Option<Shut>,
    /// GPU time charged in the window, what was carried into it included.
    charged: u64,
    window: u64,
    asked: u64,
    served: u64,
    active: bool,
}

#[derive(Debug, Default)]
pub(super) struct Tenants {
    table: Vec<Tenant>,
    window: u64,
    horizon: Option<u64>,
    /// Virtual time served, of those that have work.
    active: BTreeSet<(u64, u32)>,
    /// The least of them, or the last one that was.
    virtual_now: u64,
    /// Held for their share of time.
    pub(super) out_of_time: BTreeSet<u32>,
    /// Held for fairness, by the virtual time they asked for.
    ahead: BTreeSet<(u64, u32)>,
}

impl Tenants {
    pub(super) fn new(window: Duration, horizon: Option<Duration>) -> Self {
        Self { window: window.as_nanos(), horizon: horizon.map(Duration::as_nanos), ..Self::default() }
    }

    pub(super) fn get(&mut self, tenant: u32) -> &mut Tenant {
        let index = tenant as usize;
        if self.table.len() <= index {
            self.table.resize_with(index + 1, Tenant::default);
        }
        &mut self.table[index]
    }

    pub(super) fn peek(&self, tenant: u32) -> Option<&Tenant> {
        self.table.get(tenant as usize)
    }

    pub(super) fn all(&self) -> &[Tenant] {
        &self.table
    }

    /// The end of the window that `now` is in.
    pub(super) fn window_end(&self, now: Timestamp) -> Timestamp {
        Timestamp::from_nanos((now.as_nanos() / self.window).saturating_add(1).saturating_mul(self.window))
    }

    /// Marks whether the tenant has work, now that something changed.
    pub(super) fn stir(&mut self, tenant: u32) {
        if self.horizon.is_none() {
            return;
        }
        let virtual_now = self.virtual_now;
        let t = self.get(tenant);
        let active = t.inside > 0 || !t.held.is_empty();
        if active && !t.active {
            t.served = t.served.max(virtual_now);
            t.asked = t.asked.max(t.served);
            let key = (t.served, tenant);
            t.active = true;
            self.active.insert(key);
        } else if !active && t.active {
            let key = (t.served, tenant);
            t.active = false;
            self.active.remove(&key);
            // What it asked for is no longer what it is filed under once it comes back.
            self.refile(tenant, None);
        }
        if let Some(&(least, _)) = self.active.first() {
            self.virtual_now = self.virtual_now.max(least);
        }
    }

    fn gate(&mut self, tenant: u32, now: Timestamp, gpus: u32) -> Option<Shut> {
        let (window, horizon, virtual_now) = (self.window, self.horizon, self.virtual_now);
        let t = self.get(tenant);
        if t.inside >= t.limits.max_processes {
            return Some(Shut::Processes);
        }
        if t.limits.gpu_time < BasisPoints::WHOLE {
            let share =
                t.limits.gpu_time.of(Duration::from_nanos(window)).saturating_mul(u64::from(gpus)).as_nanos();
            let number = now.as_nanos() / window;
            t.charged = t.charged.saturating_sub(share.saturating_mul(number.saturating_sub(t.window)));
            t.window = number;
            if t.charged >= share {
                return Some(Shut::Time);
            }
        }
        match horizon {
            Some(horizon) if t.asked > virtual_now.saturating_add(horizon) => Some(Shut::Fairness),
            _ => None,
        }
    }

    /// Lets the tenant's next held request in, if its gate is open (or fairness is waived): its slot, to be entered.
    pub(super) fn admit(
        &mut self,
        tenant: u32,
        now: Timestamp,
        gpus: u32,
        cost: impl Fn(u32) -> u64,
        waive_fairness: bool,
    ) -> Option<(u32, u64)> {
        self.refile(tenant, None);
        let &slot = self.get(tenant).held.front()?;
        let shut = self.gate(tenant, now, gpus);
        if shut.is_some() && !(waive_fairness && shut == Some(Shut::Fairness)) {
            self.refile(tenant, shut);
            return None;
        }
        let cost = cost(slot);
        let t = self.get(tenant);
        t.held.pop_front();
        t.inside += 1;
        t.charged = t.charged.saturating_add(cost);
        t.asked = t.asked.saturating_add(cost / u64::from(t.limits.weight));
        Some((slot, cost))
    }

    fn refile(&mut self, tenant: u32, shut: Option<Shut>) {
        let t = self.get(tenant);
        let (was, asked) = (t.shut, t.asked);
        t.shut = shut;
        match was {
            Some(Shut::Time) => {
                self.out_of_time.remove(&tenant);
            }
            Some(Shut::Fairness) => {
                self.ahead.remove(&(asked, tenant));
            }
            _ => {}
        }
        match shut {
            Some(Shut::Time) => {
                self.out_of_time.insert(tenant);
            }
            Some(Shut::Fairness) => {
                self.ahead.insert((asked, tenant));
            }
            _ => {}
        }
    }

    /// The tenant that fairness holds with the least asked for; only one within the horizon unless it is waived.
    pub(super) fn next_ahead(&self, waive_fairness: bool) -> Option<u32> {
        let &(asked, tenant) = self.ahead.first()?;
        let within = asked <= self.virtual_now.saturating_add(self.horizon.unwrap_or(0));
        (within || waive_fairness).then_some(tenant)
    }

    /// The tenant was served, or gave up, this much of what it asked for.
    pub(super) fn serve(&mut self, tenant: u32, cost: u64) {
        if self.horizon.is_none() {
            return;
        }
        let t = self.get(tenant);
        let before = (t.served, tenant);
        t.served = t.served.saturating_add(cost / u64::from(t.limits.weight));
        let after = (t.served, tenant);
        if t.active {
            self.active.remove(&before);
            self.active.insert(after);
        }
    }

    /// Corrects the tenant's account from what was charged to what was taken.
    pub(super) fn settle(&mut self, tenant: u32, charged: u64, took: u64) {
        let t = self.get(tenant);
        t.charged = t.charged.saturating_add(took).saturating_sub(charged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// While it had no work the others were served far beyond what it had asked for.
    #[test]
    fn a_tenant_that_comes_back_is_not_ahead_by_what_it_asked_for_before() {
        let (second, now) = (Duration::from_secs(1), Timestamp::ZERO);
        let mut tenants = Tenants::new(second, Some(second));
        let asks = |tenants: &mut Tenants, tenant: u32, slot| {
            tenants.get(tenant).held.push_back(slot);
            tenants.stir(tenant);
            tenants.admit(tenant, now, 1, |_| 10 * second.as_nanos(), false)
        };
        assert!(asks(&mut tenants, 1, 7).is_some());
        assert!(asks(&mut tenants, 1, 8).is_none(), "10 s ahead of a horizon of 1 s");
        assert_eq!(tenants.next_ahead(true), Some(1));
        tenants.get(1).held.clear();
        tenants.get(1).inside = 0;
        tenants.stir(1);
        assert!(asks(&mut tenants, 2, 9).is_some());
        tenants.serve(2, 50 * second.as_nanos());
        tenants.stir(2);
        assert!(asks(&mut tenants, 1, 10).is_some());
        assert_eq!(tenants.next_ahead(true), None, "nothing of it is held");
    }
}
