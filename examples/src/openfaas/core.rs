//! The decisions of a provider, all of them the engines': placement, replicas, and who serves a request. Told the time,
//! it starts no process itself: what is to be started goes out as [`Launch`]es.

use super::api::{ApiError, FunctionDeployment, Plan};
use axum::http::StatusCode;
use gshare_core::pack::{Demand, GpuSpec, Packer};
use gshare_core::profile::{ProfileTable, RequestRate};
use gshare_core::request::{
    GpuKind, ModelProfile, NodeId, RejectReason, RequestAction, RequestEvent, RequestId,
    RequestScheduler as _, TenantId,
};
use gshare_core::scale::{FunctionScale, HorizontalAction, HorizontalEvent, HorizontalScaler, InstanceId};
use gshare_core::{Bytes, Duration, Engine, FunctionId, GpuId, ModelId, PlacementId, Timestamp};
use gshare_runner::manager::HookedProcess;
use gshare_sched::pack::{MaxRects, MaxRectsConfig};
use gshare_sched::request::{LocalityScheduler, Policy, SchedulerConfig};
use gshare_sched::scale::{HeuristicHorizontal, HeuristicHorizontalConfig};
use std::collections::{BTreeMap, VecDeque};
use tokio::sync::mpsc::UnboundedSender;

/// The one model of a function's request scheduler.
const MODEL: ModelId = ModelId(0);
/// Attempts of a request, the most there are: each is a replica that was lost before the request reached it.
const ATTEMPTS: u8 = u8::MAX;
/// How often load is reported.
const TICK: Duration = Duration::from_secs(1);
/// The same while requests wait for every replica: a queue that grows for a whole tick is late for most of an SLO.
const HURRY: Duration = Duration::from_millis(100);
/// Over which requests are counted then: some of them even at a low rate, and a fraction of a tick.
const GLANCE: Duration = Duration::from_millis(250);
/// Time for which no replica is started after one that died while it started, or found no room.
const RETRY: Duration = Duration::from_secs(5);

/// A replica to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Its name.
    pub instance: InstanceId,
    /// What it runs.
    pub deployment: FunctionDeployment,
    /// What that amounts to.
    pub plan: Plan,
    /// Its GPU, if it has a share of one.
    pub gpu: Option<GpuId>,
}

/// What becomes of a request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// A replica is free for it.
    Go {
        /// The instance that is free.
        instance: InstanceId,
        /// Where it listens.
        port: u16,
    },
    /// It will not be served.
    No(RejectReason),
}

/// One request at a time on one replica.
#[derive(Debug)]
struct Slot {
    instance: InstanceId,
    request: Option<RequestId>,
}

#[derive(Debug)]
struct Waiter {
    turn: UnboundedSender<Turn>,
    slot: Option<GpuId>,
    /// Whether the replica has it: from then on it is not tried again.
    reached: bool,
}

#[derive(Debug)]
struct Function {
    /// Changes with each deployment, so that replicas of an earlier one are known by it.
    id: FunctionId,
    deployment: FunctionDeployment,
    plan: Plan,
    created_ms: u64,
    replicas: Option<u32>,
    requests: LocalityScheduler,
    slots: BTreeMap<GpuId, Slot>,
    waiters: BTreeMap<RequestId, Waiter>,
    next_request: u64,
    /// Since the last tick's report of load.
    arrivals: u64,
    /// When those of the last [`GLANCE`] came.
    recent: VecDeque<Timestamp>,
    reported: Timestamp,
    invocations: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Starting,
    Ready,
    Draining,
    /// To be killed, or killed and not gone yet.
    Doomed,
}

#[derive(Debug)]
struct Instance {
    function: String,
    generation: FunctionId,
    placement: Option<PlacementId>,
    stage: Stage,
    port: u16,
    process: Option<HookedProcess>,
}

/// What a function is doing.
#[derive(Debug, Clone)]
pub struct View {
    /// As deployed.
    pub deployment: FunctionDeployment,
    /// When, in ms since 1970.
    pub created_ms: u64,
    /// Requests so far.
    pub invocations: u64,
    /// Replicas that are starting or ready.
    pub replicas: u64,
    /// Replicas that are ready.
    pub available: u64,
    /// Processes of its replicas.
    pub pids: Vec<u32>,
    /// Requests that wait for a replica.
    pub waiting: u64,
}

/// All functions and replicas, and the engines.
#[derive(Debug)]
pub struct Core {
    scaler: HeuristicHorizontal,
    packer: MaxRects,
    /// Most requests of a function that are here at once.
    queue: u32,
    patience: Duration,
    functions: BTreeMap<String, Function>,
    names: BTreeMap<FunctionId, String>,
    instances: BTreeMap<InstanceId, Instance>,
    next_function: u32,
    launches: std::sync::mpsc::Sender<Launch>,
    last: Timestamp,
    /// When there was no room last. Replicas that were asked for together are refused together, and that is said once.
    refused: Option<Timestamp>,
}

