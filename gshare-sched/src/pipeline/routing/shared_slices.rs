//! Shared slices: the order of their instances, and the request that each serves next.

use super::{Function, SlackRouter};
use crate::pipeline::{AssignedSlice, Offer, Offers, Service};
use gshare_core::{Duration, FunctionId, InstanceId};
use std::collections::BTreeSet;

/// Order of the shared instances of a slice: late requests last, slack, name.
///
/// # Lower bounds
/// Another first request changes the slack on every slice with an instance of the function, so an entry is only a lower bound.
/// When the first request goes up in the order, no entry moves; a slice corrects the entries before its next exact one when it
/// takes a request. When the first request goes down, or an instance is loaded or evicted, entries that stand too high go to
/// the front as [`unknown`].
///
/// An entry is corrected only on a slice that takes a request, and goes to the front only after a correction. Over a run the
/// work is at most a look at all instances of the slice each time, and at most a move of all instances of the function each
/// time. (No algorithm beats both for every graph of functions and slices, if the online matrix-vector conjecture is true.)
pub(super) type Entry = (bool, i128, InstanceId);

/// The entry of an instance with an unknown place, before all known entries.
pub(super) const fn unknown(instance: InstanceId) -> Entry {
    (false, i128::MIN, instance)
}

#[derive(Debug, Clone, Default)]
pub(super) struct Slice {
    /// Entries of the instances in the slice's memory; `cold` has the instances to be loaded.
    pub(super) ready: BTreeSet<Entry>,
    pub(super) cold: BTreeSet<Entry>,
    /// Time of the requests since the last load.
    pub(super) worked: Duration,
    pub(super) instances: u32,
}

impl Slice {
    /// Replaces an entry, in the order for instances with this load.
    pub(super) fn replace(&mut self, old: Option<Entry>, new: Option<Entry>, load: Duration) {
        if let Some(old) = old
            && !self.ready.remove(&old)
        {
            self.cold.remove(&old);
        }
        let to = if load.is_zero() { &mut self.ready } else { &mut self.cold };
        to.extend(new);
    }
}

impl SlackRouter {
    /// Keeps entries from standing too high; to be called when the function's first request may have changed.
    pub(super) fn reorder(&mut self, offers: &Offers, function: FunctionId) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let head = of.head();
        let before = std::mem::replace(&mut of.stands, head);
        if head < before {
            for id in std::mem::take(&mut of.placed) {
                self.unsettle(offers, id);
            }
        }
    }

    /// Puts a shared instance to the front of its slice's order, to be looked at there.
    pub(super) fn unsettle(&mut self, offers: &Offers, id: InstanceId) {
        let Some(Offer { function, service: Service::Shared { slice, load, .. } }) = offers.get(id) else {
            return;
        };
        let old = self.entries.insert(id, Some(unknown(id))).flatten();
        if let Some(slice) = self.slices.get_mut(&slice) {
            slice.replace(old, Some(unknown(id)), load);
        }
        if let Some(of) = self.functions.get_mut(&function) {
            of.placed.remove(&id);
        }
    }

    /// Puts a shared instance at the place that its function's first request gives; returns whether the entry changed.
    fn place(&mut self, offers: &Offers, id: InstanceId) -> bool {
        let Some(Offer { function, service: Service::Shared { slice, latency, load } }) = offers.get(id)
        else {
            return false;
        };
        let head = self.functions.get(&function).map(Function::head).unwrap_or_default();
        let entry = head.request().map(|(late, deadline)| {
            let nanos = |time: Duration| i128::from(time.as_nanos());
            (late, i128::from(deadline.as_nanos()) - nanos(latency) - nanos(load), id)
        });
        let Some(stands) = self.entries.get_mut(&id) else { return false };
        // Another load means another slack, so an equal entry is in the right order already.
        if entry == *stands {
            return false;
        }
        let old = std::mem::replace(stands, entry);
        if old == Some(unknown(id))
            && let Some(of) = self.functions.get_mut(&function)
        {
            of.placed.insert(id);
        }
        if let Some(slice) = self.slices.get_mut(&slice) {
            slice.replace(old, entry, load);
        }
        true
    }

    /// The first entry of an order of the slice. Entries are corrected until the first is exact: no other can precede it then.
    fn first(
        &mut self,
        offers: &Offers,
        at: AssignedSlice,
        order: fn(&Slice) -> &BTreeSet<Entry>,
    ) -> Option<Entry> {
        loop {
            let entry = *order(self.slices.get(&at)?).first()?;
            if !self.place(offers, entry.2) {
                return Some(entry);
            }
        }
    }

    /// The next entry to serve on a slice. An entry that needs a load and will be late anyway waits until the slice has worked
    /// for [`RouterConfig::stay_loads`](super::RouterConfig::stay_loads) times that load. Under overload every first request is
    /// urgent, and by slack alone two functions would load over each other for each request.
    pub(super) fn least_on(&mut self, offers: &Offers, at: AssignedSlice) -> Option<Entry> {
        let ready = self.first(offers, at, |slice| &slice.ready);
        let bound = self.slices.get(&at)?.cold.first();
        if ready.is_some() && bound.is_none_or(|bound| ready < Some(*bound)) {
            return ready;
        }
        let cold = self.first(offers, at, |slice| &slice.cold);
        let (Some(ready), Some(cold)) = (ready, cold) else { return ready.or(cold) };
        let (late, slack, id) = cold;
        let in_time = !late && i128::from(self.last.as_nanos()) <= slack;
        let load = match offers.get(id)?.service {
            Service::Shared { load, .. } => load,
            Service::Exclusive { .. } => Duration::ZERO,
        };
        let worked_off = self.slices.get(&at)?.worked >= load.saturating_mul(self.config.stay_loads.into());
        Some(if in_time || worked_off { ready.min(cold) } else { ready })
    }
}
