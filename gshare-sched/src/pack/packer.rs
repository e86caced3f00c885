//! Demands, placements, and the trait of packers.

use core::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use gshare_core::{Bytes, FunctionId, GpuId, GpuShare, PlacementId, Quota, SmShare};

/// The kind of work behind a demand; Dilu places the three kinds differently (Dilu, section 3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Workload {
    /// Inference of a model that fits one GPU.
    #[default]
    Inference,
    /// Inference of a large model, which may be split over several GPUs.
    LargeModel,
    /// One worker of a training job.
    Training,
}

/// Shares of GPU time and SMs, and memory, that an instance asks of one GPU.
///
/// ```
/// use gshare_sched::pack::Demand;
/// use gshare_core::{Bytes, Quota, SmShare};
///
/// let quota = Quota::from_percent(40).ok_or("at most 100 %")?;
/// let sm = SmShare::from_percent(12).ok_or("at most 100 %")?;
/// let resnet = Demand::new(quota, sm).with_memory(Bytes::from_mib(1525));
/// assert_eq!(resnet.memory, Bytes::from_mib(1525));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Demand {
    /// Share of GPU time in a window that is guaranteed. Must not be zero.
    #[cfg_attr(feature = "serde", serde(rename = "quota_bp"))]
    pub quota: Quota,
    /// Share of the SMs that is guaranteed (Dilu's `request`). Must not be zero.
    #[cfg_attr(feature = "serde", serde(rename = "sm_bp"))]
    pub sm: SmShare,
    /// Most of the SMs that it may use (Dilu's `limit`), at least `sm`; `None` means `sm`.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "sm_limit_bp", default, skip_serializing_if = "Option::is_none")
    )]
    pub sm_limit: Option<SmShare>,
    /// GPU memory that is held while the placement lives, in bytes; zero is allowed.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes", default))]
    pub memory: Bytes,
    /// The function it is an instance of, for affinity.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub function: Option<FunctionId>,
    /// Members of one group never share a GPU.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub apart: Option<u32>,
    /// The kind of work, which Dilu's placement looks at.
    #[cfg_attr(feature = "serde", serde(default))]
    pub workload: Workload,
}

gshare_core::with_fields!(Demand {
    with_memory(memory: Bytes),
    with_sm_limit(sm_limit: SmShare => Some),
    with_function(function: FunctionId => Some),
    with_apart(apart: u32 => Some),
    with_workload(workload: Workload),
});

/// The guaranteed part of the share, with its SM limit. Without guaranteed time the demand is one basis point of time.
impl From<&GpuShare> for Demand {
    fn from(share: &GpuShare) -> Self {
        let least = Quota::new(1).unwrap_or(Quota::WHOLE);
        Self::new(share.time().request().max(least), share.sm())
            .with_sm_limit(share.sm_limit())
            .with_memory(share.memory().unwrap_or(Bytes::ZERO))
    }
}

impl Demand {
    /// A demand for `quota` of the time on `sm` of the SMs, with no memory, function or group.
    pub const fn new(quota: Quota, sm: SmShare) -> Self {
        Self {
            quota,
            sm,
            sm_limit: None,
            memory: Bytes::ZERO,
            function: None,
            apart: None,
            workload: Workload::Inference,
        }
    }

    /// Most of the SMs it may use: `sm_limit`, or `sm` without one.
    pub fn limit(&self) -> SmShare {
        self.sm_limit.unwrap_or(self.sm)
    }

    /// Refuses a demand with a zero size, or with a limit below its request.
    ///
    /// # Errors
    /// [`PackError::ZeroSize`], [`PackError::LimitBelowRequest`].
    pub fn validate(&self) -> Result<(), PackError> {
        if self.quota.is_zero() {
            return Err(PackError::ZeroSize { field: "quota" });
        }
        if self.sm.is_zero() {
            return Err(PackError::ZeroSize { field: "sm" });
        }
        if self.limit() < self.sm {
            return Err(PackError::LimitBelowRequest { request: self.sm, limit: self.limit() });
        }
        Ok(())
    }
}

