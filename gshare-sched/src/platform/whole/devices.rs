//! Whole devices as their policy sees them: an index over the ledger's instances, by device and by function.
//!
//! # Terms
//! - **copy**: the model of a function in a device's memory. It counts as cached from the decision to load it until the decision
//!   to evict it, and is the instance that the ledger has for it from its start on;
//! - **free at**: the time at which a device will have done its present work and its local queue;
//! - **worth** of a copy: the loading time that its eviction is expected to cost.
//!
//! Each copy is filed under its device's present state, so the best copy of a model is found without a search.

use super::cache;
use super::estimate::{Estimate, Recent};
use super::queue::{List, NONE, Queue};
use crate::Tier;
use crate::platform::hash_table::Table;
use crate::platform::host_cache::HostCache;
use gshare_core::{
    BasisPoints, Bytes, Duration, FunctionId, GpuId, GpuKind, InstanceId, NodeId, RequestId, TenantId,
    Timestamp,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Idle devices of a kind that are compared for a load.
const CANDIDATES: usize = 16;
/// A worth is full where one request in this many is a miss, and less in proportion where fewer are: where the working set fits, a
/// victim is hardly missed.
const PRICED_MISSES: u64 = 16;
/// The time of a model on a kind of device that cannot serve it.
const NEVER: u64 = u64::MAX / 4;

/// Costs of a model on a kind of device, learned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Costs {
    pub(super) kind: u8,
    pub(super) disk: Estimate,
    pub(super) host: Estimate,
    /// A return of living processes.
    pub(super) back: Estimate,
    pub(super) infer: Estimate,
}

/// Order of a function's copies: idle devices first; then by kind; then by number of dispatches (idle) or time until free (busy);
/// then by device.
type CopyKey = (bool, u8, u64, GpuId);

/// A function that is served here.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) bytes: u64,
    pub(super) tenant: TenantId,
    /// Times from the specification: to run one request, and to load from disk and from host memory.
    pub(super) times: [Duration; 3],
    /// The kinds of device with enough memory for it.
    pub(super) kinds: u64,
    pub(super) costs: Vec<Costs>,
    pub(super) copies: BTreeSet<CopyKey>,
    /// The devices with a parked copy.
    pub(super) parked: Vec<GpuId>,
    recent: Recent,
    /// The device with the kept copy.
    pub(super) kept_on: Option<GpuId>,
    /// The ask for a kept copy.
    pub(super) warming: Option<u32>,
    /// Its instances that are not gone.
    pub(super) instances: u32,
    /// Whether the processes of its last evicted copy were to live on.
    pub(super) parks: bool,
}

impl Served {
    pub(super) const fn new(bytes: u64, tenant: TenantId, times: [Duration; 3]) -> Self {
        Self {
            bytes,
            tenant,
            times,
            kinds: 0,
            costs: Vec::new(),
            copies: BTreeSet::new(),
            parked: Vec::new(),
            recent: Recent::NONE,
            kept_on: None,
            warming: None,
            instances: 0,
            parks: false,
        }
    }

    pub(super) fn costs_on(&mut self, kind: u8) -> Option<&mut Costs> {
        self.costs.iter_mut().find(|costs| costs.kind == kind)
    }

    /// The devices with a copy.
    pub(super) fn devices(&self) -> Vec<GpuId> {
        let mut gpus: Vec<GpuId> = self.copies.iter().map(|&(_, _, _, gpu)| gpu).collect();
        gpus.sort_unstable();
        gpus
    }
}

/// The state of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyState {
    /// Room is being made, or the instance starts.
    Loading,
    /// The instance is ready.
    Resident,
    /// The instance is stopped and not gone yet, or its memory is on its way to host memory.
    Evicting,
}

