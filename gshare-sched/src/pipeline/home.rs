//! The place of an instance on its node, and the question where a function runs on slices of its own.

use crate::pipeline::{
    AssignedSlice, Assignment, Goal, LeastFragmentation, Node, Part, Partitioner, Pipeline,
};
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::{Bytes, Duration, FunctionId, ProfileId};

/// One part of an exclusive instance, where it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlacedPart {
    /// The number of its stage, from 0.
    pub stage: u32,
    /// Its components, by index in the DAG.
    pub components: ComponentSet,
    /// The slice on which the part runs.
    pub slice: AssignedSlice,
}

/// The place of an instance on its node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum Home {
    /// On slices of its own.
    Exclusive {
        /// The instance's parts by stage; a single part unless it is a pipeline.
        parts: Vec<PlacedPart>,
        /// Time of one batch.
        latency: Duration,
        /// The bottleneck: time between two batches.
        interval: Duration,
    },
    /// On a slice with other instances.
    Shared {
        slice: AssignedSlice,
        /// Time of one batch.
        latency: Duration,
        /// Time to load it from host memory.
        load: Duration,
        /// Memory on the slice while it is resident.
        memory: Bytes,
    },
}

impl Home {
    /// The place of a pipeline on its assigned slices.
    pub fn of(pipeline: &Pipeline, assignment: &Assignment) -> Self {
        let part =
            |(part, slice): (&Part, _)| PlacedPart { stage: part.stage, components: part.components, slice };
        Self::Exclusive {
            parts: pipeline.parts.iter().zip(assignment.slices.iter().copied()).map(part).collect(),
            latency: assignment.latency,
            interval: assignment.bottleneck,
        }
    }

    /// The slices it owns, or the slice it shares.
    pub fn slices(&self) -> impl Iterator<Item = AssignedSlice> + '_ {
        let (parts, shared) = match self {
            Self::Exclusive { parts, .. } => (parts.as_slice(), None),
            Self::Shared { slice, .. } => (&[][..], Some(*slice)),
        };
        parts.iter().map(|part| part.slice).chain(shared)
    }

    /// Whether the home has more than one slice of its own.
    pub fn is_pipeline(&self) -> bool {
        matches!(self, Self::Exclusive { parts, .. } if parts.len() > 1)
    }
}

/// Where a function's next instance runs on slices of its own.
///
/// # Contract
/// The home is [exclusive](Home::Exclusive), on free slices of the node, one for each part, and holds every component once. The same
/// questions have the same answers.
pub trait Place: Send + Sync {
    /// The slices of the function's next instance on a node; None where no free slices suit. The function is cut into stages only
    /// if `cut`.
    fn find(&self, function: FunctionId, dag: &Dag, goal: &Goal, node: &Node, cut: bool) -> Option<Home>;
}

/// The fewest compute slices for the whole function, else the partitioner's best pipeline that fits.
impl Place for Partitioner {
    fn find(&self, _: FunctionId, dag: &Dag, goal: &Goal, node: &Node, cut: bool) -> Option<Home> {
        let (counts, model) = (node.free_counts(), node.model());
        let free = model.ids().filter(|id| counts[id.index()] > 0);
        let mut free: Vec<_> = free.filter_map(|id| Some((id, model.get(id)?))).collect();
        free.sort_by_key(|(id, profile)| (profile.compute_slices, profile.memory, *id));
        let mut wholes = free.into_iter().filter(|(_, profile)| !profile.media).map(|(id, _)| whole(dag, id));
        let home = |pipeline: Pipeline| {
            let assignment = LeastFragmentation.assign(dag, goal, &pipeline, node).ok()?;
            Some(Home::of(&pipeline, &assignment))
        };
        wholes.find_map(home).or_else(|| {
            let mut pipelines = cut.then(|| self.pipelines(dag, goal, node).ok())??;
            pipelines.find_map(home)
        })
    }
}

/// The whole DAG as one stage on a profile.
pub(crate) fn whole(dag: &Dag, profile: ProfileId) -> Pipeline {
    let part = Part { stage: 0, components: dag.all(), slice: Some(profile) };
    Pipeline::new(vec![part])
}