/// One GPU as a bin. Shares are relative to the largest GPU of the pool, so a smaller one has less than the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct GpuSpec {
    /// Width: GPU time per window.
    #[cfg_attr(feature = "serde", serde(rename = "quota_bp", default = "whole_quota"))]
    pub quota: Quota,
    /// Height: share of the SMs.
    #[cfg_attr(feature = "serde", serde(rename = "sm_bp", default = "whole_sm"))]
    pub sm: SmShare,
    /// Memory that placements may hold together, in bytes.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
    pub memory: Bytes,
}

#[cfg(feature = "serde")]
const fn whole_quota() -> Quota {
    Quota::WHOLE
}

#[cfg(feature = "serde")]
const fn whole_sm() -> SmShare {
    SmShare::WHOLE
}

impl GpuSpec {
    /// A whole GPU with `memory`.
    pub const fn new(memory: Bytes) -> Self {
        Self { quota: Quota::WHOLE, sm: SmShare::WHOLE, memory }
    }

    /// The same, `quota` wide and `sm` high.
    #[must_use]
    pub const fn with_size(self, quota: Quota, sm: SmShare) -> Self {
        Self { quota, sm, ..self }
    }
}

/// The part of a GPU that a placement holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Rectangle {
    /// Begin of the placement's time in the window (x), in basis points.
    #[cfg_attr(feature = "serde", serde(rename = "time_offset_bp"))]
    pub time_offset: Quota,
    /// Begin of the placement's SMs (y), in basis points.
    #[cfg_attr(feature = "serde", serde(rename = "sm_offset_bp"))]
    pub sm_offset: SmShare,
    /// Share of the window (width), in basis points.
    #[cfg_attr(feature = "serde", serde(rename = "quota_bp"))]
    pub quota: Quota,
    /// Share of the SMs (height), in basis points.
    #[cfg_attr(feature = "serde", serde(rename = "sm_bp"))]
    pub sm: SmShare,
}

/// Where a demand went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct Placement {
    /// The placement's name; stale after release.
    pub id: PlacementId,
    pub gpu: GpuId,
    /// The part of the GPU that the placement holds.
    pub rectangle: Rectangle,
    /// The demand as it was given.
    pub demand: Demand,
}

impl Placement {
    /// A placement of `demand` at `rectangle` of `gpu`. For packers; hosts receive these.
    pub const fn new(id: PlacementId, gpu: GpuId, rectangle: Rectangle, demand: Demand) -> Self {
        Self { id, gpu, rectangle, demand }
    }
}

/// The answer to a demand that found room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Placed {
    /// The placement that was made.
    pub placement: Placement,
    /// True if other placements of that GPU got new rectangles to make room. No process moves, but code
    /// that keeps the rectangles (a slot table) must read them again.
    pub rearranged: bool,
}

impl Placed {
    /// A placement that moved no other.
    pub const fn new(placement: Placement) -> Self {
        Self { placement, rearranged: false }
    }
}

/// The change of a placement by a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct RepackChange {
    pub id: PlacementId,
    /// GPU before the change.
    pub from_gpu: GpuId,
    /// Rectangle before the change.
    pub from: Rectangle,
    /// GPU after the change. The same GPU means a change in place, which moves no process.
    pub to_gpu: GpuId,
    /// Rectangle after the change.
    pub to: Rectangle,
}

impl RepackChange {
    /// Whether the process stays on its GPU.
    pub fn in_place(&self) -> bool {
        self.from_gpu == self.to_gpu
    }
}

/// A proposal to move placements, valid for one version of the packer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct RepackPlan {
    /// [`PackerExt::version`] that the plan was made at.
    pub version: u64,
    /// Changes by placement id. They hold together: all or none.
    pub changes: Vec<RepackChange>,
    /// GPUs that become empty.
    pub emptied: Vec<GpuId>,
    /// Placements that a drain should have moved but found no room for.
    pub stuck: Vec<PlacementId>,
}

impl RepackPlan {
    /// Number of placements that change their GPU.
    pub fn moves(&self) -> usize {
        self.changes.iter().filter(|change| !change.in_place()).count()
    }
}

/// One GPU as a packer sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct GpuStatus {
    pub gpu: GpuId,
    /// The GPU's size.
    pub spec: GpuSpec,
    /// Whether the GPU takes no new placements.
    pub cordoned: bool,
    /// The number of placements that the GPU holds.
    pub placements: u32,
    /// Memory held by the placements, in bytes.
    #[cfg_attr(feature = "serde", serde(rename = "memory_used_bytes"))]
    pub memory_used: Bytes,
    /// Quota times SM share held by the placements, in basis points squared (a whole GPU is 10^8).
    pub area_used: u64,
}

