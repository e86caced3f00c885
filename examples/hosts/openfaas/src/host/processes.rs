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

    /// A function whose last processes have ended misses its SLO no longer.
    fn if_none_serves(&mut self, function: FunctionId) {
        let Some(of) = self.versions.get_mut(&function) else { return };
        let serves = |instance: &Instance| instance.function == function && !instance.processes.is_empty();
        of.problem.take_if(|why| why.starts_with(LATE) && !self.instances.values().any(serves));
    }

    pub(super) fn settle_time(versions: &mut BTreeMap<FunctionId, Known>, instance: &mut Instance) {
        let used: u64 = core::mem::take(&mut instance.gpu_ns).into_values().sum();
        if let Some(of) = versions.get_mut(&instance.function) {
            of.gpu_ns += used;
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
            moves: 0,
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
        of.parked += 1;
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

    fn order_move(&mut self, instance: InstanceId, on: bool) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let Some(of) = self.versions.get(&known.function) else { return };
        (known.moves, known.ordered) = (known.moves + 1, self.last);
        let (name, count) = (&of.version.deployment.service, known.processes.len());
        let clients = (0..count).map(|index| client(name, instance, index, count)).collect();
        // The receiver closes only at the end of the host.
        let _ = self.orders.send(Order::Move(Move { instance, number: known.moves, clients, on }));
    }

    /// The memory of an instance's processes is where it was ordered to be, or cannot go there, for this reason.
    pub fn moved(&mut self, now: Timestamp, of: &Move, result: Result<(), String>) {
        self.last = self.last.max(now);
        let (instance, life) = (of.instance, self.life(of.instance));
        let Some(known) = self.instances.get_mut(&instance).filter(|known| known.moves == of.number) else {
            return;
        };
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
        let Some((service, number)) = client.rsplit_once('-') else { return };
        let number = number.split_once('.').map_or(number, |(number, _)| number);
        let Ok(number) = number.parse() else { return };
        let Some(known) = self.instances.get_mut(&InstanceId::new(number)) else { return };
        let version = self.versions.get(&known.function).map(|known| &known.version);
        // Other programs of the node's daemon may have names of the same form.
        if version.is_some_and(|version| version.deployment.service == service) {
            known.gpu_ns.insert(client.to_owned(), ns);
        }
    }

    /// Device time of an instance so far, in ns.
    pub fn gpu_ns(&self, instance: InstanceId) -> u64 {
        self.instances.get(&instance).map_or(0, |known| known.gpu_ns.values().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Turn;
    use super::super::tests::training;
    use super::*;
    use crate::api::FunctionDeployment;
    use crate::deployment::Plan;
    use crate::running::LocalProcess;
    use crossbeam_channel::Receiver;
    use gshare_core::{Bytes, Duration, GpuId, NodeId, RequestId};
    use gshare_runner::HookedProcess;
    use gshare_sched::platform::{DeviceSpec, PlatformSettings};
    use std::io::Read as _;
    use std::process::{Command, Stdio};
    use tokio::sync::mpsc::UnboundedReceiver;

    const NOW: Timestamp = Timestamp::ZERO;

    fn process(script: &str) -> LocalProcess {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
        let process = HookedProcess::start(command, "f", gshare_runner::new_run().unwrap(), None).unwrap();
        LocalProcess { process, port: 1 }
    }

    /// Waits until an ending process has ended.
    fn wait(host: &mut Host, instance: InstanceId, index: usize) {
        while !host.has_ended(NOW, instance, index) {
            std::thread::yield_now();
        }
    }

    /// Starts the second worker of a job after the first worker has failed in this way.
    fn starts_late(way: &str, fails: impl Fn(&mut Host, InstanceId)) {
        let (mut host, [first, second], _orders) = training();
        let id = first.instance;
        fails(&mut host, id);
        let mut late = process("sleep 10; echo has lived");
        let mut output = late.process.take_output().0.unwrap();
        host.started(NOW, id, second.index, late);
        assert_eq!(host.life(id), Some((Life::Starting, None)), "{way}: half of a job is not ready");
        let mut said = String::new();
        output.read_to_string(&mut said).unwrap();
        assert_eq!(said, "", "{way}");
        wait(&mut host, id, second.index);
        assert!(!host.instances.contains_key(&id), "{way}: its share is free again");
        host.invariants();
    }

    /// A host of one device with a daemon, and two functions of which one has room at a time.
    struct TakingTurns {
        host: Host,
        orders: Receiver<Order>,
        now: Timestamp,
    }

    impl TakingTurns {
        fn start() -> Self {
            let (sender, orders) = crossbeam_channel::unbounded();
            let platform = PlatformSettings::default().build().unwrap();
            let host = Host::new(platform, Bytes::from_mib(64), sender).with_parking(true);
            let mut turns = Self { host, orders, now: NOW };
            let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
            turns
                .host
                .tell(NOW, PlatformEvent::DeviceFound { gpu: GpuId::new(0), spec })
                .map_err(|error| error.message)
                .unwrap();
            turns
        }

        /// Function `a` runs, and its memory is to move for `b`.
        fn parks_a() -> (Self, InstanceId, Move) {
            let mut turns = Self::start();
            turns.deploy("a", "");
            let a = turns.begin();
            turns.deploy("b", "");
            let out = turns.moves();
            (turns, a, out)
        }

        /// Deploys a function of 9 GiB.
        fn deploy(&mut self, name: &str, annotations: &str) {
            let text = format!(
                r#"{{"service":"{name}","image":"/bin/sleep 1000","annotations":{{"fastgshare/gpu_quota_request":"0.4",
                "fastgshare/gpu_mem":"9GiB"{annotations}}}}}"#
            );
            let deployment: FunctionDeployment = serde_json::from_str(&text).unwrap();
            let plan = Plan::of(&deployment, &BTreeMap::new()).map_err(|error| error.message).unwrap();
            self.host
                .deploy(self.now, Version { deployment, plan }, 0, None)
                .map_err(|error| error.message)
                .unwrap();
        }

        /// The next order within some seconds.
        fn order(&mut self) -> Order {
            for _ in 0..1_000 {
                if let Ok(order) = self.orders.try_recv() {
                    return order;
                }
                self.now = self.now.saturating_add(Duration::from_millis(10));
                self.host.deadline(self.now);
            }
            panic!("no order in ten seconds")
        }

        /// Starts the process of the next order.
        fn begin(&mut self) -> InstanceId {
            let Order::Run(launch) = self.order() else { panic!("no process is to start") };
            assert!(launch.parks);
            self.host.started(self.now, launch.instance, 0, process("sleep 1000"));
            self.host.listens(self.now, launch.instance, 0);
            launch.instance
        }

        fn moves(&mut self) -> Move {
            match self.order() {
                Order::Move(order) => order,
                other => panic!("no memory is to move: {other:?}"),
            }
        }

        fn request(&mut self, name: &str) -> (RequestId, UnboundedReceiver<Turn>) {
            let (turn, turns) = tokio::sync::mpsc::unbounded_channel();
            (self.host.arrive(self.now, name, turn).map_err(|error| error.message).unwrap(), turns)
        }
    }

    #[test]
    fn a_parked_instance_keeps_its_process_and_comes_back_with_its_memory() {
        let (mut turns, a, out) = TakingTurns::parks_a();
        let pid = turns.host.pids(a);
        assert_eq!((out.instance, &out.clients[..], out.on), (a, &["a-0".to_owned()][..], true));
        turns.host.moved(turns.now, &out, Ok(()));
        let b = turns.begin();
        assert_eq!((turns.host.life(a), turns.host.pids(a)), (Some((Life::Parked, None)), pid.clone()));
        let mut request = turns.request("a");
        let other = turns.moves();
        assert_eq!((other.instance, other.on), (b, true));
        turns.host.moved(turns.now, &other, Ok(()));
        let back = turns.moves();
        assert_eq!((back.instance, back.on, turns.host.pids(a)), (a, false, pid));
        // An answer to the earlier order comes late.
        turns.host.moved(turns.now, &out, Err("late".to_owned()));
        turns.host.moved(turns.now, &back, Ok(()));
        assert!(
            matches!(request.1.try_recv(), Ok(Turn::Go(go)) if go.instance == a && go.load.is_some_and(|load| load.parked))
        );
        turns.host.invariants();
    }

    #[test]
    fn an_instance_ends_if_it_starts_in_less_time_than_its_memory_moves() {
        let later =
            |turns: &mut TakingTurns, ms| turns.now = turns.now.saturating_add(Duration::from_millis(ms));
        let mut turns = TakingTurns::start();
        turns.deploy("a", "");
        let Order::Run(launch) = turns.order() else { panic!("no process is to start") };
        let a = launch.instance;
        turns.host.started(turns.now, a, 0, process("sleep 1000"));
        later(&mut turns, 100);
        turns.host.listens(turns.now, a, 0);
        turns.deploy("b", "");
        let out = turns.moves();
        later(&mut turns, 300);
        turns.host.moved(turns.now, &out, Ok(()));
        turns.begin();
        let mut request = turns.request("a");
        let other = turns.moves();
        turns.host.moved(turns.now, &other, Ok(()));
        let back = turns.moves();
        later(&mut turns, 300);
        turns.host.moved(turns.now, &back, Ok(()));
        assert!(matches!(request.1.try_recv(), Ok(Turn::Go(go)) if go.instance == a));
        turns.host.end(turns.now, request.0);
        let _request = turns.request("b");
        while turns.host.life(a) == Some((Life::Ready, None)) {
            later(&mut turns, 10);
            turns.host.deadline(turns.now);
        }
        wait(&mut turns.host, a, 0);
        assert_eq!((turns.host.life(a), turns.host.pids(a)), (Some((Life::Parked, None)), vec![]));
    }

    #[test]
    fn an_instance_that_cannot_be_parked_ends_and_starts_again() {
        let (mut turns, a, out) = TakingTurns::parks_a();
        turns.host.moved(turns.now, &out, Err("its memory is managed".to_owned()));
        wait(&mut turns.host, a, 0);
        assert_eq!((turns.host.life(a), turns.host.pids(a)), (Some((Life::Parked, None)), vec![]));
        turns.begin();
        let _request = turns.request("a");
        let out = turns.moves();
        turns.host.moved(turns.now, &out, Ok(()));
        assert_eq!(turns.begin(), a);
        turns.host.invariants();
    }

    #[test]
    fn a_process_is_replaced_if_its_memory_does_not_come_back() {
        let (mut turns, a, out) = TakingTurns::parks_a();
        let pid = turns.host.pids(a);
        turns.host.moved(turns.now, &out, Ok(()));
        turns.begin();
        let mut request = turns.request("a");
        let out = turns.moves();
        turns.host.moved(turns.now, &out, Ok(()));
        let back = turns.moves();
        turns.host.moved(turns.now, &back, Err("no room".to_owned()));
        wait(&mut turns.host, a, 0);
        assert_eq!(turns.begin(), a);
        assert_ne!(turns.host.pids(a), pid);
        assert!(matches!(request.1.try_recv(), Ok(Turn::Go(go)) if go.instance == a));
        turns.host.invariants();
    }

    #[test]
    fn an_instance_that_may_not_be_parked_ends() {
        let mut turns = TakingTurns::start();
        turns.deploy("a", r#","gshare/park":"false""#);
        let Order::Run(launch) = turns.order() else { panic!("no process is to start") };
        assert!(!launch.parks);
        turns.host.started(turns.now, launch.instance, 0, process("sleep 1000"));
        turns.host.listens(turns.now, launch.instance, 0);
        turns.deploy("b", "");
        while turns.host.life(launch.instance) == Some((Life::Ready, None)) {
            turns.now = turns.now.saturating_add(Duration::from_millis(10));
            turns.host.deadline(turns.now);
        }
        wait(&mut turns.host, launch.instance, 0);
        assert_eq!(turns.host.life(launch.instance), Some((Life::Parked, None)));
    }

    #[test]
    fn a_worker_that_is_started_after_another_one_has_failed_ends_too() {
        starts_late("dies", |host, id| {
            host.started(NOW, id, 0, process("exit 1"));
            wait(host, id, 0);
        });
        starts_late("cannot start", |host, id| host.failed(NOW, id, 0, "no such file".to_owned()));
        starts_late("is broken off", |host, id| {
            host.started(NOW, id, 0, process("sleep 1000"));
            host.unreachable(id);
            wait(host, id, 0);
        });
    }

    #[test]
    fn a_worker_that_is_started_after_another_one_is_done_completes_the_job() {
        let (mut host, [first, second], _orders) = training();
        let id = first.instance;
        host.started(NOW, id, first.index, process("exit 0"));
        wait(&mut host, id, first.index);
        host.started(NOW, id, second.index, process("exit 0"));
        assert_eq!(host.life(id), Some((Life::Ready, None)));
        wait(&mut host, id, second.index);
        assert!(host.view("f").unwrap().completed);
        host.invariants();
    }
}
