//! A book of a platform's promises, kept from its events and orders alone.
//!
//! # Problem
//! A check of a platform's promises must be independent of the platform. A [`Book`] receives each event before the platform and
//! each order after it, and derives the possible next steps of every instance, device and request. It never looks at the platform
//! or at the simulation, so the same book goes with any host.
//!
//! # Rules
//! - **requests**: each is answered once or rejected once; dispatched while it waits, before its deadline, to a ready instance of
//!   its function with fewer requests than [`room`]; rejected only while it waits, for a valid reason;
//! - **instances**: a name is used once; orders follow the life of an instance (see [`gshare_sched::platform`]) and come once; no
//!   order comes after the instance is gone, by a report or with its device. An instance with requests is never parked, and stopped
//!   only if it has not finished them by its deadline. On a fractional device it stays after a return at least as long as the shortest
//!   return of its function took;
//! - **bounds**: a function has at most `max_instances` instances that start, are ready or are parked;
//! - **tenants**: no tenant has more dispatched requests at once than its limit of processes, and its instances have no more than
//!   its part of the memory at each start;
//! - **devices**: parts lie on present devices. On a fractional device guaranteed areas (time x SMs) and memory fit. On a slice
//!   memory fits, and one of its instances runs at a time. On a whole device memory fits and one instance runs at a time. Starting,
//!   draining and stopping instances count until they are gone;
//! - **the end**: [`Book::quiet`] and [`Book::empty`].

mod device;
mod requests;

pub(crate) use device::Device;

use super::deadlines::{Deadlines, Due};
use super::outcome::{Area, FunctionOutcome, Spans, device_time};
use super::tenants::Tenants;
use gshare_core::profile::ProfileTable;
use gshare_core::{Duration, FunctionId, GpuId, InstanceId, RequestId, TenantId, Timestamp};
use gshare_sched::platform::{
    InstanceReport, Life, Part, PlatformAction, PlatformEvent, StopCause, Weights, Work,
};
use std::collections::{BTreeMap, BTreeSet};

/// The most requests of an instance at once: one in each of its pipeline's parts, else the largest measured batch.
pub fn room(work: &Work, profile: Option<&ProfileTable>, parts: &[Part]) -> usize {
    match work {
        Work::Inference { .. } => {
            let batches =
                profile.into_iter().flat_map(ProfileTable::points).map(|point| point.batch as usize);
            batches.max().unwrap_or(1)
        }
        Work::Pipeline { .. } => parts.len().max(1),
        Work::Training { .. } => 0,
    }
}

#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) function: FunctionId,
    pub(crate) parts: Vec<Part>,
    life: Life,
    /// Whether its parts hold their shares of their devices.
    pub(crate) placed: bool,
    /// An unanswered `Park` or `Unpark`.
    pub(crate) moving: bool,
    room: usize,
    pub(crate) requests: Vec<RequestId>,
    /// The time from which the instance could serve.
    pub(crate) ready: Option<Timestamp>,
    /// The time of its placement.
    since: Timestamp,
    /// Whether it is on its way back to the devices from which it was parked, and when it last came back.
    copies: bool,
    /// Whether its processes lived at its last parking.
    lives: bool,
    back: Option<Timestamp>,
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) function: FunctionId,
    arrived: Timestamp,
    pub(crate) deadline: Option<Timestamp>,
    pub(crate) on: Option<InstanceId>,
    attempts: u32,
    cancelled: bool,
}

#[derive(Debug)]
pub(crate) struct Function {
    work: Work,
    profile: Option<ProfileTable>,
    tenant: TenantId,
    /// The bytes of an instance on each of its devices.
    memory: u64,
    weights: Option<Weights>,
    devices: u32,
    slo: Option<Duration>,
    min_instances: u32,
    max_instances: u32,
    /// The instances that start, are ready or are parked.
    pub(crate) instances: u32,
    removed: bool,
    held: Area,
    shortest_return: Option<Duration>,
    outcome: FunctionOutcome,
}

/// The promises between a platform and its host, kept independently of both.
#[derive(Debug, Default)]
pub struct Book {
    pub(crate) devices: BTreeMap<GpuId, Device>,
    pub(crate) functions: BTreeMap<FunctionId, Function>,
    pub(crate) instances: BTreeMap<InstanceId, Instance>,
    pub(crate) names: BTreeSet<InstanceId>,
    pub(crate) requests: BTreeMap<RequestId, Request>,
    tenants: Tenants,
    /// The bounds of the platform, if it promises any, and the request of the present event, if it is new.
    pub(super) bounds: Option<Deadlines>,
    arrived: Option<RequestId>,
    /// The times of held devices and slices, if the plan has them recorded.
    pub(super) spans: Option<Spans>,
}

