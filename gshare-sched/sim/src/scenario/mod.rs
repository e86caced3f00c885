//! Scenarios: a run of [`World`](crate::world) in a TOML file.
//!
//! # Problem
//! An experiment in the form of a program can be changed by its author only. A scenario states in one file the machines and
//! functions (nodes, devices, functions), the load, the faults and the policies (by name), so that a reader changes a line and runs
//! it again.
//!
//! # Form
//! ```toml
//! length = "10m"                  # load and faults come for this time
//! seed = 1                        # where runs begin to count their seeds; default 0
//! jitter_percent = 10             # times are off by up to this much; default 10
//!
//! [policies]                      # see [`Policies`] for the names
//! scaler = "heuristic"
//!
//! [[node]]
//! device = [
//!     { memory = "16GiB", count = 2 },
//!     { memory = "80GiB", mig = { model = "A100-80", slices = ["4g.40gb", "2g.20gb", "1g.10gb"] } },
//!     { memory = "16GiB", regime = "whole" },
//! ]
//!
//! [[function]]
//! name = "resnet50"
//! work = "inference"              # or "pipeline", "training"
//! memory = "2GiB"
//! slo = "69ms"
//! instances = [0, 8]              # fewest and most
//! profile = [{ sm = "12%", quota = "40%", batch = 1, rps = 28.5, p50 = "35ms", p95 = "41ms" }]
//! load = { shape = "poisson", rate = 40 }
//!
//! [[axis]]                        # every combination of the options of all axes is a case
//! name = "scaler"
//! against = "eager"               # what other options are compared with
//! option = [
//!     { name = "eager", set = { "policies.scaler" = "heuristic" } },
//!     { name = "lazy", set = { "policies.scaler" = "lazy" } },
//! ]
//!
//! [paper]                         # what was published of it
//! source = "a paper, figure 1"
//! missing = ["what cannot be reproduced, and why"]
//! row = [{ case = ["lazy"], to = ["eager"], function = "resnet50", figures = { p95_ms = 0.9 } }]
//!
//! [faults]
//! back = ["5s", "40s"]            # a lost device is found again after
//! every = { device_lost = "90s" } # mean interval by kind of fault, see [`Fault`]
//! ```
//! Lengths of time have a unit (`ns`, `us`, `ms`, `s`, `m`, `h`), memory too (`GiB`, `GB`, …), and shares are per cent. An unknown
//! key or name is an error, which lists the known names. Paths are relative to the scenario's file. A program adds names for its
//! own policies: see [`Own`].
//!
//! # Example
//! ```
//! use gshare_sim::scenario::Scenario;
//! let scenario = Scenario::parse("length = \"10m\"\npolicies = { keeper = \"papre\" }").unwrap();
//! let error = scenario.plan().unwrap_err().to_string();
//! assert!(error.contains("policies.keeper is papre: one of paper, ours"), "{error}");
//! ```

mod cases;
mod draw;
mod error;
mod function;
mod load_balance;
mod load_text;
mod own;
mod policies;
mod units;

pub use cases::{AxisText, Case, FIGURES, OptionText, PaperRow, PaperText, figure};
pub use draw::DrawText;
pub use error::ScenarioError;
pub use function::{DagText, FunctionText, PointText, ShareText, WorkText};
pub use load_balance::LoadBalance;
pub use load_text::LoadText;
pub use own::Own;
pub use units::{Span, Text};

use crate::world::{Depth, Fault, Faults, Plan};
use gshare_core::{BasisPoints, Bytes, Duration, GpuKind, NodeId, Quota, TenantId};
use gshare_sched::platform::TenantLimits;
use gshare_sched::platform::{DeviceSpec, MigLayout, Regime};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A scenario in its written form. See the [module](self) for this form.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Scenario {
    /// The time with load and faults; more than 0.
    pub length: Span,
    /// The first seed.
    #[serde(default)]
    pub seed: u64,
    /// The largest deviation of starts and requests from their times, in per cent; at most 99.
    #[serde(default = "ten")]
    pub jitter_percent: u64,
    /// The depth of the devices' simulation. Default `requests`.
    #[serde(default)]
    pub depth: Depth,
    /// The longest time from the end of the load until everything is quiet. Default 10 minutes.
    pub settle: Option<Span>,
    /// The policies of the platform.
    #[serde(default)]
    pub policies: Policies,
    /// The machines of the cluster.
    #[serde(default)]
    pub node: Vec<NodeText>,
    /// The tenants with limits.
    #[serde(default)]
    pub tenant: Vec<TenantText>,
    /// The functions and their load.
    #[serde(default)]
    pub function: Vec<FunctionText>,
    /// Functions that the seed draws, beside the written functions.
    pub draw: Option<DrawText>,
    /// The faults of the run.
    #[serde(default)]
    pub faults: FaultsText,
    /// Axes of varied keys: every combination of their options is a case.
    #[serde(default)]
    pub axis: Vec<AxisText>,
    /// Published numbers of the cases.
    pub paper: Option<PaperText>,
    /// The folder for relative paths.
    #[serde(skip)]
    pub folder: PathBuf,
    /// The program's own policies, available by name.
    #[serde(skip)]
    pub own: Own,
}