impl GpuStatus {
    /// The status of an empty GPU.
    pub const fn new(gpu: GpuId, spec: GpuSpec) -> Self {
        Self { gpu, spec, cordoned: false, placements: 0, memory_used: Bytes::ZERO, area_used: 0 }
    }

    /// Adds the placements that the GPU holds to the sums.
    #[must_use]
    pub fn with_placements(self, held: &[Placement]) -> Self {
        let area = |demand: &Demand| u64::from(demand.quota.get()) * u64::from(demand.sm.get());
        Self {
            placements: u32::try_from(held.len()).unwrap_or(u32::MAX),
            memory_used: Bytes(held.iter().map(|placement| placement.demand.memory.get()).sum()),
            area_used: held.iter().map(|placement| area(&placement.demand)).sum(),
            ..self
        }
    }
}

/// Why a packer refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PackError {
    /// A size is zero.
    #[error("{field} is zero: a demand or a GPU has at least one basis point of it")]
    ZeroSize {
        #[cfg_attr(feature = "serde", serde(skip_deserializing))]
        field: &'static str,
    },
    /// `sm_limit` is below `sm`.
    #[error("the SM limit ({limit}) is below the request ({request})")]
    LimitBelowRequest { request: SmShare, limit: SmShare },
    /// No GPU of the pool is large enough, even empty.
    #[error("{quota} of the time on {sm} of the SMs with {memory} is more than any GPU of the pool has")]
    NeverFits { quota: Quota, sm: SmShare, memory: Bytes },
    /// Some GPU is large enough, but none has room now.
    #[error("no GPU has {quota} of the time on {sm} of the SMs free")]
    NoRoom { quota: Quota, sm: SmShare },
    /// There is room for the rectangle, but on no GPU with enough free memory.
    #[error("no GPU with room has {memory} of memory free")]
    Memory { memory: Bytes },
    /// The packer's tables end below this id.
    #[error("{gpu} is beyond the last id that the packer keeps ({last})")]
    GpuIdTooLarge { gpu: GpuId, last: GpuId },
    /// No such GPU in the pool.
    #[error("{gpu} is not in the pool")]
    UnknownGpu { gpu: GpuId },
    /// A GPU of this id is in the pool.
    #[error("{gpu} is already in the pool")]
    GpuExists { gpu: GpuId },
    /// The GPU still holds placements.
    #[error("{gpu} still holds {placements} placements: release or move them first")]
    GpuInUse { gpu: GpuId, placements: u32 },
    /// The placement was released, or never made.
    #[error("{id} is not a placement (any more)")]
    UnknownPlacement { id: PlacementId },
    /// The rectangle is not inside the GPU, or not of the demand's size.
    #[error("the rectangle is not inside {gpu} or not of the size that the demand asks")]
    BadRectangle { gpu: GpuId },
    /// The rectangle, or the room for it, is taken.
    #[error("the place on {gpu} is taken")]
    Occupied { gpu: GpuId },
    /// The plan was made for another version of the packer, or does not match its placements.
    #[error("the plan is for version {planned}, the packer is at {current}")]
    StalePlan { planned: u64, current: u64 },
    /// A batch or gang does not fit whole.
    #[error("demand {index} of the batch does not fit: {reason}")]
    Batch { index: usize, reason: Box<PackError> },
    /// A GPU with more memory than the packer counts.
    #[error("memory of {gpu} is {memory}: need less than {limit}")]
    GpuTooLarge { gpu: GpuId, memory: Bytes, limit: Bytes },
    /// A snapshot contradicts itself.
    #[error("the snapshot contradicts itself: {what}")]
    BadSnapshot {
        #[cfg_attr(feature = "serde", serde(skip_deserializing))]
        what: &'static str,
    },
}

