//! Measurement of functions: the device for the trials, use of the results, and correction by served requests.
//!
//! # Device for the trials
//! A function to be measured gets a companion on the platform. On devices with shared time the companion is a training job with
//! one worker per device of the function. It takes the largest of [`TRIAL_SHARES`] with immediate room, or else waits for the
//! smallest. A slice or a whole device serves one request at a time, so there the companion sends one request, which lasts as
//! long as the trials. A function is tried on one slice of each size, smallest first.
//!
//! # A measurement is a prior
//! - Waits for other processes on the device do not count (`trials.rs`). The rest of their influence is not known.
//! - If a disturbed measurement is too slow for the SLO, the function is measured again after a pause, which grows each time.
//! - Latencies of served requests correct the point in use. If the corrected point is too slow, the function moves to another; a
//!   function that misses its SLO goes on, and says so.
//! - Deletion of a function deletes its measurement.

use super::{Host, Instance, Known, Launch, Order, Process, Request, Turn, Version};
use crate::deployment::Wants;
use crate::listening::IDLE;
use crate::trials::{Measured, READY};
use gshare_core::dag::{Component, Dag};
use gshare_core::profile::{ProfilePoint, ProfileTable, Setting};
use gshare_core::{
    BasisPoints, Bytes, Duration, FunctionId, GpuShare, InstanceId, Quota, QuotaRange, RequestId, SmShare,
    Timestamp,
};
use gshare_sched::pipeline::Goal;
use gshare_sched::platform::{
    FunctionSpec, FunctionState, InstanceReport, Moving, PlatformAction, PlatformEvent, Regime, Rejection,
    Work,
};
use gshare_sched::scale::max_p95;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Time limit of trials on a share: their companion never reports ready. Each step of the trials has a limit of its own.
const TRIALS: Duration = Duration::from_secs(3_600);
/// Shares for trials as per cent of time and SMs, in the order of attempts.
const TRIAL_SHARES: [(u16, u16); 3] = [(40, 100), (30, 50), (20, 25)];
/// Planned time of trials on a slice or a whole device: some calls, and two starts of the program.
const TURN: Duration = Duration::from_secs(10);
/// Share of GPU time of other processes above which a measurement is repeated before it refuses a function for good.
pub(crate) const DISTURBED: BasisPoints = BasisPoints::percent(5);
/// The first and the longest pause before a new measurement.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// Answers per correction: seven of them lie above the 95th percentile.
const ANSWERS: usize = 128;

/// Begin of the problem of a function that misses its SLO.
pub(super) const LATE: &str = "misses its SLO of ";

/// State of a function's measurement.
#[derive(Debug, Default)]
pub(super) struct Measuring {
    /// Progress of the trials.
    pub(super) progress: Option<String>,
    /// The measurement; on slices, of the sizes so far.
    pub(super) found: Option<Measured>,
    /// Slice sizes already tried, in parts of a GPU.
    tried: BTreeSet<SmShare>,
    /// Pause before the next attempt.
    pause: Option<Duration>,
    /// Latencies since the last correction.
    answers: Vec<Duration>,
}

impl Measuring {
    pub(super) fn of(found: Option<Measured>) -> Self {
        Self { found, ..Self::default() }
    }
}

impl Host {
    /// Gives a function a companion to measure it.
    pub(super) fn measure(&mut self, function: FunctionId) {
        let Some(view) = self.platform.function(function) else { return };
        match self.platform.regime_for(view.spec) {
            Regime::Fractional => self.measure_on_share(function),
            Regime::Whole => self.measure_in_turn(function, None),
            Regime::Sliced => match self.next_size(function) {
                Some(size) => self.measure_in_turn(function, Some(size)),
                None => self.all_sizes_tried(function),
            },
        }
    }

    fn measure_on_share(&mut self, function: FunctionId) {
        let Some(known) = self.versions.get(&function) else { return };
        let nodes = self.platform.function(function).and_then(|view| view.spec.nodes.clone());
        let (version, plan) = (Arc::clone(&known.version), known.version.plan.clone());
        let memory = plan.memory_before(self.guess);
        for (rung, (time, sm)) in TRIAL_SHARES.into_iter().enumerate() {
            let share = trial_share(time, sm, Bytes(memory.get().div_ceil(plan.devices.into())));
            let work = Work::Training { workers: plan.devices, share };
            let spec = FunctionSpec::new(work, memory)
                .with_tenant(plan.tenant)
                .with_loads(TRIALS, TRIALS)
                .with_nodes(nodes.clone())
                .with_weights(plan.weights());
            let trial = self.add_trial(function, &version);
            let mut actions = Vec::new();
            let event = PlatformEvent::FunctionDeployed { function: trial, spec: Box::new(spec) };
            let told = self.ask(event, &mut actions);
            let found = actions.iter().any(|action| matches!(action, PlatformAction::Start { .. }));
            if told.is_ok() && (found || rung + 1 == TRIAL_SHARES.len()) {
                self.says(function, "waits for a share of a device to be measured on");
                return self.carry_out(actions);
            }
            self.versions.remove(&trial);
            match told {
                Ok(()) => {
                    let removed = PlatformEvent::FunctionRemoved { function: trial };
                    let removed = self.ask(removed, &mut actions);
                    debug_assert!(removed.is_ok(), "{removed:?}");
                }
                Err(error) => self.cannot_measure(function, &error.to_string()),
            }
        }
    }