impl Book {
    /// An empty book.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes an event just before the platform gets it.
    ///
    /// # Errors
    /// A sentence about an impossible event of the host.
    pub fn told(&mut self, now: Timestamp, event: &PlatformEvent) -> Result<(), String> {
        self.arrived = None;
        if let Some(bounds) = &self.bounds {
            bounds.keep(now)?;
        }
        match event {
            PlatformEvent::DeviceFound { gpu, spec } => {
                let new = self.devices.insert(*gpu, Device::new(spec.clone()));
                new.map_or(Ok(()), |_| Err(format!("the host finds {gpu} twice")))?;
            }
            PlatformEvent::DeviceLost { gpu } => {
                for id in self.on_device(*gpu) {
                    self.forget(now, id);
                }
                self.devices.remove(gpu).ok_or_else(|| format!("the host loses {gpu} twice"))?;
            }
            PlatformEvent::FunctionDeployed { function, spec } => {
                self.tenants.has_function(spec.tenant);
                let outcome = FunctionOutcome { slo: spec.slo, ..FunctionOutcome::default() };
                let profile = match &spec.work {
                    Work::Inference { profile } => profile.clone(),
                    _ => None,
                };
                let mut entry = Function {
                    work: spec.work.clone(),
                    profile,
                    tenant: spec.tenant,
                    memory: spec.memory_per_device().get(),
                    weights: spec.weights,
                    devices: spec.devices,
                    slo: spec.slo,
                    min_instances: spec.min_instances,
                    max_instances: spec.max_instances,
                    instances: 0,
                    removed: false,
                    held: 0,
                    shortest_return: None,
                    outcome,
                };
                // A removed function goes on with its counts.
                if let Some(before) = self.functions.remove(function) {
                    (entry.outcome, entry.held) = (before.outcome, before.held);
                }
                self.functions.insert(*function, entry);
            }
            PlatformEvent::BoundsChanged { function, min_instances, max_instances } => {
                let of = self.function(*function)?;
                (of.min_instances, of.max_instances) = (*min_instances, *max_instances);
            }
            PlatformEvent::FunctionRemoved { function } => {
                self.function(*function)?.removed = true;
                if let Some(bounds) = &mut self.bounds {
                    let all = self.instances.iter().filter(|(_, one)| one.function == *function);
                    for (id, _) in all.filter(|(_, one)| !matches!(one.life, Life::Draining | Life::Stopped))
                    {
                        bounds.begins(now, *id, Due::Drain, Duration::ZERO);
                    }
                }
            }
            PlatformEvent::RequestArrived { request, function, deadline } => {
                self.function(*function)?.outcome.requests += 1;
                let new = Request {
                    function: *function,
                    arrived: now,
                    deadline: *deadline,
                    on: None,
                    attempts: 0,
                    cancelled: false,
                };
                self.arrived = Some(*request);
                if let Some(bounds) = &mut self.bounds {
                    bounds.waits(*request, *function, (now, *deadline));
                }
                let tenant = self.function(*function)?.tenant;
                self.tenants.waits(tenant);
                let old = self.requests.insert(*request, new);
                old.map_or(Ok(()), |_| Err(format!("the host has two of {request}")))?;
            }
            PlatformEvent::RequestDone { request, .. } => self.done(now, *request)?,
            PlatformEvent::RequestCancelled { request } => {
                let found = self.requests.get_mut(request);
                found.ok_or_else(|| format!("{request} is cancelled after its end"))?.cancelled = true;
            }
            PlatformEvent::Instance { instance, report } => self.reported(now, *instance, *report)?,
            PlatformEvent::ProfileLearned { function, profile, memory } => {
                let of = self.function(*function)?;
                of.profile = Some(profile.clone());
                let devices = u64::from(of.devices.max(1));
                of.memory = memory.map_or(of.memory, |memory| memory.get().div_ceil(devices));
            }
            PlatformEvent::TenantLimited { tenant, limits } => self.tenants.limited(*tenant, limits),
            // A `Start` follows.
            PlatformEvent::InstanceFound { .. }
            | PlatformEvent::NodesChanged { .. }
            | PlatformEvent::DeadlineReached => {}
        }
        Ok(())
    }

