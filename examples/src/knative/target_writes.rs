//! Computes the writes for a target from the observed objects and the time. Pure.
//!
//! # Terms
//! - **ready**: pods behind the private service that take requests;
//! - **desired**: number of pods for the load, if the load is known; **want**: this number within its bounds, or -1 if it
//!   is unknown;
//! - **threshold**: ready pods with which the target counts as active: max(min, 1), and before it is initialized max(min,
//!   initial).
//!
//! # Algorithm
//! 1. No private service yet: make the `ServerlessService`, want nothing. A foreign service is left alone.
//! 2. *Initialized* once ready reaches the threshold and there is a service for clients; it stays so.
//! 3. Pods decide on the state of the target before the want is computed:
//!
//! | was | ready | is | |---|---|---| | Activating, or given up with min > 0 and nothing known of the load | >= threshold |
//! Active | | Active | < threshold | Activating, unless 5 makes it Inactive | | not Inactive | initial = 0, no load |
//! Inactive, `NoTraffic` |
//! 4. want = desired, at least min (before it is initialized: and initial, if more than 1), at most max. Nothing known: the
//!    minimum while it is Activating or was given up, else nothing is changed.
//! 5. A want of 0:
//!
//! | is | then | |---|---| | Activating, less than the progress deadline | nothing is changed | | Activating, longer | 0
//! pods, Inactive, `TimedOut` | | Active, less than the window | 1 pod | | Active, longer | Inactive, `NoTraffic`; pods
//! stay | | Inactive, pods left | 0 pods, once requests have gone to the activator for the grace period and it answers for
//! the service |
//! 6. A want above 0: that many pods, Active with enough of them, else Activating, `Queued`; or `TargetNotFound`, if there
//!    is no Deployment.
//! 7. Requests go to the activator (Proxy) if want is 0, or nothing is known of an Inactive target; else to pods (Serve).
//! 8. Ready is False if any of the three conditions is, else Unknown if any is, else True.
//!
//! Writes go out in the order scale, service, status. A second pass in the same instant finds nothing to write.
//!
//! # Differences from Knative's own autoscaler
//! - No excess burst capacity: with pods, requests go straight to them.
//! - The time of a condition changes with its status only, not with its message.
//! - `TimedOut` stays the reason until there is load again.
//! - Pods are counted before any decision, so one pass suffices.

use super::api::{
    ACTIVE, Condition, INITIALIZED, Mode, PodAutoscaler, PodAutoscalerStatus, READY, SKS_READY,
    ServerlessService, ServerlessServiceSpec, elapsed,
};
use super::settings::{Defaults, Invalid, Settings};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::{Resource as _, ResourceExt as _};
use std::time::Duration;

/// Time after the progress deadline in which the Revision reports the fault of its pods itself.
const DEADLINE_SLACK: Duration = Duration::from_secs(10);
/// Time between two questions to the activator.
const PROBE: Duration = Duration::from_secs(1);
/// Time after which a target that is not there is looked for again.
const MISSING: Duration = Duration::from_secs(5);

/// The observed objects.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// The object behind the request.
    pub pa: &'a PodAutoscaler,
    /// Service of the target.
    pub sks: Option<&'a ServerlessService>,
    /// Pods for its target; none: there is no such target.
    pub replicas: Option<u32>,
    /// Pods behind the private service that take requests.
    pub ready: u32,
    /// Pods for the load.
    pub desired: Option<u32>,
    /// The activator has just answered for the service.
    pub backed: bool,
}

/// One thing to write.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// How many pods the target is to have.
    Scale(u32),
    /// A missing service.
    CreateSks(Box<ServerlessService>),
    /// The wanted spec of an existing service.
    PatchSks(ServerlessServiceSpec),
    /// The object's own status.
    Status(PodAutoscalerStatus),
}

/// The result of a pass.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pass {
    /// In this order.
    pub writes: Vec<Write>,
    /// When to look again if nothing happens.
    pub wake: Option<Duration>,
    /// Whether the activator answers for the service is all that is left to find out.
    pub probe: bool,
}

