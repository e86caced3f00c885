//! Demands, placements, and the trait of packers.

use core::cmp::Reverse;

use gshare_core::{Bytes, FunctionId, GpuId, GpuShare, PlacementId, Quota, SmShare};

/// The kind of work behind a demand; Dilu places them differently (Dilu, section 3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum Workload {
    /// An instance that answers requests.
    #[default]
    Inference,
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
    /// Memory held by the placements or set aside, in bytes.
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
    /// A batch or gang does not fit whole.
    #[error("demand {index} of the batch does not fit: {reason}")]
    Batch { index: usize, reason: Box<PackError> },
    /// A GPU with more memory than the packer counts.
    #[error("memory of {gpu} is {memory}: need less than {limit}")]
    GpuTooLarge { gpu: GpuId, memory: Bytes, limit: Bytes },
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
/// Seven methods are the policy's own; the others follow from them, and a policy overrides those that it can answer
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

    /// Sets so much of a GPU's memory aside, in place of what was set aside before: for weights that several placements there share
    /// and none of them holds. Placements have the rest.
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`], [`PackError::Memory`].
    fn set_aside(&mut self, gpu: GpuId, memory: Bytes) -> Result<(), PackError>;

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