    /// Checks an order of the platform and notes it.
    ///
    /// # Errors
    /// A sentence about the broken promise.
    pub fn ordered(&mut self, now: Timestamp, action: &PlatformAction) -> Result<(), String> {
        match action {
            PlatformAction::Dispatch { request, instance } => self.dispatched(now, *request, *instance),
            PlatformAction::Reject { request, reason } => self.rejected(now, *request, *reason),
            PlatformAction::Start { instance, function, parts, parked, takes, .. } => {
                self.begins(now, *instance, Due::Start, *takes);
                self.started(now, *instance, *function, parts, *parked)
            }
            PlatformAction::Park { instance, .. } => {
                let found = self.ready_for("parked", *instance)?;
                if found.life != Life::Ready || !found.requests.is_empty() {
                    let (life, count) = (found.life, found.requests.len());
                    return Err(format!("{instance} is parked while it is {life} and has {count} requests"));
                }
                (found.life, found.moving) = (Life::Parked, true);
                let (back, function) = (found.back, found.function);
                if let (Some(back), Some(took)) = (back, self.function(function)?.shortest_return)
                    && now.saturating_since(back) < took
                {
                    return Err(format!(
                        "{instance} is parked again {} after a return",
                        now.saturating_since(back)
                    ));
                }
                self.begins(now, *instance, Due::Move, Duration::ZERO);
                Ok(())
            }
            PlatformAction::Unpark { instance, parts, takes, .. } => {
                let found = self.ready_for("unparked", *instance)?;
                if found.life != Life::Parked {
                    return Err(format!("{instance} is unparked while it is {}", found.life));
                }
                (found.moving, found.since) = (true, now);
                let gpus = |parts: &[Part]| parts.iter().map(|part| part.gpu).collect::<BTreeSet<_>>();
                found.copies = found.lives && gpus(&found.parts) == gpus(parts);
                found.parts.clone_from(parts);
                self.begins(now, *instance, Due::Move, *takes);
                self.place(*instance)
            }
            PlatformAction::Drain { instance } => {
                let found = self.there_for("drained", *instance)?;
                if !matches!(found.life, Life::Ready | Life::Parked) {
                    return Err(format!("{instance} is drained while it is {}", found.life));
                }
                found.life = Life::Draining;
                let function = found.function;
                self.function(function)?.instances -= 1;
                self.begins(now, *instance, Due::Drain, Duration::ZERO);
                Ok(())
            }
            PlatformAction::Stop { instance, cause } => self.stopped(*instance, *cause),
            PlatformAction::Profile { function } => match self.function(*function)? {
                entry if entry.removed => Err(format!("{function} is profiled, but it was removed")),
                Function { work: Work::Inference { profile: None }, .. } => Ok(()),
                _ => Err(format!("{function} is profiled, but it came with a profile")),
            },
            PlatformAction::Fetch { function, .. } => match self.function(*function)? {
                entry if entry.removed => Err(format!("{function} is fetched, but it was removed")),
                _ => Ok(()),
            },
            PlatformAction::Forget { .. } => Ok(()),
        }
    }

    /// Whether the platform may still hear of the instance.
    pub fn has_instance(&self, instance: InstanceId) -> bool {
        self.instances.contains_key(&instance)
    }

    /// The state of an instance in the platform's view.
    pub fn life(&self, instance: InstanceId) -> Option<Life> {
        self.instances.get(&instance).map(|found| found.life)
    }

    /// Whether the request was dispatched to the instance and has no answer yet.
    pub fn runs_on(&self, request: RequestId, instance: InstanceId) -> bool {
        self.requests.get(&request).is_some_and(|found| found.on == Some(instance))
    }

    /// Whether the request is open and its caller still waits.
    pub fn is_open(&self, request: RequestId) -> bool {
        self.requests.get(&request).is_some_and(|found| !found.cancelled)
    }

    /// The function and the arrival of an open request.
    pub fn asked(&self, request: RequestId) -> Option<(FunctionId, Timestamp)> {
        self.requests.get(&request).map(|found| (found.function, found.arrived))
    }

