//! The model store: the events, actions and errors of every policy.
//!
//! # Problem
//! Many processes need the same weights. A [`ModelStore`] decides which models stand in which memory, who may map them,
//! who loads them and what goes when room is needed (FaST-GShare, section 3.5). It moves no bytes: it orders a shell to.
//!
//! # Terms
//! - **model**: a name for content, with an owner, an [`Access`] and, perhaps, a source on disk to load it from again;
//! - **arena**: memory of one [`MemoryTier`] that holds the content of one or more models (equal content is stored once);
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
//! On its way out of the GPU, what is in no host memory may be copied there: `Load` from `LoadFrom::Gpu` comes first, and the
//! `Evict` of its source after it, whether it succeeds or not.
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

/// A memory that arenas live in. Disk is no tier of arenas: it is where models with a source are loaded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryTier {
    /// Memory of the GPU (or MIG instance) that the store serves.
    Gpu,
    /// Memory of the host, pinned where a GPU loads from it.
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
    /// Its owner.
    #[default]
    Private,
    /// Its owner, and the clients of the group it was stored for.
    Group,
    /// Every client may read it.
    Public,
}

gshare_core::config! {
    /// Bounds on the bytes, models and loads of a tenant. The default is no limit.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct StoreLimits {
        /// Memory of the arenas that are charged to it, over all tiers.
        pub bytes: Bytes = Bytes(u64::MAX);
        /// Number of arenas that are charged to it.
        pub models: u32 = u32::MAX;
        /// Least time between two loads (or puts) that it causes, on average; 0 is no limit.
        #[serde(rename = "load_interval_ns")]
        pub load_interval: Duration = Duration::ZERO;
        /// How many of them may come at once; at least 1.
        pub load_burst: u32 = 1;
    }
}

/// Where the bytes of a load come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoadFrom {
    /// The model's source.
    Disk,
    /// A committed arena of host memory, which stays until the load is done.
    Host(ArenaId),
    /// An arena of GPU memory that is on its way out: no client holds it, and it goes when the load is done.
    Gpu(ArenaId),
}

/// The event itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum StoreEvent {
    /// A client is here.
    ClientJoined {
        client: ClientId,
        /// The tenant that the client belongs to; the kernel says so, not the client.
        tenant: TenantId,
        /// Its group, likewise.
        group: GroupId,
        /// May pin and evict everybody's models, and read all of them.
        admin: bool,
    },
    /// A client is gone, with its references, its requests and what it was writing.
    ClientLeft { client: ClientId },
    /// The limits of a tenant from now on; no model is evicted because of a lower limit.
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
        /// The clients that may read it.
        access: Access,
        /// Memory it needs; more than 0.
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
        /// The tier of memory it should be in.
        tier: MemoryTier,
        /// Until when it waits for a load.
        #[serde(rename = "deadline_ns")]
        deadline: Timestamp,
    },
    /// A client wants to write a new model.
    PutBegun {
        /// The client that asks; the owner of the model, whose group is the model's.
        client: ClientId,
        /// The request; answered by `Write` or `Refuse`.
        ticket: TicketId,
        /// Its name, new to the store.
        model: ModelId,
        /// The tier of memory to write to.
        tier: MemoryTier,
        /// Memory it needs; more than 0.
        bytes: Bytes,
        /// The clients that may read it.
        access: Access,
    },
    /// The writer is done.
    PutCommitted {
        client: ClientId,
        /// The request; answered by `Stored` or `Refuse`.
        ticket: TicketId,
        arena: ArenaId,
    },
    /// The writer gives up.
    PutAborted { client: ClientId, arena: ArenaId },
    /// A `Load` or a `Seal` was carried out, and this is what the arena holds.
    Loaded {
        arena: ArenaId,
        /// Hash of the content that the arena holds.
        content: ContentHash,
    },
    /// A `Load` or a `Seal` failed.
    LoadFailed { arena: ArenaId },
    /// A client gives back one reference.
    Released { client: ClientId, arena: ArenaId },
    /// Keep a model in memory once it is there, or no longer.
    PinAsked {
        /// The client that asks; the model's owner or an admin.
        client: ClientId,
        /// The request; answered by `Done` or `Refuse`.
        ticket: TicketId,
        /// The model to pin, or to unpin.
        model: ModelId,
        /// Whether to keep it.
        pinned: bool,
    },
    /// Take a model out of memory. One without a source is gone with that.
    EvictAsked {
        /// The client that asks; the model's owner or an admin.
        client: ClientId,
        /// The request; answered by `Done` or `Refuse`.
        ticket: TicketId,
        model: ModelId,
        /// Forget its source, too, so that its name is free.
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
    /// Take memory and load the model into it; answer with `Loaded` or `LoadFailed`.
    Load {
        /// Name of the new arena.
        arena: ArenaId,
        model: ModelId,
        /// Where to.
        tier: MemoryTier,
        /// Where from.
        from: LoadFrom,
    },
    /// Take memory and let the client write it.
    Write {
        ticket: TicketId,
        client: ClientId,
        /// Name of the new arena.
        arena: ArenaId,
        model: ModelId,
        /// The tier of memory to write to.
        tier: MemoryTier,
    },
    /// End all writing, check what was written; answer with `Loaded` or `LoadFailed`.
    Seal { arena: ArenaId },
    /// Let the client map the arena: it has one reference more.
    Serve { ticket: TicketId, client: ClientId, arena: ArenaId, model: ModelId },
    /// A put is complete.
    Stored {
        ticket: TicketId,
        client: ClientId,
        /// Where the model is: what was written, or an arena that held the same already.
        arena: ArenaId,
        model: ModelId,
    },
    /// A pin or an eviction is done.
    Done { ticket: TicketId, client: ClientId },
    /// Free the memory; answer with `Evicted`.
    Evict { arena: ArenaId },
    /// The name is free again.
    Forgotten { model: ModelId },
    /// The request is not granted.
    Refuse {
        ticket: TicketId,
        client: ClientId,
        /// Why it is refused.
        reason: RefuseReason,
    },
}