impl Core {
    /// No functions, and `gpus` empty GPUs of `memory` each.
    ///
    /// # Errors
    /// When a setting is out of its bounds.
    pub fn new(
        gpus: u32,
        memory: Bytes,
        queue: u32,
        patience: Duration,
        launches: std::sync::mpsc::Sender<Launch>,
    ) -> anyhow::Result<Self> {
        let mut packer = MaxRects::new(MaxRectsConfig::default());
        for gpu in 0..gpus {
            packer.add_gpu(GpuId(gpu), GpuSpec::new(memory))?;
        }
        let mut config = HeuristicHorizontalConfig::default();
        config.fleet.retry_after = RETRY;
        // Reports are taken half a tick apart.
        config.fleet.tick = HURRY.saturating_mul(2);
        // Ids are never used twice.
        config.fleet.max_functions = 1 << 24;
        let scaler = HeuristicHorizontal::new(config)?;
        let core = Self {
            scaler,
            packer,
            queue,
            patience,
            functions: BTreeMap::new(),
            names: BTreeMap::new(),
            instances: BTreeMap::new(),
            next_function: 0,
            launches,
            last: Timestamp::ZERO,
            refused: None,
        };
        // So that a bad setting is found now and not with the first function.
        core.scheduler()?;
        Ok(core)
    }

    fn scheduler(&self) -> anyhow::Result<LocalityScheduler> {
        let mut config = SchedulerConfig::paper(Policy::LoadBalance);
        config.max_attempts = ATTEMPTS;
        config.max_wait = Some(self.patience);
        config.max_requests = self.queue;
        (config.max_models, config.max_tenants, config.learn) = (1, 1, false);
        Ok(LocalityScheduler::new(config)?)
    }

    /// Deploys a function, or another version of one: replicas of the old one serve until one of the new one does, and
    /// requests that wait go to the new one.
    ///
    /// # Errors
    /// When an engine refuses; nothing changed then.
    pub fn deploy(
        &mut self,
        now: Timestamp,
        deployment: FunctionDeployment,
        plan: Plan,
        created_ms: u64,
        replicas: Option<u32>,
    ) -> Result<(), ApiError> {
        let now = self.tick_of(now);
        let name = deployment.service.clone();
        let id = FunctionId(self.next_function);
        let profile = ProfileTable::sparse(vec![plan.point])
            .map_err(|error| ApiError::bad(format!("annotations: {error}")))?;
        let (min_instances, max_instances) = bounds(&plan, replicas);
        let spec = FunctionScale { profile, max_p95: None, min_instances, max_instances };
        let refused = |error: &dyn std::fmt::Display| ApiError::bad(error.to_string());
        let mut function = match self.functions.remove(&name) {
            Some(function) => function,
            None => {
                let mut requests = self.scheduler().map_err(|error| refused(&error))?;
                let quick = ModelProfile {
                    load_disk: Duration::ZERO,
                    load_host: Duration::ZERO,
                    infer: Duration::from_millis(1),
                };
                let known = [
                    RequestEvent::ModelAdded { model: MODEL, memory: Bytes(1) },
                    RequestEvent::ModelProfiled { model: MODEL, kind: GpuKind(0), profile: quick },
                ];
                for event in known {
                    requests.handle(now, event, &mut Vec::new()).map_err(|error| refused(&error))?;
                }
                Function {
                    id,
                    deployment: deployment.clone(),
                    plan: plan.clone(),
                    created_ms,
                    replicas,
                    requests,
                    slots: BTreeMap::new(),
                    waiters: BTreeMap::new(),
                    next_request: 0,
                    arrivals: 0,
                    recent: VecDeque::new(),
                    reported: now,
                    invocations: 0,
                }
            }
        };
        let old = std::mem::replace(&mut function.id, id);
        (function.deployment, function.plan, function.replicas) = (deployment, plan, replicas);
        function.reported = now;
        self.functions.insert(name.clone(), function);
        self.names.insert(id, name);
        self.next_function += 1;
        if old != id {
            self.names.remove(&old);
            self.scale(now, HorizontalEvent::FunctionRemoved { function: old });
        }
        self.scale(now, HorizontalEvent::FunctionAdded { function: id, spec });
        self.invariants();
        Ok(())
    }

