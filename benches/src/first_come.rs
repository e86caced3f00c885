//! Routing in the order of arrival: the baseline that scenarios call `first_come`.
//!
//! A gateway without knowledge of deadlines keeps one queue for each function, and so does this router:
//! 1. requests of a function wait in the order of their arrival, regardless of their deadlines;
//! 2. the first one goes to the fastest exclusive instance with room, as under every router;
//! 3. an idle shared slice takes the earliest request of all functions with an instance on it;
//! 4. a function is short while its instances need longer for its waiting requests than its last request's deadline allows.

use gshare_core::{FunctionId, InstanceId, RequestId, Timestamp};
use gshare_sched::pipeline::{AssignedSlice, Change, Offers, Route};
use std::collections::BTreeMap;

/// Routes in the order of arrival. See the [module](self).
#[derive(Debug, Default)]
pub struct FirstCome {
    /// Waiting requests of each function, by arrival, with their deadlines.
    queues: BTreeMap<FunctionId, BTreeMap<RequestId, Option<Timestamp>>>,
}

impl FirstCome {
    fn first(&self, function: FunctionId) -> Option<RequestId> {
        self.queues.get(&function)?.first_key_value().map(|(request, _)| *request)
    }
}

impl Route for FirstCome {
    fn note(&mut self, _: Timestamp, _: &Offers, change: Change) {
        match change {
            Change::Waits { request, function, due } => {
                self.queues.entry(function).or_default().insert(request, due);
            }
            Change::Left { request, function, .. } => {
                let queue = self.queues.entry(function).or_default();
                queue.remove(&request);
                if queue.is_empty() {
                    self.queues.remove(&function);
                }
            }
            _ => {}
        }
    }

    fn next(&mut self, _: Timestamp, offers: &Offers, instance: InstanceId) -> Option<RequestId> {
        self.first(offers.get(instance)?.function)
    }

    fn next_on(
        &mut self,
        _: Timestamp,
        offers: &Offers,
        slice: AssignedSlice,
    ) -> Option<(InstanceId, RequestId)> {
        let firsts = offers.on(slice).filter_map(|(id, offer)| Some((self.first(offer.function)?, id)));
        firsts.min().map(|(request, id)| (id, request))
    }

    fn is_short(&self, now: Timestamp, offers: &Offers, function: FunctionId) -> bool {
        let Some((_, due)) = self.queues.get(&function).and_then(BTreeMap::last_key_value) else {
            return false;
        };
        let behind = offers.time_for(function, self.waiting(function));
        offers.fastest(function).is_none_or(|fastest| {
            due.is_some_and(|due| now.saturating_add(behind).saturating_add(fastest) > due)
        })
    }

    fn waiting(&self, function: FunctionId) -> usize {
        self.queues.get(&function).map_or(0, BTreeMap::len)
    }
}