/// The model of a function in the memory of one device.
#[derive(Debug, Clone, Copy)]
pub struct ModelCopy {
    pub(super) function: FunctionId,
    pub(super) bytes: u64,
    pub(super) state: CopyState,
    /// None while room is made for it.
    pub(super) instance: Option<InstanceId>,
    /// Requests that run on the copy or wait for it here. It does not leave while this is above 0.
    pub(super) users: u32,
    pub(super) used: u64,
    /// Whether it is its function's minimum.
    pub(super) kept: bool,
}

impl ModelCopy {
    /// The function of the model.
    pub const fn function(&self) -> FunctionId {
        self.function
    }

    /// Its memory on the device.
    pub const fn memory(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// The number of its last use: a copy used later has a larger one.
    pub const fn last_use(&self) -> u64 {
        self.used
    }

    pub(super) fn is_cached(&self) -> bool {
        self.state != CopyState::Evicting
    }

    /// Whether it may be evicted for another model.
    pub(super) fn may_leave(&self) -> bool {
        self.state == CopyState::Resident && self.users == 0 && !self.kept
    }
}

/// What a device does, one thing at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    MakingRoom {
        function: FunctionId,
        /// The ask that it is for; none once its caller has left.
        ask: Option<u32>,
    },
    Loading {
        function: FunctionId,
        /// The place of the weights; none where memory comes back to living processes.
        from: Option<Tier>,
        ask: Option<u32>,
    },
    Running {
        function: FunctionId,
        request: RequestId,
    },
}

impl Phase {
    pub(super) const fn is_idle(self) -> bool {
        matches!(self, Self::Idle)
    }

    /// Takes the ask of a load.
    pub(super) const fn take_ask(&mut self) -> Option<u32> {
        match self {
            Self::MakingRoom { ask, .. } | Self::Loading { ask, .. } => ask.take(),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) kind: u8,
    pub(super) node: NodeId,
    pub(super) memory: u64,
    /// Not taken by any copy.
    pub(super) free: u64,
    /// Taken by copies that are being evicted.
    pub(super) evicting: u64,
    pub(super) copies: Vec<ModelCopy>,
    /// Evicted copies with living processes, in the order of their evictions.
    pub(super) parked: Vec<ModelCopy>,
    pub(super) phase: Phase,
    pub(super) local: VecDeque<u32>,
    pub(super) local_ns: u64,
    /// End of its present work.
    pub(super) until: Timestamp,
    pub(super) dispatches: u64,
    /// The state its copies are filed under.
    pub(super) filed: (bool, u64),
}

impl Gpu {
    pub(super) const fn new(kind: u8, node: NodeId, memory: u64, now: Timestamp) -> Self {
        Self {
            kind,
            node,
            memory,
            free: memory,
            evicting: 0,
            copies: Vec::new(),
            parked: Vec::new(),
            phase: Phase::Idle,
            local: VecDeque::new(),
            local_ns: 0,
            until: now,
            dispatches: 0,
            filed: (false, 0),
        }
    }

    fn free_at(&self) -> Timestamp {
        self.until.saturating_add(Duration::from_nanos(self.local_ns))
    }

    pub(super) fn state(&self) -> (bool, u64) {
        if self.phase.is_idle() { (false, self.dispatches) } else { (true, self.free_at().as_nanos()) }
    }

    pub(super) fn cached(&self, function: FunctionId) -> Option<&ModelCopy> {
        self.copies.iter().find(|copy| copy.function == function && copy.is_cached())
    }

    pub(super) fn cached_mut(&mut self, function: FunctionId) -> Option<&mut ModelCopy> {
        self.copies.iter_mut().find(|copy| copy.function == function && copy.is_cached())
    }

    pub(super) fn of_instance(&self, instance: InstanceId) -> Option<&ModelCopy> {
        self.copies.iter().find(|copy| copy.instance == Some(instance))
    }
}

/// A tenant's share of the memory of all devices, and the bytes of its functions' cached copies.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) share: BasisPoints,
    pub(super) memory: u64,
    /// Its copies that are being evicted; the ledger counts them still.
    pub(super) leaving: u32,
}

