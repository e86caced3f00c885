//! The ledger of the platform: functions, devices, instances and requests, each once, for every regime.
//!
//! The pools read it and order by [`Cluster::order`]; they keep no instance's life and no request of their own.

use super::functions::{Function, FunctionState};
use super::hash_table::Table;
use super::instances::Instances;
use super::moves::Copied;
use super::requests::Request;
use super::tenant_limits::Tenants;
use super::timers::Timers;
use super::{
    BTreeMap, Bytes, Duration, FunctionId, FunctionSpec, GpuId, InstanceId, NodeId, Platform, PlatformAction,
    PlatformConfig, RequestId, TenantId, Timestamp, Work,
};
use std::collections::{BTreeSet, VecDeque};

/// Time until another attempt at a kept instance after a failed start. 10 s: a process with an immediate failure takes no more
/// than a per cent or so of its device.
const START_AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
pub(super) struct Device {
    pub(super) pool: usize,
    pub(super) node: NodeId,
    memory: Bytes,
}

/// All devices, with what a deployment asks of them.
#[derive(Debug, Default)]
pub(super) struct Devices {
    all: BTreeMap<GpuId, Device>,
    /// The devices of each pool by memory.
    by_memory: BTreeMap<usize, BTreeSet<(Bytes, GpuId)>>,
    /// Bytes of memory of all devices.
    memory: u128,
}

impl Devices {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Number of devices, for the engines' arithmetic.
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.all.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn get(&self, gpu: GpuId) -> Option<&Device> {
        self.all.get(&gpu)
    }

    /// Number of a pool's devices.
    pub(super) fn of_pool(&self, pool: usize) -> usize {
        self.by_memory.get(&pool).map_or(0, BTreeSet::len)
    }

    /// Memory of all devices.
    pub(super) fn memory(&self) -> Bytes {
        Bytes(u64::try_from(self.memory).unwrap_or(u64::MAX))
    }

    pub(super) fn insert(&mut self, gpu: GpuId, device: Device) {
        self.memory += u128::from(device.memory.get());
        self.by_memory.entry(device.pool).or_default().insert((device.memory, gpu));
        self.all.insert(gpu, device);
    }

    pub(super) fn remove(&mut self, gpu: GpuId) -> Option<Device> {
        let device = self.all.remove(&gpu)?;
        self.memory -= u128::from(device.memory.get());
        if let Some(devices) = self.by_memory.get_mut(&device.pool) {
            devices.remove(&(device.memory, gpu));
        }
        Some(device)
    }

    /// Whether the pool's devices, without any instance on them, have the memory of an instance: on as many devices as it has
    /// parts, and of one node unless it trains.
    pub(super) fn hold(&self, pool: usize, spec: &FunctionSpec) -> bool {
        let (memory, count, anywhere) = match spec.work {
            Work::Training { workers, share } => (share.memory().unwrap_or(spec.memory), workers, true),
            // The stages decide, not the sum of their memory.
            Work::Pipeline { .. } => (Bytes::ZERO, 1, true),
            Work::Inference { .. } => (spec.memory_per_device(), spec.devices, false),
        };
        let memory = memory.saturating_add(spec.weights.map_or(Bytes::ZERO, |weights| weights.bytes));
        let Some(devices) = self.by_memory.get(&pool) else { return false };
        let mut on: BTreeMap<NodeId, u32> = BTreeMap::new();
        let large = devices.range((memory, GpuId::new(0))..).map(|(_, gpu)| self.all[gpu].node);
        large.filter(|node| spec.allows(*node)).any(|node| {
            let node = if anywhere { NodeId::new(0) } else { node };
            let has = on.entry(node).or_default();
            *has += 1;
            *has >= count
        })
    }

    pub(super) fn invariants(&self) {
        let memory: u128 = self.all.values().map(|device| u128::from(device.memory.get())).sum();
        assert_eq!(self.memory, memory, "the memory of all devices is another");
        let listed: usize = self.by_memory.values().map(BTreeSet::len).sum();
        assert_eq!(listed, self.all.len(), "devices of pools");
    }
}

impl Device {
    pub(super) const fn new(pool: usize, node: NodeId, memory: Bytes) -> Self {
        Self { pool, node, memory }
    }
}

/// The ledger.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    pub(super) config: PlatformConfig,
    pub(super) now: Timestamp,
    pub(super) devices: Devices,
    pub(super) functions: Table<FunctionId, Function>,
    pub(super) instances: Instances,
    pub(super) requests: Table<RequestId, Request>,
    /// The least number of the next request.
    pub(super) next_request: u64,
    pub(super) tenants: Tenants,
    /// The waiting requests by the ends of their waits.
    pub(super) wait_until: BTreeSet<(Timestamp, RequestId)>,
    /// The last copy of living processes' memory to host memory.
    pub(super) copied: Copied,
    /// Orders for the host.
    pub(super) orders: Vec<PlatformAction>,
    /// Starts that a tenant's limit refused; their pools do not know it yet.
    pub(super) refused: VecDeque<(usize, InstanceId)>,
    /// Tenants with a request that has ended since the last admission.
    pub(super) to_admit: BTreeSet<TenantId>,
    /// Functions that may be below their minimum, and whether the event may have changed that. After a failed start a function comes back
    /// with its next change or at the end of its pause: those that fail all the time take no part in the events of others.
    pub(super) lacking: BTreeSet<FunctionId>,
    pub(super) look: bool,
    /// The times of another look at functions with a failed start.
    again: Timers<FunctionId>,
    /// Grows with each change that may give a function room.
    pub(super) version: u64,
}

