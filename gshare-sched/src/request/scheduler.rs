//! The request scheduler: load balancing, LALB, LALBO3, and a policy that prices evictions.
//!
//! # Problem
//! Requests for many models arrive, each GPU holds a few models, and a load takes two to three times as long as a request.
//! Give requests to GPUs with few loads, no GPU idle while it has work, and no request that waits for ever.
//!
//! # Terms
//! The terms of [`crate::request`], and
//! - **skips** of a request: how often a later request left the global queue before it;
//! - **due**: a request that must not be skipped again: its skips have reached the limit, or it has waited `skip_age`;
//! - **free at**: the time at which a GPU will have done its present work and its local queue;
//! - **worth** of a copy: the loading time that its eviction is expected to cost.
//!
//! # Algorithm
//! On every event the idle GPUs are gone through, fewest dispatches first (GPU-enabled FaaS, Algorithms 1 and 2, mended). A
//! GPU with a local queue is never idle: it goes on with it. For an idle GPU `g`:
//!
//! 1. Find `h`, the earliest waiting request for a model with a copy on `g`. Due requests before `h` are **placed** first,
//!    in order of arrival (below); `g`'s turn ends if one lands on `g`.
//! 2. If there is `h`, `g` runs it.
//! 3. Else waiting requests are placed in order of arrival until one lands on `g`.
//!
//! To **place** a request with `g` at hand:
//! - a copy on an idle GPU `j`: `j` runs it;
//! - a copy on a busy GPU, of which `j` would finish the request first: if that is earlier than a load and the run on `g`,
//!   the request moves to `j`'s local queue;
//! - else it is a miss on `g`, which evicts, loads and runs. If pinned models leave no room, the request stays. If the
//!   model has as many copies as it may have, the request moves to that busy `j`, however late.
//!
//! The policies ([`Policy`](super::Policy)):
//!
//! | policy | difference |
//! |---|---|
//! | `Policy::LoadBalance` | the head of the queue runs on `g`, wherever copies are (the paper's baseline) |
//! | `Policy::Lalb` | a limit of 0: every request is due |
//! | `Policy::LalbO3` | as above |
//! | `Policy::EvictCostAware` | a miss costs its loading time **and** the worth of its victims, and goes to the idle GPU where that is least |
//!
//! Worth = loading time x (arrivals expected while a copy is loaded and runs once + half the waiting requests) / copies: so
//! many requests would have to wait for a new load of the copy. The expected arrivals follow from a sum of arrivals with a
//! time constant of a minute. So a short wait does not evict a model in demand: its next request would load it again and
//! evict another. The worth is full where one request in 16 is a miss, and less in proportion where fewer are: while the
//! working set fits, hardly any request misses a victim.
//!
//! ## Example
//! Loads take 3 s, runs 1 s; GPU 0 holds A and runs it for 1 s more; GPU 1 holds B and becomes idle; waiting are `a1 c1 b1
//! a2` (limit 25). GPU 1: `h` = `b1` runs there at once, `a1` and `c1` are skipped once. At 1 s GPU 0 is done: `h` = `a1`.
//! At 2 s both are done; GPU 0 takes `a2`, GPU 1 finds no copy it could use: `c1` has none anywhere, it is loaded, and
//! evicts B if there is no room. Under LALB (limit 0) GPU 1 would have placed `a1` and `c1` first: `a1` in GPU 0's local
//! queue (1 + 1 s < 3 + 1 s), and `c1` would have evicted B, which `b1` then needs.
//!
//! # Invariants
//! - a request is in one place: held, queued, local to a GPU, or placed on a GPU;
//! - copies on a GPU (loading, resident, evicting) and its free memory add up to its memory;
//! - a copy's users are the requests of its model that are placed on or local to its GPU; a copy with users is not evicted;
//! - an idle GPU has no local queue; every copy is filed under its GPU's present state;
//! - skips never increase along the queue.
//!
//! If all GPUs are of one kind and nothing is pinned, a request is skipped at most `skip_limit` times: the next GPU that
//! becomes idle places the first due request, unless it cannot serve that request. In a local queue no request is
//! overtaken.
//!
//! # Cost
//! An event costs O(c log n): c copies on the GPU it concerns, n GPUs that share one of their models. Choosing for an idle
//! GPU is O(c), not O(queue): each model knows its waiting requests. Requests that cannot run on the GPU at hand are passed
//! over by class, not one by one. `EvictCostAware` looks at 16 idle GPUs at most.
//!
//! # Differences from the paper
//! - The limit is reached when skips **equal** it, as the text says; Algorithm 1 tests for "higher", which gives everyone a
//!   free skip under limit 0. Skips are counted when a request overtakes, not when a scan passes by.
//! - A GPU that was given a request is busy at once, within the same round too; idle means no local queue either.
//! - Of the busy GPUs the best is taken, not the first below the bound, and whole finish times are compared: `wait(j) +
//!   infer(j) < load(g) + infer(g)`, which the printed test equals only on GPUs of one kind.
//! - A model counts as cached from the decision to load it. Copies that a request runs on or waits for are not evicted.
//! - A model may have a limit of copies ([`RequestEvent::ModelLimited`]); the paper's may be loaded on every GPU.
//! - Requests that fit no GPU are rejected (the paper's eviction loop would not end), superfluous victims are put back.
//! - Skips alone do not bound a wait: while nothing is dispatched no request is skipped. So there is an age, too.