/// Room for a model on an idle device: the copies that leave for it.
#[derive(Debug)]
pub struct Room {
    pub(super) gpu: GpuId,
    pub(super) function: FunctionId,
    pub(super) victims: Vec<FunctionId>,
    /// Copies on any device that the function's tenant has to give up.
    pub(super) surrendered: Vec<(GpuId, FunctionId)>,
}

impl Room {
    /// The functions with a copy that leaves this device.
    pub fn victims(&self) -> &[FunctionId] {
        &self.victims
    }
}

/// The devices of the pool with their copies, for a [`WholePolicy`](super::WholePolicy).
#[derive(Debug)]
pub struct WholeDevices {
    pub(super) now: Timestamp,
    pub(super) gpus: Table<GpuId, Gpu>,
    pub(super) functions: Table<FunctionId, Served>,
    pub(super) queue: Queue,
    /// Memory of a device by kind.
    pub(super) kinds: BTreeMap<GpuKind, u64>,
    /// Idle devices by kind: dispatches, device.
    pub(super) idle: Vec<BTreeSet<(u64, GpuId)>>,
    /// Memory of all devices.
    pub(super) memory: u64,
    pub(super) hosts: HostCache,
    pub(super) tenants: BTreeMap<TenantId, Tenant>,
    /// Requests, and loads for them, of the last minute.
    asked: Recent,
    pub(super) missed: Recent,
    pub(super) uses: u64,
    /// A device that became idle and is not filed as such yet: it is probably given work in the same event.
    pub(super) unfiled: Option<GpuId>,
}

impl WholeDevices {
    pub(super) fn new(skip_limit: u32, host_memory: Bytes) -> Self {
        Self {
            now: Timestamp::ZERO,
            gpus: Table::default(),
            functions: Table::default(),
            queue: Queue::new(skip_limit),
            kinds: BTreeMap::new(),
            idle: Vec::new(),
            memory: 0,
            hosts: HostCache::new(host_memory),
            tenants: BTreeMap::new(),
            asked: Recent::NONE,
            missed: Recent::NONE,
            uses: 0,
            unfiled: None,
        }
    }

    /// The time of this decision.
    pub const fn now(&self) -> Timestamp {
        self.now
    }

    /// The expected time to load the function's model on the device; evictions before it are part of it.
    pub fn load_time(&self, function: FunctionId, gpu: GpuId) -> Duration {
        Duration::from_nanos(self.load_ns(function, self.g(gpu)))
    }

    /// The expected time of one request of the function on the device.
    pub fn run_time(&self, function: FunctionId, gpu: GpuId) -> Duration {
        Duration::from_nanos(self.infer_ns(function, self.g(gpu).kind))
    }

    /// The idle device with the function's model that runs it fastest.
    pub fn idle_copy(&self, function: FunctionId) -> Option<GpuId> {
        let of = self.f(function);
        let found = of.costs.iter().filter_map(|costs| {
            let &(_, _, count, gpu) = first_copy(of, false, costs.kind)?;
            Some((costs.infer.mean(), count, gpu))
        });
        found.min().map(|(_, _, gpu)| gpu)
    }

    /// The busy device with the function's model, present or on its way, that would answer a request of the function first; and
    /// the time until then.
    pub fn busy_copy(&self, function: FunctionId) -> Option<(Duration, GpuId)> {
        let of = self.f(function);
        let now = self.now.as_nanos();
        let found = of.costs.iter().filter_map(|costs| {
            let &(_, kind, free_at, gpu) = first_copy(of, true, costs.kind)?;
            Some((free_at.max(now).saturating_add(costs.infer.mean()), kind, gpu))
        });
        found.min().map(|(finish, _, gpu)| (Duration::from_nanos(finish - now), gpu))
    }

