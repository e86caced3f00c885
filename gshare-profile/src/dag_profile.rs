//! Profiling of a pipeline's function: each of its components on each slice.
//!
//! # Problem
//! A partitioner of a function needs to know how long each component runs on each slice profile, and how much
//! memory it takes there (FluidFaaS, section 5.2.1: "each node in the FFS DAG will carry a performance profile"). The
//! function knows its components and their data when it has run once; the rest has to be measured.
//!
//! # Terms
//! - **shape**: the DAG without profiles, as the function tells it in `BUILD_DAG` mode ([`Shape`]);
//! - **point**: one component on one slice profile, with one batch size ([`Point`]).
//!
//! # Algorithm
//! 1. The shape is checked as a DAG is, before anything is measured.
//! 2. Component by component, slice by slice, batch by batch, one trial ([`measure`]) of calls one after the other. Its
//!    median is the time; the most memory seen by the executor is the memory.
//! 3. A failed point is a hole. A component without a profile for a slice cannot run there, as after a failure for want
//!    of memory. Failures are reported with their reasons. A component with no profile at all is an error.
//!
//! ## Example
//! `deblur -> segment` on `1g.10gb` and `2g.20gb` are four points. `segment` needs 12 GiB and ends at its start on
//! `1g.10gb`: the DAG has three profiles, and the partitioner never puts `segment` there.
//!
//! # Cost
//! `components * slices * batches` trials; each is at most a warm-up and three times the longest measurement ([`TrialConfig`]).
//!
//! # Differences from the paper
//! The paper's `profile()` runs in the function and is not described. Ours measures from outside, so components in any
//! language are measured alike. If a component dies of a too small slice, this ends its trial, not the run.

use crate::executor::{ExecError, Executor};
use crate::trial::{TrialConfig, TrialError, measure};
use gshare_core::dag::{Component, Dag, DagBuilder, DagError, Profile};
use gshare_core::profile::Setting;
use gshare_core::{BasisPoints, Bytes, Duration, Quota, SmShare};
use std::collections::BTreeMap;

/// A function's components and edges: a DAG without profiles.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Shape {
    /// Its name; may be empty.
    #[cfg_attr(feature = "serde", serde(default))]
    pub name: String,
    /// The components, in any order.
    pub components: Vec<ShapeComponent>,
    /// Data flow between the components.
    #[cfg_attr(feature = "serde", serde(default))]
    pub edges: Vec<ShapeEdge>,
}

/// A component of a [`Shape`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct ShapeComponent {
    /// Its name, unique in the shape.
    pub name: String,
    /// Share of requests for the component, in basis points; all where it is left out.
    #[cfg_attr(feature = "serde", serde(rename = "runs_bp", default = "always"))]
    pub runs: BasisPoints,
}

#[cfg(feature = "serde")]
const fn always() -> BasisPoints {
    BasisPoints::WHOLE
}

/// An edge of a [`Shape`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct ShapeEdge {
    /// Name of the writing component.
    pub from: String,
    /// Name of the reading component.
    pub to: String,
    /// Bytes per batch.
    pub bytes: Bytes,
}

impl Shape {
    /// Whether it is a DAG, but for the profiles.
    ///
    /// # Errors
    /// What [`DagBuilder::build`] says.
    pub fn check(&self) -> Result<(), DagError> {
        let any =
            Profile { slice: String::new(), batch: 1, time: Duration::from_nanos(1), memory: Bytes::ZERO };
        self.with_profiles(|_| vec![any.clone()]).build().map(drop)
    }

    fn with_profiles(&self, of: impl Fn(&str) -> Vec<Profile>) -> DagBuilder {
        let dag = self.components.iter().fold(Dag::builder(&self.name), |dag, one| {
            let mut component = Component::new(&one.name).with_runs(one.runs);
            component.profiles = of(&one.name);
            dag.component(component)
        });
        self.edges.iter().fold(dag, |dag, edge| dag.edge(&edge.from, &edge.to, edge.bytes))
    }
}