const fn ten() -> u64 {
    10
}

gshare_core::config! {
    /// The policies of a platform, by name.
    #[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct Policies {
        /// Decides the number of instances of a function on fractional devices.
        pub scaler: ScalerName = ScalerName::default();
        /// The capacity beyond the forecast of load that `heuristic` keeps; by default its own, 10 %.
        pub headroom: Option<Text<Quota>> = None;
        /// A fixed time that a function without a minimum keeps its instance after its last request, on fractional devices and on
        /// slices; by default the time that its own gaps between requests say.
        pub keep_alive: Option<Span> = None;
        /// Decides the places of these instances.
        pub packer: PackerName = PackerName::default();
        /// Decides the next request on whole devices, and its device.
        pub request: RequestName = RequestName::default();
        /// Decides the pipeline for a request.
        pub router: RouterName = RouterName::default();
        /// Decides the set of pipelines.
        pub keeper: PipelineName = PipelineName::default();
        /// The host memory of each node reserved for weights; by default the platform's value.
        pub host_memory: Option<Text<Bytes>> = None;
        /// Decides the order of a function's requests on fractional devices.
        pub queue: QueueName = QueueName::default();
        /// Whether an instance on a fractional device may take more than its request while others leave it.
        pub vertical: VerticalName = VerticalName::default();
        /// Whether processes on fractional devices are confined to their SMs, as under MPS. Otherwise they share a device by time
        /// alone.
        pub sm_partitions: bool = true;
        /// Whether the packer `dilu` goes by affinity (Dilu, section 3.3, principle 1). Default true.
        pub affinity: bool = true;
    }
}

/// The choice of vertical scaling and of its scaler.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "true, false, or the name of a vertical scaler of the program's own")]
#[non_exhaustive]
pub enum VerticalName {
    /// Our scaler, the default; `false` means no scaler, so the limits are the requests.
    Ours(bool),
    /// A program's own scaler, from [`Own`].
    Own(String),
}

impl Default for VerticalName {
    fn default() -> Self {
        Self::Ours(true)
    }
}

/// An order of the requests of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum QueueName {
    /// By arrival (FaST-GShare, Dilu).
    Arrival,
    /// By arrival, but late requests behind the requests still in time. The default.
    #[default]
    LateLast,
}

/// The names of one kind of policy: our policies, and a program's own policy.
macro_rules! policy_names {
    ($($(#[$about:meta])* $name:ident { $($(#[$each:meta])* $policy:ident,)+ })+) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$each])* $policy,)+
            /// A program's own policy, from [`Own`].
            #[serde(untagged)]
            Own(String),
        }
    )+};
}

policy_names! {
    /// A scaler of instances.
    ScalerName {
        /// By throughput and efficacy (FaST-GShare, Algorithm 1). The default.
        #[default]
        Heuristic,
        /// Lazily, by windows of load (Dilu, section 3.4.2).
        Lazy,
    }

    /// A packer of shares on devices.
    PackerName {
        /// Rectangles of time x SMs (FaST-GShare, section 3.4.2). The default.
        #[default]
        MaxRects,
        /// Sums of requests and limits (Dilu, section 3.3).
        Dilu,
    }

    /// A policy of whole devices.
    RequestName {
        /// The head of the queue on any idle device (GPU-enabled FaaS, section V-A).
        LoadBalance,
        /// Locality-aware load balancing (GPU-enabled FaaS, Algorithm 1).
        Lalb,
        /// Locality-aware load balancing, out of order (section IV-B).
        Lalbo3,
        /// By deadlines and the worth of copies. The default.
        #[default]
        Ours,
    }

    /// A router of requests to instances on MIG slices.
    RouterName {
        /// By slack, as printed (FluidFaaS, section 5.3).
        Paper,
        /// By slack, with our changes. The default.
        #[default]
        Ours,
    }

    /// The settings of instances on MIG slices; a program's own policy places them, under our settings.
    PipelineName {
        /// As printed (FluidFaaS, section 5).
        Paper,
        /// With our changes. The default.
        #[default]
        Ours,
    }
}

/// A machine of the cluster.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct NodeText {
    /// The devices of the machine.
    pub device: Vec<DeviceText>,
}