    /// How long the function's first request will have waited when a busy device answers the last one, after the return of a parked copy;
    /// `None` without such a device. The time so far counts, since others may keep the device busy for ever.
    pub fn busy_parked(&self, function: FunctionId) -> Option<Duration> {
        let of = self.f(function);
        let List { head, len, .. } = self.queue.of_function(function);
        let first = if head == NONE { self.now } else { self.queue.get(head).arrived };
        let waiting = u64::from(len.max(1));
        let found = of.parked.iter().map(|gpu| self.g(*gpu)).filter_map(|on| {
            // Kept copies do not make room for its return.
            let kept: u64 = on.copies.iter().filter(|copy| copy.kept).map(|copy| copy.bytes).sum();
            let returns = !on.phase.is_idle() && kept + of.bytes <= on.memory;
            let costs = of.costs.iter().find(|costs| returns && costs.kind == on.kind)?;
            let runs = Duration::from_nanos(costs.infer.mean()).saturating_mul(waiting);
            let back = Duration::from_nanos(costs.back.mean()).saturating_add(runs);
            Some(on.free_at().max(self.now).saturating_since(first).saturating_add(back))
        });
        found.min()
    }

    /// The idle devices with a parked copy of the function's model; and of each kind that holds the model, the idle devices with the fewest
    /// dispatches: 16 at most.
    pub fn idle(&self, function: FunctionId) -> impl Iterator<Item = GpuId> {
        let of = self.f(function);
        let kinds = of.kinds;
        let parked = of.parked.iter().copied().filter(|gpu| self.g(*gpu).phase.is_idle());
        let idle = (0..).zip(&self.idle).filter(move |(kind, _)| kinds >> kind & 1 == 1);
        let fewest = idle.flat_map(|(_, idle)| idle.iter().take(CANDIDATES)).map(|&(_, gpu)| gpu);
        parked.chain(fewest)
    }

    /// The worth of a copy on the device: its loading time x (arrivals expected while a copy is loaded and runs once + half the waiting
    /// requests) / copies. So many requests would have to wait for a new load of the copy.
    pub fn worth(&self, function: FunctionId, gpu: GpuId) -> Duration {
        let (of, on) = (self.f(function), self.g(gpu));
        let costs = of.costs.iter().find(|costs| costs.kind == on.kind && of.parks);
        let load = costs.map_or_else(|| self.load_ns(function, on), |costs| costs.back.mean());
        let away = load.saturating_add(self.infer_ns(function, on.kind));
        let expected = of.recent.expected(self.now, Duration::from_nanos(away));
        let waiting = u64::from(self.queue.of_function(function).len) << 15;
        let copies = of.copies.len().max(1) as u128;
        let worth = (u128::from(load) * u128::from(expected + waiting) / copies) >> 16;
        let worth = u64::try_from(worth).unwrap_or(u64::MAX);
        Duration::from_nanos(self.missed.part_of(self.asked, self.now, PRICED_MISSES, worth))
    }

    /// Room for the function's model on an idle device: unused copies leave in `order`, the least first, as few as suffice. `None`
    /// if they do not suffice.
    pub fn room(
        &self,
        function: FunctionId,
        gpu: GpuId,
        order: &dyn Fn(&ModelCopy) -> (u64, u64),
    ) -> Option<Room> {
        let (of, on) = (self.f(function), self.g(gpu));
        let missing = of.bytes.saturating_sub(on.free + on.evicting);
        let victims = cache::victims(&on.copies, missing, order)?;
        let surrendered = self.surrender(gpu, of, &victims)?;
        Some(Room { gpu, function, victims, surrendered })
    }

