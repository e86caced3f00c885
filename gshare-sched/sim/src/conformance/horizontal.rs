//! Whether a scaler of instances keeps the contract of [`HorizontalScaler`].
//!
//! # Runs
//! 1. **Random fleets**: up to three functions under jumping loads. Their instances start late or not in time, are refused, die, and
//!    drain late or not in time; the suite keeps a book of instances beside the scaler.
//! 2. **The same again**, and **the first function alone**, which must get the same orders.
//! 3. **A scene**: the scaler reports a load that one instance cannot serve.

use super::story::{Broken, Log, claim};
use crate::event_queue::EventQueue;
use crate::rng::Rng;
use crate::story::Story;
use core::ops::Range;
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::{Duration, Engine, FunctionId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::Wrapped;
use gshare_sched::scale::horizontal_claims as claims;
use gshare_sched::scale::{
    FunctionScale, HorizontalAction, HorizontalEvent, HorizontalScaler, InstanceCounts,
};
use std::collections::BTreeMap;

/// The time in which a host ends an instance that does not start, or does not drain.
const HOST_WAITS: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Starting,
    Ready,
    Draining,
}

#[derive(Debug, Clone, Copy)]
enum Happening {
    Tick,
    Ready(InstanceId),
    Refused(InstanceId),
    Gone(InstanceId),
    Wake,
}

/// An order in the view of a function, without the instance's name, which differs between runs with other functions.
type Order = (Timestamp, &'static str, Option<ProfilePoint>);

struct Function {
    spec: FunctionScale,
    /// The source of this function's randomness, equal with and without other functions.
    rng: Rng,
    rate: u64,
    orders: Vec<Order>,
    unmet: bool,
}

struct Fleet {
    scaler: Wrapped<dyn HorizontalScaler>,
    functions: Vec<Function>,
    instances: BTreeMap<InstanceId, (usize, State)>,
    queue: EventQueue<Happening>,
    given: u64,
    wake: Option<Timestamp>,
}

/// The instances in a scene.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hosts {
    Random,
    Prompt,
}

/// Runs the suite over the scalers of `make`, which must be equal and without functions.
///
/// # Errors
/// The first broken claim.
pub fn horizontal_scaler(
    make: &dyn Fn() -> Box<dyn HorizontalScaler>,
    seeds: Range<u64>,
) -> Result<(), Story> {
    for seed in seeds {
        let run = |most: usize| {
            let log = Log::default();
            let tell = |broken| log.story(seed, broken);
            let functions = random_functions(seed).into_iter().take(most).collect();
            let mut fleet = Fleet::new(make(), &log, functions).map_err(tell)?;
            fleet.run(200, Hosts::Random).map_err(tell)?;
            Ok((fleet, log))
        };
        let (first, log) = run(usize::MAX)?;
        let tell = |broken| log.story(seed, broken);
        let (_, again) = run(usize::MAX)?;
        log.is_repeated_by(&again).map_err(tell)?;
        let (alone, _) = run(1)?;
        let same = alone.functions[0].orders == first.functions[0].orders;
        claim(same, claims::APART, || "function 0 got other orders alone".into()).map_err(tell)?;
    }
    overload(make)
}

fn overload(make: &dyn Fn() -> Box<dyn HorizontalScaler>) -> Result<(), Story> {
    let log = Log::default();
    let tell = |broken| log.story(0, broken);
    let mut functions = random_functions(0);
    functions.truncate(1);
    let spec = &mut functions[0].spec;
    (spec.min_instances, spec.max_instances, functions[0].rate) = (1, 1, 100_000);
    let mut fleet = Fleet::new(make(), &log, functions).map_err(tell)?;
    fleet.run(400, Hosts::Prompt).map_err(tell)?;
    claim(fleet.functions[0].unmet, claims::UNMET, || "100,000 requests/s on one instance were not".into())
        .map_err(tell)
}

fn random_functions(seed: u64) -> Vec<Function> {
    let mut rng = Rng::new(seed);
    let functions = rng.between(1, 3);
    (0..functions).filter_map(|_| random_function(rng.fork())).collect()
}