gshare_core::claims! {
    /// What the suite for [`Packer`] checks.
    packer_claims {
        MEMORY = "the memory of a GPU's placements stays within its memory";
        SUMS = "by sums: the guaranteed SM shares of a GPU add up to at most its SMs";
        SIZE = "by rectangles: a rectangle has the demand's size and lies inside its GPU";
        OVERLAP = "by rectangles: no two rectangles of a GPU overlap";
        APART = "members of one group never share a GPU";
        GANG = "members of a gang are on GPUs of their own";
        ALLOWED = "a demand goes to a GPU that the filter accepts";
        POOL = "a placement is on a GPU of the pool";
        ORDER = "answers are those to the demands, in their order";
        INVALID = "an invalid demand is refused";
        HELD =
            "placements stay as they were answered until they are released, but for the rectangles of a rearranged GPU";
        ONCE = "an id is given once";
        STALE = "a stale id is an error";
        RETURNED = "a release returns the placement";
        ADDED = "a GPU is added once";
        IN_USE = "a GPU in use is not removed";
        ABSENT = "a GPU that is not there is not removed";
        TAKEN = "what an empty GPU holds, a live id and a valid GPU are not refused";
        BY_GPU = "placements are listed by GPU";
        BY_ID = "GPUs are listed by id";
        STATUS = "the status of a GPU is the sum of its placements";
        FOUND_GPU = "a GPU is found as it is listed";
        LISTED = "a GPU's placements are those of the list";
        FOUND = "a placement is found by its id";
        REFUSED = "an error changes nothing";
        SAME = "equal calls give equal answers";
    }
}

/// A policy that places demands on GPUs.
///
/// The packer never moves a placement to another GPU unasked. It may move it *inside* its GPU, which moves no
/// process (a rectangle's offsets are virtual: the MPS percentage reserves no particular SMs, and x is an offset in
/// the window); [`Placed::rearranged`] says so.
///
/// Six methods are the policy's own; the others follow from them, and a policy overrides those that it can answer
/// faster.
///
/// # Contract
/// Checked by the conformance suite of `gshare-sim`:
#[doc = packer_claims!()]
pub trait Packer: Send {
    /// Adds an empty GPU.
    ///
    /// # Errors
    /// [`PackError::GpuExists`], [`PackError::GpuIdTooLarge`], [`PackError::ZeroSize`].
    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError>;

