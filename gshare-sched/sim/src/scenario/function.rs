//! Functions in the form of a scenario.

use super::error::ScenarioError;
use super::load_text::LoadText;
use super::one;
use super::units::{Span, Text};
use crate::world::{Function, Limits, Load};
use gshare_core::dag::{Component, Dag};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, GpuShare, Quota, QuotaRange, ServiceClass, SmShare, TenantId};
use gshare_sched::pipeline::Goal;
use gshare_sched::platform::{FunctionSpec, Regime, Work};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The most clients of a closed loop, equal to the default capacity of a function's queue.
const MOST_CLIENTS: u32 = 10_000;

/// A function of a scenario.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FunctionText {
    /// The function's name, unlike all other names.
    pub name: String,
    /// The kind of the function's work.
    pub work: WorkText,
    /// The GPU memory of an instance.
    pub memory: Text<Bytes>,
    /// The time for the answer to a request.
    pub slo: Option<Span>,
    /// The time after which a caller gives up.
    pub patience: Option<Span>,
    /// The number of devices of one node under an instance of an inference function, each with an equal part of its memory; default
    /// 1.
    #[serde(default = "one")]
    pub devices: u32,
    /// The fewest and the most instances; default 0 and 1.
    pub instances: Option<(u32, u32)>,
    /// The regime required by the function.
    pub regime: Option<Regime>,
    /// The tenant that pays for the function.
    #[serde(default)]
    pub tenant: u32,
    /// The time to start a process and load from disk, and the same from host memory; the default depends on the memory.
    pub loads: Option<(Span, Span)>,
    /// The measured points of an inference function.
    #[serde(default)]
    pub profile: Vec<PointText>,
    /// The measured points from a file: a `ProfileTable` in JSON.
    pub profile_file: Option<PathBuf>,
    /// Whether the platform does not know the profile and has to measure it first.
    #[serde(default)]
    pub unprofiled: bool,
    /// The components of a pipeline.
    pub dag: Option<DagText>,
    /// The components from a file: a `Dag` in JSON.
    pub dag_file: Option<PathBuf>,
    /// The memory of the run-time on every slice of a pipeline; default 1 GiB.
    pub runtime_memory: Option<Text<Bytes>>,
    /// The number of workers of a training job; default 1.
    #[serde(default = "one")]
    pub workers: u32,
    /// The share of each worker.
    pub share: Option<ShareText>,
    /// The length of the training with its whole share.
    pub train: Option<Span>,
    /// The speed of the training with its whole share, as a part of its speed on a whole device; default all of it.
    #[serde(default = "all")]
    pub speed: Text<Quota>,
    /// Whether an instance of an inference function takes several requests at once as one batch; default not.
    #[serde(default)]
    pub batches: bool,
    /// The most time for an instance of an inference function while others leave it; default all.
    pub time_limit: Option<Text<Quota>>,
    /// The time of a process's work after its device's work on a request, during which it takes no other request; default none.
    pub host: Option<Span>,
    /// `slo-sensitive[:PERCENT]` or `best-effort`: the treatment beside other functions on a fractional device; default neither.
    pub class: Option<Text<ServiceClass>>,
    /// `always` or `while_full`: states when an instance on a fractional device runs at the limits of its share and not at its request;
    /// default always.
    pub limits: Option<Limits>,
    /// The load of the function; none for training.
    pub load: Option<LoadText>,
}

/// The kind of a function's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WorkText {
    /// One model.
    Inference,
    /// Several models that may be cut into stages.
    Pipeline,
    /// Workers of a training job.
    Training,
}

/// A measured point of a profile.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PointText {
    /// The share of the SMs.
    pub sm: Text<SmShare>,
    /// The share of GPU time; default all of it.
    #[serde(default = "all")]
    pub quota: Text<Quota>,
    /// Requests per batch; default 1.
    #[serde(default = "one")]
    pub batch: u32,
    /// Requests per second.
    pub rps: f64,
    /// The median time of a batch.
    pub p50: Span,
    /// The 95th percentile; default the median.
    pub p95: Option<Span>,
}

const fn all() -> Text<Quota> {
    Text(Quota::WHOLE)
}