/// One device, or several equal devices.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DeviceText {
    /// The device memory; more than 0.
    pub memory: Text<Bytes>,
    /// The number of such devices; default 1.
    #[serde(default = "one")]
    pub count: u32,
    /// Devices of equal speed and memory have the same kind.
    #[serde(default)]
    pub kind: u8,
    /// The sharing of the device.
    pub regime: Option<Regime>,
    /// The MIG slices of the device.
    pub mig: Option<MigLayout>,
}

pub(crate) const fn one() -> u32 {
    1
}

/// The limits of a tenant. An unnamed tenant or limit has no bound.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TenantText {
    /// The number of the tenant.
    pub tenant: u32,
    /// The most requests of the tenant served at once.
    pub max_requests: Option<u32>,
    /// The most processes of the tenant's instances.
    pub max_processes: Option<u32>,
    /// The most waiting requests of the tenant.
    pub max_waiting: Option<u32>,
    /// The share of the time of all devices: `25%`.
    pub gpu_time: Option<Text<Quota>>,
    /// The share of the memory of all devices.
    pub memory: Option<Text<Quota>>,
}

impl TenantText {
    fn limits(&self) -> TenantLimits {
        let mut limits = TenantLimits::default();
        let points = |share: &Option<Text<Quota>>| {
            share.as_ref().map_or(BasisPoints::WHOLE, |share| share.0.basis_points())
        };
        limits.max_requests = self.max_requests.unwrap_or(limits.max_requests);
        limits.max_processes = self.max_processes.unwrap_or(limits.max_processes);
        limits.max_waiting = self.max_waiting.unwrap_or(limits.max_waiting);
        (limits.gpu_time, limits.memory) = (points(&self.gpu_time), points(&self.memory));
        limits
    }
}

/// The faults of a run. None by default.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct FaultsText {
    /// The mean time between two faults of a kind.
    pub every: BTreeMap<Fault, Span>,
    /// The shortest and the longest time until a lost device is back.
    pub back: Option<(Span, Span)>,
}

impl Scenario {
    /// Reads a scenario from text; its paths are relative to the working folder.
    ///
    /// # Errors
    /// [`ScenarioError::Toml`] with line and column.
    pub fn parse(text: &str) -> Result<Self, ScenarioError> {
        Ok(toml::from_str(text)?)
    }

    /// Reads a scenario from a file, with other values for some of its keys: `("policies.scaler", "lazy")`, `("function.0.slo",
    /// "20ms")`.
    ///
    /// # Errors
    /// [`ScenarioError::Read`], [`ScenarioError::Toml`], [`ScenarioError::Set`].
    pub fn read(path: &Path, set: &[(String, String)]) -> Result<Self, ScenarioError> {
        let read = |cause| ScenarioError::Read { path: path.to_owned(), cause };
        let text = std::fs::read_to_string(path).map_err(read)?;
        // Changed values have no place in the file; the other values keep their place for errors.
        let mut scenario: Self = if set.is_empty() {
            toml::from_str(&text)?
        } else {
            let mut root: toml::Value = toml::from_str(&text)?;
            for (key, value) in set {
                change(&mut root, key, parsed(value))?;
            }
            root.try_into()?
        };
        scenario.folder = path.parent().map(Path::to_owned).unwrap_or_default();
        Ok(scenario)
    }

    /// The run of this scenario.
    ///
    /// # Errors
    /// [`ScenarioError`] for an invalid field, or for a file named in a field.
    pub fn plan(&self) -> Result<Plan, ScenarioError> {
        if self.draw.is_some() {
            return self.drawn(self.seed)?.plan();
        }
        self.own.make(&self.policies)?;
        if self.policies.headroom.is_some() && self.policies.scaler != ScalerName::Heuristic {
            return Err(ScenarioError::field(
                "policies.headroom",
                "given",
                "only for the scaler `heuristic`",
            ));
        }
        if let Some(keep) = &self.policies.keep_alive {
            keep.positive("policies.keep_alive")?;
        }
        let length = self.length.positive("length")?;
        let mut devices = Vec::new();
        for (number, node) in self.node.iter().enumerate() {
            let id = NodeId::new(u32::try_from(number).unwrap_or(u32::MAX));
            for device in &node.device {
                device.add(number, id, &mut devices)?;
            }
        }
        if devices.is_empty() {
            return Err(ScenarioError::field("node", "none", "need at least one device"));
        }
        if self.function.is_empty() {
            return Err(ScenarioError::field("function", "none", "need at least one function"));
        }
        let mut functions: Vec<crate::world::Function> = Vec::new();
        for function in &self.function {
            let mut new = function.build(&self.folder)?;
            if self.policies.vertical == VerticalName::Ours(false) {
                policies::without_vertical(&mut new)?;
            }
            if functions.iter().any(|other| other.name == new.name) {
                return Err(ScenarioError::field("function.name", &new.name, "need names that are unlike"));
            }
            functions.push(new);
        }
        let mut plan = Plan::new(devices, functions, length);
        plan.bounds = Some(self.settings().platform);
        plan.tenants =
            self.tenant.iter().map(|tenant| (TenantId::new(tenant.tenant), tenant.limits())).collect();
        if self.jitter_percent > 99 {
            let value = self.jitter_percent.to_string();
            return Err(ScenarioError::field("jitter_percent", &value, "at most 99"));
        }
        (plan.jitter, plan.depth) = (self.jitter_percent, self.depth);
        if let Some(settle) = &self.settle {
            plan.settle = settle.positive("settle")?;
        }
        plan.faults = self.faults.build()?;
        plan.vertical = self.own.vertical(&self.policies)?;
        if let VerticalName::Own(name) = &self.policies.vertical
            && plan.depth != Depth::Kernels
        {
            let need = "true or false, or depth = `kernels`, at which a vertical scaler runs";
            return Err(ScenarioError::field("policies.vertical", name, need));
        }
        Ok(plan)
    }
}