    /// Removes an empty GPU.
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`], [`PackError::GpuInUse`].
    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError>;

    /// Places a demand on one GPU that `allowed` accepts. Node selectors, gangs and drains are filters, so this method
    /// and not [`Packer::place`] is the required one.
    ///
    /// # Errors
    /// [`PackError::ZeroSize`], [`PackError::LimitBelowRequest`], [`PackError::NeverFits`], [`PackError::NoRoom`],
    /// [`PackError::Memory`].
    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError>;

    /// Frees a placement and returns it.
    ///
    /// # Errors
    /// [`PackError::UnknownPlacement`].
    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError>;

    /// Visits every placement, by GPU id, then arrival.
    fn placements(&self, visit: &mut dyn FnMut(&Placement));

    /// Visits every GPU, by id.
    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus));

    /// Places a demand on one GPU.
    ///
    /// # Errors
    /// As [`Packer::place_where`].
    fn place(&mut self, demand: &Demand) -> Result<Placed, PackError> {
        self.place_where(demand, &|_| true)
    }

    /// Difficulty of a demand: a batch is placed by falling weight, since large demands find no room at the end. The
    /// default is quota times SM share, in basis points squared.
    fn weight(&self, demand: &Demand) -> u64 {
        u64::from(demand.quota.get()) * u64::from(demand.sm.get())
    }

    /// Places every demand or none, and appends the answers to `out` in the order of `demands`. `allowed` is given the
    /// answers of this call so far, in the order in which they were found, and the GPU asked about.
    ///
    /// The default undoes a failed batch by releasing its placements. A packer that changes rectangles of other placements
    /// to make room must override it, since a release does not restore these rectangles.
    ///
    /// # Errors
    /// [`PackError::Batch`], which names the demand that found no room.
    fn place_set(
        &mut self,
        demands: &[Demand],
        allowed: &dyn Fn(&[Placed], GpuId) -> bool,
        out: &mut Vec<Placed>,
    ) -> Result<(), PackError> {
        place_set(self, demands, allowed, out)
    }

    /// Places every demand or none, and appends the answers to `out` in the order of `demands`.
    ///
    /// # Errors
    /// [`PackError::Batch`].
    fn place_all(&mut self, demands: &[Demand], out: &mut Vec<Placed>) -> Result<(), PackError> {
        self.place_set(demands, &|_, _| true, out)
    }

    /// Places every demand on a different GPU, or none.
    ///
    /// # Errors
    /// [`PackError::Batch`].
    fn place_gang(&mut self, demands: &[Demand], out: &mut Vec<Placed>) -> Result<(), PackError> {
        let fresh = |taken: &[Placed], gpu: GpuId| taken.iter().all(|placed| placed.placement.gpu != gpu);
        self.place_set(demands, &fresh, out)
    }

    /// Places a large model on GPUs that `allowed` accepts, and appends the answers to `out`. If no GPU can hold all of its
    /// memory, a packer may spread it over several GPUs, with a placement for each part. The default makes one placement.
    ///
    /// # Errors
    /// As [`Packer::place_where`].
    fn place_split(
        &mut self,
        demand: &Demand,
        allowed: &dyn Fn(GpuId) -> bool,
        out: &mut Vec<Placed>,
    ) -> Result<(), PackError> {
        out.push(self.place_where(demand, allowed)?);
        Ok(())
    }

    /// A placement by id; `None` when stale.
    fn placement(&self, id: PlacementId) -> Option<Placement> {
        let mut found = None;
        self.placements(&mut |placement| {
            if placement.id == id {
                found = Some(*placement);
            }
        });
        found
    }

    /// Visits the placements of one GPU, by arrival.
    fn placements_on(&self, gpu: GpuId, visit: &mut dyn FnMut(&Placement)) {
        self.placements(&mut |placement| {
            if placement.gpu == gpu {
                visit(placement);
            }
        });
    }

    /// The state of one GPU; `None` when it is not in the pool.
    fn gpu(&self, gpu: GpuId) -> Option<GpuStatus> {
        let mut found = None;
        self.gpus(&mut |status| {
            if status.gpu == gpu {
                found = Some(*status);
            }
        });
        found
    }
}

/// The default of [`Packer::place_set`], in force unless a packer overrides it.
///
/// # Errors
/// [`PackError::Batch`].
pub fn place_set<P: Packer + ?Sized>(
    packer: &mut P,
    demands: &[Demand],
    allowed: &dyn Fn(&[Placed], GpuId) -> bool,
    out: &mut Vec<Placed>,
) -> Result<(), PackError> {
    let mut order: Vec<usize> = (0..demands.len()).collect();
    order.sort_by_key(|index| Reverse(packer.weight(&demands[*index])));
    let start = out.len();
    for index in &order {
        let taken = &out[start..];
        match packer.place_where(&demands[*index], &|gpu| allowed(taken, gpu)) {
            Ok(placed) => out.push(placed),
            Err(reason) => {
                for placed in out.drain(start..).rev() {
                    // An id that was given a moment ago is live, so the release succeeds.
                    let _ = packer.release(placed.placement.id);
                }
                return Err(PackError::Batch { index: *index, reason: Box::new(reason) });
            }
        }
    }
    in_order_of_demands(&order, &mut out[start..]);
    Ok(())
}

/// Brings answers that were found in `order` into the order of the demands.
pub fn in_order_of_demands(order: &[usize], answers: &mut [Placed]) {
    let found = answers.to_vec();
    for (index, placed) in order.iter().zip(found) {
        answers[*index] = placed;
    }
}

gshare_core::claims! {
    /// What the suite for [`PackerExt`] checks, beside that for [`Packer`].
    packer_ext_claims {
        VALID = "a valid call is carried out";
        CORDON = "a cordon shows in the status";
        CLOSED = "a cordoned GPU takes no new placements";
        MOVES = "a plan keeps to the moves allowed";
        VERSION = "the version grows with every change";
        PROBE = "a probe names the GPU that `place` chooses";
        PLAN = "a plan changes nothing until it is applied";
        APPLIED = "a plan that is applied moves what it says and nothing else";
        EMPTIED = "a plan empties the GPUs that it says";
        PLAN_ONCE = "a plan is good once";
        RESTORED = "what runs is restored where it is";
    }
}

/// Operations of a packer beyond placing and releasing: plan moves between GPUs on a copy of itself and carry them out.
///
/// Five methods are the packer's own; probing and the plans follow from them.
///
/// # Contract
/// Checked by the conformance suite of `gshare-sim`:
#[doc = packer_ext_claims!()]
pub trait PackerExt: Packer {
    /// A number that grows with every change.
    fn version(&self) -> u64;

    /// A cordoned GPU keeps its placements and takes no new ones, except by [`PackerExt::place_at`].
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`].
    fn set_cordoned(&mut self, gpu: GpuId, cordoned: bool) -> Result<(), PackError>;

    /// Places a demand exactly here, to restore a running instance.
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`], [`PackError::BadRectangle`], [`PackError::Occupied`], [`PackError::Memory`], and the
    /// errors of an invalid demand.
    fn place_at(&mut self, gpu: GpuId, at: Rectangle, demand: &Demand) -> Result<Placement, PackError>;

    /// Makes each GPU hold exactly the listed placements, in this order. Together the lists contain every placement that
    /// these GPUs hold now, once, with its id and demand; only GPUs and rectangles differ.
    ///
    /// # Errors
    /// When a list does not fit its GPU: nothing changed.
    fn set_held(&mut self, held: &BTreeMap<GpuId, Vec<Placement>>) -> Result<(), PackError>;

    /// A copy to try changes on.
    fn trial(&self) -> Box<dyn PackerExt>;

    /// The GPU that [`Packer::place`] would choose now.
    ///
    /// # Errors
    /// As [`Packer::place_where`].
    fn probe(&self, demand: &Demand) -> Result<GpuId, PackError> {
        self.trial().place(demand).map(|placed| placed.placement.gpu)
    }

    /// A plan to use fewer GPUs, with at most `max_moves` moves between GPUs. It empties the emptiest GPUs into other open
    /// GPUs, each wholly or not at all. Changes nothing; the plan is empty if there is nothing to gain.
    fn plan_repack(&self, max_moves: usize) -> RepackPlan {
        let mut trial = self.trial();
        let mut open = Vec::new();
        self.gpus(&mut |status| {
            if status.placements > 0 {
                open.push((status.area_used, status.gpu));
            }
        });
        open.sort_unstable();
        let ids = open.iter().map(|(_, gpu)| gpu.index() + 1).max().unwrap_or(0);
        let mut is_goal = vec![false; ids];
        open.iter().for_each(|(_, gpu)| is_goal[gpu.index()] = true);
        let (mut moved, mut filled, mut emptied) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
        for (_, gpu) in open {
            if moved.len() >= max_moves {
                break;
            }
            let held = held_by(&*trial, gpu);
            // A GPU that took in others was filled by this plan; emptying it again would move those twice.
            if filled.contains(&gpu) || moved.len() + held.len() > max_moves {
                continue;
            }
            let demands: Vec<Demand> = held.iter().map(|placement| placement.demand).collect();
            let mut out = Vec::new();
            let open = |other: GpuId| is_goal.get(other.index()).copied().unwrap_or(false);
            let elsewhere = |_: &[Placed], other: GpuId| other != gpu && open(other);
            if trial.place_set(&demands, &elsewhere, &mut out).is_err() {
                continue;
            }
            for (old, new) in held.iter().zip(&out) {
                if trial.release(old.id).is_err() {
                    return RepackPlan::default();
                }
                moved.insert(old.id, new.placement.id);
                filled.insert(new.placement.gpu);
            }
            is_goal[gpu.index()] = false;
            emptied.push(gpu);
        }
        emptied.sort_unstable();
        let touched = filled.into_iter().chain(emptied.iter().copied()).collect();
        let changes = changes_between(self, &*trial, &moved, &touched);
        RepackPlan { version: self.version(), changes, emptied, stuck: Vec::new() }
    }

    /// A plan to empty `gpu`. Placements that find no room elsewhere are listed as stuck.
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`].
    fn plan_drain(&self, gpu: GpuId) -> Result<RepackPlan, PackError> {
        self.gpu(gpu).ok_or(PackError::UnknownGpu { gpu })?;
        let mut trial = self.trial();
        let mut held = held_by(self, gpu);
        held.sort_by_key(|placement| Reverse(self.weight(&placement.demand)));
        let (mut moved, mut stuck, mut touched) = (BTreeMap::new(), Vec::new(), BTreeSet::from([gpu]));
        for placement in held {
            match trial.place_where(&placement.demand, &|other| other != gpu) {
                Ok(placed) => {
                    moved.insert(placement.id, placed.placement.id);
                    touched.insert(placed.placement.gpu);
                    trial.release(placement.id)?;
                }
                Err(_) => stuck.push(placement.id),
            }
        }
        let emptied = if stuck.is_empty() { vec![gpu] } else { Vec::new() };
        let changes = changes_between(self, &*trial, &moved, &touched);
        Ok(RepackPlan { version: self.version(), changes, emptied, stuck })
    }

    /// Carries out a plan: all of it, or nothing. Ids stay.
    ///
    /// # Errors
    /// [`PackError::StalePlan`] when anything changed since the plan was made or the plan does not match.
    fn apply(&mut self, plan: &RepackPlan) -> Result<(), PackError> {
        let stale = || PackError::StalePlan { planned: plan.version, current: self.version() };
        if plan.version != self.version() {
            return Err(stale());
        }
        // The lists of the GPUs concerned are built aside, and taken over when every one is sound.
        let mut lists: BTreeMap<GpuId, Vec<Placement>> = BTreeMap::new();
        for gpu in plan.changes.iter().flat_map(|change| [change.from_gpu, change.to_gpu]) {
            if let Entry::Vacant(list) = lists.entry(gpu) {
                self.gpu(gpu).ok_or_else(stale)?;
                list.insert(held_by(self, gpu));
            }
        }
        let mut moved = Vec::new();
        for change in &plan.changes {
            let list = lists.entry(change.from_gpu).or_default();
            let is_it = |held: &Placement| held.id == change.id && held.rectangle == change.from;
            let position = list.iter().position(is_it).ok_or_else(stale)?;
            let (from, to) = (change.from, change.to);
            if (to.quota, to.sm) != (from.quota, from.sm) {
                return Err(stale());
            }
            let old = list.remove(position);
            moved.push(Placement { gpu: change.to_gpu, rectangle: to, ..old });
        }
        for placement in moved {
            lists.entry(placement.gpu).or_default().push(placement);
        }
        let stale = stale();
        self.set_held(&lists).map_err(|_| stale)
    }
}