    /// Copies on any device that a tenant has to give up so that one more of its models keeps within its share of the memory.
    fn surrender(&self, gpu: GpuId, of: &Served, victims: &[FunctionId]) -> Option<Vec<(GpuId, FunctionId)>> {
        let tenant = self.tenants.get(&of.tenant).filter(|tenant| tenant.share < BasisPoints::WHOLE);
        let Some(tenant) = tenant else { return Some(Vec::new()) };
        let of_tenant = |copy: &&ModelCopy| self.f(copy.function).tenant == of.tenant;
        let goes = |copy: &ModelCopy| copy.is_cached() && victims.contains(&copy.function);
        let leaving = self.g(gpu).copies.iter().filter(|copy| goes(copy)).filter(of_tenant);
        let leaving: u64 = leaving.map(|copy| copy.bytes).sum();
        let mut over = (tenant.memory - leaving + of.bytes).saturating_sub(self.memory_of(tenant.share));
        let mut own: Vec<(u64, GpuId, FunctionId, u64)> = Vec::new();
        for (id, on) in self.gpus.sorted() {
            let free = on.copies.iter().filter(|copy| copy.may_leave() && !(id == gpu && goes(copy)));
            own.extend(free.filter(of_tenant).map(|copy| (copy.used, id, copy.function, copy.bytes)));
        }
        own.sort_unstable();
        let mut given = Vec::new();
        for (_, gpu, function, bytes) in own {
            if over == 0 {
                break;
            }
            over = over.saturating_sub(bytes);
            given.push((gpu, function));
        }
        (over == 0).then_some(given)
    }

    /// A share of the memory of all devices.
    fn memory_of(&self, share: BasisPoints) -> u64 {
        u64::try_from(u128::from(self.memory) * u128::from(share.get()) / 10_000).unwrap_or(u64::MAX)
    }

    /// Whether the function's model alone is larger than its tenant's share of the memory.
    pub(super) fn exceeds_its_tenant(&self, function: FunctionId) -> bool {
        let of = self.f(function);
        let share = self.tenants.get(&of.tenant).map_or(BasisPoints::WHOLE, |tenant| tenant.share);
        share < BasisPoints::WHOLE && self.memory > 0 && of.bytes > self.memory_of(share)
    }

    pub(super) fn tenant(&mut self, tenant: TenantId) -> &mut Tenant {
        self.tenants.entry(tenant).or_insert(Tenant { share: BasisPoints::WHOLE, memory: 0, leaving: 0 })
    }

    pub(super) fn g(&self, gpu: GpuId) -> &Gpu {
        &self.gpus[&gpu]
    }

    pub(super) fn g_mut(&mut self, gpu: GpuId) -> &mut Gpu {
        self.gpus.get_mut(&gpu).expect("the device is in the pool")
    }

    pub(super) fn f(&self, function: FunctionId) -> &Served {
        &self.functions[&function]
    }

    pub(super) fn f_mut(&mut self, function: FunctionId) -> &mut Served {
        self.functions.get_mut(&function).expect("the function is in the pool")
    }

    /// Counts a request of the function.
    pub(super) fn count_request(&mut self, function: FunctionId) {
        let now = self.now;
        self.f_mut(function).recent.count(now);
        self.asked.count(now);
    }

    pub(super) fn tier(&self, function: FunctionId, gpu: &Gpu) -> Tier {
        self.hosts.tier(gpu.node, function)
    }

    pub(super) fn load_ns(&self, function: FunctionId, gpu: &Gpu) -> u64 {
        let costs = self.f(function).costs.iter().find(|costs| costs.kind == gpu.kind);
        costs.map_or(NEVER, |costs| match self.tier(function, gpu) {
            _ if gpu.parked.iter().any(|copy| copy.function == function) => costs.back.mean(),
            Tier::Host => costs.host.mean(),
            Tier::Disk => costs.disk.mean(),
        })
    }

    pub(super) fn infer_ns(&self, function: FunctionId, kind: u8) -> u64 {
        let costs = self.f(function).costs.iter().find(|costs| costs.kind == kind);
        costs.map_or(NEVER, |costs| costs.infer.mean())
    }