    /// Checks that no request and no order is open.
    ///
    /// # Errors
    /// A sentence about an open request or order.
    pub fn quiet(&self) -> Result<(), String> {
        if let Some((request, found)) = self.requests.first_key_value() {
            return Err(match found.on {
                Some(instance) => format!("{request} of {} is still on {instance}", found.function),
                None => format!(
                    "{request} of {} still waits, with {} others",
                    found.function,
                    self.requests.len() - 1
                ),
            });
        }
        let open = |(_, one): &(&InstanceId, &Instance)| {
            one.moving || matches!(one.life, Life::Starting | Life::Draining | Life::Stopped)
        };
        match self.instances.iter().find(open) {
            Some((id, one)) => Err(format!("{id} of {} is still {}", one.function, one.life)),
            None => Ok(()),
        }
    }

    /// Checks the state after an event and its orders.
    ///
    /// # Errors
    /// A sentence about the broken promise.
    pub fn settled(&self) -> Result<(), String> {
        let Some((request, found)) = self.arrived.and_then(|one| Some((one, self.requests.get(&one)?)))
        else {
            return Ok(());
        };
        if let Some(bounds) = &self.bounds {
            bounds.may_wait(request, found.function)?;
        }
        match self.functions.get(&found.function) {
            Some(function) if found.on.is_none() => self.tenants.may_wait(function.tenant),
            _ => Ok(()),
        }
    }

    /// Checks that each function has its minimum of instances, which fit together. Training jobs are between two starts at times.
    ///
    /// # Errors
    /// A sentence about a function with fewer.
    pub fn minimums(&self) -> Result<(), String> {
        let lacks = |of: &&Function| {
            of.instances < of.min_instances && !of.removed && !matches!(of.work, Work::Training { .. })
        };
        let found = self.functions.iter().find(|(_, of)| self.bounds.is_some() && lacks(of));
        found.map_or(Ok(()), |(function, of)| {
            Err(format!("{function} has {} of {} instances", of.instances, of.min_instances))
        })
    }

    fn begins(&mut self, now: Timestamp, instance: InstanceId, due: Due, expected: Duration) {
        if let Some(bounds) = &mut self.bounds {
            bounds.begins(now, instance, due, expected);
        }
    }

    /// Checks that nothing is left at all.
    ///
    /// # Errors
    /// A sentence about a leftover.
    pub fn empty(&self) -> Result<(), String> {
        self.quiet()?;
        match self.instances.first_key_value() {
            Some((id, one)) => Err(format!("{id} of {} is still {}", one.function, one.life)),
            None => Ok(()),
        }
    }

    /// The outcome of each function, at `now`.
    pub(super) fn outcomes(&mut self, now: Timestamp) -> Vec<FunctionOutcome> {
        let left: Vec<InstanceId> = self.instances.keys().copied().collect();
        for id in left {
            self.forget(now, id);
        }
        let functions = core::mem::take(&mut self.functions);
        let finish = |function: Function| {
            let mut outcome = function.outcome;
            outcome.latencies.sort_unstable();
            outcome.held = device_time(function.held);
            outcome
        };
        functions.into_values().map(finish).collect()
    }

    fn function(&mut self, function: FunctionId) -> Result<&mut Function, String> {
        self.functions.get_mut(&function).ok_or_else(|| format!("{function} was never deployed"))
    }

    /// The instance of an order.
    fn there_for(&mut self, what: &str, id: InstanceId) -> Result<&mut Instance, String> {
        let known = self.names.contains(&id);
        self.instances.get_mut(&id).ok_or_else(|| {
            let state = if known { "is gone" } else { "was never started" };
            format!("{id} is {what}, but it {state}")
        })
    }

    /// The instance of a move, which must have answered its earlier order.
    fn ready_for(&mut self, what: &str, id: InstanceId) -> Result<&mut Instance, String> {
        let found = self.there_for(what, id)?;
        if found.moving {
            return Err(format!("{id} is {what} before it has answered that it is parked or unparked"));
        }
        Ok(found)
    }

    /// The instances with a part on the device, or parked from it, in the order of their names.
    fn on_device(&self, gpu: GpuId) -> Vec<InstanceId> {
        let there = |one: &Instance| one.parts.iter().any(|part| part.gpu == gpu);
        self.instances.iter().filter(|(_, one)| there(one)).map(|(id, _)| *id).collect()
    }