mod check;
mod choosing;
mod copies;
mod loading;
mod membership;
mod placing;
mod queueing;
mod running;

use super::SchedulerConfig;
use super::cache::{CopyState, ModelCopy};
use super::estimate::{Estimate, Recent};
use super::queue::Queue;
use crate::request::{
    GpuRecord, RejectReason, RequestAction, RequestError, RequestEvent, RequestPlace, RequestScheduler,
    RequestStats, Tier,
};
use gshare_core::{BasisPoints, ConfigError, Duration, Engine, GpuId, ModelId, RequestId, Timestamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Idle GPUs of a kind that are compared for a load.
const CANDIDATES: usize = 16;
/// Kinds of GPU: one bit each.
const MAX_KINDS: u8 = 63;
/// Numbers of GPUs and of models lie below these: tables are as long as the largest.
const MAX_GPUS: u32 = 1 << 16;
const MAX_MODELS: u32 = 1 << 20;

/// Costs of a model on a kind of GPU, learned.
#[derive(Debug, Clone, Copy)]
struct Costs {
    kind: u8,
    disk: Estimate,
    host: Estimate,
    infer: Estimate,
}

/// Order of a model's copies: idle GPUs first; then by kind; then by number of dispatches (idle) or time until free (busy);
/// then by GPU.
type CopyKey = (bool, u8, u64, u32);

#[derive(Debug, Default)]
struct Model {
    /// 0: unknown.
    bytes: u64,
    asked: bool,
    /// The kinds of GPU that can serve it.
    kinds: u64,
    costs: Vec<Costs>,
    copies: BTreeSet<CopyKey>,
    /// The most copies. `None`: any number.
    most: Option<u32>,
    recent: Recent,
}

impl Model {
    /// Whether there are as many copies as may be.
    fn is_full(&self) -> bool {
        self.most.is_some_and(|most| self.copies.len() >= most as usize)
    }

    /// Whether there are more copies than may be, since the limit was lowered.
    fn is_over(&self) -> bool {
        self.most.is_some_and(|most| self.copies.len() > most as usize)
    }

    fn on(&self, kind: u8) -> Option<&Costs> {
        self.costs.iter().find(|costs| costs.kind == kind)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Idle,
    MakingRoom {
        model: u32,
    },
    Loading {
        model: u32,
        from: Tier,
    },
    Running,
}

#[derive(Debug, Default)]
struct Gpu {
    kind: u8,
    node: u32,
    memory: u64,
    /// Not taken by any copy.
    free: u64,
    /// Taken by copies that are being evicted.
    evicting: u64,
    copies: Vec<ModelCopy>,
    pins: Vec<u32>,
    phase: Phase,
    /// Placed here: one request, or a batch.
    running: Vec<u32>,
    batch: u32,
    local: VecDeque<u32>,
    local_ns: u64,
    /// End of its present work.
    until: Timestamp,
    dispatches: u64,
    /// Greedy-dual clock: the priority of the last victim.
    clock: u64,
    /// The state its copies are filed under.
    filed: (bool, u64),
}

impl Gpu {
    fn free_at(&self) -> Timestamp {
        self.until.saturating_add(Duration::from_nanos(self.local_ns))
    }

    fn state(&self) -> (bool, u64) {
        match self.phase {
            Phase::Idle => (false, self.dispatches),
            _ => (true, self.free_at().as_nanos()),
        }
    }

    fn cached(&self, model: u32) -> Option<&ModelCopy> {
        self.copies.iter().find(|copy| copy.model == model && copy.is_cached())
    }

    fn cached_mut(&mut self, model: u32) -> Option<&mut ModelCopy> {
        self.copies.iter_mut().find(|copy| copy.model == model && copy.is_cached())
    }

    /// Forgets a copy that is or is not being evicted.
    fn remove(&mut self, model: u32, evicting: bool) -> Option<ModelCopy> {
        let found =
            self.copies.iter().position(|copy| copy.model == model && copy.is_cached() != evicting)?;
        Some(self.copies.swap_remove(found))
    }
}

/// Models in the pinned memory of a node.
#[derive(Debug, Default)]
struct Host {
    gpus: u32,
    used: u64,
    /// Serial number of the last use, and whether the copy is complete.
    models: BTreeMap<u32, (u64, bool)>,
}

/// A tenant's share of the memory of all GPUs, and the bytes of the copies that were loaded for it.
#[derive(Debug)]
struct Tenant {
    share: BasisPoints,
    memory: u64,
}

/// The result for a request that was to be placed with a GPU at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Here,
    Elsewhere,
    Stays,
}

/// The victims of a miss, and their worth in ns.
#[derive(Debug)]
struct Room {
    victims: Vec<ModelId>,
    /// Copies on other GPUs that its tenant has to give up.
    surrendered: Vec<(u32, u32)>,
    worth: u64,
}

/// The request scheduler. See the [module](self).
#[derive(Debug)]
pub struct LocalityScheduler {
    config: SchedulerConfig,
    now: Timestamp,
    queue: Queue,
    models: Vec<Model>,
    gpus: Vec<Option<Gpu>>,
    live: u32,
    memory: u64,
    /// Memory of a GPU by kind.
    kinds: Vec<Option<u64>>,
    /// Idle GPUs by kind: dispatches, number.
    idle: Vec<BTreeSet<(u64, u32)>>,
    hosts: BTreeMap<u32, Host>,
    tenants: BTreeMap<u32, Tenant>,
    /// Models that may have more copies than their limit.
    over: BTreeSet<u32>,
    /// When it is too late for which request.
    drops: BTreeSet<(Timestamp, u32)>,
    /// A GPU that became idle and is not filed as such yet: it is probably given work in the same event.
    unfiled: Option<u32>,
    uses: u64,
    /// Requests, and loads for them, of the last minute.
    asked: Recent,
    missed: Recent,
    stats: RequestStats,
}

impl LocalityScheduler {
    /// A scheduler without GPUs and models.
    ///
    /// # Errors
    /// When a field of the configuration is out of its bounds.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            now: Timestamp::ZERO,
            queue: Queue::new(config.policy.skip_limit()),
            models: Vec::new(),
            gpus: Vec::new(),
            live: 0,
            memory: 0,
            kinds: Vec::new(),
            idle: Vec::new(),
            hosts: BTreeMap::new(),
            tenants: BTreeMap::new(),
            over: BTreeSet::new(),
            drops: BTreeSet::new(),
            unfiled: None,
            uses: 0,
            asked: Recent::default(),
            missed: Recent::default(),
            stats: RequestStats::default(),
        })
    }

    /// GPUs that have a copy of the model, or are about to.
    pub fn copies(&self, model: ModelId) -> usize {
        self.models.get(model.index()).map_or(0, |model| model.copies.len())
    }

    fn live_gpu(&self, gpu: GpuId) -> Result<&Gpu, RequestError> {
        self.gpus.get(gpu.index()).and_then(Option::as_ref).ok_or(RequestError::UnknownGpu { gpu })
    }

    fn known_model(&self, model: ModelId) -> Result<&Model, RequestError> {
        self.models
            .get(model.index())
            .filter(|known| known.bytes > 0)
            .ok_or(RequestError::UnknownModel { model })
    }

    fn g(&self, gpu: u32) -> &Gpu {
        self.gpus[gpu as usize].as_ref().expect("only live GPUs are indexed")
    }

    fn g_mut(&mut self, gpu: u32) -> &mut Gpu {
        self.gpus[gpu as usize].as_mut().expect("only live GPUs are indexed")
    }

    fn tenant(&mut self, tenant: u32) -> &mut Tenant {
        self.tenants.entry(tenant).or_insert(Tenant { share: BasisPoints::WHOLE, memory: 0 })
    }

    fn m(&self, model: u32) -> &Model {
        &self.models[model as usize]
    }

    /// Rejects the requests that can no longer start in time.
    fn catch_up(&mut self, now: Timestamp, actions: &mut Vec<RequestAction>) {
        self.now = now;
        while let Some(&(at, slot)) = self.drops.first() {
            if at > now {
                break;
            }
            self.reject(slot, RejectReason::DeadlineMissed, actions);
        }
    }

    fn account(&mut self, event: RequestEvent, actions: &mut Vec<RequestAction>) {
        match event {
            RequestEvent::GpuJoined { gpu, kind, node, memory } => {
                self.gpu_joined(gpu, kind, node, memory, actions);
            }
            RequestEvent::GpuLost { gpu } => self.gpu_lost(gpu, actions),
            RequestEvent::ModelAdded { model, memory } => {
                if self.models.len() <= model.index() {
                    self.models.resize_with(model.index() + 1, Model::default);
                }
                self.models[model.index()].bytes = memory.0;
                self.reclass(model.number(), actions);
            }
            RequestEvent::ModelProfiled { model, kind, profile } => {
                let costs = Costs {
                    kind: kind.number(),
                    disk: Estimate::new(profile.load_disk),
                    host: Estimate::new(profile.load_host),
                    infer: Estimate::new(profile.infer),
                };
                let known = &mut self.models[model.index()].costs;
                known.retain(|old| old.kind != kind.number());
                known.push(costs);
                known.sort_unstable_by_key(|costs| costs.kind);
                self.reclass(model.number(), actions);
            }
            RequestEvent::ModelPinned { model, gpu, pinned } => {
                let pins = &mut self.g_mut(gpu.number()).pins;
                pins.retain(|&other| other != model.number());
                if pinned {
                    pins.push(model.number());
                }
            }
            RequestEvent::ModelLimited { model, copies } => {
                self.models[model.index()].most = Some(copies);
                self.over.insert(model.number());
            }
            RequestEvent::TenantLimited { tenant, memory } => self.tenant(tenant.number()).share = memory,
            RequestEvent::Arrived { request, model, tenant, deadline } => {
                self.arrived(request, model, tenant, deadline, actions);
            }
            RequestEvent::Cancelled { request } => {
                if let Some(slot) = self.queue.find(request) {
                    self.reject(slot, RejectReason::Cancelled, actions);
                }
            }
            RequestEvent::Evicted { gpu, model } => {
                if let Some(copy) = self.g_mut(gpu.number()).remove(model.number(), true) {
                    let on = self.g_mut(gpu.number());
                    on.evicting -= copy.bytes;
                    on.free += copy.bytes;
                    self.load_if_room(gpu.number(), actions);
                }
            }
            RequestEvent::Loaded { gpu, model, took } => {
                self.loaded(gpu.number(), model.number(), took, actions);
            }
            RequestEvent::LoadFailed { gpu, model } => {
                self.load_failed(gpu.number(), model.number(), actions);
            }
            RequestEvent::Dropped { gpu, model } => {
                // The next dispatch to a copy in use finds the loss and loads it again. The report may be old and the model
                // still there, so an unused copy is evicted for certain before its memory is reused.
                let unused = |copy: &ModelCopy| copy.state == CopyState::Resident && copy.users == 0;
                if self.g(gpu.number()).cached(model.number()).is_some_and(unused) {
                    self.evict(gpu.number(), model.number(), actions);
                }
            }
            RequestEvent::NotResident { gpu, request } => {
                if let Some(slot) = self.queue.find(request) {
                    self.not_resident(gpu.number(), slot, actions);
                }
            }
            RequestEvent::Completed { gpu, request, took } => {
                if let Some(slot) = self.queue.find(request) {
                    self.completed(gpu.number(), slot, took, actions);
                }
            }
            _ => {}
        }
    }

    /// Checks the properties that hold between two events; checked after each in debug builds. Costs O(everything).
    #[cfg(debug_assertions)]
    pub(super) fn invariants(&self) {
        self.queue.invariants();
        let mut placed = 0;
        let mut memory: BTreeMap<u32, u64> = BTreeMap::new();
        for (index, gpu) in (0u32..).zip(&self.gpus) {
            let Some(gpu) = gpu else { continue };
            let taken: u64 = gpu
                .copies
                .iter()
                .filter(|copy| !matches!(gpu.phase, Phase::MakingRoom { model } if copy.model == model && copy.is_cached()))
                .map(|copy| copy.bytes)
                .sum();
            assert_eq!(taken + gpu.free, gpu.memory, "memory of gpu{index}");
            assert_eq!(gpu.filed, gpu.state(), "gpu{index} is filed under its state");
            let idle = self.idle[usize::from(gpu.kind)].contains(&(gpu.dispatches, index));
            assert_eq!(idle, gpu.phase == Phase::Idle);
            assert!(
                !idle || (gpu.local.is_empty() && gpu.running.is_empty()),
                "an idle GPU has nothing to do"
            );
            let local_ns: u64 = gpu.local.iter().map(|&slot| self.queue.get(slot).local_ns).sum();
            assert_eq!(local_ns, gpu.local_ns);
            for &slot in gpu.running.iter().chain(&gpu.local) {
                let request = self.queue.get(slot);
                assert_eq!(request.gpu, index);
                use super::queue::Place;
                assert!(matches!(request.place, Place::Placed | Place::Local));
                assert!(gpu.cached(request.model).is_some(), "the model is there or on its way");
                placed += 1;
            }
            for copy in gpu.copies.iter().filter(|copy| copy.is_cached()) {
                let uses = |slot: &&u32| self.queue.get(**slot).model == copy.model;
                let users = gpu.running.iter().chain(&gpu.local).filter(uses).count();
                assert_eq!(users, copy.users as usize, "users of model{} on gpu{index}", copy.model);
                let key = (gpu.filed.0, gpu.kind, gpu.filed.1, index);
                assert!(self.m(copy.model).copies.contains(&key));
                *memory.entry(copy.owner).or_default() += copy.bytes;
            }
        }
        assert_eq!(placed + self.queue.len() as usize, self.queue.known());
        for (number, tenant) in &self.tenants {
            assert_eq!(tenant.memory, memory.get(number).copied().unwrap_or(0), "memory of tenant{number}");
        }
        for model in &self.models {
            for &(_, _, _, gpu) in &model.copies {
                assert!(self.gpus[gpu as usize].is_some());
            }
        }
    }
}

