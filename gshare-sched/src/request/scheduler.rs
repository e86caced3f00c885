//! The request scheduler: load balancing, LALB, LALBO3, and a version that prices what it evicts.
//!
//! # Problem
//! Requests for many models arrive; GPUs hold a few models each; loading one takes two to three times as long as running
//! it. Give requests to GPUs so that few are loaded, no GPU idles while there is work for it, and nobody waits for ever.
//!
//! # Terms
//! The words of [`gshare_core::request`], and
//! - **skips** of a request: how often one that arrived later left the global queue before it;
//! - **due**: a request that may not be skipped any more: its skips have reached the limit, or it has waited `skip_age`;
//! - **free at**: when a GPU will have done all it was given: the rest of what it does, and its local queue;
//! - **worth** of a copy: the loading time that evicting it is expected to cause.
//!
//! # Algorithm
//! On every event the idle GPUs are gone through, fewest dispatches first (GPU-enabled FaaS, Algorithms 1 and 2, mended).
//! A GPU with a local queue is never idle: it goes on with it. For an idle GPU `g`:
//!
//! 1. Find `h`, the earliest waiting request whose model has a copy on `g`. Requests before `h` that are due are
//!    **placed** first, in order of arrival (below); that ends `g`'s turn if one lands on `g`.
//! 2. If there is `h`, `g` runs it.
//! 3. Else waiting requests are placed in order of arrival until one lands on `g`.
//!
//! To **place** a request with `g` at hand:
//! - a copy on an idle GPU `j`: `j` runs it;
//! - a copy on a busy GPU `j`, the one which would finish the request first: if that is earlier than loading the model on
//!   `g` and running it there, the request moves to `j`'s local queue;
//! - else it is a miss on `g`, which evicts, loads and runs. If pinned models leave no room, the request stays.
//!
//! | policy | difference |
//! |---|---|
//! | [`Policy::LoadBalance`] | the head of the queue runs on `g`, wherever copies are (the paper's baseline) |
//! | [`Policy::Lalb`] | a limit of 0: every request is due |
//! | [`Policy::LalbO3`] | as above |
//! | [`Policy::EvictCostAware`] | a miss costs its loading time **and** the worth of its victims, and goes to the idle GPU where that is least |
//!
//! Worth = loading time x (arrivals expected while a copy is loaded and runs once + half the waiting requests) / copies: these are the
//! requests that have to wait for the copy to be loaded again. The expected arrivals follow from a sum of arrivals with a time constant of a minute. So a model that is about to be asked for is
//! not evicted to save a short wait: its next request would load it again, and evict another.
//!
//! ## Example
//! Loads take 3 s, runs 1 s; GPU 0 holds A and runs it for 1 s more; GPU 1 holds B and becomes idle; waiting are
//! `a1 c1 b1 a2` (limit 25). GPU 1: `h` = `b1` runs there at once, `a1` and `c1` are skipped once. At 1 s GPU 0 is done:
//! `h` = `a1`. At 2 s both are done; GPU 0 takes `a2`, GPU 1 finds no copy it could use: `c1` has none anywhere, it is
//! loaded, and evicts B if there is no room. Under LALB (limit 0) GPU 1 would have placed `a1` and `c1` first: `a1` in
//! GPU 0's local queue (1 + 1 s < 3 + 1 s), and `c1` would have evicted B, which `b1` then needs.
//!
//! # Invariants
//! - a request is in one place: held, queued, local to one GPU, or placed on one;
//! - copies on a GPU (loading, resident, evicting) and its free memory add up to its memory;
//! - a copy's users are the requests of its model that are placed on or local to its GPU; one with users is not evicted;
//! - an idle GPU has no local queue; every copy is filed under its GPU's present state;
//! - skips never increase along the queue.
//!
//! If all GPUs are of one kind and nothing is pinned, a request is skipped at most `skip_limit` times: the first one in the
//! queue that is due is placed by the next GPU that becomes idle. A GPU that cannot serve it passes over it. In a local
//! queue nobody is overtaken.
//!
//! # Cost
//! An event costs O(c log n): c copies on the GPU it concerns, n GPUs that share one of their models. Choosing for an idle
//! GPU is O(c), not O(queue): each model knows its waiting requests. Requests that cannot run on the GPU at hand
//! are passed over by class, not one by one. `EvictCostAware` looks at 16 idle GPUs at most.
//!
//! # Differences from the paper
//! - The limit is reached when skips **equal** it, as the text says; Algorithm 1 tests for "higher", which gives everyone
//!   a free skip under limit 0. Skips are counted when somebody overtakes, not when a scan passes by.
//! - A GPU that was given a request is busy at once, within the same round too; idle means no local queue either.
//! - Of the busy GPUs the best is taken, not the first below the bound, and whole finish times are compared:
//!   `wait(j) + infer(j) < load(g) + infer(g)`, which the printed test equals only on GPUs of one kind.
//! - A model counts as cached from the decision to load it. Copies that somebody runs on or waits for are not evicted.
//! - Requests that fit no GPU are rejected (the paper's eviction loop would not end), superfluous victims are put back.
//! - Skips alone do not bound a wait: while nothing is dispatched nobody is skipped. So there is an age, too.
use super::cache::{self, CopyState, ModelCopy};
use super::estimate::{Estimate, Recent};
use super::queue::{By, NONE, Place, Queue, Request, Walk};
use super::tenants::Tenants;
use super::{CachePolicy, Policy, SchedulerConfig};
use crate::token::ConfigError;
use gshare_core::request::{
    GpuKind, GpuRecord, ModelProfile, NodeId, RejectReason, RequestAction, RequestError, RequestEvent,
    RequestId, RequestPlace, RequestScheduler, RequestStats, TenantId, Tier,
};
use gshare_core::{BasisPoints, Bytes, Duration, Engine, GpuId, ModelId, Timestamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

/// Idle GPUs that `EvictCostAware` compares for a miss.
const CANDIDATES: usize = 16;
/// Kinds of GPU: one bit each.
const MAX_KINDS: u8 = 63;

/// Costs of a model on a kind of GPU, learned.
#[derive(Debug, Clone, Copy)]
struct Costs {
    kind: u8,
    disk: Estimate,
    host: Estimate,
    infer: Estimate,
}

/// Place of a copy among those of its model: idle GPUs first; then by kind; then by the number of dispatches (idle) or
/// by when it will be free (busy); then by GPU.
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
    recent: Recent,
}

impl Model {
    fn on(&self, kind: u8) -> Option<&Costs> {
        self.costs.iter().find(|costs| costs.kind == kind)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    MakingRoom { model: u32 },
    Loading { model: u32, from: Tier },
    Running,
}

#[derive(Debug)]
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
    /// When what it does now will be done.
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

/// What became of a request that was to be placed with a GPU at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Here,
    Elsewhere,
    Stays,
}

