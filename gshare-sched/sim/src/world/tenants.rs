//! The part of a book that is about tenants: what those with limits have.
//!
//! A limit that was lowered does not end what was let in before, so the widest one that was told counts. A tenant that was
//! not limited before its first request is never found to have too much.

use gshare_core::{BasisPoints, TenantId};
use gshare_sched::request::TenantLimits;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
struct Tenant {
    /// The widest limits that were told; none by default.
    most: TenantLimits,
    /// Requests that were dispatched and are not answered.
    requests: u32,
}

/// The tenants that a platform was told of.
#[derive(Debug, Default)]
pub(super) struct Tenants(BTreeMap<TenantId, Tenant>);

impl Tenants {
    /// A tenant is limited from now on.
    pub(super) fn limited(&mut self, tenant: TenantId, limits: &TenantLimits) {
        let most = &mut self.0.entry(tenant).or_insert(Tenant { most: *limits, requests: 0 }).most;
        most.max_processes = most.max_processes.max(limits.max_processes);
        most.memory = most.memory.max(limits.memory);
    }

    /// A function of the tenant came; a tenant without limits then has none that could be broken.
    pub(super) fn has_function(&mut self, tenant: TenantId) {
        self.0.entry(tenant).or_default();
    }

    /// A request of the tenant runs from now on.
    pub(super) fn runs(&mut self, tenant: TenantId) -> Result<(), String> {
        let Some(of) = self.0.get_mut(&tenant) else { return Ok(()) };
        of.requests += 1;
        match (of.requests, of.most.max_processes) {
            (has, may) if has > may => {
                Err(format!("{tenant} has {has} requests dispatched, and may have {may}"))
            }
            _ => Ok(()),
        }
    }

    /// `count` requests of the tenant do not run any more.
    pub(super) fn ended(&mut self, tenant: TenantId, count: usize) {
        if let Some(of) = self.0.get_mut(&tenant) {
            of.requests = of.requests.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
        }
    }

    /// The part of all memory that the tenant's instances may have, unless that is all of it.
    pub(super) fn part_of_memory(&self, tenant: TenantId) -> Option<BasisPoints> {
        self.0.get(&tenant).map(|of| of.most.memory).filter(|part| *part < BasisPoints::WHOLE)
    }
}
