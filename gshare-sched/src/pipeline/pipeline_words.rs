//! Pipelines, the slices that they run on, and the policies that cut and assign.

use crate::mig::{GpuModel, MigError, SliceAt};
use core::cmp::Ordering;
use core::fmt;
use gshare_core::dag::{ComponentSet, Dag};
use gshare_core::{Bytes, ConfigError, Duration, GpuId, ProfileId};

/// Which cuts of a DAG are pipelines. Each mode has all those of the one before it; on a chain all are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Mode {
    /// Cuts only where the whole flow passes: before and after components that are comparable with every other. What
    /// lies between two of them, a fork and its join, stays together. The nearest to the paper, so the default.
    #[default]
    SeriesCut,
    /// Stages are the steps of a chain of down-sets: every edge goes forward, and the stages run one after another.
    IdealChain,
    /// Stages are the blocks of any partition whose quotient is acyclic, and independent ones run side by side: the
    /// ideal chains without those that differ only in the order of independent stages.
    AcyclicQuotient,
}

gshare_core::display_as!(Mode {
    SeriesCut => "series cut",
    IdealChain => "ideal chain",
    AcyclicQuotient => "acyclic quotient",
});

/// The measure by which pipelines are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum RankMode {
    /// The paper's: coefficient of variation of the stages' times on the reference slice.
    PaperCv,
    /// The bottleneck on the slices that are free, hand-offs included: partition and assignment in one. The default.
    #[default]
    Bottleneck,
}

/// The time that a hand-off between two slices costs each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct HandOff {
    /// Time per edge of any size. 100 us: two copies to get going and a wake-up.
    #[cfg_attr(feature = "serde", serde(rename = "fixed_ns"))]
    pub fixed: Duration,
    /// Bytes per second between a slice and host memory. 10 GB/s: pinned memory on a link that slices share.
    pub bytes_per_second: u64,
}

impl Default for HandOff {
    fn default() -> Self {
        Self { fixed: Duration::from_micros(100), bytes_per_second: 10_000_000_000 }
    }
}

impl HandOff {
    /// No cost at all, as the paper's ranking has it.
    pub const FREE: Self = Self { fixed: Duration::ZERO, bytes_per_second: u64::MAX };

    /// Time to write or to read `bytes`, rounded up to a nanosecond, at most an hour.
    pub fn time(&self, bytes: Bytes) -> Duration {
        if bytes == Bytes::ZERO {
            return self.fixed.min(gshare_core::dag::MAX_TIME);
        }
        let rate = u128::from(self.bytes_per_second.max(1));
        let moved = Duration::from_wide_nanos((u128::from(bytes.get()) * 1_000_000_000).div_ceil(rate));
        let moved = if self.bytes_per_second == u64::MAX { Duration::ZERO } else { moved };
        moved.saturating_add(self.fixed).min(gshare_core::dag::MAX_TIME)
    }
}

gshare_core::config! {
    /// Requirements that a pipeline is searched for.
    #[derive(Debug, Clone, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
    pub struct Goal {
        /// Batch size, as in the profiles. 1: requests as they come.
        pub batch: u32 = 1, with_batch;
        /// Slice profile whose times the CV is computed from. By default the first of the first component's profiles that
        /// all components have (the paper does not say which it takes).
        pub reference: Option<String> = None;
        /// The latency a pipeline may have. By default any.
        #[cfg_attr(feature = "serde", serde(rename = "slo_ns"))]
        pub slo: Option<Duration> = None;
        /// Memory of the run-time on every slice, beside the models. 1 GiB: context, libraries and workspace of a framework.
        #[cfg_attr(feature = "serde", serde(rename = "runtime_memory_bytes"))]
        pub runtime_memory: Bytes = Bytes::from_gib(1), with_runtime_memory;
        /// Cost of hand-offs.
        pub hand_off: HandOff = HandOff::default(), with_hand_off;
        /// True if idle memory slices of one GPU may be cut again where the free slices do not do. Off: it takes the driver
        /// up to seconds.
        pub carve: bool = false, with_carve;
    }
}

