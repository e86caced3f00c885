//! Packing: which GPU a demand goes to, and which part of it.
//!
//! # Problem
//! A pool of GPUs, and demands that come and go one by one. A demand asks for a share of GPU time ([`Quota`]), a
//! share of the SMs ([`SmShare`]) and memory ([`Bytes`]). A [`Packer`] decides where each goes, so that few GPUs
//! are in use and no GPU promises more than it has.
//!
//! # Terms
//! - *demand*: what is asked ([`Demand`]); *placement*: where it went ([`Placement`]);
//! - *rectangle*: the part of a GPU that a placement holds ([`Rectangle`]): time runs along x, SMs along y
//!   (FaST-GShare, section 3.4.2). Dilu's packer keeps sums only and leaves the offsets at zero;
//! - *gang*: demands that need one GPU each, all different, or nothing at all (Dilu, Algorithm 1: `n_j`).
//!
//! # Contract of [`Packer`]
//! - `Err` means that nothing changed.
//! - Equal calls give equal answers on every machine.
//! - A [`PlacementId`] is answered once: after [`Packer::release`] it is stale, and a stale id is an error.
//! - The packer never moves a placement to another GPU unasked. It may move it *inside* its GPU, which moves no
//!   process (a rectangle's offsets are virtual: the MPS percentage reserves no particular SMs, and x is an offset in
//!   the window); [`Placed::rearranged`] says so.
//! - [`Packer::version`] grows with every change, so a plan made earlier is recognised as stale.

use crate::ids::{FunctionId, GpuId, PlacementId};
use crate::units::{Bytes, Quota, SmShare};

/// What a demand runs; Dilu places the three differently (Dilu, section 3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
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

/// What is asked of one GPU.
///
/// ```
/// use gshare_core::pack::Demand;
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
    /// GPU memory it needs.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes", default))]
    pub memory: Bytes,
    /// The function it is an instance of, for affinity.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub function: Option<FunctionId>,
    /// Members of one group never share a GPU.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub apart: Option<u32>,
    /// What it runs.
    #[cfg_attr(feature = "serde", serde(default))]
    pub workload: Workload,
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

    /// The same with `memory` of GPU memory.
    #[must_use]
    pub const fn with_memory(self, memory: Bytes) -> Self {
        Self { memory, ..self }
    }

    /// The same with a limit on SMs above the request (Dilu's `<request, limit>`).
    #[must_use]
    pub const fn with_sm_limit(self, limit: SmShare) -> Self {
        Self { sm_limit: Some(limit), ..self }
    }

    /// The same as an instance of `function`.
    #[must_use]
    pub const fn with_function(self, function: FunctionId) -> Self {
        Self { function: Some(function), ..self }
    }

    /// The same in a group whose members never share a GPU.
    #[must_use]
    pub const fn with_apart(self, group: u32) -> Self {
        Self { apart: Some(group), ..self }
    }

    /// The same running `workload`.
    #[must_use]
    pub const fn with_workload(self, workload: Workload) -> Self {
        Self { workload, ..self }
    }

    /// Most of the SMs it may use: `sm_limit`, or `sm` without one.
    pub fn limit(&self) -> SmShare {
        self.sm_limit.unwrap_or(self.sm)
    }

    /// Refuses a demand that asks for nothing or whose limit is below its request.
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
    /// Width: how much GPU time a window has.
    #[cfg_attr(feature = "serde", serde(rename = "quota_bp", default = "whole_quota"))]
    pub quota: Quota,
    /// Height: how many SMs there are.
    #[cfg_attr(feature = "serde", serde(rename = "sm_bp", default = "whole_sm"))]
    pub sm: SmShare,
    /// Memory for placements.
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
    /// Where its time begins in the window (x).
    #[cfg_attr(feature = "serde", serde(rename = "time_offset_bp"))]
    pub time_offset: Quota,
    /// Where its SMs begin (y).
    #[cfg_attr(feature = "serde", serde(rename = "sm_offset_bp"))]
    pub sm_offset: SmShare,
    /// Its share of the window (width).
    #[cfg_attr(feature = "serde", serde(rename = "quota_bp"))]
    pub quota: Quota,
    /// Its share of the SMs (height).
    #[cfg_attr(feature = "serde", serde(rename = "sm_bp"))]
    pub sm: SmShare,
}

/// Where a demand went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Placement {
    /// Its name; stale after release.
    pub id: PlacementId,
    /// The GPU.
    pub gpu: GpuId,
    /// The part of the GPU.
    pub rectangle: Rectangle,
    /// What was asked.
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
    /// Where it went.
    pub placement: Placement,
    /// Whether other placements of that GPU got new rectangles to make room. No process moves, but whoever keeps
    /// the rectangles (a slot table) must read them again.
    pub rearranged: bool,
}

