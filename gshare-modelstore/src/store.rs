//! The model store: the events, actions and errors of every policy.
//!
//! # Problem
//! Many processes need the same weights. A [`ModelStore`] decides on the models in each kind of memory, the clients that
//! may map them, the loads, and the evictions for room (FaST-GShare, section 3.5). It moves no bytes, but orders a shell to
//! do so.
//!
//! # Terms
//! - **model**: a name for content, with an owner, an [`Access`] and optionally a source on disk for reloads;
//! - **arena**: memory of one [`MemoryTier`] with the content of one or more models (equal content is stored once);
//! - **reference**: a client's counted right to a committed arena, from `Serve` until `Released` or `ClientLeft`;
//! - **ticket**: one request of a client; answered exactly once, unless its client leaves first.
//!
//! # Life of an arena
//! ```text
//! Empty ─▶ Loading ─▶ Committed ─▶ Evicting ─▶ gone
//!   │         └─ failed, aborted, duplicate ─▶ Evicting ─▶ gone
//!   └─ given up before there was room ─▶ gone
//!
//! Asked ─▶ [Evict* ─▶ Evicted*] ─▶ Load ─▶ Loaded ─▶ Serve to all who asked meanwhile
//!                                     └─▶ LoadFailed ─▶ Refuse to all of them, Evict
//! PutBegun ─▶ [Evict*, Evicted*] ─▶ Write ─▶ PutCommitted ─▶ Seal ─▶ Loaded ─▶ Stored
//!                                     └─▶ PutAborted, ClientLeft, too late ─▶ Evict
//! ```
//! An arena that leaves the GPU may first be copied to host memory, if that lacks its models: `Load` from `LoadFrom::Gpu`
//! comes first, and the `Evict` of its source afterwards, whether the load succeeds or not.
//!
//! A shell carries actions out in order. It answers each `Load` and each `Seal` with `Loaded` or `LoadFailed`, and each
//! `Evict` with `Evicted` once the memory is free. An arena is never written after `Seal` or `Loaded`.

use core::fmt;
use core::str::FromStr;
use gshare_core::{
    ArenaId, Bytes, ClientId, Duration, Engine, GroupId, ModelId, TenantId, TicketId, TimeWentBack, Timestamp,
};

/// The content of a model: a 256-bit hash over its tensors. Equal hashes are taken for equal content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContentHash(pub [u8; 32]);

/// 64 hexadecimal digits.
impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl From<ContentHash> for String {
    fn from(hash: ContentHash) -> Self {
        hash.to_string()
    }
}

impl TryFrom<String> for ContentHash {
    type Error = ParseHashError;
    fn try_from(text: String) -> Result<Self, ParseHashError> {
        text.parse()
    }
}

/// The text is no content hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a content hash: need 64 hexadecimal digits")]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct ParseHashError {
    pub text: String,
}

impl FromStr for ContentHash {
    type Err = ParseHashError;
    fn from_str(text: &str) -> Result<Self, ParseHashError> {
        let error = || ParseHashError { text: text.chars().take(80).collect() };
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(error());
        }
        let mut hash = [0; 32];
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = core::str::from_utf8(digits).map_err(|_| error())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| error())?;
        }
        Ok(Self(hash))
    }
}

/// A kind of memory for arenas. Disk is not a tier, but the source of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryTier {
    /// Memory of the GPU (or MIG instance) that the store serves.
    Gpu,
    /// Memory of the host, page-locked if a GPU loads from it.
    Host,
}

impl MemoryTier {
    /// All tiers, the nearest to the GPU first.
    pub const ALL: [Self; 2] = [Self::Gpu, Self::Host];
}

/// The clients that may read a model.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Access {
    /// Only the owner.
    #[default]
    Private,
    /// The owner, and clients of the model's group.
    Group,
    /// All clients.
    Public,
}

gshare_core::config! {
    /// Bounds on the bytes, models and loads of a tenant. The default is no limit.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct StoreLimits {
        /// Memory of the arenas charged to the tenant, over all tiers.
        pub bytes: Bytes = Bytes(u64::MAX);
        /// Number of arenas charged to the tenant.
        pub models: u32 = u32::MAX;
        /// Least mean time between two loads or puts that the tenant causes; 0 is no limit.
        #[serde(rename = "load_interval_ns")]
        pub load_interval: Duration = Duration::ZERO;
        /// Most loads or puts at once; at least 1.
        pub load_burst: u32 = 1;
    }
}

/// Source of the bytes of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoadFrom {
    /// The model's source.
    Disk,
    /// A committed arena of host memory, which stays during the load.
    Host(ArenaId),
    /// An evicting arena of GPU memory, without clients, which is freed after the load.
    Gpu(ArenaId),
}