/// Components and edges of a pipeline.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DagText {
    /// The models.
    pub component: Vec<ComponentText>,
    /// The data between two components: from, to, bytes.
    #[serde(default)]
    pub edge: Vec<(String, String, Text<Bytes>)>,
}

/// A model of a pipeline.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ComponentText {
    /// The component's name.
    pub name: String,
    /// The share of the requests through the component; default all.
    #[serde(default = "all")]
    pub runs: Text<Quota>,
    /// The component's memory, without the run-time's memory.
    pub memory: Text<Bytes>,
    /// Slice profiles, each with the time of a request on it.
    pub on: Vec<(String, Span)>,
}

/// A share of a device.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ShareText {
    /// The guaranteed and the greatest share of time.
    pub time: (Text<Quota>, Text<Quota>),
    /// The guaranteed share of the SMs.
    pub sm: Text<SmShare>,
    /// The most SMs; default the guaranteed share.
    pub sm_limit: Option<Text<SmShare>>,
}

impl FunctionText {
    fn field(&self, name: &str) -> String {
        format!("function `{}`: {name}", self.name)
    }

    fn wrong(&self, name: &str, value: &str, bound: &str) -> ScenarioError {
        ScenarioError::field(&self.field(name), value, bound)
    }

    pub(super) fn build(&self, folder: &Path) -> Result<Function, ScenarioError> {
        let profile = self.profile(folder)?;
        let work = match self.work {
            WorkText::Inference => Work::Inference { profile: profile.clone().filter(|_| !self.unprofiled) },
            WorkText::Pipeline => {
                Work::Pipeline { dag: Box::new(self.dag(folder)?), goal: Box::new(self.goal()) }
            }
            WorkText::Training => Work::Training { workers: self.workers, share: self.share()? },
        };
        for (name, given, of) in [
            ("profile", profile.is_some(), WorkText::Inference),
            ("dag", self.dag.is_some() || self.dag_file.is_some(), WorkText::Pipeline),
            ("share", self.share.is_some(), WorkText::Training),
            ("train", self.train.is_some(), WorkText::Training),
            ("speed", self.speed != all(), WorkText::Training),
            ("batches", self.batches, WorkText::Inference),
            ("time_limit", self.time_limit.is_some(), WorkText::Inference),
            ("host", self.host.is_some(), WorkText::Inference),
            ("limits", self.limits.is_some(), WorkText::Inference),
            ("devices", self.devices != 1, WorkText::Inference),
        ] {
            if given && self.work != of {
                return Err(self.wrong(name, "given", &format!("only for work {of:?}").to_lowercase()));
            }
        }
        if self.memory.0 == Bytes::ZERO {
            return Err(self.wrong("memory", "0", "need more than 0 bytes"));
        }
        if !(1..=64).contains(&self.devices) {
            return Err(self.wrong("devices", &self.devices.to_string(), "need 1 to 64"));
        }
        let mut spec = FunctionSpec::new(work, self.memory.0)
            .with_tenant(TenantId::new(self.tenant))
            .with_devices(self.devices);
        let (least, most) = self.instances.unwrap_or((0, 1));
        if most == 0 || least > most {
            let value = format!("[{least}, {most}]");
            return Err(self.wrong("instances", &value, "need a most of at least 1 and at least the fewest"));
        }
        (spec.min_instances, spec.max_instances) = (least, most);
        spec.regime = self.regime;
        spec.slo = self.slo.map(|slo| slo.positive(&self.field("slo"))).transpose()?;
        if let Some((disk, host)) = &self.loads {
            spec =
                spec.with_loads(disk.positive(&self.field("loads"))?, host.positive(&self.field("loads"))?);
        }
        // A scenario compares policies, so an instance has no limit that it does not name.
        spec.batches = self.batches;
        spec = spec.with_time_limit(self.time_limit.as_ref().map_or(Quota::WHOLE, |limit| limit.0));
        let mut function = Function::new(&self.name, spec);
        function.class = self.class.map(|class| class.0);
        function.limits = self.limits.unwrap_or_default();
        if let Some(host) = &self.host {
            function.host = host.positive(&self.field("host"))?;
        }
        function.clients = match &self.load {
            Some(LoadText::Closed { clients, .. }) if !(1..=MOST_CLIENTS).contains(clients) => {
                let bound = format!("need 1 to {MOST_CLIENTS}");
                return Err(self.wrong("load.clients", &clients.to_string(), &bound));
            }
            Some(LoadText::Closed { clients, .. }) => *clients,
            _ => 1,
        };
        function.learned = profile.filter(|_| self.unprofiled);
        function.patience =
            self.patience.map(|patience| patience.positive(&self.field("patience"))).transpose()?;
        function.speed = self.speed.0.basis_points();
        if let Some(train) = &self.train {
            function.train = train.positive(&self.field("train"))?;
        }
        function.load = match &self.load {
            Some(_) if self.work == WorkText::Training => {
                return Err(self.wrong("load", "given", "a training job answers no requests"));
            }
            Some(load) => load.build(&self.name, folder)?,
            None => Load::None,
        };
        Ok(function)
    }

