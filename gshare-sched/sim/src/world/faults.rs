//! All faults of a run, in one list.

use crate::rng::Rng;
use gshare_core::Duration;
use std::collections::BTreeMap;

/// A kind of fault. Each kind has its own mean interval in [`Faults::every`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Fault {
    /// A device is lost with its work, and found again later.
    DeviceLost,
    /// All devices of a node are lost and found again together; instances parked on the node are gone too.
    NodeLost,
    /// The processes of an instance die, with equal chances for starting, waiting, working and parked instances.
    InstanceDies,
    /// The next `Start` is refused.
    StartRefused,
    /// The next `Start` or `Unpark` takes three to eight times as long as expected.
    LoadSlow,
    /// The next report of an instance comes 0.1 s to 5 s late, and its later reports wait behind it.
    ReportLate,
    /// The caller of a request gives up.
    ClientCancels,
    /// The next `Start`, `Park` or `Unpark` is never carried out.
    OrderHangs,
    /// The next draining instance with requests answers none of them.
    DrainHangs,
}

impl Fault {
    /// All kinds of faults.
    pub const ALL: [Self; 9] = [
        Self::DeviceLost,
        Self::NodeLost,
        Self::InstanceDies,
        Self::StartRefused,
        Self::LoadSlow,
        Self::ReportLate,
        Self::ClientCancels,
        Self::OrderHangs,
        Self::DrainHangs,
    ];

    /// The faults that a platform without time-outs does not survive.
    pub const HANGS: [Self; 2] = [Self::OrderHangs, Self::DrainHangs];
}

// The names are the same as in a scenario: `device_lost`, `node_lost`, …
gshare_core::display_as!(Fault {
    DeviceLost => "device_lost",
    NodeLost => "node_lost",
    InstanceDies => "instance_dies",
    StartRefused => "start_refused",
    LoadSlow => "load_slow",
    ReportLate => "report_late",
    ClientCancels => "client_cancels",
    OrderHangs => "order_hangs",
    DrainHangs => "drain_hangs",
});

/// The kinds of faults with their intervals. None by default.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Faults {
    /// The mean time between two faults of a kind; more than 0. An absent kind never happens.
    pub every: BTreeMap<Fault, Duration>,
    /// The shortest and the longest time until a lost device or node is found again.
    pub back: (Duration, Duration),
}

impl Default for Faults {
    fn default() -> Self {
        Self { every: BTreeMap::new(), back: (Duration::from_secs(5), Duration::from_secs(40)) }
    }
}

impl Faults {
    /// The time to the next fault of the kind: even chances up to twice the mean.
    pub(super) fn next(&self, fault: Fault, rng: &mut Rng) -> Option<Duration> {
        let mean = *self.every.get(&fault)?;
        Some(rng.duration(Duration::from_nanos(1), mean.saturating_mul(2)))
    }
}