    /// Ends a function: its replicas are killed, what waits for them is refused.
    pub fn remove(&mut self, now: Timestamp, name: &str) -> bool {
        let now = self.tick_of(now);
        let Some(function) = self.functions.remove(name) else { return false };
        self.names.remove(&function.id);
        for waiter in function.waiters.into_values() {
            let _ = waiter.turn.send(Turn::No(RejectReason::Cancelled));
        }
        self.scale(now, HorizontalEvent::FunctionRemoved { function: function.id });
        let all: Vec<_> =
            self.instances.iter().filter(|(_, i)| i.function == name).map(|(id, _)| *id).collect();
        for instance in all {
            self.kill(instance);
        }
        true
    }

    /// Asks for so many replicas. One whose load scales it keeps at least so many; 0 lets the next request wake it up.
    ///
    /// # Errors
    /// When there is no such function, or more are asked for than its most.
    pub fn set_replicas(&mut self, now: Timestamp, name: &str, replicas: u32) -> Result<(), ApiError> {
        let now = self.tick_of(now);
        let function = self.functions.get_mut(name).ok_or_else(|| ApiError::unknown_function(name))?;
        let most = if function.plan.scales { function.plan.bounds.1 } else { 4096 };
        if replicas > most {
            return Err(ApiError::bad(format!("replicas: {replicas}: need at most {most}")));
        }
        function.replicas = Some(replicas);
        let (min_instances, max_instances) = bounds(&function.plan, function.replicas);
        let function = function.id;
        self.scale(now, HorizontalEvent::BoundsChanged { function, min_instances, max_instances });
        if replicas == 0 && !self.instances.is_empty() {
            let mine =
                |i: &Instance| i.generation == function && matches!(i.stage, Stage::Starting | Stage::Ready);
            let mine: Vec<_> = self.instances.iter().filter(|(_, i)| mine(i)).map(|(id, _)| *id).collect();
            // The scaler would let them go when no load has come for some ticks; here somebody asked for it.
            for instance in mine {
                self.scale(now, HorizontalEvent::InstanceGone { instance });
                self.drain(now, instance);
            }
        }
        self.invariants();
        Ok(())
    }

    /// A new request: its turn comes over `turn`.
    ///
    /// # Errors
    /// When there is no such function, or too many wait.
    pub fn arrive(
        &mut self,
        now: Timestamp,
        name: &str,
        turn: UnboundedSender<Turn>,
    ) -> Result<RequestId, ApiError> {
        let now = self.tick_of(now);
        let function = self.functions.get_mut(name).ok_or_else(|| ApiError::unknown_function(name))?;
        let request = RequestId(function.next_request);
        function.next_request += 1;
        function.arrivals += 1;
        function.recent.push_back(now);
        while function.recent.front().is_some_and(|at| now.saturating_since(*at) > GLANCE) {
            function.recent.pop_front();
        }
        function.invocations += 1;
        function.waiters.insert(request, Waiter { turn, slot: None, reached: false });
        let tenant = TenantId(0);
        let event = RequestEvent::Arrived { request, model: MODEL, tenant, deadline: None };
        let asleep = function.slots.is_empty();
        self.requests(now, name, &[event]);
        if asleep {
            // Nobody there: it need not wait for the next tick.
            self.report(now, name);
        } else {
            self.hurry(now, name);
        }
        self.invariants();
        Ok(request)
    }

    /// The replica has taken the request: it is not given to another one from here on. Not so if it was given to
    /// another one already.
    pub fn reached(&mut self, name: &str, request: RequestId, instance: InstanceId) -> bool {
        let Some(function) = self.functions.get_mut(name) else { return false };
        let Some(waiter) = function.waiters.get_mut(&request) else { return false };
        let slot = waiter.slot.and_then(|slot| function.slots.get(&slot));
        waiter.reached = slot.is_some_and(|slot| slot.instance == instance);
        waiter.reached
    }

    /// The replica took no connection: it is broken, and the request gets another one.
    pub fn unreachable(&mut self, now: Timestamp, instance: InstanceId) {
        let now = self.tick_of(now);
        self.kill(instance);
        self.lose_slots(now, instance);
    }

    /// The request is over, or whoever sent it has gone.
    pub fn end(&mut self, now: Timestamp, name: &str, request: RequestId) {
        let now = self.tick_of(now);
        let Some(function) = self.functions.get_mut(name) else { return };
        let Some(waiter) = function.waiters.remove(&request) else { return };
        let Some(gpu) = waiter.slot else {
            return self.requests(now, name, &[RequestEvent::Cancelled { request }]);
        };
        let Some(slot) = function.slots.get_mut(&gpu) else { return };
        slot.request = None;
        let instance = slot.instance;
        let done = RequestEvent::Completed { gpu, request, took: Duration::from_millis(1) };
        if self.instances.get(&instance).is_some_and(|instance| instance.stage == Stage::Ready) {
            return self.requests(now, name, &[done]);
        }
        // Its last one here.
        function.slots.remove(&gpu);
        let left = function.slots.values().any(|slot| slot.instance == instance);
        self.requests(now, name, &[done, RequestEvent::GpuLost { gpu }]);
        if !left {
            self.kill(instance);
        }
    }

