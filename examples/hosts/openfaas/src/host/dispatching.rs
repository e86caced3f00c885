//! Requests: arrival, dispatch to an instance, end and rejection.

use super::{Go, Host, Known, Process, Request, Turn};
use crate::api::ApiError;
use crate::batches::Batch;
use axum::http::StatusCode;
use gshare_core::{Duration, InstanceId, RequestId, Timestamp};
use gshare_sched::platform::{PlatformEvent, Rejection};
use std::collections::BTreeMap;
use tokio::sync::mpsc::UnboundedSender;

impl Host {
    /// Registers a request. Its turns arrive over `turn`.
    ///
    /// # Errors
    /// 404 without such a function, 503 if no share can meet its SLO, 400 if it serves no requests.
    pub fn arrive(
        &mut self,
        now: Timestamp,
        name: &str,
        turn: UnboundedSender<Turn>,
    ) -> Result<RequestId, ApiError> {
        let function = self.functions.get_mut(name).ok_or_else(|| ApiError::unknown_function(name))?;
        function.invocations += 1;
        let function = function.serving;
        if let Some(Known { problem: Some(why), hopeless: true, .. }) = self.versions.get(&function) {
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why.clone()));
        }
        let request = RequestId::new(self.next_request);
        self.next_request += 1;
        let kept = Request { name: name.to_owned(), turn, on: None, since: now, reached: false };
        self.requests.insert(request, kept);
        let told = self.tell(now, PlatformEvent::RequestArrived { request, function, deadline: None });
        if told.is_err() {
            self.requests.remove(&request);
        }
        told.map(|()| request)
    }

    /// The instance has accepted the request, so the platform must not dispatch it again. False if it runs elsewhere by now.
    pub fn reached(&mut self, request: RequestId, instance: InstanceId) -> bool {
        let Some(of) = self.requests.get_mut(&request) else { return false };
        of.reached = of.on == Some(instance);
        of.reached
    }

    /// The request has ended, or its client has left.
    pub fn end(&mut self, now: Timestamp, request: RequestId) {
        let Some(of) = self.requests.get(&request) else { return };
        let on = of.on.and_then(|instance| self.instances.get_mut(&instance));
        if on.as_ref().is_some_and(|instance| instance.ends) {
            // The place on this instance frees only with the instance's end.
            return;
        }
        let event = match of.on {
            None => PlatformEvent::RequestCancelled { request },
            Some(_) => {
                if let Some(instance) = on {
                    instance.requests.remove(&request);
                    if instance.processes.len() > 1
                        && let Some(of) = self.versions.get_mut(&instance.function)
                    {
                        of.before.pipelined += 1;
                    }
                }
                PlatformEvent::RequestDone { request, took: now.saturating_since(of.since) }
            }
        };
        self.requests.remove(&request);
        self.inform(now, event);
    }

    /// Whether the version that serves a function takes batches.
    pub fn takes_batches(&self, name: &str) -> bool {
        let serving = self.functions.get(name).and_then(|of| self.versions.get(&of.serving));
        serving.is_some_and(|of| of.version.plan.batch.is_some())
    }

    /// Gives a request to an instance; `batches` are the batches of the platform's same answer.
    pub(super) fn dispatch(
        &mut self,
        request: RequestId,
        instance: InstanceId,
        batches: &mut BTreeMap<InstanceId, Batch>,
    ) {
        if self.turns.contains_key(&request) {
            return self.begin_turn(instance);
        }
        let Some(of) = self.requests.get_mut(&request) else {
            // The client left between the arrival and the dispatch.
            return self.events.push_back(PlatformEvent::RequestDone { request, took: Duration::ZERO });
        };
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if of.turn.is_closed() {
            self.requests.remove(&request);
            return self.events.push_back(PlatformEvent::RequestDone { request, took: Duration::ZERO });
        }
        (of.on, of.since) = (Some(instance), self.last);
        known.requests.insert(request);
        if known.ends {
            // The platform dispatches the request again once this instance has ended.
            return;
        }
        let address = |process: &Process| process.process.as_ref()?.address();
        // Without the address of each the instance is unreachable.
        let addresses = known.processes.iter().map(address).collect::<Option<_>>().unwrap_or_default();
        // A client that has left reports so itself.
        let in_batches = self.versions.get(&known.function).is_some_and(|of| of.version.plan.batch.is_some());
        let batch = in_batches.then(|| batches.entry(instance).or_default().clone());
        let _ = of.turn.send(Turn::Go(Go { instance, addresses, load: known.load, batch }));
    }

    pub(super) fn reject(&mut self, request: RequestId, reason: Rejection) {
        if let Some(trial) = self.turns.remove(&request) {
            return self.no_turn(trial, reason);
        }
        let Some(of) = self.requests.get(&request) else { return };
        // The request waited for the old version; the new version serves it.
        if let (Rejection::Removed, Some(function)) = (reason, self.functions.get(&of.name)) {
            let function = function.serving;
            let again = PlatformEvent::RequestArrived { request, function, deadline: None };
            return self.events.push_back(again);
        }
        let Some(of) = self.requests.remove(&request) else { return };
        let problem = self.functions.get(&of.name).and_then(|function| self.versions.get(&function.serving));
        let problem = problem.and_then(|known| known.problem.clone().or(known.measuring.progress.clone()));
        let _ = of.turn.send(match (reason, problem) {
            (Rejection::WaitedTooLong, Some(why)) => Turn::Hopeless(format!("{reason}; {}: {why}", of.name)),
            _ => Turn::No(reason),
        });
    }
}

/// The HTTP error for a rejected request.
pub fn refusal(reason: Rejection) -> ApiError {
    let status = match reason {
        Rejection::QueueFull | Rejection::TenantQueueFull => StatusCode::TOO_MANY_REQUESTS,
        Rejection::WaitedTooLong | Rejection::DeadlineMissed | Rejection::WouldBeLate => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        Rejection::AttemptsExhausted => StatusCode::BAD_GATEWAY,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    ApiError::new(status, reason.to_string())
}
