//! The plan of a run: devices, functions with their load, faults, and the length.

use super::faults::Faults;
use crate::Make;
use crate::arrivals::Arrivals;
use gshare_core::profile::ProfileTable;
use gshare_core::{BasisPoints, Duration, ServiceClass, TenantId};
use gshare_sched::platform::TenantLimits;
use gshare_sched::platform::{DeviceSpec, FunctionSpec, PlatformConfig};
use gshare_sched::scale::VerticalScaler;

/// The depth of the devices' simulation, `requests` or `kernels` as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Depth {
    /// Devices serve by the profile. The default, for questions about a cluster and for long times.
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

/// The load of a function.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Load {
    /// Never: a training job.
    None,
    /// The arrivals of a process, drawn by the seed.
    Process(Arrivals),
    /// A number of requests in each bin, at times within the bin drawn by the seed.
    Counts {
        /// The length of a bin; more than 0.
        bin: Duration,
        /// The number of requests in each bin.
        counts: Vec<u32>,
    },
}

/// States when an instance on a fractional device runs at the limits of its share and not at its request; `always` or `while_full` as
/// text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Limits {
    /// Always, as far as others leave the limit. The default.
    #[default]
    Always,
    /// While the instance has as many requests as it takes at once: a co-scaler gives the limit to instances that are behind (Dilu,
    /// section 3.4.1). Its neighbours are slowed down as if it always had its limit.
    WhileFull,
}

/// A function, with the facts beside its spec.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Function {
    /// The function's name in reports.
    pub name: String,
    /// The deployed specification.
    pub spec: FunctionSpec,
    /// The load of the function.
    pub load: Load,
    /// The time until a caller gives up, which is the deadline of its requests; `None` means never.
    pub patience: Option<Duration>,
    /// The profile found by a `Profile`. A function without it takes times from its spec.
    pub learned: Option<ProfileTable>,
    /// The length of its training with its whole share.
    pub train: Duration,
    /// The speed of its training with its whole share, as a part of its speed on a whole device; whole by default.
    pub speed: BasisPoints,
    /// The time of a process's work after its device's work on a request, during which it takes no other request.
    pub host: Duration,
    /// The treatment of its programs beside others on a fractional device; `None` means they share like tokens.
    pub class: Option<ServiceClass>,
    /// The requests of a closed loop, under way or in thought.
    pub clients: u32,
    /// States when its instances run at the limits of their shares, at [`Depth::Requests`].
    pub limits: Limits,
}

impl Function {
    /// A function without load, with the profile in its spec.
    pub fn new(name: impl Into<String>, spec: FunctionSpec) -> Self {
        let train = Duration::from_secs(60);
        let (name, host) = (name.into(), Duration::ZERO);
        let (load, speed) = (Load::None, BasisPoints::WHOLE);
        let (learned, patience, class, limits) = (None, None, None, Limits::Always);
        Self { name, spec, load, patience, learned, train, speed, host, class, clients: 1, limits }
    }

    /// The same function with a process of arrivals.
    #[must_use]
    pub fn with_arrivals(self, arrivals: Arrivals) -> Self {
        Self { load: Load::Process(arrivals), ..self }
    }
}

/// A change of a function under load. A repeated removal or deployment changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// The function is removed, and not called until its next deployment.
    Removed,
    /// The function is deployed again, once its instances are gone.
    Deployed,
    /// The function has another fewest and most number of instances.
    Bounds(u32, u32),
}

/// A run, without its seed and its engine.
#[derive(Clone)]
#[non_exhaustive]
pub struct Plan {
    /// The devices; the number in the list is the [`GpuId`](gshare_core::GpuId).
    pub devices: Vec<DeviceSpec>,
    /// The functions; the number in the list is the [`FunctionId`](gshare_core::FunctionId).
    pub functions: Vec<Function>,
    /// The bounds of the platform, which the book checks; `None` means that the engine promises none.
    pub bounds: Option<PlatformConfig>,
    /// The limits of tenants.
    pub tenants: Vec<(TenantId, TenantLimits)>,
    /// The faults of the run.
    pub faults: Faults,
    /// The changes of functions, each with its time and the number of the function. None by default.
    pub changes: Vec<(Duration, usize, Change)>,
    /// The time with requests and faults.
    pub length: Duration,
    /// The largest deviation of starts and requests from their times, in per cent; at most 100.
    pub jitter: u64,
    /// The most time from the end of load and faults until everything is quiet, and from the removal of the functions until
    /// everything is gone.
    pub settle: Duration,
    /// The most lines of a story. 60 by default.
    pub story: usize,
    /// The depth of the devices' simulation.
    pub depth: Depth,
    /// The interval between counts of each instance's kernels under load, at [`Depth::Kernels`]. More than 0; `None` means never.
    pub sample: Option<Duration>,
    /// Whether the outcome has each request and slice: [`Outcome::record`](super::Outcome::record).
    pub record: bool,
    /// The bytes per nanosecond between a device and host memory, which is the speed at which living processes are parked and come back;
    /// more than 0. 12 by default.
    pub link: u64,
    /// The shortest and the longest time until a stopped instance has ended. 5 ms to 50 ms by default.
    pub stop: (Duration, Duration),
    /// Makes the vertical scaler of each daemon, at [`Depth::Kernels`]. `None` means our scaler.
    pub vertical: Option<Make<dyn VerticalScaler>>,
}

gshare_core::debug_fields!(Plan { devices, functions, length, depth });

impl Plan {
    /// The time in which an instance's memory goes to host memory, or comes back.
    pub(super) fn copy_time(&self, function: usize) -> Duration {
        Duration::from_nanos(self.functions[function].spec.memory.get() / self.link.max(1))
    }

    /// A run without faults, with a jitter of a tenth and ten minutes to become quiet.
    pub fn new(devices: Vec<DeviceSpec>, functions: Vec<Function>, length: Duration) -> Self {
        Self {
            devices,
            functions,
            bounds: None,
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
