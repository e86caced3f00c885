//! A cluster of GPUs under a request scheduler: evictions, loads and runs with their times and faults.
//!
//! # Problem
//! The simulation shows that a [`RequestScheduler`] keeps its promises when GPUs disappear, loads fail and processes die without notice.
//! It includes facts that the scheduler knows and a function of a [`world`](crate::world) does not: costs by kind of GPU, models that do
//! not run on a kind, a tenant and a deadline of each request. A world measures the worth of a scheduler.
//!
//! # How it works
//! The cluster carries orders out like a node: an eviction, a load and a run take the profiled time (with jitter, if set), one
//! after the other per GPU. One seed gives all faults. During the run, [`simulate`] checks that
//! - the physical content of a GPU never exceeds its memory;
//! - after a load, no more GPUs have the model than its limit, apart from GPUs that were told to evict it;
//! - a GPU has one order at a time, and a dispatch finds its model there unless a fault removed it;
//! - each request is completed once or rejected once, and nothing is left at the end.

use crate::{EventQueue, Rng};
use gshare_core::{Bytes, Duration, GpuId, GpuKind, ModelId, NodeId, RequestId, TenantId, Timestamp};
use gshare_sched::request::{
    GpuRecord, ModelProfile, RejectReason, RequestAction, RequestEvent, RequestScheduler, Tier,
};
use std::collections::{BTreeMap, BTreeSet};

/// A GPU of the cluster.
#[derive(Debug, Clone, Copy)]
pub struct GpuSpec {
    /// The kind of the GPU.
    pub kind: GpuKind,
    /// The node of the GPU.
    pub node: NodeId,
    /// The memory for models.
    pub memory: Bytes,
}

/// A model, and its costs by kind of GPU.
#[derive(Debug, Clone)]
pub struct ModelSpec {
    /// The size of the model.
    pub memory: Bytes,
    /// The model's costs on each kind able to run it.
    pub profiles: Vec<(GpuKind, ModelProfile)>,
}

/// A request to come, named by its number in the list.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// The time of its arrival.
    pub at: Timestamp,
    /// The number of its model in the list of models.
    pub model: u32,
    /// The tenant that pays for it.
    pub tenant: TenantId,
    /// The latest time of its completion.
    pub deadline: Option<Timestamp>,
}

/// A limit of a model's copies from its time on.
#[derive(Debug, Clone, Copy)]
pub struct CopyLimit {
    /// The time of the limit's announcement.
    pub at: Timestamp,
    /// The number of the model in the list of models.
    pub model: u32,
    /// The most copies.
    pub copies: u32,
}

/// The faults of a run. None by default.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// The mean time between losses of a GPU.
    pub loss_every: Option<Duration>,
    /// The longest time until a lost GPU is back.
    pub back_within: Duration,
    /// The part of failing loads, in per cent.
    pub load_fails: u64,
    /// The part of runs after which the model's process dies unnoticed, in per cent.
    pub process_dies: u64,
    /// The largest deviation of times, in per cent.
    pub jitter: u64,
    /// The time of an eviction.
    pub eviction: Duration,
}

/// A cluster, its requests, and its faults.
#[derive(Debug, Clone, Default)]
pub struct Workload {
    /// The GPUs, each named by its number in the list.
    pub gpus: Vec<GpuSpec>,
    /// The models, likewise.
    pub models: Vec<ModelSpec>,
    /// The requests, likewise.
    pub arrivals: Vec<Arrival>,
    /// The limits of models' copies, and their changes.
    pub limits: Vec<CopyLimit>,
    /// The faults of the run.
    pub faults: Faults,
    /// The time of each further request of a batch, as a share of the first request's time; basis points.
    pub batch_marginal_bp: u64,
}

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The request was served.
    Served {
        /// The time from its arrival to its (last) dispatch.
        waited: Duration,
        /// The time from its arrival to its completion.
        latency: Duration,
    },
    /// The request was rejected.
    Rejected {
        /// The reason of the rejection.
        reason: RejectReason,
        /// The time from its arrival to the rejection.
        after: Duration,
    },
}

/// The result of a run.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The fates of all requests, in their order.
    pub fates: Vec<Fate>,
    /// The number of events given to the scheduler.
    pub events: u64,
}

