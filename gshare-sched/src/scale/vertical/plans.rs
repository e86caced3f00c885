//! Steps 1 to 4 of a period: what each client wants, and what it gets.

use super::{Client, DiluVertical, Gpu, MAX_SEVERITY, MAX_TOKENS, WHOLE, WINDOW, grown};
use crate::scale::ScaleState;
use crate::scale::apportion::{Want, apportion};
use gshare_core::ClientId;

/// A client's tokens in the next period, and the terms of their computation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) client: ClientId,
    base: u64,
    wants: u64,
    /// 0 for others than owners.
    severity: u64,
    request: u64,
    /// The most tokens of use to the client: its limit for a busy owner.
    cap: u64,
    pub(super) tokens: u64,
}

impl DiluVertical {
    /// Steps 1 and 2: the owners' states and wishes, and their join. `plans` gets an entry per client, in their order.
    pub(super) fn plan_owners(&mut self, gpu: &Gpu, ended: u64, plans: &mut Vec<Plan>) -> ScaleState {
        let busy = |client: &Client| !client.is_idle(ended, WINDOW);
        let all_busy = gpu.clients.iter().filter(|id| self.clients.get(id).is_some_and(busy)).count();
        let mut state = ScaleState::None;
        for &id in &gpu.clients {
            let Some(client) = self.clients.get_mut(&id) else { continue };
            let (request, limit) = (client.request, client.limit);
            let mut plan =
                Plan { client: id, base: request, wants: request, severity: 0, request, cap: 0, tokens: 0 };
            if client.class.is_slo_sensitive() {
                let verdict = client.verdict.filter(|verdict| self.now < verdict.until);
                let (ratio, most) = verdict.map_or((WHOLE, WHOLE), |verdict| (verdict.ratio, verdict.most));
                plan.severity = WHOLE;
                client.state = if !busy(client) {
                    // The verdict from before the stop says nothing about the time after it.
                    client.verdict = None;
                    ScaleState::Recovery
                } else if ratio > most {
                    plan.wants = limit;
                    plan.severity = ratio.min(MAX_SEVERITY);
                    let severity_basis_points = u16::try_from(plan.severity).unwrap_or(u16::MAX);
                    ScaleState::Emergency { severity_basis_points }
                } else if all_busy == 1 {
                    plan.wants = grown(client.last.max(request)).min(limit);
                    ScaleState::Recovery
                } else {
                    ScaleState::Contention
                };
                state = state.max(client.state);
                if busy(client) {
                    plan.cap = limit;
                    let needs = grown(client.demand).clamp(request, limit);
                    plan.wants = if self.now < gpu.learns_until { limit } else { plan.wants.max(needs) };
                    if client.rests(ended) {
                        plan.wants = request;
                    }
                }
            }
            plans.push(plan);
        }
        state
    }

    /// Step 3: the wishes of all clients other than owners.
    pub(super) fn plan_others(&mut self, gpu: &mut Gpu, ended: u64, plans: &mut [Plan]) {
        let (state, step) = (gpu.state, gpu.step.take().unwrap_or(WHOLE));
        let learns = state != ScaleState::None && self.now < gpu.learns_until;
        let lends = !learns && self.lends(gpu, ended);
        for plan in plans.iter_mut().filter(|plan| plan.severity == 0) {
            let Some(client) = self.clients.get_mut(&plan.client) else { continue };
            if state != ScaleState::None {
                plan.base = client.floor();
            }
            if learns {
                client.resumes.get_or_insert(client.last);
                plan.wants = plan.base;
                continue;
            }
            if lends && matches!(state, ScaleState::Contention | ScaleState::Emergency { .. }) {
                client.resumes.get_or_insert(client.last);
                plan.wants = client.limit;
                continue;
            }
            // The client stepped back or had borrowed tokens, and resumes with its own. If the owners are idle now, it keeps a larger
            // loan.
            let resumes = client
                .resumes
                .take()
                .filter(|resumes| state != ScaleState::Recovery || client.last < *resumes);
            let last = resumes.unwrap_or(client.last);
            plan.wants = match state {
                ScaleState::None => client.limit,
                ScaleState::Recovery => grown(last).min(client.limit),
                ScaleState::Contention | ScaleState::Emergency { .. } => {
                    (last * step).div_ceil(WHOLE).min(client.limit)
                }
            };
        }
    }

    /// Whether all owners rest or are idle.
    fn lends(&self, gpu: &Gpu, ended: u64) -> bool {
        let clients = gpu.clients.iter().filter_map(|id| self.clients.get(id));
        let mut owners = clients.filter(|client| client.class.is_slo_sensitive());
        owners.all(|owner| owner.is_idle(ended, WINDOW) || owner.rests(ended))
    }
}

/// Step 4. Bases add up to at most the whole, since requests do.
pub(super) fn share_out(plans: &mut [Plan]) {
    let mut rest = MAX_TOKENS - plans.iter().map(|plan| plan.base).sum::<u64>();
    let mut wants = Vec::with_capacity(plans.len());
    for owners in [true, false] {
        wants.clear();
        wants.extend(plans.iter().filter(|plan| (plan.severity > 0) == owners).map(|plan| {
            let more = plan.wants.saturating_sub(plan.base);
            Want::new(more, if owners { more * plan.severity } else { plan.request })
        }));
        apportion(rest, &mut wants);
        let plans = plans.iter_mut().filter(|plan| (plan.severity > 0) == owners);
        for (plan, want) in plans.zip(&wants) {
            plan.tokens = plan.base + want.part;
            rest -= want.part;
        }
    }
    if rest > 0 && plans.iter().any(|plan| plan.cap > plan.tokens) {
        wants.clear();
        let more = plans.iter().map(|plan| plan.cap.saturating_sub(plan.tokens));
        wants.extend(more.map(|more| Want::new(more, more)));
        apportion(rest, &mut wants);
        for (plan, want) in plans.iter_mut().zip(&wants) {
            plan.tokens += want.part;
        }
    }
}
