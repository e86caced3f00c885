//! The partitioner: configuration, bounds and fall-backs.

use super::balanced::Balanced;
use super::bottleneck::{Front, Limits};
use super::costs::{offers, reference_times};
use super::lattice::{Hands, Lattice, Passed, forks};
use crate::pipeline::{FallBack, Goal, HandOff, Mode, Node, PartitionError, RankMode, Ranked};
use gshare_core::dag::Dag;
use gshare_core::{ConfigError, Duration};

/// The most stages, or by bottleneck the most slices: no node can give more to one function.
const MAX_STAGES: usize = 64;
/// The most possible stages for each ideal that is allowed; above the bound the partitioner uses series cuts. At 20,000 ideals
/// these are 1,000,000 stages: 24 MB, and a tenth of a second.
const STEPS_PER_IDEAL: u32 = 50;
/// The most transitions of the bottleneck search for each ideal that is allowed; above the bound the partitioner uses series
/// cuts, and refuses the DAG if these have more as well. At 20,000 ideals a tenth of a second a pass.
const TRANSITIONS_PER_IDEAL: u64 = 5_000;

crate::settings_table::settings! {
    /// Settings of [`Partitioner`].
    pub struct PartitionConfig {
        /// The cuts that count as pipelines.
        pub mode: Mode = Mode::default(), with_mode;
        /// The measure by which pipelines are ranked.
        pub rank: RankMode = RankMode::default(), with_rank;
        /// The most ideals; above the bound the partitioner uses series cuts. 20,000: some megabytes, and two chains of 100
        /// have fewer. At most 100,000: a search over more does not end within minutes.
        pub max_ideals: u32 = 20_000, with_max_ideals;
    }
}

impl PartitionConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        gshare_core::check_fields!(self {
            max_ideals in 2..=100_000, "need 2 to 100000";
        })
    }
}

/// Cuts DAGs into pipelines, best first. See the [module documentation](super).
///
/// ```
/// use gshare_core::dag::{Component, Dag};
/// use gshare_sched::mig::GpuModel;
/// use gshare_sched::pipeline::{Goal, HandOff, Node, RankMode, PartitionConfig, Partitioner, plan};
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
/// for (rank, stages, bottleneck) in [(RankMode::PaperCv, 1, 10), (RankMode::Bottleneck, 3, 6)] {
///     let partitioner = Partitioner::new(PartitionConfig::default().with_rank(rank))?;
///     let plan = plan(&partitioner, &dag, &goal, &node)?;
///     assert_eq!(plan.pipeline.stages(), stages);
///     assert_eq!(plan.assignment.bottleneck, Duration::from_millis(bottleneck));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Partitioner {
    config: PartitionConfig,
}