    fn profile(&self, folder: &Path) -> Result<Option<ProfileTable>, ScenarioError> {
        let failed = |cause| ScenarioError::Profile { function: self.name.clone(), cause };
        match &self.profile_file {
            Some(_) if !self.profile.is_empty() => {
                Err(self.wrong("profile_file", "given", "not beside `profile`"))
            }
            Some(file) => self.read_json(&folder.join(file)).map(Some),
            None if self.profile.is_empty() && self.work == WorkText::Inference => {
                Err(self.wrong("profile", "none", "need `profile` or `profile_file`, also with `unprofiled`"))
            }
            None if self.profile.is_empty() => Ok(None),
            None => {
                let point = |text: &PointText| {
                    let p95 = text.p95.unwrap_or(text.p50).0;
                    ProfilePoint::measured(text.sm.0, text.quota.0, text.batch, text.rps, text.p50.0, p95)
                };
                let points: Result<Vec<_>, _> = self.profile.iter().map(point).collect();
                points.and_then(ProfileTable::sparse).map(Some).map_err(failed)
            }
        }
    }

    fn dag(&self, folder: &Path) -> Result<Dag, ScenarioError> {
        let text = match (&self.dag, &self.dag_file) {
            (Some(text), None) => text,
            (None, Some(file)) => return self.read_json(&folder.join(file)),
            _ => return Err(self.wrong("dag", "none, or two", "need `dag` or `dag_file`")),
        };
        let mut dag = Dag::builder(&self.name);
        for one in &text.component {
            let mut component = Component::new(&one.name).with_runs(one.runs.0.basis_points());
            for (slice, time) in &one.on {
                component = component.with_profile(slice, 1, time.0, one.memory.0);
            }
            dag = dag.component(component);
        }
        for (from, to, bytes) in &text.edge {
            dag = dag.edge(from, to, bytes.0);
        }
        dag.build().map_err(|cause| ScenarioError::Dag { function: self.name.clone(), cause })
    }

    fn goal(&self) -> Goal {
        let goal = Goal::default();
        match &self.runtime_memory {
            Some(memory) => goal.with_runtime_memory(memory.0),
            None => goal,
        }
    }

    fn share(&self) -> Result<GpuShare, ScenarioError> {
        let Some(share) = &self.share else {
            return Err(self.wrong("share", "none", "a training job needs the share of a worker"));
        };
        let (request, limit) = (share.time.0.0, share.time.1.0);
        let refused = |error: gshare_core::SpecError| self.wrong("share", "given", &error.to_string());
        let time = QuotaRange::new(request, limit).map_err(refused)?;
        let sm_limit = share.sm_limit.as_ref().map_or(share.sm.0, |limit| limit.0);
        GpuShare::new(time, share.sm.0, sm_limit, Some(self.memory.0)).map_err(refused)
    }

    fn read_json<T: serde::de::DeserializeOwned>(&self, path: &Path) -> Result<T, ScenarioError> {
        let read = |cause| ScenarioError::Read { path: path.to_owned(), cause };
        let text = std::fs::read_to_string(path).map_err(read)?;
        serde_json::from_str(&text).map_err(|error| ScenarioError::Malformed {
            function: self.name.clone(),
            path: path.to_owned(),
            why: error.to_string(),
        })
    }
}