gshare_core::with_fields!(Goal { with_slo(slo: Duration => Some) });

impl Goal {
    /// The same with CVs computed from the times on `slice`.
    #[must_use]
    pub fn with_reference(self, slice: impl Into<String>) -> Self {
        Self { reference: Some(slice.into()), ..self }
    }
}

/// One GPU of a [`Node`]: its slices. Memory slices in neither list are not cut up.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NodeGpu {
    /// Its id.
    pub gpu: GpuId,
    /// Slices that exist and that no instance uses.
    pub free: Vec<SliceAt>,
    /// Slices in use.
    #[cfg_attr(feature = "serde", serde(default))]
    pub busy: Vec<SliceAt>,
}

/// The GPUs of one invoker, all of one model. Slices of different GPUs may be mixed in a pipeline (FluidFaaS, Figure 4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    model: GpuModel,
    gpus: Vec<NodeGpu>,
}

/// The most GPUs of one [`Node`].
pub const MAX_NODE_GPUS: usize = 64;

impl Node {
    /// A node whose slices are checked.
    ///
    /// # Errors
    /// [`NodeError`]: slices that cannot be, a GPU twice, too many GPUs.
    pub fn new(model: GpuModel, mut gpus: Vec<NodeGpu>) -> Result<Self, NodeError> {
        if gpus.len() > MAX_NODE_GPUS {
            return Err(NodeError::TooManyGpus { count: gpus.len(), limit: MAX_NODE_GPUS });
        }
        gpus.sort_by_key(|gpu| gpu.gpu);
        for pair in gpus.windows(2) {
            if pair[0].gpu == pair[1].gpu {
                return Err(NodeError::DuplicateGpu { gpu: pair[0].gpu });
            }
        }
        for gpu in &mut gpus {
            gpu.free.sort_unstable();
            let all: Vec<SliceAt> = gpu.busy.iter().chain(&gpu.free).copied().collect();
            model.validate(&all).map_err(|cause| NodeError::BadSlices { gpu: gpu.gpu, cause })?;
        }
        Ok(Self { model, gpus })
    }

    /// A node on which just these slices are free, by name, laid on as few GPUs as come out when each goes to the first
    /// GPU that still has room for it.
    ///
    /// ```
    /// use gshare_sched::mig::GpuModel;
    /// use gshare_sched::pipeline::Node;
    ///
    /// let node = Node::with_free(GpuModel::find("A100-80")?, &["4g.40gb", "2g.20gb", "1g.10gb", "4g.40gb"])?;
    /// assert_eq!(node.gpus().len(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`NodeError::BadName`] for a profile the model does not have, [`NodeError::TooManyGpus`].
    pub fn with_free(model: GpuModel, names: &[&str]) -> Result<Self, NodeError> {
        let mut sets: Vec<Vec<ProfileId>> = Vec::new();
        for name in names {
            let profile = model.profile(name).map_err(|source| NodeError::BadName { source })?;
            let room = sets.iter().position(|set| {
                let mut with = set.clone();
                with.push(profile);
                model.arrange(&with).is_some()
            });
            match room {
                Some(gpu) => sets[gpu].push(profile),
                None if sets.len() == MAX_NODE_GPUS => {
                    return Err(NodeError::TooManyGpus { count: sets.len() + 1, limit: MAX_NODE_GPUS });
                }
                None => sets.push(vec![profile]),
            }
        }
        let gpu = |(gpu, set): (u32, &Vec<ProfileId>)| NodeGpu {
            gpu: GpuId::new(gpu),
            free: model.arrange(set).unwrap_or_default(),
            busy: Vec::new(),
        };
        let gpus = (0..).zip(&sets).map(gpu).collect();
        Self::new(model, gpus)
    }

