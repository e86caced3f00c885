//! A store's arenas, models and clients, for comparing its books with those of a daemon or a packer.
//!
//! Sizes are those of files and of GPU allocations, in bytes: what the store has asked the system for, whether or not each page of it
//! was touched.

use crate::store::{Access, MemoryTier};
use gshare_core::ArenaId;

/// Most models of a status.
pub const MAX_MODELS: usize = 1_024;
/// Most uses of a status: those of some 200 uids.
pub const MAX_USES: usize = 1_024;

/// A store's arenas, models and clients.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// Clients that are connected.
    pub clients: u64,
    /// Memory of each tier; the GPU's first.
    pub tiers: Vec<TierStatus>,
    /// Models that the client may read, by name and owner; no more than [`MAX_MODELS`].
    pub models: Vec<ModelStatus>,
    /// Models that the client may read and that are not in `models`.
    pub models_left_out: u64,
    /// Resources that the client's uid has, or each uid where the operator asks; no more than [`MAX_USES`].
    pub uses: Vec<Use>,
}

/// Memory of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct TierStatus {
    /// The tier of memory.
    pub tier: MemoryTier,
    /// Bytes that its arenas may have together.
    pub capacity_bytes: u64,
    /// Bytes of all arenas that have memory, those on their way out included; a multiple of 2 MiB.
    pub arena_bytes: u64,
    /// The part of `arena_bytes` that is on its way out: no model has it any more.
    pub leaving_bytes: u64,
    /// Bytes of the manifests of arenas that are complete, which lie behind the arenas or in files of their own.
    pub manifest_bytes: u64,
    /// Number of arenas that have memory.
    pub arenas: u64,
}

/// A model and its arenas.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct ModelStatus {
    /// Its name, which is its owner's.
    pub name: String,
    /// The uid that put it.
    pub owner_uid: u32,
    /// The clients that may read it.
    pub access: Access,
    /// Its arenas; none where it is on disk only.
    pub arenas: Vec<ArenaStatus>,
}

/// An arena of a model. Models of the same content have the same arena, whose bytes are there once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct ArenaStatus {
    /// The tier of memory.
    pub tier: MemoryTier,
    /// Number of the arena, by which one that several models have is counted once.
    pub arena: ArenaId,
    /// Bytes of memory, 0 before it has any.
    pub bytes: u64,
    /// References of clients.
    pub references: u64,
}

/// The part of a resource that a uid has.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Use {
    /// The uid.
    pub uid: u32,
    /// Name of the resource: see [`Resource::name`](crate::bounds::Resource::name).
    pub resource: String,
    /// How much of it the uid has.
    pub held: u64,
    /// How much of it one uid may have that is not the operator's.
    pub per_uid: u64,
    /// How much of it all uids may have.
    pub total: u64,
}
