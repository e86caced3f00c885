//! Processes of instances: order, start and end, and the reports that follow about the instance.

use super::measuring::LATE;
use super::{Host, Instance, Known, Launch, Move, Order, Process, Version, client};
use crate::api::ApiError;
use crate::running::Running;
use crate::traces::Load;
use gshare_core::{FunctionId, GpuId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::platform::{InstanceReport, Life, Moving, Part, PlatformAction, PlatformEvent};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

impl Host {
    /// Ends an instance that refused or broke a connection. Its waiting requests go to other instances.
    pub fn unreachable(&mut self, instance: InstanceId) {
        if let Some(known) = self.instances.get_mut(&instance) {
            known.ends = true;
        }
        self.kill(instance);
    }

    /// A process of an instance has started.
    pub fn started(
        &mut self,
        now: Timestamp,
        instance: InstanceId,
        index: usize,
        process: impl Running + 'static,
    ) {
        let leaves = self.leaves(instance);
        let Some(known) = self.instances.get_mut(&instance) else {
            // The instance's device was lost before the process started.
            process.kill();
            self.leaving.insert((instance, index), Box::new(process));
            return;
        };
        // Another process of the instance may have failed meanwhile.
        let unwanted = known.ends || leaves;
        let trains = self.versions.get(&known.function).is_some_and(|of| of.trains());
        let Some(place) = known.processes.get_mut(index) else { return };
        if unwanted {
            process.kill();
        }
        place.process = Some(Box::new(process));
        if trains {
            // Training workers do not listen and count as ready at once.
            self.listens(now, instance, index);
        }
    }

    /// A process of an instance accepts connections. The instance is ready when all of its processes do.
    pub fn listens(&mut self, now: Timestamp, instance: InstanceId, index: usize) {
        self.last = self.last.max(now);
        let life = self.life(instance);
        let Some(known) = self.instances.get_mut(&instance).filter(|known| !known.ends) else { return };
        if let Some(process) = known.processes.get_mut(index) {
            process.listens = true;
        }
        if known.processes.iter().all(|process| process.listens) {
            let report = match life {
                Some((Life::Starting, _)) => InstanceReport::Ready,
                Some((Life::Parked | Life::Draining, Some(Moving::In))) => InstanceReport::Unparked,
                _ => return,
            };
            let (from, until, parked) = (known.ordered, self.last, report == InstanceReport::Unparked);
            known.load = Some(Load { from, until, parked });
            if let Some(of) = self.versions.get_mut(&known.function) {
                of.problem = None;
            }
            self.report(instance, report);
            self.settle();
        }
    }

    /// Whether a process has ended. If so, the requests that it served fail.
    pub fn has_ended(&mut self, now: Timestamp, instance: InstanceId, index: usize) -> bool {
        if let Some(process) = self.leaving.get_mut(&(instance, index)) {
            let ended = process.has_ended();
            if ended {
                self.gone.extend(self.leaving.remove(&(instance, index)));
            }
            return ended;
        }
        let Some(known) = self.instances.get_mut(&instance) else { return true };
        let Some(place) = known.processes.get_mut(index) else { return true };
        let ended = place.process.as_mut().is_some_and(|process| process.has_ended());
        if ended {
            place.done = place.process.as_ref().is_some_and(|process| matches!(process.end(), Some(Ok(()))));
            self.ended(now, instance, index);
        }
        ended
    }

    /// Takes the processes that have ended. Drop them without the lock: removal of cgroups and folders takes time.
    pub fn take_gone(&mut self) -> Vec<Box<dyn Running>> {
        core::mem::take(&mut self.gone)
    }

    /// A process could not start, or its trials failed.
    pub fn failed(&mut self, now: Timestamp, instance: InstanceId, index: usize, why: String) {
        let function = self.instances.get(&instance).map(|known| known.function);
        let measured = function.and_then(|id| self.versions.get(&id)?.measures);
        if let Some(of) = measured.or(function).and_then(|id| self.versions.get_mut(&id)) {
            of.problem = Some(why);
        }
        if self.takes_turns(instance) {
            self.last = self.last.max(now);
            self.end_turn(instance);
        } else {
            self.ended(now, instance, index);
        }
        // Meanwhile the companion's share is free for other functions.
        if let Some((of, trial)) = measured.zip(function) {
            self.remove_trial(trial);
            self.trials_failed(of);
        }
        self.settle();
    }

    /// Records the reason why an instance's function does not start.
    pub fn explain(&mut self, instance: InstanceId, why: String) {
        let function = self.instances.get(&instance).map(|known| known.function);
        if let Some(of) = function.and_then(|id| self.versions.get_mut(&id)) {
            of.problem = Some(why);
        }
    }

    pub(super) fn ended(&mut self, now: Timestamp, instance: InstanceId, index: usize) {
        self.last = self.last.max(now);
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if let Some(process) = known.processes.get_mut(index) {
            process.ended = true;
            self.gone.extend(process.process.take());
        }
        let trains = self.versions.get(&known.function).is_some_and(|of| of.trains());
        let done = |process: &Process| process.ended && process.done;
        let completes = trains && known.processes.get(index).is_some_and(done);
        if !completes {
            // Stages and workers need each other, so processes that are yet to start must end too.
            known.ends = true;
            self.kill(instance);
        }
        self.if_all_ended(instance);
        self.settle();
    }

    /// Reports an instance after its last process has ended, or starts new ones.
    pub(super) fn if_all_ended(&mut self, instance: InstanceId) {
        let life = self.life(instance);
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if !known.processes.iter().all(|process| process.ended) {
            return;
        }
        let function = known.function;
        let completed =
            matches!(life, Some((Life::Ready, _))) && known.processes.iter().all(|process| process.done);
        if matches!(life, Some((Life::Parked | Life::Draining, Some(Moving::Out)))) {
            known.ends = false;
            known.processes.clear();
            Self::settle_time(&mut self.versions, known);
            self.if_none_serves(function);
            return self.report(instance, InstanceReport::Unloaded);
        }
        if known.anew && matches!(life, Some((Life::Parked | Life::Draining, Some(Moving::In)))) {
            (known.ends, known.anew) = (false, false);
            Self::settle_time(&mut self.versions, known);
            return self.launch(instance);
        }
        let starting = matches!(life, Some((Life::Starting, _)));
        let requests = core::mem::take(&mut known.requests);
        Self::settle_time(&mut self.versions, known);
        self.instances.remove(&instance);
        self.if_none_serves(function);
        for request in requests {
            let Some(of) = self.requests.get_mut(&request) else { continue };
            if of.reached {
                // The client sees the connection end.
                let took = self.last.saturating_since(of.since);
                self.requests.remove(&request);
                self.events.push_back(PlatformEvent::RequestDone { request, took });
            } else {
                of.on = None;
            }
        }
        let trains = self.versions.get(&function).is_some_and(|of| of.trains());
        let report = match () {
            () if trains && completed => {
                if let Some(of) = self.versions.get_mut(&function) {
                    of.completed = true;
                }
                InstanceReport::Completed
            }
            // `Refused` makes the platform pause before the next start of a program that dies early.
            () if starting => InstanceReport::Refused,
            () => InstanceReport::Gone,
        };
        self.report(instance, report);
        self.forget_if_gone(function);
    }

    /// Without its last processes a function misses its SLO no longer.
    fn if_none_serves(&mut self, function: FunctionId) {
        let Some(of) = self.versions.get_mut(&function) else { return };
        let serves = |instance: &Instance| instance.function == function && !instance.processes.is_empty();
        of.problem.take_if(|why| why.starts_with(LATE) && !self.instances.values().any(serves));
    }

    pub(super) fn settle_time(versions: &mut BTreeMap<FunctionId, Known>, instance: &mut Instance) {
        let used: u64 = core::mem::take(&mut instance.gpu_ns).into_values().sum();
        if let Some(of) = versions.get_mut(&instance.function) {
            of.before.gpu_ns += used;
        }
    }

    /// Forgets a version that no function uses, after its last instance.
    pub(super) fn forget_if_gone(&mut self, id: FunctionId) {
        let Some(known) = self.versions.get(&id) else { return };
        let of = self.functions.get(&known.version.deployment.service);
        let named = of.is_some_and(|of| of.serving == id || of.next == Some(id));
        let wanted = !known.over && known.measures.is_some_and(|of| self.versions.contains_key(&of));
        if !named && !wanted && !self.instances.values().any(|instance| instance.function == id) {
            self.versions.remove(&id);
        }
    }

    fn add_instance(&mut self, instance: InstanceId, function: FunctionId, parts: Vec<Part>) {
        let known = Instance {
            function,
            parts,
            processes: Vec::new(),
            requests: BTreeSet::new(),
            ends: false,
            anew: false,
            moves: false,
            next_move: None,
            stop: None,
            ordered: self.last,
            load: None,
            gpu_ns: BTreeMap::new(),
        };
        self.instances.insert(instance, known);
    }

    /// Takes over an instance that an earlier host started, on a device with this share. [`Host::started`] follows, and then its
    /// reports.
    ///
    /// # Errors
    /// 400 with the platform's refusal: the instance is to end.
    pub fn adopt(
        &mut self,
        now: Timestamp,
        name: &str,
        gpu: GpuId,
        (quota, sm): (Quota, SmShare),
    ) -> Result<InstanceId, ApiError> {
        let function = self.functions.get(name).ok_or_else(|| ApiError::unknown_function(name))?.serving;
        self.last = self.last.max(now);
        let mut actions = Vec::new();
        let found = PlatformEvent::InstanceFound { function, gpu, quota, sm };
        let told = self.ask(found, &mut actions);
        told.map_err(|error| ApiError::bad(self.in_words(&error.to_string())))?;
        let its = |action: &PlatformAction| matches!(action, PlatformAction::Start { function: of, .. } if *of == function);
        let start = actions.iter().position(its).map(|at| actions.remove(at));
        let mut adopted = Err(ApiError::bad(format!("{name}: its tenant may have no more")));
        if let Some(PlatformAction::Start { instance, parts, .. }) = start {
            self.add_instance(instance, function, parts);
            if let Some(known) = self.instances.get_mut(&instance) {
                known.processes.push(Process::default());
            }
            adopted = Ok(instance);
        }
        self.carry_out(actions);
        self.settle();
        adopted
    }

    pub(super) fn start(
        &mut self,
        instance: InstanceId,
        function: FunctionId,
        parts: Vec<Part>,
        parked: bool,
    ) {
        self.add_instance(instance, function, parts);
        match parked {
            true => self.report(instance, InstanceReport::Ready),
            false if self.takes_turns(instance) => self.turn_may_come(instance),
            false => self.launch(instance),
        }
    }

    /// Orders the processes of an instance.
    pub(super) fn launch(&mut self, instance: InstanceId) {
        let Some(of) = self.instances.get(&instance).and_then(|known| self.versions.get(&known.function))
        else {
            return;
        };
        let (version, parks) = (Arc::clone(&of.version), self.may_park(&of.version));
        let (patience, measures) = (Self::patience(&self.versions, of), of.measures.is_some());
        let Some(known) = self.instances.get_mut(&instance) else { return };
        (known.ordered, known.load) = (self.last, None);
        let parts = known.parts.clone();
        let launch = Launch { instance, index: 0, parts, version, weights: None, patience, parks };
        known.processes = (0..launch.processes()).map(|_| Process::default()).collect();
        for index in 0..known.processes.len() {
            let launch = Launch { index, ..launch.clone() };
            let order = if measures {
                let stop = Arc::new(AtomicBool::new(false));
                known.stop = Some(Arc::clone(&stop));
                Order::Measure(launch, stop)
            } else {
                Order::Run(launch)
            };
            // The receiver closes only at the end of the host.
            let _ = self.orders.send(order);
        }
    }

    /// Whether the memory of a version's processes can go to host memory. Weights that instances share on a device stay there as long as a
    /// process has them.
    pub(super) fn may_park(&self, version: &Version) -> bool {
        self.parks && version.plan.parks && !self.shares_weights(&version.plan)
    }

    /// Takes an instance off its devices: its memory goes to host memory, or its processes end. They end as well where their memory cannot
    /// move.
    pub(super) fn park(&mut self, instance: InstanceId, keeps: bool) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let Some(of) = self.versions.get_mut(&known.function) else { return };
        of.before.parked += 1;
        let here = |process: &Process| process.process.is_some() && process.listens && !process.ended;
        let moves = keeps && !known.ends && known.processes.iter().all(here);
        let version = Arc::clone(&of.version);
        if moves && self.may_park(&version) {
            self.order_move(instance, true);
        } else {
            self.kill(instance);
            self.if_all_ended(instance);
        }
    }

    /// Brings an instance to these devices: the memory of its processes comes back, or new processes start.
    pub(super) fn unpark(&mut self, instance: InstanceId, parts: Vec<Part>) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let place = |part: &Part| (part.gpu, part.slice, part.stage);
        let same = known.parts.iter().map(place).eq(parts.iter().map(place));
        (known.parts, known.ordered, known.load) = (parts, self.last, None);
        let copies = same && !known.ends;
        match known.processes.is_empty() {
            true if self.takes_turns(instance) => self.turn_may_come(instance),
            true => self.launch(instance),
            false if copies => self.order_move(instance, false),
            false => self.start_anew(instance),
        }
    }

    /// Ends the processes of an instance that is on its way back, and starts new ones after them.
    fn start_anew(&mut self, instance: InstanceId) {
        if let Some(known) = self.instances.get_mut(&instance) {
            (known.ends, known.anew) = (true, true);
        }
        self.kill(instance);
        self.if_all_ended(instance);
    }

    /// Orders a move of the instance's memory, after the move that is under way: two moves at a time could overtake each other.
    fn order_move(&mut self, instance: InstanceId, on: bool) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let Some(of) = self.versions.get(&known.function) else { return };
        known.ordered = self.last;
        if core::mem::replace(&mut known.moves, true) {
            known.next_move = Some(on);
            return;
        }
        let (name, count) = (&of.version.deployment.service, known.processes.len());
        let clients = (0..count).map(|index| client(name, instance, index, count)).collect();
        // The receiver closes only at the end of the host.
        let _ = self.orders.send(Order::Move(Move { instance, clients, on }));
    }

    /// The memory of an instance's processes is where it was ordered to be, or cannot go there, for this reason.
    pub fn moved(&mut self, now: Timestamp, of: &Move, result: Result<(), String>) {
        self.last = self.last.max(now);
        let (instance, life) = (of.instance, self.life(of.instance));
        let Some(known) = self.instances.get_mut(&instance) else { return };
        known.moves = false;
        if let Some(on) = known.next_move.take() {
            return self.order_move(instance, on);
        }
        match (life.and_then(|(_, moving)| moving), result) {
            (Some(Moving::Out), Ok(())) if of.on && !known.ends => {
                self.report(instance, InstanceReport::Parked);
            }
            (Some(Moving::Out), Err(_)) if of.on => {
                self.kill(instance);
                self.if_all_ended(instance);
            }
            (Some(Moving::In), Ok(())) if !of.on && !known.ends => {
                known.load = Some(Load { from: known.ordered, until: self.last, parked: true });
                if let Some(of) = self.versions.get_mut(&known.function) {
                    of.problem = None;
                }
                self.report(instance, InstanceReport::Unparked);
            }
            (Some(Moving::In), Err(_)) if !of.on => self.start_anew(instance),
            // Memory that does not stay in host memory would take the room of others.
            (None, Err(_)) if of.on && matches!(life, Some((Life::Parked, _))) => self.kill(instance),
            _ => {}
        }
        self.settle();
    }

    pub(super) fn kill(&mut self, instance: InstanceId) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        if let Some(stop) = &known.stop {
            stop.store(true, Ordering::Release);
        }
        for process in known.processes.iter().filter_map(|place| place.process.as_ref()) {
            process.kill();
        }
    }

    /// Process ids of an instance.
    pub fn pids(&self, instance: InstanceId) -> Vec<u32> {
        let processes = self.instances.get(&instance).map(|known| &known.processes);
        processes.into_iter().flatten().filter_map(|place| place.process.as_ref()?.pid()).collect()
    }

    /// Whether an instance has a process.
    pub fn runs(&self, instance: InstanceId) -> bool {
        let known = self.instances.get(&instance);
        known.is_some_and(|known| known.processes.iter().any(|place| place.process.is_some()))
    }

    /// Records the device time of a process since its start, in ns. `client` is its name at the daemon.
    pub fn used(&mut self, client: &str, ns: u64) {
        if let Some(known) = self.instance_of(client).and_then(|instance| self.instances.get_mut(&instance)) {
            known.gpu_ns.insert(client.to_owned(), ns);
        }
    }

    /// The instance of a process by its name at the daemon. Other programs of the daemon may have names of the same form.
    fn instance_of(&self, client: &str) -> Option<InstanceId> {
        let (service, number) = client.rsplit_once('-')?;
        let number = number.split_once('.').map_or(number, |(number, _)| number);
        let instance = InstanceId::new(number.parse().ok()?);
        let known = self.versions.get(&self.instances.get(&instance)?.function)?;
        (known.version.deployment.service == service).then_some(instance)
    }

    /// The daemon does not hold the memory of this process in host memory. A daemon that started again has forgotten the order to hold a
    /// parked instance, and gets it once more.
    pub fn not_held(&mut self, client: &str) {
        let Some(instance) = self.instance_of(client) else { return };
        let moves = self.instances.get(&instance).is_some_and(|known| known.moves);
        if !moves && self.life(instance) == Some((Life::Parked, None)) {
            self.order_move(instance, true);
        }
    }

    /// Device time of an instance so far, in ns.
    pub fn gpu_ns(&self, instance: InstanceId) -> u64 {
        self.instances.get(&instance).map_or(0, |known| known.gpu_ns.values().sum())
    }
}

#[cfg(test)]
mod tests;