    /// A replica's process runs, and will listen at `port`.
    pub fn started(&mut self, instance: InstanceId, process: HookedProcess, port: u16) {
        match self.instances.get_mut(&instance) {
            Some(known) => {
                if known.stage == Stage::Doomed {
                    process.kill();
                }
                (known.process, known.port) = (Some(process), port);
            }
            None => drop(process),
        }
    }

    /// A replica's process.
    pub fn pid(&self, instance: InstanceId) -> Option<u32> {
        self.instances.get(&instance)?.process.as_ref().map(HookedProcess::pid)
    }

    /// A replica listens.
    pub fn ready(&mut self, now: Timestamp, instance: InstanceId) {
        let now = self.tick_of(now);
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if known.stage != Stage::Starting {
            return;
        }
        known.stage = Stage::Ready;
        let (name, generation) = (known.function.clone(), known.generation);
        let Some(function) = self.functions.get_mut(&name) else { return };
        if function.id == generation {
            self.scale(now, HorizontalEvent::InstanceReady { instance });
        }
        let Some(function) = self.functions.get_mut(&name) else { return };
        for _ in 0..function.plan.concurrency {
            let free = (0..).map(GpuId).find(|gpu| !function.slots.contains_key(gpu));
            let Some(gpu) = free else { break };
            function.slots.insert(gpu, Slot { instance, request: None });
            let joined = RequestEvent::GpuJoined { gpu, kind: GpuKind(0), node: NodeId(0), memory: Bytes(1) };
            function.handle(now, &[joined], &self.instances);
        }
        if self.functions.get(&name).is_some_and(|function| function.id == generation) {
            self.drain_old(now, &name);
        }
    }

    /// Whether a replica's process has ended; then it is gone, and what it served has failed.
    pub fn has_ended(&mut self, now: Timestamp, instance: InstanceId) -> bool {
        let Some(known) = self.instances.get_mut(&instance) else { return true };
        let ended = known.process.as_mut().is_some_and(HookedProcess::has_ended);
        if ended {
            self.gone(now, instance);
        }
        ended
    }

    /// A replica is gone, or could not be started.
    pub fn gone(&mut self, now: Timestamp, instance: InstanceId) {
        let now = self.tick_of(now);
        self.lose_slots(now, instance);
        let Some(known) = self.instances.remove(&instance) else { return };
        if let Some(placement) = known.placement {
            // It was placed once, and is released once.
            let released = self.packer.release(placement);
            debug_assert!(released.is_ok(), "{released:?}");
        }
        let current = self.functions.get(&known.function).is_some_and(|f| f.id == known.generation);
        if current {
            let event = match known.stage {
                // So that one that dies as it starts is not started again at once.
                Stage::Starting => HorizontalEvent::StartRefused { instance },
                _ => HorizontalEvent::InstanceGone { instance },
            };
            self.scale(now, event);
        }
        self.invariants();
    }

    /// To be called once a tick: reports loads, and lets deadlines pass.
    pub fn tick(&mut self, now: Timestamp) {
        let now = self.tick_of(now);
        if self.scaler.next_deadline().is_some_and(|at| at <= now) {
            self.scale(now, HorizontalEvent::DeadlineReached);
        }
        let names: Vec<String> = self.functions.keys().cloned().collect();
        for name in names {
            self.report(now, &name);
            let due = |function: &Function| function.requests.next_deadline().is_some_and(|at| at <= now);
            if self.functions.get(&name).is_some_and(due) {
                self.requests(now, &name, &[RequestEvent::DeadlineReached]);
            }
        }
        self.invariants();
    }

    /// Length of a tick.
    pub const fn tick_length(&self) -> Duration {
        TICK
    }

    /// The functions, by name.
    pub fn views(&self) -> Vec<View> {
        self.functions.keys().filter_map(|name| self.view(name)).collect()
    }

    /// A function.
    pub fn view(&self, name: &str) -> Option<View> {
        let function = self.functions.get(name)?;
        let mine = || self.instances.values().filter(|instance| instance.function == name);
        let count = |stage| mine().filter(|instance| instance.stage == stage).count() as u64;
        Some(View {
            deployment: function.deployment.clone(),
            created_ms: function.created_ms,
            invocations: function.invocations,
            replicas: count(Stage::Starting) + count(Stage::Ready),
            available: count(Stage::Ready),
            pids: mine().filter_map(|instance| instance.process.as_ref()).map(HookedProcess::pid).collect(),
            waiting: function.waiters.values().filter(|waiter| waiter.slot.is_none()).count() as u64,
        })
    }