/// Status of the condition `Active`, and the time of its last change.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Inactive { since: Timestamp, timed_out: bool },
    Activating { since: Timestamp },
    Active { since: Timestamp },
}

impl Phase {
    fn of(status: &PodAutoscalerStatus, now: Timestamp) -> Self {
        let Some(active) = status.condition(ACTIVE) else { return Self::Activating { since: now } };
        let since = active.since(now);
        match active.status.as_str() {
            "True" => Self::Active { since },
            "False" => Self::Inactive { since, timed_out: active.reason == TIMED_OUT.0 },
            _ => Self::Activating { since },
        }
    }

    /// Status, reason and message of the condition.
    const fn said(self) -> Said<'static> {
        match self {
            Self::Inactive { timed_out: true, .. } => ("False", TIMED_OUT.0, TIMED_OUT.1),
            Self::Inactive { timed_out: false, .. } => {
                ("False", "NoTraffic", "The target is not receiving traffic.")
            }
            Self::Activating { .. } => (
                "Unknown",
                "Queued",
                "Requests to the target are being buffered as resources are provisioned.",
            ),
            Self::Active { .. } => ("True", "", ""),
        }
    }
}

type Said<'a> = (&'a str, &'a str, &'a str);
const TIMED_OUT: (&str, &str) = ("TimedOut", "The target could not be activated.");