/// The event itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum StoreEvent {
    /// A client has connected.
    ClientJoined {
        client: ClientId,
        /// The client's tenant, as the kernel reports it.
        tenant: TenantId,
        /// The client's group, as the kernel reports it.
        group: GroupId,
        /// Whether the client may read, pin and evict all models.
        admin: bool,
    },
    /// A client has left, which ends its references, its requests and its writes.
    ClientLeft { client: ClientId },
    /// Sets the limits of a tenant. A lower limit evicts no model by itself.
    TenantLimited {
        tenant: TenantId,
        /// The tenant's limits.
        limits: StoreLimits,
    },
    /// A model with a source on disk.
    ModelAdded {
        model: ModelId,
        owner: TenantId,
        group: GroupId,
        /// Clients that may read the model.
        access: Access,
        /// Memory of the model; more than 0.
        bytes: Bytes,
        /// Time to load it from its source.
        #[serde(rename = "reload_ns")]
        reload: Duration,
    },
    /// A client wants a reference to a model in a tier.
    Asked {
        client: ClientId,
        ticket: TicketId,
        model: ModelId,
        /// Tier of memory.
        tier: MemoryTier,
        /// End of the wait for a load.
        #[serde(rename = "deadline_ns")]
        deadline: Timestamp,
    },
    /// A client wants to write a new model.
    PutBegun {
        /// The client that asks, and the owner of the model; the model gets its group.
        client: ClientId,
        /// The request; answered by `Write` or `Refuse`.
        ticket: TicketId,
        /// The model's number, new to the store.
        model: ModelId,
        /// The tier of memory to write to.
        tier: MemoryTier,
        /// Memory of the model; more than 0.
        bytes: Bytes,
        /// Clients that may read the model.
        access: Access,
    },
    /// The client has finished writing.
    PutCommitted {
        client: ClientId,
        /// The request; answered by `Stored` or `Refuse`.
        ticket: TicketId,
        arena: ArenaId,
    },
    /// The client gives its write up.
    PutAborted { client: ClientId, arena: ArenaId },
    /// A `Load` or a `Seal` was carried out; the arena holds this content.
    Loaded {
        arena: ArenaId,
        /// Hash of the content that the arena holds.
        content: ContentHash,
    },
    /// A `Load` or a `Seal` failed.
    LoadFailed { arena: ArenaId },
    /// A client gives back one reference.
    Released { client: ClientId, arena: ArenaId },
    /// Pins a model in memory, or unpins it.
    PinAsked {
        /// The client that asks; the model's owner or an admin.
        client: ClientId,
        /// The request; answered by `Done` or `Refuse`.
        ticket: TicketId,
        /// The model to pin, or to unpin.
        model: ModelId,
        /// Whether to pin it.
        pinned: bool,
    },
    /// Evicts a model from memory. A model without a source is lost then.
    EvictAsked {
        /// The client that asks; the model's owner or an admin.
        client: ClientId,
        /// The request; answered by `Done` or `Refuse`.
        ticket: TicketId,
        model: ModelId,
        /// Whether to forget its source too, so that its name becomes free.
        forget: bool,
    },
    /// An `Evict` was carried out: the memory is free.
    Evicted { arena: ArenaId },
    /// [`Engine::next_deadline`] has come.
    DeadlineReached,
}

/// An order of the store's engine for its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum StoreAction {
    /// Allocate memory and load the model into it; answer with `Loaded` or `LoadFailed`.
    Load {
        /// Name of the new arena.
        arena: ArenaId,
        model: ModelId,
        /// Tier of the arena.
        tier: MemoryTier,
        /// Source of the bytes.
        from: LoadFrom,
    },
    /// Allocate memory and let the client write to it.
    Write {
        ticket: TicketId,
        client: ClientId,
        /// Name of the new arena.
        arena: ArenaId,
        model: ModelId,
        /// The tier of memory to write to.
        tier: MemoryTier,
    },
    /// End all writing and check the content; answer with `Loaded` or `LoadFailed`.
    Seal { arena: ArenaId },
    /// Let the client map the arena, to which it has one more reference.
    Serve { ticket: TicketId, client: ClientId, arena: ArenaId, model: ModelId },
    /// A put is complete.
    Stored {
        ticket: TicketId,
        client: ClientId,
        /// The arena with the model: the written arena, or an older arena with the same content.
        arena: ArenaId,
        model: ModelId,
    },
    /// A pin or an eviction is done.
    Done { ticket: TicketId, client: ClientId },
    /// Free the memory; answer with `Evicted`.
    Evict { arena: ArenaId },
    /// The name is free again.
    Forgotten { model: ModelId },
    /// The request is refused.
    Refuse {
        ticket: TicketId,
        client: ClientId,
        /// Reason for the refusal.
        reason: RefuseReason,
    },
}