/// A random cluster of up to 6 GPUs of two kinds, up to 12 models, 200 requests, and faults of every sort.
pub fn chaos(seed: u64) -> Workload {
    let mut rng = Rng::new(seed);
    let memory = [Bytes::from_gib(rng.between(4, 12)), Bytes::from_gib(rng.between(4, 12))];
    let mut gpus = Vec::new();
    for index in 0..rng.between(1, 6) {
        let second = rng.percent(30);
        let node = NodeId::new(u32::try_from(index / 2).unwrap_or(0));
        gpus.push(GpuSpec {
            kind: GpuKind::new(u8::from(second)),
            node,
            memory: memory[usize::from(second)],
        });
    }
    let mut models = Vec::new();
    for _ in 0..rng.between(1, 12) {
        let memory = Bytes::from_mib(rng.between(200, 5_000));
        let mut profiles = Vec::new();
        for kind in 0..2 {
            // Every model runs on the kind of the first GPU.
            if kind == gpus[0].kind.number() || rng.percent(70) {
                let load_disk = Duration::from_millis(rng.between(500, 5_000));
                let load_host = Duration::from_millis(rng.between(50, 500));
                let infer = Duration::from_millis(rng.between(50, 2_000));
                profiles.push((GpuKind::new(kind), ModelProfile { load_disk, load_host, infer }));
            }
        }
        models.push(ModelSpec { memory, profiles });
    }
    let mut at = Timestamp::ZERO;
    let mut arrivals = Vec::new();
    let rush = rng.between(50, 800);
    for _ in 0..200 {
        at = at + Duration::from_millis(rng.below(rush * 2));
        let model = u32::try_from(rng.below(models.len() as u64)).unwrap_or(0);
        let tenant = TenantId::new(u32::try_from(rng.below(3)).unwrap_or(0));
        let deadline = rng.percent(20).then(|| at + Duration::from_millis(rng.between(1, 30_000)));
        arrivals.push(Arrival { at, model, tenant, deadline });
    }
    let faults = Faults {
        loss_every: rng.percent(60).then(|| Duration::from_secs(rng.between(2, 60))),
        back_within: Duration::from_secs(rng.between(1, 20)),
        load_fails: if rng.percent(50) { rng.below(30) } else { 0 },
        process_dies: if rng.percent(50) { rng.below(20) } else { 0 },
        jitter: rng.below(60),
        eviction: Duration::from_millis(rng.below(500)),
    };
    let mut limits = Vec::new();
    for model in 0..u32::try_from(models.len()).unwrap_or(0) {
        for after in 0..rng.below(3) {
            // The first limit holds from the start, the second from some later time on.
            let at = Timestamp::from_millis(after * rng.below(rush * 400));
            limits.push(CopyLimit { at, model, copies: u32::try_from(rng.between(1, 3)).unwrap_or(1) });
        }
    }
    Workload { gpus, models, arrivals, limits, faults, batch_marginal_bp: 5_000 }
}

/// A look at the cluster every second: the true state of its GPUs, for a report to the scheduler or not.
pub type Watch<'a> =
    dyn FnMut(Timestamp, &dyn RequestScheduler, &[(GpuId, GpuRecord)]) -> Vec<RequestEvent> + 'a;

#[derive(Debug)]
enum Happens {
    Arrives(usize),
    Limited(CopyLimit),
    Evicted { gpu: usize, life: u64, model: u32 },
    Loaded { gpu: usize, life: u64, model: u32, took: Duration, fails: bool },
    Ran { gpu: usize, life: u64, requests: Vec<RequestId>, took: Duration },
    Lost,
    Back { gpu: usize },
    Watched,
    Deadline,
}

#[derive(Debug, Default)]
struct Gpu {
    here: bool,
    life: u64,
    /// The bytes of each model on the GPU or on its way.
    models: BTreeMap<u32, u64>,
    /// Models of processes which died unnoticed; their memory is free.
    dead: Vec<u32>,
    /// Models that the GPU was told to evict.
    leaving: BTreeSet<u32>,
    busy: bool,
}

impl Gpu {
    /// Whether the model is there or on its way, to stay.
    fn has(&self, model: u32) -> bool {
        self.models.contains_key(&model) && !self.leaving.contains(&model)
    }
}

struct Cluster<'a> {
    scheduler: &'a mut dyn RequestScheduler,
    work: &'a Workload,
    rng: Rng,
    queue: EventQueue<Happens>,
    state: Vec<Gpu>,
    fates: Vec<Option<Fate>>,
    dispatched: Vec<Timestamp>,
    outcome: Outcome,
    actions: Vec<RequestAction>,
    /// The most copies of each model with a limit.
    most: BTreeMap<u32, u32>,
    left: usize,
}

