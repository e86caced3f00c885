//! The part of a book that is about tenants: what those with limits have.
//!
//! A limit that was lowered does not end what was let in before, so the widest one that was told counts. A tenant that was
//! not limited before its first request is never found to have too much.

use gshare_core::request::TenantLimits;
use gshare_core::{BasisPoints, TenantId};
use std::collections::BTreeMap;

#[derive(Debug, Default)]
struct Tenant {
    most_requests: u32,
    most_memory: BasisPoints,
    /// Requests that were dispatched and are not answered.
    requests: u32,
}

/// The tenants that a platform was told limits of.
#[derive(Debug, Default)]
pub(super) struct Tenants(BTreeMap<TenantId, Tenant>);

impl Tenants {
    /// A tenant is limited from now on.
    pub(super) fn limited(&mut self, tenant: TenantId, limits: &TenantLimits) {
        let of = self.0.entry(tenant).or_default();
        of.most_requests = of.most_requests.max(limits.max_processes);
        of.most_memory = of.most_memory.max(limits.memory);
    }

    /// A function of the tenant came; a tenant without limits then has none that could be broken.
    pub(super) fn has_function(&mut self, tenant: TenantId) {
        let unlimited = TenantLimits::default();
        let new =
            Tenant { most_requests: unlimited.max_processes, most_memory: unlimited.memory, requests: 0 };
        self.0.entry(tenant).or_insert(new);
    }

    /// A request of the tenant runs from now on.
    pub(super) fn runs(&mut self, tenant: TenantId) -> Result<(), String> {
        let Some(of) = self.0.get_mut(&tenant) else { return Ok(()) };
        of.requests += 1;
        if of.requests > of.most_requests {
            return Err(format!(
                "{tenant} has {} requests dispatched, and may have {}",
                of.requests, of.most_requests
            ));
        }
        Ok(())
    }

    /// So many requests of the tenant do not run any more.
    pub(super) fn ended(&mut self, tenant: TenantId, count: usize) {
        if let Some(of) = self.0.get_mut(&tenant) {
            of.requests = of.requests.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
        }
    }

    /// The part of all memory that the tenant's instances may have, unless that is all of it.
    pub(super) fn part_of_memory(&self, tenant: TenantId) -> Option<BasisPoints> {
        self.0.get(&tenant).map(|of| of.most_memory).filter(|part| *part < BasisPoints::WHOLE)
    }
}