    /// Adds a companion that takes a whole device, or a slice of `size`, for one request.
    fn measure_in_turn(&mut self, function: FunctionId, size: Option<SmShare>) {
        let Some(known) = self.versions.get_mut(&function) else { return };
        known.measuring.tried.extend(size);
        let version = Arc::clone(&known.version);
        let memory = self.memory_alone(&version);
        let work = match size {
            None => whole_device(),
            Some(size) => self.slice_of(size, memory),
        };
        let work = match work {
            Ok(work) => work,
            Err(why) => return self.cannot_measure(function, &why),
        };
        let regime = if size.is_some() { Regime::Sliced } else { Regime::Whole };
        let moment = Duration::from_millis(1);
        // The companion has no tenant: with a limit, a tenant's requests and their measurement could wait for each other.
        let spec = FunctionSpec::new(work, memory).with_regime(regime).with_loads(moment, moment);
        let trial = self.add_trial(function, &version);
        let request = RequestId::new(self.next_request);
        self.next_request += 1;
        self.turns.insert(request, trial);
        let mut actions = Vec::new();
        let deployed = PlatformEvent::FunctionDeployed { function: trial, spec: Box::new(spec) };
        let arrived = PlatformEvent::RequestArrived { request, function: trial, deadline: None };
        let told = self.ask(deployed, &mut actions);
        match told.and_then(|()| self.ask(arrived, &mut actions)) {
            Ok(()) => {
                let what = if size.is_some() { "slice" } else { "device" };
                self.says(function, &format!("waits for a {what} to be measured on"));
                self.carry_out(actions);
            }
            Err(error) => {
                self.turns.remove(&request);
                self.versions.remove(&trial);
                self.cannot_measure(function, &error.to_string());
            }
        }
    }

    /// GPU memory of an instance with weights of its own.
    fn memory_alone(&self, version: &Version) -> Bytes {
        let weights = version.plan.weights().map_or(Bytes::ZERO, |weights| weights.bytes);
        version.plan.memory_before(self.guess).saturating_add(weights)
    }

    fn add_trial(&mut self, function: FunctionId, version: &Version) -> FunctionId {
        let version = Version { deployment: version.deployment.clone(), plan: version.plan.clone() };
        self.add(version, Some(function))
    }

    /// The progress of a measurement; a waiting measurement names the functions measured before it.
    pub(super) fn progress_of(&self, function: FunctionId) -> Option<String> {
        let text = self.versions.get(&function)?.measuring.progress.clone()?;
        let companion = |instance: &Instance| self.versions.get(&instance.function)?.measures;
        let measured: BTreeSet<_> = self.instances.values().filter_map(companion).collect();
        let name = |id| Some(self.versions.get(id)?.version.deployment.service.as_str());
        let names: Vec<_> = measured.iter().filter_map(name).collect();
        match measured.contains(&function) || names.is_empty() {
            true => Some(text),
            false => Some(format!("{text}, after {}", names.join(", "))),
        }
    }

    fn says(&mut self, function: FunctionId, text: &str) {
        if let Some(known) = self.versions.get_mut(&function) {
            known.measuring.progress = Some(text.to_owned());
        }
    }

    fn cannot_measure(&mut self, function: FunctionId, why: &str) {
        let why = format!("cannot be measured: {}", self.in_words(why));
        if let Some(known) = self.versions.get_mut(&function) {
            known.problem = Some(why);
        }
    }

    /// Sizes of all slices here, in parts of a GPU.
    pub(super) fn sizes(&self) -> BTreeSet<SmShare> {
        let mut sizes = BTreeSet::new();
        for layout in self.devices.values().filter_map(|spec| spec.mig.as_ref()) {
            let model = layout.model();
            sizes.extend(layout.slices().iter().filter_map(|at| model.share_of(model.get(at.profile)?)));
        }
        sizes
    }

    fn next_size(&self, function: FunctionId) -> Option<SmShare> {
        let tried = &self.versions.get(&function)?.measuring.tried;
        self.sizes().into_iter().find(|size| !tried.contains(size))
    }

