//! The loop: events in order of their time, the execution of orders, faults, and the book beside it all.

mod orders;
mod strikes;

use super::book::Book;
use super::deadlines::Deadlines;
use super::faults::Fault;
use super::kernels::Nodes;
use super::outcome::{Area, Outcome, Sample, device_time, name_of};
use super::run_plan::{Change, Depth, Load, Plan};
use super::simulated::{Body, Floor, Phase};
use crate::arrivals::Arrivals;
use crate::event_queue::EventQueue;
use crate::log::Log;
use crate::rng::Rng;
use crate::story::Story;
use gshare_core::{Duration, Engine, FunctionId, GpuId, InstanceId, RequestId, Timestamp};
use gshare_sched::platform::{InstanceReport, PlatformAction, PlatformEvent, Work};
use std::collections::BTreeMap;

/// An engine that asks for this many calls in a row at the present time will never stop.
const STALLED: u32 = 1_000;

fn broken(seed: u64, at: Timestamp, wrong: String, events: Vec<String>) -> Story {
    let at = at.saturating_since(Timestamp::ZERO).to_string();
    Story { claim: "the platform keeps its promises", seed: Some(seed), at, wrong, events }
}

/// Runs a plan with a seed on the engine of `make`. A failed seed runs again, to tell its story.
///
/// # Errors
/// A forbidden order of the engine, a forbidden refusal, or a leftover at the end.
pub fn run<E>(plan: &Plan, seed: u64, make: impl Fn() -> Result<E, String>) -> Result<Outcome, Story>
where
    E: Engine<Event = PlatformEvent, Action = PlatformAction>,
{
    let refused = |wrong| broken(seed, Timestamp::ZERO, wrong, Vec::new());
    let nodes = nodes(plan, seed).map_err(refused)?;
    let once = |tells: bool| World::new(plan, nodes.as_ref(), seed, make().map_err(refused)?, tells).run();
    once(false).map_err(|failure| once(true).err().unwrap_or(failure))
}

/// Runs a plan like [`run`], and returns its last events and orders as well.
pub fn story<E>(plan: &Plan, seed: u64, engine: E) -> (Result<Outcome, Story>, Vec<String>)
where
    E: Engine<Event = PlatformEvent, Action = PlatformAction>,
{
    let nodes = match nodes(plan, seed) {
        Ok(nodes) => nodes,
        Err(wrong) => return (Err(broken(seed, Timestamp::ZERO, wrong, Vec::new())), Vec::new()),
    };
    let mut world = World::new(plan, nodes.as_ref(), seed, engine, true);
    let result = world.run();
    (result, world.log.lines())
}

fn nodes(plan: &Plan, seed: u64) -> Result<Option<Nodes>, String> {
    (plan.depth == Depth::Kernels).then(|| Nodes::new(plan, seed)).transpose()
}

#[derive(Debug, Clone, Copy)]
enum Happening {
    Arrives(usize),
    /// A `Start`, `Unpark`, `Park` or `Stop` of this epoch is done.
    Carried(InstanceId, u32),
    Refuses(InstanceId),
    JobEnds(usize, u32),
    Tells(InstanceId, InstanceReport),
    Answers(RequestId, InstanceId, Duration),
    Profiled(usize),
    Goes(Fault),
    Changes(usize),
    Returns(GpuId),
    Says(InstanceId, RequestId, Duration),
    Samples,
}

struct World<'a, E> {
    plan: &'a Plan,
    seed: u64,
    engine: E,
    book: Book,
    now: Timestamp,
    queue: EventQueue<Happening>,
    floor: Floor<'a>,
    bodies: BTreeMap<InstanceId, Body>,
    /// Whether each function is deployed.
    live: Vec<bool>,
    /// The arrivals of each function, and their source of randomness.
    arrivals: Vec<Option<(Arrivals, Rng)>>,
    /// Whether any function has a closed loop.
    closed: bool,
    requests: u64,
    used: Vec<Area>,
    /// The part of `used` beyond the instances' guarantees.
    beyond: Vec<Area>,
    /// The remaining training of each function, and its completed training in all.
    training: Vec<Duration>,
    trained: Vec<Duration>,
    /// The kernels of instances at the last sample.
    sampled: BTreeMap<InstanceId, u64>,
    chances: Rng,
    /// Faults in wait for their occasion.
    armed: [bool; Fault::ALL.len()],
    actions: Vec<PlatformAction>,
    /// Requests of each batch in the present answer, by its instance.
    batches: BTreeMap<InstanceId, usize>,
    outcome: Outcome,
    log: Log,
}