/// The victims of a miss, and what they are worth in ns.
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
    tenants: Tenants,
    /// Tenants whose gate may have opened.
    stirred: Vec<u32>,
    /// When it is too late for which request.
    drops: BTreeSet<(Timestamp, u32)>,
    /// A GPU that became idle and is not filed as such yet: it is probably given work in the same event.
    unfiled: Option<u32>,
    uses: u64,
    stats: RequestStats,
}

impl LocalityScheduler {
    /// A scheduler without GPUs and models.
    ///
    /// # Errors
    /// When a field of the configuration is out of its bounds.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let tenants = Tenants::new(config.window, config.fairness);
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
            tenants,
            stirred: Vec::new(),
            drops: BTreeSet::new(),
            unfiled: None,
            uses: 0,
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

    fn m(&self, model: u32) -> &Model {
        &self.models[model as usize]
    }

    /// Refuses what cannot be done, before anything is changed.
    fn check(&self, now: Timestamp, event: &RequestEvent) -> Result<(), RequestError> {
        if now < self.now {
            return Err(RequestError::TimeWentBack { now, last: self.now });
        }
        let below = |field, value: u32, limit: u32| match value < limit {
            true => Ok(()),
            false => Err(RequestError::OutOfRange { field, value: value.into(), limit: limit.into() }),
        };
        match *event {
            RequestEvent::GpuJoined { gpu, kind, memory, .. } => {
                below("gpu", gpu.0, self.config.max_gpus)?;
                below("kind", kind.0.into(), MAX_KINDS.into())?;
                if self.live_gpu(gpu).is_ok() {
                    return Err(RequestError::GpuExists { gpu });
                }
                match self.kinds.get(usize::from(kind.0)) {
                    Some(&Some(expected)) if expected != memory.0 => {
                        Err(RequestError::KindDiffers { gpu, kind, memory, expected: Bytes(expected) })
                    }
                    _ => Ok(()),
                }
            }
            RequestEvent::GpuLost { gpu } => self.live_gpu(gpu).map(|_| ()),
            RequestEvent::ModelAdded { model, memory } => {
                below("model", model.0, self.config.max_models)?;
                let fixed = self.known_model(model).ok().filter(|known| known.asked);
                if memory == Bytes::ZERO || fixed.is_some_and(|known| known.bytes != memory.0) {
                    return Err(RequestError::BadModelMemory { model, memory });
                }
                Ok(())
            }
            RequestEvent::ModelProfiled { model, kind, profile } => {
                self.known_model(model)?;
                below("kind", kind.0.into(), MAX_KINDS.into())?;
                let hour = Duration::from_secs(3600);
                let ModelProfile { load_disk, load_host, infer } = profile;
                if infer.is_zero() || infer > hour || load_disk > hour || load_host > hour {
                    return Err(RequestError::BadProfile { model, kind });
                }
                Ok(())
            }
            RequestEvent::ModelPinned { model, gpu, .. } => {
                self.known_model(model)?;
                self.live_gpu(gpu).map(|_| ())
            }
            RequestEvent::TenantLimited { tenant, limits } => {
                below("tenant", tenant.0, self.config.max_tenants)?;
                let zero = [("max_processes", limits.max_processes), ("weight", limits.weight)]
                    .into_iter()
                    .find(|(_, value)| *value == 0);
                match zero {
                    Some((field, _)) => Err(RequestError::BadLimits { tenant, field }),
                    None => Ok(()),
                }
            }
            RequestEvent::Arrived { request, model, tenant, .. } => {
                below("tenant", tenant.0, self.config.max_tenants)?;
                if self.queue.find(request).is_some() {
                    return Err(RequestError::DuplicateRequest { request });
                }
                self.known_model(model).map(|_| ())
            }
            RequestEvent::Cancelled { request } => match self.queue.find(request) {
                None => Err(RequestError::UnknownRequest { request }),
                Some(slot) if self.queue.get(slot).place == Place::Placed => {
                    Err(RequestError::AlreadyPlaced { request })
                }
                Some(_) => Ok(()),
            },
            RequestEvent::Evicted { gpu, model } => {
                let evicting = |copy: &ModelCopy| copy.model == model.0 && copy.state == CopyState::Evicting;
                match self.live_gpu(gpu)?.copies.iter().any(evicting) {
                    true => Ok(()),
                    false => Err(RequestError::NotOrdered { gpu, what: "evict", model }),
                }
            }
            RequestEvent::Loaded { gpu, model, .. } | RequestEvent::LoadFailed { gpu, model } => {
                match self.live_gpu(gpu)?.phase {
                    Phase::Loading { model: loading, .. } if loading == model.0 => Ok(()),
                    _ => Err(RequestError::NotOrdered { gpu, what: "load", model }),
                }
            }
            RequestEvent::Dropped { gpu, model } => {
                self.live_gpu(gpu)?;
                self.known_model(model).map(|_| ())
            }
            RequestEvent::NotResident { gpu, request } | RequestEvent::Completed { gpu, request, .. } => {
                let on = self.live_gpu(gpu)?;
                let slot = self.queue.find(request).ok_or(RequestError::UnknownRequest { request })?;
                match on.phase == Phase::Running && on.running.contains(&slot) {
                    true => Ok(()),
                    false => Err(RequestError::NotRunning { request, gpu }),
                }
            }
            _ => Ok(()),
        }
    }

    /// Rejects those for which it became too late, and lets time shares start anew.
    fn catch_up(&mut self, now: Timestamp, actions: &mut Vec<RequestAction>) {
        let windows_passed = self.tenants.window_end(self.now) <= now;
        self.now = now;
        while let Some(&(at, slot)) = self.drops.first() {
            if at > now {
                break;
            }
            let reason = match self.queue.get(slot).has_deadline {
                true => RejectReason::DeadlineMissed,
                false => RejectReason::WaitedTooLong,
            };
            self.reject(slot, reason, actions);
        }
        if windows_passed {
            self.stirred.extend(&self.tenants.out_of_time);
        }
    }

    // Estimates.

    fn infer_ns(&self, model: u32, kind: u8) -> u64 {
        self.m(model).on(kind).map_or(u64::MAX / 4, |costs| costs.infer.mean())
    }

    /// `n` requests of a model run together.
    fn batch_ns(&self, one: u64, n: u32) -> u64 {
        let more = u64::from(self.config.batch_marginal.get()) * u64::from(n.saturating_sub(1));
        one.saturating_add(u64::try_from(u128::from(one) * u128::from(more) / 10_000).unwrap_or(u64::MAX))
    }

    fn tier(&self, model: u32, gpu: &Gpu) -> Tier {
        match self.hosts.get(&gpu.node).and_then(|host| host.models.get(&model)) {
            Some((_, true)) => Tier::Host,
            _ => Tier::Disk,
        }
    }

    fn load_ns(&self, model: u32, gpu: &Gpu) -> u64 {
        self.m(model).on(gpu.kind).map_or(u64::MAX / 4, |costs| match self.tier(model, gpu) {
            Tier::Host => costs.host.mean(),
            _ => costs.disk.mean(),
        })
    }

