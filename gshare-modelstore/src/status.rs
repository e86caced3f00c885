//! A store's arenas, models and clients, for comparison with the books of a daemon or a packer.
//!
//! Sizes are the sizes of files and GPU allocations in bytes, whether or not each page was touched.

use crate::store::{Access, MemoryTier};
use gshare_core::ArenaId;

/// Most models of a status.
pub const MAX_MODELS: usize = 1_024;
/// Most uses in a status: enough for some 200 uids.
pub const MAX_USES: usize = 1_024;

/// A store's arenas, models and clients.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// Number of connected clients.
    pub clients: u64,
    /// Memory of each tier, the GPU's first.
    pub tiers: Vec<TierStatus>,
    /// Models that the client may read, by name and owner; at most [`MAX_MODELS`].
    pub models: Vec<ModelStatus>,
    /// Number of readable models beyond `models`.
    pub models_left_out: u64,
    /// Resources of the client's uid, or of each uid for the operator; at most [`MAX_USES`].
    pub uses: Vec<Use>,
}

/// Memory of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct TierStatus {
    /// The tier of memory.
    pub tier: MemoryTier,
    /// Bytes that the tier can hold.
    pub capacity_bytes: u64,
    /// Bytes of all arenas with memory, evicting ones included; a multiple of 2 MiB.
    pub arena_bytes: u64,
    /// Bytes of evicting arenas, which no model uses any more; included in `arena_bytes`.
    pub leaving_bytes: u64,
    /// Bytes of the manifests of complete arenas, behind the arenas or in separate files.
    pub manifest_bytes: u64,
    /// Number of arenas with memory.
    pub arenas: u64,
}

/// A model and its arenas.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct ModelStatus {
    /// Name of the model, unique for its owner.
    pub name: String,
    /// Uid that put the model.
    pub owner_uid: u32,
    /// Clients that may read the model.
    pub access: Access,
    /// Arenas of the model; none if it is only on disk.
    pub arenas: Vec<ArenaStatus>,
}

/// An arena of a model. Models with the same content share one arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct ArenaStatus {
    /// The tier of memory.
    pub tier: MemoryTier,
    /// Number of the arena, by which an arena of several models can be counted once.
    pub arena: ArenaId,
    /// Bytes of memory; 0 while it waits for memory.
    pub bytes: u64,
    /// Number of client references.
    pub references: u64,
}

/// The amount of a resource that a uid holds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Use {
    /// The uid.
    pub uid: u32,
    /// Name of the resource: see [`Resource::name`](crate::bounds::Resource::name).
    pub resource: String,
    /// Amount that the uid holds.
    pub held: u64,
    /// Bound for one tenant.
    pub per_uid: u64,
    /// Bound for all uids.
    pub total: u64,
}
