//! The book's part for tenants: the use of each limited tenant.
//!
//! A lowered limit does not end earlier work, so the widest announced limit counts. A tenant without a limit before its first
//! request never has too much.

use gshare_core::{BasisPoints, TenantId};
use gshare_sched::platform::TenantLimits;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
struct Tenant {
    /// The widest announced limits; none by default.
    most: TenantLimits,
    /// The number of dispatched requests without an answer.
    requests: u32,
    /// The number of requests before their first dispatch.
    waiting: u32,
}

/// The tenants announced to a platform.
#[derive(Debug, Default)]
pub(super) struct Tenants(BTreeMap<TenantId, Tenant>);

impl Tenants {
    /// Limits a tenant from now on.
    pub(super) fn limited(&mut self, tenant: TenantId, limits: &TenantLimits) {
        let most =
            &mut self.0.entry(tenant).or_insert(Tenant { most: *limits, requests: 0, waiting: 0 }).most;
        most.max_requests = most.max_requests.max(limits.max_requests);
        most.max_processes = most.max_processes.max(limits.max_processes);
        most.memory = most.memory.max(limits.memory);
        most.max_waiting = most.max_waiting.max(limits.max_waiting);
    }

    /// Counts a new request of the tenant.
    pub(super) fn waits(&mut self, tenant: TenantId) {
        self.0.entry(tenant).or_default().waiting += 1;
    }

    /// Counts the end of a request that was never dispatched.
    pub(super) fn waits_no_more(&mut self, tenant: TenantId) {
        if let Some(of) = self.0.get_mut(&tenant) {
            of.waiting -= 1;
        }
    }

    /// Checks the number of waiting requests after a request has come.
    pub(super) fn may_wait(&self, tenant: TenantId) -> Result<(), String> {
        match self.0.get(&tenant).map_or((0, 0), |of| (of.waiting, of.most.max_waiting)) {
            (has, may) if has > may => {
                Err(format!("{tenant} has {has} requests that wait, and may have {may}"))
            }
            _ => Ok(()),
        }
    }

    /// Notes a function of the tenant; a tenant without limits at that time has no limit to break.
    pub(super) fn has_function(&mut self, tenant: TenantId) {
        self.0.entry(tenant).or_default();
    }

    /// Counts a request of the tenant that runs from now on.
    pub(super) fn runs(&mut self, tenant: TenantId, first: bool) -> Result<(), String> {
        let Some(of) = self.0.get_mut(&tenant) else { return Ok(()) };
        of.requests += 1;
        of.waiting -= u32::from(first);
        match (of.requests, of.most.max_requests) {
            (has, may) if has > may => {
                Err(format!("{tenant} has {has} requests dispatched, and may have {may}"))
            }
            _ => Ok(()),
        }
    }

    /// Counts `count` ended requests of the tenant.
    pub(super) fn ended(&mut self, tenant: TenantId, count: usize) {
        if let Some(of) = self.0.get_mut(&tenant) {
            of.requests = of.requests.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
        }
    }

    /// The most processes of the tenant's instances.
    pub(super) fn most_processes(&self, tenant: TenantId) -> u32 {
        self.0.get(&tenant).map_or(u32::MAX, |of| of.most.max_processes)
    }

    /// The part of all memory allowed to the tenant's instances, unless it is all of it.
    pub(super) fn part_of_memory(&self, tenant: TenantId) -> Option<BasisPoints> {
        self.0.get(&tenant).map(|of| of.most.memory).filter(|part| *part < BasisPoints::WHOLE)
    }
}
