//! How an instance serves, and which events are refused.

use crate::pipeline::{RouteError, RouteEvent, Service};
use gshare_core::dag::MAX_TIME;
use gshare_core::{Duration, InstanceId, RequestId, SharedSlice, TimeWentBack, Timestamp};

/// Time of one request on an empty instance in memory.
pub(super) const fn latency(service: &Service) -> Duration {
    match *service {
        Service::Exclusive { latency, .. } | Service::Shared { latency, .. } => latency,
    }
}

/// The slice of a shared instance.
pub(super) const fn slice(service: &Service) -> Option<SharedSlice> {
    match *service {
        Service::Shared { slice, .. } => Some(slice),
        _ => None,
    }
}

/// Number of requests per 10^15 ns that the instance serves in sequence.
pub(super) fn rate(service: &Service) -> u64 {
    let interval = match service {
        Service::Exclusive { interval, .. } => interval.as_nanos(),
        Service::Shared { latency, .. } => latency.as_nanos(),
    };
    1_000_000_000_000_000 / interval.max(1)
}

/// Time in which instances of this `rate` serve `requests`.
pub(super) fn time_for(requests: usize, rate: u64) -> Duration {
    Duration::from_wide_nanos(requests as u128 * 1_000_000_000_000_000 / u128::from(rate.max(1)))
}

fn check_time(
    instance: InstanceId,
    field: &'static str,
    time: Duration,
    zero: bool,
) -> Result<(), RouteError> {
    let bound = if zero { "need at most an hour" } else { "need more than 0 and at most an hour" };
    if (time.is_zero() && !zero) || time > MAX_TIME {
        return Err(RouteError::BadInstance { instance, field, value: time.as_nanos(), bound });
    }
    Ok(())
}

fn check_service(instance: InstanceId, service: &Service) -> Result<(), RouteError> {
    match *service {
        Service::Exclusive { latency, interval, capacity } => {
            check_time(instance, "latency", latency, false)?;
            check_time(instance, "interval", interval, false)?;
            if capacity == 0 {
                let bound = "need more than 0";
                return Err(RouteError::BadInstance { instance, field: "capacity", value: 0, bound });
            }
            Ok(())
        }
        Service::Shared { latency, load, .. } => {
            check_time(instance, "latency", latency, false)?;
            check_time(instance, "load", load, true)
        }
    }
}

/// Refuses impossible events. `last` is the time of the event before, `instance` says how an instance serves and whether it
/// drains, and `request` gives the instance of a dispatched request.
pub(super) fn check_event(
    (now, last): (Timestamp, Timestamp),
    event: &RouteEvent,
    instance: impl Fn(InstanceId) -> Option<(Service, bool)>,
    request: impl Fn(RequestId) -> Option<Option<InstanceId>>,
) -> Result<(), RouteError> {
    TimeWentBack::check(now, last)?;
    let known = |id| instance(id).ok_or(RouteError::UnknownInstance { instance: id });
    let place = |id| request(id).ok_or(RouteError::UnknownRequest { request: id });
    match *event {
        RouteEvent::InstanceUp { instance: id, .. } if instance(id).is_some() => {
            Err(RouteError::DuplicateInstance { instance: id })
        }
        RouteEvent::InstanceUp { instance, service, .. } => check_service(instance, &service),
        RouteEvent::ServiceChanged { instance, service } => match known(instance)? {
            (_, true) => Err(RouteError::Draining { instance }),
            (_, false) => check_service(instance, &service),
        },
        RouteEvent::LoadChanged { instance, load } => match slice(&known(instance)?.0) {
            Some(_) => check_time(instance, "load", load, true),
            None => Err(RouteError::NotShared { instance }),
        },
        RouteEvent::InstanceDraining { instance } | RouteEvent::InstanceDown { instance } => {
            known(instance).map(|_| ())
        }
        RouteEvent::Arrived { request: id, .. } if request(id).is_some() => {
            Err(RouteError::DuplicateRequest { request: id })
        }
        RouteEvent::Completed { request, instance } => {
            known(instance)?;
            match place(request)? {
                Some(on) if on == instance => Ok(()),
                _ => Err(RouteError::NotThere { request, instance: Some(instance) }),
            }
        }
        RouteEvent::Cancelled { request } => match place(request)? {
            Some(_) => Err(RouteError::NotThere { request, instance: None }),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}