    /// The model of its GPUs.
    pub fn model(&self) -> &GpuModel {
        &self.model
    }

    /// Its GPUs, by id.
    pub fn gpus(&self) -> &[NodeGpu] {
        &self.gpus
    }

    /// The memory slices of a GPU that are not in use, cut up or not, as a bit mask.
    pub fn idle(&self, gpu: &NodeGpu) -> u8 {
        let all = u8::MAX >> (8 - self.model.family.memory_slices());
        let mask =
            |slice: &SliceAt| self.model.get(slice.profile).and_then(|profile| profile.mask_at(slice.start));
        gpu.busy.iter().filter_map(mask).fold(all, |idle, mask| idle & !mask)
    }

    /// How many slices of each profile of the model are free.
    pub fn free_counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.model.profiles.len()];
        for slice in self.gpus.iter().flat_map(|gpu| &gpu.free) {
            counts[slice.profile.index()] += 1;
        }
        counts
    }
}

/// Why a node was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// More GPUs than one node has.
    #[error("{count} GPUs or more: at most {limit}")]
    TooManyGpus {
        /// How many would be needed.
        count: usize,
        /// [`MAX_NODE_GPUS`].
        limit: usize,
    },
    /// The same GPU twice.
    #[error("{gpu} is given twice")]
    DuplicateGpu {
        /// The GPU that is named twice.
        gpu: GpuId,
    },
    /// A name that is no profile of the model.
    #[error(transparent)]
    BadName {
        /// The name and those that would do.
        source: MigError,
    },
    /// Slices that cannot be on one GPU together.
    #[error("{gpu}: {cause}")]
    BadSlices {
        /// Which GPU.
        gpu: GpuId,
        /// The rule that the slices break.
        cause: MigError,
    },
}

/// How well the times of a pipeline's stages are balanced. Orders by CV, then by fewer stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Balance {
    /// Number of stages.
    pub stages: u32,
    /// Sum of their times in ns.
    pub total: u64,
    /// Sum of the squares of their times in ns².
    pub squares: u128,
}

impl Balance {
    /// The balance of `stages` stages whose times add up to `total` and their squares to `squares`; none is 0.
    pub const fn new(stages: u32, total: u64, squares: u128) -> Self {
        Self { stages, total, squares }
    }

    /// The balance of stages with these times.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut balance = Self { stages: 0, total: 0, squares: 0 };
        for time in times {
            balance.stages += 1;
            balance.total += time.as_nanos();
            balance.squares += u128::from(time.as_nanos()).pow(2);
        }
        balance
    }

    /// The coefficient of variation, to show.
    #[expect(clippy::cast_precision_loss, reason = "to show")]
    pub fn cv(&self) -> f64 {
        // The variance times k² in integers: no cancellation near 0.
        let (k, total) = (u128::from(self.stages), u128::from(self.total));
        let spread = (k * self.squares).saturating_sub(total * total);
        (spread as f64).sqrt() / self.total.max(1) as f64
    }

    /// Compares the CVs alone, exactly.
    pub fn cmp_cv(&self, other: &Self) -> Ordering {
        let (a, b) = (u128::from(self.stages) * self.squares, u128::from(other.stages) * other.squares);
        if self.total == other.total {
            return a.cmp(&b);
        }
        let square = |total: u64| u128::from(total).pow(2);
        cmp_fractions((a, square(self.total)), (b, square(other.total)))
    }
}

impl Ord for Balance {
    fn cmp(&self, other: &Self) -> Ordering {
        self.cmp_cv(other)
            .then(self.stages.cmp(&other.stages))
            .then(self.total.cmp(&other.total))
            .then(self.squares.cmp(&other.squares))
    }
}