    fn started(
        &mut self,
        now: Timestamp,
        id: InstanceId,
        function: FunctionId,
        parts: &[Part],
        parked: bool,
    ) -> Result<(), String> {
        if !self.names.insert(id) {
            return Err(format!("{id} is started, but its name was used before"));
        }
        let up = |one: &&Instance| one.function == function && matches!(one.life, Life::Ready | Life::Parked);
        let up = u32::try_from(self.instances.values().filter(up).count()).unwrap_or(u32::MAX);
        let entry = self.function(function)?;
        if entry.removed {
            return Err(format!("{id} is started, but {function} was removed"));
        }
        entry.instances += 1;
        entry.outcome.starts += 1;
        // On slices a replacement starts before the old instance drains.
        let replaces = up == entry.max_instances && parts.iter().all(|part| part.slice.is_some());
        if entry.instances > entry.max_instances + u32::from(replaces) {
            return Err(format!(
                "{id} is instance {} of {function}, which may have {}",
                entry.instances, entry.max_instances
            ));
        }
        let needed = match entry.work {
            Work::Training { workers, .. } => workers,
            _ => entry.devices,
        };
        if !matches!(entry.work, Work::Pipeline { .. }) && parts.len() != needed as usize {
            return Err(format!("{id} of {function} has {} parts, not {needed}", parts.len()));
        }
        let new = Instance {
            function,
            parts: parts.to_vec(),
            life: Life::Starting,
            placed: false,
            moving: false,
            room: room(&entry.work, entry.profile.as_ref(), parts),
            requests: Vec::new(),
            ready: None,
            since: now,
            lives: false,
            copies: false,
            back: None,
        };
        let tenant = entry.tenant;
        self.instances.insert(id, new);
        self.check_memory_of(tenant)?;
        self.check_processes_of(tenant)?;
        if parked {
            // A parked start has no placement until the instance is ready.
            return Ok(());
        }
        self.place(id)
    }

    fn check_processes_of(&self, tenant: TenantId) -> Result<(), String> {
        let may = self.tenants.most_processes(tenant);
        let of = |one: &Instance| match self.functions.get(&one.function) {
            Some(function) if function.tenant == tenant && function.devices > 1 => 1,
            Some(function) if function.tenant == tenant => one.parts.len(),
            _ => 0,
        };
        let has: usize = self.instances.values().map(of).sum();
        match has > may as usize {
            true => Err(format!("the instances of {tenant} have {has} processes, and may have {may}")),
            false => Ok(()),
        }
    }

    fn check_memory_of(&self, tenant: TenantId) -> Result<(), String> {
        let Some(part) = self.tenants.part_of_memory(tenant) else { return Ok(()) };
        let own = |one: &&Instance| {
            self.functions.get(&one.function).is_some_and(|function| function.tenant == tenant)
        };
        let parts = self.instances.values().filter(own).flat_map(|one| &one.parts);
        let has: u64 = parts.filter_map(|part| part.share.memory()).map(|memory| memory.get()).sum();
        let all: u64 = self.devices.values().map(|device| device.spec.memory.get()).sum();
        let may = u128::from(all) * u128::from(part.get()) / 10_000;
        match u128::from(has) > may {
            true => Err(format!("the instances of {tenant} have {has} bytes, and may have {may}")),
            false => Ok(()),
        }
    }

    /// Takes the shares of the instance's parts on their devices.
    fn place(&mut self, id: InstanceId) -> Result<(), String> {
        let Some(instance) = self.instances.get_mut(&id) else { return Ok(()) };
        if instance.parts.is_empty() {
            return Err(format!("{id} has no parts"));
        }
        instance.placed = true;
        let function = self.functions.get(&instance.function);
        let needs = function.map_or((0, None), |function| (function.memory, function.weights));
        if function.is_some_and(|function| function.devices > 1) {
            let places: BTreeSet<_> = instance.parts.iter().map(|part| part.gpu).collect();
            let node = |gpu| self.devices.get(gpu).map(|device| device.spec.node);
            let nodes: BTreeSet<_> = places.iter().map(node).collect();
            if places.len() != instance.parts.len() || nodes.len() != 1 {
                return Err(format!("{id} is spread over {places:?}: need different devices of one node"));
            }
        }
        for part in &instance.parts {
            let Some(device) = self.devices.get_mut(&part.gpu) else {
                return Err(format!("{id} has a part on {}, which is not there", part.gpu));
            };
            device.take(id, part, needs)?;
        }
        Ok(())
    }