/// One component on one slice profile with one batch size.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Point {
    /// The component.
    pub component: String,
    /// Name of the slice profile: `2g.20gb`.
    pub slice: String,
    /// Requests per call.
    pub batch: u32,
}

/// A point without a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Hole {
    /// The missing point.
    pub point: Point,
    /// The reason of the failure.
    pub reason: String,
}

/// A DAG with its profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DagProfile {
    /// The DAG.
    pub dag: Dag,
    /// Where a component did not run.
    pub holes: Vec<Hole>,
}

/// Why there is no DAG.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DagRunError {
    /// The shape or the measured profiles make no DAG.
    #[error(transparent)]
    Dag(#[from] DagError),
    /// Nothing to measure on.
    #[error("slices: none, need at least one")]
    NoSlices,
    /// No batch size to measure with.
    #[error("batches: none, need at least one")]
    NoBatches,
    /// A component ran on no slice.
    #[error("component `{component}` runs on none of the slices; on {slice}: {reason}")]
    RunsNowhere {
        /// Name of the component.
        component: String,
        /// The last tried slice.
        slice: String,
        /// The reason of the failure there.
        reason: String,
    },
    /// Nothing can be measured at all.
    #[error(transparent)]
    Trial(#[from] TrialError),
}

/// Measures every component of `shape` on every slice with every batch size, in that order. `make` gives the executor of a
/// point; `told` hears of each point when it is over.
///
/// # Errors
/// [`DagRunError`]. The failure of one point alone is a [`Hole`].
pub fn profile<E: Executor>(
    shape: &Shape,
    slices: &[String],
    batches: &[u32],
    config: &TrialConfig,
    make: &mut dyn FnMut(&Point) -> Result<E, ExecError>,
    told: &mut dyn FnMut(&Point, Result<&Profile, &str>),
) -> Result<DagProfile, DagRunError> {
    shape.check()?;
    if slices.is_empty() {
        return Err(DagRunError::NoSlices);
    }
    if batches.is_empty() {
        return Err(DagRunError::NoBatches);
    }
    let (mut profiles, mut holes) = (BTreeMap::<&str, Vec<Profile>>::new(), Vec::<Hole>::new());
    for component in &shape.components {
        for (slice, &batch) in slices.iter().flat_map(|slice| batches.iter().map(move |batch| (slice, batch)))
        {
            let point = Point { component: component.name.clone(), slice: slice.clone(), batch };
            match measured(&point, config, make) {
                Ok(found) => {
                    told(&point, Ok(&found));
                    profiles.entry(&component.name).or_default().push(found);
                }
                Err(error) if error.is_fatal() => return Err(error.into()),
                Err(error) => {
                    let reason = error.to_string();
                    told(&point, Err(&reason));
                    holes.push(Hole { point, reason });
                }
            }
        }
        if !profiles.contains_key(component.name.as_str()) {
            let last = holes.pop();
            let (slice, reason) = last.map_or_else(Default::default, |hole| (hole.point.slice, hole.reason));
            return Err(DagRunError::RunsNowhere { component: component.name.clone(), slice, reason });
        }
    }
    let dag = shape.with_profiles(|name| profiles.get(name).cloned().unwrap_or_default()).build()?;
    Ok(DagProfile { dag, holes })
}

fn measured<E: Executor>(
    point: &Point,
    config: &TrialConfig,
    make: &mut dyn FnMut(&Point) -> Result<E, ExecError>,
) -> Result<Profile, TrialError> {
    let mut executor = make(point)?;
    let setting = Setting { batch: point.batch, sm: SmShare::WHOLE, quota: Quota::WHOLE };
    let time = measure(&mut executor, setting, config)?.measurement.point.p50;
    let memory = executor.memory()?;
    Ok(Profile { slice: point.slice.clone(), batch: point.batch, time, memory })
}
