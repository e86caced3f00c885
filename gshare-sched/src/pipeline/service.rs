//! How an instance serves, as both routers read it.

use gshare_core::dag::MAX_TIME;
use gshare_core::pipeline::routing::{RouteError, Service};
use gshare_core::{Duration, InstanceId, SharedSlice};

/// Time of one request that finds the instance empty and in memory.
pub(super) const fn latency(service: &Service) -> Duration {
    match *service {
        Service::Exclusive { latency, .. } | Service::Shared { latency, .. } => latency,
        _ => Duration::ZERO,
    }
}

/// The slice that the instance shares.
pub(super) const fn slice(service: &Service) -> Option<SharedSlice> {
    match *service {
        Service::Shared { slice, .. } => Some(slice),
        _ => None,
    }
}

/// Requests per 10^15 ns that the instance serves one after the other.
pub(super) fn rate(service: &Service) -> u64 {
    let interval = match service {
        Service::Exclusive { interval, .. } => interval.as_nanos(),
        Service::Shared { latency, .. } => latency.as_nanos(),
        _ => 0,
    };
    1_000_000_000_000_000 / interval.max(1)
}

pub(super) fn check_time(
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

pub(super) fn check_service(instance: InstanceId, service: &Service) -> Result<(), RouteError> {
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
        _ => Ok(()),
    }
}