    /// Time does not go back for the engines, whichever thread came first.
    fn tick_of(&mut self, now: Timestamp) -> Timestamp {
        self.last = self.last.max(now);
        self.last
    }

    fn report(&mut self, now: Timestamp, name: &str) {
        let Some(function) = self.functions.get_mut(name) else { return };
        let passed = now.saturating_since(function.reported);
        // Requests that wait are load, too: a burst that came before the last tick has to be served.
        let waiting = function.waiters.values().filter(|waiter| waiter.slot.is_none()).count() as u64;
        let count = function.arrivals.max(waiting);
        let rate =
            count.saturating_mul(1_000_000_000_000) / passed.max(Duration::from_millis(500)).as_nanos();
        let event =
            HorizontalEvent::LoadReported { function: function.id, rate: RequestRate::from_milli(rate) };
        // Too early after another one: it is said with the next one.
        let mut actions = Vec::new();
        if self.scaler.handle(now, event, &mut actions).is_ok() {
            (function.arrivals, function.reported) = (0, now);
            self.carry_out(now, actions);
        }
    }

    /// Reports the load of the last moments if as many requests wait as can be served at once: another one would wait for
    /// a whole request. What waits is to be served within a second.
    fn hurry(&mut self, now: Timestamp, name: &str) {
        let Some(function) = self.functions.get(name) else { return };
        let waiting = function.requests.waiting();
        if waiting < function.slots.len() {
            return;
        }
        let rate = function.recent.len() as u64 * 1_000_000_000_000 / GLANCE.as_nanos();
        let rate = RequestRate::from_milli(rate.saturating_add(waiting as u64 * 1_000));
        let event = HorizontalEvent::LoadReported { function: function.id, rate };
        let mut actions = Vec::new();
        // Too early after another one: the next request says it.
        if self.scaler.handle(now, event, &mut actions).is_ok() {
            self.carry_out(now, actions);
        }
    }

    fn scale(&mut self, now: Timestamp, event: HorizontalEvent) {
        let mut actions = Vec::new();
        let handled = self.scaler.handle(now, event, &mut actions);
        // An instance that was stopped may be reported ready; nothing else is refused.
        if let Err(error) = handled {
            eprintln!("openfaas: scaler: {error}");
        }
        self.carry_out(now, actions);
    }

    fn carry_out(&mut self, now: Timestamp, actions: Vec<HorizontalAction>) {
        for action in actions {
            match action {
                HorizontalAction::Start { function, instance, .. } => self.start(now, function, instance),
                HorizontalAction::Drain { instance } => self.drain(now, instance),
                HorizontalAction::Stop { instance, .. } => self.kill(instance),
                _ => {}
            }
        }
    }

    fn start(&mut self, now: Timestamp, id: FunctionId, instance: InstanceId) {
        let Some(name) = self.names.get(&id).cloned() else { return };
        let Some(function) = self.functions.get(&name) else { return };
        let placed = function.plan.share.map(|share| {
            let demand = Demand::new(share.quota().request(), share.sm());
            self.packer.place(&demand.with_memory(share.memory().unwrap_or(Bytes::ZERO)))
        });
        let placement = match placed.transpose() {
            Ok(placed) => placed.map(|placed| placed.placement),
            Err(error) => {
                if self.refused.replace(now) != Some(now) {
                    eprintln!("openfaas: {name}: no room for a replica: {error}");
                }
                self.scale(now, HorizontalEvent::StartRefused { instance });
                // What an older version holds is room for the new one.
                return self.drain_old(now, &name);
            }
        };
        let gpu = placement.map(|placement| placement.gpu);
        let (deployment, plan) = (function.deployment.clone(), function.plan.clone());
        let stage = Stage::Starting;
        let placement = placement.map(|placement| placement.id);
        let known = Instance { function: name, generation: id, placement, stage, port: 0, process: None };
        self.instances.insert(instance, known);
        // Nobody listens only when the provider ends.
        let _ = self.launches.send(Launch { instance, deployment, plan, gpu });
    }

    /// Replicas of earlier versions get no more requests.
    fn drain_old(&mut self, now: Timestamp, name: &str) {
        let Some(id) = self.functions.get(name).map(|function| function.id) else { return };
        let old = self.instances.iter().filter(|(_, i)| i.function == name && i.generation != id);
        let old: Vec<_> = old.map(|(id, _)| *id).collect();
        for instance in old {
            self.drain(now, instance);
        }
    }

