//! A host in virtual time around any [`Pool`], with a book of its own.
//!
//! # Problem
//! A pool orders instances and gives them requests; its contract has to hold for any report of the host, at any time. The
//! host here carries orders out in times that it draws, and makes what goes wrong: starts that are refused, processes that
//! die, devices that are lost and come back, callers that give up, functions that are removed and deployed again, reports
//! that are too old, and events that make no sense.
//!
//! # What is checked
//! - each request is dispatched until it is done, or rejected once; none after its deadline; none once its caller gave up;
//! - dispatches go to instances of the function that are ready and do not drain; nothing is parked while it runs a request;
//! - the memory on each device and slice holds the instances that are there, start, or are on the way out; what fractional
//!   devices guarantee of time and SMs is not more than they have; on the others one instance runs requests at a time, on
//!   each device or slice;
//! - an instance that runs requests is stopped only after `Drain`; names are never used twice;
//! - instances of a function that start, are ready or parked are never more than its maximum when one is started;
//! - the pool's instances are those of the book, and so is the number of requests that wait;
//! - a live function has its minimum of instances, those that start included, within a minute, unless `Unmet` was told since it had;
//!   also after an `Unmet`, within ten seconds in which it surely fits a device and no start of it fails. No order drains one of
//!   them; and once nothing goes wrong any more each has its minimum, within a bound;
//! - an event that makes no sense is refused, and nothing is ordered then;
//! - once nothing goes wrong any more each request ends, within a bound.

use crate::event_queue::EventQueue;
use crate::rng::Rng;
use crate::world::name_of;
use gshare_core::mig::SliceAt;
use gshare_core::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Part, PlatformAction, Pool, PoolAction, PoolEvent, Regime, Work,
};
use gshare_core::{Duration, FunctionId, GpuId, InstanceId, RequestId, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

/// The devices, functions and load that a pool is tried on.
#[derive(Debug, Clone)]
pub struct PoolTrial {
    /// Devices that join at the start.
    pub devices: Vec<(GpuId, DeviceSpec)>,
    /// Functions; each fits one of the devices at least, and there is room for the minimum of each.
    pub functions: Vec<(FunctionId, FunctionSpec)>,
    /// Requests that come.
    pub requests: u64,
    /// Mean time between two of them.
    pub every: Duration,
    /// Whether things go wrong.
    pub faults: bool,
    /// How long after the last request came each has ended.
    pub patience: Duration,
}

/// Counts of a trial.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct PoolReport {
    /// Requests that were answered.
    pub served: u64,
    /// Requests that were rejected.
    pub rejected: u64,
    /// Requests whose caller gave up.
    pub cancelled: u64,
    /// Orders by name.
    pub orders: BTreeMap<&'static str, u64>,
    /// When the last request ended.
    pub finished: Timestamp,
}

/// Time in which a pool starts what a function lacks of its minimum, or says that it cannot. A scaler waits a while after a start
/// that was refused.
const SOON: Duration = Duration::from_secs(60);

/// The same for a function that surely fits a device, from then on and from its last start that failed.
const RESTORED: Duration = Duration::from_secs(10);

