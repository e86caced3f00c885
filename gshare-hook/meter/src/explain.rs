//! Frames as the trace shows them.

use gshare_core::wait_ring::Event;
use gshare_core::wire::ToClient;
use gshare_core::{Bytes, Quota, ResourceSpec};

/// The event for a frame from the daemon, if that is traced.
pub(crate) fn heard(message: &ToClient) -> Option<Event> {
    let event = match *message {
        ToClient::Welcome { epoch } => Event::Welcome { epoch },
        ToClient::Refused { code, .. } | ToClient::Unserved { code, .. } => Event::Refused { code },
        ToClient::Attached { spec, window, .. } => {
            let (request, limit, memory) = words_of(spec);
            Event::Attached { request, limit, memory, window_ns: window.as_nanos() }
        }
        ToClient::ShareChanged { spec, .. } => {
            let (request, limit, memory) = words_of(spec);
            Event::ShareChanged { request, limit, memory }
        }
        ToClient::Throttle { until, .. } => Event::Throttled { until_ns: until.as_nanos() },
        _ => return None,
    };
    Some(event)
}

fn words_of(spec: ResourceSpec) -> (Quota, Quota, u64) {
    (spec.quota().request(), spec.quota().limit(), spec.memory().unwrap_or(Bytes(u64::MAX)).0)
}