    /// Loading time that evicting one of the model's copies is expected to cause to those who ask for it while it is away.
    fn worth(&self, model: u32, gpu: &Gpu) -> u64 {
        let known = self.m(model);
        let away = self.load_ns(model, gpu).saturating_add(self.infer_ns(model, gpu.kind));
        let expected = known.recent.expected(self.now, Duration::from_nanos(away));
        let waiting = u64::from(self.queue.of_model(model).len) << 15;
        let copies = known.copies.len().max(1) as u128;
        let load = u128::from(self.load_ns(model, gpu));
        u64::try_from((load * u128::from(expected + waiting) / copies) >> 16).unwrap_or(u64::MAX)
    }

    /// The copy on an idle GPU that runs the model fastest.
    fn idle_copy(&self, model: u32) -> Option<u32> {
        let known = self.m(model);
        known
            .costs
            .iter()
            .filter_map(|costs| {
                let &(_, _, count, gpu) = first_copy(known, false, costs.kind)?;
                Some((costs.infer.mean(), count, gpu))
            })
            .min()
            .map(|(_, _, gpu)| gpu)
    }

    /// The copy on a busy GPU that would finish the model first, and when.
    fn busy_copy(&self, model: u32) -> Option<(u64, u32)> {
        let known = self.m(model);
        known
            .costs
            .iter()
            .filter_map(|costs| {
                let &(_, kind, free_at, gpu) = first_copy(known, true, costs.kind)?;
                let start = free_at.max(self.now.as_nanos());
                Some((start.saturating_add(costs.infer.mean()), kind, gpu))
            })
            .min()
            .map(|(finish, _, gpu)| (finish, gpu))
    }

    // Filing.

    /// Files what was left unfiled: before anybody looks where copies are.
    fn file_all(&mut self) {
        if let Some(gpu) = self.unfiled.take() {
            self.refile(gpu);
        }
    }

    /// Files a GPU's copies under its present state.
    fn refile(&mut self, gpu: u32) {
        let Some(on) = self.gpus[gpu as usize].as_mut() else { return };
        let state = on.state();
        let before = core::mem::replace(&mut on.filed, state);
        if state == before {
            return;
        }
        for copy in on.copies.iter().filter(|copy| copy.is_cached()) {
            let copies = &mut self.models[copy.model as usize].copies;
            copies.remove(&(before.0, on.kind, before.1, gpu));
            copies.insert((state.0, on.kind, state.1, gpu));
        }
    }

    fn file_copy(&mut self, gpu: u32, copy: ModelCopy) {
        let on = self.g_mut(gpu);
        let key = (on.filed.0, on.kind, on.filed.1, gpu);
        on.copies.push(copy);
        self.models[copy.model as usize].copies.insert(key);
        self.tenants.get(copy.owner).memory += copy.bytes;
    }

    fn unfile_copy(&mut self, gpu: u32, copy: &ModelCopy) {
        let on = self.g(gpu);
        let key = (on.filed.0, on.kind, on.filed.1, gpu);
        self.models[copy.model as usize].copies.remove(&key);
        self.tenants.get(copy.owner).memory -= copy.bytes;
    }

    /// Takes a request out of the global queue because it was given to a GPU.
    fn leave(&mut self, slot: u32) {
        let kinds = self.m(self.queue.get(slot).model).kinds;
        self.queue.leave(slot, kinds, true);
    }

    /// Puts a request that was given to a GPU back into the global queue.
    fn requeue(&mut self, slot: u32) {
        let request = *self.queue.get(slot);
        if request.place == Place::Placed {
            self.tenants.get(request.tenant).waiting += 1;
            if request.drop_at < Timestamp::MAX {
                self.drops.insert((request.drop_at, slot));
            }
        }
        let kinds = self.m(request.model).kinds;
        self.queue.enter(slot, kinds);
    }

    /// One more attempt of a request has failed: it is queued again, or rejected.
    fn retry(&mut self, slot: u32, actions: &mut Vec<RequestAction>) {
        let request = self.queue.get_mut(slot);
        request.attempts += 1;
        if request.attempts >= self.config.max_attempts {
            self.reject(slot, RejectReason::AttemptsExhausted, actions);
        } else {
            self.requeue(slot);
        }
    }

    /// Ends a request that is not completed. One that is placed has been taken off its GPU by the caller.
    fn reject(&mut self, slot: u32, reason: RejectReason, actions: &mut Vec<RequestAction>) {
        let request = *self.queue.get(slot);
        match request.place {
            Place::Held => {
                let held = &mut self.tenants.get(request.tenant).held;
                held.retain(|&other| other != slot);
            }
            Place::Queued => {
                let kinds = self.m(request.model).kinds;
                self.queue.leave(slot, kinds, false);
            }
            Place::Local => {
                let on = self.g_mut(request.gpu);
                on.local.retain(|&other| other != slot);
                on.local_ns -= request.local_ns;
                if let Some(copy) = on.cached_mut(request.model) {
                    copy.users -= 1;
                }
                self.refile(request.gpu);
            }
            Place::Placed => {}
        }
        if request.place != Place::Placed {
            self.drops.remove(&(request.drop_at, slot));
            self.tenants.get(request.tenant).waiting -= 1;
            self.tenants.serve(request.tenant, request.charged_ns);
        }
        self.stats.rejected += 1;
        actions.push(RequestAction::Reject { request: request.id, reason });
        self.gone(slot, 0);
    }

    /// Forgets a request that took `took_ns` of GPU time.
    fn gone(&mut self, slot: u32, took_ns: u64) {
        let request = *self.queue.get(slot);
        if request.place != Place::Held {
            self.tenants.settle(request.tenant, request.charged_ns, took_ns);
            self.tenants.get(request.tenant).inside -= 1;
        }
        self.tenants.stir(request.tenant);
        self.stirred.push(request.tenant);
        self.queue.forget(slot);
    }

    // What a GPU does.

    fn not_idle(&mut self, gpu: u32) {
        let on = self.g(gpu);
        let (kind, key) = (usize::from(on.kind), (on.dispatches, gpu));
        self.idle[kind].remove(&key);
    }

    /// The request is the GPU's from now on.
    fn own(&mut self, gpu: u32, slot: u32) {
        let request = self.queue.get_mut(slot);
        request.place = Place::Placed;
        request.gpu = gpu;
        let request = *request;
        self.drops.remove(&(request.drop_at, slot));
        self.tenants.get(request.tenant).waiting -= 1;
        self.tenants.serve(request.tenant, request.charged_ns);
        self.tenants.stir(request.tenant);
    }

