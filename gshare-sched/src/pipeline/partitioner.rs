//! The partitioner and its bounds.

use super::bottleneck::{Front, Limits};
use super::costs::offers;
use super::cuts::{Cuts, Hands, forks};
use crate::pipeline::{Goal, HandOff, Node, PartitionError, Pipeline};
use gshare_core::dag::Dag;
use gshare_core::{ConfigError, Duration};

/// The most slices of a pipeline: no node can give more to one function.
const MAX_STAGES: usize = 64;
/// The most transitions of the bottleneck search, which refuses a DAG with more: a tenth of a second a pass.
const MAX_TRANSITIONS: u64 = 100_000_000;

/// Cuts DAGs into pipelines, best first. See the [module documentation](super).
///
/// ```
/// use gshare_core::dag::{Component, Dag};
/// use gshare_sched::mig::GpuModel;
/// use gshare_sched::pipeline::{Goal, HandOff, LeastFragmentation, Node, Partitioner};
/// use gshare_core::{Bytes, Duration};
///
/// let chain = [("a", 2), ("b", 3), ("c", 4), ("d", 1)];
/// let component = |(name, ms): &(&str, u64)| {
///     let (slow, fast) = (Duration::from_millis(2 * ms), Duration::from_millis(*ms));
///     Component::new(*name)
///         .with_profile("1g.10gb", 1, slow, Bytes::from_gib(3))
///         .with_profile("2g.20gb", 1, fast, Bytes::from_gib(3))
/// };
/// let dag = chain.iter().fold(Dag::builder("chain"), |dag, one| dag.component(component(one)));
/// let dag = chain.windows(2).fold(dag, |dag, two| dag.edge(two[0].0, two[1].0, Bytes::ZERO)).build()?;
///
/// let node = Node::with_free(GpuModel::find("A100-80")?, &["1g.10gb", "1g.10gb", "2g.20gb"])?;
/// let goal = Goal::default().with_hand_off(HandOff::FREE);
/// let mut pipelines = Partitioner.pipelines(&dag, &goal, &node)?;
/// let best = pipelines.next().ok_or("one fits")?;
/// assert_eq!(best.stages(), 3);
/// let assignment = LeastFragmentation.assign(&dag, &goal, &best, &node)?;
/// assert_eq!(assignment.bottleneck, Duration::from_millis(6));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Partitioner;

impl Partitioner {
    /// The pipelines of `dag` that fit the free slices of `node`, the shortest bottleneck first; each next holds fewer compute slices.
    /// Each has every component in one part.
    ///
    /// # Errors
    /// [`PartitionError`]: a goal that no pipeline could meet, or more states than the search may look at.
    pub fn pipelines(
        self,
        dag: &Dag,
        goal: &Goal,
        node: &Node,
    ) -> Result<impl Iterator<Item = Pipeline> + Send + use<>, PartitionError> {
        check_goal(goal)?;
        let offers = offers(dag, goal, node);
        if offers.is_empty() {
            return Ok(None.into_iter().flatten());
        }
        let hands = Hands::new(dag, &goal.hand_off);
        let limits = Limits { max_stages: MAX_STAGES, max_transitions: MAX_TRANSITIONS, slo: goal.slo };
        let cuts = Cuts::new(dag, &hands);
        let forks = forks(dag, &cuts.ideals);
        Ok(Some(Front::new(cuts, offers, &forks, &hands, limits)?).into_iter().flatten())
    }
}

fn check_goal(goal: &Goal) -> Result<(), ConfigError> {
    let bad = |field, bound| Err(ConfigError::new(field, 0, bound));
    match goal {
        Goal { batch: 0, .. } => bad("batch", "need at least 1"),
        Goal { slo: Some(Duration::ZERO), .. } => bad("slo", "need more than 0, or none"),
        Goal { hand_off: HandOff { bytes_per_second: 0, .. }, .. } => {
            bad("bytes_per_second of hand-offs", "need more than 0")
        }
        _ => Ok(()),
    }
}