    /// The work of a companion that fits only slices of `size`.
    fn slice_of(&self, size: SmShare, memory: Bytes) -> Result<Work, String> {
        let mut component = Component::new("all");
        let mut names = BTreeSet::new();
        for layout in self.devices.values().filter_map(|spec| spec.mig.as_ref()) {
            let profiles = layout.slices().iter().filter_map(|at| layout.model().get(at.profile));
            let same = profiles.filter(|profile| layout.model().share_of(profile) == Some(size));
            names.extend(same.map(|profile| profile.name.to_string()));
        }
        for name in names {
            component = component.with_profile(name, Goal::default().batch, TURN, memory);
        }
        let dag = Dag::builder("trial").component(component).build().map_err(|error| error.to_string())?;
        let goal = Goal::default().with_runtime_memory(Bytes::ZERO);
        Ok(Work::Pipeline { dag: Box::new(dag), goal: Box::new(goal) })
    }

    /// Whether the instance belongs to a companion that starts processes only at its turn.
    pub(super) fn takes_turns(&self, instance: InstanceId) -> bool {
        self.instances.get(&instance).is_some_and(|known| self.turn_of(known.function).is_some())
    }

    /// The request by which a companion gets its turn.
    fn turn_of(&self, trial: FunctionId) -> Option<RequestId> {
        self.turns.iter().find(|(_, of)| **of == trial).map(|(request, _)| *request)
    }

    /// A companion's instance has its device: its request may come.
    pub(super) fn turn_may_come(&mut self, instance: InstanceId) {
        let report = match self.life(instance) {
            Some((_, Some(Moving::In))) => InstanceReport::Unparked,
            _ => InstanceReport::Ready,
        };
        self.report(instance, report);
    }

    /// How long a program may do nothing before it listens. A program may sleep at first, so each attempt to measure it waits longer.
    pub(super) fn patience(versions: &BTreeMap<FunctionId, Known>, of: &Known) -> Duration {
        let measured = of.measures.and_then(|id| versions.get(&id));
        let pause = measured.and_then(|of| of.measuring.pause).unwrap_or(PAUSES.0);
        IDLE.saturating_mul(pause.as_nanos() / PAUSES.0.as_nanos()).min(READY)
    }

    /// The turn of a companion has come: its trials run until they say so.
    pub(super) fn begin_turn(&mut self, instance: InstanceId) {
        let Some(of) = self.instances.get(&instance).and_then(|known| self.versions.get(&known.function))
        else {
            return;
        };
        let (version, parks) = (Arc::clone(&of.version), self.may_park(&of.version));
        let patience = Self::patience(&self.versions, of);
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let stop = Arc::new(AtomicBool::new(false));
        known.processes = vec![Process::default()];
        (known.stop, known.ordered) = (Some(Arc::clone(&stop)), self.last);
        let parts = known.parts.clone();
        // The receiver closes only at the end of the host.
        let _ = self.orders.send(Order::Measure(
            Launch { instance, index: 0, parts, version, weights: None, patience, parks },
            stop,
        ));
    }

    /// Ends the turn of a companion's instance after its trials, successful or not.
    pub(super) fn end_turn(&mut self, instance: InstanceId) {
        let leaves = self.leaves(instance);
        let Some(known) = self.instances.get_mut(&instance) else { return };
        let (trial, took) = (known.function, self.last.saturating_since(known.ordered));
        known.stop = None;
        known.processes.clear();
        if let Some(request) = self.turn_of(trial) {
            self.turns.remove(&request);
            self.events.push_back(PlatformEvent::RequestDone { request, took });
        }
        if leaves {
            self.if_all_ended(instance);
        }
        self.remove_trial(trial);
    }

    /// Removes a companion from the platform, and forgets it once it has no instance.
    pub(super) fn remove_trial(&mut self, trial: FunctionId) {
        let Some(known) = self.versions.get_mut(&trial) else { return };
        if !core::mem::replace(&mut known.over, true) {
            self.events.push_back(PlatformEvent::FunctionRemoved { function: trial });
        }
        self.forget_if_gone(trial);
    }

    /// Handles a rejected turn of a companion.
    pub(super) fn no_turn(&mut self, trial: FunctionId, reason: Rejection) {
        let Some(function) = self.versions.get(&trial).and_then(|known| known.measures) else { return };
        self.remove_trial(trial);
        let view = self.platform.function(function);
        let sliced = view.is_some_and(|view| self.platform.regime_for(view.spec) == Regime::Sliced);
        match reason {
            Rejection::Removed | Rejection::Cancelled => {}
            // The function may still fit a slice of another size.
            Rejection::NeverFits if sliced && self.next_size(function).is_some() => self.measure(function),
            Rejection::NeverFits => self.all_sizes_tried(function),
            _ => self.measure_later(function),
        }
    }

    fn all_sizes_tried(&mut self, function: FunctionId) {
        let Some(known) = self.versions.get(&function) else { return };
        match known.measuring.found.clone() {
            Some(found) => self.learn(function, found),
            None => {
                let memory = self.memory_alone(&known.version);
                let why = format!("it takes {memory} of GPU memory, which no device here has");
                self.cannot_measure(function, &why);
                self.measure_later(function);
            }
        }
    }