impl Placed {
    /// A placement that moved no other.
    pub const fn new(placement: Placement) -> Self {
        Self { placement, rearranged: false }
    }
}

/// How a placement changes under a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RepackChange {
    /// Which placement. Its id stays.
    pub id: PlacementId,
    /// GPU it leaves.
    pub from_gpu: GpuId,
    /// Rectangle it leaves.
    pub from: Rectangle,
    /// GPU it goes to; the same one for a change in place, which moves no process.
    pub to_gpu: GpuId,
    /// Rectangle it goes to.
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
    /// [`Packer::version`] it was made at.
    pub version: u64,
    /// What changes, by placement id. They hold together: all or none.
    pub changes: Vec<RepackChange>,
    /// GPUs that become empty.
    pub emptied: Vec<GpuId>,
    /// Placements that should have moved but found no room (of a drain).
    pub stuck: Vec<PlacementId>,
}

impl RepackPlan {
    /// How many placements change their GPU.
    pub fn moves(&self) -> usize {
        self.changes.iter().filter(|change| !change.in_place()).count()
    }
}

/// One GPU as a packer sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct GpuStatus {
    /// The GPU.
    pub gpu: GpuId,
    /// Its size.
    pub spec: GpuSpec,
    /// Whether it takes no new placements.
    pub cordoned: bool,
    /// How many placements it holds.
    pub placements: u32,
    /// Memory held by them.
    #[cfg_attr(feature = "serde", serde(rename = "memory_used_bytes"))]
    pub memory_used: Bytes,
    /// Quota times SM share held by them, in basis points squared (a whole GPU is 10^8).
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PackError {
    /// A size is zero.
    #[error("{field} is zero: a demand or a GPU has at least one basis point of it")]
    ZeroSize {
        /// Which field.
        #[cfg_attr(feature = "serde", serde(skip_deserializing))]
        field: &'static str,
    },
    /// `sm_limit` is below `sm`.
    #[error("the SM limit ({limit}) is below the request ({request})")]
    LimitBelowRequest {
        /// What is guaranteed.
        request: SmShare,
        /// What was given as the limit.
        limit: SmShare,
    },
    /// No GPU of the pool is large enough, even empty.
    #[error("{quota} of the time on {sm} of the SMs with {memory} is more than any GPU of the pool has")]
    NeverFits {
        /// Time asked.
        quota: Quota,
        /// SMs asked.
        sm: SmShare,
        /// Memory asked.
        memory: Bytes,
    },
    /// Some GPU is large enough, but none has room now.
    #[error("no GPU has {quota} of the time on {sm} of the SMs free")]
    NoRoom {
        /// Time asked.
        quota: Quota,
        /// SMs asked.
        sm: SmShare,
    },
    /// There is room for the rectangle, but on no GPU with enough free memory.
    #[error("no GPU with room has {memory} of memory free")]
    Memory {
        /// Memory asked.
        memory: Bytes,
    },
    /// It would need another GPU, and the limit on GPUs in use is reached.
    #[error("it needs another GPU, and the limit of {limit} GPUs in use is reached")]
    GpuLimit {
        /// The limit.
        limit: u32,
    },
    /// The packer's tables end below this id.
    #[error("{gpu} is beyond the last id that the packer keeps ({last})")]
    GpuIdTooLarge {
        /// The id given.
        gpu: GpuId,
        /// The largest id.
        last: GpuId,
    },
    /// No such GPU in the pool.
    #[error("{gpu} is not in the pool")]
    UnknownGpu {
        /// The id given.
        gpu: GpuId,
    },
    /// A GPU of this id is in the pool.
    #[error("{gpu} is already in the pool")]
    GpuExists {
        /// The id given.
        gpu: GpuId,
    },
    /// The GPU still holds placements.
    #[error("{gpu} still holds {placements} placements: release or move them first")]
    GpuInUse {
        /// The GPU.
        gpu: GpuId,
        /// How many.
        placements: u32,
    },
    /// The placement was released, or never made.
    #[error("{id} is not a placement (any more)")]
    UnknownPlacement {
        /// The id given.
        id: PlacementId,
    },
    /// The rectangle is not inside the GPU, or not of the demand's size.
    #[error("the rectangle is not inside {gpu} or not of the size that the demand asks")]
    BadRectangle {
        /// The GPU.
        gpu: GpuId,
    },
    /// The rectangle, or the room for it, is taken.
    #[error("the place on {gpu} is taken")]
    Occupied {
        /// The GPU.
        gpu: GpuId,
    },
    /// The plan was made for another version of the packer, or does not match its placements.
    #[error("the plan is for version {planned}, the packer is at {current}")]
    StalePlan {
        /// Version of the plan.
        planned: u64,
        /// Version of the packer.
        current: u64,
    },
    /// A batch or gang does not fit whole.
    #[error("demand {index} of the batch does not fit: {reason}")]
    Batch {
        /// Which demand, counted from 0.
        index: usize,
        /// Why.
        reason: Box<PackError>,
    },
    /// A configuration value is out of bounds.
    #[error("configuration: {field} {bounds}")]
    Config {
        /// Which field.
        #[cfg_attr(feature = "serde", serde(skip_deserializing))]
        field: &'static str,
        /// What it must be.
        #[cfg_attr(feature = "serde", serde(skip_deserializing))]
        bounds: &'static str,
    },
    /// A snapshot contradicts itself.
    #[error("the snapshot contradicts itself: {what}")]
    BadSnapshot {
        /// How.
        #[cfg_attr(feature = "serde", serde(skip_deserializing))]
        what: &'static str,
    },
}