/// Runs `pool` in the host of a seed.
///
/// # Errors
/// The first violation, with the seed, the time and what happened last.
pub fn pool(pool: &mut dyn Pool, trial: &PoolTrial, seed: u64) -> Result<PoolReport, String> {
    let mut host = Host {
        pool,
        trial,
        queue: EventQueue::new(),
        rng: Rng::new(seed),
        devices: BTreeMap::new(),
        functions: BTreeMap::new(),
        instances: BTreeMap::new(),
        names: BTreeSet::new(),
        lost: BTreeSet::new(),
        most: BTreeMap::new(),
        least: BTreeMap::new(),
        unmet: BTreeSet::new(),
        below: BTreeMap::new(),
        fits: BTreeMap::new(),
        failed: BTreeMap::new(),
        ready: None,
        requests: BTreeMap::new(),
        runs: 0,
        wake: None,
        last_arrival: None,
        story: Vec::new(),
        report: PoolReport::default(),
    };
    match host.run() {
        Ok(()) => Ok(host.report),
        Err(fault) => {
            let from = host.story.len().saturating_sub(40);
            let story = host.story[from..].join("\n  ");
            Err(format!("seed {seed}, at {}: {fault}\n  {story}", host.queue.now()))
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Happening {
    Arrival(u64),
    Report(InstanceId, InstanceReport),
    Finished(RequestId, u64, Duration),
    Found(usize),
    Deployed(usize),
    Fault,
    Wake,
}

#[derive(Debug)]
struct Instance {
    function: FunctionId,
    parts: Vec<Part>,
    up: bool,
    /// Its memory is taken.
    there: bool,
    parking: bool,
    unparking: bool,
    draining: bool,
    stopped: bool,
    requests: BTreeSet<RequestId>,
}

#[derive(Debug)]
struct Request {
    function: FunctionId,
    deadline: Option<Timestamp>,
    /// The instance and the number of the run.
    on: Option<(InstanceId, u64)>,
}

struct Host<'a> {
    pool: &'a mut dyn Pool,
    trial: &'a PoolTrial,
    queue: EventQueue<Happening>,
    rng: Rng,
    devices: BTreeMap<GpuId, DeviceSpec>,
    /// Whether they may be called; those that were removed have instances yet.
    functions: BTreeMap<FunctionId, bool>,
    instances: BTreeMap<InstanceId, Instance>,
    names: BTreeSet<InstanceId>,
    /// Instances that a lost device ended.
    lost: BTreeSet<InstanceId>,
    /// The maximum of each live function; the minimum, and those without slices or devices for it.
    most: BTreeMap<FunctionId, usize>,
    least: BTreeMap<FunctionId, usize>,
    unmet: BTreeSet<FunctionId>,
    /// Since when functions have been below their minimum, and fit a device; when a start of them failed last.
    below: BTreeMap<FunctionId, Timestamp>,
    fits: BTreeMap<FunctionId, Timestamp>,
    failed: BTreeMap<FunctionId, Timestamp>,
    /// The function of which an instance is ready just now: that may take the place of another.
    ready: Option<FunctionId>,
    requests: BTreeMap<RequestId, Request>,
    runs: u64,
    wake: Option<Timestamp>,
    last_arrival: Option<Timestamp>,
    story: Vec<String>,
    report: PoolReport,
}

type Fault = String;

impl Host<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        let trial = self.trial;
        // A few functions come before the first device.
        for (index, (function, _)) in trial.functions.iter().enumerate() {
            if index % 2 == 0 {
                self.deploy(index)?;
            } else {
                self.functions.insert(*function, false);
                self.queue.schedule(Timestamp::from_millis(3), Happening::Deployed(index));
            }
        }
        for index in 0..trial.devices.len() {
            let at = Timestamp::from_millis(if index == 0 { 2 } else { 4 });
            self.queue.schedule(at, Happening::Found(index));
        }
        self.queue.schedule(Timestamp::from_millis(1), Happening::Arrival(0));
        if trial.faults {
            self.queue.schedule(Timestamp::from_millis(1_000), Happening::Fault);
        }
        while let Some((now, happening)) = self.queue.pop() {
            self.happen(now, happening)?;
            self.agree()?;
            self.wake_up();
            if let Some(last) = self.last_arrival {
                let short = self.least.iter().find(|(function, least)| self.staying(**function) < **least);
                if self.requests.is_empty() && short.is_none() {
                    return Ok(());
                }
                if now > last + trial.patience {
                    if let Some((function, least)) = short.filter(|_| self.requests.is_empty()) {
                        let has = self.staying(*function);
                        return Err(format!("{function} has {has} of the {least} instances that are kept"));
                    }
                    let waiting: Vec<_> = self.requests.iter().take(4).collect();
                    let fault = format!("{} requests have not ended: {waiting:?}", self.requests.len());
                    return Err(fault);
                }
            }
        }
        Err("nothing happens any more, and requests have not ended".to_owned())
    }

    fn wake_up(&mut self) {
        let Some(next) = self.pool.next_deadline() else { return };
        let now = self.queue.now();
        let next = next.max(now + Duration::from_nanos(1));
        if self.wake.is_none_or(|wake| wake <= now || next < wake) {
            self.wake = Some(next);
            self.queue.schedule(next, Happening::Wake);
        }
    }

    /// Tells the pool something that it has to take.
    fn tell(&mut self, event: PoolEvent) -> Result<(), Fault> {
        let told = format!("{} {event:?}", self.queue.now());
        let brief: String = told.chars().take(240).collect();
        self.story.push(brief);
        let mut actions = Vec::new();
        let taken = self.pool.handle(self.queue.now(), event, &mut actions);
        taken.map_err(|error| format!("refused: {error}"))?;
        for action in actions {
            self.story.push(format!("    {action:?}").chars().take(240).collect());
            self.obey(action)?;
        }
        self.pool.invariants();
        Ok(())
    }

    /// Tells the pool something that it must not take.
    fn nonsense(&mut self, event: PoolEvent) -> Result<(), Fault> {
        let (told, mut actions) = (format!("{event:?}"), Vec::new());
        let taken = self.pool.handle(self.queue.now(), event, &mut actions);
        if taken.is_ok() || !actions.is_empty() {
            return Err(format!("it took {told}, and ordered {actions:?}"));
        }
        self.pool.invariants();
        Ok(())
    }

    fn happen(&mut self, now: Timestamp, happening: Happening) -> Result<(), Fault> {
        match happening {
            Happening::Arrival(number) => self.arrival(now, number),
            Happening::Report(instance, report) => self.reported(instance, report),
            Happening::Finished(request, run, took) => {
                let on = self.requests.get(&request).and_then(|found| found.on);
                let Some((id, _)) = on.filter(|(_, on)| *on == run) else { return Ok(()) };
                self.requests.remove(&request);
                if let Some(instance) = self.instances.get_mut(&id) {
                    instance.requests.remove(&request);
                }
                self.report.served += 1;
                self.report.finished = now;
                self.tell(PoolEvent::Done { request, took })
            }
            Happening::Found(index) => {
                let (gpu, spec) = self.trial.devices[index].clone();
                self.devices.insert(gpu, spec.clone());
                self.tell(PoolEvent::DeviceJoined { gpu, spec: spec.clone() })?;
                self.nonsense(PoolEvent::DeviceJoined { gpu, spec })
            }
            Happening::Deployed(index) => {
                let function = self.trial.functions[index].0;
                if self.instances.values().any(|one| one.function == function) {
                    let later = now + Duration::from_secs(1);
                    self.queue.schedule(later, Happening::Deployed(index));
                    return Ok(());
                }
                self.deploy(index)
            }
            Happening::Wake => {
                self.wake = None;
                self.tell(PoolEvent::DeadlineReached)
            }
            Happening::Fault => self.fault(now),
        }
    }

    fn deploy(&mut self, index: usize) -> Result<(), Fault> {
        let (function, spec) = self.trial.functions[index].clone();
        self.functions.insert(function, true);
        self.most.insert(function, spec.max_instances as usize);
        self.least.insert(function, spec.min_instances as usize);
        self.tell(PoolEvent::FunctionAdded { function, spec: Box::new(spec) })
    }

    fn arrival(&mut self, now: Timestamp, number: u64) -> Result<(), Fault> {
        let live: Vec<FunctionId> =
            self.functions.iter().filter(|(_, live)| **live).map(|(function, _)| *function).collect();
        if let Some(&function) = self.rng.pick(&live) {
            let request = RequestId::new(number);
            let patience = self.rng.duration(Duration::from_millis(50), Duration::from_secs(20));
            let deadline = (self.trial.faults && self.rng.percent(30)).then(|| now + patience);
            self.requests.insert(request, Request { function, deadline, on: None });
            self.tell(PoolEvent::Arrived { request, function, arrived: now, deadline })?;
        }
        if number + 1 < self.trial.requests {
            let gap = self.rng.duration(Duration::ZERO, self.trial.every.saturating_mul(2));
            // Quiet times let keep-alives and windows end.
            let pause = if self.rng.percent(1) { Duration::from_secs(30) } else { Duration::ZERO };
            self.queue.schedule(now + gap + pause, Happening::Arrival(number + 1));
        } else {
            self.last_arrival = Some(now);
        }
        Ok(())
    }

    /// Requests of an instance that is gone wait again.
    fn end(&mut self, id: InstanceId) -> Option<Instance> {
        let instance = self.instances.remove(&id)?;
        if !instance.up {
            self.failed.insert(instance.function, self.queue.now());
        }
        for request in &instance.requests {
            if let Some(request) = self.requests.get_mut(request) {
                request.on = None;
            }
        }
        Some(instance)
    }

    fn reported(&mut self, id: InstanceId, report: InstanceReport) -> Result<(), Fault> {
        if let Some(instance) = self.instances.get_mut(&id) {
            match report {
                InstanceReport::Ready => {
                    instance.up = true;
                    self.ready = Some(instance.function);
                }
                InstanceReport::Parked => (instance.parking, instance.there) = (false, false),
                InstanceReport::Unparked => instance.unparking = false,
                _ => {
                    self.end(id);
                }
            }
        } else if self.rng.percent(50) {
            // The host of a lost device may report or not.
            return Ok(());
        }
        self.tell(PoolEvent::Instance { instance: id, report })?;
        self.ready = None;
        Ok(())
    }

    fn fault(&mut self, now: Timestamp) -> Result<(), Fault> {
        if self.last_arrival.is_some() {
            return Ok(());
        }
        let next = self.rng.duration(Duration::from_millis(10), Duration::from_secs(4));
        self.queue.schedule(now + next, Happening::Fault);
        let back = self.rng.duration(Duration::from_millis(1), Duration::from_secs(6));
        match self.rng.below(12) {
            0 | 1 => {
                let index = self.rng.below(self.trial.devices.len() as u64);
                let index = usize::try_from(index).unwrap_or(0);
                let gpu = self.trial.devices[index].0;
                if self.devices.remove(&gpu).is_none() {
                    return self.nonsense(PoolEvent::DeviceLost { gpu });
                }
                let on = |one: &Instance| one.parts.iter().any(|part| part.gpu == gpu);
                let ended: Vec<InstanceId> =
                    self.instances.iter().filter(|(_, one)| on(one)).map(|(id, _)| *id).collect();
                for id in ended {
                    self.end(id);
                    self.lost.insert(id);
                }
                self.queue.schedule(now + back, Happening::Found(index));
                self.tell(PoolEvent::DeviceLost { gpu })
            }
            2..=4 => {
                let all: Vec<InstanceId> = self.instances.keys().copied().collect();
                let Some(&id) = self.rng.pick(&all) else { return Ok(()) };
                self.end(id);
                self.tell(PoolEvent::Instance { instance: id, report: InstanceReport::Gone })
            }
            5 | 6 => {
                let waits = |found: &Request| found.on.is_none();
                let all: Vec<RequestId> =
                    self.requests.iter().filter(|(_, found)| waits(found)).map(|(id, _)| *id).collect();
                let Some(&request) = self.rng.pick(&all) else { return Ok(()) };
                self.requests.remove(&request);
                self.report.cancelled += 1;
                self.tell(PoolEvent::Cancelled { request })?;
                self.nonsense(PoolEvent::Cancelled { request })
            }
            7 => {
                let index = self.rng.below(self.trial.functions.len() as u64);
                let index = usize::try_from(index).unwrap_or(0);
                let function = self.trial.functions[index].0;
                if self.functions.get(&function) != Some(&true) {
                    return self.nonsense(PoolEvent::FunctionRemoved { function });
                }
                self.functions.insert(function, false);
                self.least.remove(&function);
                self.below.remove(&function);
                self.fits.remove(&function);
                self.queue.schedule(now + back, Happening::Deployed(index));
                self.tell(PoolEvent::FunctionRemoved { function })?;
                let left = |found: &&Request| found.function == function && found.on.is_none();
                match self.requests.values().find(left) {
                    Some(request) => Err(format!("{request:?} of a removed function was not rejected")),
                    None => Ok(()),
                }
            }
            8 => {
                let all: Vec<RequestId> = self.requests.keys().copied().collect();
                let Some(&request) = self.rng.pick(&all) else { return Ok(()) };
                let Request { function, on, .. } = self.requests[&request];
                if on.is_none() {
                    self.nonsense(PoolEvent::Done { request, took: Duration::from_millis(1) })?;
                }
                self.nonsense(PoolEvent::Arrived { request, function, arrived: now, deadline: None })
            }
            9 => {
                // An old report of something that was never ordered.
                let all: Vec<InstanceId> = self.names.iter().copied().collect();
                let Some(&id) = self.rng.pick(&all) else { return Ok(()) };
                let Some(one) = self.instances.get(&id) else {
                    let report = *self.rng.pick(&OLD).unwrap_or(&InstanceReport::Gone);
                    return self.tell(PoolEvent::Instance { instance: id, report });
                };
                let report = match (one.up, one.parking, one.unparking) {
                    (false, ..) => InstanceReport::Unparked,
                    (true, false, false) => InstanceReport::Parked,
                    _ => InstanceReport::Ready,
                };
                self.tell(PoolEvent::Instance { instance: id, report })
            }
            10 => {
                let (function, spec) = self.rng.pick(&self.trial.functions).ok_or("no functions")?.clone();
                let mut min_instances = spec.min_instances;
                if min_instances > 0 && self.rng.percent(50) {
                    min_instances -= 1;
                }
                let most = self.rng.between(min_instances.max(1).into(), spec.max_instances.into());
                let max_instances = u32::try_from(most).unwrap_or(spec.max_instances);
                let event = PoolEvent::BoundsChanged { function, min_instances, max_instances };
                if self.functions.get(&function) != Some(&true) {
                    return self.nonsense(event);
                }
                self.most.insert(function, max_instances as usize);
                self.least.insert(function, min_instances as usize);
                self.tell(event)
            }
            _ => {
                let unknown = FunctionId::new(u32::MAX);
                self.nonsense(PoolEvent::FunctionRemoved { function: unknown })?;
                let request = RequestId::new(u64::MAX);
                self.nonsense(PoolEvent::Cancelled { request })
            }
        }
    }

    fn obey(&mut self, action: PoolAction) -> Result<(), Fault> {
        let name = match &action {
            PoolAction::Unmet { .. } => "unmet",
            PoolAction::Order(order) => name_of(order),
        };
        *self.report.orders.entry(name).or_insert(0) += 1;
        let order = match action {
            PoolAction::Unmet { function } => {
                self.unmet.insert(function);
                return Ok(());
            }
            PoolAction::Order(order) => order,
        };
        let now = self.queue.now();
        match order {
            PlatformAction::Profile { .. } => Err("a pool orders no profile".to_owned()),
            PlatformAction::Start { instance, function, parts, takes, parked, .. } => {
                if !self.names.insert(instance) || !self.functions.contains_key(&function) {
                    return Err("the name was used before, or there is no such function".to_owned());
                }
                let refused = self.trial.faults && self.rng.percent(5);
                let report = if refused { InstanceReport::Refused } else { InstanceReport::Ready };
                let new = Instance {
                    function,
                    parts,
                    up: false,
                    there: !parked,
                    parking: false,
                    unparking: false,
                    draining: false,
                    stopped: false,
                    requests: BTreeSet::new(),
                };
                self.instances.insert(instance, new);
                let takes = takes.saturating_add(self.rng.duration(Duration::ZERO, takes));
                self.queue.schedule(now + takes, Happening::Report(instance, report));
                let (has, most) = (self.staying(function), self.most.get(&function).copied());
                if most.is_none_or(|most| has > most) {
                    return Err(format!("{instance} is instance {has} of {function}, of at most {most:?}"));
                }
                self.fits(instance)
            }
            PlatformAction::Park { instance } => {
                let one = self.instances.get_mut(&instance).ok_or("no such instance")?;
                if !one.up
                    || !one.there
                    || one.parking
                    || one.unparking
                    || one.stopped
                    || !one.requests.is_empty()
                {
                    return Err(format!("it cannot be parked: {one:?}"));
                }
                one.parking = true;
                let takes = self.rng.duration(Duration::ZERO, Duration::from_millis(200));
                self.queue.schedule(now + takes, Happening::Report(instance, InstanceReport::Parked));
                Ok(())
            }
            PlatformAction::Unpark { instance, parts, takes } => {
                let one = self.instances.get_mut(&instance).ok_or("no such instance")?;
                if !one.up || one.there || one.unparking || one.stopped {
                    return Err(format!("it cannot be unparked: {one:?}"));
                }
                (one.parts, one.there, one.unparking) = (parts, true, true);
                self.queue.schedule(now + takes, Happening::Report(instance, InstanceReport::Unparked));
                self.fits(instance)
            }
            PlatformAction::Drain { instance } => {
                let one = self.instances.get_mut(&instance).ok_or("no such instance")?;
                if one.draining || one.stopped {
                    return Err("it drains, or was stopped".to_owned());
                }
                one.draining = true;
                let function = one.function;
                let (has, least) = (self.staying(function), self.least.get(&function).copied());
                if has < least.unwrap_or(0) && self.ready != Some(function) {
                    return Err(format!("{function} has {has} instances now, fewer than are kept"));
                }
                Ok(())
            }
            PlatformAction::Stop { instance, .. } => {
                let one = self.instances.get_mut(&instance).ok_or("no such instance")?;
                if one.stopped || !(one.requests.is_empty() || one.draining) {
                    return Err(format!("it was stopped, or runs requests: {one:?}"));
                }
                one.stopped = true;
                let takes = self.rng.duration(Duration::ZERO, Duration::from_millis(300));
                self.queue.schedule(now + takes, Happening::Report(instance, InstanceReport::Gone));
                Ok(())
            }
            PlatformAction::Dispatch { request, instance } => self.dispatch(now, request, instance),
            PlatformAction::Reject { request, reason } => {
                let found = self.requests.remove(&request).ok_or("it has ended, or its caller gave up")?;
                if found.on.is_some() {
                    return Err(format!("it was dispatched, and is rejected: {reason}"));
                }
                self.report.rejected += 1;
                self.report.finished = now;
                Ok(())
            }
            PlatformAction::Fetch { .. } | PlatformAction::Forget { .. } => Ok(()),
        }
    }

    fn dispatch(&mut self, now: Timestamp, request: RequestId, id: InstanceId) -> Result<(), Fault> {
        let found = self.requests.get_mut(&request).ok_or("it has ended, or its caller gave up")?;
        let one = self.instances.get_mut(&id).ok_or("no such instance")?;
        if found.on.is_some() || found.deadline.is_some_and(|at| at <= now) {
            return Err(format!("it runs, or its deadline has passed: {found:?}"));
        }
        let ready = one.up && one.there && !one.parking && !one.unparking;
        if !ready || one.draining || one.stopped || one.function != found.function {
            return Err(format!("the instance is not ready for it: {one:?}"));
        }
        self.runs += 1;
        found.on = Some((id, self.runs));
        one.requests.insert(request);
        let took = self.rng.duration(Duration::from_millis(5), Duration::from_millis(120));
        self.queue.schedule(now + took, Happening::Finished(request, self.runs, took));
        if self.pool.regime() == Regime::Fractional {
            return Ok(());
        }
        let places: BTreeSet<_> = self.instances[&id].parts.iter().map(place).collect();
        for (other, one) in self.instances.iter().filter(|(other, _)| **other != id) {
            if !one.requests.is_empty() && one.parts.iter().any(|part| places.contains(&place(part))) {
                return Err(format!("{other} runs there too"));
            }
        }
        Ok(())
    }

    /// Checks that the memory where an instance is holds all that is there.
    fn fits(&self, id: InstanceId) -> Result<(), Fault> {
        let instance = &self.instances[&id];
        if instance.parts.is_empty() {
            return Err("an instance without parts".to_owned());
        }
        let of = self.trial.functions.iter().find(|(function, _)| *function == instance.function);
        let devices = of.map_or(1, |(_, spec)| spec.devices);
        if devices > 1 {
            let places: BTreeSet<GpuId> = instance.parts.iter().map(|part| part.gpu).collect();
            let nodes: BTreeSet<_> =
                places.iter().map(|gpu| self.devices.get(gpu).map(|spec| spec.node)).collect();
            let parts = instance.parts.len();
            if (parts, places.len(), nodes.len()) != (devices as usize, parts, 1) {
                return Err(format!(
                    "{parts} parts on {places:?}: need {devices} different devices of one node"
                ));
            }
        }
        for part in &instance.parts {
            let spec = self.devices.get(&part.gpu).ok_or_else(|| format!("{} is not there", part.gpu))?;
            let room = match (part.slice, &spec.mig) {
                (None, None) => spec.memory,
                (Some(slice), Some(layout)) if layout.slices().contains(&slice) => {
                    layout.model().get(slice.profile).ok_or("no such profile")?.memory
                }
                _ => return Err(format!("{part:?} names no slice of {spec:?}")),
            };
            let here = self.instances.values().filter(|one| one.there).flat_map(|one| &one.parts);
            let (mut used, mut area) = (0u64, 0u64);
            for other in here.filter(|other| place(other) == place(part)) {
                used = used.saturating_add(other.share.memory().ok_or("a part without memory")?.get());
                let (time, sm) = (other.share.time().request().get(), other.share.sm().get());
                area = area.saturating_add(u64::from(time) * u64::from(sm));
            }
            if used > room.get() {
                return Err(format!("{used} bytes of {} on {:?}", room.get(), place(part)));
            }
            // 10,000 basis points of the time on as many of the SMs.
            if self.pool.regime() == Regime::Fractional && area > 100_000_000 {
                return Err(format!("{area} of 100000000 of {} are guaranteed", part.gpu));
            }
        }
        Ok(())
    }

    /// Whether a device holds another instance of a function wherever those on it lie: on a whole device there is none, on a
    /// fractional one the widest point fits in the widest gap that k instances leave at least, of k + 1 gaps.
    fn surely_fits(&self, function: FunctionId) -> bool {
        let Some((_, spec)) = self.trial.functions.iter().find(|(name, _)| *name == function) else {
            return false;
        };
        let Work::Inference { profile: Some(profile) } = &spec.work else { return false };
        let widest = profile.points().iter().map(|point| u64::from(point.sm.get())).max().unwrap_or(0);
        let regime = self.pool.regime();
        let room = |(gpu, device): (&GpuId, &DeviceSpec)| {
            let there = self.instances.values().filter(|one| one.there).flat_map(|one| &one.parts);
            let on: Vec<&Part> = there.filter(|part| part.gpu == *gpu).collect();
            let taken = |part: &&Part| part.share.memory().map_or(u64::MAX, |memory| memory.get());
            let memory = on.iter().map(taken).fold(spec.memory.get(), u64::saturating_add);
            let sms: u64 = on.iter().map(|part| u64::from(part.share.sm().get())).sum();
            let gap = 10_000u64.saturating_sub(sms) / (on.len() as u64 + 1);
            memory <= device.memory.get()
                && if regime == Regime::Whole { on.is_empty() } else { gap >= widest }
        };
        spec.devices == 1 && regime != Regime::Sliced && self.devices.iter().any(room)
    }

    /// Instances of a function that are not on their way out.
    fn staying(&self, function: FunctionId) -> usize {
        let mine = |one: &&Instance| one.function == function && !one.draining && !one.stopped;
        self.instances.values().filter(mine).count()
    }

    /// Checks that the pool's view is that of the book.
    fn agree(&mut self) -> Result<(), Fault> {
        let mut views = BTreeMap::new();
        self.pool.instances(&mut |view| {
            // One that waits for its devices was not ordered yet.
            if self.names.contains(&view.instance) {
                views.insert(view.instance, (view.function, view.requests as usize));
            }
        });
        let book = self.instances.iter().map(|(id, one)| (*id, (one.function, one.requests.len())));
        let book: BTreeMap<_, _> = book.collect();
        if views != book {
            return Err(format!("the pool's instances are {views:?}, those of the host {book:?}"));
        }
        for (&function, &least) in &self.least {
            let has = self.staying(function);
            if has >= least {
                self.unmet.remove(&function);
                self.below.remove(&function);
                self.fits.remove(&function);
                continue;
            }
            let now = self.queue.now();
            if self.surely_fits(function) {
                let fits = *self.fits.entry(function).or_insert(now);
                let failed = self.failed.get(&function).copied().unwrap_or_default();
                if now > fits.max(failed) + RESTORED {
                    return Err(format!(
                        "{function} has {has} of {least} instances, and has fitted a device since {fits}"
                    ));
                }
            } else {
                self.fits.remove(&function);
            }
            let since = *self.below.entry(function).or_insert(now);
            if now > since + SOON && !self.unmet.contains(&function) {
                return Err(format!(
                    "{function} has {has} of {least} instances since {since}, and is not unmet"
                ));
            }
        }
        for (function, _) in &self.trial.functions {
            let waits = |one: &&Request| one.function == *function && one.on.is_none();
            let (told, book) = (self.pool.waiting(*function), self.requests.values().filter(waits).count());
            if told != book {
                return Err(format!("{told} requests of {function} wait, {book} by the book"));
            }
        }
        Ok(())
    }
}

const OLD: [InstanceReport; 5] = [
    InstanceReport::Ready,
    InstanceReport::Refused,
    InstanceReport::Parked,
    InstanceReport::Unparked,
    InstanceReport::Gone,
];

const fn place(part: &Part) -> (GpuId, Option<SliceAt>) {
    (part.gpu, part.slice)
}