    /// Gives the instance's shares of its devices back, and counts the time of holding them.
    fn unplace(&mut self, now: Timestamp, id: InstanceId) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if !core::mem::take(&mut instance.placed) {
            return;
        }
        let Some(function) = self.functions.get_mut(&instance.function) else { return };
        let time = u128::from(now.saturating_since(instance.since).as_nanos());
        for part in &instance.parts {
            if let Some(spans) = &mut self.spans {
                spans.entry((part.gpu, part.slice)).or_default().push((instance.since, now));
            }
            if let Some(device) = self.devices.get_mut(&part.gpu) {
                function.held += time * u128::from(device.held(part, function.memory));
                device.give_back(id, part, (function.memory, function.weights));
            }
        }
    }

    fn reported(&mut self, now: Timestamp, id: InstanceId, report: InstanceReport) -> Result<(), String> {
        let Some(found) = self.instances.get_mut(&id) else {
            return Err(format!("the host tells that {id} is {report:?}, but it is gone"));
        };
        match (report, found.life) {
            // An order to stop was faster.
            (InstanceReport::Ready | InstanceReport::Unparked, Life::Stopped) => found.moving = false,
            (InstanceReport::Ready, _) => {
                self.bounds.iter_mut().for_each(|bounds| bounds.ends(id, Due::Start));
                found.life = if found.placed { Life::Ready } else { Life::Parked };
                found.ready = Some(now);
            }
            (InstanceReport::Parked | InstanceReport::Unloaded, _) => {
                self.bounds.iter_mut().for_each(|bounds| bounds.ends(id, Due::Move));
                (found.moving, found.lives) = (false, report == InstanceReport::Parked);
                self.unplace(now, id);
            }
            (InstanceReport::Unparked, life) => {
                self.bounds.iter_mut().for_each(|bounds| bounds.ends(id, Due::Move));
                found.moving = false;
                // A draining instance was parked, and stays in its new state.
                found.life = if life == Life::Parked { Life::Ready } else { life };
                let (took, function) = (now.saturating_since(found.since), found.function);
                let fractional = |part: &Part| self.devices.get(&part.gpu).is_some_and(Device::is_fractional);
                if found.copies && found.parts.iter().all(fractional) {
                    found.back = Some(now);
                    let shortest = &mut self.function(function)?.shortest_return;
                    *shortest = Some(shortest.map_or(took, |before| before.min(took)));
                }
            }
            (InstanceReport::Completed, _) => {
                let function = found.function;
                self.function(function)?.outcome.completed += 1;
                self.forget(now, id);
            }
            (InstanceReport::Refused | InstanceReport::Gone, _) => self.forget(now, id),
        }
        Ok(())
    }

    /// Forgets a departed instance; its requests wait again.
    fn forget(&mut self, now: Timestamp, id: InstanceId) {
        self.unplace(now, id);
        self.bounds.iter_mut().for_each(|bounds| bounds.over(id));
        let Some(gone) = self.instances.remove(&id) else { return };
        self.release(&gone.parts, &gone.requests);
        if let Some(function) = self.functions.get(&gone.function) {
            self.tenants.ended(function.tenant, gone.requests.len());
        }
        if !matches!(gone.life, Life::Draining | Life::Stopped)
            && let Some(function) = self.functions.get_mut(&gone.function)
        {
            function.instances -= 1;
        }
    }

    fn count_running(&mut self, parts: &[Part], by: isize) {
        for part in parts {
            let Some(device) = self.devices.get_mut(&part.gpu) else { continue };
            let slice = part.slice.and_then(|at| device.slices.iter_mut().find(|slice| slice.at == at));
            let running = slice.map_or(&mut device.running, |slice| &mut slice.running);
            *running = running.saturating_add_signed(by);
        }
    }

    fn stopped(&mut self, id: InstanceId, cause: StopCause) -> Result<(), String> {
        let found = self.there_for("stopped", id)?;
        if found.life == Life::Stopped {
            return Err(format!("{id} is stopped twice"));
        }
        let may_lose = cause == StopCause::DrainTimedOut;
        if !found.requests.is_empty() && !may_lose {
            return Err(format!(
                "{id} is stopped ({cause:?}) while it has {} requests",
                found.requests.len()
            ));
        }
        let counted = found.life != Life::Draining;
        found.life = Life::Stopped;
        let function = found.function;
        self.bounds.iter_mut().for_each(|bounds| bounds.over(id));
        let function = self.function(function)?;
        function.instances -= u32::from(counted);
        function.outcome.migrated += u64::from(cause == StopCause::Replaced);
        Ok(())
    }
}