impl PartialOrd for Balance {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Compares two fractions without multiplying: by whole part, then the reciprocals of what is left (Euclid). A
/// denominator of 0 counts as infinity.
fn cmp_fractions((mut a, mut b): (u128, u128), (mut c, mut d): (u128, u128)) -> Ordering {
    let mut flipped = false;
    loop {
        let order = match (b == 0, d == 0) {
            (true, true) => return Ordering::Equal,
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => (a / b).cmp(&(c / d)),
        };
        if order != Ordering::Equal {
            return if flipped { order.reverse() } else { order };
        }
        // a/b = q + r/b: compare r/b with r'/d, that is d/r' with b/r.
        (a, b, c, d) = (b, a % b, d, c % d);
        flipped = !flipped;
    }
}

/// The components that run together on one slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Part {
    /// Which stage it belongs to, from 0.
    pub stage: u32,
    /// Its components, as indices of [`Dag::components`].
    pub components: ComponentSet,
    /// The slice profile it was planned for, where the partitioner chose one.
    pub slice: Option<ProfileId>,
}

/// A cut of a DAG into stages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pipeline {
    /// The parts, by stage; stages in an order in which every edge goes forward.
    pub parts: Vec<Part>,
    /// Balance of the stages' expected times: on the reference slice, or on the planned slices where there are any.
    pub balance: Balance,
    /// Whether stages that do not depend on each other run side by side ([`Mode::AcyclicQuotient`]).
    pub side_by_side: bool,
}

impl Pipeline {
    /// A pipeline. For partitioners; hosts receive these.
    pub const fn new(parts: Vec<Part>, balance: Balance, side_by_side: bool) -> Self {
        Self { parts, balance, side_by_side }
    }

    /// Number of stages.
    pub fn stages(&self) -> u32 {
        self.parts.last().map_or(0, |part| part.stage + 1)
    }
}

/// A pipeline's slices, and how it runs on them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Assignment {
    /// For each part of the pipeline, in its order: the GPU and the slice.
    pub slices: Vec<AssignedSlice>,
    /// The longest time a slice is busy with one batch, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "bottleneck_ns"))]
    pub bottleneck: Duration,
    /// Time of one batch through the pipeline, every branch taken, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
    pub latency: Duration,
    /// Compute slices held.
    pub compute_slices: u32,
    /// Memory of the slices that is not used.
    #[cfg_attr(feature = "serde", serde(rename = "waste_bytes"))]
    pub waste: Bytes,
    /// GPUs it is spread over.
    pub gpus: u32,
    /// How much harder the node's idle memory has become to use, see the assigner.
    pub fragmentation: i64,
}

impl Assignment {
    /// An assignment with no figures yet. For assigners; hosts receive these.
    pub const fn new(slices: Vec<AssignedSlice>) -> Self {
        Self {
            slices,
            bottleneck: Duration::ZERO,
            latency: Duration::ZERO,
            compute_slices: 0,
            waste: Bytes::ZERO,
            gpus: 0,
            fragmentation: 0,
        }
    }
}

/// One slice of an [`Assignment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AssignedSlice {
    /// The GPU.
    pub gpu: GpuId,
    /// The slice on it.
    pub slice: SliceAt,
    /// Whether it has to be created first, in place of idle memory slices.
    pub carved: bool,
}

/// Why a pipeline cannot run on the free slices. Stages count from 1 in the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "reason", rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Unfit {
    /// More parts than slices.
    #[error("needs {parts} slices, {free} are free")]
    TooFewSlices {
        /// Parts of the pipeline.
        parts: u32,
        /// Free slices.
        free: u32,
    },
    /// A part that runs on no free slice.
    #[error("stage {} fits no free slice: {why}", stage + 1)]
    NoSlice {
        /// The part's stage, from 0.
        stage: u32,
        /// The resource that is missing.
        why: Misfit,
    },
    /// Each part fits a free slice, but not all at the same time.
    #[error("its stages each fit a free slice, but not all at once")]
    NotTogether,
    /// Too slow.
    #[error("latency {latency} is above the SLO of {slo}")]
    SloMissed {
        /// The least latency on the free slices.
        #[cfg_attr(feature = "serde", serde(rename = "latency_ns"))]
        latency: Duration,
        /// The SLO that was asked for, in ns.
        #[cfg_attr(feature = "serde", serde(rename = "slo_ns"))]
        slo: Duration,
    },
}

