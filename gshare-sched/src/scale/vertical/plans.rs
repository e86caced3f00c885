//! Steps 1 to 4 of a period: what each client wants, and what it gets.

use super::{CALM_CYCLES, Client, DiluVertical, GROWTH, Gpu, MAX_SEVERITY, REST_PERIODS, WHOLE, part};
use crate::scale::ScaleState;
use crate::scale::apportion::{Want, apportion};

/// A client's tokens in the next period, and the terms of their computation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) slot: u32,
    pub(super) base: u64,
    pub(super) wants: u64,
    /// 0 for others than owners.
    pub(super) severity: u64,
    pub(super) request: u64,
    /// The most tokens of use to the client: its limit for a busy owner.
    pub(super) cap: u64,
    pub(super) tokens: u64,
}

impl DiluVertical {
    /// Steps 1 and 2: the owners' states and wishes, and their join. `plans` gets an entry per client, in their order.
    pub(super) fn plan_owners(&mut self, gpu: &Gpu, ended: u64, plans: &mut Vec<Plan>) -> ScaleState {
        let window = u64::from(self.config.window_periods);
        let busy = |client: &Client| !client.is_idle(ended, window);
        let clients = gpu.clients.iter().filter_map(|&slot| self.clients.at(slot));
        let all_busy = clients.filter(|client| busy(client)).count();
        let mut state = ScaleState::None;
        for &slot in &gpu.clients {
            let Some(client) = self.clients.at(slot) else { continue };
            let (request, limit) = (client.request, client.limit);
            let mut plan =
                Plan { slot, base: request, wants: request, severity: 0, request, cap: 0, tokens: 0 };
            if client.class.is_slo_sensitive() {
                let verdict = client.verdict.filter(|verdict| self.now < verdict.until);
                let (ratio, most) = verdict.map_or((WHOLE, WHOLE), |verdict| (verdict.ratio, verdict.most));
                plan.severity = WHOLE;
                let own = if !busy(client) {
                    ScaleState::Recovery
                } else if ratio > most {
                    plan.wants = limit;
                    plan.severity = ratio.min(MAX_SEVERITY);
                    let severity_basis_points = u16::try_from(plan.severity).unwrap_or(u16::MAX);
                    ScaleState::Emergency { severity_basis_points }
                } else if all_busy == 1 {
                    plan.wants = self.grown(client.last.max(request)).min(limit);
                    ScaleState::Recovery
                } else {
                    ScaleState::Contention
                };
                state = state.max(own);
                let idle = !busy(client);
                if self.config.learn && !idle {
                    plan.cap = limit;
                    let needs = self.grown(client.demand).clamp(request, limit);
                    plan.wants = if self.now < gpu.learns_until { limit } else { plan.wants.max(needs) };
                    if client.rests(ended, REST_PERIODS) {
                        plan.wants = request;
                    }
                }
                if let Some(client) = self.clients.at_mut(slot) {
                    client.state = own;
                    if idle {
                        // The verdict from before the stop says nothing about the time after it.
                        client.verdict = None;
                    }
                }
            }
            plans.push(plan);
        }
        state
    }

    /// Step 3: the wishes of all clients other than owners.
    pub(super) fn plan_others(&mut self, gpu: &mut Gpu, state: ScaleState, ended: u64, plans: &mut [Plan]) {
        let step = self.emergency_step(gpu);
        let beside = gpu.step.take().unwrap_or(WHOLE);
        let calm = state == ScaleState::Contention && gpu.calm >= CALM_CYCLES;
        if calm {
            gpu.calm = 0;
        }
        let (block, growth) = (self.block(ended), GROWTH);
        let grown = |tokens: u64| tokens + part(growth, tokens);
        let learns = state != ScaleState::None && self.now < gpu.learns_until;
        let lends = !learns && self.lends(gpu, ended);
        for plan in plans.iter_mut().filter(|plan| plan.severity == 0) {
            let Some(client) = self.clients.at_mut(plan.slot) else { continue };
            if state != ScaleState::None {
                plan.base = client.floor(block, self.config.learn);
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
                ScaleState::Contention | ScaleState::Emergency { .. } if self.config.learn => {
                    (last * beside).div_ceil(WHOLE).min(client.limit)
                }
                ScaleState::Emergency { severity_basis_points } if step => {
                    client.request.min(last) * WHOLE / u64::from(severity_basis_points)
                }
                ScaleState::Emergency { .. } => client.request.min(last),
                ScaleState::Recovery => grown(last).min(client.limit),
                _ if calm => grown(last).min(client.limit),
                _ => last.min(client.limit),
            };
        }
    }

    /// Whether all owners rest or are idle.
    fn lends(&self, gpu: &Gpu, ended: u64) -> bool {
        let (window, rest) = (u64::from(self.config.window_periods), REST_PERIODS);
        let clients = gpu.clients.iter().filter_map(|&slot| self.clients.at(slot));
        let mut owners = clients.filter(|client| client.class.is_slo_sensitive());
        self.config.learn && owners.all(|owner| owner.is_idle(ended, window) || owner.rests(ended, rest))
    }

    /// Whether an owner in EMERGENCY ended a KLC in this period; clears all marks.
    fn emergency_step(&mut self, gpu: &Gpu) -> bool {
        let mut step = false;
        for &slot in &gpu.clients {
            let Some(client) = self.clients.at_mut(slot) else { continue };
            if let Some(verdict) = client.verdict.as_mut() {
                step |= verdict.fresh && matches!(client.state, ScaleState::Emergency { .. });
                verdict.fresh = false;
            }
        }
        step
    }

    /// Step 4. Bases add up to at most `max_tokens`, since requests do.
    pub(super) fn share_out(&mut self, max_tokens: u64, plans: &mut [Plan]) {
        let mut rest = max_tokens - plans.iter().map(|plan| plan.base).sum::<u64>();
        for owners in [true, false] {
            self.wants.clear();
            self.wants.extend(plans.iter().filter(|plan| (plan.severity > 0) == owners).map(|plan| {
                let more = plan.wants.saturating_sub(plan.base);
                Want::new(more, if owners { more * plan.severity } else { plan.request })
            }));
            apportion(rest, &mut self.wants);
            let parts = self.wants.iter().map(|want| want.part);
            let plans = plans.iter_mut().filter(|plan| (plan.severity > 0) == owners);
            for (plan, part) in plans.zip(parts) {
                plan.tokens = plan.base + part;
                rest -= part;
            }
        }
        if rest > 0 && plans.iter().any(|plan| plan.cap > plan.tokens) {
            self.wants.clear();
            let more = plans.iter().map(|plan| plan.cap.saturating_sub(plan.tokens));
            self.wants.extend(more.map(|more| Want::new(more, more)));
            apportion(rest, &mut self.wants);
            for (plan, want) in plans.iter_mut().zip(&self.wants) {
                plan.tokens += want.part;
            }
        }
    }
}