/// Why a request is not granted.
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
    /// A put names a model that is there.
    #[error("the name is taken")]
    NameTaken,
    /// The model is larger than the tier, or the store has no such tier.
    #[error("the model is larger than the memory of the tier")]
    ModelTooLarge,
    /// Every model in memory is referenced, pinned or without a source to load it from again.
    #[error("the store is full: what is in it is in use, pinned or has no source to load it from again")]
    StoreFull,
    /// The bytes of the model's owner.
    #[error("the owner's limit of bytes would be passed")]
    TenantBytes,
    /// The models of the model's owner.
    #[error("the owner's limit of models would be passed")]
    TenantModels,
    /// The loads of the client's tenant.
    #[error("too many loads in a short time")]
    TenantLoads,
    /// The model is not in this tier and there is nothing to load it from.
    #[error("the model is not in this memory, and there is nothing to load it from")]
    NotResident,
    /// The load failed, or what was written was refused.
    #[error("the load failed, or what was written is not a model")]
    LoadFailed,
    /// The model was not there in time.
    #[error("not there in time")]
    TimedOut,
    /// A client holds it, or it is being loaded.
    #[error("the model is in use")]
    InUse,
    /// The store knows as many models as it may.
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
    /// A size that cannot be.
    #[error("bytes of {model} is {bytes}: need more than 0 and at most 256 TiB")]
    BadBytes { model: ModelId, bytes: Bytes },
    /// A limit that cannot be.
    #[error("load_burst of {tenant} is 0: need at least 1")]
    BadLimits { tenant: TenantId },
    /// No such arena (any more), or not in the state that the event is about.
    #[error("{arena} is not {expected}")]
    WrongState { arena: ArenaId, expected: &'static str },
    /// The client has no reference to the arena, or does not write it.
    #[error("{client} does not hold {arena}")]
    NotHeld { client: ClientId, arena: ArenaId },
}

/// Where a model stands in a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ArenaState {
    /// Without memory: waiting for room.
    Empty,
    /// Being loaded or written, or checked after that; no client reads it.
    Loading,
    /// Complete, and never written again.
    Committed,
    /// On its way out.
    Evicting,
}

/// The state of one of a store's arenas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct ArenaView {
    pub arena: ArenaId,
    /// Where it is.
    pub tier: MemoryTier,
    /// How large.
    pub bytes: Bytes,
    pub state: ArenaState,
    /// References of clients.
    pub references: u64,
    pub charged: TenantId,
    /// How many models it holds.
    pub names: u32,
}

impl ArenaView {
    /// An arena that no client refers to.
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

/// Decides what is kept in memory, and for which tenants. See the [module](self) for the contract.
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
