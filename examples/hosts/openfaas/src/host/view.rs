//! Views of functions for the API, and checks of the host's books against the platform's.

use super::{Function, Host, Totals, Version, client};
use crate::deployment::Wants;
use crate::history::Count;
use gshare_core::profile::ProfileTable;
use gshare_core::{BasisPoints, Duration, FunctionId, InstanceId, Timestamp};
use gshare_sched::platform::{FunctionState, FunctionStats, Life, Part, PlatformAction, Rejection, Work};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// An instance as clients see it.
#[derive(Debug, Clone, serde::Serialize)]
pub struct InstanceView {
    /// Number of the instance.
    pub instance: InstanceId,
    /// State of its life.
    pub life: Life,
    /// Its share on each device.
    pub parts: Vec<Part>,
    /// Number of requests in service.
    pub requests: usize,
    /// Process ids.
    pub pids: Vec<u32>,
    /// Names of the processes at the node's daemon.
    pub clients: Vec<String>,
}

/// State and figures of a function at one moment.
#[derive(Debug, Clone, serde::Serialize)]
pub struct View {
    /// The newest version.
    #[serde(skip)]
    pub version: Arc<Version>,
    /// Time of the first deployment, in ms since 1970.
    #[serde(skip)]
    pub created_ms: u64,
    /// Number of requests so far.
    #[serde(skip)]
    pub invocations: u64,
    /// `serving`, `training`, `completed`, `failing`, `measuring`, `parked`, `starting` or `idle`.
    pub state: &'static str,
    /// `inference`, `pipeline` or `training`.
    pub workload: &'static str,
    /// Progress of its trials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measuring: Option<String>,
    /// Why the function does not run: a failed start, a lost device, or a size that fits no device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Time in which a request should be answered, in ns.
    #[serde(rename = "slo_ns", skip_serializing_if = "Option::is_none")]
    pub slo: Option<Duration>,
    /// Number of requests that wait for an instance.
    pub waiting: u64,
    /// Number of answered requests.
    pub answered: u64,
    /// Number of requests that were answered within the SLO.
    pub within_slo: u64,
    /// Number of rejected requests.
    pub rejected: u64,
    /// Number of started instances.
    pub starts: u64,
    /// Number of times that an instance was parked for another function.
    pub parked: u64,
    /// Number of moves of an instance to better slices.
    pub migrated: u64,
    /// Number of requests that went through several stages, each on its own slice.
    pub pipelined: u64,
    /// Device time used, in s.
    pub gpu_seconds: f64,
    /// GPU memory booked for an instance, in bytes.
    pub memory_bytes: u64,
    /// Measured points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileTable>,
    /// Largest share of GPU time that other processes used during the trials, in basis points.
    #[serde(rename = "others_bp", skip_serializing_if = "Option::is_none")]
    pub others: Option<BasisPoints>,
    /// Instances of the function.
    pub instances: Vec<InstanceView>,
}

impl View {
    /// Number of instances that serve, start, or are parked.
    pub fn replicas(&self) -> u64 {
        self.count(|life| matches!(life, Life::Starting | Life::Ready | Life::Parked))
    }

    /// Number of instances that are ready.
    pub fn available(&self) -> u64 {
        self.count(|life| life == Life::Ready)
    }

    fn count(&self, of: impl Fn(Life) -> bool) -> u64 {
        self.instances.iter().filter(|instance| of(instance.life)).count() as u64
    }
}

/// The state of a function in few words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Brief {
    /// Number of instances that serve, start, or are parked.
    pub replicas: u64,
    /// Number of instances that are ready.
    pub ready: u64,
    /// Number of instances that it keeps at any load.
    pub least: u32,
    /// Progress of the trials, while it is being measured.
    pub measuring: Option<String>,
    /// Why it does not run.
    pub problem: Option<String>,
    /// Whether it was a training job that has finished.
    pub completed: bool,
}

/// Number of decisions kept.
const DECISIONS: usize = 200;

/// A decision of the platform, for users.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Decision {
    /// Time since the start of the host, in ns.
    #[serde(rename = "at_ns")]
    pub at: Timestamp,
    /// The decision and its reason, as one sentence.
    pub what: String,
}

impl Host {
    /// Work that one version has done.
    pub(super) fn totals(&self, id: FunctionId) -> Totals {
        let stats = self.platform.function(id).map_or_else(FunctionStats::default, |view| view.stats);
        let before = self.versions.get(&id).map_or_else(Totals::default, |known| known.before);
        let live = self.instances.values().filter(|instance| instance.function == id);
        let live: u64 = live.flat_map(|instance| instance.gpu_ns.values()).sum();
        Totals { stats, gpu_ns: before.gpu_ns + live, ..before }
    }