/// Runs arrivals through a scheduler until all of them are served or rejected.
///
/// The seed `seed` gives faults and jitter, and `watch` is called once a second.
///
/// # Errors
/// The promise broken by the scheduler, with its time.
pub fn simulate(
    scheduler: &mut dyn RequestScheduler,
    work: &Workload,
    seed: u64,
    mut watch: Option<&mut Watch<'_>>,
) -> Result<Outcome, String> {
    let mut cluster = Cluster {
        scheduler,
        work,
        rng: Rng::new(seed),
        queue: EventQueue::new(),
        state: work.gpus.iter().map(|_| Gpu::default()).collect(),
        fates: vec![None; work.arrivals.len()],
        dispatched: vec![Timestamp::ZERO; work.arrivals.len()],
        outcome: Outcome::default(),
        actions: Vec::new(),
        most: BTreeMap::new(),
        left: work.arrivals.len(),
    };
    for (index, model) in work.models.iter().enumerate() {
        let id = ModelId::new(u32::try_from(index).map_err(|_| "too many models")?);
        cluster.tell(Timestamp::ZERO, RequestEvent::ModelAdded { model: id, memory: model.memory })?;
        for &(kind, profile) in &model.profiles {
            cluster.tell(Timestamp::ZERO, RequestEvent::ModelProfiled { model: id, kind, profile })?;
        }
    }
    for gpu in 0..work.gpus.len() {
        cluster.join(Timestamp::ZERO, gpu)?;
    }
    for (index, arrival) in work.arrivals.iter().enumerate() {
        cluster.queue.schedule(arrival.at, Happens::Arrives(index));
    }
    for &limit in &work.limits {
        cluster.queue.schedule(limit.at, Happens::Limited(limit));
    }
    if work.faults.loss_every.is_some() {
        cluster.plan_loss();
    }
    if watch.is_some() {
        cluster.queue.schedule(Timestamp::from_millis(1_000), Happens::Watched);
    }
    let mut deadline = None;
    while cluster.left > 0 {
        let Some((now, event)) = cluster.queue.pop() else {
            return Err(format!("{} requests are left and nothing will ever happen", cluster.left));
        };
        if let Happens::Watched = event {
            let truth = cluster.truth();
            let events =
                watch.as_mut().map(|watch| watch(now, &*cluster.scheduler, &truth)).unwrap_or_default();
            for event in events {
                if let RequestEvent::GpuLost { gpu } = event {
                    // A GPU that others believe lost is restarted.
                    cluster.lose(now, gpu.index())?;
                } else {
                    cluster.tell(now, event)?;
                }
            }
            cluster.queue.schedule(now + Duration::from_secs(1), Happens::Watched);
        } else {
            cluster.happens(now, event)?;
        }
        let next = cluster.scheduler.next_deadline();
        if next != deadline {
            deadline = next;
            if let Some(at) = next {
                cluster.queue.schedule(at, Happens::Deadline);
            }
        }
    }
    cluster.finish()
}