    /// Gives the function its costs on all kinds of device, and the kinds that hold it.
    pub(super) fn profile(&mut self, function: FunctionId) {
        let kinds = self.kinds.clone();
        let Some(of) = self.functions.get_mut(&function) else { return };
        let before = of.kinds;
        for (kind, memory) in kinds {
            let kind = kind.number();
            if of.costs_on(kind).is_none() {
                let [infer, disk, host] = of.times.map(Estimate::new);
                of.costs.push(Costs { kind, disk, host, back: host, infer });
                of.costs.sort_unstable_by_key(|costs| costs.kind);
            }
            of.kinds |= u64::from(of.bytes <= memory) << kind;
        }
        let kinds = of.kinds;
        if kinds != before {
            self.queue.reclass(function, before, kinds);
        }
    }

    /// Files the copies of the unfiled device, which must precede every look at the index.
    pub(super) fn file_all(&mut self) {
        if let Some(gpu) = self.unfiled.take() {
            self.refile(gpu);
        }
    }

    /// Files a device's copies under its present state.
    pub(super) fn refile(&mut self, gpu: GpuId) {
        let Some(on) = self.gpus.get_mut(&gpu) else { return };
        let state = on.state();
        let before = core::mem::replace(&mut on.filed, state);
        if state == before {
            return;
        }
        for copy in on.copies.iter().filter(|copy| copy.is_cached()) {
            if let Some(of) = self.functions.get_mut(&copy.function) {
                of.copies.remove(&(before.0, on.kind, before.1, gpu));
                of.copies.insert((state.0, on.kind, state.1, gpu));
            }
        }
    }

    pub(super) fn file_copy(&mut self, gpu: GpuId, copy: ModelCopy) {
        let on = self.g_mut(gpu);
        let key = (on.filed.0, on.kind, on.filed.1, gpu);
        on.copies.push(copy);
        let of = self.f_mut(copy.function);
        of.copies.insert(key);
        let tenant = of.tenant;
        self.tenant(tenant).memory += copy.bytes;
    }

    pub(super) fn unfile_copy(&mut self, gpu: GpuId, copy: &ModelCopy) {
        let on = self.g(gpu);
        let key = (on.filed.0, on.kind, on.filed.1, gpu);
        let of = self.f_mut(copy.function);
        of.copies.remove(&key);
        let tenant = of.tenant;
        self.tenant(tenant).memory -= copy.bytes;
    }

    /// Keeps a copy whose memory has left the device.
    pub(super) fn park(&mut self, gpu: GpuId, copy: ModelCopy) {
        self.f_mut(copy.function).parked.push(gpu);
        self.g_mut(gpu).parked.push(copy);
    }

    /// Takes a parked copy from its device, if there is `such` a copy.
    pub(super) fn unpark(&mut self, gpu: GpuId, such: impl Fn(&ModelCopy) -> bool) -> Option<ModelCopy> {
        let parked = &mut self.g_mut(gpu).parked;
        let copy = parked.iter().position(such).map(|found| parked.remove(found))?;
        let homes = &mut self.f_mut(copy.function).parked;
        homes.swap_remove(homes.iter().position(|on| *on == gpu).expect("a parked copy's device is listed"));
        Some(copy)
    }

    /// Whether a device has memory for a copy beside the kept copies. All other copies there make room when idle.
    pub(super) fn fits_beside_kept(&self, function: FunctionId) -> bool {
        let needs = self.f(function).bytes;
        let kept = |on: &Gpu| on.copies.iter().filter(|copy| copy.kept).map(|copy| copy.bytes).sum::<u64>();
        self.gpus.sorted().iter().any(|(_, on)| on.memory - kept(on) >= needs)
    }
}

/// The first of the function's copies on idle or busy devices of a kind.
fn first_copy(of: &Served, busy: bool, kind: u8) -> Option<&CopyKey> {
    let (least, most) = (GpuId::new(0), GpuId::new(u32::MAX));
    of.copies.range((busy, kind, 0, least)..=(busy, kind, u64::MAX, most)).next()
}