    /// Takes the result of an instance's trials.
    pub fn measured(&mut self, now: Timestamp, instance: InstanceId, found: Measured) {
        self.last = self.last.max(now);
        let Some(trial) = self.instances.get(&instance).map(|known| known.function) else { return };
        let Some(function) = self.versions.get(&trial).and_then(|known| known.measures) else { return };
        if self.takes_turns(instance) {
            self.end_turn(instance);
        } else {
            self.instances.remove(&instance);
            self.report(instance, InstanceReport::Completed);
            self.remove_trial(trial);
        }
        if let Some(known) = self.versions.get_mut(&function) {
            (known.problem, known.hopeless) = (None, false);
            let slices = found.regime == Regime::Sliced;
            let before = known.measuring.found.take().filter(|_| slices && known.measuring.tried.len() > 1);
            let found = before.and_then(|before| before.and(&found)).unwrap_or(found);
            known.measuring.found = Some(found.clone());
            match slices && self.next_size(function).is_some() {
                true => self.measure(function),
                false => self.learn(function, found),
            }
        }
        self.settle();
    }

    /// Tells the platform a measurement, unless the function is too slow for its SLO.
    fn learn(&mut self, function: FunctionId, found: Measured) {
        let Some(known) = self.versions.get_mut(&function) else { return };
        known.measuring.progress = None;
        known.measuring.tried.clear();
        let version = Arc::clone(&known.version);
        let memory = Some(version.plan.memory.unwrap_or(found.memory));
        let profile = found.table.clone();
        let unmet = self.unmet(&version, &profile, Some(&found));
        let _ = self.orders.send(Order::Keep(version, found));
        if let Some(why) = unmet {
            return self.give_up(function, &why);
        }
        if let Some(known) = self.versions.get_mut(&function) {
            known.measuring.pause = None;
        }
        self.events.push_back(PlatformEvent::ProfileLearned { function, profile, memory });
    }

    /// Marks a function as hopeless after its measurement. Plans a new measurement if other processes may have disturbed this one.
    pub(super) fn give_up(&mut self, function: FunctionId, why: &str) {
        let Some(known) = self.versions.get_mut(&function) else { return };
        (known.problem, known.hopeless) = (Some(why.to_owned()), true);
        let name = known.version.deployment.service.clone();
        if known.measuring.found.as_ref().is_some_and(Measured::is_doubtful) {
            self.measure_later(function);
        }
        if self.functions.get(&name).is_none_or(|of| of.serving != function) {
            return;
        }
        let waits = |(id, of): (&RequestId, &Request)| (of.name == name && of.on.is_none()).then_some(*id);
        let waiting: Vec<RequestId> = self.requests.iter().filter_map(waits).collect();
        for request in waiting {
            if let Some(of) = self.requests.remove(&request) {
                let _ = of.turn.send(Turn::Hopeless(why.to_owned()));
            }
            self.events.push_back(PlatformEvent::RequestCancelled { request });
        }
    }

    /// Goes on after failed trials: with the next size of slices, with the measurements of the other sizes, or with a new attempt later.
    pub(super) fn trials_failed(&mut self, function: FunctionId) {
        let Some(view) = self.platform.function(function) else { return };
        let slices = self.platform.regime_for(view.spec) == Regime::Sliced;
        let unknown = view.state == FunctionState::Profiling;
        let found = self.versions.get(&function).and_then(|known| known.measuring.found.clone());
        match found.filter(|_| unknown) {
            _ if slices && self.next_size(function).is_some() => self.measure(function),
            Some(found) if slices => self.learn(function, found),
            _ => self.measure_later(function),
        }
    }

    /// Plans a new measurement after a pause, which grows with each attempt.
    pub(super) fn measure_later(&mut self, function: FunctionId) {
        let Some(known) = self.versions.get_mut(&function) else { return };
        let pause = known.measuring.pause.unwrap_or(PAUSES.0);
        known.measuring.pause = Some(pause.saturating_mul(2).min(PAUSES.1));
        known.measuring.tried.clear();
        self.repeats.insert((self.last.saturating_add(pause), function));
    }

    /// Starts the measurements with their pause over.
    pub(super) fn repeat_measurements(&mut self) {
        while let Some((at, function)) = self.repeats.pop_first() {
            if at > self.last {
                self.repeats.insert((at, function));
                return;
            }
            let state = self.platform.function(function).map(|view| view.state);
            let runs = self.versions.values().any(|known| known.measures == Some(function) && !known.over);
            if state == Some(FunctionState::Profiling) && !runs {
                self.measure(function);
            }
        }
    }

    /// Records the progress of an instance's trials.
    pub fn progress(&mut self, instance: InstanceId, text: &str) {
        let of = self.instances.get(&instance).and_then(|known| self.versions.get(&known.function)?.measures);
        if let Some(of) = of {
            self.says(of, text);
        }
    }