/// `None` cannot occur, since the points are valid.
fn random_function(mut rng: Rng) -> Option<Function> {
    let points = [20, 50].into_iter().filter_map(|percent| {
        let (sm, quota) = (SmShare::from_percent(percent)?, Quota::from_percent(50 + percent)?);
        let p50 = rng.duration(Duration::from_millis(5), Duration::from_millis(80));
        let p95 = p50.saturating_add(rng.duration(Duration::ZERO, Duration::from_millis(20)));
        ProfilePoint::measured(sm, quota, 1, f64::from(percent), p50, p95).ok()
    });
    let profile = ProfileTable::sparse(points.collect()).ok()?;
    let slowest = profile.points().iter().map(|point| point.p95).min()?;
    let max_p95 = rng.percent(50).then_some(slowest);
    let min_instances = u32::try_from(rng.below(3)).ok()?;
    let max_instances = min_instances.max(1) + u32::try_from(rng.below(5)).ok()?;
    let spec = FunctionScale { profile, max_p95, min_instances, max_instances };
    Some(Function { spec, rng, rate: 0, orders: Vec::new(), unmet: false })
}

impl Fleet {
    fn new(scaler: Box<dyn HorizontalScaler>, log: &Log, functions: Vec<Function>) -> Result<Self, Broken> {
        let scaler = log.watch(scaler, false);
        let queue = EventQueue::new();
        Ok(Self { scaler, functions, instances: BTreeMap::new(), queue, given: 0, wake: None })
    }

    fn run(&mut self, ticks: u64, hosts: Hosts) -> Result<(), Broken> {
        let tick = self.scaler.tick();
        for index in 0..self.functions.len() {
            let spec = self.functions[index].spec.clone();
            self.tell(hosts, HorizontalEvent::FunctionAdded { function: name(index), spec })?;
        }
        for number in 1..=ticks {
            self.queue.schedule(Timestamp::ZERO + tick.saturating_mul(number), Happening::Tick);
        }
        let end = Timestamp::ZERO + tick.saturating_mul(ticks);
        while let Some((now, happening)) = self.queue.pop() {
            if now > end {
                break;
            }
            match happening {
                Happening::Tick => {
                    for index in 0..self.functions.len() {
                        let function = &mut self.functions[index];
                        if hosts == Hosts::Random && function.rng.percent(5) {
                            function.rate = function.rng.below(300);
                        }
                        let rate = RequestRate::per_second(function.rate);
                        if hosts == Hosts::Random && function.rng.percent(10) {
                            let function = name(index);
                            self.tell(hosts, HorizontalEvent::MinimumLacking { function })?;
                            self.keeps_least(index, claims::RESTORED)?;
                        }
                        self.tell(hosts, HorizontalEvent::LoadReported { function: name(index), rate })?;
                    }
                }
                Happening::Ready(instance) => {
                    if let Some((_, state @ State::Starting)) = self.instances.get_mut(&instance) {
                        *state = State::Ready;
                        self.tell(hosts, HorizontalEvent::InstanceReady { instance })?;
                    }
                }
                Happening::Refused(instance) => {
                    if let Some((_, State::Starting)) = self.instances.get(&instance) {
                        self.instances.remove(&instance);
                        self.tell(hosts, HorizontalEvent::StartRefused { instance })?;
                    }
                }
                Happening::Gone(instance) => {
                    if self.instances.remove(&instance).is_some() {
                        self.tell(hosts, HorizontalEvent::InstanceGone { instance })?;
                    }
                }
                Happening::Wake => {
                    if self.scaler.next_deadline().is_some_and(|at| at <= now) {
                        self.tell(hosts, HorizontalEvent::DeadlineReached)?;
                    }
                }
            }
            let next = self.scaler.next_deadline();
            if let Some(at) = next.filter(|at| Some(*at) != self.wake) {
                self.queue.schedule(at.max(now), Happening::Wake);
                self.wake = Some(at);
            }
        }
        Ok(())
    }