    /// Runs requests of one model, which is resident; they are the GPU's already.
    fn run(&mut self, gpu: u32, first: u32, actions: &mut Vec<RequestAction>) {
        let model = self.queue.get(first).model;
        let mut batch = core::mem::take(&mut self.g_mut(gpu).running);
        batch.clear();
        batch.push(first);
        while batch.len() < usize::from(self.config.max_batch) {
            let front = self.g(gpu).local.front().copied();
            let next = match front.filter(|slot| self.queue.get(*slot).model == model) {
                Some(slot) => {
                    let local_ns = self.queue.get(slot).local_ns;
                    let on = self.g_mut(gpu);
                    on.local.pop_front();
                    on.local_ns -= local_ns;
                    slot
                }
                None => {
                    let slot = self.queue.of_model(model).head;
                    if slot == NONE {
                        break;
                    }
                    self.leave(slot);
                    self.stats.hits += 1;
                    if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
                        copy.users += 1;
                    }
                    slot
                }
            };
            self.own(gpu, next);
            batch.push(next);
        }
        let count = u32::try_from(batch.len()).unwrap_or(u32::MAX);
        let took = self.batch_ns(self.infer_ns(model, self.g(gpu).kind), count);
        let (now, more) = (self.now, self.config.max_batch);
        let load_us = self.load_ns(model, self.g(gpu)) / 1_000;
        self.uses += 1;
        let uses = self.uses;
        for (index, &slot) in batch.iter().enumerate() {
            actions.push(RequestAction::Dispatch {
                gpu: GpuId(gpu),
                request: self.queue.get(slot).id,
                model: ModelId(model),
                batch_more: u16::try_from(batch.len() - 1 - index).unwrap_or(more),
            });
        }
        let on = self.g_mut(gpu);
        let clock = on.clock;
        if let Some(copy) = on.cached_mut(model) {
            copy.used = uses;
            copy.uses += u64::from(count);
            let density = load_us.saturating_mul(copy.uses) / (copy.bytes >> 20).max(1);
            copy.priority = clock.saturating_add(density);
        }
        on.running = batch;
        on.batch = count;
        on.dispatches += u64::from(count);
        on.until = now.saturating_add(Duration::from_nanos(took));
        on.phase = Phase::Running;
        self.refile(gpu);
    }

    /// A waiting request runs on an idle GPU that has its model.
    fn hit(&mut self, gpu: u32, slot: u32, actions: &mut Vec<RequestAction>) {
        self.leave(slot);
        self.not_idle(gpu);
        self.stats.hits += 1;
        self.own(gpu, slot);
        let model = self.queue.get(slot).model;
        if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
            copy.users += 1;
        }
        self.run(gpu, slot, actions);
    }

    /// A waiting request moves to the local queue of a busy GPU that has its model.
    fn move_to_local(&mut self, gpu: u32, slot: u32) {
        self.leave(slot);
        self.stats.hits += 1;
        self.stats.moved_to_local += 1;
        let model = self.queue.get(slot).model;
        let kind = self.g(gpu).kind;
        let caution = self.config.deviations;
        let local_ns = self.m(model).on(kind).map_or(0, |costs| costs.infer.cautious(caution));
        let request = self.queue.get_mut(slot);
        request.place = Place::Local;
        request.gpu = gpu;
        request.local_ns = local_ns;
        let on = self.g_mut(gpu);
        on.local.push_back(slot);
        on.local_ns = on.local_ns.saturating_add(local_ns);
        if let Some(copy) = on.cached_mut(model) {
            copy.users += 1;
        }
        self.refile(gpu);
    }

    /// What has to go before the model of a request can be loaded on an idle GPU; `None` if that does not suffice.
    fn room(&self, gpu: u32, slot: u32) -> Option<Room> {
        let request = self.queue.get(slot);
        let on = self.g(gpu);
        let bytes = self.m(request.model).bytes;
        let missing = bytes.saturating_sub(on.free + on.evicting);
        let victims = match self.config.cache {
            CachePolicy::Lru => cache::victims(&on.copies, &on.pins, missing, |copy| copy.used),
            CachePolicy::Gdsf => {
                cache::victims(&on.copies, &on.pins, missing, |copy| (copy.priority, copy.used))
            }
            CachePolicy::CostAware => cache::victims(&on.copies, &on.pins, missing, |copy| {
                let density = self.worth(copy.model, on).saturating_mul(1024) / (copy.bytes >> 20).max(1);
                (density, copy.used)
            }),
        }?;
        let worth = victims.iter().map(|model| self.worth(model.0, on)).fold(0, u64::saturating_add);
        let surrendered = self.surrender(gpu, request.tenant, bytes, &victims)?;
        Some(Room { victims, surrendered, worth })
    }

    /// Copies on any GPU that a tenant has to give up so that `bytes` more keep within its share of the memory.
    fn surrender(&self, gpu: u32, tenant: u32, bytes: u64, victims: &[ModelId]) -> Option<Vec<(u32, u32)>> {
        let Some(known) = self.tenants.peek(tenant) else { return Some(Vec::new()) };
        if known.limits.memory >= BasisPoints::WHOLE {
            return Some(Vec::new());
        }
        let leaving: u64 = self
            .g(gpu)
            .copies
            .iter()
            .filter(|copy| copy.is_cached() && copy.owner == tenant && victims.contains(&ModelId(copy.model)))
            .map(|copy| copy.bytes)
            .sum();
        let share = memory_share(known.limits.memory, self.memory);
        let mut over = (known.memory - leaving + bytes).saturating_sub(share);
        let mut own: Vec<(u64, u32, u32, u64)> = Vec::new();
        for (index, on) in (0..).zip(&self.gpus) {
            let Some(on) = on else { continue };
            for copy in &on.copies {
                let free =
                    copy.state == CopyState::Resident && copy.users == 0 && !on.pins.contains(&copy.model);
                let goes_anyway = index == gpu && victims.contains(&ModelId(copy.model));
                if copy.owner == tenant && free && !goes_anyway {
                    own.push((copy.used, index, copy.model, copy.bytes));
                }
            }
        }
        own.sort_unstable();
        let mut given = Vec::new();
        for (_, index, model, bytes) in own {
            if over == 0 {
                break;
            }
            over = over.saturating_sub(bytes);
            given.push((index, model));
        }
        (over == 0).then_some(given)
    }

    fn evict(&mut self, gpu: u32, model: u32, actions: &mut Vec<RequestAction>) {
        let Some(copy) = self.g(gpu).cached(model).copied() else { return };
        self.unfile_copy(gpu, &copy);
        let on = self.g_mut(gpu);
        on.clock = on.clock.max(copy.priority);
        on.evicting += copy.bytes;
        if let Some(copy) = on.cached_mut(model) {
            copy.state = CopyState::Evicting;
        }
        self.stats.evictions += 1;
        actions.push(RequestAction::Evict { gpu: GpuId(gpu), model: ModelId(model) });
    }

    /// A request that is the GPU's waits for its model to be loaded there.
    fn miss(&mut self, gpu: u32, slot: u32, room: &Room, actions: &mut Vec<RequestAction>) {
        let Request { model, tenant, .. } = *self.queue.get(slot);
        self.stats.misses += 1;
        self.stats.false_misses += u64::from(!self.m(model).copies.is_empty());
        for &(other, model) in &room.surrendered {
            self.evict(other, model, actions);
        }
        for victim in &room.victims {
            self.evict(gpu, victim.0, actions);
        }
        let bytes = self.m(model).bytes;
        let (load, infer) = (self.load_ns(model, self.g(gpu)), self.infer_ns(model, self.g(gpu).kind));
        let evicting = if self.g(gpu).evicting > 0 { self.config.eviction.as_nanos() } else { 0 };
        let until = self
            .now
            .saturating_add(Duration::from_nanos(load.saturating_add(infer).saturating_add(evicting)));
        self.uses += 1;
        let used = self.uses;
        let on = self.g_mut(gpu);
        on.running.clear();
        on.running.push(slot);
        on.batch = 1;
        on.until = until;
        on.phase = Phase::MakingRoom { model };
        self.refile(gpu);
        let state = CopyState::Loading;
        self.file_copy(
            gpu,
            ModelCopy { model, bytes, state, users: 1, used, uses: 0, priority: 0, owner: tenant },
        );
        self.load_if_room(gpu, actions);
    }

    /// Orders the load for which room was made, if there is room now.
    fn load_if_room(&mut self, gpu: u32, actions: &mut Vec<RequestAction>) {
        let on = self.g(gpu);
        let Phase::MakingRoom { model } = on.phase else { return };
        let bytes = self.m(model).bytes;
        // A copy of this very model that is still on its way out would take the new one with it.
        let leaving = on.copies.iter().any(|copy| copy.model == model && copy.state == CopyState::Evicting);
        if on.free < bytes || leaving {
            return;
        }
        let (from, node) = (self.tier(model, on), on.node);
        let on = self.g_mut(gpu);
        on.free -= bytes;
        on.phase = Phase::Loading { model, from };
        let keep_on_host = self.host_copy(node, model, actions);
        actions.push(RequestAction::Load { gpu: GpuId(gpu), model: ModelId(model), from, keep_on_host });
    }

    /// Notes a use of the node's copy of the model; true if a new one is to be kept there.
    fn host_copy(&mut self, node: u32, model: u32, actions: &mut Vec<RequestAction>) -> bool {
        let bytes = self.m(model).bytes;
        let Some(host) = self.hosts.get_mut(&node) else { return false };
        if let Some((used, _)) = host.models.get_mut(&model) {
            *used = self.uses;
            return false;
        }
        let capacity = self.config.host_memory.0;
        if bytes > capacity {
            return false;
        }
        while host.used + bytes > capacity {
            let oldest =
                host.models.iter().filter(|(_, (_, ready))| *ready).min_by_key(|(_, (used, _))| *used);
            let Some((&oldest, _)) = oldest else { return false };
            host.models.remove(&oldest);
            host.used -= self.models[oldest as usize].bytes;
            actions.push(RequestAction::DropHost { node: NodeId(node), model: ModelId(oldest) });
        }
        host.used += bytes;
        host.models.insert(model, (self.uses, false));
        true
    }

    /// The GPU has nothing on it: it goes on with its local queue, or is idle.
    fn go_on(&mut self, gpu: u32, actions: &mut Vec<RequestAction>) {
        let now = self.now;
        let on = self.g_mut(gpu);
        on.running.clear();
        on.until = now;
        while let Some(slot) = self.g_mut(gpu).local.pop_front() {
            let Request { model, local_ns, .. } = *self.queue.get(slot);
            let on = self.g_mut(gpu);
            on.local_ns -= local_ns;
            if on.cached(model).is_some_and(|copy| copy.state == CopyState::Resident) {
                self.own(gpu, slot);
                self.run(gpu, slot, actions);
                return;
            }
            // The model is gone: somebody else may be better placed by now.
            self.requeue(slot);
        }
        let on = self.g_mut(gpu);
        on.phase = Phase::Idle;
        let (kind, key) = (usize::from(on.kind), (on.dispatches, gpu));
        self.idle[kind].insert(key);
        if self.unfiled != Some(gpu) {
            self.file_all();
            self.unfiled = Some(gpu);
        }
    }

    /// Forgets a copy that turned out not to be there; those waiting for it here are queued again.
    fn lose_copy(&mut self, gpu: u32, model: u32) {
        let Some(copy) = self.g_mut(gpu).remove(model, false) else { return };
        self.unfile_copy(gpu, &copy);
        let on = self.g_mut(gpu);
        on.free += copy.bytes;
        let local = core::mem::take(&mut on.local);
        for slot in local {
            let request = *self.queue.get(slot);
            if request.model == model {
                self.g_mut(gpu).local_ns -= request.local_ns;
                self.requeue(slot);
            } else {
                self.g_mut(gpu).local.push_back(slot);
            }
        }
    }

    // Decisions.

    /// Gives work to idle GPUs, fewest dispatches first.
    fn schedule(&mut self, actions: &mut Vec<RequestAction>) {
        let mut after = Bound::Unbounded;
        while self.queue.len() > 0 {
            let next = (0u8..)
                .zip(&self.idle)
                .filter(|(kind, idle)| !idle.is_empty() && self.work_for(*kind))
                .filter_map(|(_, idle)| idle.range((after, Bound::Unbounded)).next().copied())
                .min();
            let Some(key) = next else { break };
            self.serve(key.1, actions);
            after = Bound::Excluded(key);
        }
    }

    fn work_for(&self, kind: u8) -> bool {
        self.queue.classes.iter().any(|class| class.serves(kind))
    }

    fn any_idle(&self) -> bool {
        self.idle.iter().any(|idle| !idle.is_empty())
    }

    /// One turn of an idle GPU.
    fn serve(&mut self, gpu: u32, actions: &mut Vec<RequestAction>) {
        if self.config.policy != Policy::LoadBalance {
            loop {
                let hit = self.earliest_hit(gpu);
                match self.place_due(gpu, hit, actions) {
                    Outcome::Here => return,
                    Outcome::Elsewhere => {}
                    Outcome::Stays => {
                        let Some((_, slot)) = hit else { break };
                        return self.hit(gpu, slot, actions);
                    }
                }
            }
        }
        // Nothing waits for a copy on this GPU (or nobody cares): in order of arrival until one lands here.
        let mut walk = Walk::new(&self.queue, self.g(gpu).kind);
        while let Some((cursor, slot)) = walk.first(&self.queue) {
            // The request may be gone, and others of its model with it; the one before it is not.
            let before = self.queue.prev(By::Class, slot);
            match (self.place_one(gpu, slot, actions), before) {
                (Outcome::Here, _) => return,
                (Outcome::Stays, _) => walk.go_on(&self.queue, cursor, slot),
                (_, NONE) => walk.restart(&self.queue, cursor),
                _ => walk.go_on(&self.queue, cursor, before),
            }
        }
    }

    /// The earliest waiting request whose model has a copy on the GPU.
    fn earliest_hit(&self, gpu: u32) -> Option<(u64, u32)> {
        let cached = self.g(gpu).copies.iter().filter(|copy| copy.is_cached());
        let waiting = cached.map(|copy| self.queue.of_model(copy.model).head).filter(|slot| *slot != NONE);
        waiting.map(|slot| (self.queue.get(slot).number, slot)).min()
    }

    /// Places the first request that is due, comes before the hit, and can be placed.
    fn place_due(&mut self, gpu: u32, hit: Option<(u64, u32)>, actions: &mut Vec<RequestAction>) -> Outcome {
        let kind = self.g(gpu).kind;
        let is_next = |this: &Self, slot: u32| {
            let request = this.queue.get(slot);
            let old = this.now.saturating_since(request.arrived) >= this.config.skip_age;
            hit.is_none_or(|(number, _)| request.number < number) && (old || this.queue.is_due(slot))
        };
        // Mostly there is none.
        if !self.queue.first_of(kind).is_some_and(|slot| is_next(self, slot)) {
            return Outcome::Stays;
        }
        let mut walk = Walk::new(&self.queue, kind);
        while let Some((cursor, slot)) = walk.first(&self.queue).filter(|(_, slot)| is_next(self, *slot)) {
            match self.place_one(gpu, slot, actions) {
                Outcome::Stays => walk.go_on(&self.queue, cursor, slot),
                done => return done,
            }
        }
        Outcome::Stays
    }

    /// Places a waiting request with an idle GPU at hand (Algorithm 2).
    fn place_one(&mut self, gpu: u32, slot: u32, actions: &mut Vec<RequestAction>) -> Outcome {
        let model = self.queue.get(slot).model;
        if self.g(gpu).cached(model).is_some() {
            self.hit(gpu, slot, actions);
            return Outcome::Here;
        }
        self.file_all();
        if self.config.policy != Policy::LoadBalance
            && let Some(other) = self.idle_copy(model)
        {
            self.hit(other, slot, actions);
            return Outcome::Elsewhere;
        }
        let (target, room) = match self.config.policy {
            Policy::EvictCostAware { .. } => self.cheapest(gpu, slot),
            _ => (gpu, self.room(gpu, slot)),
        };
        if self.config.policy != Policy::LoadBalance
            && let Some((finish, other)) = self.busy_copy(model)
        {
            let on = self.g(target);
            let mut here = self.load_ns(model, on).saturating_add(self.infer_ns(model, on.kind));
            if let Some(room) = &room {
                if on.evicting > 0 || !room.victims.is_empty() {
                    here = here.saturating_add(self.config.eviction.as_nanos());
                }
                if matches!(self.config.policy, Policy::EvictCostAware { .. }) {
                    here = here.saturating_add(room.worth);
                }
            }
            if finish - self.now.as_nanos() < here {
                self.move_to_local(other, slot);
                return Outcome::Elsewhere;
            }
        }
        let Some(room) = room else { return Outcome::Stays };
        self.leave(slot);
        self.not_idle(target);
        self.own(target, slot);
        self.miss(target, slot, &room, actions);
        if target == gpu { Outcome::Here } else { Outcome::Elsewhere }
    }

    /// The idle GPU on which a miss costs least: its load, its run and what its victims are worth.
    fn cheapest(&self, gpu: u32, slot: u32) -> (u32, Option<Room>) {
        let model = self.queue.get(slot).model;
        let price = |gpu: u32, room: &Room| {
            let on = self.g(gpu);
            self.load_ns(model, on).saturating_add(self.infer_ns(model, on.kind)).saturating_add(room.worth)
        };
        let room = self.room(gpu, slot);
        let mut best = (room.as_ref().map_or(u64::MAX, |room| price(gpu, room)), gpu, room);
        let kinds = self.m(model).kinds;
        let idle = (0..).zip(&self.idle).filter(|(kind, _)| kinds >> kind & 1 == 1);
        for &(_, other) in idle.flat_map(|(_, idle)| idle.iter().take(CANDIDATES)) {
            if other == gpu {
                continue;
            }
            if let Some(room) = self.room(other, slot) {
                let price = price(other, &room);
                if price < best.0 {
                    best = (price, other, Some(room));
                }
            }
        }
        (best.1, best.2)
    }

    /// Lets held requests in, as far as their tenants' gates are open.
    fn admit(&mut self, tenant: u32, waive_fairness: bool) {
        loop {
            let (queue, models) = (&self.queue, &self.models);
            let cost = |slot: u32| {
                let costs = &models[queue.get(slot).model as usize].costs;
                costs.iter().map(|costs| costs.infer.mean()).min().unwrap_or(0)
            };
            let admitted = self.tenants.admit(tenant, self.now, self.live, cost, waive_fairness);
            let Some((slot, cost)) = admitted else { break };
            self.queue.get_mut(slot).charged_ns = cost;
            let kinds = self.m(self.queue.get(slot).model).kinds;
            self.queue.enter(slot, kinds);
            if waive_fairness {
                break;
            }
        }
        self.tenants.stir(tenant);
    }

    /// Opens gates and gives out work until neither changes anything.
    fn settle_down(&mut self, actions: &mut Vec<RequestAction>) {
        let mut stirred = core::mem::take(&mut self.stirred);
        stirred.sort_unstable();
        stirred.dedup();
        for &tenant in &stirred {
            self.admit(tenant, false);
        }
        stirred.clear();
        self.stirred = stirred;
        self.schedule(actions);
        self.file_all();
        while let Some(tenant) = self.tenants.next_ahead(self.any_idle()) {
            let waive = self.any_idle();
            let before = self.queue.len();
            self.admit(tenant, waive);
            self.schedule(actions);
            self.file_all();
            if waive && self.queue.len() > before {
                // It cannot be served now, so neither can what would follow it.
                break;
            }
        }
    }

    // Events.

    /// The kinds of GPU that can serve a model: profiled, and not known to be too small.
    fn kinds_of(&self, model: &Model) -> u64 {
        let fits = |kind: u8| match self.kinds.get(usize::from(kind)) {
            Some(&Some(memory)) => model.bytes <= memory,
            _ => true,
        };
        model.costs.iter().filter(|costs| fits(costs.kind)).fold(0, |kinds, costs| kinds | 1 << costs.kind)
    }

    fn reclass(&mut self, model: u32, actions: &mut Vec<RequestAction>) {
        let kinds = self.kinds_of(self.m(model));
        let before = core::mem::replace(&mut self.models[model as usize].kinds, kinds);
        if kinds == before {
            return;
        }
        self.queue.reclass(model, before, kinds);
        if kinds == 0 {
            let held = self.tenants.all().iter().flat_map(|tenant| &tenant.held).copied();
            let mut lost: Vec<u32> = held.filter(|slot| self.queue.get(*slot).model == model).collect();
            let mut slot = self.queue.of_model(model).head;
            while slot != NONE {
                lost.push(slot);
                slot = self.queue.next(By::Model, slot);
            }
            for slot in lost {
                self.reject(slot, RejectReason::ModelTooLarge, actions);
            }
        }
    }

    fn arrived(
        &mut self,
        id: RequestId,
        model: ModelId,
        tenant: TenantId,
        deadline: Option<Timestamp>,
        actions: &mut Vec<RequestAction>,
    ) {
        let now = self.now;
        self.models[model.index()].asked = true;
        self.models[model.index()].recent.count(now);
        let known = self.m(model.0);
        let fastest = known.costs.iter().map(|costs| costs.infer.mean()).min().unwrap_or(0);
        let mut request = Request::new(id, model.0, tenant.0, now);
        if let Some(longest) = self.config.max_wait {
            request.drop_at = now.saturating_add(longest);
        }
        if let Some(deadline) = deadline {
            // It can start as late as this, no later.
            let latest = deadline.saturating_sub(Duration::from_nanos(fastest - 1));
            if latest <= request.drop_at {
                request.drop_at = latest;
                request.has_deadline = true;
            }
        }
        let (bytes, profiled, kinds) = (known.bytes, !known.costs.is_empty(), known.kinds);
        let (total, waits) = (self.memory, self.queue.known());
        let t = self.tenants.get(tenant.0);
        let limited = t.limits.memory < BasisPoints::WHOLE && total > 0;
        let reason = if !profiled {
            Some(RejectReason::NotProfiled)
        } else if kinds == 0 {
            Some(RejectReason::ModelTooLarge)
        } else if limited && bytes > memory_share(t.limits.memory, total) {
            Some(RejectReason::TenantMemory)
        } else if t.waiting >= t.limits.max_waiting {
            Some(RejectReason::TenantQueueFull)
        } else if waits >= self.config.max_requests as usize {
            Some(RejectReason::QueueFull)
        } else if request.drop_at <= now {
            Some(if request.has_deadline {
                RejectReason::DeadlineMissed
            } else {
                RejectReason::WaitedTooLong
            })
        } else {
            None
        };
        if let Some(reason) = reason {
            self.stats.rejected += 1;
            actions.push(RequestAction::Reject { request: id, reason });
            return;
        }
        t.waiting += 1;
        let slot = self.queue.add(request);
        self.tenants.get(tenant.0).held.push_back(slot);
        if request.drop_at < Timestamp::MAX {
            self.drops.insert((request.drop_at, slot));
        }
        self.tenants.stir(tenant.0);
        self.stirred.push(tenant.0);
    }

    fn gpu_joined(
        &mut self,
        gpu: GpuId,
        kind: GpuKind,
        node: NodeId,
        memory: Bytes,
        actions: &mut Vec<RequestAction>,
    ) {
        if self.gpus.len() <= gpu.index() {
            self.gpus.resize_with(gpu.index() + 1, || None);
        }
        let index = usize::from(kind.0);
        if self.kinds.len() <= index {
            self.kinds.resize(index + 1, None);
            self.idle.resize_with(index + 1, BTreeSet::new);
        }
        self.gpus[gpu.index()] = Some(Gpu {
            kind: kind.0,
            node: node.0,
            memory: memory.0,
            free: memory.0,
            evicting: 0,
            copies: Vec::new(),
            pins: Vec::new(),
            phase: Phase::Idle,
            running: Vec::new(),
            batch: 0,
            local: VecDeque::new(),
            local_ns: 0,
            until: self.now,
            dispatches: 0,
            clock: 0,
            filed: (false, 0),
        });
        self.idle[index].insert((0, gpu.0));
        self.live += 1;
        self.memory = self.memory.saturating_add(memory.0);
        self.hosts.entry(node.0).or_default().gpus += 1;
        if self.kinds[index].is_none() {
            self.kinds[index] = Some(memory.0);
            for model in 0..u32::try_from(self.models.len()).unwrap_or(u32::MAX) {
                self.reclass(model, actions);
            }
        }
        // More GPUs, more of every tenant's share of them.
        self.stirred.extend(&self.tenants.out_of_time);
    }

    fn gpu_lost(&mut self, gpu: GpuId, actions: &mut Vec<RequestAction>) {
        if self.g(gpu.0).phase == Phase::Idle {
            self.not_idle(gpu.0);
        }
        for copy in self.g(gpu.0).copies.clone() {
            if copy.is_cached() {
                self.unfile_copy(gpu.0, &copy);
            }
        }
        let Some(lost) = self.gpus[gpu.index()].take() else { return };
        self.live -= 1;
        self.memory -= lost.memory;
        if let Some(host) = self.hosts.get_mut(&lost.node) {
            host.gpus -= 1;
            if host.gpus == 0 {
                self.hosts.remove(&lost.node);
            } else if let Phase::Loading { model, from: Tier::Disk } = lost.phase {
                self.host_copy_done(lost.node, model, false, actions);
            }
        }
        for slot in lost.local {
            self.requeue(slot);
        }
        for slot in lost.running {
            self.retry(slot, actions);
        }
    }

    /// The load that was to fill the node's copy has ended.
    fn host_copy_done(&mut self, node: u32, model: u32, whole: bool, actions: &mut Vec<RequestAction>) {
        let bytes = self.m(model).bytes;
        let Some(host) = self.hosts.get_mut(&node) else { return };
        match host.models.get_mut(&model) {
            Some((_, ready)) if whole => *ready = true,
            Some((_, false)) => {
                host.models.remove(&model);
                host.used -= bytes;
                actions.push(RequestAction::DropHost { node: NodeId(node), model: ModelId(model) });
            }
            _ => {}
        }
    }

    fn loaded(&mut self, gpu: u32, model: u32, took: Duration, actions: &mut Vec<RequestAction>) {
        let on = self.g(gpu);
        let Phase::Loading { from, .. } = on.phase else { return };
        let (kind, node) = (on.kind, on.node);
        if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
            copy.state = CopyState::Resident;
        }
        self.host_copy_done(node, model, true, actions);
        if self.config.learn
            && let Some(costs) = self.models[model as usize].costs.iter_mut().find(|costs| costs.kind == kind)
        {
            match from {
                Tier::Host => costs.host.observe(took),
                _ => costs.disk.observe(took),
            }
        }
        let Some(&slot) = self.g(gpu).running.first() else { return };
        self.tenants.settle(self.queue.get(slot).tenant, 0, took.as_nanos());
        self.run(gpu, slot, actions);
    }

    fn load_failed(&mut self, gpu: u32, model: u32, actions: &mut Vec<RequestAction>) {
        let on = self.g_mut(gpu);
        let (node, from) = (on.node, on.phase);
        let running = core::mem::take(&mut on.running);
        if let Phase::Loading { from: Tier::Disk, .. } = from {
            self.host_copy_done(node, model, false, actions);
        }
        self.lose_copy(gpu, model);
        for slot in running {
            self.retry(slot, actions);
        }
        self.go_on(gpu, actions);
    }

    /// A hit turned out to be none: load the model here, for the same request.
    fn not_resident(&mut self, gpu: u32, slot: u32, actions: &mut Vec<RequestAction>) {
        let model = self.queue.get(slot).model;
        let mut running = core::mem::take(&mut self.g_mut(gpu).running);
        running.retain(|&other| other != slot);
        // The rest of a batch is not there either; it may be served elsewhere.
        for other in running {
            if let Some(copy) = self.g_mut(gpu).cached_mut(model) {
                copy.users -= 1;
            }
            self.requeue(other);
        }
        let request = self.queue.get_mut(slot);
        request.attempts += 1;
        if request.attempts >= self.config.max_attempts {
            self.lose_copy(gpu, model);
            self.reject(slot, RejectReason::AttemptsExhausted, actions);
            self.go_on(gpu, actions);
            return;
        }
        let bytes = self.m(model).bytes;
        let (load, infer) = (self.load_ns(model, self.g(gpu)), self.infer_ns(model, self.g(gpu).kind));
        let now = self.now;
        self.stats.misses += 1;
        let on = self.g_mut(gpu);
        on.running = vec![slot];
        on.batch = 1;
        on.free += bytes;
        on.until = now.saturating_add(Duration::from_nanos(load.saturating_add(infer)));
        on.phase = Phase::MakingRoom { model };
        if let Some(copy) = on.cached_mut(model) {
            copy.state = CopyState::Loading;
        }
        self.refile(gpu);
        self.load_if_room(gpu, actions);
    }

    fn completed(&mut self, gpu: u32, slot: u32, took: Duration, actions: &mut Vec<RequestAction>) {
        let model = self.queue.get(slot).model;
        let marginal = u64::from(self.config.batch_marginal.get());
        let learn = self.config.learn;
        let on = self.g_mut(gpu);
        let (kind, batch) = (on.kind, u64::from(on.batch.max(1)));
        on.running.retain(|&other| other != slot);
        if let Some(copy) = on.cached_mut(model) {
            copy.users -= 1;
        }
        let done = on.running.is_empty();
        if done
            && learn
            && let Some(costs) = self.models[model as usize].costs.iter_mut().find(|costs| costs.kind == kind)
        {
            // The time of one, from the time of the batch.
            let one = u128::from(took.as_nanos()) * 10_000 / u128::from(10_000 + marginal * (batch - 1));
            costs.infer.observe(Duration::from_nanos(u64::try_from(one).unwrap_or(u64::MAX)));
        }
        self.stats.completed += 1;
        self.gone(slot, took.as_nanos() / batch);
        if done {
            self.go_on(gpu, actions);
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
                self.reclass(model.0, actions);
            }
            RequestEvent::ModelProfiled { model, kind, profile } => {
                let costs = Costs {
                    kind: kind.0,
                    disk: Estimate::new(profile.load_disk),
                    host: Estimate::new(profile.load_host),
                    infer: Estimate::new(profile.infer),
                };
                let known = &mut self.models[model.index()].costs;
                known.retain(|old| old.kind != kind.0);
                known.push(costs);
                known.sort_unstable_by_key(|costs| costs.kind);
                self.reclass(model.0, actions);
            }
            RequestEvent::ModelPinned { model, gpu, pinned } => {
                let pins = &mut self.g_mut(gpu.0).pins;
                pins.retain(|&other| other != model.0);
                if pinned {
                    pins.push(model.0);
                }
            }
            RequestEvent::TenantLimited { tenant, limits } => {
                self.tenants.get(tenant.0).limits = limits;
                self.stirred.push(tenant.0);
            }
            RequestEvent::Arrived { request, model, tenant, deadline } => {
                self.arrived(request, model, tenant, deadline, actions);
            }
            RequestEvent::Cancelled { request } => {
                if let Some(slot) = self.queue.find(request) {
                    self.reject(slot, RejectReason::Cancelled, actions);
                }
            }
            RequestEvent::Evicted { gpu, model } => {
                if let Some(copy) = self.g_mut(gpu.0).remove(model.0, true) {
                    let on = self.g_mut(gpu.0);
                    on.evicting -= copy.bytes;
                    on.free += copy.bytes;
                    self.load_if_room(gpu.0, actions);
                }
            }
            RequestEvent::Loaded { gpu, model, took } => self.loaded(gpu.0, model.0, took, actions),
            RequestEvent::LoadFailed { gpu, model } => self.load_failed(gpu.0, model.0, actions),
            RequestEvent::Dropped { gpu, model } => {
                // One in use is found out, and loaded again, when it is needed. The report may be old, so the model may be
                // there after all: it is ended for certain before its memory is given to another.
                let unused = |copy: &ModelCopy| copy.state == CopyState::Resident && copy.users == 0;
                if self.g(gpu.0).cached(model.0).is_some_and(unused) {
                    self.evict(gpu.0, model.0, actions);
                }
            }
            RequestEvent::NotResident { gpu, request } => {
                if let Some(slot) = self.queue.find(request) {
                    self.not_resident(gpu.0, slot, actions);
                }
            }
            RequestEvent::Completed { gpu, request, took } => {
                if let Some(slot) = self.queue.find(request) {
                    self.completed(gpu.0, slot, took, actions);
                }
            }
            _ => {}
        }
    }

    /// What must hold between two events; checked after each in debug builds. Costs O(everything).
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
        let held: usize = self.tenants.all().iter().map(|tenant| tenant.held.len()).sum();
        assert_eq!(placed + held + self.queue.len() as usize, self.queue.known());
        for (index, tenant) in (0u32..).zip(self.tenants.all()) {
            assert_eq!(tenant.memory, memory.get(&index).copied().unwrap_or(0), "memory of tenant{index}");
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
        self.settle_down(actions);
        #[cfg(debug_assertions)]
        self.invariants();
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let drop = self.drops.first().map(|&(at, _)| at);
        let window = (!self.tenants.out_of_time.is_empty()).then(|| self.tenants.window_end(self.now));
        drop.into_iter().chain(window).min()
    }
}

impl RequestScheduler for LocalityScheduler {
    fn place(&self, request: RequestId) -> Option<RequestPlace> {
        self.queue.find(request).map(|slot| self.queue.get(slot).status())
    }

    fn waiting(&self) -> usize {
        let held: usize = self.tenants.all().iter().map(|tenant| tenant.held.len()).sum();
        held + self.queue.len() as usize
    }

    fn stats(&self) -> RequestStats {
        self.stats
    }

    fn gpu(&self, gpu: GpuId) -> Option<GpuRecord> {
        let on = self.live_gpu(gpu).ok()?;
        let mut copies: Vec<(u64, u32)> =
            on.copies.iter().filter(|copy| copy.is_cached()).map(|copy| (copy.used, copy.model)).collect();
        copies.sort_unstable();
        let models = copies.into_iter().map(|(_, model)| ModelId(model)).collect();
        Some(GpuRecord { busy: on.phase != Phase::Idle, free_at: on.free_at(), models })
    }
}