impl<'a, E> World<'a, E>
where
    E: Engine<Event = PlatformEvent, Action = PlatformAction>,
{
    fn new(plan: &'a Plan, nodes: Option<&'a Nodes>, seed: u64, engine: E, tells: bool) -> Self {
        let mut rng = Rng::new(seed);
        let mut arrivals = Vec::new();
        for function in &plan.functions {
            let mut own = rng.fork();
            arrivals.push(match &function.load {
                Load::None => None,
                Load::Process(process) => Some((process.clone(), own)),
                Load::Counts { bin, counts } => Some((Arrivals::counts(*bin, counts, &mut own), own)),
            });
        }
        let (mut book, mut floor) = (Book::new(), Floor::new(&plan.devices, nodes));
        book.bounds = plan.bounds.clone().map(Deadlines::new);
        book.spans = plan.record.then(Default::default);
        floor.record = plan.record.then(Default::default);
        Self {
            plan,
            seed,
            engine,
            book,
            now: Timestamp::ZERO,
            queue: EventQueue::new(),
            floor,
            bodies: BTreeMap::new(),
            live: vec![false; plan.functions.len()],
            closed: arrivals.iter().flatten().any(|(process, _)| process.is_closed_loop()),
            arrivals,
            requests: 0,
            used: vec![0; plan.functions.len()],
            beyond: vec![0; plan.functions.len()],
            training: plan.functions.iter().map(|function| function.train).collect(),
            trained: vec![Duration::ZERO; plan.functions.len()],
            sampled: BTreeMap::new(),
            chances: rng,
            armed: [false; Fault::ALL.len()],
            actions: Vec::new(),
            batches: BTreeMap::new(),
            outcome: Outcome::default(),
            log: Log::keeping(if tells { plan.story.max(1) } else { 0 }),
        }
    }

    fn run(&mut self) -> Result<Outcome, Story> {
        match self.play() {
            Ok(()) => Ok(self.add_up()),
            Err(wrong) => Err(broken(self.seed, self.now, wrong, self.log.lines())),
        }
    }

    fn play(&mut self) -> Result<(), String> {
        self.begin()?;
        let end = Timestamp::ZERO + self.plan.length;
        self.until(end, |_| false)?;
        let trained = (0..self.trained.len()).map(|function| self.trained_by_now(function)).collect();
        // Faults in wait for an occasion are over too.
        self.armed = [false; Fault::ALL.len()];
        let settle = self.plan.settle;
        // Half of the time passes in any case, so that the effects of idleness occur.
        self.until(end.saturating_add(Duration::from_nanos(settle.as_nanos() / 2)), |_| false)?;
        self.until(end.saturating_add(settle), |world| world.book.quiet().is_ok())?;
        self.book.quiet().map_err(|left| format!("{settle} after load and faults have ended, {left}"))?;
        self.book.minimums()?;
        for function in 0..self.plan.functions.len() {
            self.change(function, Change::Removed)?;
        }
        self.until(self.now.saturating_add(settle), |world| world.book.empty().is_ok())?;
        self.book.empty().map_err(|left| format!("{settle} after all functions were removed, {left}"))?;
        self.trained = trained;
        Ok(())
    }

    /// The completed training of a function, including the work of a running job.
    fn trained_by_now(&self, function: usize) -> Duration {
        let trains = matches!(self.plan.functions[function].spec.work, Work::Training { .. });
        let of = |body: &Body| trains && body.function == function && body.phase == Phase::Up;
        let running = self.bodies.values().filter(|body| of(body));
        let left = running.filter_map(|body| self.floor.left(self.now, body)).min();
        let done = left.map_or(Duration::ZERO, |left| self.training[function].saturating_sub(left));
        self.trained[function].saturating_add(done)
    }

    /// Counts the kernels of instances since the last sample.
    fn sample(&mut self) {
        let at = self.now.saturating_since(Timestamp::ZERO);
        for (&instance, body) in self.bodies.iter().filter(|(_, body)| body.phase == Phase::Up) {
            let all = self.floor.kernels_of(body);
            // An instance parked since the last sample has new processes.
            let before = self.sampled.insert(instance, all).filter(|before| *before <= all).unwrap_or(0);
            let (function, kernels) = (body.function, all - before);
            self.outcome.series.push(Sample { at, function, instance, kernels });
        }
        if let Some(every) = self.plan.sample.filter(|every| at.saturating_add(*every) <= self.plan.length) {
            self.queue.schedule(self.now + every, Happening::Samples);
        }
    }

    fn begin(&mut self) -> Result<(), String> {
        let plan = self.plan;
        for &(tenant, limits) in &plan.tenants {
            self.tell(PlatformEvent::TenantLimited { tenant, limits })?;
        }
        for gpu in 0..plan.devices.len() {
            self.found(GpuId::new(u32::try_from(gpu).unwrap_or(u32::MAX)))?;
        }
        for (index, function) in plan.functions.iter().enumerate() {
            self.change(index, Change::Deployed)?;
            let closed = self.arrivals[index].as_ref().is_some_and(|(process, _)| process.is_closed_loop());
            let clients = if closed { function.clients } else { 1 };
            for _ in 0..clients {
                self.schedule_arrival(index, Timestamp::ZERO);
            }
        }
        if let Some(every) = plan.sample.filter(|every| *every <= plan.length) {
            self.queue.schedule(self.now + every, Happening::Samples);
        }
        for fault in Fault::ALL {
            self.schedule_fault(fault);
        }
        for (index, (after, ..)) in plan.changes.iter().enumerate() {
            self.queue.schedule(self.now + *after, Happening::Changes(index));
        }
        Ok(())
    }

    fn change(&mut self, index: usize, change: Change) -> Result<(), String> {
        let Some(live) = self.live.get_mut(index) else { return Ok(()) };
        let function = number(index);
        match (change, *live) {
            (Change::Removed, true) => {
                *live = false;
                self.tell(PlatformEvent::FunctionRemoved { function })
            }
            (Change::Deployed, false) => {
                *live = true;
                let spec = Box::new(self.plan.functions[index].spec.clone());
                self.tell(PlatformEvent::FunctionDeployed { function, spec })
            }
            (Change::Bounds(min_instances, max_instances), true) => {
                self.tell(PlatformEvent::BoundsChanged { function, min_instances, max_instances })
            }
            _ => Ok(()),
        }
    }

    /// Goes on until a time, or until `done` is true, which is checked whenever time moves on.
    fn until(&mut self, end: Timestamp, done: impl Fn(&Self) -> bool) -> Result<(), String> {
        let mut stalled = 0;
        loop {
            let happens = self.queue.next_at();
            let deadline = self.engine.next_deadline().map(|at| at.max(self.now));
            let kernels = self.floor.next_at().map(|at| at.max(self.now));
            let next = happens.into_iter().chain(deadline).chain(kernels).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                if !done(self) {
                    self.now = end;
                }
                return Ok(());
            };
            if next > self.now {
                if done(self) {
                    return Ok(());
                }
                (self.now, stalled) = (next, 0);
            }
            if kernels == Some(next) {
                self.floor.advance(next)?;
                self.schedule_ends();
            } else if happens == Some(next) {
                let Some((_, happening)) = self.queue.pop() else { continue };
                self.happens(happening)?;
            } else {
                stalled += 1;
                if stalled > STALLED {
                    return Err("the platform asks again and again for the time that it is".to_owned());
                }
                self.tell(PlatformEvent::DeadlineReached)?;
            }
        }
    }

    fn schedule_arrival(&mut self, function: usize, last: Timestamp) {
        let Some((process, rng)) = self.arrivals.get_mut(function).and_then(Option::as_mut) else { return };
        let next = process.next_after(last, rng);
        if let Some(at) = next.filter(|at| at.saturating_since(Timestamp::ZERO) < self.plan.length) {
            self.queue.schedule(at, Happening::Arrives(function));
        }
    }

    fn happens(&mut self, happening: Happening) -> Result<(), String> {
        match happening {
            Happening::Arrives(function) => {
                let closed =
                    self.arrivals[function].as_ref().is_some_and(|(process, _)| process.is_closed_loop());
                let live = self.live[function];
                if !closed || !live {
                    self.schedule_arrival(function, self.now);
                }
                if !live {
                    return Ok(());
                }
                let request = RequestId::new(self.requests);
                self.requests += 1;
                let deadline = self.plan.functions[function].patience.map(|patience| self.now + patience);
                self.tell(PlatformEvent::RequestArrived { request, function: number(function), deadline })
            }
            Happening::Carried(id, epoch) => self.carried(id, epoch),
            Happening::Refuses(id) => self.report(id, InstanceReport::Refused),
            Happening::JobEnds(job, epoch) => self.job_ends(job, epoch),
            Happening::Tells(instance, report) => {
                let over = matches!(
                    report,
                    InstanceReport::Refused | InstanceReport::Completed | InstanceReport::Gone
                );
                if over {
                    self.bodies.remove(&instance);
                }
                if self.book.has_instance(instance) {
                    self.tell(PlatformEvent::Instance { instance, report })
                } else {
                    Ok(())
                }
            }
            Happening::Answers(request, instance, took) => {
                if self.book.runs_on(request, instance) {
                    self.tell(PlatformEvent::RequestDone { request, took })
                } else {
                    Ok(())
                }
            }
            Happening::Profiled(function) => match &self.plan.functions[function].learned {
                Some(profile) => {
                    let profile = profile.clone();
                    let function = number(function);
                    self.tell(PlatformEvent::ProfileLearned { function, profile, memory: None })
                }
                None => Err(format!("{} is to be profiled, but has its profile", number(function))),
            },
            Happening::Goes(fault) => {
                self.schedule_fault(fault);
                self.goes(fault)
            }
            Happening::Changes(index) => {
                let (_, function, change) = self.plan.changes[index];
                let here = self.book.instances.values().any(|one| one.function.index() == function);
                if change == Change::Deployed && here {
                    self.queue.schedule(self.now + Duration::from_secs(1), happening);
                    return Ok(());
                }
                self.change(function, change)
            }
            Happening::Returns(gpu) => self.found(gpu),
            Happening::Says(id, request, took) => self.say(id, Happening::Answers(request, id, took)),
            Happening::Samples => {
                self.sample();
                Ok(())
            }
        }
    }

    /// Takes in the effect of an order, unless another order or a fault came between.
    fn carried(&mut self, id: InstanceId, epoch: u32) -> Result<(), String> {
        let Some(body) = self.bodies.get_mut(&id).filter(|body| body.epoch == epoch) else { return Ok(()) };
        let report = match body.phase {
            Phase::Loading => {
                body.phase = Phase::Up;
                self.floor.up(self.now, body, &self.plan.functions[body.function]);
                if matches!(self.plan.functions[body.function].spec.work, Work::Training { .. }) {
                    let left = self.training[body.function];
                    self.floor.begin(self.now, id, body, None, (Duration::ZERO, left), None);
                    self.schedule_ends();
                }
                InstanceReport::Ready
            }
            Phase::StartsParked => {
                body.phase = Phase::Away;
                InstanceReport::Ready
            }
            Phase::Leaving => {
                body.phase = Phase::Away;
                if body.lives { InstanceReport::Parked } else { InstanceReport::Unloaded }
            }
            Phase::Returning => {
                body.phase = Phase::Up;
                self.floor.up(self.now, body, &self.plan.functions[body.function]);
                InstanceReport::Unparked
            }
            Phase::Up | Phase::Away => return Ok(()),
            Phase::Ended => InstanceReport::Gone,
        };
        self.report(id, report)
    }

    fn job_ends(&mut self, job: usize, epoch: u32) -> Result<(), String> {
        let Some((id, request, began)) =
            self.floor.job(job, epoch).map(|found| (found.instance, found.request, found.began))
        else {
            return Ok(());
        };
        let Some(body) = self.bodies.get_mut(&id) else { return Ok(()) };
        if self.floor.take_turn(self.now, job, body) {
            self.schedule_ends();
            return Ok(());
        }
        self.floor.end(self.now, job, body);
        let (function, hangs) = (body.function, body.hangs);
        if let Some(request) = request {
            self.schedule_ends();
            if hangs {
                return Ok(());
            }
            let host = self.plan.functions[function].host;
            let took = self.now.saturating_since(began).saturating_add(host);
            if !host.is_zero() {
                self.queue.schedule(self.now + host, Happening::Says(id, request, took));
                return Ok(());
            }
            return self.say(id, Happening::Answers(request, id, took));
        }
        body.phase = Phase::Ended;
        body.epoch += 1;
        self.used[function] += self.floor.down(self.now, body, false);
        self.count_training(function, id, Duration::ZERO);
        self.training[function] = self.plan.functions[function].train;
        self.schedule_ends();
        self.report(id, InstanceReport::Completed)
    }

    /// Counts the completed training, down to a remaining `left`.
    fn count_training(&mut self, function: usize, id: InstanceId, left: Duration) {
        let done = self.training[function].saturating_sub(left);
        // Kernels count their own time.
        let by_kernels = self.plan.depth == Depth::Kernels;
        let area = self.bodies.get(&id).filter(|_| !by_kernels).map_or(0, Body::area);
        self.used[function] += u128::from(done.as_nanos()) * u128::from(area);
        self.trained[function] = self.trained[function].saturating_add(done);
        self.training[function] = left;
    }

    fn schedule_ends(&mut self) {
        for end in self.floor.ends.drain(..) {
            self.queue.schedule(end.at, Happening::JobEnds(end.job, end.epoch));
        }
    }

    /// Reports a fact of an instance to the platform: now, unless the report is late or behind a late report.
    fn say(&mut self, id: InstanceId, what: Happening) -> Result<(), String> {
        let late = if core::mem::take(&mut self.armed[Fault::ReportLate as usize]) {
            self.chances.duration(Duration::from_millis(100), Duration::from_secs(5))
        } else {
            Duration::ZERO
        };
        let told = self.bodies.get_mut(&id).map(|body| &mut body.told);
        match told {
            Some(told) if !late.is_zero() || *told >= self.now => {
                *told = (*told).max(self.now + late);
                self.queue.schedule(*told, what);
                Ok(())
            }
            _ => self.happens(what),
        }
    }

    fn report(&mut self, id: InstanceId, report: InstanceReport) -> Result<(), String> {
        self.say(id, Happening::Tells(id, report))
    }

    /// Ends the processes of an instance, unless they have ended. Their present work is lost, except for a training job's
    /// checkpoint.
    fn kill(&mut self, id: InstanceId) -> bool {
        let Some(body) = self.bodies.get_mut(&id).filter(|body| body.phase != Phase::Ended) else {
            return false;
        };
        body.phase = Phase::Ended;
        body.epoch += 1;
        let function = body.function;
        let mut left = None;
        while let Some(&job) = body.jobs.last() {
            left = Some(self.floor.end(self.now, job, body));
        }
        self.used[function] += self.floor.down(self.now, body, true);
        let trains = matches!(self.plan.functions[function].spec.work, Work::Training { .. });
        if let Some(left) = left.filter(|_| trains) {
            self.count_training(function, id, left);
        }
        self.schedule_ends();
        true
    }

    /// Gives the engine an event, checks its orders, and carries them out.
    fn tell(&mut self, event: PlatformEvent) -> Result<(), String> {
        self.outcome.events += 1;
        self.note(|| format!("told {event:?}"));
        if let PlatformEvent::RequestDone { request, took } = event {
            self.ended(request, Some(took));
        }
        self.book.told(self.now, &event)?;
        let mut actions = core::mem::take(&mut self.actions);
        if let Err(error) = self.engine.handle(self.now, event, &mut actions) {
            return Err(format!("the platform refused what it was told: {error}"));
        }
        self.batches.clear();
        for action in &actions {
            if let PlatformAction::Dispatch { request, instance } = action
                && self
                    .book
                    .asked(*request)
                    .is_some_and(|(of, _)| self.plan.functions[of.index()].spec.batches)
            {
                *self.batches.entry(*instance).or_default() += 1;
            }
        }
        for action in actions.drain(..) {
            self.note(|| format!("  orders {action:?}"));
            if let PlatformAction::Reject { request, .. } = action {
                self.ended(request, None);
            }
            self.book.ordered(self.now, &action)?;
            *self.outcome.actions.entry(name_of(&action)).or_insert(0) += 1;
            self.hash(&action);
            self.obey(&action);
        }
        self.actions = actions;
        self.book.settled()
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        self.log.line(self.now, line);
    }

    fn hash(&mut self, action: &PlatformAction) {
        let number = match *action {
            PlatformAction::Dispatch { request, instance } => {
                request.number() ^ instance.number().rotate_left(32)
            }
            PlatformAction::Reject { request, reason } => request.number() ^ (reason as u64) << 56,
            PlatformAction::Start { instance, .. }
            | PlatformAction::Park { instance, .. }
            | PlatformAction::Unpark { instance, .. }
            | PlatformAction::Drain { instance }
            | PlatformAction::Stop { instance, .. } => instance.number(),
            PlatformAction::Profile { function }
            | PlatformAction::Fetch { function, .. }
            | PlatformAction::Forget { function, .. } => function.number().into(),
        };
        let name = name_of(action).len() as u64;
        self.log.mix(&[self.now.as_nanos(), name, number]);
    }

    /// Handles the end of a request, which lasted for `took` if it was answered; in a closed loop the next request follows.
    fn ended(&mut self, request: RequestId, took: Option<Duration>) {
        if !self.closed && self.floor.record.is_none() {
            return;
        }
        let Some((function, arrived)) = self.book.asked(request) else { return };
        if let Some(record) = &mut self.floor.record {
            record.end(request, (function, arrived), self.now, took);
        }
        let process = self.arrivals.get(function.index()).and_then(Option::as_ref);
        if process.is_some_and(|(process, _)| process.is_closed_loop()) {
            self.schedule_arrival(function.index(), self.now);
        }
    }

    fn add_up(&mut self) -> Outcome {
        let mut outcome = core::mem::take(&mut self.outcome);
        outcome.hash = self.log.hash();
        outcome.functions = self.book.outcomes(self.now);
        for (index, (of, function)) in outcome.functions.iter_mut().zip(&self.plan.functions).enumerate() {
            of.name.clone_from(&function.name);
            (of.used, of.beyond) = (device_time(self.used[index]), device_time(self.beyond[index]));
            let trained = self.trained[index].as_nanos() / 10_000;
            of.trained = Duration::from_nanos(trained * u64::from(function.speed.get()));
        }
        outcome.kernels = self.floor.kernels();
        outcome.record = self.floor.record.take().map(|record| record.with_held(self.book.spans.take()));
        outcome.time = self.now.saturating_since(Timestamp::ZERO);
        outcome
    }
}

fn number(function: usize) -> FunctionId {
    FunctionId::new(u32::try_from(function).unwrap_or(u32::MAX))
}