/// A tenant's share of the memory of all GPUs.
fn memory_share(share: BasisPoints, total: u64) -> u64 {
    u64::try_from(u128::from(total) * u128::from(share.get()) / 10_000).unwrap_or(u64::MAX)
}

/// The first of the model's copies on idle or busy GPUs of a kind.
fn first_copy(model: &Model, busy: bool, kind: u8) -> Option<&CopyKey> {
    model.copies.range((busy, kind, 0, 0)..=(busy, kind, u64::MAX, u32::MAX)).next()
}

impl Engine for LocalityScheduler {
    type Event = RequestEvent;
    type Action = RequestAction;
    type Error = RequestError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: RequestEvent,
        actions: &mut Vec<RequestAction>,
    ) -> Result<(), RequestError> {
        self.check(now, &event)?;
        self.catch_up(now, actions);
        self.account(event, actions);
        self.trim_over(actions);
        self.schedule(actions);
        self.file_all();
        #[cfg(debug_assertions)]
        self.invariants();
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.drops.first().map(|&(at, _)| at)
    }
}

impl RequestScheduler for LocalityScheduler {
    fn place(&self, request: RequestId) -> Option<RequestPlace> {
        self.queue.find(request).map(|slot| self.queue.get(slot).status())
    }

    fn waiting(&self) -> usize {
        self.queue.len() as usize
    }

    fn stats(&self) -> RequestStats {
        self.stats
    }

    fn gpu(&self, gpu: GpuId) -> Option<GpuRecord> {
        let on = self.live_gpu(gpu).ok()?;
        let mut copies: Vec<(u64, u32)> =
            on.copies.iter().filter(|copy| copy.is_cached()).map(|copy| (copy.used, copy.model)).collect();
        copies.sort_unstable();
        let models = copies.into_iter().map(|(_, model)| ModelId::new(model)).collect();
        Some(GpuRecord { busy: on.phase != Phase::Idle, free_at: on.free_at(), models })
    }
}