impl DeviceText {
    fn add(&self, number: usize, node: NodeId, devices: &mut Vec<DeviceSpec>) -> Result<(), ScenarioError> {
        let field = |name: &str| format!("node {number}: device.{name}");
        if self.memory.0 == Bytes::ZERO {
            return Err(ScenarioError::field(&field("memory"), "0", "need more than 0 bytes"));
        }
        if self.count == 0 || self.count > 100_000 {
            let value = self.count.to_string();
            return Err(ScenarioError::field(&field("count"), &value, "need 1 to 100000"));
        }
        if self.mig.is_some() && self.regime.is_some_and(|regime| regime != Regime::Sliced) {
            let value = self.regime.map_or_else(String::new, |regime| regime.to_string());
            return Err(ScenarioError::field(&field("regime"), &value, "a device with slices is `sliced`"));
        }
        if self.mig.is_none() && self.regime == Some(Regime::Sliced) {
            return Err(ScenarioError::field(&field("mig"), "none", "a sliced device needs its slices"));
        }
        let mut spec = DeviceSpec::new(node, self.memory.0).with_kind(GpuKind::new(self.kind));
        spec.regime = self.regime;
        spec.mig = self.mig.clone().map(Box::new);
        devices.extend((0..self.count).map(|_| spec.clone()));
        Ok(())
    }
}

impl FaultsText {
    fn build(&self) -> Result<Faults, ScenarioError> {
        let mut faults = Faults::default();
        for (&fault, mean) in &self.every {
            faults.every.insert(fault, mean.positive(&format!("faults.every.{fault}"))?);
        }
        if let Some((least, most)) = &self.back {
            if least.0 > most.0 {
                return Err(ScenarioError::field(
                    "faults.back",
                    &least.0.to_string(),
                    "the first is at most the second",
                ));
            }
            faults.back = (least.0, most.0);
        }
        Ok(faults)
    }
}

/// A value of a command line: TOML, or else a text.
fn parsed(value: &str) -> toml::Value {
    let table: Result<toml::Table, _> = toml::from_str(&format!("value = {value}"));
    let parsed = table.ok().and_then(|mut table| table.remove("value"));
    parsed.unwrap_or_else(|| toml::Value::String(value.to_owned()))
}

/// Sets a key of a table, with numbers for elements of lists.
fn change(root: &mut toml::Value, key: &str, parsed: toml::Value) -> Result<(), ScenarioError> {
    let wrong = |why: &str| ScenarioError::Set { key: key.to_owned(), why: why.to_owned() };
    let (path, last) = key.rsplit_once('.').unwrap_or(("", key));
    let mut at = root;
    for step in path.split('.').filter(|step| !step.is_empty()) {
        at = match at {
            toml::Value::Array(list) => {
                let index = step.parse::<usize>().ok().filter(|index| *index < list.len());
                &mut list[index.ok_or_else(|| wrong("a list has elements from 0 on"))?]
            }
            toml::Value::Table(table) => {
                table.entry(step).or_insert_with(|| toml::Value::Table(toml::Table::new()))
            }
            _ => return Err(wrong("a value is on the way")),
        };
    }
    match at {
        toml::Value::Table(table) => {
            table.insert(last.to_owned(), parsed);
            Ok(())
        }
        _ => Err(wrong("its last part is no key of a table")),
    }
}

impl Span {
    /// The length of time, if it is not zero.
    ///
    /// # Errors
    /// [`ScenarioError::Field`].
    pub fn positive(&self, field: &str) -> Result<Duration, ScenarioError> {
        if self.0.is_zero() { Err(ScenarioError::field(field, "0", "need more")) } else { Ok(self.0) }
    }
}

#[cfg(test)]
mod tests;