impl Cluster {
    pub(super) fn new(config: PlatformConfig) -> Self {
        Self { config, ..Self::default() }
    }

    pub(super) fn is_removed(&self, function: FunctionId) -> bool {
        self.functions.get(&function).is_none_or(|of| of.state == FunctionState::Removed)
    }

    /// The function's waiting requests, by arrival.
    pub(super) fn queue(&self, function: FunctionId) -> &BTreeSet<(Timestamp, RequestId)> {
        static NONE: BTreeSet<(Timestamp, RequestId)> = BTreeSet::new();
        self.functions.get(&function).map_or(&NONE, |of| &of.queue)
    }

    /// Whether a caller waits for the request, or its instance works for it.
    pub(super) fn is_open(&self, request: RequestId) -> bool {
        self.requests.contains_key(&request)
    }

    /// Number of requests that run on an instance.
    pub(super) fn runs(&self, instance: InstanceId) -> usize {
        self.instances.get(instance).map_or(0, |of| of.requests.len())
    }

    /// No device of the pool has the resources for the function's next instance, busy devices aside. Counted once until a change.
    pub(super) fn unmet(&mut self, function: FunctionId) {
        let version = self.version;
        if let Some(of) = self.functions.get_mut(&function)
            && of.unmet_at.replace(version) != Some(version)
        {
            of.stats.unmet += 1;
        }
    }

    /// The function has other bounds, or an instance less.
    pub(super) fn has_fewer(&mut self, function: FunctionId) {
        self.lacking.insert(function);
        self.look = true;
    }

    /// A start of the function failed: none follows for its minimum for a while.
    pub(super) fn start_failed(&mut self, function: FunctionId) {
        let at = self.now.saturating_add(START_AGAIN);
        if let Some(of) = self.functions.get_mut(&function) {
            of.not_before = at;
            self.again.set(function, at);
        }
        self.has_fewer(function);
    }

    /// Whether no instance starts for the function's minimum yet, since a start has failed.
    pub(super) fn pauses(&self, function: FunctionId) -> bool {
        self.functions.get(&function).is_some_and(|of| of.not_before > self.now)
    }

    /// Instances missing from the function's minimum.
    pub(super) fn missing(&self, function: FunctionId) -> u32 {
        let of = self.functions.get(&function).filter(|of| of.state == FunctionState::Deployed);
        of.map_or(0, |of| of.spec.min_instances.saturating_sub(of.staying))
    }

    /// Whether the function has more instances than its minimum, or has no minimum.
    pub(super) fn above_minimum(&self, function: FunctionId) -> bool {
        let of = self.functions.get(&function).filter(|of| of.state == FunctionState::Deployed);
        of.is_none_or(|of| of.spec.min_instances == 0 || of.staying > of.spec.min_instances)
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        let all = [
            self.wait_until.first().map(|(at, _)| *at),
            self.instances.next_deadline(),
            self.tenants.next_deadline(),
            self.again.next(),
            (!self.orders.is_empty()).then_some(self.now),
        ];
        all.into_iter().flatten().min()
    }

    pub(super) fn invariants(&self) {
        self.devices.invariants();
        assert!(self.refused.is_empty(), "a pool was not told of a refused start");
        let mut known = 0;
        for (function, of) in self.functions.sorted() {
            let all = of.instances.iter().map(|instance| self.instances.get(*instance));
            let own = all.flatten().filter(|one| one.function == function);
            assert_eq!(own.filter(|one| one.stays()).count(), of.staying as usize, "instances of {function}");
            known += of.instances.len();
            let kept =
                self.missing(function) == 0 || self.lacking.contains(&function) || self.pauses(function);
            assert!(kept, "the minimum of {function} is not kept");
        }
        assert_eq!(known, self.instances.len(), "instances of functions");
        self.check_requests();
    }

    pub(super) fn forget_function(&mut self, function: FunctionId) {
        self.functions.remove(&function);
        self.lacking.remove(&function);
        self.again.clear(function);
    }
}

impl Platform {
    /// Lets the pools start the missing instances of minimums, as far as there is room. False: nothing has changed since the
    /// last look.
    pub(super) fn keep_minimums(&mut self) -> bool {
        let now = self.cluster.now;
        while let Some(function) = self.cluster.again.pop(now) {
            self.cluster.has_fewer(function);
        }
        if !core::mem::take(&mut self.cluster.look) {
            return false;
        }
        for function in self.cluster.lacking.clone() {
            let of = self.cluster.functions.get(&function);
            let of = of.filter(|of| of.state == FunctionState::Deployed);
            if let Some(of) = of {
                let (pool, may_start) = (of.pool, of.not_before <= now);
                if !may_start {
                    self.cluster.lacking.remove(&function);
                }
                self.tell(pool, |pool, cluster| pool.keep_minimum(cluster, function, may_start));
            }
            if self.cluster.missing(function) == 0 {
                self.cluster.lacking.remove(&function);
            }
        }
        // Room for one function may come from another.
        true
    }
}