/// Why a part runs on no free slice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Misfit {
    /// The slices on which all its components have a profile are too small.
    #[error("needs {needed}, the largest has {largest}")]
    Memory {
        /// Memory it needs on that slice, the run-time's included.
        #[cfg_attr(feature = "serde", serde(rename = "needed_bytes"))]
        needed: Bytes,
        /// Memory of the largest free slice on which it is profiled.
        #[cfg_attr(feature = "serde", serde(rename = "largest_bytes"))]
        largest: Bytes,
    },
    /// On every free slice a component has no profile.
    #[error("component `{component}` has no profile for {slice}, batch {batch}")]
    NoProfile {
        /// The first such component.
        component: String,
        /// The largest free slice.
        slice: String,
        /// The batch size.
        batch: u32,
    },
    /// There is no free slice at all.
    #[error("none is free")]
    NothingFree,
}

/// Why a DAG was not partitioned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// No slice profile is common to all components.
    #[error(
        "no slice profile with batch {batch} is common to all components: `{component}` has none of the others'"
    )]
    NoReference {
        /// The batch size.
        batch: u32,
        /// The component that left no candidate.
        component: String,
    },
    /// A component without the profile that was asked for.
    #[error("component `{component}` has no profile for {slice}, batch {batch}")]
    MissingProfile {
        /// Name of the component that lacks it.
        component: String,
        /// The slice profile.
        slice: String,
        /// The batch size.
        batch: u32,
    },
    /// The joint partition and assignment is too large even for series cuts.
    #[error("{transitions} transitions between states of cut and slices: at most {limit} (max_transitions)")]
    TooManyTransitions {
        /// How many there would be.
        transitions: u64,
        /// The bound.
        limit: u64,
    },
    /// A setting that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// A mode that was given up for the next simpler one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FallBack {
    /// The mode asked for.
    pub asked: Mode,
    /// Name of the quantity that was too large.
    pub what: &'static str,
    /// Its bound.
    pub limit: u64,
}

impl fmt::Display for FallBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} has more than {} {}", self.asked, self.limit, self.what)
    }
}

/// Pipelines, best first.
pub struct Ranked<'a> {
    /// The mode they are of.
    pub mode: Mode,
    /// Set when it is not the one asked for.
    pub fell_back: Option<FallBack>,
    /// The list, computed as it is read.
    pub pipelines: Box<dyn Iterator<Item = Pipeline> + Send + 'a>,
}

impl fmt::Debug for Ranked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranked")
            .field("mode", &self.mode)
            .field("fell_back", &self.fell_back)
            .finish_non_exhaustive()
    }
}

/// A policy that cuts a DAG into pipelines.
///
/// # Contract
/// The list is finite and has no pipeline twice; every component is in exactly one part; equal calls give equal lists.
pub trait PipelinePartitioner: Send {
    /// The pipelines of `dag`, best first. A policy may leave out what `node` could never run.
    ///
    /// # Errors
    /// [`PartitionError`]: a profile that is missing, or a bound that no fall-back keeps.
    fn ranked<'a>(
        &'a self,
        dag: &'a Dag,
        goal: &'a Goal,
        node: &'a Node,
    ) -> Result<Ranked<'a>, PartitionError>;
}

/// A policy that chooses slices for a pipeline.
///
/// # Contract
/// Slices are free and different ones; parts fit theirs; the latency is within the SLO; equal calls give equal answers.
pub trait SliceAssigner: Send {
    /// Slices of `node` for the parts of `pipeline`.
    ///
    /// # Errors
    /// [`Unfit`]: why there are none.
    fn assign(&self, dag: &Dag, goal: &Goal, pipeline: &Pipeline, node: &Node) -> Result<Assignment, Unfit>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balance(times: &[u64]) -> Balance {
        Balance::of(times.iter().map(|&ns| Duration::from_nanos(ns)))
    }