    /// Records the time until the head of an instance's answer.
    pub fn answered(&mut self, now: Timestamp, instance: InstanceId, took: Duration) {
        let Some(known) = self.instances.get(&instance) else { return };
        let (function, share) = (known.function, known.parts.first().map(|part| part.share));
        // How long a batch takes depends on its size, which is not a point's.
        let corrects = |of: &&mut Known| of.measuring.found.is_some() && of.version.plan.batch.is_none();
        let Some(of) = self.versions.get_mut(&function).filter(corrects) else { return };
        of.measuring.answers.push(took);
        if of.measuring.answers.len() < ANSWERS {
            return;
        }
        let mut answers = core::mem::take(&mut of.measuring.answers);
        answers.sort_unstable();
        let at = |percent: usize| answers.get((answers.len() - 1) * percent / 100).copied().unwrap_or(took);
        let is_late = |why: &String| why.starts_with(LATE);
        if of.problem.as_ref().is_none_or(is_late) {
            let slo = of.version.plan.slo.filter(|slo| at(95) > *slo);
            let why = |slo| format!("{LATE}{slo}: 95 of the last 100 answers took up to {}", at(95));
            of.problem = slo.map(why);
        }
        let batch = of.version.plan.concurrency;
        if let Some(share) = share {
            let setting = Setting { batch, sm: share.sm(), quota: share.time().request() };
            self.correct(now, function, setting, (at(50), at(95)));
        }
    }

    /// Replaces the latencies of a point by the latencies of served requests, if they differ by more than a quarter. A point that
    /// became too slow is left for another point.
    fn correct(
        &mut self,
        now: Timestamp,
        function: FunctionId,
        at: Setting,
        (p50, p95): (Duration, Duration),
    ) {
        self.last = self.last.max(now);
        let Some(known) = self.versions.get_mut(&function) else { return };
        let Some(found) = known.measuring.found.as_mut().filter(|found| found.regime == Regime::Fractional)
        else {
            return;
        };
        let Some(point) = found.table.at(at) else { return };
        let quarter = Duration::from_nanos(point.p95.as_nanos() / 4);
        if p95 <= point.p95.saturating_add(quarter) && p95.saturating_add(quarter) >= point.p95 {
            return;
        }
        let mut corrected = *point;
        (corrected.p50, corrected.p95) = (p50, p95);
        let others = found.table.points().iter().filter(|one| one.setting() != at);
        let Ok(table) = ProfileTable::sparse(others.copied().chain([corrected]).collect()) else { return };
        found.table = table.clone();
        let (version, found) = (Arc::clone(&known.version), found.clone());
        let name = version.deployment.service.clone();
        let _ = self.orders.send(Order::Keep(Arc::clone(&version), found.clone()));
        let fast = |point: &ProfilePoint| version.plan.slo.is_none_or(|slo| point.p95 <= max_p95(slo));
        self.decided(format!("{name} answers with a p95 of {p95} at {at}, where it was measured otherwise"));
        let Some(of) = self.functions.get(&name).filter(|of| of.serving == function && of.next.is_none())
        else {
            return;
        };
        if fast(&corrected) || !table.points().iter().any(fast) {
            return;
        }
        let (created_ms, replicas) = (of.created_ms, of.replicas);
        let mut plan = version.plan.clone();
        plan.wants = Wants::Profile { table, memory: Some(found.memory) };
        plan.measured = Some(found);
        let version = Version { deployment: version.deployment.clone(), plan };
        if let Err(error) = self.deploy(now, version, created_ms, replicas) {
            eprintln!("openfaas: {name}: {}", error.message);
        }
    }
}

/// The work of a companion that takes a whole device.
fn whole_device() -> Result<Work, String> {
    let point = ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 1, 1.0, TURN, TURN);
    let table =
        point.and_then(|point| ProfileTable::sparse(vec![point])).map_err(|error| error.to_string())?;
    Ok(Work::Inference { profile: Some(table) })
}