    fn tell(&mut self, hosts: Hosts, event: HorizontalEvent) -> Result<(), Broken> {
        let (now, mut actions) = (self.queue.now(), Vec::new());
        self.scaler.handle(now, event, &mut actions).map_err(|error| (claims::VALID, error.to_string()))?;
        for action in actions {
            self.obey(now, hosts, action)?;
        }
        for (index, function) in self.functions.iter().enumerate() {
            let Some(told) = self.scaler.instances(name(index)) else { continue };
            let most = function.spec.max_instances;
            let counts = self.counts(index);
            claim(told == counts, claims::KNOWN, || {
                format!("{}: {told:?}, there are {counts:?}", name(index))
            })?;
            claim(counts.starting + counts.ready <= most, claims::MOST, || format!("{counts:?} of {most}"))?;
        }
        Ok(())
    }

    fn counts(&self, index: usize) -> InstanceCounts {
        let mut counts = InstanceCounts::default();
        for (_, state) in self.instances.values().filter(|(of, _)| *of == index) {
            match state {
                State::Starting => counts.starting += 1,
                State::Ready => counts.ready += 1,
                State::Draining => counts.draining += 1,
            }
        }
        counts
    }

    fn obey(&mut self, now: Timestamp, hosts: Hosts, action: HorizontalAction) -> Result<(), Broken> {
        let of = |this: &Self, instance: InstanceId| {
            let unknown = || (claims::INSTANCES, format!("{instance}"));
            this.instances.get(&instance).copied().ok_or_else(unknown)
        };
        match action {
            HorizontalAction::Start { function, instance, point } => {
                let known = self.functions.get_mut(function.index());
                let state = known.ok_or_else(|| (claims::FUNCTIONS, format!("{function}")))?;
                claim(instance.number() >= self.given, claims::NAMES, || format!("{instance}"))?;
                self.given = instance.number() + 1;
                let spec = &state.spec;
                let fast = spec.profile.points().contains(&point)
                    && spec.max_p95.is_none_or(|most| point.p95 <= most);
                claim(fast, claims::POINT, || format!("{point:?}"))?;
                state.orders.push((now, "start", Some(point)));
                let soon = now + state.rng.duration(Duration::from_millis(500), Duration::from_secs(20));
                match hosts {
                    Hosts::Prompt => self.queue.schedule(now, Happening::Ready(instance)),
                    Hosts::Random => match state.rng.below(100) {
                        0..3 => self.queue.schedule(now + HOST_WAITS, Happening::Gone(instance)),
                        3..10 => self.queue.schedule(soon, Happening::Refused(instance)),
                        draw => {
                            self.queue.schedule(soon, Happening::Ready(instance));
                            if draw < 15 {
                                self.queue
                                    .schedule(soon + Duration::from_secs(draw), Happening::Gone(instance));
                            }
                        }
                    },
                }
                self.instances.insert(instance, (function.index(), State::Starting));
                Ok(())
            }
            HorizontalAction::Drain { instance } => {
                let (index, state) = of(self, instance)?;
                claim(state == State::Ready, claims::DRAINS, || format!("{instance}: {state:?}"))?;
                self.instances.insert(instance, (index, State::Draining));
                let function = &mut self.functions[index];
                function.orders.push((now, "drain", None));
                let soon = function.rng.duration(Duration::from_millis(1), Duration::from_secs(5));
                let takes = if function.rng.percent(5) { HOST_WAITS } else { soon };
                self.queue.schedule(now + takes, Happening::Gone(instance));
                self.keeps_least(index, claims::LEAST)
            }
            HorizontalAction::Stop { instance } => {
                let (index, state) = of(self, instance)?;
                claim(state == State::Starting, claims::STOPS, || format!("{instance} was {state:?}"))?;
                self.instances.remove(&instance);
                self.functions[index].orders.push((now, "stop", None));
                self.keeps_least(index, claims::LEAST)
            }
            HorizontalAction::Unmet { function, .. } => {
                if let Some(state) = self.functions.get_mut(function.index()) {
                    state.unmet = true;
                    state.orders.push((now, "unmet", None));
                }
                Ok(())
            }
        }
    }

    fn keeps_least(&self, index: usize, rule: &'static str) -> Result<(), Broken> {
        let (counts, least) = (self.counts(index), self.functions[index].spec.min_instances);
        claim(counts.starting + counts.ready >= least, rule, || format!("{counts:?}, at least {least}"))
    }
}

fn name(index: usize) -> FunctionId {
    FunctionId::new(u32::try_from(index).unwrap_or(u32::MAX))
}