impl Cluster<'_> {
    fn tell(&mut self, now: Timestamp, event: RequestEvent) -> Result<(), String> {
        self.outcome.events += 1;
        let mut actions = core::mem::take(&mut self.actions);
        self.scheduler
            .handle(now, event, &mut actions)
            .map_err(|error| format!("{now}: {event:?}: {error}"))?;
        let mut batch: Vec<RequestId> = Vec::new();
        for action in actions.drain(..) {
            self.carry_out(now, action, &mut batch)?;
        }
        self.actions = actions;
        Ok(())
    }

    fn index(request: RequestId) -> usize {
        usize::try_from(request.number()).unwrap_or(usize::MAX)
    }

    fn takes(&mut self, profiled: Duration) -> Duration {
        let jitter = self.work.faults.jitter;
        if jitter == 0 {
            return profiled;
        }
        let percent = self.rng.between(100 - jitter.min(99), 100 + jitter);
        Duration::from_nanos((profiled.as_nanos() / 100 * percent).max(1))
    }

    fn profile(&self, gpu: usize, model: u32) -> Result<ModelProfile, String> {
        let profiles = &self.work.models[model as usize].profiles;
        let kind = self.work.gpus[gpu].kind;
        let found = profiles.iter().find(|(other, _)| *other == kind);
        found.map(|(_, profile)| *profile).ok_or_else(|| format!("model{model} cannot run on gpu{gpu}"))
    }

    fn carry_out(
        &mut self,
        now: Timestamp,
        action: RequestAction,
        batch: &mut Vec<RequestId>,
    ) -> Result<(), String> {
        match action {
            RequestAction::Evict { gpu, model } => {
                let (gpu, model) = (gpu.index(), model.number());
                let took = self.takes(self.work.faults.eviction);
                self.state[gpu].leaving.insert(model);
                let life = self.state[gpu].life;
                self.queue.schedule(now + took, Happens::Evicted { gpu, life, model });
            }
            RequestAction::Load { gpu, model, from, .. } => {
                let (gpu, model) = (gpu.index(), model.number());
                let profile = self.profile(gpu, model)?;
                self.busy(now, gpu)?;
                let bytes = self.work.models[model as usize].memory.0;
                self.state[gpu].dead.retain(|dead| *dead != model);
                self.state[gpu].models.insert(model, bytes);
                let taken: u64 = self.state[gpu].models.values().sum();
                if taken > self.work.gpus[gpu].memory.0 {
                    return Err(format!("{now}: gpu{gpu} is out of memory: {taken} bytes"));
                }
                let copies = self.state.iter().filter(|gpu| gpu.has(model)).count();
                if self.most.get(&model).is_some_and(|most| copies > *most as usize) {
                    return Err(format!(
                        "{now}: model{model} is loaded on {copies} GPUs, of {:?}",
                        self.most[&model]
                    ));
                }
                let profiled = if from == Tier::Host { profile.load_host } else { profile.load_disk };
                let took = self.takes(profiled);
                let fails = self.rng.percent(self.work.faults.load_fails);
                let life = self.state[gpu].life;
                self.queue.schedule(now + took, Happens::Loaded { gpu, life, model, took, fails });
            }
            RequestAction::Dispatch { gpu, request, model, batch_more } => {
                let (gpu, index) = (gpu.index(), Self::index(request));
                if self.fates[index].is_some() {
                    return Err(format!("{now}: {request} is dispatched, but it is done"));
                }
                self.dispatched[index] = now;
                batch.push(request);
                if batch_more > 0 {
                    return Ok(());
                }
                let requests = core::mem::take(batch);
                self.busy(now, gpu)?;
                let there = self.state[gpu].models.contains_key(&model.number());
                let infer = self.profile(gpu, model.number())?.infer;
                let one = self.takes(infer).as_nanos();
                let more = u64::try_from(requests.len()).unwrap_or(u64::MAX) - 1;
                let took = Duration::from_nanos(if there {
                    one + one / 10_000 * self.work.batch_marginal_bp * more
                } else {
                    0
                });
                if !there && !self.state[gpu].dead.contains(&model.number()) {
                    return Err(format!(
                        "{now}: {request} is dispatched to gpu{gpu}, where its model never was"
                    ));
                }
                let life = self.state[gpu].life;
                self.queue.schedule(now + took, Happens::Ran { gpu, life, requests, took });
            }
            RequestAction::Reject { request, reason } => {
                let index = Self::index(request);
                let after = now.saturating_since(self.work.arrivals[index].at);
                self.done(now, index, Fate::Rejected { reason, after })?;
            }
            _ => {}
        }
        Ok(())
    }

    fn busy(&mut self, now: Timestamp, gpu: usize) -> Result<(), String> {
        if !self.state[gpu].here || core::mem::replace(&mut self.state[gpu].busy, true) {
            return Err(format!("{now}: gpu{gpu} is told to do two things, or is not here"));
        }
        Ok(())
    }

    fn done(&mut self, now: Timestamp, index: usize, fate: Fate) -> Result<(), String> {
        if self.fates[index].replace(fate).is_some() {
            return Err(format!("{now}: request{index} ended twice"));
        }
        self.left -= 1;
        Ok(())
    }

    fn happens(&mut self, now: Timestamp, event: Happens) -> Result<(), String> {
        match event {
            Happens::Arrives(index) => {
                let Arrival { model, tenant, deadline, .. } = self.work.arrivals[index];
                let request = RequestId::new(index as u64);
                self.tell(
                    now,
                    RequestEvent::Arrived { request, model: ModelId::new(model), tenant, deadline },
                )
            }
            Happens::Limited(CopyLimit { model, copies, .. }) => {
                self.most.insert(model, copies);
                self.tell(now, RequestEvent::ModelLimited { model: ModelId::new(model), copies })
            }
            Happens::Evicted { gpu, life, model } if self.state[gpu].life == life => {
                self.state[gpu].models.remove(&model);
                self.state[gpu].leaving.remove(&model);
                self.tell(now, RequestEvent::Evicted { gpu: id(gpu), model: ModelId::new(model) })
            }
            Happens::Loaded { gpu, life, model, took, fails } if self.state[gpu].life == life => {
                self.state[gpu].busy = false;
                let (gpu_id, model_id) = (id(gpu), ModelId::new(model));
                if fails {
                    self.state[gpu].models.remove(&model);
                    return self.tell(now, RequestEvent::LoadFailed { gpu: gpu_id, model: model_id });
                }
                self.tell(now, RequestEvent::Loaded { gpu: gpu_id, model: model_id, took })
            }
            Happens::Ran { gpu, life, requests, took } if self.state[gpu].life == life => {
                self.state[gpu].busy = false;
                let model = self.work.arrivals[Self::index(requests[0])].model;
                if !self.state[gpu].models.contains_key(&model) {
                    return self.tell(now, RequestEvent::NotResident { gpu: id(gpu), request: requests[0] });
                }
                if self.rng.percent(self.work.faults.process_dies) {
                    self.state[gpu].models.remove(&model);
                    self.state[gpu].dead.push(model);
                }
                for request in requests {
                    let index = Self::index(request);
                    let arrived = self.work.arrivals[index].at;
                    let waited = self.dispatched[index].saturating_since(arrived);
                    self.done(now, index, Fate::Served { waited, latency: now.saturating_since(arrived) })?;
                    self.tell(now, RequestEvent::Completed { gpu: id(gpu), request, took })?;
                }
                Ok(())
            }
            Happens::Lost => {
                let here: Vec<usize> = (0..self.state.len()).filter(|gpu| self.state[*gpu].here).collect();
                if let Some(&gpu) = self.rng.pick(&here) {
                    self.lose(now, gpu)?;
                }
                self.plan_loss();
                Ok(())
            }
            Happens::Back { gpu } => self.join(now, gpu),
            Happens::Deadline if self.scheduler.next_deadline().is_some_and(|at| at <= now) => {
                self.tell(now, RequestEvent::DeadlineReached)
            }
            _ => Ok(()),
        }
    }

    fn join(&mut self, now: Timestamp, gpu: usize) -> Result<(), String> {
        let GpuSpec { kind, node, memory } = self.work.gpus[gpu];
        let life = self.state[gpu].life + 1;
        self.state[gpu] = Gpu { here: true, life, ..Gpu::default() };
        self.tell(now, RequestEvent::GpuJoined { gpu: id(gpu), kind, node, memory })
    }

    fn lose(&mut self, now: Timestamp, gpu: usize) -> Result<(), String> {
        if !self.state[gpu].here {
            return Ok(());
        }
        let life = self.state[gpu].life + 1;
        self.state[gpu] = Gpu { life, ..Gpu::default() };
        let back = self.rng.duration(
            Duration::from_nanos(1),
            self.work.faults.back_within.saturating_add(Duration::from_nanos(1)),
        );
        self.queue.schedule(now + back, Happens::Back { gpu });
        self.tell(now, RequestEvent::GpuLost { gpu: id(gpu) })
    }

    fn plan_loss(&mut self) {
        if let Some(every) = self.work.faults.loss_every {
            let wait = self.rng.duration(Duration::from_nanos(1), every.saturating_mul(2));
            self.queue.schedule(self.queue.now() + wait, Happens::Lost);
        }
    }

    /// The true state of each present GPU.
    fn truth(&self) -> Vec<(GpuId, GpuRecord)> {
        let here = self.state.iter().enumerate().filter(|(_, gpu)| gpu.here);
        here.map(|(index, gpu)| {
            let models = gpu.models.keys().copied().map(ModelId::new).collect();
            (id(index), GpuRecord { busy: gpu.busy, free_at: self.queue.now(), models })
        })
        .collect()
    }

    fn finish(mut self) -> Result<Outcome, String> {
        if self.scheduler.waiting() > 0 {
            return Err("all requests ended, but the scheduler has some that wait".to_owned());
        }
        self.outcome.fates = self.fates.into_iter().flatten().collect();
        Ok(self.outcome)
    }
}

fn id(gpu: usize) -> GpuId {
    GpuId::new(u32::try_from(gpu).unwrap_or(u32::MAX))
}
