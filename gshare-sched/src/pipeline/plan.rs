//! From a ranked list to a plan: the first pipeline that fits (FluidFaaS, section 5.2.2).

use crate::pipeline::{
    Assignment, FallBack, Goal, LeastFragmentation, Mode, Node, PartitionError, Partitioner, Pipeline, Unfit,
};
use gshare_core::dag::Dag;

/// The most pipelines to try: a second or so at the worst.
const MAX_TRIES: usize = 20_000;
/// The most pipelines to try where each may need dozens of new ways to cut a GPU.
const MAX_TRIES_CARVING: usize = 500;
/// The most pipelines of equal CV and stages to compare by their run-time figures.
const MAX_TIES: usize = 64;

/// A pipeline and its slices.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// The pipeline.
    pub pipeline: Pipeline,
    /// The slices of the pipeline's parts.
    pub assignment: Assignment,
    /// The better ranked pipelines, best first, each with the reason against it.
    pub passed_over: Vec<PassedOver>,
    /// The mode of the list.
    pub mode: Mode,
    /// The reason why `mode` is not the requested mode, if it is not.
    pub fell_back: Option<FallBack>,
}

/// A pipeline that could not run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PassedOver {
    /// The pipeline itself.
    pub pipeline: Pipeline,
    /// Why it could not run.
    pub why: Unfit,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoPlan {
    /// The DAG was not partitioned.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// No pipeline fits.
    #[error("none of {tried} pipelines fits{}", first.as_ref().map(|why| format!("; the first: {why}")).unwrap_or_default())]
    NothingFits {
        /// How many were tried; 0 where the partitioner lists only pipelines that fit.
        tried: usize,
        /// The reason against the first pipeline.
        first: Option<Unfit>,
    },
}

/// Goes down the list of `partitioner` until there are slices ([`LeastFragmentation`]). Pipelines without planned slices that are equal in CV and
/// stages go by latency, then memory left over, then GPUs.
///
/// # Errors
/// [`NoPlan`]; nothing is reserved in either case.
pub fn plan(partitioner: &Partitioner, dag: &Dag, goal: &Goal, node: &Node) -> Result<Plan, NoPlan> {
    let ranked = partitioner.ranked(dag, goal, node)?;
    let (mode, fell_back) = (ranked.mode, ranked.fell_back);
    let mut passed_over = Vec::new();
    let mut best: Option<(Pipeline, Assignment)> = None;
    let mut ties = 0;
    let tries = if goal.carve { MAX_TRIES_CARVING } else { MAX_TRIES };
    for pipeline in ranked.pipelines.take(tries) {
        if let Some((first, _)) = &best {
            let tied =
                pipeline.balance == first.balance && first.parts.iter().all(|part| part.slice.is_none());
            ties += 1;
            if !tied || ties > MAX_TIES {
                break;
            }
        }
        match LeastFragmentation.assign(dag, goal, &pipeline, node) {
            Ok(assignment) => {
                let key = |a: &Assignment| (a.latency, a.waste, a.gpus, a.fragmentation);
                if best.as_ref().is_none_or(|(_, before)| key(&assignment) < key(before)) {
                    best = Some((pipeline, assignment));
                }
            }
            Err(why) if best.is_none() => passed_over.push(PassedOver { pipeline, why }),
            Err(_) => {}
        }
    }
    match best {
        Some((pipeline, assignment)) => Ok(Plan { pipeline, assignment, passed_over, mode, fell_back }),
        None => {
            let tried = passed_over.len();
            Err(NoPlan::NothingFits { tried, first: passed_over.into_iter().next().map(|passed| passed.why) })
        }
    }
}