    /// No more requests for the replica; it is killed when it has none left.
    fn drain(&mut self, now: Timestamp, instance: InstanceId) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        match known.stage {
            Stage::Starting => return self.kill(instance),
            Stage::Ready => known.stage = Stage::Draining,
            Stage::Draining | Stage::Doomed => return,
        }
        let name = known.function.clone();
        let Some(function) = self.functions.get_mut(&name) else { return };
        let idle: Vec<GpuId> = function
            .slots
            .iter()
            .filter(|(_, slot)| slot.instance == instance && slot.request.is_none())
            .map(|(gpu, _)| *gpu)
            .collect();
        let lost: Vec<_> = idle.iter().map(|&gpu| RequestEvent::GpuLost { gpu }).collect();
        function.slots.retain(|gpu, _| !idle.contains(gpu));
        let busy = function.slots.values().any(|slot| slot.instance == instance);
        self.requests(now, &name, &lost);
        if !busy {
            self.kill(instance);
        }
    }

    fn kill(&mut self, instance: InstanceId) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        known.stage = Stage::Doomed;
        if let Some(process) = &known.process {
            process.kill();
        }
    }

    /// What it served has failed; what had not reached it gets another one.
    fn lose_slots(&mut self, now: Timestamp, instance: InstanceId) {
        let Some(name) = self.instances.get(&instance).map(|known| known.function.clone()) else { return };
        let Some(function) = self.functions.get_mut(&name) else { return };
        let mut events = Vec::new();
        let mine = function.slots.iter().filter(|(_, slot)| slot.instance == instance);
        let mine: Vec<(GpuId, Option<RequestId>)> = mine.map(|(gpu, slot)| (*gpu, slot.request)).collect();
        for (gpu, request) in mine {
            function.slots.remove(&gpu);
            if let Some(request) = request
                && let Some(waiter) = function.waiters.get_mut(&request)
            {
                waiter.slot = None;
                if waiter.reached {
                    function.waiters.remove(&request);
                    events.push(RequestEvent::Completed { gpu, request, took: Duration::from_millis(1) });
                }
            }
            events.push(RequestEvent::GpuLost { gpu });
        }
        self.requests(now, &name, &events);
    }

    /// Checks the books against the engines', in debug builds.
    fn invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let held = self.instances.values().filter(|instance| instance.placement.is_some()).count();
        let mut placed = 0;
        self.packer.placements(&mut |_| placed += 1);
        assert_eq!(placed, held, "a replica holds its rectangle until it is gone");
        for (name, function) in &self.functions {
            let mine = |stage| {
                let of = |i: &&Instance| i.generation == function.id && i.stage == stage;
                self.instances.values().filter(of).count()
            };
            let counts = self.scaler.instances(function.id).unwrap_or_default();
            assert!(
                mine(Stage::Ready) <= counts.ready as usize,
                "{name}: the scaler knows of all that are ready"
            );
            assert!(mine(Stage::Starting) <= counts.starting as usize, "{name}: and of all that start");
            let mut free = false;
            for (gpu, slot) in &function.slots {
                let home = self.instances.get(&slot.instance);
                let home = home.unwrap_or_else(|| panic!("{name}: {gpu}: a slot is on a replica"));
                assert_eq!(home.function, *name);
                match slot.request {
                    Some(request) => {
                        assert_eq!(
                            function.waiters.get(&request).map(|waiter| waiter.slot),
                            Some(Some(*gpu))
                        );
                    }
                    None => free |= home.stage == Stage::Ready,
                }
            }
            let waits = function.waiters.values().filter(|waiter| waiter.slot.is_none()).count();
            assert!(!free || waits == 0, "{name}: nobody waits while a replica has a free slot");
            assert_eq!(function.requests.waiting(), waits, "{name}: the request scheduler has all that wait");
            let busy = function.slots.values().filter(|slot| slot.request.is_some()).count();
            assert_eq!(function.waiters.len(), waits + busy, "{name}: a request waits, or is somewhere");
        }
    }

    fn requests(&mut self, now: Timestamp, name: &str, events: &[RequestEvent]) {
        if let Some(function) = self.functions.get_mut(name) {
            function.handle(now, events, &self.instances);
        }
    }
}

