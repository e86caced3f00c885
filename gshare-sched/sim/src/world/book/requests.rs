//! The book's part for requests: from their dispatch to their answer or rejection.

use super::Book;
use gshare_core::{InstanceId, RequestId, Timestamp};
use gshare_sched::platform::{Life, Part, Regime, Rejection, Work};

impl Book {
    /// Lets the requests of these parts wait again.
    pub(super) fn release(&mut self, parts: &[Part], requests: &[RequestId]) {
        self.count_running(parts, -(isize::try_from(requests.len()).unwrap_or(isize::MAX)));
        for id in requests {
            let Some(request) = self.requests.get_mut(id) else { continue };
            request.on = None;
            if let Some(bounds) = &mut self.bounds {
                bounds.waits(*id, request.function, (request.arrived, request.deadline));
            }
        }
    }

    pub(super) fn dispatched(
        &mut self,
        now: Timestamp,
        request: RequestId,
        id: InstanceId,
    ) -> Result<(), String> {
        let Some(asked) = self.requests.get_mut(&request) else {
            return Err(format!("{request} is dispatched, but it has ended"));
        };
        if let Some(on) = asked.on {
            return Err(format!("{request} is dispatched to {id}, but it runs on {on}"));
        }
        if asked.deadline.is_some_and(|deadline| now >= deadline) {
            return Err(format!("{request} is dispatched after its deadline"));
        }
        let Some(found) = self.instances.get_mut(&id) else {
            return Err(format!("{request} is dispatched to {id}, which is not there"));
        };
        if found.life != Life::Ready || found.function != asked.function {
            let (life, of) = (found.life, found.function);
            return Err(format!(
                "{request} of {} is dispatched to {id} of {of}, which is {life}",
                asked.function
            ));
        }
        if found.requests.len() >= found.room {
            return Err(format!(
                "{request} is dispatched to {id}, which has {} of {} requests",
                found.requests.len(),
                found.room
            ));
        }
        asked.on = Some(id);
        asked.attempts += 1;
        found.requests.push(request);
        if let Some(bounds) = &mut self.bounds {
            bounds.leaves(request, found.function);
            bounds.may_try(request, asked.attempts)?;
        }
        if let Some(function) = self.functions.get(&found.function) {
            self.tenants.runs(function.tenant, asked.attempts == 1)?;
        }
        for part in &found.parts {
            let Some(device) = self.devices.get_mut(&part.gpu) else { continue };
            let slice = part.slice.and_then(|at| device.slices.iter_mut().find(|slice| slice.at == at));
            let (running, many) = match slice {
                Some(slice) => (&mut slice.running, slice.tenants.len() > 1),
                None => (&mut device.running, device.regime == Regime::Whole),
            };
            *running += 1;
            let alone = !many || *running == found.requests.len();
            if !alone {
                return Err(format!(
                    "{request} is dispatched to {id}, but another instance runs on its part of {}",
                    part.gpu
                ));
            }
        }
        Ok(())
    }

    pub(super) fn rejected(
        &mut self,
        now: Timestamp,
        request: RequestId,
        reason: Rejection,
    ) -> Result<(), String> {
        let Some(asked) = self.requests.remove(&request) else {
            return Err(format!("{request} is rejected ({reason}), but it has ended"));
        };
        if let Some(on) = asked.on {
            return Err(format!("{request} is rejected ({reason}), but it runs on {on}"));
        }
        if let Some(bounds) = &mut self.bounds {
            bounds.leaves(request, asked.function);
        }
        let tenant = self.function(asked.function)?.tenant;
        if asked.attempts == 0 {
            self.tenants.waits_no_more(tenant);
        }
        let function = self.function(asked.function)?;
        let holds = match reason {
            Rejection::DeadlineMissed => asked.deadline.is_some_and(|deadline| now >= deadline),
            Rejection::WouldBeLate => asked.deadline.is_some() || function.slo.is_some(),
            Rejection::Removed => function.removed,
            Rejection::Cancelled => asked.cancelled,
            _ => true,
        };
        if !holds {
            return Err(format!("{request} is rejected, but not because {reason}"));
        }
        *function.outcome.rejected.entry(reason).or_insert(0) += 1;
        Ok(())
    }

    pub(super) fn done(&mut self, now: Timestamp, request: RequestId) -> Result<(), String> {
        let ended = self.requests.remove(&request);
        let Some((asked, on)) = ended.and_then(|asked| asked.on.map(|on| (asked, on))) else {
            return Err(format!("the host answers {request}, which runs nowhere"));
        };
        let (mut cold, mut parts_had) = (false, 0);
        if let Some(found) = self.instances.get_mut(&on) {
            found.requests.retain(|one| *one != request);
            cold = found.ready.is_some_and(|ready| ready > asked.arrived);
            let parts = core::mem::take(&mut found.parts);
            parts_had = parts.len();
            self.count_running(&parts, -1);
            if let Some(found) = self.instances.get_mut(&on) {
                found.parts = parts;
            }
        }
        let function = self.function(asked.function)?;
        let tenant = function.tenant;
        let latency = now.saturating_since(asked.arrived);
        let (slo, staged) = (function.slo, matches!(function.work, Work::Pipeline { .. }));
        let outcome = &mut function.outcome;
        outcome.answered += 1;
        outcome.cold_starts += u64::from(cold);
        outcome.pipelined += u64::from(staged && parts_had > 1);
        outcome.within_slo += u64::from(slo.is_some_and(|slo| latency <= slo));
        outcome.latencies.push(latency);
        self.tenants.ended(tenant, 1);
        Ok(())
    }
}
