//! Deployment and removal of functions, and the change from one version of a function to the next.

use super::{Function, Host, Instance, Known, Measuring, Totals, Version};
use crate::api::ApiError;
use crate::deployment::{Plan, Wants};
use gshare_core::{FunctionId, InstanceId, Timestamp};
use gshare_sched::platform::{FunctionState, Life, PlatformEvent, Work};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Host {
    /// Deploys a function, or a new version of a function.
    ///
    /// # Errors
    /// 400 if the function's profile is too slow for its SLO, or the platform refuses the function. Nothing changes then.
    pub fn deploy(
        &mut self,
        now: Timestamp,
        version: Version,
        created_ms: u64,
        replicas: Option<u32>,
    ) -> Result<(), ApiError> {
        let bounds = bounds(&version.plan, replicas);
        self.deploy_within(now, version, created_ms, (replicas, bounds), false)
    }

    /// Deploys a function of an earlier host, some of whose instances may run: none starts before [`Host::keep_minimum`].
    ///
    /// # Errors
    /// As [`Host::deploy`].
    pub fn deploy_found(
        &mut self,
        now: Timestamp,
        version: Version,
        created_ms: u64,
        replicas: Option<u32>,
    ) -> Result<(), ApiError> {
        let (_, most) = bounds(&version.plan, replicas);
        self.deploy_within(now, version, created_ms, (replicas, (0, most)), true)
    }

    /// A function deployed by [`Host::deploy_found`] keeps its least number of instances from now on.
    pub fn keep_minimum(&mut self, now: Timestamp, name: &str) {
        let Some(function) = self.functions.get(name) else { return };
        let (newest, replicas) = (function.next.unwrap_or(function.serving), function.replicas);
        let Some(known) = self.versions.get(&newest).filter(|known| !known.completed) else { return };
        let (min_instances, max_instances) = bounds(&known.version.plan, replicas);
        self.inform(now, PlatformEvent::BoundsChanged { function: newest, min_instances, max_instances });
    }

    /// A function deployed by [`Host::deploy_found`] was a training job, and is done: it does not start again.
    pub fn completed_before(&mut self, name: &str) {
        let Some(id) = self.functions.get(name).map(|function| function.serving) else { return };
        if let Some(known) = self.versions.get_mut(&id) {
            known.completed = known.trains();
        }
    }

    /// Lets a function have as many instances as its deployment says, and no client's number.
    pub fn free_replicas(&mut self, now: Timestamp, name: &str) {
        let Some(function) = self.functions.get_mut(name) else { return };
        function.replicas = None;
        self.keep_minimum(now, name);
    }

    /// Number of instances that a function keeps at any load.
    pub fn least(&self, name: &str) -> u32 {
        let of = self.functions.get(name).and_then(|of| self.versions.get(&of.next.unwrap_or(of.serving)));
        let replicas = self.replicas(name);
        of.map_or(0, |of| bounds(&of.version.plan, replicas).0)
    }

    /// The newest version of a function.
    pub fn newest(&self, name: &str) -> Option<Arc<Version>> {
        let function = self.functions.get(name)?;
        let known = self.versions.get(&function.next.unwrap_or(function.serving))?;
        Some(Arc::clone(&known.version))
    }

    /// Number of instances that a client asked for.
    pub fn replicas(&self, name: &str) -> Option<u32> {
        self.functions.get(name)?.replicas
    }

    fn deploy_within(
        &mut self,
        now: Timestamp,
        version: Version,
        created_ms: u64,
        (replicas, bounds): (Option<u32>, (u32, u32)),
        found: bool,
    ) -> Result<(), ApiError> {
        let name = version.deployment.service.clone();
        let nodes = self.nodes_of(&version);
        let spec = version.plan.spec(bounds, self.guess)?.with_found(found).with_nodes(nodes);
        if let Wants::Profile { table, .. } = &version.plan.wants
            && let Some(why) = self.unmet(&version, table, version.plan.measured.as_ref())
        {
            return Err(ApiError::bad(why));
        }
        let problem = self.unsuitable(&version.plan);
        let id = self.add(version, None);
        if let Some(known) = self.versions.get_mut(&id) {
            known.problem = problem;
        }
        let told = self.tell(now, PlatformEvent::FunctionDeployed { function: id, spec: Box::new(spec) });
        if let Err(error) = told {
            self.versions.remove(&id);
            return Err(error);
        }
        let mut ousted = None;
        match self.functions.get_mut(&name) {
            Some(function) => {
                ousted = function.next.replace(id);
                self.changing.insert(name.clone());
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

    pub(super) fn add(&mut self, version: Version, measures: Option<FunctionId>) -> FunctionId {
        let id = FunctionId::new(self.next_function);
        self.next_function += 1;
        let found = version.plan.measured.clone();
        let known = Known {
            version: Arc::new(version),
            measures,
            over: false,
            measuring: Measuring::of(found),
            before: Totals::default(),
            problem: None,
            hopeless: false,
            completed: false,
        };
        self.versions.insert(id, known);
        id
    }

    /// Lets each new version take over once an instance of it is ready, or if it cannot or need not start beside the old
    /// version.
    pub(super) fn change_over(&mut self) {
        loop {
            let changes = |name: &String| self.functions.get(name).is_some_and(|of| of.next.is_some());
            self.changing.retain(changes);
            let ready = |function: &Function| {
                let next = function.next?;
                let known = &self.versions.get(&next)?.version.plan;
                let of = |id| self.instances.values().filter(move |instance| instance.function == id);
                let view = self.platform.function(next);
                let is_ready = |(id, one): (&InstanceId, &Instance)| {
                    one.function == next && matches!(self.life(*id), Some((Life::Ready, _)))
                };
                let over = self.instances.iter().any(is_ready)
                    || of(function.serving).next().is_none()
                    || view.as_ref().is_some_and(|view| view.stats.unmet > 0)
                    || matches!(known.wants, Wants::Training { .. })
                    || view.is_some_and(|view| {
                        view.spec.min_instances == 0 && view.state == FunctionState::Deployed
                    });
                over.then_some(next)
            };
            let found =
                self.changing.iter().find_map(|name| Some((name.clone(), ready(self.functions.get(name)?)?)));
            let Some((name, next)) = found else { return };
            if let Some(function) = self.functions.get_mut(&name) {
                function.next = None;
                let old = core::mem::replace(&mut function.serving, next);
                self.drop_version(old);
                self.settle();
            }
        }
    }

    /// Has the platform drain and forget a version, and ends the trials that measure it.
    pub(super) fn drop_version(&mut self, id: FunctionId) {
        let measures = |(_, known): &(&FunctionId, &Known)| known.measures == Some(id) && !known.over;
        let trials: Vec<FunctionId> =
            self.versions.iter().filter(measures).map(|(trial, _)| *trial).collect();
        for trial in trials {
            self.remove_trial(trial);
            let runs = self.instances.values().filter(|instance| instance.function == trial);
            for stop in runs.filter_map(|instance| instance.stop.as_ref()) {
                stop.store(true, Ordering::Release);
            }
        }
        self.events.push_back(PlatformEvent::FunctionRemoved { function: id });
        let totals = self.totals(id);
        let name = self.versions.get(&id).map(|known| known.version.deployment.service.clone());
        if let Some(function) = name.and_then(|name| self.functions.get_mut(&name)) {
            function.before.add(totals);
        }
    }

    /// Removes a function. Its waiting requests are refused, and its instances finish the requests that they serve.
    ///
    /// False if there is no such function.
    pub fn remove(&mut self, now: Timestamp, name: &str) -> bool {
        self.last = self.last.max(now);
        let Some(function) = self.functions.remove(name) else { return false };
        for version in [function.next, Some(function.serving)].into_iter().flatten() {
            self.drop_version(version);
        }
        self.settle();
        true
    }

    /// Whether a function may have this number of instances.
    ///
    /// # Errors
    /// As [`Host::set_replicas`].
    pub fn may_have(&self, name: &str, replicas: u32) -> Result<(), ApiError> {
        let function = self.functions.get(name).ok_or_else(|| ApiError::unknown_function(name))?;
        let Some(known) = self.versions.get(&function.next.unwrap_or(function.serving)) else {
            return Ok(());
        };
        let plan = &known.version.plan;
        if matches!(plan.wants, Wants::Training { .. }) {
            return Err(ApiError::bad("replicas: a training job has the workers that it was deployed with"));
        }
        let most = if plan.scales() { plan.bounds.1 } else { 4096 };
        if replicas > most {
            return Err(ApiError::bad(format!("replicas: {replicas}: need at most {most}")));
        }
        Ok(())
    }

    /// Sets the number of instances. A function that load scales keeps at least `replicas`; with 0 the next request starts one
    /// again.
    ///
    /// # Errors
    /// 404 without such a function; 400 for a training job, or for more replicas than the function's maximum.
    pub fn set_replicas(&mut self, now: Timestamp, name: &str, replicas: u32) -> Result<(), ApiError> {
        self.may_have(name, replicas)?;
        let function = self.functions.get(name).ok_or_else(|| ApiError::unknown_function(name))?;
        let (newest, created_ms) = (function.next.unwrap_or(function.serving), function.created_ms);
        let Some(known) = self.versions.get(&newest) else { return Ok(()) };
        let plan = &known.version.plan;
        if replicas == 0 {
            // The scaler stops idle instances only after a while, but this caller wants them gone now.
            let mut plan = plan.clone();
            if let Some(view) = self.platform.function(newest)
                && let (Wants::Measured, Work::Inference { profile: Some(table) }) =
                    (&plan.wants, &view.spec.work)
            {
                plan.wants = Wants::Profile { table: table.clone(), memory: Some(view.spec.memory) };
                plan.measured = known.measuring.found.clone();
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
}

/// The fewest and the most instances of a function for a requested number of replicas.
fn bounds(plan: &Plan, replicas: Option<u32>) -> (u32, u32) {
    match replicas {
        None => plan.bounds,
        Some(replicas) if plan.scales() => (replicas, plan.bounds.1),
        Some(replicas) => (replicas, replicas.max(1)),
    }
}