impl Function {
    /// Tells the request scheduler, and carries out what it orders. All events go first: an order for a slot that a
    /// later one takes away is given again for another.
    fn handle(
        &mut self,
        now: Timestamp,
        events: &[RequestEvent],
        instances: &BTreeMap<InstanceId, Instance>,
    ) {
        let mut orders = Vec::new();
        let mut todo = VecDeque::new();
        let mut tell = |requests: &mut LocalityScheduler, event, todo: &mut VecDeque<RequestAction>| {
            let told = requests.handle(now, event, &mut orders);
            debug_assert!(told.is_ok(), "{event:?}: {told:?}");
            todo.extend(orders.drain(..));
        };
        for &event in events {
            tell(&mut self.requests, event, &mut todo);
        }
        while let Some(order) = todo.pop_front() {
            match order {
                // The function is in the replica already.
                RequestAction::Load { gpu, model, .. } if self.slots.contains_key(&gpu) => {
                    let took = Duration::ZERO;
                    tell(&mut self.requests, RequestEvent::Loaded { gpu, model, took }, &mut todo);
                }
                RequestAction::Dispatch { gpu, request, .. } => {
                    let Some(slot) = self.slots.get_mut(&gpu) else { continue };
                    let Some(waiter) = self.waiters.get_mut(&request) else { continue };
                    let Some(known) = instances.get(&slot.instance) else { continue };
                    slot.request = Some(request);
                    waiter.slot = Some(gpu);
                    // Whoever waits may have gone; then it says so.
                    let _ = waiter.turn.send(Turn::Go { instance: slot.instance, port: known.port });
                }
                RequestAction::Reject { request, reason } => {
                    if let Some(waiter) = self.waiters.remove(&request) {
                        let _ = waiter.turn.send(Turn::No(reason));
                    }
                }
                _ => {}
            }
        }
    }
}

/// Fewest and most replicas, as deployed or as asked for since.
fn bounds(plan: &Plan, replicas: Option<u32>) -> (u32, u32) {
    match replicas {
        None => plan.bounds,
        Some(replicas) if plan.scales => (replicas.min(plan.bounds.1), plan.bounds.1),
        Some(replicas) => (replicas, replicas.max(1)),
    }
}

/// What a client is told of a request that was not served.
pub fn refusal(reason: RejectReason) -> ApiError {
    let (status, why) = match reason {
        RejectReason::QueueFull | RejectReason::TenantQueueFull => {
            (StatusCode::TOO_MANY_REQUESTS, "too many requests wait for this function")
        }
        RejectReason::WaitedTooLong => (StatusCode::SERVICE_UNAVAILABLE, "no replica was free in time"),
        RejectReason::Cancelled => (StatusCode::SERVICE_UNAVAILABLE, "the function was deleted"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "no replica could be reached"),
    };
    ApiError::new(status, why)
}

