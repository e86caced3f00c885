//! The instances that take requests on sliced devices: an index over the ledger, by function and by slice.

use crate::pipeline::AssignedSlice;
use gshare_core::{Duration, FunctionId, InstanceId};
use std::collections::{BTreeMap, BTreeSet};

/// An instance's times and capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum Service {
    /// On slices of its own.
    Exclusive {
        /// Time of one request on the empty instance; more than 0.
        latency: Duration,
        /// Time between two consecutive requests: the bottleneck. More than 0.
        interval: Duration,
        /// Most requests it holds; more than 0.
        capacity: u32,
    },
    /// On a slice with other instances, which runs one request at a time.
    Shared {
        slice: AssignedSlice,
        /// Time of one request; more than 0.
        latency: Duration,
        /// Time until the instance could begin; 0 while it is resident.
        load: Duration,
    },
}

impl Service {
    /// Time of one request on an empty instance in memory.
    pub const fn latency(&self) -> Duration {
        match *self {
            Self::Exclusive { latency, .. } | Self::Shared { latency, .. } => latency,
        }
    }

    /// The slice of a shared instance.
    pub const fn slice(&self) -> Option<AssignedSlice> {
        match *self {
            Self::Shared { slice, .. } => Some(slice),
            Self::Exclusive { .. } => None,
        }
    }

    /// Number of requests per 10^15 ns that the instance serves in sequence.
    fn rate(&self) -> u64 {
        let interval = match self {
            Self::Exclusive { interval, .. } => interval,
            Self::Shared { latency, .. } => latency,
        };
        1_000_000_000_000_000 / interval.as_nanos().max(1)
    }
}

/// An instance that takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct Offer {
    pub function: FunctionId,
    pub service: Service,
}

#[derive(Debug, Clone, Default)]
struct Function {
    /// All instances that take requests, fastest first.
    all: BTreeSet<(Duration, InstanceId)>,
    /// The exclusive instances with room, fastest first.
    free: BTreeSet<(Duration, InstanceId)>,
    /// Requests per 10^15 ns of all of them.
    rate: u64,
}

/// All instances that take requests.
#[derive(Debug, Clone, Default)]
pub struct Offers {
    instances: BTreeMap<InstanceId, Offer>,
    functions: BTreeMap<FunctionId, Function>,
    slices: BTreeMap<AssignedSlice, BTreeSet<InstanceId>>,
}

impl Offers {
    /// An instance that takes requests.
    pub fn get(&self, instance: InstanceId) -> Option<Offer> {
        self.instances.get(&instance).copied()
    }

    /// The shared instances on a slice.
    pub fn on(&self, slice: AssignedSlice) -> impl Iterator<Item = (InstanceId, Offer)> + '_ {
        self.slices.get(&slice).into_iter().flatten().map(|id| (*id, self.instances[id]))
    }

    /// Time of a request on the function's fastest instance.
    pub fn fastest(&self, function: FunctionId) -> Option<Duration> {
        self.functions.get(&function)?.all.first().map(|&(latency, _)| latency)
    }

    /// The function's fastest exclusive instance with room.
    pub fn free(&self, function: FunctionId) -> Option<InstanceId> {
        self.functions.get(&function)?.free.first().map(|&(_, id)| id)
    }

    /// The slices with a shared instance of the function, the fastest instance first.
    pub fn slices_of(&self, function: FunctionId) -> Vec<AssignedSlice> {
        let all = self.functions.get(&function).into_iter().flat_map(|of| &of.all);
        all.filter_map(|(_, id)| self.instances[id].service.slice()).collect()
    }

    /// Time in which the function's instances serve so many requests.
    pub fn time_for(&self, function: FunctionId, requests: usize) -> Duration {
        let rate = self.functions.get(&function).map_or(0, |of| of.rate).max(1);
        Duration::from_wide_nanos(requests as u128 * 1_000_000_000_000_000 / u128::from(rate))
    }

    /// The instance takes requests from now on, and runs none.
    pub fn offer(&mut self, instance: InstanceId, offer: Offer) {
        let of = self.functions.entry(offer.function).or_default();
        of.all.insert((offer.service.latency(), instance));
        of.rate = of.rate.saturating_add(offer.service.rate());
        if let Some(slice) = offer.service.slice() {
            self.slices.entry(slice).or_default().insert(instance);
        }
        self.instances.insert(instance, offer);
        self.runs(instance, 0);
    }

    /// The instance takes no requests any more. Returns its offer until now.
    pub fn withdraw(&mut self, instance: InstanceId) -> Option<Offer> {
        let offer = self.instances.remove(&instance)?;
        let key = (offer.service.latency(), instance);
        if let Some(of) = self.functions.get_mut(&offer.function) {
            of.all.remove(&key);
            of.free.remove(&key);
            of.rate = of.rate.saturating_sub(offer.service.rate());
            if of.all.is_empty() {
                self.functions.remove(&offer.function);
            }
        }
        if let Some(slice) = offer.service.slice()
            && let Some(on) = self.slices.get_mut(&slice)
        {
            on.remove(&instance);
            if on.is_empty() {
                self.slices.remove(&slice);
            }
        }
        Some(offer)
    }

    /// The instance runs so many requests from now on: an exclusive instance has room below its capacity.
    pub fn runs(&mut self, instance: InstanceId, requests: usize) {
        let Some(Offer { function, service }) = self.get(instance) else { return };
        let (Service::Exclusive { latency, capacity, .. }, Some(of)) =
            (service, self.functions.get_mut(&function))
        else {
            return;
        };
        if requests < capacity as usize {
            of.free.insert((latency, instance));
        } else {
            of.free.remove(&(latency, instance));
        }
    }

    /// The shared instance was loaded or evicted.
    pub fn set_load(&mut self, instance: InstanceId, new: Duration) {
        if let Some(Offer { service: Service::Shared { load, .. }, .. }) = self.instances.get_mut(&instance) {
            *load = new;
        }
    }

    /// All instances that take requests, and whether each is exclusive and has room.
    pub(crate) fn all(&self) -> impl Iterator<Item = (InstanceId, Offer, bool)> + '_ {
        self.instances.iter().map(|(id, offer)| {
            let key = (offer.service.latency(), *id);
            (*id, *offer, self.functions[&offer.function].free.contains(&key))
        })
    }
}