/// See the [module](self).
pub fn reconcile(observed: &Observed<'_>, settings: &Settings, defaults: &Defaults, now: Timestamp) -> Pass {
    let pa = observed.pa;
    let old = pa.status.clone().unwrap_or_default();
    if let Some(sks) = observed.sks
        && !is_ours(sks, pa)
    {
        let message =
            format!("There is an existing ServerlessService \"{}\" that we do not own.", sks.name_any());
        return refuse(pa, "NotOwned", &message, now);
    }
    let sks_status = observed.sks.and_then(|sks| sks.status.clone()).unwrap_or_default();
    let (service, private) = (sks_status.service_name.clone(), sks_status.private_service_name.clone());
    let measured = !private.is_empty();
    let (ready, desired) = if measured { (observed.ready, observed.desired) } else { (0, None) };

    let latched = old.is_true(INITIALIZED);
    let threshold = settings.min.max(if latched { 1 } else { settings.initial });
    let initialized = latched || (ready >= threshold && !service.is_empty());
    let enough = ready >= threshold.max(1);

    let mut lower = settings.min;
    if !initialized && settings.initial > 1 {
        lower = lower.max(settings.initial);
    }
    if defaults.no_scale_to_zero {
        lower = lower.max(1);
    }
    let bound = |pods: u32| pods.max(lower).min(settings.max);
    let desired = desired.map(bound);
    let idle = |since: Timestamp| elapsed(since, now) >= settings.window;
    let phase = match Phase::of(&old, now) {
        // A target that was given up has become ready by itself, and the load asks for nothing more.
        Phase::Inactive { timed_out: true, .. } if desired.is_none() && bound(0) > 0 && enough => {
            Phase::Active { since: now }
        }
        inactive @ Phase::Inactive { .. } => inactive,
        _ if threshold == 0 && desired.unwrap_or(0) == 0 => Phase::Inactive { since: now, timed_out: false },
        Phase::Activating { .. } if enough => Phase::Active { since: now },
        Phase::Active { since } if !(enough || desired == Some(0) && idle(since)) => {
            Phase::Activating { since: now }
        }
        same => same,
    };
    // Nothing known of the load: what min asks for. A target that was given up stays so.
    let held = matches!(phase, Phase::Activating { .. } | Phase::Inactive { timed_out: true, .. });
    let wanted = desired.or((measured && held).then(|| bound(0)));

    let mut pass = Pass::default();
    let mut scale = None;
    let (want, phase) = match (wanted, phase) {
        (None, phase) => (None, phase),
        (Some(0), Phase::Activating { since }) => {
            let patience = defaults.progress_deadline + DEADLINE_SLACK;
            let left = patience.saturating_sub(elapsed(since, now));
            if left.is_zero() {
                scale = Some(0);
                (Some(0), Phase::Inactive { since: now, timed_out: true })
            } else {
                pass.wake = Some(left);
                (None, phase)
            }
        }
        (Some(0), Phase::Active { since }) if idle(since) => {
            pass.wake = Some(PROBE);
            (Some(0), Phase::Inactive { since: now, timed_out: false })
        }
        (Some(0), Phase::Active { since }) => {
            pass.wake = Some(settings.window.saturating_sub(elapsed(since, now)));
            scale = Some(1);
            (Some(1), phase)
        }
        (Some(0), Phase::Inactive { since, .. }) => {
            if observed.replicas.is_some_and(|replicas| replicas > 0) {
                let left = wait_for_zero(observed, &sks_status, settings, defaults, elapsed(since, now), now);
                pass.probe = left == Some(Duration::ZERO) && !observed.backed;
                if left == Some(Duration::ZERO) && observed.backed {
                    scale = Some(0);
                } else {
                    pass.wake = Some(left.unwrap_or(PROBE).max(PROBE));
                }
            }
            (Some(0), phase)
        }
        (Some(want), phase) => {
            scale = Some(want);
            let phase = match phase {
                Phase::Inactive { .. } if enough => Phase::Active { since: now },
                Phase::Inactive { .. } => Phase::Activating { since: now },
                same => same,
            };
            (Some(want), phase)
        }
    };

    match (scale, observed.replicas) {
        (Some(want), Some(replicas)) if want != replicas => pass.writes.push(Write::Scale(want)),
        (Some(_), None) => pass.wake = Some(MISSING),
        _ => {}
    }
    let proxied = want == Some(0) || (want.is_none() && matches!(phase, Phase::Inactive { .. }));
    let spec = ServerlessServiceSpec {
        mode: if proxied { Mode::Proxy } else { Mode::Serve },
        object_ref: pa.spec.scale_target_ref.clone(),
        protocol_type: pa.spec.protocol_type.clone(),
        num_activators: 0,
    };
    let mut sks_ready = false;
    match observed.sks {
        None => pass.writes.push(Write::CreateSks(Box::new(new_sks(pa, spec)))),
        Some(sks) if sks.spec != spec => pass.writes.push(Write::PatchSks(spec)),
        Some(sks) => {
            sks_ready = sks_status.observed_generation == sks.metadata.generation
                && sks_status.condition(READY).is_some_and(|ready| ready.status == "True");
        }
    }

    let waits = sks_status.condition(READY).map_or("", |ready| ready.message.as_str());
    let target = &pa.spec.scale_target_ref;
    let kind = target.kind.as_deref().unwrap_or_default();
    let missing = format!("There is no {kind} \"{}\" to scale.", target.name.as_deref().unwrap_or_default());
    let active = match phase {
        Phase::Activating { .. } if observed.replicas.is_none() => ("Unknown", "TargetNotFound", &*missing),
        phase => phase.said(),
    };
    let conditions: [(&str, Said<'_>); 3] = [
        (ACTIVE, active),
        (
            SKS_READY,
            match sks_ready {
                true => ("True", "", ""),
                false if !measured => ("Unknown", "NotReady", "No Private Service Name"),
                false => ("Unknown", "NotReady", waits),
            },
        ),
        (INITIALIZED, if initialized { ("True", "", "") } else { ("Unknown", "", "") }),
    ];
    let status = PodAutoscalerStatus {
        observed_generation: pa.metadata.generation,
        conditions: merge(&old, &conditions, now),
        service_name: service,
        metrics_service_name: private,
        desired_scale: Some(want.and_then(|want| i32::try_from(want).ok()).unwrap_or(-1)),
        actual_scale: i32::try_from(ready).ok(),
    };
    if status != old {
        pass.writes.push(Write::Status(status));
    }
    pass
}

/// How long the last pods must still be kept; `None`: requests do not go to the activator yet.
fn wait_for_zero(
    observed: &Observed<'_>,
    sks_status: &super::api::ServerlessServiceStatus,
    settings: &Settings,
    defaults: &Defaults,
    inactive: Duration,
    now: Timestamp,
) -> Option<Duration> {
    // The service's report on the activator may belong to an earlier mode.
    let known = |sks: &&ServerlessService| sks_status.observed_generation == sks.metadata.generation;
    observed.sks.filter(|sks| sks.spec.mode == Mode::Proxy).filter(known)?;
    // The activator may have been ready before the target became inactive.
    let backed = sks_status.condition("ActivatorEndpointsPopulated");
    let backed = backed.filter(|backed| backed.status == "True");
    let proxied = backed.map_or(Duration::ZERO, |backed| elapsed(backed.since(now), now));
    let grace = defaults.scale_to_zero_grace.saturating_sub(inactive.max(proxied));
    Some(grace.max(settings.retention.saturating_sub(inactive)))
}

/// Reports why this object cannot be served. Its pods and its service stay unchanged.
pub fn refuse(pa: &PodAutoscaler, reason: &str, message: &str, now: Timestamp) -> Pass {
    let old = pa.status.clone().unwrap_or_default();
    let mut status = old.clone();
    status.observed_generation = pa.metadata.generation;
    let kept = |kind| {
        let kept = old.condition(kind);
        kept.map_or(("Unknown", "", ""), |kept| (&*kept.status, &*kept.reason, &*kept.message))
    };
    let conditions = [
        (ACTIVE, ("False", reason, message)),
        (SKS_READY, kept(SKS_READY)),
        (INITIALIZED, kept(INITIALIZED)),
    ];
    status.conditions = merge(&old, &conditions, now);
    let mut pass = Pass::default();
    if status != old {
        pass.writes.push(Write::Status(status));
    }
    pass
}

/// [`refuse`], for an annotation.
pub fn refuse_annotation(pa: &PodAutoscaler, why: &Invalid, now: Timestamp) -> Pass {
    refuse(pa, "InvalidAnnotation", &why.to_string(), now)
}

fn is_ours(sks: &ServerlessService, pa: &PodAutoscaler) -> bool {
    let mut owners = sks.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pa.metadata.uid.as_ref())
}