fn held_by<P: Packer + ?Sized>(packer: &P, gpu: GpuId) -> Vec<Placement> {
    let mut held = Vec::new();
    packer.placements_on(gpu, &mut |placement| held.push(*placement));
    held
}

/// The differences that `trial` makes for the placements that are on `gpus` now; `moved` names those that got
/// another id there.
fn changes_between<P: PackerExt + ?Sized>(
    now: &P,
    trial: &dyn PackerExt,
    moved: &BTreeMap<PlacementId, PlacementId>,
    gpus: &BTreeSet<GpuId>,
) -> Vec<RepackChange> {
    let mut changes = Vec::new();
    for old in gpus.iter().flat_map(|gpu| held_by(now, *gpu)) {
        if let Some(new) = trial.placement(*moved.get(&old.id).unwrap_or(&old.id))
            && (new.gpu, new.rectangle) != (old.gpu, old.rectangle)
        {
            changes.push(RepackChange {
                id: old.id,
                from_gpu: old.gpu,
                from: old.rectangle,
                to_gpu: new.gpu,
                to: new.rectangle,
            });
        }
    }
    changes.sort_unstable_by_key(|change| change.id);
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{QuotaRange, ResourceSpec};

    #[test]
    fn a_share_asks_for_what_it_guarantees_and_for_some_time_in_any_case() {
        let sm = |percent| SmShare::from_percent(percent).unwrap();
        let time = QuotaRange::new(Quota::from_percent(50).unwrap(), Quota::WHOLE).unwrap();
        let demand = Demand::from(&GpuShare::new(time, sm(30), sm(60), Some(Bytes(7))).unwrap());
        let asked = (demand.quota, demand.sm, demand.limit(), demand.memory);
        assert_eq!(asked, (time.request(), sm(30), sm(60), Bytes(7)));
        assert_eq!(Demand::from(&GpuShare::from(ResourceSpec::UNLIMITED)).quota.get(), 1);
    }
}
