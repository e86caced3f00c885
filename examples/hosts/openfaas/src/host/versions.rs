//! Which version of a function serves, which one is to take over, and on which share one is measured.

use super::{Doing, Function, Host, Known, Request, Totals, Turn, Version};
use crate::api::ApiError;
use crate::deployment::{Plan, Wants};
use gshare_core::profile::ProfileTable;
use gshare_core::{
    Bytes, Duration, Engine as _, FunctionId, GpuShare, InstanceId, Quota, QuotaRange, RequestId, SmShare,
    Timestamp,
};
use gshare_sched::platform::{
    FunctionSpec, FunctionState, InstanceReport, PlatformAction, PlatformEvent, Work,
};
use std::sync::Arc;

/// The time of trials, which never report that they are ready; they bound each of their steps themselves.
const TRIALS: Duration = Duration::from_secs(3_600);

/// Shares that functions are measured on, in per cent of time and SMs, in the order in which they are tried.
const TRIAL_SHARES: [(u16, u16); 3] = [(40, 100), (30, 50), (20, 25)];

impl Host {
    /// A function was measured, and no share does for what it wants.
    pub(super) fn give_up(&mut self, function: FunctionId, why: &str) {
        let Some(known) = self.versions.get_mut(&function) else { return };
        (known.problem, known.hopeless) = (Some(why.to_owned()), true);
        let name = known.version.deployment.service.clone();
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

    /// Deploys a function, or another version of one.
    ///
    /// # Errors
    /// When the platform refuses; nothing changed then.
    pub fn deploy(
        &mut self,
        now: Timestamp,
        version: Version,
        created_ms: u64,
        replicas: Option<u32>,
    ) -> Result<(), ApiError> {
        let name = version.deployment.service.clone();
        let spec = version.plan.spec(bounds(&version.plan, replicas), self.guess)?;
        let id = self.add(version, None);
        let told = self.tell(now, PlatformEvent::FunctionDeployed { function: id, spec: Box::new(spec) });
        if let Err(error) = told {
            self.versions.remove(&id);
            return Err(error);
        }
        let mut ousted = None;
        match self.functions.get_mut(&name) {
            Some(function) => {
                ousted = function.next.replace(id);
                (function.created_ms, function.replicas) = (created_ms, replicas);
            }
            None => {
                let (invocations, before) = (0, Totals::default());
                let function =
                    Function { serving: id, next: None, created_ms, replicas, invocations, before };
                self.functions.insert(name, function);
            }
        }
        if let Some(ousted) = ousted {
            self.drop_version(ousted);
        }
        self.change_over();
        self.settle();
        Ok(())
    }

    pub(super) fn add(&mut self, version: Version, measures: Option<(FunctionId, usize)>) -> FunctionId {
        let id = FunctionId::new(self.next_function);
        self.next_function += 1;
        let version = Arc::new(version);
        let known = Known {
            version,
            measures,
            gpu_ns: 0,
            parked: 0,
            migrated: 0,
            pipelined: 0,
            problem: None,
            hopeless: false,
            completed: false,
            progress: None,
        };
        self.versions.insert(id, known);
        id
    }

    /// Versions that are ready, or that the one before is in the way of, take over.
    pub(super) fn change_over(&mut self) {
        loop {
            let ready = |function: &Function| {
                let next = function.next?;
                let known = &self.versions.get(&next)?.version.plan;
                let of = |id| self.instances.values().filter(move |instance| instance.function == id);
                let view = self.platform.function(next);
                let over = of(next).any(|instance| instance.doing == Doing::Ready)
                    || of(function.serving).next().is_none()
                    || view.as_ref().is_some_and(|view| view.stats.unmet > 0)
                    || matches!(known.wants, Wants::Training { .. })
                    || view.is_some_and(|view| {
                        view.spec.min_instances == 0 && view.state == FunctionState::Deployed
                    });
                over.then_some(next)
            };
            let found = self.functions.iter().find_map(|(name, of)| Some((name.clone(), ready(of)?)));
            let Some((name, next)) = found else { return };
            if let Some(function) = self.functions.get_mut(&name) {
                function.next = None;
                let old = core::mem::replace(&mut function.serving, next);
                self.drop_version(old);
                self.settle();
            }
        }
    }

    /// The platform is to drain and forget a version, and what measures it.
    pub(super) fn drop_version(&mut self, id: FunctionId) {
        let measures = |(_, known): &(&FunctionId, &Known)| known.measures.is_some_and(|(of, _)| of == id);
        let trials: Vec<FunctionId> =
            self.versions.iter().filter(measures).map(|(trial, _)| *trial).collect();
        for function in trials.into_iter().chain([id]) {
            self.events.push_back(PlatformEvent::FunctionRemoved { function });
        }
        let totals = self.totals(id);
        let name = self.versions.get(&id).map(|known| known.version.deployment.service.clone());
        if let Some(function) = name.and_then(|name| self.functions.get_mut(&name)) {
            function.before.add(totals);
        }
    }

    /// Ends a function: what waits for it is refused, its instances finish what they have.
    pub fn remove(&mut self, now: Timestamp, name: &str) -> bool {
        self.last = self.last.max(now);
        let Some(function) = self.functions.remove(name) else { return false };
        for version in [function.next, Some(function.serving)].into_iter().flatten() {
            self.drop_version(version);
        }
        self.settle();
        true
    }

    /// Asks for `replicas` instances. A function whose load scales it keeps at least that many; 0 lets the next request wake it up.
    ///
    /// # Errors
    /// When there is no such function, or more are asked for than its most.
    pub fn set_replicas(&mut self, now: Timestamp, name: &str, replicas: u32) -> Result<(), ApiError> {
        let function = self.functions.get(name).ok_or_else(|| ApiError::unknown_function(name))?;
        let (newest, created_ms) = (function.next.unwrap_or(function.serving), function.created_ms);
        let Some(known) = self.versions.get(&newest) else { return Ok(()) };
        let plan = &known.version.plan;
        if matches!(plan.wants, Wants::Training { .. }) {
            return Err(ApiError::bad("replicas: a training job has the workers that it was deployed with"));
        }
        let most = if plan.scales() { plan.bounds.1 } else { 4096 };
        if replicas > most {
            return Err(ApiError::bad(format!("replicas: {replicas}: need at most {most}")));
        }
        if replicas == 0 {
            // The scaler lets instances go when no load has come for a while; here the caller asked for it.
            let mut plan = plan.clone();
            if let Some(view) = self.platform.function(newest)
                && let (Wants::Measured, Work::Inference { profile: Some(table) }) =
                    (&plan.wants, &view.spec.work)
            {
                plan.wants = Wants::Profile { table: table.clone(), memory: Some(view.spec.memory) };
            }
            let version = Version { deployment: known.version.deployment.clone(), plan };
            return self.deploy(now, version, created_ms, Some(0));
        }
        let (min_instances, max_instances) = bounds(plan, Some(replicas));
        let changed = PlatformEvent::BoundsChanged { function: newest, min_instances, max_instances };
        self.tell(now, changed)?;
        if let Some(function) = self.functions.get_mut(name) {
            function.replicas = Some(replicas);
        }
        Ok(())
    }

    /// Takes the result of the trials of an instance.
    pub fn measured(
        &mut self,
        now: Timestamp,
        instance: InstanceId,
        profile: ProfileTable,
        memory: Bytes,
    ) -> Option<Arc<Version>> {
        self.last = self.last.max(now);
        let trial = self.instances.get(&instance)?.function;
        let (function, _) = self.versions.get(&trial)?.measures?;
        let known = self.versions.get_mut(&function)?;
        (known.problem, known.progress) = (None, None);
        let version = Arc::clone(&known.version);
        self.instances.remove(&instance);
        self.report(instance, InstanceReport::Completed);
        let memory = version.plan.memory.unwrap_or(memory);
        self.events.push_back(PlatformEvent::ProfileLearned { function, profile, memory: Some(memory) });
        self.events.push_back(PlatformEvent::FunctionRemoved { function: trial });
        self.versions.remove(&trial);
        self.settle();
        Some(version)
    }

    /// How far the trials of an instance are.
    pub fn progress(&mut self, instance: InstanceId, text: String) {
        let of = self.instances.get(&instance).and_then(|known| self.versions.get(&known.function)?.measures);
        if let Some(of) = of.and_then(|(of, _)| self.versions.get_mut(&of)) {
            of.progress = Some(text);
        }
    }

    /// Gives a function a companion that measures it, on the first share from this one on that finds room at once.
    pub(super) fn measure(&mut self, function: FunctionId, from: usize) {
        let Some(known) = self.versions.get(&function) else { return };
        let (deployment, plan) = (known.version.deployment.clone(), known.version.plan.clone());
        let memory = plan.memory.unwrap_or(self.guess);
        let tenant = plan.tenant;
        for (rung, (time, sm)) in TRIAL_SHARES.into_iter().enumerate().skip(from) {
            let share = trial_share(time, sm, Bytes(memory.get().div_ceil(plan.devices.into())));
            let work = Work::Training { workers: plan.devices, share };
            let spec = FunctionSpec::new(work, memory).with_tenant(tenant).with_loads(TRIALS, TRIALS);
            let version = Version { deployment: deployment.clone(), plan: plan.clone() };
            let trial = self.add(version, Some((function, rung)));
            let mut actions = Vec::new();
            let event = PlatformEvent::FunctionDeployed { function: trial, spec: Box::new(spec) };
            let told = self.platform.handle(self.last, event, &mut actions);
            let found = actions.iter().any(|action| matches!(action, PlatformAction::Start { .. }));
            if told.is_ok() && (found || rung + 1 == TRIAL_SHARES.len()) {
                let waits = "waits for a share of a device to be measured on".to_owned();
                if let Some(known) = self.versions.get_mut(&function) {
                    known.progress = Some(waits);
                }
                return self.carry_out(actions);
            }
            self.versions.remove(&trial);
            if told.is_ok() {
                let removed = PlatformEvent::FunctionRemoved { function: trial };
                let removed = self.platform.handle(self.last, removed, &mut actions);
                debug_assert!(removed.is_ok(), "{removed:?}");
            } else if let (Err(error), Some(known)) = (told, self.versions.get_mut(&function)) {
                known.problem = Some(format!("cannot be measured: {error}"));
            }
        }
    }
}

/// Fewest and most instances, when `replicas` were asked for.
fn bounds(plan: &Plan, replicas: Option<u32>) -> (u32, u32) {
    match replicas {
        None => plan.bounds,
        Some(replicas) if plan.scales() => (replicas, plan.bounds.1),
        Some(replicas) => (replicas, replicas.max(1)),
    }
}

fn trial_share(time: u16, sm: u16, memory: Bytes) -> GpuShare {
    let quota = Quota::from_percent(time).unwrap_or(Quota::WHOLE);
    let time = QuotaRange::new(quota, quota).unwrap_or(QuotaRange::BEST_EFFORT);
    let sm = SmShare::from_percent(sm).unwrap_or(SmShare::WHOLE);
    GpuShare::new(time, sm, sm, Some(memory)).unwrap_or(GpuShare::WHOLE)
}