fn new_sks(pa: &PodAutoscaler, spec: ServerlessServiceSpec) -> ServerlessService {
    let metadata = ObjectMeta {
        name: pa.metadata.name.clone(),
        namespace: pa.metadata.namespace.clone(),
        labels: pa.metadata.labels.clone(),
        // Without `blockOwnerDeletion`, which would ask for a right to the finalizers of the owner.
        owner_references: pa.controller_owner_ref(&()).map(|owner| vec![owner]),
        ..ObjectMeta::default()
    };
    ServerlessService { metadata, spec, status: None }
}

/// The conditions with `Ready`, sorted; conditions of other types stay.
fn merge(old: &PodAutoscalerStatus, said: &[(&str, Said<'_>)], now: Timestamp) -> Vec<Condition> {
    // Times are written in whole seconds, so a fraction would make each comparison with the written time fail.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let found = |status: &str| said.iter().map(|(_, said)| *said).find(|said| said.0 == status);
    let ready = found("False").or_else(|| found("Unknown")).unwrap_or(("True", "", ""));
    let ours = said.iter().copied().chain([(READY, ready)]);
    let mut conditions: Vec<_> = ours
        .map(|(kind, (status, reason, message))| {
            let before = old.condition(kind).filter(|before| before.status == status);
            Condition {
                kind: kind.to_owned(),
                status: status.to_owned(),
                last_transition_time: Some(
                    before.and_then(|before| before.last_transition_time.clone()).unwrap_or(Time(now)),
                ),
                reason: reason.to_owned(),
                message: message.to_owned(),
                severity: String::new(),
            }
        })
        .collect();
    let ours = conditions.len();
    for other in &old.conditions {
        if conditions[..ours].iter().all(|mine| mine.kind != other.kind) {
            conditions.push(other.clone());
        }
    }
    conditions.sort_by(|a, b| a.kind.cmp(&b.kind));
    conditions
}

#[cfg(test)]
mod tests;