/// Why a request is refused.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RefuseReason {
    /// No such model.
    #[error("no such model")]
    UnknownModel,
    /// The model is not for this client.
    #[error("not allowed to do this with the model")]
    NotAllowed,
    /// The put uses the name of an existing model.
    #[error("the name is taken")]
    NameTaken,
    /// The model is larger than the tier, or the store has no such tier.
    #[error("the model is larger than the memory of the tier")]
    ModelTooLarge,
    /// Every model in memory is referenced, pinned or without a source to load it from again.
    #[error("the store is full: each model in it is in use, pinned or without a source for a reload")]
    StoreFull,
    /// The limit of bytes of the model's owner.
    #[error("the owner's limit of bytes would be passed")]
    TenantBytes,
    /// The limit of models of the model's owner.
    #[error("the owner's limit of models would be passed")]
    TenantModels,
    /// The limit of loads of the client's tenant.
    #[error("too many loads in a short time")]
    TenantLoads,
    /// The model is not in this tier and has no source.
    #[error("the model is not in this memory, and there is nothing to load it from")]
    NotResident,
    /// The load failed, or the written content is not a model.
    #[error("the load failed, or the written content is not a model")]
    LoadFailed,
    /// The deadline passed before the load ended.
    #[error("not there in time")]
    TimedOut,
    /// A client holds the model, or it is being loaded.
    #[error("the model is in use")]
    InUse,
    /// The store is at its limit of models.
    #[error("the store knows as many models as it may")]
    TooManyModels,
}

/// Why an event was refused. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum StoreError {
    /// `now` is earlier than before.
    #[error(transparent)]
    TimeWentBack(#[from] TimeWentBack),
    /// The client is here already.
    #[error("{client} is already here")]
    ClientExists { client: ClientId },
    /// No such client (any more).
    #[error("unknown {client}")]
    UnknownClient { client: ClientId },
    /// More clients than configured.
    #[error("more than {limit} clients")]
    TooManyClients { limit: u32 },
    /// The ticket is in use.
    #[error("{ticket} is in use")]
    DuplicateTicket { ticket: TicketId },
    /// The model is known already.
    #[error("{model} is already known")]
    ModelExists { model: ModelId },
    /// More models than configured.
    #[error("more than {limit} models")]
    TooManyModels { limit: u32 },
    /// The size is out of bounds.
    #[error("bytes of {model} is {bytes}: need more than 0 and at most 256 TiB")]
    BadBytes { model: ModelId, bytes: Bytes },
    /// The limit is out of bounds.
    #[error("load_burst of {tenant} is 0: need at least 1")]
    BadLimits { tenant: TenantId },
    /// The arena is unknown, or not in the state that the event requires.
    #[error("{arena} is not {expected}")]
    WrongState { arena: ArenaId, expected: &'static str },
    /// The client has no reference to the arena, or does not write it.
    #[error("{client} does not hold {arena}")]
    NotHeld { client: ClientId, arena: ArenaId },
}

/// State of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ArenaState {
    /// Waiting for memory.
    Empty,
    /// Being loaded, written or checked; no client reads it.
    Loading,
    /// Complete, and never written again.
    Committed,
    /// Waiting for its memory to be freed.
    Evicting,
}

/// An arena as callers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct ArenaView {
    pub arena: ArenaId,
    /// Tier of memory.
    pub tier: MemoryTier,
    /// Size in bytes.
    pub bytes: Bytes,
    pub state: ArenaState,
    /// Number of client references.
    pub references: u64,
    pub charged: TenantId,
    /// Number of models with this content.
    pub names: u32,
}

impl ArenaView {
    /// An arena without references.
    pub const fn new(
        arena: ArenaId,
        tier: MemoryTier,
        bytes: Bytes,
        state: ArenaState,
        charged: TenantId,
    ) -> Self {
        Self { arena, tier, bytes, state, references: 0, charged, names: 1 }
    }
}

/// Decides on the models in memory and the tenants they serve. See the [module](self) for the contract.
pub trait ModelStore:
    Engine<Event = StoreEvent, Action = StoreAction, Error = StoreError> + fmt::Debug + Send
{
    /// The arena that holds or will hold the model in a tier.
    fn arena_of(&self, model: ModelId, tier: MemoryTier) -> Option<ArenaId>;

    /// The state of an arena; `None` once it is gone.
    fn arena(&self, arena: ArenaId) -> Option<ArenaView>;

    /// All arenas, in the order of their names.
    fn arenas(&self) -> Vec<ArenaView>;

    /// Whether the client may read the model; `false` when either is unknown.
    fn may_read(&self, client: ClientId, model: ModelId) -> bool;

    /// Bytes that the tier can hold.
    fn capacity(&self, tier: MemoryTier) -> Bytes;

    /// Whether the model is known.
    fn knows(&self, model: ModelId) -> bool;

    /// Hash of the model's content when it was last loaded or written.
    fn content_of(&self, model: ModelId) -> Option<ContentHash>;

    /// Bytes promised to arenas of a tier, those on their way out aside.
    fn promised(&self, tier: MemoryTier) -> Bytes;

    /// Bytes of arenas of a tier that have memory, those on their way out included.
    fn physical(&self, tier: MemoryTier) -> Bytes;
}