impl Partitioner {
    /// A partitioner.
    ///
    /// # Errors
    /// A field that is out of its bounds.
    pub fn new(config: PartitionConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config })
    }

    /// All pipelines of `dag` by CV, whatever slices the node has.
    ///
    /// # Errors
    /// [`PartitionError::NoReference`], [`PartitionError::MissingProfile`]; [`PartitionError::Config`] for a goal that no
    /// pipeline could meet.
    pub fn by_cv(&self, dag: &Dag, goal: &Goal) -> Result<Ranked<'static>, PartitionError> {
        self.list_by_cv(dag, goal, MAX_STAGES)
    }

    fn list_by_cv(
        &self,
        dag: &Dag,
        goal: &Goal,
        max_stages: usize,
    ) -> Result<Ranked<'static>, PartitionError> {
        check_goal(goal)?;
        let times = reference_times(dag, goal)?;
        let (lattice, mode, fell_back) = self.lattice(dag, goal);
        let normal = mode == Mode::AcyclicQuotient;
        let spread = mode == Mode::SeriesCut;
        let list = Balanced::new(dag, lattice, &times, max_stages, normal, spread);
        Ok(Ranked { mode, fell_back, pipelines: Box::new(list) })
    }

    fn by_bottleneck(&self, dag: &Dag, goal: &Goal, node: &Node) -> Result<Ranked<'static>, PartitionError> {
        check_goal(goal)?;
        let offers = offers(dag, goal, node);
        if offers.is_empty() {
            let none = Box::new(core::iter::empty());
            return Ok(Ranked { mode: self.config.mode, fell_back: None, pipelines: none });
        }
        let hands = Hands::new(dag, &goal.hand_off);
        let limits = Limits {
            max_stages: MAX_STAGES,
            max_transitions: u64::from(self.config.max_ideals) * TRANSITIONS_PER_IDEAL,
            slo: goal.slo,
        };
        let front = |lattice: Lattice, mode| {
            let spread = mode == Mode::SeriesCut;
            let forks = if spread { forks(dag, &lattice.ideals) } else { Vec::new() };
            Front::new(lattice, offers.clone(), &forks, &hands, limits, mode == Mode::AcyclicQuotient)
        };
        let (lattice, mode, fell_back) = self.lattice(dag, goal);
        match front(lattice, mode) {
            Ok(front) => Ok(Ranked { mode, fell_back, pipelines: Box::new(front) }),
            Err(PartitionError::TooManyTransitions { limit, .. }) if mode != Mode::SeriesCut => {
                let what = "transitions";
                let fell_back = Some(FallBack { asked: self.config.mode, what, limit });
                let front = front(self.series(dag, goal), Mode::SeriesCut)?;
                Ok(Ranked { mode: Mode::SeriesCut, fell_back, pipelines: Box::new(front) })
            }
            Err(error) => Err(error),
        }
    }

    /// The graph of the requested mode, or of series cuts with the reason.
    fn lattice(&self, dag: &Dag, goal: &Goal) -> (Lattice, Mode, Option<FallBack>) {
        let PartitionConfig { mode, max_ideals, .. } = self.config;
        if mode == Mode::SeriesCut {
            return (self.series(dag, goal), mode, None);
        }
        match Lattice::new(dag, mode, &goal.hand_off, max_ideals, max_ideals * STEPS_PER_IDEAL) {
            Ok(lattice) => (lattice, mode, None),
            Err(Passed { what, limit }) => {
                (self.series(dag, goal), Mode::SeriesCut, Some(FallBack { asked: mode, what, limit }))
            }
        }
    }

    /// Series cuts: at most one ideal more than components, so no bound is passed.
    fn series(&self, dag: &Dag, goal: &Goal) -> Lattice {
        Lattice::new(dag, Mode::SeriesCut, &goal.hand_off, u32::MAX, u32::MAX)
            .unwrap_or_else(|_| unreachable!("a chain of at most 129 ideals"))
    }
}

impl Partitioner {
    /// The pipelines of `dag`, best first: a finite list, without a pipeline twice. Each pipeline has every component in one part.
    ///
    /// # Errors
    /// [`PartitionError`]: a missing profile, or a bound that no fall-back keeps.
    pub fn ranked<'a>(
        &'a self,
        dag: &'a Dag,
        goal: &'a Goal,
        node: &'a Node,
    ) -> Result<Ranked<'a>, PartitionError> {
        match self.config.rank {
            RankMode::PaperCv => {
                let stages = most_slices(goal, node).min(MAX_STAGES);
                self.list_by_cv(dag, goal, stages.max(1))
            }
            _ => self.by_bottleneck(dag, goal, node),
        }
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

/// The most slices a pipeline can get.
fn most_slices(goal: &Goal, node: &Node) -> usize {
    let compute = usize::from(node.model().family.compute_slices());
    let of = |gpu: &crate::pipeline::NodeGpu| {
        let idle = node.idle(gpu).count_ones() as usize;
        if goal.carve { idle.min(compute).max(gpu.free.len()) } else { gpu.free.len() }
    };
    node.gpus().iter().map(of).sum()
}
