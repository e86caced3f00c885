//! The device for a waiting request whose model is not on the idle device at hand.

use super::devices::{ModelCopy, Room, WholeDevices};
use gshare_core::{ConfigError, Duration, FunctionId, GpuId};

/// What becomes of a waiting request.
#[derive(Debug)]
pub enum Choice {
    /// It runs at once on this idle device, which has its model.
    Run(GpuId),
    /// It waits behind the work of this busy device, which has its model or loads it.
    Queue(GpuId),
    /// Its model is loaded where there is room.
    Load(Room),
    /// It keeps its place in the queue until the next device is idle.
    Wait,
}

/// Which device serves which request, and which models leave for another: the policy of the pool of whole devices.
///
/// # Contract
/// - a chosen device is one of those that [`WholeDevices`] named in this call, in the state that it was named for;
/// - the same calls give the same choices.
///
/// The pool asks only about functions that may have another copy: a request of another function waits for a copy that is there.
pub trait WholePolicy: Send {
    /// Most later requests that may be dispatched before a waiting request (GPU-enabled FaaS, section IV-B).
    fn skip_limit(&self) -> u32 {
        0
    }

    /// Whether an idle device first serves the requests for models in its memory. If not, all are placed in order of arrival.
    fn seeks_copies(&self) -> bool {
        true
    }

    /// The choice for a waiting request of the function with this idle device at hand, which does not have its model.
    fn choose(&mut self, devices: &WholeDevices, function: FunctionId, gpu: GpuId) -> Choice;
}

crate::settings_table::settings! {
    /// Settings of [`WholePool`](super::WholePool).
    #[derive(Copy)]
    pub struct WholeConfig {
        /// How often a waiting request may be overtaken. 25, as in the paper; 0 is LALB, without out-of-order dispatch.
        pub skip_limit: u32 = 25, with_skip_limit;
        /// Whether the cost of a load includes the worth of the models that leave for it. Yes; the paper's least recently used leave
        /// without a price.
        pub price_evictions: bool = true, with_price_evictions;
        /// Whether processes of evicted models live on, with their memory in host memory, where that is faster than a start. Yes; the
        /// paper's models leave with their processes.
        pub park: bool = true, with_park;
        /// How many loads for a request may fail before it is rejected. 3.
        pub max_loads: u8 = 3, with_max_loads;
        /// Host memory of each node for models. 0: no such tier, as in the paper.
        #[cfg_attr(feature = "serde", serde(rename = "host_memory_bytes"))]
        pub host_memory: gshare_core::Bytes = gshare_core::Bytes::ZERO, with_host_memory;
    }
}

impl WholeConfig {
    /// The paper's out-of-order dispatch with this limit; LALB with 0.
    pub fn paper(skip_limit: u32) -> Self {
        Self { skip_limit, price_evictions: false, park: false, ..Self::default() }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        gshare_core::check_fields!(self { max_loads in 1.., "need more than 0"; })
    }
}

/// Locality-aware load balancing with out-of-order dispatch (GPU-enabled FaaS, section IV), with priced evictions or without: the
/// pool's own policy.
#[derive(Debug, Clone, Copy)]
pub struct Locality {
    skip_limit: u32,
    price_evictions: bool,
}

/// A load of the request's model on an idle device, with its costs.
struct Load {
    /// None where no room can be made: kept models and models in use stay.
    room: Option<Room>,
    /// Time to load the model and run the request.
    takes: Duration,
    /// The loading time that its evictions are expected to cost other requests.
    worth: Duration,
}

impl Load {
    fn price(&self) -> Duration {
        if self.room.is_some() { self.takes.saturating_add(self.worth) } else { Duration::MAX }
    }
}

impl Locality {
    /// The policy with these settings; the pool uses the settings of loads and host memory.
    pub const fn new(config: &WholeConfig) -> Self {
        Self { skip_limit: config.skip_limit, price_evictions: config.price_evictions }
    }

    /// Least recently used first; with prices, the least worth per byte first.
    fn load_on(self, devices: &WholeDevices, function: FunctionId, gpu: GpuId) -> Load {
        let order = |copy: &ModelCopy| {
            let worth = || devices.worth(copy.function(), gpu).as_nanos();
            let per_byte = || worth().saturating_mul(1024) / (copy.memory().get() >> 20).max(1);
            (if self.price_evictions { per_byte() } else { 0 }, copy.last_use())
        };
        let room = devices.room(function, gpu, &order);
        let victims = room.iter().flat_map(Room::victims).filter(|_| self.price_evictions);
        let worth = victims.map(|victim| devices.worth(*victim, gpu));
        let worth = worth.fold(Duration::ZERO, Duration::saturating_add);
        let takes = devices.load_time(function, gpu).saturating_add(devices.run_time(function, gpu));
        Load { room, takes, worth }
    }
}

impl WholePolicy for Locality {
    fn skip_limit(&self) -> u32 {
        self.skip_limit
    }

    fn choose(&mut self, devices: &WholeDevices, function: FunctionId, gpu: GpuId) -> Choice {
        if let Some(copy) = devices.idle_copy(function) {
            return Choice::Run(copy);
        }
        let mut load = self.load_on(devices, function, gpu);
        if self.price_evictions {
            for other in devices.idle(function).filter(|other| *other != gpu) {
                let elsewhere = self.load_on(devices, function, other);
                if elsewhere.price() < load.price() {
                    load = elsewhere;
                }
            }
        }
        // A request waits for a copy if that is shorter than a load (GPU-enabled FaaS, Algorithm 2), and so for the return of a parked
        // copy to its device.
        let cost = load.takes.saturating_add(load.worth);
        let parked = devices.busy_parked(function).filter(|done_in| *done_in < cost);
        let soonest = parked.unwrap_or(cost);
        if let Some((_, copy)) = devices.busy_copy(function).filter(|(done_in, _)| *done_in < soonest) {
            return Choice::Queue(copy);
        }
        load.room.filter(|_| parked.is_none()).map_or(Choice::Wait, Choice::Load)
    }
}