    #[test]
    fn cv_is_std_over_mean_and_compares_exactly() {
        assert!(balance(&[7, 7, 7]).cv() == 0.0 && balance(&[9]).cv() == 0.0);
        assert!((balance(&[1, 3]).cv() - 0.5).abs() < 1e-15);
        assert_eq!(balance(&[1, 3]).cmp_cv(&balance(&[1_000, 3_000])), Ordering::Equal, "CV has no unit");
        assert!(balance(&[1, 3]) > balance(&[2, 3]));
        assert!(balance(&[5]) < balance(&[5, 5]), "fewer stages first");
        // Two that differ by less than a double can tell.
        let (near, far) = (balance(&[1 << 40, (1 << 40) + 1]), balance(&[1 << 40, (1 << 40) + 2]));
        assert_eq!(near.cmp_cv(&far), Ordering::Less);
        let hour = gshare_core::dag::MAX_TIME.as_nanos();
        let worst = balance(&[hour; 128]);
        assert_eq!(worst.cmp_cv(&balance(&[1])), Ordering::Equal, "the largest DAG stays within 128 bits");
    }

    #[test]
    fn fractions_compare_as_their_cross_products() {
        for (a, b, c, d) in (0..6u128.pow(4)).map(|n| (n % 6, n / 6 % 6, n / 36 % 6, n / 216)) {
            if b != 0 && d != 0 {
                assert_eq!(cmp_fractions((a, b), (c, d)), (a * d).cmp(&(c * b)), "{a}/{b} {c}/{d}");
            }
        }
        let max = u128::MAX;
        assert_eq!(cmp_fractions((max - 1, max), (max - 2, max - 1)), Ordering::Greater);
    }

    #[test]
    fn a_hand_off_takes_its_fixed_time_and_its_bytes() {
        let hand_off = HandOff { fixed: Duration::from_nanos(5), bytes_per_second: 1_000_000_000 };
        assert_eq!(hand_off.time(Bytes(10)), Duration::from_nanos(15));
        assert_eq!(HandOff::FREE.time(Bytes(1 << 50)), Duration::ZERO);
        let slow = HandOff { fixed: Duration::MAX, bytes_per_second: 0 };
        assert_eq!(slow.time(Bytes(1 << 50)), gshare_core::dag::MAX_TIME, "never more than an hour");
    }

    #[test]
    fn a_node_with_slices_that_cannot_be_is_refused() {
        let model = GpuModel::find("A100-80").unwrap();
        let four = SliceAt { start: 0, profile: model.profile("4g.40gb").unwrap() };
        let gpu =
            |gpu, free: &[SliceAt]| NodeGpu { gpu: GpuId::new(gpu), free: free.to_vec(), busy: vec![four] };
        let refused = |gpus| Node::new(model.clone(), gpus).unwrap_err().to_string();
        assert_eq!(refused(vec![gpu(3, &[four])]), "gpu3: 4g.40gb at memory slice 0 overlaps another slice");
        assert_eq!(refused(vec![gpu(1, &[]), gpu(1, &[])]), "gpu1 is given twice");
        assert_eq!(refused((0..65).map(|id| gpu(id, &[])).collect()), "65 GPUs or more: at most 64");
        let many = vec!["7g.80gb"; 65];
        assert!(matches!(Node::with_free(model.clone(), &many), Err(NodeError::TooManyGpus { .. })));
        let error = Node::with_free(model, &["1g.6gb"]).unwrap_err().to_string();
        assert!(error.starts_with("A100-80 has no MIG profile `1g.6gb`: it has "), "{error}");
    }
}