fn trial_share(time: u16, sm: u16, memory: Bytes) -> GpuShare {
    let quota = Quota::from_percent(time).unwrap_or(Quota::WHOLE);
    let time = QuotaRange::new(quota, quota).unwrap_or(QuotaRange::BEST_EFFORT);
    let sm = SmShare::from_percent(sm).unwrap_or(SmShare::WHOLE);
    GpuShare::new(time, sm, sm, Some(memory)).unwrap_or(GpuShare::WHOLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::FunctionDeployment;
    use crate::deployment::Plan;
    use crossbeam_channel::{Receiver, unbounded as channel};
    use gshare_core::{GpuId, NodeId};
    use gshare_sched::platform::{DeviceSpec, MigLayout, PlatformSettings};
    use std::collections::BTreeMap;

    struct Test {
        host: Host,
        orders: Receiver<Order>,
        now: Timestamp,
    }

    impl Test {
        fn on(devices: Vec<DeviceSpec>) -> Self {
            let (sender, orders) = channel();
            let platform = PlatformSettings::default().build().unwrap();
            let mut host = Host::new(platform, Bytes::from_gib(4), sender);
            for (gpu, spec) in (0..).zip(devices) {
                let found = PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec };
                host.tell(Timestamp::ZERO, found).map_err(|error| error.message).unwrap();
            }
            Self { host, orders, now: Timestamp::ZERO }
        }

        fn deploy(&mut self, annotations: &str) {
            self.deploy_as("f", annotations);
        }

        fn version(name: &str, annotations: &str) -> Version {
            let text =
                format!(r#"{{"service":"{name}","image":"/bin/true","annotations":{{{annotations}}}}}"#);
            let deployment: FunctionDeployment = serde_json::from_str(&text).unwrap();
            let plan = Plan::of(&deployment, &BTreeMap::new()).map_err(|error| error.message).unwrap();
            Version { deployment, plan }
        }

        fn deploy_as(&mut self, name: &str, annotations: &str) {
            let deployed = self.host.deploy(self.now, Self::version(name, annotations), 0, None);
            deployed.map_err(|error| error.message).unwrap();
        }

        /// The next order other than [`Order::Keep`].
        fn order(&self) -> Option<Order> {
            self.orders.try_iter().find(|order| !matches!(order, Order::Keep(..)))
        }

        fn trial(&self) -> Launch {
            match self.order() {
                Some(Order::Measure(launch, _)) => launch,
                other => panic!("{other:?}"),
            }
        }

        fn instance(&self) -> Launch {
            match self.order() {
                Some(Order::Run(launch)) => launch,
                other => panic!("{other:?}"),
            }
        }

        fn measured(&mut self, launch: &Launch, regime: Regime, points: &[ProfilePoint], others: u16) {
            let least = points.iter().map(|point| point.p50).min().unwrap();
            let table = ProfileTable::sparse(points.to_vec()).unwrap();
            let others = BasisPoints::percent(others);
            let found =
                Measured { table, memory: Bytes::from_gib(1), regime, least, others, failed_batch: None };
            self.host.measured(self.now, launch.instance, found);
            self.host.invariants();
        }

        fn wait(&mut self) {
            self.now = self.host.next_deadline().unwrap().max(self.now);
            self.host.deadline(self.now);
        }
    }

    fn share(percent: u16) -> SmShare {
        SmShare::from_percent(percent).unwrap()
    }

    fn point(sm: SmShare, quota: u16, rate: f64, ms: u64) -> ProfilePoint {
        let (quota, time) = (Quota::from_percent(quota).unwrap(), Duration::from_millis(ms));
        ProfilePoint::measured(sm, quota, 1, rate, time, time).unwrap()
    }

    fn gpu() -> DeviceSpec {
        DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16))
    }

    /// A model that answers too late on the smallest slice may be fast on a larger one.
    #[test]
    fn a_size_of_slices_that_fails_does_not_keep_a_function_from_the_others() {
        for fails in [0, 1] {
            let layout = MigLayout::named("A100-80", &["1g.10gb", "1g.10gb", "2g.20gb"]).unwrap();
            let model = layout.model().clone();
            let mut test =
                Test::on(vec![DeviceSpec::new(NodeId::new(0), Bytes::from_gib(80)).with_mig(layout)]);
            test.deploy(r#""gshare/slo":"1s""#);
            for number in 0..2 {
                let launch = test.trial();
                let size =
                    model.share_of(model.get(launch.parts[0].slice.unwrap().profile).unwrap()).unwrap();
                if number == fails {
                    test.host.failed(test.now, launch.instance, 0, "no answer within 30s".to_owned());
                    test.host.invariants();
                } else {
                    test.measured(&launch, Regime::Sliced, &[point(size, 100, 25.0, 20)], 0);
                }
            }
            assert_eq!(test.host.view("f").unwrap().profile.unwrap().points().len(), 1, "{fails}");
        }
    }

    #[test]
    fn a_function_is_measured_on_one_slice_of_each_size_and_then_served_on_slices() {
        let layout = MigLayout::named("A100-80", &["1g.10gb", "1g.10gb", "2g.20gb"]).unwrap();
        let model = layout.model().clone();
        let mut test = Test::on(vec![DeviceSpec::new(NodeId::new(0), Bytes::from_gib(80)).with_mig(layout)]);
        test.deploy(r#""gshare/slo":"1s""#);
        for (name, ms) in [("1g.10gb", 40), ("2g.20gb", 20)] {
            let launch = test.trial();
            let slice = launch.parts[0].slice.unwrap();
            let profile = model.get(slice.profile).unwrap();
            assert_eq!(&*profile.name, name);
            let size = model.share_of(profile).unwrap();
            test.measured(&launch, Regime::Sliced, &[point(size, 100, 25.0, ms)], 0);
        }
        assert_eq!(test.host.view("f").unwrap().profile.unwrap().points().len(), 2);
        let (sender, _turns) = tokio::sync::mpsc::unbounded_channel();
        test.host.arrive(test.now, "f", sender).map_err(|error| error.message).unwrap();
        let served = test.instance();
        assert!(served.parts[0].slice.is_some() && served.version.plan.wants == Wants::Measured);
    }

    #[test]
    fn a_function_has_a_whole_device_to_itself_while_it_is_measured() {
        let mut test = Test::on(vec![gpu().with_regime(Regime::Whole)]);
        test.deploy(r#""gshare/slo":"1s""#);
        let launch = test.trial();
        let (sender, _turns) = tokio::sync::mpsc::unbounded_channel();
        test.host.arrive(test.now, "f", sender).map_err(|error| error.message).unwrap();
        assert!(test.order().is_none(), "its request waits for the measurement");
        test.measured(&launch, Regime::Whole, &[point(SmShare::WHOLE, 100, 100.0, 9)], 0);
        test.instance();
    }

    #[test]
    fn a_measurement_that_waits_names_the_one_before_it() {
        let mut test = Test::on(vec![gpu().with_regime(Regime::Whole)]);
        test.deploy_as("first", r#""gshare/slo":"1s""#);
        test.trial();
        test.deploy_as("second", r#""gshare/slo":"1s""#);
        let progress = |name: &str| test.host.view(name).unwrap().measuring.unwrap();
        assert_eq!(progress("first"), "waits for a device to be measured on");
        assert_eq!(progress("second"), "waits for a device to be measured on, after first");
    }

    /// Without the pause the host would restart a crashing program in a loop. Programs that never listen would keep a device.
    #[test]
    fn trials_that_fail_come_again_after_growing_pauses() {
        let layout = MigLayout::named("A100-80", &["1g.10gb"]).unwrap();
        let sliced = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(80)).with_mig(layout);
        for device in [sliced, gpu()] {
            let mut test = Test::on(vec![device]);
            test.deploy(r#""gshare/slo":"1s""#);
            let (mut launch, mut pauses) = (test.trial(), Vec::new());
            for _ in 0..3 {
                test.host.failed(test.now, launch.instance, 0, "ended".to_owned());
                test.host.invariants();
                assert!(test.order().is_none());
                assert_eq!(test.host.versions.len(), 1, "the companion is forgotten");
                assert_eq!(test.host.view("f").unwrap().problem.as_deref(), Some("ended"));
                let before = test.now;
                launch = loop {
                    test.wait();
                    if let Some(Order::Measure(launch, _)) = test.order() {
                        break launch;
                    }
                };
                pauses.push(test.now.saturating_since(before).as_nanos() / 1_000_000_000);
            }
            assert_eq!(pauses, [1, 2, 4]);
            assert_eq!(
                launch.patience,
                IDLE.saturating_mul(8),
                "a program that sleeps longer is measured in the end"
            );
        }
    }

    #[test]
    fn a_measurement_beside_others_refuses_a_function_until_the_next_one_and_says_how_disturbed_it_was() {
        let mut test = Test::on(vec![gpu()]);
        test.deploy(r#""gshare/slo":"10ms""#);
        let launch = test.trial();
        test.measured(&launch, Regime::Fractional, &[point(share(100), 40, 40.0, 20)], 40);
        let why = test.host.view("f").unwrap().problem.unwrap();
        for part in [
            "gshare/slo: `10ms`",
            "20ms at best",
            "least latency that was measured is 20ms",
            "40%",
            "--again f",
        ] {
            assert!(why.contains(part), "{why}: {part}");
        }
        let (sender, _turns) = tokio::sync::mpsc::unbounded_channel();
        assert_eq!(test.host.arrive(test.now, "f", sender).unwrap_err().status.as_u16(), 503);
        test.wait();
        let launch = test.trial();
        test.measured(&launch, Regime::Fractional, &[point(share(100), 40, 200.0, 4)], 0);
        assert_eq!(test.host.view("f").unwrap().problem, None);
        test.instance();
    }

    /// Regression: its p95 was taken to be 1 ns, so it served too late and nothing said so.
    #[test]
    fn a_function_without_a_gpu_keeps_its_slo_or_says_that_it_does_not() {
        let mut test = Test::on(vec![gpu()]);
        test.deploy(r#""gshare/slo":"20ms""#);
        let launch = test.trial();
        let answers = |ms| {
            let table = ProfileTable::sparse(vec![point(share(1), 1, 100.0, ms)]).unwrap();
            let (memory, least, others) = (Bytes(1), Duration::from_millis(ms), BasisPoints::ZERO);
            Measured { table, memory, regime: Regime::Fractional, least, others, failed_batch: None }
        };
        let slow = answers(30);
        test.host.measured(test.now, launch.instance, slow);
        let why = test.host.view("f").unwrap().problem.unwrap();
        assert!(why.contains("take up to 30ms at best (without a GPU): need 60ms or more"), "{why}");
        assert!(!why.contains("other processes"), "{why}");
        // The pauses before further measurements grow.
        for seconds in [1, 2, 4] {
            let before = test.now;
            test.wait();
            assert_eq!(test.now.saturating_since(before), Duration::from_secs(seconds));
            let launch = test.trial();
            test.host.measured(test.now, launch.instance, answers(30));
        }

        let mut test = Test::on(vec![gpu()]);
        test.deploy(r#""gshare/slo":"20ms""#);
        let launch = test.trial();
        let fast = answers(5);
        test.host.measured(test.now, launch.instance, fast);
        let served = test.instance();
        test.host.listens(test.now, served.instance, 0);
        for (ms, problem) in [
            (5, None),
            (21, Some("misses its SLO of 20ms: 95 of the last 100 answers took up to 21ms")),
            (6, None),
        ] {
            for _ in 0..ANSWERS {
                test.host.answered(test.now, served.instance, Duration::from_millis(ms));
            }
            assert_eq!(test.host.view("f").unwrap().problem.as_deref(), problem);
        }

        let answers = |test: &mut Test, ms| {
            for _ in 0..ANSWERS {
                test.host.answered(test.now, served.instance, Duration::from_millis(ms));
            }
        };
        test.host.explain(served.instance, "no descriptors".to_owned());
        answers(&mut test, 21);
        assert_eq!(test.host.view("f").unwrap().problem.as_deref(), Some("no descriptors"));
        test.host.listens(test.now, served.instance, 0);
        test.host.versions.values_mut().for_each(|of| of.problem = None);
        answers(&mut test, 21);
        assert!(test.host.view("f").unwrap().problem.is_some());
        test.host.ended(test.now, served.instance, 0);
        assert_eq!(test.host.view("f").unwrap().problem, None, "an idle function misses nothing");
    }

    /// Regression: its p95 of 1 ns was taken for a measurement.
    #[test]
    fn a_function_that_was_measured_without_an_slo_and_without_a_gpu_is_measured_for_its_slo() {
        let test = Test::on(vec![gpu()]);
        let usable = |annotations: &str, least| {
            let least = Duration::from_nanos(least);
            let point = ProfilePoint::measured(share(1), Quota::WHOLE, 1, 1e9, least, least).unwrap();
            let table = ProfileTable::sparse(vec![point]).unwrap();
            let (memory, others, regime) = (Bytes(1), BasisPoints::ZERO, Regime::Fractional);
            let found = Measured { table: table.clone(), memory, regime, least, others, failed_batch: None };
            let mut version = Test::version("f", annotations);
            version.plan.wants = Wants::Profile { table, memory: Some(memory) };
            version.plan.measured = Some(found);
            test.host.can_use(&version, false)
        };
        assert!(usable("", 1));
        assert!(!usable(r#""gshare/slo":"20ms""#, 1));
        assert!(usable(r#""gshare/slo":"20ms""#, 5_000_000));
    }

    #[test]
    fn an_undisturbed_measurement_is_not_repeated_by_itself() {
        let mut test = Test::on(vec![gpu()]);
        test.deploy(r#""gshare/slo":"10ms""#);
        let launch = test.trial();
        test.measured(&launch, Regime::Fractional, &[point(share(100), 40, 40.0, 20)], 0);
        assert!(test.host.repeats.is_empty());
    }

    #[test]
    fn served_requests_correct_their_point_and_the_function_leaves_a_point_that_is_too_slow() {
        let mut test = Test::on(vec![gpu()]);
        test.deploy(r#""gshare/slo":"20ms""#);
        let launch = test.trial();
        let points = [point(share(25), 40, 50.0, 5), point(share(100), 40, 60.0, 3)];
        test.measured(&launch, Regime::Fractional, &points, 0);
        let first = test.instance();
        assert_eq!(first.parts[0].share.sm(), share(25), "the most requests for its area");
        test.host.listens(test.now, first.instance, 0);
        // Fast enough, but slower than measured.
        let answers = |test: &mut Test, ms| {
            for _ in 0..ANSWERS {
                test.host.answered(test.now, first.instance, Duration::from_millis(ms));
            }
        };
        answers(&mut test, 8);
        let kept = test.orders.try_iter().find_map(|order| match order {
            Order::Keep(_, found) => Some(found.table),
            _ => None,
        });
        assert_eq!(kept.unwrap().points()[0].p95, Duration::from_millis(8));
        assert!(test.order().is_none());
        answers(&mut test, 15);
        assert_eq!(test.instance().parts[0].share.sm(), share(100));
        test.host.invariants();
    }
}
