//! The orders and errors of horizontal scalers, and their trait.

use super::{Fleet, FleetConfig};
use gshare_core::profile::{ProfileTable, RequestRate, Setting};
use gshare_core::{Duration, FunctionId, InstanceId, Timestamp};

/// A function as a horizontal scaler needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FunctionScale {
    /// Throughput and latencies as measured, per setting.
    pub profile: ProfileTable,
    /// The longest p95 of one batch at a point, in ns. `None`: any.
    #[cfg_attr(feature = "serde", serde(default, rename = "max_p95_ns"))]
    pub max_p95: Option<Duration>,
    /// Instances to keep at any load.
    pub min_instances: u32,
    /// The most instances, starting ones included; at least the minimum, more than 0.
    pub max_instances: u32,
}

/// The longest p95 of one batch that keeps an SLO: half of it. The other half is for queueing and the network (Dilu, section 3.2,
/// footnote 2).
pub const fn max_p95(slo: Duration) -> Duration {
    Duration::from_nanos(slo.as_nanos() / 2)
}

/// An order of the horizontal scaler for its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HorizontalOrder {
    /// Start an instance at a point, by its index in the profile.
    Start(usize),
    /// Take an instance away: it gets no more requests, and is stopped once it has none left.
    Remove(InstanceId),
    /// Load that no instance will serve: the function is at its most instances, or no GPU has room.
    Unmet(RequestRate),
}

/// A function's load in the tick that ended now.
#[derive(Debug, Clone, Copy)]
pub struct LoadReport<'a> {
    /// The end of the tick.
    pub now: Timestamp,
    /// The function whose load it is.
    pub function: FunctionId,
    /// The function's instances, profile and bounds.
    pub fleet: &'a Fleet,
    /// Requests that arrive in a second, as measured.
    pub load: RequestRate,
}

/// Why a function or its bounds were refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum HorizontalError {
    /// `max_instances` is below `min_instances`, 0 or above the most instances of a function.
    #[error(
        "{function}: max_instances is {max_instances}, need at least min_instances ({min_instances}), 1 to {limit}"
    )]
    BadInstanceBounds { function: FunctionId, min_instances: u32, max_instances: u32, limit: u32 },
    /// No point of the profile is fast enough.
    #[error(
        "{function}: no point of its profile has a p95 of at most {max_p95} (max_p95); the best is {best} at ({setting})"
    )]
    SloUnreachable { function: FunctionId, max_p95: Duration, best: Duration, setting: Setting },
}

gshare_core::claims! {
    /// What the suite for [`HorizontalScaler`] checks.
    horizontal_claims {
        MOST = "instances are never more than the maximum";
        LEAST = "a decision leaves no fewer than the minimum";
        APART = "functions do not affect each other";
        UNMET = "load that no instance can serve is reported";
        INSTANCES = "what is taken away is there";
        POINT = "an instance starts at a point that keeps the SLO, and that was not refused just now";
        SAME = "the same loads give the same orders";
    }
}

/// A policy that starts and stops instances.
///
/// # Contract
/// Checked by the conformance suite of `gshare-sim`:
#[doc = horizontal_claims!()]
///
/// The minimum, and the maximum where it falls, are the host's business.
pub trait HorizontalScaler: Send {
    /// Takes one report per tick and function, also without load. The host carries out the orders, one
    /// after the other, and notes the changes in the function's fleet. It ignores an order to start an instance beyond the maximum or at a
    /// point that is not in the profile, and an order to remove an instance that is not in the fleet.
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>);

    /// The function is gone: its number may come again, with another profile.
    fn forget(&mut self, function: FunctionId);

    /// The length of a tick, and the bounds of the fleets.
    fn config(&self) -> FleetConfig {
        FleetConfig::default()
    }

    /// Whether load is also reported before a tick is over, while more requests wait than are served at once. By default not: a scaler
    /// that counts reports takes each for a tick of time.
    fn early_reports(&self) -> bool {
        false
    }
}

/// A scaler that is told another load, by a function of yours.
///
/// ```
/// use gshare_core::profile::RequestRate;
/// use gshare_sched::scale::{HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler, Told};
///
/// let ours = HeuristicHorizontal::new(HeuristicHorizontalConfig::default())?;
/// // A fifth of headroom.
/// let more = Told::new(Box::new(ours), |_, load| RequestRate::from_milli(load.as_milli() * 6 / 5));
/// assert!(more.early_reports(), "all other answers are the scaler's");
/// # Ok::<(), gshare_core::ConfigError>(())
/// ```
pub struct Told<F> {
    scaler: Box<dyn HorizontalScaler>,
    load: F,
}

impl<F: FnMut(FunctionId, RequestRate) -> RequestRate + Send> Told<F> {
    /// Tells the scaler what `load` makes of a function's load.
    pub const fn new(scaler: Box<dyn HorizontalScaler>, load: F) -> Self {
        Self { scaler, load }
    }
}

impl<F: FnMut(FunctionId, RequestRate) -> RequestRate + Send> HorizontalScaler for Told<F> {
    fn decide(&mut self, report: LoadReport<'_>, orders: &mut Vec<HorizontalOrder>) {
        let load = (self.load)(report.function, report.load);
        self.scaler.decide(LoadReport { load, ..report }, orders);
    }

    fn forget(&mut self, function: FunctionId) {
        self.scaler.forget(function);
    }

    fn config(&self) -> FleetConfig {
        self.scaler.config()
    }

    fn early_reports(&self) -> bool {
        self.scaler.early_reports()
    }
}

gshare_core::debug_fields!(Told<F> {});