    /// Records a decision for users, except for dispatches: there is one for each request.
    pub(super) fn note(&mut self, action: &PlatformAction) {
        let name = |id: &FunctionId| {
            self.versions.get(id).map_or_else(
                || id.to_string(),
                |of| match of.measures {
                    Some(_) => format!("measurement of {}", of.version.deployment.service),
                    None => of.version.deployment.service.clone(),
                },
            )
        };
        let of = |id: &InstanceId| {
            let function = self.instances.get(id).map(|known| name(&known.function));
            format!("{} {}", function.unwrap_or_default(), id.number())
        };
        let places = |parts: &[Part]| {
            let place = |part: &Part| match part.slice {
                Some(slice) => format!("GPU {} slice {}", part.gpu.number(), slice.start),
                None => format!(
                    "GPU {} with {} of the time, {} of the SMs",
                    part.gpu.number(),
                    part.share.time(),
                    part.share.sm()
                ),
            };
            parts.iter().map(place).collect::<Vec<_>>().join(", ")
        };
        let what = match action {
            PlatformAction::Dispatch { .. }
            | PlatformAction::Fetch { .. }
            | PlatformAction::Forget { .. } => return,
            PlatformAction::Profile { function } => format!("{} is to be measured", name(function)),
            PlatformAction::Start { instance, function, parts, parked, .. } => {
                let parked = if *parked { ", parked" } else { "" };
                format!("{} {} starts on {}{parked}", name(function), instance.number(), places(parts))
            }
            PlatformAction::Park { instance, .. } => {
                format!("{} makes room for another function", of(instance))
            }
            PlatformAction::Unpark { instance, parts, .. } => {
                format!("{} comes back to {}", of(instance), places(parts))
            }
            PlatformAction::Drain { instance } => format!("{} gets no more requests", of(instance)),
            PlatformAction::Stop { instance, cause } => format!("{} is stopped: {cause}", of(instance)),
            PlatformAction::Reject { request, reason } => {
                let name = self.requests.get(request).map(|of| of.name.clone()).unwrap_or_default();
                format!("a request of {name} is refused: {reason}")
            }
        };
        self.decided(what);
    }

    /// Appends a sentence to the decisions.
    pub(super) fn decided(&mut self, what: String) {
        if self.decisions.len() >= DECISIONS {
            self.decisions.pop_front();
        }
        self.decisions.push_back(Decision { at: self.last, what });
    }

    /// The last decisions, newest first.
    pub fn decisions(&self) -> Vec<Decision> {
        self.decisions.iter().rev().cloned().collect()
    }

    /// Ready instances, waiting requests and GPU time of each function, by name.
    pub fn counts(&self) -> BTreeMap<String, Count> {
        let mut of: BTreeMap<FunctionId, Count> = BTreeMap::new();
        self.platform.instances(&mut |view| {
            of.entry(view.function).or_default().ready += u64::from(view.life == Life::Ready);
        });
        for instance in self.instances.values() {
            of.entry(instance.function).or_default().gpu_ns += instance.gpu_ns.values().sum::<u64>();
        }
        let counts = |(name, function): (&String, &Function)| {
            let mut sum = Count { gpu_ns: function.before.gpu_ns, ..Count::default() };
            for id in [Some(function.serving), function.next].into_iter().flatten() {
                let own = of.get(&id).copied().unwrap_or_default();
                sum.ready += own.ready;
                sum.gpu_ns += own.gpu_ns + self.versions.get(&id).map_or(0, |known| known.before.gpu_ns);
                sum.waiting += self.platform.waiting(id) as u64;
            }
            (name.clone(), sum)
        };
        self.functions.iter().map(counts).collect()
    }

    /// The state of each function, by name: one look at all instances.
    pub fn briefs(&self) -> BTreeMap<String, Brief> {
        let mut of: BTreeMap<FunctionId, (u64, u64)> = BTreeMap::new();
        self.platform.instances(&mut |view| {
            let (replicas, ready) = of.entry(view.function).or_default();
            *replicas += u64::from(matches!(view.life, Life::Starting | Life::Ready | Life::Parked));
            *ready += u64::from(view.life == Life::Ready);
        });
        let brief = |(name, function): (&String, &Function)| {
            let newest = function.next.unwrap_or(function.serving);
            let known = self.versions.get(&newest)?;
            let platform = self.platform.function(newest);
            let unmeasured = platform.as_ref().is_some_and(|view| view.state == FunctionState::Profiling);
            let never_fits = platform.is_some_and(|view| view.never_fits);
            let (mut replicas, mut ready) = (0, 0);
            for id in [Some(function.serving), function.next].into_iter().flatten() {
                let own = of.get(&id).copied().unwrap_or_default();
                (replicas, ready) = (replicas + own.0, ready + own.1);
            }
            let brief = Brief {
                replicas,
                ready,
                least: self.least(name),
                measuring: self.progress_of(newest).filter(|_| unmeasured),
                problem: known
                    .problem
                    .clone()
                    .or_else(|| never_fits.then(|| Rejection::NeverFits.to_string())),
                completed: known.completed,
            };
            Some((name.clone(), brief))
        };
        self.functions.iter().filter_map(brief).collect()
    }