/// A policy that places demands on GPUs. See the [module documentation](self) for its contract.
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

    /// A cordoned GPU keeps its placements and takes no new ones, except by [`Packer::place_at`].
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`].
    fn set_cordoned(&mut self, gpu: GpuId, cordoned: bool) -> Result<(), PackError>;

    /// The GPU that [`Packer::place`] would choose now.
    ///
    /// # Errors
    /// As [`Packer::place`].
    fn probe(&self, demand: &Demand) -> Result<GpuId, PackError>;

    /// Places a demand on one GPU.
    ///
    /// # Errors
    /// [`PackError::ZeroSize`], [`PackError::LimitBelowRequest`], [`PackError::NeverFits`], [`PackError::NoRoom`],
    /// [`PackError::Memory`], [`PackError::GpuLimit`].
    fn place(&mut self, demand: &Demand) -> Result<Placed, PackError>;

    /// As [`Packer::place`], on a GPU that `allowed` accepts.
    ///
    /// # Errors
    /// As [`Packer::place`].
    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError>;

    /// Places a demand exactly here: to restore what runs already.
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`], [`PackError::BadRectangle`], [`PackError::Occupied`], [`PackError::Memory`], and
    /// those of an invalid demand.
    fn place_at(&mut self, gpu: GpuId, at: Rectangle, demand: &Demand) -> Result<Placement, PackError>;

    /// Places every demand or none, and appends the answers to `out` in the order of `demands`. The packer may
    /// place them in another order (large ones first), which needs fewer GPUs than one by one.
    ///
    /// # Errors
    /// [`PackError::Batch`].
    fn place_all(&mut self, demands: &[Demand], out: &mut Vec<Placed>) -> Result<(), PackError>;

    /// Places every demand on a GPU of its own, all different, or none.
    ///
    /// # Errors
    /// [`PackError::Batch`].
    fn place_gang(&mut self, demands: &[Demand], out: &mut Vec<Placed>) -> Result<(), PackError>;

    /// Frees a placement and returns what it was.
    ///
    /// # Errors
    /// [`PackError::UnknownPlacement`].
    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError>;

    /// A placement by id; `None` when stale.
    fn placement(&self, id: PlacementId) -> Option<Placement>;

    /// Visits every placement, by GPU id, then arrival.
    fn placements(&self, visit: &mut dyn FnMut(&Placement));

    /// Visits the placements of one GPU, by arrival.
    fn placements_on(&self, gpu: GpuId, visit: &mut dyn FnMut(&Placement));

    /// Visits every GPU, by id.
    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus));

    /// One GPU.
    fn gpu(&self, gpu: GpuId) -> Option<GpuStatus>;

    /// Grows with every change.
    fn version(&self) -> u64;

    /// How to use fewer GPUs, in at most `max_moves` moves between GPUs. Changes nothing; an empty plan when there
    /// is nothing to gain.
    fn plan_repack(&self, max_moves: usize) -> RepackPlan;

    /// How to empty `gpu`. What finds no room elsewhere is listed as stuck.
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`].
    fn plan_drain(&self, gpu: GpuId) -> Result<RepackPlan, PackError>;

    /// Carries out a plan: all of it, or nothing.
    ///
    /// # Errors
    /// [`PackError::StalePlan`] when anything changed since the plan was made or the plan does not match.
    fn apply(&mut self, plan: &RepackPlan) -> Result<(), PackError>;
}