#[cfg(test)]
mod steps;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::mpsc::Receiver;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    /// A core whose replicas are this test's.
    struct Bench {
        core: Core,
        launches: Receiver<Launch>,
        now: Timestamp,
        /// Requests that were not ended: name, request, what it is told, whether a replica took it.
        requests: Vec<(&'static str, RequestId, UnboundedReceiver<Turn>, bool)>,
        /// Replicas that were started and are not gone.
        replicas: Vec<InstanceId>,
    }

    #[derive(Debug, Clone, Copy)]
    enum Op {
        Deploy {
            name: usize,
            share: bool,
            concurrency: u32,
            rate: Option<u32>,
            min: u32,
        },
        Remove {
            name: usize,
        },
        Scale {
            name: usize,
            replicas: u32,
        },
        Arrive {
            name: usize,
        },
        /// The client leaves, or the answer is over.
        End {
            which: usize,
        },
        Reach {
            which: usize,
        },
        Unreachable {
            which: usize,
        },
        Ready {
            which: usize,
        },
        Gone {
            which: usize,
        },
        Pass {
            ms: u64,
        },
    }

    const NAMES: [&str; 2] = ["f", "g"];

    fn op() -> impl Strategy<Value = Op> {
        let name = 0..NAMES.len();
        prop_oneof![
            1 => (name.clone(), any::<bool>(), 1u32..3, prop::option::of(1u32..40), 0u32..4)
                .prop_map(|(name, share, concurrency, rate, min)| Op::Deploy { name, share, concurrency, rate, min }),
            1 => name.clone().prop_map(|name| Op::Remove { name }),
            2 => (name.clone(), 0u32..6).prop_map(|(name, replicas)| Op::Scale { name, replicas }),
            12 => name.prop_map(|name| Op::Arrive { name }),
            8 => (0usize..64).prop_map(|which| Op::End { which }),
            6 => (0usize..64).prop_map(|which| Op::Reach { which }),
            1 => (0usize..64).prop_map(|which| Op::Unreachable { which }),
            8 => (0usize..64).prop_map(|which| Op::Ready { which }),
            4 => (0usize..64).prop_map(|which| Op::Gone { which }),
            6 => (1u64..3_000).prop_map(|ms| Op::Pass { ms }),
        ]
    }

    impl Bench {
        fn new() -> Self {
            let (sender, launches) = std::sync::mpsc::channel();
            let core = Core::new(1, Bytes::from_gib(4), 16, Duration::from_secs(60), sender).unwrap();
            let now = Timestamp::from_millis(1);
            Self { core, launches, now, requests: Vec::new(), replicas: Vec::new() }
        }

        fn apply(&mut self, op: Op) {
            let now = self.now;
            match op {
                Op::Deploy { name, share, concurrency, rate, min } => {
                    let mut annotations = vec![("gshare/concurrency", concurrency.to_string())];
                    annotations.extend(rate.map(|rate| ("gshare/requests_per_second", rate.to_string())));
                    if share {
                        annotations.push(("fastgshare/gpu_quota_request", "0.4".into()));
                        annotations.push(("fastgshare/gpu_sm_partition", "50".into()));
                    }
                    let body = serde_json::json!({
                        "service": NAMES[name], "image": "x", "labels": {"com.openfaas.scale.min": min.to_string()},
                        "annotations": annotations.into_iter().collect::<BTreeMap<_, _>>(),
                    });
                    let (deployment, plan) = FunctionDeployment::parse(body.to_string().as_bytes()).unwrap();
                    self.core.deploy(now, deployment, plan, 0, None).unwrap();
                }
                Op::Remove { name } => {
                    self.core.remove(now, NAMES[name]);
                }
                Op::Scale { name, replicas } => drop(self.core.set_replicas(now, NAMES[name], replicas)),
                Op::Arrive { name } => {
                    let (sender, turns) = unbounded_channel();
                    if let Ok(request) = self.core.arrive(now, NAMES[name], sender) {
                        self.requests.push((NAMES[name], request, turns, false));
                    }
                }
                Op::End { which } if !self.requests.is_empty() => {
                    let (name, request, ..) = self.requests.swap_remove(which % self.requests.len());
                    self.core.end(now, name, request);
                }
                Op::Reach { which } | Op::Unreachable { which } if !self.requests.is_empty() => {
                    let which = which % self.requests.len();
                    let (name, request, turns, taken) = &mut self.requests[which];
                    if let Ok(Turn::Go { instance, .. }) = turns.try_recv() {
                        match op {
                            Op::Reach { .. } => *taken = self.core.reached(name, *request, instance),
                            _ => self.core.unreachable(now, instance),
                        }
                    }
                }
                Op::Ready { which } if !self.replicas.is_empty() => {
                    self.core.ready(now, self.replicas[which % self.replicas.len()]);
                }
                Op::Gone { which } if !self.replicas.is_empty() => {
                    let instance = self.replicas.swap_remove(which % self.replicas.len());
                    self.core.gone(now, instance);
                }
                Op::Pass { ms } => {
                    self.now = now.saturating_add(Duration::from_millis(ms));
                    self.core.tick(self.now);
                }
                _ => {}
            }
            self.replicas.extend(self.launches.try_iter().map(|launch| launch.instance));
            self.core.invariants();
        }

        /// Lets everything that was asked to end do so, and everything that starts be ready.
        fn settle(&mut self) {
            for _ in 0..40 {
                let doomed = |instance: &Instance| instance.stage == Stage::Doomed;
                let gone: Vec<_> =
                    self.core.instances.iter().filter(|(_, i)| doomed(i)).map(|(id, _)| *id).collect();
                for instance in gone {
                    self.replicas.retain(|other| *other != instance);
                    self.core.gone(self.now, instance);
                }
                for which in 0..self.replicas.len() {
                    self.apply(Op::Ready { which });
                }
                self.apply(Op::Pass { ms: 1_000 });
            }
        }
    }

    proptest! {
        /// Replicas die, clients leave and functions change at any time: the books stay right, and in the end each
        /// request that is still wanted has been told where to go, or that it will not be served.
        #[test]
        fn no_request_is_forgotten(ops in prop::collection::vec(op(), 1..150)) {
            let mut bench = Bench::new();
            for op in ops {
                bench.apply(op);
            }
            for _ in 0..40 {
                bench.settle();
                // Answers come to an end, so that others have their turn.
                let mut which = 0;
                while which < bench.requests.len() {
                    let (_, _, turns, taken) = &mut bench.requests[which];
                    match turns.try_recv() {
                        Err(_) if *taken => bench.apply(Op::End { which }),
                        Ok(_) | Err(tokio::sync::mpsc::error::TryRecvError::Disconnected) => {
                            bench.apply(Op::End { which });
                        }
                        Err(tokio::sync::mpsc::error::TryRecvError::Empty) => which += 1,
                    }
                }
            }
            let open: Vec<_> = bench.requests.iter().map(|(name, request, ..)| (*name, *request)).collect();
            prop_assert!(open.is_empty(), "{open:?}");
        }
    }
}
