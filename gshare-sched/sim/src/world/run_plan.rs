//! The plan of a run: devices, functions with their load, faults, and how long.

use super::faults::Faults;
use crate::Make;
use crate::arrivals::Arrivals;
use gshare_core::profile::ProfileTable;
use gshare_core::{BasisPoints, Duration, ServiceClass, TenantId};
use gshare_sched::platform::{DeviceSpec, FunctionSpec};
use gshare_sched::request::TenantLimits;
use gshare_sched::scale::VerticalScaler;

/// How closely devices are simulated, `requests` or `kernels` as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Depth {
    /// Devices serve by the profile. The default: for questions of a cluster, and long times.
    #[default]
    Requests,
    /// On fractional devices a daemon's node and a meter in each process decide about each kernel.
    Kernels,
}

impl core::str::FromStr for Depth {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "requests" => Ok(Self::Requests),
            "kernels" => Ok(Self::Kernels),
            _ => Err(format!("`{text}` is no depth: need `requests` or `kernels`")),
        }
    }
}

/// When a function is called.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Load {
    /// Never: a training job.
    None,
    /// As a process says; it is drawn by the seed.
    Process(Arrivals),
    /// As many times in each bin as it counts, at times within it that are drawn by the seed.
    Counts {
        /// Length of a bin; more than 0.
        bin: Duration,
        /// Requests in each bin.
        counts: Vec<u32>,
    },
}

/// When an instance on a fractional device runs at the limits of its share, and not at its request; `always` or `while_full` as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Limits {
    /// Always, as far as others leave it that. The default.
    #[default]
    Always,
    /// While it has as many requests as it takes at once: a co-scaler gives the limit to those that are behind (Dilu, section
    /// 3.4.1). Its neighbours are slowed down as if it always had its limit.
    WhileFull,
}

/// A function and what is known of it beside its spec.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Function {
    /// Its name in reports.
    pub name: String,
    /// The specification that is deployed.
    pub spec: FunctionSpec,
    /// When it is called.
    pub load: Load,
    /// The time after which a caller gives up: the deadline of its requests. None: never.
    pub patience: Option<Duration>,
    /// The profile that a `Profile` finds. A function without it takes times from its spec.
    pub learned: Option<ProfileTable>,
    /// How long its training takes with its whole share.
    pub train: Duration,
    /// How fast it trains with its whole share, of its speed on a whole device; whole by default.
    pub speed: BasisPoints,
    /// How long a process is busy with a request after its device, and takes no other.
    pub host: Duration,
    /// How its programs are treated beside others on a fractional device; none: as tokens share.
    pub class: Option<ServiceClass>,
    /// Requests that a closed loop has under way or in thought.
    pub clients: u32,
    /// When its instances run at the limits of their shares, at [`Depth::Requests`].
    pub limits: Limits,
}

impl Function {
    /// A function that is never called, whose profile is that of its spec.
    pub fn new(name: impl Into<String>, spec: FunctionSpec) -> Self {
        let train = Duration::from_secs(60);
        let (name, host) = (name.into(), Duration::ZERO);
        let (load, speed) = (Load::None, BasisPoints::WHOLE);
        let (learned, patience, class, limits) = (None, None, None, Limits::Always);
        Self { name, spec, load, patience, learned, train, speed, host, class, clients: 1, limits }
    }

    /// The same, called by a process of arrivals.
    #[must_use]
    pub fn with_arrivals(self, arrivals: Arrivals) -> Self {
        Self { load: Load::Process(arrivals), ..self }
    }
}

/// A change of a function while load comes. One that is removed already, or deployed, is left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// The function is removed, and not called until it is deployed again.
    Removed,
    /// The function is deployed again, once its instances are gone.
    Deployed,
    /// The function has another fewest and most number of instances.
    Bounds(u32, u32),
}

/// A run, but for its seed and its engine.
#[derive(Clone)]
#[non_exhaustive]
pub struct Plan {
    /// The devices; the number in the list is the [`GpuId`](gshare_core::GpuId).
    pub devices: Vec<DeviceSpec>,
    /// The functions; the number in the list is the [`FunctionId`](gshare_core::FunctionId).
    pub functions: Vec<Function>,
    /// The limits of tenants.
    pub tenants: Vec<(TenantId, TenantLimits)>,
    /// The faults of the run.
    pub faults: Faults,
    /// Changes of functions: when, the number of the function, and what. None by default.
    pub changes: Vec<(Duration, usize, Change)>,
    /// Requests and faults come for this time.
    pub length: Duration,
    /// Times of starts and requests are off by up to this much, in per cent; at most 100.
    pub jitter: u64,
    /// After load and faults have ended, so much time may pass until everything is quiet, and as much until everything is
    /// gone after the functions were removed.
    pub settle: Duration,
    /// The most lines of a story. 60 by default.
    pub story: usize,
    /// How closely devices are simulated.
    pub depth: Depth,
    /// How often the kernels of each instance are counted while load comes, at [`Depth::Kernels`]. More than 0; none: never.
    pub sample: Option<Duration>,
    /// Whether the outcome tells of each request and slice: [`Outcome::record`](super::Outcome::record).
    pub record: bool,
    /// Bytes in a nanosecond from a device to host memory, the speed at which instances are parked; more than 0. 12 by default.
    pub link: u64,
    /// A stopped instance has ended after a time from the first to the second. 5 ms to 50 ms by default.
    pub stop: (Duration, Duration),
    /// Makes the vertical scaler of each daemon, at [`Depth::Kernels`]. None: ours.
    pub vertical: Option<Make<dyn VerticalScaler>>,
}

impl core::fmt::Debug for Plan {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { devices, functions, length, depth, .. } = self;
        f.debug_struct("Plan")
            .field("devices", devices)
            .field("functions", functions)
            .field("length", length)
            .field("depth", depth)
            .finish_non_exhaustive()
    }
}

impl Plan {
    /// A run without faults, with times that are off by up to a tenth and ten minutes to become quiet.
    pub fn new(devices: Vec<DeviceSpec>, functions: Vec<Function>, length: Duration) -> Self {
        Self {
            devices,
            functions,
            tenants: Vec::new(),
            faults: Faults::default(),
            changes: Vec::new(),
            length,
            jitter: 10,
            settle: Duration::from_secs(600),
            story: 60,
            depth: Depth::default(),
            sample: None,
            record: false,
            link: 12,
            stop: (Duration::from_millis(5), Duration::from_millis(50)),
            vertical: None,
        }
    }
}
