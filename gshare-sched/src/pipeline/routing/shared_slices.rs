//! Shared slices: the order of their instances, and the request that each serves next.

use super::{Function, Head, SlackRouter};
use crate::pipeline::{RouteAction, Service};
use gshare_core::{Duration, FunctionId, InstanceId, SharedSlice, Timestamp};
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
    /// Instances outside their function's `open`; empty while the slice is idle.
    pub(super) parked: BTreeSet<InstanceId>,
    /// Time of the requests since the last load.
    pub(super) worked: Duration,
    /// Running requests: one at most, except just after an exclusive instance became shared.
    pub(super) running: usize,
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
    pub(super) fn reorder(&mut self, function: FunctionId) {
        let Some(of) = self.functions.get_mut(&function) else { return };
        let head = of.head();
        let before = std::mem::replace(&mut of.stands, head);
        if head < before {
            for id in std::mem::take(&mut of.placed) {
                self.unsettle(id);
            }
        }
    }

    /// Puts a shared instance to the front of its slice's order, to be looked at there.
    pub(super) fn unsettle(&mut self, id: InstanceId) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let Service::Shared { slice, load, .. } = instance.service else { return };
        let old = instance.entry.replace(unknown(id));
        if let Some(slice) = self.slices.get_mut(&slice) {
            slice.replace(old, instance.entry, load);
        }
        if let Some(of) = self.functions.get_mut(&instance.function) {
            of.placed.remove(&id);
        }
    }

    /// Puts a shared instance at the place that its function's first request gives; returns whether the entry changed.
    pub(super) fn place(&mut self, id: InstanceId) -> bool {
        let Some(instance) = self.instances.get_mut(&id) else { return false };
        let Service::Shared { slice: at, latency, load } = instance.service else { return false };
        let Some(slice) = self.slices.get_mut(&at) else { return false };
        let Some(of) = self.functions.get_mut(&instance.function) else { return false };
        let entry = of.head().request().map(|(late, deadline)| {
            let nanos = |time: Duration| i128::from(time.as_nanos());
            (late, i128::from(deadline.as_nanos()) - nanos(latency) - nanos(load), id)
        });
        // Another load means another slack, so an equal entry is in the right order already.
        if entry == instance.entry {
            return false;
        }
        if instance.entry == Some(unknown(id)) {
            of.placed.insert(id);
        }
        slice.replace(instance.entry, entry, load);
        instance.entry = entry;
        true
    }

    /// The first entry of an order of the slice. Entries are corrected until the first is exact: no other can precede it then.
    pub(super) fn first(&mut self, at: SharedSlice, order: fn(&Slice) -> &BTreeSet<Entry>) -> Option<Entry> {
        loop {
            let entry = *order(self.slices.get(&at)?).first()?;
            if !self.place(entry.2) {
                return Some(entry);
            }
        }
    }

    /// The next entry to serve on a slice. An entry that needs a load and will be late anyway waits until the slice has worked
    /// for [`RouterConfig::stay_loads`] times that load. Under overload every first request is urgent, and by slack alone two
    /// functions would load over each other for each request.
    fn next_on(&mut self, now: Timestamp, at: SharedSlice) -> Option<Entry> {
        let ready = self.first(at, |slice| &slice.ready);
        let bound = self.slices.get(&at)?.cold.first();
        if ready.is_some() && bound.is_none_or(|bound| ready < Some(*bound)) {
            return ready;
        }
        let cold = self.first(at, |slice| &slice.cold);
        let (Some(ready), Some(cold)) = (ready, cold) else { return ready.or(cold) };
        let (late, slack, id) = cold;
        let in_time = !late && i128::from(now.as_nanos()) <= slack;
        let load = match self.instances.get(&id)?.service {
            Service::Shared { load, .. } => load,
            _ => Duration::ZERO,
        };
        let worked_off = self.slices.get(&at)?.worked >= load.saturating_mul(self.config.stay_loads.into());
        Some(if in_time || worked_off { ready.min(cold) } else { ready })
    }

    /// Gives an idle slice its next request, if there is one for it.
    pub(super) fn serve_slice(&mut self, now: Timestamp, at: SharedSlice, actions: &mut Vec<RouteAction>) {
        while self.slices.get(&at).is_some_and(|slice| slice.running == 0) {
            let Some((late, _, instance)) = self.next_on(now, at) else { return self.unpark(at) };
            let Some(found) = self.instances.get(&instance) else { return };
            let Service::Shared { latency, load, .. } = found.service else { return };
            let function = found.function;
            // The head may have become late meanwhile, which changes the order.
            self.sift(now, function, actions);
            let head = self.functions.get(&function).map_or(Head::Nothing, Function::head);
            if head.request().is_none_or(|(now_late, _)| now_late != late) {
                self.reorder(function);
                continue;
            }
            if let Some(request) = self.pick(now, function, latency.saturating_add(load)) {
                self.dispatch(request, instance, actions);
                self.reorder(function);
                return;
            }
        }
    }

    /// Offers the instances of a slice that stays idle to future requests.
    pub(super) fn unpark(&mut self, at: SharedSlice) {
        let parked = self.slices.get_mut(&at).map(|slice| std::mem::take(&mut slice.parked));
        for id in parked.into_iter().flatten() {
            if let Some(instance) = self.instances.get(&id)
                && let Some(of) = self.functions.get_mut(&instance.function)
            {
                of.open.insert((instance.latency(), id));
            }
        }
    }
}