    /// Names of all functions.
    pub fn names(&self) -> Vec<String> {
        self.functions.keys().cloned().collect()
    }

    /// Views of all functions, by name.
    pub fn views(&self) -> Vec<View> {
        self.functions.keys().filter_map(|name| self.view(name)).collect()
    }

    /// View of one function; none if there is no such function.
    pub fn view(&self, name: &str) -> Option<View> {
        let function = self.functions.get(name)?;
        let newest = function.next.unwrap_or(function.serving);
        let known = self.versions.get(&newest)?;
        let ids = [Some(function.serving), function.next];
        let mut lives = BTreeMap::new();
        self.platform.instances(&mut |view| {
            if ids.contains(&Some(view.function)) {
                lives.insert(view.instance, view.life);
            }
        });
        let instance = |(id, life): (&InstanceId, &Life)| {
            let known = self.instances.get(id)?;
            let clients =
                (0..known.processes.len()).map(|index| client(name, *id, index, known.processes.len()));
            Some(InstanceView {
                instance: *id,
                life: *life,
                parts: known.parts.clone(),
                requests: known.requests.len(),
                pids: self.pids(*id),
                clients: clients.collect(),
            })
        };
        let (platform, mut totals) = (self.platform.function(newest), self.totals(function.serving));
        if let Some(next) = function.next {
            totals.add(self.totals(next));
        }
        totals.add(function.before);
        let profile = platform.as_ref().and_then(|view| match &view.spec.work {
            Work::Inference { profile } => profile.clone(),
            _ => None,
        });
        let never_fits = platform.as_ref().is_some_and(|view| view.never_fits);
        let measuring = self.progress_of(newest).filter(|_| profile.is_none());
        let problem = known.problem.clone().or_else(|| never_fits.then(|| Rejection::NeverFits.to_string()));
        let workload = match known.version.plan.wants {
            Wants::Training { .. } => "training",
            Wants::Pipeline { .. } => "pipeline",
            _ => "inference",
        };
        let instances: Vec<InstanceView> = lives.iter().filter_map(instance).collect();
        let any = |life: Life| instances.iter().any(|instance| instance.life == life);
        let state = match () {
            () if known.completed => "completed",
            () if any(Life::Ready) && workload == "training" => "training",
            () if any(Life::Ready) => "serving",
            () if problem.is_some() => "failing",
            () if measuring.is_some() => "measuring",
            () if any(Life::Parked) => "parked",
            () if any(Life::Starting) => "starting",
            () => "idle",
        };
        Some(View {
            version: Arc::clone(&known.version),
            created_ms: function.created_ms,
            invocations: function.invocations,
            state,
            workload,
            measuring,
            problem,
            slo: known.version.plan.slo,
            waiting: ids.into_iter().flatten().map(|id| self.platform.waiting(id) as u64).sum(),
            answered: totals.stats.answered,
            within_slo: totals.stats.within_slo,
            rejected: totals.stats.rejected,
            starts: totals.stats.starts,
            parked: totals.parked,
            migrated: totals.migrated,
            pipelined: totals.pipelined,
            gpu_seconds: totals.gpu_ns as f64 / 1e9,
            memory_bytes: platform.map_or(0, |view| view.spec.memory.get()),
            profile: profile
                .filter(|_| matches!(known.version.plan.wants, Wants::Measured | Wants::Profile { .. })),
            others: known.measuring.found.as_ref().map(|found| found.others),
            instances,
        })
    }

    /// Checks the host's books against the platform's.
    ///
    /// # Panics
    /// If they differ.
    pub fn invariants(&self) {
        let mut known = BTreeSet::new();
        self.platform.instances(&mut |view| {
            known.insert(view.instance);
        });
        for (id, instance) in &self.instances {
            assert!(known.contains(id), "{id} is not the platform's");
            for request in &instance.requests {
                assert_eq!(self.requests[request].on, Some(*id), "{request} is elsewhere");
            }
        }
        for (id, known) in &self.versions {
            let runs = self.instances.values().any(|instance| instance.function == *id);
            assert!(!known.over || runs, "{id} was measured on, and is not forgotten");
        }
        for (id, request) in &self.requests {
            let on = request.on.and_then(|instance| self.instances.get(&instance));
            assert!(request.on.is_none() || on.is_some_and(|on| on.requests.contains(id)), "{id} is nowhere");
        }
    }
}
